"""Quantization to a number format and back, with the same bits on CPUs and GPUs.

Every operation is correctly rounded and of one or two numbers, or a maximum, so no library changes the order of a sum.
A format's numbers are multiples of a power of two, their step: adding and subtracting 1.5 * 2^23 steps in fp32 rounds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..hardware import on_gpu
from .bits import FORMATS, Format, bits, block_of  # noqa: F401  one module for users
from .noise import UNIT, Keys, draw

EXPONENT = 0x7F800000  # bits of an fp32 number that hold its exponent
TINY = 2.0**-126  # smallest normal fp32 number; the scale of a block of zeros
AT_A_TIME = 1 << 17  # numbers that stay in a CPU core's cache; chosen by timing


def fake_quantize(values: Tensor, format: str, block: int, noise: Keys | None = None, hadamard: bool = False) -> Tensor:
    """Quantize to a format and back, in blocks along the last dimension. Values beyond a block's range are clipped.

    Args:
        values: (…, n) of any floating type; computed in fp32. A block with inf or nan has nan in the result.
        format: a key of `FORMATS`.
        block: number of neighbours with one scale; the last block of a row is shorter if it does not divide n.
        noise: rounds stochastically. Scales are then large enough for all values, so that the result is unbiased.
        hadamard: multiply blocks, of 2^k numbers, by a Walsh-Hadamard matrix before and after. This spreads outliers
            over their block (Tseng et al. 2024, arXiv 2402.04396, section 3); in a product, both matrices cancel.
    """
    # One operation for the compiler, whose own code would round otherwise: it fuses products and sums.
    quantized, keys = _operation if torch.compiler.is_compiling() else _quantized, noise or (None, None)
    return quantized(values, format, block, keys[0], keys[1], hadamard)


def _quantized(
    values: Tensor, format: str, block: int, keys: Tensor | None, columns: Tensor | None, hadamard: bool
) -> Tensor:
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    rows, targets, width = values.detach().flatten(0, -2), out.flatten(0, -2), values.shape[-1]
    count = max(1, len(rows) if on_gpu(values) else AT_A_TIME // width)
    whole = width // block * block  # of the row, in full blocks
    parts = [(slice(whole), block), (slice(whole, width), width - whole)]
    for some in (slice(first, first + count) for first in range(0, len(rows), count)):
        noise = None if keys is None or columns is None else draw(keys[some], columns)
        for part, size in parts[whole == 0 : 1 + (whole < width)]:
            x, target = rows[some, part].reshape(-1, size).float(), targets[some, part]
            noises = None if noise is None else noise[:, part].reshape(-1, size)
            direct = target.is_contiguous() and target.dtype == torch.float32 and not hadamard
            x = _rotate(x.mT.clone(memory_format=torch.contiguous_format)).mT if hadamard else x
            x = _rounded(x, FORMATS[format], noises, target.view_as(x) if direct else x)  # else x is a copy
            if not direct:
                target.copy_((_rotate(x.mT).mT if hadamard else x).reshape(target.shape))
    return out


def _rounded(rows: Tensor, numbers: Format, noise: Tensor | None, out: Tensor) -> Tensor:
    """Quantize rows (n, block), fp32, each with its scale, into `out`. `noise`: from `draw`, the same shape."""
    magnitudes = rows.abs()
    scale = _scales(magnitudes, numbers, noise is not None)
    y = torch.mul(rows, scale.reciprocal(), out=out)
    if numbers.mantissa is None:
        y = (y if noise is None else y.add_(noise, alpha=UNIT)).round_()
    else:
        # A step is 2^-mantissa of the power of two below the value, or below the smallest normal number.
        power = _power(y, out=magnitudes).clamp_min_(2.0**numbers.smallest)
        if noise is not None:
            y.addcmul_(noise, power, value=UNIT * 2.0**-numbers.mantissa)
        steps = 1.5 * 2.0 ** (23 - numbers.mantissa)
        y.add_(power, alpha=steps).sub_(power, alpha=steps)
    if noise is not None or numbers.scale in ("power", "mean"):  # else the scale lets nothing round to more
        y.clamp_(-numbers.largest, numbers.largest)
    return y.mul_(scale)


def _scales(magnitudes: Tensor, numbers: Format, whole: bool) -> Tensor:
    """Return what each row (n, block) is divided by, (n, 1) fp32; if `whole`, no number is then too large."""
    largest = magnitudes.amax(-1, keepdim=True)
    match numbers.scale:
        case "power":  # OCP MX v1.0, section 6.3: 2^(floor(log2 amax) - exponent of the largest number)
            scale = _power(largest) * 2.0 ** (1 - math.frexp(numbers.largest)[1])
            scale = torch.where(scale * numbers.largest < largest, 2 * scale, scale) if whole else scale
        case "e4m3":
            scale = (largest * (1 / numbers.largest)).clamp_min_(TINY)
            power = _power(scale)
            eighths = scale / power * 8
            scale = (eighths.ceil() if whole else eighths.round()) * 0.125 * power
        case "mean" if not whole:
            scale = _mean(magnitudes)
        case _:  # ternary, stochastic: the largest magnitude as in TernGrad, Wen et al. 2017, arXiv 1705.07878
            scale = largest * (1 / numbers.largest)
    return scale.clamp_min_(TINY)


def _power(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the largest power of two that is at most |x|, fp32; 0 for 0."""
    exponent = torch.bitwise_and(x.view(torch.int32), EXPONENT, out=None if out is None else out.view(torch.int32))
    return exponent.view(torch.float32)


def _mean(x: Tensor) -> Tensor:
    """Return the mean over the last dimension, by sums of pairs."""
    count = x.shape[-1]
    while half := x.shape[-1] // 2:
        x = torch.cat((x[..., :half] + x[..., half : 2 * half], x[..., 2 * half :]), -1)
    return x * (1 / count)


def _rotate(columns: Tensor) -> Tensor:
    """Multiply columns (block, n), in place, by the Walsh-Hadamard matrix over sqrt(block), its own inverse.

    The rows are long, which makes sums of neighbours in a block fast.
    """
    half, spare = 1, torch.empty_like(columns[len(columns) // 2 :])
    while half < len(columns):
        first, second = columns.view(-1, 2, half, columns.shape[1]).unbind(1)
        difference = torch.sub(first, second, out=spare.view(first.shape))
        first += second
        second.copy_(difference)
        half *= 2
    return columns.mul_(len(columns) ** -0.5)


_operation = torch.library.custom_op("isoflop::fake_quantize", _quantized, mutates_args=())
_operation.register_fake(lambda values, *_: torch.empty_like(values, memory_format=torch.contiguous_format))
