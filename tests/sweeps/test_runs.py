"""Run directories: frozen configs, atomic states, and locks that are released when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from isoflop.sweeps.runs import membership
from isoflop.sweeps.runs.directory import Busy, RunDirectory, SweepDirectory, lock_token
from isoflop.sweeps.runs.journal import Adopted, State, append
from isoflop.train.config import ModelConfig, ParallelConfig, RunConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.files import read_json_lines, write_json
from isoflop.train.job.failure import Cause, Failure, forget_failure, note_failure, read_failure
from small_runs import set_state


def make_config() -> RunConfig:
    return RunConfig(model=ModelConfig(vocab_size=256), tokens=4096)


def directory(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / run_id(make_config()))
    run.freeze(make_config())
    return run


@pytest.mark.parametrize("value", [".nan", ".inf", "[1]"])
def test_a_config_with_a_value_that_is_none_is_refused_in_a_sentence(value: str, tmp_path: Path) -> None:
    run = directory(tmp_path)
    file = run.path / "config.yaml"
    file.write_text(re.sub(r"learning_rate: .*", f"learning_rate: {value}", file.read_text()))
    with pytest.raises(UserError, match=r"config\.yaml cannot be read as a run.s config .*; remove the run"):
        run.config()


def test_freezing_again_changes_nothing(tmp_path: Path) -> None:
    run = directory(tmp_path)
    before = (run.path / "config.yaml").read_bytes()
    other = make_config()
    other.tracker.kind = "none"  # cosmetic, so the run is the same
    run.freeze(other)
    assert (run.path / "config.yaml").read_bytes() == before


def test_a_run_moved_to_other_ranks_is_the_same_run(tmp_path: Path) -> None:
    run = directory(tmp_path)
    other = make_config()
    other.parallel = ParallelConfig(tp=2, dp=2, zero=3)
    run.refreeze(other)
    assert run.config() == other
    assert run_id(run.config()) == run.run_id


def test_a_run_under_way_keeps_its_ranks(tmp_path: Path) -> None:
    run = directory(tmp_path)
    other = make_config()
    other.parallel.dp = 2
    process = start_holder(run.path)
    try:
        run.refreeze(make_config())  # nothing changes, so it does not wait for the lock
        with pytest.raises(UserError, match=f"is held by process {process.pid} on .* cannot change"):
            run.refreeze(other, timeout=0.1)
        assert run.config() == make_config()
        with pytest.raises(Busy, match=f"held by process {process.pid} on "), run.lock(timeout=0.1):
            pytest.fail("two held the run at once")
    finally:
        process.kill()
        process.wait()


def test_the_first_reason_of_a_failure_stays_until_the_next_attempt(tmp_path: Path) -> None:
    run = directory(tmp_path)
    assert read_failure(run.path) is None
    for rank in (2, 1):
        note_failure(run.path, Failure(Cause.KILLED, f"rank {rank} on node7 died at step 40"))
    assert read_failure(run.path) == Failure(Cause.KILLED, "rank 2 on node7 died at step 40")
    forget_failure(run.path)
    forget_failure(run.path)
    assert read_failure(run.path) is None


def test_the_user_who_cancels_a_run_is_named_until_it_is_forgotten(tmp_path: Path) -> None:
    run = directory(tmp_path)
    assert run.cancel_asked() is None
    run.forget_cancel()
    run.ask_cancel("ann on login1")
    assert RunDirectory(run.path).cancel_asked() == "ann on login1"
    (run.path / "cancel.json").write_text("{")  # the request counts, although its author is unknown
    assert run.cancel_asked() == "a user"
    run.forget_cancel()
    assert run.cancel_asked() is None


def test_a_config_that_was_edited_into_another_run_is_refused(tmp_path: Path) -> None:
    run = directory(tmp_path)
    path = run.path / "config.yaml"
    path.write_text(path.read_text().replace("tokens: 4096", "tokens: 8192"))
    with pytest.raises(UserError, match="describes run"):
        run.config()


@pytest.mark.parametrize(
    "garbage", ["", "{", '{"state": "flying"}', "[]", '{"state": 3}', '{"state": "running", "attempt": "x"}']
)
def test_a_damaged_view_is_read_from_the_journal(tmp_path: Path, garbage: str) -> None:
    run = directory(tmp_path)
    set_state(run, "done", attempt=3)
    (run.path / "summary.json").write_text('{"step": 2}')
    (run.path / "state.json").write_text(garbage)
    assert run.is_done()
    assert run.state().attempt == 3
    (run.path / "events.jsonl").unlink()
    assert run.is_done(), "the summary is enough"
    (run.path / "summary.json").write_text('{"step": 2')
    assert run.state().state == "planned"
    assert set_state(run, "running", attempt=4).attempt == run.state().attempt == 4


def test_done_needs_both_the_state_and_the_summary(tmp_path: Path) -> None:
    run = directory(tmp_path)
    set_state(run, "done")
    assert not run.is_done()
    (run.path / "summary.json").write_text('{"step": 2}')
    assert run.is_done()
    set_state(run, "running")
    assert not run.is_done()


def test_a_reader_never_sees_half_a_state(tmp_path: Path) -> None:
    """Read state.json repeatedly while another process replaces it; every read must parse."""
    run = directory(tmp_path)
    set_state(run, "running")

    def write() -> None:
        for number in range(100):
            append(run.path, Adopted(at=number, state=State("running", number)))

    writer, reads = multiprocessing.get_context("fork").Process(target=write), 0
    writer.start()
    while writer.is_alive():
        assert json.loads((run.path / "state.json").read_text())["state"] == "running"
        reads += 1
    assert writer.exitcode == 0
    assert reads > 20


HOLDER = """
import sys, time
from pathlib import Path
from isoflop.sweeps.runs.directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def start_holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_worker_sees_whether_its_own_launcher_lives(tmp_path: Path) -> None:
    sweep = SweepDirectory(tmp_path / "sweep")
    with sweep.lock():
        token = lock_token(sweep.path)
        worker = SweepDirectory(sweep.path)  # a second lock object blocks this process too
        assert worker.launcher_alive(token)
        assert not worker.launcher_alive("the token of an earlier launcher")
    assert not worker.launcher_alive(token)


def test_json_lines_without_an_object_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"a": 1}\n"x"\n3\n\xff\n{"b": "\xff"}\n{"c": 2}\n{"d"')
    assert RunDirectory(tmp_path).last_metrics() == {"c": 2}
    assert read_json_lines(tmp_path / "metrics.jsonl") == [{"a": 1}, {"b": "\N{REPLACEMENT CHARACTER}"}, {"c": 2}]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run = directory(tmp_path)
    sweep = SweepDirectory(tmp_path)
    write_json(sweep.path / "plan.json", {"runs": []})
    for lock in (run.lock, sweep.lock, partial(membership.add_runs, sweep, [], "extended")):
        with pytest.raises(UserError, match="without locks") as error:
            lock()
        assert os.strerror(code) in str(error.value)
