"""What all ranks decide together: errors, configs and flags, over `mesh.control` on the host.

One process communicates nothing and gets the same answers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..config import RunConfig, to_dict
from ..errors import UserError
from ..parallel.mesh import Mesh
from .failure import Cause, RankError, cause_of, failure_at

T = TypeVar("T")

SHARED = "raised on every rank"  # note on exceptions that no rank needs to tell the others of


@dataclass(frozen=True)
class _Raised:
    """An exception of one rank, as the others hear of it."""

    family: str  # UserError | OSError | RankError
    cause: Cause
    message: str
    number: int | None = None  # OSError: errno
    filename: str | None = None  # OSError


def run_on_ranks(mesh: Mesh, function: Callable[[], T], only_first: bool = False) -> T:
    """Calls a function on every rank and returns what it gave; where it raises on any rank, all ranks raise.

    With `only_first` rank 0 alone calls it, and its result (must pickle) is returned on every rank. The function must
    not communicate on `mesh.control`, nor on anything that other ranks wait for once it has raised.

    Raises:
        UserError, OSError: as the function did, naming the rank ("rank 3 on node07: …") unless all say the same.
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
        failures = [None] * mesh.size
        dist.all_gather_object(failures, mine, group=mesh.control)
    if any(failures):
        shared = _shared(mesh, failures)
        shared.add_note(SHARED)
        raise shared from error
    return result


def _describe(error: Exception) -> _Raised:
    cause, message = cause_of(error), str(error) or "no message"
    if isinstance(error, UserError):
        return _Raised("UserError", cause, message)
    if isinstance(error, OSError):
        words = error.strerror or message
        return _Raised("OSError", cause, words, error.errno, str(error.filename) if error.filename else None)
    if isinstance(error, RankError):
        return _Raised("RankError", cause, message)
    return _Raised("RankError", cause, f"{type(error).__name__}: {message}")


def _shared(mesh: Mesh, failures: list[_Raised | None]) -> Exception:
    """The exception that every rank raises, from the failures by rank."""
    failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    rank, first = failed[0]
    if len(failed) == len(failures) and len({(failure.message, failure.filename) for _, failure in failed}) == 1:
        message = first.message
    else:
        message = f"{mesh.name(rank)}: {first.message}"
        if len(failed) > 1:
            message += f" (and {len(failed) - 1} more of {len(failures)} ranks)"
    if first.family == "UserError":
        return UserError(message)
    if first.family == "OSError":
        return OSError(first.number, message, first.filename) if first.number is not None else OSError(message)
    return RankError(failure_at(mesh.hosts, [rank for rank, _ in failed], first.cause, message, None))


def check_same_config(mesh: Mesh, config: RunConfig) -> None:
    """Refuses ranks that were given different configs.

    Raises:
        UserError: on every rank, naming the rank, the field and both values.
    """
    if mesh.control is None:
        return
    configs: list[dict[str, Any]] = [{}] * mesh.size
    dist.all_gather_object(configs, _flat(to_dict(config)), group=mesh.control)
    for rank, other in enumerate(configs):
        for name in configs[0] | other:
            here, there = configs[0].get(name), other.get(name)
            if here != there:
                raise UserError(
                    f"{name} is {there!r} on {mesh.name(rank)} and {here!r} on {mesh.name(0)}; "
                    "every rank must be given the same config"
                )


def _flat(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in node.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


class Flag(enum.IntFlag):
    """What a rank asks of all."""

    STOP = 1
    SAVE = 2


class Agreement:
    """Flags that any rank has raised, the same on every rank at the same step."""

    def __init__(self, mesh: Mesh) -> None:
        self._control = mesh.control
        self._flags: torch.Tensor | None = None  # (1,) int64, being reduced
        self._work: dist.Work | None = None

    def __call__(self, flags: Flag) -> Flag:
        """Raises this rank's flags and returns what all ranks raised at the call before; one process: at this one.

        Every rank calls it at every step. No step waits: a reduction that starts at one call is read at the next.
        """
        if self._control is None:
            return flags
        agreed = self._read()
        self._flags = torch.tensor([int(flags)])
        self._work = dist.all_reduce(self._flags, dist.ReduceOp.BOR, group=self._control, async_op=True)
        return agreed

    def close(self) -> Flag:
        """Waits for the last reduction, without which the group must not be left; returns its flags."""
        return self._read()

    def _read(self) -> Flag:
        if self._work is None or self._flags is None:
            return Flag(0)
        self._work.wait()
        agreed = Flag(int(self._flags.item()))
        self._flags = self._work = None
        return agreed
