"""Which task items were in the training text: overlap of word n-grams, 13 words by default.

Special here:
- An item is its question (or context) and its right answer, without few-shot examples; a text to be scored whole is
  itself. It is contaminated when a run of `ngram` words of it stands somewhere in a training document. Compared are
  words: runs of letters and digits in lower case (NFKC); ideographs and kana count one by one.
- Words that open or close every question of a task ("Question:", "Answer:") are its template's. An item is looked for
  with them, as it was asked, and without them.
- An item shorter than `ngram` words is looked for whole if it has 8 words or more, and never found otherwise: shorter
  ones occur by chance.
- The items' n-grams are few and lie sorted in memory; the training text is long and streams past in chunks, in a
  thread a core: NumPy lets go of the interpreter in what costs time.
- Equal hashes of 64 bits count as equal n-grams: with 1e6 n-grams of items and 1e12 words of training text, one false
  match is expected in 20 such comparisons.
- Why not a library: lm-eval's decontamination wants the n-grams of the training text in sorted files, made by scripts
  outside its package; datatrove's asks for lighteval and hashes n-gram by n-gram in Python.

13 words and the bound of 8: GPT-3 (Brown et al. 2020, arXiv:2005.14165, appendix C), which chooses one length a task
where this is by item.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...train.data.shards import Shards
from ...train.data.storage import checksum, locked, read_checked
from ...train.data.tokenizers import ByteTokenizer
from ...train.errors import UserError
from ...train.files import write_json
from ..tasks.suite import Suite, SuiteTask, quiet
from .ngrams import END, Words, gram_hashes, normalised, word_hashes, words_and_ends

NGRAM = 13
SHORTEST = 8  # words of an item that is looked for whole
VERSION = 1  # bumped when the same text would give another answer
_CHUNK_BYTES = 1 << 18  # of text at a time: what fits the cache of a core
_OVERLAP_TOKENS = 4096  # between chunks: far more than an n-gram has
_TEMPLATE_ITEMS = 20  # a task needs that many items to tell a template from chance
_FILTER_BITS = 22
_SAY_SECONDS = 5.0

Report = Callable[[str], None]


def overlaps(
    shards: Shards, suite: Suite, ngram: int = NGRAM, cache: Path | None = None, progress: Report | None = None
) -> dict[str, set[int]]:
    """The contaminated items of each task: their places in the split, as in `SuiteTask.indices`.

    Args:
        shards: the corpus of the run; only its training part is read.
        suite: loaded tasks.
        ngram: words that must follow each other.
        cache: results are kept in `<cache>/contamination`, one file a task, and found there again.
        progress: called with a line of text every few seconds.

    Raises:
        UserError: `ngram` out of range, no training text, or a cache that cannot be written.
    """
    if ngram < 1:
        raise UserError(f"ngram is {ngram}; it must be 1 word or more")
    if not len(shards.train):
        raise UserError(f"{shards.directory} has no training text; contamination cannot be told from it")
    if cache is None:
        return _search(shards, suite.tasks, ngram, progress)
    files = {name: cache / "contamination" / f"{_key(shards, task, ngram)}.json" for name, task in suite.tasks.items()}
    known = _read(files)
    if known.keys() != files.keys():
        waiting = None if progress is None else lambda stage, *_: progress(f"contamination: {stage}")
        with locked(cache, f"contamination-{checksum([shards.manifest, ngram])[:16]}", waiting):
            known = _read(files)  # another process may have been at it
            missing = {name: task for name, task in suite.tasks.items() if name not in known}
            found = _search(shards, missing, ngram, progress)
            for name, items in found.items():
                _write(files[name], {"task": name, "ngram": ngram, "contaminated": sorted(items)})
            known |= found
    return {name: known[name] for name in suite.tasks}


def _key(shards: Shards, task: SuiteTask, ngram: int) -> str:
    """Names the training text, the items and the question: what the answer depends on."""
    return checksum([VERSION, shards.manifest, task.subset["sha256"], task.indices, ngram])[:32]


def _read(files: dict[str, Path]) -> dict[str, set[int]]:
    """What the cache knows. A file that is missing or damaged is as good as none."""
    known = {}
    for name, path in files.items():
        try:
            known[name] = {int(index) for index in read_checked(path)["contaminated"]}
        except (UserError, KeyError, TypeError, ValueError):
            continue
    return known


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        write_json(path, content | {"checksum": checksum(content)})
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}); free space or choose a cache"
        ) from error


# Items


@dataclass
class _Index:
    """The n-grams of all items.

    Attributes:
        grams: (g,) hashes, ascending.
        lengths: of those n-grams, in words.
        owners: for each n-gram (task, place) of the items that have it.
        near: (2**_FILTER_BITS,) whether an n-gram starts with these bits: most of the text ends here.
        found: (g,) which were seen.
    """

    grams: Words
    lengths: list[int]
    owners: list[list[tuple[str, int]]]
    near: npt.NDArray[np.bool_] = field(init=False)
    found: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.near = np.zeros(1 << _FILTER_BITS, np.bool_)
        self.near[self.grams >> np.uint64(64 - _FILTER_BITS)] = True
        self.found = np.zeros(len(self.grams), np.bool_)

    def look_up(self, grams: Words) -> None:
        grams = grams[self.near[grams >> np.uint64(64 - _FILTER_BITS)]]
        if len(grams):
            places = np.minimum(np.searchsorted(self.grams, grams), len(self.grams) - 1)
            self.found[places[self.grams[places] == grams]] = True


def item_words(task: SuiteTask) -> list[list[Words]]:
    """For each item the word sequences that are looked for: as asked, and without the template's words."""
    pairs = [item_texts(task.task, doc) for doc in task.task.frozen_docs]
    questions = [word_hashes(normalised(question)) for question, _ in pairs]
    answers = [word_hashes(normalised(answer)) for _, answer in pairs]
    head = _shared(questions) if len(pairs) >= _TEMPLATE_ITEMS else 0
    tail = _shared([words[head:][::-1] for words in questions]) if len(pairs) >= _TEMPLATE_ITEMS else 0
    result = []
    for question, answer in zip(questions, answers, strict=True):
        bare = question[head : len(question) - tail]
        result.append([np.concatenate([bare, answer]), np.concatenate([question, answer])])
    return result


def item_texts(task: Any, doc: Any) -> tuple[str, str]:
    """The question of an item, without few-shot examples, and its right answer; either may be empty.

    Where the choices are contexts of one continuation (WinoGrande), the right context stands for the question. Of
    several right answers the first counts.
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
    """How many words all rows begin with."""
    most = min(len(row) for row in rows)
    return next((i for i in range(most) if any(row[i] != rows[0][i] for row in rows)), most)


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
    grams = np.array(sorted(owners), np.uint64)
    return _Index(grams, sorted(lengths), [sorted(owners[gram]) for gram in grams.tolist()])


# Training text


def _search(
    shards: Shards, tasks: dict[str, SuiteTask], ngram: int, progress: Report | None
) -> dict[str, set[int]]:  # fmt: skip
    with quiet():  # it renders lm-eval's templates
        index = _index(tasks, ngram)
    result: dict[str, set[int]] = {name: set() for name in tasks}
    if len(index.grams):
        _stream(shards, index, progress)
    for gram in np.flatnonzero(index.found).tolist():
        for name, place in index.owners[gram]:
            result[name].add(place)
    return result


def _stream(shards: Shards, index: _Index, progress: Report | None) -> None:
    """Looks every n-gram of the training part up, in a thread a core."""
    total, text_bytes = len(shards.train), int(shards.manifest["train"]["bytes"])
    step = max(int(_CHUNK_BYTES * total / max(text_bytes, 1)), _OVERLAP_TOKENS)
    to_text = _text_of(shards)
    starts, lock, stop = iter(range(0, total, step)), threading.Lock(), threading.Event()
    began = said = time.monotonic()

    def work() -> None:
        try:
            while not stop.is_set():
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                end = min(start + step + _OVERLAP_TOKENS, total)
                _look_up(index, to_text(np.asarray(shards.train[start:end])), start > 0, end < total)
                say(min(start + step, total) / total)
        finally:
            stop.set()  # the text is read, or this thread failed

    def say(share: float) -> None:
        nonlocal said
        now = time.monotonic()
        if progress is not None and now - said >= _SAY_SECONDS:
            said, done = now, share * text_bytes / 1e6
            rate = done / (now - began)
            left = (1 - share) / share * (now - began) / 60
            of = f"{done:,.0f} of {text_bytes / 1e6:,.0f} MB of text, {rate:,.0f} MB/s"
            progress(f"contamination: {of}, {left:.0f} min left")

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        try:
            for future in [pool.submit(work) for _ in range(workers)]:
                future.result()
        finally:
            stop.set()


def _look_up(index: _Index, text: bytes, cut_before: bool, cut_after: bool) -> None:
    """Looks up what lies within one document. A word at a cut may be half a word: the neighbouring chunk has it."""
    text = normalised(text)
    words, documents = words_and_ends(text)
    kept = slice(1 if cut_before else 0, len(words) - 1 if cut_after else len(words))
    words, documents = words[kept], documents[kept]
    for length in index.lengths:
        if len(words) >= length:
            within = documents[length - 1 :] == documents[: len(documents) - length + 1]
            index.look_up(gram_hashes(words, length)[within])


def _text_of(shards: Shards) -> Callable[[npt.NDArray[Any]], bytes]:
    """Token ids to UTF-8, with `END` at the end of a document."""
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
    """The bytes of each id of a byte-level BPE, several times faster than decoding; None for another tokenizer.

    Its vocabulary writes each byte as a visible character: itself, or one from U+0100 on (GPT-2's table).
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if (content.get("decoder") or {}).get("type") != "ByteLevel" or content["model"].get("type") != "BPE":
        return None
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}
    table = [b""] * vocab_size
    for token, number in content["model"]["vocab"].items():
        if any(character not in byte_of for character in token):
            return None
        table[number] = bytes(byte_of[character] for character in token)
    for added in content["added_tokens"]:
        table[added["id"]] = added["content"].encode()
    return table
