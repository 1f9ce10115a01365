"""`isoflop bench evaluate`: what counts as the same answer, and rows of the common format."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
from bench_rows import CONTRACT
from isoflop.bench import evaluate as bench
from isoflop.evaluate.metrics import ItemResult
from isoflop.train.errors import UserError


def test_an_answer_is_the_same_when_choice_text_and_metrics_are() -> None:
    item = ItemResult(3, {"acc": 1.0}, [-2.0, -1.0, -3.0])
    assert bench.same_answer(item, replace(item, log_probabilities=[-2.1, -0.9, -3.0]))
    assert not bench.same_answer(item, replace(item, log_probabilities=[-0.9, -1.0, -3.0]))
    assert not bench.same_answer(item, replace(item, values={"acc": 0.0}))
    assert not bench.same_answer(item, replace(item, index=4))
    written = ItemResult(0, {"exact_match": 0.0}, answer="seven")
    assert bench.same_answer(written, written)
    assert not bench.same_answer(written, replace(written, answer="seven "))


def test_items_are_as_far_apart_as_their_furthest_choice() -> None:
    item = ItemResult(0, {}, [-2.0, -1.0])
    assert bench.nats_apart(item, replace(item, log_probabilities=[-2.5, -1.1])) == pytest.approx(0.5)
    assert bench.nats_apart(item, replace(item, log_probabilities=[math.nan, -1.0])) == math.inf


def test_a_case_that_there_is_not_and_a_peer_that_is_missing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--case is 'speed'"):
        next(bench.bench_evaluate("cpu", cases=["speed"]))
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UserError, match="accelerate is not installed"):
        next(bench.bench_evaluate("cpu", cases=["throughput"]))


@pytest.mark.exhaustive
def test_both_sides_of_a_small_model_agree_on_every_item() -> None:
    pytest.importorskip("accelerate")
    small = ["model.width=64", "model.depth=2", "model.heads=2", "data.vocab_size=1024", "data.max_bytes=1000000"]
    small += ["data.sequence_length=512", "tokens=16384"]
    rows = list(bench.bench_evaluate("cpu", 1, 12, overrides=small, generation=(3, 12)))
    assert all(set(row) == CONTRACT for row in rows)
    counted = [row for row in rows if row["unit"] == "items equal"]
    assert [row["ours"] for row in counted] == [row["peer"] for row in counted] == [12, 12, 12, 3]
    nats = [row for row in rows if row["unit"] == "max nats"]
    assert len(nats) == 3
    assert all(row["ours"] < bench.ALLOWED_NATS for row in nats)
    assert rows[-1]["unit"] == "items/s"
