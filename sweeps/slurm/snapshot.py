"""The code that a sweep's jobs run: a copy in the sweep's folder, so that an edit while jobs wait changes nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from ...train.errors import counted
from ...train.files import temporary_directory_beside, write_json
from ..runs.directory import SweepDirectory

PACKAGE = Path(__file__).resolve().parents[2]
ROOMS = ("conf", "evaluate", "fit", "sweeps", "train")  # with __init__.py all that a job imports
SHOWN = 5  # names of untracked files that are printed; source.json has all
SOURCE = "source.json"  # commit, whether it was changed, and the files that git does not track


def take(sweep: SweepDirectory, report: Callable[[str], None] = print, package: Path = PACKAGE) -> Path:
    """Copy the package into the sweep, unless the same copy exists; report files that git does not track.

    Returns:
        `<sweep>/code/<digest>`, which holds `isoflop/`, for PYTHONPATH; if this process runs from a copy, its folder.
    """
    home = sweep.path.resolve() / "code"
    if package.parent.parent == home and (package.parent / SOURCE).exists():
        return package.parent
    of_git = _files_of_git(package)
    files, untracked = of_git or (_files_of_folder(package), [])
    contents = {name: (package / name).read_bytes() for name in sorted({*files, *untracked})}
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    place = home / digest.hexdigest()[:16]
    if (place / SOURCE).exists():
        return place
    if untracked:
        some = ", ".join(untracked[:SHOWN]) + ", …" * (len(untracked) > SHOWN)
        report(f"note: the code of the jobs includes {counted(len(untracked), 'file')} that git does not track: {some}")
    with temporary_directory_beside(place) as folder:
        for name, content in contents.items():
            target = folder / "isoflop" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        commit, changes = None, b""
        if of_git:
            commit = (git_output(package, "rev-parse", "--verify", "HEAD") or b"").decode().strip() or None
            changes = git_output(package, "diff", "--binary", "HEAD", "--", "__init__.py", *ROOMS) or b""
        if changes:
            (folder / "changes.diff").write_bytes(changes)
        write_json(folder / SOURCE, {"commit": commit, "changed": bool(changes), "untracked": untracked})
        os.chmod(folder, 0o755)
        try:
            os.rename(folder, place)
        except OSError:
            if not (place / SOURCE).exists():
                raise
            shutil.rmtree(folder, ignore_errors=True)
    return place


def _files_of_git(package: Path) -> tuple[list[str], list[str]] | None:
    """Return the files that git tracks, and new source files that git does not ignore; None outside a checkout."""
    parts = ("--", "__init__.py", *ROOMS)
    tracked = _names(git_output(package, "ls-files", "-z", *parts))
    if "__init__.py" not in tracked:
        return None
    new = _names(git_output(package, "ls-files", "-z", "--others", "--exclude-standard", *parts))
    # One that is deleted in the working tree is tracked until the next commit.
    tracked = [name for name in tracked if (package / name).is_file()]
    return tracked, [name for name in new if name.endswith((".py", ".yaml", ".toml", ".html", ".css", ".js", ".json"))]


def _files_of_folder(package: Path) -> list[str]:
    paths = [path for room in ROOMS for path in (package / room).rglob("*") if path.is_file()]
    names = [path.relative_to(package) for path in [package / "__init__.py", *paths]]
    return [name.as_posix() for name in names if "__pycache__" not in name.parts]


def _names(listed: bytes | None) -> list[str]:
    return sorted(os.fsdecode(name) for name in (listed or b"").split(b"\0") if name)


def git_output(package: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
