"""Parameters and output that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Sweep = Annotated[Path, typer.Argument(help="A sweep directory, such as outputs/chinchilla.", show_default=False)]
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint, or a run directory (newest one).", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ChangesAsJson = Annotated[bool, typer.Option("--json", help="Print the changed runs as JSON.")]
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
