"""Buckets keep their promises; sums of gradients equal plain sums, and are sent as early as they can be."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.job.fork import run_ranks
from isoflop.train.model.gpt import GPT
from isoflop.train.model.parametrization import build_model
from isoflop.train.parallel.buckets import ALIGNMENT, BucketLayout, clip, fill, pack_bucket
from isoflop.train.parallel.data import Gradients, Shared
from torch import Tensor

MODEL = ModelConfig(width=20, depth=2, heads=2, vocab_size=20, tied_embeddings=False)


def layouts_of(gpt: GPT, limit: int, ranks: int) -> list[BucketLayout]:
    sizes = {name: p.numel() for name, p in gpt.named_parameters()}
    groups = {name: p.dim() for name, p in gpt.named_parameters()}
    return [pack_bucket(run, sizes, groups, ranks) for run in fill(reversed(sizes), sizes, limit)]


def gradients_of(gpt: GPT, stage: int, limit: int = 2000) -> Gradients:
    """Return the gradients of a model over all ranks, each of which owns its slice (stage 0: everything)."""
    layouts = layouts_of(gpt, limit, dist.get_world_size())
    shared = [Shared(layout, dist.group.WORLD, dist.get_rank(), stage) for layout in layouts]
    return Gradients(shared, dict(gpt.named_parameters()), complete=lambda number: None)


def tokens_of(rank: int, step: int) -> Tensor:
    return torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


def backward(gpt: GPT, tokens: Tensor) -> None:
    gpt.loss(tokens[:, :-1], tokens[:, 1:]).backward()


def model(dtype: torch.dtype = torch.float32) -> GPT:
    gpt = build_model(MODEL, OptimizerConfig(), 8, 0).to(dtype)
    with torch.no_grad():  # a head of zeros would leave every other gradient at zero
        gpt.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return gpt


@pytest.mark.parametrize("seed", range(5))
def test_a_bucket_holds_every_parameter_once_aligned_and_cut_evenly(seed: int) -> None:
    generator = random.Random(seed)
    sizes = {f"p{i}": generator.choice([1, 7, 8, 64, 1000]) for i in range(generator.randint(1, 12))}
    groups = {name: generator.randrange(3) for name in sizes}
    ranks = generator.choice([1, 2, 3, 8])
    bucket = pack_bucket(list(sizes), sizes, groups, ranks)
    covered = sorted([(slot.start, slot.stop) for slot in bucket.slots] + bucket.padding)
    assert [start for start, _ in covered] == [0, *(stop for _, stop in covered[:-1])]
    assert covered[-1][1] == bucket.size
    assert bucket.size % (ranks * ALIGNMENT) == 0
    assert {slot.name: slot.stop - slot.start for slot in bucket.slots} == sizes
    assert all(slot.start % ALIGNMENT == 0 for slot in bucket.slots)
    assert sum(stop - start for start, stop in bucket.padding) < len(sizes) * ALIGNMENT + ranks * ALIGNMENT
    # One segment for each group, in any order of the parameters.
    assert sorted(group for group, _ in bucket.segments) == sorted(set(groups.values()))
    for slot in bucket.slots:
        (segment,) = [r for group, r in bucket.segments if group == slot.group]
        assert segment[0] <= slot.start
        assert slot.stop <= segment[1]
    owned = [bucket.owned(rank) for rank in range(ranks)]
    assert [start for start, _ in owned] == [0, *(stop for _, stop in owned[:-1])]
    assert owned[-1][1] == bucket.size


def test_buckets_keep_the_order_and_stay_below_the_limit() -> None:
    sizes = {"a": 5, "b": 5, "c": 30, "d": 1, "e": 9}
    assert fill(sizes, sizes, 10) == [["a", "b"], ["c"], ["d", "e"]]


def test_ranges_are_cut_to_a_slice_and_counted_from_its_start() -> None:
    assert clip([(0, 4), (6, 9), (12, 20)], (3, 13)) == [(0, 1), (3, 6), (9, 10)]


def _count_collectives(stage: int) -> list[tuple[bool, int, int]]:
    """Return (is last, collectives, collectives sent before the last gradient came) of three micro-batches."""
    gpt = model()
    gradients = gradients_of(gpt, stage)
    sent, early = [0], [0]
    names = ("all_reduce", "reduce_scatter_tensor", "all_to_all_single", "all_gather_into_tensor")
    originals = {name: getattr(dist, name) for name in names}

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent[0] += 1
            return function(*args, **kwargs)

        return call

    for name, function in originals.items():
        setattr(dist, name, counting(function))
    # The table's gradient is the last of a backward pass.
    gpt.embedding.weight.register_hook(lambda gradient: early.__setitem__(0, sent[0]))
    counts = []
    for step in range(3):
        sent[0] = 0
        with gradients.micro_batch(last=step == 2):
            backward(gpt, tokens_of(dist.get_rank(), step))
        counts.append((step == 2, sent[0], early[0]))
    gradients.wait()
    for name, function in originals.items():
        setattr(dist, name, function)
    return [*counts, (True, len(gradients.buckets), 0)]


def test_gradients_are_sent_during_the_last_backward_pass_alone() -> None:
    for answer in run_ranks(2, lambda: [_count_collectives(stage) for stage in (0, 1, 2)]):
        for stage, (*micro_batches, (_, buckets, _)) in enumerate(answer):
            assert buckets > 3
            for last, sent, early in micro_batches:
                reduces = last or stage == 2
                assert sent == (buckets if reduces else 0), (stage, last)
                # All but the bucket of the table, which is complete only now.
                assert early == (buckets - 1 if reduces else 0), (stage, last)


def _is_rounded_once(stage: int, dtype: torch.dtype) -> bool:
    """Return whether the sum of bf16 gradients is the fp32 sum, rounded once."""
    ranks, gradients = dist.get_world_size(), gradients_of(model(dtype), stage)
    parts = []
    for rank in range(ranks):
        gpt = model(dtype)
        backward(gpt, tokens_of(rank, 0))
        parts.append({name: p.grad.float() for name, p in gpt.named_parameters()})
    gpt = model(dtype)
    gradients = gradients_of(gpt, stage)
    with gradients.micro_batch(last=True):
        backward(gpt, tokens_of(dist.get_rank(), 0))
    gradients.wait()
    same = True
    for bucket, shard in zip(gradients.buckets, gradients.shards, strict=True):
        whole = torch.zeros(bucket.layout.size)
        for slot in bucket.layout.slots:
            total = parts[0][slot.name]
            for part in parts[1:]:
                total = total + part[slot.name]
            whole[slot.start : slot.stop] = total.flatten()
        start, stop = bucket.shared.owned
        same = same and shard.dtype == dtype and torch.equal(shard, whole[start:stop].to(dtype))
    return same


def test_low_precision_gradients_are_summed_in_fp32_and_rounded_once() -> None:
    kinds = enumerate((torch.bfloat16, torch.float16, torch.bfloat16))
    for answer in run_ranks(3, lambda: [_is_rounded_once(stage, dtype) for stage, dtype in kinds]):
        assert answer == [True, True, True]


def test_a_parameter_that_the_loss_does_not_use_has_a_gradient_of_zero() -> None:
    def without_head(stage: int) -> tuple[float, float]:
        gpt = model()
        gradients = gradients_of(gpt, stage)
        for view in [view for bucket in gradients.buckets for view in bucket.views]:
            view.fill_(7.0)  # as an earlier step may leave them
        with gradients.micro_batch(last=True):
            gpt.embedding(tokens_of(dist.get_rank(), 0)).sum().backward()
        gradients.wait()
        total = torch.stack([shard.sum() for shard in gradients.shards]).sum()
        if stage > 0:
            dist.all_reduce(total)
        return total.item(), float(MODEL.width * 18 * dist.get_world_size())

    for answer in run_ranks(2, lambda: [without_head(stage) for stage in (0, 1, 2)]):
        for total, expected in answer:
            assert total == expected  # each of 18 tokens a rank adds one to every element of its row
