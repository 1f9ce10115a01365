"""Laws of the loss by mixture: recovery, intervals, the best mixture and its doubts, bad input, published swarms."""

import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from isoflop import fit

DOMAINS = ("code", "prose", "web")
TRANSFER = np.array([[1.0, 0.1, 0.2], [0.1, 1.0, 0.4], [0.2, 0.4, 1.0]])  # loss x domain
ODD = {"code": 0.5, "prose": 0.5}


def true_losses(mixtures, N=1.0, D=1.0, effect=1.0):
    """Return losses (n, 3) by the effective law; with effect 0, the mixture has none."""
    helpful = (np.atleast_2d(mixtures) @ TRANSFER.T) ** effect
    return 2.0 + 0.5 * np.reshape(N, (-1, 1)) ** -0.34 + (np.reshape(D, (-1, 1)) * helpful) ** -0.3


def table(mixtures, losses):
    weights = {f"weight_{name}": column for name, column in zip(DOMAINS, mixtures.T, strict=True)}
    return pd.DataFrame(weights | {f"loss_{name}": column for name, column in zip(DOMAINS, losses.T, strict=True)})


def swarm(seed=0, n=24, noise=0.003, effect=1.0):
    rng = np.random.default_rng(seed)
    mixtures = np.vstack([np.full((3, 3), 1 / 3), rng.dirichlet(np.ones(3), n - 3)])
    losses = true_losses(mixtures, effect=effect)
    return table(mixtures, losses * np.exp(noise * rng.standard_normal(losses.shape)))


def repeated_losses(w, N, D, cap, penalty=0.0):
    """Return losses (1, 3) of a mixture (3,) with R = 15.4 and, with a penalty, over-fitting; cap: unique tokens."""
    epochs = np.fmax(w * D / cap, 1.0)
    worth = w * (1 + 15.4 * (1 - np.exp(-(epochs - 1) / 15.4))) / epochs
    harm = penalty * (0.01 * N / cap) ** 0.5 * (epochs - worth / w * epochs)  # of passes beyond the effective data
    return true_losses(worth, N, D) + np.where(epochs > 1, harm, 0.0) @ (TRANSFER * w).T / (TRANSFER @ w)


def ladder(seed=0, noise=0.002, repeated=False, penalty=0.0):
    """Return three checkpoints of runs at three sizes; if `repeated`, some have caps."""
    rng = np.random.default_rng(seed)
    mixtures, rows = rng.dirichlet(np.ones(3), 15), []
    for run, (N, w) in enumerate((N, w) for N in (1.0, 3.0, 9.0) for w in mixtures):
        cap = rng.choice([0.01, 0.05, np.nan]) if repeated else np.nan
        for D in (2.0, 6.0, 20.0):
            losses = repeated_losses(w, N, D, cap, penalty)
            row = table(w[None], losses * np.exp(noise * rng.standard_normal(3)))
            rows.append(
                row.assign(N=N * 1e8, D=D * 1e9, run_id=f"run{run}", **{f"unique_{d}": cap * 1e9 for d in DOMAINS})
            )
    return pd.concat(rows, ignore_index=True)


@pytest.fixture(scope="module")
def law():
    return fit.MixtureLaw(["effective", "exponential"]).fit(swarm())


def test_a_swarm_is_recovered_by_forms_weighed_by_hold_outs(law):
    mixtures = np.random.default_rng(9).dirichlet(np.ones(3), 40)
    predicted = law.predict(mixtures, target=ODD)
    losses = true_losses(mixtures)
    errors = np.abs(predicted.filter(regex="^loss_[a-z]+$").to_numpy() / losses - 1)
    assert np.median(errors) < 0.004
    assert errors.max() < 0.03  # at a corner of the simplex
    assert predicted.target.to_numpy() == pytest.approx(losses[:, :2].mean(axis=1), rel=0.02)
    assert law.weights_.sum().to_numpy() == pytest.approx(1)
    assert law.hold_outs_ == "mixture"
    assert all(0.002 < noise < 0.008 for noise in law.noise_.values())
    mean = law.predict(mixtures, kind="mean")
    assert (mean.loss_code_high < predicted.loss_code_high).all()
    assert repr(law).startswith("MixtureLaw of code, prose, web: effective ")


def test_the_best_mixture_of_a_swarm_is_the_known_one(law):
    answer = law.best(ODD, bounds={name: (0, 1) for name in DOMAINS})
    grid = np.stack([np.linspace(0, 1, 1001), 1 - np.linspace(0, 1, 1001), np.zeros(1001)], axis=1)
    losses = true_losses(grid)[:, :2].mean(axis=1)
    best = grid[losses.argmin()]
    at_answer = true_losses([*answer.weights.values()])[0, :2].mean()
    assert at_answer == pytest.approx(losses.min(), rel=0.002)
    assert [*answer.weights.values()] == pytest.approx(best, abs=0.15)
    assert answer.base == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))
    gain = true_losses(np.full(3, 1 / 3))[0, :2].mean() - at_answer
    assert answer.gain_interval[0] <= gain <= answer.gain_interval[1]
    assert answer.trustworthy
    assert answer.probability > 0.95
    assert answer.intervals["code"][0] <= answer.weights["code"] <= answer.intervals["code"][1]
    assert len(answer.next) == 5
    assert not answer.scales
    assert law.best(ODD).weights == law.clone().fit(swarm()).best(ODD).weights
    limited = law.best(ODD, bounds={"code": (0.1, 0.2)}).weights
    assert 0.1 <= limited["code"] <= 0.2 + 1e-9
    assert sum(limited.values()) == pytest.approx(1)


def test_noise_alone_gives_no_answer():
    answers = [fit.MixtureLaw(["effective"]).fit(swarm(seed, effect=0.0)).best({"code": 1}) for seed in range(6)]
    doubtful = [answer for answer in answers if not answer.trustworthy]
    assert len(doubtful) >= 5
    assert all("noise" in answer.reason or "already the best" in answer.reason for answer in doubtful)
    assert any(answer.runs_needed and answer.runs_needed > 24 for answer in doubtful)


def test_intervals_cover_new_runs_of_simulated_swarms():
    inside = []
    for seed in range(4):
        new = swarm(100 + seed, 40)
        forecast = fit.MixtureLaw(["effective", "exponential"], seed=seed).fit(swarm(seed)).predict(new)
        low, high = (forecast.filter(like=end).to_numpy() for end in ("_low", "_high"))
        observed = new.filter(like="loss_").to_numpy()
        inside.append(((low <= observed) & (observed <= high)).mean())
    assert 0.88 <= np.mean(inside) <= 0.995


def test_sizes_are_extrapolated_with_hold_outs_by_compute_and_epochs_limit_weights():
    runs = ladder()
    law = fit.MixtureLaw(["effective", "product"]).fit(runs)
    assert law.hold_outs_ == "compute"
    mixtures = np.random.default_rng(4).dirichlet(np.ones(3), 20)
    forecast = law.predict(mixtures, N=2.7e9, D=6e10)
    truth = true_losses(mixtures, 27.0, 60.0)
    assert forecast.filter(regex="^loss_[a-z]+$").to_numpy() == pytest.approx(truth, rel=0.01)
    near = law.predict(mixtures, N=9e8, D=2e10)
    width = [np.log(frame.loss_code_high / frame.loss_code_low).mean() for frame in (near, forecast)]
    assert width[0] < width[1]
    answer = law.best(ODD, flops=6 * 2.7e9 * 6e10, max_epochs=4, unique={"code": 2e9})
    assert pytest.approx(2.7e9 * 6e10) == answer.N * answer.D
    assert answer.weights["code"] <= 4 * 2e9 / answer.D + 1e-9
    assert answer.epochs == {"code": pytest.approx(answer.weights["code"] * answer.D / 2e9)}
    assert [scale["D"] for scale in answer.scales] == sorted(scale["D"] for scale in answer.scales)
    assert len(answer.scales) == 3


def test_the_worth_of_repeated_tokens_is_recovered():
    law = fit.MixtureLaw(["effective"]).fit(ladder(noise=1e-3, repeated=True))
    assert np.exp(np.log(law.constants_["effective"].R).mean()) == pytest.approx(15.4, rel=0.35)
    once, often = (
        law.predict({"code": 1 / 3, "prose": 1 / 3, "web": 1 / 3}, N=9e8, D=2e10, unique=u)
        for u in (None, {"code": 5e7})
    )
    truth = repeated_losses(np.full(3, 1 / 3), 9.0, 20.0, np.array([0.05, np.inf, np.inf]))
    assert often.loss_code[0] == pytest.approx(truth[0, 0], rel=0.01)
    assert often.loss_code[0] > once.loss_code[0] * 1.02


@pytest.mark.parametrize("penalty", [0.001, 0.0])
def test_a_loss_that_grows_again_with_more_epochs_is_recovered(penalty):
    runs, D, w = ladder(repeated=True, penalty=penalty), np.geomspace(0.5, 30, 12), np.array([0.4, 0.3, 0.3])
    laws = [fit.MixtureLaw(forms, draws=20).fit(runs) for forms in (["effective", "overfitting"], ["effective"])]
    cap = np.array([0.02, np.inf, np.inf])
    truth = np.array([repeated_losses(w, 9.0, d, cap, penalty)[0, 0] for d in D])
    both, alone = (law.predict(np.tile(w, (12, 1)), 9e8, D * 1e9, {"code": 2e7}).loss_code.to_numpy() for law in laws)
    errors, before = (np.abs(np.log(predicted / truth)) for predicted in (both, alone))
    assert errors.max() < 0.02
    if penalty:
        assert abs(both.argmin() - truth.argmin()) <= 1
        assert both[-1] - both.min() == pytest.approx(truth[-1] - truth.min(), rel=0.3)
        assert before.max() > 2 * errors.max()
        assert (laws[0].weights_.loc["overfitting"] > 0.8).all()
    else:
        assert np.median(errors) < np.median(before) + 0.001


def test_a_noisy_mixture_has_wider_intervals_and_a_lower_weight():
    rng = np.random.default_rng(2)
    quiet = swarm(2, 24, noise=0.001)
    loud = np.tile([0.8, 0.1, 0.1], (8, 1))
    losses = true_losses(loud) * np.exp(0.02 * rng.standard_normal((8, 3)))
    law = fit.MixtureLaw(["effective"]).fit(pd.concat([quiet, table(loud, losses)], ignore_index=True))
    width = np.log(law.predict(np.vstack([loud[0], [1 / 3] * 3])).eval("loss_prose_high / loss_prose_low"))
    assert width[0] > 2 * width[1]


def test_trees_are_one_of_the_forms():
    pytest.importorskip("sklearn")
    law = fit.MixtureLaw(["effective", "trees"]).fit(swarm()[["weight_code", "weight_prose", "weight_web", "loss_web"]])
    assert 0 < law.weights_.web.trees < 1


def test_trees_are_left_out_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    law = fit.MixtureLaw().fit(swarm())
    assert "scikit-learn" in law.refused_["trees"]
    assert [*law.weights_.index] == ["effective", "exponential"]  # the others need several N, or repeated domains
    with pytest.raises(fit.InputError, match="scikit-learn"):
        fit.MixtureLaw(["trees"]).fit(swarm())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda law: law.best({"poetry": 1}), "target has 1 for poetry"),
        (lambda law: law.best({"code": 0}), "at least one weight must be above zero"),
        (lambda law: law.best({"code": -1, "web": 2}), "target has -1 for code"),
        (lambda law: law.best(bounds={"code": (0.7, 0.8), "web": (0.5, 0.6)}), "bounds leave no mixture"),
        (lambda law: law.best(bounds={"code": (0.8, 0.7)}), "bounds of code are"),
        (lambda law: law.best(N=1e9), "N is no column of the table"),
        (lambda law: law.best(flops=1e20), "flops is 1e"),
        (lambda law: law.best(max_epochs=2), "unique is missing"),
        (lambda law: law.best(unique={"code": 1e9}), "D is no column of the table"),
        (lambda law: law.predict({"code": 0.5, "web": 0.2}), "sum of 0.7"),
        (lambda law: law.predict({"poetry": 1}), "weights has 1 for poetry"),
        (lambda law: law.predict([[0.5, 0.5]]), "weights has 2 columns"),
        (lambda law: law.clone().fit(swarm().assign(weight_code=0.9)), "the weights of row 0"),
        (lambda law: law.clone().fit(swarm().filter(like="weight_")), "needs columns weight_<domain> and loss_<name>"),
        (lambda law: law.clone().fit(swarm().filter(like="loss_")), "needs columns weight_<domain> and loss_<name>"),
        (lambda law: law.clone().fit(swarm().assign(weight_none=0.0)), "weight_none is 0 in every row"),
        (lambda law: law.clone().fit(swarm(n=5)), "3 mixtures of 3 domains; it needs 5"),
        (lambda law: law.clone().fit(swarm().assign(loss_web=-1.0)), "loss_web is -1 in row 0"),
        (lambda law: law.clone().fit(ladder().drop(columns="D").assign(unique_web=1e9)), "D is no column of the table"),
        (lambda law: law.clone().fit(ladder()).predict([[1 / 3] * 3], N=1e9), "D is missing"),
        (lambda law: law.clone().predict([[1 / 3] * 3]), "is not fitted; call fit(table)"),
        (lambda law: fit.MixtureLaw(["linear"]), "form is 'linear'; choose one of effective"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(law, make, message):
    with pytest.raises(fit.InputError) as refused:
        make(law)
    assert message in str(refused.value)


def published(name):
    return pd.read_csv(Path(os.environ["ISOFLOP_DATA"]) / "mixtures" / name)


@pytest.mark.slow
@pytest.mark.published
def test_mixtures_of_regmix_at_1m_parameters_rank_those_at_60m():
    small, large = published("regmix_1m.csv"), published("regmix_60m.csv")
    losses = ["loss_pile_cc", "loss_github", "loss_arxiv"]
    weights = [name for name in small if name.startswith("weight_")]
    forecast = fit.MixtureLaw().fit(small[weights + losses]).predict(large)
    ranks = forecast[losses].corrwith(large[losses], method="spearman")
    assert (ranks >= 0.99).all()
    for name in losses:
        assert large[name][forecast[name].idxmin()] / large[name].min() <= 1.005


@pytest.mark.slow
@pytest.mark.published
def test_two_sizes_of_slimpajama_forecast_a_third():
    runs = published("slimpajama_small.csv").rename(columns={"model_size": "N", "n_tokens": "D"})
    runs = runs.rename(columns=lambda name: f"loss_{name[:-5]}" if name.endswith("_loss") else name)
    weights = [name for name in runs if name.startswith("weight_")]
    runs["group"] = runs.groupby(["N", *weights]).ngroup()
    large = runs[runs.N > 4e8]
    last = large[large.groupby("group").D.transform("max") == large.D]
    law = fit.MixtureLaw().fit(runs[runs.N < 4e8])
    forecast = law.predict(last, last.N, last.D)
    observed = last.filter(like="loss_").to_numpy()
    names = [f"loss_{name}" for name in law.losses_]
    assert np.median(np.abs(forecast[names].to_numpy() / observed - 1)) <= 0.006  # measured: 0.36 %
    low, high = (forecast[[f"{name}_{end}" for name in names]].to_numpy() for end in ("low", "high"))
    assert 0.9 <= ((low <= observed) & (observed <= high)).mean() <= 0.99  # measured: 98.1 %
