"""The keeper: a tiny SLURM job that looks after a sweep for a moment, starts what must be started again, and goes.

Special here:
- nothing on a login node has to live: two keepers always wait in the queue, for a time each, and the first thing that
  one does is to see to it that there are two again;
- a pass holds the sweep, so there is one at a time, and leaves on disk all that it decides: it can be killed at any
  moment, and the next one goes on;
- what a job or a run came to is read from the run directories; SLURM is asked which jobs live, and where it does not
  answer a pass does nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...train.errors import UserError
from ...train.files import read_json, write_json
from .. import prepare
from ..config import SweepConfig
from ..growth import extend
from ..runs import attempts, membership, retries
from ..runs.directory import RunDirectory, SweepDirectory, now_on
from ..runs.retries import Policy
from ..slurm import commands as slurm
from ..slurm.launch import SlurmLauncher
from ..slurm.submission import QueueFull
from . import conduct_slurm
from .queue import Queue
from .worker import settle_lost

LOCK_SECONDS = 120.0  # that another pass, or a command, may hold the sweep
SCORINGS = 3  # times that a keeper has a run scored
FITS = 3  # times that a keeper has the laws fitted to the same results
RESULTS = ("runs/*/summary.json", "runs/*/eval/*.json")
RECORD = "keeper.json"


@dataclass
class Survey:
    """What is to be done about a sweep's runs."""

    due: dict[str, tuple[str, ...]] = field(default_factory=dict)  # nodes to avoid, by the id of a run to start now
    later: list[str] = field(default_factory=list)  # to be started, or settled, in a later pass


@dataclass(frozen=True)
class Pass:
    """What a pass came to."""

    over: bool  # every run has ended for good, and the laws are fitted to all that is there
    keepers: int  # that wait in the queue for their turn


def keep(sweep_path: str) -> None:
    """One pass; what the keeper's job calls. As many as it needs where one fails, or the queue takes no other keeper.

    If this one went the other would go for the same reason in no time, such as a full disk, and nobody were left.
    """
    sweep, pause = SweepDirectory(Path(sweep_path)), 60.0
    while (sweep.path / "plan.json").exists():
        try:
            with sweep.lock(LOCK_SECONDS):
                pause = prepare.configuration(sweep).cluster.keeper_seconds
                past = tend(sweep)
            if past.over or past.keepers:
                return
        except Exception as error:
            # Whatever it is, the sweep must not be without a keeper.
            with contextlib.suppress(OSError):
                print(f"this pass came to nothing, the next is to come: {error}")
                if not isinstance(error, UserError):
                    traceback.print_exc()
        time.sleep(pause)


def tend(sweep: SweepDirectory, say: Callable[[str], None] = print) -> Pass:
    """Settles what was lost, and submits what is due; the caller holds the sweep.

    Raises:
        UserError: SLURM refuses what is submitted, in its own words.
    """
    config = prepare.configuration(sweep)
    policy = Policy.of(config.cluster)
    try:
        live = slurm.live_jobs()
    except UserError as error:
        say(f"nothing was done: {error}")
        return Pass(over=False, keepers=0)  # for all that is known
    launcher = SlurmLauncher(sweep, config.cluster, live)
    keepers = launcher.keep()
    for name in settle_lost(sweep, policy, live):
        say(f"run {name} was lost: {sweep.run(name).state().reason}")
    extend.replace_diverged(sweep, config)
    memory = read_json(sweep.path / "jobs" / RECORD) or {}
    over = _go_on(sweep, config, launcher, memory)
    write_json(sweep.path / "jobs" / RECORD, memory | {"over": over, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
    if over:
        say("everything has ended")
        launcher.end_keepers()
    return Pass(over, keepers)


def _go_on(sweep: SweepDirectory, config: SweepConfig, launcher: SlurmLauncher, memory: dict[str, Any]) -> bool:
    """Submits what is due: runs, scorings, the fit, the next round; returns whether the sweep is over."""
    policy = Policy.of(config.cluster)
    survey = look(sweep, launcher, policy)
    unscored = _to_score_again(sweep, config, launcher, memory)
    if survey.due or unscored:
        _submit(sweep, launcher, survey.due, unscored)
        for run in unscored:
            if not launcher.to_score([run]):  # the queue may have been full
                memory["scorings"][run.run_id] = memory["scorings"].get(run.run_id, 0) + 1
        return False
    if survey.later or launcher.in_queue():
        _refill(sweep, config, launcher)
        return False
    if (tried := _fit_is_due(sweep, memory)) is not None:
        with contextlib.suppress(QueueFull):  # a later pass asks again
            launcher.fit()
            memory["fits"] = tried
        return False
    if not extend.next_round(sweep, config):
        return True
    _submit(sweep, launcher, look(sweep, launcher, policy).due, [])
    return False


def look(sweep: SweepDirectory, launcher: SlurmLauncher, policy: Policy) -> Survey:
    """Which runs no job has and are to be started: now, or once their time to wait is over."""
    survey, now = Survey(), now_on(sweep.path)
    open_runs = [run for run in membership.members(sweep) if not run.is_done() and not launcher.has_job(run)]
    spent = attempts.retries_spent(sweep) if open_runs else 0
    for run in open_runs:
        state = run.state()
        if state.state in ("cancelled", "diverged"):
            continue
        if state.state == "running":  # not settled yet: it still shows signs of life
            survey.later.append(run.run_id)
            continue
        tries = attempts.current(run)
        decision = retries.decide(tries, policy, spent, now)
        spent += decision.again and bool(tries) and tries[-1].cause in retries.RETRIED
        if decision.again and decision.wait_seconds > 0:
            survey.later.append(run.run_id)
        elif decision.again:
            survey.due[run.run_id] = decision.avoid
    parents = {run["run_id"]: run["parent"] for run in sweep.plan()["runs"]}
    for name in [name for name in survey.due if parents.get(name) in survey.later]:
        del survey.due[name]  # it would wait for a trunk that has no job yet
        survey.later.append(name)
    return survey


def _submit(
    sweep: SweepDirectory, launcher: SlurmLauncher, due: dict[str, tuple[str, ...]], unscored: list[RunDirectory]
) -> None:
    prepared = prepare.from_disk(sweep)
    prepare.write_plan(prepared)
    waiting = [run for run in prepared.directories if run.run_id in due]
    conduct_slurm.start(prepared, launcher, waiting, unscored, due)


def _refill(sweep: SweepDirectory, config: SweepConfig, launcher: SlurmLauncher) -> None:
    """Gives a queue of runs as many workers as what is left in it is worth, where some were lost."""
    seconds = {run["run_id"]: run["estimated_seconds"] for run in sweep.plan()["runs"]}
    for name, workers in launcher.queues().items():
        if not workers or not config.cluster.queue_minutes > 0:
            continue  # its runs have no job and are submitted anew; or it is of an earlier configuration
        queue = Queue.open(sweep, sweep.path / "jobs" / name)
        ready = queue.ready()
        worth = sum(seconds[run] for unit in ready for run in unit.runs) / (60 * config.cluster.queue_minutes)
        idle = len(workers) - len(queue.running())
        most = config.cluster.array_parallelism - len(workers)
        if (missing := min(len(ready), math.ceil(worth)) - idle) > 0 and most > 0:
            launcher.add_workers(queue.folder, min(missing, most), queue.avoided())


def _to_score_again(
    sweep: SweepDirectory, config: SweepConfig, launcher: SlurmLauncher, memory: dict[str, Any]
) -> list[RunDirectory]:
    """Runs whose scoring job ended without scores, a few times each."""
    tries = memory.setdefault("scorings", {})
    unscored = launcher.to_score(conduct_slurm.missing_scores(membership.members(sweep), config))
    return [run for run in unscored if tries.get(run.run_id, 0) < SCORINGS]


def _fit_is_due(sweep: SweepDirectory, memory: dict[str, Any]) -> dict[str, Any] | None:
    """What to remember of a fit that is submitted now, where something was written after the table of the last one.

    None where nothing was, or the laws were to be fitted to this a few times already.
    """
    newest = max((_written(file) for pattern in RESULTS for file in sweep.path.glob(pattern)), default=0.0)
    table = _written(sweep.path / "table.csv")
    if newest == 0.0 or (newest <= table <= _written(sweep.path / "fit" / "law.json")):
        return None
    tried = memory.get("fits") or {}
    tries = tried.get("tries", 0) if tried.get("newest") == newest else 0
    return {"newest": newest, "tries": tries + 1} if tries < FITS else None


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
