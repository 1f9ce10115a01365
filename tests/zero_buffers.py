"""A ZeRO engine of one process, its steps, and the bytes that a rank's engine keeps from step to step."""

from __future__ import annotations

import torch
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.model.gpt import GPT
from isoflop.train.model.parametrization import empty_model, initial_weights
from isoflop.train.parallel.layout import whole_placement
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.parallel.zero import StepResult, Zero


def engine(model: ModelConfig, optimizer: OptimizerConfig, dtype: torch.dtype) -> tuple[GPT, Zero]:
    """Build the model and the engine of a single process, with initial weights."""
    gpt = empty_model(model, optimizer, 8)
    placements = {name: whole_placement(p.shape) for name, p in gpt.named_parameters()}
    zero = Zero(gpt, optimizer, placements, Mesh(), stage=0, dtype=dtype, device=torch.device("cpu"))
    zero.load(initial_weights(model, optimizer, 0))
    gpt.place_angles(torch.device("cpu"))
    return gpt, zero


def bytes_held(zero: Zero) -> dict[str, int]:
    """Return the bytes of this rank's lasting buffers, by kind."""
    states = [(name, state) for b in zero.buckets for span in b.spans for name, state in span.states.items()]
    tensors = {
        "weights": [bucket.full if bucket.stage < 3 else bucket.own for bucket in zero.buckets],
        "gradients": [b.shard if b.freed or b.full is None else b.full for b in zero.gradients.buckets],
        "master": [bucket.master for bucket in zero.buckets if bucket.master is not bucket.own],
        **{name: [state for other, state in states if other == name] for name in dict.fromkeys(dict(states))},
    }
    return {kind: sum(t.numel() * t.element_size() for t in held) for kind, held in tensors.items()}


def random_gradients(gpt: GPT, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for name, p in gpt.named_parameters()
    }


def take_step(gpt: GPT, zero: Zero, gradients: dict[str, torch.Tensor], factor: float = 1.0) -> StepResult:
    """Take a step with these gradients, at the peak rates times a factor."""
    with zero.gradients.micro_batch(last=True):
        torch.stack([(p * gradients[name]).sum() for name, p in gpt.named_parameters()]).sum().backward()
    zero.set_rates(factor)
    return zero.step(torch.zeros(()))
