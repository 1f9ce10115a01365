"""Block sizes, warps and pipeline stages of the FlashAttention kernels, by head size, type and GPU generation.

A table (flash_blocks.toml), no autotuner, so every node launches the same. Chosen from what the compiler says
(`isoflop bench kernels --static`): large blocks that spill no register, in the shared memory of the smallest GPU of the
generation. Not timed yet.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..hardware import CUDA, on_gpu


class Launch(NamedTuple):
    """One kernel's block of queries and of keys (rows), its warps a program, and its load stages, as it takes them."""

    QUERIES: int
    KEYS: int
    num_warps: int
    num_stages: int


class Blocks(NamedTuple):
    """The launches of the forward kernel, of dK and dV, and of dQ."""

    forward: Launch
    d_key_value: Launch
    d_query: Launch


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def blocks_for(query: Tensor, precision: str) -> Blocks:
    """The launches for queries of such a head size and type on their device; `precision` is that of fp32's products."""
    generation = {9: "hopper", 10: "blackwell"}.get(capability_of(query)[0], "ampere")
    entries = TABLE[precision if query.dtype == torch.float32 else generation]
    found = next(launches for largest, launches in entries.items() if query.shape[-1] <= int(largest))
    return Blocks(*(Launch(*numbers) for numbers in found))


def dot_precision() -> str:
    """How products of fp32 blocks are taken: TF32 where PyTorch's own matrix products are, else exactly."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def capability_of(x: Tensor) -> tuple[int, int]:
    """The GPU's; on a CPU, under Triton's interpreter, sm_80 stands in."""
    return CUDA.capability(x.device) if on_gpu(x) else (8, 0)
