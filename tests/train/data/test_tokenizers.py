"""Text survives a round trip, ids count their bytes exactly, and a tokenizer is what its fingerprint says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as hf
from isoflop.train.config import DataConfig
from isoflop.train.data import tokenizers as ours
from isoflop.train.data import words
from isoflop.train.data.corpora import open_corpus
from isoflop.train.data.mixing import below_fraction, content_hash
from isoflop.train.data.tokenizers import (
    ByteTokenizer,
    SubwordTokenizer,
    load_tokenizer,
    planned_vocab_size,
    tokenizer_from_directory,
)
from isoflop.train.errors import UserError
from tokenizers import decoders, models, pre_tokenizers, trainers


def random_text(seed: int) -> str:
    """Return characters of several planes, controls, spaces and combining marks; from few blocks, which take time."""
    generator = random.Random(seed)
    blocks = [(0, 0x80), (0, 0x20), (0x80, 0x200), (0x300, 0x370), (0x660, 0x6A0), (0x3000, 0x3100), (0xD700, 0xD800),
              (0xFF00, 0x10000), (0x1F600, 0x1F700), (0x10FF00, 0x110000)]  # fmt: skip
    return "".join(chr(generator.randrange(*generator.choice(blocks))) for _ in range(generator.randrange(1, 300)))


TEXTS = [
    *map(random_text, range(100)), "", "\x00", "<|endoftext|>", "a <|endoftext|> b\r\n\t", "ÿ", "▁ x"
]  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("text")
    corpus_words = [f"wort{i} " for i in range(300)]
    generator = random.Random(5)
    for i in range(30):
        (folder / f"{i}.txt").write_text("".join(generator.choices(corpus_words, k=400)) + "Straße 😀\n" * (i % 3))
    cache = tmp_path_factory.mktemp("cache")
    return DataConfig(corpus="text", path=str(folder), tokenizer="bpe", vocab_size=400, cache_dir=str(cache))


@pytest.fixture(scope="module")
def bpe(config: DataConfig) -> ours.Tokenizer:
    return load_tokenizer(config, open_corpus(config), Path(str(config.cache_dir)))


def test_bytes_come_back_and_the_end_of_a_document_is_never_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == planned_vocab_size(DataConfig()) == 256
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert ids.tolist() == list(text.encode())
        assert tokenizer.end_of_document not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.decode([72, 255, 105, 0xC3]) == "Hi\ufffd"
    assert tokenizer.token_bytes[255] == 0


def test_word_by_word_the_ids_are_those_of_the_library(bpe: SubwordTokenizer) -> None:
    assert words.can_encode(bpe._content)
    generator, cases = (
        random.Random(1),
        ["'s", "'ll", "'", " ", "  ", "\n", "wort1", "7", "²", "٣", "é", "\u3000", "𝟘", "!"],
    )
    code_points = [*range(256), *range(0x2000, 0x2100), *range(0x3000, 0x3100), *range(0x1F000, 0x1F100)]
    texts = [
        *TEXTS[-6:],
        *("".join(generator.choices(cases, k=8)) for _ in range(1500)),
        *("".join(map(chr, generator.choices(code_points, k=50))) for _ in range(500)),
    ]
    library = bpe._backend.encode_batch_fast(texts, add_special_tokens=False)
    for text, ids, expected in zip(texts, bpe.encode_batch(texts), library, strict=True):
        assert ids.tolist() == expected.ids, repr(text)


@pytest.mark.parametrize("changes", [
    {"normalizer": {"type": "NFC"}},
    {"pre_tokenizer": {"type": "Whitespace"}},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
    {"model": {"type": "Unigram"}},
    {"model": {"type": "BPE", "dropout": 0.1}},
    {"added_tokens": [{"id": 5, "content": "x y", "special": False}]},
])  # fmt: skip
def test_other_tokenizers_are_left_to_the_library(bpe: SubwordTokenizer, changes: dict[str, object]) -> None:
    assert not words.can_encode({**bpe._content, **changes})


def test_a_trained_bpe_gives_text_back_and_counts_its_bytes(bpe: ours.Tokenizer) -> None:
    assert bpe.vocab_size == 400
    assert bpe.token_bytes.shape == (400,)
    for text, batched in zip(TEXTS, bpe.encode_batch(TEXTS), strict=True):
        ids = bpe.encode(text)
        assert ids.dtype == np.uint16
        assert np.array_equal(ids, batched)
        assert bpe.end_of_document not in ids
        assert bpe.decode(ids) == text
        assert bpe.token_bytes[ids].sum() == len(text.encode())
    assert bpe.token_bytes[bpe.end_of_document] == 0
    assert bpe.decode([bpe.end_of_document, *bpe.encode("x"), bpe.end_of_document]) == "x"
    # It learned something: a word of the corpus is fewer tokens than bytes.
    assert len(bpe.encode("wort123 wort45 ")) < 15


def test_training_repeats_and_a_damaged_tokenizer_is_trained_again(
    config: DataConfig, bpe: ours.Tokenizer, tmp_path: Path
) -> None:
    reports: list[tuple[str, float, float]] = []

    def fingerprint(config: DataConfig) -> str:
        reports.clear()
        return load_tokenizer(config, None, tmp_path, lambda *report: reports.append(report)).fingerprint

    assert fingerprint(config) == bpe.fingerprint
    merges = [done for stage, done, _ in reports if stage == "learn merges"]
    assert merges == sorted(merges)
    assert reports[-1][1] == reports[-1][2] == merges[-1] >= 40
    assert fingerprint(config) == bpe.fingerprint
    assert not reports  # it was in the cache
    (path,) = tmp_path.glob("tokenizers/*/tokenizer.json")
    path.write_bytes(path.read_bytes()[:-100])
    assert fingerprint(config) == bpe.fingerprint
    assert reports
    assert fingerprint(replace(config, vocab_size=401)) != bpe.fingerprint


@pytest.mark.filterwarnings("ignore:data.vocab_size")  # every word is learned, and some ids are left
def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    generator = random.Random(0)
    texts = ["".join(generator.choices("abcdefgh", k=8)) + " " for _ in range(20)]
    lines = [json.dumps({"text": text * 50}) + "\n" for text in texts]
    (tmp_path / "text.jsonl").write_text("".join(lines))
    config = DataConfig(
        corpus="text", path=str(tmp_path), tokenizer="bpe", vocab_size=360, validation_fraction=0.5
    )  # fmt: skip
    tokenizer = load_tokenizer(config, None, tmp_path / "cache")
    held_out = [below_fraction(content_hash((text * 50).encode()), 0.5) for text in texts]
    assert 0 < sum(held_out) < len(held_out)
    for text, is_held_out in zip(texts, held_out, strict=True):
        assert (len(tokenizer.encode(" " + text.strip())) > 1) == is_held_out


@pytest.mark.parametrize("character", ["a", "7", " ", "=", "_", "語"])
def test_a_word_without_end_is_cut_before_a_bpe_is_trained_on_it(character: str) -> None:
    texts = ["some words of a text " * 200, "begin " + character * 100_000 + " end"]
    pieces = list(ours._cut_words(texts[1]))
    assert "".join(pieces) == texts[1]
    assert max(map(len, pieces)) <= 2 * ours._WORD
    assert list(ours._cut_words(texts[0])) == texts[:1]  # ordinary text is not cut, so its tokenizer never changes


def test_a_training_that_is_killed_is_one_sentence(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "merges.py"
    monkeypatch.setattr(ours.merges, "__file__", str(script))
    for text, code in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)):
        script.write_text(text)
        with pytest.raises(UserError, match=rf"^data.vocab_size is 400; .* code {code} "):
            load_tokenizer(config, None, tmp_path)


def test_a_corpus_too_small_for_the_vocabulary_keeps_its_size(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abab abab"}\n{"text": "cdcd cdcd"}\n')
    config = DataConfig(corpus="text", path=str(tmp_path), tokenizer="bpe", vocab_size=1000)
    with pytest.warns(UserWarning, match="data.vocab_size is 1000"):
        tokenizer = load_tokenizer(config, None, tmp_path / "cache")
    assert tokenizer.vocab_size == len(tokenizer.token_bytes) == planned_vocab_size(config) == 1000
    assert tokenizer.decode([*tokenizer.encode("abab"), 999]) == "abab"


def test_a_checkpoint_carries_its_tokenizer(bpe: ours.Tokenizer, tmp_path: Path) -> None:
    for i, tokenizer in enumerate((bpe, ByteTokenizer())):
        tokenizer.save(tmp_path / str(i))
        back = tokenizer_from_directory(tmp_path / str(i))
        assert back.fingerprint == tokenizer.fingerprint
        assert (back.vocab_size, back.end_of_document) == (tokenizer.vocab_size, tokenizer.end_of_document)
        assert all(map(np.array_equal, back.encode_batch(TEXTS), tokenizer.encode_batch(TEXTS)))
        assert np.array_equal(back.token_bytes, tokenizer.token_bytes)


def test_a_tokenizer_that_was_changed_is_refused(bpe: ours.Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="fingerprint"):
        tokenizer_from_directory(tmp_path)
    with pytest.raises(UserError, match=r"isoflop_tokenizer.json is missing"):
        tokenizer_from_directory(tmp_path / "nowhere")


def train_json(path: Path, special: list[str]) -> Path:
    """Train and save a tokenizer.json like one that a user brings."""
    tokenizer = hf.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["some words, some more words"] * 3, trainer)
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(max_length=10)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    ("special", "configured", "expected"),
    [
        (["<pad>", "</s>"], None, "</s>"),
        (["</s>", "<|endoftext|>"], None, "<|endoftext|>"),  # first of the list, not of the file
        (["<|endoftext|>", "<|im_end|>"], "<|im_end|>", "<|im_end|>"),  # the tokenizer_config.json next to it wins
        (["<|endoftext|>", "<|im_end|>"], {"content": "<|im_end|>"}, "<|im_end|>"),
    ],
)
def test_a_tokenizer_json_is_used_whole(tmp_path: Path, special: list[str], configured: object, expected: str) -> None:
    path = train_json(tmp_path / "tokenizer.json", special)
    if configured is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": configured}))
    config = DataConfig(tokenizer=str(path))
    tokenizer = load_tokenizer(config, None, tmp_path)
    assert tokenizer.end_of_document == special.index(expected)
    assert planned_vocab_size(config) == tokenizer.vocab_size == hf.Tokenizer.from_file(str(path)).get_vocab_size()
    for text in [*TEXTS, " ".join(special)]:  # longer than its truncation, shorter than its padding
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert not set(ids.tolist()) & set(range(len(special)))


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    path = train_json(tmp_path / "tokenizer.json", ["<pad>"])
    with pytest.raises(UserError, match=r"data.tokenizer is .* ends a document"):
        load_tokenizer(DataConfig(tokenizer=str(path)), None, tmp_path)


def test_sentencepiece_markers_and_byte_fallback_are_undone_in_the_count() -> None:
    vocabulary = {
        token: i for i, token in enumerate(["</s>", "▁", "▁the", "e", "ß", *(f"<0x{b:02X}>" for b in range(256))])
    }
    backend = hf.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="</s>"))
    tokenizer = SubwordTokenizer(backend, 0, len(vocabulary))
    assert tokenizer.token_bytes[:5].tolist() == [0, 1, 4, 1, 2]
    assert tokenizer.token_bytes[5:].tolist() == [1] * 256
    ids = tokenizer.encode("😀ß")
    assert tokenizer.token_bytes[ids].sum() == 6


def test_a_vocabulary_beyond_16_bits_is_stored_in_32() -> None:
    vocabulary = {"</s>": 0, "a": 1, **{f"w{i}": i for i in range(2, 70_000)}}
    backend = hf.Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ids = SubwordTokenizer(backend, 0, 70_000).encode("w69999 a")
    assert ids.dtype == np.uint32
    assert ids.tolist() == [69_999, 1]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tokenizer": "bpe", "vocab_size": 256}, "data.vocab_size is 256; .* 257"),
        ({"tokenizer": "/no/tokenizer.json"}, "data.tokenizer is '/no/tokenizer.json'; .*No such file"),
        ({"tokenizer": "gpt2"}, "data.tokenizer is 'gpt2'; it cannot be loaded"),
        ({"tokenizer": "/dev/zero"}, r"data.tokenizer is '/dev/zero'; it cannot be loaded \(it is a device or a pipe"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_refused(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    for ask in (planned_vocab_size, lambda config: load_tokenizer(config, None, tmp_path)):
        with pytest.raises(UserError, match=sentence):
            ask(DataConfig(**fields))
