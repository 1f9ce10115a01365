"""Plan the jobs of a sweep's runs: cost, order and shape. Pure.

Estimates affect only order and placement.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...train.config import ParallelConfig, RunConfig, mixture_label, run_id
from ...train.data.recipe.recipe import recipe_label
from ...train.errors import UserError
from ...train.flops import count_parameters, flops_6nd, flops_exact, flops_optimizer
from ...train.schedule import trunk_steps
from ..config import ClusterConfig
from ..runs.forms import JobShape, PlannedRun
from .rates import Calibration, half_speed_width, run_kind
from .trunks import own_flops

# Seconds of a step on a CPU that no FLOPs explain: of its Python (a model of width 8 takes 3 to 5 ms of CPU time), and
# of messages, for each further rank (the fastest steps of pp=2 cp=2 on two cores take 50 to 70 ms).
STEP_SECONDS, EXCHANGE_SECONDS = 0.003, 0.02
MANY_STEPS = 200_000  # a run with more steps could use a far larger batch; chosen by hand


@dataclass(frozen=True)
class Plan:
    """A sweep's runs in starting order, and their total cost."""

    runs: list[PlannedRun]
    jobs_at_once: int
    estimated_seconds: float  # wall clock at that concurrency, training alone
    total_flops: float  # exact convention; steps that branches share with a trunk count once
    separate_flops: float  # the same if every run were trained from its first step
    gpu_hours: float
    core_hours: float
    dollars: float | None
    measured_runs: int = 0  # runs of past sweeps behind the estimates; 0: some rate is assumed
    # Measured FLOP/s and number of runs, by kind of run and width; later plans of the sweep use these again.
    rates: dict[str, dict[int, tuple[float, int]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_runs(
    runs: Sequence[RunConfig],
    cluster: ClusterConfig,
    flops_per_second: float,
    jobs_at_once: int,
    threads: int | None = None,
    measured: Calibration | None = None,
) -> Plan:
    """Plan the cost, order and placement of runs.

    Args:
        flops_per_second: Matmul peak of one job, all ranks together.
        threads: Threads of a rank; None: cluster.cpus_per_task.
        measured: Rates of past sweeps; without them, a rate is assumed from the width.
    """

    def assumed(width: float) -> float:  # small models reach only a small share of the peak
        return flops_per_second * width / (width + half_speed_width(cluster))

    measured, by_id = measured or Calibration(), {run_id(run): run for run in runs}
    kinds = {name: run_kind(run) for name, run in by_id.items()}
    rates = {name: measured.rate(kinds[name], run.model.width, assumed) for name, run in by_id.items()}
    planned = [_planned(name, run, cluster, rates[name], threads) for name, run in by_id.items()]
    if not cluster.gpus_per_job:
        planned = [run if measured.rates.get(kinds[run.run_id]) else _with_overhead(run) for run in planned]
    # Longest first, so that the last job to start is the shortest and no core waits for a long one.
    trunks = {run.parent for run in planned}
    planned.sort(key=lambda run: (-run.estimated_seconds, run.run_id not in trunks, run.run_id))
    gpu_hours = sum(run.estimated_seconds * run.shape.gpus * run.shape.ranks for run in planned) / 3600
    core_hours = sum(run.estimated_seconds * run.shape.cpus * run.shape.ranks for run in planned) / 3600
    if cluster.kind == "local":  # this many runs share a GPU
        gpu_hours /= cluster.runs_per_gpu
    price = cluster.dollars_per_gpu_hour
    return Plan(
        runs=planned,
        jobs_at_once=jobs_at_once,
        estimated_seconds=wall_clock(planned, jobs_at_once),
        total_flops=sum(run.flops_own for run in planned),
        separate_flops=sum(run.flops_exact for run in planned),
        gpu_hours=gpu_hours,
        core_hours=core_hours,
        dollars=None if price is None else gpu_hours * price,
        measured_runs=measured.runs(set(kinds.values())),
        rates={kind: dict(measured.rates.get(kind, {})) for kind in sorted(set(kinds.values()))},
    )


def wall_clock(runs: Sequence[PlannedRun], places: int) -> float:
    """Estimate the seconds that runs take, with `places` running at once; branches wait for their trunks."""
    started: dict[str, float] = {}
    planned = {run.run_id: run for run in runs}
    free = [0.0] * max(1, places)
    waiting = list(runs)

    def ready_at(run: PlannedRun) -> float:
        trunk = planned.get(run.parent or "")
        if trunk is None:
            return 0.0
        share = (run.first_step - trunk.first_step) / (trunk.steps - trunk.first_step)
        return started.get(trunk.run_id, math.inf) + share * trunk.estimated_seconds

    while waiting:
        ready = (run for run in waiting if ready_at(run) <= free[0])
        first = next(ready, None) or min(waiting, key=ready_at)
        waiting.remove(first)
        started[first.run_id] = max(ready_at(first), free[0])
        heapq.heapreplace(free, started[first.run_id] + first.estimated_seconds)
    return max(free)


def plan_remarks(plan: Plan) -> list[str]:
    """Return a remark if the run with most steps has very many, else []."""
    longest = max(plan.runs, key=lambda run: run.steps)
    if longest.steps <= MANY_STEPS:
        return []
    return [
        f"run {longest.run_id} makes {longest.steps:,} steps of {longest.D // longest.steps:,} tokens; "
        "optimizer.batch_size and data.sequence_length are small for this budget"
    ]


def makespan(seconds: list[float], at_once: int) -> float:
    """Return the seconds until all jobs end, if they start in order, `at_once` running at a time."""
    places = [0.0] * max(1, at_once)
    for duration in seconds:
        heapq.heapreplace(places, places[0] + duration)
    return max(places)


def job_shape(parallel: ParallelConfig, cluster: ClusterConfig, threads: int | None = None) -> JobShape:
    """Return the resources of a run's job: equal ranks on every node, each tensor-parallel group within one node."""
    groups = whole = parallel.world_size // parallel.tp  # tensor-parallel groups on a node
    if cluster.kind == "slurm" and cluster.ranks_per_node is not None:
        room = cluster.ranks_per_node // parallel.tp
        if room < 1:
            raise UserError(
                f"parallel.tp is {parallel.tp}; it must be at most cluster.ranks_per_node {cluster.ranks_per_node}, "
                "because tensor-parallel ranks share a node"
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


def _with_overhead(run: PlannedRun) -> PlannedRun:
    """Add an overhead per step, which dominates small models, to the time estimate of a run on CPUs."""
    overhead = (STEP_SECONDS + EXCHANGE_SECONDS * (run.shape.ranks - 1)) * (run.steps - run.first_step)
    return replace(run, estimated_seconds=run.estimated_seconds + overhead)


def _planned(name: str, run: RunConfig, cluster: ClusterConfig, rate: float, threads: int | None) -> PlannedRun:
    trained, shape = own_flops(run), job_shape(run.parallel, cluster, threads)
    if run.trainer.kind == "command" and shape.nodes > 1:
        needed = f"with trainer=command it must be at least {shape.ranks}, so that a run has one node"
        raise UserError(f"cluster.ranks_per_node is {cluster.ranks_per_node}; {needed}")
    return PlannedRun(
        run_id=name,
        name=run.name or name,
        **vars(count_parameters(run.model)),
        D=run.D,
        flops_6nd=flops_6nd(run),
        flops_exact=flops_exact(run),
        flops_own=trained,
        flops_optimizer=flops_optimizer(run),
        budget=run.budget,
        **{name: (run.model.size or vars(run.model)).get(name, 0) for name in ("width", "depth", "heads")},
        steps=run.steps,
        seed=run.seed,
        sequence_length=run.data.sequence_length,
        precision=run.precision,
        shape=shape,
        mesh=run.parallel.label,
        estimated_seconds=trained / rate,
        parent=run.parent,
        first_step=trunk_steps(run) if run.parent is not None else 0,
        recipe=recipe_label(run.data.recipe) if run.data.recipe else "",
        variant=run.variant or "",
        mixture=mixture_label(run.data.weights),
        formats=run.quantization.label,
    )
