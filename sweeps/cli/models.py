"""The commands that carry models to and from other libraries: `isoflop export`, `isoflop import`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .sweep import Json, show

if TYPE_CHECKING:
    from ...evaluate.export.model_card import Facts

app = typer.Typer()
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the folder holds.")]


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a run directory (its newest).", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(help="A folder, new or empty.", show_default=False)],
    format: Annotated[str, typer.Option(help="hf: what transformers loads, and llama.cpp converts.")] = "hf",
    dtype: Annotated[str, typer.Option(help="Of the weights: fp32 or bf16.")] = "fp32",
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Writes a checkpoint as a folder that other libraries load, with a model card."""
    from ...evaluate.export.export import export_checkpoint
    from ...train.checkpoint.checkpoint import find

    path = find(checkpoint)
    done = export_checkpoint(path, output, format=format, dtype=dtype, overwrite=overwrite, facts=facts_about(path))
    said = {"folder": str(done.folder), "architecture": done.architecture, "dtype": dtype, "files": done.files}
    show(said, as_json, lambda said: print(f"{said['folder']}: {said['architecture']}, {', '.join(said['files'])}"))


@app.command(name="import")
def import_model(
    folder: Annotated[
        Path, typer.Argument(help="With config.json, safetensors and tokenizer.json.", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(help="A folder, new or empty.", show_default=False)],
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Context of the checkpoint; default: max_position_embeddings.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Makes a checkpoint of a Hugging Face folder (Llama, Mistral, Qwen3), to be scored, asked and exported."""
    from ...evaluate.export.hf_import import import_checkpoint

    path = import_checkpoint(folder, output, sequence_length=sequence_length, overwrite=overwrite)
    show({"checkpoint": str(path)}, as_json, lambda said: print(f"checkpoint: {said['checkpoint']}"))


def facts_about(checkpoint: Path) -> Facts:
    """What the files around a checkpoint say of it: scores, its sweep's law and provenance; each where there is one."""
    from importlib.metadata import version

    from ...evaluate.export.model_card import Facts
    from ...train.files import read_json
    from ..results.tracking import PROVENANCE

    run = checkpoint.parent.parent
    sweep = run.parent.parent
    summary = read_json(run / "summary.json") or {}
    if summary.get("step") != int(checkpoint.name.removeprefix("step_")):
        summary = {}
    scores = read_json(run / "eval" / f"{checkpoint.name}.json") or read_json(checkpoint / "scores.json") or {}
    held_out = {name: summary.get(name) for name in ("val_loss", "val_loss_se", "val_bpb")}
    if not (scores.get("held_out") or {}).get("val_loss"):
        scores = scores | {"held_out": held_out}
    settings = _settings(sweep / "sweep.yaml")
    return Facts(
        scores=scores,
        law=_law(sweep / "fit" / "law.json", summary),
        provenance={name: settings.get(name) for name in PROVENANCE},
        version=version("isoflop"),
    )


def _settings(path: Path) -> dict[str, Any]:
    from ..runs.directory import yaml_or_empty

    return yaml_or_empty(path)


def _law(path: Path, summary: dict[str, Any]) -> dict[str, Any] | None:
    """What the sweep's law says of a finished run's N and D; None where there is no law, or none that this reads."""
    from ... import fit

    if not path.is_file() or not summary:
        return None
    try:
        law = fit.read_law(path)
        inputs = {"N": summary["N_total"], "D": summary["D"]}
        interval = None
        if law.draws_ is not None:
            low, high = law.predict_interval(**inputs)
            interval = (float(low), float(high))
        return {"form": law.form, "predicted_loss": float(law.predict(**inputs)), "interval": interval}
    except fit.InputError:
        return None
