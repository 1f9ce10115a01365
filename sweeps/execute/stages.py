"""What a sweep does alike on this machine and on SLURM: its data before, which scores it lacks, and how it came out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable

from ..config import SweepConfig
from ..prepare import Prepared
from ..runs import attempts, membership
from ..runs.directory import Busy, RunDirectory


def is_scored(run: RunDirectory, config: SweepConfig) -> bool:
    """Whether every wanted checkpoint has a scores file for this evaluation."""
    from ..results.scoring import is_scored as scored

    return scored(run, dataclasses.asdict(config.evaluate))


def renew(runs: Iterable[RunDirectory]) -> None:
    """Gives a new budget to those that had come to an end, for somebody asks for them again."""
    for run in runs:
        if run.state().state in ("failed", "diverged", "cancelled"):
            with contextlib.suppress(Busy):
                attempts.retry_by_hand(run)


def prepare_data(run: RunDirectory) -> None:
    """Builds the shards before any job starts, with a progress bar; jobs then find them."""
    from ...train.data.shards import prepare_with_progress

    prepare_with_progress(run.config().data)


def outcome(prepared: Prepared) -> int:
    """The exit code, after a line for every run that is not done."""
    config, sweep = prepared.config, prepared.sweep
    replaced = membership.replacements(sweep)
    stands_in = {old: sweep.run(new) for new, old in replaced.items()}
    unfinished = [run for run in prepared.directories if not run.is_done()]
    done = [run for run in prepared.directories if run.is_done()]
    missing = [run for run in done if not is_scored(run, config)] if config.evaluate.tasks else []
    code = 1 if missing else 0
    for run in unfinished:
        print(f"run {run.run_id} is {run.state().state}: {run.state().reason}")
        other = stands_in.get(run.run_id)
        if other is not None and other.is_done():
            print(f"run {other.run_id} was trained in its place, at a lower learning rate")
        else:
            code = 1
    if missing:
        print(f"{len(missing)} runs could not be scored; the reasons are in {sweep.path / 'runs'}/<run>/log.txt")
    return code
