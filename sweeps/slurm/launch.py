"""Jobs go to SLURM through submitit, and outlive this process. (`local.py` has the jobs of this machine.)

Special here:
- short runs of one rank are no job each: worker jobs go through a queue of them (`queue.py`). Longer ones, and runs of
  several ranks, are tasks of an array a job shape, a rank a task of its job;
- branches wait for their trunk's task, scoring for each task's success or for a queue's workers, and the fit for
  everything; two keepers (`keeper.py`), tiny jobs, wait beside them to start again what must be;
- jobs, but for keepers, are submitted on hold, written down, and released: a launcher may be killed anywhere
  (`transaction.py`);
- what the queue of SLURM has no room for is held back, and submitted by a keeper later.

Whoever uses a launcher holds the sweep.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from ...train.errors import UserError
from ..config import ClusterConfig
from ..execute import worker
from ..plan.packing import Unit
from ..plan.sweep_plan import JobShape, Plan
from ..runs.directory import RunDirectory, SweepDirectory
from . import cluster as slurm_cluster
from . import commands as slurm
from .cluster import Limits
from .launch_record import Inventory, LaunchRecord, labelled_jobs
from .submission import Call, QueueFull, Request
from .transaction import Transaction, recover, release_forgotten, transaction
from .wave import Wave, after, arrays_of, working

KEEPERS = 2  # that wait in the queue, so that the death of one breaks nothing
# The least that may be in the queue: keepers with the one that runs, the fit, a run and what scores it.
LEAST_ROOM = KEEPERS + 4
SHOW_SECONDS = 5.0  # between two looks of somebody who waits
HELD_BACK = "held back, for the queue takes no more jobs (cluster.max_submit)"


class SlurmLauncher(Inventory):
    """Submits one sweep's jobs, each once: what was submitted before is in jobs/slurm.json.

    Args:
        sweep: whose jobs.
        cluster: what jobs may ask for.
        live: ids of the jobs in the queue, from `slurm.live_jobs`; those submitted here are added.

    Raises:
        UserError: an earlier launcher was killed on its way, and SLURM does not take or release what it left; or
            jobs/slurm.json cannot be read.
    """

    def __init__(self, sweep: SweepDirectory, cluster: ClusterConfig, live: set[str]) -> None:
        super().__init__(sweep, live)
        self.cluster = cluster
        recover(sweep, cluster, self.record)
        if live & self.record.jobs():
            with contextlib.suppress(UserError):  # SLURM is away, and will be asked again
                release_forgotten(sweep, cluster, self.record)

    def submit(
        self, plan: Plan, units: Sequence[Unit], unscored: Sequence[RunDirectory], evaluate: bool,
        avoid: Mapping[str, tuple[str, ...]] | None = None,
    ) -> list[str]:  # fmt: skip
        """Submits training, scoring, the fit and the keepers, which depend on each other; all of it or nothing.

        Args:
            plan: gives every run its job shape and its estimate, and a branch its trunk.
            units: of runs to train, and with `evaluate` to score thereafter, in the order in which they are to start.
            unscored: trained already, to score.
            evaluate: whether there is anything to score on.
            avoid: nodes that a run is not to get, by run id.

        Returns:
            Ids of runs that were held back, for the queue of SLURM takes no more jobs; submit them again later.

        Raises:
            UserError: SLURM refuses a job, in its own words; nothing is left in the queue.
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
            wave = Wave(self, began, self.cluster, {run.run_id: run for run in plan.runs}, limits.max_array)
            held = wave.train(units, evaluate, avoid or {}, self._room(began))
            wave.score(unscored, self._room(began))
            if len(began.jobs) > before:
                with contextlib.suppress(QueueFull):  # then a keeper has it made
                    self._add_fit(began)
        for name in held:
            if (run := self.sweep.run(name)).state().reason != HELD_BACK:
                run.set_state("planned", reason=HELD_BACK, job_id=None)
        return held

    def keep(self) -> int:
        """Sees to it that two keepers wait in the queue, beside the one that runs; returns how many do.

        There are fewer where the queue of SLURM takes no more jobs.

        Raises:
            UserError: SLURM refuses them, in its own words.
        """
        if len(waiting := self._waiting_keepers()) >= KEEPERS:
            return len(waiting)
        with self._transaction(slurm_cluster.limits(self.cluster)) as began:
            return self._add_keepers(began)

    def fit(self) -> None:
        """Has the laws fitted and the report made once everything that is in the queue has ended.

        Raises:
            UserError: SLURM refuses the job, in its own words, or takes no more for now.
        """
        with self._transaction(slurm_cluster.limits(self.cluster)) as began:
            self._add_fit(began)

    def add_workers(self, folder: Path, count: int, avoid: Sequence[str] = ()) -> None:
        """More workers for a queue of runs that was submitted before; fewer where the queue of SLURM is full.

        Args:
            folder: of the queue.
            count: of workers.
            avoid: nodes that they are not to get.

        Raises:
            UserError: SLURM refuses them, in its own words.
        """
        known, limits = self.record.queues[folder.name], slurm_cluster.limits(self.cluster)
        with self._transaction(limits) as began, contextlib.suppress(QueueFull):
            room = self._room(began)
            count = min(count, limits.max_array) if room is None else min(count, limits.max_array, room)
            if count > 0:
                request = Request("queue", known.shape, avoid=tuple(avoid))
                known.workers += began.submit(request, [working(self, self.cluster, folder)] * count)

    def cancel_all(self) -> None:
        """Cancels every job of the sweep, but for the one that this process may be.

        Raises:
            UserError: SLURM does not answer.
        """
        ours = labelled_jobs(self.sweep).keys()
        self.live |= ours
        self._cancel(self.record.jobs() | ours)

    def end_keepers(self) -> None:
        """Cancels the keepers that wait."""
        self._cancel(self._waiting_keepers())

    @contextlib.contextmanager
    def _transaction(self, limits: Limits) -> Iterator[Transaction]:
        most = limits.max_submit
        room = None if most is None else max(0, most - len(slurm.live_jobs(own=True)))
        try:
            with transaction(self.sweep, self.cluster, self.record, room) as began:
                yield began
        except BaseException:
            self.record = LaunchRecord.read(self.sweep)
            raise
        self.live |= set(began.jobs)
        self._left.clear()

    def _cancel(self, jobs: Collection[str]) -> None:
        jobs = set(jobs) & self.live - {_own_job()}
        slurm.cancel(jobs)
        self.live -= jobs

    def _room(self, began: Transaction) -> int | None:
        """Jobs that may still be submitted, less those that a sweep must always be able to submit."""
        if began.room is None:
            return None
        waiting = len({*self._waiting_keepers(), *began.jobs} & set(self.record.keepers))
        return max(0, began.room - (KEEPERS - waiting) - 1)  # one: the fit

    def _add_fit(self, began: Transaction) -> None:
        waits = (self.in_queue() | set(began.jobs)) - set(self.record.keepers)
        shape = JobShape(
            0, 1, min(8.0, self.cluster.memory_gb), min(slurm_cluster.FIT_MINUTES, self.cluster.time_minutes)
        )
        call = Call(worker.finish_sweep, (str(self.sweep.path.resolve()),))
        before = self.record.fit
        (self.record.fit,) = began.submit(Request("fit", shape, after(arrays_of(waits)), light=True), [call])
        if before in self.live:
            began.superseded.append(before)

    def _add_keepers(self, began: Transaction) -> int:
        """Each waits so long that they come one by one, and not for the one before it: SLURM may hold that one up, or
        take it for running long after it has ended, as a controller does that was killed.
        """
        from ..execute import keeper

        waiting = self._waiting_keepers()
        shape = JobShape(0, 1, min(2.0, self.cluster.memory_gb), min(30, self.cluster.time_minutes))
        call = Call(keeper.keep, (str(self.sweep.path.resolve()),))
        with contextlib.suppress(QueueFull):
            while len(waiting) < KEEPERS:
                begin = f"now+{math.ceil(self.cluster.keeper_seconds * (1 + len(waiting)))}"
                waiting += began.submit(Request("keeper", shape, light=True, begin=begin), [call])
        self.record.keepers = [job for job in self.record.keepers if job in self.live - set(waiting)] + waiting
        return len(waiting)

    def _waiting_keepers(self) -> list[str]:
        return [job for job in self.record.keepers if job in self.live and job != _own_job()]


def _own_job() -> str | None:
    return slurm.job_id() if slurm.inside_job() else None


def to_start(runs: Sequence[RunDirectory], launcher: SlurmLauncher | None) -> list[RunDirectory]:
    """Runs that are not done and that no job in the queue trains: what a launch must start.

    Args:
        runs: of a sweep.
        launcher: its launcher; None on this machine, where no job outlives its launcher.
    """
    return [run for run in runs if not run.is_done() and (launcher is None or not launcher.has_job(run))]


def wait_for_slurm(sweep: SweepDirectory) -> None:
    """Returns once no job of the sweep is in the queue, keepers included; on a terminal it says how the sweep does.

    A controller that is away for a while is waited for. Ctrl-C leaves the jobs alone.

    Raises:
        UserError: jobs/slurm.json cannot be read.
    """
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
