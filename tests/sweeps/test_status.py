"""`isoflop status` and `isoflop logs`: rows of many runs, estimated times, and lines of growing logs."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from isoflop.sweeps import terminal
from isoflop.sweeps.config import ClusterConfig
from isoflop.sweeps.execute.display import LiveView, print_plan
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.grid.ladder import LadderGrid
from isoflop.sweeps.observe import logs, status
from isoflop.sweeps.observe.doctor import examine_sweep
from isoflop.sweeps.plan.sweep_plan import plan_runs
from isoflop.sweeps.results import accounting
from isoflop.sweeps.results.finish import print_law
from isoflop.sweeps.runs import membership
from isoflop.sweeps.runs.attempts import Attempt
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory, now_on
from isoflop.sweeps.runs.journal import OLD_LINES, Started, append
from isoflop.sweeps.slurm.jobs import label_of
from isoflop.train.config import ModelConfig, RunConfig, run_id
from isoflop.train.files import write_json
from rich.console import Console
from small_runs import Capture, Patch, end, set_state


def make_sweep(folder: Path, count: int = 4, gpus: int = 1) -> SweepDirectory:
    """Plan a sweep of runs that differ in their seed."""
    sweep = SweepDirectory(folder)
    runs = [RunConfig(model=ModelConfig(vocab_size=256), tokens=2**16, seed=seed) for seed in range(count)]
    cluster = ClusterConfig(gpus_per_job=gpus)
    for run in runs:
        directory = sweep.run(run_id(run))
        directory.freeze(run)
        set_state(directory, "planned")
    write_json(folder / "plan.json", plan_runs(runs, cluster, 1e11, 1).to_dict())
    (folder / "sweep.yaml").write_text("config: {cluster: {heartbeat_seconds: 10.0}}\n")
    return sweep


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDirectory:
    return make_sweep(tmp_path / "sweep")


def metrics(run: RunDirectory, **values: object) -> None:
    record = {"step": 10, "tokens": 2**15, "train_loss": 3.0, "tokens_per_s": 2.0**10, "mfu": 0.4, **values}
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def row_of(sweep: SweepDirectory, run: RunDirectory) -> dict[str, Any]:
    return next(row for row in status.sweep_status(sweep)["runs"] if row["run_id"] == run.run_id)


def begin(run: RunDirectory, seconds_ago: float) -> None:
    """Write an attempt that began `seconds_ago`, with its last sign of life at that time."""
    start = now_on(run.path) - seconds_ago
    set_state(run, "planned", attempt=0)
    append(run.path, Started(at=start, attempt=1, host="node1", job_id="7_0"))
    run.give_sign()
    os.utime(run.path / "heartbeat", (start, start))


def test_a_running_run_says_when_it_ends_and_what_it_has_cost(sweep: SweepDirectory) -> None:
    run = sweep.runs()[0]
    metrics(run)
    begin(run, seconds_ago=20)
    row = row_of(sweep, run)
    assert row["eta_seconds"] == 2**15 / 2**10  # half of its tokens are left
    assert row["gpu_hours"] == pytest.approx(20 / 3600, rel=0.1)
    assert not row["silent"]
    assert row["heartbeat_age"] == pytest.approx(20, abs=2)


def write_attempt(run: RunDirectory, cause: str, hours: float, number: int = 1, share: float = 1.0) -> None:
    """Write the line of an attempt that began `number` hours after the epoch, or at 0 with a share below 1."""
    start = 3600.0 * number if share == 1.0 else 0.0
    seconds = 3600 * hours
    attempt = Attempt(
        number, start, start + seconds, seconds, "node1", "7", cause, f"{cause} it was", 0, 10, 0, 1e9, 0.0, 1.0, share
    )
    with (run.path / OLD_LINES).open("a") as file:
        file.write(json.dumps(vars(attempt)) + "\n")


def test_status_adds_up_hours_over_attempts_and_counts_retries(sweep: SweepDirectory) -> None:
    run, last = sweep.runs()[:2]
    for number, cause in enumerate(["killed", "preempted", "node", "done"], start=1):
        write_attempt(run, cause, 0.25, number)
    with (run.path / OLD_LINES).open("ab") as file:
        file.write(b'"a line"\n3\n\xff\n{"attempt": 9, "cau')
    write_attempt(last, "killed", 1.0)  # and was not retried
    row = row_of(sweep, run)
    assert (row["gpu_hours"], row["core_hours"], row["retries"]) == (1.0, 0.0, 2)
    assert row_of(sweep, last)["retries"] == 0


def test_hours_are_those_of_the_books(sweep: SweepDirectory) -> None:
    (sweep.path / "sweep.yaml").write_text("config: {cluster: {kind: local, gpus_per_job: 1, runs_per_gpu: 2}}\n")
    first_sharing, second_sharing, unshared, _ = sweep.runs()
    write_attempt(first_sharing, "done", 1.0, share=0.5)
    write_attempt(second_sharing, "killed", 10.0, share=0.5)
    write_attempt(unshared, "killed", 2.0)
    report = status.sweep_status(sweep)
    # Two runs of an earlier version share a GPU.
    assert [row["gpu_hours"] for row in report["runs"]] == [0.25, 2.5, 1.0, 0.0]
    assert report["gpu_hours"] == pytest.approx(accounting.account(sweep)["used"]["hours"])


def test_a_dead_run_costs_nothing_more_and_has_no_expected_end(sweep: SweepDirectory) -> None:
    run = sweep.runs()[0]
    metrics(run)
    begin(run, seconds_ago=2000)
    assert row_of(sweep, run)["silent"]
    assert "no sign of life for 33.3 min" in status._note(row_of(sweep, run))
    seen = now_on(run.path) - 1000
    os.utime(run.path / "heartbeat", (seen, seen))
    row = row_of(sweep, run)
    assert row["silent"]
    assert row["gpu_hours"] == pytest.approx(1000 / 3600, rel=0.01)
    assert row["eta_seconds"] is None
    assert status.sweep_status(sweep)["eta_seconds"] is None, "no worker is running"


def test_a_loss_that_is_no_number_does_not_break_the_json(sweep: SweepDirectory, capsys: Capture) -> None:
    run = sweep.runs()[0]
    metrics(run, train_loss=float("nan"))
    set_state(run, "diverged", reason="the loss is nan")
    status.show_status(sweep, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert [row["loss"] for row in report["runs"]] == [None] * 4


def rows(**counts: int) -> list[dict[str, Any]]:
    """Return rows with `counts` runs per state; failed runs have the same reason."""
    reason = {"failed": "the disk is full"}
    return [
        {"run_id": f"{state}{number}", "state": state, "reason": reason.get(state)}
        for state, count in counts.items()
        for number in range(count)
    ]


def screen(width: int) -> Console:
    return Console(width=width, height=40, file=io.StringIO(), force_terminal=False)


def test_a_narrow_terminal_drops_columns_and_never_the_note(sweep: SweepDirectory) -> None:
    run = sweep.runs()[0]
    metrics(run)
    begin(run, seconds_ago=100)
    report = status.sweep_status(sweep)
    heads = {}
    for width in (200, 80, 50):
        out = screen(width)
        out.print(status.render_status(report, out, everything=True))
        lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert max(map(len, lines)) <= width
        heads[width] = lines[2].split()
        assert "…" not in " ".join(lines)
        assert any(run.run_id in line for line in lines)
    assert heads[200] == [name for name in status.COLUMNS if name != "forecast"]  # there is no forecast
    assert heads[80] == ["run", "state", "step", "loss", "tok/s", "note"]
    assert heads[50] == ["run", "state", "note"]
    assert [line[25:].strip() for line in lines[4:6]] == ["no sign of life for 1.7", "min"]


def test_many_failures_leave_room_for_what_runs_and_the_other_way_round() -> None:
    shown, hidden = status.fold_rows(rows(running=100, failed=50), room=20)
    states = [row["state"] for row in shown]
    assert states.count("failed") == 9  # plus a line with their reason
    assert states.count("running") == 10
    assert hidden == {"running": 90, "failed": 41}
    everything, hidden = status.fold_rows(rows(running=100, failed=50), room=None)
    assert len(everything) == 150
    assert not hidden


def estimate(state: str, estimated: float, step: int = 0, **values: object) -> dict[str, Any]:
    return {
        "state": state, "estimated_seconds": estimated, "step": step, "first_step": 0, "steps": 100, "seconds": 0.0,
        "eta_seconds": None, "cancel_asked": False, "silent": False, **values,
    }  # fmt: skip


def test_a_sweep_ends_with_its_last_run_on_the_workers_of_now() -> None:
    running = [estimate("running", 100, eta_seconds=10.0), estimate("running", 100, eta_seconds=40.0)]
    waiting = [estimate("planned", 100), estimate("queued", 50), estimate("preempted", 60, step=50)]
    # 100 s on the first worker from 10, 50 s on the second from 40, and the last 30 s from 90.
    assert status.sweep_eta([*running, *waiting]) == 120.0
    # Finished runs took twice their estimate, so waiting runs will too: 210 and 140, then 60 more.
    done = [estimate("done", 100, seconds=200.0)]
    assert status.sweep_eta([*running, *waiting, *done]) == 210.0
    assert status.sweep_eta(waiting) is None
    # One that trains at half its planned speed counts like them, once it is past its first steps.
    slow = {"D": 1000, "tokens_per_s": 5.0}
    first, second = (estimate("running", 100, step=step, eta_seconds=10.0, **slow) for step in (1, 50))
    assert [accounting.slowdown([row, *waiting]) for row in (first, second)] == [1.0, 2.0]
    assert status.sweep_eta([second, *waiting]) == 10 + 2 * (100 + 50 + 30)
    cancelled = estimate("planned", 1e6, cancel_asked=True)
    assert status.sweep_eta([*running, *waiting, cancelled]) == 120.0


def test_status_shows_why_a_job_waits(sweep: SweepDirectory, tmp_path: Path, monkeypatch: Patch) -> None:
    program, calls = tmp_path / "bin" / "squeue", tmp_path / "calls"
    program.parent.mkdir()
    queued, preempted, running, _ = sweep.runs()
    worker = f"12_1|PENDING|Resources|isoflop:0:worker:{label_of(sweep.planned_runs()[0].shape)}"
    stopped = worker.replace("12_1|PENDING|Resources", "12_0|SUSPENDED|None")
    program.write_text(f"#!/bin/sh\necho call >> {calls}\necho '{worker}'\necho '{stopped}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    set_state(queued, "queued")
    set_state(preempted, "preempted")
    set_state(running, "running", job_id="12_0")
    assert [row_of(sweep, run)["waits"] for run in (queued, preempted, running)] == [None] * 3
    assert not calls.exists()  # the sweep has no jobs in SLURM
    write_json(sweep.path / "jobs" / "launch.json", {"token": "0", "folder": "/"})
    reasons = {row["run_id"]: row["waits"] for row in status.sweep_status(sweep)["runs"]}
    assert [reasons[run.run_id] for run in (queued, preempted, running)] == ["Resources", "Resources", None]
    assert calls.read_text() == "call\n"
    running.give_sign()
    os.utime(running.path / "heartbeat", (now_on(running.path) - 100,) * 2)
    assert status._note(row_of(sweep, running)) == "suspended by SLURM, alive 1.7 min ago"
    suspended = next(fault for fault in examine_sweep(sweep, repair=False) if fault.kind == "suspended")
    assert "1 job is suspended" in suspended.what
    assert "scontrol resume 12_0" in suspended.how


def fail(run: RunDirectory, cause: str) -> None:
    write_attempt(run, cause, 1.0)
    set_state(run, "failed", reason=f"{cause} it was")


def test_a_watch_waits_for_retries_alone(sweep: SweepDirectory, capsys: Capture, monkeypatch: Patch) -> None:
    retried, *others = sweep.runs()
    fail(retried, "killed")
    for run in others:
        fail(run, "error")

    def pause(seconds: float) -> None:
        set_state(retried, "diverged")

    monkeypatch.setattr(status.time, "sleep", pause)
    status.show_status(sweep, watch=True, as_json=True)
    printed = [json.loads(line)["states"] for line in capsys.readouterr().out.splitlines()]
    assert printed == [{"failed": 4}, {"failed": 3, "diverged": 1}]


def test_a_follower_reads_each_line_once_also_of_a_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    follower = logs.Follower(path)
    assert follower.lines() == []  # it is not there yet
    path.write_text("one\ntw")
    assert follower.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert follower.lines() == ["two"]
    assert follower.lines() == []
    path.write_text("new\n")  # shorter
    assert follower.lines() == ["new"]
    other = tmp_path / "other"
    other.write_text("another file, longer than before\n")
    other.rename(path)
    assert follower.lines() == ["another file, longer than before"]


def test_following_a_log_ends_with_the_run(sweep: SweepDirectory, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.01)
    run = sweep.runs()[0]
    set_state(run, "running", job_id="12_3")
    folder = sweep.path / "jobs" / "slurm-x"
    folder.mkdir(parents=True)

    def work() -> None:
        for number in range(20):
            run.log(f"line {number}")
            time.sleep(0.002)
        (folder / "12_3_0_log.err").write_text("srun: error\n")
        run.log("done")
        set_state(run, "done", job_id="12_3")

    worker = threading.Thread(target=work)
    worker.start()
    logs.print_log(sweep, run.run_id[:6], follow=True)
    worker.join()
    printed = capsys.readouterr().out.splitlines()
    messages = [line.split(" ", 2)[2] for line in printed if line.startswith("20")]
    assert messages == [f"line {number}" for number in range(20)] + ["done"]
    assert "12_3_0_log.err: srun: error" in printed


def test_logs_show_added_runs_and_say_where_there_are_none(sweep: SweepDirectory, capsys: Capture) -> None:
    logs.print_newest_lines(sweep, follow=False)
    assert capsys.readouterr().out == "no run is running or failed (4 planned)\n"
    added = sweep.run("0123456789")
    set_state(added, "failed")
    added.log("of a run that was added")
    write_json(sweep.path / membership.ADDED, {added.run_id: {}})
    logs.print_newest_lines(sweep, follow=False)
    assert "of a run that was added" in capsys.readouterr().out


# Terminal output for plans, runs and costs


def runs() -> list[RunConfig]:
    points = LadderGrid(sizes=[1e4, 1e5, 1e6], tokens=[20000, 40000])
    return expand_grid(points, RunConfig(model=ModelConfig(vocab_size=256), tokens=0))


def printed_plan(capsys: Capture, *arguments: Any) -> str:
    print_plan(*arguments)
    return capsys.readouterr().out


def test_a_long_plan_is_folded_and_a_short_one_is_not(capsys: Capture) -> None:
    short_plan = plan_runs(runs(), ClusterConfig(), 1e12, 2)
    output = printed_plan(capsys, short_plan, ClusterConfig())
    assert all(run.run_id in output for run in short_plan.runs)
    smallest = min(short_plan.runs, key=lambda run: run.D / run.N_total)
    assert f" {smallest.D / smallest.N_total:.2g} " in output, "not 0"
    many = [dataclasses.replace(run, seed=seed) for run in runs() for seed in range(8)]
    long_plan = plan_runs(many, ClusterConfig(), 1e12, 2)
    output = printed_plan(capsys, long_plan, ClusterConfig())
    assert [run.run_id in output for run in long_plan.runs] == 20 * [True] + 23 * [False] + 5 * [True]
    assert "48 runs" in output
    assert "… 23 more …" in output


def test_a_dry_run_says_cost_source_jobs_and_expected_starts(capsys: Capture) -> None:
    cluster = ClusterConfig(kind="slurm", gpus_per_job=1, cpus_per_task=4, dollars_per_gpu_hour=2.0, queue_minutes=1.0)
    planned = plan_runs(runs(), cluster, 1.125e10, 8)
    short_seconds = [run.estimated_seconds for run in planned.runs if run.estimated_seconds < 60]
    assert 60 < sum(short_seconds) < 120
    assert len(short_seconds) == len(planned.runs) - 2
    output = printed_plan(capsys, planned, cluster, {planned.runs[0].shape: "2030-01-02T03:04:05"})
    assert f"{planned.gpu_hours:.3g} GPU-hours, ${2 * planned.gpu_hours:,.2f}" in output
    assert "assumed rates" in output
    assert "jobs: 4 workers" in output, "two for long runs, and two for a minute of short runs each"
    assert "SLURM expects a job of 1 GPU, 4 cores and 8 GB to start at 2030-01-02T03:04:05" in output
    output = printed_plan(capsys, dataclasses.replace(planned, measured_runs=38), cluster)
    assert "from 38 runs measured on this partition" in output
    output = printed_plan(capsys, plan_runs(runs(), ClusterConfig(), 1e10, 2), ClusterConfig())
    assert "core-hours" in output
    assert "jobs:" not in output


def test_a_retried_run_is_reported_and_counted_once(tmp_path: Path, capsys: Capture) -> None:
    planned, sweep = plan_runs(runs()[:2], ClusterConfig(), 1e12, 1), SweepDirectory(tmp_path)
    directories = [sweep.run(run.run_id) for run in planned.runs]
    for directory in directories:
        set_state(directory, "queued")
    first_id, second_id = (directory.run_id for directory in directories)
    first, second = directories
    with LiveView(sweep, planned) as view:
        set_state(first, "running")
        assert view.update([{"task": "train", "run": first_id}]) == [first_id]
        assert capsys.readouterr().out == ""
        end(first, "killed", reason="its process was killed")
        assert view.update([]) == []
        assert capsys.readouterr().out.startswith(f"[1/2] {first_id}")
        set_state(first, "running", attempt=2)
        for claims in ([{"task": "train", "run": first_id}], []):
            assert view.update(claims) == [first_id]
        assert (
            capsys.readouterr().out == f"run {first_id}: attempt 1 ended (killed: its process was killed); retrying\n"
        )
        set_state(first, "done")
        write_json(first.path / "summary.json", {"val_loss": 1.5, "seconds": 3.0})
        view.update([])
        assert capsys.readouterr().out.startswith(f"[1/2] {first_id}")
        set_state(second, "failed", attempt=1, reason="such is life")
        view.update([{"task": "train", "run": second_id}, {"task": "score", "run": first_id}])
        assert "scoring checkpoints" in (output := capsys.readouterr().out)
        assert f"[2/2] {second_id}" in output
        view.update([])
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("width", "lines"), [(120, 5 + 2), (80, 5 + 2 * 2)])
def test_budgets_are_readable_on_a_narrow_terminal(capsys: Capture, monkeypatch: Patch, width: int, lines: int) -> None:
    monkeypatch.setattr(terminal, "console", lambda: Console(width=width))
    item = {"N": 1.274e9, "N_ci": [9.87e8, 1.543e9], "D": 2.5e12, "D_ci": [1.11e12, 9.99e12], "loss": 2.1234}
    item |= {"flops": 1.91e22, "loss_ci": [2.0, 2.2]}
    approaches = {"parametric": {"optimal": [item]}}
    print_law({"convention": "6nd", "intervals": "mixture", "optimal": [item], "approaches": approaches}, "wide")
    printed = capsys.readouterr().out.splitlines()[:lines]
    text = "\n".join(printed)
    assert max(map(len, printed)) <= width
    assert "…" not in text
    for value in ("1.91e+22", "parametric", "1.27B", "[987M, 1.54B]", "[1.11T, 9.99T]", "1.96k", "[2.000, 2.200]"):
        assert text.count(value) == (1 if value == "parametric" else 2), value
