"""Build the peers of `isoflop bench parallel`: our model with PyTorch's own parallelism, AdamW and clipping.

Each peer is set up as its documentation recommends. `parallelize_module` gets the fused matrices as one product each,
and torch's RMSNorm, which its plan for norms needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from ..train.config import RunConfig
from ..train.data.loader import TrainStream
from ..train.data.shards import prepare
from ..train.model.gpt import GPT
from ..train.model.parametrization import build_model, parameter_groups
from ..train.parallel.mesh import Mesh
from ..train.schedule import learning_rate_factor

Backward = Callable[[Tensor], Tensor]  # rows -> loss, after its backward pass


def build_peer(peer: str, config: RunConfig, mesh: Mesh) -> Callable[[int], Tensor]:
    """Return a training step of the named peer on this rank, from a step's number to the loss of this rank's rows."""
    gpt = build_model(config.model, config.optimizer, config.data.sequence_length, config.seed)
    assert mesh.device_mesh is not None
    share = config.optimizer.batch_size // mesh.dp
    stream = TrainStream(prepare(config.data), config.data.sequence_length, config.seed)
    if peer == "fully_shard":
        for module in (*gpt.blocks, gpt):
            fully_shard(module, mesh=mesh.device_mesh["dp"])
        backward = plain_backward(gpt)
    elif peer == "parallelize_module":
        backward = split_backward(parallelized(gpt, mesh.device_mesh["tp"], config.parallel.sequence_parallel))
    else:
        backward = plain_backward(
            DistributedDataParallel(gpt, process_group=mesh.dp_group, gradient_as_bucket_view=True)
        )
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
    """Clip by torch, whose norm takes one kind of tensor; without sequence parallelism, norms are plain tensors."""
    kinds = [[p for p in parameters if isinstance(p, DTensor) == kind] for kind in (True, False)]
    if not all(kinds):
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    total = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, limit, total)


def groups_of(gpt: GPT, config: RunConfig) -> list[dict[str, Any]]:
    """Return the parameter groups of the model as it is now, because `fully_shard` replaces parameters."""
    return [
        dict(params=list(group.parameters), lr=group.learning_rate, weight_decay=group.weight_decay, eps=group.eps)
        for group in parameter_groups(gpt, config.optimizer)
    ]


def plain_backward(model: nn.Module) -> Backward:
    def backward(rows: Tensor) -> Tensor:
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    return backward


def split_backward(model: GPT) -> Backward:
    """Return a backward pass of logits that stay split over the vocabulary."""

    def backward(rows: Tensor) -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(model.logits(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
        return loss.detach()

    return backward


def parallelized(gpt: GPT, mesh: DeviceMesh, sequence_parallel: bool) -> GPT:
    """Split the model by torch's recipe for a Llama."""
    for module in list(gpt.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.RMSNorm):
                norm = nn.RMSNorm(gpt.config.width, gpt.config.norm_eps)
                module.register_module(name, norm)
    for block in gpt.blocks:
        block.attention.heads //= mesh.size()  # type: ignore[union-attr, operator]
        block.attention.kv_heads //= mesh.size()  # type: ignore[union-attr, operator]
    parallelize_module(gpt, mesh, llama_plan(sequence_parallel))
    return gpt


def llama_plan(sequence_parallel: bool, part: str = "") -> dict[str, ParallelStyle]:
    """Return PyTorch's recipe for a Llama; `part` follows the name of each fused matrix."""
    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
        f"blocks.*.attention.qkv{part}": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=stream),
        f"blocks.*.mlp.gate_up{part}": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=stream),
    }
    if sequence_parallel:
        before, after = (stream, None, None), (Replicate(), None, None)
        plan |= {"norm": SequenceParallel(), "blocks.*.*_norm": SequenceParallel()}
        plan |= {"blocks.*.attention": PrepareModuleInput(input_layouts=before, desired_input_layouts=after)}
        plan |= {"blocks.*.mlp": PrepareModuleInput(input_layouts=before[:1], desired_input_layouts=after[:1])}
    return plan
