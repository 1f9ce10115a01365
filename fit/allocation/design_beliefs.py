"""What is believed of a law and of a large budget, linearised at draws of the law; runs narrow it one by one.

Special here:
- Coordinates are log E, log a, alpha, log b and beta, a and b being the terms at the middle of the runs; fewer where
  the law holds E or ties its exponents.
- The slope of log L*(C) by the constants is that of the loss at the optimum itself, for there the derivative by N
  vanishes.
- Each trunk has an error of its own among the unknowns, so that its second branch is worth less than a run of another
  seed. Runs come and go one at a time (rank-one updates, as in a Kalman filter); to take one back is to observe it with
  a negative variance, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Array, InputError, positive
from .isoloss import optimum

# Standard deviations of the prior about each draw, in (log E, log a, alpha, log b, beta): far wider than any fit.
PRIOR = np.array([1.0, 1.5, 0.3, 1.5, 0.3])
LEAST_EXPONENT = 0.02  # a draw with a flatter term has no optimum worth designing for
LEAST_NOISE = 1e-5  # in log loss; runs that lie on the law to rounding


@dataclass(frozen=True)
class Widths:
    """Standard deviations of log L* and log N* at the target: geometric means over draws of the law."""

    loss: float
    N: float


class Beliefs:
    """Gaussian beliefs about a law's coordinates and about the error of each trunk, linearised at M draws.

    covariance (M, k + T, k + T) of k coordinates and T trunks; goals (M, 2, k), slopes of log L* and log N*.
    """

    def __init__(self, goals: Array, prior: Array, trunks: int, shared: float, own: float) -> None:
        M, _, k = goals.shape
        diagonal = np.concatenate([prior**2, np.full(trunks, shared)])
        self.k, self.own, self.shared = k, own, shared
        self.goals = np.concatenate([goals, np.zeros((M, 2, trunks))], axis=2)
        self.covariance = np.broadcast_to(np.diag(diagonal), (M, k + trunks, k + trunks)).copy()

    def copy(self) -> Beliefs:
        new = object.__new__(Beliefs)
        vars(new).update(vars(self) | {"covariance": self.covariance.copy()})
        return new

    def observe(self, slopes: Array, trunk: int, weight: float = 1.0) -> None:
        """A run with slopes (M, k) on a trunk (-1: its own) counts; a weight of -1 takes it back, exactly."""
        noise = (self.own if trunk >= 0 else self.own + self.shared) / weight
        moved = np.einsum("mij,mj->mi", self.covariance[:, :, : self.k], slopes)
        if trunk >= 0:
            moved += self.covariance[:, :, self.k + trunk]
        variance = np.einsum("mi,mi->m", moved[:, : self.k], slopes) + noise
        if trunk >= 0:
            variance += moved[:, self.k + trunk]
        self.covariance -= moved[:, :, None] * (moved / variance[:, None])[:, None, :]

    def variances(self) -> Array:
        """Of log L* and log N*, (M, 2)."""
        return np.maximum(np.einsum("mqi,mij,mqj->mq", self.goals, self.covariance, self.goals), 1e-300)

    def criterion(self) -> float:
        """Mean log width of the two, over draws."""
        return float(0.5 * np.log(self.variances()).mean())

    def widths(self) -> Widths:
        loss, size = np.exp(0.5 * np.log(self.variances()).mean(axis=0))
        return Widths(float(loss), float(size))

    def gains(self, slopes: Array, trunks: np.ndarray) -> Array:
        """By how much each of K runs, slopes (M, K, k) on trunks (K,), would lower the criterion, (K,)."""
        k, place = self.k, self.k + trunks
        towards = np.einsum("mqi,mij->mqj", self.goals, self.covariance)
        pull = np.einsum("mqi,mKi->mqK", towards[:, :, :k], slopes) + towards[:, :, place]
        inner = self.covariance[:, :k, :k]
        variance = (np.matmul(slopes, inner) * slopes).sum(axis=2) + self.own
        variance += 2.0 * (slopes * self.covariance[:, :k, place].transpose(0, 2, 1)).sum(axis=2)
        variance += self.covariance[:, place, place]
        left = 1.0 - pull**2 / (variance[:, None, :] * self.variances()[:, :, None])
        return np.asarray(-0.5 * np.log(np.maximum(left, 1e-12)).mean(axis=(0, 1)))


@dataclass(frozen=True)
class Question:
    """What is asked: a fitted and bootstrapped law, the target in FLOPs, and how the errors of runs hang together.

    trunk (n,): labels of the law's rows, `noise` the standard deviation of one run's log loss, `correlation` that of
    the errors of two runs of one trunk.
    """

    law: Any
    target_flops: float
    trunk: np.ndarray
    noise: float
    correlation: float

    @classmethod
    def of(cls, law: Any, target_flops: float, trunk: Any = None, correlation: float | None = None) -> Question:
        """Noise from the residuals; so is the correlation where it is not given.

        Raises InputError where the law has no draws or is of another form, or the target is no positive number.
        """
        if getattr(law, "form", None) != "chinchilla":
            raise InputError("a design needs the law E + A/N^alpha + B/D^beta; other forms are not known to it.")
        law._bootstrapped()
        (target,) = positive("target_flops", [target_flops])
        labels = np.arange(len(law.weight_)) if trunk is None else np.asarray(trunk)
        if len(labels) != len(law.weight_):
            raise InputError(f"trunk has {len(labels)} labels and the law {len(law.weight_)} rows; each needs one.")
        if correlation is None:
            correlation = trunk_correlation(law.residuals(), labels)
        if not 0.0 <= correlation < 1.0:
            raise InputError(f"correlation is {correlation}; at least 0 and below 1 is expected.")
        return cls(law, float(target), labels, max(law.residual_scale_, LEAST_NOISE), correlation)


def trunk_correlation(residuals: Array, trunk: np.ndarray, expected: float = 0.5, pairs: float = 10.0) -> float:
    """Correlation of the errors of two runs of one trunk, between 0 and 0.9.

    A mean over pairs, shrunk to `expected` as if so many `pairs` had shown that: a few residuals of a fit say little.
    """
    _, member = np.unique(trunk.astype(str), return_inverse=True)
    sums, squares = np.bincount(member, residuals), np.bincount(member, residuals**2)
    counts = np.bincount(member)
    found = float((sums**2 - squares).sum() / 2.0)  # of the products of all pairs
    scale = max(float((residuals**2).mean()), LEAST_NOISE**2)
    number = float((counts * (counts - 1) / 2).sum())
    return float(np.clip((found / scale + pairs * expected) / (number + pairs), 0.0, 0.9))


class Linear:
    """Slopes of log loss and of the answers at M draws of a law, in the coordinates that it has free."""

    def __init__(self, question: Question, draws: int, seed: int) -> None:
        law = question.law
        self.constants = _chosen_draws(law, draws, seed)
        used = law.weight_ > 0
        self.n0, self.d0 = (float(np.log(law.data_[name][used]).mean()) for name in ("N", "D"))
        self.basis = _free(law)
        self.prior = np.sqrt((PRIOR**2) @ self.basis)  # each free coordinate moves one constant, or both exponents
        if law.tied:
            self.prior[list(self.basis[2]).index(1.0)] = PRIOR[2]

    def slopes(self, N: Array, D: Array) -> Array:
        """Of log loss at points (n,) or (M, n) by each free coordinate, (M, n, k)."""
        c = {name: values[:, None] for name, values in self.constants.items()}
        x, y = np.log(N), np.log(D)
        with np.errstate(over="ignore"):
            terms = [c["E"] + 0.0 * x, c["A"] * np.exp(-c["alpha"] * x), c["B"] * np.exp(-c["beta"] * y)]
        total = terms[0] + terms[1] + terms[2]
        e, a, b = (term / total for term in terms)
        full = np.stack([e, a, -a * (x - self.n0), b, -b * (y - self.d0)], axis=2)
        return np.asarray(full @ self.basis)

    def goals(self, target: float) -> Array:
        """Slopes of log L* and log N* at the target, (M, 2, k)."""
        c = self.constants
        N, D, _ = optimum(target, c)
        loss = self.slopes(N[:, None], D[:, None])[:, 0]
        alpha, beta, both = c["alpha"], c["beta"], c["alpha"] + c["beta"]
        by_alpha = (1.0 / alpha - (np.log(N) - self.n0)) / both
        by_beta = (-1.0 / beta + (np.log(D) - self.d0)) / both
        size = np.stack([np.zeros_like(both), 1.0 / both, by_alpha, -1.0 / both, by_beta], axis=1) @ self.basis
        return np.stack([loss, size], axis=1)


def _free(law: Any) -> Array:
    """How (log E, log a, alpha, log b, beta) follow from the free coordinates, (5, k): zeros and ones."""
    basis = np.eye(5)
    if law.tied:
        basis[:, 2] += basis[:, 4]
    keep = [i for i in range(5) if not (i == 0 and law.E is not None) and not (i == 4 and law.tied)]
    return basis[:, keep]


def _chosen_draws(law: Any, draws: int, seed: int) -> dict[str, Array]:
    """The law's own constants and some of its draws, without those that have no optimum at all."""
    drawn = law._bootstrapped()
    usable = (drawn["alpha"] > LEAST_EXPONENT) & (drawn["beta"] > LEAST_EXPONENT) & (drawn["A"] > 0) & (drawn["B"] > 0)
    places = np.flatnonzero(usable)
    if not len(places):
        raise InputError(
            "no draw of the law has an optimum (a term is flat or gone in all); add runs of other N and D."
        )
    places = np.random.default_rng(seed).permutation(places)[:draws]
    return {name: drawn[name][places] for name in ("E", "A", "B", "alpha", "beta")}
