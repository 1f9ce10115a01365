"""One rank's part in its job: identity, signs of life, and decisions with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from ..config import RunConfig
from ..errors import COLLECTIVE, Stopped
from ..hardware import CUDA, on_gpu, pick_device
from ..parallel.mesh import Mesh
from ..planner.validation import check_world, validate
from .control import Agreement, check_same_config
from .environment import detect
from .failure import Cause, Failure, RankError, cause_of, describe_error, forget_failure, note_failure
from .rendezvous import meet
from .watchdog import Watchdog

T = TypeVar("T")


@dataclass
class Job:
    """One rank's handle on its job."""

    mesh: Mesh
    device: torch.device
    agree: Agreement
    watchdog: Watchdog
    host: str

    def failure(self, cause: Cause, reason: str) -> Failure:
        return Failure(cause, reason, self.mesh.rank, self.host, self.watchdog.step, (self.host,))


@contextmanager
def join(config: RunConfig, directory: Path, report: Callable[[str], None]) -> Iterator[Job]:
    """Make this process a rank of the run's job while the block runs.

    If another rank dies or hangs while this one is stuck in a collective, the watchdog ends this process. The reason,
    or any exception raised in the block except `Stopped`, is written to failure.json in `directory`.
    """
    ranks, watchdog = detect(), None

    def lost(failure: Failure) -> None:
        note_failure(directory, failure)
        report(failure.reason)

    if ranks.rank == 0:
        forget_failure(directory)  # of an earlier attempt
    try:
        validate(config)
        device = pick_device(config.parallel.device)
        check_world(config, ranks.size, ranks.local_size)
        with meet(ranks, directory, config.parallel, device) as (mesh, store):
            if on_gpu(device):
                device = CUDA.current_device()
            with Watchdog(mesh, store, config.parallel.timeout_seconds, lost) as watchdog:
                check_same_config(mesh, config)
                agreement = Agreement(mesh)
                try:
                    yield Job(mesh, device, agreement, watchdog, ranks.host)
                except COLLECTIVE:  # all ranks leave here, so the reduction can end
                    agreement.close()
                    raise
                agreement.close()
    except Stopped:
        raise
    except Exception as error:
        step = None if watchdog is None else watchdog.step
        if isinstance(error, RankError):
            failure = replace(error.failure, step=step if error.failure.step is None else error.failure.step)
        else:
            failure = Failure(cause_of(error), describe_error(error), ranks.rank, ranks.host, step, (ranks.host,))
        note_failure(directory, failure)
        raise
