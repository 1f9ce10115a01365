"""Models with random weights, random architectures, and distances of tensors."""

from __future__ import annotations

import math
import random

import torch
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.model.gpt import GPT
from isoflop.train.model.parametrization import build_model
from torch import Tensor


def random_architecture(generator: random.Random, **others: object) -> ModelConfig:
    heads = generator.choice([1, 2, 4, 6])
    return ModelConfig(
        width=heads * generator.choice([2, 4, 8]), depth=generator.randrange(1, 4), heads=heads,
        kv_heads=generator.choice([d for d in range(1, heads + 1) if heads % d == 0]),
        hidden=generator.choice([None, 5, 24]), vocab_size=generator.randrange(3, 90),
        vocab_multiple=generator.choice([1, 16, 64]), qk_norm=generator.random() < 0.5,
        tied_embeddings=generator.random() < 0.5, head_size=generator.choice([None, 6, 10]),
        qkv_bias=generator.random() < 0.5, **others,  # type: ignore[arg-type]
    )  # fmt: skip


def random_model(config: ModelConfig, length: int, seed: int = 0, optimizer: OptimizerConfig | None = None) -> GPT:
    """Build a model with random weights: the initial zero head and unit norms would hide mistakes."""
    model = build_model(config, optimizer or OptimizerConfig(), length, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.7 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.3
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, scale, generator=generator)
    return model


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the distance of two tensors relative to the norm of the second, in float64."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return float((actual - expected).norm() / expected.norm())
