"""A corpus goes through a recipe: which documents are trained on, and what each step removed.

What is held out is chosen from the raw text, so every recipe is scored on the same text; training text near to it is
removed as `leaked`. Every job leaves its result in `<cache>/recipes/<key>`, where a killed prepare resumes.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ..corpora import Corpus
from ..mixing import below_threshold
from ..storage import Progress, checksum
from . import dedup, parts, shingles
from .parts import Flags, load_arrays, part_file, save_arrays
from .pool import Pool
from .recipe import WHOLE, Step, fingerprint, parse, require

# Bumped when files of parts would be read wrongly.
_LAYOUT = 1
EXAMPLES = 20  # of what a step removed
_SHOWN = 2000  # characters of an example


@dataclass
class Refined:
    """What a recipe left of a corpus. Arrays are over all documents, in the order of the parts."""

    folder: Path
    sizes: list[int]  # documents of each part
    lowest: int  # hash of a document of the raw text, and the highest
    highest: int
    held: Flags
    removed: npt.NDArray[np.int16]  # the step that a document fell to; -1: none
    report: dict[str, Any]
    examples: dict[int, dict[str, Any]]  # by document
    likes: dict[int, list[int]] = field(default_factory=dict)  # a document that stays to examples that are near it

    def documents(self) -> Iterator[str]:
        """Texts that stay, those held out among them. Fills in the texts of examples as it goes."""
        start = 0
        for number, size in enumerate(self.sizes):
            for i, text in enumerate(parts.read_texts(self.folder, number), start=start):
                if i in self.examples:
                    self.examples[i]["text"] = text[:_SHOWN]
                for example in self.likes.get(i, ()):
                    self.examples[example]["like"] = text[:_SHOWN]
                if self.removed[i] < 0:
                    yield text
            start += size

    def size_bytes(self) -> int:
        return int(self.report["kept"]["bytes"] + self.report["held_out"]["bytes"])

    def write_examples(self, path: Path) -> None:
        """One JSON object per line, first step first: step, reason, bytes, text, and for near duplicates what it is
        like.

        Call it when `documents` is through.
        """
        lines = (json.dumps(example, ensure_ascii=False) for example in self.examples.values())
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


class Refinery:
    """Works on one corpus and one recipe; its folder is the caller's to lock, and to remove."""

    def __init__(
        self,
        corpus: Corpus,
        corpus_fingerprint: str,
        recipe: list[str],
        validation_fraction: float,
        cache: Path,
        progress: Progress | None = None,
        processes: int | None = None,
    ) -> None:
        self._corpus = corpus
        self._recipe, self._steps = recipe, parse(recipe)
        self._fraction = validation_fraction
        self._progress = progress or (lambda stage, done, total: None)
        self._processes = processes
        self._fingerprint = fingerprint(recipe)
        self.key = checksum([_LAYOUT, corpus_fingerprint, validation_fraction, self._fingerprint])[:16]
        self.folder = cache / "recipes" / self.key

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self) -> Refined:
        require(self._recipe)
        self.folder.mkdir(parents=True, exist_ok=True)
        with Pool(self._processes) as pool:
            self._pool = pool
            self._read()
            self._hold_out()
            n = len(self._digests)
            self._removed = np.full(n, -1, np.int16)
            self._reasons: list[Counter[str]] = [Counter() for _ in self._steps]
            self._why: dict[int, tuple[str, int]] = {}  # examples: the reason, and what each is like
            self._leaked = np.zeros(n, bool)
            for whole, group in groupby(enumerate(self._steps), key=lambda entry: entry[1].kind in WHOLE):
                numbered = list(group)
                if whole:
                    for number, step in numbered:
                        self._whole(number, step)
                else:
                    self._one_by_one(numbered[0][0], numbered[-1][0] + 1)
        self._refuse_nothing()
        return self._refined()

    def _read(self) -> None:
        """Writes parts to disk; earlier ones are checked, and kept."""
        done = self.folder / "parts.npz"
        if not done.exists():
            total = float(self._corpus.size_bytes() or 0)
            read = 0.0
            jobs = self._unwritten(self._corpus.documents())
            for written in self._pool.map(parts.write_part, jobs):
                read += float(load_arrays(part_file(self.folder, written, "npz"))["sizes"].sum())
                self._progress("read", read, max(total, read) if total else 0.0)
            save_arrays(done, parts=np.array(self._count))
        count = int(load_arrays(done)["parts"])
        found = [load_arrays(part_file(self.folder, number, "npz")) for number in range(count)]
        self._sizes = [len(part["digests"]) for part in found]
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])
        self._digests = np.concatenate([part["digests"] for part in found])
        self._bytes = np.concatenate([part["sizes"] for part in found])

    def _unwritten(self, texts: Iterator[str]) -> Iterator[tuple[Path, int, list[str]]]:
        """Parts that are missing, or hold other texts than the corpus has there now: its files may stand in another
        order.
        """
        self._count = 0
        for number, part in enumerate(parts.in_parts(texts, parts.PART_BYTES, parts.PART_DOCUMENTS)):
            self._count = number + 1
            path = part_file(self.folder, number, "npz")
            if not (path.exists() and load_arrays(path)["digests"].tolist() == list(map(parts.digest, part))):
                yield self.folder, number, part

    def _hold_out(self) -> None:
        self.lowest, self.highest = int(self._digests.min()), int(self._digests.max())
        self._held = below_threshold(self._digests, self._fraction) | (self._digests == np.uint64(self.lowest))
        self._held &= self._digests != np.uint64(self.highest)

    def _one_by_one(self, first: int, end: int) -> None:
        words = [step.word for step in self._steps[first:end]]
        kind, stage = f"{first}.npz", self._stage(first, end)
        asked = (self._removed < 0) & ~self._held
        self._each_part(stage, kind, parts.filter_part, asked, words)
        for number, at in self._parts():
            said = load_arrays(part_file(self.folder, number, kind))
            names = json.loads(str(said["reasons"]))
            for i in np.flatnonzero(said["step"] >= 0).tolist():
                step, reason = first + int(said["step"][i]), names[int(said["reason"][i])]
                self._removed[at.start + i] = step
                self._reasons[step][reason] += 1
        for step in range(first, end):
            self._choose(step, np.flatnonzero(self._removed == step), None)

    def _whole(self, number: int, step: Step) -> None:
        result = self.folder / f"{number}.npz"
        at = np.flatnonzero(self._removed < 0)
        if not result.exists():
            find = {"exact": self._exact, "near": self._near, "bloom": self._bloom}[step.kind]
            found = find(number, step, at)
            save_arrays(result, removed=found.removed, leaked=found.leaked, like=found.like)
            for path in self.folder.glob(f"*.{number}-*"):
                path.unlink()
        there = load_arrays(result)
        gone = at[there["removed"]]
        self._removed[gone] = number
        self._leaked[at[there["leaked"]]] = True
        copies, leaked = int((there["removed"] & ~there["leaked"]).sum()), int(there["leaked"].sum())
        self._reasons[number] = +Counter({_WHOLE_REASON[step.kind]: copies, _LEAKED: leaked})  # those above 0
        like = np.arange(len(self._digests))
        like[at] = at[there["like"]]
        self._choose(number, gone, like)

    def _exact(self, number: int, step: Step, at: npt.NDArray[np.int64]) -> dedup.Duplicates:
        return dedup.exact(self._digests[at], self._held[at])

    def _near(self, number: int, step: Step, at: npt.NDArray[np.int64]) -> dedup.Duplicates:
        bands, rows = shingles.bands_and_rows(step.number)
        asked = self._removed < 0
        signed, sets = f"{number}-bands.npz", f"{number}-sets.npz"
        stage = self._stage(number, number + 1)
        self._each_part(stage, signed, parts.sign_part, asked, bands, rows)
        band = self._bands(number, signed, bands)
        words = [load_arrays(part_file(self.folder, n, signed))["words"] for n, _ in self._parts()]
        found = dedup.candidates(band, bands, np.concatenate(words))
        alike = np.zeros(len(asked), bool)
        alike[at[found]] = True
        self._each_part(f"{stage}, sets", sets, parts.sets_part, alike)
        hashes, some = self._joined(number, sets)
        counts = np.zeros(len(at), np.int64)
        counts[found] = np.diff(some)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return dedup.near(
            band,
            bands,
            hashes,
            offsets,
            self._digests[at],
            self._held[at],
            step.number,
            lambda done: self._progress(f"{stage}, pairs", float(done), float(bands)),
        )

    def _bloom(self, number: int, step: Step, at: npt.NDArray[np.int64]) -> dedup.Duplicates:
        asked, kind, stage = self._removed < 0, f"{number}-ngrams.npz", self._stage(number, number + 1)
        self._each_part(stage, kind, parts.ngrams_part, asked)
        hashes, offsets = self._joined(number, kind)
        return dedup.bloom(
            hashes,
            offsets,
            self._digests[at],
            self._held[at],
            step.number,
            lambda done: self._progress(f"{stage}, overlap", float(done), float(len(at))),
        )

    def _each_part(self, stage: str, kind: str, function: Callable[..., int], asked: Flags, *arguments: Any) -> None:
        """Calls `function(folder, number, kind, asked of the part, *arguments)` where that file is missing."""
        missing = [(n, at) for n, at in self._parts() if not part_file(self.folder, n, kind).exists()]
        total, done = float(self._starts[-1]), float(sum(self._sizes) - sum(self._sizes[n] for n, _ in missing))
        jobs = ((self.folder, n, kind, asked[at], *arguments) for n, at in missing)
        for number in self._pool.map(function, jobs):
            done += self._sizes[number]
            self._progress(stage, done, total)

    def _parts(self) -> Iterator[tuple[int, slice]]:
        for number, size in enumerate(self._sizes):
            yield number, slice(int(self._starts[number]), int(self._starts[number]) + size)

    def _bands(self, number: int, kind: str, bands: int) -> Callable[[int], shingles.Hashes]:
        """Hashes of one band of all documents: a file per band, so that only one band is in memory."""
        files = [self.folder / f"all.{number}-{i:03d}" for i in range(bands)]
        for file in files:
            file.unlink(missing_ok=True)
        for n, _ in self._parts():
            for file, row in zip(files, load_arrays(part_file(self.folder, n, kind))["bands"], strict=True):
                with open(file, "ab") as stream:
                    stream.write(row.tobytes())
        return lambda i: np.fromfile(files[i], np.uint64)

    def _joined(self, number: int, kind: str) -> tuple[Any, npt.NDArray[np.int64]]:
        """Hashes of all parts in one file that is mapped, and where each document's begin."""
        path, counts = self.folder / f"all.{number}-hashes", [np.zeros(1, np.int64)]
        with open(path, "wb") as file:
            for n, _ in self._parts():
                part = load_arrays(part_file(self.folder, n, kind))
                dtype = part["hashes"].dtype
                file.write(part["hashes"].tobytes())
                counts.append(np.diff(part["offsets"]))
        offsets = np.cumsum(np.concatenate(counts))
        return (np.memmap(path, dtype, "r") if offsets[-1] else np.empty(0, dtype)), offsets

    def _choose(self, step: int, gone: npt.NDArray[np.int64], like: npt.NDArray[np.int64] | None) -> None:
        """Notes the examples of a step: those of the lowest hashes."""
        for i in gone[np.argsort(self._digests[gone], kind="stable")[:EXAMPLES]].tolist():
            self._why[i] = (self._reason_of(step, i), i if like is None else int(like[i]))

    def _reason_of(self, step: int, i: int) -> str:
        if self._steps[step].kind in WHOLE:
            return _LEAKED if self._leaked[i] else _WHOLE_REASON[self._steps[step].kind]
        first = step
        while first > 0 and self._steps[first - 1].kind not in WHOLE:
            first -= 1
        number = int(np.searchsorted(self._starts, i, side="right")) - 1
        said = load_arrays(part_file(self.folder, number, f"{first}.npz"))
        return str(json.loads(str(said["reasons"]))[int(said["reason"][i - self._starts[number]])])

    def _stage(self, first: int, end: int) -> str:
        words = " ".join(step.word for step in self._steps[first:end])
        where = f"{first + 1}" if end == first + 1 else f"{first + 1}-{end}"
        return f"step {where} of {len(self._steps)}: {words if len(words) < 40 else words[:39] + '…'}"

    def _refuse_nothing(self) -> None:
        training = ~self._held
        if (self._removed[training] >= 0).all() and self.lowest != self.highest:
            counts = np.bincount(self._removed[training], minlength=len(self._steps))
            worst = int(counts.argmax())
            self.remove()  # no other recipe can go on from it
            raise UserError(
                f"data.recipe leaves none of {int(training.sum())} training documents; {self._steps[worst].word!r} "
                f"removed most, {int(counts[worst])} of them, so loosen it or leave it out"
            )

    def _refined(self) -> Refined:
        examples: dict[int, dict[str, Any]] = {}
        likes: dict[int, list[int]] = {}
        for i, (reason, like) in self._why.items():
            word = self._steps[self._removed[i]].word
            examples[i] = {"step": word, "reason": reason, "bytes": int(self._bytes[i]), "text": ""}
            if like != i:
                likes.setdefault(like, []).append(i)
        kept = (self._removed < 0) & ~self._held
        report = {
            "fingerprint": self._fingerprint,
            "held_out": self._amount(self._held),
            "raw": self._amount(~self._held),  # of the training part
            "steps": [self._counted(number, step) for number, step in enumerate(self._steps)],
            "kept": self._amount(kept),
        }
        return Refined(
            self.folder, self._sizes, self.lowest, self.highest, self._held, self._removed, report, examples, likes
        )

    def _counted(self, number: int, step: Step) -> dict[str, Any]:
        gone = self._removed == number
        row: dict[str, Any] = {"step": step.word, **self._amount(gone)}
        if step.kind in ("near", "bloom"):
            row["leaked"] = self._amount(gone & self._leaked)  # of these
        return {**row, "reasons": dict(self._reasons[number].most_common())}

    def _amount(self, which: Flags) -> dict[str, int]:
        return {"documents": int(which.sum()), "bytes": int(self._bytes[which].sum())}


_WHOLE_REASON = {"exact": "copy", "near": "near duplicate", "bloom": "seen before"}
_LEAKED = "near held-out text"
