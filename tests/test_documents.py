"""Both readers of external files, of train/ and fit/, accept valid files and refuse others with one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from isoflop.fit import InputError
from isoflop.fit import files as fit_files
from isoflop.train import files as train_files
from isoflop.train.errors import UserError


@dataclass
class Form:
    steps: int
    loss: float = 0.0
    names: list[str] = field(default_factory=list)


@pytest.fixture(params=[(train_files.read_document, UserError), (fit_files.read_document, InputError)])
def reader(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], type[Exception]]:
    reader_and_error: tuple[Callable[..., Any], type[Exception]] = request.param
    return reader_and_error


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", b'{"steps": 3, "loss": 2, "other": []}'), ("a.yaml", b"steps: 3\nloss: 2.0\nother: 1\n")],
)
def test_a_file_as_it_must_be(reader: Any, name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert reader[0](tmp_path / name, Form) == Form(3, 2.0)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", b'{"steps": "three"}', "Expected int, got str at $.steps"),
        ("a.json", b'{"steps": 3, "names": ["a", 1]}', r"Expected str, got int at $.names[1]"),
        ("a.json", b'{"other": ' + b"[" * 100_000, "nested too deeply"),
        ("a.json", b'{"steps": 3, "loss": NaN}', "malformed"),
        ("a.json", b'{"steps": 3, "loss": 1e999}', "out of range"),
        ("a.json", b'{"steps": 3', "truncated"),
        ("a.json", b"\xff\xfe", "malformed"),
        ("a.json", b"1" * 2000, "2000 bytes; it must have at most 1000"),
        ("a.yaml", b"steps: [1, 2", "expected ',' or ']'"),
        ("a.yaml", b"steps: " + b"[" * 900 + b"]" * 900, "nested too deeply"),
        ("a.yaml", b"steps: \xff", "invalid start byte"),
        ("folder", None, "cannot be read"),
        ("pipe.json", None, "a device or a pipe"),
        ("missing.json", None, "No such file"),
    ],
)
def test_anything_else_is_refused(reader: Any, name: str, content: bytes | None, expected: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    largest = 1000 if content == b"1" * 2000 else 1 << 20
    with pytest.raises(reader[1]) as raised:
        reader[0](tmp_path / name, Form, largest)
    message = str(raised.value)
    assert str(tmp_path / name) in message
    assert expected.lower() in message.lower()
    assert "\n" not in message
    assert len(message) < 500
