"""What one launch submits to train and score: queues with their workers, and arrays.

Special here:
- units of one shape go together, for they ask SLURM for the same: in a queue, or as tasks of an array;
- a branch waits for its trunk in the queue that both are in, else its job for the trunk's;
- what scores a queue's runs are as many jobs as it has workers, after them, each with a share: the tasks of an
  evaluation are loaded once a job. What scores an array's task is a task that waits for its success.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import ClusterConfig
from ..execute import worker
from ..execute.queue import Queue
from ..plan.packing import Unit
from ..plan.sweep_plan import JobShape, PlannedRun
from ..runs.directory import RunDirectory
from ..runs.retries import Policy
from . import placement
from .launch_record import Inventory, QueueJobs
from .placement import Batch
from .submission import Call, QueueFull, Request
from .transaction import Transaction

ARRAY_LIMIT = 1000  # tasks of one array, whatever SLURM allows: each is a file or two of the array's folder


@dataclass(frozen=True)
class Wave:
    """What holds for all that is submitted together."""

    inventory: Inventory  # of what was submitted before
    began: Transaction
    cluster: ClusterConfig
    planned: Mapping[str, PlannedRun]  # every run of the plan, by id
    max_array: int  # tasks that SLURM allows an array

    def train(
        self, units: Sequence[Unit], evaluate: bool, avoid: Mapping[str, tuple[str, ...]], room: int | None
    ) -> list[str]:
        """Submits the training of units, and the scoring thereafter; returns the ids of runs held back.

        Args:
            units: in the order in which they are to start.
            evaluate: whether there is anything to score on.
            avoid: nodes that a run is not to get, by run id.
            room: jobs that SLURM's queue still takes; None: any number.
        """
        short, long = placement.split(units, self.planned, self.cluster)
        family = placement.families(short, self.planned)
        waits = placement.of_family({name: self._trunk_jobs(name) for name in family}, family)
        queues = placement.batches(short, self.planned, waits, placement.of_family(avoid, family))
        wanted = [min(placement.workers_for(queue, self.planned, self.cluster), self.max_array) for queue in queues]
        places = None if room is None else room // (2 if evaluate else 1)
        workers, tasks = placement.allot(places, wanted, len(long))
        with contextlib.suppress(QueueFull):
            for queue, count in zip(queues, workers, strict=True):
                if count:
                    self._queue(queue, count, evaluate)
            self._arrays(long, tasks, evaluate, avoid)
        return [name for unit in units for name in unit.runs if name not in self.began.queued]

    def score(self, unscored: Sequence[RunDirectory], room: int | None) -> None:
        """Submits the scoring of runs that are trained already, as far as there is room."""
        units = [Unit("alone", (run.run_id,)) for run in unscored]
        with contextlib.suppress(QueueFull):
            for batch in placement.batches(units, self.planned, {}, {}):
                count = min(len(batch.units), self.cluster.array_parallelism, self.max_array)
                count = count if room is None else min(count, room)
                if count < 1:
                    return
                self._score(batch.shape, batch.runs, count, None)
                room = None if room is None else room - count

    def _queue(self, batch: Batch, count: int, evaluate: bool) -> None:
        """Units go through a queue of so many workers."""
        folder = self.inventory.sweep.path.resolve() / "jobs" / f"queue-{os.urandom(4).hex()}"
        trunks = {name: (run.parent, run.first_step) for name in batch.runs if (run := self.planned[name]).parent}
        Queue.create(self.inventory.sweep, folder, batch.units, trunks)
        with self.began.together():
            request = Request("queue", batch.shape, after(batch.waits), batch.avoid)
            workers = self.began.submit(request, [working(self.inventory, self.cluster, folder)] * count)
            if evaluate:
                self._score(batch.shape, batch.runs, count, after(arrays_of(workers)))
        self.began.record.queues[folder.name] = QueueJobs(batch.shape, workers)
        self.began.queued.update(dict.fromkeys(batch.runs))

    def _arrays(self, units: Sequence[Unit], tasks: int, evaluate: bool, avoid: Mapping[str, tuple[str, ...]]) -> None:
        """The first so many of these units are array tasks, but no branch without its trunk."""
        of_these = {name for unit in units for name in unit.runs}
        for level in placement.levels(units, self.planned):
            trunks = {unit: {self.planned[name].parent for name in unit.runs} & of_these for unit in level}
            ready = [unit for unit in level if trunks[unit] <= self.began.queued.keys()][:tasks]
            tasks -= len(ready)
            waits = {name: self._trunk_jobs(name) for unit in ready for name in unit.runs}
            for batch in placement.batches(ready, self.planned, waits, avoid):
                for part in placement.chunks(batch, min(ARRAY_LIMIT, self.max_array)):
                    self._array(part, evaluate)

    def _array(self, batch: Batch, evaluate: bool) -> None:
        """Each unit is a task of its own."""
        with self.began.together():
            request = Request("train", batch.shape, after(batch.waits), batch.avoid)
            training = self._by_run(batch, self.began.submit(request, [self._training(unit) for unit in batch.units]))
            scoring: dict[str, str] = {}
            if evaluate:
                (array,) = arrays_of(training.values())
                each = "aftercorr" if len(batch.units) > 1 else "afterok"
                request = Request("evaluate", batch.shape.for_one_process(), f"{each}:{array}")
                calls = [self._scoring(unit.runs) for unit in batch.units]
                scoring = self._by_run(batch, self.began.submit(request, calls))
        self.began.record.training.update(training)
        self.began.record.scoring.update(scoring)
        self.began.queued.update(training)

    def _score(self, shape: JobShape, runs: Sequence[str], count: int, dependency: str | None) -> None:
        """So many jobs at most, each with a share of the runs."""
        shares = [runs[first::count] for first in range(min(count, len(runs)))]
        request = Request("evaluate", shape.for_one_process(), dependency)
        jobs = self.began.submit(request, [self._scoring(share) for share in shares])
        for share, job in zip(shares, jobs, strict=True):
            self.began.record.scoring.update(dict.fromkeys(share, job))

    def _trunk_jobs(self, name: str) -> tuple[str, ...]:
        """The jobs that a run waits for: of its trunk, submitted here or before. None where that has ended.

        However the trunk ends: where its checkpoint is there the branch can be trained, and else it says so.
        """
        trunk = self.planned[name].parent
        if trunk is None:
            return ()
        if (job := self.began.queued.get(trunk)) is not None:
            return (job,)
        jobs = self.inventory.jobs_of(self.inventory.sweep.run(trunk))
        return tuple(sorted(jobs)) if len(jobs) == 1 else arrays_of(jobs)

    @staticmethod
    def _by_run(batch: Batch, jobs: Sequence[str]) -> dict[str, str]:
        return {name: job for unit, job in zip(batch.units, jobs, strict=True) for name in unit.runs}

    def _training(self, unit: Unit) -> Call:
        policy, paths = (
            Policy.of(self.cluster),
            [str(self.inventory.sweep.run(name).path.resolve()) for name in unit.runs],
        )
        if unit.how == "alone":
            return Call(worker.train_run, (paths[0], policy))
        return Call(worker.train_unit, (unit.how, paths, policy))

    def _scoring(self, runs: Sequence[str]) -> Call:
        return Call(worker.evaluate_runs, (str(self.inventory.sweep.path.resolve()), list(runs)))


def working(inventory: Inventory, cluster: ClusterConfig, folder: Path) -> Call:
    """What a worker of a queue calls."""
    sweep = str(inventory.sweep.path.resolve())
    return Call(worker.work_queue, (sweep, str(folder.resolve()), Policy.of(cluster)))


def after(jobs: Collection[str]) -> str | None:
    """The dependency on the end of jobs, of all tasks of an array where one is named; None of no job."""
    return "afterany:" + ":".join(sorted(jobs)) if jobs else None


def arrays_of(jobs: Collection[str]) -> tuple[str, ...]:
    """The arrays that tasks belong to; a job that is none is its own."""
    return tuple(sorted({job.split("_")[0] for job in jobs}))
