"""The two passes of generation: prefill, which reads whole prompts, and decode, which adds a token to each.

Special here:
- prompts of any lengths are one flat list of tokens: only attention goes through them one by one, and only their last
  tokens meet the head;
- decode is a pass of its own, of as few operations as it can be made of: for a small model on a CPU they, and not the
  arithmetic, are what a token costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..train.attention import causal_attention, document_starts, first_visible, visible_mask
from ..train.model import GPT, Attention, Block
from .forward import last_hidden, logits_of
from .paged import Ids, PagedBatch, PagedCache, Pages

Product = Callable[[Tensor], Tensor]
PACKED_BYTES = 1 << 29  # of a model whose matrices are worth keeping twice


def prefill(model: GPT, cache: PagedCache, texts: Sequence[Sequence[int]], pages: Sequence[Pages]) -> Tensor:
    """Reads texts, keeps their keys and values where `pages` has room for them: logits after each (texts, vocabulary).

    Positions before the first page of a request are not kept: nothing will look at them.
    """
    device = model.cos.device
    lengths = [len(text) for text in texts]
    kept = [np.arange(one.first * cache.page, length) for one, length in zip(pages, lengths, strict=True)]
    ends = np.cumsum(lengths)
    flat = np.concatenate([at + end - length for at, end, length in zip(kept, ends, lengths, strict=True)])
    rows = torch.from_numpy(cache.rows(pages, kept)).to(device)
    kept_tokens = None if len(flat) == ends[-1] else torch.from_numpy(flat).to(device)
    tokens = torch.tensor([token for text in texts for token in text], device=device)
    masks = [_mask(model, part) for part in tokens.split(lengths)]

    def attend(block: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        written = (key, value) if kept_tokens is None else (key[kept_tokens], value[kept_tokens])
        cache.write(block, rows, *written)
        parts = zip(*(x.split(lengths) for x in (query, key, value)), masks, strict=True)
        return torch.cat([_attention(q, k, v, mask, model.config.window) for q, k, v, mask in parts])

    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    hidden = last_hidden(model, tokens, positions, attend)
    return logits_of(model, hidden[torch.from_numpy(ends - 1).to(device)])


def _mask(model: GPT, tokens: Tensor) -> Tensor | None:
    row = tokens[None]
    starts = None if model.end_of_document is None else document_starts(row, model.end_of_document)
    first = first_visible(row, starts, model.config.window)
    return None if first is None else visible_mask(first, model.embedding.weight.dtype)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    """Of one text: (time, heads, d) -> (time, heads, d)."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    return causal_attention(query, key, value, mask, window)[0].transpose(0, 1)


class Decoder:
    """A model ready to add tokens: `forward.last_hidden` and the head in as few operations as they can be made of.

    On a CPU the matrices of a small model are kept a second time, packed for products with a few rows (oneDNN's order,
    which PyTorch's compiler uses too): two thirds of the time of plain products at 16 rows.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        packed = model.cos.device.type == "cpu" and size <= PACKED_BYTES
        self._blocks = [_prepared(cast(Block, block), packed) for block in model.blocks]
        self._head = _product(model.head.weight, packed)

    def __call__(self, batch: PagedBatch, tokens: Sequence[int], positions: Ids, first: Ids) -> Tensor:
        """Adds a token to each request of a batch: logits after it (requests, vocabulary).

        Args:
            batch: has a page for each position.
            tokens: (requests,) one each.
            positions: (requests,) where they stand.
            first: (requests,) the first position that each sees.
        """
        model, eps = self.model, self.model.config.norm_eps
        step, at = batch.step(positions, first), torch.from_numpy(positions).to(model.cos.device)
        x = F.embedding(torch.tensor(tokens, device=at.device), model.embedding.weight)
        cos, sin = model.cos[at].to(x.dtype)[:, None], model.sin[at].to(x.dtype)[:, None]
        turn = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)  # (requests, 1, d) each
        width = (x.shape[1],)
        for number, (block, qkv, out, gate_up, down) in enumerate(self._blocks):
            products = qkv(F.rms_norm(x, width, block.attention_norm.weight, eps))
            query, key, value = _rotated(block.attention, products, turn)
            x = x.add_(out(step.attend(number, query, key, value).flatten(1)))
            gate, up = gate_up(F.rms_norm(x, width, block.mlp_norm.weight, eps)).chunk(2, dim=1)
            x = x.add_(down(F.silu(gate).mul_(up)))
        x = F.rms_norm(x, width, model.norm.weight, eps)
        logits = self._head(x * model.output_scale if model.output_scale != 1.0 else x)
        return logits[:, : model.head.vocab_size]


def _prepared(block: Block, packed: bool) -> tuple[Block, Product, Product, Product, Product]:
    """A block, and its products in their order."""
    attention, mlp = block.attention, block.mlp
    qkv, out, gate_up, down = (
        _product(matrix.weight, packed) for matrix in (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    )
    return block, qkv, out, gate_up, down


def _rotated(attention: Attention, products: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (n, heads or kv_heads, d) of products (n, rows of qkv), the first two turned."""
    heads, kv_heads, d = attention.heads, attention.kv_heads, attention.head_dim
    qkv = products.view(len(products), heads + 2 * kv_heads, d)
    both, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    if attention.query_norm is not None and attention.key_norm is not None:
        query = F.rms_norm(both[:, :heads], (d,), attention.query_norm.weight, attention.query_norm.eps)
        key = F.rms_norm(both[:, heads:], (d,), attention.key_norm.weight, attention.key_norm.eps)
        both = torch.cat((query, key), dim=1)
    turned = torch.addcmul(both * turn[0], both.roll(d // 2, dims=2), turn[1])
    return turned[:, :heads], turned[:, heads:], value


def _product(weight: Tensor, packed: bool) -> Product:
    """Of rows (n, in) the product with W^T, (n, out)."""
    if packed and weight.dtype in (torch.float32, torch.bfloat16):
        try:
            kept = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
            return lambda x: torch.ops.mkldnn._linear_pointwise(x, kept, None, "none", [], "")
        except (AttributeError, RuntimeError):
            pass  # a PyTorch without oneDNN, or a processor that it has nothing for
    return partial(F.linear, weight=weight)


def recomputed(model: torch.nn.Module, texts: Sequence[Sequence[int]], device: str | torch.device) -> Tensor:
    """Logits after the last token of each text, computed from nothing: (texts, vocabulary).

    Texts are padded on the right: the model is causal, so padding never reaches a token that counts.
    """
    longest = max(len(text) for text in texts)
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    last = torch.tensor([len(text) - 1 for text in texts], device=device)
    rows = torch.arange(len(texts), device=device)
    if isinstance(model, GPT):
        return logits_of(model, model.last_hidden(tokens)[rows, last])
    logits: Tensor = model(tokens)[rows, last]
    return logits
