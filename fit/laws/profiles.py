"""Profile-likelihood intervals: a constant is held at one value after another, and all others are fitted again.

Special here:
- A profile is one batch for the solver: problems that differ in where their bounds hold one coordinate. It needs no
  bootstrap, and takes rows as independent and alike in their noise.
- Huber's objective is no likelihood, so how far it may rise follows from the errors: 2 rise * mean psi' / mean psi^2 is
  F(1, n - k), psi being the objective's slope. Both means are those of the residuals that fits without each row leave
  there, smoothed by a kernel; the fit's own residuals bunch at zero, and with them an interval covers 85 to 92 %
  instead of 94 to 97 (measured in docs/decisions.md).
- An end that the objective never reaches is open, 0 or infinity: the runs do not determine the constant there.

The tau test: Huber and Ronchetti 2009, Robust Statistics, chapter 13. For least squares it is the F test.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, InputError
from ..solver.solver import solve
from ..uncertainty import kernel_width
from .resampling import left_out_residuals, slopes

if TYPE_CHECKING:
    from .law import Law

# Values tried on the way out, in distances at which a parabola would end; the far ones only where they are needed.
NEAR, FAR = np.array([0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0]), 2.0 ** np.arange(2, 14)
REFINE = 9  # values tried between the two that an end lies between ...
ROUNDS = 2  # ... so many times
OWN_STARTS = 2  # of the law's own, besides a step along the tangent
NODES = 64  # of a Gaussian kernel

Point = tuple[float, float, Array]  # of a profile: the coordinate that is held, the rise, all coordinates (k,)


def profile(law: Law, name: str, values: ArrayLike) -> Array:
    """How far the objective rises above its minimum with the constant `name` held at each of values (m,).

    An interval ends where this is `tolerated_rise(law, level)`. Raises InputError for a constant that is not fitted by
    itself, and after a bootstrap of groups of rows.
    """
    held = _Held(law, name)
    coordinate = held.coordinate(np.asarray(values, dtype=np.float64))
    return held.rise(coordinate, np.tile(held.best, (len(coordinate), 1)))[0]


def profile_interval(law: Law, name: str, level: float = 0.95) -> tuple[float, float]:
    """The values of a constant that the runs tolerate at `level`; an open end is 0 or infinite."""
    held, most = _Held(law, name), tolerated_rise(law, level)
    # Where the objective is flat, a step of 1 is a factor of e.
    step = min(np.sqrt(2.0 * most / max(_slope_moments(law)[0] * held.curvature, 1e-300)), 1.0)
    return held.constant(held.end(-step, most)), held.constant(held.end(step, most))


def tolerated_rise(law: Law, level: float = 0.95) -> float:
    """The rise of the objective at the ends of an interval."""
    from scipy.special import stdtrit

    curve, square = _slope_moments(law)
    freedom = max(int((law.weight_ > 0).sum()) - law.problem_.free, 1)
    return float(0.5 * stdtrit(freedom, 0.5 + 0.5 * level) ** 2 * square / curve)


def _slope_moments(law: Law) -> tuple[float, float]:
    """Mean psi' and mean psi^2 of the objective's slope psi under the errors."""
    from scipy.special import ndtr, ndtri

    if law.objective == "se":  # its squares are in units of the known variance
        return 1.0, 1.0
    used, delta = law.weight_ > 0, law._delta
    weight, rows = law.weight_[used], int(used.sum())
    if np.isinf(delta):
        return 1.0, float(weight @ law.residuals()[used] ** 2 / max(rows - law.problem_.free, 1))
    error = left_out_residuals(law, np.arange(len(used)).astype(str))[used]
    share = weight / weight.sum()
    width = max(kernel_width(error, rows), 1e-12)
    shrink = np.sqrt(1.0 + width**2 / max(float(np.mean(error**2)), 1e-24))  # the variance stays what it is
    error, width = error / shrink, width / shrink
    curve = share @ (ndtr((delta - error) / width) - ndtr((-delta - error) / width))
    kernel = width * ndtri((np.arange(NODES) + 0.5) / NODES)
    square = share @ np.clip(error[:, None] + kernel, -delta, delta) ** 2
    return float(curve), float(square.mean())


class _Held:
    """A law with one coordinate held, in coordinates that are one constant each.

    at, log: which one, and whether it is a logarithm; best (k,): the fit; direction (k,): how all coordinates follow
    the one that is held, to first order; curvature: what of its squared slope is then left.
    """

    def __init__(self, law: Law, name: str) -> None:
        law._fitted()
        inputs = tuple(law.data_[column] for column in law.inputs)
        self.law, self.problem = law, law._problem(inputs, law.data_[law.output], centred=False)
        p = self.problem
        if name not in p.coordinates:
            raise InputError(f"profile of {name!r} is not known; choose one of {', '.join(p.coordinates)}.")
        used = law.weight_ > 0
        groups = used.sum() if law.draws_ is None else len(np.unique(law.groups_[used]))
        if groups < used.sum():
            raise InputError(
                f"the {used.sum()} rows of this law move in {groups} groups and a profile takes them as independent; "
                "choose percentile or bca."
            )
        self.at = p.coordinates.index(name)
        self.log = p.logarithmic[self.at]
        constants = np.array([law.constants_[coordinate] for coordinate in p.coordinates])
        with np.errstate(divide="ignore", invalid="ignore"):
            self.best = np.clip(np.where(p.logarithmic, np.log(constants), constants), p.lower, p.upper)
        slope = slopes(law, p, self.best)
        others = (p.lower < self.best) & (self.best < p.upper)
        others[self.at] = False
        size = np.maximum(np.linalg.norm(slope, axis=0), 1e-300)
        follow = np.linalg.lstsq((slope / size)[:, others], slope[:, self.at], rcond=1e-12)[0]
        self.direction = np.zeros(len(self.best))
        self.direction[self.at], self.direction[others] = 1.0, -follow / size[others]
        self.curvature = float(((slope @ self.direction) ** 2).sum())

    def coordinate(self, values: Array) -> Array:
        if not self.log:
            return values
        if not (values > 0).all():
            raise InputError(f"values holds {values.min():g}; each must be above zero.")
        return np.log(values)

    def constant(self, coordinate: float) -> float:
        return float(np.exp(coordinate)) if self.log else coordinate

    def rise(self, values: Array, near: Array) -> tuple[Array, Array]:
        """Rise of the objective (m,) and coordinates (m, k), with the held one at values (m,), others near `near`."""
        p, law = self.problem, self.law
        warm = near + (values - near[:, self.at])[:, None] * self.direction
        lower, upper = (np.tile(bound, (len(values), 1)) for bound in (p.lower, p.upper))
        lower[:, self.at] = upper[:, self.at] = values
        weights = np.broadcast_to(law.weight_ * law._precision, (len(values), p.form.points))
        starts = p.starts(weights[:1], OWN_STARTS)
        found = solve(p.form, p.target, weights, starts, lower, upper, law._delta, warm=warm)
        rise = np.where(np.isfinite(found.objective), found.objective, np.inf) - law.objective_
        return np.maximum(rise, 0.0), found.theta

    def end(self, step: float, most: float) -> float:
        """Where the objective has risen by `most`, in the direction of `step`; infinite or zero where it never does."""
        best = self.best[self.at]
        bound = float((self.problem.upper if step > 0 else self.problem.lower)[self.at])
        outward = best + step * np.concatenate([NEAR, FAR])
        outward = np.append(outward[np.abs(outward - best) < abs(bound - best)], bound)
        points: list[Point] = [(best, 0.0, self.best)]
        for values in np.split(outward[np.isfinite(outward)], [len(NEAR)]):
            if len(values) and points[-1][1] <= most:
                points += self._points(values, np.tile(points[-1][2], (len(values), 1)))
        if max(rise for _, rise, _ in points) <= most:
            return 0.0 if bound == 0.0 and not self.log else float(np.copysign(np.inf, step))
        for _ in range(ROUNDS):
            inner, outer = _crossing(points, most)
            share = np.linspace(0.0, 1.0, REFINE + 2)[1:-1]
            between = inner[2] + share[:, None] * (outer[2] - inner[2])
            points = [inner, *self._points(inner[0] + share * (outer[0] - inner[0]), between), outer]
        inner, outer = _crossing(points, most)
        # The root of the rise is nearly straight.
        inside, outside = np.sqrt(inner[1]), np.sqrt(min(outer[1], 1e9 * most))
        return float(inner[0] + (np.sqrt(most) - inside) / (outside - inside) * (outer[0] - inner[0]))

    def _points(self, values: Array, near: Array) -> list[Point]:
        return list(zip(values, *self.rise(values, near), strict=True))


def _crossing(points: list[Point], most: float) -> tuple[Point, Point]:
    """The first two neighbours that the wanted rise lies between."""
    return next((inner, outer) for inner, outer in pairwise(points) if outer[1] > most)
