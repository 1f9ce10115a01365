"""Our trainer beside a peer, in one run and in turn, so that what else the machine does falls on both alike.

Special here:
- ours is `Stepper.step`, the whole of it: reading the batch, forward, backward, clipping, AdamW. The peer gets its
  batch for free, torch's fused AdamW, and no copy of labels; where it has two ways to compute in bf16, both run.
- rounds of a few steps alternate; a case's figure is the median over rounds, its spread half the interquartile range of
  the rounds' own ratios.
- the plain matmul rate that MFU divides by is measured between the same rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..train.errors import UserError

if TYPE_CHECKING:
    import torch

    from ..train.config import RunConfig
    from ..train.parallel.mesh import Mesh
    from ..train.stepper import Stepper

# The 1.15M-parameter byte GPT of the project's figures.
WIDTH, DEPTH, HEADS, LENGTH, BATCH = 128, 5, 4, 256, 16
THREADS = 2
Step = Callable[[], Any]


@dataclasses.dataclass
class Contender:
    """One way to take a training step, with the seconds a step that each round measured."""

    name: str
    step: Step
    seconds: list[float] = dataclasses.field(default_factory=list)


def bench_train(rounds: int = 15, steps: int = 4, compiled: bool = True) -> list[dict[str, Any]]:
    """Tokens a second of our training step and of transformers' LlamaForCausalLM, same shape, same run.

    Args:
        rounds: how often each contender has its turn; the first one is not counted.
        steps: steps in a turn.
        compiled: also our step with `parallel.compile=true`, against the same peer as it is (eager).

    Returns:
        One row a precision and mode, in the format of every `isoflop bench`, with MFU beside it.

    Raises:
        UserError: transformers is not installed.
    """
    import torch

    _require_transformers()
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = [_compare(p, Path(folder), rounds, steps, False) for p in ("fp32", "bf16")]
            if compiled:
                rows += [_compare(p, Path(folder), rounds, steps, True) for p in ("fp32", "bf16")]
    finally:
        torch.set_num_threads(threads)
    return rows


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise UserError(
            "transformers is not installed; the benchmark's peer comes with pip install 'isoflop[bench]'"
        ) from None


def _compare(precision: str, folder: Path, rounds: int, steps: int, compiled: bool) -> dict[str, Any]:
    import torch

    from ..train.flops import training_flops_per_token
    from ..train.hardware import matmul_peak
    from ..train.parallel.mesh import Mesh

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config = bench_config(precision, folder, compiled)
    ours = Contender("Stepper.step", counted(build_stepper(config, Mesh()).step))
    peers = _peers(config, dtype)
    peak = 0.0
    for turn in range(rounds + 1):
        for contender in (ours, *peers):
            seconds = _time(contender.step, 1 if turn == 0 else steps)
            if turn > 0:
                contender.seconds.append(seconds)
        peak = max(peak, matmul_peak(torch.device("cpu"), dtype))
    peer = min(peers, key=lambda contender: statistics.median(contender.seconds))
    row = row_of(
        f"train {precision}{' compiled' if compiled else ''}", config, ours.seconds, peer.seconds,
        f"transformers LlamaForCausalLM, fused AdamW, {peer.name}",
    )  # fmt: skip
    flops = training_flops_per_token(config.model, LENGTH)
    return row | {"mfu": row["ours"] * flops / peak, "peer_mfu": row["peer"] * flops / peak, "matmul_peak": peak}


def row_of(case: str, config: RunConfig, ours: list[float], theirs: list[float], peer: str) -> dict[str, Any]:
    """A row of the contract, from the seconds a step that each round measured of ours and of the peer."""
    import torch

    from ..train.hardware import device_name

    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    rates = [config.batch_tokens / statistics.median(seconds) for seconds in (ours, theirs)]
    return {
        "case": f"{case}, 1.15M parameters, T={LENGTH}, B={BATCH}",
        "ours": rates[0],
        "peer": rates[1],
        "peer_name": peer,
        "unit": "tokens/s",
        "ratio": rates[0] / rates[1],
        "spread": (quarters[2] - quarters[0]) / 2,
        "device": device_name(torch.device("cpu")),
    }


def _time(step: Step, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def bench_config(precision: str, folder: Path, compiled: bool) -> RunConfig:
    """The run that is measured: 1.15M parameters, text that is enough for every step to read other windows."""
    from ..train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrackerConfig

    text = folder / "text.jsonl"
    if not text.exists():
        # Which tokens they are changes no speed: enough for every step to read other windows.
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
    """What takes a training step of ours on this rank, at its first step."""
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


def _peers(config: RunConfig, dtype: torch.dtype) -> list[Contender]:
    """The peer's ways to take the step; in bf16 it may autocast or hold its weights in bf16, and the faster counts."""
    import torch

    if dtype == torch.float32:
        return [Contender("eager fp32", _llama_step(config, torch.float32, autocast=False))]
    return [
        Contender("eager bf16 autocast", _llama_step(config, torch.float32, autocast=True)),
        Contender("eager pure bf16", _llama_step(config, torch.bfloat16, autocast=False)),
    ]


def _llama_step(config: RunConfig, weights: torch.dtype, autocast: bool) -> Step:
    import torch
    import torch.nn.functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    model, optimizer = config.model, config.optimizer
    assert model.vocab_size is not None
    shape: dict[str, Any] = {
        "hidden_size": model.width,
        "intermediate_size": model.mlp_hidden,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": model.tied_embeddings,
        "attn_implementation": "sdpa",
    }
    llama: Any = LlamaForCausalLM(LlamaConfig(**shape))
    llama.to(weights).train()
    adamw = torch.optim.AdamW(
        llama.parameters(), optimizer.learning_rate, (optimizer.beta1, optimizer.beta2), optimizer.eps,
        optimizer.weight_decay, fused=True,
    )  # fmt: skip
    rows = torch.randint(model.vocab_size, (BATCH, LENGTH + 1))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = llama(input_ids=rows[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), optimizer.gradient_clip)
        adamw.step()
        adamw.zero_grad()

    return step


def print_benchmark(rows: list[dict[str, Any]]) -> None:
    """The rows as a table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"ours beside the peer, in turn, on {rows[0]['device']}" if rows else "nothing was measured")
    measured_peak = bool(rows) and "mfu" in rows[0]
    rates = ("MFU", "peer's MFU", "matmul peak") if measured_peak else ()
    for name in ("case", "ours", "peer", "unit", "ratio", *rates, "peer is"):
        table.add_column(name, justify="left" if name in ("case", "unit", "peer is") else "right")
    for row in rows:
        shares: tuple[str, ...] = ()
        if measured_peak:
            shares = (f"{row['mfu']:.0%}", f"{row['peer_mfu']:.0%}", f"{row['matmul_peak'] / 1e9:.0f} GFLOP/s")
        table.add_row(
            row["case"], f"{row['ours']:,.0f}", f"{row['peer']:,.0f}", row["unit"],
            f"{row['ratio']:.2f} ± {row['spread']:.2f}", *shares, row["peer_name"],
        )  # fmt: skip
    Console().print(table)
