"""What became of runs whose process is gone, and whether they are tried again.

Special here:
- a run is settled by whoever holds its lock, so by one at a time, and a run that says how it ended is left as it is: to
  settle twice is to settle once;
- SLURM explains, where it answers: a job that it calls FAILED is one thing and NODE_FAIL another, for then the node is
  avoided. That a run is gone is seen without it, from a free lock and a heartbeat that has stopped.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from . import attempts, heartbeat, retries, slurm
from .attempt import cause_in
from .retries import Decision, Policy
from .runs import Busy, RunDirectory, SweepDirectory

# Causes of attempts by what SLURM says of their job. The job of a node that failed may be waiting again by now.
CAUSES = {
    "NODE_FAIL": "node", "BOOT_FAIL": "node", "PENDING": "node", "REQUEUED": "node", "OUT_OF_MEMORY": "memory",
    "TIMEOUT": "time_limit", "DEADLINE": "time_limit", "PREEMPTED": "preempted", "CANCELLED": "cancelled",
}  # fmt: skip
OPEN = ("planned", "queued", "running")


@dataclass(frozen=True)
class Death:
    """Why a run's process is gone."""

    cause: str  # of an attempt
    words: str
    job: str | None = None
    node: str | None = None


KILLED = Death("killed", "its worker was killed")
UNWRITTEN = Death("disk", "how it ended could not be written")


def death_of(job: str | None, node: str | None) -> Death:
    """Why the process of a run is gone: by what SLURM says of its job, or of a process on this machine nothing."""
    if job is None:
        return KILLED
    outcome = slurm.outcome(job)
    where = f"its job {job} on {node}" if node else f"its job {job}"
    if outcome is None:
        return Death("lost", f"{where} is gone, and SLURM has forgotten how it ended", job, node)
    return Death(CAUSES.get(outcome, "killed"), f"{where} left it, and SLURM calls the job {outcome}", job, node)


def settle_dead(runs: Sequence[RunDirectory], policy: Policy, death: Death) -> bool:
    """Settles runs whose process is gone: what it had begun, or was about to, counts as an attempt that it ended.

    Returns:
        Whether all are settled; False where somebody has one, or gives signs of life on another machine.
    """
    settled = True
    for run in runs:
        if run.state().state not in OPEN and attempts.under_way(run) is None:
            continue  # it says how it ended
        try:
            with run.lock(timeout=0.0):
                if is_elsewhere(run, policy):
                    settled = False
                    continue
                # A worker that dies again and again before it begins must use up a budget too.
                if run.state().state in ("planned", "queued"):
                    attempts.begin(run, death.job, death.node)
                _settle(run, death)
        except Busy:
            settled = False
    return settled


def is_elsewhere(run: RunDirectory, policy: Policy) -> bool:
    """Whether a run gives signs of life on another machine: not every file system carries locks from node to node."""
    begun = attempts.under_way(run)
    return begun is not None and begun.machine != socket.gethostname() and not heartbeat.is_stale(run, policy)


def _settle(run: RunDirectory, death: Death) -> bool:
    """The line and the state of an attempt that could not write them; the caller holds the run."""
    noted = run.failure()
    words = death.words if noted is None else f"{death.words} ({noted})"
    cause = cause_in(noted) if death.cause == "killed" else death.cause
    cause = "cancelled" if run.cancel_asked() is not None else run.failure_cause() or cause
    if not attempts.settle_killed(run, cause, words):
        return False
    if cause in attempts.STATES:
        run.set_state(attempts.STATES[cause], reason=words)
    run.forget_signs()
    run.log(f"settled: {words}")
    return True


def going_on(
    runs: Sequence[RunDirectory], sweep: SweepDirectory, policy: Policy, now: float
) -> list[tuple[RunDirectory, Decision]]:
    """Those of runs that nobody trains at the moment that are to be trained, and when and where; the others are over.

    Args:
        runs: of one unit.
        sweep: theirs.
        policy: the sweep's.
        now: the file system's clock.
    """
    going = []
    for run in runs:
        state = run.state().state
        if state in OPEN:  # somebody else has it: his affair, unless only signs say so
            if is_elsewhere(run, policy):
                wait = heartbeat.limit(policy)
                going.append((run, Decision(True, wait, (), "another machine gives signs of life of it")))
            continue
        if state in ("done", "diverged", "cancelled"):
            continue
        tries = attempts.read(run)
        decision = retries.decide(tries, policy, 0, now)
        if decision.again and tries and tries[-1].cause in retries.RETRIED:  # to count those of all runs takes a while
            decision = retries.decide(tries, policy, attempts.retries_spent(sweep), now)
        if decision.again:
            going.append((run, decision))
    return going


def say_queued(run: RunDirectory, decision: Decision) -> None:
    """Of a run that failed and will be tried again: says so in its state, unless somebody has it."""
    with contextlib.suppress(Busy, OSError), run.lock(timeout=0.0):
        if (state := run.state()).state == "failed":
            run.forget_failure()
            run.set_state("queued", job_id=None, reason=f"{state.reason}; to be tried again: {decision.why}")


def settle_lost(sweep: SweepDirectory, policy: Policy, live: set[str] | None) -> list[str]:
    """Settles the runs that a job left behind which is gone without a word; those of queues are released there.

    Args:
        sweep: whose runs.
        policy: says when a run that shows no sign of life counts as dead.
        live: ids of the jobs that wait or run; None: SLURM does not answer, and only runs are settled that had begun.

    Returns:
        Ids of the runs that were settled.
    """
    from .queue import Queue

    settled, queued = list[str](), set[str]()
    for queue in Queue.all_of(sweep):
        settled += [name for unit in queue.recover(policy) for name in unit.runs]
        queued |= {name for unit in (*queue.left(), *queue.running()) for name in unit.runs}
    for run in sweep.runs():
        if run.run_id not in queued and run.run_id not in settled and _settle_lost(sweep, run, policy, live):
            settled.append(run.run_id)
    return settled


def _settle_lost(sweep: SweepDirectory, run: RunDirectory, policy: Policy, live: set[str] | None) -> bool:
    state = run.state()
    if state.state not in ("queued", "running", "preempted") or state.job_id is None:
        return False  # it ended, or is about to be submitted
    if live is not None and state.job_id in live:
        return False
    if state.state == "running" and not heartbeat.is_stale(run, policy):
        return False
    if state.state != "running" and live is None:
        return False
    death = Death("lost", "it gives no sign of life", state.job_id, state.host)
    if live is not None:
        death = death_of(state.job_id, state.host or slurm.node_of(state.job_id))
    if state.state == "preempted" and death.cause != "cancelled":
        return False  # it has saved, and is started again by whoever looks after the sweep
    with contextlib.suppress(Busy), run.lock(timeout=0.0):
        if run.state() != state:
            return False
        if state.state == "queued":
            attempts.begin(run, state.job_id, death.node)  # a job that cannot begin must use up a budget too
        words = "; ".join([death.words, *_in_logs(sweep, state.job_id)])
        if state.state != "preempted":
            return _settle(run, replace(death, words=words))
        run.set_state("cancelled", reason=words)
        return True
    return False


def _in_logs(sweep: SweepDirectory, job: str) -> list[str]:
    """What a SLURM job's logs say of its end: the first task that ended badly, as `srun` wrote, or that there are none.

    A job whose node does not see the sweep can write neither a state nor a log. That there is none is all that tells.
    """
    logs = list(sweep.path.glob(f"jobs/*/{job}_*log.*"))
    if not logs:
        return [f"it left no log in {sweep.path / 'jobs'}: does its node see that folder? All nodes must share it"]
    errors = [log.read_text(encoding="utf-8", errors="replace") for log in logs if log.suffix == ".err"]
    found = [words for text in errors if (words := slurm.first_to_end(text)) is not None]
    return found[:1]
