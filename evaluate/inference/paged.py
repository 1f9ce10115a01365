"""Keys and values in pages, so that requests of any length share one block of memory, and attention that reads it.

- A page holds `PAGE` positions of one request for all heads, so that all pages are one batched product, read where they
  lie; what comes out is put in the order of the request's positions for one softmax, and back. No kernel of our own.
- Pages in use are kept at the front (`compact`), because the product runs over all up to the last.

Kwon et al. 2023 (arXiv:2309.06180); Ainslie et al. 2023 (arXiv:2305.13245) for grouped queries.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ...train.config import ModelConfig

PAGE = 32  # positions; on CPUs 16 to 128 took about the same time, and more hold more room that nobody uses

Ids = npt.NDArray[np.int64]


@dataclass
class Pages:
    """Pages of one request: one for each stretch of `page` positions, those before stretch `first` given back."""

    table: list[int] = field(default_factory=list)
    first: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.table)


class PagedCache:
    """Memory for keys and values (depth, pages, kv_heads, page, head_dim) each, and which of its pages are free.

    Where values are the first `latent` numbers of the keys, they are kept once.
    """

    def __init__(
        self,
        depth: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        dtype: torch.dtype,
        device: torch.device,
        page: int = PAGE,
        latent: int = 0,
    ) -> None:
        shape = (depth, pages, kv_heads, page, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = self.keys[..., :latent] if latent else torch.empty(shape, dtype=dtype, device=device)
        self.stores = [self.keys] if latent else [self.keys, self.values]
        self.page, self.kv_heads = page, kv_heads
        self._free = list(range(pages))  # a heap: the lowest is taken first
        self._users: dict[int, Pages] = {}

    @classmethod
    def of(cls, model: ModelConfig, pages: int, dtype: torch.dtype, device: torch.device, page: int) -> PagedCache:
        """For what `Forward(model, absorbed=True)` attends to."""
        latent = model.latent
        heads, size = (1, model.cached) if latent else (model.num_kv_heads, model.head_dim)
        return cls(model.depth, heads, size, pages, dtype, device, page, latent)

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    @property
    def top(self) -> int:
        """All pages in use lie below."""
        return max(self._users, default=-1) + 1

    def extend(self, pages: Pages, length: int) -> bool:
        """Pages up to position length - 1; False, and none, where there are too few."""
        missing = -(-length // self.page) - pages.end
        if missing > self.free:
            return False
        taken = [heapq.heappop(self._free) for _ in range(missing)]
        self._users.update(dict.fromkeys(taken, pages))
        pages.table += taken
        if taken:
            # What hidden positions hold is multiplied by a weight of zero, and may be another request's NaN.
            self.values[:, torch.tensor(taken, device=self.values.device)] = 0.0
        return True

    def forget(self, pages: Pages, before: int) -> bool:
        """Takes back the pages that lie wholly before a position; says whether there were any."""
        hidden = min(before // self.page - pages.first, len(pages.table))
        if hidden <= 0:
            return False
        self._give_back(pages.table[:hidden])
        del pages.table[:hidden]
        pages.first += hidden
        return True

    def release(self, pages: Pages) -> None:
        self._give_back(pages.table)
        pages.table, pages.first = [], 0

    def compact(self) -> bool:
        """Moves pages to the front where over a third of those before the last are free; says if it did."""
        used = len(self._users)
        if 3 * used >= 2 * self.top:
            return False
        moved = sorted(page for page in self._users if page >= used)
        places = heapq.nsmallest(len(moved), self._free)
        source, target = (torch.tensor(ids, device=self.keys.device) for ids in (moved, places))
        for store in self.stores:
            for block in store:
                block[target] = block[source]
        renamed = dict(zip(moved, places, strict=True))
        owners = {id(pages): pages for pages in (self._users[page] for page in moved)}
        for pages in owners.values():
            pages.table = [renamed.get(page, page) for page in pages.table]
        self._users = {renamed.get(page, page): pages for page, pages in self._users.items()}
        self._free = sorted({*self._free, *moved} - {*places})
        return True

    def write(self, block: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Keeps keys and values (n, kv_heads, d) of one block at `rows` (n kv_heads,), see `rows`."""
        d = key.shape[-1]
        for store, new in zip(self.stores, (key, value), strict=False):
            store[block].view(-1, d).index_copy_(0, rows, new.reshape(-1, d))

    def rows(self, pages: Sequence[Pages], positions: Sequence[Ids]) -> Ids:
        """Where positions (n,) of each request lie among all (page, head, position in its page): (sum n kv_heads,)."""
        own = [np.array(one.table)[at // self.page - one.first] for one, at in zip(pages, positions, strict=True)]
        return self.places(np.concatenate(own), np.concatenate(positions))

    def places(self, page: Ids, positions: Ids) -> Ids:
        """The same for positions (n,) whose pages (n,) are known."""
        heads = np.arange(self.kv_heads)
        return ((page[:, None] * self.kv_heads + heads) * self.page + positions[:, None] % self.page).ravel()

    def _give_back(self, table: Sequence[int]) -> None:
        for page in table:
            del self._users[page]
            heapq.heappush(self._free, page)


class PagedBatch:
    """Requests that decode together: which page is whose, as `attend` reads it. Valid until a table changes.

    B requests, P pages up to the last in use, S stretches in the longest table.
    """

    def __init__(self, cache: PagedCache, pages: Sequence[Pages], heads: int) -> None:
        self.cache, self.heads = cache, heads
        self.top = cache.top
        longest = max(len(one.table) for one in pages)
        table = np.zeros((len(pages), longest), np.int64)  # (B, S); where a table ends earlier, any page: it is masked
        owner = np.zeros(self.top, np.int64)  # (P,)
        place = np.zeros(self.top, np.int64)  # (P,) stretch in its owner's table
        for row, one in enumerate(pages):
            table[row, : len(one.table)] = one.table
            owner[one.table] = row
            place[one.table] = np.arange(len(one.table))
        head = np.arange(heads)
        device = cache.keys.device
        put = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)  # noqa: E731
        self.owner = put(owner)
        self.in_order = put((table[:, None] * heads + head[:, None]).ravel())  # (B, heads, S) rows of (P, heads)
        # (P, heads) rows of (B, heads, S)
        self.by_page = put(((owner[:, None] * heads + head) * longest + place[:, None]).ravel())
        self.bags = put(np.concatenate([one.table for one in pages]))
        self.bag_starts = put(np.cumsum([0, *(len(one.table) for one in pages[:-1])]))
        self._table, self._first = table, np.array([one.first for one in pages])
        # (B, S page) position of each column
        self._column = self._first[:, None] * cache.page + np.arange(longest * cache.page)

    def step(self, positions: Ids, first: Ids) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """For one token a request, at `positions` (B,), which sees those from `first` (B,) on, itself included: what
        keeps key and value, and reads all that the queries see; see `forward.Attend`, with n = B.
        """
        hidden = (self._column > positions[:, None]) | (self._column < first[:, None])
        own = self._table[np.arange(len(positions)), positions // self.cache.page - self._first]
        rows = self.cache.places(own, positions)
        device = self.owner.device
        return partial(self._attend, torch.from_numpy(hidden).to(device)[:, None], torch.from_numpy(rows).to(device))

    def _attend(self, hidden: Tensor, rows: Tensor, block: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`hidden` (B, 1, S page) is unseen, `rows` are written."""
        cache = self.cache
        cache.write(block, rows, key, value)
        requests, heads, d = query.shape
        pages, products = self.top, self.top * cache.kv_heads
        keys = cache.keys[block, :pages].view(products, cache.page, d)
        values = cache.values[block, :pages].flatten(0, 1)
        # Queries of a group share their keys: (P kv_heads, group, d).
        query = (query.reshape(requests, heads * d) * d**-0.5).index_select(0, self.owner)
        scores = torch.bmm(query.view(products, -1, d), keys.transpose(1, 2)).view(pages * heads, cache.page)
        scores = scores.index_select(0, self.in_order).view(requests, heads, -1)
        # Filled, not added to: what other requests have left in hidden places may be anything.
        scores = scores.masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights = weights.to(query.dtype).view(-1, cache.page).index_select(0, self.by_page)
        parts = torch.bmm(weights.view(products, -1, cache.page), values).reshape(pages, -1)
        mixed = F.embedding_bag(self.bags, parts, self.bag_starts, mode="sum")  # the sum over a request's pages
        return mixed.view(requests, heads, -1)
