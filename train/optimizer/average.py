"""Averages of the weights over the last steps. No torch.

The loss of an average at a constant rate is close to that of a run that cools down there (Haegele et al. 2024). The
averaged range grows with the run and does not depend on its end, so runs that share a trunk share averages.
"""

from __future__ import annotations

import math

from ..config import AverageConfig


def copies(average: AverageConfig) -> int:
    """Return the number of averaged copies of the weights: per kept span one for `ema`, two for `window`."""
    return len(average.kept) * (2 if average.kind == "window" else 1)


def newest_shares(average: AverageConfig, step: int) -> list[float]:
    """Return the newest weights' share in each averaged copy at `step` (from 1); the rest is the old average's.

    ema: the weights' mean age is that of a window over the last `span`, a share, of the steps so far (Karras et al.
    2024, arXiv 2312.02696, section 3.1). window: a plain mean; a span's two copies restart in turn.
    """
    if average.kind == "ema":
        return [min(1.0, (2 / span - 1) / step) for span in average.kept]
    return [1 / (step - begin + 1) for span in average.kept for begin in _begins(span, step)]


def whole_copies(average: AverageConfig, step: int) -> dict[float, int]:
    """Return, by span, the index of the copy to use as average after `step`: of a window's two, the one begun first."""
    if average.kind == "ema":
        return {span: copy for copy, span in enumerate(average.kept)}
    begins = {span: _begins(span, step) for span in average.kept}
    return {span: 2 * i + int(two[1] < two[0]) for i, (span, two) in enumerate(begins.items())}


def averaged_name(average: AverageConfig, span: float) -> str:
    return f"val_loss_{average.kind}_{span:g}"


def _begins(span: float, step: int) -> tuple[int, int]:
    """Return the step from which each of a span's two copies averages, as of `step`; they restart in turn."""
    begins, block, first = [1, 1], 0, 1
    while (after := max(first + 1, math.ceil(first * (1 + span)))) <= step:
        block, first = block + 1, after
        begins[block % 2] = first
    return begins[0], begins[1]
