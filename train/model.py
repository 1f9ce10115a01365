"""A GPT of our own: pre-norm decoder, RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Special here:
- query, key and value come from one matrix product, and so do the MLP's gate and its up projection;
- the vocabulary is padded to a round size for speed, and the padding is masked, so it is never predicted;
- the residual branches' last matrices and the head start small or at zero (see `parametrization.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import apply_rotary, causal_attention, rotary_angles
from .config import ModelConfig
from .errors import UserError


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = (mean x^2 + eps)^-1/2, in 4 passes over x, and 7 for the derivative.

    With u = x r: dw = sum dy u, dx = r (dy w - u mean(dy w u)).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        slope = (grad * unit).flatten(0, -2)
        mean = torch.mv(slope, weight).div_(x.shape[-1]).view(scale.shape)
        dx = (grad * weight).addcmul_(unit, mean, value=-1).mul_(scale)
        return dx, slope.sum(0), None


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (Zhang and Sennrich 2019). On CPUs, where PyTorch has no fused one, with our derivative."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype == torch.bfloat16 or torch.compiler.is_compiling():
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up with gate, up the halves of x (..., 2 h) -> (..., h)."""
    if torch.compiler.is_compiling():
        # The compiler fuses the plain expression, and cannot trace writes into halves of a tensor.
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return SwiGLU.apply(x)


class SwiGLU(torch.autograd.Function):
    """y = silu(gate) * up with gate, up the halves of x (..., 2 h); saves x alone and recomputes the sigmoid."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        d_gate, d_up = dx.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(torch.mul(grad, up), gate, grad_input=d_gate)
        return dx


class Attention(nn.Module):
    """Grouped-query causal self-attention, (batch, time, width) -> (batch, time, width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.head_dim
        self.qkv = nn.Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.query_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, self.heads + 2 * self.kv_heads, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            query = apply_rotary(self.query_norm(query).to(value.dtype), cos, sin)
            key = apply_rotary(self.key_norm(key).to(value.dtype), cos, sin)
        else:
            # Queries and keys turn by the same angles: one rotation serves both.
            query_key, value = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
            query, key = apply_rotary(query_key, cos, sin).split((self.heads, self.kv_heads), dim=2)
        mixed = causal_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020), (batch, time, width) -> (batch, time, width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.mlp_hidden, bias=False)
        self.down = nn.Linear(config.mlp_hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Under autocast a branch ends in bf16. Adding like to like is what CPUs have a fast path for.
        x = x + self.attention(self.attention_norm(x), cos, sin).to(x.dtype)
        return x + self.mlp(self.mlp_norm(x)).to(x.dtype)


class GPT(nn.Module):
    """Token ids (batch, time) -> logits (batch, time, padded vocabulary), padding at -inf.

    Args:
        config: the architecture; `vocab_size` must be set.
        max_length: longest sequence that forward accepts.
        output_scale: factor on the logits (muP's output multiplier when embeddings are tied).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, max_length: int, output_scale: float = 1.0) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UserError("model.vocab_size is None; it is filled in from the tokenizer by the planner")
        self.config, self.max_length, self.output_scale = config, max_length, output_scale
        self.embedding = nn.Embedding(config.padded_vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.padded_vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_angles(max_length, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        if time > self.max_length:
            raise ValueError(f"sequence of {time} tokens is longer than the model's {self.max_length}")
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        if self.output_scale != 1.0:
            logits = logits * self.output_scale
        if self.config.padded_vocab_size != self.config.vocab_size:
            logits[..., self.config.vocab_size :] = float("-inf")
        return logits

    def compile_blocks(self) -> None:
        """Compiles block by block: every block of one width shares one compilation, whatever the depth."""
        for block in self.blocks:
            block.compile()


def next_token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats, computed in fp32. logits (batch, time, vocabulary), targets (batch, time)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


@torch.no_grad()
def sequence_losses(model: GPT, windows: Tensor, batch_tokens: int = 16384) -> Tensor:
    """Summed nats of each window of tokens (n, T + 1) -> (n,) float64. The model's mode and device are the caller's."""
    rows = max(1, batch_tokens // (windows.shape[1] - 1))
    losses = []
    for start in range(0, len(windows), rows):
        chunk = windows[start : start + rows].to(model.embedding.weight.device)
        logits = model(chunk[:, :-1])
        per_token = next_token_loss(logits, chunk[:, 1:], reduction="none")
        losses.append(per_token.view(len(chunk), -1).double().sum(dim=1).cpu())
    return torch.cat(losses)
