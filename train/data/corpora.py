"""Sources of text, one document at a time: Python's own library, files, or a dataset on the Hub."""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ..config import DataConfig
from ..errors import UserError
from ..files import open_regular
from .readers import (
    ACCEPTED,
    cut,
    cut_or_refuse,
    format_of,
    is_compressed,
    one_line,
    parquet_text_bytes,
    read_documents,
    text_of,
)
from .storage import checksum

READER = 1  # bump when the same files would read as different documents
# Plain text longer than this is cut into documents of this size. A single file is cut smaller, so that a small corpus
# has documents to hold out. Both chosen by hand.
PIECE_BYTES = 1 << 20
SINGLE_FILE_PIECE_BYTES = 4096
# Files of at most this size in total are hashed whole. Of larger ones only the size and some blocks are hashed, because
# every plan computes fingerprints; an edit between blocks that keeps the size is then missed. Chosen by hand.
FULL_HASH_BYTES = 256 << 20
_HASH_BLOCKS, _HASH_BLOCK_BYTES = 16, 1 << 16
_HUB_SECONDS = 20.0


class Corpus(Protocol):
    def documents(self) -> Iterator[str]:
        """Yield the documents in a deterministic order. None is blank; all can be encoded as UTF-8."""
        ...

    def fingerprint(self) -> str:
        """Return 16 hex digits that identify the text and how it is cut into documents."""
        ...

    def size_bytes(self) -> int | None:
        """Estimate the bytes of UTF-8 of the whole corpus. None if unknown."""
        ...

    def sample(self, size: int) -> Iterator[str]:
        """Yield texts to train a tokenizer on, up to `size` bytes of UTF-8 in total."""
        return cut(self.documents(), size)

    def held_out(self) -> frozenset[int] | None:
        """Return the hashes of the held-out documents. None: those with the lowest hashes are held out."""
        return None


def open_corpus(config: DataConfig) -> Corpus:
    """Open a config's corpus. Raises UserError if it does not exist or a field is invalid."""
    if config.max_bytes is not None and config.max_bytes < 1:
        raise UserError(f"data.max_bytes is {config.max_bytes}; it must be 1 or more, or null for the whole corpus")
    if config.corpus == "stdlib":
        return StandardLibrary(Path(sysconfig.get_paths()["stdlib"]), config.max_bytes)
    if config.corpus == "text":
        if not config.path:
            raise UserError(f"data.path is {config.path}; with data.corpus=text it must be a file, a folder or a glob")
        files = tuple(find_files(config.path))
        # An empty .jsonl.gz passes here, and is detected when it is read.
        if not any(file.stat().st_size for file in files):
            raise UserError(_empty(config.path))
        return TextFiles(config.path, files, config.field, config.max_bytes)
    if config.corpus == "hf":
        if not config.name:
            raise UserError(f"data.name is {config.name}; with data.corpus=hf it must be the name of a Hub dataset")
        if config.max_bytes is None:
            raise UserError("data.max_bytes is null; with data.corpus=hf it must be set, because a stream has no size")
        return HubDataset(config.name, config.subset, config.split, config.revision, config.field, config.max_bytes)
    if config.corpus == "external":
        return External()
    raise UserError(f"data.corpus is {config.corpus!r}; it must be one of stdlib, text, hf")


class External(Corpus):
    """The text of an external trainer, of which nothing is known."""

    def documents(self) -> Iterator[str]:
        raise UserError("data.corpus is external, which only trainer=command takes; give data=text")

    def fingerprint(self) -> str:
        return "external"

    def size_bytes(self) -> int | None:
        return None


@dataclass(frozen=True)
class StandardLibrary(Corpus):
    """Every UTF-8 *.py file of Python's own library. Its text depends on the Python version."""

    root: Path
    max_bytes: int | None = None

    def documents(self) -> Iterator[str]:
        complaint = f"data.corpus is stdlib; {self.root} holds no Python source: use data.corpus=text or hf"
        return cut_or_refuse(self._texts(), self.max_bytes, complaint)

    def _texts(self) -> Iterator[str]:
        files = _files_below(self.root, ("site-packages", "dist-packages", "__pycache__").__contains__)
        for path in sorted((path for path in files if path.suffix == ".py"), key=lambda path: path.parts):
            try:
                text = path.read_bytes().decode()
            except (UnicodeDecodeError, OSError):
                continue  # a few of the library's own test files are invalid on purpose
            if text.strip():
                yield text

    def fingerprint(self) -> str:
        digests = [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in self._texts()]
        return _fingerprint("stdlib", digests, self.max_bytes)

    def size_bytes(self) -> int | None:
        total = _source_bytes(self.root)
        return min(total, self.max_bytes or total)


@dataclass(frozen=True)
class TextFiles(Corpus):
    """Files of plain text, JSON lines or parquet, in the order of their paths."""

    path: str  # as the user wrote it
    files: tuple[Path, ...]
    field: str = "text"
    max_bytes: int | None = None

    def documents(self) -> Iterator[str]:
        texts = (text for path in self.files for text in self._read(path))
        return cut_or_refuse(texts, self.max_bytes, _empty(self.path))

    def _read(self, path: Path) -> Iterator[str]:
        piece = PIECE_BYTES if len(self.files) > 1 else SINGLE_FILE_PIECE_BYTES
        return read_documents(path, self.field, piece)

    def fingerprint(self) -> str:
        try:
            whole = sum(path.stat().st_size for path in self.files) <= FULL_HASH_BYTES
            digests = [_file_digest(path, whole) for path in self.files]
        except OSError as error:
            raise UserError(f"data.path: {error.filename} cannot be read ({error.strerror})") from None
        # Plain text has no fields, so another field name does not change it.
        field = self.field if any(format_of(path) != "plain" for path in self.files) else None
        return _fingerprint(f"text:{field}", digests, self.max_bytes)

    def size_bytes(self) -> int | None:
        total = 0
        for path in self.files:
            if is_compressed(path):
                return None
            size = parquet_text_bytes(path, self.field) if format_of(path) == "parquet" else path.stat().st_size
            if size is None:
                return None
            total += size
        return min(total, self.max_bytes or total)

    def sample(self, size: int) -> Iterator[str]:
        """Yield the start of every file: equal shares of `size` bytes, where larger files get what small ones leave."""
        if self.max_bytes is not None:
            yield from super().sample(size)
            return
        by_size = sorted(self.files, key=lambda path: (path.stat().st_size, path.parts))
        for left, path in zip(range(len(self.files), 0, -1), by_size, strict=True):
            for text in cut(self._read(path), size // left):
                size -= len(text.encode())
                yield text


@dataclass(frozen=True)
class HubDataset(Corpus):
    """The first `max_bytes` of text in one split of a dataset on the Hub, or in a folder that `datasets` can load."""

    name: str
    subset: str | None
    split: str
    revision: str | None
    field: str
    max_bytes: int

    def documents(self) -> Iterator[str]:
        complaint = f"data.name is {self.name!r}; its split {self.split!r} has no text in field {self.field!r}"
        return cut_or_refuse(filter(str.strip, self._texts()), self.max_bytes, complaint)

    def fingerprint(self) -> str:
        return checksum({"kind": "hf", **asdict(self)})[:16]

    def size_bytes(self) -> int | None:
        return self.max_bytes

    def _texts(self) -> Iterator[str]:
        number = 0
        try:
            for number, row in enumerate(self._open(), start=1):
                yield text_of(row, self.field, f"row {number} of {self.name}")
        except UserError:
            raise
        # A remote file can raise any error (network, decoding, schema). Each of them ends this stream.
        except Exception as error:
            raise UserError(
                f"data.name is {self.name!r}; its stream failed after {number} rows ({one_line(error)}): run the "
                "command again"
            ) from error

    def _open(self) -> Any:
        if not os.path.isdir(self.name):
            self._ask_hub()
        import datasets

        try:
            return datasets.load_dataset(
                self.name, self.subset, split=self.split, revision=self.revision, streaming=True
            )
        except ValueError as error:  # unknown subset or split; the message lists the valid ones
            raise UserError(
                f"data.subset is {self.subset!r} and data.split is {self.split!r}; "
                f"{self.name} does not have them ({one_line(error)})"
            ) from error
        except Exception as error:  # network and Hub errors have no common base class across versions
            raise UserError(f"data.name is {self.name!r}; it cannot be opened ({one_line(error)})") from error

    def _ask_hub(self) -> None:
        import huggingface_hub
        from huggingface_hub import errors

        try:
            huggingface_hub.HfApi().dataset_info(self.name, revision=self.revision, timeout=_HUB_SECONDS)
        except errors.OfflineModeIsEnabled:
            return  # the user chose offline mode; `datasets` may have it in its own cache
        except errors.GatedRepoError:
            raise UserError(
                f"data.name is {self.name!r}; it is gated: accept its terms on the Hub and log in with `hf auth login`"
            ) from None
        except errors.RevisionNotFoundError:
            raise UserError(
                f"data.revision is {self.revision!r}; {self.name} has no such branch, tag or commit"
            ) from None
        except (errors.RepositoryNotFoundError, errors.HFValidationError):
            raise UserError(
                f"data.name is {self.name!r}; the Hub has no such dataset, or it is private and you are not logged in"
            ) from None
        except Exception as error:
            raise UserError(
                f"data.name is {self.name!r}; the Hub cannot be reached ({one_line(error)}): "
                "use data.corpus=stdlib, or text with a local data.path"
            ) from None


def _empty(path: str) -> str:
    return f"data.path is {path!r}; it contains no text: it must have at least two documents"


def find_files(path: str) -> list[Path]:
    """Find the text files at a file path, folder (recursive, without hidden files) or glob, sorted by path."""
    files = sorted({file for file in _candidates(path) if format_of(file)}, key=lambda file: file.parts)
    if not files:
        raise UserError(f"data.path is {path!r}; it holds no file of an accepted kind: {ACCEPTED}")
    return files


def passed_over(path: str) -> Counter[str]:
    """Count the files at `path` that `find_files` does not accept, by file ending."""
    return Counter(file.suffix.lower() or "without ending" for file in {*_candidates(path)} if not format_of(file))


def _candidates(path: str) -> list[Path]:
    pattern = Path(path).expanduser()
    if pattern.is_file():
        if format_of(pattern) is None:
            raise UserError(f"data.path is {path!r}; the kind of file must be one of {ACCEPTED}")
        return [pattern]
    if pattern.is_dir():
        return _files_below(pattern)
    if not glob.has_magic(path):
        raise UserError(f"data.path is {path!r}; there is no such file: it must name a file, a folder or a glob")
    matches = [Path(match) for match in glob.glob(str(pattern), recursive=True)]
    if files := [file for match in matches for file in (_files_below(match) if match.is_dir() else [match])]:
        return files
    raise UserError(f"data.path is {path!r}; no file matches it: it must name a file, a folder or a glob")


@functools.cache
def _source_bytes(root: Path) -> int:
    return sum(len(text.encode()) for text in StandardLibrary(root)._texts())


def _files_below(root: Path, skip: Callable[[str], bool] = lambda name: name.startswith(".")) -> list[Path]:
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not skip(name)]
        files += [Path(folder, name) for name in names if not skip(name)]
    return files


def _file_digest(path: Path, whole: bool) -> str:
    compression = path.suffix.lower() if is_compressed(path) else ""
    digest = hashlib.blake2b(f"{format_of(path)}:{compression}".encode(), digest_size=16)
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with open_regular(path) as file:
        if whole or size <= _HASH_BLOCKS * _HASH_BLOCK_BYTES:
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            for i in range(_HASH_BLOCKS):
                file.seek(i * (size - _HASH_BLOCK_BYTES) // (_HASH_BLOCKS - 1))
                digest.update(file.read(_HASH_BLOCK_BYTES))
    return digest.hexdigest()


def _fingerprint(kind: str, digests: list[str], max_bytes: int | None) -> str:
    content: dict[str, Any] = {"reader": READER, "kind": kind, "max_bytes": max_bytes}
    content["digests"] = sorted(digests) if max_bytes is None else digests
    return checksum(content)[:16]
