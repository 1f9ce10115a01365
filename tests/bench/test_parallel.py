"""The benchmark of the trainer's parallelism runs, and its peers train the very same."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from isoflop.bench import context as bench_context
from isoflop.bench import parallel as bench_parallel
from isoflop.bench import peers as bench_peers
from isoflop.bench.contenders import print_benchmark
from isoflop.bench.train import bench_config, build_stepper
from isoflop.train.config import RunConfig
from isoflop.train.data.shards import prepare
from isoflop.train.job.fork import run_ranks
from isoflop.train.parallel.mesh import build_mesh

pytestmark = pytest.mark.exhaustive


def small_config(precision: str, folder: Path, compiled: bool) -> RunConfig:
    """The benchmark's, of a model small enough for a test."""
    config = bench_config(precision, folder, compiled)
    config.model.width, config.model.depth, config.model.heads = 32, 4, 2
    config.optimizer.batch_size, config.data.sequence_length = 4, 64
    return config


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = small_config("fp32", tmp_path, compiled=False)
    prepare(config.data)
    return config


@pytest.mark.parametrize(("case", "fields", "peer"), bench_parallel.CASES, ids=lambda value: str(value))
def test_a_peer_takes_our_steps(case: str, fields: dict[str, Any], peer: str, config: RunConfig) -> None:
    config.parallel = dataclasses.replace(config.parallel, **fields)
    tp, dp, pp = config.parallel.tp, config.parallel.dp, config.parallel.pp

    def losses() -> tuple[list[float], list[float]]:
        warnings.simplefilter("ignore")
        here = build_mesh(dp, tp, torch.device("cpu"), pp=pp)
        ours, theirs = build_stepper(config, here), bench_peers.build_peer(peer, config, here)
        # Fused matrices are cut elsewhere by the tensor-parallel peer, so it is the same model in its first step only.
        steps = 4 if tp == 1 else 1
        return [ours.step(n).loss.item() for n in range(steps)], [theirs(n).item() for n in range(steps)]

    answers = run_ranks(2, losses)
    for step, loss in enumerate(answers[0][0]):
        # A dp peer knows the loss of its own half of the batch, and of a pipeline the last stage knows it.
        peers = sum(theirs[step] for _, theirs in answers) / (1 if pp > 1 else 2)
        assert peers == pytest.approx(loss, rel=1e-5)


def test_rows_have_the_format_of_every_benchmark(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_parallel, "bench_config", small_config)
    monkeypatch.delattr("os.sched_setaffinity", raising=False)  # tests beside this one want the same cores
    rows = json.loads(json.dumps(bench_parallel.bench_parallel(rounds=1, steps=1)))
    assert len(rows) == len(bench_parallel.CASES) + 1 + 3
    for row in rows:
        assert {"case", "ours", "peer", "peer_name", "unit", "ratio", "spread", "device"} <= set(row)
        assert row["ratio"] == row["ours"] / row["peer"] > 0
    print_benchmark(rows)
    said = capsys.readouterr().out
    assert "fully_shard" in said
    assert "MFU" not in said


def test_the_peer_of_the_ring_attends_alike() -> None:
    def of_rank() -> list[torch.Tensor]:
        torch.manual_seed(dist.get_rank())
        inputs = [torch.randn(1, 32, heads, 64, requires_grad=True) for heads in (4, 2, 2)]
        group = dist.group.WORLD
        assert group is not None
        both = [attend(*inputs) for attend in (bench_context.ring(group), bench_context.gathered(group, 64))]
        return [x for out in both for x in (out.detach(), *torch.autograd.grad(out.square().sum(), inputs))]

    for found in run_ranks(2, of_rank):
        for ours, theirs in zip(found[:4], found[4:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert bench_context.attention_bytes(4) < 0.3 * bench_context.attention_bytes(1)
