"""Data that wandb receives from a sweep: every step once, even after kills. A stand-in server speaks its protocol.

The stand-in answers the requests of wandb-core to the public API: GraphQL, file_stream and uploads. It stores lines by
their offsets, as the real server does.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from fake_sweep import planned_run
from isoflop.sweeps.results import tracking
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.train import tracker
from isoflop.train.config import ModelConfig, RunConfig, TrackerConfig, run_id, to_dict
from isoflop.train.errors import UserError
from isoflop.train.files import JsonLines, write_json
from isoflop.train.flops import count_parameters, flops_6nd
from isoflop.train.tracker import Tracker
from small_runs import Patch, set_state


class StandIn(ThreadingHTTPServer):
    """A server that stores what it receives. `mood`: well | broken (answers 500) | silent (does not answer)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.mood, self.over, self.guard = "well", threading.Event(), threading.Lock()
        self.runs: dict[str, dict[str, Any]] = {}
        self.artifacts: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, bytes] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close their connections."""

    def steps(self, run: str) -> list[int]:
        return [json.loads(line)["step"] for _, line in sorted(self.file(run, "wandb-history.jsonl").items())]

    def file(self, run: str, name: str) -> dict[int, str]:
        return self.runs[run]["files"].get(name, {})

    def summary(self, run: str) -> dict[str, Any]:
        lines = self.file(run, "wandb-summary.json")
        return json.loads(lines[max(lines)]) if lines else {}

    def config(self, run: str) -> dict[str, Any]:
        return {key: item["value"] for key, item in json.loads(self.runs[run]["config"]).items()}

    def put(self, run: str, body: dict[str, Any]) -> dict[str, Any]:
        for name, part in (body.get("files") or {}).items():
            lines = self.runs[run]["files"].setdefault(name, {})
            lines.update(enumerate(part["content"], part["offset"]))
        self.runs[run]["exit"] = body.get("exitcode", self.runs[run].get("exit"))
        return {"limits": {}}

    def answer(self, question: str, variables: dict[str, Any]) -> dict[str, Any]:
        answers = {
            "ServerFeaturesQuery": lambda: {"serverInfo": {"features": []}},
            "Viewer": lambda: {"viewer": {"id": "u", "entity": "us", "username": "us", "flags": "{}"}},
            "RunResumeStatus": lambda: {"model": {**PROJECT, "bucket": self._resumable(variables["name"])}},
            "UpsertBucket": lambda: self._upsert(variables),
            "CreateRunFiles": lambda: self._files(variables),
            "ArtifactType": lambda: {"project": None},
            "CreateArtifact": lambda: self._artifact(variables["input"]),
            "CreateArtifactManifest": lambda: self._manifest("create", variables["artifactID"]),
            "UpdateArtifactManifest": lambda: self._manifest("update", variables["artifactManifestID"]),
            "CreateArtifactFiles": lambda: self._artifact_files(variables["input"]["artifactFiles"]),
            "CommitArtifact": lambda: {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": "d"}}},
        }
        return answers[question]() if question in answers else {}

    def _resumable(self, name: str) -> dict[str, Any] | None:
        if name not in self.runs:
            return None
        lines = self.file(name, "wandb-history.jsonl")
        return {
            "id": name, "name": name, "state": "crashed", "displayName": self.runs[name].get("displayName"),
            "historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0,
            "historyTail": json.dumps([lines[max(lines)]] if lines else []), "eventsTail": "[]", "tags": [],
            "summaryMetrics": json.dumps(self.summary(name)), "config": self.runs[name]["config"],
            "wandbConfig": '{"t": 1}',
        }  # fmt: skip

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.setdefault(variables["name"], {"files": {}, "config": "{}"})
        run |= {key: value for key, value in variables.items() if value is not None}
        bucket = {"id": run["name"], "name": run["name"], "displayName": run.get("displayName"), "project": PROJECT}
        return {"upsertBucket": {"bucket": {**bucket, "config": run["config"], "historyLineCount": 0}}}

    def _files(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [
            {"name": name, "uploadUrl": f"{self.url}/run/{variables['run']}/{name}"} for name in variables["files"]
        ]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}

    def _artifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = f"artifact-{len(self.artifacts)}"
        self.artifacts[name] = variables
        sequence = {"id": "s", "latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": name, "state": "PENDING", "artifactSequence": sequence}}}

    def _manifest(self, verb: str, artifact: str) -> dict[str, Any]:
        upload = {"uploadUrl": f"{self.url}/manifest/{artifact}", "uploadHeaders": []}
        manifest = {"id": artifact, "file": {"id": "f", "name": "m", "displayName": "m", **upload}}
        return {f"{verb}ArtifactManifest": {"artifactManifest": manifest}}

    def _artifact_files(self, files: list[dict[str, Any]]) -> dict[str, Any]:
        nodes = [
            {
                "id": "f", "name": file["name"], "displayName": file["name"], "uploadHeaders": [],
                "uploadUrl": f"{self.url}/artifact/{file['name']}", "storagePath": file["name"],
                "uploadMultipartUrls": None, "artifact": {"id": file["artifactID"]},
            }
            for file in files
        ]  # fmt: skip
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}


PROJECT = {"id": "p", "name": "isoflop", "entity": {"id": "e", "name": "us"}}


class Handler(BaseHTTPRequestHandler):
    """The handler of one connection."""

    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.mood == "silent":
            self.server.over.wait(60)
        response: dict[str, Any] = {}
        with self.server.guard:
            if self.server.mood == "well" and self.path == "/graphql":
                request = json.loads(content)
                question = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]  # type: ignore[index]
                response = {"data": self.server.answer(question, request.get("variables") or {})}
            elif self.server.mood == "well" and self.path.endswith("/file_stream"):
                response = self.server.put(self.path.split("/")[-2], json.loads(content))
            elif self.command == "PUT":
                self.server.stored[self.path] = content
        answer = json.dumps(response).encode()
        self.send_response(200 if self.server.mood == "well" else 500)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_GET = do_HEAD = do_POST


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """Start a server at which this process is logged in; wandb's own process, slow to start, is shared too."""
    with StandIn() as server, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        patch.setenv("WANDB_BASE_URL", server.url)
        patch.setenv("WANDB_API_KEY", "k" * 40)
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("WANDB_MODE", raising=False)
        wandb.teardown()  # forgets any other server
        yield server
        server.over.set()
        wandb.teardown()
        server.shutdown()


@pytest.fixture
def server(stand_in: StandIn) -> StandIn:
    """Return the server after clearing all it has received."""
    stand_in.mood = "well"
    for received in (stand_in.runs, stand_in.artifacts, stand_in.stored):
        received.clear()
    return stand_in


CONFIG = RunConfig(model=ModelConfig(vocab_size=256), tracker=TrackerConfig(group="grid"), log_every=1)
RUN = run_id(CONFIG)


def record(step: int) -> dict[str, Any]:
    return {"step": step, "train_loss": 1.0 / step}


def attempt(view: Tracker, directory: Path, steps: range) -> None:
    """Log steps to the file and to the tracker, as a trainer does."""
    lines = JsonLines(directory / "metrics.jsonl")
    for step in steps:
        lines.write(record(step))
        view.log(record(step))
    lines.close()


def tracked_sweep(root: Path, *runs: RunConfig, lines: int = 5) -> SweepDirectory:
    """Make a sweep of finished runs that wandb has not received."""
    sweep = SweepDirectory(root / "grid")
    write_json(sweep.path / "plan.json", {"runs": [planned_run(run_id(run), name="n") for run in runs]})
    settings = {"git_commit": "c0ffee", "config": {"tracker": to_dict(runs[0].tracker)}}
    (sweep.path / "sweep.yaml").write_text(yaml.safe_dump(settings))
    for run in runs:
        directory = sweep.run(run_id(run))
        directory.freeze(run)
        file = JsonLines(directory.path / "metrics.jsonl")
        for step in range(1, lines + 1):
            file.write(record(step))
        file.close()
        write_json(directory.path / "summary.json", {"run_id": directory.run_id, "val_loss": 1.25, "step": lines})
        set_state(directory, "done", attempt=2)
    return sweep


def test_a_run_online_has_every_step_once_although_it_was_stopped(server: StandIn, tmp_path: Path) -> None:
    messages: list[str] = []
    write_json(tmp_path / tracker.LINEAGE, {"attempt": 3, "git_commit": "c0ffee"})
    first = Tracker(CONFIG, RUN, tmp_path, messages.append)
    attempt(first, tmp_path, range(1, 7))
    first.finish()
    assert (server.steps(RUN), server.runs[RUN]["exit"]) == ([1, 2, 3, 4, 5, 6], 1)
    # Lines that a kill kept from the server, and lines repeated after resuming from an older checkpoint.
    lost = JsonLines(tmp_path / "metrics.jsonl")
    lost.write(record(7))
    lost.close()
    second = Tracker(CONFIG, RUN, tmp_path, messages.append)
    attempt(second, tmp_path, range(4, 11))
    second.finish({"val_loss": 1.5, "step": 10})
    assert server.steps(RUN) == list(range(1, 11))
    assert [json.loads(line)["_step"] for line in server.file(RUN, "wandb-history.jsonl").values()] == server.steps(RUN)
    assert (server.summary(RUN)["val_loss"], server.runs[RUN]["exit"]) == (1.5, 0)
    assert (server.runs[RUN]["groupName"], server.runs[RUN]["jobType"]) == ("grid", "train")
    config = server.config(RUN)
    assert config["optimizer"]["beta2"] == 0.95
    assert config["size"]["N_total"] == count_parameters(CONFIG.model).N_total
    assert config["size"]["flops_6nd"] == flops_6nd(CONFIG)
    expected = {"sweep": "grid", "parent": None, "branch_step": None, "attempt": 3, "git_commit": "c0ffee"}
    assert config["lineage"] == expected
    assert messages == []


def test_sync_sends_what_the_server_lacks_and_nothing_twice(server: StandIn, tmp_path: Path) -> None:
    other = RunConfig(model=CONFIG.model, tracker=CONFIG.tracker, seed=1)
    sweep = tracked_sweep(tmp_path, CONFIG, other)
    messages: list[str] = []
    left_alone = f"run {run_id(other)} is unfinished and was skipped"
    with sweep.run(run_id(other)).lock():  # as if a worker trained it
        assert tracking.sync_sweep(sweep, messages.append) == 1
    assert sorted(messages) == sorted([f"run {RUN} was sent, 1 of 2", left_alone])
    set_state(sweep.run(run_id(other)), "queued")  # its worker must not find it locked
    assert tracking.sync_sweep(sweep, messages.append) == 0
    assert messages[-1] == left_alone
    set_state(sweep.run(run_id(other)), "done")
    assert tracking.sync_sweep(sweep, messages.append) == 1
    assert tracking.sync_sweep(sweep, messages.append) == 0
    assert messages[-1] == "wandb already has every run"
    for name in (RUN, run_id(other)):
        assert server.steps(name) == [1, 2, 3, 4, 5]
        assert (server.summary(name)["val_loss"], server.runs[name]["exit"]) == (1.25, 0)
    assert not list(sweep.path.rglob("*.wandb"))
    # A sync that was interrupted before it recorded its progress.
    (sweep.run(RUN).path / tracker.PUSHED).unlink()
    assert tracking.sync_sweep(sweep, messages.append) == 1
    assert server.steps(RUN) == [1, 2, 3, 4, 5]


def test_results_are_one_run_of_the_group_with_an_artifact_and_the_scores(server: StandIn, tmp_path: Path) -> None:
    sweep = tracked_sweep(tmp_path, CONFIG)
    messages: list[str] = []
    tracking.push_results(sweep, messages.append)
    assert server.runs == {}  # there is no law yet
    write_json(sweep.path / "fit" / "law.json", {"law": {"alpha": 0.34}, "verdict": "trust it", "runs": 1})
    for name in ("fit/report.html", "table.csv"):
        (sweep.path / name).write_text(f"this is {name}")
    task = {"acc": 0.5, "gold_bpb": 1.25, "items": 100}
    write_json(sweep.run(RUN).path / "eval" / "step_5.json", {"step": 5, "N_total": 1, "tasks": {"sciq": task}})
    tracking.push_results(sweep, messages.append)
    (name,) = server.runs
    assert name == tracking.results_id(sweep)
    assert (server.runs[name]["groupName"], server.runs[name]["jobType"]) == ("grid", "fit")
    assert server.summary(name)["law"] == {"alpha": 0.34}
    assert [item["artifactTypeName"] for item in server.artifacts.values()].count("scaling-law") == 1
    sent = {path.removeprefix("/artifact/"): content for path, content in server.stored.items()}
    assert sent["report.html"] == b"this is fit/report.html"
    assert {"law.json", "table.csv", "summaries.jsonl", "sweep.yaml"} <= sent.keys()
    assert json.loads(sent["summaries.jsonl"])["val_loss"] == 1.25
    assert json.loads(sent["scores.table.json"])["data"][0][5:7] == ["sciq", 0.5]
    before = len(server.artifacts)
    tracking.push_results(sweep, messages.append)
    assert (len(server.artifacts), messages) == (before, [])


def write_scores(run: RunDirectory, step: int, **tasks: dict[str, Any]) -> None:
    write_json(run.path / "eval" / f"step_{step}.json", {"step": step, "tokens": 10 * step, "tasks": tasks})


def test_scores_are_in_the_run_that_was_trained_once_each(server: StandIn, tmp_path: Path) -> None:
    sweep = tracked_sweep(tmp_path, CONFIG)
    run, messages = sweep.run(RUN), list[str]()
    assert tracking.sync_sweep(sweep, messages.append) == 1
    write_scores(run, 3, sciq={"acc": 0.25, "gold_bpb": 2.0, "bpb": None, "items": 100, "chance": 0.25})
    write_scores(run, 5, sciq={"acc": 0.5, "gold_bpb": 1.25}, piqa={"acc": 0.75})
    tracking.push_scores(run, messages.append)
    lines = [json.loads(line) for _, line in sorted(server.file(RUN, "wandb-history.jsonl").items())]
    assert [line.get("step") for line in lines[:5]] == [1, 2, 3, 4, 5]
    scores = [{key: value for key, value in line.items() if not key.startswith("_")} for line in lines[5:]]
    assert scores == [
        {"step": 3, "tokens": 30, "eval/sciq/acc": 0.25, "eval/sciq/gold_bpb": 2.0},
        {"step": 5, "tokens": 50, "eval/sciq/acc": 0.5, "eval/sciq/gold_bpb": 1.25, "eval/piqa/acc": 0.75},
    ]
    assert (server.summary(RUN)["eval/piqa/acc"], server.summary(RUN)["val_loss"]) == (0.75, 1.25)
    tracking.push_scores(run, messages.append)
    assert tracking.sync_sweep(sweep, messages.append) == 0, "the server has the scores too"
    assert len(server.file(RUN, "wandb-history.jsonl")) == 7
    write_scores(run, 4, sciq={"acc": 0.4})
    assert tracking.sync_sweep(sweep, messages.append) == 1, "a sync sends new scores"
    assert not any("wandb" in line and "failed" in line for line in messages)


def test_what_keeps_the_results_from_wandb_is_one_line(monkeypatch: Patch, tmp_path: Path) -> None:

    def refuse(**options: Any) -> None:
        raise wandb.errors.CommError("the quota\nis used up")

    monkeypatch.setattr(wandb, "init", refuse)
    sweep = tracked_sweep(tmp_path, CONFIG)
    write_json(sweep.path / "fit" / "law.json", {"law": {}})
    messages: list[str] = []
    tracking.push_results(sweep, messages.append, mode="offline")
    assert messages == [
        "the results were not sent to wandb (CommError: the quota is used up); `isoflop sync` tries again"
    ]
    messages.clear()
    tracking.push_results(sweep, messages.append, kind="none")
    (sweep.path / "sweep.yaml").write_text("config: 3")
    tracking.push_results(sweep, messages.append)
    assert len(messages) == 1


def test_sync_refuses_in_one_sentence(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(tracking, "server", lambda: "http://wandb")
    monkeypatch.setattr(tracking, "logged_in", lambda: False)
    monkeypatch.setattr(tracking, "unreachable", lambda: "http://wandb does not answer")
    untracked = RunConfig(model=CONFIG.model, tracker=TrackerConfig(kind="none"))
    with pytest.raises(UserError, match="none of its runs has trained with tracker=wandb"):
        tracking.sync_sweep(tracked_sweep(tmp_path / "none", untracked))
    sweep = tracked_sweep(tmp_path, CONFIG)
    with pytest.raises(UserError, match="no user is logged in at http://wandb; run `wandb login` or set WANDB_API_KEY"):
        tracking.sync_sweep(sweep)
    monkeypatch.setattr(tracking, "logged_in", lambda: True)
    with pytest.raises(UserError, match="http://wandb does not answer; sync again later"):
        tracking.sync_sweep(sweep)


def test_lineage_says_which_attempt_and_which_code(tmp_path: Path) -> None:
    sweep = tracked_sweep(tmp_path, CONFIG)
    run = sweep.run(RUN)
    tracking.note_lineage(run, CONFIG)
    lineage = json.loads((run.path / tracker.LINEAGE).read_text())
    assert (lineage["attempt"], lineage["git_commit"]) == (2, "c0ffee")
    tracking.note_lineage(RunDirectory(tmp_path / "nowhere"), CONFIG)  # no error


@pytest.mark.slow
def test_a_silent_server_costs_seconds_and_no_line(server: StandIn, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(tracker, "FINISH_SECONDS", 1.0)
    monkeypatch.setattr(tracker, "ANSWER_SECONDS", 1.0)
    messages: list[str] = []
    for mood in ("silent", "broken"):
        directory = tmp_path / mood
        view = Tracker(CONFIG, RUN, directory, messages.append)
        server.mood = mood
        attempt(view, directory, range(1, 4))
        view.finish({"val_loss": 1.0})
        assert len(messages) == 1
        assert messages.pop().startswith("wandb failed while finishing (TimeoutError: ")
        assert not (directory / tracker.PUSHED).exists()
        server.mood = "well"
    server.mood = "silent"
    view = Tracker(CONFIG, RUN, tmp_path / "offline", messages.append)
    attempt(view, tmp_path / "offline", range(1, 4))
    view.finish({"val_loss": 1.0})
    assert len(messages) == 1
    assert "does not answer" in messages[0]
    assert len(list((tmp_path / "offline" / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.slow
def test_a_sync_that_fails_is_continued_by_the_next(server: StandIn, monkeypatch: Patch, tmp_path: Path) -> None:

    others = [RunConfig(model=CONFIG.model, tracker=CONFIG.tracker, seed=seed) for seed in range(1, 20)]
    sweep = tracked_sweep(tmp_path, CONFIG, *others)

    def break_server(line: str) -> None:
        server.mood = "broken"

    with monkeypatch.context() as patch:
        patch.setattr(tracker, "INIT_SECONDS", 3.0)
        patch.setattr(tracking, "SEND_SECONDS", 3.0)
        with pytest.raises(UserError, match=r"wandb failed while (starting|finishing) .*, so try again later"):
            tracking.sync_sweep(sweep, break_server)
    sent = [run for run in sweep.runs() if (run.path / tracker.PUSHED).exists()]
    assert 0 < len(sent) < 20
    server.mood = "well"
    wandb.teardown()  # a later sync is a new process; in this one wandb keeps what it could not send
    assert tracking.sync_sweep(sweep, lambda line: None) == 20 - len(sent)
    assert [server.steps(run.run_id) for run in sweep.runs()] == [[1, 2, 3, 4, 5]] * 20
