"""The best mixture for a target by a fitted MixtureLaw, whether it beats a base beyond doubt, and what to train next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import ndtri

from ..errors import Array, InputError, check_level, positive
from ..uncertainty import percentile_interval

if TYPE_CHECKING:
    from .mixturelaw import MixtureLaw

CANDIDATES = 512  # mixtures drawn at each of these concentrations; the best are refined
CONCENTRATIONS = (1.0, 10.0, 100.0)
REFINED = 3
NEXT = 5  # mixtures worth training that are returned
STEP = 1e-4  # of a weight, for slopes
SKILL_LEVEL = 0.95  # of the test that mixtures matter at all
MOST_RUNS_FACTOR = 100.0  # more runs than this multiple are not worth a number

Loss = Callable[[Array], Array]  # the target's loss (points,) at mixtures (points, domains)


@dataclass(frozen=True)
class BestMixture:
    """The best mixture of domains at N and D (None: those of the table), with intervals of probability `level`.

    weights, base: domain -> weight. intervals: domain -> (low, high), over draws of the fit. loss, base_loss: the
    target's, in nats per token. gain: base_loss - loss. probability: that the gain is above zero. epochs: domain ->
    passes over its unique tokens, where these were given. reason: why the answer is not `trustworthy`, one sentence.
    runs_needed: runs in total that would show this gain, None if unknown or not needed. next: mixtures worth training,
    best first. scales: the best weights from the smallest run of the table to this N and D, as {"N", "D", "weights",
    "loss", "base_loss"}.
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
    law: MixtureLaw,
    target: Mapping[str, float] | None,
    N: float | None,
    D: float | None,
    flops: float | None,
    base: Mapping[str, float] | None,
    max_epochs: float | None,
    unique: Mapping[str, float] | None,
    bounds: Mapping[str, tuple[float, float]] | None,
    level: float,
) -> BestMixture:
    """See `MixtureLaw.best`."""
    check_level(level)
    row, caps = law.target(target), law.caps(unique)
    start = _base(law) if base is None else law.mixtures(base)[0]
    N, D = _sizes(law, row, start, caps, N, D, flops)
    low, high = _bounds(law, bounds, max_epochs, caps, D)
    generator = np.random.default_rng(law.seed)
    drawn = [start[None], law.data_.points.weights, np.eye(len(low))]
    drawn += [generator.dirichlet(0.01 + c * start, CANDIDATES) for c in CONCENTRATIONS]
    candidates = project(np.vstack([*drawn, generator.dirichlet(np.ones(len(low)), CANDIDATES)]), low, high)

    def best_at(N: float | None, D: float | None) -> tuple[Array, Array]:
        def loss(mixtures: Array) -> Array:
            return np.asarray(row @ np.exp(law.surfaces(law.points(mixtures, N, D, caps), draws=False)[0]))

        best = minimum(loss, candidates, low, high)
        return best, loss(np.stack([best, start]))

    best, (loss, base_loss) = best_at(N, D)
    near = project(generator.dirichlet(0.01 + 30.0 * best, CANDIDATES), low, high)
    cloud = np.vstack([best, start, near, candidates])
    draws = np.tensordot(row, np.exp(law.surfaces(law.points(cloud, N, D, caps))[1]), axes=1)
    gains = draws[1] - draws[0]
    lowest = cloud[draws.argmin(axis=0)]
    interval = percentile_interval
    tested = law.points(np.stack([best, start]), N, D, caps)
    wide = float(ndtri(0.5 + 0.5 * level) * np.sqrt(law.moments(tested, row[None], run=False)[1][0, 0]))
    gain = float(base_loss - loss)
    reason, runs = _doubt(law, row, gain, gains, level)
    named = lambda mixture: dict(zip(law.domains_, mixture.tolist(), strict=True))  # noqa: E731
    capped = np.isfinite(caps[0])
    return BestMixture(
        target=dict(zip(law.losses_, row.tolist(), strict=True)),
        N=N,
        D=D,
        level=level,
        weights=named(best),
        intervals=dict(zip(law.domains_, (interval(w, level) for w in lowest.T), strict=True)),
        base=named(start),
        loss=float(loss),
        loss_interval=(float(loss) - wide, float(loss) + wide),
        base_loss=float(base_loss),
        gain=gain,
        gain_interval=interval(gains, level),
        probability=float(np.mean(gains > 0)),
        epochs={
            name: w * D / cap
            for name, w, cap, is_capped in zip(law.domains_, best, caps[0], capped, strict=True)
            if is_capped
        },
        trustworthy=not reason,
        reason=reason,
        runs_needed=runs,
        next=[named(mixture) for mixture in _worth_training(cloud, draws)],
        scales=[_at_scale(*scale, named, best_at) for scale in _scales(law, N, D)],
    )


def project(mixtures: Array, low: Array, high: Array) -> Array:
    """Return the nearest mixtures (points, domains) within bounds whose sums are one, by bisection of the shift."""
    below, above = (low - mixtures).min(axis=1) - 1.0, (high - mixtures).max(axis=1) + 1.0
    for _ in range(60):
        middle = 0.5 * (below + above)
        total = np.clip(mixtures + middle[:, None], low, high).sum(axis=1)
        below, above = np.where(total < 1.0, middle, below), np.where(total < 1.0, above, middle)
    return np.asarray(np.clip(mixtures + above[:, None], low, high))


def minimum(loss: Loss, candidates: Array, low: Array, high: Array) -> Array:
    """Return the mixture of lowest loss: the best candidates, each refined by sequential quadratic programming."""

    def slopes(mixture: Array) -> Array:
        steps = np.vstack([mixture, mixture + STEP * np.eye(len(mixture))])
        values = loss(steps)
        return (values[1:] - values[0]) / STEP

    order = np.argsort(loss(candidates), kind="stable")[:REFINED]
    refined = [
        minimize(
            lambda mixture: loss(mixture[None])[0],
            candidate,
            jac=slopes,
            method="SLSQP",
            bounds=[*zip(low, high, strict=True)],
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1.0, "jac": np.ones_like},
            options={"maxiter": 60, "ftol": 1e-7},
        ).x
        for candidate in candidates[order]
    ]
    ends = np.vstack([project(np.nan_to_num(np.stack(refined)), low, high), candidates[order]])
    return np.asarray(ends[np.argmin(loss(ends))])


def _base(law: MixtureLaw) -> Array:
    """Return the mixture that most runs share, or the mean of all if no mixture has more runs than others."""
    weights, mixture, group = law.data_.points.weights, law.data_.mixture, law.data_.group
    runs = np.unique(np.stack([mixture, group]), axis=1)[0]
    counts = np.bincount(runs)
    most = int(np.argmax(counts))
    if (counts == counts[most]).sum() == 1:
        return np.asarray(weights[mixture == most][0])
    first = np.unique(mixture, return_index=True)[1]
    return np.asarray(weights[first].mean(axis=0))


def _sizes(
    law: MixtureLaw, row: Array, base: Array, caps: Array, N: float | None, D: float | None, flops: float | None
) -> tuple[float | None, float | None]:
    """Return N and D of the run to plan: as given, by `flops`, or of the largest run of the table."""
    for name, value in (("N", N), ("D", D), ("flops", flops)):
        if value is not None:
            positive(name, [value])
    largest = {name: high for name, (_, high) in law.sizes_.items()}
    if flops is None:
        return N if N is not None else largest.get("N"), D if D is not None else largest.get("D")
    if {*law.sizes_} != {"N", "D"}:
        raise InputError("flops is given, but the table lacks N or D; add both columns, or leave flops out.")
    if N is not None and D is not None:
        raise InputError("N, D and flops were all given; give two of them at most.")
    if N is not None or not law.varies("D"):
        return (N, flops / 6.0 / N) if N is not None else (flops / 6.0 / largest["D"], largest["D"])
    if D is not None or not law.varies("N"):
        return (flops / 6.0 / D, D) if D is not None else (largest["N"], flops / 6.0 / largest["N"])
    reach = flops / law.reach_.max()
    sizes = np.geomspace(law.sizes_["N"][0] / 4.0, law.sizes_["N"][1] * 4.0 * max(reach, 1.0), 200)
    points = law.points(np.tile(base, (len(sizes), 1)), sizes, flops / 6.0 / sizes, caps)
    size = float(sizes[np.argmin(row @ np.exp(law.surfaces(points, draws=False)[0]))])
    return size, flops / 6.0 / size


def _bounds(
    law: MixtureLaw,
    bounds: Mapping[str, tuple[float, float]] | None,
    max_epochs: float | None,
    caps: Array,
    D: float | None,
) -> tuple[Array, Array]:
    """Return the least and the largest weight of each domain, (domains,) each."""
    weights = law.data_.points.weights
    low, high = weights.min(axis=0), weights.max(axis=0)
    law.check_domains("bounds", bounds or {})
    for name, pair in (bounds or {}).items():
        i = law.domains_.index(name)
        low[i], high[i] = pair
        if not 0.0 <= low[i] <= high[i] <= 1.0:
            raise InputError(f"bounds of {name} are {pair}; they must be two weights from 0 to 1, the lower first.")
    if max_epochs is not None:
        positive("max_epochs", [max_epochs])
        if not np.isfinite(caps).any() or D is None:
            raise InputError(f"max_epochs is {max_epochs}, but unique is not given; give the unique tokens of domains.")
        high = np.minimum(high, max_epochs * caps[0] / D)
        low = np.minimum(low, high)
    if low.sum() > 1.0 + 1e-9 or high.sum() < 1.0 - 1e-9:
        side = (
            f"lower limits sum to {low.sum():.4g}, above"
            if low.sum() > 1
            else f"upper limits sum to {high.sum():.4g}, below"
        )
        raise InputError(f"bounds leave no mixture: the {side} one; widen them, max_epochs or unique.")
    return low, high


def _doubt(law: MixtureLaw, row: Array, gain: float, gains: Array, level: float) -> tuple[str, int | None]:
    """Return why the answer is not trustworthy ("" if it is), and how many runs in total would show the gain."""
    runs, relative = int(law.data_.group.max()) + 1, gain / float(gains.std() or 1.0)
    skill = law.skill(row)
    if gain <= 0:
        return "the base is already the best mixture within the bounds.", None
    shown = min(relative / ndtri(level), skill / ndtri(SKILL_LEVEL))
    if shown >= 1.0 and np.mean(gains > 0) >= level:
        return "", None
    needed = int(np.ceil(runs / shown**2)) if shown > MOST_RUNS_FACTOR**-0.5 else None
    if needed is not None:
        needed = max(needed, runs + 1)
    advice = f"about {needed} runs in place of {runs} would show it" if needed else "more such runs would not show it"
    if skill < ndtri(SKILL_LEVEL):
        return f"held-out mixtures are predicted no better than by one loss for all; {advice}.", needed
    return f"the gain of {gain:.3g} is within the noise, with a standard error of {gains.std():.2g}; {advice}.", needed


def _worth_training(cloud: Array, draws: Array) -> list[Array]:
    """Return NEXT mixtures whose lowest loss is expected to improve most on the best one's, by a greedy choice."""
    lowest, chosen = draws[0], []
    for _ in range(NEXT):
        improvement = np.maximum(lowest - draws, 0.0).mean(axis=1)
        if not improvement.max() > 0:
            break
        chosen.append(cloud[improvement.argmax()])
        lowest = np.minimum(lowest, draws[improvement.argmax()])
    return chosen


def _scales(law: MixtureLaw, N: float | None, D: float | None) -> list[tuple[float | None, float | None]]:
    """Return three (N, D) from the smallest of the table to this one; none if neither varies."""
    if not (law.varies("N") or law.varies("D")):
        return []
    steps = []
    for name, value in (("N", N), ("D", D)):
        steps.append([None] * 3 if value is None else np.geomspace(law.sizes_[name][0], value, 3).tolist())
    return [*zip(*steps, strict=True)]


def _at_scale(N: float | None, D: float | None, named: Any, best_at: Any) -> dict[str, Any]:
    best, (loss, base_loss) = best_at(N, D)
    return {"N": N, "D": D, "weights": named(best), "loss": float(loss), "base_loss": float(base_loss)}
