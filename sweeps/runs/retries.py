"""What becomes of a run after an attempt has ended: whether it is tried again, when, and where not. Pure.

Special here:
- what is not the run's own fault is tried again within a budget a run and one a sweep, after a pause that doubles; what
  would only happen again (bad input, an exception, a divergence) never is;
- a run that was told to stop has failed at nothing: that counts against `max_requeues` alone, however it came back;
- `isoflop retry` begins a new budget: what was before it counts no more, nor are its nodes avoided any longer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import ClusterConfig
    from .attempts import Attempt

RETRIED = ("killed", "hung", "node", "lost", "disk", "trunk")  # against the budgets; trunk: a branch's is not there yet
ON_NODE = ("hung", "node", "lost")  # for which the next attempt goes to another node
INTERRUPTED = ("preempted", "time_limit")
CAUSES = ("done", *INTERRUPTED, "cancelled", "diverged", *RETRIED, "memory", "input", "error")
LONGEST_WAIT = 3600.0  # seconds; a pause that has doubled for long is no longer one that anybody wants


@dataclass(frozen=True)
class Policy:
    """How much is tried again, and when a run counts as dead. Travels in the arguments of jobs."""

    max_requeues: int = 20  # times that a run may be told to stop and go on
    retries: int = 3  # of a run, for what was not its own fault
    sweep_retries: int = 100  # of all runs of a sweep together
    backoff_seconds: float = 30.0  # before the first retry, doubled for each further one
    heartbeat_seconds: float = 10.0  # between two signs of life
    hang_seconds: float = 1800.0  # without a step, after which a run counts as hung

    @classmethod
    def of(cls, cluster: ClusterConfig) -> Policy:
        """What a sweep's cluster says."""
        return cls(
            cluster.max_requeues, cluster.retries, cluster.sweep_retries, cluster.backoff_seconds,
            cluster.heartbeat_seconds, 60 * cluster.hang_minutes,
        )  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """What `decide` says."""

    again: bool
    wait_seconds: float  # from now on, before it may start; 0 where it may start at once
    avoid: tuple[str, ...]  # nodes that it must not start on; the newest last
    why: str  # in a few words, for a reason or a log


def decide(attempts: Sequence[Attempt], policy: Policy, spent: int, now: float) -> Decision:
    """Whether a run is tried again after its last attempt, when, and where not.

    Args:
        attempts: of the run, oldest first, as `attempts.current` gives them.
        policy: the sweep's.
        spent: retries that the whole sweep has had, as `attempts.retries_spent` counts them.
        now: by the clock of the attempts (`runs.now_on`).
    """
    if not attempts:
        return Decision(True, 0.0, (), "it has not begun")
    last = attempts[-1]
    ours = [attempt for attempt in attempts if attempt.budget == last.budget]
    avoid = _nodes(ours)

    def no(why: str) -> Decision:
        return Decision(False, 0.0, avoid, why)

    if last.cause in INTERRUPTED:
        stops = sum(attempt.cause in INTERRUPTED for attempt in ours)
        if stops > policy.max_requeues:
            most = f"{policy.max_requeues} requeues, all that cluster.max_requeues allows"
            return no(f"it had to stop again after {most}")
        return Decision(True, 0.0, avoid, f"it was stopped, and goes on (requeue {stops} of {policy.max_requeues})")
    if last.cause == "memory":
        if sum(attempt.cause == "memory" for attempt in ours) > 1:
            return no("its memory ran out with the smaller micro-batch too")
        return Decision(True, 0.0, avoid, "its memory ran out, and it goes on with a smaller micro-batch")
    if last.cause not in RETRIED:
        return no(f"what ended it ({last.cause}) would only happen again" if last.cause != "done" else "it is done")
    failures = sum(attempt.cause in RETRIED for attempt in ours)
    if failures > policy.retries:
        return no(f"it has had {policy.retries} retries, all that cluster.retries allows")
    if spent >= policy.sweep_retries:
        return no(f"the sweep has had {spent} retries, all that cluster.sweep_retries allows")
    pause = min(LONGEST_WAIT, policy.backoff_seconds * 2.0 ** min(failures - 1, 64))
    wait = min(pause, max(0.0, last.ended + pause - now))
    return Decision(True, wait, avoid, f"retry {failures} of {policy.retries} after {last.cause}")


def _nodes(attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """The nodes that failed these attempts; one that did so twice where it did so last."""
    failed = [node for attempt in attempts if attempt.cause in ON_NODE for node in nodes_at_fault(attempt)]
    return tuple(reversed(dict.fromkeys(reversed(failed))))


def nodes_at_fault(attempt: Attempt) -> list[str]:
    """Those of the ranks that its reason names, for a run may be on many nodes; else that of the first rank."""
    named = re.findall(r"\brank \d+ on ([\w.-]*\w)", attempt.reason or "")
    return named or [attempt.host] * (attempt.host is not None)
