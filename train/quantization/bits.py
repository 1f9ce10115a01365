"""The number formats, without PyTorch: their constants, blocks, and bits per number.

Deviations from the specifications, each so that a result depends on neither the mesh nor the device:

- NVFP4 has no scale per tensor, which ranks would have to agree on. Instead the scale of a block has E4M3's mantissa
  but any exponent. This equals NVFP4 with a power of two as scale of the tensor, unless blocks of a tensor differ by
  more than E4M3's range, 2^14.
- Scales of FP8, integers and ternary numbers are fp32, one per block, where the papers have one per tensor.
- A row's last block may be shorter, unless `quantization.block` is set.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Format(NamedTuple):
    bits: float  # of a number, without its block's scale
    largest: float
    mantissa: int | None  # bits, without the leading 1; None: integers
    smallest: int  # exponent of the smallest normal number
    scale: str  # amax: fp32; power: of two, E8M0; e4m3: 3 bits of mantissa; mean: fp32, of magnitudes
    scale_bits: int
    block: int  # numbers that share a scale, unless `quantization.block` says otherwise


FORMATS = {
    # Micikevicius et al. 2022, arXiv 2209.05433, table 1; blocks of 128 as in DeepSeek-V3, arXiv 2412.19437, 3.3.2.
    "fp8_e4m3": Format(8, 448.0, 3, -6, "amax", 32, 128),
    "fp8_e5m2": Format(8, 57344.0, 2, -14, "amax", 32, 128),
    # OCP Microscaling Formats (MX) v1.0, 2023, section 5; MXFP8 with elements E4M3.
    "mxfp8": Format(8, 448.0, 3, -6, "power", 8, 32),
    "mxfp4": Format(4, 6.0, 1, 0, "power", 8, 32),
    # Nvidia 2025, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, section 2.
    "nvfp4": Format(4, 6.0, 1, 0, "e4m3", 8, 16),
    # Symmetric, scaled by the largest magnitude: Dettmers et al. 2022, arXiv 2208.07339, section 2; int4 alike.
    "int8": Format(8, 127.0, None, 0, "amax", 32, 128),
    "int4": Format(4, 7.0, None, 0, "amax", 32, 128),
    # BitNet b1.58: Ma et al. 2024, arXiv 2402.17764, section 2.
    "ternary": Format(math.log2(3), 1.0, None, 0, "mean", 32, 128),
}
PRECISIONS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0}


def bits(format: str, block: int | None = None) -> float:
    """Return the mean bits per number of a format, scales included, or of a precision, such as "bf16"."""
    if format in PRECISIONS:
        return PRECISIONS[format]
    return FORMATS[format].bits + FORMATS[format].scale_bits / (block or FORMATS[format].block)


def block_of(format: str, width: int, block: int | None = None) -> int:
    """Return how many neighbours in a row of `width` numbers share a scale: `block`, or the format's, or the row."""
    return min(FORMATS[format].block if block is None else block, width)
