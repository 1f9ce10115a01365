"""A law as the solver sees it: its sums over points, and derivatives that follow from a formula."""

import numpy as np
import pytest
from isoflop.fit import InputError
from isoflop.fit.solver.forms import LogSumExp, LogSumTerms
from isoflop.fit.solver.jets import Jet
from scipy.special import logsumexp

TERMS = {"free": (1, 3), "tied": (1, 1), "without a constant": (1, 3)}


def random_form(kind, n=20, far=0.0):
    """Return a form of two power laws with two exponents or one, and E free or fixed at e^-0.3 by an offset."""
    rng = np.random.default_rng(1)
    x, y, ones = rng.normal(size=n), rng.normal(size=n), np.ones(n)
    alpha, beta = TERMS[kind]
    terms = [((0, alpha), np.stack([ones, -x], 1)), ((2, beta), np.stack([ones, -y], 1))]
    k = 3 if kind == "tied" else 4
    terms.append(((), np.zeros((n, 0)), np.full(n, -0.3)) if kind == "without a constant" else ((k,), ones[:, None]))
    k += kind != "without a constant"
    return LogSumExp(k, terms), rng.normal(size=(3, k)) + far, rng


def dense(form, theta):
    """Return prediction, gradient and Hessian at each point, from the definition."""
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


def test_names_may_share_a_parameter_or_be_held():
    x = np.linspace(-1, 1, 7)

    def terms(v):
        return [v["a"] - v["alpha"] * x, v["b"] - v["beta"] * x**2, v["E"]]

    tied = LogSumTerms(terms, {"a": 0, "alpha": 1, "b": 2, "beta": 1}, 7, {"E": 0.3})
    free = LogSumTerms(terms, {"a": 0, "alpha": 1, "b": 2, "beta": 3, "E": 4}, 7)
    slope = np.ones((1, 7))
    (f, cache), (g, other) = (
        tied.value(np.array([[0.1, 0.4, -0.2]])),
        free.value(np.array([[0.1, 0.4, -0.2, 0.4, 0.3]])),
    )
    np.testing.assert_allclose(f, g, rtol=1e-14)
    gradient, hessian = (part[0] for part in tied.derivatives(cache, slope, slope, True))
    first, second = (part[0] for part in free.derivatives(other, slope, slope, True))
    gather = np.array([[1, 0, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1, 0, 0]])
    np.testing.assert_allclose(gradient, gather @ first, rtol=1e-12)
    np.testing.assert_allclose(hessian, gather @ second @ gather.T, rtol=1e-12)


# Jets.

FORMULAS = {
    "powers": lambda a, b: a**1.7 / b**0.4 + 2.0**a - b**a,
    "products": lambda a, b: (3.0 - a) * b / (a + b * b) - 2.0 / b,
    "logarithms": lambda a, b: np.log1p(a * b) + np.log(a) * np.expm1(-b) + np.square(a) + np.reciprocal(b),
    "sums of exponentials": lambda a, b: np.logaddexp(a * b, a - b) + np.logaddexp(0.0, a) - np.logaddexp(b, 1.0),
    "corners": lambda a, b: np.maximum(a, b) * np.minimum(a * b, 0.7) + abs(a - 2.0) * b + np.maximum(1.0, +a),
    "others": lambda a, b: np.tanh(a * b) + np.sqrt(a) * np.sin(b) + np.log10(a + b) + np.exp2(-b),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_derivatives_of_a_formula_are_those_of_finite_differences(name):
    formula, h = FORMULAS[name], 1e-4
    a, b = np.random.default_rng(0).uniform(0.3, 1.8, (2, 5, 1))
    x = np.linspace(0.9, 1.1, 3)
    jet = formula(Jet(a * x, {0: x}, {}), Jet(b, {1: 1.0}, {}))

    def at(i, j):
        return formula((a + i * h) * x, b + j * h)

    np.testing.assert_allclose(jet.value, at(0, 0), rtol=1e-14)
    first = {0: (at(1, 0) - at(-1, 0)) / (2 * h), 1: (at(0, 1) - at(0, -1)) / (2 * h)}
    second = {
        (0, 0): (at(1, 0) - 2 * at(0, 0) + at(-1, 0)) / h**2,
        (1, 1): (at(0, 1) - 2 * at(0, 0) + at(0, -1)) / h**2,
    }
    second[0, 1] = (at(1, 1) - at(1, -1) - at(-1, 1) + at(-1, -1)) / (4 * h**2)
    for i, difference in first.items():  # exact to h^2, and to rounding / h
        np.testing.assert_allclose(jet.first[i] + 0 * difference, difference, rtol=1e-5, atol=1e-6)
    for pair, difference in second.items():
        np.testing.assert_allclose(jet.second.get(pair, 0.0) + 0 * difference, difference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [np.floor, np.isfinite, np.add.reduce, np.sum, lambda a: np.where(a > 0, a, 0.0)])
def test_what_has_no_derivative_is_refused_in_one_sentence(function):
    with pytest.raises(InputError, match="which has no derivative here") as caught:
        function(Jet(np.ones((2, 1)), {0: 1.0}))
    assert str(caught.value).endswith(".")
