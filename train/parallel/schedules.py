"""Pipeline schedules as data: the actions of each rank in one step, and the blocks of each stage. Pure, no torch.

Chunk c of rank r is virtual stage c * stages + r. A micro-batch goes forward through the virtual stages from 0 on, and
its gradients go back. A rank keeps the activations of a micro-batch from a chunk's forward action to its backward one.

gpipe         all forward, then all backward (Huang et al. 2019, arXiv 1811.06965)
1f1b          as few micro-batches in flight as keep every rank busy (Narayanan et al. 2021, arXiv 2104.04473,
              section 2.2.1)
interleaved   the same with several chunks per rank, for micro-batches in groups of `stages` (section 2.2.2 there)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved")
Kind = Literal["forward", "backward"]


class Action(NamedTuple):
    kind: Kind
    micro: int  # micro-batch
    chunk: int  # of the rank's chunks of blocks

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro} in chunk {self.chunk}"


Lists = Sequence[Sequence[Action]]  # by pipeline rank
Need = tuple[Kind, int, int]  # an action by its kind, micro-batch and virtual stage


@dataclass(frozen=True)
class Event:
    """An action in time. A list of these, as JSON, is the trace of a step."""

    rank: int
    kind: Kind
    micro: int
    chunk: int
    start: float  # seconds
    end: float


def to_json(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return a trace as plain values, which `read_document(path, list[Event])` reads."""
    return [dict(vars(event)) for event in events]


def schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """Return the actions of each of `stages` ranks.

    Raises:
        ValueError: no such schedule, or it does not allow this number of chunks or micro-batches.
    """
    if name not in SCHEDULES:
        raise ValueError(f"the schedule is {name!r}; it must be one of {', '.join(SCHEDULES)}")
    if chunks > 1 and name != "interleaved":
        raise ValueError(f"the schedule {name} has {chunks} chunks; it must be 1")
    if chunks > 1 and micro_batches % stages:
        raise ValueError(f"{micro_batches} micro-batches interleaved; they must be a multiple of {stages} stages")
    groups = [range(first, min(first + stages, micro_batches)) for first in range(0, micro_batches, stages)]
    forwards = [Action("forward", micro, chunk) for group in groups for chunk in range(chunks) for micro in group]
    backwards = [Action("backward", micro, chunks - 1 - chunk) for _, micro, chunk in forwards]
    lists = []
    for rank in range(stages):
        after = stages - 1 - rank
        ahead = {"gpipe": len(forwards), "interleaved": 2 * after + (chunks - 1) * stages}.get(name, after)
        actions = forwards[:ahead]
        for number, backward in enumerate(backwards, start=ahead):
            actions += [*forwards[number : number + 1], backward]
        lists.append(actions)
    return lists


def simulate(
    lists: Lists,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    send: float = 0.0,
) -> list[Event]:
    """Return when each action happens, in an order in which they can: receives wait, sends do not.

    Args:
        lists: the actions of every rank.
        forward: seconds of one micro-batch, for all virtual stages or for each.
        backward: likewise.
        send: seconds from one rank to another, during which both compute.

    Raises:
        ValueError: ranks wait for each other; names the first such rank and its action.
    """
    stages = len(lists)
    count = stages * (1 + max(action.chunk for actions in lists for action in actions))
    seconds = {
        kind: [cost] * count if isinstance(cost, int | float) else cost
        for kind, cost in (("forward", forward), ("backward", backward))
    }
    events, clocks, waiting = list[Event](), [0.0] * stages, [deque(actions) for actions in lists]
    ends: dict[Need, float] = {}
    before = -1
    while before < len(events):
        before = len(events)
        for rank, queue in enumerate(waiting):
            while queue:
                kind, micro, chunk = action = queue[0]
                virtual = chunk * stages + rank
                if not ends.keys() >= (needs := _needs(action, virtual, count)):
                    break
                queue.popleft()
                arrivals = (ends[need] + send * (need[2] % stages != rank) for need in needs)
                start = max([clocks[rank], *arrivals])
                ends[kind, micro, virtual] = clocks[rank] = start + seconds[kind][virtual]
                events.append(Event(rank, *action, start, clocks[rank]))
    for rank, queue in enumerate(waiting):
        if queue:
            raise ValueError(f"rank {rank} waits for ever before {queue[0]}")
    return events


def _needs(action: Action, virtual: int, count: int) -> set[Need]:
    """Return the actions that must end before this one, which is in a virtual stage of `count`."""
    kind, micro, _ = action
    if kind == "forward":
        return {("forward", micro, virtual - 1)} if virtual else set()
    needs: set[Need] = {("forward", micro, virtual)}
    if virtual + 1 < count:
        needs.add(("backward", micro, virtual + 1))
    return needs


def bubbles(events: Sequence[Event]) -> list[float]:
    """Return the seconds in which each rank waits between its first action and its last."""
    own = [[event for event in events if event.rank == rank] for rank in sorted({event.rank for event in events})]
    return [max(e.end for e in one) - min(e.start for e in one) - sum(e.end - e.start for e in one) for one in own]


def in_flight(actions: Sequence[Action], sizes: Sequence[int]) -> list[int]:
    """Return what a rank keeps after each action, where one micro-batch in chunk c needs `sizes[c]`."""
    return list(accumulate(sizes[chunk] if kind == "forward" else -sizes[chunk] for kind, _, chunk in actions))


def divide(costs: Sequence[float], stages: int, last: float = 0.0) -> list[range]:
    """Divide blocks over virtual stages, in order and at least one each, to minimize the largest cost of a stage.

    The costs of the other stages are near the mean.

    Args:
        costs: of each block, at least `stages` of them.
        stages: virtual stages of the pipeline.
        last: cost of the last stage in addition to its blocks.
    """
    count, sums = len(costs), [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + (last if stage == stages - 1 else 0)

    def furthest(most: float) -> list[int]:
        """Return how many blocks the first 0, 1, 2, … stages can have if none costs more than `most`."""
        ends = [0]
        for stage in range(stages):
            end, limit = ends[-1], count - (stages - 1 - stage)
            while end < limit and cost(stage, ends[-1], end + 1) <= most:
                end += 1
            if end == ends[-1]:
                break
            ends.append(end)
        return ends

    low, most = 0.0, sums[-1] + last
    while low < (middle := (low + most) / 2) < most:
        low, most = (low, middle) if furthest(middle)[stages:] == [count] else (middle, most)
    ends, end, shares = furthest(most), count, list[range]()
    for stage in reversed(range(stages)):
        even = cost(stage, 0, end) / (stage + 1)
        starts = range(stage, min(ends[stage], end - 1) + 1)
        fitting = (start for start in starts if cost(stage, start, end) <= most)
        end = min(fitting, key=lambda start: abs(cost(stage, start, end) - even))
        shares.insert(0, range(end, shares[0].start if shares else count))
    return shares
