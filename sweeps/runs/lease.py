"""The lease of a run: the lock and the heartbeat of the worker that trains it.

- A worker that dies loses its lock at once. If a file system does not carry locks between nodes, its heartbeat
  (runs/<run_id>/heartbeat) keeps others away until it is too old.
- The next process that takes the lock of a run whose worker is gone records the end of the attempt, with the reason
  from failure.json or SLURM.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...train.errors import UserError
from ...train.flops import flops_exact
from ...train.job.failure import Cause, forget_failure, read_failure
from ...train.schedule import trunk_steps
from .attempts import Policy, decide
from .directory import Busy, RunDirectory, now_on, this_node, this_user
from .journal import ENDS_AS, Cancelled, Failed, Name, Reset, RunRecord, Started, Stopped


class Ending(NamedTuple):
    """How a process leaves a run."""

    state: Name
    reason: str | None = None  # in a sentence; None when done
    cause: str | None = None  # one of attempts.CAUSES; None: what the state says
    cpu_seconds: float | None = None  # see Attempt


@dataclass(frozen=True)
class Death:
    """Why a process ended that could not record it."""

    cause: str  # of an attempt
    reason: str


KILLED = Death("killed", "its worker was killed")
UNWRITTEN = Death("disk", "the end of the attempt could not be recorded, as on a full disk")
Explain = Callable[[Started], Death]  # why the process of an attempt under way is gone


@contextlib.contextmanager
def hold(
    run: RunDirectory, job: str, policy: Policy, explain: Explain = lambda start: KILLED
) -> Iterator[RunRecord | None]:
    """Hold a run's lock and record that an attempt begins; within the block, `conclude` must record its end.

    Yields:
        The run's record once the attempt has begun; None if the run is over or out of retries.

    Raises:
        Busy: another process trains the run.
        OSError: the beginning could not be written, and nothing has begun.
    """
    with hold_idle(run, policy):
        record = reconcile(run, explain)
        decision = decide(record.recent, policy, 0, 0.0)
        if record.state.state in ("done", "diverged", "cancelled"):
            yield None
        elif (by := run.cancel_asked()) is not None:
            cancel(run, f"cancelled by {by} before it began")
            yield None
        elif not decision.again:
            if record.state.state == "preempted":
                run.write_event(Failed, reason=f"{decision.why}; {record.state.reason}")
            yield None
        else:
            forget_failure(run.path)
            run.give_sign()
            try:
                record = begin(run, record, job, this_node())
                with contextlib.suppress(OSError):
                    run.log(f"attempt {record.state.attempt} on {record.state.host}, job {job}, process {os.getpid()}")
                yield record
            finally:
                with contextlib.suppress(OSError):
                    run.forget_signs()


@contextlib.contextmanager
def hold_idle(run: RunDirectory, policy: Policy) -> Iterator[None]:
    """Hold the lock of a run that no process trains. Raises Busy if one does."""
    with run.lock(timeout=0.0):
        start = run.record().open
        if start is not None and start.machine != socket.gethostname() and not is_silent(run, policy):
            raise Busy(f"run {run.run_id} has a recent heartbeat from {start.host}")
        yield


def begin(run: RunDirectory, record: RunRecord, job: str | None, node: str | None) -> RunRecord:
    """Record that an attempt begins; `node` is None for a worker that died before it claimed the run."""
    first_step = run.newest_checkpoint() or 0
    values: dict[str, Any] = {"metrics_bytes": _size(run.path / "metrics.jsonl"), "first_step": first_step}
    with contextlib.suppress(UserError):  # a config that cannot be read ends the attempt
        config = run.config()
        begins = trunk_steps(config) if config.parent is not None else 0
        values |= {"steps": config.steps, "begins": begins, "first_step": max(begins, first_step)}
        values |= {"flops_per_step": flops_exact(config) / config.steps}
        if config.parallel.device != "cpu":
            import torch

            values["gpus"] = config.parallel.world_size if torch.cuda.is_available() else 0
    machine = socket.gethostname()
    return run.write_event(Started, attempt=record.next_attempt, host=node, job_id=job, machine=machine, **values)


def conclude(run: RunDirectory, ending: Ending, at_fault: Sequence[str] = (), ended: float | None = None) -> RunRecord:
    """Record how a run's open attempt ended, at `ended` (None: now), and the nodes `at_fault`.

    The caller holds the run's lock. On a full disk the attempt stays open, for the next holder to reconcile.
    """
    run.release()
    record = run.record()
    if (start := record.open) is None:
        return record
    cause = ending.cause or ("error" if ending.state == "failed" else ending.state)
    saved = max(start.begins, run.newest_checkpoint() or 0)
    logged = 0
    if _size(run.path / "metrics.jsonl") > start.metrics_bytes:
        logged = int(run.last_metrics().get("step", 0))
    last = max(start.first_step, saved, start.steps if cause == "done" else logged)
    with contextlib.suppress(OSError):
        record = run.write_event(
            Stopped,
            flush=True,
            attempt=start.attempt,
            state=ending.state,
            cause=cause,
            reason=ending.reason,
            ended=now_on(run.path) if ended is None else ended,
            last_step=last,
            saved_step=saved,
            at_fault=tuple(at_fault),
            cpu_seconds=ending.cpu_seconds,
        )
        run.log(ending.state if ending.reason is None else f"{ending.state}: {ending.reason}")
    return record


def reconcile(run: RunDirectory, explain: Explain = lambda start: KILLED) -> RunRecord:
    """Record the end of a run's open attempt, whose process is gone; `explain` gives the cause.

    The caller holds the run's lock.
    """
    record = run.record()
    if (start := record.open) is None:
        return record
    death, noted, at_fault = explain(start), read_failure(run.path), tuple[str, ...]()
    cause, reason = death.cause, death.reason
    if noted is not None:
        reason += f" ({noted.reason})"
        if cause in ("killed", "lost", "disk") or noted.cause == Cause.HUNG:  # else SLURM knows better
            cause, at_fault = str(noted.cause), noted.hosts
    if run.cancel_asked() is not None:
        cause = "cancelled"
    record = conclude(run, Ending(ENDS_AS.get(cause, "failed"), reason, cause), at_fault, run.last_sign())
    with contextlib.suppress(OSError):
        run.forget_signs()
    return record


def reconcile_idle(run: RunDirectory, policy: Policy, explain: Explain = lambda start: KILLED) -> bool:
    """Record the end of a run's open attempt if its process is gone. Returns True if one was recorded."""
    with contextlib.suppress(Busy, OSError), hold_idle(run, policy):
        return run.record().open is not None and reconcile(run, explain).open is None
    return False


def charge(run: RunDirectory, policy: Policy, job: str, death: Death) -> None:
    """Record a failed attempt of a run for a job that died before claiming it, so that retries run out."""
    with contextlib.suppress(Busy, OSError), hold_idle(run, policy):
        record = run.record()
        if record.open is None and record.state.state not in ("done", "diverged", "cancelled"):
            begin(run, record, job, None)
            reconcile(run, lambda start: death)


def cancel(run: RunDirectory, reason: str) -> None:
    """Record that a run is cancelled; the caller holds its lock."""
    run.write_event(Cancelled, flush=True, reason=reason)
    run.log(reason)


def cancel_idle(run: RunDirectory, by: str, policy: Policy) -> bool:
    """Cancel an unfinished run. Returns False if it is done. Raises Busy if a process trains it."""
    with hold_idle(run, policy):
        if run.is_done():
            run.forget_cancel()
            return False
        before = reconcile(run, lambda start: Death("killed", "its process was killed")).state
        history = f" (it was {before.state} before: {before.reason})" if before.reason else ""
        cancel(run, f"cancelled by {by}{history}")
        return True


def reset(run: RunDirectory, policy: Policy) -> None:
    """Give a run a new budget of retries, and plan it again unless it is done. Raises Busy if a process trains it."""
    with hold_idle(run, policy):
        reconcile(run)
        forget_failure(run.path)
        run.forget_cancel()
        run.write_event(Reset, by=this_user())


def is_silent(run: RunDirectory, policy: Policy) -> bool:
    """Return whether a run's last heartbeat is missing, or so old that the run counts as dead."""
    seconds = sign_age(run)
    return seconds is None or seconds > policy.silence_seconds


def sign_age(run: RunDirectory, now: float | None = None) -> float | None:
    """Return the seconds from a run's last heartbeat to `now` (default: by `now_on`), or None without a heartbeat."""
    seen = run.last_sign()
    return None if seen is None else max(0.0, (now_on(run.path) if now is None else now) - seen)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
