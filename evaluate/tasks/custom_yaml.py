"""Tasks of one's own in lm-eval's YAML.

Special here:
- lm-eval's own task classes do the work, without its index of 14,000 tasks. What lm-eval passes over in silence (YAML
  that does not parse, two tasks of one name) is an error here; files are found beside the YAML, not in the working
  directory; `include` also finds lm-eval's own templates, by their path under lm_eval/tasks.
- `!function` runs Python code that lies in the folder: whoever names a folder trusts it.
"""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...train.errors import UserError
from .suite import SuiteTask, choose_items, freeze, quiet

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager


def load_yaml_tasks(
    folder: Path, files: list[Path], shots: int, limit: int | None, seed: int
) -> dict[str, SuiteTask]:  # fmt: skip
    """Every task that the files define, groups spelled out; see `custom.load_custom`.

    Args:
        folder: named in complaints.
        files: the .yaml files; what has neither `task` nor `group` is a template for others to include.
        shots: examples before each question; 0: as each definition says.
        limit: items a task; None means all.
        seed: of the choice of items.

    Raises:
        UserError: a file, a name, an include, data or a template that cannot be used.
    """
    from lm_eval.tasks import TaskManager

    with quiet():
        manager = TaskManager(include_defaults=False)
        names = _index(folder, files, manager)
        _check_members(folder, manager)
    result: dict[str, SuiteTask] = {}
    for name in names:
        for leaf, task in _build(folder, name, manager).items():
            written = written_name(leaf, shots)
            if written not in result:  # a group comes before its tasks: they are as it wants them
                result[written] = _frozen(folder, leaf, task, shots, limit, seed)
    return result


def _index(folder: Path, files: list[Path], manager: TaskManager) -> list[str]:
    """Puts what the files define into lm-eval's index. Returns the names of groups and tasks, groups first."""
    from lm_eval.tasks._index import Kind, TaskIndex

    index = manager.task_index
    defined: dict[str, Path] = {}
    for path in files:
        config = _read_yaml(path)
        if not {"task", "group", "class"} & config.keys() or not (config.get("task") or config.get("group")):
            continue  # a template, for others to include
        name = config["group"] if "group" in config else config["task"]
        if not isinstance(name, str):
            raise UserError(f"{path}: its name is {name!r}; task or group must be a text")
        if name in defined:
            raise UserError(f"task {name!r} is defined in {defined[name]} and in {path}; names must differ")
        defined[name] = path
        TaskIndex.process_cfg(config, path, index)
        index[name].yaml_path = None  # lm-eval would read the file once more, and not find what was found here
    if not defined:
        where = files[0] if len(files) == 1 else folder
        raise UserError(f"{where} defines no task; tasks are lm-eval YAML files (*.yaml) with a `task`")
    return sorted(defined, key=lambda name: (index[name].kind is not Kind.GROUP, name))


def _read_yaml(path: Path, including: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One YAML file with what it includes, local data files as absolute paths."""
    from lm_eval.tasks._yaml_loader import load_yaml

    path = path.resolve()
    if path in including:
        raise UserError(f"{path} includes itself by way of {including[-1]}; includes must not go in a circle")
    try:
        config = load_yaml(path, recursive=False)
    except Exception as error:  # YAML's own kinds, and whatever the module of a !function raises
        raise UserError(
            f"{path} cannot be loaded ({_in_a_line(error)}); it must be a task in lm-eval's YAML"
        ) from error
    _resolve_data(config, path.parent)
    merged: dict[str, Any] = {}
    includes = config.pop("include", [])
    for include in includes if isinstance(includes, list) else [includes]:
        found = next((base / include for base in (path.parent, _lm_eval_tasks()) if (base / include).is_file()), None)
        if found is None:
            raise UserError(
                f"{path} includes {include!r}; it must be a file beside it, or one of lm-eval's own such as "
                "hellaswag/hellaswag.yaml"
            )
        included = _read_yaml(found, (*including, path))
        included.pop("task_list", None)  # as lm-eval: it belongs to the included file alone
        merged |= included
    return merged | config


def _lm_eval_tasks() -> Path:
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "tasks"


def _resolve_data(config: dict[str, Any], folder: Path) -> None:
    """Makes paths of data that exist beside the YAML absolute; all else (names on the Hub, URLs) stays as it is."""
    for member in config["task"] if isinstance(config.get("task"), list) else []:
        if isinstance(member, dict):  # a group may define its tasks in place
            _resolve_data(member, folder)

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: resolved(one) for key, one in value.items()}
        if isinstance(value, list):
            return [resolved(one) for one in value]
        return str(folder / value) if isinstance(value, str) and (folder / value).exists() else value

    if isinstance(options := config.get("dataset_kwargs"), dict):
        config["dataset_kwargs"] = options | {
            key: resolved(options[key]) for key in ("data_files", "data_dir") if key in options
        }
    name = config.get("dataset_path")
    if isinstance(name, str) and "/" in name and (folder / name).is_dir():
        config["dataset_path"] = str(folder / name)


def _check_members(folder: Path, manager: TaskManager) -> None:
    """lm-eval takes a name that it does not know for the definition of a new task, and fails far from there."""
    for name, entry in list(manager.task_index.items()):
        members = entry.cfg.get("task") if entry.cfg and "group" in entry.cfg else None
        for member in members if isinstance(members, list) else []:
            if isinstance(member, str) and member not in manager.task_index:
                near = difflib.get_close_matches(member, manager.task_index, n=3, cutoff=0.5)
                hint = f"the nearest names are {', '.join(near)}" if near else "it must be defined in the same folder"
                raise UserError(f"group {name!r} of {folder} has the task {member!r}, which is not defined; {hint}")


def _build(folder: Path, name: str, manager: TaskManager) -> dict[str, Task]:
    try:
        with quiet():
            tasks: dict[str, Task] = manager.load([name])["tasks"]
    except (
        Exception
    ) as error:  # the hub's client, `datasets`, lm-eval and code of the user's each raise their own kinds
        raise UserError(
            f"task {name!r} of {folder} cannot be loaded ({type(error).__name__}: {_in_a_line(error)}); "
            "look at its YAML and its data"
        ) from error
    for leaf, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(f"task {leaf!r} runs generated code or needs images; only text tasks can be scored here")
    return tasks


def _frozen(folder: Path, name: str, task: Any, shots: int, limit: int | None, seed: int) -> SuiteTask:
    written = written_name(name, shots)
    task.set_config(key="task", value=written)
    try:
        count = len(task.eval_docs)
        indices = choose_items(name, count, limit, seed)
        split = "test" if task.has_test_docs() else "validation"
        return freeze(
            written, task, indices, count, seed, split, folder.name, already_chosen=False, shots=shots or None
        )
    except Exception as error:  # code and templates of the user's run here: any kind
        raise UserError(
            f"task {name!r} of {folder} cannot build its prompts ({type(error).__name__}: {_in_a_line(error)}); "
            f"look at its YAML and its data{', which must hold enough examples' if shots else ''}"
        ) from error


def _in_a_line(error: Exception) -> str:
    return " ".join((str(error).strip() or type(error).__name__).split())[:200]


def written_name(name: str, shots: int) -> str:
    """Under which a task with that many examples is scored."""
    return f"{name}@{shots}" if shots else name
