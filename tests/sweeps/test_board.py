"""Tasks of a sweep that a worker can claim, and when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_sweep import planned_run
from isoflop.sweeps.config import ClusterConfig, EvaluateConfig, SweepConfig
from isoflop.sweeps.execute.controller import AVOID_SECONDS, EVERYTHING, SCORINGS, Board, Scope, can_begin, standing
from isoflop.sweeps.runs.attempts import Attempt, Policy
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.journal import Scoring
from isoflop.train.files import write_json
from small_runs import end, set_state

CONFIG = SweepConfig(cluster=ClusterConfig(backoff_seconds=1000.0, sweep_retries=2))


def write_sweep(folder: Path, *runs: dict[str, object]) -> tuple[SweepDirectory, list[RunDirectory]]:
    write_json(folder / "plan.json", {"runs": list(runs)})
    sweep = SweepDirectory(folder)
    for run in sweep.runs():
        run.path.mkdir(parents=True)
    return sweep, sweep.runs()


def statuses(sweep: SweepDirectory, config: SweepConfig = CONFIG, scope: Scope = EVERYTHING) -> dict[str, str]:
    return {task.run.run_id: task.status for task in Board(sweep, config, scope).tasks()}


def test_a_run_is_free_waits_or_is_taken_as_its_state_says(tmp_path: Path) -> None:
    names = ["new", "sent", "runs", "done", "gone", "lost", "stop", "bad"]
    sweep, runs = write_sweep(tmp_path, *map(planned_run, names))
    by_name = dict(zip(names, runs, strict=True))
    set_state(by_name["sent"], "queued")
    set_state(by_name["runs"], "running")
    for name, state in (("done", "done"), ("gone", "cancelled")):
        set_state(by_name[name], state)
    end(by_name["lost"], "killed")
    end(by_name["stop"], "preempted")
    end(by_name["bad"], "input")
    expected = {"new": "free", "sent": "free", "runs": "taken", "lost": "waiting", "stop": "free"}
    assert statuses(sweep) == expected
    (lost,) = [task for task in Board(sweep, CONFIG, EVERYTHING).tasks() if task.run.run_id == "lost"]
    assert 900 < lost.wait_seconds <= 1000


def test_the_budget_of_all_runs_together_holds(tmp_path: Path) -> None:
    sweep, runs = write_sweep(tmp_path, *map(planned_run, ["a", "b", "c"]))
    config = replace(CONFIG, cluster=ClusterConfig(backoff_seconds=0.0, sweep_retries=2))
    for run in runs:
        end(run, "killed")
    assert statuses(sweep, config) == dict.fromkeys("abc", "free")
    for run in runs[:2]:
        end(run, "killed")
    assert statuses(sweep, config) == {}, "two retries were all"


def test_a_node_is_avoided_for_a_while_after_a_run_can_be_claimed_again() -> None:
    attempt = Attempt(
        attempt=1, began=0.0, ended=100.0, seconds=100.0, host="node7", job_id="7", cause="node", reason=None,
        first_step=0, last_step=0, saved_step=0, flops=0.0, flops_wasted=0.0,
    )  # fmt: skip
    policy, free_at = Policy(backoff_seconds=30.0), 130.0
    assert standing([attempt], policy, 0, 110.0) == ("waiting", 20.0, ("node7",))
    assert standing([attempt], policy, 0, free_at) == ("free", 0.0, ("node7",))
    assert standing([attempt], policy, 0, free_at + AVOID_SECONDS) == ("free", 0.0, ())
    assert standing([attempt] * 4, policy, 0, 1e9) == ("over", 0.0, ())
    assert standing([], policy, 0, 0.0) == ("free", 0.0, ())


def test_a_branch_waits_for_the_checkpoint_of_its_trunk_or_for_its_end(tmp_path: Path) -> None:
    branch = planned_run("branch", parent="trunk", first_step=5)
    sweep, (trunk, _, _) = write_sweep(tmp_path, planned_run("trunk"), branch, planned_run("twig", parent="branch"))
    assert statuses(sweep) == {"trunk": "free", "branch": "waiting", "twig": "waiting"}
    set_state(trunk, "running")
    assert statuses(sweep)["branch"] == "waiting"
    (trunk.path / "checkpoints" / "step_5").mkdir(parents=True)
    (trunk.path / "checkpoints" / "step_5" / "manifest.json").write_text("{}")
    assert statuses(sweep) == {"trunk": "taken", "branch": "free", "twig": "waiting"}
    assert not can_begin(sweep.run("branch"), trunk, 6)
    (trunk.path / "checkpoints" / "step_5" / "manifest.json").unlink()
    set_state(trunk, "diverged")
    assert statuses(sweep)["branch"] == "free", "it says itself that there is no trunk"


def test_runs_out_of_scope_are_left_until_a_user_asks_for_them(tmp_path: Path) -> None:
    sweep, (_, second) = write_sweep(tmp_path, planned_run("first"), planned_run("second"))
    end(second, "preempted")
    scope = Scope({run.run_id: run.state().since for run in (second,)})
    board = Board(sweep, CONFIG, scope)
    assert [task.run.run_id for task in board.tasks()] == ["first"]
    set_state(second, "planned")
    assert [task.run.run_id for task in board.tasks()] == ["first", "second"], "of the same board"


@pytest.mark.parametrize("scores", [True, False])
def test_a_finished_run_is_scored_a_few_times_at_most(tmp_path: Path, scores: bool) -> None:
    sweep, (done, _) = write_sweep(tmp_path, planned_run("done"), planned_run("open"))
    config = replace(CONFIG, evaluate=EvaluateConfig(tasks=["lambada_openai"]))
    set_state(done, "done")
    (done.path / "summary.json").write_text('{"step": 7}')
    for _ in range(SCORINGS):
        tasks = list(Board(sweep, config, Scope(scores=scores)).tasks())
        assert [(task.kind, task.run.run_id) for task in tasks] == [("train", "open"), ("score", "done")][: 1 + scores]
        done.write_event(Scoring)
    assert len(list(Board(sweep, config, Scope(scores=scores)).tasks())) == 1
