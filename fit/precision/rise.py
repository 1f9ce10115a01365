"""The loss that quantization after training adds, C D^g_D / N^g_N, with a C for each way to quantize.

Kumar et al. 2024 (arXiv:2411.04330), equation 2, where C falls with the bits P as exp(-P / gamma).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..errors import Array, InputError, identifiable
from ..table import RunTable, numeric
from ..uncertainty import independent_groups, wild_targets

PREFIX = "quantized_loss_"
LEAST = 3  # runs with a rise, for each way to quantize


@dataclass(frozen=True)
class RiseLaw:
    """ways (k,); constants (1 + draws, k + 2): log C by way, g_D and g_N, of the fit and of draws; runs: a row each."""

    ways: tuple[str, ...]
    constants: Array
    runs: pd.DataFrame

    @classmethod
    def fit(cls, runs: RunTable, draws: int, seed: int, notes: list[str]) -> RiseLaw | None:
        """Fit log rises by least squares; without usable columns, return None. Adds a note on all that it omits."""
        names = [name for name in map(str, runs.frame.columns) if name.startswith(PREFIX)]
        columns: dict[str, Any] = {"N": runs.N, "D": runs.D, "group": runs.group}
        columns |= {name[len(PREFIX) :]: numeric(runs.frame, name)[runs.rows] - runs.loss for name in names}
        rises = pd.DataFrame(columns).melt(["N", "D", "group"], var_name="way", value_name="rise").dropna()
        for way, count in rises["way"][rises["rise"] <= 0].value_counts().items():
            notes.append(f"{PREFIX}{way} is no higher than the loss in {count} runs; the law of its rise lacks them.")
        rises = rises[rises["rise"] > 0]
        rises = rises[rises.groupby("way")["rise"].transform("size") >= LEAST].reset_index(drop=True)
        if rises.empty:
            return None
        ways, number = np.unique(rises["way"], return_inverse=True)
        N, D, group = (rises[name].to_numpy() for name in ("N", "D", "group"))
        design = np.column_stack([np.eye(len(ways))[number], np.log(D), -np.log(N)])
        try:
            identifiable(N, D)
            freedom = independent_groups(group, design.shape[1]) - design.shape[1]
        except InputError as error:
            notes.append(f"Quantization after training has no law: {error}")
            return None
        target, inverse = np.log(rises["rise"].to_numpy()), np.linalg.pinv(design)
        theta, hat = inverse @ target, design @ inverse
        residual = target - design @ theta
        for rows in (np.flatnonzero(group == label) for label in np.unique(group)):  # of the fit without the run
            residual[rows] = np.linalg.pinv(np.eye(len(rows)) - hat[np.ix_(rows, rows)]) @ residual[rows]
        drawn = wild_targets(design @ theta, residual, group, draws, seed, freedom)
        return cls(tuple(ways), np.vstack([theta, drawn @ inverse.T]), rises)

    def __call__(self, way: str, N: Array, D: Array) -> Array:
        """Return the rise at points (points,), by the fit and by each draw, (points, 1 + draws)."""
        c = self.constants
        return np.exp(c[:, self.ways.index(way)] + np.outer(np.log(D), c[:, -2]) - np.outer(np.log(N), c[:, -1]))
