"""FlashAttention's forward kernel: one program per block of queries of one head, which reads the key blocks it sees.

Query i sees `first[i] <= j <= i + ahead`, so a program's key blocks are one range in three parts: masked ones at the
start of a document or window, those that all queries see whole, and those on the diagonal. The softmax is online and in
base 2. Query blocks are launched last first, because they have the most keys.

FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 1); online softmax (Milakov & Gimelshein 2018,
arXiv 1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hardware import CUDA
from .flash_blocks import blocks_for, dot_precision

LOG2E = 1.4426950408889634
LOG2E_: tl.constexpr = tl.constexpr(LOG2E)
LN2_: tl.constexpr = tl.constexpr(0.6931471805599453)
# Lower than any score, and finite: for a row that sees no key of a block, exp2(LOWEST - LOWEST) is 1, not NaN.
LOWEST: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def program_place(time, heads, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks = tl.cdiv(time, ROWS)
    program = tl.program_id(0)
    return program % blocks, (program // blocks // heads).to(tl.int64), program // blocks % heads


@triton.jit
def head_of(base, batch, head, strides):  # type: ignore[no-untyped-def]
    return base + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[2]


@triton.jit
def load_rows(  # type: ignore[no-untyped-def]
    base, start, stride, time, ROWS: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr
):
    """Load ROWS rows from `start` of a (time, D) view; 0 for columns past D and, with EDGE, rows past `time`."""
    PADDED_D: tl.constexpr = triton.next_power_of_2(D)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED_D)
    pointers = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    if EDGE and D != PADDED_D:
        return tl.load(pointers, mask=(start + rows < time)[:, None] & (columns < D)[None, :], other=0.0)
    elif EDGE:
        return tl.load(pointers, mask=(start + rows < time)[:, None], other=0.0)
    elif D != PADDED_D:
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(base, start, stride, time, values, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store `values` (ROWS, PADDED_D) to a (time, D) view from row `start` on, cropped to the view."""
    rows, columns = tl.arange(0, values.shape[0]), tl.arange(0, values.shape[1])
    pointers = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    inside = (start + rows < time)[:, None] & (columns < D)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def key_range(  # type: ignore[no-untyped-def]
    first_row, start, time, key_time, ahead, QUERIES: tl.constexpr, KEYS: tl.constexpr
):
    """Return (begin, whole_begin, whole_end, end) of the keys that QUERIES queries from `start` on see.

    Every query sees all keys in whole_begin .. whole_end, and none outside begin .. end.
    """
    last = tl.minimum(start + QUERIES, time) - 1
    end = tl.minimum(last + ahead + 1, key_time)
    whole_end = tl.minimum(start + ahead + 1, key_time) // KEYS * KEYS
    begin = 0
    whole_begin = 0
    if first_row is not None:
        begin = tl.minimum(tl.load(first_row + start) // KEYS * KEYS, whole_end)
        whole_begin = tl.minimum(tl.cdiv(tl.load(first_row + last), KEYS) * KEYS, whole_end)
    return begin, whole_begin, whole_end, end


@triton.jit
def masked_block(index, begin, whole_begin, whole_end, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the start of masked block `index`, counted from `begin` to `whole_begin`, then from `whole_end` on."""
    ahead = (whole_begin - begin) // BLOCK
    return tl.where(index < ahead, begin + index * BLOCK, whole_end + (index - ahead) * BLOCK)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, total, highest, weights, scale_log2, visible, PRECISION: tl.constexpr
):
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
    p = tl.math.exp2(scores * scale_log2 - higher[:, None])
    shrink = tl.math.exp2(highest - higher)
    weights = weights * shrink + tl.sum(p, 1)
    total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision=PRECISION)
    return total, higher, weights


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    inputs,
    strides,
    First,
    first_batch,
    Out,
    Lse,
    scale_log2,
    heads,
    group,
    time,
    key_time,
    ahead,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write Out (batch, time, heads, D) and Lse (batch, heads, time), both contiguous; Q, K, V have any strides."""
    Q, K, V = inputs
    q_strides, k_strides, v_strides = strides
    block, batch, head = program_place(time, heads, QUERIES)
    start = (tl.cdiv(time, QUERIES) - 1 - block) * QUERIES
    k_base = head_of(K, batch, head // group, k_strides)
    v_base = head_of(V, batch, head // group, v_strides)
    first_row = None if First is None else First + batch * first_batch
    begin, whole_begin, whole_end, end = key_range(first_row, start, time, key_time, ahead, QUERIES, KEYS)

    rows, columns = start + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    q = load_rows(head_of(Q, batch, head, q_strides), start, q_strides[1], time, QUERIES, D, EDGE=True)
    total = tl.zeros(q.shape, dtype=tl.float32)
    highest = tl.full((QUERIES,), LOWEST, dtype=tl.float32)
    weights = tl.zeros((QUERIES,), dtype=tl.float32)

    for key_start in tl.range(whole_begin, whole_end, KEYS):
        k = load_rows(k_base, key_start, k_strides[1], key_time, KEYS, D, EDGE=False)
        v = load_rows(v_base, key_start, v_strides[1], key_time, KEYS, D, EDGE=False)
        total, highest, weights = _attend(q, k, v, total, highest, weights, scale_log2, None, PRECISION)

    if first_row is not None:
        first = tl.load(first_row + rows, mask=rows < time, other=0)
    for index in tl.range(0, (whole_begin - begin) // KEYS + tl.cdiv(end - whole_end, KEYS)):
        key_start = masked_block(index, begin, whole_begin, whole_end, KEYS)
        k = load_rows(k_base, key_start, k_strides[1], key_time, KEYS, D, EDGE=True)
        v = load_rows(v_base, key_start, v_strides[1], key_time, KEYS, D, EDGE=True)
        keys = key_start + columns
        visible = keys[None, :] <= tl.minimum(rows + ahead, key_time - 1)[:, None]
        if first_row is not None:
            visible &= keys[None, :] >= first[:, None]
        total, highest, weights = _attend(q, k, v, total, highest, weights, scale_log2, visible, PRECISION)

    out_base = Out + (batch * time * heads + head) * D
    # For a row that sees nothing, the output is 0 and the log-sum-exp -inf.
    store_rows(out_base, start, heads * D, time, total / tl.maximum(weights, 1e-30)[:, None], D)
    lse = highest * LN2_ + tl.log(weights)
    tl.store(Lse + (batch * heads + head) * time + rows, lse, mask=rows < time)


def forward(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor | None, scale: float, ahead: int = 0
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel.

    Args:
        query: (batch, time, heads, d), any strides with the last dimension contiguous.
        key, value: (batch, keys, kv_heads, d), likewise.
        first: (batch, time) int32, first key each query sees, rows contiguous (a batch stride of 0 is fine); None: 0.
        scale: factor on the scores, above 0.
        ahead: query i sees no key after i + ahead.

    Returns:
        out (batch, time, heads, d) in query's type, and the log-sum-exp of each row (batch, heads, time), fp32.
    """
    batch, time, heads, head_dim = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty((batch, heads, time), dtype=torch.float32, device=query.device)
    precision = dot_precision()
    launch = blocks_for(query, precision).forward
    CUDA.launch(
        forward_kernel,
        triton.cdiv(time, launch.QUERIES) * batch * heads,
        query,
        (query, key, value),
        (query.stride(), key.stride(), value.stride()),
        first,
        0 if first is None else first.stride(0),
        out,
        lse,
        scale * LOG2E,
        heads,
        heads // key.shape[2],
        time,
        key.shape[1],
        ahead,
        D=head_dim,
        PRECISION=precision,
        **launch._asdict(),
    )
    return out, lse
