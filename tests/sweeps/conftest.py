"""Fixtures shared by several files: the `isoflop` command, a copy of a sweep, and scripts that replace commands."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.main
import typer.testing
from isoflop.fit.forecasting.mixture import FormMixture
from isoflop.sweeps.cli import main as cli
from isoflop.sweeps.runs.directory import SweepDirectory

# All tests of a process build the command line once.
typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)


@pytest.fixture(autouse=True, scope="module")
def few_resamples() -> Iterator[None]:
    """Draw 60 resamples per law in forecasts, not 400: these tests check commands, and tests/fit the intervals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FormMixture.__init__, "__defaults__", (None, 60, 0, None))
        yield


@pytest.fixture
def isoflop(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs `isoflop ARGUMENTS` in this process: (exit code, standard output, standard error)."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isoflop", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return command


@pytest.fixture
def sweep(smoke: tuple[Path, str], tmp_path: Path) -> SweepDirectory:
    """Return a copy of the finished smoke sweep that a test may change."""
    return SweepDirectory(Path(shutil.copytree(smoke[0], tmp_path / "smoke")))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that puts a named shell script first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put
