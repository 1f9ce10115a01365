"""What a sweep has in SLURM's queue: jobs/slurm.json, and the label by which every job says whose it is.

Special here:
- jobs are written down here before they may start (`transaction.py`); keepers alone may have started by then;
- SLURM's comment of a job is `isoflop:<the sweep's token>:<transaction>`, so that squeue alone finds them all. The
  token is in jobs/label, apart from the record, and for good: a damaged record loses no job, nor does a folder that is
  moved.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...train.errors import UserError
from ...train.files import write_atomic, write_json
from ..execute.queue import Queue
from ..plan.sweep_plan import JobShape
from ..runs.directory import RunDirectory, SweepDirectory
from . import commands as slurm
from .placement import shape_in


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
        """What was written last; nothing where nothing was.

        Raises:
            UserError: the file cannot be read. To take it for empty would submit again what is in the queue.
        """
        path = _path(sweep)
        try:
            return cls._of(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{path} cannot be read ({why}); `isoflop doctor {sweep.path}` mends it") from error

    @classmethod
    def _of(cls, known: dict[str, Any]) -> LaunchRecord:
        values = {item.name: known[item.name] for item in dataclasses.fields(cls) if item.name in known}
        values["queues"] = {
            name: QueueJobs(JobShape(**jobs["shape"]), jobs["workers"])
            for name, jobs in known.get("queues", {}).items()
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
    """The comment of a job; the caller holds the sweep."""
    if (token := _token(sweep)) is None:
        token = os.urandom(6).hex()
        write_atomic(_label_path(sweep), token + "\n")
    return f"isoflop:{token}:{transaction}"


def labelled_jobs(sweep: SweepDirectory) -> dict[str, str]:
    """Jobs in the queue that were submitted for a sweep, each with its transaction.

    Raises:
        UserError: SLURM does not answer.
    """
    if (token := _token(sweep)) is None:
        return {}
    answer = slurm.ask("squeue", "-h", "-r", "-o", "%i %k")
    if answer.returncode:
        raise UserError(f"squeue does not answer ({slurm.words(answer)}); try later")
    found = re.findall(rf"^(\S+) .*isoflop:{token}:(\w+)", answer.stdout, re.MULTILINE)
    return dict(found)


def strays(sweep: SweepDirectory) -> set[str]:
    """Jobs of a sweep in the queue that its record does not know: a launcher was killed while it submitted them.

    All but keepers are on hold and have done nothing. The next launcher cancels them, or whoever holds the sweep may.

    Raises:
        UserError: SLURM does not answer, or the record cannot be read.
    """
    return labelled_jobs(sweep).keys() - LaunchRecord.read(sweep).jobs()


def rebuilt(sweep: SweepDirectory) -> LaunchRecord:
    """A record of what is in the queue, from the labels of the jobs and from what each will call.

    Raises:
        UserError: SLURM does not answer, or the plan cannot be read.
    """
    record, folder = LaunchRecord(), sweep.path / "jobs"
    shapes = {run["run_id"]: run["shape"] for run in sweep.plan()["runs"]}
    for job, transaction in sorted(labelled_jobs(sweep).items()):
        try:
            call = pickle.loads((folder / f"slurm-{transaction}" / f"{job}_submitted.pkl").read_bytes()).function
        except (OSError, ValueError, EOFError, AttributeError, ImportError, pickle.UnpicklingError):
            continue  # it stays a stray
        match call.function.__name__, call.arguments:
            case "keep", _:
                record.keepers.append(job)
            case "finish_sweep", _:
                record.fit = job
            case "evaluate_runs", (_, names):
                record.scoring.update(dict.fromkeys(names, job))
            case "train_run", (path, *_):
                record.training[Path(path).name] = job
            case "train_unit", (_, paths, *_):
                record.training.update(dict.fromkeys((Path(path).name for path in paths), job))
            case "work_queue", (_, path, *_) if (folder / Path(path).name).is_dir():
                name = Path(path).name
                if name not in record.queues:
                    unit = Queue.open(sweep, folder / name).units[0]
                    record.queues[name] = QueueJobs(shape_in(unit, JobShape(**shapes[unit.runs[0]])))
                record.queues[name].workers.append(job)
    for script in folder.glob("slurm-*/*_submission.sh"):
        if found := re.search(r"^#SBATCH --chdir=(.+)$", script.read_text(encoding="utf-8"), re.MULTILINE):
            record.folder = shlex.split(found[1])[0]
            break
    return record


def _token(sweep: SweepDirectory) -> str | None:
    """What the labels of a sweep's jobs have in common; None before its first launch.

    Raises:
        UserError: it cannot be read.
    """
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
