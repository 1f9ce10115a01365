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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .errors import Array

GRADIENT_TOLERANCE = 1e-9  # of the gradient's own cancelling sum: see `Sums.tolerance`
RESIDUAL_ROUNDING = 1e-13  # below this a residual in log loss is rounding, and a perfect fit counts as converged
STAGES = (100.0, 10.0, 3.0, 1.0)  # delta continuation: multiples of the wanted delta
STAGE_TOLERANCE = 1e-2  # the stages before the last only prepare a start
CHUNK = 60_000  # numbers per working array, so that a chunk of problems stays in cache


class LogForm(Protocol):
    """A law as the solver sees it: k parameters, n points, log loss out.

    `value(theta)` takes (P, k) and returns f of shape (P, n) and whatever `sums` wants to reuse.
    `sums(cache, slope, curvature, spread)` takes three (P, n) arrays and returns
      gradient (P, k)    sum_i slope_i df_i
      hessian  (P, k, k) sum_i curvature_i df_i df_i^T + slope_i d2f_i
      absolute (P, k)    sum_i |slope_i| |df_i|, the scale against which a gradient is small
      reach    (P, k)    sum_i spread_i |df_i|
      diagonal (P, k)    sum_i spread_i df_i^2, the scale of the damping
    """

    parameters: int
    points: int

    def value(self, theta: Array) -> tuple[Array, Any]: ...

    def sums(self, cache: Any, slope: Array, curvature: Array, spread: Array) -> Sums: ...


@dataclass(frozen=True)
class Sums:
    """What one evaluation of a form's derivatives gives; see `LogForm`."""

    gradient: Array
    hessian: Array
    absolute: Array
    reach: Array
    diagonal: Array

    def tolerance(self, relative: float) -> Array:
        """The size below which each gradient entry is zero: a share of the terms that cancel in it, plus their
        rounding.
        """
        return relative * self.absolute + RESIDUAL_ROUNDING * self.reach


class LogSumExp:
    """f = log sum_t exp(Z_t theta[index_t] + offset_t): every sum of power laws, with free, shared or fixed parameters.

    `terms` is a sequence of (index, Z) or (index, Z, offset): `index` lists the parameters that the term reads, Z has
    shape (n, len(index)), offset (n,). A term without parameters has an empty index and a Z of shape (n, 0).
    """

    def __init__(self, parameters: int, terms: Sequence[tuple[Any, ...]]) -> None:
        self.parameters = parameters
        self.points = len(terms[0][1])
        self.index = [np.asarray(term[0], dtype=int) for term in terms]
        self.tables = [np.asarray(term[1], dtype=np.float64) for term in terms]
        self.offsets = [term[2] if len(term) > 2 else None for term in terms]
        self._absolute = [np.abs(Z) for Z in self.tables]
        self._square = [Z**2 for Z in self.tables]
        self._products = {
            (s, t): np.ascontiguousarray((Zs[:, :, None] * Zt[:, None, :]).reshape(self.points, -1))
            for s, Zs in enumerate(self.tables)
            for t, Zt in enumerate(self.tables)
            if s <= t
        }

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        exponents = []
        for index, Z, offset in zip(self.index, self.tables, self.offsets, strict=True):
            u = theta[:, index] @ Z.T
            exponents.append(u if offset is None else u + offset)
        top = exponents[0]
        for u in exponents[1:]:
            top = np.maximum(top, u)
        shares = [np.exp(u - top) for u in exponents]
        total = shares[0].copy()
        for share in shares[1:]:
            total += share
        for share in shares:
            share /= total
        return top + np.log(total), shares

    def sums(self, cache: list[Array], slope: Array, curvature: Array, spread: Array) -> Sums:
        problems, k = len(slope), self.parameters
        gradient, absolute, reach, diagonal = (np.zeros((problems, k)) for _ in range(4))
        hessian = np.zeros((problems, k, k))
        # d2f = sum_t p_t Z_t Z_t^T - df df^T, so the rank-one part carries curvature - slope.
        outer = curvature - slope
        size = np.abs(slope)
        for s, (i, share) in enumerate(zip(self.index, cache, strict=True)):
            weighted = slope * share
            gradient[:, i] += weighted @ self.tables[s]
            absolute[:, i] += (size * share) @ self._absolute[s]
            spread_share = spread * share
            reach[:, i] += spread_share @ self._absolute[s]
            diagonal[:, i] += (spread_share * share) @ self._square[s]
            outer_share = outer * share
            for t in range(s, len(self.index)):
                j = self.index[t]
                coefficient = outer_share * cache[t]
                if s == t:
                    coefficient += weighted
                block = (coefficient @ self._products[s, t]).reshape(problems, len(i), len(j))
                hessian[:, i[:, None], j] += block
                if s != t:
                    hessian[:, j[:, None], i] += block.transpose(0, 2, 1)
        return Sums(gradient, hessian, absolute, reach, diagonal)


class FunctionForm:
    """Any law as a function: theta (P, k) to f (P, n), df (P, n, k) and d2f (P, n, k, k)."""

    def __init__(self, function: Callable[[Array], tuple[Array, Array, Array]], parameters: int, points: int) -> None:
        self.function, self.parameters, self.points = function, parameters, points

    def value(self, theta: Array) -> tuple[Array, tuple[Array, Array]]:
        value, first, second = self.function(theta)
        return value, (first, second)

    def sums(self, cache: tuple[Array, Array], slope: Array, curvature: Array, spread: Array) -> Sums:
        first, second = cache
        size = np.abs(first)
        hessian = np.einsum("pn,pni,pnj->pij", curvature, first, first) + np.einsum("pn,pnij->pij", slope, second)
        return Sums(
            gradient=np.einsum("pn,pni->pi", slope, first),
            hessian=hessian,
            absolute=np.einsum("pn,pni->pi", np.abs(slope), size),
            reach=np.einsum("pn,pni->pi", spread, size),
            diagonal=np.einsum("pn,pni->pi", spread, size**2),
        )


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

    target (n,) or (P, n) log losses; weights (n,) or (P, n); starts (P, k); lower and upper (k,), where equal bounds
    fix a parameter; `delta` in log loss, infinity for least squares. The last of `stages` must be 1.
    """
    weights = np.broadcast_to(weights, (len(starts), form.points))
    target = np.broadcast_to(target, (len(starts), form.points))
    size = max(1, CHUNK // form.points)
    parts = []
    for begin in range(0, len(starts), size):
        rows = slice(begin, begin + size)
        theta = np.clip(starts[rows], lower, upper)
        steps = np.zeros(len(theta), dtype=int)
        for stage in stages if np.isfinite(delta) else (1.0,):
            tolerance = GRADIENT_TOLERANCE if stage == 1.0 else STAGE_TOLERANCE
            found = _newton(
                form, target[rows], weights[rows], theta, lower, upper, delta * stage, tolerance, iterations
            )
            theta, steps = found.theta, steps + found.steps
        parts.append(Minimum(theta, found.objective, found.converged, found.at_bound, steps))
    return Minimum(*(np.concatenate([getattr(p, name) for p in parts]) for name in Minimum.__dataclass_fields__))


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
        now = theta[rows]
        sums = state.sums(form)
        held = ((now <= lower) & (sums.gradient > 0)) | ((now >= upper) & (sums.gradient < 0)) | (lower == upper)
        flat = (held | (np.abs(sums.gradient) <= sums.tolerance(tolerance))).all(axis=1)
        if tolerance <= GRADIENT_TOLERANCE:
            flat &= _curves_up(sums, held)
        converged[rows[flat]] = True
        if flat.all():
            break
        keep = ~flat
        if not keep.all():
            rows, now, state, held = rows[keep], now[keep], state.take(keep), held[keep]
            sums = Sums(*(getattr(sums, name)[keep] for name in Sums.__dataclass_fields__))

        step, damping[rows] = _damped_step(sums, held, damping[rows])
        trial = np.clip(now + step, lower, upper)
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
        # The weights of iteratively reweighted least squares bound the curvature from above: a scale that never
        # vanishes.
        spread = self.weights / np.maximum(np.abs(self.residual) / self.delta, 1.0)
        return form.sums(self.cache, self.weights * slope, self.weights * inside, spread)

    def take(self, rows: np.ndarray) -> _State:
        kept = (array[rows] for array in (self.target, self.weights, self.residual, self.objective))
        return _State(*kept, _rows(self.cache, rows), self.delta)

    def merge(self, other: _State, rows: np.ndarray) -> _State:
        """This state, with `rows` replaced by another's."""
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


def _rows(cache: Any, rows: np.ndarray) -> Any:
    return type(cache)(array[rows] for array in cache)


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
