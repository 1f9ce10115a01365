"""The command that chooses the weights of a mixture's domains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...train.errors import UserError
from .options import AsJson, show

app = typer.Typer()


@app.command("mix")
def mix_command(
    source: Annotated[Path, typer.Argument(help="A sweep, or a table with weight_DOMAIN and loss_DOMAIN.")],
    target: Annotated[str | None, typer.Option(help="Weights of the losses, as in code=0.5,prose=0.5.")] = None,
    flops: Annotated[float | None, typer.Option("--target-flops", "--flops", help="6ND of the planned run.")] = None,
    N: Annotated[float | None, typer.Option("--N", "--n", help="Parameters of the planned run.")] = None,
    D: Annotated[float | None, typer.Option("--D", "--d", help="Training tokens of the planned run.")] = None,
    max_epochs: Annotated[float | None, typer.Option(help="Most passes over a domain's unique tokens.")] = None,
    base: Annotated[str | None, typer.Option(help="The mixture to beat, as in code=0.7,prose=0.3.")] = None,
    bounds: Annotated[str | None, typer.Option(help="Ranges of weights, as in code=0.1:0.6.")] = None,
    unique: Annotated[str | None, typer.Option(help="Unique tokens of domains, as in code=5e8.")] = None,
    level: Annotated[float, typer.Option(help="Probability of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the resamples.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for law.json and the report.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the weights of a mixture's domains, with intervals and the gain over a base mixture.

    By default the planned run is the largest, the target and base are the sweep's, and bounds those of the runs.
    """
    from ..results.mixture import print_mixture, study_mixtures

    texts = {"target": target, "base": base, "bounds": bounds, "unique": unique}
    options = {name: by_domain(name, text) for name, text in texts.items() if text is not None}
    study = study_mixtures(source, seed, N=N, D=D, flops=flops, max_epochs=max_epochs, level=level, **options)
    if output is not None:
        study.write(output, source.resolve().stem, {"table": source})
    show(study.to_dict(), as_json, print_mixture)
    if output is not None and not as_json:
        print(f"report: {output / 'report.html'}")


def by_domain(option: str, text: str) -> dict[str, Any]:
    """Parse code=0.5,prose=0.5, or code=0.1:0.6 of --bounds."""
    ends, accepted = (2, "code=0.1:0.6,prose=0:1") if option == "bounds" else (1, "code=0.5,prose=0.5")
    try:
        pairs = (part.split("=") for part in text.split(","))
        values = {name.strip(): tuple(map(float, numbers.split(":"))) for name, numbers in pairs}
    except ValueError:
        values = {"": ()}
    if any(len(numbers) != ends for numbers in values.values()):
        raise UserError(f"--{option} is {text!r}; it must give a number for each domain, as in {accepted}")
    return {name: numbers if ends == 2 else numbers[0] for name, numbers in values.items()}
