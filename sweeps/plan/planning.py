"""What a sweep consists of: its runs and their plan, from a configuration or from what is on disk; and written there.

Special here:
- a sweep grows: `added.json` names the runs that `isoflop extend`, a diverged run or an adaptive grid brought, and
  every plan is of the grid's runs and of those;
- a plan from disk (`from_disk`) reads the frozen configs and asks neither the corpus nor the grid, so that a compute
  node makes the same plan as the machine that the sweep was started on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from ... import __version__
from ...train.config import RECIPE, RunConfig, run_id
from ...train.errors import UserError
from ...train.files import read_json, write_atomic, write_json
from ..config import ClusterConfig, IsoflopGrid, SweepConfig, base_run, from_mapping
from ..grid import expand as grid
from ..grid import trunks
from ..results.evaluation import keep_between
from ..runs import states
from ..runs.directory import AtWork, RunDirectory, SweepDirectory, yaml_or_empty
from . import calibration, probe
from .sweep_plan import Plan, plan, remarks

JobFinder = Callable[[RunDirectory], bool]  # whether a job has a run, which keeps its trunk or its branches

ADDED = "added.json"
STOPPED = "cancel.json"


@dataclasses.dataclass(frozen=True)
class Places:
    """What jobs of so many ranks get: how many run at a time, how many threads a rank has, how fast a job is."""

    jobs: int
    threads: int
    flops_per_second: float  # matrix-product peak of a job, all its ranks together


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A sweep that is planned and not started."""

    sweep: SweepDirectory
    config: SweepConfig
    runs: list[RunConfig]  # of the plan, with trunks and branches
    plan: Plan
    rate: float  # see `measure`
    remarks: list[str]  # sentences for a person

    @property
    def directories(self) -> list[RunDirectory]:
        """In the plan's order."""
        return [self.sweep.run(run.run_id) for run in self.plan.runs]

    def configs(self, names: Iterable[str]) -> list[RunConfig]:
        """Of the runs so named, in the grid's order."""
        wanted = set(names)
        return [run for run in self.runs if run_id(run) in wanted]


def from_config(config: SweepConfig, has_job: JobFinder | None = None) -> Prepared:
    """Plans the sweep that a configuration asks for, with the runs that were added to its folder before.

    Raises:
        UserError: the configuration asks for what cannot be run.
    """
    assert config.sweep is not None
    sweep = SweepDirectory(Path(config.output_root) / config.sweep)
    if config.evaluate.tasks:
        from ...evaluate.tasks.tasks import anchored

        config.evaluate.tasks = anchored(config.evaluate.tasks, print)
    rate = measure(config, sweep)
    fill_budgets(config, places(config.cluster, 1, rate))
    runs = {run_id(run): run for run in resolve_runs(config)}
    for run in added_runs(sweep):
        runs.setdefault(run_id(run), run)
    return _prepare(sweep, config, list(runs.values()), rate, has_job)


def from_disk(sweep: SweepDirectory, has_job: JobFinder | None = None) -> Prepared:
    """Plans anew what a sweep's folder holds: its runs as they are frozen, and those added since.

    Raises:
        UserError: the folder cannot be read, or is of another version.
    """
    config = configuration(sweep)
    runs = {run.run_id: run.config() for run in sweep.runs()}
    for added in added_runs(sweep):
        runs.setdefault(run_id(added), added)
    return _prepare(sweep, config, list(runs.values()), measure(config, sweep), has_job)


def configuration(sweep: SweepDirectory) -> SweepConfig:
    """What a sweep was started with.

    Raises:
        UserError: sweep.yaml cannot be read, or is of another version.
    """
    config = from_mapping(sweep.settings().get("config"), sweep.path / "sweep.yaml")
    config.output_root, config.sweep = str(sweep.path.parent), sweep.path.name  # wherever the folder is now
    return config


def _prepare(
    sweep: SweepDirectory, config: SweepConfig, runs: list[RunConfig], rate: float, has_job: JobFinder | None
) -> Prepared:  # fmt: skip
    said: list[str] = []
    if config.trunks:
        runs, said = share_trunks(sweep, runs, has_job)
    if config.evaluate.tasks:
        runs = keep_between(runs, config.evaluate.every)
    room = places(config.cluster, config.parallel.world_size, rate)
    measured = calibration.of_sweep(sweep.path, config.cluster, room.threads)
    planned = plan(runs, config.cluster, room.flops_per_second, room.jobs, config.ensembles, room.threads, measured)
    return Prepared(sweep, config, runs, planned, rate, [*said, *remarks(planned)])


def measure(config: SweepConfig, sweep: SweepDirectory) -> float:
    """Matrix-product peak of one core of this machine, or of one rank on slurm.

    A core is probed once a sweep: a later start reads what the first one measured, and plans the same runs.
    """
    rate = config.cluster.flops_per_second
    if rate is not None:
        return rate
    if config.cluster.kind == "slurm":
        raise UserError("cluster.flops_per_second is null; on slurm give the peak of one GPU, such as 4e14")
    recorded = yaml_or_empty(sweep.path / "sweep.yaml").get("core_flops_per_second")
    return float(recorded) if recorded else probe.core_flops_per_second()


def places(cluster: ClusterConfig, ranks: int, rate: float) -> Places:
    """How jobs of so many ranks share what is there; `rate` is `measure`'s.

    Raises:
        UserError: no job may run.
    """
    if cluster.kind == "slurm":
        return Places(cluster.array_parallelism, cluster.cpus_per_task, rate * ranks)
    cores = probe.cores()
    jobs = cluster.jobs if cluster.jobs is not None else max(1, cores // ranks)
    if jobs < 1:
        raise UserError(f"cluster.jobs is {jobs}; it must be 1 or more")
    if cluster.gpus_per_job > 0 and ranks == 1:
        jobs *= cluster.runs_per_gpu
    threads = cluster.threads_per_job if cluster.threads_per_job is not None else max(1, cores // (jobs * ranks))
    # More ranks than cores are no faster than the cores.
    return Places(jobs, threads, rate * min(ranks * threads, max(threads, cores)))


def fill_budgets(config: SweepConfig, room: Places) -> None:
    """Budgets that the grid does not name are the cluster's; where that names none either, the probe's.

    `room` is that of jobs of one rank, whatever ranks the runs have: how a run is spread must not change what is run.
    """
    cluster, points = config.cluster, config.grid
    if not isinstance(points, IsoflopGrid) or points.budgets is not None:
        return
    if not cluster.minutes > 0:
        raise UserError(f"cluster.minutes is {cluster.minutes}; it must be greater than 0")
    points.budgets = cluster.budgets or probe.probed_budgets(
        room.flops_per_second, room.jobs, cluster.minutes, cluster.half_speed_width
    )


def resolve_runs(config: SweepConfig) -> list[RunConfig]:
    """The grid's runs, each complete: vocabulary from the tokenizer, fingerprint from the text."""
    from ...train.data.corpora import open_corpus
    from ...train.data.tokenizers import planned_fingerprint, planned_vocab_size

    assert config.grid is not None
    base = base_run(config)
    if base.data.path is not None:
        base.data.path = str(Path(base.data.path).expanduser().absolute())
    if base.data.tokenizer not in ("bytes", "bpe"):
        base.data.tokenizer = str(Path(base.data.tokenizer).expanduser().absolute())
    base.data.tokenizer_fingerprint = planned_fingerprint(base.data)
    if base.model.vocab_size is None:
        base.model.vocab_size = planned_vocab_size(base.data)
    corpus = open_corpus(base.data)
    base.data.fingerprint = corpus.fingerprint()
    return grid.expand(config.grid, base)


def resolved_base(sweep: SweepDirectory, config: SweepConfig) -> RunConfig:
    """The run that the sweep's grid varies, complete, with the corpus and the tokenizer that its runs have on disk.

    Raises:
        UserError: the sweep has no runs.
    """
    runs = sweep.runs()
    if not runs:
        raise UserError(f"{sweep.path / 'plan.json'} has no runs, so nothing can be added to them; sweep anew")
    base, first = base_run(config), runs[0].config()
    base.data = first.data
    base.model.vocab_size = first.model.vocab_size
    return base


def add_runs(sweep: SweepDirectory, runs: Iterable[RunConfig], why: str, replaces: str | None = None) -> list[str]:
    """Makes runs part of a sweep, from its next plan on; returns the ids of those that it did not have.

    Args:
        sweep: may be at work; only whoever plans next sees the runs.
        runs: complete.
        why: for people.
        replaces: the run in whose place they are tried.
    """
    known = {run["run_id"] for run in sweep.plan()["runs"]}
    with _adding(sweep):
        added = _added(sweep)
        fresh = [run for run in runs if run_id(run) not in known | added.keys()]
        for run in fresh:
            directory = sweep.run(run_id(run))
            directory.freeze(run)
            if not (directory.path / "state.json").exists():
                states.plan(directory)
            added[run_id(run)] = {"why": why, "replaces": replaces, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        if fresh:
            write_json(sweep.path / ADDED, added)
    return [run_id(run) for run in fresh]


@contextlib.contextmanager
def _adding(sweep: SweepDirectory) -> Iterator[None]:
    try:
        with FileLock(sweep.path / f".{ADDED}.lock", timeout=60):
            yield
    except Timeout as error:
        raise AtWork(f"{sweep.path / ADDED} has been held by somebody for a minute; try again") from error


def added_runs(sweep: SweepDirectory) -> list[RunConfig]:
    """Runs that were added to a sweep since it was first planned."""
    return [sweep.run(name).config() for name in _added(sweep)]


def members(sweep: SweepDirectory) -> list[RunDirectory]:
    """Every run of a sweep: those of its plan, and those that were added since it was made."""
    planned = sweep.runs()
    known = {run.run_id for run in planned}
    return planned + [sweep.run(name) for name in _added(sweep) if name not in known]


def find_runs(sweep: SweepDirectory, prefixes: Iterable[str]) -> list[RunDirectory]:
    """The runs that begin with these digits, each once; UserError where one begins none or several."""
    runs, found = members(sweep), dict[str, RunDirectory]()
    for prefix in prefixes:
        matching = [run for run in runs if run.run_id.startswith(prefix)]
        exact = [run for run in matching if run.run_id == prefix]
        if len(exact or matching) != 1:
            ids = ", ".join(run.run_id for run in matching[:8]) + (", …" if len(matching) > 8 else "")
            raise UserError(
                f"run is {prefix!r}, which must begin exactly one run id of {sweep.path}; it begins {ids or 'none'}"
            )
        run = (exact or matching)[0]
        found[run.run_id] = run
    return list(found.values())


def replacements(sweep: SweepDirectory) -> dict[str, str]:
    """Which run replaces which: run ids of those that diverged, by the run id of what was tried in their place."""
    return {name: entry["replaces"] for name, entry in _added(sweep).items() if entry.get("replaces")}


def stop(sweep: SweepDirectory, by: str) -> None:
    """Has a sweep grow no more: nothing takes the place of what diverged, and no further round begins."""
    write_json(sweep.path / STOPPED, {"by": by, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def go_on(sweep: SweepDirectory) -> None:
    """Undoes `stop`, for somebody has started the sweep again."""
    (sweep.path / STOPPED).unlink(missing_ok=True)


def is_stopped(sweep: SweepDirectory) -> bool:
    """Whether somebody has cancelled the whole sweep since it was last started."""
    return (sweep.path / STOPPED).exists()


def _added(sweep: SweepDirectory) -> dict[str, dict[str, Any]]:
    file = sweep.path / ADDED
    added = read_json(file)
    if added is None and file.exists():
        raise UserError(f"{file} cannot be read; restore it, or remove it and lose the runs that it names")
    return added or {}


def share_trunks(
    sweep: SweepDirectory, runs: list[RunConfig], has_job: JobFinder | None
) -> tuple[list[RunConfig], list[str]]:
    """Makes trunks and branches of runs that differ in D alone, as far as what is on disk allows; and says so."""
    progress = {}
    for run in map(run_id, runs):
        directory = sweep.run(run)
        progress[run] = trunks.progress_of(directory, live=has_job is not None and has_job(directory))
    merged = trunks.merge(runs, progress)
    return merged.runs, merged.remarks


def write_plan(prepared: Prepared, command: list[str] | None = None) -> None:
    """Writes plan.json, and every run's frozen config where it has none; with a `command` also sweep.yaml."""
    sweep, by_id = prepared.sweep, {run_id(run): run for run in prepared.runs}
    if command is not None:
        go_on(sweep)
    for directory in prepared.directories:
        directory.freeze(by_id[directory.run_id])
        if not (directory.path / "state.json").exists() and not directory.is_done():
            states.plan(directory)
    if command is not None:
        local = prepared.config.cluster.kind == "local"
        settings = {
            "isoflop_version": __version__,
            "recipe": RECIPE,
            **git_state(Path(__file__).resolve().parents[2]),
            "host": platform.node(),
            "command": command,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "core_flops_per_second": prepared.rate if local else None,
            "config": dataclasses.asdict(prepared.config),
        }
        write_atomic(sweep.path / "sweep.yaml", yaml.safe_dump(settings, sort_keys=False))
    write_json(sweep.path / "plan.json", prepared.plan.to_dict())


def refreeze(waiting: Iterable[RunDirectory], prepared: Prepared) -> None:
    """Gives runs that are about to start what the plan says of where and how, such as their ranks or their trunk."""
    by_id = {run_id(run): run for run in prepared.runs}
    for run in waiting:
        run.refreeze(by_id[run.run_id])


def git_state(root: Path) -> dict[str, Any]:
    """Commit and dirty flag of the code, or None where it is not a checkout."""

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return result.stdout.strip()

    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}
