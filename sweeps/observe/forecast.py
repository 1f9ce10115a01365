"""Final losses before they are known: of runs under way, of one larger run, and a ledger of sealed predictions.

A sealed prediction is SWEEP/forecasts/<digest>.json. Its digest is of everything else in it, and worth as much as its
date: who publishes the digest before the run can prove afterwards what was predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...train.errors import UserError
from ...train.files import read_document, read_json, write_json
from ..results.forecast import LEVEL, Forecast, as_date, size_of
from ..runs.directory import RunDirectory, SweepDirectory
from ..terminal import console, plain_table, say, short

FOLDER, OUTCOME = "forecasts", ".outcome.json"
ALIKE = 0.01  # relative difference of N or D up to which a run is the one that was predicted


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    run_id: str
    N: int
    D: int
    loss: float
    ended: str


def forecast_target(sweep: SweepDirectory, target: str) -> Forecast:
    """Where one run would land: of a run directory or its config.yaml, of N=..,D=.., or of the best N and D of a budget
    in FLOPs. UserError for anything else, and for a run that is done.
    """
    from ... import fit

    run_id, path = None, Path(target)
    if path.name == "config.yaml":
        path = path.parent
    if (path / "config.yaml").is_file():
        run = RunDirectory(path)
        if run.is_done():
            raise UserError(f"--target is {target}, a run that is done; a forecast is of a run whose loss is not known")
        config = run.config()
        run_id, N, D = run.run_id, float(size_of(config)), float(config.D)
    elif "=" in target:
        N, D = _stated_size(target)
    else:
        N, D = _best_size(sweep, target)
    said = fit.forecast(fit.read_table(sweep.path), [N], [D], LEVEL).iloc[0]
    return Forecast(round(N), round(D), float(said["loss"]), float(said["low"]), float(said["high"]), run_id)


def _stated_size(target: str) -> tuple[float, float]:
    try:
        given = {name.strip(): float(value) for name, value in (part.split("=") for part in target.split(","))}
        if set(given) == {"N", "D"} and all(1 <= value < math.inf for value in given.values()):
            return given["N"], given["D"]
    except ValueError:
        pass
    raise UserError(f"--target is {target!r}; give N and D as N=7e8,D=1.4e10, a run directory, or a budget in FLOPs")


def _best_size(sweep: SweepDirectory, target: str) -> tuple[float, float]:
    from ... import fit

    try:
        flops = float(target)
    except ValueError:
        flops = 0.0
    if not 0 < flops < math.inf:
        raise UserError(f"--target is {target!r}, which is no run directory; else give N=7e8,D=1.4e10 or FLOPs")
    if not (law := sweep.path / "fit" / "law.json").exists():
        raise UserError(f"{sweep.path} has no law yet; see `isoflop status {sweep.path}`, or state N=..,D=..")
    best = fit.answer(law, [flops])["optimal"][0]
    return float(best["N"]), float(best["D"])


def seal(sweep: SweepDirectory, forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Dates, hashes and keeps forecasts."""
    sealed = [one.sealed(sweep) for one in forecasts]
    for one in sealed:
        write_json(sweep.path / FOLDER / f"{one.digest[:12]}.json", asdict(one))
    return sealed


def check_run(sweep: SweepDirectory, given: str) -> list[Forecast]:
    """Enters what a run came to beside the sealed forecasts of it; the run is a directory, or one of the sweep's."""
    run = RunDirectory(Path(given)) if Path(given).is_dir() else sweep.run(given)
    if not run.is_done():
        raise UserError(
            f"--check is {given!r}; it must be a run that is done: a run directory, or a run id of the sweep"
        )
    outcome, sealed = _outcome(run), _sealed(sweep)
    own = [one for one in sealed if _is_of(one, outcome)]
    if not own:
        known = ", ".join(f"N {short(one.N)} D {short(one.D)}" for one in sealed) or "none"
        raise UserError(
            f"--check is {given!r} with N {short(outcome.N)} and D {short(outcome.D)}, of which there is no sealed "
            f"forecast; sealed are: {known}"
        )
    for one in own:
        write_json(sweep.path / FOLDER / f"{one.digest[:12]}{OUTCOME}", asdict(outcome))
    return own


def _outcome(run: RunDirectory) -> Outcome:
    summary, ended = run.summary() or {}, as_date(run.state().since)
    return Outcome(run.run_id, summary.get("N_active", summary["N_total"]), summary["D"], summary["val_loss"], ended)


def _is_of(one: Forecast, outcome: Outcome) -> bool:
    if one.run_id is not None:
        return one.run_id == outcome.run_id
    return all(math.isclose(a, b, rel_tol=ALIKE) for a, b in ((one.N, outcome.N), (one.D, outcome.D)))


def _sealed(sweep: SweepDirectory) -> list[Forecast]:
    paths = (sweep.path / FOLDER).glob("*.json")
    found = [read_document(path, Forecast) for path in paths if not path.name.endswith(OUTCOME)]
    return sorted(found, key=lambda one: (one.made, one.digest))


def ledger(sweep: SweepDirectory) -> list[dict[str, Any]]:
    """Every sealed forecast, oldest first, with the loss, the error and `inside` of its run where that is known, and
    `fault`: what makes it no prediction.
    """
    rows = []
    for one in _sealed(sweep):
        outcome = None
        if one.run_id is not None and (run := sweep.run(one.run_id)).is_done():
            outcome = _outcome(run)
        elif (kept := read_json(sweep.path / FOLDER / f"{one.digest[:12]}{OUTCOME}", Outcome)) is not None:
            outcome = Outcome(**kept)
        row = asdict(one) | {"outcome": None, "error": None, "inside": None, "fault": None}
        if one.own_digest() != one.digest:
            row["fault"] = "it was altered after it was sealed"
        elif outcome is not None and outcome.ended <= one.made:
            row["fault"] = "it was sealed when the run had ended"
        elif outcome is not None:
            row |= {"error": one.loss / outcome.loss - 1, "inside": one.low <= outcome.loss <= one.high}
        rows.append(row | {"outcome": None if outcome is None else asdict(outcome)})
    return rows


def print_forecasts(said: dict[str, Any]) -> None:
    """Forecasts of now, then the ledger."""
    if now := said["forecasts"]:
        table = plain_table(
            ("run", "N", "D", "seen", "final loss"), ("run",), f"forecasts, {LEVEL:.0%} intervals of a run"
        )
        for one in now:
            table.add_row(one["run_id"] or "–", short(one["N"]), short(one["D"]), f"{one['seen']:.0%}", _interval(one))
        console().print(table)
    for run_id, reason in said["without"].items():
        say(f"{run_id}: no forecast, for {reason}")
    for one in now:
        if one["digest"]:
            say(f"sealed {one['made']}, SHA-256 {one['digest']}: publish it, and the date is proved")
    if not (rows := said["ledger"]):
        return
    table = plain_table(("sealed", "N", "D", "forecast", "came to", "error", ""), ("sealed", ""), "ledger")
    for row in rows:
        came = "" if row["outcome"] is None else f"{row['outcome']['loss']:.4f}"
        error = "" if row["error"] is None else f"{row['error']:+.2%}"
        held = row["fault"] or {True: "inside", False: "outside", None: ""}[row["inside"]]
        table.add_row(row["made"], short(row["N"]), short(row["D"]), _interval(row), came, error, held)
    console().print(table)
    if judged := [row["inside"] for row in rows if row["inside"] is not None]:
        say(f"{sum(judged)} of {len(judged)} intervals held")


def _interval(one: dict[str, Any]) -> str:
    return f"{one['loss']:.4f} [{one['low']:.4f}, {one['high']:.4f}]"
