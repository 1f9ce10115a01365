"""lm-eval's tasks by name: its index, and copies of their data for nodes without the Hub (here local files)."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
from isoflop.evaluate.tasks import hub
from isoflop.evaluate.tasks.staging import STAGED
from isoflop.evaluate.tasks.suite import suite_tasks
from isoflop.evaluate.tasks.tasks import load_suite, stage_tasks
from isoflop.train.errors import UserError
from lm_eval.tasks import TaskManager
from simple_models import bigram, checkpoint_of, custom_tasks, random_table, score

pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.fixture
def own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskManager:
    """Let lm-eval's index contain only the tasks of `custom_tasks`."""
    manager = custom_tasks(tmp_path)
    monkeypatch.setattr(hub, "task_manager", lambda *_: manager)
    return manager


def requests_of(suite: Any) -> dict[str, list[Any]]:
    return {name: [request.args for request in entry.task.instances] for name, entry in suite.items()}


def test_copies_serve_a_node_without_the_hub(
    own_names: TaskManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = requests_of(load_suite("my_group", 5))
    lines: list[str] = []
    folders = stage_tasks("my_group", lines.append)
    assert lines == ["fetching the data of my_group"]
    assert len(folders) == 4
    assert stage_tasks("my_choice") == [next(folder for folder in folders if "my_choice" in manifest(folder))]
    for data in tmp_path.glob("*.jsonl"):
        data.unlink()  # the "hub" of these tasks
    assert requests_of(load_suite("my_group", 5)) == expected
    assert {path.name for path in (tmp_path / "hub").iterdir() if path.is_dir()} >= {folder.name for folder in folders}
    monkeypatch.setenv("ISOFLOP_CACHE", str(tmp_path / "another"))
    with pytest.raises(UserError, match=r"isoflop data benchmarks --tasks my_group"):
        load_suite("my_group", 5)


def manifest(folder: Path) -> str:
    return (folder / "manifest.json").read_text()


@pytest.mark.parametrize("damage", ["cut", "gone", "another manifest"])
def test_a_damaged_copy_is_not_read_and_staged_again(own_names: TaskManager, tmp_path: Path, damage: str) -> None:
    expected = requests_of(load_suite("my_choice", 5))
    (folder,) = stage_tasks("my_choice")
    if damage == "cut":
        os.truncate(folder / "0.parquet", 50)
    elif damage == "gone":
        (folder / "0.parquet").unlink()
    else:
        (folder / "manifest.json").write_text('{"files": {"test": 1}}')
    assert hub.read_copy(folder) is None
    assert requests_of(load_suite("my_choice", 5)) == expected
    assert stage_tasks("my_choice") == [folder]
    (tmp_path / "my_choice.jsonl").rename(tmp_path / "away.jsonl")
    assert requests_of(load_suite("my_choice", 5)) == expected
    os.truncate(folder / "0.parquet", 50)
    with pytest.raises(UserError, match=r"run `isoflop data benchmarks --tasks my_choice`"):
        load_suite("my_choice", 5)


def test_a_hub_that_is_not_reached_is_named_once_without_its_clients_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(path: str) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 8s [Retry 5/5].")
        raise ConnectionError(f"no way to {path}")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.NOTSET)
    lines: list[str] = []
    with pytest.raises(ConnectionError), hub.staged_copies(lines.append):
        datasets.load_dataset("some/data")
    assert lines == ["some/data is not staged; loading it from the Hugging Face Hub"]
    assert caplog.records == []


def test_a_copy_keeps_types_and_splits_and_knows_its_arguments(tmp_path: Path) -> None:
    features = datasets.Features({"label": datasets.ClassLabel(names=["no", "yes"]), "text": datasets.Value("string")})
    rows = datasets.Dataset.from_dict({"label": [1, 0], "text": ["a", "é"]}, features=features)
    data = datasets.DatasetDict({"train": rows, "test": rows.select([1])})
    folder = hub.copy_folder({"path": "me/mine", "name": "x"})
    hub.write_copy(folder, data, {"path": "me/mine", "name": "x"})
    again = hub.read_copy(folder)
    assert again.keys() == data.keys()
    assert again["train"].features == features
    assert [list(again[split]) for split in data] == [list(data[split]) for split in data]
    assert folder == hub.copy_folder({"path": "me/mine", "name": "x", "cache_dir": "/elsewhere"})
    assert folder != hub.copy_folder({"path": "me/mine", "name": "y"})
    hub.write_copy(folder, rows, {})
    assert list(hub.read_copy(folder)) == list(rows)


def test_examples_of_a_named_task_are_lm_evals_own_choice(own_names: TaskManager, tmp_path: Path) -> None:
    suite = load_suite("my_choice@3,my_choice", None)
    assert {name: entry.shots for name, entry in suite.items()} == {"my_choice@3": 3, "my_choice": 0}
    task = own_names.load(["my_choice"])["tasks"]["my_choice"]
    task.set_config(key="num_fewshot", value=3)
    task.set_fewshot_seed(seed=1234)  # as lm_eval.simple_evaluate(num_fewshot=3) does
    task.build_all_requests(limit=None, rank=0, world_size=1)
    assert [one.args for one in suite["my_choice@3"].task.instances] == [one.args for one in task.instances]
    scores = score(checkpoint_of(bigram(random_table())), suite)
    assert scores.keys() == {"my_choice@3", "my_choice"}
    assert scores["my_choice"]["gold_bpb"] == scores["my_choice@3"]["gold_bpb"]  # a letter pair looks back one letter
    with pytest.raises(UserError, match=r"'my_choice' cannot be loaded"):
        load_suite("my_choice@99", None)


def test_a_folder_is_taken_where_lm_eval_has_no_such_name(
    own_names: TaskManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = tmp_path / "mine" / "questions.jsonl"
    questions.parent.mkdir()
    questions.write_text('{"question": "One and one is", "choices": ["two", "three"], "answer": 0}\n')
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(questions)}}, "test_split": "test"}
    form = {
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
    }
    (tmp_path / "mine" / "sums.yaml").write_text(json.dumps({"task": "sums", **data, **form}))
    monkeypatch.chdir(tmp_path)
    assert list(load_suite("mine", 5)) == ["sums"] == list(load_suite("./mine", 5))
    questions.write_text(questions.read_text() * 2 + questions.read_text().replace("one is", "two is"))
    suite = load_suite("mine/questions.jsonl,mine/questions.jsonl@1", 5)
    assert list(suite) == ["questions", "questions@1"] == [entry.name for entry in suite.values()]
    assert score(checkpoint_of(bigram(random_table())), suite).keys() == suite.keys()
    assert stage_tasks("mine") == []


def test_tasks_that_run_code_are_refused_before_they_are_loaded(own_names: TaskManager, tmp_path: Path) -> None:
    path = tmp_path / "my_choice.yaml"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"unsafe_code": True}))
    (tmp_path / "my_choice.jsonl").unlink()
    for name in ("my_choice", "my_group"):
        with pytest.raises(
            UserError, match=r"'my_choice' runs generated code" if name == "my_choice" else "my_choice|my_group"
        ):
            load_suite(name, 5)


@pytest.mark.slow
def test_the_kept_index_is_lm_evals_own(tmp_path: Path) -> None:
    lines: list[str] = []
    first, stored = hub.task_manager(lines.append), hub.task_manager(lines.append)
    assert lines == ["reading lm-eval's task definitions (once, about 10 s)"]
    assert stored.all_tasks == first.all_tasks
    for name, entry in first.task_index.items():
        copy = stored.task_index[name]
        assert (copy.kind, copy.yaml_path, copy.tags) == (entry.kind, entry.yaml_path, entry.tags)
    named = [name for name in suite_tasks("core_hub") or [] if name.partition("@")[0] not in stored.task_index]
    assert named == []
    ours = {name for name, task in STAGED.items() if "/" not in task.yaml}
    assert not ours & stored.task_index.keys()
    assert STAGED.keys() - ours <= stored.task_index.keys()
    with pytest.raises(UserError, match="nearest names are hellaswag"):
        load_suite("hellaswg", 5)
    with pytest.raises(UserError, match="'humaneval' runs generated code"):
        load_suite("humaneval", 5)
