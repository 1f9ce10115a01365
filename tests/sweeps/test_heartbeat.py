"""Signs of life: by the file system's clock alone, and a process that hangs says so and ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from isoflop.sweeps.runs import attempts, liveness, states
from isoflop.sweeps.runs.attempts import Policy, is_stale, sign_age
from isoflop.sweeps.runs.directory import Busy, RunDirectory, now_on
from isoflop.sweeps.runs.liveness import Heartbeat
from isoflop.train.config import ModelConfig, RunConfig
from isoflop.train.job.failure import read_failure
from small_runs import planned

FORK = multiprocessing.get_context("fork")
POLICY = Policy(heartbeat_seconds=0.05, hang_seconds=60.0)


@pytest.fixture(autouse=True)
def small_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MARGIN_SECONDS", 0.3)


def a_run(folder: Path, seed: int = 0) -> RunDirectory:
    config = RunConfig(model=ModelConfig(vocab_size=256), tokens=4096, seed=seed)
    return planned(folder, config)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return a_run(tmp_path)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


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
    ended, *runs = (a_run(tmp_path, seed) for seed in range(3))
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
        assert "no step for 0.4 s, at test_heartbeat.py:" in (end.reason or "")
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
    broken, run = (a_run(tmp_path, seed) for seed in range(2))
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
