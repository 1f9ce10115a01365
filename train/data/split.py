"""Hold-out by blocks inside documents, for a corpus with too few documents to hold out whole ones.

This changes the corpus fingerprint, so the run id shows which text scored the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..config import DataConfig
from ..errors import counted
from ..files import read_json
from .corpora import Corpus, open_corpus
from .mixing import below_fraction, content_hash
from .storage import cache_directory, checksum

# Whole documents are held out if there are at least ENOUGH of them, or FEWEST with 0.5 to 2 times the requested share
# of the text. A corpus larger than LARGE bytes is assumed to have enough. All chosen by hand.
ENOUGH, FEWEST, LARGE = 8, 2, 256 << 20
# In characters. A block is a 16th of the held-out text, within SMALLEST and LARGEST. GAP on each side of it is neither
# held out nor trained on, so that no sentence or table crosses the border. Chosen by hand.
SMALLEST, LARGEST, GAP = 512, 4096, 256
VERSION = 1  # bump when the same text would be split in other places


@dataclass(frozen=True)
class Blocks(Corpus):
    """A corpus cut into held-out blocks and the text between them."""

    corpus: Corpus
    size: int  # characters of a block
    held: frozenset[int]  # hashes of held-out blocks

    def documents(self) -> Iterator[str]:
        for text in self.corpus.documents():
            start, pieces = 0, []
            for cell, first, last, end in _cells(text, self.size):
                if content_hash(text[first:last].encode()) in self.held:
                    pieces += [text[start:cell], text[first:last]]
                    start = end
            yield from filter(str.strip, [*pieces, text[start:]])

    def fingerprint(self) -> str:
        return _fingerprint(self.corpus)

    def size_bytes(self) -> int | None:
        return self.corpus.size_bytes()

    def held_out(self) -> frozenset[int]:
        return self.held

    def describe(self) -> dict[str, Any]:
        """Return the manifest's entry on the split: sizes in characters, and an explanation."""
        sentence = (
            f"the held-out text is {counted(len(self.held), 'block')} of about {self.size} characters inside "
            f"documents, because data.validation_fraction selects too few whole documents; the {GAP} characters on "
            "each side of a block are not used for training"
        )
        return {"by": "blocks", "size": self.size, "gap": GAP, "sentence": sentence}


def split_corpus(config: DataConfig) -> Corpus:
    """Open a config's corpus. If it has too few documents to hold out whole ones, hold out blocks inside them.

    A planned run keeps the plan's choice. A Hub corpus, which planning does not read, always holds out whole documents;
    so does a corpus whose cached shards do.
    """
    corpus = open_corpus(config)
    if config.fingerprint is None:
        if config.corpus in ("hf", "external") or not _has_few_documents(corpus, config.validation_fraction):
            return corpus
        entry = {"kind": config.corpus, "fingerprint": corpus.fingerprint()}
        for path in (cache_directory(config) / "shards").glob("*/manifest.json"):
            manifest = read_json(path) or {}
            if (manifest.get("corpus"), manifest.get("validation_fraction")) == (entry, config.validation_fraction):
                return corpus
    elif config.fingerprint != _fingerprint(corpus):
        return corpus
    held_out_bytes = config.validation_fraction * sum(len(text.encode()) for text in corpus.documents())
    size = int(min(max(held_out_bytes / 16, SMALLEST), LARGEST))
    blocks, divided = {}, False
    for text in corpus.documents():
        cells = _cells(text, size)
        divided |= len(cells) > 1
        for _, first, last, _ in cells:
            if text[first:last].strip():
                encoded = text[first:last].encode()
                blocks[content_hash(encoded)] = len(encoded)
    held, total = set[int](), 0
    for digest in sorted(blocks)[:-1]:  # at least one block stays for training
        if held and total >= held_out_bytes:
            break
        held.add(digest)
        total += blocks[digest]
    return Blocks(corpus, size, frozenset(held)) if held and (divided or config.fingerprint) else corpus


def _fingerprint(corpus: Corpus) -> str:
    return checksum(["blocks", VERSION, corpus.fingerprint()])[:16]


def _has_few_documents(corpus: Corpus, fraction: float) -> bool:
    held, trained, total = dict[int, int](), False, 0
    for text in corpus.documents():
        encoded = text.encode()
        total += len(encoded)
        if below_fraction(digest := content_hash(encoded), fraction):
            held[digest] = len(encoded)
        else:
            trained = True
        if total > LARGE or (trained and len(held) >= ENOUGH):
            return False
    return not (trained and len(held) >= FEWEST and 0.5 <= sum(held.values()) / (fraction * total) <= 2)


def _cells(text: str, size: int) -> list[tuple[int, int, int, int]]:
    """Cut a text into consecutive cells: a block of about `size` characters between two margins.

    Returns (start, block start, block end, end) of each cell.
    """
    count = max(1, len(text) // (size + 2 * GAP))
    gap = GAP if count > 1 else 0
    edges = [len(text) * i // count for i in range(count + 1)]
    return [(start, start + gap, end - gap, end) for start, end in pairwise(edges)]
