"""Saving a checkpoint while training goes on: the state is copied to host memory, and a thread writes it.

The first rank makes the directory, writes the manifest last, and renames: until then nothing counts as a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import RunConfig, to_dict
from ..data.tokenizers import Tokenizer
from ..hardware import CUDA, on_gpu
from ..job.control import run_on_ranks
from ..job.rendezvous import MARGIN_SECONDS
from ..parallel.layout import Held
from ..parallel.mesh import Mesh
from . import checkpoint
from .storage import Part, parts, share_out, write_whole


class Saver:
    """Writes the checkpoints of one run; every rank has one, and all call it in the same order."""

    def __init__(
        self, root: Path, mesh: Mesh, config: RunConfig, tokenizer: Tokenizer, report: Callable[[str], None] = print
    ) -> None:
        """Every rank makes one at the same time, for they make a process group together.

        Ranks whose disks differ by more than `parallel.timeout_seconds` in the time to write their files fail.
        """
        self.root, self.config, self.tokenizer, self.report = root, config, tokenizer, report
        self._mesh = replace(mesh, control=None)
        if mesh.size > 1:
            from . import shards  # half a second that one process does without, and that no step should pay

            timeout = timedelta(seconds=config.parallel.timeout_seconds + MARGIN_SECONDS)
            self._mesh = replace(mesh, control=dist.new_group(backend="gloo", timeout=timeout))
            self._write_shards = shards.write_shards
        self._twins: list[list[int]] = []  # of each part that is held, the ranks that hold the very same
        self._buffers: list[Tensor] = []
        self._pending: Future[None] | None = None

    def save(self, step: int, held: Sequence[Held], trainer: dict[str, Any]) -> Path:
        """Copies the state as it is now and has it written to `root/step_<n>`; returns that path. A whole one there
        stays.

        Raises:
            OSError: on every rank: the save before this one failed.
        """
        self.wait()
        staged, copied = self._stage(held)
        text = json.dumps({"step": step, **trainer})
        self._pending = pending = Future[None]()

        def settle() -> None:
            try:
                self._write(step, staged, copied, text)
                pending.set_result(None)
            except BaseException as error:
                pending.set_exception(error)

        # A daemon: a rank that is told to die must not wait for its disk.
        threading.Thread(target=settle, name="saver", daemon=True).start()
        return self.root / f"step_{step}"

    def wait(self) -> None:
        """Returns when the last save is on disk; raises as `save` does."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Ends the last save, whatever became of it; safe to call twice."""
        try:
            self.wait()
        except Exception as error:
            self.report(f"the last checkpoint was not saved: {error}")
        if self._mesh.control is not None:
            dist.destroy_process_group(self._mesh.control)
            self._mesh = replace(self._mesh, control=None)

    def _stage(self, held: Sequence[Held]) -> tuple[list[Part], torch.cuda.Event | None]:
        """This rank's share of the state in host memory, and on a GPU the event after which it is complete."""
        mine = self._mine(held)
        gpu = any(on_gpu(part.values) for part in mine)
        if [part.values.shape for part in mine] != [buffer.shape for buffer in self._buffers]:
            shapes = [part.values.shape for part in mine]
            self._buffers = [CUDA.pinned(shape, torch.float32) if gpu else torch.empty(shape) for shape in shapes]
        for part, buffer in zip(mine, self._buffers, strict=True):
            CUDA.copy(buffer, part.values)
        copied = CUDA.event() if gpu else None
        if copied is not None:
            copied.record()  # on the stream of training, whose later changes therefore come after the copies
        return [replace(part, values=buffer) for part, buffer in zip(mine, self._buffers, strict=True)], copied

    def _mine(self, held: Sequence[Held]) -> list[Part]:
        """What this rank writes of the state: shared parts are the first tensor-parallel rank's; ranks that hold the
        same share it out.
        """
        mesh = self._mesh
        if mesh.control is None:
            return parts(held)
        if not self._twins:
            what = [(mesh.tp_rank, each.name, each.kind, each.placement, each.start, each.stop) for each in held]
            mine = [hashlib.sha256(repr(each).encode()).digest() for each in what]
            everyone = [set(theirs) for theirs in mesh.gather(mine)]
            self._twins = [[rank for rank, theirs in enumerate(everyone) if own in theirs] for own in mine]
        alike: dict[tuple[int, ...], list[Held]] = {}  # more than one kind where ranks share experts out
        for each, twins in zip(held, self._twins, strict=True):
            alike.setdefault(tuple(twins), []).append(each)
        shares = [(share_out(parts(some, mesh.tp_rank == 0), len(twins)), twins) for twins, some in alike.items()]
        return [part for share, twins in shares for part in share[twins.index(mesh.rank)]]

    def _write(self, step: int, staged: Sequence[Part], copied: torch.cuda.Event | None, trainer: str) -> None:
        if copied is not None:
            copied.synchronize()
        mesh = self._mesh
        temporary = run_on_ranks(mesh, lambda: checkpoint.start(self.root, step), only_first=True)
        if temporary is None:
            return
        try:
            described: dict[str, dict[str, Any]] = {}
            if mesh.control is None:
                write_whole(temporary, staged)
            else:
                name = self._write_shards(temporary, staged, mesh.control)
                described |= mesh.gather(run_on_ranks(mesh, lambda: (name, checkpoint.describe(temporary / name))))
            run_on_ranks(mesh, lambda: self._finish(temporary, step, described, trainer), only_first=True)
        except BaseException:
            if mesh.rank == 0:
                checkpoint.sweep(self.root)
            raise

    def _finish(self, temporary: Path, step: int, described: dict[str, dict[str, Any]], trainer: str) -> None:
        (temporary / "trainer.json").write_text(trainer)
        (temporary / "config.json").write_text(json.dumps(to_dict(self.config), indent=1))
        self.tokenizer.save(temporary / "tokenizer")
        checkpoint.publish(temporary, self.root / f"step_{step}", described)
        settings = self.config.checkpoint
        checkpoint.prune(self.root, settings.keep, step, settings.at_steps or ())
