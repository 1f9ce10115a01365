"""Parameters and output that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ...train.errors import UserError

EXAMPLES = {"bounds": "code=0.1:0.6,prose=0:1", "speedup": "mxfp4=2.0,int8=1.5"}  # of options that `by_name` reads
Sweep = Annotated[Path, typer.Argument(help="A sweep directory, such as outputs/chinchilla.", show_default=False)]
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint, or a run directory (newest one).", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ChangesAsJson = Annotated[bool, typer.Option("--json", help="Print the changed runs as JSON.")]
Speedup = Annotated[
    str | None,
    typer.Option(help="How many times as fast as unquantized runs formats train, as in mxfp4=2.0,int8=1.5."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder's content.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Average = Annotated[
    float | None,
    typer.Option(
        help="Use the average of the weights over this span (of a run with average.kind) instead of the weights."
    ),
]


def show(
    value: Any, as_json: bool, pretty: Callable[[Any], None], plain: Callable[[Any], Any] = lambda value: value
) -> None:
    """Print `plain(value)` as JSON if `as_json`, else call `pretty(value)`, which prints it."""
    if as_json:
        print(json.dumps(plain(value), indent=1, allow_nan=False))
    else:
        pretty(value)


def by_name(option: str, text: str) -> dict[str, Any]:
    """Parse code=0.5,prose=0.5, or code=0.1:0.6 of --bounds."""
    ends, example = 1 + (option == "bounds"), EXAMPLES.get(option, "code=0.5,prose=0.5")
    try:
        pairs = (part.split("=") for part in text.split(","))
        values = {name.strip(): tuple(map(float, numbers.split(":"))) for name, numbers in pairs}
    except ValueError:
        values = {"": ()}
    if any(len(numbers) != ends for numbers in values.values()):
        raise UserError(f"--{option} is {text!r}; it must give a number for each name, as in {example}")
    return {name: numbers if ends == 2 else numbers[0] for name, numbers in values.items()}
