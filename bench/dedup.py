"""Near-duplicate removal of our recipes beside datasketch's MinHash and LSH: documents per second, memory, recall.

Documents are random words whose frequencies fall as those of words do; planted pairs share so many words in a row that
the Jaccard similarity of their 5-grams is what is said. Ours is the whole step, as `data prepare` runs it, on all
cores; datasketch's is one process on a sample, whose rate is its best, for its dictionaries grow. Memory is the peak of
all processes together, as proportional shares (PSS).
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..train.data.corpora import Corpus
from ..train.data.recipe import shingles
from ..train.data.recipe.pool import usable_cores
from ..train.data.recipe.refine import NEAR_WORDS, Refinery
from .contenders import Row, plain_row
from .tokens import drawn_by_rank

ABOUT = "Near-duplicate removal at Jaccard 0.8 (word 5-grams); ratio: ours over the peer's, more is better."
THRESHOLD = 0.8
PLANTED = (0.6, 0.7, 0.8, 0.9)
PAIRS = 2000  # of each similarity
WORDS = (50, 100)  # of a document
VOCABULARY = 50_000
SECONDS, GIBIBYTES, RECALL = 180.0, 4.0, 0.95  # for a million documents, at most and at least
FIGURE, PEER = "figure to reach", "datasketch"


@dataclasses.dataclass(frozen=True)
class Planted(Corpus):
    """Texts, and pairs of their indices by the Jaccard similarity that they were made for."""

    texts: list[str]
    pairs: dict[float, np.ndarray]

    def documents(self) -> Iterator[str]:
        return iter(self.texts)

    def fingerprint(self) -> str:
        return f"{len(self.texts)} planted"

    def size_bytes(self) -> int:
        return sum(map(len, self.texts))

    def sample(self, size: int) -> Iterator[str]:
        return iter(self.texts)


def planted_corpus(documents: int, pairs: int = PAIRS) -> Planted:
    """Documents of random words, with so many planted pairs of each similarity among them, shuffled."""
    random = np.random.default_rng(0)
    letters = random.integers(97, 123, (VOCABULARY, 9)).astype(np.uint8)
    words = [bytes(row[: 2 + i % 8]).decode() for i, row in enumerate(letters)]
    lengths = random.integers(WORDS[0], WORDS[1] + 1, documents)
    drawn = drawn_by_rank(random, VOCABULARY, int(lengths.sum()))
    starts = np.cumsum(lengths) - lengths
    partner = random.permutation(documents)[: 2 * pairs * len(PLANTED)].reshape(len(PLANTED), pairs, 2)
    texts = [
        " ".join([words[i] for i in drawn[start : start + length]])
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
    for similarity, both in zip(PLANTED, partner, strict=True):
        for first, second in both.tolist():
            texts[second] = _like(texts[first].split(), texts[second].split(), similarity)
    return Planted(texts, {similarity: both for similarity, both in zip(PLANTED, partner, strict=True)})


def _like(words: list[str], others: list[str], similarity: float) -> str:
    """A text of as many words whose end is another's: 5-grams in common, over all, at least `similarity`."""
    n = len(words) - NEAR_WORDS + 1
    common = int(np.ceil(2 * n * similarity / (1 + similarity)))
    kept = common + NEAR_WORDS - 1
    fresh = (others * 3)[: len(words) - kept]
    return " ".join([*words[:kept], *fresh])


def exact_jaccard(texts: Sequence[str], pairs: np.ndarray) -> np.ndarray:
    """(pairs,) similarity of texts by Python's own sets of strings: nothing of ours is in it."""

    def ngrams(i: int) -> set[tuple[str, ...]]:
        words = texts[i].split()
        return set(zip(*(words[k:] for k in range(NEAR_WORDS)), strict=False))

    return np.array([len(ngrams(a) & ngrams(b)) / len(ngrams(a) | ngrams(b)) for a, b in pairs.tolist()])


def bench_dedup(documents: int = 1_000_000, sample: int = 10_000, pairs: int = PAIRS) -> list[Row]:
    """Speed beside datasketch's on a `sample`; time, memory, recall and precision beside what is to be reached."""
    corpus = planted_corpus(documents, pairs)
    device = f"cpu, {usable_cores()} cores"
    peer = _datasketch(corpus.texts[:sample]) if sample else None
    with tempfile.TemporaryDirectory() as folder:
        refinery = Refinery(corpus, corpus.fingerprint(), [f"near:{THRESHOLD}"], 1e-6, Path(folder))
        with _watched_memory() as held:
            began = time.perf_counter()
            refined = refinery.run()
            seconds = time.perf_counter() - began
    gone = refined.removed >= 0
    speed = documents / seconds
    rows = [("wall clock", seconds, SECONDS * documents / 1e6, FIGURE, "s")]
    if peer:
        rows.append(("speed", speed, sample / peer, PEER, "documents/s"))
    rows.append(("peak memory", max(held) / 2**30, GIBIBYTES, FIGURE, "GiB"))
    for similarity, both in corpus.pairs.items():
        caught = float((gone[both[:, 0]] | gone[both[:, 1]]).mean())
        if similarity < THRESHOLD:
            rows.append((f"pairs at {similarity} kept", 1 - caught, 1.0, FIGURE, "share"))
        else:
            rows.append((f"pairs at {similarity} found", caught, RECALL, FIGURE, "share"))
    rows.append(("of what went, duplicates", _precision(corpus, gone), 1.0, FIGURE, "share"))
    return [
        # Of seconds and of memory less is better.
        plain_row(f"near duplicates, {case}", ours, to, name, unit, device, to / ours if unit in ("s", "GiB") else None)
        for case, ours, to, name, unit in rows
    ]


def _precision(corpus: Planted, gone: np.ndarray) -> float:
    """Share of what went that was planted, with a similarity of at least the threshold."""
    right = 0
    for both in corpus.pairs.values():
        right += int((gone[both].any(1) & (exact_jaccard(corpus.texts, both) >= THRESHOLD)).sum())
    return right / max(1, int(gone.sum()))


def _datasketch(texts: Sequence[str]) -> float:
    """Seconds for its signatures and its LSH, in one process."""
    from datasketch import MinHash, MinHashLSH

    began = time.perf_counter()
    index = MinHashLSH(threshold=THRESHOLD, num_perm=shingles.SLOTS)
    for i, text in enumerate(texts):
        words = text.split()
        signature = MinHash(num_perm=shingles.SLOTS)
        signature.update_batch(
            [" ".join(words[k : k + NEAR_WORDS]).encode() for k in range(len(words) - NEAR_WORDS + 1)]
        )
        if not index.query(signature):
            index.insert(str(i), signature)
    return time.perf_counter() - began


@contextmanager
def _watched_memory() -> Iterator[list[int]]:
    """The bytes that this process and those that it starts hold, five times a second until the block ends."""
    held, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            held.append(sum(map(_pss, _family(os.getpid()))))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        over.set()
        thread.join()


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task").glob("*/children")
        own = [int(child) for file in children for child in file.read_text().split()]
    except OSError:
        own = []
    return [pid, *(member for child in own for member in _family(child))]


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
