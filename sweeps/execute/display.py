"""What a terminal shows of a plan: the runs, what they cost, and the jobs that will train them."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from ...train.errors import counted
from ..config import ClusterConfig
from ..plan.sweep_plan import Plan
from ..runs.forms import JobShape
from ..terminal import console, describe_seconds, plain_table, short
from .controller import workers_for

MOST_ROWS, FIRST_ROWS, LAST_ROWS = 40, 20, 5  # of a plan: up to so many all are shown, else the first and the last


def print_plan(plan: Plan, cluster: ClusterConfig, starts: Mapping[JobShape, str] | None = None) -> None:
    """The runs, of many the longest and the shortest, then what all cost; `starts`: when SLURM would start a shape."""
    where = "this machine" if cluster.kind == "local" else "this partition"
    if plan.measured_runs:
        source = f"times are estimated from {plan.measured_runs} runs that were measured on {where}"
    else:
        source = f"times are estimated from assumed rates; runs of this kind have not been measured on {where} yet"
    out = console()
    out.print(_table_of(plan))
    for line in [_cost(plan, cluster), source, *_jobs(plan, cluster, starts or {})]:
        out.print(line, highlight=False, soft_wrap=True)


def _table_of(plan: Plan) -> Table:
    columns = ("run", "N_total", "D", "C exact", "D/N", "shape", "steps", "time")
    table = plain_table(columns, ("run",), f"{len(plan.runs)} runs")
    refined = any(run.recipe for run in plan.runs)
    mixed = any(run.N_active != run.N_total for run in plan.runs)
    optional = {
        "N_active": {run.run_id: short(run.N_active or run.N_total) for run in plan.runs if mixed},
        "variant": {run.run_id: run.variant for run in plan.runs if run.variant},
        "recipe": {run.run_id: run.recipe or "raw" for run in plan.runs if refined},
        "ranks": {run.run_id: run.mesh + _on_nodes(run.shape) for run in plan.runs if run.mesh},
        "branches from": {run.run_id: f"{run.parent} at {run.first_step:,}" for run in plan.runs if run.parent},
    }
    more = {name: cells for name, cells in optional.items() if cells}
    for name in more:
        table.add_column(name, no_wrap=True)
    folded = len(plan.runs) > MOST_ROWS
    for number, run in enumerate(plan.runs):
        if folded and FIRST_ROWS <= number < len(plan.runs) - LAST_ROWS:
            if number == FIRST_ROWS:
                table.add_row(f"… {len(plan.runs) - FIRST_ROWS - LAST_ROWS} more …")
            continue
        table.add_row(
            run.run_id,
            short(run.N_total),
            short(run.D),
            f"{run.flops_exact:.2e}",
            f"{run.D / (run.N_active or run.N_total):.0f}",
            f"{run.width}x{run.depth}",
            f"{run.steps:,}",
            describe_seconds(run.estimated_seconds),
            *(cells.get(run.run_id, "") for cells in more.values()),
        )
    return table


def _cost(plan: Plan, cluster: ClusterConfig) -> str:
    cost = f"total {plan.total_flops:.3g} FLOPs (exact)"
    if plan.total_flops < plan.separate_flops:
        cost += f", which is {plan.total_flops / plan.separate_flops:.0%} of the runs' own,"
    cost += f" about {describe_seconds(plan.estimated_seconds)} of training"
    cost += f" with {plan.jobs_at_once} at a time on {cluster.kind}"
    cost += f", {plan.gpu_hours:.3g} GPU-hours" if cluster.gpus_per_job else f", {plan.core_hours:.3g} core-hours"
    if plan.dollars is not None:
        cost += f", ${plan.dollars:,.2f}"
    return cost


def _jobs(plan: Plan, cluster: ClusterConfig, starts: Mapping[JobShape, str]) -> list[str]:
    if cluster.kind != "slurm":
        return []
    shapes: dict[JobShape, list[float]] = {}
    for run in plan.runs:
        shapes.setdefault(run.shape, []).append(run.estimated_seconds)
    workers = sum(workers_for(seconds, 60 * cluster.queue_minutes) for seconds in shapes.values())
    lines = [f"jobs: {counted(min(workers, cluster.array_parallelism), 'worker')}"]
    lines += [f"a job of {_shape(shape)} would start about {start}, says SLURM" for shape, start in starts.items()]
    return lines


def _shape(shape: JobShape) -> str:
    gpus = f"{shape.gpus} GPU{'s' * (shape.gpus > 1)}, " if shape.gpus else ""
    each = f"{gpus}{shape.cpus} core{'s' * (shape.cpus > 1)} and {shape.memory_gb:g} GB"
    return each if shape.ranks == 1 else f"{shape.ranks} ranks{_on_nodes(shape)}, each with {each}"


def _on_nodes(shape: JobShape) -> str:
    return f" on {shape.nodes} nodes" if shape.nodes > 1 else ""
