"""Checkpoints that survive a kill at any instant: write, verify, find and read them.

A checkpoint is a directory `step_<n>`, written under a temporary name, fsynced, and renamed (see `saver.py`):

    model.safetensors, optimizer.safetensors or shards/    the tensors; see `storage.py`
    trainer.json             step, clock, smoothed losses, random-number state
    config.json              the run's config;  tokenizer/  the run's tokenizer
    manifest.json            size and SHA-256 of every other file, written last

It is valid if every file agrees with the manifest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from ..config import RunConfig, flatten, from_dict, identity, run_id, to_dict
from ..data.storage import checksum
from ..errors import UserError
from ..files import file_sha256, fsync_path, read_document, read_json
from ..job.control import run_on_ranks
from ..model.gpt import GPT
from ..model.parametrization import build_model
from ..optimizer.average import whole_copies
from ..parallel.layout import Held, whole_placement
from ..parallel.mesh import Mesh
from ..quantization.linear import quantize_for_evaluation
from ..schedule import same_until
from .storage import MOMENTS, SHARDS_INDEX, WEIGHTS, parts, read_whole

if TYPE_CHECKING:
    from ..data.tokenizers import Tokenizer

ALONE = Mesh()  # a single process

STEP_NAME = re.compile(r"step_(\d+)$")
_REQUIRED = ("trainer.json", "config.json")


class FileEntry(TypedDict):
    bytes: int
    sha256: str


class Position(TypedDict):
    """The part of trainer.json that every checkpoint has."""

    step: int


def describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def start(root: Path, step: int) -> Path | None:
    """Create a directory that `publish` renames to `root/step_<n>`; return None if a valid checkpoint is there."""
    final = root / f"step_{step}"
    if final.exists() and damage(final) is None:
        # A run is deterministic, so this one has the same content, and replacing it would leave a moment without any.
        return None
    sweep(root)
    root.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=root))


def publish(temporary: Path, final: Path, described: dict[str, dict[str, Any]]) -> None:
    """Complete a directory from `start`: write the manifest, flush to disk, and rename it, which makes it valid.

    `described`: manifest entries of files that ranks have flushed. Raises UserError if rank 0 cannot see one of them.
    """
    inside = sorted(temporary.rglob("*"))
    files = {str(path.relative_to(temporary)): path for path in inside if path.is_file()}
    if unseen := sorted(set(described) - set(files)):
        raise UserError(
            f"{final.parent} is not the same folder on every node: another rank wrote {unseen[0]}, and rank 0 cannot "
            "see it; put the run directory on a file system that all nodes share"
        )
    manifest = {name: described.get(name) or describe(path) for name, path in files.items()}
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
    unflushed = [path for name, path in files.items() if name not in described]
    folders = [path for path in inside if path.is_dir()]
    for path in [*unflushed, temporary / "manifest.json", *folders, temporary]:
        fsync_path(path)
    os.chmod(temporary, 0o755)  # mkdtemp makes folders that only their owner can read
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    fsync_path(final.parent)  # a rename is durable once the folder that holds the name is


def damage(checkpoint: Path, mesh: Mesh = ALONE) -> str | None:
    """Return what is wrong with a checkpoint, or None if every file agrees with the manifest; the same on all ranks."""
    return next(filter(None, mesh.gather(_damage(checkpoint, mesh.rank, mesh.size))), None)


def _damage(checkpoint: Path, rank: int, ranks: int) -> str | None:
    try:
        expectations = read_document(checkpoint / "manifest.json", dict[str, FileEntry])
    except UserError:
        return "its manifest.json is missing or unreadable"
    tensors = (SHARDS_INDEX,) if SHARDS_INDEX in expectations else (WEIGHTS, MOMENTS)
    if absent := [name for name in (*tensors, *_REQUIRED) if name not in expectations]:
        return f"its manifest.json does not list {absent[0]}"
    for name in list(expectations)[rank::ranks]:  # ranks share the hashing
        size, digest = expectations[name]["bytes"], expectations[name]["sha256"]
        path = checkpoint / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:  # cheap, so before the checksum
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if file_sha256(path) != digest:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
    return None


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of every checkpoint, also damaged ones, oldest first."""
    steps = [(int(match[1]), path) for path in root.glob("step_*") if (match := STEP_NAME.search(path.name))]
    return sorted(steps)


def newest_valid(root: Path, report: Callable[[str], None], mesh: Mesh = ALONE) -> Path | None:
    """Return the newest valid checkpoint or None, the same on all ranks. Rank 0 reports damaged ones."""
    for _, path in reversed(run_on_ranks(mesh, lambda: list_steps(root), only_first=True)):
        problem = damage(path, mesh)
        if problem is None:
            return path
        if mesh.rank == 0:
            report(f"checkpoint {path.name} is damaged ({problem}); falling back to the one before")
    return None


def prune(root: Path, keep: int, newest: int, named: Collection[int]) -> None:
    """Delete checkpoints after step `newest`; up to it, keep steps in `named` and the last `keep` others."""
    steps = list_steps(root)
    earlier = [path for step, path in steps if step <= newest and step not in named]
    for path in [*(path for step, path in steps if step > newest), *earlier[:-keep]]:
        shutil.rmtree(path, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove the temporary directories of saves that were killed or failed."""
    for path in root.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


def resume_state(
    root: Path, held: Sequence[Held], config: RunConfig, mesh: Mesh, report: Callable[[str], None] = print
) -> dict[str, Any] | None:
    """Load the newest valid checkpoint into this rank's tensors, `held`; return its trainer.json, or None without one.

    Every rank calls it, and all raise the UserError that `restore_state` raises on one.
    """
    newest = newest_valid(root, report, mesh)
    if newest is None:
        return None
    return run_on_ranks(mesh, lambda: restore_state(newest, held, config))


def restore_state(checkpoint: Path, held: Sequence[Held], config: RunConfig) -> dict[str, Any]:
    """Load a checkpoint into this rank's tensors, `held`; return its trainer.json.

    Raises:
        UserError: The checkpoint does not fit the model, or `config` would have trained differently up to its step.
    """
    saved = read_config(checkpoint)
    result = read_document(checkpoint / "trainer.json", dict[str, Any])
    if run_id(saved) != run_id(config) and read_step(checkpoint) > same_until(saved, config):
        raise UserError(f"checkpoint {checkpoint} belongs to another run: {_first_difference(saved, config)}")
    read_tensors(checkpoint, held)
    return result


def read_tensors(checkpoint: Path, held: Sequence[Held]) -> None:
    """Fill the tensors of `held` from a checkpoint. Raises UserError if one is missing or has another shape."""
    if quantization(checkpoint) and any(item.kind != "weight" for item in held):
        raise UserError(
            f"checkpoint {checkpoint} is quantized and holds only weights, without averages or an optimizer's state; "
            "give the checkpoint that it was made from"
        )
    if not (checkpoint / SHARDS_INDEX).is_file():
        return read_whole(checkpoint, parts(held))
    from .shards import read_shards  # imports take half a second, which one process does not need

    read_shards(checkpoint, parts(held))


def _first_difference(saved: RunConfig, config: RunConfig) -> str:
    ours, theirs = flatten(identity(config)), flatten(identity(saved))  # without some fields at their default
    values, saved_values = flatten(to_dict(config)), flatten(to_dict(saved))
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {saved_values.get(name)!r} in the checkpoint and {values.get(name)!r} in this config"
    return "the two configs have different fields"


def read_step(checkpoint: Path) -> int:
    return read_document(checkpoint / "trainer.json", Position)["step"]


def read_config(checkpoint: Path) -> RunConfig:
    path = checkpoint / "config.json"
    try:
        return from_dict(RunConfig, read_document(path, dict[str, Any]))
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from None


@dataclass
class LoadedCheckpoint:
    """A checkpoint loaded for evaluation."""

    model: GPT
    config: RunConfig
    tokenizer: Tokenizer
    step: int
    path: Path
    average: float | None = None  # span of the weight average that was loaded; None: the weights themselves

    @property
    def checksum(self) -> str:
        """Checksum of the checkpoint's content and the chosen average, independent of the path."""
        files = read_document(self.path / "manifest.json", dict[str, FileEntry])
        return checksum(files if self.average is None else [files, self.average])


def quantization(checkpoint: Path) -> dict[str, Any] | None:
    """Return format, method and sizes of a checkpoint that `isoflop quantize` wrote; None for any other."""
    return (read_json(checkpoint / "trainer.json") or {}).get("quantization")


def find(path: Path | str) -> Path:
    """Return a valid checkpoint: the given one, or the newest of a run directory. Raises UserError if there is none."""
    path = Path(path)
    if STEP_NAME.search(path.name):
        if not path.is_dir():
            raise UserError(
                f"checkpoint {path} does not exist; give a run directory or a checkpoints/step_<n> directory"
            )
        if (problem := damage(path)) is not None:
            raise UserError(f"checkpoint {path} is damaged: {problem}")
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest = newest_valid(root, report=lambda message: None)
    if newest is None and "model_type" in (read_json(path / "config.json") or {}):
        raise UserError(
            f"{path} is a Hugging Face model, which isoflop does not read; score it with "
            f"`lm_eval --model hf --model_args pretrained={path}`"
        )
    if newest is None:
        raise UserError(f"{path} holds no checkpoint; give a run directory or a checkpoints/step_<n> directory")
    return newest


def whole_weights(gpt: GPT, kind: str = "weight") -> list[Held]:
    """Describe a model's weights as targets of `read_tensors`. `kind`: the saved `weight`, or `average_<index>`."""
    return [
        Held(name, kind, whole_placement(parameter.shape), 0, parameter.numel(), parameter.detach().view(-1))
        for name, parameter in gpt.named_parameters()
    ]


def load_for_evaluation(
    path: Path | str, device: str = "cpu", dtype: torch.dtype = torch.float32, average: float | None = None
) -> LoadedCheckpoint:
    """Load a checkpoint, or the newest one of a run directory, for evaluation only.

    With `average`, a share of the steps, load the weights averaged over that span. Raises UserError if either is
    missing.
    """
    from ..data.tokenizers import tokenizer_from_directory

    path = find(path)
    config = read_config(path)
    gpt = build_model(config.model, config.optimizer, config.data.sequence_length, seed=0)
    step, kind = read_step(path), "weight"
    if average is not None:
        copies = whole_copies(config.average, step)
        if average not in copies:
            spans = ", ".join(map(str, copies)) or "none, because it was trained with average.kind none"
            raise UserError(f"average is {average:g}; checkpoint {path} has averages of spans: {spans}")
        kind = f"average_{copies[average]}"
    read_tensors(path, whole_weights(gpt, kind))
    of_weights = config.quantization.weights if quantization(path) is None else "none"  # these are rounded already
    quantize_for_evaluation(gpt, replace(config, quantization=replace(config.quantization, weights=of_weights)))
    tokenizer = tokenizer_from_directory(path / "tokenizer")
    if config.data.separate_documents:
        gpt.end_of_document = tokenizer.end_of_document
    # Not the run's choice, because scoring may use another device.
    gpt.set_attention("auto", torch.device(device), dtype)
    return LoadedCheckpoint(gpt.to(device=device, dtype=dtype).eval(), config, tokenizer, step, path, average)
