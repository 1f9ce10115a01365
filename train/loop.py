"""The training loop: a config in, a run directory out.

Special here:
- everything that decides a number (batch, learning rate, when to validate) is a pure function of the config and the
  step, so a run that was killed and resumed gives the same bits as one that was left alone;
- checkpoints are taken on a clock and never change the arithmetic;
- the loop asks `should_stop` after every step, and when told to stop it saves and leaves with `Stopped`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .config import RunConfig, run_id, validate
from .data.loader import TrainStream, bytes_of, validation_windows
from .data.shards import Shards, prepare
from .errors import UserError
from .files import JsonLines, write_json
from .flops import count_parameters, flops_6nd, flops_exact, training_flops_per_token
from .hardware import device_name, matmul_peak, pick_device
from .model import next_token_loss, sequence_losses
from .optimizer import build_optimizer, clip_gradients, set_learning_rate
from .parametrization import build_model
from .schedule import learning_rate_factor, warmup_steps
from .tracker import Tracker

SMOOTHING = 0.95  # per step, of the training loss whose rise tells a divergence


class Stopped(Exception):
    """The run was asked to stop; a checkpoint of where it was is on disk."""


class Diverged(Exception):
    """The loss is not a number or left its band; the message says which, where, and by how much."""


@dataclass
class Progress:
    """What of a run's course is carried through a checkpoint beside weights and moments."""

    step: int = 0
    seconds: float = 0.0
    smoothed_loss: float | None = None  # None before the first step
    best_loss: float | None = None
    rng: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class HeldOut:
    """Loss on the fixed held-out set."""

    val_loss: float  # nats per token
    val_loss_se: float | None  # standard error over windows of T tokens; None for a single window
    val_bpb: float  # bits per byte of the text itself


def held_out_loss(model: Any, windows: Tensor, text_bytes: int) -> HeldOut:
    """Scores windows (n, T + 1). Windows, not tokens, are the sample: tokens of one window are not independent."""
    per_window = sequence_losses(model, windows)
    length = windows.shape[1] - 1
    mean = per_window.mean().item() / length
    error = per_window.std().item() / length / math.sqrt(len(windows)) if len(windows) > 1 else None
    return HeldOut(mean, error, per_window.sum().item() / math.log(2) / text_bytes)


def train(
    config: RunConfig,
    directory: Path,
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[str], None] = print,
    shards: Shards | None = None,
) -> dict[str, Any]:
    """Trains one run, resuming from its newest valid checkpoint, and returns what it writes to summary.json.

    Args:
        config: complete and resolved (`model.vocab_size` and `data.fingerprint` filled in).
        directory: the run directory; metrics.jsonl, summary.json and checkpoints/ are written there.
        should_stop: asked after every step; True saves a checkpoint and raises `Stopped`.
        report: gets one line for everything that a person should know.
        shards: tokens to train on; prepared from the config when not given.

    Raises:
        UserError: the config cannot be trained.
        Diverged: the loss is not a number, or rose out of its band.
        Stopped: `should_stop` said so; call again to go on.
        OSError: the disk is full or not writable; the newest checkpoint stays valid.
    """
    validate(config)
    if config.parallel.threads is not None:
        torch.set_num_threads(config.parallel.threads)
    trainer = Trainer(config, directory, report, shards or prepare(config.data))
    try:
        return trainer.run(should_stop)
    finally:
        trainer.close()


class Trainer:
    """The state of one run between steps."""

    def __init__(self, config: RunConfig, directory: Path, report: Callable[[str], None], shards: Shards) -> None:
        tokenizer = shards.tokenizer
        planned = config.data.tokenizer_fingerprint
        if planned not in (None, "bytes", "bpe", tokenizer.fingerprint):
            raise UserError(
                f"data.tokenizer is {config.data.tokenizer!r} with fingerprint {tokenizer.fingerprint}; the run was "
                f"planned with {planned}, so the file has changed since"
            )
        if config.model.vocab_size != tokenizer.vocab_size:
            raise UserError(
                f"model.vocab_size is {config.model.vocab_size}; the tokenizer {config.data.tokenizer!r} "
                f"has {tokenizer.vocab_size} tokens, and both must be the same"
            )
        self.config, self.directory, self.report, self.tokenizer = config, directory, report, tokenizer
        self.device = pick_device(config.parallel.device)
        self.autocast_dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        torch.manual_seed(config.seed)
        self.stream = TrainStream(shards, config.data.sequence_length, config.seed)
        windows = validation_windows(shards, config.data.sequence_length, config.data.validation_tokens)
        self.windows = torch.from_numpy(windows)
        self.window_bytes = bytes_of(windows[:, 1:], tokenizer)
        self.model = build_model(config.model, config.optimizer, config.data.sequence_length, config.seed)
        self.model.to(self.device)
        if config.parallel.compile:
            self.model.compile_blocks()
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.parameters = list(self.model.parameters())
        self.progress = Progress()
        self.unwatched: list[Tensor] = []  # losses still on the device, so that no step waits for its own
        self.checkpoints = directory / "checkpoints"
        self._resume()
        self._say_epochs()
        self.peak = matmul_peak(self.device, self.autocast_dtype)
        self.metrics = JsonLines(directory / "metrics.jsonl")
        self.tracker = Tracker(config, run_id(config), directory, report)

    def run(self, should_stop: Callable[[], bool]) -> dict[str, Any]:
        """Steps until the end of D; see `train`."""
        config, progress = self.config, self.progress
        validate_at = validation_steps(config)
        started, seconds_before = time.perf_counter(), progress.seconds
        saved_at = logged_at = started
        logged_step = progress.step
        while progress.step < config.steps:
            loss, norm = self.step(progress.step)
            progress.step += 1
            self.unwatched.append(loss)
            now = time.perf_counter()
            progress.seconds = seconds_before + now - started
            last = progress.step == config.steps
            if progress.step % config.log_every == 0 or progress.step in validate_at or last:
                self._watch()
                tokens_per_s = (progress.step - logged_step) * config.batch_tokens / (now - logged_at)
                held_out = self.validate() if progress.step in validate_at else None
                self._log(loss.item(), norm.item(), tokens_per_s, held_out)
                logged_at, logged_step = time.perf_counter(), progress.step
            if last:
                break
            every = config.checkpoint.every_steps
            due = now - saved_at >= config.checkpoint.every_seconds or (
                every is not None and progress.step % every == 0
            )
            stop = should_stop()
            if due or stop:
                self.save()
                saved_at = time.perf_counter()
            if stop:
                raise Stopped(f"stopped at step {progress.step} of {config.steps}")
        return self._finish()

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns the batch's mean loss and the gradient norm before clipping, on the device."""
        config = self.config
        batch = config.optimizer.batch_size
        micro = config.parallel.micro_batch_size or batch
        total = torch.zeros((), device=self.device)
        for start in range(0, batch, micro):
            rows = torch.from_numpy(self.stream.batch(step, batch, start, micro)).to(self.device, non_blocking=True)
            with torch.autocast(self.device.type, self.autocast_dtype, enabled=config.precision != "fp32"):
                logits = self.model(rows[:, :-1])
            loss = next_token_loss(logits, rows[:, 1:]) * (micro / batch)
            loss.backward()
            total += loss.detach()
        norm = clip_gradients(self.parameters, config.optimizer.gradient_clip)  # type: ignore[arg-type]
        set_learning_rate(self.optimizer, learning_rate_factor(config, step))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm

    def validate(self) -> HeldOut:
        """Loss on the fixed held-out set, in the precision of the run."""
        self.model.eval()
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.config.precision != "fp32"):
            result = held_out_loss(self.model, self.windows, self.window_bytes)
        self.model.train()
        if not math.isfinite(result.val_loss):
            raise Diverged(f"the held-out loss is {result.val_loss} at step {self.progress.step}")
        return result

    def save(self) -> Path:
        """Writes a checkpoint of this instant and removes the oldest ones."""
        self._watch()
        self.progress.rng = torch.get_rng_state().tolist()
        path = checkpoint.save(
            self.checkpoints, self.progress.step, self.model, self.optimizer, vars(self.progress), self.config,
            self.tokenizer,
        )  # fmt: skip
        checkpoint.prune(self.checkpoints, self.config.checkpoint.keep, self.progress.step)
        return path

    def close(self) -> None:
        """Closes files and the tracker; safe to call twice."""
        self.tracker.finish()
        self.metrics.close()

    def _resume(self) -> None:
        newest = checkpoint.newest_valid(self.checkpoints, self.report)
        if newest is None:
            return
        self.progress = Progress(**checkpoint.restore(newest, self.model, self.optimizer, self.config))
        torch.set_rng_state(torch.tensor(self.progress.rng, dtype=torch.uint8))
        self.report(f"resumed from {newest.name} of {self.config.steps} steps")

    def _say_epochs(self) -> None:
        self.epochs = self.stream.epochs(self.config.D)
        if self.epochs > 1:
            self.report(
                f"{self.config.D:,} tokens are {self.epochs:.2f} epochs of the {self.stream.unique_tokens:,} "
                "unique ones"
            )

    def _watch(self) -> None:
        """Looks at every step since the last look, so that when a run counts as diverged owes nothing to log_every."""
        if not self.unwatched:
            return
        losses = torch.stack(self.unwatched).tolist()
        self.unwatched.clear()
        for step, loss in enumerate(losses, start=self.progress.step - len(losses) + 1):
            self._watch_step(step, loss)

    def _watch_step(self, step: int, loss: float) -> None:
        progress, limit = self.progress, self.config.max_loss_rise
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} at step {step}")
        before = loss if progress.smoothed_loss is None else progress.smoothed_loss
        smoothed = progress.smoothed_loss = SMOOTHING * before + (1 - SMOOTHING) * loss
        best = progress.best_loss = smoothed if progress.best_loss is None else min(progress.best_loss, smoothed)
        if smoothed > best + limit:
            raise Diverged(
                f"the smoothed loss rose from {best:.3f} to {smoothed:.3f} at step {step}, more than "
                f"max_loss_rise {limit}"
            )

    def _log(self, loss: float, norm: float, tokens_per_s: float, held_out: HeldOut | None) -> None:
        config, step = self.config, self.progress.step
        flops_per_token = training_flops_per_token(config.model, config.data.sequence_length)
        record: dict[str, Any] = {
            "step": step,
            "tokens": step * config.batch_tokens,
            "flops": float(flops_per_token) * step * config.batch_tokens,
            "train_loss": loss,
            "smoothed_loss": self.progress.smoothed_loss,
            "lr": config.optimizer.learning_rate * learning_rate_factor(config, step - 1),
            "grad_norm": norm if math.isfinite(norm) else None,  # the next loss will not be a number
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * flops_per_token / self.peak,
            "seconds": self.progress.seconds,
        }
        if held_out is not None:
            record |= vars(held_out)
            self.last_held_out = held_out
        self.metrics.write(record)
        self.tracker.log(record)

    def _finish(self) -> dict[str, Any]:
        path = self.save()
        held_out = getattr(self, "last_held_out", None) or self.validate()
        summary = self._summary(held_out, path)
        write_json(self.directory / "summary.json", summary)
        self.tracker.finish(summary)
        return summary

    def _summary(self, held_out: HeldOut, path: Path) -> dict[str, Any]:
        config, seconds = self.config, self.progress.seconds
        flops = flops_exact(config)
        return {
            "run_id": run_id(config),
            "step": config.steps,
            "checkpoint": f"checkpoints/{path.name}",
            **vars(count_parameters(config.model)),
            "D": config.D,
            "flops_6nd": flops_6nd(config),
            "flops_exact": flops,
            "val_loss": held_out.val_loss,
            "val_loss_se": held_out.val_loss_se,
            "val_bpb": held_out.val_bpb,
            "train_loss": self.progress.smoothed_loss,
            "unique_tokens": self.stream.unique_tokens,
            "epochs": self.epochs,
            "warmup_share": warmup_steps(config) / config.steps,
            "seconds": seconds,
            "tokens_per_s": config.D / max(seconds, 1e-9),
            "mfu": flops / max(seconds, 1e-9) / self.peak,
            "matmul_peak": self.peak,
            "device": device_name(self.device),
            "precision": config.precision,
            "torch": torch.__version__,
        }


def validation_steps(config: RunConfig) -> set[int]:
    """Steps after which the held-out set is scored: evenly spaced, the last one always among them."""
    return {math.ceil(config.steps * i / config.validations) for i in range(1, config.validations + 1)}


def validate_checkpoint(loaded: checkpoint.LoadedCheckpoint) -> dict[str, float]:
    """Held-out loss of a checkpoint on the data that its run was trained beside."""
    config = loaded.config
    shards = prepare(config.data)
    windows = validation_windows(shards, config.data.sequence_length, config.data.validation_tokens)
    return vars(held_out_loss(loaded.model, torch.from_numpy(windows), bytes_of(windows[:, 1:], loaded.tokenizer)))
