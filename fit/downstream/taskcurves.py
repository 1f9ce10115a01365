"""Curves of a score: floor + (top - floor) exp(-exp(-u)), with u linear in features; many curves are fitted at once.

With u = w log C + b, the negative logarithm of the share of the height is a power of compute (arXiv:2512.08894). Floor
and top are parameters with a prior. Bits per byte b follow the same curve as 2^-b: above the floor, b = E + A C^-w.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..errors import Array
from ..solver.forms import LogSumTerms
from ..solver.solver import solve
from ..uncertainty import excess_scatter

FLOOR, TOP, OFFSET, SLOPE = 0.03, 0.1, 4.0, 3.0  # standard deviations of the priors; chosen on Gadre et al.'s C4, RPJ
SCATTERS = 4  # solutions of curves and scatters in turn
FAR = 30.0  # bound of u, and of the parameters


@dataclass(frozen=True)
class Curves:
    """P fitted curves: theta (P, 2 + k) of floor, top and weights, their covariance, and the scatter of runs (P,)."""

    theta: Array
    covariance: Array
    scatter: Array

    @classmethod
    def fit(cls, features: Array, y: Array, variance: Array, used: np.ndarray, floor: Array) -> Self:
        """Fit to features (1, n, k), the first of which is 1, and scores y (P, n) with variances of their items.

        used: mask (P, n). floor: expected floors (P,).
        """
        P, k = len(y), features.shape[-1]
        prior = np.tile(np.array([0.0, 1.0, -1.0, *[0.0] * (k - 1)]), (P, 1))
        prior[:, 0] = floor
        precision = np.array([FLOOR, TOP, OFFSET, *[SLOPE] * (k - 1)]) ** -2.0
        theta, scatter = prior.copy(), np.full(P, 0.01)
        theta[:, 3:] = 0.3
        form, target = _form(features), np.concatenate([np.where(used, y, 0.0), prior], axis=1)
        variance = np.where(used, variance, 1.0)
        for _ in range(SCATTERS):
            weight = np.concatenate([used / (variance + scatter[:, None] ** 2), np.tile(precision, (P, 1))], axis=1)
            theta = solve(form, target, weight, theta[:, None], np.full(k + 2, -FAR), np.full(k + 2, FAR), np.inf).theta
            value, (slopes, *_) = form.value(theta)
            covariance = np.linalg.inv((slopes * weight[..., None]).transpose(0, 2, 1) @ slopes)
            shrunk = np.einsum("pii,i->p", covariance, precision)  # parameters that their priors determine
            free = np.maximum(used.sum(axis=1) - (k + 2 - shrunk), 1.0)
            square = used * (value - target)[:, : y.shape[1]] ** 2
            scatter = np.maximum(excess_scatter(square, variance, free), 1e-4)
        return cls(theta, covariance, scatter)

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return scores at features (P or 1, points, k) and their variances by the fit, each (P, points)."""
        value, (slopes, *_) = _form(features).value(self.theta)
        variance = np.einsum("pni,pij,pnj->pn", slopes, self.covariance, slopes)
        return value[:, : features.shape[1]], variance[:, : features.shape[1]]


def _form(features: Array) -> LogSumTerms:
    """Return the form of curves at features (P or 1, n, k), followed by the parameters, which have priors."""
    _, n, k = features.shape
    columns = np.pad(features, ((0, 0), (0, k + 2), (0, 0)))
    curve, itself = np.repeat([1.0, 0.0], (n, k + 2)), np.eye(n + k + 2)[:, n:]

    def terms(v: Mapping[str, Any]) -> list[Any]:
        floor, top, *weights = v.values()
        u = sum(weight * columns[..., i] for i, weight in enumerate(weights))
        share = np.exp(-np.exp(np.minimum(-u, FAR)))
        return [curve * (floor + (top - floor) * share) + sum(itself[:, i] * one for i, one in enumerate(v.values()))]

    return LogSumTerms(terms, {str(i): i for i in range(k + 2)}, n + k + 2)
