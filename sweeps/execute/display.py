"""Print a sweep's plan, and its progress on this machine: a bar per run, or a line per run without a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from ...train.errors import counted
from ..config import ClusterConfig
from ..plan.sweep_plan import Plan, makespan
from ..results.accounting import describe_slowdown, slowdown
from ..runs.directory import ENDS, SweepDirectory
from ..runs.forms import JobShape
from ..terminal import console, describe_seconds, plain_table, short
from .controller import workers_for

MOST_ROWS, FIRST_ROWS, LAST_ROWS = 40, 20, 5  # of a plan: up to so many all are shown, else the first and the last
RECENT = 16  # runs, the last to have started, whose speed calibrates the time left


def print_plan(plan: Plan, cluster: ClusterConfig, starts: Mapping[JobShape, str] | None = None) -> None:
    """Print planned runs, shortened if many, their cost, and `starts`: SLURM's expected start by job shape."""
    where = "this machine" if cluster.kind == "local" else "this partition"
    if plan.measured_runs:
        source = f"times are estimated from {counted(plan.measured_runs, 'run')} measured on {where}"
    else:
        source = f"times are estimated from assumed rates; runs of this kind have not been measured on {where} yet"
    out = console()
    out.print(_table_of(plan))
    for line in [_cost(plan, cluster), source, *_jobs(plan, cluster, starts or {})]:
        out.print(line, highlight=False, soft_wrap=True)


def _table_of(plan: Plan) -> Table:
    columns = ("run", "N_total", "D", "C exact", "D/N", "shape", "steps", "time")
    table = plain_table(columns, ("run",), counted(len(plan.runs), "run"))
    refined = any(run.recipe for run in plan.runs)
    quantized = any(run.formats for run in plan.runs)
    reweighted = len({run.mixture for run in plan.runs}) > 1
    mixed = any(run.N_active != run.N_total for run in plan.runs)
    optional = {
        "N_active": {run.run_id: short(run.N_active or run.N_total) for run in plan.runs if mixed},
        "variant": {run.run_id: run.variant for run in plan.runs if run.variant},
        "formats": {run.run_id: run.formats or "none" for run in plan.runs if quantized},
        "mixture": {run.run_id: run.mixture for run in plan.runs if reweighted},
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
        ratio = run.D / (run.N_active or run.N_total)
        table.add_row(
            run.run_id,
            short(run.N_total),
            short(run.D),
            f"{run.flops_exact:.2e}",
            f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.2g}",
            f"{run.width}x{run.depth}",
            f"{run.steps:,}",
            describe_seconds(run.estimated_seconds),
            *(cells.get(run.run_id, "") for cells in more.values()),
        )
    return table


def _cost(plan: Plan, cluster: ClusterConfig) -> str:
    cost = f"total {plan.total_flops:.3g} FLOPs (exact)"
    if plan.total_flops < plan.separate_flops:
        cost += f", which is {plan.total_flops / plan.separate_flops:.0%} of the runs trained separately,"
    cost += f" about {describe_seconds(plan.estimated_seconds)} of training"
    cost += f" with {plan.jobs_at_once} at a time on {cluster.kind}"
    cost += f", {plan.gpu_hours:.3g} GPU-hours" if cluster.gpus_per_job else f", {plan.core_hours:.3g} core-hours"
    if plan.dollars is not None:
        cost += f", ${plan.dollars:,.2f}"
    return cost


def _jobs(plan: Plan, cluster: ClusterConfig, starts: Mapping[JobShape, str]) -> list[str]:
    if cluster.kind != "slurm":
        return []
    shapes: dict[JobShape, list[float]] = {}
    for run in plan.runs:
        shapes.setdefault(run.shape, []).append(run.estimated_seconds)
    workers = sum(workers_for(seconds, 60 * cluster.queue_minutes) for seconds in shapes.values())
    lines = [f"jobs: {counted(min(workers, cluster.array_parallelism), 'worker')}"]
    lines += [f"SLURM expects a job of {_shape(shape)} to start at {start}" for shape, start in starts.items()]
    return lines


def _shape(shape: JobShape) -> str:
    gpus = f"{shape.gpus} GPU{'s' * (shape.gpus > 1)}, " if shape.gpus else ""
    per_rank = f"{gpus}{shape.cpus} core{'s' * (shape.cpus > 1)} and {shape.memory_gb:g} GB"
    return per_rank if shape.ranks == 1 else f"{shape.ranks} ranks{_on_nodes(shape)}, each with {per_rank}"


def _on_nodes(shape: JobShape) -> str:
    return f" on {shape.nodes} nodes" if shape.nodes > 1 else ""


class LiveView:
    """A context manager that displays the progress of a plan's runs."""

    def __init__(self, sweep: SweepDirectory, plan: Plan) -> None:
        self._sweep, self._jobs = sweep, plan.jobs_at_once
        self._planned = {run.run_id: run for run in plan.runs}
        self._labels = {run.run_id: f"{run.run_id} N {short(run.N_total):>5} D {short(run.D):>5}" for run in plan.runs}
        # Estimated seconds of the runs that have not ended.
        self._left = {
            run.run_id: run.estimated_seconds
            for run in plan.runs
            if sweep.run(run.run_id).state().state not in ("done", "diverged", "cancelled")
        }
        self._total, self._estimate = len(self._left), sum(self._left.values())
        self._running: dict[str, None] = {}
        self._claimed: dict[str, None] = {}
        self._scored = 0
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[note]}"))
        terminal = Console(stderr=True)
        self._live = Progress(*columns, console=terminal, transient=True, disable=not sys.stderr.isatty())
        self._all = self._live.add_task("all runs", total=self._estimate, note="")
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.update([])
        self._live.stop()

    def update(self, claims: Sequence[dict[str, Any]]) -> list[str]:
        """Update the display with tasks that workers have just claimed. Returns the ids of the runs that train now."""
        for claim in claims:
            if claim["task"] == "train":
                self._begin(claim["run"])
            elif claim["task"] == "score":
                self._score()
        for name in list(self._running):
            if self._sweep.run(name).state().state in ENDS:
                self._end(name)
        if not self._live.disable:
            self._draw()
        return list(self._running)

    def _begin(self, name: str) -> None:
        if name in self._claimed:  # its worker was faster than the last look
            self._end(name)
        record = self._sweep.run(name).record()
        now = record.state.attempt
        before = [attempt for attempt in record.attempts if attempt.attempt < now]
        if before and (name in self._claimed or before[-1].cause not in ("preempted", "cancelled")):
            last = before[-1]
            self._say(f"run {name}: attempt {last.attempt} ended ({last.cause}: {last.reason}); retrying")
        self._claimed[name] = None
        self._running[name] = None
        self._left.setdefault(name, self._planned[name].estimated_seconds)

    def _end(self, name: str) -> None:
        if name not in self._running:
            return
        del self._running[name]
        self._left.pop(name, None)
        self._say(self._ended_line(name))
        if name in self._bars:
            self._live.remove_task(self._bars.pop(name))

    def _score(self) -> None:
        if not self._scored:
            self._say("scoring checkpoints")
        self._scored += 1

    def _draw(self) -> None:
        progress = dict[str, float]()
        for name in self._running:
            run, record, note = self._planned[name], self._sweep.run(name).last_metrics(), "starting"
            progress[name] = max(0.0, float(record.get("step", 0)) - run.first_step) / (run.steps - run.first_step)
            if record:
                note = f"loss {record['smoothed_loss']:.3f} · {short(record['tokens_per_s'])} tok/s"
            if name not in self._bars:
                self._bars[name] = self._live.add_task(self._labels[name], total=1.0, note=note)
            self._live.update(self._bars[name], completed=progress[name], note=note)
        left = sum(seconds * (1 - progress.get(name, 0.0)) for name, seconds in self._left.items())
        note = f"{self._total - len(self._left)}/{self._total} done · {self._eta(left)}"
        if self._scored:
            note += f" · {self._scored} scored"
        self._live.update(self._all, completed=self._estimate - left, note=note)

    def _eta(self, left: float) -> str:
        """Describe the time until the last run ends, by the speed of recent runs. `left`: estimated seconds left."""
        ratio = slowdown(map(self._speed, list(self._claimed)[-RECENT:]))
        whole = makespan(sorted(self._left.values(), reverse=True), self._jobs)
        seconds = whole * ratio * left / max(sum(self._left.values()), 1e-9)
        return f"ETA {describe_seconds(seconds)}{describe_slowdown(ratio)}"

    def _speed(self, name: str) -> dict[str, Any]:
        run = self._sweep.run(name)
        record, last = run.record(), run.last_metrics()
        measured = {"step": last.get("step", 0), "tokens_per_s": last.get("tokens_per_s")}
        seconds = sum(attempt.seconds for attempt in record.attempts)
        return vars(self._planned[name]) | measured | {"state": record.state.state, "seconds": seconds}

    def _ended_line(self, name: str) -> str:
        run = self._sweep.run(name)
        state, summary = run.state(), run.summary()
        done = self._total - len(self._left)
        head = f"[{done:>{len(str(self._total))}}/{self._total}] {self._labels[name]}"
        if state.state == "done" and summary is not None:
            eta = self._eta(sum(self._left.values()))
            return f"{head}  loss {summary['val_loss']:.4f}  {describe_seconds(summary['seconds']):>7}  {eta}"
        return f"{head}  {state}"

    def _say(self, line: str) -> None:
        if self._live.disable:
            print(line, flush=True)
        else:
            self._live.console.print(line, highlight=False, markup=False)
