"""Bytes of live tensors, real or fake."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Recorder of the bytes of all live storages that operators returned, and of their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}  # the largest that each has been: a sum of them is never below `now`
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.add(leaf)
        return out

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = weakref.ref(storage, lambda _: (self.storages.pop(key), self.sizes.pop(key)))
            self.sizes[key] = storage.nbytes()
            if sum(self.sizes.values()) > self.peak:
                self.peak = max(self.peak, self.now)

    @property
    def now(self) -> int:
        # Computed every time, because ZeRO-3 resizes storages.
        alive = [reference() for reference in list(self.storages.values())]
        return sum(storage.nbytes() for storage in alive if storage is not None)
