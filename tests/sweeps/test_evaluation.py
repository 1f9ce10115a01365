"""Checkpoints of a trunk and its branch: which are kept and scored, and their rows and pages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml
from fake_sweep import planned_run
from isoflop import fit
from isoflop.sweeps import prepare
from isoflop.sweeps.entry import compose
from isoflop.sweeps.execute.attempt import Interrupt, train_one
from isoflop.sweeps.plan.trunks import keep_between, merge_runs, steps_between
from isoflop.sweeps.results import scoring
from isoflop.sweeps.results.scoring import is_scored, wanted_steps
from isoflop.sweeps.results.table import build_table, name_recipes_apart, name_texts_apart, write_table
from isoflop.sweeps.runs import lease
from isoflop.sweeps.runs.attempts import Policy
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.train.config import DataConfig, RunConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.files import read_json, write_json
from isoflop.train.flops import flops_exact
from isoflop.train.job.environment import Ranks
from isoflop.train.schedule import trunk_steps
from small_runs import Patch, forty_steps, own_signals, set_state

EVERY = 10


def family(base: RunConfig) -> list[RunConfig]:
    """Return a trunk of 80 steps, and a branch of 40 that begins at step 32."""
    return merge_runs([replace(base, tokens=2 * base.tokens), base]).runs


def test_a_run_keeps_a_checkpoint_every_so_many_of_its_own_steps() -> None:
    trunk, branch = family(forty_steps(DataConfig(sequence_length=16)))
    assert (trunk_steps(branch), branch.parent) == (32, run_id(trunk))
    assert steps_between(trunk, 10) == [10, 20, 30, 40, 50, 60, 70]
    assert steps_between(trunk, 80) == steps_between(trunk, None) == []
    assert steps_between(branch, 10) == []
    assert steps_between(branch, 4) == [36]
    assert steps_between(branch, 32) == []  # step 32 is a checkpoint of the trunk


def test_what_is_kept_for_branches_stays_and_no_run_becomes_another() -> None:
    runs = family(forty_steps(DataConfig(sequence_length=16)))
    merged = keep_between(runs, 30)
    assert [run.checkpoint.at_steps for run in merged] == [[30, 32, 60], None]
    assert [run_id(run) for run in merged] == [run_id(run) for run in runs]
    assert keep_between(merged, 30) == merged
    assert keep_between(runs, None) == runs


def test_a_missing_task_is_refused(tmp_path: Path, monkeypatch: Patch, small_corpus: Callable[..., DataConfig]) -> None:
    data = small_corpus(512)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quiz.jsonl").write_text('{"question": "a", "choices": ["b", "c"], "answer": 0}')
    monkeypatch.setattr("isoflop.evaluate.tasks.hub.task_manager", lambda *_: SimpleNamespace(all_tasks=["mmlu"]))

    def planned(path: str, *overrides: str) -> list[str]:
        config = compose(
            ["+grid=smoke", "cluster=local", "cluster.flops_per_second=1e11", "tracker=none", "evaluate=custom",
             f"evaluate.path={path}", "data=text", f"data.path={data.path}", f"data.cache_dir={data.cache_dir}",
             "data.tokenizer=bytes", *overrides]
        )  # fmt: skip
        config.sweep, config.output_root = "sweep", str(tmp_path)
        return prepare.from_config(config).config.evaluate.tasks

    assert planned("quiz.jsonl") == [f"{tmp_path}/quiz.jsonl"]
    for missing in ("quis.jsonl", "text:held_out"):
        with pytest.raises(UserError, match="does not exist; give a file or a folder"):
            planned(missing)
    with pytest.raises(UserError, match="'quiz' is neither a task of lm-eval nor a folder"):
        planned("quiz")
    (tmp_path / "code.yaml").write_text("task: x\ndoc_to_text: !function utils.run\n")
    (tmp_path / "utils.py").write_text("run = len")
    with pytest.raises(UserError, match=r"code.yaml runs its own Python .* evaluate.allow_code=true in a sweep"):
        planned("code.yaml")
    assert planned("code.yaml", "evaluate.allow_code=true") == [f"{tmp_path}/code.yaml"]
    (tmp_path / "quiz").mkdir()
    assert planned("quiz") == [f"{tmp_path}/quiz"]
    (tmp_path / "mmlu").mkdir()
    assert planned("mmlu") == ["mmlu"]  # lm-eval's name has priority over a folder, as when tasks are loaded
    assert not (tmp_path / "sweep").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small_corpus: Callable[..., DataConfig]) -> Path:
    """Train a sweep of the trunk and the branch of `family`, without scoring."""
    folder = tmp_path_factory.mktemp("sweeps") / "family"
    sweep, runs = SweepDirectory(folder), keep_between(family(forty_steps(small_corpus(512))), EVERY)
    plan = [
        planned_run(run_id(run), name=name, width=16, heads=2, estimated_seconds=1.0, parent=run.parent)
        for name, run in zip(("trunk", "branch"), runs, strict=True)
    ]
    write_json(folder / "plan.json", {"runs": plan})
    questions = [
        {"question": f"the loss of {word}", "choices": [" tensor", " kernel", " of"], "answer": place % 3}
        for place, word in enumerate(["the", "loss", "tensor", "kernel", "of", "the loss"])
    ]
    (folder / "words.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    settings = {"tasks": [str(folder / "words.jsonl")], "limit": None, "every": EVERY, "ngram": 8}
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"config": {"evaluate": settings}}))
    with own_signals():
        for config in runs:
            run = sweep.run(run_id(config))
            run.freeze(config)
            set_state(run, "planned")
            with lease.hold(run, "7", Policy()):
                lease.conclude(run, train_one(run, Ranks(), Interrupt(), Policy()))
    return folder


def score(sweep: SweepDirectory) -> None:
    """Score all runs without scores, as a worker does."""
    settings, evaluator = sweep.settings()["config"]["evaluate"], None
    for run in sweep.runs():
        if not is_scored(run, settings):
            evaluator = evaluator or scoring.open_evaluator(settings, run.log)
            scoring.evaluate_run(run, settings, evaluator)


@pytest.fixture(scope="module")
def scored(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored") / "family"
    shutil.copytree(trained, folder)
    score(SweepDirectory(folder))
    return folder


def opened(folder: Path) -> tuple[RunDirectory, RunDirectory, dict[str, Any]]:
    sweep = SweepDirectory(folder)
    trunk, branch = sweep.runs()
    return trunk, branch, sweep.settings()["config"]["evaluate"]


def test_every_kept_and_final_checkpoint_is_scored_once(trained: Path, scored: Path, monkeypatch: Patch) -> None:
    trunk, branch, settings = opened(trained)
    assert wanted_steps(trunk, settings) == [10, 20, 30, 40, 50, 60, 70, 80]
    assert wanted_steps(branch, settings) == [40]
    assert not is_scored(trunk, settings)
    trunk, branch, settings = opened(scored)
    assert is_scored(trunk, settings)
    assert is_scored(branch, settings)
    assert not is_scored(trunk, settings | {"limit": 3})
    # The trunk has the checkpoints of the shared part, and only final checkpoints keep their items.
    assert [path.name for path in (trunk.path / "eval").glob("*.items.jsonl.gz")] == ["step_80.items.jsonl.gz"]
    monkeypatch.setattr(scoring, "open_evaluator", lambda *_: pytest.fail("nothing is left to score"))
    score(SweepDirectory(scored))


def test_decoding_is_timed_if_asked_and_costs_no_other_score(scored: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = tmp_path / "family"
    shutil.copytree(scored, folder)
    trunk, _, settings = opened(folder)
    before = {step: read_json(trunk.path / "eval" / f"step_{step}.json") or {} for step in (70, 80)}
    request = read_json(trunk.path / "eval" / "step_80.request.json") or {}
    assert [*request] == ["tasks", "limit", "ngram"]  # equal to requests of sweeps from before decoding was timed
    assert "decode" not in before[80]
    assert not {"decode_seconds", "decode_device"} & {*build_table(SweepDirectory(folder))}
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"config": {"evaluate": settings | {"decode": True}}}))
    monkeypatch.setattr("isoflop.evaluate.checkpoint.answer_task", lambda *_: pytest.fail("a task is scored again"))
    for _ in range(2):  # the second pass has nothing to score
        score(SweepDirectory(folder))
        monkeypatch.setattr(scoring, "open_evaluator", lambda *_: pytest.fail("nothing is left to score"))
    after = {step: read_json(trunk.path / "eval" / f"step_{step}.json") or {} for step in (70, 80)}
    timed = after[80].pop("decode")
    assert {step: scores | {"checkpoint": ""} for step, scores in after.items()} == {
        step: scores | {"checkpoint": ""} for step, scores in before.items()
    }
    table = build_table(SweepDirectory(folder))
    rows = table[table["run_id"] == trunk.run_id].set_index("step")
    assert (rows["decode_seconds"][80], rows["decode_device"][80]) == (timed["seconds"], timed["device"])
    assert rows["decode_seconds"].drop(80).isna().all()
    assert timed["device"] == (trunk.summary() or {})["device"]


def test_quantized_losses_are_columns_and_measured_once(trained: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = tmp_path / "family"
    shutil.copytree(trained, folder)
    trunk, branch, settings = opened(folder)
    settings |= {"tasks": [], "every": None, "quantize": ["int8", "int3:gptq"]}  # also without any benchmark
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"config": {"evaluate": settings}}))
    score(SweepDirectory(folder))
    monkeypatch.setattr("isoflop.evaluate.quantization.quantize.quantize_model", lambda *_: pytest.fail("once more"))
    assert is_scored(trunk, settings)
    score(SweepDirectory(folder))
    (branch.path / "eval" / "step_40.request.json").unlink()  # killed between its two files
    score(SweepDirectory(folder))
    table = build_table(SweepDirectory(folder))
    assert len(table) == 2
    assert (table["quantized_loss_int8_rtn"] - table["loss"]).abs().max() < 0.01
    assert (table["quantized_loss_int3_gptq"] != table["loss"]).all()
    assert table["quantized_loss_int3_gptq"].notna().all()
    scoring.write_pages(SweepDirectory(folder), table, {})
    assert not (folder / "fit" / "evaluation.html").exists()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[int5:awq]", r"evaluate.quantize is \['int5:awq'\]: format is 'int5'; it must be one of int8"),
        ("[int4:best]", "method is 'best'; it must be one of rtn"),
        ("[int4,int4:rtn]", "must not be repeated"),
        ("[mxfp4]", "group is 32; it must divide 48, the width of blocks.0.attention.qkv.weight"),
    ],
)
def test_formats_that_do_not_exist_or_fit_are_refused_when_a_sweep_is_planned(
    entries: str, message: str, tmp_path: Path, small_corpus: Callable[..., DataConfig]
) -> None:
    data = small_corpus(512)
    config = compose(
        ["+grid=points", "cluster=local", "cluster.flops_per_second=1e11", "evaluate=none",
         f"evaluate.quantize={entries}",
         "grid.points=[{model.width:48,model.heads:2,tokens:65536}]", "data=text", f"data.path={data.path}",
         f"data.cache_dir={data.cache_dir}", "data.tokenizer=bytes"]
    )  # fmt: skip
    config.sweep, config.output_root = "sweep", str(tmp_path)
    with pytest.raises(UserError, match=message):
        prepare.from_config(config)
    assert not (tmp_path / "sweep").exists()


def test_the_grid_of_attention_asks_for_the_time_of_decoding() -> None:
    assert compose(["+grid=attention", "cluster=local"]).evaluate.decode
    assert not compose(["+grid=attention", "cluster=local", "evaluate.decode=false"]).evaluate.decode


def test_a_score_has_the_loss_of_the_training_or_computes_it(scored: Path) -> None:
    trunk, _, _ = opened(scored)
    held_out = {step: (read_json(trunk.path / "eval" / f"step_{step}.json") or {})["held_out"] for step in (10, 40, 80)}
    summary = trunk.summary() or {}
    worst = held_out[80].pop("worst")  # only the final checkpoint's page shows samples
    assert held_out[80] == {name: summary[name] for name in ("val_loss", "val_loss_se", "val_bpb")}
    assert worst[0]["loss"] >= summary["val_loss"] > 0
    assert worst[0]["text"]
    assert "worst" not in held_out[40]  # with validations=2 this loss comes from training
    assert held_out[10]["worst"][0]["loss"] >= held_out[10]["worst"][-1]["loss"] > 0
    assert held_out[10]["val_loss"] > held_out[40]["val_loss"] > held_out[80]["val_loss"]


def test_a_checkpoint_that_was_not_kept_is_not_missed(scored: Path, tmp_path: Path) -> None:
    folder = tmp_path / "family"
    shutil.copytree(scored, folder)
    trunk, _, settings = opened(folder)
    shutil.rmtree(trunk.path / "checkpoints" / "step_10")
    assert wanted_steps(trunk, settings)[0] == 20
    assert is_scored(trunk, settings)
    assert wanted_steps(trunk, settings | {"every": 7}) == [70, 80]
    (trunk.path / "eval" / "step_20.json").unlink()
    assert not is_scored(trunk, settings)


def test_a_scored_checkpoint_is_a_row_and_only_final_ones_are_fitted(scored: Path) -> None:
    trunk, branch, _ = opened(scored)
    table = build_table(SweepDirectory(scored))
    rows = table[table["run_id"] == trunk.run_id]
    assert list(rows["step"]) == [80, 10, 20, 30, 40, 50, 60, 70]
    assert list(rows["final"]) == [True] + [False] * 7
    assert list(table["final"]).count(True) == 2
    config = trunk.config()
    first = rows[rows["step"] == 10].iloc[0]
    assert first["D"] == 10 * config.batch_tokens
    assert first["flops"] == first["flops_exact"] == flops_exact(config) / 8
    assert first["flops_6nd"] == 6 * first["N"] * first["D"]
    assert pd.isna(first["seconds"])
    assert first["N_non_embedding"] == rows.iloc[0]["N_non_embedding"]
    assert set(table["recipe"]) == {"raw"}
    for name in ("acc", "gold_bpb", "p_right", "margin", "p_right_se", "contaminated_items"):
        assert table[f"words/{name}"].notna().all(), name
    runs = fit.read_table(table)
    assert sorted(runs.run_id) == sorted([trunk.run_id, branch.run_id])
    assert "7 intermediate checkpoints are left out of the fits." in runs.notes


def test_a_recipe_is_a_column_and_two_of_one_name_are_told_apart(scored: Path, tmp_path: Path) -> None:
    folder = tmp_path / "family"
    shutil.copytree(scored, folder)
    trunk, _, _ = opened(folder)
    values = yaml.safe_load((trunk.path / "config.yaml").read_text())
    values["data"]["recipe"] = ["gopher", "near:0.8"]
    (trunk.path / "config.yaml").write_text(yaml.safe_dump(values))
    table = build_table(SweepDirectory(folder))
    assert set(table[table["run_id"] == trunk.run_id]["recipe"]) == {"gopher+near:0.8"}
    rows = [{"recipe": "quality:m.bin@0.5", "recipe_fingerprint": digest} for digest in ("a", "b", "a")]
    rows.append({"recipe": "exact", "recipe_fingerprint": "e"})
    told_apart = [*(f"quality:m.bin@0.5 ({digest})" for digest in "aba"), "exact"]
    assert [row["recipe"] for row in name_recipes_apart(rows)] == told_apart
    assert name_recipes_apart(rows[2:]) == rows[2:]


def test_runs_that_are_scored_on_different_text_have_laws_of_their_own() -> None:
    rows = [
        {"recipe": "raw", "corpus": corpus, "held_out": held_out}
        for corpus, held_out in (("web", "a"), ("web", "b"), ("code", "c"), ("code", "c"))
    ]
    named = [row["recipe"] for row in name_texts_apart(rows)]
    assert named == ["web (a): raw", "web (b): raw", "code: raw", "code: raw"]
    assert name_texts_apart(rows[2:]) == rows[2:]


def test_the_pages_link_to_each_other_and_are_written_once(scored: Path, tmp_path: Path) -> None:
    folder = tmp_path / "family"
    shutil.copytree(scored, folder)
    sweep = SweepDirectory(folder)
    trunk, branch, _ = opened(folder)
    answers = scoring.final_answers(sweep)
    assert answers.keys() == {trunk.run_id, branch.run_id}
    table = write_table(sweep, answers)
    scoring.write_pages(sweep, table, answers)
    page = folder / "fit" / "evaluation.html"
    links = [f"../runs/{run.run_id}/eval/step_{step}.html" for run, step in ((trunk, 80), (branch, 40))]
    assert all(link in page.read_text() for link in links)
    assert all((page.parent / link).exists() for link in links)
    before = [(page.parent / link).stat().st_mtime_ns for link in links]
    scoring.write_pages(sweep, table, answers)
    assert [(page.parent / link).stat().st_mtime_ns for link in links] == before
