"""One start of a run, in whatever process: its lock, state and log, what it died of, and the way back to the queue.

Special here:
- TERM and USR2 set a flag; the loop saves a checkpoint and returns, and only then is the job put back in the queue;
- a failure is a state with a reason in a sentence; a disk that is full for the state too leaves the old one whole;
- a run that stops is `preempted` at once. What SLURM makes of its job is asked next, once for all runs of the job, and
  corrects the state, because SLURM may take minutes to answer and kill the job before it has.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from ..train.errors import UserError
from ..train.parallel.environment import Ranks
from . import slurm, trunks
from .plan import describe_mesh
from .runs import Busy, RunDirectory


class RunFailed(Exception):
    """The run ended without a result; its state says why. Makes the job exit with an error."""


class Interrupt:
    """Remembers that the job was told to stop, by signal or by the loss of whoever started it."""

    def __init__(self, alive: Callable[[], bool] | None = None, lost: str = "the launcher is gone") -> None:
        self.reason: str | None = None
        self.number = signal.SIGTERM  # what to pass on
        self._alive, self._lost = alive, lost
        self._asked = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason is None:  # a preempted job gets several; the first says why
            self.number = signal.Signals(number)
            self.reason = f"signal {self.number.name}"

    def __call__(self) -> bool:
        now = time.monotonic()
        if self._alive is not None and now - self._asked > 1.0:
            self._asked = now
            if not self._alive():
                self.reason = self._lost
        return self.reason is not None


@contextlib.contextmanager
def held(run: RunDirectory, job: str, timeout: float = 60.0) -> Iterator[bool]:
    """Holds a run while this process trains it, and says so in its state; yields False where there is nothing to do.

    Args:
        run: its directory.
        job: id of the job, as the state names it.
        timeout: seconds to wait for somebody else who has it.

    Raises:
        Busy: somebody else has held it all the while.
    """
    with run.lock(timeout):
        if run.is_done():
            yield False
            return
        attempt, host = run.state().attempt + 1, socket.gethostname()
        run.set_state("running", attempt=attempt, host=host, job_id=job)
        run.log(f"attempt {attempt} on {host}, job {job}, process {os.getpid()}")
        yield True


def conclude(run: RunDirectory, ended: str, reason: str | None) -> None:
    """Writes how a run ended that this process holds."""
    run.release()
    try:
        run.set_state(ended, reason=reason)
        run.log(ended if reason is None else f"{ended}: {reason}")
    except OSError:
        # A disk that is full for state.json too: the old state stays whole, and who started this process settles it.
        if ended == "done":
            raise


def train_one(run: RunDirectory, ranks: Ranks, interrupt: Interrupt, job: str) -> tuple[str, str | None]:
    """Trains a run as its first rank; returns the state that it ended in, which is written, and why.

    Raises:
        Busy: somebody else has the run.
    """
    with held(run, job) as begun:
        if not begun:
            return "done", None
        halved = run.is_halved()
        ended, reason = train_rank(run, ranks, interrupt)
        if ended == "failed" and ranks.size > 1 and run.is_halved() and not halved:
            ended = "preempted"  # memory ran out on a rank, and the next start takes a smaller micro-batch
        conclude(run, ended, reason)
    return ended, reason


def train_rank(run: RunDirectory, ranks: Ranks, interrupt: Interrupt) -> tuple[str, str | None]:
    """One rank's part in a run: the state that it ended in, and why. Whatever a run dies of is an answer."""
    from ..train.loop import Diverged, Stopped, train

    def report(line: str) -> None:
        run.log(line, ranks.rank)

    try:
        if ranks.rank == 0:
            prepare(run)
        config = run.config()
        if ranks.rank == 0 and ranks.size > 1:
            report(f"{ranks.size} ranks: {describe_mesh(config.parallel)}")
        train(config, run.path, should_stop=interrupt, report=report)
    except Stopped as stopped:
        return "preempted", f"{interrupt.reason or 'another rank was told to stop'}; {stopped}"
    except Diverged as diverged:
        return "diverged", str(diverged)
    except Exception as error:
        # Whatever a run dies of belongs in its state, with the traceback in its log; the sweep goes on.
        if not isinstance(error, UserError):
            try_log(run, traceback.format_exc(), ranks.rank)
        return "failed", words_for(error, run)
    return "done", None


def prepare(run: RunDirectory) -> None:
    """What its first rank does before a run trains: room to say that the disk is full, and what a branch begins from.

    Raises:
        UserError: the config cannot be read, or the trunk has not what the branch needs.
    """
    run.reserve()
    parent = run.config().parent
    if parent is not None:
        line = trunks.graft(run, RunDirectory(run.path.parent / parent))
        if line is not None:
            run.log(line)


def words_for(error: Exception, run: RunDirectory) -> str:
    """What a run died of, in a sentence."""
    from ..train.parallel.control import RankError

    if isinstance(error, UserError | RankError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({error.filename or run.path}); free some space and sweep again"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def try_log(run: RunDirectory, text: str, rank: int = 0) -> None:
    """Logs, or prints where the log cannot be written."""
    try:
        run.log(text, rank)
    except OSError:
        print(text)


def tidy() -> None:
    """After a training, for the next in this process: gives its memory back, and forgets what was compiled for it."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # it keeps 8 shapes of a block at most, and from then on compiles none
    gc.collect()  # models and trainers hold each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def settle(run: RunDirectory) -> None:
    """After a process on this machine has ended: of a run that still says `running` it was killed, and that is said."""
    if run.state().state not in ("running", "queued"):
        return
    noted = run.failure()
    found = "" if noted is None else f" ({noted})"
    run.set_state("failed", reason=f"its worker was killed{found}; sweep again to go on, or see {run.path / 'log.txt'}")


def settle_free(run: RunDirectory) -> None:
    """As `settle`, unless somebody has the run, or nothing can be written."""
    with contextlib.suppress(Busy, OSError), run.lock(timeout=0.0):
        settle(run)


def stopped_in(runs: Sequence[RunDirectory], job: str) -> list[RunDirectory]:
    """Those that were stopped and have saved, in this start of a job."""
    states = [(run, run.state()) for run in runs]
    return [run for run, state in states if state.state == "preempted" and state.job_id == job]


def back_to_the_queue(runs: Sequence[RunDirectory], max_requeues: int) -> NoReturn:
    """What becomes of a SLURM job whose runs were stopped, and have saved: it is requeued, unless SLURM has done so.

    Leaves with an error in any case: an exit with 0 would let scoring start. The states must be written before the job
    is requeued: its processes may be killed at any moment from then on.

    Raises:
        RunFailed: the job was cancelled, may not be requeued again, or cannot be.
    """
    verdict = _verdict(max_requeues)
    if verdict is None:
        # Not an Exception: submitit would record the end of a job that goes on.
        raise SystemExit(1)
    ended, why = verdict
    for run in runs:
        with contextlib.suppress(Busy), run.lock(timeout=0.0):
            conclude(run, ended, f"{why}; {run.state().reason}")
    raise RunFailed(f"run {', '.join(run.run_id for run in runs)} {ended}: {why}")


def _verdict(max_requeues: int) -> tuple[str, str] | None:
    """What the runs of a stopped job count as, and why; None when the job is in the queue again."""
    job, restarts = slurm.job_id(), slurm.restarts()
    fate = slurm.fate(job, restarts)
    if fate == "requeued":
        return None
    if fate == "cancelled":
        return "cancelled", "its job was cancelled in SLURM"
    if restarts >= max_requeues:
        most = f"{max_requeues} requeues, all that cluster.max_requeues allows"
        return "failed", f"its job had to stop again after {most}"
    refused = slurm.requeue(job, restarts)
    if refused is None:
        return None
    return "failed", f"preempted, and SLURM would not requeue its job ({refused}), so sweep again to go on"
