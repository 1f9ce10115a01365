"""A ZeRO engine of one process, and what a rank's keeps in memory from step to step."""

from __future__ import annotations

import torch
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.model.gpt import GPT
from isoflop.train.model.parametrization import empty_model, initial_weights, parameter_groups
from isoflop.train.parallel.layout import whole_placement
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.parallel.zero import Zero


def engine(model: ModelConfig, optimizer: OptimizerConfig, dtype: torch.dtype) -> tuple[GPT, Zero]:
    """One process that owns everything, with initial weights in it."""
    gpt = empty_model(model, optimizer, 8)
    placements = {name: whole_placement(p.shape) for name, p in gpt.named_parameters()}
    zero = Zero(
        gpt, parameter_groups(gpt, optimizer), placements, Mesh(), stage=0, dtype=dtype, optimizer=optimizer,
        bucket_mb=0.01, device=torch.device("cpu"),
    )  # fmt: skip
    zero.load(initial_weights(model, optimizer, 0))
    gpt.place_angles(torch.device("cpu"))
    return gpt, zero


def bytes_held(zero: Zero) -> dict[str, int]:
    """Bytes of this rank's lasting buffers."""
    gradients = zero.gradients
    tensors = {
        "weights": [
            full if stage < 3 else own
            for full, own, stage in zip(zero.weights.full, zero.weights.own, zero.weights.stages, strict=True)
        ],
        "gradients": [b.shard if b.freed or b.full is None else b.full for b in gradients.buckets],
        "master": zero.master if zero.dtype != zero.wide else [],
        "exp_avg": zero.exp_avg,
        "exp_avg_sq": zero.exp_avg_sq,
    }
    return {kind: sum(t.numel() * t.element_size() for t in held) for kind, held in tensors.items()}
