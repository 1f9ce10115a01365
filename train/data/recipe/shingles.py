"""Documents as sets of hashed word n-grams, and MinHash signatures of those sets.

A word is a run of letters, digits, underscores or bytes beyond ASCII, in lower case. Signatures are rensa's (Fast
Similarity Sketching, Dahlgaard et al. 2017, arXiv:1704.04370): two documents agree in a slot with a probability equal
to their Jaccard similarity.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import UserError

Hashes = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]
SLOTS = 128  # numbers in a signature; chosen by hand
ALGORITHM = 2  # of rensa; another one finds other documents, so it needs a new version of the step `near`
_BATCH = 1 << 20  # bytes hashed at a time
_ODD = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
_WORD = np.zeros(256, bool)
_WORD[[*range(48, 58), *range(65, 91), *range(97, 123), 95, *range(128, 256)]] = True


def ngrams(texts: Sequence[str], n: int) -> tuple[Hashes, Offsets]:
    """Return the hashes of all texts' word n-grams in order, and each text's start there, (documents + 1,).

    A text with 1 to n - 1 words has one n-gram; a text without words has none.
    """
    hash_arrays: list[Hashes] = [np.empty(0, np.uint64)]
    counts: list[Offsets] = [np.zeros(1, np.int64)]
    start = size = 0
    encoded = [text.lower().encode() for text in texts]
    for end, text in enumerate(encoded, start=1):
        size += len(text) + 1
        if size >= _BATCH or end == len(encoded):
            hashes, count = _ngrams(encoded[start:end], n)
            hash_arrays.append(hashes)
            counts.append(count)
            start, size = end, 0
    return np.concatenate(hash_arrays), np.cumsum(np.concatenate(counts))


def _ngrams(texts: list[bytes], n: int) -> tuple[Hashes, Offsets]:
    words, per_document = _words(texts)
    document = np.repeat(np.arange(len(texts)), per_document)
    padded = np.concatenate([words, np.zeros(n - 1, np.uint64)])
    owner = np.concatenate([document, np.full(n - 1, -1)])
    hashes = np.zeros(len(words), np.uint64)
    for i in range(n):  # words beyond the document count as 0
        hashes *= _ODD
        hashes += np.where(owner[i : i + len(words)] == document, padded[i : i + len(words)], np.uint64(0))
    first = np.cumsum(per_document) - per_document
    position = np.arange(len(words)) - first[document]
    whole = (position <= per_document[document] - n) | (position == 0)
    return _mixed(hashes[whole]), np.bincount(document[whole], minlength=len(texts)).astype(np.int64)


def _words(texts: list[bytes]) -> tuple[Hashes, Offsets]:
    joined = np.frombuffer(b"\n".join(texts) + b"\n", np.uint8)
    inside = _WORD[joined]
    edges = np.flatnonzero(np.diff(inside, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]
    hashes = np.empty(len(starts), np.uint64)
    first = 0
    while first < len(starts):  # in batches, because hashing needs 40 times the text's memory
        last = max(first + 1, int(np.searchsorted(ends, starts[first] + _BATCH, side="right")))
        here = starts[first]
        values = byte_values().take(joined[here : ends[last - 1]])
        hashes[first:last] = run_hashes(values, starts[first:last] - here, ends[first:last] - here)
        first = last
    lengths = np.fromiter((len(text) + 1 for text in texts), np.int64, len(texts))
    return _mixed(hashes), np.bincount(
        np.searchsorted(np.cumsum(lengths), starts, side="right"), minlength=len(texts)
    ).astype(np.int64)


def word_hashes(values: Hashes, starts: Offsets, ends: Offsets) -> Hashes:
    """Hash each word of a text, given the `byte_values()` of its bytes and where each word starts and ends."""
    return _mixed(run_hashes(values, starts, ends))


def gram_hashes(words: Hashes, length: int) -> Hashes:
    """Hash every `length` consecutive words, given the words' hashes (w,). Returns (w - length + 1,)."""
    count = max(len(words) - length + 1, 0)
    return _mixed(run_hashes(words, slice(count), slice(length, length + count)))


def run_hashes(values: Hashes, starts: Offsets | slice, ends: Offsets | slice) -> Hashes:
    """Hash `values[start:end]` for each start and end, as a polynomial. Equal slices have equal hashes."""
    powers, inverses = _powers(1 << max(len(values) - 1, 0).bit_length())
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * powers[: len(values)], out=sums[1:])
    return (sums[ends] - sums[starts]) * inverses[starts]


@cache
def byte_values() -> Hashes:
    return _mixed(np.arange(1, 257, dtype=np.uint64))


@cache
def _powers(size: int) -> tuple[Hashes, Hashes]:
    """Return the first `size` powers of an odd number modulo 2^64, and those of its inverse."""
    inverse = np.uint64(pow(int(_ODD), -1, 1 << 64))
    powers, inverses = (np.full(size, base, np.uint64) for base in (_ODD, inverse))
    powers[0] = inverses[0] = 1
    return np.multiply.accumulate(powers), np.multiply.accumulate(inverses)


def _mixed(values: Hashes) -> Hashes:
    """Apply SplitMix64's finalizer: changing one bit of a value changes about half of the result's."""
    values = values + _ODD
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))


def bands_and_rows(threshold: float, missed: float = 0.02, slots: int = SLOTS) -> tuple[int, int]:
    """Return how to cut signatures of `slots` numbers: (bands, numbers per band), with bands as long as possible.

    Of pairs with similarity `threshold`, at most the share `missed` has no band in common.
    """
    best = (1, 1)
    for rows in range(1, slots + 1):
        share = min(threshold**rows, 1 - 1e-12)
        bands = max(1, int(np.ceil(np.log(missed) / np.log1p(-share))))
        if bands * rows > slots:
            break
        best = (bands, rows)
    return best


def signatures(hashes: Hashes, offsets: Offsets) -> npt.NDArray[np.uint32]:
    """Return the MinHash signature of each document, (documents, SLOTS); arbitrary for one without n-grams."""
    from rensa import RMinHash

    if (version := RMinHash.ALGORITHM_VERSION) != ALGORITHM:
        raise UserError(
            f"data.recipe contains 'near', and the installed rensa uses its algorithm {version}; isoflop needs "
            f"algorithm {ALGORITHM}: pip install 'rensa>=0.5,<0.6'"
        )
    if len(offsets) == 1:
        return np.empty((0, SLOTS), np.uint32)
    matrix: Any = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets.astype(np.uint64), SLOTS, 1)
    return np.array(matrix.to_rows(), np.uint32)


def band_hashes(signed: npt.NDArray[np.uint32], bands: int, rows: int) -> Hashes:
    """Cut each signature into bands of `rows` numbers; return their hashes, (documents, bands)."""
    cut = signed[:, : bands * rows].reshape(len(signed), bands, rows).astype(np.uint64)
    hashes = np.zeros(cut.shape[:2], np.uint64)
    for row in range(rows):
        hashes = _mixed(hashes ^ cut[:, :, row])
    return hashes


def distinct(hashes: Hashes, offsets: Offsets) -> tuple[npt.NDArray[np.uint32], Offsets]:
    """Return each document's distinct hashes, cut to 32 bits and sorted, and each document's start there."""
    document = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets))
    keys = np.sort((document << np.uint64(32)) | (hashes >> np.uint64(32)))
    keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys
    counts = np.bincount((keys >> np.uint64(32)).astype(np.int64), minlength=len(offsets) - 1)
    return keys.astype(np.uint32), np.concatenate([[0], np.cumsum(counts)])
