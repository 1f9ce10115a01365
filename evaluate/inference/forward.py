"""The forward pass of a GPT for inference: the caller gives each token's position and the attention.

Tokens are one flat list, so no padding is computed, and only the caller's attention knows which tokens belong together.
On a CPU a small model's cost per token is its number of operations. Its matrices are kept a second time there, packed
in oneDNN's order: products of 16 rows took two thirds of the time, those of 500 rows four fifths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...train.hardware import on_gpu, out_of_memory, release_memory
from ...train.model.attention import causal_attention
from ...train.model.block import RMSNorm, gated, query_key_value, rotary_turn, rotated
from ...train.model.experts import MoE
from ...train.model.gpt import GPT, MLP, Attention, Block
from ...train.model.latent import LatentAttention

# (number of the block, query (n, heads, d), key (n, kv_heads, d), value (n, kv_heads, d)) -> (n, heads, d), rotated.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Product = Callable[[Tensor], Tensor]
Project = Callable[[Tensor, Product], tuple[Tensor, Tensor, Tensor]]  # (n, width) to query, key and value, rotated

T = TypeVar("T")

PACKED_BYTES = 1 << 29  # largest model whose matrices are kept twice


class Forward:
    """A model in eval mode, prepared for many passes; it may not see later changes of the weights.

    With `absorbed`, latent attention uses a token's latent as key and value of every head, which is what a decoder
    keeps. The matrices that would compute keys and values are applied to queries and to the mixed values instead.
    """

    def __init__(self, model: GPT, absorbed: bool = False) -> None:
        self.model = model
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        weight = model.head.weight
        packed = not on_gpu(weight) and size <= PACKED_BYTES and _packs(weight.dtype)
        self._blocks = []
        for block in cast(Iterable[Block], model.blocks):
            mixer, mlp = block.attention, block.mlp
            if isinstance(mixer, LatentAttention):
                project, out = _latent(mixer, packed, absorbed)
            else:
                project, out = _grouped_query(mixer, packed)
            feed = partial(mlp, length=0) if isinstance(mlp, MoE) else _feed(mlp, packed)
            self._blocks.append((block, project, out, feed))
        self._head = _product(weight, packed)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, read: Tensor | None = None) -> Tensor:
        """Return the input of the head for tokens (n,): (n or m, width), output multiplier included.

        Args:
            positions: (n,) of each token in its sequence, below `model.max_length`.
            attend: softmax(Q K^T / sqrt(d)) V over the tokens that each token sees.
            read: (m,) tokens whose result is returned, None for all. In the last block `attend` gets only their
                queries (m, heads, d), with all keys and values.
        """
        model, eps = self.model, self.model.config.norm_eps
        x = F.embedding(tokens, model.embedding.weight)
        turn = rotary_turn(model.cos[positions], model.sin[positions], x.dtype)
        rotate, width = partial(rotated, turn=turn), (x.shape[1],)
        for number, (block, project, out, feed) in enumerate(self._blocks):
            query, key, value = project(F.rms_norm(x, width, block.attention_norm.weight, eps), rotate)
            if read is not None and number == len(self._blocks) - 1:
                x, query = x[read], query[read]
            x = x.add_(out(attend(number, query, key, value)))
            x = x.add_(feed(F.rms_norm(x, width, block.mlp_norm.weight, eps)))
        x = F.rms_norm(x, width, model.norm.weight, eps)
        return x * model.output_scale if model.output_scale != 1.0 else x

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, width) -> (n, vocab_size): the padding of the vocabulary is cut off."""
        return self._head(hidden)[:, : self.model.head.vocab_size]


def attention_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asking: Sequence[int],
    lengths: Sequence[int],
    masks: Sequence[Tensor | None],
    window: int | None = None,
) -> Tensor:
    """Compute attention within consecutive sequences, without padding: (m, heads, d).

    Args:
        query: (m, heads, d).
        key: (n, kv_heads, d).
        value: (n, kv_heads, d or less).
        asking: Queries of each sequence; they sum to m.
        lengths: Tokens of each sequence; they sum to n.
        masks: Added to the scores of each sequence, (1, 1, asking, length). None: all tokens are queries and see the
            tokens before them, or the last token is the only query.
        window: Window of the masks.
    """
    parts = []
    for *tensors, mask in zip(query.split(asking), key.split(lengths), value.split(lengths), masks, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in tensors)
        narrow = v.shape[-1]
        v = v if narrow == k.shape[-1] else F.pad(v, (0, k.shape[-1] - narrow))  # kernels need equal widths
        if q.shape[2] == k.shape[2]:
            mixed = causal_attention(q, k, v, mask, window)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] > k.shape[1])
        parts.append(mixed[0, ..., :narrow].transpose(0, 1))
    return torch.cat(parts)


def unless_out_of_memory(work: Callable[[], T], device: torch.device) -> T | None:
    """Return the result of `work`, or None if memory ran out."""
    try:
        return work()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    # Outside of the clause, where the error's frames no longer hold tensors.
    release_memory(device)
    return None


def _product(weight: Tensor, packed: bool) -> Product:
    """Return the function that multiplies rows (n, in) by W^T: (n, out)."""
    if not packed:
        return partial(F.linear, weight=weight)
    packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed_weight, None, "none", [], "")


def _grouped_query(mixer: Attention, packed: bool) -> tuple[Project, Product]:
    qkv, out = (_product(matrix.weight, packed) for matrix in (mixer.qkv, mixer.out))
    norms = tuple(_norm(norm) for norm in mixer.norms)

    def project(x: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        products = qkv(x) if mixer.qkv_bias is None else qkv(x).add_(mixer.qkv_bias)
        return query_key_value(products.view(len(x), -1, mixer.head_dim), mixer.heads, mixer.kv_heads, norms, rotate)

    return project, lambda mixed: out(mixed.flatten(1))


def _latent(mixer: LatentAttention, packed: bool, absorbed: bool) -> tuple[Project, Product]:
    heads, d, r, rank = mixer.heads, mixer.head_dim, mixer.rotary, mixer.rank
    out = _product(mixer.out.weight, packed)
    if not absorbed:
        return (lambda x, rotate: mixer.split(mixer.project(x), rotate)), lambda mixed: out(mixed[..., :d].flatten(1))
    to_key, to_value = mixer.key_value.weight.view(heads, 2 * d, rank).chunk(2, dim=1)  # (heads, d, rank) each
    scale = ((rank + r) / (d + r)) ** 0.5  # the scores are of keys of d + r, and `attend` divides by those of rank + r

    def project(x: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        queries, latent, shared = mixer.compressed(x)
        query, turned = mixer.query(queries).view(len(x), heads, d + r).split((d, r), dim=-1)
        query = torch.cat((torch.einsum("nhd,hdc->nhc", query, to_key), rotate(turned)), dim=-1) * scale
        latent = latent[:, None]
        return query, torch.cat((latent, rotate(shared[:, None])), dim=-1), latent

    return project, lambda mixed: out(torch.einsum("nhc,hdc->nhd", mixed, to_value).flatten(1))


def _norm(norm: RMSNorm) -> Product:
    """Return PyTorch's own norm, which has fewer operations than our trainable one."""
    return partial(F.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight, eps=norm.eps)


def _feed(mlp: MLP, packed: bool) -> Product:
    gate_up, down = (_product(matrix.weight, packed) for matrix in (mlp.gate_up, mlp.down))
    return lambda x: down(gated(gate_up(x)))


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Return whether packed products of a type exist and are right.

    They are not public in PyTorch, so one is tried on small whole numbers, whose sums are exact in any order.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    rows, weight = (torch.arange(n * 16).remainder(5).sub(2).view(n, 16).to(dtype) for n in (3, 8))
    try:
        return torch.equal(_product(weight, packed=True)(rows), F.linear(rows, weight))
    except (AttributeError, RuntimeError, TypeError):
        return False
