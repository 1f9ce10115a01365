"""The peers of `isoflop bench parallel`: our model under PyTorch's own parallelism, with torch's AdamW and clipping.

Each gets its rows for free, and what its documentation recommends. `parallelize_module` gets the fused matrices as one
product each, and torch's RMSNorm, which its plan for norms needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
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
from ..train.flops import stage_blocks
from ..train.model.gpt import GPT
from ..train.model.parametrization import build_model, parameter_groups
from ..train.model.shape import micro_batches
from ..train.parallel.mesh import Mesh
from ..train.schedule import learning_rate_factor

PIPELINES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")  # of torch.distributed.pipelining
Backward = Callable[[Tensor], Tensor]  # rows -> loss, after its backward pass


def build_peer(peer: str, config: RunConfig, mesh: Mesh) -> Callable[[int], Tensor]:
    """A training step of the named peer on this rank: the step's number in, the loss of this rank's rows out."""
    gpt = build_model(config.model, config.optimizer, config.data.sequence_length, config.seed)
    assert mesh.device_mesh is not None
    share = config.optimizer.batch_size // mesh.dp
    stream = TrainStream(prepare(config.data), config.data.sequence_length, config.seed)
    adam: dict[str, Any] = {"betas": (config.optimizer.beta1, config.optimizer.beta2)}
    optimizer: torch.optim.Optimizer
    if peer in PIPELINES:
        gpt, backward = pipelined(gpt, peer, config, mesh)
        optimizer = torch.optim.AdamW(groups_of(gpt, config), fused=True, **adam)
    elif peer == "fully_shard":
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh.device_mesh["dp"])
        fully_shard(gpt, mesh=mesh.device_mesh["dp"])
        backward, optimizer = plain_backward(gpt), torch.optim.AdamW(groups_of(gpt, config), fused=True, **adam)
    elif peer == "parallelize_module":
        backward = split_backward(parallelized(gpt, mesh.device_mesh["tp"], config.parallel.sequence_parallel))
        optimizer = torch.optim.AdamW(groups_of(gpt, config), fused=True, **adam)
    else:
        model = DistributedDataParallel(gpt, process_group=mesh.dp_group, gradient_as_bucket_view=True)
        backward = plain_backward(model)
        if peer == "DistributedDataParallel":
            optimizer = torch.optim.AdamW(groups_of(gpt, config), fused=True, **adam)
        else:
            first, *others = groups_of(gpt, config)
            optimizer = ZeroRedundancyOptimizer(
                first.pop("params"),
                torch.optim.AdamW,
                process_group=mesh.dp_group,
                parameters_as_bucket_view=True,
                fused=True,
                **first,
                **adam,
            )
            for group in others:
                optimizer.add_param_group(group)
    parameters = list(gpt.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]

    def step(number: int) -> Tensor:
        rows = torch.from_numpy(stream.batch(number, config.optimizer.batch_size, mesh.dp_rank * share, share))
        result = backward(rows)
        clip_gradients(parameters, config.optimizer.gradient_clip, mesh.pp_group)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * learning_rate_factor(config, number)
        optimizer.step()
        optimizer.zero_grad()
        return result

    return step


def clip_gradients(parameters: list[nn.Parameter], limit: float, stages: ProcessGroup | None) -> None:
    """By torch, whose norm takes one kind of tensor: without sequence parallelism norms are no DTensors."""
    kinds = [[p for p in parameters if isinstance(p, DTensor) == kind] for kind in (True, False)]
    if stages is not None:  # torch's norm is that of one stage
        squares = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
        dist.all_reduce(squares, group=stages)
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, squares.sqrt())
        return
    if not all(kinds):
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    total = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, limit, total)


def groups_of(gpt: GPT, config: RunConfig) -> list[dict[str, Any]]:
    """Parameter groups of the model as it is now: `fully_shard` and its like replace parameters."""
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


class Part(nn.Module):
    """A virtual stage of a pipeline: tokens or the residual stream in, the stream or logits out."""

    def __init__(self, gpt: GPT, chunk: int, first: bool, last: bool) -> None:
        super().__init__()
        ends = [gpt.embedding] * first + [gpt.norm, gpt.head] * last
        self.own = nn.ModuleList([*ends, *(gpt.blocks[number] for number in gpt.chunks[chunk])])

        def run(x: Tensor) -> Tensor:  # no module's attribute: the parameters of a part are its own alone
            tokens = x if first else x[:, :, 0]  # of which nothing but the length is read
            x = gpt.through(gpt.embedding(x) if first else x, tokens, chunk)
            return gpt.head(gpt.leave(x)) if last else x

        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def pipelined(gpt: GPT, schedule: str, config: RunConfig, mesh: Mesh) -> tuple[GPT, Backward]:
    """Under `torch.distributed.pipelining`, with as many blocks a stage as ours."""
    from torch.distributed import pipelining

    stages, parallel = mesh.pp * config.parallel.chunks, config.parallel
    gpt.keep(stage_blocks(config)[mesh.pp_rank :: mesh.pp], mesh.pp_rank == 0, mesh.pp_rank == mesh.pp - 1)
    places = range(mesh.pp_rank, stages, mesh.pp)
    parts = [
        pipelining.PipelineStage(
            Part(gpt, chunk, place == 0, place == stages - 1), place, stages, torch.device("cpu"), group=mesh.pp_group
        )
        for chunk, place in enumerate(places)
    ]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    kind, passes = getattr(pipelining, schedule), micro_batches(config)
    run = kind(parts if parallel.chunks > 1 else parts[0], passes, loss_of)

    def backward(rows: Tensor) -> Tensor:
        losses: list[Tensor] = []
        last = {"target": rows[:, 1:], "losses": losses} if places[-1] == stages - 1 else {}
        run.step(*([rows[:, :-1]] if places[0] == 0 else []), return_outputs=False, **last)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return gpt, backward


def split_backward(model: GPT) -> Backward:
    """Of logits that stay split over the vocabulary."""

    def backward(rows: Tensor) -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(model.logits(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
        return loss.detach()

    return backward


def parallelized(gpt: GPT, mesh: DeviceMesh, sequence_parallel: bool) -> GPT:
    """Split by torch's recipe for a Llama."""
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
    """PyTorch's recipe for a Llama; `part` follows the name of each fused matrix."""
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
