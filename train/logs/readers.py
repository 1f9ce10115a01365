"""A reader per kind of log: files in, the series of each run in them out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ..files import open_regular
from .series import Roles, Series

HEAD = 1 << 16  # bytes of a file that tell its kind

NewSeries = Callable[[], Series]
Reader = Callable[[Sequence[Path], NewSeries, Mapping[str, Any]], dict[str, Series]]


def kind_of(file: Path, programs: Mapping[str, Any]) -> str | None:
    """Return the kind of a log by its first bytes, or None."""
    with suppress(OSError), open_regular(file) as opened:
        head = opened.read(HEAD)
        if any({"step", "train_loss", "val_loss"} & _roles(record) for record in _records(head.splitlines()[:20])):
            return "jsonl"
    return None


def _roles(record: Mapping[str, Any]) -> set[str]:
    roles = Roles({})
    return {role[0] for key in record if (role := roles[key])}


def _records(lines: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among lines; others are skipped."""
    decode = msgspec.json.Decoder().decode
    for line in lines:
        try:
            record = decode(line)
        except (msgspec.DecodeError, RecursionError):
            try:
                record = json.loads(line)  # reads NaN too
            except (ValueError, RecursionError):
                continue
        if isinstance(record, dict):
            yield record


def _jsonl(files: Sequence[Path], new: NewSeries, patterns: Mapping[str, Any]) -> dict[str, Series]:
    series = new()
    for file in files:
        with open_regular(file) as lines:
            for record in _records(lines):
                series.add(record)
    return {files[0].stem: series}


READERS: dict[str, Reader] = {"jsonl": _jsonl, "text": _jsonl}
