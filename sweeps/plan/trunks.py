"""Trunks and branches: runs that differ only in D share the constant-rate part of the longest run.

A trunk is a run that also saves checkpoints where its branches begin (`checkpoint.at_steps`); a branch has a `parent`.
Neither field changes the run id or the result: trained alone, a branch gives the same bits.

See Haegele et al. 2024 (arXiv 2405.18392), section 5.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...train.config import RunConfig, canonical_json, identity, run_id
from ...train.errors import UserError
from ...train.files import fsync_path, read_json, read_json_lines, temporary_directory_beside, write_atomic
from ...train.flops import flops_exact
from ...train.schedule import same_until, trunk_steps
from ..runs.directory import RunDirectory
from ..terminal import short

SHOWN = 3  # runs that a remark names

_Named = tuple[str, RunConfig]  # a run with its id, whose hash is the slowest step here


class NotThere(UserError):
    """The trunk has no checkpoint at the step where a branch begins."""


@dataclass(frozen=True)
class Progress:
    """A run's state on disk; by default, of a run that has not started."""

    fixed: bool = False  # done, queued or running: its config.yaml must not change
    step: int = 0  # no further checkpoint will be saved at or before this step
    saved: frozenset[int] = frozenset()  # steps of checkpoints that exist or will be saved
    parent: str | None = None  # from its config.yaml

    def can_save(self, step: int) -> bool:
        return step in self.saved or step > self.step


@dataclass(frozen=True)
class Merged:
    """The result of `merge_runs`: the same runs in the same order, with the same ids."""

    runs: list[RunConfig]  # trunks with `checkpoint.at_steps`, branches with `parent`
    remarks: list[str]  # sentences for the user: FLOPs saved, and runs that could not be merged


def merge_runs(runs: Sequence[RunConfig], progress: Mapping[str, Progress] | None = None) -> Merged:
    """Turn runs into branches of longer runs where possible; `progress` maps run ids to the runs' state on disk."""
    families: dict[str, list[_Named]] = {}
    named = [(run_id(run), run) for run in runs]
    for name, run in named:
        # With `epochs_of`, D decides how much of each domain a run sees, from its first step on.
        tokens = 0 if run.data.epochs_of is None and run.trainer.kind != "command" else run.tokens
        families.setdefault(canonical_json({**identity(run), "tokens": tokens}), []).append((name, run))
    parents: dict[str, str | None] = {}
    obstacles: dict[str, list[RunConfig]] = {}  # runs that cannot branch, by reason
    progress = defaultdict(Progress, progress or {})
    for family in families.values():
        # Longest first, so that all possible trunks of a run come before it; the longest of them is used, so that one
        # trunk serves as many runs as possible.
        roots: list[_Named] = []  # runs that train, or have trained, the steps before their decay themselves
        for name, run in sorted(family, key=lambda item: (-item[1].steps, -item[1].tokens)):
            begin, mine = trunk_steps(run), progress[name]
            if mine.fixed or any(step >= begin for step in mine.saved):
                parents[name] = mine.parent  # its first steps are trained already
                roots.append((name, run))
                continue
            alike = [root for root, its in roots if 0 < begin <= same_until(its, run)]
            parents[name] = next((root for root in alike if progress[root].can_save(begin)), None)
            if parents[name] is None:
                if roots:
                    obstacles.setdefault(_obstacle(run, begin, bool(alike)), []).append(run)
                roots.append((name, run))
    begins: dict[str, set[int]] = {}  # steps at which branches begin, by trunk
    for name, run in named:
        if (trunk := parents[name]) is not None:
            begins.setdefault(trunk, set()).add(trunk_steps(run))
    merged = []
    for name, run in named:
        steps = begins.get(name, set()).union(run.checkpoint.at_steps or ())
        saves = replace(run.checkpoint, at_steps=sorted(steps) or None)
        merged.append(replace(run, parent=parents[name], checkpoint=saves))
    return Merged(merged, _remarks(merged, obstacles))


def own_steps(run: RunConfig) -> int:
    return run.steps if run.parent is None else run.steps - trunk_steps(run)


def own_flops(run: RunConfig) -> float:
    """Return the training FLOPs (exact convention) of a run's own steps, without its trunk's."""
    return flops_exact(run) / run.steps * own_steps(run)


def trained_flops(runs: Sequence[RunConfig]) -> float:
    """Return the total training FLOPs of runs; steps that they can share count once."""
    return sum(map(own_flops, merge_runs(runs).runs))


def steps_between(run: RunConfig, every: int | None) -> list[int]:
    """Return the multiples of `every` among the steps that a run trains itself, without its last; [] for None."""
    if every is None:
        return []
    first = 0 if run.parent is None else trunk_steps(run)
    return [step for step in range(every, run.steps, every) if step > first]


def keep_between(runs: Iterable[RunConfig], every: int | None) -> list[RunConfig]:
    """Return the runs, set to keep checkpoints at `steps_between` too."""
    result = []
    for run in runs:
        if steps := steps_between(run, every):
            both = sorted({*steps, *(run.checkpoint.at_steps or ())})
            run = replace(run, checkpoint=replace(run.checkpoint, at_steps=both))
        result.append(run)
    return result


def _obstacle(run: RunConfig, begin: int, alike: bool) -> str:
    """Return why a run cannot branch at step `begin`. `alike`: another, longer run takes the same steps up to there."""
    schedule = run.schedule
    if alike:
        return "the possible trunk is past the step where they would begin, and has kept no checkpoint of it"
    if schedule.kind == "cosine":
        return "with schedule.kind cosine the learning rate of every step depends on D; with wsd it would not"
    if begin <= 0:
        return f"schedule.decay_share {schedule.decay_share:g} leaves no step before the decay"
    fixed = schedule.warmup_tokens
    warmup = schedule.warmup_per_parameter if fixed is None else fixed
    return (
        f"schedule.warmup_max_share {schedule.warmup_max_share:g} shortens a warm-up, which then depends on D; "
        f"from {short(warmup / schedule.warmup_max_share)} {'tokens a parameter' if fixed is None else 'tokens'} on it "
        "does not"
    )


def _remarks(merged: Sequence[RunConfig], obstacles: Mapping[str, Sequence[RunConfig]]) -> list[str]:
    remarks, trunks = [], {run.parent for run in merged} - {None}
    if trunks:
        branches = sum(run.parent is not None for run in merged)
        spent, separate = sum(map(own_flops, merged)), sum(map(flops_exact, merged))
        remarks.append(
            f"{branches} of {len(merged)} runs branch from {len(trunks)} trunk{'s' * (len(trunks) > 1)}: {spent:.3g} "
            f"training FLOPs instead of {separate:.3g}, {1 - spent / separate:.0%} fewer"
        )
    for reason, runs in obstacles.items():
        named = ", ".join(run.name or run_id(run) for run in runs[:SHOWN])
        more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
        remarks.append(
            f"{len(runs)} run{'s differ' if len(runs) > 1 else ' differs'} from a longer one only in D, but cannot "
            f"branch from it ({named}{more}): {reason}"
        )
    return remarks


def progress_of(run: RunDirectory, live: bool = False) -> Progress:
    """Read a run's state on disk for `merge_runs`; `live`: the run is running or queued."""
    try:
        config = run.config()
    except UserError:
        return Progress()  # no config, or a damaged one: an error follows when it is needed
    saved, fixed = run.saved_steps(), live or run.is_done()
    to_save = config.checkpoint.at_steps or () if live else ()
    step = config.steps if fixed else max(saved, default=0)
    return Progress(fixed, step, frozenset(saved).union(to_save), config.parent)


def has_checkpoint(run: RunDirectory, step: int) -> bool:
    return (checkpoint_folder(run, step) / "manifest.json").is_file()


def graft(branch: RunDirectory, trunk: RunDirectory) -> str | None:
    """Link or copy into a branch the trunk's checkpoint where the branch begins; the caller holds the branch's lock.

    Returns:
        A line for the log, or None if the branch already has this checkpoint or a later one.

    Raises:
        NotThere: the trunk has no checkpoint at that step.
        UserError: the checkpoint is damaged.
    """
    from ...train.checkpoint.checkpoint import damage

    step = trunk_steps(branch.config())
    source, final = checkpoint_folder(trunk, step), checkpoint_folder(branch, step)
    begins = f"run {branch.run_id} begins at step {step} of run {trunk.run_id}"
    from filelock import FileLock  # slow to import, and status needs no lock

    with FileLock(branch.path / ".graft.lock"):
        if any(saved >= step and damage(checkpoint_folder(branch, saved)) is None for saved in branch.saved_steps()):
            return None
        if not has_checkpoint(trunk, step):
            state = trunk.state()
            reason = "" if state.reason is None else f" ({state.reason})"
            raise NotThere(
                f"{begins}, which has no checkpoint there and is {state.state}{reason}; start the sweep again, or give "
                "trunks=false to train every run from its first step"
            )
        if (problem := damage(source)) is not None:
            raise UserError(
                f"{begins}, whose checkpoint there is damaged: {problem}; remove {source} and start the sweep again"
            )
        _begin_metrics(branch, trunk, step)
        how = "linked" if _transplant(source, final) else "copied"
    return f"begins at step {step} of run {trunk.run_id}, whose checkpoint is {how} here"


def checkpoint_folder(run: RunDirectory, step: int) -> Path:
    return run.path / "checkpoints" / f"step_{step}"


def _begin_metrics(branch: RunDirectory, trunk: RunDirectory, step: int) -> None:
    """Copy the trunk's metrics up to `step` to the branch."""
    path = branch.path / "metrics.jsonl"
    if any(line["step"] >= step for line in read_json_lines(path)):
        return
    # A resumed run may have some steps twice.
    lines = {line["step"]: line for line in read_json_lines(trunk.path / "metrics.jsonl")}
    write_atomic(path, "".join(json.dumps(lines[number]) + "\n" for number in sorted(lines) if number <= step))


def _transplant(source: Path, final: Path) -> bool:
    """Copy a checkpoint to `final`, which appears in one rename. Returns True if all files are hard links."""
    # Hard links are safe, because checkpoints are replaced and never changed in place.
    from ...train.checkpoint.checkpoint import publish

    linked = True
    with temporary_directory_beside(final) as temporary:
        manifest = read_json(source / "manifest.json") or {}
        for name in manifest:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source / name, temporary / name)
            except OSError:  # the file system has no hard links
                shutil.copyfile(source / name, temporary / name)
                fsync_path(temporary / name)
                linked = False
        publish(temporary, final, manifest)
    return linked
