"""One sweep from its config to its report: plan, launch, score, fit. Each step resumes what an earlier one left."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from ...train.errors import UserError, counted
from ...train.planner.validation import check_fields
from .. import prepare
from ..config import SweepConfig, TuneGrid
from ..plan import rates
from ..prepare import Prepared
from ..runs import membership
from ..runs.directory import AtWork, SweepDirectory
from ..runs.preflight import check_first_job
from ..slurm import cluster as slurm_cluster
from ..slurm import commands as slurm
from ..slurm.backend import SlurmBackend, wait_for_slurm
from ..slurm.record import is_unattended
from ..terminal import describe_seconds
from .advance import advance, missing_scores, outcome, renew, slurm_backend

LOCK_SECONDS = 60.0  # that a keeper's pass may hold a sweep
LONGEST_NAME = 200  # bytes, of a sweep


def conduct(config: SweepConfig, command: list[str]) -> int:
    """Runs a sweep: 0 when every run is done (or submitted), 1 when one failed. UserError: nothing was started."""
    check(config)
    prepared = prepare.from_config(config)
    notes = "".join(f"note: {remark}\n" for remark in prepared.remarks)
    if config.dry_run:
        if refusal := prepare.conflict(prepared):
            notes += f"note: nothing of this would start: {refusal}\n"
        _show(prepared, notes)
        return 0
    on_slurm = config.cluster.kind == "slurm"
    if on_slurm:
        slurm_cluster.check(config.cluster, prepared.plan.runs)  # before anything is written
    with prepared.sweep.lock(LOCK_SECONDS if on_slurm else 0.0):
        if refusal := prepare.conflict(prepared):
            raise UserError(refusal)
        prepare.write_plan(prepared, command)
        print(notes, end="")
        if not on_slurm:
            return _conduct_here(prepared)
        backend = submit(prepared)
    return _conclude(prepared, backend)


def resume(sweep: SweepDirectory, only: set[str] | None = None) -> int:
    """Goes on with a sweep from its folder alone, or with the runs in `only` and their trunks; see `conduct`."""
    config = prepare.configuration(sweep)
    check(config)
    membership.allow_growth(sweep)
    on_slurm = config.cluster.kind == "slurm"
    try:
        with sweep.lock(LOCK_SECONDS if on_slurm else 0.0):
            prepared = prepare.from_disk(sweep)
            prepare.write_plan(prepared)
            if only is not None:
                only = only | {run.parent for name, run in prepared.by_id.items() if name in only and run.parent}
            if not on_slurm:
                return _conduct_here(prepared, only)
            backend = submit(prepared, only)
    except AtWork as error:
        if on_slurm:
            raise
        print(f"{error}; it takes these runs when its own have ended")
        return 0
    return _conclude(prepared, backend)


def _conduct_here(prepared: Prepared, only: set[str] | None = None) -> int:
    """Trains, scores and fits on this machine; the caller holds the sweep."""
    from ..results.finish import print_result
    from .local import LocalBackend

    started, sweep = time.monotonic(), prepared.sweep
    backend = LocalBackend(prepared, only)
    asked = backend.asked()
    renew(sweep.run(name) for name in asked)  # before anything that takes long, in which one may be cancelled
    if asked and prepared.config.preflight:
        for line in check_first_job(sweep, prepared.runs, prepared.config.parallel.world_size):
            print(line)
    over = advance(sweep, backend, asked, prepared)
    while not over:
        over = advance(sweep, backend)
    if any(run.is_done() for run in sweep.runs()):
        print_result(sweep)
    code = outcome(prepare.from_disk(sweep))
    print(f"all stages took {describe_seconds(time.monotonic() - started)}")
    return code


def submit(prepared: Prepared, only: set[str] | None = None) -> SlurmBackend:
    """Submits what no job of the sweep does yet; from then on the jobs do the rest."""
    sweep, config = prepared.sweep, prepared.config
    backend = slurm_backend(sweep, config.cluster, slurm.live_jobs())
    backend.memory.clear()  # somebody asks again
    waiting = [run for run in backend.to_start(prepared.directories) if only is None or run.run_id in only]
    renew(waiting)
    if waiting or backend.to_score(missing_scores(prepared.directories, config)):
        advance(sweep, backend, [run.run_id for run in waiting], prepared)
        backend.remember(over=False)
    elif backend.in_queue():
        backend.keep()
    elif only is None:
        backend.remember(over=True)
    return backend


def look_after(sweep: SweepDirectory) -> None:
    """Brings the keepers of a sweep on SLURM back where somebody has cancelled them."""
    if (sweep.path / "jobs" / "slurm.json").exists() and is_unattended(sweep, live := slurm.live_jobs()):
        with sweep.lock(LOCK_SECONDS):
            count = slurm_backend(sweep, prepare.configuration(sweep).cluster, live).keep()
        print(f"nobody looked after this sweep any more; {counted(count, 'keeper does', 'keepers do')} now")


def _conclude(prepared: Prepared, backend: SlurmBackend) -> int:
    """Goes, or waits for the jobs, and says how the sweep came out."""
    from ..results.finish import print_result, write_results

    sweep = prepared.sweep
    jobs = backend.in_queue()
    if not jobs and backend.to_start(prepared.directories):
        jobs = backend.record.jobs() & backend.live  # the keepers, who submit what was held back
    if jobs and not prepared.config.wait:
        print(f"{counted(len(jobs), 'job is', 'jobs are')} in the queue; see `isoflop status {sweep.path}`")
        print(f"the report will be {sweep.path / 'fit' / 'report.html'}")
        return 0
    if jobs:
        wait_for_slurm(sweep)
    else:
        write_results(sweep)
    print_result(sweep)
    return outcome(prepare.from_disk(sweep))


def check(config: SweepConfig) -> None:
    """Refuses a configuration that contradicts itself or asks for what is not there."""
    _check_folder(config)
    cluster = config.cluster
    check_fields(config)
    if cluster.kind == "slurm" and not config.dry_run and shutil.which("sbatch") is None:
        raise UserError("cluster is 'slurm' and there is no sbatch on the PATH; use cluster=local, or load SLURM first")
    if config.grid is not None and config.grid.stop_hopeless and not isinstance(config.grid, TuneGrid):
        raise UserError(
            f"grid.stop_hopeless is true and grid.kind is {config.grid.kind!r}; only tune takes it, for a law needs "
            "every run to its end"
        )
    if config.explain and not config.dry_run:
        raise UserError("explain is true and dry_run is false; the two go together: dry_run=true explain=true")
    extra = cluster.additional_parameters
    if extra is not None and not isinstance(extra, dict):
        raise UserError(f"cluster.additional_parameters is {extra!r}; it must map #SBATCH keys to values")


def _check_folder(config: SweepConfig) -> None:
    name, cluster = config.sweep or "", config.cluster
    if Path(name).name != name or name in ("", "..") or not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        raise UserError(
            f"sweep is {config.sweep!r}; it names one folder under output_root, which is neither . nor .., has no "
            f"slashes or control characters, and takes at most {LONGEST_NAME} bytes"
        )
    # SLURM puts other words for % and \\ in the names of logs; a colon ends a path on PYTHONPATH, a comma a mount.
    signs = "%:\\," if cluster.container else "%:\\"
    for where, taken in ((Path(config.output_root, name).resolve(), signs), (Path.cwd(), "\\")):
        bad = [sign for sign in str(where) if sign in taken or not sign.isprintable()]
        if bad and cluster.kind == "slurm":
            raise UserError(f"jobs on SLURM cannot work in {str(where)!r}, which has {bad[0]!r}; choose a path without")


def _show(prepared: Prepared, notes: str) -> None:
    from .display import print_plan

    plan, config = prepared.plan, prepared.config
    shapes = [run.shape for run in plan.runs] if config.cluster.kind == "slurm" else []
    print_plan(plan, config.cluster, slurm_cluster.expected_starts(config.cluster, shapes))
    print(notes, end="")
    if config.explain:
        from ..plan.explain import explain_runs

        room = rates.places(config.cluster, config.parallel.world_size, prepared.rate)
        explain_runs(prepared.runs, config.cluster, room.flops_per_second / config.parallel.world_size)
