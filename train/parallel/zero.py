"""One rank's parameters, gradients and optimizer state, and how much of each it holds: ZeRO stages 0 to 3.

Data-parallel rank d owns slice d of every flat bucket (stage 0: all of it). Of the rest weights and gradients are kept
at stage 1, weights at 2, nothing at 3. In low precision the owner keeps fp32 master weights. A step never waits for the
device.

At stages 1 and 2 updated slices are gathered in place, and a module waits for its buckets. At stage 3 a bucket is a
block, gathered while the block before it computes and freed after. Rajbhandari et al. 2020 (arXiv 1910.02054); Zhao et
al. 2023 (arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Work

from ..config import OptimizerConfig
from ..hardware import on_gpu
from ..model.gpt import GPT
from ..model.parametrization import ParameterGroup
from ..optimizer.registry import OPTIMIZERS
from .buckets import Bucket, Range, Slot, bucket_layouts, clip, counted, pack_bucket, partial
from .data import Gradients, Shared
from .layout import Held, Placement
from .mesh import Mesh, all_gather
from .whole import Matrices

ROW = 4096  # elements whose squares are summed at once


@dataclass(frozen=True)
class StepResult:
    """What came of one step, on the device: nobody has waited for it."""

    loss: Tensor  # () the batch's mean, over all ranks
    norm: Tensor  # () of the gradient, without loss scale, before clipping
    skipped: Tensor  # () 1.0 where loss or norm was no finite number, so that nothing was updated; else 0.0


class Weights:
    """Every parameter of a model in flat buckets; the model's own are replaced, and their values left undefined.

    Buckets come in backward order.
    """

    def __init__(self, gpt: GPT, buckets: Sequence[Shared], *, dtype: torch.dtype, device: torch.device) -> None:
        self.groups, self.stages = [one.group for one in buckets], [one.stage for one in buckets]
        layouts, owned = [one.layout for one in buckets], [one.owned for one in buckets]
        self.full: list[Tensor] = []
        old = dict(gpt.named_parameters())
        new: dict[int, nn.Parameter] = {}
        for layout, stage in zip(layouts, self.stages, strict=True):
            full = torch.zeros(layout.size, dtype=dtype, device=device)
            for slot in layout.slots:
                parameter = old[slot.name]
                # `data` cuts the version counter off: gathering into the buffer is no change that autograd should see.
                new[id(parameter)] = nn.Parameter(full[slot.start : slot.stop].view(parameter.shape).data)
            if stage == 3:
                full.untyped_storage().resize_(0)  # before the next one: the model may not fit
            self.full.append(full)
        for module in gpt.modules():  # a tied parameter is one in all its places
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(module, name, new[id(parameter)])
        self.parameters = {name: new[id(parameter)] for name, parameter in old.items()}
        self.own = [
            full[start:stop] if stage < 3 else torch.zeros(stop - start, dtype=dtype, device=device)
            for full, stage, (start, stop) in zip(self.full, self.stages, owned, strict=True)
        ]
        self.work: list[Work | None] = [None] * len(layouts)  # gathers under way
        self.whole = [stage < 3 for stage in self.stages]  # gathered, or about to be
        if max(self.stages) > 0:
            numbers = {slot.name: number for number, layout in enumerate(layouts) for slot in layout.slots}
            self._schedule(gpt, numbers)

    def changed(self, number: int) -> None:
        """The owners have written to a bucket: it is gathered at once, or at stage 3 when it is needed."""
        self.wait(number)
        if self.stages[number] == 3:
            self.release(number)
        elif self.stages[number] > 0:
            self._gather(number)

    def fetch(self, number: int) -> None:
        """Starts to gather a bucket, where it is not whole."""
        if not self.whole[number]:
            full = self.full[number]
            full.untyped_storage().resize_(full.numel() * full.element_size())
            self.whole[number] = True
            self._gather(number)

    def wait(self, number: int) -> None:
        """Until a bucket that was fetched or has changed is whole; on a GPU only the current stream waits."""
        work, self.work[number] = self.work[number], None
        if work is not None:
            work.wait()

    def release(self, number: int) -> None:
        """At stage 3 frees the storage of a bucket; it is fetched again when it is needed."""
        if self.stages[number] == 3 and self.whole[number]:
            self.wait(number)
            self.full[number].untyped_storage().resize_(0)
            self.whole[number] = False

    def forget(self) -> None:
        """Ends what is under way; at stage 3 nothing is whole after."""
        for number in range(len(self.full)):
            self.wait(number)
            self.release(number)

    def _gather(self, number: int) -> None:
        self.work[number] = all_gather(self.full[number], self.own[number], group=self.groups[number], async_op=True)

    def _schedule(self, gpt: GPT, numbers: Mapping[str, int]) -> None:
        """Hooks on a model that wait for weights, and at stage 3 fetch them a block ahead and release them."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        used = {
            module: sorted({numbers[names[id(parameter)]] for parameter in module.parameters()})
            for module in (gpt.embedding, *gpt.blocks, gpt.norm, gpt.head)
        }
        if max(self.stages) < 3:
            for module, several in used.items():
                module.register_forward_pre_hook(self._take(several))
            return
        table, final = used[gpt.embedding], used[gpt.norm]
        blocks = [used[block] for block in gpt.blocks]
        ahead = [*blocks, final]
        gpt.embedding.register_forward_pre_hook(self._take(table, ahead[0]))
        for i, block in enumerate(gpt.blocks):
            block.register_forward_pre_hook(self._take(blocks[i], ahead[i + 1]))
            before_backward = self._take(blocks[i], blocks[i - 1] if i > 0 else ())
            self._after(block, blocks[i], keep=i == len(blocks) - 1, before_backward=before_backward)
        gpt.norm.register_forward_pre_hook(self._take(final))
        self._after(gpt.head, final, keep=True)
        if table != final:
            self._after(gpt.embedding, table, keep=False)

    def _take(self, numbers: Sequence[int], ahead: Sequence[int] = ()) -> Callable[..., None]:
        """What to do before buckets are used: have them, and start to fetch those after them."""

        def take(*_: Any) -> None:
            for number in numbers:
                self.fetch(number)
            for number in numbers:
                self.wait(number)
            for number in ahead:
                self.fetch(number)

        return take

    def _after(
        self,
        module: nn.Module,
        numbers: Sequence[int],
        *,
        keep: bool,
        before_backward: Callable[..., None] | None = None,
    ) -> None:
        """Releases buckets after a forward pass; with `keep` not where a backward pass follows."""

        def hook(module: nn.Module, arguments: Any, out: Tensor) -> None:
            if out.requires_grad and before_backward is not None:
                out.register_hook(before_backward)
            if not (keep and out.requires_grad):
                for number in numbers:
                    self.release(number)

        module.register_forward_hook(hook)


class Zero:
    """Owner of a model's parameters, gradients and optimizer state.

    The model's parameters (they may be on `meta`) become views of flat buffers on `device`, in `dtype`; master weights
    and moments are at least fp32. `bucket_mb` MiB of gradients travel together; at stage 3 a block. `averages` more
    copies of the master weights are kept, as `keep_averages` says.
    """

    updates: Tensor  # () updates made: Adam's step count, to be saved and restored

    def __init__(
        self,
        gpt: GPT,
        groups: Sequence[ParameterGroup],
        placements: Mapping[str, Placement],
        mesh: Mesh,
        *,
        stage: int,
        dtype: torch.dtype,
        optimizer: OptimizerConfig,
        bucket_mb: float,
        device: torch.device,
        averages: int = 0,
    ) -> None:
        self.mesh, self.placements, self.optimizer = mesh, placements, optimizer
        self.dtype, self.wide, self.device = dtype, torch.promote_types(dtype, torch.float32), device
        # The update reads fp32 on GPUs. On CPUs it reads a float64, so that nothing is lost of a Python float.
        wide_rate = torch.float32 if on_gpu(device) else torch.float64
        self.peaks = torch.tensor([group.learning_rate for group in groups], dtype=wide_rate, device=device)
        self.rates = torch.zeros_like(self.peaks)
        gathered = stage == 3 and mesh.data_group is not None
        self.layouts = layouts_of(gpt, groups, bucket_mb, dtype, mesh.data, gathered=gathered, ep=mesh.ep)
        self.buckets = [shared(layout, mesh, stage) for layout in self.layouts]
        # Everybody keeps the gradient norm of its slice; at stage 0 it owns the other slices as well.
        slices, self.owned = [one.slice for one in self.buckets], [one.owned for one in self.buckets]
        self.weights = Weights(gpt, self.buckets, dtype=dtype, device=device)
        self.gradients = Gradients(self.buckets, self.weights.parameters, complete=self.weights.release)
        own = self.weights.own
        self.master = own if dtype == self.wide else [torch.zeros_like(piece, dtype=self.wide) for piece in own]
        self.exp_avg = [torch.zeros_like(master) for master in self.master]
        self.averages = [[torch.zeros_like(master) for master in self.master] for _ in range(averages)]
        self._whole = first_whole(groups)
        replicated = self.buckets[0].stage == 0
        self.matrices = Matrices(
            gpt.config, self.layouts, self._whole, self.owned, placements, mesh.stage, replicated=replicated
        )
        # What is updated as whole matrices has one moment.
        self.exp_avg_sq = [
            torch.zeros_like(master[:start]) for master, start in zip(self.master, self.matrices.starts, strict=True)
        ]
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        shards = list(zip(self.layouts, self.owned, self.gradients.shards, strict=True))
        self._rules = [{"decay": group.weight_decay, "eps": group.eps, "options": optimizer} for group in groups]
        self._updates = [OPTIMIZERS[group.optimizer].update for group in groups]
        # Neighbours in this rank's slice of each bucket that share a learning rate, weight decay and epsilon.
        self._segments = [
            [(group, place) for group, segment in layout.segments for place in clip([segment], owned)]
            for layout, owned in zip(self.layouts, self.owned, strict=True)
        ]
        self._partial = [
            shard[start:stop]
            for layout, owned, shard in shards
            for start, stop in clip(partial(layout, placements), owned)
        ]
        signs = [number for number, group in enumerate(groups) if group.optimizer == "sign"]  # no part of the loss's
        self._measured = [
            shard[first - owned[0] :][start:stop]
            for (layout, owned, shard), (first, last) in zip(shards, slices, strict=True)
            for start, stop in clip(counted(layout, placements, mesh.tp_rank, signs), (first, last))
        ]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sets the weights: every whole fp32 tensor once, on the CPU by name; this rank takes its part of each."""
        slots = {slot.name: (number, slot) for number, layout in enumerate(self.layouts) for slot in layout.slots}
        self.weights.forget()
        for name, whole in weights:
            if name not in slots:
                raise ValueError(f"{name} is not one of the parameters that are still to be loaded: {', '.join(slots)}")
            number, slot = slots.pop(name)
            part = self.placements[name].take(whole).flatten()
            if self.buckets[number].stage < 3:
                self.weights.full[number][slot.start : slot.stop].copy_(part)
            (first, last), start, stop = self._overlap(number, slot)
            self.master[number][start:stop].copy_(part[first:last])
        if slots:
            raise ValueError(f"no weights were given for {', '.join(slots)}")
        for own, master in zip(self.weights.own, self.master, strict=True):
            own.copy_(master)

    def reset_gradients(self) -> None:
        """Throws away everything accumulated and in flight, after a micro-batch that failed."""
        self.gradients.reset()
        self.weights.forget()

    @torch.no_grad()
    def set_rates(self, factor: float) -> None:
        """Every group's learning rate from here on: its peak times `factor`. Waits for nothing."""
        torch.mul(self.peaks, factor, out=self.rates)

    @torch.no_grad()
    def step(self, loss: Tensor, scale: Tensor | None = None) -> StepResult:
        """Updates the weights from the accumulated gradients at the rates of `set_rates`, and clears the gradients.

        `loss` () is this rank's share of the batch's mean loss, `scale` () the loss scale.
        """
        self.gradients.wait()
        self._sum_partial()
        total, norm = self._measure(loss)
        if scale is not None:
            norm = norm / scale
        skipped = 1 - (torch.isfinite(norm) & torch.isfinite(total)).float()
        divisor = self._divisor(norm, scale)
        count = self.updates + 1
        directions = self._directions(divisor, skipped)
        for number in reversed(range(len(self.layouts))):  # as the next forward pass wants them
            buffers = (self.master[number], self.exp_avg[number], self.exp_avg_sq[number])
            for group, (start, stop) in self._segments[number]:
                weight, *moments = (values[start:stop] for values in buffers)
                if group < self._whole:
                    gradient = self.gradients.shards[number][start:stop].to(self.wide)  # one fp32 copy at a time
                else:
                    first = self.matrices.starts[number]
                    gradient = directions[number][start - first : stop - first]
                state = {"moments": moments, "count": count, "divisor": divisor, "skipped": skipped}
                self._updates[group](weight, gradient, rate=self.rates[group], **self._rules[group], **state)
            self._refresh(number)
        self.updates += 1 - skipped
        self.gradients.clear()
        return StepResult(total, norm, skipped)

    @torch.no_grad()
    def keep_averages(self, shares: Sequence[float]) -> None:
        """Takes the weights into each average, of which they then are that share."""
        for average, share in zip(self.averages, shares, strict=True):
            for kept, master in zip(average, self.master, strict=True):
                kept.lerp_(master, share)

    @contextmanager
    def with_average(self, copy: int) -> Iterator[None]:
        """The model computes with an average in here, and with its own weights, to the bit, after."""
        self._exchange(self.averages[copy])
        try:
            yield
        finally:
            self._exchange(self.averages[copy])

    @torch.no_grad()
    def _exchange(self, average: Sequence[Tensor]) -> None:
        self.weights.forget()  # what is being gathered in place must not be written to
        for kept, master in zip(average, self.master, strict=True):
            own = master.clone()
            master.copy_(kept)
            kept.copy_(own)
        self.publish()

    def _directions(self, divisor: Tensor | None, skipped: Tensor) -> list[Tensor]:
        """Of what is updated as whole matrices, in this rank's slice of each bucket."""
        rule, directions = OPTIMIZERS[self.optimizer.kind].whole, list[Tensor]()
        if rule is not None:
            for start, shard, moment in zip(self.matrices.starts, self.gradients.shards, self.exp_avg, strict=True):
                gradient = shard[start:].to(self.wide)
                directions.append(rule.direction(gradient, moment[start:], self.optimizer, divisor, skipped))
            self.matrices.transform(directions, rule.transform, self.optimizer)
        return directions

    def _sum_partial(self) -> None:
        """Adds up gradients that tensor-parallel ranks hold terms of: pieces lie at the same places on all of them."""
        if self.mesh.tp_group is None or not self._partial:
            return
        terms = torch.cat([part.to(self.wide) for part in self._partial])
        dist.all_reduce(terms, group=self.mesh.tp_group)
        for part, total in zip(self._partial, terms.split([len(part) for part in self._partial]), strict=True):
            part.copy_(total)

    def _measure(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm of all ranks. Each adds the squares of its slice; the loss is the first
        tensor-parallel rank's.
        """
        squares = [square(part, self.wide) for part in self._measured]
        if not squares:  # what this rank owns is another's, or padding
            squares = [torch.zeros((), dtype=self.wide, device=self.device)]
        both = torch.stack([loss.to(self.wide) * (self.mesh.tp_rank == 0), torch.stack(squares).sum()])
        if self.mesh.world is not None:
            dist.all_reduce(both, group=self.mesh.world)
        return both[0], both[1].sqrt()

    def _divisor(self, norm: Tensor, scale: Tensor | None) -> Tensor | None:
        """What the update divides gradients by: the loss scale, and more where the norm is clipped."""
        limit = self.optimizer.gradient_clip
        if limit == 0:
            return scale
        clipped = (limit / (norm + 1e-6)).clamp(max=1.0).reciprocal().float()
        return clipped if scale is None else clipped * scale

    def _refresh(self, number: int) -> None:
        if self.dtype != self.wide:
            self.weights.own[number].copy_(self.master[number])
        self.weights.changed(number)

    def held(self) -> list[Held]:
        """This rank's part of the training state, as writable views; after writing to them call `publish`."""
        self.weights.forget()  # what is being gathered in place must not be written to
        kinds = {"weight": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        kinds |= {f"average_{copy}": average for copy, average in enumerate(self.averages)}
        found = []
        for number, layout in enumerate(self.layouts):
            for slot in layout.slots:
                (first, last), start, stop = self._overlap(number, slot)
                found += [
                    Held(slot.name, kind, self.placements[slot.name], first, last, tensors[number][start:stop])
                    for kind, tensors in kinds.items()
                    if first < last and (kind != "exp_avg_sq" or slot.group < self._whole)
                ]
        return found

    @torch.no_grad()
    def publish(self) -> None:
        for number in range(len(self.layouts)):
            self._refresh(number)

    def _overlap(self, number: int, slot: Slot) -> tuple[Range, int, int]:
        """What of a parameter this rank owns: elements of the flattened parameter; start and stop in its slice."""
        first, last = self.owned[number]
        start, stop = max(slot.start, first), max(min(slot.stop, last), max(slot.start, first))
        return (start - slot.start, stop - slot.start), start - first, stop - first


def shared(layout: Bucket, mesh: Mesh, stage: int) -> Shared:
    """A bucket among the ranks that have it; where that is one, it owns everything."""
    group, rank = mesh.data_group, mesh.data_rank
    if layout.experts:
        group, rank = mesh.replica_group, mesh.data_rank // mesh.ep
    if layout.ends:  # which is summed once a step, so that it stays whole until then
        group, rank, stage = mesh.ends_group, rank + mesh.data * (mesh.pp_rank > 0), min(stage, 1)
    return Shared(layout, group, rank, 0 if group is None else stage)


def first_whole(groups: Sequence[ParameterGroup]) -> int:
    """How many groups are updated element by element; those of whole matrices come after them."""
    return sum(OPTIMIZERS[group.optimizer].whole is None for group in groups)


def layouts_of(
    gpt: GPT,
    groups: Sequence[ParameterGroup],
    bucket_mb: float,
    dtype: torch.dtype,
    ranks: int,
    *,
    gathered: bool,
    ep: int = 1,
) -> list[Bucket]:
    """No bucket spans two chunks of blocks, and a tied table on both ends of a pipeline has one of its own."""
    group_of = {id(p): number for number, group in enumerate(groups) for p in group.parameters}
    numbers = {name: group_of[id(p)] for name, p in gpt.named_parameters()}
    sizes = {name: p.numel() for name, p in gpt.named_parameters()}
    limit = max(1, int(bucket_mb * 2**20 / dtype.itemsize))
    shared_out = gpt.config.tied_embeddings and gpt.chunks != [range(gpt.config.depth)]
    table = "embedding.weight" if shared_out and "embedding.weight" in sizes else None
    found = []
    for chunk in reversed(range(len(gpt.chunks))):
        own = {name: size for name, size in sizes.items() if name != table and gpt.chunk_of(name) == chunk}
        several = bucket_layouts(own, numbers, limit, ranks, gathered=gathered, ep=ep)
        found += [replace(bucket, chunk=chunk) for bucket in several]
    if table is not None:
        found.append(replace(pack_bucket([table], sizes, numbers, 2 * ranks), ends=True, chunk=gpt.chunk_of(table)))
    return found


def square(values: Tensor, wide: torch.dtype) -> Tensor:
    """Sum of squares. In rows, for torch sums a long vector on a CPU in one go, and loses 3 digits at 5e7 elements."""
    rows = len(values) // ROW
    tail = values[rows * ROW :].to(wide)
    rest = torch.dot(tail, tail)
    if not rows:
        return rest
    return torch.linalg.vector_norm(values[: rows * ROW].view(rows, ROW).to(wide), dim=1).square().sum() + rest
