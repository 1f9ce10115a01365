"""A build cache that many processes share, and that survives if one is killed.

One process builds at a time; a folder gets its final name only when it is complete and on disk.
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

# Called with (stage, done, total); total is 0 if unknown.
Progress = Callable[[str, float, float], None]


def silent(stage: str, done: float, total: float) -> None:
    """Ignore progress."""


def cache_directory(config: DataConfig) -> Path:
    """Return `data.cache_dir`, else $ISOFLOP_CACHE, else ~/.cache/isoflop. Creates it if missing."""
    configured = config.cache_dir or os.environ.get("ISOFLOP_CACHE")
    directory = Path(configured).expanduser() if configured else Path.home() / ".cache" / "isoflop"
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
    """Hold the lock `name` of a cache. Killing the holder releases it."""
    from filelock import FileLock, Timeout

    try:
        (cache / "locks").mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / "locks" / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("waiting for another process that is building the same files", 0, 0)
            lock.acquire()
    except OSError as error:
        raise UserError(_unwritable(cache, error.strerror)) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def building(final: Path) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `final` if the block succeeds, else removed.

    Hold the lock of `final`, because folders that killed builders left are removed. Raises UserError on a full disk.
    """
    try:
        for leftover in final.parent.glob(f".{final.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with temporary_directory_beside(final) as temporary:
            yield temporary
            put_in_place(temporary, final)
    except OSError as error:
        # EFBIG comes from a limit on file sizes (ulimit -f), EDQUOT from a quota.
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"data.cache_dir: {final.parent} has no space left ({error.strerror}); free some, or set "
                "data.cache_dir to a folder on a larger disk"
            ) from error
        raise


def checksum(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """Write a dict with its checksum. Not atomic: use it inside `building`."""
    path.write_text(json.dumps({**content, "checksum": checksum(content)}, indent=2) + "\n", encoding="utf-8")


def read_checked(path: Path) -> dict[str, Any]:
    """Read a dict that `write_checked` wrote. Raises UserError if the file is missing or damaged."""
    try:
        content = read_document(path, dict[str, Any])
        expected = content.pop("checksum")
    except (UserError, KeyError):
        reason = "unreadable" if path.exists() else "missing"
        raise UserError(f"{path} is {reason}; it must be a file that isoflop wrote") from None
    if checksum(content) != expected:
        raise UserError(f"{path} does not match its checksum; it must be a file that isoflop wrote")
    return content
