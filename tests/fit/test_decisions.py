"""Which tasks order recipes at small scale as at the largest: intervals that hold, and suites that keep their word."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.downstream.decisions import _agreement, share_of_pairs
from isoflop.fit.report.report import write_report

SCALES, SEEDS, NOISE = 4, 3, 0.2
LINKS = [0.95, 0.9, 0.85, 0.5, 0.3, 0.0]  # correlation of a task's small scales with its largest one


def draw(rng: np.random.Generator, recipes: int) -> np.ndarray:
    """Return scores (tasks, scales, recipes, seeds); half of the error of a small scale is common to all of them."""
    quality, scores = rng.standard_normal(recipes), []
    for link in LINKS:
        large = 0.9 * quality + math.sqrt(0.19) * rng.standard_normal(recipes)
        common, separate = rng.standard_normal(recipes), rng.standard_normal((SCALES - 1, recipes))
        small = link * large + math.sqrt((1 - link**2) / 2) * (common + separate)
        scores.append(np.vstack([small, large]))
    return np.array(scores)[..., None] + NOISE * rng.standard_normal((len(LINKS), SCALES, recipes, SEEDS))


def tidy(scores: np.ndarray) -> pd.DataFrame:
    task, scale, recipe, seed = (axis.ravel() for axis in np.indices(scores.shape))
    named = {"task": [f"t{k}" for k in task], "metric": "acc", "recipe": [f"r{k:02}" for k in recipe], "seed": seed}
    return pd.DataFrame(named | {"N": 10.0 ** (6 + scale), "D": 10.0 ** (8 + scale), "value": scores.ravel()})


def pairs_of(scores: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return for each task the agreement of its clear pairs (scales, pairs), and their recipes."""
    means, result = scores.mean(axis=3), []
    for task in means:
        i, j = np.triu_indices(task.shape[1], 1)
        clear = np.abs(task[-1, i] - task[-1, j]) > 2 * NOISE * math.sqrt(2 / SEEDS)
        result.append((_agreement(task[:-1], task[-1], i[clear], j[clear]), i[clear], j[clear]))
    return result


def test_intervals_hold_the_share_of_all_pairs_of_recipes() -> None:
    rng = np.random.default_rng(0)
    truth = np.mean([[agrees.mean() for agrees, _, _ in pairs_of(draw(rng, 200))] for _ in range(10)], axis=0)
    assert truth[-1] == pytest.approx(0.5, abs=0.03)
    for recipes in (3, 6, 15):
        inside = []
        for _ in range(80):
            for true, (agrees, i, j) in zip(truth, pairs_of(draw(rng, recipes)), strict=True):
                if len(i):
                    low, high = share_of_pairs(agrees, i, j)[1]
                    inside.append(low <= true <= high)
        assert 0.93 < np.mean(inside) < 0.995, recipes


def test_a_small_table_counts_orders_ties_and_pairs_within_noise() -> None:
    large, small = [0.1, 0.2, 0.3, 0.3004], [0.2, 0.1, 0.3, 0.3]
    rows = [
        {"variant": f"v{k}", "task": "quiz", "metric": "acc", "N": 1e6 * (1 + 0.02 * k), "D": D, "value": value}
        for D, values in ((1e8, small), (1e9, large))
        for k, value in enumerate(values)
    ]
    table = pd.DataFrame(rows).assign(se=0.001, items=1000, tokens=50)
    (task,) = fit.decision_accuracy(table).tasks
    assert (task["pairs"], task["noise"], task["accuracy"]) == (5, "items", pytest.approx(4 / 5))
    assert task["signal_to_noise"] == pytest.approx(0.2 / 0.001)
    assert task["signal_to_noise_per_flop"] == pytest.approx(200 / (2 * 1.03e6 * 1000 * 50), rel=1e-6)
    (unsure,) = fit.decision_accuracy(table.drop(columns="se")).tasks
    assert (unsure["pairs"], unsure["noise"], unsure["accuracy"]) == (6, "unknown", pytest.approx(4.5 / 6))


def test_a_suite_orders_new_recipes_as_well_as_it_says() -> None:
    rng, errors = np.random.default_rng(1), []
    for _ in range(6):
        suite = fit.decision_accuracy(tidy(draw(rng, 12))).suite
        assert suite is not None
        new = draw(rng, 200).mean(axis=3)
        new = (new - new.mean(axis=2, keepdims=True)) / new.std(axis=2, keepdims=True)
        chosen = new[[int(name[1]) for name in suite["tasks"]], :-1].sum(axis=0)
        errors.append(suite["accuracy"] - _agreement(chosen, new[:, -1].mean(axis=0), *np.triu_indices(200, 1)).mean())
    assert abs(np.mean(errors)) < 0.05
    table = tidy(draw(rng, 12)).assign(items=100)
    assert fit.decision_accuracy(table, budget=100).suite["cost"] == 100
    assert "the budget of 50 is less" in fit.decision_accuracy(table, budget=50).sentences[0]


def test_what_gives_no_answer_is_said_in_one_sentence() -> None:
    table = tidy(draw(np.random.default_rng(2), 6))
    broken = table.assign(value=table["value"].where(table.index != 7))
    for scores, message in (
        (broken, "value is nan in row 7"),
        (table.drop(columns=["N", "D"]), "no column 'N, D or flops'"),
    ):
        with pytest.raises(fit.InputError, match=message):
            fit.decision_accuracy(scores)
    is_first = table["task"] == "t0"
    for scores, message in (
        (table[table["recipe"] == "r00"], "the scores are of 1 of the at least 3 recipes"),
        (table[table["N"] == 1e6], "the scores are of one scale"),
        (table.assign(items=1), "it has 1 of the at least 10 items"),
        (table[~is_first | (table["recipe"] < "r02")], "No answer for t0/acc: no scale with scores of 3 recipes"),
        (table.assign(items=np.where(is_first & (table["N"] > 1e6), 50, 90)), "different numbers of items (50 to 90)"),
        (table.assign(value=0.5), "the recipes do not differ by more than noise"),
    ):
        assert message in " ".join(fit.decision_accuracy(scores).sentences)


def test_the_report_of_variants_has_a_table_of_tasks(tmp_path: Path, quick_pictures: None) -> None:
    scores = draw(np.random.default_rng(3), 3)[:, :, :, 0]
    N, D = np.array([1e6, 1e6, 2e6, 2e6]), np.array([2e7, 4e7, 2e7, 4e7])
    frames = []
    for k, name in enumerate(("base", "<b>muon</b>", "normed")):
        tasks = {f"t{t}/acc": scores[t, :, k] for t in range(len(LINKS))} | {"t0/acc_se": 1e-3}
        loss = 1.5 + 400 / N**0.34 + 400 / D**0.28 + 0.01 * k
        frames.append(pd.DataFrame({"variant": name, "N": N * (1 + k / 100), "D": D, "loss": loss} | tasks))
    table = pd.concat(frames, ignore_index=True)
    analysis = fit.analyze(fit.read_table(table), bootstrap=0, intervals="noise")
    page = write_report(analysis, tmp_path).read_text()
    assert "Which benchmark tells variants apart" in page
    assert "<td>t0</td><td>acc</td>" in page
    assert "&lt;b&gt;muon&lt;/b&gt; against base: at" in page
    assert "<b>muon</b>" not in page


@pytest.mark.published
def test_losses_order_gadres_corpora_better_than_most_tasks() -> None:
    runs = fit.load_published("gadre")
    of_run = runs[["N", "D"]].assign(recipe=runs["train_dataset"])
    scores = [of_run.assign(task=n[4:], metric="acc", value=runs[n]) for n in runs if n.startswith("acc_")]
    loss = of_run.assign(task="openlm", metric="loss", value=runs["loss_openlm"])
    tasks = {task["task"]: task for task in fit.decision_accuracy(pd.concat([*scores, loss])).tasks}
    assert tasks["openlm"]["accuracy"] == 1
    assert tasks["lambada_openai"]["accuracy"] == pytest.approx(0.81, abs=0.01)
