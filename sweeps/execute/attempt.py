"""Train one run in one process of its worker.

After TERM or USR2 the loop saves a checkpoint and the worker ends; a file in a run's directory cancels only that run.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType

from ...train.errors import UserError
from ...train.job.environment import Ranks
from ...train.job.failure import DISK_FULL, RankError, cause_of, describe_error
from ..plan import trunks
from ..results import tracking
from ..runs.attempts import INTERRUPTED, RETRIED, Policy
from ..runs.directory import OPEN, RunDirectory, job_seconds
from ..runs.lease import Ending
from ..runs.liveness import Heartbeat
from ..runs.preflight import decided

ASK_SECONDS = 1.0  # between two checks of the process that started this one, and of the request to cancel the run
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class TrunkNotYet(UserError):
    """The trunk has not yet reached the step where its branch begins, but may."""


class FolderGone(UserError):
    """The run's folder was moved, removed or replaced while the run trained."""


class Interrupt:
    """The request to stop this job: a signal, or the end of the process that started it."""

    def __init__(self, alive: Callable[[], bool] | None = None, lost: str = "the launcher has ended") -> None:
        self.reason: str | None = None
        self.number = signal.SIGTERM  # what to pass on
        self.cancelled: str | None = None  # the user who asked to cancel the run that trains
        self._alive, self._lost = alive, lost
        self._began = self._asked = time.monotonic()
        self._heart: Heartbeat | None = None

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.reason is None:  # a preempted job gets several; the first is the reason
                self.number = signal.Signals(number)
                self.reason = f"signal {self.number.name}"

        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, on_signal)

    @contextlib.contextmanager
    def watching(self, run: RunDirectory, policy: Policy) -> Iterator[None]:
        with Heartbeat(run, policy) as heart:
            self._heart, self.cancelled = heart, None
            try:
                yield
            finally:
                self._heart = None

    def __call__(self) -> bool:
        if self._heart is not None:
            self._heart.progressed()
        if time.monotonic() - self._asked > ASK_SECONDS:
            if self._heart is not None:
                _check_folder(self._heart)
            if self._alive is not None and not self._alive():
                self.reason = self._lost
            if self._heart is not None:
                self.cancelled = self._heart.run.cancel_asked()
            self._asked = time.monotonic()
        return self.reason is not None or (self._heart is not None and self.cancelled is not None)

    def is_over(self) -> bool:
        """Return whether this SLURM job was asked to stop near its time limit."""
        return self.reason is not None and time.monotonic() - self._began > warned_after(os.environ)

    def ending(self, where: str) -> Ending:
        """Return the state, reason and cause to record for a run that stopped; `where` says at which step."""
        if self.cancelled is None and self._heart is not None:
            self.cancelled = self._heart.run.cancel_asked()  # SLURM's signal may have come first
        if self.cancelled is not None:
            return Ending("cancelled", f"cancelled by {self.cancelled}; {where}")
        cause = "time_limit" if self.is_over() else "preempted"
        return Ending("preempted", f"{self.reason or 'another rank was told to stop'}; {where}", cause)


def _check_folder(heart: Heartbeat) -> None:
    """Raise FolderGone if the run's folder was moved, removed or replaced."""
    folder = heart.run.path
    try:
        in_place = os.path.samestat(folder.stat(), heart.folder)
    except (FileNotFoundError, NotADirectoryError):
        in_place = False
    except OSError:  # a file server that is away
        return
    if not in_place:
        raise FolderGone(f"{folder} was moved, removed or replaced while the run trained; nothing more is written")


def warned_after(environment: Mapping[str, str]) -> float:
    """Return after how many seconds of a SLURM job a stop signal means that its time limit is near."""
    seconds = job_seconds(environment)
    # Jobs are warned up to two minutes before their end, and a process may begin as late after its job.
    return seconds - min(240.0, 0.75 * seconds)


def failed(error: Exception, run: RunDirectory) -> Ending:
    """Return the state, reason and cause to record for a run that failed with `error`."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        reason = f"the disk is full ({error.filename or run.path}); free some space and start the sweep again"
    else:
        reason = describe_error(error)
    return Ending("failed", reason, "trunk" if isinstance(error, TrunkNotYet) else str(cause_of(error)))


def train_one(run: RunDirectory, ranks: Ranks, interrupt: Interrupt, policy: Policy) -> Ending:
    """Train a run as its rank 0, and return how it ended. The caller holds the run's lock."""
    halved = run.is_halved()
    with interrupt.watching(run, policy):
        ending = train_rank(run, ranks, interrupt)
    if ending.state == "failed" and ranks.size > 1 and run.is_halved() and not halved:
        # Memory ran out on a rank, and the next start takes a smaller micro-batch.
        return Ending("preempted", ending.reason, "memory")
    return ending


def train_rank(run: RunDirectory, ranks: Ranks, interrupt: Interrupt) -> Ending:
    """Train a run on this rank and return how it ended; errors are not raised."""
    from ...train.errors import Diverged, Stopped
    from ...train.external.run import train_external
    from ...train.loop import train

    report = partial(run.log, rank=ranks.rank)
    try:
        if ranks.rank == 0:
            prepare(run)
        config = decided(run)
        if ranks.rank == 0 and ranks.size > 1:
            report(f"{ranks.size} ranks: {config.parallel.label}")
        if config.trainer.kind == "command":
            train_external(config, run.path, interrupt, report)
        else:
            train(config, run.path, should_stop=interrupt, report=report, alive=interrupt)
    except Stopped as stopped:
        return interrupt.ending(str(stopped))
    except FolderGone as gone:
        return Ending("preempted", str(gone))
    except Diverged as diverged:
        return Ending("diverged", str(diverged))
    except Exception as error:
        # The reason belongs in the run's state, with the traceback in its log; the sweep continues.
        if not isinstance(error, UserError | RankError):
            try_log(run, traceback.format_exc(), ranks.rank)
        return failed(error, run)
    return Ending("done")


def prepare(run: RunDirectory) -> None:
    """Reserve disk space for a run, and give a branch the checkpoint of its trunk."""
    run.reserve()
    config = run.config()
    tracking.note_lineage(run, config)
    if config.parent is None:
        return
    trunk = RunDirectory(run.path.parent / config.parent)
    try:
        if (line := trunks.graft(run, trunk)) is not None:
            run.log(line)
    except trunks.NotThere as error:
        if may_continue(trunk):
            raise TrunkNotYet(str(error)) from error
        raise


def may_continue(run: RunDirectory) -> bool:
    """Return whether an unfinished run may be trained further without a user's command."""
    record = run.record()
    if record.state.state == "failed":
        return bool(record.recent) and record.recent[-1].cause in (*RETRIED, *INTERRUPTED)
    return record.state.state in OPEN


def try_log(run: RunDirectory, text: str, rank: int = 0) -> None:
    try:
        run.log(text, rank)
    except OSError:
        print(text)


def tidy() -> None:
    """Free memory and compiled code of the previous run in this process."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # it keeps 8 shapes of a block at most, and from then on compiles none
    gc.collect()  # models and trainers hold each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
