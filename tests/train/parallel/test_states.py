"""A test's own optimizer keeps the states that it declares: on every mesh, in checkpoints, in the memory estimate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from isoflop.train.checkpoint.checkpoint import restore_state
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.config import OptimizerConfig, RunConfig
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.job.fork import run_ranks
from isoflop.train.memory import memory
from isoflop.train.optimizer.optimizer import MATRICES, Optimizer, State, Step, WholeMatrices
from isoflop.train.optimizer.registry import OPTIMIZERS
from isoflop.train.parallel import whole
from isoflop.train.parallel.mesh import Mesh
from meshes import Outcome, assert_same, mesh_of, outcome, started, stepper_of, take_steps
from torch import Tensor


def direction(gradient: Tensor, states: list[Tensor], options: Any, divisor: Tensor | None, skipped: Tensor) -> Tensor:
    (momentum,) = states
    gradient = gradient if divisor is None else gradient / divisor
    momentum.copy_(momentum.float().lerp(gradient, 0.1 * (1 - skipped)))
    return 0.5 * gradient + momentum.float()


def divide_by_rows(matrices: Tensor, states: list[Tensor], options: Any, skipped: Tensor) -> None:
    (rows,) = states
    rows.lerp_(matrices.square().mean(2), 0.5 * (1 - skipped))
    matrices.div_(rows.sqrt()[:, :, None] + 1e-3)


def update(weight: Tensor, gradient: Tensor, states: list[Tensor], step: Step, options: OptimizerConfig) -> None:
    weight.sub_(gradient * (step.rate * (1 - step.skipped)))


STATES = (State("momentum", dtype="bf16"), State("rows", lambda rows, columns: rows))
BY_ROWS = Optimizer(update, STATES, MATRICES, WholeMatrices(direction, divide_by_rows, lambda rows, columns: 0))


def in_two_parts(config: RunConfig, folder: Path) -> Outcome:
    """Take four steps, and the last two again from a checkpoint, to the same bits."""
    mesh = mesh_of(config.parallel)
    uninterrupted = started(config, mesh)
    losses, norms, _ = outcome(uninterrupted, 0, 2)
    saver = Saver(folder, mesh, config, ByteTokenizer())
    saver.save(2, uninterrupted.held(), uninterrupted.state())
    saver.close()
    resumed = stepper_of(config, mesh)
    resumed.load_state(restore_state(folder / "step_2", resumed.held(), config))
    rest, again = outcome(uninterrupted, 2, 4), outcome(resumed, 2, 4)
    assert rest[:2] == again[:2]
    for ours, theirs in zip(uninterrupted.held(), resumed.held(), strict=True):
        assert (ours.name, ours.kind, ours.start) == (theirs.name, theirs.kind, theirs.start)
        assert torch.equal(ours.values, theirs.values), (ours.name, ours.kind)
    return losses[:2] + rest[0], norms + rest[1], rest[2]


def test_declared_states_are_kept_by_ranks_and_checkpoints(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "rows", BY_ROWS)
    monkeypatch.setattr(whole, "SMALL", 0)  # ranks share the matrices out
    config.optimizer = replace(config.optimizer, kind="rows", learning_rate=1e-2)
    alone = take_steps(config, Mesh(), 4)
    meshes: list[dict[str, int]] = [{"dp": 2, "zero": 2}, {"tp": 2}, {"pp": 2}]
    configs = [replace(config, parallel=replace(config.parallel, **mesh, micro_batch_size=2)) for mesh in meshes]
    by_rank = run_ranks(2, lambda: [in_two_parts(c, tmp_path / str(i)) for i, c in enumerate(configs)])
    for mesh, *answers in zip(meshes, *by_rank, strict=True):
        assert_same(answers, alone, 1e-4, mesh)


def test_the_estimate_counts_declared_states(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "rows", BY_ROWS)
    config.optimizer.kind = "rows"
    held = [state for state in started(config, Mesh()).held() if state.kind != "weight"]
    assert {state.kind for state in held} == {"momentum", "rows", "exp_avg", "exp_avg_sq"}
    assert memory(config, "cpu").optimizer == pytest.approx(sum(state.values.nbytes for state in held), rel=0.02)
