"""A run over any mesh of ranks is the run of one process: its losses, its weights, its resumption elsewhere."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from forked import Ended, fork_processes
from isoflop.train import loop, precision
from isoflop.train.checkpoint.checkpoint import load_for_evaluation, restore_state
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrackerConfig,
    to_dict,
)
from isoflop.train.data.loader import TrainStream
from isoflop.train.data.shards import prepare
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import OutOfMemory
from isoflop.train.files import read_json_lines
from isoflop.train.job.failure import read_failure
from isoflop.train.job.fork import run_ranks
from isoflop.train.parallel import whole as whole_matrices
from isoflop.train.parallel.layout import boxes
from isoflop.train.parallel.mesh import Mesh, build_mesh
from isoflop.train.stepper import Stepper

CPU = torch.device("cpu")
STEPS = 20


@pytest.fixture(scope="module")
def base(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    config = RunConfig(
        model=ModelConfig(
            width=32, depth=2, heads=4, kv_heads=2, vocab_size=256, qk_norm=True, head_size=10, qkv_bias=True
        ),
        data=small_corpus(256 + 16),
        # Adam follows the sign of a gradient down to eps: with 1e-8 the rounding of one near zero is a step of its own,
        # also between one process and itself in other micro-batches.
        optimizer=OptimizerConfig(batch_size=8, learning_rate=1e-3, eps=1e-4),
        schedule=ScheduleConfig(warmup_tokens=256),
        parallel=ParallelConfig(device="cpu", threads=1, bucket_mb=0.02, timeout_seconds=30.0),
        checkpoint=CheckpointConfig(every_seconds=1e9),
        tracker=TrackerConfig(kind="none"),
        tokens=STEPS * 128,
        log_every=1,
        validations=2,
    )  # fmt: skip
    prepare(config.data)
    return config


@pytest.fixture
def config(base: RunConfig) -> RunConfig:
    return copy.deepcopy(base)


Weights = dict[str, np.ndarray]


def take_steps(
    config: RunConfig, mesh: Mesh, steps: int = STEPS
) -> tuple[list[float], list[float], list[tuple[str, Any, Any, Any]]]:
    """Losses and norms of these steps, and this rank's boxes of the final weights: name, shape, offset, values."""
    stream = TrainStream(prepare(config.data), config.data.sequence_length, config.seed)
    stepper = Stepper(config, mesh, CPU, stream)
    stepper.start()
    results = [stepper.step(step) for step in range(steps)]
    return [r.loss.item() for r in results], [r.norm.item() for r in results], boxes_of(stepper, ("weight",))


def boxes_of(stepper: Stepper, kinds: Sequence[str]) -> list[tuple[str, Any, Any, Any]]:
    """What this rank holds of the state: name, with the kind where there are several; shape; box; values."""
    return [
        (
            h.name if len(kinds) == 1 else f"{h.name} {h.kind}",
            h.placement.shape,
            box,
            h.values[box.start - h.start : box.stop - h.start].clone().numpy(),
        )
        for h in stepper.zero.held()
        for box in boxes(h.placement, h.start, h.stop)
        if h.kind in kinds
    ]


def whole(ranks: list[Any]) -> Weights:
    """Whole parameters out of all ranks' boxes; what several ranks hold must be the same on all."""
    weights: Weights = {}
    for name, shape, box, values in (item for _, _, items in ranks for item in items):
        full = weights.setdefault(name, np.full(shape, np.nan, values.dtype))
        place = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))
        there, values = full[place], values.reshape(box.size)
        assert np.array_equal(values[~np.isnan(there)], there[~np.isnan(there)])
        full[place] = values
    assert not any(np.isnan(full).any() for full in weights.values())
    return weights


def shapes(ranks: int) -> list[tuple[int, int, int, bool]]:
    """(tp, dp, zero, sequence_parallel) of every mesh of so many ranks; of 8, that are cut like 4 along either axis,
    every stage of ZeRO on every mesh, with and without sequence parallelism by turns.
    """
    meshes = [(tp, ranks // tp) for tp in (1, 2, 4) if ranks % tp == 0 and ranks // tp in (1, 2, 4)]
    return [
        (tp, dp, zero, sequence)
        for tp, dp in meshes
        for zero in (range(4) if dp > 1 else [0])
        for sequence in ([True] if tp == 1 else [(zero + tp // 4) % 2 == 0] if ranks == 8 else [False, True])
    ]


def over_ranks(*many: int) -> pytest.MarkDecorator:
    """Every mesh of 2 ranks; of more a cover of the pairs of settings that are new, and as `exhaustive` every mesh."""
    few = [pytest.param(2, True, id="2")]
    cover = [pytest.param(ranks, False, id=f"{ranks}", marks=pytest.mark.slow) for ranks in many]
    whole = [pytest.param(ranks, True, id=f"{ranks}-every", marks=pytest.mark.exhaustive) for ranks in many]
    return pytest.mark.parametrize(("ranks", "every"), few + cover + whole)


def of_ranks(meshes: Callable[[int], list[Any]], ranks: int, every: bool, *many: int) -> list[Any]:
    """Every mesh of so many ranks, or those of them that are in one cover of so `many`."""
    if every:
        return meshes(ranks)
    cover = covering([mesh for n in many for mesh in meshes(n)], meshes(2), key=settings)
    return [mesh for mesh in cover if mesh[0] * mesh[1] == ranks]


def settings(mesh: tuple[int, ...]) -> tuple[int | None, ...]:
    """A mesh without what changes nothing: a stage of ZeRO, and sequences, that nobody shares."""
    tp, dp, zero, sequence, *rest = mesh
    return tp, dp, zero if dp > 1 else None, sequence if tp > 1 else None, *rest


@over_ranks(4, 8)
def test_steps_on_every_mesh_are_those_of_one_process(ranks: int, every: bool, base: RunConfig) -> None:
    meshes, steps = of_ranks(shapes, ranks, every, 4, 8), STEPS if every else 6

    def every_mesh() -> list[Any]:
        answers = []
        for tp, dp, zero, sequence in meshes:
            config = copy.deepcopy(base)
            config.parallel.tp, config.parallel.dp, config.parallel.zero = tp, dp, zero
            config.parallel.sequence_parallel = sequence
            # One micro-batch and several, for the sums over them take other ways.
            config.parallel.micro_batch_size = 1 if zero % 2 else None
            answers.append(take_steps(config, build_mesh(dp, tp, CPU), steps))
        return answers

    losses, norms, weights = take_steps(base, Mesh(), steps)
    expected = losses, norms, whole([(losses, norms, weights)])
    assert_same_steps(run_ranks(ranks, every_mesh, timeout=900.0), meshes, expected)


def with_muon(config: RunConfig) -> RunConfig:
    """The head is untied, and one key/value head is every tensor-parallel rank's."""
    config = copy.deepcopy(config)
    config.optimizer = replace(config.optimizer, kind="muon", matrix_multiplier=10.0)
    config.model = replace(config.model, kv_heads=1, tied_embeddings=False)
    return config


# (tp, dp, zero, sequence_parallel): every stage, and every way in which both axes cut a matrix.
MUON_MESHES = {
    2: [(1, 2, 0, True), (1, 2, 1, True), (1, 2, 3, True), (2, 1, 0, True)],
    4: [(1, 4, 2, True), (2, 2, 0, False), (2, 2, 1, True), (2, 2, 3, True), (4, 1, 0, True)],
    8: [(1, 8, 3, True), (2, 4, 0, True), (2, 4, 1, False), (2, 4, 2, True), (2, 4, 3, True), (4, 2, 3, True)],
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_steps_of_muon_on_a_mesh_are_those_of_one_process(ranks: int, base: RunConfig) -> None:
    config, steps = with_muon(base), STEPS if ranks == 2 else 6

    def every_mesh() -> list[Any]:
        answers = []
        whole_matrices.SMALL = 0  # in this process, so that data-parallel ranks share the work out
        for config.parallel.tp, config.parallel.dp, config.parallel.zero, sequence in MUON_MESHES[ranks]:
            config.parallel.sequence_parallel = sequence
            answers.append(take_steps(config, build_mesh(config.parallel.dp, config.parallel.tp, CPU), steps))
        return answers

    losses, norms, weights = take_steps(config, Mesh(), steps)
    expected = losses, norms, whole([(losses, norms, weights)])
    assert ranks > 2 or losses[-1] < losses[0] - 0.3
    assert_same_steps(run_ranks(ranks, every_mesh, timeout=900.0), MUON_MESHES[ranks], expected)


def with_experts(config: RunConfig) -> RunConfig:
    """Every part of a mixture, and biases that move fast enough to decide choices within six steps."""
    config = copy.deepcopy(config)
    config.model = replace(
        config.model, depth=3, experts=8, experts_per_token=2, expert_hidden=8, shared_experts=1, dense_layers=1,
        balance_rate=0.1, balance_loss=0.05, router_z_loss=0.01,
    )  # fmt: skip
    config.optimizer = replace(config.optimizer, gradient_clip=0.0)  # its divisor is fp32
    return config


def with_latents(config: RunConfig) -> RunConfig:
    config = copy.deepcopy(config)
    config.model = replace(
        config.model, kv_heads=None, qk_norm=False, attention="mla", kv_rank=12, query_rank=10, rotary_size=4
    )
    return config


@over_ranks(4)
def test_six_steps_of_latent_attention_on_every_mesh_are_those_of_one_process(
    ranks: int, every: bool, base: RunConfig
) -> None:
    meshes = of_ranks(shapes, ranks, every, 4)

    def every_mesh() -> list[Any]:
        answers = []
        for tp, dp, zero, sequence in meshes:
            config = with_latents(base)
            config.parallel.tp, config.parallel.dp, config.parallel.zero = tp, dp, zero
            config.parallel.sequence_parallel = sequence
            answers.append(take_steps(config, build_mesh(dp, tp, CPU), 6))
        return answers

    losses, norms, weights = take_steps(with_latents(base), Mesh(), 6)
    expected = losses, norms, whole([(losses, norms, weights)])
    assert_same_steps(run_ranks(ranks, every_mesh, timeout=900.0), meshes, expected)


def expert_meshes(ranks: int) -> list[tuple[int, int, int, bool, int]]:
    """(tp, dp, zero, sequence_parallel, ep) of every legal mesh of so many ranks."""
    return [(*shape, ep) for shape in shapes(ranks) if shape[0] <= 2 for ep in (1, 2, 4) if shape[1] % ep == 0]


@pytest.mark.parametrize("exact", [True, False], ids=["float64", "fp32"])
@over_ranks(4, 8)
def test_six_steps_of_experts_on_every_mesh_are_those_of_one_process(
    ranks: int, every: bool, exact: bool, base: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where rounding decides no near tie of two experts; in fp32 every token goes through all."""
    if exact:
        monkeypatch.setitem(precision._DTYPES, "fp32", torch.float64)
    meshes, mixed = of_ranks(expert_meshes, ranks, every, 4, 8), with_experts(base)
    mixed.model.experts_per_token = 2 if exact else 8

    def every_mesh() -> list[Any]:
        answers = []
        for tp, dp, zero, sequence, ep in meshes:
            config = copy.deepcopy(mixed)
            config.parallel.tp, config.parallel.dp, config.parallel.zero, config.parallel.ep = tp, dp, zero, ep
            config.parallel.sequence_parallel = sequence
            config.parallel.micro_batch_size = 4 // dp if zero % 2 else None  # two
            answers.append(take_steps(config, build_mesh(dp, tp, CPU, ep), 6))
        return answers

    losses, norms, weights = take_steps(mixed, Mesh(), 6)
    expected = losses, norms, whole([(losses, norms, weights)])
    assert exact == any(name.endswith("balance") and values.any() for name, values in expected[2].items())
    assert_same_steps(run_ranks(ranks, every_mesh, timeout=900.0), meshes, expected, 1e-10 if exact else 1e-5)


@over_ranks(4)
def test_what_ranks_with_other_experts_save_is_their_state_on_one_process_and_on_every_mesh(
    ranks: int, every: bool, base: RunConfig, tmp_path: Path
) -> None:
    config = with_experts(base)

    def saved_by(ranks: int) -> list[tuple[int, int, int, bool, int]]:
        """Sequences are cut or not in the forward pass alone."""
        return [shape for shape in expert_meshes(ranks) if shape[3] and (shape[0] == 1 or shape[4] > 1)]

    meshes = of_ranks(saved_by, ranks, every, 4)

    def stepper_of(shape: tuple[int, int, int, bool, int]) -> Stepper:
        own = copy.deepcopy(config)
        own.parallel.tp, own.parallel.dp, own.parallel.zero, own.parallel.sequence_parallel, own.parallel.ep = shape
        mesh = build_mesh(own.parallel.dp, own.parallel.tp, CPU, own.parallel.ep)
        stepper = Stepper(own, mesh, CPU, TrainStream(prepare(config.data), config.data.sequence_length, config.seed))
        stepper.start()
        return stepper

    def state_of(stepper: Stepper) -> tuple[None, None, list[tuple[str, Any, Any, Any]]]:
        return None, None, boxes_of(stepper, ("weight", "exp_avg", "exp_avg_sq"))

    def save_all() -> list[Any]:
        found = []
        for number, shape in enumerate(meshes):
            stepper = stepper_of(shape)
            for step in range(2):
                stepper.step(step)
            saver = Saver(tmp_path / str(number), stepper.mesh, config, ByteTokenizer())
            saver.save(2, stepper.zero.held(), {})
            saver.close()
            found.append(state_of(stepper))
        return found

    def load_all() -> list[Any]:
        """What each mesh saved, by the next one."""
        found = []
        for number, shape in enumerate([*meshes[1:], meshes[0]]):
            stepper = stepper_of(shape)
            restore_state(tmp_path / str(number) / "step_2", stepper.zero.held(), config)
            found.append(state_of(stepper))
        return found

    saved = run_ranks(ranks, save_all, timeout=300.0)
    loaded = run_ranks(ranks, load_all, timeout=300.0)
    alone = Stepper(config, Mesh(), CPU, TrainStream(prepare(config.data), config.data.sequence_length, config.seed))
    for number, shape in enumerate(meshes):
        expected = whole([rank[number] for rank in saved])
        restore_state(tmp_path / str(number) / "step_2", alone.zero.held(), config)
        for found in (whole([rank[number] for rank in loaded]), whole([state_of(alone)])):
            assert found.keys() == expected.keys()
            for name, values in found.items():
                assert np.array_equal(values, expected[name]), f"{shape} {name}"


def assert_same_steps(
    by_rank: list[Any], meshes: Sequence[tuple[int, ...]], alone: tuple[list[float], list[float], Weights],
    tolerance: float = 1e-5,
) -> None:  # fmt: skip
    losses, norms, weights = alone
    for number, shape in enumerate(meshes):
        answers = [answer[number] for answer in by_rank]
        for theirs in answers:
            assert theirs[0] == answers[0][0]  # every rank knows the same loss, to the bit
            np.testing.assert_allclose(theirs[0], losses, rtol=tolerance, err_msg=str(shape))
            # Norms are sums of squares over another order of roundings.
            np.testing.assert_allclose(theirs[1], norms, rtol=10 * tolerance, err_msg=str(shape))
        for name, values in whole(answers).items():
            # Weights are of order 0.1 to 1.
            np.testing.assert_allclose(values, weights[name], atol=tolerance, err_msg=f"{shape} {name}")


def train_on_ranks(
    config: RunConfig, directory: Path, should_stop: Callable[[int], Callable[[], bool]] | None = None,
    wait: bool = True,
) -> list[Ended]:  # fmt: skip
    """The run as its launcher would start it: `world_size` processes that find each other by the environment."""
    directory.mkdir(exist_ok=True)
    attempt = os.urandom(4).hex()

    def rank(number: int, say: Callable[[str], None]) -> None:
        os.environ.update(
            SUBMITIT_EXECUTOR="local", SUBMITIT_LOCAL_JOB_ID=attempt,
            SUBMITIT_LOCAL_NTASKS=str(config.parallel.world_size), SUBMITIT_LOCAL_GLOBALID=str(number),
            SUBMITIT_LOCAL_LOCALID=str(number),
        )  # fmt: skip
        try:
            stop = (lambda: False) if should_stop is None else should_stop(number)
            loop.train(config, directory, should_stop=stop, report=say)
            say("done")
        except Exception as error:
            say(f"{type(error).__name__}: {error}")

    return fork_processes(config.parallel.world_size, rank, range(config.parallel.world_size), timeout=100.0)


def test_a_whole_run_on_four_ranks_writes_what_one_process_writes(config: RunConfig, tmp_path: Path) -> None:
    reference = loop.train(config, tmp_path / "one", report=lambda line: None)
    config.parallel.tp, config.parallel.dp, config.parallel.zero = 2, 2, 3
    ended = train_on_ranks(config, tmp_path / "four")
    assert [end.said[-1] for end in ended] == ["done"] * 4, ended
    lines = read_json_lines(tmp_path / "four" / "metrics.jsonl")
    expected = read_json_lines(tmp_path / "one" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for ours, theirs in zip(lines, expected, strict=True):
        assert set(ours) == set(theirs)
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
        assert ours.get("val_loss", 0.0) == pytest.approx(theirs.get("val_loss", 0.0), rel=1e-5)
    summary = json.loads((tmp_path / "four" / "summary.json").read_text())
    assert set(summary) == set(reference)
    assert (summary["ranks"], reference["ranks"]) == (4, 1)
    for name in ("val_loss", "val_bpb"):
        assert summary[name] == pytest.approx(reference[name], rel=1e-5)
    assert summary["val_loss_se"] == pytest.approx(reference["val_loss_se"], rel=1e-4)  # a difference of losses
    ours, theirs = (load_for_evaluation(tmp_path / name).model for name in ("four", "one"))
    for (name, value), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-5, msg=name)


def stop_at(step: int, rank: int) -> Callable[[int], Callable[[], bool]]:
    """One rank of all is told to stop, after its `step`-th step."""

    def of_rank(number: int) -> Callable[[], bool]:
        asked = 0

        def should_stop() -> bool:
            nonlocal asked
            asked += 1
            return number == rank and asked == step

        return should_stop

    return of_rank


MOVES = [((2, 2, 3), (1, 1, 0)), ((1, 1, 0), (1, 2, 2)), ((1, 4, 1), (2, 1, 0)), ((4, 1, 0), (1, 4, 3))]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "kind"), [*((*move, "adamw") for move in MOVES), (*MOVES[0], "muon"),
                                                       (*MOVES[2], "muon")])  # fmt: skip
def test_a_run_moved_to_another_mesh_goes_on_as_if_never_moved(
    before: tuple[int, int, int], after: tuple[int, int, int], kind: str, config: RunConfig, tmp_path: Path
) -> None:
    config = with_muon(config) if kind == "muon" else config
    reference = loop.train(config, tmp_path / "one", report=lambda line: None)
    stopped = copy.deepcopy(config)
    stopped.parallel.tp, stopped.parallel.dp, stopped.parallel.zero = before
    last = stopped.parallel.world_size - 1
    ended = train_on_ranks(stopped, tmp_path / "moved", should_stop=stop_at(8, rank=last))
    # Flags are agreed on at the next step, by all ranks; one process agrees with itself at once.
    at = 8 if last == 0 else 9
    assert {end.said[-1] for end in ended} == {f"Stopped: stopped at step {at} of {STEPS}"}, ended
    config.parallel.tp, config.parallel.dp, config.parallel.zero = after
    ended = train_on_ranks(config, tmp_path / "moved")
    assert [end.said[-1] for end in ended] == ["done"] * config.parallel.world_size, ended
    assert any(f"resumed from step_{at} of {STEPS} steps" in line for line in ended[0].said)
    lines = read_json_lines(tmp_path / "moved" / "metrics.jsonl")
    expected = read_json_lines(tmp_path / "one" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for ours, theirs in zip(lines, expected, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
    summary = json.loads((tmp_path / "moved" / "summary.json").read_text())
    assert summary["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_run_resumed_on_its_own_mesh_is_the_undisturbed_one_to_the_bit(
    kind: str, config: RunConfig, tmp_path: Path
) -> None:
    config = with_muon(config) if kind == "muon" else config
    config.parallel.tp, config.parallel.dp, config.parallel.zero = 2, 2, 2
    train_on_ranks(config, tmp_path / "undisturbed")
    train_on_ranks(config, tmp_path / "stopped", should_stop=stop_at(5, rank=1))
    train_on_ranks(config, tmp_path / "stopped")
    ours, theirs = (load_for_evaluation(tmp_path / name).model for name in ("stopped", "undisturbed"))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    losses = [[line["train_loss"] for line in read_json_lines(tmp_path / name / "metrics.jsonl")]
              for name in ("stopped", "undisturbed")]  # fmt: skip
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_on_ranks_follows_one_process(precision: str, config: RunConfig, tmp_path: Path) -> None:
    config.precision = precision
    one = loop.train(config, tmp_path / "one", report=lambda line: None)
    config.parallel.dp, config.parallel.zero, config.parallel.recompute = 2, 3, "selective"
    train_on_ranks(config, tmp_path / "two")
    two = json.loads((tmp_path / "two" / "summary.json").read_text())
    # bf16 has 8 bits, and the ranks round halves of the batch's gradient on their own.
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=5e-3)
    assert two["val_loss"] < 5.3  # from ln 256 = 5.55 and above


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_with_its_name_and_the_run_goes_on(
    config: RunConfig, tmp_path: Path
) -> None:
    config.parallel.dp, config.parallel.zero, config.checkpoint.every_steps = 2, 1, 4
    reference = loop.train(config_alone(config), tmp_path / "one", report=lambda line: None)

    def killed(number: int) -> Callable[[], bool]:
        calls = 0

        def should_stop() -> bool:
            nonlocal calls
            calls += 1
            if number == 1 and calls == 11:
                os.kill(os.getpid(), 9)
            return False

        return should_stop

    ended = train_on_ranks(config, tmp_path / "run", should_stop=killed)
    assert ended[1].code == -9
    failure = read_failure(tmp_path / "run")
    assert failure is not None
    assert (failure.cause, failure.rank) == ("killed", 1)
    assert failure.step in (10, 11)  # by when it last said where it was
    assert f"rank 1 on {failure.host} died at step {failure.step}" in failure.reason
    ended = train_on_ranks(config, tmp_path / "run")
    assert [end.said[-1] for end in ended] == ["done", "done"], ended
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)
    assert not (tmp_path / "run" / "failure.json").exists()


def config_alone(config: RunConfig) -> RunConfig:
    config = copy.deepcopy(config)
    config.parallel.tp = config.parallel.dp = 1
    config.parallel.zero = 0
    return config


@pytest.mark.slow
def test_ranks_with_other_configs_are_refused_on_every_rank(config: RunConfig, tmp_path: Path) -> None:
    config.parallel.dp = 2

    def rank_config(number: int) -> RunConfig:
        other = copy.deepcopy(config)
        other.optimizer.learning_rate *= 1 + number
        return other

    tmp_path.mkdir(exist_ok=True)

    def rank(number: int, say: Callable[[str], None]) -> None:
        os.environ.update(
            SUBMITIT_EXECUTOR="local", SUBMITIT_LOCAL_JOB_ID="1", SUBMITIT_LOCAL_NTASKS="2",
            SUBMITIT_LOCAL_GLOBALID=str(number), SUBMITIT_LOCAL_LOCALID=str(number),
        )  # fmt: skip
        try:
            loop.train(rank_config(number), tmp_path, report=say)
        except Exception as error:
            say(f"{type(error).__name__}: {error}")

    ended = fork_processes(2, rank, range(2), timeout=60.0)
    for end in ended:
        assert end.said[-1].startswith("UserError: optimizer.learning_rate is 0.002 on rank 1")


def test_a_run_that_wants_more_ranks_than_there_are_is_refused(config: RunConfig, tmp_path: Path) -> None:
    config.parallel.dp = 4
    with pytest.raises(loop.UserError, match=r"parallel\.tp 1 \* parallel\.dp 4 is 4 and the job has 1 rank"):
        loop.train(config, tmp_path, report=lambda line: None)


def test_memory_that_runs_out_halves_the_micro_batch_once_and_the_run_goes_on(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = loop.train(config, tmp_path / "one", report=lambda line: None)
    real = Stepper._rows

    def rows(self: Stepper, step: int, start: int) -> torch.Tensor:
        if step == 3 and self.micro > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return real(self, step, start)

    monkeypatch.setattr(Stepper, "_rows", rows)
    said: list[str] = []
    summary = loop.train(config, tmp_path / "halved", report=said.append)
    assert summary["micro_batch_size"] == 4
    assert said == [
        "out of memory at step 3 with parallel.micro_batch_size 8; it is 4 from here on, and the batch stays 8"
    ]
    assert summary["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)
    assert json.loads((tmp_path / "halved" / "micro_batch.json").read_text())["micro_batch_size"] == 4

    def never(self: Stepper, step: int, start: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    monkeypatch.setattr(Stepper, "_rows", never)
    with pytest.raises(OutOfMemory, match=r"out of memory at step 0 with parallel\.micro_batch_size 4"):
        loop.train(config, tmp_path / "hopeless", report=said.append)


@pytest.mark.slow
def test_a_rank_whose_memory_runs_out_ends_all_and_the_next_start_takes_the_smaller_micro_batch(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.parallel.dp, config.parallel.zero = 2, 3
    real = Stepper._rows

    def rows(self: Stepper, step: int, start: int) -> torch.Tensor:
        if step == 3 and self.mesh.rank == 1 and self.micro > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return real(self, step, start)

    monkeypatch.setattr(Stepper, "_rows", rows)
    ended = train_on_ranks(config, tmp_path / "run")
    assert (
        ended[1].said[-1].startswith("OutOfMemory: out of memory at step 3 with parallel.micro_batch_size 4; it is 2")
    )
    assert "rank 1" in ended[0].said[-1]
    assert "out of memory at step 3" in ended[0].said[-1]
    ended = train_on_ranks(config, tmp_path / "run")
    assert [end.said[-1] for end in ended] == ["done", "done"], ended
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["micro_batch_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [1, 0])
def test_a_batch_that_is_no_number_on_one_rank_is_skipped_or_ends_the_run_on_all(
    allowed: int, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.parallel.dp, config.parallel.zero, config.skip_bad_steps = 2, 2, allowed
    real = Stepper._gradients

    def gradients(self: Stepper, step: int) -> torch.Tensor:
        total = real(self, step)
        return total * float("nan") if step == 4 and self.mesh.rank == 1 else total

    monkeypatch.setattr(Stepper, "_gradients", gradients)
    ended = train_on_ranks(config, tmp_path / "run")
    if not allowed:
        assert [end.said[-1] for end in ended] == ["Diverged: the loss is nan at step 5"] * 2, ended
        return
    assert [end.said[-1] for end in ended] == ["done", "done"], ended
    assert "step 5 made no update: the loss is nan" in ended[0].said
    lines = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["train_loss"] is None] == [5]
    assert lines[-1]["bad_steps"] == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["bad_steps"] == 1
    state = json.loads((tmp_path / "run" / "checkpoints" / f"step_{STEPS}" / "trainer.json").read_text())
    assert state["updates"] == STEPS - 1


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("zero", [0, 3])
def test_one_rank_under_torchrun_takes_the_way_of_many_and_ends_like_one_process(
    device: str, zero: int, config: RunConfig, tmp_path: Path
) -> None:
    config.parallel.device, config.parallel.zero = device, zero
    reference = loop.train(config, tmp_path / "one", report=lambda line: None)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    script = tmp_path / "train_it.py"
    script.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "from isoflop.train.config import RunConfig, from_dict\n"
        "from isoflop.train.loop import train\n"
        "folder = Path(sys.argv[1])\n"
        "train(from_dict(RunConfig, json.loads((folder / 'config.json').read_text())), folder / 'ranks')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    subprocess.run([*command, str(tmp_path)], check=True, timeout=120, capture_output=True)
    summary = json.loads((tmp_path / "ranks" / "summary.json").read_text())
    # The cross-entropy of a split vocabulary adds in another order, also where there is one part.
    assert summary["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-6)
    ours, theirs = (load_for_evaluation(tmp_path / name).model for name in ("ranks", "one"))
    for value, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-5)
