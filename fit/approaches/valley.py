"""One valley for all isoFLOP budgets: each budget has its floor, steepness and best size, and all share one shape.

Under Chinchilla's law, with v = log N minus its best value, loss rises as (q e^(-p v) + p e^(q v)) / (p + q) - 1 with
p = alpha and q = beta. Higher runs count less, because no form holds far above the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Array
from ..solver.jets import Jet

SLACK = 0.4  # error of the form, as a share of the height above the floor
EXPONENT, EXPONENT_SPREAD = 0.35, 0.7  # prior of p and q; the spread is of the logarithm
STEEPNESS, LOOSE = 0.3, 2.0  # weak prior of steepness; its spread, also that of the best size about the mean
NOISE, LEAST_NOISE = 3e-3, 2e-4  # of a log loss: first guess and lower limit
MOST_STEPS, SMALL_GAIN = 200, 1e-9  # of a round, which ends where a step would gain less, relative to the objective
ROUNDS, FAR = 5, 12.0  # rounds of reweighting; largest |v|


@dataclass(frozen=True)
class Valley:
    """A budget's curve: log floor, log steepness, best log(N / N0), their covariance; all budgets share p and q."""

    floor: float
    steepness: float
    place: float
    covariance: Array
    p: float
    q: float

    def minimum(self, losses: Array) -> tuple[Array, Array]:
        return np.full(len(losses), self.place), np.full(len(losses), np.exp(self.floor))

    def at(self, loss: Array, u: Array) -> Array:
        return np.asarray(np.exp(self.floor + np.exp(self.steepness) * _rise(u - self.place, self.p, self.q)))


def fit_valleys(profiles: Sequence[Any]) -> tuple[list[Valley], float, float]:
    """Fit valleys to isoFLOP profiles. Returns them, the standard deviation of log loss, and its degrees of freedom."""
    if not profiles:
        return [], np.nan, 0.0
    K, member = len(profiles), np.repeat(np.arange(len(profiles)), [len(p.N) for p in profiles])
    columns = [(np.log(p.N / p.N0), np.log(p.loss), p.weight, p.loss_se / p.loss) for p in profiles]
    u, y, weight, known_noise = (np.concatenate(column) for column in zip(*columns, strict=True))
    floor = [np.log(p.loss.min()) for p in profiles]
    place = [np.log(p.N[np.argsort(p.loss)[:3]] / p.N0).mean() for p in profiles]
    theta = np.r_[floor, np.full(K, np.log(STEEPNESS)), place, np.full(2, np.log(EXPONENT))]

    def of_runs(theta: Array) -> list[Any]:
        return [*(of_budget[member] for of_budget in theta[:-2].reshape(3, K)), *theta[-2:]]

    def log_losses(floor: Any, steepness: Any, place: Any, log_p: Any, log_q: Any) -> Any:
        return floor + np.exp(steepness) * _rise(u - place, np.exp(log_p), np.exp(log_q))

    def residuals(theta: Array, spread: Array) -> Array:
        _, steepness, place = theta[:-2].reshape(3, K)
        loose = (steepness - np.log(STEEPNESS)) / LOOSE, place / LOOSE
        residual = y - log_losses(*of_runs(theta))
        return np.r_[residual / spread, *loose, (theta[-2:] - np.log(EXPONENT)) / EXPONENT_SPREAD]

    def jacobian(theta: Array, spread: Array) -> Array:
        by_input = log_losses(*(Jet(value, {i: 1.0}) for i, value in enumerate(of_runs(theta)))).first
        slopes = [np.broadcast_to(by_input[i], u.shape)[:, None] for i in range(5)]
        runs = np.c_[*(indicator * slope for slope in slopes[:3]), *slopes[3:]] / -spread[:, None]
        return np.r_[runs, np.diag(np.r_[np.zeros(K), np.full(2 * K, 1 / LOOSE), np.full(2, 1 / EXPONENT_SPREAD)])[K:]]

    def minimise(theta: Array, spread: Array) -> tuple[Array, Array, Array]:  # by Levenberg-Marquardt
        residual, slopes, damping = residuals(theta, spread), jacobian(theta, spread), 1e-3
        for _ in range(MOST_STEPS):
            normal, gradient = slopes.T @ slopes, slopes.T @ residual
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            trial, damping = residuals(theta + step, spread), 10.0 * damping
            if trial @ trial < residual @ residual:
                theta, residual, damping = theta + step, trial, 0.01 * damping
                slopes = jacobian(theta, spread)
            if -gradient @ step <= SMALL_GAIN * (residual @ residual):
                break
        return theta, residual, slopes

    indicator = np.eye(K)[member]
    noise, freedom = NOISE, float(max(len(y) - 2 * K - 2, 0.3 * len(y)))
    for _ in range(ROUNDS):
        run_noise = np.where(np.isfinite(known_noise), known_noise, noise) * np.sqrt(weight.mean() / weight)
        spread = np.hypot(run_noise, SLACK * (y - theta[:K][member]))
        theta, residual, slopes = minimise(theta, spread)
        height = y - theta[:K][member]
        error = np.abs(residual[: len(y)] * spread)[height <= np.median(height)]  # the lower half of the runs
        noise = max(1.4826 * float(np.median(error)) * np.sqrt(len(y) / freedom), LEAST_NOISE)
    covariance: Any = np.linalg.pinv(slopes.T @ slopes)
    p, q = np.exp(theta[-2:])
    valleys = []
    for k in range(K):
        floor, steepness, place = theta[k:-2:K]
        valleys.append(Valley(floor, steepness, place, covariance[k:-2:K, k:-2:K], p, q))
    return valleys, noise, freedom


def _rise(v: Any, p: Any, q: Any) -> Any:
    """Return the rise of log loss above the floor at v = log(N / best N), for steepness 1."""
    v = np.minimum(np.maximum(v, -FAR), FAR)
    return (q * np.exp(-p * v) + p * np.exp(q * v)) / (p + q) - 1.0
