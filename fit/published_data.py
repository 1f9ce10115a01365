"""Published results of others: where each lies, and how to get it.

from isoflop.fit.published_data import load_published, published_runs
runs = published_runs("epoch", drop_worst=5, download=True)

Nothing of these sets is part of the project. A file is looked for in the folder that ISOFLOP_DATA names
(<folder>/<name>/<file>), then in the cache ($ISOFLOP_CACHE, else ~/.cache/isoflop, below `published`), and downloaded
only on request, from a pinned commit. Its SHA-256 is compared whenever it is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import InputError
from .files import read_constants, replacing
from .table import RunTable, read_table

if TYPE_CHECKING:
    import pandas as pd

HOST = "https://raw.githubusercontent.com"


@dataclass(frozen=True)
class PublishedFile:
    """A CSV. `path` in the repository, `sha256` and `size` in bytes, where the repository holds it verbatim."""

    name: str
    path: str = ""
    sha256: str = ""
    size: int = 0


@dataclass(frozen=True)
class PublishedData:
    """A published data set: its files (the first is the default), source, licence, and which column plays which part.

    `columns` and `derive_d` are those of `read_table`; `how` says how to make files that cannot be downloaded. A table
    of runs keeps the last row of each value of column `last`, has names by `rename`, and what is the `same` in all.
    """

    name: str
    files: tuple[PublishedFile, ...]
    what: str
    repository: str
    commit: str
    licence: str
    columns: Mapping[str, str] = field(default_factory=dict)
    derive_d: str | None = None
    how: str = ""
    last: str = ""
    rename: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, float] = field(default_factory=dict)


DATA = {
    name: PublishedData(name, tuple(PublishedFile(**file) for file in record.pop("files")), **record)
    for name, record in read_constants("data").items()
}


def published_data(name: str) -> PublishedData:
    """What is known of a data set."""
    if name not in DATA:
        raise InputError(f"there is no published data set {name!r}; choose one of {', '.join(DATA)}.")
    return DATA[name]


def load_published(
    name: str, file: str | None = None, folder: str | Path | None = None, download: bool = False
) -> pd.DataFrame:
    """A published data set as its authors give it, columns and all: `file`, by default the set's first.

    folder: where <name>/<file> lies, instead of ISOFLOP_DATA and the cache. download: fetch it into that folder, or
    into the cache, when it is nowhere.
    """
    import pandas as pd

    path = _located(name, file, folder, download)
    try:
        return pd.read_csv(path)
    except ValueError as error:  # an empty or a broken file, or one that is not text
        reason = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"{path} is not a readable CSV file ({reason}); make it again.") from None


def published_runs(
    name: str,
    where: Mapping[str, object] | None = None,
    drop_worst: int = 0,
    folder: str | Path | None = None,
    download: bool = False,
) -> RunTable:
    """A published data set as a table of runs; `where` keeps rows that have these values, or one of a list, in columns.

    Most sets mix training data or conventions that no one law fits: choose, as in where={"train_dataset": "rpj"}.
    """
    record = published_data(name)
    frame = load_published(name, folder=folder, download=download)
    if record.last:
        frame = frame.drop_duplicates(record.last, keep="last")
    frame = frame.rename(columns=record.rename).assign(**record.same)
    for column, value in (where or {}).items():
        if column not in frame:
            raise InputError(f"{name} has no column {column!r}; it has {', '.join(map(str, frame.columns))}.")
        values = frame[column]
        frame = frame[values.isin(value if isinstance(value, list | tuple) else [value])]
        if frame.empty:
            known = ", ".join(map(str, values.unique()[:12]))
            raise InputError(f"{name} has no row whose {column} is {value!r}; there are {known}.")
    return read_table(frame, record.columns, derive_d=record.derive_d, drop_worst=drop_worst)


def download_published(
    name: str, file: str | None = None, folder: str | Path | None = None, host: str = HOST, timeout: float = 60.0
) -> Path:
    """Fetch a file of a data set into `folder`/<name>, by default the cache, and return its path; on error leave
    nothing.
    """
    record, entry = published_data(name), _file(name, file)
    source = f"github.com/{record.repository}, commit {record.commit[:10]}"
    if not entry.sha256:
        raise InputError(
            f"{name}/{entry.name} cannot be downloaded, as {source} has no such CSV; {record.how}, save it as "
            f"{name}/{entry.name}, and let ISOFLOP_DATA name the folder above."
        )
    content = _fetch(f"{host}/{record.repository}/{record.commit}/{entry.path}", entry, timeout)
    path = Path(folder or _cache()) / name / entry.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path.parent} cannot be made ({error.strerror}); give a folder that can.") from None
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return path


def _located(name: str, file: str | None, folder: str | Path | None, download: bool) -> Path:
    entry = _file(name, file)
    given = [folder] if folder else [os.environ.get("ISOFLOP_DATA"), _cache()]
    places = [Path(place) / name / entry.name for place in given if place]
    for path in places:
        if path.is_file():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise InputError(f"{path} cannot be read ({error.strerror}); make it readable.") from None
            _verified(str(path), content, entry)
            return path
    if download:
        return download_published(name, file, folder)
    how = "download=True fetches it" if entry.sha256 else "download_published says how to make it"
    raise InputError(f"{name} is not at {' or '.join(map(str, places))}; {how}, or ISOFLOP_DATA names its folder.")


def _file(name: str, file: str | None) -> PublishedFile:
    files = published_data(name).files
    for entry in files:
        if file in (None, entry.name):
            return entry
    raise InputError(f"{name} has no file {file!r}; it has {', '.join(entry.name for entry in files)}.")


def _cache() -> Path:
    return Path(os.environ.get("ISOFLOP_CACHE") or Path.home() / ".cache" / "isoflop") / "published"


def _fetch(url: str, entry: PublishedFile, timeout: float) -> bytes:
    from http.client import HTTPException
    from urllib.request import urlopen

    try:
        with urlopen(url, timeout=timeout) as response:
            content = response.read(entry.size + 1)
    except (OSError, HTTPException, ValueError) as error:
        raise InputError(f"{url} cannot be fetched ({error}); try again, or fetch it by hand.") from None
    _verified(url, content, entry)
    return bytes(content)


def _verified(said: str, content: bytes, entry: PublishedFile) -> None:
    from hashlib import sha256

    if not entry.sha256:
        return
    if len(content) != entry.size:
        more = "more than " if len(content) > entry.size else ""
        raise InputError(
            f"{said} has {more}{min(len(content), entry.size)} bytes where {entry.size} are expected; fetch it again."
        )
    found = sha256(content).hexdigest()
    if found != entry.sha256:
        raise InputError(f"{said} has SHA-256 {found[:16]}… where {entry.sha256[:16]}… is expected; fetch it again.")
