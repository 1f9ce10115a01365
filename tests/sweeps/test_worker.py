"""Workers: one process trains run after run, what becomes of one run costs no other, and each says how it ended."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sweep import planned_run
from isoflop.sweeps.execute import attempt, local, worker
from isoflop.sweeps.execute.attempt import Interrupt, train_one
from isoflop.sweeps.execute.local import LocalJob, LocalPool, Workers
from isoflop.sweeps.execute.worker import RunFailed, requeue_stopped
from isoflop.sweeps.runs import attempts
from isoflop.sweeps.runs import states as run_states
from isoflop.sweeps.runs.attempts import Policy, read
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.forms import JobShape
from isoflop.sweeps.runs.queue import Queue, Unit
from isoflop.sweeps.slurm import commands as slurm
from isoflop.sweeps.slurm import supervisor
from isoflop.sweeps.slurm.record import LaunchRecord, QueueJobs
from isoflop.train.config import CheckpointConfig, DataConfig, RunConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.files import write_json
from isoflop.train.job.environment import Ranks
from isoflop.train.loop import Diverged, Stopped, train
from isoflop.train.schedule import trunk_steps
from small_runs import FakeSlurm, forty_steps, is_over, own_signals, planned, release_unit, until

SUMMARY = {"val_loss": 1.0}
POLICY = Policy(retries=0)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A worker takes over the signals of its process."""
    with own_signals():
        yield


@pytest.fixture(scope="module")
def base(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    return forty_steps(small_corpus(512, ["tensor", "loss", "of", "the"]))


class Bench:
    """A sweep directory with runs, and what workers do with them."""

    def __init__(self, path: Path, base: RunConfig) -> None:
        self.sweep, self.base = SweepDirectory(path), base
        self.names: list[str] = []

    def run(self, seed: int, **changes: Any) -> RunDirectory:
        config = replace(self.base, seed=seed, **changes)
        run = self.sweep.run(run_id(config))
        run.freeze(config)
        run.set_state("planned")
        self.names.append(run.run_id)
        write_json(self.sweep.path / "plan.json", {"runs": [planned_run(name) for name in self.names]})
        return run

    def family(self, seed: int) -> tuple[RunDirectory, RunDirectory]:
        """A trunk of twice the D, and its branch."""
        trunk = replace(self.base, seed=seed, tokens=2 * self.base.tokens)
        begin = trunk_steps(replace(self.base, seed=seed))
        branch = self.run(seed, parent=run_id(trunk))
        return self.run(seed, tokens=trunk.tokens, checkpoint=CheckpointConfig(at_steps=[begin])), branch

    def queue(self, *runs: RunDirectory) -> Queue:
        named = [Unit((run.run_id,)) for run in runs]
        configs = {run.run_id: run.config() for run in runs}
        parents = {name: (config.parent, trunk_steps(config)) for name, config in configs.items() if config.parent}
        return Queue.create(self.sweep, self.sweep.path / "queue", named, parents)

    def work(
        self,
        *runs: RunDirectory,
        policy: Policy = POLICY,
        launcher: tuple[str, str] | None = None,
    ) -> Queue:
        queue = self.queue(*runs)
        worker.work(str(self.sweep.path), str(queue.folder), policy, 0, launcher)
        return queue


@pytest.fixture
def bench(tmp_path: Path, base: RunConfig) -> Bench:
    return Bench(tmp_path / "sweep", base)


def states(*runs: RunDirectory) -> list[str]:
    return [run.state().state for run in runs]


def reason(run: RunDirectory) -> str:
    return run.state().reason or ""


def log(run: RunDirectory) -> str:
    return (run.path / "log.txt").read_text()


def succeed(path: Path) -> None:
    (path / "summary.json").write_text(json.dumps(SUMMARY))


Trainer = Callable[..., Any]


@pytest.fixture
def train_alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trainer], None]:
    """Puts a function of config and directory in the place of `train`."""
    return lambda trainer: monkeypatch.setattr("isoflop.train.loop.train", trainer)


# Real trainings


def test_a_worker_trains_trunk_and_branch_as_if_each_were_alone(bench: Bench, tmp_path: Path) -> None:
    other, (trunk, branch) = bench.run(1), bench.family(3)
    queue = bench.work(other, trunk, branch)
    runs = [other, trunk, branch]
    assert states(*runs) == ["done"] * 3, [reason(run) for run in runs]
    assert (queue.left(), queue.running(), queue.lost()) == ([], {}, {})
    for run in runs:
        config = replace(run.config(), parent=None)
        alone = train(config, tmp_path / "alone" / run.run_id, report=lambda line: None)
        assert (run.summary() or {})["val_loss"] == alone["val_loss"]
        assert log(run).rstrip().endswith(" done")
        assert run.state().attempt == 1
    assert f"begins at step {trunk_steps(branch.config())} of run {trunk.run_id}" in log(branch)


# The loop of a worker


def test_what_ends_a_run_never_ends_the_worker(bench: Bench, train_alone: Callable[[Trainer], None]) -> None:
    runs = [bench.run(seed) for seed in range(6)]
    errors = [Diverged("the loss rose"), UserError("no such text"), OSError(errno.ENOSPC, "full"), ValueError("a\nb")]
    ends: dict[str, Exception] = dict(zip([run.run_id for run in runs], errors, strict=False))

    def trainer(config: RunConfig, directory: Path, **arguments: Any) -> None:
        if (error := ends.get(run_id(config))) is not None:
            raise error
        succeed(directory)

    train_alone(trainer)
    queue = bench.queue(*runs)
    runs[4].path.joinpath("config.yaml").write_text("[]")
    worker.work(str(bench.sweep.path), str(queue.folder), POLICY)
    assert states(*runs) == ["diverged", "failed", "failed", "failed", "failed", "done"]
    assert [reason(run) for run in runs[:2]] == ["the loss rose", "no such text"]
    assert reason(runs[2]) == f"the disk is full ({runs[2].path}); free some space and sweep again"
    assert reason(runs[3]) == "ValueError: a"
    assert "Traceback" in log(runs[3])
    assert "cannot be read as a run's config" in reason(runs[4])
    assert not (runs[3].path / ".reserve").exists()


def test_a_worker_that_is_told_to_stop_saves_and_takes_nothing_more(
    bench: Bench, train_alone: Callable[[Trainer], None]
) -> None:
    first, second = bench.run(1), bench.run(2)

    def trainer(config: RunConfig, directory: Path, should_stop: Callable[[], bool], **arguments: Any) -> None:
        assert not should_stop()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert should_stop()
        raise Stopped("stopped at step 3 of 9")

    train_alone(trainer)
    queue = bench.work(first, second)
    assert states(first, second) == ["preempted", "planned"]
    assert reason(first) == "signal SIGUSR2; stopped at step 3 of 9"
    assert [unit.runs for unit in queue.left()] == [(first.run_id,), (second.run_id,)]  # for whoever comes next
    assert queue.running() == {}


def test_a_worker_whose_launcher_is_gone_stops(bench: Bench, train_alone: Callable[[Trainer], None]) -> None:
    run = bench.run(1)

    def trainer(config: RunConfig, directory: Path, should_stop: Callable[[], bool], **arguments: Any) -> None:
        until(should_stop)
        raise Stopped("stopped at step 1 of 9")

    train_alone(trainer)
    bench.work(run, launcher=(str(bench.sweep.path), "token of a dead launcher"))
    assert states(run) == ["preempted"]
    assert reason(run).startswith("the launcher is gone; ")


def test_a_branch_of_a_trunk_that_failed_says_so(bench: Bench, train_alone: Callable[[Trainer], None]) -> None:
    def trainer(config: RunConfig, directory: Path, **arguments: Any) -> None:
        raise Diverged("the loss rose")

    train_alone(trainer)
    trunk, branch = bench.family(1)
    bench.work(trunk, branch)
    assert states(trunk, branch) == ["diverged", "failed"]
    assert f"of run {trunk.run_id}, which has no checkpoint there and is diverged (the loss rose)" in reason(branch)


# A queue in SLURM jobs


@pytest.fixture
def node(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Where the one rank of a worker's job runs."""
    rank = {"PROCID": "0", "NTASKS": "1", "LOCALID": "0", "NODEID": "0", "TASKS_PER_NODE": "1"}
    for name, value in {f"SLURM_{key}": value for key, value in rank.items()}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    return fake_slurm


def work_queue(bench: Bench, queue: Queue, policy: Policy = POLICY) -> None:
    worker.work(str(bench.sweep.path), str(queue.folder), policy)


def test_a_worker_that_slurm_stops_gives_its_unit_back_and_its_job_too(
    bench: Bench, node: FakeSlurm, train_alone: Callable[[Trainer], None]
) -> None:
    first, second = bench.run(1), bench.run(2)
    queue = bench.queue(first, second)

    def stopped(config: RunConfig, directory: Path, should_stop: Callable[[], bool], **arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert should_stop()
        raise Stopped("stopped at step 3 of 9")

    train_alone(stopped)
    with pytest.raises(SystemExit, match="1"):
        work_queue(bench, queue)
    assert (node.requeued, states(first, second)) == (["7"], ["preempted", "planned"])
    assert [unit.runs for unit in queue.left()] == [(first.run_id,), (second.run_id,)]
    node.start(1)
    train_alone(lambda config, directory, **arguments: succeed(directory))
    work_queue(bench, queue)
    assert (states(first, second), is_over(queue)) == (["done", "done"], True)
    assert node.requeued == ["7"]
    assert first.state().attempt == 2


def test_a_worker_whose_job_was_cancelled_leaves_its_run_to_the_others(
    bench: Bench, node: FakeSlurm, train_alone: Callable[[Trainer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = bench.run(1)
    queue = bench.queue(run)
    node.fate = "cancelled"
    train_alone(lambda config, directory, should_stop, **arguments: _stop(should_stop))
    with pytest.raises(SystemExit):
        work_queue(bench, queue)
    assert (node.requeued, states(run), len(queue.left())) == ([], ["preempted"], 1)
    assert "its job was cancelled in SLURM" in capsys.readouterr().out


def _stop(should_stop: Callable[[], bool]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert should_stop()
    raise Stopped("stopped at step 3 of 9")


def test_a_failed_run_is_tried_again_within_its_budget_of_retries(
    bench: Bench, node: FakeSlurm, train_alone: Callable[[Trainer], None]
) -> None:
    full, wrong, _ = runs = [bench.run(seed) for seed in range(3)]
    begun: list[str] = []

    def trainer(config: RunConfig, directory: Path, **arguments: Any) -> None:
        begun.append(directory.name)
        if directory == wrong.path:
            raise UserError("no such text")
        if directory == full.path or begun.count(directory.name) == 1:
            raise OSError(errno.ENOSPC, "full")
        succeed(directory)

    train_alone(trainer)
    queue = bench.queue(*runs)
    work_queue(bench, queue, Policy(retries=2, backoff_seconds=0.0))
    assert states(*runs) == ["failed", "failed", "done"]
    assert [begun.count(run.run_id) for run in runs] == [3, 1, 2]
    assert is_over(queue)


def test_runs_that_are_done_or_cancelled_are_not_trained(
    bench: Bench, node: FakeSlurm, train_alone: Callable[[Trainer], None]
) -> None:
    done, unwanted = bench.run(1), bench.run(2)
    succeed(done.path)
    done.set_state("done")
    unwanted.ask_cancel("a colleague")
    train_alone(lambda *arguments, **options: pytest.fail("trained"))
    queue = bench.queue(done, unwanted)
    work_queue(bench, queue)
    assert (states(done, unwanted), is_over(queue)) == (["done", "cancelled"], True)


def test_a_worker_on_a_node_that_is_to_be_avoided_leaves(
    bench: Bench, node: FakeSlurm, train_alone: Callable[[Trainer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench.run(1)
    queue = bench.queue(run)
    unit = queue.claim(0, "node1")
    assert unit is not None
    release_unit(queue, unit, avoid=["node1"])
    train_alone(lambda config, directory, **arguments: succeed(directory))
    work_queue(bench, queue)
    assert (states(run), queue.left()) == (["planned"], [unit])
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    work_queue(bench, queue)
    assert states(run) == ["done"]


def test_a_worker_close_to_its_time_limit_begins_nothing_more(
    bench: Bench, node: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
    for limit, margin in ((30, 18.0), (600, 180.0)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(1000 + limit))
        # 15 or 120 s before the end it is told to stop, and what is left until then should be worth a start.
        assert worker.last_start(os.environ) - time.monotonic() == pytest.approx(limit - margin, abs=1.0)
    assert worker.last_start({}) == math.inf
    run = bench.run(1)
    queue = bench.queue(run)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")
    with pytest.raises(SystemExit):
        work_queue(bench, queue)
    assert (states(run), node.requeued) == (["planned"], ["7"])


# Runs that were lost


def slurm_says(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], tuple[str, str | None] | None]
) -> list[set[str]]:  # fmt: skip
    """Puts an answer in the place of SLURM's; returns what it is asked."""
    asked = list[set[str]]()

    def outcomes(jobs: Iterable[str]) -> dict[str, tuple[str, str | None]]:
        if named := set(jobs):
            asked.append(named)
        return {job: said for job in named if (said := answer(job)) is not None}

    monkeypatch.setattr(slurm, "outcomes", outcomes)
    return asked


@pytest.mark.parametrize(
    ("outcome", "cause", "state"),
    [
        ("NODE_FAIL", "node", "failed"),
        ("FAILED", "killed", "failed"),
        ("OUT_OF_MEMORY", "memory", "failed"),
        ("TIMEOUT", "time_limit", "preempted"),
        ("CANCELLED", "cancelled", "cancelled"),
        (None, "lost", "failed"),
    ],
)
def test_a_run_whose_job_is_gone_is_settled_as_slurm_explains_it(
    outcome: str | None, cause: str, state: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = slurm_says(monkeypatch, lambda job: outcome and (outcome, "node3"))
    gone, alive, waiting, never = [bench.run(seed) for seed in range(4)]
    for run, job in ((gone, "7_1"), (alive, "7_2")):
        attempts.begin(run, job, "node1")
        run.set_state("running", attempt=1, job_id=job, host="node1")
    waiting.set_state("queued", job_id="7_3")
    never.set_state("queued", job_id="7_4")
    (bench.sweep.path / "jobs" / "slurm-1").mkdir(parents=True)
    (bench.sweep.path / "jobs" / "slurm-1" / "7_1_0_log.out").touch()
    settled = supervisor.settle_lost(bench.sweep, POLICY, {"7_2", "7_3"})
    assert sorted(settled) == sorted([gone.run_id, never.run_id])
    assert states(gone, alive, waiting, never) == [state, "running", "queued", state]
    assert asked == [{"7_1", "7_4"}], "all at once"
    lines = [attempts.read(run)[-1] for run in (gone, never)]
    assert [(line.cause, line.host, line.job_id) for line in lines] == [
        (cause, "node1", "7_1"),
        (cause, outcome and "node3", "7_4"),
    ]
    assert "it left no log in" in reason(never)
    assert "it left no log in" not in reason(gone)
    assert supervisor.settle_lost(bench.sweep, POLICY, {"7_2", "7_3"}) == []


def test_a_run_that_gives_signs_of_life_is_not_lost(bench: Bench) -> None:
    run = bench.run(1)
    attempts.begin(run, "7", "node1")
    run.set_state("running", attempt=1, job_id="7")
    run.give_sign()
    assert supervisor.settle_lost(bench.sweep, POLICY, set()) == []
    assert supervisor.settle_lost(bench.sweep, POLICY, None) == []
    os.utime(run.path / "heartbeat", (0, 0))
    assert supervisor.settle_lost(bench.sweep, POLICY, None) == [run.run_id]
    assert attempts.read(run)[-1].cause == "lost"


def submitted(bench: Bench, runs: Sequence[RunDirectory], workers: list[str]) -> Queue:
    """A queue of runs whose workers are these jobs."""
    units = [Unit((run.run_id,)) for run in runs]
    queue = Queue.create(bench.sweep, bench.sweep.path / "jobs" / "queue-1", units, {})
    LaunchRecord(queues={"queue-1": QueueJobs(JobShape(1, 1, 2.0, 60), workers)}).write(bench.sweep)
    for run in runs:
        run.set_state("queued")
    return queue


def test_runs_in_a_queue_whose_workers_die_at_once_use_up_a_budget(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, policy = [bench.run(1), bench.run(2)], Policy(retries=2, backoff_seconds=0.0)
    queue = submitted(bench, runs, ["7_0", "7_1"])
    said = {"7_0": ("FAILED", "node3"), "7_1": ("PENDING", None)}
    slurm_says(monkeypatch, said.get)
    assert supervisor.settle_lost(bench.sweep, policy, None) == [], "nobody knows"
    assert supervisor.settle_lost(bench.sweep, policy, {"7_1"}) == [], "one is alive"
    assert supervisor.settle_lost(bench.sweep, policy, set()) == [], "it was submitted while somebody looked"
    said["7_1"] = ("FAILED", "node3")
    for starts in (1, 2, 3):
        assert attempts.decision(runs[0], policy, 0.0).again
        queue = submitted(bench, runs, ["7_0", "7_1"])  # as a keeper does
        assert supervisor.settle_lost(bench.sweep, policy, set()) == [run.run_id for run in runs]
        assert [(one.cause, one.host) for one in attempts.read(runs[0])] == [("killed", "node3")] * starts
        assert supervisor.settle_lost(bench.sweep, policy, set()) == []
    assert not attempts.decision(runs[0], policy, 0.0).again
    assert "SLURM calls the job FAILED; it left no log" in reason(runs[1])
    for run in runs:
        run_states.retry_by_hand(run)
    queue = submitted(bench, runs, ["7_0"])
    assert queue.claim(0) is not None
    assert supervisor.settle_lost(bench.sweep, policy, set()) == [], "what its worker has is his affair"
    assert states(*runs) == ["queued", "queued"], "it came as far as to begin one"


def test_a_worker_cancelled_before_its_first_claim_cancels_no_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench.run(1)
    submitted(bench, [run], ["7_0"])
    slurm_says(monkeypatch, lambda job: ("CANCELLED", None))
    assert supervisor.settle_lost(bench.sweep, POLICY, set()) == [run.run_id]
    assert (states(run), attempts.read(run)[-1].cause) == (["preempted"], "preempted")


@pytest.mark.parametrize("outcome", supervisor.NOT_ENDED)
def test_a_run_that_waits_for_a_job_which_has_not_ended_is_not_lost(
    outcome: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench.run(1)
    run.set_state("queued", job_id="95_0")
    slurm_says(monkeypatch, lambda job: (outcome, None))
    assert supervisor.settle_lost(bench.sweep, POLICY, set()) == []
    assert (states(run), attempts.read(run)) == (["queued"], [])


def test_the_unit_of_a_worker_that_died_is_settled_by_whoever_looks_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, node: FakeSlurm
) -> None:
    run, bystander = bench.run(1), bench.run(2)
    dead = submitted(bench, [run, bystander], ["7"])
    dead.claim(0, "node1")
    attempts.begin(run, "7", "node1")
    run.set_state("running", attempt=1, job_id="7")
    dead.close()
    asked = slurm_says(monkeypatch, lambda job: ("NODE_FAIL", None))
    policy = Policy(backoff_seconds=50.0)
    assert supervisor.settle_lost(bench.sweep, policy, set()) == [run.run_id]
    assert asked == [{"7"}]
    (queue,) = Queue.all_of(bench.sweep)
    assert queue.avoided() == ("node1",)
    assert queue.claim(0, "node2") == queue.units[1], "the other one waits"
    assert [unit.runs for unit in queue.left()] == [(run.run_id,)]
    assert states(run) == ["queued"]
    assert "to be tried again: retry 1 of 3 after node" in reason(run)


# Runs that are stopped


PATIENT = Policy()  # which tries again


@pytest.fixture
def make(tmp_path: Path, base: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], RunDirectory]:
    """Plans a run, of which a worker asks at every step whether it is cancelled."""
    monkeypatch.setattr(attempt, "ASK_SECONDS", -1.0)

    def make(seed: int) -> RunDirectory:
        return planned(tmp_path, replace(base, seed=seed))

    return make


def ends(run: RunDirectory) -> list[str]:
    return [end.cause for end in attempts.read(run)]


def test_a_run_that_somebody_cancels_saves_and_ends_and_is_not_begun_again(
    make: Callable[[int], RunDirectory], train_alone: Callable[[Trainer], None]
) -> None:
    run, other = make(1), make(2)
    interrupt = Interrupt()

    def ask(config: RunConfig, directory: Path, should_stop: Callable[[], bool], **arguments: Any) -> None:
        assert not should_stop()
        other.ask_cancel("somebody else's run")
        assert not should_stop()
        run.ask_cancel("ann on login1")
        assert should_stop()
        raise Stopped("stopped at step 3 of 40")

    train_alone(ask)
    train_one(run, Ranks(), interrupt, "7", PATIENT)
    assert (run.state().state, ends(run)) == ("cancelled", ["cancelled"])
    assert reason(run) == "cancelled by ann on login1; stopped at step 3 of 40"
    assert not interrupt()  # whoever trained it goes on with others
    train_one(run, Ranks(), interrupt, "8", PATIENT)
    assert (ends(run), reason(run)) == (["cancelled"], "cancelled by ann on login1 before it began")
    run_states.retry_by_hand(run)
    train_alone(
        lambda config, directory, should_stop, **rest: should_stop() or (directory / "summary.json").write_text("{}")
    )
    train_one(run, Ranks(), interrupt, "9", PATIENT)
    assert ends(run) == ["cancelled", "done"]


@pytest.mark.parametrize(("seconds", "cause"), [(None, "preempted"), (60, "time_limit"), (86400, "preempted")])
def test_a_signal_near_the_end_of_the_job_is_its_time_limit(
    seconds: int | None, cause: str, make: Callable[[int], RunDirectory], train_alone: Callable[[Trainer], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if seconds is not None:
        monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(1000 + seconds))
    run, interrupt = make(1), Interrupt()
    interrupt._began -= 30.0  # so long ago it began

    def stop(config: RunConfig, directory: Path, should_stop: Callable[[], bool], **arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert should_stop()
        raise Stopped("stopped at step 3 of 40")

    train_alone(stop)
    train_one(run, Ranks(), interrupt, "7", PATIENT)
    assert run.state().state == "preempted"
    assert ends(run) == [cause]


# Back to the queue


def stopped(run: RunDirectory, times: int = 1) -> RunDirectory:
    for _ in range(times):
        with run_states.held(run, "7", PATIENT):
            run_states.conclude(run, "preempted", "signal SIGUSR2")
    return run


def test_a_job_that_slurm_refuses_to_requeue_leaves_its_runs_preempted(
    make: Callable[[int], RunDirectory], fake_slurm: FakeSlurm
) -> None:
    run = stopped(make(1))
    fake_slurm.refusal = "Unable to contact slurm controller"
    with pytest.raises(RunFailed, match="SLURM would not requeue its job"):
        requeue_stopped(run, PATIENT)
    assert run.state().state == "preempted"
    assert "signal SIGUSR2; SLURM would not requeue its job (Unable to contact" in (run.state().reason or "")
    assert ends(run) == ["preempted"]


def test_requeues_are_counted_since_the_last_retry_by_hand(
    make: Callable[[int], RunDirectory], fake_slurm: FakeSlurm
) -> None:
    policy = Policy(max_requeues=2)
    often, seldom = stopped(make(1), 3), stopped(make(2), 2)
    with pytest.raises(RunFailed, match="had to stop again after 2 requeues"):
        requeue_stopped(often, policy)
    with pytest.raises(SystemExit, match="1"):
        requeue_stopped(seldom, policy)
    assert fake_slurm.requeued == ["7"]
    assert [run.state().state for run in (often, seldom)] == ["failed", "preempted"]
    assert "2 requeues, all that cluster.max_requeues allows; signal SIGUSR2" in (often.state().reason or "")
    with pytest.raises(RunFailed, match="had to stop again after 2 requeues"):
        requeue_stopped(stopped(seldom), policy)
    assert fake_slurm.requeued == ["7"]
    run_states.retry_by_hand(often)
    with pytest.raises(SystemExit):
        requeue_stopped(stopped(often), policy)
    assert len(fake_slurm.requeued) == 2


@pytest.mark.parametrize(
    ("fate", "state", "cause"),
    [
        ("cancelled", "cancelled", "cancelled"),
        ("timeout", "preempted", "time_limit"),
        ("requeued", "preempted", "preempted"),  # by SLURM itself, so it is not requeued again
    ],
)
def test_what_slurm_says_of_the_job_corrects_the_line(
    fate: str, state: str, cause: str, make: Callable[[int], RunDirectory], fake_slurm: FakeSlurm
) -> None:
    run = stopped(make(1))
    fake_slurm.fate = fate
    with pytest.raises(RunFailed if fate == "cancelled" else SystemExit):
        requeue_stopped(run, PATIENT)
    assert (run.state().state, ends(run)) == (state, [cause])
    assert "signal SIGUSR2" in (run.state().reason or "")
    assert fake_slurm.requeued == (["7"] if fate == "timeout" else [])


def test_a_run_that_another_job_has_begun_meanwhile_is_left_alone(
    make: Callable[[int], RunDirectory], fake_slurm: FakeSlurm
) -> None:
    run = stopped(make(1))
    fake_slurm.fate = "cancelled"
    other = RunDirectory(run.path)
    with run_states.held(other, "8", PATIENT), pytest.raises(RunFailed):
        requeue_stopped(run, PATIENT)
    assert run.state().state == "running"
    assert json.loads((run.path / attempts.LINES).read_text())["cause"] == "preempted"


# Workers on this machine


FORK = multiprocessing.get_context("fork")


def work(workers: Workers, freezes: bool) -> None:
    """Freezes in the middle of the first run, or where there is nothing left to train."""
    queue = Queue.open(workers.sweep, workers.queue.folder)
    while (unit := queue.claim(0)) is not None:
        run = workers.sweep.run(unit.runs[0])
        with run_states.held(run, "7", workers.policy):
            if freezes:
                os.kill(os.getpid(), signal.SIGSTOP)
            (run.path / "summary.json").write_text("{}")
            run_states.conclude(run, "done")
        queue.settle(unit, workers.policy, run_states.KILLED)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_frozen_worker_counts_as_hung_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = SweepDirectory(tmp_path / "sweep")
    runs = [planned(sweep.path, replace(forty_steps(DataConfig()), seed=seed)) for seed in (0, 1)]
    policy = Policy(backoff_seconds=0.0)
    units = [Unit((run.run_id,)) for run in runs]
    workers = Workers(sweep, Queue.create(sweep, sweep.path / "jobs", units, {}), policy)
    started: list[object] = []

    def start(pool: LocalPool, job: LocalJob, place: int) -> LocalJob:
        process = FORK.Process(target=work, args=(workers, not started))
        process.start()
        started.append(process)
        job.handle = SimpleNamespace(_process=SimpleNamespace(pid=process.pid, poll=lambda: process.exitcode))
        return job

    monkeypatch.setattr(LocalPool, "_start", start)
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.1)
    LocalPool(tmp_path, places=1, threads=1, hang_seconds=1.0).run(workers, lambda: None)
    assert len(started) == 2
    histories = [[(attempt.cause, attempt.attempt) for attempt in read(run)] for run in runs]
    assert histories == [[("hung", 1), ("done", 2)], [("done", 1)]]
    assert "no sign of life for 1 s" in (read(runs[0])[0].reason or "")
    assert {run.state().state for run in runs} == {"done"}
