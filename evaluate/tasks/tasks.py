"""Tasks by name, loaded once for many checkpoints: from staged data, by lm-eval's name, or from your own files.

An entry is a suite (`small`), a task (`piqa`), a task with examples (`piqa@5`), a folder of lm-eval YAML, a `.jsonl` of
questions, or `text:FOLDER`. Staged tasks have no training split: examples are drawn from a fixed part of the scored
split, never the item itself; MMLU's are the five of its subject.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...train.errors import UserError
from . import hub, staging
from .custom import check_custom, load_custom, load_texts
from .staging import BENCHMARKS, STAGED, Report, StagedTask, benchmarks_directory, stage_benchmarks, staged_lines
from .suite import Suite, SuiteTask, choose_items, expand, explained, freeze, quiet

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

DEFAULT_LIMIT = 100  # items per task: an accuracy of 0.5 has a standard error of 0.05
EXAMPLES = 200  # items of a scored split that examples are drawn from


@dataclass(frozen=True)
class Entry:
    """One entry of a list of tasks; `kind` is text, path, staged or named, and `shots` is None if not given."""

    written: str
    name: str
    shots: int | None
    kind: str


def parse_entry(written: str) -> Entry:
    if written.startswith("text:"):
        return Entry(written, written.removeprefix("text:"), None, "text")
    name, shots = written, None
    if match := re.fullmatch(r"(.+)@(\d+)", written):
        name, shots = match[1], int(match[2])
    elif re.fullmatch(r"[\w.-]+@.*", written):
        raise UserError(f"task {written!r} has no number after @; write the number of examples, such as piqa@5")
    is_path = "/" in name or name.endswith((".jsonl", ".jsonl.gz", ".yaml")) or name in (".", "..")
    return Entry(written, name, shots, "path" if is_path else "staged" if name in STAGED else "named")


def anchored(tasks: Sequence[str], progress: Report = lambda line: None, allow_code: bool = False) -> list[str]:
    """Expand suites and make paths absolute, for processes in other folders; return the tasks.

    Raises UserError if a task is missing or invalid.
    """
    result = []
    for written in expand(tasks):
        entry = parse_entry(written)
        is_path = entry.kind in ("text", "path")
        if entry.kind == "named":
            manager = hub.task_manager(progress)
            is_path = entry.name not in manager.all_tasks and Path(entry.name).is_dir()  # as `load_suite` decides
            if not is_path:
                hub.check_name(entry.name, manager)
        if is_path:
            place = Path(entry.name).expanduser().absolute()
            if not place.exists():
                raise UserError(f"task {written!r} names {place}, which does not exist; give a file or a folder")
            if entry.kind != "text":
                check_custom(place, allow_code)
            written = f"text:{place}" if entry.kind == "text" else f"{place}" + written.removeprefix(entry.name)
        result.append(written)
    return result


def load_suite(
    tasks: str | Sequence[str] = "small",
    limit: int | None = DEFAULT_LIMIT,
    *,
    progress: Report = lambda line: None,
    allow_code: bool = False,
) -> Suite:
    """Load tasks, choose their items and build their requests. Missing benchmarks are staged first.

    Args:
        tasks: Suites, tasks, files and folders, as a list or separated by commas.
        limit: Items per task; None means all.
        progress: Called with a line before each slow step.
        allow_code: Whether the user's YAML may run Python.

    Raises:
        UserError: A task is unknown (the nearest names are given), or its data cannot be loaded.
    """
    entries = [parse_entry(written) for written in expand(tasks)]
    if limit is not None and limit < 1:
        raise UserError(
            f"limit is {limit}; it must be 1 or more items per task (for all items: --all, or null in a sweep)"
        )
    directory = _stage_wheel(entries, progress)
    loaded: Suite = {}
    manager: TaskManager | None = None
    sources: dict[str, Entry] = {}
    for entry in entries:
        if entry.kind == "staged":
            tasks_of_entry = {entry.written: _load_staged(entry, limit, directory)}
        elif entry.kind == "text":
            tasks_of_entry = load_texts(Path(entry.name), limit)
        elif entry.kind == "path":
            tasks_of_entry = load_custom(Path(entry.name), entry.shots or 0, limit, allow_code)
        else:
            manager = manager or hub.task_manager(progress)
            if entry.name not in manager.all_tasks and Path(entry.name).is_dir():
                tasks_of_entry = load_custom(Path(entry.name), entry.shots or 0, limit, allow_code)
            else:
                tasks_of_entry = hub.load_named(entry.name, entry.shots, limit, manager, progress)
        for name in tasks_of_entry:
            # Tasks of one name from two files would share a place; a group's task that is also named is the same.
            other = sources.setdefault(name, entry)
            if other.written != entry.written and "path" in (entry.kind, other.kind):
                raise UserError(
                    f"tasks: {name!r} comes from {other.written} and from {entry.written}; rename one of the two"
                )
        loaded |= tasks_of_entry
    return loaded


def stage_tasks(tasks: str | Sequence[str], progress: Report = lambda line: None) -> list[Path]:
    """Download the data of tasks, for nodes without a network; return the data's folders.

    Raises UserError if that fails.
    """
    entries = [parse_entry(written) for written in expand(tasks)]
    folders = []
    if any(entry.kind == "staged" for entry in entries):
        folders.append(_stage_wheel(entries, progress))
    if named := [entry.name for entry in entries if entry.kind == "named" and not Path(entry.name).is_dir()]:
        folders += hub.stage_named(named, progress)
    return folders


def _stage_wheel(entries: list[Entry], progress: Report) -> Path:
    names = {file for entry in entries if entry.kind == "staged" for file in STAGED[entry.name].files}
    return stage_benchmarks(progress, names=names) if names else benchmarks_directory()


def _load_staged(entry: Entry, limit: int | None, directory: Path) -> SuiteTask:
    from lm_eval.tasks import TaskManager

    name, written, staged = entry.name, entry.written, STAGED[entry.name]
    benchmark = BENCHMARKS[staged.data].entry
    lines, split = staged_lines(directory, staged.data), benchmark["split"]
    indices = choose_items(name, len(lines), limit)
    chosen = _dataset([lines[index] for index in indices])
    config = _staged_config(name, lambda **_: {split: chosen}) | {"task": written}
    shots = int(config.get("num_fewshot") or 0) if entry.shots is None else entry.shots
    if shots and config["output_type"] == "loglikelihood_rolling":
        raise UserError(f"task {written!r} asks for examples, but {name} scores whole texts; use {name}")
    with quiet():
        task = TaskManager(include_defaults=False).load([config])["tasks"][written]
        remarks = {"note": benchmark["note"]} if "note" in benchmark else {}
        if shots:
            remarks |= {"examples": _give_examples(task, name, staged, shots, directory, lines, config)}
    return freeze(written, task, indices, len(lines), split, directory.name, shots, **remarks)


def _staged_config(name: str, custom_dataset: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    split = BENCHMARKS[STAGED[name].data].entry["split"]
    config: dict[str, Any] = load_yaml(STAGED[name].definition)
    config |= {"task": name, "training_split": None, "validation_split": None, "custom_dataset": custom_dataset}
    # lm-eval excludes an item from its examples only if both are from the test split.
    return config | {"test_split": split, "fewshot_split": split}


@contextlib.contextmanager
def staged_by_name(progress: Report) -> Iterator[None]:
    """Make lm-eval load tasks by name from staged benchmarks, where there are any, inside the block."""
    from lm_eval.tasks.manager import TaskManager

    directory, original = benchmarks_directory(), TaskManager.load

    def staged(task: Any) -> Any:
        if task not in STAGED or not staging.is_staged(directory, STAGED[task].files):
            return task
        data, entry = STAGED[task].data, BENCHMARKS[STAGED[task].data].entry
        note = entry.get("note", f"the split {entry['split']}")
        progress(f"{task}: staged data, {note}; examples, if any, are other items of it")
        return _staged_config(task, lambda **_: {entry["split"]: _dataset(staged_lines(directory, data))})

    def load(manager: TaskManager, tasks: Any) -> Any:
        names = ",".join(str(task.get("task")) if isinstance(task, dict) else str(task) for task in tasks)
        with explained(f"task {names!r} cannot be loaded", hub.ADVICE.format(name=names)):
            return original(manager, [staged(task) if isinstance(task, str) else task for task in tasks])

    TaskManager.load = load
    try:
        with hub.staged_copies(progress):
            yield
    finally:
        TaskManager.load = original


def _dataset(lines: list[bytes]) -> Any:
    import datasets

    return datasets.Dataset.from_list([json.loads(line) for line in lines])


def _give_examples(
    task: Any, name: str, staged: StagedTask, shots: int, directory: Path, lines: list[bytes], config: dict[str, Any]
) -> str:
    if staged.examples:
        pool = list(_dataset(staged_lines(directory, staged.examples)))
        task.sampler = SameGroup(pool, staged.group)
        available = min(Counter(doc[staged.group] for doc in pool).values())
        source = f"the first of the split {BENCHMARKS[staged.examples].entry['split']} with the item's {staged.group}"
    else:
        places = choose_items(f"{name}/examples", len(lines), EXAMPLES)
        docs = _dataset([lines[place] for place in places])
        process = config.get("process_docs")
        task.sampler.replace_df(list(process(docs) if process else docs))
        available = len(places) - 1
        source = f"{len(places)} items of the scored split {config['test_split']}, without the item itself"
    if shots > available:
        raise UserError(f"task {name}@{shots} asks for {shots} examples; {name} has only {available}")
    return source


@dataclass
class SameGroup:
    """A sampler for lm-eval: the first examples that have the item's value in `column`."""

    pool: list[dict[str, Any]]
    column: str

    def set_rnd(self, seed: int | None) -> None:
        """Ignore the seed, because `sample` draws nothing at random."""

    def sample(self, n: int, eval_doc: dict[str, Any], **_: Any) -> list[dict[str, Any]]:
        return [doc for doc in self.pool if doc[self.column] == eval_doc[self.column]][:n]
