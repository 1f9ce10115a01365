"""Data recipes: the filter steps for training documents, in order, each `name` or `name:argument`. [] is raw text.

Planning reads recipes, so this module imports nothing heavy.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...files import open_regular
from ..storage import checksum


@dataclass(frozen=True)
class Step:
    """A recipe's step with its parsed argument. `number` is 0 for a step without one."""

    kind: str
    number: float = 0.0  # a threshold, or the lower bound of `length`
    upper: float = 0.0  # of `length`
    name: str = ""  # a language, or the path of a model

    @property
    def word(self) -> str:
        """Return the step in canonical spelling."""
        if self.kind == "length":
            upper = f"{self.upper:.15g}" if self.upper < float("inf") else ""
            return f"length:{self.number:.15g}-{upper}"
        if self.name:
            return f"{self.kind}:{self.name}@{self.number:.15g}"
        return f"{self.kind}:{self.number:.15g}" if self.kind in _NUMBERED else self.kind


# Kinds of steps that judge one document at a time, and kinds that compare all documents.
SINGLE = ("gopher", "gopher_quality", "gopher_repetition", "length", "symbols", "language", "quality")
WHOLE = ("exact", "near", "bloom")
# Version of each step's rules, part of the fingerprint. Bump it when a step would keep other documents.
VERSIONS = dict.fromkeys(SINGLE + WHOLE, 1)
MODELS = (".bin", ".ftz")  # fastText's
LEAST_NEAR = 0.05  # below it a signature is too short to find most pairs; see shingles.bands_and_rows
_NUMBERED = {"symbols": 0.1, "near": 0.8, "bloom": 0.8}  # their defaults
# The module that a step imports, and the package that provides it.
_NEEDS = {"near": ("rensa", "rensa"), "bloom": ("rbloom", "rbloom"), "language": ("py3langid", "py3langid")}
_FASTTEXT, _TRANSFORMERS = ("fasttext", "fasttext-predict"), ("transformers", "transformers")
_ACCEPTED = (
    "gopher, gopher_quality, gopher_repetition, length:MIN-MAX (words), symbols[:SHARE], language:CODE[@PROBABILITY], "
    "quality:MODEL@THRESHOLD, exact, near[:JACCARD], bloom[:SHARE]"
)


def parse(recipe: Sequence[str]) -> list[Step]:
    """Parse a recipe. Raises UserError for an unknown step or a wrong argument."""
    return [_parse(str(word)) for word in recipe]


def _parse(word: str) -> Step:
    kind, _, argument = word.strip().partition(":")
    argument = argument.strip()

    def refuse_unless(good: bool, rule: str) -> None:
        if not good:
            raise UserError(f"data.recipe contains {word!r}; {rule}")

    def number(text: str, form: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise UserError(f"data.recipe contains {word!r}; {text!r} is not a number: write {form}") from None

    if kind not in VERSIONS:
        nearest = difflib.get_close_matches(kind, VERSIONS, 1, 0.5)
        hint = f" (nearest: {nearest[0]})" if nearest else ""
        raise UserError(f"data.recipe contains {word!r}, which is not a step{hint}; the steps are {_ACCEPTED}")
    if kind in _NUMBERED:
        share = number(argument, f"{kind}[:SHARE]") if argument else _NUMBERED[kind]
        refuse_unless(0 < share <= 1, f"the number of {kind} must be above 0 and at most 1")
        lowest = f"the Jaccard similarity of near must be at least {LEAST_NEAR}"
        refuse_unless(kind != "near" or share >= LEAST_NEAR, lowest)
        return Step(kind, share)
    if kind == "length":
        low, dash, high = argument.partition("-")
        form = "length takes a range of words, such as length:50-100000, length:50- or length:-100000"
        refuse_unless(bool(dash and (low or high)), form)
        least_words = number(low, "length:MIN-MAX") if low else 0.0
        most_words = number(high, "length:MIN-MAX") if high else float("inf")
        refuse_unless(0 <= least_words <= most_words, "the MIN of length must be at least 0 and at most its MAX")
        return Step(kind, least_words, most_words)
    if kind == "language":
        code, _, text = argument.partition("@")
        form = "language takes an ISO 639 code, such as language:en or language:en@0.65"
        refuse_unless(code.isalpha() and 2 <= len(code) <= 3, form)
        probability = number(text, "language:CODE@PROBABILITY") if text else 0.65
        refuse_unless(0 <= probability <= 1, "the probability of language must be at least 0 and at most 1")
        return Step(kind, probability, name=code.lower())
    if kind == "quality":
        path, _, text = argument.rpartition("@")
        refuse_unless(path != "", "quality takes quality:MODEL@THRESHOLD, such as quality:model.bin@0.5")
        threshold = number(text, "quality:MODEL@THRESHOLD")
        refuse_unless(0 <= threshold <= 1, "the threshold of quality is a probability, at least 0 and at most 1")
        return Step(kind, threshold, name=str(Path(path).expanduser().absolute()))
    refuse_unless(not argument, f"{kind} takes no argument")
    return Step(kind)


def canonical(recipe: Sequence[str]) -> list[str]:
    """Return the recipe in canonical spelling, with absolute paths."""
    return [step.word for step in parse(recipe)]


def recipe_label(recipe: Sequence[str]) -> str:
    """Return a recipe's short name: steps joined by "+", models by file name; "raw" without steps."""
    names = [
        f"quality:{Path(step.name).name}@{step.number:.15g}" if step.kind == "quality" else step.word
        for step in parse(recipe)
    ]
    return "+".join(names) or "raw"


def fingerprint(recipe: Sequence[str]) -> str | None:
    """Return 16 hex digits that identify a recipe's steps, their versions and models; None for an empty recipe."""
    steps = parse(recipe)
    if not steps:
        return None
    entries = []
    for step in steps:
        nameless = f"quality@{step.number:.15g}" if step.kind == "quality" else step.word
        entries.append([nameless, VERSIONS[step.kind], model_digest(step)])
    return checksum(entries)[:16]


def require(recipe: Sequence[str]) -> None:
    """Raise UserError for a step that cannot run here, for example without its library."""
    for step in parse(recipe):
        _require_library(step)
        if step.kind == "language" and step.name not in (languages := sorted(map(str, language_identifier().labels))):
            raise UserError(f"data.recipe contains {step.word!r}; the language must be one of {', '.join(languages)}")


def _require_library(step: Step) -> None:
    needed = _NEEDS.get(step.kind)
    if step.kind == "quality":
        needed = _TRANSFORMERS if Path(step.name).is_dir() else _FASTTEXT
    if needed is not None and find_spec(needed[0]) is None:
        raise UserError(f"data.recipe contains {step.word!r}, which needs a package: pip install {needed[1]}")


@cache
def language_identifier() -> Any:
    """Return py3langid's identifier, whose model is part of its wheel."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@cache
def _language_model_digest() -> str:
    from py3langid.langid import MODEL_FILE

    return hashlib.sha256((files("py3langid") / MODEL_FILE).read_bytes()).hexdigest()


def model_digest(step: Step) -> str | None:
    """Return the SHA-256 of a `quality` or `language` step's model, else None."""
    if step.kind == "language":
        _require_library(step)
        return _language_model_digest()
    if step.kind != "quality":
        return None
    path = Path(step.name)
    word = f"data.recipe contains {step.word!r}"
    if path.is_file() and path.suffix not in MODELS:
        raise UserError(f"{word}; a model is a fastText file ({', '.join(MODELS)}) or a Hugging Face folder")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"{word}; the folder has no config.json: it must be a Hugging Face sequence classifier")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{word}; there is no such file or folder")
    digest = hashlib.sha256()
    try:
        inside = [Path(where, name) for where, _, names in os.walk(path) for name in names]
        shown = sorted(file for file in inside if not file.name.startswith(".") and file.suffix != ".md")
        for file in [path] if path.is_file() else shown:
            digest.update(b"" if path.is_file() else str(file.relative_to(path)).encode() + b"\0")
            with open_regular(file) as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise UserError(f"{word}; {error.filename} cannot be read ({error.strerror})") from None
    return digest.hexdigest()
