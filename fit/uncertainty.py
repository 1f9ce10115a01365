"""Resampling and intervals.

Groups are resampled, not rows, because checkpoints of one run and branches of one trunk have a common error. "Pairs"
draws groups with replacement, as weights for the solver. "Wild" shifts losses by left-out residuals; it covers better
for few runs and unequal noise (docs/decisions.md), but assumes that the law is right.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .errors import Array, InputError, floats

REDRAWS = 50  # attempts to draw identifiable resamples; chosen by hand
MOST_RESAMPLES = 100_000  # ends of a 95 % interval are then known to a hundredth of its width, and memory holds them
END_ERROR = 0.68  # standard error of an end of a 95 % interval over its width, times sqrt(n), for n normal draws
RUNS_PER_CONSTANT = 20  # from here on pairs cover at the nominal rate, and are preferred
KERNEL = 0.75  # factor of the bandwidth, see `kernel_width`
ALONE = 1e-6  # a group with a leverage above 1 - ALONE alone determines a constant
STILL = 1e-6  # variance of a log input below which it is constant in a resample


def check_resampling(n: int, seed: int, minimum: int = 1) -> None:
    if not minimum <= n <= MOST_RESAMPLES:
        zero = "" if minimum else " (zero gives no intervals)"
        raise InputError(f"bootstrap is {n}; it must be from {minimum} to {MOST_RESAMPLES} resamples{zero}.")
    if seed < 0:
        raise InputError(f"seed is {seed}; it must be zero or a positive integer.")


def by_group(groups: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct labels in order of first appearance, and the index of each row's label."""
    labels, first, member = np.unique(np.asarray(groups).astype(str), return_index=True, return_inverse=True)
    order = np.argsort(first)
    return labels[order], np.argsort(order)[member]


def group_labels(groups: Any, rows: int) -> np.ndarray:
    """Return each row's group as text; without `groups`, each row is a group."""
    labels = np.arange(rows) if groups is None else np.asarray(groups)
    if len(labels) != rows:
        raise InputError(
            f"groups has {len(labels)} values and the fit has {rows} points; one value per point is needed."
        )
    return labels.astype(str)


def numbered(groups: Any, *columns: Array) -> np.ndarray:
    """Number the groups as they appear in rows sorted by `columns`; return the number of each row's group, (rows,).

    Thus draws do not depend on the order of rows or the names of groups.
    """
    order = np.lexsort(columns[::-1])
    _, member = by_group(np.asarray(groups)[order])
    return member[np.argsort(order)]


def cluster_counts(groups: Any, resamples: int, seed: int = 0) -> Array:
    """Draw groups with replacement; return how often each resample has each row, (resamples, rows)."""
    check_resampling(resamples, seed)
    labels, member = np.unique(groups, return_inverse=True)
    generator = np.random.default_rng(seed)
    share = np.full(len(labels), 1.0 / len(labels))
    return generator.multinomial(len(labels), share, size=resamples).astype(np.float64)[:, member]


def identifiable_counts(
    groups: Any, n: int, seed: int, inputs: Array, weight: Array, axes: Array, free: int
) -> tuple[Array, int]:
    """Draw n resamples of groups; return how often each has each row, (n, rows), and how many were discarded.

    To be kept, a resample must have more distinct columns of `inputs` (m, rows) than the law has `free` parameters, and
    vary in each of the log inputs `axes` (a, rows).
    """
    _, point = np.unique(inputs, axis=1, return_inverse=True)
    order = np.argsort(point.ravel(), kind="stable")
    first = np.searchsorted(point.ravel()[order], np.arange(point.max() + 1))
    independent = independent_groups(groups, free)
    counts = cluster_counts(groups, n, seed)
    redrawn = 0
    for attempt in range(1, REDRAWS):
        present = (counts * weight)[:, order] > 0
        poor = np.logical_or.reduceat(present, first, axis=1).sum(axis=1) <= free
        for axis in axes:
            total = counts.sum(axis=1)
            poor |= counts @ axis**2 / total - (counts @ axis / total) ** 2 < STILL
        if not poor.any():
            return counts, redrawn
        redrawn += int(poor.sum())
        counts[poor] = cluster_counts(groups, int(poor.sum()), seed + 7919 * attempt)
    raise _too_few(independent, free)


def independent_groups(groups: Any, free: int) -> int:
    """Return the number of distinct groups. Raises InputError if there are too few for `free` parameters."""
    independent = len(by_group(groups)[0])
    if independent <= free:
        raise _too_few(independent, free)
    return independent


def resampled_together(groups: Array, run_ids: Array, free: int) -> Array:
    """Return `groups`, or if groups do not outnumber the `free` parameters but runs do, `run_ids`.

    With `run_ids`, intervals are too narrow.
    """
    few = len(np.unique(groups)) <= free < len(np.unique(run_ids))
    return run_ids if few else groups


def _too_few(independent: int, free: int) -> InputError:
    return InputError(
        f"the table has {independent} independent runs, too few to resample {free} parameters; "
        f"at least {free + 3} are needed."
    )


def jackknife_weights(groups: Any) -> Array:
    """Return weights (groups, rows) that leave out one group at a time, in the order of `by_group`."""
    labels, member = by_group(groups)
    return 1.0 - (np.arange(len(labels))[:, None] == member)


def need_no_group_alone(jacobian: Array, groups: Any, what: str) -> None:
    """Raise InputError if some constant of `what` is not determined without one of the groups.

    jacobian (rows, k): derivatives of the predictions by the constants, times the root of the row's weight.
    """
    labels, member = by_group(groups)
    size = np.linalg.norm(jacobian, axis=0)
    left, singular, _ = np.linalg.svd(jacobian / np.where(size > 0, size, 1.0), full_matrices=False)
    left = left[:, singular > 1e-9 * singular[0]]
    for place, label in enumerate(labels):
        if np.linalg.norm(left[member == place], 2) ** 2 > 1.0 - ALONE:
            raise InputError(
                f"without run {label} the other {len(labels) - 1} independent runs do not determine the constants of "
                f"{what}; an interval needs more runs."
            )


def kernel_width(errors: Array, independent: int) -> float:
    """Return a bandwidth (standard deviation) to smooth residuals `errors` (rows,); `independent`: number of groups."""
    spread = min(np.sqrt(np.mean(errors**2)), 1.4826 * np.median(np.abs(errors)))
    return float(KERNEL * spread * independent**-0.2)


def wild_targets(
    fitted: Array, left_out: Array, groups: Any, n: int, seed: int, freedom: int, width: float | None = None
) -> Array:
    """Draw targets (n, rows) of a wild bootstrap: `fitted` plus residuals with one random sign per group.

    left_out (rows,): residuals of fits without the row's group, which give the jackknife's covariance (MacKinnon and
    White 1985; for clusters MacKinnon, Nielsen and Webb 2023, arXiv:2301.04527). Each draw multiplies all of them by a
    random sqrt(freedom / chi-square), for intervals of Student's t. width: standard deviation of noise added for a
    nearly L1 objective (De Angelis, Hall and Young 1993).
    """
    check_resampling(n, seed)
    labels, member = np.unique(groups, return_inverse=True)
    generator = np.random.default_rng(seed)
    signs = generator.choice([-1.0, 1.0], size=(n, len(labels)))
    noise = np.zeros(signs.shape) if width is None else width * generator.standard_normal(signs.shape)
    size = (1.0 - 1.0 / len(labels)) * freedom / generator.chisquare(freedom, n)
    if width:
        size /= 1.0 + width**2 / np.mean(left_out**2)
    return fitted + np.sqrt(size)[:, None] * (signs[:, member] * left_out + noise[:, member])


def percentile_interval(draws: Any, level: float = 0.95) -> tuple[float, float]:
    """Return the bounds (low, high) of the central share `level` of draws other than NaN; (nan, nan) without any."""
    values = np.sort(floats(draws).ravel())
    values = values[~np.isnan(values)]
    if values.size == 0:
        return (float("nan"), float("nan"))
    tail = 0.5 * (1.0 - level)
    # Order statistics, because interpolation between two infinities is undefined.
    low = values[int(np.floor(tail * (values.size - 1)))]
    high = values[int(np.ceil((1.0 - tail) * (values.size - 1)))]
    return (float(low), float(high))


def percentile_intervals(draws: Array, level: float) -> Array:
    """Return `percentile_interval` along the last axis: (..., 2) for draws (..., r)."""
    *points, resamples = draws.shape
    rows = draws.reshape(math.prod(points), resamples)  # -1 fails where no refit converged
    return np.array([percentile_interval(row, level) for row in rows]).reshape(*points, 2)


def excess_scatter(squares: Array, variance: Array, freedom: Any) -> Any:
    """Solve sum(squares / (variance + tau^2)) = freedom (...) for tau (...), the scatter beyond `variance` (..., n).

    `squares` are squared residuals. Returns 0 without a solution (Paule and Mandel 1982).
    """
    low, high = np.zeros(squares.shape[:-1]), np.sqrt(squares.sum(axis=-1) / np.maximum(freedom, 1))
    none = (np.asarray(freedom) < 1) | ((squares / variance).sum(axis=-1) <= freedom)
    for _ in range(40):  # at `high` the sum is at most `freedom`
        middle = 0.5 * (low + high)
        above = (squares / (variance + middle[..., None] ** 2)).sum(axis=-1) > freedom
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(none, 0.0, 0.5 * (low + high))[()]
