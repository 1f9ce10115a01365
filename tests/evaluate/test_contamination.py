"""Overlap of task items with training text, against sets of tuples of words, over bytes and BPE tokens."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from isoflop.evaluate import contamination
from isoflop.evaluate.contamination import END, item_texts, normalised, overlaps, words_and_ends
from isoflop.evaluate.tasks.custom import load_custom, load_texts
from isoflop.evaluate.tasks.suite import Suite
from isoflop.train.config import DataConfig
from isoflop.train.data.corpora import open_corpus
from isoflop.train.data.shards import Shards, prepare
from isoflop.train.errors import UserError

WORDS = [f"{a}{b}" for a in ["tensor", "kernel", "loss", "law", "naïve", "Straße", "10x"] for b in "abcdef"]


def word_hashes(text: bytes) -> Any:
    return words_and_ends(text)[0]


def text_of(rng: np.random.Generator, count: int) -> str:
    """Return words with all kinds of punctuation between them."""
    between = [" ", ", ", " — ", "\n\n", " (", "_", "'", "…"]
    return "".join(str(rng.choice(WORDS)) + between[rng.choice(8, p=[0.79] + [0.03] * 7)] for _ in range(count))


def shards_of(folder: Path, documents: list[str], tokenizer: str = "bytes") -> Shards:
    """Return shards with all of these documents for training; other documents are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = DataConfig(
        corpus="text", path=str(folder / "corpus.jsonl"), tokenizer=tokenizer, vocab_size=300,
        validation_fraction=1e-9, cache_dir=str(folder / "cache"),
    )  # fmt: skip
    config.fingerprint = open_corpus(config).fingerprint()  # planned by documents, though they are few
    return prepare(config)


def training_texts(shards: Shards) -> list[str]:
    ends = np.load(shards.directory / "train.documents.npy")
    return [shards.tokenizer.decode(shards.train[ends[i] : ends[i + 1]]) for i in range(len(ends) - 1)]


def suite_of(folder: Path, items: list[dict[str, Any]], name: str = "quiz") -> Suite:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return load_custom(folder / f"{name}.jsonl")


def plain_words(text: str) -> list[str]:
    """Return the words by their definition, in the simplest Python."""
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).lower())


def brute_force(documents: list[str], items: list[str], n: int) -> set[int]:
    streams = [plain_words(document) for document in documents]

    def occurs(gram: tuple[str, ...]) -> bool:
        return any(
            tuple(stream[i : i + len(gram)]) == gram for stream in streams for i in range(len(stream) - len(gram) + 1)
        )

    overlapping = set()
    for place, item in enumerate(items):
        item_words = plain_words(item)
        length = n if len(item_words) >= n else len(item_words)
        if length == n or length >= 8:
            grams = {tuple(item_words[i : i + length]) for i in range(len(item_words) - length + 1)}
            overlapping |= {place} if any(occurs(gram) for gram in grams) else set()
    return overlapping


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read even a short text in many chunks."""
    monkeypatch.setattr(contamination, "_CHUNK_BYTES", 700)
    monkeypatch.setattr(contamination, "_OVERLAP_TOKENS", 400)


@pytest.mark.parametrize(("tokenizer", "ngram"), [("bytes", 3), ("bpe", 13)])
def test_overlaps_are_those_of_a_brute_force_search(
    tmp_path: Path, tokenizer: str, ngram: int, small_chunks: None
) -> None:
    rng = np.random.default_rng(ngram)
    documents = [text_of(rng, int(rng.integers(5, 300))) for _ in range(30)]
    items = []
    for place in range(40):  # a quarter begins with words of the corpus, more or fewer than n
        text = text_of(rng, int(rng.integers(6, 14)))
        if place % 4 == 0:
            pieces = re.split(r"(?<=\s)", documents[int(rng.integers(30))])
            start = int(rng.integers(max(1, len(pieces) - 30)))
            text = "".join(pieces[start : start + int(rng.integers(8, 30))]) + " " + text
        items.append({"question": text, "answer": "the answer"})
    shards = shards_of(tmp_path, documents, tokenizer)
    expected = brute_force(training_texts(shards), [f"{item['question']} {item['answer']}" for item in items], ngram)
    assert 3 <= len(expected) < 40
    assert overlaps(shards, suite_of(tmp_path, items), ngram)["quiz"] == expected


def test_a_planted_item_is_found_whatever_its_case_and_punctuation(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    items = [{"question": " ".join(f"q{place}w{i}" for i in range(12)), "answer": "yes"} for place in range(4)]
    filler = [text_of(rng, 100) for _ in range(20)]
    sentences = [f"{item['question']} {item['answer']}" for item in items]
    filler[3] += "\n" + sentences[0] + "\n" + filler[3]
    filler[5] += re.sub(" ", " -- ", sentences[1].upper()) + "!"
    filler[7] += " " + " ".join(sentences[2].split()[:12]) + " no"
    filler[8] += " " + " ".join(sentences[2].split()[1:])
    filler[9] += " " + " ".join(sentences[3].split()[:7])  # two halves in two documents
    filler.append(" ".join(sentences[3].split()[7:]) + " " + filler[9])
    assert overlaps(shards_of(tmp_path, filler), suite_of(tmp_path, items)) == {"quiz": {0, 1}}


def test_half_a_word_at_a_cut_is_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text repeats itself every 30 bytes and is cut every 101, so that it is cut at every place."""
    monkeypatch.setattr(contamination, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(contamination, "_OVERLAP_TOKENS", 101)
    text = "concat a b c d e f g h i j kl " * 110
    shards = shards_of(tmp_path, [text, "another", "a third"])
    assert text in training_texts(shards)
    sentences = ["cat a b c d e f g h i j kl concat", "concat a b c d e f g h i j kl con", text[:37]]
    items = [{"question": sentence[: sentence.rindex(" ")], "answer": sentence.split()[-1]} for sentence in sentences]
    assert all(len(sentence.split()) == 13 for sentence in sentences)
    assert overlaps(shards, suite_of(tmp_path, items)) == {"quiz": {2}}


def test_tokenizers_that_are_not_byte_level_are_decoded(tmp_path: Path, small_chunks: None) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = np.random.default_rng(4)
    documents = [text_of(rng, 200) for _ in range(8)]
    backend: Any = Tokenizer(models.BPE(unk_token="?"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=200, special_tokens=["?", "</s>"]))
    backend.save(str(tmp_path / "tokenizer.json"))
    shards = shards_of(tmp_path, documents, str(tmp_path / "tokenizer.json"))
    texts = training_texts(shards)
    items = [" ".join(plain_words(texts[place])[20:40]) for place in range(5)] + [text_of(rng, 20) for _ in range(5)]
    suite = suite_of(tmp_path, [{"question": item, "answer": "so"} for item in items])
    assert overlaps(shards, suite)["quiz"] == brute_force(texts, items, 13) == {0, 1, 2, 3, 4}


def test_an_ngram_never_spans_two_documents(tmp_path: Path) -> None:
    item = ["a1", "a2", "a3", "a4", "a5", "a6", "a7", "b1", "b2", "b3", "b4", "b5", "b6"]
    for attempt in range(50):  # a hash orders the stream; repeat until the halves follow each other
        halves = [f"start{attempt} " + " ".join(item[:7]), " ".join(item[7:])]
        shards = shards_of(tmp_path / str(attempt), [*halves, f"other{attempt}"])
        if training_texts(shards) == halves:
            break
    assert training_texts(shards) == halves
    suite = suite_of(tmp_path, [{"question": " ".join(item[:-1]), "answer": item[-1]}])
    assert overlaps(shards, suite) == {"quiz": set()}


def test_short_items_are_found_whole_from_eight_words_on(tmp_path: Path) -> None:
    seven, eight = "one two three four five six seven", "eins zwei drei vier fünf sechs sieben acht"
    documents = [f"now {seven} and {eight} end", "another document", "a third one"]
    items = [{"question": text.rsplit(" ", 1)[0], "answer": text.rsplit(" ", 1)[1]} for text in (seven, eight)]
    assert overlaps(shards_of(tmp_path, documents), suite_of(tmp_path, items)) == {"quiz": {1}}


def test_a_template_around_the_question_hides_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    questions = [" ".join(f"{rng.integers(10**9)}" for _ in range(9)) for _ in range(30)]
    items = [{"question": f"Question: {text}?\nAnswer:", "answer": f"z{i}"} for i, text in enumerate(questions)]
    documents = [f"{questions[4]}: z4", f"Question: {questions[5]}? Answer: z5", f"{questions[6]} z5", "something"]
    assert overlaps(shards_of(tmp_path, [*documents, "more"]), suite_of(tmp_path, items)) == {"quiz": {4, 5}}


def test_places_are_those_of_the_split_and_examples_are_no_part_of_an_item(tmp_path: Path) -> None:
    documents = [" ".join(f"d{place}w{i}" for i in range(20)) for place in range(3)]
    shards = shards_of(tmp_path, documents)
    items = [{"question": " ".join(f"q{place}w{i}" for i in range(20)), "answer": "no"} for place in range(30)]
    leak = training_texts(shards)[0]
    suite_of(tmp_path, [*items[:17], {"question": leak, "answer": "yes"}, *items[17:]])
    suite = load_custom(tmp_path / "quiz.jsonl", shots=5, limit=None)
    assert any(leak in instance.args[0] for instance in suite["quiz@5"].task.instances if instance.doc_id != 17)
    assert overlaps(shards, suite) == {"quiz@5": {17}}
    some = load_custom(tmp_path / "quiz.jsonl", limit=12)
    assert overlaps(shards, some)["quiz"] == {17} & set(some["quiz"].indices)


def test_texts_to_be_scored_whole_are_items_too(tmp_path: Path) -> None:
    documents = [" ".join(f"d{place}w{i}" for i in range(20)) for place in range(6)]
    shards = shards_of(tmp_path / "shards", documents)
    folder = tmp_path / "held"
    (folder / "web").mkdir(parents=True)
    for place, text in enumerate(["nothing of the kind " * 9, training_texts(shards)[0], training_texts(shards)[1]]):
        (folder / "web" / f"{place}.txt").write_text(text)
    assert overlaps(shards, load_texts(folder)) == {"text_held_web": {1, 2}}


def texts_of_task(text: Any, target: Any, choices: list[str]) -> tuple[str, str]:
    returned = {"doc_to_text": text, "doc_to_target": target, "doc_to_choice": choices}
    functions = {name: lambda doc, value=value: value for name, value in returned.items()}
    return item_texts(SimpleNamespace(OUTPUT_TYPE="multiple_choice", **functions), {})


def test_an_item_is_its_question_and_its_right_answer() -> None:
    for target in (1, [1, 0], "b"):
        assert texts_of_task("q", target, ["a", "b"]) == ("q", "b")
    # Like WinoGrande: the choices are contexts, and the text is the number of the right one.
    assert texts_of_task(1, "so", ["Ann went,", "Bob went,"]) == ("Bob went,", "so")


# The cache


@pytest.fixture
def leaked(empty_cache: Path, tmp_path: Path) -> tuple[Shards, Suite]:
    documents = [" ".join(f"d{place}w{i}" for i in range(20)) for place in range(4)]
    shards = shards_of(tmp_path / "shards", documents)
    return shards, suite_of(tmp_path, [{"question": training_texts(shards)[0], "answer": "no"}])


def test_results_are_kept_by_text_items_and_length(tmp_path: Path, leaked: tuple[Shards, Suite]) -> None:
    shards, suite = leaked
    assert overlaps(shards, suite) == {"quiz": {0}}
    (file,) = (tmp_path / "contamination").iterdir()
    before = file.stat().st_mtime_ns
    assert overlaps(shards, suite) == {"quiz": {0}}
    assert file.stat().st_mtime_ns == before  # read, not computed
    overlaps(shards, suite, 12)
    other = suite_of(tmp_path, [{"question": "other " * 20, "answer": "no"}], "other")
    both = suite | other
    assert overlaps(shards, both) == {"quiz": {0}, "other": set()}
    assert overlaps(shards_of(tmp_path / "more", ["a b", "c d"]), suite) == {"quiz": set()}
    assert len(list((tmp_path / "contamination").iterdir())) == 4


def test_a_damaged_result_is_computed_again(tmp_path: Path, leaked: tuple[Shards, Suite]) -> None:
    shards, suite = leaked
    overlaps(shards, suite)
    (file,) = (tmp_path / "contamination").iterdir()
    whole = file.read_text()
    for damaged in ("", whole[:30], whole.replace("\n  0\n", "\n  7\n"), "[]", '{"checksum": "0"}'):
        assert damaged != whole
        file.write_text(damaged)
        assert overlaps(shards, suite) == {"quiz": {0}}
        assert file.read_text() == whole


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, leaked: tuple[Shards, Suite]) -> None:
    (tmp_path / "contamination").write_text("a file where the folder would be")
    with pytest.raises(UserError, match="cannot be written"):
        overlaps(*leaked)


# Words and hashes


def test_documents_in_bytes_are_normalised_as_texts_are() -> None:
    texts = ["Ünïcode — Text", "plain ASCII text_with-signs", "ﬁne Ⅳ", "汉字kana カナ", ""]
    joined = normalised(END.join(text.encode() for text in texts))
    hashes, ends = words_and_ends(joined)
    expected = [word_hashes(normalised(text)) for text in texts]
    assert hashes.tolist() == np.concatenate(expected).tolist()
    assert np.bincount(ends, minlength=5).tolist() == [len(text_hashes) for text_hashes in expected]
    assert word_hashes(normalised("ÄÖ ﬁne Ⅳ")).tolist() == word_hashes(normalised("äö fine IV")).tolist()
    assert len(expected[3]) == 5  # two ideographs, a word, two kana
