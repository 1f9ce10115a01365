"""Filters remove what the published rules remove, for the same reasons, as an independent implementation does."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import gopher_quality_filter, gopher_repetition_filter
from isoflop.train.data.recipe.filters import gopher_quality, gopher_repetition, make_filter
from isoflop.train.data.recipe.recipe import parse
from isoflop.train.errors import UserError

WORDS = [
    f"{a}{b}{c}" for a in ("mar", "ten", "sol", "wix") for b in ("ka", "lo", "mi") for c in ("ster", "nd", "po", "")
]


def prose(count: int = 120, seed: int = 0) -> str:
    """Return healthy text: varied words, stop words, ends of sentences, lines and paragraphs."""
    generator = random.Random(seed)
    words = [generator.choice(WORDS) + str(generator.randrange(999)) for _ in range(count)]
    words[5::9] = generator.choices(["the", "of", "and", "with"], k=len(words[5::9]))
    words[11], words[12] = "the", "of"
    lines = [" ".join(words[i : i + 8]) + "." for i in range(0, count, 8)]
    return "\n".join(line + "\n" * (i % 4 == 3) for i, line in enumerate(lines))


def test_healthy_text_passes_every_rule() -> None:
    for seed in range(20):
        assert gopher_quality(prose(seed=seed)) is None
        assert gopher_repetition(prose(seed=seed)) is None


CASES: dict[str, tuple[Callable[[str], str | None], Callable[[str], str]]] = {
    "few words": (gopher_quality, lambda text: " ".join(text.split()[:49])),
    "many words": (gopher_quality, lambda text: " ".join(text.split() * 900)),
    "short words": (gopher_quality, lambda text: text + " of" * 900),
    "long words": (gopher_quality, lambda text: text.replace("\n", "") + "x" * 2000),
    "hash signs": (gopher_quality, lambda text: text.replace(".", " ##")),
    "ellipses": (gopher_quality, lambda text: text.replace(" ", "... ", 20)),
    "bullet lines": (gopher_quality, lambda text: "\n".join("• " + line for line in text.splitlines() if line)),
    "ellipsis lines": (gopher_quality, lambda text: text.replace(".", "…", 9)),
    "few alphabetic words": (gopher_quality, lambda text: text + " 12345" * 40),
    "few stop words": (gopher_quality, lambda text: text.replace("the ", "teh ").replace("of ", "fo ")
                       .replace("and ", "adn ").replace("with ", "wiht ")),
    "duplicate paragraphs": (gopher_repetition, lambda text: "a b\n\n" * 9 + text),
    "characters in duplicate paragraphs": (gopher_repetition, lambda text: (text + "\n\n") + ("x" * 250 + "\n\n") * 3),
    "duplicate lines": (gopher_repetition, lambda text: text + "\nit" * 20),
    "characters in duplicate lines": (gopher_repetition, lambda text: text + ("\n" + "x" * 250) * 3),
    "top 2-gram": (gopher_repetition, lambda text: text + " marka tenlo" * 40),
    "top 3-gram": (gopher_repetition, lambda text: text + " of of marka" * 36),
    "top 4-gram": (gopher_repetition, lambda text: text + " of of of marvelouslyka" * 12),
    "duplicate 5-grams": (gopher_repetition, lambda text: " ".join(text.split() + text.split()[:40])),
}  # fmt: skip


@pytest.mark.parametrize("reason", CASES)
def test_each_rule_removes_what_it_is_for(reason: str) -> None:
    rule, spoil = CASES[reason]
    assert rule(spoil(prose())) == reason


def messy_texts(count: int) -> list[str]:
    """Return prose and the standard library's source, spoiled at random in every way that a rule checks."""
    import sysconfig

    generator = random.Random(1)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = []
    for i in range(count):
        text = prose(generator.randrange(20, 200), i)
        if i % 3 == 0:
            source = generator.choice(sources).read_text(errors="ignore")
            start = generator.randrange(max(1, len(source) - 3000))
            text = source[start : start + 3000]
        for _ in range(generator.randrange(4)):
            words = text.split(" ")
            at = generator.randrange(len(words))
            spoil = generator.choice(
                ["#", "... ", "…\n", "\n- ", "\n• ", "123 ", "the of ", "\n\n" + text[:200], text[:90]]
            )
            text = " ".join([*words[:at], spoil * generator.randrange(1, 12), *words[at:]])
        if text.strip():
            texts.append(text)
    return texts


def test_datatrove_removes_the_same_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give it our words, because how to split text into words is our choice."""
    passed = 0
    for module, kind, ours in (
        (gopher_quality_filter, "GopherQualityFilter", gopher_quality),
        (gopher_repetition_filter, "GopherRepetitionFilter", gopher_repetition),
    ):
        monkeypatch.setattr(module, "split_into_words", lambda text, language: text.split())
        peer = getattr(module, kind)()
        for text in messy_texts(300):
            theirs = peer.filter(Document(text=text, id="0"))
            assert (ours(text) is None) == (theirs is True), (ours(text), theirs, text)
            passed += theirs is True
    assert 100 < passed < 500  # both answers occur


def reasons(step: str, texts: list[str]) -> list[str | None]:
    return make_filter(parse([step])[0])(texts)


def test_lengths_are_bounds_that_belong_to_what_stays() -> None:
    texts = ["a b", "a b c", "a b c d e", "a b c d e f"]
    assert reasons("length:3-5", texts) == ["few words", None, None, "many words"]
    assert reasons("length:3-", texts) == ["few words", None, None, None]


def test_symbols_are_counted_per_word() -> None:
    assert reasons("symbols:0.5", ["# a b c", "## #b c", "a... b", "a... b... c..."]) == [
        None, "hash signs", None, "ellipses"]  # fmt: skip


def test_languages_are_told_apart() -> None:
    pytest.importorskip("py3langid")
    texts = [
        "The committee met in the morning and decided that nothing more could be done about it.",
        "Der Ausschuss trat am Morgen zusammen und beschloss, dass nichts mehr zu machen sei.",
        "Le comité s'est réuni dans la matinée et a décidé qu'il n'y avait plus rien à faire.",
    ]
    assert reasons("language:en", texts) == [None, "language de", "language fr"]
    assert reasons("language:de@0.5", texts)[1] is None


def write_fasttext(path: Path, words: dict[str, list[float]], labels: dict[str, list[float]]) -> Path:
    """Write a supervised model in fastText's own format, with these vectors: softmax of label . mean(words)."""
    dim = len(next(iter(words.values())))
    content = struct.pack("<ii", 793712314, 12)
    content += struct.pack("<12id", dim, 5, 5, 1, 5, 1, 3, 3, 0, 0, 0, 100, 1e-4)
    content += struct.pack("<iiiqq", len(words) + len(labels), len(words), len(labels), 100, -1)
    for names, kind in ((words, 0), (labels, 1)):
        for name in names:
            content += name.encode() + b"\0" + struct.pack("<qb", 10, kind)
    for matrix in (words, labels):
        flat = [value for row in matrix.values() for value in row]
        content += struct.pack("<?qq", False, len(matrix), dim) + struct.pack(f"<{len(flat)}f", *flat)
    path.write_bytes(content)
    return path


def test_a_fasttext_model_scores_by_its_own_softmax(tmp_path: Path) -> None:
    pytest.importorskip("fasttext")
    words = {"</s>": [0.0, 0.0], "fine": [2.0, 0.5], "spam": [-1.0, 1.0]}
    labels = {"__label__cc": [0.0, 1.0], "__label__hq": [1.0, 0.0]}
    model = write_fasttext(tmp_path / "model.bin", words, labels)

    def probability(text: str) -> float:
        rows = [words[word] for word in [*text.split(), "</s>"]]
        mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        scores = {name: math.exp(sum(a * b for a, b in zip(mean, row, strict=True))) for name, row in labels.items()}
        return scores["__label__hq"] / sum(scores.values())

    texts = ["fine fine\nfine", "spam fine", "spam spam", "fine spam spam\n\nspam"]
    for threshold in (0.3, 0.5, 0.6):
        expected = [None if probability(text) >= threshold else "low quality" for text in texts]
        assert reasons(f"quality:{model}@{threshold}", texts) == expected
    (tmp_path / "broken.bin").write_bytes(b"no model")
    with pytest.raises(UserError, match="not a fastText model"):
        reasons(f"quality:{tmp_path / 'broken.bin'}@0.5", texts)


@pytest.mark.slow
def test_a_hugging_face_classifier_scores_as_it_does_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    config: Any = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64, id2label={0: "good", 1: "bad"}, label2id={"good": 0, "bad": 1},
        initializer_range=0.5,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=generator.randrange(3, 50))) for _ in range(40)]
    expected = []
    for text in texts:  # one at a time: no padding
        with torch.inference_mode():
            expected.append(model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0, 0].item())
    middle = sorted(expected)[20] - 1e-4  # further from any score than padding changes it
    results = reasons(f"quality:{tmp_path / 'model'}@{middle}", texts)
    assert results == [None if value >= middle else "low quality" for value in expected]
    # Without a trained head the library would draw a random one, different in each process.
    model.bert.save_pretrained(tmp_path / "headless")
    tokenizer.save_pretrained(tmp_path / "headless")
    with pytest.raises(UserError, match=r"lacks classifier weights, such as classifier\.bias"):
        reasons(f"quality:{tmp_path / 'headless'}@0.5", texts)
