"""Batches from a mixture of domains. Which domain a row is from is a pure function of (seed, row).

Row g of a run, counted over all batches, is from the domain in whose interval of cumulative weights the fraction of
s + g / (golden ratio) lies. Any run of rows then has nearly the planned shares, to about one row (a Kronecker sequence;
Niederreiter 1992, section 3.1). A domain's rows are read in that domain's own order, so that two runs of different
weights read the same windows of a domain, one more of them than the other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..config import DataConfig, RunConfig, with_shares
from ..errors import UserError
from .loader import TrainStream, bytes_of, row_range, validation_windows
from .text import PLAIN, Text, in_domain

CIRCLE = 1 << 64  # fractions are multiples of 1 / CIRCLE, so that they are exact
BLOCK = 1024  # rows whose windows are found at a time
GOLDEN = 0x9E3779B97F4A7C15  # CIRCLE / golden ratio


@dataclass(frozen=True)
class Part:
    """The held-out windows of one domain: rows, bytes of text, and share in the loss."""

    rows: slice
    text_bytes: int
    share: float


@dataclass(frozen=True)
class HeldOutText:
    """The held-out windows (n, T + 1) of all domains, an equal number of tokens of each at most."""

    windows: npt.NDArray[np.int64]
    parts: dict[str, Part]

    @classmethod
    def of(cls, data: DataConfig, text: Text) -> HeldOutText:
        """Select the windows, which depend on nothing but the text. Raises UserError if a domain's is too short."""
        limit, target = data.validation_tokens // len(text), with_shares(data).target
        windows, parts, start = [], {}, 0
        for name, shards in text.items():
            with in_domain(name):
                chosen = validation_windows(shards, data.sequence_length, limit)
            rows, share = slice(start, start := start + len(chosen)), target.get(name, 0) if target else 1 / len(text)
            parts[name] = Part(rows, bytes_of(chosen[:, 1:], shards.tokenizer), float(share))
            windows.append(chosen)
        return cls(np.concatenate(windows), parts)


def open_stream(config: RunConfig, text: Text) -> TrainStream | MixtureStream:
    """Return the training batches of a run.

    Raises UserError if a text is too short, a cap larger than its domain, or a domain repeated above `max_epochs`.
    """
    data, length = config.data, config.data.sequence_length
    if data.corpus != "mixture":
        return TrainStream(text[PLAIN], length, config.seed)
    streams, planned = {}, with_shares(data).weights
    for name, share in planned.items():
        domain, scale = data.domains[name], 1.0 if data.epochs_of is None else min(1.0, config.D / data.epochs_of)
        with in_domain(name):
            whole = TrainStream(text[name], length, config.seed)
        if (cap := domain.unique_tokens) is not None and cap > whole.unique_tokens:
            has = f"the domain has only {whole.unique_tokens:,} tokens of training text"
            raise UserError(f"data.domains.{name}.unique_tokens is {cap:,}; {has}")
        stream = TrainStream(text[name], length, config.seed, int((cap or whole.unique_tokens) * scale))
        epochs = stream.epochs(round(config.D * share))
        if domain.max_epochs is not None and epochs > domain.max_epochs:
            read = f"{share:.3g} of {config.D:,} tokens are {epochs:.2f} epochs of its {stream.unique_tokens:,} tokens"
            remedy = "lower its weight, in a grid of mixtures with grid.bounds, or the tokens"
            raise UserError(f"data.domains.{name}.max_epochs is {domain.max_epochs:g}; {read}: {remedy}")
        streams[name] = stream
    return MixtureStream(streams, planned, config.seed)


class MixtureStream:
    """Batches of windows of T + 1 tokens from several domains, with a fixed share of each."""

    def __init__(self, streams: dict[str, TrainStream], shares: dict[str, float], seed: int) -> None:
        self.streams, self.shares = streams, shares
        self._read = [name for name, share in shares.items() if share > 0]
        ends = itertools.accumulate(shares[name] for name in self._read)
        self._ends = [0, *(round(end * CIRCLE) for end in ends)]
        self._ends[-1] = CIRCLE  # the shares' sum may miss 1 by rounding
        self._windows = [streams[name].windows for name in self._read]
        self._block = lru_cache(2)(self._places)  # two, because a batch may span both
        self._start = int(np.random.Philox(key=np.array([seed % 2**64, 0], np.uint64)).random_raw())
        self.end_of_document = next(iter(streams.values())).end_of_document
        self.unique_tokens = sum(streams[name].unique_tokens for name in self._read)

    def batch(self, step: int, batch_size: int, start: int = 0, count: int | None = None) -> npt.NDArray[np.int64]:
        """Return rows `start` to `start + count` (None: the rest) of a 0-based step's batch: ids (count, T + 1)."""
        first, last = row_range(step, batch_size, start, count)
        result = np.empty((last - first, self._windows[0].shape[1]), np.int64)
        for i, row in enumerate(range(first, last)):
            domain, window = self._block(row // BLOCK)[row % BLOCK]
            result[i] = self._windows[domain][window]
        return result

    def _places(self, block: int) -> list[tuple[int, int]]:
        """Return the domain and the window of each of the BLOCK rows of a block."""
        first = block * BLOCK
        at = np.uint64(self._start) + np.arange(first, first + BLOCK, dtype=np.uint64) * np.uint64(GOLDEN)  # wraps
        domain = np.searchsorted(np.array(self._ends[1:-1], np.uint64), at, side="right")
        # Earlier rows below each end: sums of floors count how often the sequence passes a point of the circle.
        passed = [floor_sum(first, CIRCLE, GOLDEN, self._start + CIRCLE - end) for end in (CIRCLE, *self._ends)]
        below = [first + passed[0] - count for count in passed[1:]]
        window = np.empty(BLOCK, np.int64)
        for k, name in enumerate(self._read):
            mine, before = domain == k, below[k + 1] - below[k]
            window[mine] = self.streams[name].order(before, before + int(mine.sum()))
        return list(zip(domain.tolist(), window.tolist(), strict=True))

    def epochs(self, tokens: int) -> float:
        """Return how often a run of so many tokens reads the domain that it repeats most."""
        return max(self.streams[name].epochs(round(tokens * self.shares[name])) for name in self._read)

    def repeated(self, tokens: int) -> list[str]:
        """Return a line about each domain that a run of so many tokens repeats."""
        read = {name: round(tokens * self.shares[name]) for name in self._read}
        return [f"{name}: {line}" for name, count in read.items() for line in self.streams[name].repeated(count)]

    def described(self, tokens: int) -> dict[str, float]:
        """Return the entries of a run's summary about its text: of all, and of each domain."""
        weights = {f"weight_{name}": share for name, share in self.shares.items()}
        unique = {f"unique_{name}": stream.unique_tokens for name, stream in self.streams.items()}
        return {"unique_tokens": self.unique_tokens, "epochs": self.epochs(tokens), **weights, **unique}


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum of (a * i + b) // m over i from 0 to n - 1, in O(log m) steps; a and b are not negative."""
    total = 0
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        if (last := a * n + b) < m:
            return total
        n, b, m, a = last // m, last % m, a, m
