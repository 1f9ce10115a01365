"""The forward pass of a GPT for inference: its own blocks, with attention that the caller supplies.

Tokens are one flat list, so no padding is computed; only the caller's attention knows which tokens belong together. On
a CPU a small model's matrices are also kept packed in oneDNN's order: products of 16 rows took two thirds of the time.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...train.config import ModelConfig
from ...train.hardware import on_gpu, out_of_memory, release_memory
from ...train.model.attention import causal_attention
from ...train.model.backends import SDPA, Backend
from ...train.model.block import apply_rotary, rotary_turn
from ...train.model.gpt import GPT
from ...train.model.latent import LatentAttention
from ...train.quantization.linear import QuantizedLinear

# (number of the block, query (n, heads, d), key (n, kv_heads, d), value (n, kv_heads, d)) -> (n, heads, d), rotated.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Ids = npt.NDArray[np.int64]
T = TypeVar("T")

PACKED_BYTES = 1 << 29  # largest model whose matrices are kept twice
# oneDNN, and PyTorch for it, keep a compiled product of each shape, by default 1,024 with megabytes of work space each.
# Texts seldom have a shape again. A worker may also train in this process, and a step in bf16 has about 15 shapes.
PRODUCTS = 32


class Forward:
    """A model in eval mode, prepared for many passes; it may not see later changes of the weights.

    With `absorbed`, latent attention uses a token's latent vector, which `Cache` stores, as key and value of all heads.
    """

    def __init__(self, model: GPT, absorbed: bool = False) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})  # modules, over the same weights
        weight, size = model.head.weight, sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        self._head: nn.Module = self.model.head
        if not on_gpu(weight) and size <= PACKED_BYTES and _packs(weight.dtype):
            self._head = _Packed(weight)
            for parent in list(self.model.blocks.modules()):
                for name, module in parent.named_children():
                    if isinstance(module, nn.Linear):
                        setattr(parent, name, _Packed(module.weight))
        for block in self.model.blocks:
            if absorbed and isinstance(block.attention, LatentAttention):
                block.attention = _Absorbed(block.attention)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, read: Tensor | None = None) -> Tensor:
        """Run the model on tokens (n,); return the output head's input, (n, width), or (m, width) with `read`.

        Args:
            positions: (n,) position of each token in its sequence, below `model.max_length`.
            attend: Computes softmax(Q K^T / sqrt(d)) V over the tokens that each token sees.
            read: (m,) indices of the tokens to return; None for all. In the last block `attend` gets only their
                queries, (m, heads, d), but all keys and values.
        """
        model = self.model
        x = model.embedding(tokens)
        turn = rotary_turn(model.cos[positions], model.sin[positions], x.dtype)
        for number, block in enumerate(model.blocks):
            rows = read if number == len(model.blocks) - 1 else None
            block.attention.backend = _backend(attend, number, rows)  # type: ignore[union-attr]
            out = block(x, *turn, rows=rows)
            x = out[0] if isinstance(out, tuple) else out  # without the penalty of a router
        return model.leave(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits (n, vocab_size) from the head's input (n, width)."""
        logits: Tensor = self._head(hidden)
        return logits[:, : self.model.head.vocab_size]


def _backend(attend: Attend, number: int, rows: Tensor | None) -> Backend:
    def kernel(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, window: int | None) -> Tensor:
        return attend(number, query[0] if rows is None else query[0, rows], key[0], value[0])[None]

    return Backend("inference", kernel, "nothing")


class _Packed(nn.Module):
    """A linear layer, (n, in) to (n, out), with its weight packed for speed on CPUs."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.packed = weight, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return product


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Test whether oneDNN's packed matrix products, which PyTorch does not document, work for this dtype here.

    The test makes the process's first product, so it also sets how many of them oneDNN keeps.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(PRODUCTS))
    rows, weight = (torch.arange(n * 16).remainder(5).sub(2).view(n, 16).to(dtype) for n in (3, 8))
    try:
        return torch.equal(_Packed(weight)(rows), F.linear(rows, weight))
    except (AttributeError, RuntimeError, TypeError):
        return False


class _Absorbed(nn.Module):
    """Latent attention with one key and value per token, shared by all heads.

    The key and value matrices are applied to the queries and to the mixed values instead.
    """

    def __init__(self, mixer: LatentAttention) -> None:
        super().__init__()
        self.mixer, self.backend = mixer, SDPA

    def forward(self, x: Tensor, *turn: Tensor) -> Tensor:
        mixer = self.mixer
        heads, d, r, rank = mixer.heads, mixer.head_dim, mixer.rotary, mixer.rank
        to_key, to_value = mixer.key_value.weight.view(heads, 2 * d, rank).chunk(2, dim=1)  # (heads, d, rank) each
        scale = ((rank + r) / (d + r)) ** 0.5  # the scores are of keys of d + r; attention divides by those of rank + r
        queries, latent, shared = mixer.compressed(x)
        if isinstance(mixer.key_value, QuantizedLinear):
            latent = mixer.key_value.round_input(latent)
        query, turned = mixer.query(queries).view(len(x), heads, d + r).split((d, r), dim=-1)
        query = torch.cat((torch.einsum("nhd,hdc->nhc", query, to_key), apply_rotary(turned, *turn)), dim=-1) * scale
        latent = latent[:, None]
        key = torch.cat((latent, apply_rotary(shared[:, None], *turn)), dim=-1)
        mixed = self.backend.attend(query[None], key[None], latent[None])[0]
        return mixer.out(torch.einsum("nhc,hdc->nhd", mixed, to_value).flatten(1))


def attention_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asking: Sequence[int],
    lengths: Sequence[int],
    masks: Sequence[Tensor | None],
    window: int | None = None,
) -> Tensor:
    """Compute attention within each of several concatenated sequences, without padding. Returns (m, heads, v).

    Args:
        query: (m, heads, d).
        key: (n, kv_heads, d).
        value: (n, kv_heads, v), v at most d.
        asking: Number of queries of each sequence; the sum is m.
        lengths: Number of tokens of each sequence; the sum is n.
        masks: Per sequence, (1, 1, queries, tokens) to add to the scores. None: causal, with queries of all tokens or
            only the last one.
        window: Attention window in tokens, already part of the masks.
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
    try:
        return work()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    # Outside of the clause, where the error's frames no longer hold tensors.
    release_memory(device)
    return None


class Cache:
    """Key-value cache of texts that are being generated, two tensors (depth, rows, kv_heads, length, head size).

    Each text has a row with room for the longest text, without paging (Kwon et al. 2023, arXiv:2309.06180). Latent
    attention (`Forward(model, absorbed=True)`) keeps one vector per token, whose first numbers are also the value.
    """

    def __init__(self, model: ModelConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.latent = model.latent
        heads, size = (1, model.cached) if self.latent else (model.num_kv_heads, model.head_dim)
        shape = (model.depth, rows, heads, length, size)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = self.keys[..., : self.latent] if self.latent else torch.empty_like(self.keys)
        self.rows = rows

    def clear(self, rows: range) -> None:
        # Hidden positions get weight 0, and 0 times a NaN of an earlier text would be NaN.
        self.values[:, rows.start : rows.stop] = 0.0

    def move(self, source: int, target: int) -> None:
        for store in self._stores:
            store[:, target] = store[:, source]

    def places(self, rows: Ids, positions: Ids) -> Tensor:
        """Return where a block's cache keeps n tokens: flat indices (n * kv_heads,) into (row, kv_head, position).

        Token i is at `positions[i]` of row `rows[i]`.
        """
        heads, length = self.keys.shape[2:4]
        places = (rows[:, None] * heads + np.arange(heads)) * length + positions[:, None]
        return torch.from_numpy(places.ravel()).to(self.keys.device)

    def write(self, block: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values (n, kv_heads, head size) of one block at the indices from `places()`."""
        for store, new in zip(self._stores, (key, value), strict=False):
            size = new.shape[-1]
            store[block].view(-1, size).index_copy_(0, places, new.reshape(-1, size))

    def step(self, row: int, positions: Ids, first: Ids) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """Return the `Attend` function for one new token in each of B rows; it also stores the new keys and values.

        Args:
            row: First of the B consecutive rows.
            positions: (B,) position of each new token.
            first: (B,) first position that each token sees.
        """
        used = slice(row, row + len(positions))
        low, high = int(first.min()), int(positions.max()) + 1
        column = np.arange(low, high)
        hidden = (column > positions[:, None]) | (column < first[:, None])
        unseen = torch.from_numpy(hidden).to(self.keys.device)[:, None]  # (B, 1, high - low)
        places = self.places(np.arange(used.start, used.stop), positions)

        def attend(block: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.write(block, places, key, value)
            rows, heads, size = query.shape
            keys, values = (store[block, used, :, low:high].flatten(0, 1) for store in (self.keys, self.values))
            # Queries of a group share their keys: (B kv_heads, group, size).
            scores = torch.bmm(query.reshape(len(keys), -1, size) * size**-0.5, keys.transpose(1, 2))
            # Filled, because what earlier texts left in hidden places may be any number.
            scores = scores.view(rows, heads, -1).masked_fill_(unseen, float("-inf"))
            weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
            return torch.bmm(weights.to(query.dtype).view(len(keys), -1, high - low), values).view(rows, heads, -1)

        return attend

    @property
    def _stores(self) -> Sequence[Tensor]:
        return (self.keys,) if self.latent else (self.keys, self.values)
