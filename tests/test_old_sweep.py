"""What version 0.1 left is read, continued and reported by commands alone, and its jobs in SLURM's queue are known.

`fixtures/sweep_0.1` is what commit 2921e71 wrote, less what is made anew (pages, pictures, checkpoints of done runs):

local       +grid=ladder with trunks on corpus.jsonl, six of its runs scored on quiz.jsonl; seven are done, a trunk's
            worker was killed at step 40 (its checkpoint is of step 30), its branch found no checkpoint to begin with,
            and three runs are planned
slurm       +grid=points, submitted from /scratch; squeue.txt shows its jobs: keepers, a queue's worker, an array with a
            run and an ensemble, scoring, and the fit; jobs/slurm-* has what each was to call, pickled

`fixtures/sweep_0.2` is what the first version with journals wrote: of three runs one is done, one was killed with its
launcher after the checkpoint of step 149, and one is planned.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import isoflop
import pytest
import yaml
from isoflop.sweeps.runs.journal import read_record

FIXTURE = Path(__file__).resolve().parent / "fixtures" / "sweep_0.1"
ROOT = Path(isoflop.__file__).resolve().parent
MODULE, FUNCTION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["isoflop"].split(":")
ISOFLOP = (sys.executable, "-c", f"from {MODULE} import {FUNCTION}; {FUNCTION}()")
TRUNK, BRANCH = "098f8cb168", "d4c09158c2"
# What a run has said of itself; a run that is done is not touched again.
WRITTEN = ("state.json", "attempts.jsonl", "metrics.jsonl", "summary.json", "config.yaml")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the folder that the sweeps were started from."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "old"))


def command(folder: Path, *arguments: str, path: str = "") -> str:
    """Runs a command in a folder, which must succeed; what it printed. `path` comes first on the PATH."""
    environment = os.environ | {"PATH": os.pathsep.join(filter(None, (path, os.environ["PATH"])))}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refusal(folder: Path, arguments: list[str]) -> str:
    """What a command says that must refuse what it was given."""
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    return done.stderr


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def plan(sweep: Path) -> dict[str, str | None]:
    """By run id, the trunk."""
    return {run["run_id"]: run["parent"] for run in read(sweep / "plan.json")["runs"]}


@pytest.mark.slow
def test_status_and_fit_read_it(old: Path) -> None:
    status = json.loads(command(old, *ISOFLOP, "status", "local", "--json"))
    assert status["states"] == {"planned": 3, "done": 7, "failed": 2}
    reasons = {run["run_id"]: run["reason"] for run in status["runs"] if run["state"] == "failed"}
    assert reasons.keys() == {TRUNK, BRANCH}
    assert reasons[TRUNK] == "its worker was killed"
    assert json.loads(command(old, *ISOFLOP, "report", "local", "--json"))["runs"] == 7
    found = json.loads(
        command(old, *ISOFLOP, "fit", "local/table.csv", "--bootstrap", "20", "--intervals", "noise", "--json")
    )
    before = read(old / "local/fit/law.json")
    assert found["runs"] == before["runs"] == 7
    assert found["law"].pop("form") == before["law"].pop("form")
    assert found["law"] == pytest.approx(before["law"], rel=1e-3)


@pytest.mark.slow
def test_the_command_that_it_was_started_with_continues_it_to_the_report(old: Path) -> None:
    sweep, before = old / "local", plan(old / "local")
    done = [name for name in before if read(sweep / "runs" / name / "state.json")["state"] == "done"]
    said = {name: [(sweep / "runs" / name / file).read_bytes() for file in WRITTEN] for name in done}
    started_with = yaml.safe_load((sweep / "sweep.yaml").read_text())["command"]
    again = [sys.executable, str(ROOT / "sweep.py"), *started_with[2:]]
    assert "ensembles is no field any more: runs train one by one" in refusal(old, again)
    again.remove("ensembles=1")
    said_now = refusal(old, again)
    assert "another request (tuning." in said_now
    assert "go on as before there were rules with tuning=fixed" in said_now
    command(old, *again, "tuning=fixed")  # as everything was before there were rules
    assert plan(sweep) == before
    assert {read(sweep / "runs" / name / "state.json")["state"] for name in before} == {"done"}
    assert {name: [(sweep / "runs" / name / file).read_bytes() for file in WRITTEN] for name in done} == said
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


def test_a_sweep_whose_jobs_an_earlier_version_submitted_is_shown(old: Path) -> None:
    status = json.loads(command(old, *ISOFLOP, "status", "slurm", "--json"))
    assert status["states"] == {"queued": 5}


def test_a_sweep_with_journals_continues_where_its_launcher_was_killed(tmp_path: Path) -> None:
    sweep = Path(shutil.copytree(FIXTURE.with_name("sweep_0.2"), tmp_path / "new")) / "local"
    status = json.loads(command(sweep.parent, *ISOFLOP, "status", "local", "--json"))
    assert status["states"] == {"planned": 1, "running": 1, "done": 1}
    (killed,) = [run["run_id"] for run in status["runs"] if run["state"] == "running"]
    journals = {path: path.read_text() for path in sweep.glob("runs/*/events.jsonl")}
    started_with = yaml.safe_load((sweep / "sweep.yaml").read_text())["command"]
    command(sweep.parent, sys.executable, str(ROOT / "sweep.py"), *started_with[2:])
    assert {read(path)["state"] for path in sweep.glob("runs/*/state.json")} == {"done"}
    assert all(path.read_text().startswith(text) for path, text in journals.items()), "a journal only grows"
    attempts = [(attempt.cause, attempt.first_step) for attempt in read_record(sweep / "runs" / killed).attempts]
    assert attempts == [("killed", 0), ("done", 149)]
    assert (sweep / "fit" / "report.html").exists()
