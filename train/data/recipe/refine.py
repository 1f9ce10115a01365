"""Application of a recipe to a corpus: which documents to train on, and what each step removed.

Held-out documents are chosen from the raw text, so every recipe is scored on the same text; similar training text is
removed as `leaked`. The corpus is processed in parts, with files in `<cache>/recipes/<key>`, where a killed prepare
resumes.
"""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import compress, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ...files import write_atomic
from ..corpora import Corpus
from ..mixing import below_fraction, content_hash
from ..storage import Progress, checksum, silent
from . import dedup, filters, shingles
from .pool import Pool
from .recipe import WHOLE, Step, fingerprint, parse, require

_LAYOUT = 1  # bump when the part files of earlier versions would be misread
EXAMPLES = 20  # of each step's removed documents
_SHOWN = 2000  # characters of an example
PART_BYTES = 8 << 20  # of text; chosen by hand
PART_DOCUMENTS = 1 << 14
NEAR_WORDS, BLOOM_WORDS = 5, 13  # n of the n-grams
Flags = npt.NDArray[np.bool_]


def in_parts(texts: Iterable[str], size: int, documents: int | None = None) -> Iterator[list[str]]:
    """Group texts into lists. A list ends at `size` characters or, unless None, at `documents` texts."""
    part: list[str] = []
    characters = 0
    for text in texts:
        part.append(text)
        characters += len(text)
        if characters >= size or len(part) == documents:
            yield part
            part, characters = [], 0
    if part:
        yield part


def part_file(folder: Path, number: int, kind: str) -> Path:
    return folder / f"{number:06d}.{kind}"


def write_part(folder: Path, number: int, texts: list[str]) -> int:
    import zstandard

    encoded = [text.encode() for text in texts]
    whole = zstandard.ZstdCompressor(level=1).compress(b"".join(encoded))
    write_atomic(part_file(folder, number, "zst"), [whole], flush=False)
    digests = np.fromiter(map(content_hash, encoded), np.uint64, len(encoded))
    save_arrays(part_file(folder, number, "npz"), digests=digests, sizes=np.fromiter(map(len, encoded), np.int64))
    return number


def read_texts(folder: Path, number: int, asked: Flags | None = None) -> list[str]:
    import zstandard

    whole = zstandard.ZstdDecompressor().decompress(part_file(folder, number, "zst").read_bytes())
    ends = np.cumsum(load_arrays(part_file(folder, number, "npz"))["sizes"]).tolist()
    spans = pairwise([0, *ends])
    return [whole[start:end].decode() for start, end in (spans if asked is None else compress(spans, asked))]


def filter_part(folder: Path, number: int, kind: str, asked: Flags, steps: list[Step]) -> int:
    """Run `steps` on the `asked` documents of part `number` of the corpus; return `number`.

    Writes to `<number>.<kind>`: `step` (documents,), the index of the step that removes each document or -1, and
    `reason`, an index into the JSON list `reasons`.
    """
    texts = read_texts(folder, number)
    step, reason = np.full(len(texts), -1, np.int16), np.zeros(len(texts), np.int16)
    reasons: dict[str, int] = {"": 0}
    for k, filter_step in enumerate(steps):
        rows = np.flatnonzero(asked & (step < 0)).tolist()
        for i, cause in zip(rows, filters.make_filter(filter_step)([texts[i] for i in rows]), strict=True):
            if cause is not None:
                step[i], reason[i] = k, reasons.setdefault(cause, len(reasons))
    save_arrays(part_file(folder, number, kind), step=step, reason=reason, reasons=np.array(json.dumps(list(reasons))))
    return number


def sign_part(folder: Path, number: int, kind: str, asked: Flags, bands: int, rows: int) -> int:
    """Hash the MinHash bands of the `asked` documents of part `number` of the corpus; return `number`.

    Writes to `<number>.<kind>`: `bands` (bands, documents), hashes of `rows` signature numbers, and `words`
    (documents,), whether a document has words.
    """
    hashes, offsets = shingles.ngrams(read_texts(folder, number, asked), NEAR_WORDS)
    signed = shingles.band_hashes(shingles.signatures(hashes, offsets), bands, rows)
    save_arrays(part_file(folder, number, kind), bands=np.ascontiguousarray(signed.T), words=np.diff(offsets) > 0)
    return number


def ngrams_part(folder: Path, number: int, kind: str, asked: Flags, words: int, as_sets: bool = False) -> int:
    """Hash the `words`-word n-grams of the `asked` documents of part `number` of the corpus; return `number`.

    Writes `hashes` and `offsets` to `<number>.<kind>`, with `as_sets` distinct 32-bit ones.
    """
    grams: tuple[Any, Any] = shingles.ngrams(read_texts(folder, number, asked), words)
    hashes, offsets = shingles.distinct(*grams) if as_sets else grams
    save_arrays(part_file(folder, number, kind), hashes=hashes, offsets=offsets)
    return number


def save_arrays(path: Path, **arrays: npt.NDArray[Any]) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_atomic(path, [content.getbuffer()], flush=False)


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


class Refinery:
    """A recipe applied to one corpus. The caller locks and removes `folder`."""

    def __init__(
        self,
        corpus: Corpus,
        corpus_fingerprint: str,
        recipe: list[str],
        validation_fraction: float,
        cache: Path,
        progress: Progress = silent,
    ) -> None:
        self._corpus, self._fraction, self._progress = corpus, validation_fraction, progress
        self._recipe, self._steps = recipe, parse(recipe)
        self._fingerprint = fingerprint(recipe)
        self.key = checksum([_LAYOUT, corpus_fingerprint, validation_fraction, self._fingerprint])[:16]
        self.folder = cache / "recipes" / self.key

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self) -> Refinery:
        """Run all steps; return self. Sets `removed` (documents,), the removing step or -1, and `report` (counts)."""
        require(self._recipe)
        self.folder.mkdir(parents=True, exist_ok=True)
        with Pool() as pool:
            self._pool = pool
            self._read()
            self.removed = np.full(len(self), -1, np.int16)  # the step that removed a document; -1: none
            self._leaked = np.zeros(len(self), bool)
            self._reasons: list[Counter[str]] = [Counter() for _ in self._steps]
            self._examples: dict[int, dict[str, Any]] = {}  # by document
            self._likes: dict[int, list[int]] = {}  # from a document that stays to examples near it
            for whole, group in groupby(enumerate(self._steps), key=lambda numbered: numbered[1].kind in WHOLE):
                if whole:
                    for number, step in group:
                        self._whole(number, step)
                else:
                    numbers = [number for number, _ in group]
                    self._one_by_one(numbers[0], numbers[-1] + 1)
        self._require_training_documents()
        self.report: dict[str, Any] = {
            "fingerprint": self._fingerprint,
            "held_out": self._amount(self.held),
            "raw": self._amount(~self.held),  # of the training part
            "steps": [self._counted(number, step) for number, step in enumerate(self._steps)],
            "kept": self._amount((self.removed < 0) & ~self.held),
        }
        return self

    def __len__(self) -> int:
        return len(self._digests)

    def size_bytes(self) -> int:
        return int(self._bytes[self.removed < 0].sum())

    def documents(self) -> Iterator[str]:
        """Yield the texts that stay, including held-out ones. Also collect what `write_examples` needs."""
        for number, at in self._parts:
            for i, text in enumerate(read_texts(self.folder, number), start=at.start):
                if i in self._examples:
                    self._examples[i]["text"] = text[:_SHOWN]
                for example in self._likes.get(i, ()):
                    self._examples[example]["like"] = text[:_SHOWN]
                if self.removed[i] < 0:
                    yield text

    def write_examples(self, path: Path) -> None:
        """Write examples of removed documents as JSON lines, in the order of the steps.

        Each has step, reason, bytes, text and, for copies and near duplicates, `like`: the text that stayed. Call it
        after `documents` is exhausted.
        """
        lines = (json.dumps(example, ensure_ascii=False) for example in self._examples.values())
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def _read(self) -> None:
        done = self.folder / "parts.npz"
        if not done.exists():
            total, read = self._corpus.size_bytes() or 0, 0
            for written in self._pool.map(write_part, self._unwritten()):
                read += int(load_arrays(part_file(self.folder, written, "npz"))["sizes"].sum())
                self._progress("read", read, total and max(total, read))
            save_arrays(done, parts=np.array(self._count))
        count = int(load_arrays(done)["parts"])
        loaded = [load_arrays(part_file(self.folder, number, "npz")) for number in range(count)]
        self._starts = np.concatenate([[0], np.cumsum([len(part["digests"]) for part in loaded])])
        self._parts = [(number, slice(*ends)) for number, ends in enumerate(pairwise(self._starts.tolist()))]
        self._digests = np.concatenate([part["digests"] for part in loaded])
        self._bytes = np.concatenate([part["sizes"] for part in loaded])
        self.lowest, self.highest = int(self._digests.min()), int(self._digests.max())
        blocks = self._corpus.held_out()
        self.held = below_fraction(self._digests, self._fraction, blocks)
        if blocks is None:
            self.held |= self._digests == np.uint64(self.lowest)
            self.held &= self._digests != np.uint64(self.highest)

    def _unwritten(self) -> Iterator[tuple[Path, int, list[str]]]:
        """Yield (folder, number, texts) of the parts that no earlier prepare wrote with the same texts."""
        self._count = 0
        for number, part in enumerate(in_parts(self._corpus.documents(), PART_BYTES, PART_DOCUMENTS)):
            self._count = number + 1
            path = part_file(self.folder, number, "npz")
            digests = [content_hash(text.encode()) for text in part]
            if not (path.exists() and load_arrays(path)["digests"].tolist() == digests):
                yield self.folder, number, part

    def _one_by_one(self, first: int, end: int) -> None:
        kind = f"{first}.npz"
        asked = (self.removed < 0) & ~self.held
        self._run_on_parts(self._stage(first, end), kind, filter_part, asked, self._steps[first:end])
        for number, at in self._parts:
            result = load_arrays(part_file(self.folder, number, kind))
            names = json.loads(str(result["reasons"]))
            for i in np.flatnonzero(result["step"] >= 0).tolist():
                step = first + int(result["step"][i])
                self.removed[at.start + i] = step
                self._reasons[step][names[int(result["reason"][i])]] += 1

        def reason(i: int) -> str:
            number = int(np.searchsorted(self._starts, i, side="right")) - 1
            result = load_arrays(part_file(self.folder, number, kind))
            return str(json.loads(str(result["reasons"]))[int(result["reason"][i - self._starts[number]])])

        for step in range(first, end):
            self._choose(step, reason)

    def _whole(self, number: int, step: Step) -> None:
        result = self.folder / f"{number}.npz"
        at = np.flatnonzero(self.removed < 0)
        if not result.exists():
            if step.kind == "exact":
                duplicates = dedup.exact(self._digests[at], self.held[at])
            else:
                duplicates = (self._near if step.kind == "near" else self._bloom)(number, step, at)
            save_arrays(result, **vars(duplicates))
            for path in self.folder.glob(f"*.{number}-*"):
                path.unlink()
        duplicates = dedup.Duplicates(**load_arrays(result))
        self.removed[at[duplicates.removed]] = number
        self._leaked[at[duplicates.leaked]] = True
        reason, leaked = _WHOLE_REASON[step.kind], int(duplicates.leaked.sum())
        counts = Counter({reason: int(duplicates.removed.sum()) - leaked, _LEAKED: leaked})
        self._reasons[number] = +counts  # + drops counts of 0
        like = np.arange(len(self))
        like[at] = at[duplicates.like]
        self._choose(number, lambda i: _LEAKED if self._leaked[i] else reason, like)

    def _near(self, number: int, step: Step, at: npt.NDArray[np.int64]) -> dedup.Duplicates:
        bands, rows = shingles.bands_and_rows(step.number)
        asked = self.removed < 0
        signed, sets = f"{number}-bands.npz", f"{number}-sets.npz"
        stage = self._stage(number, number + 1)
        self._run_on_parts(stage, signed, sign_part, asked, bands, rows)
        band = self._bands(number, signed, bands)
        has_words = [load_arrays(part_file(self.folder, n, signed))["words"] for n, _ in self._parts]
        is_candidate = dedup.candidates(band, bands, np.concatenate(has_words))
        alike = np.zeros(len(asked), bool)
        alike[at[is_candidate]] = True
        self._run_on_parts(f"{stage}, sets", sets, ngrams_part, alike, NEAR_WORDS, True)
        hashes, some = self._joined(number, sets)
        counts = np.zeros(len(at), np.int64)
        counts[is_candidate] = np.diff(some)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return dedup.near(
            band,
            bands,
            hashes,
            offsets,
            self._digests[at],
            self.held[at],
            step.number,
            lambda done: self._progress(f"{stage}, pairs", done, bands),
        )

    def _bloom(self, number: int, step: Step, at: npt.NDArray[np.int64]) -> dedup.Duplicates:
        kind, stage = f"{number}-ngrams.npz", self._stage(number, number + 1)
        self._run_on_parts(stage, kind, ngrams_part, self.removed < 0, BLOOM_WORDS)
        return dedup.bloom(
            *self._joined(number, kind),
            self._digests[at],
            self.held[at],
            step.number,
            lambda done: self._progress(f"{stage}, overlap", done, len(at)),
        )

    def _run_on_parts(self, stage: str, kind: str, function: Callable[..., int], asked: Flags, *arguments: Any) -> None:
        missing = {n: at for n, at in self._parts if not part_file(self.folder, n, kind).exists()}
        done = len(self) - sum(at.stop - at.start for at in missing.values())
        jobs = ((self.folder, n, kind, asked[at], *arguments) for n, at in missing.items())
        for number in self._pool.map(function, jobs):
            done += missing[number].stop - missing[number].start
            self._progress(stage, done, len(self))

    def _bands(self, number: int, kind: str, bands: int) -> Callable[[int], shingles.Hashes]:
        """Join all parts' files `kind` into one file per band. Return a function from a band's index to its hashes."""
        files = [self.folder / f"all.{number}-{i:03d}" for i in range(bands)]
        for file in files:
            file.unlink(missing_ok=True)
        for n, _ in self._parts:
            for file, row in zip(files, load_arrays(part_file(self.folder, n, kind))["bands"], strict=True):
                with open(file, "ab") as stream:
                    stream.write(row.tobytes())
        return lambda i: np.fromfile(files[i], np.uint64)

    def _joined(self, number: int, kind: str) -> tuple[Any, npt.NDArray[np.int64]]:
        """Join the `hashes` in all parts' files `kind`. Return them, memory-mapped, and each document's start there."""
        path, counts = self.folder / f"all.{number}-hashes", [np.zeros(1, np.int64)]
        with open(path, "wb") as file:
            for n, _ in self._parts:
                part = load_arrays(part_file(self.folder, n, kind))
                dtype = part["hashes"].dtype
                file.write(part["hashes"].tobytes())
                counts.append(np.diff(part["offsets"]))
        offsets = np.cumsum(np.concatenate(counts))
        return (np.memmap(path, dtype, "r") if offsets[-1] else np.empty(0, dtype)), offsets

    def _choose(self, step: int, reason: Callable[[int], str], like: npt.NDArray[np.int64] | None = None) -> None:
        gone = np.flatnonzero(self.removed == step)
        for i in gone[np.argsort(self._digests[gone], kind="stable")[:EXAMPLES]].tolist():
            word, size = self._steps[step].word, int(self._bytes[i])
            self._examples[i] = {"step": word, "reason": reason(i), "bytes": size, "text": ""}
            if like is not None and like[i] != i:
                self._likes.setdefault(int(like[i]), []).append(i)

    def _stage(self, first: int, end: int) -> str:
        names = " ".join(step.word for step in self._steps[first:end])
        where = f"{first + 1}" if end == first + 1 else f"{first + 1}-{end}"
        return f"step {where} of {len(self._steps)}: {names if len(names) < 40 else names[:39] + '…'}"

    def _require_training_documents(self) -> None:
        removed = self.removed[~self.held]
        if (removed >= 0).all() and self.lowest != self.highest:
            counts = np.bincount(removed, minlength=len(self._steps))
            worst = int(counts.argmax())
            self.remove()  # no other recipe can resume from it
            raise UserError(
                f"data.recipe removes all {len(removed)} training documents; the step {self._steps[worst].word!r} "
                f"removes the most, {int(counts[worst])} of them: loosen it or leave it out"
            )

    def _counted(self, number: int, step: Step) -> dict[str, Any]:
        gone = self.removed == number
        row: dict[str, Any] = {"step": step.word, **self._amount(gone)}
        if step.kind in ("near", "bloom"):
            row["leaked"] = self._amount(gone & self._leaked)  # of these
        return {**row, "reasons": dict(self._reasons[number].most_common())}

    def _amount(self, which: Flags) -> dict[str, int]:
        return {"documents": int(which.sum()), "bytes": int(self._bytes[which].sum())}


_WHOLE_REASON = {"exact": "copy", "near": "near duplicate", "bloom": "seen before"}
_LEAKED = "near held-out text"
