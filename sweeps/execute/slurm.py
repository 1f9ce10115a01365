"""A sweep's jobs on SLURM: workers of a shape, two keepers that wait in the queue, and the fit.

Nothing on a login node has to live: a keeper is a tiny job that begins every `cluster.keeper_seconds`, makes a pass
(`controller.py`), and ends. Whoever uses a backend holds the sweep.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ...train.errors import UserError
from ...train.files import read_json, write_json
from ..config import ClusterConfig
from ..runs.directory import SweepDirectory, own_job
from ..runs.forms import JobShape
from ..runs.journal import Started
from ..runs.lease import Death
from ..slurm import cluster as slurm_cluster
from ..slurm import commands as slurm
from ..slurm import snapshot
from ..slurm.jobs import LAUNCH, MEMORY, LaunchFile, Memory, jobs_of, label_of, read_launch, submitted_workers
from ..slurm.submit import Call, QueueFull, Request, Submission, is_held
from .controller import KEEPERS, Job, Limits
from .worker import Claims, Launch

LEAST_ROOM = KEEPERS + 3  # jobs that must be allowed in the queue: keepers with the one that runs, the fit, a worker
FITS = 3  # times that the laws are fitted to the same results
RESULTS = ("runs/*/summary.json", "runs/*/eval/*.json")
SHOW_SECONDS = 5.0  # between two looks at the states for a user who waits


class Calls(NamedTuple):
    """What jobs call."""

    work: Callable[..., None]  # a Launch
    keep: Callable[..., None]  # path of the sweep
    fit: Callable[..., None]  # path of the sweep


class SlurmBackend:
    """The queue of SLURM, as far as one sweep is concerned; whoever uses it holds the sweep."""

    marks_queued = True

    def __init__(self, sweep: SweepDirectory, cluster: ClusterConfig, calls: Calls) -> None:
        self.sweep, self.cluster, self.calls = sweep, cluster, calls
        self.memory: dict[str, Any] = read_json(sweep.path / "jobs" / MEMORY, Memory) or {}
        self.started = Counter[str]()  # jobs of each kind that this process has submitted

    @cached_property
    def launch(self) -> LaunchFile:
        """The sweep's label, which is made at its first launch."""
        path = self.sweep.path / "jobs" / LAUNCH
        if not path.exists():
            write_json(path, asdict(LaunchFile(os.urandom(6).hex(), os.getcwd())))
        return read_launch(self.sweep)

    def jobs(self) -> list[Job]:
        jobs = jobs_of(self.sweep)
        if stranded := [job.name for job in jobs if job.stranded]:
            slurm.release(stranded)
        as_asked = is_held(self.cluster)  # the user wants them held, and releases them
        return [
            Job(job.name, job.kind, job.shape, job.waits, job.held and not as_asked)
            for job in jobs
            if job.name != own_job()
        ]

    def limits(self) -> Limits:
        limits = slurm_cluster.limits(self.cluster)
        if limits.max_submit is not None and limits.max_submit < LEAST_ROOM:
            raise UserError(
                f"{limits.max_submit} jobs may be in the queue at once, by cluster.max_submit or SLURM's own limits; "
                f"it must be {LEAST_ROOM} or more: three keepers, the fit and a worker"
            )
        most = min(self.cluster.array_parallelism, limits.max_array)
        room = math.inf
        if limits.max_submit is not None:
            room = max(0, limits.max_submit - len(slurm.queue(own=True)) - 1)  # one: the fit
        return Limits(lambda shape: most, room, KEEPERS, 60 * self.cluster.queue_minutes)

    def explain(self, start: Started) -> Death:
        return slurm.death_of(start.job_id, start.host)

    def stillborn(self) -> list[tuple[str, JobShape, Death]]:
        """Return the workers that ended badly before they claimed anything, each once; see `Backend`."""
        live = {job.name for job in slurm.queue()}
        dead = {job: place for job, place in submitted_workers(self.sweep).items() if job not in live}
        empty = {job: place for job, place in dead.items() if Claims(place[1], job).count()}
        outcomes, found = slurm.outcomes(empty), list[tuple[str, JobShape, Death]]()
        for job, (shape, folder) in empty.items():
            death = slurm.death_of(job, None, outcomes)
            # One that has completed found no task, and one that was told to stop has not failed.
            if outcomes.get(job, ("",))[0] != "COMPLETED" and death.cause not in ("preempted", "time_limit"):
                found.append((job, shape, Death(death.cause, f"{death.reason}; {self._last_words(folder, job)}")))
        return found

    def start_workers(self, shape: JobShape, count: int, avoid: tuple[str, ...] = ()) -> None:
        label = label_of(shape)
        folder = self._folder(f"worker-{label}")
        launch = Launch(str(self.sweep.path.resolve()), shape, str(folder))
        try:
            self._submit("worker", shape, Call(self.calls.work, (launch,)), folder, count, label=label, avoid=avoid)
        except QueueFull as error:
            print(f"{str(error).rpartition('; ')[0]}; the keeper tries again", flush=True)

    def start_keepers(self, count: int) -> None:
        """Submit keepers, each with a time to begin: one that SLURM holds up holds up no other."""
        shape = JobShape(0, 1, min(2.0, self.cluster.memory_gb), min(30, self.cluster.time_minutes))
        call = Call(self.calls.keep, (str(self.sweep.path.resolve()),))
        for number in range(KEEPERS - count, KEEPERS):
            begin = f"now+{math.ceil(self.cluster.keeper_seconds * (1 + number))}"
            self._submit("keeper", shape, call, self._folder("keeper"), light=True, begin=begin)

    def fit(self) -> bool:
        """Have the laws fitted if results are newer than the table. Returns True if that was due, or is under way."""
        if any(job.kind == "fit" for job in self.jobs()):
            return True
        newest = max((_written(file) for pattern in RESULTS for file in self.sweep.path.glob(pattern)), default=0.0)
        table, law = _written(self.sweep.path / "table.csv"), _written(self.sweep.path / "fit" / "law.json")
        tried = self.memory.get("fits") or {}
        tries = tried.get("tries", 0) if tried.get("newest") == newest else 0
        # Not that the table is older than the law: another process may be writing both.
        if newest == 0.0 or newest <= min(table, law) or tries >= FITS:
            return False
        minutes = min(slurm_cluster.FIT_MINUTES, self.cluster.time_minutes)
        shape = JobShape(0, 1, min(8.0, self.cluster.memory_gb), minutes)
        call = Call(self.calls.fit, (str(self.sweep.path.resolve()),))
        with contextlib.suppress(QueueFull):  # a later pass asks again
            self._submit("fit", shape, call, self._folder("fit"), light=True)
            self.memory["fits"] = {"newest": newest, "tries": tries + 1}
        return True

    def remember(self, over: bool) -> None:
        """Write down what was tried how often, and end the keepers of a sweep that is over."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_json(self.sweep.path / "jobs" / MEMORY, self.memory | {"over": over, "when": when})
        if over:
            slurm.cancel(job.name for job in self.jobs() if job.waits or job.held)

    def cancel_all(self) -> None:
        """Cancel the sweep's jobs, except this process."""
        slurm.cancel(job.name for job in self.jobs())

    def _folder(self, name: str) -> Path:
        # Never a folder of an earlier request: where job ids start again, a job would find another's files there.
        return self.sweep.path.resolve() / "jobs" / f"{name}-{os.urandom(4).hex()}"

    def _submit(
        self, kind: str, shape: JobShape, call: Call, folder: Path, count: int = 1, label: str = "", **options: Any
    ) -> None:
        request = Request(kind, shape, f"isoflop:{self.launch.token}:{kind}:{label}", **options)
        place = Path(self.launch.folder)
        where = Submission(self.sweep.path.name, self.cluster, folder, place, snapshot.take(self.sweep))
        self.started[kind] += len(where.submit(request, [call] * count))

    def _last_words(self, folder: Path, job: str) -> str:
        """Return what a job's log says of its end, or that there is none: its node may not see the sweep."""
        if not (logs := sorted(folder.glob(f"{job}_*log.*"))):
            return f"it left no log in {folder}: does its node see that folder? All nodes must share it"
        errors = (log.read_text(encoding="utf-8", errors="replace") for log in logs if log.suffix == ".err")
        first = next((words for text in errors if (words := slurm.first_to_end(text)) is not None), None)
        return first or f"see {logs[-1]}"


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def wait_for_slurm(sweep: SweepDirectory) -> None:
    """Return once no job of the sweep is in the queue, keepers included. Ctrl-C leaves the jobs alone."""
    shown, looked = "", -math.inf
    try:
        while True:
            with contextlib.suppress(UserError):
                if not jobs_of(sweep):
                    return
            if sys.stdout.isatty() and time.monotonic() - looked > SHOW_SECONDS:
                looked, before = time.monotonic(), shown
                counts = Counter(run.state().state for run in sweep.runs())
                shown = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
                if shown != before:
                    print(shown, flush=True)
            time.sleep(1.0)
    except KeyboardInterrupt:
        print(f"\nno longer waiting; the jobs go on, see `isoflop status {sweep.path}`")
        raise
