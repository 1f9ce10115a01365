"""Random numbers for stochastic rounding: a hash of what they belong to, so every mesh and device draws the same.

It belongs to an output of a matrix and to a token: to the run's seed, the step, the token's position, and all tokens of
its sequence, which every rank knows. So equal sequences in one batch share their noise.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Keys = tuple[Tensor, Tensor]  # of rows (…, m) and of columns (n,), int32

# Of splitmix64 (Steele et al. 2014), as signed numbers, and of github.com/skeeto/hash-prospector. Products wrap around.
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
THIRD, UNIT = 0x21F0AAAD, 2.0**-32  # products with a power of two are exact


class Noise:
    """Source of the keys of a run's tokens. `local_part` takes this rank's part of sequences along a dimension."""

    def __init__(self, seed: int, local_part: Callable[[Tensor, int], Tensor] = lambda x, dim: x) -> None:
        self.seed, self.local_part, self.step = seed, local_part, 0  # the optimizer step under way
        self.rows = torch.empty(0, dtype=torch.int32)  # keys of this rank's tokens, whose gradients come next

    def see(self, tokens: Tensor) -> None:
        """Set the keys of a micro-batch, from its tokens (batch, time)."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        texts = _mixed(tokens * GOLDEN + position).sum(1, keepdim=True)
        keys = _key(_mixed(_mixed(texts + self.seed) + self.step) + GOLDEN * position)
        self.rows = self.local_part(keys, 1).flatten()


def column_keys(name: str, columns: Sequence[int], device: torch.device) -> Tensor:
    """Return the keys (n,) of the outputs numbered `columns` of the matrix `name`."""
    numbers = torch.tensor(columns, dtype=torch.int64, device=device)
    return _key(_mixed(numbers + 1) + zlib.crc32(name.encode()))


def draw(rows: Tensor, columns: Tensor) -> Tensor:
    """Return a number for each row and column, from their keys: (…, n) fp32. Times `UNIT` it is in [-1/2, 1/2].

    Products of keys are pairwise independent (Dietzfelbinger et al. 1997); mixing breaks up their linear structure.
    """
    x = rows[..., None] * columns
    x ^= x >> 15
    x *= THIRD
    return x.to(torch.float32)


def _mixed(x: Tensor) -> Tensor:
    """Hash int64 numbers: the finalizer of splitmix64."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


def _key(x: Tensor) -> Tensor:
    """Hash int64 numbers to odd int32 numbers."""
    return (_mixed(x) >> 32 | 1).to(torch.int32)
