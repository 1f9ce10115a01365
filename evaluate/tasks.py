"""Suites of lm-eval tasks, loaded once and asked many times.

Special here:
- Prompts, choices, filters and metrics are lm-eval's own (its YAML). For the tasks of the suite `small` only the data
  are redirected, to the files that `staging.py` keeps; they load in well under a second, without the index of all
  14,000 tasks. Every other lm-eval task or group goes lm-eval's usual way, by name.
- A suite scores a fixed subset of each task: items are ranked by a hash of (seed, task, place), so the choice is the
  same on every machine, forever, and a smaller limit is a subset of a larger one.
- Documents and requests are built once and used for checkpoint after checkpoint.
- lm-eval is imported where it is used: staging and listing need neither it nor torch.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..train.errors import UserError
from .staging import BENCHMARKS, Report, benchmarks_directory, is_staged, stage_benchmarks, staged_lines

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

__all__ = ["DEFAULT_LIMIT", "SUITES", "Suite", "SuiteTask", "benchmarks_directory", "choose_items", "is_staged",
           "load_suite", "stage_benchmarks", "task_names"]  # fmt: skip

SUITES: dict[str, tuple[str, ...]] = {"small": ("hellaswag", "arc_easy", "lambada_openai")}
DEFAULT_LIMIT = 100  # items a task
FEWSHOT_SEED = 1234  # lm-eval's default

# Where the definitions of the staged tasks lie inside lm-eval.
_DEFINITIONS = {
    "hellaswag": "hellaswag/hellaswag.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
}


@dataclass
class SuiteTask:
    """One lm-eval task with its chosen items.

    Attributes:
        task: the lm-eval task, its requests built.
        indices: places of the chosen items in the split, ascending.
        subset: what is recorded with a score: items, of, split, seed, source, and a SHA-256 of all prompts and answers.
        version: lm-eval's version of the task.
    """

    name: str
    task: Task
    indices: list[int]
    subset: dict[str, Any]
    version: Any


@dataclass
class Suite:
    """Tasks by name."""

    name: str
    tasks: dict[str, SuiteTask]


def task_names(tasks: str | Sequence[str]) -> list[str]:
    """Task names, with suites spelled out: `"small"`, `"hellaswag,piqa"`, or a list. No name comes twice.

    Raises:
        UserError: when none is named.
    """
    given = tasks.split(",") if isinstance(tasks, str) else list(tasks)
    names = [task for name in given if name.strip() for task in SUITES.get(name.strip(), (name.strip(),))]
    if not names:
        raise UserError(
            f"tasks is {tasks!r}; name a suite ({', '.join(SUITES)}) or lm-eval tasks such as hellaswag,piqa"
        )
    return list(dict.fromkeys(names))


def choose_items(name: str, count: int, limit: int | None, seed: int) -> list[int]:
    """Places of the items to score, ascending: the `limit` smallest by a hash.

    Not by a random generator, because its stream may change between library versions.
    """
    if limit is None or limit >= count:
        return list(range(count))
    ranked = sorted(range(count), key=lambda index: hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest())
    return sorted(ranked[:limit])


def load_suite(
    tasks: str | Sequence[str] = "small",
    limit: int | None = DEFAULT_LIMIT,
    *,
    seed: int = 0,
    cache: Path | str | None = None,
    progress: Report | None = None,
    manager: TaskManager | None = None,
) -> Suite:
    """Loads tasks, chooses their items and builds their requests.

    Args:
        tasks: a suite's name, task names with commas between, or a list of names.
        limit: items a task; None means all.
        seed: of the choice of items.
        cache: folder of the staged benchmarks; they are staged first where they are not there.
        progress: called with a line of text at each stage of that.
        manager: lm-eval's index of tasks; every name is looked up in it. Default: staged tasks need none, and it
            is built when another task is named (about 10 s).

    Raises:
        UserError: an unknown task (the nearest names are given), or data that cannot be had.
    """
    names = task_names(tasks)
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; it must be 1 or more items a task, or null for all of them")
    others = [name for name in names if manager is not None or name not in _DEFINITIONS]
    if others:
        with quiet():
            manager = manager or _task_manager()
        _check_names(others, manager)
    loaded: dict[str, SuiteTask] = {}
    for name in names:
        if name not in others:
            loaded[name] = _load_staged(name, limit, seed, stage_benchmarks(cache, progress))
        elif manager is not None:
            loaded |= _load_by_name(name, limit, seed, manager)
    return Suite(tasks if isinstance(tasks, str) else ",".join(tasks), loaded)


def _load_staged(name: str, limit: int | None, seed: int, directory: Path) -> SuiteTask:
    """lm-eval's definition with the data taken from the staged file; only the chosen items are ever parsed."""
    import datasets
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    split = BENCHMARKS[name].split
    lines = staged_lines(directory, name)
    indices = choose_items(name, len(lines), limit, seed)
    rows = [json.loads(lines[index]) for index in indices]
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    definition = Path(spec.submodule_search_locations[0]) / "tasks" / _DEFINITIONS[name]
    config: dict[str, Any] = load_yaml(definition) | {
        # Only the scored split is staged; without examples to draw from, a staged task is zero-shot.
        **{f"{kind}_split": split if kind == split else None for kind in ("training", "validation", "test")},
        "custom_dataset": lambda **_: {split: datasets.Dataset.from_list(rows)},
    }
    with quiet():
        task = TaskManager(include_defaults=False).load([config])["tasks"][name]
    return _freeze(name, task, indices, len(lines), seed, split, directory.name, already_chosen=True)


def _task_manager() -> TaskManager:
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _check_names(names: list[str], manager: TaskManager) -> None:
    known = sorted({*manager.all_tasks, *SUITES, *_DEFINITIONS})
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"the nearest names are {', '.join(near)}" if near else "`lm-eval ls tasks` lists the names"
            raise UserError(f"task {name!r} is not known to lm-eval; {hint}")


def _load_by_name(name: str, limit: int | None, seed: int, manager: TaskManager) -> dict[str, SuiteTask]:
    """A task, or every task of a group or a tag, with data from wherever its definition says."""
    try:
        with quiet():
            tasks = manager.load([name])["tasks"]
    except Exception as error:  # the hub's client, its HTTP library and `datasets` each raise their own kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"task {name!r} cannot be loaded ({type(error).__name__}: {reason}); its data come from the Hugging Face "
            f"Hub, without which {', '.join(_DEFINITIONS)} are what `isoflop data benchmarks` provides"
        ) from error
    result = {}
    for leaf, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(f"task {leaf!r} runs generated code or needs images; only text tasks can be scored here")
        count = len(task.eval_docs)
        split = "test" if task.has_test_docs() else "validation"
        source = str(task.config.dataset_path)
        indices = choose_items(leaf, count, limit, seed)
        result[leaf] = _freeze(leaf, task, indices, count, seed, split, source, already_chosen=False)
    return result


def _frozen_class(base: Any) -> Any:
    """A task class whose documents are the chosen ones, and whose requests are built only once.

    lm-eval's evaluator asks a task for documents and requests anew for every model; neither depends on the model.
    """

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


def _freeze(
    name: str, task: Any, indices: list[int], count: int, seed: int, split: str, source: str, already_chosen: bool
) -> SuiteTask:
    with quiet():
        docs = task.eval_docs
        task.frozen_docs = list(docs) if already_chosen else [docs[index] for index in indices]
        task.frozen_instances = []
        task.__class__ = _frozen_class(task.__class__)
        # As lm-eval's simple_evaluate does before it evaluates.
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        task.build_all_requests(limit=None, samples=None, rank=0, world_size=1)
    content = [
        [list(instance.args) for instance in task.instances],
        [task.doc_to_target(doc) for doc in task.frozen_docs],
    ]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    subset = {"items": len(indices), "of": count, "split": split, "seed": seed, "source": source, "sha256": digest}
    return SuiteTask(name, task, indices, subset, task.VERSION)


@contextlib.contextmanager
def quiet(progress_bars: bool = False) -> Iterator[None]:
    """Keeps lm-eval's remarks, and unless `progress_bars` what it draws, off the screen; errors still raise."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.nullcontext() if progress_bars else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
