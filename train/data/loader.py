"""The order of samples: a pure function of (seed, step), so ranks, micro-batches and restarts cannot change it.

Every epoch is a permutation of all windows by Philox (Salmon et al. 2011) keyed by (seed, epoch).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .mixing import Tokens
from .shards import Shards
from .tokenizers import Tokenizer


class TrainStream:
    """Batches of the training stream: windows of T + 1 tokens, one every T tokens. T is `sequence_length`."""

    def __init__(self, shards: Shards, sequence_length: int, seed: int, most_tokens: int | None = None) -> None:
        """Open the stream, of only the first windows if `most_tokens` is given; at least one."""
        windows = _windows(shards.train, sequence_length, "training")
        if most_tokens is not None:
            windows = windows[: max(1, most_tokens // sequence_length)]
        self.windows = windows
        # Caches two epochs, because a batch may span both.
        self._permutation = lru_cache(2)(lambda epoch: permutation(seed, epoch, len(windows)))
        self.end_of_document = shards.tokenizer.end_of_document
        self.unique_tokens = len(windows) * sequence_length  # targets in an epoch

    def batch(self, step: int, batch_size: int, start: int = 0, count: int | None = None) -> npt.NDArray[np.int64]:
        """Return rows `start` to `start + count` (None: the rest) of a 0-based step's batch: ids (count, T + 1)."""
        return self.windows[self.order(*row_range(step, batch_size, start, count))].astype(np.int64)

    def epochs(self, tokens: int) -> float:
        """Return how often a run of so many tokens reads the text; above 1, text is repeated."""
        return tokens / self.unique_tokens

    def described(self, tokens: int) -> dict[str, float]:
        """Return the entries of a run's summary about its text."""
        return {"unique_tokens": self.unique_tokens, "epochs": self.epochs(tokens)}

    def repeated(self, tokens: int) -> list[str]:
        """Return a line about text that a run of so many tokens repeats, or none."""
        epochs = self.epochs(tokens)
        return [f"{tokens:,} tokens are {epochs:.2f} epochs of the {self.unique_tokens:,} unique tokens"] * (epochs > 1)

    def order(self, first: int, last: int) -> npt.NDArray[np.unsignedinteger]:
        """Return the windows that the run reads as rows `first` to before `last`, counted over all batches."""
        n = len(self.windows)
        spans = [
            self._permutation(epoch)[max(first - epoch * n, 0) : last - epoch * n]
            for epoch in range(first // n, max(first // n + 1, -(-last // n)))
        ]
        return np.concatenate(spans)


def row_range(step: int, batch_size: int, start: int, count: int | None) -> tuple[int, int]:
    """Return the first row of a part of a step's batch and the row after it, counted over all batches."""
    count = batch_size - start if count is None else count
    if step < 0 or start < 0 or count < 0 or start + count > batch_size:
        raise ValueError(f"rows {start} to {start + count} of step {step} are outside of a batch of {batch_size}")
    return step * batch_size + start, step * batch_size + start + count


def permutation(seed: int, epoch: int, n: int) -> npt.NDArray[np.unsignedinteger]:
    """Return a permutation (n,) of 0 to n-1 that depends only on the arguments."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(n), kind="stable")
    return order.astype(np.uint32 if n <= 1 << 32 else np.uint64)


def validation_windows(shards: Shards, sequence_length: int, max_tokens: int) -> npt.NDArray[np.int64]:
    """Return evenly spaced windows (n, T + 1) of the held-out text, with n * T at most `max_tokens`."""
    windows = _windows(shards.validation, sequence_length, "validation")
    count = min(max_tokens // sequence_length, len(windows))
    return windows[np.arange(count) * len(windows) // count].astype(np.int64)


def bytes_of(targets: npt.ArrayLike, tokenizer: Tokenizer) -> int:
    """Count the bytes of UTF-8 that token ids of any shape stand for."""
    return int(tokenizer.token_bytes[np.asarray(targets, np.int64)].sum())


def _windows(tokens: Tokens, sequence_length: int, part: str) -> Tokens:
    """View tokens (m,) as windows (n, T + 1), one every T tokens. `part` names the tokens in errors."""
    if len(tokens) < sequence_length + 1:
        raise UserError(
            f"data.sequence_length is {sequence_length}; it must be at most {len(tokens) - 1}, because the {part} part "
            f"of the corpus has only {len(tokens)} tokens, or the corpus must be larger"
        )
    # A plain array, because indexing a memmap wraps every batch in a new memmap.
    view = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), sequence_length + 1)
    return view[::sequence_length]
