"""Data parallelism: gradients in flat buckets, summed over the ranks while the backward pass still runs.

Buckets are reduced in the same order, that of the backward pass, on every rank. Low-precision gradients travel as they
are to the rank that owns them, which sums them in fp32. Rajbhandari et al. 2020 (arXiv 1910.02054), sections 5.1-5.2;
Li et al. 2020 (arXiv 2006.15704).
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
    """A bucket and the ranks that have it, of which each updates its slice; at stage 0 every one all of it."""

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
        self.fresh = True  # nothing is accumulated, so what lies in it is overwritten
        self.waiting: set[int] = set()  # slots whose gradient of this micro-batch is still to come
        self.full: Tensor | None = None  # every rank's elements
        self.views: list[Tensor] = []  # of `full`, one a slot
        start, stop = shared.owned
        # The elements that this rank keeps, summed over ranks.
        if self.freed:
            self.shard = parameters[0].new_zeros(stop - start, requires_grad=False)
        else:
            self.shard = self.allocate()[start:stop]

    def allocate(self) -> Tensor:
        """Makes room for the whole bucket; only padding gets a value."""
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

    Buckets come in backward order. `complete` is called with a bucket's number when all its gradients of one backward
    pass have come.
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
        self.native = group is not None and "gloo" not in str(dist.get_backend(group))  # has a reduce-scatter
        self.buckets = [GradientBucket(one, [parameters[slot.name] for slot in one.layout.slots]) for one in buckets]
        for number, bucket in enumerate(self.buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._mover(number, index))
        # Of each bucket what this rank owns, (elements,); the batch's gradient after `wait`.
        self.shards = [bucket.shard for bucket in self.buckets]
        self.dtype = self.shards[0].dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.pending: list[Iterator[None]] = []  # sums under way, oldest first
        self.clear()

    def clear(self) -> None:
        for bucket in self.buckets:
            bucket.fresh = True
        self.last, self.queue = False, list[int]()  # the buckets that are to be reduced, in this order

    @contextmanager
    def micro_batch(self, last: bool, chunk: int = 0) -> Iterator[None]:
        """The backward pass of a chunk; on leaving, its buckets are complete, and reduced or about to be."""
        mine = {number: bucket for number, bucket in enumerate(self.buckets) if bucket.layout.chunk == chunk}
        self.queue, self.last = [number for number, bucket in mine.items() if not bucket.layout.ends], last
        for bucket in mine.values():
            bucket.waiting.update(range(len(bucket.parameters)))
        yield
        for number, bucket in mine.items():
            if bucket.waiting:  # parameters that the loss did not depend on
                if bucket.full is None:
                    bucket.allocate()
                if bucket.fresh or bucket.freed:
                    for index in bucket.waiting:
                        bucket.views[index].zero_()
                bucket.waiting.clear()
                self._completed(number)
            bucket.fresh = False

    def wait(self) -> None:
        """Until every sum is made; on a GPU only the current stream waits."""
        for bucket in self.buckets:
            if bucket.layout.ends:  # not before: the last stage would wait for the first within a backward pass
                self._start(bucket)
        self._finish()

    def reset(self) -> None:
        """Throws away everything, also what is in flight, after a micro-batch that failed on all ranks."""
        self._finish()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
            if bucket.freed:
                bucket.free()
        self.clear()

    def _mover(self, number: int, index: int) -> Callable[[Tensor], None]:
        # A parameter keeps its hooks where Python's garbage collector does not look: one that held this would keep the
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
        if not in_place:  # a copy of the bucket lives as long as its sum is under way: two at most
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
        """Sums a bucket over the ranks; yields where something was sent that the next step waits for."""
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
        own = full[start:stop] if bucket.stage == 0 else bucket.shard
        if self.native and self.dtype == self.wide:
            total = torch.empty_like(own) if add else own
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
            own.add_(total)
        elif total is not own:
            own.copy_(total)
        if bucket.stage == 0:
            work = all_gather(full, own, group=group, async_op=True)
            yield
            _wait(work)


def _wait(work: Work | None) -> None:
    assert work is not None
    work.wait()
