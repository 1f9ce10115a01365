"""The next token from logits: greedy or drawn, many rows at a time, each with a random number of its own.

Special here:
- a token costs one uniform number of its row's stream, whatever top-k and top-p leave of the distribution, and is read
  off the cumulative distribution: so a row's text depends on neither its neighbours nor the order of the work;
- a nucleus needs the tokens in order, and sorting a vocabulary takes longer than a small model: only the most likely
  ones are put in order, more of them where those do not hold the nucleus.

Holtzman et al. 2020, arXiv 1904.09751 (nucleus sampling).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST_SORTED = 64  # tokens that are tried for a nucleus, then 8 times as many


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def choose(logits: Tensor, sampling: Sampling, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token a row: temperature first, then top-k, then the nucleus.

    Args:
        logits: (rows, vocabulary); -inf is never drawn.
        sampling: temperature, top-k, top-p.
        uniforms: (rows,) float64 in [0, 1); not read where the temperature is 0.

    Returns:
        Tokens (rows,), and which rows (rows,) held a NaN, whose token means nothing.
    """
    highest, greedy = logits.max(dim=1)  # a NaN counts as the highest
    if sampling.temperature == 0:
        return greedy, highest.isnan()
    assert uniforms is not None
    probabilities = torch.softmax(logits.double() / sampling.temperature, dim=1)
    if not sampling.top_k and sampling.top_p >= 1:
        return _drawn(probabilities, uniforms)[:, 0], highest.isnan()
    likely, tokens = _most_likely(probabilities, sampling)
    if sampling.top_p < 1:
        before = likely.cumsum(1) - likely
        # A token belongs to the nucleus while those ahead of it hold less than top_p; the first always does.
        outside = before >= sampling.top_p
        outside[:, 0] = False
        likely = likely.masked_fill(outside, 0.0)
    return tokens.gather(1, _drawn(likely, uniforms))[:, 0], highest.isnan()


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from logits (vocabulary,) and a stream of random numbers."""
    uniforms = torch.rand(1, dtype=torch.float64, generator=generator)
    return int(choose(logits[None], sampling, uniforms)[0])


def _most_likely(probabilities: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The probabilities that top-k leaves, or enough of them to hold the nucleus, highest first, and their tokens.

    After top-k they sum to 1 again.
    """
    vocabulary = probabilities.shape[1]
    if sampling.top_k:
        likely, tokens = probabilities.topk(min(sampling.top_k, vocabulary), dim=1)
        return likely / likely.sum(1, keepdim=True), tokens
    count = _FIRST_SORTED
    while count < vocabulary:
        likely, tokens = probabilities.topk(count, dim=1)
        if not bool((likely.sum(1) < sampling.top_p).any()):
            return likely, tokens
        count *= 8
    return probabilities.sort(dim=1, descending=True, stable=True)


def _drawn(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The first place at which the cumulative sum exceeds uniform times total: (rows, n), (rows,) -> (rows, 1)."""
    cumulative = probabilities.cumsum(1)
    total = cumulative[:, -1:]
    # Below the total even where rounding takes the product there, or a place of probability 0 could be meant.
    threshold = torch.minimum(uniforms[:, None] * total, total * (1 - 2.0**-52))
    return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=probabilities.shape[1] - 1)
