"""Which units become array tasks and which go through a queue, in how many jobs, within what SLURM takes. Pure.

A trunk and its branches go the same way: through a queue, which hands a branch out when its trunk has come far enough,
or as array tasks that wait for one another; where one of them is long all are array tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..config import ClusterConfig
from ..runs.forms import JobShape, PlannedRun
from ..runs.queue import Unit


@dataclass(frozen=True)
class Batch:
    """Units that are submitted together, in the order in which they are to start."""

    shape: JobShape
    units: tuple[Unit, ...]
    waits: tuple[str, ...] = ()  # jobs whose end all of them wait for
    avoid: tuple[str, ...] = ()  # nodes

    @property
    def runs(self) -> list[str]:
        return [name for unit in self.units for name in unit.runs]


def split(
    units: Sequence[Unit], planned: Mapping[str, PlannedRun], cluster: ClusterConfig
) -> tuple[list[Unit], list[Unit]]:
    """Units for queues, and units for array tasks, each in the order given."""
    number = families(units, planned)
    family = {unit: number[unit.runs[0]] for unit in units}
    shape = {family[unit]: shape_of(unit, planned) for unit in units}
    # A queue holds units of one shape, and looks for a trunk among its own.
    apart = {
        family[unit]
        for unit in units
        if shape_of(unit, planned) != shape[family[unit]]
        or any(planned[name].shape.ranks > 1 for name in unit.runs)
        or seconds(unit, planned) >= 60 * cluster.queue_minutes
    }
    return [unit for unit in units if family[unit] not in apart], [unit for unit in units if family[unit] in apart]


def families(units: Sequence[Unit], planned: Mapping[str, PlannedRun]) -> dict[str, int]:
    """By run id, a number that runs share which come from one another, or whose relations share a unit."""
    number = {name: index for index, unit in enumerate(units) for name in unit.runs}
    while True:
        joined = dict(number)
        for unit in units:
            parents = {planned[name].parent for name in unit.runs}
            together = [*unit.runs, *(parent for parent in parents if parent in number)]
            least = min(joined[name] for name in together)
            joined |= dict.fromkeys(together, least)
        if joined == number:
            return number
        number = joined


def of_family(values: Mapping[str, Iterable[str]], family: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """By run id, what any run of its family has in `values`."""
    found: dict[int, set[str]] = {}
    for name, number in family.items():
        found.setdefault(number, set()).update(values.get(name, ()))
    return {name: tuple(sorted(found[number])) for name, number in family.items()}


def seconds(unit: Unit, planned: Mapping[str, PlannedRun]) -> float:
    """Estimate of a unit."""
    return math.fsum(planned[name].estimated_seconds for name in unit.runs)


def batches(
    units: Iterable[Unit],
    planned: Mapping[str, PlannedRun],
    waits: Mapping[str, tuple[str, ...]],
    avoid: Mapping[str, tuple[str, ...]],
) -> list[Batch]:
    """Units of one shape that wait for the same jobs and avoid the same nodes (both by run id), together."""
    alike: dict[tuple[JobShape, tuple[str, ...], tuple[str, ...]], list[Unit]] = {}
    for unit in units:
        jobs = sorted({job for name in unit.runs for job in waits.get(name, ())})
        nodes = sorted({node for name in unit.runs for node in avoid.get(name, ())})
        alike.setdefault((shape_of(unit, planned), tuple(jobs), tuple(nodes)), []).append(unit)
    return [Batch(shape, tuple(members), jobs, nodes) for (shape, jobs, nodes), members in alike.items()]


def shape_of(unit: Unit, planned: Mapping[str, PlannedRun]) -> JobShape:
    return planned[unit.runs[0]].shape


def levels(units: Sequence[Unit], planned: Mapping[str, PlannedRun]) -> list[list[Unit]]:
    """Units by how many trunks come before them."""

    def depth(name: str) -> int:
        count, parent = 0, planned[name].parent
        while parent is not None and parent in planned:
            count, parent = count + 1, planned[parent].parent
        return count

    found: dict[int, list[Unit]] = {}
    for unit in units:
        found.setdefault(max(depth(name) for name in unit.runs), []).append(unit)
    return [found[count] for count in sorted(found)]


def workers_for(batch: Batch, planned: Mapping[str, PlannedRun], cluster: ClusterConfig) -> int:
    """As many as make each last about `cluster.queue_minutes`."""
    total = math.fsum(seconds(unit, planned) for unit in batch.units)
    return max(1, min(len(batch.units), cluster.array_parallelism, math.ceil(total / (60 * cluster.queue_minutes))))


def allot(room: int, workers: Sequence[int], tasks: int) -> tuple[list[int], int]:
    """Workers that each queue gets, and array tasks, given room for so many jobs."""
    if sum(workers) + tasks <= room:
        return list(workers), tasks
    for_workers = min(sum(workers), max(room - tasks, min(room, max(len(workers), room // 2))))
    given = [0] * len(workers)
    while sum(given) < for_workers:  # one each, again and again, so that none starves
        for number, wanted in enumerate(workers):
            if given[number] < wanted and sum(given) < for_workers:
                given[number] += 1
    return given, min(tasks, room - for_workers)
