"""Ways to quantize one matrix W, from the second moments H = X X^T of its inputs X on calibration text.

    rtn     round to nearest: scales span each group's smallest and largest weight
    awq     scale the inputs' channels, and clip the groups' ranges (Lin et al. 2023, arXiv:2306.00978)
    gptq    make up for each column's error in the columns after it (Frantar et al. 2022, arXiv:2210.17323)

All compute in float64. The error of W' on the text is tr((W' - W) H (W' - W)^T).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from .formats import SMALLEST, Quantized, decode, encode, scales_of

POWERS = [i / 20 for i in range(20)]  # of channels, as in AWQ's code
SHRINKS = [1 - i / 20 for i in range(8)]  # of the ends of a group's range, as in AWQ's code, which ends at 0.5
PASSES = 3  # over the groups; errors fall by 5 % in the second, less in the third
DAMPING = 0.01  # share of the mean of H's diagonal that is added to it, as in GPTQ
BLOCK = 128  # columns of GPTQ whose errors reach the other columns in one product


class Moments:
    """Sums over the inputs x of a matrix."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.gram = torch.zeros(columns, columns, dtype=torch.float64, device=device)  # x x^T
        self.magnitude = torch.zeros(columns, dtype=torch.float64, device=device)  # |x|

    def add(self, x: Tensor) -> None:
        """Add inputs (n, columns)."""
        x = x.double()
        self.gram += x.mT @ x
        self.magnitude += x.abs().sum(0)


def rtn(weight: Tensor, format: str, group: int, inputs: Moments | None = None) -> Quantized:
    """Round a matrix (rows, columns), float64, to nearest; the inputs do not matter."""
    groups = weight.unflatten(1, (-1, group))
    scales = scales_of(format, groups)
    return Quantized(format, encode(format, groups, scales.of(..., None)).flatten(1), scales)


def awq(weight: Tensor, format: str, group: int, inputs: Moments) -> Quantized:
    """Round W s with clipped ranges, and divide by s again: channels with larger inputs get smaller errors.

    s is (mean |x|)^a with the a of least error, or 1 if clipping alone has less. The quotients are stored, so that no
    layer before has to absorb s (ibid., section 3.2); packed codes need it.
    """
    gram, relative = inputs.gram, inputs.magnitude / inputs.magnitude.mean().clamp(min=SMALLEST)

    def error(quantized: Quantized) -> float:
        difference = quantized.weight() - weight
        return float((difference @ gram * difference).sum())

    scalings = [relative.clamp(min=1e-4) ** power for power in POWERS]  # 1e-4 as in AWQ's code
    scalings = [(s / (s.max() * s.min()).sqrt()).half().double() for s in scalings]
    best = min(scalings, key=lambda s: error(replace(rtn(weight * s, format, group), channels=s)))
    scaled = replace(_clipped(weight * best, format, group, gram / best / best[:, None]), channels=best)
    return min(_clipped(weight, format, group, gram), scaled, key=error)


def _clipped(weight: Tensor, format: str, group: int, gram: Tensor) -> Quantized:
    """Round with the ends of each group's range shrunk so that the error, with all other groups as they are, is least.

    AWQ searches groups independently; then clipped groups shrink the outputs together. Groups are searched in turn.
    """
    result, difference = rtn(weight, format, group), torch.zeros_like(weight)
    spans = [slice(start, start + group) for start in range(0, weight.shape[1], group)]
    for number, span in [*enumerate(spans)] * PASSES:
        values, difference[:, span] = weight[:, span], 0.0
        others, smallest = 2 * difference @ gram[:, span], torch.full_like(weight[:, 0], math.inf)
        for low, high in itertools.product(SHRINKS, SHRINKS):
            scales = scales_of(format, values, low, high)
            codes = encode(format, values, scales.of(..., None))
            change = decode(format, codes, scales.of(..., None)) - values
            error = ((change @ gram[span, span] + others) * change).sum(1)
            better = error < smallest
            smallest = torch.minimum(error, smallest)
            difference[better, span], result.codes[better, span] = change[better], codes[better]
            for old, new in zip(result.scales, scales, strict=True):
                old[better, number] = new[better]
    return result


def gptq(weight: Tensor, format: str, group: int, inputs: Moments) -> Quantized:
    """Round column by column; the columns that are still to come make up for each error.

    Columns with the largest inputs come first, and scales are those of the original weights, which the authors' code
    calls act-order and static groups. Errors reach the columns of a block at once, the others in one product.
    """
    gram = inputs.gram
    order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    scales = scales_of(format, weight.unflatten(1, (-1, group)))
    damping = DAMPING * gram.diagonal().mean()
    damped = gram[order][:, order] + torch.eye(len(gram), dtype=gram.dtype, device=gram.device) * (damping or 1.0)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    remaining, codes = weight[:, order], torch.empty_like(weight, dtype=torch.uint8)
    for start in range(0, len(order), BLOCK):
        columns, factor = remaining[:, start : start + BLOCK], upper[start : start + BLOCK, start:]
        errors = torch.empty_like(columns)
        for i, place in enumerate(order[start : start + BLOCK].tolist()):
            scale = scales.of(slice(None), place // group)
            codes[:, place] = code = encode(format, columns[:, i], scale)
            errors[:, i] = (columns[:, i] - decode(format, code, scale)) / factor[i, i]
            columns[:, i:] -= torch.outer(errors[:, i], factor[i, i : columns.shape[1]])
        remaining[:, start + BLOCK :] -= errors @ factor[:, BLOCK:]
    return Quantized(format, codes, scales)


METHODS = {"rtn": rtn, "awq": awq, "gptq": gptq}
