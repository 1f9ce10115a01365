"""A sweep's workers on this machine: processes that submitit starts, and that end with the command.

A worker trains many runs, so that PyTorch is imported once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import submitit
from submitit.core.utils import environment_variables

from ...train.errors import UserError
from ...train.job.failure import Cause, Failure, note_failure
from ..plan import rates
from ..prepare import Prepared
from ..runs.attempts import Policy
from ..runs.directory import RunDirectory, lock_token, this_node
from ..runs.forms import JobShape
from ..runs.journal import Started
from ..runs.lease import KILLED, Death
from .attempt import THREADS
from .controller import Job, Limits, Scope, reconcile
from .worker import Claims, Launch, work

POLL_SECONDS = 0.25  # between two looks at the workers
LOOK_SECONDS = 1.0  # between two passes, and between two looks for signs of life
FULL_SECONDS = 5.0  # between two passes while every place has its worker
GRACE_SECONDS = 30.0  # what a worker gets to save a checkpoint before it is killed
STILLBORN = 3  # workers in a row that claim nothing, after which no more are started; chosen by hand


@dataclass
class LocalWorker:
    """A running worker process."""

    handle: Any  # submitit's
    place: int
    shape: JobShape
    claims: Claims
    last_sign: float | None = None  # of life, of its run, at the last look
    still: float = 0.0  # seconds for which it has been the same

    @property
    def is_running(self) -> bool:
        return self.handle._process.poll() is None


class LocalBackend:
    """The worker processes of one command, which do the tasks in its `scope`."""

    marks_queued = False

    def __init__(self, prepared: Prepared, scope: Scope) -> None:
        self.sweep, self._cluster, self._rate = prepared.sweep, prepared.config.cluster, prepared.rate
        self._scope = scope
        policy = Policy.of(self._cluster)
        self._hang_seconds = max(policy.hang_seconds, policy.silence_seconds)
        # A folder per launch: submitit names its files by process id, and process ids come round again.
        self._folder = self.sweep.path.resolve() / "jobs" / f"local-{os.urandom(4).hex()}"
        self._workers: list[LocalWorker] = []
        self._stillborn = 0  # workers in a row that had claimed nothing

    def train(self, tick: Callable[[list[dict[str, Any]]], None]) -> None:
        """Train and score until no task is left; on Ctrl-C or TERM, runs save a checkpoint.

        `tick` is called several times a second with the workers' new claims. Raises UserError if several workers in a
        row ended before they claimed anything.
        """
        try:
            with _handling(signal.SIGTERM, signal.default_int_handler):  # such as when an allocation is closed
                while not reconcile(self.sweep, self, self._scope) or self._workers:
                    start, looked, ended = time.monotonic(), time.monotonic(), False
                    while not ended and time.monotonic() < start + self._pass_seconds():
                        time.sleep(POLL_SECONDS)
                        tick([claim for worker in self._workers for claim in worker.claims.news()])
                        ended = self._collect()
                        if (passed := time.monotonic() - looked) > LOOK_SECONDS:
                            looked += passed
                            self._end_frozen(min(passed, 2 * LOOK_SECONDS))  # if longer, this process slept
        except BaseException:
            self._stop()
            raise

    def jobs(self) -> list[Job]:
        return [Job(worker.handle.job_id, "worker", worker.shape) for worker in self._workers]

    def limits(self) -> Limits:
        return Limits(lambda shape: self._places(shape).jobs, one_size=True)

    def explain(self, start: Started) -> Death:
        return KILLED

    def stillborn(self) -> list[tuple[str, JobShape, Death]]:
        """Return an empty list: `train` raises an error instead."""
        return []

    def start_keepers(self, count: int) -> None:
        raise NotImplementedError("a sweep on this machine has no keepers")

    def start_workers(self, shape: JobShape, count: int, avoid: tuple[str, ...] = ()) -> None:
        """Start up to `count` workers, as many as there are free places; `avoid` is ignored."""
        free = sorted(set(range(self._places(shape).jobs)) - {worker.place for worker in self._workers})
        for place in free[:count]:
            self._workers.append(self._start(shape, place))

    def _places(self, shape: JobShape) -> rates.Places:
        return rates.places(self._cluster, shape.ranks, self._rate)

    def _start(self, shape: JobShape, place: int) -> LocalWorker:
        executor = submitit.LocalExecutor(folder=self._folder)
        gpus = shape.ranks * self._cluster.gpus_per_job
        first = place // self._cluster.runs_per_gpu * gpus
        executor.update_parameters(
            timeout_min=60 * 24 * 365,  # submitit ends a local job after that; a run here has no limit but its D
            tasks_per_node=shape.ranks,
            gpus_per_node=gpus,
            visible_gpus=tuple(range(first, first + gpus)),
        )
        sweep, token = str(self.sweep.path.resolve()), lock_token(self.sweep.path)
        launch = Launch(sweep, shape, str(self._folder), token, self._scope)
        # Pinned threads: two processes with two threads each on two cores crawl.
        pinned = environment_variables(**dict.fromkeys(THREADS, self._places(shape).threads))
        # Children inherit an ignored SIGINT: Ctrl-C reaches the launcher alone, which tells them to save with TERM.
        with pinned, _handling(signal.SIGINT, signal.SIG_IGN):
            handle = executor.submit(work, launch)
        return LocalWorker(handle, place, shape, Claims(self._folder, handle.job_id))

    def _collect(self) -> bool:
        """Remove workers that have ended from `_workers`. Returns True if there were any."""
        ended = [worker for worker in self._workers if not worker.is_running]
        self._workers = [worker for worker in self._workers if worker.is_running]
        for worker in ended:
            # The exit code of submitit's controller is not that of its task.
            self._stillborn = 0 if worker.claims.path.exists() else self._stillborn + 1
            if self._stillborn >= STILLBORN:
                raise UserError(
                    f"{self._stillborn} workers in a row ended before they trained anything; see "
                    f"{worker.handle.paths.stderr}, correct the cause, and start the sweep again"
                )
        return bool(ended)

    def _pass_seconds(self) -> float:
        places = [self._places(worker.shape).jobs for worker in self._workers]
        return FULL_SECONDS if places and len(places) >= max(places) else LOOK_SECONDS

    def _end_frozen(self, passed: float) -> None:
        """Kill workers that hang: no new heartbeat, or a stopped process. `passed`: seconds since the last call."""
        for worker in self._workers:
            run, processes = self._run_of(worker), processes_of(worker.handle._process.pid)
            sign = None if run is None else run.last_sign()
            hangs = sign == worker.last_sign if sign is not None else "T" in processes.values()
            worker.last_sign, worker.still = sign, worker.still + passed if hangs else 0.0
            if worker.still < self._hang_seconds:
                continue
            reason = f"it hung: no sign of life for {self._hang_seconds:g} s, so its process may be frozen"
            if run is not None:
                note_failure(run.path, Failure(Cause.HUNG, reason, host=this_node()))
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            worker.still = 0.0

    def _run_of(self, worker: LocalWorker) -> RunDirectory | None:
        if worker.claims.last.get("task") != "train":
            return None
        run = self.sweep.run(str(worker.claims.last["run"]))
        return run if run.state().state == "running" else None

    def _stop(self) -> None:
        for worker in self._workers:
            worker.handle._process.terminate()  # submitit's controller passes TERM on to every rank
        deadline = time.monotonic() + GRACE_SECONDS
        while any(worker.is_running for worker in self._workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        for worker in self._workers:
            if worker.is_running:
                worker.handle._process.kill()


def processes_of(root: int) -> dict[int, str]:
    """Return the state letter in /proc of a process and all its descendants, by process id."""
    states: dict[int, str] = {}
    with contextlib.suppress(OSError):  # it has just ended
        states[root] = Path(f"/proc/{root}/stat").read_text().rpartition(")")[2].split()[0]
        for path in Path(f"/proc/{root}/task").glob("*/children"):
            for child in path.read_text().split():
                states |= processes_of(int(child))
    return states


@contextlib.contextmanager
def _handling(
    number: signal.Signals, handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
