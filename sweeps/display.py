"""What a terminal shows while runs train: a bar a run with its loss, and the whole with its ETA. Plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from .grid import short
from .plan import Plan, describe, makespan
from .runs import RunDirectory, SweepDirectory


class Display:
    """Live view of a local sweep; a context manager around the pool's ticks."""

    def __init__(
        self, plan: Plan, sweep: SweepDirectory, waiting: list[RunDirectory], scoring: list[RunDirectory] | None = None
    ) -> None:
        self._sweep, self._jobs = sweep, plan.jobs_at_once
        self._planned = {run.run_id: run for run in plan.runs}
        self._left = {run.run_id: self._planned[run.run_id].estimated_seconds for run in waiting}
        self._total, self._started = len(waiting), time.monotonic()
        self._estimate = sum(self._left.values())
        self._scoring = scoring or []
        self._scored = 0
        self._live: Any = None
        self._bars: dict[str, Any] = {}

    def __enter__(self) -> Display:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[note]}"))
            self._live = Progress(*columns, console=Console(stderr=True), transient=True)
            self._live.start()
            total = self._estimate if self._total else len(self._scoring)
            self._all = self._live.add_task("all runs" if self._total else "scoring", total=total, note="")
        elif self._scoring:
            print(f"scoring {len(self._scoring)} checkpoints", flush=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, running: list[str], ended: list[str]) -> None:
        """Called at every tick with the run ids that train and those that have just ended."""
        progress = {name: self._share(name) for name in running}
        for name in ended:
            self._left.pop(name, None)
            self._say(self._ended_line(name))
            if self._live is not None and name in self._bars:
                self._live.remove_task(self._bars.pop(name))
        if self._live is None:
            return
        left = self._remaining(progress)
        done = self._total - len(self._left)
        self._live.update(
            self._all, completed=self._estimate - left,
            note=f"{done}/{self._total} done · {describe(self._eta(left))} left",
        )  # fmt: skip
        for name in running:
            self._draw(name, progress[name])

    def update_scores(self) -> None:
        """Called at every tick while checkpoints are scored."""
        scored = sum((run.path / "eval").is_dir() for run in self._scoring)
        if scored != self._scored and self._live is not None:
            self._live.update(self._all, completed=scored, note=f"{scored}/{len(self._scoring)} checkpoints")
        self._scored = scored

    def _share(self, name: str) -> float:
        return float(self._sweep.run(name).last_metrics().get("step", 0)) / self._planned[name].steps

    def _remaining(self, progress: dict[str, float]) -> float:
        return sum(seconds * (1 - progress.get(name, 0.0)) for name, seconds in self._left.items())

    def _eta(self, left: float) -> float:
        """Planned seconds that are left, corrected by how the plan has held so far."""
        spent = time.monotonic() - self._started
        done = self._estimate - left
        pace = spent * self._jobs / done if done > 0.02 * self._estimate else 1.0
        return makespan(sorted(self._left.values(), reverse=True), self._jobs) * pace * left / max(sum(self._left.values()), 1e-9)

    def _draw(self, name: str, share: float) -> None:
        run = self._planned[name]
        record = self._sweep.run(name).last_metrics()
        note = f"loss {record['train_loss']:.3f} · {short(record['tokens_per_s'])} tok/s" if record else "starting"
        label = f"{name} N {short(run.N_total):>5} D {short(run.D):>5}"
        if name not in self._bars:
            self._bars[name] = self._live.add_task(label, total=1.0, note=note)
        self._live.update(self._bars[name], completed=share, note=note)

    def _ended_line(self, name: str) -> str:
        run, directory = self._planned[name], self._sweep.run(name)
        state, summary = directory.state(), directory.summary()
        done = self._total - len(self._left)
        head = f"[{done:>{len(str(self._total))}}/{self._total}] {name} N {short(run.N_total):>5} D {short(run.D):>5}"
        if state.state == "done" and summary is not None:
            eta = describe(self._eta(sum(self._left.values())))
            return f"{head}  loss {summary['val_loss']:.4f}  {describe(summary['seconds']):>7}  ETA {eta}"
        return f"{head}  {state.state}: {state.reason}"

    def _say(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)
