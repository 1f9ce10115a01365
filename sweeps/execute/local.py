"""A sweep's jobs on this machine: processes that submitit starts, and that end with the process that asked for them.

Special here:
- submitit has no throttle here, so a job is started when a place comes free, with as many threads a rank as its share
  of the cores;
- runs of one rank are not a job each: one worker a place goes through the sweep's queue (`queue.py`), so that PyTorch
  is imported once a worker, and no place idles while anything can run;
- a worker that was killed is replaced; what it was at is tried again within its budget, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import submitit

from ...train.config import RunConfig, run_id
from ...train.errors import UserError
from ...train.schedule import trunk_steps
from ..plan.packing import Unit
from ..runs.directory import SweepDirectory, lock_token
from ..runs.retries import Policy
from . import worker
from .queue import Queue
from .recovery import KILLED

POLL_SECONDS = 0.25
GRACE_SECONDS = 30.0  # what a worker gets to save a checkpoint before it is killed
STILLBORN = 3  # workers that end before they have claimed anything, after which no more are started
ENDED = ("done", "failed", "diverged", "cancelled")


@dataclass
class LocalJob:
    """One job on this machine: a label, what every rank calls, and, once it is started, its handle."""

    label: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    ranks: int = 1
    handle: Any = None
    place: int = 0

    @property
    def running(self) -> bool:
        return self.handle is not None and self.handle._process.poll() is None


class Jobs(Protocol):
    """Where a pool gets its jobs from."""

    def take(self, place: int) -> LocalJob | None:
        """A job for a place that is free; None where there is none for it now."""

    def left(self) -> bool:
        """Whether there are jobs that were not taken yet."""

    def ended(self, job: LocalJob) -> None:
        """A job's processes are gone."""


@dataclass
class Listed:
    """Jobs that are known from the start, in order."""

    jobs: list[LocalJob]

    def take(self, place: int) -> LocalJob | None:
        return self.jobs.pop(0) if self.jobs else None

    def left(self) -> bool:
        return bool(self.jobs)

    def ended(self, job: LocalJob) -> None:
        """Nothing to do."""


@dataclass
class LocalPool:
    """Runs jobs of as many ranks each, `places` at a time."""

    folder: Path
    places: int
    threads: int  # of a rank
    gpus_per_rank: int = 0
    jobs_per_gpu: int = 1

    def run(self, jobs: Jobs, tick: Callable[[], None]) -> None:
        """Runs every job to its end. `tick` is called several times a second, for the display.

        On Ctrl-C or TERM every running job gets TERM, so that it saves, and KeyboardInterrupt goes on.
        """
        running: list[LocalJob] = []
        try:
            with _terminate_as_interrupt():
                while running or jobs.left():
                    for place in sorted(set(range(self.places)) - {job.place for job in running}):
                        if (job := jobs.take(place)) is not None:
                            running.append(self._start(job, place))
                    time.sleep(POLL_SECONDS)
                    for job in [job for job in running if not job.running]:
                        running.remove(job)
                        jobs.ended(job)
                    tick()
        except BaseException:
            self._stop(running)
            raise

    def _start(self, job: LocalJob, place: int) -> LocalJob:
        executor = submitit.LocalExecutor(folder=self.folder)
        gpus = job.ranks * self.gpus_per_rank
        first = place // self.jobs_per_gpu * gpus
        executor.update_parameters(
            timeout_min=60 * 24 * 365,  # submitit ends a local job after that; a run here has no limit but its D
            tasks_per_node=job.ranks, gpus_per_node=gpus, visible_gpus=tuple(range(first, first + gpus)),
        )  # fmt: skip
        with _environment(self.threads), _ignored_interrupts():
            job.handle = executor.submit(job.function, *job.arguments)
        job.place = place
        return job

    def _stop(self, running: list[LocalJob]) -> None:
        for job in running:
            job.handle._process.terminate()  # submitit's controller passes TERM on to every rank
        deadline = time.monotonic() + GRACE_SECONDS
        while any(job.running for job in running) and time.monotonic() < deadline:
            time.sleep(0.05)
        for job in running:
            if job.running:
                job.handle._process.kill()


@contextlib.contextmanager
def _environment(threads: int) -> Iterator[None]:
    """Environment of a job: pinned threads, because two processes with two threads each on two cores crawl."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Children inherit an ignored SIGINT: Ctrl-C reaches the launcher alone, which tells them to save with TERM."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """TERM to the launcher (a closed allocation, a shutdown) is handled as Ctrl-C is."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class Training:
    """The runs of one launch and its queue; what both ways below to work through it have in common."""

    sweep: SweepDirectory
    queue: Queue
    policy: Policy
    began: float = field(default_factory=time.time)
    _said: set[str] = field(default_factory=set)

    @property
    def launcher(self) -> tuple[str, str]:
        """What a worker needs to see whether this launcher lives."""
        return str(self.sweep.path.resolve()), lock_token(self.sweep.path)

    def left(self) -> bool:
        return bool(self.queue.left())

    def settle_lost(self) -> None:
        """Of a unit whose worker died: its runs are settled, and it is over, or waits to be tried again."""
        self.queue.recover(self.policy)

    def news(self) -> tuple[list[str], list[str]]:
        """Runs that train now, and those that have ended since the last call."""
        running, open_units = self.queue.running(), set(self.queue.left())
        open_units |= running.keys()
        over = [name for unit in self.queue.units if unit not in open_units for name in unit.runs]
        members = [name for unit in running for name in unit.runs]
        left = [name for name in members if not self._has_ended(name)]
        ended = over + [name for name in members if name not in left]
        fresh = [name for name in dict.fromkeys(ended) if name not in self._said]
        self._said.update(fresh)
        return left, fresh

    def _has_ended(self, name: str) -> bool:
        state = self.sweep.run(name).state()
        return state.state in ENDED and state.since >= self.began


def enqueue(sweep: SweepDirectory, folder: Path, units: Sequence[Unit], runs: Sequence[RunConfig]) -> Queue:
    """A new queue for units of these runs, in a folder of its own below `folder`."""
    parents = {run_id(run): (run.parent, trunk_steps(run)) for run in runs if run.parent is not None}
    return Queue.create(sweep, folder / f"queue-{os.urandom(4).hex()}", units, parents)


@dataclass
class Workers(Training):
    """A worker a place, each going through the queue by itself."""

    stillborn: int = 0  # in a row
    _claimed: dict[int, int] = field(default_factory=dict)  # by a place, when its worker was started

    def take(self, place: int) -> LocalJob | None:
        if not self.queue.left():
            return None
        self._claimed[place] = self.queue.claimed(place)
        folder = str(self.queue.folder.resolve())
        arguments = (str(self.sweep.path.resolve()), folder, place, self.policy, self.launcher)
        return LocalJob("worker", worker.work, arguments)

    def ended(self, job: LocalJob) -> None:
        """Settles what it was at.

        Raises:
            UserError: one after the other ended before it had begun.
        """
        self.settle_lost()
        # What submitit's controller exits with says nothing of its task.
        born = self.queue.claimed(job.place) > self._claimed[job.place] or not self.queue.left()
        self.stillborn = 0 if born else self.stillborn + 1
        if self.stillborn >= STILLBORN:
            raise UserError(
                f"workers end before they train anything, {self.stillborn} of them; see {job.handle.paths.stderr}, "
                "and sweep again"
            )


@dataclass
class Ranked(Training):
    """A job a run, of several ranks each."""

    _units: dict[str, Unit] = field(default_factory=dict)

    def take(self, place: int) -> LocalJob | None:
        unit = self.queue.claim(place)
        if unit is None:
            return None
        (name,) = unit.runs
        self._units[name] = unit
        run = self.sweep.run(name)
        arguments = (str(run.path.resolve()), self.policy, self.launcher)
        return LocalJob(name, worker.train_run, arguments, run.config().parallel.world_size)

    def ended(self, job: LocalJob) -> None:
        self.queue.settle(self._units[job.label], self.policy, KILLED)
