"""Random tokens for benchmarks whose models are too large for the text of a moment."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..train.data.shards import Shards
from ..train.data.tokenizers import ByteTokenizer


def drawn_by_rank(random: np.random.Generator, vocabulary: int, count: int) -> np.ndarray:
    """Numbers below `vocabulary`, (count,), whose frequencies fall as those of words do (Zipf)."""
    cumulative = np.cumsum(1.0 / (np.arange(vocabulary) + 2.7))
    return np.searchsorted(cumulative, random.random(count) * cumulative[-1]).clip(max=vocabulary - 1)


def random_shards(vocabulary: int, tokens: int) -> Shards:
    """Random tokens with Zipf's frequencies, as shards that are on no disk.

    Uniform ones would spread the gradient of the embedding, and the caches' misses, as no text does.
    """
    stream = drawn_by_rank(np.random.default_rng(0), vocabulary, tokens + 1).astype(np.uint32)
    return Shards(Path(), {}, ByteTokenizer(), stream, stream)
