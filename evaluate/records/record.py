"""The files of one evaluation: scores, items, and the answers of an evaluation that has not finished.

Only the first of several ranks reads and writes, and all of them learn what it read or could not write. The answers
start with what they depend on (checkpoint, precision, our scoring, lm-eval), are keyed by a hash of their request, and
are flushed after every batch. Floats keep all their bits, so a resumed evaluation equals an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...train.errors import UserError
from ...train.files import JsonLines, plain_value, read_json, read_json_lines, write_atomic, write_json
from ...train.job.control import run_on_ranks
from ...train.parallel.mesh import Mesh
from ..metrics import suite_scores
from ..tasks.suite import Suite
from .items import items_path, move_aside, pack_items, read_items

Report = Callable[[str], None]
# What a score depends on, in addition to checkpoint and task. Each task records them: one file may hold several.
SETTINGS = ("lm_eval_version", "scoring", "precision")
SECONDS = 10.0  # between two lines of progress


# --- answers ---------------------------------------------------------------------------------------------------------


def request_key(kind: str, *parts: Any) -> str:
    """Return the hex BLAKE2b (16 bytes) of the canonical JSON of a request's parts (strings, numbers, lists)."""
    text = json.dumps([kind, *parts], sort_keys=True, separators=(",", ":"), default=plain_value)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Answers:
    """Answers by key, in memory and, with a `path`, in a file; reports the progress and speed of a task.

    A file with another header is replaced, and damaged lines of a file are ignored. Raises UserError if the file cannot
    be written.
    """

    def __init__(
        self, path: Path | None = None, header: dict[str, Any] | None = None, say: Report = lambda line: None
    ) -> None:
        self.path, self._say = path, say
        self.known: dict[str, Any] = {}
        self.begin("")
        if path is None:
            return
        header = json.loads(json.dumps(header, default=plain_value))
        with _written("answers", path):
            self._lines = JsonLines(path)  # cuts off a line torn by a kill
            lines = read_json_lines(path)
            if lines[:1] != [header]:
                self._lines.close()
                path.unlink()
                self._lines, lines = JsonLines(path), []
                self._lines.write(header)
        for batch in lines[1:]:
            self.known.update(batch)

    def begin(self, name: str) -> None:
        """Start to count the requests of a task."""
        self._name, self._total, self._found, self._new = name, 0, 0, 0
        self._start = self._said = time.monotonic()

    def get(self, key: str) -> Any | None:
        answer = self.known.get(key)
        self._total += 1
        self._found += answer is not None
        return answer

    def put(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Keep a batch of JSON values, and write it as one line. Raises UserError if the disk is full."""
        batch = dict(pairs)
        if not batch:
            return
        self.known.update(batch)
        if self.path is not None:
            with _written("answers", self.path):
                self._lines.write(batch)
        self._new += len(batch)
        now = time.monotonic()
        if now - self._said >= SECONDS:
            self._said = now
            # Answers of an earlier evaluation took no time, so they do not count towards the rate.
            rate = self._new / max(now - self._start, 1e-9)
            done = self._found + self._new
            left = (self._total - done) / rate
            unit, size = ("s", 1) if left < 100 else ("min", 60) if left < 6000 else ("h", 3600)
            shown = f"{left / size:.{1 if unit == 'h' else 0}f} {unit} left"
            self._say(f"{self._name}: {done:,} of {self._total:,} requests, {rate:.3g} a second, {shown}")

    def close(self) -> None:
        if self.path is not None:
            self._lines.close()


# --- scores and items ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def only_one(output: Path, say: Report, ranks: Mesh) -> Iterator[None]:
    """Lock the output, so that two evaluations into one file do not compute twice; the kernel drops the lock.

    Raises UserError if the folder cannot be written, or if the output is a folder.
    """
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    run_on_ranks(ranks, lambda: _acquire(lock, output, say), only_first=True)
    try:
        yield
    finally:
        lock.release()  # does nothing on a rank that does not hold it


def _acquire(lock: FileLock, output: Path, say: Report) -> None:
    if output.is_dir():
        raise UserError(f"output {output} is a folder; it must be a file, such as {output / 'scores.json'}")
    with _written("scores", output):
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"another process writes {output}; waiting for it")
            lock.acquire()


class Record:
    """Scores and items of a checkpoint, in memory (`scores`) and on disk."""

    def __init__(
        self,
        output: Path,
        header: dict[str, Any],
        suite: Suite,
        ngram: int | None,
        say: Report,
        ranks: Mesh,
        keep_items: bool,
    ) -> None:
        """Start from the scores of an earlier evaluation of this checkpoint, without tasks whose settings changed."""
        self.output, self._ranks, self._say, self._keep_items = output, ranks, say, keep_items
        old = run_on_ranks(ranks, lambda: _kept(output, header, suite, ngram, say), only_first=True)
        known: dict[str, Any] = {"tasks": {}, "suites": {}, "held_out": None, "contamination_withheld": None}
        self.scores = header | known | {name: old[name] for name in (*known, "decode") if name in old}
        # Items that are there already must not fall behind their scores.
        self._keeps = ranks.rank == 0 and (keep_items or items_path(output).exists())
        self._members: dict[str, bytes] = {}  # packed items by task
        if self._keeps and self.tasks:  # the next write includes the items of other tasks
            by_task: dict[str, list[dict[str, Any]]] = {}
            for item in read_items(items_path(output), say):
                by_task.setdefault(item["task"], []).append(item)
            self._members = {name: pack_items(items) for name, items in by_task.items() if name in self.tasks}

    @property
    def tasks(self) -> dict[str, Any]:
        tasks: dict[str, Any] = self.scores["tasks"]
        return tasks

    @contextlib.contextmanager
    def answers(self) -> Iterator[Answers]:
        """Open the answers so far, which the first rank keeps; delete them if the block ends without an error."""
        path = self.output.with_name(f"{self.output.stem}.answers.jsonl")
        header = {key: self.scores[key] for key in ("checkpoint_sha256", *SETTINGS)}
        is_first = self._ranks.rank == 0
        answers = run_on_ranks(self._ranks, lambda: Answers(path, header, self._say) if is_first else Answers())
        with contextlib.closing(answers):
            yield answers
        if is_first:
            path.unlink(missing_ok=True)

    def enter(self, name: str, scores: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Write a finished task. Raises UserError if the files cannot be written; the old ones stay."""
        self.tasks[name] = scores
        if self._keeps:
            self._members[name] = pack_items(items)
        self._write(flush=False)

    def finish(self, held_out: Callable[[], dict[str, Any]], suites: Mapping[str, Sequence[str]]) -> None:
        """Add the held-out loss, and the means of the suites (name -> tasks) whose tasks have all been scored.

        `held_out` is called if no loss is known, and, if items are kept, for its worst windows; a known loss stays.
        """
        held_out_scores = self.scores["held_out"]
        if held_out_scores is None or held_out_scores.get("withheld"):  # the corpus may be at hand by now
            self.scores["held_out"] = run_on_ranks(self._ranks, held_out, only_first=True)
        elif self._keep_items and "worst" not in held_out_scores:
            worst = run_on_ranks(self._ranks, held_out, only_first=True).get("worst")
            self.scores["held_out"] = held_out_scores if worst is None else held_out_scores | {"worst": worst}
        self.scores["suites"] = {
            suite: suite_scores([self.tasks[name] for name in names])
            for suite, names in suites.items()
            if names and all(name in self.tasks and _alike(self.tasks[name], self.scores) for name in names)
        }
        self._write(flush=True)

    def _write(self, flush: bool) -> None:
        """Write both files; a power cut before the last write, which is flushed, costs only some tasks."""
        self.scores["seconds"] = round(sum(task["seconds"] for task in self.tasks.values()), 3)

        def write() -> None:
            with _written("scores", self.output):
                if self._keeps:  # first, because a task with scores is not scored again
                    write_atomic(items_path(self.output), self._members.values(), flush)
                write_json(self.output, self.scores, flush)

        run_on_ranks(self._ranks, write, only_first=True)


def _kept(output: Path, header: dict[str, Any], suite: Suite, ngram: int | None, say: Report) -> dict[str, Any]:
    """Return what `output` holds of this checkpoint, without tasks whose items, prompts or settings changed."""
    if not output.exists():
        return {}
    old = read_json(output)
    if old is None or not _is_whole(old):
        say(f"{output} is not a file of scores; moved to {move_aside(output).name}, scoring again")
        return {}
    if old.get("checkpoint_sha256") != header["checkpoint_sha256"]:
        return {}
    # Earlier versions recorded these once for all tasks of a file.
    common = {key: old.get(key) for key in SETTINGS}
    tasks = {
        name: scores | {key: scores.get(key, common[key]) for key in SETTINGS} for name, scores in old["tasks"].items()
    }
    changed = [
        name
        for name, entry in suite.items()
        if (scores := tasks.get(name)) is not None
        and not (
            scores["subset"] == entry.subset
            and scores.get("version") == entry.version
            and ngram in (None, scores.get("ngram"))
            and _alike(scores, header)
        )
    ]
    if changed:
        say(f"scored again, as items, prompts or settings are not those of {output}: {', '.join(changed)}")
    if others := [name for name in tasks if name not in suite]:
        say(f"kept in {output}: {', '.join(others)}")
    return {**old, "tasks": {name: scores for name, scores in tasks.items() if name not in changed}, "suites": {}}


def _alike(scores: Mapping[str, Any], header: Mapping[str, Any]) -> bool:
    return all(scores[key] == header[key] for key in SETTINGS)


def _is_whole(old: dict[str, Any]) -> bool:
    tasks = old.get("tasks")
    return isinstance(tasks, dict) and all(
        isinstance(scores, dict)
        and isinstance(scores.get("subset"), dict)
        and {"items", "seconds", "withheld"} <= scores.keys()
        for scores in tasks.values()
    )


@contextlib.contextmanager
def _written(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{what} cannot be written to {path} ({error.strerror or error}); free space or choose another output"
        ) from error
