"""Train a run by an external program: start it, read its metrics while it runs, and decide how it ended."""

from __future__ import annotations

import math
import re
import shlex
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RunConfig, run_id
from ..errors import Diverged, ProgramFailed, Stopped, UserError
from ..files import JsonLines, write_json
from ..flops import count_parameters, flops_6nd, flops_exact
from ..job.environment import detect
from ..job.failure import Cause
from ..job.progress import SMOOTHING
from ..tracker import Tracker, metrics
from .program import Program, environment_of, free_port, on_all_cores
from .template import PROGRAM, command_line

if TYPE_CHECKING:
    import pandas as pd

LOOK_SECONDS, READ_SECONDS = 0.2, 2.0  # between two looks at the program, and two readings of its log
READ_SHARE = 0.05  # of the time, at most, that the log is read
COUNTS = ("N_total", "N_active", "N_non_embedding")
OURS = ("step", "tokens", "flops", "train_loss", "val_loss", "lr", "grad_norm", "tokens_per_s")


def train_external(
    config: RunConfig,
    directory: Path,
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[str], None] = print,
    alive: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Train one run by its command, and return the content of summary.json; see `train.loop.train`.

    The first rank of a node starts the program, which serves all ranks of the job; the others do nothing.

    Raises:
        UserError: The command cannot be started.
        Diverged: The final loss is not a number.
        Stopped: `should_stop` returned True, and the program was stopped.
        ProgramFailed: The program ended with an error, without a result, or hung.
        OSError: The disk is full or not writable.
    """
    ranks = detect()
    if ranks.size > ranks.local_size:
        raise UserError(f"the job has {ranks.size} ranks on several nodes; an external program runs on one node")
    if ranks.rank > 0:
        return {}
    trainer, folder, port = config.trainer, directory / PROGRAM, free_port()
    folder.mkdir(exist_ok=True)
    command = command_line(config, folder, port)
    report(f"starts {shlex.join(command)}")
    on_all_cores(ranks.size)
    records = Records(config, directory, report)
    code, stopped, hung = None, False, False
    try:
        with Program(command, folder, directory / "log.txt", environment_of(port)) as program:
            printed, signed_at, read_at, pause = 0, time.monotonic(), time.monotonic(), READ_SECONDS
            while code is None and not stopped and not hung and program.error is None:
                code, stopped, now = program.wait(LOOK_SECONDS), should_stop(), time.monotonic()
                is_new = False
                if code is None and now > read_at + pause:
                    is_new = records.read()
                    read_at = time.monotonic()
                    pause = max(READ_SECONDS, (read_at - now) / READ_SHARE)
                if is_new or program.printed > printed:
                    printed, signed_at = program.printed, now
                hung = now > signed_at + trainer.silence_seconds
            if code is None and not program.stop(trainer.grace_seconds):
                report(f"the program ignored TERM for {trainer.grace_seconds:g} s and was killed")
        if program.error is not None:
            raise program.error
        records.read()
        if code is None and stopped:
            raise Stopped(f"stopped at step {records.last_step} of {config.steps}")
        if hung:
            silence = f"the program printed nothing for trainer.silence_seconds {trainer.silence_seconds:g}"
            raise ProgramFailed(f"{silence}, and was stopped", Cause.HUNG)
        if code:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            last = program.last_line()
            reason = f"the program {how}" + (f": {last}" if last else "")
            raise ProgramFailed(reason, Cause.KILLED if code < 0 else Cause.PROGRAM)
        summary = records.summary()
        write_json(directory / "summary.json", summary)
        records.tracker.finish(summary)
        return summary
    finally:
        records.close()


class Records:
    """A run's metrics.jsonl and tracker, filled from the log of its program."""

    def __init__(self, config: RunConfig, directory: Path, report: Callable[[str], None]) -> None:
        self.config, self.directory = config, directory
        self.written = {line["step"]: line for line in metrics(directory)}  # by earlier attempts too
        self._began, self._before = time.monotonic(), 0.0  # seconds of the steps before this attempt's first
        self._first = math.inf  # step that this attempt has logged first
        self._frame: pd.DataFrame | None = None
        self._facts: dict[str, Any] = {}
        self._problem = "it has written no log that is known"
        self._lines = JsonLines(directory / "metrics.jsonl")
        self.tracker = Tracker(config, run_id(config), directory, report)

    @property
    def last_step(self) -> int:
        return max(self.written, default=0)

    def read(self) -> bool:
        """Read the program's log, and write what is new. Returns whether anything is."""
        try:
            self._frame, self._facts = read_log(self.config, self.directory)
        except UserError as error:
            self._problem = str(error)
            return False
        seconds, new = time.monotonic() - self._began, False
        per_token = flops_exact(self.config) / self.config.D
        smoothed = before = None
        for row in self._frame.to_dict("records"):
            record = {name: row[name] for name in OURS if math.isfinite(row.get(name, math.nan))}
            record["step"] = step = int(record["step"])
            tokens = record["tokens"] = round(record.get("tokens", step * self.config.batch_tokens))
            record.setdefault("flops", per_token * tokens)
            if (loss := record.get("train_loss")) is not None:
                weight = 0.0 if smoothed is None or before is None else SMOOTHING ** (step - before)
                smoothed, before = weight * (smoothed or 0.0) + (1 - weight) * loss, step
                record["smoothed_loss"] = smoothed
            old = self.written.get(step, {})
            if all(old.get(name) == value for name, value in record.items()):
                continue
            if step < self._first:
                earlier = [line for line in self.written.values() if line["step"] < step]
                self._first = step
                self._before = earlier[-1].get("seconds", 0.0) if earlier else 0.0
            record["seconds"] = self._before + seconds
            record.setdefault("tokens_per_s", tokens / max(record["seconds"], 1e-9))
            self.written[step], new = record, True
            self._lines.write(record)
            self.tracker.log(record)
        self.written = dict(sorted(self.written.items()))
        return new

    def summary(self) -> dict[str, Any]:
        """Return the summary of a run whose program ended with exit code 0. Raises Diverged or ProgramFailed."""
        seconds = max((line.get("seconds", 0.0) for line in self.written.values()), default=0.0)
        result = final_numbers(self.config, self._frame, self._facts, self._problem)
        from ..hardware import pick_device

        return {
            "run_id": run_id(self.config),
            **result,
            "seconds": max(seconds, self._before + time.monotonic() - self._began),
            "tokens_per_s": result["D"] / max(seconds, 1e-9),
            "device": f"{pick_device(self.config.parallel.device).type} of {socket.gethostname()}",
            "ranks": self.config.parallel.world_size,
            "precision": self.config.precision,
            "trainer": f"{self.config.trainer.command} {self.config.trainer.version}".strip(),
        }

    def close(self) -> None:
        self.tracker.finish()
        self._lines.close()


def read_log(config: RunConfig, directory: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the metrics by step and the facts in the logs of a run's program. Raises UserError if there are none."""
    from ..logs.sources import ForeignRun, Source, find_sources, read_runs

    trainer, folder, log = config.trainer, directory / PROGRAM, directory / "log.txt"
    chosen = sorted(folder.glob(trainer.metrics)) if trainer.metrics not in (None, "stdout") else []
    found, problems = list[ForeignRun](), list[str]()
    for path in chosen or ([log] if trainer.metrics == "stdout" else [folder, log] if trainer.metrics is None else []):
        try:
            sources = find_sources(path)
        except UserError as error:
            problems.append(str(error))
            sources = [Source(log, "jsonl", (log,))] if path == log else []  # after lines of other kinds
        for source in sources:
            try:
                found += read_runs(source, trainer.columns or {}, config.batch_tokens)
            except UserError as error:  # such as of a file that is no log, or has no loss yet
                problems.append(re.sub(r"--map (\w+)=KEY", r"trainer.columns={\1:KEY}", str(error)))
        if found and not chosen:
            break
    if not found:
        raise UserError((problems or [f"trainer.metrics is {trainer.metrics!r}, and {folder} has no such file"])[-1])
    found.sort(key=lambda run: -run.metrics[["train_loss", "val_loss"]].notna().any(axis=1).sum())
    frame, facts = found[0].metrics.set_index("step"), dict[str, Any]()
    for run in found:
        frame = frame.combine_first(run.metrics.set_index("step"))
        facts = run.facts | facts
    return frame.sort_index().reset_index(), facts


def final_numbers(
    config: RunConfig, frame: pd.DataFrame | None, facts: dict[str, Any], problem: str
) -> dict[str, Any]:
    """Return the sizes and losses of a run whose program ended with exit code 0, from its metrics by step. Pure.

    The held-out loss of a program that logs none is the mean training loss of the last 5 % of its rows.

    Args:
        frame: None without a log that can be read; `problem` says why.

    Raises:
        Diverged: The last losses are not finite.
        ProgramFailed: There is no loss, or the last one is too long before the end of the run.
    """
    ended = "the program ended with exit code 0, but"
    if frame is None:
        raise ProgramFailed(f"{ended} without metrics: {problem}", Cause.ERROR)
    if "diverged" in facts:
        raise Diverged(f"the loss is not finite from step {facts['diverged']:.0f} on")
    logged = frame[frame[["train_loss", "val_loss"]].notna().any(axis=1)]
    tokens = logged["tokens"].fillna(logged["step"] * config.batch_tokens)
    last = float(tokens.iloc[-1])
    if not _reaches(tokens, config):
        where = f"its last loss is of token {last:.4g} of {config.D:.4g}"
        raise ProgramFailed(f"{ended} {where}; log tokens if its steps have other sizes", Cause.ERROR)
    tail = logged["train_loss"].dropna()
    train_loss = float(tail.iloc[-max(1, len(tail) // 20) :].mean()) if len(tail) else None
    val = logged["val_loss"].dropna()
    if len(val) and not _reaches(tokens[val.index], config):
        raise ProgramFailed(f"{ended} its last val_loss is of step {logged['step'][val.index[-1]]:.0f}", Cause.ERROR)
    D, counts = max(config.D, round(last)), vars(count_parameters(config.model))
    if stated := {name: round(facts[name]) for name in COUNTS if name in facts}:
        N = stated.get("N_active", stated.get("N_total", counts["N_active"]))
        counts = {"N_total": N, "N_active": N, "N_non_embedding": N, "N_kaplan": None} | stated
    six, own = 6.0 * counts["N_active"] * D, flops_exact(config) * D / config.D
    flops = logged["flops"].dropna()
    exact = own if not stated else float(flops.iloc[-1]) * D / last if len(flops) else six
    return {
        "step": config.steps,
        **counts,
        "D": D,
        "flops_6nd": six if stated else flops_6nd(config) * D / config.D,
        "flops_exact": exact,
        "val_loss": float(val.iloc[-1]) if len(val) else train_loss,
        "val_loss_se": None,
        "loss_of": "val_loss" if len(val) else "train_loss",
        "train_loss": train_loss if train_loss is not None else float(val.iloc[-1]),
    }


def _reaches(tokens: pd.Series, config: RunConfig) -> bool:
    """Return whether the next row after these would be beyond the end of the run."""
    gap = float(tokens.iloc[-1] - tokens.iloc[-2]) if len(tokens) > 1 else 0.0
    return float(tokens.iloc[-1]) + max(gap, config.batch_tokens) >= config.D
