"""A sweep with random faults ends with the numbers of an undisturbed one: a small bench/faults.py.

It kills daemons of the cluster, so no other test may use it meanwhile (`exclusive_cluster` in conftest.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from isoflop.bench import faults as suite
from isoflop.sweeps.runs.directory import SweepDirectory
from slurm_sweeps import DEADLINE
from small_runs import set_state

FAULTS = 6  # at most: a fast machine finishes training before the last one

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("own_cluster")]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a grid of six runs that take about three seconds on this machine."""
    return suite.grid(6, suite.tokens_for(3.0, tmp_path_factory.mktemp("faults")))


@pytest.fixture(scope="module")
def reference(grid: list[str], tmp_path_factory: pytest.TempPathFactory) -> SweepDirectory:
    """Train the grid without faults."""
    return suite.train_here(grid, tmp_path_factory.mktemp("faults"))


def test_the_suite_reports_each_kind_of_damage(reference: SweepDirectory, tmp_path: Path) -> None:
    """Check that the suite reports nothing for an undisturbed sweep, and names each kind of damage."""
    shutil.copytree(reference.path, tmp_path / "sweep")
    sweep = SweepDirectory.open(tmp_path / "sweep")
    assert suite.check(sweep, reference) == []
    first, second, third, fourth, *_ = sweep.runs()
    summary = json.loads((first.path / "summary.json").read_text())
    (first.path / "summary.json").write_text(json.dumps(summary | {"val_loss": summary["val_loss"] + 1e-9}))
    metrics = (second.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (second.path / "metrics.jsonl").write_text("".join([*metrics[:9], metrics[4], *metrics[9:]]))
    events = third.path / "events.jsonl"
    planned, *start, end = map(json.loads, events.read_text().splitlines())
    killed = end | {"state": "failed", "cause": "killed"}
    restart = start[-1] | {"attempt": 2, "at": end["ended"] - 1.0}
    lines = [planned, *start, killed, restart, end | {"attempt": 2}]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    set_state(fourth, "failed", reason="it was lost")
    report = "\n".join(suite.check(sweep, reference))
    assert f"run {first.run_id}: val_loss is" in report
    assert f"run {second.run_id}: its steps go back 1 times in 1 starts, so two trained it at once" in report
    assert f"run {third.run_id}: attempt 2 began 1.00 s before the end" in report
    assert f"run {fourth.run_id}: is failed: it was lost" in report


def test_faults_cost_time_and_change_nothing(grid: list[str], reference: SweepDirectory) -> None:
    with suite.scratch(None) as (folder, disk):
        places = (reference, disk or folder, disk)
        strikes, complaints, _ = suite.disturb(grid, *places, count=FAULTS, seed=0, patience=DEADLINE, every=2.0)
        assert complaints == []
        assert strikes
        assert len({strike.kind for strike in strikes}) == len(strikes), "each has a different kind"
