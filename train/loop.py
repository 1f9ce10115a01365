"""The training loop: a config in, a run directory out.

Special here:
- everything that decides a number (batch, learning rate, when to validate) is a pure function of the config and the
  step, so a run that was killed and resumed gives the same bits as one that was left alone;
- a `Trainer` keeps the books of one run and takes no step itself: `train` steps one run, `ensemble.py` many together;
- checkpoints are taken on a clock, written while training goes on, and never change the arithmetic;
- the loop asks `should_stop` after every step, and when told to stop it saves and leaves with `Stopped`;
- every rank runs this same loop. Rank 0 alone writes metrics and the summary; what a rank must not decide alone (to
  stop, to save) is agreed on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .checkpoint.checkpoint import resume
from .checkpoint.heldout import HeldOut, held_out, validation_steps
from .checkpoint.saver import Saver
from .config import RunConfig, run_id
from .data.loader import TrainStream, bytes_of, validation_windows
from .data.shards import Shards, prepare
from .errors import Diverged, Stopped, UserError
from .files import HALVED, JsonLines, write_json
from .flops import count_parameters, flops_6nd, flops_exact, training_flops_per_token
from .hardware import device_name, kept_peak
from .job.course import Course
from .job.job import Job, join
from .job.session import kept
from .parallel.layout import Held
from .parallel.zero import StepResult
from .planner.validation import validate
from .precision import PastStep, set_matmul_precision
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
    """Trains one run, resuming from its newest valid checkpoint, and returns what it writes to summary.json.

    With more than one rank (`parallel.tp`, `parallel.dp`) every rank calls this, with the same arguments.

    Args:
        config: complete and resolved (`model.vocab_size` and `data.fingerprint` filled in).
        directory: the run directory; metrics.jsonl, summary.json and checkpoints/ are written there.
        should_stop: asked after every step; True on any rank saves a checkpoint and raises `Stopped` on all.
        report: gets one line for everything that a person should know.
        shards: tokens to train on; prepared from the config when not given.
        alive: called in work that takes long and has no steps, such as preparing the data; its answer is not looked at.

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
    with join(config, directory, report) as job:
        say = report if job.mesh.rank == 0 else _silent
        opened = job.together(lambda: open_shards(config, shards, job, alive))
        stream = TrainStream(opened, config.data.sequence_length, config.seed)
        stepper = Stepper(config, job.mesh, job.device, stream, say, directory / HALVED)
        peak = kept_peak(job.device, stepper.dtype) * job.mesh.size
        trainer = Trainer(config, directory, say, opened, job, stepper, peak, alive=alive)
        try:
            return _run(trainer, stepper, should_stop)
        finally:
            trainer.close()


def _run(trainer: Trainer, stepper: Stepper, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """Steps until the end of D; see `train`."""
    job = trainer.job
    while trainer.goes_on:
        job.beat(trainer.course.step, "in a step")
        trainer.took(stepper.step(trainer.course.step))
        if trainer.goes_on:
            stop, save = job.agree(stop=should_stop(), save=trainer.save_is_due())
            trainer.pause(stop, save)
    return trainer.finish()


def _silent(line: str) -> None:
    """What rank 0 says is said once."""


def open_shards(config: RunConfig, shards: Shards | None, job: Job, alive: Callable[[], object]) -> Shards:
    """The tokens that a run trains on, those given or prepared from its config.

    Args:
        config: of the run.
        shards: those given.
        job: this rank's part in it.
        alive: called while they are prepared, so that whoever waits for a step knows that this one works.

    Raises:
        UserError: the tokenizer is not the one that the run was planned with, or not the model's.
    """

    def beat(stage: str, done: float, total: float) -> None:
        # Building takes as long as the corpus is large, and the other ranks wait for who builds.
        job.beat(0, f"data: {stage}")
        alive()

    shards = shards or kept(("shards", repr(config.data)), lambda: prepare(config.data, beat))
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


class Holder(Protocol):
    """Who owns weights and moments."""

    def held(self) -> Sequence[Held]:
        """Writable views of them."""


class Steps(Protocol):
    """What a trainer needs of who takes its steps: `Stepper`, or a member of an ensemble."""

    micro: int  # sequences in one forward pass
    stream: TrainStream

    @property
    def zero(self) -> Holder: ...

    def start(self) -> None:
        """Sets the initial weights."""

    def state(self) -> dict[str, Any]:
        """Plain numbers for the checkpoint."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state()`, after `zero.held()` was filled."""

    def losses(self, windows: Tensor, beat: Callable[[], None]) -> Tensor:
        """Summed nats of each window (n, T + 1) -> (n,) float64 on the CPU."""


class Trainer:
    """The books of one run, kept by one rank between steps: its course, metrics, held-out losses and checkpoints."""

    def __init__(
        self, config: RunConfig, directory: Path, report: Callable[[str], None], shards: Shards, job: Job,
        stepper: Steps, peak: float, *, ensemble: int = 1, clock: Callable[[], float] = time.perf_counter,
        alive: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Resumes the run from its newest valid checkpoint, or starts it.

        Args:
            config: of the run.
            directory: of the run.
            report: gets a line for everything that a person should know.
            shards: what `open_shards` gave.
            job: this rank's part in it.
            stepper: holds the weights, and is told to take steps by somebody else.
            peak: FLOP/s against which MFU is stated, of all ranks.
            ensemble: runs that are trained together, this one among them.
            clock: seconds that the run pays for; of an ensemble each member pays its share.
            alive: called while the held-out set is scored, which takes long and has no steps.
        """
        self.config, self.directory, self.report, self.job = config, directory, report, job
        self.stepper, self.peak, self.ensemble, self.clock, self.alive = stepper, peak, ensemble, clock, alive
        self.tokenizer = shards.tokenizer
        windows = validation_windows(shards, config.data.sequence_length, config.data.validation_tokens)
        self.windows = torch.from_numpy(windows)
        self.window_bytes = bytes_of(windows[:, 1:], self.tokenizer)
        self.validate_at = validation_steps(config)
        self.course = Course()
        self.last_held_out: HeldOut | None = None
        self.unwatched: list[StepResult] = []  # still on the device, so that no step waits for its own loss
        self.saver = Saver(directory / "checkpoints", job.mesh, config, self.tokenizer, report)
        self._resume()
        self._say_epochs()
        self.metrics = JsonLines(directory / "metrics.jsonl") if self.leads else None
        self.tracker = Tracker(config, run_id(config), directory, report) if self.leads else None
        self.start_clock()

    @property
    def leads(self) -> bool:
        """Whether this rank writes what a run writes once."""
        return self.job.mesh.rank == 0

    @property
    def goes_on(self) -> bool:
        """Whether there are steps to take."""
        return self.course.step < self.config.steps

    def start_clock(self) -> None:
        """From here on the run pays for time; again where it had to wait before its first step."""
        self._zero_seconds = self.clock() - self.course.seconds
        self._logged_at, self._logged_step = self.clock(), self.course.step
        self._saved_at = time.perf_counter()  # by the wall, for a kill costs what the wall has seen

    def took(self, result: StepResult) -> None:
        """The books of a step that was taken: looks at losses, scores and logs where the config says so.

        Raises:
            Diverged: the loss is not a number, or rose out of its band.
        """
        config, course = self.config, self.course
        course.step += 1
        self.unwatched.append(result)
        now = self.clock()
        course.seconds = now - self._zero_seconds
        if course.step % config.log_every == 0 or course.step in self.validate_at or not self.goes_on:
            self._watch()
            tokens_per_s = (course.step - self._logged_step) * config.batch_tokens / (now - self._logged_at)
            held_out = self.validate() if course.step in self.validate_at else None
            self._log(result, tokens_per_s, held_out)
            self._logged_at, self._logged_step = self.clock(), course.step

    def save_is_due(self) -> bool:
        """Whether this rank's clock asks for a checkpoint; the leader's counts."""
        return self.leads and time.perf_counter() - self._saved_at >= self.config.checkpoint.every_seconds

    def pause(self, stop: bool, save: bool) -> None:
        """Between two steps: saves where told to or where the config names the step.

        Raises:
            Stopped: with `stop`, after saving.
        """
        config, step = self.config, self.course.step
        every, named = config.checkpoint.every_steps, config.checkpoint.at_steps or ()
        if stop or save or step in named or (every is not None and step % every == 0):
            self.save()
            self._saved_at = time.perf_counter()
        if stop:
            self.saver.wait()
            raise Stopped(f"stopped at step {step} of {config.steps}")

    def validate(self) -> HeldOut:
        """Loss on the fixed held-out set, in the precision of the run."""

        def beat() -> None:
            self.job.beat(self.course.step, "scoring the held-out set")
            self.alive()

        losses = self.stepper.losses(self.windows, beat)
        result = held_out(losses, self.config.data.sequence_length, self.window_bytes)
        if not math.isfinite(result.val_loss):
            raise Diverged(f"the held-out loss is {result.val_loss} at step {self.course.step}")
        return result

    def save(self) -> None:
        """Saves this instant; the files are written while training goes on."""
        self._watch()
        self.job.beat(self.course.step, "saving a checkpoint")
        state = {**vars(self.course), **self.stepper.state()}
        self.saver.save(self.course.step, self.stepper.zero.held(), state)

    def finish(self) -> dict[str, Any]:
        """After the last step: the last checkpoint, the summary, and the tracker's end."""
        self.save()
        held_out = self.last_held_out or self.validate()  # a run killed before its summary was written has none
        self.saver.wait()
        summary = self._summary(held_out)
        if self.tracker is not None:
            write_json(self.directory / "summary.json", summary)
            self.tracker.finish(summary)
        return summary

    def close(self) -> None:
        """Closes files, the tracker and the saver; safe to call twice."""
        self.saver.close()
        if self.tracker is not None:
            self.tracker.finish()
        if self.metrics is not None:
            self.metrics.close()

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
        self.epochs = self.stepper.stream.epochs(self.config.D)
        if self.epochs > 1:
            self.report(
                f"{self.config.D:,} tokens are {self.epochs:.2f} epochs of the {self.stepper.stream.unique_tokens:,} "
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
            "unique_tokens": self.stepper.stream.unique_tokens,
            "epochs": self.epochs,
            "warmup_share": warmup_steps(config) / config.steps,
            "bad_steps": self.course.bad_steps,
            "seconds": seconds,
            "tokens_per_s": config.D / max(seconds, 1e-9),
            "mfu": flops / max(seconds, 1e-9) / self.peak,
            "matmul_peak": self.peak,
            "device": device_name(self.job.device),
            "ranks": self.job.mesh.size,
            "ensemble": self.ensemble,
            "micro_batch_size": self.stepper.micro,
            "precision": config.precision,
            "torch": torch.__version__,
        }
