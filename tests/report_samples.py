"""Scores, items and rows for the tests of the evaluation reports."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from isoflop.evaluate.pages.paired import Answers, Paired, answers_of

RAN = "document.documentElement.dataset.ran=1"
# Strings that could run as a script, break out of HTML, reverse or hide text, or stretch the page.
HOSTILE = (
    f"<script>{RAN}</script></script><!--<img src=x onerror={RAN}><svg onload={RAN}>\"'&amp;</textarea></title>"
    "\u202egnirts\u2066\x00\u2028\ud800" + "w" * 300
)


def numbers(value: float = 0.4, **changes: Any) -> dict[str, Any]:
    """Return the scores of one task."""
    scores: dict[str, Any] = {}
    for rank, key in enumerate(("acc", "acc_norm", "gold_bpb", "p_right", "margin")):
        scores[key], scores[f"{key}_se"] = value + rank / 10, 0.01 + rank / 100
    scores |= {"bpb": None, "bpb_se": None, "chance": 0.25, "items": 40, "truncated_items": 0, "withheld": None}
    scores |= {"subset": {"items": 40, "of": 10042}, "version": 1, "seconds": 1.0, "shots": 5}
    return scores | {"contaminated_items": None, "clean": None} | changes


def domain(bpb: float, **changes: Any) -> dict[str, Any]:
    """Return the scores of a folder of text."""
    empty = {key: None for key in ("acc", "acc_norm", "gold_bpb", "p_right", "margin", "chance")}
    empty |= {f"{key}_se": None for key in empty}
    return numbers() | empty | {"bpb": bpb, "bpb_se": 0.02} | changes


def header(tasks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the scores of a checkpoint."""
    scores = {
        "checkpoint": "runs/abc/checkpoints/step_10", "checkpoint_sha256": "ab" * 32, "run_id": "abc", "step": 10,
        "N_total": 1234567, "N_non_embedding": 1000000, "tokens": 20480, "flops": 1.5e11, "sequence_length": 128,
        "tokenizer": "feed", "lm_eval_version": "0.4.13", "precision": "fp32", "device": "cpu", "seconds": 1.25,
        "tasks": tasks, "held_out": {"val_loss": 1.5, "val_loss_se": 0.01, "val_bpb": 2.164},
    }  # fmt: skip
    return scores | changes


def make_items(task: str, count: int, seed: int = 0, text: str = "") -> list[dict[str, Any]]:
    """Return items with four choices; the seed changes the answers, not the questions."""
    rng, items = np.random.default_rng(seed), []
    for index in range(count):
        nats = rng.normal(-20, 2, size=4)
        share = np.exp(nats - nats.max()) / np.exp(nats - nats.max()).sum()
        right = index % 4
        best_wrong = np.delete(share, right).max()
        items.append(
            {
                "task": task, "index": index, "prompt": f"question {index} of {task}{text}",
                "choices": [f" choice {number}{text}" for number in range(4)], "right": [right],
                "log_probabilities": [float(value) for value in nats], "answer": None, "target": None,
                "values": {"acc": float(nats.argmax() == right), "acc_norm": 0.0},
                "gold_bpb": float(-nats[right] / math.log(2) / 9), "p_right": float(share[right]),
                "margin": float(share[right] - best_wrong), "bpb": None,
                "truncated": index % 5 == 0, "contaminated": index % 7 == 0,
            }
        )  # fmt: skip
    return items


def make_written(task: str, count: int, text: str = "") -> list[dict[str, Any]]:
    """Return items whose answer is generated."""
    return [
        {
            "task": task, "index": index, "prompt": f"sum {index}{text}", "choices": None, "right": None,
            "log_probabilities": [], "answer": f"wrote {index}{text}", "target": f"expected {index}{text}",
            "values": {"exact_match": float(index % 3 == 0)}, "gold_bpb": None, "p_right": None, "margin": None,
            "bpb": None, "truncated": False, "contaminated": None,
        }
        for index in range(count)
    ]  # fmt: skip


def make_rows(
    tasks: tuple[str, ...] = ("arc_easy", "piqa"), budgets: int = 4, sizes: int = 5, text: str = "",
    recipes: tuple[str | None, ...] = (None,),
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the rows of an isoFLOP grid whose bits per byte follow the loss, without noise for the first task."""
    rng, rows = np.random.default_rng(0), []
    for C in np.geomspace(1e12, 1e15, budgets):
        for place, recipe in enumerate(recipes):
            for N in 0.03 * C**0.5 * np.geomspace(0.2, 5, sizes):
                loss = 1 + 25 / N**0.42 + 170 / (C / 6 / N) ** 0.4 - 0.05 * place
                scores = {
                    f"{task}{text}": numbers(0.3, gold_bpb=loss / 2 + rng.normal() * 0.05 * rank)
                    for rank, task in enumerate(tasks)
                }
                values = {"N": float(N), "D": C / 6 / N, "flops": C * (1 + 0.02 * rng.random()), "loss": loss}
                rows.append(
                    {"run_id": f"run{len(rows)}{text}", "name": f"N{N:.0f}{text}", "step": 10, "final": True,
                     "recipe": recipe, "tasks": scores, **values}
                )  # fmt: skip
    return rows


def answers_to(rows: list[dict[str, Any]], spread: float = 0.1, items: int = 60) -> dict[str, Answers]:
    """Return each run's scores per item: the same items are hard for all, bits per byte differ as in `rows`."""
    rng = np.random.default_rng(0)
    hard = {task: rng.normal(size=items) for task in rows[0]["tasks"]}
    answers = {}
    for row in rows:
        lines: list[dict[str, Any]] = []
        for task, scores in row["tasks"].items():
            bits = scores["gold_bpb"] + hard[task] + spread * rng.normal(size=items)
            right = rng.random(items) < 0.5 + 0.4 * np.sign(hard[task])
            lines += [
                {"task": task, "index": index, "gold_bpb": bits[index], "values": {"acc": float(right[index])}}
                for index in range(items)
            ]
        answers[row["run_id"]] = answers_of(lines)
    return answers


def signal_of(z: float, threshold: float = 4.0) -> Paired:
    return Paired(z, threshold, (0.75, 0.04))
