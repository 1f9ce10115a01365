"""One process' part in training a run.

Special here:
- TERM and USR2 set a flag; the loop saves a checkpoint and returns, and only then is the job requeued;
- a file in a run's directory cancels it, and the worker goes on with other runs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType

from ...train.errors import UserError
from ...train.job.environment import Ranks
from ...train.job.failure import DISK_FULL, cause_of, describe_error
from ..grid import trunks
from ..results import tracking
from ..runs import states
from ..runs.attempts import Policy
from ..runs.directory import RunDirectory, job_seconds
from ..runs.liveness import Heartbeat
from ..runs.preflight import decided
from ..runs.states import Ending, held

ASK_SECONDS = 1.0  # between two looks at who started this process, and at who wants a run cancelled
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class TrunkNotYet(UserError):
    """The trunk may still come to where its branch begins."""


class Interrupt:
    """Remembers that the job was told to stop, by signal or by the loss of whoever started it."""

    def __init__(self, alive: Callable[[], bool] | None = None, lost: str = "the launcher is gone") -> None:
        self.reason: str | None = None
        self.number = signal.SIGTERM  # what to pass on
        self.cancelled: dict[str, str] = {}  # who has asked to cancel a run, by its id
        self._alive, self._lost = alive, lost
        self._began = self._asked = time.monotonic()
        self._heart: Heartbeat | None = None

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.reason is None:  # a preempted job gets several; the first says why
                self.number = signal.Signals(number)
                self.reason = f"signal {self.number.name}"

        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, on_signal)

    @contextlib.contextmanager
    def watching(self, runs: Sequence[RunDirectory], policy: Policy) -> Iterator[Heartbeat]:
        """Gives signs of life of runs, and looks whether one is to be cancelled."""
        with Heartbeat(runs, policy) as heart:
            self._heart, self.cancelled = heart, {}
            try:
                yield heart
            finally:
                self._heart = None

    def __call__(self) -> bool:
        runs = list[RunDirectory]()
        if self._heart is not None:
            self._heart.progressed()
            runs = self._heart.runs
        if time.monotonic() - self._asked > ASK_SECONDS:
            if self._alive is not None and not self._alive():
                self.reason = self._lost
            for run in runs:
                if (who := run.cancel_asked()) is not None:
                    self.cancelled[run.run_id] = who
            self._asked = time.monotonic()
        return any(self.stops(run) for run in runs) or self.reason is not None

    def stops(self, run: RunDirectory) -> bool:
        """Whether it is this run that is to stop."""
        return self.reason is not None or run.run_id in self.cancelled

    def ending(self, run: RunDirectory, words: str) -> Ending:
        """How a run ends that has stopped; `words` says where."""
        if (who := self.cancelled.get(run.run_id)) is not None:
            return Ending("cancelled", f"cancelled by {who}; {words}")
        over = self.reason is not None and time.monotonic() - self._began > warned_after(os.environ)
        cause = "time_limit" if over else "preempted"
        return Ending("preempted", f"{self.reason or 'another rank was told to stop'}; {words}", cause)


def warned_after(environment: Mapping[str, str]) -> float:
    """Seconds after which a SLURM job that is told to stop is told so for its time limit."""
    seconds = job_seconds(environment)
    # Jobs are warned up to two minutes before their end, and a process may begin as late after its job.
    return seconds - min(240.0, 0.75 * seconds)


def failed(error: Exception, run: RunDirectory) -> Ending:
    """How a run ends that an error has ended."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        words = f"the disk is full ({error.filename or run.path}); free some space and sweep again"
    else:
        words = describe_error(error)
    return Ending("failed", words, "trunk" if isinstance(error, TrunkNotYet) else str(cause_of(error)))


def train_one(run: RunDirectory, ranks: Ranks, interrupt: Interrupt, job: str, policy: Policy) -> None:
    """Trains a run as its first rank; how it ended is in its state. Busy: somebody else has it."""
    with held(run, job, policy) as begun:
        if not begun:
            return
        halved = run.is_halved()
        with interrupt.watching([run], policy):
            ending = train_rank(run, ranks, interrupt)
        if ending.state == "failed" and ranks.size > 1 and run.is_halved() and not halved:
            # Memory ran out on a rank, and the next start takes a smaller micro-batch.
            ending = Ending("preempted", ending.reason, "memory")
        states.conclude(run, *ending)


def train_rank(run: RunDirectory, ranks: Ranks, interrupt: Interrupt) -> Ending:
    """One rank's part in a run; whatever it dies of is an answer."""
    from ...train.errors import Diverged, Stopped
    from ...train.loop import train

    report = partial(run.log, rank=ranks.rank)
    try:
        if ranks.rank == 0:
            prepare(run)
        config = decided(run)
        if ranks.rank == 0 and ranks.size > 1:
            report(f"{ranks.size} ranks: {config.parallel.label}")
        train(config, run.path, should_stop=interrupt, report=report, alive=interrupt)
    except Stopped as stopped:
        return interrupt.ending(run, str(stopped))
    except Diverged as diverged:
        return Ending("diverged", str(diverged))
    except Exception as error:
        # Whatever a run dies of belongs in its state, with the traceback in its log; the sweep goes on.
        if not isinstance(error, UserError):
            try_log(run, traceback.format_exc(), ranks.rank)
        return failed(error, run)
    return Ending("done")


def prepare(run: RunDirectory) -> None:
    """What a run's first rank does before it trains."""
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
        if states.may_go_on(trunk):
            raise TrunkNotYet(str(error)) from error
        raise


def try_log(run: RunDirectory, text: str, rank: int = 0) -> None:
    """Logs, or prints where the log cannot be written."""
    try:
        run.log(text, rank)
    except OSError:
        print(text)


def tidy() -> None:
    """Gives memory back, and forgets what was compiled."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # it keeps 8 shapes of a block at most, and from then on compiles none
    gc.collect()  # models and trainers hold each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
