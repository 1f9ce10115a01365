"""The cause of a run's failure, `failure.json` in its folder, written by the first process that detects it."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from ..errors import Diverged, OutOfMemory, UserError
from ..files import FAILURE, create_json, read_json

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Cause(StrEnum):
    """The kind of event that ended an attempt."""

    INPUT = "input"  # the user's input is wrong
    DISK = "disk"  # full, or over its quota
    MEMORY = "memory"
    DIVERGED = "diverged"
    ERROR = "error"  # any other exception
    HUNG = "hung"  # alive, without progress
    NODE = "node"  # a node is lost, frozen, or did not start its ranks
    KILLED = "killed"  # a process ended without raising an error
    PROGRAM = "program"  # an external program ended with an error code
    UNKNOWN = "unknown"  # the file names no cause, or one that this version does not have

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        return cls.UNKNOWN


@dataclass(frozen=True)
class Failure:
    cause: Cause = Cause.UNKNOWN
    reason: str = "no reason"  # one sentence
    rank: int | None = None  # the first rank at fault
    host: str | None = None  # its node
    step: int | None = None  # None: before the first, or unknown
    hosts: tuple[str, ...] = ()  # nodes of all ranks at fault


class RankError(Exception):
    """An error raised on every rank when one fails. The message says which rank, where and why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def cause_of(error: BaseException) -> Cause:
    if isinstance(error, RankError):
        return error.failure.cause
    if isinstance(error, UserError):
        return Cause.INPUT
    if isinstance(error, Diverged):
        return Cause.DIVERGED
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return Cause.DISK
    if isinstance(error, OutOfMemory):  # without a smaller micro-batch it would happen again
        return Cause.MEMORY if error.goes_on else Cause.ERROR
    from ..hardware import out_of_memory  # loads torch

    return Cause.MEMORY if out_of_memory(error) else Cause.ERROR


def describe_error(error: BaseException) -> str:
    if isinstance(error, UserError | RankError | Diverged):
        return str(error)
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def failure_at(nodes: Sequence[str], ranks: Sequence[int], cause: Cause, reason: str, step: int | None) -> Failure:
    """Return the failure of the `ranks` at fault. `nodes`: the node of every rank of the job; empty if unknown."""
    hosts = tuple(nodes[rank] for rank in ranks) if nodes else ()
    return Failure(cause, reason, ranks[0], hosts[0] if hosts else None, step, hosts)


def note_failure(directory: Path, failure: Failure) -> None:
    """Write failure.json into a run's folder unless it exists. Ignores a full disk."""
    create_json(directory / FAILURE, asdict(failure))


def read_failure(directory: Path) -> Failure | None:
    """Read failure.json. None if it is missing or unreadable."""
    values = read_json(directory / FAILURE)
    return None if values is None else parse_failure(values)


def parse_failure(values: dict[str, Any]) -> Failure:
    """Make a failure from its fields, all optional. If a field is invalid, the cause is UNKNOWN."""
    try:
        return msgspec.convert(values, Failure)
    except msgspec.ValidationError as error:
        return Failure(reason=f"its {FAILURE} has invalid content ({str(error).replace('`', '')})")


def forget_failure(directory: Path) -> None:
    (directory / FAILURE).unlink(missing_ok=True)
