"""Keys and values of texts that are being generated, and attention that reads them.

Each text has one row with room for the longest text, and the rows in use are the first ones. Pages (Kwon et al. 2023,
arXiv:2309.06180) would hold more texts of unequal length in the same memory, but need tables and their own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...train.config import ModelConfig

Ids = npt.NDArray[np.int64]


class Cache:
    """Keys and values, (depth, rows, kv_heads, length, head size) each.

    Latent attention (`Forward(model, absorbed=True)`) keeps one vector per token; its first numbers are the value too.
    """

    def __init__(self, model: ModelConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.latent = model.latent
        heads, size = (1, model.cached) if self.latent else (model.num_kv_heads, model.head_dim)
        shape = (model.depth, rows, heads, length, size)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = self.keys[..., : self.latent] if self.latent else torch.empty_like(self.keys)
        self.rows = rows

    def clear(self, rows: range) -> None:
        """Zero the values of rows, before another text uses them."""
        # Hidden positions get weight 0, and 0 times a NaN of an earlier text would be NaN.
        self.values[:, rows.start : rows.stop] = 0.0

    def move(self, source: int, target: int) -> None:
        for store in self._stores:
            store[:, target] = store[:, source]

    def places(self, rows: Ids, positions: Ids) -> Tensor:
        """Return where positions (n,) of rows (n,) lie among all (row, head, position): (n kv_heads,)."""
        heads, length = self.keys.shape[2:4]
        places = (rows[:, None] * heads + np.arange(heads)) * length + positions[:, None]
        return torch.from_numpy(places.ravel()).to(self.keys.device)

    def write(self, block: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep keys and values (n, kv_heads, head size) of one block."""
        for store, new in zip(self._stores, (key, value), strict=False):
            size = new.shape[-1]
            store[block].view(-1, size).index_copy_(0, places, new.reshape(-1, size))

    def step(self, row: int, positions: Ids, first: Ids) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """Return the attention (see `forward.Attend`) of one new token in each of the B rows from `row` on.

        Args:
            row: First row.
            positions: (B,) of the new tokens.
            first: (B,) first position that each token sees.
        """
        used = slice(row, row + len(positions))
        low, high = int(first.min()), int(positions.max()) + 1
        column = np.arange(low, high)
        hidden = (column > positions[:, None]) | (column < first[:, None])
        unseen = torch.from_numpy(hidden).to(self.keys.device)[:, None]  # (B, 1, high - low)
        places = self.places(np.arange(used.start, used.stop), positions)

        def attend(block: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.write(block, places, key, value)
            rows, heads, size = query.shape
            keys, values = (store[block, used, :, low:high].flatten(0, 1) for store in (self.keys, self.values))
            # Queries of a group share their keys: (B kv_heads, group, size).
            scores = torch.bmm(query.reshape(len(keys), -1, size) * size**-0.5, keys.transpose(1, 2))
            # Filled, because what earlier texts left in hidden places may be any number.
            scores = scores.view(rows, heads, -1).masked_fill_(unseen, float("-inf"))
            weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
            return torch.bmm(weights.to(query.dtype).view(len(keys), -1, high - low), values).view(rows, heads, -1)

        return attend

    @property
    def _stores(self) -> Sequence[Tensor]:
        return (self.keys,) if self.latent else (self.keys, self.values)
