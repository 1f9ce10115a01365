"""A law as the solver sees it: its sums over points, and derivatives that follow from a formula."""

import numpy as np
import pytest
from isoflop.fit import InputError
from isoflop.fit.solver.forms import LogSumExp
from isoflop.fit.solver.jets import Jet
from scipy.special import logsumexp


@pytest.mark.parametrize("far", [0.0, 900.0, -900.0])
def test_exponents_that_would_overflow_or_vanish_change_nothing(far):
    """Compare two power laws and a constant with their definition; derivatives have a test in test_laws_more.py."""
    rng = np.random.default_rng(1)
    (x, y), ones = rng.normal(size=(2, 20)), np.ones(20)
    tables = [np.stack([ones, -x], 1), np.stack([ones, -y], 1), ones[:, None]]
    terms = [*zip(([0, 1], [2, 3], [4]), tables, strict=True)]
    form, theta = LogSumExp(5, terms), rng.normal(size=(3, 5)) + far
    value, cache = form.value(theta)
    u = np.array([theta[:, index] @ table.T for index, table in terms])
    np.testing.assert_allclose(value, logsumexp(u, axis=0), rtol=1e-12)
    share = np.exp(u - value)
    expected = np.concatenate([np.einsum("pn,ni->pi", *pair) for pair in zip(share, tables, strict=True)], axis=1)
    gradient = form.gradient(cache, np.ones_like(value))
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-9)  # exponents of 900 leave 1e-13


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
