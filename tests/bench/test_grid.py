"""The benchmark of whole grids: FLOPs are counted exactly, both sides train the same runs, and nothing is left over."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from isoflop.bench import grid as bench_grid
from isoflop.train.errors import UserError
from isoflop.train.files import write_json

LADDER = ["+grid=ladder", f"grid.tokens_per_parameter={list(bench_grid.MULTIPLES)}", "cluster=local", "tracker=none"]
LADDER += ["evaluate=none", "cluster.flops_per_second=1e11", "tuning=fixed"]


def test_a_ladder_of_five_d_costs_at_most_062_of_its_runs_apart() -> None:
    row = bench_grid.flops_row(LADDER)
    assert {"case", "ours", "peer", "peer_name", "unit", "ratio", "spread", "device"} <= set(row)
    assert row["ratio"] == row["ours"] / row["peer"] == pytest.approx(1 / row["flops_share"])
    # A trunk of 8 units, a fifth of it decay, and a fifth of each of the other four: 9.5 of 15.5, in whole steps.
    assert row["flops_share"] == pytest.approx((8 + 0.2 * 7.5) / 15.5, rel=0.01)
    assert row["flops_share"] <= 0.62


def test_the_ladder_is_cut_to_the_minutes_and_never_to_nothing() -> None:
    assert bench_grid._shortened(LADDER, minutes=1e-3)[-1] == "grid.sizes=[8000.0]"
    assert bench_grid._shortened(LADDER, minutes=1e6)[-1] == "grid.sizes=[8000.0, 15000.0, 30000.0, 60000.0]"


def test_bad_input_is_a_sentence() -> None:
    with pytest.raises(UserError, match="--case is 'smoke'"):
        next(iter(bench_grid.bench_grid(cases=["smoke"])))
    with pytest.raises(UserError, match=r"--minutes is 0\.0"):
        next(iter(bench_grid.bench_grid(minutes=0.0)))


def test_a_sweep_that_fails_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ended with 3: out of luck"):
        bench_grid._run([sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"], tmp_path)
    (tmp_path / "runs" / "0123456789").mkdir(parents=True)
    with pytest.raises(UserError, match="run 0123456789 of the measured sweep did not end"):
        bench_grid.final_losses(tmp_path)


def test_losses_are_compared_run_by_run(tmp_path: Path) -> None:
    for name, loss in {"aa": 2.0, "bb": 3.0}.items():
        write_json(tmp_path / "runs" / name / "summary.json", {"val_loss": loss})
    losses = bench_grid.final_losses(tmp_path)
    assert losses == {"aa": 2.0, "bb": 3.0}
    assert max(bench_grid._differences(losses, {"aa": 2.5, "bb": 3.0})) == 0.5
    with pytest.raises(UserError, match="trained different runs"):
        bench_grid._differences(losses, {"aa": 2.0})


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    """The measured sweep starts a child, and both are gone when the benchmark is interrupted by Ctrl-C."""
    mark = tmp_path / "pid"
    sweep = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '60']); "
        f"open({str(mark)!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )

    def measure() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
        bench_grid._run([sys.executable, "-S", "-c", sweep], tmp_path)

    process = multiprocessing.get_context("fork").Process(target=measure)
    process.start()
    deadline = time.monotonic() + 60
    while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 1  # by KeyboardInterrupt
    pid = int(mark.read_text())
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
