"""Runs become jobs: their cost, their order and their shape. Pure.

The estimate: training reaches peak * width / (width + half_speed_width) of the device's plain matrix-product rate,
which is what small models measured here do; the report compares it with what was spent.
"""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass
from typing import Any

from ..train.config import RunConfig, run_id
from ..train.flops import count_parameters, flops_6nd, flops_exact
from .config import ClusterConfig

MANY_STEPS = 200_000  # beyond which a batch is far below what a run of that length can use


@dataclass(frozen=True)
class JobShape:
    """What one run asks of the machine. Runs of one shape share an array."""

    gpus: int
    cpus: int
    memory_gb: float
    time_minutes: int


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
    budget: float | None
    width: int
    depth: int
    heads: int
    steps: int
    seed: int
    shape: JobShape
    estimated_seconds: float
    parent: str | None = None


@dataclass(frozen=True)
class Plan:
    """A sweep's runs, longest first, and what they cost together."""

    runs: list[PlannedRun]
    jobs_at_once: int
    estimated_seconds: float  # wall clock at that concurrency, training alone
    total_flops: float  # exact convention
    gpu_hours: float
    dollars: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(runs: list[RunConfig], cluster: ClusterConfig, flops_per_second: float, jobs_at_once: int) -> Plan:
    """Cost, order and placement of a grid.

    Args:
        runs: from `grid.expand`.
        cluster: what a job may ask for, and the price.
        flops_per_second: matrix-product peak of what one job gets.
        jobs_at_once: how many run side by side.
    """
    shape = JobShape(cluster.gpus_per_job, cluster.cpus_per_task, cluster.memory_gb, cluster.time_minutes)
    planned = [_planned(run, cluster, flops_per_second, shape) for run in runs]
    # Longest first: the last job to start is then the shortest, and no core idles behind a long tail.
    planned.sort(key=lambda run: (-run.estimated_seconds, run.run_id))
    seconds = sum(run.estimated_seconds for run in planned)
    gpu_hours = seconds / 3600 * cluster.gpus_per_job
    price = cluster.dollars_per_gpu_hour
    return Plan(
        runs=planned,
        jobs_at_once=jobs_at_once,
        estimated_seconds=makespan([run.estimated_seconds for run in planned], jobs_at_once),
        total_flops=sum(run.flops_exact for run in planned),
        gpu_hours=gpu_hours,
        dollars=None if price is None else gpu_hours * price,
    )


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


def _planned(run: RunConfig, cluster: ClusterConfig, flops_per_second: float, shape: JobShape) -> PlannedRun:
    flops = flops_exact(run)
    return PlannedRun(
        run_id=run_id(run),
        name=run.name or run_id(run),
        **vars(count_parameters(run.model)),
        D=run.D,
        flops_6nd=flops_6nd(run),
        flops_exact=flops,
        budget=run.budget,
        width=run.model.width,
        depth=run.model.depth,
        heads=run.model.heads,
        steps=run.steps,
        seed=run.seed,
        shape=shape,
        estimated_seconds=flops / training_rate(run.model.width, cluster, flops_per_second),
        parent=run.parent,
    )
