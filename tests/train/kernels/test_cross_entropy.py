"""The kernel of the loss and its gradient equals its reference, on a GPU or interpreted."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported
pytest.importorskip("triton")

from isoflop.train.kernels import cross_entropy as kernel
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Logits are exact in their type; errors are fp32 arithmetic, and rounding the gradient to 24, 11 or 8 bits.
TYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str
)


def draw(rows: int, columns: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    logits = 4 * torch.randn(rows, columns, generator=generator)
    logits[:, vocab_size:] = 100.0  # padding would take all the probability
    return logits.to(DEVICE, dtype), torch.randint(vocab_size, (rows,), generator=generator).to(DEVICE)


@pytest.mark.parametrize(
    ("columns", "vocab_size", "z_loss"), [(2, 2, 0.0), (100, 51, 1e-2), (128, 128, 1e-2), (640, 513, 1e-2)]
)
@TYPES
def test_loss_and_derivative_are_the_textbooks(
    dtype: torch.dtype, tolerance: float, columns: int, vocab_size: int, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "LONGEST_BLOCK", 256)  # several blocks a row, the last of them with and without padding
    logits, targets = draw(9, columns, vocab_size, dtype)
    exact = logits.double()[:, :vocab_size].requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none") + z_loss * exact.logsumexp(1).square()
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    for scale in (1.0, 256.0):
        losses, gradient = kernel.fused_cross_entropy(logits.clone(), targets, vocab_size, z_loss, scale)
        assert (losses.dtype, gradient.dtype) == (torch.float32, dtype)
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=2e-6, atol=2e-6)
        assert (gradient[:, :vocab_size].double() / scale - slope).norm() < tolerance * slope.norm()
        assert gradient[:, vocab_size:].count_nonzero() == 0


def test_without_a_derivative_the_logits_stay() -> None:
    logits, targets = draw(5, 100, 90, torch.float32)
    before = logits.clone()
    losses, _ = kernel.fused_cross_entropy(logits, targets, 90, 0.0, 0.0)
    assert torch.equal(logits, before)
    torch.testing.assert_close(losses, F.cross_entropy(logits[:, :90], targets, reduction="none"), rtol=2e-6, atol=2e-6)


def test_rows_and_targets_may_be_parts_of_others() -> None:
    logits, targets = draw(6, 200, 130, torch.float32)
    strided_targets = torch.stack([targets, torch.full_like(targets, 10**6)], dim=1)[:, 0]
    losses, slope = kernel.fused_cross_entropy(logits[:, :150], strided_targets, 130, 0.0, 1.0)
    assert (logits[:, 150:] == 100.0).all()  # columns outside the view are not written
    assert slope[:, 130:].count_nonzero() == 0
    assert losses.isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter, which uses NumPy
def test_a_row_that_is_no_number_stays_alone() -> None:
    logits, targets = draw(4, 64, 60, torch.float32)
    logits[1, 5] = float("nan")
    logits[2, 7] = float("inf")
    losses, slope = kernel.fused_cross_entropy(logits, targets, 60, 0.0, 1.0)
    assert losses.isnan().tolist() == slope.isnan().any(1).tolist() == [False, True, True, False]
    assert slope[:, 60:].count_nonzero() == 0


def test_a_probability_below_the_smallest_number_has_its_loss() -> None:
    logits = torch.tensor([[300.0, 0.0, -300.0, 5.0]], device=DEVICE)
    losses, _ = kernel.fused_cross_entropy(logits, torch.tensor([2], device=DEVICE), 4, 0.0, 1.0)
    assert losses.item() == pytest.approx(600.0, rel=1e-6)


def test_fake_tensors_see_one_operation() -> None:
    with FakeTensorMode():
        logits, targets = torch.empty(8, 32, dtype=torch.bfloat16), torch.empty(8, dtype=torch.long)
        losses, slope = kernel.fused_cross_entropy(logits, targets, 30, 0.0, 1.0)
    assert (losses.shape, losses.dtype, slope is logits) == ((8,), torch.float32, True)
