"""The planner chooses the fastest layout that fits, its times follow theory, and two commands print its ranking."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from isoflop.sweeps.entry import sweep_main
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, to_dict
from isoflop.train.errors import UserError
from isoflop.train.flops import training_flops_per_token
from isoflop.train.memory import memory
from isoflop.train.planner.planner import TIE, Hardware, Way, rank_ways

Isoflop = Any
MODEL = ModelConfig(width=1024, depth=12, heads=16, kv_heads=8, vocab_size=32000)
H100 = Hardware()


def make_run(**parallel: Any) -> RunConfig:
    return RunConfig(
        model=MODEL, data=DataConfig(sequence_length=1024), optimizer=OptimizerConfig(batch_size=64),
        parallel=ParallelConfig(**parallel), precision="bf16",
    )  # fmt: skip


def ways_for(**options: Any) -> list[Way]:
    return rank_ways(make_run(), options.pop("ranks", 8), dataclasses.replace(H100, **options))


def test_the_fastest_that_fits_comes_first_and_what_does_not_fit_last() -> None:
    for gigabytes in (0.1, 12):
        ways = ways_for(memory_bytes=gigabytes * 1e9)
        for way in ways:
            assert way.memory == memory(dataclasses.replace(make_run(), parallel=way.parallel))
            assert way.fits == (way.memory.peak <= 0.9 * gigabytes * 1e9)
        fitting = [way.seconds for way in ways if way.fits]
        assert [way.fits for way in ways] == sorted((way.fits for way in ways), reverse=True)
        assert all(later >= earlier / (1 + TIE) for earlier, later in itertools.pairwise(fitting))
        assert not fitting or fitting[0] <= (1 + TIE) * min(fitting)
    assert not ways_for(memory_bytes=1e8)[0].fits


def seconds_of(ways: list[Way], **parallel: Any) -> float:
    """Return the time of the layout with these settings and the largest micro-batch."""
    matching = [way for way in ways if all(getattr(way.parallel, name) == value for name, value in parallel.items())]
    return max(matching, key=lambda way: way.parallel.micro_batch_size or 0).seconds


def test_times_follow_the_theory() -> None:
    links = {"intra_bandwidth": 1e30, "inter_bandwidth": 1e30}
    free, slow = ways_for(**links), ways_for()
    plain = {"tp": 1, "dp": 8, "pp": 1, "zero": 0, "recompute": "none"}
    rate = H100.flops_per_second * MODEL.width / (MODEL.width + H100.half_speed_width)
    flops = training_flops_per_token(MODEL, 1024) * 64 * 1024 / 8
    assert seconds_of(free, **plain) == pytest.approx(flops / rate, rel=0.01)
    # Full recompute repeats the forward pass of the blocks: about a third more.
    assert 1.2 < seconds_of(free, **plain | {"recompute": "full"}) / seconds_of(free, **plain) < 1.34
    # A pipeline of eight stages and one micro-batch works one stage after the other.
    piped = {"tp": 1, "dp": 1, "pp": 8, "zero": 0, "recompute": "none"}
    assert seconds_of(free, **piped, micro_batch_size=64) > 6 * seconds_of(free, **piped, micro_batch_size=1)
    tensor = {"tp": 8, "dp": 1, "pp": 1, "zero": 0, "recompute": "none"}
    assert seconds_of(slow, **tensor) > seconds_of(free, **tensor) > seconds_of(free, **plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"ranks": 0}, "ranks is 0; it must be 1 to 1048576"),
     ({"ranks": 1_000_003}, "parallel.dp is 1000003; it must be at most 1,000,000"),
     ({"ranks": 26}, "parallel.dp is 26; it must divide optimizer.batch_size 64"),
     ({"memory_bytes": -1.0}, "memory_bytes is -1; it must be greater than 0"),
     ({"intra_bandwidth": float("nan")}, "intra_bandwidth is nan; it must be greater than 0")],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        ways_for(**options)


def test_isoflop_plan_reads_a_run_and_prints_the_ranking(tmp_path: Path, isoflop: Isoflop) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(make_run())))
    arguments = ["plan", str(tmp_path), "--ranks", "8", "--memory-gb", "12"]
    code, out, _ = isoflop(*arguments)
    ways = ways_for(memory_bytes=12e9)
    best = ways[0].parallel
    assert code == 0
    assert f"{sum(way.fits for way in ways)} of {len(ways)} ways fit into memory" in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0].isdigit()][1:]
    assert rows[0][-1] == "chosen"
    assert len({tuple(row[i] for i in (0, 2, 3, 4)) for row in rows}) == len(rows)
    assert f"use it with: parallel.tp={best.tp} parallel.dp={best.dp} parallel.pp={best.pp} " in out
    code, out, _ = isoflop(*arguments, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["chosen"]["bytes"]["peak"] == ways[0].memory.peak
    assert document["chosen"]["seconds"] == ways[0].seconds
    assert len(document["considered"]) == len(ways)
    code, out, _ = isoflop("plan", tmp_path, "--memory-gb", "0.1")
    assert code == 0
    assert "no way fits: the smallest needs " in out
    assert "use it with" not in out


def test_isoflop_plan_refuses_what_is_no_run(tmp_path: Path, isoflop: Isoflop) -> None:
    (tmp_path / "config.yaml").write_text("just words")
    for path in (tmp_path, tmp_path / "nowhere"):
        code, _, error = isoflop("plan", path)
        assert code == 2
        assert error.startswith("error: ")
        assert "give a run directory, or the config.yaml of a run" in error
        assert len(error.strip().splitlines()) == 1
    assert isoflop("plan")[0] == 2


def test_a_dry_run_explains_every_shape_of_its_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "+grid=smoke", "dry_run=true", "cluster=local", "cluster.flops_per_second=1e10", "parallel.dp=2",
        "tuning=fixed", f"output_root={tmp_path}",
    ]  # fmt: skip
    assert sweep_main([*arguments, "explain=true"]) == 0
    out = capsys.readouterr().out
    assert out.count("on 2 ranks: ") == 2  # two sizes, at two D each
    assert out.count("use it with: ") == 2
    assert sweep_main(arguments) == 0
    assert "use it with: " not in capsys.readouterr().out
    assert sweep_main([argument for argument in arguments if argument != "dry_run=true"] + ["explain=true"]) == 2
    assert "dry_run=true explain=true" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
