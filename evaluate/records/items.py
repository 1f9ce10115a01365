"""Every item of an evaluation on disk: what was asked, what the model said of each choice, and what that scored.

Special here:
- Gzipped JSON lines, an item a line, replaced in one rename. Each task is a gzip member of its own, so that a file
  that grows task by task compresses each of them once. The same items are the same bytes.
- Reading forgives: a damaged file is moved aside and said, and lines that are no item are left out. Scores never
  depend on it; the report's samples do.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...train.files import plain
from ..metrics import ItemResult
from .answers import move_aside

LONGEST = 4000  # characters of a text that are kept
CUT = " … "


def items_path(scores: Path) -> Path:
    """Where the items of a file of scores lie: `scores.json` -> `scores.items.jsonl.gz`."""
    return scores.with_name(f"{scores.stem}.items.jsonl.gz")


def as_dicts(task: str, items: Sequence[ItemResult], contaminated: Collection[int] | None) -> list[dict[str, Any]]:
    """A task's items as they are written.

    Texts are cut in the middle to `LONGEST` characters, and what is no finite number is None.
    """
    return [
        {
            "task": task,
            "index": item.index,
            "prompt": shortened(item.prompt),
            "choices": None if item.choices is None else [shortened(choice) for choice in item.choices],
            "right": item.right,
            "log_probabilities": [_finite(value) for value in item.log_probabilities],
            "answer": None if item.answer is None else shortened(item.answer),
            "target": None if item.target is None else shortened(item.target),
            "values": {name: _finite(value) for name, value in item.values.items()},
            "gold_bpb": _finite(item.gold_bpb),
            "p_right": _finite(item.p_right),
            "margin": _finite(item.margin),
            "bpb": _finite(item.bpb),
            "truncated": item.truncated,
            "contaminated": None if contaminated is None else item.index in contaminated,
        }
        for item in items
    ]


def shortened(text: str) -> str:
    """At most `LONGEST` characters: its beginning and its end."""
    if len(text) <= LONGEST:
        return text
    room = LONGEST - len(CUT)
    return text[: room - room // 2] + CUT + text[-(room // 2) :]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def pack(items: Iterable[dict[str, Any]]) -> bytes:
    """Items of one task as a gzip member."""
    lines = "".join(json.dumps(item, default=plain) + "\n" for item in items)
    return gzip.compress(lines.encode(), compresslevel=5, mtime=0)


def read_items(path: Path, say: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """The items of an evaluation; none where there is no file.

    Args:
        path: see `items_path`.
        say: told of a damaged file, which is moved aside.
    """
    if not path.is_file():
        return []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            items = [json.loads(line) for line in file]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        try:
            said = f"moved to {move_aside(path).name}"
        except OSError:  # somebody else's folder
            said = "left where it is"
        say(f"{path} is no file of items ({error}); {said}, and its samples are not shown")
        return []
    return [item for item in items if isinstance(item, dict) and "task" in item and "index" in item]
