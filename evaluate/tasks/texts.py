"""Perplexity suites: any folder of text, scored in bits per byte domain by domain (Paloma: Magnusson et al. 2023).

A domain is a folder one level down, or a file of many documents that lies in the folder itself; plain texts that lie
there make up one domain together. A document counts with its first `DOCUMENT_BYTES` bytes, so that one book does not
decide a domain; a single plain text is cut into pieces of that size instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ...train.data.corpora import find_files
from ...train.data.readers import cut, format_of, read_documents
from ...train.errors import UserError
from .custom import task_name
from .suite import SuiteTask, choose_items, freeze, task_of_rows

DOCUMENT_BYTES = 4096
FIELD = "text"  # of JSON lines and parquet
_LOOSE = "files"  # the domain of plain texts that lie in the folder itself


def load_texts(folder: Path | str, limit: int | None = None) -> dict[str, SuiteTask]:
    """A task of output type `loglikelihood_rolling` for each domain, named `text_<folder>_<domain>`.

    Args:
        folder: holds text; see above what its domains are.
        limit: documents a domain; None means all.

    Raises:
        UserError: no such folder, a file that cannot be read, or a domain without text.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"task 'text:{folder}' names no folder; it must be a folder of text files")
    result = {}
    for domain, files in domains(folder).items():
        name = task_name(f"text_{folder.resolve().name}_{domain}")
        if name in result:
            raise UserError(f"task 'text:{folder}' has two domains that are written {name!r}; rename one of them")
        result[name] = _load_domain(folder, name, domain, files, limit)
    return result


def domains(folder: Path) -> dict[str, list[Path]]:
    """The files of each domain, in a deterministic order.

    Raises:
        UserError: when there is none.
    """
    result: dict[str, list[Path]] = {}
    try:
        files = find_files(str(folder))
    except UserError as error:
        raise UserError(_about(folder, error)) from None
    for path in files:
        parts = path.relative_to(folder).parts
        own = _LOOSE if format_of(path) == "plain" else path.name.split(".")[0]
        domain = parts[0] if len(parts) > 1 else own
        result.setdefault(domain, []).append(path)
    return dict(sorted(result.items()))


def _load_domain(folder: Path, name: str, domain: str, files: list[Path], limit: int | None) -> SuiteTask:
    try:
        # Read twice, so that of a large file no more than the chosen documents is ever held.
        count = sum(1 for _ in _documents(files))
        indices = choose_items(name, count, limit)
        wanted = set(indices)
        rows = [{FIELD: text} for index, text in enumerate(_documents(files)) if index in wanted]
    except UserError as error:
        raise UserError(_about(folder, error)) from None
    if not rows:
        raise UserError(f"task 'text:{folder}': domain {domain!r} holds no text; add some, or remove its files")
    config: dict[str, Any] = {
        "task": name,
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": FIELD,
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    }
    return freeze(name, task_of_rows(config, rows), indices, count, "test", f"{folder.name}/{domain}")


def _documents(files: list[Path]) -> Iterator[str]:
    in_pieces = len(files) == 1 and format_of(files[0]) == "plain"
    for path in files:
        texts = read_documents(path, FIELD, DOCUMENT_BYTES)
        if in_pieces:
            yield from texts
        elif format_of(path) == "plain":
            yield from islice(texts, 1)
        else:
            for text in texts:
                yield from cut([text], DOCUMENT_BYTES)


def _about(folder: Path, error: UserError) -> str:
    """The readers speak of the training corpus's settings; a suite has none."""
    text = str(error).removeprefix("data.path: ")
    text = text.replace(f"data.field is {FIELD!r}; ", f"the text must be in a field {FIELD!r}; ")
    return f"task 'text:{folder}': " + text.replace("data.path is ", "the folder is ")
