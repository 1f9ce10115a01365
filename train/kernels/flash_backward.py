"""FlashAttention's backward kernels: weights are recomputed from the log-sum-exp; without atomics, so deterministic.

With S = scale Q K^T, P = exp(S - lse) and delta = rowsum(dO * O):
    dV = P^T dO,   dP = dO V^T,   dS = P * (dP - delta),   dQ = scale dS K,   dK = scale dS^T Q.

Three launches: delta; dK and dV, one program per block of keys; dQ, one per block of queries. The last two recompute
S and dP: 7 products, where atomic sums of dQ would need 5. Transposed scores make P^T and dS^T left operands in
registers.

FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hardware import CUDA
from .flash_blocks import blocks_for, dot_precision
from .flash_forward import LOG2E, LOG2E_, head_of, key_range, load_rows, masked_block, program_place, store_rows


@triton.jit
def delta_kernel(  # type: ignore[no-untyped-def]
    Grad, Out, Delta, grad_strides, heads, time, D: tl.constexpr, QUERIES: tl.constexpr
):
    """Write Delta (batch, heads, time), the rowsum(dO * O) that the other kernels subtract from dP."""
    block, batch, head = program_place(time, heads, QUERIES)
    start = block * QUERIES
    rows = start + tl.arange(0, QUERIES)
    grad = load_rows(head_of(Grad, batch, head, grad_strides), start, grad_strides[1], time, QUERIES, D, EDGE=True)
    out = load_rows(Out + (batch * time * heads + head) * D, start, heads * D, time, QUERIES, D, EDGE=True)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(Delta + (batch * heads + head) * time + rows, delta, mask=rows < time)


@triton.jit
def _key_grads(  # type: ignore[no-untyped-def]
    dk,
    dv,
    key_block,
    query_head,
    first_row,
    start,
    time,
    ahead,
    scale_log2,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the terms of QUERIES queries from `start` on to dk and dv (keys, D), and return both."""
    k, v, keys = key_block
    q_base, q_stride, grad_base, grad_stride, lse_row, delta_row = query_head
    rows = start + tl.arange(0, QUERIES)
    q = load_rows(q_base, start, q_stride, time, QUERIES, D, EDGE=MASKED)
    grad = load_rows(grad_base, start, grad_stride, time, QUERIES, D, EDGE=MASKED)
    if MASKED:
        lse = tl.load(lse_row + rows, mask=rows < time, other=float("inf"))  # rows past the end get weights of 0
        delta = tl.load(delta_row + rows, mask=rows < time, other=0.0)
    else:
        lse = tl.load(lse_row + rows)
        delta = tl.load(delta_row + rows)
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    p = tl.math.exp2(scores * scale_log2 - (lse * LOG2E_)[None, :])  # GPUs have exp2, not exp
    if MASKED:
        visible = keys[:, None] <= rows[None, :] + ahead
        if first_row is not None:
            first = tl.load(first_row + rows, mask=rows < time, other=0)
            visible &= keys[:, None] >= first[None, :]
        p = tl.where(visible, p, 0.0)
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_kernel(  # type: ignore[no-untyped-def]
    inputs,
    strides,
    First,
    first_batch,
    scale,
    scale_log2,
    Ends,
    ends_batch,
    DK,
    DV,
    kv_heads,
    group,
    time,
    key_time,
    ahead,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write DK and DV (batch, keys, kv_heads, D), contiguous.

    Ends (batch, blocks, 2), from `query_ends`: where the queries that see each block of keys end; None without First.
    """
    Q, K, V, Grad, Lse, Delta = inputs
    q_strides, k_strides, v_strides, grad_strides = strides
    # The first keys have the most queries, and are launched first.
    block, batch, kv_head = program_place(key_time, kv_heads, KEYS)
    start = block * KEYS
    first_row = None if First is None else First + batch * first_batch
    keys = start + tl.arange(0, KEYS)

    # Queries from `begin` to `whole_begin` are on the diagonal, those up to `whole_end` see the whole block, and those
    # up to `end` may see a part of it.
    end = time
    whole_end = time // QUERIES * QUERIES
    if First is not None:
        whole_end = tl.load(Ends + batch * ends_batch + block * 2) // QUERIES * QUERIES
        end = tl.load(Ends + batch * ends_batch + block * 2 + 1)
    begin = tl.maximum(start - ahead, 0) // QUERIES * QUERIES
    whole_begin = tl.cdiv(tl.minimum(tl.maximum(start + KEYS - 1 - ahead, 0), end), QUERIES) * QUERIES
    whole_begin = tl.maximum(whole_begin, begin)
    whole_end = tl.maximum(whole_end, whole_begin)
    masked = (whole_begin - begin) // QUERIES + tl.cdiv(tl.maximum(end - whole_end, 0), QUERIES)

    k = load_rows(head_of(K, batch, kv_head, k_strides), start, k_strides[1], key_time, KEYS, D, EDGE=True)
    v = load_rows(head_of(V, batch, kv_head, v_strides), start, v_strides[1], key_time, KEYS, D, EDGE=True)
    key_block = (k, v, keys)
    dk = tl.zeros(k.shape, dtype=tl.float32)
    dv = tl.zeros(v.shape, dtype=tl.float32)
    q_base = head_of(Q, batch, kv_head * group, q_strides)
    grad_base = head_of(Grad, batch, kv_head * group, grad_strides)
    lse_row = Lse + (batch * kv_heads + kv_head) * group * time
    delta_row = Delta + (batch * kv_heads + kv_head) * group * time
    # disable_licm: hoisting out of these loops saves little, and would make other values spill registers.
    for _ in tl.range(0, group, disable_licm=True):
        head = (q_base, q_strides[1], grad_base, grad_strides[1], lse_row, delta_row)
        for at in tl.range(whole_begin, whole_end, QUERIES):
            dk, dv = _key_grads(
                dk, dv, key_block, head, first_row, at, time, ahead, scale_log2, D, QUERIES, PRECISION, MASKED=False
            )
        for index in tl.range(0, masked, disable_licm=True):
            at = masked_block(index, begin, whole_begin, whole_end, QUERIES)
            dk, dv = _key_grads(
                dk, dv, key_block, head, first_row, at, time, ahead, scale_log2, D, QUERIES, PRECISION, MASKED=True
            )
        q_base += q_strides[2]
        grad_base += grad_strides[2]
        lse_row += time
        delta_row += time
    base = (batch * key_time * kv_heads + kv_head) * D
    store_rows(DK + base, start, kv_heads * D, key_time, dk * scale, D)
    store_rows(DV + base, start, kv_heads * D, key_time, dv, D)


@triton.jit
def _query_grad(  # type: ignore[no-untyped-def]
    q, grad, lse_log2, delta, dq, k, v, scale_log2, visible, PRECISION: tl.constexpr
):
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p = tl.math.exp2(scores * scale_log2 - lse_log2[:, None])
    if visible is not None:
        p = tl.where(visible, p, 0.0)
    dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def query_kernel(  # type: ignore[no-untyped-def]
    inputs,
    strides,
    First,
    first_batch,
    scale,
    scale_log2,
    DQ,
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
    """Write DQ (batch, time, heads, D), contiguous."""
    Q, K, V, Grad, Lse, Delta = inputs
    q_strides, k_strides, v_strides, grad_strides = strides
    block, batch, head = program_place(time, heads, QUERIES)
    start = (tl.cdiv(time, QUERIES) - 1 - block) * QUERIES  # the last queries see the most keys, and are launched first
    k_base = head_of(K, batch, head // group, k_strides)
    v_base = head_of(V, batch, head // group, v_strides)
    first_row = None if First is None else First + batch * first_batch
    begin, whole_begin, whole_end, end = key_range(first_row, start, time, key_time, ahead, QUERIES, KEYS)

    rows, columns = start + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    line = (batch * heads + head) * time + rows
    q = load_rows(head_of(Q, batch, head, q_strides), start, q_strides[1], time, QUERIES, D, EDGE=True)
    grad = load_rows(head_of(Grad, batch, head, grad_strides), start, grad_strides[1], time, QUERIES, D, EDGE=True)
    lse_log2 = tl.load(Lse + line, mask=rows < time, other=float("inf")) * LOG2E_
    delta = tl.load(Delta + line, mask=rows < time, other=0.0)
    dq = tl.zeros(q.shape, dtype=tl.float32)

    for key_start in tl.range(whole_begin, whole_end, KEYS):
        k = load_rows(k_base, key_start, k_strides[1], key_time, KEYS, D, EDGE=False)
        v = load_rows(v_base, key_start, v_strides[1], key_time, KEYS, D, EDGE=False)
        dq = _query_grad(q, grad, lse_log2, delta, dq, k, v, scale_log2, None, PRECISION)

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
        dq = _query_grad(q, grad, lse_log2, delta, dq, k, v, scale_log2, visible, PRECISION)

    store_rows(DQ + (batch * time * heads + head) * D, start, heads * D, time, dq * scale, D)


def query_ends(first: Tensor, keys: int, key_time: int) -> Tensor:
    """Return two positions per key block: queries from the first on do not see all of it, from the second on nothing.

    As `first` never decreases, these are the numbers of queries with `first` at most the block's first and last key.

    Args:
        first: (batch, time) int32.
        keys: block size.
        key_time: total number of keys.

    Returns:
        (batch, blocks, 2) int32, contiguous; batch is 1 if first's batch stride is 0.
    """
    first = (first[:1] if first.stride(0) == 0 else first).contiguous()
    starts = torch.arange(0, key_time, keys, dtype=torch.int32, device=first.device)
    bounds = torch.stack((starts, starts + keys - 1), dim=1).view(1, -1).expand(first.shape[0], -1).contiguous()
    return torch.searchsorted(first, bounds, right=True, out_int32=True).view(first.shape[0], -1, 2)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor | None,
    scale: float,
    ahead: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives of query, key and value, contiguous, with the same shapes and types.

    Args:
        grad: derivative of out, any strides with the last dimension contiguous.
        query, key, value, first, scale, ahead, out, lse: inputs and outputs of the forward kernel.
    """
    batch, time, heads, head_dim = query.shape
    key_time, kv_heads = key.shape[1:3]
    delta = torch.empty_like(lse)
    d_query, d_key, d_value = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    precision = dot_precision()
    blocks = blocks_for(query, precision)
    launch, rows = blocks.d_key_value, 64
    first_batch = 0 if first is None else first.stride(0)
    ends = None if first is None else query_ends(first, launch.KEYS, key_time)
    strides = tuple(x.stride() for x in (query, key, value, grad))
    common = ((query, key, value, grad, lse, delta), strides, first, first_batch, scale, scale * LOG2E)
    programs, shape = triton.cdiv(time, rows) * batch * heads, {"D": head_dim, "QUERIES": rows}
    CUDA.launch(delta_kernel, programs, query, grad, out, delta, grad.stride(), heads, time, **shape)
    ends_batch = ends.stride(0) if ends is not None and first_batch else 0
    outputs = (ends, ends_batch, d_key, d_value, kv_heads, heads // kv_heads, time, key_time, ahead)
    programs, options = triton.cdiv(key_time, launch.KEYS) * batch * kv_heads, {"D": head_dim, "PRECISION": precision}
    CUDA.launch(key_kernel, programs, query, *common, *outputs, **options, **launch._asdict())
    launch = blocks.d_query
    programs = triton.cdiv(time, launch.QUERIES) * batch * heads
    sizes = (heads, heads // kv_heads, time, key_time, ahead)
    CUDA.launch(query_kernel, programs, query, *common, d_query, *sizes, **options, **launch._asdict())
    return d_query, d_key, d_value
