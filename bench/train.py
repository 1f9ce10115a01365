"""Time our training step and transformers' LlamaForCausalLM of the same shape, in turn: `isoflop bench train`.

Ours is all of `Stepper.step`: reading the batch, forward, backward, clipping, AdamW. The peer gets its batch for free,
SDPA, torch's fused AdamW, and its faster way to compute in bf16. On a CPU both train a model of 1.06M parameters, on a
GPU compiled GPTs of 124M to 1.3B in bf16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sweeps.terminal import short
from ..train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrackerConfig
from ..train.data.loader import TrainStream
from ..train.data.shards import prepare
from ..train.flops import count_parameters, training_flops_per_token
from ..train.parallel.mesh import Mesh
from ..train.stepper import Stepper
from . import timing
from .timing import Contender, Row, counted, measuring_on, require

ABOUT = "MFU: exact FLOPs, attention over the full T x T square, over the matmul peak of the same run"
CPU = torch.device("cpu")
# Width, depth, heads, inner width, vocabulary, context, batch, sequences in a forward pass. 1.06M is the byte GPT of
# the README's figures; larger ones have GPT-2's and GPT-3's widths and depths, and micro-batches that should fit 80 GB
# for all contenders together (not measured). tiny checks that everything runs.
SIZES = {
    "tiny": (32, 2, 2, 64, 256, 16, 4, 2),
    "1.06M": (128, 5, 4, None, 256, 256, 16, None),
    "124M": (768, 12, 12, 2048, 50304, 1024, 64, 16),
    "350M": (1024, 24, 16, 2816, 50304, 1024, 64, 8),
    "1.3B": (2048, 24, 16, 5504, 50304, 1024, 64, 4),
}
WAYS = {"pure bf16": torch.bfloat16, "bf16 autocast": torch.float32}  # of the peer, and the type of its weights


def bench_train(
    device: str = "auto", rounds: int = 15, steps: int = 4, sizes: Sequence[str] = (), compiled: bool = True
) -> Iterator[Row]:
    """Yield rows of tokens/s and MFU: compiled on a GPU; on a CPU eager and, if `compiled`, with ours compiled."""
    with measuring_on(device) as place, tempfile.TemporaryDirectory() as folder:
        require("transformers", "which is the benchmark's peer")
        gpu = place.type == "cuda"
        ways = [("bf16", True)] if gpu else list(product(("fp32", "bf16"), (False, True) if compiled else (False,)))
        for size, (precision, compile_ours) in product(sizes or (list(SIZES)[2:] if gpu else ["1.06M"]), ways):
            config = bench_config(precision, Path(folder), compile_ours, size)
            config.parallel.device = place.type
            yield _row(f"train {precision}{' compiled' * compile_ours}", config, place, rounds, steps)


def _row(case: str, config: RunConfig, device: torch.device, rounds: int, steps: int) -> Row:
    stepper = build_stepper(config, Mesh(), device)
    batch = torch.from_numpy(stepper.stream.batch(0, config.optimizer.batch_size)).to(device)
    ours = Contender("ours", counted(stepper.step))
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
    size = short(count_parameters(config.model).N_total)
    return f"{size} parameters, T={config.data.sequence_length}, B={config.optimizer.batch_size}"


def bench_config(precision: str, folder: Path, compiled: bool, size: str = "1.06M") -> RunConfig:
    """Return the config of a run on a CPU, whose text is written below `folder`; `size` is a key of SIZES."""
    text = folder / "text.jsonl"
    if not text.exists():
        text.write_text("".join(f'{{"text": "{str(i) * 400}"}}\n' for i in range(1000)))
    width, depth, heads, hidden, vocabulary, length, batch, micro = SIZES[size]
    tied = size != "1.06M"
    return RunConfig(
        model=ModelConfig(width, depth, heads, hidden=hidden, vocab_size=vocabulary, tied_embeddings=tied),
        data=DataConfig(corpus="text", path=str(text), sequence_length=length, cache_dir=str(folder / "cache")),
        optimizer=OptimizerConfig(batch_size=batch),
        parallel=ParallelConfig(device="cpu", compile=compiled, micro_batch_size=micro),
        tracker=TrackerConfig(kind="none"),
        tokens=10**12,
        precision=precision,
    )


def build_stepper(config: RunConfig, mesh: Mesh, device: torch.device = CPU) -> Stepper:
    """Return our trainer on this rank, at its first step."""
    stream = TrainStream(prepare(config.data), config.data.sequence_length, config.seed)
    stepper = Stepper(config, mesh, device, stream, report=lambda line: None)
    stepper.start()
    return stepper


class LlamaStep:
    """A step of a Llama of our run's shape, optimizer and precision, which trains on one batch (rows, T + 1) of ids.

    A bf16 run with fp32 `weights` computes under autocast. `compiled`: forward and loss are compiled as one.
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
