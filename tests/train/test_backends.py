"""Which attention backend a run takes, what it says of it, and how the packages of others are called."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Set
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
import torch
from attention_reference import flash_reference
from isoflop.train.config import ModelConfig, OptimizerConfig, ParallelConfig
from isoflop.train.errors import UserError
from isoflop.train.kernels import flash
from isoflop.train.model import backends
from isoflop.train.model.backends import Choice, Work, choose_backend, installed, load_backend, select_backend
from isoflop.train.model.parametrization import build_model
from torch import Tensor

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

ALL = frozenset(backends.PACKAGES)
HOPPER: dict[str, Any] = {
    "device_type": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 64, "has_window": False,
    "has_documents": False,
}  # fmt: skip


def chosen(wanted: str, installed: Set[str] = ALL, **changes: Any) -> Choice:
    return choose_backend(wanted, Work(**(HOPPER | changes)), installed)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "flash3"),
        ({"installed": ALL - {"flash3"}}, "flash4"),
        ({"installed": {"sdpa", "ours", "flash2"}}, "sdpa"),
        ({"capability": (10, 0)}, "flash4"),
        ({"capability": (8, 0)}, "sdpa"),
        ({"dtype": torch.float32}, "sdpa"),
        ({"device_type": "cpu", "capability": None}, "sdpa"),
        ({"has_window": True}, "flash3"),
        ({"has_window": True, "installed": ALL - {"flash3"}}, "ours"),  # flash4 has no window on Hopper
        ({"has_window": True, "capability": (10, 0)}, "flash4"),
        ({"has_window": True, "capability": (8, 6)}, "ours"),
        ({"has_window": True, "capability": (8, 6), "head_dim": 80}, "flash2"),
        ({"has_window": True, "capability": (7, 5)}, "sdpa"),
        ({"has_window": True, "dtype": torch.float32}, "ours"),
        ({"has_documents": True}, "ours"),
        ({"has_documents": True, "has_window": True}, "ours"),
        ({"has_documents": True, "installed": ALL - {"ours"}}, "sdpa"),
        ({"has_documents": True, "head_dim": 40}, "sdpa"),
        ({"has_documents": True, "device_type": "cpu", "capability": None}, "sdpa"),
    ],
)
def test_auto_takes_what_suits_the_device_and_the_mask(changes: dict[str, Any], name: str) -> None:
    assert chosen("auto", **changes).name == name


def test_a_choice_says_why() -> None:
    assert str(chosen("auto", device_type="cpu", capability=None)) == "attention: sdpa (auto: no GPU)"
    words = "attention: ours (auto: compute capability 9.0, bf16, heads of size 64, a window, documents apart)"
    assert str(chosen("auto", has_window=True, has_documents=True)) == words
    assert str(chosen("flash2")) == "attention: flash2 (parallel.attention)"


def test_what_is_asked_for_is_taken_wherever_it_can_be() -> None:
    attention = get_type_hints(ParallelConfig, include_extras=True)["attention"]
    assert attention.__metadata__ == (("auto", *backends.PACKAGES),)
    for name in backends.PACKAGES:
        assert chosen(name) == Choice(name, "parallel.attention")


@pytest.mark.parametrize(
    ("wanted", "changes", "words"),
    [
        ("flash2", {"installed": {"sdpa", "ours"}}, "flash-attn 2 is not installed; {must} ours, sdpa$"),
        ("flash3", {"installed": {"sdpa", "ours"}, "head_dim": 40}, r" is not installed; {must} sdpa$"),
        ("ours", {"installed": {"sdpa"}}, "Triton is not installed; {must} sdpa$"),
        ("ours", {"device_type": "cpu", "capability": None}, "which needs a GPU; {must} sdpa$"),
        ("flash3", {"capability": (8, 0)}, r"not made for a GPU of compute capability 8\.0; {must} ours, "),
        ("flash4", {"capability": (12, 0)}, r"not made for a GPU of compute capability 12\.0"),
        ("flash2", {"dtype": torch.float32}, "takes bf16 and fp16, not fp32; {must} ours, sdpa$"),
        ("ours", {"head_dim": 40}, r"size 16, 32, 64, 96, 128, 256, and model\.head_size, or width / heads, is 40; "),
        ("flash2", {"head_dim": 20}, r"size multiples of 8 up to 256, and model\.head_size, or width / heads, is 20"),
        ("flash3", {"has_documents": True}, r"documents apart \(data\.separate_documents\); {must} ours, sdpa$"),
        ("flash4", {"has_window": True}, r"no sliding window on a GPU of compute capability 9\.0; {must} ours, sdpa, "),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_in_a_sentence(wanted: str, changes: dict[str, Any], words: str) -> None:
    words = words.replace("{must}", "it must be auto or one of")
    with pytest.raises(UserError, match=rf"^parallel\.attention is '{wanted}', .*{words}") as refusal:
        chosen(wanted, **changes)
    assert "\n" not in str(refusal.value)


def test_every_backend_is_described_once() -> None:
    assert set(backends.PACKAGES) == ALL == {"sdpa", *backends.KERNELS}
    assert {name for names in backends.PREFERRED.values() for name in names} == ALL
    assert all(names[-1] == "sdpa" for names in backends.PREFERRED.values())  # which can do everything


def test_our_kernel_takes_what_the_choice_believes() -> None:
    assert set(flash.HEAD_DIMS) == set(backends.KERNELS["ours"].head_dims)
    assert set(flash.DTYPES) == set(backends.KERNELS["ours"].dtypes)


def stand_in(monkeypatch: pytest.MonkeyPatch, *modules: str, **contents: Any) -> None:
    """Modules that look installed, with the same contents each."""
    for name in modules:
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


def test_a_package_is_found_without_being_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("flash_attn", "flash_attn/cute", "flash_attn_interface", "flash_attn_2_cuda"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed() >= {"sdpa", "flash2", "flash3", "flash4"}
    for name, folder in (("flash2", "flash_attn_2_cuda"), ("flash3", "flash_attn_interface")):
        (tmp_path / folder / "__init__.py").unlink()
        (tmp_path / folder).rmdir()
        importlib.invalidate_caches()
        assert name not in installed()
    (tmp_path / "flash_attn/cute").rename(tmp_path / "cute")
    importlib.invalidate_caches()
    assert not installed() & {"flash2", "flash3", "flash4"}


def test_a_package_that_cannot_be_imported_is_passed_over_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "installed", lambda: frozenset({"sdpa", "flash3"}))
    stand_in(monkeypatch, "flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # what makes an import fail
    choice, backend = select_backend("auto", CUDA, torch.bfloat16, 64, False, False)
    assert (choice.name, backend.name) == ("sdpa", "sdpa")
    assert choice.reason.endswith("; flash-attn 3 (flash_attn_interface) cannot be imported")
    with pytest.raises(UserError, match=r"^parallel\.attention is 'flash3', and flash-attn 3 .* cannot be imported \("):
        select_backend("flash3", CUDA, torch.bfloat16, 64, False, False)


class Package:
    """Stands in for a flash-attention package: their meaning of a window, and how they were called."""

    def __init__(self, unbounded: int | None, with_normalisers: bool) -> None:
        self.unbounded, self.with_normalisers, self.calls = unbounded, with_normalisers, 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int | None, int | None]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(batch, seqlen, heads, head_dim); a query at i sees i - left to i + right, and no later one if causal."""
        self.calls += 1
        left, right = window_size
        assert causal
        assert window_size == (self.unbounded, self.unbounded) or (left is not None and left >= 0 and right == 0)
        window = None if left == self.unbounded or left is None else left + 1
        out, normalisers = flash_reference(q, k, v, window=window)
        return (out, normalisers) if self.with_normalisers else out


@pytest.mark.parametrize("with_normalisers", [False, True])
@pytest.mark.parametrize("name", ["flash2", "flash3", "flash4"])
def test_a_package_is_called_as_it_wants_to_be(
    monkeypatch: pytest.MonkeyPatch, name: str, with_normalisers: bool
) -> None:
    package = Package(None if name == "flash4" else -1, with_normalisers)
    modules = {
        "flash2": ["flash_attn"],
        "flash3": ["flash_attn_interface"],
        "flash4": ["flash_attn", "flash_attn.cute"],
    }
    stand_in(monkeypatch, *modules[name], flash_attn_func=package)
    backend, generator = load_backend(name), torch.Generator().manual_seed(0)
    for time, window in ((20, None), (20, 5), (20, 1), (9, 9), (9, 30)):
        qkv = [torch.randn(2, time, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
        expected, _ = flash_reference(*qkv, window=window)
        seen = backend.seen(qkv[0], None, window, torch.float64)
        torch.testing.assert_close(backend.attend(*qkv, seen, window), expected, atol=1e-13, rtol=1e-13)
    assert package.calls == 5
    with pytest.raises(ValueError, match="cannot keep documents apart"):
        backend.seen(qkv[0], torch.zeros(2, 9, dtype=torch.int32), None, torch.float64)


def test_a_model_takes_the_backend_that_is_chosen_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(
        ModelConfig(width=32, depth=2, heads=4, kv_heads=2, vocab_size=20, window=9), OptimizerConfig(), 40, 0
    )
    assert str(model.set_attention("auto", CPU, torch.float32)) == "attention: sdpa (auto: no GPU)"
    with pytest.raises(UserError, match=r"^parallel\.attention is 'ours', "):
        model.set_attention("ours", CPU, torch.float32)
    package = Package(-1, False)
    stand_in(monkeypatch, "flash_attn", flash_attn_func=package)
    monkeypatch.setattr(backends, "installed", lambda: frozenset({"sdpa", "flash2"}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    tokens = torch.randint(20, (2, 41), generator=torch.Generator().manual_seed(0))
    expected = model.loss(tokens[:, :-1], tokens[:, 1:])
    assert str(model.set_attention("flash2", CUDA, torch.bfloat16)) == "attention: flash2 (parallel.attention)"
    torch.testing.assert_close(model.loss(tokens[:, :-1], tokens[:, 1:]), expected)
    assert package.calls == 2  # once a block
    model.end_of_document = 7
    with pytest.raises(UserError, match=r"^parallel\.attention is 'flash2', which cannot keep documents apart"):
        model.set_attention("flash2", CUDA, torch.bfloat16)
