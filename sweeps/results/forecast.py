"""Final losses of runs under way, from their first part and from the runs that are done."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, NotRequired, TypedDict

from ...train.config import RunConfig, canonical_json
from ...train.errors import UserError
from ...train.files import file_sha256, read_json, write_json
from ...train.flops import count_parameters
from ...train.schedule import learning_rate_factor
from ..runs.directory import SweepDirectory, now_on
from .table import sweep_curves

LEVEL = 0.95
TEACHERS, LEAST = 64, 3  # finished runs that forecasts of others learn from: most, and fewest
FRESH_SECONDS = 60.0  # in which `status` computes no forecast anew
FIRST_SEEN = 0.1  # share of a run from which on its forecast is held against later ones
QUANTILE = 1.96  # of a normal distribution at LEVEL


@dataclass(frozen=True)
class Forecast:
    """A final loss with the interval of a new run's; `seen`: share of the run's steps that it knows."""

    N: int
    D: int
    loss: float
    low: float
    high: float
    run_id: str | None = None
    seen: float = 0.0
    level: float = LEVEL
    made: str = ""
    version: str = ""
    inputs: dict[str, str] | None = None  # SHA-256 of the files that it was made from
    digest: str = ""

    def sealed(self, sweep: SweepDirectory) -> Forecast:
        files = {name: sweep.path / name for name in ("table.csv", "curves.csv")}
        inputs = {name: file_sha256(path) for name, path in files.items() if path.exists()}
        made = as_date(now_on(sweep.path))
        dated = replace(self, made=made, version=version("isoflop"), inputs=inputs)
        return replace(dated, digest=dated.own_digest())

    def own_digest(self) -> str:
        said = {name: value for name, value in asdict(self).items() if name != "digest"}
        return hashlib.sha256(canonical_json(said).encode()).hexdigest()


class Latest(TypedDict):
    """forecast.json."""

    made: float
    runs: dict[str, tuple[float, float, float]]  # loss, low and high
    first: NotRequired[dict[str, tuple[float, float, float]]]  # the same, when FIRST_SEEN of the run was known


def forecast_running(sweep: SweepDirectory) -> tuple[list[Forecast], dict[str, str]]:
    """Forecasts of the runs under way, and by run id why there is none.

    Held-out losses are few in a run, so the law is one of smoothed training losses; how far held-out losses lie from
    these at the end is learned from the runs that are done.
    """
    from ... import fit

    under_way, last, planned = dict[str, RunConfig](), dict[str, float](), dict[str, list[float]]()
    for run in sweep.runs():
        state = run.state().state
        summary = run.summary() if state == "done" else None
        if summary is not None and "val_loss" not in summary:
            continue
        if (summary is not None and len(last) < TEACHERS) or (state not in ("done", "planned") and run.last_metrics()):
            config = run.config()
            rate = config.optimizer.learning_rate
            planned[run.run_id] = [rate * learning_rate_factor(config, step) for step in range(config.steps)]
            if summary is not None:
                last[run.run_id] = summary["val_loss"]
            else:
                under_way[run.run_id] = config
    if not under_way:
        return [], {}
    curves = sweep_curves(sweep, planned).dropna(subset=["loss"])
    trained = curves.groupby("run_id")["loss"].last()
    apart = [math.log(loss / trained[name]) for name, loss in last.items() if name in trained]
    if len(apart) < LEAST:
        return [], dict.fromkeys(under_way, f"{len(apart)} runs are done; it learns from {LEAST} or more")
    shift, scatter = statistics.mean(apart), QUANTILE * statistics.stdev(apart)
    found = fit.forecast_final(curves.drop(columns="val_loss"), planned, LEVEL)
    forecasts, without = [], {}
    for run_id, config in under_way.items():
        if run_id not in found.index:
            without[run_id] = "its last step is taken"
            continue
        row: Any = found.loc[run_id]
        if row["reason"]:
            without[run_id] = str(row["reason"])
            continue
        loss = float(row["loss"]) * math.exp(shift)
        factor = math.exp(math.hypot(math.log(row["high"] / row["loss"]), scatter))
        seen = float(row["seen"])
        forecasts.append(Forecast(size_of(config), config.D, loss, loss / factor, loss * factor, run_id, seen))
    return forecasts, without


def of_late(sweep: SweepDirectory, now: float) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Loss, low and high of the runs under way, by run id, as of the last minute; kept in forecast.json. And what is to
    be said of the runs whose forecast has left the interval of their first one: often the earliest sign of a fault.
    """
    path = sweep.path / "forecast.json"
    kept = read_json(path, Latest)
    if kept is None or not 0 <= now - kept["made"] < FRESH_SECONDS:
        with suppress(UserError, ArithmeticError, LookupError, TypeError, ValueError):  # of files that are damaged
            found = forecast_running(sweep)[0]
            told = {str(one.run_id): (one.loss, one.low, one.high) for one in found}
            sure = {str(one.run_id) for one in found if one.seen >= FIRST_SEEN}
            first = {run: own for run, own in told.items() if run in sure} | ((kept or {}).get("first") or {})
            kept = {"made": now, "runs": told, "first": {run: first[run] for run in sure}}
            with suppress(OSError):  # of somebody else's sweep, or a full disk
                write_json(path, kept, flush=False)
    if kept is None:
        return {}, {}
    left = {
        run: f"its forecast left the {low:.3f} to {high:.3f} of its first one"
        for run, (_, low, high) in (kept.get("first") or {}).items()
        if run in kept["runs"] and not low <= kept["runs"][run][0] <= high
    }
    return {run: list(own) for run, own in kept["runs"].items()}, left


def size_of(config: RunConfig) -> int:
    return count_parameters(config.model).N_active


def as_date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
