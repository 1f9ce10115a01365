"""Choice and order of documents: a hash of each document's content decides if it is held out, and its position.

All copies of a text are on the same side of the split, new text moves no old text, and sorting by hash mixes the
sources.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_BUCKETS = 256  # one for each first byte of a hash
MEMORY_BYTES = 256 << 20  # of tokens in memory before they are spilled to disk; chosen by hand
Tokens = npt.NDArray[np.unsignedinteger[Any]]  # uint16 or uint32


def content_hash(encoded: bytes) -> int:
    """Hash a document's UTF-8 to 64 bits with BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big")


def below_fraction(digest: Any, fraction: float, blocks: Collection[int] | None = None) -> Any:
    """Return whether a document with the hash `digest`, or each of an array (n,) of hashes, is held out.

    Held out are the hashes in `blocks` or, if None, the lowest `fraction` of all possible hashes.
    """
    if blocks is not None:
        return digest in blocks if isinstance(digest, int) else np.isin(digest, np.array([*blocks], np.uint64))
    return digest < min(int(fraction * 2.0**64), 2**64 - 1)


class MixedDocuments:
    """Tokenized documents, yielded in the order of their hashes; repeated copies are moved apart."""

    def __init__(self, spool: Path, dtype: npt.DTypeLike, memory_bytes: int = MEMORY_BYTES) -> None:
        self._spool = spool
        self._dtype = np.dtype(dtype)
        self._memory_bytes = memory_bytes
        self._rows: list[list[tuple[int, int, int]]] = [[] for _ in range(_BUCKETS)]
        self._tokens: list[list[Tokens]] = [[] for _ in range(_BUCKETS)]
        self._held_bytes = 0
        self.lowest, self.highest = 1 << 64, -1  # digests seen
        self._count = 0
        self.copies = 0  # documents that equal an earlier one; known after the iteration

    def add(self, digest: int, tokens: Tokens, text_bytes: int) -> None:
        """Add a document: its hash, token ids (n,) and size in bytes of UTF-8."""
        bucket = digest >> 56
        self._rows[bucket].append((digest, len(tokens), text_bytes))
        self._tokens[bucket].append(tokens)
        self._count += 1
        self.lowest, self.highest = min(self.lowest, digest), max(self.highest, digest)
        self._held_bytes += tokens.nbytes + 24
        if self._held_bytes > self._memory_bytes:
            self._spill()

    def __len__(self) -> int:
        return self._count

    def _spill(self) -> None:
        self._spool.mkdir(exist_ok=True)
        for bucket in range(_BUCKETS):
            if self._rows[bucket]:
                index, tokens = self._files(bucket)
                with open(index, "ab") as file:
                    file.write(np.array(self._rows[bucket], dtype=np.uint64).tobytes())
                with open(tokens, "ab") as file:
                    file.write(np.concatenate(self._tokens[bucket]).tobytes())
                self._rows[bucket], self._tokens[bucket] = [], []
        self._held_bytes = 0

    def _files(self, bucket: int) -> tuple[Path, Path]:
        return self._spool / f"{bucket:03d}.index", self._spool / f"{bucket:03d}.tokens"

    def __iter__(self) -> Iterator[tuple[int, Tokens, int]]:
        """Yield (hash, token ids, bytes of text) of each document. Works once: reading deletes spilled files."""
        for bucket in range(_BUCKETS):
            rows, tokens = self._bucket(bucket)
            if not len(rows):
                continue
            starts = np.concatenate([[0], np.cumsum(rows[:, 1], dtype=np.int64)])
            order, copies = _mixed_order(rows[:, 0])
            self.copies += copies
            for i in order:
                yield int(rows[i, 0]), tokens[starts[i] : starts[i + 1]], int(rows[i, 2])
            for file in self._files(bucket):
                file.unlink(missing_ok=True)

    def _bucket(self, bucket: int) -> tuple[npt.NDArray[np.uint64], Tokens]:
        rows = np.array(self._rows[bucket], dtype=np.uint64).reshape(-1, 3)
        tokens = np.concatenate([np.empty(0, self._dtype), *self._tokens[bucket]])
        self._rows[bucket], self._tokens[bucket] = [], []
        index, spilled = self._files(bucket)
        if index.exists():
            rows = np.concatenate([np.fromfile(index, np.uint64).reshape(-1, 3), rows])
            tokens = np.concatenate([np.fromfile(spilled, self._dtype), tokens])
        return rows, tokens


def _mixed_order(digests: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], int]:
    """Return indices that sort `digests` but scatter repeats pseudo-randomly, and the number of repeats."""
    by_digest = np.argsort(digests, kind="stable")
    ordered = digests[by_digest]
    repeated = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    keys = ordered.copy()
    copy = 0
    for previous, i in zip([-1, *repeated], repeated, strict=False):
        copy = copy + 1 if previous == i - 1 else 1
        elsewhere = content_hash(int(ordered[i]).to_bytes(8, "big") + copy.to_bytes(8, "big"))
        keys[i] = (int(ordered[i]) >> 56 << 56) | (elsewhere >> 8)
    return by_digest[np.argsort(keys, kind="stable")], len(repeated)
