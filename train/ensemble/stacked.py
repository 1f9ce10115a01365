"""The GPT of `model.py` with a leading axis of members: E models of one shape in one forward and one backward pass.

With E members, n = B T tokens of each, width w, rows V of the padded vocabulary:

    weights     (E, out, in), (E, w), (E, V, w)     by the names of `GPT.named_parameters`
    streams     (E, n, w)                           a product is one batched product over members
    attention   (E B, T, heads, d)                  has no weights: it sees E times as many sequences

Special here:
- no operation mixes members, so what one does (a NaN too) reaches no other;
- on CPUs a member's numbers are those of `model.py` bit for bit: a batched product gives the bits of the plain ones,
  and every other operation is the same, in the same order. So no rounding grows into another course of training;
- the head's product and the loss go through `linear_cross_entropy` member by member: it works in chunks that fill the
  cache, or the GPU, by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..config import ModelConfig
from ..model.backends import Backend
from ..model.block import apply_rotary, lookup, query_key_value, rms_norm, swiglu
from ..model.gpt import GPT
from ..model.loss import linear_cross_entropy
from ..model.shape import shape_of

Weights = Mapping[str, Tensor]


class StackedGPT:
    """E models that share a shape. It owns no weights, and follows whoever changes them.

    Args:
        template: a GPT of that shape; its angles lie on the device, its own weights are not looked at.
        weights: of all members, at least fp32; what is trained, or views of it.
        output_scale: (E,) of each member, of the weights' type.
        dtype: of products and streams.
        compiled: whether blocks go through `torch.compile`.
    """

    def __init__(
        self, template: GPT, weights: Weights, output_scale: Tensor, dtype: torch.dtype, compiled: bool = False
    ) -> None:
        self.template, self.weights, self.output_scale, self.dtype = template, weights, output_scale, dtype
        self.config = template.config
        whole = partial(_block, self.config, template.backend)
        self._block = torch.compile(whole) if compiled else whole
        names = [name.removeprefix("blocks.0.") for name in weights if name.startswith("blocks.0.")]
        self._of_block = [{n: weights[f"blocks.{i}.{n}"] for n in names} for i in range(self.config.depth)]

    def losses(self, tokens: Tensor, targets: Tensor, z_losses: Sequence[float]) -> Tensor:
        """Every member's mean loss with its z-loss, in nats, fp32: ids (E, B, T) -> (E,)."""
        return torch.stack(self._losses(tokens, targets, "mean", z_losses))

    @torch.no_grad()
    def each_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Every token's loss, to score: ids (E, B, T) -> (E, B, T)."""
        return torch.stack(self._losses(tokens, targets, "none", [0.0] * len(tokens))).view(targets.shape)

    def _losses(self, tokens: Tensor, targets: Tensor, reduction: str, z_losses: Sequence[float]) -> list[Tensor]:
        vocabulary = self.config.vocab_size
        assert vocabulary is not None
        # A tied table is cast once, so that its two gradients are added in the type in which a run alone adds them.
        table = self.weights["embedding.weight"].to(self.dtype)
        head = table if self.config.tied_embeddings else self.weights["head.weight"].to(self.dtype)
        # Not by an index: the derivative of unbind is one stack, that of an index a whole tensor of zeros.
        members = zip(
            self._last_hidden(tokens, table).unbind(), head.unbind(), targets.flatten(1), z_losses, strict=True
        )
        return [linear_cross_entropy(x, w, ids, vocabulary, reduction, z) for x, w, ids, z in members]

    def _last_hidden(self, tokens: Tensor, table: Tensor) -> Tensor:
        """What the head reads, (E, n, w), with rows of the tables (E, V, w) at the beginning."""
        config, weights = self.config, self.weights
        members, batch, time = tokens.shape
        cos, sin = self.template.cos[:time], self.template.sin[:time]
        x = lookup(tokens.flatten(1), table)
        seen = self.template.seen(tokens.view(members * batch, time), x.dtype)
        for of_block in self._of_block:
            x = self._block(x, of_block, cos, sin, seen[0] if seen else None)
        # A scalar of `GPT` is not rounded to bf16 before the product: nor is this.
        return (_norm(x, weights["norm.weight"], config.norm_eps) * self.output_scale[:, None, None]).to(self.dtype)


def _block(
    config: ModelConfig, backend: Backend, x: Tensor, weights: Weights, cos: Tensor, sin: Tensor,
    seen: Tensor | None,
) -> Tensor:  # fmt: skip
    """One pre-norm decoder block of every member, (E, n, w) -> (E, n, w)."""

    def norm(name: str, x: Tensor) -> Tensor:
        return _norm(x, weights[f"{name}_norm.weight"], config.norm_eps)

    def head_norm(name: str, x: Tensor) -> Tensor:
        return norm(f"attention.{name}", x.unflatten(0, (len(weights["attention_norm.weight"]), -1))).flatten(0, 1)

    def times(x: Tensor, name: str) -> Tensor:
        return product(x, weights[f"{name}.weight"].to(x.dtype))

    heads, kv_heads = config.heads, config.num_kv_heads
    # (E, n, …) -> (E B, T, heads, d): in attention members are sequences among sequences.
    fused = times(norm("attention", x), "attention.qkv").view(-1, len(cos), heads + 2 * kv_heads, config.head_dim)
    norms = tuple(partial(head_norm, name) for name in ("query", "key")) if shape_of(config).head_norms else ()
    query, key, value = query_key_value(fused, heads, kv_heads, norms, lambda x: apply_rotary(x, cos, sin))
    mixed = backend.attend(query, key, value, seen, config.window).reshape(x.shape)
    x = x + times(mixed, "attention.out")
    return x + times(swiglu(times(norm("mlp", x), "mlp.gate_up")), "mlp.down")


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each member's own norm: (E, …, w), weight (E, w) -> (E, …, w)."""
    return rms_norm(x, weight.to(x.dtype).view(len(weight), *(1,) * (x.dim() - 2), -1), eps)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Streams (E, n, k) times weights (E, m, k), transposed -> (E, n, m)."""
    if torch.compiler.is_compiling():
        return torch.bmm(x, weight.transpose(1, 2))
    return _Product.apply(x, weight)


class _Product(torch.autograd.Function):
    """y = x W^T for each member; dx = dy W, dW = dy^T x. Autograd's own dW would come out transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.bmm(grad, weight), torch.bmm(grad.transpose(1, 2), x)
