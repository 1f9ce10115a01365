"""Dense GPTs of 124M to 1.3B parameters on one GPU, ours beside a compiled Llama: a part of `isoflop bench train`.

Special here:
- both sides are compiled in bf16, the peer as a whole with its loss, and take a step of the same rows with the largest
  micro-batch that fits them;
- one side after the other, each in all of the memory: a GPU that nobody else uses does not drift as a shared CPU does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrackerConfig
from ..train.data.loader import TrainStream
from ..train.errors import UserError
from ..train.flops import count_parameters
from ..train.parallel.mesh import Mesh
from ..train.stepper import OutOfMemory, Stepper
from .contenders import Contender, Peak, Row, Step, take_turns
from .llama import LlamaStep
from .tokens import random_shards
from .train import counted, train_row

WAYS = {"pure bf16": torch.bfloat16, "bf16 autocast": torch.float32}  # the peer's, and what it holds weights in


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
        """A rough guess at what a step needs.

        18 bytes a parameter, 16 vectors of the width a token and block, and the logits four times over.
        """
        N = count_parameters(self.config(torch.device("cpu"), micro, compiled=False).model).N_total
        return 18 * N + micro * self.length * (32 * self.width * self.depth + 8 * self.vocabulary)


SIZES = (Size("124M", 768, 12, 12, 2048), Size("350M", 1024, 24, 16, 2816), Size("1.3B", 2048, 24, 16, 5504))


@dataclass(frozen=True)
class Setting:
    """How a size is measured: where, how often, and whether both sides are compiled."""

    device: torch.device
    rounds: int
    steps: int
    compiled: bool = True


def bench_sizes(setting: Setting, sizes: Sequence[Size] = SIZES, every_way: bool = True) -> Iterator[Row]:
    """A row a size.

    Args:
        setting: how each is measured.
        sizes: what is measured.
        every_way: both of the peer's ways for every size; else of the later ones only the first one's faster way, for
            compiling takes most of the time.
    """
    ways = list(WAYS)
    for size in sizes:
        row, fastest = _bench_size(size, setting, ways)
        if not every_way:
            ways = [fastest]
        yield row


def _bench_size(size: Size, setting: Setting, ways: Sequence[str]) -> tuple[Row, str]:
    """The row, and the peer's fastest way."""
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
    fastest = min(peers, key=lambda way: peers[way][0].median)
    peer, peers_micro = peers[fastest]
    mode = "compiled" if setting.compiled else "eager"
    peer.name = f"{mode}, {fastest}, micro-batch {peers_micro}"
    case = f"train bf16 {mode}, {size.name}, T={size.length}, V={size.vocabulary}, B={size.rows}, micro-batch {micro}"
    return train_row(case, size.config(setting.device, micro, setting.compiled), ours, peer, peak), fastest


def _largest_that_fits(
    size: Size, build: Callable[[RunConfig], Step], setting: Setting, peak: Peak
) -> tuple[Contender, int]:
    """Measures what `build` makes with the largest micro-batch that it can; and which that is.

    Raises:
        UserError: not even one sequence fits.
    """
    micro = _first_micro_batch(size, setting.device)
    while micro > 0:
        try:
            return _measured(build, size.config(setting.device, micro, setting.compiled), setting, peak), micro
        except (torch.OutOfMemoryError, OutOfMemory):
            micro //= 2
        finally:
            _clear(setting.device)
    raise UserError(f"{size.name} does not fit on this device, with one sequence of {size.length} tokens at a time")


def _measured(build: Callable[[RunConfig], Step], config: RunConfig, setting: Setting, peak: Peak) -> Contender:
    """Its seconds alone: what was measured would hold its memory."""
    contender = Contender("", build(config))
    take_turns([contender], setting.rounds, setting.steps, setting.device, peak.measure)
    return Contender("", lambda: None, contender.seconds)


def _first_micro_batch(size: Size, device: torch.device) -> int:
    """All rows, halved until the guess fits: failing costs a compilation."""
    micro = size.rows
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        while micro > 1 and size.bytes_of(micro) > total:
            micro //= 2
    return micro


def _clear(device: torch.device) -> None:
    """Gives back what a contender held: compiled functions hold their models."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
