"""GammaLaw: what it contains, its derivatives, and its fits against independent ones."""

import numpy as np
import pytest
from isoflop import fit
from isoflop.fit.allocation.allocation import search
from scipy import optimize

TRUTH = {"E": 1.7, "A": 300.0, "B": 900.0, "alpha": 0.5, "beta": 0.52, "gamma": 0.6}


def runs(seed=0, n=80):
    rng = np.random.default_rng(seed)
    N = 10 ** rng.uniform(7, 9.5, n)
    return N, N * 10 ** rng.uniform(0.5, 2.5, n)


def test_it_finds_a_known_law_again_from_losses_without_noise():
    N, D = runs()
    law = fit.GammaLaw().fit(N, D, fit.GammaLaw.evaluate(TRUTH, N, D))
    assert law.converged_
    assert law.objective_ < 1e-20
    assert law.constants_ == pytest.approx(TRUTH, rel=1e-6)


def test_at_gamma_one_it_is_chinchillas_law_and_without_E_it_holds_kaplans():
    N, D = runs()
    chinchilla = {name: value for name, value in TRUTH.items() if name != "gamma"}
    assert np.allclose(
        fit.GammaLaw.evaluate(TRUTH | {"gamma": 1.0}, N, D), fit.ChinchillaLaw.evaluate(chinchilla, N, D)
    )
    kaplan = {"N_c": 1e14, "D_c": 1e13, "alpha_N": 0.08, "alpha_D": 0.1}
    loss = fit.KaplanLaw.evaluate(kaplan, N, D)
    law = fit.GammaLaw(E=0.0).fit(N, D, loss)
    assert law.objective_ < 1e-18
    assert law.gamma_ * law.beta_ == pytest.approx(0.1, rel=1e-4)
    assert law.gamma_ * law.alpha_ == pytest.approx(0.08, rel=1e-4)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"E": 0.0}, {"E": 1.2, "tied": True}])
def test_its_derivatives_are_those_of_differences(options, centred):
    N, D = runs(n=15)
    problem = fit.GammaLaw(**options)._problem((N, D), fit.GammaLaw.evaluate(TRUTH, N, D), centred)
    theta = problem.starts(np.ones((1, 15)), 1)[0] * 1.01 + 0.003
    slope = np.random.default_rng(1).normal(size=(1, 15))

    def gradient(at):
        return problem.form.gradient(problem.form.value(at)[1], slope)[0]

    steps = 1e-6 * np.eye(theta.shape[1])
    by_value = [np.diff([slope[0] @ problem.form.value(theta + s * h)[0][0] for s in (-1, 1)])[0] / 2e-6 for h in steps]
    by_slope = [(gradient(theta + h) - gradient(theta - h)) / 2e-6 for h in steps]
    assert gradient(theta) == pytest.approx(np.array(by_value), rel=2e-6, abs=1e-6)
    assert problem.form.second(problem.form.value(theta)[1], slope)[0] == pytest.approx(
        np.array(by_slope), rel=1e-5, abs=1e-5
    )


def test_no_start_of_scipy_ends_lower():
    N, D = runs(3)
    loss = fit.GammaLaw.evaluate(TRUTH, N, D) * np.exp(0.01 * np.random.default_rng(3).normal(size=len(N)))
    law = fit.GammaLaw(objective="squares").fit(N, D, loss)
    x, y = np.log(N) - np.log(N).mean(), np.log(D) - np.log(D).mean()

    def residual(p):
        inner = np.logaddexp(p[1] - p[2] * x, p[3] - p[4] * y)
        return np.log(np.exp(p[0]) + np.exp(p[5] * inner)) - np.log(loss)

    rng = np.random.default_rng(0)
    starts = rng.uniform([-1, -1, 0.1, -1, 0.1, 0.3], [0.7, 1, 1, 1, 1, 2], (40, 6))
    best = min(optimize.least_squares(residual, start, x_scale="jac", max_nfev=2000).cost for start in starts)
    assert law.objective_ <= best * (1 + 1e-7)


def test_the_optimum_is_that_of_a_search():
    C = np.array([[1e20], [1e24]])
    constants = {name: np.array([value]) for name, value in TRUTH.items()}
    found, searched = fit.GammaLaw().optimum(C, constants), search(fit.GammaLaw(), constants, C, lambda N: 6.0 * N)
    for closed, sought in zip(found, searched, strict=True):
        assert closed == pytest.approx(sought, rel=1e-5)


def test_a_fit_comes_back_from_json_and_profiles_hold_its_constants():
    N, D = runs(5)
    loss = fit.GammaLaw.evaluate(TRUTH, N, D) * np.exp(0.002 * np.random.default_rng(5).normal(size=len(N)))
    law = fit.GammaLaw().fit(N, D, loss).bootstrap(40)
    again = fit.read_law(law.to_json())
    assert again.constants_ == law.constants_
    assert again.form == "gamma"
    assert pytest.approx(law.optimal(1e22).N) == again.optimal(1e22).N
    low, high = law.interval("gamma", method="profile")
    assert low < TRUTH["gamma"] < high
