"""wandb is a view: offline without a login, and never the reason that a run stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from isoflop.train import tracker
from isoflop.train.config import ModelConfig, RunConfig, TrackerConfig, run_id
from isoflop.train.files import JsonLines
from isoflop.train.logs.sources import find_sources, read_runs
from isoflop.train.tracker import Tracker


@pytest.fixture
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def run_config(**fields: Any) -> RunConfig:
    return RunConfig(model=ModelConfig(vocab_size=256), **fields)


class FakeRun:
    """Stand-in for wandb's run that fails in the chosen method."""

    def __init__(self, failing: str) -> None:
        self.failing, self.logged, self.exit_code = failing, [], None  # type: ignore[var-annotated]
        self.summary: dict[str, Any] = {}
        self.settings = SimpleNamespace(mode="online")

    def define_metric(self, name: str, **options: Any) -> None:
        """Ignore axes."""

    def log(self, record: dict[str, Any], step: int) -> None:
        if self.failing == "log":
            raise RuntimeError("the quota is used up")
        self.logged.append((step, record))

    def finish(self, exit_code: int) -> None:
        if self.failing == "finish":
            raise TimeoutError("the network\nis gone")
        self.exit_code = exit_code


def fake(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> tuple[FakeRun, list[dict[str, Any]]]:
    import wandb

    run, calls = FakeRun(failing), []

    def init(**kwargs: Any) -> FakeRun:
        calls.append(kwargs)
        if failing == "init":
            raise wandb.errors.CommError("no server")
        return run

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(tracker, "unreachable", lambda: None)
    return run, calls


@pytest.mark.usefixtures("logged_out")
def test_runs_of_one_process_each_keep_their_own_lines_and_others_are_read(tmp_path: Path) -> None:
    """Read a file of wandb's own offline mode, with more than a block of records, which may be torn."""
    import wandb

    messages: list[str] = []
    configs = [run_config(seed=seed, tracker=TrackerConfig(project="test")) for seed in (0, 1)]
    views = [Tracker(config, run_id(config), tmp_path / run_id(config), messages.append) for config in configs]
    for step in (1, 2):
        for number, view in enumerate(views):
            view.log({"step": step, f"only_of_{number}": float(step)})
    for view in views:
        view.finish({"val_loss": 1.5})
    options: dict[str, Any] = {"mode": "offline", "dir": tmp_path / "other", "settings": {"silent": True}}
    facts = {"model": {"n_params": 1000, "note": "x" * 70_000}, "seq_len": 8}
    other = wandb.init(project="p", name="wide", config=facts, **options)
    for step in range(10, 101, 10):
        other.log({"global_step": step, "train": {"loss": 30 / step}, "val/loss": 2.0, "consumed_samples": step})
    other.finish()
    wandb.teardown()  # its service writes the files, on a busy machine after `finish`
    assert messages == []
    for number, config in enumerate(configs):  # without a login they are offline
        [file] = (tmp_path / run_id(config) / "wandb").glob("offline-run-*/*.wandb")
        assert file.name == f"run-{run_id(config)}.wandb"
        assert f"only_of_{number}".encode() in file.read_bytes()
        assert f"only_of_{1 - number}".encode() not in file.read_bytes()
    [source] = find_sources(tmp_path / "other")
    [run] = read_runs(source)
    assert (run.kind, run.name, run.facts["N_total"]) == ("wandb", "wide", 1000)
    assert run.columns["tokens"] == "consumed_samples * 8"
    assert run.metrics["step"].tolist() == list(range(10, 101, 10))
    assert run.metrics["train_loss"].tolist() == pytest.approx([30 / step for step in run.metrics["step"]])
    [file] = (tmp_path / "other").rglob("*.wandb")
    file.write_bytes(file.read_bytes().rpartition(b"consumed_samples")[0])
    [torn] = read_runs(source)
    assert len(torn.metrics) > 5
    assert torn.remarks == [f"{file} has 1 damaged record, left out"]


@pytest.mark.usefixtures("logged_out")
def test_a_login_means_online_and_resuming_the_same_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, calls = fake(monkeypatch)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    config = run_config(name="small", tracker=TrackerConfig(group="sweep", directory=str(tmp_path / "elsewhere")))
    view = Tracker(config, "0123456789", tmp_path, print)
    assert (calls[0]["mode"], calls[0]["resume"], calls[0]["id"]) == ("online", "allow", "0123456789")
    assert (calls[0]["name"], calls[0]["group"], calls[0]["dir"]) == ("small", "sweep", str(tmp_path / "elsewhere"))
    assert calls[0]["config"]["optimizer"]["beta2"] == 0.95
    line = {"step": 7, "tokens": 70, "train_loss": 1.0, "lr": 0.1, "mfu": 0.4, "val_loss": 2.0, "load_max": [1.5, 2.0]}
    view.log(line)
    view.finish({"val_loss": 1.5})
    view.finish()
    shown = {"step": 7, "tokens": 70, "train/loss": 1.0, "train/lr": 0.1, "speed/mfu": 0.4, "val/loss": 2.0}
    assert run.logged == [(7, {**shown, "experts/load_max/0": 1.5, "experts/load_max/1": 2.0})]
    assert run.summary == {"val_loss": 1.5}
    assert run.exit_code == 0
    # The config overrides what is detected, and the environment overrides a login.
    Tracker(run_config(tracker=TrackerConfig(mode="offline")), "0123456789", tmp_path, print)
    monkeypatch.setenv("WANDB_MODE", "offline")
    Tracker(run_config(), "0123456789", tmp_path, print)
    assert [call["mode"] for call in calls] == ["online", "offline", "offline"]


def test_the_view_begins_with_what_the_file_has_and_gets_no_step_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, _ = fake(monkeypatch)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step, loss in ((1, 4.0), (2, 3.0), (3, 2.5), (2, 3.0), (4, 2.0)):
        lines.write({"step": step, "train_loss": loss})
    lines.close()
    view = Tracker(run_config(tracker=TrackerConfig(mode="online")), "0123456789", tmp_path, print)
    for step in (3, 4, 5):
        view.log({"step": step, "train_loss": 1.0})
    view.finish()
    assert [step for step, _ in run.logged] == [1, 2, 3, 4, 5]
    assert run.exit_code == 1  # the run has not ended
    assert json.loads((tmp_path / tracker.PUSHED).read_text()) == {"step": 5, "finished": False, "scores": 0}
    # Offline, it is unknown what the directories of earlier attempts hold: a new one gets everything.
    run.logged.clear()
    run.settings.mode = "offline"
    (tmp_path / tracker.PUSHED).unlink()
    Tracker(run_config(tracker=TrackerConfig(mode="offline")), "0123456789", tmp_path, print).finish()
    assert [step for step, _ in run.logged] == [1, 2, 3, 4]
    assert not (tmp_path / tracker.PUSHED).exists()


@pytest.mark.usefixtures("logged_out")
def test_where_no_server_answers_auto_is_offline_and_online_is_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, calls = fake(monkeypatch)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(tracker, "unreachable", lambda: "it does not answer")
    messages: list[str] = []
    Tracker(run_config(), "0123456789", tmp_path, messages.append)
    assert [call["mode"] for call in calls] == ["offline"]
    assert "it does not answer" in messages[0]
    Tracker(run_config(tracker=TrackerConfig(mode="online")), "0123456789", tmp_path, messages.append)
    assert len(calls) == 1
    assert "it does not answer" in messages[1]


@pytest.mark.usefixtures("logged_out")
def test_a_netrc_counts_as_a_login_and_a_broken_one_does_not(tmp_path: Path) -> None:
    assert not tracker.logged_in()
    (tmp_path / "home").mkdir(exist_ok=True)  # wandb keeps its settings there
    netrc = tmp_path / "home" / ".netrc"
    host = urlsplit(tracker.server()).hostname
    netrc.write_text(f"machine {host}\n  login user\n  password secret\n")
    netrc.chmod(0o600)
    assert tracker.logged_in()
    netrc.write_text("machine")
    assert not tracker.logged_in()


@pytest.mark.usefixtures("logged_out")
@pytest.mark.parametrize(("failing", "action"), [("init", "starting"), ("log", "logging"), ("finish", "finishing")])
def test_a_failure_is_said_once_and_stops_nothing(
    failing: str, action: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, failing)
    messages: list[str] = []
    view = Tracker(run_config(), "0123456789", tmp_path, messages.append)
    for step in (1, 2, 3):
        view.log({"step": step})
    view.finish({"val_loss": 1.0})
    view.finish()
    assert len(messages) == 1
    assert action in messages[0]
    assert "\n" not in messages[0]
    assert not (tmp_path / tracker.PUSHED).exists()


def test_none_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, calls = fake(monkeypatch)
    view = Tracker(run_config(tracker=TrackerConfig(kind="none")), "0123456789", tmp_path, print)
    view.log({"step": 1})
    view.finish({"val_loss": 1.0})
    assert calls == list(tmp_path.iterdir()) == []


KILLED = """
import os, sys
from pathlib import Path
from isoflop.train.config import ModelConfig, RunConfig, TrackerConfig, run_id
from isoflop.train.files import JsonLines
from isoflop.train.tracker import Tracker

config = RunConfig(model=ModelConfig(vocab_size=256), tracker=TrackerConfig(mode="offline"))
directory = Path(sys.argv[1])
lines = JsonLines(directory / "metrics.jsonl")
view = Tracker(config, run_id(config), directory, print)
for step in range(int(sys.argv[2]), int(sys.argv[3]) + 1):
    record = {"step": step, "train_loss": 1.0 / step}
    lines.write(record)
    view.log(record)
if sys.argv[4] == "killed":
    os.kill(os.getpid(), 9)
view.finish({"val_loss": 1.0})
"""


def run_alone(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a separate wandb process; a child of a process that uses wandb would share it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    command = [sys.executable, "-c", program, *arguments]
    environment["WANDB_ERROR_REPORTING"] = "false"
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=False)


# The wandb process inherits the limit on its files; this process lifts it for its own afterwards.
FULL = """
import resource, signal, sys
from pathlib import Path
from isoflop.train.config import ModelConfig, RunConfig, TrackerConfig, run_id
from isoflop.train.tracker import Tracker, server

config = RunConfig(model=ModelConfig(vocab_size=256), tracker=TrackerConfig(mode="offline"))
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
server()  # starts wandb's process
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
view = Tracker(config, run_id(config), Path(sys.argv[1]), print)
for step in range(1, 5001):
    view.log({"step": step, "train_loss": 1.0 / step, "padding": "x" * 100})
view.finish({"val_loss": 1.0})
print("trained to the end")
"""


@pytest.mark.slow
def test_a_full_disk_below_wandb_stops_nothing(tmp_path: Path) -> None:
    process = run_alone(FULL, str(tmp_path))
    assert process.stdout.endswith("trained to the end\n")
    assert max(file.stat().st_size for file in tmp_path.rglob("*.wandb")) <= 4096


@pytest.mark.slow
def test_a_killed_run_that_went_on_offline_is_whole(tmp_path: Path) -> None:
    processes = [
        run_alone(KILLED, str(tmp_path), *arguments) for arguments in (("1", "20", "killed"), ("11", "30", "done"))
    ]
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 0]
    old, new = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert [file.name for folder in (old, new) for file in folder.glob("*.wandb")] == [
        f"run-{run_id(run_config())}.wandb"
    ] * 2
    command = [sys.executable, "-m", "wandb", "beta", "leet", "inspect", "--json", str(new)]
    records = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    history = [json.loads(line) for line in records.splitlines() if '"type":"history"' in line]
    assert [line["history"]["item"]["step"] for line in history] == list(range(1, 31))
