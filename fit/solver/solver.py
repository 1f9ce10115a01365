"""One batched NumPy solver for all laws: many problems from many starts at once.

It minimises sum_i w_i rho(f_i - log loss_i) for a `LogForm` f and Huber's function rho (Hoffmann et al. 2022, equation
3). With a mean instead of the sum, usual tolerances stop far from the optimum (Besiroglu et al. 2024).

Huber's function with a small delta has many small valleys, so optima are first found under a large delta, then followed
while delta falls.
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

STAGES = (100.0, 10.0, 3.0, 1.0)  # multiples of delta, each the start of the next ...
COARSE = 0.03  # ... after as many factors of ten as it takes to start near this delta; both chosen by hand
LEAST_SQUARES = 2.0**30  # replaces an infinite delta: no residual in log loss is larger
ITERATIONS = 200
CHUNK = 120_000  # numbers per working array: they stay in cache, and BLAS uses one thread for them
MET_THETA, MET_OBJECTIVE = 1e-3, 1e-6  # relative; starts that agree on both under the large delta have met
AGREE = 1e-7  # relative difference of two objectives that are the same optimum

Result = TypeVar("Result")


@dataclass(frozen=True)
class Solution(Minimum):
    """The best optimum of each of P problems.

    tried (P,): starts; agreeing (P,): starts that led to a converged optimum of this objective (relative 1e-7).
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
    """Minimise sum_i w_i huber_delta(f_i(theta) - target_i) within bounds, for P problems from G starts each.

    Args:
        form: Predicts f at n points from k parameters theta.
        target: Log losses, (n,) or (P, n).
        weights: (P, n).
        starts: (P, G, k) or (1, G, k).
        lower, upper: (k,) or (P, k); equal bounds fix a parameter.
        delta: In log loss; infinity for least squares.
        warm: One more start near the optimum, (k,) or (P, k), refined under `delta` directly.
        threads: By default one per core.
        staged: False refines all starts under `delta` directly.
    """
    P, k = len(weights), form.parameters
    lower, upper = (np.broadcast_to(bound, (P, k)) for bound in (lower, upper))
    starts = np.broadcast_to(starts, (P, *starts.shape[1:]))
    warm = None if warm is None else np.broadcast_to(warm, (P, k))
    target, deltas = np.atleast_2d(target), _deltas(delta, staged)

    def part(rows: slice) -> Solution:
        near = None if warm is None else warm[rows]
        return _solve(
            form, deltas, near, _target_rows(target, rows), weights[rows], starts[rows], lower[rows], upper[rows]
        )

    size = starts.shape[1] + (warm is not None)  # rows of a problem in one batch
    return joined(in_chunks(part, P, CHUNK // (form.points * size), threads))


def _target_rows(target: Array, rows: Any) -> Array:
    return target if len(target) == 1 else target[rows]


def joined(parts: Sequence[Solution]) -> Solution:
    return Solution(*map(np.concatenate, zip(*(vars(part).values() for part in parts), strict=True)))


def best_of(solutions: Solution, problem: np.ndarray) -> Solution:
    """Return each problem's best solution: the lowest objective, among converged ones if there are any.

    `problem` (rows,): index of the problem to which each row of `solutions` belongs.
    """
    order = np.lexsort((solutions.objective, ~solutions.converged, problem))
    best = order[np.searchsorted(problem[order], np.arange(problem.max() + 1))]
    objective = solutions.objective[best]
    same = solutions.converged & (solutions.objective <= objective[problem] * (1.0 + AGREE) + 1e-20)
    tried, agreeing = (np.bincount(problem, n).astype(int) for n in (solutions.tried, solutions.agreeing * same))
    return Solution(
        solutions.theta[best], objective, solutions.converged[best], solutions.at_bound[best], tried, agreeing
    )


def _deltas(delta: float, staged: bool) -> Array:
    """Return falling deltas of Huber's function, for `approach` and each stage of `refine`; equal unless `staged`."""
    if not staged or delta >= LEAST_SQUARES:
        return np.full(2, min(delta, LEAST_SQUARES))
    first = delta * STAGES[0]
    coarse = [first * 10.0**exponent for exponent in range(int(np.ceil(np.log10(max(COARSE / first, 1.0)))), 0, -1)]
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
        rows = (_target_rows(target, problem), weights[problem], lower[problem], upper[problem])
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
        minimum = refine(batch(problem, stage, theta), stage, deltas, ITERATIONS)
        if (unfinished := ~minimum.converged & np.isfinite(minimum.objective)).any():
            stage = np.full(unfinished.sum(), len(deltas) - 1)
            retry = batch(problem[unfinished], stage, minimum.theta[unfinished])
            retried = refine(retry, stage, deltas, ITERATIONS, LOG_ROUNDING)
            for values, retried_values in zip(vars(minimum).values(), vars(retried).values(), strict=True):
                values[unfinished] = retried_values
    solutions = Solution(minimum.theta, minimum.objective, minimum.converged, minimum.at_bound, followers, followers)
    return best_of(solutions, problem)


def _leaders(theta: Array, objective: Array, rounding: Array) -> np.ndarray:
    """Group a problem's coinciding points; return for each of its G points the index of the group's best, (P, G)."""
    P, G, _ = theta.shape
    objective = np.where(np.isfinite(objective), objective, np.inf)
    leader = np.full((P, G), -1)
    while (unassigned := leader < 0).any():
        best = np.where(unassigned, objective, np.inf).argmin(axis=1)
        # If no remaining objective is finite, take the first remaining point.
        best = np.where(unassigned[np.arange(P), best], best, unassigned.argmax(axis=1))
        leader_theta = theta[np.arange(P), best][:, None]
        near = (np.abs(theta - leader_theta) <= MET_THETA * (1.0 + np.abs(leader_theta))).all(axis=2)
        level = objective[np.arange(P), best] * (1.0 + MET_OBJECTIVE) + 1e6 * rounding
        joins = unassigned & near & (objective <= level[:, None])
        joins[np.arange(P), best] = unassigned[np.arange(P), best]
        leader = np.where(joins, best[:, None], leader)
    return leader


def in_chunks(part: Callable[[slice], Result], rows: int, size: int, threads: int | None = None) -> list[Result]:
    """Call `part` on slices that cover `rows` rows, each at most `size` long, in threads; return results in order."""
    size = max(1, size)
    chunks = [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]
    workers = min(len(chunks), cores() if threads is None else threads)
    if workers <= 1:
        return [part(chunk) for chunk in chunks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(part, chunks))


def cores() -> int:
    """Return the number of cores that this process may use: its affinity or OMP_NUM_THREADS, whichever is lower."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    requested = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return min(available, max(1, int(requested))) if requested.isdigit() else available


def variable_projection(basis: Array, target: Array, weights: Array) -> tuple[Array, Array]:
    """Fit the m amplitudes of a law by least squares at G settings of its other parameters, for P problems.

    basis (G, n, m): factors of the amplitudes. target (n,), weights (P, n). Returns amplitudes (P, G, m) and sums of
    squares (P, G). Golub and Pereyra 1973.
    """
    G, n, m = basis.shape
    i, j = np.triu_indices(m)
    products = np.concatenate([basis[:, :, i] * basis[:, :, j], basis * target[:, None]], axis=2)
    sums = (weights @ products.transpose(1, 0, 2).reshape(n, -1)).reshape(len(weights), G, -1)
    matrix, right = np.empty((len(weights), G, m, m)), sums[:, :, len(i) :]
    matrix[:, :, i, j] = matrix[:, :, j, i] = sums[:, :, : len(i)]
    matrix = matrix * (1.0 + 1e-10 * np.eye(m)) + 1e-300 * np.eye(m)  # copes with equal columns and with none
    amplitudes = np.linalg.solve(matrix, right[..., None])[..., 0]
    error = (weights @ target**2)[:, None] - (amplitudes * right).sum(axis=2)
    return amplitudes, np.maximum(error, 0.0)
