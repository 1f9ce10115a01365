"""Our training step beside transformers' LlamaForCausalLM, same shapes: `isoflop bench train`.

Ours is all of `Stepper.step`: reading the batch, forward, backward, clipping, AdamW. The peer gets its batch for free,
SDPA, torch's fused AdamW, and its faster way to compute in bf16. On a CPU both run a model of 1.06M parameters, in
turn; on a GPU compiled dense GPTs of 124M to 1.3B in bf16, one side after the other, each in all of the memory and with
the largest micro-batch that fits.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..sweeps.terminal import short
from ..train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrackerConfig
from ..train.data.loader import TrainStream
from ..train.data.shards import prepare
from ..train.errors import UserError
from ..train.flops import count_parameters, training_flops_per_token
from ..train.parallel.mesh import Mesh
from ..train.stepper import OutOfMemory, Stepper
from .contenders import (
    EXACT,
    Contender,
    Peak,
    Row,
    Step,
    contract_row,
    counted,
    fastest,
    measuring_on,
    require,
    take_turns,
    with_mfu,
)
from .llama import LlamaStep
from .tokens import random_shards

ABOUT = EXACT
# The 1.06M-parameter byte GPT of the project's figures.
WIDTH, DEPTH, HEADS, LENGTH, BATCH = 128, 5, 4, 256, 16
WAYS = {"pure bf16": torch.bfloat16, "bf16 autocast": torch.float32}  # the peer's, and what it holds weights in


def bench_train(device: str = "auto", rounds: int = 15, steps: int = 4, compiled: bool = True) -> Iterator[Row]:
    """Tokens/s with MFU; `rounds` turns of `steps` steps; on a CPU ours also `compiled`, the peer eager."""
    with measuring_on(device) as place:
        require("transformers", "which is the benchmark's peer")
        if place.type == "cuda":
            yield from bench_sizes(Setting(place, rounds, steps))
            return
        with tempfile.TemporaryDirectory() as folder:
            for compile_ours in (False, True) if compiled else (False,):
                for precision in ("fp32", "bf16"):
                    yield _on_cpu(precision, Path(folder), rounds, steps, compile_ours)


def _on_cpu(precision: str, folder: Path, rounds: int, steps: int, compiled: bool) -> Row:
    cpu = torch.device("cpu")
    config = bench_config(precision, folder, compiled)
    ours = Contender("Stepper.step", counted(build_stepper(config, Mesh()).step))
    weights = torch.float32 if precision == "fp32" else torch.bfloat16
    batch = torch.randint(256, (BATCH, LENGTH + 1))
    peers = [Contender(f"eager, pure {precision}", LlamaStep(config, batch, weights))]
    if precision == "bf16":
        peers.append(Contender("eager, bf16 autocast", LlamaStep(config, batch, torch.float32)))
    peak = Peak(cpu, weights)
    take_turns([ours, *peers], rounds, steps, cpu, peak.measure)
    case = f"train {precision}{' compiled' if compiled else ''}, {size_and_batch(config)}"
    return train_row(case, config, ours, fastest(peers), peak)


def train_row(case: str, config: RunConfig, ours: Contender, peer: Contender, peak: Peak) -> Row:
    name = f"transformers LlamaForCausalLM, SDPA, fused AdamW, {peer.name}"
    row = contract_row(case, config.batch_tokens, "tokens/s", ours.seconds, peer.seconds, name, peak.device)
    return with_mfu(row, training_flops_per_token(config.model, config.data.sequence_length), peak)


def size_and_batch(config: RunConfig) -> str:
    """Of a case: the model's size, the context and the batch."""
    size = short(count_parameters(config.model).N_total)
    return f"{size} parameters, T={config.data.sequence_length}, B={config.optimizer.batch_size}"


def bench_config(precision: str, folder: Path, compiled: bool) -> RunConfig:
    """On a CPU: 1.06M parameters, and enough text for every step to read other windows."""
    text = folder / "text.jsonl"
    if not text.exists():
        # Which tokens they are changes no speed.
        text.write_text("".join(f'{{"text": "{str(i) * 400}"}}\n' for i in range(1000)))
    return RunConfig(
        model=ModelConfig(width=WIDTH, depth=DEPTH, heads=HEADS, vocab_size=256, tied_embeddings=False),
        data=DataConfig(corpus="text", path=str(text), sequence_length=LENGTH, cache_dir=str(folder / "cache")),
        optimizer=OptimizerConfig(batch_size=BATCH),
        parallel=ParallelConfig(device="cpu", compile=compiled),
        tracker=TrackerConfig(kind="none"),
        tokens=10**9,
        precision=precision,
    )


def build_stepper(config: RunConfig, mesh: Mesh) -> Stepper:
    """Our trainer on this rank of a CPU, at its first step."""
    stream = TrainStream(prepare(config.data), config.data.sequence_length, config.seed)
    stepper = Stepper(config, mesh, torch.device("cpu"), stream)
    stepper.start()
    return stepper


@dataclass(frozen=True)
class Size:
    """A dense GPT: widths and depths of GPT-2 and GPT-3, SwiGLU's inner width a multiple of 128."""

    name: str
    width: int
    depth: int
    heads: int
    hidden: int
    vocabulary: int = 50304
    length: int = 1024
    rows: int = 64  # sequences of a step

    def config(self, device: torch.device, micro: int, compiled: bool) -> RunConfig:
        """Our run of it, `micro` rows in a forward pass."""
        return RunConfig(
            model=ModelConfig(self.width, self.depth, self.heads, hidden=self.hidden, vocab_size=self.vocabulary),
            data=DataConfig(sequence_length=self.length),
            optimizer=OptimizerConfig(batch_size=self.rows),
            parallel=ParallelConfig(device=device.type, compile=compiled, micro_batch_size=micro),
            tracker=TrackerConfig(kind="none"),
            tokens=10**12,
            precision="bf16",
        )

    def bytes_of(self, micro: int) -> int:
        """A rough guess at what a step needs."""
        N = count_parameters(self.config(torch.device("cpu"), micro, compiled=False).model).N_total
        return 18 * N + micro * self.length * (32 * self.width * self.depth + 8 * self.vocabulary)


SIZES = (Size("124M", 768, 12, 12, 2048), Size("350M", 1024, 24, 16, 2816), Size("1.3B", 2048, 24, 16, 5504))


@dataclass(frozen=True)
class Setting:
    """How a size is measured."""

    device: torch.device
    rounds: int
    steps: int
    compiled: bool = True


def bench_sizes(setting: Setting, sizes: Sequence[Size] = SIZES, every_way: bool = True) -> Iterator[Row]:
    """A row per size; without `every_way` later sizes have only the first one's faster way: compiling takes long."""
    ways = list(WAYS)
    for size in sizes:
        row, faster = _bench_size(size, setting, ways)
        if not every_way:
            ways = [faster]
        yield row


def _bench_size(size: Size, setting: Setting, ways: Sequence[str]) -> tuple[Row, str]:
    """The row, and the peer's faster way."""
    stream = TrainStream(random_shards(size.vocabulary, 16 * size.rows * size.length), size.length, seed=0)
    peak = Peak(setting.device, torch.bfloat16)

    def our_step(config: RunConfig) -> Step:
        stepper = Stepper(config, Mesh(), setting.device, stream, report=lambda line: None)
        stepper.start()
        stepper.halved = True  # as if it had been before: what does not fit is to fail, and not to go on with less
        return counted(stepper.step)

    def peers_step(way: str, config: RunConfig) -> Step:
        batch = torch.from_numpy(stream.batch(0, size.rows)).to(setting.device)
        return LlamaStep(config, batch, WAYS[way], setting.compiled)

    ours, micro = _largest_that_fits(size, our_step, setting, peak)
    peers = {way: _largest_that_fits(size, partial(peers_step, way), setting, peak) for way in ways}
    faster = min(peers, key=lambda way: peers[way][0].median)
    peer, peers_micro = peers[faster]
    mode = "compiled" if setting.compiled else "eager"
    peer.name = f"{mode}, {faster}, micro-batch {peers_micro}"
    case = f"train bf16 {mode}, {size.name}, T={size.length}, V={size.vocabulary}, B={size.rows}, micro-batch {micro}"
    return train_row(case, size.config(setting.device, micro, setting.compiled), ours, peer, peak), faster


def _largest_that_fits(
    size: Size, build: Callable[[RunConfig], Step], setting: Setting, peak: Peak
) -> tuple[Contender, int]:
    """Measures what `build` makes with the largest micro-batch that fits; and which that is."""
    micro, gpu = size.rows, setting.device.type == "cuda"
    if gpu:  # all rows, halved until the guess fits: failing costs a compilation
        total = torch.cuda.get_device_properties(setting.device).total_memory
        while micro > 1 and size.bytes_of(micro) > total:
            micro //= 2
    while micro > 0:
        try:
            return _measured(build, size.config(setting.device, micro, setting.compiled), setting, peak), micro
        except (torch.OutOfMemoryError, OutOfMemory):
            micro //= 2
        finally:
            # Gives back what a contender held: compiled functions hold their models.
            torch.compiler.reset()
            gc.collect()
            if gpu:
                torch.cuda.empty_cache()
    raise UserError(f"{size.name} does not fit on this device, with one sequence of {size.length} tokens at a time")


def _measured(build: Callable[[RunConfig], Step], config: RunConfig, setting: Setting, peak: Peak) -> Contender:
    """Its seconds alone: what was measured would hold its memory."""
    contender = Contender("", build(config))
    take_turns([contender], setting.rounds, setting.steps, setting.device, peak.measure)
    return Contender("", lambda: None, contender.seconds)
