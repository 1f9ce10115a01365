"""Initial weights and per-tensor learning rates: muP for Adam, so that one learning rate serves every width.

Yang et al. 2022 ("Tensor Programs V"), Table 8, with w = width / base_width:

    tensor                      initial std            learning rate         weight decay
    embedding                   1                      eta * multiplier      none
    matrices inside blocks      1 / sqrt(fan_in)       eta / w^exponent      yes
    last matrix of a branch     ... / sqrt(2 depth)    eta / w^exponent      yes
    output head                 0                      eta / w^exponent      yes
    norms                       1 (constant)           eta * multiplier      none

The head starts at zero, which every width shares, so the first loss is exactly ln(vocabulary).
Tied embeddings start at 1/sqrt(base_width), keep the embedding's learning rate, and logits are divided by w instead
(ibid., Table 3 and section B.1); their first loss lies above ln(vocabulary), and starting them smaller ends higher.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ModelConfig, OptimizerConfig
from .gpt import GPT
from .shape import GROUPS, model_shape


@dataclass
class ParameterGroup:
    name: str
    parameters: Sequence[Tensor]
    learning_rate: float
    weight_decay: float


def output_scale(model: ModelConfig, optimizer: OptimizerConfig) -> float:
    """Factor on the logits; 1 unless embeddings are tied."""
    return (optimizer.base_width / model.width) ** optimizer.width_exponent if model.tied_embeddings else 1.0


def build_model(model: ModelConfig, optimizer: OptimizerConfig, max_length: int, seed: int) -> GPT:
    gpt = GPT(model, max_length, output_scale(model, optimizer))
    parameters = dict(gpt.named_parameters())
    with torch.no_grad():
        for name, weights in initial_weights(model, optimizer, seed):
            parameters[name].copy_(weights)
    return gpt


def empty_model(model: ModelConfig, optimizer: OptimizerConfig, max_length: int) -> GPT:
    """Names and shapes without memory."""
    with torch.device("meta"):
        return GPT(model, max_length, output_scale(model, optimizer))


def initial_weights(model: ModelConfig, optimizer: OptimizerConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Names and initial weights, fp32 on the CPU, one whole parameter at a time.

    So a rank that holds a shard never holds the model; every rank draws all of them, so a seed gives the same weights
    whatever the mesh.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model_shape(model).parameters:
        weights = torch.empty(parameter.shape)
        match parameter.role:
            case "norm" | "head norm":
                weights.fill_(1.0)
            case "head":
                weights.zero_()
            case "embedding" | "tied" as role:
                weights.normal_(std=1.0 if role == "embedding" else optimizer.base_width**-0.5, generator=generator)
            case role:
                std = 1 / math.sqrt(parameter.shape[1])
                weights.normal_(std=std / math.sqrt(2 * model.depth) if role == "last" else std, generator=generator)
        yield parameter.name, weights


def parameter_groups(gpt: GPT, optimizer: OptimizerConfig) -> list[ParameterGroup]:
    transfer = (optimizer.base_width / gpt.config.width) ** optimizer.width_exponent
    table_rate = optimizer.learning_rate * optimizer.embedding_multiplier
    rates = {
        "matrices": (optimizer.learning_rate * transfer, optimizer.weight_decay),
        "embedding": (table_rate, 0.0),
        "norms": (table_rate, 0.0),
    }
    tensors, parameters = dict(gpt.named_parameters()), model_shape(gpt.config).parameters
    return [
        ParameterGroup(group, [tensors[p.name] for p in parameters if p.role in GROUPS[group]], *rates[group])
        for group in rates
    ]
