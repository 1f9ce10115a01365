"""The file of a checkpoint's items: each question, the right answer and the model's answer, as gzipped JSON lines.

Each task is a separate gzip member. Reading it needs no torch.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..train.files import plain_value, read_json
from .metrics import ItemResult

LONGEST = 4000  # characters of a text that are kept
CUT = " … "
Items = list[dict[str, Any]]
WEIGHTS = ("checkpoint_sha256", "average")  # which weights were scored


def items_path(scores: Path) -> Path:
    """Return the path of the items of a file of scores: `scores.json` -> `scores.items.jsonl.gz`."""
    return scores.with_name(f"{scores.stem}.items.jsonl.gz")


def as_dicts(task: str, items: Sequence[ItemResult], contaminated: Collection[int] | None) -> list[dict[str, Any]]:
    """Convert a task's items for the file of items. `contaminated`: indices of such items, None if unknown.

    Texts are cut in the middle to `LONGEST` characters, and numbers that are not finite become None.
    """
    return [
        {
            "task": task,
            "index": item.index,
            "prompt": shortened(item.prompt),
            "choices": item.choices and [shortened(choice) for choice in item.choices],
            "right": item.right,
            "log_probabilities": [_finite(value) for value in item.log_probabilities],
            "answer": item.answer and shortened(item.answer),
            "target": item.target and shortened(item.target),
            "values": {name: _finite(value) for name, value in item.values.items()},
            **{name: _finite(getattr(item, name)) for name in ("gold_bpb", "p_right", "margin", "bpb")},
            "truncated": item.truncated,
            "contaminated": None if contaminated is None else item.index in contaminated,
        }
        for item in items
    ]


def shortened(text: str) -> str:
    """Cut the middle out of a text that is longer than `LONGEST` characters."""
    if len(text) <= LONGEST:
        return text
    room = LONGEST - len(CUT)
    return text[: room - room // 2] + CUT + text[-(room // 2) :]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def pack_items(items: Iterable[dict[str, Any]]) -> bytes:
    lines = "".join(json.dumps(item, default=plain_value) + "\n" for item in items)
    return gzip.compress(lines.encode(), compresslevel=5, mtime=0)


def read_items(path: Path, say: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """Read a file of items; [] if it is missing or damaged. A damaged file is renamed and reported to `say`."""
    if not path.is_file():
        return []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            items = [json.loads(line) for line in file]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        try:
            outcome = f"it was renamed to {move_aside(path).name}"
        except OSError:  # the folder is read-only
            outcome = "it could not be renamed"
        say(f"{path} is not a file of items ({error}); {outcome}, and its samples are not shown")
        return []
    return [item for item in items if isinstance(item, dict) and "task" in item and "index" in item]


def with_earlier(scores: dict[str, Any], items: Items, file: Path) -> tuple[dict[str, Any], Items]:
    """Add the scores and items of further tasks from `file`, another file of scores of the same checkpoint."""
    old = read_json(file)
    if old is None or not is_whole(old) or any(old.get(key) != scores.get(key) for key in WEIGHTS):
        return scores, items
    others = [item for item in read_items(items_path(file)) if item["task"] not in scores["tasks"]]
    return scores | {name: old.get(name, {}) | scores[name] for name in ("tasks", "suites")}, items + others


def move_aside(path: Path) -> Path:
    """Rename a damaged file to `<name>.corrupt-<n>`, and return its new path."""
    candidates = (path.with_name(f"{path.name}.corrupt-{number}") for number in range(1, 1_000_000))
    aside = next(candidate for candidate in candidates if not candidate.exists())
    os.replace(path, aside)
    return aside


def is_whole(scores_file: dict[str, Any]) -> bool:
    """Return whether a file of scores has the fields that readers need, in every task."""
    tasks = scores_file.get("tasks")
    return isinstance(tasks, dict) and all(
        isinstance(scores, dict)
        and isinstance(scores.get("subset"), dict)
        and {"items", "seconds", "withheld"} <= scores.keys()
        for scores in tasks.values()
    )
