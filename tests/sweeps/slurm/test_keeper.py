"""Sweeps with keepers on a real SLURM: lost runs and workers are restarted without a user."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from isoflop.sweeps.runs.directory import RunDirectory
from isoflop.train.files import read_json
from slurm_sweeps import EVERY, LONG, Sweep, process_of, sweeps_in, until

pytestmark = pytest.mark.slurm

# The keeper looks every ten seconds and retries soon; more often, keepers alone keep two cores busy.
KEEPER_OPTIONS = [
    "cluster.retries=3", "cluster.keeper_seconds=10", "cluster.heartbeat_seconds=1", "cluster.backoff_seconds=1",
    "checkpoint.every_seconds=0.5",
]  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Callable[[str], Sweep]]:
    with sweeps_in(tmp_path / "outputs") as make:
        yield make


def wait_for_end(sweep: Sweep) -> None:
    until(lambda: not sweep.queue(EVERY), f"the end of {sweep.name}, keepers and all")


def causes(run: RunDirectory) -> list[str]:
    return [attempt.cause for attempt in run.record().attempts]


def test_killed_runs_are_trained_again_and_fitted_without_a_terminal(sweep: Callable[[str], Sweep]) -> None:
    killed = sweep("kept")
    killed.submit(*LONG, *KEEPER_OPTIONS, "tokens=300_000", "grid.axes={seed: [0]}", "cluster.queue_minutes=0")
    (run,) = killed.runs().values()
    until(lambda: list(run.path.glob("checkpoints/step_*/*")), "a checkpoint")
    os.kill(process_of(run, 0), signal.SIGKILL)
    wait_for_end(killed)
    assert (killed.states(), causes(run)) == (["done"], ["killed", "done"]), killed.job_logs()
    assert re.search(r"resumed from step_\d+", (run.path / "log.txt").read_text())
    assert (killed.path / "fit" / "report.html").exists()
    assert (read_json(killed.path / "jobs" / "keeper.json") or {})["over"] is True
    first, second = run.record().attempts
    assert first.flops_wasted == pytest.approx((first.last_step - first.saved_step) * run_flops_per_step(run))
    assert second.first_step == first.saved_step
    assert second.flops_wasted == 0


def run_flops_per_step(run: RunDirectory) -> float:
    summary = run.summary() or {}
    return summary["flops_exact"] / summary["step"]


def test_a_run_that_diverges_is_replaced_where_the_grid_says_so(sweep: Callable[[str], Sweep]) -> None:
    mixed = sweep("mixed")
    grid = ["grid.axes={optimizer.learning_rate: [1e12]}", "grid.diverged_rate_factor=1e-14"]
    mixed.submit(*LONG, *KEEPER_OPTIONS, "tokens=20_000", *grid)
    wait_for_end(mixed)
    states = {run.config().optimizer.learning_rate: run.state().state for run in mixed.runs().values()}
    assert states == {1e12: "diverged", 1e-2: "done"}, mixed.job_logs()
    assert len((mixed.path / "table.csv").read_text().splitlines()) == 1 + 1


def test_a_sweep_without_keepers_says_so_and_retry_brings_them_back(sweep: Callable[[str], Sweep]) -> None:
    unattended = sweep("left")
    unattended.submit(*LONG, *KEEPER_OPTIONS, "tokens=4_500_000", "grid.axes={seed: [0]}", "cluster.queue_minutes=0")
    command = ["-m", "isoflop.sweeps.cli.main"]
    isoflop(*command, "doctor", str(unattended.path))
    unattended.cancel_jobs("keeper")
    output = isoflop(*command, "doctor", str(unattended.path), code=1)
    assert "this sweep has no keeper job in SLURM's queue, so nothing restarts its workers (isoflop retry" in output
    assert "this sweep has no keeper job" in isoflop(*command, "status", str(unattended.path))
    isoflop(*command, "retry", str(unattended.path))
    assert len(unattended.queue("keeper")) == 2
    assert "no keeper" not in isoflop(*command, "status", str(unattended.path))
    isoflop(*command, "cancel", str(unattended.path))
    wait_for_end(unattended)
    assert "no keeper" not in isoflop(*command, "status", str(unattended.path))


def test_a_sweep_is_extended_while_it_runs_and_a_run_of_it_cancelled(sweep: Callable[[str], Sweep]) -> None:
    extended = sweep("grown")
    extended.submit(*LONG, *KEEPER_OPTIONS, "tokens=1_200_000", "grid.axes={seed: [0, 1]}", "cluster.queue_minutes=0")
    first, second = extended.runs().values()
    until(lambda: all(run.last_metrics() for run in (first, second)), "first steps")
    command = ["-m", "isoflop.sweeps.cli.main"]
    isoflop(*command, "extend", str(extended.path), "grid.axes={seed: [2], tokens: [20_000]}")
    (third,) = [run for name, run in extended.runs().items() if name not in (first.run_id, second.run_id)]
    isoflop(*command, "cancel", str(extended.path), second.run_id[:6])
    until(lambda: second.state().state == "cancelled", "the second run to stop")
    wait_for_end(extended)
    assert (first.state().state, third.state().state) == ("done", "done"), extended.job_logs()
    assert second.summary() is None
    isoflop(*command, "retry", str(extended.path), second.run_id)
    wait_for_end(extended)
    assert causes(second) == ["cancelled", "done"], extended.job_logs()


def isoflop(*arguments: str, code: int = 0) -> str:
    process = subprocess.run(
        [sys.executable, *arguments], text=True, capture_output=True, timeout=120, check=False, stdin=subprocess.DEVNULL
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process.stdout
