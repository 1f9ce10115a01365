"""Sweeps of version 0.1 are read, continued and reported by today's commands, which recognise their SLURM jobs.

`fixtures/sweep_0.1` was written by commit 2921e71, without files that are made again (pages, pictures, checkpoints of
finished runs):

local       +grid=ladder with trunks on corpus.jsonl, six runs scored on quiz.jsonl; seven runs are done, a trunk's
            worker was killed at step 40 (its checkpoint is of step 30), its branch failed without a checkpoint to start
            from, and three runs are planned
slurm       +grid=points, submitted from /scratch; squeue.txt shows its jobs: keepers, a worker, an array with a run and
            an ensemble, scoring, and the fit; jobs/slurm-* has the pickled call of each

`fixtures/sweep_0.2` was written by the first version with journals: one of three runs is done, one was killed with its
launcher after the checkpoint of step 149, and one is planned.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from isoflop.sweeps.entry import sweep_main
from isoflop.sweeps.runs.journal import read_record
from small_runs import Patch

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
TRUNK, BRANCH = "098f8cb168", "d4c09158c2"
# Files that a run writes; those of a finished run must not change.
WRITTEN = ("state.json", "attempts.jsonl", "metrics.jsonl", "summary.json", "config.yaml")
Isoflop = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("quick_pictures")


@pytest.fixture
def old(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Return a copy of the folder that the sweeps were started from, and make it the current one."""
    folder = Path(shutil.copytree(FIXTURES / "sweep_0.1", tmp_path / "old"))
    monkeypatch.chdir(folder)
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def plan(sweep: Path) -> dict[str, str | None]:
    """Return the trunk of each run, by run id."""
    return {run["run_id"]: run["parent"] for run in read(sweep / "plan.json")["runs"]}


def overrides_of(sweep: Path) -> list[str]:
    """Return the overrides of the command that started a sweep."""
    return list(yaml.safe_load((sweep / "sweep.yaml").read_text())["command"][2:])


@pytest.mark.slow
def test_status_and_fit_read_it(old: Path, isoflop: Isoflop) -> None:
    status = json.loads(isoflop("status", "local", "--json")[1])
    assert status["states"] == {"planned": 3, "done": 7, "failed": 2}
    reasons = {run["run_id"]: run["reason"] for run in status["runs"] if run["state"] == "failed"}
    assert reasons.keys() == {TRUNK, BRANCH}
    assert reasons[TRUNK] == "its worker was killed"
    assert json.loads(isoflop("report", "local", "--json")[1])["runs"] == 7
    fit = ("fit", "local/table.csv", "--bootstrap", "20", "--intervals", "noise", "--json")
    fitted, before = json.loads(isoflop(*fit)[1]), read(old / "local/fit/law.json")
    assert fitted["runs"] == before["runs"] == 7
    assert fitted["law"].pop("form") == before["law"].pop("form")
    assert fitted["law"] == pytest.approx(before["law"], rel=1e-3)


@pytest.mark.slow
def test_its_own_command_continues_it_to_the_report(old: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sweep, before = old / "local", plan(old / "local")
    done = [name for name in before if read(sweep / "runs" / name / "state.json")["state"] == "done"]
    contents = {name: [(sweep / "runs" / name / file).read_bytes() for file in WRITTEN] for name in done}
    overrides = overrides_of(sweep)
    assert sweep_main(overrides) == 2
    assert "ensembles is no longer a field: each run trains in its own process" in capfd.readouterr().err
    overrides.remove("ensembles=1")
    assert sweep_main(overrides) == 2
    message = capfd.readouterr().err
    assert "other settings (tuning." in message
    assert "continue without tuning rules with tuning=fixed" in message
    assert sweep_main([*overrides, "tuning=fixed"]) == 0  # before there were rules, all values were fixed
    assert plan(sweep) == before
    assert {read(sweep / "runs" / name / "state.json")["state"] for name in before} == {"done"}
    assert {name: [(sweep / "runs" / name / file).read_bytes() for file in WRITTEN] for name in done} == contents
    attempts = read_record(sweep / "runs" / TRUNK).attempts
    assert [(attempt.cause, attempt.first_step) for attempt in attempts] == [("killed", 0), ("done", 30)]
    wasted = attempts[0].flops_wasted  # from the checkpoint to the kill
    header, *rows = (sweep / "table.csv").read_text().splitlines()
    assert "quiz/gold_bpb" in header.split(",")
    assert {row.split(",")[0] for row in rows} == before.keys()
    assert read(sweep / "fit/law.json")["runs"] == len(before)
    assert {page.name for page in sweep.glob("fit/*.html")} == {"report.html", "evaluation.html"}
    costs = read(sweep / "costs.json")
    assert (costs["done"], costs["attempts"]) == (12, 14)  # two runs were tried twice
    assert costs["wasted"]["flops"] == wasted


def test_a_sweep_whose_jobs_an_earlier_version_submitted_is_shown(old: Path, isoflop: Isoflop) -> None:
    assert json.loads(isoflop("status", "slurm", "--json")[1])["states"] == {"queued": 5}


def test_a_sweep_with_journals_continues_after_a_kill(tmp_path: Path, isoflop: Isoflop, monkeypatch: Patch) -> None:
    sweep = Path(shutil.copytree(FIXTURES / "sweep_0.2", tmp_path / "new")) / "local"
    monkeypatch.chdir(sweep.parent)
    status = json.loads(isoflop("status", "local", "--json")[1])
    assert status["states"] == {"planned": 1, "running": 1, "done": 1}
    (killed,) = [run["run_id"] for run in status["runs"] if run["state"] == "running"]
    journals = {path: path.read_text() for path in sweep.glob("runs/*/events.jsonl")}
    assert sweep_main([*overrides_of(sweep), "checkpoint.every_seconds=60"]) == 0
    assert {read(path)["state"] for path in sweep.glob("runs/*/state.json")} == {"done"}
    assert all(path.read_text().startswith(text) for path, text in journals.items()), "a journal only grows"
    attempts = [(attempt.cause, attempt.first_step) for attempt in read_record(sweep / "runs" / killed).attempts]
    assert attempts == [("killed", 0), ("done", 149)]
    assert (sweep / "fit" / "report.html").exists()
