"""The loss that quantization after training adds, C D^g_D / N^g_N, with a C for each way to quantize.

Kumar et al. 2024 (arXiv:2411.04330), equation 2, where C falls with the bits P as exp(-P / gamma).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..errors import Array, InputError, identifiable
from ..table import RunTable, numeric
from ..uncertainty import independent_groups, need_no_group_alone, wild_targets

PREFIX = "quantized_loss_"
LEAST = 3  # runs with a rise, for each way to quantize


@dataclass(frozen=True)
class RiseLaw:
    """Constants, the fit's and then draws, as rows (1 + draws,) of log C by way, g_D and g_N; runs: way, N, D, rise."""

    ways: tuple[str, ...]
    constants: Array
    runs: pd.DataFrame

    @classmethod
    def fit(cls, runs: RunTable, draws: int, seed: int, notes: list[str]) -> RiseLaw | None:
        """Fit log rises by least squares; return None without usable columns. Adds to `notes` what is left out."""
        parts = []
        for name in (str(c) for c in runs.frame.columns if str(c).startswith(PREFIX)):
            rise = numeric(runs.frame, name)[runs.rows] - runs.loss
            part = pd.DataFrame(
                {"way": name[len(PREFIX) :], "N": runs.N, "D": runs.D, "rise": rise, "group": runs.group}
            )
            part = part[np.isfinite(rise)]
            if lost := int((part["rise"] <= 0).sum()):
                notes.append(f"{name} is no higher than the loss in {lost} of {len(part)} runs, which are left out.")
            part = part[part["rise"] > 0]
            parts += [part] if len(part) >= LEAST else []
        if not parts:
            return None
        data = pd.concat(parts, ignore_index=True)
        ways, number = np.unique(data["way"], return_inverse=True)
        N, D = data["N"].to_numpy(), data["D"].to_numpy()
        try:
            identifiable(N, D)
            design = np.column_stack([np.eye(len(ways))[number], np.log(D), -np.log(N)])
            freedom = independent_groups(data["group"], k := design.shape[1]) - k
            need_no_group_alone(design, data["group"].to_numpy(), "the rise")
        except InputError as error:
            notes.append(f"Quantization after training has no law: {error}")
            return None
        target, inverse = np.log(data["rise"].to_numpy()), np.linalg.pinv(design)
        theta, hat = inverse @ target, design @ inverse
        left_out = np.empty(len(target))
        for rows in data.groupby("group").indices.values():  # residuals of the fit without the run
            left_out[rows] = np.linalg.solve(
                np.eye(len(rows)) - hat[np.ix_(rows, rows)], (target - design @ theta)[rows]
            )
        drawn = wild_targets(design @ theta, left_out, data["group"], draws, seed, freedom)
        return cls(tuple(ways), np.vstack([theta, drawn @ inverse.T]), data)

    def __call__(self, way: str, N: Array, D: Array) -> Array:
        """Return the rise at points (points,), by the fit and by each draw, (points, 1 + draws)."""
        c = self.constants
        return np.exp(c[:, self.ways.index(way)] + np.outer(np.log(D), c[:, -2]) - np.outer(np.log(N), c[:, -1]))
