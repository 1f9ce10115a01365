"""Attempts at a run, and whether another follows.

- Failures that are not the run's fault are retried after doubling pauses, within a budget per run and one per sweep.
  Others (bad input, an exception, a divergence) would happen again, and are not.
- Interruptions count against `max_requeues` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from ...train.job.failure import Cause
from .forms import Amount, Count

if TYPE_CHECKING:
    from ..config import ClusterConfig

ON_NODE = (str(Cause.HUNG), str(Cause.NODE), "lost")  # the next attempt goes to another node
# Against the budgets; trunk: a branch's trunk is not there yet.
RETRIED = (str(Cause.KILLED), str(Cause.UNKNOWN), *ON_NODE, str(Cause.DISK), str(Cause.PROGRAM), "trunk")
INTERRUPTED = ("preempted", "time_limit")
CAUSES = ("done", *INTERRUPTED, "cancelled", *RETRIED, *(str(cause) for cause in Cause if cause not in RETRIED))
LONGEST_WAIT = 3600.0  # seconds between two attempts
MARGIN_SECONDS = 10.0  # beyond three periods without a sign of life, for a file server that stalls


@dataclass(frozen=True)
class Policy:
    """How often runs are retried, and when a run counts as dead."""

    max_requeues: int = 20  # times that a run may be told to stop and go on
    retries: int = 3  # per run, for what was not its own fault
    sweep_retries: int = 100  # of all runs of a sweep together
    backoff_seconds: float = 30.0  # before the first retry, doubled for each further one
    heartbeat_seconds: float = 10.0  # between two signs of life
    hang_seconds: float = 1800.0  # without a step, after which a run counts as hung

    @classmethod
    def of(cls, cluster: ClusterConfig) -> Policy:
        same = {item.name: getattr(cluster, item.name) for item in fields(cls) if item.name != "hang_seconds"}
        return cls(**same, hang_seconds=60 * cluster.hang_minutes)

    @property
    def silence_seconds(self) -> float:
        """Return the seconds without a heartbeat after which a run counts as dead."""
        return 3 * self.heartbeat_seconds + MARGIN_SECONDS


@dataclass(frozen=True)
class Attempt:
    """One start of a run. Times are the file system's, in seconds since the epoch."""

    attempt: Count  # counts from 1
    began: Amount
    ended: Amount  # of one that was killed: its last sign of life
    seconds: Amount
    host: str | None  # the node of its first rank, as SLURM names it
    job_id: str | None
    cause: str  # one of CAUSES
    reason: str | None  # in a sentence
    first_step: Count  # where it resumed
    last_step: Count  # the last that it is known to have taken
    saved_step: Count  # of the newest checkpoint that it left
    flops: Amount  # of the steps that it took, exact convention
    flops_wasted: Amount  # of those among them that had to be made again, or that led nowhere
    gpus: Amount = 0.0  # ranks times GPUs, times `share`
    share: Amount = 1.0  # of its process, which earlier versions divided between runs
    at_fault: tuple[str, ...] = ()  # nodes, where its ranks were on several
    budget: int = 0  # times that a user had asked for a retry before
    cpu_seconds: Amount | None = None  # CPU time of its first rank; None: unknown, e.g. after a kill

    @property
    def paid(self) -> float:
        """Return the seconds times the attempt's share of its process, which is 1 unless an earlier version ran it."""
        return self.seconds * self.share


@dataclass(frozen=True)
class Decision:
    again: bool
    wait_seconds: float  # from now on, before it may start
    avoid: tuple[str, ...]  # nodes that it must not start on; the newest last
    why: str  # in a few words, for a reason or a log


def decide(attempts: Sequence[Attempt], policy: Policy, spent: int, now: float) -> Decision:
    """Decide whether, when and where to retry a run, from its `attempts`, oldest first.

    `spent`: retries that the sweep has used.
    """
    if not attempts:
        return Decision(True, 0.0, (), "it has not begun")
    last = attempts[-1]
    nodes = [node for attempt in attempts if attempt.cause in ON_NODE for node in attempt.at_fault or (attempt.host,)]
    avoid = tuple(reversed(dict.fromkeys(node for node in reversed(nodes) if node is not None)))

    def no(why: str) -> Decision:
        return Decision(False, 0.0, avoid, why)

    if last.cause in INTERRUPTED:
        stops = sum(attempt.cause in INTERRUPTED for attempt in attempts)
        if stops > policy.max_requeues:
            limit = f"cluster.max_requeues={policy.max_requeues}"
            return no(f"it was interrupted more often than {limit} allows")
        return Decision(True, 0.0, avoid, f"it was stopped and continues (requeue {stops} of {policy.max_requeues})")
    if last.cause == "memory":
        if sum(attempt.cause == "memory" for attempt in attempts) > 1:
            return no("it ran out of memory with the smaller micro-batch too")
        return Decision(True, 0.0, avoid, "it ran out of memory, and continues with a smaller micro-batch")
    if last.cause not in RETRIED:
        return no(f"a retry would end the same way ({last.cause})" if last.cause != "done" else "it is done")
    failures = sum(attempt.cause in RETRIED for attempt in attempts)
    if failures > policy.retries:
        return no(f"it has used its retries (cluster.retries={policy.retries})")
    if spent >= policy.sweep_retries:
        return no(f"the sweep has used its retries (cluster.sweep_retries={policy.sweep_retries})")
    pause = min(LONGEST_WAIT, policy.backoff_seconds * 2.0 ** min(failures - 1, 64))
    wait = min(pause, max(0.0, last.ended + pause - now))
    return Decision(True, wait, avoid, f"retry {failures} of {policy.retries} after {last.cause}")


def with_waste(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts with `flops_wasted` filled in.

    Wasted are steps that a later attempt repeated, steps of the last attempt after its newest checkpoint, and all
    steps of a run that diverged.
    """
    if not attempts:
        return []
    last = attempts[-1]
    resumed = last.last_step if last.cause == "done" else last.saved_step
    wasted = []
    for attempt in reversed(attempts):
        useful = max(attempt.first_step, min(attempt.last_step, resumed)) - attempt.first_step
        wasted.append(attempt.flops * (1 - useful / max(1, attempt.last_step - attempt.first_step)))
        resumed = min(resumed, attempt.first_step)
    wasted.reverse()
    if last.cause == "diverged":
        wasted[-1] += sum(attempt.flops for attempt in attempts) - sum(wasted)
    return [replace(attempt, flops_wasted=flops) for attempt, flops in zip(attempts, wasted, strict=True)]


def unrecorded_steps(attempts: Sequence[Attempt], begins: int, ends: int) -> int:
    """Count a run's steps from step `begins` to its first recorded attempt, or to `ends` if there is none."""
    return max(0, min((attempt.first_step for attempt in attempts), default=ends) - begins) if ends > begins else 0
