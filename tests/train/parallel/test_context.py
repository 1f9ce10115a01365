"""Attention over sequences shared by ranks equals that over whole ones. test_train.py tests the steps of runs."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist
from isoflop.train.config import ModelConfig, RunConfig
from isoflop.train.errors import UserError
from isoflop.train.job.fork import run_ranks
from isoflop.train.model.attention import document_starts, first_visible
from isoflop.train.model.backends import load_backend
from isoflop.train.parallel.context import Ring, own_part
from isoflop.train.planner.validation import check_shapes
from torch import Tensor

END = 3  # the token that ends a document

# batch, time, heads, key/value heads, head size, window, documents. Pieces of 4 ranks are 4 to 160 tokens; windows end
# inside a piece, at its edge, and beyond the next.
CASES = {
    "plain": (2, 64, 2, 2, 8, None, False),
    "grouped": (2, 64, 6, 2, 8, None, False),
    "one key head": (1, 64, 4, 1, 16, None, False),
    "documents": (3, 64, 4, 2, 8, None, True),
    "short window": (2, 64, 4, 2, 8, 5, False),
    "window of a piece": (2, 64, 2, 2, 8, 8, False),
    "window and documents": (2, 64, 4, 2, 8, 19, True),
    "long window": (1, 320, 2, 1, 8, 150, False),
    "several blocks of queries": (1, 1280, 1, 1, 4, 300, True),
    "our kernels": (2, 32, 2, 1, 16, 9, True),
}


def inputs_of(case: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], Tensor, Tensor | None, int | None]:
    """Return tokens, query, key and value, the output's gradient, document starts, and the window."""
    batch, time, heads, kv_heads, size, window, documents = CASES[case]
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 20, (batch, time), generator=generator)
    fused = torch.randn(batch, time, 2 * heads + 2 * kv_heads, size, generator=generator, dtype=torch.float64)
    query, key, value, grad = fused.to(dtype).split((heads, kv_heads, kv_heads, heads), dim=2)  # views, as in a model
    return tokens, [query * 3, key, value], grad, document_starts(tokens, END) if documents else None, window


def whole_attention(case: str, dtype: torch.dtype) -> list[Tensor]:
    """Compute output and gradients by definition in float64, from inputs rounded to a type."""
    tokens, inputs, grad, documents, window = inputs_of(case, dtype)
    query, key, value = (x.double().requires_grad_() for x in inputs)
    first, group = first_visible(tokens, documents, window), query.shape[2] // key.shape[2]
    position = torch.arange(tokens.shape[1])
    seen = position <= position[:, None]
    seen = seen if first is None else seen & (position >= first[:, None, :, None])
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key.repeat_interleave(group, 2)) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, value.repeat_interleave(group, 2))
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad.double())]


def ring_attention(cases: list[str], dtype: torch.dtype, kernel: str = "sdpa") -> list[list[Tensor]]:
    """Compute output and gradients of this rank's part of each case, by the ring."""
    results, group = [], dist.group.WORLD
    for case in cases:
        tokens, inputs, grad, documents, window = inputs_of(case, dtype)
        ring = Ring(kernel, load_backend(kernel).kernel, "first", group)
        seen = ring.seen(tokens, documents, window, dtype)
        parts = [own_part(x, 1, group).requires_grad_() for x in inputs]
        out = ring.attend(*parts, seen, window)
        results.append([out.detach(), *torch.autograd.grad(out, parts, own_part(grad, 1, group))])
    return results


def joined(parts: list[Tensor]) -> Tensor:
    """Join the parts of all ranks to whole sequences."""
    halves = [part.chunk(2, dim=1) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim=1)


@pytest.mark.parametrize(
    ("ranks", "dtype", "tolerance"), [(2, torch.float64, 1e-12), (4, torch.float64, 1e-12), (4, torch.bfloat16, 0.02)]
)
def test_attention_of_shared_sequences_is_that_of_whole_ones(ranks: int, dtype: torch.dtype, tolerance: float) -> None:
    """Compare numbers of order 1; bf16 rounds them by 0.004, in every step's result and in the sum."""
    cases = list(CASES) if dtype == torch.float64 else ["grouped", "window and documents", "long window"]
    assert_whole(run_ranks(ranks, ring_attention, cases, dtype), cases, dtype, tolerance)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
def test_our_kernels_attend_over_shared_sequences() -> None:
    """Run the kernels in Triton's interpreter."""
    cases = ["our kernels"]
    assert_whole(run_ranks(2, ring_attention, cases, torch.float32, "ours"), cases, torch.float32, 1e-5)


def assert_whole(answers: list[list[list[Tensor]]], cases: list[str], dtype: torch.dtype, tolerance: float) -> None:
    for number, case in enumerate(cases):
        for name, expected, *parts in zip(
            ("out", "query", "key", "value"), whole_attention(case, dtype), *(a[number] for a in answers), strict=True
        ):
            scale = max(1.0, expected.abs().max().item())
            output = joined(parts)
            assert output.dtype == dtype
            error = (output.double() - expected).abs().max().item() / scale
            assert error < tolerance, f"{case}: {name} is wrong by {error:.2g}"


@pytest.mark.parametrize(
    ("length", "cp", "tp", "problem"),
    [
        (64, 3, 1, r"parallel\.cp is 3; .* data\.sequence_length 64; it can be 1, 2, 4, 8, 16, 32$"),
        (63, 3, 1, r"parallel\.cp is 3; .* data\.sequence_length 63; it can be 1$"),
        (36, 6, 4, r"parallel\.tp is 4; .* data\.sequence_length 36 / parallel\.cp 6"),
    ],
)
def test_lengths_that_do_not_divide_are_refused(length: int, cp: int, tp: int, problem: str) -> None:
    config = RunConfig(model=ModelConfig(width=64, heads=4, vocab_size=256))
    config.data.sequence_length, config.parallel.cp, config.parallel.tp = length, cp, tp
    with pytest.raises(UserError, match=problem):
        check_shapes(config)
    config.parallel.cp, config.parallel.tp = 1, 1
    check_shapes(config)
