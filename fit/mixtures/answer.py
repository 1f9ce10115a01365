"""The best mixture for a target by a fitted `MixtureLaw`, whether it beats a base, and what to train next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import fdtr, fdtri, ndtri

from ..errors import Array, InputError, check_level, positive
from ..uncertainty import percentile_interval

CANDIDATES = 256  # mixtures drawn at each concentration and spread
CONCENTRATIONS = (0.0, 3.0, 30.0, 300.0)  # of Dirichlet's distribution about the base
SPREADS = np.geomspace(0.2, 1e-4, 12)  # of mixtures about the best one
NEXT = 5  # mixtures worth training
MOST_RUNS = 100.0  # times the runs of the table; more are not worth a number


@dataclass(frozen=True)
class BestMixture:
    """The best mixture at N and D (None: those of the table), with intervals of probability `level`.

    weights, base: domain -> weight. intervals: domain -> (low, high) over draws of the fit. loss, base_loss, gain =
    base_loss - loss: of the target, in nats per token. probability: of a gain. epochs: domain -> passes over its unique
    tokens, where given. reason: why the answer is not trustworthy, one sentence. runs_needed: runs in all that would
    show this gain, None if unknown or not needed. next: mixtures worth training, best first. scales: from the smallest
    run of the table to this one, {"N", "D", "weights", "loss", "base_loss"}.
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
    law: Any, row: Array, sizes: tuple[float | None, float | None], base: Array | None, caps: Array,
    max_epochs: float | None, bounds: Mapping[str, tuple[float, float]], level: float,
) -> BestMixture:  # fmt: skip
    """See `MixtureLaw.best`; row (losses,) is the target, sizes are N and D, caps (1, domains) the unique tokens."""
    check_level(level)
    (N, D), generator, data = sizes, np.random.default_rng(law.seed), law.data_
    first = np.unique(data.mixture, return_index=True)[1]
    seen = data.points.weights[first]
    if base is None:  # the mixture of most runs, if there is one
        counts = np.bincount(np.unique(np.stack([data.mixture, data.group]), axis=1)[0])
        commonest = counts == counts.max()
        base = (seen[commonest] if commonest.sum() == 1 else seen).mean(axis=0)
    low, high = _bounds(law, bounds, max_epochs, caps, D)
    about = [generator.dirichlet(np.maximum(c * base, 0.05) + (c == 0), CANDIDATES) for c in CONCENTRATIONS]
    cloud = project(np.vstack([base, seen, np.eye(len(low)), *about]), low, high)

    def best_at(N: float | None, D: float | None) -> tuple[Array, dict[str, Any]]:
        def losses(mixtures: Array) -> Array:
            return np.asarray(row @ np.exp(law.surfaces(law.points(mixtures, N, D, caps), draws=False)[0]))

        best = cloud[np.argmin(losses(cloud))]
        for spread in SPREADS:
            moved = best + spread * generator.standard_normal((CANDIDATES, len(low)))
            near = np.vstack([best, project(moved, low, high)])
            best = near[np.argmin(losses(near))]
        loss, base_loss = losses(np.stack([best, base])).tolist()
        return best, {"N": N, "D": D, "weights": named(best), "loss": loss, "base_loss": base_loss}

    def named(mixture: Array) -> dict[str, float]:
        return dict(zip(law.domains_, mixture.tolist(), strict=True))

    best, answer = best_at(N, D)
    near = generator.dirichlet(30.0 * best + 0.05, 2 * CANDIDATES)
    cloud = np.vstack([best, base, project(near, low, high), cloud])
    draws = np.tensordot(row, np.exp(law.surfaces(law.points(cloud, N, D, caps))[1]), axes=1)
    variance = law.moments(law.points(best[None], N, D, caps), row[None], run=False)[1].item()
    wide, optima = float(ndtri(0.5 + 0.5 * level) * np.sqrt(variance)), cloud[draws.argmin(axis=0)]
    gain = answer["base_loss"] - answer["loss"]
    half, probability, reason, runs = _doubt(law, gain, float((draws[1] - draws[0]).std()), level)
    ends = [(value, law.sizes_[name][0]) if value else None for name, value in (("N", N), ("D", D))]
    path = zip(*(np.geomspace(e[1], e[0], 3)[:2].tolist() if e else (None, None) for e in ends), strict=True)
    lowest, following = draws[0], list[dict[str, float]]()
    for _ in range(NEXT):  # each is chosen by the expected fall of the lowest loss, given those before it
        fall = np.maximum(lowest - draws, 0.0).mean(axis=1)
        following += [named(cloud[fall.argmax()])] if fall.max() > 0 else []
        lowest = np.minimum(lowest, draws[fall.argmax()])
    return BestMixture(
        target=dict(zip(law.losses_, row.tolist(), strict=True)), level=level, **answer, base=named(base),
        intervals=dict(zip(law.domains_, (percentile_interval(w, level) for w in optima.T), strict=True)),
        loss_interval=(answer["loss"] - wide, answer["loss"] + wide), gain=gain, probability=probability,
        gain_interval=(gain - half, gain + half), trustworthy=not reason, reason=reason, runs_needed=runs,
        epochs={k: v for k, v in named(best * (D or np.nan) / caps[0]).items() if np.isfinite(v)},
        next=following,
        scales=[*(best_at(*size)[1] for size in path), answer] if law.varies("N") or law.varies("D") else [],
    )  # fmt: skip


def project(mixtures: Array, low: Array, high: Array) -> Array:
    """Return the nearest mixtures (n, m) with sums of one and weights within bounds, by bisection of a shift."""
    below, above = (low - mixtures).min(axis=1), (high - mixtures).max(axis=1)
    for _ in range(60):
        middle = 0.5 * (below + above)
        short = np.clip(mixtures + middle[:, None], low, high).sum(axis=1) < 1.0
        below, above = np.where(short, middle, below), np.where(short, above, middle)
    return np.asarray(np.clip(mixtures + above[:, None], low, high))


def _bounds(
    law: Any, bounds: Mapping[str, tuple[float, float]], max_epochs: float | None, caps: Array, D: float | None
) -> tuple[Array, Array]:
    """Return the lowest and the highest weight of each domain, (domains,)."""
    seen = law.data_.points.weights
    limits = dict(zip(law.domains_, zip(seen.min(axis=0), seen.max(axis=0), strict=True), strict=True))
    for name, pair in bounds.items():
        if name not in limits or not 0.0 <= pair[0] <= pair[1] <= 1.0:
            names = ", ".join(law.domains_)
            raise InputError(f"bounds of {name} are {pair}; give two weights from 0 to 1 for domains among {names}.")
    low, high = np.array([*(limits | dict(bounds)).values()], dtype=np.float64).T
    if max_epochs is not None:
        positive("max_epochs", [max_epochs])
        if not np.isfinite(caps).any():
            raise InputError(f"max_epochs is {max_epochs:g}, but unique is missing; give the unique tokens of domains.")
        high = np.fmin(high, max_epochs * caps[0] / (D or np.nan))
        low = np.minimum(low, high)
    if low.sum() > 1.0 + 1e-9 or high.sum() < 1.0 - 1e-9:
        sums = f"from {low.sum():.4g} to {high.sum():.4g}"
        raise InputError(f"bounds leave no mixture, as weights within them sum to {sums}; widen them or max_epochs.")
    return low, high


def _doubt(law: Any, gain: float, error: float, level: float) -> tuple[float, float, str, int | None]:
    """Judge a gain by Scheffe's method, because the best was chosen among all mixtures (Scheffe 1953).

    Returns the interval's half width, the probability of a gain, a reason for doubt, and the runs that would show it.
    """
    runs, ways = int(law.data_.group.max()) + 1, len(law.domains_) - 1
    freedom = ways, max(runs - 2 * ways, 1)  # a gain that noise makes is the best of `ways` directions
    wide = error * float(np.sqrt(ways * fdtri(*freedom, level)))
    probability = float(fdtr(*freedom, (gain / max(error, 1e-12)) ** 2 / ways)) if gain > 0 else 0.0
    if gain > max(wide, 1e-9):
        return wide, probability, "", None
    if gain <= 1e-9:
        return wide, probability, "the base is already the best mixture within the bounds.", None
    needed = int(np.ceil(runs * (wide / gain) ** 2)) if wide / gain < MOST_RUNS**0.5 else None
    advice = f"about {needed} runs in all would show it" if needed else f"{MOST_RUNS:g} times as many runs are too few"
    return wide, probability, f"the gain of {gain:.3g} ± {wide:.2g} is within the noise; {advice}.", needed
