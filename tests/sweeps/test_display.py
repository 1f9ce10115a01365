"""What the terminal shows: the dry run's plan, runs as they end or are tried again, and what a sweep has cost."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from isoflop.sweeps import terminal
from isoflop.sweeps.config import ClusterConfig, LadderGrid
from isoflop.sweeps.execute.display import Display, print_plan
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.plan.sweep_plan import plan_runs
from isoflop.sweeps.results.finish import cost_lines, print_law
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.train.config import ModelConfig, RunConfig
from isoflop.train.files import write_json
from rich.console import Console


def runs() -> list[RunConfig]:
    points = LadderGrid(sizes=[1e4, 1e5, 1e6], tokens=[20000, 40000])
    return expand_grid(points, RunConfig(model=ModelConfig(vocab_size=256), tokens=0))


def shown(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    print_plan(*arguments)
    return capsys.readouterr().out


def test_a_long_plan_is_folded_and_a_short_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    short_plan = plan_runs(runs(), ClusterConfig(), 1e12, 2)
    said = shown(capsys, short_plan, ClusterConfig())
    assert all(run.run_id in said for run in short_plan.runs)
    many = [dataclasses.replace(run, seed=seed) for run in runs() for seed in range(8)]
    long_plan = plan_runs(many, ClusterConfig(), 1e12, 2)
    said = shown(capsys, long_plan, ClusterConfig())
    assert [run.run_id in said for run in long_plan.runs] == 20 * [True] + 23 * [False] + 5 * [True]
    assert "48 runs" in said
    assert "… 23 more …" in said


def test_a_dry_run_says_cost_source_jobs_and_expected_starts(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ClusterConfig(kind="slurm", gpus_per_job=1, cpus_per_task=4, dollars_per_gpu_hour=2.0, queue_minutes=1.0)
    planned = plan_runs(runs(), cluster, 3e9, 8)
    short = [run.estimated_seconds for run in planned.runs if run.estimated_seconds < 60]
    assert 60 < sum(short) < 120
    assert len(short) == len(planned.runs) - 2
    said = shown(capsys, planned, cluster, {planned.runs[0].shape: "2030-01-02T03:04:05"})
    assert f"{planned.gpu_hours:.3g} GPU-hours, ${2 * planned.gpu_hours:,.2f}" in said
    assert "assumed rates" in said
    assert f"jobs: 2 array tasks and 2 workers for a queue of {len(short)} shorter ones" in said
    assert "a job of 1 GPU, 4 cores and 8 GB would start about 2030-01-02T03:04:05, says SLURM" in said
    said = shown(capsys, dataclasses.replace(planned, measured_runs=38), cluster)
    assert "from 38 runs that were measured on this partition" in said
    said = shown(capsys, plan_runs(runs(), ClusterConfig(), 1e10, 2), ClusterConfig())
    assert "core-hours" in said
    assert "jobs:" not in said


def test_a_run_that_is_tried_again_is_said_so_and_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, sweep = plan_runs(runs()[:2], ClusterConfig(), 1e12, 1), SweepDirectory(tmp_path)
    directories = [sweep.run(run.run_id) for run in planned.runs]
    for directory in directories:
        directory.set_state("queued")
    one, other = (directory.run_id for directory in directories)
    lost = {"attempt": 1, "began": 0.0, "ended": 1.0, "seconds": 1.0, "host": "here", "job_id": "1", "cause": "killed"}
    lost |= {"reason": "its process was killed", "first_step": 0, "last_step": 5, "saved_step": 0, "flops": 1.0}
    lost |= {"flops_wasted": 1.0, "gpus": 0.0, "share": 1.0}
    summary = {"val_loss": 1.5, "seconds": 3.0}
    with Display(planned, sweep, directories) as display:
        directories[0].set_state("running", attempt=1)
        display.update([one], [])
        directories[0].set_state("queued", reason="its process was killed; to be tried again")
        display.update([], [one])
        assert capsys.readouterr().out == "", "it is not over"
        (directories[0].path / "attempts.jsonl").write_text(json.dumps(lost) + "\n")
        directories[0].set_state("running", attempt=2)
        display.update([one], [])
        display.update([one], [])
        said = f"run {one}: attempt 1 ended (killed: its process was killed); trying again\n"
        assert capsys.readouterr().out == said
        directories[0].set_state("done")
        write_json(directories[0].path / "summary.json", summary)
        display.update([], [])
        assert capsys.readouterr().out.startswith(f"[1/2] {one}")
        directories[1].set_state("failed", attempt=1, reason="such is life")
        display.update([], [other])
        assert capsys.readouterr().out.startswith(f"[2/2] {other}")
        display.update([], [])
        assert capsys.readouterr().out == ""


def test_what_a_sweep_cost_is_said_in_two_lines() -> None:
    costs: dict[str, Any] = {
        "unit": "GPU-hours", "runs": 24, "done": 23, "retries": 5, "retry_budget": 100, "measured_runs": 38,
        "planned": {"hours": 20.0}, "used": {"hours": 25.0, "dollars": 62.5, "flops": 2.75e19},
        "wasted": {"hours": 3.0, "flops": 3.5e18}, "error": {"ratio": 1.17},
        "causes": {name: {"attempts": count} for name, count in zip("abcde", (2, 0, 3, 1, 1), strict=True)},
    }  # fmt: skip
    spent, wasted = cost_lines(costs)
    for words in ("23 of 24 runs", "25 GPU-hours", "$62.50", "planned: 20", "1.17 times", "38 measured"):
        assert words in spent
    for words in ("3 GPU-hours (12.0%)", "3.5e+18 FLOPs", "2 a, 3 c, 1 d and 1 more", "5 of 100 retries"):
        assert words in wasted
    costs |= {"causes": {}, "wasted": {"hours": 0.0}, "error": None, "measured_runs": 0, "retries": 0}
    costs["used"]["dollars"] = None
    spent, wasted = cost_lines(costs)
    assert "$" not in spent
    assert "nothing was wasted" in wasted


@pytest.mark.parametrize(("width", "lines"), [(120, 5 + 2), (80, 5 + 2 * 2)])
def test_budgets_stay_readable_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, lines: int
) -> None:
    monkeypatch.setattr(terminal, "console", lambda: Console(width=width))
    item = {"N": 1.274e9, "N_ci": [9.87e8, 1.543e9], "D": 2.5e12, "D_ci": [1.11e12, 9.99e12], "loss": 2.1234}
    item |= {"flops": 1.91e22, "loss_ci": [2.0, 2.2]}
    approaches = {"parametric": {"optimal": [item]}}
    print_law({"convention": "6nd", "intervals": "mixture", "optimal": [item], "approaches": approaches}, "wide")
    said = capsys.readouterr().out.splitlines()[:lines]
    text = "\n".join(said)
    assert max(map(len, said)) <= width
    assert "…" not in text
    for whole in ("1.91e+22", "parametric", "1.27B", "[987M, 1.54B]", "[1.11T, 9.99T]", "1.96k", "[2.000, 2.200]"):
        assert text.count(whole) == (1 if whole == "parametric" else 2), whole
