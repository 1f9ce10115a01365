"""Resampling and intervals.

Special here: what is resampled is a *run*, never a row. Checkpoints of one run, and branches of one trunk, share their
data order and their luck, so they move together (a cluster bootstrap). A resample is a row of counts, which makes it a
weight for the solver.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import Array, InputError

REDRAWS = 50
STILL = 1e-6  # variance of a log input below which a resample holds it constant


def cluster_counts(groups: Any, resamples: int, seed: int = 0) -> Array:
    """How often each row occurs in each resample, of shape (resamples, rows), when whole groups are drawn with
    replacement.

    `groups` (rows,) labels the rows that move together. Each resample draws as many groups as there are.
    """
    if resamples < 1:
        raise InputError(f"bootstrap is {resamples}; a positive number of resamples is needed.")
    labels, member = np.unique(np.asarray(groups).astype(str), return_inverse=True)
    generator = np.random.default_rng(seed)
    share = np.full(len(labels), 1.0 / len(labels))
    return generator.multinomial(len(labels), share, size=resamples).astype(np.float64)[:, member.ravel()]


def identifiable_counts(
    groups: Any, n: int, seed: int, inputs: Array, weight: Array, axes: Array, free: int
) -> tuple[Array, int]:
    """Resamples (n, rows) that can identify a law, and how many others were drawn and thrown away on the way.

    inputs (m, rows): a resample needs more different ones than the `free` parameters; axes (a, rows): log inputs that
    must vary in it. Raises InputError where the table has too few groups for that.
    """
    _, point = np.unique(inputs, axis=1, return_inverse=True)
    member = np.zeros((len(point), point.max() + 1))
    member[np.arange(len(point)), point.ravel()] = 1.0
    independent = len(np.unique(np.asarray(groups).astype(str)))
    too_few = InputError(
        f"the table has {independent} independent runs, too few to resample {free} parameters; "
        f"at least {free + 3} are needed."
    )
    if independent <= free:
        raise too_few
    counts = cluster_counts(groups, n, seed)
    redrawn = 0
    for attempt in range(1, REDRAWS):
        poor = ((counts * weight) @ member > 0).sum(axis=1) <= free
        for axis in axes:
            poor |= _variance(axis, counts) < STILL
        if not poor.any():
            return counts, redrawn
        redrawn += int(poor.sum())
        counts[poor] = cluster_counts(groups, int(poor.sum()), seed + 7919 * attempt)
    raise too_few


def _variance(x: Array, counts: Array) -> Array:
    mean = counts @ x / counts.sum(axis=1)
    return counts @ x**2 / counts.sum(axis=1) - mean**2


def jackknife_weights(groups: Any) -> Array:
    """Weights (groups, rows) that leave one whole group out at a time."""
    labels, member = np.unique(np.asarray(groups).astype(str), return_inverse=True)
    return 1.0 - (np.arange(len(labels))[:, None] == member.ravel()[None, :])


def wild_targets(fitted: Array, residual: Array, groups: Any, n: int, seed: int, parameters: int) -> Array:
    """Targets (n, rows) of a wild bootstrap: the fit plus residuals, signs flipped for whole groups at a time.

    Residuals of a fit are smaller than its errors, so they are inflated by sqrt(rows / (rows - parameters)).
    Wu 1986; Cameron, Gelbach and Miller 2008 for the clusters.
    """
    if n < 1:
        raise InputError(f"bootstrap is {n}; a positive number of resamples is needed.")
    labels, member = np.unique(np.asarray(groups).astype(str), return_inverse=True)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(n, len(labels)))[:, member.ravel()]
    return fitted + signs * residual * np.sqrt(len(residual) / max(len(residual) - parameters, 1))


def percentile_interval(draws: Any, level: float = 0.95) -> tuple[float, float]:
    """The central `level` interval of the draws; infinities count as draws, NaN do not, and no draw gives (nan,
    nan).
    """
    values = np.sort(np.asarray(draws, dtype=np.float64).ravel())
    values = values[~np.isnan(values)]
    if values.size == 0:
        return (float("nan"), float("nan"))
    tail = 0.5 * (1.0 - level)
    # Interpolating between two infinities is undefined, so the ends are order statistics.
    low = values[int(np.floor(tail * (values.size - 1)))]
    high = values[int(np.ceil((1.0 - tail) * (values.size - 1)))]
    return (float(low), float(high))


def bca_interval(draws: Any, estimate: float, jackknife: Any, level: float = 0.95) -> tuple[float, float]:
    """Bias-corrected and accelerated bootstrap interval (Efron 1987).

    `draws` (resamples,), `estimate` of the full fit, `jackknife` (groups,) with one group left out each. Falls back on
    the percentile interval where every draw lies on one side of the estimate, since the bias is then unknown.
    """
    from scipy.special import ndtr, ndtri

    values = np.asarray(draws, dtype=np.float64).ravel()
    values = np.sort(values[~np.isnan(values)])
    below = 0.5 * ((values < estimate).mean() + (values <= estimate).mean()) if values.size else 0.0
    if not 0.0 < below < 1.0:
        return percentile_interval(draws, level)
    left = np.asarray(jackknife, dtype=np.float64)
    spread = left[np.isfinite(left)].mean() - left[np.isfinite(left)] if np.isfinite(left).any() else np.zeros(1)
    scale = float((spread**2).sum())
    acceleration = float((spread**3).sum()) / (6.0 * scale**1.5) if scale > 0 else 0.0
    bias = ndtri(below)
    ends = []
    for tail in (0.5 * (1.0 - level), 0.5 * (1.0 + level)):
        shifted = bias + ndtri(tail)
        share = float(ndtr(bias + shifted / (1.0 - acceleration * shifted)))
        rank = share * (values.size - 1)
        ends.append(values[int(np.floor(rank) if tail < 0.5 else np.ceil(rank))])
    return (float(ends[0]), float(ends[1]))


def studentised(residual: Array, parameters: int = 0) -> Array:
    """Residuals over a robust estimate of their spread, the median absolute deviation scaled to a Gaussian's sigma.

    A fit that is nearly L1 runs through as many points as it has parameters; those say nothing about the spread, so
    the `parameters` smallest residuals are left out of it.
    """
    centred = residual - np.median(residual)
    spread = 1.4826 * np.median(np.sort(np.abs(centred))[min(parameters, len(centred) - 1) :])
    if spread <= 1e-9:  # a perfect fit: nothing stands out
        return np.zeros_like(residual)
    return centred / spread


def excess_scatter(squares: Array, variance: Array, freedom: int) -> float:
    """The tau >= 0 at which sum squares / (variance + tau^2) equals the degrees of freedom (Paule and Mandel 1982).

    squares (n,) weighted squared residuals, variance (n,) of the observations; zero where they scatter less than that.
    """
    if freedom < 1 or (squares / variance).sum() <= freedom:
        return 0.0
    low, high = 0.0, float(np.sqrt(squares.sum() / freedom))  # at `high` the sum is at most `freedom`
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if (squares / (variance + middle**2)).sum() > freedom else (low, middle)
    return 0.5 * (low + high)
