"""A sweep's jobs on SLURM, which outlive the process that submits them.

Special here:
- short runs of one rank go through a queue with worker jobs; longer ones, and runs of several ranks, are tasks of one
  array per job shape, a rank a task of its job;
- branches wait for their trunk's task, scoring for each task's success or for a queue's workers, and the fit for
  everything; two keepers, tiny jobs, wait beside them to start again what must be;
- what SLURM's queue has no room for is held back, and submitted by a keeper later.

Whoever uses a backend holds the sweep.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...train.errors import UserError, counted
from ...train.files import read_json, write_json
from ..config import ClusterConfig
from ..plan.sweep_plan import Plan
from ..runs import states
from ..runs.attempts import Policy
from ..runs.directory import RunDirectory, SweepDirectory, own_job
from ..runs.forms import JobShape, PlannedRun
from ..runs.queue import Queue, Unit
from . import cluster as slurm_cluster
from . import commands as slurm
from . import placement
from .cluster import Limits
from .placement import Batch
from .record import MEMORY, Inventory, LaunchRecord, Memory, QueueJobs, labelled_jobs
from .submit import Call, QueueFull, Request
from .transaction import Transaction, recover, release_forgotten, transaction

KEEPERS = 2  # that wait in the queue, so that the death of one breaks nothing
# The least that may be in the queue: keepers with the one that runs, the fit, a run and what scores it.
LEAST_ROOM = KEEPERS + 4
ARRAY_LIMIT = 1000  # tasks of one array, whatever SLURM allows: each is a file or two of the array's folder
SHOW_SECONDS = 5.0  # between two looks of somebody who waits
HELD_BACK = "held back, for the queue takes no more jobs (cluster.max_submit)"
SCORINGS = 3  # times that a run is scored
FITS = 3  # times that the laws are fitted to the same results
RESULTS = ("runs/*/summary.json", "runs/*/eval/*.json")


class Calls(NamedTuple):
    """What jobs call."""

    train: Callable[..., None]  # how, paths of runs, policy
    work: Callable[..., None]  # path of the sweep, folder of a queue, policy
    score: Callable[..., None]  # path of the sweep, run ids
    fit: Callable[..., None]  # path of the sweep
    keep: Callable[..., None]  # path of the sweep
    stage: Callable[[SweepDirectory], None]  # no job: puts what scoring needs where jobs find it


class SlurmBackend(Inventory):
    """Submits one sweep's jobs, each once; `live` are the jobs in the queue."""

    def __init__(self, sweep: SweepDirectory, cluster: ClusterConfig, live: set[str], calls: Calls) -> None:
        super().__init__(sweep, live)
        self.cluster, self.calls, self.policy = cluster, calls, Policy.of(cluster)
        self.path = str(sweep.path.resolve())
        self.memory: dict[str, Any] = read_json(sweep.path / "jobs" / MEMORY, Memory) or {}  # what was tried how often
        recover(sweep, cluster, self.record)
        if live & self.record.jobs():
            with contextlib.suppress(UserError):  # SLURM is away, and will be asked again
                release_forgotten(sweep, cluster, self.record)

    # What `advance` asks

    def to_score(self, runs: Sequence[RunDirectory]) -> list[RunDirectory]:
        """Runs that no job scores and that were not tried often."""
        tries = self.memory.get("scorings", {})
        return [run for run in self.without_scoring(runs) if tries.get(run.run_id, 0) < SCORINGS]

    def is_taken(self, run: RunDirectory) -> bool:
        return bool(self.jobs_of(run))

    def start(
        self,
        plan: Plan,
        units: Sequence[Unit],
        unscored: Sequence[RunDirectory],
        evaluate: bool,
        avoid: Mapping[str, tuple[str, ...]],
    ) -> None:
        """`submit`, and says what came of it."""
        if evaluate:
            self.calls.stage(self.sweep)  # now, for compute nodes may have no network
        held = self.submit(plan, units, unscored, evaluate, avoid)
        tries = self.memory.setdefault("scorings", {})
        for run in unscored:
            if not self.without_scoring([run]):  # the queue may have been full
                tries[run.run_id] = tries.get(run.run_id, 0) + 1
        count = sum(len(unit.runs) for unit in units) - len(held)
        print(f"submitted {counted(count, 'run')} and {counted(len(unscored), 'scoring')} to SLURM")
        if held:
            print(f"held back {counted(len(held), 'run')} until the queue takes more jobs (cluster.max_submit)")

    def refill(self) -> None:
        """Gives queues the workers that they have lost."""
        seconds = {run["run_id"]: run["estimated_seconds"] for run in self.sweep.plan()["runs"]}
        for name, workers in self.queues().items():
            if not workers or not self.cluster.queue_minutes > 0:
                continue  # its runs have no job and are submitted anew; or it is of an earlier configuration
            queue = Queue.open(self.sweep, self.sweep.path / "jobs" / name)
            ready = queue.ready()
            worth = sum(seconds[run] for unit in ready for run in unit.runs) / (60 * self.cluster.queue_minutes)
            idle = len(workers) - len(queue.running())
            most = self.cluster.array_parallelism - len(workers)
            if (missing := min(len(ready), math.ceil(worth)) - idle) > 0 and most > 0:
                self.add_workers(queue.folder, min(missing, most), queue.avoided())

    def fit(self) -> bool:
        """Has the laws fitted where results are newer than the table; whether that was due."""
        newest = max((_written(file) for pattern in RESULTS for file in self.sweep.path.glob(pattern)), default=0.0)
        table, law = _written(self.sweep.path / "table.csv"), _written(self.sweep.path / "fit" / "law.json")
        tried = self.memory.get("fits") or {}
        tries = tried.get("tries", 0) if tried.get("newest") == newest else 0
        # Not that the table is older than the law: somebody may be at writing both anew.
        if newest == 0.0 or newest <= min(table, law) or tries >= FITS:
            return False
        with contextlib.suppress(QueueFull):  # a later pass asks again
            self.submit_fit()
            self.memory["fits"] = {"newest": newest, "tries": tries + 1}
        return True

    def remember(self, over: bool) -> None:
        """Writes down what was tried how often."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_json(self.sweep.path / "jobs" / MEMORY, self.memory | {"over": over, "when": when})

    # What is submitted

    def submit(
        self,
        plan: Plan,
        units: Sequence[Unit],
        unscored: Sequence[RunDirectory],
        evaluate: bool,
        avoid: Mapping[str, tuple[str, ...]] | None = None,
    ) -> list[str]:
        """Submits training, scoring, the fit and the keepers, which depend on each other; all of it or nothing.

        Units are trained in their order, and with `evaluate` scored thereafter; `unscored` are trained already; `avoid`
        has nodes that a run is not to get. Returns the ids of runs that were held back, for the queue of SLURM takes no
        more jobs: submit them again later. UserError where SLURM refuses a job: nothing is left in the queue.
        """
        limits = slurm_cluster.limits(self.cluster)
        if limits.max_submit is not None and limits.max_submit < LEAST_ROOM:
            raise UserError(
                f"{limits.max_submit} jobs may be in the queue at once, by cluster.max_submit or SLURM's own limits; "
                f"it must be {LEAST_ROOM} or more: three keepers, the fit, a run and its scoring"
            )
        with self._transaction(limits) as began:
            if not self._add_keepers(began):
                raise QueueFull("SLURM takes no more jobs for now, not even one that looks after the sweep; try later")
            for name in [name for name, workers in self.queues().items() if not workers]:
                del self.record.queues[name]  # nobody works through it: what it had left is submitted anew
            before = len(began.jobs)
            planned = {run.run_id: run for run in plan.runs}
            launch = _Launch(self, began, planned, limits.max_array, evaluate, avoid or {})
            held = launch.train(units, self._room(began))
            launch.score(unscored, self._room(began))
            if len(began.jobs) > before:
                with contextlib.suppress(QueueFull):  # then a keeper has it made
                    self._add_fit(began)
        for name in held:
            if (run := self.sweep.run(name)).state().reason != HELD_BACK:
                states.plan(run, HELD_BACK)
        return held

    def keep(self) -> int:
        """Sees to it that two keepers wait, beside the one that runs; returns how many do."""
        if len(waiting := self._waiting_keepers()) >= KEEPERS:
            return len(waiting)
        with self._transaction() as began:
            return self._add_keepers(began)

    def submit_fit(self) -> None:
        """Has the laws fitted once everything in the queue has ended."""
        with self._transaction() as began:
            self._add_fit(began)

    def add_workers(self, folder: Path, count: int, avoid: Sequence[str] = ()) -> None:
        """More workers for a queue, as far as there is room."""
        known, limits = self.record.queues[folder.name], slurm_cluster.limits(self.cluster)
        with self._transaction(limits) as began, contextlib.suppress(QueueFull):
            count = min(count, limits.max_array, self._room(began))
            if count > 0:
                request = Request("queue", known.shape, avoid=tuple(avoid))
                known.workers += began.submit(request, [self.working(folder)] * count)

    def working(self, folder: Path) -> Call:
        return Call(self.calls.work, (self.path, str(folder.resolve()), self.policy))

    def cancel_all(self) -> None:
        """Cancels the sweep's jobs, except this process."""
        ours = labelled_jobs(self.sweep).keys()
        self.live |= ours
        self._cancel(self.record.jobs() | ours)

    def end_keepers(self) -> None:
        self._cancel(self._waiting_keepers())

    @contextlib.contextmanager
    def _transaction(self, limits: Limits | None = None) -> Iterator[Transaction]:
        most = (limits or slurm_cluster.limits(self.cluster)).max_submit
        room = sys.maxsize if most is None else max(0, most - len(slurm.live_jobs(own=True)))
        try:
            with transaction(self.sweep, self.cluster, self.record, room) as began:
                yield began
        except BaseException:
            self.record = LaunchRecord.read(self.sweep)
            raise
        self.live |= set(began.jobs)
        self._left.clear()

    def _cancel(self, jobs: Collection[str]) -> None:
        jobs = set(jobs) & self.live - {own_job()}
        slurm.cancel(jobs)
        self.live -= jobs

    def _room(self, began: Transaction) -> int:
        """Jobs that may still be submitted, less keepers and fit."""
        waiting = len({*self._waiting_keepers(), *began.jobs} & set(self.record.keepers))
        return max(0, began.room - (KEEPERS - waiting) - 1)  # one: the fit

    def _add_fit(self, began: Transaction) -> None:
        waits = (self.in_queue() | set(began.jobs)) - set(self.record.keepers)
        minutes = min(slurm_cluster.FIT_MINUTES, self.cluster.time_minutes)
        shape = JobShape(0, 1, min(8.0, self.cluster.memory_gb), minutes)
        call = Call(self.calls.fit, (self.path,))
        before = self.record.fit
        (self.record.fit,) = began.submit(Request("fit", shape, after(arrays_of(waits)), light=True), [call])
        if before in self.live:
            began.superseded.append(before)

    def _add_keepers(self, began: Transaction) -> int:
        # Each waits for a time of its own, and not for the one before it: SLURM may hold that one up, or take it for
        # running long after it has ended, as a controller does that was killed.
        waiting = self._waiting_keepers()
        shape = JobShape(0, 1, min(2.0, self.cluster.memory_gb), min(30, self.cluster.time_minutes))
        call = Call(self.calls.keep, (self.path,))
        with contextlib.suppress(QueueFull):
            while len(waiting) < KEEPERS:
                begin = f"now+{math.ceil(self.cluster.keeper_seconds * (1 + len(waiting)))}"
                waiting += began.submit(Request("keeper", shape, light=True, begin=begin), [call])
        self.record.keepers = [job for job in self.record.keepers if job in self.live - set(waiting)] + waiting
        return len(waiting)

    def _waiting_keepers(self) -> list[str]:
        return [job for job in self.record.keepers if job in self.live and job != own_job()]


@dataclass(frozen=True)
class _Launch:
    """What one launch submits to train and score."""

    backend: SlurmBackend
    began: Transaction
    planned: Mapping[str, PlannedRun]  # every run of the plan, by id
    max_array: int  # tasks that SLURM allows an array
    evaluate: bool
    avoid: Mapping[str, tuple[str, ...]]

    def train(self, units: Sequence[Unit], room: int) -> list[str]:
        """Submits training, and scoring thereafter; returns the ids of runs held back."""
        cluster = self.backend.cluster
        short, long = placement.split(units, self.planned, cluster)
        family = placement.families(short, self.planned)
        waits = placement.of_family({name: self._trunk_jobs(name) for name in family}, family)
        queues = placement.batches(short, self.planned, waits, placement.of_family(self.avoid, family))
        wanted = [min(placement.workers_for(queue, self.planned, cluster), self.max_array) for queue in queues]
        workers, tasks = placement.allot(room // (2 if self.evaluate else 1), wanted, len(long))
        with contextlib.suppress(QueueFull):
            for queue, count in zip(queues, workers, strict=True):
                if count:
                    self._queue(queue, count)
            self._arrays(long, tasks)
        return [name for unit in units for name in unit.runs if name not in self.began.queued]

    def score(self, unscored: Sequence[RunDirectory], room: int) -> None:
        """Submits scoring, as far as there is room."""
        units = [Unit((run.run_id,)) for run in unscored]
        with contextlib.suppress(QueueFull):
            for batch in placement.batches(units, self.planned, {}, {}):
                count = min(len(batch.units), self.backend.cluster.array_parallelism, self.max_array, room)
                if count < 1:
                    return
                self._score(batch, count, None)
                room -= count

    def _queue(self, batch: Batch, count: int) -> None:
        sweep = self.backend.sweep
        folder = sweep.path.resolve() / "jobs" / f"queue-{os.urandom(4).hex()}"
        trunks = {name: (run.parent, run.first_step) for name in batch.runs if (run := self.planned[name]).parent}
        Queue.create(sweep, folder, batch.units, trunks)
        with self.began.together():
            request = Request("queue", batch.shape, after(batch.waits), batch.avoid)
            workers = self.began.submit(request, [self.backend.working(folder)] * count)
            if self.evaluate:
                self._score(batch, count, after(arrays_of(workers)))
        self.began.record.queues[folder.name] = QueueJobs(batch.shape, workers)
        self.began.queued.update(dict.fromkeys(batch.runs))

    def _arrays(self, units: Sequence[Unit], tasks: int) -> None:
        """The first so many of these units are array tasks, but no branch without its trunk."""
        of_these = {name for unit in units for name in unit.runs}
        for level in placement.levels(units, self.planned):
            trunks = {unit: {self.planned[name].parent for name in unit.runs} & of_these for unit in level}
            ready = [unit for unit in level if trunks[unit] <= self.began.queued.keys()][:tasks]
            tasks -= len(ready)
            waits = {name: self._trunk_jobs(name) for unit in ready for name in unit.runs}
            for batch in placement.batches(ready, self.planned, waits, self.avoid):
                most = min(ARRAY_LIMIT, self.max_array)
                for start in range(0, len(batch.units), most):
                    self._array(replace(batch, units=batch.units[start : start + most]))

    def _array(self, batch: Batch) -> None:
        training = []
        for unit in batch.units:
            path = str(self.backend.sweep.run(unit.runs[0]).path.resolve())
            training.append(Call(self.backend.calls.train, (path, self.backend.policy)))
        with self.began.together():
            request = Request("train", batch.shape, after(batch.waits), batch.avoid)
            trained_by = _by_run(batch, self.began.submit(request, training))
            scored_by: dict[str, str] = {}
            if self.evaluate:
                (array,) = arrays_of(trained_by.values())
                each = "aftercorr" if len(batch.units) > 1 else "afterok"
                request = Request("evaluate", batch.shape.for_one_process(), f"{each}:{array}")
                scoring = [self._scoring(unit.runs) for unit in batch.units]
                scored_by = _by_run(batch, self.began.submit(request, scoring))
        self.began.record.training.update(trained_by)
        self.began.record.scoring.update(scored_by)
        self.began.queued.update(trained_by)

    def _score(self, batch: Batch, count: int, dependency: str | None) -> None:
        """So many jobs at most, each with a share of the runs: tasks are loaded once per job."""
        shares = [batch.runs[first::count] for first in range(min(count, len(batch.runs)))]
        request = Request("evaluate", batch.shape.for_one_process(), dependency)
        jobs = self.began.submit(request, [self._scoring(share) for share in shares])
        for share, job in zip(shares, jobs, strict=True):
            self.began.record.scoring.update(dict.fromkeys(share, job))

    def _scoring(self, runs: Sequence[str]) -> Call:
        return Call(self.backend.calls.score, (self.backend.path, list(runs)))

    def _trunk_jobs(self, name: str) -> tuple[str, ...]:
        """The jobs of its trunk that a run waits for, however they end."""
        trunk = self.planned[name].parent
        if trunk is None:
            return ()
        if (job := self.began.queued.get(trunk)) is not None:
            return (job,)
        jobs = self.backend.jobs_of(self.backend.sweep.run(trunk))
        return tuple(sorted(jobs)) if len(jobs) == 1 else arrays_of(jobs)


def _by_run(batch: Batch, jobs: Sequence[str]) -> dict[str, str]:
    return {name: job for unit, job in zip(batch.units, jobs, strict=True) for name in unit.runs}


def after(jobs: Collection[str]) -> str | None:
    """The dependency on the end of jobs."""
    return "afterany:" + ":".join(sorted(jobs)) if jobs else None


def arrays_of(jobs: Collection[str]) -> tuple[str, ...]:
    """The arrays that tasks belong to; any other job is its own."""
    return tuple(sorted({job.split("_")[0] for job in jobs}))


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def wait_for_slurm(sweep: SweepDirectory) -> None:
    """Returns once no job of the sweep is in the queue, keepers included. Ctrl-C leaves the jobs alone."""
    said, looked = "", -math.inf
    try:
        while True:
            live = None
            with contextlib.suppress(UserError):
                live = slurm.live_jobs()  # first, for a keeper that submits others is there until it has
            if live is not None and not LaunchRecord.read(sweep).jobs() & live:
                return
            if sys.stdout.isatty() and time.monotonic() - looked > SHOW_SECONDS:
                looked, before = time.monotonic(), said
                counts = Counter(run.state().state for run in sweep.runs())
                said = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
                if said != before:
                    print(said, flush=True)
            time.sleep(1.0)
    except KeyboardInterrupt:
        print(f"\nno longer waiting; the jobs go on, see `isoflop status {sweep.path}`")
        raise
