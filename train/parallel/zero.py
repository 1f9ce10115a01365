"""One rank's parameters, gradients and optimizer state, and how much of each it holds: ZeRO stages 0 to 3.

Data-parallel rank d owns slice d of every flat bucket (stage 0: all of it). Of the other slices it holds weights and
gradients at stage 1, weights at 2, nothing at 3. In low precision the owner has fp32 master weights.

At stage 3 a bucket is a block, gathered while the block before it computes, and freed after use. Rajbhandari et al.
2020 (arXiv 1910.02054); Zhao et al. 2023 (arXiv 2304.11277).
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
from ..model.parametrization import ParameterGroup, parameter_groups
from ..optimizer.optimizer import Optimizer, Step
from ..optimizer.registry import OPTIMIZERS
from .buckets import BucketLayout, Range, Slot, bucket_layouts, bucket_limit, clip, counted, pack_bucket, partial
from .data import GradientBucket, Gradients, Shared
from .layout import Held, Placement
from .mesh import Mesh, all_gather
from .whole import Matrices

ROW = 4096  # elements whose squares are summed at once (docs/decisions.md, gradient norms)


@dataclass(frozen=True)
class StepResult:
    """Result of a step, which the device may still be computing."""

    loss: Tensor  # () the batch's mean, over all ranks
    norm: Tensor  # () of the gradient, without loss scale, before clipping
    skipped: Tensor  # () 1.0 if loss or norm was not finite, so that nothing was updated; else 0.0


@dataclass(frozen=True)
class Span:
    """Adjacent elements in a rank's slice of a bucket that one optimizer updates; it may be empty."""

    optimizer: Optimizer
    start: int  # in the slice
    stop: int
    segments: list[tuple[int, Range]]  # (group, range in the slice), of one learning rate, weight decay and epsilon
    states: dict[str, Tensor]  # those kept element by element, (stop - start,) each


class Bucket:
    """This rank's weights of a bucket, and the master weights, optimizer state and averages of its slice.

    The parameters of `old`, which may be on `meta`, are replaced by views of `full`; their values are undefined.
    """

    gradient: GradientBucket

    def __init__(
        self, shared: Shared, old: Mapping[str, nn.Parameter], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shared, self.layout, self.group, self.stage = shared, shared.layout, shared.group, shared.stage
        self.owned, (start, stop) = shared.owned, shared.owned
        self.full = torch.zeros(self.layout.size, dtype=dtype, device=device)
        self.parameters = {  # `data` removes the version counter: autograd must not see a gather as a change
            slot.name: nn.Parameter(self.full[slot.start : slot.stop].view(old[slot.name].shape).data)
            for slot in self.layout.slots
        }
        self.work: Work | None = None  # a gather under way
        self.whole = self.stage < 3  # gathered, or about to be
        if self.stage == 3:
            self.full.untyped_storage().resize_(0)  # before the next bucket is allocated: the model may not fit
        self.own = self.full[start:stop] if self.whole else torch.zeros(stop - start, dtype=dtype, device=device)

    def hold(self, groups: Sequence[ParameterGroup], averages: int) -> None:
        wide = torch.promote_types(self.own.dtype, torch.float32)
        self.master = self.own if self.own.dtype == wide else torch.zeros_like(self.own, dtype=wide)
        self.averages = [torch.zeros_like(self.master) for _ in range(averages)]
        self.spans = list[Span]()
        at, segments = 0, [(group, clip([segment], self.owned)) for group, segment in self.layout.segments]
        for kind in dict.fromkeys(group.optimizer for group in groups):  # in the order of the groups
            places = [
                (group, place) for group, ranges in segments if groups[group].optimizer == kind for place in ranges
            ]
            stop = places[-1][1][1] if places else at
            states = {
                state.name: self.master.new_zeros(stop - at, dtype=None if state.dtype == "fp32" else torch.bfloat16)
                for state in OPTIMIZERS[kind].elementwise
            }
            self.spans.append(Span(OPTIMIZERS[kind], at, stop, places, states))
            at = stop

    def span_of(self, slot: Slot, groups: Sequence[ParameterGroup]) -> Span:
        return next(span for span in self.spans if span.optimizer is OPTIMIZERS[groups[slot.group].optimizer])

    def changed(self) -> None:
        """Gather the bucket's slices, changed by their owners: now, or at stage 3 on the next use."""
        self.wait()
        if self.stage == 3:
            self.release()
        elif self.stage > 0:
            self._gather()

    def fetch(self) -> None:
        if not self.whole:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self.whole = True
            self._gather()

    def wait(self) -> None:
        """Wait until a gather is complete; on a GPU only the current stream waits."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()

    def release(self) -> None:
        if self.stage == 3 and self.whole:
            self.wait()
            self.full.untyped_storage().resize_(0)
            self.whole = False

    def refresh(self) -> None:
        if self.master is not self.own:
            self.own.copy_(self.master)
        self.changed()

    def overlap(self, slot: Slot) -> tuple[Range, int, int]:
        """Return the range of a flattened parameter that this rank owns, and its start and stop in the rank's slice."""
        first, last = self.owned
        start, stop = max(slot.start, first), max(min(slot.stop, last), max(slot.start, first))
        return (start - slot.start, stop - slot.start), start - first, stop - first

    def _gather(self) -> None:
        self.work = all_gather(self.full, self.own, group=self.group, async_op=True)


def schedule_gathers(gpt: GPT, buckets: Sequence[Bucket]) -> None:
    """Register hooks that wait for each module's weights, and at stage 3 fetch the next block's and free used ones."""
    bucket_of = {
        id(parameter): number for number, bucket in enumerate(buckets) for parameter in bucket.parameters.values()
    }
    used = {
        module: [buckets[number] for number in sorted({bucket_of[id(parameter)] for parameter in module.parameters()})]
        for module in (gpt.embedding, *gpt.blocks, gpt.norm, gpt.head)
    }
    if max(bucket.stage for bucket in buckets) < 3:
        for module, module_buckets in used.items():
            module.register_forward_pre_hook(_take(module_buckets))
        return
    table, final = used[gpt.embedding], used[gpt.norm]
    blocks = [used[block] for block in gpt.blocks]
    ahead = [*blocks, final]
    gpt.embedding.register_forward_pre_hook(_take(table, ahead[0]))
    for i, block in enumerate(gpt.blocks):
        block.register_forward_pre_hook(_take(blocks[i], ahead[i + 1]))
        before_backward = _take(blocks[i], blocks[i - 1] if i > 0 else ())
        _release_after(block, blocks[i], keep=i == len(blocks) - 1, before_backward=before_backward)
    gpt.norm.register_forward_pre_hook(_take(final))
    _release_after(gpt.head, final, keep=True)
    if table != final:
        _release_after(gpt.embedding, table, keep=False)


def _take(buckets: Sequence[Bucket], ahead: Sequence[Bucket] = ()) -> Callable[..., None]:
    def take(*_: Any) -> None:
        for bucket in buckets:
            bucket.fetch()
        for bucket in buckets:
            bucket.wait()
        for bucket in ahead:
            bucket.fetch()

    return take


def _release_after(
    module: nn.Module,
    buckets: Sequence[Bucket],
    *,
    keep: bool,
    before_backward: Callable[..., None] | None = None,
) -> None:
    """Register a hook that releases buckets after a forward pass; with `keep` only if no backward pass follows.

    `before_backward` is called before the module's backward pass.
    """

    def hook(module: nn.Module, arguments: Any, result: Tensor | tuple[Tensor, ...]) -> None:
        out = result[0] if isinstance(result, tuple) else result  # without the penalty of a mixture of experts
        if out.requires_grad and before_backward is not None:
            out.register_hook(before_backward)
        if not (keep and out.requires_grad):
            for bucket in buckets:
                bucket.release()

    module.register_forward_hook(hook)


class Zero:
    """Owner of a model's parameters, gradients and optimizer state, in buckets in backward order.

    The model's parameters (they may be on `meta`) become views of flat buffers on `device`, in `dtype`. Master weights
    are at least fp32; `averages` is the number of their averaged copies.
    """

    updates: Tensor  # () updates made: Adam's step count, to be saved and restored

    def __init__(
        self,
        gpt: GPT,
        optimizer: OptimizerConfig,
        placements: Mapping[str, Placement],
        mesh: Mesh,
        *,
        stage: int,
        dtype: torch.dtype,
        device: torch.device,
        averages: int = 0,
    ) -> None:
        self.mesh, self.placements, self.options = mesh, placements, optimizer
        self.dtype, self.wide, self.device = dtype, torch.promote_types(dtype, torch.float32), device
        self.groups = groups = parameter_groups(gpt, optimizer)
        # The update reads fp32 on GPUs. On CPUs it reads float64, which holds a Python float exactly.
        wide_rate = torch.float32 if on_gpu(device) else torch.float64
        self.peaks = torch.tensor([group.learning_rate for group in groups], dtype=wide_rate, device=device)
        self.rates = torch.zeros_like(self.peaks)
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        self.buckets = _replace_parameters(gpt, groups, mesh, stage, dtype, device)
        all_shared = [bucket.shared for bucket in self.buckets]
        parameters = {name: parameter for bucket in self.buckets for name, parameter in bucket.parameters.items()}
        self.names = set(parameters)
        buckets = self.buckets
        self.gradients = Gradients(all_shared, parameters, complete=lambda number: buckets[number].release())
        for bucket, gradient in zip(self.buckets, self.gradients.buckets, strict=True):
            bucket.gradient = gradient
            bucket.hold(groups, averages)
        first = sum(OPTIMIZERS[group.optimizer].whole is None for group in groups)  # those of whole matrices come last
        self.matrices = Matrices(gpt.config, all_shared, first, placements, mesh.stage)
        self.matrices.keep(OPTIMIZERS[optimizer.kind].of_matrices, device)
        # Terms of sums over tensor-parallel ranks; below, elements that count in the norm (not those of `sign`).
        self._partial = [
            bucket.gradient.shard[start:stop]
            for bucket in self.buckets
            for start, stop in clip(partial(bucket.layout, placements), bucket.owned)
        ]
        signs = [number for number, group in enumerate(groups) if group.optimizer == "sign"]
        self._measured = list[Tensor]()
        for bucket in self.buckets:
            # Every rank measures only its slice, although at stage 0 it owns the other slices as well.
            first, last = bucket.shared.slice
            ranges = clip(counted(bucket.layout, placements, mesh.tp_rank, signs), (first, last))
            shard = bucket.gradient.shard[first - bucket.owned[0] :]
            self._measured += [shard[start:stop] for start, stop in ranges]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set the weights from pairs (name, whole fp32 CPU tensor) of all parameters."""
        slots = {slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots}
        self.forget()
        for name, whole in weights:
            if name not in slots:
                raise ValueError(f"{name} is not one of the parameters that are still to be loaded: {', '.join(slots)}")
            bucket, slot = slots.pop(name)
            part = self.placements[name].take(whole).flatten()
            if bucket.stage < 3:
                bucket.full[slot.start : slot.stop].copy_(part)
            (first, last), start, stop = bucket.overlap(slot)
            bucket.master[start:stop].copy_(part[first:last])
        if slots:
            raise ValueError(f"no weights were given for {', '.join(slots)}")
        for bucket in self.buckets:
            bucket.own.copy_(bucket.master)

    def forget(self) -> None:
        """Wait for gathers, so that buckets may be written to; at stage 3 free gathered weights."""
        for bucket in self.buckets:
            bucket.wait()
            bucket.release()

    def reset_gradients(self) -> None:
        self.gradients.reset()
        self.forget()

    @torch.no_grad()
    def set_rates(self, factor: float) -> None:
        torch.mul(self.peaks, factor, out=self.rates)

    @torch.no_grad()
    def step(self, loss: Tensor, scale: Tensor | None = None) -> StepResult:
        """Update the weights from the accumulated gradients, at the learning rates last set, and clear the gradients.

        Args:
            loss: () this rank's part of the batch's mean loss.
            scale: () the loss scale.
        """
        self.gradients.wait()
        self._sum_partial()
        total, norm = self._measure(loss)
        if scale is not None:
            norm = norm / scale
        skipped = 1 - (torch.isfinite(norm) & torch.isfinite(total)).float()
        divisor = self._divisor(norm, scale)
        directions, count = self._directions(divisor, skipped), self.updates + 1
        for number, bucket in reversed(list(enumerate(self.buckets))):  # in the order of the next forward pass
            for span in bucket.spans:
                for group, (start, stop) in span.segments:
                    part = slice(start - span.start, stop - span.start)
                    if span.optimizer.whole is None:
                        gradient = bucket.gradient.shard[start:stop].to(self.wide)  # one fp32 copy at a time
                    else:
                        gradient = directions[number][part]
                    rules = self.groups[group]
                    step = Step(self.rates[group], rules.weight_decay, rules.eps, count, divisor, skipped)
                    states = [state[part] for state in span.states.values()]
                    span.optimizer.update(bucket.master[start:stop], gradient, states, step, self.options)
            bucket.refresh()
        self.updates += 1 - skipped
        self.gradients.clear()
        return StepResult(total, norm, skipped)

    @torch.no_grad()
    def keep_averages(self, shares: Sequence[float]) -> None:
        """Set each average i to (1 - shares[i]) of itself plus shares[i] of the weights."""
        for bucket in self.buckets:
            for average, share in zip(bucket.averages, shares, strict=True):
                average.lerp_(bucket.master, share)

    @contextmanager
    def with_average(self, copy: int) -> Iterator[None]:
        """Use average number `copy` as weights in this `with` block, then restore the weights bit for bit."""
        self._exchange(copy)
        try:
            yield
        finally:
            self._exchange(copy)

    @torch.no_grad()
    def _exchange(self, copy: int) -> None:
        self.forget()
        for bucket in self.buckets:
            weights = bucket.master.clone()
            bucket.master.copy_(bucket.averages[copy])
            bucket.averages[copy].copy_(weights)
        self.publish()

    def _directions(self, divisor: Tensor | None, skipped: Tensor) -> list[Tensor]:
        """Return, per bucket, this rank's part of the updates computed from whole matrices; [] if there are none."""
        rule, directions = OPTIMIZERS[self.options.kind].whole, list[Tensor]()
        if rule is None:
            return directions
        for bucket in self.buckets:
            span = bucket.spans[-1]
            gradient = bucket.gradient.shard[span.start : span.stop].to(self.wide)
            states = [*span.states.values()]
            directions.append(rule.direction(gradient, states, self.options, divisor, skipped))
        self.matrices.transform(directions, rule.transform, self.options, skipped)
        return directions

    def _sum_partial(self) -> None:
        if self.mesh.tp_group is None or not self._partial:
            return
        terms = torch.cat([part.to(self.wide) for part in self._partial])
        dist.all_reduce(terms, group=self.mesh.tp_group)
        for part, total in zip(self._partial, terms.split([len(part) for part in self._partial]), strict=True):
            part.copy_(total)

    def _measure(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch's mean loss, from this rank's part `loss`, and the gradients' norm, with loss scale."""
        squares = [square(part, self.wide) for part in self._measured]
        if not squares:  # this rank's slices count on another rank, or are padding
            squares = [torch.zeros((), dtype=self.wide, device=self.device)]
        both = torch.stack([loss.to(self.wide) * (self.mesh.tp_rank == 0), torch.stack(squares).sum()])
        if self.mesh.world is not None:
            dist.all_reduce(both, group=self.mesh.world)
        return both[0], both[1].sqrt()

    def _divisor(self, norm: Tensor, scale: Tensor | None) -> Tensor | None:
        """Return the divisor of gradients (None: 1): the loss scale, times norm / limit if `norm` must be clipped."""
        limit = self.options.gradient_clip
        if limit == 0:
            return scale
        clipped = (limit / (norm + 1e-6)).clamp(max=1.0).reciprocal().float()
        return clipped if scale is None else clipped * scale

    def held(self) -> list[Held]:
        """Return this rank's part of the training state, as writable views; after writing to them call `publish`."""
        self.forget()
        result = []
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                (first, last), start, stop = bucket.overlap(slot)
                span = bucket.span_of(slot, self.groups)
                kinds = {"weight": bucket.master[start:stop]}
                kinds |= {name: state[start - span.start : stop - span.start] for name, state in span.states.items()}
                kinds |= {f"average_{copy}": average[start:stop] for copy, average in enumerate(bucket.averages)}
                if first < last:
                    placement = self.placements[slot.name]
                    result += [Held(slot.name, kind, placement, first, last, values) for kind, values in kinds.items()]
        return result + self.matrices.held()

    @torch.no_grad()
    def publish(self) -> None:
        for bucket in self.buckets:
            bucket.refresh()


def _replace_parameters(
    gpt: GPT, groups: Sequence[ParameterGroup], mesh: Mesh, stage: int, dtype: torch.dtype, device: torch.device
) -> list[Bucket]:
    """Replace a model's parameters by views of buckets, returned in backward order."""
    gathered = stage == 3 and mesh.data_group is not None
    layouts, old = layouts_of(gpt, groups, dtype, mesh, gathered=gathered), dict(gpt.named_parameters())
    buckets = [Bucket(shared(layout, mesh, stage), old, dtype, device) for layout in layouts]
    new = {id(old[name]): parameter for bucket in buckets for name, parameter in bucket.parameters.items()}
    for module in gpt.modules():  # a tied parameter is one in all its places
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, new[id(parameter)])
    if max(bucket.stage for bucket in buckets) > 0:
        schedule_gathers(gpt, buckets)
    return buckets


def shared(layout: BucketLayout, mesh: Mesh, stage: int) -> Shared:
    group, rank = mesh.data_group, mesh.data_rank
    if layout.experts:
        group, rank = mesh.replica_group, mesh.data_rank // mesh.ep
    if layout.ends:  # a tied table is summed once a step, and stays whole until then
        group, rank, stage = mesh.ends_group, rank + mesh.data * (mesh.pp_rank > 0), min(stage, 1)
    return Shared(layout, group, rank, 0 if group is None else stage)


def layouts_of(
    gpt: GPT, groups: Sequence[ParameterGroup], dtype: torch.dtype, mesh: Mesh, *, gathered: bool
) -> list[BucketLayout]:
    """Return the layouts of a model's buckets, none across chunks; a table tied between stages has a separate one."""
    group_of = {id(p): number for number, group in enumerate(groups) for p in group.parameters}
    numbers = {name: group_of[id(p)] for name, p in gpt.named_parameters()}
    sizes = {name: p.numel() for name, p in gpt.named_parameters()}
    shared_out = gpt.config.tied_embeddings and gpt.chunks != [range(gpt.config.depth)]
    table = "embedding.weight" if shared_out and "embedding.weight" in sizes else None
    layouts = []
    for chunk in reversed(range(len(gpt.chunks))):
        chunk_sizes = {name: size for name, size in sizes.items() if name != table and gpt.chunk_of(name) == chunk}
        chunk_layouts = bucket_layouts(
            chunk_sizes, numbers, bucket_limit(dtype.itemsize), mesh.data, gathered=gathered, ep=mesh.ep
        )
        layouts += [replace(bucket, chunk=chunk) for bucket in chunk_layouts]
    if table is not None:
        layouts.append(
            replace(pack_bucket([table], sizes, numbers, 2 * mesh.data), ends=True, chunk=gpt.chunk_of(table))
        )
    return layouts


def square(values: Tensor, wide: torch.dtype) -> Tensor:
    """Sum the squares of a vector in type `wide`, by rows: otherwise torch loses 3 digits of 5e7 elements on CPUs."""
    rows = len(values) // ROW
    tail = values[rows * ROW :].to(wide)
    rest = torch.dot(tail, tail)
    if not rows:
        return rest
    return torch.linalg.vector_norm(values[: rows * ROW].view(rows, ROW).to(wide), dim=1).square().sum() + rest
