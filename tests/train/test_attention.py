"""Every attention backend equals the float64 reference; one suite runs on all backends available here."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attention_reference import flash_reference
from isoflop.train.config import ModelConfig
from isoflop.train.model import attention, backends
from isoflop.train.model.backends import Backend, Work, installed, load_backend, obstacle
from isoflop.train.model.gpt import GPT
from random_models import random_model, relative_error
from torch import Tensor, nn

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def output_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor], grad_out: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


class Case:
    """Random queries, keys, values and documents, with the float64 outputs and gradients."""

    def __init__(
        self, time: int, heads: int, kv_heads: int, window: int | None, documents: bool, device: torch.device = CPU
    ) -> None:
        batch, generator = 2, torch.Generator().manual_seed(time + heads)
        shapes = [(batch, time, n, HEAD_DIM[device]) for n in (heads, kv_heads, kv_heads, heads)]
        *self.inputs, self.grad_out = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        self.window, self.first = window, None
        if documents:
            tokens = torch.randint(8, (batch, time), generator=generator)
            tokens[:, time // 2] = 0  # at least one document ends in the middle
            self.first = attention.document_starts(tokens, 0)

    def expected(self) -> list[Tensor]:
        plain = partial(flash_reference, first=self.first, window=self.window)
        return output_and_gradients(lambda *qkv: plain(*qkv)[0], self.inputs, self.grad_out)

    def output(self, backend: Backend, device: torch.device, *inputs: Tensor) -> Tensor:
        first = None if self.first is None else self.first.to(device)
        seen = backend.seen(inputs[0], first, self.window, inputs[0].dtype)
        return backend.attend(*inputs, seen, self.window)

    def placed(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return the inputs as the fused product gives them: views of one tensor."""
        fused = torch.cat(self.inputs, dim=2).to(device, dtype)
        return list(fused.split([x.shape[2] for x in self.inputs], dim=2))

    def actual(self, backend: Backend, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        return output_and_gradients(
            partial(self.output, backend, device), self.placed(device, dtype), self.grad_out.to(device)
        )


CASES: dict[str, tuple[int, int, int, int | None, bool]] = {
    # time, heads, key/value heads, window, documents: lengths that are no multiple of any block
    "plain": (37, 2, 2, None, False),
    "window of all": (20, 2, 1, 1000, False),
    "window of two, grouped": (20, 4, 2, 2, False),
    "documents": (20, 2, 1, None, True),
    "documents in a window, grouped": (70, 4, 2, 11, True),
}
HEAD_DIM = {CPU: 16, CUDA: 64}  # sizes that every backend supports on that device
# Backend, device, dtype, and a relative tolerance of a few roundings, by name.
RUNS: dict[str, tuple[str, torch.device, torch.dtype, float]] = {
    "sdpa fp64": ("sdpa", CPU, torch.float64, 1e-13),
    "sdpa fp32": ("sdpa", CPU, torch.float32, 2e-6),
    "sdpa bf16, kept softmax": ("sdpa", CPU, torch.bfloat16, 0.015),
    "ours fp32": ("ours", CPU, torch.float32, 2e-6),
    **{f"{name} {device}": (name, CUDA, torch.bfloat16, 0.015) for name in backends.PACKAGES for device in ("gpu",)},
    "ours gpu fp32": ("ours", CUDA, torch.float32, 1e-5),
    "sdpa gpu fp32": ("sdpa", CUDA, torch.float32, 1e-5),
}


def backend_of(run: str, has_window: bool, has_documents: bool) -> Backend:
    """Load the backend of a run, or skip the test if it cannot run here."""
    name, device, dtype, _ = RUNS[run]
    if name == "ours" and device == CPU:
        pytest.importorskip("triton", reason="Triton is not installed")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("runs under Triton's interpreter: TRITON_INTERPRET=1")
        return load_backend(name)
    if device == CPU:
        return load_backend(name)
    if name not in installed():
        pytest.skip(f"{backends.PACKAGES[name]} is not installed")
    capability = torch.cuda.get_device_capability()
    work = Work("cuda", capability, dtype, HEAD_DIM[CUDA], has_window, has_documents)
    if (reason := obstacle(name, work)) is not None:
        pytest.skip(f"{name} {reason}")
    return load_backend(name)


def marks(run: str) -> Any:
    return pytest.mark.gpu if RUNS[run][1] == CUDA else ()


IN_SMALL = ("window of two, grouped", "documents")  # for our kernels in the interpreter; test_flash.py has more


@pytest.mark.parametrize(
    ("run", "case"),
    [
        pytest.param(run, case, marks=marks(run), id=f"{run}, {case}")
        for run in RUNS for case in CASES if run != "ours fp32" or case in IN_SMALL
    ],
)  # fmt: skip
def test_a_backend_and_its_derivatives_equal_the_float64_reference(run: str, case: str) -> None:
    *_, window, documents = CASES[case]
    backend = backend_of(run, window is not None, documents)
    _, device, dtype, tolerance = RUNS[run]
    sample = Case(*CASES[case], device)
    for actual, expected in zip(sample.actual(backend, device, dtype), sample.expected(), strict=True):
        assert actual.dtype == dtype
        assert relative_error(actual, expected) < tolerance


def test_the_long_blocks_of_a_cpu_equal_the_reference() -> None:
    # Several blocks of queries, the last of which see no key of the first; bf16 is too long to keep the softmax.
    for time, window, dtype, tolerance in ((260, 9, torch.float32, 2e-6), (520, 140, torch.bfloat16, 0.015)):
        case = Case(time, 2, 1, window, True)
        for actual, expected in zip(case.actual(load_backend("sdpa"), CPU, dtype), case.expected(), strict=True):
            assert relative_error(actual, expected) < tolerance


def test_a_document_begins_after_the_token_that_ends_one() -> None:
    tokens = torch.tensor([[5, 0, 0, 7, 7, 0, 3], [0, 1, 2, 3, 4, 5, 0]])
    expected = [[0, 0, 2, 3, 3, 3, 6], [0, 1, 1, 1, 1, 1, 1]]
    assert attention.document_starts(tokens, 0).tolist() == expected
    assert attention.document_starts(tokens[:, :1], 0).tolist() == [[0], [0]]
    strided = torch.cat((tokens, tokens[:, :1]), dim=1)[:, :-1]  # as the trainer cuts inputs from a batch
    assert attention.document_starts(strided, 0).tolist() == expected


# --- through the model ----------------------------------------------------------------------------------------------

END = 7  # the token that ends a document


def small_model(dtype: torch.dtype = torch.float32, **changes: Any) -> GPT:
    fields = {"width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "vocab_size": 20, "qk_norm": True, **changes}
    return random_model(ModelConfig(**fields), 40).to(dtype)


def packed(length: int, *ends: int) -> Tensor:
    """Return random tokens (2, length) with documents that end at these positions."""
    tokens = torch.randint(END, (2, length), generator=torch.Generator().manual_seed(1))
    tokens[:, list(ends)] = END
    return tokens


def losses_of(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")


@pytest.mark.parametrize("window", [None, 6])
def test_the_loss_of_packed_documents_is_that_of_each_alone(window: int | None) -> None:
    model = small_model(torch.float64, window=window)
    tokens = packed(41, 0, 11, 12, 30)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model.end_of_document = END
    packed_losses = losses_of(model, inputs, targets)
    cos, sin, separate_losses = model.cos, model.sin, []
    for start, end in ((0, 1), (1, 12), (12, 13), (13, 31), (31, 40)):
        model.cos, model.sin = cos[start:], sin[start:]
        separate_losses.append(losses_of(model, inputs[:, start:end], targets[:, start:end]))
    # float64 throughout, summed in another order.
    torch.testing.assert_close(packed_losses, torch.cat(separate_losses, dim=1), atol=1e-12, rtol=1e-12)
    model.cos, model.sin, model.end_of_document = cos, sin, None
    assert not torch.allclose(packed_losses, losses_of(model, inputs, targets), atol=1e-3)


@pytest.mark.parametrize("run", [pytest.param(run, marks=marks(run)) for run in RUNS])
def test_a_model_computes_the_same_whatever_its_backend(run: str) -> None:
    backend = backend_of(run, True, True)
    _, device, dtype, tolerance = RUNS[run]
    tokens = packed(41, 11, 30)
    losses = []
    for model_backend, place, model_dtype in ((backends.SDPA, CPU, torch.float64), (backend, device, dtype)):
        model = small_model(model_dtype, width=4 * HEAD_DIM[device], window=9).to(place)
        model.end_of_document = END
        model.use(model_backend)
        losses.append(losses_of(model, tokens[:, :-1].to(place), tokens[:, 1:].to(place)))
    assert relative_error(losses[1], losses[0]) < 10 * tolerance  # two blocks, the head, and the angles in fp32
