"""The benchmarks of attention and of the loss: both sides compute the same, and rows state device and amount."""

from __future__ import annotations

import functools

import pytest
import torch
from bench_rows import checked_rows
from isoflop.bench import layers
from isoflop.bench.timing import largest_difference, measuring_on, print_benchmark

# bf16 keeps 8 bits, and what is compared was rounded several times on either side.
APART = {"float32": 1e-5, "bfloat16": 0.05}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread, because threads that wait for one another are very slow on busy cores."""
    monkeypatch.setattr(layers, "measuring_on", functools.partial(measuring_on, threads=1))


def test_both_sides_attend_alike(capsys: pytest.CaptureFixture[str]) -> None:
    shape = layers.Shape(2, 48, 4, 2, 16)
    rows = checked_rows(layers.bench_attention("cpu", rounds=2, steps=1, shapes=[shape]))
    assert len(rows) == 2
    for row, (name, bound) in zip(rows, APART.items(), strict=True):
        assert name in row["case"]
        assert "T=48" in row["case"]
        assert "key/value heads" in row["case"]
        assert row["ratio"] == row["ours"] / row["peer"]
        assert row["device"].startswith("cpu")
        assert row["difference"] < bound
        # The output and three gradients at least.
        assert min(row["peak_bytes"], row["peer_peak_bytes"]) >= 2 * 48 * 16 * 12 * (4 if bound < 0.01 else 2)
    print_benchmark(rows, layers.ABOUT)
    assert "MiB / peer" in capsys.readouterr().out


def test_a_difference_is_seen() -> None:
    one = (torch.tensor([1.0, -2.0]), torch.tensor([4.0]))
    assert largest_difference(one, one) == 0
    assert largest_difference((one[0], torch.tensor([3.0])), one) == 0.25


def test_a_peer_that_does_not_work_here_is_left_out() -> None:
    def broken(*inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for this")

    inputs = layers.random_inputs(layers.Shape(1, 8, 1, 1, 8), torch.float32, torch.device("cpu"))
    functions = {"broken": broken, "sdpa": layers._sdpa}
    assert list(layers.working_peers(functions, inputs, backward=True)) == ["sdpa"]


def test_both_sides_have_the_same_loss_and_gradients() -> None:
    shape = layers.LossShape(tokens=96, width=32, vocabulary=384)
    rows = checked_rows(layers.bench_loss("cpu", rounds=2, steps=1, shapes=[shape]))
    assert len(rows) == 2
    for row, (name, bound) in zip(rows, APART.items(), strict=True):
        assert name in row["case"]
        assert "V=384" in row["case"]
        assert row["ratio"] == row["ours"] / row["peer"]
        assert row["difference"] < bound
        assert row["peer_peak_bytes"] >= 2 * 4 * 96 * 384  # logits in fp32, and their gradient
        assert row["peak_bytes"] > 0
