"""A checkpoint as a Hugging Face folder, written without their libraries: it appears whole or not at all.

What the other side would compute differently is refused, or said in the model card.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...train.checkpoint.checkpoint import LoadedCheckpoint, find, load_for_evaluation
from ...train.errors import UserError
from ...train.files import put_in_place, read_json, temporary_directory_beside, write_json
from .hf_tokenizer import content_of, write_tokenizer
from .hf_weights import ARCHITECTURES, hf_config, model_type, to_hf, window_of
from .model_card import Facts, imported_from, model_card

# What an export writes; only a folder of such files, or of an import, is ever replaced.
_WRITTEN = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
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
    overwrite: bool = False,
    facts: Facts | None = None,
) -> Exported:
    """Writes a Hugging Face folder with weights, settings, tokenizer and model card (of `facts`).

    `path` is a checkpoint or a run directory (its newest valid checkpoint), `dtype` fp32 or bf16.

    Raises:
        UserError: no checkpoint, an unknown format or dtype, or a folder that is not empty.
    """
    if format == "gguf":
        raise UserError("--format is 'gguf'; export with --format hf, and llama.cpp's convert_hf_to_gguf.py reads that")
    if format != "hf":
        raise UserError(f"--format is {format!r}; it must be hf")
    if dtype not in _DTYPES:
        raise UserError(f"--dtype is {dtype!r}; it must be one of {', '.join(_DTYPES)}")
    path, output = find(path), Path(output)
    check_free(output, overwrite, path)
    loaded = load_for_evaluation(path)
    with temporary_directory_beside(output) as temporary:
        architecture = _write_hf(loaded, temporary, dtype)
        (temporary / "README.md").write_text(model_card(loaded, facts or Facts(), _notes(loaded)), encoding="utf-8")
        put_in_place(temporary, output)
    return Exported(output, architecture, sorted(file.name for file in output.iterdir()))


def check_free(output: Path, overwrite: bool, source: Path) -> None:
    """Raises UserError where something lies already that must not be replaced, such as what is about to be read."""
    if output.is_symlink():
        raise UserError(f"{output} is a link; it must be a folder, new or empty")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise UserError(f"{output} is not empty; choose another folder, or replace it with --overwrite")
        if source.resolve().is_relative_to(output.resolve()):
            raise UserError(f"{output} holds {source.name}, which is to be read; choose another folder")
        foreign = sorted(file.name for file in output.iterdir() if not _is_ours(file))
        if foreign:
            raise UserError(
                f"{output} holds {foreign[0]}, which no export or import wrote, so it is not replaced; "
                "choose another folder"
            )
    elif output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; it must be a folder, new or empty")


def _is_ours(path: Path) -> bool:
    """Whether an export writes such a file, or an import this folder: the checkpoints of a training are never ours."""
    if path.name == "checkpoints":
        return path.is_dir() and all(
            "imported_from" in (read_json(each / "trainer.json") or {}) for each in path.iterdir()
        )
    # .gguf: earlier versions wrote such files.
    return path.is_file() and (path.name in _WRITTEN or path.suffix == ".gguf")


def _write_hf(loaded: LoadedCheckpoint, folder: Path, dtype: str) -> str:
    model, length, tokenizer = loaded.config.model, loaded.config.data.sequence_length, loaded.tokenizer
    end = tokenizer.end_of_document
    tensors = {name: weight.to(_DTYPES[dtype]) for name, weight in to_hf(loaded.model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    os.chmod(folder / "model.safetensors", 0o644)
    write_json(folder / "config.json", hf_config(model, length, end, str(_DTYPES[dtype]).removeprefix("torch.")))
    write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end})
    write_tokenizer(content_of(tokenizer, loaded.path / "tokenizer"), end, length, folder)
    return ARCHITECTURES[model_type(model, length)]


def _notes(loaded: LoadedCheckpoint) -> list[str]:
    """What a user of the folder must know, one paragraph each."""
    config = loaded.config
    length = config.data.sequence_length
    notes = [
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```',
        "The tokenizer reads no special tokens out of text (`split_special_tokens`), as in training: a document "
        "that spells one out does not end there.",
    ]
    if imported_from(loaded) is None:
        notes.append(f"It was trained on sequences of {length} tokens and has seen no position beyond.")
    else:
        notes.append(f"Its context is {length} tokens.")
    if (window := window_of(config.model, length)) is not None:
        notes.append(f"A token sees the last {window} tokens, itself included.")
    if config.data.separate_documents:
        notes.append(
            "In training attention stayed inside a document. This format has no word for that: give it one document at "
            "a time, for there its logits are those of the checkpoint."
        )
    if loaded.model.output_scale != 1.0:
        notes.append(f"The output multiplier of muP, {loaded.model.output_scale:g}, is part of the last norm's weight.")
    return notes
