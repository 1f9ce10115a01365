"""Block sizes, warps and pipeline stages of the FlashAttention kernels, by head size, type and GPU generation.

A table, no autotuner, so every node launches the same. Chosen from what the compiler says
(`tests/train/kernels/test_compile.py`): large blocks whose inner loops spill next to nothing, in the shared memory of
the smallest GPU of the generation. Not timed yet.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """One kernel's block of queries and of keys (rows), its warps a program, and its load stages."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Blocks:
    """The launches of the forward kernel, of dK and dV, and of dQ."""

    forward: Launch
    d_key_value: Launch
    d_query: Launch


# By GPU generation or, for fp32, by how its products are taken; then by the largest head size of the entry.
# "ampere" serves every GPU with mma.sync, consumer GPUs included: at most 99 KiB of shared memory.
_TABLE = {
    "ampere": {
        64: Blocks(Launch(128, 64, 4, 3), Launch(64, 128, 8, 2), Launch(128, 64, 8, 2)),
        128: Blocks(Launch(128, 64, 8, 3), Launch(32, 128, 8, 2), Launch(128, 64, 8, 2)),
        256: Blocks(Launch(64, 32, 4, 2), Launch(16, 64, 8, 2), Launch(64, 32, 8, 1)),
    },
    "hopper": {
        64: Blocks(Launch(128, 128, 8, 2), Launch(64, 128, 8, 2), Launch(128, 128, 8, 2)),
        128: Blocks(Launch(128, 128, 8, 2), Launch(64, 128, 8, 2), Launch(128, 64, 8, 2)),
        256: Blocks(Launch(128, 64, 8, 2), Launch(32, 64, 8, 2), Launch(128, 32, 8, 2)),
    },
    "blackwell": {
        64: Blocks(Launch(128, 128, 8, 2), Launch(64, 128, 8, 2), Launch(128, 128, 8, 2)),
        128: Blocks(Launch(128, 128, 8, 2), Launch(64, 128, 8, 2), Launch(128, 64, 8, 2)),
        256: Blocks(Launch(128, 32, 8, 2), Launch(32, 64, 8, 2), Launch(64, 32, 8, 2)),
    },
    "tf32": {
        64: Blocks(Launch(128, 32, 8, 2), Launch(32, 64, 8, 2), Launch(64, 32, 8, 2)),
        128: Blocks(Launch(64, 32, 8, 2), Launch(16, 64, 8, 2), Launch(64, 16, 8, 2)),
        256: Blocks(Launch(32, 16, 4, 2), Launch(16, 16, 8, 1), Launch(32, 16, 8, 1)),
    },
    "ieee": {
        64: Blocks(Launch(64, 32, 8, 2), Launch(32, 32, 4, 2), Launch(64, 32, 8, 2)),
        128: Blocks(Launch(32, 32, 8, 1), Launch(16, 32, 8, 1), Launch(32, 16, 8, 2)),
        256: Blocks(Launch(32, 16, 4, 1), Launch(16, 16, 8, 1), Launch(16, 16, 8, 1)),
    },
}


def blocks_for(head_dim: int, dtype: torch.dtype, precision: str, capability: tuple[int, int]) -> Blocks:
    """The launches for a head size and type; `precision` of fp32's products, `capability` as PyTorch says it."""
    generation = {9: "hopper", 10: "blackwell"}.get(capability[0], "ampere")
    kind = precision if dtype == torch.float32 else generation
    return next(blocks for largest, blocks in _TABLE[kind].items() if head_dim <= largest)


def dot_precision() -> str:
    """How products of fp32 blocks are taken: TF32 where PyTorch's own matrix products are, else exactly."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability_of(x: Tensor) -> tuple[int, int]:
    """The GPU's; on a CPU, under Triton's interpreter, sm_80 stands in."""
    return _capability(x.get_device()) if x.is_cuda else (8, 0)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: this makes it x's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
