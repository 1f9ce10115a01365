"""Checkpoints that survive a kill at any instant: the directory, its manifest, and the way back.

A checkpoint is a directory `step_<n>`, written under a temporary name, fsynced, and renamed (see `saver.py`):

    model.safetensors, optimizer.safetensors or shards/    the tensors; see `storage.py`
    trainer.json             step, clock, smoothed losses, random-number state
    config.json              the run's config;  tokenizer/  what turns text into its tokens
    manifest.json            size and SHA-256 of every other file, written last

It counts when every file agrees with its manifest; the newest such one wins, and others are reported and skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
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
from ..schedule import same_until
from .storage import MOMENTS, SHARDS_INDEX, WEIGHTS, parts, read_whole

if TYPE_CHECKING:
    from ..data.tokenizers import Tokenizer

ALONE = Mesh()  # one process

_NAME = re.compile(r"step_(\d+)$")
_REQUIRED = ("trainer.json", "config.json")


class FileEntry(TypedDict):
    """What a manifest says of a file."""

    bytes: int
    sha256: str


class Position(TypedDict):
    """The part of trainer.json that every checkpoint has."""

    step: int


def describe(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def start(root: Path, step: int) -> Path | None:
    """A new directory to write `root/step_<n>` in, which `publish` renames; None where a whole one stands."""
    final = root / f"step_{step}"
    if final.exists() and damage(final) is None:
        # A run is deterministic, so this one holds the same; replacing it would be a moment without any.
        return None
    sweep(root)
    root.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=root))


def publish(temporary: Path, final: Path, described: dict[str, dict[str, Any]]) -> None:
    """Turns what `start` gave into a checkpoint: manifest, flush to the disk, and the one rename that makes it count.

    `described` are manifest entries of files that other ranks have flushed; `UserError` where one is not visible from
    here.
    """
    inside = sorted(temporary.rglob("*"))
    files = {str(path.relative_to(temporary)): path for path in inside if path.is_file()}
    if unseen := sorted(set(described) - set(files)):
        raise UserError(
            f"{final.parent} is not the same folder on every node: another rank has written {unseen[0]}, and the first "
            "one cannot see it; put the run directory on a file system that all nodes share"
        )
    manifest = {name: described.get(name) or describe(path) for name, path in files.items()}
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
    unflushed = [path for name, path in files.items() if name not in described]
    folders = [path for path in inside if path.is_dir()]
    for path in [*unflushed, temporary / "manifest.json", *folders, temporary]:
        fsync_path(path)
    os.chmod(temporary, 0o755)
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    fsync_path(final.parent)


def damage(checkpoint: Path, mesh: Mesh = ALONE) -> str | None:
    """What is wrong with a checkpoint directory, in words, the same on all ranks; None when every file agrees with
    the manifest.
    """
    return next(filter(None, mesh.gather(_damage(checkpoint, mesh.rank, mesh.size))), None)


def _damage(checkpoint: Path, rank: int, ranks: int) -> str | None:
    try:
        expectations = read_document(checkpoint / "manifest.json", dict[str, FileEntry])
    except UserError:
        return "its manifest.json is missing or unreadable"
    tensors = (SHARDS_INDEX,) if SHARDS_INDEX in expectations else (WEIGHTS, MOMENTS)
    if absent := [name for name in (*tensors, *_REQUIRED) if name not in expectations]:
        return f"its manifest.json does not list {absent[0]}"
    for name in list(expectations)[rank::ranks]:
        size, digest = expectations[name]["bytes"], expectations[name]["sha256"]
        path = checkpoint / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if file_sha256(path) != digest:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
    return None


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of everything that is named like a checkpoint, oldest first."""
    found = [(int(match[1]), path) for path in root.glob("step_*") if (match := _NAME.search(path.name))]
    return sorted(found)


def newest_valid(root: Path, report: Callable[[str], None], mesh: Mesh = ALONE) -> Path | None:
    """The newest whole checkpoint, the same on all ranks. Damaged ones are reported by the first rank, and left in
    place.
    """
    for _, path in reversed(run_on_ranks(mesh, lambda: list_steps(root), only_first=True)):
        problem = damage(path, mesh)
        if problem is None:
            return path
        if mesh.rank == 0:
            report(f"checkpoint {path.name} is damaged ({problem}); falling back to the one before")
    return None


def prune(root: Path, keep: int, newest: int, named: Collection[int]) -> None:
    """Keeps the last `keep` checkpoints up to step `newest`, and those of `named` steps, where other runs begin."""
    steps = list_steps(root)
    earlier = [path for step, path in steps if step <= newest and step not in named]
    for path in [*(path for step, path in steps if step > newest), *earlier[:-keep]]:
        shutil.rmtree(path, ignore_errors=True)


def sweep(root: Path) -> None:
    """Removes the temporary directories of saves that were killed or failed."""
    for path in root.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


def resume_state(
    root: Path, held: Sequence[Held], config: RunConfig, mesh: Mesh, report: Callable[[str], None] = print
) -> dict[str, Any] | None:
    """Fills what this rank holds from the newest valid checkpoint; returns the saver's `trainer` and `step`, None
    without one.

    Every rank calls it, and all raise the `UserError` of `restore_state`.
    """
    newest = newest_valid(root, report, mesh)
    if newest is None:
        return None
    return run_on_ranks(mesh, lambda: restore_state(newest, held, config))


def restore_state(checkpoint: Path, held: Sequence[Held], config: RunConfig) -> dict[str, Any]:
    """Fills what this rank holds, in place; returns what the saver was given as `trainer`, and the step.

    Raises:
        UserError: the checkpoint is of a run that differs before its step (names a field), or does not fit the model.
    """
    saved = read_config(checkpoint)
    result = read_document(checkpoint / "trainer.json", dict[str, Any])
    if run_id(saved) != run_id(config) and read_step(checkpoint) > same_until(saved, config):
        raise UserError(f"checkpoint {checkpoint} belongs to another run: {_first_difference(saved, config)}")
    read_tensors(checkpoint, held)
    return result


def read_tensors(checkpoint: Path, held: Iterable[Held]) -> None:
    """Fills what is held from a checkpoint of either format, in place; `UserError` where it does not cover that."""
    if not (checkpoint / SHARDS_INDEX).is_file():
        return read_whole(checkpoint, parts(held))
    from .shards import read_shards  # half a second of imports that one process does without

    read_shards(checkpoint, parts(held))


def _first_difference(saved: RunConfig, config: RunConfig) -> str:
    ours, theirs = flatten(identity(config)), flatten(identity(saved))  # where defaults may be left out
    here, there = flatten(to_dict(config)), flatten(to_dict(saved))
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
    return "they have different fields"


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
    """A checkpoint to evaluate: the model in eval mode, its config and its tokenizer."""

    model: GPT
    config: RunConfig
    tokenizer: Tokenizer
    step: int
    path: Path
    average: float | None = None  # span of the average that the model's weights are

    @property
    def checksum(self) -> str:
        """Identifies the weights, wherever they lie."""
        files = read_document(self.path / "manifest.json", dict[str, FileEntry])
        return checksum(files if self.average is None else [files, self.average])


def find(path: Path | str) -> Path:
    """A whole checkpoint: the directory given, or the newest valid one of a run directory; `UserError` where there
    is none.
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
    if newest is None and "model_type" in (read_json(path / "config.json") or {}):
        raise UserError(
            f"{path} is a Hugging Face model, which isoflop does not read; score it with "
            f"`lm_eval --model hf --model_args pretrained={path}`"
        )
    if newest is None:
        raise UserError(f"{path} holds no checkpoint; give a run directory or a checkpoints/step_<n> directory")
    return newest


def whole_weights(gpt: GPT, kind: str = "weight") -> list[Held]:
    """The weights of a model that one process holds whole; `kind` as a checkpoint has them."""
    return [
        Held(name, kind, whole_placement(parameter.shape), 0, parameter.numel(), parameter.detach().view(-1))
        for name, parameter in gpt.named_parameters()
    ]


def load_for_evaluation(
    path: Path | str, device: str = "cpu", dtype: torch.dtype = torch.float32, average: float | None = None
) -> LoadedCheckpoint:
    """Opens a checkpoint, or the newest one of a run directory, for evaluation only; `average`: with the average of
    the weights that has this span. `UserError` where there is none.
    """
    from ..data.tokenizers import tokenizer_from_directory

    path = find(path)
    config = read_config(path)
    gpt = build_model(config.model, config.optimizer, config.data.sequence_length, seed=0)
    step, kind = read_step(path), "weight"
    if average is not None:
        found = whole_copies(config.average, step)
        if average not in found:
            kept = ", ".join(map(str, found)) or "none, for it was trained with average.kind none"
            raise UserError(f"average is {average:g}; checkpoint {path} has averages of spans: {kept}")
        kind = f"average_{found[average]}"
    read_tensors(path, whole_weights(gpt, kind))
    tokenizer = tokenizer_from_directory(path / "tokenizer")
    if config.data.separate_documents:
        gpt.end_of_document = tokenizer.end_of_document
    # Not the run's own choice: it may be scored on another device.
    gpt.set_attention("auto", torch.device(device), dtype)
    return LoadedCheckpoint(gpt.to(device=device, dtype=dtype).eval(), config, tokenizer, step, path, average)
