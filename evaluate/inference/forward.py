"""Passes through a GPT in which the caller says where each token stands and what it sees. For inference mode alone.

Tokens come as one flat list: no padding is computed, and only attention, which the caller brings, knows what belongs
together. For a small model on a CPU the number of operations is what a token costs. There its matrices are kept a
second time, packed in oneDNN's order: products of 16 rows took two thirds of the time, those of 500 four fifths.
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

PACKED_BYTES = 1 << 29  # of a model whose matrices are worth keeping twice


class Forward:
    """A model in eval mode, made ready for many passes; later changes of its weights may not be seen.

    With `absorbed` latent attention gives every head the one latent of a token for its key, and for its value: what a
    decoder keeps. The matrices that would make keys and values of it work on queries and on what is mixed.
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
        """What the head reads of tokens (n,): (n or m, width), the output multiplier included.

        `positions` (n,) are of each in its own sequence, below `model.max_length`; `attend` is softmax(Q K^T / sqrt(d))
        V over whatever each token sees. `read` (m,): the tokens whose result is wanted, None all; in the last block
        only they ask, and `attend` is given their queries (m, heads, d) beside all keys and values.
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
    """Attention within sequences that stand one after the other, nothing padded or gathered: (m, heads, d).

    query (m, heads, d); key (n, kv_heads, d); value of the same or narrower heads; `asking`, `lengths`: queries and
    tokens of each sequence, summing to m and n. `masks` are added to the scores of each, (1, 1, asking, length); None:
    all of its tokens ask and see what is before them, or its last one alone asks. `window`: that the masks were made
    with.
    """
    parts = []
    for *own, mask in zip(query.split(asking), key.split(lengths), value.split(lengths), masks, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in own)
        narrow = v.shape[-1]
        v = v if narrow == k.shape[-1] else F.pad(v, (0, k.shape[-1] - narrow))  # which kernels ask for
        if q.shape[2] == k.shape[2]:
            mixed = causal_attention(q, k, v, mask, window)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] > k.shape[1])
        parts.append(mixed[0, ..., :narrow].transpose(0, 1))
    return torch.cat(parts)


def unless_out_of_memory(work: Callable[[], T], device: torch.device) -> T | None:
    """What the work returns; None: memory ran out."""
    try:
        return work()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    # Outside of the clause: the frames of the error, which hold tensors, are gone.
    release_memory(device)
    return None


def _product(weight: Tensor, packed: bool) -> Product:
    """Of rows (n, in) the product with W^T, (n, out)."""
    if not packed:
        return partial(F.linear, weight=weight)
    kept = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, kept, None, "none", [], "")


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
    """PyTorch's own has fewer operations than ours, which can be trained."""
    return partial(F.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight, eps=norm.eps)


def _feed(mlp: MLP, packed: bool) -> Product:
    gate_up, down = (_product(matrix.weight, packed) for matrix in (mlp.gate_up, mlp.down))
    return lambda x: down(gated(gate_up(x)))


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether packed products of a type are there and right.

    They are no public part of PyTorch, so one is tried, on small whole numbers, of which any order of sums is exact.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    rows, weight = (torch.arange(n * 16).remainder(5).sub(2).view(n, 16).to(dtype) for n in (3, 8))
    try:
        return torch.equal(_product(weight, packed=True)(rows), F.linear(rows, weight))
    except (AttributeError, RuntimeError, TypeError):
        return False
