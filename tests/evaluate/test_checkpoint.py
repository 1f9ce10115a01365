"""One checkpoint in, scores, items and answers out: kept, resumed, shared, refused. Small GPTs, made-up tasks."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from filelock import FileLock
from gpu_stand_in import META, kernels_on_meta, stand_in
from isoflop.evaluate import checkpoint
from isoflop.evaluate.checkpoint import evaluate_checkpoint
from isoflop.evaluate.harness import CheckpointLM
from isoflop.evaluate.inference.ranks import on_ranks
from isoflop.evaluate.inference.scoring import Scorer
from isoflop.evaluate.pages.report import checkpoint_page, format_scores
from isoflop.evaluate.records.items import items_path, read_items
from isoflop.evaluate.records.record import SETTINGS
from isoflop.evaluate.tasks.suite import Suite, SuiteTask, freeze, quiet
from isoflop.train.checkpoint.checkpoint import whole_weights
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.config import DataConfig, ModelConfig, RunConfig
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError
from isoflop.train.model.parametrization import build_model
from isoflop.train.parallel.mesh import Mesh
from lm_eval.tasks import TaskManager
from torch import nn

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


def made_up(name: str, count: int, seed: int = 0) -> SuiteTask:
    """A task of one of `KINDS` over random words."""
    rng = np.random.default_rng(seed)

    def words(most: int) -> str:
        return " ".join("".join(rng.choice(list("abcdé"), size=4)) for _ in range(rng.integers(1, most)))

    rows = [{"q": words(6), "a": [words(3), words(4)], "gold": i % 2} for i in range(count)]
    config = {
        "doc_to_text": "{{q}}", **KINDS[name], "task": name, "test_split": "test", "metadata": {"version": 1},
        "dataset_path": "none", "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
    }  # fmt: skip
    with quiet():
        task = TaskManager(include_defaults=False).load([config])["tasks"][name]
    return freeze(name, task, list(range(count)), count, "test", "made up")


def suite_of(count: int = 6, names: tuple[str, ...] = ("chosen", "last_word", "written", "text")) -> Suite:
    return Suite("made up", {name: made_up(name, count) for name in names})


def loaded(seed: int = 0, checksum: str = "c0ffee", step: int = 7) -> Any:
    """A GPT with random weights, its head too, as if it had been loaded."""
    config = RunConfig(
        model=ModelConfig(width=16, depth=1, heads=2, vocab_size=256, vocab_multiple=8),
        data=DataConfig(sequence_length=32),
    )
    model = build_model(config.model, config.optimizer, 32, seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return SimpleNamespace(
        model=model,
        config=config,
        tokenizer=ByteTokenizer(),
        step=step,
        path=Path("step_7"),
        checksum=checksum,
        average=None,
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tasks that a model was really asked about; paths are names of checkpoints."""
    names: list[str] = []
    monkeypatch.setattr(
        checkpoint, "load_scored", lambda path, device, dtype, average: loaded(len(path.name), path.name)
    )
    real = checkpoint.answer_task

    def counted(lm: Any, entry: SuiteTask) -> Any:
        names.append(entry.name)
        return real(lm, entry)

    monkeypatch.setattr(checkpoint, "answer_task", counted)
    return names


def evaluate(output: Path, suite: Suite, path: str = "a", **more: Any) -> dict[str, Any]:
    return evaluate_checkpoint(path, output=output, suite=suite, **({"held_out": HELD_OUT, "device": "cpu"} | more))


def timeless(scores: dict[str, Any]) -> Any:
    tasks = {name: task | {"seconds": 0} for name, task in scores["tasks"].items()}
    return scores | {"seconds": 0, "tasks": tasks}


def test_the_file_holds_what_was_returned_and_a_line_is_said_of_each_task(tmp_path: Path, asked: list[str]) -> None:
    out, lines = tmp_path / "eval" / "step_7.json", list[str]()
    scores = evaluate(out, suite_of(), progress=lines.append)
    assert json.loads(out.read_text()) == scores
    assert [line.split(":")[0] for line in lines] == asked == ["chosen", "last_word", "written", "text"]
    assert scores["held_out"] == HELD_OUT
    config = loaded().config
    assert scores["tokens"] == 7 * config.batch_tokens
    assert scores["flops"] == checkpoint.training_flops_per_token(config.model, 32) * 7 * config.batch_tokens
    assert scores["N_total"] > scores["N_non_embedding"] > 0
    assert scores["tokenizer"] == ByteTokenizer.fingerprint
    assert scores["seconds"] == pytest.approx(sum(task["seconds"] for task in scores["tasks"].values()), abs=1e-3)
    # Nothing is left of the way there but the lock, which the kernel has dropped.
    assert {path.name for path in out.parent.iterdir()} == {"step_7.json", "step_7.items.jsonl.gz", ".step_7.json.lock"}


def test_of_imported_weights_it_is_said_what_nobody_can_know(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainer.json").write_text('{"imported_from": "some/model"}')
    imported = loaded(step=0)
    imported.path = tmp_path
    monkeypatch.setattr(checkpoint, "load_scored", lambda *_: imported)
    scores = evaluate(tmp_path / "scores.json", suite_of(names=("chosen",)), held_out=None, ngram=13)
    why = "the weights were imported from some/model, and what they were trained on is not known here"
    assert scores["contamination_withheld"] == scores["held_out"]["withheld"] == why
    said = checkpoint_page(scores, [])
    assert "Tokens (D)" not in said
    assert "None" not in said


def test_a_whole_suite_is_scored_on_a_gpu(tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On `meta`, up to what the host reads, in place of which are zeros."""
    rooms: list[int] = []

    def load(path: Path, device: str, dtype: torch.dtype, average: None) -> Any:
        found = loaded()
        found.model.to(device=device, dtype=dtype)
        return found

    def lm(*arguments: Any, **options: Any) -> CheckpointLM:
        rooms.append(arguments[4])
        return CheckpointLM(*arguments, **options)

    monkeypatch.setattr(checkpoint, "pick_device", lambda *_: META)
    monkeypatch.setattr(checkpoint, "load_scored", load)
    monkeypatch.setattr(checkpoint, "CheckpointLM", lm)
    with kernels_on_meta():
        gpu = stand_in(monkeypatch)
        scores = evaluate(tmp_path / "s.json", suite_of(), precision="bf16")
    assert rooms == [checkpoint.BATCH_TOKENS["cuda"]]
    assert asked == ["chosen", "last_word", "written", "text"]
    assert scores["device"] == "meta"
    assert gpu.reads


def test_every_item_is_kept_and_adds_up_to_the_scores(tmp_path: Path, asked: list[str]) -> None:
    scores = evaluate(tmp_path / "s.json", suite_of())["tasks"]
    items = read_items(items_path(tmp_path / "s.json"))
    assert [item["task"] for item in items] == [name for name in KINDS for _ in range(6)]
    chosen = [item for item in items if item["task"] == "chosen"]
    assert scores["chosen"]["acc"] == pytest.approx(np.mean([item["values"]["acc"] for item in chosen]))
    for name in ("p_right", "margin", "gold_bpb"):
        assert scores["chosen"][name] == pytest.approx(np.mean([item[name] for item in chosen]))
    first = chosen[0]
    assert (len(first["choices"]), first["right"], first["contaminated"]) == (2, [0], None)
    assert first["p_right"] == pytest.approx(
        1 / (1 + math.exp(first["log_probabilities"][1] - first["log_probabilities"][0]))
    )
    texts = [item for item in items if item["task"] == "text"]
    assert all(item["bpb"] > 0 for item in texts)
    assert scores["text"]["bpb_se"] > 0
    written = [item for item in items if item["task"] == "written"]
    assert all(isinstance(item["answer"], str) and item["target"] for item in written)


def test_nothing_is_scored_twice_and_everything_that_changed_is(tmp_path: Path, asked: list[str]) -> None:
    out = tmp_path / "scores.json"

    def again(suite: Suite, path: str = "a", **more: Any) -> list[str]:
        asked.clear()
        evaluate(out, suite, path, **more)
        return list(asked)

    assert again(suite_of(6, ("chosen",))) == ["chosen"]
    content = out.read_bytes()
    assert again(suite_of(6, ("chosen",))) == []
    assert out.read_bytes() == content
    assert again(suite_of(6, ("last_word", "chosen"))) == ["last_word"]  # only what is missing
    assert again(suite_of(7, ("chosen",))) == ["chosen"]  # other items
    assert set(json.loads(out.read_text())["tasks"]) == {"chosen", "last_word"}
    assert [item["task"] for item in read_items(items_path(out))] == ["last_word"] * 6 + ["chosen"] * 7
    newer = suite_of(7, ("chosen",))
    newer.tasks["chosen"].version = 2
    assert again(newer) == ["chosen"]
    lines = list[str]()
    assert again(newer, precision="bf16", progress=lines.append) == ["chosen"]
    kept = json.loads(out.read_text())["tasks"]
    assert {name: task["precision"] for name, task in kept.items()} == {"last_word": "fp32", "chosen": "bf16"}
    assert lines[0] == f"scored again, as items, prompts or settings are not those of {out}: chosen"
    assert lines[1] == f"kept in {out}: last_word"
    assert "last_word was scored under other settings than the rest: precision fp32." in format_scores(
        json.loads(out.read_text())
    )
    old = json.loads(out.read_text())  # as an earlier version wrote it: what holds for all tasks is said once
    old["tasks"] = {"chosen": {k: v for k, v in old["tasks"]["chosen"].items() if k not in SETTINGS}}
    out.write_text(json.dumps(old))
    assert again(newer, precision="bf16") == []
    assert again(suite_of(7, ("chosen",)), "other") == ["chosen"]  # another checkpoint: nothing of the old one stays
    assert set(json.loads(out.read_text())["tasks"]) == {"chosen"}


class Killed(BaseException):
    pass


def dying(monkeypatch: pytest.MonkeyPatch, batches: int) -> list[int]:
    """From now on a model dies in its pass after so many; returns the sizes of the passes, in requests."""
    sizes: list[int] = []
    real = Scorer._pass

    def counted(self: Scorer, batch: list[Any]) -> Any:
        if len(sizes) == batches:
            raise Killed
        scored = real(self, batch)
        sizes.append(len(scored))
        return scored

    monkeypatch.setattr(Scorer, "_pass", counted)
    return sizes


def test_a_killed_evaluation_goes_on_at_the_next_request_and_ends_with_the_same_numbers(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, few = suite_of(12, ("chosen", "last_word")), {"batch_tokens": 64}
    with monkeypatch.context() as patch:
        whole = dying(patch, 10**9)
        expected = evaluate(tmp_path / "whole.json", suite, **few)
    out = tmp_path / "s.json"
    with monkeypatch.context() as patch:
        first = dying(patch, 3)
        with pytest.raises(Killed):
            evaluate(out, suite, **few)
    assert not out.exists()  # not even one task is complete
    assert (tmp_path / "s.answers.jsonl").exists()
    with monkeypatch.context() as patch:
        rest = dying(patch, 10**9)
        assert timeless(evaluate(out, suite, **few)) == timeless(expected)
    assert sum(first) > 0
    assert sum(first) + sum(rest) == sum(whole)  # no request was asked twice
    assert not (tmp_path / "s.answers.jsonl").exists()
    assert read_items(items_path(out)) == read_items(items_path(tmp_path / "whole.json"))


def test_after_kill_9_the_next_evaluation_goes_on(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, out = suite_of(12, ("chosen",)), tmp_path / "s.json"
    expected = evaluate(tmp_path / "whole.json", suite, batch_tokens=64)

    def victim() -> None:
        torch.set_num_threads(1)
        real = Scorer._pass
        passes = iter(range(3))

        def counted(self: Scorer, batch: list[Any]) -> Any:
            if next(passes, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, batch)

        Scorer._pass = counted  # type: ignore[method-assign]
        evaluate(out, suite, batch_tokens=64)

    process = multiprocessing.get_context("fork").Process(target=victim)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with (tmp_path / "s.answers.jsonl").open("ab") as file:
        file.write(b'{"torn')
    sizes = dying(monkeypatch, 10**9)
    assert timeless(evaluate(out, suite, batch_tokens=64)) == timeless(expected)
    assert 0 < sum(sizes) < 24


@pytest.mark.parametrize(
    "content", ['{"tasks": {"cho', "[]", '{"tasks": {"chosen": {}}}', "", '{"tasks": 3}', '{"tasks": {"chosen": 3}}']
)
def test_a_corrupt_file_is_moved_aside_and_scored_again(tmp_path: Path, asked: list[str], content: str) -> None:
    out, lines = tmp_path / "scores.json", list[str]()
    for number in (1, 2):
        out.write_text(content)
        evaluate(out, suite_of(4, ("chosen",)), progress=lines.append)
        assert (tmp_path / f"scores.json.corrupt-{number}").read_text() == content
        assert json.loads(out.read_text())["tasks"]["chosen"]["items"] == 4
    assert asked == ["chosen", "chosen"]
    assert sum("is not a file of scores" in line for line in lines) == 2


def test_a_corrupt_items_file_costs_no_score(tmp_path: Path, asked: list[str]) -> None:
    out, lines = tmp_path / "scores.json", list[str]()
    evaluate(out, suite_of(4, ("chosen",)))
    items_path(out).write_bytes(b"\x1f\x8bno")
    evaluate(out, suite_of(4, ("chosen", "last_word")), progress=lines.append)
    assert asked == ["chosen", "last_word"]
    assert (tmp_path / "scores.items.jsonl.gz.corrupt-1").exists()
    assert "is no file of items" in lines[0]
    assert [item["task"] for item in read_items(items_path(out))] == ["last_word"] * 4


def test_a_second_evaluation_into_the_same_file_waits_and_finds_everything(tmp_path: Path, asked: list[str]) -> None:
    out, lines = tmp_path / "s.json", list[str]()
    lock = FileLock(tmp_path / ".s.json.lock", is_singleton=False)
    done: list[Any] = []
    with lock:
        thread = threading.Thread(
            target=lambda: done.append(evaluate(out, suite_of(4, ("chosen",)), progress=lines.append))
        )
        thread.start()
        while thread.is_alive() and not lines:
            time.sleep(0.01)
        assert "waiting" in lines[0]
        assert not out.exists()
    thread.join(60)
    assert done[0]["tasks"]["chosen"]["items"] == 4


def test_bad_arguments_are_named_before_anything_is_written(tmp_path: Path, asked: list[str]) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"ngram": 0}, "ngram is 0"),
    ]
    for more, message in cases:
        with pytest.raises(UserError, match=message):
            evaluate(tmp_path / "s.json", suite_of(2, ("chosen",)), **more)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="scores cannot be written to"):
        evaluate(tmp_path / "file" / "s.json", suite_of(2, ("chosen",)))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"folder is a folder; it must be a file, such as .*folder/scores\.json"):
        evaluate(tmp_path / "folder", suite_of(2, ("chosen",)))
    assert (tmp_path / "folder").is_dir()
    with pytest.raises(UserError, match="scores cannot be written to"):  # and no rank waits for the first one
        on_ranks(2, lambda ranks: evaluate(tmp_path / "file" / "s.json", suite_of(2, ("chosen",)), ranks=ranks))


def test_a_disk_that_fills_up_under_one_rank_ends_all_of_them(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise UserError("answers cannot be written")

    monkeypatch.setattr("isoflop.evaluate.records.record.Answers.put", full)
    with pytest.raises(UserError, match="answers cannot be written"):
        on_ranks(2, lambda ranks: evaluate(tmp_path / "s.json", suite_of(4, ("chosen",)), ranks=ranks))


def test_items_that_are_there_do_not_fall_behind_their_scores(tmp_path: Path, asked: list[str]) -> None:
    out = tmp_path / "s.json"
    evaluate(out, suite_of(3, ("chosen",)), keep_items=False)
    assert not items_path(out).exists()
    evaluate(out, suite_of(4, ("chosen",)))
    evaluate(out, suite_of(5, ("chosen",)), keep_items=False)
    assert len(read_items(items_path(out))) == 5


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, suite = tmp_path / "s.json", suite_of(4, ("chosen", "last_word"))

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("isoflop.evaluate.records.record.write_atomic", full)
        with pytest.raises(UserError, match=r"scores cannot be written to .* \(No space left on device\); free space"):
            evaluate(out, suite)
    assert {path.name for path in tmp_path.iterdir()} == {".s.json.lock", "s.answers.jsonl"}
    sizes = dying(monkeypatch, 10**9)
    evaluate(out, suite)
    assert asked == ["chosen", "chosen", "last_word"]
    assert sum(sizes) == 4  # what was answered before is not asked again


def test_nan_withholds_the_score_and_names_the_item(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, device: str, dtype: Any, average: None) -> Any:
        result = loaded()
        next(result.model.parameters()).data.fill_(math.nan)
        return result

    monkeypatch.setattr(checkpoint, "load_scored", broken)
    lines = list[str]()
    scores = evaluate(tmp_path / "s.json", suite_of(3), progress=lines.append)["tasks"]
    for name, values in scores.items():
        assert values["withheld"].startswith("item 0:"), name
        assert all(values[key] is None for key in ("acc", "gold_bpb", "p_right", "margin", "bpb"))
    assert all("withheld, item 0" in line for line in lines)
    assert all(
        nats is None for item in read_items(items_path(tmp_path / "s.json")) for nats in item["log_probabilities"]
    )


def test_contaminated_items_are_marked_and_the_rest_is_scored_apart(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isoflop.train.data.shards.at_hand", lambda config, tokenizer: "shards")
    calls = []

    def overlaps(shards: Any, suite: Suite, ngram: int, cache: Path, progress: Any) -> dict[str, set[int]]:
        calls.append(ngram)
        return {name: {1, 2} for name in suite.tasks}

    monkeypatch.setattr("isoflop.evaluate.contamination.contamination.overlaps", overlaps)
    out, shared = tmp_path / "s.json", dict[str, Any]()
    scores = evaluate(out, suite_of(6, ("chosen",)), ngram=13, overlaps=shared)["tasks"]["chosen"]
    items = read_items(items_path(out))
    assert [item["contaminated"] for item in items] == [False, True, True, False, False, False]
    clean = [item for item in items if not item["contaminated"]]
    assert (scores["contaminated_items"], scores["clean"]["items"]) == (2, 4)
    assert scores["clean"]["acc"] == np.mean([item["values"]["acc"] for item in clean])
    assert scores["clean"]["gold_bpb"] == pytest.approx(np.mean([item["gold_bpb"] for item in clean]))
    evaluate(tmp_path / "t.json", suite_of(6, ("chosen",)), "other", ngram=13, overlaps=shared)
    assert calls == [13]  # once for all checkpoints of a process
    asked.clear()
    evaluate(out, suite_of(6, ("chosen",)), ngram=8)  # another question
    evaluate(out, suite_of(6, ("chosen",)))  # none
    assert asked == ["chosen"]


def test_training_text_that_is_elsewhere_costs_no_score(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> Any:
        raise UserError("data.path is gone")

    monkeypatch.setattr("isoflop.train.checkpoint.heldout.at_hand", missing)
    monkeypatch.setattr("isoflop.train.data.shards.at_hand", missing)
    scores = evaluate(tmp_path / "s.json", suite_of(3, ("chosen",)), held_out=None, ngram=13)
    assert scores["held_out"]["val_bpb"] is None
    assert scores["held_out"]["withheld"] == scores["contamination_withheld"] == "data.path is gone"
    assert scores["tasks"]["chosen"]["acc"] is not None
    assert scores["tasks"]["chosen"]["clean"] is None
    # What the training knows stays, without the windows that only the text can show.
    known = {name: HELD_OUT[name] for name in ("val_loss", "val_loss_se", "val_bpb")}
    assert evaluate(tmp_path / "t.json", suite_of(3, ("chosen",)), held_out=known)["held_out"] == known
    # Once it is at hand the loss is asked for again.
    monkeypatch.setattr(checkpoint, "_held_out", lambda loaded: HELD_OUT)
    assert evaluate(tmp_path / "s.json", suite_of(3, ("chosen",)), held_out=None)["held_out"] == HELD_OUT
    assert asked == ["chosen", "chosen"]


def test_where_the_loss_is_worst_is_looked_for_once_and_where_items_are_kept(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    window = {"index": 3, "loss": 9.0, "text": "odd"}
    monkeypatch.setattr(
        checkpoint, "_held_out", lambda loaded: looked.append(loaded) or {"val_loss": 5.0, "worst": [window]}
    )
    known, suite = {"val_loss": 1.0, "val_loss_se": None, "val_bpb": 2.0}, suite_of(3, ("chosen",))
    scores = evaluate(tmp_path / "s.json", suite, held_out=known, keep_items=False)
    assert (scores["held_out"], looked) == (known, [])
    for _ in range(2):
        scores = evaluate(tmp_path / "t.json", suite, held_out=known)
        assert scores["held_out"] == known | {"worst": [window]}
        assert len(looked) == 1


def test_a_mean_of_a_suite_is_of_tasks_that_were_scored_alike(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_suites", lambda: {"both": ["chosen", "last_word"]})
    out = tmp_path / "s.json"
    evaluate(out, suite_of(4, ("chosen",)))
    assert evaluate(out, suite_of(4, ("last_word",)))["suites"].keys() == {"both"}
    assert evaluate(out, suite_of(4, ("last_word",)), precision="bf16")["suites"] == {}


def test_a_whole_suite_has_a_mean_of_its_own(tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_suites", lambda: {"core": ["chosen", "last_word"], "more": ["chosen", "absent"]})
    scores = evaluate(tmp_path / "s.json", suite_of(6))
    assert set(scores["suites"]) == {"core"}
    two = [scores["tasks"][name] for name in ("chosen", "last_word")]
    assert scores["suites"]["core"]["centered"] == pytest.approx(((two[0]["acc"] - 0.5) / 0.5 + two[1]["acc"]) / 2)


def test_ranks_share_the_work_and_give_the_same_scores(tmp_path: Path, asked: list[str]) -> None:
    suite = suite_of(8)
    expected = evaluate(tmp_path / "one.json", suite, batch_tokens=64)
    scores = on_ranks(2, lambda ranks: evaluate(tmp_path / "two.json", suite, batch_tokens=64, ranks=ranks))
    for name, task in scores["tasks"].items():
        for key, value in task.items():
            if key not in ("seconds", "subset"):
                assert value == pytest.approx(expected["tasks"][name][key], abs=1e-5), (name, key)
    assert json.loads((tmp_path / "two.json").read_text()) == scores
    assert [item["index"] for item in read_items(items_path(tmp_path / "two.json"))] == 4 * list(range(8))


def test_texts_are_encoded_once_for_all_checkpoints_of_a_tokenizer(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, tokens, count = suite_of(6), dict[str, Any](), [0]
    real = ByteTokenizer.encode

    def counted(self: ByteTokenizer, text: str) -> Any:
        count[0] += 1
        return real(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", counted)
    evaluate(tmp_path / "a.json", suite, "a", tokens=tokens)
    assert count[0] > 0
    count[0] = 0
    evaluate(tmp_path / "b.json", suite, "other", tokens=tokens)
    assert count[0] == 0


def saved(folder: Path) -> Path:
    config = loaded().config
    model = build_model(config.model, config.optimizer, 32, seed=0)
    saver = Saver(folder / "checkpoints", Mesh(), config, ByteTokenizer())
    path = saver.save(3, whole_weights(model), {})
    saver.wait()
    return Path(path)


def test_a_trained_checkpoint_is_scored_from_its_files(tmp_path: Path) -> None:
    path = saved(tmp_path)
    scores = evaluate_checkpoint(
        path, output=tmp_path / "s.json", suite=suite_of(5, ("chosen",)), held_out=HELD_OUT, device="cpu"
    )
    assert (scores["step"], scores["tasks"]["chosen"]["items"]) == (3, 5)
    assert len(scores["checkpoint_sha256"]) == 64
    with pytest.raises(UserError, match="holds no checkpoint"):
        evaluate_checkpoint(tmp_path / "nowhere", output=tmp_path / "t.json", suite=suite_of(5, ("chosen",)))


def test_a_checkpoint_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    path = saved(tmp_path)
    shutil.rmtree(path / "tokenizer")
    for given in (path, tmp_path):  # the checkpoint, its run
        with pytest.raises(UserError, match=r"step_3 has no tokenizer, so no text can be scored"):
            evaluate_checkpoint(given, output=tmp_path / "t.json", suite=suite_of(5, ("chosen",)), device="cpu")
