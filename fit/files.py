"""Files that are written whole or not at all, validated input files, and the tables of constants of this folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from .errors import InputError

Form = TypeVar("Form")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block succeeds, and is deleted when it fails.

    Makes the folder of `path`. Raises InputError if `path` cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"{path.parent} cannot be written to ({error.strerror}); give a writable folder.") from None
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp denies access to others, who should be able to read a report
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}); free disk space or give another folder."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def filling(folder: Path, ours: Collection[str]) -> Iterator[Path]:
    """Yield a temporary folder whose files move to `folder` when the block succeeds; otherwise nothing changes.

    Older files of `folder` whose names are in `ours` are deleted. Raises InputError if `folder` cannot be made.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise InputError(f"{folder} cannot be made ({error.strerror}); give a folder that can be written to.") from None
    try:
        yield temporary
        folder.mkdir(exist_ok=True)
        written = sorted(temporary.iterdir())
        if not any(folder.iterdir()):
            temporary.chmod(folder.stat().st_mode)
            temporary.replace(folder)
            return
        for path in written:
            path.replace(folder / path.name)
        for name in set(ours) - {path.name for path in written}:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made ({error.strerror}); give a folder that can be written to.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to `path`, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_constants(name: str) -> Any:
    """Read constants/<name>.yaml."""
    return yaml.safe_load((Path(__file__).parent / "constants" / f"{name}.yaml").read_text(encoding="utf-8"))


def check_regular(path: Path) -> None:
    """Raise InputError if a path names a device or a pipe, which may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{path} is a device or a pipe; give a file.")


def read_document(path: Path, form: type[Form], largest: int = 64 << 20) -> Form:
    """Read a JSON or YAML file into the type `form`.

    Raises InputError if the file is not of this type, cannot be read, or has more than `largest` bytes.
    """
    try:
        check_regular(path)
        if (size := path.stat().st_size) > largest:
            raise InputError(f"{path} has {size} bytes; it must have at most {largest}.")
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give a readable file.") from None
    return parse_document(content, str(path), form, path.suffix in (".yaml", ".yml"))


def parse_document(content: bytes, source: str, form: type[Form], is_yaml: bool = False) -> Form:
    """Parse JSON or YAML into the type `form`; errors call the document `source`."""
    try:
        return msgspec.convert(yaml.safe_load(content), form) if is_yaml else msgspec.json.decode(content, type=form)
    except RecursionError:
        raise InputError(f"{source} is nested too deeply; write it with fewer levels.") from None
    except (msgspec.MsgspecError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).replace("`", "").replace(" - at $", " at $").split())
        raise InputError(f"{source} is not valid: {reason[:300]}.") from None
