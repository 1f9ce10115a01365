"""The part of each parameter that a rank holds, and its place in the whole parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Consecutive rows (along dim 0) of a rank's part, and the box of the whole parameter that they fill."""

    offset: Shape  # first element of the box in the whole parameter
    size: Shape  # of the box; size[0] rows of the rank's part
    shared: bool = False  # every tensor-parallel rank holds this box; else only this rank does
    partial: bool = False  # shared, and the gradient is the sum over the ranks


@dataclass(frozen=True)
class Placement:
    shape: Shape  # of the whole parameter
    pieces: tuple[Piece, ...]

    @property
    def local_shape(self) -> Shape:
        return (sum(piece.size[0] for piece in self.pieces), *self.pieces[0].size[1:])

    def take(self, whole: Tensor) -> Tensor:
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"a tensor of shape {tuple(whole.shape)} was given for a parameter of shape {self.shape}")
        parts = [
            whole[tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.size, strict=True))]
            for piece in self.pieces
        ]
        return torch.cat(parts)


def whole_placement(shape: Shape, partial: bool = False) -> Placement:
    return Placement(tuple(shape), (Piece((0,) * len(shape), tuple(shape), shared=True, partial=partial),))


def split_placement(shape: Shape, dim: int, rank: int, ranks: int) -> Placement:
    share = shape[dim] // ranks
    offset = tuple(rank * share if d == dim else 0 for d in range(len(shape)))
    size = tuple(share if d == dim else n for d, n in enumerate(shape))
    return Placement(tuple(shape), (Piece(offset, size),))


@dataclass(frozen=True)
class Box:
    """A rectangle of the whole parameter, stored as consecutive elements of the rank's flattened part."""

    start: int  # of those elements
    offset: Shape
    size: Shape
    shared: bool  # the same as in its `Piece`

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.size, strict=True))


def boxes(placement: Placement, start: int, stop: int) -> Iterator[Box]:
    """Yield the rectangles of the whole parameter that elements start … stop of a rank's flattened part make up.

    A matrix has at most 3 per `Piece`.
    """
    row = math.prod(placement.local_shape[1:])
    first = 0
    for piece in placement.pieces:
        last = first + piece.size[0] * row
        begin, end = max(start, first), min(stop, last)
        while begin < end:  # parameters have one or two dims
            index, column = divmod(begin - first, row)
            if column == 0 and end - begin >= row:
                size = ((end - begin) // row, *piece.size[1:])
                offset = (piece.offset[0] + index, *piece.offset[1:])
            else:  # part of one row
                size = (1, min(row - column, end - begin))
                offset = (piece.offset[0] + index, piece.offset[1] + column)
            yield Box(begin, offset, size, piece.shared)
            begin += math.prod(size)
        first = last


@dataclass(frozen=True)
class Held:
    """The part of one tensor of the training state that this rank holds and saves."""

    name: str  # of the parameter, as the whole model names it
    kind: str  # weight | a state of the optimizer | average_<copy>
    placement: Placement
    start: int  # elements start … stop of the rank's flattened part of the parameter
    stop: int
    values: Tensor  # (stop - start,) fp32; a view, so writing to it changes the state
