"""Loaded tasks: which items of each are scored, and requests that are built once and asked of many checkpoints.

Special here:
- A suite scores a fixed subset of each task: items are ranked by a hash of (seed, task, place), so the choice is the
  same on every machine, forever, and a smaller limit is a subset of a larger one.
- lm-eval's evaluator asks a task for documents and requests anew for every model; a frozen task answers with the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.api.task import Task

FEWSHOT_SEED = 1234  # lm-eval's default


@dataclass
class SuiteTask:
    """One lm-eval task with its chosen items.

    Attributes:
        task: the lm-eval task, its requests built.
        indices: places of the chosen items in the split, ascending.
        subset: what is recorded with a score: items, of, split, seed, source, a SHA-256 of all prompts, answers,
            metrics and filters, and where there is something to say, `examples` (where a prompt's examples are from)
            and `note`.
        version: lm-eval's version of the task.
        shots: examples in each prompt.
    """

    name: str
    task: Task
    indices: list[int]
    subset: dict[str, Any]
    version: Any
    shots: int = 0


@dataclass
class Suite:
    """Tasks by name."""

    name: str
    tasks: dict[str, SuiteTask]


def choose_items(name: str, count: int, limit: int | None, seed: int) -> list[int]:
    """Places of the items to score, ascending: the `limit` smallest by a hash.

    Not by a random generator, because its stream may change between library versions.
    """
    if limit is None or limit >= count:
        return list(range(count))
    ranked = sorted(range(count), key=lambda index: hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest())
    return sorted(ranked[:limit])


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


def freeze(
    name: str, task: Any, indices: list[int], count: int, seed: int, split: str, source: str, already_chosen: bool,
    shots: int | None = None, **remarks: Any,
) -> SuiteTask:  # fmt: skip
    """Builds a task's requests, once for every checkpoint to come.

    Args:
        name: under which it is scored.
        task: the lm-eval task; it is changed and must not be used again.
        indices: places of the chosen items in the split, ascending.
        count: items in the split.
        seed: of the choice.
        split: where the items are from, and `source`: the dataset.
        already_chosen: whether the task holds the chosen items alone, in that order.
        shots: examples in each prompt; None: as the task's definition says.
        remarks: what else is recorded in `subset`.
    """
    with quiet():
        docs = task.eval_docs
        task.frozen_docs = list(docs) if already_chosen else [docs[index] for index in indices]
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
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=_written).encode()).hexdigest()
    subset = {"items": len(indices), "of": count, "split": split, "seed": seed, "source": source, "sha256": digest}
    return SuiteTask(name, task, indices, subset | remarks, task.VERSION, shots)


def _written(value: Any) -> str:
    """A function by its name, for where it lies in memory is another thing in every process."""
    return str(getattr(value, "__qualname__", value))


@contextlib.contextmanager
def quiet(progress_bars: bool = False) -> Iterator[None]:
    """Around calls into lm-eval: its remarks, and unless `progress_bars` what it draws, stay off the screen; errors
    still raise. And a template is compiled once, where lm-eval does it anew for every document.
    """
    from lm_eval.utils import env

    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    is_outermost = "from_string" not in vars(env)
    if is_outermost:
        env.from_string = functools.cache(env.from_string)
    try:
        with contextlib.nullcontext() if progress_bars else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if is_outermost:
            del env.from_string
