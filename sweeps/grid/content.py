"""The text of runs: absolute paths, fingerprints and vocabularies, which the planner fills in."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from ...train.config import DataConfig, RunConfig

# Fields of `data` that do not change the text, its tokens or what is held out.
OTHER = {"sequence_length", "separate_documents", "cache_dir", "recipe", "recipe_fingerprint"}
FILLED = ("path", "tokenizer", "fingerprint", "tokenizer_fingerprint")
CONTENT = [item.name for item in dataclasses.fields(DataConfig) if item.name not in {*OTHER, *FILLED[2:]}]
TEXT_FIELDS = {f"data.{name}" for name in CONTENT}


class Texts:
    """The training corpora of a grid's runs, each read once."""

    def __init__(self, base: RunConfig | None = None) -> None:
        self._known = dict[tuple[object, ...], tuple[DataConfig, int]]()
        if base is not None:
            assert base.model.vocab_size is not None
            self._known[_key(base.data)] = base.data, base.model.vocab_size

    def fill(self, run: RunConfig, fixed: Collection[str] = ()) -> None:
        """Fill in the path, fingerprints and vocabulary size (unless in `fixed`) of a run's corpus.

        Raises UserError if the corpus cannot be read.
        """
        key = _key(run.data)
        if key not in self._known:
            self._known[key] = _read(run.data)
        text, vocab_size = self._known[key]
        for name in FILLED:
            setattr(run.data, name, getattr(text, name))
        if "model.vocab_size" not in fixed:
            run.model.vocab_size = vocab_size


def _key(data: DataConfig) -> tuple[object, ...]:
    return tuple(getattr(data, name) for name in CONTENT)


def _read(data: DataConfig) -> tuple[DataConfig, int]:
    """Return a corpus's config with paths and fingerprints, and its vocabulary size. May print a note on the split."""
    from ...train.data.split import Blocks, split_corpus
    from ...train.data.tokenizers import planned_fingerprint, planned_vocab_size

    path = data.path if data.path is None else str(Path(data.path).expanduser().absolute())
    tokenizer = data.tokenizer
    if tokenizer not in ("bytes", "bpe"):
        tokenizer = str(Path(tokenizer).expanduser().absolute())
    data = dataclasses.replace(data, path=path, tokenizer=tokenizer, fingerprint=None)
    data.tokenizer_fingerprint = planned_fingerprint(data)
    vocab_size = planned_vocab_size(data)
    corpus = split_corpus(data)
    if isinstance(corpus, Blocks):
        print(f"note: {corpus.describe()['sentence']}")
    data.fingerprint = corpus.fingerprint()
    return data, vocab_size
