"""Workers: one process trains several runs, the failure of one does not affect others, and each end is recorded."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fake_sweep import planned_run
from isoflop.sweeps import prepare
from isoflop.sweeps.config import ClusterConfig, SweepConfig
from isoflop.sweeps.execute import attempt, local, worker
from isoflop.sweeps.execute.attempt import Interrupt
from isoflop.sweeps.execute.controller import EVERYTHING
from isoflop.sweeps.execute.local import LocalBackend, LocalWorker
from isoflop.sweeps.execute.worker import Claims, Launch
from isoflop.sweeps.grid.product import ProductGrid
from isoflop.sweeps.runs import lease
from isoflop.sweeps.runs.directory import Busy, RunDirectory, SweepDirectory
from isoflop.sweeps.runs.forms import JobShape
from isoflop.sweeps.runs.journal import Started
from isoflop.sweeps.slurm import commands as slurm
from isoflop.train.config import CheckpointConfig, DataConfig, RunConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.files import read_json_lines, write_json
from isoflop.train.loop import Diverged, Stopped, train
from isoflop.train.schedule import trunk_steps
from small_runs import Patch, end, forty_steps, own_signals, set_state, until

SUMMARY = {"val_loss": 1.0}
SHAPE = JobShape(**planned_run("any")["shape"])


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restore the signal handlers, which a worker replaces."""
    with own_signals():
        yield


@pytest.fixture(scope="module")
def base(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    return forty_steps(small_corpus(512, ["tensor", "loss", "of", "the"]))


class WorkerBench:
    """A sweep directory with runs, and workers that train them."""

    def __init__(self, path: Path, base: RunConfig) -> None:
        self.sweep, self.base = SweepDirectory(path), base
        self.planned: list[dict[str, Any]] = []
        path.mkdir()
        self.configure(retries=0)

    def configure(self, **cluster: Any) -> None:
        settings = {"backoff_seconds": 0.0, "flops_per_second": 1e9} | cluster
        config = SweepConfig(grid=ProductGrid(axes={"seed": [0]}), cluster=ClusterConfig(**settings), preflight=False)
        (self.sweep.path / "sweep.yaml").write_text(yaml.safe_dump({"config": asdict(config)}))

    def run(self, seed: int, planned: dict[str, Any] | None = None, **changes: Any) -> RunDirectory:
        config = replace(self.base, seed=seed, **changes)
        run = self.sweep.run(run_id(config))
        run.freeze(config)
        set_state(run, "planned")
        first_step = trunk_steps(config) if config.parent else 0
        entry = {"parent": config.parent, "first_step": first_step, "steps": config.steps} | (planned or {})
        self.planned.append(planned_run(run.run_id, **entry))
        write_json(self.sweep.path / "plan.json", {"runs": self.planned})
        return run

    def family(self, seed: int) -> tuple[RunDirectory, RunDirectory]:
        """Plan a trunk of twice the D and its branch."""
        trunk = replace(self.base, seed=seed, tokens=2 * self.base.tokens)
        begin = trunk_steps(replace(self.base, seed=seed))
        branch = self.run(seed, parent=run_id(trunk))
        return self.run(seed, tokens=trunk.tokens, checkpoint=CheckpointConfig(at_steps=[begin])), branch

    def work(self, **options: Any) -> bool:
        """Work as one job. Returns True if the worker ended by itself."""
        return worker.work(Launch(str(self.sweep.path), SHAPE, str(self.sweep.path / "jobs" / "1"), **options))


@pytest.fixture
def bench(tmp_path: Path, base: RunConfig, monkeypatch: Patch) -> WorkerBench:
    monkeypatch.setattr(worker, "IDLE_SECONDS", 1.0)
    return WorkerBench(tmp_path / "sweep", base)


def states(*runs: RunDirectory) -> list[str]:
    return [run.state().state for run in runs]


def reason(run: RunDirectory) -> str:
    return run.state().reason or ""


def causes(run: RunDirectory) -> list[str]:
    return [attempt.cause for attempt in run.record().attempts]


def log(run: RunDirectory) -> str:
    return (run.path / "log.txt").read_text()


def succeed(path: Path) -> None:
    (path / "summary.json").write_text(json.dumps(SUMMARY))


Trainer = Callable[..., Any]
Replace = Callable[[Trainer], None]


@pytest.fixture
def replace_train(monkeypatch: Patch) -> Callable[[Trainer], None]:
    """Return a function that replaces `train` by a function of config and directory."""
    return lambda trainer: monkeypatch.setattr("isoflop.train.loop.train", trainer)


# Real trainings


def test_a_worker_trains_trunk_and_branch_as_if_each_were_alone(bench: WorkerBench, tmp_path: Path) -> None:
    other, (trunk, branch) = bench.run(1), bench.family(3)
    assert bench.work()
    runs = [other, trunk, branch]
    assert states(*runs) == ["done"] * 3, [reason(run) for run in runs]
    for run in runs:
        config = replace(run.config(), parent=None)
        expected = train(config, tmp_path / "alone" / run.run_id, report=lambda line: None)
        assert (run.summary() or {})["val_loss"] == expected["val_loss"]
        assert log(run).rstrip().endswith(" done")
        assert run.state().attempt == 1
    assert f"begins at step {trunk_steps(branch.config())} of run {trunk.run_id}" in log(branch)


def moved(sweep: Path) -> Path:
    return sweep.rename(sweep.with_name("moved"))


def restored(sweep: Path) -> Path:
    """Replace a folder by its copy, as a restored backup does."""
    shutil.copytree(sweep, sweep.with_name("backup"))
    removed = sweep.rename(sweep.with_name("removed"))  # first, for the job still writes to it
    sweep.with_name("backup").rename(sweep)
    shutil.rmtree(removed, ignore_errors=True)
    return sweep


@pytest.mark.parametrize("change", [moved, restored])
def test_a_folder_that_is_moved_or_restored_under_a_run_keeps_every_result(
    bench: WorkerBench, replace_train: Replace, change: Callable[[Path], Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(attempt, "ASK_SECONDS", 0.0)
    bench.configure(retries=1)
    run = bench.run(1, checkpoint=CheckpointConfig(at_steps=[8]))
    expected = train(run.config(), tmp_path / "alone", report=lambda line: None)
    places, old = list[Path](), bench.sweep.path

    def trainer(config: RunConfig, directory: Path, should_stop: Callable[[], bool], **arguments: Any) -> object:
        def disturbed() -> bool:
            if not places and run.last_metrics().get("step", 0) >= 12:
                places.append(change(old))
            return should_stop()

        return train(config, directory, should_stop=disturbed, **arguments)

    replace_train(trainer)
    assert bench.work()
    (place,) = places
    assert old.exists() == (place == old), "the worker wrote where the folder no longer is"
    bench.sweep = SweepDirectory(place)
    assert bench.work()
    run = bench.sweep.run(run.run_id)
    assert states(run) == ["done"], reason(run)
    assert (run.summary() or {})["val_loss"] == expected["val_loss"]
    steps, undisturbed = (
        {line["step"] for line in read_json_lines(folder / "metrics.jsonl")}
        for folder in (run.path, tmp_path / "alone")
    )
    assert steps == undisturbed


# The loop of a worker


def test_what_ends_a_run_never_ends_the_worker(bench: WorkerBench, replace_train: Replace) -> None:
    runs = [bench.run(seed) for seed in range(6)]
    errors = [Diverged("the loss rose"), UserError("no such text"), OSError(errno.ENOSPC, "full"), ValueError("a\nb")]
    ends: dict[str, Exception] = dict(zip([run.run_id for run in runs], errors, strict=False))

    def trainer(config: RunConfig, directory: Path, **arguments: Any) -> None:
        if (error := ends.get(run_id(config))) is not None:
            raise error
        succeed(directory)

    replace_train(trainer)
    runs[4].path.joinpath("config.yaml").write_text("[]")
    assert bench.work()
    assert states(*runs) == ["diverged", "failed", "failed", "failed", "failed", "done"]
    assert [reason(run) for run in runs[:2]] == ["the loss rose", "no such text"]
    assert reason(runs[2]) == f"the disk is full ({runs[2].path}); free some space and start the sweep again"
    assert reason(runs[3]) == "ValueError: a"
    assert "Traceback" in log(runs[3])
    assert "cannot be read as a run's config" in reason(runs[4])
    assert not (runs[3].path / ".reserve").exists()


def stop(config: RunConfig, directory: Path, should_stop: Callable[[], bool], **arguments: Any) -> None:
    assert not should_stop()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert should_stop()
    raise Stopped("stopped at step 3 of 9")


def test_a_worker_told_to_stop_takes_nothing_more(bench: WorkerBench, replace_train: Replace) -> None:
    first, second = bench.run(1), bench.run(2)
    replace_train(stop)
    assert not bench.work()
    assert states(first, second) == ["preempted", "planned"]
    assert reason(first) == "signal SIGUSR2; stopped at step 3 of 9"
    replace_train(lambda config, directory, **arguments: succeed(directory))
    assert bench.work()
    assert (states(first, second), first.state().attempt) == (["done", "done"], 2)


def test_a_worker_whose_launcher_is_gone_stops(bench: WorkerBench, replace_train: Replace) -> None:
    run = bench.run(1)

    def trainer(config: RunConfig, directory: Path, should_stop: Callable[[], bool], **arguments: Any) -> None:
        until(should_stop)
        raise Stopped("stopped at step 1 of 9")

    replace_train(trainer)
    bench.work(token="token of a dead launcher")
    assert states(run) == ["preempted"]
    assert reason(run).startswith("the launcher has ended; ")


def test_a_branch_of_a_trunk_that_failed_says_so(bench: WorkerBench, replace_train: Replace) -> None:
    def trainer(config: RunConfig, directory: Path, **arguments: Any) -> None:
        raise Diverged("the loss rose")

    replace_train(trainer)
    trunk, branch = bench.family(1)
    bench.work()
    assert states(trunk, branch) == ["diverged", "failed"]
    assert f"of run {trunk.run_id}, which has no checkpoint there and is diverged (the loss rose)" in reason(branch)


def test_done_or_cancelled_runs_are_not_trained(bench: WorkerBench, replace_train: Replace) -> None:
    done, cancelled = bench.run(1), bench.run(2)
    succeed(done.path)
    set_state(done, "done")
    cancelled.ask_cancel("a colleague")
    replace_train(lambda *arguments, **options: pytest.fail("trained"))
    bench.work()
    assert states(done, cancelled) == ["done", "cancelled"]
    assert reason(cancelled) == "cancelled by a colleague before it began"


def test_a_worker_goes_on_after_a_cancelled_run(bench: WorkerBench, replace_train: Replace, monkeypatch: Patch) -> None:
    monkeypatch.setattr(attempt, "ASK_SECONDS", -1.0)  # asks at every step
    run, other = bench.run(1), bench.run(2)

    def ask(config: RunConfig, directory: Path, should_stop: Callable[[], bool], **arguments: Any) -> None:
        assert not should_stop()
        if directory == run.path:
            run.ask_cancel("ann on login1")
            assert should_stop()
            raise Stopped("stopped at step 3 of 40")
        succeed(directory)

    replace_train(ask)
    assert bench.work()
    assert states(run, other) == ["cancelled", "done"]
    assert reason(run) == "cancelled by ann on login1; stopped at step 3 of 40"
    lease.reset(run, lease.Policy())
    replace_train(lambda config, directory, **arguments: succeed(directory))
    bench.work()
    assert causes(run) == ["cancelled", "done"]


def test_a_worker_takes_runs_of_its_own_shape(bench: WorkerBench, replace_train: Replace, monkeypatch: Patch) -> None:
    monkeypatch.setattr(worker, "IDLE_SECONDS", 1000.0)
    big = asdict(replace(SHAPE, ranks_per_node=2))
    other, matching, waiting = bench.run(1, {"shape": big}), bench.run(2), bench.run(3)
    bench.configure(retries=1, backoff_seconds=50.0)
    replace_train(lambda config, directory, **arguments: succeed(directory))
    end(waiting, "killed")
    assert bench.work()
    assert states(other, matching, waiting) == ["planned", "done", "failed"]


def test_the_pass_after_a_trunk_starts_workers(bench: WorkerBench, replace_train: Replace) -> None:
    trunk, _ = bench.family(1)
    bench.run(2)
    states_of_trunk: list[list[str]] = []
    replace_train(lambda config, directory, **arguments: succeed(directory))
    launch = Launch(str(bench.sweep.path), SHAPE, str(bench.sweep.path / "jobs" / "1"))
    worker.work(launch, after_trunk=lambda: states_of_trunk.append(states(trunk)))
    assert states_of_trunk == [["done"]]


# In a SLURM job


@pytest.fixture
def node(monkeypatch: Patch) -> None:
    """Set the environment of the only rank of job 7 on node1."""
    rank = {"PROCID": "0", "NTASKS": "1", "LOCALID": "0", "NODEID": "0", "TASKS_PER_NODE": "1", "JOB_ID": "7"}
    values = {f"SLURM_{key}": value for key, value in rank.items()} | {"SUBMITIT_EXECUTOR": "slurm"}
    for name, value in (values | {"SLURMD_NODENAME": "node1"}).items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def test_a_restarted_job_goes_on(bench: WorkerBench, node: None, replace_train: Replace, monkeypatch: Patch) -> None:
    bench.configure(retries=1)
    run = bench.run(1)
    run.write_event(Started, attempt=1, host="node0", job_id="7", machine="far")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    replace_train(lambda config, directory, **arguments: succeed(directory))
    bench.work()
    assert (causes(run), states(run)) == (["node", "done"], ["done"])
    assert "its node node0 failed, and SLURM has started its job again" in str(run.record().attempts[0].reason)


@pytest.mark.parametrize(
    ("outcome", "cause", "state"),
    [("NODE_FAIL", "node", "failed"), ("FAILED", "killed", "failed"), ("OUT_OF_MEMORY", "memory", "failed"),
     ("TIMEOUT", "time_limit", "preempted"), ("CANCELLED", "preempted", "preempted"), (None, "lost", "failed")],
)  # fmt: skip
def test_the_run_of_a_worker_that_died_is_explained_by_slurm(
    outcome: str | None, cause: str, state: str, bench: WorkerBench, node: None, monkeypatch: Patch
) -> None:
    run = bench.run(1)
    run.write_event(Started, attempt=1, host="node3", job_id="8", machine="far")
    monkeypatch.setattr(slurm, "outcomes", lambda jobs: {} if outcome is None else {"8": (outcome, "node3")})

    def busy(*arguments: Any) -> None:
        raise Busy("another worker was faster")

    monkeypatch.setattr(worker.lease, "hold", busy)
    bench.configure(retries=3, backoff_seconds=1000.0)
    bench.work()
    (ended,) = run.record().attempts
    assert (ended.cause, run.state().state) == (cause, state)
    assert "its job 8 on node3" in str(ended.reason)


def test_a_bad_node_is_left(bench: WorkerBench, node: None, replace_train: Replace, monkeypatch: Patch) -> None:
    bench.configure(retries=3)
    run = bench.run(1)
    end(run, "node", host="node1")
    replace_train(lambda config, directory, **arguments: succeed(directory))
    bench.work()
    assert states(run) == ["failed"]
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    bench.work()
    assert states(run) == ["done"]


def test_what_fits_the_time(bench: WorkerBench, node: None, replace_train: Replace, monkeypatch: Patch) -> None:
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
    for limit, margin in ((30, 18.0), (600, 180.0)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(1000 + limit))
        # It is signalled 15 or 120 s before the end, and a start should leave enough time until then.
        assert worker.last_start(os.environ) == pytest.approx(limit - margin)
    assert worker.last_start({}) == math.inf
    long, short = bench.run(1, {"estimated_seconds": 1e6}), bench.run(2, {"estimated_seconds": 1.0})
    replace_train(lambda config, directory, **arguments: succeed(directory))
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")
    assert bench.work(), "it ends by itself, so that another worker is started"
    assert states(long, short) == ["planned", "planned"]
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1600")
    clock, now = worker.time.monotonic, [0.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: clock() + now[0], sleep=worker.time.sleep))

    def slow(config: RunConfig, directory: Path, **arguments: Any) -> None:
        now[0] += 300.0  # of the 420 s in which runs may start
        succeed(directory)

    replace_train(slow)
    second_long = bench.run(3, {"estimated_seconds": 1e6})
    set_state(long, "cancelled")
    bench.work()
    assert states(short, second_long) == ["done", "planned"], "too little time remains for a run longer than any job"
    bench.work()
    assert states(second_long) == ["done"], "a new worker trains it"


@pytest.mark.parametrize(("seconds", "cause"), [(None, "preempted"), (60, "time_limit"), (86400, "preempted")])
def test_a_signal_near_the_end_of_the_job_is_its_time_limit(
    seconds: int | None, cause: str, bench: WorkerBench, replace_train: Replace,
    monkeypatch: Patch,
) -> None:  # fmt: skip
    if seconds is not None:
        monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(1000 + seconds))
    run, begin = bench.run(1), Interrupt.__init__

    def begin_earlier(self: Interrupt, *arguments: Any) -> None:
        begin(self, *arguments)
        self._began -= 30.0

    monkeypatch.setattr(Interrupt, "__init__", begin_earlier)
    replace_train(stop)
    assert bench.work() == (cause == "time_limit"), "then another worker is started at once"
    assert (states(run), causes(run)) == (["preempted"], [cause])


# Claims


def test_other_ranks_follow_the_claims_of_the_first_until_it_ends(bench: WorkerBench) -> None:
    runs = [bench.run(1), bench.run(2)]
    claims, followed = Claims(bench.sweep.path / "jobs", "7"), list[str]()
    follower = Claims(bench.sweep.path / "jobs", "7").following()
    tasks = list(worker.Board(bench.sweep, prepare.configuration(bench.sweep), EVERYTHING).tasks())
    with claims.writing() as write:
        write(replace(tasks[0], kind="score"))
        write(tasks[0])
        followed.append(next(follower))
        write(tasks[1])
        followed.append(next(follower))
    assert next(follower, None) is None
    assert followed == [run.run_id for run in runs]
    abandoned = bench.sweep.path / "jobs" / "8-0.claims"
    abandoned.write_text('{"task": "train", "run": "a"}\n{"task": "tr')
    assert list(Claims(abandoned.parent, "8").following()) == ["a"], "rank 0 died without an end of its claims"


# Workers on this machine


FORK = multiprocessing.get_context("fork")


def freeze(sweep: SweepDirectory, claims: Claims, freezes: bool) -> None:
    """Stop this process during the first run if `freezes`, otherwise after all runs are trained."""
    policy = lease.Policy(backoff_seconds=0.0)
    board = worker.Board(sweep, prepare.configuration(sweep), EVERYTHING)
    with claims.writing() as write:
        for task in board.tasks():
            if task.status == "free":
                with lease.hold(task.run, "7", policy):
                    write(task)
                    if freezes:
                        os.kill(os.getpid(), signal.SIGSTOP)
                    succeed(task.run.path)
                    lease.conclude(task.run, lease.Ending("done"))
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_frozen_worker_counts_as_hung_and_is_replaced(bench: WorkerBench, monkeypatch: Patch) -> None:
    runs = [bench.run(0), bench.run(1)]
    bench.configure(retries=1, jobs=1)
    started: list[Any] = []

    def start(backend: LocalBackend, shape: JobShape, place: int) -> LocalWorker:
        claims = Claims(bench.sweep.path / "jobs", str(len(started)))
        process = FORK.Process(target=freeze, args=(bench.sweep, claims, not started))
        process.start()
        started.append(process)
        handle = SimpleNamespace(job_id="7", _process=SimpleNamespace(pid=process.pid, poll=lambda: process.exitcode))
        return LocalWorker(handle, place, shape, claims)

    monkeypatch.setattr(LocalBackend, "_start", start)
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(local, "FULL_SECONDS", 0.1)
    config = prepare.configuration(bench.sweep)
    prepared = prepare.Prepared(bench.sweep, config, [], None, 1e9, [])  # type: ignore[arg-type]
    backend = LocalBackend(prepared, EVERYTHING)
    backend._hang_seconds = 1.0
    backend.train(lambda claims: None)
    assert len(started) == 2
    assert [causes(run) for run in runs] == [["hung", "done"], ["done"]]
    assert "no sign of life for 1 s" in (runs[0].record().attempts[0].reason or "")
