"""Text to words, words to 64-bit hashes, and hashes of n-grams of them: a fixed number of NumPy calls a chunk of text.

Special here:
- A word is a run of letters and digits in lower case, after NFKC. Ideographs and kana, between which no blanks stand,
  are words one by one.
- The hash of a word is a difference of prefix sums of byte times power of its place, moved to place 0 by the inverse of
  that power; the hash of an n-gram is the same over words. So an n-gram costs the same whatever n is (Karp and Rabin
  1987, with prefix sums instead of rolling).
- Hashes depend on the text alone: the same in every process and on every machine.
"""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]  # (w,) a hash of each word

END = b"\xff"  # between documents: never in UTF-8
_TABLE = 1 << 19  # powers that are kept at least

_NOT_WORD = re.compile(r"[^\x00-\x7f\w]+")
_IDEOGRAPH = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")


def normalised(text: str | bytes) -> bytes:
    """Text in which words are runs of letters, digits and bytes from 0x80 on, in lower case but for ASCII capitals.

    Documents in bytes are parted by `END`, which stays. ASCII needs nothing: `words_and_ends` lowers and parts it.
    """
    if isinstance(text, bytes):
        if text.isascii():
            return text
        parts = text.split(END)
        return END.join(part if part.isascii() else normalised(part.decode(errors="replace")) for part in parts)
    text = unicodedata.normalize("NFKC", text).lower()
    return _IDEOGRAPH.sub(r" \1 ", _NOT_WORD.sub(" ", text)).encode(errors="replace")


def _byte_codes() -> npt.NDArray[np.uint8]:
    """(256,) the byte in lower case where it is part of a word, else 0."""
    codes = np.zeros(256, np.uint8)
    for byte in [*range(ord("0"), ord("9") + 1), *range(ord("a"), ord("z") + 1), *range(0x80, 0xFF)]:
        codes[byte] = byte
    codes[ord("A") : ord("Z") + 1] = codes[ord("a") : ord("z") + 1]
    return codes


_CODES = _byte_codes()
_BASE = 0x9E3779B97F4A7C15 | 1  # odd, so that it has an inverse mod 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)


def word_hashes(text: bytes) -> Words:
    """(w,) of normalised text."""
    return words_and_ends(text)[0]


def words_and_ends(text: bytes) -> tuple[Words, npt.NDArray[np.intp]]:
    """(w,) hashes of the words of normalised text, and (w,) the number of ends of documents before each."""
    raw = np.frombuffer(text, np.uint8)  # (b,)
    codes = _CODES[raw]
    is_word = np.zeros(len(codes) + 2, np.bool_)
    np.not_equal(codes, 0, out=is_word[1:-1])
    edges = np.flatnonzero(is_word[1:] != is_word[:-1])  # starts and ends take turns
    starts, ends = edges[::2], edges[1::2]
    sums = _prefix_sums(codes.astype(np.uint64))
    hashes = _mixed((sums[ends] - sums[starts]) * _powers(_INVERSE, len(codes))[starts])
    return hashes, np.searchsorted(np.flatnonzero(raw == END[0]), starts)


def gram_hashes(words: Words, length: int) -> Words:
    """(w - length + 1,) a hash of each run of `length` words."""
    sums = _prefix_sums(words)
    count = max(len(words) - length + 1, 0)
    return _mixed((sums[length:] - sums[:count]) * _powers(_INVERSE, len(words))[:count])


def _prefix_sums(values: Words) -> Words:
    """(n + 1,) sums mod 2**64 of value times power of its place."""
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * _powers(_BASE, len(values))[: len(values)], out=sums[1:])
    return sums


_tables: dict[int, Words] = {}


def _powers(base: int, least: int) -> Words:
    """At least `least` + 1 powers of `base` mod 2**64, from the 0th."""
    table = _tables.get(base)
    if table is None or len(table) <= least:
        factors = np.full(max(least + 1, _TABLE), base, np.uint64)
        factors[0] = 1
        table = _tables[base] = np.cumprod(factors)
    return table


def _mixed(values: Words) -> Words:
    """Spreads sums over all 64 bits (the finalizer of splitmix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
