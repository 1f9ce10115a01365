"""One start of a run, in whatever process: its lock, state and log, what it died of, and the way back to the queue.

Special here:
- TERM and USR2 set a flag; the loop saves a checkpoint and returns, and only then is the job put back in the queue. So
  does the wish to cancel a run, which is a file in its directory, and stops nothing but that run;
- a failure is a state with a reason in a sentence, and its attempt a line with a cause, by which `retries.decide` goes.
  A disk that is full for these too leaves the old state whole, and the line to whoever comes next;
- a run that stops is `preempted` at once. What SLURM makes of its job is asked next, once for all runs of the job, and
  corrects the state, because SLURM may take minutes to answer and kill the job before it has.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NamedTuple, NoReturn

from ...train.errors import UserError
from ...train.job.environment import Ranks
from ..grid import trunks
from ..plan.rates import describe_mesh
from ..results import tracking
from ..runs import attempts
from ..runs.causes import TrunkNotYet, cause_in, cause_of, warned_after, words_for
from ..runs.directory import Busy, RunDirectory, this_node
from ..runs.heartbeat import Heartbeat, is_stale
from ..runs.retries import INTERRUPTED, RETRIED, Policy, decide
from ..slurm import commands as slurm

ASK_SECONDS = 1.0  # between two looks at who started this process, and at who wants a run cancelled


class RunFailed(Exception):
    """The run ended without a result; its state says why. Makes the job exit with an error."""


class Ending(NamedTuple):
    """How one process' part in a run ended."""

    state: str  # one of runs.STATES
    reason: str | None = None  # in a sentence; None when done
    cause: str | None = None  # one of retries.CAUSES; None: what the state says


class Interrupt:
    """Remembers that the job was told to stop, by signal or by the loss of whoever started it.

    While it watches over runs it also tells when one of them is to be cancelled, and takes each call for a step.
    """

    def __init__(self, alive: Callable[[], bool] | None = None, lost: str = "the launcher is gone") -> None:
        self.reason: str | None = None
        self.number = signal.SIGTERM  # what to pass on
        self.cancelled: dict[str, str] = {}  # who has asked to cancel a run, by its id
        self._alive, self._lost = alive, lost
        self._began = self._asked = time.monotonic()
        self._heart: Heartbeat | None = None
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason is None:  # a preempted job gets several; the first says why
            self.number = signal.Signals(number)
            self.reason = f"signal {self.number.name}"

    @contextlib.contextmanager
    def watching(self, runs: Sequence[RunDirectory], policy: Policy) -> Iterator[Heartbeat]:
        """Gives signs of life for runs that this process holds and trains, and looks whether one is to be cancelled."""
        with Heartbeat(runs, policy) as heart:
            self._heart, self.cancelled = heart, {}
            try:
                yield heart
            finally:
                self._heart = None

    def __call__(self) -> bool:
        if self._heart is not None:
            self._heart.progressed()
        if time.monotonic() - self._asked > ASK_SECONDS:
            self._ask()
            self._asked = time.monotonic()
        held = [] if self._heart is None or not self.cancelled else self._heart.runs
        return self.reason is not None or any(run.run_id in self.cancelled for run in held)

    def _ask(self) -> None:
        if self._alive is not None and not self._alive():
            self.reason = self._lost
        for run in [] if self._heart is None else self._heart.runs:
            if (who := run.cancel_asked()) is not None:
                self.cancelled[run.run_id] = who

    def stops(self, run: RunDirectory) -> bool:
        """Whether it is this run that is to stop, and not another one that it is trained with."""
        return self.reason is not None or run.run_id in self.cancelled

    def ending(self, run: RunDirectory, words: str) -> Ending:
        """What a run is that has stopped; `words` says where."""
        if (who := self.cancelled.get(run.run_id)) is not None:
            return Ending("cancelled", f"cancelled by {who}; {words}")
        over = self.reason is not None and time.monotonic() - self._began > warned_after(os.environ)
        cause = "time_limit" if over else "preempted"
        return Ending("preempted", f"{self.reason or 'another rank was told to stop'}; {words}", cause)


@contextlib.contextmanager
def held(run: RunDirectory, job: str, policy: Policy, timeout: float = 60.0, share: float = 1.0) -> Iterator[bool]:
    """Holds a run while this process trains it, and says so in its state; yields False where there is nothing to do.

    Args:
        run: its directory.
        job: id of the job, as the state names it.
        policy: says when an earlier attempt on another machine counts as dead.
        timeout: seconds to wait for somebody else who has it.
        share: of this process or device that the run gets.

    Raises:
        Busy: somebody else has held it all the while, or shows signs of life.
        OSError: the disk is too full to say that the run begins.
    """
    with run.lock(timeout):
        if run.is_done():
            attempts.settle_killed(run, "done", "")  # a line that a full disk had no room for
            yield False
            return
        _wait_for_signs(run, policy)
        _settle_attempt(run, job)
        if (who := run.cancel_asked()) is not None:
            run.set_state("cancelled", reason=f"cancelled by {who} before it began")
            run.log(f"cancelled by {who}")
            yield False
            return
        if (why := _had_enough(run, job, policy)) is not None:
            run.set_state("failed", reason=why)
            run.log(f"failed: {why}")
            yield False
            return
        run.forget_failure()
        run.give_sign()
        try:
            _begin(run, job, share)
            yield True
        finally:
            with contextlib.suppress(OSError):
                run.forget_signs()


def _begin(run: RunDirectory, job: str, share: float) -> None:
    begun = attempts.begin(run, job, this_node(), share)
    try:
        run.set_state("running", attempt=begun.attempt, host=begun.host, job_id=job, since=begun.began)
        run.log(f"attempt {begun.attempt} on {begun.host}, job {job}, process {os.getpid()}")
    except OSError as error:
        with contextlib.suppress(OSError):
            attempts.note(run, cause_of(error), words_for(error, run))
        raise


def _had_enough(run: RunDirectory, job: str, policy: Policy) -> str | None:
    """Why a run does not go on in a job that SLURM itself starts again, as it does without end where nodes fail."""
    past = attempts.current(run)
    if slurm.restarts() == 0 or not past or past[-1].job_id != job or past[-1].cause not in (*RETRIED, *INTERRUPTED):
        return None
    decision = attempts.decision(run, policy, past[-1].ended)
    return None if decision.again else f"{decision.why}; {past[-1].reason}"


def _wait_for_signs(run: RunDirectory, policy: Policy) -> None:
    """Where locks do not reach from node to node, a free one says nothing of an attempt on another machine.

    Raises:
        Busy: it shows signs of life.
    """
    begun, seen = attempts.under_way(run), run.last_sign()
    if begun is None or begun.machine == socket.gethostname():
        return
    while not is_stale(run, policy):
        if run.last_sign() != seen:
            raise Busy(f"run {run.run_id} gives signs of life on {begun.host}")
        time.sleep(min(1.0, policy.heartbeat_seconds / 4))


def conclude(run: RunDirectory, ended: str, reason: str | None, cause: str | None = None) -> None:
    """Writes how a run ended that this process holds: the line of its attempt, and its state.

    Args:
        run: its directory.
        ended: the state.
        reason: in a sentence.
        cause: one of `retries.CAUSES`; None: what the state says.
    """
    run.release()
    with contextlib.suppress(OSError):  # then whoever settles the run writes it
        attempts.note(run, cause or ("error" if ended == "failed" else ended), reason)
    try:
        run.set_state(ended, reason=reason)
        run.log(ended if reason is None else f"{ended}: {reason}")
    except OSError:
        # A disk that is full for state.json too: the old state stays whole, and who started this process settles it.
        if ended == "done":
            raise


def train_one(
    run: RunDirectory, ranks: Ranks, interrupt: Interrupt, job: str, policy: Policy, share: float = 1.0
) -> tuple[str, str | None]:
    """Trains a run as its first rank; returns the state that it ended in, which is written, and why.

    Args:
        run: its directory.
        ranks: this process among the run's.
        interrupt: tells when to save and stop.
        job: id of the job, as the state names it.
        policy: when it counts as hung.
        share: of this process' device that the run gets.

    Raises:
        Busy: somebody else has the run.
    """
    with held(run, job, policy, share=share) as begun:
        if not begun:
            state = run.state()
            return state.state, state.reason
        halved = run.is_halved()
        with interrupt.watching([run], policy):
            ending = train_rank(run, ranks, interrupt)
        if ending.state == "failed" and ranks.size > 1 and run.is_halved() and not halved:
            # Memory ran out on a rank, and the next start takes a smaller micro-batch.
            ending = Ending("preempted", ending.reason, "memory")
        conclude(run, *ending)
    return ending.state, ending.reason


def train_rank(run: RunDirectory, ranks: Ranks, interrupt: Interrupt) -> Ending:
    """One rank's part in a run: how it ended. Whatever a run dies of is an answer."""
    from ...train.errors import Diverged, Stopped
    from ...train.loop import train

    def report(line: str) -> None:
        run.log(line, ranks.rank)

    try:
        if ranks.rank == 0:
            prepare(run)
        config = run.config()
        if ranks.rank == 0 and ranks.size > 1:
            report(f"{ranks.size} ranks: {describe_mesh(config.parallel)}")
        train(config, run.path, should_stop=interrupt, report=report, alive=interrupt)
    except Stopped as stopped:
        return interrupt.ending(run, str(stopped))
    except Diverged as diverged:
        return Ending("diverged", str(diverged))
    except Exception as error:
        # Whatever a run dies of belongs in its state, with the traceback in its log; the sweep goes on.
        if not isinstance(error, UserError):
            try_log(run, traceback.format_exc(), ranks.rank)
        return Ending("failed", words_for(error, run), cause_of(error))
    return Ending("done")


def prepare(run: RunDirectory) -> None:
    """What its first rank does before a run trains: room to say that the disk is full, and what a branch begins from.

    Raises:
        TrunkNotYet: the trunk has not what the branch needs, and may still come to it.
        UserError: the config cannot be read, or the trunk will not come to it.
    """
    run.reserve()
    config = run.config()
    tracking.note_lineage(run, config)
    if config.parent is None:
        return
    trunk = RunDirectory(run.path.parent / config.parent)
    try:
        line = trunks.graft(run, trunk)
    except trunks.NotThere as error:
        if _may_go_on(trunk):
            raise TrunkNotYet(str(error)) from error
        raise
    if line is not None:
        run.log(line)


def _may_go_on(run: RunDirectory) -> bool:
    """Whether a run that is not done may be trained further without anybody's command."""
    state = run.state().state
    if state == "failed":
        past = attempts.current(run)
        return bool(past) and past[-1].cause in (*RETRIED, *INTERRUPTED)
    return state in ("planned", "queued", "running", "preempted")


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
    """Of a run that says that somebody is at it, or about to be, and whose lock the caller holds: it was killed."""
    reason = _settle_attempt(run)
    if run.state().state == "queued":
        run.set_state("failed", reason=reason)


def _settle_attempt(run: RunDirectory, job: str | None = None) -> str:
    """Of a run with an attempt under way that nobody is at: it was killed, and why, as far as that was noted.

    Args:
        run: its directory.
        job: the SLURM job that asks. One that was at the run already, and starts anew, was taken off its node.
    """
    noted, state = run.failure(), run.state()
    cause, what = run.failure_cause() or cause_in(noted), "its worker was killed"
    if noted is None and job is not None and job == state.job_id and slurm.restarts() > 0:
        cause, what = "node", f"its node {state.host} failed, and SLURM has started its job again"
    found = "" if noted is None else f" ({noted})"
    reason = f"{what}{found}; sweep again to go on, or see {run.path / 'log.txt'}"
    attempts.settle_killed(run, cause, reason)
    return reason


def stopped_in(runs: Sequence[RunDirectory], job: str) -> list[RunDirectory]:
    """Those that were stopped and have saved, in this start of a job."""
    states = [(run, run.state()) for run in runs]
    return [run for run, state in states if state.state == "preempted" and state.job_id == job]


def back_to_the_queue(runs: Sequence[RunDirectory], policy: Policy) -> NoReturn:
    """What becomes of a SLURM job whose runs were stopped, and have saved: it is requeued, unless SLURM has done so.

    Leaves with an error in any case: an exit with 0 would let scoring start. The states must be written before the job
    is requeued: its processes may be killed at any moment from then on. Where SLURM refuses or is away the runs stay
    `preempted`, for whoever looks after the sweep to start again.

    Raises:
        RunFailed: the job was cancelled, or does not go back to the queue.
    """
    job, restarts = slurm.job_id(), slurm.restarts()
    fate = slurm.fate(job, restarts)
    names = ", ".join(run.run_id for run in runs)
    if fate == "cancelled":
        why = "its job was cancelled in SLURM"
        for run in runs:
            _correct(run, "cancelled", f"{why}; {run.state().reason}", "cancelled")
        raise RunFailed(f"run {names} cancelled: {why}")
    if fate == "timeout":
        for run in runs:
            _correct(run, "preempted", run.state().reason, "time_limit")
    decisions = {run: decide(attempts.current(run), policy, 0, 0.0) for run in runs}
    over = [run for run, decision in decisions.items() if not decision.again]
    for run in over:
        _correct(run, "failed", f"{decisions[run].why}; {run.state().reason}")
    if len(over) == len(runs):
        raise RunFailed(f"run {names} failed: {decisions[over[0]].why}")
    if fate != "requeued" and (refused := slurm.requeue(job, restarts)) is not None:
        why = f"SLURM would not requeue its job ({refused})"
        for run in runs:
            if run not in over:
                _correct(run, "preempted", f"{run.state().reason}; {why}, so sweep again to go on")
        raise RunFailed(f"run {names} preempted: {why}")
    # Not an Exception: submitit would record the end of a job that goes on.
    raise SystemExit(1)


def _correct(run: RunDirectory, ended: str, reason: str | None, cause: str | None = None) -> None:
    """Says otherwise of a run that has stopped, unless somebody has begun with it again."""
    with contextlib.suppress(Busy, OSError), run.lock(timeout=0.0):
        if run.state().state != "preempted":
            return
        if cause is not None:
            attempts.amend(run, cause, reason)
        run.set_state(ended, reason=reason)
        run.log(ended if reason is None else f"{ended}: {reason}")
