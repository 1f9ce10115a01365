"""What ended an attempt: in a sentence for people, and as the cause by which `retries.decide` goes."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Mapping

from ...train.errors import UserError
from .directory import RunDirectory

FULL = (errno.ENOSPC, errno.EDQUOT)


class TrunkNotYet(UserError):
    """A branch was started before its trunk has come to where it begins, which it still may."""


def words_for(error: Exception, run: RunDirectory) -> str:
    """What a run died of, in a sentence."""
    from ...train.job.control import RankError

    if isinstance(error, UserError | RankError):
        return str(error)
    if isinstance(error, OSError) and error.errno in FULL:
        return f"the disk is full ({error.filename or run.path}); free some space and sweep again"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def cause_of(error: Exception) -> str:
    """The cause of an attempt that ended with an error, one of `retries.CAUSES`."""
    from ...train.hardware import out_of_memory
    from ...train.job.control import RankError

    if isinstance(error, TrunkNotYet):
        return "trunk"
    if isinstance(error, UserError):
        return "input"
    if isinstance(error, OSError) and error.errno in FULL:
        return "disk"
    if out_of_memory(error) or (isinstance(error, RankError) and "OutOfMemory" in (error.kind or "")):
        return "memory"
    if isinstance(error, RankError) and error.kind is None:  # a rank that is gone, and has raised nothing
        return cause_in(str(error))
    return "error"


def cause_in(words: str | None) -> str:
    """The cause of an attempt whose process is gone, by what was noted of it, as `train.parallel.watchdog` does."""
    if words is None:
        return "killed"
    if raised := re.search(r"\brank \d+ on [^:]+: (\w+): ", words):
        known = {"UserError": "input", "OutOfMemoryError": "memory"}
        return "disk" if "No space left" in words or "quota exceeded" in words else known.get(raised[1], "error")
    if "its node is lost" in words or "did not start within" in words:
        return "node"
    return "hung" if "made no progress" in words else "killed"


def warned_after(environment: Mapping[str, str]) -> float:
    """Seconds after which a SLURM job that is told to stop is told so for its time limit; with none or unknown: never.

    SLURM says when a job ends from 23.02 on, and older ones leave it to `back_to_the_queue` to ask.
    """
    try:
        begins, ends = (int(environment[f"SLURM_JOB_{name}_TIME"]) for name in ("START", "END"))
    except (KeyError, ValueError):
        return math.inf
    seconds = ends - begins
    # Jobs are warned up to two minutes before their end, and a process may begin as late after its job.
    return seconds - min(240.0, 0.75 * seconds)
