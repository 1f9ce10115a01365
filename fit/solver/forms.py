"""Laws as the solver sees them: log loss as a function of the parameters, with derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import Array, floats
from .jets import Jet

SAFE_EXPONENT = 600.0  # sums of a few exponentials up to this size neither overflow nor vanish


class LogForm:
    """A function from k parameters to log losses at n points.

    theta and steps are (P, k) for P problems, coefficients such as `slope` (P, n); df_i and d2f_i are the first and
    second derivatives of f at point i. `value` returns f (P, n), a new array, and a cache for the other methods: the
    Jacobian (P, n, k) and theta, by default.
    """

    parameters: int
    points: int

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        raise NotImplementedError

    def second(self, cache: list[Array], slope: Array) -> Array:
        raise NotImplementedError

    def gradient(self, cache: list[Array], slope: Array) -> Array:
        """Return sum_i slope_i df_i, (P, k), with df_i the gradient of the prediction at point i."""
        return np.einsum("pn,pni->pi", slope, cache[0])

    def derivatives(self, cache: list[Array], slope: Array, curvature: Array, second: bool) -> tuple[Array, Array]:
        """Return the gradient sum_i slope_i df_i (P, k) and the Hessian sum_i curvature_i df_i df_i^T (P, k, k).

        df_i is the gradient of prediction i; `second` adds sum_i slope_i d2f_i to the Hessian.
        """
        first = cache[0]
        hessian = (first * curvature[:, :, None]).transpose(0, 2, 1) @ first
        return self.gradient(cache, slope), hessian + self.second(cache, slope) if second else hessian

    def sizes(self, cache: list[Array], slope: Array, spread: Array) -> tuple[Array, Array]:
        """Return sum_i |slope_i| |df_i| and sum_i spread_i |df_i|, each (P, k): scales of a gradient's rounding."""
        size = np.abs(cache[0])
        return np.einsum("pn,pni->pi", np.abs(slope), size), np.einsum("pn,pni->pi", spread, size)

    def along(self, cache: list[Array], step: Array) -> Array:
        """Return the change of each prediction along a step of the parameters, df . step, (P, n)."""
        return np.einsum("pni,pi->pn", cache[0], step)

    def bend(self, cache: list[Array], step: Array) -> Array:
        """Return the second derivative of each prediction along a step of the parameters, step^T d2f step, (P, n)."""
        raise NotImplementedError


class LogSumExp(LogForm):
    """f = log sum_t exp(Z_t theta[index_t] + offset_t): any sum of power laws, with free, shared or fixed parameters.

    `terms` are (index, Z) or (index, Z, offset): numbers of the term's parameters, (n, len(index)), (n,). With p_t the
    share of term t, df = sum_t p_t Z_t and d2f = sum_t p_t Z_t Z_t^T - df df^T. The cache is p, one (P, n) per term.
    """

    def __init__(self, parameters: int, terms: Sequence[tuple[Any, ...]]) -> None:
        self.parameters = parameters
        self.points = n = len(terms[0][1])
        self.index = [np.asarray(term[0], dtype=int) for term in terms]
        self.tables = [floats(term[1]) for term in terms]
        offsets = [floats(term[2]) if len(term) == 3 else np.zeros(n) for term in terms]
        # Terms that are equal at every point, such as E, are one number per problem until they are added up.
        width = [
            1 if (np.ptp(Z, axis=0) == 0).all() and np.ptp(o) == 0 else n
            for Z, o in zip(self.tables, offsets, strict=True)
        ]
        self._rows = [np.ascontiguousarray(Z[:w].T) for Z, w in zip(self.tables, width, strict=True)]
        self._offsets = [o[:w] if o.any() else None for o, w in zip(offsets, width, strict=True)]
        self._largest = [(np.abs(Z).max(axis=0), np.abs(o).max()) for Z, o in zip(self.tables, offsets, strict=True)]
        placed = [Z @ np.eye(parameters)[index] for Z, index in zip(self.tables, self.index, strict=True)]
        self._first, self._absolute = placed, [np.abs(Z) for Z in placed]
        pairs = itertools.combinations_with_replacement(placed, 2)
        self._second = [_products(Z, Y) + (Y is not Z) * _products(Y, Z) for Z, Y in pairs]

    def _change(self, step: Array) -> list[Array]:
        """Return the change of u by `step` for each term exp(u): (P, n), or (P, 1) if it is equal at all points."""
        return [step[:, index] @ rows for index, rows in zip(self.index, self._rows, strict=True)]

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        exponents, safe = self._change(theta), True
        for u, index, offset, largest in zip(exponents, self.index, self._offsets, self._largest, strict=True):
            if offset is not None:
                u += offset
            safe &= bool((np.abs(theta[:, index]) @ largest[0] + largest[1]).max() < SAFE_EXPONENT)
        if not safe:
            top = np.max(np.broadcast_arrays(*exponents), axis=0)
            exponents = [u - top for u in exponents]
        total = np.zeros((len(theta), self.points))
        for u in exponents:
            total += np.exp(u, out=u)
        shares = [np.divide(u, total, out=u if u.shape == total.shape else None) for u in exponents]
        np.log(total, out=total)
        return (total if safe else total + top), shares

    def gradient(self, cache: list[Array], slope: Array) -> Array:
        return _sums((slope * share for share in cache), self._first)

    def derivatives(self, cache: list[Array], slope: Array, curvature: Array, second: bool) -> tuple[Array, Array]:
        hessian = _sums(_pair_coefficients(cache, slope, curvature, second), self._second)
        return self.gradient(cache, slope), hessian.reshape(-1, self.parameters, self.parameters)

    def sizes(self, cache: list[Array], slope: Array, spread: Array) -> tuple[Array, Array]:
        size = np.abs(slope)
        absolute = _sums((size * share for share in cache), self._absolute)
        return absolute, _sums((spread * share for share in cache), self._absolute)

    def along(self, cache: list[Array], step: Array) -> Array:
        total = np.zeros_like(cache[0])
        for change, share in zip(self._change(step), cache, strict=True):
            total += change * share
        return total

    def bend(self, cache: list[Array], step: Array) -> Array:
        mean, square = np.zeros_like(cache[0]), np.zeros_like(cache[0])
        for change, share in zip(self._change(step), cache, strict=True):
            part = change * share
            mean += part
            part *= change
            square += part
        mean *= mean
        square -= mean
        return square


def _pair_coefficients(cache: list[Array], slope: Array, curvature: Array, second: bool) -> Iterator[Array]:
    """Yield the coefficients (P, n) of Z_s Z_t^T in the Hessian for each pair s <= t of terms; Z_t is term t's table.

    The next pair overwrites the array.
    """
    outer = curvature - slope if second else curvature
    cross, buffer = np.empty_like(outer), np.empty_like(outer)
    for s, share in enumerate(cache):
        np.multiply(outer, share, out=cross)
        diagonal = np.add(cross, slope, out=buffer) if second else cross
        yield np.multiply(diagonal, share, out=buffer)
        for other in cache[s + 1 :]:
            yield np.multiply(cross, other, out=buffer)


def _products(Z: Array, Y: Array) -> Array:
    return (Z[:, :, None] * Y[:, None, :]).reshape(len(Z), -1)


def _sums(coefficients: Iterable[Array], tables: Sequence[Array]) -> Array:
    return np.asarray(sum(coefficient @ table for coefficient, table in zip(coefficients, tables, strict=True)))


# Maps coordinates by name, each (P, 1), to the logs of the terms, which broadcast to (P, n).
Terms = Callable[[Mapping[str, Any]], Sequence[Any]]


class LogSumTerms(LogForm):
    """f = log sum_t exp u_t(theta), each u_t a function of named coordinates that `Jet` can differentiate.

    `at` maps names to indices of parameters, which may be equal; `fixed` maps the other names to values.
    """

    def __init__(
        self, terms: Terms, at: Mapping[str, int], points: int, fixed: Mapping[str, float] | None = None
    ) -> None:
        self.terms, self.at, self.points = terms, dict(at), points
        self.fixed = {name: np.full((1, 1), value) for name, value in (fixed or {}).items()}
        self.parameters = max(self.at.values(), default=-1) + 1

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        terms, shares, value = self._evaluate({n: Jet(theta[:, i : i + 1], {i: 1.0}) for n, i in self.at.items()})
        first = np.zeros((len(theta), self.points, self.parameters))
        for term, share in zip(terms, shares, strict=True):
            for i, derivative in term.first.items():
                first[:, :, i] += share * derivative
        return np.array(np.broadcast_to(value, first.shape[:2])), [first, theta]

    def second(self, cache: list[Array], slope: Array) -> Array:
        """Return sum_i slope_i d2f_i, (P, k, k).

        For terms exp(u_t) with shares p_t in their sum, d2f = sum_t p_t (du_t du_t^T + d2u_t) - df df^T.
        """
        first, theta = cache
        terms, shares, _ = self._evaluate({n: Jet(theta[:, i : i + 1], {i: 1.0}, {}) for n, i in self.at.items()})
        hessian = np.zeros((len(theta), self.parameters, self.parameters))
        for term, share in zip(terms, shares, strict=True):
            weighted = slope * share
            if len(terms) > 1:
                term_first = np.zeros_like(first)
                for i, derivative in term.first.items():
                    term_first[:, :, i] = derivative
                hessian += (term_first * weighted[:, :, None]).transpose(0, 2, 1) @ term_first
            for (i, j), derivative in term.second.items():
                total = (weighted * derivative).sum(axis=1)
                hessian[:, i, j] += total
                if i != j:
                    hessian[:, j, i] += total
        return hessian - (first * slope[:, :, None]).transpose(0, 2, 1) @ first if len(terms) > 1 else hessian

    def bend(self, cache: list[Array], step: Array) -> Array:
        theta = cache[1]
        along = {n: Jet(theta[:, i : i + 1], {0: step[:, i : i + 1]}, {}) for n, i in self.at.items()}
        terms, shares, _ = self._evaluate(along)
        if len(terms) == 1:
            return np.broadcast_to(terms[0].second.get((0, 0), 0.0), (len(theta), self.points))
        mean, square = np.zeros((len(theta), self.points)), np.zeros((len(theta), self.points))
        for term, share in zip(terms, shares, strict=True):
            moved = term.first.get(0, 0.0)
            mean += share * moved
            square += share * (moved**2 + term.second.get((0, 0), 0.0))
        return square - mean**2

    def _evaluate(self, coordinates: Mapping[str, Jet]) -> tuple[list[Jet], list[Array], Array]:
        """Return the logs of the terms as jets, each term's share of the sum of terms, and the log of that sum."""
        exponents = self.terms({**coordinates, **self.fixed})
        terms = [term if isinstance(term, Jet) else Jet(np.asarray(term), {}, {}) for term in exponents]
        if len(terms) == 1:
            return terms, [np.ones(1)], terms[0].value
        top = terms[0].value
        for term in terms[1:]:
            top = np.maximum(top, term.value)
        shares = [np.exp(term.value - top) for term in terms]
        total = np.sum(np.broadcast_arrays(*shares), axis=0)
        return terms, [share / total for share in shares], top + np.log(total)
