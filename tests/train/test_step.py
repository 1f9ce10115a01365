"""A step waits for no value of the device, and reads the rows that are its own."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig
from isoflop.train.data.loader import TrainStream
from isoflop.train.data.prefetch import RING, Lane, Prefetch, Slot
from isoflop.train.data.shards import prepare
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.parallel.zero import StepResult
from isoflop.train.precision import compute_dtype
from isoflop.train.stepper import Stepper
from torch import Tensor
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
ROWS, LENGTH, STEPS = 4, 16, 9


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    lines = [" ".join(generator.choice(["tensor", "loss", "of", "the"]) for _ in range(40)) for _ in range(100)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return RunConfig(
        model=ModelConfig(width=16, depth=2, heads=2, vocab_size=256),
        data=DataConfig(
            corpus="text", path=str(folder / "text.jsonl"), sequence_length=LENGTH, cache_dir=str(folder / "cache")
        ),
        optimizer=OptimizerConfig(batch_size=ROWS, gradient_clip=0.5),
        schedule=ScheduleConfig(warmup_tokens=256, warmup_max_share=0.5),
        parallel=ParallelConfig(device="cpu"),
        tokens=STEPS * ROWS * LENGTH,
    )


@pytest.fixture
def config(base: RunConfig) -> RunConfig:
    return copy.deepcopy(base)


def build(config: RunConfig, device: torch.device = CPU, report: Callable[[str], None] = print) -> Stepper:
    stream = TrainStream(prepare(config.data), LENGTH, config.seed)
    stepper = Stepper(config, Mesh(), device, stream, report)
    stepper.start()
    return stepper


def take(stepper: Stepper) -> list[StepResult]:
    return [stepper.step(step) for step in range(STEPS)]


def assert_same(ours: tuple[Stepper, list[StepResult]], theirs: tuple[Stepper, list[StepResult]]) -> None:
    """Bit for bit: what every step gave, and all that training goes on from."""
    for a, b in zip(ours[1], theirs[1], strict=True):
        for name in ("loss", "norm", "skipped"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert ours[0].state() == theirs[0].state()
    for mine, other in zip(ours[0].zero.held(), theirs[0].zero.held(), strict=True):
        assert torch.equal(mine.values, other.values), (mine.name, mine.kind)


class Waits(TorchDispatchMode):
    """Names the operations after which the host must know a value of the device."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "is_nonzero", "pin_memory")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else [])
        )
        if name in self.FORBIDDEN or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_waits_for_no_value(precision: str, documents: bool, config: RunConfig) -> None:
    config.precision, config.parallel.micro_batch_size, config.optimizer.z_loss = precision, 2, 1e-4
    config.data.separate_documents = documents
    stepper = build(config)
    with Waits() as waits:
        result = stepper.step(0)
        assert not waits.found
        result.loss.item()
    assert waits.found == ["_local_scalar_dense"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learning_rate_on_the_device_gives_the_bits_of_a_number(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, gradient, first, second = (torch.randn(3001, generator=generator).to(dtype) for _ in range(4))
    second.abs_()
    found, divisor, peak, factor = torch.tensor(0.0), torch.tensor(1.7), 0.0123456789, 0.7331
    theirs = [x.clone() for x in (weight, gradient, first, second)]
    adamw(
        *([x] for x in theirs), [], [torch.tensor(3.0)], fused=True, grad_scale=divisor, found_inf=found,
        amsgrad=False, maximize=False, beta1=0.9, beta2=0.95, eps=1e-8, lr=peak * factor, weight_decay=0.1,
    )  # fmt: skip
    rate = torch.mul(torch.tensor([peak], dtype=torch.float64), factor)
    torch._fused_adamw_(
        [weight], [gradient], [first], [second], [], [torch.tensor(4.0)], lr=rate[0], beta1=0.9, beta2=0.95,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False, grad_scale=divisor, found_inf=found,
    )  # fmt: skip
    for ours, other in zip((weight, first, second), (theirs[0], theirs[2], theirs[3]), strict=True):
        assert torch.equal(ours, other)


class SlowLane(Lane):
    """A device whose copies are made when somebody waits for them, and not before; it refuses what would race."""

    def __init__(self) -> None:
        self.under_way: list[Slot] = []
        self.being_read: list[Slot] = []

    def slot(self, shape: tuple[int, int]) -> Slot:
        return Slot(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))

    def start(self, slot: Slot) -> None:
        assert not any(other is slot for other in self.being_read), "rows are written to while a step reads them"
        self.under_way.append(slot)

    def arrive(self, slot: Slot) -> None:
        self.pages_free(slot)
        self.being_read.append(slot)

    def leave(self, slot: Slot) -> None:
        self.being_read = [other for other in self.being_read if other is not slot]

    def pages_free(self, slot: Slot) -> None:
        for other in [other for other in self.under_way if other is slot]:
            other.rows.copy_(other.pages)
        self.under_way = [other for other in self.under_way if other is not slot]


def rows_of(step: int) -> np.ndarray:
    return np.full((ROWS, LENGTH + 1), step, np.int64) + np.arange(ROWS)[:, None]


def test_rows_are_those_of_their_step_whatever_is_asked_for_in_between() -> None:
    gathered: list[int] = []

    def gather(step: int) -> np.ndarray:
        gathered.append(step)
        return rows_of(step)

    lane = SlowLane()
    prefetch = Prefetch(gather, (ROWS, LENGTH + 1), CPU, lane)
    # In order, taken twice (memory ran out), resumed elsewhere, back again, and far ahead.
    for step in [0, 1, 2, 2, 3, 4, 4, 5, 40, 41, 7, 8, 0, 1, 100]:
        assert np.array_equal(prefetch.take(step).numpy(), rows_of(step))
        assert np.array_equal(prefetch.take(step).numpy(), rows_of(step))
        prefetch.ahead(step + 1)
        assert len(lane.under_way) <= RING
        assert not lane.being_read
    straight = Prefetch(gather, (ROWS, LENGTH + 1), CPU, SlowLane())
    gathered.clear()
    for step in range(10):
        straight.take(step)
        straight.ahead(step + 1)
    assert gathered == list(range(11))  # each once, one ahead


def test_a_run_that_prefetches_is_the_run_that_does_not(config: RunConfig) -> None:
    plain, ours = build(config), build(config)
    ours.prefetch = Prefetch(ours.prefetch.gather, (ROWS, LENGTH + 1), CPU, SlowLane())
    assert_same((ours, take(ours)), (plain, take(plain)))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_blocks_replayed_as_cuda_graphs_give_the_plain_step(precision: str, config: RunConfig) -> None:
    config.precision, config.parallel.device, config.parallel.micro_batch_size = precision, "cuda", 2
    device, runs = torch.device("cuda"), []
    for graphs in (False, True):
        config.parallel.cuda_graphs = graphs
        stepper = build(config, device)
        assert (stepper.compiled is not None) == graphs
        assert stepper.dtype == compute_dtype(precision)
        runs.append((stepper, take(stepper)))
    for ours, plain in zip(runs[1][1], runs[0][1], strict=True):
        # The look-up's derivative adds with atomics, in an order of its own.
        torch.testing.assert_close(ours.loss, plain.loss, rtol=1e-3 if precision != "fp32" else 1e-5, atol=0)


@pytest.mark.gpu
def test_no_step_on_a_gpu_synchronizes(config: RunConfig, tmp_path: Path) -> None:
    config.parallel.device, config.parallel.cuda_graphs = "cuda", False
    stepper = build(config, torch.device("cuda"))
    for step in range(3):
        stepper.step(step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, STEPS):
            stepper.step(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
