"""Forecast final losses, of running runs and of larger ones, and keep a ledger of sealed forecasts.

A sealed forecast is SWEEP/forecasts/<digest>.json, with a hash of all its other fields.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from ...train.config import canonical_json
from ...train.errors import UserError, counted
from ...train.files import file_sha256, read_document, read_json, write_json
from ...train.flops import count_parameters
from ...train.schedule import learning_rate_factor
from ..runs.directory import RunDirectory, SweepDirectory, now_on
from ..terminal import console, plain_table, say, short
from .table import sweep_curves

LEVEL = 0.95  # of the prediction intervals
TEACHERS, LEAST = 64, 3  # most and fewest finished runs that forecasts are calibrated on
FRESH_SECONDS = 60.0  # age up to which `status` reads forecasts from forecast.json
FIRST_SEEN = 0.1  # share of a run at which its first forecast is kept, to compare later ones with
QUANTILE = 1.96  # of a normal distribution at LEVEL
FOLDER, OUTCOME = "forecasts", ".outcome.json"
ALIKE = 0.01  # relative difference of N or D up to which a run is the one that was predicted


@dataclass(frozen=True)
class Forecast:
    """A predicted final loss with a prediction interval; `seen`: share of the run's steps that it is based on."""

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
    inputs: dict[str, str] | None = None  # SHA-256 of its input files
    digest: str = ""

    def own_digest(self) -> str:
        content = {name: value for name, value in asdict(self).items() if name != "digest"}
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()


class Latest(TypedDict):
    """Content of forecast.json."""

    made: float
    runs: dict[str, tuple[float, float, float]]  # loss, low and high
    first: NotRequired[dict[str, tuple[float, float, float]]]  # the first ones after FIRST_SEEN of the run


@dataclass(frozen=True)
class Outcome:
    run_id: str
    N: int
    D: int
    loss: float
    ended: str


def forecast_running(sweep: SweepDirectory) -> tuple[list[Forecast], dict[str, str]]:
    """Forecast the final losses of running runs. Returns the forecasts, and the reasons for missing ones by run id.

    Smoothed training losses are extrapolated, and multiplied by the mean ratio of held-out to training loss at the end
    of finished runs.
    """
    from ... import fit

    under_way, last, planned = list[str](), dict[str, float](), dict[str, list[float]]()
    plan = {row["run_id"]: row for row in sweep.plan()["runs"]}
    logged = None
    if sweep.is_ingested:  # its runs have no config
        logged = {str(name): rows.dropna(subset=["lr"]) for name, rows in sweep_curves(sweep).groupby("run_id")}
    for run in sweep.runs():
        state = run.state().state
        summary = run.summary() if state == "done" else None
        if summary is not None and "val_loss" not in summary:
            continue
        if (summary is not None and len(last) < TEACHERS) or (state not in ("done", "planned") and run.last_metrics()):
            if logged is None:
                config = run.config()
                factors = (learning_rate_factor(config, step) for step in range(config.steps))
                planned[run.run_id] = [config.optimizer.learning_rate * factor for factor in factors]
            else:
                planned[run.run_id] = _logged_rates(logged, plan, run.run_id)
            if summary is not None:
                last[run.run_id] = summary["val_loss"]
            else:
                under_way.append(run.run_id)
    if not under_way:
        return [], {}
    curves = sweep_curves(sweep, planned).dropna(subset=["loss"])
    trained = curves.groupby("run_id")["loss"].last()
    gaps = [math.log(loss / trained[name]) for name, loss in last.items() if name in trained]
    if len(gaps) < LEAST:
        few = f"{counted(len(gaps), 'run is', 'runs are')} done, and at least {LEAST} are needed"
        return [], dict.fromkeys(under_way, few)
    shift, scatter = statistics.mean(gaps), QUANTILE * statistics.stdev(gaps)
    predicted = fit.forecast_final(curves.drop(columns="val_loss"), planned, LEVEL)
    forecasts, without = [], {}
    for run_id in under_way:
        row: Any = predicted.loc[run_id] if run_id in predicted.index else {"reason": "its last step is done"}
        if row["reason"]:
            without[run_id] = str(row["reason"])
            continue
        loss = float(row["loss"]) * math.exp(shift)
        factor = math.exp(math.hypot(math.log(row["high"] / row["loss"]), scatter))
        N, D = plan[run_id].get("N_active") or plan[run_id]["N_total"], plan[run_id]["D"]
        forecasts.append(Forecast(N, D, loss, loss / factor, loss * factor, run_id, float(row["seen"])))
    return forecasts, without


def _logged_rates(rates: Mapping[str, Any], plan: Mapping[str, Any], run_id: str) -> list[float]:
    """Return the logged rates of an ingested run, after its last step as in the first finished run at that share.

    `rates`: columns step and lr of each run.
    """
    import numpy as np

    steps, own = plan[run_id]["steps"], rates[run_id]
    every = np.arange(1, steps + 1)
    other = next(
        (name for name in rates if len(rates[name]) and rates[name]["step"].max() >= plan[name]["steps"]), None
    )
    if own.empty or other is None:
        return [0.0] * steps  # `forecast_final` says that there is no rate
    shape = np.interp(every / steps, rates[other]["step"] / plan[other]["steps"], rates[other]["lr"])
    later = shape / rates[other]["lr"].max() * own["lr"].max()
    logged = np.interp(every, own["step"], own["lr"])
    return [float(rate) for rate in np.where(every <= own["step"].max(), logged, later)]


def latest_forecasts(sweep: SweepDirectory, now: float) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return forecasts [loss, low, high] at most a minute old, and warnings, both by run id.

    A run gets a warning if its newest forecast is outside the interval of its first one.
    """
    path = sweep.path / "forecast.json"
    latest = read_json(path, Latest)
    if latest is None or not 0 <= now - latest["made"] < FRESH_SECONDS:
        with suppress(UserError, ArithmeticError, LookupError, TypeError, ValueError):  # some file is damaged
            forecasts = forecast_running(sweep)[0]
            newest = {str(forecast.run_id): (forecast.loss, forecast.low, forecast.high) for forecast in forecasts}
            sure = {str(forecast.run_id) for forecast in forecasts if forecast.seen >= FIRST_SEEN}
            first = {run: values for run, values in newest.items() if run in sure} | ((latest or {}).get("first") or {})
            latest = {"made": now, "runs": newest, "first": {run: first[run] for run in sure}}
            with suppress(OSError):  # another user's sweep, or a full disk
                write_json(path, latest, flush=False)
    if latest is None:
        return {}, {}
    notes = {
        run: f"its forecast left the interval {low:.3f} to {high:.3f} of its first one"
        for run, (_, low, high) in (latest.get("first") or {}).items()
        if run in latest["runs"] and not low <= latest["runs"][run][0] <= high
    }
    return {run: list(values) for run, values in latest["runs"].items()}, notes


def forecast_target(sweep: SweepDirectory, target: str) -> Forecast:
    """Forecast the final loss of one run.

    Args:
        target: A run directory or its config.yaml, "N=..,D=..", or a budget in FLOPs, meaning its best N and D.

    Raises:
        UserError: `target` is something else, or a finished run.
    """
    from ... import fit
    from ...fit.approaches.recipes import split

    run_id, path, recipe = None, Path(target), ""
    if path.name == "config.yaml":
        path = path.parent
    if (path / "config.yaml").is_file():
        run = RunDirectory(path)
        if run.is_done():
            raise UserError(f"--target is {target}, a run that is done; give a run that is not")
        config = run.config()
        run_id, N, D = run.run_id, float(count_parameters(config.model).N_active), float(config.D)
        recipe = config.variant or config.quantization.label
    elif "=" in target:
        N, D = _stated_size(target)
    else:
        N, D = _best_size(sweep, target)
    tables = split(fit.read_table(sweep.path))
    if recipe and len(tables) > 1 and recipe not in tables:
        raise UserError(
            f"--target is {target}, a run of {recipe}; {sweep.path} has finished runs of {', '.join(tables)}"
        )
    row = fit.forecast(tables.get(recipe) or next(iter(tables.values())), [N], [D], LEVEL).iloc[0]
    return Forecast(round(N), round(D), float(row["loss"]), float(row["low"]), float(row["high"]), run_id)


def _stated_size(target: str) -> tuple[float, float]:
    with suppress(ValueError):
        sizes = {name.strip(): float(value) for name, value in (part.split("=") for part in target.split(","))}
        if set(sizes) == {"N", "D"} and all(1 <= value < math.inf for value in sizes.values()):
            return sizes["N"], sizes["D"]
    raise UserError(f"--target is {target!r}; give N and D as N=7e8,D=1.4e10, a run directory, or a budget in FLOPs")


def _best_size(sweep: SweepDirectory, target: str) -> tuple[float, float]:
    from ... import fit

    flops = 0.0
    with suppress(ValueError):
        flops = float(target)
    if not 0 < flops < math.inf:
        raise UserError(f"--target is {target!r}; it must be a run directory, N=7e8,D=1.4e10, or a budget in FLOPs")
    if not (law := sweep.path / "fit" / "law.json").exists():
        raise UserError(f"{sweep.path} has no law yet; see `isoflop status {sweep.path}`, or give N=..,D=..")
    best = fit.answer(law, [flops])["optimal"][0]
    return float(best["N"]), float(best["D"])


def seal(sweep: SweepDirectory, forecasts: list[Forecast]) -> list[Forecast]:
    """Save forecasts with date, version, hashes of inputs, and digest. Returns them with these fields."""
    files = [sweep.path / name for name in ("table.csv", "curves.csv")]
    inputs = {path.name: file_sha256(path) for path in files if path.exists()}
    made, sealed = _as_date(now_on(sweep.path)), []
    for forecast in forecasts:
        dated = replace(forecast, made=made, version=version("isoflop"), inputs=inputs)
        sealed.append(replace(dated, digest=dated.own_digest()))
        write_json(sweep.path / FOLDER / f"{sealed[-1].digest[:12]}.json", asdict(sealed[-1]))
    return sealed


def check_run(sweep: SweepDirectory, name: str) -> None:
    """Save a finished run's result next to its sealed (dated) forecasts. `name`: run directory, or run id."""
    run = RunDirectory(Path(name)) if Path(name).is_dir() else sweep.run(name)
    if not run.is_done():
        raise UserError(f"--check is {name!r}; it must be a finished run: a run directory, or a run id of the sweep")
    outcome, sealed = _outcome(run), _sealed(sweep)
    matching = [forecast for forecast in sealed if _is_of(forecast, outcome)]
    if not matching:
        described = ", ".join(f"N {short(forecast.N)} D {short(forecast.D)}" for forecast in sealed) or "none"
        raise UserError(
            f"--check is {name!r} with N {short(outcome.N)} and D {short(outcome.D)}, which has no sealed forecast; "
            f"sealed are: {described}"
        )
    for forecast in matching:
        write_json(sweep.path / FOLDER / f"{forecast.digest[:12]}{OUTCOME}", asdict(outcome))


def _outcome(run: RunDirectory) -> Outcome:
    summary, ended = run.summary() or {}, _as_date(run.state().since)
    return Outcome(run.run_id, summary.get("N_active", summary["N_total"]), summary["D"], summary["val_loss"], ended)


def _is_of(forecast: Forecast, outcome: Outcome) -> bool:
    if forecast.run_id is not None:
        return forecast.run_id == outcome.run_id
    return all(math.isclose(a, b, rel_tol=ALIKE) for a, b in ((forecast.N, outcome.N), (forecast.D, outcome.D)))


def _sealed(sweep: SweepDirectory) -> list[Forecast]:
    paths = (sweep.path / FOLDER).glob("*.json")
    sealed = [read_document(path, Forecast) for path in paths if not path.name.endswith(OUTCOME)]
    return sorted(sealed, key=lambda forecast: (forecast.made, forecast.digest))


def ledger(sweep: SweepDirectory) -> list[dict[str, Any]]:
    """List the sealed forecasts, oldest first, as dicts with four more fields, each None if unknown.

    `outcome`: the run's result; `error`: forecast / loss - 1; `inside`: whether the loss is in the interval; `fault`:
    why the forecast does not count (altered, or sealed after the run had ended).
    """
    rows = []
    for forecast in _sealed(sweep):
        outcome = None
        if forecast.run_id is not None and (run := sweep.run(forecast.run_id)).is_done():
            outcome = _outcome(run)
        elif (saved := read_json(sweep.path / FOLDER / f"{forecast.digest[:12]}{OUTCOME}", Outcome)) is not None:
            outcome = Outcome(**saved)
        row = asdict(forecast) | {"outcome": outcome and asdict(outcome), "error": None, "inside": None, "fault": None}
        if forecast.own_digest() != forecast.digest:
            row["fault"] = "it was altered after it was sealed"
        elif outcome is not None and outcome.ended <= forecast.made:
            row["fault"] = "it was sealed after the run had ended"
        elif outcome is not None:
            row |= {"error": forecast.loss / outcome.loss - 1, "inside": forecast.low <= outcome.loss <= forecast.high}
        rows.append(row)
    return rows


def print_forecasts(result: dict[str, Any]) -> None:
    if not any(result.values()):
        say("no run is under way; forecast a larger one with --target FLOPs, --target N=7e8,D=1.4e10 or --target RUN")
    if forecasts := result["forecasts"]:
        title = f"forecasts, {LEVEL:.0%} intervals of a run"
        table = plain_table(("run", "N", "D", "seen", "final loss"), ("run",), title)
        for forecast in forecasts:
            table.add_row(
                forecast["run_id"] or "–",
                short(forecast["N"]),
                short(forecast["D"]),
                f"{forecast['seen']:.0%}",
                _interval(forecast),
            )
        console().print(table)
    for run_id, reason in result["without"].items():
        say(f"{run_id}: no forecast, because {reason}")
    for forecast in forecasts:
        if forecast["digest"]:
            say(f"sealed {forecast['made']}, SHA-256 {forecast['digest']}: publish this hash to prove the date")
    if not (rows := result["ledger"]):
        return
    table = plain_table(("sealed", "N", "D", "forecast", "result", "error", ""), ("sealed", ""), "ledger")
    for row in rows:
        came = "" if row["outcome"] is None else f"{row['outcome']['loss']:.4f}"
        error = "" if row["error"] is None else f"{row['error']:+.2%}"
        held = row["fault"] or {True: "inside", False: "outside", None: ""}[row["inside"]]
        table.add_row(row["made"], short(row["N"]), short(row["D"]), _interval(row), came, error, held)
    console().print(table)
    if judged := [row["inside"] for row in rows if row["inside"] is not None]:
        say(f"{sum(judged)} of {counted(len(judged), 'interval')} held")


def _interval(forecast: dict[str, Any]) -> str:
    return f"{forecast['loss']:.4f} [{forecast['low']:.4f}, {forecast['high']:.4f}]"


def _as_date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
