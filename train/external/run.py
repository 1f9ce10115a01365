"""Train a run by an external program: start it, read its metrics while it runs, and decide how it ended."""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RunConfig, run_id
from ..errors import Diverged, Stopped, UserError
from ..files import JsonLines, write_json
from ..flops import count_parameters, flops_exact
from ..job.environment import detect
from ..job.failure import Cause, Failure, RankError
from ..planner.command import PROGRAM, command_line, newest_checkpoint
from ..tracker import Tracker, metrics
from .program import Program

if TYPE_CHECKING:
    import pandas as pd

LOOK_SECONDS, READ_SECONDS = 0.2, 2.0  # between checks of a program, and at least between reads of its log
READ_SHARE = 0.05  # largest share of the time that reading logs takes
LOSSES, COUNTS = ["val_loss", "train_loss"], ("N_total", "N_active", "N_non_embedding")
OURS = ("step", "tokens", "flops", "train_loss", "smoothed_loss", "val_loss", "lr", "grad_norm", "tokens_per_s")


def train_external(config: RunConfig, directory: Path, stop: Callable[[], bool], report: Callable[[str], None]) -> None:
    """Train one run by its command, like `train.loop.train`; the first rank of the job starts it for all ranks."""
    ranks, trainer, folder = detect(), config.trainer, directory / PROGRAM
    if ranks.rank > 0:
        return
    if ranks.size > 1:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # SLURM gives this rank only its own cores
    folder.mkdir(exist_ok=True)
    newest, command = newest_checkpoint(config, folder), command_line(config, folder)
    report(f"starts {shlex.join(command)}")
    with closing(Records(config, directory, report)) as records:
        rows = len(records.written)
        with Program(command, folder, directory / "log.txt") as program:
            code: int | None = None
            stopped, hung, printed = False, False, 0
            last_sign, next_read = time.monotonic(), time.monotonic() + READ_SECONDS
            while code is None and not (stopped or hung or program.error):
                code, now, new = program.wait(LOOK_SECONDS), time.monotonic(), False
                if code:
                    time.sleep(LOOK_SECONDS)  # the signal of SLURM may have come to the program first
                stopped = stop()
                if code is None and now > next_read:
                    new = records.read()
                    next_read = time.monotonic() + max(READ_SECONDS, (time.monotonic() - now) / READ_SHARE)
                if new or program.printed > printed:
                    printed, last_sign = program.printed, now
                hung = now > last_sign + trainer.silence_seconds
            if code is None and not program.stop(trainer.grace_seconds):
                report(f"the program ignored TERM for trainer.grace_seconds {trainer.grace_seconds:g} and is killed")
        records.read()
        if program.error is not None:
            raise program.error
        if stopped and code != 0:
            raise Stopped(f"stopped at step {max(records.written, default=0)} of {config.steps}")
        if hung:
            silence = f"trainer.silence_seconds {trainer.silence_seconds:g}"
            raise RankError(Failure(Cause.HUNG, f"the program printed nothing for {silence}, and was stopped"))
        if code:
            if newest and newest[-1].exists() and len(records.written) == rows:
                _count_failure(newest[-1], directory, report)
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            cause = Cause.KILLED if code < 0 else Cause.PROGRAM
            raise RankError(Failure(cause, f"the program {how}: {program.last_line() or 'it printed nothing'}"))
        records.finish(ranks.size)


def _count_failure(checkpoint: Path, directory: Path, report: Callable[[str], None]) -> None:
    """Record that the program failed from a checkpoint before it logged a row; the second time, move it to damaged/."""
    seen = directory / "failed_resume.txt"
    if not (seen.exists() and seen.read_text() == checkpoint.name):
        seen.write_text(checkpoint.name)
        return
    (directory / "damaged").mkdir(exist_ok=True)
    checkpoint.rename(directory / "damaged" / f"{checkpoint.name}.{time.time_ns()}")
    report(f"the program failed twice from {checkpoint.name}, which is now in {directory / 'damaged'}")


class Records:
    """A run's metrics.jsonl, tracker and summary, from the log of its program."""

    def __init__(self, config: RunConfig, directory: Path, report: Callable[[str], None]) -> None:
        self.config, self.directory = config, directory
        self.written = {line["step"]: line for line in metrics(directory)}  # by earlier attempts too
        before = max((line.get("seconds", 0.0) for line in self.written.values()), default=0.0)
        self._zero_seconds = time.monotonic() - before  # `seconds` counts all attempts
        self._log: tuple[pd.DataFrame, dict[str, Any]] | None = None
        self._problem = ""
        self._lines = JsonLines(directory / "metrics.jsonl")
        self._tracker = Tracker(config, run_id(config), directory, report)

    def read(self) -> bool:
        """Read the program's log, and write the rows that are new. Returns whether there are any."""
        try:
            self._log = frame, _ = read_log(self.config, self.directory)
        except UserError as error:
            self._problem = str(error)
            return False
        seconds, new = time.monotonic() - self._zero_seconds, False
        frame["smoothed_loss"] = frame["train_loss"].ewm(alpha=0.1).mean()  # over rows; chosen by hand
        for row in frame.to_dict("records"):
            record = {name: row[name] for name in OURS if math.isfinite(row.get(name, math.nan))}
            record["step"] = step = int(record["step"])
            tokens = record["tokens"] = round(record.get("tokens", step * self.config.batch_tokens))
            record.setdefault("flops", flops_exact(self.config) / self.config.D * tokens)
            if record.items() <= self.written.get(step, {}).items():
                continue
            self.written[step] = record = {"tokens_per_s": tokens / max(seconds, 1e-9), "seconds": seconds} | record
            self._lines.write(record)
            self._tracker.log(record)
            new = True
        return new

    def finish(self, ranks: int) -> None:
        """Write the summary of a run whose program ended with exit code 0."""
        if self._log is None:
            problem = f"the program ended with exit code 0 without metrics: {self._problem}"
            raise RankError(Failure(Cause.ERROR, problem))
        seconds, numbers = time.monotonic() - self._zero_seconds, final_numbers(self.config, *self._log)
        about = {"run_id": run_id(self.config), "trainer": "command", "ranks": ranks, "seconds": seconds}
        summary = about | numbers | {"tokens_per_s": numbers["D"] / seconds, "precision": self.config.precision}
        write_json(self.directory / "summary.json", summary)
        self._tracker.finish(summary)

    def close(self) -> None:
        self._tracker.finish()
        self._lines.close()


def read_log(config: RunConfig, directory: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the metrics by step and the facts in the logs of a run's program. Raises UserError if there are none."""
    from ..logs.sources import ForeignRun, Source, find_sources, read_runs

    pattern, folder, log = config.trainer.metrics, directory / PROGRAM, directory / "log.txt"
    places = [log] if pattern == "stdout" else sorted(folder.glob(pattern)) if pattern else [folder, log]
    runs, problem = list[ForeignRun](), f"trainer.metrics is {pattern!r}, and {folder} has no such file"
    for place in places:
        try:
            sources = find_sources(place)
        except UserError as error:
            problem, sources = str(error), [Source(log, "jsonl", (log,))] if place == log else []
        for source in [] if runs and pattern is None else sources:
            try:
                runs += read_runs(source, config.trainer.columns or {}, config.batch_tokens)
            except (UserError, OSError) as error:  # for instance a checkpoint that is JSON too
                problem = re.sub(r"--map (\w+)=KEY", r"trainer.columns={\1:KEY}", str(error))
                problem = problem.replace("--map names", "trainer.columns names")
    if not runs:
        raise UserError(problem)
    runs.sort(key=lambda run: -run.metrics[LOSSES].notna().any(axis=1).sum())
    frame, facts = runs[0].metrics.set_index("step"), dict[str, Any]()
    for run in runs:
        frame, facts = frame.combine_first(run.metrics.set_index("step")), run.facts | facts
    return frame.sort_index().reset_index(), facts


def final_numbers(config: RunConfig, frame: pd.DataFrame, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes and losses of a run from its metrics by step and the facts of its log. Pure.

    Without a held-out loss, the loss is the mean of the last 5 % of the training losses.
    """
    if "diverged" in facts:
        raise Diverged(f"the loss is not finite from step {facts['diverged']:.0f} on")
    columns = {name: frame.dropna(subset=[name]) for name in LOSSES}
    kind = next(name for name in LOSSES if len(columns[name]))
    tokens = columns[kind]["tokens"]
    gap = max(config.batch_tokens, *tokens.diff().iloc[-1:].fillna(0.0))
    if (last := tokens.iloc[-1]) + gap < config.D:
        where = f"its last {kind} is at token {last:.4g} of {config.D:.4g}"
        raise RankError(Failure(Cause.ERROR, f"the program ended with exit code 0, but {where}; it must log the end"))
    ends = {name: rows[name].iloc[-max(1, len(rows) // 20) :] for name, rows in columns.items() if len(rows)}
    means = {name: float(values.mean()) for name, values in ends.items()}
    D, counts = max(config.D, round(last)), vars(count_parameters(config.model))
    exact = flops_exact(config) * D / config.D
    if (stated := {name: round(facts[name]) for name in COUNTS if name in facts}) or config.model.size:
        N = stated.get("N_active", stated.get("N_total", counts["N_active"]))
        counts = dict.fromkeys(counts) | {"N_total": N, "N_active": N} | stated
        exact = 6.0 * N * D if stated else exact
    logged = frame["flops"].dropna()
    flops = {"flops_6nd": 6.0 * counts["N_active"] * D, "flops_exact": float(logged.iloc[-1]) if len(logged) else exact}
    loss = float(columns[kind][kind].iloc[-1]) if kind == "val_loss" else means[kind]
    losses = {"val_loss": loss, "val_loss_se": None, "loss_of": kind}  # held-out or training text
    return {"step": config.steps, "D": D} | counts | flops | losses | {"train_loss": means.get("train_loss")}
