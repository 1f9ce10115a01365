"""File writing that never leaves a half-written file to readers, even after a kill or on a full disk."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import pickle
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from .errors import UserError

Form = TypeVar("Form")
MOST_VALUES, MOST_LEVELS = 1_000_000, 100  # of a YAML file; chosen by hand
LONGEST_CACHED = 100_000  # bytes of a YAML file whose content is kept in memory

# Files of a run directory that the trainer and its launcher share.
FAILURE = "failure.json"  # the cause that ended an attempt, from the first rank that detected it
HALVED = "micro_batch.json"  # written when memory ran out: the next start uses a smaller micro-batch


def plain_value(value: Any) -> Any:
    """Convert a NumPy scalar or a path for `json.dumps(default=...)`. Raises TypeError for other values."""
    if type(value).__module__ == "numpy":  # not imported, so that commands that only read start in half the time
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def write_atomic(
    path: Path,
    content: str | Iterable[bytes | memoryview],
    flush: bool = True,
    place: Callable[[str, Path], None] | None = None,
) -> None:
    """Replace `path` in one step: temporary file in the same folder, fsync, rename. On any error the old file stays.

    Args:
        flush: Wait for the disk. If False, readers see the old or the new file, but a power cut may lose both.
        place: Called with the temporary and the final path instead of the rename.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines([content.encode()] if isinstance(content, str) else content)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        (place or os.replace)(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def write_json(path: Path, value: Any, flush: bool = True) -> None:
    """Write indented JSON with `write_atomic`. Raises ValueError for NaN."""
    write_atomic(path, json.dumps(value, indent=1, default=plain_value, allow_nan=False) + "\n", flush)


def create_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file unless it exists. Ignores errors such as a full disk or a missing folder."""

    def place(whole: str, path: Path) -> None:
        try:
            os.link(whole, path)  # unlike a rename, fails if the file exists
        except OSError:
            if not path.exists():  # a file system without links
                os.replace(whole, path)

    if path.parent.is_dir():
        with suppress(OSError):
            write_atomic(path, json.dumps(value), flush=False, place=place)


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class JsonLines:
    """An append-only file of JSON lines. Opening removes a line that a kill cut short."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("rb+") as file:
                content = file.read()
                if content and not content.endswith(b"\n"):
                    file.truncate(content.rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, default=plain_value) + "\n")
        self._file.flush()

    def close(self) -> None:
        with suppress(OSError):  # closing retries a failed write, whose error was already raised
            self._file.close()


def open_regular(path: Path, largest: float = float("inf")) -> BufferedReader:
    """Open a file for reading. Raises OSError for more than `largest` bytes, and for devices, which may never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):  # `open` refuses a folder
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", str(path))
    if status.st_size > largest:
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes; it must have at most {largest}", str(path))
    return path.open("rb")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return every object of a JSON-lines file. Skips broken lines; a missing file gives an empty list."""
    records = []
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                with suppress(ValueError, RecursionError):
                    if isinstance(value := json.loads(line), dict):
                        records.append(value)
    return records


def read_document(path: Path, form: type[Form], largest: int = 64 << 20, remedy: str | None = None) -> Form:
    """Read a JSON or YAML file and convert it to `form`, a type that msgspec knows, such as `dict[str, float]`.

    Raises:
        UserError: The file is unreadable, larger than `largest` bytes, or does not match `form`. The message names file
            and field, and ends with the advice `remedy`.
    """
    import msgspec
    import yaml

    try:
        with open_regular(path, largest) as file:
            content = file.read()
        if path.suffix in (".yaml", ".yml", ""):  # lm-eval's templates have no file ending
            parse = _parsed if len(content) < LONGEST_CACHED else _parsed.__wrapped__
            return msgspec.convert(pickle.loads(parse(content.decode())), form)
        return msgspec.json.decode(content, type=form)
    except OSError as error:
        what, usual = f"cannot be read ({error.strerror or error})", "give a readable file"
    except RecursionError:
        what, usual = "is nested too deeply", "use fewer levels"
    except (msgspec.MsgspecError, yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).replace("`", "").replace(" - at $", " at $").split())
        what, usual = f"has invalid content: {reason[:300]}", "correct it"
    raise UserError(f"{path} {what}; {remedy or usual}")


@functools.lru_cache(maxsize=1024)  # each pass over a sweep reads the same configs
def _parsed(text: str) -> bytes:
    """Parse YAML, and pickle the result, with limits on nesting and on the number of values, which aliases multiply."""
    import yaml

    # The C loader takes a tenth of the time, but deep nesting can crash it. Brackets and columns bound the depth.
    depth = text.count("[") + text.count("{") + max(map(len, text.splitlines()), default=0)
    try:
        result = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader) if depth < 20_000 else yaml.SafeLoader)
    except yaml.YAMLError as error:
        if "nesting depth" in str(error):  # the C loader of PyYAML 6.0.4 counts levels itself
            raise RecursionError from None
        raise
    remaining, values = MOST_VALUES, [(result, 0)]
    while values:
        value, depth = values.pop()
        if depth > MOST_LEVELS:
            raise RecursionError
        if (remaining := remaining - 1) < 0:
            raise ValueError(f"it holds more than {MOST_VALUES} values")
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        values += [(item, depth + 1) for item in inner]
    return pickle.dumps(result)


def read_json(path: Path, form: Any = None) -> dict[str, Any] | None:
    """Read a JSON object. Return None if the file is missing or does not match `form`, a msgspec type."""
    try:
        with open_regular(path) as file:
            value = json.load(file)
        if form is not None:
            import msgspec

            msgspec.convert(value, form)
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def temporary_directory_beside(path: Path) -> Iterator[Path]:
    """Yield a new directory next to `path`, removed on any error. The caller renames it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def put_in_place(temporary: Path, output: Path) -> None:
    """Flush a folder and rename it to `output`. An existing folder is moved away first, then deleted."""
    for path in [*sorted(temporary.rglob("*")), temporary]:
        fsync_path(path)
    os.chmod(temporary, 0o755)
    old = temporary.with_name(f"{temporary.name}.old")
    if output.is_dir() and any(output.iterdir()):
        os.replace(output, old)
    try:
        os.replace(temporary, output)  # also works if `output` is an empty folder
    except OSError:
        if old.exists():
            os.replace(old, output)
        raise
    fsync_path(output.parent)
    shutil.rmtree(old, ignore_errors=True)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
