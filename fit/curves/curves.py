"""Loss curves: read and check a table, and compare normalised curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from ..errors import Array, InputError, floats
from ..table import ALIASES, alias_in, load, numeric, some, unit_of

NAMES = {  # -> other names of a column, see ALIASES
    "run": ALIASES["run_id"],
    "step": ("_step", "global_step", "train_global_step"),
    "lr": ("learning_rate", "train_lr", "train_learning_rate"),
    "loss": (),
    "val_loss": ALIASES["loss"][1:],
    "N": ALIASES["N"],
    "batch": (),
}
WARM = 0.02  # share of a run's steps that is left out after its warm-up; chosen by hand
COINCIDE = 3.0  # robust standard deviations from the other runs beyond which a curve stands out
SHARES = np.linspace(0.1, 0.9, 33)  # shares of the steps at which normalised curves are compared


@dataclass
class Curve:
    """One run: lr (T,) of steps 1..T, and the loss (points,) after each of `steps` (points,)."""

    run: str
    lr: Array
    steps: np.ndarray
    loss: Array
    N: float | None = None

    def past_warmup(self, warm: float = WARM) -> Curve:
        """Return the curve without losses before lr's maximum, or within a share `warm` of all steps after it."""
        keep = self.steps > int(np.argmax(self.lr >= self.lr.max() * (1 - 1e-9))) + warm * len(self.lr)
        return Curve(self.run, self.lr, self.steps[keep], self.loss[keep], self.N)

    def until(self, step: float) -> Curve:
        keep = self.steps <= step
        return Curve(self.run, self.lr, self.steps[keep], self.loss[keep], self.N)


def read_curves(source: str | Path | pd.DataFrame, columns: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Read curves from a table or the curves.csv of a sweep, with columns run, step, lr, loss[, N, batch].

    `columns` maps these names to the table's own, as in {"step": "iteration"}.
    """
    table, exist, origin = load(source, "curves.csv")
    columns = columns or {}
    for name, column in columns.items():
        if name not in NAMES or column not in exist:
            names = ", ".join(NAMES)
            raise InputError(f"columns has {name}={column!r}; it maps {names} to columns of {origin}: {some(exist)}.")
    if "loss" in columns:  # no other loss may replace the chosen one
        held_out = [name for name in exist if alias_in([name], NAMES["val_loss"], "loss") and name != columns["loss"]]
        table = table.drop(columns=held_out)
    return named(table, columns)


def named(table: pd.DataFrame, columns: Mapping[str, str] = MappingProxyType({})) -> pd.DataFrame:
    """Return a copy with columns run, step, lr, loss[, N, batch]; loss is val_loss if this column has values."""
    if not isinstance(table, pd.DataFrame):
        raise InputError(f"curves is a {type(table).__name__}; a DataFrame with run, step, lr and loss is needed.")
    table = table.copy()
    for name, aliases in NAMES.items():
        column = columns.get(name, name if name in table else alias_in([*map(str, table)], aliases, name))
        if column is not None:
            unit = unit_of(column, name)[1] if name == "N" else 1.0
            table[name] = table[column] if unit == 1.0 else numeric(table, column) * unit
    if "val_loss" in table and table["val_loss"].notna().any():
        table["loss"] = table["val_loss"]
        table["silent"] = table["val_loss"].isna()
    for name in ("run", "step", "lr", "loss"):
        if name not in table:
            exist = some([*map(str, table)])
            raise InputError(f"curves have no column {name}; they need run, step, lr and loss, and have {exist}.")
    return table


def curves_of(table: pd.DataFrame, schedules: Mapping[Any, Any] | None = None) -> list[Curve]:
    """Return one checked Curve per run; lr is linear in step between rows, except for runs in `schedules`."""
    table = named(table)
    exact = {str(run): floats(lr) for run, lr in (schedules or {}).items()}
    curves = [_curve(str(run), rows, exact.get(str(run))) for run, rows in table.groupby("run", sort=True)]
    if not curves:
        raise InputError("curves have no rows; at least one run is needed.")
    if len({curve.N is None for curve in curves}) > 1:
        raise InputError("N is missing in some runs and given in others; give it in every row or in none.")
    return curves


def checked_schedule(lr: Any, what: str) -> Array:
    """Check the rates of steps 1..T; errors name `what`."""
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
            values = " and ".join(f"{value:g}" for value in rows[name].dropna().unique()[:2])
            raise InputError(f"{name} of run {run} is {values}; it must not change within a run.")
    try:
        rows = rows.astype({"step": float, "lr": float, "loss": float}).sort_values("step", kind="stable")
    except (TypeError, ValueError):
        raise InputError(f"step, lr or loss of run {run} holds a value that is not a number; give numbers.") from None
    if not (np.isfinite(rows.step) & (rows.step >= 0)).all():
        raise InputError(f"step of run {run} is missing or negative in some row; steps count from 1.")
    lr = schedule if schedule is not None else rows.lr[rows.lr.notna()]
    checked_schedule(lr, f"run {run}")
    measured = rows[(rows.step >= 1) & ~rows["silent"].astype(bool)] if "silent" in rows else rows[rows.step >= 1]
    measured = measured.drop_duplicates(["step", "loss"])
    if (repeated := measured.step.duplicated()).any():
        step = measured.step[repeated].iloc[0]
        raise InputError(f"run {run} has step {step:g} twice with different losses; keep one branch of its restarts.")
    if (bad := ~(np.isfinite(measured.loss) & (measured.loss > 0))).any():
        row = measured[bad].iloc[0]
        raise InputError(f"loss of run {run} is {row.loss:g} at step {row.step:g}; it must be finite and above zero.")
    steps = measured.step.to_numpy().astype(int)
    last = int(steps.max(initial=1))
    if schedule is None:
        schedule = np.interp(np.arange(1, last + 1), rows.step[rows.lr.notna()], lr)
    elif len(schedule) < last:
        raise InputError(f"schedules has {len(schedule)} steps for run {run}, which has step {last}; give all steps.")
    size = [float(value) for value in rows.N.dropna()[:1]] if "N" in rows else []
    if size and not size[0] > 0:
        raise InputError(f"N of run {run} is {size[0]:g}; it must be above zero.")
    return Curve(run, schedule, steps, measured.loss.to_numpy(), size[0] if size else None)


def schedule_points(lr: Any, tolerance: float = 2e-3) -> tuple[list[float], list[float]]:
    """Return the config values schedule.shares and schedule.factors of a run that follows lr (T,) after its warm-up.

    The run's rates deviate from lr by at most `tolerance` of the peak.
    """
    lr = checked_schedule(lr, "the schedule")
    factors = lr[int(np.argmax(lr)) :] / lr.max()
    if len(factors) < 2:
        raise InputError("lr rises up to its last step; a schedule needs at least one step after its warm-up.")
    places, points = np.linspace(0, 1, len(factors)), [0, len(factors) - 1]
    while True:
        error = np.abs(np.interp(places, places[points], factors[points]) - factors)
        if error.max() <= tolerance:
            return places[points].tolist(), factors[points].tolist()
        points = sorted([*points, int(np.argmax(error))])


def collapse(curves: pd.DataFrame, floor: float | None = None) -> pd.DataFrame:
    """Return how far each run's normalised curve is from the median; curves coincide if sizes are tuned alike.

    Compares (loss - floor) / (final loss - floor) at equal shares of steps (Qiu et al. 2025), for runs of one shape of
    schedule. Indexed by run: deviation (root mean square log ratio to the median), noted (true if it stands out).
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
    distance = np.array(lines) - np.median(lines, axis=0)
    deviation = np.sqrt((distance**2).mean(axis=1))
    return pd.DataFrame(
        {"deviation": deviation, "noted": deviation > COINCIDE * max(np.median(deviation) * 1.4826, 1e-9)},
        index=pd.Index([curve.run for curve in runs], name="run"),
    )
