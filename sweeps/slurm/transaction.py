"""Everything that one launch submits, or nothing of it: jobs on hold, written down, released.

The order is: say in jobs/slurm.json that a transaction begins; submit on hold; write down all jobs, which count from
then on; write the runs' states; release. Whatever kills the launcher on its way, `recover` finishes the rest. Keepers
are not on hold; one that begins before its launcher has ended waits for the sweep's lock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...train.errors import UserError
from ...train.files import read_json, write_json
from ..config import ClusterConfig
from ..runs import states
from ..runs.directory import RunDirectory, SweepDirectory, own_job
from ..runs.queue import Queue
from . import commands as slurm
from . import snapshot
from .record import LaunchRecord, label, labelled_jobs
from .submit import Call, QueueFull, Request, Submission, is_held


class Transaction(Submission):
    """An open transaction; `record` is what will be written down."""

    def __init__(self, sweep: SweepDirectory, cluster: ClusterConfig, record: LaunchRecord, room: int) -> None:
        self.sweep, self.record, self._room = sweep, record, room
        self.queued: dict[str, str | None] = {}  # by run id, the job of what waits; None: a queue's workers
        self.superseded: list[str] = []  # jobs that need not start any more
        name = os.urandom(4).hex()
        record.folder = record.folder or os.getcwd()
        # Never a folder of an earlier submission: where job ids start anew, a job would find another's files there.
        folder = sweep.path.resolve() / "jobs" / f"slurm-{name}"
        super().__init__(
            sweep.path.name, label(sweep, name), cluster, folder, Path(record.folder), snapshot.take(sweep)
        )
        record.begun = name
        record.write(sweep)

    @property
    def room(self) -> int:
        return max(0, self._room - len(self.jobs))

    def submit(self, request: Request, calls: Sequence[Call]) -> list[str]:
        if len(calls) > self.room:
            raise QueueFull("the queue takes no more jobs (cluster.max_submit); sweep again later")
        return super().submit(request, calls)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Where the queue is full before the last of what is submitted herein, none of it stays."""
        before = len(self.jobs)
        try:
            yield
        except QueueFull:
            slurm.cancel(self.jobs[before:])
            del self.jobs[before:]
            raise

    def commit(self) -> None:
        if self.doubtful:
            slurm.cancel(_jobs_of(self.sweep, self.record.begun) - set(self.jobs))
        self.record.held = sorted({job.split("_")[0] for job in self.jobs})
        self.record.begun = None
        self.record.write(self.sweep)
        finish(self.sweep, self.cluster, self.record)
        if self.superseded:
            slurm.ask("scancel", "--state=PENDING", *self.superseded)


@contextlib.contextmanager
def transaction(
    sweep: SweepDirectory, cluster: ClusterConfig, record: LaunchRecord, room: int
) -> Iterator[Transaction]:
    """What is submitted within is submitted together, or not at all; `record` is as it is on disk."""
    began = Transaction(sweep, cluster, record, room)
    try:
        yield began
    except BaseException:  # Ctrl-C too
        slurm.cancel(began.jobs)
        with contextlib.suppress(UserError):
            recover(sweep, cluster, LaunchRecord.read(sweep))
        raise
    began.commit()


def recover(sweep: SweepDirectory, cluster: ClusterConfig, record: LaunchRecord) -> None:
    """Finishes what a killed launcher left: jobs that it had not written down are cancelled, the others released."""
    if record.begun is not None:
        # Among them may be this very process: a keeper is not on hold, and comes to see what the launcher left.
        slurm.cancel(_jobs_of(sweep, record.begun) - {own_job()})
        record.begun = None
        record.write(sweep)
    finish(sweep, cluster, record)


def finish(sweep: SweepDirectory, cluster: ClusterConfig, record: LaunchRecord) -> None:
    """What is left to do once the record is written; it may be repeated."""
    for run, job in _promised(sweep, record):
        states.queue(run, job)
    retire_queues(sweep, record)
    if record.held:
        if not is_held(cluster) and (said := slurm.release(record.held)) is not None:
            raise UserError(
                f"SLURM does not release the sweep's jobs ({said}), and they are on hold; sweep again later"
            )
        record.held = []
        record.write(sweep)


def _promised(sweep: SweepDirectory, record: LaunchRecord) -> Iterator[tuple[RunDirectory, str | None]]:
    """Runs whose jobs are held and whose states do not say so yet, with their jobs."""
    held = set(record.held)
    for name, job in record.training.items():
        run = sweep.run(name)
        # A state that names the job was written before, and the job may have gone on from there.
        if job.split("_")[0] in held and run.state().job_id != job and not run.is_done():
            yield run, job
    for folder, jobs in record.queues.items():
        if not jobs.workers or not held.issuperset(worker.split("_")[0] for worker in jobs.workers):
            continue  # it is not new, though some of its workers may be
        for unit in Queue.open(sweep, sweep.path / "jobs" / folder).left():
            for run in map(sweep.run, unit.runs):
                state = run.state()
                if (state.state, state.job_id) != ("queued", None):
                    yield run, None


def release_forgotten(sweep: SweepDirectory, cluster: ClusterConfig, record: LaunchRecord) -> None:
    """Releases jobs that SLURM holds because it could not launch them, or forgot to have released.

    A job on hold as if by its user is released only once, for it may be the user who holds it.
    """
    known = sweep.path / "jobs" / "released.json"
    before = set((read_json(known) or {}).get("jobs") or [])
    stranded, held = slurm.on_hold()
    forgotten = set() if is_held(cluster) else held - before
    if wanted := (stranded | forgotten) & record.jobs():
        write_json(known, {"jobs": sorted(before | (forgotten & wanted))})
        slurm.release(wanted)


def retire_queues(sweep: SweepDirectory, record: LaunchRecord) -> None:
    """Puts aside queues of runs that the record does not know: nobody will work through them."""
    for folder in (sweep.path / "jobs").glob("queue-*"):
        if folder.name not in record.queues:
            folder.rename(folder.with_name(f"past-{folder.name}"))


def _jobs_of(sweep: SweepDirectory, transaction: str | None) -> set[str]:
    return {job for job, name in labelled_jobs(sweep).items() if name == transaction}
