"""What a sweep has in SLURM's queue: jobs/slurm.json, and the label by which every job says whose it is.

Special here:
- jobs are submitted on hold, written down here, and then released. A launcher that is killed on the way leaves jobs
  that have done nothing: those that are written down are released by the next launcher, the others are cancelled;
- SLURM's comment of a job is `isoflop:<hash of the sweep's path>:<transaction>`, so that squeue alone finds them all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..train.errors import UserError
from ..train.files import read_json, write_json
from . import slurm
from .plan import JobShape
from .queue import Queue
from .runs import RunDirectory, SweepDirectory


@dataclass
class QueueJobs:
    """The workers of one queue of runs (`queue.py`)."""

    shape: JobShape
    workers: list[str] = field(default_factory=list)  # job ids, also of those that have ended


@dataclass
class LaunchRecord:
    """jobs/slurm.json: which job is for what. Read by anybody, written by whoever holds the sweep."""

    training: dict[str, str] = field(default_factory=dict)  # run id -> job id, of runs that are an array task
    scoring: dict[str, str] = field(default_factory=dict)  # run id -> job id
    queues: dict[str, QueueJobs] = field(default_factory=dict)  # by the name of the queue's folder in jobs/
    fit: str | None = None
    keepers: list[str] = field(default_factory=list)
    folder: str | None = None  # where the sweep was first launched from, and every job starts
    begun: str | None = None  # transaction whose jobs are not written down yet
    held: list[str] = field(default_factory=list)  # jobs that are written down and not released yet

    @classmethod
    def read(cls, sweep: SweepDirectory) -> LaunchRecord:
        """What was written last; nothing where there is none."""
        known = read_json(_path(sweep)) or {}
        values: dict[str, Any] = {item.name: known[item.name] for item in dataclasses.fields(cls) if item.name in known}
        values["queues"] = {
            name: QueueJobs(JobShape(**jobs["shape"]), jobs["workers"])
            for name, jobs in (known.get("queues") or {}).items()
        }
        return cls(**values)

    def write(self, sweep: SweepDirectory) -> None:
        write_json(_path(sweep), dataclasses.asdict(self))

    def jobs(self) -> set[str]:
        """Every job that the record knows, keepers included."""
        workers = {job for jobs in self.queues.values() for job in jobs.workers}
        last = set() if self.fit is None else {self.fit}
        return {*self.training.values(), *self.scoring.values(), *workers, *last, *self.keepers}


class Inventory:
    """What a sweep has in the queue of SLURM, and who sees to its runs.

    Args:
        sweep: whose jobs.
        live: ids of this user's jobs in the queue, from `slurm.live_jobs`.
    """

    def __init__(self, sweep: SweepDirectory, live: set[str]) -> None:
        self.sweep, self.live = sweep, live
        self.record = LaunchRecord.read(sweep)
        self._left: dict[str, set[str]] = {}  # by queue, the runs that have not ended in it

    def has_job(self, run: RunDirectory) -> bool:
        """Whether a job in the queue trains a run, or will, or is about to say what became of it."""
        return bool(self.jobs_of(run))

    def jobs_of(self, run: RunDirectory) -> set[str]:
        """The jobs of which one trains a run, or will: its own, or the workers of the queue that it is in."""
        for name, workers in self.queues().items():
            if workers and run.run_id in self._left_in(name):
                return workers
        state = run.state()
        if state.state not in ("planned", "queued", "running", "preempted"):
            return set()
        named = {self.record.training.get(run.run_id), state.job_id}
        return {job for job in named if job is not None} & self.live

    def in_queue(self) -> set[str]:
        """Jobs of the sweep in the queue, but for keepers."""
        return (self.record.jobs() - set(self.record.keepers)) & self.live

    def queues(self) -> dict[str, set[str]]:
        """Live workers of each queue of runs, by the name of its folder in jobs/."""
        return {name: self.live.intersection(jobs.workers) for name, jobs in self.record.queues.items()}

    def to_score(self, runs: Sequence[RunDirectory]) -> list[RunDirectory]:
        """Of runs that have no scores yet, those that no scoring job in the queue will score."""
        return [run for run in runs if self.record.scoring.get(run.run_id) not in self.live]

    def _left_in(self, name: str) -> set[str]:
        if name not in self._left:
            queue = Queue.open(self.sweep, self.sweep.path / "jobs" / name)
            self._left[name] = {run for unit in (*queue.left(), *queue.running(), *queue.lost()) for run in unit.runs}
        return self._left[name]


def label(sweep: SweepDirectory, transaction: str) -> str:
    """The comment of a job."""
    return f"isoflop:{_hash(sweep)}:{transaction}"


def labelled_jobs(sweep: SweepDirectory) -> dict[str, str]:
    """Jobs in the queue that were submitted for a sweep, each with its transaction.

    Raises:
        UserError: SLURM does not answer.
    """
    answer = slurm.ask("squeue", "-h", "-r", "-o", "%i %k")
    if answer.returncode:
        raise UserError(f"squeue does not answer ({slurm.words(answer)}); try later")
    found = re.findall(rf"^(\S+) .*isoflop:{_hash(sweep)}:(\w+)", answer.stdout, re.MULTILINE)
    return dict(found)


def strays(sweep: SweepDirectory) -> set[str]:
    """Jobs of a sweep in the queue that its record does not know: a launcher was killed while it submitted them.

    They are on hold and have done nothing; the next launcher cancels them, or whoever holds the sweep may.

    Raises:
        UserError: SLURM does not answer.
    """
    return labelled_jobs(sweep).keys() - LaunchRecord.read(sweep).jobs()


def _hash(sweep: SweepDirectory) -> str:
    return hashlib.sha256(str(sweep.path.resolve()).encode()).hexdigest()[:12]


def _path(sweep: SweepDirectory) -> Path:
    return sweep.path / "jobs" / "slurm.json"
