"""Show the state of a sweep and of each run, as a table or JSON."""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...train.errors import UserError, counted
from ...train.files import read_json
from ..config import ClusterConfig, cluster_of
from ..results import accounting
from ..runs.attempts import RETRIED, Policy, decide
from ..runs.directory import FIT_FAILURE, OPEN, RunDirectory, SweepDirectory, now_on
from ..runs.forms import JobShape
from ..runs.journal import STATES, Started
from ..runs.lease import sign_age
from ..runs.membership import members
from ..terminal import console, describe_seconds, printable, short

Row = dict[str, Any]
PERIOD_SECONDS = 2.0  # between two updates of --watch
ROWS = 60  # most rows in a file or a pipe
# Runs that need attention first.
ORDER = ("running", "failed", "diverged", "preempted", "cancelled", "queued", "planned", "done")
FOLDED = ("done", "planned", "queued")  # if not all rows fit, these are counted instead of shown, in this order
STYLES = {"failed": "red", "diverged": "red", "running": "cyan", "preempted": "yellow", "done": "green"}
NO_KEEPER = "this sweep has no keeper job in SLURM's queue, so nothing restarts its workers"
BRING_BACK = "isoflop retry submits new keepers"
COLUMNS = ("run", "state", "N", "D", "step", "loss", "forecast", "tok/s", "MFU", "ETA", "try", "where", "note")
NOTE = 30  # width of the note column in a narrow terminal
# Columns that a narrow terminal leaves out, in this order.
LEAST_FIRST = ("try", "MFU", "where", "D", "N", "tok/s", "ETA", "forecast", "loss", "step")


def sweep_status(sweep: SweepDirectory) -> dict[str, Any]:
    """Return the state of a sweep and its runs (the `--json` of `isoflop status`)."""
    cluster = cluster_of(sweep.settings())
    rows = [_read(sweep.run(planned["run_id"]), planned) for planned in _planned(sweep)]
    now, policy = now_on(sweep.path), Policy.of(cluster)
    _add_life(sweep, rows, policy, now)
    _add_costs(rows, cluster)
    _add_forecasts(sweep, rows, now)
    spent = sum(row["retries"] for row in rows)
    for row in rows:
        recent = row["history"][len(row["history"]) - row["recent"] :]
        row["again"] = row["state"] == "failed" and decide(recent, policy, spent, now).again
    unattended = _add_waits(sweep, rows)
    counts = Counter(row["state"] for row in rows)
    report, original = sweep.path / "fit" / "report.html", sweep.copied_from()
    return {
        "sweep": sweep.path.name,
        "states": {state: counts[state] for state in STATES if counts[state]},
        "gpu_hours": sum(row["gpu_hours"] for row in rows),
        "core_hours": sum(row["core_hours"] for row in rows),
        "retries": spent,
        "eta_seconds": sweep_eta(rows),
        "slowdown": accounting.slowdown(rows),
        "unattended": unattended,
        "copy_of": str(original.path) if original is not None else None,
        "runs": rows,
        "report": str(report) if report.exists() else None,
        "fit_failure": fit_failure(sweep),
    }


def fit_failure(sweep: SweepDirectory) -> str | None:
    """Return why the last fit failed, or None if it did not."""
    if (recorded := read_json(sweep.path / FIT_FAILURE)) is not None:
        return str(recorded.get("reason"))
    memory, law = read_json(sweep.path / "jobs" / "keeper.json") or {}, sweep.path / "fit" / "law.json"
    tried = memory.get("fits")
    if not (memory.get("over") is True and isinstance(tried, dict)):
        return None
    newest = _finite(tried.get("newest")) or 0.0
    lost = not law.exists() or law.stat().st_mtime < newest
    return f"{tried.get('tries')} fit jobs ended without a law; see their logs in jobs/" if lost else None


def _planned(sweep: SweepDirectory) -> list[Row]:
    """Return a row for each run in plan.json, then for each added since."""
    rows: list[Row] = sweep.plan()["runs"]
    if not (sweep.path / "added.json").exists():
        return rows
    from ...train.flops import count_parameters

    planned_ids, added = {planned["run_id"] for planned in rows}, []
    for run in members(sweep):
        if run.run_id not in planned_ids:
            config = run.config()
            size = {"N_total": count_parameters(config.model).N_total, "D": config.D, "steps": config.steps}
            added.append({"run_id": run.run_id, "name": config.name or run.run_id, **size})
    return rows + added


def _read(run: RunDirectory, planned: Mapping[str, Any]) -> Row:
    files = set(os.listdir(run.path)) if run.path.exists() else set()
    record = run.record()
    state = record.state
    last = run.last_metrics() if "metrics.jsonl" in files else {}
    summary = run.summary() if state.state == "done" else None
    history, recent = record.attempts, record.recent
    return {
        "run_id": run.run_id,
        "name": planned["name"],
        **vars(state),
        "retries": sum(attempt.cause in RETRIED for attempt in recent[:-1]),
        "mesh": planned.get("mesh", ""),
        "parent": planned.get("parent"),
        "N_total": planned["N_total"],
        "D": planned["D"],
        "step": (summary or last).get("step", 0),
        "steps": planned["steps"],
        "loss": _finite((summary or last).get("val_loss" if summary else "train_loss")),
        "tokens_per_s": _finite(last.get("tokens_per_s")),
        "mfu": _finite(last.get("mfu")),
        "eta_seconds": None,
        "estimated_seconds": planned.get("estimated_seconds", 0.0),
        "first_step": planned.get("first_step", 0),
        "tokens": last.get("tokens", 0),
        "seconds": sum(attempt.seconds for attempt in history),
        "history": history,
        "open": record.open,
        "recent": len(recent),  # attempts since the last retry by hand
        "shape": planned.get("shape"),
        "scored": summary is not None and (run.path / "eval" / f"step_{summary.get('step')}.json").exists(),
        "cancel_asked": state.state in OPEN and "cancel.json" in files,
    }


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _add_life(sweep: SweepDirectory, rows: Iterable[Row], policy: Policy, now: float) -> None:
    for row in rows:
        row |= {"heartbeat_age": None, "silent": False, "under_way": None}
        start = row.pop("open", None)
        if row["state"] != "running":
            continue
        run = sweep.run(row["run_id"])
        age = row["heartbeat_age"] = sign_age(run, now)
        row["silent"] = age is None or age > policy.silence_seconds
        start = start or Started(at=now, attempt=row["attempt"])
        seen = start.at if age is None else now - age
        about = {"share": start.share, "host": start.host, "job_id": start.job_id}
        row["under_way"] = {"began": start.at, "ended": max(start.at, seen if row["silent"] else now), **about}
        rate = row["tokens_per_s"]
        row["eta_seconds"] = max(0, row["D"] - row["tokens"]) / rate if rate and not row["silent"] else None


def _add_costs(rows: Iterable[Row], cluster: ClusterConfig) -> None:
    settings = asdict(cluster)
    for row in rows:
        row |= {"gpu_hours": 0.0, "core_hours": 0.0}
        if shape := row["shape"]:
            paid = sum(attempt.paid for attempt in row["history"])
            if current := row["under_way"]:
                paid += (current["ended"] - current["began"]) * current["share"]
            hours = paid * accounting.devices(shape, settings) / 3600
            row["gpu_hours" if shape["gpus"] else "core_hours"] = hours


def _add_forecasts(sweep: SweepDirectory, rows: Iterable[Row], now: float) -> None:
    """Set in each row `forecast`, [final loss, low, high], and `left_band`, a warning; None for runs not running."""
    forecasts, outside = dict[str, list[float]](), dict[str, str]()
    if any(row["state"] == "running" and row["step"] for row in rows):
        from ..results.forecast import latest_forecasts

        forecasts, outside = latest_forecasts(sweep, now)
    for row in rows:
        is_running = row["state"] == "running"
        row["forecast"] = forecasts.get(row["run_id"]) if is_running else None
        row["left_band"] = outside.get(row["run_id"]) if is_running else None


def _add_waits(sweep: SweepDirectory, rows: Iterable[Row]) -> bool:
    """Set `waits` (SLURM's reason, or None) and `suspended` in each row. Returns True if keeper jobs are missing."""
    for row in rows:
        row |= {"waits": None, "suspended": False}
    if not (sweep.path / "jobs" / "launch.json").exists() or all(row["state"] not in OPEN for row in rows):
        return False
    from ..slurm import jobs as slurm_jobs

    try:
        jobs = slurm_jobs.jobs_of(sweep, patience=0.0)
    except UserError:  # SLURM does not answer, or launch.json is damaged
        return False
    reasons = {job.shape: job.reason for job in jobs if job.waits and job.shape is not None}
    suspended = {job.name for job in jobs if job.suspended}
    for row in rows:
        row["suspended"] = row["state"] == "running" and row["job_id"] in suspended
        if row["state"] in ("queued", "preempted") and row["shape"]:
            row["waits"] = reasons.get(JobShape(**row["shape"]))
    return slurm_jobs.is_unattended(sweep, jobs)


def sweep_eta(rows: Sequence[Row]) -> float | None:
    """Estimate the seconds until the last run ends, if as many run at once as now; None if no run is running.

    The planned seconds of waiting runs are scaled by `accounting.slowdown`.
    """
    unfinished = [row for row in rows if row["state"] in OPEN and not row["cancel_asked"]]
    slowdown, places, waiting = accounting.slowdown(rows), [], []
    for row in unfinished:
        share = (row["steps"] - max(row["step"], row["first_step"])) / max(1, row["steps"] - row["first_step"])
        seconds = share * row["estimated_seconds"] * slowdown
        if row["state"] == "running" and not row["silent"]:
            places.append(row["eta_seconds"] if row["eta_seconds"] is not None else seconds)
        else:
            waiting.append(seconds)
    if not places:
        return None
    heapq.heapify(places)
    for seconds in sorted(waiting, reverse=True):
        heapq.heapreplace(places, places[0] + seconds)
    return max(places)


def show_status(sweep: SweepDirectory, watch: bool = False, as_json: bool = False, everything: bool = False) -> None:
    """Print the status; with `watch`, repeat until all runs are over or Ctrl-C."""
    out, status = console(), sweep_status(sweep)
    with contextlib.ExitStack() as stack:
        live = None
        if watch:
            stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        if watch and out.is_terminal and not as_json:
            from rich.live import Live

            live = stack.enter_context(Live(console=out, auto_refresh=False, vertical_overflow="crop"))
        while True:
            if as_json:  # on one line: indent=1 selects Python's slow encoder, a second for a thousand runs
                print(json.dumps(status, allow_nan=False, default=asdict), flush=True)
            elif live is not None:
                live.update(render_status(status, out, everything), refresh=True)
            else:
                out.print(render_status(status, out, everything))
            if not watch or not any(row["state"] in OPEN or row["again"] for row in status["runs"]):
                return
            time.sleep(PERIOD_SECONDS)
            status = sweep_status(sweep)


def render_status(status: dict[str, Any], out: Console, everything: bool) -> RenderableType:
    """Render the table of runs, reasons for states, and totals; unless `everything`, only rows that fit on screen."""
    room = None if everything else max(10, out.height - 8) if out.is_terminal else ROWS
    shown, hidden = fold_rows(status["runs"], room)
    shown.sort(key=lambda row: ORDER.index(row["state"]))
    counts = ", ".join(f"{count} {state}" for state, count in status["states"].items())
    title, lines = f"{status['sweep']}: {counts}", []
    for (state, reason), runs in _reasons(shown).items():
        named = ", ".join(runs[:3]) + ", …" * (len(runs) > 3)
        single = len(runs) == 1
        lines.append(f"{named} {state}: {reason}" if single else f"{len(runs)} runs {state}: {reason} ({named})")
    if hidden:
        lines.append(f"not shown: {', '.join(f'{n} {state}' for state, n in hidden.items())}; --all shows every run")
    hours, unit = (status["gpu_hours"], "GPU") if status["gpu_hours"] else (status["core_hours"], "core")
    totals = [f"{hours:.3g} {unit}-hours so far"] if hours else []
    if status["retries"]:
        totals.append(counted(status["retries"], "retry", "retries"))
    if status["eta_seconds"] is not None:
        slow = accounting.describe_slowdown(status["slowdown"])
        totals.append(f"the last run ends in about {describe_seconds(status['eta_seconds'])}{slow}")
    lines += [", ".join(totals)] if totals else []
    if status["unattended"]:
        lines.append(f"{NO_KEEPER}; {BRING_BACK}")
    if status["copy_of"]:
        lines.append(f"this is a copy of {status['copy_of']}, and no worker of the original trains the runs here")
    if status.get("fit_failure"):
        lines.append(f"the fit failed: {status['fit_failure']}")
    if status["report"]:
        lines.append(f"report: {status['report']}")
    head = _table(shown, title, out) if shown else Text(title)
    return Group(head, *(Text(line, overflow="fold") for line in lines))


def _table(shown: list[Row], title: str, out: Console) -> Table:
    rows = [_cells(row) for row in shown]
    columns = {name: [printable(row[place]) for row in rows] for place, name in enumerate(COLUMNS)}
    widths = {name: max(map(len, [name, *cells])) for name, cells in columns.items()}
    if not any(columns["forecast"]):
        del widths["forecast"]
    for name in [*(name for name in COLUMNS[3:-1] if not any(columns[name])), *LEAST_FIRST]:
        if sum(widths.values()) + 3 * len(widths) + 1 <= out.width:
            break
        widths.pop(name, None)
        widths["note"] = min(widths["note"], NOTE)
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name, width in widths.items():
        to_left = name in ("run", "state", "where", "note")
        table.add_column(name, justify="left" if to_left else "right", no_wrap=name != "note", max_width=width)
    for row, *texts in zip(shown, *(columns[name] for name in widths), strict=True):
        table.add_row(*map(Text, texts), style=STYLES.get(row["state"]))  # a name may have [brackets]
    return table


def fold_rows(rows: list[Row], room: int | None) -> tuple[list[Row], dict[str, int]]:
    """Return the rows whose lines, with reasons, fit in `room` (None: all), and the number of hidden rows by state.

    Failed and diverged runs get at least half of the room if they need it.
    """
    shown = list(rows)
    for state in FOLDED:
        if room is not None and _height(shown) > room:
            shown = [row for row in shown if row["state"] != state]
    if room is not None and _height(shown) > room:
        wrong = [row for row in shown if row["state"] in ("failed", "diverged")]
        right = [row for row in shown if row not in wrong]
        while wrong and _height(wrong) > max(room // 2, room - _height(right)):
            wrong.pop()
        while right and _height(right) > room - _height(wrong):
            right.pop()
        shown = right + wrong
    counts = Counter(row["state"] for row in rows)
    counts.subtract(row["state"] for row in shown)
    return shown, {state: counts[state] for state in ORDER if counts[state]}


def _height(rows: list[Row]) -> int:
    return len(rows) + len(_reasons(rows))


def _reasons(rows: list[Row]) -> dict[tuple[str, str], list[str]]:
    runs = defaultdict(list)
    for row in rows:
        if row["reason"]:
            runs[row["state"], row["reason"]].append(row["run_id"])
    return runs


def _cells(row: Row) -> list[str]:
    places = (row["host"], row["job_id"], row["mesh"])
    return [
        row["run_id"],
        row["state"],
        short(row["N_total"]),
        short(row["D"]),
        f"{row['step']}/{row['steps']}",
        "" if row["loss"] is None else f"{row['loss']:.4f}",
        "{:.3f} [{:.3f}, {:.3f}]".format(*row["forecast"]) if row["forecast"] else "",
        short(row["tokens_per_s"]) if row["tokens_per_s"] else "",
        "" if row["mfu"] is None else f"{row['mfu']:.1%}",
        "" if row["eta_seconds"] is None else describe_seconds(row["eta_seconds"]),
        str(row["attempt"] or ""),
        " ".join(str(place) for place in places if place) if row["state"] != "planned" else "",
        _note(row),
    ]


def _note(row: Row) -> str:
    age = None if row["heartbeat_age"] is None else describe_seconds(row["heartbeat_age"])
    notes = {
        "suspended by SLURM": row["suspended"],
        "no sign of life" + ("" if age is None else f" for {age}"): row["silent"] and not row["suspended"],
        f"alive {age} ago": age is not None and (row["suspended"] or not row["silent"]),
        str(row["left_band"]): row["left_band"],
        f"waits: {row['waits']}": row["waits"],
        f"retried {row['retries']}x": row["retries"],
        "its attempts are not recorded": row["state"] == "done" and row["attempt"] and not row["history"],
        "will be retried": row["again"],
        "cancel requested": row["cancel_asked"],
    }
    return ", ".join(note for note, holds in notes.items() if holds)
