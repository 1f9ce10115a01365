"""A run over any mesh of ranks equals the run of one process in losses, weights, files and resumption."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from covering import covering
from isoflop.train import loop, precision
from isoflop.train.checkpoint.checkpoint import load_for_evaluation
from isoflop.train.config import RunConfig
from isoflop.train.errors import OutOfMemory
from isoflop.train.files import read_json_lines
from isoflop.train.job.fork import run_ranks
from isoflop.train.model.gpt import GPT
from isoflop.train.parallel import whole as whole_matrices
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.planner.validation import check_shapes
from isoflop.train.stepper import Stepper
from meshes import Outcome, assert_same, mesh_of, stop_at, take_steps, train_on_ranks

KINDS = ("tied", "muon", "experts")


def of_kind(config: RunConfig, kind: str, depth: int = 4) -> RunConfig:
    """Return the small run with another kind of model or optimizer."""
    config = copy.deepcopy(config)
    config.model.depth = depth
    if kind == "experts":  # biases move fast enough to decide choices in the second step
        config.model = replace(
            config.model, kv_heads=None, qk_norm=False, qkv_bias=False, head_size=None, attention="mla", kv_rank=12,
            query_rank=10, rotary_size=4, experts=8, experts_per_token=2, expert_hidden=8, shared_experts=1,
            dense_layers=1, balance_rate=0.1, balance_loss=0.05, router_z_loss=0.01,
        )  # fmt: skip
        config.optimizer.gradient_clip = 0.0  # its divisor is fp32, and these steps are taken in float64
    elif kind == "muon":  # all tensor-parallel ranks hold the one key/value head
        config.model = replace(config.model, kv_heads=1, tied_embeddings=False, window=9)
        config.data.separate_documents = True
        config.optimizer = replace(config.optimizer, kind="muon", matrix_multiplier=10.0)
    return config


class Case(NamedTuple):
    """One run over a mesh; None where a setting changes nothing."""

    kind: str
    pp: int
    cp: int
    tp: int
    dp: int
    ep: int | None
    zero: int | None
    schedule: str | None
    chunks: int | None
    sequence_parallel: bool | None
    passes: int  # of a rank in one step
    recompute: str

    @property
    def ranks(self) -> int:
        return self.pp * self.cp * self.tp * self.dp

    @property
    def depth(self) -> int:
        return 4 if self.pp > 1 else 2

    def config(self, config: RunConfig) -> RunConfig:
        config = of_kind(config, self.kind, self.depth)
        values = {name: getattr(self, name) for name in self._fields if name not in ("kind", "passes")}
        values = {name: value for name, value in values.items() if value is not None}
        micro = config.optimizer.batch_size // self.dp // self.passes
        config.parallel = replace(config.parallel, **values, micro_batch_size=micro)
        return config


def cases(ranks: int, sizes: Sequence[int] = (1, 2)) -> list[Case]:
    """Return every legal case of this number of ranks and these axis sizes, with the two usual schedules."""
    legal = []
    for pp, cp, tp, dp in itertools.product(sizes, repeat=4):
        data = cp * dp
        if data * pp * tp != ranks:
            continue
        for kind, (schedule, chunks), zero in itertools.product(
            KINDS,
            [("1f1b", 1), ("interleaved", 2)][: 2 if pp == 2 else 1] if pp > 1 else [(None, None)],
            range(4 if pp == 1 else 3) if data > 1 else (None,),
        ):
            for ep, sequence, passes, recompute in itertools.product(
                (1, 2) if kind == "experts" and data > 1 else (None,),
                (None,) if tp == 1 else (True, False) if zero is None else (zero % 2 == 0,),
                (1, 2) if pp == 1 else (2 if cp > 1 or dp > 2 else 4,),
                ("none", "selective", "full"),
            ):
                legal.append(Case(kind, pp, cp, tp, dp, ep, zero, schedule, chunks, sequence, passes, recompute))
    return legal


COVER = covering(cases(4))  # those with most new pairs come first
DEFAULT_CASES = 13  # of COVER, the others are slow; with fewer, a planted bug was missed
EIGHT_CASES = 6  # of those of eight ranks, the others are exhaustive
OTHERS = [
    Case("tied", 1, 1, 1, 1, None, 3, None, None, True, 2, "none"),  # one rank runs the code of many
    Case("muon", 2, 1, 1, 2, None, 2, "gpipe", 1, None, 2, "none"),
    Case("tied", 4, 1, 1, 1, None, None, "1f1b", 1, None, 2, "none"),  # two stages have no table
]


def steps_of(case: Case, config: RunConfig, alone: bool = False) -> Outcome:
    """Take two steps on the mesh of a case, or of its model in one process.

    Experts run in float64, where rounding decides no near tie and a slightly wrong sum is noticed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_matrices, "SMALL", 0)  # so that data-parallel ranks share the work on matrices
        patch.setitem(precision._DTYPES, "fp32", torch.float64 if case.kind == "experts" else torch.float32)
        if alone:
            return take_steps(of_kind(config, case.kind, case.depth), Mesh(), 2)
        case_config = case.config(config)
        check_shapes(case_config)
        return take_steps(case_config, mesh_of(case_config.parallel), 2)


def test_steps_on_a_cover_of_meshes_are_those_of_one_process(config: RunConfig) -> None:
    assert_those_of_one_process([*COVER[:DEFAULT_CASES], *OTHERS], config)


@pytest.mark.slow
def test_steps_on_the_rest_of_the_cover_are_those_of_one_process(config: RunConfig) -> None:
    assert_those_of_one_process(COVER[DEFAULT_CASES:], config)


@pytest.mark.slow
def test_steps_on_meshes_of_eight_ranks_are_those_of_one_process(config: RunConfig) -> None:
    assert_those_of_one_process(covering(cases(8, (1, 2, 4)), COVER)[:EIGHT_CASES], config)


@pytest.mark.exhaustive
def test_steps_on_the_rest_of_the_cover_of_eight_ranks_are_those_of_one_process(config: RunConfig) -> None:
    assert_those_of_one_process(covering(cases(8, (1, 2, 4)), COVER)[EIGHT_CASES:], config)


def assert_those_of_one_process(several: list[Case], config: RunConfig) -> None:
    alone = {(case.kind, case.depth): steps_of(case, config, alone=True) for case in several}
    for ranks in {case.ranks for case in several}:
        chosen = [case for case in several if case.ranks == ranks]
        by_rank = run_ranks(ranks, lambda: [steps_of(case, config) for case in chosen], timeout=600.0)  # noqa: B023
        for case, *answers in zip(chosen, *by_rank, strict=True):
            assert_same(answers, alone[case.kind, case.depth], 1e-10 if case.kind == "experts" else 1e-5, case)


# A compiled block meets what runs between two graphs: stages, the ring, gathered weights, and recomputation.
COMPILED = [
    Case("tied", 2, 1, 1, 2, None, 1, "interleaved", 2, None, 2, "selective"),
    Case("tied", 1, 2, 2, 1, None, 3, None, None, True, 1, "full"),
]


@pytest.mark.slow
def test_compiled_blocks_take_the_same_steps(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile through dynamo and aot_autograd; inductor would add minutes of C++."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend="aot_eager"))
    for case in COMPILED:
        alone = steps_of(case, config, alone=True)
        compiled = replace(config, parallel=replace(config.parallel, compile=True))
        answers = run_ranks(4, lambda: steps_of(case, compiled), timeout=300.0)  # noqa: B023
        assert_same(answers, alone, 1e-5, case)


# Meshes that one run passes through, each for two steps: (pp, schedule, chunks, cp, tp, dp, ep, zero).
WAY = [(2, "1f1b", 1, 1, 1, 2, 2, 2), (2, "interleaved", 2, 1, 2, 1, 1, 0), (1, "1f1b", 1, 1, 1, 1, 1, 0),
       (1, "1f1b", 1, 2, 2, 1, 2, 1), (1, "1f1b", 1, 1, 2, 2, 2, 3)]  # fmt: skip


@pytest.mark.slow
def test_a_run_that_moves_between_meshes_goes_on_as_if_never_moved(config: RunConfig, tmp_path: Path) -> None:
    config = of_kind(config, "experts")
    config.model.experts_per_token = config.model.experts  # every token goes through all: no near tie decides
    config.tokens = 2 * len(WAY) * 128
    reference = loop.train(config, tmp_path / "one", report=lambda line: None)
    for number, mesh in enumerate(WAY):
        values = dict(zip(("pp", "schedule", "chunks", "cp", "tp", "dp", "ep", "zero"), mesh, strict=True))
        moved = copy.deepcopy(config)
        moved.parallel = replace(config.parallel, **values, micro_batch_size=2)
        ranks, last = moved.parallel.world_size, number == len(WAY) - 1
        # Flags are agreed on at the next step; one process agrees with itself at once.
        stops = {} if last else {"should_stop": stop_at(2 if ranks == 1 else 1, rank=ranks - 1)}
        ended = train_on_ranks(moved, tmp_path / "moved", ranks, **stops)
        last_message = "done" if last else f"Stopped: stopped at step {2 * number + 2} of {2 * len(WAY)}"
        assert {end.said[-1] for end in ended} == {last_message}, ended
    lines, expected = (read_json_lines(tmp_path / name / "metrics.jsonl") for name in ("moved", "one"))
    assert [line["step"] for line in lines] == list(range(1, 2 * len(WAY) + 1))
    for ours, theirs in zip(lines, expected, strict=True):
        assert set(ours) == set(theirs)
        for name, tolerance in {"train_loss": 1e-5, "val_loss": 1e-5, "grad_norm": 1e-4, "load_entropy": 1e-6}.items():
            assert ours.get(name, 0.0) == pytest.approx(theirs.get(name, 0.0), rel=tolerance)
    summary = json.loads((tmp_path / "moved" / "summary.json").read_text())
    assert set(summary) == set(reference)
    assert (summary["ranks"], reference["ranks"]) == (4, 1)
    for name, tolerance in {"val_loss": 1e-5, "val_bpb": 1e-5, "val_loss_se": 1e-4}.items():  # a difference of losses
        assert summary[name] == pytest.approx(reference[name], rel=tolerance)
    ours, theirs = (load_for_evaluation(tmp_path / name).model for name in ("moved", "one"))
    for (name, value), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_run_resumed_on_its_own_mesh_has_the_same_bits(config: RunConfig, tmp_path: Path) -> None:
    config = replace(of_kind(config, "muon"), precision="bf16")
    config.parallel = replace(config.parallel, tp=2, dp=2, zero=3)
    train_on_ranks(config, tmp_path / "undisturbed", 4)
    train_on_ranks(config, tmp_path / "stopped", 4, stop_at(5, rank=1))
    train_on_ranks(config, tmp_path / "stopped", 4)
    ours, theirs = (load_for_evaluation(tmp_path / name).model for name in ("stopped", "undisturbed"))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    losses = [[line["train_loss"] for line in read_json_lines(tmp_path / name / "metrics.jsonl")]
              for name in ("stopped", "undisturbed")]  # fmt: skip
    assert losses[0] == losses[1]


def test_ranks_with_other_configs_are_refused_on_every_rank(config: RunConfig, tmp_path: Path) -> None:
    config.parallel.dp = 2
    other = replace(config, optimizer=replace(config.optimizer, learning_rate=0.002))
    for end in train_on_ranks(lambda number: (config, other)[number], tmp_path, 2):
        assert end.said[-1].startswith("UserError: optimizer.learning_rate is 0.002 on rank 1")


def out_of_memory(patch: pytest.MonkeyPatch, rank: int, rows: int) -> None:
    """Make one rank run out of memory in passes of more than `rows` rows, from its fourth step on."""
    real, loss, current_step = Stepper.step, GPT.loss, [0]

    def step(self: Stepper, number: int) -> object:
        current_step[0] = number if self.mesh.rank == rank else -1
        return real(self, number)

    def limited(self: GPT, tokens: torch.Tensor, targets: torch.Tensor, **options: float) -> torch.Tensor:
        if self.training and current_step[0] >= 3 and len(tokens) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return loss(self, tokens, targets, **options)

    patch.setattr(Stepper, "step", step)
    patch.setattr(GPT, "loss", limited)


def test_memory_that_runs_out_halves_the_micro_batch_once(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = loop.train(config, tmp_path / "one", report=lambda line: None)
    out_of_memory(monkeypatch, rank=0, rows=4)
    messages: list[str] = []
    summary = loop.train(config, tmp_path / "halved", report=messages.append)
    assert summary["micro_batch_size"] == 4
    assert len(messages) == 1
    assert "out of memory at step 3 with parallel.micro_batch_size 8; it is 4" in messages[0]
    assert summary["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)
    assert json.loads((tmp_path / "halved" / "micro_batch.json").read_text())["micro_batch_size"] == 4
    out_of_memory(monkeypatch, rank=0, rows=0)
    with pytest.raises(OutOfMemory, match=r"out of memory at step 3 with parallel\.micro_batch_size 4"):
        loop.train(config, tmp_path / "hopeless", report=messages.append)


@pytest.mark.slow
def test_a_rank_out_of_memory_ends_all_and_the_next_start_goes_on(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.parallel = replace(config.parallel, dp=2, zero=3)
    out_of_memory(monkeypatch, rank=1, rows=2)
    ended = train_on_ranks(config, tmp_path / "run", 2)
    assert "OutOfMemory: out of memory at step 3 with parallel.micro_batch_size 4; it is 2" in ended[1].said[-1]
    assert "rank 1" in ended[0].said[-1]
    assert "out of memory at step 3" in ended[0].said[-1]
    ended = train_on_ranks(config, tmp_path / "run", 2)
    assert [end.said[-1] for end in ended] == ["done", "done"], ended
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["micro_batch_size"] == 2
