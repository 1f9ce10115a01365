"""Suites and staged tasks, from a made-up wheel: what is asked of a model, without any network or lm-eval's index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from isoflop.evaluate.tasks import hub, staging
from isoflop.evaluate.tasks.staging import STAGED, benchmarks_directory
from isoflop.evaluate.tasks.suite import choose_items, expand, suite_names, suite_tasks
from isoflop.evaluate.tasks.tasks import anchored, load_suite, parse_entry
from isoflop.sweeps.entry import compose
from isoflop.train.errors import UserError
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import apply_template
from made_up_wheel import COUNT, coqa_context, made_up_items, request_of

SMALL = ["hellaswag", "arc_easy", "arc_challenge", "piqa", "winogrande", "sciq", "openbookqa", "commonsense_qa_cloze",
         "social_iqa", "copa", "lambada_openai", "mmlu_cloze", "gsm8k_gold", "humaneval_gold", "mbpp_gold"]  # fmt: skip


@pytest.fixture(autouse=True)
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the Hub and lm-eval's index fail the test."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the Hub or lm-eval's index was asked")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(hub, "task_manager", refuse)


def request_pairs(name: str) -> list[tuple[str, str]]:
    """Return (context, continuation) of every request."""
    return [request.args[:2] for request in load_suite(name, None)[name].task.instances]


# Lists of tasks


def test_names_may_be_a_suite_a_list_or_separated_by_commas() -> None:
    assert expand("small") == SMALL
    assert expand("boolq, small,boolq,piqa@5") == ["boolq", *SMALL, "piqa@5"]
    assert expand(["arc_easy"]) == ["arc_easy"]
    nothing: list[Any] = ["", " ,", [], "none", [None]]
    for tasks in nothing:
        with pytest.raises(UserError, match="name a suite"):
            expand(tasks)


def test_the_kind_of_an_entry_is_read_off_its_syntax() -> None:
    kinds = {
        written: parse_entry(written).kind for written in ("piqa", "piqa@5", "mmlu", "a/b", "q.jsonl@3", "text:a/b")
    }
    assert list(kinds.values()) == ["staged", "staged", "named", "path", "path", "text"]
    entry = parse_entry("a@b/q.jsonl@3")
    assert (entry.name, entry.shots) == ("a@b/q.jsonl", 3)
    with pytest.raises(UserError, match=r"'piqa@few' has no number after @"):
        parse_entry("piqa@few")


def test_a_suite_is_what_hydra_reads() -> None:
    assert compose(["evaluate=core", "+grid=smoke"]).evaluate.tasks == suite_tasks("core")
    assert {"core", "none"} <= set(suite_names())
    assert compose(["evaluate=custom", "evaluate.path=my/tasks", "+grid=smoke"]).evaluate.tasks == ["my/tasks"]
    with pytest.raises(UserError, match=r"evaluate\.path"):
        expand("custom")


def test_a_broken_suite_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isoflop.evaluate.tasks.suite.SUITES", tmp_path)
    for text in ("tasks: piqa", "tasks: [1]", "limit: 3", "tasks: [", ""):
        (tmp_path / "broken.yaml").write_text(text)
        with pytest.raises(UserError, match=r"broken\.yaml"):
            expand("broken")


# Requests


@pytest.mark.parametrize("suite", ["core", "domains"])
def test_every_suite_loads_from_staged_data_alone(suite: str, cache: Path) -> None:
    loaded = load_suite(suite, 8)
    assert list(loaded) == suite_tasks(suite)
    for written, entry in loaded.items():
        name, _, shots = written.partition("@")
        assert entry.name == written == entry.task.config.task
        assert entry.shots == entry.task.config.num_fewshot == int(shots or 0)
        assert 2 <= len(entry.indices) == entry.subset["items"] <= 8
        assert entry.indices == choose_items(name, entry.subset["of"], 8)  # the same items with examples
        assert entry.subset["source"] == benchmarks_directory().name
        assert ("examples" in entry.subset) == bool(shots)


def test_every_staged_task_loads_and_ours_have_names_of_their_own(cache: Path) -> None:
    loaded = load_suite(list(STAGED), 2)
    assert loaded.keys() == STAGED.keys()
    for name, task in STAGED.items():
        if "/" not in task.yaml:
            assert load_yaml(task.definition)["task"] == ("text" if name.startswith("text_") else name)
    assert "the wheel lacks" in loaded["sciq"].subset["note"]
    assert loaded["gsm8k"].shots == 5  # lm-eval's own default
    assert loaded["gsm8k"].task.OUTPUT_TYPE == "generate_until"


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "mbpp", "minerva", "jeopardy", "squad", "coqa"])
def test_gold_tasks_ask_what_the_wheels_requests_ask(name: str, cache: Path) -> None:
    docs = made_up_items()[name]
    expected = [request_of(name, doc) for doc in docs]
    # MATH's seven subjects are seven files.
    assert sorted(request_pairs(f"{name}_gold")) == sorted(expected)
    if name == "coqa":
        assert expected[2][0] == coqa_context(docs[2])
        assert expected[2][0].count("Question:") == 3


def test_choices_are_asked_as_lm_eval_and_the_wheel_do(cache: Path) -> None:
    items = made_up_items()
    for name in ("arc_easy", "arc_challenge"):
        expected = [(item["query"], f" {choice}") for item in items[name] for choice in item["choices"]]
        assert request_pairs(name) == expected
    swag = items["hellaswag"][0]
    context = f"{swag['activity_label']}: {swag['ctx_a']} {swag['ctx_b'].capitalize()}"
    assert request_pairs("hellaswag")[:4] == [(context, f" {ending}") for ending in swag["endings"]]
    row = items["commonsense_qa"][0]
    texts = [(f"Question: {row['question']}\nAnswer:", f" {text}") for text in row["choices"]["text"]]
    assert request_pairs("commonsense_qa_cloze")[:5] == texts
    row = items["winogrande"][0]
    before, _, after = row["sentence"].partition("_")
    assert request_pairs("winogrande")[:2] == [(f"{before}{option}", after) for option in ("Ann", "Bob")]
    assert request_pairs("lambada_openai")[0] == request_of("lambada_openai", items["lambada_openai"][0])
    boolq = load_suite("boolq", None)["boolq"].task
    for item, doc in zip(items["boolq"], boolq.eval_docs, strict=True):
        assert boolq.doc_to_text(doc) == item["query"]
        assert boolq.doc_to_choice(doc)[boolq.doc_to_target(doc)] == item["choices"][item["gold"]]


def test_mmlu_in_cloze_form_is_lm_evals_continuation_task_item_by_item(cache: Path) -> None:
    suite = load_suite("mmlu_cloze", None)["mmlu_cloze"]
    folder = STAGED["hellaswag"].definition.parents[1] / "mmlu" / "continuation"
    expected = []
    for doc in suite.task.eval_docs:
        config = load_yaml(folder / f"mmlu_{doc['subject']}.yaml")
        context = config["description"] + apply_template(config["doc_to_text"], doc)
        expected += [(context, f" {choice}") for choice in doc["choices"]]
    assert [request.args for request in suite.task.instances] == expected
    assert suite.subset["of"] == 57 * 2


# Examples in prompts


def test_examples_are_other_items_of_the_scored_split_with_their_answers(cache: Path) -> None:
    entry = load_suite("arc_easy@4", None)["arc_easy@4"]
    items = made_up_items()["arc_easy"]
    turns = {f"{item['query']} {item['choices'][item['gold']]}": item["query"] for item in items}
    for doc in entry.task.eval_docs:
        prompt = f"Question: {doc['question']}\nAnswer:"
        context = next(request.args[0] for request in entry.task.instances if request.args[0].endswith(prompt))
        *examples, last = context.split("\n\n")
        assert last == prompt
        assert len(set(examples)) == 4
        assert all(turns[example] != prompt for example in examples)
    assert entry.subset["examples"] == f"{COUNT} items of the scored split test, without the item itself"


def test_an_answer_follows_its_question_in_examples_as_in_the_item_itself(cache: Path) -> None:
    for name in ("jeopardy", "gsm8k", "squad"):
        pairs = {request_of(name, doc) for doc in made_up_items()[name]}
        entry = load_suite(f"{name}_gold@2", 5)[f"{name}_gold@2"]
        description = entry.task.config.description or ""
        shown = {context.removeprefix(description) + answer for context, answer in pairs}
        for request in entry.task.instances:
            first, second, _ = request.args[0].removeprefix(description).split("\n\n")
            assert {first, second} <= shown


def test_mmlus_examples_are_the_first_of_the_items_subject(cache: Path) -> None:
    entry = load_suite("mmlu_cloze@3", 20)["mmlu_cloze@3"]
    rows = [json.loads(line) for line in staging.staged_lines(benchmarks_directory(), "mmlu_examples")]
    for doc, request in zip(entry.task.eval_docs, entry.task.instances[::4], strict=True):
        examples = [row for row in rows if row["subject"] == doc["subject"]][:3]
        turns = [f"Question: {row['question'].strip()}\nAnswer: {row['choices'][row['answer']]}" for row in examples]
        head = f"The following are questions (with answers) about {doc['subject'].replace('_', ' ')}."
        assert request.args[0].split("\n\n") == [head, *turns, f"Question: {doc['question'].strip()}\nAnswer:"]


def test_examples_that_cannot_be_had_are_one_sentence(cache: Path) -> None:
    for tasks, message in (
        ("mmlu_cloze@6", "asks for 6 examples; mmlu_cloze has only 5"),
        (f"copa@{COUNT}", f"copa has only {COUNT - 1}"),
        ("text_books@2", "scores whole texts; use text_books"),
    ):
        with pytest.raises(UserError, match=message):
            load_suite(tasks, 3)
    assert load_suite("gsm8k@0", 3)["gsm8k@0"].shots == 0


# The choice of items


def test_the_choice_of_items_is_pinned_and_nested() -> None:
    # Written down once: another version, machine or process must choose these.
    assert choose_items("hellaswag", 10042, 5) == [1314, 2189, 2529, 5111, 7409]
    large = choose_items("arc_easy", 500, 200)
    assert large == sorted(set(large))
    assert len(large) == 200
    assert set(choose_items("arc_easy", 500, 50)) < set(large)
    assert choose_items("other", 500, 50) != choose_items("arc_easy", 500, 50)
    assert choose_items("arc_easy", 5, None) == choose_items("arc_easy", 5, 9) == [0, 1, 2, 3, 4]


def test_what_is_asked_is_pinned(cache: Path) -> None:
    # Written down once, as the choice above: items, prompts, answers, metrics and filters.
    tasks = load_suite("arc_easy,hellaswag@3,lambada_openai", 8)
    assert tasks["arc_easy"].subset["of"] == COUNT
    assert {name: entry.subset["sha256"][:8] for name, entry in tasks.items()} == {
        "arc_easy": "7a4a34cf", "hellaswag@3": "f0d42de9", "lambada_openai": "eb148c41",
    }  # fmt: skip


# The real wheel


def test_files_are_named_from_the_root_and_tasks_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("my/tasks", "held_out"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "quiz.jsonl").write_text('{"question": "1 + 1 =", "answer": "2"}')
    entries = ["small", "piqa@5", "quiz.jsonl@2", "my/tasks", "text:held_out", f"{tmp_path}/quiz.jsonl"]
    assert anchored(entries) == [
        *SMALL, "piqa@5", f"{tmp_path}/quiz.jsonl@2", f"{tmp_path}/my/tasks", f"text:{tmp_path}/held_out",
        f"{tmp_path}/quiz.jsonl",
    ]  # fmt: skip
    assert anchored(anchored(entries)) == anchored(entries)
