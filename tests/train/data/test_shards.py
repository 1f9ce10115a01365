"""Shards hold the corpus exactly, split by document, and are complete or absent even after a failed build."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isoflop.train.config import DataConfig
from isoflop.train.data import shards as module
from isoflop.train.data import words
from isoflop.train.data.corpora import open_corpus
from isoflop.train.data.mixing import MixedDocuments, _mixed_order, content_hash
from isoflop.train.data.recipe import pool
from isoflop.train.data.shards import Shards, open_shards, prepare
from isoflop.train.data.text import prepare_with_progress
from isoflop.train.data.tokenizers import ByteTokenizer, load_tokenizer
from isoflop.train.errors import UserError
from small_disk import disk_of

FORK = multiprocessing.get_context("fork")


def write_corpus(folder: Path, documents: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in documents))
    return folder


def random_documents(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [f"{i}: " + "".join(generator.choices("abcdé 😀\n", k=generator.randrange(300))) for i in range(count)]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    folder = write_corpus(tmp_path / "corpus", random_documents(300))
    return DataConfig(corpus="text", path=str(folder), validation_fraction=0.2, cache_dir=str(tmp_path / "cache"))


def changed(config: DataConfig, **fields: Any) -> DataConfig:
    return DataConfig(**{**vars(config), **fields})


def verify(shards: Shards) -> None:
    """Compare the checksum of every file; opening shards compares sizes only."""
    for name, expected in shards.manifest["files"].items():
        content = (shards.directory / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == expected["sha256"], name


def documents_of(shards: Shards, part: str) -> list[str]:
    tokens, starts = getattr(shards, part), np.load(shards.directory / f"{part}.documents.npy")
    assert (tokens[starts[1:] - 1] == shards.tokenizer.end_of_document).all()
    return [shards.tokenizer.decode(tokens[a : b - 1]) for a, b in itertools.pairwise(starts)]


def content(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def leftovers(config: DataConfig) -> list[Path]:
    return [path for path in Path(str(config.cache_dir)).rglob(".*") if path.is_dir()]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_shards_hold_every_document_once(config: DataConfig, tokenizer: str) -> None:
    shards = prepare(changed(config, tokenizer=tokenizer, vocab_size=300))
    train, validation = documents_of(shards, "train"), documents_of(shards, "validation")
    assert sorted(train + validation) == sorted(open_corpus(config).documents())
    for part, documents in (("train", train), ("validation", validation)):
        assert isinstance(getattr(shards, part), np.memmap)
        assert shards.manifest[part] == {
            "tokens": len(getattr(shards, part)),
            "documents": len(documents),
            "bytes": len("".join(documents).encode()),
        }
        # Bits per byte divide by the text itself.
        assert shards.tokenizer.token_bytes[getattr(shards, part)].sum() == shards.manifest[part]["bytes"]
    verify(shards)


def test_the_split_is_by_a_hash_of_the_content(config: DataConfig, tmp_path: Path) -> None:
    before = prepare(config)
    validation = set(documents_of(before, "validation"))
    assert validation.isdisjoint(documents_of(before, "train"))
    # 300 draws with probability 0.2: 60 expected, standard deviation 7; five of them is 35.
    assert abs(len(validation) - 60) < 35
    # The definition again: the first 8 bytes of BLAKE2b as a fraction of 2^64.
    for document in documents_of(before, "train") + documents_of(before, "validation"):
        share = int.from_bytes(hashlib.blake2b(document.encode(), digest_size=8).digest(), "big") / 2**64
        assert (document in validation) == (share < 0.2)
    # New text moves no old document, and neither does another order of the files.
    grown = [*random_documents(200, seed=1), *list(open_corpus(config).documents())[::-1]]
    after = prepare(changed(config, path=str(write_corpus(tmp_path / "grown", grown))))
    assert validation <= set(documents_of(after, "validation"))
    assert set(documents_of(before, "train")) <= set(documents_of(after, "train"))


def test_copies_do_not_stand_together() -> None:
    generator = np.random.default_rng(3)
    digests = np.append(generator.integers(1 << 56, dtype=np.uint64, size=2000), np.full(30, 12345, np.uint64))
    order, copies = _mixed_order(digests)
    assert sorted(order.tolist()) == list(range(2030))
    assert copies == 29
    # At random, a pair of neighbours is two copies with probability (30/2030)^2: 0.4 are expected; sorted, 29.
    places = np.sort(np.flatnonzero(digests[order] == 12345))
    assert np.sum(np.diff(places) == 1) < 6


def test_the_order_is_mixed_and_owes_nothing_to_the_files(config: DataConfig, tmp_path: Path) -> None:
    documents = list(open_corpus(config).documents())
    numbers = [int(document.split(":")[0]) for document in documents_of(prepare(config), "train")]
    # Of two neighbours either is the later one in the file: 240 coins, standard deviation 8; five of them is 39.
    assert abs(np.sum(np.diff(numbers) > 0) - len(numbers) / 2) < 39
    split = tmp_path / "split"
    split.mkdir()
    for i, document in enumerate(documents[::-1]):
        (split / f"{i}.txt").write_text(document, newline="")
    other = prepare(changed(config, path=str(split)))
    assert documents_of(other, "train") == documents_of(prepare(config), "train")


def test_mixing_on_disk_gives_what_mixing_in_memory_gives(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    texts = [bytes(generator.integers(0, 256, generator.integers(1, 200), np.uint8)) for _ in range(2000)]
    texts += texts[:100] + texts[:50] * 3
    mixed = []
    for memory_bytes in (1 << 30, 20_000):
        documents = MixedDocuments(tmp_path / f"spool{memory_bytes}", np.uint32, memory_bytes)
        for i, text in enumerate(texts):
            documents.add(content_hash(text), np.frombuffer(text, np.uint8).astype(np.uint32), i)
        mixed.append([(digest, tokens.tobytes()) for digest, tokens, _ in documents])
        assert documents.copies == 250
    assert (tmp_path / "spool20000").exists()
    assert not list((tmp_path / "spool20000").iterdir())
    assert mixed[0] == mixed[1]
    assert sorted(tokens for _, tokens in mixed[0]) == sorted(
        np.frombuffer(text, np.uint8).astype(np.uint32).tobytes() for text in texts
    )


def test_shards_are_found_again_and_building_twice_gives_the_same_bytes(config: DataConfig, tmp_path: Path) -> None:
    first = prepare(config)
    assert content(prepare(changed(config, cache_dir=str(tmp_path / "other"))).directory) == content(first.directory)
    reports: list[str] = []
    same = changed(config, sequence_length=64, validation_tokens=5, fingerprint=None)
    again = prepare(same, lambda stage, done, total: reports.append(stage))
    assert again.directory == first.directory
    assert "tokenize" not in reports


def test_what_changes_the_tokens_changes_the_shards(config: DataConfig) -> None:
    configs = [config, changed(config, validation_fraction=0.3), changed(config, max_bytes=5000)]
    configs.append(changed(config, tokenizer="bpe", vocab_size=280))
    assert len({prepare(variant).directory for variant in configs}) == 4


def test_the_cache_is_where_the_environment_says(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOFLOP_CACHE", str(tmp_path / "from_environment"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert prepare(changed(config, cache_dir=None)).directory.is_relative_to(tmp_path / "from_environment")
    assert prepare(config).directory.is_relative_to(tmp_path / "cache")
    monkeypatch.delenv("ISOFLOP_CACHE")
    assert prepare(changed(config, cache_dir=None)).directory.is_relative_to(tmp_path / "home/.cache/isoflop")


def test_progress_counts_tokens_and_goes_to_standard_error(
    config: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, float, float]] = []
    shards = prepare(config, lambda *call: calls.append(call))
    tokenized = [call for call in calls if call[0] == "tokenize"]
    assert tokenized[-1][1] == len(shards.train) + len(shards.validation)
    assert all(done <= total * 1.01 for _, done, total in tokenized)
    shutil.rmtree(shards.directory)
    prepare_with_progress(config)
    captured = capsys.readouterr()
    assert captured.out == ""  # standard output is for results
    assert "tokens/s" in captured.err
    prepare_with_progress(config)
    assert capsys.readouterr().err == "", "it was there already"


def test_words_and_other_processes_give_the_bytes_of_the_library(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(config, tokenizer="bpe", vocab_size=400)
    with monkeypatch.context() as patch:
        patch.setattr(words, "can_encode", lambda content: False)
        library = content(prepare(config).directory)
    monkeypatch.setattr(words, "_MAX_CACHED_CHARACTERS", 50)  # forgets words between documents
    assert content(prepare(changed(config, cache_dir=str(tmp_path / "words"))).directory) == library
    monkeypatch.setattr(module, "_SINGLE_PROCESS_BYTES", 0)
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 1 << 12)  # some 8 parts
    monkeypatch.setattr(pool, "usable_cores", lambda: 2)
    assert content(prepare(changed(config, cache_dir=str(tmp_path / "pool"))).directory) == library


# Two at once, kills, full disks.


def run_child(target: Callable[[], Any]) -> Any:
    child = FORK.Process(target=target)
    child.start()
    return child


def test_processes_that_ask_at_once_train_and_build_once(config: DataConfig, tmp_path: Path) -> None:
    def report(stage: str, done: float, total: float) -> None:
        if (stage, done) in (("learn merges", total), ("tokenize", 0)):
            with open(tmp_path / "stages", "a") as file:
                file.write(stage[0])
            time.sleep(0.3)  # long enough for the others to arrive

    config = changed(config, tokenizer="bpe", vocab_size=300)
    children = [run_child(lambda: verify(prepare(config, report))) for _ in range(3)]
    for process in children:
        process.join(60)
    assert [process.exitcode for process in children] == [0] * 3
    assert (tmp_path / "stages").read_text() == "lt"


@pytest.mark.parametrize("moment", [("tokenize", False), ("tokenize", True), ("write", True)], ids=str)
def test_a_killed_build_is_never_taken_for_a_whole_one(
    config: DataConfig, tmp_path: Path, moment: tuple[str, bool]
) -> None:
    def report(stage: str, done: float, total: float) -> None:
        if (stage, done > 0) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    child = run_child(lambda: prepare(config, report))
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert leftovers(config)
    assert not [path for path in (tmp_path / "cache" / "shards").iterdir() if not path.name.startswith(".")]
    shards = prepare(config)
    verify(shards)
    assert leftovers(config) == []
    undisturbed = prepare(changed(config, cache_dir=str(tmp_path / "other")))
    assert content(shards.directory) == content(undisturbed.directory)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(config: DataConfig, tmp_path: Path) -> None:
    with disk_of(8192), pytest.raises(UserError, match="has no space left"):
        prepare(config)
    assert list((tmp_path / "cache" / "shards").iterdir()) == []
    verify(prepare(config))


# Damage.


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a truncated token file": lambda d: truncate(d / "train.bin"),
    "a longer token file": lambda d: (d / "validation.bin").open("ab").write(b"xx"),
    "a missing file": lambda d: (d / "train.documents.npy").unlink(),
    "half a manifest": lambda d: os.truncate(d / "manifest.json", 100),
    "an edited manifest": lambda d: (d / "manifest.json").write_text(
        (d / "manifest.json").read_text().replace('"copies": 0', '"copies": 1')
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shards_are_built_again_with_a_warning(config: DataConfig, damage: str) -> None:
    shards = prepare(config)
    before = content(shards.directory)
    DAMAGES[damage](shards.directory)
    assert content(shards.directory) != before
    with pytest.raises(UserError):
        open_shards(shards.directory, ByteTokenizer())
    with pytest.warns(UserWarning, match="shards are built again"):
        again = prepare(config)
    assert content(again.directory) == before
    assert leftovers(config) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(config)


def test_a_tokenizer_that_does_not_match_its_shards_is_refused(config: DataConfig, tmp_path: Path) -> None:
    shards = prepare(config)
    other = load_tokenizer(changed(config, tokenizer="bpe", vocab_size=280), None, tmp_path / "cache")
    with pytest.raises(UserError, match=other.fingerprint):
        open_shards(shards.directory, other)


# Bad input.


def test_text_that_changed_since_it_was_planned_is_refused(config: DataConfig) -> None:
    planned = changed(config, fingerprint=open_corpus(config).fingerprint())
    assert prepare(planned).directory == prepare(config).directory
    with open(Path(str(config.path)) / "rows.jsonl", "a") as file:
        file.write('\n{"text": "one more"}')
    with pytest.raises(UserError, match=r"data.fingerprint is \w{16}, .* changed after planning"):
        prepare(planned)


def test_text_that_changes_while_it_is_read_is_refused(config: DataConfig) -> None:
    def meddle(stage: str, done: float, total: float) -> None:
        if stage == "tokenize" and done:
            with open(Path(str(config.path)) / "rows.jsonl", "a") as file:
                file.write('\n{"text": "one more"}')

    with pytest.raises(UserError, match="its text changed while it was read"):
        prepare(config, meddle)
    assert leftovers(config) == []


def test_two_distinct_documents_are_enough_for_both_parts(config: DataConfig, tmp_path: Path) -> None:
    for fraction in (1e-9, 0.02, 0.999):
        pair = changed(config, path=str(write_corpus(tmp_path / "pair", ["a", "b", "a"])), validation_fraction=fraction)
        shards = prepare(pair)
        parts = [set(documents_of(shards, "train")), set(documents_of(shards, "validation"))]
        assert sorted(map(sorted, parts)) == [["a"], ["b"]]


@pytest.mark.parametrize("documents", [["only this"], ["the same", "the same"]])
def test_text_that_cannot_be_split_is_refused(config: DataConfig, tmp_path: Path, documents: list[str]) -> None:
    path = str(write_corpus(tmp_path / "few", documents))
    with pytest.raises(UserError, match="at least two distinct"):
        prepare(changed(config, path=path))
    assert leftovers(config) == []


def test_a_bad_line_leaves_nothing_half_written(config: DataConfig) -> None:
    with open(Path(str(config.path)) / "rows.jsonl", "a") as file:
        file.write("\n{oops")
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(UserError, match=r"line 301 of .*rows.jsonl is not JSON"):
            prepare(changed(config, tokenizer=tokenizer, vocab_size=300))
    assert leftovers(config) == []


def test_a_cache_that_cannot_be_written_is_refused(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(UserError, match=rf"data.cache_dir is {place}; it cannot be written \(.+\)"):
            prepare(changed(config, cache_dir=str(place)))
