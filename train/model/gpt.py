"""A pre-norm decoder with RMSNorm, rotary positions, SwiGLU and grouped-query attention.

The vocabulary is padded to a round size for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..errors import UserError
from ..hardware import read
from .attention import document_starts
from .backends import SDPA, Backend, Choice, select_backend
from .block import RMSNorm, apply_rotary, lookup, query_key_value, rotary_angles, rotary_turn, swiglu
from .experts import MoE, Penalised, Router
from .latent import LatentAttention
from .loss import linear_cross_entropy
from .recompute import checkpointed, recomputed
from .strategy import ALONE, Strategy

Stream = Tensor | tuple[Tensor, Tensor | None]  # the residual stream; with a mixture of experts also its penalty


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if self.weight.device.type != "meta":  # drawing there imports the compiler; see `GPT.place_angles`
            super().reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        return lookup(tokens, self.weight)


class Attention(nn.Module):
    """Grouped-query causal self-attention, (…, width) -> (…, width), … being batch and time."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.head_dim
        self.qkv = nn.Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        # Not the bias of nn.Linear: added separately, it rounds the same in inference and on tensor-parallel ranks.
        self.qkv_bias = nn.Parameter(torch.zeros(self.qkv.out_features)) if config.qkv_bias else None
        self.out = nn.Linear(self.heads * self.head_dim, config.width, bias=False)
        self.query_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        # Index of the only key/value head that is used here; None: each serves its share of the query heads. With
        # fewer key/value heads than ranks, a tensor-parallel rank has all of them and uses one.
        self.served_by: int | None = None
        self.window, self.backend = config.window, SDPA

    @property
    def norms(self) -> tuple[RMSNorm, ...]:
        return () if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)

    def take_heads(self, ranks: int, rank: int) -> None:
        self.heads //= ranks
        if self.kv_heads >= ranks:
            self.kv_heads //= ranks
        else:  # this rank has them all, and each serves ranks / kv_heads ranks
            self.served_by = rank * self.kv_heads // ranks

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        return self.out(self.mix(self.project(x), cos, sin, seen))

    def project(self, x: Tensor) -> Tensor:
        return self.qkv(x)

    def mix(self, products: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        """Compute attention, (…, heads * head_dim), from `products`: fused query, key and value (…, rows of qkv).

        … is (batch, time) or (batch * time), with time the length of `cos`. `seen`: see `GPT.seen`.
        """
        if self.qkv_bias is not None:
            products = products + self.qkv_bias
        fused = products.view(-1, len(cos), self.heads + 2 * self.kv_heads, self.head_dim)
        query, key, value = query_key_value(
            fused, self.heads, self.kv_heads, self.norms, lambda x: apply_rotary(x, cos, sin)
        )
        if self.served_by is not None:
            key, value = (x[:, :, self.served_by : self.served_by + 1] for x in (key, value))
        mixed = self.backend.attend(query, key, value, seen, self.window)
        return mixed.reshape(*products.shape[:-2], -1, self.heads * self.head_dim)


class MLP(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020), (…, width) -> (…, width)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


class Block(nn.Module):
    """One pre-norm decoder block.

    Saved for the backward pass (`recompute.py`), per token, with w the width, h the MLP's inner width, H heads and K
    key/value heads of size d:

        full        x (w)
        selective   x (w), query-key-value product ((H + 2K) d), stream after attention (w), gate-up product (2h)
        none        these, the norms' outputs (2w), attention's inputs and output, SwiGLU's product (h)

    A mixture of experts saves its rows' first product, k (2h), their gates (k) and 2k indices instead of gate-up and
    SwiGLU's product.
    """

    def __init__(self, config: ModelConfig, experts: bool = False) -> None:
        super().__init__()
        self.recompute = "none"
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        latent = config.attention == "mla"
        self.attention: Attention | LatentAttention = LatentAttention(config) if latent else Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        shared = MLP(config.width, config.shared_experts * config.moe_hidden) if config.shared_experts else None
        self.mlp: MLP | MoE = MoE(config, shared) if experts else MLP(config.width, config.mlp_hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *seen: Tensor, rows: Tensor | None = None) -> Stream:
        """Return the residual stream after the block, and in a mixture of experts also the router's penalty.

        Args:
            seen: nothing, or the tensor from `GPT.seen`.
            rows: in inference, indices (m,) of the rows of x (n, w) to return; the backend must select these queries.
        """
        if self.recompute == "full":
            return checkpointed(self._plain, x, cos, sin, *seen)
        if self.recompute == "selective":
            return self._selective(x, cos, sin, *seen)
        return self._plain(x, cos, sin, *seen, rows=rows)

    def _plain(self, x: Tensor, cos: Tensor, sin: Tensor, *seen: Tensor, rows: Tensor | None = None) -> Stream:
        mixed = self.attention(self.attention_norm(x), cos, sin, *seen)
        x = (x if rows is None else x[rows]) + mixed
        return self._feed(x, self.mlp_norm(x), cos)

    def _feed(self, x: Tensor, normed: Tensor, cos: Tensor) -> Stream:
        if not isinstance(self.mlp, MoE):
            return x + self.mlp(normed)
        y, penalty = self.mlp(normed, len(cos))
        return x + y, penalty

    def _selective(self, x: Tensor, cos: Tensor, sin: Tensor, *seen: Tensor) -> Stream:
        attention, mlp = self.attention, self.mlp
        products = recomputed(self.attention_norm, attention.project, x)
        middle = recomputed(attention.mix, lambda mixed: x + attention.out(mixed), products, cos, sin, *seen)
        if isinstance(mlp, MoE):
            return recomputed(self.mlp_norm, lambda normed: self._feed(middle, normed, cos), middle)
        products = recomputed(self.mlp_norm, mlp.gate_up, middle)
        return recomputed(swiglu, lambda inner: middle + mlp.down(inner), products)


class Head(nn.Linear):
    """Logits of the next token, (…, width) -> (…, padded vocabulary), or with targets their losses."""

    def __init__(self, width: int, padded: int, vocab_size: int) -> None:
        super().__init__(width, padded, bias=False)
        self.vocab_size, self.fused = vocab_size, True  # see `linear_cross_entropy`

    def whole(self, logits: Tensor) -> Tensor:
        if self.vocab_size != logits.shape[-1]:
            logits[..., self.vocab_size :] = float("-inf")
        return logits

    def forward(self, x: Tensor, targets: Tensor | None = None, reduction: str = "mean", z_loss: float = 0.0) -> Tensor:
        if targets is None:
            return super().forward(x)
        losses = linear_cross_entropy(
            x.flatten(0, -2), self.weight, targets.flatten(), self.vocab_size, reduction, z_loss, self.fused
        )
        return losses.view(targets.shape) if reduction == "none" else losses


class GPT(nn.Module):
    """Token ids (batch, time) -> logits (batch, time, padded vocabulary), padding at -inf.

    Args:
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
        self.embedding = Embedding(config.padded_vocab_size, config.width)
        dense = config.dense_layers if config.experts else config.depth
        self.blocks = nn.ModuleList(Block(config, experts=number >= dense) for number in range(config.depth))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = Head(config.width, config.padded_vocab_size, config.vocab_size)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        self.backend: Backend = SDPA
        self.strategy = ALONE
        self.chunks = [range(config.depth)]  # of blocks; a pipeline rank has some of them, see `keep`
        # Id of the token that ends a document. If set, a token sees only its own document; positions stay absolute.
        # Set it before `set_attention`, because not every backend supports it.
        self.end_of_document: int | None = None
        self.announce: Callable[[Tensor], None] = lambda tokens: None  # called with the tokens of every pass
        self.place_angles()

    def place_angles(self, device: torch.device | None = None) -> None:
        """Compute the rotary `cos` and `sin`. A model built on `meta` needs this before its first step."""
        if (device or torch.get_default_device()).type == "meta":
            # No arithmetic here: on meta PyTorch's arithmetic imports the compiler, which takes more than a second.
            cos = sin = torch.empty(self.max_length, self.config.rotary // 2, device="meta")
        else:
            config = self.config
            cos, sin = rotary_angles(self.max_length, config.rotary, config.rope_theta, device, config.rope)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPT:
        """Apply `fn` to all tensors, then compute the rotary angles again, to keep them fp32."""
        super()._apply(fn, recurse)
        self.place_angles(self.cos.device)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head.whole(self.logits(tokens)).view(*tokens.shape, -1)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits, padding included; a tensor-parallel rank returns only its columns."""
        return self.head(self.last_hidden(tokens))

    def last_hidden(self, tokens: Tensor) -> Tensor:
        """Return the head's input, the normalised residual stream, for this rank's tokens."""
        return self.leave(self.through(self.enter(tokens), tokens)[0])

    def enter(self, tokens: Tensor) -> Tensor:
        return self.embedding(self.strategy.local_part(tokens, 1))

    def through(self, x: Tensor, tokens: Tensor, chunk: int = 0) -> tuple[Tensor, Tensor | None]:
        """Run the blocks of chunk number `chunk` on x, the residual stream of `tokens` (batch, time).

        Returns the stream, and the sum of the routers' penalties (None: no experts, or no gradients).
        """
        time = tokens.shape[1]
        if time > self.max_length:
            raise ValueError(f"sequence of {time} tokens is longer than the model's {self.max_length}")
        self.announce(tokens)
        local = self.strategy.local_part
        turn = rotary_turn(local(self.cos[:time], 0), local(self.sin[:time], 0), x.dtype)
        seen, penalty = self.seen(tokens, x.dtype), None
        for number in self.chunks[chunk]:
            out = self.blocks[number](x, *turn, *seen)
            x, added = out if isinstance(out, tuple) else (out, None)
            if added is not None:
                penalty = added if penalty is None else penalty + added
        return x, penalty

    def leave(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        # The scale belongs to the logits, and the vocabulary is wider than the model.
        return x * self.output_scale if self.output_scale != 1.0 else x

    def seen(self, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the mask or first visible position of each query, as a tuple; () if it sees all keys up to its own."""
        first = None if self.end_of_document is None else document_starts(tokens, self.end_of_document)
        seen = self.backend.seen(tokens, first, self.config.window, dtype)
        return () if seen is None else (seen,)

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean", z_loss: float = 0.0) -> Tensor:
        """Return cross-entropy plus z-loss in nats, fp32: the mean, or with reduction `none` per token, (batch, time).

        A context-parallel rank counts only its tokens. Routers' penalties add to the gradient, not to the value.
        """
        x, penalty = self.through(self.enter(tokens), tokens)
        return self.score(x, penalty, targets, reduction, z_loss)

    def score(
        self, x: Tensor, penalty: Tensor | None, targets: Tensor, reduction: str = "mean", z_loss: float = 0.0
    ) -> Tensor:
        losses: Tensor = self.head(self.leave(x), self.strategy.local_part(targets, 1), reduction, z_loss)
        return losses if penalty is None else Penalised.apply(losses, penalty)

    def keep(self, chunks: Sequence[range], embeds: bool, scores: bool) -> None:
        """Keep only the blocks in `chunks`, the embedding if `embeds`, and norm and head (and tied table) if `scores`.

        Parameters keep their names.
        """
        self.chunks = list(chunks)
        for number in range(len(self.blocks)):
            if not any(number in chunk for chunk in chunks):
                self.blocks[number] = nn.Identity()
        if not embeds and not (scores and self.config.tied_embeddings):
            self.register_module("embedding", nn.Identity())
        for name in () if scores else ("norm", "head"):
            self.register_module(name, nn.Identity())

    def chunk_of(self, parameter: str) -> int:
        """Return which of this rank's chunks, by index, computes a parameter's gradient in its backward pass."""
        owner, number, *_ = parameter.split(".")
        if owner == "blocks":
            return next(place for place, chunk in enumerate(self.chunks) if int(number) in chunk)
        return 0 if owner == "embedding" and self.chunks[0].start == 0 else len(self.chunks) - 1

    @property
    def mixtures(self) -> list[MoE]:
        return [module for module in self.modules() if isinstance(module, MoE)]

    def loads(self) -> Tensor | None:
        """Return each expert's training tokens since the last call, (blocks with experts, experts); None if none."""
        routers = [moe.router for moe in self.mixtures]
        loads = [router.load for router in routers]
        for router in routers:
            router.load = None
        return torch.stack([load for load in loads if load is not None]) if loads and None not in loads else None

    def set_attention(self, requested: str, device: torch.device, dtype: torch.dtype) -> Choice:
        """Set the attention backend `requested`, or for `auto` choose one. Raises UserError if it cannot be used."""
        has_window = self.config.window is not None and self.config.window < self.max_length
        has_documents = self.end_of_document is not None
        masks = has_window, has_documents, self.strategy.attention is not None
        choice, backend = select_backend(requested, device, dtype, self.config.key_dim, *masks)
        self.use(backend)
        return choice

    def follow(self, strategy: Strategy) -> None:
        """Set in all modules how ranks communicate; call before `set_attention`."""
        for module in self.modules():
            if isinstance(module, GPT | LatentAttention | MoE | Router):
                module.strategy = strategy
        self.use(self.backend)

    def use(self, backend: Backend) -> None:
        share = self.strategy.attention
        self.backend = backend = backend if share is None else share(backend)
        for module in self.modules():
            if isinstance(module, Attention | LatentAttention):
                module.backend = backend

    def set_recompute(self, mode: str) -> None:
        """Set what blocks recompute in the backward pass: none | selective | full, see `Block`."""
        for block in self.blocks:
            if isinstance(block, Block):
                block.recompute = mode

    def compile_blocks(self) -> None:
        """Compile each block, without mixtures of experts and ZeRO-3's hooks; equal blocks share one compilation."""
        mixtures: list[nn.Module] = [module for module in self.modules() if isinstance(module, MoE)]
        for mixture in mixtures:  # here and not in the class, because that imports the compiler
            mixture.forward = torch.compiler.disable(mixture.forward)
        for block in self.blocks:
            if not isinstance(block, nn.Identity):
                block.forward = torch.compile(block.forward)


@torch.no_grad()
def sequence_losses(
    model: GPT,
    windows: Tensor,
    batch_tokens: int = 16384,
    beat: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return the loss in nats summed over each row of `windows`, tokens (n, T + 1): (n,) float64 on the CPU.

    `beat` is called before every forward pass of about `batch_tokens` tokens.
    """
    rows = max(1, batch_tokens // (windows.shape[1] - 1))
    losses = []
    for start in range(0, len(windows), rows):
        beat()
        chunk = windows[start : start + rows].to(model.cos.device)
        losses.append(read(model.loss(chunk[:, :-1], chunk[:, 1:], reduction="none").double().sum(dim=1)))
    return torch.cat(losses)
