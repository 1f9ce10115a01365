"""What a pass of the keeper does about a sweep, with a stand-in for SLURM; slurm/test_keeper.py has the real one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from isoflop.sweeps import prepare
from isoflop.sweeps.config import ClusterConfig
from isoflop.sweeps.entry import compose
from isoflop.sweeps.execute import advance
from isoflop.sweeps.prepare import Prepared
from isoflop.sweeps.runs import attempts
from isoflop.sweeps.runs.attempts import Policy
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.slurm import backend
from isoflop.sweeps.slurm import commands as slurm
from isoflop.sweeps.slurm.backend import Calls, SlurmBackend
from isoflop.sweeps.slurm.submit import QueueFull
from isoflop.train.config import DataConfig
from isoflop.train.errors import UserError


class Cluster:
    """SLURM as the keeper sees it: which runs have a job, and what was submitted."""

    def __init__(self) -> None:
        self.jobs: set[str] = set()  # runs that have one
        self.submitted: list[dict[str, tuple[str, ...]]] = []
        self.scored: list[list[str]] = []
        self.said: list[str] = []
        self.others: set[str] = set()
        self.keepers = 2
        self.full = False  # whether SLURM takes no more jobs
        self.scoring: set[str] = set()  # runs that a job in the queue scores

    def backend(self, sweep: SweepDirectory, cluster: ClusterConfig, live: set[str]) -> Backend:
        return Backend(self, sweep, cluster, live)


class Backend(SlurmBackend):
    """What a pass of the keeper works with."""

    def __init__(self, queue: Cluster, sweep: SweepDirectory, cluster: ClusterConfig, live: set[str]) -> None:
        super().__init__(sweep, cluster, live, Calls(*[lambda *arguments: None] * 6))
        self.queue = queue

    def keep(self) -> int:
        self.queue.said.append("keep")
        return self.queue.keepers

    def submit_fit(self) -> None:
        if self.queue.full:
            raise QueueFull("no more jobs")
        self.queue.said.append("fit")

    def end_keepers(self) -> None:
        self.queue.said.append("end")

    def jobs_of(self, run: RunDirectory) -> set[str]:
        return self.queue.jobs & {run.run_id}

    def in_queue(self) -> set[str]:
        return self.queue.jobs | self.queue.others

    def queues(self) -> dict[str, set[str]]:
        return {}

    def without_scoring(self, runs: Sequence[RunDirectory]) -> list[RunDirectory]:
        return [run for run in runs if run.run_id not in self.queue.scoring]

    def submit(
        self, plan: Any, units: Iterable[Any], unscored: Sequence[RunDirectory], evaluate: bool,
        avoid: Mapping[str, tuple[str, ...]] | None = None,
    ) -> list[str]:  # fmt: skip
        names = [name for unit in units for name in unit.runs]
        self.queue.submitted.append({name: (avoid or {}).get(name, ()) for name in names})
        if not self.queue.full:
            self.queue.scored.append([run.run_id for run in unscored])
            self.queue.scoring |= set(self.queue.scored[-1])
        self.queue.jobs |= set(names)
        return []


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    result = Cluster()
    monkeypatch.setattr(advance, "slurm_backend", result.backend)
    monkeypatch.setattr(slurm, "live_jobs", lambda: set())
    monkeypatch.setattr(advance, "settle_lost", lambda sweep, policy, live: [])
    return result


@pytest.fixture(scope="module")
def template(small_corpus: Callable[..., DataConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep of three runs, planned for SLURM."""
    data = small_corpus(validation_tokens=256)
    config = compose(
        [
            "+grid=product", "tokens=640", "grid.axes={seed: [0, 1, 2]}", "cluster=slurm", "tracker=none",
            "evaluate=none", "data=text", f"data.path={data.path}", f"data.cache_dir={data.cache_dir}",
            "data.sequence_length=16",
            "optimizer.batch_size=4", "data.tokenizer=bytes", "cluster.backoff_seconds=1000",
        ]
    )  # fmt: skip
    config.sweep, config.output_root = "sweep", str(tmp_path_factory.mktemp("planned"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "live_jobs", lambda: set())
        prepared = prepare.from_config(config)
        prepare.write_plan(prepared, ["test"])
    return prepared.sweep.path


@pytest.fixture
def planned(template: Path, tmp_path: Path, cluster: Cluster) -> Prepared:
    return prepare.from_disk(SweepDirectory(Path(shutil.copytree(template, tmp_path / "sweep"))))


def backend_of(planned: Prepared, cluster: Cluster) -> Backend:
    return cluster.backend(planned.sweep, planned.config.cluster, set())


def finish_all(planned: Prepared) -> None:
    for run in planned.directories:
        (run.path / "summary.json").write_text("{}")
        run.set_state("done")


def end(run: RunDirectory, state: str, cause: str, host: str = "node1") -> None:
    """An attempt on a run that has come to its end."""
    with run.lock():
        run.set_state("running", attempt=run.state().attempt + 1, host=host, job_id="7")
        attempts.note(run, cause, "a test")
        run.set_state(state, reason="a test")


def test_runs_without_a_job_are_submitted_and_those_with_one_are_left(planned: Prepared, cluster: Cluster) -> None:
    first, second, third = planned.directories
    cluster.jobs = {first.run_id}
    end(second, "preempted", "preempted")
    assert not advance.tend(planned.sweep).over
    assert cluster.submitted == [{second.run_id: (), third.run_id: ()}]
    assert cluster.said[0] == "keep", "before anything that could fail"
    assert not advance.tend(planned.sweep).over
    assert len(cluster.submitted) == 1, "all have a job now"


def test_a_run_whose_node_was_lost_waits_and_then_goes_elsewhere(
    planned: Prepared, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, *others = planned.directories
    end(lost, "failed", "node", host="node7")
    cluster.jobs = {run.run_id for run in others}
    assert not advance.tend(planned.sweep).over
    assert cluster.submitted == [], "not before its time to wait is over"
    later = advance.now_on(planned.sweep.path) + 1001
    monkeypatch.setattr(advance, "now_on", lambda path: later)
    cluster.jobs = {run.run_id for run in others}
    advance.tend(planned.sweep)
    assert cluster.submitted == [{lost.run_id: ("node7",)}]


def test_what_would_only_happen_again_is_left_alone(planned: Prepared, cluster: Cluster) -> None:
    ends = [("failed", "input"), ("failed", "error"), ("cancelled", "cancelled")]
    for run, (state, cause) in zip(planned.directories, ends, strict=True):
        end(run, state, cause)
    assert advance.tend(planned.sweep).over
    assert cluster.submitted == []
    assert cluster.said == ["keep", "end"], "nothing is done, so there is nothing to fit"


def test_retries_end_with_their_budget(planned: Prepared, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    run, *others = planned.directories
    for other in others:
        end(other, "failed", "input")
    starts = 0
    far = advance.now_on(planned.sweep.path)
    while True:
        end(run, "failed", "killed")
        cluster.jobs = set()
        far += 1e6
        monkeypatch.setattr(advance, "now_on", lambda path, far=far: far)
        if advance.tend(planned.sweep).over:
            break
        starts += 1
    assert starts == planned.config.cluster.retries


def test_the_laws_are_fitted_after_the_last_result_a_few_times_at_most(planned: Prepared, cluster: Cluster) -> None:
    finish_all(planned)
    cluster.full = True
    for _ in range(2):
        assert not advance.tend(planned.sweep).over
    cluster.full = False
    for _ in range(backend.FITS):
        assert not advance.tend(planned.sweep).over
    assert advance.tend(planned.sweep).over, "the fit never came, and that is the end of it"
    assert cluster.said.count("fit") == backend.FITS

    newer = max(file.stat().st_mtime for file in planned.sweep.path.glob("runs/*/summary.json")) + 1
    (planned.sweep.path / "fit").mkdir()
    for file in (planned.sweep.path / "table.csv", planned.sweep.path / "fit" / "law.json"):
        file.write_text("")
        os.utime(file, (newer, newer))
    assert advance.tend(planned.sweep).over
    assert cluster.said.count("fit") == backend.FITS
    late = planned.directories[0].path / "summary.json"
    os.utime(late, (newer + 1, newer + 1))
    assert not advance.tend(planned.sweep).over
    assert cluster.said.count("fit") == backend.FITS + 1, "a result that came after the table"


def test_nothing_is_done_while_slurm_does_not_answer(
    planned: Prepared, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent() -> set[str]:
        raise UserError("squeue does not answer")

    monkeypatch.setattr(slurm, "live_jobs", silent)
    assert advance.tend(planned.sweep) == advance.Pass(over=False, keepers=0), "so this one stays"
    assert (cluster.said, cluster.submitted) == ([], [])


def test_the_budget_of_a_sweep_holds_within_one_pass(planned: Prepared, cluster: Cluster) -> None:
    for run in planned.directories:
        end(run, "failed", "killed")
    policy = Policy(sweep_retries=2, backoff_seconds=0.0)
    assert len(advance.look(planned.sweep, backend_of(planned, cluster), policy).due) == 2


def test_a_run_that_still_shows_signs_of_life_is_waited_for(planned: Prepared, cluster: Cluster) -> None:
    finish_all(planned)
    planned.directories[0].set_state("running", host="node1", job_id="9")
    assert not advance.tend(planned.sweep).over
    assert (cluster.submitted, cluster.said) == ([], ["keep"])


def test_a_scoring_that_fails_is_repeated_a_few_times(
    planned: Prepared, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_all(planned)
    monkeypatch.setattr(advance, "missing_scores", lambda runs, config: list(runs))
    passes = 0
    cluster.full = True
    for _ in range(2):
        assert not advance.tend(planned.sweep).over
    cluster.full = False
    while not advance.tend(planned.sweep).over and passes < 20:
        passes += 1
        cluster.scoring.clear()
    assert len(cluster.scored) == backend.SCORINGS
    assert set(cluster.scored[0]) == {run.run_id for run in planned.directories}


def test_two_passes_at_once_are_one(planned: Prepared, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advance, "LOCK_SECONDS", 0.0)
    held = planned.sweep.lock()
    held.__enter__()

    def pause(seconds: float) -> None:
        assert cluster.said == []
        held.__exit__(None, None, None)

    monkeypatch.setattr(advance.time, "sleep", pause)
    advance.keep(str(planned.sweep.path))  # it does not go, for the other one might find the same
    assert len(cluster.submitted) == 1
    record = json.loads((planned.sweep.path / "jobs" / backend.MEMORY).read_text())
    assert record["over"] is False


def test_a_keeper_that_nobody_follows_stays(
    planned: Prepared, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.keepers = 0
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        cluster.keepers = len(pauses) - 1

    monkeypatch.setattr(advance.time, "sleep", pause)
    advance.keep(str(planned.sweep.path))
    assert pauses == [planned.config.cluster.keeper_seconds] * 2
    assert cluster.said.count("keep") == 3


def test_a_pass_that_comes_to_nothing_is_made_again_by_the_same_keeper(
    planned: Prepared, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk would else end both keepers within a minute, and nobody would look after the sweep."""
    pauses: list[float] = []
    failures: list[Exception] = [OSError(errno.ENOSPC, "No space left on device"), UserError("SLURM refuses")]

    def launcher(*arguments: Any) -> Backend:
        if failures:
            raise failures.pop()
        return cluster.backend(*arguments)

    monkeypatch.setattr(advance, "slurm_backend", launcher)
    monkeypatch.setattr(advance.time, "sleep", pauses.append)
    advance.keep(str(planned.sweep.path))
    assert pauses == [planned.config.cluster.keeper_seconds] * 2
    assert cluster.said.count("keep") == 1


def test_a_branch_waits_with_its_trunk(planned: Prepared, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, branch, other = planned.directories
    plan = json.loads((planned.sweep.path / "plan.json").read_text())
    for run in plan["runs"]:
        run["parent"] = trunk.run_id if run["run_id"] == branch.run_id else None
    (planned.sweep.path / "plan.json").write_text(json.dumps(plan))
    end(trunk, "failed", "killed")
    survey = advance.look(planned.sweep, backend_of(planned, cluster), Policy())
    assert survey.due == {other.run_id: ()}
    assert set(survey.later) == {trunk.run_id, branch.run_id}
