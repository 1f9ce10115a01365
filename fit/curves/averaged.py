"""Losses at each D of a long run at a constant rate: averaged weights minus a gap measured by cooldowns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Array

if TYPE_CHECKING:
    import pandas as pd

AVERAGED = re.compile(r"val_loss_(?:ema|window)_(.+)")
SPACING = 2**0.5  # least ratio between D of one run; closer ones share most of the averaged weights
LAST_STEP_ONLY = ("budget", "val_bpb", "train_loss", "seconds", "estimated_seconds")  # and scores
BEYOND = 1.5  # largest factor of D outside the range of the cooldowns
WARM = 3.0  # least D in units of the warm-up: a run that ends earlier would have a shorter warm-up
SLOPE = 0.005  # prior standard deviation of the gap's slope, in log loss per e-fold of D; chosen by hand


def with_averages(table: pd.DataFrame, curves: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Add a row to `table` for each usable loss of averaged weights. Returns the table and a note on these rows.

    At equal D, log losses of averaged weights and of a cooldown differ by a gap a + b log D, fitted to all cooldowns.
    Of several averages, the one that best predicts left-out cooldowns is used. `loss_se` includes the error of the gap.
    """
    import pandas as pd

    spans = [name for name in curves if AVERAGED.fullmatch(str(name))]
    if not spans or not {"trunk", "final", "D", "run_id"} <= set(table):
        return table, ""
    final = table[table["final"].astype(bool)].set_index("run_id")
    constant = curves[curves["lr"] >= curves.groupby("run_id")["lr"].transform("max") * (1 - 1e-6)]
    whole = set(final.index[final["trunk"].isna()])  # a branch's curve begins with its trunk's
    long = {str(run): rows for run, rows in constant.groupby("run_id") if run in whole}
    cooled = final[final["trunk"].isin(list(long))]
    gaps = {str(name): _gaps(str(name), long, cooled) for name in spans}
    name, (log_D, gap) = min(gaps.items(), key=lambda item: _left_out_error(*item[1]))
    if len(gap) < 2:
        return table, (
            f"Losses of averaged weights are not used: they need at least 2 cooldowns, and there are {len(gap)}."
        )
    error, slope = _left_out_error(log_D, gap), _line(log_D, gap)
    rows = []
    for run, curve in long.items():
        row, cooled_D = final.loc[run], cooled["D"][cooled["trunk"] == run].to_numpy(float)
        last, warm = 0.0, WARM * float(curve["tokens"].min())
        for step, D, loss in curve[["step", "tokens", name]].dropna().to_numpy(float):
            inside = max(np.exp(log_D.min()) / BEYOND, warm) <= D <= np.exp(log_D.max()) * BEYOND
            if not inside or last * SPACING > D or (np.abs(np.log(cooled_D / D)) < np.log(SPACING)).any():
                continue
            last = D
            estimate = loss / np.exp(slope[0] + slope[1] * np.log(D))
            flops = {name: row[name] / row["D"] * D for name in ("flops", "flops_exact", "flops_6nd") if name in row}
            fields = {
                "run_id": f"{run}@{int(step)}",
                "step": int(step),
                "D": D,
                "loss": estimate,
                "trunk": run,
                **flops,
            }
            fields |= {"loss_se": np.hypot(row.get("loss_se", 0.0) or 0.0, error * estimate), "averaged": name}
            shared = {k: value for k, value in row.items() if k not in LAST_STEP_ONLY and "/" not in str(k)}
            rows.append(shared | fields)
    low, high = (100 * (slope[0] + slope[1] * end) for end in (log_D.min(), log_D.max()))
    sentence = (
        f"{len(rows)} points are losses of averaged weights ({name}) of {len(long)} long runs, minus the gap that "
        f"{len(gap)} cooldowns measured: {low:.2f} to {high:.2f} % from the smallest to the largest D, "
        f"each predicted by the others within {100 * error:.2f} %."
    )
    return pd.concat([table, pd.DataFrame(rows)], ignore_index=True), sentence


def _gaps(name: str, long: dict[str, pd.DataFrame], cooled: pd.DataFrame) -> tuple[Array, Array]:
    """Return log D of each cooldown, and the log ratio of its trunk's averaged loss (column `name`) to its own loss."""
    pairs = []
    for _, run in cooled.iterrows():
        curve = long[run["trunk"]][["tokens", name]].dropna()
        log_tokens, loss = np.log(curve.to_numpy(float)).T
        if len(log_tokens) and log_tokens[0] - 0.01 <= np.log(run["D"]) <= log_tokens[-1] + 0.01:
            pairs.append((np.log(run["D"]), np.interp(np.log(run["D"]), log_tokens, loss) - np.log(run["loss"])))
    log_D, gap = np.array(pairs).reshape(-1, 2).T
    return log_D, gap


def _line(log_D: Array, gap: Array) -> tuple[float, float]:
    """Fit gap = offset + slope log D, the slope with a prior of mean 0 and width SLOPE."""
    x, spread = log_D - log_D.mean(), max(float(np.std(gap)), 1e-6)
    slope = float(x @ gap / (x @ x + (spread / SLOPE) ** 2))
    return float(gap.mean() - slope * log_D.mean()), slope


def _left_out_error(log_D: Array, gap: Array) -> float:
    if len(gap) < 2:
        return np.inf
    errors = []
    for i in range(len(gap)):
        offset, slope = _line(np.delete(log_D, i), np.delete(gap, i))
        errors.append(gap[i] - offset - slope * log_D[i])
    return float(np.sqrt(np.mean(np.square(errors))))
