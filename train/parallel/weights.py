"""The weights that a model computes with, as views of flat buckets, and how a rank gets those that others own.

At stages 1 and 2 updated slices are gathered in place, and a module waits for its buckets. At stage 3 a bucket is a
block, gathered while the block before it computes and freed after. Rajbhandari et al. 2020 (arXiv 1910.02054), sections
5.3 and 7; Zhao et al. 2023 (arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from ..model.gpt import GPT
from .buckets import Bucket, Range
from .mesh import all_gather


class Weights:
    """Every parameter of a model in flat buckets; the model's own are replaced, and their values left undefined.

    `layouts` are the buckets in backward order, at stage 3 those of `gathered_units`; `owned` the range of each that
    this rank updates.
    """

    def __init__(
        self,
        gpt: GPT,
        layouts: Sequence[Bucket],
        owned: Sequence[Range],
        group: ProcessGroup | None,
        *,
        stage: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group, self.stage = group, stage
        self.full: list[Tensor] = []
        self.parameters = self._replace(gpt, layouts, dtype, device)
        if stage < 3:
            self.own = [full[start:stop] for full, (start, stop) in zip(self.full, owned, strict=True)]
        else:
            self.own = [torch.zeros(stop - start, dtype=dtype, device=device) for start, stop in owned]
        self.work: list[Work | None] = [None] * len(layouts)  # gathers under way
        self.whole = [stage < 3] * len(layouts)  # gathered, or about to be
        if stage > 0:
            numbers = {slot.name: number for number, layout in enumerate(layouts) for slot in layout.slots}
            self._schedule(gpt, numbers)

    def _replace(
        self, gpt: GPT, layouts: Sequence[Bucket], dtype: torch.dtype, device: torch.device
    ) -> dict[str, nn.Parameter]:
        """Puts views of the buckets where the model's parameters were; a tied parameter is one in all its places."""
        old = dict(gpt.named_parameters())
        new: dict[int, nn.Parameter] = {}
        for layout in layouts:
            full = torch.zeros(layout.size, dtype=dtype, device=device)
            for slot in layout.slots:
                parameter = old[slot.name]
                # `data` cuts the version counter off: gathering into the buffer is no change that autograd should see.
                new[id(parameter)] = nn.Parameter(full[slot.start : slot.stop].view(parameter.shape).data)
            if self.stage == 3:
                full.untyped_storage().resize_(0)  # before the next one: the model may not fit
            self.full.append(full)
        for module in gpt.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(module, name, new[id(parameter)])
        return {name: new[id(parameter)] for name, parameter in old.items()}

    def changed(self, number: int) -> None:
        """The owners have written to a bucket: it is gathered at once, or at stage 3 when it is needed."""
        self.wait(number)
        if self.stage == 3:
            self.release(number)
        elif self.stage > 0:
            self._gather(number)

    def fetch(self, number: int) -> None:
        """Starts to gather a bucket, where it is not whole."""
        if not self.whole[number]:
            full = self.full[number]
            full.untyped_storage().resize_(full.numel() * full.element_size())
            self.whole[number] = True
            self._gather(number)

    def wait(self, number: int) -> None:
        """Until a bucket that was fetched or has changed is whole; on a GPU only the current stream waits."""
        work, self.work[number] = self.work[number], None
        if work is not None:
            work.wait()

    def release(self, number: int) -> None:
        """At stage 3 frees the storage of a bucket; it is fetched again when it is needed."""
        if self.stage == 3 and self.whole[number]:
            self.wait(number)
            self.full[number].untyped_storage().resize_(0)
            self.whole[number] = False

    def forget(self) -> None:
        """Ends what is under way; at stage 3 nothing is whole after."""
        for number in range(len(self.full)):
            self.wait(number)
            self.release(number)

    def _gather(self, number: int) -> None:
        self.work[number] = all_gather(self.full[number], self.own[number], group=self.group, async_op=True)

    def _schedule(self, gpt: GPT, numbers: Mapping[str, int]) -> None:
        """Hooks on a model that wait for weights, and at stage 3 fetch them a block ahead and release them."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        used = {
            module: sorted({numbers[names[id(parameter)]] for parameter in module.parameters()})
            for module in (gpt.embedding, *gpt.blocks, gpt.norm, gpt.head)
        }
        if self.stage < 3:
            for module, several in used.items():
                for number in several:
                    module.register_forward_pre_hook(self._take(number))
            return
        table, final = used[gpt.embedding][0], used[gpt.norm][0]
        blocks = [used[block][0] for block in gpt.blocks]
        ahead = [*blocks, final]
        gpt.embedding.register_forward_pre_hook(self._take(table, ahead[0]))
        for i, block in enumerate(gpt.blocks):
            block.register_forward_pre_hook(self._take(blocks[i], ahead[i + 1]))
            self._on_gradient(block, self._take(blocks[i], blocks[i - 1] if i > 0 else None))
            self._after(block, blocks[i], keep=i == len(blocks) - 1)
        gpt.norm.register_forward_pre_hook(self._take(final))
        self._after(gpt.head, final, keep=True)
        if table != final:
            self._after(gpt.embedding, table, keep=False)

    def _take(self, number: int, ahead: int | None = None) -> Callable[..., None]:
        """What to do before a bucket is used: have it, and start to fetch the one after it."""

        def take(*_: Any) -> None:
            self.fetch(number)
            self.wait(number)
            if ahead is not None:
                self.fetch(ahead)

        return take

    def _on_gradient(self, module: nn.Module, take: Callable[..., None]) -> None:
        """Before the backward pass of a module."""

        def hook(module: nn.Module, arguments: Any, out: Tensor) -> None:
            if out.requires_grad:
                out.register_hook(take)

        module.register_forward_hook(hook)

    def _after(self, module: nn.Module, number: int, *, keep: bool) -> None:
        """Releases a bucket after a forward pass; with `keep` not where a backward pass follows."""

        def hook(module: nn.Module, arguments: Any, out: Tensor) -> None:
            if not (keep and out.requires_grad):
                self.release(number)

        module.register_forward_hook(hook)
