"""The `isoflop` command on a finished sweep, and on folders that are no sweep."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from isoflop.sweeps.entry import CONFIG, sweep_main
from isoflop.sweeps.execute import conduct
from isoflop.sweeps.grid import suggest
from isoflop.sweeps.results.finish import write_results
from isoflop.sweeps.results.table import write_table
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.train.files import write_json
from lm_eval.tasks import TaskManager
from simulated_ladders import Case, simulate
from small_runs import SMOKE, Patch, set_state

pytestmark = pytest.mark.usefixtures("quick_pictures")


Isoflop = Any


@pytest.fixture
def folder(sweep: SweepDirectory) -> Path:
    """Return the folder of a copy of the smoke sweep that a test may change."""
    return sweep.path


def test_the_command_knows_its_version_and_a_short_flag_for_help(isoflop: Isoflop) -> None:
    code, output, _ = isoflop("--version")
    assert code == 0
    assert output.startswith(f"isoflop {version('isoflop')}, torch ")
    assert isoflop("-h")[1] == isoflop("--help")[1] != ""


def test_sweep_is_a_command_that_takes_overrides_and_flags_of_hydra(isoflop: Isoflop, tmp_path: Path) -> None:
    grid_file = tmp_path / "mine" / "grid" / "own.yaml"
    grid_file.parent.mkdir(parents=True)
    shutil.copy(CONFIG / "grid" / "smoke.yaml", grid_file)
    arguments = ("--config-dir", tmp_path / "mine", "+grid=own", *SMOKE[2:], "dry_run=true", f"output_root={tmp_path}")
    code, output, error = isoflop("sweep", *arguments)
    assert (code, error) == (0, "")
    assert "4 runs" in output
    assert not (tmp_path / "own").exists()


def test_help_of_a_sweep_shows_grids_and_settings_with_their_comments(isoflop: Isoflop) -> None:
    code, output, _ = isoflop("sweep", "data=hf", "+grid=ladder", "--help")
    assert code == 0
    assert "_schema" not in output
    assert "chinchilla   An isoFLOP grid: several sizes at each of several FLOP budgets" in output
    assert "  one          One run" in output
    lines = [line.strip() for line in output.splitlines()]
    for file in ("data/hf", "model/gpt", "grid/ladder"):
        settings = [line for line in (CONFIG / f"{file}.yaml").read_text().splitlines() if re.match(r"\w.*:.*#", line)]
        assert settings or file == "grid/ladder"
        assert {*settings} <= {*lines}
    assert "name: HuggingFaceFW/fineweb-edu # name of the dataset" in lines
    assert not any(line.startswith("corpus: stdlib") for line in lines)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grid=chinchila", "grid is 'chinchila' (did you mean chinchilla?); it must be one of adaptive"),
        ("modell.width=8", "modell"),
        ("model.widht=8", "model.widht is not a field (did you mean width?); model has width, depth"),
        ("optimizer=adamm", "optimizer is 'adamm' (did you mean adamw?); it must be one of adamw, muon"),
        ("fit.zzz=1", "fit.zzz is not a field; fit has "),
        ("grid.round_runs=4", "grid.round_runs is no longer a field: a round has at most 16 runs"),
        ("fit.tied=true", "fit.tied is no longer a field: use --tied of `isoflop fit`"),
    ],
)
def test_a_typo_is_answered_with_what_is_nearest(isoflop: Isoflop, override: str, message: str) -> None:
    grid = [f"+{override}"] if override.startswith("grid") else ["+grid=smoke", override]
    code, _, error = isoflop("sweep", *grid, "dry_run=true")
    assert code == 2
    assert error.startswith("error: ")
    assert message in error


def test_a_field_of_an_earlier_version_leaves_the_table_as_it_is(sweep: SweepDirectory) -> None:
    tables = []
    for old_fields in ({}, {"rope_slow": None}):
        for run in sweep.runs():
            values = yaml.safe_load((run.path / "config.yaml").read_text())
            values["variant"], values["model"] = "base", values["model"] | old_fields
            (run.path / "config.yaml").write_text(yaml.safe_dump(values))
        tables.append(write_table(sweep, {}))
    assert (tables[0]["kv_bytes"] > 0).all()
    pd.testing.assert_frame_equal(*tables)


def table(path: Path) -> Path:
    """Write a table from a known law, with other column names and without D, and return its path."""
    generator = np.random.default_rng(0)
    N = np.repeat(10 ** np.linspace(7, 9.5, 6), 6)
    D = np.tile(10 ** np.linspace(9, 11, 6), 6)
    loss = (1.7 + 400 / N**0.34 + 410 / D**0.28) * np.exp(0.001 * generator.standard_normal(36))
    pd.DataFrame({"Model Size": N, "Training FLOP": 6 * N * D, "loss": loss}).to_csv(path, index=False)
    return path


def test_fit_of_a_table_prints_json_and_writes_a_report(isoflop: Isoflop, tmp_path: Path) -> None:
    arguments = ["fit", table(tmp_path / "t.csv"), "--column", "N=Model Size", "--column", "flops=Training FLOP"]
    arguments += ["--derive-d", "6nd", "--drop-worst", "1", "--target-flops", "1e24", "--bootstrap", "50", "--json"]
    code, output, error = isoflop(*arguments, "--output", tmp_path / "out")
    assert code == 0, error
    assert (tmp_path / "out" / "report.html").exists()
    result = json.loads(output)
    assert {"law", "ci", "starts", "objective", "optimal", "backtest", "warnings"} <= set(result)
    assert result["law"]["form"] == "chinchilla"
    low, high = result["ci"]["alpha"]
    assert low < 0.34 < high
    (optimum,) = result["optimal"]
    assert optimum["flops"] == 1e24
    assert optimum["N"] * optimum["D"] * 6 == pytest.approx(1e24)
    assert {"N_ci", "D_ci", "loss", "loss_ci"} <= set(optimum)
    assert {"derived_d", "dropped_worst"} <= {warning["code"] for warning in result["warnings"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "/nonexistent"], "no plan.json"),
        (["fit", "/nonexistent.csv"], "does not exist"),
        (["fit", "TABLE"], "Model Size"),  # the columns that there are
        (["fit", "TABLE", "--column", "N"], "must be NAME=COLUMN"),
        (["fit", "FIVE", "--output", "OUT"], "has 5 parameters and the table has 5 different points"),
        (["fit", "TRAINER"], "is the log of one Hugging Face run"),
        (["fit", "TABLE", "--column", "N=Model Size", "--derive-d", "7nd"], "6nd"),
        (["evaluate", "/nonexistent"], "holds no checkpoint"),
        (["data", "prepare", "data=text", "data.path=/nonexistent"], "/nonexistent"),
        (["data", "prepare", "data.pth=x"], "data.pth"),
        (["fly"], "No such command"),
        (["fit"], "Missing argument"),
    ],
)
def test_bad_input_is_one_sentence(isoflop: Isoflop, arguments: list[str], message: str, tmp_path: Path) -> None:
    files = {"TABLE": table(tmp_path / "t.csv"), "FIVE": tmp_path / "five.csv", "OUT": tmp_path / "out"}
    files["TRAINER"] = tmp_path / "trainer_state.json"
    runs = pd.read_csv(files["TABLE"]).set_axis(["N", "D", "loss"], axis=1)
    runs.head(5).to_csv(files["FIVE"], index=False)
    (tmp_path / "trainer_state.json").write_text('{"epoch": 1.0, "log_history": [{"loss": 2.5, "step": 10}]}')
    code, output, error = isoflop(*(files.get(argument, argument) for argument in arguments))
    assert code == 2, error
    assert message in error
    assert not (tmp_path / "out").exists()
    assert "Traceback" not in output + error


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a custom task, because benchmarks may not be staged."""
    path = tmp_path_factory.mktemp("questions") / "colours.jsonl"
    rows = [{"question": "<b>The sky</b> is", "choices": [" blue", " green"], "answer": n % 2} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_evaluate_writes_a_page(isoflop: Isoflop, smoke: tuple[Path, str], questions: Path, tmp_path: Path) -> None:
    checkpoint, other_checkpoint = sorted(smoke[0].glob("runs/*/checkpoints/step_*"))[:2]
    options = ["--tasks", str(questions), "--device", "cpu", "--ngram", "0"]
    code, out, _ = isoflop("evaluate", str(checkpoint), *options, "--output", str(tmp_path / "out"))
    assert code == 0
    assert "colours" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        ".scores.json.lock", "scores.json", "scores.items.jsonl.gz", "report.html",
    }  # fmt: skip
    page = (tmp_path / "out" / "report.html").read_text()
    assert str(checkpoint) in out + page
    assert "<b>The sky" not in page
    code, out, _ = isoflop("evaluate", str(checkpoint), *options, "--output", str(tmp_path / "out"), "--json")
    scores = json.loads(out)
    assert scores == json.loads((tmp_path / "out" / "scores.json").read_text())
    assert scores["held_out"]["worst"]

    code, out, _ = isoflop(
        "evaluate", str(checkpoint), str(other_checkpoint), *options, "--output", str(tmp_path / "both"), "--json",
        "--precision", "bf16", "--against", str(tmp_path / "out" / "scores.json"),
    )  # fmt: skip
    assert code == 0
    documents = json.loads(out)
    assert [scores["precision"] for scores in documents] == ["bf16", "bf16"]
    names = {f"{path.parent.parent.name}_{path.name}" for path in (checkpoint, other_checkpoint)}
    assert {path.name for path in (tmp_path / "both").iterdir()} == names
    assert "Compared" in (tmp_path / "both" / sorted(names)[0] / "report.html").read_text()
    for option, value, message in (
        ("--device", "tpu", "device is 'tpu'"), ("--ranks", "0", "ranks is 0"),
        ("--against", str(questions), "is not a scores file"),
    ):  # fmt: skip
        code, _, error = isoflop("evaluate", checkpoint, *options, option, value, "--output", tmp_path / "bad")
        assert (code, message in error, list(tmp_path.glob("bad/*"))) == (2, True, [])


def test_evaluate_takes_a_hundred_items_of_a_task_at_a_terminal_unless_all_are_asked_for(
    isoflop: Isoflop, smoke: tuple[Path, str], tmp_path: Path, monkeypatch: Patch
) -> None:
    checkpoint = next(smoke[0].glob("runs/*/checkpoints/step_*"))
    for name, text in {"short": "a", "wordy": "a " * 400}.items():
        rows = [{"question": f"{text} {number}", "choices": [" b", " c"], "answer": 0} for number in range(103)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = f"{tmp_path / 'wordy.jsonl'}@5,{tmp_path / 'short.jsonl'}"
    options = ["--tasks", tasks, "--device", "cpu", "--ngram", "0", "--output", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True)
        code, out, _ = isoflop("evaluate", str(checkpoint), *options)
    assert code == 0
    assert "--all" in out
    assert "200 of 206 items, 400 requests" in out, "before the first task"
    assert out.index("short: ") < out.index("wordy@5: "), "the cheapest task first"
    assert out.index("wordy (<5 examples)") < out.rindex("\nshort "), "no room for five; a table in the order asked"
    code, out, _ = isoflop("evaluate", str(checkpoint), *options, "--json")
    assert [task["items"] for task in json.loads(out)["tasks"].values()] == [103, 103]


def test_a_checkpoint_that_its_sweep_has_scored_has_one_page_with_the_tasks_of_both(
    isoflop: Isoflop, smoke: tuple[Path, str], questions: Path, tmp_path: Path
) -> None:
    run = next(smoke[0].glob("runs/*/checkpoints")).parent
    shutil.copytree(run, tmp_path / run.name)
    (checkpoint,) = (tmp_path / run.name).glob("checkpoints/step_*")
    options = ["--device", "cpu", "--ngram", "0"]
    assert isoflop("evaluate", checkpoint, "--tasks", questions, *options, "--output", tmp_path / "sweep")[0] == 0
    (checkpoint.parents[1] / "eval").mkdir()
    for name in ("json", "items.jsonl.gz"):
        (tmp_path / f"sweep/scores.{name}").rename(checkpoint.parents[1] / f"eval/{checkpoint.name}.{name}")
    shutil.copy(questions, tmp_path / "shapes.jsonl")
    code, out, _ = isoflop("evaluate", checkpoint, "--tasks", tmp_path / "shapes.jsonl", *options)
    page = checkpoint.parents[1] / f"eval/{checkpoint.name}.html"
    assert (code, f"report: {page}" in out) == (0, True)
    assert not list(checkpoint.glob("*.html"))
    assert list(json.loads((checkpoint / "scores.json").read_text())["tasks"]) == ["shapes"]
    assert all(f">{task}</a>" in page.read_text() for task in ("colours", "shapes"))


LM_EVAL_TASK = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def test_lm_eval_scores_as_ours(isoflop: Isoflop, smoke: tuple[Path, str], tmp_path: Path, monkeypatch: Patch) -> None:
    # Without this lm-eval would read its 14,000 tasks at each start.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "tasks").mkdir()
    rows = [
        {"question": f"item {i}: the", "choices": [f"c{i}" * (1 + i % 3), "import os"], "answer": i % 2}
        for i in range(12)
    ]
    data = tmp_path / "colours.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks" / "colours.yaml").write_text(LM_EVAL_TASK % data)
    checkpoint = sorted(smoke[0].glob("runs/*/checkpoints/step_*"))[0]

    options = ["--output_path", tmp_path / "theirs.json", "--include_path", tmp_path / "tasks", "--tasks", "colours"]
    model = ["--model", "isoflop", "--model_args", f"checkpoint={checkpoint}", "--device", "cpu"]
    code, output, _ = isoflop("lm_eval", *model, *options)
    assert code == 0
    assert "|colours|" in output
    lm_eval_scores = json.loads(next(tmp_path.glob("theirs*.json")).read_text())["results"]["colours"]
    code, output, _ = isoflop(
        "evaluate", checkpoint, "--tasks", tmp_path / "tasks", "--device", "cpu", "--ngram", "0", "--json"
    )
    our_scores = json.loads(output)["tasks"]["colours"]
    assert 0 < our_scores["acc"] < 1, "else equality says little"
    assert (lm_eval_scores["acc,none"], lm_eval_scores["acc_norm,none"]) == (our_scores["acc"], our_scores["acc_norm"])

    for model_args, message in [
        ("precision=fp32", "--model_args has no checkpoint"),
        (
            f"checkpoint={checkpoint},colour=red",
            "--model_args has colour; it accepts checkpoint, precision and batch_tokens",
        ),
        (f"checkpoint={checkpoint},precision=fp8", "precision is 'fp8'"),
        ("checkpoint=nowhere", "nowhere"),
    ]:
        code, _, error = isoflop("lm_eval", *model[:3], model_args, *options)
        assert code == 2
        assert message in error


def test_data_prepare_builds_the_shards_once(isoflop: Isoflop, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("ISOFLOP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus").mkdir()
    for i in range(20):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"document {i}: " + "words and more words. " * 40)
        (tmp_path / "corpus" / f"{i}.gz").touch()
    (tmp_path / "corpus" / "LICENCE").touch()
    overrides = ("data=text", f"data.path={tmp_path / 'corpus'}", "data.tokenizer=bytes", "cluster=local")
    arguments = ("data", "prepare", *overrides)
    code, output, error = isoflop(*arguments)
    assert code == 0
    assert "train: " in output
    assert "skipped: 21 files (20 .gz, 1 without ending); accepted are .txt, " in output
    assert re.search(r"built in \d.* s; [\d,]+ tokens/s", error)  # also without a terminal, as here
    shards = Path(re.findall("^shards: (.*)$", output, re.M)[0])
    assert (shards / "train.bin").exists()
    built = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.bin")}
    assert built
    assert isoflop(*arguments) == (0, output, "")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.bin")} == built


def test_compare_says_how_many_times_the_compute_the_base_needs(isoflop: Isoflop, tmp_path: Path) -> None:
    base, variant = simulate(Case("chinchilla", (4, 3, 2, 0.002), (1.5, 0.0, "D")), np.random.default_rng(0))
    for name, table in (("base", base), ("better", variant)):
        table.frame.to_csv(tmp_path / f"{name}.csv", index=False)
    tables = [tmp_path / "base.csv", tmp_path / "better.csv"]
    code, output, _ = isoflop("compare", *tables, "--json")
    (comparison,) = json.loads(output)
    middle = comparison["multipliers"][1]
    assert (code, comparison["base"], comparison["variant"]) == (0, "base", "better")
    assert middle["ci"][0] < 1.5 < middle["ci"][1]
    code, output, _ = isoflop("compare", *tables, "--target-flops", "1e15")
    assert code == 0
    assert "1e+15 (beyond the runs)" in " ".join(output.split())
    assert "compute multiplier is 1." in " ".join(output.split())
    assert "It is not known which benchmark tells recipes apart: no run has scores of tasks." in output
    frames = [
        table.frame.assign(variant=name, run_id=[f"{name}{i}" for i in range(len(table))])
        for name, table in (("base", base), ("better", variant), ("third", base))
    ]
    scored = pd.concat(frames, ignore_index=True)
    scored["quiz/acc"] = scored["variant"].map({"base": 0.3, "better": 0.4, "third": 0.2}) + 1e-3 * scored["seed"]
    scored.to_csv(tmp_path / "scored.csv", index=False)
    assert "quiz acc 100% [" in " ".join(isoflop("compare", tmp_path / "scored.csv")[1].split())
    for arguments, message in (
        ([tables[0]], "has only one variant; give two sweeps or tables, or a sweep of +grid=compare"),
        ([tables[0], tables[0]], "the two sides must not share a run"),
        ([tables[0], tmp_path / "no.csv"], "no.csv"),
        (["nothing.csv"], "'nothing.csv' is neither a path nor an override; give sweeps, tables, or"),
    ):
        code, _, error = isoflop("compare", *arguments)
        assert code == 2
        assert message in " ".join(error.split())


def test_compare_of_overrides_shows_the_plan_and_command(isoflop: Isoflop, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, error = isoflop(
        "compare", "cluster=local cluster.flops_per_second=1e11 grid.seeds=[0]", "model.qk_norm=true"
    )
    assert (code, error) == (0, "")
    assert "24 runs" in output  # 3 sizes, 4 D, twice
    assert "start it: python sweep.py +grid=compare cluster=local" in output
    assert "'grid.variants={qk_norm_true:[model.qk_norm=true]}'" in output
    assert not list(tmp_path.iterdir())


def test_the_console_script_is_installed(smoke: tuple[Path, str]) -> None:
    script = Path(sys.executable).parent / "isoflop"
    if not script.exists():
        pytest.skip("isoflop is not installed next to this interpreter")
    environment = {**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning:isoflop"}
    process = subprocess.run([script, "status", smoke[0]], capture_output=True, text=True, env=environment, check=False)
    assert process.returncode == 0, process.stderr
    assert "4 done" in process.stdout


def test_a_closed_pipe_is_no_error(smoke: tuple[Path, str]) -> None:
    command = f"{sys.executable} -m isoflop status {smoke[0]} --json | head -1"
    process = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert "Traceback" not in process.stderr


def test_ctrl_c_during_an_evaluation_is_a_sentence(isoflop: Isoflop, monkeypatch: Patch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("isoflop.train.checkpoint.checkpoint.find", interrupted)
    code, _, error = isoflop("evaluate", "checkpoint")
    assert code == 130
    assert error.startswith("interrupted; finished work is kept")
    monkeypatch.setattr("isoflop.sweeps.execute.conduct.conduct", interrupted)
    code, _, error = isoflop("tune", "cluster=local")
    assert code == 130
    assert error.count("interrupted; finished work is kept") == 1


def modification_times(folder: Path) -> dict[str, int]:
    """Return when each file of a sweep was last written, without locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".lock")]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_a_sweep_that_is_asked_for_again_writes_only_what_is_out_of_date(folder: Path) -> None:
    def files_changed_by_sweep(*overrides: str) -> set[str]:
        before = modification_times(folder)
        assert sweep_main([*SMOKE, f"output_root={folder.parent}", *overrides]) == 0
        return {name for name, time_ns in modification_times(folder).items() if before.get(name) != time_ns}

    def files_changed_by_results() -> set[str]:
        before = modification_times(folder)
        write_results(SweepDirectory.open(folder))
        return {name for name, time_ns in modification_times(folder).items() if before.get(name) != time_ns}

    results = {"table.csv", "costs.json", "fit/law.json", "fit/report.html", "fit/inputs.json"}
    assert files_changed_by_sweep() >= {"sweep.yaml", *results}, "the copy is in another folder"
    assert files_changed_by_sweep() == set()
    changed = files_changed_by_sweep("fit.bootstrap=101")
    assert changed >= {"sweep.yaml", *results}
    assert not any(name.startswith("runs/") for name in changed)
    assert files_changed_by_sweep("fit.bootstrap=101") == set()
    (folder / "fit" / "report.html").unlink()
    assert files_changed_by_results() >= results
    for text in ('{"digest"', '{"digest": "of an older version"}'):
        (folder / "fit" / "inputs.json").write_text(text)
        assert files_changed_by_results() >= results
    run = SweepDirectory.open(folder).runs()[0]
    (run.path / "summary.json").write_text(json.dumps(run.summary()))
    assert files_changed_by_results() >= results, "a run wrote its summary again"
    assert files_changed_by_results() == set()


def test_a_warning_of_ours_is_a_note_and_shows_no_code(isoflop: Isoflop, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text about tensors and words\n" * 500)
    overrides = ("data=text", f"data.path={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}", "data.tokenizer=bpe")
    code, _, error = isoflop("data", "prepare", *overrides)
    assert code == 0
    assert re.search(r"^note: data.vocab_size is 4096; the corpus is enough for \d+,", error, re.MULTILINE)
    assert "UserWarning" not in error


# Commands that manage a sweep


def test_status_shows_all_of_a_sweep_when_asked(isoflop: Isoflop, sweep: SweepDirectory, monkeypatch: Patch) -> None:
    monkeypatch.setattr("isoflop.sweeps.observe.status.ROWS", 3)
    first, *others = sweep.runs()
    status = json.loads(isoflop("status", sweep.path, "--json")[1])
    assert status["states"] == {"done": 4}
    assert [row["loss"] for row in status["runs"]] == [(run.summary() or {})["val_loss"] for run in sweep.runs()]
    assert all(row["step"] == row["steps"] for row in status["runs"])
    set_state(first, "failed", reason="the disk is full")
    code, output, _ = isoflop("status", sweep.path)
    assert code == 0
    assert f"{first.run_id} failed: the disk is full" in output
    assert "3 done" in output
    assert "not shown: 3 done; --all shows every run" in output
    assert not any(other.run_id in output for other in others)
    _, output, _ = isoflop("status", sweep.path, "--all")
    assert all(other.run_id in output for other in others)


@pytest.mark.parametrize("command", [("status",), ("logs",), ("logs", "RUN"), ("doctor",), ("cancel",), ("retry",)])
def test_no_byte_of_a_file_reaches_the_terminal_as_a_command_to_it(
    isoflop: Isoflop, sweep: SweepDirectory, monkeypatch: Patch, command: tuple[str, ...]
) -> None:
    run = sweep.runs()[0]
    set_state(run, "failed", reason="\x1b[2Jgone\x07")
    run.log("\x1b]0;title\x07")
    write_json(run.path / "cancel.json", {"by": "\x9b31m", "at": 0.0})
    monkeypatch.setattr(conduct, "resume", lambda sweep, only: 0)
    code, *outputs = isoflop(command[0], sweep.path, *[run.run_id for _ in command[1:]])
    assert code in (0, 1)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(outputs))
    assert r"\x1b" in "".join(outputs) or command[0] in ("doctor", "cancel")


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


@pytest.mark.parametrize("target", ["nowhere/more.yaml", "."])
def test_a_suggestion_that_cannot_be_written_is_one_sentence(
    isoflop: Isoflop, sweep: SweepDirectory, target: str, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setattr(suggest, "suggest_runs", lambda *_, **__: SimpleNamespace(grid={"kind": "points"}))
    code, _, error = isoflop("suggest", sweep.path, "--budget", 1e12, "--write", tmp_path / target)
    assert code == 2
    assert f"--write is {tmp_path / target}" in error
    assert "name a" in error
    assert not (tmp_path / "nowhere").exists()


def test_cancel_and_retry_pass_on_their_exit_codes(isoflop: Isoflop, sweep: SweepDirectory, monkeypatch: Patch) -> None:
    monkeypatch.setattr(conduct, "resume", lambda sweep, only: 1)
    first = sweep.runs()[0]
    (first.path / "summary.json").unlink()
    set_state(first, "preempted", reason="signal SIGTERM")
    code, output, error = isoflop("cancel", sweep.path, first.run_id[:6], "--json")
    (changed,) = json.loads(output)["changed"]
    assert (code, changed["run_id"], changed["state"]) == (0, first.run_id, "cancelled")
    assert error == f"run {first.run_id} is cancelled\n"
    assert isoflop("retry", sweep.path)[0] == 0  # a run that was cancelled by hand has not failed
    code, output, _ = isoflop("retry", sweep.path, first.run_id[:6])
    assert code == 1
    assert "will be retried; it was cancelled" in output
    isoflop("cancel", sweep.path, first.run_id[:6])
    assert f"run {first.run_id} will be retried" in isoflop("retry", sweep.path, "--cancelled")[1]


def test_the_shell_completes_run_ids(sweep: SweepDirectory) -> None:
    run_id = sweep.runs()[0].run_id
    environment = {
        **os.environ, "_ISOFLOP_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": f"isoflop logs {sweep.path} {run_id[:4]}",
    }  # fmt: skip
    code = "import sys; sys.argv = ['isoflop']; from isoflop.sweeps.cli.main import main; main()"
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run_id in process.stdout
    assert "done, N 218k D 32.8k" in process.stdout
    assert not any(other.run_id in process.stdout for other in sweep.runs()[1:])


@pytest.mark.parametrize("arguments", [("fit", "--target-flops", "1e15"), ("report",)])
def test_a_law_is_printed_as_json(isoflop: Isoflop, sweep: SweepDirectory, arguments: tuple[str, ...]) -> None:
    shutil.rmtree(sweep.path / "fit")
    (sweep.path / "table.csv").unlink()
    code, output, _ = isoflop(arguments[0], sweep.path, *arguments[1:], "--json")
    assert code == 0
    law = json.loads(output)
    assert arguments == ("report",) or law["law"] is None  # a law has more parameters than there are runs
    assert "no_parametric" in {warning["code"] for warning in law["warnings"]}
    assert json.loads((sweep.path / "fit" / "law.json").read_text())["warnings"] == law["warnings"]
    assert (sweep.path / "fit" / "report.html").exists()
    assert (sweep.path / "table.csv").exists()


ON_SWEEPS = ("status", "logs", "retry", "cancel", "extend", "doctor", "sync", "report")


@pytest.mark.parametrize("command", ON_SWEEPS)
def test_what_is_no_sweep_is_refused(isoflop: Isoflop, sweep: SweepDirectory, tmp_path: Path, command: str) -> None:
    def refusal(*arguments: object) -> str:
        code, output, error = isoflop(command, *arguments)
        assert (code, output, len(error.strip().splitlines())) == (2, "", 1)
        return str(error)

    assert "is not a sweep directory" in refusal(tmp_path)
    if command in ("logs", "retry", "cancel"):
        assert "run is 'zzz'; it must be the beginning of exactly one run id of" in (
            message := refusal(sweep.path, "zzz")
        )
        assert "matches none" in message
    plan = json.loads((sweep.path / "plan.json").read_text())
    for planned in plan["runs"]:
        del planned["estimated_seconds"]
    (sweep.path / "plan.json").write_text(json.dumps(plan))
    if command != "doctor":  # the doctor reports it as a finding
        message = refusal(sweep.path)
        assert "missing required field estimated_seconds" in message
        assert "use the version that wrote it" in message
