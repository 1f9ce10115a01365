"""What a sweep has in SLURM's queue: jobs/slurm.json, and the label by which every job says whose it is.

Jobs are written down here before they may start (`transaction.py`). SLURM's comment of a job is
`isoflop:<the sweep's token>:<transaction>`, so squeue alone finds them all; the token is in jobs/label, for good.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from ...train.errors import UserError
from ...train.files import read_document, read_json, write_atomic, write_json
from ..runs import membership
from ..runs.directory import RunDirectory, SweepDirectory
from ..runs.forms import JobShape
from ..runs.queue import Queue
from . import commands as slurm

MEMORY = "keeper.json"  # in jobs/: what the keepers know of the sweep


class Memory(TypedDict, total=False):
    """jobs/keeper.json."""

    scorings: dict[str, int]  # by run id, how often it was tried
    fits: dict[str, float]  # how often, to results of what time
    over: bool


@dataclass
class QueueJobs:
    shape: JobShape
    workers: list[str] = field(default_factory=list)  # job ids, also of those that have ended


@dataclass
class LaunchRecord:
    """jobs/slurm.json: which job is for what."""

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
        """What was written last; UserError where it cannot be read: taken for empty, jobs would be submitted twice."""
        remedy = f"`isoflop doctor {sweep.path}` mends it"
        return read_document(_path(sweep), cls, remedy=remedy) if _path(sweep).exists() else cls()

    def write(self, sweep: SweepDirectory) -> None:
        write_json(_path(sweep), dataclasses.asdict(self))

    def jobs(self) -> set[str]:
        workers = {job for jobs in self.queues.values() for job in jobs.workers}
        last = set() if self.fit is None else {self.fit}
        return {*self.training.values(), *self.scoring.values(), *workers, *last, *self.keepers}


class Inventory:
    """A sweep's jobs in SLURM's queue, and which run each will train."""

    def __init__(self, sweep: SweepDirectory, live: set[str]) -> None:
        self.sweep, self.live = sweep, live
        self.record = LaunchRecord.read(sweep)
        self._left: dict[str, set[str]] = {}  # by queue, the runs that have not ended in it

    def jobs_of(self, run: RunDirectory) -> set[str]:
        """Who trains a run, or will: its own job, or the workers of the queue that it waits in."""
        for name, workers in self.queues().items():
            if workers and name not in self._left:
                queue = Queue.open(self.sweep, self.sweep.path / "jobs" / name)
                units = [*queue.left(), *queue.running(), *queue.lost()]
                self._left[name] = {run for unit in units for run in unit.runs}
            if workers and run.run_id in self._left[name]:
                return workers
        state = run.state()
        if state.state not in ("planned", "queued", "running", "preempted"):
            return set()
        named = {self.record.training.get(run.run_id), state.job_id}
        return {job for job in named if job is not None} & self.live

    def in_queue(self) -> set[str]:
        """The sweep's jobs, except keepers."""
        return (self.record.jobs() - set(self.record.keepers)) & self.live

    def queues(self) -> dict[str, set[str]]:
        """Live workers of each queue, by the name of its folder."""
        return {name: self.live.intersection(jobs.workers) for name, jobs in self.record.queues.items()}

    def to_start(self, runs: Sequence[RunDirectory]) -> list[RunDirectory]:
        return [run for run in runs if not run.is_done() and run.given_up() is None and not self.jobs_of(run)]

    def without_scoring(self, runs: Sequence[RunDirectory]) -> list[RunDirectory]:
        """Those runs that no job in the queue will score."""
        return [run for run in runs if self.record.scoring.get(run.run_id) not in self.live]


def is_unattended(sweep: SweepDirectory, live: set[str]) -> bool:
    """Whether a sweep that is not over has no keeper in the queue: what is lost or held back would not go on."""
    keepers, memory = LaunchRecord.read(sweep).keepers, read_json(sweep.path / "jobs" / MEMORY, Memory) or {}
    return bool(keepers) and live.isdisjoint(keepers) and not memory.get("over") and not membership.is_stopped(sweep)


def label(sweep: SweepDirectory, transaction: str) -> str:
    """The comment of a job; the caller holds the sweep."""
    if (token := _token(sweep)) is None:
        token = os.urandom(6).hex()
        write_atomic(_label_path(sweep), token + "\n")
    return f"isoflop:{token}:{transaction}"


def labelled_jobs(sweep: SweepDirectory) -> dict[str, str]:
    """A sweep's jobs in the queue, each with its transaction."""
    if (token := _token(sweep)) is None:
        return {}
    answer = slurm.ask("squeue", "-h", "-r", "-o", "%i %k")
    if answer.returncode:
        raise UserError(f"squeue does not answer ({slurm.words(answer)}); try later")
    found = re.findall(rf"^(\S+) .*isoflop:{token}:(\w+)", answer.stdout, re.MULTILINE)
    return dict(found)


def strays(sweep: SweepDirectory) -> set[str]:
    """Jobs of a sweep that its record does not know: a launcher was killed while it submitted them.

    Except for keepers they are on hold. The next launcher cancels them, or whoever holds the sweep may.
    """
    return labelled_jobs(sweep).keys() - LaunchRecord.read(sweep).jobs()


class _Named:
    """Stands for anything that a pickle names."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments = arguments


class _Reader(pickle.Unpickler):
    """Reads a submitted job without importing what it names."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Named,), {"__module__": module})


def submitted_call(pickled: Path) -> tuple[str, tuple[Any, ...]]:
    """The name of the function that a submitted job will call, and its arguments; ValueError where there is none."""
    try:
        with pickled.open("rb") as file:
            call = _Reader(file).load().function
        return call.function.__name__, call.arguments
    except (OSError, EOFError, AttributeError, TypeError, IndexError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{pickled} cannot be read") from error


def rebuilt(sweep: SweepDirectory) -> LaunchRecord:
    """A record of what is in the queue, from labels and from what each job will call."""
    record, folder = LaunchRecord(), sweep.path / "jobs"
    shapes = {run["run_id"]: run["shape"] for run in sweep.plan()["runs"]}
    for job, transaction in sorted(labelled_jobs(sweep).items()):
        try:
            call = submitted_call(folder / f"slurm-{transaction}" / f"{job}_submitted.pkl")
        except ValueError:
            continue  # it stays a stray
        match call:  # `train`, `train_unit` and `work_queue`: jobs that earlier versions have submitted
            case "keep", _:
                record.keepers.append(job)
            case "finish_sweep", _:
                record.fit = job
            case "evaluate_runs", (_, names):
                record.scoring.update(dict.fromkeys(names, job))
            case "train_run", (path, *_):
                record.training[Path(path).name] = job
            case "train" | "train_unit", (_, paths, *_):
                record.training.update(dict.fromkeys((Path(path).name for path in paths), job))
            case "work" | "work_queue", (_, path, *_) if (folder / Path(path).name).is_dir():
                name = Path(path).name
                if name not in record.queues:
                    unit = Queue.open(sweep, folder / name).units[0]
                    record.queues[name] = QueueJobs(JobShape(**shapes[unit.runs[0]]))
                record.queues[name].workers.append(job)
    for script in folder.glob("slurm-*/*_submission.sh"):
        if found := re.search(r"^#SBATCH --chdir=(.+)$", script.read_text(encoding="utf-8"), re.MULTILINE):
            record.folder = shlex.split(found[1])[0]
            break
    return record


def _token(sweep: SweepDirectory) -> str | None:
    try:
        return _label_path(sweep).read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{_label_path(sweep)} cannot be read ({error}); without it no job of the sweep is found"
        ) from error


def _label_path(sweep: SweepDirectory) -> Path:
    return sweep.path / "jobs" / "label"


def _path(sweep: SweepDirectory) -> Path:
    return sweep.path / "jobs" / "slurm.json"
