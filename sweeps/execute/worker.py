"""A worker: a job that claims and does tasks of one shape, until none is left.

- A failed run does not end the worker, unless it has several ranks: the others may wait in a collective.
- Rank 0 claims, holds the lease and writes the journal; other ranks follow its file of claims.
- A worker stops when its launcher on this machine is gone, or at SLURM's signal, after saving a checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...train.errors import UserError
from ...train.job.environment import Ranks, detect
from ...train.job.failure import Cause, Failure, note_failure
from ...train.job.session import session
from ..prepare import configuration
from ..runs import lease
from ..runs.directory import (
    Busy,
    RunDirectory,
    SweepDirectory,
    inside_job,
    job_id,
    job_restarts,
    job_seconds,
    this_node,
)
from ..runs.forms import JobShape
from ..runs.journal import Scoring, Started
from ..runs.lease import KILLED, UNWRITTEN, Death
from ..runs.preflight import check_first_job
from ..slurm.commands import death_of
from .attempt import Interrupt, tidy, train_one, train_rank, try_log
from .controller import EVERYTHING, Board, Scope, Task

POLL_SECONDS, LONGEST_PAUSE = 0.2, 5.0  # between two looks at a board that has nothing to claim
IDLE_SECONDS = 60.0  # for which a worker waits for something to claim
MOST_WARNING = 120.0  # seconds before its time limit that a job gets the signal to stop; at most half of the limit
LEAST_SECONDS = 60.0  # that must be left until then to begin a task; a tenth of the limit where that is less


class RunFailed(Exception):
    """A run of several ranks failed; the error ends the other ranks."""


@dataclass(frozen=True)
class Launch:
    """The arguments of a worker."""

    sweep: str  # path
    shape: JobShape  # of the tasks that it may claim
    folder: str  # where it writes its claims
    token: str | None = None  # of the lock of a launcher on this machine, which must stay alive
    scope: Scope = EVERYTHING


class Claims:
    """A worker's file of claims, one line per task."""

    def __init__(self, folder: Path, job: str, restarts: int = 0) -> None:
        self.path = folder / f"{job}-{restarts}.claims"
        self.last: dict[str, Any] = {}  # the newest that `news` has returned
        self._read = 0  # bytes

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[Task], None]]:
        """Yield a function that adds a task to the claims file. At the block's end, tell the other ranks to end."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)

            def write(line: dict[str, Any]) -> None:
                file.write(json.dumps(line) + "\n")
                file.flush()

            try:
                yield lambda task: write({"task": task.kind, "run": task.run.run_id})
            finally:
                with contextlib.suppress(OSError):
                    write({"task": "end"})

    def news(self) -> list[dict[str, Any]]:
        """Return the claims (task and run) written since the last call."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self._read)
            *whole, _ = file.read().split(b"\n")
            self._read += sum(len(line) + 1 for line in whole)
            lines = [json.loads(line) for line in whole]
            self.last = lines[-1] if lines else self.last
            return lines
        return []

    def count(self) -> bool:
        """Return True if this dead worker claimed no run, and mark the file, so that later calls return False."""
        every_start = self.path.parent.glob(self.path.name.rpartition("-")[0] + "-*.claims")
        text = "".join(path.read_text(encoding="utf-8") for path in every_start)
        if '"run"' in text or '"counted"' in text:
            return False
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"task": "counted"}) + "\n")
        return True

    def following(self) -> Iterator[str]:
        """Yield the id of each run that rank 0 claims to train, until rank 0 ends."""
        while True:
            over = not inside_job() and self._is_abandoned()  # srun ends the other ranks by itself
            for line in self.news():
                if line["task"] == "end":
                    return
                if line["task"] == "train":
                    yield str(line["run"])
            if over:
                return
            time.sleep(POLL_SECONDS)

    def _is_abandoned(self) -> bool:
        """Return whether rank 0 died without writing the end of its claims."""
        try:
            with self.path.open(encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # it holds the lock, or has not begun
            return False
        return True


def work(launch: Launch, after_trunk: Callable[[], None] = lambda: None) -> bool:
    """Claim, train and score runs of `launch.shape` until none is left; every rank of the job calls this.

    Args:
        after_trunk: called after a run with branches, to start workers for them.

    Returns:
        True on rank 0, if the worker was not told to stop before its time limit: another may be needed.

    Raises:
        RunFailed: a run of several ranks failed on one of them.
        UserError: this node does not see the sweep.
    """
    sweep, ranks = check_shared(launch.sweep), detect()
    interrupt = Interrupt(None if launch.token is None else lambda: sweep.launcher_alive(str(launch.token)))
    if inside_job() and ranks.local_rank == 0:
        preflight_node(sweep, ranks.local_size)
    claims = Claims(Path(launch.folder), job_id(), job_restarts())
    with session():
        if ranks.rank > 0:
            for name in claims.following():
                _follow(sweep.run(name), ranks, interrupt)
        else:
            with claims.writing() as write:
                _Worker(sweep, launch, ranks, interrupt, write, after_trunk).go()
    return ranks.rank == 0 and (interrupt.reason is None or interrupt.is_over())


@dataclass
class _Worker:
    """Rank 0 of a worker."""

    sweep: SweepDirectory
    launch: Launch
    ranks: Ranks
    interrupt: Interrupt
    write: Callable[[Task], None]
    after_trunk: Callable[[], None]

    def __post_init__(self) -> None:
        self._config = configuration(self.sweep)
        self._board = Board(self.sweep, self._config, self.launch.scope)
        self._node = this_node() if inside_job() else None
        self._limit = last_start(os.environ) if inside_job() else math.inf  # seconds in which it may begin a task
        self._until = time.monotonic() + self._limit
        self._parents = {run.parent for run in self.sweep.planned_runs()}
        self._evaluator: Any = None

    def go(self) -> None:
        import torch

        gc.freeze()  # else each `tidy` would look through all that PyTorch has made on import
        threads, pause, idle_since = torch.get_num_threads(), POLL_SECONDS, time.monotonic()
        while not self.interrupt() and time.monotonic() <= self._until and is_in_place(self.sweep):
            if self._claim_and_do():
                torch.set_num_threads(threads)  # a run may have asked for its own number
                tidy()
                pause, idle_since = POLL_SECONDS, time.monotonic()
                continue
            self._board.forget_ended()
            if not self._may_wait(time.monotonic() - idle_since):
                return
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _claim_and_do(self) -> bool:
        """Claim and do the first free task of this worker's shape. Returns False if there is none."""
        for task in self._board.tasks():
            if task.shape != self.launch.shape or task.status == "waiting" or self._leaves_to_others(task):
                continue
            try:
                if task.status == "taken":
                    lease.reconcile_idle(task.run, self._board.policy, self._explain)
                elif self._train(task) if task.kind == "train" else self._score(task):
                    return True
            except (Busy, Timeout):
                continue
            except OSError:
                traceback.print_exc()  # such as a disk too full to begin; the next look may find room
                return False
        return False

    def _leaves_to_others(self, task: Task) -> bool:
        """Return whether to leave a task to other jobs: it must avoid this node, or too little time is left."""
        left = self._until - time.monotonic()
        return self._node in task.avoid or (task.seconds > left and left < self._limit / 2)

    def _may_wait(self, idle: float) -> bool:
        """Return whether this worker, without a task for `idle` seconds, should wait for one that may soon be free."""
        if idle > IDLE_SECONDS:
            return False
        tasks = [task for task in self._board.tasks() if task.status in ("free", "waiting")]
        ours = [task for task in tasks if task.shape == self.launch.shape and not self._leaves_to_others(task)]
        if any(task.status == "free" for task in tasks if task.shape != self.launch.shape):
            return False  # the device is needed by a worker of another shape
        return any(task.wait_seconds < IDLE_SECONDS for task in ours)

    def _train(self, task: Task) -> bool:
        run = task.run
        with lease.hold(run, job_id(), self._board.policy, self._explain) as record:
            if record is None:
                return False
            self.write(task)
            cpu_before = sum(os.times()[:4])  # of this process and of those that it waited for
            ending = train_one(run, self.ranks, self.interrupt, self._board.policy)
            lease.conclude(run, ending._replace(cpu_seconds=sum(os.times()[:4]) - cpu_before))
        if self.ranks.size > 1 and ending.state == "failed":
            raise RunFailed(f"run {run.run_id} failed: {ending.reason}")
        if ending.state == "preempted" and self.interrupt.reason is None and self.ranks.size > 1:
            self.interrupt.reason = "another rank was told to stop"
        if run.run_id in self._parents:
            self.after_trunk()
        return True

    def _explain(self, start: Started) -> Death:
        if start.job_id != job_id():
            return death_of(start.job_id, start.host) if inside_job() else KILLED
        if job_restarts() > 0:  # the same job, taken off its node
            return Death("node", f"its node {start.host} failed, and SLURM has started its job again")
        return UNWRITTEN

    def _score(self, task: Task) -> bool:
        from ..results.scoring import evaluate_run, is_scored, open_evaluator
        from ..results.tracking import push_scores

        run, settings = task.run, asdict(self._config.evaluate)
        # Not the run's own lock: no worker trains what is done, and a command must not wait for a scoring.
        with FileLock(run.path / ".scoring.lock", timeout=0):
            if is_scored(run, settings):
                return False
            with run.lock():
                run.write_event(Scoring)
            self.write(task)
            try:
                self._evaluator = self._evaluator or open_evaluator(settings, run.log)
                evaluate_run(run, settings, self._evaluator)
                push_scores(run, run.log)
            except Exception as error:
                # One checkpoint that cannot be scored must not cost the scores of the others.
                try_log(run, traceback.format_exc())
                print(f"run {run.run_id} could not be scored: {type(error).__name__}: {error}", flush=True)
        return True


def preflight_node(sweep: SweepDirectory, ranks: int = 1) -> None:
    """Check this node before its first job of the sweep, and print the findings."""
    try:
        config, runs = configuration(sweep), [run.config() for run in sweep.runs()]
    except UserError as error:  # which costs no run that can be read
        print(f"preflight is skipped: {error}")
        return
    if config.preflight:
        for line in check_first_job(sweep, runs, ranks):
            print(line, flush=True)


def last_start(environment: Mapping[str, str]) -> float:
    """Return how many seconds after its start a SLURM job may still begin tasks; inf without a time limit."""
    # The difference, because the controller's clock need not be this node's. A worker starts seconds after its job.
    seconds = job_seconds(environment)
    warning = min(MOST_WARNING, seconds / 2)
    return seconds - (warning + min(LEAST_SECONDS, seconds / 10))


def is_in_place(sweep: SweepDirectory) -> bool:
    """Return whether a sweep's folder still exists; print a line if it was moved or removed."""
    if (sweep.path / "plan.json").is_file():
        return True
    print(f"{sweep.path} was moved or removed while this job ran; the job ends", flush=True)
    return False


def check_shared(path: Path | str) -> SweepDirectory:
    """Return the sweep directory. Raises UserError if this node does not see it."""
    sweep = SweepDirectory(Path(path))
    if not (sweep.path / "plan.json").is_file():
        came_from = os.environ.get("SLURM_SUBMIT_HOST")
        whence = f" (submitted from {came_from})" if came_from else ""
        raise UserError(
            f"{sweep.path} has no plan.json on node {this_node()}{whence}: the output folder is not shared with this "
            "node; set output_root to a folder that every node sees, or exclude the node with cluster.exclude"
        )
    return sweep


def _follow(run: RunDirectory, ranks: Ranks, interrupt: Interrupt) -> None:
    """Train a run on a rank other than 0; rank 0 holds the run's lock and records how it ends."""
    run.log(f"rank {ranks.rank} of {ranks.size} on {ranks.host}, process {os.getpid()}", ranks.rank)
    ending = train_rank(run, ranks, interrupt)
    try_log(run, ending.state if ending.reason is None else f"{ending.state}: {ending.reason}", ranks.rank)
    # That a run stops or diverges is agreed on by all ranks, and rank 0 says it: leaving with an error here would make
    # SLURM end rank 0 before it has. A failure may be this rank's alone, and rank 0 may be what failed.
    if ending.state == "failed":
        cause = Cause(str(ending.cause))
        note_failure(run.path, Failure(cause, str(ending.reason), ranks.rank, ranks.host, hosts=(ranks.host,)))
        raise RunFailed(f"rank {ranks.rank} of run {run.run_id} failed: {ending.reason}")
