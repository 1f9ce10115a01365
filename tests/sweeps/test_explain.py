"""The planner: its seconds are the theory's, it takes the fastest that fits, and two commands say why."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from isoflop.sweeps.cli import main as cli
from isoflop.sweeps.entry import sweep_main
from isoflop.sweeps.plan.explain import distinct_shapes
from isoflop.sweeps.plan.gantt import predicted, print_gantt
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, to_dict
from isoflop.train.errors import UserError
from isoflop.train.flops import training_flops_per_token
from isoflop.train.memory import bucket_sizes, memory
from isoflop.train.model.shape import share_of
from isoflop.train.parallel.schedules import Event, schedule, simulate, to_json
from isoflop.train.planner.planner import (
    TIE,
    Choice,
    Hardware,
    choose,
    data_seconds,
    forward_flops,
    ring_seconds,
    step_time,
    tensor_seconds,
)

STILL = Event(rank=0, kind="forward", micro=0, chunk=0, start=1.0, end=1.0)
MODEL = ModelConfig(width=1024, depth=12, heads=16, kv_heads=8, vocab_size=32000)
H100 = Hardware()


def a_run(**parallel: Any) -> RunConfig:
    return RunConfig(
        model=MODEL, data=DataConfig(sequence_length=1024), optimizer=OptimizerConfig(batch_size=64),
        parallel=ParallelConfig(**parallel), precision="bf16",
    )  # fmt: skip


def test_a_ring_moves_what_the_theory_says() -> None:
    # n bytes in n / N pieces over N - 1 hops, and one latency a hop.
    assert ring_seconds(800.0, 8, 100.0, 0.5) == pytest.approx(7 * (1.0 + 0.5))
    assert ring_seconds(800.0, 1, 100.0, 0.5) == 0.0


def test_one_rank_computes_what_flops_counts_and_tp_ranks_share_it() -> None:
    one = share_of(a_run())
    assert 3 * forward_flops(one) == training_flops_per_token(MODEL, 1024) * 64 * 1024
    assert 8 * forward_flops(share_of(a_run(tp=8))) == forward_flops(one)


@pytest.mark.parametrize(("zero", "elements"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_stages_move_2_2_2_and_3_psi_when_nothing_hides_them(zero: int, elements: int) -> None:
    config = a_run(dp=8, zero=zero)
    slow = dataclasses.replace(H100, intra_bandwidth=1.0, latency=0.0)
    psi = sum(p.size for p in share_of(config).parameters)
    seconds = data_seconds(config, slow, forward=0.0, backward=0.0, share=share_of(config))
    assert seconds == pytest.approx(elements * psi * 2 * 7 / 8, rel=1e-3)  # but for the buckets' padding


def test_collectives_are_hidden_up_to_their_last_bucket() -> None:
    config = a_run(dp=8, zero=0)
    last = bucket_sizes(share_of(config), config)[-1] * 2
    seen = data_seconds(config, H100, forward=1e9, backward=1e9, share=share_of(config))
    assert seen == 2 * ring_seconds(last, 8, H100.intra_bandwidth, H100.latency)
    assert seen < data_seconds(config, H100, forward=0.0, backward=0.0, share=share_of(config)) / 4


def test_sequence_parallelism_moves_as_much_and_gathers_once_more() -> None:
    """An all-reduce is a scatter and a gather: with nothing to hide behind, only the inputs' second gather is more."""
    both = (a_run(tp=4, sequence_parallel=sp) for sp in (True, False))
    with_it, without = (tensor_seconds(config, H100, product=0.0, share=share_of(config)) for config in both)
    assert with_it == pytest.approx(without * 5 / 4)


def test_a_pipeline_takes_its_schedules_time() -> None:
    """Stages that take equally long, sends that take none: three times, forward and both gradients, of the bubble."""
    even = dataclasses.replace(H100, latency=0.0, intra_bandwidth=1e30)
    model = dataclasses.replace(MODEL, depth=24, vocab_size=1, vocab_multiple=1)  # no head to speak of
    # In a V no rank waits, but the last one begins three half stages late.
    for name, share in (("gpipe", 1.0), ("1f1b", 1.0), ("zb-h1", 1 / 3), ("interleaved", 1 / 3), ("zb-v", 1 / 6)):
        chunks = {"interleaved": 3, "zb-v": 2}.get(name, 1)
        config = a_run(pp=4, micro_batch_size=1, schedule=name, chunks=chunks)
        config.model = model
        seconds = step_time(config, even)
        one = (seconds.forward + seconds.backward) / 64
        assert seconds.bubble == pytest.approx(3 * one * share, rel=2e-3)
        assert seconds.sends == 0.0
        # 64 micro-batches are reckoned from few: as long as playing them all takes.
        played = max(event.end for event in predicted(config, even))
        assert one * 64 + seconds.bubble == pytest.approx(played, rel=1e-9)
    slow = step_time(a_run(pp=4, micro_batch_size=1), dataclasses.replace(H100, intra_bandwidth=1e9))
    assert slow.sends > 0.5 * (64 + 3) * 1024 * 1024 * 2 / 1e9  # each micro-batch's, there or back, beside little else


def test_a_pipeline_is_offered_on_gpus_and_to_who_asks_for_it() -> None:
    def stages(device: str, **parallel: Any) -> set[int]:
        hardware = dataclasses.replace(H100, device=device)
        return {way.parallel.pp for way in choose(a_run(**parallel), 8, hardware).candidates}

    assert stages("cuda") == {1, 2, 4, 8}
    assert stages("cuda", schedule="interleaved", chunks=2) == {1, 2, 4}  # which have two blocks or more
    assert stages("cpu") == {1}
    assert stages("cpu", pp=4) == {1, 4}
    parts = [way.parallel for way in choose(a_run(cp=2), 8, H100).candidates]
    assert all(way.tp * way.dp * way.pp == 4 for way in parts)
    name = next(way.name for way in choose(a_run(cp=2), 8, H100).candidates if way.parallel.pp == 2)
    assert " cp=2 pp=2 zero=" in name


@pytest.mark.parametrize("ranks", [1, 8, 32])
def test_the_choice_is_the_fastest_that_fits(ranks: int) -> None:
    for gigabytes in (4, 12, 80):
        choice = choose(a_run(), ranks, dataclasses.replace(H100, memory_bytes=gigabytes * 1e9))
        fitting = [way for way in choice.candidates if way.memory.peak <= 0.9 * gigabytes * 1e9]
        if not fitting:
            assert choice.best is None
            continue
        assert choice.best in fitting
        assert choice.best.time.total <= (1 + TIE) * min(way.time.total for way in fitting)
        spread = dataclasses.replace(a_run(), parallel=choice.best.parallel)
        assert choice.best.memory == memory(spread)
        assert choice.best.time == step_time(spread, choice.hardware)


def test_every_way_divides_model_and_batch_and_uses_every_rank() -> None:
    choice = choose(a_run(), 16, H100)
    seen = set()
    for way in choice.candidates:
        chosen = way.parallel
        assert chosen.tp * chosen.dp * chosen.pp == 16
        assert chosen.tp <= 8  # a node
        assert 64 % (chosen.dp * (chosen.micro_batch_size or 0)) == 0
        seen.add((chosen.tp, chosen.pp, chosen.zero, chosen.micro_batch_size, chosen.recompute))
    assert len(seen) == len(choice.candidates)
    assert {zero for _, _, zero, *_ in seen} == {0, 1, 2, 3}


def test_less_memory_is_never_faster_and_never_needs_more() -> None:
    seconds = []
    for gigabytes in (80, 5, 2, 1.5, 1):
        best = choose(a_run(), 8, dataclasses.replace(H100, memory_bytes=gigabytes * 1e9)).best
        assert best is not None
        assert best.memory.peak <= gigabytes * 0.9e9
        seconds.append(best.time.total)
    assert all(later >= earlier / (1 + TIE) for earlier, later in itertools.pairwise(seconds))
    assert seconds[-1] > seconds[0]


def test_what_is_rejected_says_by_how_much() -> None:
    choice = choose(a_run(), 8, dataclasses.replace(H100, memory_bytes=10e9))
    best = choice.best
    assert best is not None
    for way in choice.candidates:
        verdict, over = choice.verdict(way), way.memory.peak - 9e9
        if way is best:
            assert verdict == "chosen"
        elif over > 0:
            assert verdict.startswith("needs ")
            assert verdict.endswith(" more than there is")
        else:
            slower = way.time.total / best.time.total - 1
            assert verdict == (f"{slower:.0%} slower" if slower > TIE else "as fast, and less simple")
    assert best.name in choice.why()
    assert "10 GB less 10%" in choice.why()


def test_nothing_fits_is_said_with_the_least_that_would() -> None:
    choice = choose(a_run(), 1, dataclasses.replace(H100, memory_bytes=1e8))
    assert choice.best is None
    assert choice.why().startswith("Nothing fits into 100 MB less 10%: of ")


def choice_for(**changes: Any) -> Choice:
    return choose(a_run(), changes.pop("ranks", 8), dataclasses.replace(H100, **changes))


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"ranks": 0}, "ranks is 0; it must be 1 to 1048576"),
     ({"ranks": 1_000_000_007}, "ranks is 1000000007; it must be 1 to 1048576"),
     ({"ranks": 1_000_003}, "parallel.dp is 1000003; it must be at most 1e6"),
     ({"ranks": 26}, "parallel.dp is 26; it must divide optimizer.batch_size 64"),
     ({"memory_bytes": -1.0}, "memory_bytes is -1; it must be greater than 0"),
     ({"flops_per_second": 0.0}, "flops_per_second is 0; it must be greater than 0"),
     ({"ranks_per_node": 0}, "ranks_per_node is 0; it must be greater than 0"),
     ({"intra_bandwidth": float("nan")}, "intra_bandwidth is nan; it must be greater than 0")],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        choice_for(**asked)


def test_runs_that_differ_in_seed_or_length_are_planned_once() -> None:
    run = a_run()
    others = [dataclasses.replace(run, seed=1), dataclasses.replace(run, tokens=10**9)]
    wider = dataclasses.replace(run, model=dataclasses.replace(MODEL, width=2048))
    assert distinct_shapes([run, *others, wider]) == [run, wider]


def isoflop(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["isoflop", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    captured = capsys.readouterr()
    return exit_.value.code or 0, captured.out, captured.err


def test_isoflop_plan_reads_a_run_and_prints_the_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(a_run())))
    arguments = ["plan", str(tmp_path), "--ranks", "8", "--memory-gb", "12"]
    code, out, _ = isoflop(arguments, capsys, monkeypatch)
    best = choice_for(memory_bytes=12e9).best
    assert code == 0
    assert best is not None
    assert f"{best.name} is the fastest" in out
    assert "use it with: parallel.tp=" in out
    code, out, _ = isoflop([*arguments, "--json"], capsys, monkeypatch)
    said = json.loads(out)
    assert code == 0
    assert said["chosen"]["bytes"]["peak"] == best.memory.peak
    assert said["chosen"]["seconds"]["total"] == best.time.total
    assert len(said["considered"]) == len(choice_for().candidates)


def test_isoflop_plan_draws_a_pipelines_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(a_run(pp=4, micro_batch_size=16, schedule="zb-h1"))))
    code, out, _ = isoflop(["plan", str(tmp_path), "--ranks", "4"], capsys, monkeypatch)
    assert code == 0
    assert "zb-h1 of 4 stages, as configured: " in out
    assert [line.split()[2][:3] for line in out.splitlines() if line.startswith("rank ")] == ["▏F0"] * 4
    events = simulate(schedule("1f1b", 2, 3))
    (tmp_path / "trace.json").write_text(json.dumps(to_json(events)))
    for path in (tmp_path, tmp_path / "trace.json"):
        code, out, _ = isoflop(["plan", "--trace", str(path)], capsys, monkeypatch)
        rows = out.splitlines()
        assert code == 0
        assert rows[0].endswith(": 12 s, in which ranks wait 0% to 25%")
        assert rows[1] == "rank 0  ▏F0 ▏F1         ▏B0     ▏F2 ▏B1         ▏B2     "
        assert rows[2] == "rank 1      ▏F0 ▏B0     ▏F1 ▏B1     ▏F2 ▏B2     "
    code, out, _ = isoflop(["plan", "--trace", str(path), "--json"], capsys, monkeypatch)
    assert json.loads(out) == to_json(events)


@pytest.mark.parametrize("trace", ["[]", "{}", "[1]", '[{"rank": 0}]', json.dumps(to_json([STILL])), "no JSON"])
def test_isoflop_plan_refuses_what_is_no_trace(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.json").write_text(trace)
    code, _, error = isoflop(["plan", "--trace", str(tmp_path)], capsys, monkeypatch)
    assert code == 2
    assert error.startswith(f"error: {tmp_path / 'trace.json'} ")
    assert len(error.strip().splitlines()) == 1
    code, _, error = isoflop(["plan"], capsys, monkeypatch)
    assert code == 2
    assert "no run is given" in error


def test_a_picture_is_cut_to_the_terminal_and_no_number_is(capsys: pytest.CaptureFixture[str]) -> None:
    late = dataclasses.replace(STILL, rank=1, start=1e18, end=2e18)  # of a broken clock
    for weight in (0.5, 0.75, 1.0, 1.25, 1.5):
        print_gantt([*simulate(schedule("zb-h1", 1, 130), weight=weight), late], "long")
        row = capsys.readouterr().out.splitlines()[1]
        assert len(row) == 160
        assert row.startswith("rank 0  ▏F0 ▏B0 ▏W0 " if weight == 1.0 else "rank 0  ▏F0 ▏B0 ")
        for kind in "FBW":  # as far as it is drawn, from 0 on
            numbers = [int(cell) for cell in re.findall(rf"{kind}(\d+)", row)]
            assert numbers == list(range(len(numbers))), row


def test_isoflop_plan_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("just words")
    for path in (tmp_path, tmp_path / "nowhere"):
        code, _, error = isoflop(["plan", str(path)], capsys, monkeypatch)
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
