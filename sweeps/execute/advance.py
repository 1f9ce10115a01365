"""What of a sweep starts next: for the command, on this machine and on SLURM, and for SLURM's keeper alike.

The keeper is a tiny SLURM job that starts what must be started again, and goes:
- nothing on a login node has to live: two keepers always wait in the queue, and each begins by replacing itself;
- a pass holds the sweep and leaves on disk all that it decides, so it can be killed at any moment;
- a run's fate is read from its directory; where SLURM does not say which jobs live, a pass does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...train.errors import UserError, counted
from .. import prepare
from ..config import ClusterConfig, SweepConfig
from ..growth import extend
from ..prepare import Prepared
from ..runs import attempts, membership, states
from ..runs.attempts import Policy
from ..runs.directory import Busy, RunDirectory, SweepDirectory, now_on
from ..runs.queue import Unit
from ..slurm import commands as slurm
from ..slurm.backend import Calls, SlurmBackend
from ..slurm.supervisor import settle_lost
from . import worker
from .hopeless import Judge

if TYPE_CHECKING:
    from .local import LocalBackend

    Backend = LocalBackend | SlurmBackend  # where jobs run

LOCK_SECONDS = 120.0  # that another pass, or a command, may hold the sweep


@dataclass
class Survey:
    due: dict[str, tuple[str, ...]] = field(default_factory=dict)  # nodes to avoid, by the id of a run to start now
    later: list[str] = field(default_factory=list)  # to be started, or settled, at a later look


def advance(
    sweep: SweepDirectory,
    backend: Backend,
    asked: Collection[str] = (),
    prepared: Prepared | None = None,
) -> bool:
    """Starts what is next: runs, scorings, another round, the fit. The caller holds the sweep.

    `asked` are runs that a person's command asks for, whatever became of them; none: those that are due. Returns
    whether the sweep is over: every run has ended for good, and the laws are fitted to all that is there. UserError
    where SLURM refuses what is submitted, or there is no data to train or score on.
    """
    config = prepare.configuration(sweep)
    policy = Policy.of(config.cluster)
    if extend.replace_diverged(sweep, config):
        prepared = None
    survey = Survey(dict.fromkeys(asked, ())) if asked else look(sweep, backend, policy)
    idle = not survey.due and not survey.later and not backend.in_queue()
    if idle and extend.next_round(sweep, config):
        survey = look(sweep, backend, policy)
    unscored = backend.to_score(missing_scores(membership.members(sweep), config))
    if survey.due or unscored:
        if prepared is None:
            prepared = prepare.from_disk(sweep)
            prepare.write_plan(prepared)
        waiting = [run for run in prepared.directories if run.run_id in survey.due]
        by_id = prepared.by_id
        for run in waiting:
            run.refreeze(by_id[run.run_id])  # with what the plan says of where and how, as its ranks or its trunk
        if waiting:
            from ...train.data.shards import prepare_with_progress

            prepare_with_progress(waiting[0].config().data)  # now, for compute nodes may have no network
        units = [Unit((run.run_id,)) for run in prepared.plan.runs if run.run_id in survey.due]
        backend.start(prepared.plan, units, unscored, bool(config.evaluate.tasks), survey.due)
        return False
    if survey.later or backend.in_queue():
        backend.refill()
        return False
    return not backend.fit()


def look(sweep: SweepDirectory, backend: Backend, policy: Policy) -> Survey:
    """Which runs are to be started now, or once their time to wait is over."""
    survey, now = Survey(), now_on(sweep.path)
    open_runs = [run for run in membership.members(sweep) if not run.is_done() and not backend.is_taken(run)]
    spent = attempts.retries_spent(sweep) if open_runs else 0
    for run in open_runs:
        state = run.state().state
        if state in ("cancelled", "diverged"):
            continue
        if state == "running":  # not settled yet: it still shows signs of life
            survey.later.append(run.run_id)
            continue
        tries = attempts.current(run)
        decision = attempts.decide(tries, policy, spent, now)
        spent += decision.again and bool(tries) and tries[-1].cause in attempts.RETRIED
        if decision.again and decision.wait_seconds > 0:
            survey.later.append(run.run_id)
        elif decision.again:
            survey.due[run.run_id] = decision.avoid
    parents = {run["run_id"]: run["parent"] for run in sweep.plan()["runs"]}
    for name in [name for name in survey.due if parents.get(name) in survey.later]:
        del survey.due[name]  # it would wait for a trunk that has no job yet
        survey.later.append(name)
    return survey


def renew(runs: Iterable[RunDirectory]) -> None:
    """Gives a new budget to runs that had ended."""
    for run in runs:
        if run.state().state in ("failed", "diverged", "cancelled"):
            with contextlib.suppress(Busy):
                states.retry_by_hand(run)


def missing_scores(runs: Sequence[RunDirectory], config: SweepConfig) -> list[RunDirectory]:
    """Runs that are done and lack scores."""
    if not config.evaluate.tasks:
        return []
    from ..results.scoring import is_scored

    settings = dataclasses.asdict(config.evaluate)
    return [run for run in runs if run.is_done() and not is_scored(run, settings)]


def outcome(prepared: Prepared) -> int:
    """The exit code, after a line for every run that is not done."""
    sweep = prepared.sweep
    stands_in = {old: sweep.run(new) for new, old in membership.replacements(sweep).items()}
    missing = missing_scores(prepared.directories, prepared.config)
    code = 1 if missing else 0
    for run in [run for run in prepared.directories if not run.is_done() and run.given_up() is None]:
        print(f"run {run.run_id} is {run.state()}")
        other = stands_in.get(run.run_id)
        if other is not None and other.is_done():
            print(f"run {other.run_id} was trained in its place, at a lower learning rate")
        else:
            code = 1
    if missing:
        print(f"{counted(len(missing), 'run')} could not be scored; see {sweep.path / 'runs'}/<run>/log.txt")
    return code


@dataclass(frozen=True)
class Pass:
    over: bool  # every run has ended for good, and the laws are fitted to all that is there
    keepers: int  # that wait in the queue for their turn


def keep(sweep_path: str) -> None:
    """One pass, which is what the keeper's job calls; more where one fails, or the queue takes no other keeper.

    If this one went the other would go for the same reason in no time, such as a full disk, and nobody were left.
    """
    sweep, pause = SweepDirectory(Path(sweep_path)), 60.0
    while (sweep.path / "plan.json").exists():
        try:
            with sweep.lock(LOCK_SECONDS):
                pause = prepare.configuration(sweep).cluster.keeper_seconds
                past = tend(sweep)
            if past.over or past.keepers:
                return
        except Exception as error:
            # Whatever it is, the sweep must not be without a keeper.
            with contextlib.suppress(OSError):
                print(f"this pass came to nothing, and the next will try again: {error}")
                if not isinstance(error, UserError):
                    traceback.print_exc()
        time.sleep(pause)


def tend(sweep: SweepDirectory) -> Pass:
    """Settles what was lost, and submits what is due; the caller holds the sweep."""
    cluster = prepare.configuration(sweep).cluster
    try:
        live = slurm.live_jobs()
    except UserError as error:
        print(f"nothing was done: {error}")
        return Pass(over=False, keepers=0)
    backend = slurm_backend(sweep, cluster, live)
    keepers = backend.keep()
    for name in settle_lost(sweep, Policy.of(cluster), live):
        print(f"run {name} was lost: {sweep.run(name).state().reason}")
    if (judge := Judge.of(sweep)) is not None:
        judge.look(run.run_id for run in membership.members(sweep) if run.state().state == "running")
    over = advance(sweep, backend)
    backend.remember(over)
    if over:
        print("everything has ended")
        backend.end_keepers()
    return Pass(over, keepers)


def slurm_backend(sweep: SweepDirectory, cluster: ClusterConfig, live: set[str]) -> SlurmBackend:
    calls = Calls(worker.train_run, worker.work, worker.evaluate_runs, worker.finish_sweep, keep, _stage)
    return SlurmBackend(sweep, cluster, live, calls)


def _stage(sweep: SweepDirectory) -> None:
    from ..results.scoring import stage

    stage(prepare.configuration(sweep).evaluate.tasks)
