"""Readers that stream documents from files of text, JSON lines (both plain, gzip or zstandard) and parquet.

A truncated compressed file is an error, never a shorter corpus.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UserError
from ..files import open_regular

# C4 and Dolma name files with one object per line .json.gz, too.
_FORMATS = {".txt": "plain", ".md": "plain", ".rst": "plain", ".py": "plain", ".jsonl": "jsonl", ".json": "jsonl"}
_COMPRESSED = (".gz", ".zst")
ACCEPTED = f"{', '.join(_FORMATS)} (also with {' or '.join(_COMPRESSED)}), .parquet; convert other files to .txt first"
_BLOCK = 1 << 20  # bytes read or decompressed at a time
LONGEST_LINE = 256 << 20  # bytes, because a document and its tokens must fit into memory; chosen by hand
_BOM = b"\xef\xbb\xbf"
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile)  # of a compressed file


def format_of(path: Path) -> str | None:
    """Return the format that the file ending stands for: `plain`, `jsonl` or `parquet`; None if unknown."""
    ending = (path.with_suffix("") if is_compressed(path) else path).suffix.lower()
    return "parquet" if path.suffix.lower() == ".parquet" else _FORMATS.get(ending)


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in _COMPRESSED


def read_documents(path: Path, field: str, piece_bytes: int) -> Iterator[str]:
    """Yield the documents of one file in order, without blank ones.

    Args:
        field: Key or column that holds the text.
        piece_bytes: Plain text longer than this is cut into documents, at blank lines where possible.

    Raises:
        UserError: The file is missing, damaged, not UTF-8, or lacks the field.
    """
    kind = format_of(path)
    try:
        if kind == "plain":
            texts = _plain(path, piece_bytes)
        else:
            texts = _parquet(path, field) if kind == "parquet" else _json_lines(path, field)
        for text in texts:
            if text.strip():
                yield text
    except OSError as error:
        raise UserError(f"data.path: {path} cannot be read ({error.strerror}); it must be a readable file") from None


def well_formed(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _plain(path: Path, piece_bytes: int) -> Iterator[str]:
    done, buffer, blocks = 0, b"", _blocks(path, piece_bytes + 1)
    while True:
        try:
            while len(buffer) <= piece_bytes and (block := next(blocks, b"")):
                buffer = (buffer + block).removeprefix(b"" if done else _BOM)
        except _DAMAGE as error:
            raise UserError(
                f"data.path: {path} is damaged after byte {done} ({one_line(error)}); download or compress it again"
            ) from None
        if not buffer:
            return
        end = len(buffer) if len(buffer) <= piece_bytes else _cut(buffer, piece_bytes)
        try:
            yield buffer[:end].decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"data.path: {path} is not UTF-8 text (byte 0x{buffer[error.start]:02x} near offset "
                f"{done + error.start}); convert it to UTF-8"
            ) from None
        done += end
        buffer = buffer[end:]


def _cut(buffer: bytes, limit: int) -> int:
    """Return where to cut `buffer`, within `limit` bytes: after a blank line, else a line, a word or a character."""
    for separator in (b"\n\n", b"\r\n\r\n", b"\n", b" "):
        position = buffer.rfind(separator, limit // 2, limit)
        if position >= 0:
            return position + len(separator)
    end = limit
    while end > 1 and buffer[end] & 0xC0 == 0x80:  # 10xxxxxx continues a character
        end -= 1
    return end


def _json_lines(path: Path, field: str) -> Iterator[str]:
    for number, row in json_objects(path):
        yield text_of(row, field, f"line {number} of {path}")


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each non-blank line of a JSON-lines file."""
    number = 0
    try:
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.removeprefix(_BOM) if number == 1 else line)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"data.path: line {number} of {path} is not UTF-8 (byte 0x{error.object[error.start]:02x}); "
                    "convert the file to UTF-8"
                ) from None
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"data.path: line {number} of {path} is not JSON ({one_line(error)}); "
                    "every line must hold one JSON object"
                ) from None
            if not isinstance(row, dict):
                raise UserError(
                    f"data.path: line {number} of {path} holds {type(row).__name__}, not an object; "
                    "every line must hold one JSON object"
                )
            yield number, row
    except _DAMAGE as error:
        raise UserError(
            f"data.path: {path} is damaged after line {number} ({one_line(error)}); download or compress it again"
        ) from None


def _lines(path: Path) -> Iterator[bytes]:
    rest: list[bytes] = []
    for block in _blocks(path, _BLOCK):
        first, *others = block.split(b"\n")
        rest.append(first)
        for other in others:
            yield b"".join(rest)
            rest = [other]
        if sum(map(len, rest)) > LONGEST_LINE:
            raise UserError(
                f"data.path: {path} has a line of more than {LONGEST_LINE:,} bytes; every line must hold one document, "
                "and plain text of any length can be a .txt file"
            )
    if line := b"".join(rest):
        yield line


def _blocks(path: Path, size: int) -> Iterator[bytes]:
    with open_regular(path) as file:
        name = path.name.lower()
        if name.endswith(".zst"):
            yield from _zstandard_blocks(file)
            return
        stream = gzip.open(file) if name.endswith(".gz") else file  # noqa: SIM115  closing `file` is enough
        while block := stream.read(size):
            yield block


def _zstandard_blocks(file: BinaryIO) -> Iterator[bytes]:
    import zstandard

    frame = None
    while compressed := file.read(_BLOCK // 256):  # small reads: a zip bomb expands to 2^15 times its size
        while compressed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                block = frame.decompress(compressed)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            if block:
                yield block
            compressed = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the last frame ends early")


def _parquet(path: Path, field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    open_regular(path).close()  # a missing file gets a different error from a damaged one
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise UserError(f"data.field is {field!r}; the columns of {path} are {_listed(names)}")
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield text_of({field: value}, field, f"row {row} of {path}")
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"data.path: {path} is not a readable parquet file ({one_line(error)}); download or write it again"
        ) from None


def parquet_text_bytes(path: Path, field: str) -> int | None:
    """Estimate a column's bytes of text by its uncompressed size in the file's footer. None if unreadable."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            columns = [group.column(i) for group in groups for i in range(group.num_columns)]
            return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == field)
    except (pyarrow.ArrowException, OSError):
        return None


def text_of(row: dict[str, Any], field: str, where: str) -> str:
    """Return a row's text in `field`, empty for null. `where` names the row in errors."""
    if field not in row:
        raise UserError(f"data.field is {field!r}; the fields of {where} are {_listed(list(row))}")
    value = row[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"data.field is {field!r}; its value in {where} is {type(value).__name__}: it must be text")
    return well_formed(value)


def cut(texts: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    """Yield texts up to `max_bytes` of UTF-8 in total (None: no limit). The last is cut between characters."""
    if max_bytes is None:
        yield from texts
        return
    remaining = max_bytes
    for text in texts:
        encoded = text.encode()
        if len(encoded) >= remaining:
            shortened = encoded[:remaining].decode(errors="ignore")
            if shortened.strip():
                yield shortened
            return
        yield text
        remaining -= len(encoded)


def cut_or_refuse(texts: Iterable[str], max_bytes: int | None, complaint: str) -> Iterator[str]:
    """Apply `cut`. If it yields nothing, raise UserError with the message `complaint`."""
    empty = True
    for text in cut(texts, max_bytes):
        empty = False
        yield text
    if empty:
        raise UserError(complaint)


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:12])
    return (shown + (", …" if len(names) > 12 else "")) or "none"


def one_line(error: BaseException) -> str:
    """Return the first 120 characters of the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return (lines[0][:120].rstrip(" .") if lines else "") or type(error).__name__
