"""Scores from item results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from isoflop.evaluate.metrics import (
    ItemResult,
    above_chance,
    centered,
    gold_bits_per_byte,
    mean_and_error,
    suite_scores,
    task_scores,
)
from scipy.stats import binom


def test_gold_bits_per_byte_is_the_answers_code_length_over_its_bytes() -> None:
    assert gold_bits_per_byte(math.log(2**-12), " abc") == pytest.approx(3.0, rel=1e-15)  # 12 bits, 4 bytes
    assert gold_bits_per_byte(math.log(1 / 257) * 4, " 漢") == pytest.approx(math.log2(257), rel=1e-15)


def test_one_item_has_no_standard_error_and_none_has_no_mean() -> None:
    assert mean_and_error([0.5]) == (0.5, None)
    assert gold_bits_per_byte(-math.log(2), "\ud800") == 1.0  # what UTF-8 cannot hold is encoded as a question mark
    assert mean_and_error([]) == (None, None)
    assert mean_and_error([0.5, math.nan]) == (None, None)  # undefined for one item: no number of the task, never NaN


def item(index: int, acc: float, nats: float, **other: Any) -> ItemResult:
    return ItemResult(index, {"acc": acc, "acc_norm": 1 - acc}, [nats, -9.0], (nats, " yes"), 0.5, **other)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_answers_that_are_all_alike_are_not_certain(right: float) -> None:
    scores = task_scores([item(n, right, -1.0) for n in range(20)])
    assert scores["acc"] == right
    # At an accuracy two errors away, 20 equal answers are rare but possible.
    assert scores["acc_se"] == pytest.approx(math.sqrt(2 / 24 * 22 / 24 / 24), rel=1e-12)
    assert 0.01 < (1 - 2 * scores["acc_se"]) ** 20 < 0.2
    assert scores["gold_bpb_se"] == 0  # not a share: 20 equal numbers have no spread


def test_a_tasks_scores_are_means_over_its_items() -> None:
    scores = task_scores([item(3, 1, -2.0, truncated=True), item(5, 0, -4.0), item(9, 1, -6.0)])
    assert scores["acc"] == pytest.approx(2 / 3)
    assert scores["acc_norm"] == pytest.approx(1 / 3)
    assert scores["gold_bpb"] == pytest.approx(4 / math.log(2) / 4)
    assert scores["gold_bpb_se"] == pytest.approx(2 / math.sqrt(3) / math.log(2) / 4)
    assert (scores["chance"], scores["items"], scores["truncated_items"]) == (0.5, 3, 1)
    assert scores["withheld"] is None


def chosen(index: int, nats: list[float], right: list[int], **more: Any) -> ItemResult:
    return ItemResult(index, {"acc": 0.0}, nats, choices=[f" {n}" for n in range(len(nats))], right=right, **more)


def test_the_probability_of_the_right_choice_is_scipys_softmax() -> None:
    from scipy.special import softmax

    rng = np.random.default_rng(2)
    for _ in range(200):
        nats = rng.normal(-40, 15, size=rng.integers(2, 7)).tolist()
        right = int(rng.integers(len(nats)))
        one, shares = chosen(0, nats, [right]), softmax(nats)
        assert one.p_right == pytest.approx(shares[right], rel=1e-12)
        assert one.margin == pytest.approx(shares[right] - max(np.delete(shares, right)), rel=1e-9, abs=1e-15)
    # Hundreds of nats apart, where a plain exponential is 0 or infinite.
    assert chosen(0, [-1500.0, -1501.0], [0]).p_right == pytest.approx(1 / (1 + math.exp(-1)))
    assert chosen(0, [800.0, -800.0], [1]).margin == -1.0


def test_several_right_choices_are_summed() -> None:
    nats = [math.log(share) for share in (0.1, 0.2, 0.3, 0.4)]
    two = chosen(0, nats, [1, 2])
    assert two.p_right == pytest.approx(0.5)
    assert two.margin == pytest.approx(0.5 - 0.4)
    assert chosen(0, nats, [0, 1, 2, 3]).p_right == pytest.approx(1.0)
    assert chosen(0, nats, [0, 1, 2, 3]).margin is None
    for without in (ItemResult(0, {}, nats), chosen(0, nats, []), chosen(0, [math.nan, 1.0], [0])):
        assert without.p_right is without.margin is None


def test_every_number_of_a_task_has_scipys_standard_error() -> None:
    from scipy.stats import sem

    rng = np.random.default_rng(3)
    items = [
        chosen(i, rng.normal(-20, 3, size=4).tolist(), [int(rng.integers(4))], gold=(float(rng.normal(-9, 1)), " yes"))
        for i in range(40)
    ]
    scores = task_scores(items)
    for name in ("p_right", "margin", "gold_bpb"):
        values = [getattr(one, name) for one in items]
        assert scores[name] == pytest.approx(np.mean(values), rel=1e-12)
        assert scores[f"{name}_se"] == pytest.approx(sem(values), rel=1e-12)
    assert scores["bpb"] is scores["bpb_se"] is None


def text_of(index: int, nats: float, size: int) -> ItemResult:
    return ItemResult(index, {}, [nats], bytes=size)


def test_bits_per_byte_of_texts_is_all_their_bits_over_all_their_bytes() -> None:
    scores = task_scores([text_of(0, -10 * math.log(2), 5), text_of(1, -20 * math.log(2), 20)])
    assert scores["bpb"] == pytest.approx(30 / 25)
    # Residuals are 10 - 1.2 * 5 = 4 and 20 - 1.2 * 20 = -4: sqrt(2) * sqrt(32 / 1) / 25.
    assert scores["bpb_se"] == pytest.approx(math.sqrt(2) * math.sqrt(32) / 25)
    assert task_scores([text_of(0, -1.0, 5)])["bpb_se"] is None


def test_the_clean_part_is_the_score_of_the_items_that_were_not_seen() -> None:
    items = [item(3, 1, -2.0), item(5, 0, -4.0), item(9, 1, -6.0)]
    scores = task_scores(items, {5, 7})
    assert scores["contaminated_items"] == 1
    alone = task_scores([items[0], items[2]])
    assert scores["clean"]["items"] == 2
    assert all(scores["clean"][name] == alone[name] for name in ("acc", "acc_se", "gold_bpb", "gold_bpb_se", "p_right"))
    assert scores["acc"] == task_scores(items)["acc"]
    assert task_scores(items)["contaminated_items"] is task_scores(items)["clean"] is None
    none_left = task_scores(items, {3, 5, 9})["clean"]
    assert (none_left["items"], none_left["acc"]) == (0, None)
    assert task_scores([item(3, 1, math.nan), *items], {5})["clean"]["acc"] is None


def test_centered_accuracy_is_0_at_chance_and_1_when_all_is_right() -> None:
    assert centered({"acc": 0.25, "acc_se": 0.03, "chance": 0.25}) == (0.0, pytest.approx(0.04))
    assert centered({"acc": 1.0, "acc_se": 0.0, "chance": 0.25}) == (1.0, 0.0)
    assert centered({"acc": 0.4, "acc_se": None, "chance": 0.0}) == (0.4, None)
    assert centered({"acc": None, "chance": None}) is None


def test_a_suites_mean_counts_each_task_once_and_adds_errors_in_squares() -> None:
    tasks = [
        {"acc": 0.5, "acc_se": 0.03, "chance": 0.25, "withheld": None},
        {"acc": 0.1, "acc_se": 0.02, "chance": 0.0, "withheld": None},
        {"acc": None, "acc_se": None, "chance": None, "withheld": None},  # has no accuracy
    ]
    scores = suite_scores(tasks)
    assert scores["centered"] == pytest.approx((1 / 3 + 0.1) / 2)
    assert scores["centered_se"] == pytest.approx(math.hypot(0.04, 0.02) / 2)
    assert (scores["tasks"], scores["withheld"]) == (2, None)
    withheld = suite_scores([*tasks, {"acc": None, "withheld": "item 3: NaN"}])
    assert (withheld["centered"], withheld["withheld"]) == (None, "item 3: NaN")
    assert suite_scores(tasks[2:])["centered"] is None


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


def test_guessing_is_called_better_than_chance_in_one_of_twenty_evaluations_at_most() -> None:
    rng, trials, items = np.random.default_rng(0), 1000, 100
    wrong = 0
    for _ in range(trials):
        tasks = {}
        for task, chance in enumerate([0.2, 0.25, 0.25, 0.25, 1 / 3, 0.5, 0.5]):
            acc, error = mean_and_error((rng.random(items) < chance).astype(float).tolist())
            tasks[str(task)] = {"acc": acc, "acc_se": error, "chance": chance}
        wrong += any(above_chance(tasks).values())
    assert wrong <= binom.isf(1e-3, trials, 0.05)
    assert above_chance({"a": {"acc": 0.4, "acc_se": 0.02, "chance": 0.25}, "b": {"acc": None}}) == {"a": True}
