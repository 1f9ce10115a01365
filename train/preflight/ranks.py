"""Whether ranks find each other, how fast they speak, and whether one is slower than its siblings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ..hardware import CUDA, matmul_peak, on_gpu, synchronize
from ..job.fork import run_ranks
from ..parallel.mesh import all_gather
from .finding import FAILED, NOTE, PASSED, SLOW, Finding, judge_speed

TRIAL_SECONDS = 0.3  # of products, of which the best counts: a busy processor is no slow one
BYTES = 2**24  # that a collective carries
ROUNDS = 5


def check_ranks(size: int, kind: str, timeout: float, wanted: float | None = None) -> Iterator[Finding]:
    """So many ranks on this node meet, and measure; `wanted` bytes a second are what the cluster's group says.

    The process has not touched the GPUs: its forks do, over NCCL.
    """
    if size < 2:
        return
    try:
        measured = run_ranks(size, _measure, kind, timeout=timeout)
    except RuntimeError as error:
        said = str(error).strip().split("\n")
        yield Finding("ranks", FAILED, f"{size} ranks did not meet within {timeout:g} s: {said[0]} {said[-1]}")
        return
    yield from judge_ranks(measured, wanted)


def judge_ranks(measured: Sequence[tuple[float, float, float]], wanted: float | None = None) -> Iterator[Finding]:
    """From each rank's matrix products (FLOP/s), all-reduce and all-gather (bytes/s)."""
    rates, reduce, gather = ([row[i] for row in measured] for i in range(3))
    for rank, rate in enumerate(rates):
        others = {str(other): rates[other] for other in range(len(rates)) if other != rank}
        if (slow := judge_speed(f"rank {rank}", rate, others)) is not None:
            yield slow
    words = f"{len(rates)} ranks met: all-reduce {min(reduce) / 1e9:.2f} GB/s, all-gather {min(gather) / 1e9:.2f}"
    numbers = {"all_reduce": min(reduce), "all_gather": min(gather)}
    if wanted is not None and min(*reduce, *gather) < SLOW * wanted:
        words += f", and the cluster's group says {wanted / 1e9:.2f}: plans of meshes are too fast"
        yield Finding("ranks", NOTE, words, numbers=numbers)
    else:
        yield Finding("ranks", PASSED, words, numbers=numbers)


def check_speed(device: torch.device) -> Iterator[Finding]:
    """Matrix products, by which nodes of one kind are compared."""
    rate = matmul_peak(device, torch.float32, TRIAL_SECONDS)
    yield Finding("speed", PASSED, f"products run at {rate / 1e9:,.1f} GFLOP/s", numbers={"flops_per_second": rate})


def _measure(kind: str) -> tuple[float, float, float]:
    device, size, group = torch.device(kind), dist.get_world_size(), None
    if on_gpu(device):
        device = CUDA.take(dist.get_rank())
        group = dist.new_group(backend="nccl")
    sent = torch.ones(BYTES // 4, device=device)
    received = torch.empty(size * len(sent), device=device)
    rate = matmul_peak(device, torch.float32, TRIAL_SECONDS)
    reduce = _rate(lambda: dist.all_reduce(sent, group=group), BYTES, device)
    gather = _rate(lambda: all_gather(received, sent, group=group), size * BYTES, device)
    return rate, reduce, gather


def _rate(collective: Callable[[], object], size: int, device: torch.device) -> float:
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        collective()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return size / statistics.median(seconds)
