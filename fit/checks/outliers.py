"""Outliers of a fitted law, and the fit without them.

Residuals are divided by their robust scale and by sqrt(1 - leverage); the bound is for Laplace noise. Outliers mask
each other, so the farthest are removed first and the law is refitted until none is left.

Cook and Weisberg 1982, Residuals and influence in regression; Besiroglu et al. 2024 (arXiv:2404.10102).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import Array, need
from ..laws.law import Law

ONCE_IN = 1000.0  # one healthy table in this many has a false outlier (docs/decisions.md)
ROUNDING = 1e-6  # smallest scale in log loss; no loss is known more exactly
FREEDOM = 8  # with fewer runs beyond the law's constants the scale is too uncertain; chosen by hand
MOST = 1 / 3  # largest share of runs that may be outliers; chosen by hand


@dataclass(frozen=True)
class Outliers:
    """Outliers of a law, measured against the law refitted without them.

    rows (k,): the outliers, farthest first. residual (n,): log loss minus that of the refitted law. scatter: median
    absolute residual of the other runs, without the smallest ones. constants: those of the refitted law.
    """

    rows: np.ndarray
    residual: Array
    scatter: float
    constants: dict[str, float]


def find_outliers(law: Law) -> Outliers:
    """Return the outliers of a fitted law, and its constants without them."""
    need("law", law, "constants_", "a fitted law")
    constants, used = law.constants_, law.weight_ > 0
    inliers, columns = used.copy(), [law.data_[name] for name in law.inputs]
    while True:
        residual = law.problem_.target - np.log(law.evaluate(constants, *columns))
        centred = residual - np.median(residual[inliers])
        size = np.sort(np.abs(centred[inliers]))
        # A nearly L1 fit runs through as many points as it has constants; these residuals do not measure the scale.
        scatter = max(float(np.median(size[min(law.problem_.free, len(size) - 1) :])), ROUNDING)
        pull = _leverage(law, constants, columns, inliers)
        distance = np.abs(centred) / (scatter / np.log(2)) / np.sqrt(1 - pull)
        beyond = inliers & (distance > np.log(used.sum() * ONCE_IN)) & (distance >= 0.5 * distance[inliers].max())
        remaining = int((inliers & ~beyond).sum())
        if not beyond.any() or remaining < max(law.problem_.free + FREEDOM, (1 - MOST) * used.sum()):
            break
        refitted = {name: float(value[0]) for name, value in law.refit(inliers & ~beyond).items()}
        if not all(map(np.isfinite, refitted.values())):
            break
        constants, inliers = refitted, inliers & ~beyond
    rows = np.flatnonzero(used & ~inliers)
    return Outliers(rows[np.argsort(-np.abs(centred[rows]))], residual, scatter, constants)


def _leverage(law: Law, constants: Mapping[str, float], columns: list[Array], inliers: np.ndarray) -> Array:
    """Return the leverages (n,) of the runs in the mask `inliers`, capped at 0.95; 0 for others."""

    def fitted(name: str, factor: float) -> Array:
        return np.log(law.evaluate({**constants, name: constants[name] * factor}, *columns))[inliers]

    slope = np.stack([fitted(name, 1 + 1e-5) - fitted(name, 1 - 1e-5) for name in law.names], axis=1)
    slope /= np.maximum(np.linalg.norm(slope, axis=0), 1e-300)
    basis, singular, _ = np.linalg.svd(slope, full_matrices=False)
    leverage = np.zeros(len(inliers))
    leverage[inliers] = np.minimum((basis[:, singular > 1e-6] ** 2).sum(axis=1), 0.95)
    return leverage
