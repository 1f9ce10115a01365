"""Every start of a run is one line of attempts.jsonl: when, where, why it ended, which steps, what was wasted.

Special here:
- an attempt that begins leaves attempt.json, which goes when its line is written. So whoever comes after one that was
  killed (holding the run's lock) writes the line in its place, with what was known at its start, even where state.json
  was damaged meanwhile; and a number that has its line is never written again;
- what an attempt wasted is known only when the next one has begun, from an older checkpoint than expected if the newest
  was damaged. So `read` reckons it anew from all lines;
- checkpoints are judged by names and sizes here; the trainer hashes them, and falls back where one is damaged.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...train.config import RunConfig
from ...train.errors import UserError
from ...train.files import JsonLines, read_json, write_atomic
from ...train.flops import flops_exact
from ...train.schedule import trunk_steps
from .directory import RunDirectory, SweepDirectory, now_on, this_user
from .retries import CAUSES, RETRIED, Decision, Policy, decide

LINES = "attempts.jsonl"
UNDER_WAY = "attempt.json"
STATES = {
    "done": "done", "preempted": "preempted", "time_limit": "preempted", "cancelled": "cancelled",
    "diverged": "diverged",
}  # fmt: skip  # that a cause ends a run in; any other is `failed`


@dataclass(frozen=True)
class Attempt:
    """One start of a run, from its beginning to its end. Times are the file system's, in seconds since the epoch."""

    attempt: int  # counts from 1
    began: float
    ended: float  # of one that was killed: its last sign of life
    seconds: float
    host: str | None  # the node of its first rank, as SLURM names it
    job_id: str | None
    cause: str  # one of retries.CAUSES
    reason: str | None  # in a sentence
    first_step: int  # where it went on from
    last_step: int  # that it is known to have taken
    saved_step: int  # of the newest checkpoint that it left
    flops: float  # of its own steps, exact convention
    flops_wasted: float  # of those among them that had to be made again, or that led nowhere
    gpus: float = 0.0  # ranks times GPUs, times `share`
    share: float = 1.0  # of its process or device: runs that are trained together have one between them
    budget: int = 0  # times that somebody had asked for a retry before; counted by `read`


NAMES = [item.name for item in fields(Attempt) if item.name != "budget"]
NUMBERS = [item.name for item in fields(Attempt) if item.type in ("int", "float")]


@dataclass(frozen=True)
class Begun:
    """What attempt.json holds: an attempt under way."""

    attempt: int
    began: float
    host: str | None
    job_id: str | None
    steps: int  # of the whole run
    begins: int  # step of the run's own first: 0, or where a branch leaves its trunk
    first_step: int
    metrics_bytes: int  # of metrics.jsonl: what is beyond is this attempt's
    flops_per_step: float
    gpus: float
    share: float
    machine: str | None = None  # whose kernel keeps its lock


def begin(run: RunDirectory, job: str | None, node: str | None = None, share: float = 1.0) -> Begun:
    """Writes that an attempt begins; the caller holds the run, and has settled what was before.

    Args:
        run: its directory.
        job: id of the job, as the state names it.
        node: where; None: nobody knows, for it was to begin and could not.
        share: of this process or device that the run gets.
    """
    numbers = [attempt.attempt for attempt in read(run)]
    begun = _begun(run, max([run.state().attempt, *numbers]) + 1, now_on(run.path), node, job, share)
    (run.path / UNDER_WAY).write_text(json.dumps(asdict(begun)), encoding="utf-8")
    return begun


def under_way(run: RunDirectory) -> Begun | None:
    """The attempt that has begun and has no line yet; None where there is none."""
    numbers = [attempt.attempt for attempt in read(run)]
    values, state = read_json(run.path / UNDER_WAY) or {}, run.state()
    try:
        begun = Begun(**{item.name: values[item.name] for item in fields(Begun)})
    except KeyError:
        if state.state != "running" or state.attempt <= max(numbers, default=0):
            return None
        # attempt.json is lost, as after a power cut: what is known is in state.json and on the disk.
        begun = _begun(run, state.attempt, state.since, state.host, state.job_id, 1.0)
        begun = replace(begun, metrics_bytes=0, machine=None)
    return None if begun.attempt in numbers else begun


def note(run: RunDirectory, cause: str, reason: str | None, ended: float | None = None) -> Attempt | None:
    """Writes the line of the attempt that now ends; the caller holds the run.

    Args:
        run: its directory.
        cause: one of `retries.CAUSES`.
        reason: in a sentence.
        ended: when, by the file system's clock; None: now.

    Returns:
        What was written; None where no attempt is under way.

    Raises:
        OSError: it could not be written; whoever settles the run next does.
    """
    if cause not in CAUSES:
        raise ValueError(f"{cause!r} is not a cause")
    begun = under_way(run)
    if begun is None:
        return None
    ended = max(begun.began, now_on(run.path) if ended is None else ended)
    saved = max(begun.begins, newest_checkpoint(run) or 0)
    last = max(begun.first_step, saved, _last_step(run, begun, cause))
    attempt = Attempt(
        attempt=begun.attempt, began=begun.began, ended=ended, seconds=ended - begun.began, host=begun.host,
        job_id=begun.job_id, cause=cause, reason=reason, first_step=begun.first_step, last_step=last, saved_step=saved,
        flops=begun.flops_per_step * (last - begun.first_step), flops_wasted=0.0, gpus=begun.gpus, share=begun.share,
    )  # fmt: skip
    attempt = with_waste([*read(run), attempt])[-1]
    values = asdict(attempt)
    del values["budget"]
    _append(run, values)
    (run.path / UNDER_WAY).unlink(missing_ok=True)
    return attempt


def settle_killed(run: RunDirectory, cause: str, reason: str) -> bool:
    """Writes how an attempt ended that could not say so itself; the caller holds the run.

    Args:
        run: its directory.
        cause: one of `retries.CAUSES`, for an attempt of which nothing else is known.
        reason: likewise, in a sentence.

    Returns:
        Whether the run was left in the middle of an attempt; its state is `failed` now.

    Raises:
        OSError: the disk is full.
    """
    state, begun = run.state(), under_way(run)
    if begun is not None and state.attempt == begun.attempt and state.state not in ("running", "queued", "planned"):
        # It has ended, and the disk was too full for its line.
        note(run, "disk" if state.state == "failed" else state.state, state.reason, state.since)
        return False
    if begun is not None:
        note(run, cause, reason, run.last_sign())
    if state.state != "running" and (begun is None or state.attempt >= begun.attempt):
        return False  # nobody is at it, or somebody has put it back in a queue already
    last = next((each for each in reversed(read(run)) if each.attempt == state.attempt), None)
    if begun is None and last is not None:  # killed between its line and its state
        run.set_state(STATES.get(last.cause, "failed"), reason=last.reason)
        return last.cause not in STATES
    number = 0 if begun is None else begun.attempt
    run.set_state("failed", attempt=max(state.attempt, number), reason=reason)
    return True


def amend(run: RunDirectory, cause: str, reason: str | None) -> None:
    """Corrects why the last attempt ended, where SLURM knew better; the caller holds the run."""
    lines = _lines(run)
    if lines and "attempt" in lines[-1]:
        lines[-1] |= {"cause": cause, "reason": reason}
        write_atomic(run.path / LINES, "".join(json.dumps(line) + "\n" for line in lines))


def read(run: RunDirectory) -> list[Attempt]:
    """The attempts that have ended, oldest first; lines that are torn or damaged are left out."""
    found: dict[int, Attempt] = {}
    budget = 0
    for line in _lines(run):
        if line.get("event") == "retry":
            budget += 1
        elif (attempt := _attempt(line, budget)) is not None:
            found.setdefault(attempt.attempt, attempt)
    return with_waste(list(found.values()))


def current(run: RunDirectory) -> list[Attempt]:
    """Those since somebody last asked for a retry by hand: what `retries.decide` goes by."""
    asked = sum(line.get("event") == "retry" for line in _lines(run))
    return [attempt for attempt in read(run) if attempt.budget == asked]


def decision(run: RunDirectory, policy: Policy, now: float) -> Decision:
    """What `retries.decide` says of a run; the retries of the whole sweep are counted only where they matter.

    Args:
        run: its directory.
        policy: the sweep's.
        now: the file system's clock.
    """
    past = current(run)
    said = decide(past, policy, 0, now)
    if said.again and past and past[-1].cause in RETRIED:
        said = decide(past, policy, retries_spent(SweepDirectory(run.path.parent.parent)), now)
    return said


def with_waste(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The same attempts with `flops_wasted` as it follows from all of them. Pure.

    Steps that a later attempt began before were made again. Of the last one, those after its newest checkpoint will be;
    and a run that ends diverged has led nowhere with all that was not wasted before.
    """
    if not attempts:
        return []
    last = attempts[-1]
    resumed = last.last_step if last.cause == "done" else last.saved_step
    wasted = []
    for attempt in reversed(attempts):
        kept = max(attempt.first_step, min(attempt.last_step, resumed)) - attempt.first_step
        wasted.append(attempt.flops * (1 - kept / max(1, attempt.last_step - attempt.first_step)))
        resumed = min(resumed, attempt.first_step)
    wasted.reverse()
    if last.cause == "diverged":
        wasted[-1] += sum(attempt.flops for attempt in attempts) - sum(wasted)
    return [replace(attempt, flops_wasted=flops) for attempt, flops in zip(attempts, wasted, strict=True)]


def retry_by_hand(run: RunDirectory, by: str | None = None) -> None:
    """Gives a run that is not done a new budget, and forgets what failed or cancelled it; its state is `planned`.

    Args:
        run: its directory.
        by: who asks; None: the user of this process.

    Raises:
        Busy: somebody is training it.
    """
    with run.lock(timeout=0.0):
        if run.is_done():
            return
        settle_killed(run, "killed", "its worker was killed")
        _append(run, {"event": "retry", "by": by or this_user(), "at": now_on(run.path)})
        run.forget_failure()
        run.forget_cancel()
        run.set_state("planned", host=None, job_id=None)


def retries_spent(sweep: SweepDirectory) -> int:
    """Retries that all runs together have had, each since somebody last asked for one by hand."""
    histories = (current(RunDirectory(path.parent)) for path in sweep.path.glob(f"runs/*/{LINES}"))
    return sum(attempt.cause in RETRIED for history in histories for attempt in history[:-1])


def newest_checkpoint(run: RunDirectory) -> int | None:
    """Step of the newest checkpoint whose files have the sizes that its manifest says; None where there is none."""
    names = (path.name.removeprefix("step_") for path in (run.path / "checkpoints").glob("step_*"))
    for step in sorted((int(name) for name in names if name.isdigit()), reverse=True):
        if visible_damage(run.path / "checkpoints" / f"step_{step}") is None:
            return step
    return None


def visible_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by the names and sizes of its files."""
    manifest = read_json(checkpoint / "manifest.json")
    if not manifest:
        return "its manifest.json is missing or unreadable"
    for name, entry in manifest.items():
        try:
            if (checkpoint / name).stat().st_size != entry["bytes"]:
                return f"{name} has another size than its manifest says"
        except (OSError, KeyError, TypeError):
            return f"{name} is missing"
    return None


def _begun(
    run: RunDirectory, number: int, began: float, host: str | None, job: str | None, share: float
) -> Begun:  # fmt: skip
    config = _config(run)
    begins = trunk_steps(config) if config is not None and config.parent is not None else 0
    try:
        size = (run.path / "metrics.jsonl").stat().st_size
    except OSError:
        size = 0
    return Begun(
        attempt=number, began=began, host=host, job_id=job, machine=socket.gethostname(), share=share,
        steps=0 if config is None else config.steps, begins=begins, first_step=max(begins, newest_checkpoint(run) or 0),
        metrics_bytes=size, flops_per_step=0.0 if config is None else flops_exact(config) / config.steps,
        gpus=0.0 if config is None else _gpus(config) * share,
    )  # fmt: skip


def _config(run: RunDirectory) -> RunConfig | None:
    try:
        return run.config()
    except UserError:  # which is what ends the attempt
        return None


def _gpus(config: RunConfig) -> int:
    """GPUs of a run that begins in this process."""
    if config.parallel.device == "cpu":
        return 0
    import torch

    return config.parallel.world_size if torch.cuda.is_available() else 0


def _last_step(run: RunDirectory, begun: Begun, cause: str) -> int:
    """The newest step that an attempt has written down; what other attempts wrote does not count."""
    if cause == "done":
        return begun.steps
    try:
        written = (run.path / "metrics.jsonl").stat().st_size > begun.metrics_bytes
    except OSError:
        return 0
    return int(run.last_metrics().get("step", 0)) if written else 0


def _lines(run: RunDirectory) -> list[dict[str, Any]]:
    """The whole lines of attempts.jsonl."""
    try:
        content = (run.path / LINES).read_bytes()
    except OSError:
        return []
    found = []
    for line in content.splitlines():
        try:
            value = json.loads(line)
        except ValueError:  # torn by a kill or a full disk, or no text at all
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _attempt(line: dict[str, Any], budget: int) -> Attempt | None:
    """A line as an attempt; None where it is none."""
    try:
        attempt = Attempt(**{name: line[name] for name in NAMES}, budget=budget)
    except KeyError:
        return None
    whole = all(isinstance(getattr(attempt, name), int | float) for name in NUMBERS)
    return attempt if attempt.cause in CAUSES and whole else None


def _append(run: RunDirectory, line: dict[str, Any]) -> None:
    file = JsonLines(run.path / LINES)
    try:
        file.write(line)
    finally:
        file.close()
