"""Runs that are stopped: cancelled from anywhere, preempted, out of time; and what becomes of their SLURM job."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from isoflop.sweeps.execute import attempt
from isoflop.sweeps.execute.attempt import Interrupt, train_one
from isoflop.sweeps.execute.worker import RunFailed, requeue_stopped
from isoflop.sweeps.runs import attempts, states
from isoflop.sweeps.runs.attempts import Policy
from isoflop.sweeps.runs.directory import RunDirectory
from isoflop.train.config import DataConfig, RunConfig
from isoflop.train.job.environment import Ranks
from isoflop.train.loop import Stopped, train
from small_runs import FakeSlurm, forty_steps, own_signals, planned

POLICY = Policy()


@pytest.fixture(autouse=True)
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What trains takes over the signals of its process, and here asks at every step whether to cancel."""
    monkeypatch.setattr(attempt, "ASK_SECONDS", -1.0)
    with own_signals():
        yield


@pytest.fixture(scope="module")
def base(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    return forty_steps(small_corpus(512, ["tensor", "loss", "of", "the"]))


@pytest.fixture
def make(tmp_path: Path, base: RunConfig) -> Callable[[int], RunDirectory]:
    def make(seed: int) -> RunDirectory:
        return planned(tmp_path, replace(base, seed=seed))

    return make


def ends(run: RunDirectory) -> list[str]:
    return [end.cause for end in attempts.read(run)]


Train = Callable[..., Any]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Train], None]:
    return lambda function: monkeypatch.setattr("isoflop.train.loop.train", function)


def test_a_run_that_somebody_cancels_saves_and_ends_and_is_not_begun_again(
    make: Callable[[int], RunDirectory], trainer: Callable[[Train], None]
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

    trainer(ask)
    said = train_one(run, Ranks(), interrupt, "7", POLICY)
    assert said == ("cancelled", "cancelled by ann on login1; stopped at step 3 of 40")
    assert (run.state().state, ends(run)) == ("cancelled", ["cancelled"])
    assert not interrupt()  # whoever trained it goes on with others
    assert train_one(run, Ranks(), interrupt, "8", POLICY) == (
        "cancelled",
        "cancelled by ann on login1 before it began",
    )
    assert ends(run) == ["cancelled"]
    states.retry_by_hand(run)
    trainer(
        lambda config, directory, should_stop, **rest: should_stop() or (directory / "summary.json").write_text("{}")
    )
    assert train_one(run, Ranks(), interrupt, "9", POLICY) == ("done", None)
    assert ends(run) == ["cancelled", "done"]


class CancelsAt(Interrupt):
    """Asks to cancel a run after so many calls: one a step, and those by which a process says that it is at work."""

    def __init__(self, run: RunDirectory, calls: int) -> None:
        super().__init__()
        self.run, self.left = run, calls

    def __call__(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.run.ask_cancel("ann on login1")
        return super().__call__()


def test_one_member_of_an_ensemble_is_cancelled_and_the_others_go_on(
    make: Callable[[int], RunDirectory], tmp_path: Path
) -> None:
    first, cancelled, last = runs = [make(seed) for seed in range(3)]
    attempt.train_ensemble(runs, CancelsAt(cancelled, 12), "7", POLICY)
    assert [run.state().state for run in runs] == ["done", "cancelled", "done"]
    (end,) = attempts.read(cancelled)
    said = f"cancelled by ann on login1; stopped at step {end.last_step} of 40"
    assert (cancelled.state().reason or "").startswith(said)
    assert 0 < end.last_step < 40
    assert (end.cause, end.first_step, end.saved_step, end.share) == ("cancelled", 0, end.last_step, 1 / 3)
    for run in (first, last):
        assert [(end.cause, end.last_step, end.flops_wasted) for end in attempts.read(run)] == [("done", 40, 0)]
        alone = train(run.config(), tmp_path / "alone" / run.run_id, report=lambda line: None)
        # Members sum in another order.
        assert (run.summary() or {})["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-5)


@pytest.mark.parametrize(("seconds", "cause"), [(None, "preempted"), (60, "time_limit"), (86400, "preempted")])
def test_a_signal_near_the_end_of_the_job_is_its_time_limit(
    seconds: int | None, cause: str, make: Callable[[int], RunDirectory], trainer: Callable[[Train], None],
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

    trainer(stop)
    assert train_one(run, Ranks(), interrupt, "7", POLICY)[0] == "preempted"
    assert ends(run) == [cause]


# Back to the queue


def stopped(run: RunDirectory, times: int = 1) -> RunDirectory:
    for _ in range(times):
        with states.held(run, "7", POLICY):
            states.conclude(run, "preempted", "signal SIGUSR2")
    return run


def test_a_job_that_slurm_refuses_to_requeue_leaves_its_runs_preempted(
    make: Callable[[int], RunDirectory], fake_slurm: FakeSlurm
) -> None:
    run = stopped(make(1))
    fake_slurm.refusal = "Unable to contact slurm controller"
    with pytest.raises(RunFailed, match="SLURM would not requeue its job"):
        requeue_stopped([run], POLICY)
    assert run.state().state == "preempted"
    assert "signal SIGUSR2; SLURM would not requeue its job (Unable to contact" in (run.state().reason or "")
    assert ends(run) == ["preempted"]


def test_requeues_are_counted_since_the_last_retry_by_hand(
    make: Callable[[int], RunDirectory], fake_slurm: FakeSlurm
) -> None:
    policy = Policy(max_requeues=2)
    often, seldom = stopped(make(1), 3), stopped(make(2), 2)
    with pytest.raises(SystemExit, match="1"):
        requeue_stopped([often, seldom], policy)  # one of them goes on
    assert fake_slurm.requeued == ["7"]
    assert [run.state().state for run in (often, seldom)] == ["failed", "preempted"]
    assert "2 requeues, all that cluster.max_requeues allows; signal SIGUSR2" in (often.state().reason or "")
    with pytest.raises(RunFailed, match="had to stop again after 2 requeues"):
        requeue_stopped([stopped(seldom)], policy)
    assert fake_slurm.requeued == ["7"]
    states.retry_by_hand(often)
    with pytest.raises(SystemExit):
        requeue_stopped([stopped(often)], policy)
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
        requeue_stopped([run], POLICY)
    assert (run.state().state, ends(run)) == (state, [cause])
    assert "signal SIGUSR2" in (run.state().reason or "")
    assert fake_slurm.requeued == (["7"] if fate == "timeout" else [])


def test_a_run_that_another_job_has_begun_meanwhile_is_left_alone(
    make: Callable[[int], RunDirectory], fake_slurm: FakeSlurm
) -> None:
    run = stopped(make(1))
    fake_slurm.fate = "cancelled"
    other = RunDirectory(run.path)
    with states.held(other, "8", POLICY), pytest.raises(RunFailed):
        requeue_stopped([run], POLICY)
    assert run.state().state == "running"
    assert json.loads((run.path / attempts.LINES).read_text())["cause"] == "preempted"
