"""Scores from item results, and the page that shows them."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isoflop.evaluate.metrics import ItemResult, gold_bits_per_byte, mean_and_error, task_scores
from isoflop.evaluate.report import format_scores, render, write_checkpoint_report


def test_gold_bits_per_byte_is_the_code_length_of_the_answer_over_its_bytes() -> None:
    assert gold_bits_per_byte(math.log(2**-12), " abc") == pytest.approx(3.0, rel=1e-15)  # 12 bits, 4 bytes
    assert gold_bits_per_byte(math.log(1 / 257) * 4, " 漢") == pytest.approx(math.log2(257), rel=1e-15)


def test_the_standard_error_is_the_samples_deviation_over_the_root_of_n() -> None:
    values = np.random.default_rng(0).normal(3, 2, size=57)
    mean, error = mean_and_error(list(values))
    assert mean == pytest.approx(sum(values) / 57, rel=1e-14)
    assert mean is not None
    assert error == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in values) / 56 / 57), rel=1e-12)


def test_the_standard_error_covers_the_truth_as_often_as_it_should() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(2000):
        mean, error = mean_and_error(list(rng.random(100) < 0.3))
        assert mean is not None
        assert error is not None
        inside += abs(mean - 0.3) < 2 * error
    # 95 % nominal; the binomial's skew at n = 100 costs about a point, 4 standard deviations of 2000 trials are two.
    assert 0.92 < inside / 2000 < 0.975


def test_one_item_has_no_standard_error_and_none_has_no_mean() -> None:
    assert mean_and_error([0.5]) == (0.5, None)
    assert mean_and_error([]) == (None, None)


def item(index: int, acc: float, nats: float, **other: Any) -> ItemResult:
    return ItemResult(index, {"acc": acc, "acc_norm": 1 - acc}, [nats, -9.0], (nats, " yes"), 0.5, **other)


def test_a_tasks_scores_are_means_over_its_items() -> None:
    scores = task_scores([item(3, 1, -2.0, truncated=True), item(5, 0, -4.0), item(9, 1, -6.0)])
    assert scores["acc"] == pytest.approx(2 / 3)
    assert scores["acc_norm"] == pytest.approx(1 / 3)
    assert scores["gold_bpb"] == pytest.approx(4 / math.log(2) / 4)
    assert scores["gold_bpb_se"] == pytest.approx(2 / math.sqrt(3) / math.log(2) / 4)
    assert (scores["chance"], scores["items"], scores["truncated_items"]) == (0.5, 3, 1)
    assert scores["withheld"] is None


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_model_without_numbers_has_no_score_and_the_item_is_named(bad: float) -> None:
    scores = task_scores([item(3, 1, -2.0), item(17, 1, bad), item(18, 0, bad)])
    assert "item 17" in scores["withheld"]
    assert str(bad) in scores["withheld"]
    for name in ("acc", "acc_se", "acc_norm", "acc_norm_se", "gold_bpb", "gold_bpb_se"):
        assert scores[name] is None
    failed = task_scores([ItemResult(4, {"exact_match": 0.0}, failed=True)])
    assert failed["exact_match"] is None
    assert "item 4" in failed["withheld"]


def scores_of(name: str = "arc_easy", **task: Any) -> dict[str, Any]:
    subset = {"items": 3, "of": 2376, "split": "test", "seed": 0, "sha256": "00"}
    result = task_scores([item(3, 1, -2.0, truncated=True), item(5, 0, -4.0), item(9, 1, -6.0)])
    return {
        "checkpoint": "runs/abc/checkpoints/step_10", "run_id": "abc", "step": 10, "N_total": 14960, "tokens": 20480,
        "sequence_length": 128, "lm_eval_version": "0.4.13", "device": "cpu", "seconds": 1.25,
        "tasks": {name: {**result, "subset": subset, "version": 1.0, **task}},
        "held_out": {"val_loss": 1.5, "val_loss_se": 0.01, "val_bpb": 2.164},
    }  # fmt: skip


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_shows_scores_with_errors_and_chance_and_says_what_was_cut(tmp_path: Path) -> None:
    write_checkpoint_report(scores_of(), tmp_path / "deep" / "report.html")
    page = Page((tmp_path / "deep" / "report.html").read_text(encoding="utf-8"))
    text = " ".join(page.texts)
    for expected in ("arc_easy", "0.667 ± 0.333", "0.500", "3 of 2,376", "1.5000 ± 0.0100", "2.1640", "14,960"):
        assert expected in text
    assert "1 of 3 items were cut" in text
    assert page.tags.count("svg") == 1
    assert not {"script", "link", "img", "iframe"} & set(page.tags)  # one file, no network
    assert not [value for name, value in page.attributes if name in ("src", "href")]


def test_hostile_text_stays_text() -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    scores = scores_of(hostile, withheld=hostile)
    scores |= {"checkpoint": hostile, "run_id": hostile, "lm_eval_version": hostile, "device": hostile}
    scores["held_out"] = {"val_loss": None, "val_bpb": None, "withheld": hostile}
    page = Page(render(scores))
    assert not {"script", "img"} & set(page.tags)
    assert sum(hostile in text for text in page.texts) >= 6  # path, title, facts, task, both warnings


def test_missing_numbers_are_a_dash_in_page_and_table_never_a_zero() -> None:
    scores = scores_of(acc=None, acc_se=None, acc_norm=None, acc_norm_se=None, gold_bpb=None, gold_bpb_se=None)
    page = Page(render(scores))
    assert "svg" not in page.tags
    row = next(line for line in format_scores(scores).splitlines() if line.startswith("arc_easy"))
    assert row.split() == ["arc_easy", "3", "–", "0.500", "–", "–"]


def test_the_plain_table_prints_chance_beside_accuracy() -> None:
    lines = format_scores(scores_of()).splitlines()
    assert lines[0].split() == ["task", "items", "accuracy", "chance", "acc_norm", "gold", "BPB"]
    assert "0.667 ± 0.333  0.500" in lines[1]
