"""A mixture of experts: each token goes through a few of many feed-forwards. No token is dropped.

The biases that balance the load are parameters. Their gradient is an expert's number of excess tokens, summed over
micro-batches and ranks like any gradient; `optimizer/sign.py` makes the step. The load-balancing loss is computed per
sequence, so it does not depend on the mesh.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..hardware import on_gpu
from .block import gated
from .strategy import ALONE


class Routing(NamedTuple):
    """Assignment of n tokens to k experts each, as n k rows sorted by expert, then by token."""

    gates: Tensor  # (n k,) by row
    tokens: Tensor  # (n k,) token of each row
    rows: Tensor  # (n, k) rows of each token, ascending
    counts: Tensor  # (experts,) rows of each expert, int64


class Router(nn.Module):
    """Scores and choice of experts, in fp32 for any type of the tokens.

    With scores s = sigmoid(x W^T), or a softmax, the k experts with the largest s + b are chosen and weighted by s,
    optionally normalised to sum to 1 (Shazeer et al. 2017; DeepSeek-V3, arXiv 2412.19437, section 2.1.2; biases b: Wang
    et al. 2024, arXiv 2408.15664). The gradients of two penalties are added to that of the loss, where P are the scores
    normalised to sum to 1, and f an expert's share of a sequence's rows, times the number of experts:

        balance_loss * mean over sequences of sum_e f_e mean P_e       (ibid., eq. 17-20; Switch, arXiv 2101.03961)
        router_z_loss * mean over tokens of logsumexp(x W^T)^2         (ST-MoE, arXiv 2202.08906, eq. 5)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.balance = nn.Parameter(torch.empty(config.experts)) if config.balance_rate > 0 else None
        self.load: Tensor | None = None  # (experts,) tokens of each since `GPT.loads`, in training
        self.strategy = ALONE

    def forward(self, x: Tensor, length: int) -> tuple[Routing, Tensor | None]:
        """Choose experts for tokens (n, width), `length` per sequence. Returns also a penalty (None: no gradients)."""
        config, k = self.config, self.config.experts_per_token
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.sigmoid() if config.gate == "sigmoid" else logits.softmax(-1)
        biased = scores if self.balance is None else scores + self.balance.to(wide)
        chosen = biased.detach().topk(k, dim=-1).indices.sort(-1).values  # the biases choose, but do not weigh
        gates = scores.gather(1, chosen)
        if config.gates_normalised:
            # 1e-20 as in DeepSeek-V3: sigmoids may all round to 0.
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
        counts = torch.zeros(config.experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        if self.training:
            with torch.no_grad():
                self.load = counts if self.load is None else self.load + counts
        penalty = self._penalty(logits, scores, chosen, length) if torch.is_grad_enabled() else None
        if penalty is not None and self.balance is not None:
            excess = counts - len(x) * k / config.experts
            penalty = penalty + _Excess.apply(self.balance, excess).to(penalty.dtype)
        # Stable: an expert's tokens stay in order, so sums round the same every time.
        order = chosen.flatten().argsort(stable=True)
        rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return Routing(gates.flatten()[order].to(x.dtype), order // k, rows.view(-1, k), counts), penalty

    def _penalty(self, logits: Tensor, scores: Tensor, chosen: Tensor, length: int) -> Tensor:
        config, total = self.config, logits.new_zeros(())
        if config.balance_loss:
            by_sequence = chosen.view(-1, length * config.experts_per_token)  # one row per sequence
            rows = torch.zeros(len(by_sequence), config.experts, dtype=logits.dtype, device=logits.device)
            rows.scatter_add_(1, by_sequence, torch.ones_like(by_sequence, dtype=rows.dtype))
            probabilities = (scores / scores.sum(-1, keepdim=True)).view(len(by_sequence), length, -1).mean(1)
            share = self.strategy.mean(rows) * (config.experts / by_sequence.shape[1])
            total = total + config.balance_loss * (share * probabilities).sum(-1).mean()
        if config.router_z_loss:
            total = total + config.router_z_loss * logits.logsumexp(-1).square().mean()
        return total * self.strategy.share


class _Excess(torch.autograd.Function):
    """A zero whose gradient with respect to the biases is `excess`, independent of loss scaling."""

    @staticmethod
    def forward(ctx: Any, balance: Tensor, excess: Tensor) -> Tensor:
        ctx.save_for_backward(excess)
        return balance.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (excess,) = ctx.saved_tensors
        return excess, None


class Penalised(torch.autograd.Function):
    """The loss, unchanged; the penalty gets the gradient that it would have as a term."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, penalty: Tensor) -> Tensor:
        ctx.dtype = penalty.dtype
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.to(ctx.dtype)


class ExpertMLP(nn.Module):
    """Equal SwiGLU feed-forwards, with stacked weights: (n, width) -> (n, width), summed over a token's experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = config.experts, config.moe_hidden, config.width
        self.gate_up, self.down = Stack(2 * shape[0] * shape[1], shape[2]), Stack(shape[0] * shape[2], shape[1])

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        return _ExpertMLP.apply(x, routing.gates, self.gate_up.weight, self.down.weight, *routing[1:])


class Stack(nn.Module):
    """A module with only a weight, named as in `nn.Linear`."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


class _ExpertMLP(torch.autograd.Function):
    """With m rows X of tokens sorted by expert, gates g (m,), and for each expert G (2 h, w) and W (w, h), as stacks:

        forward   A (m, 2 h) = X G^T,   B (m, h) = silu(gate) up,   Y (m, w) = (g B) W^T
        backward  dB = dY W,  dg = sum dB B,  dA = swiglu'(g dB),  dX = dA G,  dW = dY^T (g B),  dG = dA^T X

    A token's result is the sum of its rows of Y. The tokens, A and g are saved.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, tokens: Tensor, rows: Tensor, counts: Tensor
    ) -> Tensor:
        first, last = _stacks(gate_up, down, counts)
        products, y = x.new_empty(len(tokens), first.shape[1]), x.new_empty(len(tokens), x.shape[1])
        for part_rows, expert in _parts(counts, x.dtype):
            part = product(x.index_select(0, tokens[part_rows]), first.mT, expert, products[part_rows])
            product(gated(part).mul_(gates[part_rows, None]), last.mT, expert, y[part_rows])
        ctx.save_for_backward(x, gates, products, gate_up, down, tokens, rows, counts)
        return _summed(y, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, products, gate_up, down, tokens, rows, counts = ctx.saved_tensors
        first, last = _stacks(gate_up, down, counts)
        d_first, d_last, d_gates = torch.zeros_like(first), torch.zeros_like(last), torch.empty_like(gates)
        dx, grad = x.new_empty(len(tokens), x.shape[1]), grad.contiguous()
        for part_rows, expert in _parts(counts, x.dtype):
            dy, gate = grad.index_select(0, tokens[part_rows]), gates[part_rows, None]
            first_half, up = products[part_rows].chunk(2, dim=-1)
            curve = F.silu(first_half)
            inner = curve * up
            d_inner = product(dy, last, expert, torch.empty_like(inner))
            d_gates[part_rows] = (inner * d_inner).sum(-1)
            outer(dy, inner.mul_(gate), expert, d_last)
            d_part = torch.empty_like(products[part_rows])
            d_first_half, d_up = d_part.chunk(2, dim=-1)
            torch.mul(d_inner.mul_(gate), curve, out=d_up)
            torch.ops.aten.silu_backward.grad_input(d_inner.mul_(up), first_half, grad_input=d_first_half)
            outer(d_part, x.index_select(0, tokens[part_rows]), expert, d_first)
            product(d_part, first, expert, dx[part_rows])
        return _summed(dx, rows), d_gates, d_first.view_as(gate_up), d_last.view_as(down), None, None, None


def _stacks(gate_up: Tensor, down: Tensor, counts: Tensor) -> list[Tensor]:
    """View each weight as (experts, rows, columns)."""
    return [weight.view(len(counts), -1, weight.shape[1]) for weight in (gate_up, down)]


Expert = int | Tensor  # its number; on GPUs in bf16 all experts, by the ends of their rows, on the device


def _parts(counts: Tensor, dtype: torch.dtype) -> list[tuple[slice, Expert]]:
    """Return (slice of rows, expert) for each expert that has rows, or on GPUs in bf16 one pair for all experts.

    Rows are sorted by expert, `counts` of each.
    """
    if on_gpu(counts) and dtype == torch.bfloat16:  # no grouped product of other types; below, `tolist` waits for a GPU
        return [(slice(None), counts.cumsum(0).to(torch.int32))]
    ends = list(accumulate(counts.tolist()))
    return [(slice(a, b), number) for number, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if b > a]


def product(x: Tensor, weights: Tensor, expert: Expert, out: Tensor) -> Tensor:
    """Multiply rows (m, i) by their expert's matrix in weights (experts, i, o). Fills and returns out (m, o)."""
    if isinstance(expert, int):
        return torch.mm(x, weights[expert], out=out)
    return out.copy_(F.grouped_mm(x, weights, offs=expert))


def outer(left: Tensor, right: Tensor, expert: Expert, out: Tensor) -> None:
    """Write left^T right, for the rows (m, a) and (m, b) of an expert, to its matrix in out (experts, a, b)."""
    if isinstance(expert, int):
        torch.mm(left.mT, right, out=out[expert])
    else:
        out.copy_(F.grouped_mm(left.mT, right, offs=expert))


def balance_of(loads: Tensor) -> dict[str, list[float]]:
    """Measure how evenly each block's tokens spread over experts, from their numbers `loads` (blocks, experts).

    load_max: largest number over the mean. load_entropy: entropy of the experts' shares over its maximum. dead_experts:
    number without tokens.
    """
    share = loads / loads.sum(-1, keepdim=True)  # (blocks, experts)
    return {
        "load_max": (share.amax(-1) * loads.shape[1]).tolist(),
        "load_entropy": (torch.special.entr(share).sum(-1) / math.log(loads.shape[1])).tolist(),
        "dead_experts": (loads == 0).sum(-1).tolist(),
    }


class Spread(torch.autograd.Function):
    """One row per token and chosen expert, (n, width) -> (n k, width); gradients sum over the rows of a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return _summed(grad, rows), None, None


class Collect(torch.autograd.Function):
    """The sum over each token's rows, (n k, width) -> (n, width)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return _summed(y, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return grad[tokens], None, None


def _summed(y: Tensor, rows: Tensor) -> Tensor:
    return F.embedding_bag(rows, y, mode="sum")  # one kernel gathers and adds


class MoE(nn.Module):
    """The chosen experts plus a shared feed-forward: (…, time, width) -> (…, time, width)."""

    def __init__(self, config: ModelConfig, shared: nn.Module | None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = Router(config), ExpertMLP(config), shared
        self.strategy = ALONE

    def forward(self, x: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        """Return output, shaped like x (…, width), and penalty (None: no gradients). `length`: tokens per sequence."""
        flat = self.strategy.enter(x).flatten(0, -2)
        routing, penalty = self.router(flat, length)
        y = self.strategy.experts(self.experts, flat, routing)
        y = self.strategy.leave(y).view(x.shape)
        return y if self.shared is None else y + self.shared(x), penalty
