"""The training loop: a config in, a run directory out.

Special here:
- everything that decides a number (batch, learning rate, when to validate) is a pure function of the config and the
  step, so a run that was killed and resumed gives the same bits as one that was left alone;
- checkpoints are taken on a clock, written while training goes on, and never change the arithmetic;
- the loop asks `should_stop` after every step, and when told to stop it saves and leaves with `Stopped`;
- every rank runs this same loop. Rank 0 alone writes metrics and the summary; what a rank must not decide alone (to
  stop, to save) is agreed on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .checkpoint import resume
from .config import RunConfig, run_id, validate
from .course import Course, Diverged
from .data.loader import TrainStream, bytes_of, validation_windows
from .data.shards import Shards, prepare
from .errors import UserError
from .files import HALVED, JsonLines, write_json
from .flops import count_parameters, flops_6nd, flops_exact, training_flops_per_token
from .hardware import device_name, matmul_peak
from .heldout import HeldOut, held_out, validation_steps
from .parallel.job import Job, join
from .parallel.zero import StepResult
from .precision import PastStep, set_matmul_precision
from .saver import Saver
from .schedule import learning_rate_factor, warmup_steps
from .stepper import Stepper
from .tracker import Tracker


class Stopped(Exception):
    """The run was asked to stop; a checkpoint of where it was is on disk."""


def train(
    config: RunConfig,
    directory: Path,
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[str], None] = print,
    shards: Shards | None = None,
) -> dict[str, Any]:
    """Trains one run, resuming from its newest valid checkpoint, and returns what it writes to summary.json.

    With more than one rank (`parallel.tp`, `parallel.dp`) every rank calls this, with the same arguments.

    Args:
        config: complete and resolved (`model.vocab_size` and `data.fingerprint` filled in).
        directory: the run directory; metrics.jsonl, summary.json and checkpoints/ are written there.
        should_stop: asked after every step; True on any rank saves a checkpoint and raises `Stopped` on all.
        report: gets one line for everything that a person should know.
        shards: tokens to train on; prepared from the config when not given.

    Raises:
        UserError: the config cannot be trained.
        Diverged: the loss is not a number, or rose out of its band.
        Stopped: `should_stop` said so; call again to go on.
        OutOfMemory: a micro-batch does not fit, and cannot be halved here.
        RankError: another rank failed; says which, where, and why.
        OSError: the disk is full or not writable; the newest checkpoint stays valid.
    """
    validate(config)
    if config.parallel.threads is not None:
        torch.set_num_threads(config.parallel.threads)
    set_matmul_precision(config.parallel.tf32)
    with join(config, directory, report, orderly=(Stopped, Diverged)) as job:
        trainer = Trainer(config, directory, report if job.mesh.rank == 0 else _silent, shards, job)
        try:
            return trainer.run(should_stop)
        finally:
            trainer.close()


def _silent(line: str) -> None:
    """What rank 0 says is said once."""


class Trainer:
    """The state of one rank's run between steps."""

    def __init__(
        self, config: RunConfig, directory: Path, report: Callable[[str], None], shards: Shards | None, job: Job
    ) -> None:
        self.config, self.directory, self.report, self.job = config, directory, report, job
        shards = job.together(lambda: self._open(shards))
        self.tokenizer = shards.tokenizer
        self.stream = TrainStream(shards, config.data.sequence_length, config.seed)
        windows = validation_windows(shards, config.data.sequence_length, config.data.validation_tokens)
        self.windows = torch.from_numpy(windows)
        self.window_bytes = bytes_of(windows[:, 1:], self.tokenizer)
        self.stepper = Stepper(config, job.mesh, job.device, self.stream, report, directory / HALVED)
        self.course = Course()
        self.last_held_out: HeldOut | None = None
        self.unwatched: list[StepResult] = []  # still on the device, so that no step waits for its own loss
        self.saver = Saver(directory / "checkpoints", job.mesh, config, self.tokenizer, report)
        self._resume()
        self._say_epochs()
        self.peak = matmul_peak(job.device, self.stepper.dtype) * job.mesh.size
        self.metrics = JsonLines(directory / "metrics.jsonl") if self.leads else None
        self.tracker = Tracker(config, run_id(config), directory, report) if self.leads else None

    @property
    def leads(self) -> bool:
        """Whether this rank writes what a run writes once."""
        return self.job.mesh.rank == 0

    def run(self, should_stop: Callable[[], bool]) -> dict[str, Any]:
        """Steps until the end of D; see `train`."""
        config, course = self.config, self.course
        validate_at = validation_steps(config)
        started, seconds_before = time.perf_counter(), course.seconds
        saved_at = logged_at = started
        logged_step = course.step
        while course.step < config.steps:
            self.job.beat(course.step, "in a step")
            result = self.step(course.step)
            course.step += 1
            self.unwatched.append(result)
            now = time.perf_counter()
            course.seconds = seconds_before + now - started
            last = course.step == config.steps
            if course.step % config.log_every == 0 or course.step in validate_at or last:
                self._watch()
                tokens_per_s = (course.step - logged_step) * config.batch_tokens / (now - logged_at)
                held_out = self.validate() if course.step in validate_at else None
                self._log(result, tokens_per_s, held_out)
                logged_at, logged_step = time.perf_counter(), course.step
            if last:
                break
            every, named = config.checkpoint.every_steps, config.checkpoint.at_steps or ()
            due = now - saved_at >= config.checkpoint.every_seconds
            stop, save = self.job.agree(stop=should_stop(), save=due and self.leads)
            if stop or save or course.step in named or (every is not None and course.step % every == 0):
                self.save()
                saved_at = time.perf_counter()
            if stop:
                self.saver.wait()
                raise Stopped(f"stopped at step {course.step} of {config.steps}")
        return self._finish()

    def step(self, step: int) -> StepResult:
        """One optimizer step: the batch's mean loss, the gradient norm before clipping, and whether it was skipped."""
        return self.stepper.step(step)

    def validate(self) -> HeldOut:
        """Loss on the fixed held-out set, in the precision of the run."""
        length = self.config.data.sequence_length
        losses = self.stepper.losses(self.windows, lambda: self.job.beat(self.course.step, "scoring the held-out set"))
        result = held_out(losses, length, self.window_bytes)
        if not math.isfinite(result.val_loss):
            raise Diverged(f"the held-out loss is {result.val_loss} at step {self.course.step}")
        return result

    def save(self) -> None:
        """Saves this instant; the files are written while training goes on."""
        self._watch()
        self.job.beat(self.course.step, "saving a checkpoint")
        state = {**vars(self.course), **self.stepper.state()}
        self.saver.save(self.course.step, self.stepper.zero.held(), state)

    def close(self) -> None:
        """Closes files, the tracker and the saver; safe to call twice."""
        self.saver.close()
        if self.tracker is not None:
            self.tracker.finish()
        if self.metrics is not None:
            self.metrics.close()

    def _open(self, shards: Shards | None) -> Shards:
        config = self.config
        # Building takes as long as the corpus is large, and the other ranks wait for who builds.
        shards = shards or prepare(config.data, lambda stage, done, total: self.job.beat(0, f"data: {stage}"))
        tokenizer, planned = shards.tokenizer, config.data.tokenizer_fingerprint
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
        return shards

    def _resume(self) -> None:
        state = resume(
            self.directory / "checkpoints", self.stepper.zero.held(), self.config, self.job.mesh, self.report
        )
        if state is None:
            self.stepper.start()
            return
        self.course = Course(**{key: state[key] for key in vars(self.course)})
        self.stepper.load_state(state)
        self.report(f"resumed from step_{self.course.step} of {self.config.steps} steps")

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
        losses = torch.stack([result.loss for result in self.unwatched]).tolist()
        skips = torch.stack([result.skipped for result in self.unwatched]).tolist()
        self.unwatched.clear()
        first = self.course.step - len(losses) + 1
        past = [PastStep(step, *item) for step, item in enumerate(zip(losses, map(bool, skips), strict=True), first)]
        for line in self.course.look(past, self.config):
            self.report(line)

    def _log(self, result: StepResult, tokens_per_s: float, held_out: HeldOut | None) -> None:
        config, step = self.config, self.course.step
        self.last_held_out = held_out
        if self.metrics is None or self.tracker is None:
            return
        loss, norm = result.loss.item(), result.norm.item()
        flops_per_token = training_flops_per_token(config.model, config.data.sequence_length)
        record: dict[str, Any] = {
            "step": step,
            "tokens": step * config.batch_tokens,
            "flops": float(flops_per_token) * step * config.batch_tokens,
            "train_loss": loss if math.isfinite(loss) else None,  # a batch that was skipped
            "smoothed_loss": self.course.smoothed_loss,
            "lr": config.optimizer.learning_rate * learning_rate_factor(config, step - 1),
            "grad_norm": norm if math.isfinite(norm) else None,
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * flops_per_token / self.peak,
            "seconds": self.course.seconds,
        }
        if self.course.bad_steps:
            record["bad_steps"] = self.course.bad_steps
        if held_out is not None:
            record |= vars(held_out)
        self.metrics.write(record)
        self.tracker.log(record)

    def _finish(self) -> dict[str, Any]:
        self.save()
        held_out = self.last_held_out or self.validate()  # a run killed before its summary was written has none
        self.saver.wait()
        summary = self._summary(held_out)
        if self.tracker is not None:
            write_json(self.directory / "summary.json", summary)
            self.tracker.finish(summary)
        return summary

    def _summary(self, held_out: HeldOut) -> dict[str, Any]:
        config, seconds = self.config, self.course.seconds
        flops = flops_exact(config)
        return {
            "run_id": run_id(config),
            "step": config.steps,
            "checkpoint": f"checkpoints/step_{config.steps}",
            **vars(count_parameters(config.model)),
            "D": config.D,
            "flops_6nd": flops_6nd(config),
            "flops_exact": flops,
            **vars(held_out),
            "train_loss": self.course.smoothed_loss,
            "unique_tokens": self.stream.unique_tokens,
            "epochs": self.epochs,
            "warmup_share": warmup_steps(config) / config.steps,
            "bad_steps": self.course.bad_steps,
            "seconds": seconds,
            "tokens_per_s": config.D / max(seconds, 1e-9),
            "mfu": flops / max(seconds, 1e-9) / self.peak,
            "matmul_peak": self.peak,
            "device": device_name(self.job.device),
            "ranks": self.job.mesh.size,
            "micro_batch_size": self.stepper.micro,
            "precision": config.precision,
            "torch": torch.__version__,
        }
