"""Token files that a run maps into memory: built once, keyed by content, never half-written.

`<cache>/shards/<key>/` holds `train.bin` and `validation.bin` (token ids, every document followed by
`end_of_document`), `*.documents.npy` (where each document starts), the tokenizer, and `manifest.json`. Building it
twice gives the same bytes. What is held out comes from the raw text, so that recipes are compared on the same ground.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..config import DataConfig
from ..errors import UserError
from .corpora import Corpus, open_corpus
from .mixing import MixedDocuments, Tokens, below_fraction, content_hash
from .recipe import recipe
from .recipe.parts import in_parts
from .recipe.refine import Refined, Refinery
from .storage import Progress, building, cache_directory, checksum, locked, read_json, write_json
from .tokenizers import Tokenizer, load_tokenizer

# Bumped when the same corpus would give other files.
FORMAT = 1
PARTS = ("train", "validation")
EXAMPLES = "recipe.examples.jsonl"
_BATCH_CHARACTERS = 1 << 20  # that are encoded at a time
_WRITE_TOKENS = 1 << 20  # tokens that are written at a time


@dataclass(frozen=True)
class Shards:
    """A corpus as tokens, mapped into memory.

    `train` and `validation` are (tokens,) of uint16 or uint32. `train_documents` and `validation_documents` are
    (documents + 1,) int64: document i is tokens[index[i] : index[i + 1]], its end_of_document included.
    `manifest[part]` has `tokens`, `documents` and `bytes` (of UTF-8 text) for each part.
    """

    directory: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    train: npt.NDArray[Any]
    validation: npt.NDArray[Any]
    train_documents: npt.NDArray[np.int64]
    validation_documents: npt.NDArray[np.int64]


def prepare(config: DataConfig, progress: Progress | None = None, processes: int | None = None) -> Shards:
    """The shards of a config's corpus, built unless the cache has them. Processes that ask at once build once.

    Where the config has a `fingerprint` or `recipe_fingerprint`, corpus and recipe must still have it. A recipe runs in
    `processes` processes; None: one per core. Progress in the stage "tokenize" counts tokens, with an estimated total.

    Raises:
        UserError: on text that cannot be read or has changed since it was planned, on too little text, a full disk,
            or a cache that cannot be written.
    """
    cache = cache_directory(config)
    corpus = open_corpus(config)
    fingerprint = corpus.fingerprint()
    if config.fingerprint is not None and config.fingerprint != fingerprint:
        raise UserError(
            f"data.fingerprint is {config.fingerprint}; the corpus found has {fingerprint}, so the text has changed "
            "since it was planned: restore it, or plan again"
        )
    steps = recipe.fingerprint(config.recipe)
    if config.recipe_fingerprint not in (None, steps):
        raise UserError(
            f"data.recipe_fingerprint is {config.recipe_fingerprint}; the recipe {recipe.label(config.recipe)} has "
            f"{steps}, so its rules or its model changed since it was planned: restore them, or plan again"
        )
    tokenizer = load_tokenizer(config, corpus, cache, progress)
    directory = _directory(config, fingerprint, steps, tokenizer)
    key = directory.name
    if (found := _open_if_sound(directory, tokenizer)) is not None:
        return _enough(found, config)
    with locked(cache, f"shards-{key}", progress):
        if (found := _open_if_sound(directory, tokenizer)) is None:
            with building(directory) as temporary:
                source = _Source(corpus, fingerprint, config)
                if steps is None:
                    _build(source, tokenizer, temporary, progress)
                else:
                    _refine(source, cache, processes, tokenizer, temporary, progress)
            found = open_shards(directory, tokenizer)
    return _enough(found, config)


def at_hand(config: DataConfig, tokenizer: Tokenizer) -> Shards:
    """As `prepare`, for a checkpoint that carries its tokenizer; but text of the Hub must be in the cache already.

    Raises:
        UserError: as `prepare`, or it is not there.
    """
    if config.corpus != "hf":
        return prepare(config)
    directory = _directory(config, str(config.fingerprint), config.recipe_fingerprint, tokenizer)
    if (found := _open_if_sound(directory, tokenizer)) is None:
        raise UserError(
            f"the text of {config.name} is not in {directory.parent}; `isoflop data prepare` as for the sweep "
            "puts it there"
        )
    return found


def _directory(config: DataConfig, fingerprint: str, steps: str | None, tokenizer: Tokenizer) -> Path:
    content = [FORMAT, fingerprint, tokenizer.fingerprint, config.validation_fraction, *([steps] if steps else [])]
    return cache_directory(config) / "shards" / checksum(content)[:16]


def _enough(shards: Shards, config: DataConfig) -> Shards:
    """Refuses what a recipe left where it is shorter than one window; raw text is the loader's to refuse."""
    steps = shards.manifest.get("recipe", {}).get("steps")
    if steps and len(shards.train) <= config.sequence_length:
        worst = max(steps, key=lambda step: int(step["bytes"]))
        raise UserError(
            f"data.recipe leaves {len(shards.train)} tokens of training text, and data.sequence_length is "
            f"{config.sequence_length}; {worst['step']!r} removed most, {worst['documents']:,} documents, so loosen it "
            "or leave it out"
        )
    return shards


@dataclass(frozen=True)
class _Source:
    corpus: Corpus
    fingerprint: str
    config: DataConfig


def _refine(
    source: _Source,
    cache: Path,
    processes: int | None,
    tokenizer: Tokenizer,
    directory: Path,
    progress: Progress | None,
) -> None:
    """`_build` of what a recipe leaves."""
    config = source.config
    refinery = Refinery(
        source.corpus, source.fingerprint, config.recipe, config.validation_fraction, cache, progress, processes
    )
    with locked(cache, f"recipe-{refinery.key}", progress):  # its folder serves every tokenizer
        _build(source, tokenizer, directory, progress, refinery.run())
        refinery.remove()


def _open_if_sound(directory: Path, tokenizer: Tokenizer) -> Shards | None:
    if not directory.exists():
        return None
    try:
        return open_shards(directory, tokenizer)
    except UserError as error:
        warnings.warn(f"shards are built again: {error}", stacklevel=3)
        return None


def open_shards(directory: str | Path, tokenizer: Tokenizer) -> Shards:
    """Shards that `prepare` built, checked by the manifest's checksum and the size of every file.

    Raises:
        UserError: something is missing, truncated or changed, or was built with another tokenizer.
    """
    directory = Path(directory)
    manifest = read_json(directory / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise UserError(f"{directory} has format {manifest.get('format')}; this version reads format {FORMAT}")
    if manifest["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
        raise UserError(
            f"data.tokenizer has fingerprint {tokenizer.fingerprint}; it does not match its shards in {directory}, "
            f"which were built with {manifest['tokenizer']['fingerprint']}"
        )
    for name, expected in manifest["files"].items():
        path = directory / name
        size = path.stat().st_size if path.exists() else 0
        if size != expected["bytes"]:
            raise UserError(f"{path} has {size} bytes; its manifest says {expected['bytes']}")
    dtype = np.dtype(manifest["dtype"])
    return Shards(
        directory=directory,
        manifest=manifest,
        tokenizer=tokenizer,
        train=np.memmap(directory / "train.bin", dtype, "r"),
        validation=np.memmap(directory / "validation.bin", dtype, "r"),
        train_documents=np.load(directory / "train.documents.npy", mmap_mode="r"),
        validation_documents=np.load(directory / "validation.documents.npy", mmap_mode="r"),
    )


def _build(
    source: _Source, tokenizer: Tokenizer, directory: Path, progress: Progress | None, refined: Refined | None = None
) -> None:
    config = source.config
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    spool = directory / "spool"
    mixed = MixedDocuments(spool, dtype)
    texts = source.corpus.documents() if refined is None else refined.documents()
    size = None if progress is None else source.corpus.size_bytes() if refined is None else refined.size_bytes()
    _tokenize(texts, size, tokenizer, mixed, progress)
    if refined is None:
        lowest, highest, documents = mixed.lowest, mixed.highest, mixed.documents
    else:
        lowest, highest, documents = refined.lowest, refined.highest, len(refined.held)
    if lowest == highest:
        raise UserError(
            f"data.corpus is {config.corpus}; its {documents} document(s) are all the same text, and "
            "holding one out for validation needs at least two distinct documents"
        )
    if source.corpus.fingerprint() != source.fingerprint:
        raise UserError(f"data.corpus is {config.corpus}; its text changed while it was read, run again")
    writers = {part: _PartWriter(directory / f"{part}.bin", dtype) for part in PARTS}
    for done, (digest, tokens, text_bytes) in enumerate(mixed, start=1):
        held_out = below_fraction(digest, config.validation_fraction) or digest == lowest
        writers["validation" if held_out and digest != highest else "train"].add(tokens, text_bytes)
        if progress is not None and done % 256 == 0:
            progress("write", float(done), float(mixed.documents))
    for part, writer in writers.items():
        writer.close()
        np.save(directory / f"{part}.documents.npy", np.array(writer.starts, np.int64))
    if spool.exists():
        spool.rmdir()
    tokenizer.save(directory)
    if refined is not None:
        refined.write_examples(directory / EXAMPLES)
    files = {path.name: _described(path) for path in sorted(directory.iterdir())}
    manifest = {
        "format": FORMAT,
        "corpus": {"kind": config.corpus, "fingerprint": source.fingerprint},
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "end_of_document": tokenizer.end_of_document,
        },
        "dtype": dtype.name,
        "validation_fraction": config.validation_fraction,
        "copies": mixed.copies,  # documents that equal another one
        **{part: writer.counts for part, writer in writers.items()},
        **({} if refined is None else {"recipe": refined.report}),
        "files": files,
    }
    write_json(directory / "manifest.json", manifest)


def _tokenize(
    documents: Iterable[str],
    size: int | None,
    tokenizer: Tokenizer,
    mixed: MixedDocuments,
    progress: Progress | None,
) -> None:
    """`size`: about the bytes of the documents, where it is known."""
    tokens_done, bytes_done = 0, 0
    for texts in in_parts(documents, _BATCH_CHARACTERS):
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            encoded = text.encode()
            ids = np.append(ids, ids.dtype.type(tokenizer.end_of_document))
            mixed.add(content_hash(encoded), ids, len(encoded))
            tokens_done += len(ids)
            bytes_done += len(encoded)
        if progress is not None:
            total = tokens_done / bytes_done * max(size, bytes_done) if size else 0.0
            progress("tokenize", float(tokens_done), total)


class _PartWriter:
    """Appends documents to one token file."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  closed by close(); a failed build drops the whole folder
        self._dtype = dtype
        self._waiting: list[Tokens] = []
        self._waiting_tokens = 0
        self._bytes = 0
        self.starts = [0]

    @property
    def counts(self) -> dict[str, int]:
        return {"tokens": self.starts[-1], "documents": len(self.starts) - 1, "bytes": self._bytes}

    def add(self, tokens: Tokens, text_bytes: int) -> None:
        self._waiting.append(tokens)
        self._waiting_tokens += len(tokens)
        self._bytes += text_bytes
        self.starts.append(self.starts[-1] + len(tokens))
        if self._waiting_tokens >= _WRITE_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._file.write(cast(Any, np.concatenate(self._waiting).astype(self._dtype, copy=False)).data)
        self._waiting, self._waiting_tokens = [], 0

    def close(self) -> None:
        self._flush()
        self._file.close()


def _described(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def prepare_with_progress(config: DataConfig) -> Shards:
    """`prepare` with a bar on standard error that shows tokens per second; silent where there is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    class Speed(TextColumn):
        def render(self, task: Any) -> Any:
            speed = task.finished_speed or task.speed
            unit = " tokens" if task.description == "tokenize" else ""
            return self._text(f"{speed:,.0f}{unit}/s" if speed else "")

        def _text(self, text: str) -> Any:
            from rich.text import Text

            return Text(text)

    columns = (TextColumn("{task.description}"), BarColumn(), Speed(""), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: float, total: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=None)
            bar.update(tasks[stage], completed=done, total=total or None)

        return prepare(config, show)
