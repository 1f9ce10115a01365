"""Runs become units of work: one run, an ensemble in one process, or processes that share a device. Pure, no torch.

Runs are put together only where the whole sweep is then estimated to end no later: two places get two ensembles of four
and not one of eight.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from ...train.config import RunConfig
from ...train.ensemble.members import refusal, shared_fields
from ...train.memory import memory
from ...train.schedule import trunk_steps
from ..runs.queue import Unit

LEAST_GAIN = 1.15  # of an ensemble, below which the estimate is no reason to make one

ROUNDING = 1e-9  # what times may differ by and still be equal


def ensemble_speedup(width: int, members: int, launch_bound_width: float) -> float:
    """Tokens/s of an ensemble over those of its members one after another.

    Launches, which at `launch_bound_width` take half of a step of one model, are paid once for all members.
    """
    launches = launch_bound_width / (width + launch_bound_width)
    return 1 / (1 - launches + launches / members)


def pack_runs(
    clock: Clock, *, places: int, ensembles: int, runs_per_gpu: int, room_bytes: float, device: str
) -> list[Unit]:
    """Units of the clock's runs in the order in which they are to start, at most `places` at a time.

    An ensemble has at most `ensembles` members; of at most `runs_per_gpu` processes that share a device each has its
    part of the memory.
    """
    packing = {name: clock.piece(Unit("alone", (name,))) for name in clock.runs}  # what trains each run
    ways = [list(_ensembles(group, clock, places, ensembles, room_bytes, device)) for group in _groups(clock)]
    packing = _improve(packing, ways, clock, places)
    if runs_per_gpu > 1:
        left = [name for name in clock.runs if packing[name].unit.how == "alone"]
        small = _small(left, clock, room_bytes / runs_per_gpu, device)
        packing = _improve(packing, [list(_shared(names, clock, runs_per_gpu)) for names in small], clock, places)
    return [piece.unit for piece in _in_order(packing)]


@dataclass(frozen=True, eq=False)
class Piece:
    """A unit with its times; its runs end one by one, shortest first, and the rest then goes on faster."""

    unit: Unit
    ends: list[float]  # own time, as if alone, at which the runs end; ascending
    passed: list[float]  # time since the unit's start at those ends
    slowdown: list[float]  # before each end: time that goes by over time as if alone
    order: tuple[float, bool, tuple[str, ...]]  # longest first; of equal ones those that others wait for
    serves: list[tuple[str, float]]  # branches, and how long after its start each finds what it waits for

    @property
    def seconds(self) -> float:
        return self.passed[-1]


Packing = dict[str, Piece]  # what trains each run
Way = list[Piece]  # one way to put the runs of a group together


class Clock:
    """What takes how long, and what waits for what.

    `seconds` are those of each run alone, by id, and of a branch without its trunk's part.
    """

    def __init__(self, runs: Mapping[str, RunConfig], seconds: Mapping[str, float], launch_bound_width: float) -> None:
        self.runs, self.seconds, self.bound = runs, seconds, launch_bound_width
        self.branches = {name for name, run in runs.items() if run.parent is not None}
        self.trunks = {run.parent for run in runs.values() if run.parent is not None}
        # By trunk: branches, each of which starts when the trunk has done so much of its own time.
        self.behind: dict[str, list[tuple[str, float]]] = {}
        for name, run in runs.items():
            if run.parent is not None and run.parent in runs:  # one whose trunk is not here starts at once
                until = seconds[run.parent] * trunk_steps(run) / runs[run.parent].steps
                self.behind.setdefault(run.parent, []).append((name, until))

    def longest_first(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: (-self.seconds[name], name))

    def piece(self, unit: Unit) -> Piece:
        names = sorted(unit.runs, key=self.seconds.__getitem__)
        ends = [self.seconds[name] for name in names]
        slowdown = [self._slowdown(unit.how, names[number:]) for number in range(len(names))]
        lengths = [end - before for before, end in pairwise([0.0, *ends])]
        passed = list(accumulate(length * slow for length, slow in zip(lengths, slowdown, strict=True)))

        def reaches(until: float) -> float:
            """Until each of the runs has done `until` of its own time, or has ended."""
            phase = min(bisect.bisect_left(ends, until), len(ends) - 1)
            return passed[phase] - max(0.0, ends[phase] - until) * slowdown[phase]

        serves = [(branch, reaches(until)) for name in names for branch, until in self.behind.get(name, ())]
        order = (-passed[-1], self.trunks.isdisjoint(unit.runs), unit.runs)
        return Piece(unit, ends, passed, slowdown, order, serves)

    def _slowdown(self, how: str, active: Sequence[str]) -> float:
        """Time that runs take side by side over what each takes alone."""
        widths = [self.runs[name].model.width for name in active]
        if how == "ensemble":
            return len(active) / ensemble_speedup(widths[0], len(active), self.bound)
        # Processes fill the device as if each left it idle while it launches, and together use no more than all of it.
        return max(1.0, sum(width / (width + self.bound) for width in widths))

    def paid_shares(self, piece: Piece) -> dict[str, float]:
        """What of a unit's time each of its runs pays: at any time an equal share with those that still train."""
        names = sorted(piece.unit.runs, key=self.seconds.__getitem__)
        lengths = [end - before for before, end in pairwise([0.0, *piece.passed])]
        shares = accumulate(length / (len(names) - ended) for ended, length in enumerate(lengths))
        return dict(zip(names, shares, strict=True))

    def wall_clock(self, pieces: Sequence[Piece], places: int) -> float:
        """Estimated time of all: as in a launch, each place takes the first that can start."""
        home = {name: number for number, piece in enumerate(pieces) for name in piece.unit.runs}
        lacking = [0] * len(pieces)  # trunks that have not begun
        at = [0.0] * len(pieces)  # when the others are there
        for piece in pieces:
            for name, _ in piece.serves:
                if name in home:
                    lacking[home[name]] += 1
        ready = [number for number, count in enumerate(lacking) if not count]  # a heap, as it is sorted
        coming: list[tuple[float, int]] = []
        free = [0.0] * max(1, places)
        while ready or coming:
            now = free[0] if ready else max(free[0], coming[0][0])
            while coming and coming[0][0] <= now:
                heapq.heappush(ready, heapq.heappop(coming)[1])
            begun = pieces[heapq.heappop(ready)]
            heapq.heapreplace(free, now + begun.passed[-1])
            for name, after in begun.serves:
                if (number := home.get(name)) is None:
                    continue
                lacking[number] -= 1
                at[number] = max(at[number], now + after)
                if not lacking[number]:
                    heapq.heappush(coming, (at[number], number))
        return max(free)


def _in_order(packing: Packing) -> list[Piece]:
    return sorted(dict.fromkeys(packing.values()), key=lambda piece: piece.order)


def _work(pieces: Iterable[Piece]) -> float:
    return math.fsum(piece.seconds for piece in pieces)


def _improve(packing: Packing, ways: Sequence[Sequence[Way]], clock: Clock, places: int) -> Packing:
    """Takes for each group in turn the way with the least wall clock, then the least work, until no group gains."""
    pieces = _in_order(packing)
    ends, work, gained = clock.wall_clock(pieces, places), _work(pieces), True
    while gained:
        gained = False
        for pieces in chain.from_iterable(ways):
            tried = {name: piece for piece in pieces for name in piece.unit.runs}
            tried_work = work - _work({packing[name] for name in tried}) + _work(pieces)
            least = max([tried_work / max(1, places), *(piece.seconds for piece in pieces)])  # whatever the order
            if _less(ends, least) or not (_less(least, ends) or _less(tried_work, work)):
                continue
            tried = packing | tried
            tried_ends = clock.wall_clock(_in_order(tried), places)
            if _less(tried_ends, ends) or (not _less(ends, tried_ends) and _less(tried_work, work)):
                packing, ends, work, gained = tried, min(ends, tried_ends), tried_work, True
    return packing


def _less(one: float, other: float) -> bool:
    return one < other * (1 - ROUNDING)


def _groups(clock: Clock) -> list[list[str]]:
    """Runs that one ensemble could hold, longest first; the groups with the most to train come first."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, run in clock.runs.items():
        if refusal(run) is None and not _in_between(name, clock):
            key = (name in clock.branches, *sorted(shared_fields(run).items()))
            groups.setdefault(key, []).append(name)
    several = [clock.longest_first(group) for group in groups.values() if len(group) > 1]
    return sorted(several, key=lambda group: (-math.fsum(clock.seconds[name] for name in group), min(group)))


def _in_between(name: str, clock: Clock) -> bool:
    """Whether a run waits for another and is waited for: its neighbour in a unit could be either."""
    return name in clock.branches and name in clock.trunks


def _ensembles(names: Sequence[str], clock: Clock, places: int, most: int, room: float, device: str) -> Iterator[Way]:
    """Ways to make ensembles of runs of one shape: as large as may be, half of that, down to none; or one per place."""
    most = min(most, int(room // max(memory(clock.runs[name], device).peak for name in names)))
    width = clock.runs[names[0]].model.width
    counts = {-(-len(names) // (most // 2**halving)) for halving in range(most.bit_length())} | {len(names)}
    if places * most >= len(names) >= places:
        counts.add(places)
    for count in sorted(counts):
        # Members of a length end together; but ensembles of a length, with long and short members, keep places even.
        starts = [len(names) * number // count for number in range(count + 1)]
        alike = [names[first:last] for first, last in pairwise(starts)]
        even = [names[first::count] for first in range(count)]
        if any(len(part) > 1 and ensemble_speedup(width, len(part), clock.bound) < LEAST_GAIN for part in alike):
            continue
        for parts in (alike, even):
            yield [_piece("ensemble", part, clock) for part in parts]


def _small(left: Iterable[str], clock: Clock, room: float, device: str) -> Iterator[list[str]]:
    """Runs that may share a device, longest first: those that wait for nothing, then branches."""
    small = [name for name in left if clock.runs[name].parallel.world_size == 1 and not _in_between(name, clock)]
    small = [name for name in small if memory(clock.runs[name], device).peak <= room]
    for branch in (False, True):
        yield clock.longest_first(name for name in small if (name in clock.branches) == branch)


def _shared(names: Sequence[str], clock: Clock, most: int) -> Iterator[Way]:
    """Ways to put processes of similar length on one device."""
    for size in range(most, 0, -1):
        parts = [names[start : start + size] for start in range(0, len(names), size)]
        yield [_piece("shared", part, clock) for part in parts]


def _piece(how: str, names: Sequence[str], clock: Clock) -> Piece:
    return clock.piece(Unit(how if len(names) > 1 else "alone", tuple(names)))
