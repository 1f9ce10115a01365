"""One batched solver for every law: many problems times many starts at once, in NumPy.

Special here:
- sum_i w_i rho(f_i - log loss_i) is minimised for a `LogForm` f, rho being Huber's function (Hoffmann et al. 2022,
  equation 3). The sum is never divided by the number of points: with a mean, the usual tolerances of library optimizers
  stop far from the optimum, which is how a published fit went wrong (Besiroglu et al. 2024).
- Huber's function with a small delta is full of small valleys. So every start first finds an optimum under a large
  delta, and follows it while delta is lowered. Starts that meet under the large delta go on as one.
- The answer does not depend on how many threads work on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..errors import Array
from .forms import LogForm
from .newton import LOG_ROUNDING, Batch, Minimum, approach, refine

STAGES = (100.0, 10.0, 3.0, 1.0)  # multiples of the wanted delta, each the start of the next ...
COARSE = 0.03  # ... after as many factors of ten as it takes to begin near this
LEAST_SQUARES = 2.0**30  # stands for a delta of infinity: no residual in log loss is larger
ITERATIONS = 200
CHUNK = 60_000  # numbers per working array: they stay in cache, and BLAS does not start threads of its own for them
MET_THETA, MET_OBJECTIVE = 1e-3, 1e-6  # relative; starts that agree on both under the large delta have met
AGREE = 1e-7  # relative difference of two objectives that are the same optimum

Result = TypeVar("Result")


@dataclass(frozen=True)
class Solution(Minimum):
    """The best optimum that was found of each of P problems.

    tried (P,): starts; agreeing (P,): how many of them led to a converged optimum of this objective (relative 1e-7).
    """

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
    warm: Array | None = None,
    threads: int | None = None,
    staged: bool = True,
) -> Solution:
    """Minimise sum_i w_i huber_delta(f_i(theta) - target_i) over a box, for P problems from G starts each.

    target (n,) or (P, n) log losses; weights (P, n); starts (P, G, k) or (1, G, k); lower and upper (k,) or (P, k),
    where equal bounds fix a parameter; `delta` in log loss, infinity for least squares. `warm` (k,) or (P, k) is one
    more start near the optimum, refined under `delta` at once; all starts are where `staged` is false. `threads` is by
    default as many as this process has cores.
    """
    P, k = len(weights), form.parameters
    lower, upper = (np.broadcast_to(bound, (P, k)) for bound in (lower, upper))
    starts = np.broadcast_to(starts, (P, *starts.shape[1:]))
    warm = None if warm is None else np.broadcast_to(warm, (P, k))
    target, deltas = np.atleast_2d(target), _deltas(delta, staged)

    def part(rows: slice) -> Solution:
        near = None if warm is None else warm[rows]
        return _solve(form, deltas, near, _of(target, rows), weights[rows], starts[rows], lower[rows], upper[rows])

    size = starts.shape[1] + (warm is not None)  # rows of a problem in one batch
    return joined(in_chunks(part, P, CHUNK // (form.points * size), threads))


def _of(target: Array, rows: Any) -> Array:
    return target if len(target) == 1 else target[rows]


def joined(parts: Sequence[Solution]) -> Solution:
    return Solution(*map(np.concatenate, zip(*(vars(part).values() for part in parts), strict=True)))


def best_of(found: Solution, problem: np.ndarray) -> Solution:
    """The best of the rows that each problem (rows,) has: converged before not, then by objective."""
    order = np.lexsort((found.objective, ~found.converged, problem))
    best = order[np.searchsorted(problem[order], np.arange(problem.max() + 1))]
    objective = found.objective[best]
    same = found.converged & (found.objective <= objective[problem] * (1.0 + AGREE) + 1e-20)
    tried, agreeing = (np.bincount(problem, n).astype(int) for n in (found.tried, found.agreeing * same))
    return Solution(found.theta[best], objective, found.converged[best], found.at_bound[best], tried, agreeing)


def _deltas(delta: float, staged: bool) -> Array:
    """The delta under which starts are brought near, and then that of each stage."""
    if not staged or delta >= LEAST_SQUARES:
        return np.full(2, min(delta, LEAST_SQUARES))
    first = delta * STAGES[0]
    coarse = [first * 10.0**e for e in range(int(np.ceil(np.log10(max(COARSE / first, 1.0)))), 0, -1)]
    return np.array([*coarse, *(delta * stage for stage in STAGES)])


def _solve(
    form: LogForm,
    deltas: Array,
    warm: Array | None,
    target: Array,
    weights: Array,
    starts: Array,
    lower: Array,
    upper: Array,
) -> Solution:
    P, G, k = starts.shape

    def batch(problem: np.ndarray, stage: np.ndarray, theta: Array) -> Batch:
        rows = (_of(target, problem), weights[problem], lower[problem], upper[problem])
        return Batch.start(form, *rows, deltas[stage], theta)

    with np.errstate(all="ignore"):
        theta, leader = starts, np.empty((P, 0), dtype=int)
        if G:  # none: `warm` is the only start
            first = batch(np.repeat(np.arange(P), G), np.zeros(P * G, dtype=int), starts.reshape(-1, k))
            theta, objective = approach(first, ITERATIONS)
            leader = _leaders(theta.reshape(P, G, k), objective.reshape(P, G), first.rounding[::G])
        problem, at = np.nonzero(leader == np.arange(G))
        followers = (leader[problem] == at[:, None]).sum(axis=1)
        theta, stage = theta.reshape(P, G, k)[problem, at], np.ones(len(problem), dtype=int)
        if warm is not None:
            problem, theta = np.concatenate([problem, np.arange(P)]), np.concatenate([theta, warm])
            followers = np.concatenate([followers, np.ones(P, dtype=int)])
            stage = np.concatenate([stage, np.full(P, len(deltas) - 1)])
        found = refine(batch(problem, stage, theta), stage, deltas, ITERATIONS)
        if (lost := ~found.converged & np.isfinite(found.objective)).any():
            stage = np.full(lost.sum(), len(deltas) - 1)
            near = batch(problem[lost], stage, found.theta[lost])
            again = refine(near, stage, deltas, ITERATIONS, LOG_ROUNDING)
            for whole, rows in zip(vars(found).values(), vars(again).values(), strict=True):
                whole[lost] = rows
    each = Solution(found.theta, found.objective, found.converged, found.at_bound, followers, followers)
    return best_of(each, problem)


def _leaders(theta: Array, objective: Array, rounding: Array) -> np.ndarray:
    """Which of G points (P, G, k) each has met, (P, G): itself or one of lower objective (P, G)."""
    P, G, _ = theta.shape
    objective = np.where(np.isfinite(objective), objective, np.inf)
    leader = np.full((P, G), -1)
    while (alone := leader < 0).any():
        best = np.where(alone, objective, np.inf).argmin(axis=1)
        # Where none is left finite, the first one that is alone.
        best = np.where(alone[np.arange(P), best], best, alone.argmax(axis=1))
        there = theta[np.arange(P), best][:, None]
        near = (np.abs(theta - there) <= MET_THETA * (1.0 + np.abs(there))).all(axis=2)
        level = objective[np.arange(P), best] * (1.0 + MET_OBJECTIVE) + 1e6 * rounding
        met = alone & near & (objective <= level[:, None])
        met[np.arange(P), best] = alone[np.arange(P), best]
        leader = np.where(met, best[:, None], leader)
    return leader


def in_chunks(part: Callable[[slice], Result], rows: int, size: int, threads: int | None = None) -> list[Result]:
    """`part` of each chunk of at most `size` of `rows`, in order, on threads."""
    size = max(1, size)
    chunks = [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]
    workers = min(len(chunks), cores() if threads is None else threads)
    if workers <= 1:
        return [part(chunk) for chunk in chunks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(part, chunks))


def cores() -> int:
    """How many cores this process may use: its affinity, or OMP_NUM_THREADS where that is less."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return min(available, max(1, int(asked))) if asked.isdigit() else available


def variable_projection(basis: Array, target: Array, weights: Array) -> tuple[Array, Array]:
    """Least squares for the linear parameters of a law at each of G settings of its nonlinear ones, for P problems.

    basis (G, n, m), target (n,), weights (P, n). Returns amplitudes (P, G, m) and the sum of squares (P, G). (Golub and
    Pereyra 1973.)
    """
    G, _, m = basis.shape
    entries = [(i, j) for i in range(m) for j in range(i, m)]
    products = [basis[:, :, i] * basis[:, :, j] for i, j in entries] + [basis[:, :, i] * target for i in range(m)]
    table = np.ascontiguousarray(np.concatenate(products).T)

    def part(rows: slice) -> tuple[Array, Array]:
        sums = (weights[rows] @ table).reshape(-1, len(products), G)
        right = [sums[:, len(entries) + i] for i in range(m)]
        amplitudes = _solve_normal({entry: sums[:, q] for q, entry in enumerate(entries)}, right)
        explained = np.sum([a * b for a, b in zip(amplitudes, right, strict=True)], axis=0)
        error = (weights[rows] @ target**2)[:, None] - explained
        return np.stack(amplitudes, axis=2), np.maximum(error, 0.0)

    # Few and large products: these are worth BLAS's own threads, and would only be in the way of ours.
    parts = in_chunks(part, len(weights), 20 * CHUNK // (G * len(products)), threads=1)
    amplitudes, errors = zip(*parts, strict=True)
    return np.concatenate(amplitudes), np.concatenate(errors)


def _solve_normal(matrix: dict[tuple[int, int], Array], right: list[Array]) -> list[Array]:
    """Cholesky's solution of many small systems at once: matrix[i, j], i <= j, and right[i] are arrays over systems.

    A ridge of 1e-10 of the diagonal keeps two equal columns from a division by zero.
    """
    m = len(right)
    A, x, pivots = dict(matrix), list(right), []
    for j in range(m):
        pivots.append(np.maximum(A[j, j] + 1e-10 * matrix[j, j], 1e-11 * matrix[j, j] + 1e-300))
        for i in range(j + 1, m):
            ratio = A[j, i] / pivots[j]
            x[i] = x[i] - ratio * x[j]
            for q in range(i, m):
                A[i, q] = A[i, q] - ratio * A[j, q]
    for j in reversed(range(m)):
        for q in range(j + 1, m):
            x[j] = x[j] - A[j, q] * x[q]
        x[j] = x[j] / pivots[j]
    return x
