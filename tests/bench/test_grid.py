"""The benchmark of whole grids: both sides train the same runs, and failures do not count as measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_rows import checked_rows
from isoflop.bench import grid as bench_grid
from isoflop.bench.timing import isoflop
from isoflop.train.errors import UserError
from isoflop.train.files import write_json


@pytest.mark.exhaustive
def test_trunks_save_flops_and_change_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["grid.sizes=[5e3]", "grid.tokens_per_parameter=[10,20,40]", "data.max_bytes=2000000", "fit.bootstrap=10"]
    monkeypatch.setitem(bench_grid.CASES, "ladder", ["+grid=ladder", "tuning=fixed", *sizes])
    (row,) = checked_rows(bench_grid.bench_grid(rounds=1, cases=["ladder"]))
    assert row["difference"] == 0
    # A trunk of 4 units, a fifth of it decay, and a fifth of each of the other two: 4.6 of 7, in whole steps.
    assert row["flops_share"] == pytest.approx(4.6 / 7, rel=0.03)


def test_bad_input_is_a_sentence() -> None:
    with pytest.raises(UserError, match="--case is 'smoke'"):
        next(iter(bench_grid.bench_grid(cases=["smoke"])))
    with pytest.raises(UserError, match=r"--minutes is 0\.0"):
        next(iter(bench_grid.bench_grid(minutes=0.0)))


def test_a_sweep_that_fails_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="isoflop sweep ended with 2: "):
        isoflop("sweep", "+grid=nothing")
    (tmp_path / "runs" / "0123456789").mkdir(parents=True)
    with pytest.raises(UserError, match="run 0123456789 of the measured sweep did not finish"):
        bench_grid.final_losses(tmp_path)


def test_losses_are_compared_run_by_run(tmp_path: Path) -> None:
    for name, loss in {"aa": 2.0, "bb": 3.0}.items():
        write_json(tmp_path / "runs" / name / "summary.json", {"val_loss": loss})
    losses = bench_grid.final_losses(tmp_path)
    assert losses == {"aa": 2.0, "bb": 3.0}
    assert bench_grid.largest_gap(losses, {"aa": 2.5, "bb": 3.0}) == 0.5
    with pytest.raises(UserError, match="trained different runs"):
        bench_grid.largest_gap(losses, {"aa": 2.0})
