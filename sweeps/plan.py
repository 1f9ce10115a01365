"""Runs become jobs: their cost, their order, what is trained together, and their shape. Pure.

Special here:
- training reaches peak * width / (width + half_speed_width) of the device's plain matrix-product rate, which is what
  small models measured here do; the report compares the estimate with what was spent;
- a branch (`trunks.py`) costs what it trains itself, from where it leaves its trunk; C and D are those of the whole
  run, which is what its loss belongs to.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..train.config import ParallelConfig, RunConfig, run_id
from ..train.errors import UserError
from ..train.flops import count_parameters, flops_6nd, flops_exact
from ..train.schedule import trunk_steps
from .config import ClusterConfig
from .packing import Unit, pack, unit_seconds, wall_clock
from .trunks import own_flops

MANY_STEPS = 200_000  # beyond which a batch is far below what a run of that length can use


@dataclass(frozen=True)
class JobShape:
    """What one run asks of the machine: something for each rank, and ranks. Runs of one shape share an array."""

    gpus: int  # for a rank
    cpus: int  # for a rank
    memory_gb: float  # for a rank
    time_minutes: int
    nodes: int = 1
    ranks_per_node: int = 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def for_one_process(self) -> JobShape:
        """What a process gets that works on the whole run, such as its scoring: the memory of all ranks of a node."""
        return replace(self, memory_gb=self.memory_gb * self.ranks_per_node, nodes=1, ranks_per_node=1)


@dataclass(frozen=True)
class PlannedRun:
    """One run with its size under each convention, its cost and its place."""

    run_id: str
    name: str
    N_total: int
    N_non_embedding: int
    N_kaplan: int
    D: int
    flops_6nd: float
    flops_exact: float
    flops_own: float  # exact convention, of the steps that the run itself takes
    budget: float | None
    width: int
    depth: int
    heads: int
    steps: int
    seed: int
    shape: JobShape
    mesh: str  # how the run is spread over its ranks, as "tp2 dp4 zero1"; empty for one rank
    estimated_seconds: float  # of the steps that the run itself takes
    parent: str | None = None  # the trunk that it branches from
    first_step: int = 0  # where it does


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
    dollars: float | None

    @property
    def seconds(self) -> dict[str, float]:
        """Estimate of each run alone, by run id."""
        return {run.run_id: run.estimated_seconds for run in self.runs}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    runs: Sequence[RunConfig], cluster: ClusterConfig, flops_per_second: float, jobs_at_once: int, ensembles: int = 1
) -> Plan:
    """Cost, order and placement of a grid.

    Args:
        runs: from `grid.expand`, and with trunks and branches from `trunks.merge`.
        cluster: what a job may ask for, and the price.
        flops_per_second: matrix-product peak of what one job gets, all ranks together.
        jobs_at_once: how many run side by side.
        ensembles: most runs that may be trained together as one ensemble.

    Raises:
        UserError: a run's ranks do not fit on the cluster's nodes.
    """
    planned = [_planned(run, cluster, flops_per_second) for run in runs]
    # Longest first: the last job to start is then the shortest, and no core idles behind a long tail.
    planned.sort(key=lambda run: (-run.estimated_seconds, run.run_id))
    seconds = {run.run_id: run.estimated_seconds for run in planned}
    shapes = {run.run_id: run.shape for run in planned}
    units = units_of(runs, seconds, cluster, jobs_at_once, ensembles)
    by_id, bound = {run_id(run): run for run in runs}, launch_bound_width(cluster)
    spent = [(shapes[unit.runs[0]], unit_seconds(unit, by_id, seconds, bound)) for unit in units]
    gpu_hours = sum(duration * shape.gpus * shape.ranks for shape, duration in spent) / 3600
    if cluster.kind == "local":  # so many places are one GPU
        gpu_hours /= cluster.runs_per_gpu
    price = cluster.dollars_per_gpu_hour
    return Plan(
        runs=planned,
        units=units,
        jobs_at_once=jobs_at_once,
        estimated_seconds=wall_clock(units, by_id, seconds, jobs_at_once, bound),
        total_flops=sum(run.flops_own for run in planned),
        separate_flops=sum(run.flops_exact for run in planned),
        gpu_hours=gpu_hours,
        dollars=None if price is None else gpu_hours * price,
    )


def units_of(
    runs: Sequence[RunConfig], seconds: Mapping[str, float], cluster: ClusterConfig, jobs_at_once: int, ensembles: int
) -> list[Unit]:
    """What of these runs is trained together, in the order in which it is started.

    Args:
        runs: all of a sweep's, or those that are still to be trained.
        seconds: estimate of each alone, by run id.
        cluster: what a job has.
        jobs_at_once: how many run side by side.
        ensembles: most runs of one ensemble.
    """
    gpus = cluster.gpus_per_job > 0
    room, sharing = (cluster.gpu_memory_gb, cluster.runs_per_gpu) if gpus else (cluster.memory_gb, 1)
    if cluster.kind == "local":  # so many jobs have the same GPU anyway
        room, sharing = room / sharing, 1
    return pack(
        runs, seconds, places=jobs_at_once, ensembles=ensembles, runs_per_gpu=sharing, room_bytes=room * 1e9,
        launch_bound_width=launch_bound_width(cluster), device="cuda" if gpus else "cpu",
    )  # fmt: skip


def launch_bound_width(cluster: ClusterConfig) -> float:
    """See `packing.ensemble_speedup`."""
    assumed = 512.0 if cluster.gpus_per_job > 0 else 4.0
    return assumed if cluster.launch_bound_width is None else cluster.launch_bound_width


def remarks(plan: Plan) -> list[str]:
    """What a person should know before the plan is started, in sentences."""
    said = []
    longest = max(plan.runs, key=lambda run: run.steps)
    if longest.steps > MANY_STEPS:
        said.append(
            f"run {longest.run_id} makes {longest.steps:,} steps of {longest.D // longest.steps:,} tokens; "
            "optimizer.batch_size and data.sequence_length are small for this budget"
        )
    return said


def training_rate(width: int, cluster: ClusterConfig, flops_per_second: float) -> float:
    """FLOP/s that training a model of this width is expected to reach."""
    return flops_per_second * width / (width + cluster.half_speed_width)


def makespan(seconds: list[float], at_once: int) -> float:
    """Wall clock of jobs started in the given order, each on the first free one of `at_once` places."""
    places = [0.0] * max(1, at_once)
    for duration in seconds:
        heapq.heapreplace(places, places[0] + duration)
    return max(places)


def job_shape(parallel: ParallelConfig, cluster: ClusterConfig) -> JobShape:
    """The nodes and ranks of a run. Every node has as many ranks, and a tensor-parallel group stays within one node.

    Raises:
        UserError: a node does not take a whole tensor-parallel group.
    """
    groups = parallel.dp  # tensor-parallel groups on a node
    if cluster.kind == "slurm" and cluster.ranks_per_node is not None:
        room = cluster.ranks_per_node // parallel.tp
        if room < 1:
            raise UserError(
                f"parallel.tp is {parallel.tp}, and tensor-parallel ranks share a node, of which "
                f"cluster.ranks_per_node allows {cluster.ranks_per_node}; it must be at most that"
            )
        groups = max(divisor for divisor in range(1, room + 1) if parallel.dp % divisor == 0)
    return JobShape(
        cluster.gpus_per_job, cluster.cpus_per_task, cluster.memory_gb, cluster.time_minutes,
        nodes=parallel.dp // groups, ranks_per_node=groups * parallel.tp,
    )  # fmt: skip


def describe_mesh(parallel: ParallelConfig) -> str:
    """How a run is spread over its ranks, for people; empty for one rank."""
    if parallel.world_size == 1:
        return ""
    return f"tp{parallel.tp} dp{parallel.dp}" + (f" zero{parallel.zero}" if parallel.zero else "")


def _planned(run: RunConfig, cluster: ClusterConfig, flops_per_second: float) -> PlannedRun:
    own = own_flops(run)
    return PlannedRun(
        run_id=run_id(run),
        name=run.name or run_id(run),
        **vars(count_parameters(run.model)),
        D=run.D,
        flops_6nd=flops_6nd(run),
        flops_exact=flops_exact(run),
        flops_own=own,
        budget=run.budget,
        width=run.model.width,
        depth=run.model.depth,
        heads=run.model.heads,
        steps=run.steps,
        seed=run.seed,
        shape=job_shape(run.parallel, cluster),
        mesh=describe_mesh(run.parallel),
        estimated_seconds=own / training_rate(run.model.width, cluster, flops_per_second),
        parent=run.parent,
        first_step=trunk_steps(run) if run.parent is not None else 0,
    )
