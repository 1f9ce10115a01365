"""Random tokens for benchmarks whose models are too large for the text of a moment."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..train.data.shards import Shards
from ..train.data.tokenizers import ByteTokenizer


def random_shards(vocabulary: int, tokens: int, seed: int = 0) -> Shards:
    """Random tokens with Zipf's frequencies, as shards that are on no disk.

    Uniform ones would spread the gradient of the embedding, and the caches' misses, as no text does.
    """
    random = np.random.default_rng(seed)
    cumulative = np.cumsum(1.0 / (np.arange(vocabulary) + 2.7))
    drawn = np.searchsorted(cumulative, random.random(tokens + 1) * cumulative[-1])
    stream = drawn.clip(max=vocabulary - 1).astype(np.uint32)
    return Shards(Path(), {}, ByteTokenizer(), stream, stream)
