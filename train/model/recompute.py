"""Recomputation in the backward pass, of a whole block's activations or only of cheap ones.

`selective` saves the outputs of the big matrix products and the residual stream; no product with a weight and no
collective runs twice. `recomputed` drops also the output of a function, of which the next product would save a view.
Gradients have the same bits if a function gives the same bits twice.

Korthikanti et al. 2022, arXiv 2205.05198, section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Out = TypeVar("Out")


def checkpointed(function: Callable[..., Out], *inputs: Tensor) -> Out:
    if not torch.is_grad_enabled():
        return function(*inputs)
    # Our models draw no random numbers, so their state need not be saved.
    result: Out = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result


def recomputed(function: Callable[..., Tensor], product: Callable[[Tensor], Out], *inputs: Tensor) -> Out:
    """Return product(function(*inputs)); the backward pass runs `function` again, whose tensors are not saved.

    The inputs must not be written to before the backward pass.
    """
    if not torch.is_grad_enabled():
        return product(function(*inputs))
    if torch.compiler.is_compiling():
        return checkpointed(lambda *detached: product(function(*detached)), *inputs)
    dropped = _Dropped(function, inputs)
    with saved_tensors_hooks(dropped.drop, dropped.value):
        out = function(*inputs)
    with saved_tensors_hooks(dropped.dropper_of_views(out), dropped.value):
        return product(out)


class _Dropped:
    """Tensors that are recomputed for the backward pass instead of saved, numbered in the order of saving."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self.function = function
        self.inputs = [(x.detach(), x.requires_grad) for x in inputs]
        self.saved = 0
        self.views: list[tuple[Any, ...]] = []  # size, stride and offset of each
        self.values: dict[int, Tensor] = {}  # recomputed and not yet used

    def drop(self, _: Tensor) -> int:
        self.saved += 1
        return self.saved - 1

    def dropper_of_views(self, out: Tensor) -> Callable[[Tensor], int | Tensor]:
        """Return a hook for tensors that the product saves: it drops only views of `out`, which are recomputed."""
        storage, dtype = out.untyped_storage()._cdata, out.dtype  # not `out`: the hook lives as long as the graph

        def drop(x: Tensor) -> int | Tensor:
            if x.untyped_storage()._cdata != storage or x.dtype != dtype:
                return x
            self.views.append((x.shape, x.stride(), x.storage_offset()))
            return self.saved + len(self.views) - 1

        return drop

    def value(self, packed: int | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed not in self.values:
            self.values = self._compute()
        return self.values.pop(packed)

    def _compute(self) -> dict[int, Tensor]:
        values: list[Tensor] = []
        with torch.enable_grad(), saved_tensors_hooks(lambda x: values.append(x.detach()), _never):
            out = self.function(
                *(x.detach().requires_grad_(needs_gradient) for x, needs_gradient in self.inputs)
            ).detach()
        if len(values) != self.saved:
            raise RuntimeError(f"the recomputation saved {len(values)} tensors, and the forward pass {self.saved}")
        values += [out.as_strided(*view) for view in self.views]
        return dict(enumerate(values))


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a second computation is never walked")
