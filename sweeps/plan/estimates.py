"""How far a sweep's estimates of time were off, and what its runs teach the next ones."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...train.files import read_json_lines
from ..runs import attempts
from ..runs.attempts import Attempt
from ..runs.directory import RunDirectory, SweepDirectory
from .calibration import Measured, kind_of
from .packing import ensemble_speedup

LEAST_SECONDS = 5.0  # of a run that `measured` learns from

Planned = dict[str, Any]  # a run of plan.json
Times = tuple[float, float]  # actual, planned


@dataclass(frozen=True)
class Error:
    """How far an estimate of time was off: actual over planned."""

    runs: int
    ratio: float  # of all together: of the sums; of one width: the runs' median
    low: float  # quartiles of the runs' ratios
    high: float


def planned_seconds(planned: Planned) -> float:
    """What a run was expected to pay; a plan of an earlier version has only what it takes alone."""
    return float(planned.get("paid_seconds") or planned["estimated_seconds"])


def own_seconds(run: RunDirectory, planned: Planned, summary: Mapping[str, Any]) -> float:
    """Seconds that a run which is done trained itself: of a branch, what came after its trunk's part."""
    first = planned.get("first_step", 0)
    if not first:
        return float(summary["seconds"])
    before = [line for line in read_json_lines(run.path / "metrics.jsonl") if 0 < line.get("step", 0) <= first]
    if not before or "seconds" not in before[-1]:
        return float(summary["seconds"]) * (1 - first / planned["steps"])
    return max(0.0, float(summary["seconds"]) - before[-1]["seconds"] * first / before[-1]["step"])


def compare(
    runs: Mapping[str, Planned], results: Mapping[str, Mapping[str, Any] | None],
    histories: Mapping[str, Sequence[Attempt]], paid: Mapping[str, Sequence[float]], sweep: SweepDirectory,
) -> dict[str, Times]:  # fmt: skip
    """Of the runs that are done: the seconds of training that each paid, repeated steps left out, and those planned."""
    found = {}
    for name, result in results.items():
        if result is None:
            continue
        seconds = own_seconds(sweep.run(name), runs[name], result)
        if _shares_device(histories[name], result):
            seconds *= sum(paid[name]) / max(sum(attempt.seconds for attempt in histories[name]), 1e-9)
        found[name] = seconds, planned_seconds(runs[name])
    return found


def error_of_all(compared: Mapping[str, Times]) -> Error | None:
    """The error of all runs together; None where none is done."""
    if not compared:
        return None
    actual, planned = map(sum, zip(*compared.values(), strict=True))
    return Error(len(compared), actual / planned, *_quartiles([one / other for one, other in compared.values()]))


def errors_by_width(runs: Mapping[str, Planned], compared: Mapping[str, Times]) -> dict[int, Error]:
    """By width: the median of the runs' ratios."""
    ratios: dict[int, list[float]] = defaultdict(list)
    for name, (actual, planned) in compared.items():
        ratios[runs[name]["width"]].append(actual / planned)
    return {
        width: Error(len(some), statistics.median(some), *_quartiles(some)) for width, some in sorted(ratios.items())
    }


def measured(sweep: SweepDirectory, launch_bound_width: float) -> list[Measured]:
    """What the runs that are done reached, each as if trained alone, for the estimates of later sweeps.

    Runs that shared a device with other processes say nothing of a device alone and are left out, and so are those of
    less than `LEAST_SECONDS`, which say more of their start than of their speed.

    Args:
        sweep: the sweep.
        launch_bound_width: see `packing.ensemble_speedup`.
    """
    found = []
    for planned in sweep.plan()["runs"]:
        run = sweep.run(planned["run_id"])
        result = result_of(run)
        if result is None or _shares_device(attempts.read(run), result):
            continue
        seconds = own_seconds(run, planned, result)
        if seconds < LEAST_SECONDS:
            continue
        members = result.get("ensemble", 1)
        gain = ensemble_speedup(planned["width"], members, launch_bound_width)
        batch_tokens = planned["D"] // planned["steps"]
        kind = kind_of(planned["precision"], planned["mesh"], batch_tokens, planned["sequence_length"])
        rate = planned["flops_own"] / seconds / gain
        found.append(Measured(run.run_id, kind, planned["width"], rate, result["device"]))
    return found


def result_of(run: RunDirectory) -> dict[str, Any] | None:
    """The summary of a run that is done; None of any other."""
    return run.summary() if run.state().state == "done" else None


def _shares_device(history: Sequence[Attempt], result: Mapping[str, Any]) -> bool:
    """Whether a run shared its device with other processes; an ensemble's clock takes care of its members itself."""
    return result.get("ensemble", 1) == 1 and any(attempt.share < 1 for attempt in history)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return low, high
