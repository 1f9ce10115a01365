"""A reader per kind of log: a file in, its records out, each a mapping of the log's keys to values.

A record has its step under a key such as "step", and its run under RUN if that is not the file's. A damaged record is
yielded as an empty one.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from ..errors import UserError
from ..files import open_regular, read_document

LOSSES = ("train_loss", "val_loss")
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?i:nan|inf(?:inity)?))"
WITH_UNIT = re.compile(rf"({NUMBER})\s*([KMBGT]?)")
HEAD, LONG_HEAD = 1 << 16, 1 << 24  # bytes that tell a file's kind; of a text log, which may begin with a long start-up
BLOCK = 1 << 15  # of wandb's files, which have the format of LevelDB's logs
RUN = "\0run"

Patterns = Mapping[str, Any]  # regular expressions by isoflop's name, see known.yaml
Records = Iterator[dict[str, Any]]


@cache
def known() -> dict[str, Any]:
    return read_document(Path(__file__).with_name("known.yaml"), dict[str, Any])


def number(value: Any) -> float | None:
    """Return a number, also one written as "1.3B" or "1,000"; None for other values."""
    if type(value) in (float, int):
        return float(value)
    match = WITH_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    return float(match[1].replace(",", "")) * UNITS[match[2]] if match else None


class Roles(dict[str, tuple[int, str] | None]):
    """For each key of a log, its rank among the keys with the same meaning, and isoflop's name; None for other keys."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        """Use the keys in `columns`, by isoflop's name, instead of the known ones."""
        self.update({key: (-1, name) for name, key in columns.items()})
        self.tables = [
            {alias: (rank, name) for name in known()[kind] if name not in columns
             for rank, alias in enumerate(known()[kind][name])} for kind in ("metrics", "facts")
        ]  # fmt: skip

    def __missing__(self, key: str) -> tuple[int, str] | None:
        whole, leaf = (  # of a config, which may be nested
            re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") if len(name) > 1 else name
            for name in (key, key.rpartition("/")[2])
        )
        metrics, facts = self.tables
        self[key] = metrics.get(whole) or facts.get(whole) or facts.get(leaf)
        return self[key]


def kind_of(file: Path, programs: Mapping[str, Patterns]) -> str | None:
    """Return the kind of a log by its content: a key of `programs` for a text log; None for others."""
    with suppress(OSError), open_regular(file) as opened:
        head, roles = opened.read(HEAD), Roles({})
        for kind, mark in (("tensorboard", b"brain.Event:"), ("wandb", b":W&B")):
            if mark in head[:64]:
                return kind
        if head.lstrip().startswith(b"{") and b'"log_history"' in head:
            return "trainer_state"
        lines = head.split(b"\n")[:20]
        if any((role := roles[key]) and role[1] in ("step", *LOSSES) for record in _objects(lines) for key in record):
            return "jsonl"
        columns = lines[0].decode(errors="replace").strip().replace('"', "").split(",")
        if len(columns) > 1 and any(" - " in name or ((role := roles[name]) and role[1] in LOSSES) for name in columns):
            return "csv"
        text = "" if b"\0" in head else (head + opened.read(LONG_HEAD)).decode(errors="replace")
        for program, patterns in programs.items():
            names = [name for name in ("step", *LOSSES) if name in patterns]
            if sum(_expression(patterns, name).search(text) is not None for name in names) > 1:
                return program
    return None


def _objects(lines: Iterable[bytes]) -> Records:
    decode = msgspec.json.Decoder().decode
    for line in lines:
        record = None
        try:
            record = decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError):  # ValueError: no UTF-8
            with suppress(ValueError, RecursionError):
                record = json.loads(line)  # reads NaN and Infinity too
        if isinstance(record, dict) or line.strip():
            yield record if isinstance(record, dict) else {}


def _trainer_state(file: Path) -> Records:
    try:
        state = json.loads(file.read_bytes())  # it may hold NaN
        records = [record for record in state["log_history"] if isinstance(record, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{file} is damaged; give the trainer_state.json of another checkpoint") from None
    # The last record of a finished run averages the loss of all its steps.
    yield from ({"max_steps": state.get("max_steps")}, *(record for record in records if "train_runtime" not in record))


def _csv(file: Path) -> Records:
    """Read wandb's exports: of a chart (columns "RUN - KEY"), of a run's history, or of the table of runs."""
    import pandas as pd

    try:
        table: Any = pd.read_csv(file, on_bad_lines="skip", encoding_errors="replace", low_memory=False)
    except ValueError as error:  # no header, say
        raise UserError(f"{file} is not a readable CSV file ({' '.join(str(error).split())})") from None
    for column in (name for name in table if " - " in name and not name.endswith(("__MIN", "__MAX", " - _step"))):
        run, _, key = column.rpartition(" - ")
        for step, value in table[[table.columns[0], column]].dropna().itertuples(index=False):
            yield {RUN: run, "step": step, key: value}
    if not any(" - " in name for name in table):
        names = [name for name in table if name.lower() in ("name", "run", "run_id", "run_name")]
        for row in table.to_dict("records"):  # of a table of runs, each row is the end of a run
            present = {name: value for name, value in row.items() if value == value}
            yield ({RUN: str(row[names[0]]), "step": 1} if names else {}) | present


def _tensorboard(file: Path) -> Records:
    try:
        event_pb2 = import_module("tensorboard.compat.proto.event_pb2")
        tensor_util = import_module("tensorboard.util.tensor_util")
    except ImportError:
        problem = f"{file} is a TensorBoard file, and tensorboard is not installed"
        raise UserError(f"{problem}; install it with pip install 'isoflop[ingest]'") from None
    for event in _messages(file, event_pb2.Event, _event_records):
        yield from [{}] if event is None else ()
        for value in event.summary.value if event else ():
            if value.HasField("simple_value"):
                yield {"step": event.step, value.tag: value.simple_value}
            elif value.HasField("tensor") and not value.tensor.tensor_shape.dim:
                yield {"step": event.step, value.tag: tensor_util.make_ndarray(value.tensor).item()}


def _wandb(file: Path) -> Records:
    wandb_internal_pb2: Any = import_module("wandb.proto.wandb_internal_pb2")

    name = file.stem
    for record in _messages(file, wandb_internal_pb2.Record, _wandb_records):
        yield from [{RUN: name}] if record is None else ()
        name = (record and record.run.display_name) or name
        for items in (record.run.config.update, record.config.update, record.history.item) if record else ():
            names = [json.dumps("/".join(item.nested_key) or item.key) for item in items]
            pairs = ",".join(f"{key}:{item.value_json}" for key, item in zip(names, items, strict=True))
            yield from ({RUN: name} | values for values in _objects([f"{{{pairs}}}".encode()]) if items)


def _messages(file: Path, message: Any, records: Callable[[mmap.mmap], Iterator[bytes]]) -> Iterator[Any]:
    """Yield the messages in a file of `records`, None for a damaged one."""
    with open_regular(file) as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for record in records(content):
            try:
                yield message.FromString(record) if record else None
            except Exception:  # protobuf's DecodeError, from one of several places
                yield None


def _event_records(content: mmap.mmap) -> Iterator[bytes]:
    """Yield the records of an event file: length, a checksum, the content, a checksum; an empty one at a torn end.

    tensorboard's own loader takes 24 s for 100 MB, because it computes checksums in Python.
    """
    place = 0
    while place < len(content):
        start, place = place + 12, place + 16 + int.from_bytes(content[place : place + 8], "little")
        yield content[start : place - 4] if place <= len(content) else b""


def _wandb_records(content: mmap.mmap) -> Iterator[bytes]:
    """Yield the records of an offline run: parts of checksum, length and kind (1 whole, 2 first, 4 last) in blocks."""
    place, parts = 7, b""  # after the header
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:  # padding
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        part, place = content[place + 7 : place + 7 + length], place + 7 + length
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):
            yield parts if place <= len(content) else b""


def _text(file: Path, patterns: Patterns) -> Records:
    expressions = {name: _expression(patterns, name) for name in patterns if name != "repeats"}
    step, parts = None, defaultdict[str, dict[str, float]](dict)
    with file.open(encoding="utf-8", errors="replace") as lines:  # progress bars end lines with \r
        for line in lines:
            record: dict[str, Any] = {}
            for name, expression in expressions.items():
                if match := expression.search(line):
                    parts[name][match[1] if expression.groups > 1 else ""] = number(match[expression.groups]) or 0.0
                    record[name] = sum(parts[name].values())
            step = record.get("step", step)
            if record:
                yield {"step": step} | record


def _expression(patterns: Patterns, name: str) -> re.Pattern[str]:
    with suppress(re.error):
        expression = re.compile(str(patterns[name]).replace("<number>", f"({NUMBER}[KMBGT]?)"))
        if expression.groups in (1, 2):
            return expression
    raise UserError(f"the pattern {name} is {patterns[name]!r}; it must be a regular expression with one group")


def read_records(file: Path, kind: str, patterns: Patterns) -> Records:
    """Yield the records of a file of one kind, see `kind_of`."""
    if kind == "jsonl":
        with open_regular(file) as lines:
            yield from _objects(lines)
    else:
        readers = {"tensorboard": _tensorboard, "wandb": _wandb, "csv": _csv, "trainer_state": _trainer_state}
        yield from readers[kind](file) if kind in readers else _text(file, patterns)
