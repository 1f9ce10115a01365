"""Rules that look at one document at a time: each says why a document goes, or None where it stays.

Special here:
- The Gopher rules with the thresholds of the paper's text and its table A1. Words are what whitespace separates: that
  is what "words" means in the paper's rules as far as it says, and it is fast; datatrove cuts words with a language's
  tokenizer, and given the same words both remove the same documents, for the same reason (the tests compare them).
- Two details follow datatrove, because data sets that people compare with were made by it: words of nothing but
  punctuation count neither for the number of words nor for their mean length, and duplicate n-grams are counted
  without overlap.
- The rules are for prose. Source code has few stop words and many symbols: most of it goes.

Rae et al. 2021 (arXiv:2112.11446), appendix A.1.1.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from .recipe import Step

Rule = Callable[[str], str | None]
Filter = Callable[[Sequence[str]], list[str | None]]  # texts to the reasons why they go; None: it stays

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
LEAST_WORDS, MOST_WORDS = 50, 100_000
MEAN_WORD = (3, 10)  # characters
MOST_SYMBOLS = 0.1  # of "#", and of ellipses, per word
MOST_BULLETS, MOST_ELLIPSES = 0.9, 0.3  # of the lines
LEAST_ALPHABETIC = 0.8  # of the words
LEAST_STOP_WORDS = 2
DUPLICATE_LINES, DUPLICATE_LINE_CHARACTERS = 0.3, 0.2  # of the lines, or paragraphs; and of the characters
TOP_NGRAMS = ((2, 0.20), (3, 0.18), (4, 0.16))  # n, and the share of the characters
DUPLICATE_NGRAMS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
_PARAGRAPHS, _LINES = re.compile(r"\n{2,}"), re.compile(r"\n+")


def make_filter(step: Step) -> Filter:
    """The filter of a step that looks at one document at a time; models are loaded here, once a process.

    Raises:
        UserError: a library or a model that the step needs cannot be loaded.
    """
    if step.kind in ("language", "quality"):
        from . import quality

        return quality.language(step) if step.kind == "language" else quality.quality(step)
    rules: dict[str, Rule] = {
        "gopher": lambda text: gopher_quality(text) or gopher_repetition(text),
        "gopher_quality": gopher_quality,
        "gopher_repetition": gopher_repetition,
        "length": lambda text: _length(text, step.number, step.upper),
        "symbols": lambda text: symbols(text, len(text.split()), step.number),
    }
    rule = rules[step.kind]
    return lambda texts: [rule(text) for text in texts]


def gopher_quality(text: str) -> str | None:
    """The quality rules of Gopher: length, word length, symbols, bullets, ellipses, letters, stop words."""
    words = text.split()
    spelled = [word for word in words if not _is_punctuation(word)]
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


def symbols(text: str, words: int, most: float) -> str | None:
    """Whether hash signs, or ellipses, are more than `most` for each word."""
    if text.count("#") > most * words:
        return "hash signs"
    return "ellipses" if text.count("...") + text.count("…") > most * words else None


def gopher_repetition(text: str) -> str | None:
    """The repetition rules of Gopher: duplicate lines and paragraphs, top n-grams, duplicate n-grams."""
    for what, parts in (("paragraphs", _PARAGRAPHS.split(text.strip())), ("lines", _LINES.split(text))):
        again, characters = _repeated(parts)
        if again > DUPLICATE_LINES * len(parts):
            return f"duplicate {what}"
        if characters > DUPLICATE_LINE_CHARACTERS * len(text):
            return f"characters in duplicate {what}"
    words = text.split()
    for n, most in TOP_NGRAMS:
        # The most frequent; of equally frequent ones the first, as Counter has it.
        top = Counter(zip(*(words[i:] for i in range(n)), strict=False)).most_common(1)
        if top and (sum(map(len, top[0][0])) + n - 1) * top[0][1] > most * len(text):
            return f"top {n}-gram"
    for n, most in DUPLICATE_NGRAMS:
        if _duplicate_ngrams(words, n) > most * len(text):
            return f"duplicate {n}-grams"
    return None


def _repeated(parts: list[str]) -> tuple[int, int]:
    """How many parts equal an earlier one, and their characters."""
    seen: set[str] = set()
    again = characters = 0
    for part in parts:
        if part in seen:
            again, characters = again + 1, characters + len(part)
        seen.add(part)
    return again, characters


def _duplicate_ngrams(words: list[str], n: int) -> int:
    """Characters in n-grams that occurred before, none counted twice."""
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


def _length(text: str, least: float, most: float) -> str | None:
    words = len(text.split())
    if words < least:
        return "few words"
    return "many words" if words > most else None


@cache
def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] in "PSC"


def _is_punctuation(word: str) -> bool:
    return not word[0].isalnum() and all(map(_is_mark, word))
