"""Number formats of quantized weights: scales of groups, codes, and their packing.

    int8, int4, int3    scale * (code - zero), asymmetric as in GPTQ and AWQ; scale fp16, zero as wide as a code
    nf4                 scale * one of 16 quantiles of the normal distribution; scale the largest magnitude, fp16
                        (QLoRA: Dettmers et al. 2023, arXiv:2305.14314, appendix E)
    mxfp4               scale * E2M1 number; scale a power of two in 8 bits (OCP Microscaling Formats v1.0, section 6.3)

Everything is computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .settings import CODE_BITS

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLES = {"nf4": NF4, "mxfp4": (*E2M1, *(-level for level in E2M1))}  # numbers by code
SMALLEST, LARGEST = 2.0**-24, 65504.0  # positive fp16 numbers


class Scales(NamedTuple):
    """Scale and zero point of groups of weights, float64; the zero point is 0 unless the format is an integer."""

    scale: Tensor
    zero: Tensor

    def of(self, *index: Any) -> Scales:
        return Scales(self.scale[index], self.zero[index])


def scales_of(format: str, groups: Tensor, shrink_low: float = 1.0, shrink_high: float = 1.0) -> Scales:
    """Choose scales for the range of each of `groups` (…, group), with its ends shrunk."""
    low, high = groups.amin(-1).clamp(max=0) * shrink_low, groups.amax(-1).clamp(min=0) * shrink_high
    largest, top = torch.maximum(-low, high), 2 ** CODE_BITS[format] - 1
    if format == "mxfp4":  # frexp's exponent is one more than that of the leading digit, and 2 is that of 6
        exponent = (torch.frexp(largest).exponent - 3).clamp(-127, 127)
        return Scales(torch.ldexp(torch.ones_like(largest), exponent), torch.zeros_like(largest))
    scale = largest if format == "nf4" else (high - low) / top
    scale = scale.clamp(SMALLEST, LARGEST).half().double()
    return Scales(scale, torch.zeros_like(scale) if format == "nf4" else (-low / scale).round().clamp(0, top))


def encode(format: str, values: Tensor, scales: Scales) -> Tensor:
    """Return the codes, uint8, of the numbers nearest to `values`; shapes broadcast."""
    units = values / scales.scale
    if format not in TABLES:
        return (units.round() + scales.zero).clamp(0, 2 ** CODE_BITS[format] - 1).to(torch.uint8)
    levels = units.new_tensor(NF4 if format == "nf4" else E2M1)
    middles = (levels[1:] + levels[:-1]) / 2
    if format == "nf4":
        return torch.bucketize(units, middles).to(torch.uint8)
    middles[1::2] = torch.nextafter(middles[1::2], levels[0])  # ties go to the even code
    return (torch.bucketize(units.abs(), middles) + 8 * (units < 0)).to(torch.uint8)


def decode(format: str, codes: Tensor, scales: Scales) -> Tensor:
    if format in TABLES:
        return scales.scale.new_tensor(TABLES[format])[codes.long()] * scales.scale
    return scales.scale * (codes - scales.zero)


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix: codes (rows, columns) uint8, scales (rows, columns / group).

    `channels`, (columns,), are AWQ's scales of the inputs; None: 1.
    """

    format: str
    codes: Tensor
    scales: Scales
    channels: Tensor | None = None

    def weight(self) -> Tensor:
        """Return the numbers that the codes stand for, float64 (rows, columns)."""
        groups = self.codes.unflatten(1, (self.scales.scale.shape[1], -1))
        weight = decode(self.format, groups, self.scales.of(..., None)).flatten(1)
        return weight if self.channels is None else weight / self.channels

    def packed(self) -> dict[str, Tensor]:
        """Return the tensors to store: codes (and zeros) as bits without gaps, scales as numbers of their format."""
        bits, scale = CODE_BITS[self.format], self.scales.scale.cpu()
        is_mx = self.format == "mxfp4"  # E8M0 is the exponent plus 127; frexp's is one more than the exponent
        result = {"codes": _pack(self.codes, bits)}
        result["scale"] = (torch.frexp(scale).exponent + 126).to(torch.uint8) if is_mx else scale.half()
        if self.format not in TABLES:
            result["zero"] = _pack(self.scales.zero, bits)
        return result if self.channels is None else result | {"channels": self.channels.cpu().half()}


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Write codes one after the other, each from its lowest bit; two of 4 bits are a byte, the first one low."""
    single = np.unpackbits(codes.cpu().numpy().astype(np.uint8).reshape(-1, 1), axis=1, bitorder="little")
    return torch.from_numpy(np.packbits(single[:, :bits], bitorder="little"))
