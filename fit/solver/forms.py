"""Laws as the solver sees them: log loss as a function of the parameters, with derivatives."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import Array, floats
from .jets import Jet


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
    """f = log sum_t exp z_t, z_t = Z_t theta[index_t] + offset_t: power laws, with free, shared or fixed parameters.

    `terms` are (index, Z) or (index, Z, offset): numbers of the term's parameters, (n, len(index)), (n,). With p_t the
    share of term t, df = sum_t p_t dz_t and d2f = sum_t p_t dz_t dz_t^T - df df^T. The cache begins with the derivative
    of f by each z_t, (P, n). Subclasses are other functions of the z_t.
    """

    with_square = True  # whether `bends` holds d2f + df df^T, or d2f

    def __init__(self, parameters: int, terms: Sequence[tuple[Any, ...]]) -> None:
        self.parameters, self.points = parameters, len(terms[0][1])
        self.index = [np.asarray(term[0], dtype=int) for term in terms]
        self.tables = [floats(term[1]) for term in terms]
        self._offsets = [floats(term[2]) if len(term) == 3 else None for term in terms]
        # Later terms that change equally at every point, such as E, are one number per problem until they are added up.
        rows = [Z[:1] if t and (Z[0] == Z).all() else Z for t, Z in enumerate(self.tables)]
        self._rows = [np.ascontiguousarray(Z.T) for Z in rows]
        self._first = [Z @ np.eye(parameters)[index] for Z, index in zip(self.tables, self.index, strict=True)]
        self._second = []
        for (s, Z), (t, Y) in itertools.combinations_with_replacement(enumerate(self._first), 2):
            products = Z[:, :, None] * Y[:, None, :]
            table = (products + (s != t) * products.swapaxes(1, 2)).reshape(self.points, -1)
            entries = np.flatnonzero(table.any(axis=0))  # of the Hessian, to which the pair contributes
            self._second.append((s, t, entries, np.ascontiguousarray(table[:, entries])))

    def _change(self, step: Array) -> list[Array]:
        """Return the change of each z by `step`: (P, n), or (P, 1) if it is equal at all points."""
        return [step[:, index] @ rows for index, rows in zip(self.index, self._rows, strict=True)]

    def _terms(self, theta: Array) -> list[Array]:
        return [z if o is None else z + o for z, o in zip(self._change(theta), self._offsets, strict=True)]

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        return log_sum(self._terms(theta))

    def bends(self, cache: list[Array]) -> dict[tuple[int, int], Array]:
        """Return second derivatives by pairs of z_s and z_t, s <= t; missing ones are zero."""
        return {(t, t): share for t, share in enumerate(cache)}

    def gradient(self, cache: list[Array], slope: Array) -> Array:
        return _sums(slope, cache, self._first)

    def derivatives(self, cache: list[Array], slope: Array, curvature: Array, second: bool) -> tuple[Array, Array]:
        outer = curvature - slope if second and self.with_square else curvature
        bends, weighted = self.bends(cache) if second else {}, [outer * d for d in cache[: len(self.index)]]
        hessian = np.zeros((len(slope), self.parameters**2))
        for s, t, entries, table in self._second:
            coefficient = weighted[s] * cache[t]
            if (s, t) in bends:
                coefficient += slope * bends[s, t]
            hessian[:, entries] += coefficient @ table
        return self.gradient(cache, slope), hessian.reshape(-1, self.parameters, self.parameters)

    def sizes(self, cache: list[Array], slope: Array, spread: Array) -> tuple[Array, Array]:
        first, tables = ([np.abs(v) for v in values] for values in (cache[: len(self.index)], self._first))
        return _sums(np.abs(slope), first, tables), _sums(spread, first, tables)

    def along(self, cache: list[Array], step: Array) -> Array:
        return np.asarray(sum(change * d for change, d in zip(self._change(step), cache, strict=False)))

    def bend(self, cache: list[Array], step: Array) -> Array:
        change, total = self._change(step), np.zeros_like(cache[0])
        for (s, t), bend in self.bends(cache).items():
            total += (1.0 + (s != t)) * change[s] * change[t] * bend
        return total - self.along(cache, step) ** 2 if self.with_square else total


class PowerSum(LogSumExp):
    """f = log(exp u + sum_t>2 exp z_t) with u = s log(exp(z_0 / s) + exp(z_1 / s)) and s = z_2.

    With g = (z_0 - z_1) / s, q_0 = 1 / (1 + e^-g), q_1 = 1 - q_0 and H the entropy of both, du = q_0 dz_0 + q_1 dz_1
    + H ds and d2u = q_0 q_1 / s r r^T, r = dz_0 - dz_1 - g ds.
    """

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        first, second, s, *others = self._terms(theta)
        gap = (first - second) / s
        share, entropy, log = mix(gap)
        value, (joint, *shares) = log_sum([second + s * log, *others])
        part = joint * share
        curvature = part * (1.0 - share) / s
        return value, [part, joint - part, joint * entropy, *shares, share, entropy, gap, curvature]

    def bends(self, cache: list[Array]) -> dict[tuple[int, int], Array]:
        share, entropy, gap, curvature = cache[-4:]
        size, turn = (share, 1.0 - share, entropy), (1.0, -1.0, -gap)
        bends = {(s, t): cache[s] * size[t] + curvature * turn[s] * turn[t] for s in range(3) for t in range(s, 3)}
        return bends | {(t, t): cache[t] for t in range(3, len(self.index))}


def log_sum(terms: Sequence[Array]) -> tuple[Array, list[Array]]:
    """Return the log of the sum of exp(terms), and each term's share in it; terms broadcast together."""
    top = functools.reduce(np.maximum, terms)
    shares = [np.exp(z - top) for z in terms]
    total = functools.reduce(np.add, shares)
    return top + np.log(total), [share / total for share in shares]


def mix(gap: Array) -> tuple[Array, Array, Array]:
    """Return q = e^g / (1 + e^g), the entropy of q and 1 - q, and log(1 + e^g), for g = `gap`."""
    distance = np.abs(gap)
    odds = np.exp(-distance)
    log, less = np.log(1.0 + odds), odds / (1.0 + odds)
    return np.where(gap > 0, 1.0 - less, less), log + distance * less, log + np.maximum(gap, 0.0)


def _sums(weight: Array, derivatives: Sequence[Array], tables: Sequence[Array]) -> Array:
    return np.asarray(sum((weight * d) @ table for table, d in zip(tables, derivatives, strict=False)))


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
        mean, square = np.zeros((len(theta), self.points)), np.zeros((len(theta), self.points))
        for term, share in zip(*self._evaluate(along)[:2], strict=True):
            moved = term.first.get(0, 0.0)
            mean += share * moved
            square += share * (moved**2 + term.second.get((0, 0), 0.0))
        return square - mean**2

    def _evaluate(self, coordinates: Mapping[str, Jet]) -> tuple[list[Jet], list[Array], Array]:
        """Return the logs of the terms as jets, each term's share of the sum of terms, and the log of that sum."""
        exponents = self.terms({**coordinates, **self.fixed})
        terms = [term if isinstance(term, Jet) else Jet(term, {}, {}) for term in exponents]
        value, shares = log_sum([term.value for term in terms])
        return terms, shares, value
