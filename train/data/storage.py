"""Things built once in a cache that many processes share, and that any of them may be killed while building.

One builder at a time; a folder appears under its name only when it is complete and on disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config import DataConfig, canonical_json
from ..errors import UserError
from ..files import put_in_place, read_document, temporary_directory_beside

# (stage, done, total): total is 0 while it is unknown.
Progress = Callable[[str, float, float], None]


def silent(stage: str, done: float, total: float) -> None:
    """Progress that nobody sees."""


def cache_directory(config: DataConfig) -> Path:
    """`data.cache_dir`, else $ISOFLOP_CACHE, else ~/.cache/isoflop; made if it is missing."""
    given = config.cache_dir or os.environ.get("ISOFLOP_CACHE")
    directory = Path(given).expanduser() if given else Path.home() / ".cache" / "isoflop"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(_unwritable(directory, error.strerror)) from None
    return directory.absolute()


def _unwritable(directory: Path, reason: str | None) -> str:
    return (
        f"data.cache_dir is {directory}; it cannot be written ({reason}): set it or ISOFLOP_CACHE to a writable folder"
    )


@contextmanager
def locked(cache: Path, name: str, progress: Progress = silent) -> Iterator[None]:
    """Holds the lock `name` of a cache, waiting for whoever has it. It is dropped when its holder dies, kill -9
    included.
    """
    from filelock import FileLock, Timeout

    try:
        (cache / "locks").mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / "locks" / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("wait for another process that builds the same", 0, 0)
            lock.acquire()
    except OSError as error:
        raise UserError(_unwritable(cache, error.strerror)) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def building(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final` that takes its name when the block ends well, and is removed when it does not.

    Only for holders of the lock of `final`, for leftovers of killed builders are removed. A full disk is a `UserError`.
    """
    try:
        for leftover in final.parent.glob(f".{final.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with temporary_directory_beside(final) as temporary:
            yield temporary
            put_in_place(temporary, final)
    except OSError as error:
        # EFBIG is what a limit on the size of files gives (ulimit -f), EDQUOT a quota.
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"data.cache_dir: {final.parent} has no room ({error.strerror}); free some, "
                "or set data.cache_dir to a larger disk"
            ) from error
        raise


def checksum(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """Writes a dict with its own checksum in it. For a folder that `building` makes: it is not atomic by itself."""
    path.write_text(json.dumps({**content, "checksum": checksum(content)}, indent=2) + "\n", encoding="utf-8")


def read_checked(path: Path) -> dict[str, Any]:
    """What `write_checked` wrote, without the checksum; `UserError` where the file is missing or damaged."""
    try:
        content = read_document(path, dict[str, Any])
        expected = content.pop("checksum")
    except (UserError, KeyError):
        reason = "unreadable" if path.exists() else "missing"
        raise UserError(f"{path} is {reason}; it must be a file that this program wrote") from None
    if checksum(content) != expected:
        raise UserError(f"{path} does not match its checksum; it must be a file that this program wrote")
    return content
