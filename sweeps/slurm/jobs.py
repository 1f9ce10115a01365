"""A sweep's jobs in SLURM's queue, found by their comment `isoflop:<token>:<kind>:<shape>` in squeue's answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, cast

from ...train.errors import UserError, counted
from ...train.files import read_document, read_json
from ..runs import membership
from ..runs.directory import SweepDirectory
from ..runs.forms import JobShape
from . import commands as slurm

LAUNCH = "launch.json"  # in jobs/: the token of the sweep's jobs, and where it was first launched from
MEMORY = "keeper.json"  # in jobs/: what the passes remember
HELD = ("JobHeldUser", "JobHeldAdmin")  # squeue's reasons for a job on hold
STRANDED = re.compile(r"requeued.held", re.IGNORECASE)  # of squeue's reasons: SLURM could not launch the job
Kind = Literal["worker", "keeper", "fit"]


class Memory(TypedDict, total=False):
    """jobs/keeper.json."""

    fits: dict[str, float]  # how often the laws were fitted, and to results of what time
    over: bool  # nothing is left to do


@dataclass(frozen=True)
class LaunchFile:
    """jobs/launch.json."""

    token: str
    folder: str  # where the sweep was first launched from, and where every job starts


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep in SLURM's queue."""

    name: str
    kind: Kind
    shape: JobShape | None
    waits: bool
    held: bool  # by a user or an administrator
    stranded: bool  # on hold because SLURM could not launch it
    reason: str
    suspended: bool


def jobs_of(sweep: SweepDirectory, patience: float = slurm.PATIENCE) -> list[SweepJob]:
    """Return a sweep's jobs in SLURM's queue. Raises UserError if SLURM is silent or has jobs of an earlier version."""
    if not (sweep.path / "jobs" / LAUNCH).exists():
        _refuse_old_jobs(sweep, patience)
        return []
    pattern = re.compile(rf"isoflop:{read_launch(sweep).token}:(worker|keeper|fit):(\S*)")
    jobs = []
    for job in slurm.queue(patience=patience):
        if match := pattern.search(job.comment):
            stranded = STRANDED.search(job.reason) is not None
            kind, held, shape = cast(Kind, match[1]), job.reason in HELD, shape_of(match[2])
            jobs.append(SweepJob(job.name, kind, shape, job.is_pending, held, stranded, job.reason, job.is_suspended))
    return jobs


def read_launch(sweep: SweepDirectory) -> LaunchFile:
    path = sweep.path / "jobs" / LAUNCH
    remedy = f"run `isoflop doctor {sweep.path}`, which removes it, and start the sweep again"
    return read_document(path, LaunchFile, remedy=remedy)


def _refuse_old_jobs(sweep: SweepDirectory, patience: float) -> None:
    """Raise UserError if jobs of an earlier version are queued, which would train the same runs."""
    label = sweep.path / "jobs" / "label"
    if not label.exists():
        return
    mark = f"isoflop:{label.read_text(encoding='utf-8', errors='replace').strip()}:"
    if old := [job.name for job in slurm.queue(patience=patience) if mark in job.comment]:
        raise UserError(
            f"{counted(len(old), 'queued job')} of {sweep.path} came from an earlier version: "
            f"{', '.join(old[:5])}; wait for them, or cancel them with scancel and start the sweep again"
        )


def label_of(shape: JobShape) -> str:
    """Return a shape as text: 2x4-g1-c4-m32.0-t240 for nodes x ranks, GPUs, CPUs and GB of a rank, and minutes."""
    ranks, memory = f"{shape.nodes}x{shape.ranks_per_node}", float(shape.memory_gb)
    return f"{ranks}-g{shape.gpus}-c{shape.cpus}-m{memory!r}-t{shape.time_minutes}"


def shape_of(label: str) -> JobShape | None:
    """Parse a label written by `label_of`; return None if it is invalid."""
    match = re.fullmatch(r"(\d+)x(\d+)-g(\d+)-c(\d+)-m([\d.e+-]+)-t(\d+)", label)
    if match is None:
        return None
    nodes, ranks, gpus, cpus, minutes = (int(match[place]) for place in (1, 2, 3, 4, 6))
    return JobShape(gpus, cpus, float(match[5]), minutes, nodes, ranks)


def submitted_workers(sweep: SweepDirectory) -> dict[str, tuple[JobShape, Path]]:
    """Map the job id of every worker ever submitted to its shape and the folder of its files."""
    workers = dict[str, tuple[JobShape, Path]]()
    for folder in (sweep.path / "jobs").glob("worker-*"):
        if (shape := shape_of(folder.name.removeprefix("worker-").rpartition("-")[0])) is not None:
            jobs = (path.name.removesuffix("_submitted.pkl") for path in folder.glob("*_submitted.pkl"))
            workers |= dict.fromkeys(jobs, (shape, folder))
    return workers


def is_unattended(sweep: SweepDirectory, jobs: Iterable[SweepJob]) -> bool:
    """Return whether a sweep on SLURM that is neither over nor cancelled has no keeper among its `jobs`."""
    if not (sweep.path / "jobs" / LAUNCH).exists() or membership.is_stopped(sweep):
        return False
    memory = read_json(sweep.path / "jobs" / MEMORY, Memory) or {}
    return not memory.get("over") and not any(job.kind == "keeper" for job in jobs)
