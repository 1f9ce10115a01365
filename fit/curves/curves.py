"""Loss curves from outside: a table in, checked `Curve`s out, and how far normalised curves coincide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..errors import Array, InputError, floats

NAMES = {"run_id": "run"}  # of curves.csv, as a sweep writes it
WARM = 0.02  # share of a run's steps that is left out after its warm-up
COINCIDE = 3.0  # robust standard deviations from the other runs beyond which a normalised curve stands out
SHARES = np.linspace(0.1, 0.9, 33)  # of a run's steps, where normalised curves are compared


@dataclass
class Curve:
    """One run: lr (T,) of steps 1..T, and the loss (points,) after each of `steps` (points,)."""

    run: str
    lr: Array
    steps: np.ndarray
    loss: Array
    N: float | None = None

    def past_warmup(self, warm: float = WARM) -> Curve:
        """Without the steps before the rate first reaches its maximum, and the share `warm` of all steps after them."""
        keep = self.steps > int(np.argmax(self.lr >= self.lr.max() * (1 - 1e-9))) + warm * len(self.lr)
        return Curve(self.run, self.lr, self.steps[keep], self.loss[keep], self.N)

    def until(self, step: float) -> Curve:
        keep = self.steps <= step
        return Curve(self.run, self.lr, self.steps[keep], self.loss[keep], self.N)


def read_curves(path: str | Path) -> pd.DataFrame:
    """The curves of a CSV or Parquet file, or of a sweep directory's curves.csv: run, step, lr, loss[, N, batch]."""
    path = Path(path)
    path = path / "curves.csv" if path.is_dir() else path
    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, low_memory=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as curves ({' '.join(str(error).split())[:200]}).") from None
    return named(table)


def named(table: pd.DataFrame) -> pd.DataFrame:
    """With the columns run, step, lr and loss. val_loss is the loss where it is given; other rows then say only lr."""
    if not isinstance(table, pd.DataFrame):
        raise InputError(f"curves is a {type(table).__name__}; a DataFrame with run, step, lr and loss is needed.")
    table = table.rename(columns={a: b for a, b in NAMES.items() if a in table and b not in table}).copy()
    if "val_loss" in table and table["val_loss"].notna().any():
        table["loss"] = table["val_loss"]
        table["silent"] = table["val_loss"].isna()
    for name in ("run", "step", "lr", "loss"):
        if name not in table:
            said = ", ".join(map(str, table.columns))
            raise InputError(f"curves have no column {name} (they have {said}); run, step, lr and loss are needed.")
    return table


def curves_of(table: pd.DataFrame, schedules: Mapping[Any, Any] | None = None) -> list[Curve]:
    """One checked Curve a run. Between rows lr is interpolated linearly in step, but for runs in `schedules`."""
    table = named(table)
    given = {str(run): floats(lr) for run, lr in (schedules or {}).items()}
    found = [_curve(str(run), rows, given.get(str(run))) for run, rows in table.groupby("run", sort=True)]
    if not found:
        raise InputError("curves have no row; at least one run is needed.")
    if len({curve.N is None for curve in found}) > 1:
        raise InputError("N is missing in some runs and given in others; it must stand in every row or in none.")
    return found


def checked_schedule(lr: Any, what: str) -> Array:
    """A rate for each step 1..T: finite, not negative, somewhere above zero."""
    try:
        lr = floats(lr)
    except (TypeError, ValueError):
        raise InputError(f"lr of {what} holds a value that is not a number; each must be zero or more.") from None
    if lr.ndim != 1 or not lr.size:
        raise InputError(f"lr of {what} has shape {lr.shape}; one rate for each step is needed.")
    if (bad := ~(np.isfinite(lr) & (lr >= 0))).any():
        raise InputError(f"lr of {what} is {lr[bad][0]:g}; it must be a finite number, zero or more.")
    if not lr.any():
        raise InputError(f"lr of {what} is 0 in every step; it must be above zero somewhere.")
    return lr


def _curve(run: str, rows: pd.DataFrame, schedule: Array | None) -> Curve:
    for name in ("batch", "N"):
        if name in rows and rows[name].nunique() > 1:
            said = " and ".join(f"{value:g}" for value in rows[name].dropna().unique()[:2])
            raise InputError(f"{name} of run {run} is {said}; one run must keep one {name}.")
    try:
        rows = rows.astype({"step": float, "lr": float, "loss": float}).sort_values("step", kind="stable")
    except (TypeError, ValueError):
        raise InputError(f"step, lr or loss of run {run} holds a value that is not a number.") from None
    if not (np.isfinite(rows.step) & (rows.step >= 0)).all():
        raise InputError(f"step of run {run} holds a value below zero or none; steps count from 1.")
    lr = schedule if schedule is not None else rows.lr[rows.lr.notna()]
    checked_schedule(lr, f"run {run}")
    spoken = rows[(rows.step >= 1) & ~rows["silent"].astype(bool)] if "silent" in rows else rows[rows.step >= 1]
    spoken = spoken.drop_duplicates(["step", "loss"])
    if (twice := spoken.step.duplicated()).any():
        step = spoken.step[twice].iloc[0]
        raise InputError(f"run {run} has step {step:g} twice with different losses; keep one branch of its restarts.")
    if (bad := ~(np.isfinite(spoken.loss) & (spoken.loss > 0))).any():
        row = spoken[bad].iloc[0]
        raise InputError(f"loss of run {run} is {row.loss:g} at step {row.step:g}; it must be finite and above zero.")
    steps = spoken.step.to_numpy().astype(int)
    last = int(steps.max(initial=1))
    if schedule is None:
        schedule = np.interp(np.arange(1, last + 1), rows.step[rows.lr.notna()], lr)
    elif len(schedule) < last:
        raise InputError(f"schedules has {len(schedule)} steps for run {run}, which has step {last}; give each one.")
    size = [float(value) for value in rows.N.dropna()[:1]] if "N" in rows else []
    if size and not size[0] > 0:
        raise InputError(f"N of run {run} is {size[0]:g}; it must be above zero.")
    return Curve(run, schedule, steps, spoken.loss.to_numpy(), size[0] if size else None)


def schedule_points(lr: Any, tolerance: float = 2e-3) -> tuple[list[float], list[float]]:
    """schedule.shares and schedule.factors of a run that follows lr (T,) after its warm-up, within `tolerance` of the
    peak, as `CurveLaw.best_schedule` finds it.
    """
    lr = checked_schedule(lr, "the schedule")
    factors = lr[int(np.argmax(lr)) :] / lr.max()
    if len(factors) < 2:
        raise InputError("lr rises to its last step; a schedule needs a step after its warm-up.")
    places, kept = np.linspace(0, 1, len(factors)), [0, len(factors) - 1]
    while True:
        away = np.abs(np.interp(places, places[kept], factors[kept]) - factors)
        if away.max() <= tolerance:
            return places[kept].tolist(), factors[kept].tolist()
        kept = sorted([*kept, int(np.argmax(away))])


def collapse(curves: pd.DataFrame, floor: float | None = None) -> pd.DataFrame:
    """How far each run's normalised curve lies from the median of all, which coincide where sizes are tuned alike.

    (loss - floor) / (final - floor) against the share of steps (Qiu et al. 2025), for runs of one shape of schedule.
    floor: L0; by default 0. Indexed by run: deviation (root mean square of the logarithm), noted (stands out).
    """
    runs = curves_of(curves)
    floor = 0.0 if floor is None else float(floor)
    if floor >= min(curve.loss.min(initial=np.inf) for curve in runs):
        raise InputError(f"floor is {floor:g}; it must lie below every loss.")
    lines = []
    for curve in runs:
        if len(curve.steps) < 3:
            raise InputError(f"run {curve.run} has {len(curve.steps)} losses; at least 3 are needed.")
        excess = np.log(curve.loss - floor) - np.log(curve.loss[-1] - floor)
        lines.append(np.interp(SHARES, curve.steps / len(curve.lr), excess))
    away = np.array(lines) - np.median(lines, axis=0)
    deviation = np.sqrt((away**2).mean(axis=1))
    return pd.DataFrame(
        {"deviation": deviation, "noted": deviation > COINCIDE * max(np.median(deviation) * 1.4826, 1e-9)},
        index=pd.Index([curve.run for curve in runs], name="run"),
    )
