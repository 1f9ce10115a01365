"""Which folder a sweep lives in, so that a command on a copy of it touches no job of the original.

`identity.json` holds a token, made when the sweep was first started, and the sweep's folder. A sweep whose folder was
moved keeps its jobs. A copy becomes a sweep of its own with the first command that changes it; while the original is
running, only `isoflop adopt` makes it one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ...train.errors import UserError
from ...train.files import read_json, write_json
from ..config import cluster_of
from ..runs import lease, membership
from ..runs.attempts import Policy
from ..runs.directory import IDENTITY, SweepDirectory, lock_token
from ..runs.forms import Identity
from ..slurm.jobs import LAUNCH, MEMORY, jobs_of


def running_original(sweep: SweepDirectory) -> Path | None:
    """Return the sweep of which this folder is a copy, if it may be running."""
    if (original := sweep.copied_from()) is None:
        return None
    with suppress(OSError):  # a folder of another user may have a lock that cannot be opened
        if original.launcher_alive(lock_token(original.path)):
            return original.path
    try:
        return original.path if jobs_of(original) else None
    except UserError:  # SLURM does not answer
        return original.path


def refusal(sweep: SweepDirectory) -> str | None:
    """Return the error message for a command that changes a copy of a running sweep; None for any other folder."""
    if (original := running_original(sweep)) is None:
        return None
    return (
        f"{sweep.path} is a copy of {original}, which is running; wait for it, "
        f"or use `isoflop adopt {sweep.path}` to make the copy a separate sweep"
    )


def claim(sweep: SweepDirectory) -> None:
    """Write the identity of a sweep that is new, was moved, or is a copy. UserError: the original is running."""
    if (message := refusal(sweep)) is not None:
        raise UserError(message)
    identity = read_json(sweep.path / IDENTITY, Identity)
    if sweep.copied_from() is not None:
        adopt(sweep)
    elif identity is None or identity["folder"] != str(sweep.path.resolve()):
        _write(sweep, identity["token"] if identity else os.urandom(8).hex())


def adopt(sweep: SweepDirectory) -> int:
    """Make a copy a separate sweep without jobs. Returns how many of its runs were under way and are planned again."""
    for name in (LAUNCH, MEMORY):
        (sweep.path / "jobs" / name).unlink(missing_ok=True)
    _write(sweep, os.urandom(8).hex())
    policy, count = Policy.of(cluster_of(sweep.settings())), 0
    for run in membership.members(sweep):
        if run.state().state in ("running", "queued"):
            run.forget_signs()  # of the original's worker
            lease.reset(run, policy)
            count += 1
    return count


def _write(sweep: SweepDirectory, token: str) -> None:
    write_json(sweep.path / IDENTITY, Identity(token=token, folder=str(sweep.path.resolve())))
