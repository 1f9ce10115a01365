"""The fused head and loss equal the textbook's loss and gradients, and never hold all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from isoflop.train.model import shape
from isoflop.train.model.loss import SHIFT, linear_cross_entropy
from random_models import relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Width, padded vocabulary, tokens that can be predicted.
WIDTH, PADDED, VOCABULARY = 24, 64, 51


@pytest.fixture
def set_chunk_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the number of rows in a chunk."""

    def set_rows(rows: int) -> None:
        monkeypatch.setitem(shape.LOGITS_AT_A_TIME, "cpu", 1)
        monkeypatch.setitem(shape.FEWEST_ROWS, "cpu", rows)

    return set_rows


def draw(
    n: int, dtype: torch.dtype = torch.float64, vocabulary: int = VOCABULARY, padded: int = PADDED
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw input, weight and targets; the weights of padding are as large as the others."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(padded, WIDTH, generator=generator, dtype=torch.float64) * WIDTH**-0.5
    targets = torch.randint(vocabulary, (n,), generator=generator)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def textbook(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, z_loss: float) -> Tensor:
    """Return the mean loss in fp64, for autograd to differentiate."""
    logits = x.double() @ weight.double()[:vocab_size].T
    return F.cross_entropy(logits, targets) + z_loss * logits.logsumexp(1).square().mean()


def expected(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, z_loss: float) -> tuple[Tensor, ...]:
    """Return the textbook's loss, dx and dW."""
    x, weight = (leaf.detach().double().requires_grad_() for leaf in (x, weight))
    loss = textbook(x, weight, targets, vocab_size, z_loss)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def ours(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, z_loss: float, factor: float = 1.0
) -> tuple[Tensor, ...]:
    """Return our loss, and our dx and dW times the factor."""
    loss = linear_cross_entropy(x, weight, targets, vocab_size, z_loss=z_loss)
    return loss.detach(), *torch.autograd.grad(loss * factor, (x, weight))


@pytest.mark.parametrize(("n", "rows"), [(1, 16), (15, 16), (16, 16), (50, 16), (48, 16), (50, 1)])
def test_loss_and_gradients_are_the_textbooks(n: int, rows: int, set_chunk_rows: Callable[[int], None]) -> None:
    set_chunk_rows(rows)
    for vocabulary, z_loss in ((VOCABULARY, 1e-2), (PADDED, 0.0)):
        leaves = draw(n, vocabulary=vocabulary)
        for actual, reference in zip(
            ours(*leaves, vocabulary, z_loss), expected(*leaves, vocabulary, z_loss), strict=True
        ):
            # Sums of a hundred terms in other orders, in fp64.
            assert relative_error(actual, reference) < 1e-13


# fp32 and bf16 keep 24 and 8 bits, fp16 11; a gradient is a few roundings of its factors, and a sum of many.
PRECISIONS = ((torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3))


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=str)
def test_in_every_type_it_is_the_textbooks_but_for_rounding(
    dtype: torch.dtype, tolerance: float, set_chunk_rows: Callable[[int], None]
) -> None:
    set_chunk_rows(32)
    x, weight, targets = draw(200, dtype)
    loss, dx, dw = ours(x, weight, targets, VOCABULARY, 1e-3)
    assert (loss.dtype, dx.dtype, dw.dtype) == (torch.float32, dtype, dtype)
    for actual, reference in zip((loss, dx, dw), expected(x, weight, targets, VOCABULARY, 1e-3), strict=True):
        assert relative_error(actual, reference) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_padding_is_never_looked_at_and_its_gradient_is_exactly_zero(dtype: torch.dtype) -> None:
    x, weight, targets = draw(40, dtype)
    plain = ours(x, weight, targets, VOCABULARY, 1e-3)
    assert plain[2][VOCABULARY:].count_nonzero() == 0
    with torch.no_grad():
        weight[VOCABULARY:] *= 1000  # would take all the probability
    assert all(torch.equal(a, b) for a, b in zip(plain, ours(x, weight, targets, VOCABULARY, 1e-3), strict=True))


def test_terms_of_the_weights_gradient_add_up_in_fp32(set_chunk_rows: Callable[[int], None]) -> None:
    """Add 4096 equal rows, one at a time: in bf16 a sum stops growing at 256 times its term."""
    set_chunk_rows(1)
    x, weight, targets = (torch.ones(4096, 8), torch.zeros(16, 8), torch.zeros(4096, dtype=torch.long))
    leaves = x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets
    dw = ours(*leaves, 16, 0.0)[2]
    # Softmax less one: -15/16 for the target, 1/16 for every other; powers of two, so without rounding.
    assert torch.equal(dw.float(), torch.full((16, 8), 1 / 16).index_fill_(0, torch.tensor(0), -15 / 16))


@pytest.mark.parametrize("loss_scale", [2.0**10, 2.0**16])
def test_in_fp16_a_probability_below_its_smallest_number_has_a_gradient(loss_scale: float) -> None:
    x, weight = torch.ones(512, 14), torch.zeros(4096, 14)
    weight[64:] = -1.0  # of 4096 tokens all but 64 have the probability exp(-14) / 64
    targets = torch.arange(512) % 64
    leaves = x.half().requires_grad_(), weight.half().requires_grad_(), targets
    tail = torch.tensor(-14.0).exp() / 64
    assert tail.half() == 0
    dw = ours(*leaves, 4096, 0.0, factor=loss_scale)[2][64:].double() / loss_scale
    # Rounded twice to a multiple of 6e-8: once times `SHIFT`, once times the loss scale.
    assert (dw / tail.item()).sub(1).abs().max() < 2**-25 * (1 / SHIFT + 1 / loss_scale) / tail + 1e-3


def test_in_fp16_large_batches_and_weights_do_not_overflow() -> None:
    x, weight, _ = draw(3000, torch.float16)
    with torch.no_grad():
        weight.mul_(100 / weight.abs().max())
        x.mul_(0.05).add_(1.0)
    targets = torch.zeros(3000, dtype=torch.long)  # one target for all rows: sums of 3000 * SHIFT
    _, dx, dw = ours(x, weight, targets, VOCABULARY, 0.0)
    assert torch.finfo(torch.float16).max < 3000 * SHIFT
    assert dx.isfinite().all()
    reference = expected(x, weight, targets, VOCABULARY, 0.0)
    assert relative_error(dw, reference[2]) < 2e-3


def test_very_unlikely_targets_have_their_loss() -> None:
    """Score a probability of exp(-200), which fp32 cannot represent."""
    x, weight = torch.tensor([[1.0], [1.0]], requires_grad=True), torch.tensor([[200.0], [0.0], [-200.0]])
    loss = linear_cross_entropy(x, weight, torch.tensor([1, 2]), 3)
    assert loss.item() == pytest.approx(300.0, rel=1e-6)
    (dx,) = torch.autograd.grad(loss, x)
    assert dx.flatten().tolist() == pytest.approx([100.0, 200.0], rel=1e-6)


def test_a_loss_that_is_no_number_says_so() -> None:
    x, weight, targets = draw(20, torch.float32)
    with torch.no_grad():
        x[3, 0] = float("nan")
    assert all(part.isnan().any() for part in ours(x, weight, targets, VOCABULARY, 0.0))


def test_scores_are_those_of_each_row_and_have_no_gradient(set_chunk_rows: Callable[[int], None]) -> None:
    set_chunk_rows(16)
    x, weight, targets = draw(50)
    logits = x.detach() @ weight.detach()[:VOCABULARY].T
    losses = F.cross_entropy(logits, targets, reduction="none")
    with torch.no_grad():
        scored = linear_cross_entropy(x, weight, targets, VOCABULARY, "none")
        squared = linear_cross_entropy(x, weight, targets, VOCABULARY, "none", 0.5)
    torch.testing.assert_close(scored, losses, rtol=1e-13, atol=0)
    torch.testing.assert_close(squared, losses + 0.5 * logits.logsumexp(1).square(), rtol=1e-13, atol=0)
    with pytest.raises(ValueError, match="reduction is none, which has no gradient"):
        linear_cross_entropy(x, weight, targets, VOCABULARY, "none")


def test_a_second_backward_pass_is_refused() -> None:
    x, weight, targets = draw(20)
    loss = linear_cross_entropy(x, weight, targets, VOCABULARY)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Sizes(TorchDispatchMode):
    """Recorder of the largest result of any operation (elements) and the number of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        self.products += func.overloadpacket.__name__ in ("mm", "addmm")
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_never_exist_whole_and_without_gradients_only_they_are_made(
    dtype: torch.dtype, set_chunk_rows: Callable[[int], None]
) -> None:
    set_chunk_rows(64)
    n, vocabulary = 640, 4096
    x, weight, targets = draw(n, dtype, vocabulary, vocabulary)
    with Sizes() as sizes:
        linear_cross_entropy(x, weight, targets, vocabulary, z_loss=1e-4).backward()
    assert sizes.largest == 64 * vocabulary < n * vocabulary / 8
    assert sizes.products == 3 * n // 64  # the head's product is taken once
    with Sizes() as sizes, torch.no_grad():
        linear_cross_entropy(x, weight, targets, vocabulary, "none")
    assert sizes.largest == 64 * vocabulary
    assert sizes.products == n // 64
