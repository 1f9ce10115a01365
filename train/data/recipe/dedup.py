"""Deduplication: exact copies, near duplicates by MinHash, and overlap by a Bloom filter.

Broder 1997; Lee et al. 2022 (arXiv:2107.06499); Li et al. 2024 (arXiv:2406.11794).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .shingles import Hashes, Offsets

Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
BLOOM_ERROR = 1e-3  # share of new n-grams that the filter reports as seen; chosen by hand
_PAIR_HASHES = 1 << 22  # hashes compared at a time, to bound memory


@dataclass(frozen=True)
class Duplicates:
    """The documents that a step removes, as arrays (n,) over the documents it gets.

    `removed`: whether a document is removed. `leaked`: whether a similar held-out document is the reason. `like`: index
    of the document that it resembles, else its own index.
    """

    removed: Flags
    leaked: Flags
    like: Integers


def ranks(digests: Hashes, held: Flags) -> Integers:
    """Rank documents (n,): held-out ones first, then by hash. Of duplicates, the first stays."""
    rank = np.empty(len(digests), np.int64)
    rank[np.lexsort((digests, ~held))] = np.arange(len(digests))
    return rank


def exact(digests: Hashes, held: Flags) -> Duplicates:
    """Mark exact copies: of documents with equal hashes `digests` (n,), all but the first. Held-out documents stay."""
    return _firsts(digests, np.arange(len(digests)), held)


def candidates(band: Callable[[int], Hashes], bands: int, usable: Flags) -> Flags:
    """Return a mask (n,) of usable documents whose hash in some band equals another's. `band`: see `near`."""
    is_candidate = np.zeros(len(usable), bool)
    for number in range(bands):
        order, group = _groups(band(number), usable, np.arange(len(usable)))
        is_candidate[order[np.bincount(group)[group] > 1]] = True
    return is_candidate


def near(
    band: Callable[[int], Hashes],
    bands: int,
    sets: npt.NDArray[np.uint32],
    offsets: Offsets,
    digests: Hashes,
    held: Flags,
    threshold: float,
    progress: Callable[[int], None] = lambda done: None,
) -> Duplicates:
    """Find near duplicates: pairs with a Jaccard similarity of at least `threshold`.

    Args:
        band: `band(i)` returns the documents' hashes (n,) of band i of the signatures.
        sets: N-gram hashes of all documents, sorted within each; none for documents that are not `candidates`.
        offsets: (n + 1,) where each document's n-grams start in `sets`.
        digests: (n,) hashes of the texts.
        held: (n,) whether a document is held out.
        progress: Called with the number of finished bands.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    rank, usable = ranks(digests, held), np.diff(offsets) > 0
    n = len(rank)
    cluster = np.arange(n, dtype=np.int64)
    for number in range(bands):
        order, group = _groups(band(number), usable, rank)
        edges = _verified(order, group, cluster, lambda a, b: jaccard(a, b, sets, offsets) >= threshold)
        if len(edges):
            graph = coo_array((np.ones(len(edges), bool), (cluster[edges[:, 0]], cluster[edges[:, 1]])), shape=(n, n))
            cluster = connected_components(graph, directed=False)[1].astype(np.int64)[cluster]
        progress(number + 1)
    return _firsts(cluster, rank, held)


def _groups(hashes: Hashes, usable: Flags, rank: Integers) -> tuple[Integers, Integers]:
    """Group usable documents by hash, without groups of one. Return them by group and rank, and their group numbers."""
    at = np.flatnonzero(usable)
    order = at[np.lexsort((rank[at], hashes[at]))]
    group = np.cumsum(_begins(hashes[order])) - 1
    several = np.bincount(group, minlength=1)[group] > 1
    return order[several], group[several]


def _verified(
    order: Integers, group: Integers, cluster: Integers, alike: Callable[[Integers, Integers], Flags]
) -> Integers:
    """Compare documents with the first of their group; unlike ones form a new group. Return alike pairs (pairs, 2)."""
    edges = [np.empty((0, 2), np.int64)]
    for _ in range(32):  # at most 32 leaders of a group, to bound the work
        if not len(order):
            break
        leader = _leaders(order, group)
        open_pairs = cluster[order] != cluster[leader]
        linked = ~open_pairs
        linked[open_pairs] = alike(order[open_pairs], leader[open_pairs])
        edges.append(np.stack([order, leader], 1)[linked & open_pairs])
        order, group = order[~linked], group[~linked]
    return np.concatenate(edges)


def jaccard(a: Integers, b: Integers, sets: npt.NDArray[np.uint32], offsets: Offsets) -> npt.NDArray[np.float64]:
    """Return the exact Jaccard similarities (pairs,) of documents a[i] and b[i]. `sets`: see `near`."""
    sizes = np.diff(offsets)
    both = sizes[a] + sizes[b]
    shared = np.zeros(len(a), np.int64)
    start = 0
    total = np.cumsum(both)
    while start < len(a):
        limit = (total[start - 1] if start else 0) + _PAIR_HASHES
        end = max(start + 1, int(np.searchsorted(total, limit, side="right")))
        pair = np.concatenate([np.arange(end - start)] * 2)
        documents = np.concatenate([a[start:end], b[start:end]])
        counts = sizes[documents]
        begins = np.repeat(offsets[documents] - (np.cumsum(counts) - counts), counts)
        values = np.asarray(sets[begins + np.arange(len(begins))]).astype(np.uint64)
        keys = (np.repeat(pair, counts).astype(np.uint64) << np.uint64(32)) | values  # pair number, then n-gram
        keys.sort()
        again = keys[1:][keys[1:] == keys[:-1]] >> np.uint64(32)  # an n-gram that both documents of a pair have
        shared[start:end] = np.bincount(again.astype(np.int64), minlength=end - start)
        start = end
    return shared / np.maximum(both - shared, 1)


def _firsts(cluster: npt.NDArray[Any], rank: Integers, held: Flags) -> Duplicates:
    order = np.lexsort((rank, cluster))
    like = np.empty(len(rank), np.int64)
    like[order] = _leaders(order, cluster[order])
    removed = (like != np.arange(len(rank))) & ~held
    leaked = removed & held[like]
    like[~removed] = np.flatnonzero(~removed)
    return Duplicates(removed, leaked, like)


def _begins(group: npt.NDArray[Any]) -> Flags:
    return np.concatenate([np.ones(min(1, len(group)), bool), group[1:] != group[:-1]])


def _leaders(order: Integers, group: npt.NDArray[Any]) -> Integers:
    """Return the first document of each document's group, given documents in `order` and their group numbers."""
    return order[np.maximum.accumulate(np.where(_begins(group), np.arange(len(order)), 0))]


def bloom(
    hashes: Hashes,
    offsets: Offsets,
    digests: Hashes,
    held: Flags,
    share: float,
    progress: Callable[[int], None] = lambda done: None,
) -> Duplicates:
    """Remove documents with at least `share` of their n-grams in kept documents of lower rank (see `ranks`).

    `leaked`: held-out documents alone contain that share. `like`: each document's own index. `hashes` has all n-grams,
    also repeated ones; document i's start at `offsets[i]`.
    """
    from rbloom import Bloom

    n = len(digests)
    removed, leaked = np.zeros(n, bool), np.zeros(n, bool)
    order = np.argsort(ranks(digests, held))
    sizes = np.diff(offsets)
    # Python hashes integers to the same value in every process, unlike strings.
    seen = [Bloom(max(1, int(sizes[flags].sum())), BLOOM_ERROR) for flags in (~held, held)]
    for done, i in enumerate(order.tolist(), start=1):
        document_hashes: list[Any] = hashes[offsets[i] : offsets[i + 1]].tolist()
        if not document_hashes:
            continue
        if not held[i]:
            overlap = [sum(value in part for value in document_hashes) for part in seen]
            leaked[i] = overlap[1] >= share * len(document_hashes)
            removed[i] = leaked[i] or overlap[0] >= share * len(document_hashes)
        if not removed[i]:
            seen[int(held[i])].update(document_hashes)
        if done % 4096 == 0:
            progress(done)
    return Duplicates(removed, leaked, np.arange(n))
