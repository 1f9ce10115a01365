"""Curves of a score: floor + (top - floor) exp(-exp(-u)), with u linear in features; many curves are fitted at once.

With u = w log C + b, the negative logarithm of the share of the height is a power of compute (arXiv:2512.08894). Floor
and top are parameters with a prior. Bits per byte b follow the same curve as 2^-b: above the floor, b = E + A C^-w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from ..errors import Array
from ..uncertainty import excess_scatter

FLOOR, TOP, OFFSET, SLOPE = 0.03, 0.1, 4.0, 3.0  # standard deviations of the priors; chosen on Gadre et al.'s C4, RPJ
ITERATIONS, SCATTERS = 60, 4  # of Levenberg and Marquardt's method; of curves and scatters in turn
FAR = 30.0  # bound of u


@dataclass(frozen=True)
class Curves:
    """P fitted curves: theta (P, 2 + k) of floor, top and weights, their covariance, and the scatter of runs (P,)."""

    theta: Array
    covariance: Array
    scatter: Array

    @classmethod
    def fit(cls, features: Array, y: Array, variance: Array, used: np.ndarray, floor: Array) -> Self:
        """Fit to features (P or 1, n, k), the first of which is 1, and scores y (P, n) with variances of their items.

        used: mask (P, n). floor: expected floors (P,).
        """
        P, k = len(y), features.shape[-1]
        prior = np.tile(np.array([0.0, 1.0, -1.0, *[0.0] * (k - 1)]), (P, 1))
        prior[:, 0] = floor
        precision = np.array([FLOOR, TOP, OFFSET, *[SLOPE] * (k - 1)]) ** -2.0
        theta, scatter = prior.copy(), np.full(P, 0.01)
        theta[:, 3:] = 0.3
        y, variance, runs = np.where(used, y, 0.0), np.where(used, variance, 1.0), used.sum(axis=1)
        for _ in range(SCATTERS):
            weight = used / (variance + scatter[:, None] ** 2)
            theta, covariance, information = _minimise(features, y, weight, prior, precision, theta)
            free = np.maximum(runs - np.einsum("pij,pji->p", covariance, information), 1.0)
            square = used * (_value(theta, features)[0] - y) ** 2
            scatter = np.maximum(excess_scatter(square, variance, free), 1e-4)
        return cls(theta, covariance, scatter)

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return scores at features (P or 1, points, k) and their variances by the fit, each (P, points)."""
        value, slopes = _value(self.theta, features)
        return value, np.einsum("pni,pij,pnj->pn", slopes, self.covariance, slopes)


def _value(theta: Array, features: Array) -> tuple[Array, Array]:
    """Return the curves (P, n) and their derivatives (P, n, parameters)."""
    u = np.clip((features @ theta[:, 2:, None])[..., 0], -FAR, FAR)
    share = np.exp(-np.exp(-u))
    height = (theta[:, 1] - theta[:, 0])[:, None]
    rise = (height * share * np.exp(-u))[..., None] * features
    return theta[:, :1] + height * share, np.concatenate([(1 - share)[..., None], share[..., None], rise], axis=2)


def _minimise(
    features: Array, y: Array, weight: Array, prior: Array, precision: Array, theta: Array
) -> tuple[Array, Array, Array]:
    """Return the best theta, its covariance and the runs' part of its information."""
    damping, identity = np.full(len(y), 1e-2), np.eye(theta.shape[1])
    value, slopes = _value(theta, features)

    def objective(value: Array, theta: Array) -> Array:
        return np.asarray((weight * (value - y) ** 2).sum(axis=1) + (precision * (theta - prior) ** 2).sum(axis=1))

    best = objective(value, theta)
    for _ in range(ITERATIONS):
        gradient = np.einsum("pn,pni->pi", weight * (value - y), slopes) + precision * (theta - prior)
        hessian = (slopes * weight[..., None]).transpose(0, 2, 1) @ slopes + precision * identity
        diagonal = np.einsum("pii->pi", hessian)[:, :, None] * identity
        step = np.linalg.solve(hessian + damping[:, None, None] * diagonal, gradient[..., None])[..., 0]
        new_value, new_slopes = _value(theta - step, features)
        new = objective(new_value, theta - step)
        better = new <= best
        finished = better & (best - new < 1e-8 * (1.0 + best))
        theta = np.where(better[:, None], theta - step, theta)
        value = np.where(better[:, None], new_value, value)
        slopes = np.where(better[:, None, None], new_slopes, slopes)
        best, damping = np.where(better, new, best), np.where(better, 0.3, 4.0) * damping
        if finished.all():
            break
    information = (slopes * weight[..., None]).transpose(0, 2, 1) @ slopes
    return theta, np.asarray(np.linalg.inv(information + precision * identity), dtype=np.float64), information
