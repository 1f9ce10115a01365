"""The examples in fit's docstrings and in docs/ give the output that they show."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import isoflop
import pytest
from isoflop import fit

ROOT = Path(isoflop.__file__).resolve().parent
OPTIONS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
MODULES = sorted(path for path in (ROOT / "fit").rglob("*.py") if ">>> " in path.read_text())
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if ">>> " in path.read_text())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_examples_of_docstrings(path: Path) -> None:
    name = ".".join(("isoflop", *path.relative_to(ROOT).with_suffix("").parts))
    done = doctest.testmod(import_module(name), optionflags=OPTIONS)
    assert done.attempted
    assert not done.failed


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_examples_of_pages(path: Path) -> None:
    done = doctest.testfile(str(path), module_relative=False, optionflags=OPTIONS)
    assert done.attempted
    assert not done.failed


def test_there_are_examples() -> None:
    assert len(MODULES) >= 3
    assert PAGES


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    assert sorted(re.findall(r"^- `fit\.(\w+)`: \S", page, re.MULTILINE)) == fit.__all__
