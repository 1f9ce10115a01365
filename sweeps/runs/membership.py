"""Which runs a sweep has: the runs of its plan, and those in `added.json`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ...train.config import RunConfig, run_id
from ...train.errors import UserError
from ...train.files import read_document, write_json
from .attempts import RETRIED, Policy, decide
from .directory import OPEN, AtWork, Busy, RunDirectory, SweepDirectory, locked
from .forms import FolderName
from .journal import Planned

ADDED = "added.json"
STOPPED = "cancel.json"
Added = dict[FolderName, dict[str, str | None]]  # why, instead of which run, and when, by run id


def add_runs(
    sweep: SweepDirectory, runs: Iterable[RunConfig], why: str, replaces: str | None = None, planned: bool = False
) -> list[str]:
    """Add runs to a sweep, whose next plan includes them. Returns the ids of the new ones.

    Args:
        replaces: id of the run that they replace.
        planned: also add runs of the current plan, so that every later plan keeps them.
    """
    present = set() if planned else {run["run_id"] for run in sweep.plan()["runs"]}
    try:
        with locked(sweep.path / f".{ADDED}.lock", 60.0, ADDED):
            added = _added(sweep)
            fresh = [run for run in runs if run_id(run) not in present | added.keys()]
            for run in fresh:
                directory = sweep.run(run_id(run))
                directory.freeze(run)
                if not (directory.path / "state.json").exists():
                    directory.write_event(Planned)
                added[run_id(run)] = {"why": why, "replaces": replaces, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            if fresh:
                write_json(sweep.path / ADDED, added)
            return [run_id(run) for run in fresh]
    except Busy as error:
        raise AtWork(f"{sweep.path} is in use ({error}, for a minute); try again") from error


def added_runs(sweep: SweepDirectory) -> list[RunConfig]:
    """Return the configs of runs that were added to a sweep since it was first planned."""
    return [sweep.run(name).config() for name in _added(sweep)]


def members(sweep: SweepDirectory) -> list[RunDirectory]:
    """Return every run of a sweep: the runs of its plan, then those added since."""
    planned = sweep.runs()
    ids = {run.run_id for run in planned}
    return planned + [sweep.run(name) for name in _added(sweep) if name not in ids]


def find_runs(sweep: SweepDirectory, prefixes: Iterable[str]) -> list[RunDirectory]:
    """Return the runs whose ids begin with `prefixes`. Raises UserError if a prefix fits none or several."""
    runs, chosen = members(sweep), dict[str, RunDirectory]()
    for prefix in prefixes:
        matching = [run for run in runs if run.run_id.startswith(prefix)]
        exact = [run for run in matching if run.run_id == prefix]
        if len(exact or matching) != 1:
            ids = ", ".join(run.run_id for run in matching[:8]) + (", …" if len(matching) > 8 else "")
            raise UserError(
                f"run is {prefix!r}; it must be the beginning of exactly one run id of {sweep.path}, and it matches "
                f"{ids or 'none'}"
            )
        run = (exact or matching)[0]
        chosen[run.run_id] = run
    return list(chosen.values())


def replacements(sweep: SweepDirectory) -> dict[str, str]:
    """Map the id of each replacement run to that of the diverged run it replaces."""
    return {name: entry["replaces"] for name, entry in _added(sweep).items() if entry.get("replaces")}


def retries_spent(sweep: SweepDirectory) -> int:
    runs = (RunDirectory(path) for path in (sweep.path / "runs").glob("*"))
    return sum(attempt.cause in RETRIED for run in runs for attempt in run.record().recent[:-1])


def stop_growth(sweep: SweepDirectory, by: str) -> None:
    """Stop a sweep from replacing diverged runs and starting its grid's next rounds; `by` names the user."""
    write_json(sweep.path / STOPPED, {"by": by, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def allow_growth(sweep: SweepDirectory) -> None:
    """Undo `stop_growth`."""
    (sweep.path / STOPPED).unlink(missing_ok=True)


def is_stopped(sweep: SweepDirectory) -> bool:
    """Return whether a user cancelled the whole sweep since it was last started."""
    return (sweep.path / STOPPED).exists()


def is_over(run: RunDirectory, policy: Policy) -> bool:
    """Return whether a run has ended and will not be retried."""
    state = run.state().state
    if state != "failed":
        return state not in OPEN
    return not decide(run.record().recent, policy, 0, 0.0).again


def _added(sweep: SweepDirectory) -> dict[str, dict[str, Any]]:
    file = sweep.path / ADDED
    if not file.exists():
        return {}
    return read_document(file, Added, remedy="restore it, or remove it to drop the runs that it lists")
