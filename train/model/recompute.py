"""Activations computed again in the backward pass instead of kept: those of a whole block, or those that are cheap.

`selective` keeps what the big matrix products give and the residual stream; no product with a weight runs twice, nor
does a collective. For that, `recomputed` drops a function's output too, although the product that follows needs it:
what the product saves of it becomes a view of what is computed again, which `torch.utils.checkpoint` cannot do.
Gradients have the same bits, as long as a function gives the same bits twice. Under `torch.compile` both modes mark
regions of the traced graph.

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
    # There are no random numbers in a model of ours, so their state needs no keeping.
    result: Out = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result


def recomputed(function: Callable[..., Tensor], product: Callable[[Tensor], Out], *inputs: Tensor) -> Out:
    """product(function(*inputs)), of which the inputs are kept, and what `product` saves beside its own input.

    Nobody may write to the inputs before the backward pass.
    """
    if not torch.is_grad_enabled():
        return product(function(*inputs))
    if torch.compiler.is_compiling():
        return checkpointed(lambda *again: product(function(*again)), *inputs)
    dropped = _Dropped(function, inputs)
    with saved_tensors_hooks(dropped.drop, dropped.value):
        out = function(*inputs)
    with saved_tensors_hooks(dropped.dropper_of_views(out), dropped.value):
        return product(out)


class _Dropped:
    """Tensors that a backward pass will ask for and nobody keeps, each known by its number in the order of saving."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self.function = function
        self.inputs = [(x.detach(), x.requires_grad) for x in inputs]
        self.saved = 0
        self.views: list[tuple[Any, ...]] = []  # size, stride and offset of each
        self.values: dict[int, Tensor] = {}  # between the first that is asked for and the last

    def drop(self, _: Tensor) -> int:
        """Pack hook while the function runs."""
        self.saved += 1
        return self.saved - 1

    def dropper_of_views(self, out: Tensor) -> Callable[[Tensor], int | Tensor]:
        """Pack hook while the product runs: drops views of its input `out` and keeps everything else."""
        storage, dtype = out.untyped_storage()._cdata, out.dtype  # not `out`: the hook lives as long as the graph

        def drop(x: Tensor) -> int | Tensor:
            if x.untyped_storage()._cdata != storage or x.dtype != dtype:
                return x
            self.views.append((x.shape, x.stride(), x.storage_offset()))
            return self.saved + len(self.views) - 1

        return drop

    def value(self, kept: int | Tensor) -> Tensor:
        """Unpack hook."""
        if isinstance(kept, Tensor):
            return kept
        if kept not in self.values:
            self.values = self._compute()
        return self.values.pop(kept)

    def _compute(self) -> dict[int, Tensor]:
        values: list[Tensor] = []
        with torch.enable_grad(), saved_tensors_hooks(lambda x: values.append(x.detach()), _never):
            out = self.function(*(x.detach().requires_grad_(wanted) for x, wanted in self.inputs)).detach()
        if len(values) != self.saved:
            raise RuntimeError(f"{len(values)} tensors were saved by a function that saved {self.saved} the first time")
        values += [out.as_strided(*view) for view in self.views]
        return dict(enumerate(values))


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a second computation is never walked")
