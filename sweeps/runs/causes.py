"""What ended an attempt: in a sentence for people, and as the cause by which `retries.decide` goes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ...train.errors import UserError
from ...train.job import failure
from ...train.job.failure import Cause, describe_error
from .directory import RunDirectory


class TrunkNotYet(UserError):
    """A branch was started before its trunk has come to where it begins, which it still may."""


def words_for(error: Exception, run: RunDirectory) -> str:
    """What a run died of, in a sentence."""
    if isinstance(error, OSError) and failure.cause_of(error) == Cause.DISK:
        return f"the disk is full ({error.filename or run.path}); free some space and sweep again"
    return describe_error(error)


def cause_of(error: Exception) -> str:
    """The cause of an attempt that ended with an error, one of `retries.CAUSES`."""
    return "trunk" if isinstance(error, TrunkNotYet) else failure.cause_of(error)


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
