"""The precision grid: its runs, names and tables, and the commands on a sweep of several number formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import finish, make_config, true_loss, write_sweep
from isoflop import fit
from isoflop.sweeps.config import recorded
from isoflop.sweeps.entry import sweep_main
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.grid.ladder import LadderGrid
from isoflop.sweeps.grid.precision import PrecisionGrid
from isoflop.sweeps.plan.trunks import merge_runs
from isoflop.sweeps.results.finish import write_results
from isoflop.sweeps.results.table import write_table
from isoflop.sweeps.runs.directory import FIT_FAILURE, RunDirectory, SweepDirectory
from isoflop.train.config import PASSES, ModelConfig, QuantizationConfig, RunConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.files import write_json
from isoflop.train.flops import count_parameters
from small_runs import SMOKE

Isoflop = Callable[..., tuple[int, str, str]]
FORMATS = ["none", "int8", "int4/int8/none"]
BASE = RunConfig(model=ModelConfig(vocab_size=256), tokens=0)
COLUMNS = [f"{name}_{kind}" for kind in ("format", "bits") for name in PASSES]
COST = {"unquantized": 1.0, "int8": 1.05, "int4/int8/none": 1.1}  # factors of the loss


def grid(**changes: Any) -> PrecisionGrid:
    return PrecisionGrid(**{"sizes": [1e4, 3e4], "tokens": [409600, 819200], "formats": FORMATS, **changes})


def test_every_point_has_every_format_and_the_unquantized_runs_are_those_of_a_ladder() -> None:
    ladder = expand_grid(LadderGrid(sizes=[1e4, 3e4], tokens=[409600, 819200]), BASE)
    for formats in (FORMATS, FORMATS[1:]):
        runs = expand_grid(grid(formats=formats), BASE)
        assert [run.quantization.label for run in runs] == ["", *FORMATS[1:]] * 4
        assert [(run_id(run), run.name) for run in runs[::3]] == [(run_id(run), run.name) for run in ladder]
        assert [run.name for run in runs[1:3]] == [f"{ladder[0].name}_int8", f"{ladder[0].name}_int4/int8/none"]
    runs = expand_grid(grid(), replace(BASE, quantization=QuantizationConfig(block=4, rounding="stochastic")))
    labels = ["", "int8+block4/int8+block4/int8+block4+stochastic", "int4+block4/int8+block4/none"]
    assert [run.quantization.label for run in runs[:3]] == labels
    merged = merge_runs(expand_grid(grid(), BASE)).runs
    by_id = {run_id(run): run for run in merged}
    assert sum(run.parent is None for run in merged) == 2 * 3
    assert all(by_id[run.parent].quantization == run.quantization for run in merged if run.parent)


REFUSED = [
    ({"formats": ["none", "int3"]}, {}, "grid.formats contains 'int3'; it must be one of none, fp8_e4m3, .*, or three"),
    ({"formats": ["int8/int8"]}, {}, "grid.formats contains 'int8/int8'; it must be one of .* such as int4/int8/none"),
    ({"formats": ["none"]}, {}, r"grid.formats is \[none\]; it must contain a format other than none"),
    ({"formats": ["int8", "int8"]}, {}, "grid.formats contains 'int8' more than once"),
    ({}, {"activations": "int8"}, "quantization.activations is int8; leave it out, and"),
]


@pytest.mark.parametrize(("points", "settings", "sentence"), REFUSED)
def test_bad_precision_grids_are_refused(points: dict[str, Any], settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        expand_grid(grid(**points), replace(BASE, quantization=QuantizationConfig(**settings)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SweepDirectory:
    config = make_config(grid(sizes=[1e4, 2e4, 4e4], tokens=[409600, 819200, 1638400], seeds=[0, 1]))
    sweep = write_sweep(tmp_path_factory.mktemp("precision") / "precision", config)
    finish(sweep)
    for run in sweep.runs():
        summary = run.summary() or {}
        loss = summary["val_loss"] * COST[run.config().quantization.label or "unquantized"]
        write_json(run.path / "summary.json", {**summary, "val_loss": loss})
    write_table(sweep, {})
    return sweep


def test_formats_have_laws_of_their_own(isoflop: Isoflop, finished: SweepDirectory, tmp_path: Path) -> None:
    table, quick = finished.path / "table.csv", ("--bootstrap", 0, "--intervals", "noise", "--json", "--speedup")
    frame = fit.read_table(table).frame
    (last,) = frame.query("activations_format != gradients_format")[COLUMNS].drop_duplicates().to_numpy()
    assert [*last] == ["int4", "int8", "none", 4.25, 8.25, 32.0]
    law = json.loads(isoflop("fit", table, *quick, "int4/int8/none=9.0")[1])
    assert law["runs"] == 18
    assert {row["format"] for row in law["precision"]["efficiencies"]} == {*FORMATS}
    assert law["precision"]["best"][0]["format"] == "int4/int8/none"
    frame.query("weights_format == 'none'").drop(columns=COLUMNS).to_csv(plain := tmp_path / "plain.csv", index=False)
    for path, value, sentence in (
        (table, "int8", "a number for each name"),
        (plain, "int8=2", "no law of number form"),
    ):
        code, _, error = isoflop("fit", path, *quick, value)
        assert (code, sentence in error) == (2, True)


def test_a_sweep_keeps_the_speed_of_its_formats(
    finished: SweepDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def analyze(*args: Any, speedup: Any = None, **options: Any) -> None:
        raise RuntimeError(f"speedup {speedup}")

    config = recorded(finished.settings())
    config.fit.speedup = {"int8": 2.0}
    monkeypatch.setattr("isoflop.sweeps.results.finish.recorded", lambda settings: config)
    monkeypatch.setattr(fit, "analyze", analyze)
    for asked, used in ((None, 2.0), ({"int8": 3.0}, 3.0)):
        with pytest.raises(RuntimeError, match=f"speedup {{'int8': {used}}}"):
            write_results(finished, force=True, speedup=asked)
    (finished.path / FIT_FAILURE).unlink()
    assert sweep_main(["+grid=precision", *SMOKE[1:], "dry_run=true", "fit.speedup={int8:fast}"]) == 2
    assert "fit.speedup is {'int8': 'fast'}; it must map formats to numbers above 0" in capsys.readouterr().err


def test_two_formats_of_a_sweep_are_compared_by_name(isoflop: Isoflop, finished: SweepDirectory) -> None:
    plain, int8, int4 = COST
    for names, base, variant in (([int8], plain, int8), ([int4, "none"], int4, plain)):
        (comparison,) = json.loads(isoflop("compare", finished.path, *names, "--json")[1])
        assert (comparison["base"], comparison["variant"]) == (base, variant)
    assert comparison["multipliers"][1]["value"] > 1
    for other, sentence in (
        ("int3", "'int3' is neither a sweep or table nor one of the number formats of"),
        (finished.path / "table.csv", "some have several variants or number formats"),
    ):
        assert sentence in " ".join(isoflop("compare", finished.path, other)[2].split())


def test_other_commands_on_a_sweep_of_formats(isoflop: Isoflop, finished: SweepDirectory, tmp_path: Path) -> None:
    error = isoflop("suggest", finished.path, "--budget", "1e13")[2]
    assert "has the number formats unquantized, int8, int4/int8/none; a law describes one" in " ".join(error.split())
    output = isoflop("extend", finished.path, "grid.formats=[none,int8,mxfp4]", "dry_run=true")[1]
    assert re.findall(r"^N .* D 1.64M (\S+)$", output, re.MULTILINE) == ["mxfp4"] * 6
    longer = replace(finished.runs()[0].config(), tokens=3_276_800, parent=None)
    targets, N = {}, count_parameters(longer.model).N_active
    for name in ("int8", "mxfp4"):
        run = replace(longer, quantization=QuantizationConfig(**dict.fromkeys(PASSES, name)))
        targets[name] = str(tmp_path / run_id(run))
        RunDirectory(Path(targets[name])).freeze(run)
    output = isoflop("forecast", finished.path, "--target", targets["int8"], "--json")[1]
    ratio = json.loads(output)["forecasts"][0]["loss"] / true_loss(N, longer.D)
    assert ratio == pytest.approx(COST["int8"], abs=0.02)
    error = isoflop("forecast", finished.path, "--target", targets["mxfp4"])[2]
    assert re.search("a run of mxfp4; .* has finished runs of unquantized, int8", " ".join(error.split()))
