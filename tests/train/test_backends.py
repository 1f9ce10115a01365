"""Selection of a run's attention backend."""

from __future__ import annotations

import sys
from collections.abc import Set
from typing import Any

import pytest
import torch
from isoflop.train.errors import UserError
from isoflop.train.model import backends
from isoflop.train.model.backends import Choice, Work, choose_backend, select_backend

ALL = frozenset(backends.PACKAGES)
HOPPER: dict[str, Any] = {
    "device_type": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 64, "has_window": False,
    "has_documents": False,
}  # fmt: skip
CPU: dict[str, Any] = {"device_type": "cpu", "capability": None}


def chosen(requested: str, installed: Set[str] = ALL, **changes: Any) -> Choice:
    return choose_backend(requested, Work(**(HOPPER | changes)), installed)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "sdpa"),
        (CPU | {"has_window": True}, "sdpa"),
        ({"has_window": True, "dtype": torch.float32}, "ours"),
        ({"has_window": True, "head_dim": 80}, "sdpa"),
        ({"has_documents": True}, "ours"),
        ({"has_documents": True, "installed": {"sdpa"}}, "sdpa"),
        ({"has_ring": True}, "ours"),
        (CPU | {"has_ring": True}, "sdpa"),
    ],
)
def test_auto_takes_what_suits_the_device_and_the_mask(changes: dict[str, Any], name: str) -> None:
    assert chosen("auto", **changes).name == name


@pytest.mark.parametrize(
    ("requested", "changes", "reason"),
    [
        ("ours", {"installed": {"sdpa"}}, "and Triton is not installed; .* sdpa"),
        ("ours", CPU, "needs a GPU; .* sdpa"),
        ("ours", {"capability": (7, 5)}, r"compute capability 7\.5; .* sdpa"),
        ("ours", {"dtype": torch.float64}, "not torch.float64; .* sdpa"),
        ("ours", {"head_dim": 40}, "is 40; .* sdpa"),
        ("sdpa", {"has_ring": True}, r"\(parallel\.cp\) on a GPU; .* ours"),
        ("sdpa", {"has_ring": True, "head_dim": 40}, r"parallel\.cp must be 1"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_in_a_sentence(
    requested: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=rf"^parallel\.attention is '{requested}', .*{reason}") as refusal:
        chosen(requested, **changes)
    assert "\n" not in str(refusal.value)


def test_a_package_that_cannot_be_imported_is_passed_over_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "installed", lambda: ALL)
    monkeypatch.setitem(sys.modules, "isoflop.train.kernels.flash", None)  # makes the import fail
    device, masks = torch.device("cuda"), (True, False)
    choice, backend = select_backend("auto", device, torch.bfloat16, 64, *masks)
    assert (choice.name, backend.name) == ("sdpa", "sdpa")
    assert "Triton cannot be imported" in choice.reason
    with pytest.raises(UserError, match=r"^parallel\.attention is 'ours', and Triton cannot be imported \("):
        select_backend("ours", device, torch.bfloat16, 64, *masks)
