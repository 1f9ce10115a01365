"""The best learning rate and batch of each cell of a sweep; a cell is one (N, D) trained with a grid of settings.

"near" averages the settings within a fraction of the lowest loss (Bi et al.: 0.25 %), biased to where the loss rises
slowly. "best" (Li et al.) is off by up to half a step. An optimum at an edge of the settings is refused.

Bi et al. 2024 (DeepSeek, arXiv:2401.02954), section 3.1; Li et al. 2025 (Step Law, arXiv:2503.04715).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from ..errors import Array, Column, Columns, InputError, one_of, positive, same_length
from ..table import Runs, RunTable, as_table
from .hyperparameters import CellOptimum
from .settings_surface import TARGETS, cells_of, near_best

WITHIN = {"near": 0.0025, "best": 0.0}  # largest relative excess loss of the runs used, by method


class Sweep(NamedTuple):
    """The runs of a sweep: N, D, learning_rate, batch (tokens), loss, each (n,)."""

    N: Array
    D: Array
    learning_rate: Array
    batch: Array
    loss: Array


def read_sweep(table: Runs, sequence_length: float | None = None) -> Sweep:
    """Read the settings and losses of the runs of a RunTable or DataFrame.

    Columns are `learning_rate` or `lr`, and `batch_tokens`, or `batch_size` or `bs` (sequences) times `sequence_length`
    (or a column of this name).
    """
    table = as_table(table)
    rate = _column(table, "learning_rate", "lr")
    if "batch_tokens" in table.frame:
        batch = _column(table, "batch_tokens")
    else:
        batch = _column(table, "batch_size", "bs")
        if sequence_length is not None:
            batch = batch * positive("sequence_length", [sequence_length])
        elif "sequence_length" in table.frame:
            batch = batch * _column(table, "sequence_length")
        else:
            raise InputError(
                f"{table.source} counts batches in sequences and has no column 'sequence_length'; "
                "give sequence_length in tokens."
            )
    return Sweep(table.N, table.D, rate, batch, table.loss)


def cell_optima(
    N: Any,
    D: Column = None,
    learning_rate: Column = None,
    batch: Column = None,
    loss: Column = None,
    method: Literal["near", "best"] = "near",
    within: float | None = None,
) -> list[CellOptimum]:
    """Return the best settings of each cell (one N and D), by rising N and D.

    Parameters
    ----------
    N, D, learning_rate, batch, loss
        All runs, (n,) each, or a table in place of N; batch in tokens.
    method
        "near" (mean of the runs used) or "best" (lowest loss).
    within
        Largest relative excess loss of the runs used; default 0.0025 for "near", 0 for "best".
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
    """Return why an optimum is refused if it is at an end of one of the `varied` settings, empty if not."""
    for name, values in varied.items():
        best = values[np.argmin(loss)]
        if best in (values.min(), values.max()):
            side = "smallest" if best == values.min() else "largest"
            return f"the lowest loss is at the {side} {name.replace('_', ' ')}, an edge of the settings tried"
    return ""


def _column(table: RunTable, *names: str) -> Array:
    for name in names:
        if name in table.frame:
            return positive(name, table.column(name), table.rows)
    exist = ", ".join(map(str, table.frame.columns))
    raise InputError(f"{table.source} has no column {' or '.join(map(repr, names))}; it has {exist}.")
