"""Laws as the solver sees them: log loss as a function of the parameters, with derivatives.

A form is asked for *sums over points* (gradients, Hessians), which for sums of power laws (`LogSumExp`) are products
with constant tables; a dense Jacobian is kept only by other laws.

Squire and Trapp 1998 (SIAM Review 40, 110): the complex step.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import Array, InputError, floats

SAFE_EXPONENT = 600.0  # a few exponentials of this size neither overflow nor vanish
COMPLEX_STEP = 1e-30  # its square is below the rounding of anything
DIFFERENCE = 1e-5  # relative step of a central difference: about 1e-10 of truncation and 1e-11 of rounding
ANALYTIC = 1e-4  # how well a complex step and a difference of an analytic function agree, with room


class LogForm:
    """k parameters, n points, log loss out. theta is (P, k), coefficients such as `slope` (P, n), a step (P, k).

    `value` gives f (P, n), an array of the caller's own, and arrays with P rows each for the other methods (`cache`):
    the Jacobian (P, n, k) and theta, unless a form has its own methods; `second` gives sum_i slope_i d2f_i.
    """

    parameters: int
    points: int

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        raise NotImplementedError

    def second(self, cache: list[Array], slope: Array) -> Array:
        raise NotImplementedError

    def gradient(self, cache: list[Array], slope: Array) -> Array:
        """sum_i slope_i df_i, (P, k)."""
        return np.einsum("pn,pni->pi", slope, cache[0])

    def derivatives(self, cache: list[Array], slope: Array, curvature: Array, second: bool) -> tuple[Array, Array]:
        """The gradient, and sum_i curvature_i df_i df_i^T, (P, k, k), plus sum_i slope_i d2f_i where `second`."""
        first = cache[0]
        hessian = (first * curvature[:, :, None]).transpose(0, 2, 1) @ first
        return self.gradient(cache, slope), hessian + self.second(cache, slope) if second else hessian

    def sizes(self, cache: list[Array], slope: Array, spread: Array) -> tuple[Array, Array]:
        """sum_i |slope_i| |df_i|, what cancels in a gradient, and sum_i spread_i |df_i|; both (P, k)."""
        size = np.abs(cache[0])
        return np.einsum("pn,pni->pi", np.abs(slope), size), np.einsum("pn,pni->pi", spread, size)

    def along(self, cache: list[Array], step: Array) -> Array:
        """Change of each prediction along a step, df . step, (P, n)."""
        return np.einsum("pni,pi->pn", cache[0], step)

    def bend(self, cache: list[Array], step: Array) -> Array:
        """How that change bends, step^T d2f step, (P, n); here a difference, as it steers and decides nothing."""
        theta, h = cache[1], DIFFERENCE
        ahead, behind = (self.along(self.value(theta + sign * h * step)[1], step) for sign in (1.0, -1.0))
        return (ahead - behind) / (2.0 * h)


class LogSumExp(LogForm):
    """f = log sum_t exp(Z_t theta[index_t] + offset_t): every sum of power laws, with free, shared or fixed parameters.

    `terms` are (index, Z) or (index, Z, offset): the parameters that the term reads, (n, len(index)), (n,). With p_t
    the share of term t: df = sum_t p_t Z_t, d2f = sum_t p_t Z_t Z_t^T - df df^T. The cache is p, a (P, n) per term.
    """

    def __init__(self, parameters: int, terms: Sequence[tuple[Any, ...]]) -> None:
        self.parameters = parameters
        self.points = n = len(terms[0][1])
        self.index = [np.asarray(term[0], dtype=int) for term in terms]
        self.tables = [floats(term[1]) for term in terms]
        offsets = [floats(term[2]) if len(term) == 3 else np.zeros(n) for term in terms]
        # What is the same at every point, as E is, is one number a problem until it meets the others.
        width = [
            1 if (np.ptp(Z, axis=0) == 0).all() and np.ptp(o) == 0 else n
            for Z, o in zip(self.tables, offsets, strict=True)
        ]
        self._rows = [np.ascontiguousarray(Z[:w].T) for Z, w in zip(self.tables, width, strict=True)]
        self._offsets = [o[:w] if o.any() else None for o, w in zip(offsets, width, strict=True)]
        self._largest = [(np.abs(Z).max(axis=0), np.abs(o).max()) for Z, o in zip(self.tables, offsets, strict=True)]
        place = [np.eye(parameters)[i] for i in self.index]
        self._first = _PlacedSums(self.tables, place)
        self._absolute = _PlacedSums([np.abs(Z) for Z in self.tables], place)
        pairs = itertools.combinations_with_replacement(range(len(terms)), 2)
        self._second = _PlacedSums(*zip(*[self._products(s, t) for s, t in pairs], strict=True))

    def _products(self, s: int, t: int) -> tuple[Array, Array]:
        """Products of the columns of Z_s and Z_t, (n, m), and the entries of the Hessian that each belongs to."""
        pairs = [(a, b) for a in range(len(self.index[s])) for b in range(len(self.index[t])) if s != t or a <= b]
        columns = np.zeros((self.points, len(pairs)))
        place = np.zeros((len(pairs), self.parameters, self.parameters))
        for column, (a, b) in enumerate(pairs):
            i, j = self.index[s][a], self.index[t][b]
            columns[:, column] = self.tables[s][:, a] * self.tables[t][:, b]
            place[column, i, j] += 1.0
            if s != t or a != b:
                place[column, j, i] += 1.0
        return columns, place.reshape(len(pairs), self.parameters**2)

    def _change(self, step: Array) -> list[Array]:
        """Change of each term's exponent along a step: (P, n), or (P, 1) where all points share it."""
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
        work = np.empty_like(slope)
        return self._first(np.multiply(slope, share, out=work) for share in cache)

    def derivatives(self, cache: list[Array], slope: Array, curvature: Array, second: bool) -> tuple[Array, Array]:
        hessian = self._second(_pair_coefficients(cache, slope, curvature, second))
        return self.gradient(cache, slope), hessian.reshape(-1, self.parameters, self.parameters)

    def sizes(self, cache: list[Array], slope: Array, spread: Array) -> tuple[Array, Array]:
        size = np.abs(slope)
        return self._absolute(size * share for share in cache), self._absolute(spread * share for share in cache)

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
    """What multiplies Z_s Z_t^T at each point for the pairs s <= t, in order; one array, overwritten."""
    outer = curvature - slope if second else curvature
    left, work = np.empty_like(outer), np.empty_like(outer)
    for s, share in enumerate(cache):
        np.multiply(outer, share, out=left)
        own = np.add(left, slope, out=work) if second else left
        yield np.multiply(own, share, out=work)
        for other in cache[s + 1 :]:
            yield np.multiply(left, other, out=work)


class _PlacedSums:
    """sum_b (coefficients_b @ table_b) @ place_b: sums over points, each put where it belongs.

    tables (n, m_b), places (m_b, K), coefficients (P, n) one after the other; the result is (P, K).
    """

    def __init__(self, tables: Sequence[Array], places: Sequence[Array]) -> None:
        # A product with one column is matrix times vector, which BLAS runs on threads of its own at these sizes.
        self.tables = [np.hstack([Z, np.zeros((len(Z), max(0, 2 - Z.shape[1])))]) for Z in tables]
        ends = np.cumsum([0, *(Z.shape[1] for Z in self.tables)]).tolist()
        self.columns = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self.place = np.zeros((ends[-1], places[0].shape[1]))
        for columns, place in zip(self.columns, places, strict=True):
            self.place[columns][: len(place)] = place

    def __call__(self, coefficients: Iterable[Array]) -> Array:
        sums = None
        for coefficient, Z, columns in zip(coefficients, self.tables, self.columns, strict=True):
            if sums is None:
                sums = np.empty((len(coefficient), len(self.place)))
            np.matmul(coefficient, Z, out=sums[:, columns])
        return sums @ self.place


@dataclass(frozen=True)
class Term:
    """u (P, n), du by coordinate name, and d2u, where not zero, by pair of names, each once; they broadcast to u."""

    value: Array
    first: Mapping[str, Array] = field(default_factory=dict)
    second: Mapping[tuple[str, str], Array] = field(default_factory=dict)


def power_sum(g: Term, h: Term, s: Array, power: str, names: Sequence[str], with_second: bool) -> Term:
    """The term s log(exp(g/s) + exp(h/s)) of two lines; `power` is the name of s (P, 1) among the coordinates `names`.

    Its Hessian in (g, h, s) is (w1 w2 / s) z z^T with z = (1, -1, -(g - h) / s), w1 and w2 the shares of the lines.
    """
    gap = (g.value - h.value) / s
    either = np.logaddexp(gap, 0.0)
    share, other = np.exp(gap - either), np.exp(-either)
    first = {name: share * g.first.get(name, 0.0) + other * h.first.get(name, 0.0) for name in names}
    first[power] = first[power] + either - share * gap
    value = h.value + s * either
    if not with_second:
        return Term(value, first)
    z = {name: g.first.get(name, 0.0) - h.first.get(name, 0.0) for name in names}
    z[power] = z[power] - gap
    bend = share * other / s
    second = {(p, q): bend * z[p] * z[q] for i, p in enumerate(names) for q in names[i:]}
    for weight, line in ((share, g), (other, h)):
        for pair, derivative in line.second.items():
            second[pair] = second[pair] + weight * derivative
    return Term(value, first, second)


# Coordinates (P, 1) by name, and whether second derivatives are wanted besides the first.
Terms = Callable[[Mapping[str, Array], bool], list[Term]]


class LogSumTerms(LogForm):
    """f = log sum_t exp u_t(theta), each u_t any twice differentiable function of named coordinates.

    `at` gives the parameter that each name reads (names may share one), `fixed` the rest.
    """

    def __init__(
        self, terms: Terms, at: Mapping[str, int], points: int, fixed: Mapping[str, float] | None = None
    ) -> None:
        self.terms, self.at, self.points = terms, dict(at), points
        self.fixed = dict(fixed or {})
        self.parameters = max(self.at.values()) + 1

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        terms, shares, value = self._evaluate(theta, False)
        first = np.zeros((*value.shape, self.parameters))
        for term, share in zip(terms, shares, strict=True):
            for name, derivative in term.first.items():
                if name in self.at:
                    first[:, :, self.at[name]] += share * derivative
        return value, [first, theta]

    def second(self, cache: list[Array], slope: Array) -> Array:
        """d2f = sum_t p_t (du_t du_t^T + d2u_t) - df df^T."""
        first, theta = cache
        terms, shares, _ = self._evaluate(theta, True)
        hessian = np.zeros((len(theta), self.parameters, self.parameters))
        for term, share in zip(terms, shares, strict=True):
            weighted = slope * share
            if len(terms) > 1:  # one alone is f itself
                own = self._first(term, first)
                hessian += (own * weighted[:, :, None]).transpose(0, 2, 1) @ own
            for (p, q), derivative in term.second.items():
                if p in self.at and q in self.at:
                    total = (weighted * derivative).sum(axis=1)
                    hessian[:, self.at[p], self.at[q]] += total
                    if p != q:
                        hessian[:, self.at[q], self.at[p]] += total
        if len(terms) > 1:
            hessian -= (first * slope[:, :, None]).transpose(0, 2, 1) @ first
        return hessian

    def bend(self, cache: list[Array], step: Array) -> Array:
        """step^T d2f step, (P, n)."""
        first, theta = cache
        terms, shares, value = self._evaluate(theta, True)
        bend = np.zeros_like(value)
        for term, share in zip(terms, shares, strict=True):
            if len(terms) > 1:
                bend += share * np.einsum("pni,pi->pn", self._first(term, first), step) ** 2
            for (p, q), derivative in term.second.items():
                if p in self.at and q in self.at:
                    twice = 1.0 if p == q else 2.0
                    product = twice * step[:, self.at[p]] * step[:, self.at[q]]
                    bend += share * derivative * product[:, None]
        return bend - self.along(cache, step) ** 2 if len(terms) > 1 else bend

    def _evaluate(self, theta: Array, second: bool) -> tuple[list[Term], list[Array], Array]:
        values = {name: theta[:, i : i + 1] for name, i in self.at.items()}
        values |= {name: np.full((len(theta), 1), value) for name, value in self.fixed.items()}
        terms = self.terms(values, second)
        top = terms[0].value
        for term in terms[1:]:
            top = np.maximum(top, term.value)
        shares = [np.exp(term.value - top) for term in terms]
        total = np.sum(shares, axis=0)
        return terms, [share / total for share in shares], top + np.log(total)

    def _first(self, term: Term, like: Array) -> Array:
        """A term's du (P, n, k)."""
        own = np.zeros_like(like)
        for name, derivative in term.first.items():
            if name in self.at:
                own[:, :, self.at[name]] += derivative
        return own


class FunctionForm(LogForm):
    """Any law as a function: theta (P, k) to f (P, n), df (P, n, k) and d2f (P, n, k, k)."""

    def __init__(self, function: Callable[[Array], tuple[Array, Array, Array]], parameters: int, points: int) -> None:
        self.function, self.parameters, self.points = function, parameters, points

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        value, first, second = (np.array(part) for part in self.function(theta))
        return value, [first, theta, second]

    def second(self, cache: list[Array], slope: Array) -> Array:
        return np.einsum("pn,pnij->pij", slope, cache[2])

    def bend(self, cache: list[Array], step: Array) -> Array:
        return np.einsum("pnij,pi,pj->pn", cache[2], step, step)


class ComplexStepForm(LogForm):
    """Any analytic law as a function alone: complex theta (P, k) to log predictions (P, n).

    The gradient is Im f(theta + i h e) / h with h = 1e-30: exact to rounding. The Hessian is a central difference of
    it, good to about nine digits; it steers steps, and convergence is judged on the gradient.
    """

    def __init__(self, function: Callable[[Any], Any], parameters: int, points: int) -> None:
        self.function, self.parameters, self.points = function, parameters, points

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        P, k = theta.shape
        shifted = theta[:, None, :] + 1j * COMPLEX_STEP * np.eye(k)
        f = self._evaluate(shifted.reshape(P * k, k)).reshape(P, k, self.points)
        first = np.ascontiguousarray(f.imag.transpose(0, 2, 1)) / COMPLEX_STEP
        return f[:, 0].real.copy(), [first, theta]

    def second(self, cache: list[Array], slope: Array) -> Array:
        theta = cache[1]
        hessian = np.empty((*theta.shape, self.parameters))
        for j, unit in enumerate(np.eye(self.parameters)):
            h = DIFFERENCE * (1.0 + np.abs(theta[:, j : j + 1]))
            ahead, behind = (self.gradient(self.value(theta + sign * h * unit)[1], slope) for sign in (1.0, -1.0))
            hessian[:, :, j] = (ahead - behind) / (2.0 * h)
        return 0.5 * (hessian + hessian.transpose(0, 2, 1))

    def _evaluate(self, theta: Any) -> Any:
        f = np.asarray(self.function(theta))
        if f.shape != (len(theta), self.points):
            raise InputError(
                f"the law's function gave shape {f.shape} for {len(theta)} rows of parameters; "
                f"({len(theta)}, {self.points}) is expected, a row of log predictions each."
            )
        return f

    def check(self, starts: Array) -> None:
        """Raises InputError where at `starts` (G, k) complex step and difference disagree, or nothing is finite."""
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns of a cast that drops the imaginary part; we refuse it
            try:
                f, (first, _) = self.value(starts)
                if not np.iscomplexobj(self._evaluate(starts + 0j)):
                    raise InputError(
                        "the law's function gives real numbers for complex parameters; it must be analytic."
                    )
                differences = [self._difference(starts, j) for j in range(self.parameters)]
            except InputError:
                raise
            except Exception as failure:  # it is the user's function, and may raise anything
                raise InputError(
                    f"the law's function fails on complex parameters ({type(failure).__name__}: {failure}); "
                    "it must be analytic, of NumPy's own functions."
                ) from None
        finite = np.isfinite(f).all(axis=1)
        if not finite.any():
            raise InputError("the law's function gives no finite prediction at any start; give starts where it does.")
        for j, difference in enumerate(differences):
            error = np.abs(first[finite, :, j] - difference[finite]).max()
            size = np.abs(difference[finite]).max() + 1e-3 * (1.0 + np.abs(f[finite]).max())
            if not error <= ANALYTIC * size:
                raise InputError(
                    f"the law's function is not analytic in parameter {j}: its complex step and a difference differ by "
                    f"{error:.2g}; exp, log, powers and products are, abs, real, casts and comparisons are not."
                )

    def _difference(self, theta: Array, j: int) -> Array:
        h = DIFFERENCE * (1.0 + np.abs(theta[:, j : j + 1])) * np.eye(self.parameters)[j]
        width = 2.0 * h[:, j : j + 1]
        return (self._evaluate(theta + h + 0j).real - self._evaluate(theta - h + 0j).real) / width
