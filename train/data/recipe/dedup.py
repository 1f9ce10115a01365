"""Which documents to keep of those that are alike: exact copies, near duplicates by MinHash, overlap by a Bloom filter.

The first of its kind stays, held-out documents first and then by the hash of their text, so the result depends on
neither files nor processes. Broder 1997; Lee et al. 2022 (arXiv:2107.06499); Li et al. 2024 (arXiv:2406.11794).
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
BLOOM_ERROR = 1e-3  # share of new n-grams that the filter takes for old ones
_PAIR_HASHES = 1 << 22  # compared at a time


@dataclass(frozen=True)
class Duplicates:
    """What a step finds in documents in a given order, (n,) each.

    `removed`: goes. `leaked`: goes for being near a held-out document. `like`: the document that it is near, or itself.
    """

    removed: Flags
    leaked: Flags
    like: Integers


def ranks(digests: Hashes, held: Flags) -> Integers:
    """(n,) the place of each document in the order in which the first of its kind stays."""
    rank = np.empty(len(digests), np.int64)
    rank[np.lexsort((digests, ~held))] = np.arange(len(digests))
    return rank


def exact(digests: Hashes, held: Flags) -> Duplicates:
    """Further copies of a text. All copies of a held-out text are held out, and none of them goes."""
    return _firsts(digests, np.arange(len(digests)), held)


def candidates(band: Callable[[int], Hashes], bands: int, usable: Flags) -> Flags:
    """(n,) whether a document shares any band with another one."""
    found = np.zeros(len(usable), bool)
    for number in range(bands):
        order, group = _groups(band(number), usable, np.arange(len(usable)))
        found[order[np.bincount(group)[group] > 1]] = True
    return found


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
    """Near duplicates: pairs from Jaccard similarity `threshold` on.

    `band(i)` gives the (n,) hashes of band i; `sets`, cut by `offsets` (n + 1,), the sorted n-grams of each document
    (empty for documents that are no candidates); `digests` (n,) hashes of the texts. `progress` gets the number of
    bands done.
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
    """Documents that have a hash in common with others, by rank inside their group, and the number of that group."""
    at = np.flatnonzero(usable)
    order = at[np.lexsort((rank[at], hashes[at]))]
    group = np.cumsum(_begins(hashes[order])) - 1
    several = np.bincount(group, minlength=1)[group] > 1
    return order[several], group[several]


def _verified(
    order: Integers, group: Integers, cluster: Integers, alike: Callable[[Integers, Integers], Flags]
) -> Integers:
    """(edges, 2) near pairs: each group's members with its first; those that are not near, among themselves."""
    edges = [np.empty((0, 2), np.int64)]
    for _ in range(32):
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
    """(pairs,) exact Jaccard similarity of documents a and b, each (pairs,)."""
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
        keys = (np.repeat(pair, counts).astype(np.uint64) << np.uint64(32)) | values
        keys.sort()
        again = keys[1:][keys[1:] == keys[:-1]] >> np.uint64(32)
        shared[start:end] = np.bincount(again.astype(np.int64), minlength=end - start)
        start = end
    return shared / np.maximum(both - shared, 1)


def _firsts(cluster: npt.NDArray[Any], rank: Integers, held: Flags) -> Duplicates:
    """Of each cluster the first by rank stays, and what is held out."""
    order = np.lexsort((rank, cluster))
    like = np.empty(len(rank), np.int64)
    like[order] = _leaders(order, cluster[order])
    removed = (like != np.arange(len(rank))) & ~held
    leaked = removed & held[like]
    like[~removed] = np.flatnonzero(~removed)
    return Duplicates(removed, leaked, like)


def _begins(group: npt.NDArray[Any]) -> Flags:
    """(n,) whether a value differs from the one before it."""
    return np.concatenate([np.ones(min(1, len(group)), bool), group[1:] != group[:-1]])


def _leaders(order: Integers, group: npt.NDArray[Any]) -> Integers:
    """(n,) of each entry of `order` the first of its group; groups are runs of equal values."""
    return order[np.maximum.accumulate(np.where(_begins(group), np.arange(len(order)), 0))]


def bloom(
    hashes: Hashes,
    offsets: Offsets,
    digests: Hashes,
    held: Flags,
    share: float,
    progress: Callable[[int], None] = lambda done: None,
) -> Duplicates:
    """Documents of whose n-grams at least `share` occurred in documents before them. `like` is not known.

    `hashes` are the n-grams of all documents, repeated ones too, cut by `offsets` (n + 1,). Overlap with held-out
    documents is `leaked`, and counted separately.
    """
    from rbloom import Bloom

    n = len(digests)
    removed, leaked = np.zeros(n, bool), np.zeros(n, bool)
    order = np.argsort(ranks(digests, held))
    sizes = np.diff(offsets)
    # What is hashed are numbers, whose hash in Python is the same in every process.
    seen = [Bloom(max(1, int(sizes[flags].sum())), BLOOM_ERROR) for flags in (~held, held)]
    for done, i in enumerate(order.tolist(), start=1):
        own: list[Any] = hashes[offsets[i] : offsets[i + 1]].tolist()
        if not own:
            continue
        if not held[i]:
            overlap = [sum(value in part for value in own) for part in seen]
            leaked[i] = overlap[1] >= share * len(own)
            removed[i] = leaked[i] or overlap[0] >= share * len(own)
        if not removed[i]:
            seen[int(held[i])].update(own)
        if done % 4096 == 0:
            progress(done)
    return Duplicates(removed, leaked, np.arange(n))
