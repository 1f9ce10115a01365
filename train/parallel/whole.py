"""Whole matrices for optimizers that need them, however tensor parallelism and ZeRO have cut them.

Every parameter has an owner, who gets its boxes from the ranks that hold them, works on the matrices that are fused in
it, and sends them back: two exchanges per step. Owners take turns over parameters of one size, so that all ranks work
about equally long. Matrices of one shape are one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import ModelConfig, OptimizerConfig
from ..model.shape import model_shape
from .buckets import Bucket, Range
from .layout import Box, Placement, boxes
from .mesh import Mesh

# Elements of all matrices up to which data-parallel ranks do not share them out: with 2 ranks over gloo sharing takes
# twice as long at 4e4 elements, 1.1 times at 2e5, and 0.7 times at 8e5.
SMALL = 2**18


class Matrices:
    """Those in the parameters of the groups from number `first` on.

    A rank holds of them the end of its slice of each bucket (`owned`), from `starts` on; `replicated`: every
    data-parallel rank the same (stage 0).
    """

    def __init__(
        self,
        model: ModelConfig,
        layouts: Sequence[Bucket],
        first: int,
        owned: Sequence[Range],
        placements: Mapping[str, Placement],
        mesh: Mesh,  # of one stage
        *,
        replicated: bool,
    ) -> None:
        self.starts = [
            min(max(layout.start_of(first), start), stop) - start
            for layout, (start, stop) in zip(layouts, owned, strict=True)
        ]
        slots = [
            (number, slot) for number, bucket in enumerate(layouts) for slot in bucket.slots if slot.group >= first
        ]
        # By number of the parameter: bucket and place in its vector where a rank's part of it begins, or would.
        self.places = [(number, slot.start - owned[number][0] - self.starts[number]) for number, slot in slots]
        parameters = {parameter.name: parameter for parameter in model_shape(model).parameters}
        self.shapes = [parameters[slot.name].shape for _, slot in slots]
        if replicated and mesh.tp == 1 and sum(map(math.prod, self.shapes)) <= SMALL:
            mesh = Mesh()  # every rank works on all
        self.mesh, ranks = mesh, range(mesh.size)
        self.rows = [[part.rows for part in parameters[slot.name].parts] for _, slot in slots]
        held: list[tuple[int, Box]] = []  # by number of the parameter
        for index, (number, slot) in enumerate(slots):
            begin, end = (min(max(edge, slot.start), slot.stop) - slot.start for edge in owned[number])
            held += [(index, box) for box in boxes(placements[slot.name], begin, end)]
        everyone = mesh.gather(held) if mesh.size > 1 and slots else [held for _ in ranks]
        turns = sorted(range(len(slots)), key=lambda index: self.shapes[index])
        owner = {index: turn % mesh.size for turn, index in enumerate(turns)}
        self.mine = [index for index in turns if owner[index] == mesh.rank]

        def asked(holder: int, index: int, box: Box) -> bool:
            """Whether the owner gets a box from this holder, for several may have it."""
            dp, tp = divmod(owner[index], mesh.tp)
            return (not replicated or holder // mesh.tp == dp) and (not box.shared or holder % mesh.tp == tp)

        # By the other rank: our boxes that come back from it and go there, those of our parameters out to it and in.
        self.back = [[each for each in held if owner[each[0]] == rank] for rank in ranks]
        self.there = [[each for each in some if asked(mesh.rank, *each)] for some in self.back]
        self.out = [[each for each in everyone[rank] if owner[each[0]] == mesh.rank] for rank in ranks]
        self.into = [[each for each in some if asked(rank, *each)] for rank, some in enumerate(self.out)]

    def transform(self, vectors: Sequence[Tensor], work: Callable[..., None], options: OptimizerConfig) -> None:
        """Works in place on all matrices, which `work` gets as (..., k, rows, columns), those of one shape at a time.

        Of each bucket a rank gives what it holds, (..., elements).
        """

        def vector(index: int, start: int, size: Sequence[int]) -> Tensor:
            number, first = self.places[index]
            return vectors[number][..., first + start : first + start + math.prod(size)].unflatten(-1, size)

        def held(some: list[list[tuple[int, Box]]]) -> list[list[Tensor]]:
            return [[vector(index, box.start, box.size) for index, box in each] for each in some]

        def owned(some: list[list[tuple[int, Box]]]) -> list[list[Tensor]]:
            return [[whole[index][box.slices] for index, box in each] for each in some]

        alone = self.mesh.size == 1
        whole = {i: vector(i, 0, self.shapes[i]) if alone else vectors[0].new_empty(self.shapes[i]) for i in self.mine}
        if not alone:
            self._exchange(held(self.there), owned(self.into), vectors[0])
        matrices = [matrix for index in self.mine for matrix in whole[index].split(self.rows[index], dim=-2)]
        matrices.sort(key=lambda matrix: matrix.shape[-2:])
        for _, group in groupby(matrices, key=lambda matrix: matrix.shape[-2:]):
            alike = list(group)
            stack = torch.stack(alike, dim=-3)
            work(stack, options)
            torch._foreach_copy_(alike, list(stack.unbind(-3)))
            del stack  # before the next one
        if not alone:
            self._exchange(owned(self.out), held(self.back), vectors[0])

    def _exchange(self, sent: list[list[Tensor]], received: list[list[Tensor]], like: Tensor) -> None:
        """Copies what is sent to each rank to where each receives it, in the same order."""
        targets = [*chain(*received)]
        out = torch.cat([like.new_empty(0), *(part.flatten() for part in chain(*sent))])
        sizes, theirs = ([sum(map(Tensor.numel, each)) for each in parts] for parts in (received, sent))
        into = like.new_empty(sum(sizes))
        dist.all_to_all_single(into, out, sizes, theirs, group=self.mesh.world)
        parts = into.split([target.numel() for target in targets])
        if targets:
            torch._foreach_copy_(targets, [part.view(x.shape) for part, x in zip(parts, targets, strict=True)])
