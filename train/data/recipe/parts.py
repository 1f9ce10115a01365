"""A corpus in parts on disk: texts, their hashes and what steps found in them; a file that is there is a job done.

The functions here run in the processes of a `Pool`, each of which holds one part at a time.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...files import write_atomic
from ..mixing import content_hash
from . import filters, shingles
from .recipe import Step

PART_BYTES = 8 << 20  # of text
PART_DOCUMENTS = 1 << 14
NEAR_WORDS, BLOOM_WORDS = 5, 13  # words of an n-gram
Flags = npt.NDArray[np.bool_]


def in_parts(texts: Iterable[str], size: int, documents: int | None = None) -> Iterator[list[str]]:
    """Texts in lists, each as short as makes up `size` characters or, where given, so many documents."""
    part: list[str] = []
    characters = 0
    for text in texts:
        part.append(text)
        characters += len(text)
        if characters >= size or len(part) == documents:
            yield part
            part, characters = [], 0
    if part:
        yield part


def part_file(folder: Path, number: int, kind: str) -> Path:
    return folder / f"{number:06d}.{kind}"


def write_part(folder: Path, number: int, texts: list[str]) -> int:
    """Writes texts, with the hash and the size of each."""
    import zstandard

    encoded = [text.encode() for text in texts]
    whole = zstandard.ZstdCompressor(level=1).compress(b"".join(encoded))
    write_atomic(part_file(folder, number, "zst"), [whole], flush=False)
    digests = np.fromiter(map(content_hash, encoded), np.uint64, len(encoded))
    save_arrays(part_file(folder, number, "npz"), digests=digests, sizes=np.fromiter(map(len, encoded), np.int64))
    return number


def read_texts(folder: Path, number: int) -> list[str]:
    import zstandard

    whole = zstandard.ZstdDecompressor().decompress(part_file(folder, number, "zst").read_bytes())
    ends = np.cumsum(load_arrays(part_file(folder, number, "npz"))["sizes"]).tolist()
    return [whole[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]


def filter_part(folder: Path, number: int, kind: str, asked: Flags, steps: list[Step]) -> int:
    """Runs steps that look at one document at a time over the documents asked for.

    Writes `step` (documents,) int16, the number of the step that removes each one or -1, and `reason`, an index of
    `reasons`.
    """
    texts = read_texts(folder, number)
    step, reason = np.full(len(texts), -1, np.int16), np.zeros(len(texts), np.int16)
    reasons: dict[str, int] = {"": 0}
    for k, each in enumerate(steps):
        left = np.flatnonzero(asked & (step < 0)).tolist()
        for i, said in zip(left, filters.make_filter(each)([texts[i] for i in left]), strict=True):
            if said is not None:
                step[i], reason[i] = k, reasons.setdefault(said, len(reasons))
    save_arrays(part_file(folder, number, kind), step=step, reason=reason, reasons=np.array(json.dumps(list(reasons))))
    return number


def sign_part(folder: Path, number: int, kind: str, asked: Flags, bands: int, rows: int) -> int:
    """Writes `bands` (bands, documents asked for), hashes of their signatures, and `words`, whether they have any."""
    hashes, offsets = shingles.ngrams(_asked(folder, number, asked), NEAR_WORDS)
    signed = shingles.band_hashes(shingles.signatures(hashes, offsets), bands, rows)
    save_arrays(part_file(folder, number, kind), bands=np.ascontiguousarray(signed.T), words=np.diff(offsets) > 0)
    return number


def ngrams_part(folder: Path, number: int, kind: str, asked: Flags, words: int, as_sets: bool = False) -> int:
    """Writes the n-grams of the documents asked for, `hashes` and `offsets`; see `shingles.ngrams` and `distinct`."""
    hashes, offsets = shingles.ngrams(_asked(folder, number, asked), words)
    if as_sets:
        hashes, offsets = shingles.distinct(hashes, offsets)
    save_arrays(part_file(folder, number, kind), hashes=hashes, offsets=offsets)
    return number


def _asked(folder: Path, number: int, asked: Flags) -> list[str]:
    texts = read_texts(folder, number)
    return [texts[i] for i in np.flatnonzero(asked).tolist()]


def save_arrays(path: Path, **arrays: npt.NDArray[Any]) -> None:
    """Arrays to a file that is whole or absent."""
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_atomic(path, [content.getbuffer()], flush=False)


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
