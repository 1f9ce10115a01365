"""Our FlashAttention equals its float64 reference, sees only what it may, and gives the same bits twice.

On a machine without a GPU the kernels run in Triton's interpreter, whose bf16 products conftest.py fixes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_reference import flash_reference
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.errors import UserError
from isoflop.train.kernels import flash
from isoflop.train.kernels.flash import HEAD_DIMS
from isoflop.train.model.attention import first_visible
from isoflop.train.model.backends import load_backend
from isoflop.train.model.parametrization import build_model
from torch import Tensor

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative to the norm: a few roundings, of inputs of products and of the result, to 24, 11 or 8 bits.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# In bf16 our errors relative to those of PyTorch's own attention on CPUs, which rounds the inputs of each second
# product and the result as we do: measured 0.98 to 1.03 without grouped queries; the rest allows for chance.
MAX_RATIO = 1.25
FP32_ERROR = 1e-7  # where the exact derivative is 0, both sides leave fp32's rounding of terms of about 1


def first_from_lengths(cumulative_lengths: tuple[int, ...], batch: int, time: int) -> Tensor:
    """Return the first visible position of every token of packed documents, (batch, time)."""
    ends = torch.tensor(cumulative_lengths)
    document = torch.searchsorted(ends[1:] - 1, torch.arange(batch * time))
    return (ends[document] % time).to(torch.int32).view(batch, time)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor | None = None, window: int | None = None,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Call the kernel with a window as its backend does, but with any scale."""
    first = first_visible(query, first, window)
    if scale is None:
        return flash.flash_attention(query, key, value, first=first)
    out: Tensor = torch.ops.isoflop.flash_forward(query, key, value, first, scale)[0]
    return out


@dataclasses.dataclass(frozen=True)
class Case:
    """Shape, type and mask of one call."""

    head_dim: int
    time: int
    heads: int = 2
    kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    window: int | None = None
    lengths: tuple[int, ...] | None = None
    batch: int = 1

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return a fused product (batch, time, (heads + 2 kv_heads) * d), and the first visible positions."""
        torch.manual_seed(seed)
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        fused = torch.randn((self.batch, self.time, width), dtype=self.dtype, device=DEVICE)
        first = first_from_lengths(self.lengths, self.batch, self.time).to(DEVICE) if self.lengths else None
        return fused, first

    def split(self, fused: Tensor) -> list[Tensor]:
        """Return query, key and value as views of the fused product."""
        sizes = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        return [part.unflatten(-1, (-1, self.head_dim)) for part in fused.split(sizes, dim=-1)]


def close(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    assert ours.shape == exact.shape
    ours = ours.detach().double()
    # Inputs have unit variance: where the exact result is (nearly) 0, errors are relative to a tenth of that.
    scale = max(float(exact.detach().norm()), 0.1 * math.sqrt(exact.numel()))
    error = float((ours - exact.detach()).norm()) / scale
    assert error < tolerance, error


def check(case: Case) -> None:
    """Compare the output and all gradients with float64."""
    fused, first = case.inputs()
    exact = fused.double().requires_grad_()
    fused.requires_grad_()
    scale = 0.9 * case.head_dim**-0.5
    query, key, value = case.split(fused)
    out = flash_attention(query, key, value, first=first, window=case.window, scale=scale)
    expected, _ = flash_reference(*case.split(exact), first=first, window=case.window, scale=scale)
    close(out, expected, TOLERANCE[case.dtype])
    assert out.is_contiguous()
    assert out.dtype == case.dtype
    grad = torch.randn_like(out.transpose(1, 2)).transpose(1, 2)  # strided, as an attention block's is
    out.backward(grad)
    expected.backward(grad.double())
    for ours, theirs in zip(case.split(fused.grad), case.split(exact.grad), strict=True):
        close(ours, theirs, 3 * TOLERANCE[case.dtype])  # three products deep
    if case.dtype == torch.bfloat16:
        peer, first = fused.detach().cpu().requires_grad_(), None if first is None else first.cpu()
        query, key, value = (x.transpose(1, 2) for x in case.split(peer))
        position, first = torch.arange(case.time), first_visible(query.transpose(1, 2), first, case.window)
        seen = position <= position[:, None]
        seen = seen if first is None else (seen & (position >= first[..., None]))[:, None]
        theirs = F.scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=True).transpose(1, 2)
        theirs.backward(grad.cpu())
        gradients = zip(*(case.split(x.grad) for x in (fused, peer, exact)), strict=True)
        for triple in ((out, theirs, expected), *gradients):
            ours, theirs, right = (x.detach().cpu().double() for x in triple)
            our_error, their_error = float((ours - right).norm()), float((theirs - right).norm())
            assert our_error <= MAX_RATIO * their_error + FP32_ERROR * out.numel() ** 0.5, (our_error, their_error)


DOCUMENTS = (0, 17, 100, 130, 131, 180, 260)
CASES = [
    Case(16, 1, dtype=torch.float16),
    Case(64, 17, heads=3, kv_heads=1, batch=2),
    Case(96, 100, heads=1, kv_heads=1, dtype=torch.float16),
    Case(256, 33, heads=1, kv_heads=1, dtype=torch.bfloat16),
    Case(16, 130, window=1, heads=1, kv_heads=1, dtype=torch.bfloat16),  # rows that see only themselves
    Case(16, 130, lengths=DOCUMENTS, batch=2, heads=1, kv_heads=1),
    Case(32, 130, window=33, lengths=DOCUMENTS, heads=2, kv_heads=1, dtype=torch.bfloat16, batch=2),
    Case(32, 31, heads=4, kv_heads=2, dtype=torch.bfloat16, lengths=tuple(range(32))),  # a document a token
]
# Every head size in either type; more heads and rows only repeat the same programs.
MORE = [
    *(Case(head_dim, 130, 2, 1, torch.float16, 40, DOCUMENTS, 2) for head_dim in HEAD_DIMS),
    *(Case(head_dim, 130, 1, 1, torch.float32, 65) for head_dim in HEAD_DIMS),
    *(Case(head_dim, 257, 1, 1, torch.bfloat16) for head_dim in HEAD_DIMS),
    Case(64, 700, 1, 1, torch.float16, 200, (0, 350, 700)),
    Case(64, 1024, 1, 1, torch.bfloat16, 129, (0, 200, 500, 501, 900, 1024)),
    Case(16, 2049, 1, 1, torch.bfloat16, 100),
]


@needs_triton
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_output_and_gradients_are_the_references(case: Case) -> None:
    check(case)


@needs_triton
def test_what_a_query_cannot_see_changes_nothing_and_gets_a_gradient_of_0() -> None:
    case = Case(16, 130, window=50, lengths=(0, 80, 130), heads=1, kv_heads=1)
    fused, first = case.inputs()
    changed = fused.clone()
    changed[:, 30] += 1.0
    before, after = (flash_attention(*case.split(x), first=first, window=50) for x in (fused, changed))
    differs = (before != after).any(-1).flatten()
    # Token 30 is visible to itself and to the 49 tokens after it, all of the same document.
    assert differs.nonzero().flatten().tolist() == list(range(30, 80))
    fused.requires_grad_()
    flash_attention(*case.split(fused), first=first, window=50)[:, 70].sum().backward()
    reached = [x[0].abs().sum((1, 2)).nonzero().flatten().tolist() for x in case.split(fused.grad)]
    assert reached == [[70], list(range(21, 71)), list(range(21, 71))]


@needs_triton
def test_two_backward_passes_give_the_same_bits() -> None:
    case = Case(16, 40, heads=1, kv_heads=1, lengths=(0, 30, 40))
    fused, first = case.inputs()

    def gradient() -> Tensor:
        x = fused.clone().requires_grad_()
        flash_attention(*case.split(x), first=first).square().sum().backward()
        return x.grad

    assert torch.equal(gradient(), gradient())
    # A gradient that is one number, expanded, is one of many equal numbers.
    queries, key, value = (x.requires_grad_() for x in case.split(fused))
    out = flash_attention(queries, key, value, first=first)
    expanded = torch.autograd.grad(out.sum(), (queries, key, value), retain_graph=True)
    dense = torch.autograd.grad(out, (queries, key, value), torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


@needs_triton
@pytest.mark.slow
def test_the_ops_pass_pytorchs_own_check() -> None:
    case = Case(16, 6, heads=2, kv_heads=1, lengths=(0, 2, 6))
    fused, first = case.inputs()
    arguments = [x.detach().requires_grad_() for x in case.split(fused)]
    torch.library.opcheck(torch.ops.isoflop.flash_forward, (*arguments, first, 0.25))
    arguments = [x.detach() for x in arguments]
    out, lse = torch.ops.isoflop.flash_forward(*arguments, first, 0.25)
    torch.library.opcheck(
        torch.ops.isoflop.flash_backward,
        (out, *arguments, out, lse, first, 0.25),
        test_utils=("test_schema", "test_faketensor"),
    )


def call(head_dim: int = 16, kv_heads: int = 2, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    query = torch.zeros((2, 10, 4, head_dim), dtype=dtype)
    key = torch.zeros((2, 10, kv_heads, head_dim), dtype=dtype)
    flash_attention(query, key, key, **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"head_dim": 80}, "head size 80 .* 16, 32, 64, 96, 128, 256"),
        ({"kv_heads": 3}, "heads 4 .* kv_heads 3"),
        ({"dtype": torch.float64}, r"torch\.float64"),
        ({"first": torch.zeros((1, 10), dtype=torch.int32)}, r"first \(1, 10\)"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        call(**options)


def test_a_cpu_without_the_interpreter_is_told_where_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UserError, match="attention ours needs"):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_compiled_on_a_gpu_it_is_the_reference(dtype: torch.dtype, head_dim: int) -> None:
    for lengths in (None, (0, 100, 999, 1000, 1513, 2000)):
        for window in (None, 300):
            check(Case(head_dim, 1000, 4, 2, dtype, window, lengths, batch=2))


@pytest.mark.gpu
def test_on_a_gpu_a_tensor_of_more_than_2_to_the_31_elements_is_addressed() -> None:
    torch.manual_seed(0)
    query = torch.randn((33, 4096, 128, 128), dtype=torch.bfloat16, device="cuda")
    key, value = torch.randn((2, 33, 4096, 1, 128), dtype=torch.bfloat16, device="cuda")
    assert query.numel() > 2**31
    whole = flash_attention(query, key, value, window=64)
    last = flash_attention(query[-1:].clone(), key[-1:].clone(), value[-1:].clone(), window=64)
    assert torch.equal(whole[-1:], last)


@needs_triton
def test_latent_attention_through_the_kernel_is_that_of_pytorchs() -> None:
    """Use keys of size 32, and values of size 16 that are padded to it."""
    config = ModelConfig(width=16, depth=1, heads=1, vocab_size=64, attention="mla", kv_rank=24, rotary_size=16)
    gpt = build_model(config, OptimizerConfig(), 30, 0).to(DEVICE)
    torch.manual_seed(0)
    for parameter in gpt.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens, gradients = torch.randint(64, (1, 31), device=DEVICE), []
    for name in ("sdpa", "ours"):
        gpt.use(load_backend(name))
        gpt.zero_grad()
        gpt.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([parameter.grad.clone() for parameter in gpt.parameters() if parameter.grad is not None])
    for theirs, ours in zip(*gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()  # fp32: sums in other orders


@needs_triton
@pytest.mark.parametrize(("queries", "keys", "ahead", "documents"), [(80, 40, 40, False), (33, 65, 32, True)])
def test_keys_of_other_tokens_are_seen_up_to_a_distance(queries: int, keys: int, ahead: int, documents: bool) -> None:
    """Blocks of queries and keys end at other places; with documents the last queries see nothing."""
    torch.manual_seed(0)
    query, grad = (torch.randn(2, queries, 2, 16, device=DEVICE) for _ in range(2))
    key, value = torch.randn(2, keys, 2, 1, 16, device=DEVICE).unbind(2)
    first = None
    if documents:
        places = torch.tensor([0] * 10 + [keys // 3] * (queries - 20) + [keys] * 10)
        first = torch.minimum(places, torch.arange(queries) + ahead + 1).to(torch.int32).repeat(2, 1).to(DEVICE)
    out, lse = torch.ops.isoflop.flash_forward(query, key, value, first, 0.25, ahead)
    rows, columns = torch.arange(queries, device=DEVICE), torch.arange(keys, device=DEVICE)
    seen = (columns <= rows[:, None] + ahead).expand(2, -1, -1)
    seen = seen if first is None else seen & (columns >= first[:, :, None])
    blind = ~seen.any(-1)
    assert blind.any() == documents
    wide = [x.double().requires_grad_() for x in (query, key, value)]
    scores = torch.einsum("bqhd,bkhd->bhqk", wide[0], wide[1].repeat_interleave(2, 2)) * 0.25
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    whole = scores.logsumexp(-1)
    weights = (scores - whole.masked_fill(blind[:, None], 0.0)[..., None]).exp()
    exact = torch.einsum("bhqk,bkhd->bqhd", weights, wide[2].repeat_interleave(2, 2))
    close(out, exact, 1e-6)
    torch.testing.assert_close(lse, whole.float(), rtol=1e-5, atol=1e-5)
    # The backward pass gets the merged output of these and of other keys.
    other = torch.logaddexp(whole, torch.zeros_like(whole)).detach()
    merged = exact.detach() * (whole.detach() - other).exp().transpose(1, 2)[..., None]
    gradients = torch.ops.isoflop.flash_backward(
        grad, query, key, value, merged.float(), other.float(), first, 0.25, ahead
    )
    p = (scores - other[..., None]).exp()
    d_p = torch.einsum("bqhd,bkhd->bhqk", grad.double(), wide[2].repeat_interleave(2, 2))
    d_s = p * (d_p - (grad.double() * merged).sum(-1).transpose(1, 2)[..., None]) * 0.25
    expected = (
        torch.einsum("bhqk,bkhd->bqhd", d_s, wide[1].repeat_interleave(2, 2)),
        torch.einsum("bhqk,bqhd->bkhd", d_s, query.double()).sum(2, keepdim=True),
        torch.einsum("bhqk,bqhd->bkhd", p, grad.double()).sum(2, keepdim=True),
    )
    for ours, true in zip(gradients, expected, strict=True):
        close(ours, true, 1e-6)
