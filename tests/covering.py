"""A few rows that stand for a product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def covering(rows: Sequence[Any], seen: Sequence[Any] = (), key: Callable[[Any], tuple[Any, ...]] = tuple) -> list[Any]:
    """Of `rows` few, in which any two values stand together that do so in one of `rows` and in none of `seen`.

    Each is the one with the most pairs that are new. `key` gives a row's values, None for one that changes nothing.
    """

    def pairs(row: Any) -> set[Any]:
        return set(combinations([(axis, value) for axis, value in enumerate(key(row)) if value is not None], 2))

    new = {pair for row in rows for pair in pairs(row)} - {pair for row in seen for pair in pairs(row)}
    found = []
    while new:
        found.append(max(rows, key=lambda row: len(pairs(row) & new)))
        new -= pairs(found[-1])
    return found


def covered(rows: Iterable[Any]) -> list[Any]:
    """Rows as a test's parameters, of which those outside of a cover are `exhaustive`."""
    rows = list(rows)
    cover = covering(rows)
    return [pytest.param(*row, marks=() if row in cover else pytest.mark.exhaustive) for row in rows]
