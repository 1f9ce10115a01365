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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..runs import attempts, heartbeat
from ..runs.directory import Busy, RunDirectory, State, SweepDirectory
from ..runs.retries import Decision, Policy
from ..slurm import commands as slurm
from .attempt import cause_in

# Causes of attempts by what SLURM says of their job. The job of a node that failed may be waiting again by now.
CAUSES = {
    "NODE_FAIL": "node", "BOOT_FAIL": "node", "PENDING": "node", "REQUEUED": "node", "OUT_OF_MEMORY": "memory",
    "TIMEOUT": "time_limit", "DEADLINE": "time_limit", "PREEMPTED": "preempted", "CANCELLED": "cancelled",
}  # fmt: skip
NOT_ENDED = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED")
UNSETTLED = ("planned", "queued", "running")  # states of runs that do not say how a process ended


@dataclass(frozen=True)
class Death:
    """Why a run's process is gone."""

    cause: str  # of an attempt
    words: str
    job: str | None = None
    node: str | None = None


KILLED = Death("killed", "its worker was killed")
UNWRITTEN = Death("disk", "how it ended could not be written")


def death_of(
    job: str | None, node: str | None, said: Mapping[str, tuple[str, str | None]] | None = None
) -> Death:  # fmt: skip
    """Why the process of a run is gone: by what SLURM says of its job, or of a process on this machine nothing.

    Args:
        job: SLURM's id of it; None: a process on this machine.
        node: that it was on; None: as SLURM says.
        said: what `slurm.outcomes` answers of this job and others; None: it is asked.
    """
    if job is None:
        return KILLED
    outcome, last = (slurm.outcomes([job]) if said is None else said).get(job, (None, None))
    node = node or last
    where = f"its job {job} on {node}" if node else f"its job {job}"
    if outcome is None:
        return Death("lost", f"{where} is gone, and SLURM has forgotten how it ended", job, node)
    return Death(CAUSES.get(outcome, "killed"), f"{where} left it, and SLURM calls the job {outcome}", job, node)


def of_worker(death: Death) -> Death:
    """The same for the runs of a queue's worker: who cancelled its job took a worker away, and has cancelled no run."""
    return replace(death, cause="preempted") if death.cause == "cancelled" else death


def settle_dead(runs: Sequence[RunDirectory], policy: Policy, death: Death) -> bool:
    """Settles runs whose process is gone: what it had begun, or was about to, counts as an attempt that it ended.

    Returns:
        Whether all are settled; False where somebody has one, or gives signs of life on another machine.
    """
    settled = True
    for run in runs:
        if run.state().state not in UNSETTLED and attempts.under_way(run) is None:
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
    known = run.failure_cause()
    cause = death.cause
    if cause == "killed" or known == "hung":  # else SLURM knows better
        cause = known or cause_in(noted)
    cause = "cancelled" if run.cancel_asked() is not None else cause
    if not attempts.settle_killed(run, cause, words):
        return False
    if cause in attempts.STATES:
        run.set_state(attempts.STATES[cause], reason=words)
    run.forget_signs()
    run.log(f"settled: {words}")
    return True


def going_on(runs: Sequence[RunDirectory], policy: Policy, now: float) -> list[tuple[RunDirectory, Decision]]:
    """Those of runs that nobody trains at the moment that are to be trained, and when and where; the others are over.

    Args:
        runs: of one unit.
        policy: the sweep's.
        now: the file system's clock.
    """
    going = []
    for run in runs:
        state = run.state().state
        if state in UNSETTLED:  # somebody else has it: his affair, unless only signs say so
            if is_elsewhere(run, policy):
                wait = heartbeat.limit(policy)
                going.append((run, Decision(True, wait, (), "another machine gives signs of life of it")))
            continue
        if state in ("done", "diverged", "cancelled"):
            continue
        decision = attempts.decision(run, policy, now)
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

    Whoever passes `live` holds the sweep, and has asked for it since: else a job that was submitted meanwhile would
    count as gone.

    Args:
        sweep: whose runs.
        policy: says when a run that shows no sign of life counts as dead.
        live: ids of the jobs that wait or run; None: SLURM does not answer, and only runs are settled that had begun.

    Returns:
        Ids of the runs that were settled.
    """
    settled, queued = _settle_queues(sweep, policy, live)
    states = {run: run.state() for run in sweep.runs() if run.run_id not in queued and run.run_id not in settled}
    lost = {run: state for run, state in states.items() if _seems_lost(run, state, policy, live)}
    said = {} if live is None else slurm.outcomes(state.job_id for state in lost.values() if state.job_id is not None)
    logs = _logs(sweep) if lost else {}
    for run, state in lost.items():
        death = Death("lost", "it gives no sign of life", state.job_id, state.host)
        if live is not None:
            death = death_of(state.job_id, state.host, said)
        if state.state == "queued" and _is_there(state.job_id, said):
            continue  # submitted, or started, since somebody looked
        if state.state == "preempted" and death.cause != "cancelled":
            continue  # it has saved, and is started again by whoever looks after the sweep
        if _settle_lost(run, state, _with_log(death, sweep, logs)):
            settled.append(run.run_id)
    return settled


def _settle_queues(
    sweep: SweepDirectory, policy: Policy, live: set[str] | None
) -> tuple[list[str], set[str]]:  # fmt: skip
    """Settles what dead workers of queues had; returns the runs that were settled, and those that workers see to."""
    from ..slurm.launch_record import LaunchRecord
    from .queue import Queue

    settled, queued = list[str](), set[str]()
    known = LaunchRecord.read(sweep).queues
    for queue in Queue.all_of(sweep):
        settled += [name for unit in queue.recover(policy) for name in unit.runs]
        workers = known[queue.folder.name].workers if queue.folder.name in known else []
        left = [name for unit in queue.left() for name in unit.runs]
        if live is not None and workers and not live.intersection(workers) and not queue.was_claimed():
            settled += _settle_unclaimed(sweep, [sweep.run(name) for name in left], workers, policy)
        if workers:  # what is left in another queue was submitted anew
            queued.update(left)
        queued |= {name for unit in queue.running() for name in unit.runs}
    return settled, queued


def _settle_unclaimed(
    sweep: SweepDirectory, runs: Sequence[RunDirectory], workers: Sequence[str], policy: Policy
) -> list[str]:  # fmt: skip
    """Of runs in a queue all of whose workers died before they had claimed one: that, too, uses up a budget."""
    waiting = [run for run in runs if run.state().state in UNSETTLED]
    said = slurm.outcomes(workers) if waiting else {}
    if not waiting or any(_is_there(job, said) for job in workers):
        return []
    death = _with_log(of_worker(death_of(workers[0], None, said)), sweep, _logs(sweep))
    return [run.run_id for run in waiting if settle_dead([run], policy, death)]


def _seems_lost(run: RunDirectory, state: State, policy: Policy, live: set[str] | None) -> bool:
    """Whether nobody is at a run, and no job comes to it, for all that is seen without asking what its job came to."""
    if state.state not in ("queued", "running", "preempted") or state.job_id is None:
        return False  # it ended, or is about to be submitted
    if live is not None and state.job_id in live:
        return False
    return heartbeat.is_stale(run, policy) if state.state == "running" else live is not None


def _settle_lost(run: RunDirectory, state: State, death: Death) -> bool:
    with contextlib.suppress(Busy), run.lock(timeout=0.0):
        if run.state() != state:
            return False
        if state.state == "queued":
            attempts.begin(run, state.job_id, death.node)  # a job that cannot begin must use up a budget too
        if state.state != "preempted":
            return _settle(run, death)
        run.set_state("cancelled", reason=death.words)
        return True
    return False


def _is_there(job: str | None, said: Mapping[str, tuple[str, str | None]]) -> bool:
    """Whether a job has not ended, for all that SLURM says of it."""
    return said.get(job or "", (None, None))[0] in NOT_ENDED


def _logs(sweep: SweepDirectory) -> dict[str, list[Path]]:
    """The logs of a sweep's SLURM jobs, by job id: of `7_2_0_log.err` that is `7_2`, or 7 where 2 is a rank."""
    found = defaultdict[str, list[Path]](list)
    for path in sweep.path.glob("jobs/*/*_*log.*"):
        array, task, *_ = path.name.split("_")
        found[array].append(path)
        found[f"{array}_{task}"].append(path)
    return found


def _with_log(death: Death, sweep: SweepDirectory, logs: Mapping[str, Sequence[Path]]) -> Death:
    """The same with what the job's logs say: the first task to end badly, as `srun` wrote, or that there are none.

    A job whose node does not see the sweep can write neither a state nor a log. That there is none is all that tells.
    """
    if not (own := logs.get(death.job or "")):
        found = f"it left no log in {sweep.path / 'jobs'}: does its node see that folder? All nodes must share it"
        return replace(death, words=f"{death.words}; {found}")
    errors = (log.read_text(encoding="utf-8", errors="replace") for log in own if log.suffix == ".err")
    said = next((words for text in errors if (words := slurm.first_to_end(text)) is not None), None)
    return death if said is None else replace(death, words=f"{death.words}; {said}")
