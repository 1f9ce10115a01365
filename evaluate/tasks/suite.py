"""Suites: lists of tasks in conf/evaluate, and tasks whose requests are built once and asked of many checkpoints.

Of each task a fixed subset is scored: items are ranked by a hash of (seed, task, index), so the choice is the same
everywhere, and a smaller limit gives a subset of a larger one.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import io
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...train.data.readers import one_line
from ...train.errors import UserError

if TYPE_CHECKING:
    from lm_eval.api.task import Task

FEWSHOT_SEED = 1234  # lm-eval's default
SEED = 0  # of the choice of items
SUITES = Path(__file__).resolve().parents[2] / "conf" / "evaluate"  # the files that Hydra reads too


@dataclass
class SuiteTask:
    """One lm-eval task with its chosen items."""

    name: str
    task: Task
    indices: list[int]  # places of the items in the split, ascending
    # Recorded with a score: items, of, split, seed, source, a SHA-256 of all prompts, answers, metrics and filters, and
    # where there is something to say, `examples` (where they are from) and `note`.
    subset: dict[str, Any]
    version: Any  # lm-eval's, of the task
    shots: int = 0  # examples in each prompt

    @property
    def cost(self) -> tuple[bool, int]:
        """Return a key to sort tasks by cost: whether they generate text, then the characters of all requests."""
        texts = (part for instance in self.task.instances for part in instance.args if isinstance(part, str))
        return self.task.OUTPUT_TYPE == "generate_until", sum(map(len, texts))


Suite = dict[str, SuiteTask]  # by name, in the order in which they are scored


def choose_items(name: str, count: int, limit: int | None) -> list[int]:
    """Choose the `limit` (None: all) of `count` items with the smallest hashes; return their indices, ascending."""
    if limit is None or limit >= count:
        return list(range(count))
    ranked = sorted(range(count), key=lambda index: hashlib.sha256(f"{SEED}/{name}/{index}".encode()).digest())
    return sorted(ranked[:limit])


def _frozen_class(base: Any) -> Any:
    """Return a subclass of an lm-eval task that keeps items and requests instead of building them for every model."""

    class Frozen(base):
        frozen_docs: list[Any]
        frozen_instances: list[Any]

        @property
        def eval_docs(self) -> list[Any]:
            return self.frozen_docs

        def build_all_requests(self, **kwargs: Any) -> None:
            if not self.frozen_instances:
                super().build_all_requests(**kwargs)
                self.frozen_instances = self._instances
            for instance in self.frozen_instances:
                instance.resps, instance.filtered_resps = [], {}

    return Frozen


def freeze(
    name: str,
    task: Any,
    indices: list[int],
    count: int,
    split: str,
    source: str,
    shots: int | None = None,
    **remarks: Any,
) -> SuiteTask:
    """Build a task's requests once, for all checkpoints; the lm-eval task is changed in place.

    `indices`: chosen items of the split's `count`, ascending; `task` holds just these or all. `shots`: None uses the
    task's number. `source`: name of the data. `remarks`: more entries for `SuiteTask.subset`.
    """
    with quiet():
        docs = task.eval_docs
        task.frozen_docs = list(docs) if len(docs) == len(indices) else [docs[index] for index in indices]
        task.frozen_instances = []
        task.__class__ = _frozen_class(task.__class__)
        # As lm-eval's simple_evaluate does before it evaluates.
        shots = int(task.get_config("num_fewshot") or 0) if shots is None else shots
        task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        task.build_all_requests(limit=None, samples=None, rank=0, world_size=1)
        content = [
            [list(instance.args) for instance in task.instances],
            [task.doc_to_target(doc) for doc in task.frozen_docs],
            [task.get_config(part) for part in ("output_type", "process_results", "metric_list", "filter_list")],
        ]
    # A function by its name: its address differs from process to process.
    encoder = json.JSONEncoder(sort_keys=True, default=lambda value: str(getattr(value, "__qualname__", value)))
    digest = hashlib.sha256()
    for part in encoder.iterencode(content):  # all prompts in one text would take gigabytes
        digest.update(part.encode())
    subset = {"items": len(indices), "of": count, "split": split, "seed": SEED, "source": source}
    subset["sha256"] = digest.hexdigest()
    return SuiteTask(name, task, indices, subset | remarks, task.VERSION, shots)


def freeze_whole(name: str, task: Any, limit: int | None, split: str, source: str, shots: int | None) -> SuiteTask:
    """Choose up to `limit` items of a whole split; `freeze` the task as `name@shots`, or `name` if `shots` is None."""
    with quiet():
        count = len(task.eval_docs)
    written = written_name(name, shots)
    task.set_config(key="task", value=written)
    return freeze(written, task, choose_items(name, count, limit), count, split, source, shots)


def written_name(name: str, shots: int | None) -> str:
    return name if shots is None else f"{name}@{shots}"


def task_of_rows(config: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    import datasets
    from lm_eval.api.task import ConfigurableTask

    data = {"custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)}, "test_split": "test"}
    with quiet():
        return ConfigurableTask(config=config | data | {"metadata": {"version": 1}})


def only_text(tasks: dict[str, Any], refused: Sequence[str] = ()) -> dict[str, Any]:
    """Return `tasks`. Raises UserError if one runs code or needs images; `refused` names tasks that do."""
    unsafe = ("UNSAFE_CODE", "MULTIMODAL")
    others = [name for name, task in tasks.items() if any(getattr(task, kind, False) for kind in unsafe)]
    if refused := [*refused, *others]:
        raise UserError(
            f"task {min(refused)!r} runs generated code or needs images; only text tasks can be scored here"
        )
    return tasks


def nearest(name: str, candidates: Iterable[str], otherwise: str) -> str:
    matches = difflib.get_close_matches(name, candidates, n=3, cutoff=0.5)
    return f"the nearest names are {', '.join(matches)}" if matches else otherwise


@contextmanager
def explained(what: str, advice: str) -> Iterator[None]:
    """Turn any error in a block, except a UserError, into the UserError "{what} ({error}); {advice}"."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # lm-eval, `datasets`, the hub's client and the user's code raise errors of many types
        raise UserError(f"{what} ({type(error).__name__}: {one_line(error)}); {advice}") from error


@contextmanager
def errors_only(library: str) -> Iterator[None]:
    """Silence a library's log messages below the level of errors."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet(progress_bars: bool = False) -> Iterator[None]:
    """Silence lm-eval's messages and, unless `progress_bars`, its progress bars."""
    env = _sandbox()
    is_outermost = "from_string" not in vars(env)
    if is_outermost:
        env.from_string = functools.cache(env.from_string)
    try:
        with errors_only("lm_eval"), nullcontext() if progress_bars else redirect_stderr(io.StringIO()):
            yield
    finally:
        if is_outermost:
            del env.from_string


@functools.cache
def _sandbox() -> Any:
    """Replace lm-eval's Jinja environment by a sandbox whose templates cannot reach Python; return the sandbox."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    original = utils.env
    utils.env = SandboxedEnvironment(undefined=original.undefined, keep_trailing_newline=original.keep_trailing_newline)
    utils.env.filters |= original.filters
    return utils.env


# --- suites by name -------------------------------------------------------------------------------------------------


def suite_names() -> list[str]:
    return sorted(path.stem for path in SUITES.glob("*.yaml"))


def suite_tasks(name: str) -> list[str] | None:
    """Return the tasks that a suite lists; None if there is no such suite.

    Raises UserError if its file is invalid, or refers to an unset `evaluate.path`.
    """
    path = SUITES / f"{name}.yaml"
    if name not in suite_names():
        return None
    try:
        tasks = yaml.safe_load(path.read_text(encoding="utf-8"))["tasks"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"suite {path} cannot be read ({type(error).__name__}); it must hold a list `tasks`") from error
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise UserError(f"tasks of suite {path} is {tasks!r}; it must be a list of names")
    if any("${" in task for task in tasks):
        raise UserError(
            f"evaluate.path is missing, and the suite {name} reads its tasks from it; set it to a folder of lm-eval "
            "YAML or a .jsonl file of questions, or give that to `isoflop evaluate` as --tasks"
        )
    return tasks


def expand(tasks: str | Sequence[str]) -> list[str]:
    """List the names of tasks, given as `"small"`, `"hellaswag,piqa@5"`, or a list; a suite is replaced by its tasks.

    Raises UserError if there are none.
    """
    entries = tasks.split(",") if isinstance(tasks, str) else list(tasks)
    names: dict[str, None] = {}
    for name in (entry.strip() for entry in entries if entry and entry.strip()):
        members = suite_tasks(name)
        names |= dict.fromkeys([name] if members is None else members)
    if not names:
        raise UserError(
            f"tasks is {tasks!r}; name a suite ({', '.join(name for name in suite_names() if name != 'none')}) "
            "or lm-eval tasks such as hellaswag,piqa"
        )
    return list(names)
