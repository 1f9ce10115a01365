"""A variant beside its base: how many times the compute the base needs for the loss of the variant, and how surely.

Special here:
- Two laws are fitted as one. With F FLOPs per token and D tokens, so that C = F D, the variant has the law of
  `laws/gamma.py`, L(F, D) = E + ((A / F^alpha)^(1/g) + (B / D^beta)^(1/g))^g, and the base has it at F / kF and D / kD,
  where kF kD = K (C / C0)^trend. That is the multiplier itself, whatever form L has: the base's best loss at C is the
  variant's at C over it. What the form misses is common to both and cancels.
- Clusters (one size and seed of both sides) are few, too few for a bootstrap. The interval is
  Student's, with the bias-reduced variance of clusters and the degrees of freedom of Bell and McCaffrey (2002); see
  Pustejovsky and Tipton (2018), arXiv:1601.01981.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

from ..allocation.serving import BreakEven, Spread, break_even
from ..errors import Array, InputError
from ..formatting import amount, count, interval, percent, plain_json, scientific
from ..solver.jets import Jet
from ..table import RunTable

Interval = tuple[float, float]
Asked = tuple[float, float | None, float]  # a value, its standard error (None: not known), degrees of freedom
# Coordinates E, A, alpha, B, beta, gamma, m, trend, w, gap: logarithms of all but the trend; m is K, w half of kF over
# kD, gap E of the base over the variant's. Weak priors settle what a small ladder leaves open; a width is worth one run
# with the noise of these runs. E and the amplitudes start at shares of the losses.
CENTRE = np.log([0.6, 0.2, 0.35, 0.2, 0.35, 1, 1, 1, 1, 1])
WIDTH = np.array([0.5, math.inf, 0.5, math.inf, 0.5, 0.3, math.inf, 0.2, 0.3, math.inf])
NOISE = 5e-3  # of log loss, where no point has two runs
SURE = 0.01  # p below which E is not shared
SEEN, POWER, MOST_SEEDS = 0.02, 0.8, 10_000  # the difference that `more_seeds` is about, seen in this share of cases
SAME_TOKENS = 1e-3  # relative difference of bytes per token up to which tokenizers are the same
CURVE = 25  # points of a drawn multiplier


@dataclass(frozen=True)
class Multiplier:
    """At one budget of the base: the variant reaches the base's loss with 1 / value of its FLOPs; 0: it does not."""

    flops: float
    value: float
    ci: Interval | None
    seconds: float | None  # the same of training time
    seconds_ci: Interval | None
    extrapolated: bool


@dataclass
class Comparison:
    """What `compare` found; `reason` says why there is no interval, and is empty where there is one."""

    base: str
    variant: str
    multipliers: list[Multiplier]  # at the cheapest run, in the middle, at the dearest, at the targets
    curve: list[Multiplier]  # from the cheapest to the farthest of these
    trend: float  # d log multiplier / d log C
    trend_ci: Interval | None
    E: str  # shared or free
    gap: float  # E of the base over that of the variant, were it free
    p: float | None  # that they are one
    otherwise: Multiplier  # in the middle, with E the other way
    more_seeds: int | None  # until a difference of SEEN would be seen
    more_runs: int | None
    unit: str
    reason: str
    notes: list[str]
    lifetime: BreakEven | None  # at the base's dearest run, where all trains and decodes on one device

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(plain_json(asdict(self) | {"sentences": self.sentences}))

    @property
    def sentences(self) -> list[str]:
        """The answer, how E was taken, and what would show more."""
        k, other, both = self.multipliers[1], self.otherwise, f"{self.variant} against {self.base}"
        said = f"{both}: at {scientific(k.flops)} FLOPs of {self.base} a compute multiplier of {_said(k.value, k.ci)}"
        if k.value:
            said += f", so that {self.variant} reaches the loss with {percent(1 / k.value)} of the FLOPs"
        if k.seconds:
            said += f"; of seconds {_said(k.seconds, k.seconds_ci)}"
        served = [] if self.lifetime is None else [_over_lifetime(self.base, self.variant, self.lifetime)]
        if self.reason:
            return [f"{said}. No interval: {self.reason}.", *self.notes, *served]
        grown = [percent(10**slope - 1, True) for slope in (self.trend, *(self.trend_ci or ()))]
        said += f"; per tenfold compute it changes by {grown[0]} ({' to '.join(grown[1:])})"
        low, high = k.ci or (0.0, math.inf)
        said += "; 1 is inside, so no difference is shown" if low <= 1 <= high else ""
        more = f"more than {MOST_SEEDS:,} seeds" if self.more_seeds is None else "these runs"
        more = f"{self.more_seeds} more seeds ({self.more_runs} runs)" if self.more_seeds else more
        return [
            f"{said}.",
            f"The laws have {'one E' if self.E == 'shared' else 'an E each'} (p = {amount(self.p, 2)} for one); the "
            f"other way the multiplier would be {_said(other.value, other.ci)}.",
            f"A difference of {percent(SEEN)} would be seen, in {percent(POWER)} of cases, with {more}.",
            *self.notes,
            *served,
        ]


def compare(
    base: RunTable,
    variant: RunTable,
    targets: Sequence[float] = (),
    names: tuple[str, str] = ("base", "variant"),
) -> Comparison:
    """The compute multiplier of `variant` over `base`, where they have runs and at `targets`, FLOPs of the base.

    Runs are paired by size and column `seed`; E is free where one will clearly not do. Raises InputError where both
    sides have a run in common, or one has fewer than two sizes or D.
    """
    if both := sorted({*base.run_id} & {*variant.run_id}):
        raise InputError(f"run {both[0]} is of {names[0]} and of {names[1]}; what is compared must share no run.")
    for name, runs in zip(names, (base, variant), strict=True):
        if min(len(np.unique(runs.N)), len(np.unique(runs.D))) < 2:
            raise InputError(f"{name} has runs of one N or one D; a multiplier needs two of each.")
    rows = _Rows(base, variant)
    shared, free = _Joint(rows, gap=False), _Joint(rows, gap=True)
    gap, error, freedom = free.ask(lambda q: float(q[9]))
    p = None if error is None else float(2 * stdtr(freedom, -abs(gap) / max(error, 1e-300)))
    can = min(len(np.unique(base.N)), len(np.unique(base.D))) > 2
    chosen, other = (free, shared) if can and p is not None and p < SURE else (shared, free)
    low, high = float(rows.c.min()), float(rows.c.max())
    places = [low, 0.0, high, *(math.log(C) - rows.c0 for C in targets)]
    trend = chosen.ask(lambda q: (log_multiplier(q, high) - log_multiplier(q, low)) / (high - low))
    more = rows.more_seeds(*chosen.ask(lambda q: log_multiplier(q, 0.0))[1:])
    return Comparison(
        *names,
        [chosen.at(c) for c in places],
        [chosen.at(float(c)) for c in np.linspace(low, max(places), CURVE)],
        *_known(trend),
        "shared" if chosen is shared else "free",
        math.exp(gap),
        p,
        other.at(0.0),
        more,
        None if more is None else more * len(rows.loss) // rows.seeds,
        rows.unit,
        rows.reason,
        rows.notes,
        _lifetime(chosen, base, variant),
    )


def decoding(runs: RunTable) -> Spread | None:
    """Seconds of a generated token (column decode_seconds), of the runs of the largest size."""
    found = [one for one in runs.column("decode_seconds")[runs.N.max() == runs.N].tolist() if one > 0]
    return (min(found), float(np.median(found)), max(found)) if found else None


def _lifetime(laws: _Joint, base: RunTable, variant: RunTable) -> BreakEven | None:
    k, d, other = laws.at(math.log(base.flops.max()) - laws.rows.c0), decoding(base), decoding(variant)
    if d is None or other is None:
        return None
    names = ("device", "decode_device")
    devices = [t.frame[name].iloc[t.rows].dropna() for t in (base, variant) for name in names if name in t.frame]
    if k.seconds is None or len({*chain(*devices)}) > 1:
        laws.rows.notes.append("Serving is not weighed against training, because not all was timed on one device.")
        return None
    training = float(np.median(base.column("seconds")[base.flops == base.flops.max()]))
    return break_even(training, k.seconds, d, other, k.seconds_ci)


def _over_lifetime(base: str, variant: str, found: BreakEven) -> str:
    first, later = (base, variant) if found.saved >= 0 else (variant, base)
    pace = f"{amount(1e3 * abs(found.saved))} ms a token {'faster' if found.saved > 0 else 'slower'} than"
    level = " to ".join("∞" if math.isinf(end) else count(end) for end in dict.fromkeys(found.ci or ()))
    said = (
        f"{first} costs less time up to {count(found.tokens)} ({level or 'no interval'}) served tokens, {later} beyond"
    )
    if found.tokens in (0.0, math.inf):
        said = f"{first if found.tokens else later} costs less time at any number of served tokens"
        said += f", though the break-even may lie anywhere from {level}" if " to " in level else ""
    pace = f"At batch 1 {variant} decodes {pace if found.saved else 'as fast as'} {base}"
    return f"{pace}. Training at {base}'s dearest budget included, {said}."


class _Rows:
    """The runs of both sides, (n,): centred log FLOPs per token x and log tokens y, c = x + y, and log loss."""

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
        if (seconds > 0).all() and ("device" not in sides[0].frame or len(devices) == 1):
            self.speed = np.log(flops / seconds)
        elif (seconds > 0).any():
            self.notes.append("Seconds are not compared, because not all runs have them, on one device.")
        self.cluster = np.concatenate([t.group for t in sides])
        counts = [len(np.unique(seed[z == side])) for side in (0.0, 1.0)]
        if np.isnan(seed).any() or min(counts) < 2:
            self.reason = "runs of two seeds of each side are needed (column seed), to see how far runs scatter"
        else:  # a variant may add a few parameters, so a size is that of the base which is nearest
            nearest = np.abs(np.log(N)[:, None] - np.log(np.unique(N[z > 0]))).argmin(axis=1)
            self.cluster = np.array([f"{one}/{luck:.0f}" for one, luck in zip(nearest, seed, strict=True)])
        self.seeds = max(counts)
        point = np.unique(np.stack([z, x.round(6), y.round(6)]), axis=1, return_inverse=True)[1].ravel()
        runs, total = np.bincount(point), np.bincount(point, self.loss)
        squares = np.bincount(point, (self.loss - (total / runs)[point]) ** 2)[runs > 1]
        self.noise = max(math.sqrt((squares / (runs[runs > 1] - 1)).mean()), 1e-6) if len(squares) else NOISE

    def more_seeds(self, error: float | None, freedom: float) -> int | None:
        """Of both sides, until a difference of SEEN is seen: errors fall as the root of the number of clusters."""
        if error is None:
            return None
        seeds = np.arange(self.seeds, MOST_SEEDS)
        needed = stdtrit(freedom * seeds / self.seeds, 0.975) + stdtrit(freedom * seeds / self.seeds, POWER)
        enough = needed * error * np.sqrt(self.seeds / seeds) <= math.log1p(SEEN)
        return int(enough.argmax()) if enough.any() else None


class _Joint:
    """Both laws at their least squares, and the sandwich of their variance over rows of loss, then of speed."""

    def __init__(self, rows: _Rows, gap: bool) -> None:
        from scipy.optimize import least_squares

        mean = CENTRE + np.append([rows.loss.min(), *[rows.loss.mean(), 0.0] * 2], np.zeros(5))
        pull, k, n = np.diag(rows.noise / WIDTH), len(mean) - (not gap), len(rows.loss)

        def errors(q: Array) -> Array:
            whole = np.append(q, mean[k:])
            return np.append(both_laws(whole, rows)[0] - rows.loss, pull @ (whole - mean))

        def slopes(q: Array) -> Array:
            return np.concatenate([both_laws(np.append(q, mean[k:]), rows)[1], pull])[:, :k]

        found = least_squares(errors, mean[:k], slopes, method="lm").x
        self.rows, self.at_, self.free = rows, np.append(found, mean[k:]), np.arange(k)
        self.jacobian, left, prior, cluster = slopes(found)[:n], -errors(found)[:n], np.diag(pull)[:k], rows.cluster
        if rows.speed is not None:  # log FLOPs per second are linear in c, of each side on its own
            X = np.stack([np.ones(n), rows.c, 1 - rows.of_base, (1 - rows.of_base) * rows.c], axis=1)
            speed = np.linalg.lstsq(X, rows.speed, rcond=None)[0]
            off = rows.speed - X @ speed
            scale = np.std(left) / max(np.std(off), np.std(left) / 100, 1e-9)  # freedom is counted at equal variance
            self.jacobian = np.block([[self.jacobian, np.zeros((n, 4))], [np.zeros((n, k)), scale * X]])
            left, cluster = np.append(left, scale * off), np.append(cluster, cluster)
            prior = np.append(prior, np.zeros(4))
            self.at_, self.free = np.append(self.at_, speed), np.append(self.free, len(mean) + np.arange(4))
        self.bread = np.linalg.pinv(self.jacobian.T @ self.jacobian + np.diag(prior**2), 1e-12, hermitian=True)
        self.maker = np.eye(len(left)) - self.jacobian @ self.bread @ self.jacobian.T
        self.meat = []  # of each cluster its rows, their bias reduction, their residuals
        for own in (np.flatnonzero(cluster == name) for name in np.unique(cluster)):
            values, vectors = np.linalg.eigh(self.maker[np.ix_(own, own)])
            inverse = np.where(values > 1e-6, np.maximum(values, 1e-6) ** -0.5, 0.0)
            self.meat.append((own, (vectors * inverse) @ vectors.T, left[own]))

    def ask(self, value: Callable[[Array], float]) -> Asked:
        """A function of all coordinates, by its gradient."""
        found = value(self.at_)
        if self.rows.reason or not math.isfinite(found):
            return found, None, math.inf
        steps = 1e-5 * np.eye(len(self.at_))[self.free]
        gradient = np.array([value(self.at_ + step) - value(self.at_ - step) for step in steps]) / 2e-5
        weight = self.jacobian @ (self.bread @ gradient)
        shares = np.stack([self.maker[:, own] @ (reduce @ weight[own]) for own, reduce, _ in self.meat], axis=1)
        moments = np.linalg.eigvalsh(shares.T @ shares)
        variance = sum(float(weight[own] @ reduce @ residuals) ** 2 for own, reduce, residuals in self.meat)
        return found, math.sqrt(variance), float(moments.sum() ** 2 / (moments**2).sum())

    def at(self, c: float) -> Multiplier:
        """At a budget of the base, given as its centred logarithm."""
        inside = self.rows.c.min() - 1e-9 <= c <= self.rows.c.max() + 1e-9
        seconds: tuple[float | None, Interval | None] = (None, None)
        if self.rows.speed is not None:
            seconds = _known(self.ask(lambda q: log_multiplier(q, c) + float(q[-2] + c * q[-1])), math.exp)
        flops = _known(self.ask(lambda q: log_multiplier(q, c)), math.exp)
        return Multiplier(math.exp(c + self.rows.c0), *flops, *seconds, not inside)


def both_laws(q: Array, rows: _Rows) -> tuple[Array, Array]:
    """Log loss of every row (n,), and its derivatives by the coordinates (n, k)."""
    E, A, alpha, B, beta, gamma, m, trend, w, gap = (Jet(value, {i: 1.0}) for i, value in enumerate(q))
    z = rows.of_base
    X = rows.x - z * (0.5 * m + w + trend * rows.x)
    Y = rows.y - z * (0.5 * m - w + trend * rows.y)
    g = np.exp(gamma)
    shortage = g * np.logaddexp((A - np.exp(alpha) * X) / g, (B - np.exp(beta) * Y) / g)
    found = np.logaddexp(E + z * gap, shortage)
    return found.value, np.stack([found.first[i] + 0.0 * z for i in range(len(q))], axis=1)


def log_multiplier(q: Array, c: float) -> float:
    """Log of the base's budget, c centred, over the variant's at the same best loss; minus infinity where it has none.

    Beyond E the best loss is a power law of compute, log R = h - s c (Hoffmann et al. 2022, equation 4; gamma aside).
    """
    E, A, alpha, B, beta, gamma, m, trend, _, gap = q[: len(CENTRE)]
    a, b, g = math.exp(alpha), math.exp(beta), math.exp(gamma)
    s = a * b / (a + b)
    h = A - a * (g * (alpha - beta) + A - B) / (a + b) + g * math.log1p(a / b)
    beyond = math.exp(h - s * (c - m - trend * c)) + math.exp(E) * math.expm1(gap)
    return float(c - (h - math.log(beyond)) / s) if beyond > 0 else -math.inf


def _known(asked: Asked, scale: Callable[[float], float] = float) -> tuple[float, Interval | None]:
    """A value and its 95 % interval."""
    value, error, freedom = asked
    half = float(stdtrit(freedom, 0.975)) * (error or 0.0)
    return scale(value), None if error is None else (scale(value - half), scale(value + half))


def _said(value: float, ci: Interval | None) -> str:
    return f"{amount(value)} ({interval(ci, amount)})" if ci else amount(value)
