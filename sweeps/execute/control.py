"""A person's commands on a sweep that may be at work: cancel and retry.

Any number of people may do any of this at once, from any machine: what a run is told lies in its directory, and whoever
holds its lock writes its state. A run that nobody trains is cancelled on the spot; one that trains saves first.
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
    """Stops the runs that begin with these digits, or all of a sweep and its jobs; prints a line per run.

    Returns the exit code: 1 where SLURM does not answer, and its jobs are left.
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
        print("its jobs are cancelled; one that trains saves first")
    except UserError as error:
        print(f"its jobs are left in the queue, where each will find that it was cancelled: {error}")
        return 1
    return 0


def _cancel_one(run: RunDirectory, by: str, policy: Policy) -> str:
    if run.is_done():
        return "is done, and stays so"
    run.ask_cancel(by)
    try:
        return "is cancelled" if lease.cancel_idle(run, by, policy) else "is done, and stays so"
    except Busy as busy:
        return f"is asked to save and stop ({busy})"


def retry(sweep: SweepDirectory, prefixes: list[str], failed: bool, diverged: bool, cancelled: bool = False) -> int:
    """Starts runs again, each from its newest checkpoint and with a new budget of retries; prints a line per run.

    Those whose ids begin with one of `prefixes`, in whatever state but done; all that `failed`, or whose process is
    gone, which is so when nothing else is asked for; all `cancelled`; for each that `diverged` a new one with a lower
    learning rate. Where a launcher on this machine is at work, it takes them when its own have ended. Returns the exit
    code of what then runs.
    """
    policy = Policy.of(cluster_of(sweep.settings()))
    chosen = {run.run_id: run for run in find_runs(sweep, prefixes)}
    failed = failed or not (prefixes or diverged or cancelled)
    wanted = [state for state, asked in (("failed", failed), ("cancelled", cancelled)) if asked]
    members = membership.members(sweep)
    for run in members if wanted else ():
        if failed and run.state().state == "running":
            lease.reconcile_idle(run, policy)
        if run.state().state in wanted:
            chosen.setdefault(run.run_id, run)
    again = {run.run_id for run in chosen.values() if _reset(run, policy)}
    if diverged:
        again |= lower_rates(sweep)
    if not again:
        left = sum(run.state().state == "cancelled" for run in members)
        known = f"; {counted(left, 'run is', 'runs are')} cancelled, which --cancelled tries again"
        more = known if left and not cancelled else ""
        print(f"there is nothing to try again{more}; see `isoflop status {sweep.path}`")
        return 0
    return conduct.resume(sweep, only=again)


def _reset(run: RunDirectory, policy: Policy) -> bool:
    """Plan an unfinished run again. Returns False if that is not possible now."""
    before = run.state()
    if run.is_done():
        print(f"run {run.run_id} is done, and stays so")
        return False
    try:
        lease.reset(run, policy)
    except Busy as busy:
        what = "is about to stop; try again in a moment" if run.cancel_asked() else "is being trained; cancel it first"
        print(f"run {run.run_id} {what} ({busy})")
        return False
    why = f": {before.reason}" if before.reason else ""
    print(f"run {run.run_id} is tried again; it was {before.state}{why}")
    return True


def lower_rates(sweep: SweepDirectory) -> set[str]:
    """Adds for every run that diverged one with a lower learning rate; returns the new ids."""
    grid = prepare.configuration(sweep).grid
    factor = FACTOR if grid is None or grid.diverged_rate_factor is None else grid.diverged_rate_factor
    wanted = set()
    for run in membership.members(sweep):
        if run.state().state != "diverged":
            continue
        fresh = extend.replace_one(sweep, run, factor)
        if not fresh:
            print(f"run {run.run_id} diverged, and has been tried at a lower learning rate already")
        for name in fresh:
            rate = sweep.run(name).config().optimizer.learning_rate
            print(f"run {run.run_id} diverged; run {name} takes its place, at {factor:g} of its rate: {rate:.3g}")
        wanted.update(fresh)
    return wanted
