"""A reader per kind of log: a file in, its records out, each a mapping of the log's keys to values.

A record has its step under a key such as "step", and its run under RUN if the file has several. A damaged record is
yielded as an empty one.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ..errors import UserError
from ..files import open_regular, read_document
from .names import LOSSES, NUMBER, Roles, number

HEAD, LONG_HEAD = 1 << 16, 1 << 24  # bytes that tell a file's kind; of a text log, which may begin with a long start-up
BLOCK = 1 << 15  # of wandb's files, which have the format of LevelDB's logs
LARGEST = 1 << 28  # bytes of a record; a longer one is taken for damage
RUN = "\0run"

Patterns = Mapping[str, Any]  # regular expressions by isoflop's name, see known.yaml
Records = Iterator[dict[str, Any]]


def kind_of(file: Path, programs: Mapping[str, Patterns]) -> str | None:
    """Return the kind of a log by its content: a key of READERS, or of `programs` for a text log; None for others."""
    with suppress(OSError), open_regular(file) as opened:
        head, roles = opened.read(HEAD), Roles({})
        if b"brain.Event:" in head[:64]:
            return "tensorboard"
        if head.startswith(b":W&B"):
            return "wandb"
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
            tried = [
                name for name in ("step", *LOSSES) if name in patterns and _expression(patterns, name).search(text)
            ]
            if tried[:1] == ["step"] and len(tried) > 1:
                return program
    return None


def _objects(lines: Iterable[bytes]) -> Records:
    decode = msgspec.json.Decoder().decode
    for line in lines:
        record = None
        try:
            record = decode(line)
        except (msgspec.DecodeError, RecursionError):
            with suppress(ValueError, RecursionError):
                record = json.loads(line)  # reads NaN and Infinity too
        if isinstance(record, dict) or line.strip():
            yield record if isinstance(record, dict) else {}


def _json_lines(file: Path, patterns: Patterns) -> Records:
    with open_regular(file) as lines:
        yield from _objects(lines)


def _trainer_state(file: Path, patterns: Patterns) -> Records:
    state = read_document(file, dict[str, Any], 1 << 30)
    yield {"max_steps": state.get("max_steps")}
    # The last record of a finished run averages the loss of all its steps.
    yield from (record for record in state["log_history"] if isinstance(record, dict) and "train_runtime" not in record)


def _csv(file: Path, patterns: Patterns) -> Records:
    """Read wandb's exports: of a chart (columns "RUN - KEY"), of a run's history, or of the table of runs."""
    import pandas as pd

    try:
        table = pd.read_csv(file, on_bad_lines="skip", encoding_errors="replace", low_memory=False)
    except ValueError as error:  # no header, say
        raise UserError(f"{file} is not a readable CSV file ({' '.join(str(error).split())})") from None
    for column in (name for name in table if " - " in name and not name.endswith(("__MIN", "__MAX", " - _step"))):
        run, _, key = column.rpartition(" - ")
        for step, value in table[[table.columns[0], column]].dropna().itertuples(index=False):
            yield {RUN: run, "step": step, key: value}
    if not any(" - " in name for name in table):
        run = next((name for name in table if name.lower() in ("name", "run", "run_id", "run_name")), None)
        for row in table.to_dict("records"):  # of a table of runs without a step, each row is a whole run
            yield {RUN: str(row[run]) if run else file.stem, **({"step": 1} if run else {}), **row}


def _tensorboard(file: Path, patterns: Patterns) -> Records:
    """Read event files, in which a record is its length, a checksum, its content and another checksum.

    tensorboard's own loader takes 24 s for 100 MB, because it computes checksums in Python.
    """
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.util import tensor_util
    except ImportError:
        problem = f"{file} is a TensorBoard file, and tensorboard is not installed"
        raise UserError(f"{problem}; install it with pip install 'isoflop[ingest]'") from None
    with open_regular(file) as opened:
        while head := opened.read(12):
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else LARGEST
            content = opened.read(min(length, LARGEST) + 4)
            if len(content) < length + 4:  # torn, or still being written
                yield {}
                return
            event = _parsed(event_pb2.Event, content[:-4])
            for value in event.summary.value if event else ():
                if value.HasField("simple_value"):
                    yield {"step": event.step, value.tag: value.simple_value}
                elif value.HasField("tensor") and not value.tensor.tensor_shape.dim:
                    yield {"step": event.step, value.tag: tensor_util.make_ndarray(value.tensor).item()}
            if event is None:
                yield {}


def _parsed(message: Any, content: bytes) -> Any:
    try:
        return message.FromString(content)
    except Exception:  # protobuf's DecodeError, from one of several places
        return None


def _wandb(file: Path, patterns: Patterns) -> Records:
    from wandb.proto import wandb_internal_pb2

    for content in _wandb_records(file):
        record = _parsed(wandb_internal_pb2.Record, content) if content else None
        if record is None:
            yield {}
            continue
        for items in (record.run.config.update, record.config.update, record.history.item):
            if items:
                names = [json.dumps("/".join(item.nested_key) or item.key) for item in items]
                pairs = ",".join(f"{name}:{item.value_json}" for name, item in zip(names, items, strict=True))
                yield next(_objects([f"{{{pairs}}}".encode()]))


def _wandb_records(file: Path) -> Iterator[bytes]:
    """Yield the records of an offline run: parts of checksum, length and kind (1 whole, 2 first, 4 last) in blocks."""
    content = file.read_bytes()
    place, parts = 7, b""  # after the header
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:  # padding
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        part, place = content[place + 7 : place + 7 + length], place + 7 + length
        if len(part) < length or kind not in (1, 2, 3, 4):
            yield b""
            return
        parts = part if kind < 3 else parts + part
        if kind in (1, 4):
            yield parts


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
    try:
        expression = re.compile(str(patterns[name]).replace("<number>", f"({NUMBER}[KMBGT]?)"))
        if expression.groups in (1, 2):
            return expression
        problem = f"it has {expression.groups} groups"
    except re.error as error:
        problem = str(error)
    raise UserError(f"{name} is {patterns[name]!r} ({problem}); it must be a regular expression with one group")


READERS: dict[str, Callable[[Path, Patterns], Records]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "csv": _csv,
    "trainer_state": _trainer_state,
    "jsonl": _json_lines,
    "text": _text,  # of every program
}
