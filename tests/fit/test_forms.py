"""A law as the solver sees it: its sums over points, and laws that a user writes as a function."""

import numpy as np
import pytest
from isoflop.fit import ChinchillaLaw, InputError
from isoflop.fit.solver.forms import ComplexStepForm, FunctionForm, LogSumExp
from isoflop.fit.solver.solver import solve
from scipy.special import logsumexp

TERMS = {"free": (1, 3), "tied": (1, 1), "without a constant": (1, 3)}


def random_form(kind, n=20, far=0.0):
    """Two power laws with their own exponents or one, and E: free, or fixed at e^-0.3 by an offset."""
    rng = np.random.default_rng(1)
    x, y, one = rng.normal(size=n), rng.normal(size=n), np.ones(n)
    alpha, beta = TERMS[kind]
    terms = [((0, alpha), np.stack([one, -x], 1)), ((2, beta), np.stack([one, -y], 1))]
    k = 3 if kind == "tied" else 4
    terms.append(((), np.zeros((n, 0)), np.full(n, -0.3)) if kind == "without a constant" else ((k,), one[:, None]))
    k += kind != "without a constant"
    return LogSumExp(k, terms), rng.normal(size=(3, k)) + far, rng


def dense(form, theta):
    """Prediction, gradient and Hessian at each point, from the definition."""
    u, Z = [], []
    for index, table, offset in zip(form.index, form.tables, form._offsets, strict=True):
        full = np.zeros((form.points, form.parameters))
        full[:, index] = table
        Z.append(full)
        u.append(theta @ full.T + (0.0 if offset is None else offset))
    f = logsumexp(u, axis=0)
    share, Z = np.exp(np.array(u) - f), np.array(Z)
    first = np.einsum("tpn,tni->pni", share, Z)
    second = np.einsum("tpn,tni,tnj->pnij", share, Z, Z) - np.einsum("pni,pnj->pnij", first, first)
    return f, first, second


@pytest.mark.parametrize("kind", TERMS)
def test_the_sums_of_a_log_sum_exp_are_those_of_its_definition(kind):
    form, theta, rng = random_form(kind)
    slope, curvature = rng.normal(size=(2, 3, form.points))
    step = rng.normal(size=theta.shape)
    value, cache = form.value(theta)
    f, first, second = dense(form, theta)
    close = {"rtol": 1e-12, "atol": 1e-12}  # sums of twenty terms of order one, in another order
    np.testing.assert_allclose(value, f, **close)
    gradient, hessian = form.derivatives(cache, slope, curvature, second=True)
    outer = np.einsum("pn,pni,pnj->pij", curvature, first, first)
    np.testing.assert_allclose(gradient, np.einsum("pn,pni->pi", slope, first), **close)
    np.testing.assert_allclose(hessian, outer + np.einsum("pn,pnij->pij", slope, second), **close)
    np.testing.assert_allclose(form.derivatives(cache, slope, curvature, second=False)[1], outer, **close)
    np.testing.assert_allclose(form.along(cache, step), np.einsum("pni,pi->pn", first, step), **close)
    np.testing.assert_allclose(form.bend(cache, step), np.einsum("pnij,pi,pj->pn", second, step, step), **close)
    absolute, reach = form.sizes(cache, slope, np.abs(curvature))
    assert (absolute >= np.abs(gradient) * (1 - 1e-12)).all()
    assert (reach >= np.einsum("pn,pni->pi", np.abs(curvature), np.abs(first)) * (1 - 1e-12)).all()


@pytest.mark.parametrize("far", [900.0, -900.0])
def test_exponents_that_would_overflow_or_vanish_change_nothing(far):
    form, theta, _ = random_form("free", far=far)
    value, cache = form.value(theta)
    f, first, _ = dense(form, theta)
    np.testing.assert_allclose(value, f, rtol=1e-12)
    gradient = form.gradient(cache, np.ones_like(value))
    np.testing.assert_allclose(gradient, first.sum(axis=1), rtol=1e-9, atol=1e-9)  # exponents of 900 leave 1e-13


def analytic(tables):
    """A log-sum-exp as a user would write it."""

    def function(theta):
        total = 0.0
        for index, Z in zip(tables.index, tables.tables, strict=True):
            total = total + np.exp(theta[:, index] @ Z.T)
        return np.log(total)

    return function


def test_a_complex_step_gives_the_gradient_to_rounding():
    built, theta, rng = random_form("free")
    form = ComplexStepForm(analytic(built), built.parameters, built.points)
    form.check(theta)
    slope, curvature = rng.normal(size=(2, 3, form.points))
    step = rng.normal(size=theta.shape)
    (value, cache), (expected, shares) = form.value(theta), built.value(theta)
    np.testing.assert_allclose(value, expected, rtol=1e-13, atol=1e-14)
    for second in (False, True):
        got, want = (f.derivatives(c, slope, curvature, second) for f, c in ((form, cache), (built, shares)))
        np.testing.assert_allclose(got[0], want[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(got[1], want[1], atol=1e-8)  # a central difference, step 1e-5
    np.testing.assert_allclose(form.along(cache, step), built.along(shares, step), atol=1e-12)
    np.testing.assert_allclose(form.bend(cache, step), built.bend(shares, step), atol=1e-8)


BAD = {
    "abs": (lambda t: np.log(np.exp(t[:, :1]) + np.abs(t[:, 1:2])) + np.zeros(4), "not analytic in parameter 1"),
    "real": (lambda t: np.exp(t.real[:, :1]) + 0j * np.ones(4), "not analytic in parameter 0"),
    "real numbers": (lambda t: np.exp(t.real[:, :1]) * np.ones(4), "real numbers for complex"),
    "a cast": (lambda t: np.exp(t[:, :1].astype(float)) * np.ones(4), "real numbers for complex"),
    "a branch": (lambda t: np.where(t.imag[:, :1] == 0, 2, 1) * t[:, :1] * np.ones(4), "not analytic in parameter 0"),
    "floor": (lambda t: np.floor(t[:, :1]) * np.ones(4), "fails on complex parameters .*TypeError"),
    "nowhere finite": (lambda t: np.log(0 * t[:, :1]) * np.ones(4), "no finite prediction at any start"),
    "a transposed shape": (lambda t: np.exp(t[:, :1] * np.ones(4)).T, r"gave shape \(4, \d+\)"),
    "one number": (lambda t: 1.0 + 0j, r"gave shape \(\)"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_function_that_is_not_analytic_is_refused(kind):
    function, message = BAD[kind]
    with pytest.raises(InputError, match=message) as caught:
        ComplexStepForm(function, 2, 4).check(np.array([[0.5, -0.7], [1.0, 0.3], [0.2, 0.9]]))
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_a_form_with_its_own_derivatives_finds_what_the_built_in_one_finds():
    rng = np.random.default_rng(4)
    N, D = 10 ** rng.uniform(7.5, 10.5, 60), 10 ** rng.uniform(9, 12, 60)
    loss = (1.8 + 480.0 / N**0.35 + 2100.0 / D**0.37) * np.exp(0.003 * rng.standard_normal(60))
    p = ChinchillaLaw().fit(N, D, loss).problem_
    form = FunctionForm(lambda theta: dense(p.form, theta), 5, 60)
    arguments = (p.target, np.ones((1, 60)), p.starts(np.ones((1, 60)), None)[:, ::8], p.lower, p.upper, 1e-2)
    built, own = solve(p.form, *arguments), solve(form, *arguments)
    assert own.converged.all()
    assert own.agreeing[0] == built.agreeing[0] == 8
    np.testing.assert_allclose(own.objective, built.objective, rtol=1e-12)
    np.testing.assert_allclose(own.theta, built.theta, rtol=1e-7)  # conditioning 1e5 times the gradient's 1e-9, halved
