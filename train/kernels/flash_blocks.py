"""Block sizes, warps and pipeline stages of the FlashAttention kernels, by head size, type and GPU generation.

A table (flash_blocks.toml), not an autotuner, so that all nodes launch the same. Sizes that were not timed come from
compiler output (`isoflop bench kernels --static`): large blocks that spill no register and fit the shared memory of the
smallest GPU of the generation.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..hardware import CUDA, on_gpu


class Launch(NamedTuple):
    """One kernel's rows per block of queries and of keys, warps per program, and load stages, named as Triton does."""

    QUERIES: int
    KEYS: int
    num_warps: int
    num_stages: int


class Blocks(NamedTuple):
    forward: Launch
    d_key_value: Launch
    d_query: Launch


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def blocks_for(query: Tensor, precision: str) -> Blocks:
    """Return the kernels' launch options by the query's head size and GPU or, in fp32, `precision` (tf32 or ieee)."""
    generation = {9: "hopper", 10: "blackwell"}.get(capability_of(query)[0], "ampere")
    entries = TABLE[precision if query.dtype == torch.float32 else generation]
    launches = next(launches for largest, launches in entries.items() if query.shape[-1] <= int(largest))
    return Blocks(*(Launch(*numbers) for numbers in launches))


def dot_precision() -> str:
    """Return how Triton multiplies fp32 blocks: tf32 if PyTorch's products may use it, else ieee."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def capability_of(x: Tensor) -> tuple[int, int]:
    """Return the compute capability of x's GPU; on a CPU, for Triton's interpreter, (8, 0)."""
    return CUDA.capability(x.device) if on_gpu(x) else (8, 0)
