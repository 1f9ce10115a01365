"""Damped Newton in a box for many problems at once.

`approach`, far from the optimum, is Levenberg-Marquardt on iteratively reweighted least squares, with Transtrum and
Sethna's correction along the curve of equal predictions.

`refine`, near it, uses the exact Hessian, stages of falling delta, and a line search on linearised residuals. A
rejected step is moved by the error of the linearisation (Fletcher 1982; Maratos 1978).

Bertsekas 1982 (SIAM J. Control Optim. 20, 221): Newton in a box. Madsen and Nielsen 1990 (BIT 30, 682). Transtrum and
Sethna 2012 (arXiv:1201.5885), section 4; Nielsen 1999 (IMM-REP-1999-05): updates of the damping.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import Array
from .forms import LogForm

GRADIENT_TOLERANCE = 1e-9  # a gradient is zero below this share of the terms that cancel in it ...
RESIDUAL_ROUNDING = 1e-13  # ... or where residuals of this size would explain it: so a perfect fit converges too
OBJECTIVE_ROUNDING = 1e-13  # a change of the objective below this share cannot be measured
LOG_ROUNDING = 1e-15  # rounding of log predictions, allowed when a fit that did not converge is refined again
FAR_GAIN = 1e-6  # `approach` ends when a step would gain less than this share of the objective ...
STAGE_GAIN = 1e-2  # ... and a stage of `refine` below this one; both chosen by hand
MOST_TURN = 0.75  # the largest correction of a step, in units of the step
MATTERS = 1.5  # assumed change of log predictions across the box, which sets the least damping of a parameter
LENGTHS = np.linspace(0.0, 1.0, 5)  # shares of a step where the slope is evaluated ...
STEEP, ZOOMS = 0.1, 6  # ... up to ZOOMS times, while the slope at the bracket's end is over 1 / STEEP of its start's
FAR_DAMPING, NEAR_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-4, 1e-9, 1e-15, 1e12
REJECTED, INDEFINITE = 1e-7, 1e-8  # least damping after a rejected step, and in addition to negative curvature
CAUTION = 4.0  # factor on the damping after a rejected step, doubled at each further one


@dataclass(frozen=True)
class Minimum:
    """Where the solver ended in each of P problems.

    theta (P, k); objective (P,), the weighted *sum*; converged (P,): no gradient inside the box and no negative
    curvature; at_bound (P, k): parameters held by the box.
    """

    theta: Array
    objective: Array
    converged: np.ndarray
    at_bound: np.ndarray


@dataclass(frozen=True)
class Batch:
    """P problems and their current points.

    target (1, n) or (P, n), weights (P, n), lower and upper (P, k), delta (P,). At the point: theta (P, k); residual
    (P, n) in units of delta; pull (P, n), the weighted slope of Huber's function in these units; objective (P,); cache
    of the form. least_curvature (P, k) per parameter; rounding (P,): objective of a perfect fit.
    """

    form: LogForm
    target: Array
    weights: Array
    lower: Array
    upper: Array
    delta: Array
    least_curvature: Array
    rounding: Array
    theta: Array
    residual: Array
    pull: Array
    objective: Array
    cache: list[Array]

    @classmethod
    def start(
        cls, form: LogForm, target: Array, weights: Array, lower: Array, upper: Array, delta: Array, theta: Array
    ) -> Batch:
        """Return a batch of problems at `theta` (P, k), clipped to lower and upper."""
        total = weights.sum(axis=1)
        width = upper - lower
        bend = np.divide(MATTERS, width, out=np.zeros_like(width), where=(width > 0) & np.isfinite(width)) ** 2
        bend = np.maximum(bend * total[:, None], 1e-300)
        rounding = total * RESIDUAL_ROUNDING**2
        # Residuals and what follows from them are filled in by `at`.
        batch = cls(form, target, weights, lower, upper, delta, bend, rounding, theta, weights, weights, total, [])
        return batch.at(theta)

    def at(self, theta: Array) -> Batch:
        """Return the same problems at other parameters `theta` (P, k), clipped to their bounds."""
        theta = np.minimum(np.maximum(theta, self.lower), self.upper)
        residual, cache = self.form.value(theta)
        residual -= self.target
        residual /= self.delta[:, None]
        pull, objective = _huber(self.weights, residual, self.delta)
        return replace(self, theta=theta, residual=residual, pull=pull, objective=objective, cache=cache)

    def with_delta(self, delta: Array) -> Batch:
        """Return the same problems and points with Huber's delta replaced by `delta`, (P,)."""
        residual = self.residual * (self.delta / delta)[:, None]
        pull, objective = _huber(self.weights, residual, delta)
        return replace(self, delta=delta, residual=residual, pull=pull, objective=objective)

    def take(self, rows: np.ndarray) -> Batch:
        if rows.all():
            return self
        at = np.flatnonzero(rows)
        fields = {name: value for name, value in vars(self).items() if name != "target" or len(value) > 1}
        taken: dict[str, Any] = {name: v.take(at, axis=0) for name, v in fields.items() if isinstance(v, np.ndarray)}
        return replace(self, **taken, cache=[array.take(at, axis=0) for array in self.cache])  # faster than array[rows]

    def put(self, rows: np.ndarray, other: Batch) -> None:
        """Overwrite the points of the problems in the mask `rows` (P,) with those in `other`, a batch of only these."""
        mine, theirs = ((b.theta, b.residual, b.pull, b.objective, *b.cache) for b in (self, other))
        for old, new in zip(mine, theirs, strict=True):
            old[rows] = new

    @property
    def slope(self) -> Array:
        """Return the objective's derivative by each prediction, (P, n)."""
        return self.pull * self.delta[:, None]

    @property
    def inside(self) -> Array:
        """Return the objective's second derivative by each prediction, (P, n): the weight within delta, else zero."""
        return self.weights * (np.abs(self.residual) <= 1.0)

    @property
    def spread(self) -> Array:
        """Return the weights of reweighted least squares, (P, n), which are at least as large as `inside`."""
        size = np.abs(self.residual)
        np.maximum(size, 1.0, out=size)
        return np.divide(self.weights, size, out=size)

    def held(self, gradient: Array) -> np.ndarray:
        """Return a mask (P, k) of the parameters that are fixed, or that descent would move past their bound."""
        low, high = self.theta <= self.lower, self.theta >= self.upper
        return (low & (gradient > 0)) | (high & (gradient < 0)) | (low & high)

    def flat(self, gradient: Array) -> np.ndarray:
        """Return a mask (P,) of problems whose gradient is zero up to rounding in all parameters that are not held."""
        absolute, reach = self.form.sizes(self.cache, self.slope, self.spread)
        zero = np.abs(gradient) <= GRADIENT_TOLERANCE * absolute + RESIDUAL_ROUNDING * reach
        return np.asarray((self.held(gradient) | zero).all(axis=1))


def _huber(weights: Array, residual: Array, delta: Array) -> tuple[Array, Array]:
    """Return the weighted slopes of Huber's function, (P, n), divided by delta, and the objective, (P,).

    `residual` is in units of delta.
    """
    slope = np.clip(residual, -1.0, 1.0)
    pull = weights * slope
    slope *= -0.5
    slope += residual
    return pull, delta**2 * _rows_dot(pull, slope)


def approach(batch: Batch, iterations: int) -> tuple[Array, Array]:
    """Move each problem close to an optimum by Levenberg-Marquardt. Returns theta (P, k) and the objectives (P,)."""
    theta, objective, rows = batch.theta.copy(), batch.objective.copy(), np.arange(len(batch.theta))
    damping, caution = np.full(len(theta), FAR_DAMPING), np.full(len(theta), CAUTION)
    for _ in range(iterations):
        form, cache, spread = batch.form, batch.cache, batch.spread
        gradient, hessian = form.derivatives(cache, batch.slope, spread, second=False)
        scale = np.maximum(np.einsum("pii->pi", hessian), batch.least_curvature)
        system = _System(hessian, scale, batch.held(gradient), damping)
        damping = system.damping
        step = system.solve(-gradient)
        gain = -_dot(gradient, step) - 0.5 * _quadratic(hessian, step)
        # Deviation of the curve of equal predictions from the straight line.
        turn = -0.5 * system.solve(form.gradient(cache, spread * form.bend(cache, step)))
        turn_share = 0.5 * MOST_TURN * np.sqrt(_dot(scale * step, step) / np.maximum(_dot(scale * turn, turn), 1e-300))
        trial = batch.at(batch.theta + step + np.minimum(turn_share, 1.0)[:, None] * turn)

        ratio = (batch.objective - trial.objective) / np.maximum(gain, 1e-300)
        accepted = ratio > 1e-3
        if not accepted.all():
            trial.put(~accepted, batch.take(~accepted))
        done = (gain <= FAR_GAIN * batch.objective + batch.rounding) & (damping <= 1.0) | (damping >= MOST_DAMPING)
        shrink = np.maximum(0.5, 1.0 - (2.0 * np.minimum(ratio, 1.0) - 1.0) ** 3)
        damping = np.maximum(damping * np.where(accepted, shrink, caution), NEAR_DAMPING)
        caution = np.where(accepted, CAUTION, 2.0 * caution)
        theta[rows], objective[rows] = trial.theta, trial.objective
        keep = ~done
        if done.all():
            break
        batch, rows, damping, caution = trial.take(keep), rows[keep], damping[keep], caution[keep]
    return theta, objective


def refine(batch: Batch, stage: np.ndarray, deltas: Array, iterations: int, unmeasured: float = 0.0) -> Minimum:
    """Minimise each problem by Newton's method under deltas[s], deltas[s + 1], …, where s is its `stage` (P,).

    `batch` has the delta of each problem's first stage. A step is also accepted if errors of the size `unmeasured` in
    the log predictions could explain the change of the objective.
    """
    theta, objective, rows = batch.theta.copy(), batch.objective.copy(), np.arange(len(batch.theta))
    lower, upper = batch.lower, batch.upper
    converged = np.zeros(len(theta), dtype=bool)
    damping = np.full(len(theta), NEAR_DAMPING)
    _, hessian = batch.form.derivatives(batch.cache, batch.slope, batch.spread, second=False)
    scale = np.maximum(np.einsum("pii->pi", hessian), batch.least_curvature)
    last = len(deltas) - 1
    for _ in range(iterations):
        inside = batch.inside
        gradient, hessian = batch.form.derivatives(batch.cache, batch.slope, inside, second=True)
        system = _System(hessian, scale, batch.held(gradient), damping, definite=True)
        step = system.solve(-gradient)
        gain = -0.5 * _dot(gradient, step)

        settled = (stage == last) & (gain <= OBJECTIVE_ROUNDING * batch.objective + batch.rounding)
        if settled.any():
            settled[settled] = batch.take(settled).flat(gradient[settled])
            # A minimum and not a saddle: the free part of the Hessian has no negative curvature.
            settled &= system.smallest > -1e-9
            converged[rows[settled]] = True
        damping = system.damping
        keep = ~settled & (damping < MOST_DAMPING)
        if not keep.any():
            break
        if not keep.all():
            batch, rows, stage, damping, scale = batch.take(keep), rows[keep], stage[keep], damping[keep], scale[keep]
            hessian, inside, step, gain = hessian[keep], inside[keep], step[keep], gain[keep]

        step = np.minimum(np.maximum(step, batch.lower - batch.theta), batch.upper - batch.theta)
        curvature = _quadratic(hessian, step)
        change = batch.form.along(batch.cache, step) / batch.delta[:, None]
        length = _search(batch, inside, change, curvature)
        trial = batch.at(batch.theta + length[:, None] * step)
        gained = batch.objective - trial.objective
        # Within the rounding of the objective a gain cannot be measured, and the step is safe.
        unmeasurable = OBJECTIVE_ROUNDING * batch.objective
        if unmeasured:
            unmeasurable += unmeasured * np.abs(batch.slope).sum(axis=1)
        accepted = (gained > 1e-4 * length * gain) | (np.abs(gained) <= unmeasurable)
        if (rejected := ~accepted).any():
            origin, origin_length = batch.take(rejected), length[rejected, None]
            error = trial.residual[rejected] - origin.residual - origin_length * change[rejected]
            error = inside[rejected] * error * origin.delta[:, None]
            turn = system.solve(-batch.form.gradient(origin.cache, error), np.flatnonzero(keep)[rejected])
            turned = origin.at(origin.theta + origin_length * step[rejected] + turn)
            better = origin.objective - turned.objective > 1e-4 * (length * gain)[rejected]
            turned.put(~better, origin.take(~better))
            trial.put(rejected, turned)
            accepted[rejected] = better
        damping = np.where(accepted, np.maximum(0.1 * damping, LEAST_DAMPING), np.maximum(10.0 * damping, REJECTED))
        advance = accepted & (stage < last) & (gain <= STAGE_GAIN * batch.objective + batch.rounding)
        batch = trial
        if advance.any():
            stage = stage + advance
            batch = trial.with_delta(deltas[stage])
        theta[rows], objective[rows] = batch.theta, batch.objective
    at_bound = ((theta <= lower) | (theta >= upper)) & (lower < upper)
    return Minimum(theta, objective, converged, at_bound)


def _search(batch: Batch, inside: Array, change: Array, curvature: Array) -> Array:
    """Return the share (P,) of each problem's step, in (0, 1], that minimises the objective for linearised residuals.

    `change` (P, n): change of the residuals over the whole step. `curvature` (P,): step^T Hessian step.
    """
    rest = curvature / batch.delta**2 - _rows_dot(inside * change, change)
    pull = batch.weights * change
    low = _rows_dot(batch.pull, change)
    high = _rows_dot(pull, np.clip(batch.residual + change, -1.0, 1.0)) + rest
    near, far = np.zeros(len(change)), np.ones(len(change))
    length = far.copy()
    rows = np.flatnonzero((high > -0.1 * low) & (low < 0))
    for _ in range(ZOOMS):
        if not rows.size:
            break
        at = near[rows, None] + (far - near)[rows, None] * LENGTHS
        between = at[:, 1:-1, None] * change[rows, None]
        between += batch.residual[rows, None]
        np.clip(between, -1.0, 1.0, out=between)
        slopes = np.empty(at.shape)
        slopes[:, 0], slopes[:, -1] = low[rows], high[rows]
        slopes[:, 1:-1] = (between @ pull[rows][:, :, None])[:, :, 0] + rest[rows, None] * at[:, 1:-1]
        after, columns = (slopes > 0).argmax(axis=1), np.arange(len(rows))
        near[rows], far[rows] = at[columns, after - 1], at[columns, after]
        low[rows], high[rows] = slopes[columns, after - 1], slopes[columns, after]
        length[rows] = (far - (far - near) * high / (high - low))[rows]
        rows = rows[(-low < STEEP * high)[rows]]
    return length


class _System:
    """Linear systems (H + damping * scale) x = b of P problems, without `held` parameters, in units where scale is one.

    Where the Hessian is not finite, steps are zero and the damping is MOST_DAMPING. `definite` raises the damping where
    the system is not positive definite; `smallest` is then the least eigenvalue of each undamped system.
    """

    def __init__(self, hessian: Array, scale: Array, held: np.ndarray, damping: Array, definite: bool = False) -> None:
        self._unit = ~held / np.sqrt(scale)
        matrix = hessian * (self._unit[:, :, None] * self._unit[:, None, :])
        np.einsum("pii->pi", matrix)[...] += held
        lost = ~np.isfinite(matrix.sum(axis=(1, 2)))
        if lost.any():
            matrix[lost], self._unit[lost] = np.eye(held.shape[1]), 0.0
        self.damping = np.where(lost, MOST_DAMPING, damping)
        if definite:
            self.smallest = np.linalg.eigvalsh(matrix)[:, 0]
            raised = np.maximum(10.0 * self.damping, INDEFINITE - 1.5 * self.smallest)
            self.damping = np.where(self.smallest + self.damping <= 1e-14, raised, self.damping)
        np.einsum("pii->pi", matrix)[...] += self.damping[:, None]
        self._damped = matrix

    def solve(self, right: Array, rows: Any = ...) -> Array:
        """Return x of all P systems, or only `rows`, for right-hand sides `right` (rows, k); zero if held."""
        unit = self._unit[rows]
        right = np.where(unit > 0, right * unit, 0.0)
        try:
            steps = np.linalg.solve(self._damped[rows], right[:, :, None])
        except np.linalg.LinAlgError:  # no curvature in a direction and damping below rounding: no step there
            steps = np.linalg.pinv(self._damped[rows], hermitian=True) @ right[:, :, None]
        return steps[:, :, 0] * unit


def _rows_dot(a: Array, b: Array) -> Array:
    """Return sum_i a_i b_i of (P, n) arrays, (P,); faster than einsum for long rows."""
    return (a[:, None, :] @ b[:, :, None])[:, 0, 0]


def _dot(a: Array, b: Array) -> Array:
    return np.einsum("pi,pi->p", a, b)


def _quadratic(hessian: Array, step: Array) -> Array:
    return np.einsum("pi,pij,pj->p", step, hessian, step)
