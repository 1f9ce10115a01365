"""Forecasts of the final losses of unfinished runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import scipy  # its parts are imported at first use

from ..errors import Array, InputError, check_level
from .curvelaw import CurveLaw
from .curves import Curve, checked_schedule, curves_of

RECENT = 0.3  # share of a run's losses so far that measures its deviation from the law
LEAST = 3  # finished runs needed for an interval
YOUNG = 0.02  # share of a run's steps below which its deviation is ignored


def forecast_final(curves: pd.DataFrame, planned: Mapping[Any, Any], level: float = 0.95) -> pd.DataFrame:
    """Predict the last losses of the runs in `planned` (run -> lr of all steps 1..T) that have not reached step T.

    One law is fitted to all curves; a share of a run's recent deviation from the law is added. Intervals come from
    forecasts of finished runs, cut at the same share of steps. Indexed by run: loss, low, high, seen (share of steps
    done), reason (why there is no interval, or empty).
    """
    plans = {str(run): lr for run, lr in planned.items()}
    try:
        runs, problems = _sound(curves, plans)
    except InputError as error:
        return _table({run: (0.0, str(error)) for run in plans})
    by_run = {run.run: run for run in runs}
    rows: dict[str, Any] = {}
    waiting = []
    for run in plans:
        if run not in by_run:
            rows[run] = (0.0, problems.get(run, "it has no losses yet"))
        elif by_run[run].steps[-1] < len(plans[run]):
            waiting.append(by_run[run])
    if waiting:
        rows |= _forecast(runs, waiting, level)
    return _table({run: rows[run] for run in plans if run in rows})


def _sound(curves: pd.DataFrame, plans: Mapping[str, Any]) -> tuple[list[Curve], dict[str, str]]:
    """Return the usable runs, with rates from `plans`, and why each other run is not usable."""
    if not isinstance(curves, pd.DataFrame) or not {"run", "run_id"} & set(curves):
        curves_of(curves)
    label = "run" if "run" in curves else "run_id"
    usable, problems = [], {}
    for name, rows in curves.groupby(curves[label].astype(str)):
        try:
            run = curves_of(rows)[0]
            if not len(run.steps):
                raise InputError("it has no losses yet")
            if name in plans:
                run.lr = checked_schedule(plans[name], f"run {name}")
            if len(run.lr) < run.steps[-1]:
                raise InputError(f"its plan ends at step {len(run.lr)}, but it has reached step {run.steps[-1]}")
            usable.append(run)
        except InputError as error:
            problems[str(name)] = str(error)
    sized = [run for run in usable if run.N]
    if sized and len(sized) < len(usable):
        problems |= {run.run: "its N is missing, while other runs have N" for run in usable if not run.N}
        usable = sized
    return usable, problems


def _forecast(runs: list[Curve], waiting: list[Curve], level: float) -> dict[str, Any]:
    seen = {run.run: float(run.steps[-1] / len(run.lr)) for run in waiting}
    try:
        check_level(level)
        law = CurveLaw().fit_runs(runs)
    except (InputError, np.linalg.LinAlgError, ValueError) as error:
        return {run: (share, str(error)) for run, share in seen.items()}
    parts = dict(zip((run.run for run in law.runs_), law._design.rows, strict=True))
    done = [run for run in law.runs_ if run.steps[-1] >= len(run.lr)]
    rows: dict[str, Any] = {}
    for run in waiting:
        name, share = run.run, seen[run.run]
        try:
            design = law._make_design([law._query(run.lr, run.N, last_only=True)], fine=True)
        except InputError as error:
            rows[name] = (share, str(error))
            continue
        (value,), (slope,) = law._log_losses(law._theta, design)
        slopes, residual = (values[parts.get(name, slice(0))] for values in law._fit[1:3])
        tests = [*filter(None, (_backtest(law, finished, parts[finished.run], share) for finished in done))]
        offsets, ends = np.array([x for x, _ in tests]), np.array([y for _, y in tests])
        keep = float(np.clip(offsets @ ends / max(offsets @ offsets, 1e-30), 0, 1)) if len(tests) >= LEAST else 0.0
        value, slope = value + keep * _recent(residual), slope - keep * _recent(slopes)
        if len(tests) < LEAST:
            reason = f"an interval needs {LEAST} usable finished runs, and there are {len(tests)}"
            rows[name] = (share, reason, np.exp(value))
            continue
        spread = float(np.sqrt(np.mean((ends - keep * offsets) ** 2)) + 1e-12)
        # Backtests leave out no size, so the constants' errors are added, without what the recent deviation corrects.
        width = np.sqrt(spread**2 + slope @ law._covariance @ slope)
        half = scipy.special.stdtrit(len(tests) - 1, (1 + level) / 2) * width
        rows[name] = (share, "", np.exp(value), np.exp(value - half), np.exp(value + half))
    return rows


def _backtest(law: CurveLaw, run: Curve, part: slice, share: float) -> tuple[float, float] | None:
    """Return a finished run's recent deviation from the law before a cut at `share` of its steps, and its last one.

    The law is refitted without the steps after the cut. Returns None if there are none.
    """
    _, slope, residual, _, _ = law._fit
    cut = int(np.searchsorted(run.steps, share * len(run.lr), side="right"))
    if cut >= part.stop - part.start:
        return None
    step = law.moved(slice(part.start + cut, part.stop))
    deviation = residual[part] - slope[part] @ step
    return (float(_recent(deviation[:cut])) if share > YOUNG else 0.0), float(deviation[-1])


def _recent(rows: Array) -> Any:
    return rows[-max(int(RECENT * len(rows)), 1) :].mean(axis=0) if len(rows) else 0.0


def _table(rows: dict[str, Any]) -> pd.DataFrame:
    blank = (np.nan, np.nan, np.nan)
    made = [(*(*row[2:], *blank)[:3], row[0], row[1]) for row in rows.values()]
    index = pd.Index(list(rows), name="run", dtype=object)
    return pd.DataFrame(made, index=index, columns=["loss", "low", "high", "seen", "reason"])
