"""Pipelines: the same bits in low precision, messages, memory and held-out losses.

test_train.py compares their steps with those of one process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from isoflop.train import precision
from isoflop.train.config import OptimizerConfig, ParallelConfig, RunConfig
from isoflop.train.data.loader import TrainStream
from isoflop.train.data.shards import prepare
from isoflop.train.hardware import peak_bytes
from isoflop.train.job.fork import run_ranks
from isoflop.train.memory import memory
from isoflop.train.model.shape import micro_batch_of
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.parallel.pipeline import Messages
from meshes import CPU, mesh_of, started, take_steps, whole
from test_train import of_kind


def with_parallel(config: RunConfig, **parallel: Any) -> RunConfig:
    """Return the run with other parallel settings."""
    return replace(config, parallel=replace(config.parallel, **parallel))


def test_low_precision_gives_the_bits_of_one_process(config: RunConfig) -> None:
    """Expect equal bits: every sum has the same order, except the norm's and that of the two terms of a tied table."""
    config.model = replace(config.model, depth=5, kv_heads=1, tied_embeddings=False)
    config.optimizer.gradient_clip, config.parallel.micro_batch_size = 0.0, 2
    alone = [replace(config, precision=kind) for kind in ("bf16", "fp16")]
    staged = [
        with_parallel(alone[0], pp=2, schedule="1f1b"),
        with_parallel(alone[1], pp=2, schedule="interleaved", chunks=2),
    ]
    by_rank = run_ranks(2, lambda: [take_steps(pipeline, mesh_of(pipeline.parallel), 3) for pipeline in staged])
    for one_process, *answers in zip((take_steps(run, Mesh(), 3) for run in alone), *by_rank, strict=True):
        assert [losses for losses, _, _ in answers] == [one_process[0]] * 2
        expected = whole([one_process])
        for name, values in whole(answers).items():
            assert np.array_equal(values, expected[name]), name


def test_a_gradient_that_is_no_number_on_one_stage_is_skipped_on_all(config: RunConfig) -> None:
    config = with_parallel(config, pp=2, zero=1, micro_batch_size=2)

    def skip_the_second() -> list[tuple[float, bool, bool]]:
        stepper = started(config, mesh_of(config.parallel))
        results = []
        for step in range(3):
            before = [held.values.clone() for held in stepper.held()]
            weight = list(stepper.gpt.parameters())[-1]
            bad = step == 1 and stepper.mesh.pp_rank == 1
            hook = weight.register_hook(lambda gradient, bad=bad: gradient * (float("nan") if bad else 1.0))
            result = stepper.step(step)
            hook.remove()
            same = all(torch.equal(a, b.values) for a, b in zip(before, stepper.held(), strict=True))
            results.append((result.skipped.item(), same, bool(result.norm.isfinite())))
        return results

    assert run_ranks(2, skip_the_second) == [[(0.0, False, True), (1.0, True, False), (0.0, False, True)]] * 2


def test_held_out_losses_of_many_passes_and_loads_are_those_of_one_process(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(precision._DTYPES, "fp32", torch.float64)
    config = of_kind(config, "experts")
    staged = with_parallel(config, pp=2, chunks=2, schedule="interleaved", micro_batch_size=2)
    windows = torch.from_numpy(TrainStream(prepare(config.data), 16, 1).batch(0, 16, 0, 16))

    def of_stages() -> tuple[Any, Any, int]:
        stepper, beats = started(staged, mesh_of(staged.parallel)), list[None]()
        stepper.step(0)
        loads = stepper.loads()
        # Three windows a pass, and one in the last.
        losses = stepper.pipeline.losses(windows, lambda: beats.append(None), batch_tokens=3 * 16)
        return loads.numpy(), losses.numpy(), len(beats)

    alone = started(config, Mesh())
    alone.step(0)
    expected, loads = alone.losses(windows, lambda: None).numpy(), alone.loads()
    for theirs, losses, beats in run_ranks(2, of_stages):
        assert np.array_equal(theirs, loads)
        np.testing.assert_allclose(losses, expected, rtol=1e-10)
        assert beats == 6 * 2


def test_what_was_sent_is_let_go_once_it_has_come(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect 1F1B to keep what was sent to the next stage until its gradient comes, for any number of passes."""
    counts = list[int]()
    send = Messages.send

    def counting(self: Messages, *arguments: Any) -> None:
        send(self, *arguments)
        counts.append(len(self.sent))

    monkeypatch.setattr(Messages, "send", counting)
    config.model.depth = 4

    def peak_count(schedule: str) -> int:
        staged = with_parallel(config, pp=4, schedule=schedule, micro_batch_size=1)
        counts.clear()
        started(staged, mesh_of(staged.parallel)).step(0)
        return max(counts)

    by_rank = run_ranks(4, lambda: [peak_count(schedule) for schedule in ("gpipe", "1f1b")])
    assert [rank[0] for rank in by_rank][:3] == [8, 8, 8]
    # Stage s holds 3 - s activations, the one just sent, and one or two gradients for the stage before.
    assert all(peak <= 3 - stage + 3 for stage, (_, peak) in enumerate(by_rank))


@pytest.mark.parametrize(
    ("pp", "schedule", "batch", "micro"),
    [(1, "1f1b", 64, 64), (2, "1f1b", 64, 8), (4, "1f1b", 8, 1), (3, "interleaved", 36, 3)],
)
def test_a_micro_batch_that_is_not_set_leaves_the_pipeline_full(pp: int, schedule: str, batch: int, micro: int) -> None:
    """Expect four passes per stage, or as many as there are rows; interleaved in whole rounds."""
    config = RunConfig(parallel=ParallelConfig(pp=pp, schedule=schedule), optimizer=OptimizerConfig(batch_size=batch))
    assert micro_batch_of(config) == micro


def test_a_rank_of_a_pipeline_is_named_with_its_stage() -> None:
    mesh = Mesh(pp=2, dp=2, tp=2, hosts=("node06",) * 4 + ("node07",) * 4)
    assert [mesh.name(rank) for rank in (3, 4)] == ["rank 3 (stage 0) on node06", "rank 4 (stage 1) on node07"]


@pytest.mark.slow
def test_a_step_takes_the_memory_that_is_planned(config: RunConfig) -> None:
    config.model = replace(config.model, width=64, depth=8, qk_norm=False, qkv_bias=False, tied_embeddings=False)
    config.data = replace(config.data, sequence_length=64)
    config.optimizer.batch_size = 16
    prepare(config.data)
    planned = [
        with_parallel(config, pp=4, micro_batch_size=2, schedule=schedule, chunks=chunks, recompute=recompute)
        for schedule, chunks, recompute in (("interleaved", 2, "none"), ("1f1b", 1, "full"))
    ]

    def measured(staged: RunConfig) -> int:
        stepper = started(staged, mesh_of(staged.parallel))
        stepper.step(0)  # also allocates what stays
        return peak_bytes(lambda: stepper.step(1), CPU)

    by_rank = run_ranks(4, lambda: [measured(staged) for staged in planned])
    for staged, ranks in zip(planned, zip(*by_rank, strict=True), strict=True):
        expected = memory(staged, "cpu")
        # The worst rank; what the planner leaves out is much less than 10 %.
        assert max(ranks) == pytest.approx(expected.peak - expected.state, rel=0.1), staged.parallel
