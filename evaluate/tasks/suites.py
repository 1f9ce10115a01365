"""Suites: lists of tasks in conf/evaluate, the files that Hydra reads too.

Special here:
- `isoflop evaluate --tasks small` and `python sweep.py evaluate=small` mean the same, because both read one file.
- Only the list `tasks` is read here; the other keys are a sweep's. A suite may name another suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from ...train.errors import UserError

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "evaluate"


def suite_names(folder: Path = FOLDER) -> list[str]:
    """The suites that there are."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def suite_tasks(name: str, folder: Path = FOLDER) -> list[str] | None:
    """The tasks that a suite lists; None: there is no suite of this name.

    Raises:
        UserError: the file is no list of tasks, or one that waits for a path.
    """
    path = folder / f"{name}.yaml"
    if name not in suite_names(folder):
        return None
    try:
        tasks = yaml.safe_load(path.read_text(encoding="utf-8"))["tasks"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"suite {path} cannot be read ({type(error).__name__}); it must hold a list `tasks`") from error
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise UserError(f"tasks of suite {path} is {tasks!r}; it must be a list of names")
    if any("${" in task for task in tasks):
        raise UserError(
            f"evaluate.path is missing; the suite {name} takes its tasks from there: give evaluate.path=FOLDER to a "
            "sweep, or --tasks FOLDER to `isoflop evaluate`, a folder of lm-eval YAML or a .jsonl of questions"
        )
    return tasks


def expand(tasks: str | Sequence[str], folder: Path = FOLDER) -> list[str]:
    """Tasks as written, with suites spelled out: `"small"`, `"hellaswag,piqa@5"`, or a list. None comes twice.

    Raises:
        UserError: when none is named.
    """
    given = tasks.split(",") if isinstance(tasks, str) else list(tasks)
    names = list(dict.fromkeys(_spelled_out([name.strip() for name in given if name and name.strip()], folder, ())))
    if not names:
        raise UserError(
            f"tasks is {tasks!r}; name a suite ({', '.join(name for name in suite_names(folder) if name != 'none')}) "
            "or lm-eval tasks such as hellaswag,piqa"
        )
    return names


def _spelled_out(names: list[str], folder: Path, within: tuple[str, ...]) -> list[str]:
    result = []
    for name in names:
        members = None if name in within else suite_tasks(name, folder)
        result += [name] if members is None else _spelled_out(members, folder, (*within, name))
    return result
