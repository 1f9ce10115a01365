"""Pipeline schedules as data: the actions of each rank in one step, and the blocks of each stage. No torch.

Chunk c of rank r is virtual stage c * stages + r. A micro-batch goes forward through the virtual stages from 0 on, and
its gradients go back.

gpipe         all forward, then all backward (Huang et al. 2019, arXiv 1811.06965)
1f1b          the fewest micro-batches in flight that keep every rank busy (Narayanan et al. 2021, arXiv 2104.04473,
              section 2.2.1)
interleaved   the same with several chunks per rank, for micro-batches in groups of `stages` (section 2.2.2 there)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

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


def schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """Return, for each of `stages` ranks, its actions in one step.

    Raises:
        ValueError: no such schedule, or it does not allow so many chunks or micro-batches.
    """
    if name not in SCHEDULES:
        raise ValueError(f"the schedule is {name!r}; it must be one of {', '.join(SCHEDULES)}")
    if chunks > 1 and name != "interleaved":
        raise ValueError(f"the schedule {name} has {chunks} chunks; it must be 1")
    if chunks > 1 and micro_batches % stages:
        raise ValueError(f"interleaved, with {micro_batches} micro-batches; they must be a multiple of {stages} stages")
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


def divide(costs: Sequence[float], stages: int, last: float = 0.0) -> list[range]:
    """Divide blocks over virtual stages, in order and at least one each, so that the costliest stage costs least.

    Returns each stage's range of blocks. The other stages' costs are kept near the mean.

    Args:
        costs: of each block, at least `stages`.
        last: cost of the last stage in addition to its blocks.
    """
    count, sums = len(costs), [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + (last if stage == stages - 1 else 0)

    def furthest(bound: float) -> list[int]:
        ends = [0]
        for stage in range(stages):
            end, limit = ends[-1], count - (stages - 1 - stage)
            while end < limit and cost(stage, ends[-1], end + 1) <= bound:
                end += 1
            if end == ends[-1]:
                break
            ends.append(end)
        return ends

    low, high = 0.0, sums[-1] + last
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if furthest(middle)[stages:] == [count] else (middle, high)
    ends, end, shares = furthest(high), count, list[range]()
    for stage in reversed(range(stages)):
        even = cost(stage, 0, end) / (stage + 1)
        starts = range(stage, min(ends[stage], end - 1) + 1)
        fitting = (start for start in starts if cost(stage, start, end) <= high)
        end = min(fitting, key=lambda start: abs(cost(stage, start, end) - even))
        shares.insert(0, range(end, shares[0].start if shares else count))
    return shares
