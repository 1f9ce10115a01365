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
from ..optimizer.optimizer import State
from .data import Shared
from .layout import Box, Held, Piece, Placement, boxes
from .mesh import Mesh

# Elements of all matrices up to which data-parallel ranks do not share them out: with 2 ranks over gloo sharing takes
# twice as long at 4e4 elements, 1.1 times at 2e5, and 0.7 times at 8e5.
SMALL = 2**18


class Matrices:
    """Those in the parameters of the groups from number `first` on, and the states that are kept of whole matrices.

    A rank holds of them the end of its slice of each bucket; at stage 0 every data-parallel rank the same.
    """

    states: dict[tuple[int, str], Tensor]  # by number of a parameter and name, those of all its matrices in one vector

    def __init__(
        self,
        model: ModelConfig,
        buckets: Sequence[Shared],
        first: int,
        placements: Mapping[str, Placement],
        mesh: Mesh,  # of one stage
    ) -> None:
        owned, replicated = [bucket.owned for bucket in buckets], buckets[0].stage == 0
        starts = [
            min(max(bucket.layout.start_of(first), start), stop)
            for bucket, (start, stop) in zip(buckets, owned, strict=True)
        ]
        slots = [
            (number, slot) for number, one in enumerate(buckets) for slot in one.layout.slots if slot.group >= first
        ]
        self.names = [slot.name for _, slot in slots]
        # By number of the parameter: bucket and place in its vector where a rank's part of it begins, or would.
        self.places = [(number, slot.start - starts[number]) for number, slot in slots]
        parameters = {parameter.name: parameter for parameter in model_shape(model).parameters}
        self.shapes = [parameters[slot.name].shape for _, slot in slots]
        if replicated and mesh.tp_group is None and sum(map(math.prod, self.shapes)) <= SMALL:
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
            (data, part), (held_data, held_part) = mesh.coordinates(owner[index]), mesh.coordinates(holder)
            return (not replicated or held_data == data) and (not box.shared or held_part == part)

        # By the other rank: our boxes that come back from it and go there, those of our parameters out to it and in.
        self.back = [[each for each in held if owner[each[0]] == rank] for rank in ranks]
        self.there = [[each for each in some if asked(mesh.rank, *each)] for some in self.back]
        self.out = [[each for each in everyone[rank] if owner[each[0]] == mesh.rank] for rank in ranks]
        self.into = [[each for each in some if asked(rank, *each)] for rank, some in enumerate(self.out)]

    def keep(self, states: Sequence[State], device: torch.device) -> None:
        """Make the states of this rank's matrices, which are zero."""
        self.declared, self.states = states, {}
        for index in self.mine:
            for state in states:
                size = sum(self._sizes(index, state))
                dtype = torch.float32 if state.dtype == "fp32" else torch.bfloat16
                self.states[index, state.name] = torch.zeros(size, dtype=dtype, device=device)

    def _sizes(self, index: int, state: State) -> list[int]:
        assert state.size is not None
        return [state.size(rows, self.shapes[index][1]) for rows in self.rows[index]]

    def held(self) -> list[Held]:
        """Return this rank's states of whole matrices."""
        found = []
        for (index, name), values in self.states.items():
            whole = Placement(tuple(values.shape), (Piece((0,), tuple(values.shape)),))
            found.append(Held(self.names[index], name, whole, 0, len(values), values))
        return found

    def transform(
        self, vectors: Sequence[Tensor], work: Callable[..., None], options: OptimizerConfig, skipped: Tensor
    ) -> None:
        """Work in place on all matrices, which `work` gets as (k, rows, columns) with their states, those of one shape
        at a time. Of each bucket a rank gives what it holds, (elements).
        """

        def vector(index: int, start: int, size: Sequence[int]) -> Tensor:
            number, first = self.places[index]
            return vectors[number][first + start : first + start + math.prod(size)].view(tuple(size))

        def held(some: list[list[tuple[int, Box]]]) -> list[list[Tensor]]:
            return [[vector(index, box.start, box.size) for index, box in each] for each in some]

        def owned(some: list[list[tuple[int, Box]]]) -> list[list[Tensor]]:
            return [[whole[index][box.slices] for index, box in each] for each in some]

        alone = self.mesh.size == 1
        whole = {i: vector(i, 0, self.shapes[i]) if alone else vectors[0].new_empty(self.shapes[i]) for i in self.mine}
        if not alone:
            self._exchange(held(self.there), owned(self.into), vectors[0])
        matrices = list[list[Tensor]]()  # each with its states
        for index in self.mine:
            states = [self.states[index, state.name].split(self._sizes(index, state)) for state in self.declared]
            matrices += [list(one) for one in zip(whole[index].split(self.rows[index], dim=-2), *states, strict=True)]
        matrices.sort(key=lambda one: one[0].shape)
        for _, group in groupby(matrices, key=lambda one: one[0].shape):
            alike = [list(several) for several in zip(*group, strict=True)]
            stacks = [torch.stack(several) for several in alike]
            work(stacks[0], stacks[1:], options, skipped)
            for several, stack in zip(alike, stacks, strict=True):
                torch._foreach_copy_(several, list(stack.unbind()))
            del stacks, stack  # before the next ones
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
