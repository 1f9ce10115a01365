"""lm-eval's samples as item results: what was asked, what was right, what the model said of it.

Special here:
- The prompt is what all of an item's contexts begin with; the rest of a context belongs to its choice. For most tasks
  the contexts are the same, and where they differ (WinoGrande) a choice reads as it was asked.
- With mutual information lm-eval asks for every choice once more without its context, at the end; those are no choices.
"""

from __future__ import annotations

import os
from typing import Any

from ..metrics import ItemResult
from ..tasks.suite import SuiteTask

Arguments = set[tuple[Any, ...]]


def item_results(
    entry: SuiteTask, samples: list[dict[str, Any]], averaged: set[str], truncated: Arguments, failed: Arguments
) -> list[ItemResult]:
    """One result an item, by place. A task with several filters has a sample for each; they become one item.

    Args:
        entry: the task.
        samples: as lm-eval's `evaluate` gives them.
        averaged: metrics whose mean is the task's score.
        truncated, failed: arguments of requests, see `harness.CheckpointLM`.
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
    """Fields of an `ItemResult` that follow from the kind of task."""
    arguments, responses = sample["arguments"], [response[0] for response in sample["resps"]]
    kind, first = task.OUTPUT_TYPE, arguments[0][0] if arguments else ""
    if kind == "generate_until":
        return {"chance": 0.0, "prompt": first, "answer": str(responses[0]), "target": _text(sample["target"])}
    if kind == "loglikelihood_rolling":
        return {"log_probabilities": responses, "prompt": first, "bytes": len(first.encode(errors="replace"))}
    nats = [response[0] for response in responses]
    if kind == "loglikelihood":
        gold, target = _gold(arguments[0], nats[0]), arguments[0][1]
        return {"log_probabilities": nats, "gold": gold, "chance": 0.0, "prompt": first, "target": target}
    count = len(task.doc_to_choice(sample["doc"]))
    right = _right_choices(task, sample["doc"], count)
    prompt = os.path.commonprefix([context for context, *_ in arguments[:count]])  # noqa: RUF071 (of characters)
    return {
        "log_probabilities": nats[:count],
        "gold": _gold(arguments[right[0]], nats[right[0]]) if right else None,
        "chance": len(right) / count,
        "prompt": prompt,
        "choices": [context[len(prompt) :] + continuation for context, continuation, *_ in arguments[:count]],
        "right": right,
    }


def _text(target: Any) -> str:
    """lm-eval's target of a generation: a text, or several of which any will do."""
    return " | ".join(map(str, target)) if isinstance(target, list | tuple) else str(target)


def _gold(arguments: Any, nats: float) -> tuple[float, str] | None:
    context, continuation = arguments[:2]
    text = context[len(context.rstrip()) :] + continuation  # lm-eval scores the context's trailing blanks too
    return (nats, text) if text else None


def _right_choices(task: Any, doc: Any, choices: int) -> list[int]:
    """Places of the right choices, by lm-eval's reading of the label: a place, a text, or a list of either."""
    label = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    labels = label if isinstance(label, list) else [label]
    texts = task.doc_to_choice(doc)
    places = [texts.index(one) if isinstance(one, str) and one in texts else one for one in labels]
    return list(dict.fromkeys(place for place in places if isinstance(place, int) and 0 <= place < choices))
