"""What the fits would refuse or warn of for want of points: the same checks, of a plan, before any loss is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..approaches.isoflop import METHODS
from ..errors import InputError, enough, floats, identifiable
from ..table import RunTable
from .doctor import FEW_SIZES, MANY_EPOCHS, Warning, few_runs, few_sizes, narrow_span, repeated

__all__ = ["FEW_SIZES", "LEAST_SIZES", "MANY_EPOCHS", "examine_plan"]
LEAST_SIZES = METHODS["parabola"][1]  # without which a budget has no profile at all
CONSTANTS = 5  # of the parametric law


def examine_plan(
    N: ArrayLike, D: ArrayLike, flops: ArrayLike, budget: ArrayLike, epochs: ArrayLike
) -> tuple[Warning, ...]:
    """Of planned runs (n,); `budget` and `epochs` are NaN where there is none, or it is not known."""
    n, unknown = len(floats(N)), np.full(len(floats(N)), np.nan)
    names, rows = np.arange(n).astype(str), np.arange(n)
    table = RunTable(
        *(floats(N), floats(D), unknown, unknown, floats(flops), floats(budget), names, names, np.ones(n)),
        frame=None,  # type: ignore[arg-type]  # these checks read the columns above alone
        rows=rows,
        notes=(),
        source="the plan",
    )
    found = [warning for check in (few_runs, few_sizes, narrow_span) for warning in check(table)]
    try:
        enough(np.unique(np.stack([table.N, table.D]), axis=1).shape[1], CONSTANTS, "the parametric law")
        identifiable(table.N, table.D)
    except InputError as error:
        found.insert(0, Warning("no_parametric", f"Approach 3 has no answer: {error}"))
    return (*found, *repeated(floats(epochs)))
