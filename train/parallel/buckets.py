"""Flat buckets: which elements of which parameters lie side by side, and which of them a rank owns. Pure.

A bucket is cut into one equal slice per data-parallel rank. Parameters of one learning rate and weight decay are
neighbours in it. Padding is zero forever: optimizers leave a zero with a zero gradient at zero.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layout import Piece, Placement  # which needs torch, and the planner reads this file

ALIGNMENT = 8  # elements: 16 bytes of bf16, which is what vectorised loads and matrix products ask for

BUCKET_MB = 25.0  # MiB of gradients that travel together; PyTorch's DistributedDataParallel has the same default

Range = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Slot:
    """Where one flattened parameter lies in its bucket."""

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
    experts: bool = False  # of experts, which other ranks have than all else
    ends: bool = False  # a tied table, which both ends of a pipeline have
    chunk: int = 0  # of a pipeline rank's blocks

    def owned(self, rank: int) -> Range:
        share = self.size // self.ranks
        return rank * share, (rank + 1) * share

    def start_of(self, group: int) -> int:
        """Where parameters of this group, and of those after it, begin."""
        return next((slot.start for slot in self.slots if slot.group >= group), self.size)

    @property
    def padding(self) -> list[Range]:
        """Elements that are no parameter's."""
        stops = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.start for slot in self.slots), self.size]
        return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    @property
    def segments(self) -> list[tuple[int, Range]]:
        """(group, range) of neighbours that share a learning rate and weight decay; together the whole bucket."""
        firsts = [slot for i, slot in enumerate(self.slots) if i == 0 or self.slots[i - 1].group != slot.group]
        stops = [*(slot.start for slot in firsts[1:]), self.size]
        return [(slot.group, (slot.start, stop)) for slot, stop in zip(firsts, stops, strict=True)]


def pack_bucket(
    names: Sequence[str], sizes: Mapping[str, int], groups: Mapping[str, int], ranks: int, experts: bool = False
) -> BucketLayout:
    """One bucket of these parameters; sizes in elements, groups as numbers."""
    slots, end = [], 0
    for name in sorted(names, key=lambda name: groups[name]):  # stable: otherwise in the order given
        slots.append(Slot(name, end, end + sizes[name], groups[name]))
        end = _round_up(end + sizes[name], ALIGNMENT)
    return BucketLayout(tuple(slots), _round_up(end, ranks * ALIGNMENT), ranks, experts)


def bucket_limit(itemsize: int) -> int:
    """Return how many elements of so many bytes travel together."""
    return max(1, int(BUCKET_MB * 2**20 / itemsize))


def fill(names: Iterable[str], sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in the order given, in runs of at most `limit` elements; a parameter beyond the limit is alone."""
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
    """All parameters, in forward order, as buckets in backward order; `gathered` as stage 3 gathers them together.

    That is the final norm with the head (and a tied table), each block, and an untied table. With ep > 1 experts have
    buckets of their own, of ranks / ep ranks.
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
    # A tied table last, as the look-up's share of its gradient is: buckets are summed in order, and would wait for it.
    return [*units.values(), norm + table] if head is None else [head + norm, *units.values(), table]


def counted(
    bucket: BucketLayout, placements: Mapping[str, Placement], tp_rank: int, left_out: Container[int] = ()
) -> list[Range]:
    """Ranges whose squares a tensor-parallel rank adds to the gradient norm: its own pieces, and on the first shared
    ones, but for groups that are left out.
    """
    return _merge(
        (r, (tp_rank == 0 or not piece.shared) and group not in left_out)
        for r, group, piece in _pieces(bucket, placements)
    )


def partial(bucket: BucketLayout, placements: Mapping[str, Placement]) -> list[Range]:
    """Ranges whose gradient on a tensor-parallel rank is one term of a sum; the same on all of them."""
    return _merge((r, piece.partial) for r, _, piece in _pieces(bucket, placements))


def _pieces(bucket: BucketLayout, placements: Mapping[str, Placement]) -> Iterator[tuple[Range, int, Piece]]:
    """Pieces with their groups in ascending order; together the whole bucket, for padding is given to the piece before
    it.
    """
    ends = [*(slot.start for slot in bucket.slots[1:]), bucket.size]
    for slot, end in zip(bucket.slots, ends, strict=True):
        start, pieces = slot.start, placements[slot.name].pieces
        for piece in pieces[:-1]:
            stop = start + math.prod(piece.size)
            yield (start, stop), slot.group, piece
            start = stop
        yield (start, end), slot.group, pieces[-1]


def _merge(ranges: Iterable[tuple[Range, bool]]) -> list[Range]:
    """Those of adjoining ranges that are wanted, with neighbours joined."""
    merged: list[Range] = []
    for (start, stop), wanted in ranges:
        if wanted and merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif wanted:
            merged.append((start, stop))
    return merged


def clip(ranges: Iterable[Range], owned: Range) -> list[Range]:
    """The parts of ranges that lie in a slice, counted from the slice's start."""
    first, last = owned
    return [
        (max(start, first) - first, min(stop, last) - first)
        for start, stop in ranges
        if max(start, first) < min(stop, last)
    ]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
