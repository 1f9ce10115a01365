"""What a terminal shows before and while runs train: the plan; a bar per run with its loss; the ETA of the whole.

Without a terminal the bars become a plain line per run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from ...train.errors import counted
from ..config import ClusterConfig
from ..plan.sweep_plan import Plan, makespan
from ..runs import attempts
from ..runs.directory import ENDS, RunDirectory, SweepDirectory
from ..runs.forms import JobShape
from ..runs.queue import Unit
from ..slurm.placement import batches, split, workers_for
from ..terminal import console, describe_seconds, plain_table, short

MOST_ROWS, FIRST_ROWS, LAST_ROWS = 40, 20, 5  # of a plan: up to so many all are shown, else the first and the last


def print_plan(plan: Plan, cluster: ClusterConfig, starts: Mapping[JobShape, str] | None = None) -> None:
    """The runs, of many the longest and the shortest, then what all cost; `starts`: when SLURM would start a shape."""
    where = "this machine" if cluster.kind == "local" else "this partition"
    if plan.measured_runs:
        source = f"times are estimated from {plan.measured_runs} runs that were measured on {where}"
    else:
        source = f"times are estimated from assumed rates; runs of this kind have not been measured on {where} yet"
    out = console()
    out.print(_table_of(plan))
    for line in [_cost(plan, cluster), source, *_jobs(plan, cluster, starts or {})]:
        out.print(line, highlight=False, soft_wrap=True)


def _table_of(plan: Plan) -> Table:
    columns = ("run", "N_total", "D", "C exact", "D/N", "shape", "steps", "time")
    table = plain_table(columns, ("run",), f"{len(plan.runs)} runs")
    refined = any(run.recipe for run in plan.runs)
    mixed = any(run.N_active != run.N_total for run in plan.runs)
    optional = {
        "N_active": {run.run_id: short(run.N_active or run.N_total) for run in plan.runs if mixed},
        "variant": {run.run_id: run.variant for run in plan.runs if run.variant},
        "recipe": {run.run_id: run.recipe or "raw" for run in plan.runs if refined},
        "ranks": {run.run_id: run.mesh + _on_nodes(run.shape) for run in plan.runs if run.mesh},
        "branches from": {run.run_id: f"{run.parent} at {run.first_step:,}" for run in plan.runs if run.parent},
    }
    more = {name: cells for name, cells in optional.items() if cells}
    for name in more:
        table.add_column(name, no_wrap=True)
    folded = len(plan.runs) > MOST_ROWS
    for number, run in enumerate(plan.runs):
        if folded and FIRST_ROWS <= number < len(plan.runs) - LAST_ROWS:
            if number == FIRST_ROWS:
                table.add_row(f"… {len(plan.runs) - FIRST_ROWS - LAST_ROWS} more …")
            continue
        table.add_row(
            run.run_id,
            short(run.N_total),
            short(run.D),
            f"{run.flops_exact:.2e}",
            f"{run.D / (run.N_active or run.N_total):.0f}",
            f"{run.width}x{run.depth}",
            f"{run.steps:,}",
            describe_seconds(run.estimated_seconds),
            *(cells.get(run.run_id, "") for cells in more.values()),
        )
    return table


def _cost(plan: Plan, cluster: ClusterConfig) -> str:
    cost = f"total {plan.total_flops:.3g} FLOPs (exact)"
    if plan.total_flops < plan.separate_flops:
        cost += f", which is {plan.total_flops / plan.separate_flops:.0%} of the runs' own,"
    cost += f" about {describe_seconds(plan.estimated_seconds)} of training"
    cost += f" with {plan.jobs_at_once} at a time on {cluster.kind}"
    cost += f", {plan.gpu_hours:.3g} GPU-hours" if cluster.gpus_per_job else f", {plan.core_hours:.3g} core-hours"
    if plan.dollars is not None:
        cost += f", ${plan.dollars:,.2f}"
    return cost


def _jobs(plan: Plan, cluster: ClusterConfig, starts: Mapping[JobShape, str]) -> list[str]:
    if cluster.kind != "slurm":
        return []
    planned = {run.run_id: run for run in plan.runs}
    queued, tasks = split([Unit((run.run_id,)) for run in plan.runs], planned, cluster)
    workers = sum(workers_for(batch, planned, cluster) for batch in batches(queued, planned, {}, {}))
    said = []
    if tasks:
        said.append(f"{len(tasks)} array task{'s' * (len(tasks) > 1)}")
    if queued:
        said.append(f"{workers} worker{'s' * (workers > 1)} for a queue of {len(queued)} shorter ones")
    lines = [f"jobs: {' and '.join(said)}"]
    lines += [f"a job of {_shape(shape)} would start about {start}, says SLURM" for shape, start in starts.items()]
    return lines


def _shape(shape: JobShape) -> str:
    gpus = f"{shape.gpus} GPU{'s' * (shape.gpus > 1)}, " if shape.gpus else ""
    each = f"{gpus}{shape.cpus} core{'s' * (shape.cpus > 1)} and {shape.memory_gb:g} GB"
    return each if shape.ranks == 1 else f"{shape.ranks} ranks{_on_nodes(shape)}, each with {each}"


def _on_nodes(shape: JobShape) -> str:
    return f" on {shape.nodes} nodes" if shape.nodes > 1 else ""


class Display:
    """Live view of a local sweep; a context manager around the pool's ticks."""

    def __init__(
        self, plan: Plan, sweep: SweepDirectory, waiting: list[RunDirectory], scoring: list[RunDirectory] | None = None
    ) -> None:
        self._sweep, self._jobs = sweep, plan.jobs_at_once
        self._planned = {run.run_id: run for run in plan.runs}
        self._labels = {run.run_id: f"{run.run_id} N {short(run.N_total):>5} D {short(run.D):>5}" for run in plan.runs}
        self._left = {run.run_id: self._planned[run.run_id].estimated_seconds for run in waiting}
        self._total, self._started = len(waiting), time.monotonic()
        self._estimate = sum(self._left.values())
        # An attempt beyond the one that a run now begins is a retry.
        self._attempt = {run.run_id: run.state().attempt + 1 for run in waiting}
        self._open: set[str] = set()  # runs that were said to have ended, and are to be tried again
        self._scoring = scoring or []
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[note]}"))
        terminal = Console(stderr=True)
        self._live = Progress(*columns, console=terminal, transient=True, disable=not sys.stderr.isatty())
        total = self._estimate if self._total else len(self._scoring)
        self._all = self._live.add_task("all runs" if self._total else "scoring", total=total, note="")
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        self._live.start()
        if self._live.disable and self._scoring:
            print(f"scoring {counted(len(self._scoring), 'checkpoint')}", flush=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def update(self, running: list[str], ended: list[str]) -> None:
        """Called at every tick with the run ids that train and those that have just ended."""
        metrics, progress = {name: self._sweep.run(name).last_metrics() for name in running}, dict[str, float]()
        for name, record in metrics.items():
            run = self._planned[name]
            progress[name] = max(0.0, float(record.get("step", 0)) - run.first_step) / (run.steps - run.first_step)
            self._say_retried(name)
        for name in [*ended, *(name for name in sorted(self._open) if name not in ended)]:
            if name in running or self._sweep.run(name).state().state not in ENDS:
                self._open.add(name)
                continue
            self._open.discard(name)
            self._left.pop(name, None)
            self._say(self._ended_line(name))
            if name in self._bars:
                self._live.remove_task(self._bars.pop(name))
        if self._live.disable:
            return
        left = sum(seconds * (1 - progress.get(name, 0.0)) for name, seconds in self._left.items())
        done = self._total - len(self._left)
        self._live.update(
            self._all,
            completed=self._estimate - left,
            note=f"{done}/{self._total} done · {describe_seconds(self._eta(left))} left",
        )
        for name, record in metrics.items():
            note = "starting"
            if record:
                note = f"loss {record['smoothed_loss']:.3f} · {short(record['tokens_per_s'])} tok/s"
            if name not in self._bars:
                self._bars[name] = self._live.add_task(self._labels[name], total=1.0, note=note)
            self._live.update(self._bars[name], completed=progress[name], note=note)

    def update_scores(self) -> None:
        """Called at every tick while checkpoints are scored."""
        scored = sum((run.path / "eval").is_dir() for run in self._scoring)
        self._live.update(self._all, completed=scored, note=f"{scored}/{len(self._scoring)} checkpoints")

    def _say_retried(self, name: str) -> None:
        """A line where a run that trains has ended since it was last seen, and is tried again."""
        run = self._sweep.run(name)
        number = run.state().attempt
        if number <= self._attempt.get(name, number):
            return
        self._attempt[name] = number
        if name not in self._left:  # it had been said to be over
            self._left[name] = self._planned[name].estimated_seconds
            self._open.add(name)
        before = next((each for each in reversed(attempts.read(run)) if each.attempt < number), None)
        if before is not None:
            self._say(f"run {name}: attempt {before.attempt} ended ({before.cause}: {before.reason}); trying again")

    def _eta(self, left: float) -> float:
        """Planned seconds that are left, corrected by how the plan has held so far."""
        spent = time.monotonic() - self._started
        done = self._estimate - left
        pace = spent * self._jobs / done if done > 0.02 * self._estimate else 1.0
        whole = makespan(sorted(self._left.values(), reverse=True), self._jobs)
        return whole * pace * left / max(sum(self._left.values()), 1e-9)

    def _ended_line(self, name: str) -> str:
        run = self._sweep.run(name)
        state, summary = run.state(), run.summary()
        done = self._total - len(self._left)
        head = f"[{done:>{len(str(self._total))}}/{self._total}] {self._labels[name]}"
        if state.state == "done" and summary is not None:
            eta = describe_seconds(self._eta(sum(self._left.values())))
            return f"{head}  loss {summary['val_loss']:.4f}  {describe_seconds(summary['seconds']):>7}  ETA {eta}"
        return f"{head}  {state}"

    def _say(self, line: str) -> None:
        if self._live.disable:
            print(line, flush=True)
        else:
            self._live.console.print(line, highlight=False, markup=False)
