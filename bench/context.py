"""Our ring attention beside all-gathered SDPA, over sequences that ranks share out, forward and backward.

The peer gathers keys and values of all ranks and calls PyTorch's kernel once, with the mask of the rank's rows, which
are ours: PyTorch's own context parallelism has none for CPUs. Memory is that of tensors, counted on fake ones, which
compute nothing: query, key and value, what attention keeps and works on, and all derivatives.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from ..train.hardware import device_name
from ..train.job.fork import run_ranks
from ..train.model.backends import SDPA
from ..train.parallel.context import Ring, own_part
from .contenders import Contender, Row, contract_row, plain_row
from .live import Live

PEER = "all-gathered SDPA"
HEADS, SIZE, KV_HEADS = 4, 64, 4
LONG, MANY_HEADS = 32768, 16
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def bench_context(length: int = 4096, rounds: int = 7) -> list[Row]:
    """Tokens/s of attention, and tokens of a long sequence per MB of a rank beside those of one process."""
    rows = []
    for ranks in (2, 4):
        ours, theirs = run_ranks(ranks, _take_turns, length, rounds, timeout=1800.0)[0]
        case = f"context parallel attention, {ranks} ranks, T={length}, {HEADS} heads of {SIZE}"
        rows.append(contract_row(case, length, "tokens/s", ours, theirs, PEER, torch.device("cpu")))
    parts = LONG / (attention_bytes(4) / 1e6), LONG / (attention_bytes(1) / 1e6)
    case = f"context parallel attention, 4 ranks, T={LONG}, {MANY_HEADS} heads of {SIZE}"
    rows.append(plain_row(case, *parts, "one rank's SDPA", "tokens/MB", device_name(torch.device("cpu"))))
    return rows


def ring(group: ProcessGroup) -> Attention:
    return Ring(SDPA.name, SDPA.kernel, "first", group).attend


def gathered(group: ProcessGroup, length: int) -> Attention:
    """SDPA over the keys and values of all, rank by rank, for this rank's queries."""
    size = group.size()
    own = own_part(torch.arange(length), 0, group)
    pieces = torch.arange(length).chunk(2 * size)
    theirs = torch.cat([torch.cat((pieces[rank], pieces[2 * size - 1 - rank])) for rank in range(size)])
    mask = torch.zeros(len(own), length).masked_fill_(theirs > own[:, None], float("-inf"))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        both = all_gather_tensor_autograd(torch.stack((key, value)).movedim(2, 0).contiguous(), 0, group)
        key, value = both.permute(1, 2, 3, 0, 4)
        query, grouped = query.transpose(1, 2), query.shape[2] > key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return attend


def _take_turns(length: int, rounds: int) -> tuple[list[float], list[float]]:
    """On every rank: seconds of a forward and backward pass of ours and of the peer's in each round."""
    warnings.simplefilter("ignore")  # of torch's newest release, which calls the gathering by another name
    group = dist.group.WORLD
    assert group is not None
    if hasattr(os, "sched_setaffinity"):  # a core per rank, or they wander
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[group.rank() % len(cores)]})
    inputs = [torch.randn(1, length // group.size(), n, SIZE, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS)]

    def contender(name: str, attend: Attention) -> Contender:
        return Contender(name, lambda: torch.autograd.grad(attend(*inputs).sum(), inputs))

    both = contender("ours", ring(group)), contender(PEER, gathered(group, length))
    for turn in range(rounds + 1):
        for one in both:
            dist.barrier()
            start = time.perf_counter()
            one.step()
            dist.barrier()
            if turn > 0:
                one.seconds.append(time.perf_counter() - start)
    return both[0].seconds, both[1].seconds


def attention_bytes(ranks: int, length: int = LONG, heads: int = MANY_HEADS) -> int:
    """Most bytes of a rank at once. A process of its own counts, among ranks that are not there."""
    return run_ranks(1, _count, ranks, length, heads)[0]


def _count(ranks: int, length: int, heads: int) -> int:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    attend: Any = ring(group) if ranks > 1 else SDPA.attend
    with FakeTensorMode(), Live() as live:
        inputs = [torch.empty(1, length // ranks, heads, SIZE, requires_grad=True) for _ in range(3)]
        out = attend(*inputs)
        out.backward(torch.empty_like(out))
    return live.peak
