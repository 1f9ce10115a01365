"""`python sweep.py` with several ranks per run on this machine: the same runs and losses, also after lost ranks."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from isoflop.sweeps.entry import sweep_main
from isoflop.sweeps.execute.attempt import Interrupt, train_one
from isoflop.sweeps.runs.attempts import Policy
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.lease import Ending
from isoflop.train.config import ModelConfig, ParallelConfig, RunConfig, run_id
from isoflop.train.files import HALVED, write_json
from isoflop.train.job.environment import Ranks
from isoflop.train.job.failure import Cause, Failure, RankError
from isoflop.train.loop import train
from small_runs import own_signals, until

ROOT = Path(__file__).resolve().parents[3]
SMOKE = ["+grid=smoke", "cluster=local", "tracker=none", "evaluate=none", "cluster.flops_per_second=1e11"]
SMOKE += ["tuning=fixed", "preflight=false"]  # batches that ranks can share
# Long enough to be disturbed on the way.
LONG = [*SMOKE, "grid.sizes=[4.5e4]", "grid.tokens=[60000]", "checkpoint.every_seconds=0.1", "sweep=long"]
FOUR = ["parallel.tp=2", "parallel.dp=2", "parallel.zero=1"]


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts `python sweep.py` with its output under tmp_path; no process outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "sweep.py"), *arguments, f"output_root={tmp_path}"]
        # Ctrl-C works as in a terminal, even where the tests run in the background, which ignores it.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=240)
    assert "Traceback" not in output
    return process.returncode, output


def only_run(sweep: Path) -> RunDirectory:
    (run,) = SweepDirectory.open(sweep).runs()
    return run


def under_way(root: Path, steps: int) -> RunDirectory:
    """Return the run once it has reached this step and has a checkpoint."""
    until((root / "long" / "plan.json").exists, 240)
    run = only_run(root / "long")
    until(lambda: run.last_metrics().get("step", 0) >= steps and any(run.path.glob("checkpoints/step_*/*")), 240)
    return run


def loss_of_one_process(run: RunDirectory, folder: Path) -> float:
    """Train the run in this process on one rank. Returns its held-out loss."""
    config = dataclasses.replace(run.config(), parallel=ParallelConfig())
    assert run_id(config) == run.run_id
    return float(train(config, folder, report=lambda line: None)["val_loss"])


@pytest.mark.slow
def test_a_run_that_is_interrupted_and_loses_ranks_goes_on_with_fewer(start: Start, tmp_path: Path) -> None:
    """Ctrl-C on four ranks, rank 0 of two killed, and the rest on one: the loss is that of one process."""
    process = start(*LONG, *FOUR)
    run = under_way(tmp_path, 20)
    process.send_signal(signal.SIGINT)
    code, output = finished(process)
    assert (code, run.state().state) == (130, "preempted"), output
    assert re.search(r"SIGTERM; stopped at step \d+ of", run.state().reason or "")
    assert not (run.path / "failure.json").exists()

    stopped = run.last_metrics()["step"]
    process = start(*LONG, "parallel.dp=2", "parallel.zero=3", "cluster.retries=0")
    under_way(tmp_path, stopped + 20)
    leader = re.findall(r"process (\d+)", (run.path / "log.txt").read_text())[-1]
    os.kill(int(leader), signal.SIGKILL)
    code, output = finished(process)
    assert (code, run.state().state) == (1, "failed"), output
    assert re.search(r"its worker was killed \(rank 0 on \S+ died at step \d+\)", run.state().reason or "")

    code, output = finished(start(*LONG))
    assert code == 0, output
    log = (run.path / "log.txt").read_text()
    assert (run.state().attempt, log.count("resumed from step_")) == (3, 2), log
    # Rounding of three orders of summation grows over 117 steps; another seed differs by a hundred times as much.
    assert (run.summary() or {})["val_loss"] == pytest.approx(loss_of_one_process(run, tmp_path / "alone"), rel=3e-4)


def test_a_rank_out_of_memory_leaves_the_run_preempted_for_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(model=ModelConfig(vocab_size=256), parallel=ParallelConfig(dp=2))
    run = SweepDirectory(tmp_path).run(run_id(config))
    run.freeze(config)
    reason = "rank 1 on node2: OutOfMemory: out of memory at step 3; it is 2 from now on"

    def out_of_memory(*args: object, **kwargs: object) -> None:
        write_json(run.path / HALVED, {"micro_batch_size": 2})
        raise RankError(Failure(Cause.MEMORY, reason, rank=1, host="node2"))

    monkeypatch.setattr("isoflop.train.loop.train", out_of_memory)
    with own_signals():
        first, second = (train_one(run, Ranks(size=2), Interrupt(), Policy()) for _ in range(2))
    assert first == Ending("preempted", reason, "memory")
    assert (second.state, second.cause) == ("failed", "memory")


def test_a_lone_process_is_no_run_of_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
    config = RunConfig(model=ModelConfig(vocab_size=256), parallel=ParallelConfig(tp=2, dp=2), tokens=4096)
    run = SweepDirectory(tmp_path).run(run_id(config))
    run.freeze(config)
    with own_signals():
        ending = train_one(run, Ranks(), Interrupt(), Policy())
    assert ending.state == "failed"
    assert "parallel.tp 2 * parallel.dp 2 is 4 and the job has 1 rank;" in (ending.reason or "")


def test_ranks_change_neither_budgets_nor_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spreading a run over ranks must not make it another run."""
    planned = []
    rules = ["tuning.batch_tokens={k:0.239,N:-0.203,D:0.673}", "tuning.min_batch=4"]
    for overrides in ([], ["parallel.dp=4", "parallel.zero=1"]):
        arguments = ["+grid=chinchilla", *SMOKE[1:], *rules, "dry_run=true", f"output_root={tmp_path}", *overrides]
        assert sweep_main(arguments) == 0
        planned.append(capsys.readouterr().out)
    on_one_rank, on_four_ranks = (set(re.findall(r"\b[0-9a-f]{10}\b", output)) for output in planned)
    assert on_one_rank == on_four_ranks
    assert planned[1].count("dp4 zero1") == len(on_four_ranks) > 10
    assert "ranks" not in planned[0]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["parallel.tp=3"], "parallel.tp is 3; it must divide model.heads"),
        (["tuning.batch_tokens.k=64", "parallel.dp=2"], "batch_size 1: 1; or set tuning.min_batch=2"),
        (["cluster=slurm", "dry_run=true", "cluster.ranks_per_node=1", "parallel.tp=2"], "cluster.ranks_per_node 1,"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mesh_that_does_not_fit_is_refused_before_anything_starts(
    overrides: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = sweep_main([*SMOKE, f"output_root={tmp_path}", *overrides])
    captured = capsys.readouterr()
    assert code == 2, captured.err
    (line,) = captured.err.strip().splitlines()
    assert problem in line
    assert not list(tmp_path.iterdir())
