"""The planner: its seconds are the theory's, it takes the fastest that fits, and two commands say why."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from isoflop.sweeps.entry import sweep_main
from isoflop.sweeps.plan.gantt import print_gantt
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, to_dict
from isoflop.train.errors import UserError
from isoflop.train.memory import memory
from isoflop.train.parallel.schedules import Event, schedule, simulate, to_json
from isoflop.train.planner.planner import (
    TIE,
    Choice,
    Hardware,
    choose,
    step_time,
)

Isoflop = Any
STILL = Event(rank=0, kind="forward", micro=0, chunk=0, start=1.0, end=1.0)
MODEL = ModelConfig(width=1024, depth=12, heads=16, kv_heads=8, vocab_size=32000)
H100 = Hardware()


def a_run(**parallel: Any) -> RunConfig:
    return RunConfig(
        model=MODEL, data=DataConfig(sequence_length=1024), optimizer=OptimizerConfig(batch_size=64),
        parallel=ParallelConfig(**parallel), precision="bf16",
    )  # fmt: skip


def test_the_choice_is_the_fastest_that_fits() -> None:
    for gigabytes in (0.1, 4, 12):
        choice = choose(a_run(), 8, dataclasses.replace(H100, memory_bytes=gigabytes * 1e9))
        fitting = [way for way in choice.candidates if way.memory.peak <= 0.9 * gigabytes * 1e9]
        if not fitting:
            assert choice.best is None
            continue
        assert choice.best in fitting
        assert choice.best.time.total <= (1 + TIE) * min(way.time.total for way in fitting)
        spread = dataclasses.replace(a_run(), parallel=choice.best.parallel)
        assert choice.best.memory == memory(spread)
        assert choice.best.time == step_time(spread, choice.hardware)


def choice_for(**changes: Any) -> Choice:
    return choose(a_run(), changes.pop("ranks", 8), dataclasses.replace(H100, **changes))


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"ranks": 0}, "ranks is 0; it must be 1 to 1048576"),
     ({"ranks": 1_000_000_007}, "ranks is 1000000007; it must be 1 to 1048576"),
     ({"ranks": 1_000_003}, "parallel.dp is 1000003; it must be at most 1,000,000"),
     ({"ranks": 26}, "parallel.dp is 26; it must divide optimizer.batch_size 64"),
     ({"memory_bytes": -1.0}, "memory_bytes is -1; it must be greater than 0"),
     ({"flops_per_second": 0.0}, "flops_per_second is 0; it must be greater than 0"),
     ({"ranks_per_node": 0}, "ranks_per_node is 0; it must be greater than 0"),
     ({"intra_bandwidth": float("nan")}, "intra_bandwidth is nan; it must be greater than 0")],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        choice_for(**asked)


def test_isoflop_plan_reads_a_run_and_prints_the_choice(tmp_path: Path, isoflop: Isoflop) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(a_run())))
    arguments = ["plan", str(tmp_path), "--ranks", "8", "--memory-gb", "12"]
    code, out, _ = isoflop(*arguments)
    best = choice_for(memory_bytes=12e9).best
    assert code == 0
    assert best is not None
    assert f"{best.name} is the fastest" in out
    assert "use it with: parallel.tp=" in out
    code, out, _ = isoflop(*arguments, "--json")
    said = json.loads(out)
    assert code == 0
    assert said["chosen"]["bytes"]["peak"] == best.memory.peak
    assert said["chosen"]["seconds"]["total"] == best.time.total
    assert len(said["considered"]) == len(choice_for().candidates)


def test_isoflop_plan_draws_a_pipelines_step(tmp_path: Path, isoflop: Isoflop) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(a_run(pp=4, micro_batch_size=16, schedule="gpipe"))))
    code, out, _ = isoflop("plan", tmp_path, "--ranks", 4)
    assert code == 0
    assert "gpipe of 4 stages, as configured: " in out
    assert [line.split()[2][:3] for line in out.splitlines() if line.startswith("rank ")] == ["▏F0"] * 4
    events = simulate(schedule("1f1b", 2, 3))
    (tmp_path / "trace.json").write_text(json.dumps(to_json(events)))
    for path in (tmp_path, tmp_path / "trace.json"):
        code, out, _ = isoflop("plan", "--trace", path)
        rows = out.splitlines()
        assert code == 0
        assert rows[0].endswith(": 12 s, in which ranks wait 0% to 25%")
        assert rows[1] == "rank 0  ▏F0 ▏F1         ▏B0     ▏F2 ▏B1         ▏B2     "
        assert rows[2] == "rank 1      ▏F0 ▏B0     ▏F1 ▏B1     ▏F2 ▏B2     "
    code, out, _ = isoflop("plan", "--trace", path, "--json")
    assert json.loads(out) == to_json(events)


@pytest.mark.parametrize("trace", ["[]", "{}", "[1]", '[{"rank": 0}]', json.dumps(to_json([STILL])), "no JSON"])
def test_isoflop_plan_refuses_what_is_no_trace(trace: str, tmp_path: Path, isoflop: Isoflop) -> None:
    (tmp_path / "trace.json").write_text(trace)
    code, _, error = isoflop("plan", "--trace", tmp_path)
    assert code == 2
    assert error.startswith(f"error: {tmp_path / 'trace.json'} ")
    assert len(error.strip().splitlines()) == 1
    code, _, error = isoflop("plan")
    assert code == 2
    assert "no run is given" in error


def test_a_picture_is_cut_to_the_terminal_and_no_number_is(capsys: pytest.CaptureFixture[str]) -> None:
    late = dataclasses.replace(STILL, rank=1, start=1e18, end=2e18)  # of a broken clock
    for backward in (1.5, 1.75, 2.0, 2.25, 2.5):
        print_gantt([*simulate(schedule("1f1b", 1, 130), backward=backward), late], "long")
        row = capsys.readouterr().out.splitlines()[1]
        assert len(row) == 160
        assert row.startswith("rank 0  ▏F0 ▏B0     ▏F1 " if backward == 2.0 else "rank 0  ▏F0 ▏B0 ")
        for kind in "FB":  # as far as it is drawn, from 0 on
            numbers = [int(cell) for cell in re.findall(rf"{kind}(\d+)", row)]
            assert numbers == list(range(len(numbers))), row


def test_isoflop_plan_refuses_what_is_no_run(tmp_path: Path, isoflop: Isoflop) -> None:
    (tmp_path / "config.yaml").write_text("just words")
    for path in (tmp_path, tmp_path / "nowhere"):
        code, _, error = isoflop("plan", path)
        assert code == 2
        assert error.startswith("error: ")
        assert "give a run directory, or the config.yaml of a run" in error
        assert len(error.strip().splitlines()) == 1


def test_a_dry_run_explains_every_shape_of_its_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "+grid=smoke", "dry_run=true", "cluster=local", "cluster.flops_per_second=1e10", "parallel.dp=2",
        "tuning=fixed", f"output_root={tmp_path}",
    ]  # fmt: skip
    assert sweep_main([*arguments, "explain=true"]) == 0
    out = capsys.readouterr().out
    assert out.count("is the fastest of the") == 2  # two sizes, at two D each
    assert out.count("on 2 ranks") == 2
    assert sweep_main(arguments) == 0
    assert "is the fastest" not in capsys.readouterr().out


def test_explain_without_a_dry_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = sweep_main(["+grid=smoke", "explain=true", "cluster=local", f"output_root={tmp_path}"])
    assert code == 2
    assert "dry_run=true explain=true" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
