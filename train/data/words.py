"""Fast encoder for a byte-level BPE: a word's ids depend on the word alone, so each distinct word is encoded once.

The tokenizer itself is asked which characters are letters, digits or spaces, because Unicode tables differ between
libraries and versions.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from .mixing import Tokens

_MAX_CACHED_CHARACTERS = 1 << 21  # of cached words: about 60 MB with their ids
_VISIBLE = {*range(33, 127), *range(161, 173), *range(174, 256)}  # bytes that GPT-2 writes as themselves
_HIDDEN = sorted({*range(256)} - _VISIBLE)  # bytes that GPT-2 writes as characters from 256 on
_WRITTEN = {byte: chr(256 + at) for at, byte in enumerate(_HIDDEN)}
_BEFORE = {"letters": "a", "digits": "1", "others": "!"}  # a prefix that forms one word with a character of this class


def can_encode(content: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json is a byte-level BPE that only splits text by GPT-2's regular expression."""
    model, cut = content.get("model") or {}, content.get("pre_tokenizer") or {}
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and content.get("normalizer") is None
        and cut.get("type") == "ByteLevel"
        and cut.get("use_regex", True)
        and not cut.get("add_prefix_space", True)
        and all(token["special"] for token in content["added_tokens"])
    )


class Words:
    """An encoder that gives the same ids as `backend`.

    `can_encode` must accept the backend's content, and the backend must not recognise special tokens in text.
    """

    def __init__(self, backend: Any, dtype: Any) -> None:
        self._model, self._pieces = backend.model, backend.pre_tokenizer.pre_tokenize_str
        self._dtype = dtype
        self._ids: dict[str, bytes] = {}
        self._room = _MAX_CACHED_CHARACTERS
        self._classes: dict[str, list[int]] = {name: [] for name in (*_BEFORE, "spaces")}
        self._classified: set[str] = set()
        self._learn_characters({"a"})

    def encode(self, text: str) -> Tokens:
        if not text.isascii() and (new := set(text) - self._classified):
            self._learn_characters(new)
        text_words, ids = self._words.findall(text), self._ids
        if new := set(text_words).difference(ids):
            if self._room < 0:
                ids, self._room, new = {}, _MAX_CACHED_CHARACTERS, set(text_words)
                self._ids = ids  # not cleared, because another thread may still read the old dict
            self._room -= sum(map(len, new))
            for word in new:
                written = word.encode().decode("latin-1").translate(_WRITTEN)
                ids[word] = np.array([token.id for token in self._model.tokenize(written)], self._dtype).tobytes()
        return np.frombuffer(b"".join(map(ids.__getitem__, text_words)), self._dtype)

    def _learn_characters(self, new: set[str]) -> None:
        for block in {ord(character) >> 8 for character in new}:
            for code in range(block << 8, block + 1 << 8):
                matches = (name for name, before in _BEFORE.items() if len(self._pieces(before + chr(code))) == 1)
                self._classes[next(matches, "spaces")].append(code)
                self._classified.add(chr(code))
        letters, digits, _, spaces = map(_ranges, self._classes.values())
        self._words = re.compile(
            f"'(?:[sdmt]|ll|ve|re)| ?[{letters}]+| ?[{digits}]+| ?[^{letters}{digits}{spaces}]+"
            f"|[{spaces}]+(?![^{spaces}])|[{spaces}]+"
        )


def _ranges(codes: list[int]) -> str:
    ordered = np.array(sorted(codes))
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    return "".join(f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in runs)
