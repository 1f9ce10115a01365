"""Why a run failed: `failure.json` in its folder, written by the first process that knows."""

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
    """What ended an attempt."""

    INPUT = "input"  # the user's input is wrong
    DISK = "disk"  # full, or over its quota
    MEMORY = "memory"
    DIVERGED = "diverged"
    ERROR = "error"  # any other exception
    HUNG = "hung"  # alive, without progress
    NODE = "node"  # a node is lost, frozen, or did not start its ranks
    KILLED = "killed"  # a process ended without an error of its own
    UNKNOWN = "unknown"  # the file names no cause, or one of another version

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        return cls.UNKNOWN


@dataclass(frozen=True)
class Failure:
    """What ended an attempt, and where: what failure.json holds."""

    cause: Cause = Cause.UNKNOWN
    reason: str = "no reason"  # in a sentence
    rank: int | None = None  # the first of those at fault
    host: str | None = None  # its node
    step: int | None = None  # None: before the first, or nobody knows
    hosts: tuple[str, ...] = ()  # nodes of all ranks at fault


class RankError(Exception):
    """A rank failed; raised on every rank. The message says which, where and of what."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def cause_of(error: BaseException) -> Cause:
    """The cause that an exception stands for."""
    if isinstance(error, RankError):
        return error.failure.cause
    if isinstance(error, UserError):
        return Cause.INPUT
    if isinstance(error, Diverged):
        return Cause.DIVERGED
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return Cause.DISK
    if isinstance(error, OutOfMemory):  # where no start to come takes a smaller micro-batch, it would only happen again
        return Cause.MEMORY if error.goes_on else Cause.ERROR
    from ..hardware import out_of_memory  # loads torch

    return Cause.MEMORY if out_of_memory(error) else Cause.ERROR


def describe_error(error: BaseException) -> str:
    """An exception in one line: bad input in its own words, anything else with the name of its type."""
    if isinstance(error, UserError | RankError | Diverged):
        return str(error)
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def failure_at(nodes: Sequence[str], ranks: Sequence[int], cause: Cause, reason: str, step: int | None) -> Failure:
    """A failure of these ranks, given the node of every rank of the job where they are known."""
    hosts = tuple(nodes[rank] for rank in ranks) if nodes else ()
    return Failure(cause, reason, ranks[0], hosts[0] if hosts else None, step, hosts)


def note_failure(directory: Path, failure: Failure) -> None:
    """Writes failure.json into a run's folder unless there is one, so the first word stays; a full disk is no error."""
    create_json(directory / FAILURE, asdict(failure))


def read_failure(directory: Path) -> Failure | None:
    """What failure.json says; None where there is none, or it cannot be read."""
    values = read_json(directory / FAILURE)
    return None if values is None else parse_failure(values)


def parse_failure(values: dict[str, Any]) -> Failure:
    """A failure from its fields, of which none need be there."""
    try:
        return msgspec.convert(values, Failure)
    except msgspec.ValidationError as error:
        return Failure(reason=f"its {FAILURE} cannot be understood ({str(error).replace('`', '')})")


def forget_failure(directory: Path) -> None:
    """For a new attempt."""
    (directory / FAILURE).unlink(missing_ok=True)
