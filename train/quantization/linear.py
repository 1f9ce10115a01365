"""The blocks' matrix products with rounded factors, Y = Q(X) Q(W)^T, dX = Q(dY) Q(W), dW = Q(dY)^T Q(X).

Blocks lie along the inputs of a matrix in X and W, and along its outputs in dY. The products are computed in the run's
precision. Gradients pass a rounding unchanged, that of a clipped number too (straight-through estimator: Bengio et al.
2013, arXiv 1308.3432; so in BitNet, arXiv 2310.11453, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import QuantizationConfig, RunConfig
from ..model.gpt import GPT
from ..model.shape import Parameter, matrices_of
from ..parallel.layout import Placement
from .bits import block_of
from .formats import fake_quantize
from .noise import Noise, column_keys

Rounding = tuple[str, int, bool]  # format, block, hadamard


class QuantizedLinear(nn.Module):
    """The layer `linear`, (…, i) -> (…, o), with rounded factors and output gradient; blocks are those of `whole`."""

    rank = 0  # among the tensor-parallel ranks
    noise: Noise | None = None  # for stochastic rounding of the gradient, with keys of this rank's columns
    columns: Tensor | None = None

    def __init__(self, linear: nn.Module, whole: Parameter, settings: QuantizationConfig) -> None:
        super().__init__()
        self.weight = linear.get_parameter("weight")
        self.product = F.linear if isinstance(linear, nn.Linear) else linear.forward
        self.of_weight, self.of_input, self.of_gradient = (
            None if name == "none" else (name, block_of(name, width, settings.block), settings.hadamard)
            for name, width in zip(settings.formats.values(), (*whole.shape[1:] * 2, whole.shape[0]), strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(self.round_input(x), _Rounded.apply(self.weight, self.of_weight))
        if self.of_gradient is None or not torch.is_grad_enabled():
            return y
        rows, count = None if self.noise is None else self.noise.rows, y.numel() // y.shape[-1]
        if rows is not None and len(rows) > count:  # sequence parallelism: this rank has a share of the tokens
            rows = rows[self.rank * count : (self.rank + 1) * count]
        return _Rounded.apply(y, None, self.of_gradient, rows, self.columns)

    def round_input(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, self.of_input)


class _Rounded(torch.autograd.Function):
    """The rounded x, and a rounded gradient; each only where there is a rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_x: Rounding | None, of_gradient: Rounding | None = None, *keys: Any) -> Tensor:
        ctx.rounding = of_gradient
        ctx.save_for_backward(*keys)  # of the noise: rows and columns, or None
        return x.view_as(x) if of_x is None else fake_quantize(x, *of_x[:2], hadamard=of_x[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.rounding is not None:
            (format, block, hadamard), keys = ctx.rounding, ctx.saved_tensors
            grad = fake_quantize(grad, format, block, None if keys[0] is None else keys, hadamard)
        return grad, None, None, None, None


def quantize(
    gpt: GPT, config: RunConfig, placements: Mapping[str, Placement], rank: int, device: torch.device
) -> Noise | None:
    """Let a model's matrices round as `config.quantization` says. Call it after `parallelize`; `rank`: of its tp ranks.

    Returns the source of noise, or None if rounding is not stochastic.
    """
    settings, noise = config.quantization, None
    if settings.rounding == "stochastic":
        noise = Noise(config.seed, gpt.strategy.local_part)
        gpt.announce = noise.see
    for parameter in matrices_of(config.model) if settings.used else ():
        name = parameter.name.removesuffix(".weight")
        layer = QuantizedLinear(gpt.get_submodule(name), parameter, settings)
        layer.rank, layer.noise = rank, noise
        if noise is not None:
            pieces = placements[parameter.name].pieces
            outputs = [row for piece in pieces for row in range(piece.offset[0], piece.offset[0] + piece.size[0])]
            layer.columns = column_keys(parameter.name, outputs, device)
        gpt.set_submodule(name, layer)
    return noise


@torch.no_grad()
def quantize_for_evaluation(gpt: GPT, config: RunConfig) -> None:
    """Round a whole model's weights once, and its activations in every pass, as in the run's own validation."""
    for parameter in matrices_of(config.model) if config.quantization.used else ():
        name = parameter.name.removesuffix(".weight")
        layer = QuantizedLinear(gpt.get_submodule(name), parameter, config.quantization)
        layer.weight.copy_(_Rounded.apply(layer.weight, layer.of_weight))
        layer.of_weight = layer.of_gradient = None
        if layer.of_input is not None:
            gpt.set_submodule(name, layer)
