"""The curve through one isoFLOP profile and its lowest point: a parabola, a cubic, or Akima's interpolant, in log N.

Special here:
- All take many versions of the losses at once, (draws, n), because the uncertainty of a vertex is the scatter of the
  vertices of losses with noise added.
- The minimum of a piecewise cubic is found exactly, from the roots of its derivative, and not on a grid.
- Noise is read off contrasts: sums of losses, of unit length, that a smooth profile leaves at zero. For a polynomial
  they are its residuals. An interpolant has none, so there it is what parabolas through four neighbouring sizes, the
  lowest among them, leave over (what is far up the slopes moves no minimum), and the scatter of runs of one size.

Akima 1970 (J. ACM 17, 589); Porian et al. 2024 (arXiv:2406.19146), appendix on fitting, for Akima in isoFLOP profiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..errors import Array

REACH = np.log(10.0)  # a polynomial's lowest point is looked for up to ten times beyond the sizes tried
NEIGHBOURS = 4  # a parabola through this many sizes leaves one contrast
SAME_SIZE = 6  # decimals of log N up to which two sizes are one


class Curve(Protocol):
    """A curve through losses at u (n,), where u is log N about its mean."""

    def contrasts(self, loss: Array) -> Array:
        """Sums of the losses (n,) that carry noise only, (r, n): where a run's variance is sigma^2 / weight (weights of
        mean 1), their sum of squares is sigma^2 times the trace of their covariance at sigma = 1.
        """
        ...

    def minimum(self, losses: Array) -> tuple[Array, Array]:
        """Where each row of losses (draws, n) has its lowest point and the curve there: u (draws,), loss (draws,)."""
        ...

    def at(self, loss: Array, u: Array) -> Array:
        """The curve through loss (n,) at u (m,); NaN where it does not reach."""
        ...


class Polynomial:
    """Weighted least squares of degree 2 or 3. Where it has no lowest point: NaN."""

    def __init__(self, degree: int, u: Array, weight: Array) -> None:
        root = np.sqrt(weight / weight.mean())
        X = np.vander(u, degree + 1, increasing=True)
        self.ends = (u.min() - REACH, u.max() + REACH)
        self.project = np.linalg.pinv(X * root[:, None]) * root  # (degree + 1, n): losses to coefficients
        self.residual = root[:, None] * (np.eye(len(u)) - X @ self.project)

    def contrasts(self, loss: Array) -> Array:
        return self.residual

    def minimum(self, losses: Array) -> tuple[Array, Array]:
        c = self.project @ losses.T
        u = _valley(c[3] if len(c) > 3 else np.zeros_like(c[0]), c[2], c[1])
        u = np.clip(u, *self.ends)
        return u, np.polynomial.polynomial.polyval(u, c, tensor=False)

    def at(self, loss: Array, u: Array) -> Array:
        return np.asarray(np.polynomial.polynomial.polyval(u, self.project @ loss))


class Akima:
    """Akima's interpolant of log loss through the (weighted) mean loss of each size. Its lowest point may be an end."""

    def __init__(self, u: Array, weight: Array) -> None:
        weight = weight / weight.mean()
        rounded, member = np.unique(np.round(u, SAME_SIZE), return_inverse=True)
        belongs = (np.arange(len(rounded))[:, None] == member.ravel()) * weight
        total = belongs.sum(axis=1)
        self.mean = belongs / total[:, None]  # (sizes, n)
        self.knots = self.mean @ u
        self.within = np.sqrt(weight)[:, None] * (np.eye(len(u)) - self.mean[member.ravel()])
        self.local = _local_contrasts(self.knots, total)

    def contrasts(self, loss: Array) -> Array:
        lowest = int(np.argmin(self.mean @ loss))
        return np.concatenate([self.within, self.local[self.local[:, lowest] != 0] @ self.mean])

    def minimum(self, losses: Array) -> tuple[Array, Array]:
        polynomial = self._interpolate(losses @ self.mean.T)
        a, b, c, d = polynomial.c  # each (sizes - 1, draws), of a t^3 + b t^2 + c t + d from the left knot
        length = np.diff(self.knots)[:, None]
        t = _valley(a, b, c)
        t = np.where((t > 0) & (t < length), t, 0.0)
        inner = ((a * t + b) * t + c) * t + d
        candidates = np.concatenate([inner, np.log(losses @ self.mean[-1:].T).T])
        places = np.concatenate([self.knots[:-1, None] + t, np.full((1, len(losses)), self.knots[-1])])
        lowest = candidates.argmin(axis=0)
        rows = np.arange(len(losses))
        return places[lowest, rows], np.exp(candidates[lowest, rows])

    def at(self, loss: Array, u: Array) -> Array:
        # A size at either end may differ from its knot by rounding, and is on the curve.
        near = np.where(np.abs(u - np.clip(u, *self.knots[[0, -1]])) < 1e-9, np.clip(u, *self.knots[[0, -1]]), u)
        return np.exp(np.asarray(self._interpolate((self.mean @ loss)[None, :])(near))[..., 0])

    def _interpolate(self, means: Array) -> Any:
        from scipy.interpolate import Akima1DInterpolator

        return Akima1DInterpolator(self.knots, np.log(means).T)


METHODS: dict[str, Callable[[Array, Array], Curve]] = {
    "parabola": partial(Polynomial, 2),
    "cubic": partial(Polynomial, 3),
    "akima": Akima,
}


def _valley(a: Array, b: Array, c: Array) -> Array:
    """Where a t^3 + b t^2 + c t has its local minimum; NaN where it has none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(b**2 - 3 * a * c)  # NaN where the derivative has no root
        # Of its roots the one where it rises, written so that nothing cancels and a = 0 is a parabola.
        t = np.where(b > 0, -c / (b + root), (root - b) / (3 * a))
    return np.where(np.isfinite(t), t, np.nan)


def _local_contrasts(knots: Array, weight: Array) -> Array:
    """What parabolas through each NEIGHBOURS consecutive knots leave over: (windows, knots), each row of unit variance
    when knot j has variance 1 / weight_j.
    """
    windows = max(len(knots) - NEIGHBOURS + 1, 0)
    rows = np.zeros((windows, len(knots)))
    for first in range(windows):
        part = slice(first, first + NEIGHBOURS)
        u = knots[part] - knots[part].mean()
        X = np.stack([np.ones_like(u), u, u**2], 1)
        left = np.linalg.svd(X.T)[2][-1]  # the direction that the three columns of X do not reach
        rows[first, part] = left / np.sqrt((left**2 / weight[part]).sum())
    return rows
