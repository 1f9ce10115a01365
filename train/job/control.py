"""Collective decisions of all ranks on errors, configs and flags, over `mesh.control` on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..config import RunConfig, flatten, to_dict
from ..errors import UserError
from ..parallel.mesh import Mesh
from .failure import Cause, RankError, cause_of, failure_at

T = TypeVar("T")

SHARED = "raised on every rank"  # note on exceptions that all ranks already raise


@dataclass(frozen=True)
class _Raised:
    cause: Cause
    message: str
    system: tuple[int | None, str | None] | None = None  # OSError: errno and file


def run_on_ranks(mesh: Mesh, function: Callable[[], T], only_first: bool = False) -> T:
    """Call a function on every rank and return this rank's result; if it raises on any rank, all ranks raise.

    With `only_first`, only rank 0 calls it, and all ranks return rank 0's result. The function must not communicate.

    Raises:
        UserError, OSError: The function raised it. The message names the first failed rank unless all raised the same.
        RankError: The function raised another exception. In one process an exception passes unchanged.
    """
    if mesh.control is None:
        return function()
    result: Any = None
    error: Exception | None = None
    if mesh.rank == 0 or not only_first:
        try:
            result = function()
        except Exception as raised:
            error = raised
    description = None if error is None else _describe(error)
    if only_first:
        box: list[Any] = [(result, description)]
        dist.broadcast_object_list(box, src=0, group=mesh.control)
        result, description = box[0]
        failures: list[_Raised | None] = [description, *[None] * (mesh.size - 1)]
    else:
        failures = mesh.gather(description)
    if any(failures):
        collective = _shared(mesh, failures)
        collective.add_note(SHARED)
        raise collective from error
    return result


def _describe(error: Exception) -> _Raised:
    cause, message = cause_of(error), str(error) or "no message"
    if isinstance(error, OSError):
        return _Raised(cause, error.strerror or message, (error.errno, str(error.filename) if error.filename else None))
    if isinstance(error, UserError | RankError):
        return _Raised(cause, message)
    return _Raised(cause, f"{type(error).__name__}: {message}")


def _shared(mesh: Mesh, failures: list[_Raised | None]) -> Exception:
    failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    rank, first = failed[0]
    if len(failed) == len(failures) and len({(failure.message, failure.system) for _, failure in failed}) == 1:
        message = first.message
    else:
        message = f"{mesh.name(rank)}: {first.message}"
        if len(failed) > 1:
            message += f" (and {len(failed) - 1} more of {len(failures)} ranks)"
    if first.cause == Cause.INPUT:
        return UserError(message)
    if first.system is not None:
        number, filename = first.system
        return OSError(message) if number is None else OSError(number, message, filename)
    return RankError(failure_at(mesh.hosts, [rank for rank, _ in failed], first.cause, message, None))


def check_same_config(mesh: Mesh, config: RunConfig) -> None:
    """Raise UserError on every rank if ranks have different configs."""
    configs = mesh.gather(flatten(to_dict(config)))
    for rank, other in enumerate(configs):
        for name in configs[0] | other:
            first, second = configs[0].get(name), other.get(name)
            if first != second:
                raise UserError(
                    f"{name} is {second!r} on {mesh.name(rank)} and {first!r} on {mesh.name(0)}; "
                    "every rank must be given the same config"
                )


class Agreement:
    """Agreement of all ranks on whether to stop or save: each gets the same answer at the same step."""

    def __init__(self, mesh: Mesh) -> None:
        self._control = mesh.control
        self._flags = torch.zeros(2, dtype=torch.uint8)  # being reduced while `_work` is set
        self._work: dist.Work | None = None

    def __call__(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """Send this rank's flags. Return whether any rank set `stop`, and `save`, at the previous call.

        Every rank must call it at every step. In one process it returns its own flags at once.
        """
        if self._control is None:
            return stop, save
        agreed = self.close()
        self._flags = torch.tensor([stop, save], dtype=torch.uint8)
        self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self._control, async_op=True)
        return agreed

    def close(self) -> tuple[bool, bool]:
        """Return whether any rank set `stop`, and `save`, at the last call. Call it before the process group ends."""
        if self._work is None:
            return False, False
        self._work.wait()
        self._work = None
        stop, save = self._flags.bool().tolist()
        return stop, save
