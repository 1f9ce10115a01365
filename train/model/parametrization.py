"""Initial weights and per-tensor learning rates: muP for Adam, so that one learning rate serves every width.

Yang et al. 2022 ("Tensor Programs V"), Table 8, with w = width / base_width:

    tensor                      initial std            learning rate         weight decay
    embedding                   1                      eta * multiplier      none
    matrices inside blocks      1 / sqrt(fan_in)       eta / w^exponent      yes
    last matrix of a branch     ... / sqrt(2 depth)    eta / w^exponent      yes
    output head                 0                      eta / w^exponent      yes
    norms                       1 (constant)           eta * multiplier      none
    biases                      0                      eta * multiplier      none

With a base depth L0 every branch is multiplied by m = L0 / depth (CompleteP, alpha = 1: Dey et al. 2025,
arXiv:2505.01618, Table 1). The factor is part of the branch's last matrix W = m W', not of the forward pass: training
W' with AdamW at (eta, decay, eps) equals training W at (m eta, decay / m, eps / m), except for the gradient's norm.
Multiplying decay by w keeps eta * decay the same at every size. At the base width and depth this is the table above:

    tensor                      initial std                learning rate    weight decay    epsilon
    first matrix of a branch    1 / sqrt(fan_in)           eta / w          decay w         eps m / w
    last matrix of a branch     ... m / sqrt(2 L0)         eta m / w        decay w / m     eps / w
    output head                 0                          eta / w          decay w         eps
    norms, biases of a branch   as above                   as above         none            eps m / w
    embedding, last norm        as above                   as above         none            eps / w

A router is like an output, because the number of experts does not grow with the width: it starts at sqrt(base_width) /
width, and learns at eta / w. Experts are matrices inside blocks (Małaśnicki et al. 2025, arXiv:2508.09752). The biases
of a router's choice move by `balance_rate`.

The first loss is exactly ln(vocabulary), unless embeddings are tied: these start at 1/sqrt(base_width) and keep the
embedding's learning rate; instead, logits are divided by w (Yang et al. 2022, Table 3 and section B.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ModelConfig, OptimizerConfig
from ..optimizer.registry import OPTIMIZERS, kind_of
from .gpt import GPT
from .shape import GROUPS, model_shape


@dataclass
class ParameterGroup:
    name: str
    parameters: Sequence[Tensor]
    learning_rate: float
    weight_decay: float
    eps: float
    optimizer: str = "adamw"


def output_scale(model: ModelConfig, optimizer: OptimizerConfig) -> float:
    return (optimizer.base_width / model.width) ** optimizer.width_exponent if model.tied_embeddings else 1.0


def build_model(model: ModelConfig, optimizer: OptimizerConfig, max_length: int, seed: int) -> GPT:
    gpt = GPT(model, max_length, output_scale(model, optimizer))
    parameters = dict(gpt.named_parameters())
    with torch.no_grad():
        for name, weights in initial_weights(model, optimizer, seed):
            parameters[name].copy_(weights)
    return gpt


def empty_model(model: ModelConfig, optimizer: OptimizerConfig, max_length: int) -> GPT:
    with torch.device("meta"):
        return GPT(model, max_length, output_scale(model, optimizer))


def initial_weights(model: ModelConfig, optimizer: OptimizerConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name and whole initial weights, fp32 on the CPU; a seed gives the same on any mesh."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model_shape(model).parameters:
        weights = torch.empty(parameter.shape)
        match parameter.role:
            case "norm" | "head norm" | "last norm":
                weights.fill_(1.0)
            case "head" | "bias" | "balance":
                weights.zero_()
            case "router":
                weights.normal_(std=optimizer.base_width**0.5 / model.width, generator=generator)
            case "embedding" | "tied" as role:
                weights.normal_(std=1.0 if role == "embedding" else optimizer.base_width**-0.5, generator=generator)
            case role:
                std = 1 / math.sqrt(parameter.shape[1])
                if role == "last":
                    depth = optimizer.base_depth or model.depth
                    std = std / math.sqrt(2 * depth) * branch_factor(model, optimizer)
                weights.normal_(std=std, generator=generator)
        yield parameter.name, weights


def branch_factor(model: ModelConfig, optimizer: OptimizerConfig) -> float:
    return 1.0 if optimizer.base_depth is None else optimizer.base_depth / model.depth


def parameter_groups(gpt: GPT, optimizer: OptimizerConfig) -> list[ParameterGroup]:
    width_factor = (optimizer.base_width / gpt.config.width) ** optimizer.width_exponent
    m, decay_factor = branch_factor(gpt.config, optimizer), 1.0 if optimizer.base_depth is None else width_factor
    rate, table_rate = optimizer.learning_rate * width_factor, optimizer.learning_rate * optimizer.embedding_multiplier
    decay, eps = optimizer.weight_decay / decay_factor, optimizer.eps
    rules = {
        "first": (rate, decay, eps * m * decay_factor),
        "latent": (rate, decay, eps * m * decay_factor),
        "last": (rate * m, decay / m, eps * decay_factor),
        "head": (rate, decay, eps),
        "router": (rate, decay, eps * m * decay_factor),
        "balance": (gpt.config.balance_rate, 0.0, eps),
        **dict.fromkeys(("norm", "head norm", "bias"), (table_rate, 0.0, eps * m * decay_factor)),
        **dict.fromkeys(("embedding", "tied", "last norm"), (table_rate, 0.0, eps * decay_factor)),
    }
    # The groups decide the order of elements in a bucket, and so how sums over it are rounded.
    groups = GROUPS if optimizer.base_depth is None else {role: (role,) for role in rules}
    tensors, parameters = dict(gpt.named_parameters()), model_shape(gpt.config).parameters
    kinds = dict.fromkeys(("adamw", "sign", optimizer.kind))  # parameters updated as whole matrices come last
    if (own_rate := OPTIMIZERS[optimizer.kind].rate) is not None:  # a rate that is the same at every width
        spectral = own_rate(optimizer)
        rules |= {
            **dict.fromkeys(("first", "latent"), (spectral, optimizer.weight_decay, eps)),
            "last": (spectral * m, optimizer.weight_decay / m, eps),
        }
    result = []
    for kind in kinds:
        for name, group_roles in groups.items():
            roles = [role for role in group_roles if kind_of(role, optimizer.kind) == kind]
            group_tensors = [tensors[p.name] for p in parameters if p.role in roles and p.name in tensors]
            if group_tensors:
                result.append(ParameterGroup(name, group_tensors, *rules[roles[0]], kind))
    return result
