"""The benchmark of whole grids: both sides train the same runs, and no process is left over."""

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


@pytest.mark.exhaustive
def test_trunks_save_flops_and_change_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["grid.sizes=[5e3]", "grid.tokens_per_parameter=[10,20,40]", "data.max_bytes=2000000", "fit.bootstrap=10"]
    monkeypatch.setitem(bench_grid.CASES, "ladder", ["+grid=ladder", "tuning=fixed", *sizes])
    (row,) = bench_grid.bench_grid(rounds=1, cases=["ladder"])
    assert {"case", "ours", "peer", "peer_name", "unit", "ratio", "spread", "device"} <= set(row)
    assert row["difference"] == 0
    # A trunk of 4 units, a fifth of it decay, and a fifth of each of the other two: 4.6 of 7, in whole steps.
    assert row["flops_share"] == pytest.approx(4.6 / 7, rel=0.03)


def test_bad_input_is_a_sentence() -> None:
    with pytest.raises(UserError, match="--case is 'smoke'"):
        next(iter(bench_grid.bench_grid(cases=["smoke"])))
    with pytest.raises(UserError, match=r"--minutes is 0\.0"):
        next(iter(bench_grid.bench_grid(minutes=0.0)))


def test_a_sweep_that_fails_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ended with 3: out of luck"):
        bench_grid.run_alone([sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"], tmp_path)
    (tmp_path / "runs" / "0123456789").mkdir(parents=True)
    with pytest.raises(UserError, match="run 0123456789 of the measured sweep did not end"):
        bench_grid.final_losses(tmp_path)


def test_losses_are_compared_run_by_run(tmp_path: Path) -> None:
    for name, loss in {"aa": 2.0, "bb": 3.0}.items():
        write_json(tmp_path / "runs" / name / "summary.json", {"val_loss": loss})
    losses = bench_grid.final_losses(tmp_path)
    assert losses == {"aa": 2.0, "bb": 3.0}
    assert bench_grid.largest_gap(losses, {"aa": 2.5, "bb": 3.0}) == 0.5
    with pytest.raises(UserError, match="trained different runs"):
        bench_grid.largest_gap(losses, {"aa": 2.0})


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    """The measured sweep starts a child, and both are gone when the benchmark is interrupted by Ctrl-C."""
    mark = tmp_path / "pid"
    sweep = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '60']); "
        f"open({str(mark)!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )

    def measure() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
        bench_grid.run_alone([sys.executable, "-S", "-c", sweep], tmp_path)

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
