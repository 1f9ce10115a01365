"""Run directories become a view of a sweep: states by count, and per run its step, loss, speed, place and reason.

Special here:
- a directory listing and at most four small files a run, so that a thousand runs are a fraction of a second; under
  `--watch` a run whose directory has not changed is not read again;
- "now" is the file system's clock, as a heartbeat's is: the clock of whoever looks may be minutes off;
- hours and retries are those of the books (`accounting`), and of the attempts that are under way;
- SLURM only explains. It is asked once, for why jobs wait, and only about a sweep that went to SLURM.
"""

from __future__ import annotations

import collections
import heapq
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...train.errors import UserError
from ...train.files import read_json
from ..config import ClusterConfig, cluster_of
from ..results import accounting
from ..runs import attempts
from ..runs.attempts import Attempt, Policy
from ..runs.directory import OPEN, STATES, RunDirectory, SweepDirectory, now_on, yaml_or_empty
from ..slurm import commands as slurm

Row = dict[str, Any]
SQUEUE_SECONDS = 5.0  # that a look waits for an explanation
# What every version's plan says of a run, and the commands here read.
PLANNED = ("run_id", "name", "N_total", "D", "steps", "shape", "estimated_seconds")


def open_sweep(path: Path | str) -> SweepDirectory:
    """An existing sweep whose plan this version can read.

    Raises:
        UserError: the folder is no sweep, or is one of another version.
    """
    sweep = SweepDirectory.open(path)
    if absent := lacking(sweep.plan()):
        from ... import __version__

        wrote = yaml_or_empty(sweep.path / "sweep.yaml").get("isoflop_version", "an unknown version")
        raise UserError(
            f"{sweep.path / 'plan.json'} lacks {absent}, for isoflop {wrote} wrote it and this is {__version__}; "
            "use the version that wrote it, or sweep into another folder"
        )
    return sweep


def lacking(plan: Mapping[str, Any]) -> str | None:
    """A field that a run of a plan lacks, as where another version wrote it; None where all are there."""
    for planned in plan["runs"]:
        for name in PLANNED:
            if not isinstance(planned, dict) or name not in planned:
                return name
    return None


def sweep_status(sweep: SweepDirectory, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything that the run directories say, as plain values (the `--json` of `isoflop status`).

    Args:
        sweep: the sweep.
        before: an earlier status of it; what ended then and has not been touched since is not read again.
    """
    plan, cluster = sweep.plan(), cluster_of(sweep.settings())
    known = {row["run_id"]: row for row in (before or {}).get("runs", []) if row["state"] not in OPEN}
    rows = []
    for planned in [*plan["runs"], *_added(sweep, plan)]:
        run = sweep.run(planned["run_id"])
        row, changed = known.get(run.run_id), _changed(run)
        if row is None or row["changed"] != changed:
            row = _read(run, planned, changed)
        rows.append(row)
    now = now_on(sweep.path)
    _add_life(sweep, rows, Policy.of(cluster), now)
    _add_costs(rows, cluster)
    _add_again(rows, Policy.of(cluster), now)
    _add_waits(sweep, rows)
    counts = collections.Counter(row["state"] for row in rows)
    report = sweep.path / "fit" / "report.html"
    return {
        "sweep": sweep.path.name,
        "states": {state: counts[state] for state in STATES if counts[state]},
        "gpu_hours": sum(row["gpu_hours"] for row in rows),
        "core_hours": sum(row["core_hours"] for row in rows),
        "retries": sum(row["retries"] for row in rows),
        "eta_seconds": sweep_eta(rows),
        "runs": rows,
        "report": str(report) if report.exists() else None,
    }


def _added(sweep: SweepDirectory, plan: Mapping[str, Any]) -> list[Row]:
    """What the next plan will say of the runs that were added since this one was made."""
    if not (sweep.path / "added.json").exists():
        return []
    from ...train.flops import count_parameters
    from ..runs.membership import members

    known = {planned["run_id"] for planned in plan["runs"]}
    rows = []
    for run in members(sweep):
        if run.run_id not in known:
            config = run.config()
            size = count_parameters(config.model).N_total
            name = config.name or run.run_id
            rows.append({"run_id": run.run_id, "name": name, "N_total": size, "D": config.D, "steps": config.steps})
    return rows


def _changed(run: RunDirectory) -> int:
    """When something in a run's directory was last made, replaced or removed, as its state is; 0: there is none."""
    try:
        return os.stat(run.path).st_mtime_ns
    except OSError:
        return 0


def _read(run: RunDirectory, planned: Mapping[str, Any], changed: int) -> Row:
    try:
        there = {entry.name for entry in os.scandir(run.path)}
    except OSError:
        there = set()
    state = run.state()
    last = run.last_metrics() if "metrics.jsonl" in there else {}
    summary = run.summary() if state.state == "done" else None
    history = attempts.read(run) if attempts.LINES in there else []
    recent = attempts.current(run) if any(start.cause != "done" for start in history) else []
    return {
        "run_id": run.run_id,
        "name": planned["name"],
        "state": state.state,
        "reason": state.reason,
        "attempt": state.attempt,
        "retries": sum(start.cause in attempts.RETRIED for start in recent[:-1]),
        "host": state.host,
        "mesh": planned.get("mesh", ""),
        "parent": planned.get("parent"),
        "job_id": state.job_id,
        "since": state.since,
        "N_total": planned["N_total"],
        "D": planned["D"],
        "step": summary["step"] if summary else last.get("step", 0),
        "steps": planned["steps"],
        "loss": _finite((summary or last).get("val_loss" if summary else "train_loss")),
        "tokens_per_s": _finite(last.get("tokens_per_s")),
        "mfu": _finite(last.get("mfu")),
        "eta_seconds": None,
        "estimated_seconds": planned.get("estimated_seconds", 0.0),
        "first_step": planned.get("first_step", 0),
        "tokens": last.get("tokens", 0),
        "seconds": sum(start.seconds for start in history),
        "history": [dict(vars(start)) for start in history],
        "recent": len(recent),  # of these, since somebody asked for a retry by hand
        "shape": planned.get("shape"),
        "scored": summary is not None and (run.path / "eval" / f"step_{summary['step']}.json").exists(),
        "cancel_asked": state.state in OPEN and "cancel.json" in there,
        "changed": changed,
    }


def _finite(value: Any) -> float | None:
    """A number; a loss that is none, as of a run that diverged, has no place in JSON."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _add_life(sweep: SweepDirectory, rows: Iterable[Row], policy: Policy, now: float) -> None:
    """How long ago each running run has shown life, when it began and was last seen, and when it will end."""
    limit = policy.silence_seconds
    for row in rows:
        row |= {"heartbeat_age": None, "silent": False, "under_way": None}
        if row["state"] != "running":
            continue
        run = sweep.run(row["run_id"])
        age = row["heartbeat_age"] = attempts.sign_age(run, now)
        row["silent"] = age is None or age > limit
        begun = read_json(run.path / attempts.UNDER_WAY) or {}
        began = begun.get("began", now)
        seen = began if age is None else now - age
        row["under_way"] = {
            "began": began, "ended": max(began, seen if row["silent"] else now), "share": begun.get("share", 1.0),
            "host": begun.get("host"), "job_id": begun.get("job_id"),
        }  # fmt: skip
        rate = row["tokens_per_s"]
        row["eta_seconds"] = max(0, row["D"] - row["tokens"]) / rate if rate and not row["silent"] else None


def _add_costs(rows: Iterable[Row], cluster: ClusterConfig) -> None:
    """What each run has cost so far: GPU-hours, or core-hours where it has no GPU."""
    paid = accounting.paid_seconds({row["run_id"]: [*_attempts(row), *_under_way(row)] for row in rows})
    for row in rows:
        shape = row["shape"]
        hours = sum(paid[row["run_id"]]) * accounting.devices(shape, vars(cluster)) / 3600 if shape else 0.0
        on_gpu = bool(shape and shape["gpus"])
        row |= {"gpu_hours": hours if on_gpu else 0.0, "core_hours": 0.0 if on_gpu else hours}


def _attempts(row: Row) -> list[Attempt]:
    """Those that have ended."""
    return [Attempt(**start) for start in row["history"]]


def _under_way(row: Row) -> list[Attempt]:
    """The one that has not, as far as the books ask."""
    if (begun := row["under_way"]) is None:
        return []
    seconds = begun["ended"] - begun["began"]
    unknown: Row = {
        "reason": None,
        **dict.fromkeys(("first_step", "last_step", "saved_step", "flops", "flops_wasted"), 0),
    }
    return [Attempt(attempt=row["attempt"], seconds=seconds, cause="killed", **begun, **unknown)]


def _add_again(rows: Iterable[Row], policy: Policy, now: float) -> None:
    """Whether each run that failed is tried again."""
    spent = sum(row["retries"] for row in rows)
    for row in rows:
        recent = _attempts(row)[len(row["history"]) - row["recent"] :]
        row["again"] = row["state"] == "failed" and attempts.decide(recent, policy, spent, now).again


def _add_waits(sweep: SweepDirectory, rows: Iterable[Row]) -> None:
    """Why each queued run waits, in SLURM's words, where SLURM is there and says."""
    for row in rows:
        row["waits"] = None
    waiting = [row for row in rows if row["state"] in ("queued", "preempted") and row["job_id"]]
    if waiting and (sweep.path / "jobs" / "slurm.json").exists():
        owner = str(os.stat(sweep.path / "jobs" / "slurm.json").st_uid)
        answer = slurm.ask("squeue", "-h", "-r", "-u", owner, "-o", "%i|%r", timeout=SQUEUE_SECONDS)
        reasons = dict(line.split("|", 1) for line in answer.stdout.splitlines() if not line.endswith("|None"))
        for row in waiting:
            row["waits"] = reasons.get(row["job_id"])


def sweep_eta(rows: Iterable[Row]) -> float | None:
    """Seconds until the last run has ended, at as many side by side as train now; None where none does.

    A run that trains goes on at its own speed. What waits takes its estimate, corrected by how wrong the estimates of
    the runs that are done have been.
    """
    left = [row for row in rows if row["state"] in OPEN and not row["cancel_asked"]]
    done = [row for row in rows if row["state"] == "done" and row["seconds"] and row["estimated_seconds"]]
    estimated = sum(row["estimated_seconds"] for row in done)
    wrong = sum(row["seconds"] for row in done) / estimated if estimated else 1.0
    places, waiting = [], []
    for row in left:
        share = (row["steps"] - max(row["step"], row["first_step"])) / max(1, row["steps"] - row["first_step"])
        seconds = share * row["estimated_seconds"] * wrong
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
