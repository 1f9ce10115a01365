"""Data parallelism: gradients in flat buckets, summed over ranks during the backward pass.

All ranks reduce buckets in the order of the backward pass. Low-precision gradients travel unchanged to the rank that
owns them, which sums them in fp32. Rajbhandari et al. 2020 (arXiv 1910.02054), sections 5.1-5.2; Li et al. 2020 (arXiv
2006.15704).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from .buckets import BucketLayout, Range
from .mesh import all_gather, reduce_scatter


@dataclass(frozen=True)
class Shared:
    """A bucket and the ranks that share it. Each updates its slice, or at ZeRO stage 0 the whole bucket."""

    layout: BucketLayout
    group: ProcessGroup | None
    rank: int  # of this process in the group
    stage: int

    @property
    def slice(self) -> Range:
        return self.layout.owned(self.rank)

    @property
    def owned(self) -> Range:
        return self.slice if self.stage > 0 else (0, self.layout.size)


class GradientBucket:
    def __init__(self, shared: Shared, parameters: Sequence[nn.Parameter]) -> None:
        self.shared, self.parameters = shared, parameters
        self.layout, self.group, self.stage = shared.layout, shared.group, shared.stage
        self.freed = shared.stage >= 2  # whole buckets exist only until they are reduced, after every micro-batch
        self.fresh = True  # nothing accumulated yet: overwrite
        self.waiting: set[int] = set()  # slots whose gradient of this micro-batch is missing
        self.full: Tensor | None = None  # every rank's elements
        self.views: list[Tensor] = []  # of `full`, one a slot
        start, stop = shared.owned
        # The elements that this rank owns, summed over ranks.
        if self.freed:
            self.shard = parameters[0].new_zeros(stop - start, requires_grad=False)
        else:
            self.shard = self.allocate()[start:stop]

    def allocate(self) -> Tensor:
        self.full = full = self.parameters[0].new_empty(self.layout.size, requires_grad=False)
        for start, stop in self.layout.padding:
            full[start:stop].zero_()
        slots = zip(self.layout.slots, self.parameters, strict=True)
        self.views = [full[slot.start : slot.stop].view(parameter.shape) for slot, parameter in slots]
        return full

    def free(self) -> None:
        self.full, self.views = None, []


class Gradients:
    """Gradients of all parameters, accumulated over micro-batches and summed over the ranks that share each bucket.

    Buckets are in backward order. `complete` is called with a bucket's number when one backward pass has filled it.
    """

    def __init__(
        self,
        buckets: Sequence[Shared],
        parameters: Mapping[str, nn.Parameter],
        *,
        complete: Callable[[int], None],
    ) -> None:
        self.complete = complete
        group = next((bucket.group for bucket in buckets if bucket.group is not None), None)
        self.native = group is not None and "gloo" not in str(dist.get_backend(group))  # gloo has no reduce-scatter
        self.buckets = [
            GradientBucket(shared, [parameters[slot.name] for slot in shared.layout.slots]) for shared in buckets
        ]
        for number, bucket in enumerate(self.buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._mover(number, index))
        # This rank's elements of each bucket, (elements,); after `wait` the gradient of the batch.
        self.shards = [bucket.shard for bucket in self.buckets]
        self.dtype = self.shards[0].dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.pending: list[Iterator[None]] = []  # sums under way, oldest first
        self.clear()

    def clear(self) -> None:
        for bucket in self.buckets:
            bucket.fresh = True
        self.last, self.queue = False, list[int]()  # buckets to reduce, in this order

    @contextmanager
    def micro_batch(self, last: bool, chunk: int = 0) -> Iterator[None]:
        """Collect gradients of pipeline chunk `chunk` from the backward pass in this `with` block.

        Complete buckets start to be summed over ranks, at ZeRO stages 0 and 1 only in a step's `last` micro-batch.
        """
        chunk_buckets = {number: bucket for number, bucket in enumerate(self.buckets) if bucket.layout.chunk == chunk}
        self.queue, self.last = [number for number, bucket in chunk_buckets.items() if not bucket.layout.ends], last
        for bucket in chunk_buckets.values():
            bucket.waiting.update(range(len(bucket.parameters)))
        yield
        for number, bucket in chunk_buckets.items():
            if bucket.waiting:  # the loss does not depend on these parameters
                if bucket.full is None:
                    bucket.allocate()
                if bucket.fresh or bucket.freed:
                    for index in bucket.waiting:
                        bucket.views[index].zero_()
                bucket.waiting.clear()
                self._completed(number)
            bucket.fresh = False

    def wait(self) -> None:
        """Wait until all gradients are summed over ranks; on a GPU only the current stream waits."""
        for bucket in self.buckets:
            if bucket.layout.ends:  # not earlier: the last stage would wait for the first within a backward pass
                self._start(bucket)
        self._finish()

    def reset(self) -> None:
        """Discard all gradients after a micro-batch that failed on all ranks."""
        self._finish()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
            if bucket.freed:
                bucket.free()
        self.clear()

    def _mover(self, number: int, index: int) -> Callable[[Tensor], None]:
        # Weak, because Python's garbage collector does not see a parameter's hooks: a strong reference would keep the
        # weights of every run in a process that trains many.
        holder = weakref.ref(self)

        def move(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            gradients = holder()
            assert gradient is not None
            assert gradients is not None
            bucket = gradients.buckets[number]
            if bucket.full is None:
                bucket.allocate()
            if bucket.fresh or bucket.freed:
                bucket.views[index].copy_(gradient)
            else:
                bucket.views[index].add_(gradient)
            bucket.waiting.discard(index)
            if not bucket.waiting:
                gradients._completed(number)

        return move

    def _completed(self, number: int) -> None:
        self.complete(number)
        while self.queue and not self.buckets[self.queue[0]].waiting:
            bucket = self.buckets[self.queue.pop(0)]
            if self.last or bucket.freed:
                self._start(bucket)

    def _start(self, bucket: GradientBucket) -> None:
        if bucket.group is None:
            return
        in_place = self.dtype == self.wide and (bucket.stage == 0 or (self.native and not bucket.freed))
        if not in_place:  # a copy of the bucket lives until its sum is complete: at most two at a time
            self._advance()
        total = self._sum(bucket)
        next(total)
        self.pending.append(total)

    def _finish(self) -> None:
        while self.pending:
            self._advance()

    def _advance(self) -> None:
        self.pending = [total for total in self.pending if next(total, self) is not self]

    def _sum(self, bucket: GradientBucket) -> Iterator[None]:
        """Sum a bucket over its ranks. Yields after starting each collective, before waiting for it."""
        full, group, add = bucket.full, bucket.group, bucket.freed and not bucket.fresh
        assert full is not None
        if bucket.freed:
            bucket.free()
        if bucket.stage == 0 and self.dtype == self.wide:
            work = dist.all_reduce(full, group=group, async_op=True)
            yield
            _wait(work)
            return
        start, stop = bucket.layout.owned(dist.get_rank(group))
        shard = full[start:stop] if bucket.stage == 0 else bucket.shard
        if self.native and self.dtype == self.wide:
            total = torch.empty_like(shard) if add else shard
            work = reduce_scatter(total, full, group=group, async_op=True)
            yield
            _wait(work)
        else:
            terms = torch.empty_like(full)
            work = dist.all_to_all_single(terms, full, group=group, async_op=True)
            yield
            _wait(work)
            total = terms.view(bucket.layout.ranks, -1).sum(0, dtype=self.wide)
        if add:
            shard.add_(total)
        elif total is not shard:
            shard.copy_(total)
        if bucket.stage == 0:
            work = all_gather(full, shard, group=group, async_op=True)
            yield
            _wait(work)


def _wait(work: Work | None) -> None:
    assert work is not None
    work.wait()
