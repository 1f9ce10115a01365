"""Calibration: what past sweeps reached makes the next estimate, and changes nothing else."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from isoflop.sweeps.config import ClusterConfig, LadderGrid
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.plan import rates
from isoflop.sweeps.plan.rates import Calibration, Measured, kind_of, load_rates, place_of, record_rates, sweep_rates
from isoflop.sweeps.plan.sweep_plan import Plan, plan_runs
from isoflop.train.config import ModelConfig, RunConfig
from isoflop.train.files import write_json

KIND = kind_of("fp32", "", 1024, 128)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOFLOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration.json"


def here() -> str:
    return place_of(ClusterConfig(), 1)


def note(rates: dict[tuple[str, int], float], place: str | None = None) -> str | None:
    """Records a rate for each run id and width."""
    return record_rates(
        place or here(), [Measured(name, KIND, width, rate, "cpu") for (name, width), rate in rates.items()]
    )


def runs() -> list[RunConfig]:
    return expand_grid(
        LadderGrid(sizes=[1e4, 1e5, 1e6], tokens=[20480, 40960]), RunConfig(model=ModelConfig(vocab_size=256), tokens=0)
    )


def test_a_width_has_the_median_of_its_runs_and_a_run_counts_once() -> None:
    generator = random.Random(0)
    rates = {(f"run{number}", 64): generator.uniform(1e9, 9e9) for number in range(9)}
    for _ in range(3):  # a sweep that is finished three times
        assert note(rates) is None
    found = load_rates(ClusterConfig(), 1)
    assert found.rate(KIND, 64, lambda width: width) == statistics.median(rates.values())
    assert found.runs([KIND]) == 9


def test_rates_are_interpolated_between_widths_and_scaled_beyond_them() -> None:
    note({("a", 32): 3.0 * 32**0.7, ("b", 128): 3.0 * 128**0.7})
    found = load_rates(ClusterConfig(), 1)

    def assumed(width: float) -> float:
        return 1e9 * width / (width + 96)

    for width in (32, 40, 64, 100, 128):
        assert found.rate(KIND, width, assumed) == pytest.approx(3.0 * width**0.7, rel=1e-12)
    assert found.rate(KIND, 256, assumed) == pytest.approx(3.0 * 128**0.7 * assumed(256) / assumed(128))
    assert found.rate(KIND, 8, assumed) == pytest.approx(3.0 * 32**0.7 * assumed(8) / assumed(32))
    assert found.rate(kind_of("bf16", "", 1024, 128), 64, assumed) == assumed(64)


def test_a_sweep_goes_on_with_the_rates_that_it_was_first_planned_with(tmp_path: Path) -> None:
    base = runs()[0]
    kind = kind_of(base.precision, "", base.batch_tokens, base.data.sequence_length)

    def planned() -> Plan:
        return plan_runs(runs(), ClusterConfig(), 1e11, 1, measured=sweep_rates(tmp_path, ClusterConfig(), 1))

    def learn(name: str, rate: float) -> None:
        record_rates(here(), [Measured(name, kind, run.model.width, rate, "cpu") for run in runs()])

    unknown = planned()
    write_json(tmp_path / "plan.json", unknown.to_dict())
    learn("its own", 1e9)
    assert planned() == unknown, "what its own runs reached is no estimate of them"
    (tmp_path / "plan.json").unlink()
    known = planned()
    assert known.measured_runs == len({run.model.width for run in runs()})
    write_json(tmp_path / "plan.json", known.to_dict())
    learn("another's", 9e9)
    assert planned() == known
    other = [dataclasses.replace(run, precision="bf16") for run in runs()]
    assert (
        plan_runs(other, ClusterConfig(), 1e11, 1, measured=sweep_rates(tmp_path, ClusterConfig(), 1)).measured_runs
        == 0
    )


def test_what_was_measured_changes_no_run() -> None:
    base = runs()[0]
    kind = kind_of(base.precision, "", base.batch_tokens, base.data.sequence_length)
    plans = [plan_runs(runs(), ClusterConfig(), 1e11, 2, 8)]
    plans.append(
        plan_runs(runs(), ClusterConfig(), 1e11, 2, 8, measured=Calibration({kind: {8: (1e6, 1), 999: (1e13, 1)}}))
    )
    ids = [{(run.run_id, run.D, run.steps, run.shape, run.flops_own) for run in each.runs} for each in plans]
    assert ids[0] == ids[1]
    assert {run.estimated_seconds for run in plans[0].runs} != {run.estimated_seconds for run in plans[1].runs}


def test_the_file_stays_small_and_keeps_the_newest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "PLACES", 5)
    note({(f"run{number}", 64): float(number + 1) for number in range(rates.RUNS + 10)})
    found = load_rates(ClusterConfig(), 1)
    assert found.runs([KIND]) == rates.RUNS
    assert found.rate(KIND, 64, lambda width: width) == statistics.median(range(11, rates.RUNS + 11))
    for number in range(8):
        note({("a", 64): 1.0}, f"place {number}")
    assert list(json.loads(cache.read_text())["places"]) == [f"place {number}" for number in range(3, 8)]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", '{"version": 2, "places": {}}', '{"version": 1}', '{"version": 1, "places": []}',
        '{"version": 1, "places": {"p": {"kinds": {"k": {"wide": {"a": 1.0}}}}}}',
        '{"version": 1, "places": {"p": {"kinds": {"k": {"64": {"a": "fast"}}}}}}',
        '{"version": 1, "places": {"p": {"kinds": {"k": {"64": {"a": -1.0}}}}}}',
        '{"version": 1, "places": {"p": {"kinds": {"k": {"64": {}}}}}}', "\x00\xff",
    ],
)  # fmt: skip
def test_a_damaged_file_is_put_aside_with_a_word_and_never_stops_a_plan(cache: Path, content: str) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content.encode("latin-1"))
    assert load_rates(ClusterConfig(), 1) == Calibration()
    said = note({("a", 64): 2e9})
    assert said is not None
    assert "damaged" in said
    assert cache.with_name("calibration.json.damaged").read_bytes() == content.encode("latin-1")
    assert load_rates(ClusterConfig(), 1).rate(KIND, 64, lambda width: width) == 2e9
    assert note({("b", 64): 2e9}) is None


WRITER = """
import sys
from isoflop.sweeps.plan.rates import Measured, record_rates
for number in range(10):
    said = record_rates("here", [Measured(f"{sys.argv[1]}-{number}", sys.argv[1], 64, 1e9, "cpu")])
    assert said is None, said
"""


def test_sweeps_that_end_together_lose_none_of_each_others_runs(cache: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, kind]) for kind in ("a", "b", "c")]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    kinds = json.loads(cache.read_text())["places"]["here"]["kinds"]
    assert {kind: len(widths["64"]) for kind, widths in kinds.items()} == {"a": 10, "b": 10, "c": 10}
