"""What training reached on the devices of past sweeps, kept in the cache, so that the next plan's estimate is measured.

Special here:
- a place is what a planner knows before a job runs: this machine's processor and threads, or a partition and what a
  rank gets there. The device behind a partition's name is noted for people;
- rates are FLOP/s by the exact convention, of a whole run on all its ranks, trained alone: of an ensemble's member
  what its company saved is taken out again by the same rule by which the plan puts it in (`packing.ensemble_speedup`);
- a width that nobody has measured is interpolated between its neighbours, log to log; beyond them the assumed curve
  goes on from the nearest;
- a sweep goes on with the rates that it was first planned with (plan.json has them): else what its own runs reached
  would become its estimate, and the report could not say how far that was off;
- every run counts once, however often its sweep is finished. Of a width the newest `RUNS` runs are kept, and whatever
  was not added to for longest goes first.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...train.files import read_json, write_json
from ..config import ClusterConfig

VERSION = 1
RUNS, KINDS, PLACES = 32, 64, 64  # kept: runs of a width, kinds of run of a place, places
LOCK_SECONDS = 20.0


@dataclass(frozen=True)
class Measured:
    """What one run reached."""

    run_id: str
    kind: str  # see `kind_of`
    width: int
    flops_per_second: float
    device: str


@dataclass(frozen=True)
class Calibration:
    """What is known of one place: FLOP/s and how many runs say so, by kind of run and width."""

    rates: Mapping[str, Mapping[int, tuple[float, int]]] = field(default_factory=dict)

    def rate(self, kind: str, width: int, assumed: Callable[[float], float]) -> float | None:
        """FLOP/s that a run of this kind and width reaches; None where no run of its kind was measured.

        Args:
            kind: see `kind_of`.
            width: of the model.
            assumed: FLOP/s by width; its shape is followed beyond the widths that were measured.
        """
        known = self.rates.get(kind)
        if not known:
            return None
        below = max((each for each in known if each <= width), default=None)
        above = min((each for each in known if each >= width), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            assert nearest is not None
            return known[nearest][0] * assumed(width) / assumed(nearest)
        if below == above:
            return known[below][0]
        part = math.log(width / below) / math.log(above / below)
        return math.exp((1 - part) * math.log(known[below][0]) + part * math.log(known[above][0]))

    def runs(self, kinds: Iterable[str]) -> int:
        """How many runs of these kinds are behind the rates."""
        return sum(count for kind in set(kinds) for _, count in self.rates.get(kind, {}).values())


def kind_of(precision: str, mesh: str, batch_tokens: int, sequence_length: int) -> str:
    """What beside its width decides how fast a run trains on a place, in words; it is a key of the file."""
    return f"{precision}, {mesh or 'one rank'}, {batch_tokens} tokens a step in sequences of {sequence_length}"


def place_of(cluster: ClusterConfig, threads: int) -> str:
    """Where runs of a cluster are trained, as far as a planner knows; it is a key of the file.

    Args:
        cluster: the sweep's.
        threads: CPU cores of a rank.
    """
    count, what = (cluster.gpus_per_job, "GPU") if cluster.gpus_per_job else (threads, "thread")
    has = f"{count} {what}{'s' * (count > 1)}"
    if cluster.kind == "slurm":
        only = f" {cluster.constraint}" if cluster.constraint else ""
        return f"slurm {cluster.partition or 'default partition'}{only}, {has} a rank"
    machine = f"{platform.node()}, {_processor()}" if cluster.gpus_per_job else _processor()  # which has which GPUs
    return f"{machine}, {has} a rank"


def _processor() -> str:
    """This machine's, by name where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def load(cluster: ClusterConfig, threads: int) -> Calibration:
    """What past sweeps measured where this one is to run; nothing where there is no file, or a damaged one."""
    kinds = _places(read_json(_file())).get(place_of(cluster, threads), {}).get("kinds", {})
    rates = {}
    for kind, widths in kinds.items():
        rates[kind] = {int(width): (statistics.median(runs.values()), len(runs)) for width, runs in widths.items()}
    return Calibration(rates)


def of_sweep(folder: Path, cluster: ClusterConfig, threads: int) -> Calibration:
    """What a sweep is planned with: of the kinds of run that its plan.json has what that says, of others `load`'s.

    Args:
        folder: of the sweep; it need not exist.
        cluster: the sweep's.
        threads: CPU cores of a rank.
    """
    planned = (read_json(folder / "plan.json") or {}).get("rates") or {}
    fixed = {
        kind: {int(width): (rate, count) for width, (rate, count) in widths.items()} for kind, widths in planned.items()
    }
    return Calibration({**load(cluster, threads).rates, **fixed})


def record(place: str, measured: Iterable[Measured]) -> str | None:
    """Adds what runs reached to the file; returns in a sentence what went wrong where it could not, or was damaged."""
    measured, file = list(measured), _file()
    if not measured:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(f".{file.name}.lock"), timeout=LOCK_SECONDS):
            content, said = read_json(file), None
            if file.exists() and not _is_whole(content):
                aside = file.with_name(f"{file.name}.damaged")
                os.replace(file, aside)
                said = f"{file} was damaged and is now {aside}; estimates start anew from what this sweep measured"
            write_json(file, {"version": VERSION, "places": _with(_places(content), place, measured)})
            return said
    except (OSError, Timeout) as error:
        return f"what was measured could not be added to {file} ({error}); the next estimate does without"


def _file() -> Path:
    given = os.environ.get("ISOFLOP_CACHE")
    return (Path(given).expanduser() if given else Path.home() / ".cache" / "isoflop") / "calibration.json"


def _with(places: dict[str, Any], place: str, measured: list[Measured]) -> dict[str, Any]:
    """The file's places with these runs in theirs; what is added to moves to the end, and the oldest falls out."""
    kinds = places.pop(place, {}).get("kinds", {})
    for run in measured:
        widths = kinds.pop(run.kind, {})
        runs = widths.setdefault(str(run.width), {})
        runs.pop(run.run_id, None)
        runs[run.run_id] = run.flops_per_second
        widths[str(run.width)] = dict(list(runs.items())[-RUNS:])
        kinds[run.kind] = widths
    places[place] = {"device": measured[-1].device, "kinds": dict(list(kinds.items())[-KINDS:])}
    return dict(list(places.items())[-PLACES:])


def _places(content: dict[str, Any] | None) -> dict[str, Any]:
    return dict(content["places"]) if content is not None and _is_whole(content) else {}


def _is_whole(content: dict[str, Any] | None) -> bool:
    """Whether everything in the file is what `record` writes."""
    if content is None or content.get("version") != VERSION:
        return False
    try:
        kinds = [kind for place in content["places"].values() for kind in place["kinds"].values()]
        runs = [(int(width), runs) for widths in kinds for width, runs in widths.items()]
        return all(_is_rate(number) for width, rates in runs for number in (width, len(rates), *rates.values()))
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0
