"""Training FLOPs per token by model size, estimated from runs.

Attention over a fixed context grows as N^(2/3), vocabulary tables as N^(1/3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .errors import Array, positive, same_length

CONVENTIONS = ("table", "6nd")

SAME = 1e-3  # relative difference up to which two counts of FLOPs are the same convention


@dataclass(frozen=True)
class FlopsPerToken:
    """Training FLOPs per token: linear N + attention N^(2/3) + tables N^(1/3), proportional to N below `smallest`."""

    linear: float = 6.0
    attention: float = 0.0
    tables: float = 0.0
    smallest: float = 1.0

    def __call__(self, N: Array) -> Array:
        x = np.cbrt(1.0 / np.maximum(N, self.smallest))
        return N * (self.linear + self.attention * x + self.tables * x**2)

    @classmethod
    def measured(cls, N: ArrayLike, D: ArrayLike, flops: ArrayLike) -> FlopsPerToken:
        """Fit `attention` and `tables` (`linear`: 6) to n runs by relative least squares; if closer, `linear` alone."""
        N, D, flops = positive("N", N), positive("D", D), positive("flops", flops)
        same_length(N=N, D=D, flops=flops)
        x, ratio, smallest = np.cbrt(1.0 / N), flops / (N * D), float(N.min())
        basis = np.stack([x, x**2], 1) / ratio[:, None]
        scale = np.linalg.norm(basis, axis=0)
        attention, tables = np.linalg.lstsq(basis / scale, 1.0 - 6.0 / ratio, rcond=1e-6)[0] / scale
        fitted = cls(6.0, float(attention), float(tables), smallest)
        proportional = cls(float(np.exp(np.log(ratio).mean())), smallest=smallest)
        return min(fitted, proportional, key=lambda count: float(np.abs(count(N) * D / flops - 1.0).max()))


def convention_name(spend: float | Callable[[Array], Array] | None) -> str:
    """Return "table" if `spend` (FLOPs per token) is a function, "8nd" if it is 8 (times N), and "6nd" if None."""
    return "table" if callable(spend) else f"{spend or 6.0:g}nd"


def in_words(convention: str) -> str:
    return {"table": "as the table counts"}.get(convention, convention.upper())


def flops_per_token(N: Array, D: Array, flops: ArrayLike) -> FlopsPerToken | None:
    """Fit FLOPs per token to n runs; return None if `flops` are 6ND."""
    flops = positive("flops", flops)
    same_length(N=N, D=D, flops=flops)
    same = np.all(np.abs(flops / (6.0 * N * D) - 1.0) < SAME)
    return None if same else FlopsPerToken.measured(N, D, flops)
