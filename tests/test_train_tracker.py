"""wandb is a view: offline without a login, and never the reason that a run stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from isoflop.train import tracker
from isoflop.train.config import RunConfig, TrackerConfig, run_id
from isoflop.train.tracker import Tracker


@pytest.fixture
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


class FakeRun:
    """Stands for wandb's run; fails where it is told to."""

    def __init__(self, failing: str) -> None:
        self.failing, self.logged, self.finished = failing, [], False  # type: ignore[var-annotated]
        self.summary: dict[str, Any] = {}

    def log(self, record: dict[str, Any], step: int) -> None:
        if self.failing == "log":
            raise RuntimeError("the quota is used up")
        self.logged.append((step, record))

    def finish(self) -> None:
        if self.failing == "finish":
            raise ConnectionError("the network is gone")
        self.finished = True


def fake(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> tuple[FakeRun, list[dict[str, Any]]]:
    import wandb

    run, calls = FakeRun(failing), []

    def init(**kwargs: Any) -> FakeRun:
        calls.append(kwargs)
        if failing == "init":
            raise wandb.errors.CommError("no server")
        return run

    monkeypatch.setattr(wandb, "init", init)
    return run, calls


@pytest.mark.usefixtures("logged_out")
def test_without_a_login_a_real_run_is_offline_and_has_the_id_of_the_run(tmp_path: Path) -> None:
    import wandb

    config = RunConfig(tracker=TrackerConfig(project="test"))
    said: list[str] = []
    view = Tracker(config, run_id(config), tmp_path, said.append)
    assert view._run.id == run_id(config)
    assert view._run.offline
    view.log({"step": 1, "train_loss": 2.0})
    view.finish({"val_loss": 1.5})
    assert said == []
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    [file] = folder.glob("*.wandb")
    assert file.name == f"run-{run_id(config)}.wandb"
    # wandb's own service writes the file, and may still be at it when finish() returns.
    wandb.teardown()
    assert b"train_loss" in file.read_bytes()


@pytest.mark.usefixtures("logged_out")
def test_runs_of_one_process_are_open_side_by_side_and_each_keeps_its_own_lines(tmp_path: Path) -> None:
    import wandb

    said: list[str] = []
    configs = [RunConfig(seed=seed, tracker=TrackerConfig(project="test")) for seed in (0, 1)]
    views = [Tracker(config, run_id(config), tmp_path / run_id(config), said.append) for config in configs]
    for step in (1, 2):
        for number, view in enumerate(views):
            view.log({"step": step, f"only_of_{number}": float(step)})
    for view in views:
        view.finish({"val_loss": 1.5})
    wandb.teardown()
    assert said == []
    for number, config in enumerate(configs):
        [file] = (tmp_path / run_id(config) / "wandb").glob("offline-run-*/*.wandb")
        assert f"only_of_{number}".encode() in file.read_bytes()
        assert f"only_of_{1 - number}".encode() not in file.read_bytes()


@pytest.mark.usefixtures("logged_out")
def test_a_login_means_online_and_resuming_the_same_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, calls = fake(monkeypatch)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    config = RunConfig(name="small", tracker=TrackerConfig(group="sweep", directory=str(tmp_path / "elsewhere")))
    view = Tracker(config, "0123456789", tmp_path, print)
    assert (calls[0]["mode"], calls[0]["resume"], calls[0]["id"]) == ("online", "allow", "0123456789")
    assert (calls[0]["name"], calls[0]["group"], calls[0]["dir"]) == ("small", "sweep", str(tmp_path / "elsewhere"))
    assert calls[0]["config"]["optimizer"]["beta2"] == 0.95
    view.log({"step": 7, "train_loss": 1.0})
    view.finish({"val_loss": 1.5})
    view.finish()
    assert run.logged == [(7, {"step": 7, "train_loss": 1.0})]
    assert run.summary == {"val_loss": 1.5}
    assert run.finished
    # What is asked for goes before what is found, and the environment before a login.
    Tracker(RunConfig(tracker=TrackerConfig(mode="offline")), "0123456789", tmp_path, print)
    monkeypatch.setenv("WANDB_MODE", "offline")
    Tracker(RunConfig(), "0123456789", tmp_path, print)
    assert [call["mode"] for call in calls] == ["online", "offline", "offline"]


@pytest.mark.usefixtures("logged_out")
def test_a_netrc_counts_as_a_login_and_a_broken_one_does_not(tmp_path: Path) -> None:
    assert not tracker._logged_in()
    (tmp_path / "home").mkdir()
    netrc = tmp_path / "home" / ".netrc"
    import wandb

    host = urlsplit(wandb.Settings().base_url).hostname
    netrc.write_text(f"machine {host}\n  login user\n  password secret\n")
    netrc.chmod(0o600)
    assert tracker._logged_in()
    netrc.write_text("machine")
    assert not tracker._logged_in()


@pytest.mark.usefixtures("logged_out")
@pytest.mark.parametrize(("failing", "what"), [("init", "starting"), ("log", "logging"), ("finish", "finishing")])
def test_a_failure_is_said_once_and_stops_nothing(
    failing: str, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, failing)
    said: list[str] = []
    view = Tracker(RunConfig(), "0123456789", tmp_path, said.append)
    for step in (1, 2, 3):
        view.log({"step": step})
    view.finish({"val_loss": 1.0})
    view.finish()
    assert len(said) == 1
    assert said[0].startswith(f"wandb failed while {what} (")
    assert said[0].endswith("going on without it")


def test_none_writes_nothing_and_imports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, calls = fake(monkeypatch)
    view = Tracker(RunConfig(tracker=TrackerConfig(kind="none")), "0123456789", tmp_path, print)
    view.log({"step": 1})
    view.finish({"val_loss": 1.0})
    assert calls == []
    assert list(tmp_path.iterdir()) == []
