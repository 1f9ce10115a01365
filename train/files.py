"""Writes files so that no reader finds half of one, even after a kill or on a full disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from .errors import UserError

Form = TypeVar("Form")
MOST_VALUES, MOST_LEVELS = 1_000_000, 100  # of a YAML file

# Files of a run directory that both the trainer and whoever starts it know.
FAILURE = "failure.json"  # what ended an attempt, in the words of the first rank that knew
HALVED = "micro_batch.json"  # memory ran out, and the next start takes a smaller micro-batch


def plain_value(value: Any) -> Any:
    """Fallback for json: NumPy scalars and paths as plain values."""
    if type(value).__module__ == "numpy":  # not imported here: commands that only read start in half the time
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
    """Replaces `path` in one step: temporary file beside it, fsync, rename. On any error the old file stays.

    Without `flush` it does not wait for the disk: a reader sees the old or the new, but a power cut may leave none.
    `place` takes the place of the rename.
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
    """`write_atomic` of indented JSON. NaN is refused: a number that is not one must not pass for a result."""
    write_atomic(path, json.dumps(value, indent=1, default=plain_value, allow_nan=False) + "\n", flush)


def create_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file whole, unless there is one: the first word stays. A full disk is no error of its own."""

    def place(whole: str, path: Path) -> None:
        try:
            os.link(whole, path)  # unlike a rename it fails where the file exists
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
    """An append-only file of JSON lines; a line torn by a kill is cut off before the next one is written."""

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
        with suppress(OSError):  # what `write` could not write is tried again, and has been raised already
            self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every object of a JSON-lines file; lines that are torn, or hold no object, and a missing file are no error."""
    found = []
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                with suppress(ValueError, RecursionError):
                    if isinstance(value := json.loads(line), dict):
                        found.append(value)
    return found


def read_document(path: Path, form: type[Form], largest: int = 64 << 20, remedy: str | None = None) -> Form:
    """A JSON or YAML file from outside as `form`, any type that msgspec knows: a dataclass, `dict[str, float]`, …

    Raises:
        UserError: it cannot be read, has more than `largest` bytes, or has another form; names file, field and remedy.
    """
    import msgspec
    import yaml

    try:
        if (size := path.stat().st_size) > largest:
            raise UserError(f"{path} has {size} bytes; it must have at most {largest}")
        content = path.read_bytes()
        if path.suffix in (".yaml", ".yml", ""):  # lm-eval's templates have no ending
            return msgspec.convert(_parse_yaml(content.decode()), form)
        return msgspec.json.decode(content, type=form)
    except OSError as error:
        what, usual = f"cannot be read ({error.strerror or error})", "name a file that can"
    except RecursionError:
        what, usual = "is nested too deeply", "write it without so many levels"
    except (msgspec.MsgspecError, yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).replace("`", "").replace(" - at $", " at $").split())
        what, usual = f"is not what it must be: {reason[:300]}", "correct it"
    raise UserError(f"{path} {what}; {remedy or usual}")


def _parse_yaml(text: str) -> Any:
    """The values of a YAML text; few lines can stand for more than any memory, by aliases of aliases."""
    import yaml

    # The loader in C takes a tenth of the time, and depth can crash it; brackets and columns bound that.
    depth = text.count("[") + text.count("{") + max(map(len, text.splitlines()), default=0)
    try:
        result = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader) if depth < 20_000 else yaml.SafeLoader)
    except yaml.YAMLError as error:
        if "nesting depth" in str(error):  # the loader in C of PyYAML 6.0.4 counts levels itself
            raise RecursionError from None
        raise
    left, values = MOST_VALUES, [(result, 0)]
    while values:
        value, depth = values.pop()
        if depth > MOST_LEVELS:
            raise RecursionError
        if (left := left - 1) < 0:
            raise ValueError(f"it holds more than {MOST_VALUES} values")
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        values += [(each, depth + 1) for each in inner]
    return result


def read_json(path: Path, form: Any = None) -> dict[str, Any] | None:
    """A JSON object; None where the file is missing, is not one, or has not the `form`, any type that msgspec knows."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if form is not None:
            import msgspec

            msgspec.convert(value, form)
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def temporary_directory_beside(path: Path) -> Iterator[Path]:
    """A new directory next to `path`, removed on any error; the caller renames it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def put_in_place(temporary: Path, output: Path) -> None:
    """Flushes a folder to the disk and renames it; what stood there steps aside first, and goes last."""
    for path in [*sorted(temporary.rglob("*")), temporary]:
        fsync_path(path)
    os.chmod(temporary, 0o755)
    old = temporary.with_name(f"{temporary.name}.old")
    if output.is_dir() and any(output.iterdir()):
        os.replace(output, old)
    try:
        os.replace(temporary, output)  # onto an empty folder this works, too
    except OSError:
        if old.exists():
            os.replace(old, output)
        raise
    fsync_path(output.parent)
    shutil.rmtree(old, ignore_errors=True)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
