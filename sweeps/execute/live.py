"""What a terminal shows while a sweep trains on this machine: a bar per run with its loss, and the ETA of the whole.

Without a terminal the bars become a plain line per run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..plan.sweep_plan import Plan, makespan
from ..runs.directory import ENDS, SweepDirectory
from ..terminal import describe_seconds, short


class LiveView:
    """Shows the runs of a plan that have not ended; a context manager around the launcher's ticks."""

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
        self._total, self._started = len(self._left), time.monotonic()
        self._estimate = sum(self._left.values())
        self._running: dict[str, None] = {}
        self._claimed: set[str] = set()
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
        """Show what workers have claimed since the last call. Returns the ids of the runs that train now."""
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
            self._say(f"run {name}: attempt {last.attempt} ended ({last.cause}: {last.reason}); trying again")
        self._claimed.add(name)
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
        note = f"{self._total - len(self._left)}/{self._total} done · {describe_seconds(self._eta(left))} left"
        if self._scored:
            note += f" · {self._scored} scored"
        self._live.update(self._all, completed=self._estimate - left, note=note)

    def _eta(self, left: float) -> float:
        """Return the planned seconds that are left, corrected by how the plan has held so far."""
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
