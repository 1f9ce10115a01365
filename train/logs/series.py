"""Metrics of a foreign log, collected record by record under isoflop's names."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ..errors import UserError, counted
from ..files import read_document

if TYPE_CHECKING:
    import pandas as pd

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
WITH_UNIT = re.compile(rf"({NUMBER})\s*([KMBGT]?)", re.IGNORECASE)
LOSSES = ("train_loss", "val_loss")
SHOWN = 12  # keys of a log that an error names


class Known(TypedDict):
    """Content of known.yaml."""

    metrics: dict[str, list[str]]
    facts: dict[str, list[str]]
    programs: dict[str, dict[str, Any]]


@cache
def known() -> Known:
    return read_document(Path(__file__).with_name("known.yaml"), Known)


def normalized(key: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", key.lower()).strip("_")


def number(value: Any) -> float | None:
    """Return a number, also one written as "1.3B" or "1,000"; None for other values."""
    if isinstance(value, str):
        match = WITH_UNIT.fullmatch(value.strip())
        return float(match[1].replace(",", "")) * UNITS[match[2].upper()] if match else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, with keys joined by "/"."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


class Roles(dict[str, tuple[str, int] | None]):
    """The isoflop name of each key of a log, and its rank among the keys of that name; None for other keys."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = columns
        named = {name: names for name, names in (known()["metrics"] | known()["facts"]).items() if name not in columns}
        self.names = {alias: (name, rank) for name, names in named.items() for rank, alias in enumerate(names)}
        self.update({key: (name, -1) for name, key in columns.items()})

    def __missing__(self, key: str) -> tuple[str, int] | None:
        self[key] = self.names.get(normalized(key))
        return self[key]


class Series:
    """The numbers of one run by key: steps and values, in the order of the log."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.roles = Roles({name: key for name, key in columns.items() if number(key) is None})
        self.values: dict[str, tuple[array[float], array[float]]] = {}
        self.facts: dict[str, float | str] = {name: value for name, key in columns.items() if (value := number(key))}
        self.records = self.without_step = self.backwards = 0
        self.last_step = -math.inf

    def add(self, record: Mapping[str, Any], step: float | None = None) -> None:
        """Add a record of the log; its step is `step`, or stands in the record."""
        self.records += 1
        numbers, best = [], math.inf
        for key, value in flat(record):
            role = self.roles[key]
            if role is None or (value := number(value)) is None:
                continue
            name, rank = role
            if name == "step":
                if rank < best and math.isfinite(value):
                    step, best = value, rank
            elif name in known()["facts"]:
                self.facts.setdefault(name, value)
            else:
                numbers.append((key, value))
        if not numbers:
            return
        if step is None:
            self.without_step += 1
            return
        self.backwards += step < self.last_step
        self.last_step = step
        for key, value in numbers:
            steps, values = self.values.setdefault(key, (array("d"), array("d")))
            steps.append(step)
            values.append(value)

    def frame(self, source: Path, repeats: tuple[str, ...] = ()) -> tuple[pd.DataFrame, dict[str, str], list[str]]:
        """Return the metrics by step, the key that each was read from, and remarks for the user.

        Of several values of a step the last one counts. Losses that are not finite are left out; the fact `diverged`
        is the step from which on no loss is finite.

        Raises:
            UserError: the log has no steps or no loss.
        """
        import numpy as np
        import pandas as pd

        remarks = []
        if self.without_step and not self.values:
            self._refuse(source, "no step", "step=KEY")
        chosen, columns = {}, {}
        for key in sorted(self.values, key=lambda key: self.roles[key] or ("", 0)):
            name = (self.roles[key] or ("", 0))[0]
            steps, values = self.values[key]
            column = pd.Series(np.frombuffer(values), index=np.frombuffer(steps))
            if name not in chosen and (column.notna().any() or name in LOSSES):
                chosen[name], columns[name] = key, column[~column.index.duplicated(keep="last")].sort_index()
        if absent := [key for name, key in self.roles.columns.items() if name != "step" and key not in chosen.values()]:
            if absent := [key for key in absent if (self.roles[key] or ("",))[0] not in self.facts]:
                self._refuse(source, f"no key {absent[0]!r}", f"{(self.roles[absent[0]] or ('N',))[0]}=KEY")
        if not any(name in columns for name in LOSSES):
            self._refuse(source, "no loss under a known name", "train_loss=KEY or --map val_loss=KEY")
        for name in repeats:
            if name in columns:
                columns[name] = columns[name][columns[name].diff() != 0]
        for name in (name for name in LOSSES if name in columns):
            finite = np.isfinite(columns[name])
            if not finite.all():
                last = columns[name].index[finite].max() if finite.any() else -np.inf
                if (after := columns[name].index[columns[name].index > last]).size:
                    self.facts.setdefault("diverged", float(after[0]))
                remarks.append(f"{source}: {counted(int((~finite).sum()), 'value', 'values')} of {name} "
                               "are not finite and left out")  # fmt: skip
                columns[name] = columns[name][finite]
        if self.backwards:
            remarks.append(
                f"{source}: its steps go back {counted(self.backwards, 'time')}, as after a restart; of two values of "
                "a step the later one counts"
            )
        return pd.DataFrame(columns).rename_axis("step").reset_index(), chosen, remarks

    def _refuse(self, source: Path, what: str, option: str) -> None:
        keys = [key for key in self.roles if isinstance(key, str) and key not in self.roles.columns.values()]
        more = ", …" if len(keys) > SHOWN else ""
        exist = f"has {', '.join(keys[:SHOWN])}{more}" if keys else "is empty or damaged"
        raise UserError(f"{source} has {what}; give --map {option}; it {exist}")
