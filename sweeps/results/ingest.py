"""Write runs of other trainers as a sweep's folder, which the commands read as a finished or running sweep.

ingest.json says of every run where it was read from. Reading a log again replaces what the folder has of its steps, and
keeps steps and runs that the log no longer has.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ... import __version__
from ...train.errors import UserError, counted
from ...train.files import read_document, read_json, read_json_lines, write_atomic, write_json
from ...train.logs.sources import ForeignRun, find_sources, read_runs
from ..runs.directory import HEARTBEAT, INGESTED, SweepDirectory
from ..runs.forms import JobShape, PlannedRun
from ..runs.journal import VIEW, State
from .table import write_curves, write_table

if TYPE_CHECKING:
    import pandas as pd

LAST_SHARE = 0.02  # of the logged steps, whose mean training loss stands for a held-out loss; chosen by hand
SAME = 1e-3  # relative difference up to which two logs have the same losses: text logs print four digits


def ingest(
    paths: Sequence[Path],
    folder: Path,
    columns: Mapping[str, str],
    tokens_per_step: float | None = None,
    patterns: Path | None = None,
) -> tuple[SweepDirectory, list[str]]:
    """Read the logs in `paths` and add their runs to `folder`. Returns the folder, and remarks for the user.

    A log that cannot be read becomes a remark.

    Raises:
        UserError: no log can be read, or the folder is not one that this function made.
    """
    expressions = None if patterns is None else read_document(patterns, dict[str, Any])
    if folder.is_file() or ((folder / "plan.json").exists() and not (folder / INGESTED).exists()):
        raise UserError(f"--to is {folder}, which is a {'file' if folder.is_file() else 'sweep'}; name another folder")
    if folder.is_dir() and not (folder / INGESTED).exists() and any(path.name[0] != "." for path in folder.iterdir()):
        raise UserError(f"--to is {folder}, which has other files; name a new folder, or one that ingest made")
    runs, remarks, problems = list[ForeignRun](), list[str](), list[str]()
    for path in paths:
        try:
            sources = find_sources(path, expressions)
        except UserError as error:
            problems.append(str(error))
            continue
        for source in sources:
            if source.path.resolve().is_relative_to(folder.resolve()):
                continue
            try:
                found = read_runs(source, columns, tokens_per_step)
            except UserError as error:
                problems.append(str(error))
                continue
            for run in found:
                remarks += run.remarks
                if (problem := _missing(run)) is not None:
                    problems.append(problem)
                elif twin := next((other for other in runs if _is_same(run, other)), None):
                    remarks.append(f"{run.source} ({run.name}) is the run of {twin.source}, so it is left out")
                else:
                    runs.append(run)
    if not runs:
        more = f" ({counted(len(problems) - 1, 'more log')} cannot be read either)" if len(problems) > 1 else ""
        raise UserError(f"{problems[0] if problems else 'the sources have no runs outside of --to'}{more}")
    sweep = SweepDirectory(folder)
    with sweep.lock():
        _write(sweep, runs)
    if no_held_out := sum(run.metrics["val_loss"].isna().all() for run in runs):
        which = "no run" if no_held_out == len(runs) else f"{no_held_out} of {counted(len(runs), 'run')}"
        remarks.append(
            f"{which} has a val_loss{'' if no_held_out == len(runs) else ' missing'}, so the loss is the mean of the "
            "last training losses; name a held-out loss with --map val_loss=KEY"
        )
    return sweep, [*problems, *remarks]


def _missing(run: ForeignRun) -> str | None:
    """Return what a run lacks to be a row of a table, with the option that gives it, or None."""
    where = f"{run.source} ({run.name})"
    if "N_total" not in run.facts:
        return f"{where} does not say N; give --map N=KEY or --map N=NUMBER, or put its config.json next to the log"
    if not (run.metrics["tokens"] > 0).any():
        return f"{where} does not say how many tokens a step has; give --tokens-per-step or --map tokens=KEY"
    return None


def _is_same(run: ForeignRun, other: ForeignRun) -> bool:
    """Return whether two logs are of one run, such as event files next to a trainer_state.json."""
    losses = [one.metrics.set_index("step")["train_loss"].dropna() for one in (run, other)]
    common = losses[0].index.intersection(losses[1].index)
    difference = abs(losses[0][common] / losses[1][common] - 1)
    return run.source != other.source and len(common) > 2 and bool((difference < SAME).all())


def _write(sweep: SweepDirectory, runs: Sequence[ForeignRun]) -> None:
    record = read_json(sweep.path / INGESTED) or {"runs": {}}
    write_json(sweep.path / INGESTED, record)  # marks the folder as one of ingest, should this process be killed
    planned = {row.run_id: row for row in sweep.planned_runs()} if (sweep.path / "plan.json").exists() else {}
    for run in runs:
        run_id = hashlib.sha256(f"{run.source.resolve()}\0{run.name}".encode()).hexdigest()[:10]
        metrics = _merged(sweep.run(run_id).path / "metrics.jsonl", run.metrics)
        planned[run_id] = _write_run(sweep, run_id, run, metrics)
        steps = [int(metrics["step"].iloc[place]) for place in (0, -1)]
        about = {"name": run.name, "source": run.source.resolve(), "reader": run.kind, "steps": steps}
        about |= {"rows": len(metrics), "columns": run.columns, "facts": run.facts}
        before = record["runs"].get(run_id, {})
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        about = json.loads(json.dumps(about, default=str))
        record["runs"][run_id] = about | {"read": before["read"] if before | about == before else now}
    plan = {"runs": [asdict(row) for row in planned.values()]}
    write_json(sweep.path / "plan.json", plan | {"total_flops": sum(row.flops_6nd for row in planned.values())})
    settings = {"isoflop_version": __version__, "command": ["isoflop", "ingest"]}
    settings |= {"config": {"grid": {"kind": "points"}, "tracker": {"kind": "none"}, "model": {"vocab_size": 256}}}
    write_atomic(sweep.path / "sweep.yaml", yaml.safe_dump(settings, sort_keys=False))
    write_json(sweep.path / INGESTED, record)
    write_table(sweep, {})
    write_curves(sweep)


def _merged(path: Path, metrics: pd.DataFrame) -> pd.DataFrame:
    """Add the steps that an earlier ingest had, write metrics.jsonl, and return all."""
    import pandas as pd

    if before := read_json_lines(path):
        metrics = metrics.set_index("step").combine_first(pd.DataFrame(before).set_index("step")).reset_index()
    metrics["smoothed_loss"] = metrics["train_loss"]
    rows = ({name: value for name, value in row.items() if value == value} for row in metrics.to_dict("records"))
    whole = ({name: int(row[name]) for name in ("step", "tokens") if name in row} for row in metrics.to_dict("records"))
    write_atomic(path, "".join(json.dumps(row | counts) + "\n" for row, counts in zip(rows, whole, strict=True)))
    return metrics


def _write_run(sweep: SweepDirectory, run_id: str, run: ForeignRun, metrics: pd.DataFrame) -> PlannedRun:
    """Write a run's summary and state, and return its row of the plan."""
    folder, facts = sweep.run(run_id).path, run.facts
    numbers = {name: float(facts[name]) for name in facts if name != "name"}
    N, non_embedding = int(numbers["N_total"]), int(numbers.get("N_non_embedding", 0))
    last, interval = metrics.iloc[-1], metrics["step"].diff().median()
    total = numbers.get("total_steps") or last["step"]
    if "D" in numbers:
        total = numbers["D"] / last["tokens"] * last["step"]
    state = State("done" if last["step"] + (interval if interval > 0 else 0) > total else "running")
    if "diverged" in numbers:
        state = State("diverged", reason=f"its loss is not finite from step {numbers['diverged']:g} on")
    held_out = metrics.dropna(subset=["val_loss", "tokens"])
    trained = metrics.dropna(subset=["train_loss", "tokens"])
    ends = held_out.tail(1) if len(held_out) else trained.tail(max(1, round(LAST_SHARE * len(trained))))
    end, loss = ends.iloc[-1], float(ends["val_loss" if len(held_out) else "train_loss"].mean())
    D = round(end["tokens"] if state.state != "running" else last["tokens"] * total / last["step"])
    flops = float(end["flops"]) if end["flops"] == end["flops"] else 6.0 * N * D
    counts = {"N_total": N, "N_non_embedding": non_embedding, "D": D, "flops_6nd": 6.0 * N * D}
    summary = counts | {"step": int(end["step"]), "flops": flops, "flops_exact": None, "val_loss": loss}
    summary |= {
        "val_loss_se": None,
        "seconds": 0.0,
        "train_loss": float(trained["train_loss"].iloc[-1]) if len(trained) else None,
    }
    modified = run.source.stat().st_mtime
    write_json(folder / "summary.json", summary)
    write_json(folder / VIEW, asdict(state) | {"since": modified})
    (folder / HEARTBEAT).unlink(missing_ok=True)
    if state.state == "running":
        (folder / HEARTBEAT).touch()
        os.utime(folder / HEARTBEAT, (modified, modified))
    return PlannedRun(
        run_id=run_id,
        name=run.name,
        **counts,
        N_kaplan=0,
        flops_exact=flops,
        flops_own=flops,
        budget=None,
        width=0,
        depth=0,
        heads=0,
        steps=max(1, round(total)),
        seed=0,
        sequence_length=max(1, int(numbers.get("sequence_length", 1))),
        precision="",
        shape=JobShape(gpus=0, cpus=0, memory_gb=0.0, time_minutes=0),
        mesh="",
        estimated_seconds=0.0,
    )
