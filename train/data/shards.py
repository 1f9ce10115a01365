"""Token files that a run maps into memory: built once, keyed by content, never half-written.

`<cache>/shards/<key>/` holds `train.bin` and `validation.bin` (token ids, every document followed by
`end_of_document`), `*.documents.npy` ((documents + 1,) int64: where each document starts), the tokenizer, and
`manifest.json`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import DataConfig
from ..errors import UserError, counted
from ..files import file_sha256
from .corpora import Corpus
from .mixing import MixedDocuments, Tokens, below_fraction, content_hash
from .recipe import recipe
from .recipe.pool import Pool
from .recipe.refine import Refinery, in_parts
from .split import Blocks, split_corpus
from .storage import Progress, building, cache_directory, checksum, locked, read_checked, silent, write_checked
from .tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, tokenizer_from_directory

FORMAT = 1  # bump when the same corpus would give other files
PARTS = ("train", "validation")
EXAMPLES = "recipe.examples.jsonl"
_BATCH_CHARACTERS = 1 << 20  # encoded at a time
_SINGLE_PROCESS_BYTES = 4 << 20  # below this, starting other processes takes longer than it saves
_WRITE_BYTES = 1 << 21  # of a file's buffer


@dataclass(frozen=True)
class Shards:
    """A corpus as tokens, mapped into memory.

    `train` and `validation` are (tokens,) of uint16 or uint32. `manifest[part]` has `tokens`, `documents` and `bytes`
    (of UTF-8 text) for each part.
    """

    directory: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    train: npt.NDArray[Any]
    validation: npt.NDArray[Any]


def prepare(config: DataConfig, progress: Progress = silent, tokenizer: Tokenizer | None = None) -> Shards:
    """Return the shards of a config's corpus, built unless the cache has them. A lock lets only one process build.

    The tokenizer is that of the config, unless one is given.

    Raises:
        UserError: The text cannot be read, is too short, or changed since the plan; or the disk is full.
    """
    cache = cache_directory(config)
    corpus = split_corpus(config)
    fingerprint = corpus.fingerprint()
    if config.fingerprint is not None and config.fingerprint != fingerprint:
        raise UserError(
            f"data.fingerprint is {config.fingerprint}, and that of the corpus is now {fingerprint}: the text changed "
            "after planning; restore it, or plan again"
        )
    steps = recipe.fingerprint(config.recipe)
    if config.recipe_fingerprint not in (None, steps):
        raise UserError(
            f"data.recipe_fingerprint is {config.recipe_fingerprint}, and that of the recipe "
            f"{recipe.recipe_label(config.recipe)} is now {steps}: its rules or its model changed after planning; "
            "restore them, or plan again"
        )
    tokenizer = tokenizer or load_tokenizer(config, corpus, cache, progress)
    directory = _directory(config, fingerprint, steps, tokenizer)
    shards = _open_if_sound(directory, tokenizer)
    if shards is None:
        with locked(cache, f"shards-{directory.name}", progress):
            if (shards := _open_if_sound(directory, tokenizer)) is None:
                with building(directory) as temporary:
                    build = partial(_build, corpus, fingerprint, config, tokenizer, temporary, progress)
                    if steps is None:
                        build()
                    else:
                        fraction = config.validation_fraction
                        refinery = Refinery(corpus, fingerprint, config.recipe, fraction, cache, progress)
                        with locked(cache, f"recipe-{refinery.key}", progress):  # all tokenizers share its folder
                            build(refinery.run())
                            refinery.remove()
                shards = open_shards(directory, tokenizer)
    # The loader refuses raw text that is shorter than one window; this is about text that the recipe shortened.
    shortened = shards.manifest.get("recipe", {}).get("steps")
    if shortened and len(shards.train) <= config.sequence_length:
        worst = max(shortened, key=lambda step: int(step["bytes"]))
        raise UserError(
            f"data.recipe leaves {counted(len(shards.train), 'token')} of training text, too little for "
            f"data.sequence_length {config.sequence_length}; the step {worst['step']!r} removes the most, "
            f"{counted(worst['documents'], 'document')}: loosen it or leave it out"
        )
    return shards


def at_hand(config: DataConfig, tokenizer: Tokenizer) -> Shards:
    """Return the shards of a checkpoint's corpus, built if missing. Raises UserError if a Hub corpus has none."""
    if config.corpus != "hf":
        return prepare(config, tokenizer=tokenizer)
    directory = _directory(config, str(config.fingerprint), config.recipe_fingerprint, tokenizer)
    if (shards := _open_if_sound(directory, tokenizer)) is None:
        raise UserError(
            f"the text of {config.name} is not in {directory.parent}; run `isoflop data prepare` with the settings of "
            "the sweep"
        )
    return shards


def _directory(config: DataConfig, fingerprint: str, steps: str | None, tokenizer: Tokenizer) -> Path:
    content = [FORMAT, fingerprint, tokenizer.fingerprint, config.validation_fraction, *([steps] if steps else [])]
    return cache_directory(config) / "shards" / checksum(content)[:16]


def _open_if_sound(directory: Path, tokenizer: Tokenizer) -> Shards | None:
    if not directory.exists():
        return None
    try:
        return open_shards(directory, tokenizer)
    except UserError as error:
        warnings.warn(f"shards are built again: {error}", stacklevel=3)
        return None


def open_shards(directory: str | Path, tokenizer: Tokenizer) -> Shards:
    """Open shards that `prepare` built. Raises UserError if the manifest, a file's size or the tokenizer differs."""
    directory = Path(directory)
    manifest = read_checked(directory / "manifest.json")
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
    return Shards(directory, manifest, tokenizer, *(np.memmap(directory / f"{part}.bin", dtype, "r") for part in PARTS))


def _build(
    corpus: Corpus,
    fingerprint: str,
    config: DataConfig,
    tokenizer: Tokenizer,
    directory: Path,
    progress: Progress,
    refined: Refinery | None = None,
) -> None:
    dtype = np.dtype(tokenizer.dtype)
    spool = directory / "spool"
    mixed = MixedDocuments(spool, dtype)
    tokenizer.save(directory)
    _tokenize(refined or corpus, tokenizer, directory, mixed, progress)
    raw = refined or mixed
    if raw.lowest == raw.highest:
        raise UserError(
            f"data.corpus is {config.corpus}; it has only one distinct text, in {counted(len(raw), 'document')}: "
            "holding a document out for validation requires at least two distinct ones"
        )
    if corpus.fingerprint() != fingerprint:
        raise UserError(f"data.corpus is {config.corpus}; its text changed while it was read: run the command again")
    blocks = corpus.held_out()
    writers = {part: _PartWriter(directory / f"{part}.bin", dtype) for part in PARTS}
    for done, (digest, tokens, text_bytes) in enumerate(mixed, start=1):
        held_out = below_fraction(digest, config.validation_fraction, blocks)
        if blocks is None:
            held_out = (held_out or digest == raw.lowest) and digest != raw.highest
        writers["validation" if held_out else "train"].add(tokens, text_bytes)
        if done % 256 == 0:
            progress("write", done, len(mixed))
    for part, writer in writers.items():
        writer.close()
        np.save(directory / f"{part}.documents.npy", np.array(writer.starts, np.int64))
    if spool.exists():
        spool.rmdir()
    if refined is not None:
        refined.write_examples(directory / EXAMPLES)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(directory.iterdir())
    }
    manifest = {
        "format": FORMAT,
        "corpus": {"kind": config.corpus, "fingerprint": fingerprint},
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "end_of_document": tokenizer.end_of_document,
        },
        "dtype": dtype.name,
        "validation_fraction": config.validation_fraction,
        "copies": mixed.copies,  # documents that equal another one
        **{part: writer.counts for part, writer in writers.items()},
        **({"held_out": corpus.describe()} if isinstance(corpus, Blocks) else {}),
        **({} if refined is None else {"recipe": refined.report}),
        "files": files,
    }
    write_checked(directory / "manifest.json", manifest)


def _tokenize(
    source: Corpus | Refinery, tokenizer: Tokenizer, saved: Path, mixed: MixedDocuments, progress: Progress
) -> None:
    size, tokens_done, bytes_done = source.size_bytes(), 0, 0
    parts = in_parts(source.documents(), _BATCH_CHARACTERS)
    progress("tokenize", 0, 0)
    single_process = isinstance(tokenizer, ByteTokenizer) or (size is not None and size < _SINGLE_PROCESS_BYTES)
    tokenizer_or_path = tokenizer if single_process else saved
    with Pool(1 if single_process else None) as pool:
        # Results come in any order, because `mixed` sorts.
        for documents in pool.map(encode_part, ((tokenizer_or_path, texts) for texts in parts)):
            for digest, ids, text_bytes in documents:
                mixed.add(digest, ids, text_bytes)
                tokens_done += len(ids)
                bytes_done += text_bytes
            total = tokens_done / bytes_done * max(size, bytes_done) if size else 0.0
            progress("tokenize", tokens_done, total)


def encode_part(tokenizer_or_path: Tokenizer | Path, texts: list[str]) -> list[tuple[int, Tokens, int]]:
    """Return (hash, token ids, bytes) of each text. Worker processes get the path of a saved tokenizer."""
    tokenizer, rows = _loaded(tokenizer_or_path) if isinstance(tokenizer_or_path, Path) else tokenizer_or_path, []
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        encoded = text.encode()
        ids = np.append(ids, ids.dtype.type(tokenizer.end_of_document))
        rows.append((content_hash(encoded), ids, len(encoded)))
    return rows


_loaded = lru_cache(maxsize=1)(tokenizer_from_directory)


class _PartWriter:
    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file = open(path, "wb", _WRITE_BYTES)  # noqa: SIM115  closed by close(); a failed build drops the folder
        self._dtype = dtype
        self._bytes = 0
        self.starts = [0]

    @property
    def counts(self) -> dict[str, int]:
        return {"tokens": self.starts[-1], "documents": len(self.starts) - 1, "bytes": self._bytes}

    def add(self, tokens: Tokens, text_bytes: int) -> None:
        self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._bytes += text_bytes
        self.starts.append(self.starts[-1] + len(tokens))

    def close(self) -> None:
        self._file.close()
