"""The sizes that an external trainer has, from which a grid picks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_document

ADVICE = "trainer.sizes must be rows such as {N: 1.2e8, n_layer: 12}, of different N from 1 to 1e15"


def read_sizes(sizes: Any) -> list[dict[str, Any]]:
    """Return the rows of trainer.sizes, a list or a .csv, .yaml or .json file, by rising N."""
    rows = sizes
    if isinstance(sizes, str) and sizes.endswith(".csv"):
        import pandas as pd

        try:
            rows = pd.read_csv(sizes).to_dict("records")
        except (OSError, ValueError) as error:
            raise UserError(f"trainer.sizes is {sizes}, which cannot be read ({error}); {ADVICE}") from None
    elif isinstance(sizes, str):
        rows = read_document(Path(sizes), list[dict[str, Any]], remedy=ADVICE)
    try:
        ordered = {float(row["N"]): row for row in rows}
        if not rows or len(ordered) < len(rows) or not 1 <= min(ordered) <= max(ordered) <= 1e15:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise UserError(f"trainer.sizes is {str(sizes)[:200]}; {ADVICE}") from None
    return [ordered[N] | {"N": N} for N in sorted(ordered)]
