"""Expert parallelism: data-parallel ranks split the experts, and send each other the rows of tokens.

A rank's rows go out sorted by expert, and rows for its experts come in sorted by sender. Results go back the same way,
and gradients in reverse, so an expert's gradient covers the whole group, and is summed only over its replicas. Lepikhin
et al. 2020, arXiv 2006.16668.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..model.experts import Collect, ExpertMLP, Routing, Spread


class Exchange:
    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, experts: ExpertMLP, x: Tensor, routing: Routing) -> Tensor:
        """Send tokens x (n, width) to the ranks of their experts. Returns each token's sum of outputs, (n, width)."""
        gates, tokens, rows, counts = routing
        sent = counts.view(self.group.size(), -1)
        received = torch.empty_like(sent)  # (sender, own expert)
        dist.all_to_all_single(received, sent, group=self.group)
        sizes = (
            sent.sum(1).tolist(),
            received.sum(1).tolist(),
        )  # waits for a GPU: the host must know how many rows arrive
        arrived, gates = (_Exchanged.apply(part, *sizes, self.group) for part in (Spread.apply(x, tokens, rows), gates))
        experts_here = torch.arange(received.numel(), device=x.device).remainder(received.shape[1])
        order = experts_here.repeat_interleave(received.flatten()).argsort(stable=True)  # by expert
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        y = experts(arrived, Routing(gates[order], order, back[:, None], received.sum(0)))
        return Collect.apply(_Exchanged.apply(y, *sizes[::-1], self.group), tokens, rows)


class _Exchanged(torch.autograd.Function):
    """An exchange of rows: `sent[r]` consecutive rows go to rank r, and `received[r]` come from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.way = received, sent, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, *ctx.way), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out
