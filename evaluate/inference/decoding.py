"""The two passes of generation: prefill, which reads whole prompts, and decode, which adds a token to each.

Special here:
- prompts of any lengths are one flat list of tokens: only attention goes through them one by one;
- of a prompt only the last token is read, so in the last block the others give their keys and values and no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...train.model.attention import document_starts, first_visible, visible_mask
from ...train.model.gpt import GPT
from .forward import Forward, attention_apart, logits_of
from .paged import Ids, PagedBatch, PagedCache, Pages


def prefill(forward: Forward, cache: PagedCache, texts: Sequence[Sequence[int]], pages: Sequence[Pages]) -> Tensor:
    """Reads texts, keeps their keys and values where `pages` has room for them: logits after each (texts, vocabulary).

    Positions before the first page of a request are not kept: nothing will look at them.
    """
    model, device = forward.model, forward.model.cos.device
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
        asking, seen = lengths, masks
        if len(query) < len(key):  # of each text the last token alone
            asking, seen = [1] * len(texts), [None if mask is None else mask[:, :, -1:] for mask in masks]
        return attention_apart(query, key, value, asking, lengths, seen, model.config.window)

    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    return forward.logits(forward.hidden(tokens, positions, attend, torch.from_numpy(ends - 1).to(device)))


def _mask(model: GPT, tokens: Tensor) -> Tensor | None:
    row = tokens[None]
    starts = None if model.end_of_document is None else document_starts(row, model.end_of_document)
    first = first_visible(row, starts, model.config.window)
    return None if first is None else visible_mask(first, model.embedding.weight.dtype)


def decode(forward: Forward, batch: PagedBatch, tokens: Sequence[int], positions: Ids, first: Ids) -> Tensor:
    """Adds a token to each request of a batch: logits after it (requests, vocabulary).

    Args:
        forward: the model.
        batch: has a page for each position.
        tokens: (requests,) one each.
        positions: (requests,) where they stand.
        first: (requests,) the first position that each sees.
    """
    step, device = batch.step(positions, first), forward.model.cos.device
    at = torch.from_numpy(positions).to(device)
    return forward.logits(forward.hidden(torch.tensor(tokens, device=device), at, step.attend))


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
