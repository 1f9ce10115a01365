"""AdamW with decoupled weight decay (Loshchilov and Hutter 2019) over muP's parameter groups.

PyTorch's fused implementation does the arithmetic. The learning rate of every group is its own peak times the
schedule's factor, set before each step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import OptimizerConfig
from .model import GPT
from .parametrization import parameter_groups


def build_optimizer(gpt: GPT, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; each group remembers its peak learning rate as `peak`."""
    groups = [
        {"params": group.parameters, "lr": group.learning_rate, "peak": group.learning_rate, "name": group.name,
         "weight_decay": group.weight_decay}
        for group in parameter_groups(gpt, config)
    ]  # fmt: skip
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets every group to factor times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor


def clip_gradients(parameters: list[Tensor], max_norm: float) -> Tensor:
    """Scales gradients in place to a global L2 norm of at most max_norm (0: only measures); returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
