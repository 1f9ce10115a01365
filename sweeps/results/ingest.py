"""Write runs of other trainers as a sweep's folder, which the commands read as a finished or running sweep.

ingest.json says where each run was read from. Reading a log again keeps the steps and runs that it no longer has.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ...train.errors import UserError, counted
from ...train.files import read_document, read_json, read_json_lines, write_atomic, write_json
from ...train.logs.sources import ForeignRun, find_sources, read_runs
from ..runs.directory import HEARTBEAT, INGESTED, SweepDirectory
from ..runs.forms import JobShape, PlannedRun
from ..runs.journal import VIEW, State
from .table import write_curves, write_table

MOST = 1e18  # parameters or tokens of a run
MOST_ROWS = 10_000  # of a run's metrics, evenly spread, in addition to those with a held-out loss
LAST_SHARE = 0.02  # of the steps, whose mean training loss stands for a missing held-out loss; chosen by hand
QUIET_SECONDS = 600.0  # without a change, after which a log that does not say its steps has probably ended


def ingest(
    paths: Sequence[Path], to: Path, columns: Mapping[str, str], tokens_per_step: float | None, patterns: Path | None
) -> list[str]:
    """Add the runs of the logs in `paths` to the folder `to`; the options are those of `read_runs` and `find_sources`.

    Returns remarks for the user, one for each log that cannot be read. Raises UserError if that is every log, or if
    this function did not make the folder.
    """
    sweep, expressions = SweepDirectory(to), read_document(patterns, dict[str, Any]) if patterns else None
    is_empty = not to.exists() or (to.is_dir() and all(path.name[0] == "." for path in to.iterdir()))
    if not (is_empty or sweep.is_ingested):
        raise UserError(f"--to is {to}, which has other content; name a new folder, or one that ingest made")
    problems, runs = list[str](), list[ForeignRun]()

    def tried(read: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        try:
            return read(*arguments)
        except UserError as error:
            problems.append(str(error))
            return []

    sources = [source for path in paths for source in tried(find_sources, path, expressions)]
    destination = to.resolve()
    for source in (source for source in sources if not source.path.resolve().is_relative_to(destination)):
        for run in tried(read_runs, source, columns, tokens_per_step):
            where = f"{run.source} ({run.name})"
            if not 1 <= run.facts.get("N_total", 0) < MOST:
                problems.append(f"{where} does not say N; give --map N=KEY or N=NUMBER, or a config.json next to it")
            elif not 1 <= run.metrics["tokens"].max() < MOST:
                problems.append(f"{where} does not say its tokens; give --tokens-per-step or --map tokens=KEY")
            elif twin := next((one for one in runs if _same_run(one, run)), None):
                problems.append(f"{where} is a log of the run in {twin.source} too, left out")
            else:
                runs.append(run)
    if not runs:
        more = f" ({counted(len(problems) - 1, 'more log')} cannot be read either)" if len(problems) > 1 else ""
        raise UserError(f"{problems[0] if problems else f'there is no log outside of {to}'}{more}")
    with sweep.lock():
        _write(sweep, runs)
    endless = [run for run in runs if run.kind != "csv" and not {"D", "total_steps"} & {*run.facts}]
    if growing := sum(time.time() - _modified(run) < QUIET_SECONDS for run in endless):
        which = f"taken as done, but may still grow: {counted(growing, 'log')} of {len(runs)} without a number of steps"
        problems.append(f"{which}; ingest again later, or give --map total_steps=NUMBER")
    if trained := sum(run.metrics["val_loss"].isna().all() for run in runs):
        which = f"{counted(trained, 'run')} of {len(runs)} without val_loss"
        problems.append(f"{which}: the last training losses replace it; name it with --map val_loss=KEY")
    return problems + [remark for run in runs for remark in run.remarks]


def _same_run(one: ForeignRun, other: ForeignRun) -> bool:
    """Return whether logs of different kinds, one in or below the other's folder, have the same training losses."""
    folders = [run.source if run.source.is_dir() else run.source.parent for run in (one, other)]
    if one.kind == other.kind or not any(a.is_relative_to(b) for a, b in (folders, folders[::-1])):
        return False
    both = one.metrics.merge(other.metrics, on="step")[["train_loss_x", "train_loss_y"]].dropna()
    return len(both) > 1 and bool((both["train_loss_x"] / both["train_loss_y"] - 1).abs().max() < 1e-4)  # float32


def _modified(run: ForeignRun) -> float:
    return max(file.stat().st_mtime for file in [run.source, *run.source.glob("*")])


def _write(sweep: SweepDirectory, runs: Sequence[ForeignRun]) -> None:
    read: dict[str, Any] = read_json(sweep.path / INGESTED) or {}
    write_json(sweep.path / INGESTED, read)  # first, so that the folder is known as ingest's after a kill
    plan = {run.run_id: run for run in sweep.planned_runs()} if (sweep.path / "plan.json").exists() else {}
    for run in runs:
        run_id = hashlib.sha256(f"{run.source.resolve()}\0{run.name}".encode()).hexdigest()[:10]
        plan[run_id], steps = _write_run(sweep, run_id, run)
        about: dict[str, Any] = {"name": run.name, "source": str(run.source.resolve()), "reader": run.kind}
        about |= {"steps": steps, "columns": run.columns, "facts": run.facts}
        before, now = read.get(run_id, {}), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        read[run_id] = about | {"read": before["read"] if before | about == before else now}
    write_json(sweep.path / "plan.json", {"runs": [asdict(planned) for planned in plan.values()]})
    # The vocabulary is that of the models which `suggest` proposes.
    config: dict[str, Any] = {"grid": {"kind": "points"}, "tracker": {"kind": "none"}, "model": {"vocab_size": 256}}
    write_atomic(sweep.path / "sweep.yaml", yaml.safe_dump({"command": ["isoflop", "ingest"], "config": config}))
    write_json(sweep.path / INGESTED, read)
    write_table(sweep, {})
    write_curves(sweep)


def _write_run(sweep: SweepDirectory, run_id: str, run: ForeignRun) -> tuple[PlannedRun, list[int]]:
    """Write the files of a run. Returns its row of the plan, and its first and last step."""
    import numpy as np
    import pandas as pd

    folder, facts, metrics = sweep.run(run_id).path, run.facts, run.metrics
    if before := read_json_lines(folder / "metrics.jsonl"):
        metrics = metrics.set_index("step").combine_first(pd.DataFrame(before).set_index("step")).reset_index()
    if len(metrics) > MOST_ROWS:
        spread = np.linspace(0, len(metrics) - 1, MOST_ROWS).round().astype(int)
        metrics = metrics[metrics.index.isin(spread) | metrics["val_loss"].notna()].copy()
    metrics["smoothed_loss"] = metrics["train_loss"]
    lines = [{name: value for name, value in row.items() if value == value} for row in metrics.to_dict("records")]
    lines = [line | {name: int(line[name]) for name in ("step", "tokens") if name in line} for line in lines]
    write_atomic(folder / "metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    last, interval = lines[-1]["step"], metrics["step"].diff().median()
    ends = metrics.dropna(subset=["tokens", "val_loss"]).tail(1)
    loss = "val_loss" if len(ends) else "train_loss"
    if not len(ends):
        ends = metrics.dropna(subset=["tokens", "train_loss"])
        ends = ends.tail(max(1, round(LAST_SHARE * len(ends))))
    N, end = int(facts["N_total"]), ends.iloc[-1]
    per_step = end["tokens"] / max(end["step"], 1)
    total = facts["D"] / per_step if "D" in facts else facts.get("total_steps", last)
    state = State("running" if last + max(0, interval) <= total and last < total else "done")
    if "diverged" in facts:
        state = State("diverged", reason=f"its loss is not finite from step {facts['diverged']:g} on")
    D = round(per_step * total if state.state == "running" else end["tokens"])
    flops = 6.0 * N * D if run.columns.get("flops", "6ND") == "6ND" else float(end["flops"])
    counts = {"N_total": N, "N_non_embedding": int(facts.get("N_non_embedding", 0)), "D": D, "flops_6nd": 6.0 * N * D}
    summary = {"step": int(end["step"]), "flops": flops, "flops_exact": None, "val_loss_se": None, "seconds": 0.0}
    write_json(folder / "summary.json", counts | summary | {"val_loss": float(ends[loss].mean())})
    config: dict[str, Any] = {"data": {"name": run.kind}, "optimizer": {"learning_rate": float(metrics["lr"].max())}}
    write_atomic(folder / "config.yaml", yaml.safe_dump(config))  # what tables show; it is no RunConfig
    modified = _modified(run)
    write_json(folder / VIEW, asdict(state) | {"since": modified})
    (folder / HEARTBEAT).touch()
    os.utime(folder / HEARTBEAT, (modified, modified))
    shape = {"seed": 0, "sequence_length": max(1, int(facts.get("sequence_length", 1))), "precision": "", "mesh": ""}
    zero = dict.fromkeys(("N_kaplan", "width", "depth", "heads", "estimated_seconds"), 0)
    cost = {"flops_exact": flops, "flops_own": flops, "budget": None, "shape": JobShape(0, 0, 0.0, 0)}
    steps = max(1, round(total if state.state == "running" else last))
    planned = PlannedRun(run_id=run_id, name=run.name, steps=steps, **counts, **shape, **zero, **cost)  # type: ignore[arg-type]
    return planned, [lines[0]["step"], last]
