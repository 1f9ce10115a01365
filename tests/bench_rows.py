"""Check of the fields that the rows of every benchmark must have."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

CONTRACT = {"case", "ours", "peer", "peer_name", "unit", "ratio", "spread", "device"}


def checked_rows(iterable: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows after checking that they have the required fields, a ratio above 0, and only JSON values."""
    rows = list(iterable)
    assert rows == json.loads(json.dumps(rows))
    for row in rows:
        assert set(row) >= CONTRACT
        assert row["ratio"] > 0
    return rows
