"""What a long run at a constant rate says of every D before its end: the loss of its averaged weights, less a gap that
cooldowns from it measure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Array

if TYPE_CHECKING:
    import pandas as pd

AVERAGED = re.compile(r"val_loss_(?:ema|window)_(.+)")
SPACING = 2**0.5  # least ratio of two D of one run; nearer ones share most of what is averaged
OF_THE_END = ("budget", "val_bpb", "train_loss", "seconds", "estimated_seconds")  # and scores, of a run's last step
BEYOND = 1.5  # a D further than this factor outside of the cooldowns' is left out
WARM = 3.0  # times the D of a warm-up before which a run of its own would have warmed up faster
SLOPE = 0.005  # prior standard deviation of the gap's slope per e-fold of D, as log loss


def with_averages(table: pd.DataFrame, curves: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """table.csv with a row for every averaged loss that is worth one, and a sentence on them; "" where there is none.

    Log losses of an average and of a cooldown from the same step differ by a + b log D, fitted to all cooldowns. Of
    several spans the one counts whose gap is predicted best when each cooldown is left out. `loss_se` of a row holds
    the gap's error too, and `trunk` the run, so that its rows are resampled together.
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
    name, (log_D, gap) = min(gaps.items(), key=lambda item: _missed(*item[1]))
    if len(gap) < 2:
        return table, f"{len(gap)} cooldowns from a run with averaged weights; 2 or more say what an average is worth."
    error, slope = _missed(log_D, gap), _line(log_D, gap)
    rows = []
    for run, curve in long.items():
        row, known = final.loc[run], cooled["D"][cooled["trunk"] == run].to_numpy(float)
        last, warm = 0.0, WARM * float(curve["tokens"].min())
        for step, D, loss in curve[["step", "tokens", name]].dropna().to_numpy(float):
            inside = max(np.exp(log_D.min()) / BEYOND, warm) <= D <= np.exp(log_D.max()) * BEYOND
            if not inside or last * SPACING > D or (np.abs(np.log(known / D)) < np.log(SPACING)).any():
                continue
            last = D
            estimate = loss / np.exp(slope[0] + slope[1] * np.log(D))
            spent = {each: row[each] / row["D"] * D for each in ("flops", "flops_exact", "flops_6nd") if each in row}
            own = {"run_id": f"{run}@{int(step)}", "step": int(step), "D": D, "loss": estimate, "trunk": run, **spent}
            own |= {"loss_se": np.hypot(row.get("loss_se", 0.0) or 0.0, error * estimate), "averaged": name}
            kept = {each: value for each, value in row.items() if each not in OF_THE_END and "/" not in str(each)}
            rows.append(kept | own)
    low, high = (100 * (slope[0] + slope[1] * end) for end in (log_D.min(), log_D.max()))
    said = (
        f"{len(rows)} points are losses of averaged weights ({name}) of {len(long)} long runs, less the gap that "
        f"{len(gap)} cooldowns measured: {low:.2f} to {high:.2f} % from the smallest to the largest D, "
        f"each predicted by the others within {100 * error:.2f} %."
    )
    return pd.concat([table, pd.DataFrame(rows)], ignore_index=True), said


def _gaps(name: str, long: dict[str, pd.DataFrame], cooled: pd.DataFrame) -> tuple[Array, Array]:
    """Log D of the cooldowns that the long run's averages surround, and how far these lie above."""
    found = []
    for _, run in cooled.iterrows():
        curve = long[run["trunk"]][["tokens", name]].dropna()
        at, loss = np.log(curve.to_numpy(float)).T
        if len(at) and at[0] - 0.01 <= np.log(run["D"]) <= at[-1] + 0.01:
            found.append((np.log(run["D"]), np.interp(np.log(run["D"]), at, loss) - np.log(run["loss"])))
    log_D, gap = np.array(found).reshape(-1, 2).T
    return log_D, gap


def _line(log_D: Array, gap: Array) -> tuple[float, float]:
    """Offset and slope, which a prior holds to zero as strongly as the gaps scatter about the line."""
    x, spread = log_D - log_D.mean(), max(float(np.std(gap)), 1e-6)
    slope = float(x @ gap / (x @ x + (spread / SLOPE) ** 2))
    return float(gap.mean() - slope * log_D.mean()), slope


def _missed(log_D: Array, gap: Array) -> float:
    """Root mean square error of each gap, predicted from the others."""
    if len(gap) < 2:
        return np.inf
    missed = []
    for i in range(len(gap)):
        offset, slope = _line(np.delete(log_D, i), np.delete(gap, i))
        missed.append(gap[i] - offset - slope * log_D[i])
    return float(np.sqrt(np.mean(np.square(missed))))
