"""The commands `cancel` and `retry`.

Several users may call them at once: requests are files in a run's directory, and only the holder of the run's lock
writes its state.
"""

from __future__ import annotations

from ...train.errors import UserError, counted
from .. import prepare
from ..config import cluster_of
from ..grid import extend
from ..runs import lease, membership
from ..runs.attempts import Policy
from ..runs.directory import Busy, RunDirectory, SweepDirectory, this_user
from ..runs.membership import find_runs, is_over
from ..slurm.jobs import LAUNCH
from . import conduct
from .slurm import SlurmBackend

FACTOR = 0.5  # of the learning rate of a run that diverged, where the grid does not say


def cancel(sweep: SweepDirectory, prefixes: list[str]) -> int:
    """Cancel the runs whose ids begin with `prefixes`, or without them the whole sweep and its jobs.

    Returns the exit code: 1 if SLURM cannot cancel the jobs, else 0.
    """
    policy, by = Policy.of(cluster_of(sweep.settings())), this_user()
    if not prefixes:
        membership.stop_growth(sweep, by)
        runs = [run for run in membership.members(sweep) if not is_over(run, policy)]
    else:
        runs = find_runs(sweep, prefixes)
    for run in runs:
        print(f"run {run.run_id} {_cancel_one(run, by, policy)}")
    if not runs:
        print("every run has ended already")
    if prefixes or not (sweep.path / "jobs" / LAUNCH).exists():
        return 0
    try:
        with sweep.lock(conduct.LOCK_SECONDS):  # a keeper's pass may be submitting at this moment
            SlurmBackend(sweep, cluster_of(sweep.settings())).cancel_all()
        print("its jobs are cancelled; running ones save a checkpoint first")
    except UserError as error:
        print(f"its jobs stay in the queue, and end when they start, because SLURM could not cancel them: {error}")
        return 1
    return 0


def _cancel_one(run: RunDirectory, by: str, policy: Policy) -> str:
    if run.is_done():
        return "is already done"
    run.ask_cancel(by)
    try:
        return "is cancelled" if lease.cancel_idle(run, by, policy) else "is already done"
    except Busy as busy:
        return f"was asked to save and stop ({busy})"


def retry(sweep: SweepDirectory, prefixes: list[str], failed: bool, diverged: bool, cancelled: bool = False) -> int:
    """Start runs again, each from its newest checkpoint and with a new budget of retries. Returns the exit code.

    Args:
        prefixes: beginnings of the ids of unfinished runs, in any state.
        failed: retry all runs that failed or whose process is gone; the default if nothing else is asked for.
        diverged: start, for each diverged run, a new one with a lower learning rate.
        cancelled: retry all cancelled runs.
    """
    policy = Policy.of(cluster_of(sweep.settings()))
    chosen = {run.run_id: run for run in find_runs(sweep, prefixes)}
    failed = failed or not (prefixes or diverged or cancelled)
    states = [state for state, asked in (("failed", failed), ("cancelled", cancelled)) if asked]
    members = membership.members(sweep)
    for run in members if states else ():
        if failed and run.state().state == "running":
            lease.reconcile_idle(run, policy)
        if run.state().state in states:
            chosen.setdefault(run.run_id, run)
    again = {run.run_id for run in chosen.values() if _reset(run, policy)}
    if diverged:
        again |= lower_rates(sweep)
    if not again:
        left = sum(run.state().state == "cancelled" for run in members)
        advice = f"; {counted(left, 'run is', 'runs are')} cancelled, which --cancelled retries"
        more = advice if left and not cancelled else ""
        print(f"there is nothing to retry{more}; see `isoflop status {sweep.path}`")
        return 0
    return conduct.resume(sweep, only=again)


def _reset(run: RunDirectory, policy: Policy) -> bool:
    before = run.state()
    if run.is_done():
        print(f"run {run.run_id} is already done")
        return False
    try:
        lease.reset(run, policy)
    except Busy as busy:
        what = "is about to stop; try again in a moment" if run.cancel_asked() else "is being trained; cancel it first"
        print(f"run {run.run_id} {what} ({busy})")
        return False
    reason = f": {before.reason}" if before.reason else ""
    print(f"run {run.run_id} will be retried; it was {before.state}{reason}")
    return True


def lower_rates(sweep: SweepDirectory) -> set[str]:
    """Add a run with a lower learning rate for each diverged run without one. Returns the new ids."""
    grid = prepare.configuration(sweep).grid
    factor = FACTOR if grid is None or grid.diverged_rate_factor is None else grid.diverged_rate_factor
    new_ids = set()
    for run in membership.members(sweep):
        if run.state().state != "diverged":
            continue
        fresh = extend.replace_one(sweep, run, factor)
        if not fresh:
            print(f"run {run.run_id} diverged, and was already repeated at a lower learning rate")
        for name in fresh:
            rate = sweep.run(name).config().optimizer.learning_rate
            print(f"run {run.run_id} diverged; run {name} replaces it, at {factor:g} of its learning rate: {rate:.3g}")
        new_ids.update(fresh)
    return new_ids
