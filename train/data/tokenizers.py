"""Tokenizers: raw bytes, a byte-level BPE trained on the corpus, or any tokenizer.json.

`token_bytes` converts nats per token to bits per byte, which is comparable across tokenizers.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..config import DataConfig, canonical_json
from ..errors import UserError
from ..files import open_regular, read_json
from . import merges, words
from .corpora import Corpus, open_corpus
from .mixing import Tokens, below_fraction, content_hash
from .readers import one_line
from .storage import Progress, building, checksum, locked, read_checked, silent, write_checked

# Tokens that may end a document if no tokenizer_config.json next to the tokenizer.json names an `eos_token`.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
SAMPLE_BYTES = 64 << 20  # of text to train a BPE on; chosen by hand
# Every merge scans the whole word that contains it, so words are cut at about _WORD characters. At most _UNBROKEN
# characters of text with such words are used, so that training takes about a minute.
_WORD, _UNBROKEN = 1024, 4 << 20
_RUN = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")
TRAINER = 1  # bump when training a BPE on the same corpus would give another one
_MAX_FILE_BYTES, _MAX_IDS = 1 << 30, 1 << 24  # of a tokenizer.json; chosen by hand
_SMALLEST_BPE = 257  # 256 bytes and the end of a document
_CARD = "isoflop_tokenizer.json"


def load_tokenizer(config: DataConfig, corpus: Corpus | None, cache: Path, progress: Progress = silent) -> Tokenizer:
    """Load the tokenizer that a config names. A BPE is trained on the corpus unless the cache has it."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer == "bpe":
        return _trained(config, corpus or open_corpus(config), cache, progress)
    return _from_file(config.tokenizer)


def planned_vocab_size(config: DataConfig) -> int:
    """Return the vocabulary's size without reading the corpus. On a very small corpus a BPE uses only the first ids."""
    if config.tokenizer == "bytes":
        return 256
    if config.tokenizer == "bpe":
        if config.vocab_size < _SMALLEST_BPE:
            raise UserError(
                f"data.vocab_size is {config.vocab_size}; data.tokenizer=bpe needs at least {_SMALLEST_BPE}: "
                "256 bytes and the end of a document"
            )
        return config.vocab_size
    return _from_file(config.tokenizer).vocab_size


def planned_fingerprint(config: DataConfig) -> str:
    """Return "bytes", "bpe", or a hash of the tokenizer file, without reading the corpus."""
    return config.tokenizer if config.tokenizer in ("bytes", "bpe") else _from_file(config.tokenizer).fingerprint


def tokenizer_from_directory(directory: str | Path) -> Tokenizer:
    """Load the tokenizer that `save` wrote. Raises UserError if it is missing or changed."""
    card = read_checked(Path(directory) / _CARD)
    if card["kind"] == "bytes":
        return ByteTokenizer()
    path = Path(directory) / "tokenizer.json"
    tokenizer = SubwordTokenizer(_read_tokenizer_json(path), card["end_of_document"], card["vocab_size"])
    if tokenizer.fingerprint != card["fingerprint"]:
        raise UserError(
            f"{path} has fingerprint {tokenizer.fingerprint}, and {_CARD} next to it expects {card['fingerprint']}: "
            "the file was changed; restore it"
        )
    return tokenizer


class ByteTokenizer:
    """A tokenizer whose tokens are bytes of UTF-8. 0xFF, never part of UTF-8, ends documents."""

    vocab_size = 256  # ids are below this
    dtype = np.uint16  # of ids; uint32 for a larger vocabulary
    end_of_document = 0xFF  # the id that follows every document; text that spells it out encodes to other ids
    token_bytes = np.repeat([1, 0], [255, 1])  # (vocab_size,) bytes of UTF-8 of each id; 0 for the end of a document
    # 16 hex digits, equal for tokenizers that encode equally.
    fingerprint = hashlib.sha256(b"isoflop bytes, 0xFF ends a document").hexdigest()[:16]

    def encode(self, text: str) -> Tokens:
        """Return the ids (n,) of a text."""
        return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(self.dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Any) -> str:
        """Return the text of token ids, without ends of documents. Invalid UTF-8 becomes U+FFFD."""
        ids = np.asarray(ids, np.int64)
        return ids[ids != self.end_of_document].astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, directory: Path) -> None:
        _save_card(self, "bytes", directory)


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library that never reads special tokens in text, pads or truncates."""

    def __init__(self, backend: Any, end_of_document: int, vocab_size: int) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.end_of_document = end_of_document
        self.vocab_size = vocab_size
        self.dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._content = json.loads(backend.to_str())
        # Set after `_content` is read, because it is a call option and not part of the tokenizer.
        backend.encode_special_tokens = True
        self.token_bytes = _token_bytes(self._content, backend, vocab_size)
        self.token_bytes[end_of_document] = 0
        self._words = words.Words(backend, self.dtype) if words.can_encode(self._content) else None
        self.fingerprint = checksum([self._content, end_of_document, vocab_size])[:16]

    def encode(self, text: str) -> Tokens:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        valid = [text.encode(errors="replace").decode() for text in texts]  # the library refuses lone surrogates
        if self._words is not None:
            return [self._words.encode(text) for text in valid]
        encodings = self._backend.encode_batch_fast(valid, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def decode(self, ids: Any) -> str:
        text_ids = [int(i) for i in np.asarray(ids, np.int64) if i != self.end_of_document]
        return str(self._backend.decode(text_ids, skip_special_tokens=False))

    def save(self, directory: Path) -> None:
        _save_card(self, "subword", directory)
        (Path(directory) / "tokenizer.json").write_text(
            json.dumps(self._content, ensure_ascii=False, indent=1), encoding="utf-8"
        )


Tokenizer = ByteTokenizer | SubwordTokenizer


def _save_card(tokenizer: Tokenizer, kind: str, directory: Path) -> None:
    Path(directory).mkdir(parents=True, exist_ok=True)
    card = {"kind": kind, "vocab_size": tokenizer.vocab_size, "end_of_document": tokenizer.end_of_document}
    write_checked(Path(directory) / _CARD, {**card, "fingerprint": tokenizer.fingerprint})


@dataclass
class _Added:
    id: int


@dataclass
class _Model:
    vocab: dict[str, int] | list[Any]


@dataclass
class _TokenizerFile:
    """The fields of a tokenizer.json to check before the library reads it: huge ids crash the interpreter there."""

    model: _Model
    added_tokens: list[_Added] = field(default_factory=list)


def _read_tokenizer_json(path: Path) -> Any:
    import tokenizers

    try:
        with open_regular(path, _MAX_FILE_BYTES) as stream:
            content = stream.read().decode()
        file = msgspec.json.decode(content, type=_TokenizerFile)
        vocabulary = file.model.vocab.values() if isinstance(file.model.vocab, dict) else ()
        for token_id in (*vocabulary, *(added.id for added in file.added_tokens)):
            if not 0 <= token_id < _MAX_IDS:
                raise ValueError(f"it has the id {token_id}, and ids go from 0 to {_MAX_IDS - 1}")
        return tokenizers.Tokenizer.from_str(content)
    except OSError as error:
        reason = error.strerror or "unreadable"
    except Exception as error:  # the library raises bare Exceptions
        reason = one_line(error)
    raise UserError(
        f"data.tokenizer is {str(path)!r}; it cannot be loaded ({reason}): it must be bytes, bpe, "
        "or the path of a tokenizer.json"
    )


def _from_file(name: str) -> SubwordTokenizer:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    backend = _read_tokenizer_json(path)
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise UserError(f"data.tokenizer is {name!r}; its vocabulary is empty")
    candidates = [*_configured_end(path.with_name("tokenizer_config.json")), *END_TOKENS]
    end = next((token for token in candidates if token in vocabulary), None)
    if end is None:
        raise UserError(
            f"data.tokenizer is {name!r}; it has no token that ends a document: it must have one of "
            f"{', '.join(END_TOKENS)}, or a tokenizer_config.json next to it with an eos_token"
        )
    if not any(added.content == end and added.special for added in backend.get_added_tokens_decoder().values()):
        # Text could encode to an ordinary entry, but never to a special one.
        backend.add_special_tokens([end])
    return SubwordTokenizer(backend, vocabulary[end], max(vocabulary.values()) + 1)


def _configured_end(path: Path) -> list[str]:
    token = (read_json(path) or {}).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []


def _token_bytes(content: dict[str, Any], backend: Any, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return how many bytes of text each id stands for, (vocab_size,)."""
    sizes = np.zeros(vocab_size, np.int64)
    added = {token["id"] for token in content["added_tokens"]}
    steps = [content.get("decoder"), content.get("pre_tokenizer")]
    byte_level = '"type":"ByteLevel"' in canonical_json(steps)
    continuation = (content["model"].get("continuing_subword_prefix") or "") if content["model"] else ""
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        if index in added:
            sizes[index] = len(token.encode())
        elif byte_level:
            sizes[index] = len(token)  # each byte is written as one visible character
        elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            sizes[index] = 1  # byte fallback
        else:
            text = token.removeprefix(continuation) if continuation else token
            sizes[index] = len(text.replace("▁", " ").encode())
    return sizes


def _trained(config: DataConfig, corpus: Corpus, cache: Path, progress: Progress) -> Tokenizer:
    size = planned_vocab_size(config)
    key = checksum([TRAINER, corpus.fingerprint(), size, config.validation_fraction, SAMPLE_BYTES])[:16]
    directory = cache / "tokenizers" / key
    with suppress(UserError):  # missing or damaged: built below under the lock
        return tokenizer_from_directory(directory)
    with locked(cache, f"tokenizer-{key}", progress):
        with suppress(UserError):
            return tokenizer_from_directory(directory)
        tokenizer = _train(config, corpus, size, progress)
        with building(directory) as temporary:
            tokenizer.save(temporary)
        return tokenizer


def _train(config: DataConfig, corpus: Corpus, vocab_size: int, progress: Progress) -> SubwordTokenizer:
    import tokenizers

    command = [sys.executable, "-P", str(Path(merges.__file__)), str(vocab_size), END_TOKENS[0]]
    pipe = subprocess.PIPE
    child: Any  # has both pipes
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, encoding="utf-8") as child:
        try:
            with suppress(BrokenPipeError), child.stdin:  # the child may have ended; see below
                child.stdin.writelines(json.dumps(text) + "\n" for text in _sample(config, corpus, progress))
            line = ""
            for line in child.stdout:
                if line.startswith('{"stage":"Compute merges"'):
                    merged = json.loads(line)
                    progress("learn merges", merged["current"], merged["total"])
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise UserError(
            f"data.vocab_size is {vocab_size}; training the tokenizer ended with exit code {child.returncode} "
            f"({line.strip()[:200] or 'no message'}), which often means that memory ran out"
        )
    backend: Any = tokenizers.Tokenizer.from_str(line)
    trained = backend.get_vocab_size()
    if trained < vocab_size:
        warnings.warn(
            f"data.vocab_size is {vocab_size}; the corpus is enough for {trained}, and the other ids are not used",
            stacklevel=2,
        )
    return SubwordTokenizer(backend, backend.token_to_id(END_TOKENS[0]), vocab_size)


def _sample(config: DataConfig, corpus: Corpus, progress: Progress) -> Iterator[str]:
    total = min(corpus.size_bytes() or SAMPLE_BYTES, SAMPLE_BYTES)
    done, unbroken, held_out, used = 0, 0, "", False
    blocks = corpus.held_out()
    for text in corpus.sample(SAMPLE_BYTES):
        encoded = text.encode()
        done += len(encoded)
        progress("train tokenizer", done, total)
        if below_fraction(content_hash(encoded), config.validation_fraction, blocks):
            held_out = held_out or text
            continue
        used = True
        pieces = list(_cut_words(text))
        for piece in pieces:
            unbroken += len(piece) if len(pieces) > 1 else 0
            if unbroken < _UNBROKEN:
                yield piece
    if held_out and not used:
        yield from _cut_words(held_out)  # a corpus of one or two short documents


def _cut_words(text: str) -> Iterator[str]:
    """Yield a text in pieces, cut inside very long words."""
    start = 0
    for at in range(_WORD, len(text), _WORD):
        if _RUN.fullmatch(text, at - _WORD, at):
            yield text[start:at]
            start = at
    yield text[start:]
