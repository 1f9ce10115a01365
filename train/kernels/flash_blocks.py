"""Block sizes, warps and pipeline stages of the FlashAttention kernels, by head size, type and GPU generation.

A table (flash_blocks.yaml), no autotuner, so every node launches the same. Chosen from what the compiler says
(`tests/train/kernels/test_compile.py`): large blocks whose inner loops spill next to nothing, in the shared memory of
the smallest GPU of the generation. Not timed yet.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """One kernel's block of queries and of keys (rows), its warps a program, and its load stages."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """As a kernel's launch names them."""
        return {"QUERIES": self.queries, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Blocks:
    """The launches of the forward kernel, of dK and dV, and of dQ."""

    forward: Launch
    d_key_value: Launch
    d_query: Launch


def blocks_for(head_dim: int, dtype: torch.dtype, precision: str, capability: tuple[int, int]) -> Blocks:
    """The launches for a head size and type; `precision` of fp32's products, `capability` as PyTorch says it."""
    generation = {9: "hopper", 10: "blackwell"}.get(capability[0], "ampere")
    entries = _table()[precision if dtype == torch.float32 else generation]
    found = next(launches for largest, launches in entries.items() if head_dim <= largest)
    return Blocks(*(Launch(*numbers) for numbers in found))


@functools.cache
def _table() -> dict[str, dict[int, list[list[int]]]]:
    table: dict[str, dict[int, list[list[int]]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return table


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
