"""The files of one evaluation: scores, items, and the answers of an evaluation that has not come to its end.

Of several ranks the first alone reads and writes, and what it has read, or could not write, all of them learn. The
answers begin with what they depend on (checkpoint, precision, our scoring, lm-eval), go by a hash of their request, and
are flushed batch by batch; floats come back the same, so a resumed evaluation equals one that ran through.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from filelock import FileLock, Timeout

from ...train.errors import UserError
from ...train.files import JsonLines, plain_value, read_json, write_atomic, write_json
from ..inference.ranks import Alone, Ranks
from ..metrics import suite_scores
from ..tasks.suite import Suite
from .items import items_path, move_aside, pack_items, read_items

Report = Callable[[str], None]
T = TypeVar("T")
ALONE = Alone()
# What a score depends on beside its task: scores of a file that says otherwise are not kept.
SAME = ("checkpoint_sha256", "lm_eval_version", "scoring", "precision")
SECONDS = 10.0  # between two lines of a meter


# --- answers ---------------------------------------------------------------------------------------------------------


class Store(Protocol):
    def get(self, key: str) -> Any | None: ...
    def put(self, pairs: Iterable[tuple[str, Any]]) -> None: ...


def request_key(kind: str, *parts: Any) -> str:
    """Hex of a 16-byte BLAKE2b over the canonical JSON of a request's parts (strings, numbers, lists)."""
    text = json.dumps([kind, *parts], sort_keys=True, separators=(",", ":"), default=plain_value)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Memory:
    """Answers of this process alone."""

    def __init__(self) -> None:
        self._answers: dict[str, Any] = {}

    def get(self, key: str) -> Any | None:
        return self._answers.get(key)

    def put(self, pairs: Iterable[tuple[str, Any]]) -> None:
        self._answers.update(pairs)

    def __len__(self) -> int:
        return len(self._answers)


class Answers(Memory):
    """Answers in a file; see `open`."""

    def __init__(self, path: Path, lines: JsonLines, answers: dict[str, Any]) -> None:
        super().__init__()
        self.path, self._lines, self._answers = path, lines, answers

    @classmethod
    def open(cls, path: Path, header: dict[str, Any], say: Report) -> Answers:
        """Opens the file, or begins it: answers under another header are dropped.

        Raises:
            UserError: the file cannot be written.
        """
        header = json.loads(json.dumps(header, default=plain_value))
        try:
            answers = _answers_under(path, header, say)
            if answers is None:
                path.unlink(missing_ok=True)
            lines = JsonLines(path)
            if answers is None:
                lines.write(header)
        except OSError as error:
            raise _unwritable("answers", path, error) from error
        return cls(path, lines, answers or {})

    def put(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Remembers a batch of JSON values and writes it as one line.

        Raises:
            UserError: the disk is full.
        """
        batch = dict(pairs)
        self._answers.update(batch)
        if batch:
            try:
                self._lines.write(batch)
            except OSError as error:
                raise _unwritable("answers", self.path, error) from error

    def close(self) -> None:
        self._lines.close()

    def remove(self) -> None:
        """Closes and deletes the file: what it served is complete."""
        self.close()
        self.path.unlink(missing_ok=True)


def _answers_under(path: Path, header: dict[str, Any], say: Report) -> dict[str, Any] | None:
    """The answers under this header; None where the file must be begun anew. A line torn by a kill is dropped."""
    if not path.exists():
        return None
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1].splitlines()
    if not whole:  # killed while it wrote the header
        return None
    answers: dict[str, Any] = {}
    try:
        if json.loads(whole[0]) != header:
            return None
        for line in whole[1:]:
            answers.update(json.loads(line))
    except (ValueError, TypeError):
        aside = move_aside(path)
        say(f"{path} is damaged; moved to {aside.name}, asking the model again")
        return None
    return answers


class Meter:
    """A store of answers that counts what passes through it, and says every `seconds` how far and fast a task is."""

    def __init__(
        self, answers: Store, say: Report, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._answers, self._say, self._seconds, self._clock = answers, say, seconds, clock
        self.begin("")

    def begin(self, name: str) -> None:
        """A new task; what it looks up is what it asks for."""
        self._name, self._total, self._found, self._new = name, 0, 0, 0
        self._start = self._said = self._clock()

    def get(self, key: str) -> Any | None:
        answer = self._answers.get(key)
        self._total += 1
        self._found += answer is not None
        return answer

    def put(self, pairs: Iterable[tuple[str, Any]]) -> None:
        batch = list(pairs)
        self._answers.put(batch)
        self._new += len(batch)
        now = self._clock()
        if batch and now - self._said >= self._seconds:
            self._said = now
            # What was there from an earlier evaluation took no time, so it does not count towards the rate.
            rate = self._new / max(now - self._start, 1e-9)
            done = self._found + self._new
            left = (self._total - done) / rate
            unit, size = ("s", 1) if left < 100 else ("min", 60) if left < 6000 else ("h", 3600)
            shown = f"{left / size:.{1 if unit == 'h' else 0}f} {unit} left"
            self._say(f"{self._name}: {done:,} of {self._total:,} requests, {rate:.3g} a second, {shown}")


# --- scores and items ------------------------------------------------------------------------------------------------


def from_first(ranks: Ranks, function: Callable[[], T]) -> T:
    """What the first rank's `function` returns, on every rank; what it raises, all raise."""
    value: T = ranks.gather(lambda: function() if ranks.rank == 0 else None)[0]  # type: ignore[assignment]
    return value


@contextlib.contextmanager
def only_one(output: Path, say: Report, ranks: Ranks = ALONE) -> Iterator[None]:
    """Holds the output, so that two evaluations into one file do not ask twice; the kernel drops the lock.

    Raises:
        UserError: the folder cannot be written, or the output is one.
    """
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    from_first(ranks, lambda: _acquire(lock, output, say))
    try:
        yield
    finally:
        lock.release()  # of a rank that holds none: nothing


def _acquire(lock: FileLock, output: Path, say: Report) -> None:
    if output.is_dir():
        raise UserError(f"output {output} is a folder; it must be a file, such as {output / 'scores.json'}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"somebody else writes {output}; waiting for them")
            lock.acquire()
    except OSError as error:
        raise _unwritable("scores", output, error) from error


class Record:
    """What is known of a checkpoint, in memory (`scores`) and on disk."""

    def __init__(self, output: Path, scores: dict[str, Any], ranks: Ranks, say: Report, keep_items: bool) -> None:
        self.output, self.scores, self._ranks, self._say, self._keep_items = output, scores, ranks, say, keep_items
        # Where there are items already, they must not fall behind their scores.
        self._keeps = ranks.rank == 0 and (keep_items or items_path(output).exists())
        self._members: dict[str, bytes] = {}  # packed items by task

    @classmethod
    def open(
        cls,
        output: Path,
        header: dict[str, Any],
        suite: Suite,
        ngram: int | None,
        say: Report,
        ranks: Ranks = ALONE,
        keep_items: bool = True,
    ) -> Record:
        """With what an earlier evaluation of this very checkpoint left, less tasks whose items or prompts changed."""
        old = from_first(ranks, lambda: _kept(output, header, suite, ngram, say))
        record = cls(output, header, ranks, say, keep_items)
        known: dict[str, Any] = {"tasks": {}, "suites": {}, "held_out": None, "contamination_withheld": None}
        record.scores |= known | {name: old[name] for name in known if name in old}
        if record._keeps and record.tasks:  # items of other tasks go with the next write
            by_task: dict[str, list[dict[str, Any]]] = {}
            for item in read_items(items_path(output), say):
                by_task.setdefault(item["task"], []).append(item)
            record._members = {name: pack_items(items) for name, items in by_task.items() if name in record.tasks}
        return record

    @property
    def tasks(self) -> dict[str, Any]:
        tasks: dict[str, Any] = self.scores["tasks"]
        return tasks

    @contextlib.contextmanager
    def answers(self) -> Iterator[Store]:
        """The answers so far, which the first rank keeps; they are deleted when the block ends without an error."""
        path = self.output.with_name(f"{self.output.stem}.answers.jsonl")
        header = {key: self.scores[key] for key in SAME}
        answers = self._ranks.raise_together(
            lambda: Answers.open(path, header, self._say) if self._ranks.rank == 0 else Memory()
        )
        if not isinstance(answers, Answers):
            yield answers
            return
        with contextlib.closing(answers):
            yield answers
            answers.remove()

    def enter(self, name: str, scores: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """A task is complete, and in the files.

        Raises:
            UserError: the files cannot be written; the old ones stay.
        """
        self.tasks[name] = scores
        if self._keeps:
            self._members[name] = pack_items(items)
        from_first(self._ranks, lambda: self._write(flush=False))

    def finish(self, held_out: Callable[[], dict[str, Any]], suites: Mapping[str, Sequence[str]]) -> None:
        """Held-out loss, and the means of the suites (name -> tasks) that are whole.

        `held_out` is asked where no loss is known, and, where items are kept, for the windows where it is worst; a
        known loss stays.
        """
        known = self.scores["held_out"]
        if known is None or known.get("withheld"):  # the corpus may be at hand by now
            self.scores["held_out"] = from_first(self._ranks, held_out)
        elif self._keep_items and "worst" not in known:
            worst = from_first(self._ranks, held_out).get("worst")
            self.scores["held_out"] = known if worst is None else known | {"worst": worst}
        self.scores["suites"] = {
            suite: suite_scores([self.tasks[name] for name in names])
            for suite, names in suites.items()
            if names and all(name in self.tasks for name in names)
        }
        from_first(self._ranks, lambda: self._write(flush=True))

    def _write(self, flush: bool) -> None:
        """Both files; a power cut before the last, flushed, writing costs tasks and no more."""
        self.scores["seconds"] = round(sum(task["seconds"] for task in self.tasks.values()), 3)
        try:
            if self._keeps:  # first, for a task whose scores are there is not scored again
                write_atomic(items_path(self.output), self._members.values(), flush)
            write_json(self.output, self.scores, flush)
        except OSError as error:
            raise _unwritable("scores", self.output, error) from error


def _kept(output: Path, header: dict[str, Any], suite: Suite, ngram: int | None, say: Report) -> dict[str, Any]:
    if not output.exists():
        return {}
    old = read_json(output)
    if old is None or not _is_whole(old):
        say(f"{output} is not a file of scores; moved to {move_aside(output).name}, scoring again")
        return {}
    if any(old.get(key) != header[key] for key in SAME):
        return {}
    tasks = {name: scores for name, scores in old["tasks"].items() if _stands(scores, suite.tasks.get(name), ngram)}
    return {**old, "tasks": tasks, "suites": {}}


def _stands(scores: dict[str, Any], entry: Any, ngram: int | None) -> bool:
    """Whether a score answers what is asked now; a task that is not asked about stands."""
    if entry is None:
        return True
    asked = (scores["subset"], scores.get("version")) == (entry.subset, entry.version)
    return asked and ngram in (None, scores.get("ngram"))


def _is_whole(old: dict[str, Any]) -> bool:
    tasks = old.get("tasks")
    return isinstance(tasks, dict) and all(
        isinstance(scores, dict)
        and isinstance(scores.get("subset"), dict)
        and {"items", "seconds", "withheld"} <= scores.keys()
        for scores in tasks.values()
    )


def _unwritable(what: str, path: Path, error: OSError) -> UserError:
    return UserError(
        f"{what} cannot be written to {path} ({error.strerror or error}); free space or choose another output"
    )
