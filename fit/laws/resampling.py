"""Resamples of a fitted law, its fits without each group of runs, and where a new run will land.

Special here:
- What a group of runs says is judged by the fit without it. A fit's own residuals are too small, and under a Huber
  objective, which is nearly L1, as many of them are nearly zero as there are constants.
- A new run is foretold by the draws of the law and by the residuals of the runs that there are: no Gaussian.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Array, InputError
from ..uncertainty import (
    RUNS_PER_CONSTANT,
    identifiable_counts,
    independent_groups,
    jackknife_weights,
    kernel_width,
    need_no_group_alone,
    percentile_interval,
    wild_targets,
)

if TYPE_CHECKING:
    from ..solver.solver import Solution
    from .law import Law, Problem


def resample(law: Law, n: int, groups: np.ndarray, seed: int, method: str) -> tuple[Solution, dict[str, Any]]:
    """`n` refits of a law, and how they were drawn; see `Law.bootstrap`. groups (rows,): labels, as text."""
    p, used = law.problem_, law.weight_ > 0
    independent = independent_groups(groups[used], p.free)
    if method == "auto":
        method = "wild" if independent < RUNS_PER_CONSTANT * p.free else "pairs"
    redrawn = 0
    if method == "pairs":
        inputs = np.stack([law.data_[name] for name in law.inputs])
        counts, redrawn = identifiable_counts(groups, n, seed, inputs, law.weight_, p.axes, p.free)
        found = law._refit(counts)
    else:
        free = (p.lower < law.theta_) & (law.theta_ < p.upper)
        need_no_group_alone(slopes(law, p, law.theta_)[np.ix_(used, free)], groups[used], law.title)
        fitted, error = p.target - law.residuals(), left_out_residuals(law, groups)
        width = 0.0 if np.isinf(law._delta) else kernel_width(error[used], independent)
        target = wild_targets(fitted, error, groups, n, seed, independent - p.free, width)
        found = law._refit(np.ones((n, len(groups))), target)
    kept = int(found.converged.sum())
    return found, {"resamples": kept, "redrawn": redrawn, "unconverged": n - kept, "method": method, "seed": seed}


def left_out(law: Law, groups: np.ndarray) -> Solution:
    """The fits without each group in turn, in the order of their sorted labels (groups,); the last are kept."""
    if law._jackknife is None or not np.array_equal(law._jackknife[0], groups):
        law._jackknife = (groups, law._refit(jackknife_weights(groups)))
    return law._jackknife[1]


def left_out_residuals(law: Law, groups: np.ndarray) -> Array:
    """Log of what was observed minus what the fit without the row's group predicts there, of shape (rows,)."""
    member = np.unique(groups, return_inverse=True)[1].ravel()
    predicted = law.problem_.form.value(left_out(law, groups).theta)[0]
    return law.problem_.target - predicted[member, np.arange(len(member))]


def slopes(law: Law, problem: Problem, theta: Array) -> Array:
    """Slopes (rows, k) of the log prediction at coordinates theta (k,), by the root of each row's weight in the fit."""
    k = len(theta)
    _, cache = problem.form.value(np.broadcast_to(theta, (k, k)))
    return problem.form.along(cache, np.eye(k)).T * np.sqrt(law.weight_ * law._precision)[:, None]


def residual_scale(law: Law) -> float:
    """Root mean square residual in log space, per degree of freedom; rows weigh as they did in the fit."""
    used = law.weight_ > 0
    inflated = _inflation(law, int(used.sum())) * law.residuals()
    return float(np.sqrt(law.weight_ @ inflated**2 / law.weight_.sum()))


def predict_interval(law: Law, points: list[Array], level: float, kind: str) -> Array:
    """Intervals (..., 2) at points that broadcast to (...,); see `Law.predict_interval`."""
    if kind not in ("mean", "run"):
        raise InputError(f"kind is {kind!r}; choose mean (the law's value) or run (what one new run shows).")
    draws = law.predict_draws(*np.broadcast_arrays(*points))
    if kind == "run":
        generator = np.random.default_rng((law.bootstrap_["seed"] or 0) + 1)  # not the signs or counts of the draws
        error = _inflation(law, len(np.unique(law.groups_[law.weight_ > 0]))) * law.residuals()
        draws = draws * np.exp(generator.choice(error, size=draws.shape, p=law.weight_ / law.weight_.sum()))
    rows = [percentile_interval(row, level) for row in draws.reshape(-1, draws.shape[-1])]
    return np.array(rows).reshape(*draws.shape[:-1], 2)


def _inflation(law: Law, independent: int) -> float:
    """Errors over residuals, for the constants that were fitted to so many independent runs."""
    return float(np.sqrt(independent / max(independent - law.problem_.free, 1)))
