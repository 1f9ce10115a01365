"""Checkpoints that survive a kill at any instant.

A checkpoint is a directory `step_<n>`, written under a temporary name, fsynced, and renamed:

    model.safetensors        weights, fp32
    optimizer.safetensors    Adam's moments, `<parameter>.exp_avg` and `.exp_avg_sq`
    trainer.json             step, clock, smoothed losses, random-number state
    config.json              the run's config;  tokenizer/  what turns text into its tokens
    manifest.json            size and SHA-256 of every other file, written last

A directory counts as a checkpoint when its manifest exists and every file agrees with it. The newest that does wins;
one that does not is reported and skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import RunConfig, canonical_json, from_dict, identity, to_dict
from .errors import UserError
from .files import fsync_path, temporary_directory_beside
from .model import GPT
from .parametrization import build_model

if TYPE_CHECKING:
    from .data.tokenizers import Tokenizer

_NAME = re.compile(r"step_(\d+)$")
_REQUIRED = ("model.safetensors", "optimizer.safetensors", "trainer.json", "config.json")


def save(
    root: Path, step: int, gpt: GPT, optimizer: torch.optim.Optimizer, trainer: dict[str, Any], config: RunConfig,
    tokenizer: Tokenizer,
) -> Path:  # fmt: skip
    """Writes `root/step_<n>`. A whole checkpoint that stands there already stays; a damaged one is replaced.

    Raises:
        OSError: for example when the disk is full; nothing half-written stays.
    """
    final = root / f"step_{step}"
    if final.exists() and damage(final) is None:
        # A run is deterministic, so this one holds the same; replacing it would be a moment without any.
        return final
    with temporary_directory_beside(final) as temporary:
        _save_tensors(_unique(gpt.state_dict()), temporary / "model.safetensors")
        _save_tensors(_optimizer_tensors(gpt, optimizer), temporary / "optimizer.safetensors")
        (temporary / "trainer.json").write_text(json.dumps({"step": step, **trainer}))
        (temporary / "config.json").write_text(json.dumps(to_dict(config), indent=1))
        (temporary / "tokenizer").mkdir()
        tokenizer.save(temporary / "tokenizer")
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        manifest = {str(path.relative_to(temporary)): _describe(path) for path in files}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in [*files, temporary / "manifest.json", temporary / "tokenizer", temporary]:
            fsync_path(path)
        os.chmod(temporary, 0o755)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
    fsync_path(root)
    return final


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        # The library keeps the system's error in words only, and a full disk must be told from a bug.
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _unique(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Safetensors refuses two names for one storage: a tied head is stored once, as the embedding."""
    if state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr():
        state = {name: tensor for name, tensor in state.items() if name != "head.weight"}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _optimizer_tensors(gpt: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in gpt.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = value.detach().cpu().contiguous()
    return tensors


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint directory, in words; None when every file agrees with the manifest."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        expectations = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest.json is missing or unreadable"
    if absent := [name for name in _REQUIRED if name not in expectations]:
        return f"its manifest.json does not list {absent[0]}"
    for name, (size, digest) in expectations.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if file_sha256(path) != digest:
            return f"{name} does not match its checksum"
    return None


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of everything that is named like a checkpoint, oldest first."""
    found = [(int(match[1]), path) for path in root.glob("step_*") if (match := _NAME.search(path.name))]
    return sorted(found)


def newest_valid(root: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are whole. Every damaged one on the way is reported, and left in place."""
    for _, path in reversed(list_steps(root)):
        problem = damage(path)
        if problem is None:
            return path
        report(f"checkpoint {path.name} is damaged ({problem}); falling back to the one before")
    return None


def prune(root: Path, keep: int, newest: int | None = None) -> None:
    """Removes all but the newest `keep` checkpoints, and temporary directories that a killed save left behind.

    Args:
        root: the folder of checkpoints.
        keep: how many stay, 1 or more.
        newest: the step just saved. What claims a later one was damaged when the run resumed; it goes, and counts for
            nothing, or it would push out a whole one.
    """
    steps = list_steps(root)
    later = [path for step, path in steps if newest is not None and step > newest]
    for path in [*later, *[path for _, path in steps if path not in later][:-keep]]:
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


def restore(checkpoint: Path, gpt: GPT, optimizer: torch.optim.Optimizer, config: RunConfig) -> dict[str, Any]:
    """Loads weights and moments in place; returns what `save` was given as `trainer`, and the step.

    Raises:
        UserError: the checkpoint belongs to another run; names a field that differs.
    """
    saved = read_config(checkpoint)
    if identity(saved) != identity(config):
        raise UserError(f"checkpoint {checkpoint} belongs to another run: {_first_difference(saved, config)}")
    _load_weights(gpt, checkpoint)
    tensors = load_file(checkpoint / "optimizer.safetensors")
    for name, parameter in gpt.named_parameters():
        state = {key[len(name) + 1 :]: value for key, value in tensors.items() if key.startswith(name + ".")}
        if state:
            device = parameter.device
            optimizer.state[parameter] = {
                key: value.to(device) if value.dim() or device.type == "cuda" else value for key, value in state.items()
            }
    result: dict[str, Any] = json.loads((checkpoint / "trainer.json").read_text())
    return result


def _load_weights(gpt: GPT, checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    if gpt.config.tied_embeddings:
        weights["head.weight"] = weights["embedding.weight"]
    gpt.load_state_dict(weights)


def _first_difference(saved: RunConfig, config: RunConfig) -> str:
    ours, theirs = _flatten(identity(config)), _flatten(identity(saved))
    for name in sorted(ours):
        if ours[name] != theirs.get(name):
            return f"{name} is {theirs.get(name)!r} there and {ours[name]!r} here"
    return "they have different fields"


def _flatten(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def read_config(checkpoint: Path) -> RunConfig:
    """The config of the run that a checkpoint belongs to."""
    return from_dict(RunConfig, json.loads((checkpoint / "config.json").read_text()))


@dataclass
class LoadedCheckpoint:
    """A checkpoint ready to be asked: the model in eval mode, its config and its tokenizer."""

    model: GPT
    config: RunConfig
    tokenizer: Tokenizer
    step: int
    path: Path

    @property
    def checksum(self) -> str:
        """Identifies the content, wherever it lies."""
        return hashlib.sha256(
            canonical_json(json.loads((self.path / "manifest.json").read_text())).encode()
        ).hexdigest()


def find(path: Path | str) -> Path:
    """A whole checkpoint: the directory given, or the newest valid one of a run directory.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = Path(path)
    if _NAME.search(path.name):
        if not path.is_dir():
            raise UserError(
                f"checkpoint {path} does not exist; give a run directory or a checkpoints/step_<n> directory"
            )
        if (problem := damage(path)) is not None:
            raise UserError(f"checkpoint {path} is damaged: {problem}")
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest = newest_valid(root, report=lambda message: None)
    if newest is None:
        raise UserError(f"{path} holds no checkpoint; give a run directory or a checkpoints/step_<n> directory")
    return newest


def load_for_evaluation(path: Path | str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedCheckpoint:
    """Opens a checkpoint, or the newest one of a run directory, to be asked and not trained.

    Raises:
        UserError: there is none, or it is damaged.
    """
    from .data.tokenizers import tokenizer_from_directory

    path = find(path)
    config = read_config(path)
    gpt = build_model(config.model, config.optimizer, config.data.sequence_length, seed=0)
    _load_weights(gpt, path)
    step = json.loads((path / "trainer.json").read_text())["step"]
    tokenizer = tokenizer_from_directory(path / "tokenizer")
    return LoadedCheckpoint(gpt.to(device=device, dtype=dtype).eval(), config, tokenizer, step, path)
