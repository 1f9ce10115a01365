"""The text of runs: absolute paths, fingerprints and vocabularies, which the planner fills in."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from ...train.config import DataConfig, DomainConfig, RunConfig

# Fields of `data` that do not change the text, its tokens or what is held out.
OTHER = {"sequence_length", "separate_documents", "cache_dir", "recipe", "recipe_fingerprint", "target", "epochs_of"}
FILLED = ("path", "tokenizer", "fingerprint", "tokenizer_fingerprint")
CONTENT = [item.name for item in dataclasses.fields(DataConfig) if item.name not in {*OTHER, *FILLED[2:]}]
DOMAIN_FILLED = ("path", "fingerprint")
OF_DOMAINS = {item.name for item in dataclasses.fields(DomainConfig)} & {*CONTENT}


def is_text_field(name: str) -> bool:
    """Return whether a run field, by dotted name, changes the text, its tokens or what is held out."""
    group, _, last = name.rpartition(".")
    return last in CONTENT if group == "data" else group.startswith("data.domains.") and last in OF_DOMAINS


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
        for domain, settings in (run.data.domains or {}).items():
            for name in DOMAIN_FILLED:
                setattr(settings, name, getattr(text.domains[domain], name))
        if "model.vocab_size" not in fixed:
            run.model.vocab_size = vocab_size


def _key(data: DataConfig) -> tuple[object, ...]:
    domains = [
        (name, *(getattr(domain, field) for field in sorted(OF_DOMAINS)))
        for name, domain in (data.domains or {}).items()
    ]
    return (*domains, *(getattr(data, name) for name in CONTENT if name != "domains"))


def _read(data: DataConfig) -> tuple[DataConfig, int]:
    """Return a corpus's config with paths and fingerprints, and its vocabulary size. May print a note on the split."""
    from ...train.data.storage import checksum
    from ...train.data.text import domains_of, in_domain
    from ...train.data.tokenizers import planned_fingerprint, planned_vocab_size
    from ...train.planner.validation import check_mixture

    check_mixture(data)
    tokenizer = data.tokenizer
    if tokenizer not in ("bytes", "bpe"):
        tokenizer = str(Path(tokenizer).expanduser().absolute())
    data = dataclasses.replace(data, tokenizer=tokenizer, fingerprint=None)
    data.tokenizer_fingerprint = planned_fingerprint(data)
    vocab_size = planned_vocab_size(data)
    read = dict[str, tuple[str | None, str]]()
    for name, source in domains_of(data).items():
        with in_domain(name):
            read[name] = _find(source)
    if data.domains is None:
        (data.path, data.fingerprint), *_ = read.values()
        return data, vocab_size
    filled = {name: dict(zip(DOMAIN_FILLED, read[name], strict=True)) for name in data.domains}
    data.domains = {name: dataclasses.replace(domain, **filled[name]) for name, domain in data.domains.items()}
    data.fingerprint = checksum({name: fingerprint for name, (_, fingerprint) in read.items()})[:16]
    return data, vocab_size


def _find(data: DataConfig) -> tuple[str | None, str]:
    """Return the absolute path and the fingerprint of one corpus. May print a note on the split."""
    from ...train.data.split import Blocks, split_corpus

    path = data.path if data.path is None else str(Path(data.path).expanduser().absolute())
    corpus = split_corpus(dataclasses.replace(data, path=path, fingerprint=None))
    if isinstance(corpus, Blocks):
        print(f"note: {corpus.describe()['sentence']}")
    return path, corpus.fingerprint()
