"""fp16 survives overflows by its loss scale, bf16 trains as fp32 does, and bad batches are skipped while allowed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from isoflop.train import precision
from isoflop.train.config import ModelConfig, OptimizerConfig, RunConfig
from isoflop.train.errors import Diverged
from isoflop.train.job.progress import RunProgress
from isoflop.train.parallel.zero import StepResult
from isoflop.train.precision import LossScaler, compute_dtype, set_matmul_precision
from torch import Tensor
from zero_buffers import engine

CPU = torch.device("cpu")
TIME = 8
NAN, INFINITY = float("nan"), float("inf")


class Run:
    """A tiny model trained on one process, as the trainer does it."""

    def __init__(self, name: str) -> None:
        config = ModelConfig(width=32, depth=2, heads=2, vocab_size=50, tied_embeddings=False)
        self.gpt, self.zero = engine(config, OptimizerConfig(learning_rate=3e-3, batch_size=8), compute_dtype(name))
        self.scaler = LossScaler(name, CPU)

    def step(self, number: int) -> StepResult:
        """Take one step on a new batch of sequences that count upwards by 1 to 3, which can be learnt."""
        generator = torch.Generator().manual_seed(number)
        start, by = torch.randint(50, (8, 1), generator=generator), torch.randint(1, 4, (8, 1), generator=generator)
        rows = (start + by * torch.arange(TIME + 1)) % 50
        with self.zero.gradients.micro_batch(last=True):
            loss = self.gpt.loss(rows[:, :-1], rows[:, 1:])
            self.scaler.scaled(loss).backward()
        self.zero.set_rates(1.0)
        result = self.zero.step(loss.detach(), self.scaler.scale)
        self.scaler.update(result.skipped)
        return result

    def weights(self) -> list[Tensor]:
        return [held.values.clone() for held in self.zero.held()]


def test_every_precision_computes_in_its_own_type() -> None:
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        run = Run(name)
        assert compute_dtype(name) == dtype
        seen = []
        hook = run.gpt.blocks[1].register_forward_pre_hook(
            lambda module, inputs, seen=seen: seen.append(inputs[0].dtype)
        )
        result = run.step(0)
        hook.remove()
        assert seen == [dtype]  # the residual stream
        assert {p.dtype for p in run.gpt.parameters()} == {dtype}
        assert result.loss.dtype == run.gpt.cos.dtype == torch.float32


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_thirty_steps_stay_near_those_of_fp32(name: str) -> None:
    exact, low = Run("fp32"), Run(name)
    losses = [[float(run.step(i).loss) for i in range(30)] for run in (exact, low)]
    assert losses[0][-1] < losses[0][0] - 2
    gaps = [abs(a - b) for a, b in zip(*losses, strict=True)]
    # In nats, of more than 2 learnt: a few relative roundings of bf16 (2^-9) and of fp16 (2^-12).
    assert max(gaps) < (0.02 if name == "bf16" else 0.005)
    assert all(held.values.dtype == torch.float32 for held in low.zero.held())


def test_an_overflow_in_fp16_is_skipped_and_halves_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "GROWTH_STEPS", 4)
    run = Run("fp16")
    run.step(0)  # the head starts at zero, so the first gradients are small
    run.scaler.load_state({"scale": precision.LARGEST_SCALE, "good_steps": 0})
    before, skips = run.weights(), []
    expected, tracker = torch.tensor(precision.LARGEST_SCALE), torch.tensor(0, dtype=torch.int32)
    for i in range(1, 30):
        result = run.step(i)
        assert result.loss.isfinite()
        skips.append(bool(result.skipped))
        torch._amp_update_scale_(expected, tracker, result.skipped, 2.0, 0.5, 4)  # PyTorch's own rule
        assert torch.equal(run.scaler.scale, expected)
        if len(skips) == 1:
            assert all(torch.equal(a, b) for a, b in zip(before, run.weights(), strict=True))
    assert skips[:2] == [True, True]
    assert skips.count(False) > 20
    assert float(run.step(30).loss) < 3.5  # ln 50 is 3.9


@pytest.mark.parametrize("seed", range(3))
def test_the_scale_follows_pytorchs_own_rule_within_its_bounds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "GROWTH_STEPS", 6)
    scaler, generator = LossScaler("fp16", CPU), random.Random(seed)
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    skip_share = generator.choice([0.05, 0.2, 0.6])  # the first climbs to the ceiling, the last sinks to the floor
    reached = set()
    for _ in range(600):
        skipped = float(generator.random() < skip_share)
        torch._amp_update_scale_(scale, tracker, torch.tensor(skipped), 2.0, 0.5, 6)
        scale.clamp_(1.0, 2.0**24)
        scaler.update(torch.tensor(skipped))
        assert scaler.state() == {"scale": scale.item(), "good_steps": tracker.item()}
        reached.add(scale.item())
    assert len(reached) > 3


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_other_precisions_have_no_scale(name: str) -> None:
    scaler, loss = LossScaler(name, CPU), torch.ones(())
    assert scaler.scale is None
    assert scaler.scaled(loss) is loss
    scaler.update(torch.ones(()))
    scaler.load_state(scaler.state())
    assert scaler.state() == {}


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.usefixtures("restored")
def test_tf32_is_switched_for_gpus_alone_and_where_every_reader_looks() -> None:
    cpu = torch.backends.mkldnn.matmul.fp32_precision
    for tf32 in (True, False, True):
        set_matmul_precision(tf32)
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if tf32 else "ieee")
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")  # the compiler asks for this one
        assert torch.backends.mkldnn.matmul.fp32_precision == cpu


def run_config(bad_steps: int, precision: str) -> RunConfig:
    return RunConfig(skip_bad_steps=bad_steps, precision=precision)


def test_without_a_budget_the_first_loss_that_is_no_number_ends_the_run() -> None:
    progress = RunProgress()
    with pytest.raises(Diverged, match="nan at step 2"):
        progress.judge(1, [(2.0, False), (NAN, True), (1.0, False)], run_config(0, "fp16"))
    assert progress.smoothed_loss == 2.0


def test_bad_batches_are_skipped_as_often_as_allowed_and_across_looks() -> None:
    progress, config = RunProgress(), run_config(2, "bf16")
    (message,) = progress.judge(1, [(2.0, False), (INFINITY, True), (2.0, False)], config)
    assert "step 2" in message
    assert len(progress.judge(4, [(1.8, True)], config)) == 1
    assert progress.smoothed_loss == 2.0
    progress = RunProgress(bad_steps=progress.bad_steps, overflows=progress.overflows)  # as after a resume
    with pytest.raises(Diverged, match="at step 6, and skip_bad_steps allows only 2"):
        progress.judge(5, [(1.7, False), (NAN, True)], config)


def test_overflows_in_fp16_are_free_until_the_scale_is_at_its_floor() -> None:
    progress, config, overflow = RunProgress(), run_config(0, "fp16"), (2.0, True)
    assert len(progress.judge(1, [overflow] * 24, config)) == 24
    progress.judge(25, [(2.0, False), *[overflow] * 24], config)  # one good step resets the count
    with pytest.raises(Diverged, match="at step 50, 25 times in a row"):
        progress.judge(50, [overflow], config)


def test_so_many_overflows_as_end_a_run_have_taken_any_scale_to_its_floor() -> None:
    scaler = LossScaler("fp16", CPU)
    scaler.load_state({"scale": precision.LARGEST_SCALE, "good_steps": 0})
    for _ in range(precision.MOST_OVERFLOWS - 1):
        assert scaler.state()["scale"] > precision.SMALLEST_SCALE
        scaler.update(torch.ones(()))
    assert scaler.state()["scale"] == precision.SMALLEST_SCALE  # and the last of them happened there
