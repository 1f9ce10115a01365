"""Schedules of a pipeline as data: what each rank does in one step, in order; and which blocks it has. Pure, no torch.

Chunk c of rank r is virtual stage c * stages + r, in a V the second one 2 * stages - 1 - r. A micro-batch goes forward
through them from 0 on, and backward. Its activations are kept from the forward action of a chunk to its weight
gradients.

gpipe         all forward, then all backward (Huang et al. 2019, arXiv 1811.06965)
1f1b          as few under way as keep every rank busy (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1)
interleaved   the same with several chunks a rank, for micro-batches in groups of `stages` (section 2.2.2 there)
zb-h1         1f1b with weight gradients apart, which fill the bubble; as much in memory (Qi et al. 2024, arXiv
              2401.10241, section 3.1; the step's boundary stays as it is)
zb-v          two chunks a rank in a V, and no bubble, with as much in memory as 1f1b (section 6 there)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
Kind = Literal["forward", "backward", "input", "weight"]  # backward: the gradients by input and by weights at once


class Action(NamedTuple):
    kind: Kind
    micro: int  # micro-batch
    chunk: int  # of the rank's chunks of blocks

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro} in chunk {self.chunk}"


Lists = Sequence[Sequence[Action]]  # by pipeline rank
Need = tuple[str, int, int]  # the forward action, or the one that gives the gradients by input, of a virtual stage


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
    """A trace as plain values, such as `read_document(path, list[Event])` reads."""
    return [dict(vars(event)) for event in events]


def stage_of(rank: int, chunk: int, stages: int, v: bool) -> int:
    """The virtual stage of a rank's chunk."""
    return chunk * stages + (stages - 1 - rank if v and chunk % 2 else rank)


def rank_of(stage: int, stages: int, v: bool) -> int:
    """Which rank has a virtual stage."""
    return stage_of(stage % stages, stage // stages, stages, v) % stages


def places(name: str, stages: int, chunks: int) -> list[list[int]]:
    """The virtual stages of each rank, by chunk."""
    return [[stage_of(rank, chunk, stages, name == "zb-v") for chunk in range(chunks)] for rank in range(stages)]


def schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """What each of `stages` ranks does. ValueError: the schedule has no such chunks or micro-batches."""
    if name not in SCHEDULES or (chunks != 2 if name == "zb-v" else chunks > 1 and name != "interleaved"):
        said = f"one of {SCHEDULES}, more chunks only interleaved, and two of zb-v"
        raise ValueError(f"{chunks} chunks of {name}; it must be {said}")
    if name == "zb-v":
        return [_of_v(rank, stages, micro_batches) for rank in range(stages)]
    if chunks > 1 and micro_batches % stages:
        raise ValueError(f"{micro_batches} micro-batches interleaved; they must be a multiple of {stages} stages")
    groups = [range(first, min(first + stages, micro_batches)) for first in range(0, micro_batches, stages)]
    order = [(micro, chunk) for group in groups for chunk in range(chunks) for micro in group]
    forwards = [Action("forward", *place) for place in order]
    backwards = [(micro, chunks - 1 - chunk) for micro, chunk in order]
    return [_of_rank(name, rank, stages, chunks, forwards, backwards) for rank in range(stages)]


def _of_rank(
    name: str, rank: int, stages: int, chunks: int, forwards: list[Action], backwards: list[tuple[int, int]]
) -> list[Action]:
    after = stages - 1 - rank
    ahead = {"gpipe": len(forwards), "interleaved": 2 * after + (chunks - 1) * stages}.get(name, after)
    actions, waiting = forwards[:ahead], list[Action]()
    for done, place in enumerate(backwards):
        actions += forwards[ahead + done : ahead + done + 1]
        actions.append(Action("input" if name == "zb-h1" else "backward", *place))
        if name == "zb-h1":
            waiting.append(Action("weight", *place))
            if len(waiting) > rank:  # so that every rank has as much under way as the first one
                actions.append(waiting.pop(0))
    return actions + waiting


def _of_v(rank: int, stages: int, micro_batches: int) -> list[Action]:
    """f, b: forward and input gradients of the first chunk; F, B: of the second; w: the oldest weight gradients left.

    Ranks begin one unit apart, and each list below lets rank + 1 or rank - 1 do what it needs a unit before.
    """
    whole, after = max(micro_batches, 2 * stages - 1), stages - rank  # of fewer the others are left out
    order = "f" * (2 * after - 1) + "Ff" * rank + "FBw" * after
    order += "fbwFBw" * (whole - 2 * stages + 1 + rank) + "bwFBw" * (after - 1)
    order += "bB" * rank + "bw" * after + "w" * 2 * rank
    actions, waiting, done = list[Action](), deque[Action](), Counter[str]()
    for letter in order:
        if letter == "w":
            actions.append(waiting.popleft())
            continue
        micro, chunk = done[letter], int(letter.isupper())
        actions.append(Action("forward" if letter in "fF" else "input", micro, chunk))
        if letter in "bB":
            waiting.append(Action("weight", micro, chunk))
        done[letter] += 1
    return [action for action in actions if action.micro < micro_batches]


def check(lists: Lists, stages: int, micro_batches: int, chunks: int, v: bool = False) -> None:
    """Proves that ranks which do this end: each action once, messages received as they are sent, no circle.

    ValueError names the rank and the action that is wrong.
    """
    if len(lists) != stages:
        raise ValueError(f"there are lists of {len(lists)} ranks; it must be {stages}")
    places = {(micro, chunk) for micro in range(micro_batches) for chunk in range(chunks)}
    for rank, actions in enumerate(lists):
        whole = places & {(micro, chunk) for kind, micro, chunk in actions if kind == "backward"}
        wanted = Counter(Action("forward", *place) for place in places)
        wanted.update(Action("backward", *place) for place in whole)
        wanted.update(Action(kind, *place) for place in places - whole for kind in ("input", "weight"))
        found = Counter(actions)
        if wrong := next(iter((wanted - found) + (found - wanted)), None):
            raise ValueError(f"rank {rank} does {found[wrong]} times the {wrong}; it must do so {wanted[wrong]} times")
    for rank in range(stages) if stages > 1 else ():
        _check_receives(lists, rank, 1, ("forward",), range(1, stages * chunks), v)
        _check_receives(lists, rank, -1, ("backward", "input"), range(stages * chunks - 1), v)
    simulate(lists, v=v)


def _check_receives(lists: Lists, rank: int, step: int, kinds: Sequence[str], receiving: range, v: bool) -> None:
    """Whether a rank awaits in their order what others send to the virtual stage that is `step` on."""
    stages, arriving = len(lists), dict[int, list[tuple[int, int]]]()
    for sender, actions in enumerate(lists):
        sent = ((one.micro, stage_of(sender, one.chunk, stages, v) + step) for one in actions if one.kind in kinds)
        own = [message for message in sent if message[1] in receiving and rank_of(message[1], stages, v) == rank]
        arriving[sender] = own[::-1]
    for action in lists[rank]:
        virtual = stage_of(rank, action.chunk, stages, v)
        if action.kind not in kinds or virtual not in receiving:
            continue
        if (come := arriving[sender := rank_of(virtual - step, stages, v)].pop()) != (action.micro, virtual):
            meant = f"micro-batch {come[0]} in chunk {come[1] // stages}"
            raise ValueError(f"rank {rank} awaits rank {sender} before {action}; its next message is for {meant}")


def simulate(
    lists: Lists,
    forward: float | Sequence[float] = 1.0,
    input: float | Sequence[float] = 1.0,
    weight: float | Sequence[float] = 1.0,
    send: float = 0.0,
    *,
    v: bool = False,
) -> list[Event]:
    """When each action happens, in an order in which they can: receives wait, sends do not.

    Args:
        forward: seconds of one micro-batch, of every virtual stage or of each; `input` and `weight` alike.
        send: seconds from one rank to another, beside which both compute.
        v: chunks lie in a V.

    Raises:
        ValueError: ranks wait for each other, with the first one's action.
    """
    stages = len(lists)
    count = stages * (1 + max(action.chunk for actions in lists for action in actions))
    seconds = {
        kind: [cost] * count if isinstance(cost, int | float) else cost
        for kind, cost in (("forward", forward), ("input", input), ("weight", weight))
    }
    seconds["backward"] = [sum(both) for both in zip(seconds["input"], seconds["weight"], strict=True)]
    events, clocks, waiting = list[Event](), [0.0] * stages, [deque(actions) for actions in lists]
    ends: dict[Need, float] = {}
    before = -1
    while before < len(events):
        before = len(events)
        for rank, queue in enumerate(waiting):
            while queue:
                kind, micro, chunk = action = queue[0]
                virtual = stage_of(rank, chunk, stages, v)
                if not ends.keys() >= (needs := _needs(action, virtual, count)):
                    break
                queue.popleft()
                there = (ends[need] + send * (rank_of(need[2], stages, v) != rank) for need in needs)
                start = max([clocks[rank], *there])
                clocks[rank] = start + seconds[kind][virtual]
                ends["input" if kind == "backward" else kind, micro, virtual] = clocks[rank]
                events.append(Event(rank, *action, start, clocks[rank]))
    for rank, queue in enumerate(waiting):
        if queue:
            raise ValueError(f"rank {rank} waits for ever before {queue[0]}")
    return events


def _needs(action: Action, virtual: int, count: int) -> set[Need]:
    kind, micro, _ = action
    if kind == "forward":
        return {("forward", micro, virtual - 1)} if virtual else set()
    if kind == "weight":
        return {("input", micro, virtual)}
    return {("forward", micro, virtual)} | ({("input", micro, virtual + 1)} if virtual + 1 < count else set())


def bubbles(events: Sequence[Event]) -> list[float]:
    """Seconds in which each rank waits between its first action and its last."""
    own = [[event for event in events if event.rank == rank] for rank in sorted({event.rank for event in events})]
    return [max(e.end for e in one) - min(e.start for e in one) - sum(e.end - e.start for e in one) for one in own]


def in_flight(actions: Sequence[Action], sizes: Sequence[int], left: Sequence[int] | None = None) -> list[int]:
    """What a rank keeps after each action, of which a micro-batch has `sizes` in each chunk, from its input gradients
    to its weight gradients `left`, by default as much.
    """
    changes = []
    for kind, _, chunk in actions:
        size, later = sizes[chunk], (left or sizes)[chunk]
        changes.append({"forward": size, "input": later - size, "weight": -later, "backward": -size}[kind])
    return list(accumulate(changes))


def divide(costs: Sequence[float], stages: int, last: float = 0.0) -> list[range]:
    """Contiguous blocks of each virtual stage, at least one, with the smallest dearest share; the others near the mean.

    Args:
        costs: of each block, at least `stages` of them.
        last: what the last stage has beside its blocks.
    """
    count, sums = len(costs), [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + (last if stage == stages - 1 else 0)

    def furthest(most: float) -> list[int]:
        """Blocks that the first 0, 1, 2, … stages can have together, none dearer than `most`; up to the one that is."""
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
