"""Time our parallel trainer and PyTorch's on forked ranks over gloo, each pinned to a core: `isoflop bench parallel`.

Both sides train the same model on the same rows from the same weights. The peers use torch's fused AdamW and clipping,
and are set up as their documentation recommends. `parallelize_module` gets the fused matrices as one product each, and
torch's RMSNorm, which its plan for norms needs.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tensor
from torch.nn.parallel import DistributedDataParallel

from ..train.config import RunConfig
from ..train.data.loader import TrainStream
from ..train.data.shards import prepare
from ..train.job.fork import run_ranks
from ..train.model.gpt import GPT
from ..train.model.parametrization import build_model, parameter_groups
from ..train.parallel.mesh import Mesh, build_mesh
from ..train.schedule import learning_rate_factor
from .timing import Contender, Row, counted, take_turns, timed_row
from .train import CPU, bench_config, build_stepper, size_and_batch

Backward = Callable[[Tensor], Tensor]  # rows -> loss, after its backward pass
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
    """Yield a row for each way of parallel training: tokens/s of our step and the peer's on the same ranks."""
    with tempfile.TemporaryDirectory() as folder:
        for title, fields, peer in CASES:
            config = bench_config("fp32", Path(folder), compiled=False)
            config.parallel = replace(config.parallel, **fields)
            prepare(config.data)
            ranks, case = config.parallel.world_size, f"{title}, {size_and_batch(config)}"
            ours, theirs = run_ranks(ranks, _time_both, config, peer, rounds, steps, timeout=1800.0)[0]
            yield timed_row(case, config.batch_tokens, "tokens/s", ours, theirs, peer, CPU)


def _time_both(config: RunConfig, peer: str, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Time both on this rank; return the seconds per step in each round, of ours and of the peer."""
    warnings.simplefilter("ignore")  # torch's own code calls collectives by deprecated names
    mesh = build_mesh(config.parallel.dp, config.parallel.tp, CPU)
    if hasattr(os, "sched_setaffinity"):  # a core per rank, or the scheduler moves them
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[mesh.rank % len(cores)]})
    ours = Contender("ours", counted(build_stepper(config, mesh).step))
    theirs = Contender(peer, counted(build_peer(peer, config, mesh)))
    take_turns([ours, theirs], rounds, steps, CPU, barrier=dist.barrier)
    return ours.seconds, theirs.seconds


def build_peer(peer: str, config: RunConfig, mesh: Mesh) -> Callable[[int], Tensor]:
    """Return the peer's training step on this rank: a function from a step's number to the loss of this rank's rows."""
    gpt = build_model(config.model, config.optimizer, config.data.sequence_length, config.seed)
    assert mesh.device_mesh is not None
    share = config.optimizer.batch_size // mesh.dp
    stream = TrainStream(prepare(config.data), config.data.sequence_length, config.seed)
    if peer == "fully_shard":
        for module in (*gpt.blocks, gpt):
            fully_shard(module, mesh=mesh.device_mesh["dp"])
        backward = backward_of(gpt)
    elif peer == "parallelize_module":
        parallelized(gpt, mesh.device_mesh["tp"], config.parallel.sequence_parallel)
        backward = backward_of(gpt.logits, split=True)
    else:
        model = DistributedDataParallel(gpt, process_group=mesh.dp_group, gradient_as_bucket_view=True)
        backward = backward_of(model)
    adam: dict[str, Any] = {"betas": (config.optimizer.beta1, config.optimizer.beta2), "fused": True}
    groups = groups_of(gpt, config)
    optimizer: torch.optim.Optimizer
    if peer == "DDP + ZeroRedundancyOptimizer":
        parameters, rest = groups[0].pop("params"), groups[0] | adam
        optimizer = ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, process_group=mesh.dp_group, parameters_as_bucket_view=True, **rest
        )
        for group in groups[1:]:
            optimizer.add_param_group(group)
    else:
        optimizer = torch.optim.AdamW(groups, **adam)
    every = list(gpt.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]

    def step(number: int) -> Tensor:
        rows = torch.from_numpy(stream.batch(number, config.optimizer.batch_size, mesh.dp_rank * share, share))
        loss = backward(rows)
        clip_gradients(every, config.optimizer.gradient_clip)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * learning_rate_factor(config, number)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> None:
    """Clip the gradients' norm to `limit` by torch, whose norm takes either DTensors or plain tensors."""
    kinds = [[p for p in parameters if isinstance(p, DTensor) == kind] for kind in (True, False)]
    if not all(kinds):
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    total = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, limit, total)


def groups_of(gpt: GPT, config: RunConfig) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups; `fully_shard` must come before, because it replaces parameters."""
    return [
        dict(params=list(group.parameters), lr=group.learning_rate, weight_decay=group.weight_decay, eps=group.eps)
        for group in parameter_groups(gpt, config.optimizer)
    ]


def backward_of(logits: Callable[[Tensor], Tensor], split: bool = False) -> Backward:
    """Return a function that computes gradients and loss of rows; `split`: logits are split over the vocabulary."""

    def backward(rows: Tensor) -> Tensor:
        with tensor.loss_parallel() if split else nullcontext():
            loss = F.cross_entropy(logits(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
            loss.backward()
        return loss.detach()

    return backward


def parallelized(gpt: GPT, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split the model over `mesh` in place, by torch's recipe for a Llama."""
    for module in list(gpt.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.RMSNorm):
                module.register_module(name, nn.RMSNorm(gpt.config.width, gpt.config.norm_eps))
    for block in gpt.blocks:
        block.attention.heads //= mesh.size()  # type: ignore[union-attr, operator]
        block.attention.kv_heads //= mesh.size()  # type: ignore[union-attr, operator]
    tensor.parallelize_module(gpt, mesh, llama_plan(sequence_parallel))


def llama_plan(sequence_parallel: bool, part: str = "") -> dict[str, Any]:
    """Return PyTorch's recipe for a Llama, module -> style; `part` is added to the names of fused matrices."""
    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        "embedding": tensor.RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": tensor.ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
        f"blocks.*.attention.qkv{part}": tensor.ColwiseParallel(),
        "blocks.*.attention.out": tensor.RowwiseParallel(output_layouts=stream),
        f"blocks.*.mlp.gate_up{part}": tensor.ColwiseParallel(),
        "blocks.*.mlp.down": tensor.RowwiseParallel(output_layouts=stream),
    }
    if sequence_parallel:
        before, after = (stream, None, None), (Replicate(), None, None)
        plan |= {"norm": tensor.SequenceParallel(), "blocks.*.*_norm": tensor.SequenceParallel()}
        plan |= {"blocks.*.attention": tensor.PrepareModuleInput(input_layouts=before, desired_input_layouts=after)}
        plan |= {"blocks.*.mlp": tensor.PrepareModuleInput(input_layouts=before[:1], desired_input_layouts=after[:1])}
    return plan
