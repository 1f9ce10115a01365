"""The files of one evaluation: scores, items, and the answers of an evaluation that has not finished.

Only the first of several ranks reads and writes.

- An item is made of lm-eval's samples. Its prompt is the common beginning of its contexts; the rest belongs to the
  choices (WinoGrande). `items.py` has the file of items.
- The file of answers starts with what they depend on (checkpoint, precision, our scoring, lm-eval). They are keyed by a
  hash of the request, and flushed after every batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..train.errors import UserError
from ..train.files import JsonLines, plain_value, read_json, read_json_lines, write_atomic, write_json
from ..train.job.control import run_on_ranks
from ..train.parallel.mesh import Mesh
from .items import is_whole, items_path, move_aside, pack_items, read_items
from .metrics import ItemResult, suite_scores
from .tasks.suite import Suite, SuiteTask

Arguments = set[tuple[Any, ...]]
Report = Callable[[str], None]
# What a score depends on, in addition to checkpoint and task. Each task records them: one file may hold several.
SETTINGS = ("lm_eval_version", "scoring", "precision")
SECONDS = 10.0  # between two lines of progress


# --- items, from lm-eval's samples -----------------------------------------------------------------------------------


def item_results(
    entry: SuiteTask, samples: list[dict[str, Any]], averaged: set[str], truncated: Arguments, failed: Arguments
) -> list[ItemResult]:
    """Convert lm-eval's samples to one result per item, in order; samples of several filters are merged.

    `averaged`: metrics whose mean is the task's score; `truncated`, `failed`: arguments of requests with a cut prompt,
    or a NaN.
    """
    merged: dict[int, ItemResult] = {}
    for sample in samples:
        suffix = "" if sample["filter"] == "none" else f",{sample['filter']}"
        values = {name + suffix: float(sample[name]) for name in sample["metrics"] if name in averaged}
        place = sample["doc_id"]
        if place in merged:
            merged[place].values.update(values)
            continue
        keys = [tuple(request) for request in sample["arguments"]]
        if entry.task.OUTPUT_TYPE == "generate_until":
            keys = [key[:1] for key in keys]
        merged[place] = ItemResult(
            index=entry.indices[place],
            values=values,
            truncated=any(key in truncated for key in keys),
            failed=any(key in failed for key in keys),
            **_answers(entry.task, sample),
        )
    return [merged[place] for place in sorted(merged)]


def _answers(task: Any, sample: dict[str, Any]) -> dict[str, Any]:
    arguments, responses = sample["arguments"], [response[0] for response in sample["resps"]]
    kind, first = task.OUTPUT_TYPE, arguments[0][0] if arguments else ""
    if kind == "generate_until":
        expected = sample["target"]  # a text, or several of which any will do
        target = " | ".join(map(str, expected)) if isinstance(expected, list | tuple) else str(expected)
        return {"chance": 0.0, "prompt": first, "answer": str(responses[0]), "target": target}
    if kind == "loglikelihood_rolling":
        return {"log_probabilities": responses, "prompt": first, "bytes": len(first.encode(errors="replace"))}
    nats = [response[0] for response in responses]
    if kind == "loglikelihood":
        gold, target = _gold(arguments[0], nats[0]), arguments[0][1]
        return {"log_probabilities": nats, "gold": gold, "chance": 0.0, "prompt": first, "target": target}
    # With mutual information lm-eval asks for every choice once more without its context, at the end.
    texts = task.doc_to_choice(sample["doc"])
    count, right = len(texts), _right_choices(task, sample["doc"], texts)
    prompt = os.path.commonprefix([context for context, *_ in arguments[:count]])  # noqa: RUF071 (of characters)
    return {
        "log_probabilities": nats[:count],
        "gold": _gold(arguments[right[0]], nats[right[0]]) if right else None,
        "chance": len(right) / count,
        "prompt": prompt,
        "choices": [context[len(prompt) :] + continuation for context, continuation, *_ in arguments[:count]],
        "right": right,
    }


def _gold(arguments: Any, nats: float) -> tuple[float, str] | None:
    context, continuation = arguments[:2]
    text = context[len(context.rstrip()) :] + continuation  # lm-eval scores the context's trailing blanks too
    return (nats, text) if text else None


def _right_choices(task: Any, doc: Any, texts: list[str]) -> list[int]:
    """Return the indices of the right choices, which lm-eval gives as an index, a text, or a list of these."""
    label = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    labels = label if isinstance(label, list) else [label]
    places = [texts.index(one) if isinstance(one, str) and one in texts else one for one in labels]
    return list(dict.fromkeys(place for place in places if isinstance(place, int) and 0 <= place < len(texts)))


# --- answers ---------------------------------------------------------------------------------------------------------


def request_key(kind: str, *parts: Any) -> str:
    """Return the key of a request in the file of answers: hex BLAKE2b of its canonical JSON."""
    text = json.dumps([kind, *parts], sort_keys=True, separators=(",", ":"), default=plain_value)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Answers:
    """A model's answers by request, in memory and, with a `path`, in a file; reports a task's progress.

    A file with another header is replaced, and damaged lines are ignored. Raises UserError if the file cannot be
    written.
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
        self._name, self._total, self._found, self._new = name, 0, 0, 0
        self._start = self._said = time.monotonic()

    def get(self, key: str) -> Any | None:
        answer = self.known.get(key)
        self._total += 1
        self._found += answer is not None
        return answer

    def put(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Store a batch of (key, JSON value), in the file as one line. Raises UserError if that fails."""
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
    """Lock the output during a block, so that two evaluations do not compute the same scores.

    Raises UserError if the output cannot be written.
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
            say(f"another process is writing {output}; waiting for it to finish")
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
        """Load from `output` earlier scores of the checkpoint that `header` names, except of tasks that changed."""
        self.output, self._ranks, self._say, self._keep_items = output, ranks, say, keep_items
        old = run_on_ranks(ranks, lambda: _kept(output, header, suite, ngram, say), only_first=True)
        empty: dict[str, Any] = {"tasks": {}, "suites": {}, "held_out": None, "contamination_withheld": None}
        self.scores = header | empty | {name: old[name] for name in (*empty, "decode", "quantized") if name in old}
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
        """Open the file of the model's answers, on rank 0 only; delete it if the `with` block ends without an error."""
        path = self.output.with_name(f"{self.output.stem}.answers.jsonl")
        header = {key: self.scores[key] for key in ("checkpoint_sha256", *SETTINGS)}
        is_first = self._ranks.rank == 0
        answers = run_on_ranks(self._ranks, lambda: Answers(path, header, self._say) if is_first else Answers())
        with contextlib.closing(answers):
            yield answers
        if is_first:
            path.unlink(missing_ok=True)

    def enter(self, name: str, scores: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Add a finished task and write the files. Raises UserError if that fails."""
        self.tasks[name] = scores
        if self._keeps:
            self._members[name] = pack_items(items)
        self._write(flush=False)

    def finish(self, held_out: Callable[[], dict[str, Any]], suites: Mapping[str, Sequence[str]]) -> None:
        """Add the held-out loss and the mean of each fully scored suite (name -> tasks); write the files.

        `held_out` is called for a missing loss, or, if items are kept, for missing worst windows.
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
        """Write scores and items; with `flush`, wait until they are on the disk."""
        self.scores["seconds"] = round(sum(task["seconds"] for task in self.tasks.values()), 3)

        def write() -> None:
            with _written("scores", self.output):
                if self._keeps:  # first, because a task with scores is not scored again
                    members = [self._members[name] for name in self.tasks if name in self._members]
                    write_atomic(items_path(self.output), members, flush)
                write_json(self.output, self.scores, flush)

        run_on_ranks(self._ranks, write, only_first=True)


def _kept(output: Path, header: dict[str, Any], suite: Suite, ngram: int | None, say: Report) -> dict[str, Any]:
    """Return the scores in `output` without tasks that changed; {} unless they are of the checkpoint in `header`."""
    if not output.exists():
        return {}
    old = read_json(output)
    if old is None or not is_whole(old):
        say(f"{output} is not a file of scores; it was renamed to {move_aside(output).name}, and all tasks are scored")
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
        say(f"scored again, because items, prompts or settings differ from those in {output}: {', '.join(changed)}")
    if others := [name for name in tasks if name not in suite]:
        say(f"earlier scores of other tasks stay in {output}: {', '.join(others)}")
    return {**old, "tasks": {name: scores for name, scores in tasks.items() if name not in changed}, "suites": {}}


def _alike(scores: Mapping[str, Any], header: Mapping[str, Any]) -> bool:
    return all(scores[key] == header[key] for key in SETTINGS)


@contextlib.contextmanager
def _written(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{what} cannot be written to {path} ({error.strerror or error}); free some space, or choose another output"
        ) from error
