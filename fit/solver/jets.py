"""Forward-mode derivatives: a law is NumPy arithmetic, evaluated with or without derivatives.

Griewank and Walther 2008, Evaluating Derivatives, chapters 3 and 13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..errors import Array, InputError

COMPLEX_STEP = 1e-30  # its square is below the rounding of anything (Squire and Trapp 1998, SIAM Review 40, 110)
DIFFERENCE = 1e-5  # relative step of a central difference of slopes: exact to about 1e-10

Rule = Callable[[Any], tuple[Any, Any, Any]]  # x -> value, slope and second derivative of a function


def _softplus(x: Array) -> tuple[Array, Array, Array]:
    small = np.exp(-np.abs(x))  # many times faster than logaddexp
    share = np.where(x > 0.0, 1.0, small) / (1.0 + small)
    return np.maximum(x, 0.0) + np.log1p(small), share, small / (1.0 + small) ** 2


def _exponential(x: Array) -> tuple[Array, Array, Array]:
    value = np.exp(x)
    return value, value, value


def _exponential_less_one(x: Array) -> tuple[Array, Array, Array]:
    slope = np.exp(x)
    return np.expm1(x), slope, slope


def _logarithm(x: Array) -> tuple[Array, Array, Array]:
    slope = 1.0 / x
    return np.log(x), slope, -(slope**2)


def _logarithm_of_one_more(x: Array) -> tuple[Array, Array, Array]:
    slope = 1.0 / (1.0 + x)
    return np.log1p(x), slope, -(slope**2)


def _reciprocal(x: Array) -> tuple[Array, Array, Array]:
    value = 1.0 / x
    return value, -(value**2), 2.0 * value**3


RULES: dict[Any, Rule] = {
    np.exp: _exponential,
    np.expm1: _exponential_less_one,
    np.log: _logarithm,
    np.log1p: _logarithm_of_one_more,
    np.reciprocal: _reciprocal,
    np.square: lambda x: (x * x, 2.0 * x, 2.0),
    np.absolute: lambda x: (np.abs(x), np.sign(x), None),  # None: the second derivative is zero
    np.positive: lambda x: (x, 1.0, None),
    np.negative: lambda x: (-x, -1.0, None),
}
# Functions whose derivatives come from a complex step.
ANALYTIC = {np.sqrt, np.exp2, np.log2, np.log10, np.sin, np.cos, np.tan, np.sinh, np.cosh, np.tanh}
ANALYTIC |= {np.arcsin, np.arccos, np.arctan, np.arcsinh, np.arccosh, np.arctanh}


class Jet(NDArrayOperatorsMixin):
    """A value and its derivatives by numbered parameters.

    `first` maps parameters to first derivatives, `second` (None: not computed) pairs i <= j to second derivatives;
    missing entries are zero.
    """

    __slots__ = ("first", "second", "value")

    second: Any  # a mapping, or None

    def __init__(
        self, value: Any, first: Mapping[int, Any], second: Mapping[tuple[int, int], Any] | None = None
    ) -> None:
        self.value, self.first, self.second = value, first, second

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "__call__" and not options:
            if ufunc in RULES:
                return self.chain(*RULES[ufunc](self.value))
            if ufunc in ANALYTIC:
                return self.chain(*_by_complex_step(ufunc, self.value))
            if ufunc in BINARY:
                return BINARY[ufunc](*inputs)
        raise InputError(f"the law uses {ufunc.__name__}, which has no derivative here; {ACCEPTED}.")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise InputError(f"the law uses {function.__name__}, which has no derivative here; {ACCEPTED}.")

    def chain(self, value: Any, slope: Any, bend: Any) -> Jet:
        """Apply to this jet a function with this value, slope and second derivative (None: zero) at the jet's value."""
        first = {i: slope * d for i, d in self.first.items()}
        if self.second is None:
            return Jet(value, first)
        second = {pair: slope * d for pair, d in self.second.items()}
        if bend is not None:
            places = sorted(self.first)
            for at, i in enumerate(places):
                moved = bend * self.first[i]
                for j in places[at:]:
                    _add(second, (i, j), moved * self.first[j])
        return Jet(value, first, second)

    def plus(self, other: Any, sign: float = 1.0) -> Jet:
        if not isinstance(other, Jet):
            return Jet(self.value + sign * other, self.first, self.second)
        first, second = dict(self.first), None
        for i, d in other.first.items():
            _add(first, i, sign * d)
        if self.second is not None and other.second is not None:
            second = dict(self.second)
            for pair, d in other.second.items():
                _add(second, pair, sign * d)
        return Jet(self.value + sign * other.value, first, second)

    def times(self, other: Any) -> Jet:
        if not isinstance(other, Jet):
            return self.chain(self.value * other, other, None)
        u, v = self.value, other.value
        first = {i: v * d for i, d in self.first.items()}
        for i, d in other.first.items():
            _add(first, i, u * d)
        if self.second is None or other.second is None:
            return Jet(u * v, first)
        second = {pair: v * d for pair, d in self.second.items()}
        for pair, d in other.second.items():
            _add(second, pair, u * d)
        for i, d in self.first.items():
            for j, e in other.first.items():
                _add(second, (min(i, j), max(i, j)), (2.0 if i == j else 1.0) * d * e)
        return Jet(u * v, first, second)


def _add(sums: dict[Any, Any], key: Any, value: Any) -> None:
    sums[key] = sums[key] + value if key in sums else value


def _by_complex_step(ufunc: Any, x: Array) -> tuple[Array, Array, Array]:
    """Return `ufunc` at x, its slope by a complex step, and its second derivative by differences of slopes."""

    def slope(x: Array) -> Array:
        return np.asarray(ufunc(x + 1j * COMPLEX_STEP)).imag / COMPLEX_STEP

    h = DIFFERENCE * (1.0 + np.abs(x))  # relative for large x, absolute near 0
    return ufunc(x), slope(x), (slope(x + h) - slope(x - h)) / (2.0 * h)


def _subtract(u: Any, v: Any) -> Jet:
    return u.plus(v, -1.0) if isinstance(u, Jet) else v.chain(u - v.value, -1.0, None)


def _multiply(u: Any, v: Any) -> Jet:
    return u.times(v) if isinstance(u, Jet) else v.times(u)


def _divide(u: Any, v: Any) -> Jet:
    return u * np.reciprocal(v) if isinstance(v, Jet) else u.times(1.0 / v)


def _power(u: Any, v: Any) -> Jet:
    if isinstance(v, Jet):
        return np.exp(v * np.log(u))
    x = u.value
    return u.chain(x**v, v * x ** (v - 1.0), v * (v - 1.0) * x ** (v - 2.0))


def _logaddexp(u: Any, v: Any) -> Jet:
    gap = u - v
    return gap.chain(*_softplus(gap.value)) + v


def _maximum(u: Any, v: Any) -> Jet:
    """Return the larger of u and v, at least one of them a jet, as the jet max(0, u - v) + v."""
    gap = u - v
    return gap.chain(np.maximum(gap.value, 0.0), (gap.value > 0.0).astype(float), None) + v


BINARY: dict[Any, Callable[[Any, Any], Any]] = {
    np.add: lambda u, v: u.plus(v) if isinstance(u, Jet) else v.plus(u),
    np.subtract: _subtract,
    np.multiply: _multiply,
    np.divide: _divide,
    np.power: _power,
    np.float_power: _power,
    np.logaddexp: _logaddexp,
    np.maximum: _maximum,
    np.minimum: lambda u, v: -_maximum(-u, -v),
}
ACCEPTED = "use exp, log, powers, products, logaddexp, maximum or NumPy's other elementary functions"
