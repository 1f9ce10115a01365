"""Asynchronous checkpoint saving: the state is copied to host memory, and a thread writes it."""

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
    """A writer of one run's checkpoints. Every rank has one, and all call it in the same order."""

    def __init__(
        self, root: Path, mesh: Mesh, config: RunConfig, tokenizer: Tokenizer, report: Callable[[str], None] = print
    ) -> None:
        """Set up the saver. A rank waits for others at most `parallel.timeout_seconds`."""
        self.root, self.config, self.tokenizer, self.report = root, config, tokenizer, report
        self._mesh = replace(mesh, control=None)
        if mesh.size > 1:
            from . import shards  # imports take half a second; not needed by one process, and not inside a step

            timeout = timedelta(seconds=config.parallel.timeout_seconds + MARGIN_SECONDS)
            self._mesh = replace(mesh, control=dist.new_group(backend="gloo", timeout=timeout))
            self._write_shards = shards.write_shards
        self._twins: list[list[int]] = []  # for each held tensor, the ranks that hold exactly the same
        self._buffers: list[Tensor] = []
        self._pending: Future[None] | None = None

    def save(self, step: int, held: Sequence[Held], trainer: dict[str, Any]) -> Path:
        """Copy this rank's tensors (`held`) and start writing them to `root/step_<n>`; return that path.

        A valid checkpoint at that path stays. `trainer` is the content of trainer.json.

        Raises:
            OSError: The previous save failed; raised on every rank.
        """
        self.wait()
        staged, copied = self._stage(held)
        text = json.dumps({"step": step, **trainer})
        self._pending = pending = Future[None]()

        def write() -> None:
            try:
                self._write(step, staged, copied, text)
                pending.set_result(None)
            except BaseException as error:
                pending.set_exception(error)

        # A daemon thread, so that a rank that must exit does not wait for its disk.
        threading.Thread(target=write, name="saver", daemon=True).start()
        return self.root / f"step_{step}"

    def wait(self) -> None:
        """Block until the last save is on disk, or raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish the last save; report an error instead of raising it."""
        try:
            self.wait()
        except Exception as error:
            self.report(f"the last checkpoint was not saved: {error}")
        if self._mesh.control is not None:
            dist.destroy_process_group(self._mesh.control)
            self._mesh = replace(self._mesh, control=None)

    def _stage(self, held: Sequence[Held]) -> tuple[list[Part], torch.cuda.Event | None]:
        """Start copying this rank's parts to host memory. Return the copies and, on a GPU, an event for their end."""
        mine = self._mine(held)
        gpu = any(on_gpu(part.values) for part in mine)
        if [part.values.shape for part in mine] != [buffer.shape for buffer in self._buffers]:
            shapes = [part.values.shape for part in mine]
            self._buffers = [CUDA.pinned(shape, torch.float32) if gpu else torch.empty(shape) for shape in shapes]
        for part, buffer in zip(mine, self._buffers, strict=True):
            CUDA.copy(buffer, part.values)
        copied = CUDA.event() if gpu else None
        if copied is not None:
            copied.record()  # on the training stream, so that later updates run after the copies
        return [replace(part, values=buffer) for part, buffer in zip(mine, self._buffers, strict=True)], copied

    def _mine(self, held: Sequence[Held]) -> list[Part]:
        """Return the parts that this rank writes: parts only it holds, and its share of parts that several hold."""
        mesh = self._mesh
        if mesh.control is None:
            return parts(held)
        if not self._twins:
            keys = [(mesh.tp_rank, part.name, part.kind, part.placement, part.start, part.stop) for part in held]
            digests = [hashlib.sha256(repr(key).encode()).digest() for key in keys]
            by_rank = [set(theirs) for theirs in mesh.gather(digests)]
            self._twins = [[rank for rank, theirs in enumerate(by_rank) if digest in theirs] for digest in digests]
        alike: dict[tuple[int, ...], list[Held]] = {}  # several groups if ranks divide the experts
        for part, twins in zip(held, self._twins, strict=True):
            alike.setdefault(tuple(twins), []).append(part)
        shares = [(share_out(parts(group, mesh.tp_rank == 0), len(twins)), twins) for twins, group in alike.items()]
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
