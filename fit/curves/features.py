"""Features of schedules for laws of curves: the sum of rates, and its drops in a few hundred segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.sparse import block_diag, csr_matrix

from ..errors import Array

SEGMENTS = 60  # of equal total variation; knots and jumps split them further
JUMPS = 8  # sudden drops that get more knots after them
KNOTS = 60  # steps of a curve at which the sum over drops is computed; linear between them


@dataclass
class Design:
    """Rows of all curves in sequence, and pairs (knot, segment before it) for the sum over drops.

    area (rows,) is the sum of rates over `horizon`, size (rows,) is N over its reference. For each pair: its knot, the
    drop of the rate, the sum of rates and the steps since the drop, and the log rate after it.
    """

    area: Array
    size: Array
    between: csr_matrix  # (rows, knots): linear interpolation in step
    knot: np.ndarray
    drop: Array
    since: Array
    steps: Array
    log_rate: Array
    rows: list[slice] = field(default_factory=list)


def features(lr: Array, steps: np.ndarray, rises: bool, fine: bool, stride: float) -> tuple[Any, ...]:
    """Return area, `between` and the five columns of pairs of a `Design` for one curve.

    With `rises`, warm-up counts as a negative drop; `fine` takes more segments; `stride` is the steps per entry of lr.
    """
    segments = SEGMENTS * (6 if fine else 1)
    total = np.concatenate([[0.0], np.cumsum(lr) * stride])  # before step 1, after it, …
    drops = -np.diff(lr, prepend=0.0 if rises else lr[0])
    if not rises:
        drops[: int(np.argmax(lr >= lr.max() * (1 - 1e-9))) + 1] = 0.0
    drops = drops[: steps[-1]]
    varied = np.concatenate([[0.0], np.cumsum(np.abs(drops))])
    knots = steps[np.unique(np.linspace(0, len(steps) - 1, min(len(steps), KNOTS)).astype(int))]
    if fine:
        knots = np.union1d(knots, steps[np.geomspace(1, len(steps), KNOTS).astype(int) - 1])
    edges = _edges(varied, drops, segments, knots)
    jumps = np.flatnonzero(np.abs(drops) > varied[-1] / segments)
    around = edges if fine else np.intersect1d(edges, np.add.outer((0, 1), jumps))
    if fine and len(jumps):  # the loss after a jump curves at all scales
        largest = jumps[np.argsort(-np.abs(drops[jumps]), kind="stable")[:JUMPS]]
        after = np.add.outer(np.geomspace(1, steps[-1], KNOTS).astype(int), largest).ravel()
        around = np.union1d(around, after[after <= steps[-1]])
    knots = np.union1d(knots, around[around >= steps[0]])
    weights = _between(steps, knots)
    if not varied[-1] > 0:
        return total[steps], weights, *(np.zeros(0) for _ in range(5))
    starts = edges[:-1]
    size = np.abs(drops)
    mass = np.maximum(np.add.reduceat(size, starts), 1e-300)
    at_area = np.add.reduceat(size * total[: len(drops)], starts) / mass
    at_step = np.add.reduceat(size * np.arange(len(drops)), starts) / mass * stride
    rate = np.add.reduceat(size * lr[: len(drops)], starts) / mass
    drop = np.add.reduceat(drops, starts)
    significant = np.flatnonzero(np.abs(drop) > 1e-9 * varied[-1])
    knot, segment = np.nonzero(edges[1:][significant][None, :] <= knots[:, None])
    chosen = significant[segment]
    floor = 1e-6 * lr.max()
    return (
        total[steps],
        weights,
        knot,
        drop[chosen],
        np.maximum(total[knots][knot] - at_area[chosen], 0.0),
        knots[knot] * stride - at_step[chosen],
        np.log(np.maximum(rate[chosen], floor)),
    )


def design(
    curves: Sequence[tuple[Array, np.ndarray, float]],
    horizon: float,
    rises: bool = False,
    fine: bool = False,
    stride: float = 1.0,
) -> Design:
    """Return the `Design` of curves (lr in the law's unit, steps, size), with sums of rates in units of `horizon`."""
    parts = [features(lr, steps, rises, fine, stride) for lr, steps, _ in curves]
    starts = np.cumsum([0, *(part[1].shape[1] for part in parts)])
    ends = np.cumsum([0, *(len(part[0]) for part in parts)])
    joined = [np.concatenate([part[i] for part in parts]) for i in range(3, 7)]
    return Design(
        np.concatenate([part[0] for part in parts]) / horizon,
        np.concatenate([np.full(len(part[0]), size) for part, (_, _, size) in zip(parts, curves, strict=True)]),
        block_diag([part[1] for part in parts], format="csr"),
        np.concatenate([part[2] + start for part, start in zip(parts, starts, strict=False)]).astype(int),
        joined[0],
        joined[1] / horizon,
        joined[2],
        joined[3],
        [slice(a, b) for a, b in pairwise(ends)],
    )


def _edges(varied: Array, drops: Array, segments: int, knots: np.ndarray) -> np.ndarray:
    """Return the steps that bound segments of equal change of the rate; `varied` sums |drops| before each step."""
    last = int(knots[-1])
    if last <= 4 * segments or not varied[-1] > 0:
        return np.arange(last + 1) if varied[-1] > 0 else knots
    turns = np.searchsorted(varied, np.linspace(0, varied[-1], segments + 1)[1:], side="left")
    jumps = np.flatnonzero(np.abs(drops) > varied[-1] / segments)
    edges = np.unique(np.concatenate([knots, turns, jumps, jumps + 1, [0, np.argmax(drops != 0), last]]))
    return edges[(edges >= 0) & (edges <= last)]


def _between(steps: np.ndarray, knots: np.ndarray) -> csr_matrix:
    right = np.clip(np.searchsorted(knots, steps), 1, max(len(knots) - 1, 1)) if len(knots) > 1 else steps * 0
    left = np.maximum(right - 1, 0)
    width = np.maximum(knots[right] - knots[left], 1)
    share = (steps - knots[left]) / width
    row = np.arange(len(steps))
    values = (np.concatenate([1 - share, share]), (np.tile(row, 2), np.concatenate([left, right])))
    return csr_matrix(values, shape=(len(steps), len(knots)))
