"""Which folder a sweep lives in, so that no command changes what belongs to another sweep.

`identity.json` holds a token, made at the first start, and the sweep's folder. A moved sweep keeps its jobs. A copy
becomes a separate sweep with the first command that changes it; while the original runs, only with `isoflop adopt`.
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


def check_links(sweep: SweepDirectory) -> None:
    """Raise UserError if a symbolic link in a sweep's folder leads out of it. The folder itself may be a link."""
    folders = [sweep.path / name for name in ("runs", "fit", "jobs", "code", "trash")]
    for run in (sweep.path / "runs").glob("*"):
        folders += [run, run / "checkpoints", run / "eval"]
    for link in (folder for folder in folders if folder.is_symlink()):
        if not link.resolve().is_relative_to(sweep.path.resolve()):
            raise UserError(
                f"{link} is a link to {link.resolve()}, outside of the sweep, where isoflop changes nothing; replace "
                "the link by a folder"
            )


def running_original(sweep: SweepDirectory) -> Path | None:
    """Return the folder that this sweep was copied from if the original may be running, else None."""
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
    """Return an error message if a link leads out of a sweep or the sweep is a copy of a running one, else None."""
    try:
        check_links(sweep)
    except UserError as error:
        return str(error)
    if (original := running_original(sweep)) is None:
        return None
    return (
        f"{sweep.path} is a copy of {original}, which is running; wait for it, "
        f"or use `isoflop adopt {sweep.path}` to make the copy a separate sweep"
    )


def claim(sweep: SweepDirectory) -> None:
    """Write identity.json if a sweep is new, was moved, or is a copy. Raises UserError on a `refusal`."""
    if (message := refusal(sweep)) is not None:
        raise UserError(message)
    identity = read_json(sweep.path / IDENTITY, Identity)
    if sweep.copied_from() is not None:
        adopt(sweep)
    elif identity is None or identity["folder"] != str(sweep.path.resolve()):
        _write(sweep, identity["token"] if identity else os.urandom(8).hex())


def adopt(sweep: SweepDirectory) -> int:
    """Turn a copy into a sweep without jobs, its running and queued runs planned again. Returns the number of these."""
    check_links(sweep)
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
