"""Multi-head latent attention: keys and values of all heads come from one small vector per token.

DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C. With c the rank of the latent, d the head size and r the
size of the rotary part, whose key all heads share, the cache of a token is c + r numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .backends import SDPA
from .block import RMSNorm, apply_rotary
from .strategy import ALONE


class LatentAttention(nn.Module):
    """Causal self-attention, (…, width) -> (…, width), … being batch and time.

        query     q (H (d + r)) = W_q x, or W_q norm(W_c x) with a separate rank
        latent    l (c), k_r (r) = W_l x;   k (H d), v (H d) = W_kv norm(l), head by head
        scores    (q . k + R q_r . R k_r) / sqrt(d + r)

    Values are padded with zeros to the width of keys, as kernels require.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.head_dim, self.rank, self.rotary = config.heads, config.head_dim, config.latent, config.rotary
        width, eps, queries = config.width, config.norm_eps, config.query_rank
        self.query_down = None if queries is None else nn.Linear(width, queries, bias=False)
        self.query_norm = None if queries is None else RMSNorm(queries, eps)
        self.query = nn.Linear(queries or width, self.heads * (self.head_dim + self.rotary), bias=False)
        self.latent = nn.Linear(width, self.rank + self.rotary, bias=False)
        self.latent_norm = RMSNorm(self.rank, eps)
        self.key_value = nn.Linear(self.rank, 2 * self.heads * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, width, bias=False)
        self.window, self.backend, self.strategy = config.window, SDPA, ALONE

    def take_heads(self, ranks: int, rank: int) -> None:
        self.heads //= ranks

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        return self.out(self.mix(self.project(x), cos, sin, seen))

    def compressed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query matrix's input, the normalised latent (…, c) and the unrotated rotary key (…, r) of x."""
        queries = x if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x))
        latent, key = self.latent(x).split((self.rank, self.rotary), dim=-1)
        return queries, self.latent_norm(latent), key

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys, values and shared rotary key side by side: (…, H (d + r) + 2 H d + r) for H heads."""
        queries, latent, key = self.compressed(x)
        return torch.cat((self.query(queries), self.key_value(latent), self.strategy.enter(key)), dim=-1)

    def mix(self, products: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        """Compute attention, (…, heads * head_dim), from the result of `project`; see `Attention.mix`."""
        rows = products.view(-1, len(cos), products.shape[-1])
        query, key, value = self.split(rows, lambda x: apply_rotary(x, cos, sin))
        mixed = self.backend.attend(query, key, value, seen, self.window)
        return mixed[..., : self.head_dim].reshape(*products.shape[:-2], -1, self.heads * self.head_dim)

    def split(self, products: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Split `project`'s result into query, key and padded value, (…, time, H, d + r); `rotate` the rotary parts."""
        heads, d, r = self.heads, self.head_dim, self.rotary
        query, both, key = products.split((heads * (d + r), 2 * heads * d, r), dim=-1)
        query, turned = query.unflatten(-1, (heads, d + r)).split((d, r), dim=-1)
        plain, value = both.unflatten(-1, (heads, 2 * d)).chunk(2, dim=-1)
        shared = rotate(key.unsqueeze(-2)).expand(*plain.shape[:-1], r)
        return torch.cat((query, rotate(turned)), -1), torch.cat((plain, shared), -1), F.pad(value, (0, r))
