"""What follows from L = E + A/N^alpha + B/D^beta: the optimum of a budget, and the curve of equal loss.

Special here:
- All questions at a given loss (the cheapest model to train, or to train and serve, the price of a smaller one) move
  along one curve. The share s of the reducible loss that the model's size is to blame for names each of its points:
  N = (A / s R)^(1/alpha), D = (B / (1-s) R)^(1/beta), R = loss - E. What is asked of the curve is monotone in s, so the
  answer is a bisection to rounding, and s = beta / (alpha + beta) is the training optimum.
- A term that vanished sends the optimum to zero or to infinity, and a loss out of reach costs infinity. Both are
  answers: infinities count as draws in an interval.

Constants broadcast with everything else, so (r,) draws and (targets, 1) budgets give (targets, r).

Hoffmann et al. 2022 (arXiv:2203.15556), equation 4; Sardana et al. 2023 (arXiv:2401.00448).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array
from .optimum import Constants

GRID = 160  # points of a search's first pass, which a law of several valleys needs
LOGITS = 700.0  # bounds of logit s: its exponential is still a number
FAR = 300.0  # bounds of log D around sqrt(C)


def optimum(flops: ArrayLike, constants: Constants, coefficient: float = 6.0) -> tuple[Array, Array, Array]:
    """N, D and loss that minimise E + A/N^alpha + B/D^beta under C = coefficient N D, in closed form.

    `flops` and the constants broadcast together. Hoffmann et al. 2022, equation 4.
    """
    E, A, B, alpha, beta = _live(constants)
    log_c = np.log(np.asarray(flops, dtype=np.float64) / coefficient)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_n = (np.log(alpha * A) - np.log(beta * B) + beta * log_c) / (alpha + beta)
        N, D = np.exp(log_n), np.exp(log_c - log_n)
        return N, D, E + _term(A, N, alpha) + _term(B, D, beta)


def tokens_for_loss(N: ArrayLike, loss: ArrayLike, constants: Constants) -> Array:
    """The D at which E + A/N^alpha + B/D^beta falls to `loss`; infinity where no number of tokens is enough."""
    E, A, B, alpha, beta = _live(constants)
    left = np.asarray(loss, dtype=np.float64) - E - _term(A, np.asarray(N, dtype=np.float64), alpha)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(left > 0, (B / np.where(left > 0, left, 1.0)) ** (1.0 / beta), np.inf)


class EqualLoss:
    """The curve E + A/N^alpha + B/D^beta = loss, by z = log(s / (1-s)), s the share of loss - E due to size.

    Calling it gives log N and log D; along it N falls and D rises with z, and N D is smallest at `cheapest`.
    """

    ends = (-LOGITS, LOGITS)

    def __init__(self, constants: Constants, loss: Array) -> None:
        E, A, B, self.alpha, self.beta = _live(constants)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.reachable = loss > E
            self.log_a, self.log_b = (np.log(X) - np.log(loss - E) for X in (A, B))
            self.cheapest = np.where(A == 0, -LOGITS, np.where(B == 0, LOGITS, np.log(self.beta / self.alpha)))

    def __call__(self, z: Any) -> tuple[Array, Array]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self.log_a + np.logaddexp(0.0, -z)) / self.alpha, (self.log_b + np.logaddexp(0.0, z)) / self.beta

    def point(self, z: Any) -> tuple[Array, Array]:
        """N and D at z; infinite where no model reaches the loss."""
        with np.errstate(over="ignore", invalid="ignore"):
            N, D = (np.where(self.reachable, np.exp(log), np.inf) for log in self(z))
        return N, D


def serving_optimum(C: Array, worth: Array, constants: Constants) -> tuple[Array, Array, Array]:
    """N, D and the lowest loss with C = 6 N (D + worth), where the slope in log D vanishes."""
    E, A, B, alpha, beta = _live(constants)
    log_c = np.log(C / 6.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):

        def slope(y: Array) -> Array:
            log_n = log_c - np.logaddexp(y, np.log(worth))
            return np.log(alpha * A) - alpha * log_n - np.log(beta * B) + beta * y - np.log1p(worth * np.exp(-y))

        y = root(slope, 0.5 * log_c - FAR, 0.5 * log_c + FAR)
        D = np.where(A == 0, np.inf, np.where(B == 0, 0.0, np.exp(y)))
        N = C / 6.0 / (D + worth)
        return N, D, E + _term(A, N, alpha) + _term(B, D, beta)


def lowest(value: Callable[[Array], Array], low: Array, high: Array) -> tuple[Array, Array]:
    """Where `value` is lowest between two bounds, and -1 or 1 where that is at one of them, else 0."""
    step = (high - low) / GRID
    best, at = value(low), np.zeros(1)
    for i in range(1, GRID + 1):
        here = value(low + i * step)
        best, at = np.minimum(best, here), np.where(here < best, i, at)
    golden = 0.5 * (np.sqrt(5.0) - 1.0)
    a, b = low + (at - 1) * step, low + (at + 1) * step
    c, d = b - golden * (b - a), a + golden * (b - a)
    at_c, at_d = value(c), value(d)
    for _ in range(45):  # 0.618^45 of two steps is 1e-9
        left = at_c < at_d
        a, b = np.where(left, a, c), np.where(left, d, b)
        new = np.where(left, b - golden * (b - a), a + golden * (b - a))
        at_new = value(new)
        c, d, at_c, at_d = (
            np.where(left, new, d),
            np.where(left, c, new),
            np.where(left, at_new, at_d),
            np.where(left, at_c, at_new),
        )
    return 0.5 * (a + b), np.where(at == 0, -1, np.where(at == GRID, 1, 0))


def root(rising: Callable[[Array], Array], low: Any, high: Any) -> Array:
    """Where a rising function crosses zero, by bisection to rounding; an end where it does not."""
    with np.errstate(all="ignore"):
        for _ in range(70):
            middle = 0.5 * (low + high)
            above = rising(middle) > 0
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return 0.5 * (low + high)


def _live(constants: Constants) -> tuple[Array, Array, Array, Array, Array]:
    """E, A, B, alpha, beta; a term whose exponent is zero is a constant, and counts as E."""
    E, A, B, alpha, beta = (np.asarray(constants[k], dtype=np.float64) for k in ("E", "A", "B", "alpha", "beta"))
    E = E + np.where(alpha == 0, A, 0.0) + np.where(beta == 0, B, 0.0)
    return E, np.where(alpha == 0, 0.0, A), np.where(beta == 0, 0.0, B), alpha, beta


def _term(amplitude: Array, x: Array, exponent: Array) -> Array:
    """Amplitude / x^exponent, and zero where the term vanished, whatever x is."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(amplitude == 0, 0.0, amplitude * np.power(x, -exponent))
