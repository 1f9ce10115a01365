"""Run directories become a view of a sweep: states by count, and per run its step, loss, speed, place and reason."""

from __future__ import annotations

import collections
import time
from typing import Any

from rich import box
from rich.table import Table

from .runs import STATES, SweepDirectory
from .terminal import console, describe, short


def sweep_status(sweep: SweepDirectory) -> dict[str, Any]:
    """Everything that the run directories say, as plain values (the `--json` of `isoflop status`)."""
    runs = []
    for planned in sweep.plan()["runs"]:
        run = sweep.run(planned["run_id"])
        state, last, summary = run.state(), run.last_metrics(), run.summary()
        step = last.get("step", 0)
        rate = last.get("tokens_per_s")
        tokens_left = max(0, planned["D"] - last.get("tokens", 0))
        runs.append(
            {
                "run_id": run.run_id,
                "name": planned["name"],
                "state": state.state,
                "reason": state.reason,
                "attempt": state.attempt,
                "host": state.host,
                "mesh": planned.get("mesh", ""),
                "parent": planned.get("parent"),
                "job_id": state.job_id,
                "since": state.since,
                "N_total": planned["N_total"],
                "D": planned["D"],
                "step": step,
                "steps": planned["steps"],
                "loss": summary["val_loss"] if summary and state.state == "done" else last.get("train_loss"),
                "tokens_per_s": rate,
                "mfu": last.get("mfu"),
                "eta_seconds": tokens_left / rate if rate and state.state == "running" else None,
                "scored": summary is not None and (run.path / "eval" / f"step_{summary['step']}.json").exists(),
            }
        )
    counts = collections.Counter(run["state"] for run in runs)
    report = sweep.path / "fit" / "report.html"
    return {
        "sweep": sweep.path.name,
        "states": {state: counts[state] for state in STATES if counts[state]},
        "runs": runs,
        "report": str(report) if report.exists() else None,
    }


def print_status(status: dict[str, Any]) -> None:
    """The status as a table."""
    out = console()
    counts = ", ".join(f"{count} {state}" for state, count in status["states"].items())
    table = Table(title=f"{status['sweep']}: {counts}", title_justify="left", box=box.SIMPLE)
    for column in ("run", "state", "N", "D", "step", "loss", "tok/s", "MFU", "ETA", "where"):
        table.add_column(column, justify="left" if column in ("run", "state", "where") else "right", no_wrap=True)
    for run in status["runs"]:
        table.add_row(*_row(run), style=_STYLE.get(run["state"]))
    out.print(table)
    for run in status["runs"]:
        if run["reason"]:
            out.print(f"{run['run_id']} {run['state']}: {run['reason']}", highlight=False, soft_wrap=True)
    if status["report"]:
        out.print(f"report: {status['report']}", highlight=False, soft_wrap=True)


_STYLE = {"failed": "red", "diverged": "red", "running": "cyan", "preempted": "yellow", "done": "green"}


def _row(run: dict[str, Any]) -> list[str]:
    def say(value: float | None, form: str = "{:.3g}") -> str:
        return "" if value is None else form.format(value)

    places = (run["host"], run["job_id"], run["mesh"])
    where = " ".join(str(place) for place in places if place) if run["state"] != "planned" else ""
    if run["state"] == "running" and run["since"]:
        where += f" ({describe(max(0.0, time.time() - run['since']))})"
    return [
        run["run_id"],
        run["state"],
        short(run["N_total"]),
        short(run["D"]),
        f"{run['step']}/{run['steps']}",
        say(run["loss"], "{:.4f}"),
        short(run["tokens_per_s"]) if run["tokens_per_s"] else "",
        say(run["mfu"], "{:.1%}"),
        describe(run["eta_seconds"]) if run["eta_seconds"] is not None else "",
        where,
    ]
