"""Time our training step and transformers' LlamaForCausalLM of the same shape, in turn: `isoflop bench train`.

Ours is all of `Stepper.step`: reading the batch, forward, backward, clipping, AdamW. The peer gets its batch for free,
SDPA, torch's fused AdamW, and its faster way to compute in bf16. On a CPU both train a model of 1.06M parameters, on a
GPU compiled GPTs of 124M to 1.3B in bf16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..sweeps.terminal import short
from ..train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrackerConfig
from ..train.data.loader import TrainStream
from ..train.data.shards import Shards, prepare
from ..train.data.tokenizers import ByteTokenizer
from ..train.flops import count_parameters, training_flops_per_token
from ..train.parallel.mesh import Mesh
from ..train.stepper import Stepper
from . import timing
from .timing import Contender, Row, counted, measuring_on, require

ABOUT = timing.EXACT
# The 1.06M-parameter byte GPT of the README's figures.
WIDTH, DEPTH, HEADS, LENGTH, BATCH = 128, 5, 4, 256, 16
WAYS = {"pure bf16": torch.bfloat16, "bf16 autocast": torch.float32}  # of the peer, and the type of its weights


@dataclass(frozen=True)
class Size:
    """A dense GPT of GPT-2's and GPT-3's widths and depths, with SwiGLU's inner width a multiple of 128."""

    name: str
    width: int
    depth: int
    heads: int
    hidden: int
    micro: int  # sequences in a forward pass; all contenders together fit 80 GB by an estimate, not measured
    vocabulary: int = 50304
    length: int = 1024
    rows: int = 64  # sequences per step

    def config(self, device: torch.device, compiled: bool) -> RunConfig:
        return RunConfig(
            model=ModelConfig(self.width, self.depth, self.heads, hidden=self.hidden, vocab_size=self.vocabulary),
            data=DataConfig(sequence_length=self.length),
            optimizer=OptimizerConfig(batch_size=self.rows),
            parallel=ParallelConfig(device=device.type, compile=compiled, micro_batch_size=self.micro),
            tracker=TrackerConfig(kind="none"),
            tokens=10**12,
            precision="bf16",
        )


SIZES = (Size("124M", 768, 12, 12, 2048, 16), Size("350M", 1024, 24, 16, 2816, 8), Size("1.3B", 2048, 24, 16, 5504, 4))


def bench_train(
    device: str = "auto", rounds: int = 15, steps: int = 4, sizes: Sequence[Size] = (), compiled: bool = True
) -> Iterator[Row]:
    """Yield tokens/s with MFU.

    On a CPU ours is also measured `compiled`, and the peer stays eager; on a GPU both are compiled, for each of `sizes`.
    """
    with measuring_on(device) as place:
        require("transformers", "which is the benchmark's peer")
        if place.type == "cuda" or sizes:
            for size in sizes or SIZES:
                config = size.config(place, compiled)
                stream = TrainStream(random_shards(size.vocabulary, 16 * size.rows * size.length), size.length, seed=0)
                yield _row(f"train bf16, {size.name}, V={size.vocabulary}", config, stream, place, rounds, steps)
            return
        with tempfile.TemporaryDirectory() as folder:
            for compile_ours, precision in product((False, True) if compiled else (False,), ("fp32", "bf16")):
                config = bench_config(precision, Path(folder), compile_ours)
                stream = TrainStream(prepare(config.data), LENGTH, config.seed)
                case = f"train {precision}{' compiled' * compile_ours}"
                yield _row(case, config, stream, place, rounds, steps)


def _row(case: str, config: RunConfig, stream: TrainStream, device: torch.device, rounds: int, steps: int) -> Row:
    stepper = Stepper(config, Mesh(), device, stream, report=lambda line: None)
    stepper.start()
    ours = Contender("ours", counted(stepper.step))
    batch = torch.from_numpy(stream.batch(0, config.optimizer.batch_size)).to(device)
    mode = "compiled" if device.type == "cuda" and config.parallel.compile else "eager"
    peers = [
        Contender(f"{mode}, {way}", LlamaStep(config, batch, weights, mode == "compiled"))
        for way, weights in (WAYS if config.precision == "bf16" else {"pure fp32": torch.float32}).items()
    ]
    peak = timing.Peak(device, torch.float32 if config.precision == "fp32" else torch.bfloat16)
    timing.take_turns([ours, *peers], rounds, steps, device, peak.measure)
    peer = timing.fastest(peers)
    case, name = f"{case}, {size_and_batch(config)}", f"transformers LlamaForCausalLM, fused AdamW, {peer.name}"
    row = timing.timed_row(case, config.batch_tokens, "tokens/s", ours.seconds, peer.seconds, name, device)
    return timing.with_mfu(row, training_flops_per_token(config.model, config.data.sequence_length), peak)


def size_and_batch(config: RunConfig) -> str:
    """Return the model's size, the context and the batch, for the name of a case."""
    size = short(count_parameters(config.model).N_total)
    return f"{size} parameters, T={config.data.sequence_length}, B={config.optimizer.batch_size}"


def bench_config(precision: str, folder: Path, compiled: bool) -> RunConfig:
    """Return the run of the CPU's benchmarks, with enough text for every step to read other windows."""
    text = folder / "text.jsonl"
    if not text.exists():
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
    """Return our trainer on this rank of a CPU, at its first step."""
    stream = TrainStream(prepare(config.data), config.data.sequence_length, config.seed)
    stepper = Stepper(config, mesh, torch.device("cpu"), stream)
    stepper.start()
    return stepper


class LlamaStep:
    """A training step of a Llama of our model's shape, which trains on the same batch every time.

    Args:
        config: of our run, whose shape, optimizer and precision are the peer's too.
        batch: token ids, (rows, T + 1).
        weights: their type; a bf16 run with fp32 weights computes under autocast.
        compiled: whether forward and loss are compiled as one.
    """

    def __init__(self, config: RunConfig, batch: Tensor, weights: torch.dtype, compiled: bool = False) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        model, optimizer = config.model, config.optimizer
        shape: dict[str, Any] = {
            "hidden_size": model.width, "intermediate_size": model.mlp_hidden, "num_hidden_layers": model.depth,
            "num_attention_heads": model.heads, "num_key_value_heads": model.num_kv_heads,
            "vocab_size": model.vocab_size, "max_position_embeddings": batch.shape[1] - 1,
            "rms_norm_eps": model.norm_eps, "tie_word_embeddings": model.tied_embeddings, "attn_implementation": "sdpa",
        }  # fmt: skip
        with torch.device(batch.device):
            llama: Any = LlamaForCausalLM(LlamaConfig(**shape))
        self.llama = llama.to(weights).train()
        betas = (optimizer.beta1, optimizer.beta2)
        adamw = partial(torch.optim.AdamW, eps=optimizer.eps, weight_decay=optimizer.weight_decay, fused=True)
        self.adamw = adamw(llama.parameters(), optimizer.learning_rate, betas)
        self.clip = optimizer.gradient_clip
        self.batch, self.micro = batch, config.parallel.micro_batch_size or len(batch)
        self.autocast = config.precision == "bf16" and weights == torch.float32
        self.loss = torch.compile(self._loss, dynamic=False) if compiled else self._loss

    def __call__(self) -> Tensor:
        """Take a step, and return the batch's mean loss before the update."""
        total = torch.zeros((), device=self.batch.device)
        for rows in self.batch.split(self.micro):
            with torch.autocast(self.batch.device.type, torch.bfloat16, enabled=self.autocast):
                loss = self.loss(rows) * (len(rows) / len(self.batch))
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.llama.parameters(), self.clip)
        self.adamw.step()
        self.adamw.zero_grad()
        return total

    def _loss(self, rows: Tensor) -> Tensor:
        logits = self.llama(input_ids=rows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def random_ids(random: np.random.Generator, vocabulary: int, count: int) -> np.ndarray:
    """Return ids below `vocabulary`, (count,), with the frequencies of words (Zipf)."""
    cumulative = np.cumsum(1.0 / (np.arange(vocabulary) + 2.7))
    return np.searchsorted(cumulative, random.random(count) * cumulative[-1]).clip(max=vocabulary - 1)


def random_shards(vocabulary: int, tokens: int) -> Shards:
    """Return random tokens as shards in memory, for models that are too large for a moment's text.

    Uniform tokens would spread the embedding's gradient, and the misses of the caches, in a way that no text does.
    """
    stream = random_ids(np.random.default_rng(0), vocabulary, tokens + 1).astype(np.uint32)
    return Shards(Path(), {}, ByteTokenizer(), stream, stream)
