"""The benchmark of ensembles: both sides train the same runs, and a row says of what size."""

from __future__ import annotations

import json

import pytest
import torch
from isoflop.bench.ensemble import CPU_CASES, GPU_CASES, Case, bench_ensemble
from isoflop.train.config import run_id
from isoflop.train.flops import count_parameters

CPU = torch.device("cpu")


@pytest.mark.exhaustive
def test_both_sides_have_the_same_losses() -> None:
    case = Case(4e3, members=3, length=16, rows=2)
    (row,) = bench_ensemble("cpu", rounds=2, steps=1, cases=[case])
    assert row == json.loads(json.dumps(row))
    assert {"case", "ours", "peer", "peer_name", "unit", "ratio", "spread", "device"} <= set(row)
    assert row["ratio"] == row["ours"] / row["peer"] > 0
    assert row["device"].startswith("cpu ")
    assert "3 models of" in row["case"]
    assert "T=16, B=2 each" in row["case"]
    assert row["difference"] <= 1e-5  # the reach of ensembles on CPUs, in nats


@pytest.mark.parametrize("case", [*CPU_CASES, *GPU_CASES], ids=str)
def test_members_are_different_runs_of_about_the_size_that_was_wanted(case: Case) -> None:
    configs = case.configs(CPU)
    assert len({run_id(config) for config in configs}) == case.members
    assert len({config.optimizer.learning_rate for config in configs}) > 1
    (size,) = {count_parameters(config.model).N_total for config in configs}
    assert size == pytest.approx(case.parameters, rel=0.08)
