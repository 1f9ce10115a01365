"""The parametric law: closed-form optimum, intervals that cover, published constants, and refusals."""

import numpy as np
import pytest
from isoflop import fit
from isoflop.fit.uncertainty import percentile_interval

TRUTH = {"E": 1.8, "A": 480.0, "B": 2100.0, "alpha": 0.35, "beta": 0.37}


def points(seed, n=60, noise=0.003):
    rng = np.random.default_rng(seed)
    N, D = 10 ** rng.uniform(7.5, 10.5, n), 10 ** rng.uniform(9, 12, n)
    clean = TRUTH["E"] + TRUTH["A"] / N ** TRUTH["alpha"] + TRUTH["B"] / D ** TRUTH["beta"]
    return N, D, clean * np.exp(noise * rng.standard_normal(n))


def test_fit_returns_self_and_predict_takes_scalars_and_arrays():
    N, D, loss = points(1)
    law = fit.ChinchillaLaw()
    assert law.fit(N, D, loss) is law
    assert law.bootstrap(20) is law
    assert isinstance(law.predict(N=70e9, D=1.4e12), float)
    assert law.predict(N=N[:, None], D=D[None, :]).shape == (60, 60)
    assert abs(law.residuals()).max() < 0.02
    np.testing.assert_allclose(np.log(loss) - np.log(law.predict(N, D)), law.residuals(), atol=1e-12)


def test_groups_move_together_and_widen_the_interval():
    """Ten copies of each run carry no more information than the run."""
    N, D, loss = points(4, n=40)
    alone = fit.ChinchillaLaw().fit(N, D, loss).bootstrap(200, seed=1)
    tens = [np.repeat(v, 10) for v in (N, D, loss)]
    run = np.repeat(np.arange(40), 10)
    grouped = fit.ChinchillaLaw().fit(*tens).bootstrap(200, groups=run, seed=1)
    naive = fit.ChinchillaLaw().fit(*tens).bootstrap(200, seed=1)
    width = {
        k: np.diff(law.interval("alpha"))[0] for k, law in (("alone", alone), ("grouped", grouped), ("naive", naive))
    }
    np.testing.assert_allclose(width["grouped"], width["alone"], rtol=1e-4)
    assert width["naive"] < 0.6 * width["grouped"]


def test_percentile_intervals_hold_the_level_and_keep_infinities():
    draws = np.random.default_rng(0).permutation(1000).astype(float)
    low, high = percentile_interval(draws)
    assert (low, high) == (24.0, 975.0)
    assert percentile_interval([1.0, 2.0, np.inf, np.nan]) == (1.0, np.inf)
    assert np.isnan(percentile_interval([np.nan])).all()


def test_the_representation_is_the_equation_with_intervals():
    assert repr(fit.ChinchillaLaw(objective="l1", tied=True)) == "ChinchillaLaw(objective='l1', tied=True)"
    law = fit.ChinchillaLaw().fit(*points(5)).bootstrap(50)
    low, high = law.interval("alpha")
    assert f"N^{law.alpha_:.4g} [{low:.4g}, {high:.4g}]" in repr(law)
    assert "60 points, 64 of 64 starts agree" in repr(law)
    summary = law.summary()
    expected = [law.alpha_, np.std(law.draws_["alpha"], ddof=1), low, high]
    assert summary.table.loc["alpha"].tolist() == pytest.approx(expected, rel=1e-9)
    for shown in (str(summary), summary._repr_html_(), law._repr_html_()):
        assert f"{high:.5g}" in shown
        assert "64 of 64 starts agree, objective huber = " in shown
    assert fit.ChinchillaLaw().fit(*points(5)).summary().table["standard_error"].isna().all()


def test_a_law_without_a_data_term_is_called_degenerate():
    rng = np.random.default_rng(0)
    N, D = 10 ** rng.uniform(7, 10, 40), 10 ** rng.uniform(9, 12, 40)
    law = fit.ChinchillaLaw().fit(N, D, (2 + 400 / N**0.35) * np.exp(0.001 * rng.standard_normal(40)))
    assert set(law.degenerate_) & {"B", "beta"}


N, D, L = points(9, n=12)
BAD = [
    (dict(D=[np.inf, *D[1:]]), "D is inf in row 0"),
    (dict(loss=["2", "two"] * 6), "loss holds a value that is not a number"),
    (dict(loss=[True, False] * 6), "loss holds a value that is not a number"),
    (dict(loss=np.arange(12).astype("timedelta64[h]")), "loss holds a value that is not a number"),
    (dict(N=[], D=[], loss=[]), "N is empty"),
    (dict(N=N[:5], D=D[:5], loss=L[:5]), "has 5 parameters and the table has 5 different points; it needs at least 6"),
    (dict(N=np.full(12, 1e9)), "N is 1e\\+09 in every row"),
    (dict(N=np.linspace(1e8, 1.03e8, 12)), r"N is only 1e\+08 to 1\.03e\+08; a law in N and D needs"),
    (dict(D=20 * N), "collinear in \\(log N, log D\\), so alpha and beta cannot be told apart"),
    (dict(N=np.stack([N, N])), "N has shape"),
    (dict(N=np.resize(N[:5], 12), D=np.resize(D[:5], 12)), "the table has 5 different points"),
    (dict(flops=[1e18]), "flops has 1"),
    (dict(weight=np.zeros(12)), "weight is zero in every row"),
    (dict(weight=[-1.0] + [1.0] * 11), "weight is -1 in row 0"),
    (dict(weight=np.r_[np.ones(5), np.zeros(7)]), "the table has 5 different points"),
    (dict(weight=np.full(12, 1e160)), r"weight is 1e\+160 in row 0; it must be zero, or from 1e-60 to 1e\+60"),
    (dict(loss=3.0 * (1 + 1e-8 * np.cos(N))), r"loss is 3 in every row \(relative differences up to 1e-06"),
    (dict(loss=np.r_[2.5, np.full(11, 3.0)]), "loss has only 2 different values .* needs at least 5"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_one_sentence(change, message):
    with pytest.raises(fit.InputError, match=message) as caught:
        fit.ChinchillaLaw().fit(**({"N": N, "D": D, "loss": L} | change))
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")


REFUSED = [
    (lambda law: fit.ChinchillaLaw().predict(N=1e9, D=1e10), "call fit"),
    (lambda law: law.interval("alpha"), "call bootstrap"),
    (lambda law: law.bootstrap(5).interval("gamma"), "constant is 'gamma'; choose one of E"),
    (lambda law: law.optimal(0.0), "flops is 0"),
    (lambda law: law.bootstrap(5, groups=[1, 2, 3]), "groups has 3 values"),
    (lambda law: law.bootstrap(0), "bootstrap is 0"),
    (lambda law: law.bootstrap(5, groups=np.zeros(12)), "too few to resample"),
    (lambda law: fit.ChinchillaLaw(delta=0), "delta is 0"),
]


@pytest.mark.parametrize(("ask", "message"), REFUSED)
def test_a_wrong_question_says_what_to_call(ask, message):
    with pytest.raises(fit.InputError, match=message):
        ask(fit.ChinchillaLaw().fit(N, D, L))


@pytest.mark.published
def test_the_published_optimum_on_240_points_to_all_digits():
    runs = fit.published_runs("epoch", drop_worst=5)
    law = fit.ChinchillaLaw().fit(runs.N, runs.D, runs.loss)
    digits = [f"{law.E_:.5f}", f"{law.A_:.3f}", f"{law.B_:.3f}", f"{law.alpha_:.6f}", f"{law.beta_:.6f}"]
    assert digits == ["1.81722", "477.826", "2143.417", "0.347310", "0.367172"]
    assert law.starts_ == {"tried": 64, "agreeing": 64}


@pytest.mark.published
def test_the_published_intervals():
    runs = fit.published_runs("epoch", drop_worst=5)
    law = fit.ChinchillaLaw().fit(runs.N, runs.D, runs.loss).bootstrap(1000, groups=runs.run_id)
    # An end of a 95 % interval moves by about a tenth of the interval's width between bootstraps of 1000.
    np.testing.assert_allclose(law.interval("alpha"), [0.317, 0.373], atol=0.005)
    np.testing.assert_allclose(law.interval("beta"), [0.331, 0.415], atol=0.008)
    best = law.optimal([5.76e23, 1e26])
    np.testing.assert_allclose(np.log(best.interval("ratio")), np.log([[7.6, 36], [4.3, 44]]), atol=0.15)
    np.testing.assert_allclose(best.interval("loss")[0], [1.95, 2.00], atol=0.006)


@pytest.mark.parametrize("objective", ["huber", "squares"])
def test_a_table_with_hardly_any_noise_converges(objective):
    """Rounding of the predictions then changes the objective by more than a step does."""
    rng = np.random.default_rng(0)
    C, s = (v.ravel() for v in np.meshgrid([1e17, 4e17, 1.6e18, 6.4e18], np.geomspace(0.2, 5, 7), indexing="ij"))
    N = s * 0.8 * (C / 6) ** 0.5
    D = C / (N * (6 + 3000 * N ** (-1 / 3)))
    loss = (1.7 + 400 / N**0.34 + 410 / D**0.34) * np.exp(0.0003 * rng.standard_normal(len(N)))
    law = fit.ChinchillaLaw(objective).fit(N, D, loss)
    assert law.converged_
    assert law.starts_["agreeing"] == 64
