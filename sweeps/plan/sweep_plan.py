"""Runs become jobs: their cost, their order, what is trained together, and their shape. Pure.

Estimates decide on order and place alone: which runs there are, and what comes of them, does not depend on them.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...train.config import ParallelConfig, RunConfig, run_id
from ...train.data.recipe.recipe import recipe_label
from ...train.errors import UserError
from ...train.flops import count_parameters, flops_6nd, flops_exact, flops_optimizer
from ...train.schedule import trunk_steps
from ..config import ClusterConfig
from ..grid.trunks import own_flops
from ..runs.forms import JobShape, PlannedRun
from .packing import Clock, Unit, pack_runs
from .rates import Calibration, run_kind

MANY_STEPS = 200_000  # beyond which a batch is far below what a run of that length can use


@dataclass(frozen=True)
class Plan:
    """A sweep's runs, longest first, and what they cost together."""

    runs: list[PlannedRun]
    units: list[Unit]  # what jobs train, in the order in which they are started
    jobs_at_once: int
    estimated_seconds: float  # wall clock at that concurrency, training alone
    total_flops: float  # exact convention, as trained: what branches share with a trunk counts once
    separate_flops: float  # the same had every run been trained from its first step
    gpu_hours: float
    core_hours: float
    dollars: float | None
    measured_runs: int = 0  # of past sweeps, behind the estimates; 0: some rate is assumed
    # Of each kind of run by width: the FLOP/s that were measured, and by how many runs; a sweep goes on with these.
    rates: dict[str, dict[int, tuple[float, int]]] = field(default_factory=dict)

    def units_of(self, names: Collection[str]) -> list[Unit]:
        """The units without the runs that are not named."""
        left = [(unit.how, tuple(name for name in unit.runs if name in names)) for unit in self.units]
        return [Unit(how if len(runs) > 1 else "alone", runs) for how, runs in left if runs]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_runs(
    runs: Sequence[RunConfig],
    cluster: ClusterConfig,
    flops_per_second: float,
    jobs_at_once: int,
    ensembles: int = 1,
    threads: int | None = None,
    measured: Calibration | None = None,
    taken: Collection[str] = (),
) -> Plan:
    """Cost, order and placement of a grid, with its trunks and branches.

    `flops_per_second` is the matmul peak of one job, all ranks together; `threads` are those of a rank. `taken` runs
    are done or have a job: no unit has both such a run and one that is left.
    """

    def assumed(width: float) -> float:  # where nothing was measured: small models reach little of the peak
        return flops_per_second * width / (width + cluster.half_speed_width)

    measured, by_id = measured or Calibration(), {run_id(run): run for run in runs}
    kinds = {name: run_kind(run) for name, run in by_id.items()}
    rates = {name: measured.rate(kinds[name], run.model.width, assumed) for name, run in by_id.items()}
    planned = [_planned(name, run, cluster, rates[name], threads) for name, run in by_id.items()]
    # Longest first: the last job to start is then the shortest, and no core idles behind a long tail.
    planned.sort(key=lambda run: (-run.estimated_seconds, run.run_id))
    seconds = {run.run_id: run.estimated_seconds for run in planned}
    bound, on_gpu, is_local = launch_bound_width(cluster), cluster.gpus_per_job > 0, cluster.kind == "local"
    room, sharing = (cluster.gpu_memory_gb, cluster.runs_per_gpu) if on_gpu else (cluster.memory_gb, 1)
    if is_local:  # so many jobs have the same GPU anyway
        room, sharing = room / sharing, 1
    units: list[Unit] = []
    for is_taken in (False, True):
        part = {name: run for name, run in by_id.items() if (name in taken) == is_taken}
        units += pack_runs(
            Clock(part, seconds, bound),
            places=jobs_at_once,
            ensembles=ensembles,
            runs_per_gpu=sharing,
            room_bytes=room * 1e9,
            device="cuda" if on_gpu else "cpu",
        )
    clock, paid = Clock(by_id, seconds, bound), dict[str, float]()
    pieces = [clock.piece(unit) for unit in units]
    for piece in pieces:
        paid |= clock.paid_shares(piece)
    planned = [replace(run, paid_seconds=paid[run.run_id]) for run in planned]
    gpu_hours = sum(run.paid_seconds * run.shape.gpus * run.shape.ranks for run in planned) / 3600
    core_hours = sum(run.paid_seconds * run.shape.cpus * run.shape.ranks for run in planned) / 3600
    if is_local:  # so many places are one GPU
        gpu_hours /= cluster.runs_per_gpu
    price = cluster.dollars_per_gpu_hour
    return Plan(
        runs=planned,
        units=units,
        jobs_at_once=jobs_at_once,
        estimated_seconds=clock.wall_clock(pieces, jobs_at_once),
        total_flops=sum(run.flops_own for run in planned),
        separate_flops=sum(run.flops_exact for run in planned),
        gpu_hours=gpu_hours,
        core_hours=core_hours,
        dollars=None if price is None else gpu_hours * price,
        measured_runs=measured.runs(set(kinds.values())),
        rates={kind: dict(measured.rates.get(kind, {})) for kind in sorted(set(kinds.values()))},
    )


def launch_bound_width(cluster: ClusterConfig) -> float:
    """See `packing.ensemble_speedup`."""
    assumed = 512.0 if cluster.gpus_per_job > 0 else 4.0
    return assumed if cluster.launch_bound_width is None else cluster.launch_bound_width


def plan_remarks(plan: Plan) -> list[str]:
    """What a person should know before the plan is started."""
    longest = max(plan.runs, key=lambda run: run.steps)
    if longest.steps <= MANY_STEPS:
        return []
    return [
        f"run {longest.run_id} makes {longest.steps:,} steps of {longest.D // longest.steps:,} tokens; "
        "optimizer.batch_size and data.sequence_length are small for this budget"
    ]


def makespan(seconds: list[float], at_once: int) -> float:
    """Wall clock of jobs started in the given order, each on the first free place."""
    places = [0.0] * max(1, at_once)
    for duration in seconds:
        heapq.heapreplace(places, places[0] + duration)
    return max(places)


def job_shape(parallel: ParallelConfig, cluster: ClusterConfig, threads: int | None = None) -> JobShape:
    """Every node has as many ranks, and a tensor-parallel group stays within one node."""
    groups = whole = parallel.world_size // parallel.tp  # tensor-parallel groups on a node
    if cluster.kind == "slurm" and cluster.ranks_per_node is not None:
        room = cluster.ranks_per_node // parallel.tp
        if room < 1:
            raise UserError(
                f"parallel.tp is {parallel.tp}, and tensor-parallel ranks share a node, of which "
                f"cluster.ranks_per_node allows {cluster.ranks_per_node}; it must be at most that"
            )
        groups = max(divisor for divisor in range(1, room + 1) if whole % divisor == 0)
    return JobShape(
        cluster.gpus_per_job,
        threads or cluster.cpus_per_task,
        cluster.memory_gb,
        cluster.time_minutes,
        nodes=whole // groups,
        ranks_per_node=groups * parallel.tp,
    )


def _planned(name: str, run: RunConfig, cluster: ClusterConfig, rate: float, threads: int | None) -> PlannedRun:
    own = own_flops(run)
    return PlannedRun(
        run_id=name,
        name=run.name or name,
        **vars(count_parameters(run.model)),
        D=run.D,
        flops_6nd=flops_6nd(run),
        flops_exact=flops_exact(run),
        flops_own=own,
        flops_optimizer=flops_optimizer(run),
        budget=run.budget,
        **{name: getattr(run.model, name) for name in ("width", "depth", "heads")},
        steps=run.steps,
        seed=run.seed,
        sequence_length=run.data.sequence_length,
        precision=run.precision,
        shape=job_shape(run.parallel, cluster, threads),
        mesh=run.parallel.label,
        estimated_seconds=own / rate,
        parent=run.parent,
        first_step=trunk_steps(run) if run.parent is not None else 0,
        recipe=recipe_label(run.data.recipe) if run.data.recipe else "",
        variant=run.variant or "",
    )
