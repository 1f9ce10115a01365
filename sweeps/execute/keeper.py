"""The keeper: a tiny SLURM job that looks after a sweep for a moment, starts what must be started again, and goes.

Special here:
- nothing on a login node has to live: two keepers always wait in the queue, each for a time, and one begins by seeing
  to it that there are two again;
- a pass holds the sweep and leaves on disk all that it decides, so it can be killed at any moment;
- what became of a run is read from its directory; SLURM is asked which jobs live, and where it does not answer a pass
  does nothing.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...train.errors import UserError
from .. import prepare
from ..config import ClusterConfig
from ..runs.attempts import Policy
from ..runs.directory import SweepDirectory
from ..slurm import commands as slurm
from ..slurm.backend import Calls, SlurmBackend
from ..slurm.supervisor import settle_lost
from . import worker
from .advance import advance

LOCK_SECONDS = 120.0  # that another pass, or a command, may hold the sweep


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
                print(f"this pass came to nothing, the next is to come: {error}")
                if not isinstance(error, UserError):
                    traceback.print_exc()
        time.sleep(pause)


def tend(sweep: SweepDirectory, say: Callable[[str], None] = print) -> Pass:
    """Settles what was lost, and submits what is due; the caller holds the sweep."""
    cluster = prepare.configuration(sweep).cluster
    try:
        live = slurm.live_jobs()
    except UserError as error:
        say(f"nothing was done: {error}")
        return Pass(over=False, keepers=0)
    backend = slurm_backend(sweep, cluster, live)
    keepers = backend.keep()
    for name in settle_lost(sweep, Policy.of(cluster), live):
        say(f"run {name} was lost: {sweep.run(name).state().reason}")
    over = advance(sweep, backend)
    backend.remember(over)
    if over:
        say("everything has ended")
        backend.end_keepers()
    return Pass(over, keepers)


def slurm_backend(sweep: SweepDirectory, cluster: ClusterConfig, live: set[str]) -> SlurmBackend:
    calls = Calls(worker.train, worker.work, worker.evaluate_runs, worker.finish_sweep, keep, _stage)
    return SlurmBackend(sweep, cluster, live, calls)


def _stage(sweep: SweepDirectory) -> None:
    from ..results.scoring import stage

    stage(prepare.configuration(sweep).evaluate.tasks)
