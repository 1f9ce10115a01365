"""Log forms whose terms are not power laws: f = log sum_t exp u_t(theta), each u_t any twice differentiable function.

Special here: a law writes its terms by the *names* of its coordinates, with first and second derivatives, and says
which names are free, which are held at a number and which share one parameter; the chain rule is written once, here.
Only second derivatives that are not zero are written down, and they are computed only where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..errors import Array
from .forms import DenseForm


@dataclass(frozen=True)
class Term:
    """One u (P, n), du by coordinate name, and d2u by pair of names, each pair once; arrays that broadcast to u."""

    value: Array
    first: Mapping[str, Array] = field(default_factory=dict)
    second: Mapping[tuple[str, str], Array] = field(default_factory=dict)


# Coordinates (P, 1) by name, and whether second derivatives are wanted besides the first.
Terms = Callable[[Mapping[str, Array], bool], list[Term]]


class LogSumTerms(DenseForm):
    """f = log sum_t exp u_t: `at` gives the parameter that each name reads (names may share one), `fixed` the rest."""

    def __init__(
        self, terms: Terms, at: Mapping[str, int], points: int, fixed: Mapping[str, float] | None = None
    ) -> None:
        self.terms, self.at, self.points = terms, dict(at), points
        self.fixed = dict(fixed or {})
        self.parameters = max(self.at.values()) + 1

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        """The cache is df (P, n, k) and theta."""
        terms, shares, value = self._evaluate(theta, False)
        first = np.zeros((*value.shape, self.parameters))
        for term, share in zip(terms, shares, strict=True):
            for name, derivative in term.first.items():
                if name in self.at:
                    first[:, :, self.at[name]] += share * derivative
        return value, [first, theta]

    def second(self, cache: list[Array], slope: Array) -> Array:
        """sum_i slope_i d2f_i, with d2f = sum_t p_t (du_t du_t^T + d2u_t) - df df^T."""
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
        """The terms, the share of each in the sum, and f."""
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
