"""A copied or moved sweep: no command on a copy touches the original's jobs or runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from isoflop.sweeps.runs.directory import HEARTBEAT, IDENTITY, SweepDirectory
from isoflop.sweeps.runs.journal import Planned, Started
from isoflop.sweeps.slurm.jobs import LAUNCH
from isoflop.train.files import write_json
from small_runs import contents

Isoflop = Callable[..., tuple[int, str, str]]
COMMANDS = (["cancel"], ["retry", "--failed"], ["extend", "grid.seeds=[0, 1]"])


@pytest.fixture
def original(sweep: SweepDirectory) -> SweepDirectory:
    """Return a sweep in its own folder, with one run under way in a SLURM job and another still planned."""
    write_json(sweep.path / IDENTITY, {"token": "a", "folder": str(sweep.path)})
    (sweep.path / "jobs").mkdir(exist_ok=True)
    write_json(sweep.path / "jobs" / LAUNCH, {"token": "abc", "folder": "/"})
    for run in sweep.runs()[:2]:
        for name in ("summary.json", "events.jsonl", "state.json"):
            (run.path / name).unlink()
        run.write_event(Planned)
    sweep.runs()[0].write_event(Started, attempt=1, host="node1", job_id="12", machine="node1")
    sweep.runs()[0].give_sign()
    return sweep


@pytest.fixture
def queue(install: Callable[[str, str], None], tmp_path: Path) -> Path:
    """Put one job of the original into SLURM's queue; returns the file that names the cancelled jobs."""
    install("squeue", "echo '12|RUNNING|None|isoflop:abc:worker:1x1-g0-c1-m1.0-t60'")
    install("scancel", f'echo "$@" >> {tmp_path}/cancelled')
    return tmp_path / "cancelled"


def copy_of(sweep: SweepDirectory) -> SweepDirectory:
    return SweepDirectory(Path(shutil.copytree(sweep.path, sweep.path.with_name("copy"))))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_copy_is_left_alone(original: SweepDirectory, queue: Path, isoflop: Isoflop, command: list[str]) -> None:
    copy = copy_of(original)
    before = contents(original.path), contents(copy.path)
    code, _, message = isoflop(command[0], copy.path, *command[1:])
    assert code != 0
    assert f"{copy.path} is a copy of {original.path}" in message
    assert "isoflop adopt" in message
    assert (contents(original.path), contents(copy.path)) == before
    assert json.loads(isoflop("status", copy.path, "--json")[1])["copy_of"] == str(original.path)

    assert isoflop("adopt", copy.path)[0] == 0
    assert [run.state().state for run in copy.runs()[:2]] == ["planned", "planned"]
    assert not (copy.runs()[0].path / HEARTBEAT).exists()
    assert isoflop("cancel", copy.path)[0] == 0
    assert not queue.exists(), "the original's job was cancelled"
    assert contents(original.path) == before[0]
    assert json.loads(isoflop("status", copy.path, "--json")[1])["copy_of"] is None
    assert isoflop("adopt", copy.path)[0] != 0, "it is no copy any more"

    assert isoflop("cancel", original.path)[0] == 0
    assert queue.read_text().split() == ["12"]


def test_a_copy_is_refused_while_a_launcher_holds_the_original(original: SweepDirectory, isoflop: Isoflop) -> None:
    (original.path / "jobs" / LAUNCH).unlink()
    copy = copy_of(original)
    with original.lock():
        code, _, message = isoflop("cancel", copy.path)
        assert code != 0
        assert f"{copy.path} is a copy of {original.path}" in message
    assert isoflop("cancel", copy.path)[0] == 0, "nothing runs in the original any more"
    assert json.loads((copy.path / IDENTITY).read_text())["folder"] == str(copy.path)


def test_a_moved_sweep_keeps_its_jobs(original: SweepDirectory, queue: Path, isoflop: Isoflop) -> None:
    moved = SweepDirectory(original.path.rename(original.path.with_name("moved")))
    assert isoflop("cancel", moved.path)[0] == 0
    assert queue.read_text().split() == ["12"]


@pytest.mark.parametrize("name", ["runs/RUN", "runs/RUN/checkpoints", "fit"])
@pytest.mark.parametrize("command", ["doctor", "report", "retry", "cancel"])
def test_nothing_is_changed_through_a_link_that_leads_out_of_the_sweep(
    sweep: SweepDirectory, isoflop: Isoflop, name: str, command: str, tmp_path: Path
) -> None:
    link, elsewhere = sweep.path / name.replace("RUN", sweep.runs()[0].run_id), tmp_path / "elsewhere"
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    (elsewhere / ".state.json.abcdefgh").write_text("half")
    os.utime(elsewhere / ".state.json.abcdefgh", (0, 0))
    before = contents(elsewhere)
    code, output, message = isoflop(command, sweep.path)
    assert code != 0
    assert f"{link} is a link to {elsewhere}, outside of the sweep" in " ".join((output + message).split())
    assert contents(elsewhere) == before


def test_the_folder_may_be_a_link_and_the_doctor_removes_to_the_trash(sweep: SweepDirectory, isoflop: Isoflop) -> None:
    link = sweep.path.with_name("link")
    link.symlink_to(sweep.path)
    left = sweep.path / "fit" / ".law.json.abcdefgh"
    left.write_text("half")
    os.utime(left, (0, 0))
    code, output, _ = isoflop("doctor", link)
    assert (code, left.exists()) == (0, False)
    assert "moved to trash" in output
    assert (sweep.path / "trash" / "fit" / left.name).read_text() == "half"
