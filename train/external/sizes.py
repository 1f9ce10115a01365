"""The sizes that an external trainer has, from which a grid picks."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_document

LARGEST = 1e15  # parameters


def read_sizes(sizes: Any) -> list[dict[str, Any]]:
    """Return the rows of trainer.sizes by rising N; numbers in a .csv file become numbers.

    Args:
        sizes: A list of mappings, each with N, or a .yaml, .json or .csv file of them.
    """
    rows = sizes
    if isinstance(sizes, str):
        path = Path(sizes).expanduser()
        if path.suffix == ".csv":
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"trainer.sizes is {sizes!r}, which cannot be read ({error})") from None
            rows = [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(text.splitlines())]
        else:
            rows = read_document(path, list[dict[str, Any]], remedy="trainer.sizes must be a list of rows, each with N")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"trainer.sizes is {sizes!r}; it must be a list of rows such as {{N: 1.2e8, n_layer: 12}}")
    for row in rows:
        for name in ("N", "N_non_embedding", "flops_per_token"):
            value = row.get(name, math.nan if name == "N" else 1.0)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value <= LARGEST:
                shown = row.get(name, "missing")
                raise UserError(f"trainer.sizes: {name} of the row {row} is {shown}; it must be a number from 1 on")
    rows = sorted(rows, key=lambda row: float(row["N"]))
    if repeated := next((row for row, other in zip(rows[1:], rows, strict=False) if row["N"] == other["N"]), None):
        raise UserError(f"trainer.sizes has two rows with N {repeated['N']}; give one of them")
    return rows


def _number(text: Any) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            continue
    return text
