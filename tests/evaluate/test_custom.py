"""Tasks from a file of questions or from a folder of lm-eval YAML: prompts, answers, examples, and every complaint."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from isoflop.evaluate.harness import CheckpointLM
from isoflop.evaluate.tasks.custom import load_custom, read_questions
from isoflop.evaluate.tasks.suite import SuiteTask
from isoflop.evaluate.tasks.tasks import anchored, load_suite
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError
from simple_models import bigram, score_task

CAPITALS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Lyon", "Paris"], "answer": 1},
    {"question": "The capital of Peru is", "choices": ["Lima", "Cusco", "Ica"], "answer": "A"},
    {"question": "The capital of Ghana is", "choices": ["Tema", "Accra"], "answer": "Accra", "id": "g-3"},
    {"question": "it is", "context": "Rome is in Italy.", "choices": ["B", "A"], "answer": "B"},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def requests(entry: SuiteTask) -> list[list[tuple[str, str]]]:
    """Return (prompt, continuation) of each item, in order."""
    result: dict[int, list[tuple[str, str]]] = {}
    for instance in entry.task.instances or []:
        result.setdefault(instance.doc_id, []).append(instance.args)
    return [result[place] for place in sorted(result)]


def right(entry: SuiteTask, place: int) -> Any:
    docs: Any = entry.task.eval_docs
    return entry.task.doc_to_target(docs[place])


# Files


def test_a_file_with_choices_is_a_multiple_choice_task_asked_word_for_word(tmp_path: Path) -> None:
    path = write(tmp_path / "The capitals, v1.jsonl", [CAPITALS[0], "", *CAPITALS[1:]])
    ((name, entry),) = load_custom(path).items()
    assert name == "The_capitals_v1"  # valid in a list and in a table
    assert entry.task.OUTPUT_TYPE == "multiple_choice"
    assert requests(entry) == [
        [("The capital of France is", " Lyon"), ("The capital of France is", " Paris")],
        [("The capital of Peru is", f" {city}") for city in ("Lima", "Cusco", "Ica")],
        [("The capital of Ghana is", " Tema"), ("The capital of Ghana is", " Accra")],
        [("Rome is in Italy.\nit is", " B"), ("Rome is in Italy.\nit is", " A")],
    ]
    # By place, letter and text; the text of a choice is no letter.
    assert [right(entry, place) for place in range(4)] == [1, 0, 1, 0]
    assert entry.subset["of"] == entry.subset["items"] == 4
    assert entry.subset["source"] == path.name
    docs: Any = entry.task.eval_docs
    assert entry.task.process_results(docs[0], [(-9.0, False), (-1.0, True)]) == {"acc": 1.0, "acc_norm": 1.0}
    assert entry.task.process_results(docs[1], [(-9.0, False), (-1.0, True), (-2.0, False)])["acc"] == 0.0


def test_a_file_without_choices_has_gold_answers_after_one_blank(tmp_path: Path) -> None:
    rows = [{"question": "def one():\n", "answer": "    return 1"}, {"question": "x = ", "answer": "2"}]
    entry = load_custom(write(tmp_path / "code.jsonl", rows))["code"]
    assert requests(entry) == [[("def one():\n", "    return 1")], [("x = ", "2")]]
    mixed = load_custom(write(tmp_path / "mixed.jsonl", [*rows, {"question": "y =", "answer": "3"}]))["mixed"]
    assert requests(mixed)[1:] == [[("x =", " 2")], [("y =", " 3")]]
    assert (mixed.task.OUTPUT_TYPE, set(mixed.task.aggregation())) == ("loglikelihood", {"acc"})


def test_text_is_not_taken_for_a_template_a_number_or_a_list(tmp_path: Path) -> None:
    rows = [
        {"question": "{{question}} {% for %}", "choices": ["[1]", "2"], "answer": 1},
        {"question": "7", "choices": ["{{answer}}", "8"], "answer": 0},
    ]
    entry = load_custom(write(tmp_path / "odd.jsonl", rows))["odd"]
    assert [[prompt for prompt, _ in item] for item in requests(entry)] == [["{{question}} {% for %}"] * 2, ["7"] * 2]
    assert requests(entry)[1][0] == ("7", " {{answer}}")
    gold = load_custom(write(tmp_path / "gold.jsonl", [{"question": "answer", "answer": "[1, 2]"}]))["gold"]
    assert requests(gold) == [[("answer", " [1, 2]")]]


def test_compressed_files_byte_order_marks_and_lone_surrogates_are_read(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + json.dumps(CAPITALS[0]).encode() + b"\r\n"
    (tmp_path / "capitals.jsonl.gz").write_bytes(gzip.compress(content))
    assert list(load_custom(tmp_path / "capitals.jsonl.gz")) == ["capitals"]
    write(tmp_path / "s.jsonl", ['{"question": "a\\ud800", "answer": "b"}'])
    assert requests(load_custom(tmp_path / "s.jsonl")["s"]) == [[("a\ufffd", " b")]]


def numbers(count: int) -> list[dict[str, Any]]:
    return [{"question": f"question {i}:", "answer": f"answer {i}"} for i in range(count)]


@pytest.mark.parametrize("choices", [False, True])
def test_examples_are_other_lines_and_the_same_whatever_the_limit(tmp_path: Path, choices: bool) -> None:
    rows = numbers(30)
    if choices:
        rows = [row | {"choices": ["wrong", row["answer"]]} for row in rows]
    path = write(tmp_path / "numbers.jsonl", [*rows, rows[4], rows[4]])
    every = load_custom(path, shots=3)["numbers@3"]
    some = load_custom(path, shots=3, limit=7)["numbers@3"]
    assert every.shots == some.shots == 3
    assert every.indices == load_custom(path)["numbers"].indices
    assert every.subset["sha256"] != load_custom(path)["numbers"].subset["sha256"]
    for place, item in zip(every.indices, requests(every), strict=True):
        *examples, question = item[0][0].split("\n\n")
        number = place if place < 30 else 4
        assert question == f"question {number}:"
        shown = [int(example.split()[1][:-1]) for example in examples]
        assert len(set(shown)) == 3
        assert number not in shown
        assert examples == [f"question {i}: answer {i}" for i in shown]
        if place in some.indices:
            assert requests(some)[some.indices.index(place)] == item
    four_lines = write(tmp_path / "few.jsonl", rows[:4])
    assert load_custom(four_lines, shots=3)["few@3"].shots == 3
    with pytest.raises(UserError, match="has 4 lines, too few for 4 examples per item"):
        load_custom(four_lines, shots=4)


COMPLAINTS: list[tuple[list[Any], str]] = [
    ([], "has no items"),
    (["{"], "line 1 of .* is not JSON"),
    ([CAPITALS[0], "[1]"], "line 2 of .* holds list, not an object"),
    ([CAPITALS[0], {"question": "q", "answer": "a"}], "line 2 of .* has no choices and line 1 has some"),
    ([{"question": "q", "answer": "a"}, "", CAPITALS[0]], "line 3 of .* has choices and line 1 has none"),
    ([{"answer": "a"}], "line 1 of .* has no 'question'; it has answer"),
    ([{"question": "q"}], "line 1 of .* has no 'answer'; it has question"),
    ([{"question": " ", "answer": "a"}], 'question is " "; it must be a text that is not blank'),
    ([{"question": "q", "answer": 3}], "answer is 3; it must be a text"),
    ([{"question": "q", "choices": ["a"], "answer": 0}], r'choices is \["a"\]; it must be a list of at least two'),
    ([{"question": "q", "choices": ["a", ""], "answer": 0}], r'choices\[1\] is ""; it must be a text'),
    ([{"question": "q", "choices": ["a", "a"], "answer": 0}], r'choices\[1\] repeats "a"; choices must differ'),
    ([{"question": "q", "choices": ["x", "y"], "answer": 2}], r"answer is 2; .* place of a choice \(0 to 1\)"),
    ([{"question": "q", "choices": ["x", "y"], "answer": True}], "answer is true; it must be"),
    ([{"question": "q", "choices": ["x", "y"], "answer": "C"}], r'answer is "C"; .* its letter \(A to B\)'),
    ([{"question": "q", "choises": ["x", "y"], "answer": "x"}], "has a field 'choises' and no 'choices'"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "complaint"), COMPLAINTS)
def test_every_bad_line_is_named_in_one_sentence(tmp_path: Path, rows: list[Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as raised:
        read_questions(write(tmp_path / "bad.jsonl", rows))
    assert "\n" not in str(raised.value)
    assert "bad.jsonl" in str(raised.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "caf\xe9", "answer": "a"}')
    with pytest.raises(UserError, match=r"line 1 of .*latin.jsonl is not UTF-8 \(byte 0xe9\)"):
        load_custom(tmp_path / "latin.jsonl")
    whole = gzip.compress(json.dumps(CAPITALS[0]).encode())
    for damaged in (whole[:-12], b"no gzip", whole[:20] + b"x" + whole[21:]):
        (tmp_path / "cut.jsonl.gz").write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged"):
            load_custom(tmp_path / "cut.jsonl.gz")
    with pytest.raises(
        UserError, match=r"none.jsonl' is not a file; it must be a folder or a file that ends in .jsonl"
    ):
        load_custom(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"neither a folder nor a file that ends in .jsonl, .jsonl.gz, .yaml"):
        load_custom(tmp_path / "quiz.csv")


# Folders of YAML

SUM = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: data/sums.jsonl, train: data/examples.jsonl}}
test_split: test
training_split: train
output_type: generate_until
doc_to_text: "Q: {{q}}"
doc_to_target: " {{a}}"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.chdir(tmp_path)  # no file may be read from the working directory
    made = tmp_path / "mine"
    (made / "data").mkdir(parents=True)
    write(made / "data" / "sums.jsonl", [{"q": f"{i} + 1", "a": str(i + 1)} for i in range(20)])
    write(made / "data" / "examples.jsonl", [{"q": f"{i} - 1", "a": str(i - 1)} for i in range(20)])
    (made / "sums.yaml").write_text(SUM)
    return made


def test_examples_of_a_yaml_task_come_from_its_own_split(folder: Path) -> None:
    entry = load_custom(folder, shots=2, limit=5)["sums@2"]
    assert (entry.shots, entry.subset["of"], entry.task.OUTPUT_TYPE) == (2, 20, "generate_until")
    for item, place in zip(requests(entry), entry.indices, strict=True):
        *examples, question = item[0][0].split("\n\n")
        assert question == f"Q: {place} + 1"
        assert len(examples) == 2
        assert all(" - 1" in example for example in examples)
    (folder / "sums.yaml").write_text(SUM + "num_fewshot: 1\n")
    assert load_custom(folder, limit=5)["sums"].shots == 1
    with pytest.raises(UserError, match="must hold enough examples"):
        load_custom(folder, shots=21)


def test_templates_groups_and_functions_work(folder: Path) -> None:
    (folder / "_base.yaml").write_text(SUM.replace("task: sums", ""))
    (folder / "sums.yaml").unlink()
    (folder / "utils.py").write_text("def shout(doc):\n    return doc['q'].upper() + '!'\n")
    (folder / "loud.yaml").write_text("task: loud\ninclude: _base.yaml\ndoc_to_text: !function utils.shout\n")
    (folder / "quiet.yaml").write_text("task: quiet\ninclude: _base.yaml\ntag: [calm]\n")
    (folder / "sub").mkdir()
    within = SUM.replace("sums", "within").replace("data/within", "../data/sums").replace("data/ex", "../data/ex")
    (folder / "sub" / "all.yaml").write_text(
        "group: all\ntask:\n  - loud\n  - task: quiet\n    doc_to_text: 'q {{q}}'\n  - "
        + within.strip().replace("\n", "\n    ")
    )
    with pytest.raises(UserError, match=r"loud.yaml runs its own Python \(!function\); .* --allow-code, or"):
        load_custom(folder, limit=3)
    loaded = load_custom(folder, limit=3, allow_code=True)
    assert sorted(loaded) == ["all::within", "loud", "quiet"]
    assert requests(loaded["loud"])[0][0][0] == f"{loaded['loud'].indices[0]} + 1!"
    assert requests(loaded["quiet"])[0][0][0] == f"q {loaded['quiet'].indices[0]} + 1"


def test_lm_evals_own_templates_can_be_included_and_a_file_is_its_own_tasks_alone(folder: Path) -> None:
    (folder / "broken.yaml").write_text("a: [1")
    (folder / "sums.yaml").write_text(
        "task: my_arc\ninclude: arc/arc_easy.yaml\ndataset_path: json\ndataset_name: null\n"
        "dataset_kwargs: {data_files: {test: data/arc.jsonl}}\ntraining_split: null\nvalidation_split: null\n"
    )
    row = {"question": "What is hot?", "choices": {"text": ["ice", "fire"], "label": ["A", "B"]}, "answerKey": "B"}
    write(folder / "data" / "arc.jsonl", [row])
    entry = load_custom(folder / "sums.yaml")["my_arc"]
    assert requests(entry) == [[("Question: What is hot?\nAnswer:", f" {choice}") for choice in ("ice", "fire")]]


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"sums.yaml": "a: [1"}, "sums.yaml has invalid content: while parsing a flow sequence"),
        ({"sums.yaml": "- 1"}, "sums.yaml has invalid content: Expected object, got array"),
        ({"sums.yaml": "task: &a [{task: *a}]"}, "sums.yaml is nested too deeply"),
        ({"sums.yaml": "dataset_path: json"}, "defines no task"),
        ({"again.yaml": SUM}, "task 'sums' is defined in .*again.yaml and in .*sums.yaml"),
        ({"sums.yaml": SUM + "include: 3"}, r"Expected str \| array, got int at \$.include"),
        ({"sums.yaml": "task: x\ninclude: nothing.yaml"}, "includes 'nothing.yaml'; it must be a file next to it"),
        ({"sums.yaml": "task: x\ninclude: sums.yaml"}, "includes itself"),
        ({"sums.yaml": SUM.replace("sums.jsonl", "none.jsonl")}, "task 'sums' of .* cannot be loaded"),
        ({"sums.yaml": SUM + "doc_to_choice: !function utils.none"}, "sums.yaml runs its own Python"),
        ({"group.yaml": "group: all\ntask: [sum]"}, "has the task 'sum', which is not defined; .* sums"),
        ({"sums.yaml": SUM + "unsafe_code: true"}, "runs generated code"),
    ],
)
def test_bad_folders_are_named_in_one_sentence(folder: Path, files: dict[str, str], complaint: str) -> None:
    for name, content in files.items():
        (folder / name).write_text(content)
    with pytest.raises(UserError, match=complaint) as raised:
        load_custom(folder)
    assert "\n" not in str(raised.value)


RUNS_CODE = {
    "template": "doc_to_text: \"{{ cycler.__init__.__globals__.os.system('touch RAN') }}\"",
    "attribute": "doc_to_choice: \"{{ (q|attr('__class__')).__mro__ }}\"",
    "function": "doc_to_target: !function evil.run",
    "class": "class: !function evil.run",
    "metric": "metric_list: [{metric: EVIL}]",
    "metric of the Hub": "metric_list: [{metric: EVIL, hf_evaluate: true}]",
    "in a group": "x: {task: [{task: y, metric_list: [{metric: EVIL}]}]}",
    "data": "dataset_kwargs: {trust_remote_code: true}",
    "pickles": "dataset_path: pandas",
}


@pytest.mark.parametrize("name", RUNS_CODE)
def test_no_python_of_a_folder_runs_unless_it_is_allowed(folder: Path, name: str) -> None:
    ran = folder.parent / "RAN"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nrun = lambda *_: ''\n")
    line = RUNS_CODE[name].replace("RAN", str(ran)).replace("EVIL", str(folder / "evil.py"))
    key = line.partition(":")[0]
    other_lines = [old for old in SUM.splitlines() if not old.startswith(f"{key}:")]
    (folder / "sums.yaml").write_text("\n".join([*other_lines, line, ""]))
    with pytest.raises(UserError, match=r"runs its own Python|SecurityError"):
        load_custom(folder)
    assert not ran.exists()
    if "!function" in line:
        with contextlib.suppress(UserError):
            load_custom(folder, allow_code=True)
        assert ran.exists(), "the attack would have worked"


def test_a_sweep_refuses_a_folders_python_before_anything_is_trained(folder: Path) -> None:
    (folder / "sums.yaml").write_text(SUM + "doc_to_choice: !function utils.none")
    with pytest.raises(UserError, match="runs its own Python"):
        anchored([str(folder)])
    (folder / "utils.py").write_text("none = None")
    assert anchored([str(folder)], allow_code=True) == [str(folder)]
    (folder / "quiz.jsonl").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"line 1 of .*quiz.jsonl is not JSON"):
        anchored([str(folder / "quiz.jsonl")])


def test_a_model_is_scored_on_a_file_and_its_gold_answers_in_bits_per_byte(tmp_path: Path) -> None:
    """Load and score the file with a model that gives every byte the same probability."""
    lm = CheckpointLM(bigram(torch.zeros(256, 256)), ByteTokenizer(), 64)
    rows = [{"question": "2 + 2 =", "answer": "four"}, {"question": "2 + 3 =", "answer": "five"}]
    scores = score_task(lm, load_custom(write(tmp_path / "sums.jsonl", rows))["sums"])
    assert math.isclose(scores["gold_bpb"], 8.0, rel_tol=1e-6)  # log2(256)
    quiz = score_task(lm, load_custom(write(tmp_path / "capitals.jsonl", CAPITALS))["capitals"])
    assert quiz["chance"] == pytest.approx((0.5 + 1 / 3 + 0.5 + 0.5) / 4)
    assert math.isclose(quiz["gold_bpb"], 8.0, rel_tol=1e-6)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    line = '{"question": "1 + 1 =", "choices": ["2", "3"], "answer": 0}\n'
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "quiz.jsonl").write_text(line * 3)
    both = [str(tmp_path / folder / "quiz.jsonl") for folder in ("first", "second")]
    with pytest.raises(UserError, match=r"'quiz' comes from .*first.* and from .*second.*; rename one"):
        load_suite(both)
    assert list(load_suite([both[0], both[0]])) == ["quiz"], "the same file twice is one"
