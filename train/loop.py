"""The training loop: reads a config, writes a run directory.

Everything that decides a number is a pure function of the config and the step, so a resumed run gives the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from .checkpoint.checkpoint import resume_state
from .checkpoint.heldout import score_domains, validation_steps
from .checkpoint.saver import Saver
from .config import RunConfig, run_id
from .data.mixture import HeldOutText, open_stream
from .data.shards import Shards
from .data.text import PLAIN, Text, prepare_text
from .errors import Diverged, Stopped, UserError
from .files import HALVED, JsonLines, write_json
from .flops import count_parameters, flops_6nd, flops_exact, flops_optimizer, training_flops_per_token
from .hardware import device_name, kept_peak, read
from .job.control import run_on_ranks
from .job.job import Job, join
from .job.progress import RunProgress
from .job.session import kept
from .model.experts import balance_of
from .optimizer.average import averaged_name, whole_copies
from .parallel.zero import StepResult
from .precision import set_matmul_precision
from .schedule import learning_rate_factor, warmup_steps
from .stepper import Stepper
from .tracker import Tracker


def train(
    config: RunConfig,
    directory: Path,
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[str], None] = print,
    shards: Shards | None = None,
    alive: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Train one run, resuming from its newest valid checkpoint, and return the content of summary.json.

    Every rank calls this with the same complete config.

    Args:
        should_stop: Called after every step; True stops the run.
        report: Called with each log line.
        shards: Prepared data; by default it is built or taken from the cache.
        alive: Called during long work without steps, such as preparing the data.

    Raises:
        UserError: The config cannot be trained.
        Diverged: The loss is not finite, or rose by more than `max_loss_rise`.
        Stopped: `should_stop` returned True on any rank. Call again to continue.
        OutOfMemory: A micro-batch does not fit, and cannot be halved in this process.
        RankError: Another rank failed.
        OSError: The disk is full or not writable.
    """
    with join(config, directory, report) as job:
        if config.parallel.threads is not None:
            torch.set_num_threads(config.parallel.threads)
        set_matmul_precision(config.parallel.tf32)
        report_once = report if job.mesh.rank == 0 else lambda line: None
        opened = run_on_ranks(job.mesh, lambda: open_text(config, shards, job, alive))
        stream = open_stream(config, opened)
        stepper = Stepper(config, job.mesh, job.device, stream, report_once, directory / HALVED)
        peak = kept_peak(job.device, stepper.dtype) * job.mesh.size
        trainer = Trainer(config, directory, report_once, opened, job, stepper, peak, alive=alive)
        try:
            while trainer.goes_on:
                job.watchdog.beat(trainer.progress.step, "in a step")
                trainer.record_step(stepper.step(trainer.progress.step))
                if trainer.goes_on:
                    stop, save = job.agree(should_stop(), trainer.save_is_due())
                    trainer.pause(stop, save)
            return trainer.finish()
        finally:
            trainer.close()


def open_text(config: RunConfig, shards: Shards | None, job: Job, alive: Callable[[], object]) -> Text:
    """Return the text of `shards` or, if None, prepare the config's, calling `alive` meanwhile.

    Raises UserError if the tokenizer changed after planning, or has another vocabulary size than the model.
    """

    def beat(stage: str, done: float, total: float) -> None:
        # Building can take long, and the other ranks wait for the one that builds.
        job.watchdog.beat(0, f"data: {stage}")
        alive()

    text = (
        {PLAIN: shards} if shards else prepare_text(config.data, beat, lambda key, build: kept(("shards", key), build))
    )
    tokenizer, planned = next(iter(text.values())).tokenizer, config.data.tokenizer_fingerprint
    if planned not in (None, "bytes", "bpe", tokenizer.fingerprint):
        raise UserError(
            f"data.tokenizer is {config.data.tokenizer!r} with fingerprint {tokenizer.fingerprint}, and the run was "
            f"planned with {planned}: the file changed after planning; restore it, or plan again"
        )
    if config.model.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size is {config.model.vocab_size}; the tokenizer {config.data.tokenizer!r} "
            f"has {tokenizer.vocab_size} tokens, and both must be the same"
        )
    return text


class Trainer:
    """The records of one run on one rank: its progress, metrics, held-out losses and checkpoints."""

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        report: Callable[[str], None],
        text: Text,
        job: Job,
        stepper: Stepper,
        peak: float,
        *,
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        """Resume the run from its newest valid checkpoint, or start it.

        `peak` is the FLOP/s of all ranks together, the denominator of MFU.
        """
        self.config, self.directory, self.report, self.job = config, directory, report, job
        self.stepper, self.peak, self.alive = stepper, peak, alive
        self.leads = job.mesh.rank == 0  # rank 0 writes the files that a run has once
        self.tokenizer = next(iter(text.values())).tokenizer
        self.held_out_text = HeldOutText.of(config.data, text)
        self.windows = torch.from_numpy(self.held_out_text.windows)
        self.validate_at = validation_steps(config)
        self.progress = RunProgress()
        self.last_held_out: dict[str, Any] | None = None
        self.balance: dict[str, list[float]] = {}  # of the experts of each block, at the last log line
        self.unwatched: list[StepResult] = []  # still on the device, so that no step waits for its loss
        self.saver = Saver(directory / "checkpoints", job.mesh, config, self.tokenizer, report)
        self._resume()
        for line in stepper.stream.repeated(config.D):
            report(line)
        self.metrics = JsonLines(directory / "metrics.jsonl") if self.leads else None
        self.tracker = Tracker(config, run_id(config), directory, report) if self.leads else None
        self._zero_seconds = time.perf_counter() - self.progress.seconds  # as if the run had never been interrupted
        self._logged_at, self._logged_step = time.perf_counter(), self.progress.step
        self._saved_at = time.perf_counter()

    @property
    def goes_on(self) -> bool:
        return self.progress.step < self.config.steps

    def record_step(self, result: StepResult) -> None:
        """Count a finished step. If a log line is due, check for divergence, validate if due, and log."""
        config, progress = self.config, self.progress
        progress.step += 1
        self.unwatched.append(result)
        now = time.perf_counter()
        progress.seconds = now - self._zero_seconds
        if progress.step % config.log_every == 0 or progress.step in self.validate_at or not self.goes_on:
            self._watch()
            tokens_per_s = (progress.step - self._logged_step) * config.batch_tokens / (now - self._logged_at)
            held_out = self.validate() if progress.step in self.validate_at else None
            self._log(result, tokens_per_s, held_out)
            self._logged_at, self._logged_step = time.perf_counter(), progress.step

    def save_is_due(self) -> bool:
        return self.leads and time.perf_counter() - self._saved_at >= self.config.checkpoint.every_seconds

    def pause(self, stop: bool, save: bool) -> None:
        """Save a checkpoint if `save`, `stop` or the config asks for one at this step. If `stop`, raise Stopped."""
        config, step = self.config, self.progress.step
        every_steps, named_steps = config.checkpoint.every_steps, config.checkpoint.at_steps or ()
        if stop or save or step in named_steps or (every_steps is not None and step % every_steps == 0):
            self.save()
            self._saved_at = time.perf_counter()
        if stop:
            self.saver.wait()
            raise Stopped(f"stopped at step {step} of {config.steps}")

    def validate(self) -> dict[str, Any]:
        """Score the held-out set. Return metrics by name, also the loss of each average of the weights."""

        def beat() -> None:
            self.job.watchdog.beat(self.progress.step, "scoring the held-out set")
            self.alive()

        step, score = self.progress.step, partial(score_domains, self.held_out_text)
        result = score(self.stepper.losses(self.windows, beat))
        if not all(math.isfinite(value) for value in result.values() if value is not None):
            raise Diverged(f"the held-out loss is {result['val_loss']} at step {step}")
        averaged = {}
        for span, copy in whole_copies(self.config.average, step).items():
            name = averaged_name(self.config.average, span)
            averaged[name] = score(self.stepper.losses(self.windows, beat, copy))["val_loss"]
        return result | averaged

    def save(self) -> None:
        """Start saving the current state; training continues."""
        self._watch()
        self.job.watchdog.beat(self.progress.step, "saving a checkpoint")
        state = {**vars(self.progress), **self.stepper.state()}
        self.saver.save(self.progress.step, self.stepper.held(), state)

    def finish(self) -> dict[str, Any]:
        """Write the last checkpoint and the summary; return the summary."""
        self.save()
        held_out = self.last_held_out or self.validate()  # None if the run resumed at its last step
        self.saver.wait()
        summary = self._summary(held_out)
        if self.tracker is not None:
            write_json(self.directory / "summary.json", summary)
            self.tracker.finish(summary)
        return summary

    def close(self) -> None:
        self.saver.close()
        if self.tracker is not None:
            self.tracker.finish()
        if self.metrics is not None:
            self.metrics.close()

    def _resume(self) -> None:
        state = resume_state(
            self.directory / "checkpoints", self.stepper.held(), self.config, self.job.mesh, self.report
        )
        if state is None:
            self.stepper.start()
            return
        try:
            self.progress = msgspec.convert({key: state[key] for key in vars(self.progress)}, RunProgress)
            self.stepper.load_state(state)
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise UserError(
                f"the newest checkpoint in {self.directory} cannot be resumed, because its trainer.json has invalid "
                f"content ({error}); remove that checkpoint"
            ) from error
        self.report(f"resumed from step_{self.progress.step} of {self.config.steps} steps")

    def _watch(self) -> None:
        """Check the losses of all steps since the last call for divergence."""
        if not self.unwatched:
            return
        losses = read(torch.stack([result.loss for result in self.unwatched])).tolist()
        skips = read(torch.stack([result.skipped for result in self.unwatched])).bool().tolist()
        self.unwatched.clear()
        first = self.progress.step - len(losses) + 1
        for line in self.progress.judge(first, zip(losses, skips, strict=True), self.config):
            self.report(line)

    def _log(self, result: StepResult, tokens_per_s: float, held_out: dict[str, Any] | None) -> None:
        config, step = self.config, self.progress.step
        self.last_held_out = held_out
        loads = self.stepper.loads()
        if self.metrics is None or self.tracker is None:
            return
        loss, norm = read(result.loss).item(), read(result.norm).item()
        flops_per_token = training_flops_per_token(config.model, config.data.sequence_length)
        record: dict[str, Any] = {
            "step": step,
            "tokens": step * config.batch_tokens,
            "flops": float(flops_per_token) * step * config.batch_tokens,
            "train_loss": loss if math.isfinite(loss) else None,  # None: the batch was skipped
            "smoothed_loss": self.progress.smoothed_loss,
            "lr": config.optimizer.learning_rate * learning_rate_factor(config, step - 1),  # of the step just taken
            "grad_norm": norm if math.isfinite(norm) else None,
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * flops_per_token / self.peak,
            "seconds": self.progress.seconds,
        }
        if self.progress.bad_steps:
            record["bad_steps"] = self.progress.bad_steps
        if loads is not None:
            self.balance = balance_of(loads)
            record |= self.balance
        if held_out is not None:
            record |= held_out
        self.metrics.write(record)
        self.tracker.log(record)

    def _summary(self, held_out: dict[str, Any]) -> dict[str, Any]:
        config, seconds = self.config, self.progress.seconds
        flops, formats = flops_exact(config), config.quantization.formats
        return {
            "run_id": run_id(config),
            "step": config.steps,
            "checkpoint": f"checkpoints/step_{config.steps}",
            **vars(count_parameters(config.model)),
            "D": config.D,
            "flops_6nd": flops_6nd(config),
            "flops_exact": flops,
            "flops_optimizer": flops_optimizer(config),
            **held_out,
            "train_loss": self.progress.smoothed_loss,  # smoothed; in metrics.jsonl `train_loss` is one step's
            **self.stepper.stream.described(config.D),
            "warmup_share": warmup_steps(config) / config.steps,
            "bad_steps": self.progress.bad_steps,
            "seconds": seconds,
            "tokens_per_s": config.D / max(seconds, 1e-9),  # 1e-9: a resumed last step took no time
            "mfu": flops / max(seconds, 1e-9) / self.peak,
            "matmul_peak": self.peak,
            "device": device_name(self.job.device),
            "ranks": self.job.mesh.size,
            "micro_batch_size": self.stepper.micro,
            "precision": config.precision,
            **({f"{name}_format": value for name, value in formats.items()} if config.quantization.used else {}),
            **self.balance,
            "torch": torch.__version__,
        }
