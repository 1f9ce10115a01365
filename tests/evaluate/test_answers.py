"""The store of answers: values come back the same, also after a kill; damage or another model starts a new store."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isoflop.evaluate.items import CUT, LONGEST, as_dicts, items_path, pack_items, read_items, shortened
from isoflop.evaluate.metrics import ItemResult
from isoflop.evaluate.records import Answers, request_key
from isoflop.train.files import write_atomic

HEADER = {"checkpoint_sha256": "c0ffee", "precision": "fp32", "scoring": 2, "lm_eval_version": "0.4.13"}


def opened(path: Path, lines: list[str] | None = None, **changes: Any) -> Answers:
    return Answers(path, HEADER | changes, (lines if lines is not None else []).append)


def test_a_key_names_a_request_by_its_parts() -> None:
    assert request_key("a", [1, 2], "x") == request_key("a", [1, 2], "x")
    parts: list[tuple[Any, ...]] = [("a", "b"), ("b", "b"), ("a", "b", None), ("a", ["b"]), ("ab",), ("a", "é")]
    assert len({request_key(*one) for one in parts}) == 6
    assert len(request_key("a")) == 32
    assert request_key("a", np.int64(3)) == request_key("a", 3)


def test_answers_come_back_to_the_last_bit(tmp_path: Path) -> None:
    path, values = tmp_path / "a.jsonl", np.random.default_rng(0).normal(size=200).tolist()
    store = opened(path)
    store.put((f"k{place}", [value, True]) for place, value in enumerate(values))
    store.put([("text", ["an é\n"]), ("nan", [math.nan, False])])
    store.put([])
    store.close()
    again = opened(path)
    assert [again.get(f"k{place}")[0] for place in range(200)] == values  # type: ignore[index]
    assert again.get("text") == ["an é\n"]
    assert math.isnan(again.get("nan")[0])  # type: ignore[index]
    assert again.get("other") is None
    assert len(path.read_text().splitlines()) == 3  # the header, and a line a batch


def test_a_torn_last_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    store = opened(path)
    store.put([("a", 1)])
    store.put([("b", 2)])
    store.close()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        lines: list[str] = []
        again = opened(path, lines)
        assert again.get("b") is None
        again.put([("c", 3)])
        again.close()
        last = opened(path)
        assert (last.get("c"), lines) == (3, [])
        last.close()


def test_answers_of_another_model_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    store = opened(path)
    store.put([("a", 1)])
    store.close()
    for change in ({"checkpoint_sha256": "beef"}, {"precision": "bf16"}, {"scoring": 3}):
        other = opened(path, **change)
        assert other.get("a") is None
        other.close()
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_line_costs_its_answers_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(HEADER), '{"a": 1}', "{no json", "3", "null", '"text"', '{"b": 2}', ""]))
    store = opened(path)
    assert (store.get("a"), store.get("b")) == (1, 2)
    store.close()


def test_answers_say_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [0.0], list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    meter = Answers(say=lines.append)
    meter.put([("old", 1)])
    meter.begin("piqa (1 of 2)")
    assert [meter.get(key) for key in ("old", *range(100))] == [1, *[None] * 100]
    for second in range(1, 26):
        now[0] = second
        meter.put([(f"{second}/{place}", place) for place in range(2)])
        meter.put([])
    assert meter.known["25/1"] == 1
    # 20 answers in 10 s, and one from before: 80 remain.
    assert lines[0] == "piqa (1 of 2): 21 of 101 requests, 2 a second, 40 s left"
    assert len(lines) == 2


def item(**more: Any) -> ItemResult:
    return ItemResult(4, {"acc": 1.0}, [-1.0, math.nan], prompt="<b>", choices=[" a", " b"], right=[0], **more)


def test_items_are_written_and_read_back(tmp_path: Path) -> None:
    path = items_path(tmp_path / "eval" / "step_7.json")
    assert path.name == "step_7.items.jsonl.gz"
    whole = as_dicts("t", [item()], {4})
    assert whole[0]["log_probabilities"] == [-1.0, None]
    assert whole[0]["contaminated"] is True
    assert as_dicts("t", [item()], None)[0]["contaminated"] is None
    write_atomic(path, [pack_items(whole), pack_items(as_dicts("u", [item()], None))])
    assert [one["task"] for one in read_items(path)] == ["t", "u"]
    assert read_items(path)[0] == whole[0]
    assert read_items(tmp_path / "absent") == []
    assert pack_items(whole) == pack_items(whole)


def test_long_texts_keep_their_beginning_and_their_end() -> None:
    text = "a" * LONGEST + "b" * LONGEST
    cut = shortened(text)
    assert len(cut) == LONGEST
    assert cut.startswith("aaa")
    assert cut.endswith("bbb")
    assert CUT in cut
    assert shortened("a" * LONGEST) == "a" * LONGEST


@pytest.mark.parametrize("content", [b"", b"no gzip", pack_items([{"task": "t", "index": 1}])[:-3], pack_items([])[:4]])
def test_a_damaged_file_of_items_is_moved_aside(tmp_path: Path, content: bytes) -> None:
    path, lines = tmp_path / "s.items.jsonl.gz", list[str]()
    path.write_bytes(content)
    assert read_items(path, lines.append) == []
    if content:  # an empty file has no item and is not damaged
        assert "renamed to s.items.jsonl.gz.corrupt-1" in lines[0]
        assert not path.exists()
