"""Context parallelism: each sequence is split over the cp ranks. Keys and values travel round a ring during attention.

Special here:
- Rank r has the pieces r and 2 cp - 1 - r of 2 cp, so that causal work is equal at every step of the ring.
- A rank's tokens stay in order, so a query sees one range of a rank's keys, and each step is one product.
- Partial results are merged in fp32 by their log-sum-exp. The backward pass uses the final one, so that partial
  derivatives are those of the whole softmax. Those of keys and values travel with them back to their rank.

Liu et al. 2023, arXiv 2310.01889; Grattafiori et al. 2024 (Llama 3), arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from ..hardware import on_gpu
from ..model.backends import Backend
from ..model.shape import heads_at_a_time, query_block

# (queries of this rank, keys of a source, ahead): query i of the slice sees keys up to i + ahead of the slice.
Pair = tuple[slice, slice, int]
DENSE = torch.contiguous_format
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_derive = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def own_part(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Cut the sequence, dimension `dim` of x, into 2 cp pieces. Returns this rank's two."""
    pieces = x.unflatten(dim, (2 * group.size(), -1)).unbind(dim)
    return torch.cat([pieces[piece] for piece in _pieces(group.size(), group.rank())], dim)


def _pieces(cp: int, rank: int) -> tuple[int, int]:
    return rank, 2 * cp - 1 - rank


def mean_over_parts(x: Tensor, group: ProcessGroup) -> Tensor:
    x = x / group.size()
    dist.all_reduce(x, group=group)
    return x


def plain_pairs(cp: int, rank: int, source: int, piece: int) -> list[Pair]:
    """Return a list of one `Pair`: this rank's queries and the keys of rank `source` that they see under a causal mask.

    Each rank has an early and a late piece of `piece` tokens. Both query pieces see the early piece of a lower source;
    the late query piece sees both pieces of a higher one; on the same rank it is the causal triangle.
    """
    first, last, both = slice(0, piece), slice(piece, 2 * piece), slice(0, 2 * piece)
    return [(both, both, 0) if source == rank else (both, first, piece) if source < rank else (last, both, 2 * piece)]


def masked_pairs(cp: int, rank: int, source: int, piece: int, window: int | None, block: int) -> Iterator[Pair]:
    """Yield `Pair`s: slices of up to `block` queries of this rank, and of the keys of rank `source` that they may see.

    `piece`: half a rank's tokens.
    """
    for half, number in enumerate(_pieces(cp, rank)):
        for start in range(0, piece, block):
            stop = min(start + block, piece)
            low = 0 if window is None else number * piece + start - window + 1
            keys = slice(*(_before(at, cp, source, piece) for at in (low, number * piece + stop)))
            begin, count = half * piece + start, keys.stop - keys.start
            if count > 0:
                yield slice(begin, half * piece + stop), keys, begin - keys.start if source == rank else count


def _before(position: int, cp: int, source: int, piece: int) -> int:
    """Return how many tokens of rank `source` precede a position of the sequence; `piece`: half a rank's tokens."""
    return sum(min(max(position - number * piece, 0), piece) for number in _pieces(cp, source))


def _send_on(sent: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start to send a tensor to the next rank. Returns a function that waits for and returns the previous rank's."""
    cp, rank, received = group.size(), group.rank(), torch.empty_like(sent)
    send = P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % cp)
    receive = P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % cp)
    return partial(_arrived, dist.batch_isend_irecv([send, receive]), sent, received)


def _arrived(works: list[dist.Work], *tensors: Tensor) -> Tensor:
    for work in works:
        work.wait()
    return tensors[-1]


@dataclass(frozen=True)
class Ring(Backend):
    """Attention of this rank's queries over the keys of all ranks."""

    group: ProcessGroup
    attention: Callable[..., Tensor] = field(init=False)

    def __post_init__(self) -> None:
        # Not a decorator: that would import the compiler in every process that trains.
        object.__setattr__(self, "attention", torch.compiler.disable(_Attention.apply))

    def seen(self, tokens: Tensor, first: Tensor | None, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the first visible position of each of this rank's queries, (batch, time / cp), or None if all are 0.

        batch is 1 if all sequences have the same positions.
        """
        first = super().seen(tokens, first, window, dtype)
        if first is None:
            return None
        return own_part(first[:1] if first.stride(0) == 0 else first, 1, self.group)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        return self.attention(query, key, value, seen, self, window)

    def steps(
        self, key_value: Tensor, seen: Tensor | None, window: int | None
    ) -> Iterator[tuple[Tensor, list[tuple[Pair, Tensor | None]]]]:
        """Yield each rank's keys and values in turn, (2, batch, time / cp, kv_heads, d), while the next ones arrive.

        With them come slices of queries and keys (`Pair`), each with the first key that each query sees, counted in the
        slice (None: 0).
        """
        cp, rank, piece = self.group.size(), self.group.rank(), key_value.shape[2] // 2
        block = piece if self.name == "ours" else query_block(piece)
        for source in [(rank - step) % cp for step in range(cp)]:
            # The last step sends nothing.
            arrived = _send_on(key_value, self.group) if source != (rank + 1) % cp else None
            if seen is None:
                yield key_value, [(pair, None) for pair in plain_pairs(cp, rank, source, piece)]
            else:
                low, high = ((seen - number * piece).clamp_(0, piece) for number in _pieces(cp, source))
                first = low + high
                pairs = masked_pairs(cp, rank, source, piece, window, block)
                yield (
                    key_value,
                    [
                        (pair, (first[:, pair[0]] - pair[1].start).clamp_(0).expand(len(key_value[0]), -1))
                        for pair in pairs
                    ],
                )
            if arrived is not None:
                key_value = arrived()

    def forward(self, query: Tensor, key_value: Tensor, ahead: int, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return output (batch, time, heads, d) and log-sum-exp (batch, heads, time), -inf for a query without keys.

        Query i sees the keys from first[i] (None: 0) to i + ahead.
        """
        if self.name == "ours":
            return torch.ops.isoflop.flash_forward(query, *key_value, first, query.shape[-1] ** -0.5, ahead)
        mask, blind = _mask(query, key_value.shape[2], ahead, first)
        inputs = (x.transpose(1, 2) for x in (query, *key_value))
        out, lse = _attend(*inputs, 0.0, mask is None and ahead == 0, attn_mask=mask)
        return out.transpose(1, 2), lse if blind is None else lse.masked_fill(blind, float("-inf"))

    def backward(
        self, forward: tuple[Tensor, ...], key_value: Tensor, ahead: int, first: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return derivatives of query, key and value.

        `forward`: the output's derivative, query, output, and log-sum-exp over the keys of all ranks.
        """
        grad, query, out, lse = forward
        if self.name == "ours":
            scale = query.shape[-1] ** -0.5
            return torch.ops.isoflop.flash_backward(grad, query, *key_value, out, lse, first, scale, ahead)
        mask, _ = _mask(query, key_value.shape[2], ahead, first)
        inputs = (x.transpose(1, 2) for x in (grad, query, *key_value, out))
        grads = _derive(*inputs, lse, 0.0, mask is None and ahead == 0, attn_mask=mask)
        return tuple(x.transpose(1, 2) for x in grads)


def ring_over(backend: Backend, group: ProcessGroup) -> Ring:
    return Ring(backend.name, backend.kernel, "first", group)


def _mask(query: Tensor, keys: int, ahead: int, first: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask to add to scores, (batch, 1, queries, keys), and which queries see no key, (batch, 1, queries).

    Query i sees keys first[i] … i + ahead. Both are None without `first`.
    """
    if first is None:
        return None, None
    row, column = (torch.arange(count, device=query.device) for count in (query.shape[1], keys))
    first = first[:1] if first.stride(0) == 0 else first
    hidden = (column < first[:, None, :, None]) | (column > row[:, None] + ahead)
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    return mask.expand(len(query), -1, -1, -1), hidden.all(-1)


class _Attention(torch.autograd.Function):
    """With O_s, L_s the output and log-sum-exp of step s of the ring:

        forward   L = log sum_s exp L_s,   O = sum_s exp(L_s - L) O_s
        backward  P_s = exp(S_s - L);  dV_s = P_s^T dO,  dS_s = P_s (dO V_s^T - rowsum(dO O)),  dQ = sum_s dS_s K_s, …

    This rank's query, key, value and output, and L, are saved.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, ring: Ring, window: int | None
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out, lse = torch.empty_like(query, memory_format=DENSE), query.new_empty(query[..., 0].mT.shape, dtype=wide)
        for heads, served in _turns(query, key):
            total, norm = torch.empty_like(query[:, :, heads], dtype=wide, memory_format=DENSE), lse[:, heads]
            pair = key[:, :, served], value[:, :, served]
            for step, (key_value, pairs) in enumerate(ring.steps(torch.stack(pair), seen, window)):
                for (rows, keys, ahead), first in pairs:
                    part, part_norm = ring.forward(query[:, rows, heads], key_value[:, :, keys], ahead, first)
                    if step == 0:  # here every query sees at least itself
                        total[:, rows], norm[:, :, rows] = part, part_norm
                    else:
                        # exp(part_norm) / (exp(part_norm) + exp(norm)), without overflow.
                        weight = torch.sigmoid(part_norm - norm[:, :, rows]).transpose(1, 2).unsqueeze(-1)
                        total[:, rows].lerp_(part.to(wide), weight)
                        norm[:, :, rows] = torch.logaddexp(norm[:, :, rows], part_norm)
            out[:, :, heads] = total
        ctx.ring, ctx.window = ring, window
        ctx.save_for_backward(query, key, value, seen, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen, out, lse = ctx.saved_tensors
        d_query, d_key, d_value = (torch.empty_like(x, memory_format=DENSE) for x in (query, key, value))
        grad = grad.contiguous()
        for heads, served in _turns(query, key):
            total = torch.zeros_like(query[:, :, heads], dtype=lse.dtype, memory_format=DENSE)
            back: Any = None  # waits for the derivatives of the current keys and values from the rank before
            pair = key[:, :, served], value[:, :, served]
            for key_value, pairs in ctx.ring.steps(torch.stack(pair), seen, ctx.window):
                d_key_value = torch.zeros_like(key_value, dtype=lse.dtype)
                for (rows, keys, ahead), first in pairs:
                    forward = *(x[:, rows, heads] for x in (grad, query, out)), lse[:, heads, rows]
                    dq, dk, dv = ctx.ring.backward(forward, key_value[:, :, keys], ahead, first)
                    total[:, rows] += dq
                    d_key_value[0, :, keys] += dk
                    d_key_value[1, :, keys] += dv
                    del dq, dk, dv  # free before the next are allocated
                if back is not None:
                    d_key_value += back()
                back = _send_on(d_key_value, ctx.ring.group)
            # After cp steps they are back at their rank.
            d_query[:, :, heads], (d_key[:, :, served], d_value[:, :, served]) = total, back()
        return d_query, d_key, d_value, None, None, None


def _turns(query: Tensor, key: Tensor) -> list[tuple[slice, slice]]:
    """Return the slices of query heads, each with the slice of its key/value heads, that go round the ring in turn."""
    kv_heads, group = key.shape[2], query.shape[2] // key.shape[2]
    step = heads_at_a_time(kv_heads, key[:, :, 0].numel(), "cuda" if on_gpu(key) else "cpu")
    return [(slice(at * group, (at + step) * group), slice(at, at + step)) for at in range(0, kv_heads, step)]
