"""A checkpoint of ours as a folder that others load: Hugging Face's, or llama.cpp's GGUF.

Special here:
- nothing of theirs is needed to write it (GGUF takes the library `gguf`): weights by safetensors, settings as JSON;
- the folder appears whole or not at all, and one that holds something is replaced only when asked;
- what the other side would compute differently is refused, or said in the model card.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...train.checkpoint.checkpoint import LoadedCheckpoint, find, load_for_evaluation
from ...train.errors import UserError
from ...train.files import fsync_path, read_json, temporary_directory_beside, write_json
from .hf_tokenizer import content_of, write_tokenizer
from .hf_weights import ARCHITECTURES, hf_config, model_type, to_hf, window_of
from .model_card import Facts, imported_from, model_card

# What weights may be stored in.
FORMATS = {"hf": ("fp32", "bf16"), "gguf": ("fp32", "fp16")}
# What an export writes, beside a .gguf; only a folder of such files, or of an import, is ever replaced.
_WRITTEN = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json",
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Exported:
    """What was written where."""

    folder: Path
    architecture: str
    files: list[str]


def export_checkpoint(
    path: Path | str, output: Path | str, *, format: str = "hf", dtype: str = "fp32", overwrite: bool = False,
    facts: Facts | None = None,
) -> Exported:  # fmt: skip
    """Writes a folder with weights, settings, tokenizer and model card.

    Args:
        path: a checkpoint directory, or a run directory (its newest valid checkpoint).
        output: the folder; it may exist if it is empty.
        format: hf (`AutoModelForCausalLM` and `AutoTokenizer` load it) | gguf (llama.cpp does).
        dtype: of the weights: fp32, or bf16 for hf, fp16 for gguf.
        overwrite: replace what is there.
        facts: for the model card.

    Raises:
        UserError: no checkpoint, a format or dtype that there is not, a folder that is not empty, or a model that the
            format cannot describe.
    """
    if format not in FORMATS:
        raise UserError(f"--format is {format!r}; it must be one of {', '.join(FORMATS)}")
    if dtype not in FORMATS[format]:
        raise UserError(f"--dtype is {dtype!r}; with --format {format} it must be one of {', '.join(FORMATS[format])}")
    path, output = find(path), Path(output)
    check_free(output, overwrite, path)
    loaded = load_for_evaluation(path)
    if format == "hf":
        write: Callable[[Path], str] = lambda folder: _write_hf(loaded, folder, dtype)  # noqa: E731
    else:
        from .gguf_file import write_gguf

        write = lambda folder: write_gguf(loaded, folder, dtype)  # noqa: E731
    with temporary_directory_beside(output) as temporary:
        architecture = write(temporary)
        notes = _notes(loaded, format, temporary)
        (temporary / "README.md").write_text(model_card(loaded, facts or Facts(), notes, format), encoding="utf-8")
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
    return path.is_file() and (path.name in _WRITTEN or path.suffix == ".gguf")


def put_in_place(temporary: Path, output: Path) -> None:
    """Flushes a folder to the disk and renames it; what stood there steps aside first, and goes last."""
    inside = sorted(temporary.rglob("*"))
    for path in [*inside, temporary]:
        fsync_path(path)
    os.chmod(temporary, 0o755)
    old = temporary.with_name(f"{temporary.name}.old")
    if output.is_dir() and any(output.iterdir()):
        os.replace(output, old)
    try:
        os.replace(temporary, output)  # onto an empty folder this works, too
    except OSError:
        if old.exists():
            os.replace(old, output)
        raise
    fsync_path(output.parent)
    shutil.rmtree(old, ignore_errors=True)


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


def _notes(loaded: LoadedCheckpoint, format: str, folder: Path) -> list[str]:
    """What a user of the folder must know, a paragraph each."""
    config = loaded.config
    length = config.data.sequence_length
    notes = []
    if format == "hf":
        notes.append(
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n'
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```'
        )
        notes.append(
            "The tokenizer reads no special tokens out of text (`split_special_tokens`), as in training: a document "
            "that spells one out does not end there."
        )
    else:
        (name,) = (file.name for file in folder.glob("*.gguf"))
        notes.append(f"`{name}` is for llama.cpp and what is built on it.")
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
