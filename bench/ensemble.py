"""Runs of one shape trained together beside the same one after the other: `isoflop bench ensemble`.

Both sides are ours: a step of `StackedStepper`, which all members take at once, and as many steps of `Stepper`. One run
alone has the caches to itself, so one stands for all. Each row tells how far the losses of a member are from the same
run's alone, over its first steps, in nats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..sweeps.grid import architectures
from ..sweeps.terminal import short
from ..train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrackerConfig
from ..train.data.loader import TrainStream
from ..train.data.shards import Shards
from ..train.ensemble.stacked import StackedStepper
from ..train.flops import count_parameters, training_flops_per_token
from ..train.parallel.mesh import Mesh
from ..train.stepper import Stepper
from .contenders import (
    EXACT,
    Contender,
    Peak,
    Row,
    contract_row,
    counted,
    measuring_on,
    take_turns,
    with_mfu,
)
from .tokens import random_shards

ABOUT = EXACT
COMPARED = 8  # first steps whose losses are compared


@dataclass(frozen=True)
class Case:
    """Wanted parameters of a member, members, context, sequences of a member's batch."""

    parameters: float
    members: int
    length: int
    rows: int = 8
    vocabulary: int = 256

    def configs(self, device: torch.device) -> list[RunConfig]:
        """Of the shape that a sweep gives that size, in bf16 and compiled on a GPU."""
        gpu = device.type == "cuda"
        model = architectures.nearest_model(ModelConfig(vocab_size=self.vocabulary), self.parameters)
        first = RunConfig(
            model=model,
            data=DataConfig(sequence_length=self.length),
            optimizer=OptimizerConfig(batch_size=self.rows),
            parallel=ParallelConfig(device=device.type, compile=gpu),
            tracker=TrackerConfig(kind="none"),
            tokens=10**10,
            precision="bf16" if gpu else "fp32",
        )
        rates = [first.optimizer.learning_rate * 2.0 ** (seed % 3 - 1) for seed in range(self.members)]
        return [
            replace(first, seed=seed, optimizer=replace(first.optimizer, learning_rate=rate))
            for seed, rate in enumerate(rates)
        ]


CPU_CASES = (Case(1e5, 8, 128), Case(1e5, 4, 128), Case(2e4, 8, 128))
GPU_CASES = (Case(1e7, 8, 1024), Case(3e7, 8, 1024), Case(1e7, 8, 1024, vocabulary=50304))


def bench_ensemble(device: str = "auto", rounds: int = 15, steps: int = 4, cases: Sequence[Case] = ()) -> Iterator[Row]:
    """Tokens/s of ensembles and of their members one after the other."""
    with measuring_on(device) as place:
        for case in cases or (GPU_CASES if place.type == "cuda" else CPU_CASES):
            yield _bench(case, place, rounds, steps)


def _bench(case: Case, device: torch.device, rounds: int, steps: int) -> Row:
    configs = case.configs(device)
    shards = random_shards(case.vocabulary, 64 * case.rows * case.length)
    # Every run alone is compiled anew on a GPU, and takes longer to than all that is measured: there one is compared.
    difference = _apart(configs, shards, device, alone=configs if device.type == "cpu" else configs[:1])
    together = ensemble_of(configs, shards, device)
    step = counted(run_alone(configs[0], shards, device).step)
    ours = Contender("together", counted(lambda n: together.step([n] * len(configs))))
    peer = Contender("alone", lambda: [step() for _ in configs])
    peak = Peak(device, together.dtype)
    take_turns([ours, peer], rounds, steps, device, peak.measure)
    config = configs[0]
    size = short(count_parameters(config.model).N_total)
    row = contract_row(
        f"ensemble {config.precision}, {case.members} models of {size} parameters (width {config.model.width}, "
        f"depth {config.model.depth}), V={case.vocabulary}, T={case.length}, B={case.rows} each",
        config.batch_tokens * len(configs),
        "tokens/s",
        ours.seconds,
        peer.seconds,
        f"Stepper, one run after the other{', compiled' if config.parallel.compile else ''}",
        device,
    )
    flops = training_flops_per_token(config.model, case.length)
    return with_mfu(row, flops, peak) | {"difference": difference}


def ensemble_of(configs: Sequence[RunConfig], shards: Shards, device: torch.device) -> StackedStepper:
    """At their first step."""
    together = StackedStepper(configs, device, shards, report=lambda line: None)
    for member in together.members:
        member.start()
    return together


def run_alone(config: RunConfig, shards: Shards, device: torch.device) -> Stepper:
    """At its first step."""
    stream = TrainStream(shards, config.data.sequence_length, config.seed)
    stepper = Stepper(config, Mesh(), device, stream, report=lambda line: None)
    stepper.start()
    return stepper


def _apart(configs: Sequence[RunConfig], shards: Shards, device: torch.device, alone: Sequence[RunConfig]) -> float:
    """The largest difference of a loss between the ensemble and the first runs `alone`."""
    together = ensemble_of(configs, shards, device)
    ours = [[result.loss.item() for result in together.step([n] * len(configs))] for n in range(COMPARED)]
    worst = 0.0
    for index, config in enumerate(alone):
        stepper = run_alone(config, shards, device)
        theirs = [stepper.step(n).loss.item() for n in range(COMPARED)]
        worst = max(worst, *(abs(mine[index] - other) for mine, other in zip(ours, theirs, strict=True)))
    return worst
