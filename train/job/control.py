"""What all ranks decide together: errors, configs and flags, over `mesh.control` on the host.

One process communicates nothing and gets the same answers.
"""

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

SHARED = "raised on every rank"  # a note on exceptions that all ranks know of already


@dataclass(frozen=True)
class _Raised:
    """An exception on one rank, in the form that is sent to the others."""

    cause: Cause
    message: str
    system: tuple[int | None, str | None] | None = None  # OSError: errno and file


def run_on_ranks(mesh: Mesh, function: Callable[[], T], only_first: bool = False) -> T:
    """Calls a function on every rank and returns what it gave; where it raises on any rank, all ranks raise.

    With `only_first` rank 0 alone calls it, and every rank gets its result. The function must not communicate.

    Raises:
        UserError, OSError: as the function did, naming the rank unless all say the same.
        RankError: any other exception. In one process an exception passes unchanged.
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
    mine = None if error is None else _describe(error)
    if only_first:
        box: list[Any] = [(result, mine)]
        dist.broadcast_object_list(box, src=0, group=mesh.control)
        result, mine = box[0]
        failures: list[_Raised | None] = [mine, *[None] * (mesh.size - 1)]
    else:
        failures = mesh.gather(mine)
    if any(failures):
        shared = _shared(mesh, failures)
        shared.add_note(SHARED)
        raise shared from error
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
    """Raises `UserError` on every rank where ranks were given different configs."""
    configs = mesh.gather(flatten(to_dict(config)))
    for rank, other in enumerate(configs):
        for name in configs[0] | other:
            here, there = configs[0].get(name), other.get(name)
            if here != there:
                raise UserError(
                    f"{name} is {there!r} on {mesh.name(rank)} and {here!r} on {mesh.name(0)}; "
                    "every rank must be given the same config"
                )


class Agreement:
    """Whether any rank wants to stop, or to save: the same answer on every rank at the same step."""

    def __init__(self, mesh: Mesh) -> None:
        self._control = mesh.control
        self._flags = torch.zeros(2, dtype=torch.uint8)  # being reduced while there is work
        self._work: dist.Work | None = None

    def __call__(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """Says what this rank wants; returns what any rank wanted at the call before, for one process at this one.

        Every rank calls it at every step, and none waits: a reduction that starts at one call is read at the next.
        """
        if self._control is None:
            return stop, save
        agreed = self.close()
        self._flags = torch.tensor([stop, save], dtype=torch.uint8)
        self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self._control, async_op=True)
        return agreed

    def close(self) -> tuple[bool, bool]:
        """Waits for the last reduction, without which the group must not be left; returns its result."""
        if self._work is None:
            return False, False
        self._work.wait()
        self._work = None
        stop, save = self._flags.bool().tolist()
        return stop, save
