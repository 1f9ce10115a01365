"""The best mixture for a target by a fitted `MixtureLaw`, whether it beats a base beyond doubt, and what to run next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import fdtr, fdtri, ndtri

from ..errors import Array, InputError, check_level, positive
from ..uncertainty import percentile_interval

if TYPE_CHECKING:
    from .mixturelaw import MixtureLaw

CANDIDATES, REFINED = 512, 3  # mixtures drawn at each concentration; the best ones, which are refined
CONCENTRATIONS = (0.0, 3.0, 30.0, 300.0)  # of Dirichlet's distribution about the base
STEP = 1e-4  # of a weight, for slopes
NEXT = 5  # mixtures worth training
MOST_RUNS = 100.0  # times the runs of the table; more are not worth a number


@dataclass(frozen=True)
class BestMixture:
    """The best mixture at N and D (None: those of the table), with intervals of probability `level`.

    weights and base: domain -> weight; intervals: domain -> (low, high) over draws of the fit. loss, base_loss: the
    target's, in nats per token. probability: that the gain, base_loss - loss, is above zero. epochs: domain -> passes
    over its unique tokens, where given. reason: why the answer is not trustworthy, one sentence. runs_needed: runs in
    all that would show this gain, None if not needed or unknown. next: mixtures worth training, best first. scales: the
    best weights from the smallest run of the table to this one, {"N", "D", "weights", "loss", "base_loss"}.
    """

    target: dict[str, float]
    N: float | None
    D: float | None
    level: float
    weights: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    base: dict[str, float]
    loss: float
    loss_interval: tuple[float, float]
    base_loss: float
    gain: float
    gain_interval: tuple[float, float]
    probability: float
    epochs: dict[str, float]
    trustworthy: bool
    reason: str
    runs_needed: int | None
    next: list[dict[str, float]]
    scales: list[dict[str, Any]]


def best_mixture(
    law: MixtureLaw, row: Array, N: float | None, D: float | None, flops: float | None, base: Array | None,
    max_epochs: float | None, caps: Array, bounds: Mapping[str, tuple[float, float]] | None, level: float,
) -> BestMixture:  # fmt: skip
    """See `MixtureLaw.best`; row (losses,) is the target, caps (1, domains) are unique tokens."""
    check_level(level)
    base = _base(law) if base is None else base
    N, D = _sizes(law, row, base, caps, N, D, flops)
    low, high = _bounds(law, bounds, max_epochs, caps, D)
    generator = np.random.default_rng(law.seed)
    about = [generator.dirichlet(np.maximum(c * base, 0.05) + (c == 0), CANDIDATES) for c in CONCENTRATIONS]
    cloud = project(np.vstack([base, law._data.points.weights, np.eye(len(low)), *about]), low, high)

    def losses(mixtures: Array, N: float | None, D: float | None) -> Array:
        return np.asarray(row @ np.exp(law.surfaces(law.points(mixtures, N, D, caps), draws=False)[0]))

    def named(mixture: Array) -> dict[str, float]:
        return dict(zip(law.domains_, mixture.tolist(), strict=True))

    best = minimum(lambda mixtures: losses(mixtures, N, D), cloud, low, high)
    near = project(generator.dirichlet(30.0 * best + 0.05, CANDIDATES), low, high)
    cloud = np.vstack([best, base, near, cloud])
    draws = np.tensordot(row, np.exp(law.surfaces(law.points(cloud, N, D, caps))[1]), axes=1)
    value, variance = law.moments(law.points(cloud[:2], N, D, caps), row[None], run=False)
    loss, base_loss = value[0].tolist()
    wide = float(ndtri(0.5 + 0.5 * level) * np.sqrt(variance[0, 0]))
    lowest = cloud[draws.argmin(axis=0)]
    gain = base_loss - loss
    half, probability, reason, runs = _doubt(law, gain, float((draws[1] - draws[0]).std()), level)
    scales = []
    for n, d in _scales(law, N, D):
        there = minimum(lambda mixtures: losses(mixtures, n, d), cloud, low, high)  # noqa: B023
        pair = losses(np.stack([there, base]), n, d).tolist()
        scales.append({"N": n, "D": d, "weights": named(there), "loss": pair[0], "base_loss": pair[1]})
    return BestMixture(
        target=dict(zip(law.losses_, row.tolist(), strict=True)),
        N=N,
        D=D,
        level=level,
        weights=named(best),
        intervals=dict(zip(law.domains_, (percentile_interval(w, level) for w in lowest.T), strict=True)),
        base=named(base),
        loss=loss,
        loss_interval=(loss - wide, loss + wide),
        base_loss=base_loss,
        gain=gain,
        gain_interval=(gain - half, gain + half),
        probability=probability,
        epochs={k: v for k, v in named(best * (D or np.nan) / caps[0]).items() if np.isfinite(v)},
        trustworthy=not reason,
        reason=reason,
        runs_needed=runs,
        next=[named(mixture) for mixture in _worth_training(cloud, draws)],
        scales=scales,
    )


def project(mixtures: Array, low: Array, high: Array) -> Array:
    """Return the nearest mixtures (n, m) with sums of one and weights within bounds, by bisection of a shift."""
    below, above = (low - mixtures).min(axis=1), (high - mixtures).max(axis=1)
    for _ in range(60):
        middle = 0.5 * (below + above)
        short = np.clip(mixtures + middle[:, None], low, high).sum(axis=1) < 1.0
        below, above = np.where(short, middle, below), np.where(short, above, middle)
    return np.asarray(np.clip(mixtures + above[:, None], low, high))


def minimum(loss: Callable[[Array], Array], cloud: Array, low: Array, high: Array) -> Array:
    """Return the mixture of lowest loss (n,): the best of a cloud (n, m), refined by sequential quadratic programming."""

    def with_slopes(mixture: Array) -> tuple[float, Array]:
        values = loss(np.vstack([mixture, mixture + STEP * np.eye(len(mixture))]))
        return float(values[0]), (values[1:] - values[0]) / STEP

    limits = [*zip(low, high, strict=True)]
    total = {"type": "eq", "fun": lambda w: w.sum() - 1.0, "jac": np.ones_like}
    tops = cloud[np.argsort(loss(cloud), kind="stable")[:REFINED]]
    ends = [minimize(with_slopes, w, jac=True, method="SLSQP", bounds=limits, constraints=total).x for w in tops]
    ends = np.vstack([tops, project(np.nan_to_num(ends), low, high)])
    return np.asarray(ends[np.argmin(loss(ends))])


def _base(law: MixtureLaw) -> Array:
    """Return the mixture that most runs share, or the mean of all mixtures if there is no such one."""
    weights, mixture, group = law._data.points.weights, law._data.mixture, law._data.group
    runs = np.bincount(np.unique(np.stack([mixture, group]), axis=1)[0])
    first = np.unique(mixture, return_index=True)[1]
    most = np.flatnonzero(runs == runs.max())
    return np.asarray(weights[first[most]].mean(axis=0) if len(most) == 1 else weights[first].mean(axis=0))


def _sizes(
    law: MixtureLaw, row: Array, base: Array, caps: Array, N: float | None, D: float | None, flops: float | None
) -> tuple[float | None, float | None]:
    """Return N and D of the planned run: as given, by `flops`, or of the largest run."""
    largest = {name: high for name, (_, high) in law.sizes_.items()}
    if flops is None:
        return largest.get("N") if N is None else N, largest.get("D") if D is None else D
    positive("flops", [flops])
    if len(largest) < 2 or (N is not None and D is not None):
        raise InputError(f"flops is {flops:g}; it needs N and D in the table, and not both of N and D next to it.")
    N, D = N if law.varies("N") else largest["N"], D if law.varies("D") else largest["D"]
    if N is None and D is None:
        sizes = np.sqrt(flops / 6.0 / np.geomspace(0.1, 1e4, 400))  # by tokens per parameter
        points = law.points(np.tile(base, (400, 1)), sizes, flops / 6.0 / sizes, caps)
        N = float(sizes[np.argmin(row @ np.exp(law.surfaces(points, draws=False)[0]))])
    return (N, flops / 6.0 / N) if N is not None else (flops / 6.0 / D, D)  # type: ignore[operator]


def _bounds(
    law: MixtureLaw, bounds: Mapping[str, tuple[float, float]] | None, max_epochs: float | None, caps: Array,
    D: float | None,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the lowest and the highest weight of each domain, (domains,)."""
    weights = law._data.points.weights
    limits = dict(zip(law.domains_, zip(weights.min(axis=0), weights.max(axis=0), strict=True), strict=True))
    for name, pair in (bounds or {}).items():
        if name not in limits or not 0.0 <= pair[0] <= pair[1] <= 1.0:
            names = ", ".join(law.domains_)
            raise InputError(f"bounds of {name} are {pair}; give two weights from 0 to 1 for domains among {names}.")
    low, high = np.array([*(limits | dict(bounds or {})).values()], dtype=np.float64).T
    if max_epochs is not None:
        positive("max_epochs", [max_epochs])
        if not np.isfinite(caps).any():
            raise InputError(f"max_epochs is {max_epochs:g}, but unique is missing; give the unique tokens of domains.")
        high = np.fmin(high, max_epochs * caps[0] / (D or np.nan))
        low = np.minimum(low, high)
    if low.sum() > 1.0 + 1e-9 or high.sum() < 1.0 - 1e-9:
        sums = f"from {low.sum():.4g} to {high.sum():.4g}"
        raise InputError(
            f"bounds leave no mixture, because weights within them sum to {sums}; widen them, or max_epochs."
        )
    return low, high


def _doubt(law: MixtureLaw, gain: float, error: float, level: float) -> tuple[float, float, str, int | None]:
    """Judge a gain by Scheffe's method, which allows for the choice of the best among all mixtures (Scheffe 1953).

    Returns the interval's half width, the probability of a gain, why it is doubtful ("" if not), and the runs that would
    show it.
    """
    runs, ways = int(law._data.group.max()) + 1, len(law.domains_) - 1
    freedom = ways, max(runs - 2 * ways, 1)
    wide = error * float(np.sqrt(ways * fdtri(*freedom, level)))
    probability = float(fdtr(*freedom, (gain / max(error, 1e-12)) ** 2 / ways)) if gain > 0 else 0.0
    if gain <= 1e-9:
        return wide, probability, "the base is already the best mixture within the bounds.", None
    if gain > wide:
        return wide, probability, "", None
    needed = int(np.ceil(runs * (wide / gain) ** 2)) if wide / gain < MOST_RUNS**0.5 else None
    advice = f"about {needed} runs in all would show it" if needed else f"{MOST_RUNS:g} times as many runs are too few"
    return wide, probability, f"the gain of {gain:.3g} ± {wide:.2g} is within the noise; {advice}.", needed


def _worth_training(cloud: Array, draws: Array) -> list[Array]:
    """Choose mixtures by the expected fall of the lowest loss below that of the best, one after the other."""
    lowest, chosen = draws[0], list[Array]()
    for _ in range(NEXT):
        fall = np.maximum(lowest - draws, 0.0).mean(axis=1)
        chosen += [cloud[fall.argmax()]] if fall.max() > 0 else []
        lowest = np.minimum(lowest, draws[fall.argmax()])
    return chosen


def _scales(law: MixtureLaw, N: float | None, D: float | None) -> list[Any]:
    """Return three (N, D) from the smallest of the table to this one, or none where neither varies."""
    if not (law.varies("N") or law.varies("D")):
        return []
    ends = [(law.sizes_[name][0], value) if value else None for name, value in (("N", N), ("D", D))]
    return [*zip(*([None] * 3 if pair is None else np.geomspace(*pair, 3).tolist() for pair in ends), strict=True)]
