"""Sweeps on a real SLURM, for example the cluster of tests/slurm_cluster.sh.

The cluster needs a default partition, a partition `low` whose jobs it preempts by requeueing, and at least two nodes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from isoflop.sweeps.runs.directory import RunDirectory
from isoflop.train.files import read_json, read_json_lines
from slurm_sweeps import LONG, Sweep, process_of, slurm, sweeps_in, until

pytestmark = pytest.mark.slurm


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Callable[..., Sweep]]:
    with sweeps_in(tmp_path / "outputs") as make:
        yield make


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Submit the grid `smoke` with the environment of a SLURM job, and wait for its last job."""
    result = Sweep(f"smoke-{os.getpid()}", tmp_path_factory.mktemp("smoke"))
    allocation = {"SLURM_JOB_ID": "1", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "7", "SLURM_NTASKS": "3"}
    printed = result.submit("+grid=smoke", "cluster.gpus_per_job=1", **allocation)
    assert "for 4 runs" in printed
    assert not (result.path / "fit").exists(), "the command has returned before any of it was done"
    result.wait()
    return result


def test_the_grid_runs_end_to_end(smoke: Sweep) -> None:
    assert smoke.states() == ["done"] * 4, smoke.job_logs()
    assert (smoke.path / "fit" / "report.html").stat().st_size > 10_000
    law = read_json(smoke.path / "fit" / "law.json")
    assert law is not None
    table = (smoke.path / "table.csv").read_text().splitlines()
    assert len(table) == 1 + 4
    for run in smoke.runs().values():
        assert run.state().attempt == 1
        assert re.fullmatch(r"\d+_\d", run.state().job_id or "")
    assert len({run.state().job_id for run in smoke.runs().values()}) == 2, "one array of two workers"


def test_once_all_is_done_the_same_command_trains_nothing(smoke: Sweep) -> None:
    before = {path: path.read_bytes() for path in smoke.path.glob("runs/*/*") if path.is_file()}
    assert len(before) >= 4 * 4
    printed = smoke.submit("+grid=smoke")
    assert "submitted" not in printed
    assert "report.html" in printed
    assert not smoke.queue()
    assert before == {path: path.read_bytes() for path in smoke.path.glob("runs/*/*") if path.is_file()}


def test_a_tune_goes_from_rung_to_rung_without_its_command(sweep: Callable[..., Sweep]) -> None:
    tune = sweep("tune")
    grid = [
        "+grid=tune", "grid.sizes=[2.5e3]", "grid.tokens_per_parameter=[5,20]", "grid.flops_budget=1.4e10",
        "grid.span=2", "data.sequence_length=32", "data.max_bytes=1000000", "data.validation_tokens=4096",
        "cluster.queue_minutes=10", "fit.bootstrap=50",
    ]  # fmt: skip
    assert "for 16 runs" in tune.submit(*grid)
    until(lambda: len(tune.runs()) == 16 + 8, "a second rung, from the keeper")
    until((tune.path / "tuning.yaml").exists, "rules")
    assert tune.states() == ["done"] * 24, tune.job_logs()
    assert "submitted" not in tune.submit(*grid)


def test_a_preempted_job_ends_with_the_numbers_of_an_undisturbed_one(sweep: Callable[..., Sweep]) -> None:
    """Preempt seed 0 from a higher partition, signal the time limit to seed 1, and requeue seed 2 by hand."""
    grid = [*LONG, "tokens=800_000"]
    low, other, undisturbed = sweep("low"), sweep("other"), sweep("undisturbed")
    limit = "cluster.time_minutes=30"  # on a loaded machine a run takes minutes, and must not meet its time limit
    # Exclusive, so that the job that takes the node preempts only this run.
    exclusive = "cluster.additional_parameters={exclusive: true}"
    low.submit(*grid, limit, "grid.axes={seed: [0]}", "cluster.partition=low", exclusive)
    (first,) = low.runs().values()
    until(lambda: first.last_metrics().get("step", 0) >= 20, "20 steps of seed 0")
    slurm("sbatch", "--exclusive", f"--nodelist={first.state().host}", "--output=/dev/null", "--wrap=sleep 1")
    until(lambda: first.record().attempts, "the end of seed 0's first attempt")

    other.submit(*grid, limit, "grid.axes={seed: [1, 2]}")
    by_seed = {run.config().seed: run for run in [first, *other.runs().values()]}
    for seed, command in ((1, ["scancel", "--signal=USR2"]), (2, ["scontrol", "requeue"])):
        run = by_seed[seed]
        until(lambda: run.last_metrics().get("step", 0) >= 20, f"20 steps of {run.run_id}")  # noqa: B023
        slurm(*command, run.state().job_id or "")
        until(lambda: run.record().attempts, f"the end of the first attempt at {run.run_id}")  # noqa: B023

    local = ["cluster=local", "cluster.jobs=2", "cluster.threads_per_job=1"]
    process = undisturbed.command(*grid, "grid.axes={seed: [0, 1, 2]}", *local)
    assert process.returncode == 0, process.stdout + process.stderr
    low.wait()
    other.wait()

    # Clusters signal preemption by either signal, depending on their configuration.
    for seed, signal_name in ((0, "(USR2|TERM)"), (1, "USR2"), (2, "TERM")):
        run, reference = by_seed[seed], undisturbed.runs()[by_seed[seed].run_id]
        log = (run.path / "log.txt").read_text()
        # The other sweep's next jobs may preempt seed 0, in the low partition, once more.
        assert run.state().state == "done", log
        assert run.state().attempt == 2 or (seed == 0 and run.state().attempt > 2), log
        step = re.search(rf"preempted: signal SIG{signal_name}; stopped at step (\d+) of", log)
        assert step is not None, log
        assert f"resumed from step_{step[step.lastindex or 1]} of" in log
        exact = ("val_loss", "val_loss_se", "val_bpb", "train_loss")
        summary, expected = run.summary() or {}, reference.summary() or {}
        assert [summary[name] for name in exact] == [expected[name] for name in exact]
        assert _curve(run) == _curve(reference)
    for disturbed in (low, other):
        assert (disturbed.path / "fit" / "report.html").exists(), disturbed.job_logs()


def _curve(run: RunDirectory) -> dict[int, tuple[float, float, float]]:
    """Return the losses by step; a step that was trained twice must have equal losses."""
    curve: dict[int, tuple[float, float, float]] = {}
    for line in read_json_lines(run.path / "metrics.jsonl"):
        values = (line["train_loss"], line["grad_norm"], line.get("val_loss"))
        assert curve.setdefault(line["step"], values) == values
    return curve


def test_a_worker_that_is_cancelled_in_slurm_cancels_no_run(sweep: Callable[..., Sweep]) -> None:
    """Cancel all jobs, keepers too: the sweep rests until `isoflop retry`, and `isoflop cancel` ends it."""
    stopped_sweep = sweep("stopped")
    grid = [*LONG, "tokens=1_000_000_000", "grid.axes={seed: [0, 1]}", "cluster.array_parallelism=1"]
    stopped_sweep.submit(*grid)
    until(lambda: any(run.last_metrics() for run in stopped_sweep.runs().values()), "a first step")
    stopped_sweep.cancel_jobs()
    assert stopped_sweep.states() == ["preempted", "queued"], stopped_sweep.job_logs()
    (trained,) = [run for run in stopped_sweep.runs().values() if run.state().state == "preempted"]
    assert "signal SIGTERM; stopped at step" in (trained.state().reason or "")
    command = [sys.executable, "-m", "isoflop.sweeps.cli.main"]
    subprocess.run([*command, "retry", str(stopped_sweep.path), trained.run_id], check=True, timeout=120)
    until(lambda: trained.state().state == "running", "the run to go on")
    subprocess.run([*command, "cancel", str(stopped_sweep.path)], check=True, timeout=120)
    stopped_sweep.wait()
    assert stopped_sweep.states() == ["cancelled", "cancelled"], stopped_sweep.job_logs()
    assert re.search(r"resumed from step_\d+", (trained.path / "log.txt").read_text())


def test_a_submission_refused_halfway_leaves_nothing_in_the_queue(sweep: Callable[..., Sweep], tmp_path: Path) -> None:
    """Use an sbatch that accepts keepers and refuses workers, so that the submission fails halfway."""
    real, wrapper = shutil.which("sbatch"), tmp_path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(
        '#!/bin/sh\nif grep -q "job-name=.*-worker" "$1"; then echo "error: Invalid account" >&2; exit 1; fi\n'
        f'exec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    refused_sweep = sweep("half")
    path = f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}"
    process = refused_sweep.command(
        "+grid=smoke", "cluster=slurm", "cluster.additional_parameters={hold: true}", PATH=path
    )
    assert process.returncode == 2
    assert "Invalid account" in process.stderr
    refused_sweep.wait()
    assert refused_sweep.states() == ["planned"] * 4


def test_waiting_for_the_jobs_reports_what_failed(sweep: Callable[..., Sweep]) -> None:
    """Check that `wait=true` returns the result as exit code; the corpus is deleted before the job reads it."""
    failed_sweep = sweep("lost")
    text = failed_sweep.output_root / "text"
    text.mkdir(parents=True)
    for number in range(20):
        (text / f"{number}.txt").write_text(f"document {number} " + "all work and no play " * 500)
    cache = failed_sweep.output_root / "cache"
    # The setup line runs in the job before Python, and deletes the text and the shards built at submission.
    setup = f"cluster.setup=[rm -rf {text} {cache}]"
    grid = [*LONG, "data=text", f"data.path={text}", "data.tokenizer=bytes", "data.sequence_length=64", "tokens=20_000"]
    process = failed_sweep.command(
        *grid, "cluster=slurm", "wait=true", "grid.axes={seed: [0]}", setup, ISOFLOP_CACHE=str(cache)
    )
    assert process.returncode == 1, process.stdout + process.stderr
    assert failed_sweep.states() == ["failed"]
    (run,) = failed_sweep.runs().values()
    assert str(text) in (run.state().reason or "")
    assert f"run {run.run_id} is failed: " in process.stdout
    assert not failed_sweep.queue()


def test_one_worker_of_two_nodes_trains_run_after_run_and_stops_as_one(sweep: Callable[..., Sweep]) -> None:
    """Check that rank 0 claims runs for all ranks, and that a rank that must stop stops them all for one requeue."""
    spread = sweep("spread")
    mesh = ["parallel.tp=2", "parallel.dp=2", "parallel.zero=1", "cluster.ranks_per_node=2", "cluster.gpus_per_job=1"]
    spread.submit(*LONG, "tokens=80_000", "grid.axes={seed: [0, 1, 2]}", *mesh, "cluster.array_parallelism=1")
    runs = list(spread.runs().values())
    until(lambda: [run for run in runs if run.last_metrics().get("step", 0) >= 20], "20 steps")
    (run,) = [run for run in runs if run.state().state == "running"]
    job_record = slurm("scontrol", "-o", "show", "job", run.state().job_id or "")
    assert re.search(r"\bNumNodes=2 .*\bNumTasks=4\b", job_record), job_record
    assert "TresPerNode=gres:gpu:2" in job_record
    hosts = [re.findall(r" on (\w+)", (run.path / f"log-rank{rank}.txt").read_text())[0] for rank in (1, 2, 3)]
    assert hosts[1] == hosts[2] != hosts[0], "tensor-parallel neighbours share a node"

    os.kill(process_of(run, 3), signal.SIGTERM)
    until(lambda: run.state().state == "preempted", "preempted")
    assert re.search(r"another rank was told to stop; stopped at step \d+ of", run.state().reason or "")
    spread.wait()
    assert spread.states() == ["done"] * 3, spread.job_logs()
    assert sorted(run.state().attempt for run in runs) == [1, 1, 2]
    assert len(re.findall(r"resumed from step_\d+", (run.path / "log.txt").read_text())) == 1
    for rank in range(4):
        logs = [(run.path / (f"log-rank{rank}.txt" if rank else "log.txt")).read_text() for run in runs]
        assert len({re.findall(r"process (\d+)", log)[-1] for log in logs}) == 1, "each rank goes from run to run"
    assert (spread.path / "fit" / "report.html").exists(), spread.job_logs()


def test_a_rank_that_is_killed_ends_its_job_and_is_named(sweep: Callable[..., Sweep]) -> None:
    """Kill rank 0 of one run, which would write its state, and rank 1 of the other."""
    killed = sweep("ranks")
    grid = [*LONG, "tokens=100_000", "grid.axes={seed: [0, 1]}", "checkpoint.every_seconds=0.1", "parallel.dp=2"]
    killed.submit(*grid, "cluster.ranks_per_node=2")
    runs = list(killed.runs().values())
    for rank, run in enumerate(runs):
        until(lambda: list(run.path.glob("checkpoints/step_*/*")), f"a checkpoint of {run.run_id}")  # noqa: B023
        os.kill(process_of(run, rank), signal.SIGKILL)
    until(lambda: killed.states() == ["failed"] * 2, "the keeper to see it")
    for rank, run in enumerate(runs):
        assert re.search(rf"rank {rank} on node\d died at step \d+", run.state().reason or ""), run.state()
    assert "SLURM reports FAILED" in (runs[0].state().reason or "")
    process = killed.command(*grid, "cluster=slurm", "cluster.ranks_per_node=2", "wait=true")
    assert process.returncode == 0, process.stdout + process.stderr
    for run in runs:
        assert (run.state().state, run.state().attempt) == ("done", 2)
        assert re.search(r"resumed from step_\d+", (run.path / "log.txt").read_text())
