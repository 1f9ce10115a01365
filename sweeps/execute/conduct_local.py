"""A sweep on this machine: trains what is wanted, then what was added or asked for meanwhile; scores, fits, reports."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...train.errors import UserError
from .. import prepare
from ..growth import extend
from ..plan import rates
from ..plan.packing import Unit
from ..prepare import Prepared
from ..runs import membership
from ..runs.directory import RunDirectory, SweepDirectory
from ..runs.retries import Policy
from ..terminal import describe_seconds
from .stages import is_scored, outcome, prepare_data, renew

if TYPE_CHECKING:
    from .local import LocalPool


def conduct(prepared: Prepared, only: set[str] | None = None) -> int:
    """Trains, scores and fits; the caller holds the sweep and has written its plan.

    Args:
        prepared: the sweep.
        only: ids of the runs to start; None: whatever is not done.

    Returns:
        0 when every run is done and scored, else 1.
    """
    from ..results.finish import print_result, write_results

    started = time.monotonic()
    # When the state was written that a run was last started in, or is left in.
    others = [run for run in prepared.directories if only is not None and run.run_id not in only]
    tried = {run.run_id: run.state().since for run in others}
    waiting = [run for run in prepared.directories if not run.is_done() and run.run_id not in tried]
    while True:
        prepared = _train_rounds(prepared, waiting, tried)
        if prepared.config.evaluate.tasks:
            _score(prepared)
        if any(run.is_done() for run in prepared.directories):
            write_results(prepared.sweep)
        if not (waiting := _asked_for(prepared, tried)):  # while the scores and the laws were made
            break
        prepared = prepare.from_disk(prepared.sweep)
        prepare.write_plan(prepared)
    if any(run.is_done() for run in prepared.directories):
        print_result(prepared.sweep)
    code = outcome(prepared)
    print(f"all stages took {describe_seconds(time.monotonic() - started)}")
    return code


def _train_rounds(prepared: Prepared, waiting: list[RunDirectory], tried: dict[str, float]) -> Prepared:
    """Trains until nothing is wanted any more, and notes in `tried` what it starts; returns the sweep as it then is."""
    while True:
        if waiting:
            renew(waiting)  # before anything that takes long, in which one may be cancelled
            tried |= {run.run_id: run.state().since for run in waiting}
            prepare.refreeze(waiting, prepared)
            prepare_data(waiting[0])
            _train(prepared, waiting)
        extend.replace_diverged(prepared.sweep, prepared.config)
        if not _asked_for(prepared, tried) and not extend.next_round(prepared.sweep, prepared.config):
            return prepared
        prepared = prepare.from_disk(prepared.sweep)
        prepare.write_plan(prepared)
        waiting = _asked_for(prepared, tried)


def _asked_for(prepared: Prepared, tried: dict[str, float]) -> list[RunDirectory]:
    """Runs that were added, or are to be tried again by somebody's command, since they were last started here."""
    states = {run: run.state() for run in membership.members(prepared.sweep)}
    return [
        run for run, state in states.items() if state.state == "planned" and state.since > tried.get(run.run_id, -1.0)
    ]


def _train(prepared: Prepared, waiting: list[RunDirectory]) -> None:
    from .display import Display
    from .local import Ranked, Workers, enqueue

    sweep, config = prepared.sweep, prepared.config
    wanted = prepared.configs({run.run_id for run in waiting})
    # A grid may vary the ranks of its runs.
    pool = _pool(prepared, max(run.parallel.world_size for run in wanted), _jobs_folder(sweep))
    lone = all(run.parallel.world_size == 1 for run in wanted)
    ways = Workers if lone else Ranked
    units = prepared.plan.units_of({run.run_id for run in waiting})
    if not lone:  # who drives several ranks drives one run at a time
        units = [Unit("alone", (name,)) for unit in units for name in unit.runs]
    training = ways(sweep, enqueue(sweep, pool.folder, units, wanted), Policy.of(config.cluster))
    with Display(prepared.plan, sweep, waiting) as display:
        pool.run(training, lambda: display.update(*training.news()))


def _pool(prepared: Prepared, ranks: int, folder: Path) -> LocalPool:
    from .local import LocalPool

    cluster = prepared.config.cluster
    room = rates.places(cluster, ranks, prepared.rate)
    return LocalPool(folder, room.jobs, room.threads, cluster.gpus_per_job, cluster.runs_per_gpu)


def _score(prepared: Prepared) -> None:
    from ..results.scoring import stage
    from .display import Display
    from .local import Listed, LocalJob
    from .worker import evaluate_runs

    unscored = [run for run in prepared.directories if run.is_done() and not is_scored(run, prepared.config)]
    if not unscored:
        return
    try:
        stage(prepared.config.evaluate.tasks)
    except UserError as error:
        print(f"not scored: {error}")  # the laws of the loss need no benchmark, so the sweep goes on
        return
    sweep = prepared.sweep
    pool = _pool(prepared, 1, _jobs_folder(sweep))
    # One job a core with its share of the checkpoints: the tasks are loaded once a job, not once a checkpoint.
    shares = [unscored[i :: pool.places] for i in range(min(pool.places, len(unscored)))]
    names = [[run.run_id for run in share] for share in shares]
    jobs = [LocalJob("scoring", evaluate_runs, (str(sweep.path.resolve()), share)) for share in names]
    with Display(prepared.plan, sweep, [], scoring=unscored) as display:
        pool.run(Listed(jobs), display.update_scores)


def _jobs_folder(sweep: SweepDirectory) -> Path:
    """A folder a launch: submitit names its files by process id, and process ids come round again."""
    return sweep.path / "jobs" / f"local-{os.urandom(4).hex()}"
