"""What the rows of every benchmark have."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

CONTRACT = {"case", "ours", "peer", "peer_name", "unit", "ratio", "spread", "device"}


def checked_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that have the contract's fields, a ratio above 0, and nothing that JSON lacks."""
    found = list(rows)
    assert found == json.loads(json.dumps(found))
    for row in found:
        assert set(row) >= CONTRACT
        assert row["ratio"] > 0
    return found
