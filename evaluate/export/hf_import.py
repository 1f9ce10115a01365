"""A Hugging Face folder (Llama, Mistral, Qwen3) as a checkpoint of ours, to be scored, asked and exported.

It is at step 0 of a run whose data nobody knows, so a held-out loss is withheld; it has no optimizer state. What a
config.json says and our arithmetic has not is refused by its field's name. No beginning-of-text token is put in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...train.checkpoint.checkpoint import publish
from ...train.checkpoint.storage import MOMENTS, WEIGHTS
from ...train.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrackerConfig, to_dict
from ...train.data.tokenizers import ByteTokenizer, planned_fingerprint
from ...train.errors import UserError
from ...train.files import file_sha256, put_in_place, read_json, temporary_directory_beside, write_json
from ...train.planner.validation import validate
from .export import check_free
from .hf_tokenizer import TOKENIZER_CONFIG, read_tokenizer
from .hf_weights import from_hf, model_config

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def import_checkpoint(
    folder: Path | str, output: Path | str, *, sequence_length: int | None = None, overwrite: bool = False
) -> Path:
    """Writes `output/checkpoints/step_0` from a folder that `AutoModelForCausalLM` loads; returns the checkpoint.

    `output` then counts as a run directory; `sequence_length` is by default `max_position_embeddings`.

    Raises:
        UserError: something is missing, damaged, or describes a model that is none of ours; names the field.
    """
    folder, output = Path(folder), Path(output)
    check_free(output, overwrite, folder)
    described = read_json(folder / "config.json")
    if described is None:
        raise UserError(f"{folder} has no config.json that can be read; it must be a folder of a Hugging Face model")
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
        weights = from_hf(dict(_tensors(folder)), config.model)
        checkpoint = temporary / "checkpoints" / ".step_0"
        checkpoint.mkdir(parents=True)
        save_file(weights, checkpoint / WEIGHTS)
        # Nobody knows the text; what it made tells this model from others of its shape.
        config.data.fingerprint = f"of {file_sha256(checkpoint / WEIGHTS)[:16]}"
        save_file({}, checkpoint / MOMENTS)
        write_json(checkpoint / "trainer.json", {"step": 0, "imported_from": str(folder)})
        write_json(checkpoint / "config.json", to_dict(config))
        tokenizer.save(checkpoint / "tokenizer")
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
    most = described.get("max_position_embeddings")
    if not isinstance(most, int) or most < 1:
        raise UserError(f"max_position_embeddings is {most!r} in config.json; it must be a whole number, 1 or more")
    if wanted is not None and not 1 <= wanted <= most:
        raise UserError(f"--sequence-length is {wanted}; it must be 1 to max_position_embeddings {most} of config.json")
    return wanted or most


def _run_config(folder: Path, described: dict[str, Any], length: int) -> RunConfig:
    model = model_config(described, length)
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


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder's safetensors, one file or several."""
    names = [_ONE]
    if not (folder / _ONE).is_file():
        index = read_json(folder / _INDEX)
        if index is None or not isinstance(index.get("weight_map"), dict):
            raise UserError(f"{folder} has neither {_ONE} nor {_INDEX}; only safetensors can be imported")
        names = sorted(set(index["weight_map"].values()))
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (not a dict)
                    yield key, file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name} cannot be read ({error}); fetch it again") from error
