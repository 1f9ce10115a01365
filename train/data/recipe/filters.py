"""Rules and models that judge one document at a time.

On the same words, the Gopher rules (Rae et al. 2021, arXiv:2112.11446) remove the same documents as datatrove.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import UserError
from .recipe import Step, language_identifier

Rule = Callable[[str], str | None]
Filter = Callable[[Sequence[str]], list[str | None]]  # a reason to remove each text, or None to keep it

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
# Thresholds of Rae et al. 2021, appendix A.1.1 and table A1.
LEAST_WORDS, MOST_WORDS = 50, 100_000
MEAN_WORD = (3, 10)  # characters
MOST_SYMBOLS = 0.1  # of "#", and of ellipses, per word
MOST_BULLETS, MOST_ELLIPSES = 0.9, 0.3  # share of lines
LEAST_ALPHABETIC = 0.8  # share of words
LEAST_STOP_WORDS = 2
DUPLICATE_LINES, DUPLICATE_LINE_CHARACTERS = 0.3, 0.2  # share of lines (or paragraphs), and of their characters
TOP_NGRAMS = ((2, 0.20), (3, 0.18), (4, 0.16))  # n, and its share of characters
DUPLICATE_NGRAMS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
# Labels that mean good text to quality models; without one of them the last label does.
GOOD = ("hq", "good", "high", "positive", "pos", "1", "yes", "keep", "label_1", "quality", "edu", "wiki")
JUDGED_CHARACTERS = 20_000  # a model reads only the first of a document; chosen by hand
_BATCH, _TOKENS = 16, 512  # of a Hugging Face classifier
_PARAGRAPHS, _LINES = re.compile(r"\n{2,}"), re.compile(r"\n+")


@cache
def make_filter(step: Step) -> Filter:
    """Return a function that gives for each text the reason to remove it, or None. Loads the step's model."""
    if step.kind == "quality":
        score = _fasttext(step) if Path(step.name).is_file() else _hugging_face(step)
        return lambda texts: [
            None if value >= step.number else "low quality"
            for value in score([text[:JUDGED_CHARACTERS] for text in texts])
        ]
    rules: dict[str, Rule] = {
        "gopher": lambda text: gopher_quality(text) or gopher_repetition(text),
        "gopher_quality": gopher_quality,
        "gopher_repetition": gopher_repetition,
        "length": lambda text: _length(text, step.number, step.upper),
        "symbols": lambda text: symbols(text, len(text.split()), step.number),
        "language": lambda text: _other_language(text, step),
    }
    rule = rules[step.kind]
    return lambda texts: [rule(text) for text in texts]


def gopher_quality(text: str) -> str | None:
    words = text.split()  # by whitespace
    # Like datatrove, which public data sets were made with: words of punctuation count neither here nor in the mean.
    spelled = [word for word in words if word[0].isalnum() or not all(map(_is_mark, word))]
    if len(spelled) < LEAST_WORDS:
        return "few words"
    if len(spelled) > MOST_WORDS:
        return "many words"
    mean = sum(map(len, spelled)) / len(spelled)
    if not MEAN_WORD[0] <= mean <= MEAN_WORD[1]:
        return "short words" if mean < MEAN_WORD[0] else "long words"
    if (reason := symbols(text, len(words), MOST_SYMBOLS)) is not None:
        return reason
    lines = [line.strip() for line in text.splitlines()]
    if sum(line.startswith(("•", "-")) for line in lines) > MOST_BULLETS * len(lines):
        return "bullet lines"
    if sum(line.endswith(("...", "…")) for line in lines) > MOST_ELLIPSES * len(lines):
        return "ellipsis lines"
    if sum(any(map(str.isalpha, word)) for word in words) < LEAST_ALPHABETIC * len(words):
        return "few alphabetic words"
    if len(STOP_WORDS.intersection(words)) < LEAST_STOP_WORDS:
        return "few stop words"
    return None


def symbols(text: str, words: int, limit: float) -> str | None:
    if text.count("#") > limit * words:
        return "hash signs"
    return "ellipses" if text.count("...") + text.count("…") > limit * words else None


def gopher_repetition(text: str) -> str | None:
    for what, parts in (("paragraphs", _PARAGRAPHS.split(text.strip())), ("lines", _LINES.split(text))):
        distinct = set(parts)
        if len(parts) - len(distinct) > DUPLICATE_LINES * len(parts):
            return f"duplicate {what}"
        if sum(map(len, parts)) - sum(map(len, distinct)) > DUPLICATE_LINE_CHARACTERS * len(text):
            return f"characters in duplicate {what}"
    words = text.split()
    for n, limit in TOP_NGRAMS:
        # The most frequent n-gram; ties go to the first, as in Counter.
        top = Counter(zip(*(words[i:] for i in range(n)), strict=False)).most_common(1)
        if top and (sum(map(len, top[0][0])) + n - 1) * top[0][1] > limit * len(text):
            return f"top {n}-gram"
    for n, limit in DUPLICATE_NGRAMS:
        if _duplicate_ngrams(words, n) > limit * len(text):
            return f"duplicate {n}-grams"
    return None


def _duplicate_ngrams(words: list[str], n: int) -> int:
    """Count the characters of repeated word n-grams, without spaces and overlaps."""
    seen: set[str] = set()
    characters = i = 0
    while i <= len(words) - n:
        ngram = "".join(words[i : i + n])
        if ngram in seen:
            characters, i = characters + len(ngram), i + n
        else:
            seen.add(ngram)
            i += 1
    return characters


def _length(text: str, lower: float, upper: float) -> str | None:
    words = len(text.split())
    if words < lower:
        return "few words"
    return "many words" if words > upper else None


_is_mark = cache(lambda character: unicodedata.category(character)[0] in "PSC")


def _other_language(text: str, step: Step) -> str | None:
    code, probability = language_identifier().classify(text[:JUDGED_CHARACTERS])
    if code != step.name:
        return f"language {code}"
    return None if probability >= step.number else f"hardly {step.name}"


def good_label(labels: Sequence[str]) -> int:
    """Return the index of the label that means good text: the first in `GOOD`, else the last."""
    plain = [label.removeprefix("__label__").lower() for label in labels]
    return next((i for i, label in enumerate(plain) if label in GOOD), len(labels) - 1)


def _fasttext(step: Step) -> Callable[[list[str]], list[float]]:
    import fasttext

    try:
        model = fasttext.load_model(step.name)
        labels = sorted(_predicted(model, "a"))
    except (ValueError, RuntimeError, MemoryError) as error:
        raise UserError(f"data.recipe contains {step.word!r}; it is not a fastText model ({error})") from None
    if len(labels) < 2:
        raise UserError(
            f"data.recipe contains {step.word!r}; its model must have two labels or more and has {len(labels)}"
        )
    good = labels[good_label(labels)]
    # fastText would stop at a newline.
    return lambda texts: [float(_predicted(model, " ".join(text.split())).get(good, 0.0)) for text in texts]


def _predicted(model: Any, text: str) -> dict[str, float]:
    # Not model.predict, whose signature differs between fasttext and fasttext-predict; this inner call is the same.
    return {label: probability for probability, label in model.f.predict(text + "\n", -1, -1.0, "strict")}


def _hugging_face(step: Step) -> Callable[[list[str]], list[float]]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(step.name)
        model, loaded = AutoModelForSequenceClassification.from_pretrained(step.name, output_loading_info=True)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"data.recipe contains {step.word!r}; it cannot be loaded ({reason})") from None
    if loaded["missing_keys"]:  # transformers fills them with random numbers, different in every process
        raise UserError(
            f"data.recipe contains {step.word!r}; its model lacks classifier weights, such as "
            f"{min(loaded['missing_keys'])}: use a trained sequence classifier"
        )
    model.eval()
    labels = [model.config.id2label[i] for i in range(model.config.num_labels)]
    if len(labels) < 2:
        raise UserError(
            f"data.recipe contains {step.word!r}; its model must have two labels or more and has one output"
        )
    good = good_label(labels)
    longest = min(_TOKENS, getattr(model.config, "max_position_embeddings", _TOKENS))
    torch.set_num_threads(1)  # one process per core

    def score(texts: list[str]) -> list[float]:
        scores: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(texts), _BATCH):
                batch = tokenizer(
                    texts[start : start + _BATCH],
                    truncation=True,
                    max_length=longest,
                    padding=True,
                    return_tensors="pt",
                )
                scores += model(**batch).logits.float().softmax(-1)[:, good].tolist()
        return scores

    return score
