"""One sweep from its config to its report: plan, launch, score, fit. Each step resumes what an earlier one left."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...train.errors import UserError
from .. import prepare
from ..config import SweepConfig
from ..plan import rates
from ..runs import membership
from ..runs.directory import AtWork, SweepDirectory

LOCK_SECONDS = 60.0  # that a keeper's pass may hold a sweep


def conduct(config: SweepConfig, command: list[str]) -> int:
    """Runs a sweep; see the contract in the README.

    Returns:
        0 when every run is done (or submitted), 1 when one failed.

    Raises:
        UserError: the input is wrong; nothing was started.
    """
    check(config)
    prepared = prepare.from_config(config)
    notes = [f"note: {remark}\n" for remark in prepared.remarks]
    if config.dry_run:
        _show(prepared)
        print("".join(notes), end="")
        if config.explain:
            from ..plan.explain import explain_runs

            room = rates.places(config.cluster, config.parallel.world_size, prepared.rate)
            explain_runs(prepared.runs, config.cluster, room.flops_per_second / config.parallel.world_size)
        return 0
    if config.cluster.kind == "local":
        from . import conduct_local

        with prepared.sweep.lock():
            prepare.write_plan(prepared, command)
            print("".join(notes), end="")
            return conduct_local.conduct(prepared)
    from . import conduct_slurm

    conduct_slurm.check(prepared)
    with prepared.sweep.lock(LOCK_SECONDS):
        prepare.write_plan(prepared, command)
        print("".join(notes), end="")
        launcher = conduct_slurm.launch(prepared)
    return conduct_slurm.conclude(prepared, launcher)


def resume(sweep: SweepDirectory, only: set[str] | None = None) -> int:
    """Goes on with a sweep from its folder alone; what it was told when it was started holds.

    Args:
        sweep: its folder.
        only: ids of runs to start, with the trunks that they wait for; None: whatever is not done.

    Returns:
        See `conduct`; 0 also where the sweep is at work, which then takes the runs when its own have ended.
    """
    config = prepare.configuration(sweep)
    check(config)
    membership.allow_growth(sweep)
    local = config.cluster.kind == "local"
    try:
        with sweep.lock(0.0 if local else LOCK_SECONDS):
            prepared = prepare.from_disk(sweep)
            prepare.write_plan(prepared)
            if only is not None:
                only = only | {run.parent for run in prepared.configs(only) if run.parent is not None}
            if local:
                from . import conduct_local

                return conduct_local.conduct(prepared, only)
            from . import conduct_slurm

            launcher = conduct_slurm.launch(prepared, only)
    except AtWork as error:
        if not local:
            raise
        print(f"{error}; it takes these runs when its own have ended")
        return 0
    return conduct_slurm.conclude(prepared, launcher)


def check(config: SweepConfig) -> None:
    """Refuses a configuration that contradicts itself or asks for what is not there.

    Raises:
        UserError: says what.
    """
    cluster = config.cluster
    if cluster.kind not in ("local", "slurm"):
        raise UserError(f"cluster.kind is {cluster.kind!r}; it must be local or slurm")
    least = {
        "ensembles": (config.ensembles, 1),
        "cluster.runs_per_gpu": (cluster.runs_per_gpu, 1),
        "cluster.array_parallelism": (cluster.array_parallelism, 1),
        "cluster.retries": (cluster.retries, 0),
        "cluster.sweep_retries": (cluster.sweep_retries, 0),
        "cluster.max_requeues": (cluster.max_requeues, 0),
        "cluster.backoff_seconds": (cluster.backoff_seconds, 0),
        "cluster.queue_minutes": (cluster.queue_minutes, 0),
        "cluster.keeper_seconds": (cluster.keeper_seconds, 1),
    }
    for name, (value, smallest) in least.items():
        if not value >= smallest:
            raise UserError(f"{name} is {value}; it must be {smallest} or more")
    above_zero = {
        "cluster.launch_bound_width": cluster.launch_bound_width,
        "cluster.heartbeat_seconds": cluster.heartbeat_seconds,
        "cluster.hang_minutes": cluster.hang_minutes,
        "cluster.max_submit": cluster.max_submit,
    }
    for name, above in above_zero.items():
        if above is not None and not above > 0:
            raise UserError(f"{name} is {above}; it must be above 0")
    factor = config.grid.diverged_rate_factor if config.grid is not None else None
    if factor is not None and not 0 < factor < 1:
        raise UserError(f"grid.diverged_rate_factor is {factor}; it must be above 0 and below 1, or null")
    if cluster.kind == "slurm" and not config.dry_run:
        _require_slurm()
    if config.explain and not config.dry_run:
        raise UserError("explain is true and dry_run is false; the two go together: dry_run=true explain=true")
    extra = cluster.additional_parameters
    if extra is not None and not isinstance(extra, dict):
        raise UserError(f"cluster.additional_parameters is {extra!r}; it must map #SBATCH keys to values")
    if not config.sweep or Path(config.sweep).name != config.sweep:
        raise UserError(f"sweep is {config.sweep!r}; it names one folder under output_root, without slashes")


def _require_slurm() -> None:
    if shutil.which("sbatch") is None:
        raise UserError("cluster is 'slurm' and there is no sbatch on the PATH; use cluster=local, or load SLURM first")


def _show(prepared: prepare.Prepared) -> None:
    from ..slurm import cluster as slurm_cluster
    from .display import print_plan

    plan, cluster = prepared.plan, prepared.config.cluster
    on_slurm = cluster.kind == "slurm"
    starts = slurm_cluster.expected_starts(cluster, [run.shape for run in plan.runs]) if on_slurm else {}
    print_plan(plan, cluster, starts)
