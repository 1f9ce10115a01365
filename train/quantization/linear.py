"""The blocks' matrix products with rounded factors, Y = Q(X) Q(W)^T, dX = Q(dY) Q(W), dW = Q(dY)^T Q(X).

Blocks lie along the inputs of a matrix in X and W, and along its outputs in dY. The products are computed in the run's
precision. Gradients pass a rounding unchanged, that of a clipped number too (straight-through estimator: Bengio et al.
2013, arXiv 1308.3432; so in BitNet, arXiv 2310.11453, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import QuantizationConfig, RunConfig
from ..model.gpt import GPT
from ..model.shape import Parameter, model_shape
from ..parallel.layout import Placement
from .bits import MATRICES
from .formats import block_of, fake_quantize
from .noise import Noise, column_keys


class QuantizedLinear(nn.Module):
    """A linear layer (…, i) -> (…, o) with rounded factors, and a rounded gradient of its output.

    Args:
        linear: The layer that this one replaces, whose weight it has.
        parameter: The whole matrix; its size decides the blocks, on any mesh.
        noise: Of the gradient, with the keys of this rank's columns; None: it is rounded to the nearest number.
        rank: Among the tensor-parallel ranks.
    """

    def __init__(
        self,
        linear: nn.Module,
        parameter: Parameter,
        settings: QuantizationConfig,
        noise: tuple[Noise, Tensor] | None,
        rank: int,
    ) -> None:
        super().__init__()
        self.weight, self.rank = linear.weight, rank
        self.product = F.linear if isinstance(linear, nn.Linear) else linear.forward
        outputs, inputs = parameter.shape
        # Arguments of `fake_quantize`, or None.
        self.of_weight, self.of_input, self.of_gradient = (
            None if name == "none" else (name, block_of(name, width, settings.block))
            for name, width in zip(settings.formats.values(), (inputs, inputs, outputs), strict=True)
        )
        self.hadamard = settings.hadamard
        self.noise, self.columns = noise or (None, None)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.of_weight is None else _Rounded.apply(self.weight, *self.of_weight, self.hadamard)
        y: Tensor = self.product(self.round_input(x), weight)
        if self.of_gradient is None or not torch.is_grad_enabled():
            return y
        keys = None if self.noise is None else self._rows(self.noise.rows, y.numel() // y.shape[-1])
        return _RoundedGradient.apply(y, *self.of_gradient, keys, self.columns, self.hadamard)

    def round_input(self, x: Tensor) -> Tensor:
        return x if self.of_input is None else _Rounded.apply(x, *self.of_input, self.hadamard)

    def _rows(self, keys: Tensor, count: int) -> Tensor:
        """Return the keys of the layer's `count` tokens: all, or with sequence parallelism this rank's share."""
        return keys if len(keys) == count else keys[self.rank * count : (self.rank + 1) * count]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, block: int, hadamard: bool) -> Tensor:
        return fake_quantize(x, format, block, hadamard=hadamard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        format: str,
        block: int,
        rows: Tensor | None,
        columns: Tensor | None,
        hadamard: bool,
    ) -> Tensor:
        ctx.settings = format, block, hadamard
        ctx.save_for_backward(rows, columns)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (format, block, hadamard), (rows, columns) = ctx.settings, ctx.saved_tensors
        noise = None if rows is None else (rows, columns)
        return fake_quantize(grad, format, block, noise, hadamard), *[None] * 5


def quantize(
    gpt: GPT, config: RunConfig, placements: Mapping[str, Placement], rank: int = 0, device: torch.device | None = None
) -> None:
    """Replace a model's matrices by layers that round as `config.quantization` says; without formats do nothing.

    Call it after `parallelize`, whose `placements` say which outputs this tensor-parallel rank has.
    """
    settings = config.quantization
    if not settings.used:
        return
    if settings.rounding == "stochastic":
        gpt.noise = Noise(config.seed, gpt.strategy.own)
    for parameter in _matrices(config):
        name, noise = parameter.name.removesuffix(".weight"), None
        if gpt.noise is not None:
            pieces = placements[parameter.name].pieces
            outputs = [row for piece in pieces for row in range(piece.offset[0], piece.offset[0] + piece.size[0])]
            noise = gpt.noise, column_keys(parameter.name, outputs, device)
        gpt.set_submodule(name, QuantizedLinear(gpt.get_submodule(name), parameter, settings, noise, rank))


@torch.no_grad()
def quantize_for_evaluation(gpt: GPT, config: RunConfig) -> None:
    """Round a whole model's weights once, and its activations in every pass, as in the run's own validation."""
    settings = config.quantization
    for parameter in _matrices(config) if settings.weights != "none" else ():
        weight, block = (
            gpt.get_parameter(parameter.name),
            block_of(settings.weights, parameter.shape[1], settings.block),
        )
        weight.copy_(fake_quantize(weight, settings.weights, block, hadamard=settings.hadamard))
    rest = replace(settings, weights="none", gradients="none", rounding="nearest")
    quantize(gpt, replace(config, quantization=rest), {})


def _matrices(config: RunConfig) -> list[Parameter]:
    return [parameter for parameter in model_shape(config.model).parameters if parameter.role in MATRICES]
