"""One batched solver for every law: many problems times many starts at once, in NumPy.

Special here:
- A law is fitted as a *log form*: f(theta) predicts log loss, and sum_i w_i rho(f_i - log loss_i) is minimised, rho
  being Huber's function (Hoffmann et al. 2022, equation 3 and appendix D.3). The sum is never divided by the number of
  points: with a mean the usual tolerances of library optimizers stop far from the optimum, which is how a published fit
  went wrong (Besiroglu et al. 2024).
- Sums of power laws become the log-sum-exp of affine functions of theta. Their gradient and Hessian are matrix products
  with constant tables, so a thousand resamples cost little more than one. Another law slots in by implementing
  `LogForm`.
- Damped Newton with the exact Hessian inside a box. Convergence is judged on the gradient, never on a small change of
  the objective.
- Huber's function with a small delta is nearly L1 and its Newton steps see only the points inside delta, so delta is
  lowered in stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import Array
from .forms import LogForm, Sums

GRADIENT_TOLERANCE = 1e-9  # of the gradient's own cancelling sum: see `Sums.tolerance`
STAGES = (100.0, 10.0, 3.0, 1.0)  # delta continuation: multiples of the wanted delta ...
COARSE = 0.03  # ... after as many factors of ten as it takes to begin near this
STAGE_TOLERANCE = 1e-4  # loose enough to be quick, tight enough that the next stage does not start in a far valley
CHUNK = 60_000  # numbers per working array, so that a chunk of problems stays in cache


@dataclass(frozen=True)
class Minimum:
    """Where each of P problems ended.

    theta (P, k); objective (P,); converged (P,): the gradient inside the box is zero to tolerance and the Hessian there
    has no negative curvature; at_bound (P, k): parameters held by the box; steps (P,).
    """

    theta: Array
    objective: Array
    converged: np.ndarray
    at_bound: np.ndarray
    steps: np.ndarray

    def take(self, rows: Any) -> Minimum:
        return Minimum(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Solution:
    """The best optimum of each of P problems, from G starts each.

    theta (P, k); objective (P,), the weighted *sum*; converged (P,), as in `Minimum`; at_bound (P, k): parameters held
    by the box; tried (P,): starts; agreeing (P,): starts that converged to this objective (relative 1e-7).
    """

    theta: Array
    objective: Array
    converged: np.ndarray
    at_bound: np.ndarray
    tried: np.ndarray
    agreeing: np.ndarray


def solve(
    form: LogForm,
    target: Array,
    weights: Array,
    starts: Array,
    lower: Array,
    upper: Array,
    delta: float,
) -> Solution:
    """The best converged optimum of sum_i w_i huber_delta(f_i(theta) - target_i) over G starts, for P problems.

    weights (P, n); target (n,) or (P, n); starts (P, G, k) or (1, G, k); lower and upper (k,) or (P, k), equal bounds
    fix a parameter; delta in log loss, infinity for least squares.
    """
    problems, k = len(weights), form.parameters
    starts = np.broadcast_to(starts, (problems, *np.shape(starts)[1:]))
    each = starts.shape[1]
    row = np.repeat(np.arange(problems), each)
    found = minimise(
        form,
        np.broadcast_to(target, (problems, form.points))[row],
        weights[row],
        starts.reshape(-1, k),
        np.broadcast_to(lower, (problems, k))[row],
        np.broadcast_to(upper, (problems, k))[row],
        delta,
    )
    objective, converged = found.objective.reshape(-1, each), found.converged.reshape(-1, each)
    usable = np.where(converged, objective, np.inf)
    nothing = ~converged.any(axis=1)
    usable[nothing] = objective[nothing]
    best = np.arange(problems) * each + usable.argmin(axis=1)
    close = objective <= found.objective[best][:, None] * (1.0 + 1e-7) + 1e-20
    return Solution(
        found.theta[best],
        found.objective[best],
        found.converged[best],
        found.at_bound[best],
        np.full(problems, each),
        (close & converged).sum(axis=1),
    )


def minimise(
    form: LogForm,
    target: Array,
    weights: Array,
    starts: Array,
    lower: Array,
    upper: Array,
    delta: float,
    stages: Sequence[float] = STAGES,
    iterations: int = 200,
) -> Minimum:
    """Minimise sum_i w_i huber_delta(f_i(theta) - target_i) over a box, for P problems at once.

    target (n,) or (P, n) log losses; weights (n,) or (P, n); starts (P, k); lower and upper (k,) or (P, k),
    where equal bounds fix a parameter; `delta` in log loss, infinity for least squares. The last of `stages` must be 1.
    """
    weights = np.broadcast_to(weights, (len(starts), form.points))
    target = np.broadcast_to(target, (len(starts), form.points))
    lower, upper = (np.broadcast_to(bound, np.shape(starts)) for bound in (lower, upper))
    size = max(1, CHUNK // form.points)
    parts = []
    for begin in range(0, len(starts), size):
        rows = slice(begin, begin + size)
        low, high = lower[rows], upper[rows]
        theta = np.clip(starts[rows], low, high)
        steps = np.zeros(len(theta), dtype=int)
        for stage in (*_coarse_stages(delta, stages), *stages) if np.isfinite(delta) else (1.0,):
            tolerance = GRADIENT_TOLERANCE if stage == 1.0 else STAGE_TOLERANCE
            found = _newton(form, target[rows], weights[rows], theta, low, high, delta * stage, tolerance, iterations)
            theta, steps = found.theta, steps + found.steps
        parts.append(Minimum(theta, found.objective, found.converged, found.at_bound, steps))
    return Minimum(*(np.concatenate([getattr(p, name) for p in parts]) for name in Minimum.__dataclass_fields__))


def _coarse_stages(delta: float, stages: Sequence[float]) -> list[float]:
    """Multiples of a very small delta that come before `stages`, tenfold apart, so that even L1 begins smooth."""
    if len(stages) == 1 or stages[0] * delta >= COARSE:
        return []
    steps = int(np.ceil(np.log10(COARSE / (stages[0] * delta))))
    return [stages[0] * 10.0**k for k in range(steps, 0, -1)]


def huber(residual: Array, delta: float) -> tuple[Array, Array, np.ndarray]:
    """Huber's rho, its slope psi, and whether each residual lies in the quadratic part."""
    slope = np.clip(residual, -delta, delta)
    return slope * (residual - 0.5 * slope), slope, np.abs(residual) <= delta


def _newton(
    form: LogForm,
    target: Array,
    weights: Array,
    start: Array,
    lower: Array,
    upper: Array,
    delta: float,
    tolerance: float,
    iterations: int,
) -> Minimum:
    """Damped Newton in a box (projected, Bertsekas 1982) for one delta; problems leave the batch as they converge."""
    theta = start.copy()
    problems = len(theta)
    objective = np.full(problems, np.inf)
    converged = np.zeros(problems, dtype=bool)
    steps = np.zeros(problems, dtype=int)
    damping = np.full(problems, 1e-3)

    rows = np.arange(problems)
    state = _evaluate(form, target, weights, theta, delta)
    objective[:] = state.objective
    for _ in range(iterations):
        now, low, high = theta[rows], lower[rows], upper[rows]
        sums = state.sums(form)
        held = ((now <= low) & (sums.gradient > 0)) | ((now >= high) & (sums.gradient < 0)) | (low == high)
        flat = (held | (np.abs(sums.gradient) <= sums.tolerance(tolerance))).all(axis=1)
        if tolerance <= GRADIENT_TOLERANCE and flat.any():
            flat[flat] = _curves_up(sums.take(flat), held[flat])
        converged[rows[flat]] = True
        if flat.all():
            break
        keep = ~flat
        if not keep.all():
            rows, now, state, held = rows[keep], now[keep], state.take(keep), held[keep]
            sums, low, high = sums.take(keep), low[keep], high[keep]

        step, damping[rows] = _damped_step(sums, held, damping[rows])
        trial = np.clip(now + step, low, high)
        there = _evaluate(form, state.target, state.weights, trial, delta)
        moved = trial - now
        predicted = -(
            np.einsum("pi,pi->p", sums.gradient, moved) + 0.5 * np.einsum("pi,pij,pj->p", moved, sums.hessian, moved)
        )
        gained = state.objective - there.objective
        # At the optimum's own rounding a gain cannot be measured; a step that small is safe to take.
        tiny = np.abs(gained) <= 1e-13 * np.abs(state.objective) + 1e-300
        good = (gained > 1e-4 * predicted) & (gained > 0) | tiny
        damping[rows] = np.where(good, np.where(gained > 0.7 * predicted, 0.1, 0.5), 6.0) * damping[rows]
        np.clip(damping, 1e-12, 1e12, out=damping)
        theta[rows[good]] = trial[good]
        objective[rows[good]] = there.objective[good]
        steps[rows] += 1
        state = state.merge(there, good)
    at_bound = ((theta <= lower) | (theta >= upper)) & (lower < upper)
    return Minimum(theta, objective, converged, at_bound, steps)


@dataclass
class _State:
    """One evaluation of the objective: residuals, and what the derivatives reuse."""

    target: Array
    weights: Array
    residual: Array
    objective: Array
    cache: Any
    delta: float

    def sums(self, form: LogForm) -> Sums:
        _, slope, inside = huber(self.residual, self.delta)
        # The weights of reweighted least squares bound the curvature from above: a scale that never vanishes.
        spread = self.weights / np.maximum(np.abs(self.residual) / self.delta, 1.0)
        return form.sums(self.cache, self.weights * slope, self.weights * inside, spread)

    def take(self, rows: np.ndarray) -> _State:
        cache = type(self.cache)(array[rows] for array in self.cache)
        kept = (self.target[rows], self.weights[rows], self.residual[rows], self.objective[rows])
        return _State(*kept, cache, self.delta)

    def merge(self, other: _State, rows: np.ndarray) -> _State:
        """The same, with `rows` replaced by another's."""
        if rows.all():
            return other
        pick = rows[:, None]
        return _State(
            self.target,
            self.weights,
            np.where(pick, other.residual, self.residual),
            np.where(rows, other.objective, self.objective),
            _pick(self.cache, other.cache, rows),
            self.delta,
        )


def _pick(old: Any, new: Any, rows: np.ndarray) -> Any:
    return type(old)(np.where(rows.reshape(-1, *[1] * (a.ndim - 1)), b, a) for a, b in zip(old, new, strict=True))


def _evaluate(form: LogForm, target: Array, weights: Array, theta: Array, delta: float) -> _State:
    value, cache = form.value(theta)
    residual = value - target
    rho, _, _ = huber(residual, delta)
    return _State(target, weights, residual, np.einsum("pn,pn->p", weights, rho), cache, delta)


def _masked(sums: Sums, held: np.ndarray) -> tuple[Array, Array, Array]:
    """Hessian, gradient and damping scale, with held parameters replaced by an identity that moves nothing."""
    free = ~held
    scale = np.where(held, 1.0, np.maximum(sums.diagonal, 1e-300))
    hessian = np.where(free[:, :, None] & free[:, None, :], sums.hessian, 0.0)
    diagonal = np.einsum("pii->pi", hessian)
    diagonal[held] = 1.0
    # In units where the damping is the identity, every pivot is comparable.
    root = 1.0 / np.sqrt(scale)
    return hessian * root[:, :, None] * root[:, None, :], np.where(free, sums.gradient, 0.0) * root, root


def _curves_up(sums: Sums, held: np.ndarray) -> np.ndarray:
    """Whether the free part of the Hessian has no negative curvature (to rounding): a minimum and not a saddle."""
    hessian, _, _ = _masked(sums, held)
    return np.linalg.eigvalsh(hessian)[:, 0] > -1e-9


def _damped_step(sums: Sums, held: np.ndarray, damping: Array) -> tuple[Array, Array]:
    """Solve (H + damping * scale) step = -gradient, raising the damping of a problem until its matrix is positive
    definite.
    """
    hessian, gradient, root = _masked(sums, held)
    damping = damping.copy()
    step = np.zeros_like(gradient)
    todo = np.arange(len(gradient))
    while todo.size:
        solution, definite = _solve(hessian[todo], -gradient[todo], damping[todo])
        done = definite | (damping[todo] >= 1e12)
        step[todo[done]] = solution[done]
        todo = todo[~done]
        damping[todo] = np.maximum(damping[todo] * 8.0, 1e-3)
    return step * root, damping


def _solve(matrix: Array, right: Array, damping: Array) -> tuple[Array, np.ndarray]:
    """LDL^T of matrix + damping I over the whole batch at once, and whether each was safely positive definite.

    matrix (P, k, k), right (P, k), damping (P,). Written out because LAPACK's batched routines loop over problems one
    by one.
    """
    k = right.shape[1]
    L = matrix.copy()
    definite = np.ones(len(L), dtype=bool)
    pivots = np.empty_like(right)
    x = right.copy()
    for j in range(k):
        pivot = L[:, j, j] + damping
        definite &= pivot > 1e-11
        pivots[:, j] = pivot = np.where(pivot > 1e-11, pivot, 1.0)
        column = L[:, j + 1 :, j] / pivot[:, None]
        L[:, j + 1 :, j + 1 :] -= column[:, :, None] * L[:, j + 1 :, j][:, None, :]
        L[:, j + 1 :, j] = column
        x[:, j + 1 :] -= column * x[:, j : j + 1]
    x /= pivots
    for j in range(k - 2, -1, -1):
        x[:, j] -= np.einsum("pi,pi->p", L[:, j + 1 :, j], x[:, j + 1 :])
    return x, definite


def variable_projection(basis: Array, target: Array, weights: Array) -> tuple[Array, Array]:
    """Least squares for the linear parameters of a law at each of G settings of its nonlinear ones, for P problems at
    once.

    basis (G, n, m), target (n,), weights (P, n). Returns amplitudes (P, G, m) and the sum of squares (P, G). The normal
    equations of all problems are two matrix products, because the basis does not depend on the weights.
    (Golub and Pereyra 1973.)
    """
    G, n, m = basis.shape
    products = (basis[:, :, :, None] * basis[:, :, None, :]).transpose(1, 0, 2, 3).reshape(n, -1)
    right = (basis * target[None, :, None]).transpose(1, 0, 2).reshape(n, -1)
    matrix = (weights @ products).reshape(-1, G, m, m)
    vector = (weights @ right).reshape(-1, G, m)
    scale = 1.0 / np.sqrt(np.maximum(np.einsum("pgii->pgi", matrix), 1e-300))
    normal = matrix * scale[..., :, None] * scale[..., None, :]
    solution, _ = _solve(normal.reshape(-1, m, m), (vector * scale).reshape(-1, m), np.full(normal.shape[0] * G, 1e-10))
    amplitudes = solution.reshape(-1, G, m) * scale
    error = (weights @ target**2)[:, None] - np.einsum("pgi,pgi->pg", amplitudes, vector)
    return amplitudes, np.maximum(error, 0.0)


def agreeing(found: Minimum, tolerance: float = 1e-7) -> tuple[int, int]:
    """Index of the best start, and how many starts converged to its objective (relative `tolerance`, or to
    rounding).
    """
    usable = np.where(found.converged, found.objective, np.inf)
    best = int(np.argmin(usable)) if np.isfinite(usable).any() else int(np.argmin(found.objective))
    floor = found.objective[best]
    close = found.objective <= floor * (1.0 + tolerance) + 1e-20
    return best, int((close & found.converged).sum())
