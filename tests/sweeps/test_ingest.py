"""`isoflop ingest` makes a folder that the other commands read as a sweep, and that grows with its logs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import isoflop as package
import pandas as pd
import pytest
from isoflop import fit
from isoflop.sweeps.results.ingest import ingest
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.train.files import read_json
from small_runs import contents

LOGS = Path(package.__file__).resolve().parent / "examples/megatron_log"  # in the form of Megatron-LM's log
Isoflop = Any

pytestmark = pytest.mark.usefixtures("quick_pictures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ingest") / "megatron"
    assert ingest([LOGS], path, {}, None, None) == []
    return path


def write_log(path: Path, steps: int, total: int = 100, N: float = 1e6) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"step": step, "loss": 2 + 9 / step, "params": N, "max_steps": total} for step in range(1, steps + 1)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_tables_have_a_row_of_every_finished_run_and_its_curve(folder: Path) -> None:
    table = pd.read_csv(folder / "table.csv").set_index("name")
    row = table.loc["n12m_r10"]
    assert len(table) == 11
    assert (row["N"], row["D"], row["corpus"]) == (12e6, 910 * 128 * 1024, "megatron")
    assert row["flops"] == 6.0 * row["N"] * row["D"]
    text = (LOGS / "n12m_r10.log").read_text()
    assert row["loss"] == float(text.rpartition("lm loss value: ")[2].partition(" |")[0])
    curves = pd.read_csv(folder / "curves.csv", dtype={"run_id": str})
    assert curves.groupby("run_id").size().tolist().count(10) == 11
    assert len(fit.read_table(folder)) == 11
    origin = read_json(folder / "ingest.json")[row["run_id"]]
    assert (origin["source"], origin["reader"]) == (str(LOGS / "n12m_r10.log"), "megatron")
    assert (origin["steps"], origin["columns"]["flops"]) == ([91, 910], "6ND")


def test_commands_read_the_folder_as_a_sweep(isoflop: Isoflop, folder: Path, tmp_path: Path) -> None:
    """Check commands that docs/ingest.md, whose commands run in test_docs.py, does not show in JSON."""
    status = json.loads(isoflop("status", folder, "--json")[1])
    (running,) = [row for row in status["runs"] if row["state"] == "running"]
    assert (running["step"], running["steps"], running["name"]) == (33320, 47600, "n104m_r60")
    code, output, _ = isoflop("forecast", folder, "--json")
    (forecast,) = json.loads(output)["forecasts"]
    assert (code, forecast["run_id"], forecast["D"]) == (0, running["run_id"], 47600 * 128 * 1024)
    assert forecast["low"] < 1.7 + 400 / 104e6**0.34 + 410 / forecast["D"] ** 0.28 < forecast["high"]
    code, output, _ = isoflop("suggest", folder, "--budget", "1e19", "--json")
    assert (code, len(json.loads(output)["runs"]) > 0) == (0, True)
    other = tmp_path / "other"
    shutil.copytree(LOGS, tmp_path / "logs")
    output = f"12 runs, 11 done; next: isoflop report {other}\n"
    assert isoflop("ingest", tmp_path / "logs", "--to", other) == (0, output, "")
    code, output, error = isoflop("compare", folder, other, "--json")
    assert (code, error) == (0, "")
    assert json.loads(output)[0]["multipliers"][0]["value"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("command", [("retry",), ("cancel",), ("extend", "grid.points=[]"), ("doctor",), ("adopt",)])
def test_commands_that_would_change_runs_refuse_them(isoflop: Isoflop, folder: Path, command: tuple[str, ...]) -> None:
    before = contents(folder)
    code, _, error = isoflop(command[0], folder, *command[1:])
    assert code == 2
    assert "has runs of another trainer" in error
    assert contents(folder) == before


def test_a_growing_log_adds_what_is_new_and_loses_nothing(isoflop: Isoflop, tmp_path: Path) -> None:
    log, folder = write_log(tmp_path / "logs/a.jsonl", 60), tmp_path / "runs"
    arguments = ("ingest", tmp_path / "logs", "--to", folder, "--tokens-per-step", "1000")
    write_log(log, 1)
    assert isoflop(*arguments)[1].startswith("1 run, 0 done")
    write_log(log, 60)
    assert isoflop(*arguments)[1].startswith("1 run, 0 done")
    first = contents(folder)
    assert isoflop(*arguments)[0] == 0
    assert contents(folder) == first
    write_log(log, 100)
    write_log(tmp_path / "logs/b.jsonl", 100, N=2e6)
    assert isoflop(*arguments)[1].startswith("2 runs, 2 done")
    log.write_text(log.read_text().partition('{"step": 3,')[2].partition("\n")[2])  # the log lost its beginning
    (tmp_path / "logs/b.jsonl").unlink()
    assert isoflop(*arguments)[1].startswith("2 runs, 2 done")
    table = pd.read_csv(folder / "table.csv")
    assert table[["N", "D"]].values.tolist() == [[1e6, 1e5], [2e6, 1e5]]
    assert table["loss"].tolist() == pytest.approx([2 + (9 / 99 + 9 / 100) / 2] * 2)
    assert (
        pd.read_csv(folder / "curves.csv").groupby("run_id")["step"].agg(["min", "max"]).values.tolist()
        == [[1, 100]] * 2
    )


def test_two_logs_of_a_run_are_one_run_and_a_log_without_its_steps_may_grow(isoflop: Isoflop, tmp_path: Path) -> None:
    log = write_log(tmp_path / "logs/a.jsonl", 100)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    state = {"log_history": [{name: line[name] for name in ("step", "loss", "params")} for line in lines]}
    (tmp_path / "logs/trainer_state.json").write_text(json.dumps(state))
    code, output, error = isoflop("ingest", tmp_path / "logs", "--to", tmp_path / "one", "--tokens-per-step", "1000")
    assert (code, output.partition(";")[0]) == (0, "1 run, 1 done")
    assert f"is a log of the run in {log} too, left out" in " ".join(error.split())
    assert "may still grow" not in error
    log.write_text("".join(f'{{"step": {line["step"]}, "loss": {line["loss"]}, "params": 1e6}}\n' for line in lines))
    _, output, error = isoflop("ingest", log, "--to", tmp_path / "two", "--tokens-per-step", "1000")
    assert output.startswith("1 run, 1 done")
    assert "may still grow: 1 log of 1 without a number of steps" in " ".join(error.split())


def test_a_diverged_run_is_no_row_of_the_table(isoflop: Isoflop, tmp_path: Path) -> None:
    write_log(tmp_path / "logs/good.jsonl", 100)
    log = write_log(tmp_path / "logs/bad.jsonl", 50)
    log.write_text(log.read_text() + '{"step": 51, "loss": NaN}\n{"step": 52, "loss": NaN}\n')
    code, output, error = isoflop("ingest", tmp_path / "logs", "--to", tmp_path / "runs", "--tokens-per-step", "1000")
    assert (code, output.partition(";")[0]) == (0, "2 runs, 1 done")
    assert f"note: {log} has 2 values of train_loss not finite, left out" in error
    states = {run.state().state: run.state().reason for run in SweepDirectory(tmp_path / "runs").runs()}
    assert states == {"done": None, "diverged": "its loss is not finite from step 51 on"}


def test_what_is_missing_is_named_with_the_option_that_gives_it(isoflop: Isoflop, tmp_path: Path) -> None:
    log, folder = tmp_path / "a.jsonl", tmp_path / "runs"
    log.write_text(
        "".join(
            json.dumps({"step": step, "loss": 2 + 1 / step, "size": 1e6, "seen": step}) + "\n" for step in range(1, 9)
        )
    )
    asked = (
        ((), "does not say N; give --map N=KEY or N=NUMBER"),
        (("--map", "N=size"), "does not say its tokens; give --tokens-per-step"),
        (("--map", "N"), "--map has 'N'; it must be NAME=KEY"),
        (("--tokens-per-step", "0"), "Invalid value for '--tokens-per-step'"),
    )
    for options, message in asked:
        code, _, error = isoflop("ingest", log, "--to", folder, *options)
        assert (code, message in " ".join(error.split())) == (2, True)
        assert not folder.exists()
    good = ("--to", folder, "--map", "N=size,tokens=seen")
    code, output, error = isoflop("ingest", log, tmp_path / "missing", *good)
    assert (code, output.partition(";")[0]) == (0, "1 run, 1 done")
    assert f"note: {tmp_path}/missing does not exist" in error


def test_folders_with_other_content_are_refused(isoflop: Isoflop, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/plan.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("mine")
    for folder in (tmp_path / "sweep", tmp_path / "notes", tmp_path / "notes/mine.txt"):
        code, _, error = isoflop("ingest", LOGS, "--to", folder)
        assert (code, error) == (
            2, f"error: --to is {folder}, which has other content; name a new folder, or one that ingest made\n"
        )  # fmt: skip
    assert not list(tmp_path.rglob("ingest.json"))
