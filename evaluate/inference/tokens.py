"""Text to ids once a tokenizer, for checkpoint after checkpoint.

Special here: a prompt is encoded once for all of its choices, and all texts of a call are encoded together, on all
cores where the tokenizer can. Ids lie as arrays of the tokenizer's own small type, up to a bound of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Encode = Callable[[Sequence[str]], Sequence[Any]]

LARGEST = 1 << 28  # bytes of ids and of text that are kept
_ENTRY = 200  # bytes of an entry beside these


class TokenCache:
    """Ids of texts under one tokenizer.

    Args:
        fingerprint: of the tokenizer; under another one nothing here is of use.
        largest: bytes that are kept at most; what is beyond is encoded anew each time.
    """

    def __init__(self, fingerprint: str, largest: int = LARGEST) -> None:
        self.fingerprint, self.largest, self.bytes = fingerprint, largest, 0
        self._ids: dict[str, np.ndarray] = {}

    def encode(self, texts: Iterable[str], encode: Encode) -> dict[str, list[int]]:
        """Ids of each text; those that are not known yet by `encode`, which takes many texts at a time."""
        wanted = dict.fromkeys(texts)
        new = [text for text in wanted if text not in self._ids]
        arrays = dict(zip(new, map(np.asarray, encode(new)), strict=True)) if new else {}
        for text, ids in arrays.items():
            size = ids.nbytes + len(text) + _ENTRY
            if self.bytes + size <= self.largest:
                self._ids[text] = ids
                self.bytes += size
        return {text: (arrays[text] if text in arrays else self._ids[text]).tolist() for text in wanted}

    def __len__(self) -> int:
        return len(self._ids)
