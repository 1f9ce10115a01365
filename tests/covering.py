"""Small sets of rows that cover all pairs of values of a product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any


def covering(rows: Sequence[Any], seen: Sequence[Any] = (), key: Callable[[Any], tuple[Any, ...]] = tuple) -> list[Any]:
    """Choose few of `rows` that contain every pair of values of `rows` that is not in `seen`.

    Greedy: each chosen row has the most uncovered pairs.

    Args:
        rows: Rows to choose from.
        seen: Rows whose pairs need not be covered.
        key: Returns the values of a row, with None for a value that has no effect.
    """

    def pairs(row: Any) -> set[Any]:
        return set(combinations([(axis, value) for axis, value in enumerate(key(row)) if value is not None], 2))

    uncovered = {pair for row in rows for pair in pairs(row)} - {pair for row in seen for pair in pairs(row)}
    chosen = []
    while uncovered:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & uncovered)))
        uncovered -= pairs(chosen[-1])
    return chosen
