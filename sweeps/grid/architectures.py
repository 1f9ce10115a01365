"""Choose width, depth and heads of a model with a target N. Pure.

The ideal depth is 0.5 sqrt(width), close to published families. Widths are multiples of the head size, a power of two;
below width 32 there is one head, and widths go in steps of 4, because embedding tables are most of N there.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from functools import cache
from operator import itemgetter

from ...train.config import ModelConfig
from ...train.errors import UserError
from ...train.flops import count_parameters
from ...train.planner.validation import check_kv_heads

SHAPE_WEIGHT = 0.8  # weight of a depth off the rule relative to a size off the target, both as logarithms

_Candidate = tuple[int, float, ModelConfig]  # see `well_shaped`


def head_dim(width: int) -> int:
    """Return the head size for a model width: the width itself below 32, then 16 to 128."""
    if width < 32:
        return width
    for limit, size in ((128, 16), (256, 32), (1024, 64)):
        if width <= limit:
            return size
    return 128


@cache
def widths(largest: int = 16384) -> tuple[int, ...]:
    """Return all widths up to `largest` that are multiples of their head size."""
    result = list(range(8, 32, 4))
    width = 32
    while width <= largest:
        result.append(width)
        width += head_dim(width + 1)
    return tuple(result)


def shaped(base: ModelConfig, width: int, depth: int) -> ModelConfig:
    """Return the base model at a width and depth, with the same ratio of query to key/value heads."""
    check_kv_heads(base)
    heads = width // head_dim(width)
    groups = base.heads // base.num_kv_heads
    kv_heads = None if groups == 1 else max(1, heads // groups)
    if kv_heads is not None and heads % kv_heads:
        kv_heads = next(k for k in range(kv_heads, 0, -1) if heads % k == 0)
    return dataclasses.replace(
        base, width=width, depth=depth, heads=heads, kv_heads=kv_heads, hidden=None, expert_hidden=None
    )


def of_depth(base: ModelConfig) -> ModelConfig:
    """Return the base model at its depth, with the width closest to 4 depth^2 and heads to match."""
    ideal = 4 * base.depth**2
    return shaped(base, min(widths(ideal + 256), key=lambda width: abs(width - ideal)), base.depth)


@cache
def _candidates(frozen_base: tuple[tuple[str, object], ...]) -> tuple[_Candidate, ...]:
    base = ModelConfig(**dict(frozen_base))  # type: ignore[arg-type]
    result = list[_Candidate]()
    for width in widths():
        ideal = 0.5 * math.sqrt(width)
        shallowest = max(1, math.floor(ideal / 2))
        models = [shaped(base, width, depth) for depth in range(shallowest, math.ceil(2 * ideal) + 1)]
        # Without experts all blocks are equal, so that counting two depths is enough, and much faster.
        counted = models if base.experts else models[:2]
        sizes = [count_parameters(model).N_active for model in counted]
        sizes += [sizes[0] + extra * (sizes[1] - sizes[0]) for extra in range(len(sizes), len(models))]
        offs = [abs(math.log(model.depth / ideal)) for model in models]
        result += zip(sizes, offs, models, strict=True)
    return tuple(sorted(result, key=lambda item: item[:2]))


def well_shaped(base: ModelConfig) -> tuple[_Candidate, ...]:
    """Return (N_active, |log(depth / ideal depth)|, config) of all models near the ideal depth, by size."""
    if isinstance(base.size, list):  # an external trainer's
        return tuple((round(row["N"]), 0.0, dataclasses.replace(base, size=row)) for row in base.size)
    return _candidates(tuple(dataclasses.asdict(base).items()))


def nearest_model(base: ModelConfig, target: float, above: int = 0) -> ModelConfig:
    """Return the model nearest to `target` active parameters and the ideal depth, among models of more than `above`."""
    pool = well_shaped(base)
    largest = pool[-1][0]
    if target > 2 * largest or above >= largest:
        raise UserError(
            f"the grid asks for a model of {max(target, above):.3g} parameters, and the largest that can be laid out "
            f"has {largest:.3g}; give smaller grid.sizes, grid.budgets, grid.span or grid.expected_N"
        )
    pool = pool[bisect.bisect_right(pool, above, key=itemgetter(0)) :]

    def distance(item: _Candidate) -> float:
        return abs(math.log(item[0] / target)) + SHAPE_WEIGHT * item[1]

    # A model whose size alone is farther off than the total distance of `near` cannot be nearer.
    near = pool[min(bisect.bisect_left(pool, target, key=itemgetter(0)), len(pool) - 1)]
    reach = math.exp(distance(near)) * (1 + 1e-9)
    first = bisect.bisect_left(pool, target / reach, key=itemgetter(0))
    return min(pool[first : bisect.bisect_right(pool, target * reach, key=itemgetter(0))], key=distance)[2]
