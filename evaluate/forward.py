"""One pass through a GPT in which the caller says where each token stands and what it sees.

Special here:
- Tokens come as one flat list, whatever sequence, branch or request they belong to: matrices and norms treat them
  alike, no padding is computed, and only attention, which the caller brings, knows what belongs together.
- The head is a step of its own, so that logits are computed where somebody reads them and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..train.attention import apply_rotary
from ..train.model import GPT, Attention, Block

# (number of the block, query (n, heads, d), key (n, kv_heads, d), value (n, kv_heads, d)) -> (n, heads, d), rotated.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def last_hidden(model: GPT, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """What the head reads.

    Args:
        model: in eval mode; its own attention backend is not used.
        tokens: (n,) ids.
        positions: (n,) where each stands in its own sequence, below `model.max_length`.
        attend: softmax(Q K^T / sqrt(d)) V over whatever each token sees.

    Returns:
        (n, width), the output multiplier included.
    """
    cos, sin = model.cos[positions], model.sin[positions]  # (n, d / 2)
    x = model.embedding(tokens)
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        query, key, value = _projections(block.attention, block.attention_norm(x), cos, sin)
        x = x + block.attention.out(attend(number, query, key, value).flatten(1))
        x = x + block.mlp(block.mlp_norm(x))
    x = model.norm(x)
    return x * model.output_scale if model.output_scale != 1.0 else x


def logits_of(model: GPT, hidden: Tensor) -> Tensor:
    """(…, width) -> (…, vocab_size): the padding of the vocabulary is cut off."""
    logits: Tensor = model.head(hidden)
    return logits[..., : model.head.vocab_size]


def _projections(attention: Attention, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries (n, heads, d) and keys (n, kv_heads, d), and values (n, kv_heads, d)."""
    heads, kv_heads = attention.heads, attention.kv_heads
    qkv = attention.qkv(x).view(1, len(x), heads + 2 * kv_heads, attention.head_dim)
    if attention.query_norm is not None and attention.key_norm is not None:
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=2)
        query = apply_rotary(attention.query_norm(query), cos, sin)
        key = apply_rotary(attention.key_norm(key), cos, sin)
    else:
        query_key, value = qkv.split((heads + kv_heads, kv_heads), dim=2)
        query, key = apply_rotary(query_key, cos, sin).split((heads, kv_heads), dim=2)
    return query[0], key[0], value[0]
