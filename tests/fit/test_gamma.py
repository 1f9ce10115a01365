"""GammaLaw: what it contains, and its derivatives where it has fewer constants (the rest is in test_laws_more.py)."""

import numpy as np
import pytest
from isoflop import fit
from isoflop.fit.allocation.allocation import search

TRUTH = {"E": 1.7, "A": 300.0, "B": 900.0, "alpha": 0.5, "beta": 0.52, "gamma": 0.6}


def runs(seed=0, n=80):
    rng = np.random.default_rng(seed)
    N = 10 ** rng.uniform(7, 9.5, n)
    return N, N * 10 ** rng.uniform(0.5, 2.5, n)


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
@pytest.mark.parametrize("options", [{"tied": True}, {"E": 0.0}, {"E": 1.2, "tied": True}])
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


def test_the_optimum_is_that_of_a_search():
    C = np.array([[1e20], [1e24]])
    constants = {name: np.array([value]) for name, value in TRUTH.items()}
    found, searched = fit.GammaLaw().optimum(C, constants), search(fit.GammaLaw(), constants, C, lambda N: 6.0 * N)
    for closed, sought in zip(found, searched, strict=True):
        assert closed == pytest.approx(sought, rel=1e-5)
