"""Items: the question, the right answer and the model's answer, from lm-eval's samples, and the file that keeps them.

The prompt is what all of an item's contexts begin with; the rest of a context belongs to its choice (WinoGrande). The
file is gzipped JSON lines, each task a separate member; scores never depend on it, the report's samples do.
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

from ...train.files import plain_value
from ..metrics import ItemResult
from ..tasks.suite import SuiteTask

LONGEST = 4000  # characters of a text that are kept
CUT = " … "
Arguments = set[tuple[Any, ...]]


# --- from lm-eval's samples ------------------------------------------------------------------------------------------


def item_results(
    entry: SuiteTask, samples: list[dict[str, Any]], averaged: set[str], truncated: Arguments, failed: Arguments
) -> list[ItemResult]:
    """Return one result per item of lm-eval's samples, by place; samples of several filters are merged.

    `averaged`: metrics whose mean is the task's score; `truncated`, `failed`: see `harness.CheckpointLM`.
    """
    merged: dict[int, ItemResult] = {}
    for sample in samples:
        suffix = "" if sample["filter"] == "none" else f",{sample['filter']}"
        values = {name + suffix: float(sample[name]) for name in sample["metrics"] if name in averaged}
        place = sample["doc_id"]
        if place in merged:
            merged[place].values.update(values)
            continue
        keys = [tuple(request) for request in sample["arguments"]]
        if entry.task.OUTPUT_TYPE == "generate_until":
            keys = [key[:1] for key in keys]
        merged[place] = ItemResult(
            index=entry.indices[place],
            values=values,
            truncated=any(key in truncated for key in keys),
            failed=any(key in failed for key in keys),
            **_answers(entry.task, sample),
        )
    return [merged[place] for place in sorted(merged)]


def _answers(task: Any, sample: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an `ItemResult` that depend on the kind of task."""
    arguments, responses = sample["arguments"], [response[0] for response in sample["resps"]]
    kind, first = task.OUTPUT_TYPE, arguments[0][0] if arguments else ""
    if kind == "generate_until":
        wanted = sample["target"]  # a text, or several of which any will do
        target = " | ".join(map(str, wanted)) if isinstance(wanted, list | tuple) else str(wanted)
        return {"chance": 0.0, "prompt": first, "answer": str(responses[0]), "target": target}
    if kind == "loglikelihood_rolling":
        return {"log_probabilities": responses, "prompt": first, "bytes": len(first.encode(errors="replace"))}
    nats = [response[0] for response in responses]
    if kind == "loglikelihood":
        gold, target = _gold(arguments[0], nats[0]), arguments[0][1]
        return {"log_probabilities": nats, "gold": gold, "chance": 0.0, "prompt": first, "target": target}
    # With mutual information lm-eval asks for every choice once more without its context, at the end.
    texts = task.doc_to_choice(sample["doc"])
    count, right = len(texts), _right_choices(task, sample["doc"], texts)
    prompt = os.path.commonprefix([context for context, *_ in arguments[:count]])  # noqa: RUF071 (of characters)
    return {
        "log_probabilities": nats[:count],
        "gold": _gold(arguments[right[0]], nats[right[0]]) if right else None,
        "chance": len(right) / count,
        "prompt": prompt,
        "choices": [context[len(prompt) :] + continuation for context, continuation, *_ in arguments[:count]],
        "right": right,
    }


def _gold(arguments: Any, nats: float) -> tuple[float, str] | None:
    context, continuation = arguments[:2]
    text = context[len(context.rstrip()) :] + continuation  # lm-eval scores the context's trailing blanks too
    return (nats, text) if text else None


def _right_choices(task: Any, doc: Any, texts: list[str]) -> list[int]:
    """Return the places of the right choices; as in lm-eval a label is a place, a text, or a list of either."""
    label = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    labels = label if isinstance(label, list) else [label]
    places = [texts.index(one) if isinstance(one, str) and one in texts else one for one in labels]
    return list(dict.fromkeys(place for place in places if isinstance(place, int) and 0 <= place < len(texts)))


# --- the file --------------------------------------------------------------------------------------------------------


def items_path(scores: Path) -> Path:
    """Return the file of items of a file of scores: `scores.json` -> `scores.items.jsonl.gz`."""
    return scores.with_name(f"{scores.stem}.items.jsonl.gz")


def as_dicts(task: str, items: Sequence[ItemResult], contaminated: Collection[int] | None) -> list[dict[str, Any]]:
    """Return a task's items as they are written.

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
    """Return the beginning and the end of a text, together at most `LONGEST` characters."""
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
    """Return the items of an evaluation, if there is a file. A damaged file is moved aside and reported to `say`."""
    if not path.is_file():
        return []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            items = [json.loads(line) for line in file]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        try:
            outcome = f"moved to {move_aside(path).name}"
        except OSError:  # the folder is read-only
            outcome = "left where it is"
        say(f"{path} is no file of items ({error}); {outcome}, and its samples are not shown")
        return []
    return [item for item in items if isinstance(item, dict) and "task" in item and "index" in item]


def move_aside(path: Path) -> Path:
    """Rename a damaged file to `<name>.corrupt-<n>`, and return its new path."""
    candidates = (path.with_name(f"{path.name}.corrupt-{number}") for number in range(1, 1_000_000))
    aside = next(candidate for candidate in candidates if not candidate.exists())
    os.replace(path, aside)
    return aside
