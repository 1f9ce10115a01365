"""Whole matrices for optimizers that need them, although tensor parallelism and ZeRO split them.

Every parameter has an owner, which gets its boxes from the ranks that hold them, updates the matrices fused in it, and
sends them back: two exchanges per step. Parameters of one shape go to the ranks in turn.
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

# Up to this total of elements, data-parallel ranks do not divide the work: with 2 ranks over gloo dividing it takes
# twice as long at 4e4 elements, 1.1 times at 2e5, and 0.7 times at 8e5.
SMALL = 2**18


class Matrices:
    """Whole matrices of the parameters in groups from number `first` on, and their optimizer states.

    They come last in a rank's slice of each bucket; at stage 0 all data-parallel ranks hold the same.
    """

    states: dict[tuple[int, str], Tensor]  # by parameter number and name: one vector for all its matrices

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
            (number, slot)
            for number, bucket in enumerate(buckets)
            for slot in bucket.layout.slots
            if slot.group >= first
        ]
        self.names = [slot.name for _, slot in slots]
        # By parameter number: its bucket, and its start in the bucket's vector (even if it begins on another rank).
        self.places = [(number, slot.start - starts[number]) for number, slot in slots]
        parameters = {parameter.name: parameter for parameter in model_shape(model).parameters}
        self.shapes = [parameters[slot.name].shape for _, slot in slots]
        if replicated and mesh.tp_group is None and sum(map(math.prod, self.shapes)) <= SMALL:
            mesh = Mesh()  # every rank computes all
        self.mesh, ranks = mesh, range(mesh.size)
        self.rows = [[part.rows for part in parameters[slot.name].parts] for _, slot in slots]
        held: list[tuple[int, Box]] = []  # by number of the parameter
        for index, (number, slot) in enumerate(slots):
            begin, end = (min(max(edge, slot.start), slot.stop) - slot.start for edge in owned[number])
            held += [(index, box) for box in boxes(placements[slot.name], begin, end)]
        all_held = mesh.gather(held) if mesh.size > 1 and slots else [held for _ in ranks]
        turns = sorted(range(len(slots)), key=lambda index: self.shapes[index])
        owner = {index: turn % mesh.size for turn, index in enumerate(turns)}
        self.mine = [index for index in turns if owner[index] == mesh.rank]

        def is_sender(holder: int, index: int, box: Box) -> bool:
            """Return whether, of the ranks with this box of parameter `index`, `holder` is to send it to the owner."""
            (data, part), (held_data, held_part) = mesh.coordinates(owner[index]), mesh.coordinates(holder)
            return (not replicated or held_data == data) and (not box.shared or held_part == part)

        # By the other rank: boxes that this rank holds and gets back or sends, then boxes of parameters that it owns
        # and returns or gets.
        self.held_in = [[entry for entry in held if owner[entry[0]] == rank] for rank in ranks]
        self.held_out = [[entry for entry in entries if is_sender(mesh.rank, *entry)] for entries in self.held_in]
        self.owned_out = [[entry for entry in all_held[rank] if owner[entry[0]] == mesh.rank] for rank in ranks]
        self.owned_in = [
            [entry for entry in entries if is_sender(rank, *entry)] for rank, entries in enumerate(self.owned_out)
        ]

    def keep(self, states: Sequence[State], device: torch.device) -> None:
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
        result = []
        for (index, name), values in self.states.items():
            whole = Placement(tuple(values.shape), (Piece((0,), tuple(values.shape)),))
            result.append(Held(self.names[index], name, whole, 0, len(values), values))
        return result

    def transform(
        self, vectors: Sequence[Tensor], work: Callable[..., None], options: OptimizerConfig, skipped: Tensor
    ) -> None:
        """Apply `work` to all matrices in place.

        Args:
            vectors: per bucket, this rank's elements of the matrices.
            work: called with the matrices of each shape, (k, rows, columns), a list of states, `options` and `skipped`.
            skipped: () 1 if the step is skipped, else 0.
        """

        def vector(index: int, start: int, size: Sequence[int]) -> Tensor:
            number, first = self.places[index]
            return vectors[number][first + start : first + start + math.prod(size)].view(tuple(size))

        def held(by_rank: list[list[tuple[int, Box]]]) -> list[list[Tensor]]:
            return [[vector(index, box.start, box.size) for index, box in entries] for entries in by_rank]

        def owned(by_rank: list[list[tuple[int, Box]]]) -> list[list[Tensor]]:
            return [[whole[index][box.slices] for index, box in entries] for entries in by_rank]

        alone = self.mesh.size == 1
        whole = {i: vector(i, 0, self.shapes[i]) if alone else vectors[0].new_empty(self.shapes[i]) for i in self.mine}
        if not alone:
            self._exchange(held(self.held_out), owned(self.owned_in), vectors[0])
        matrices = list[list[Tensor]]()  # each matrix with its states
        for index in self.mine:
            states = [self.states[index, state.name].split(self._sizes(index, state)) for state in self.declared]
            matrices += [
                list(entry) for entry in zip(whole[index].split(self.rows[index], dim=-2), *states, strict=True)
            ]
        matrices.sort(key=lambda entry: entry[0].shape)
        for _, group in groupby(matrices, key=lambda entry: entry[0].shape):
            alike = [list(parts) for parts in zip(*group, strict=True)]
            stacks = [torch.stack(parts) for parts in alike]
            work(stacks[0], stacks[1:], options, skipped)
            for parts, stack in zip(alike, stacks, strict=True):
                torch._foreach_copy_(parts, list(stack.unbind()))
            del stacks, stack  # before the next ones
        if not alone:
            self._exchange(owned(self.owned_out), held(self.held_in), vectors[0])

    def _exchange(self, sent: list[list[Tensor]], received: list[list[Tensor]], like: Tensor) -> None:
        targets = [*chain(*received)]
        out = torch.cat([like.new_empty(0), *(part.flatten() for part in chain(*sent))])
        sizes, sent_sizes = ([sum(map(Tensor.numel, tensors)) for tensors in parts] for parts in (received, sent))
        into = like.new_empty(sum(sizes))
        dist.all_to_all_single(into, out, sizes, sent_sizes, group=self.mesh.world)
        parts = into.split([target.numel() for target in targets])
        if targets:
            torch._foreach_copy_(targets, [part.view(x.shape) for part, x in zip(parts, targets, strict=True)])
