"""Item laws recover simulated items; forecasts of tasks cover larger runs, name the leading law, or say why not."""

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from scipy.special import ndtr

RUNS, ITEMS = 24, 600
FARTHER = np.array([3e20, 1e21])


def responses(seed, kind, chance=0.0):
    """Simulate 24 runs and two larger ones: compute, ability, slopes, difficulties, responses, probabilities."""
    rng = np.random.default_rng(seed)
    C = np.append(np.geomspace(1e17, 1e20, RUNS), FARTHER)
    x = np.log(C)
    ability = (x - x[:RUNS].mean()) / x[:RUNS].std() + 0.15 * rng.standard_normal(len(C))
    ability = (ability - ability[:RUNS].mean()) / ability[:RUNS].std()
    slope, difficulty = np.exp(0.4 * rng.standard_normal(ITEMS) - 0.3), 0.8 + 1.2 * rng.standard_normal(ITEMS)
    argument = slope * (ability[:, None] - difficulty)
    p = chance + (1 - chance) * ndtr(argument)
    drawn = argument + rng.standard_normal(p.shape) if kind == "margin" else (rng.random(p.shape) < p).astype(float)
    return C, ability, slope, difficulty, drawn, p


@pytest.mark.parametrize(("kind", "chance"), [("margin", 0.0), ("right", 0.25)])
def test_abilities_and_difficulties_come_back_and_their_intervals_hold(kind, chance):
    held, of_items, of_runs = [], [], []
    for seed in range(8):
        C, ability, slope, difficulty, drawn, p = responses(seed, kind, chance)
        law = fit.ItemLaw().fit(drawn[:RUNS], C[:RUNS], chance)
        assert np.corrcoef(law.ability_, ability[:RUNS])[0, 1] > 0.97
        assert np.corrcoef(law.items_["difficulty"].rank(), difficulty.argsort().argsort())[0, 1] > 0.8
        of_runs.append(np.abs(law.ability_ - ability[:RUNS]) <= 1.96 * law.ability_se_)
        of_items.append(law.items_["low"].le(difficulty).to_numpy() & law.items_["high"].ge(difficulty).to_numpy())
        ahead = law.forecast(C[RUNS:])
        truth = (drawn[RUNS:] > 0).mean(axis=1)
        held.append(ahead["low"].le(truth) & ahead["high"].ge(truth))
    assert 0.93 <= np.mean(of_items) <= 0.98
    assert 0.91 <= np.mean(of_runs) <= 0.99
    assert np.mean(held) >= 0.8
    np.testing.assert_allclose(law.predict_items(ability[RUNS:]).mean(axis=1), p[RUNS:].mean(axis=1), atol=0.03)
    # Items inform most near their difficulty, and the subset is made of these.
    easy, hard = law.subset(50, ability=-1.5), law.subset(50, ability=2.0)
    assert difficulty[easy].mean() + 1.5 < difficulty[hard].mean()
    assert slope[law.subset(50)].mean() > slope.mean()
    assert law.information([0.0, 1.0]).shape == (2, ITEMS)


def test_items_that_all_runs_answer_alike_are_shrunk_and_names_are_kept():
    C, _, _, _, drawn, _ = responses(0, "right", 0.25)
    answers = pd.DataFrame(drawn[:RUNS, :40]).add_prefix("q")
    answers["q0"], answers["q1"] = 1.0, 0.0
    law = fit.ItemLaw().fit(answers, C[:RUNS], 0.25)
    assert np.isfinite(law.items_.to_numpy()).all()
    assert law.items_.loc["q0", "difficulty"] < law.items_["difficulty"].median() < law.items_.loc["q1", "difficulty"]
    assert set(law.subset(3)) <= set(answers.columns)
    along_loss = fit.ItemLaw("loss").fit(answers, 2 + 1e3 * C[:RUNS] ** -0.2, 0.25)
    assert np.diff(along_loss.predict([2.5, 2.2]))[0] > 0


MARGINS = np.random.default_rng(0).standard_normal((6, 5))
BUDGETS = np.geomspace(1e17, 1e19, 6)


@pytest.mark.parametrize(
    ("values", "at", "chance", "message"),
    [
        (MARGINS[:, :1], BUDGETS, 0, "responses have 1 item; an item law needs at least 2"),
        (MARGINS[:1], BUDGETS[:1], 0, "responses have 1 run; an item law needs at least 4"),
        (np.ones((6, 5)), BUDGETS, 0, "every answer is right"),
        (np.zeros((6, 5)), BUDGETS, 0, "every answer is wrong"),
        (np.where(np.eye(6, 5), np.nan, MARGINS), BUDGETS, 0, "run 0 has no response to item 0; all runs must answer"),
        (MARGINS, BUDGETS[:5], 0, r"responses have shape \(6, 5\); 5 runs need"),
        (MARGINS, np.full(6, 1e18), 0, r"flops is 1e\+18 in every run"),
        (MARGINS, BUDGETS, 1.0, "chance is 1.0"),
    ],
)
def test_bad_responses_are_refused_in_one_sentence(values, at, chance, message):
    with pytest.raises(fit.InputError, match=message):
        fit.ItemLaw().fit(values, at, chance)
    with pytest.raises(fit.InputError, match="along is 'tokens'"):
        fit.ItemLaw("tokens")


def table(seed=0, runs=40, items=400):
    """Return runs with two tasks: one that is learnt, one of guesses; and the margins of the first."""
    rng = np.random.default_rng(seed)
    C = np.repeat(np.geomspace(1e17, 1e20, runs // 5), 5)
    N = np.sqrt(C / 120) * np.tile(np.geomspace(0.4, 2.5, 5), runs // 5)
    D = C / 6 / N
    loss = (1.7 + 400 / N**0.34 + 410 / D**0.28) * np.exp(0.002 * rng.standard_normal(runs))
    slope, difficulty = np.exp(0.3 * rng.standard_normal(items)), 1.5 * rng.standard_normal(items)
    margins = slope * (3 * (3.2 - loss)[:, None] - difficulty) + rng.standard_normal((runs, items))
    frame = pd.DataFrame({"run_id": [f"r{i}" for i in range(runs)], "N": N, "D": D, "loss": loss})
    for name, acc in (("learnt", (margins > 0).mean(axis=1)), ("guess", rng.binomial(items, 0.25, runs) / items)):
        frame[f"{name}/acc"], frame[f"{name}/acc_se"] = acc, np.sqrt(acc * (1 - acc) / items)
        frame[f"{name}/chance"] = 0.0 if name == "learnt" else 0.25
    frame["learnt/gold_bpb"], frame["learnt/gold_bpb_se"] = 0.4 * loss + 0.01 * rng.standard_normal(runs), 0.01
    return frame, pd.DataFrame(margins, index=frame["run_id"])


def test_larger_runs_lie_in_the_intervals_of_every_metric_and_items_lead():
    held, leading = [], []
    for seed in range(3):
        frame, margins = table(seed)
        large = 6 * frame["N"] * frame["D"] > 2e19
        small, large = frame[~large], frame[large]
        ahead = fit.forecast_tasks(small, large["N"], large["D"], items={"learnt": margins})
        assert list(ahead.groupby(["task", "metric"]).size().index) == [
            ("guess", "acc"), ("learnt", "acc"), ("learnt", "gold_bpb"),
        ]  # fmt: skip
        ahead = ahead[ahead["task"] == "learnt"]
        assert (ahead["reason"] == "").all()
        truth = np.concatenate([large["learnt/acc"], large["learnt/gold_bpb"]])
        held.append((ahead["low"] <= truth) & (truth <= ahead["high"]))
        np.testing.assert_allclose(ahead["value"], truth, atol=0.08)
        leading.append(ahead["law"].iloc[0])
    again = fit.forecast_tasks(small.sample(frac=1, random_state=1), large["N"], large["D"])
    plain = fit.forecast_tasks(small, large["N"], large["D"])
    np.testing.assert_allclose(again["value"], plain["value"], rtol=1e-4)
    assert np.mean(held) >= 0.9
    assert "items" in leading


def test_no_forecast_has_a_reason():
    frame, _ = table()
    few = frame.assign(**{"learnt/acc": frame["learnt/acc"].where(frame.index < 5)})
    reasons = fit.forecast_tasks(few, [1e9, 1e15], [2e10, 1e17])
    by_task = reasons[reasons["metric"] == "acc"].groupby("task")["reason"].apply(list)
    assert by_task["learnt"][0] == "only 5 runs have a score; at least 8 are needed."
    assert by_task["guess"][0] == ""
    assert "times that of the largest run; hold-outs of up to" in by_task["guess"][1]
    assert reasons.loc[reasons["reason"] != "", ["value", "low", "high"]].isna().all(axis=None)
    (one,) = fit.forecast_tasks(frame[["N", "D", "loss", "guess/acc"]].tail(5), 1e9, 1e10)["reason"]
    assert one == "only 5 runs have a score; at least 8 are needed."
    same = fit.forecast_tasks(frame[frame["D"] * frame["N"] < 1.8e16], 1e9, 1e10)["reason"]
    assert same.str.len().gt(0).all()
    with pytest.raises(fit.InputError, match="has no score of a task"):
        fit.forecast_tasks(frame[["N", "D", "loss"]], 1e9, 1e10)
    with pytest.raises(fit.InputError, match=r"guess/acc is 1.5; it must be a share from 0 to 1"):
        fit.forecast_tasks(frame.assign(**{"guess/acc": 1.5}), 1e9, 1e10)


@pytest.mark.published
def test_published_tasks_of_the_largest_runs_are_forecast_better_than_by_the_last_value():
    runs = fit.load_published("gadre").rename(columns={"name": "run_id", "loss_c4_val": "loss"})
    about = fit.load_published("gadre", "eval_metadata.csv").set_index("Eval Task")
    rows = []
    for _, group in runs.groupby("train_dataset"):
        columns = {name: group[name] for name in ("run_id", "N", "D", "loss")}
        for task in (name[4:] for name in runs.columns if name.startswith("acc_")):
            acc = columns[f"{task}/acc"] = group[f"acc_{task}"]
            columns[f"{task}/acc_se"] = np.sqrt(acc * (1 - acc) / about.loc[task, "#datapoints"])
            columns[f"{task}/chance"] = pd.Series(about.loc[task, "Random baseline"] / 100, group.index)
        frame = pd.DataFrame(columns)
        small, large = frame[frame["N"] < 1e9], frame[frame["N"] >= 1e9]
        last = small.loc[(small["N"].astype(float) * small["D"]).idxmax()]
        ahead = fit.forecast_tasks(small, large["N"], large["D"])
        truth = np.concatenate([large[f"{task}/acc"] for task in ahead["task"].unique()])
        ahead["truth"], ahead["last"] = truth, [last[f"{task}/acc"] for task in ahead["task"]]
        rows.append(ahead)
    ahead = pd.concat(rows)
    forecast = ahead[ahead["reason"] == ""]
    assert len(forecast) > 0.8 * len(ahead)
    inside = forecast["low"].le(forecast["truth"]) & forecast["high"].ge(forecast["truth"])
    assert 0.9 <= inside.mean() <= 0.98
    error, of_last = ((forecast[name] - forecast["truth"]).abs().mean() for name in ("value", "last"))
    assert error < 0.032 < 0.04 < of_last
