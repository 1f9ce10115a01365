"""Log loss around a moving optimum, as the solver sees it: a polynomial in the distance from a law's best settings.

Special here:
- The settings (log learning rate, log batch) are measured from where the law puts the optimum of their cell, and the
  polynomial has no constant and no linear part, so its origin is the optimum. All cells share its coefficients.
- What is left free in each cell is its best loss. It is linear, so it is projected out: target and form are both
  centred within cells, and no parameter stands for it.
- Arrays are (problems, parameters, runs) inside: elementwise work then runs along the longest axis.
"""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np

from ..errors import Array
from .forms import DenseForm

Exponents = tuple[int, ...]


def exponents(axes: int, order: int) -> tuple[Exponents, ...]:
    """The powers of each setting in the monomials of degree 2 to `order`, as in (2, 0), (1, 1), (0, 2), (3, 0), ..."""
    every = [e for e in product(range(order, -1, -1), repeat=axes) if 2 <= sum(e) <= order]
    return tuple(sorted(every, key=lambda e: (sum(e), [-power for power in e])))


class Powers:
    """Monomials of distances, and their derivatives, from one set of products. distances: arrays of one shape."""

    def __init__(self, distances: list[Array], powers: tuple[Exponents, ...]) -> None:
        self.powers = powers
        self.table = [[np.ones_like(d), d] for d in distances]
        for column in self.table:
            for _ in range(2, max(map(sum, powers)) + 1):
                column.append(column[-1] * column[1])

    def each(self, lower: tuple[int, ...] = ()) -> Array:
        """Every monomial, once differentiated by each axis in `lower`: distances (P, n) give (P, q, n)."""
        return np.stack([factor * term for factor, term in self._terms(lower)], axis=-2)

    def total(self, coefficients: Array, lower: tuple[int, ...] = ()) -> Array:
        """Their sum with coefficients (P, q), for distances (P, n): (P, n)."""
        terms = zip(coefficients.T, self._terms(lower), strict=True)
        return np.asarray(sum((factor * c)[:, None] * term for c, (factor, term) in terms if factor))

    def _terms(self, lower: tuple[int, ...]) -> list[tuple[float, Array]]:
        found = []
        for powers in self.powers:
            left, factor = list(powers), 1.0
            for axis in lower:
                factor *= left[axis]
                left[axis] = max(left[axis] - 1, 0)
            term = self.table[0][left[0]]
            for column, power in zip(self.table[1:], left[1:], strict=True):
                term = term * column[power] if power else term
            found.append((factor, term))
        return found


class SurfaceForm(DenseForm):
    """f = q(z - W x), centred within cells; a `LogForm`.

    settings (a, n): the logarithms z of what was set, one axis each. designs: for each axis the x of its law, (n, m),
    constant within a cell. cell (n,): 0, 1, ...; share (n,): each run's weight over its cell's. theta holds the W of
    each axis, then the coefficients of q in the order of `powers`.
    """

    def __init__(
        self, settings: Array, designs: list[Array], cell: np.ndarray, share: Array, powers: tuple[Exponents, ...]
    ) -> None:
        self.settings, self.powers, self.share = settings, powers, share
        self.designs = [np.ascontiguousarray(design.T) for design in designs]
        self.member = (np.arange(cell.max() + 1)[:, None] == cell).astype(np.float64)  # (cells, n)
        self.average = np.ascontiguousarray((self.member * share).T)  # (n, cells)
        ends = np.cumsum([0] + [len(design) for design in self.designs])
        self.parts = [slice(a, b) for a, b in pairwise(ends.tolist())]
        self.shape = slice(int(ends[-1]), int(ends[-1]) + len(powers))
        self.parameters, self.points = self.shape.stop, len(cell)

    def distances(self, theta: Array) -> list[Array]:
        """How far each run's settings lie from the optimum of its cell: one (P, n) an axis."""
        return [z - theta[:, part] @ x for z, part, x in zip(self.settings, self.parts, self.designs, strict=True)]

    def centred(self, values: Array) -> Array:
        """Values (..., n) less their weighted mean in each cell."""
        return np.asarray(values - (values @ self.average) @ self.member)

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        """The cache is df (P, n, k) and theta."""
        monomials, coefficients = Powers(self.distances(theta), self.powers), theta[:, self.shape]
        moves = [-monomials.total(coefficients, (a,))[:, None, :] * x for a, x in enumerate(self.designs)]
        first = self.centred(np.concatenate([*moves, monomials.each()], axis=1))
        value = (coefficients[:, None, :] @ first[:, self.shape])[:, 0]  # q is linear in its coefficients
        return value, [first.swapaxes(1, 2), theta]

    def second(self, cache: list[Array], slope: Array) -> Array:
        """sum_i slope_i d2f_i. Centring is its own adjoint up to the shares, so the slope is centred and not d2f."""
        theta = cache[1]
        monomials, coefficients = Powers(self.distances(theta), self.powers), theta[:, self.shape]
        slope = slope - self.share * ((slope @ self.member.T) @ self.member)
        hessian = np.zeros((len(theta), self.parameters, self.parameters))
        for a, (part, x) in enumerate(zip(self.parts, self.designs, strict=True)):
            cross = -(slope[:, None, :] * x) @ monomials.each((a,)).swapaxes(1, 2)
            hessian[:, part, self.shape] = cross
            hessian[:, self.shape, part] = cross.swapaxes(1, 2)
            for b, (other, y) in enumerate(zip(self.parts, self.designs, strict=True)):
                hessian[:, part, other] = ((slope * monomials.total(coefficients, (a, b)))[:, None, :] * x) @ y.T
        return hessian

    def bend(self, cache: list[Array], step: Array) -> Array:
        theta = cache[1]
        monomials, coefficients = Powers(self.distances(theta), self.powers), theta[:, self.shape]
        moves = [-step[:, part] @ x for part, x in zip(self.parts, self.designs, strict=True)]
        bend = np.zeros_like(moves[0])
        for a, move in enumerate(moves):
            bend += 2.0 * move * monomials.total(step[:, self.shape], (a,))
            for b, other in enumerate(moves):
                bend += move * other * monomials.total(coefficients, (a, b))
        return self.centred(bend)
