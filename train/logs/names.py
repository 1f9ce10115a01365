"""Names and numbers in foreign logs, translated to isoflop's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from ..files import read_document

LOSSES = ("train_loss", "val_loss")
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?i:nan|inf(?:inity)?))"
WITH_UNIT = re.compile(rf"({NUMBER})\s*([KMBGT]?)")


class Known(TypedDict):
    """Content of known.yaml."""

    metrics: dict[str, list[str]]
    facts: dict[str, list[str]]
    programs: dict[str, dict[str, Any]]


@cache
def known() -> Known:
    return read_document(Path(__file__).with_name("known.yaml"), Known)


def number(value: Any) -> float | None:
    """Return a number, also one written as "1.3B" or "1,000"; None for other values."""
    if isinstance(value, str):
        match = WITH_UNIT.fullmatch(value.strip())
        return float(match[1].replace(",", "")) * UNITS[match[2]] if match else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def normalized(key: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", key.lower()).strip("_") if len(key) > 1 else key


class Roles(dict[str, tuple[int, str] | None]):
    """For each key of a log, its rank among the keys with the same meaning, and isoflop's name; None for other keys."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        """`columns`: keys by isoflop's name that replace the known ones."""
        self.update({key: (-1, name) for name, key in columns.items()})
        self.metrics, self.facts = (
            {normalized(alias): (rank, name) for name, aliases in names.items() for rank, alias in enumerate(aliases)
             if name not in columns} for names in (known()["metrics"], known()["facts"])
        )  # fmt: skip

    def __missing__(self, key: str) -> tuple[int, str] | None:
        leaf = normalized(key.rpartition("/")[2])  # a config may be nested
        self[key] = self.metrics.get(normalized(key)) or self.facts.get(normalized(key)) or self.facts.get(leaf)
        return self[key]
