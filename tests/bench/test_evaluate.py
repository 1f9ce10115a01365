"""`isoflop bench evaluate`: what counts as the same answer, what is overhead, and rows of the contract."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_sweep import planned_run
from isoflop.bench import evaluate as bench
from isoflop.evaluate.metrics import ItemResult
from isoflop.train.config import ModelConfig
from isoflop.train.errors import UserError

ROW = {"case", "ours", "peer", "peer_name", "unit", "ratio", "spread", "device"}


def test_an_answer_is_the_same_when_choice_text_and_metrics_are() -> None:
    item = ItemResult(3, {"acc": 1.0}, [-2.0, -1.0, -3.0])
    assert bench.same_answer(item, replace(item, log_probabilities=[-2.1, -0.9, -3.0]))
    assert not bench.same_answer(item, replace(item, log_probabilities=[-0.9, -1.0, -3.0]))
    assert not bench.same_answer(item, replace(item, values={"acc": 0.0}))
    assert not bench.same_answer(item, replace(item, index=4))
    written = ItemResult(0, {"exact_match": 0.0}, answer="seven")
    assert bench.same_answer(written, written)
    assert not bench.same_answer(written, replace(written, answer="seven "))


def test_items_are_as_far_apart_as_their_furthest_choice() -> None:
    item = ItemResult(0, {}, [-2.0, -1.0])
    assert bench.nats_apart(item, replace(item, log_probabilities=[-2.5, -1.1])) == pytest.approx(0.5)
    assert bench.nats_apart(item, replace(item, log_probabilities=[math.nan, -1.0])) == math.inf


def finished(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A sweep's folder with a plan and a table; every row has a budget."""
    plan = {"runs": [planned_run(row["run_id"], budget=row["budget"]) for row in rows]}
    (folder / "plan.json").write_text(json.dumps(plan))
    table = [{key: value for key, value in row.items() if key != "budget"} | {"final": True} for row in rows]
    pd.DataFrame(table).to_csv(folder / "table.csv", index=False)
    return folder


def test_gold_bpb_falls_where_each_budgets_best_run_is_better(tmp_path: Path) -> None:
    def row(name: str, budget: float, loss: float, a: float, b: float) -> dict[str, Any]:
        return {"run_id": name, "budget": budget, "loss": loss, "a/gold_bpb": a, "b/gold_bpb": b}

    rows = [
        row("0000000001", 1e10, 3.0, 1.5, 2.0),
        row("0000000002", 1e10, 2.9, 1.4, 1.9),  # the best of its budget
        row("0000000003", 1e11, 2.5, 1.3, 1.95),
        row("0000000004", 1e12, 2.0, 1.2, 1.8),
        row("0000000005", 1e12, 2.2, 9.0, 9.0),
    ]
    found = bench.falling(finished(tmp_path, rows))
    assert set(found) - {"tasks"} == ROW
    assert found["tasks"] == {"a": True, "b": False}
    assert (found["ours"], found["peer"], found["ratio"]) == (1, 2, 0.5)
    assert "3 budgets" in found["case"]
    assert list(bench.bench_evaluate("cpu", cases=(), sweep=tmp_path)) == [found], "asked alone, alone is measured"
    finished(tmp_path, rows[:2])
    with pytest.raises(UserError, match="must have runs of two budgets or more, scored on tasks"):
        bench.falling(tmp_path)
    (tmp_path / "table.csv").unlink()
    with pytest.raises(UserError, match=r"it has no table\.csv"):
        bench.falling(tmp_path)


def test_a_case_that_there_is_not_and_a_peer_that_is_missing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--case is 'speed'"):
        next(bench.bench_evaluate("cpu", cases=["speed"]))
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(UserError, match="datasketch is not installed"):
        next(bench.bench_evaluate("cpu", cases=["duplicates"]))


@pytest.mark.exhaustive
def test_both_sides_of_a_small_model_agree_on_every_item() -> None:
    pytest.importorskip("accelerate")
    small = bench.Setting(
        model=ModelConfig(width=64, depth=2, heads=2), vocab_size=1024, text_bytes=1 << 20, length=512,
        tokens=1 << 14, generation=(3, 12),
    )  # fmt: skip
    rows = list(bench.bench_evaluate("cpu", 1, 12, ["agreement", "throughput"], setting=small))
    assert all(set(row) == ROW for row in rows)
    counted = [row for row in rows if row["unit"] == "items equal"]
    assert [row["ours"] for row in counted] == [row["peer"] for row in counted] == [12, 12, 12, 3]
    nats = [row for row in rows if row["unit"] == "max nats"]
    assert len(nats) == 3
    assert all(row["ours"] < bench.ALLOWED_NATS for row in nats)
    assert rows[-1]["unit"] == "items/s"
