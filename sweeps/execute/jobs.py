"""What a sweep's jobs on SLURM call, and the pass that each of them makes in the end."""

from __future__ import annotations

import contextlib
import time
import traceback
from pathlib import Path

from ...train.errors import UserError
from .. import prepare
from ..runs import membership
from ..runs.directory import SweepDirectory
from . import controller, worker
from .hopeless import Judge
from .slurm import Calls, SlurmBackend
from .worker import Launch

LOCK_SECONDS = 120.0  # that another pass, or a command, may hold the sweep


def work(launch: Launch) -> None:
    """Work as one job, and start what is missing as it ends; every rank calls it."""
    sweep = SweepDirectory(Path(launch.sweep))
    if worker.work(launch, after_trunk=lambda: _try_pass(sweep)):
        _try_pass(sweep)


def keep(sweep_path: str) -> None:
    """Make one pass as the keeper; more if one fails, or if the queue takes no other keeper.

    If this one ended then the other would end for the same reason, such as a full disk, and no keeper were left.
    """
    sweep, pause = SweepDirectory(Path(sweep_path)), 60.0
    while (sweep.path / "plan.json").exists():
        try:
            with sweep.lock(LOCK_SECONDS):
                pause = prepare.configuration(sweep).cluster.keeper_seconds
                backend = run_pass(sweep)
                if backend.memory.get("over") or any(job.kind == "keeper" for job in backend.jobs()):
                    return
        except Exception as error:
            # Whatever it is, the sweep must not be without a keeper.
            with contextlib.suppress(OSError):
                print(f"this pass came to nothing, and the next will try again: {error}")
                if not isinstance(error, UserError):
                    traceback.print_exc()
        time.sleep(pause)


def finish(sweep_path: str) -> None:
    """Write the table, the laws and the report from what the runs have written."""
    from ..results.finish import write_results

    sweep = worker.check_shared(sweep_path)
    write_results(sweep)
    _try_pass(sweep)


CALLS = Calls(work, keep, finish)


def run_pass(sweep: SweepDirectory) -> SlurmBackend:
    """Start what is due on SLURM: workers, another round, the fit; the caller holds the sweep.

    Raises:
        UserError: SLURM does not answer, or refuses what is submitted.
    """
    backend = SlurmBackend(sweep, prepare.configuration(sweep).cluster, CALLS)
    if membership.is_stopped(sweep):
        return backend
    over = controller.reconcile(sweep, backend)
    if (judge := Judge.of(sweep)) is not None:
        judge.stop_hopeless(run.run_id for run in membership.members(sweep) if run.state().state == "running")
    if over and controller.grow(sweep):
        over = controller.reconcile(sweep, backend)
    over = over and not backend.fit()
    backend.memory["over"] = over
    backend.remember(over)
    if over:
        print("everything has ended")
    return backend


def _try_pass(sweep: SweepDirectory) -> None:
    """Make a pass as another job, which leaves it to the keeper if it cannot."""
    try:
        with sweep.lock(LOCK_SECONDS):
            run_pass(sweep)
    except (UserError, OSError) as error:
        print(f"what is next is left to the keeper: {error}", flush=True)
