"""Forecasts by laws of any inputs: what is extrapolated, which law weighs most, how often intervals hold."""

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.approaches.experts import expert_columns

ROUTED = {"a": -0.082, "b": -0.108, "c": 0.009, "d": 1.104, "E_start": 1.847, "E_max": 314.478}  # Clark et al., S-Base
TOKENS = 1.3e11


def routed(seed=0):
    rng = np.random.default_rng(seed)
    N, E = (v.ravel() for v in np.meshgrid(np.geomspace(1.5e7, 1.3e9, 6), 2.0 ** np.arange(0, 10, 2)))
    loss = fit.ExpertLaw("clark").evaluate(ROUTED, N, E) * np.exp(0.002 * rng.standard_normal(len(N)))
    return pd.DataFrame({"N_active": N, "N_total": N * (1 + (E - 1) * 0.3), "experts": E, "loss": loss})


def expert_laws():
    return {form: fit.ExpertLaw(form, TOKENS, 0.3) for form in ("clark", "abnar")}


@pytest.fixture(scope="module")
def forecaster():
    return fit.Forecaster(expert_laws(), further="experts", draws=8).fit(routed())


def test_hold_outs_and_intervals_follow_the_input_that_is_extrapolated(forecaster):
    assert forecaster.weights_["clark"] > forecaster.weights_["abnar"]  # as its errors are smaller
    assert forecaster.errors_["clark"] < forecaster.errors_["abnar"]
    assert repr(forecaster).startswith("Forecaster of loss: clark ")
    assert repr(forecaster).endswith("2 hold-outs by experts")
    assert [cut.reach for cut in forecaster.cut_offs_] == [64, 16]
    assert forecaster.ends_.tolist() == [1, 256]
    at = {"N_active": [1e8, 1e8, 1e9], "experts": [256, 4096, 256], "N_total": [8e9, 1.2e11, 8e10]}
    drift = np.sqrt(forecaster.variances(**at)["drift"])
    assert drift[[0, 2]].tolist() == [0, 0]
    assert drift[1] == pytest.approx(forecaster.priors["loss"].drift * forecaster.rate_ * np.log(16))
    ends = forecaster.forecast(**at, kind="mean")
    assert (ends.low < ends.loss).all()
    assert (ends.loss < ends.high).all()
    assert forecaster.quantiles(**at)[:, 500] == pytest.approx(ends.loss)


def test_an_earlier_forecaster_knows_only_smaller_runs(forecaster):
    earlier = forecaster.before(0)
    assert earlier.data_["experts"].max() == 64
    runs = routed().query("experts <= 64")
    alone = fit.Forecaster(expert_laws(), further="experts", draws=0).fit(runs)
    at = {"N_active": [1e8], "experts": [256], "N_total": [8e9]}
    assert earlier.predict(**at) == pytest.approx(alone.predict(**at), rel=2e-3)  # other starts, other weights


def test_a_forecaster_of_own_laws_is_an_estimator_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.model_selection")

    def line(c, x, y):
        return c["k"] * x ** -c["p"] * y ** -c["q"]

    law = fit.FunctionLaw(line, {"k": (0.1, 100), "p": (0, 2), "q": (0, 2)}, inputs=("x", "y"), output="z", tries=4)
    x, y = (v.ravel() for v in np.meshgrid(np.geomspace(1, 100, 5), np.geomspace(1, 10, 4)))
    z = 5 * x**-0.3 * y**-0.2
    made = fit.Forecaster({"line": law}, further="x", draws=0)
    assert made.set_params(seed=3).get_params()["seed"] == 3
    assert np.median(sklearn.cross_val_score(made, np.stack([x, y], axis=1), z, cv=4)) == pytest.approx(1)
    forecast = made.fit(np.stack([x, y], axis=1), z).forecast(x=[1e4], y=2.0)
    assert [*forecast] == ["z", "low", "high"]
    assert forecast.z[0] == pytest.approx(5 * 1e4**-0.3 * 2**-0.2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fit.Forecaster([]), "laws holds no law; give unfitted laws of one output, such as"),
        (lambda: fit.Forecaster(["abnar"]), "laws holds 'abnar'; give unfitted laws of one output, such as"),
        (lambda: fit.Forecaster([fit.ChinchillaLaw(), fit.PowerLaw()]), "laws holds laws of loss and of y;"),
        (lambda: fit.Forecaster(expert_laws(), "D"), "further is 'D'; choose one of N_active, experts, N_total, flops"),
        (lambda: fit.Forecaster(expert_laws()).predict([1], [1], [1]), "this Forecaster is not fitted; call fit(N_"),
        (lambda: fit.Forecaster([fit.PowerLaw()]).fit([1, 2], [1, 2]), "further is 'flops', but no law has N"),
        (lambda: fit.Forecaster(expert_laws()).fit(routed().drop(columns="experts")), "the table has no column 'exper"),
        (lambda: fit.Forecaster(expert_laws(), draws=0).fit(routed().iloc[3::5]), "the law of experts clark has 6 p"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(make, message):
    with pytest.raises(fit.InputError) as refused:
        make()
    assert str(refused.value).startswith(message)


@pytest.mark.slow
@pytest.mark.published
def test_intervals_hold_on_larger_models_and_more_experts_of_clark():
    """Clark et al.'s runs: hide the largest models or the most experts, at two levels each."""
    where = {"router_type": ["Dense", "S-Base"], "experts_per_token": 1, "routing_frequency": 0.5, "flop_increase": 1.0}
    c = pd.DataFrame(expert_columns(fit.published_runs("routed", where=where))).drop(columns="D")
    laws = {form: fit.ExpertLaw(form, TOKENS, 0.3077) for form in ("abnar", "ludziejewski", "clark")}
    inside = []
    for further, levels in (("N_active", (1.2e9, 3e8)), ("experts", (511, 255))):
        for level in levels:
            shown, hidden = c[c[further] < level], c[c[further] >= level]
            forecast = fit.Forecaster(laws, further, draws=20).fit(shown).forecast(hidden)
            inside.append((forecast.low.to_numpy() <= hidden.loss) & (hidden.loss <= forecast.high.to_numpy()))
    assert np.mean(np.concatenate(inside)) >= 0.85  # measured: 91 %; one form alone had 10 to 70 % by size
