"""`isoflop doctor` finds each kind of damage, repairs it if possible, and then no longer finds it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from isoflop.sweeps.observe import doctor, status
from isoflop.sweeps.observe.doctor import Fault, examine_sweep
from isoflop.sweeps.observe.status import sweep_status
from isoflop.sweeps.results import accounting
from isoflop.sweeps.results.finish import cost_lines, write_results
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.journal import JOURNAL, Started
from isoflop.train.files import write_json
from small_runs import SMOKE, Patch, contents, set_state

LONG_AGO = time.time() - 2 * doctor.OLD_SECONDS


def first_run(sweep: SweepDirectory) -> RunDirectory:
    return sweep.runs()[0]


def checkpoint(sweep: SweepDirectory) -> Path:
    return first_run(sweep).path / str((first_run(sweep).summary() or {})["checkpoint"])


def kinds(findings: list[Fault]) -> list[str]:
    return sorted({finding.kind for finding in findings})


def leave(path: Path, text: str = "half") -> None:
    """Write a file and date it back, as a writer leaves it that was killed long ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (LONG_AGO, LONG_AGO))


def tear_metrics(sweep: SweepDirectory) -> None:
    with (first_run(sweep).path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')


def tear_attempts(sweep: SweepDirectory) -> None:
    path = first_run(sweep).path / JOURNAL
    path.write_text("\0\0\0\n" + path.read_text())


def cut_a_checkpoint_of_an_unfinished_run(sweep: SweepDirectory) -> None:
    path = checkpoint(sweep) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    unfinish(sweep, "preempted")


def unfinish(sweep: SweepDirectory, state: str) -> None:
    (first_run(sweep).path / "summary.json").unlink()
    set_state(first_run(sweep), state, reason="a test")


def kill(sweep: SweepDirectory) -> None:
    run = first_run(sweep)
    (run.path / "summary.json").unlink()
    set_state(run, "planned")
    run.write_event(Started, attempt=2, job_id="1", host="node7", machine=socket.gethostname())
    run.give_sign()
    os.utime(run.path / "heartbeat", (LONG_AGO, LONG_AGO))


def forget_a_sign_of_life(sweep: SweepDirectory) -> None:
    first_run(sweep).give_sign()


def cancel_without_a_worker(sweep: SweepDirectory) -> None:
    first_run(sweep).ask_cancel("somebody")
    unfinish(sweep, "preempted")


def cancel_what_is_done(sweep: SweepDirectory) -> None:
    first_run(sweep).ask_cancel("somebody")


def score_what_is_not_done(sweep: SweepDirectory) -> None:
    leave(first_run(sweep).path / "eval" / "step_64.json", "{}")
    unfinish(sweep, "planned")


def break_the_table(sweep: SweepDirectory) -> None:
    text = (sweep.path / "table.csv").read_text()
    (sweep.path / "table.csv").write_text(text[: len(text) // 2])


def change_the_view(sweep: SweepDirectory) -> None:
    run = first_run(sweep)
    (run.path / "state.json").write_text(json.dumps(asdict(run.state()) | {"state": "failed"}))


# File of a run or of the sweep, its content after a writer was killed (None: no file), and the kinds of findings.
LEFT = [
    ("RUN/state.json", '{"state": "do', ["state"]),
    ("RUN/state.json", None, ["state"]),
    ("RUN/summary.json", "{", ["result", "unreadable"]),
    ("RUN/summary.json", None, ["result"]),
    ("RUN/.state.json.ab_12xyz", "half", ["temporary"]),
    ("RUN/.reserve", "room", ["temporary"]),
    (".now-abcdefgh", "half", ["temporary"]),
    ("fit/.law.json.abcdefgh", "half", ["temporary"]),
    ("RUN/checkpoints/.step_99.abcdefgh/model.safetensors", "half", ["half-written"]),
    ("RUN/checkpoints/step_1/model.safetensors", "half", ["half-written"]),
    ("RUN/eval/step_64.json", '{"tasks"', ["unreadable"]),
    ("jobs/launch.json", "{", ["unreadable"]),
]
DISTURBED = [
    (tear_metrics, ["torn"]),
    (tear_attempts, ["torn"]),
    (cut_a_checkpoint_of_an_unfinished_run, ["half-written"]),
    (kill, ["orphan"]),
    (forget_a_sign_of_life, ["heartbeat"]),
    (cancel_without_a_worker, ["cancel"]),
    (cancel_what_is_done, ["cancel"]),
    (score_what_is_not_done, ["scores"]),
    (break_the_table, ["unreadable"]),
    (change_the_view, ["state"]),
]


def check_repair(sweep: SweepDirectory, expected: list[str]) -> None:
    before = contents(sweep.path)
    findings = examine_sweep(sweep, repair=False)
    assert kinds(findings) == expected
    assert all(finding.is_left for finding in findings)
    assert contents(sweep.path) == before, "a dry run changes nothing"
    mended = examine_sweep(sweep, repair=True)
    assert kinds(mended) == expected
    assert not any(finding.is_left for finding in mended), mended
    assert examine_sweep(sweep, repair=True) == []


@pytest.mark.parametrize(("name", "text", "kind"), LEFT)
def test_what_a_writer_left_is_repaired(sweep: SweepDirectory, name: str, text: str | None, kind: list[str]) -> None:
    path = sweep.path / name.replace("RUN", f"runs/{first_run(sweep).run_id}")
    path.unlink() if text is None else leave(path, text)
    check_repair(sweep, kind)


@pytest.mark.parametrize(("damage", "kind"), DISTURBED)
def test_damage_is_repaired(sweep: SweepDirectory, damage: Callable[[SweepDirectory], None], kind: list[str]) -> None:
    before, state = contents(sweep.path), first_run(sweep).state()
    assert examine_sweep(sweep, repair=True, deep=True) == []
    assert contents(sweep.path) == before, "an undisturbed sweep is clean"
    damage(sweep)
    check_repair(sweep, kind)
    assert damage is not change_the_view or first_run(sweep).state() == state


def test_a_killed_run_is_reconciled_unless_it_gives_signs_of_life_elsewhere(sweep: SweepDirectory) -> None:
    kill(sweep)
    run = first_run(sweep)
    text = (run.path / JOURNAL).read_text()
    (run.path / JOURNAL).write_text(text.replace(f'"machine":"{socket.gethostname()}"', '"machine":"far"'))
    run.give_sign()
    assert examine_sweep(sweep, repair=True) == []
    assert run.state().state == "running"
    (run.path / JOURNAL).write_text(text)
    os.utime(run.path / "heartbeat", (LONG_AGO, LONG_AGO))
    examine_sweep(sweep, repair=True)
    assert run.state().state == "failed"
    assert run.record().attempts[-1].cause == "killed"
    assert run.last_sign() is None


def test_a_run_without_its_summary_is_planned_and_keeps_its_checkpoint(sweep: SweepDirectory) -> None:
    folder = checkpoint(sweep)
    (first_run(sweep).path / "summary.json").unlink()
    (finding,) = examine_sweep(sweep, repair=True)
    assert first_run(sweep).state().state == "planned"
    assert folder.is_dir()
    assert f"isoflop retry {sweep.path} {first_run(sweep).run_id}" in finding.how


def test_new_files_and_running_runs_are_left_alone(sweep: SweepDirectory) -> None:
    (sweep.path / ".plan.json.abcdefgh").write_text("a writer of this moment")
    run = first_run(sweep)
    tear_metrics(sweep)
    leave(run.path / "checkpoints" / ".step_99.abcdefgh" / "model.safetensors")
    set_state(run, "running", attempt=2, job_id="1")
    before = contents(sweep.path)
    with run.lock():  # its trainer
        assert examine_sweep(sweep, repair=True) == []
    assert contents(sweep.path) == before


def test_a_checkpoint_whose_sums_do_not_hold_is_seen_by_a_deep_look(sweep: SweepDirectory) -> None:
    path = checkpoint(sweep) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    unfinish(sweep, "preempted")
    assert examine_sweep(sweep, repair=False, deep=True) == [], "a deep check would block its worker for minutes"
    set_state(first_run(sweep), "failed", reason="x")
    assert examine_sweep(sweep, repair=False) == []
    (finding,) = examine_sweep(sweep, repair=True, deep=True)
    assert "does not match its checksum" in finding.what
    assert not checkpoint_folder(sweep).exists()
    assert examine_sweep(sweep, repair=True, deep=True) == []


def checkpoint_folder(sweep: SweepDirectory) -> Path:
    return first_run(sweep).path / "checkpoints" / "step_64"


def test_the_last_checkpoint_of_a_finished_run_stays_and_the_user_is_told(sweep: SweepDirectory) -> None:
    (checkpoint(sweep) / "model.safetensors").write_text("")
    (finding,) = examine_sweep(sweep, repair=True)
    assert finding.severity == "note"  # no task of this sweep needs it
    assert "its losses remain valid" in finding.how
    settings = yaml.safe_load((sweep.path / "sweep.yaml").read_text())
    settings["config"]["evaluate"]["tasks"] = ["small"]
    (sweep.path / "sweep.yaml").write_text(yaml.safe_dump(settings))
    (finding,) = examine_sweep(sweep, repair=True)
    assert finding.is_left
    (first_run(sweep).path / "summary.json").unlink()  # so that it is no longer done
    examine_sweep(sweep, repair=True)
    assert not checkpoint_folder(sweep).exists()
    assert first_run(sweep).state().state == "planned"


def test_faults_that_need_the_user_are_left(sweep: SweepDirectory) -> None:
    (sweep.path / "runs" / "0123456789").mkdir()
    (finding,) = examine_sweep(sweep, repair=True)
    assert (finding.kind, finding.is_left) == ("stranger", False)
    assert (sweep.path / "runs" / "0123456789").exists()
    path = first_run(sweep).path / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    for _ in range(2):
        (finding, _) = examine_sweep(sweep, repair=True)
        assert (finding.kind, finding.is_left) == ("config", True)


@pytest.mark.parametrize(("change", "kind"), [
    ({"isoflop_version": "0.0.7"}, "version"), ({"recipe": 1}, "version"), (None, "settings"),
])  # fmt: skip
def test_a_sweep_of_another_version_is_left(sweep: SweepDirectory, change: dict[str, object] | None, kind: str) -> None:
    settings = yaml.safe_load((sweep.path / "sweep.yaml").read_text())
    (sweep.path / "sweep.yaml").write_text("a: [" if change is None else yaml.safe_dump(settings | change))
    tear_metrics(sweep)
    before = contents(sweep.path)
    findings = examine_sweep(sweep, repair=True)
    assert kinds(findings) == sorted(["torn", kind])
    assert all(finding.is_left for finding in findings)
    assert all(str(value) in findings[0].what for value in (change or {}).values())
    assert contents(sweep.path) == before


def test_the_doctor_says_which_steps_of_a_run_are_not_recorded(sweep: SweepDirectory) -> None:
    run = first_run(sweep)
    steps = run.config().steps
    text = (run.path / JOURNAL).read_text()
    (run.path / "metrics.jsonl").unlink()
    (run.path / JOURNAL).write_text(text.replace('"attempt":1,', '"attempt":1,"first_step":10,'))
    (finding,) = examine_sweep(sweep, repair=True)
    assert (finding.kind, finding.is_left) == ("books", False)
    expected = f"no record of the attempts that trained 10 of its {steps} steps and metrics.jsonl with its curve"
    assert finding.what == expected
    (run.path / JOURNAL).unlink()
    assert f"that trained {steps} of its {steps} steps" in examine_sweep(sweep, repair=True)[0].what
    assert accounting.account(sweep)["unrecorded"] == 1
    assert "the attempts of 1 run are not recorded" in cost_lines(accounting.account(sweep))[1]


DEEP = "[" * 5000 + "]" * 5000
FORMS = [
    ("runs/RUN/state.json", '{"state": "done", "attempt": "2"}', "Expected int, got str"),
    ("runs/RUN/summary.json", '{"step": 1}', "summary.json lacks D, N_total"),
    ("runs/RUN/failure.json", '{"hosts": 3}', "failure.json has invalid content"),
    ("runs/RUN/events.jsonl", '{"event": "started", "at": 1.0, "attempt": -1}', " of events.jsonl cannot be read"),
    ("runs/RUN/attempts.jsonl", DEEP, " of attempts.jsonl cannot be read"),
    ("runs/RUN/config.yaml", DEEP, "nested too deeply"),
    ("plan.json", '{"runs": [{"run_id": "../x"}]}', "plan.json has invalid content"),
    ("sweep.yaml", "config: {cluster: {heartbeat_seconds: soon}}", "got str at config.cluster.heartbeat_seconds"),
    ("added.json", '{"RUN": 3}', "added.json has invalid content"),
    ("jobs/launch.json", '{"token": [1]}', "launch.json has invalid content"),
]


@pytest.mark.parametrize(("name", "text", "message"), FORMS)
def test_a_file_of_another_form_is_named_and_no_command_fails(
    sweep: SweepDirectory, isoflop: Callable[..., tuple[int, str, str]], name: str, text: str, message: str
) -> None:
    """Check two commands; test_attacked.py runs all of them on damaged files."""
    run = first_run(sweep)
    path = sweep.path / name.replace("RUN", run.run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("RUN", run.run_id))
    findings = examine_sweep(sweep, repair=False)
    assert [finding for finding in findings if message in finding.what], [finding.what for finding in findings]
    for command in ("status", "cancel"):
        code, _, err = isoflop(command, sweep.path)
        assert code in (0, 1, 2)
        assert err.count("\n") == (code == 2), err


@pytest.mark.parametrize(("live", "memory", "is_said"), [
    ("", {"over": False}, True), ("", {}, True), ("4", {"over": False}, False), ("", {"over": True}, False),
])  # fmt: skip
def test_missing_keepers_are_reported(
    sweep: SweepDirectory, install: Callable[[str, str], None], live: str, memory: dict, is_said: bool
) -> None:
    install("squeue", f"echo '{live}|PENDING|BeginTime|isoflop:0:keeper:'" if live else "true")
    write_json(sweep.path / "jobs" / "launch.json", {"token": "0", "folder": "/"})
    set_state(first_run(sweep), "planned")
    (first_run(sweep).path / "summary.json").unlink()
    write_json(sweep.path / "jobs" / "keeper.json", memory)
    assert kinds(examine_sweep(sweep, repair=True)) == ["keepers"] * is_said
    assert sweep_status(sweep)["unattended"] == is_said
    (sweep.path / "cancel.json").write_text("{}")  # a cancelled sweep needs no keeper
    assert examine_sweep(sweep, repair=True) == []


def test_a_full_disk_and_locks_without_effect_are_reported(sweep: SweepDirectory, monkeypatch: Patch) -> None:
    assert doctor.lock_problem(sweep.path) is None
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e6))
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)  # like a file system that grants every lock
    findings = examine_sweep(sweep, repair=True)
    assert kinds(findings) == ["disk", "locks"]
    assert all(finding.is_left for finding in findings)

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)  # filelock calls it too, for each run
    *_, last = examine_sweep(sweep, repair=True)
    assert (last.kind, last.where) == ("locks", sweep.path)
    assert "(No locks available), so runs were not checked" in last.what


@pytest.mark.slow
def test_a_running_sweep_is_clean_at_every_moment_and_is_not_disturbed(smoke: tuple[Path, str], tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(root / "sweep.py"), *SMOKE, "grid.tokens=[32768]", f"output_root={tmp_path}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sweep, checks = SweepDirectory(tmp_path / "smoke"), 0
    while process.poll() is None:
        if (sweep.path / "plan.json").exists():
            assert examine_sweep(sweep, repair=True) == []
            checks += 1
        time.sleep(0.1)  # so that the checks do not slow down the sweep
    assert process.wait() == 0
    assert checks > 3
    undisturbed = {run.run_id: (run.summary() or {})["val_loss"] for run in SweepDirectory(smoke[0]).runs()}
    losses = {run.run_id: (run.summary() or {})["val_loss"] for run in sweep.runs()}
    assert len(losses) == 2
    assert losses.items() <= undisturbed.items()
    assert all(len(run.record().attempts) == 1 for run in sweep.runs())


@pytest.mark.usefixtures("quick_pictures")
def test_status_and_doctor_show_a_failed_fit_until_one_succeeds(sweep: SweepDirectory, monkeypatch: Patch) -> None:
    def fail(*_: object, **named: object) -> None:
        raise ValueError("the table is no table")

    with monkeypatch.context() as patched:
        patched.setattr("isoflop.fit.analyze", fail)
        with pytest.raises(ValueError, match="the table is no table"):
            write_results(sweep, force=True)
    assert status.sweep_status(sweep)["fit_failure"] == "the table is no table"
    (finding,) = doctor.examine_sweep(sweep, repair=True)
    assert (finding.kind, finding.is_left) == ("fit", True)
    assert "the table is no table" in finding.what
    write_results(sweep, force=True)
    assert status.sweep_status(sweep)["fit_failure"] is None
    assert doctor.examine_sweep(sweep, repair=True) == []


def test_a_fit_whose_jobs_were_killed_is_such_a_state_too(sweep: SweepDirectory) -> None:
    (sweep.path / "jobs").mkdir(exist_ok=True)
    newest = (sweep.path / "fit" / "law.json").stat().st_mtime + 1
    memory = {"over": True, "fits": {"newest": newest, "tries": 3}}
    write_json(sweep.path / "jobs" / "keeper.json", memory | {"over": False})
    assert status.fit_failure(sweep) is None  # the keeper may start another fit
    write_json(sweep.path / "jobs" / "keeper.json", memory)
    assert "3 fit jobs ended without a law" in str(status.fit_failure(sweep))
