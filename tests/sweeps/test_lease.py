"""The lease of a run: each start becomes one attempt in its journal, for any end and any process that writes it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from isoflop.sweeps.execute.attempt import TrunkNotYet, failed
from isoflop.sweeps.runs import attempts, journal, lease, liveness
from isoflop.sweeps.runs.attempts import CAUSES, Attempt, Policy, decide
from isoflop.sweeps.runs.directory import Busy, RunDirectory, SweepDirectory, now_on
from isoflop.sweeps.runs.journal import ENDS_AS, Started
from isoflop.sweeps.runs.lease import Ending, hold, is_silent, reconcile, reset, sign_age
from isoflop.sweeps.runs.liveness import Heartbeat
from isoflop.sweeps.runs.membership import retries_spent
from isoflop.train.config import ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig, run_id
from isoflop.train.errors import OutOfMemory, UserError
from isoflop.train.flops import flops_exact
from isoflop.train.job.failure import Cause, Failure, RankError, note_failure, read_failure
from isoflop.train.schedule import trunk_steps
from small_runs import Patch, end, planned, until

FORK = multiprocessing.get_context("fork")
POLICY = Policy(heartbeat_seconds=0.05, hang_seconds=60.0, backoff_seconds=0.0)


def make_config(seed: int = 0, **changes: object) -> RunConfig:
    """Return the config of a run of 100 steps."""
    run = RunConfig(
        model=ModelConfig(vocab_size=256), optimizer=OptimizerConfig(batch_size=4), seed=seed,
        schedule=ScheduleConfig(warmup_tokens=1024), parallel=ParallelConfig(device="cpu"),
    )  # fmt: skip
    run = replace(run, tokens=100 * run.batch_tokens, **changes)
    assert run.steps == 100
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return planned(tmp_path, make_config())


@pytest.fixture(autouse=True)
def small_margin(monkeypatch: Patch) -> None:
    monkeypatch.setattr(attempts, "MARGIN_SECONDS", 0.3)


def save(run: RunDirectory, step: int) -> Path:
    """Write a folder that looks like a checkpoint."""
    folder = run.path / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"12345")
    (folder / "manifest.json").write_text(json.dumps({"model.safetensors": {"bytes": 5, "sha256": ""}}))
    return folder


def log_step(run: RunDirectory, step: int) -> None:
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")


def begin(run: RunDirectory, machine: str = "far") -> None:
    """Write the start of an attempt that no process trains."""
    run.write_event(Started, attempt=run.record().next_attempt, host="node1", job_id="7", machine=machine)


def only_attempt(run: RunDirectory) -> Attempt:
    (attempt,) = run.record().attempts
    return attempt


# A beginning and an end of each attempt


def test_a_run_that_is_done_has_one_attempt_with_all_its_steps(run: RunDirectory) -> None:
    with hold(run, "7", POLICY) as record:
        assert record is not None
        assert run.state() == record.state
        assert (record.state.state, record.state.attempt, record.state.job_id) == ("running", 1, "7")
        assert run.last_sign() is not None
        save(run, 100)
        (run.path / "summary.json").write_text("{}")
        lease.conclude(run, Ending("done"))
    attempt = only_attempt(run)
    assert (attempt.attempt, attempt.cause, attempt.reason, attempt.job_id) == (1, "done", None, "7")
    assert (attempt.first_step, attempt.last_step, attempt.saved_step, attempt.gpus) == (0, 100, 100, 0)
    # The factors are multiplied in another order.
    assert attempt.flops == pytest.approx(flops_exact(make_config()), rel=1e-12)
    assert (attempt.flops_wasted, run.last_sign(), run.is_done()) == (0, None, True)
    with hold(run, "8", POLICY) as record:
        assert record is None
    assert only_attempt(run) == attempt


def test_steps_after_the_newest_checkpoint_are_wasted(run: RunDirectory) -> None:
    step = flops_exact(make_config()) / 100
    with hold(run, "7", POLICY):
        save(run, 20)
        log_step(run, 37)
        lease.conclude(run, Ending("failed", "its process was killed", "killed"))
    first = only_attempt(run)
    assert (first.cause, first.first_step, first.saved_step, first.last_step) == ("killed", 0, 20, 37)
    assert (first.flops, first.flops_wasted) == pytest.approx((37 * step, 17 * step), rel=1e-12)
    with hold(run, "8", POLICY):
        # Before its first step: the 37 steps belong to the first attempt.
        lease.conclude(run, Ending("failed", "again", "killed"))
    second = run.record().attempts[1]
    assert (second.attempt, second.first_step, second.last_step, second.flops) == (2, 20, 20, 0)
    with hold(run, "9", POLICY):
        log_step(run, 30)
        save(run, 40)
        lease.conclude(run, Ending("preempted", "signal SIGUSR2; stopped at step 40 of 100", "time_limit"))
    third = run.record().attempts[2]
    assert (third.first_step, third.last_step, third.flops_wasted) == (20, 40, 0)


def test_a_branch_counts_its_own_steps_only(tmp_path: Path) -> None:
    trunk = replace(make_config(), tokens=2 * make_config().tokens)
    config = replace(make_config(), parent=run_id(trunk))
    run, first_step = planned(tmp_path, config), trunk_steps(config)
    assert 0 < first_step < 100
    with hold(run, "7", POLICY):
        save(run, first_step)  # as `graft` does
        log_step(run, first_step)  # a step of the trunk
        lease.conclude(run, Ending("failed", "no luck"))
    attempt = only_attempt(run)
    steps = (attempt.first_step, attempt.last_step, attempt.saved_step)
    assert (*steps, attempt.flops) == (first_step, first_step, first_step, 0)


def test_a_checkpoint_whose_files_have_not_their_sizes_is_none(run: RunDirectory) -> None:
    assert run.newest_checkpoint() is None
    save(run, 9), save(run, 10)
    too_short, without_manifest = save(run, 100), save(run, 50)
    (too_short / "model.safetensors").write_bytes(b"123")
    (without_manifest / "manifest.json").unlink()
    (run.path / "checkpoints" / ".step_200.x").mkdir()
    (run.path / "checkpoints" / "step_x").mkdir()
    assert run.newest_checkpoint() == 10
    (run.path / "checkpoints" / "step_10" / "manifest.json").write_text('{"model.safetensors": 3}')
    assert run.newest_checkpoint() == 9


# A run whose process is gone is reconciled by the next that holds it


def die(run: RunDirectory) -> None:
    with hold(run, "7", POLICY):
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_attempt_that_was_killed_is_written_by_the_next_start(run: RunDirectory) -> None:
    process = FORK.Process(target=die, args=(run,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    sign = run.last_sign()
    assert sign is not None
    assert (run.state().state, run.record().attempts) == ("running", ())
    save(run, 5), log_step(run, 8)
    note_failure(run.path, Failure(Cause.HUNG, "rank 1 on node3 has made no progress since step 8"))
    with hold(run, "8", POLICY) as record:
        assert record is not None
        (first,) = record.attempts
        assert read_failure(run.path) is None  # the failure of the previous attempt is removed
        assert record.state.attempt == 2
        lease.conclude(run, Ending("failed", "again"))
    # The first sign of life is written just before the attempt starts, so the start may be later.
    assert (first.attempt, first.cause, first.job_id, first.ended) == (1, "hung", "7", max(first.began, sign))
    assert (first.last_step, first.saved_step) == (8, 5)
    assert "rank 1 on node3 has made no progress" in (first.reason or "")
    assert [attempt.attempt for attempt in run.record().attempts] == [1, 2]


def reconcile_all(runs: list[RunDirectory]) -> None:
    for run in runs:
        with run.lock():
            reconcile(run)


def test_two_processes_that_reconcile_at_once_write_one_end_of_each_run(tmp_path: Path) -> None:
    runs = [planned(tmp_path, make_config(seed)) for seed in range(30)]
    for run in runs:
        begin(run)
    processes = [FORK.Process(target=reconcile_all, args=(runs,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [only_attempt(run).cause for run in runs] == ["killed"] * 30
    assert all((run.path / journal.JOURNAL).read_text().count("stopped") == 1 for run in runs)


def test_a_run_that_is_stopped_or_killed_without_end_ends_with_the_budget(run: RunDirectory) -> None:
    policy = replace(POLICY, retries=2, max_requeues=2)
    for cause in ("killed", "preempted"):
        reset(run, policy)
        for starts in (True, True, True, False):
            with hold(run, "7", policy) as record:
                assert (record is not None) == starts
                if record is not None:
                    lease.conclude(run, Ending(ENDS_AS.get(cause, "failed"), "signal SIGUSR2", cause))
        assert run.state().state == "failed", cause
    assert "cluster.max_requeues=2 allows; signal SIGUSR2" in str(run.state().reason)


def test_a_full_disk_leaves_the_attempt_to_the_next_start(run: RunDirectory, monkeypatch: Patch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with hold(run, "7", POLICY):
        with monkeypatch.context() as patch:
            patch.setattr(journal, "_append_lines", full)
            lease.conclude(run, Ending("preempted", "so it was"))
        assert run.record().open is not None
    with monkeypatch.context() as patch:
        patch.setattr(journal, "_append_lines", full)
        with pytest.raises(OSError, match="No space left"), hold(run, "8", POLICY, lambda start: lease.UNWRITTEN):
            pytest.fail("it began")
    with hold(run, "8", POLICY, lambda start: lease.UNWRITTEN) as record:
        assert record is not None
    assert [attempt.cause for attempt in run.record().attempts] == ["disk"]


# A user's commands


def test_a_reset_is_a_new_budget_and_a_clean_slate(run: RunDirectory, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(lease, "this_user", lambda: "bob on login2")
    sweep = SweepDirectory(tmp_path)
    for _ in range(3):
        end(run, "killed")
    assert retries_spent(sweep) == 2  # the third attempt has not been retried
    run.ask_cancel("ann on login1")
    note_failure(run.path, Failure(Cause.KILLED, "gone"))
    reset(run, POLICY)
    assert "bob on login2" in (run.path / journal.JOURNAL).read_text()
    assert (run.state().state, run.state().job_id, run.state().host) == ("planned", None, None)
    assert (read_failure(run.path), run.cancel_asked()) == (None, None)
    assert (run.record().recent, retries_spent(sweep)) == ([], 0)
    begin(run, "another")
    reset(run, POLICY)  # reconciles the killed attempt first
    end(run, "disk")
    numbers = [(attempt.attempt, attempt.budget) for attempt in run.record().attempts]
    assert numbers == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2)]


# Causes


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (UserError("no such text"), "input"), (OSError(errno.ENOSPC, "full"), "disk"),
        (OSError(errno.EDQUOT, "quota"), "disk"), (OSError(errno.EIO, "broken"), "error"), (ValueError("x"), "error"),
        (RuntimeError("can't allocate memory"), "memory"), (OutOfMemory("at step 3", goes_on=True), "memory"),
        (OutOfMemory("at step 3"), "error"),
        (TrunkNotYet("it has no checkpoint there"), "trunk"),
        *((RankError(Failure(cause, "rank 1 on a: with a reason")), str(cause)) for cause in Cause),
    ],
)  # fmt: skip
def test_an_error_has_a_cause(error: Exception, cause: str, run: RunDirectory) -> None:
    assert failed(error, run).cause == cause
    assert cause in CAUSES


def test_what_a_rank_noted_says_which_nodes_are_at_fault(run: RunDirectory) -> None:
    begin(run)
    note_failure(run.path, Failure(Cause.HUNG, "two ranks hang", hosts=("node07", "gpu-8.local")))
    reconcile(run)
    attempt = only_attempt(run)
    assert (attempt.cause, attempt.host, attempt.at_fault) == ("hung", "node1", ("node07", "gpu-8.local"))
    assert decide(run.record().recent, POLICY, 0, 0.0).avoid == ("node07", "gpu-8.local")


# Signs of life


def test_a_run_gives_signs_of_life_while_it_trains_and_none_afterwards(run: RunDirectory) -> None:
    assert sign_age(run) is None
    assert is_silent(run, POLICY)
    with hold(run, "7", POLICY), Heartbeat(run, POLICY):
        first = run.last_sign()
        assert first is not None
        until(lambda: (run.last_sign() or 0) > first)
        assert not is_silent(run, POLICY)
    assert sign_age(run) is None
    time.sleep(0.1)
    assert sign_age(run) is None  # its thread has ended


def test_clocks_of_nodes_may_differ_by_hours(run: RunDirectory, monkeypatch: Patch) -> None:
    run.give_sign()
    for skew in (-7200.0, 0.0, 7200.0):
        monkeypatch.setattr(time, "time", lambda skew=skew: time.monotonic() + skew)
        seconds = sign_age(run)
        assert seconds is not None
        assert 0 <= seconds < 60  # the sign is new, although the clocks differ by hours
        begin(run)
        lease.conclude(run, Ending("preempted", "told to stop"))
        attempt = run.record().attempts[-1]
        assert 0 <= attempt.seconds < 60
        assert abs(run.state().since - attempt.ended) < 60
    os.utime(run.path / "heartbeat", (0, now_on(run.path) - 1000))
    assert 1000 <= (sign_age(run) or 0) < 1060
    assert sign_age(run, now=now_on(run.path) + 50) == pytest.approx(1050, abs=5)  # the second call is a little later
    assert sorted(run.path.glob(".now*")) == []


def hang(run: RunDirectory, disk_is_full: bool) -> None:
    """Hang without a step; with `disk_is_full` neither the log nor standard output can be written."""

    def refuse(*_: object) -> None:
        raise ValueError("not even an OSError")

    with ExitStack() as stack:
        stack.enter_context(hold(run, "7", POLICY))
        if disk_is_full:
            run.log = refuse  # type: ignore[method-assign,assignment]
            sys.stdout = stack.enter_context(Path("/dev/full").open("w"))
        stack.enter_context(Heartbeat(run, Policy(heartbeat_seconds=0.05, hang_seconds=0.4)))
        time.sleep(600)


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_a_process_that_hangs_says_where_and_ends(run: RunDirectory, disk_is_full: bool) -> None:
    process = FORK.Process(target=hang, args=(run, disk_is_full))
    process.start()
    process.join(60)
    try:
        assert process.exitcode == liveness.EXIT_CODE
    finally:
        process.kill()
    attempt, failure = only_attempt(run), read_failure(run.path)
    assert failure is not None
    assert (attempt.cause, run.state().state, failure.cause) == ("hung", "failed", "hung")
    assert run.state().reason == attempt.reason == failure.reason
    assert "no step for 0.4 s, at test_lease.py:" in (attempt.reason or "")
    if not disk_is_full:
        assert "time.sleep(600)" in (run.path / "log.txt").read_text()


def train_until_end_file(seconds: float, run: RunDirectory) -> None:
    """Report progress of a run until its file `end` exists."""
    policy = Policy(heartbeat_seconds=0.05, hang_seconds=seconds)
    with hold(run, "7", policy):
        with Heartbeat(run, policy) as heart:
            while not (run.path / "end").exists():
                heart.progressed()
                time.sleep(0.01)
        lease.conclude(run, Ending("preempted", "told to stop"))


def test_a_process_that_was_frozen_looks_dead_and_has_not_hung(run: RunDirectory) -> None:
    process = FORK.Process(target=train_until_end_file, args=(1.0, run))
    process.start()
    assert process.pid is not None
    try:
        until(lambda: not is_silent(run, POLICY))
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: is_silent(run, POLICY))
        time.sleep(0.7)  # together longer than `hang_seconds` without a step
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: not is_silent(run, POLICY))
        (run.path / "end").touch()
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
    assert only_attempt(run).cause == "preempted"


def test_a_run_alive_elsewhere_is_not_begun_although_its_lock_is_free(run: RunDirectory) -> None:
    begin(run)
    stop = threading.Event()

    def give_signs() -> None:
        while not stop.wait(0.02):
            run.give_sign()

    run.give_sign()
    thread = threading.Thread(target=give_signs)
    thread.start()
    try:
        for _ in range(10):
            with pytest.raises(Busy, match="recent heartbeat from node1"), hold(run, "7", POLICY):
                pytest.fail("two trained it at once")
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
    assert (run.record().attempts, run.state().state) == ((), "running")
    sign = run.last_sign()
    until(lambda: is_silent(run, POLICY))
    with hold(run, "7", POLICY) as record:
        assert record is not None
        assert record.attempts[0].ended == max(record.attempts[0].began, sign or 0.0)


def test_on_the_same_machine_a_free_lock_is_enough(run: RunDirectory) -> None:
    import socket

    begin(run, machine=socket.gethostname())  # many nodes on one machine, as on a test cluster
    run.give_sign()
    with hold(run, "7", Policy(heartbeat_seconds=1000.0, backoff_seconds=0.0)) as record:
        assert record is not None
        assert record.state.attempt == 2
