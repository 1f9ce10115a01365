"""Our parallel trainer beside PyTorch's own, on forked ranks over gloo, each pinned to a core, in turn in one run.

Both sides train the same model on the same rows from the same weights: `Stepper.step` against DDP,
ZeroRedundancyOptimizer, `fully_shard`, `parallelize_module` or a schedule of `torch.distributed.pipelining`, with
torch's fused AdamW and clipping. Figures are of the first rank's clock. Then a step that starts an asynchronous
checkpoint, against one without, and attention over shared sequences (`context.py`).
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contenders import Contender, contract_row, counted
from .train import bench_config, build_stepper, size_and_batch

if TYPE_CHECKING:
    from ..train.config import RunConfig

# case, fields of `parallel`, peer
CASES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("data parallel, 2 ranks", {"dp": 2}, "DistributedDataParallel"),
    ("ZeRO-1, 2 ranks", {"dp": 2, "zero": 1}, "DDP + ZeroRedundancyOptimizer"),
    ("ZeRO-3, 2 ranks", {"dp": 2, "zero": 3}, "fully_shard"),
    ("tensor parallel, 2 ranks", {"tp": 2, "sequence_parallel": False}, "parallelize_module"),
    ("tensor and sequence parallel, 2 ranks", {"tp": 2}, "parallelize_module"),
    ("pipeline, gpipe, 2 ranks", {"pp": 2, "schedule": "gpipe"}, "ScheduleGPipe"),
    ("pipeline, 1f1b, 2 ranks", {"pp": 2}, "Schedule1F1B"),
    ("pipeline, interleaved, 2 ranks", {"pp": 2, "schedule": "interleaved", "chunks": 2}, "ScheduleInterleaved1F1B"),
)


def bench_parallel(rounds: int = 15, steps: int = 3) -> list[dict[str, Any]]:
    """Tokens/s of our step and of the peer's on the same ranks, and what a save costs the step that starts it."""
    from ..train.data.shards import prepare
    from .context import bench_context

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case, fields, peer in CASES:
            config = bench_config("fp32", Path(folder), compiled=False)
            config.parallel = dataclasses.replace(config.parallel, **fields)
            prepare(config.data)
            rows.append(_measure(case, peer, config, rounds, steps))
        rows.append(_checkpoint_row(bench_config("fp32", Path(folder), compiled=False), Path(folder), rounds))
    return [*rows, *bench_context(rounds=rounds)]


def _measure(case: str, peer: str, config: RunConfig, rounds: int, steps: int) -> dict[str, Any]:
    from ..train.job.fork import run_ranks

    answers = run_ranks(config.parallel.world_size, _take_turns, config, peer, rounds, steps, timeout=1800.0)
    ours, theirs = answers[0]
    return _row(case, config, ours, theirs, peer)


def _row(case: str, config: RunConfig, ours: list[float], theirs: list[float], peer: str) -> dict[str, Any]:
    import torch

    return contract_row(
        f"{case}, {size_and_batch(config)}", config.batch_tokens, "tokens/s", ours, theirs, peer, torch.device("cpu")
    )


def _take_turns(config: RunConfig, peer: str, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """On every rank: seconds per step of ours and of the peer's in each round."""
    import warnings

    import torch
    import torch.distributed as dist

    from ..train.parallel.mesh import build_mesh
    from . import peers as bench_peers

    warnings.simplefilter("ignore")  # torch's own code calls collectives by names that torch warns of

    mesh = build_mesh(config.parallel.dp, config.parallel.tp, torch.device("cpu"), pp=config.parallel.pp)
    if hasattr(os, "sched_setaffinity"):  # a core per rank, or they wander
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[mesh.rank % len(cores)]})
    ours = Contender("ours", counted(build_stepper(config, mesh).step))
    theirs = Contender(peer, counted(bench_peers.build_peer(peer, config, mesh)))
    for turn in range(rounds + 1):
        for contender in (ours, theirs):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(1 if turn == 0 else steps):
                contender.step()
            dist.barrier()
            if turn > 0:
                contender.seconds.append((time.perf_counter() - start) / steps)
    return ours.seconds, theirs.seconds


def _checkpoint_row(config: RunConfig, folder: Path, rounds: int) -> dict[str, Any]:
    """The step during which a checkpoint starts, against a plain one, in one process on one of two cores."""
    from ..train.job.fork import run_ranks

    (answer,) = run_ranks(1, _save_in_turn, config, folder, rounds, timeout=1800.0)
    saving, plain = answer
    return _row("a step that starts to save", config, saving, plain, "a plain step")


def _save_in_turn(config: RunConfig, folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    from ..train.checkpoint.saver import Saver
    from ..train.data.shards import prepare
    from ..train.parallel.mesh import Mesh

    stepper = build_stepper(config, Mesh())
    saver = Saver(folder / "checkpoints", Mesh(), config, prepare(config.data).tokenizer, print)
    step = counted(stepper.step)
    saving, plain = list[float](), list[float]()
    for turn in range(2 * (rounds + 1)):
        start = time.perf_counter()
        if turn % 2:
            saver.save(turn, stepper.zero.held(), stepper.state())
        step()
        (saving if turn % 2 else plain).append(time.perf_counter() - start)
        saver.wait()
    saver.close()
    return saving[1:], plain[1:]
