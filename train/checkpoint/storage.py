"""The tensors of a checkpoint on disk, in two formats. Any mesh and ZeRO stage can read both.

    one process     model.safetensors      weights, fp32, by name
                    optimizer.safetensors  `<parameter>.<state>` of the optimizer; averages of the weights
    several ranks   shards/                all of these by the same names, a file per rank; see `shards.py`

Every element is written once.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import UserError
from ..parallel.layout import Held, Shape, boxes

WEIGHTS, MOMENTS, SHARDS = "model.safetensors", "optimizer.safetensors", "shards"
SHARDS_INDEX = f"{SHARDS}/.metadata"


@dataclass(frozen=True)
class Part:
    """A rectangular part (a box) of one tensor of the training state, and its values."""

    name: str  # of the parameter
    kind: str  # weight | a state of the optimizer | average_<copy>
    shape: Shape  # of the whole tensor
    offset: Shape  # of the box in it
    values: Tensor  # (size of the box), a view of the state or a copy

    @property
    def key(self) -> str:
        return self.name if self.kind == "weight" else f"{self.name}.{self.kind}"

    @property
    def file(self) -> str:
        """Name of this part's file in a checkpoint that one process wrote."""
        return WEIGHTS if self.kind == "weight" else MOMENTS

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.values.shape, strict=True))


def parts(held: Iterable[Held], shared: bool = True) -> list[Part]:
    """Cut a rank's tensors into rectangles; if not `shared`, omit rectangles that all tensor-parallel ranks hold."""
    result = []
    for item in held:
        for box in boxes(item.placement, item.start, item.stop):
            if shared or not box.shared:
                values = item.values[box.start - item.start : box.stop - item.start].view(box.size)
                result.append(Part(item.name, item.kind, item.placement.shape, box.offset, values))
    return result


def share_out(whole: Sequence[Part], ranks: int) -> list[list[Part]]:
    """Divide parts that `ranks` ranks all hold into a list for each rank to write, of about equal size."""
    shares: list[list[Part]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for part in sorted(whole, key=lambda part: (-part.values.numel(), part.key, part.offset)):
        lightest = load.index(min(load))
        shares[lightest].append(part)
        load[lightest] += part.values.numel()
    return shares


def by_key(all_parts: Iterable[Part]) -> dict[str, list[Part]]:
    grouped = defaultdict(list)
    for part in all_parts:
        grouped[part.key].append(part)
    return grouped


def write_whole(directory: Path, mine: Sequence[Part]) -> None:
    """Join parts to whole tensors and write them to model.safetensors and optimizer.safetensors."""
    for name in (WEIGHTS, MOMENTS):
        tensors = {key: _join(boxes) for key, boxes in by_key(part for part in mine if part.file == name).items()}
        try:
            save_file(tensors, directory / name)
        except SafetensorError as error:
            # The library gives the system's error only as text, and callers must distinguish a full disk from a bug.
            if (number := re.search(r"os error (\d+)", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(directory / name)) from error


def _join(boxes_of_one: Sequence[Part]) -> Tensor:
    first = boxes_of_one[0]
    if sum(part.values.numel() for part in boxes_of_one) != math.prod(first.shape):
        raise ValueError(
            f"only a part of {first.key}, of shape {first.shape}, is held; one process must hold all of it"
        )
    if len(boxes_of_one) == 1:
        return first.values
    tensor = torch.empty(first.shape)
    for part in boxes_of_one:
        tensor[part.slices] = part.values
    return tensor


def read_whole(checkpoint: Path, targets: Sequence[Part]) -> None:
    """Read the values of `targets` from files of `write_whole`. Raises UserError if a target is missing."""
    for name, file_parts in groupby(sorted(targets, key=lambda part: part.file), key=lambda part: part.file):
        try:
            with safe_open(checkpoint / name, framework="pt") as file:
                saved_keys = set(file.keys())
                for part in file_parts:
                    saved: Any = file.get_slice(part.key) if part.key in saved_keys else None
                    check_shape(checkpoint, part, None if saved is None else tuple(saved.get_shape()))
                    part.values.copy_(saved[part.slices])
        except SafetensorError as error:
            raise UserError(f"{checkpoint / name} cannot be read ({error}); give another checkpoint") from error


def check_shape(checkpoint: Path, part: Part, saved: Shape | None) -> None:
    """Raise UserError if `saved`, the tensor's shape in the checkpoint (None: missing), is not the model's."""
    if saved is None:
        raise UserError(f"checkpoint {checkpoint} does not fit the model: it has no {part.key}")
    if saved != part.shape:
        raise UserError(
            f"checkpoint {checkpoint} does not fit the model: the shape of {part.key} is {saved} in the checkpoint and "
            f"{part.shape} in the model"
        )
