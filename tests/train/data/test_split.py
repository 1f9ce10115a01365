"""A corpus of few documents is held out by blocks with gaps around them; other corpora by documents."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isoflop.sweeps.cli.main import prepare_command
from isoflop.train.config import DataConfig
from isoflop.train.data import split
from isoflop.train.data.corpora import Corpus, open_corpus
from isoflop.train.data.loader import validation_windows
from isoflop.train.data.shards import Shards, prepare
from isoflop.train.data.split import GAP, Blocks, split_corpus
from isoflop.train.data.storage import silent
from isoflop.train.data.tokenizers import _sample, load_tokenizer


def play(seed: int, count: int) -> str:
    """Return text in which any 24 characters occur only once."""
    generator = random.Random(seed)
    return "".join(
        f"{generator.randrange(10**6)} {generator.choice(['exit', 'enter'])} ghost {i}{'.' if i % 9 else chr(10)}"
        for i in range(count)
    )


def few(folder: Path, plays: list[str], **fields: Any) -> DataConfig:
    folder.mkdir()
    for i, text in enumerate(plays):
        (folder / f"{i}.txt").write_text(text)
    return DataConfig(**{"corpus": "text", "path": str(folder), "cache_dir": str(folder.parent / "cache"), **fields})


def documents_of(shards: Shards, part: str) -> list[str]:
    tokens, starts = getattr(shards, part), np.load(shards.directory / f"{part}.documents.npy")
    return [shards.tokenizer.decode(tokens[a : b - 1]) for a, b in itertools.pairwise(starts)]


def held_share(shards: Shards) -> float:
    sizes = [shards.manifest[part]["bytes"] for part in ("train", "validation")]
    return sizes[1] / sum(sizes)


@pytest.mark.parametrize(("tokenizer", "steps"), [("bytes", []), ("bpe", ["exact", "length:2-"])])
def test_two_plays_are_held_out_by_blocks_with_a_gap(tokenizer: str, steps: list[str], tmp_path: Path) -> None:
    plays = [play(1, 4000), play(2, 6000)]
    config = few(tmp_path / "plays", plays, tokenizer=tokenizer, vocab_size=300, recipe=steps)
    shards = prepare(config)
    held, trained = documents_of(shards, "validation"), documents_of(shards, "train")
    assert held_share(shards) == pytest.approx(0.02, rel=0.35)
    assert 8 <= len(held) <= 20
    assert shards.manifest["held_out"]["by"] == "blocks"
    assert f"{len(held)} blocks" in shards.manifest["held_out"]["sentence"]
    for text in held:
        source = next(play for play in plays if text in play)
        at = source.index(text)
        # The text next to the block is nowhere in the training text.
        for gap in (source[max(at - GAP, 0) : at], source[at + len(text) : at + len(text) + GAP]):
            assert not any(gap[i : i + 24] in part for part in trained for i in range(0, len(gap) - 24, 12))
        assert not any(text[i : i + 24] in part for part in trained for i in range(0, len(text) - 24, 12))
    # Only the gaps are missing.
    missing = sum(map(len, plays)) - sum(map(len, trained)) - sum(map(len, held))
    assert missing == 2 * GAP * len(held)


def test_blocks_do_not_depend_on_names_and_copies_stay_on_one_side(tmp_path: Path) -> None:
    plays = [play(seed, 3000) for seed in range(3)]
    first = prepare(few(tmp_path / "a", plays))
    second = prepare(few(tmp_path / "b", plays[::-1], cache_dir=str(tmp_path / "other")))
    assert (first.train.tobytes(), first.validation.tobytes()) == (second.train.tobytes(), second.validation.tobytes())
    copies = prepare(few(tmp_path / "c", [*plays, *plays]))
    assert set(documents_of(copies, "validation")).isdisjoint(documents_of(copies, "train"))
    assert len(documents_of(copies, "validation")) == 2 * len(set(documents_of(copies, "validation")))


def test_a_tokenizer_is_not_trained_on_held_out_blocks(tmp_path: Path) -> None:
    config = few(tmp_path / "plays", [play(1, 4000), play(2, 4000)], tokenizer="bpe", vocab_size=300)
    corpus = split_corpus(config)
    assert isinstance(corpus, Blocks)
    pieces = list(corpus.documents())
    held = [text for text in pieces if split.content_hash(text.encode()) in corpus.held]
    seen = list(_sample(config, corpus, silent))
    assert len(held) >= 8
    assert len(seen) == len(pieces) - len(held)
    assert set(seen).isdisjoint(held)
    assert load_tokenizer(config, corpus, tmp_path / "cache").fingerprint == prepare(config).tokenizer.fingerprint


class ListCorpus(Corpus):
    def __init__(self, documents: list[str]) -> None:
        self._documents = documents

    def documents(self) -> Any:
        self.read = 0
        for text in self._documents:
            self.read += 1
            yield text

    def fingerprint(self) -> str:
        return "made"

    def size_bytes(self) -> int | None:
        return None


@pytest.mark.parametrize(
    ("sizes", "fraction", "by_blocks"),
    [
        ([3000] * 400, 0.1, False),  # many documents
        ([9000] * 77, 0.02, True),  # 1.5 documents are expected
        ([9000] * 40, 0.1, False),  # 4 are, and they are as large as the others
        ([100] * 30, 0.02, False),  # nothing to cut
        ([50_000], 0.02, True),
    ],
)
def test_corpora_of_few_documents_are_held_out_by_blocks(
    sizes: list[int], fraction: float, by_blocks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    corpus = ListCorpus([play(seed, size // 15)[:size] for seed, size in enumerate(sizes)])
    monkeypatch.setattr(split, "open_corpus", lambda config: corpus)
    config = DataConfig(corpus="text", validation_fraction=fraction, cache_dir=str(tmp_path))
    assert isinstance(split_corpus(config), Blocks) == by_blocks
    if sizes[0] == 3000:
        assert corpus.read < len(sizes)  # an ordinary corpus is not read through
    # A run keeps the split that it was planned with.
    blocks = split._fingerprint(corpus)
    assert not isinstance(split_corpus(dataclasses.replace(config, fingerprint="made")), Blocks)
    assert isinstance(split_corpus(dataclasses.replace(config, fingerprint=blocks)), Blocks)


def test_shards_that_are_there_stay_and_planned_runs_keep_theirs(tmp_path: Path) -> None:
    config = few(tmp_path / "plays", [play(1, 3000), play(2, 4000)])
    plain = open_corpus(config).fingerprint()
    before = prepare(dataclasses.replace(config, fingerprint=plain))  # as an earlier version split it
    assert "held_out" not in before.manifest
    assert held_share(before) > 0.3
    assert prepare(config).directory == before.directory
    assert split_corpus(config).fingerprint() == plain
    assert isinstance(split_corpus(dataclasses.replace(config, validation_fraction=0.05)), Blocks)
    shutil.rmtree(tmp_path / "cache")
    after = prepare(config)
    assert after.directory.name != before.directory.name
    assert held_share(after) < 0.03
    again = prepare(dataclasses.replace(config, fingerprint=plain))
    assert (again.directory, again.manifest) == (before.directory, before.manifest)


def test_preparing_reports_how_text_is_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = few(tmp_path / "plays", [play(1, 3000), play(2, 4000)])
    arguments = ["data=text", f"data.path={config.path}", "data.tokenizer=bytes", f"data.cache_dir={config.cache_dir}"]
    prepare_command(arguments)
    assert "blocks of about" in capsys.readouterr().out
    assert len(validation_windows(prepare(config), 128, 131072)) > 16
    shutil.rmtree(str(config.cache_dir))
    prepare(dataclasses.replace(config, fingerprint=open_corpus(config).fingerprint()))
    prepare_command(arguments)
    assert "the held-out set is one document" in capsys.readouterr().out


def test_a_manifest_of_another_form_is_passed_over(tmp_path: Path) -> None:
    config = few(tmp_path / "plays", [play(1, 3000), play(2, 4000)])
    for i, content in enumerate(["[]", "{", '{"corpus": []}', "[" * 100_000, json.dumps({"corpus": {"kind": 1}})]):
        folder = tmp_path / "cache" / "shards" / str(i)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(content)
    assert isinstance(split_corpus(config), Blocks)
