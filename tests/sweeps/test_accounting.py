"""Accounting of a sweep: each step and second is useful or wasted by a cause; and the error of the estimates."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from isoflop.sweeps.config import ClusterConfig
from isoflop.sweeps.plan.sweep_plan import plan_runs
from isoflop.sweeps.results.accounting import account, lost_steps
from isoflop.sweeps.runs.attempts import Attempt, with_waste
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.sweeps.slurm import commands as slurm
from isoflop.sweeps.slurm.jobs import label_of
from isoflop.train.config import ModelConfig, RunConfig, run_id
from isoflop.train.flops import flops_exact
from isoflop.train.schedule import trunk_steps
from small_runs import set_state

CAUSES = ("killed", "node", "lost", "hung", "preempted", "time_limit", "disk", "memory", "error", "cancelled")


def attempt(number: int, first: int, last: int, saved: int, cause: str = "done", **changes: Any) -> Attempt:
    """Return an attempt of ten seconds that began at second 100 times its number, with one FLOP per step."""
    values: dict[str, Any] = {
        "attempt": number, "began": 100.0 * number, "ended": 100.0 * number + 10, "seconds": 10.0, "host": "node",
        "job_id": f"{number}", "cause": cause, "reason": None, "first_step": first, "last_step": last,
        "saved_step": saved, "flops": float(last - first), "flops_wasted": 0.0,
    }  # fmt: skip
    return Attempt(**{**values, **changes})


def random_history(rng: random.Random, first_step: int) -> tuple[list[Attempt], bool, list[Counter[str]]]:
    """Simulate a run step by step: killed at random, resumed from its newest whole checkpoint, sometimes abandoned.

    Returns its attempts, whether it is done, and the lost steps of each attempt by cause, counted step by step.
    """
    steps, saved = first_step + rng.randint(1, 40), [first_step]
    history: list[Attempt] = []
    lost: list[Counter[str]] = []
    useful: list[tuple[int, int]] = []  # (attempt, step) that is not lost

    def fall_back(to: int, cause: str) -> None:
        for number_and_step in [pair for pair in useful if pair[1] > to]:
            useful.remove(number_and_step)
            lost[number_and_step[0]][cause] += 1

    for number in range(rng.randint(1, 8)):
        while len(saved) > 1 and history and rng.random() < 0.2:
            saved.pop()  # the newest one is damaged
        if history:
            fall_back(saved[-1], history[-1].cause)
        lost.append(Counter())
        step, first, cause = saved[-1], saved[-1], "done"
        while step < steps:
            if rng.random() < 0.08:
                cause = rng.choice(CAUSES)
                break
            step += 1
            useful.append((number, step))
            if rng.random() < 0.2 or step == steps:
                saved.append(step)
        history.append(attempt(number + 1, first, step, saved[-1], cause))
        if cause == "done":
            return history, True, lost
    if rng.random() < 0.3:
        history[-1] = dataclasses.replace(history[-1], cause="diverged")
        fall_back(first_step, "diverged")
    else:
        fall_back(saved[-1], history[-1].cause)
    return history, False, lost


@pytest.mark.parametrize("seed", range(40))
def test_what_is_lost_equals_a_count_made_step_by_step(seed: int) -> None:
    rng = random.Random(seed)
    first_step = rng.choice([0, 0, 7])
    history, done, expected = random_history(rng, first_step)
    lost = lost_steps(history, first_step, done)
    assert [+counts for counts in lost] == [+counts for counts in expected]
    # The sum equals the waste recorded in the attempts.
    wasted = sum(attempt.flops_wasted for attempt in with_waste(history))
    assert sum(counts.total() for counts in lost) == pytest.approx(wasted)


def test_steps_before_a_run_became_a_branch_are_lost() -> None:
    history = [attempt(1, 0, 5, 4, "killed"), attempt(2, 20, 30, 30)]
    assert lost_steps(history, 20, done=True) == [Counter(killed=5), Counter()]


def test_a_trunk_that_diverged_was_of_use_as_far_as_its_branches_begin() -> None:
    history = [attempt(1, 0, 50, 50, "preempted"), attempt(2, 50, 90, 80, "diverged")]
    assert lost_steps(history, 0, done=False) == [Counter(diverged=50), Counter(diverged=40)]
    assert lost_steps(history, 0, done=False, served=60) == [Counter(), Counter(diverged=30)]


class MadeSweep:
    """The folder of a sweep with a plan, to which tests add histories of attempts."""

    def __init__(self, path: Path, cluster: ClusterConfig, runs: list[RunConfig]) -> None:
        self.sweep, self.cluster = SweepDirectory(path / "sweep"), cluster
        self.runs = {run_id(run): run for run in runs}
        self.plan = plan_runs(runs, cluster, 1e9, 1, threads=2)
        self.sweep.path.mkdir()
        (self.sweep.path / "plan.json").write_text(json.dumps(self.plan.to_dict()))
        settings = {"config": {"cluster": dataclasses.asdict(cluster)}}
        (self.sweep.path / "sweep.yaml").write_text(yaml.safe_dump(settings))

    def add(self, run: RunConfig, history: list[Attempt], state: str = "done", **summary: Any) -> None:
        """Write the files of a run."""
        directory = self.sweep.run(run_id(run))
        directory.freeze(run)
        set_state(directory, state, attempt=len(history))
        lines = [{key: value for key, value in vars(attempt).items() if key != "budget"} for attempt in history]
        (directory.path / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if state == "done":
            (directory.path / "summary.json").write_text(json.dumps({"device": "gpu"} | summary))


def run(seed: int = 0, width: int = 16, tokens: int = 100 * 8 * 128) -> RunConfig:
    return RunConfig(model=ModelConfig(width=width, vocab_size=256), seed=seed, tokens=tokens)


def check_sums(books: dict[str, Any]) -> None:
    assert books["used"]["hours"] == books["useful"]["hours"] + books["wasted"]["hours"]
    assert books["used"]["flops"] == books["useful"]["flops"] + books["wasted"]["flops"]
    assert books["wasted"]["hours"] == pytest.approx(sum(cause["hours"] for cause in books["causes"].values()))
    assert books["wasted"]["flops"] == pytest.approx(
        sum(cause["flops"] for cause in books["causes"].values()), rel=1e-15
    )


@pytest.mark.parametrize("seed", range(5))
def test_hours_dollars_and_flops_of_random_histories_add_up(tmp_path: Path, seed: int) -> None:
    rng, cluster = random.Random(seed), ClusterConfig(kind="slurm", gpus_per_job=2, dollars_per_gpu_hour=3.0)
    sweep = MadeSweep(tmp_path, cluster, [run(seed=number) for number in range(8)])
    steps, hours, ended = Counter[str](), 0.0, Counter[str]()
    for config in sweep.runs.values():
        history, done, lost = random_history(rng, 0)
        if done:  # the planned run is longer: extend its last attempt to the end
            history[-1] = dataclasses.replace(history[-1], last_step=config.steps, saved_step=config.steps)
        sweep.add(config, history, "done" if done else "failed", seconds=10.0)
        steps["done"] += sum(attempt.last_step - attempt.first_step for attempt in history)
        steps["lost"] += sum(counts.total() for counts in lost)
        hours += sum(attempt.seconds for attempt in history) * 2 / 3600
        ended.update(attempt.cause for attempt in history if attempt.cause != "done")
    step_flops = flops_exact(run()) / run().steps
    books = account(sweep.sweep)
    check_sums(books)
    assert books["used"]["flops"] == steps["done"] * step_flops
    assert books["wasted"]["flops"] == steps["lost"] * step_flops
    assert books["used"]["hours"] == pytest.approx(hours)
    assert books["used"]["dollars"] == pytest.approx(3 * hours)
    assert {cause: totals["attempts"] for cause, totals in books["causes"].items() if totals["attempts"]} == ended
    assert books["planned"]["hours"] == pytest.approx(sweep.plan.gpu_hours)
    assert books["planned"]["dollars"] == pytest.approx(sweep.plan.dollars)
    assert json.loads(json.dumps(books))["unit"] == "GPU-hours"


def test_hours_are_wasted_as_steps_are(tmp_path: Path) -> None:
    """Check attempts that were killed after half of their steps were saved, or before their first step."""
    sweep = MadeSweep(tmp_path, ClusterConfig(), [run()])
    history = [attempt(1, 0, 40, 20, "killed"), attempt(2, 20, 20, 20, "disk"), attempt(3, 20, 100, 100)]
    sweep.add(run(), history, seconds=12.0)
    books = account(sweep.sweep)
    check_sums(books)
    assert books["unit"] == "core-hours"
    assert books["used"]["dollars"] is None
    core_hours = 2 * 10 / 3600  # of ten seconds on two cores
    assert books["causes"]["killed"]["hours"] == pytest.approx(0.5 * core_hours)
    assert books["causes"]["disk"]["hours"] == pytest.approx(core_hours)
    assert books["useful"]["hours"] == pytest.approx(1.5 * core_hours)
    assert list(books["causes"]) == ["disk", "killed"], "the most expensive first"
    assert (books["attempts"], books["retries"], books["retry_budget"]) == (3, 2, 100)


def test_a_run_that_is_done_has_made_its_steps_even_if_lines_are_missing(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, ClusterConfig(), [run(), run(seed=1)])
    sweep.add(run(), [], seconds=36.0)
    sweep.add(run(seed=1), [attempt(2, 60, 100, 100)], seconds=36.0)
    books = account(sweep.sweep)
    assert books["useful"]["flops"] == books["planned"]["flops"] == books["used"]["flops"]
    assert books["used"]["hours"] == pytest.approx(2 * (36 + 10) / 3600)


def test_only_the_part_of_a_branch_after_its_trunk_counts(tmp_path: Path) -> None:
    trunk = run(tokens=400 * 8 * 128)
    branch = dataclasses.replace(run(tokens=200 * 8 * 128), parent=run_id(trunk))
    first_step = trunk_steps(branch)
    sweep = MadeSweep(tmp_path, ClusterConfig(), [trunk, branch])
    sweep.add(trunk, [attempt(1, 0, 400, 400)], seconds=40.0)
    sweep.add(branch, [attempt(1, first_step, 200, 200)], seconds=26.0)
    lines = [{"step": step, "seconds": 0.1 * step} for step in (10, first_step - 5)]
    lines.append({"step": 200, "seconds": 26.0})
    (sweep.sweep.run(run_id(branch)).path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    books = account(sweep.sweep)
    check_sums(books)
    step_flops = flops_exact(trunk) / trunk.steps
    assert books["useful"]["flops"] == (400 + 200 - first_step) * step_flops == books["planned"]["flops"]
    # The trunk takes 0.1 s per step up to where the branch begins; later seconds belong to the branch.
    planned = {planned_run.run_id: planned_run.estimated_seconds for planned_run in sweep.plan.runs}
    assert books["error"] is not None
    assert books["error"]["ratio"] == pytest.approx((40 + 26 - 0.1 * first_step) / sum(planned.values()))
    assert books["error"]["runs"] == 2


def test_the_error_of_the_estimate_is_reported_by_width(tmp_path: Path) -> None:
    runs = [run(seed, width) for width in (16, 32) for seed in range(3)]
    sweep = MadeSweep(tmp_path, ClusterConfig(), runs)
    planned = {config.run_id: config.estimated_seconds for config in sweep.plan.runs}
    factors = dict(zip(sweep.runs, [1.0, 2.0, 4.0, 0.5, 0.5, 0.25], strict=True))
    for config in runs:
        attempts = [attempt(1, 0, 50, 50, "killed"), attempt(2, 50, 100, 100, cpu_seconds=2.5)]
        sweep.add(config, attempts, seconds=planned[run_id(config)] * factors[run_id(config)])
    books = account(sweep.sweep)
    assert books["cpu_share"] == 0.25 / sweep.plan.runs[0].shape.cpus, "of attempts that recorded it"
    assert {width: error["ratio"] for width, error in books["errors"].items()} == pytest.approx({16: 2.0, 32: 0.5})
    assert (books["errors"][16]["low"], books["errors"][16]["high"]) == pytest.approx((1.5, 3.0))
    assert books["error"] is not None
    total = sum(planned[name] * factor for name, factor in factors.items()) / sum(planned.values())
    assert books["error"]["ratio"] == pytest.approx(total)


def test_slurms_clock_is_reported_next_to_ours_if_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = MadeSweep(tmp_path, ClusterConfig(kind="slurm", gpus_per_job=4), [run()])
    sweep.add(
        run(), [attempt(1, 0, 50, 50, "preempted", job_id="7_0"), attempt(2, 50, 100, 100, job_id="7_0")], seconds=9.0
    )
    idle = sweep.sweep.path / "jobs" / f"worker-{label_of(sweep.plan.runs[0].shape)}-0123"
    idle.mkdir(parents=True)
    (idle / "8_0_submitted.pkl").touch()  # a worker that found no run to train
    monkeypatch.setattr(slurm, "elapsed", lambda jobs: {"7_0": 90.0, "8_0": 18.0})
    books = account(sweep.sweep)
    assert books["cluster_hours"] == pytest.approx(4 * 108 / 3600)
    assert books["overhead_hours"] == pytest.approx(4 * 88 / 3600)
    monkeypatch.setattr(slurm, "elapsed", lambda jobs: {})
    assert [account(sweep.sweep)[name] for name in ("cluster_hours", "overhead_hours")] == [None, None]
