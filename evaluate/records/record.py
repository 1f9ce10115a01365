"""The files of one evaluation: scores, items, and the answers of an evaluation that has not come to its end.

Special here: of several ranks the first alone reads and writes, and what it has read, or what it could not write, all
of them learn, so that none waits for another that has left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from ...train.errors import UserError
from ...train.files import read_json, write_atomic, write_json
from ..inference.ranks import Alone, Ranks
from ..metrics import suite_scores
from ..tasks.suite import Suite
from .answers import Answers, Memory, Store, move_aside
from .items import items_path, pack, read_items

Report = Callable[[str], None]
T = TypeVar("T")
ALONE = Alone()
# What a score depends on beside its task: scores of a file that says otherwise are not kept.
SAME = ("checkpoint_sha256", "lm_eval_version", "scoring", "precision")


def from_first(ranks: Ranks, function: Callable[[], T]) -> T:
    """What the first rank's `function` returns, on every rank; what it raises, all raise."""
    value: T = ranks.gather(lambda: function() if ranks.rank == 0 else None)[0]  # type: ignore[assignment]
    return value


@contextlib.contextmanager
def only_one(output: Path, say: Report, ranks: Ranks = ALONE) -> Iterator[None]:
    """Holds the output, so that two evaluations into one file do not ask twice; the second one says that it waits.

    The kernel drops the lock with its holder.

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
        raise unwritable(output, error) from error


class Record:
    """What is known of a checkpoint, in memory and on disk.

    Attributes:
        scores: the contents of the file.
    """

    def __init__(self, output: Path, scores: dict[str, Any], ranks: Ranks, say: Report, keep_items: bool) -> None:
        self.output, self.scores, self._ranks, self._say, self._keep_items = output, scores, ranks, say, keep_items
        # Where there are items already, they must not fall behind their scores.
        self._keeps = ranks.rank == 0 and (keep_items or items_path(output).exists())
        self._members: dict[str, bytes] = {}  # packed items by task

    @classmethod
    def open(
        cls, output: Path, header: dict[str, Any], suite: Suite, ngram: int | None, say: Report,
        ranks: Ranks = ALONE, keep_items: bool = True,
    ) -> Record:  # fmt: skip
        """With what an earlier evaluation of this very checkpoint left, less tasks whose items or prompts changed."""
        old = from_first(ranks, lambda: _kept(output, header, suite, ngram, say))
        record = cls(output, header, ranks, say, keep_items)
        known: dict[str, Any] = {"tasks": {}, "suites": {}, "held_out": None, "contamination_withheld": None}
        record.scores |= known | {name: old[name] for name in known if name in old}
        if record._keeps:
            record._read_members()
        return record

    @property
    def tasks(self) -> dict[str, Any]:
        """Scores by task."""
        tasks: dict[str, Any] = self.scores["tasks"]
        return tasks

    @contextlib.contextmanager
    def answers(self) -> Iterator[Store]:
        """The answers so far, which the first rank keeps; they are deleted when the block ends without an error."""
        path = self.output.with_name(f"{self.output.stem}.answers.jsonl")
        header = {key: self.scores[key] for key in SAME}
        answers = self._ranks.together(
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
            self._members[name] = pack(items)
        from_first(self._ranks, lambda: self._write(flush=False))

    def finish(self, held_out: Callable[[], dict[str, Any]], suites: Mapping[str, Sequence[str]]) -> None:
        """The last numbers: what held-out text says, as far as it is not known, and the means of the suites that are
        whole.

        Args:
            held_out: asked where no loss is known, and where items are kept for the windows where it is worst; a loss
                that is known stays.
            suites: the tasks of each suite.
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
            raise unwritable(self.output, error) from error

    def _read_members(self) -> None:
        """Items of the tasks that are kept; those of others go with the next write."""
        by_task: dict[str, list[dict[str, Any]]] = {}
        for item in read_items(items_path(self.output), self._say) if self.tasks else ():
            by_task.setdefault(item["task"], []).append(item)
        self._members = {name: pack(items) for name, items in by_task.items() if name in self.tasks}


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


def unwritable(output: Path, error: OSError) -> UserError:
    """One sentence of a full disk or a folder that must not be written."""
    return UserError(
        f"scores cannot be written to {output} ({error.strerror or error}); free space or choose another output"
    )
