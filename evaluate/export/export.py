"""A checkpoint as a Hugging Face folder, and such a folder (Llama, Mistral, Qwen2, Qwen3, and with experts Mixtral,
Qwen3-MoE, GLM-4-MoE) as a checkpoint, without their libraries: either appears whole or not at all.

- What the other side would compute differently is refused by its field's name, or said in the model card.
- An imported checkpoint is at step 0 of a run whose data nobody knows, so a held-out loss is withheld; it has no
  optimizer state. No beginning-of-text token is put in front.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...train.checkpoint.checkpoint import LoadedCheckpoint, find, load_for_evaluation, publish
from ...train.checkpoint.storage import MOMENTS, WEIGHTS
from ...train.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrackerConfig, to_dict
from ...train.data.tokenizers import ByteTokenizer, planned_fingerprint
from ...train.errors import UserError
from ...train.files import file_sha256, put_in_place, read_document, read_json, temporary_directory_beside, write_json
from ...train.planner.validation import validate
from . import hf_weights as hf
from .hf_experts import without_idle_biases
from .hf_tokenizer import TOKENIZER_CONFIG, TOKENIZER_FILES, read_tokenizer, write_tokenizer
from .model_card import Facts, imported_from, model_card

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
# What goes out as it came in, and where a checkpoint keeps it; of config.json only these ids.
SOURCE, IDS = "tokenizer/source", ("bos_token_id", "eos_token_id", "pad_token_id")
_AS_IT_CAME = {*TOKENIZER_FILES, GENERATION}
# What an export writes; only a folder of such files, or of an import, is ever replaced.
_WRITTEN = {"README.md", CONFIG, _ONE, *_AS_IT_CAME}
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
    """Writes a Hugging Face folder with weights, settings, tokenizer and model card (of `facts`).

    `path` is a checkpoint or a run directory (its newest valid checkpoint), `dtype` fp32 or bf16, `average` as in
    `load_for_evaluation`. Raises UserError: no
    checkpoint, an unknown format or dtype, a mixture of experts that no architecture there computes, or a folder that
    is not empty.
    """
    if format == "gguf":
        raise UserError("--format is 'gguf'; export with --format hf, and llama.cpp's convert_hf_to_gguf.py reads that")
    if format != "hf":
        raise UserError(f"--format is {format!r}; it must be hf")
    if dtype not in _DTYPES:
        raise UserError(f"--dtype is {dtype!r}; it must be one of {', '.join(_DTYPES)}")
    path, output = find(path), Path(output)
    _check_free(output, overwrite, path)
    loaded = load_for_evaluation(path, average=average)
    with temporary_directory_beside(output) as temporary:
        architecture = _write_hf(loaded, temporary, dtype)
        (temporary / "README.md").write_text(model_card(loaded, facts or Facts(), _notes(loaded)), encoding="utf-8")
        put_in_place(temporary, output)
    return Exported(output, architecture, sorted(file.name for file in output.iterdir()))


def _check_free(output: Path, overwrite: bool, source: Path) -> None:
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
        return path.is_dir() and all(imported_from(each) is not None for each in path.iterdir())
    # .gguf: earlier versions wrote such files.
    return path.is_file() and (path.name in _WRITTEN or path.suffix == ".gguf")


def _write_hf(loaded: LoadedCheckpoint, folder: Path, dtype: str) -> str:
    model, length = loaded.config.model, loaded.config.data.sequence_length
    architecture, end = hf.ARCHITECTURES[hf.model_type(model, length)], loaded.tokenizer.end_of_document
    tensors = {
        # Biases that choose experts stay as they are, as transformers keeps them.
        name: weight if name.endswith("e_score_correction_bias") else weight.to(_DTYPES[dtype])
        for name, weight in hf.to_hf(loaded.model).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    os.chmod(folder / "model.safetensors", 0o644)
    config, source = hf.hf_config(model, length, end, str(_DTYPES[dtype]).removeprefix("torch.")), loaded.path / SOURCE
    if (said := read_json(source / CONFIG)) is None:
        write_json(folder / CONFIG, config)
        write_json(folder / GENERATION, dict.fromkeys(IDS, end))
        write_tokenizer(loaded.tokenizer, loaded.path / "tokenizer", length, folder)
    else:
        known = {name: said[name] for name in IDS if name in said}
        kept = {name: value for name, value in (config | known).items() if name in known or name not in IDS}
        write_json(folder / CONFIG, kept)
        _copy(source, folder, _AS_IT_CAME)
    return architecture


def _copy(source: Path, folder: Path, names: set[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _notes(loaded: LoadedCheckpoint) -> list[str]:
    """What a user of the folder must know, one paragraph each."""
    config = loaded.config
    length = config.data.sequence_length
    notes = [
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```',
        "The tokenizer is the one that came with the weights, file by file."
        if (loaded.path / SOURCE).is_dir()
        else "The tokenizer reads no special tokens out of text (`split_special_tokens`), as in training: a document "
        "that spells one out does not end there.",
    ]
    if imported_from(loaded.path) is None:
        notes.append(f"It was trained on sequences of {length} tokens and has seen no position beyond.")
    else:
        notes.append(f"Its context is {length} tokens.")
    if (window := hf.window_of(config.model, length)) is not None:
        notes.append(f"A token sees the last {window} tokens, itself included.")
    if config.data.separate_documents:
        notes.append(
            "In training attention stayed inside a document. This format has no word for that: give it one document at "
            "a time, for there its logits are those of the checkpoint."
        )
    if loaded.model.output_scale != 1.0:
        notes.append(f"The output multiplier of muP, {loaded.model.output_scale:g}, is part of the last norm's weight.")
    return notes


# --- import ----------------------------------------------------------------------------------------------------------


def import_checkpoint(
    folder: Path | str, output: Path | str, *, sequence_length: int | None = None, overwrite: bool = False
) -> Path:
    """Writes `output/checkpoints/step_0` from a folder that `AutoModelForCausalLM` loads; returns the checkpoint.

    `output` then counts as a run directory; `sequence_length` is by default `max_position_embeddings`. Raises
    UserError: something is missing, damaged, or describes a model that is none of ours; names the field.
    """
    folder, output = Path(folder), Path(output)
    _check_free(output, overwrite, folder)
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} has no {CONFIG}; it must be a folder of a Hugging Face model")
    described = read_document(folder / CONFIG, dict[str, Any])
    read_document(folder / CONFIG, hf.HfConfig)  # checks the fields that it names
    hf.importable(described)
    config = _run_config(folder, described, _length(described, sequence_length))
    with temporary_directory_beside(output) as temporary:
        tokenizer = read_tokenizer(folder, temporary)
        assert config.model.vocab_size is not None
        if tokenizer.vocab_size > config.model.vocab_size:
            raise UserError(
                f"vocab_size is {config.model.vocab_size} in config.json; tokenizer.json has ids up to "
                f"{tokenizer.vocab_size - 1}, so they do not belong together"
            )
        _check_end(folder, described, tokenizer.end_of_document)
        if isinstance(tokenizer, ByteTokenizer):
            config.data.tokenizer = "bytes"
        # As the planner would have it.
        config.data.tokenizer_fingerprint = planned_fingerprint(config.data)
        weights = _weights(folder, config)
        without_idle_biases(config.model, weights)
        checkpoint = temporary / "checkpoints" / ".step_0"
        checkpoint.mkdir(parents=True)
        save_file(weights, checkpoint / WEIGHTS)
        # Nobody knows the text; what it made tells this model from others of its shape.
        config.data.fingerprint = f"of {file_sha256(checkpoint / WEIGHTS)[:16]}"
        save_file({}, checkpoint / MOMENTS)
        write_json(checkpoint / "trainer.json", {"step": 0, "imported_from": str(folder)})
        write_json(checkpoint / "config.json", to_dict(config))
        tokenizer.save(checkpoint / "tokenizer")
        _copy(folder, checkpoint / SOURCE, {CONFIG, *_AS_IT_CAME})
        publish(checkpoint, temporary / "checkpoints" / "step_0", {})
        put_in_place(temporary, output)
    return output / "checkpoints" / "step_0"


def _check_end(folder: Path, described: dict[str, Any], end: int) -> None:
    """Refuses a guess at the token that ends a document where config.json says another one."""
    said = described.get("eos_token_id")
    named = (read_json(folder / TOKENIZER_CONFIG) or {}).get("eos_token")
    if said is None or named is not None or end in (said if isinstance(said, list) else [said]):
        return
    raise UserError(
        f"eos_token_id is {said!r} in config.json, and id {end} ends a document by the names in tokenizer.json; "
        f"a {TOKENIZER_CONFIG} with an eos_token must say which"
    )


def _length(described: dict[str, Any], wanted: int | None) -> int:
    most = hf.whole_number(described, "max_position_embeddings")
    if wanted is not None and not 1 <= wanted <= most:
        raise UserError(f"--sequence-length is {wanted}; it must be 1 to max_position_embeddings {most} of config.json")
    return wanted or most


def _run_config(folder: Path, described: dict[str, Any], length: int) -> RunConfig:
    model = hf.model_config(described, length)
    config = RunConfig(
        model=model,
        data=DataConfig(corpus="text", path=None, tokenizer=str(folder / "tokenizer.json"), sequence_length=length),
        # At the width itself muP's factors are 1: the weights are taken as they are.
        optimizer=OptimizerConfig(base_width=model.width),
        schedule=ScheduleConfig(kind="constant"),
        tracker=TrackerConfig(kind="none"),
        name=folder.resolve().name,
    )
    validate(config)
    return config


class _Index(TypedDict):
    weight_map: dict[str, str]


def _weights(folder: Path, config: RunConfig) -> dict[str, Tensor]:
    """The weights by our names, from the folder's safetensors, one file or several."""
    names = [_ONE]
    if not (folder / _ONE).is_file():
        if not (folder / _INDEX).is_file():
            raise UserError(f"{folder} has neither {_ONE} nor {_INDEX}; only safetensors can be imported")
        names = sorted(set(read_document(folder / _INDEX, _Index)["weight_map"].values()))
    files: dict[str, Any] = {}
    for name in names:
        if name != Path(name).name:
            raise UserError(f"weight_map names {name!r} in {folder / _INDEX}; it must name files of the same folder")
        try:
            file = safe_open(folder / name, framework="pt")
            files |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name} cannot be read ({error}); fetch it again") from error
    return hf.from_hf(files, config.model)
