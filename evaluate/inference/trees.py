"""Requests as trees of tokens, in which a shared prefix occurs once.

In preorder a token i sees a token j exactly if j <= i < end(j), where j's branch ends. In lexicographic order, a
request shares with the one just before it the prefix that it shares with any earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """Tokens to be scored (`continuation`), after at least one other token (`prefix`)."""

    prefix: Sequence[int] | npt.NDArray[np.integer]
    continuation: Sequence[int] | npt.NDArray[np.integer]

    @property
    def inputs(self) -> Ids:
        """Return the tokens that the model reads: all but the last one, which is only predicted."""
        return np.concatenate([self.prefix, self.continuation[:-1]]).astype(np.int64)


@dataclass(frozen=True)
class Scored:
    place: int  # of the request in its list
    nodes: Ids  # (k,) the tree's tokens after which its k tokens are predicted
    targets: Ids  # (k,) the predicted tokens


@dataclass(frozen=True)
class Tree:
    """Requests as a tree of n tokens in preorder."""

    tokens: Ids  # (n,)
    positions: Ids  # (n,) from the root
    ends: Ids  # (n,) token j is seen by the tokens j <= i < ends[j]
    documents: Ids  # (n,) position at which the token's document begins; 0 if documents are not separated
    scored: list[Scored]  # the requests in this tree

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def branches(self) -> bool:
        return bool((self.ends != len(self)).any())


@dataclass(frozen=True)
class Costs:
    """The cost of a tree of n tokens: token * n + pair * n^2, in any unit."""

    token: float
    pair: float

    def of(self, tokens: int) -> float:
        return self.token * tokens + self.pair * tokens * tokens


def plan_trees(
    requests: Sequence[Request], waiting: Sequence[int], costs: Costs, largest: int, end_of_document: int | None = None
) -> list[Tree]:
    """Pack the requests with indices `waiting` into trees of at most `largest` tokens.

    A request joins the previous request's tree if that costs no more than a new tree; a longer request has a separate
    tree. No token sees what precedes the last `end_of_document` before it.
    """
    growing: list[_Growing] = []
    for place, inputs in ordered(requests, waiting):
        shared = shared_length(growing[-1].inputs, inputs) if growing else 0
        if shared:
            larger = (size := growing[-1].size) + len(inputs) - shared
            if larger > largest or costs.of(larger) > costs.of(size) + costs.of(len(inputs)):
                shared = 0
        if not shared:
            growing.append(_Growing(end_of_document))
        growing[-1].add(place, inputs, shared, np.asarray(requests[place].continuation, dtype=np.int64))
    return [one.tree() for one in growing]


def ordered(requests: Sequence[Request], waiting: Sequence[int]) -> list[tuple[int, Ids]]:
    """Return (index, input tokens) of the requests with indices `waiting`, in lexicographic order of the tokens."""
    inputs = {place: requests[place].inputs for place in waiting}
    # Big-endian numbers of four bytes compare as their bytes do.
    order = sorted(waiting, key=lambda place: inputs[place].astype(">u4").tobytes())
    return [(place, inputs[place]) for place in order]


def shared_length(first: Ids, second: Ids) -> int:
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


def tree_batches(trees: Sequence[Tree], batch_tokens: int) -> Iterator[list[Tree]]:
    """Yield batches of at most `batch_tokens` tokens after padding, or of one tree, longest trees first.

    Trees with branches, which need a mask, are in separate batches.
    """
    order = sorted(trees, key=lambda tree: (tree.branches, -len(tree)))
    start = 0
    while start < len(order):
        stop = min(start + max(1, batch_tokens // len(order[start])), len(order))
        batch = [tree for tree in order[start:stop] if tree.branches == order[start].branches]
        yield batch
        start += len(batch)


class _Growing:
    """A tree under construction, with the path to the request that was added last."""

    def __init__(self, end_of_document: int | None) -> None:
        self._end = end_of_document
        self._parts: list[tuple[Ids, Ids, Ids]] = []  # (tokens, positions, documents)
        self._closed: list[tuple[Ids, int]] = []  # (tokens whose branch has ended, where)
        self._scored: list[Scored] = []
        self.size = 0
        self.inputs = self._path = np.zeros(0, dtype=np.int64)

    def add(self, place: int, inputs: Ids, shared: int, targets: Ids) -> None:
        begins = np.zeros(len(inputs), dtype=np.int64)
        if self._end is not None:  # a document begins after the token that ends one
            begins[1:] = np.where(inputs[:-1] == self._end, np.arange(1, len(inputs)), 0)
        documents = np.maximum.accumulate(begins)
        new = len(inputs) - shared
        self._closed.append((self._path[shared:], self.size))
        self._path = np.concatenate([self._path[:shared], np.arange(self.size, self.size + new)])
        self._parts.append((inputs[shared:], np.arange(shared, len(inputs)), documents[shared:]))
        self._scored.append(Scored(place, self._path[len(inputs) - len(targets) :], targets))
        self.inputs, self.size = inputs, self.size + new

    def tree(self) -> Tree:
        ends = np.full(self.size, self.size)
        for nodes, where in self._closed:
            ends[nodes] = where
        tokens, positions, documents = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        return Tree(tokens, positions, ends, documents, self._scored)
