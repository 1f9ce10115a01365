"""`+grid=curves`: one long run per size, a few cooldowns from them, and points of the law from averaged weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import fake_sweep
import pytest
from isoflop import fit
from isoflop.sweeps.config import CurvesGrid, TuningConfig
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.grid.trunks import merge_runs
from isoflop.sweeps.grid.tuning import Tuner
from isoflop.sweeps.plan.foresight import foresee
from isoflop.sweeps.results.finish import write_results
from isoflop.sweeps.results.table import write_curves
from isoflop.train.checkpoint.heldout import validation_steps
from isoflop.train.config import AverageConfig, ModelConfig, RunConfig, ScheduleConfig
from isoflop.train.errors import UserError
from isoflop.train.flops import count_parameters, flops_exact
from isoflop.train.schedule import learning_rate_factor, warmup_steps

GRID = CurvesGrid(budgets=[1e11, 1e12], sizes=6)
BASE = RunConfig(model=ModelConfig(vocab_size=256), tokens=0, average=AverageConfig("ema", [0.1, 0.2]), validations=32)


def test_cooldowns_branch_from_one_long_run_per_size() -> None:
    runs = expand_grid(GRID, BASE, TuningConfig(horizon="size"))
    long, cooled = runs[:6], runs[6:]
    assert len({count_parameters(run.model).N_active for run in long}) == 6
    assert all(flops_exact(run) == pytest.approx(1e12, rel=0.01) for run in long)
    assert len(cooled) == 8  # at a twentieth two sizes alone have warmed up
    merged = merge_runs(runs).runs
    assert [run.parent is None for run in merged] == [True] * 6 + [False] * 8
    for run in cooled:
        (trunk,) = (other for other in long if other.model == run.model)
        assert min(abs(run.D / trunk.D - share) for share in GRID.cooldowns) < 0.01
        assert warmup_steps(run) == warmup_steps(trunk)


def test_the_plan_says_what_the_same_points_would_cost_apart() -> None:
    runs = expand_grid(GRID, BASE, TuningConfig(horizon="size"))
    (said,) = foresee(GRID, runs, Tuner())
    shares = [2 ** (-k / 2) for k in range(1 + int(math.log2(20) * 2))]
    assert f"about {6 * len(shares)} points" in said
    assert f"{6e12 * sum(shares):.2g} training FLOPs" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"average": AverageConfig()}, "average.kind is none; a grid of curves reads averaged weights"),
        ({"schedule": ScheduleConfig("cosine")}, "schedule.kind is cosine; a grid of curves needs wsd"),
        ({"tokens": 1000}, "tokens is 1000, but a grid of kind curves chooses D itself"),
    ],
)
def test_what_gives_no_curves_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        expand_grid(GRID, replace(BASE, **change))  # type: ignore[arg-type]


@pytest.mark.usefixtures("quick_pictures")
def test_a_sweep_of_curves_is_fitted_with_its_averages(tmp_path: Path) -> None:
    """Runs, cooldowns and averages of a known law: the report has the averages' points, and the law comes back."""
    config = fake_sweep.settings(GRID)
    config.average, config.tuning.horizon, config.validations = BASE.average, "size", 32
    sweep = fake_sweep.write(tmp_path / "curves", config)
    fake_sweep.finish(sweep)
    for run in sweep.runs():
        own = run.config()
        N, lines = count_parameters(own.model).N_active, []
        for step in sorted(validation_steps(own)):
            D = step * own.batch_tokens
            above = math.exp(0.001 + 0.002 * math.log(D / 1e6))
            lines.append({
                "step": step, "tokens": D, "lr": learning_rate_factor(own, step - 1), "smoothed_loss": 3.0,
                "val_loss": 3.0, "val_loss_ema_0.1": fake_sweep.true_loss(N, D) * above, "val_loss_ema_0.2": 3.0,
            })  # fmt: skip
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = write_curves(sweep)
    assert {"val_loss_ema_0.1", "val_loss_ema_0.2"} <= set(curves)
    write_results(sweep)
    runs = fit.read_table(sweep.path)
    assert len(runs.N) > 30
    assert any("of 6 long runs, less the gap that 8 cooldowns measured" in note for note in runs.notes)
    page = (sweep.path / "fit" / "report.html").read_text()
    assert "averaged weights (val_loss_ema_0.1)" in page
    assert f"by all {len(runs)} points, and by the 14 runs that ended, alone." in page
    written = json.loads((sweep.path / "fit" / "law.json").read_text())
    assert written["runs_alone"]["runs"] == 14
    for own, alone in zip(written["optimal"], written["runs_alone"]["optimal"], strict=True):
        assert own["flops"] == alone["flops"]
        assert own["N"] != alone["N"]
    law = fit.ChinchillaLaw().fit(runs.N, runs.D, runs.loss)
    assert law.predict(3e5, 1e7) == pytest.approx(fake_sweep.true_loss(3e5, 1e7), rel=0.01)  # runs have 0.4 % of noise
