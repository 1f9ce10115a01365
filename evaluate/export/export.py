"""Export a checkpoint as a Hugging Face folder (Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE or GLM-4-MoE).

Hugging Face's libraries are not used, and the folder appears whole or not at all. A model that transformers would
compute differently is refused with the field's name; the model card states smaller differences.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...train.checkpoint.checkpoint import LoadedCheckpoint, find, load_for_evaluation
from ...train.errors import UserError
from ...train.files import put_in_place, temporary_directory_beside, write_json
from . import hf
from .model_card import Facts, model_card

_WEIGHTS, _CONFIG, _GENERATION = "model.safetensors", "config.json", "generation_config.json"
# --overwrite replaces only a folder that holds nothing but these files.
_WRITTEN = {"README.md", _CONFIG, _WEIGHTS, _GENERATION, *hf.TOKENIZER_FILES}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Exported:
    folder: Path
    architecture: str
    files: list[str]


def export_checkpoint(
    path: Path | str,
    output: Path | str,
    *,
    format: str = "hf",
    dtype: str = "fp32",
    average: float | None = None,
    overwrite: bool = False,
    facts: Facts | None = None,
) -> Exported:
    """Write a Hugging Face folder with weights, settings, tokenizer and model card.

    Args:
        path: Checkpoint, or run directory (its newest valid checkpoint is used).
        output: Folder to write.
        format: Only "hf".
        dtype: Type of the weights, fp32 or bf16.
        average: Span of the weight average to export, as a share of the steps so far; None exports the weights.
        overwrite: Whether an earlier export may be replaced.
        facts: Facts for the model card that the checkpoint lacks.

    Raises:
        UserError: There is no checkpoint, an argument is invalid, Hugging Face has no such architecture, or the folder
            is not empty.
    """
    if format == "gguf":
        raise UserError("--format is 'gguf'; use hf, and convert the folder with llama.cpp's convert_hf_to_gguf.py")
    if format != "hf":
        raise UserError(f"--format is {format!r}; it must be hf")
    if dtype not in _DTYPES:
        raise UserError(f"--dtype is {dtype!r}; it must be one of {', '.join(_DTYPES)}")
    path, output = find(path), Path(output)
    _check_free(output, overwrite, path)
    loaded = load_for_evaluation(path, average=average)
    with temporary_directory_beside(output) as temporary:
        architecture = _write_hf(loaded, temporary, dtype)
        (temporary / "README.md").write_text(model_card(loaded, facts or Facts()), encoding="utf-8")
        put_in_place(temporary, output)
    return Exported(output, architecture, sorted(file.name for file in output.iterdir()))


def _check_free(output: Path, overwrite: bool, source: Path) -> None:
    """Raise UserError unless `output` is new, empty, or an earlier export that may be replaced."""
    if output.is_symlink():
        raise UserError(f"{output} is a link; it must be a folder, new or empty")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise UserError(f"{output} is not empty; choose another folder, or add --overwrite to replace it")
        if source.resolve().is_relative_to(output.resolve()):
            raise UserError(f"{output} holds {source.name}, the checkpoint to export; choose another folder")
        foreign = sorted(file.name for file in output.iterdir() if file.name not in _WRITTEN)
        if foreign:
            raise UserError(
                f"{output} holds {foreign[0]}, which is not from an export, so it is kept; choose another folder"
            )
    elif output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; it must be a folder, new or empty")


def _write_hf(loaded: LoadedCheckpoint, folder: Path, dtype: str) -> str:
    model, length = loaded.config.model, loaded.config.data.sequence_length
    architecture, end = hf.ARCHITECTURES[hf.model_type(model, length)], loaded.tokenizer.end_of_document
    tensors = {
        # transformers keeps the biases that choose experts in fp32.
        name: weight if name.endswith("e_score_correction_bias") else weight.to(_DTYPES[dtype])
        for name, weight in hf.to_hf(loaded.model).items()
    }
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    os.chmod(folder / _WEIGHTS, 0o644)
    write_json(folder / _CONFIG, hf.hf_config(model, length, end, str(_DTYPES[dtype]).removeprefix("torch.")))
    write_json(folder / _GENERATION, dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end))
    hf.write_tokenizer(loaded.tokenizer, loaded.path / "tokenizer", length, folder)
    return architecture
