"""Account for a sweep's cost: planned, used and wasted, by cause, and the errors of its estimates.

A step is useful while a result or a checkpoint that a run can resume from depends on it. Otherwise it is lost; the
cause is what ended the attempt after which the run resumed from an earlier step.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...train.files import read_json_lines
from ..config import cluster_of
from ..runs import membership
from ..runs.attempts import Attempt, unrecorded_steps
from ..runs.directory import RunDirectory, SweepDirectory

# Causes as the report names them.
WORDS = {name: name for name in ("hung", "preempted", "cancelled", "diverged", "error")} | {
    "killed": "process killed",
    "node": "node failed",
    "lost": "job vanished",
    "disk": "disk full",
    "trunk": "trunk not there yet",
    "program": "program failed",
    "memory": "out of memory",
    "time_limit": "time limit",
    "input": "bad input",
    "unknown": "cause unknown",
}

SETTLED = 0.02  # share of the steps after which a run's speed counts: the first ones compile and fill caches
SLOW = 1.5  # times slower than planned, from which status says it; chosen by hand

Planned = dict[str, Any]  # a run of plan.json


@dataclass
class _Entry:
    run: RunDirectory
    planned: Planned
    history: list[Attempt]
    result: dict[str, Any] | None  # summary; None: the run is not done
    devices: float
    served: int = 0  # last step of a trunk that a finished branch depends on

    @property
    def own_steps(self) -> tuple[int, int]:
        """Return the steps at which the run's own training begins and ends; if not done, it ends where it begins."""
        first = self.planned.get("first_step", 0)
        return first, first if self.result is None else self.planned["steps"]


def account(sweep: SweepDirectory) -> dict[str, Any]:
    """Compute the content of costs.json from a sweep's files and, on SLURM, its job records.

    Each cost has device-hours, dollars (None without a price of a GPU-hour), and FLOPs (exact convention).
    """
    plan, cluster = sweep.plan(), asdict(cluster_of(sweep.settings()))
    entries: dict[str, _Entry] = {}
    for planned in plan["runs"]:
        run, part = sweep.run(planned["run_id"]), devices(planned["shape"], cluster)
        entries[run.run_id] = _Entry(run, planned, list(run.record().attempts), result_of(run), part)
    every = list(entries.values())
    for entry in every:
        if entry.result is not None and (trunk := entries.get(entry.planned.get("parent") or "")) is not None:
            trunk.served = max(trunk.served, entry.planned["first_step"])
    books, planned_hours = _Books(), 0.0
    for entry in every:
        planned_hours += planned_seconds(entry.planned) * entry.devices / 3600
        books.enter(entry)
    gpus = any(entry.planned["shape"]["gpus"] for entry in every)
    price = cluster.get("dollars_per_gpu_hour") if gpus else None

    def amount(hours: float, flops: float) -> dict[str, float | None]:
        return {"hours": hours, "dollars": None if price is None else hours * price, "flops": float(flops)}

    wasted_hours, wasted_flops = sum(books.lost_hours.values()), sum(books.lost_flops.values())
    used_hours = books.hours + wasted_hours
    error, errors = _errors(every)
    cluster_hours = _slurm_hours(sweep, every, cluster)
    return {
        "unit": "GPU-hours" if gpus else "core-hours",
        "runs": len(every),
        "done": sum(entry.result is not None for entry in every),
        "planned": amount(planned_hours, plan.get("total_flops", 0.0)),
        "used": amount(used_hours, float(books.flops) + float(wasted_flops)),
        "useful": amount(books.hours, books.flops),
        "wasted": amount(wasted_hours, wasted_flops),
        "causes": books.causes(),
        "attempts": sum(len(entry.history) for entry in every),
        "unrecorded": sum(unrecorded_steps(entry.history, *entry.own_steps) > 0 for entry in every),
        "retries": membership.retries_spent(sweep),
        "retry_budget": cluster.get("sweep_retries", 0),
        "measured_runs": plan.get("measured_runs", 0),  # runs of past sweeps behind the estimate; 0: assumed
        "cpu_share": None if gpus else _cpu_share(every),
        "error": error,  # of the estimate, over all finished runs together
        "errors": errors,  # by width; medians
        "cluster_hours": cluster_hours,  # hours that SLURM counts for the workers; None: unknown
        # Hours outside attempts: start-up, scoring, and waiting for work.
        "overhead_hours": None if cluster_hours is None else cluster_hours - used_hours,
    }


def devices(shape: Mapping[str, Any], cluster: Mapping[str, Any]) -> float:
    """Return the number of GPUs of a run, or of cores if it has no GPU."""
    count = shape["gpus"] or shape["cpus"]
    shared = cluster.get("runs_per_gpu", 1) if shape["gpus"] and cluster["kind"] == "local" else 1
    return count * shape["nodes"] * shape["ranks_per_node"] / shared


def lost_steps(history: Sequence[Attempt], begins: int, done: bool, served: int = 0) -> list[Counter[str]]:
    """Count the lost steps of each attempt of a run (oldest first), by cause.

    `begins`: step at which the run leaves its trunk. `served`: last step at which a done branch leaves this run.
    """
    lost: list[Counter[str]] = [Counter() for _ in history]
    spans = [(attempt.first_step, attempt.last_step) for attempt in history]

    def go_back(until: int, to: int, cause: str) -> None:
        for index, (low, high) in enumerate(spans[:until]):
            span = (max(low, begins), min(high, to)) if min(high, to) > max(low, begins) else (low, low)
            lost[index][cause] += (high - low) - (span[1] - span[0])
            spans[index] = span

    for index in range(1, len(history)):
        go_back(index, history[index].first_step, history[index - 1].cause)
    if history and not done:
        last = history[-1]
        go_back(len(history), served if last.cause == "diverged" else max(last.saved_step, served), last.cause)
    return [+counts for counts in lost]


@dataclass
class _Books:
    """Useful and lost hours and FLOPs, summed over runs; FLOPs are integers, so that sums are exact."""

    hours: float = 0.0  # useful
    flops: int = 0  # useful
    lost_hours: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by cause
    lost_flops: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)

    def enter(self, entry: _Entry) -> None:
        run, result, useful = entry.planned, entry.result, 0
        step_flops, begins = round(run["flops_exact"] / run["steps"]), run.get("first_step", 0)
        lost = lost_steps(entry.history, begins, result is not None, entry.served)
        for attempt, counts in zip(entry.history, lost, strict=True):
            hours, steps = attempt.paid * entry.devices / 3600, attempt.last_step - attempt.first_step
            if attempt.cause != "done":
                self.ended[attempt.cause] += 1
                if not steps:  # it ended before its first step, so all its time is lost
                    self.lost_hours[attempt.cause] += hours
                    continue
            for cause, count in counts.items():
                self.lost_hours[cause] += hours * count / steps
                self.lost_flops[cause] += count * step_flops
            self.hours += hours * (1 - counts.total() / steps) if steps else hours
            useful += steps - counts.total()
        if result is not None:
            # A finished run has made all its steps, even if some attempts are not recorded.
            useful = run["steps"] - begins
            if not entry.history:
                self.hours += result.get("seconds", 0.0) * useful / run["steps"] * entry.devices / 3600
        self.flops += useful * step_flops

    def causes(self) -> dict[str, dict[str, Any]]:
        hours, ended = self.lost_hours, self.ended
        names = sorted(ended.keys() | hours.keys(), key=lambda name: (-hours[name], -ended[name], name))
        return {
            name: {
                "words": WORDS.get(name, name),
                "attempts": ended[name],
                "hours": hours[name],
                "flops": float(self.lost_flops[name]),
            }
            for name in names
        }


def _slurm_hours(sweep: SweepDirectory, entries: Iterable[_Entry], cluster: Mapping[str, Any]) -> float | None:
    """Return the device-hours that SLURM recorded for the workers, or None without records."""
    if cluster["kind"] != "slurm":
        return None
    from ..slurm import commands as slurm
    from ..slurm.jobs import submitted_workers

    # Earlier versions had one job per run.
    jobs = {end.job_id: entry.devices for entry in entries for end in entry.history if end.job_id is not None}
    jobs |= {job: devices(asdict(shape), cluster) for job, (shape, _) in submitted_workers(sweep).items()}
    seconds = slurm.elapsed(jobs)
    times = [seconds[job] * count for job, count in jobs.items() if job in seconds]
    return sum(times) / 3600 if times else None


def planned_seconds(planned: Planned) -> float:
    """Return a run's planned seconds; in older plans, its share of a group trained together."""
    return float(planned.get("paid_seconds") or planned["estimated_seconds"])


def own_seconds(run: RunDirectory, planned: Planned, summary: Mapping[str, Any]) -> float:
    """Return the seconds that a finished run trained, without those of its trunk."""
    first = planned.get("first_step", 0)
    if not first:
        return float(summary.get("seconds", 0.0))
    before = [line for line in read_json_lines(run.path / "metrics.jsonl") if 0 < line.get("step", 0) <= first]
    if not before or "seconds" not in before[-1]:
        return float(summary.get("seconds", 0.0)) * (1 - first / planned["steps"])
    return max(0.0, float(summary.get("seconds", 0.0)) - before[-1]["seconds"] * first / before[-1]["step"])


def _cpu_share(entries: Iterable[_Entry]) -> float | None:
    """Return the share of core-hours that was CPU time, not waiting for other processes; None if not recorded."""
    attempts = [(attempt, entry.planned["shape"]["cpus"]) for entry in entries for attempt in entry.history]
    measured = [(attempt.cpu_seconds, attempt.paid * cores) for attempt, cores in attempts if attempt.cpu_seconds]
    return sum(cpu for cpu, _ in measured) / max(1e-9, sum(paid for _, paid in measured)) if measured else None


def slowdown(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the median of actual / planned seconds over done and well-advanced running runs; 1 without any.

    The actual seconds of a running run follow from its speed. A row has a run's fields of plan.json, its state, step
    and tokens_per_s, and the seconds of its attempts.
    """
    ratios = []
    for row in (row for row in rows if row["estimated_seconds"]):
        seconds, first, steps = row["seconds"] * (row["state"] == "done"), row["first_step"], row["steps"]
        if row["state"] == "running" and row["step"] - first > SETTLED * (steps - first) and row["tokens_per_s"]:
            seconds = row["D"] * (1 - first / steps) / row["tokens_per_s"]
        ratios += [seconds / row["estimated_seconds"]] * (seconds > 0)
    return statistics.median(ratios or [1.0])


def describe_slowdown(ratio: float) -> str:
    return f" ({ratio:.3g} times slower than planned)" if ratio >= SLOW else ""


def _errors(entries: Iterable[_Entry]) -> tuple[dict[str, float] | None, dict[int, dict[str, float]]]:
    """Return actual / estimated training time: of all done runs together (None without any), and the median by width.

    Repeated steps do not count. `low` and `high` are quartiles over runs.
    """

    def error(ratios: Sequence[float], ratio: float) -> dict[str, float]:
        low, _, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
        return {"runs": len(ratios), "ratio": ratio, "low": low, "high": high}

    times: list[tuple[float, float]] = []
    by_width = defaultdict(list)
    for entry in entries:
        if entry.result is None:
            continue
        actual, planned = own_seconds(entry.run, entry.planned, entry.result), planned_seconds(entry.planned)
        times.append((actual, planned))
        by_width[entry.planned["width"]].append(actual / planned)
    if not times:
        return None, {}
    overall = error(
        [actual / planned for actual, planned in times], sum(a for a, _ in times) / sum(p for _, p in times)
    )
    return overall, {width: error(ratios, statistics.median(ratios)) for width, ratios in sorted(by_width.items())}


def result_of(run: RunDirectory) -> dict[str, Any] | None:
    """Return the summary of a finished run, else None."""
    return run.summary() if run.state().state == "done" else None
