"""Models that judge a document: which language it is in, and how good it is.

Special here:
- Languages are told by py3langid, whose model comes in its wheel: no download, and the same answer everywhere.
- A quality model is a file of fastText (.bin, .ftz), or a folder of Hugging Face's sequence classification. Its
  label for good text is the one that is named so (`GOOD`), else the last. A model of one output (FineWeb-Edu's scores
  0 to 5) is no probability: it is refused.
- Only the beginning of a long document is judged: `JUDGED_CHARACTERS`.

Lui and Baldwin 2012 (langid.py); Joulin et al. 2017 (arXiv:1607.01759); Li et al. 2024 (DCLM, arXiv:2406.11794).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...errors import UserError
from .recipe import Step

Filter = Callable[[Sequence[str]], list[str | None]]

GOOD = ("hq", "good", "high", "positive", "pos", "1", "yes", "keep", "label_1", "quality", "edu", "wiki")
JUDGED_CHARACTERS = 20_000
_BATCH, _TOKENS = 16, 512  # of a Hugging Face classifier


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def languages() -> list[str]:
    """Codes of the languages that are told apart."""
    return sorted(map(str, _identifier().labels))


@cache
def language_model_digest() -> str:
    """SHA-256 of the model that tells them: another release of the library may bring another."""
    from py3langid.langid import MODEL_FILE

    return hashlib.sha256((files("py3langid") / MODEL_FILE).read_bytes()).hexdigest()


def language(step: Step) -> Filter:
    """Documents that are not in a language with the probability that the step names go."""
    identifier = _identifier()

    def judge(text: str) -> str | None:
        found, probability = identifier.classify(text[:JUDGED_CHARACTERS])
        if found != step.name:
            return f"language {found}"
        return None if probability >= step.number else f"hardly {step.name}"

    return lambda texts: [judge(text) for text in texts]


def quality(step: Step) -> Filter:
    """Documents whose probability of being good is below the step's threshold go.

    Raises:
        UserError: a library is missing, or the file is no model.
    """
    score = _fasttext(step) if Path(step.name).is_file() else _hugging_face(step)

    def judge(texts: Sequence[str]) -> list[str | None]:
        scores = score([text[:JUDGED_CHARACTERS] for text in texts])
        return [None if value >= step.number else "low quality" for value in scores]

    return judge


def good_label(labels: Sequence[str]) -> int:
    """Index of the label that means good text: one that is named so, else the last."""
    plain = [label.removeprefix("__label__").lower() for label in labels]
    return next((i for i, label in enumerate(plain) if label in GOOD), len(labels) - 1)


def _fasttext(step: Step) -> Callable[[list[str]], list[float]]:
    import fasttext

    try:
        model = fasttext.load_model(step.name)
        said, _ = _predicted(model, "a")
    except (ValueError, RuntimeError, MemoryError) as error:
        raise UserError(f"data.recipe contains {step.word!r}; it is no fastText model ({error})") from None
    if len(said) < 2:
        raise UserError(f"data.recipe contains {step.word!r}; its model has {len(said)} labels, it needs two or more")
    wanted = sorted(said)[good_label(sorted(said))]

    def score(texts: list[str]) -> list[float]:
        found = []
        for text in texts:
            labels, probabilities = _predicted(model, " ".join(text.split()))  # a newline would end the document
            found.append(float(dict(zip(labels, probabilities, strict=True)).get(wanted, 0.0)))
        return found

    return score


def _predicted(model: Any, text: str) -> tuple[list[str], list[float]]:
    # Not model.predict: fasttext-predict's and the training library's differ, what they call does not.
    pairs = model.f.predict(text + "\n", -1, -1.0, "strict")
    return [label for _, label in pairs], [probability for probability, _ in pairs]


def _hugging_face(step: Step) -> Callable[[list[str]], list[float]]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(step.name)
        model, loaded = AutoModelForSequenceClassification.from_pretrained(step.name, output_loading_info=True)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"data.recipe contains {step.word!r}; it cannot be loaded ({reason})") from None
    if loaded["missing_keys"]:  # which transformers fills with random numbers, others in every process
        raise UserError(
            f"data.recipe contains {step.word!r}; the folder lacks weights of a classifier, such as "
            f"{min(loaded['missing_keys'])}: it must hold one that was trained"
        )
    model.eval()
    labels = [model.config.id2label[i] for i in range(model.config.num_labels)]
    if len(labels) < 2:
        raise UserError(f"data.recipe contains {step.word!r}; its model has one output, it needs two labels or more")
    wanted = good_label(labels)
    longest = min(_TOKENS, getattr(model.config, "max_position_embeddings", _TOKENS))
    torch.set_num_threads(1)  # one process a core

    def score(texts: list[str]) -> list[float]:
        found: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(texts), _BATCH):
                batch = tokenizer(
                    texts[start : start + _BATCH], truncation=True, max_length=longest, padding=True,
                    return_tensors="pt",
                )  # fmt: skip
                found += model(**batch).logits.float().softmax(-1)[:, wanted].tolist()
        return found

    return score
