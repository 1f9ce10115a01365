"""A sweep's jobs on SLURM: workers of a shape, two keepers that wait in the queue, and the fit.

A keeper is a tiny job every `cluster.keeper_seconds` that makes one pass (`controller.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ...train.errors import UserError
from ...train.files import read_json, write_json
from .. import prepare
from ..config import ClusterConfig
from ..runs import membership
from ..runs.directory import SweepDirectory, own_job
from ..runs.forms import JobShape
from ..runs.journal import Started
from ..runs.lease import Death
from ..slurm import cluster as slurm_cluster
from ..slurm import commands as slurm
from ..slurm import snapshot
from ..slurm.jobs import LAUNCH, MEMORY, Kind, LaunchFile, Memory, jobs_of, label_of, read_launch, submitted_workers
from ..slurm.submit import QueueFull, Request, Submission, is_held
from . import controller, worker
from .controller import KEEPERS, Job, Limits
from .hopeless import Judge
from .worker import Claims, Launch

LOCK_SECONDS = 120.0  # that another pass, or a command, may hold the sweep
LEAST_ROOM = KEEPERS + 3  # jobs that must be allowed in the queue: keepers with the one that runs, the fit, a worker
FITS = 3  # times that the laws are fitted to the same results
RESULTS = ("runs/*/summary.json", "runs/*/eval/*.json")


class SlurmBackend:
    """One sweep's jobs in SLURM's queue; the caller holds the sweep's lock."""

    marks_queued = True

    def __init__(self, sweep: SweepDirectory, cluster: ClusterConfig) -> None:
        self.sweep, self.cluster = sweep, cluster
        self.memory: dict[str, Any] = read_json(sweep.path / "jobs" / MEMORY, Memory) or {}
        self.started = Counter[str]()  # jobs of each kind that this process has submitted

    @cached_property
    def launch(self) -> LaunchFile:
        """Return launch.json, written once: the token in the jobs' comments, and the folder where jobs start."""
        path = self.sweep.path / "jobs" / LAUNCH
        if not path.exists():
            write_json(path, asdict(LaunchFile(os.urandom(6).hex(), os.getcwd())))
        return read_launch(self.sweep)

    def jobs(self) -> list[Job]:
        jobs = jobs_of(self.sweep)
        if stranded := [job.name for job in jobs if job.stranded]:
            slurm.release(stranded)
        as_asked = is_held(self.cluster)  # the user holds them, and releases them
        return [
            Job(job.name, job.kind, job.shape, job.waits, job.held and not as_asked)
            for job in jobs
            if job.name != own_job()
        ]

    def limits(self) -> Limits:
        limits = slurm_cluster.limits(self.cluster)
        if limits.max_submit is not None and limits.max_submit < LEAST_ROOM:
            raise UserError(
                f"at most {limits.max_submit} jobs may be in the queue at once, by cluster.max_submit or SLURM's own "
                f"limits; it must be {LEAST_ROOM} or more: three keepers, the fit and a worker"
            )
        at_once = min(self.cluster.array_parallelism, limits.max_array)
        room = math.inf
        if limits.max_submit is not None:
            room = max(0, limits.max_submit - len(slurm.queue(own=True)) - 1)  # one: the fit
        return Limits(lambda shape: at_once, room, KEEPERS, 60 * self.cluster.queue_minutes)

    def explain(self, start: Started) -> Death:
        return slurm.death_of(start.job_id, start.host)

    def stillborn(self) -> list[tuple[str, JobShape, Death]]:
        live = {job.name for job in slurm.queue()}
        dead = {job: place for job, place in submitted_workers(self.sweep).items() if job not in live}
        empty = {job: place for job, place in dead.items() if Claims(place[1], job).count()}
        outcomes, failures = slurm.outcomes(empty), list[tuple[str, JobShape, Death]]()
        for job, (shape, folder) in empty.items():
            death = slurm.death_of(job, None, outcomes)
            # One that has completed found no task, and one that was told to stop has not failed.
            if outcomes.get(job, ("",))[0] != "COMPLETED" and death.cause not in ("preempted", "time_limit"):
                failures.append((job, shape, Death(death.cause, f"{death.reason}; {self._last_words(folder, job)}")))
        return failures

    def start_workers(self, shape: JobShape, count: int, avoid: tuple[str, ...] = ()) -> None:
        folder = self._folder(f"worker-{label_of(shape)}")
        launch = Launch(str(self.sweep.path.resolve()), shape, str(folder))
        try:
            self._submit("worker", shape, partial(work, launch), folder, count, avoid=avoid)
        except QueueFull as error:
            print(f"{str(error).rpartition('; ')[0]}; the keeper tries again", flush=True)

    def start_keepers(self, count: int) -> None:
        """Submit `count` keepers, small jobs that restart lost runs and workers, with different start times."""
        shape = JobShape(0, 1, min(2.0, self.cluster.memory_gb), min(30, self.cluster.time_minutes))
        call = partial(keep, str(self.sweep.path.resolve()))
        now = slurm.controller_time()
        for number in range(KEEPERS - count, KEEPERS):
            seconds = math.ceil(self.cluster.keeper_seconds * (1 + number))
            # sbatch would add the seconds to the clock of this node, which may be days ahead.
            begin = f"now+{seconds}" if now is None else (now + timedelta(seconds=seconds)).isoformat()
            self._submit("keeper", shape, call, self._folder("keeper"), light=True, begin=begin)

    def start_fit(self) -> bool:
        """Submit a fit if results are newer than table.csv or law.json. Returns True if a fit is needed or queued."""
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
        call = partial(fit_laws, str(self.sweep.path.resolve()))
        with contextlib.suppress(QueueFull):  # a later pass asks again
            self._submit("fit", shape, call, self._folder("fit"), light=True)
            self.memory["fits"] = {"newest": newest, "tries": tries + 1}
        return True

    def remember(self, over: bool) -> None:
        """Write keeper.json: the fits tried, and whether the sweep is over. If `over`, cancel its waiting jobs."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_json(self.sweep.path / "jobs" / MEMORY, self.memory | {"over": over, "when": when})
        if over:
            slurm.cancel(job.name for job in self.jobs() if job.waits or job.held)

    def cancel_all(self) -> None:
        """Cancel the sweep's jobs, except the one of this process."""
        slurm.cancel(job.name for job in self.jobs())

    def _folder(self, name: str) -> Path:
        # Never a folder of an earlier request: where job ids start again, a job would find another's files there.
        return self.sweep.path.resolve() / "jobs" / f"{name}-{os.urandom(4).hex()}"

    def _submit(
        self, kind: Kind, shape: JobShape, call: Callable[[], None], folder: Path, count: int = 1, **options: Any
    ) -> None:
        request = Request(kind, shape, f"isoflop:{self.launch.token}:{kind}:{label_of(shape)}", **options)
        place = Path(self.launch.folder)
        where = Submission(self.sweep.path.name, self.cluster, folder, place, snapshot.take(self.sweep))
        self.started[kind] += len(where.submit(request, call, count))

    def _last_words(self, folder: Path, job: str) -> str:
        if not (logs := sorted(folder.glob(f"{job}_*log.*"))):
            return f"it left no log in {folder}, which all nodes must share"
        errors = (log.read_text(encoding="utf-8", errors="replace") for log in logs if log.suffix == ".err")
        first = next((message for text in errors if (message := slurm.first_to_end(text)) is not None), None)
        return first or f"see {logs[-1]}"


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def work(launch: Launch) -> None:
    """Run this rank of a worker's SLURM job; when the worker ends, submit missing jobs."""
    sweep = SweepDirectory(Path(launch.sweep))
    if worker.work(launch, after_trunk=lambda: _try_pass(sweep)):
        _try_pass(sweep)


def keep(sweep_path: str) -> None:
    """Call `run_pass` until it succeeds and another keeper is queued, or the sweep is over."""
    sweep, pause = SweepDirectory(Path(sweep_path)), 60.0
    while (sweep.path / "plan.json").exists():
        try:
            with sweep.lock(LOCK_SECONDS):
                pause = prepare.configuration(sweep).cluster.keeper_seconds
                backend = run_pass(sweep)
                if backend.memory.get("over") or any(job.kind == "keeper" for job in backend.jobs()):
                    return
        except Exception as error:
            # After any error the sweep must still have a keeper.
            with contextlib.suppress(OSError):
                print(f"this pass of the keeper failed, and it tries again: {error}")
                if not isinstance(error, UserError):
                    traceback.print_exc()
        time.sleep(pause)


def fit_laws(sweep_path: str) -> None:
    from ..results.finish import write_results

    sweep = worker.check_shared(sweep_path)
    write_results(sweep)
    _try_pass(sweep)


def run_pass(sweep: SweepDirectory) -> SlurmBackend:
    """Submit a sweep's missing workers, next round and fit to SLURM; return the backend. The caller holds the lock."""
    backend = SlurmBackend(sweep, prepare.configuration(sweep).cluster)
    if membership.is_stopped(sweep):
        return backend
    over = controller.reconcile(sweep, backend)
    if (judge := Judge.of(sweep)) is not None:
        judge.stop_hopeless(run.run_id for run in membership.members(sweep) if run.state().state == "running")
    if over and controller.grow(sweep):
        over = controller.reconcile(sweep, backend)
    over = over and not backend.start_fit()
    backend.memory["over"] = over
    backend.remember(over)
    if over:
        print("all runs and the fit have ended")
    return backend


def _try_pass(sweep: SweepDirectory) -> None:
    if not worker.is_in_place(sweep):
        return
    try:
        with sweep.lock(LOCK_SECONDS):
            run_pass(sweep)
    except (UserError, OSError) as error:
        print(f"this job could not start the next ones, so the keeper will: {error}", flush=True)
