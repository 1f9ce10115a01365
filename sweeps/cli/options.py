"""What all commands share: options.yaml describes their parameters, and a result is printed as JSON or for people."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import yaml

Command = Callable[..., None]
# The loader in C takes a tenth of the time, and every command waits for it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
ABOUT = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), _LOADER)


def command(app: typer.Typer, name: str, **details: Any) -> Callable[[Command], Command]:
    """Registers a function as a command, with its parameters as options.yaml describes them."""

    def register(function: Command) -> Command:
        described = ABOUT["shared"] | ABOUT.get(function.__name__, {})
        for parameter, kind in get_type_hints(function).items():
            if (about := described.get(parameter)) is None:
                continue
            about = {"help": about} if isinstance(about, str) else dict(about)
            # With a flag of its own a truth value has no --no-flag beside it.
            flags = about.pop("flags", [f"--{parameter.replace('_', '-')}"])
            argument = about.pop("argument", None)
            described_as = (
                typer.Argument(help=argument, show_default=False) if argument else typer.Option(*flags, **about)
            )
            function.__annotations__[parameter] = Annotated[kind, described_as]
        return app.command(name, **details)(function)

    return register


def show(
    value: Any, as_json: bool, pretty: Callable[[Any], None], plain: Callable[[Any], Any] = lambda value: value
) -> None:
    """Prints a result as JSON, or for people."""
    if as_json:
        print(json.dumps(plain(value), indent=1, allow_nan=False))
    else:
        pretty(value)
