"""Every start of a run is one line of attempts.jsonl: when, where, why it ended, which steps; and what follows from it.

Special here:
- an attempt that begins leaves attempt.json, which goes when its line is written. Whoever next holds the run's lock
  writes the line of one that was killed; no number is written twice;
- what an attempt wasted depends on where the next one resumes, so it is computed from all lines;
- failures that are not the run's own fault are retried within a budget per run and one per sweep, after a pause that
  doubles; what would only happen again (bad input, an exception, a divergence) never is;
- being told to stop counts against `max_requeues` alone.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...train.config import RunConfig
from ...train.errors import UserError
from ...train.files import JsonLines, read_document, read_json, read_json_lines, write_atomic
from ...train.flops import flops_exact
from ...train.job.failure import Cause
from ...train.schedule import trunk_steps
from .directory import RunDirectory, SweepDirectory, now_on
from .forms import Amount, Count

if TYPE_CHECKING:
    from ..config import ClusterConfig

LINES = "attempts.jsonl"
UNDER_WAY = "attempt.json"
ON_NODE = (str(Cause.HUNG), str(Cause.NODE), "lost")  # the next attempt goes to another node
# Against the budgets; trunk: a branch's trunk is not there yet.
RETRIED = (str(Cause.KILLED), str(Cause.UNKNOWN), *ON_NODE, str(Cause.DISK), "trunk")
INTERRUPTED = ("preempted", "time_limit")
CAUSES = ("done", *INTERRUPTED, "cancelled", *RETRIED, *(str(cause) for cause in Cause if cause not in RETRIED))
LONGEST_WAIT = 3600.0  # seconds between two attempts
MARGIN_SECONDS = 10.0  # beyond three periods without a sign of life, for a file server that stalls


@dataclass(frozen=True)
class Policy:
    """How much is tried again, and when a run counts as dead; travels in the arguments of jobs."""

    max_requeues: int = 20  # times that a run may be told to stop and go on
    retries: int = 3  # per run, for what was not its own fault
    sweep_retries: int = 100  # of all runs of a sweep together
    backoff_seconds: float = 30.0  # before the first retry, doubled for each further one
    heartbeat_seconds: float = 10.0  # between two signs of life
    hang_seconds: float = 1800.0  # without a step, after which a run counts as hung

    @classmethod
    def of(cls, cluster: ClusterConfig) -> Policy:
        same = {item.name: getattr(cluster, item.name) for item in fields(cls) if item.name != "hang_seconds"}
        return cls(**same, hang_seconds=60 * cluster.hang_minutes)

    @property
    def silence_seconds(self) -> float:
        """Without a sign of life, after which a run counts as dead."""
        return 3 * self.heartbeat_seconds + MARGIN_SECONDS


@dataclass(frozen=True)
class Decision:
    """Whether a run is tried again, when and where."""

    again: bool
    wait_seconds: float  # from now on, before it may start
    avoid: tuple[str, ...]  # nodes that it must not start on; the newest last
    why: str  # in a few words, for a reason or a log


@dataclass(frozen=True)
class Attempt:
    """One start of a run, from its beginning to its end. Times are the file system's, in seconds since the epoch."""

    attempt: Count  # counts from 1
    began: Amount
    ended: Amount  # of one that was killed: its last sign of life
    seconds: Amount
    host: str | None  # the node of its first rank, as SLURM names it
    job_id: str | None
    cause: str  # one of CAUSES
    reason: str | None  # in a sentence
    first_step: Count  # where it resumed
    last_step: Count  # the last that it is known to have taken
    saved_step: Count  # of the newest checkpoint that it left
    flops: Amount  # of its own steps, exact convention
    flops_wasted: Amount  # of those among them that had to be made again, or that led nowhere
    gpus: Amount = 0.0  # ranks times GPUs, times `share`
    share: Amount = 1.0  # of its process, which earlier versions divided between runs
    at_fault: tuple[str, ...] = ()  # nodes, where its ranks were on several
    budget: int = 0  # times that somebody had asked for a retry before; counted by `read`

    @property
    def paid(self) -> float:
        """Seconds of its devices."""
        return self.seconds * self.share


NAMES = [item.name for item in fields(Attempt) if item.name != "budget"]


@dataclass(frozen=True)
class Begun:
    """What attempt.json holds."""

    attempt: Count
    began: Amount
    host: str | None
    job_id: str | None
    steps: Count  # of the whole run
    begins: Count  # step of the run's own first: 0, or where a branch leaves its trunk
    first_step: Count
    metrics_bytes: Count  # size of metrics.jsonl: what is beyond is this attempt's
    flops_per_step: Amount
    gpus: Amount
    share: Amount
    machine: str | None = None  # whose kernel keeps its lock


def decide(attempts: Sequence[Attempt], policy: Policy, spent: int, now: float) -> Decision:
    """Whether a run is tried again after its attempts, oldest first, where the sweep has `spent` retries. Pure."""
    if not attempts:
        return Decision(True, 0.0, (), "it has not begun")
    last = attempts[-1]
    ours = [attempt for attempt in attempts if attempt.budget == last.budget]
    nodes = [node for attempt in ours if attempt.cause in ON_NODE for node in attempt.at_fault or (attempt.host,)]
    avoid = tuple(reversed(dict.fromkeys(node for node in reversed(nodes) if node is not None)))

    def no(why: str) -> Decision:
        return Decision(False, 0.0, avoid, why)

    if last.cause in INTERRUPTED:
        stops = sum(attempt.cause in INTERRUPTED for attempt in ours)
        if stops > policy.max_requeues:
            most = f"{policy.max_requeues} requeues, all that cluster.max_requeues allows"
            return no(f"it had to stop again after {most}")
        return Decision(True, 0.0, avoid, f"it was stopped, and goes on (requeue {stops} of {policy.max_requeues})")
    if last.cause == "memory":
        if sum(attempt.cause == "memory" for attempt in ours) > 1:
            return no("its memory ran out with the smaller micro-batch too")
        return Decision(True, 0.0, avoid, "its memory ran out, and it goes on with a smaller micro-batch")
    if last.cause not in RETRIED:
        return no(f"what ended it ({last.cause}) would only happen again" if last.cause != "done" else "it is done")
    failures = sum(attempt.cause in RETRIED for attempt in ours)
    if failures > policy.retries:
        return no(f"it has had {policy.retries} retries, all that cluster.retries allows")
    if spent >= policy.sweep_retries:
        return no(f"the sweep has had {spent} retries, all that cluster.sweep_retries allows")
    pause = min(LONGEST_WAIT, policy.backoff_seconds * 2.0 ** min(failures - 1, 64))
    wait = min(pause, max(0.0, last.ended + pause - now))
    return Decision(True, wait, avoid, f"retry {failures} of {policy.retries} after {last.cause}")


def decision(run: RunDirectory, policy: Policy, now: float) -> Decision:
    """`decide` for a run on disk."""
    past = current(run)
    said = decide(past, policy, 0, now)
    if said.again and past and past[-1].cause in RETRIED:
        said = decide(past, policy, retries_spent(SweepDirectory(run.path.parent.parent)), now)
    return said


def begin(run: RunDirectory, job: str | None, node: str | None = None) -> Begun:
    """Writes that an attempt begins; the caller holds the run. Without a node it was to begin and could not."""
    numbers = [attempt.attempt for attempt in read(run)]
    begun = _begun(run, max([run.state().attempt, *numbers]) + 1, now_on(run.path), node, job)
    (run.path / UNDER_WAY).write_text(json.dumps(asdict(begun)), encoding="utf-8")
    return begun


def under_way(run: RunDirectory) -> Begun | None:
    """The attempt that has begun and has no line yet."""
    numbers = [attempt.attempt for attempt in read(run)]
    begun, state = None, run.state()
    with suppress(UserError):
        begun = read_document(run.path / UNDER_WAY, Begun)
    if begun is None:
        if state.state != "running" or state.attempt <= max(numbers, default=0):
            return None
        # attempt.json is lost, as after a power cut: what is known is in state.json and on the disk.
        begun = _begun(run, state.attempt, state.since, state.host, state.job_id)
        begun = replace(begun, metrics_bytes=0, machine=None)
    return None if begun.attempt in numbers else begun


def note(
    run: RunDirectory, cause: str, reason: str | None, ended: float | None = None, at_fault: Sequence[str] = ()
) -> Attempt | None:
    """Writes the line of the attempt that ends now, or `ended`; None where none is under way. The caller holds the run.

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
        **{name: value for name, value in asdict(begun).items() if name in NAMES},
        ended=ended,
        seconds=ended - begun.began,
        cause=cause,
        reason=reason,
        last_step=last,
        saved_step=saved,
        flops=begun.flops_per_step * (last - begun.first_step),
        flops_wasted=0.0,
        at_fault=tuple(at_fault),
    )
    attempt = with_waste([*read(run), attempt])[-1]
    values = asdict(attempt)
    del values["budget"]
    append_line(run, values)
    (run.path / UNDER_WAY).unlink(missing_ok=True)
    return attempt


def amend(run: RunDirectory, cause: str, reason: str | None) -> None:
    """Corrects why the last attempt ended, where SLURM knew better; the caller holds the run."""
    lines = _lines(run)
    if lines and "attempt" in lines[-1]:
        lines[-1] |= {"cause": cause, "reason": reason}
        write_atomic(run.path / LINES, "".join(json.dumps(line) + "\n" for line in lines))


def read(run: RunDirectory) -> list[Attempt]:
    """The attempts that have ended, oldest first, without torn or damaged lines."""
    found: dict[int, Attempt] = {}
    budget = 0
    for line in _lines(run):
        if line.get("event") == "retry":
            budget += 1
        elif (attempt := _attempt(line, budget)) is not None:
            found.setdefault(attempt.attempt, attempt)
    return with_waste(list(found.values()))


def current(run: RunDirectory) -> list[Attempt]:
    """Those since somebody last asked for a retry by hand, by which `decide` goes."""
    asked = sum(line.get("event") == "retry" for line in _lines(run))
    return [attempt for attempt in read(run) if attempt.budget == asked]


def sign_age(run: RunDirectory, now: float | None = None) -> float | None:
    """Seconds since the last sign of life, if any; `now` is `now_on` of the same file system."""
    seen = run.last_sign()
    return None if seen is None else max(0.0, (now_on(run.path) if now is None else now) - seen)


def is_stale(run: RunDirectory, policy: Policy) -> bool:
    """Whether a run that says `running` has given no sign of life for too long."""
    seconds = sign_age(run)
    return seconds is None or seconds > policy.silence_seconds


def is_elsewhere(run: RunDirectory, policy: Policy) -> bool:
    """Whether a run gives signs of life on another machine, whose locks may not reach here."""
    begun = under_way(run)
    return begun is not None and begun.machine != socket.gethostname() and not is_stale(run, policy)


def with_waste(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The same attempts with `flops_wasted` as it follows from all of them. Pure.

    Wasted are the steps that a later attempt made again, those of the last one after its newest checkpoint, and all
    steps of a run that diverged.
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


def unrecorded_steps(history: Sequence[Attempt], begins: int, ends: int) -> int:
    """Steps from `begins` to `ends` that no attempt tells of, as where a run's folder was removed while it trained."""
    return max(0, min((attempt.first_step for attempt in history), default=ends) - begins) if ends > begins else 0


def retries_spent(sweep: SweepDirectory) -> int:
    """Retries of all runs since somebody last asked for one by hand."""
    histories = (current(RunDirectory(path.parent)) for path in sweep.path.glob(f"runs/*/{LINES}"))
    return sum(attempt.cause in RETRIED for history in histories for attempt in history[:-1])


def newest_checkpoint(run: RunDirectory) -> int | None:
    """Step of the newest checkpoint whose files have their manifest's sizes; the trainer checks their hashes."""
    folders = {step: run.path / "checkpoints" / f"step_{step}" for step in reversed(run.saved_steps())}
    return next((step for step, folder in folders.items() if visible_damage(folder) is None), None)


def visible_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by the names and sizes of its files."""
    manifest = read_json(checkpoint / "manifest.json")
    if not manifest:
        return "its manifest.json is missing or unreadable"
    for name, entry in manifest.items():
        try:
            if (checkpoint / name).stat().st_size != entry["bytes"]:
                return f"{name} has another size than its manifest says"
        except (OSError, ValueError, KeyError, TypeError):
            return f"{name} is missing"
    return None


def _begun(run: RunDirectory, number: int, began: float, host: str | None, job: str | None) -> Begun:
    first_step, machine = newest_checkpoint(run) or 0, socket.gethostname()
    begun = Begun(number, began, host, job, 0, 0, first_step, _metrics_bytes(run), 0.0, 0.0, 1.0, machine)
    try:
        config = run.config()
    except UserError:  # which is what ends the attempt
        return begun
    begins = trunk_steps(config) if config.parent is not None else 0
    return replace(
        begun,
        steps=config.steps,
        begins=begins,
        first_step=max(begins, first_step),
        flops_per_step=flops_exact(config) / config.steps,
        gpus=_gpus(config),
    )


def _metrics_bytes(run: RunDirectory) -> int:
    try:
        return (run.path / "metrics.jsonl").stat().st_size
    except OSError:
        return 0


def _gpus(config: RunConfig) -> int:
    if config.parallel.device == "cpu":
        return 0
    import torch

    return config.parallel.world_size if torch.cuda.is_available() else 0


def _last_step(run: RunDirectory, begun: Begun, cause: str) -> int:
    """The newest step that this attempt has written down."""
    if cause == "done":
        return begun.steps
    return int(run.last_metrics().get("step", 0)) if _metrics_bytes(run) > begun.metrics_bytes else 0


def _lines(run: RunDirectory) -> list[dict[str, Any]]:
    """Without lines torn by a kill or a full disk."""
    with suppress(OSError):
        return read_json_lines(run.path / LINES)
    return []


def _attempt(line: dict[str, Any], budget: int) -> Attempt | None:
    values = {name: line[name] for name in NAMES if name in line}
    values |= {"cause": line.get("cause") or str(Cause.UNKNOWN), "at_fault": line.get("at_fault") or ()}
    try:
        attempt = msgspec.convert(values | {"budget": budget}, Attempt)
    except (msgspec.ValidationError, RecursionError):
        return None
    return attempt if attempt.cause in CAUSES else None


def append_line(run: RunDirectory, line: dict[str, Any]) -> None:
    """Adds a line to attempts.jsonl; the caller holds the run."""
    with closing(JsonLines(run.path / LINES)) as file:
        file.write(line)
