"""Context parallelism: every sequence shared out over the cp ranks, whose keys and values travel round a ring while
blocks of attention compute.

Special here:
- rank r has the pieces r and 2 cp - 1 - r of 2 cp, so that all have the same causal work at every step of the ring;
- a rank's tokens stay in their order, so what a query sees of anybody's keys is one range, and each step one product;
- heads go round the ring some at a time, where tokens are many: what travels takes less room than what stays;
- partial results are merged in fp32 by their log-sum-exp. The backward pass hands every block the whole one, so that
  the partial derivatives are those of the whole softmax; those of keys and values travel with them, and end at home.

Liu et al. 2023, arXiv 2310.01889; Grattafiori et al. 2024 (Llama 3), arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from ..hardware import on_gpu
from ..model.backends import Backend
from ..model.gpt import GPT
from ..model.shape import heads_at_a_time, query_block


def share_sequences(gpt: GPT, group: ProcessGroup) -> None:
    """Makes a model's forward pass that of this rank's tokens of the whole sequences that it is given."""
    gpt.own = partial(own_part, group=group)
    gpt.shared = lambda backend: Ring(backend.name, backend.kernel, "first", group)
    gpt.use(gpt.backend)
    for moe in gpt.mixtures:
        moe.router.whole = partial(_mean, group=group)


def own_part(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's two pieces of the sequence along a dimension."""
    pieces = x.unflatten(dim, (2 * group.size(), -1)).unbind(dim)
    return torch.cat([pieces[piece] for piece in _pieces(group.size(), group.rank())], dim)


def _pieces(cp: int, rank: int) -> tuple[int, int]:
    return rank, 2 * cp - 1 - rank


def _mean(x: Tensor, group: ProcessGroup) -> Tensor:
    x = x / group.size()
    dist.all_reduce(x, group=group)
    return x


class Pair(NamedTuple):
    """Queries of a rank and keys of a source; query i of these sees the keys up to i + ahead of those."""

    rows: slice
    keys: slice
    ahead: int


def plain_pairs(cp: int, rank: int, source: int, piece: int) -> list[Pair]:
    """Where a query sees all before it: one product, of 2 x 1 pieces, or at home of the triangle of 2 x 2."""
    if source == rank:
        return [Pair(slice(0, 2 * piece), slice(0, 2 * piece), 0)]
    if source < rank:
        return [Pair(slice(0, 2 * piece), slice(0, piece), piece)]
    return [Pair(slice(piece, 2 * piece), slice(0, 2 * piece), 2 * piece)]


def masked_pairs(cp: int, rank: int, source: int, piece: int, window: int | None, block: int) -> Iterator[Pair]:
    """Blocks of queries, each with the keys of a source that any of them may see; none where that is none."""
    for half, number in enumerate(_pieces(cp, rank)):
        for start in range(0, piece, block):
            stop = min(start + block, piece)
            first, last = number * piece + start, number * piece + stop
            low = 0 if window is None else max(0, first - window + 1)
            keys = slice(_before(low, cp, source, piece), _before(last, cp, source, piece))
            if keys.start < keys.stop:
                begin = half * piece + start
                ahead = begin - keys.start if source == rank else keys.stop - keys.start
                yield Pair(slice(begin, half * piece + stop), keys, ahead)


def _before(position: int, cp: int, source: int, piece: int) -> int:
    """How many of a source's tokens come before a position."""
    return sum(min(max(position - number * piece, 0), piece) for number in _pieces(cp, source))


class _Hop:
    """A tensor on its way to the next rank of the ring, and another from the one before."""

    def __init__(self, sent: Tensor, group: ProcessGroup) -> None:
        cp, rank = group.size(), group.rank()
        self.sent, self.received = sent, torch.empty_like(sent)
        there = P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % cp)
        here = P2POp(dist.irecv, self.received, group=group, group_peer=(rank - 1) % cp)
        self.works = dist.batch_isend_irecv([there, here])

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class Ring(Backend):
    """Attention of this rank's queries over the keys of all, each step by the backend's own kernel."""

    group: ProcessGroup
    attention: Callable[..., Tensor] = field(init=False)

    def __post_init__(self) -> None:
        # Here and not on a function, because that imports the compiler wherever a process trains.
        object.__setattr__(self, "attention", torch.compiler.disable(_Attention.apply))

    def seen(self, tokens: Tensor, first: Tensor | None, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """The first position that each own query sees, (batch, time / cp); None: 0 for all. Tokens are whole rows."""
        first = super().seen(tokens, first, window, dtype)
        if first is None:
            return None
        rows = first[:1] if first.stride(0) == 0 else first
        return own_part(rows, 1, self.group).expand(len(first), -1)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        return self.attention(query, key, value, seen, self, window)

    def steps(
        self, like: Tensor, seen: Tensor | None, window: int | None
    ) -> Iterator[list[tuple[Pair, Tensor | None]]]:
        """Of every step of the ring the pairs, each with the first key that every query of it sees."""
        cp, rank, piece = self.group.size(), self.group.rank(), like.shape[1] // 2
        block = piece if self.name == "ours" else query_block(piece)
        once = seen[:1] if seen is not None and seen.stride(0) == 0 else seen  # where it is the same for all rows
        for source in [(rank - step) % cp for step in range(cp)]:
            if once is None or seen is None:
                yield [(pair, None) for pair in plain_pairs(cp, rank, source, piece)]
                continue
            low, high = ((once - number * piece).clamp(0, piece) for number in _pieces(cp, source))
            yield [
                (pair, (low + high)[:, pair.rows].sub(pair.keys.start).clamp_(min=0).expand(len(seen), -1))
                for pair in masked_pairs(cp, rank, source, piece, window, block)
            ]

    def forward(self, query: Tensor, here: Tensor, ahead: int, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output (batch, time, heads, d) and log-sum-exp (batch, heads, time), -inf where a query sees nothing.

        `here` is (2, batch, keys, kv_heads, d), keys and values.
        """
        if self.name == "ours":
            return torch.ops.isoflop.flash_forward(query, *here, first, query.shape[-1] ** -0.5, ahead)
        mask, blind = _mask(query, here.shape[2], ahead, first)
        inputs = (x.transpose(1, 2) for x in (query, *here))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *inputs, 0.0, mask is None and ahead == 0, attn_mask=mask
        )
        return out.transpose(1, 2), lse if blind is None else lse.masked_fill(blind, float("-inf"))

    def backward(
        self, forward: tuple[Tensor, ...], here: Tensor, ahead: int, first: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Derivatives of query, key and value; of the forward pass the output's derivative, query, output and
        log-sum-exp over all keys there are.
        """
        grad, query, out, lse = forward
        if self.name == "ours":
            scale = query.shape[-1] ** -0.5
            return torch.ops.isoflop.flash_backward(grad, None, query, *here, out, lse, first, scale, ahead)
        mask, _ = _mask(query, here.shape[2], ahead, first)
        inputs = (x.transpose(1, 2) for x in (grad, query, *here, out))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, lse, 0.0, mask is None and ahead == 0, attn_mask=mask
        )
        return tuple(x.transpose(1, 2) for x in grads)


def _mask(query: Tensor, keys: int, ahead: int, first: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores, (batch, 1, queries, keys), and the queries that see nothing, (batch, 1, queries)."""
    if first is None:
        return None, None
    row, column = (torch.arange(count, device=query.device) for count in (query.shape[1], keys))
    first = first[:1] if first.stride(0) == 0 else first
    hidden = (column < first[:, None, :, None]) | (column > row[:, None] + ahead)
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    return mask.expand(len(query), -1, -1, -1), hidden.all(-1)


class _Attention(torch.autograd.Function):
    """With O_s, L_s the output and log-sum-exp of step s of the ring, over the keys that were here:

        forward   L = log sum_s exp L_s,   O = sum_s exp(L_s - L) O_s
        backward  P_s = exp(S_s - L);  dV_s = P_s^T dO,  dS_s = P_s (dO V_s^T - rowsum(dO O)),  dQ = sum_s dS_s K_s, …

    Kept are the rank's own query, key, value and output, and L.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, ring: Ring, window: int | None
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = torch.empty(query.shape[0], query.shape[2], query.shape[1], dtype=wide, device=query.device)
        for heads, served in _turns(query, key):
            pair = key[:, :, served], value[:, :, served]
            out[:, :, heads], lse[:, heads] = _forward(query[:, :, heads], torch.stack(pair), seen, ring, window, wide)
        ctx.ring, ctx.window = ring, window
        ctx.save_for_backward(query, key, value, seen, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen, out, lse = ctx.saved_tensors
        d_query, d_key, d_value = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
        )
        grad = grad.contiguous()
        for heads, served in _turns(query, key):
            pair = key[:, :, served], value[:, :, served]
            forward = grad[:, :, heads], query[:, :, heads], out[:, :, heads], lse[:, heads]
            d_query[:, :, heads], (d_key[:, :, served], d_value[:, :, served]) = _backward(
                *forward, torch.stack(pair), seen, ctx.ring, ctx.window
            )
        return d_query, d_key, d_value, None, None, None


def _turns(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads of queries, with those of keys that serve them, that go round the ring together."""
    kv_heads, group = key.shape[2], query.shape[2] // key.shape[2]
    together = heads_at_a_time(kv_heads, key.shape[0] * key.shape[1] * key.shape[3], "cuda" if on_gpu(key) else "cpu")
    for start in range(0, kv_heads, together):
        stop = min(start + together, kv_heads)
        yield slice(start * group, stop * group), slice(start, stop)


def _forward(
    query: Tensor, here: Tensor, seen: Tensor | None, ring: Ring, window: int | None, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    batch, time, heads, _ = query.shape
    out = torch.empty_like(query, dtype=wide, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, heads, time, dtype=wide, device=query.device)
    last = ring.group.size() - 1
    for step, pairs in enumerate(ring.steps(query, seen, window)):
        hop = _Hop(here, ring.group) if step < last else None
        for (rows, keys, ahead), first in pairs:
            part, part_lse = ring.forward(query[:, rows], here[:, :, keys], ahead, first)
            if step == 0:  # where every query sees itself
                out[:, rows], lse[:, :, rows] = part, part_lse
            else:
                weight = torch.sigmoid(part_lse - lse[:, :, rows]).transpose(1, 2).unsqueeze(-1)
                out[:, rows].lerp_(part.to(wide), weight)
                torch.logaddexp(lse[:, :, rows], part_lse, out=lse[:, :, rows])
        here = here if hop is None else hop.wait()
    return out, lse


def _backward(
    grad: Tensor, query: Tensor, out: Tensor, lse: Tensor,
    here: Tensor, seen: Tensor | None, ring: Ring, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Derivatives of queries, and of keys and values, (2, …)."""
    d_query = torch.zeros_like(query, dtype=lse.dtype, memory_format=torch.contiguous_format)
    last, back = ring.group.size() - 1, None
    for step, pairs in enumerate(ring.steps(query, seen, window)):
        hop = _Hop(here, ring.group) if step < last else None
        d_here = torch.zeros_like(here, dtype=lse.dtype)
        for (rows, keys, ahead), first in pairs:
            forward = grad[:, rows], query[:, rows], out[:, rows], lse[:, :, rows]
            dq, dk, dv = ring.backward(forward, here[:, :, keys], ahead, first)
            d_query[:, rows] += dq
            d_here[0, :, keys] += dk
            d_here[1, :, keys] += dv
            del dq, dk, dv  # before the next are made
        if back is not None:
            d_here += back.wait()
            back = None
        back = _Hop(d_here, ring.group)
        here, hop = here if hop is None else hop.wait(), None
    assert back is not None
    return d_query, back.wait()
