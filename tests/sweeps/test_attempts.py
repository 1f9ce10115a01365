"""Attempts: each start of a run is one line, whatever ended it and whoever writes it, and the steps add up."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from isoflop.sweeps.execute.attempt import TrunkNotYet, failed
from isoflop.sweeps.runs import attempts, liveness, states
from isoflop.sweeps.runs import attempts as retries
from isoflop.sweeps.runs.attempts import (
    CAUSES,
    INTERRUPTED,
    ON_NODE,
    RETRIED,
    Attempt,
    Policy,
    decide,
    is_stale,
    sign_age,
)
from isoflop.sweeps.runs.directory import Busy, RunDirectory, SweepDirectory, now_on
from isoflop.sweeps.runs.liveness import Heartbeat
from isoflop.train.config import ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig, run_id
from isoflop.train.errors import OutOfMemory, UserError
from isoflop.train.flops import flops_exact, training_flops_per_token
from isoflop.train.job.failure import Cause, Failure, RankError, note_failure, read_failure
from isoflop.train.schedule import trunk_steps
from small_runs import planned, until

FORK = multiprocessing.get_context("fork")
POLICY = Policy(heartbeat_seconds=0.05, hang_seconds=60.0)


def a_config(seed: int = 0, **changes: object) -> RunConfig:
    """A run of 100 steps."""
    run = RunConfig(
        model=ModelConfig(vocab_size=256), optimizer=OptimizerConfig(batch_size=4), seed=seed,
        schedule=ScheduleConfig(warmup_tokens=1024), parallel=ParallelConfig(device="cpu"),
    )  # fmt: skip
    run = replace(run, tokens=100 * run.batch_tokens, **changes)
    assert run.steps == 100
    return run


def a_run(folder: Path, config: RunConfig | None = None) -> RunDirectory:
    config = config or a_config()
    return planned(folder, config)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return a_run(tmp_path)


def save(run: RunDirectory, step: int) -> Path:
    """What looks like a checkpoint."""
    folder = run.path / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"12345")
    (folder / "manifest.json").write_text(json.dumps({"model.safetensors": {"bytes": 5, "sha256": ""}}))
    return folder


def log_step(run: RunDirectory, step: int) -> None:
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")


def lines(run: RunDirectory) -> list[str]:
    path = run.path / attempts.LINES
    return path.read_text().splitlines() if path.exists() else []


def only(run: RunDirectory) -> Attempt:
    (found,) = attempts.read(run)
    assert len(lines(run)) == 1
    return found


def per_step(config: RunConfig) -> float:
    return training_flops_per_token(config.model, config.data.sequence_length) * config.batch_tokens


# A line of each end


def test_a_run_that_is_done_has_one_line_with_all_its_steps(run: RunDirectory) -> None:
    with states.held(run, "7", POLICY) as begun:
        assert begun
        assert (run.state().state, run.state().attempt, run.state().since) == (
            "running", 1, attempts.under_way(run).began,  # type: ignore[union-attr]
        )  # fmt: skip
        assert run.last_sign() is not None
        assert lines(run) == []
        save(run, 100)
        (run.path / "summary.json").write_text("{}")
        states.conclude(run, "done", None)
    end = only(run)
    assert (end.attempt, end.cause, end.reason, end.job_id, end.host) == (1, "done", None, "7", run.state().host)
    assert (end.first_step, end.last_step, end.saved_step, end.gpus, end.share) == (0, 100, 100, 0, 1)
    assert end.flops == pytest.approx(flops_exact(a_config()), rel=1e-12)  # a product in another order
    assert end.flops_wasted == 0
    assert end.seconds == end.ended - end.began >= 0
    assert run.last_sign() is None
    assert not (run.path / attempts.UNDER_WAY).exists()
    with states.held(run, "8", POLICY) as begun:
        assert not begun
    assert only(run) == end


def test_steps_after_the_newest_checkpoint_are_wasted(run: RunDirectory) -> None:
    step = per_step(a_config())
    with states.held(run, "7", POLICY):
        save(run, 20)
        log_step(run, 37)
        states.conclude(run, "failed", "KeyError: 'x'")
    first = only(run)
    assert (first.cause, first.first_step, first.saved_step, first.last_step) == ("error", 0, 20, 37)
    assert (first.flops, first.flops_wasted) == pytest.approx((37 * step, 17 * step), rel=1e-12)
    with states.held(run, "8", POLICY):
        states.conclude(run, "failed", "KeyError: 'x'")  # before it wrote anything: the 37 are not its own
    second = attempts.read(run)[1]
    assert (second.attempt, second.first_step, second.last_step, second.flops) == (2, 20, 20, 0)
    with states.held(run, "9", POLICY):
        log_step(run, 30)
        save(run, 40)
        states.conclude(run, "preempted", "signal SIGUSR2; stopped at step 40 of 100", "time_limit")
    third = attempts.read(run)[2]
    assert (third.first_step, third.last_step, third.flops_wasted) == (20, 40, 0)


def test_a_branch_counts_its_own_steps_only(tmp_path: Path) -> None:
    trunk = replace(a_config(), tokens=2 * a_config().tokens)
    config = replace(a_config(), parent=run_id(trunk))
    run, begins = a_run(tmp_path, config), trunk_steps(config)
    assert 0 < begins < 100
    with states.held(run, "7", POLICY):
        save(run, begins)  # as `graft` does
        log_step(run, begins)  # of the trunk
        states.conclude(run, "failed", "no luck")
    end = only(run)
    assert (end.first_step, end.last_step, end.saved_step, end.flops) == (begins, begins, begins, 0)


def test_a_checkpoint_whose_files_have_not_their_sizes_is_none(run: RunDirectory) -> None:
    assert attempts.newest_checkpoint(run) is None
    save(run, 9), save(run, 10)
    torn, half = save(run, 100), save(run, 50)
    (torn / "model.safetensors").write_bytes(b"123")
    (half / "manifest.json").unlink()
    (run.path / "checkpoints" / ".step_200.x").mkdir()
    (run.path / "checkpoints" / "step_x").mkdir()
    assert attempts.newest_checkpoint(run) == 10
    (run.path / "checkpoints" / "step_10" / "manifest.json").write_text('{"model.safetensors": 3}')
    assert attempts.newest_checkpoint(run) == 9


# Who is killed is settled by who comes next


def die(run: RunDirectory) -> None:
    with states.held(run, "7", POLICY):
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_attempt_that_was_killed_has_its_line_from_the_next_start(run: RunDirectory) -> None:
    dead = FORK.Process(target=die, args=(run,))
    dead.start()
    dead.join()
    assert dead.exitcode == -signal.SIGKILL
    sign = run.last_sign()
    assert sign is not None
    assert (run.state().state, lines(run)) == ("running", [])
    save(run, 5), log_step(run, 8)
    note_failure(run.path, Failure(Cause.HUNG, "rank 1 on node3 has made no progress since step 8"))
    with states.held(run, "8", POLICY):
        first = only(run)
        assert read_failure(run.path) is None  # what it says of another attempt is forgotten
        assert run.state().attempt == 2
        states.conclude(run, "failed", "again")
    # The first sign is given just before the attempt begins: the file system's clock may have moved on in between.
    ended = max(first.began, sign)
    assert (first.attempt, first.cause, first.job_id, first.ended) == (1, "hung", "7", ended)
    assert (first.last_step, first.saved_step) == (8, 5)
    assert "rank 1 on node3 has made no progress" in (first.reason or "")
    assert [each.attempt for each in attempts.read(run)] == [1, 2]


def begin(run: RunDirectory, state: str = "running") -> None:
    begun = attempts.begin(run, "7", "node1")
    run.set_state(state, attempt=begun.attempt, host="node1", job_id="7")


def test_a_run_is_settled_once_by_however_many(run: RunDirectory) -> None:
    begin(run)
    said = [states.settle_killed(run, "lost", "its job is gone") for _ in range(3)]
    assert said == [True, False, False]
    assert (only(run).cause, run.state().state, run.state().reason) == ("lost", "failed", "its job is gone")


def settle_all(runs: list[RunDirectory], said: Connection) -> None:
    found = []
    for run in runs:
        with run.lock():
            found.append(states.settle_killed(run, "killed", "gone"))
    said.send(found)


def test_two_processes_that_settle_at_once_write_one_line_a_run(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, a_config(seed)) for seed in range(30)]
    for run in runs:
        begin(run)
    answers = []
    for _ in range(2):
        here, there = FORK.Pipe()
        FORK.Process(target=settle_all, args=(runs, there)).start()
        answers.append(here)
    one, two = (answer.recv() for answer in answers)
    assert [found + other for found, other in zip(one, two, strict=True)] == [1] * 30
    assert [only(run).cause for run in runs] == ["killed"] * 30


@pytest.mark.parametrize("damage", ["", '{"state": "run', "\0\0\0\0"])
def test_a_damaged_state_loses_no_attempt_and_repeats_no_number(run: RunDirectory, damage: str) -> None:
    for _ in range(2):
        begin(run)
        states.settle_killed(run, "killed", "gone")
    begin(run)
    (run.path / "state.json").write_text(damage)
    assert states.settle_killed(run, "killed", "gone")
    assert run.state().attempt == 3
    (run.path / "state.json").write_text(damage)
    begin(run)
    assert run.state().attempt == 4
    states.settle_killed(run, "killed", "gone")
    assert [each.attempt for each in attempts.read(run)] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", [None, "", '{"attempt": 2'])
def test_a_damaged_mark_of_the_attempt_under_way_loses_no_attempt(run: RunDirectory, damage: str | None) -> None:
    begin(run)
    states.settle_killed(run, "killed", "gone")
    begin(run)
    save(run, 30)
    path = run.path / attempts.UNDER_WAY
    path.unlink() if damage is None else path.write_text(damage)
    assert states.settle_killed(run, "node", "its node failed")
    first, second = attempts.read(run)
    assert (second.attempt, second.cause, second.host, second.job_id) == (2, "node", "node1", "7")
    assert second.began > first.began


def test_a_kill_between_line_and_state_is_finished_as_the_line_says(run: RunDirectory) -> None:
    ends = {"preempted": "preempted", "time_limit": "preempted", "diverged": "diverged", "disk": "failed"}
    for number, (cause, state) in enumerate(ends.items(), 1):
        begin(run)
        attempts.note(run, cause, f"because {cause}")
        assert run.state().state == "running"
        assert states.settle_killed(run, "killed", "gone") == (state == "failed")
        assert (run.state().state, run.state().reason) == (state, f"because {cause}")
        assert len(lines(run)) == number


def test_a_job_that_slurm_starts_anew_has_lost_its_node(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(run)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    with states.held(run, "7", POLICY):
        pass
    assert (only(run).cause, only(run).host, run.state().host) == ("node", "node1", "node2")


@pytest.mark.parametrize("cause", ["node", "preempted"])
def test_a_job_that_slurm_starts_anew_for_ever_ends_with_the_budget(
    cause: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = replace(POLICY, retries=2, max_requeues=2)
    started = list[bool]()
    for restarts in range(4):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        with states.held(run, "7", policy) as begun:
            started.append(begun)
            if begun and cause == "preempted":
                states.conclude(run, "preempted", "signal SIGUSR2")
    assert started == [True, True, True, False]
    assert [each.cause for each in attempts.read(run)] == [cause] * 3
    assert (run.state().state, "2 re" in str(run.state().reason)) == ("failed", True)
    with states.held(run, "8", policy) as begun:
        assert begun, "another job was submitted on purpose"
        states.conclude(run, "failed", "no luck", cause)
    states.retry_by_hand(run)
    with states.held(run, "7", policy) as begun:
        assert begun


# A full disk


class Full:
    """A file of lines on a disk that has room for half a line."""

    def __init__(self, path: Path) -> None:
        with path.open("a") as file:
            file.write('{"attempt": 1, "beg')

    def write(self, record: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("state", "cause"), [("done", "done"), ("preempted", "preempted"), ("failed", "disk")])
def test_a_line_that_had_no_room_is_written_by_who_settles_next(run: RunDirectory, state: str, cause: str) -> None:
    with pytest.MonkeyPatch.context() as patch, states.held(run, "7", POLICY):
        patch.setattr(attempts, "JsonLines", Full)
        if state == "done":
            (run.path / "summary.json").write_text("{}")
        states.conclude(run, state, "so it was", cause)
    assert (run.state().state, attempts.read(run)) == (state, [])
    ended = run.state().since
    with states.held(run, "8", POLICY) as begun:
        assert begun == (state != "done")
    end = attempts.read(run)[0]
    assert (end.attempt, end.cause, end.reason, end.ended) == (1, cause, "so it was", ended)
    assert len(lines(run)) == 1


def test_a_disk_too_full_to_begin_is_an_attempt_that_ended_for_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(state: str, **changes: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "set_state", full)
    with pytest.raises(OSError, match="No space left"), states.held(run, "7", POLICY):
        pytest.fail("it began")
    assert only(run).cause == "disk"
    assert run.last_sign() is None


# What is read


def test_lines_that_are_torn_damaged_or_twice_there_are_left_out(run: RunDirectory) -> None:
    for _ in range(3):
        begin(run)
        states.settle_killed(run, "killed", "gone")
    whole, path = attempts.read(run), run.path / attempts.LINES
    one, two, three = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(one + b"\xff\xfe\n[1]\n{}\n3\n" + two.replace(b'"killed"', b'"vanished"') + two + one + three[:40])
    assert attempts.read(run) == whole[:2]
    begin(run)
    states.settle_killed(run, "lost", "gone")  # is not glued to what was torn
    assert [(each.attempt, each.cause) for each in attempts.read(run)] == [(1, "killed"), (2, "killed"), (4, "lost")]


# By hand


def test_a_retry_by_hand_is_a_new_budget_and_a_clean_slate(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "this_user", lambda: "bob on login2")
    sweep = SweepDirectory(tmp_path)
    for _ in range(3):
        begin(run)
        states.settle_killed(run, "killed", "gone")
    assert attempts.retries_spent(sweep) == 2  # the third has not been tried again
    run.ask_cancel("ann on login1")
    note_failure(run.path, Failure(Cause.KILLED, "gone"))
    states.retry_by_hand(run)
    assert json.loads(lines(run)[-1])["by"] == "bob on login2"
    assert (run.state().state, run.state().job_id) == ("planned", None)
    assert (read_failure(run.path), run.cancel_asked()) == (None, None)
    assert [each.budget for each in attempts.read(run)] == [0, 0, 0]
    assert (attempts.current(run), attempts.retries_spent(sweep)) == ([], 0)
    assert attempts.decision(run, POLICY, 0.0).why == "it has not begun"
    begin(run)
    states.retry_by_hand(run)  # settles what was killed before it
    begin(run)
    states.settle_killed(run, "disk", "full")
    assert [(each.attempt, each.budget) for each in attempts.read(run)] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2)]
    assert attempts.retries_spent(sweep) == 0
    begin(run)
    states.settle_killed(run, "disk", "full")
    assert attempts.retries_spent(sweep) == 1


def test_a_retry_by_hand_leaves_what_is_done_and_what_is_trained(run: RunDirectory) -> None:
    other = RunDirectory(run.path)  # a lock of its own keeps out this process too
    with other.lock(), pytest.raises(Busy):
        states.retry_by_hand(run)
    (run.path / "summary.json").write_text("{}")
    run.set_state("done")
    states.retry_by_hand(run)
    assert run.is_done()
    assert lines(run) == []


# Causes


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (UserError("no such text"), "input"), (OSError(errno.ENOSPC, "full"), "disk"),
        (OSError(errno.EDQUOT, "quota"), "disk"), (OSError(errno.EIO, "broken"), "error"), (ValueError("x"), "error"),
        (RuntimeError("can't allocate memory"), "memory"), (OutOfMemory("at step 3", goes_on=True), "memory"),
        (OutOfMemory("at step 3"), "error"),
        (TrunkNotYet("it has no checkpoint there"), "trunk"),
        *((RankError(Failure(cause, "rank 1 on a: it says why")), str(cause)) for cause in Cause),
    ],
)  # fmt: skip
def test_an_error_has_a_cause(error: Exception, cause: str, run: RunDirectory) -> None:
    assert failed(error, run).cause == cause
    assert cause in CAUSES


def test_what_a_rank_noted_says_which_nodes_are_at_fault(run: RunDirectory) -> None:
    begin(run)
    note_failure(run.path, Failure(Cause.HUNG, "two ranks hang", hosts=("node07", "gpu-8.local")))
    with run.lock():
        states.settle(run, states.KILLED)
    assert (only(run).cause, only(run).host, only(run).at_fault) == ("hung", "node1", ("node07", "gpu-8.local"))
    assert attempts.decision(run, POLICY, 0.0).avoid == ("node07", "gpu-8.local")


# Whether a run is tried again


def an_attempt(number: int, cause: str, host: str | None = "node1", ended: float = 0.0, budget: int = 0) -> Attempt:
    return Attempt(
        attempt=number, began=ended - 60, ended=ended, seconds=60.0, host=host, job_id="7", cause=cause, reason=None,
        first_step=0, last_step=0, saved_step=0, flops=0.0, flops_wasted=0.0, budget=budget,
    )  # fmt: skip


def history(*causes: str) -> list[Attempt]:
    return [an_attempt(number, cause) for number, cause in enumerate(causes, 1)]


def random_history(draw: random.Random, causes: tuple[str, ...] = CAUSES) -> list[Attempt]:
    budgets = sorted(draw.choices(range(3), k=draw.randint(1, 12)))
    return [
        an_attempt(number, draw.choice(causes), draw.choice(["node1", "node2", "node3", None]), 100.0 * number, budget)
        for number, budget in enumerate(budgets, 1)
    ]


def test_a_run_that_has_not_begun_begins() -> None:
    assert decide([], Policy(), 0, 0.0) == retries.Decision(True, 0.0, (), "it has not begun")


def test_all_runs_together_have_as_many_retries_as_the_sweeps_budget_says() -> None:
    policy = Policy(sweep_retries=2)
    said = [decide(history("killed"), policy, spent, 0.0) for spent in range(4)]
    assert [decision.again for decision in said] == [True, True, False, False]
    assert "cluster.sweep_retries" in said[2].why
    assert decide(history("preempted"), policy, 99, 0.0).again  # no retry


def test_the_pause_doubles_and_counts_from_the_end_of_the_last_attempt() -> None:
    policy = Policy(backoff_seconds=30.0, retries=99)
    pauses = [decide(history(*["killed"] * n), policy, 0, now=0.0).wait_seconds for n in range(1, 10)]
    assert pauses[:4] == [30, 60, 120, 240]
    assert pauses[-1] == retries.LONGEST_WAIT
    assert [decide(history("lost", "disk"), policy, 0, now).wait_seconds for now in (20.0, 60.0, 1e9)] == [40, 0, 0]
    # A sign of life may be newer than what another server says of now: no pause grows by that.
    assert decide(history("killed"), policy, 0, now=-1e6).wait_seconds == 30
    assert decide(history(*["killed"] * 5000), Policy(retries=10**6), 0, 0.0).wait_seconds == retries.LONGEST_WAIT


def test_the_nodes_of_the_ranks_at_fault_are_avoided() -> None:
    attempt = replace(an_attempt(1, "hung", "node1"), at_fault=("node07", "gpu-8.local"))
    assert decide([attempt], Policy(), 0, 0.0).avoid == ("node07", "gpu-8.local")


def test_random_histories_keep_to_every_rule() -> None:
    draw = random.Random(1)
    again = 0
    for _ in range(2000):
        attempts = random_history(draw)
        policy = Policy(*(draw.randint(0, 4) for _ in range(3)), draw.choice([0.0, 1.0, 30.0]))
        spent, now = draw.randint(0, 4), attempts[-1].ended + draw.uniform(0, 500)
        decision = decide(attempts, policy, spent, now)
        last = attempts[-1]
        ours = [attempt.cause for attempt in attempts if attempt.budget == last.budget]
        failed, stopped = sum(c in RETRIED for c in ours), sum(c in INTERRUPTED for c in ours)
        allowed = (
            (last.cause in RETRIED and failed <= policy.retries and spent < policy.sweep_retries)
            or (last.cause in INTERRUPTED and stopped <= policy.max_requeues)
            or (last.cause == "memory" and ours.count("memory") == 1)
        )
        assert decision.again == allowed
        again += allowed
        assert 0 <= decision.wait_seconds <= policy.backoff_seconds * 2 ** max(0, failed - 1)
        if not (decision.again and last.cause in RETRIED):
            assert decision.wait_seconds == 0
        elif decision.wait_seconds > 0:  # one who waits so long is not told to wait again
            assert decide(attempts, policy, spent, now + decision.wait_seconds).wait_seconds == 0
        assert len(set(decision.avoid)) == len(decision.avoid)
        at_fault = [a.host for a in attempts if a.budget == last.budget and a.cause in ON_NODE and a.host]
        assert set(decision.avoid) == set(at_fault)
        assert not at_fault or decision.avoid[-1] == at_fault[-1]
    assert 300 < again < 1700  # both answers are tried


# Signs of life


@pytest.fixture(autouse=True)
def small_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MARGIN_SECONDS", 0.3)


def test_a_run_gives_signs_of_life_while_it_trains_and_none_afterwards(run: RunDirectory) -> None:
    assert sign_age(run) is None
    assert is_stale(run, POLICY)
    with states.held(run, "7", POLICY), Heartbeat([run], POLICY):
        first = run.last_sign()
        assert first is not None
        until(lambda: (run.last_sign() or 0) > first)
        assert not is_stale(run, POLICY)
    assert sign_age(run) is None
    time.sleep(0.1)
    assert sign_age(run) is None  # no thread goes on


def test_clocks_of_nodes_may_differ_by_hours(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    run.give_sign()
    for skew in (-7200.0, 0.0, 7200.0):
        monkeypatch.setattr(time, "time", lambda skew=skew: time.monotonic() + skew)
        seconds = sign_age(run)
        assert seconds is not None
        assert 0 <= seconds < 60  # of a sign given just now; the two clocks would be hours apart
        begun = attempts.begin(run, "7")
        end = attempts.note(run, "preempted", "told to stop")
        assert end is not None
        assert 0 <= end.ended - begun.began < 60
        assert abs(run.set_state("planned").since - end.ended) < 60
    os.utime(run.path / "heartbeat", (0, now_on(run.path) - 1000))
    assert 1000 <= (sign_age(run) or 0) < 1060
    assert sign_age(run, now=now_on(run.path) + 50) == pytest.approx(1050, abs=5)  # the second look is a little later
    assert sorted(run.path.glob(".now*")) == []


def hang(seconds: float, runs: list[RunDirectory]) -> None:
    """Trains runs, of which the first ends, and then takes no step any more."""
    policy = Policy(heartbeat_seconds=0.05, hang_seconds=seconds)
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(states.held(run, "7", policy))
        heart = stack.enter_context(Heartbeat(runs, policy))
        heart.progressed()
        heart.leave(runs[0])
        states.conclude(runs[0], "diverged", "rose")
        time.sleep(600)


def go_on(seconds: float, run: RunDirectory) -> None:
    """Trains a run until a file `end` is there."""
    policy = Policy(heartbeat_seconds=0.05, hang_seconds=seconds)
    with states.held(run, "7", policy):
        with Heartbeat([run], policy) as heart:
            while not (run.path / "end").exists():
                heart.progressed()
                time.sleep(0.01)
        states.conclude(run, "preempted", "told to stop")


def test_a_process_that_hangs_says_where_for_all_its_runs_and_ends(tmp_path: Path) -> None:
    ended, *runs = (a_run(tmp_path, a_config(seed)) for seed in range(3))
    process = FORK.Process(target=hang, args=(0.4, [ended, *runs]))
    process.start()
    process.join(60)
    assert process.exitcode == liveness.EXIT_CODE
    for run in runs:
        (end,) = attempts.read(run)
        noted = read_failure(run.path)
        assert noted is not None
        assert (end.cause, run.state().state, noted.cause) == ("hung", "failed", "hung")
        assert run.state().reason == end.reason == noted.reason
        assert "no step for 0.4 s, at test_attempts.py:" in (end.reason or "")
        assert "time.sleep(600)" in (run.path / "log.txt").read_text()
        with run.lock(timeout=0.0):
            assert not states.settle_killed(run, "killed", "gone")
    assert (ended.state().state, [end.cause for end in attempts.read(ended)]) == ("diverged", ["diverged"])


def hang_with_a_full_disk(broken: RunDirectory, run: RunDirectory) -> None:
    """Hangs where the first run's folder takes nothing, and standard output neither."""

    def full(*_: object) -> None:
        raise ValueError("not even an OSError")

    with ExitStack() as stack:
        for each in (broken, run):
            stack.enter_context(states.held(each, "7", POLICY))
        broken.log = full  # type: ignore[method-assign,assignment]
        sys.stdout = stack.enter_context(Path("/dev/full").open("w"))
        stack.enter_context(Heartbeat([broken, run], Policy(heartbeat_seconds=0.05, hang_seconds=0.4)))
        time.sleep(20)


def test_a_full_disk_does_not_keep_a_process_alive_that_hangs(tmp_path: Path) -> None:
    broken, run = (a_run(tmp_path, a_config(seed)) for seed in range(2))
    process = FORK.Process(target=hang_with_a_full_disk, args=(broken, run))
    process.start()
    process.join(15)
    try:
        assert process.exitcode == liveness.EXIT_CODE
    finally:
        process.kill()
    assert [end.cause for end in attempts.read(run)] == ["hung"], "what happened to one costs no other its line"


def test_a_process_that_was_frozen_looks_dead_and_has_not_hung(run: RunDirectory) -> None:
    process = FORK.Process(target=go_on, args=(1.0, run))
    process.start()
    assert process.pid is not None
    try:
        until(lambda: not is_stale(run, POLICY))
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: is_stale(run, POLICY))
        time.sleep(0.7)  # by now it has not taken a step for longer than a hang takes
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: not is_stale(run, POLICY))
        (run.path / "end").touch()
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
    assert [end.cause for end in attempts.read(run)] == ["preempted"]


def elsewhere(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt under way on another machine, whose lock does not reach here."""
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "far")
        begun = attempts.begin(run, "6", "far")
    run.set_state("running", attempt=begun.attempt, host="far", job_id="6")
    run.give_sign()


def test_a_run_alive_elsewhere_is_not_begun_although_its_lock_is_free(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(run, monkeypatch)
    lives = threading.Event()

    def live() -> None:
        while not lives.wait(0.02):
            run.give_sign()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(Busy, match="gives signs of life on far"), states.held(run, "7", POLICY):
            pytest.fail("two trained it at once")
    finally:
        lives.set()
        thread.join()
    assert (attempts.read(run), run.state().state) == ([], "running")


@pytest.mark.parametrize("known", [True, False])
def test_a_run_that_died_elsewhere_is_begun_once_its_last_sign_is_old(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    elsewhere(run, monkeypatch)
    if not known:
        (run.path / attempts.UNDER_WAY).write_text("")  # what a power cut may leave
    sign, began = run.last_sign(), time.monotonic()
    with states.held(run, "7", POLICY):
        assert time.monotonic() - began > 0.3  # the margin: so long it may have lived
        assert attempts.read(run)[0].ended == sign


def test_on_the_same_machine_a_free_lock_is_enough(run: RunDirectory) -> None:
    begun = attempts.begin(run, "6", "node2")  # of many nodes on one machine, as in tests
    run.set_state("running", attempt=begun.attempt, host="node2", job_id="6")
    run.give_sign()
    with ExitStack() as stack:
        stack.enter_context(states.held(run, "7", Policy(heartbeat_seconds=1000.0)))
        assert run.state().attempt == 2
