"""`isoflop cancel` and `retry`: which runs are stopped at once, asked to stop, or tried again."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_sweep import planned_run
from isoflop.sweeps.execute import conduct, control
from isoflop.sweeps.runs import lease, membership
from isoflop.sweeps.runs.attempts import Policy
from isoflop.sweeps.runs.directory import Busy, RunDirectory, SweepDirectory
from isoflop.sweeps.runs.journal import JOURNAL, OLD_LINES, Planned, Started
from isoflop.sweeps.slurm.jobs import LAUNCH
from isoflop.train.errors import UserError
from isoflop.train.files import write_json
from small_runs import Capture, end, set_state

POLICY = Policy()


@pytest.fixture
def sweep(sweep: SweepDirectory) -> SweepDirectory:
    """Return a copy of the smoke sweep whose runs have not started."""
    for run in sweep.runs():
        for name in ("summary.json", "state.json", JOURNAL, OLD_LINES):
            (run.path / name).unlink(missing_ok=True)
        run.write_event(Planned)
    return sweep


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Replace training after `retry` and return the list of the run ids that it would start."""
    calls: list[set[str]] = []

    def resume(sweep: SweepDirectory, only: set[str]) -> int:
        calls.append(only)
        return 0

    monkeypatch.setattr(conduct, "resume", resume)
    return calls


@pytest.fixture
def lock_elsewhere() -> Iterator[Callable[[RunDirectory], None]]:
    """Return a function that locks a run in another process until the test ends."""
    context, processes = multiprocessing.get_context("fork"), list[tuple[object, object]]()

    def hold(run: RunDirectory) -> None:
        locked, test_is_over = context.Event(), context.Event()

        def work() -> None:
            with run.lock():
                locked.set()
                test_is_over.wait()

        process = context.Process(target=work)
        process.start()
        processes.append((process, test_is_over))
        locked.wait()

    yield hold
    for process, test_is_over in processes:
        test_is_over.set()  # type: ignore[attr-defined]
        process.join()  # type: ignore[attr-defined]


def states_of(sweep: SweepDirectory) -> list[str]:
    return [run.state().state for run in sweep.runs()]


def fail(run: RunDirectory, cause: str) -> None:
    end(run, cause, reason=f"{cause} it was")


def begin(run: RunDirectory, machine: str | None = None) -> None:
    """Record the start of an attempt by a worker on this machine or another."""
    run.write_event(Started, attempt=1, host="node1", job_id="1", machine=machine or socket.gethostname())


@pytest.mark.parametrize(("prefix", "message"), [("zz", "matches none"), ("", "2b55d78312, d237d5ba58")])
def test_a_run_is_named_by_first_digits_that_no_other_has(prefix: str, message: str, tmp_path: Path) -> None:
    sweep = SweepDirectory(tmp_path)
    write_json(tmp_path / "plan.json", {"runs": [planned_run("2b55d78312"), planned_run("d237d5ba58")]})
    runs = membership.find_runs(sweep, ["d237d5b", "2b55d78312", "d237d5ba58"])
    assert [run.run_id for run in runs] == ["d237d5ba58", "2b55d78312"]
    with pytest.raises(UserError, match="must be the beginning of exactly one run id") as error:
        membership.find_runs(sweep, [prefix])
    assert message in str(error.value)


def test_runs_that_do_not_train_are_cancelled_at_once(sweep: SweepDirectory, capsys: Capture) -> None:
    planned, queued, dead, diverged = sweep.runs()
    set_state(queued, "queued")
    begin(dead)  # no process holds its lock
    dead.give_sign()
    dead.reserve()
    set_state(diverged, "diverged", reason="the loss is nan")
    assert control.cancel(sweep, []) == 0
    assert states_of(sweep) == ["cancelled", "cancelled", "cancelled", "diverged"]
    assert [attempt.cause for attempt in dead.record().attempts] == ["cancelled"]
    assert (dead.last_sign(), (dead.path / ".reserve").exists()) == (None, False)
    assert all(run.cancel_asked() is not None for run in (planned, queued, dead))
    assert capsys.readouterr().out.count("is cancelled") == 3
    assert control.cancel(sweep, []) == 0
    assert "every run has ended already" in capsys.readouterr().out


def test_a_run_that_trains_is_asked_to_stop_and_left_to_its_worker(
    sweep: SweepDirectory, lock_elsewhere: Callable[[RunDirectory], None], capsys: Capture
) -> None:
    run = sweep.runs()[0]
    begin(run)
    lock_elsewhere(run)
    control.cancel(sweep, [run.run_id[:6]])
    assert run.state().state == "running"
    assert run.cancel_asked() is not None
    assert "was asked to save and stop" in capsys.readouterr().out
    assert states_of(sweep)[1:] == ["planned"] * 3


def test_a_lock_that_does_not_reach_this_node_is_not_taken_for_a_dead_run(sweep: SweepDirectory) -> None:
    run = sweep.runs()[0]
    begin(run, machine="another")
    run.give_sign()
    with pytest.raises(Busy, match="recent heartbeat"), lease.hold_idle(run, POLICY):
        pass
    control.cancel(sweep, [run.run_id])
    assert run.state().state == "running"
    os.utime(run.path / "heartbeat", (0, 0))
    with lease.hold_idle(run, POLICY):
        pass


def test_only_failed_runs_that_would_be_retried_are_cancelled(sweep: SweepDirectory) -> None:
    retryable, final = sweep.runs()[:2]
    fail(retryable, "node")
    fail(final, "error")
    control.cancel(sweep, [])
    assert retryable.state().state == "cancelled"
    assert "node it was" in (retryable.state().reason or "")
    assert final.state().state == "failed"


def test_jobs_in_the_queue_are_cancelled_with_the_whole_sweep_and_not_with_a_run(
    sweep: SweepDirectory, tmp_path: Path, install: Callable[[str, str], None], capsys: Capture
) -> None:
    calls = tmp_path / "calls"
    comments = [("12_0", "isoflop:abc:worker:x"), ("13", "isoflop:abc:keeper:"), ("14", "isoflop:other:keeper:")]
    install("squeue", "\n".join(f"echo '{job}|PENDING|Priority|{comment}'" for job, comment in comments))
    install("scancel", f'echo "$@" >> {calls}')
    write_json(sweep.path / "jobs" / LAUNCH, {"token": "abc", "folder": str(tmp_path)})
    run, *_ = sweep.runs()
    set_state(run, "queued")
    assert control.cancel(sweep, [run.run_id]) == 0
    assert states_of(sweep) == ["cancelled", "planned", "planned", "planned"]
    assert not calls.exists(), "a worker continues with other runs"
    assert control.cancel(sweep, []) == 0
    assert calls.read_text().splitlines() == ["12_0 13"]
    install("squeue", "echo 'slurm_load_jobs error: Invalid user id' >&2; exit 1")
    capsys.readouterr()
    assert control.cancel(sweep, []) == 1
    assert "its jobs stay in the queue" in capsys.readouterr().out


def test_retry_without_names_takes_what_failed(sweep: SweepDirectory, resumed: list[set[str]], capsys: Capture) -> None:
    failed, killed, cancelled, _ = sweep.runs()
    for _attempt in range(5):  # far beyond its budget
        fail(failed, "node")
    begin(killed)
    cancelled.ask_cancel("somebody")
    set_state(cancelled, "cancelled", reason="cancelled by somebody")
    assert control.retry(sweep, [], failed=False, diverged=False) == 0
    assert resumed == [{failed.run_id, killed.run_id}]
    assert states_of(sweep) == ["planned", "planned", "cancelled", "planned"]
    assert "it was failed: node it was" in capsys.readouterr().out
    assert cancelled.run_id not in resumed[0]
    assert control.retry(sweep, [cancelled.run_id[:8]], failed=False, diverged=False) == 0
    assert resumed[1] == {cancelled.run_id}
    assert cancelled.cancel_asked() is None


def test_finished_and_running_runs_are_not_retried(
    sweep: SweepDirectory, smoke: tuple[Path, str], resumed: list[set[str]],
    lock_elsewhere: Callable[[RunDirectory], None], capsys: Capture,
) -> None:  # fmt: skip
    done, running = sweep.runs()[:2]
    shutil.copy(smoke[0] / "runs" / done.run_id / "summary.json", done.path)
    set_state(done, "done")
    begin(running)
    lock_elsewhere(running)
    control.retry(sweep, [done.run_id, running.run_id], failed=False, diverged=False)
    printed = capsys.readouterr().out
    assert f"run {done.run_id} is already done" in printed
    assert f"run {running.run_id} is being trained" in printed
    assert "nothing to retry" in printed
    control.cancel(sweep, [running.run_id])
    control.retry(sweep, [running.run_id], failed=False, diverged=False)
    assert "is about to stop" in capsys.readouterr().out
    assert resumed == []
    assert states_of(sweep)[:2] == ["done", "running"]


def test_retry_adds_one_run_at_a_lower_rate_for_a_diverged_one(sweep: SweepDirectory, resumed: list[set[str]]) -> None:
    text = (sweep.path / "sweep.yaml").read_text()
    assert "diverged_rate_factor: null" in text
    (sweep.path / "sweep.yaml").write_text(text.replace("diverged_rate_factor: null", "diverged_rate_factor: 0.25"))
    run = sweep.runs()[0]
    set_state(run, "diverged", reason="the loss is nan")
    control.retry(sweep, [], failed=False, diverged=True)
    ((name,),) = resumed
    assert name not in {other.run_id for other in sweep.runs()}
    new, old = sweep.run(name).config(), run.config()
    assert new.optimizer.learning_rate == 0.25 * old.optimizer.learning_rate
    assert (new.model, new.tokens, new.seed) == (old.model, old.tokens, old.seed)
    assert run.state().state == "diverged"
    control.retry(sweep, [], failed=False, diverged=True)
    assert len(resumed) == 1


@pytest.mark.slow
def test_a_retried_run_ends_as_if_it_had_never_failed(smoke: tuple[Path, str], tmp_path: Path) -> None:
    sweep = SweepDirectory(Path(shutil.copytree(smoke[0], tmp_path / "smoke")))
    run = sweep.runs()[0]
    before = run.summary()
    (run.path / "summary.json").unlink()
    shutil.rmtree(run.path / "checkpoints")
    set_state(run, "failed", reason="the disk is full")
    command = [sys.executable, "-m", "isoflop.sweeps.cli.main", "retry", str(sweep.path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    after = run.summary()
    assert before is not None
    assert after is not None
    assert after["val_loss"] == before["val_loss"]
    assert states_of(sweep) == ["done"] * 4


def test_cancelled_runs_are_retried_if_asked(sweep: SweepDirectory, resumed: list[set[str]], capsys: Capture) -> None:
    control.cancel(sweep, [])
    capsys.readouterr()
    assert control.retry(sweep, [], False, False) == 0
    assert "nothing to retry; 4 runs are cancelled, which --cancelled retries" in capsys.readouterr().out
    assert not resumed
    control.retry(sweep, [], False, False, cancelled=True)
    assert resumed == [{run.run_id for run in sweep.runs()}]
    assert states_of(sweep) == ["planned"] * 4
