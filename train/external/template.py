"""The command of an external trainer: which fields its templates may name, and how they are filled in. Pure.

A template is written as for Python's str.format: {model.depth}, {optimizer.learning_rate:.3g}, and {{ for a brace.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from string import Formatter
from typing import Any

from ..config import RunConfig, flatten, run_id, to_dict
from ..errors import UserError
from ..flops import count_parameters
from ..schedule import decay_steps, warmup_steps

PROGRAM = "program"  # the folder in a run's folder in which its program is started: {run}
AT_START = ("run", "resume", "resumes", "port")  # fields that are known when the program starts
NUMBER = re.compile(r"\d+")


def fields_of(config: RunConfig) -> dict[str, Any]:
    """Return the fields that templates may name, except those of `AT_START`: a run's config, and what follows of it."""
    model = config.model
    values = {name: value for name, value in flatten(to_dict(config)).items() if not name.startswith("trainer.")}
    if model.size is None:
        values |= {"model.kv_heads": model.num_kv_heads, "model.hidden": model.mlp_hidden}
        values |= {"model.head_size": model.head_dim}
    else:
        values |= {name.removeprefix("model."): value for name, value in values.items() if "model.size." in name}
    values |= {"N": count_parameters(model).N_active, "tokens": config.D, "steps": config.steps}
    values |= {"batch_tokens": config.batch_tokens, "ranks": config.parallel.world_size, "run_id": run_id(config)}
    return values | {"warmup_steps": warmup_steps(config), "decay_steps": decay_steps(config)}


def check_command(config: RunConfig) -> None:
    """Raise UserError if a run's command is missing, cannot be split, or names a field that the run does not have."""
    trainer = config.trainer
    pieces, values = _pieces(config), fields_of(config)
    for name in (name for piece in pieces for name in _named(piece)):
        if name in AT_START:
            continue
        if name not in values:
            nearest = get_close_matches(name, [*values, *AT_START], n=3)
            near = f"did you mean {' or '.join(nearest)}? It" if nearest else "it"
            advice = f"{near} must be one of {', '.join((*AT_START, 'tokens', 'steps', 'ranks', 'N'))}, or a field"
            raise UserError(f"trainer.command names {{{name}}}; {advice} such as model.depth")
        if values[name] is None:
            raise UserError(f"trainer.command names {{{name}}}, which is null; set {name}, or leave it out")
    filled = command_line(config, Path(), 0)
    if not trainer.shell and trainer.folder is not None and not filled[0].strip():
        raise UserError(f"trainer.command is {trainer.command!r}; it must begin with a program")


def command_line(config: RunConfig, run: Path, port: int) -> list[str]:
    """Return the arguments with which a run's program is started.

    Files in the command are made absolute if they are in `trainer.folder`. An argument with {resume} is left out if
    the folder `run` has no checkpoint.
    """
    newest = newest_checkpoint(config, run)
    values = fields_of(config) | {"run": run, "port": port, "resume": newest or "", "resumes": newest is not None}
    if config.trainer.shell:
        quoted = {name: shlex.quote(_text(value)) for name, value in values.items()}
        return ["/bin/sh", "-c", _filled(str(config.trainer.command), quoted)]
    pieces = [piece for piece in _pieces(config) if newest is not None or "resume" not in _named(piece)]
    return [_absolute(_filled(piece, values), config.trainer.folder) for piece in pieces]


def newest_checkpoint(config: RunConfig, run: Path) -> Path | None:
    """Return the checkpoint in the program's folder with the largest last number in its name, or None."""
    found = [path for path in run.glob(config.trainer.checkpoints) if not path.name.startswith(".")]
    return max(found, key=lambda path: (step_of(path) or 0, path.stat().st_mtime_ns), default=None)


def step_of(checkpoint: Path) -> int | None:
    numbers = NUMBER.findall(checkpoint.stem if checkpoint.is_file() else checkpoint.name)
    return int(numbers[-1]) if numbers else None


def _pieces(config: RunConfig) -> list[str]:
    """Return the templates of the arguments; in a shell there is one."""
    command, shell = config.trainer.command, config.trainer.shell
    is_list = isinstance(command, list | tuple) and all(isinstance(piece, str | int | float) for piece in command)
    if not command or not (isinstance(command, str) or (is_list and not shell)):
        needed = "a text, because trainer.shell is true" if shell else "a text, or a list of a program and arguments"
        raise UserError(f"trainer.command is {command!r}; it must be {needed}")
    try:
        return [command] if shell else shlex.split(command) if isinstance(command, str) else [*map(str, command)]
    except ValueError as error:
        raise UserError(f"trainer.command is {command!r}, which cannot be split ({error}); close the quotes") from None


def _named(template: str) -> Iterator[str]:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        problem = f"trainer.command contains {template!r}, which cannot be read ({error})"
        raise UserError(f"{problem}; a brace that is no field must be doubled, as in {{{{") from None
    return (name for _, name, _, _ in parts if name is not None)


def _filled(template: str, values: Mapping[str, Any]) -> str:
    text = ""
    for literal, name, form, _ in Formatter().parse(template):
        text += literal
        try:
            text += "" if name is None else format(values[name], form) if form else _text(values[name])
        except (ValueError, TypeError) as error:
            raise UserError(f"trainer.command formats {{{name}}} as {form!r}, which it cannot be: {error}") from None
    return text


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _absolute(argument: str, folder: str | None) -> str:
    """Return the absolute path of an argument, or of the value of a --flag=value, that names a file in `folder`."""
    flag, equals, value = argument.rpartition("=")
    if folder is None or not value or os.path.isabs(value):
        return argument
    path = os.path.join(folder, value)
    return f"{flag}{equals}{os.path.abspath(path)}" if os.path.isfile(path) else argument
