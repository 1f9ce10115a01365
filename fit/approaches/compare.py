"""A variant against its base: the factor in compute that the base needs for the variant's loss, with its interval.

Two laws are fitted as one. With F FLOPs per token and D tokens, so that C = F D, the variant has the law L(F, D) of
`laws/gamma.py`, and the base has it at F / kF and D / kD, where kF kD = K (C / C0)^trend is the multiplier.

Clusters (one size and seed of both sides) are few, so intervals are Student's, with the bias-reduced variance and the
degrees of freedom of Bell and McCaffrey (2002); see Pustejovsky and Tipton (2018), arXiv:1601.01981.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import scipy  # its parts are imported at first use: scipy.special takes 0.2 s

from ..allocation.serving import BreakEven, Spread, break_even
from ..errors import Array, InputError
from ..formats import NONE, read_formats
from ..formatting import amount, count, interval, percent, plain_json, scientific
from ..solver.jets import Jet
from ..table import Runs, RunTable, as_table

Interval = tuple[float, float]
Estimated = tuple[float, float | None, float]  # a value, its standard error (None: unknown), degrees of freedom
# Coordinates E, A, alpha, B, beta, gamma, m, trend, w, gap: logs of all but the trend; m is K, w half of kF / kD, gap
# the ratio of E of base to variant. Weak priors (centre, width) determine what a small ladder cannot; each counts as
# one run with the noise of these runs. E and the amplitudes start at shares of the losses. Chosen by hand.
CENTRE = np.log([0.6, 0.2, 0.35, 0.2, 0.35, 1, 1, 1, 1, 1])
WIDTH = np.array([0.5, math.inf, 0.5, math.inf, 0.5, 0.3, math.inf, 0.2, 0.3, math.inf])
NOISE = 5e-3  # of log loss, if no point has two runs; chosen by hand
SURE = 0.01  # E is not shared if p is below this
SEEN, POWER, MOST_SEEDS = 0.02, 0.8, 10_000  # difference to be seen, share of cases, limit of the search
SAME_TOKENS = 1e-3  # tokenizers are the same up to this relative difference of bytes per token
CURVE = 25  # points of a drawn multiplier


@dataclass(frozen=True)
class Multiplier:
    """The multiplier at one budget of the base; 0: the variant never reaches the loss."""

    flops: float
    value: float
    ci: Interval | None
    seconds: float | None  # multiplier of training time
    seconds_ci: Interval | None
    extrapolated: bool


@dataclass
class Comparison:
    """The result of `compare`; `reason` is why there is no interval, empty if there is one."""

    base: str
    variant: str
    multipliers: list[Multiplier]  # at the cheapest run, the middle, the largest run, the targets
    curve: list[Multiplier]  # from the smallest to the largest of these budgets
    trend: float  # d log multiplier / d log C
    trend_ci: Interval | None
    E: str  # shared or free
    gap: float  # E of the base over that of the variant, if free
    p: float | None  # p value of one shared E
    otherwise: Multiplier  # in the middle, with the other choice of E
    more_seeds: int | None  # needed to see a difference of SEEN
    more_runs: int | None
    unit: str
    reason: str
    notes: list[str]
    lifetime: BreakEven | None  # at the base's largest run, if all ran on one device

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and `sentences`, for JSON."""
        return dict(plain_json(asdict(self) | {"sentences": self.sentences}))

    @property
    def sentences(self) -> list[str]:
        """Return sentences on the multiplier, whether the laws share E, and how many more seeds are needed."""
        middle, other, title = self.multipliers[1], self.otherwise, f"{self.variant} against {self.base}"
        multiplier = _with_interval(middle.value, middle.ci)
        answer = f"{title}: at {scientific(middle.flops)} FLOPs of {self.base} the compute multiplier is {multiplier}"
        if middle.value:
            answer += f", so {self.variant} reaches the same loss with {percent(1 / middle.value)} of the FLOPs"
        if middle.seconds:
            answer += f"; the multiplier of seconds is {_with_interval(middle.seconds, middle.seconds_ci)}"
        served = [] if self.lifetime is None else [_over_lifetime(self.base, self.variant, self.lifetime)]
        if self.reason:
            return [f"{answer}. No interval: {self.reason}.", *self.notes, *served]
        growth = [percent(10**slope - 1, True) for slope in (self.trend, *(self.trend_ci or ()))]
        answer += f"; for ten times the compute it changes by {growth[0]} ({' to '.join(growth[1:])})"
        low, high = middle.ci or (0.0, math.inf)
        answer += "; the interval contains 1, so these runs show no difference" if low <= 1 <= high else ""
        needed = f"more than {MOST_SEEDS:,} seeds" if self.more_seeds is None else "these runs"
        if self.more_seeds:
            needed = f"{self.more_seeds} more seed{'s' * (self.more_seeds > 1)} ({self.more_runs} runs)"
        return [
            f"{answer}.",
            f"The laws {'share one E' if self.E == 'shared' else 'have separate E'} (p = {amount(self.p, 2)} for a "
            f"shared one); otherwise the multiplier would be {_with_interval(other.value, other.ci)}.",
            f"To detect a difference of {percent(SEEN)} in {percent(POWER)} of cases takes {needed}.",
            *self.notes,
            *served,
        ]


def compare(
    base: Runs,
    variant: Runs,
    targets: Sequence[float] = (),
    names: tuple[str, str] = ("base", "variant"),
) -> Comparison:
    """Estimate how many times the FLOPs of `variant` the base needs for the same loss.

    `targets` are further budgets, in FLOPs of the base. Runs are paired by size and column `seed`. Raises InputError if
    the sides share a run or differ in held-out text, or if either has fewer than two N or two D.
    """
    base, variant = as_table(base), as_table(variant)
    named = all("run_id" in runs.frame for runs in (base, variant))  # else ids are the numbers of rows
    if named and (shared_runs := sorted({*base.run_id} & {*variant.run_id})):
        raise InputError(
            f"run {shared_runs[0]} belongs to both {names[0]} and {names[1]}; the two sides must not share a run."
        )
    texts = [{*runs.frame["held_out"]} if "held_out" in runs.frame else set[object]() for runs in (base, variant)]
    if all(texts) and len(texts[0] | texts[1]) > 1:
        raise InputError(
            f"{names[0]} and {names[1]} were scored on different held-out text (column held_out), so their losses "
            "cannot be compared; compare runs whose data, validation_fraction and validation_tokens are the same."
        )
    for name, runs in zip(names, (base, variant), strict=True):
        if min(len(np.unique(runs.N)), len(np.unique(runs.D))) < 2:
            raise InputError(f"{name} has runs of one N or one D; a multiplier needs at least two of each.")
    rows = _Rows(base, variant)
    shared, free = _Joint(rows, gap=False), _Joint(rows, gap=True)
    gap, error, freedom = free.estimate(lambda q: float(q[9]))
    p = None if error is None else float(2 * scipy.special.stdtr(freedom, -abs(gap) / max(error, 1e-300)))
    enough_sizes = min(len(np.unique(base.N)), len(np.unique(base.D))) > 2
    chosen, other = (free, shared) if enough_sizes and p is not None and p < SURE else (shared, free)
    low, high = float(rows.c.min()), float(rows.c.max())
    budgets = [low, 0.0, high, *(math.log(C) - rows.c0 for C in targets)]
    trend = chosen.estimate(lambda q: (log_multiplier(q, high) - log_multiplier(q, low)) / (high - low))
    more_seeds = rows.more_seeds(*chosen.estimate(lambda q: log_multiplier(q, 0.0))[1:])
    return Comparison(
        *names,
        [chosen.at(c) for c in budgets],
        [chosen.at(float(c)) for c in np.linspace(low, max(budgets), CURVE)],
        *_value_and_interval(trend),
        "shared" if chosen is shared else "free",
        math.exp(gap),
        p,
        other.at(0.0),
        more_seeds,
        None if more_seeds is None else more_seeds * len(rows.loss) // rows.seeds,
        rows.unit,
        rows.reason,
        rows.notes,
        _lifetime(chosen, base, variant),
    )


def decoding(runs: RunTable) -> Spread | None:
    """Return the lowest, median and highest seconds per generated token of the largest size, None if unknown."""
    seconds = [value for value in runs.column("decode_seconds")[runs.N.max() == runs.N].tolist() if value > 0]
    return (min(seconds), float(np.median(seconds)), max(seconds)) if seconds else None


def _lifetime(laws: _Joint, base: RunTable, variant: RunTable) -> BreakEven | None:
    base_pace, variant_pace = decoding(base), decoding(variant)
    multiplier = laws.at(math.log(base.flops.max()) - laws.rows.c0)
    if base_pace is None or variant_pace is None:
        return None
    names = ("device", "decode_device")
    devices = [t.frame[name].iloc[t.rows].dropna() for t in (base, variant) for name in names if name in t.frame]
    if multiplier.seconds is None or len({*chain(*devices)}) > 1:
        laws.rows.notes.append(
            "Serving and training are not compared, because not all of both was timed on one device."
        )
        return None
    training = float(np.median(base.column("seconds")[base.flops == base.flops.max()]))
    return break_even(training, multiplier.seconds, base_pace, variant_pace, multiplier.seconds_ci)


def _over_lifetime(base: str, variant: str, result: BreakEven) -> str:
    first, later = (base, variant) if result.saved >= 0 else (variant, base)
    pace = f"{amount(1e3 * abs(result.saved))} ms a token {'faster' if result.saved > 0 else 'slower'} than"
    level = " to ".join("∞" if math.isinf(end) else count(end) for end in dict.fromkeys(result.ci or ()))
    text = (
        f"{first} costs less time up to {count(result.tokens)} ({level or 'no interval'}) served tokens, {later} beyond"
    )
    if result.tokens in (0.0, math.inf):
        text = f"{first if result.tokens else later} costs less time at any number of served tokens"
        text += f", though the break-even may lie anywhere from {level}" if " to " in level else ""
    pace = f"At batch 1 {variant} decodes {pace if result.saved else 'as fast as'} {base}"
    return f"{pace}. Including training at {base}'s largest budget, {text}."


class _Rows:
    """Runs of both sides, (n,): centred log FLOPs per token x and log tokens y, c = x + y, and log loss."""

    def __init__(self, *sides: RunTable) -> None:
        names = ("val_bpb", "seconds", "seed")
        N, D, loss, flops = (np.concatenate([getattr(t, name) for t in sides]) for name in ("N", "D", "loss", "flops"))
        bits, seconds, seed = (np.concatenate([t.column(name) for t in sides]) for name in names)
        z = self.of_base = np.repeat([1.0, 0.0], list(map(len, sides)))
        self.unit, self.reason, self.notes = "nats per token", "", list[str]()
        size = loss / (bits * math.log(2))  # bytes of a token
        if abs(np.log(np.median(size[z > 0]) / np.median(size[z == 0]))) > SAME_TOKENS:
            self.unit, loss, D = "bits per byte", bits, D * size
            self.notes.append("Tokenizers differ, so D is counted in bytes and losses are compared in bits per byte.")
        x, y = np.log(flops / D), np.log(D)
        self.x, self.y, self.c0, self.loss = x - x.mean(), y - y.mean(), float((x + y).mean()), np.log(loss)
        self.c = self.x + self.y
        named = [t.frame.get("device", t.frame.iloc[:, 0]).iloc[t.rows] for t in sides]
        devices = {device for column in named for device in column.astype(str)}
        self.speed = None
        if any((read_formats(t)[0] != NONE).any() for t in sides):
            self.notes.append("Seconds are not compared, because number formats are simulated.")
        elif (seconds > 0).all() and ("device" not in sides[0].frame or len(devices) == 1):
            self.speed = np.log(flops / seconds)
        elif (seconds > 0).any():
            self.notes.append("Seconds are not compared, because not all runs were timed on one device.")
        self.cluster = np.concatenate([t.group for t in sides])
        counts = [len(np.unique(seed[z == side])) for side in (0.0, 1.0)]
        if np.isnan(seed).any() or min(counts) < 2:
            self.reason = "each side needs runs of two seeds (column seed) to measure the scatter"
        else:  # a variant may add a few parameters, so its size is the nearest one of the base
            nearest = np.abs(np.log(N)[:, None] - np.log(np.unique(N[z > 0]))).argmin(axis=1)
            self.cluster = np.array([f"{size}/{number:.0f}" for size, number in zip(nearest, seed, strict=True)])
        self.seeds = max(counts)
        point = np.unique(np.stack([z, x.round(6), y.round(6)]), axis=1, return_inverse=True)[1].ravel()
        runs, total = np.bincount(point), np.bincount(point, self.loss)
        squares = np.bincount(point, (self.loss - (total / runs)[point]) ** 2)[runs > 1]
        self.noise = max(math.sqrt((squares / (runs[runs > 1] - 1)).mean()), 1e-6) if len(squares) else NOISE

    def more_seeds(self, error: float | None, freedom: float) -> int | None:
        """Return how many more seeds would detect a multiplier of 1 + SEEN; None if unknown or more than MOST_SEEDS.

        `error` is the log multiplier's present standard error, with `freedom` degrees of freedom.
        """
        if error is None:
            return None
        seeds = np.arange(self.seeds, MOST_SEEDS)
        needed = sum(scipy.special.stdtrit(freedom * seeds / self.seeds, p) for p in (0.975, POWER))
        enough = needed * error * np.sqrt(self.seeds / seeds) <= math.log1p(SEEN)
        return int(enough.argmax()) if enough.any() else None


class _Joint:
    """The least-squares fit of both laws, and its sandwich variance over rows of loss, then of speed."""

    def __init__(self, rows: _Rows, gap: bool) -> None:
        mean = CENTRE + np.append([rows.loss.min(), *[rows.loss.mean(), 0.0] * 2], np.zeros(5))
        pull, k, n = np.diag(rows.noise / WIDTH), len(mean) - (not gap), len(rows.loss)

        def errors(q: Array) -> Array:
            whole = np.append(q, mean[k:])
            return np.append(both_laws(whole, rows)[0] - rows.loss, pull @ (whole - mean))

        def slopes(q: Array) -> Array:
            return np.concatenate([both_laws(np.append(q, mean[k:]), rows)[1], pull])[:, :k]

        theta = scipy.optimize.least_squares(errors, mean[:k], slopes, method="lm").x
        self.rows, self.at_, self.free = rows, np.append(theta, mean[k:]), np.arange(k)
        self.jacobian, residual, prior, cluster = slopes(theta)[:n], -errors(theta)[:n], np.diag(pull)[:k], rows.cluster
        if rows.speed is not None:  # log FLOPs per second are linear in c, separately for each side
            X = np.stack([np.ones(n), rows.c, 1 - rows.of_base, (1 - rows.of_base) * rows.c], axis=1)
            speed = np.linalg.lstsq(X, rows.speed, rcond=None)[0]
            speed_residual = rows.speed - X @ speed
            scatter = np.std(residual)
            scale = scatter / max(
                np.std(speed_residual), scatter / 100, 1e-9
            )  # degrees of freedom are counted at equal variance
            self.jacobian = np.block([[self.jacobian, np.zeros((n, 4))], [np.zeros((n, k)), scale * X]])
            residual, cluster = np.append(residual, scale * speed_residual), np.append(cluster, cluster)
            prior = np.append(prior, np.zeros(4))
            self.at_, self.free = np.append(self.at_, speed), np.append(self.free, len(mean) + np.arange(4))
        self.bread = np.linalg.pinv(self.jacobian.T @ self.jacobian + np.diag(prior**2), 1e-12, hermitian=True)
        self.maker = np.eye(len(residual)) - self.jacobian @ self.bread @ self.jacobian.T
        self.meat = []  # per cluster: its rows, their bias reduction, their residuals
        for members in (np.flatnonzero(cluster == name) for name in np.unique(cluster)):
            values, vectors = np.linalg.eigh(self.maker[np.ix_(members, members)])
            inverse = np.where(values > 1e-6, np.maximum(values, 1e-6) ** -0.5, 0.0)
            self.meat.append((members, (vectors * inverse) @ vectors.T, residual[members]))

    def estimate(self, value: Callable[[Array], float]) -> Estimated:
        """Evaluate a function of the coordinates at the fit. Returns its value, standard error, degrees of freedom."""
        center = value(self.at_)
        if self.rows.reason or not math.isfinite(center):
            return center, None, math.inf
        steps = 1e-5 * np.eye(len(self.at_))[self.free]
        gradient = np.array([value(self.at_ + step) - value(self.at_ - step) for step in steps]) / 2e-5
        weight = self.jacobian @ (self.bread @ gradient)
        shares = np.stack(
            [self.maker[:, members] @ (reduce @ weight[members]) for members, reduce, _ in self.meat], axis=1
        )
        moments = np.linalg.eigvalsh(shares.T @ shares)
        variance = sum(float(weight[members] @ reduce @ residuals) ** 2 for members, reduce, residuals in self.meat)
        return center, math.sqrt(variance), float(moments.sum() ** 2 / (moments**2).sum())

    def at(self, c: float) -> Multiplier:
        """Return the multiplier at `c`, as in `log_multiplier`."""
        inside = self.rows.c.min() - 1e-9 <= c <= self.rows.c.max() + 1e-9
        seconds: tuple[float | None, Interval | None] = (None, None)
        if self.rows.speed is not None:
            seconds = _value_and_interval(
                self.estimate(lambda q: log_multiplier(q, c) + float(q[-2] + c * q[-1])), math.exp
            )
        flops = _value_and_interval(self.estimate(lambda q: log_multiplier(q, c)), math.exp)
        return Multiplier(math.exp(c + self.rows.c0), *flops, *seconds, not inside)


def both_laws(q: Array, rows: _Rows) -> tuple[Array, Array]:
    """Predict the log losses (n,) of both sides' runs at coordinates `q` (k,), and their derivatives by q, (n, k)."""
    E, A, alpha, B, beta, gamma, m, trend, w, gap = (Jet(value, {i: 1.0}) for i, value in enumerate(q))
    z = rows.of_base
    X = rows.x - z * (0.5 * m + w + trend * rows.x)
    Y = rows.y - z * (0.5 * m - w + trend * rows.y)
    g = np.exp(gamma)
    shortage = g * np.logaddexp((A - np.exp(alpha) * X) / g, (B - np.exp(beta) * Y) / g)
    log_loss = np.logaddexp(E + z * gap, shortage)
    return log_loss.value, np.stack([log_loss.first[i] + 0.0 * z for i in range(len(q))], axis=1)


def log_multiplier(q: Array, c: float) -> float:
    """Return the log multiplier at `c`, the base's log FLOPs minus the runs' mean log FLOPs.

    It is -inf if the variant never reaches the base's loss. Equation 4 of Hoffmann et al. 2022 is applied inside the
    power gamma.
    """
    E, A, alpha, B, beta, gamma, m, trend, _, gap = q[: len(CENTRE)]
    a, b, g = math.exp(alpha), math.exp(beta), math.exp(gamma)
    s = a * b / (a + b)
    h = A - a * (g * (alpha - beta) + A - B) / (a + b) + g * math.log1p(a / b)
    beyond = math.exp(h - s * (c - m - trend * c)) + math.exp(E) * math.expm1(gap)
    return float(c - (h - math.log(beyond)) / s) if beyond > 0 else -math.inf


def _value_and_interval(estimated: Estimated, scale: Callable[[float], float] = float) -> tuple[float, Interval | None]:
    value, error, freedom = estimated
    half = float(scipy.special.stdtrit(freedom, 0.975)) * (error or 0.0)
    return scale(value), None if error is None else (scale(value - half), scale(value + half))


def _with_interval(value: float, ci: Interval | None) -> str:
    return f"{amount(value)} ({interval(ci, amount)})" if ci else amount(value)
