"""One sweep from its config to its report: plan, launch, score, fit. Each step resumes what an earlier one left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .. import __version__
from ..train.config import RunConfig, run_id
from ..train.errors import UserError
from ..train.files import write_atomic, write_json
from . import grid, probe
from .config import ClusterConfig, IsoflopGrid, SweepConfig, base_run
from .plan import Plan, plan, remarks, units_of
from .runs import RunDirectory, SweepDirectory
from .terminal import describe

if TYPE_CHECKING:
    from .local import LocalPool


@dataclasses.dataclass(frozen=True)
class Places:
    """What jobs of so many ranks get: how many run at a time, how many threads a rank has, how fast a job is."""

    jobs: int
    threads: int
    flops_per_second: float  # matrix-product peak of a job, all its ranks together


def conduct(config: SweepConfig, command: list[str]) -> int:
    """Runs a sweep; see the contract in the README.

    Returns:
        0 when every run is done (or submitted), 1 when one failed.

    Raises:
        UserError: the input is wrong; nothing was started.
    """
    if config.cluster.kind not in ("local", "slurm"):
        raise UserError(f"cluster.kind is {config.cluster.kind!r}; it must be local or slurm")
    least = {"ensembles": config.ensembles, "cluster.runs_per_gpu": config.cluster.runs_per_gpu}
    for name, value in least.items():
        if value < 1:
            raise UserError(f"{name} is {value}; it must be 1 or more")
    if config.cluster.launch_bound_width is not None and not config.cluster.launch_bound_width > 0:
        raise UserError(f"cluster.launch_bound_width is {config.cluster.launch_bound_width}; it must be above 0")
    if config.cluster.kind == "slurm" and not config.dry_run:
        _require_slurm()
    if config.explain and not config.dry_run:
        raise UserError("explain is true and dry_run is false; the two go together: dry_run=true explain=true")
    extra = config.cluster.additional_parameters
    if extra is not None and not isinstance(extra, dict):
        raise UserError(f"cluster.additional_parameters is {extra!r}; it must map #SBATCH keys to values")
    if not config.sweep or Path(config.sweep).name != config.sweep:
        raise UserError(f"sweep is {config.sweep!r}; it names one folder under output_root, without slashes")
    sweep = SweepDirectory(Path(config.output_root) / config.sweep)
    rate = measure(config, sweep)
    fill_budgets(config, places(config.cluster, 1, rate))
    runs, said = resolve_runs(config), list[str]()
    if config.trunks:
        runs, said = share_trunks(sweep, runs, config)
    room = places(config.cluster, config.parallel.world_size, rate)
    planned = plan(runs, config.cluster, room.flops_per_second, room.jobs, config.ensembles)
    notes = [f"note: {remark}\n" for remark in [*said, *remarks(planned)]]
    if config.dry_run:
        from .display import print_plan

        print_plan(planned, config.cluster)
        print("".join(notes), end="")
        if config.explain:
            from .explain import explain_runs

            explain_runs(runs, config.cluster, room.flops_per_second / config.parallel.world_size)
        return 0
    with sweep.lock():
        directories = write_plan(sweep, config, planned, runs, rate, command)
        print("".join(notes), end="")
        if config.cluster.kind == "slurm":
            return _conduct_slurm(sweep, config, planned, directories, runs)
        return _conduct_local(sweep, config, planned, directories, runs, rate)


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


def yaml_or_empty(path: Path) -> dict[str, Any]:
    """A YAML mapping, or nothing where there is none."""
    with contextlib.suppress(OSError, yaml.YAMLError):
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
    return {}


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
    from ..train.data.corpora import open_corpus
    from ..train.data.tokenizers import planned_fingerprint, planned_vocab_size

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


def share_trunks(
    sweep: SweepDirectory, runs: list[RunConfig], config: SweepConfig
) -> tuple[list[RunConfig], list[str]]:
    """Makes trunks and branches of runs that differ in D alone, as far as what is on disk allows; and says so."""
    from . import slurm, trunks

    live, progress = set[str](), {}
    if config.cluster.kind == "slurm":
        try:
            live = slurm.live_jobs()
        except UserError:
            if not config.dry_run:  # which needs no SLURM
                raise
    for run in map(run_id, runs):
        directory = sweep.run(run)
        progress[run] = trunks.progress_of(directory, live=directory.state().job_id in live)
    merged = trunks.merge(runs, progress)
    return merged.runs, merged.remarks


def write_plan(
    sweep: SweepDirectory, config: SweepConfig, planned: Plan, runs: list[RunConfig], rate: float,
    command: list[str],
) -> list[RunDirectory]:  # fmt: skip
    """Writes sweep.yaml, plan.json and every run's frozen config; returns the run directories in the plan's order."""
    settings = {
        "isoflop_version": __version__,
        **git_state(Path(__file__).resolve().parent.parent),
        "host": platform.node(),
        "command": command,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "core_flops_per_second": rate if config.cluster.kind == "local" else None,
        "config": dataclasses.asdict(config),
    }
    by_id = {run_id(run): run for run in runs}
    directories = []
    for item in planned.runs:
        directory = sweep.run(item.run_id)
        directory.freeze(by_id[item.run_id])
        if not (directory.path / "state.json").exists():
            directory.set_state("planned")
        directories.append(directory)
    write_atomic(sweep.path / "sweep.yaml", yaml.safe_dump(settings, sort_keys=False))
    write_json(sweep.path / "plan.json", planned.to_dict())
    return directories


def refreeze(waiting: list[RunDirectory], runs: list[RunConfig]) -> None:
    """Gives runs that are about to start what this command says of where and how, such as their ranks."""
    by_id = {run_id(run): run for run in runs}
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


def _conduct_local(
    sweep: SweepDirectory, config: SweepConfig, planned: Plan, directories: list[RunDirectory], runs: list[RunConfig],
    rate: float,
) -> int:  # fmt: skip
    from .finish import finish, print_result
    from .launch import to_start
    from .local import LocalPool

    started = time.monotonic()
    # A folder a launch: submitit names its files by process id, and process ids come round again.
    folder = sweep.path / "jobs" / f"local-{os.urandom(4).hex()}"

    def pool(ranks: int) -> LocalPool:
        room = places(config.cluster, ranks, rate)
        return LocalPool(folder, room.jobs, room.threads, config.cluster.gpus_per_job, config.cluster.runs_per_gpu)

    waiting = to_start(directories, live=None)
    refreeze(waiting, runs)
    if waiting:
        _prepare_data(waiting[0])
        _train_here(sweep, config, planned, waiting, runs, pool(max(run.parallel.world_size for run in runs)))
    if config.evaluate.tasks:
        _score_here(sweep, config, planned, directories, pool(1))
    if any(run.is_done() for run in directories):
        finish(sweep)
        print_result(sweep)
    code = _outcome(sweep, directories, config)
    print(f"all stages took {describe(time.monotonic() - started)}")
    return code


def _train_here(
    sweep: SweepDirectory, config: SweepConfig, planned: Plan, waiting: list[RunDirectory], runs: list[RunConfig],
    pool: LocalPool,
) -> None:  # fmt: skip
    from .display import Display
    from .local import Ranked, Workers, enqueue

    # A grid may vary the ranks of its runs.
    lone = all(run.parallel.world_size == 1 for run in runs)
    ways = Workers if lone else Ranked
    with Display(planned, sweep, waiting) as display:

        def go_through(names: set[str]) -> None:
            wanted = [run for run in runs if run_id(run) in names]
            units = units_of(wanted, planned.seconds, config.cluster, pool.places, config.ensembles if lone else 1)
            training = ways(sweep, enqueue(sweep, pool.folder, units, wanted))
            pool.run(training, lambda: display.update(*training.news()))

        whole = [run for run in waiting if not run.is_halved()]
        go_through({run.run_id for run in waiting})
        # Where memory ran out on one of several ranks, the others could not wait for it: those runs start anew, once.
        again = {run.run_id for run in whole if run.is_halved() and run.state().state in ("preempted", "failed")}
        again |= {run_id(run) for run in runs if run.parent in again and not sweep.run(run_id(run)).is_done()}
        if again and not lone:
            go_through(again)


def _score_here(
    sweep: SweepDirectory, config: SweepConfig, planned: Plan, directories: list[RunDirectory], pool: LocalPool
) -> None:
    from .display import Display
    from .evaluation import stage
    from .local import Listed, LocalJob
    from .worker import evaluate_runs

    unscored = [run for run in directories if run.is_done() and not is_scored(run, config)]
    if not unscored:
        return
    try:
        stage(config.evaluate.tasks)
    except UserError as error:
        print(f"not scored: {error}")  # the laws of the loss need no benchmark, so the sweep goes on
        return
    # One job a core with its share of the checkpoints: the tasks are loaded once a job, not once a checkpoint.
    shares = [unscored[i :: pool.places] for i in range(min(pool.places, len(unscored)))]
    names = [[run.run_id for run in share] for share in shares]
    jobs = [LocalJob("scoring", evaluate_runs, (str(sweep.path.resolve()), share)) for share in names]
    with Display(planned, sweep, [], scoring=unscored) as display:
        pool.run(Listed(jobs), display.update_scores)


def is_scored(run: RunDirectory, config: SweepConfig) -> bool:
    """Whether the final checkpoint has a scores file for this evaluation."""
    from .evaluation import is_scored as scored

    return scored(run, dataclasses.asdict(config.evaluate))


def _prepare_data(run: RunDirectory) -> None:
    """Builds the shards before any job starts, with a progress bar; jobs then find them."""
    from ..train.data.shards import prepare_with_progress

    prepare_with_progress(run.config().data)


def _require_slurm() -> None:
    import shutil

    if shutil.which("sbatch") is None:
        raise UserError("cluster is 'slurm' and there is no sbatch on the PATH; use cluster=local, or load SLURM first")


def _conduct_slurm(
    sweep: SweepDirectory, config: SweepConfig, planned: Plan, directories: list[RunDirectory], runs: list[RunConfig]
) -> int:
    from . import slurm
    from .evaluation import stage
    from .finish import finish, print_result
    from .launch import SlurmLauncher, to_start, wait_for_slurm

    launcher = SlurmLauncher(sweep, config.cluster, slurm.live_jobs())
    waiting = to_start(directories, launcher.live)
    evaluate = bool(config.evaluate.tasks)
    done = [run for run in directories if run.is_done()]
    unscored = launcher.to_score([run for run in done if not is_scored(run, config)]) if evaluate else []
    if waiting or unscored:
        # Here and now, for compute nodes may have no network, and GPUs should not wait for a tokenizer.
        refreeze(waiting, runs)
        if waiting:
            _prepare_data(waiting[0])
        if evaluate:
            stage(config.evaluate.tasks)
        names = {run.run_id for run in waiting}
        wanted = [run for run in runs if run_id(run) in names]
        units = units_of(wanted, planned.seconds, config.cluster, planned.jobs_at_once, config.ensembles)
        launcher.submit(planned, units, unscored, evaluate)
        print(f"submitted {len(waiting)} runs and {len(unscored)} scorings to SLURM; the fit is job {launcher.last}")
        launcher.live = slurm.live_jobs()
    jobs = launcher.in_queue(directories)
    if jobs and not config.wait:
        print(f"{len(jobs)} jobs are in the queue; see `isoflop status {sweep.path}`")
        print(f"the report will be {sweep.path / 'fit' / 'report.html'}")
        return 0
    if jobs:
        wait_for_slurm(jobs)  # the last of them fits
    else:
        finish(sweep)
    print_result(sweep)
    return _outcome(sweep, directories, config)


def _outcome(sweep: SweepDirectory, directories: list[RunDirectory], config: SweepConfig) -> int:
    """The exit code, after a line for every run that is not done."""
    unfinished = [run for run in directories if not run.is_done()]
    done = [run for run in directories if run.is_done()]
    missing = [run for run in done if not is_scored(run, config)] if config.evaluate.tasks else []
    for run in unfinished:
        print(f"run {run.run_id} is {run.state().state}: {run.state().reason}")
    if missing:
        print(f"{len(missing)} runs could not be scored; the reasons are in {sweep.path / 'runs'}/<run>/log.txt")
    return 1 if unfinished or missing else 0
