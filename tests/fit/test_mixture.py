"""Forecasts of several forms: their weights, rolling hold-outs and intervals, and the coverage of these."""

import dataclasses

import msgspec
import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.forecasting.forecaster import Prior, cut_offs
from isoflop.fit.forecasting.mixture import FormMixture, SavedMixture, family

TRUTH = {"E": 1.8, "A": 480.0, "B": 2000.0, "alpha": 0.35, "beta": 0.37}


def designed(seed=0, truth=TRUTH, noise=0.003, budgets=6):
    rng = np.random.default_rng(seed)
    C = np.repeat(1e18 * 10 ** np.linspace(0, 2.5, budgets), 6)
    N = np.sqrt(C / 120) * np.tile(np.geomspace(1 / 4, 4, 6), budgets)
    D = C / 6 / N
    loss = fit.ChinchillaLaw.evaluate(truth, N, D) * np.exp(noise * rng.standard_normal(len(N)))
    return pd.DataFrame({"N": N, "D": D, "loss": loss})


def mixed(runs, **options):
    return FormMixture(**options).fit(runs.N, runs.D, runs.loss)


@pytest.fixture(scope="module")
def mixture():
    return mixed(designed(), draws=40)


# Rolling hold-outs.


def test_cut_offs_halve_the_compute_down_to_the_fewest_runs():
    runs = designed()
    flops = 6 * runs.N.to_numpy() * runs.D.to_numpy()
    cuts = cut_offs({"N": runs.N.to_numpy(), "D": runs.D.to_numpy()}, flops, np.arange(len(runs)).astype(str))
    assert [cut.fitted.sum() for cut in cuts] == [30, 24, 18, 12, 6]
    assert all((cut.fitted ^ cut.tested).all() for cut in cuts)
    assert all(flops[cut.tested].min() > 2 * cut.reach for cut in cuts)
    assert cuts[0].further == pytest.approx(np.full(6, 0.5 * np.log(10)))


def test_no_run_is_fitted_and_tested_in_one_hold_out():
    runs = designed()
    labels = np.tile(np.arange(6), 6).astype(str)  # a run per size rank, with a checkpoint at every budget
    flops = (6 * runs.N * runs.D).to_numpy()
    assert cut_offs({"N": runs.N.to_numpy(), "D": runs.D.to_numpy()}, flops, labels) == []


def test_weights_that_are_all_equal_change_no_interval_of_an_earlier_mixture():
    runs = designed()
    plain, weighted = (
        FormMixture(["chinchilla"], draws=20).fit(runs.N, runs.D, runs.loss, weight=weight)
        for weight in (None, np.full(len(runs), 9.0))
    )
    one, other = (mixture.before(0).forecast([1e10], [2e11]) for mixture in (plain, weighted))
    np.testing.assert_allclose(one, other, rtol=1e-6)  # two fits of one objective agree to about 1e-8


@pytest.mark.slow
def test_weights_are_inverse_squared_rolling_errors():
    runs, names = designed(), ["kaplan", "chinchilla, tied"]
    mixture = mixed(runs, forms=names, draws=0, priors=dict.fromkeys(("loss", "size"), Prior(0.01, 0.0, 0.0)))
    squares = np.full(2, 0.01**2)
    for cut in mixture.cut_offs_:
        for k, name in enumerate(names):
            law = family()[name].clone().fit(runs.N, runs.D, runs.loss)
            constants = {key: value[0] for key, value in law.refit(cut.fitted[None].astype(float)).items()}
            error = np.log(law.evaluate(constants, runs.N, runs.D) / runs.loss)[cut.tested]
            squares[k] += np.mean((error / cut.further) ** 2)
    assert [*mixture.weights_.values()] == pytest.approx(1 / squares / np.sum(1 / squares), rel=0.02)


def test_the_form_that_is_true_weighs_most_where_the_others_are_far_off():
    truth = {"E": 1.0, "A": 4.8e4, "B": 2e5, "alpha": 0.6, "beta": 0.6}
    assert mixed(designed(truth=truth), draws=0).weights_["chinchilla, tied"] > 0.7


# Forecasts.


def test_one_form_without_priors_is_the_law_itself_and_its_bootstrap():
    runs = designed()
    single = mixed(runs, forms=["chinchilla"], priors=dict.fromkeys(("loss", "size"), Prior(0.01, 0.0, 0.0)), draws=200)
    law = fit.ChinchillaLaw().fit(runs.N, runs.D, runs.loss).bootstrap(200)
    forecast = single.forecast([1e11], [2e12], kind="mean")
    assert forecast.loss[0] == pytest.approx(law.predict(1e11, 2e12))
    low, high = np.percentile(np.log(law.predict_draws([1e11], [2e12])), [15.87, 84.13], axis=1)
    assert np.log(forecast.high / forecast.low)[0] == pytest.approx(1.959964 * (high - low)[0], rel=1e-6)
    assert pytest.approx(law.optimal(1e24).N, rel=1e-4) == single.optimal(1e24).N
    assert single.size_exponent()[0] == pytest.approx(law.exponents_[0], rel=1e-4)


def test_an_interval_grows_with_level_and_distance(mixture):
    N, D = np.array([1e9, 1e10, 1e12]), np.array([2e10, 2e11, 2e13])
    width = {key: np.log(forecast.high / forecast.low) for key, forecast in {
        "run": mixture.forecast(N, D), "mean": mixture.forecast(N, D, kind="mean"),
        "half": mixture.forecast(N, D, level=0.5),
    }.items()}  # fmt: skip
    assert (width["run"] > width["mean"]).all()
    assert (width["run"] > width["half"]).all()
    assert (np.diff(width["mean"]) > 0).all()
    parts = mixture.variances(N, D)
    wide = np.log(mixture.forecast(N, D).high.to_numpy() / mixture.predict(N, D))
    assert wide == pytest.approx(1.959964 * np.sqrt(sum(parts.values())), rel=1e-6)


def test_the_optimum_is_the_mean_of_the_forms(mixture):
    best = mixture.optimal([1e23, 1e25])
    assert pytest.approx(best.flops) == 6 * best.N * best.D
    sizes = np.log([law.optimal([1e23, 1e25]).N for law in mixture.laws_.values()])
    assert (sizes.min(axis=0) < np.log(best.N)).all()
    assert (np.log(best.N) < sizes.max(axis=0)).all()
    assert best.loss == pytest.approx(mixture.predict(best.N, best.D))
    wide = 1.959964 * np.sqrt(sum(mixture.size(best.flops)[1].values()))
    assert np.log(best.interval("N")[:, 1] / best.N) == pytest.approx(wide, rel=0.01)
    a, low, high = mixture.size_exponent()
    assert low < a < high


@pytest.mark.slow
def test_known_laws_lie_within_the_intervals():
    inside = []
    for seed in range(6):
        runs = designed(seed)
        mixture = mixed(runs, draws=40, seed=seed)
        N, D = np.array([1e10, 6e10]), np.array([2e11, 1.2e12])
        forecast = mixture.forecast(N, D, kind="mean")
        truth = fit.ChinchillaLaw.evaluate(TRUTH, N, D)
        inside.append((forecast.low <= truth) & (truth <= forecast.high))
    assert np.mean(inside) >= 0.9


def test_the_seed_decides_the_answer():
    runs = designed()
    one, same, other = (fit.forecast(runs, [1e11], [2e12], forms=["chinchilla"], seed=seed) for seed in (1, 1, 2))
    assert one.equals(same)
    assert not one.equals(other)


def test_a_saved_mixture_forecasts_as_before(mixture):
    saved = msgspec.convert(mixture.to_dict(), SavedMixture)
    restored = FormMixture.from_saved(saved, "law.json")
    for kind in ("mean", "run"):
        assert restored.forecast([1e10], [2e11], kind=kind).equals(mixture.forecast([1e10], [2e11], kind=kind))
    older = FormMixture.from_saved(dataclasses.replace(saved, noise=None), "law.json")
    assert np.isnan(older.forecast([1e10], [2e11]).high[0])  # unknown noise is no narrow interval


def test_a_form_that_cannot_be_fitted_is_left_out_and_said():
    runs = designed().iloc[:12:2]
    fitted = mixed(runs, forms=["chinchilla, tied", "gamma"], draws=20)
    assert [*fitted.weights_] == ["chinchilla, tied"]
    assert "gamma" in fitted.refused_


def test_any_law_of_N_and_D_can_join_and_a_table_is_read_with_its_groups(tmp_path):
    def line(c, N, D):
        return c["k"] * (N * D) ** -c["p"]

    law = fit.FunctionLaw(line, {"k": (1.0, 1e3), "p": (0.01, 1.0)}, tries=4)
    runs = designed()
    runs["group"] = np.repeat(np.arange(18), 2)
    runs.to_csv(tmp_path / "table.csv", index=False)
    made = FormMixture(["chinchilla, tied", law], draws=40)
    by_table, by_frame = (
        made.clone().fit(table).forecast(1e11, 2e12) for table in (fit.read_table(tmp_path / "table.csv"), runs)
    )
    assert by_table.to_numpy() == pytest.approx(by_frame.to_numpy(), rel=1e-6)


# Bad input.


@pytest.mark.parametrize(
    ("change", "asked", "message"),
    [
        ({}, {"level": 1.5}, "level is 1.5; it must lie between 0 and 1, for example 0.95."),
        ({}, {"kind": "median"}, "kind is 'median'; choose mean"),
        ({}, {"forms": []}, "forms is empty; at least one law of N and D is needed."),
        ({}, {"forms": ["quadratic"]}, "form is 'quadratic'; choose one of"),
        ({}, {"forms": ["power"]}, "forms holds 'power'; each must be a law of N and D."),
        ({}, {"N": [-1.0]}, "N is -1 in row 0; it must be a finite number above zero."),
        ({"loss": np.nan}, {}, "loss is nan in row 0; it must be a finite number above zero."),
        ({"loss": None}, {}, "the table has no column 'loss'; it has "),
        ({"D": 1e9}, {}, "D is 1e+09 in every row; a law in N and D needs more than one number of tokens."),
    ],
)
def test_bad_input_is_one_sentence(change, asked, message):
    runs = designed()
    for name, value in change.items():
        runs = runs.drop(columns=name) if value is None else runs.assign(**{name: value})
    with pytest.raises(fit.InputError) as refused:
        fit.forecast(runs, **({"N": [1e11], "D": [2e12], "forms": ["chinchilla"]} | asked))
    assert str(refused.value).startswith(message)
