"""Duplicates equal those of exact sets, in every order of documents; text near held-out text never trains."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from isoflop.train.config import DataConfig
from isoflop.train.data.corpora import open_corpus
from isoflop.train.data.mixing import content_hash
from isoflop.train.data.recipe import dedup, recipe, shingles
from isoflop.train.data.recipe.refine import Refinery

WORDS = [f"w{i}" for i in range(3000)]


def sets_of(text: str, n: int) -> set[tuple[str, ...]]:
    """Return the n-grams of lower-case words in plain Python; a shorter text is one n-gram."""
    words = re.findall(r"[a-z0-9_\u0080-\U0010ffff]+", text.lower())
    if not words:
        return set()
    return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}


def texts_with_duplicates(count: int = 300, seed: int = 0) -> list[str]:
    """Return random texts with edited copies, copies of copies, and short, empty and awkward texts."""
    generator = random.Random(seed)
    texts = ["", "!!! ...", "One", "one!", "A b c", "naïve Straße 東京 x", "a_b a-b"]
    while len(texts) < count:
        if len(texts) > 20 and generator.random() < 0.5:
            words = generator.choice(texts[7:]).split()
            for _ in range(generator.randrange(4)):
                words[generator.randrange(len(words))] = generator.choice(WORDS)
            texts.append((" " * generator.randrange(1, 3)).join(words))
        else:
            texts.append(" ".join(generator.choices(WORDS, k=generator.randrange(8, 80))))
    return texts


def jaccard_of(texts: list[str], n: int = 5) -> np.ndarray:
    sets = [sets_of(text, n) for text in texts]
    similarity = np.zeros((len(texts), len(texts)))
    for i, j in itertools.combinations(range(len(texts)), 2):
        union = len(sets[i] | sets[j])
        similarity[i, j] = similarity[j, i] = len(sets[i] & sets[j]) / union if union else 0.0
    return similarity


@pytest.mark.parametrize("n", [1, 5, 13])
def test_hashed_ngrams_are_the_ngrams(n: int) -> None:
    texts = texts_with_duplicates()
    hashes, offsets = shingles.ngrams(texts, n)
    for i, text in enumerate(texts):
        text_hashes = hashes[offsets[i] : offsets[i + 1]].tolist()
        assert len(set(text_hashes)) == len(sets_of(text, n))
    # Over all texts there are as many hashes as n-grams.
    assert len(np.unique(hashes)) == len(set().union(*(sets_of(text, n) for text in texts)))


def test_ngrams_do_not_depend_on_the_texts_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_with_duplicates()
    all_hashes, offsets = shingles.ngrams(texts, 5)
    for batch in (10, 700):  # bytes: less than most texts, and less than some
        monkeypatch.setattr(shingles, "_BATCH", batch)
        assert (shingles.ngrams(texts, 5)[0] == all_hashes).all()
    for i in (0, 5, 6, 99):
        assert (shingles.ngrams([texts[i]], 5)[0] == all_hashes[offsets[i] : offsets[i + 1]]).all()


def test_jaccard_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "_PAIR_HASHES", 1000)  # several rounds
    texts = texts_with_duplicates(120)
    sets, offsets = shingles.distinct(*shingles.ngrams(texts, 5))
    a, b = np.array(list(itertools.combinations(range(len(texts)), 2))).T
    assert np.allclose(dedup.jaccard(a, b, sets, offsets), jaccard_of(texts)[a, b], atol=1e-12)


def test_signatures_estimate_jaccard_without_bias() -> None:
    texts = texts_with_duplicates()
    signed, exact = shingles.signatures(*shingles.ngrams(texts, 5)), jaccard_of(texts)
    a, b = np.nonzero(np.triu((exact > 0.2) & (exact < 0.95)))
    similarity = exact[a, b]
    # In standard errors of 128 independent slots; a text has pairs with some three copies.
    errors = ((signed[a] == signed[b]).mean(1) - similarity) / np.sqrt(similarity * (1 - similarity) / 128)
    assert len(errors) > 100
    assert errors.std() < 1.2
    assert abs(errors.mean()) < 4 / np.sqrt(len(errors) / 3)


@pytest.mark.parametrize("threshold", [recipe.LEAST_NEAR, 0.5, 0.8, 0.95])
def test_bands_find_what_they_promise(threshold: float) -> None:
    bands, rows = shingles.bands_and_rows(threshold)
    assert bands * rows <= shingles.SLOTS
    assert 1 - (1 - threshold**rows) ** bands >= 0.98


def deduplicated(texts: list[str], held_out: np.ndarray, threshold: float) -> tuple[dedup.Duplicates, np.ndarray]:
    hashes, offsets = shingles.ngrams(texts, 5)
    bands, rows = shingles.bands_and_rows(threshold)
    signed = shingles.band_hashes(shingles.signatures(hashes, offsets), bands, rows)
    sets, starts = shingles.distinct(hashes, offsets)
    digests = np.array([hash_of(text) for text in texts], np.uint64)
    return dedup.near(lambda i: signed[:, i], bands, sets, starts, digests, held_out, threshold), digests


def hash_of(text: str) -> int:
    return content_hash(text.encode())


def clusters(near: np.ndarray) -> np.ndarray:
    """Return the connected component of each text, by plain search."""
    label = np.full(len(near), -1)
    for start in range(len(near)):
        stack = [start] if label[start] < 0 else []
        while stack:
            i = stack.pop()
            if label[i] < 0:
                label[i] = start
                stack += np.flatnonzero(near[i]).tolist()
    return label


@pytest.mark.parametrize("threshold", [0.6, 0.8])
def test_near_duplicates_are_the_clusters_of_all_pairs(threshold: float, tmp_path: Path) -> None:
    """Allow LSH to miss pairs, at most 2 % at the threshold; only duplicates are removed."""
    missed = total = 0
    for seed in range(2):
        texts = [text for text in texts_with_duplicates(200, seed) if text]
        path = tmp_path / f"{seed}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        corpus = open_corpus(DataConfig(corpus="text", path=str(path)))
        refinery = Refinery(corpus, f"{seed}", [f"near:{threshold}"], 0.1, tmp_path).run()
        held_out = refinery.held
        duplicates, digests = deduplicated(texts, held_out, threshold)
        assert ((refinery.removed >= 0) == duplicates.removed).all()
        near = jaccard_of(texts) >= threshold
        label = clusters(near)
        rank = dedup.ranks(digests, held_out)
        first = {name: int(min(np.flatnonzero(label == name), key=lambda i: rank[i])) for name in set(label.tolist())}
        expected = np.array([first[name] != i for i, name in enumerate(label.tolist())]) & ~held_out
        assert not (duplicates.removed & ~expected).any()
        missed, total = missed + int((expected & ~duplicates.removed).sum()), total + int(expected.sum())
        same = duplicates.removed & (np.array([first[name] for name in label.tolist()]) == duplicates.like)
        assert same.sum() >= 0.98 * duplicates.removed.sum()
        assert (duplicates.leaked == (duplicates.removed & held_out[duplicates.like])).all()
        assert duplicates.leaked.any()
        # Training texts are not near held-out ones, except for the missed pairs.
        assert near[~held_out & ~duplicates.removed][:, held_out].sum() <= 0.02 * near[~held_out][:, held_out].sum()
    assert missed <= 0.02 * total


def test_what_stays_owes_nothing_to_the_order() -> None:
    texts = texts_with_duplicates()
    held_out = np.array([hash_of(text) % 10 == 0 for text in texts])
    order = np.random.default_rng(0).permutation(len(texts))
    shuffled = [texts[i] for i in order]
    in_order, digests = deduplicated(texts, held_out, 0.7)
    out_of_order, _ = deduplicated(shuffled, held_out[order], 0.7)
    assert remaining(texts, in_order) == remaining(shuffled, out_of_order)
    first = dedup.bloom(*shingles.ngrams(texts, 13), digests, held_out, 0.5)
    second = dedup.bloom(*shingles.ngrams(shuffled, 13), digests[order], held_out[order], 0.5)
    assert remaining(texts, first) == remaining(shuffled, second)


def remaining(texts: list[str], duplicates: dedup.Duplicates) -> list[str]:
    assert duplicates.removed.any()
    return sorted(text for text, is_removed in zip(texts, duplicates.removed, strict=True) if not is_removed)


def test_exact_copies_go_and_held_out_ones_stay() -> None:
    digests = np.array([5, 3, 5, 9, 3, 5], np.uint64)
    duplicates = dedup.exact(digests, np.array([False, True, False, False, True, False]))
    assert duplicates.removed.tolist() == [False, False, True, False, False, True]
    assert duplicates.like.tolist() == [0, 1, 0, 3, 4, 0]
    assert not duplicates.leaked.any()


def test_the_bloom_filter_removes_what_a_set_would() -> None:
    texts = texts_with_duplicates(600)
    digests = np.array([hash_of(text) for text in texts], np.uint64)
    held_out = np.random.default_rng(0).random(len(texts)) < 0.1
    for share in (0.3, 0.8):
        duplicates = dedup.bloom(*shingles.ngrams(texts, 3), digests, held_out, share)
        seen: tuple[set[tuple[str, ...]], set[tuple[str, ...]]] = (set(), set())
        removed, leaked = np.zeros(len(texts), bool), np.zeros(len(texts), bool)
        for i in np.argsort(dedup.ranks(digests, held_out), kind="stable").tolist():
            words = texts[i].split()
            ngrams = [tuple(words[k : k + 3]) for k in range(max(1, len(words) - 2))]
            if i < 7:
                ngrams = sorted(sets_of(texts[i], 3))  # the awkward ones, without repeats
            if not ngrams:
                continue
            if not held_out[i]:
                leaked[i] = sum(ngram in seen[1] for ngram in ngrams) >= share * len(ngrams)
                removed[i] = leaked[i] or sum(ngram in seen[0] for ngram in ngrams) >= share * len(ngrams)
            if not removed[i]:
                seen[int(held_out[i])].update(ngrams)
        # The filter may mistake one n-gram in a thousand for an old one, which rarely decides about a document.
        assert (duplicates.removed != removed).sum() <= 2
        assert (duplicates.leaked != leaked).sum() <= 2
        assert removed.sum() > 50
        assert leaked.any()
