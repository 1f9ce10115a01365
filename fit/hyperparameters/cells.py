"""The best learning rate and batch of each cell of a sweep; a cell is one (N, D) trained with a grid of settings.

"near" averages the settings whose loss is within a fraction (Bi et al.: 0.25 %) of the lowest; it is biased to where
the loss rises slowly. "best" (Li et al.) is off by up to half a step. An optimum at an edge of the settings is refused.

Bi et al. 2024 (DeepSeek, arXiv:2401.02954), section 3.1; Li et al. 2025 (Step Law, arXiv:2503.04715).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ..errors import Array, Column, Columns, InputError, one_of, positive, same_length
from .hyperparameters import CellOptimum, Sweep, read_sweep
from .settings_surface import TARGETS, cells_of, near_best

WITHIN = {"near": 0.0025, "best": 0.0}  # largest relative excess loss of the runs used, by method


def cell_optima(
    N: Any,
    D: Column = None,
    learning_rate: Column = None,
    batch: Column = None,
    loss: Column = None,
    method: Literal["near", "best"] = "near",
    within: float | None = None,
) -> list[CellOptimum]:
    """Return the best settings of each cell (one N and D), sorted by N and D.

    Parameters
    ----------
    N, D, learning_rate, batch, loss
        All runs, (n,) each, or a table instead of N; batch in tokens.
    method
        "near" (geometric mean of settings near the lowest loss) or "best" (settings of the lowest loss).
    within
        Largest relative excess loss that "near" averages; default 0.0025.
    """
    one_of("method", method, WITHIN)
    within = WITHIN[method] if within is None else within
    if not 0 <= within < 1:
        raise InputError(f"within is {within}; it must be at least 0 and below 1, such as {WITHIN['near']}.")
    inputs = Sweep(N, D, learning_rate, batch, loss) if D is not None else read_sweep(N)  # type: ignore[arg-type]
    columns = {name: positive(name, values) for name, values in inputs._asdict().items()}
    same_length(**columns)
    cell = cells_of(columns["N"], columns["D"])
    return [
        _optimum(Sweep(*(values[cell == label] for values in columns.values())), method, within)
        for label in range(cell.max() + 1)
    ]


def _optimum(runs: Sweep, method: str, within: float) -> CellOptimum:
    near = near_best(runs.N, runs.D, runs.loss, np.ones_like(runs.loss), within)
    if method == "best":  # the first of equal losses
        near = np.arange(len(near)) == int(np.argmin(runs.loss))
    used, lowest = int(near.sum()), float(runs.loss.min())
    bare = CellOptimum(float(runs.N[0]), float(runs.D[0]), lowest, len(runs.loss), used, method)
    varied = {name: getattr(runs, name) for name in TARGETS if np.ptp(getattr(runs, name)) > 0}
    # Geometric means.
    settings: dict[str, Any] = {name: float(np.exp(np.log(values[near]).mean())) for name, values in varied.items()}
    return replace(bare, **settings, reason=_edge(varied, runs.loss))


def _edge(varied: Columns, loss: Array) -> str:
    """Return why the optimum is refused if the lowest loss is at an end of one of the `varied` settings, else ""."""
    for name, values in varied.items():
        best = values[np.argmin(loss)]
        if best in (values.min(), values.max()):
            side = "smallest" if best == values.min() else "largest"
            return f"the lowest loss is at the {side} {name.replace('_', ' ')}, an edge of the settings tried"
    return ""
