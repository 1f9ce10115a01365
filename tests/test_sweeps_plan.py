"""Plans: cost, order, placement; probes and words."""

from __future__ import annotations

import random

import pytest
from isoflop.sweeps import probe
from isoflop.sweeps.config import ClusterConfig, LadderGrid
from isoflop.sweeps.grid import expand
from isoflop.sweeps.plan import MANY_STEPS, makespan, plan, remarks
from isoflop.sweeps.terminal import describe, short
from isoflop.train.config import ModelConfig, RunConfig
from isoflop.train.flops import flops_exact


def runs() -> list[RunConfig]:
    points = LadderGrid(sizes=[1e4, 1e5, 1e6], tokens=[20000, 40000])
    return expand(points, RunConfig(model=ModelConfig(vocab_size=256), tokens=0))


def test_totals_are_the_sums_of_the_runs() -> None:
    configs = runs()
    planned = plan(configs, ClusterConfig(gpus_per_job=2, dollars_per_gpu_hour=3.0), 1e12, jobs_at_once=2)
    assert planned.total_flops == pytest.approx(sum(flops_exact(run) for run in configs))
    hours = sum(run.estimated_seconds for run in planned.runs) / 3600
    assert planned.gpu_hours == pytest.approx(2 * hours)
    assert planned.dollars == pytest.approx(6 * hours)


def test_longest_first() -> None:
    seconds = [run.estimated_seconds for run in plan(runs(), ClusterConfig(), 1e12, 2).runs]
    assert seconds == sorted(seconds, reverse=True)


def test_without_a_price_there_are_no_dollars() -> None:
    assert plan(runs(), ClusterConfig(), 1e12, 1).dollars is None


def test_a_batch_that_is_small_for_its_budget_is_remarked_on() -> None:
    def said(batch_size: int) -> list[str]:
        base = RunConfig(model=ModelConfig(vocab_size=256), tokens=0)
        base.optimizer.batch_size = batch_size
        tokens = (MANY_STEPS + 1) * 8 * base.data.sequence_length
        return remarks(plan(expand(LadderGrid(sizes=[1e4], tokens=[tokens]), base), ClusterConfig(), 1e12, 1))

    assert "200,001 steps of 1,024 tokens" in said(8)[0]
    assert said(16) == []


@pytest.mark.parametrize("seed", range(20))
def test_makespan_equals_a_simulation_second_by_second(seed: int) -> None:
    chooser = random.Random(seed)
    durations = [float(chooser.randint(1, 9)) for _ in range(chooser.randint(1, 12))]
    places = chooser.randint(1, 4)
    waiting, running = list(durations), []
    clock = 0
    while True:
        running = [left for left in running if left > 0]
        while waiting and len(running) < places:
            running.append(waiting.pop(0))
        if not running:
            break
        running = [left - 1 for left in running]
        clock += 1
    assert makespan(durations, places) == clock


def test_two_probes_that_differ_a_little_plan_the_same_grid() -> None:
    """Budgets are rounded to powers of two, so a probe 20 % off changes nothing for most machines."""
    budgets = probe.probed_budgets(1.6e11, 2, 4.5, 96.0)
    assert budgets == [1e11, 2e11, 5e11, 1e12]
    assert budgets == probe.probed_budgets(1.25e11, 2, 4.5, 96.0) == probe.probed_budgets(2.0e11, 2, 4.5, 96.0)


def test_a_faster_machine_gets_larger_budgets() -> None:
    slow, fast = (probe.probed_budgets(rate, 2, 4.5, 96.0)[0] for rate in (1e11, 1e12))
    assert fast >= 4 * slow


def test_the_probe_measures_a_plausible_rate() -> None:
    assert 1e8 < probe.core_flops_per_second(0.02) < 1e13


@pytest.mark.parametrize(
    ("value", "said"),
    [(950, "950"), (4952, "4.95k"), (15_000, "15k"), (2.1e6, "2.1M"), (7e10, "70B"), (1.4e12, "1.4T")],
)
def test_numbers_are_said_as_people_say_them(value: float, said: str) -> None:
    assert short(value) == said


def test_durations_are_said_in_their_unit() -> None:
    assert [describe(s) for s in (12.4, 90, 5400)] == ["12 s", "1.5 min", "1.5 h"]
