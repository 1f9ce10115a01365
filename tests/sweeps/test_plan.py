"""Plans: cost, order, placement; probes and words."""

from __future__ import annotations

import math
import random

import pytest
from isoflop.sweeps.config import ClusterConfig, LadderGrid
from isoflop.sweeps.grid import architectures
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.plan import rates
from isoflop.sweeps.plan.sweep_plan import MANY_STEPS, job_shape, makespan, plan_remarks, plan_runs
from isoflop.sweeps.terminal import describe_seconds, short
from isoflop.train.config import ModelConfig, ParallelConfig, RunConfig
from isoflop.train.errors import UserError
from isoflop.train.flops import flops_exact


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
    four, one = plan_runs(configs, cluster, 4e12, 1), plan_runs(runs(), cluster, 1e12, 1)
    assert {(run.shape.nodes, run.shape.ranks, run.mesh) for run in four.runs} == {(2, 4, "tp1 dp4")}
    assert four.estimated_seconds == pytest.approx(one.estimated_seconds / 4)
    assert four.gpu_hours == pytest.approx(one.gpu_hours)
    assert four.dollars == pytest.approx(3 * four.gpu_hours)


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 8, None])
@pytest.mark.parametrize("dp", [1, 2, 3, 7, 12, 64])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_nodes_hold_whole_tensor_parallel_groups_and_are_as_few_as_can_be(
    tp: int, dp: int, per_node: int | None
) -> None:
    parallel, cluster = ParallelConfig(tp=tp, dp=dp), ClusterConfig(kind="slurm", ranks_per_node=per_node)
    if per_node is not None and tp > per_node:
        with pytest.raises(UserError, match=rf"^parallel\.tp is {tp}, .* cluster\.ranks_per_node allows {per_node};"):
            job_shape(parallel, cluster)
        return
    shape = job_shape(parallel, cluster)
    ranks = tp * dp
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and n % tp == 0 and n <= (per_node or ranks)]
    assert (shape.ranks, shape.ranks_per_node) == (ranks, max(fits))
    assert job_shape(parallel, ClusterConfig(kind="local", ranks_per_node=per_node)).nodes == 1


def test_scoring_is_one_process_with_the_memory_of_a_node() -> None:
    cluster = ClusterConfig(kind="slurm", gpus_per_job=1, cpus_per_task=4, memory_gb=32.0, ranks_per_node=4)
    shape = job_shape(ParallelConfig(tp=2, dp=4), cluster).for_one_process()
    assert (shape.ranks, shape.gpus, shape.cpus, shape.memory_gb) == (1, 1, 4, 128.0)
    alone = job_shape(ParallelConfig(), cluster)
    assert alone.for_one_process() == alone


@pytest.mark.parametrize(
    ("ranks", "jobs", "threads", "rate"),
    [(1, 8, 1, 1.0), (2, 4, 1, 2.0), (3, 2, 1, 3.0), (4, 2, 1, 4.0), (5, 1, 1, 5.0), (16, 1, 1, 8.0)],
)
def test_jobs_of_several_ranks_share_the_cores(
    ranks: int, jobs: int, threads: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "usable_cores", lambda: 8)
    assert rates.places(ClusterConfig(), ranks, 1.0) == rates.Places(jobs, threads, rate)


def test_a_batch_that_is_small_for_its_budget_is_remarked_on() -> None:
    def said(batch_size: int) -> list[str]:
        base = RunConfig(model=ModelConfig(vocab_size=256), tokens=0)
        base.optimizer.batch_size = batch_size
        tokens = (MANY_STEPS + 1) * 8 * base.data.sequence_length
        return plan_remarks(
            plan_runs(expand_grid(LadderGrid(sizes=[1e4], tokens=[tokens]), base), ClusterConfig(), 1e12, 1)
        )

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
    budgets = rates.probed_budgets(1.6e11, 2, 4.5, 96.0)
    assert budgets == [1e11, 2e11, 5e11, 1e12]
    assert budgets == rates.probed_budgets(1.25e11, 2, 4.5, 96.0) == rates.probed_budgets(2.0e11, 2, 4.5, 96.0)


@pytest.mark.parametrize(
    ("value", "said"),
    [(950, "950"), (4952, "4.95k"), (15_000, "15k"), (2.1e6, "2.1M"), (7e10, "70B"), (1.4e12, "1.4T")],
)
def test_numbers_are_said_as_people_say_them(value: float, said: str) -> None:
    assert short(value) == said


def test_durations_are_said_in_their_unit() -> None:
    assert [describe_seconds(s) for s in (12.4, 90, 5400)] == ["12 s", "1.5 min", "1.5 h"]


@pytest.mark.parametrize("seed", [0])
def test_the_nearest_model_is_the_nearest_of_all(seed: int) -> None:
    """Against a look at every one of them; the search looks at a few."""
    chooser = random.Random(seed)
    base = ModelConfig(vocab_size=chooser.choice([256, 50257]), tied_embeddings=chooser.random() < 0.5)
    pool = architectures.well_shaped(base)
    for _ in range(10):
        wanted = 10 ** chooser.uniform(2, 11)
        above = int(chooser.choice([0, 0.5, 2]) * wanted)

        def distance(item: tuple[int, float, ModelConfig], wanted: float = wanted) -> float:
            return abs(math.log(item[0] / wanted)) + architectures.SHAPE_WEIGHT * item[1]

        best = min((item for item in pool if item[0] > above), key=distance)
        assert architectures.nearest_model(base, wanted, above) == best[2]
