"""Estimate how fast runs train: from rates that past sweeps measured, else from the matmul rate of this machine.

Measured rates are kept in the cache by place: a processor and threads, or a SLURM partition and the resources of a
rank. A rate is FLOP/s (exact convention) of a whole run on all its ranks, trained alone.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from msgspec import Meta

from ...train.config import RunConfig
from ...train.data.recipe.pool import usable_cores
from ...train.errors import counted
from ...train.files import read_json, write_json
from ..config import ClusterConfig, GridConfig
from ..runs.forms import PlanFile

RUNS, KINDS, PLACES = 32, 64, 64  # most entries kept: runs per width, kinds per place, places
LOCK_SECONDS = 20.0  # that another sweep may hold calibration.json
LADDER = (1.0, 2.0, 5.0, 10.0)  # budgets of a probed isoFLOP grid, relative to the smallest
SIZES, TYPICAL_WIDTH = 6, 20  # sizes per budget and a typical width of that grid


Width = Annotated[str, Meta(pattern=r"^\d+$")]
Rates = Annotated[dict[str, Annotated[float, Meta(gt=0, lt=1e300)]], Meta(min_length=1)]  # FLOP/s by run id


class AtPlace(TypedDict):
    kinds: dict[str, dict[Width, Rates]]


class RatesFile(TypedDict):
    """Content of calibration.json."""

    version: Literal[1]
    places: dict[str, AtPlace]


@dataclass(frozen=True)
class Measured:
    run_id: str
    kind: str  # see `kind_of`
    width: int
    flops_per_second: float
    device: str


@dataclass(frozen=True)
class Calibration:
    """FLOP/s on one kind of machine and the number of runs measured, by kind of run and width."""

    rates: Mapping[str, Mapping[int, tuple[float, int]]] = field(default_factory=dict)

    def rate(self, kind: str, width: int, assumed: Callable[[float], float]) -> float:
        """Estimate the FLOP/s of runs of a kind (see `kind_of`), interpolated log-log between measured widths.

        Outside the measured range, scale `assumed`, the rate by width, to the nearest measurement, if any.
        """
        measured = self.rates.get(kind)
        if not measured:
            return assumed(width)
        below = max((other for other in measured if other <= width), default=None)
        above = min((other for other in measured if other >= width), default=None)
        if below is None or above is None:
            nearest = min(measured) if below is None else max(measured)
            return measured[nearest][0] * assumed(width) / assumed(nearest)
        if below == above:
            return measured[below][0]
        part = math.log(width / below) / math.log(above / below)
        return math.exp((1 - part) * math.log(measured[below][0]) + part * math.log(measured[above][0]))

    def runs(self, kinds: Collection[str]) -> int:
        """Count the measured runs of all these kinds; return 0 if any kind has none."""
        counts = [sum(count for _, count in self.rates.get(kind, {}).values()) for kind in kinds]
        return sum(counts) if all(counts) else 0


def kind_of(precision: str, mesh: str, batch_tokens: int, sequence_length: int, formats: str = "") -> str:
    """Return the key in calibration.json for settings under which runs of equal width are equally fast."""
    numbers = f"{precision} {formats}".rstrip()
    return f"{numbers}, {mesh or 'one rank'}, {batch_tokens} tokens a step in sequences of {sequence_length}"


def run_kind(run: RunConfig) -> str:
    if run.trainer.kind == "command":
        return "command"  # no rates are kept of programs, which a user may change at any time
    batch, length = run.batch_tokens, run.data.sequence_length
    return kind_of(run.precision, run.parallel.label, batch, length, run.quantization.label)


def place_of(cluster: ClusterConfig, threads: int) -> str:
    """Return the key in calibration.json for the machine or SLURM partition that trains a cluster's runs."""
    has = counted(cluster.gpus_per_job, "GPU") if cluster.gpus_per_job else counted(threads, "thread")
    if cluster.kind == "slurm":
        only = f" {cluster.constraint}" if cluster.constraint else ""
        return f"slurm {cluster.partition or 'default partition'}{only}, {has} a rank"
    machine = f"{platform.node()}, " if cluster.gpus_per_job else ""  # machines have different GPUs
    return f"{machine}{processor_name()}, {has} a rank"


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def load_rates(cluster: ClusterConfig, threads: int) -> Calibration:
    """Return the rates that past sweeps measured on this machine or partition."""
    places = (read_json(_file(), RatesFile) or {}).get("places", {})
    kinds = places.get(place_of(cluster, threads), {}).get("kinds", {})
    return Calibration(
        {
            kind: {int(width): (statistics.median(runs.values()), len(runs)) for width, runs in widths.items()}
            for kind, widths in kinds.items()
        }
    )


def sweep_rates(folder: Path, cluster: ClusterConfig, threads: int) -> Calibration:
    """Return the rates in a sweep's plan.json, and those of past sweeps for other kinds of run."""
    # If a sweep's own measurements replaced its estimates, the report could not tell how wrong these were.
    planned = (read_json(folder / "plan.json", PlanFile) or {}).get("rates") or {}
    fixed = {
        kind: {int(width): (rate, count) for width, (rate, count) in widths.items()} for kind, widths in planned.items()
    }
    return Calibration({**load_rates(cluster, threads).rates, **fixed})


def record_rates(place: str, measured: Iterable[Measured]) -> str | None:
    """Add rates measured at `place` (see `place_of`) to calibration.json. Returns a message if there is a problem."""
    from filelock import FileLock, Timeout  # slow to import, and status needs no lock

    measured, file = list(measured), _file()
    if not measured:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(f".{file.name}.lock"), timeout=LOCK_SECONDS):
            content, problem = read_json(file, RatesFile), None
            if file.exists() and content is None:
                aside = file.with_name(f"{file.name}.damaged")
                os.replace(file, aside)
                problem = f"{file} was damaged and renamed to {aside}; only this sweep's speeds are known now"
            # Updated entries move to the end; the oldest are dropped.
            by_place = (content or {}).get("places", {})
            kinds = by_place.pop(place, {}).get("kinds", {})
            for run in measured:
                widths = kinds[run.kind] = kinds.pop(run.kind, {})
                runs = widths.get(str(run.width), {})
                runs.pop(run.run_id, None)
                runs[run.run_id] = run.flops_per_second
                widths[str(run.width)] = dict(list(runs.items())[-RUNS:])
            by_place[place] = {"device": measured[-1].device, "kinds": dict(list(kinds.items())[-KINDS:])}
            write_json(file, {"version": 1, "places": dict(list(by_place.items())[-PLACES:])})
            return problem
    except (OSError, Timeout) as error:
        return f"the measured speeds could not be added to {file} ({error}), so later estimates do not use them"


def _file() -> Path:
    folder = os.environ.get("ISOFLOP_CACHE")
    return (Path(folder).expanduser() if folder else Path.home() / ".cache" / "isoflop") / "calibration.json"


@dataclass(frozen=True)
class Places:
    jobs: int  # at a time
    threads: int  # per rank
    flops_per_second: float  # matrix-product peak of a job, all its ranks together


def places(cluster: ClusterConfig, ranks: int, rate: float) -> Places:
    """Return how many jobs of `ranks` ranks run at once, and their resources.

    `rate`: peak FLOP/s of a core or, on SLURM, of a rank.
    """
    if cluster.kind == "slurm":
        return Places(cluster.array_parallelism, cluster.cpus_per_task, rate * ranks)
    cores = usable_cores()
    jobs = cluster.jobs if cluster.jobs is not None else max(1, cores // ranks)
    if cluster.gpus_per_job > 0 and ranks == 1:
        jobs *= cluster.runs_per_gpu
    threads = cluster.threads_per_job if cluster.threads_per_job is not None else max(1, cores // (jobs * ranks))
    # Ranks beyond the number of cores add no speed.
    return Places(jobs, threads, rate * min(ranks * threads, max(threads, cores)))


# The best of many short trials on one thread: other processes slow down most of them, but rarely all.
_TRIAL = """
import time
import numpy as np
a = np.random.default_rng(0).standard_normal((512, 512), dtype=np.float32)
best, stop = float("inf"), time.perf_counter() + {seconds}
while time.perf_counter() < stop:
    start = time.perf_counter()
    a @ a
    best = min(best, time.perf_counter() - start)
print(2 * 512**3 / best)
"""


def core_flops_per_second(seconds: float = 0.4) -> float:
    """Measure the fp32 matmul FLOP/s of one core for `seconds`, in a subprocess."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, "1")}
    trial = [sys.executable, "-c", _TRIAL.format(seconds=seconds)]
    return float(subprocess.run(trial, capture_output=True, text=True, env=environment, check=True).stdout)


def half_speed_width(cluster: ClusterConfig) -> float:
    """Return the width at which training is assumed to reach half of the matmul peak."""
    return 512.0 if cluster.gpus_per_job > 0 else 96.0


def fill_budgets(grid: GridConfig | None, cluster: ClusterConfig, rate: float) -> None:
    """Fill in a grid's missing budgets from cluster.budgets, or else from `rate`, the peak FLOP/s of a core."""
    if grid is not None:
        room = places(cluster, 1, rate)  # always of one rank: the mesh must not change the budgets
        probe = (room.flops_per_second, room.jobs, cluster.minutes, half_speed_width(cluster))
        grid.fill_budgets(cluster.budgets, lambda: probed_budgets(*probe))


def probed_budgets(flops_per_second: float, jobs: int, minutes: float, half_speed: float) -> list[float]:
    """Return FLOP budgets for an isoFLOP grid of about `minutes` on `jobs` cores.

    `half_speed`: see `half_speed_width`.
    """
    rate = flops_per_second * jobs * TYPICAL_WIDTH / (TYPICAL_WIDTH + half_speed)
    smallest = rate * minutes * 60 / (SIZES * sum(LADDER))
    # Rounded to a power of two, so that repeated probes and equal machines nearly always plan the same runs.
    smallest = 1e11 * 2.0 ** math.floor(math.log2(smallest / 1e11))
    return [smallest * step for step in LADDER]
