"""What became of runs whose job or worker is gone, in SLURM's words where it answers.

That a run is gone is seen without SLURM, from a free lock and signs of life that have stopped; SLURM says why: a job
that it calls FAILED is one thing and NODE_FAIL another, for then the node is avoided.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..runs import attempts, states
from ..runs.attempts import Policy
from ..runs.directory import RunDirectory, State, SweepDirectory
from ..runs.queue import Queue, Unit
from ..runs.states import KILLED, Death
from . import commands as slurm
from .record import LaunchRecord

Outcomes = Mapping[str, tuple[str, str | None]]  # what `slurm.outcomes` answers

# Causes of attempts by SLURM's state of the job. The job of a node that failed may be waiting again by now.
CAUSES = {
    "NODE_FAIL": "node",
    "BOOT_FAIL": "node",
    "PENDING": "node",
    "REQUEUED": "node",
    "OUT_OF_MEMORY": "memory",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
}
NOT_ENDED = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED")


def death_of(job: str | None, node: str | None, said: Outcomes | None = None) -> Death:
    """Why the process of a job is gone, or without a job, one on this machine."""
    if job is None:
        return KILLED
    outcome, last = (slurm.outcomes([job]) if said is None else said).get(job, (None, None))
    node = node or last
    where = f"its job {job} on {node}" if node else f"its job {job}"
    if outcome is None:
        return Death("lost", f"{where} is gone, and SLURM has forgotten how it ended", job, node)
    return Death(CAUSES.get(outcome, "killed"), f"{where} left it, and SLURM calls the job {outcome}", job, node)


def _of_worker(death: Death) -> Death:
    """Who cancelled the job of a queue's worker has cancelled no run."""
    return replace(death, cause="preempted") if death.cause == "cancelled" else death


def settle_queue(queue: Queue, policy: Policy) -> list[Unit]:
    """Settles units whose worker died: each is ended, or released to be tried again. Anybody may call it."""
    lost = queue.lost()
    # Outside the queue's lock: SLURM may take a minute to answer.
    said = slurm.outcomes({claim.job for claim in lost.values() if claim.job is not None})
    return [
        unit
        for unit, claim in lost.items()
        if queue.settle_lost(unit, claim, policy, _of_worker(death_of(claim.job, claim.host, said)))
    ]


def settle_lost(sweep: SweepDirectory, policy: Policy, live: set[str] | None) -> list[str]:
    """Settles the runs whose job is gone without a word, and returns their ids; those of queues are released there.

    Args:
        sweep: held by the caller since before it asked for `live`, so that no job was submitted meanwhile.
        policy: says when a run without signs of life counts as dead.
        live: ids of the jobs that wait or run; None: SLURM does not answer, and only runs are settled that had begun.
    """
    settled, queued = _settle_queues(sweep, policy, live)
    states_of = {run: run.state() for run in sweep.runs() if run.run_id not in queued and run.run_id not in settled}
    lost = {run: state for run, state in states_of.items() if _seems_lost(run, state, policy, live)}
    said = {} if live is None else slurm.outcomes(state.job_id for state in lost.values() if state.job_id is not None)
    logs = _logs(sweep) if lost else {}
    for run, state in lost.items():
        death = Death("lost", "it gives no sign of life", state.job_id, state.host)
        if live is not None:
            death = death_of(state.job_id, state.host, said)
        if state.state == "queued" and _is_there(state.job_id, said):
            continue  # submitted, or started, since somebody looked
        if state.state == "preempted" and death.cause != "cancelled":
            continue  # it has saved, and whoever looks after the sweep starts it again
        if states.settle_without_job(run, state, _with_log(death, sweep, logs)):
            settled.append(run.run_id)
    return settled


def _settle_queues(sweep: SweepDirectory, policy: Policy, live: set[str] | None) -> tuple[list[str], set[str]]:
    """Returns the runs settled, and those that workers will train."""
    settled, queued = list[str](), set[str]()
    known = LaunchRecord.read(sweep).queues
    for queue in Queue.all_of(sweep):
        settled += [name for unit in settle_queue(queue, policy) for name in unit.runs]
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
) -> list[str]:
    """Of runs in a queue whose workers all died before they had claimed one."""
    waiting = [run for run in runs if run.state().state in states.UNSETTLED]
    said = slurm.outcomes(workers) if waiting else {}
    if not waiting or any(_is_there(job, said) for job in workers):
        return []
    death = _with_log(_of_worker(death_of(workers[0], None, said)), sweep, _logs(sweep))
    return [run.run_id for run in waiting if states.settle_dead([run], policy, death)]


def _seems_lost(run: RunDirectory, state: State, policy: Policy, live: set[str] | None) -> bool:
    if state.state not in ("queued", "running", "preempted") or state.job_id is None:
        return False  # it ended, or is about to be submitted
    if live is not None and state.job_id in live:
        return False
    return attempts.is_stale(run, policy) if state.state == "running" else live is not None


def _is_there(job: str | None, said: Outcomes) -> bool:
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
    """The same with what the job's logs say: the first task to end badly, or that there are none.

    A job whose node does not see the sweep can write neither a state nor a log.
    """
    if not (own := logs.get(death.job or "")):
        found = f"it left no log in {sweep.path / 'jobs'}: does its node see that folder? All nodes must share it"
        return replace(death, words=f"{death.words}; {found}")
    errors = (log.read_text(encoding="utf-8", errors="replace") for log in own if log.suffix == ".err")
    said = next((words for text in errors if (words := slurm.first_to_end(text)) is not None), None)
    return death if said is None else replace(death, words=f"{death.words}; {said}")
