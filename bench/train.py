"""Our training step beside transformers' LlamaForCausalLM, same shapes: `isoflop bench train`.

Special here:
- ours is `Stepper.step`, the whole of it: reading the batch, forward, backward, clipping, AdamW. The peer gets its
  batch for free, SDPA, torch's fused AdamW, and no copy of labels; where it has two ways to compute in bf16, both run
  and the faster counts;
- on a CPU it is a model of 1.06M parameters, ours eager and compiled, the peer eager, in turn; for GPUs see
  `bench_train_gpu.py`;
- MFU is the exact convention of `train/flops.py` over the plain matmul rate measured between the same rounds.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sweeps.terminal import short
from ..train.errors import UserError
from .contenders import (
    EXACT,
    THREADS,
    Contender,
    Peak,
    Row,
    Step,
    bench_device,
    contract_row,
    fastest,
    pinned_threads,
    take_turns,
    with_mfu,
)

if TYPE_CHECKING:
    from ..train.config import RunConfig
    from ..train.parallel.mesh import Mesh
    from ..train.stepper import Stepper

ABOUT = EXACT
# The 1.06M-parameter byte GPT of the project's figures.
WIDTH, DEPTH, HEADS, LENGTH, BATCH = 128, 5, 4, 256, 16


def bench_train(
    device: str = "auto", rounds: int = 15, steps: int = 4, compiled: bool = True, threads: int = THREADS
) -> Iterator[Row]:
    """Tokens a second of our training step and of transformers' LlamaForCausalLM, same shape, same run.

    Args:
        device: auto | cpu | cuda.
        rounds: how often each contender has its turn; one step before them is not counted.
        steps: steps in a turn.
        compiled: on a CPU, also our step with `parallel.compile=true`, against the same peer as it is (eager).
        threads: of the CPU.

    Yields:
        One row a case, in the format of every `isoflop bench`, with MFU beside it.

    Raises:
        UserError: transformers is not installed, or the device is not there.
    """
    place = bench_device(device)
    require_transformers()
    with pinned_threads(threads):
        if place.type == "cuda":
            from .train_gpu import Setting, bench_sizes

            yield from bench_sizes(Setting(place, rounds, steps))
            return
        with tempfile.TemporaryDirectory() as folder:
            for compile_ours in (False, True) if compiled else (False,):
                for precision in ("fp32", "bf16"):
                    yield _on_cpu(precision, Path(folder), rounds, steps, compile_ours)


def require_transformers() -> None:
    """Raises UserError where the peer is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise UserError(
            "transformers is not installed; the benchmark's peer comes with pip install 'isoflop[bench]'"
        ) from None


def _on_cpu(precision: str, folder: Path, rounds: int, steps: int, compiled: bool) -> Row:
    import torch

    from ..train.parallel.mesh import Mesh
    from .llama import LlamaStep

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
    case = f"train {precision}{' compiled' if compiled else ''}, {shape_of(config)}"
    return train_row(case, config, ours, fastest(peers), peak)


def train_row(case: str, config: RunConfig, ours: Contender, peer: Contender, peak: Peak) -> Row:
    """A row of the contract with both sides' MFU."""
    from ..train.flops import training_flops_per_token

    name = f"transformers LlamaForCausalLM, SDPA, fused AdamW, {peer.name}"
    row = contract_row(case, config.batch_tokens, "tokens/s", ours.seconds, peer.seconds, name, peak.device)
    return with_mfu(row, training_flops_per_token(config.model, config.data.sequence_length), peak)


def shape_of(config: RunConfig) -> str:
    """Of a case: the model's size, the context and the batch."""
    from ..train.flops import count_parameters

    size = short(count_parameters(config.model).N_total)
    return f"{size} parameters, T={config.data.sequence_length}, B={config.optimizer.batch_size}"


def bench_config(precision: str, folder: Path, compiled: bool) -> RunConfig:
    """What is measured on a CPU: 1.06M parameters, text that is enough for every step to read other windows."""
    from ..train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrackerConfig

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
    """What takes a training step of ours on this rank of a CPU, at its first step."""
    import torch

    from ..train.data.loader import TrainStream
    from ..train.data.shards import prepare
    from ..train.stepper import Stepper

    stream = TrainStream(prepare(config.data), config.data.sequence_length, config.seed)
    stepper = Stepper(config, mesh, torch.device("cpu"), stream)
    stepper.start()
    return stepper


def counted(step: Callable[[int], Any]) -> Step:
    """A step that counts itself: 0, 1, 2, …"""
    count = itertools.count()
    return lambda: step(next(count))
