"""Plans of sweeps: cost, order, placement, measured rates, probes and notes."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import random
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from isoflop import fit
from isoflop.sweeps.config import ClusterConfig
from isoflop.sweeps.grid import architectures
from isoflop.sweeps.grid.base import GridConfig
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.grid.isoflop import IsoflopGrid
from isoflop.sweeps.grid.ladder import LadderGrid
from isoflop.sweeps.grid.product import ProductGrid
from isoflop.sweeps.grid.tuning import Tuner
from isoflop.sweeps.plan import rates
from isoflop.sweeps.plan.rates import Calibration, Measured, kind_of, load_rates, place_of, record_rates, sweep_rates
from isoflop.sweeps.plan.sweep_plan import MANY_STEPS, Plan, job_shape, makespan, plan_remarks, plan_runs, wall_clock
from isoflop.sweeps.runs.forms import PlannedRun
from isoflop.sweeps.terminal import describe_seconds, short
from isoflop.train.config import DataConfig, ModelConfig, ParallelConfig, RunConfig
from isoflop.train.data import corpora
from isoflop.train.errors import UserError
from isoflop.train.files import write_json
from isoflop.train.flops import count_parameters, flops_exact
from small_runs import Patch


def runs() -> list[RunConfig]:
    points = LadderGrid(sizes=[1e4, 1e5, 1e6], tokens=[20000, 40000])
    return expand_grid(points, RunConfig(model=ModelConfig(vocab_size=256), tokens=0))


def test_totals_are_the_sums_of_the_runs() -> None:
    configs = runs()
    planned = plan_runs(configs, ClusterConfig(gpus_per_job=2, dollars_per_gpu_hour=3.0), 1e12, jobs_at_once=2)
    assert planned.total_flops == pytest.approx(sum(flops_exact(run) for run in configs))
    hours = sum(run.estimated_seconds for run in planned.runs) / 3600
    assert planned.gpu_hours == pytest.approx(2 * hours)
    assert planned.dollars == pytest.approx(6 * hours)


def test_a_run_of_several_ranks_costs_the_gpus_of_all_of_them() -> None:
    configs = runs()
    for run in configs:
        run.parallel = ParallelConfig(dp=4)
    cluster = ClusterConfig(kind="slurm", gpus_per_job=1, ranks_per_node=2, dollars_per_gpu_hour=3.0)
    four_ranks, one_rank = plan_runs(configs, cluster, 4e12, 1), plan_runs(runs(), cluster, 1e12, 1)
    assert {(run.shape.nodes, run.shape.ranks, run.mesh) for run in four_ranks.runs} == {(2, 4, "tp1 dp4")}
    assert four_ranks.estimated_seconds == pytest.approx(one_rank.estimated_seconds / 4)
    assert four_ranks.gpu_hours == pytest.approx(one_rank.gpu_hours)
    assert four_ranks.dollars == pytest.approx(3 * four_ranks.gpu_hours)


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 8, None])
@pytest.mark.parametrize("dp", [1, 2, 3, 7, 12, 64])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_nodes_hold_whole_tensor_parallel_groups(tp: int, dp: int, per_node: int | None) -> None:
    parallel, cluster = ParallelConfig(tp=tp, dp=dp), ClusterConfig(kind="slurm", ranks_per_node=per_node)
    if per_node is not None and tp > per_node:
        with pytest.raises(UserError, match=rf"^parallel\.tp is {tp}; .* cluster\.ranks_per_node {per_node},"):
            job_shape(parallel, cluster)
        return
    shape = job_shape(parallel, cluster)
    ranks = tp * dp
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and n % tp == 0 and n <= (per_node or ranks)]
    assert (shape.ranks, shape.ranks_per_node) == (ranks, max(fits))
    assert job_shape(parallel, ClusterConfig(kind="local", ranks_per_node=per_node)).nodes == 1


@pytest.mark.parametrize(
    ("ranks", "jobs", "threads", "rate"),
    [(1, 8, 1, 1.0), (2, 4, 1, 2.0), (3, 2, 1, 3.0), (4, 2, 1, 4.0), (5, 1, 1, 5.0), (16, 1, 1, 8.0)],
)
def test_jobs_of_ranks_share_the_cores(ranks: int, jobs: int, threads: int, rate: float, monkeypatch: Patch) -> None:
    monkeypatch.setattr(rates, "usable_cores", lambda: 8)
    assert rates.places(ClusterConfig(), ranks, 1.0) == rates.Places(jobs, threads, rate)


def test_a_batch_that_is_small_for_its_budget_is_remarked_on() -> None:
    def remarks(batch_size: int) -> list[str]:
        base = RunConfig(model=ModelConfig(vocab_size=256), tokens=0)
        base.optimizer.batch_size = batch_size
        tokens = (MANY_STEPS + 1) * 8 * base.data.sequence_length
        return plan_remarks(
            plan_runs(expand_grid(LadderGrid(sizes=[1e4], tokens=[tokens]), base), ClusterConfig(), 1e12, 1)
        )

    assert "200,001 steps of 1,024 tokens" in remarks(8)[0]
    assert remarks(16) == []


@pytest.mark.parametrize("seed", range(20))
def test_makespan_equals_a_simulation_second_by_second(seed: int) -> None:
    rng = random.Random(seed)
    durations = [float(rng.randint(1, 9)) for _ in range(rng.randint(1, 12))]
    places = rng.randint(1, 4)
    waiting, running = list(durations), []
    clock = 0
    while True:
        running = [seconds_left for seconds_left in running if seconds_left > 0]
        while waiting and len(running) < places:
            running.append(waiting.pop(0))
        if not running:
            break
        running = [seconds_left - 1 for seconds_left in running]
        clock += 1
    assert makespan(durations, places) == clock


def test_two_probes_that_differ_a_little_plan_the_same_grid() -> None:
    """Check that a probe 20 % off changes no budget, because the smallest is 1e11 times a power of two."""
    budgets = rates.probed_budgets(1.6e11, 2, 4.5, 96.0)
    assert budgets == [1e11, 2e11, 5e11, 1e12]
    assert budgets == rates.probed_budgets(1.25e11, 2, 4.5, 96.0) == rates.probed_budgets(2.0e11, 2, 4.5, 96.0)


@pytest.mark.parametrize(("probed", "smallest"), [([5e10, 1e11], 1e11), ([2e11, 4e11], 2e11)])
def test_a_slow_machine_does_not_plan_runs_too_early_in_training(probed: list[float], smallest: float) -> None:
    points = IsoflopGrid()
    points.fill_budgets(None, lambda: probed)
    assert points.budgets == [smallest, 2 * smallest]
    points.fill_budgets(None, lambda: [1.0])
    assert points.budgets == [smallest, 2 * smallest]
    points = IsoflopGrid()
    points.fill_budgets([1e10], lambda: probed)
    assert points.budgets == [1e10], "the user's own"


def test_numbers_and_durations_are_short() -> None:
    assert [short(value) for value in (950, 4952, 15_000, 2.1e6)] == ["950", "4.95k", "15k", "2.1M"]
    assert [short(value) for value in (7e10, 1.4e12)] == ["70B", "1.4T"]
    assert [describe_seconds(s) for s in (12.4, 90, 5400)] == ["12 s", "1.5 min", "1.5 h"]


def test_the_nearest_model_is_the_nearest_of_all() -> None:
    """Compare the search, which tries few models, with an exhaustive search."""
    rng = random.Random(0)
    base = ModelConfig(vocab_size=rng.choice([256, 50257]), tied_embeddings=rng.random() < 0.5)
    pool = architectures.well_shaped(base)
    for _ in range(10):
        target = 10 ** rng.uniform(2, 11)
        above = int(rng.choice([0, 0.5, 2]) * target)

        def distance(item: tuple[int, float, ModelConfig], target: float = target) -> float:
            return abs(math.log(item[0] / target)) + architectures.SHAPE_WEIGHT * item[1]

        best = min((item for item in pool if item[0] > above), key=distance)
        assert architectures.nearest_model(base, target, above) == best[2]


# The order in which runs start, and how long all take


def planned(name: str, seconds: float, parent: str | None = None, first_step: int = 0) -> PlannedRun:
    """Return a planned run of 100 steps."""
    values = dict.fromkeys((item.name for item in dataclasses.fields(PlannedRun)), 0)
    return PlannedRun(**values | {  # type: ignore[arg-type]
        "run_id": name, "estimated_seconds": seconds, "parent": parent, "first_step": first_step, "steps": 100
    })  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "places", "seconds"),
    [
        ([planned("a", 4), planned("b", 3), planned("c", 2), planned("d", 1)], 2, 5.0),
        ([planned("a", 4), planned("b", 3)], 5, 4.0),
        # A branch waits until its trunk is at step 50, and the place trains another run meanwhile.
        ([planned("t", 10), planned("b", 4, "t", 50), planned("c", 3)], 2, 10.0),
        ([planned("t", 10), planned("b", 7, "t", 50)], 2, 12.0),
        ([planned("b", 4, "t", 50), planned("t", 10)], 1, 14.0),
        ([planned("b", 4, "elsewhere", 50)], 1, 4.0),
        ([planned("t", 10), planned("b", 4, "t", 50), planned("c", 3, "b", 75)], 3, 10.0),
    ],
)
def test_the_estimate_lets_branches_wait_for_their_trunks(runs: list[PlannedRun], places: int, seconds: float) -> None:
    assert wall_clock(runs, places) == seconds


# Rates that earlier sweeps reached


KIND = kind_of("fp32", "", 1024, 128)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("ISOFLOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration.json"


def here() -> str:
    return place_of(ClusterConfig(), 1)


def record(rates: dict[tuple[str, int], float], place: str | None = None) -> str | None:
    """Record a rate for each run id and width; return a warning or None."""
    return record_rates(
        place or here(), [Measured(name, KIND, width, rate, "cpu") for (name, width), rate in rates.items()]
    )


def test_a_width_has_the_median_of_its_runs_and_a_run_counts_once() -> None:
    rng = random.Random(0)
    rates = {(f"run{number}", 64): rng.uniform(1e9, 9e9) for number in range(9)}
    for _ in range(3):  # a sweep that is finished three times
        assert record(rates) is None
    calibration = load_rates(ClusterConfig(), 1)
    assert calibration.rate(KIND, 64, lambda width: width) == statistics.median(rates.values())
    assert calibration.runs([KIND]) == 9


def test_rates_are_interpolated_between_widths_and_scaled_beyond_them() -> None:
    record({("a", 32): 3.0 * 32**0.7, ("b", 128): 3.0 * 128**0.7})
    calibration = load_rates(ClusterConfig(), 1)

    def assumed(width: float) -> float:
        return 1e9 * width / (width + 96)

    for width in (32, 40, 64, 100, 128):
        assert calibration.rate(KIND, width, assumed) == pytest.approx(3.0 * width**0.7, rel=1e-12)
    assert calibration.rate(KIND, 256, assumed) == pytest.approx(3.0 * 128**0.7 * assumed(256) / assumed(128))
    assert calibration.rate(KIND, 8, assumed) == pytest.approx(3.0 * 32**0.7 * assumed(8) / assumed(32))
    assert calibration.rate(kind_of("bf16", "", 1024, 128), 64, assumed) == assumed(64)


def test_a_sweep_goes_on_with_the_rates_that_it_was_first_planned_with(tmp_path: Path) -> None:
    base = runs()[0]
    kind = kind_of(base.precision, "", base.batch_tokens, base.data.sequence_length)

    def planned() -> Plan:
        return plan_runs(runs(), ClusterConfig(), 1e11, 1, measured=sweep_rates(tmp_path, ClusterConfig(), 1))

    def learn(name: str, rate: float) -> None:
        record_rates(here(), [Measured(name, kind, run.model.width, rate, "cpu") for run in runs()])

    unmeasured_plan = planned()
    write_json(tmp_path / "plan.json", unmeasured_plan.to_dict())
    learn("its own", 1e9)
    assert planned() == unmeasured_plan, "rates of the sweep's own runs do not change its plan"
    (tmp_path / "plan.json").unlink()
    measured_plan = planned()
    assert measured_plan.measured_runs == len({run.model.width for run in runs()})
    write_json(tmp_path / "plan.json", measured_plan.to_dict())
    learn("another's", 9e9)
    assert planned() == measured_plan
    other = [dataclasses.replace(run, precision="bf16") for run in runs()]
    measured = sweep_rates(tmp_path, ClusterConfig(), 1)
    assert plan_runs(other, ClusterConfig(), 1e11, 1, measured=measured).measured_runs == 0


def test_steps_on_a_cpu_have_a_cost_besides_their_flops_until_runs_were_measured() -> None:
    base = runs()[0]
    mesh = dataclasses.replace(base, parallel=ParallelConfig(pp=2, cp=2))
    alone, spread = (plan_runs([run], ClusterConfig(), 1e18, 1).runs[0] for run in (base, mesh))
    assert alone.estimated_seconds > 0.001 * base.steps
    assert spread.estimated_seconds > 10 * alone.estimated_seconds, "ranks wait for each other"
    assert plan_runs([base], ClusterConfig(gpus_per_job=1), 1e18, 1).estimated_seconds < 0.001
    kind = kind_of(base.precision, "", base.batch_tokens, base.data.sequence_length)
    measured = Calibration({kind: {base.model.width: (1e6, 1)}})
    (run,) = plan_runs([base], ClusterConfig(), 1e18, 1, measured=measured).runs
    assert run.estimated_seconds == run.flops_own / 1e6, "a measured rate includes it"


def test_what_was_measured_changes_no_run() -> None:
    base = runs()[0]
    kind = kind_of(base.precision, "", base.batch_tokens, base.data.sequence_length)
    measured = Calibration({kind: {8: (1e6, 1), 999: (1e13, 1)}})
    plans = [plan_runs(runs(), ClusterConfig(), 1e11, 2, measured=calibration) for calibration in (None, measured)]
    ids = [{(run.run_id, run.D, run.steps, run.shape, run.flops_own) for run in plan.runs} for plan in plans]
    assert ids[0] == ids[1]
    assert {run.estimated_seconds for run in plans[0].runs} != {run.estimated_seconds for run in plans[1].runs}


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
def test_a_damaged_file_is_put_aside_with_a_warning_and_never_stops_a_plan(cache: Path, content: str) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content.encode("latin-1"))
    assert load_rates(ClusterConfig(), 1) == Calibration()
    warning = record({("a", 64): 2e9})
    assert warning is not None
    assert "damaged" in warning
    assert cache.with_name("calibration.json.damaged").read_bytes() == content.encode("latin-1")
    assert load_rates(ClusterConfig(), 1).rate(KIND, 64, lambda width: width) == 2e9
    assert record({("b", 64): 2e9}) is None


def record_ten(kind: str) -> None:
    for number in range(10):
        assert record_rates("here", [Measured(f"{kind}-{number}", kind, 64, 1e9, "cpu")]) is None


def test_sweeps_that_end_together_lose_none_of_each_others_runs(cache: Path) -> None:
    writers = [multiprocessing.get_context("fork").Process(target=record_ten, args=(kind,)) for kind in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    kinds = json.loads(cache.read_text())["places"]["here"]["kinds"]
    assert {kind: len(widths["64"]) for kind, widths in kinds.items()} == {"a": 10, "b": 10, "c": 10}


# Notes on fits that a plan cannot support


FEW_SIZES = "sizes per budget are needed"


@pytest.fixture
def notes_of(monkeypatch: Patch) -> Callable[..., list[str]]:
    def ask(grid: GridConfig, vocabulary: int = 256, text: int | None = None) -> list[str]:
        class Corpus:
            def size_bytes(self) -> int | None:
                return text

        monkeypatch.setattr(corpora, "open_corpus", lambda data: Corpus())
        tokenizer = "bytes" if vocabulary == 256 else "bpe"
        base = RunConfig(model=ModelConfig(vocab_size=vocabulary), data=DataConfig(tokenizer=tokenizer), tokens=0)
        return grid.notes(expand_grid(grid, base), Tuner())

    return ask


def test_a_good_plan_has_no_notes(notes_of: Callable[..., list[str]]) -> None:
    assert notes_of(IsoflopGrid(budgets=[1e11, 2e11, 5e11, 1e12]), text=10**8) == []
    assert notes_of(IsoflopGrid(budgets=[1e11, 2e11, 5e11, 1e12])) == []  # a stream has no known size
    assert notes_of(LadderGrid(sizes=[8e3, 3e4, 6e4, 1e5], tokens_per_parameter=[20, 80, 320])) == []


def test_a_budget_without_a_profile_is_refused_with_the_nearest_one(notes_of: Callable[..., list[str]]) -> None:
    reason = r"contains 2.5e\+10, at which [12] of 6 sizes make grid.min_steps 100"
    with pytest.raises(UserError, match=reason) as refused:
        notes_of(IsoflopGrid(budgets=[2.5e10, 1e12]), 4096)
    nearest = float(re.findall(r"nearest budget with 5 is (\S+)$", str(refused.value))[0])
    assert 2.5e10 < nearest < 1e12
    assert FEW_SIZES not in " ".join(notes_of(IsoflopGrid(budgets=[nearest, 30 * nearest]), 4096))


def test_two_sizes_per_budget_are_allowed(notes_of: Callable[..., list[str]]) -> None:
    (note,) = [text for text in notes_of(IsoflopGrid(budgets=[1e11, 1e12], sizes=2)) if FEW_SIZES in text]
    assert "2 at 1e11, 2 at 1e12" in note


def test_text_repeated_too_often_is_named_with_the_budget_that_would_do(notes_of: Callable[..., list[str]]) -> None:
    (note,) = notes_of(IsoflopGrid(budgets=[1e11, 3e11, 1e12]), text=400_000)
    assert "runs see their data more than 4 times, up to 22.0" in note
    nearest = float(re.findall(r"avoids this is (\S+) FLOPs", note)[0])
    assert nearest < 1e12
    assert not [text for text in notes_of(IsoflopGrid(budgets=[nearest / 2, nearest]), text=400_000) if "times" in text]


def test_the_notes_are_those_of_the_fit(notes_of: Callable[..., list[str]]) -> None:
    grid = LadderGrid(sizes=[8e3, 3e4], tokens=[200_000, 400_000])
    runs = expand_grid(grid, RunConfig(model=ModelConfig(vocab_size=256), tokens=0))
    notes = notes_of(grid)
    assert "Approach 3 has no answer: the parametric law has 5 parameters and the table has 4" in notes[0]
    for code in ("few_runs", "narrow_span"):
        (message,) = [warning.message for warning in fit.examine(as_table(runs)) if warning.code == code]
        assert any(message in note for note in notes), code
    assert notes_of(ProductGrid(axes={"tokens": [4096]})) == []  # this grid is not made for a law


def as_table(runs: Sequence[RunConfig]) -> fit.RunTable:
    import pandas as pd

    rows = [{"N": count_parameters(r.model).N_total, "D": r.D, "flops": flops_exact(r), "loss": 2.0} for r in runs]
    return fit.read_table(pd.DataFrame(rows))


def test_added_runs_are_checked_together_with_those_of_the_sweep(notes_of: Callable[..., list[str]]) -> None:
    base = RunConfig(model=ModelConfig(vocab_size=256), tokens=0)
    grid, addition = IsoflopGrid(budgets=[1e11, 3e11, 1e12]), IsoflopGrid(budgets=[3e12])
    assert notes_of(addition) != []  # without the sweep it has only one budget
    runs = expand_grid(addition, base)
    assert addition.notes([*runs, *expand_grid(grid, base)], Tuner()) == []
