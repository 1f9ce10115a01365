"""Resampling and intervals.

Special here: what is resampled is a *run*, never a row. Checkpoints of one run, and branches of one trunk, share their
data order and their luck, so they move together (a cluster bootstrap). A resample is a row of counts, which makes it a
weight for the solver.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import Array, InputError


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
