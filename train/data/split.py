"""What is held out of a corpus with too few documents to hold whole ones out: blocks inside documents.

Its fingerprint differs from that of the same text split by documents, so a run's id tells which text scored it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..config import DataConfig
from ..files import read_json
from .corpora import Corpus, open_corpus
from .mixing import below_fraction, content_hash
from .storage import cache_directory, checksum

# Whole documents are held out where at least ENOUGH of them are, or FEWEST whose text is at least half and at most
# twice the share that is asked for. What is larger than LARGE bytes is not read through to find out.
ENOUGH, FEWEST, LARGE = 8, 2, 256 << 20
# Characters: a block is a 16th of the held-out text within these limits, and GAP beside it is neither held out nor
# trained on, so that no sentence or table goes on across the border.
SMALLEST, LARGEST, GAP = 512, 4096, 256
VERSION = 1  # bumped when the same text would be split in other places


@dataclass(frozen=True)
class Blocks(Corpus):
    """A corpus in pieces: blocks that are held out, and the text between them."""

    corpus: Corpus
    size: int  # characters of a block
    held: frozenset[int]  # hashes of those that are held out

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
        """For a manifest: sizes in characters, and all in a sentence."""
        said = (
            f"held out are {len(self.held)} blocks of about {self.size} characters inside documents, because too few "
            f"whole ones fall into data.validation_fraction; {GAP} characters beside each are left out of training"
        )
        return {"by": "blocks", "size": self.size, "gap": GAP, "sentence": said}


def split_corpus(config: DataConfig) -> Corpus:
    """The corpus of a config, in blocks where it was planned so, or where nothing is planned yet and that is better.

    Text of the Hub is held out by documents, for planning does not read it; and so is what the cache already has so.
    """
    corpus = open_corpus(config)
    if config.fingerprint is None:
        if config.corpus == "hf" or not _has_few_documents(corpus, config.validation_fraction):
            return corpus
        there = {"kind": config.corpus, "fingerprint": corpus.fingerprint()}
        for path in (cache_directory(config) / "shards").glob("*/manifest.json"):
            known = read_json(path) or {}
            if known.get("corpus") == there and known.get("validation_fraction") == config.validation_fraction:
                return corpus
    elif config.fingerprint != _fingerprint(corpus):
        return corpus
    wanted = config.validation_fraction * sum(len(text.encode()) for text in corpus.documents())
    size = int(min(max(wanted / 16, SMALLEST), LARGEST))
    blocks, divided = {}, False
    for text in corpus.documents():
        cells = _cells(text, size)
        divided |= len(cells) > 1
        for _, first, last, _ in cells:
            if text[first:last].strip():
                encoded = text[first:last].encode()
                blocks[content_hash(encoded)] = len(encoded)
    held, total = set[int](), 0
    for digest in sorted(blocks)[:-1]:  # one at least is trained on
        if held and total >= wanted:
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
    """(start, start of its block, end of its block, end) of the equal parts of a text; a short one is one block."""
    count = max(1, len(text) // (size + 2 * GAP))
    gap = GAP if count > 1 else 0
    edges = [len(text) * i // count for i in range(count + 1)]
    return [(start, start + gap, end - gap, end) for start, end in pairwise(edges)]
