"""Find task items that the training text contains, by word n-grams (13 words by default).

- An item is its question and its right answer, without few-shot examples, with and without the words that open or close
  every question of its task. It is contaminated if a training document contains `ngram` consecutive words of it.
- A shorter item is looked up whole if it has 8 words or more: fewer occur by chance.
- Hashes have 64 bits: for 1e6 n-grams in 1e12 words, one in 20 searches has a false match.

13 and 8: GPT-3 (Brown et al. 2020, arXiv:2005.14165, appendix C).
"""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..train.data.recipe import shingles
from ..train.data.recipe.pool import usable_cores
from ..train.data.recipe.shingles import gram_hashes
from ..train.data.shards import Shards
from ..train.data.storage import checksum, locked, read_checked
from ..train.data.tokenizers import ByteTokenizer
from ..train.errors import UserError
from ..train.files import write_json
from .export.hf import byte_characters
from .tasks.staging import cache_root
from .tasks.suite import Suite, SuiteTask, quiet

NGRAM = 13
SHORTEST = 8  # words of an item that is looked for whole
VERSION = 1  # bumped when the same text would give another answer
_CHUNK_BYTES = 1 << 18  # of text at a time: what fits the cache of a core
_OVERLAP_TOKENS = 4096  # between chunks: far more than an n-gram has
_TEMPLATE_ITEMS = 20  # a task needs that many items to tell a template from chance
_FILTER_BITS = 22
_SAY_SECONDS = 5.0  # between two lines of progress

Report = Callable[[str], None]
Words = npt.NDArray[np.uint64]  # (w,) a hash of each word
END = b"\xff"  # between documents: never in UTF-8
_NOT_WORD = re.compile(r"[^\x00-\x7f\w]+")
_IDEOGRAPH = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
_IS_WORD = np.zeros(256, np.bool_)
_IS_WORD[[*b"0123456789", *range(ord("A"), ord("Z") + 1), *range(ord("a"), ord("z") + 1), *range(0x80, 0xFF)]] = True
_VALUES = shingles.byte_values().copy()
_VALUES[ord("A") : ord("Z") + 1] = _VALUES[ord("a") : ord("z") + 1]  # what `normalised` leaves in ASCII capitals


def overlaps(
    shards: Shards, suite: Suite, ngram: int = NGRAM, progress: Report = lambda line: None
) -> dict[str, set[int]]:
    """Find the items that share `ngram` consecutive words with the training text; return their indices by task.

    Shorter items of 8 words or more are looked up whole. Indices are as in `SuiteTask.indices`. Results are cached for
    each task. Raises UserError without training text, or if the cache cannot be written.
    """
    if not len(shards.train):
        raise UserError(f"{shards.directory} has no training text to search for items")
    cache, files = cache_root(), {}
    for name, task in suite.items():
        # What the answer depends on: the training text, the items and the question.
        key = checksum([VERSION, shards.manifest, task.subset["sha256"], task.indices, ngram])[:32]
        files[name] = cache / "contamination" / f"{key}.json"
    results = _read(files)
    if results.keys() != files.keys():
        lock = f"contamination-{checksum([shards.manifest, ngram])[:16]}"
        with locked(cache, lock, lambda stage, *_: progress(f"contamination: {stage}")):
            results = _read(files)  # another process may have been at it
            missing = {name: task for name, task in suite.items() if name not in results}
            new_results = _search(shards, missing, ngram, progress)
            for name, items in new_results.items():
                content = {"task": name, "ngram": ngram, "contaminated": sorted(items)}
                try:
                    write_json(files[name], content | {"checksum": checksum(content)})
                except OSError as error:
                    raise UserError(
                        f"{files[name]} cannot be written ({error.strerror or error}); free some space, or set "
                        "ISOFLOP_CACHE to another folder"
                    ) from error
            results |= new_results
    return {name: results[name] for name in suite}


def _read(files: dict[str, Path]) -> dict[str, set[int]]:
    results = {}
    for name, path in files.items():
        try:
            results[name] = {int(index) for index in read_checked(path)["contaminated"]}
        except (UserError, KeyError, TypeError, ValueError):
            continue
    return results


# --- words -----------------------------------------------------------------------------------------------------------


def normalised(text: str | bytes) -> bytes:
    """Prepare text for `words_and_ends`: NFKC, lower case, blanks for non-ASCII punctuation and around ideographs.

    Documents of ASCII bytes, which `words_and_ends` handles, and `END` between documents are unchanged.
    """
    if isinstance(text, bytes):
        if text.isascii():
            return text
        parts = text.split(END)
        return END.join(part if part.isascii() else normalised(part.decode(errors="replace")) for part in parts)
    text = unicodedata.normalize("NFKC", text).lower()
    return _IDEOGRAPH.sub(r" \1 ", _NOT_WORD.sub(" ", text)).encode(errors="replace")


def words_and_ends(text: bytes) -> tuple[Words, npt.NDArray[np.intp]]:
    """Return hashes of the w words of normalised text, (w,), and how many documents end before each word, (w,)."""
    raw = np.frombuffer(text, np.uint8)  # (b,)
    edges = np.flatnonzero(np.diff(_IS_WORD.take(raw), prepend=False, append=False))  # starts and ends take turns
    starts, ends = edges[::2], edges[1::2]
    return shingles.word_hashes(_VALUES.take(raw), starts, ends), np.searchsorted(np.flatnonzero(raw == END[0]), starts)


# --- items -----------------------------------------------------------------------------------------------------------


@dataclass
class _Index:
    """The n-grams of all items.

    `grams` (g,): hashes, ascending; `lengths`: in words; `owners`: (task, index) of the items that have each n-gram;
    `near` (2**_FILTER_BITS,): whether any hash starts with the bits of the position; `found` (g,): whether the training
    text has the n-gram.
    """

    grams: Words
    lengths: list[int]
    owners: list[list[tuple[str, int]]]
    near: npt.NDArray[np.bool_]
    found: npt.NDArray[np.bool_]


def item_words(task: SuiteTask) -> list[list[Words]]:
    """Return two word sequences per item to search for: without and with the words that all questions share."""
    pairs = [item_texts(task.task, doc) for doc in task.task.frozen_docs]
    questions = [words_and_ends(normalised(question))[0] for question, _ in pairs]
    answers = [words_and_ends(normalised(answer))[0] for _, answer in pairs]
    head = _shared(questions) if len(pairs) >= _TEMPLATE_ITEMS else 0
    tail = _shared([words[head:][::-1] for words in questions]) if len(pairs) >= _TEMPLATE_ITEMS else 0
    result = []
    for question, answer in zip(questions, answers, strict=True):
        bare = question[head : len(question) - tail]
        result.append([np.concatenate([bare, answer]), np.concatenate([question, answer])])
    return result


def item_texts(task: Any, doc: Any) -> tuple[str, str]:
    """Return an item's question, without few-shot examples, and its first right answer; either may be empty.

    If the choices share one ending (WinoGrande), the right choice is the question and the ending the answer.
    """
    text, target = task.doc_to_text(doc), task.doc_to_target(doc)
    if task.OUTPUT_TYPE == "multiple_choice" and hasattr(task, "doc_to_choice"):
        choices = task.doc_to_choice(doc)
        if isinstance(text, int):
            return (str(choices[text]) if 0 <= text < len(choices) else ""), str(target)
        target = target[0] if isinstance(target, list) and target else target
        if isinstance(target, int):
            target = choices[target] if 0 <= target < len(choices) else ""
    elif isinstance(target, list):
        target = target[0] if target else ""
    return str(text), str(target)


def _shared(rows: Sequence[Words]) -> int:
    shortest = min(len(row) for row in rows)
    return next((i for i in range(shortest) if any(row[i] != rows[0][i] for row in rows)), shortest)


def _index(tasks: dict[str, SuiteTask], ngram: int) -> _Index:
    owners: dict[int, set[tuple[str, int]]] = {}
    lengths = set()
    for name, task in tasks.items():
        for place, (bare, asked) in zip(task.indices, item_words(task), strict=True):
            for words in (bare, asked):
                length = ngram if len(words) >= ngram else len(words)
                if length < ngram and length < SHORTEST:
                    continue
                lengths.add(length)
                for gram in gram_hashes(words, length).tolist():
                    owners.setdefault(gram, set()).add((name, place))
    grams, near = np.array(sorted(owners), np.uint64), np.zeros(1 << _FILTER_BITS, np.bool_)
    near[grams >> np.uint64(64 - _FILTER_BITS)] = True
    owners_of_each = [sorted(owners[gram]) for gram in sorted(owners)]
    return _Index(grams, sorted(lengths), owners_of_each, near, np.zeros(len(grams), np.bool_))


# --- training text ---------------------------------------------------------------------------------------------------


def _search(shards: Shards, tasks: dict[str, SuiteTask], ngram: int, progress: Report) -> dict[str, set[int]]:
    with quiet():  # it renders lm-eval's templates
        index = _index(tasks, ngram)
    result: dict[str, set[int]] = {name: set() for name in tasks}
    if len(index.grams):
        _stream(shards, index, progress)
    for gram in np.flatnonzero(index.found):
        for name, place in index.owners[gram]:
            result[name].add(place)
    return result


def _stream(shards: Shards, index: _Index, progress: Report) -> None:
    total, text_bytes = len(shards.train), int(shards.manifest["train"]["bytes"])
    step = max(int(_CHUNK_BYTES * total / max(text_bytes, 1)), _OVERLAP_TOKENS)
    to_text = _text_of(shards)
    start_time = last_report = time.monotonic()

    def look_up(start: int) -> float:
        end = min(start + step + _OVERLAP_TOKENS, total)
        _look_up(index, to_text(np.asarray(shards.train[start:end])), start > 0, end < total)
        return min(start + step, total) / total

    with ThreadPoolExecutor(usable_cores()) as pool:
        try:
            for share in pool.map(look_up, range(0, total, step)):
                now = time.monotonic()
                if now - last_report >= _SAY_SECONDS:
                    last_report, done = now, share * text_bytes / 1e6
                    rate = done / (now - start_time)
                    minutes_left = (1 - share) / share * (now - start_time) / 60
                    text_done = f"{done:,.0f} of {text_bytes / 1e6:,.0f} MB of text, {rate:,.0f} MB/s"
                    progress(f"contamination: {text_done}, {minutes_left:.0f} min left")
        except BaseException:  # an interrupt too must not wait for the rest of the text
            pool.shutdown(cancel_futures=True)
            raise


def _look_up(index: _Index, text: bytes, cut_before: bool, cut_after: bool) -> None:
    """Mark in `index.found` each n-gram within a document of `text`. A cut first or last word of `text` is skipped."""
    text = normalised(text)
    words, documents = words_and_ends(text)
    inside = slice(1 if cut_before else 0, len(words) - 1 if cut_after else len(words))
    words, documents = words[inside], documents[inside]
    for length in index.lengths:
        if len(words) >= length:
            within = documents[length - 1 :] == documents[: len(documents) - length + 1]
            grams = gram_hashes(words, length)[within]
            grams = grams[index.near[grams >> np.uint64(64 - _FILTER_BITS)]]
            places = np.minimum(np.searchsorted(index.grams, grams), len(index.grams) - 1)
            index.found[places[index.grams[places] == grams]] = True


def _text_of(shards: Shards) -> Callable[[npt.NDArray[Any]], bytes]:
    """Return a function that decodes token ids to UTF-8, with `END` between documents."""
    tokenizer = shards.tokenizer
    if isinstance(tokenizer, ByteTokenizer):  # its end of a document is the byte 0xFF
        return lambda ids: ids.astype(np.uint8).tobytes()
    table = _byte_table(shards.directory / "tokenizer.json", tokenizer.vocab_size)
    if table is not None:
        table[tokenizer.end_of_document] = END
        pieces = np.array(table, object)
        return lambda ids: b"".join(pieces[ids].tolist())

    def decode(ids: npt.NDArray[Any]) -> bytes:
        ends = np.flatnonzero(ids == tokenizer.end_of_document)
        return END.join(tokenizer.decode(part).encode() for part in np.split(ids, ends))

    return decode


def _byte_table(path: Path, vocab_size: int) -> list[bytes] | None:
    """Return the bytes of each token id of a tokenizer.json; None if it is not a byte-level BPE."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if (content.get("decoder") or {}).get("type") != "ByteLevel" or content["model"].get("type") != "BPE":
        return None
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    table = [b""] * vocab_size
    for token, number in content["model"]["vocab"].items():
        if any(character not in byte_of for character in token):
            return None
        table[number] = bytes(byte_of[character] for character in token)
    for added in content["added_tokens"]:
        table[added["id"]] = added["content"].encode()
    return table
