"""Flat buckets: the order of parameters in a bucket, and the slice that each rank owns.

A bucket is cut into one equal slice per data-parallel rank. Parameters with the same learning rate and weight decay are
adjacent in it. Padding stays zero, because optimizers keep a zero without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layout import Piece, Placement  # layout.py needs torch; the planner reads this file without it

ALIGNMENT = 8  # elements: 16 bytes of bf16, which vectorised loads and matrix products require

BUCKET_MB = 25.0  # MiB of gradients that travel together; PyTorch's DistributedDataParallel has the same default

Range = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Slot:
    """The position of a flattened parameter in its bucket."""

    name: str
    start: int
    stop: int
    group: int  # of the learning rate and weight decay


@dataclass(frozen=True)
class BucketLayout:
    """Parameters that are reduced, updated and gathered together."""

    slots: tuple[Slot, ...]
    size: int  # elements, padding included; a multiple of ranks
    ranks: int
    experts: bool = False  # holds experts, which fewer ranks share
    ends: bool = False  # holds a tied table, which both ends of a pipeline have
    chunk: int = 0  # of the pipeline rank's blocks

    def owned(self, rank: int) -> Range:
        share = self.size // self.ranks
        return rank * share, (rank + 1) * share

    def start_of(self, group: int) -> int:
        return next((slot.start for slot in self.slots if slot.group >= group), self.size)

    @property
    def padding(self) -> list[Range]:
        stops = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.start for slot in self.slots), self.size]
        return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    @property
    def segments(self) -> list[tuple[int, Range]]:
        """Return (group, range) for adjacent parameters with one learning rate and decay; ranges cover the bucket."""
        firsts = [slot for i, slot in enumerate(self.slots) if i == 0 or self.slots[i - 1].group != slot.group]
        stops = [*(slot.start for slot in firsts[1:]), self.size]
        return [(slot.group, (slot.start, stop)) for slot, stop in zip(firsts, stops, strict=True)]


def pack_bucket(
    names: Sequence[str], sizes: Mapping[str, int], groups: Mapping[str, int], ranks: int, experts: bool = False
) -> BucketLayout:
    slots, end = [], 0
    for name in sorted(names, key=lambda name: groups[name]):  # stable: otherwise in the order given
        slots.append(Slot(name, end, end + sizes[name], groups[name]))
        end = _round_up(end + sizes[name], ALIGNMENT)
    return BucketLayout(tuple(slots), _round_up(end, ranks * ALIGNMENT), ranks, experts)


def bucket_limit(itemsize: int) -> int:
    return max(1, int(BUCKET_MB * 2**20 / itemsize))


def fill(names: Iterable[str], sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Split names, in order, into lists whose `sizes` sum to at most `limit`; a larger parameter is alone."""
    runs: list[list[str]] = []
    held = limit
    for name in names:
        if held + sizes[name] > limit:
            runs.append([])
            held = 0
        runs[-1].append(name)
        held += sizes[name]
    return runs


def bucket_layouts(
    sizes: Mapping[str, int], groups: Mapping[str, int], limit: int, ranks: int, *, gathered: bool, ep: int = 1
) -> list[BucketLayout]:
    """Assign parameters to buckets, returned in the order of the backward pass.

    A bucket has up to `limit` elements, or with `gathered` (ZeRO-3) is a block, an untied table, or the final norm with
    the head or tied table. With ep > 1 experts have separate buckets, each shared by ranks / ep ranks.

    Args:
        sizes: elements by parameter, in forward order.
        groups: index of the learning rate and decay, by parameter.
    """
    backward = list(sizes)[::-1]
    runs = _gathered(backward) if gathered else fill(backward, sizes, limit)
    shares = [(False, ranks)] if ep == 1 else [(True, ranks // ep), (False, ranks)]
    buckets = []
    for run in runs:
        for experts, count in shares:
            names = run if ep == 1 else [name for name in run if (".experts." in name) == experts]
            if names:
                buckets.append(pack_bucket(names, sizes, groups, count, experts))
    return buckets


def _gathered(backward: Sequence[str]) -> list[list[str]]:
    units: dict[str, list[str]] = {}
    for name in backward:
        units.setdefault(".".join(name.split(".")[:2]) if name.startswith("blocks.") else name, []).append(name)
    table, norm = units.pop("embedding.weight"), units.pop("norm.weight")
    head = units.pop("head.weight", None)
    # A tied table comes last, because its gradient is complete only after the look-up's backward pass, and buckets are
    # summed in order.
    return [*units.values(), norm + table] if head is None else [head + norm, *units.values(), table]


def counted(
    bucket: BucketLayout, placements: Mapping[str, Placement], tp_rank: int, left_out: Container[int] = ()
) -> list[Range]:
    """Return the ranges of a bucket that a tensor-parallel rank counts in the gradient norm.

    They are the pieces that only this rank holds, and on rank 0 also shared ones, except in groups in `left_out`.
    """
    return _merge(
        (r, (tp_rank == 0 or not piece.shared) and group not in left_out)
        for r, group, piece in _pieces(bucket, placements)
    )


def partial(bucket: BucketLayout, placements: Mapping[str, Placement]) -> list[Range]:
    """Return the ranges of a bucket whose gradients are still to be summed over tensor-parallel ranks."""
    return _merge((r, piece.partial) for r, _, piece in _pieces(bucket, placements))


def _pieces(bucket: BucketLayout, placements: Mapping[str, Placement]) -> Iterator[tuple[Range, int, Piece]]:
    ends = [*(slot.start for slot in bucket.slots[1:]), bucket.size]
    for slot, end in zip(bucket.slots, ends, strict=True):
        start, pieces = slot.start, placements[slot.name].pieces
        for piece in pieces[:-1]:
            stop = start + math.prod(piece.size)
            yield (start, stop), slot.group, piece
            start = stop
        yield (start, end), slot.group, pieces[-1]


def _merge(ranges: Iterable[tuple[Range, bool]]) -> list[Range]:
    merged: list[Range] = []
    for (start, stop), is_selected in ranges:
        if is_selected and merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif is_selected:
            merged.append((start, stop))
    return merged


def clip(ranges: Iterable[Range], owned: Range) -> list[Range]:
    """Return the parts of `ranges` inside the range `owned`, relative to the start of `owned`."""
    first, last = owned
    return [
        (max(start, first) - first, min(stop, last) - first)
        for start, stop in ranges
        if max(start, first) < min(stop, last)
    ]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
