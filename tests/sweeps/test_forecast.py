"""`isoflop forecast`: predictions sealed before a run, and the ledger that compares them with the results."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import fake_sweep
import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.sweeps.cli.main import app
from isoflop.sweeps.grid.isoflop import IsoflopGrid
from isoflop.sweeps.grid.ladder import LadderGrid
from isoflop.sweeps.observe.doctor import examine_sweep
from isoflop.sweeps.observe.status import render_status, sweep_status
from isoflop.sweeps.results import forecast as running
from isoflop.sweeps.results.finish import write_results
from isoflop.sweeps.results.table import CURVE_ROWS, sweep_curves
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.train.config import RunConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.files import write_json
from isoflop.train.flops import count_parameters
from isoflop.train.schedule import learning_rate_factor
from rich.console import Console
from small_runs import Patch, set_state
from typer.testing import CliRunner

UNDER_WAY = "Runs under way"  # a heading of the report
pytestmark = pytest.mark.usefixtures("quick_pictures")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> SweepDirectory:
    """Return a finished sweep with a law, whose runs have no loss curves."""
    config = fake_sweep.make_config(IsoflopGrid(budgets=[1e11, 3e11, 1e12, 3e12], sizes=5))
    config.fit.bootstrap, config.fit.intervals, config.optimizer.batch_size = 20, "noise", 64
    sweep = fake_sweep.write_sweep(tmp_path_factory.mktemp("sweeps") / "small", config)
    fake_sweep.finish(sweep)
    write_results(sweep)
    return sweep


def size_of(config: RunConfig) -> int:
    return count_parameters(config.model).N_active


def forecast_output(sweep: SweepDirectory, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["forecast", str(sweep.path), *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return dict(json.loads(result.stdout))


def larger_run(sweep: SweepDirectory, loss: float | None) -> str:
    """Make a run with four times the largest size and D, done with `loss` or planned; return its path."""
    config = max((run.config() for run in sweep.runs()), key=lambda config: config.D)
    config.model.width, config.tokens = 2 * config.model.width, 4 * config.D
    run = SweepDirectory(sweep.path.parent / "large").run(run_id(config))
    run.freeze(config)
    if loss is not None:
        summary = {"step": config.steps, "D": config.D, "N_total": size_of(config), "flops_exact": 1.0}
        write_json(run.path / "summary.json", summary | {"val_loss": loss, "val_loss_se": 0.01})
        set_state(run, "done")
    return str(run.path)


def test_a_sealed_forecast_is_compared_with_its_run(sweep: SweepDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--target" in CliRunner().invoke(app, ["forecast", str(sweep.path)]).stdout, "how to forecast a larger run"
    with monkeypatch.context() as earlier:
        earlier.setattr(running, "now_on", lambda folder: 1e9)  # a clock in whole seconds
        (sealed,) = forecast_output(sweep, "--target", larger_run(sweep, None), "--seal")["forecasts"]
    truth = fake_sweep.true_loss(sealed["N"], sealed["D"])
    assert sealed["loss"] == pytest.approx(truth, rel=0.02)  # noise of 0.4 %, four times further in N and D
    assert sealed["low"] < truth < sealed["high"]
    assert set(sealed["inputs"]) >= {"table.csv"}
    (open_,) = forecast_output(sweep)["ledger"]
    assert open_["outcome"] is None
    (row,) = forecast_output(sweep, "--check", larger_run(sweep, truth))["ledger"]
    assert row["inside"] is True
    assert row["error"] == pytest.approx(sealed["loss"] / truth - 1)
    forecast_output(sweep, "--check", larger_run(sweep, truth * 1.5))
    assert forecast_output(sweep)["ledger"][0]["inside"] is False

    file = next((sweep.path / "forecasts").glob(f"{sealed['digest'][:12]}.json"))
    text = file.read_text()
    file.write_text(re.sub(r'"low": [0-9.]+', '"low": 0.5', text))
    assert forecast_output(sweep)["ledger"][0]["fault"] == "it was altered after it was sealed"
    file.write_text(text)
    result = CliRunner().invoke(app, ["forecast", str(sweep.path)], catch_exceptions=False)
    assert "0 of 1 interval held" in result.stdout


def test_a_forecast_that_was_sealed_after_its_run_does_not_count(sweep: SweepDirectory, monkeypatch: Patch) -> None:
    row = pd.DataFrame({"loss": [1.7], "low": [1.6], "high": [1.8]})
    monkeypatch.setattr(fit, "forecast", lambda *_: row)  # the fit of a mixture takes its time
    run = RunDirectory(Path(larger_run(sweep, 1.7)))
    (late_forecast,) = forecast_output(sweep, "--target", f"N={size_of(run.config())},D={run.config().D}", "--seal")[
        "forecasts"
    ]
    forecast_output(sweep, "--check", str(run.path))
    row = next(row for row in forecast_output(sweep)["ledger"] if row["digest"] == late_forecast["digest"])
    assert row["fault"] == "it was sealed after the run had ended"
    assert row["inside"] is None


def test_n_and_d_of_a_budget_are_the_laws_best(sweep: SweepDirectory) -> None:
    (best,) = forecast_output(sweep, "--target", "1e13")["forecasts"]
    law = sweep.path / "fit" / "law.json"
    assert json.loads(law.read_text())["optimal"][0]["flops"] != 1e13  # so it is computed
    optimum = fit.answer(law, [1e13])["optimal"][0]
    assert (best["N"], best["D"]) == (round(optimum["N"]), round(optimum["D"]))
    assert UNDER_WAY not in (sweep.path / "fit" / "report.html").read_text()
    assert best["low"] < fake_sweep.true_loss(best["N"], best["D"]) < best["high"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "N=7e8"], "N=7e8,D=1.4e10"),
        (["--target", "N=7e8,D=-1"], "N=7e8,D=1.4e10"),
        (["--target", "N=x,D=1"], "N=7e8,D=1.4e10"),
        (["--target", "nan"], "FLOPs"),
        (["--target", "here"], "FLOPs"),
        (["--check", "nothing"], "must be a finished run"),
        (["--check", "x", "--seal"], "give it without them"),
        (["--seal"], "no running run of"),
    ],
)
def test_bad_input_is_a_sentence(sweep: SweepDirectory, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, ["forecast", str(sweep.path), *arguments], catch_exceptions=False)


def test_a_check_without_a_forecast_names_those_that_are_sealed(sweep: SweepDirectory) -> None:
    with pytest.raises(UserError, match="no sealed forecast; sealed are"):
        forecast_output(sweep, "--check", sweep.runs()[0].run_id)


def test_curves_keep_the_validated_and_the_last_steps_of_every_run(tmp_path: Path) -> None:
    sweep = fake_sweep.write_sweep(tmp_path / "small", fake_sweep.make_config(IsoflopGrid(budgets=[1e12], sizes=2)))
    run = sweep.runs()[0]
    lines = [{"step": n, "tokens": 128 * n, "smoothed_loss": 3.0, "lr": 0.01} for n in range(1, 2002)]
    lines[6] |= {"val_loss": 2.5}
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = sweep_curves(sweep)
    assert set(curves["run_id"]) == {run.run_id}
    assert len(curves) == CURVE_ROWS + 1
    assert curves["step"].iloc[-1] == 2001
    assert curves.loc[curves["val_loss"].notna(), ["step", "loss", "val_loss"]].to_numpy().tolist() == [[7, 3.0, 2.5]]
    config = run.config()
    assert set(curves["batch"]) == {config.optimizer.batch_size}
    assert set(curves["N"]) == {size_of(config)}


def rates_of(config: RunConfig) -> list[float]:
    return [learning_rate_factor(config, step) for step in range(config.steps)]


def curve(config: RunConfig, factors: list[float]) -> list[float]:
    """Return losses by step that fall with the sum of rates and with the rate, as in the law of curves."""
    rates = np.array(factors)
    return list(1 + 12 * size_of(config) ** -0.3 + 3 * np.cumsum(rates) ** -0.4 + 0.1 * rates)


def write_curve(run: RunDirectory, share: float = 1.0) -> float:
    """Write a run's losses up to a share of its steps; return the loss at its last step."""
    config = run.config()
    rates = rates_of(config)
    losses = curve(config, rates)
    lines = [
        {"step": n, "lr": config.optimizer.learning_rate * rate, "smoothed_loss": loss}
        for n, (rate, loss) in enumerate(zip(rates, losses, strict=True), 1)
    ]
    (run.path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines[: round(share * config.steps)])
    )
    return losses[-1]


def test_runs_under_way_are_forecast_by_those_that_are_done(tmp_path: Path) -> None:
    config = fake_sweep.make_config(IsoflopGrid(budgets=[1e10, 4e10], sizes=4))
    config.fit.bootstrap, config.fit.intervals = 20, "noise"
    sweep = fake_sweep.write_sweep(tmp_path / "small", config)
    fake_sweep.finish(sweep)
    for number, run in enumerate(sweep.runs()):
        held_out = 1.02 * write_curve(run) * (1 + 0.001 * (-1) ** number)  # differs from the training loss
        write_json(run.path / "summary.json", (run.summary() or {}) | {"val_loss": held_out})
    running_run = max(sweep.runs(), key=lambda run: run.config().D)
    truth = (running_run.summary() or {})["val_loss"]
    (running_run.path / "summary.json").unlink()
    write_curve(running_run, 0.5)
    set_state(running_run, "running")
    write_results(sweep)
    (forecast,) = forecast_output(sweep)["forecasts"]
    assert forecast["run_id"] == running_run.run_id
    assert forecast["seen"] == pytest.approx(0.5, abs=0.01)
    assert forecast["low"] < truth < forecast["high"]
    assert forecast["loss"] == pytest.approx(truth, rel=0.005)  # 0.1 % of noise, and half of the run is still to come
    page = (sweep.path / "fit" / "report.html").read_text()
    assert all(text in page for text in (UNDER_WAY, running_run.run_id, f"{forecast['loss']:.3f}"))
    status = {row["run_id"]: row["forecast"] for row in sweep_status(sweep)["runs"]}
    assert status.pop(running_run.run_id) == pytest.approx([forecast["loss"], forecast["low"], forecast["high"]])
    assert set(status.values()) == {None}
    document = json.loads((sweep.path / "forecast.json").read_text())
    assert document["first"][running_run.run_id] == document["runs"][running_run.run_id]
    document["runs"][running_run.run_id], document["first"][running_run.run_id] = [1.5, 1.25, 1.75], [1.3, 1.2, 1.4]
    write_json(sweep.path / "forecast.json", document)
    out = Console(width=160, record=True, file=io.StringIO())
    # Within the minute for which a forecast is cached.
    out.print(render_status(sweep_status(sweep), out, everything=True))
    text = " ".join(out.export_text().split())
    assert "1.500 [1.250, 1.750]" in text
    assert "forecast left the interval 1.200 to 1.400" in text


def test_the_doctor_names_a_run_whose_loss_curve_stands_out(tmp_path: Path) -> None:
    grid = LadderGrid(sizes=[1e4, 2e4, 4e4, 8e4, 1.6e5, 3.2e5], tokens_per_parameter=[20.0, 40.0])
    sweep = fake_sweep.write_sweep(tmp_path / "small", fake_sweep.make_config(grid))
    fake_sweep.finish(sweep)
    for run in sweep.runs():
        write_curve(run)
    assert not [finding for finding in examine_sweep(sweep, repair=False) if finding.kind == "curve"]
    odd_run = sweep.runs()[4]
    lines = [json.loads(line) for line in (odd_run.path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["smoothed_loss"] += 0.3 * (1 - line["step"] / len(lines))  # like a rate that is too high until it decays
    (odd_run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (finding,) = [finding for finding in examine_sweep(sweep, repair=False) if finding.kind == "curve"]
    assert odd_run.run_id in str(finding.where)
    assert finding.severity == "note"
