"""All transitions of a run's state: planned, queued, begun, ended, settled, cancelled. The caller holds the run's lock.

Special here:
- a run is settled by whoever holds its lock, and a run that says how it ended is left as it is: settling twice is
  settling once;
- a process that fails says why in failure.json; what SLURM says of its job counts where that is more definite;
- a disk that is full even for a state leaves the old one whole, and the line to whoever settles the run next.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...train.job.failure import Cause, cause_of, describe_error, forget_failure, read_failure
from . import attempts
from .attempts import INTERRUPTED, RETRIED, Decision, Policy
from .directory import Busy, RunDirectory, State, job_restarts, now_on, this_node, this_user

UNSETTLED = ("planned", "queued", "running")  # states of runs that do not say how a process ended
ENDS_AS = {
    "done": "done", "preempted": "preempted", "time_limit": "preempted", "cancelled": "cancelled",
    "diverged": "diverged",
}  # fmt: skip  # the state in which a cause ends a run; any other is `failed`


class Ending(NamedTuple):
    state: str
    reason: str | None = None  # in a sentence; None when done
    cause: str | None = None  # one of attempts.CAUSES; None: what the state says


@dataclass(frozen=True)
class Death:
    cause: str  # of an attempt
    words: str
    job: str | None = None
    node: str | None = None


KILLED = Death("killed", "its worker was killed")
UNWRITTEN = Death("disk", "how it ended could not be written")


def plan(run: RunDirectory, reason: str | None = None) -> None:
    """The run waits to be submitted."""
    run.set_state("planned", reason=reason, job_id=None)


def queue(run: RunDirectory, job: str | None = None) -> None:
    """A job waits to train the run; None: the workers of a queue."""
    run.set_state("queued", host=None, job_id=job)


def queue_again(run: RunDirectory, decision: Decision) -> None:
    """Says of a failed run that is tried again that it waits, unless somebody trains it."""
    with contextlib.suppress(Busy, OSError), run.lock(timeout=0.0):
        if (state := run.state()).state == "failed":
            run.set_state("queued", job_id=None, reason=f"{state.reason}; to be tried again: {decision.why}")


def restore(run: RunDirectory) -> None:
    """Writes a damaged state.json anew."""
    known = run.state()
    run.set_state(known.state, attempt=max([known.attempt, *(each.attempt for each in attempts.read(run))]))


def cancel(run: RunDirectory, by: str, before: str = "") -> None:
    run.set_state("cancelled", reason=f"cancelled by {by}{before}")
    run.log(f"cancelled by {by}{before}")


def cancel_idle(run: RunDirectory, by: str, policy: Policy) -> bool:
    """Cancels a run that is not done; whether it did. Busy: somebody trains it."""
    with hold_idle(run, policy):
        if run.is_done():
            run.forget_cancel()
            return False
        state = run.state()
        settle_killed(run, KILLED.cause, "its process was killed")
        run.forget_signs()
        run.release()
        cancel(run, by, f", and had {state.state} before: {state.reason}" if state.reason else "")
        return True


def retry_by_hand(run: RunDirectory) -> None:
    """Gives a run that is not done a new budget. Busy: somebody trains it."""
    with run.lock(timeout=0.0):
        if run.is_done():
            return
        settle_killed(run, KILLED.cause, KILLED.words)
        attempts.append_line(run, {"event": "retry", "by": this_user(), "at": now_on(run.path)})
        run.forget_cancel()
        run.set_state("planned", host=None, job_id=None)


@contextlib.contextmanager
def hold_idle(run: RunDirectory, policy: Policy) -> Iterator[None]:
    """Holds a run that nobody trains. Busy: somebody does."""
    with run.lock(timeout=0.0):
        if attempts.is_elsewhere(run, policy):
            raise Busy(f"run {run.run_id} gives signs of life on {run.state().host}")
        yield


@contextlib.contextmanager
def held(run: RunDirectory, job: str, policy: Policy) -> Iterator[bool]:
    """Holds a run while this process trains it; yields False where there is nothing to do. Busy: somebody trains it."""
    with run.lock():
        if run.is_done():
            settle_killed(run, "done", "")  # a line that a full disk had no room for
            yield False
            return
        _wait_for_signs(run, policy)
        state, death = run.state(), KILLED
        # The same job, taken off its node.
        if read_failure(run.path) is None and job == state.job_id and job_restarts() > 0:
            death = Death("node", f"its node {state.host} failed, and SLURM has started its job again")
        settle(run, death, advise=True)
        if (who := run.cancel_asked()) is not None:
            cancel(run, who, " before it began")
            yield False
            return
        if (why := _had_enough(run, job, policy)) is not None:
            _write_end(run, "failed", why)
            yield False
            return
        forget_failure(run.path)
        run.give_sign()
        try:
            begun = attempts.begin(run, job, this_node())
            try:
                run.set_state("running", attempt=begun.attempt, host=begun.host, job_id=job, since=begun.began)
                run.log(f"attempt {begun.attempt} on {begun.host}, job {job}, process {os.getpid()}")
            except OSError as error:
                with contextlib.suppress(OSError):
                    attempts.note(run, cause_of(error), describe_error(error))
                raise
            yield True
        finally:
            with contextlib.suppress(OSError):
                run.forget_signs()


def _wait_for_signs(run: RunDirectory, policy: Policy) -> None:
    """Where locks do not reach from node to node, a free one says nothing of an attempt on another machine."""
    begun, seen = attempts.under_way(run), run.last_sign()
    if begun is None or begun.machine == socket.gethostname():
        return
    while not attempts.is_stale(run, policy):
        if run.last_sign() != seen:
            raise Busy(f"run {run.run_id} gives signs of life on {begun.host}")
        time.sleep(min(1.0, policy.heartbeat_seconds / 4))


def _had_enough(run: RunDirectory, job: str, policy: Policy) -> str | None:
    """Why a run does not go on in a job that SLURM restarts without end where nodes fail."""
    past = attempts.current(run)
    if job_restarts() == 0 or not past or past[-1].job_id != job or past[-1].cause not in (*RETRIED, *INTERRUPTED):
        return None
    decision = attempts.decision(run, policy, past[-1].ended)
    return None if decision.again else f"{decision.why}; {past[-1].reason}"


def conclude(run: RunDirectory, ended: str, reason: str | None = None, cause: str | None = None) -> None:
    """Writes how a run ended that this process holds."""
    run.release()
    with contextlib.suppress(OSError):  # whoever settles the run then writes it
        attempts.note(run, cause or ("error" if ended == "failed" else ended), reason)
    try:
        _write_end(run, ended, reason)
    except OSError:
        # The disk is full even for state.json: the old state stays whole, and whoever started this process settles it.
        if ended == "done":
            raise


def correct(run: RunDirectory, ended: str, reason: str | None, cause: str | None = None) -> None:
    """Corrects the state of a run that has stopped, unless somebody has begun it again."""
    with contextlib.suppress(Busy, OSError), run.lock(timeout=0.0):
        if run.state().state != "preempted":
            return
        if cause is not None:
            attempts.amend(run, cause, reason)
        _write_end(run, ended, reason)


def _write_end(run: RunDirectory, ended: str, reason: str | None) -> None:
    run.set_state(ended, reason=reason)
    run.log(ended if reason is None else f"{ended}: {reason}")


def settle_killed(run: RunDirectory, cause: str, reason: str, at_fault: Sequence[str] = ()) -> bool:
    """Writes how an attempt ended that could not say so; whether it was left in the middle, and is `failed` now."""
    state, begun = run.state(), attempts.under_way(run)
    if begun is not None and state.attempt == begun.attempt and state.state not in UNSETTLED:
        # It has ended, and the disk was too full for its line.
        attempts.note(run, "disk" if state.state == "failed" else state.state, state.reason, state.since)
        return False
    if begun is not None:
        attempts.note(run, cause, reason, run.last_sign(), at_fault)
    if state.state != "running" and (begun is None or state.attempt >= begun.attempt):
        return False  # nobody trains it, or somebody has put it back in a queue already
    last = next((each for each in reversed(attempts.read(run)) if each.attempt == state.attempt), None)
    if begun is None and last is not None:  # killed between its line and its state
        run.set_state(ENDS_AS.get(last.cause, "failed"), reason=last.reason)
        return last.cause not in ENDS_AS
    number = 0 if begun is None else begun.attempt
    run.set_state("failed", attempt=max(state.attempt, number), reason=reason)
    return True


def settle(run: RunDirectory, death: Death, advise: bool = False) -> bool:
    """Settles an attempt whose process is gone, with what that noted; whether there was one."""
    noted, cause, words = read_failure(run.path), death.cause, death.words
    at_fault: tuple[str, ...] = ()
    if noted is not None:
        words += f" ({noted.reason})"
        if cause in ("killed", "lost", "disk") or noted.cause == Cause.HUNG:  # else SLURM knows better
            cause, at_fault = str(noted.cause), noted.hosts
    if run.cancel_asked() is not None:
        cause = "cancelled"
    if advise:
        words += f"; sweep again to go on, or see {run.path / 'log.txt'}"
    if not settle_killed(run, cause, words, at_fault):
        return False
    if cause in ENDS_AS:
        run.set_state(ENDS_AS[cause], reason=words)
    run.forget_signs()
    run.log(f"settled: {words}")
    return True


def settle_dead(runs: Sequence[RunDirectory], policy: Policy, death: Death) -> bool:
    """Settles runs whose process is gone, also before it began; False where somebody trains one."""
    settled = True
    for run in runs:
        if run.state().state not in UNSETTLED and attempts.under_way(run) is None:
            continue  # it says how it ended
        try:
            with hold_idle(run, policy):
                # A worker that dies again and again before it begins must use up a budget too.
                if run.state().state in ("planned", "queued"):
                    attempts.begin(run, death.job, death.node)
                settle(run, death)
        except Busy:
            settled = False
    return settled


def settle_without_job(run: RunDirectory, state: State, death: Death) -> bool:
    """Settles a run whose job is gone, unless its state has changed; whether it did."""
    with contextlib.suppress(Busy), run.lock(timeout=0.0):
        if run.state() != state:
            return False
        if state.state == "preempted":
            run.set_state("cancelled", reason=death.words)
            return True
        if state.state == "queued":
            attempts.begin(run, state.job_id, death.node)  # a job that cannot begin must use up a budget too
        return settle(run, death)
    return False


def runs_to_go_on(runs: Sequence[RunDirectory], policy: Policy, now: float) -> list[tuple[RunDirectory, Decision]]:
    """Those of a unit's runs that are tried again, when and where."""
    going = []
    for run in runs:
        state = run.state().state
        if state in UNSETTLED:  # somebody else's concern, unless only signs say so
            if attempts.is_elsewhere(run, policy):
                why = "another machine gives signs of life of it"
                going.append((run, Decision(True, policy.silence_seconds, (), why)))
        elif state not in ("done", "diverged", "cancelled"):
            decision = attempts.decision(run, policy, now)
            if decision.again:
                going.append((run, decision))
    return going


def may_go_on(run: RunDirectory) -> bool:
    """Whether a run that is not done may be trained further without anybody's command."""
    state = run.state().state
    if state == "failed":
        past = attempts.current(run)
        return bool(past) and past[-1].cause in (*RETRIED, *INTERRUPTED)
    return state in (*UNSETTLED, "preempted")
