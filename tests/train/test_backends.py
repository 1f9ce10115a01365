"""Which attention backend a run takes, and how the packages of others are called."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Set
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_reference import flash_reference
from isoflop.train.errors import UserError
from isoflop.train.model import backends
from isoflop.train.model.backends import Choice, Work, choose_backend, installed, load_backend, select_backend
from torch import Tensor

CUDA = torch.device("cuda")

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
        ({"capability": (10, 0)}, "flash4"),
        ({"capability": (8, 0)}, "sdpa"),
        ({"dtype": torch.float32}, "sdpa"),
        ({"device_type": "cpu", "capability": None}, "sdpa"),
        ({"has_window": True, "installed": ALL - {"flash3"}}, "ours"),  # flash4 has no window on Hopper
        ({"has_window": True, "capability": (8, 6)}, "ours"),
        ({"has_window": True, "capability": (8, 6), "head_dim": 80}, "flash2"),
        ({"has_window": True, "dtype": torch.float32}, "ours"),
        ({"has_documents": True, "has_window": True}, "ours"),
        ({"has_documents": True, "installed": ALL - {"ours"}}, "sdpa"),
    ],
)
def test_auto_takes_what_suits_the_device_and_the_mask(changes: dict[str, Any], name: str) -> None:
    assert chosen("auto", **changes).name == name


@pytest.mark.parametrize(
    ("wanted", "changes", "words"),
    [
        ("flash2", {"installed": {"sdpa", "ours"}}, "not installed"),
        ("ours", {"device_type": "cpu", "capability": None}, "needs a GPU"),
        ("flash4", {"capability": (12, 0)}, r"compute capability 12\.0"),
        ("flash2", {"dtype": torch.float32}, "not fp32"),
        ("ours", {"head_dim": 40}, "is 40"),
        ("flash3", {"has_documents": True}, r"data\.separate_documents"),
        ("flash4", {"has_window": True}, "window"),
    ],
)  # fmt: skip
def test_a_backend_that_cannot_run_is_refused_in_a_sentence(wanted: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=rf"^parallel\.attention is '{wanted}', .*{words}.* sdpa") as refusal:
        chosen(wanted, **changes)
    assert "\n" not in str(refusal.value)


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
    assert "flash-attn 3" in choice.reason
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


@pytest.mark.parametrize(("name", "with_normalisers"), [("flash2", False), ("flash3", True), ("flash4", False)])
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
