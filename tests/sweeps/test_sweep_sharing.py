"""`python sweep.py` with shared work: trunks with branches, and workers that train several runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from isoflop.fit import read_table
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.journal import read_record
from small_runs import until

pytestmark = pytest.mark.slow  # whole sweeps, one after the other

ROOT = Path(__file__).resolve().parents[2]
COMMON = [
    "cluster=local", "tracker=none", "evaluate=none", "cluster.flops_per_second=1e11", "data.max_bytes=2000000",
    "data.sequence_length=64", "data.validation_tokens=8192", "fit.bootstrap=50", "validations=2", "cluster.jobs=2",
    "cluster.threads_per_job=1", "tuning=fixed", "preflight=false",
]  # fmt: skip
# One rung with three D: 95, 190 and 380 steps; the longest run is the trunk of the others.
RUNG = ["+grid=ladder", "grid.sizes=[5e3]", "grid.tokens_per_parameter=[10,20,40]", *COMMON]


def start(arguments: list[str], root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "sweep.py"), *arguments, f"output_root={root}", "sweep=s"]
    # Restore Ctrl-C, which a process ignores if the tests were started in the background.
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=240)
    assert "Traceback" not in output
    return process.returncode, output


def sweep(arguments: list[str], root: Path) -> str:
    code, output = finished(start(arguments, root))
    assert code == 0, output
    return output


def runs(root: Path) -> list[RunDirectory]:
    return SweepDirectory.open(root / "s").runs()


def losses(root: Path) -> dict[str, float]:
    return {run.run_id: (run.summary() or {})["val_loss"] for run in runs(root)}


def plan(root: Path) -> dict[str, Any]:
    return dict(json.loads((root / "s" / "plan.json").read_text()))


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the rung with every run from its first step."""
    root = tmp_path_factory.mktemp("apart")
    sweep([*RUNG, "trunks=false"], root)
    return root


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train the rung as a trunk with branches; return its root and the output."""
    root = tmp_path_factory.mktemp("shared")
    return root, sweep(RUNG, root)


def test_branches_end_as_runs_trained_separately_to_the_last_bit(shared: tuple[Path, str], separate: Path) -> None:
    assert losses(shared[0]) == losses(separate)


def test_the_plan_names_the_trunk_of_each_branch_and_the_saved_flops(shared: tuple[Path, str], separate: Path) -> None:
    shared_plan, separate_plan = plan(shared[0]), plan(separate)
    trunk, *branches = sorted(shared_plan["runs"], key=lambda run: -run["D"])
    assert trunk["parent"] is None
    assert [run["parent"] for run in branches] == [trunk["run_id"]] * 2
    assert [run["first_step"] for run in branches] == [round(0.8 * run["steps"]) for run in branches]
    assert shared_plan["separate_flops"] == pytest.approx(separate_plan["total_flops"])
    # 4 units and a fifth of 2 + 1, instead of 7.
    assert shared_plan["total_flops"] / separate_plan["total_flops"] == pytest.approx(4.6 / 7, rel=0.01)
    assert re.search(r"note: .*2 of 3 runs", shared[1]), shared[1]


def test_a_branch_has_the_files_of_a_run_trained_alone(shared: tuple[Path, str], separate: Path) -> None:
    for run, alone in zip(
        runs(shared[0]), [RunDirectory(separate / "s" / "runs" / r.run_id) for r in runs(shared[0])], strict=True
    ):
        summary, expected = run.summary() or {}, alone.summary() or {}
        for name in ("D", "flops_exact", "val_loss", "val_loss_se", "train_loss", "step", "warmup_share"):
            assert summary[name] == expected[name], name
        curve = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        expected_curve = [json.loads(line) for line in (alone.path / "metrics.jsonl").read_text().splitlines()]
        losses_of_branch = {record["step"]: record["train_loss"] for record in curve}
        regular = {line["step"]: line["train_loss"] for line in expected_curve if line["step"] % 10 == 0}
        # Other logged steps are those where a run is scored on held-out text.
        assert regular.items() <= losses_of_branch.items()


def test_what_has_one_trunk_is_resampled_together(shared: tuple[Path, str]) -> None:
    table = pd.read_csv(shared[0] / "s" / "table.csv")
    assert table["trunk"].notna().sum() == 2
    assert len(set(read_table(shared[0] / "s").group)) == 1


def test_a_trunk_that_is_interrupted_goes_on_and_so_do_its_branches(separate: Path, tmp_path: Path) -> None:
    process = start([*RUNG, "checkpoint.every_steps=30"], tmp_path)
    until(
        lambda: any(
            run.last_metrics().get("step", 0) >= 60 for run in map(RunDirectory, (tmp_path / "s/runs").glob("*"))
        )
    )
    process.send_signal(signal.SIGINT)
    assert finished(process)[0] == 130
    sweep(RUNG, tmp_path)
    assert losses(tmp_path) == losses(separate)


def test_a_killed_worker_is_replaced_and_its_run_is_tried_again(tmp_path: Path) -> None:
    grid = ["+grid=product", "model.width=16", "model.depth=1", "model.heads=1", "grid.axes={seed:[0,1,2]}"]
    settings = ["tokens=40000", "trunks=false", "cluster.jobs=1", "cluster.backoff_seconds=0"]
    process = start([*grid, *COMMON, *settings], tmp_path)
    logs = lambda: [path.read_text() for path in (tmp_path / "s/runs").glob("*/log.txt")]  # noqa: E731
    process_ids = lambda: re.findall(r"process (\d+)", "".join(logs()))  # noqa: E731
    until(process_ids)
    os.kill(int(process_ids()[0]), signal.SIGKILL)
    code, output = finished(process)
    assert code == 0, output
    causes = sorted([attempt.cause for attempt in read_record(run.path).attempts] for run in runs(tmp_path))
    assert causes == [["done"], ["done"], ["killed", "done"]]
    workers = [set(re.findall(r"process (\d+)", log)) for log in logs()]
    assert len(set.union(*workers)) == 2, "the second worker trained all remaining runs"
