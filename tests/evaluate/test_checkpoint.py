"""Evaluation of saved GPTs on made-up tasks: scores, items and answers are written, resumed, shared or refused."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from filelock import FileLock
from forked import fork_processes
from gpu_stand_in import META, kernels_on_meta, stand_in
from isoflop.evaluate import checkpoint
from isoflop.evaluate.checkpoint import Evaluator, worst_windows
from isoflop.evaluate.inference.ranks import on_ranks
from isoflop.evaluate.items import items_path, read_items
from isoflop.evaluate.pages.report import format_scores
from isoflop.evaluate.records import SETTINGS
from isoflop.evaluate.tasks.suite import Suite, SuiteTask, freeze, quiet
from isoflop.train.checkpoint.checkpoint import ALONE, load_for_evaluation, whole_weights
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig
from isoflop.train.data.shards import prepare
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError
from isoflop.train.flops import training_flops_per_token
from lm_eval.tasks import TaskManager
from simple_models import gpt
from small_disk import disk_of

HELD_OUT: dict[str, Any] = {"val_loss": 1.5, "val_loss_se": 0.01, "val_bpb": 2.164, "worst": []}
KINDS: dict[str, dict[str, Any]] = {
    "chosen": {"output_type": "multiple_choice", "doc_to_choice": "{{a}}", "doc_to_target": "gold",
               "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
    "last_word": {"output_type": "loglikelihood", "doc_to_target": "{{a[0]}}", "metric_list": [{"metric": "acc"}]},
    "written": {"output_type": "generate_until", "doc_to_target": "{{a[0]}}",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4}, "metric_list": [{"metric": "exact_match"}]},
    "text": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}} {{a[1]}}",
             "metric_list": [{"metric": "bits_per_byte"}]},
}  # fmt: skip


SHAPE: dict[str, Any] = {"width": 16, "depth": 1, "heads": 2, "vocab_size": 256, "vocab_multiple": 8}
LENGTH = 64


def rows_of(count: int) -> list[dict[str, Any]]:
    """Return questions of eight words with two answers each."""
    rng = np.random.default_rng(0)

    def words(number: int) -> str:
        return " ".join("".join(rng.choice(list("abcdé"), size=4)) for _ in range(number))

    return [{"q": words(8), "a": [words(1), words(2)], "gold": i % 2} for i in range(count)]


@functools.cache
def made_up(name: str, count: int) -> SuiteTask:
    """Return a task of one of `KINDS`."""
    config = {
        "doc_to_text": "{{q}}", **KINDS[name], "task": name, "test_split": "test", "metadata": {"version": 1},
        "dataset_path": "none", "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows_of(count))},
    }  # fmt: skip
    with quiet():
        task = TaskManager(include_defaults=False).load([config])["tasks"][name]
    return freeze(name, task, list(range(count)), count, "test", "made up")


def suite_of(count: int = 6, names: tuple[str, ...] = ("chosen", "last_word", "written", "text")) -> Suite:
    return {name: made_up(name, count) for name in names}


def make_run(folder: Path) -> Path:
    """Make a run with checkpoints of steps 3 and 7 and one of NaN; its corpus has items 1 and 2 of a task."""
    folder.mkdir()
    leaks = [f"{row['q']} {row['a'][row['gold']]}" for row in rows_of(3)[1:]]
    texts = [f"text {number}, {leaks[number % 2]}, and more of the kind" for number in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = DataConfig(
        corpus="text", path=str(folder / "text.jsonl"), sequence_length=LENGTH, validation_fraction=0.2,
        validation_tokens=640, cache_dir=str(folder / "cache"),
    )  # fmt: skip
    prepare(data)
    config = RunConfig(model=ModelConfig(**SHAPE), data=data, checkpoint=CheckpointConfig(keep=3))
    saver = Saver(folder / "checkpoints", ALONE, config, ByteTokenizer())
    for step in (3, 7, 9):
        model = gpt(step, LENGTH, torch.float32, **SHAPE)
        if step == 9:
            torch.nn.init.constant_(model.embedding.weight, math.nan)
        saver.save(step, whole_weights(model), {})
    saver.wait()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run")


Evaluate = Callable[..., Any]
OF_A_CALL = ("held_out", "keep_items", "decode", "progress")  # all other settings belong to an evaluator


@pytest.fixture
def evaluate(run: Path, isoflop_cache: Path) -> Evaluate:
    """Return a function that evaluates a step's checkpoint; its `asked` lists the tasks that the model computed."""

    def call(output: Path, suite: Suite, step: int = 3, folder: Path = run, **more: Any) -> Any:
        lines = call.lines = list[str]()  # type: ignore[attr-defined]
        options: dict[str, Any] = {"held_out": HELD_OUT, "progress": lines.append}
        options |= {name: more.pop(name) for name in OF_A_CALL if name in more}
        evaluator = Evaluator(suite, **{"device": "cpu"} | more)
        scores = evaluator.evaluate(folder / "checkpoints" / f"step_{step}", output, **options)
        call.asked = [line.split(":")[0] for line in lines if line.split(":")[0] in KINDS]  # type: ignore[attr-defined]
        return scores

    return call


def timeless(scores: dict[str, Any]) -> Any:
    tasks = {name: task | {"seconds": 0} for name, task in scores["tasks"].items()}
    return scores | {"seconds": 0, "tasks": tasks}


def test_scores_and_items_are_written_and_a_line_is_said_of_each_task(run: Path, evaluate: Any, tmp_path: Path) -> None:
    out = tmp_path / "eval" / "step_7.json"
    scores = evaluate(out, suite_of(), 7, held_out=None)
    assert json.loads(out.read_text()) == scores
    assert sorted(evaluate.asked) == sorted(KINDS)
    assert evaluate.asked[-1] == "written", "the most expensive task comes last"
    loaded = load_for_evaluation(run / "checkpoints" / "step_7")
    assert scores["held_out"] == worst_windows(loaded)
    assert scores["tokens"] == 7 * loaded.config.batch_tokens
    assert scores["flops"] == training_flops_per_token(loaded.config.model, LENGTH) * scores["tokens"]
    assert scores["N_total"] > scores["N_non_embedding"] > 0
    assert (scores["step"], scores["tokenizer"]) == (7, ByteTokenizer.fingerprint)
    assert len(scores["checkpoint_sha256"]) == 64
    assert scores["seconds"] == pytest.approx(sum(task["seconds"] for task in scores["tasks"].values()), abs=1e-3)
    # Only the lock file remains, and its lock is released.
    assert {path.name for path in out.parent.iterdir()} == {"step_7.json", "step_7.items.jsonl.gz", ".step_7.json.lock"}
    items, tasks = read_items(items_path(out)), scores["tasks"]
    assert [item["task"] for item in items] == [name for name in KINDS for _ in range(6)]
    chosen = items[:6]
    assert tasks["chosen"]["acc"] == pytest.approx(np.mean([item["values"]["acc"] for item in chosen]))
    for name in ("p_right", "margin", "gold_bpb"):
        assert tasks["chosen"][name] == pytest.approx(np.mean([item[name] for item in chosen]))
    assert (len(chosen[0]["choices"]), chosen[0]["right"], chosen[0]["contaminated"]) == (2, [0], None)
    assert all(item["bpb"] > 0 for item in items if item["task"] == "text")
    assert all(isinstance(item["answer"], str) and item["target"] for item in items if item["task"] == "written")


def test_a_whole_suite_is_scored_on_a_gpu(evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on `meta`, where every value that the host reads is zero."""
    monkeypatch.setattr(checkpoint, "pick_device", lambda *_: META)
    with kernels_on_meta():
        gpu = stand_in(monkeypatch)
        scores = evaluate(tmp_path / "s.json", suite_of(), precision="bf16")
    assert sorted(evaluate.asked) == sorted(KINDS)
    assert scores["device"] == "meta"
    assert gpu.reads


def test_nothing_is_scored_twice_and_everything_that_changed_is(evaluate: Any, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"

    def again(suite: Suite, step: int = 3, **more: Any) -> Any:
        evaluate(out, suite, step, **more)
        return evaluate.asked

    assert again(suite_of(6, ("chosen",))) == ["chosen"]
    content = out.read_bytes()
    assert again(suite_of(6, ("chosen",))) == []
    assert out.read_bytes() == content
    assert again(suite_of(6, ("last_word", "chosen"))) == ["last_word"]  # only what is missing
    assert again(suite_of(7, ("chosen",))) == ["chosen"]  # other items
    assert set(json.loads(out.read_text())["tasks"]) == {"chosen", "last_word"}
    assert [item["task"] for item in read_items(items_path(out))] == ["chosen"] * 7 + ["last_word"] * 6
    newer = {"chosen": replace(made_up("chosen", 7), version=2)}
    assert again(newer) == ["chosen"]
    assert again(newer, precision="bf16") == ["chosen"]
    scores = json.loads(out.read_text())
    assert {name: task["precision"] for name, task in scores["tasks"].items()} == {
        "last_word": "fp32", "chosen": "bf16",
    }  # fmt: skip
    assert evaluate.lines[0].startswith("scored again")
    assert evaluate.lines[1].startswith("earlier scores")
    assert "last_word was scored with different settings" in format_scores(scores)
    # An earlier version wrote settings that hold for all tasks only once.
    scores["tasks"] = {"chosen": {k: v for k, v in scores["tasks"]["chosen"].items() if k not in SETTINGS}}
    out.write_text(json.dumps(scores))
    assert again(newer, precision="bf16") == []
    assert again(suite_of(7, ("chosen",)), 7) == ["chosen"]  # another checkpoint replaces all scores
    assert set(json.loads(out.read_text())["tasks"]) == {"chosen"}


def test_where_a_disk_fills_up_the_next_evaluation_goes_on_at_the_request(evaluate: Any, tmp_path: Path) -> None:
    suite, small_batches = suite_of(12, ("chosen",)), {"batch_tokens": 64}
    expected = evaluate(tmp_path / "whole.json", suite, **small_batches)
    out, answers = tmp_path / "s.json", tmp_path / "s.answers.jsonl"
    with disk_of(1500), pytest.raises(UserError, match=r"answers cannot be written to .*; free some space"):
        evaluate(out, suite, **small_batches)
    assert not out.exists()  # not even one task is complete
    *lines, torn = answers.read_text().split("\n")
    assert len(lines) > 3
    assert torn
    assert timeless(evaluate(out, suite, **small_batches)) == timeless(expected)
    assert not answers.exists()
    assert read_items(items_path(out)) == read_items(items_path(tmp_path / "whole.json"))


def test_after_kill_9_the_tasks_that_were_scored_stay(evaluate: Any, tmp_path: Path) -> None:
    suite, out = suite_of(6, ("chosen", "last_word")), tmp_path / "s.json"
    expected = evaluate(tmp_path / "whole.json", suite)

    def victim(number: int, say: Callable[[str], None]) -> None:
        evaluate(
            out, suite, progress=lambda line: line.startswith("last_word:") and os.kill(os.getpid(), signal.SIGKILL)
        )

    assert fork_processes(1, victim, [0])[0].code == -signal.SIGKILL
    assert set(json.loads(out.read_text())["tasks"]) == {"last_word"}, "the cheaper task"
    assert timeless(evaluate(out, suite)) == timeless(expected)
    assert evaluate.asked == ["chosen"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(evaluate: Any, tmp_path: Path) -> None:
    out, suite = tmp_path / "s.json", suite_of(4, ("chosen",))
    with disk_of(1000), pytest.raises(UserError, match=r"scores cannot be written to .*; free some space") as raised:
        evaluate(out, suite)
    assert "\n" not in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == {".s.json.lock", "s.answers.jsonl", "s.items.jsonl.gz"}
    evaluate(out, suite)
    assert len(read_items(items_path(out))) == json.loads(out.read_text())["tasks"]["chosen"]["items"] == 4

    def full(ranks: Any) -> None:
        with disk_of(500):
            evaluate(tmp_path / "t.json", suite_of(6, ("chosen",)), ranks=ranks, batch_tokens=64)

    with pytest.raises(UserError, match="answers cannot be written"):  # and no rank waits for another
        on_ranks(2, full)


def test_corrupt_files_are_moved_aside_and_scored_again(evaluate: Any, tmp_path: Path) -> None:
    out, suite = tmp_path / "scores.json", suite_of(4, ("chosen",))
    contents = ['{"tasks": {"cho', "[]", '{"tasks": {"chosen": {}}}', "", '{"tasks": 3}', '{"tasks": {"chosen": 3}}']
    for number, content in enumerate(contents, 1):
        out.write_text(content)
        evaluate(out, suite)
        assert (tmp_path / f"scores.json.corrupt-{number}").read_text() == content
        assert json.loads(out.read_text())["tasks"]["chosen"]["items"] == 4
        assert evaluate.asked == ["chosen"]
        assert any("is not a file of scores" in line for line in evaluate.lines)
    # Items that are damaged cost no score.
    items_path(out).write_bytes(b"\x1f\x8bno")
    evaluate(out, suite_of(4, ("chosen", "last_word")))
    assert evaluate.asked == ["last_word"]
    assert (tmp_path / "scores.items.jsonl.gz.corrupt-1").exists()
    assert "is not a file of items" in evaluate.lines[0]
    assert [item["task"] for item in read_items(items_path(out))] == ["last_word"] * 4


def test_a_second_evaluation_into_the_same_file_waits(evaluate: Any, tmp_path: Path) -> None:
    out, lines, done = tmp_path / "s.json", list[str](), list[Any]()
    suite = suite_of(4, ("chosen",))
    with FileLock(tmp_path / ".s.json.lock", is_singleton=False):
        thread = threading.Thread(target=lambda: done.append(evaluate(out, suite, progress=lines.append)))
        thread.start()
        while thread.is_alive() and not lines:
            time.sleep(0.01)
        assert "waiting" in lines[0]
        assert not out.exists()
    thread.join(60)
    assert done[0]["tasks"]["chosen"]["items"] == 4


def test_bad_arguments_are_named_before_anything_is_written(evaluate: Any, tmp_path: Path) -> None:
    suite = suite_of(2, ("chosen",))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"ngram": 0}, "ngram is 0"),
        ({"folder": tmp_path / "nowhere"}, "nowhere.* does not exist"),
    ]
    for more, message in cases:
        with pytest.raises(UserError, match=message):
            evaluate(tmp_path / "s.json", suite, **more)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_one_sentence(evaluate: Any, tmp_path: Path) -> None:
    suite, inside = suite_of(2, ("chosen",)), tmp_path / "file" / "s.json"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="scores cannot be written to"):
        evaluate(inside, suite)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder is a folder; it must be a file"):
        evaluate(tmp_path / "folder", suite)
    assert (tmp_path / "folder").is_dir()
    with pytest.raises(UserError, match="scores cannot be written to"):  # and no rank waits for the first one
        on_ranks(2, lambda ranks: evaluate(inside, suite, ranks=ranks))


def test_items_that_are_there_do_not_fall_behind_their_scores(evaluate: Any, tmp_path: Path) -> None:
    out, training_loss = tmp_path / "s.json", {name: HELD_OUT[name] for name in ("val_loss", "val_loss_se", "val_bpb")}
    scores = evaluate(out, suite_of(3, ("chosen",)), keep_items=False, held_out=training_loss)
    assert not items_path(out).exists()
    assert scores["held_out"] == training_loss
    scores = evaluate(out, suite_of(4, ("chosen",)), held_out=training_loss)
    assert len(scores["held_out"].pop("worst")) == 10, "where items are kept, so are the windows of the highest loss"
    assert scores["held_out"] == training_loss
    evaluate(out, suite_of(5, ("chosen",)), keep_items=False)
    assert len(read_items(items_path(out))) == 5


def test_nan_withholds_the_score_and_names_the_item(evaluate: Any, tmp_path: Path) -> None:
    scores = evaluate(tmp_path / "s.json", suite_of(3), 9)["tasks"]
    for name, values in scores.items():
        assert values["withheld"].startswith("item 0:"), name
        assert all(values[key] is None for key in ("acc", "gold_bpb", "p_right", "margin", "bpb"))
    assert sum("withheld, item 0" in line for line in evaluate.lines) == 4
    items = read_items(items_path(tmp_path / "s.json"))
    assert all(nats is None for item in items for nats in item["log_probabilities"])


def test_contaminated_items_are_marked_and_the_rest_is_scored_apart(evaluate: Any, tmp_path: Path) -> None:
    out, shared, suite = tmp_path / "s.json", dict[str, Any](), suite_of(6, ("chosen",))
    options: dict[str, Any] = {"contaminated": shared}
    scores = evaluate(out, suite, ngram=8, **options)["tasks"]["chosen"]
    items = read_items(items_path(out))
    assert [item["contaminated"] for item in items] == [False, True, True, False, False, False]
    clean = [item for item in items if not item["contaminated"]]
    assert (scores["contaminated_items"], scores["clean"]["items"]) == (2, 4)
    assert scores["clean"]["acc"] == np.mean([item["values"]["acc"] for item in clean])
    assert scores["clean"]["gold_bpb"] == pytest.approx(np.mean([item["gold_bpb"] for item in clean]))
    ((key, _),) = shared.items()
    shared[key] = ({"chosen": {5}}, None)  # computed once for all checkpoints of a process
    other = evaluate(tmp_path / "t.json", suite, 7, ngram=8, **options)["tasks"]["chosen"]
    assert other["contaminated_items"] == 1
    evaluate(out, suite, ngram=9, **options)  # another question
    assert evaluate.asked == ["chosen"]
    evaluate(out, suite)  # none
    assert evaluate.asked == []


def test_training_text_that_is_elsewhere_costs_no_score(evaluate: Any, tmp_path: Path) -> None:
    folder, suite = make_run(tmp_path / "run"), suite_of(3, ("chosen",))
    for name in ("text.jsonl", "cache"):
        (folder / name).rename(folder / f"away_{name}")
    scores = evaluate(tmp_path / "s.json", suite, folder=folder, held_out=None, ngram=8)
    assert scores["held_out"]["val_bpb"] is None
    assert scores["held_out"]["withheld"] == scores["contamination_withheld"]
    assert "text.jsonl" in scores["contamination_withheld"]
    assert scores["tasks"]["chosen"]["acc"] is not None
    assert scores["tasks"]["chosen"]["clean"] is None
    # The loss that training recorded stays, without the windows that need the text.
    training_loss = {name: HELD_OUT[name] for name in ("val_loss", "val_loss_se", "val_bpb")}
    assert evaluate(tmp_path / "t.json", suite, folder=folder, held_out=training_loss)["held_out"] == training_loss
    # When the text is back, the loss is computed.
    for name in ("text.jsonl", "cache"):
        (folder / f"away_{name}").rename(folder / name)
    assert evaluate(tmp_path / "s.json", suite, folder=folder, held_out=None)["held_out"]["val_loss"] > 0


def test_a_mean_of_a_suite_is_of_all_its_tasks_scored_alike(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isoflop.evaluate.tasks.suite.SUITES", tmp_path)
    (tmp_path / "both.yaml").write_text("tasks: [chosen, last_word]")
    (tmp_path / "more.yaml").write_text("tasks: [chosen, absent]")
    out = tmp_path / "s.json"
    assert evaluate(out, suite_of(4, ("chosen",)))["suites"] == {}
    scores = evaluate(out, suite_of(4, ("last_word",)))
    assert set(scores["suites"]) == {"both"}
    two = [scores["tasks"][name] for name in ("chosen", "last_word")]
    assert scores["suites"]["both"]["centered"] == pytest.approx(((two[0]["acc"] - 0.5) / 0.5 + two[1]["acc"]) / 2)
    assert evaluate(out, suite_of(4, ("last_word",)), precision="bf16")["suites"] == {}


def test_ranks_share_the_work_and_give_the_same_scores(evaluate: Any, tmp_path: Path) -> None:
    suite = suite_of(8)
    expected = evaluate(tmp_path / "one.json", suite, batch_tokens=64)
    scores = on_ranks(2, lambda ranks: evaluate(tmp_path / "two.json", suite, batch_tokens=64, ranks=ranks))
    for name, task in scores["tasks"].items():
        for key, value in task.items():
            if key not in ("seconds", "subset"):
                assert value == pytest.approx(expected["tasks"][name][key], abs=1e-5), (name, key)
    assert json.loads((tmp_path / "two.json").read_text()) == scores
    assert [item["index"] for item in read_items(items_path(tmp_path / "two.json"))] == 4 * list(range(8))
