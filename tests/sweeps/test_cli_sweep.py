"""The commands that manage a sweep, as they are typed: what they print, their exit codes, what the shell completes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from isoflop.sweeps.execute import conduct
from isoflop.sweeps.growth import suggest
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.train.files import write_json

Isoflop = Any


def test_status_shows_more_of_a_large_sweep_when_asked(
    isoflop: Isoflop, sweep: SweepDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isoflop.sweeps.observe.status.ROWS", 3)
    first, *others = sweep.runs()
    first.set_state("failed", reason="the disk is full")
    code, output, _ = isoflop("status", sweep.path)
    assert code == 0
    assert f"{first.run_id} failed: the disk is full" in output
    assert "3 done" in output
    assert "not shown: 3 done; --all shows every run" in output
    assert not any(other.run_id in output for other in others)
    _, output, _ = isoflop("status", sweep.path, "--all")
    assert all(other.run_id in output for other in others)


def test_logs_without_a_run_are_of_what_runs_or_failed(isoflop: Isoflop, sweep: SweepDirectory) -> None:
    first = sweep.runs()[0]
    first.set_state("failed", reason="x")
    code, output, _ = isoflop("logs", sweep.path)
    assert code == 0
    assert {line.split(":")[0] for line in output.splitlines()} == {f"{first.run_id} failed"}
    code, output, _ = isoflop("logs", sweep.path, first.run_id, "--follow")
    assert code == 0
    assert "attempt 1 on " in output


@pytest.mark.parametrize("command", [("status",), ("logs",), ("logs", "RUN"), ("doctor",), ("cancel",), ("retry",)])
def test_no_byte_of_a_file_reaches_the_terminal_as_a_command_to_it(
    isoflop: Isoflop, sweep: SweepDirectory, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    one = sweep.runs()[0]
    one.set_state("failed", reason="\x1b[2Jgone\x07")
    one.log("\x1b]0;title\x07")
    write_json(one.path / "cancel.json", {"by": "\x9b31m", "at": 0.0})
    monkeypatch.setattr(conduct, "resume", lambda sweep, only: 0)
    code, *said = isoflop(command[0], sweep.path, *[one.run_id for _ in command[1:]])
    assert code in (0, 1)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(said))
    assert r"\x1b" in "".join(said) or command[0] in ("doctor", "cancel")


def test_the_doctor_s_exit_code_says_whether_anything_is_left(isoflop: Isoflop, sweep: SweepDirectory) -> None:
    assert isoflop("doctor", sweep.path)[:2] == (0, "nothing is wrong\n")
    first, second = sweep.runs()[:2]
    (first.path / "state.json").write_text("{")
    code, output, _ = isoflop("doctor", sweep.path, "--dry-run", "--json")
    assert code == 1
    (finding,) = json.loads(output)
    assert (finding["kind"], finding["mended"]) == ("state", False)
    assert isoflop("doctor", sweep.path)[0] == 0
    (second.path / "config.yaml").write_text("{")
    assert isoflop("doctor", sweep.path)[0] == 1


@pytest.mark.parametrize("where", ["nowhere/more.yaml", "."])
def test_a_suggestion_that_cannot_be_written_is_one_sentence(
    isoflop: Isoflop, sweep: SweepDirectory, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(suggest, "suggest_runs", lambda *_, **__: SimpleNamespace(grid={"kind": "points"}))
    code, _, error = isoflop("suggest", sweep.path, "--budget", 1e12, "--write", tmp_path / where)
    assert code == 2
    assert f"--write is {tmp_path / where}" in error
    assert "name a file" in error
    assert not (tmp_path / "nowhere").exists()


def test_cancel_and_retry_pass_on_their_exit_codes(
    isoflop: Isoflop, sweep: SweepDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conduct, "resume", lambda sweep, only: 1)
    first = sweep.runs()[0]
    (first.path / "summary.json").unlink()
    first.set_state("preempted", reason="signal SIGTERM")
    code, output, _ = isoflop("cancel", sweep.path, first.run_id[:6])
    assert (code, output) == (0, f"run {first.run_id} is cancelled\n")
    assert isoflop("retry", sweep.path)[0] == 0  # it was cancelled by hand, and is not among the failed
    code, output, _ = isoflop("retry", sweep.path, first.run_id[:6])
    assert code == 1
    assert "is tried again; it was cancelled" in output
    isoflop("cancel", sweep.path, first.run_id[:6])
    assert f"run {first.run_id} is tried again" in isoflop("retry", sweep.path, "--cancelled")[1]


def test_what_a_command_has_changed_is_json_alone(isoflop: Isoflop, sweep: SweepDirectory) -> None:
    first, second = sweep.runs()[:2]
    for item in (first, second):
        (item.path / "summary.json").unlink()
        item.set_state("preempted", reason="signal SIGTERM")
    code, output, said = isoflop("cancel", sweep.path, first.run_id[:6], "--json")
    assert code == 0
    (changed,) = json.loads(output)["changed"]
    assert (changed["run_id"], changed["state"]) == (first.run_id, "cancelled")
    assert f"run {first.run_id} is cancelled" in said


def test_report_writes_its_files_again_and_prints_the_law_as_json(isoflop: Isoflop, sweep: SweepDirectory) -> None:
    shutil.rmtree(sweep.path / "fit")
    (sweep.path / "table.csv").unlink()
    code, output, _ = isoflop("report", sweep.path, "--json")
    assert code == 0
    assert (sweep.path / "fit" / "report.html").exists()
    assert (sweep.path / "table.csv").exists()
    assert json.loads(output)["warnings"] == json.loads((sweep.path / "fit" / "law.json").read_text())["warnings"]


@pytest.mark.parametrize("command", ["status", "logs", "retry", "cancel", "extend", "doctor", "sync", "report"])
def test_a_folder_that_is_no_sweep_is_one_sentence(isoflop: Isoflop, command: str, tmp_path: Path) -> None:
    code, output, error = isoflop(command, tmp_path)
    assert code == 2
    assert "is not a sweep directory" in error
    assert len(error.strip().splitlines()) == 1
    assert not output


@pytest.mark.parametrize("command", ["logs", "retry", "cancel"])
def test_a_run_that_is_not_there_is_one_sentence(isoflop: Isoflop, sweep: SweepDirectory, command: str) -> None:
    code, _, error = isoflop(command, sweep.path, "zzz")
    assert code == 2
    assert "run is 'zzz', which must begin exactly one run id" in error
    assert "it begins none" in error


@pytest.mark.parametrize("command", ["status", "logs", "retry", "cancel", "report"])
def test_a_sweep_of_another_version_is_one_sentence(isoflop: Isoflop, sweep: SweepDirectory, command: str) -> None:
    plan = json.loads((sweep.path / "plan.json").read_text())
    for planned in plan["runs"]:
        del planned["estimated_seconds"]
    (sweep.path / "plan.json").write_text(json.dumps(plan))
    code, _, error = isoflop(command, sweep.path)
    assert code == 2
    assert "missing required field estimated_seconds" in error
    assert "use the version that wrote it" in error


def test_the_shell_completes_run_ids(sweep: SweepDirectory) -> None:
    run_id = sweep.runs()[0].run_id
    environment = {
        **os.environ, "_ISOFLOP_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": f"isoflop logs {sweep.path} {run_id[:4]}",
    }  # fmt: skip
    code = "import sys; sys.argv = ['isoflop']; from isoflop.sweeps.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run_id in done.stdout
    assert "done, N 218k D 32.8k" in done.stdout
    assert not any(other.run_id in done.stdout for other in sweep.runs()[1:])
