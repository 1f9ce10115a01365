"""Laws as the solver sees them: log loss as a function of the parameters, with exact gradient and Hessian.

Special here: a form never builds a Jacobian of shape (problems, points, parameters). It is handed the slope and
curvature of the objective at each point and returns their sums, which for every sum of power laws are products of
(problems, points) arrays with constant tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .errors import Array

RESIDUAL_ROUNDING = 1e-13  # below this a residual in log loss is rounding, and a perfect fit counts as converged


@dataclass(frozen=True)
class Sums:
    """What one evaluation of a form's derivatives gives; see `LogForm`."""

    gradient: Array
    hessian: Array
    absolute: Array
    reach: Array
    diagonal: Array

    def take(self, rows: np.ndarray) -> Sums:
        return Sums(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def tolerance(self, relative: float) -> Array:
        """The size below which each gradient entry is zero: a share of the terms that cancel in it, plus their
        rounding.
        """
        return relative * self.absolute + RESIDUAL_ROUNDING * self.reach


class LogForm(Protocol):
    """A law as the solver sees it: k parameters, n points, log loss out.

    `value(theta)` takes (P, k) and returns f of shape (P, n) and whatever `sums` wants to reuse.
    `sums(cache, slope, curvature, spread)` takes three (P, n) arrays and returns
      gradient (P, k)    sum_i slope_i df_i
      hessian  (P, k, k) sum_i curvature_i df_i df_i^T + slope_i d2f_i
      absolute (P, k)    sum_i |slope_i| |df_i|, the scale against which a gradient is small
      reach    (P, k)    sum_i spread_i |df_i|
      diagonal (P, k)    sum_i spread_i df_i^2, the scale of the damping
    """

    parameters: int
    points: int

    def value(self, theta: Array) -> tuple[Array, Any]: ...

    def sums(self, cache: Any, slope: Array, curvature: Array, spread: Array) -> Sums: ...


class LogSumExp:
    """f = log sum_t exp(Z_t theta[index_t] + offset_t): every sum of power laws, with free, shared or fixed parameters.

    `terms` is a sequence of (index, Z) or (index, Z, offset): `index` lists the parameters that the term reads, Z has
    shape (n, len(index)), offset (n,). A term without parameters has an empty index and a Z of shape (n, 0).
    """

    def __init__(self, parameters: int, terms: Sequence[tuple[Any, ...]]) -> None:
        self.parameters = parameters
        self.points = len(terms[0][1])
        self.index = [np.asarray(term[0], dtype=int) for term in terms]
        self.tables = [np.asarray(term[1], dtype=np.float64) for term in terms]
        self.offsets = [term[2] if len(term) > 2 else None for term in terms]
        self._absolute = [np.abs(Z) for Z in self.tables]
        self._square = [Z**2 for Z in self.tables]
        self._products = {
            (s, t): np.ascontiguousarray((Zs[:, :, None] * Zt[:, None, :]).reshape(self.points, -1))
            for s, Zs in enumerate(self.tables)
            for t, Zt in enumerate(self.tables)
            if s <= t
        }

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        exponents = []
        for index, Z, offset in zip(self.index, self.tables, self.offsets, strict=True):
            u = theta[:, index] @ Z.T
            exponents.append(u if offset is None else u + offset)
        top = exponents[0]
        for u in exponents[1:]:
            top = np.maximum(top, u)
        shares = [np.exp(u - top) for u in exponents]
        total = shares[0].copy()
        for share in shares[1:]:
            total += share
        for share in shares:
            share /= total
        return top + np.log(total), shares

    def sums(self, cache: list[Array], slope: Array, curvature: Array, spread: Array) -> Sums:
        problems, k = len(slope), self.parameters
        gradient, absolute, reach, diagonal = (np.zeros((problems, k)) for _ in range(4))
        hessian = np.zeros((problems, k, k))
        # d2f = sum_t p_t Z_t Z_t^T - df df^T, so the rank-one part carries curvature - slope.
        outer = curvature - slope
        size = np.abs(slope)
        for s, (i, share) in enumerate(zip(self.index, cache, strict=True)):
            weighted = slope * share
            gradient[:, i] += weighted @ self.tables[s]
            absolute[:, i] += (size * share) @ self._absolute[s]
            spread_share = spread * share
            reach[:, i] += spread_share @ self._absolute[s]
            diagonal[:, i] += (spread_share * share) @ self._square[s]
            outer_share = outer * share
            for t in range(s, len(self.index)):
                j = self.index[t]
                coefficient = outer_share * cache[t]
                if s == t:
                    coefficient += weighted
                block = (coefficient @ self._products[s, t]).reshape(problems, len(i), len(j))
                hessian[:, i[:, None], j] += block
                if s != t:
                    hessian[:, j[:, None], i] += block.transpose(0, 2, 1)
        return Sums(gradient, hessian, absolute, reach, diagonal)


class FunctionForm:
    """Any law as a function: theta (P, k) to f (P, n), df (P, n, k) and d2f (P, n, k, k)."""

    def __init__(self, function: Callable[[Array], tuple[Array, Array, Array]], parameters: int, points: int) -> None:
        self.function, self.parameters, self.points = function, parameters, points

    def value(self, theta: Array) -> tuple[Array, tuple[Array, Array]]:
        value, first, second = self.function(theta)
        return value, (first, second)

    def sums(self, cache: tuple[Array, Array], slope: Array, curvature: Array, spread: Array) -> Sums:
        first, second = cache
        size = np.abs(first)
        hessian = np.einsum("pn,pni,pnj->pij", curvature, first, first) + np.einsum("pn,pnij->pij", slope, second)
        return Sums(
            gradient=np.einsum("pn,pni->pi", slope, first),
            hessian=hessian,
            absolute=np.einsum("pn,pni->pi", np.abs(slope), size),
            reach=np.einsum("pn,pni->pi", spread, size),
            diagonal=np.einsum("pn,pni->pi", spread, size**2),
        )
