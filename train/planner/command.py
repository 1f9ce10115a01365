"""The command of an external trainer: templates as of Python's str.format, such as {model.depth} or {tokens:.3g}."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from string import Formatter
from typing import Any

from ..config import RunConfig, flatten, run_id, to_dict
from ..errors import UserError
from ..files import read_document
from ..flops import count_parameters
from ..schedule import decay_steps, warmup_steps

PROGRAM = "program"  # the folder in a run's folder that belongs to its program: {run}


def fields_of(config: RunConfig) -> dict[str, Any]:
    """Return the fields that templates may name, except {run} and {resume}."""
    model = config.model
    values = flatten(to_dict(config))
    values |= {f"size.{name}": value for name, value in (model.size if isinstance(model.size, dict) else {}).items()}
    values |= {"model.kv_heads": model.num_kv_heads, "model.hidden": model.mlp_hidden}
    values |= {"tokens": config.D, "steps": config.steps, "batch_tokens": config.batch_tokens, "run_id": run_id(config)}
    values |= {"N": count_parameters(model).N_active, "ranks": config.parallel.world_size}
    values |= {"warmup_steps": warmup_steps(config), "decay_steps": decay_steps(config)}
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}


def check_command(config: RunConfig) -> None:
    """Raise UserError if a run's command is missing, cannot be read, or names a field that the run does not have."""
    command, values = config.trainer.command, {"run": "", "resume": ""} | fields_of(config)
    if not command or not isinstance(command, str if config.trainer.shell else str | list):
        needed = "a text" + " or a list of a program and its arguments" * (not config.trainer.shell)
        raise UserError(f"trainer.command is {command!r}; it must be {needed}")
    for setting in ("checkpoints", "metrics", "hf_folder"):
        if (glob := getattr(config.trainer, setting)) is not None and (not glob or glob[0] == "/"):
            raise UserError(f"trainer.{setting} is {glob!r}; it must be a glob in {{run}}, such as checkpoint-*")
    try:
        for name in (name for piece in _pieces(config) for _, name, _, _ in Formatter().parse(piece)):
            if name is not None and values.get(name) is None:
                near = get_close_matches(name, [*values, "size.N"], n=3) or ["run", "tokens", "model.depth"]
                problem = f"is not a field of a run; it may name {', '.join(near)}"
                problem = "is null; set it, or leave it out of the command" if name in values else problem
                raise UserError(f"trainer.command names {{{name}}}, which {problem}")
        command_line(config, Path(os.devnull))
    except (ValueError, TypeError) as error:
        problem = f"trainer.command is {command!r}, which cannot be filled in ({error})"
        raise UserError(f"{problem}; close quotes, and double a brace that is no field, as in {{{{") from None


def command_line(config: RunConfig, folder: Path) -> list[str]:
    """Return the arguments with which a program is started; without a checkpoint, those with {resume} are left out."""
    newest = newest_checkpoint(config, folder)
    values = fields_of(config) | {"run": folder, "resume": newest[-1] if newest else ""}
    if config.trainer.shell:
        return ["/bin/sh", "-c", _filled(config.trainer.command, values, shlex.quote)]
    pieces = [piece for piece in _pieces(config) if newest or "{resume" not in piece]
    return [_absolute(_filled(piece, values), config.trainer.folder or "") for piece in pieces]


def newest_checkpoint(config: RunConfig, folder: Path) -> tuple[int, int, Path] | None:
    """Return the last number in the name, the time and the path of the checkpoint for which they are largest."""
    numbered = ((re.findall(r"\d+", path.stem), path) for path in folder.glob(config.trainer.checkpoints))
    return max(((int((n or [0])[-1]), path.stat().st_mtime_ns, path) for n, path in numbered), default=None)


def model_folder(config: RunConfig, folder: Path) -> Path | None:
    """Return the newest Hugging Face folder that a program left, or None."""
    glob = config.trainer.hf_folder
    files = folder.glob(f"{glob}/config.json") if glob is not None else ()
    return max((file.parent for file in files), key=lambda path: path.stat().st_mtime_ns, default=None)


def _pieces(config: RunConfig) -> list[str]:
    command = config.trainer.command
    text = shlex.split(command) if isinstance(command, str) and not config.trainer.shell else command
    return [text] if isinstance(text, str) else [str(piece) for piece in text]


def _filled(template: str, values: Mapping[str, Any], quoted: Callable[[str], str] = str) -> str:
    parts = Formatter().parse(template)
    return "".join(text + (quoted(format(values[name], form or "")) if name else "") for text, name, form, _ in parts)


def _absolute(argument: str, folder: str) -> str:
    """Return an argument, or --flag=value, with the absolute path of a file that it names in `folder`."""
    flag, equals, value = argument.rpartition("=")
    path = os.path.abspath(os.path.join(folder, value))
    return f"{flag}{equals}{path}" if folder and os.path.isfile(path) else argument


def read_sizes(sizes: Any) -> list[dict[str, Any]]:
    """Return the rows of trainer.sizes, which may be a YAML file, by rising N."""
    advice = "trainer.sizes must be rows such as {N: 1.2e8, n_layer: 12}, of different N from 1 to 1e15"
    rows: Any = read_document(Path(sizes), list[dict[str, Any]], remedy=advice) if isinstance(sizes, str) else sizes
    try:
        ordered = {float(row["N"]): row for row in rows}
        if not rows or len(ordered) < len(rows) or not 1 <= min(ordered) <= max(ordered) <= 1e15:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise UserError(f"trainer.sizes is {str(sizes)[:200]}; {advice}") from None
    return [ordered[N] | {"N": N} for N in sorted(ordered)]
