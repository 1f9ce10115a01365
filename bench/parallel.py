"""Time our parallel trainer and PyTorch's on forked ranks over gloo, each pinned to a core: `isoflop bench parallel`.

Both sides train the same model on the same rows from the same weights: `Stepper.step`, and DDP,
ZeroRedundancyOptimizer, `fully_shard` or `parallelize_module` with torch's fused AdamW and clipping. Figures are of the
first rank's clock.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .timing import Contender, Row, counted, take_turns, timed_row
from .train import bench_config, build_stepper, size_and_batch

if TYPE_CHECKING:
    from ..train.config import RunConfig

ABOUT = "two ranks over gloo, fp32"
# Case, fields of `parallel`, peer.
CASES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("data parallel, 2 ranks", {"dp": 2}, "DistributedDataParallel"),
    ("ZeRO-1, 2 ranks", {"dp": 2, "zero": 1}, "DDP + ZeroRedundancyOptimizer"),
    ("ZeRO-3, 2 ranks", {"dp": 2, "zero": 3}, "fully_shard"),
    ("tensor parallel, 2 ranks", {"tp": 2, "sequence_parallel": False}, "parallelize_module"),
    ("tensor and sequence parallel, 2 ranks", {"tp": 2}, "parallelize_module"),
)


def bench_parallel(rounds: int = 15, steps: int = 3) -> Iterator[Row]:
    """Yield tokens/s of our step and the peer's on the same ranks."""
    import torch

    from ..train.data.shards import prepare
    from ..train.job.fork import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        for title, fields, peer in CASES:
            config = bench_config("fp32", Path(folder), compiled=False)
            config.parallel = replace(config.parallel, **fields)
            prepare(config.data)
            ranks, case = config.parallel.world_size, f"{title}, {size_and_batch(config)}"
            ours, theirs = run_ranks(ranks, _time_both, config, peer, rounds, steps, timeout=1800.0)[0]
            yield timed_row(case, config.batch_tokens, "tokens/s", ours, theirs, peer, torch.device("cpu"))


def _time_both(config: RunConfig, peer: str, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Return on every rank the seconds per step of ours and of the peer in each round."""
    import torch
    import torch.distributed as dist

    from ..train.parallel.mesh import build_mesh
    from .peers import build_peer

    warnings.simplefilter("ignore")  # torch's own code calls collectives by deprecated names
    cpu = torch.device("cpu")
    mesh = build_mesh(config.parallel.dp, config.parallel.tp, cpu)
    if hasattr(os, "sched_setaffinity"):  # a core per rank, or the scheduler moves them
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[mesh.rank % len(cores)]})
    ours = Contender("ours", counted(build_stepper(config, mesh).step))
    theirs = Contender(peer, counted(build_peer(peer, config, mesh)))
    take_turns([ours, theirs], rounds, steps, cpu, barrier=dist.barrier)
    return ours.seconds, theirs.seconds
