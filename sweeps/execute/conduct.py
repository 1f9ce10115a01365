"""One sweep from its config to its report: plan, launch, score, fit."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...train.errors import UserError, counted
from ...train.planner.validation import check_fields
from .. import prepare
from ..config import SweepConfig
from ..plan import rates
from ..prepare import Prepared
from ..results.scoring import is_scored, why_unscored
from ..runs import lease, membership
from ..runs.attempts import Policy
from ..runs.directory import AtWork, Busy, RunDirectory, SweepDirectory
from ..runs.preflight import check_first_job
from ..slurm import cluster as slurm_cluster
from ..slurm.jobs import LAUNCH, is_unattended, jobs_of
from ..terminal import describe_seconds
from . import controller, identity
from .controller import EVERYTHING, Board, Scope
from .hopeless import Judge
from .slurm import SlurmBackend

SHOW_SECONDS = 5.0  # between two looks at the states for a user who waits
LOCK_SECONDS = 60.0  # that a keeper's pass may hold a sweep
LONGEST_NAME, SIGNS = 200, {*'<>|*?"'}  # bytes of a sweep's name; signs that Windows takes in no name, and shells read


def conduct(config: SweepConfig, command: list[str]) -> int:
    """Run a sweep, recording `command` in sweep.yaml. Returns 0 if every run is done or submitted, 1 if one failed."""
    check(config)
    prepared = prepare.from_config(config)
    notes = "".join(f"note: {remark}\n" for remark in prepared.remarks)
    if config.dry_run:
        if refusal := identity.refusal(prepared.sweep) or prepare.conflict(prepared):
            notes += f"note: this sweep would not start: {refusal}\n"
        _show(prepared, notes)
        return 0
    on_slurm = config.cluster.kind == "slurm"
    if on_slurm:
        slurm_cluster.check(config.cluster, prepared.plan.runs)  # before anything is written
    with prepared.sweep.lock(LOCK_SECONDS if on_slurm else 0.0):
        if refusal := prepare.conflict(prepared):
            raise UserError(refusal)
        controller.replan(prepared, command)
        print(notes, end="")
        if not on_slurm:
            return _conduct_here(prepared)
        submit(prepared)
    return _conclude(prepared)


def resume(sweep: SweepDirectory, only: set[str] | None = None) -> int:
    """Continue a sweep from its folder. Returns the exit code.

    With `only`, continue just the runs with these ids and their trunks.
    """
    config = prepare.configuration(sweep)
    check(config)
    membership.allow_growth(sweep)
    on_slurm = config.cluster.kind == "slurm"
    try:
        with sweep.lock(LOCK_SECONDS if on_slurm else 0.0):
            prepared = prepare.from_disk(sweep)
            controller.replan(prepared)
            if only is not None:
                only = only | {run.parent for name, run in prepared.by_id.items() if name in only and run.parent}
            if not on_slurm:
                return _conduct_here(prepared, only)
            submit(prepared, only)
    except AtWork as error:
        if on_slurm:
            raise
        print(f"these runs start when the process that holds the sweep has finished its own: {error}")
        return 0
    return _conclude(prepared)


def _conduct_here(prepared: Prepared, only: set[str] | None = None) -> int:
    from ..results.finish import print_result, write_results
    from .display import LiveView
    from .local import LocalBackend

    started, sweep, config = time.monotonic(), prepared.sweep, prepared.config
    asked = open_runs(prepared, only)
    # Before anything that takes long, in which a run may be cancelled.
    renew([*asked, *missing_scores(prepared.directories, config)], Policy.of(config.cluster))
    if asked and config.preflight:
        for line in check_first_job(sweep, prepared.runs, config.parallel.world_size):
            print(line)
    _prepare_text(prepared, asked)
    others = [] if only is None else [run for run in prepared.directories if run.run_id not in only]
    try:
        _fetch_tasks(prepared, asked)
        scope = Scope({run.run_id: run.state().since for run in others})
    except UserError as error:  # the laws of the loss need no benchmark
        print(f"not scored: {error}")
        scope = Scope({run.run_id: run.state().since for run in others}, scores=False)
    backend, judge = LocalBackend(prepared, scope), Judge.of(sweep)
    while True:
        with LiveView(sweep, prepared.plan) as view:

            def tick(claims: list[dict[str, Any]]) -> None:
                running = view.update(claims)
                if judge is not None:
                    judge.stop_hopeless(running)

            backend.train(tick)
        if not controller.grow(sweep):
            break
        prepared = prepare.from_disk(sweep)
    if any(run.is_done() for run in sweep.runs()):
        write_results(sweep)
        print_result(sweep)
    code = outcome(prepare.from_disk(sweep))
    print(f"all stages took {describe_seconds(time.monotonic() - started)}")
    return code


def open_runs(prepared: Prepared, only: set[str] | None) -> list[RunDirectory]:
    """Return the runs (with `only`: of these ids) that are neither done nor stopped as hopeless."""
    runs = [run for run in prepared.directories if only is None or run.run_id in only]
    return [run for run in runs if not run.is_done() and run.given_up() is None]


def _prepare_text(prepared: Prepared, asked: list[RunDirectory]) -> None:
    """Prepare and check the training text of the runs `asked` here: compute nodes may have no network."""
    runs = [run for run in (prepared.by_id[run.run_id] for run in asked) if run.trainer.kind != "command"]
    if not runs:
        return
    from ...train.data.mixture import HeldOutText, open_stream
    from ...train.data.text import Text, domains_of, prepare_with_progress

    texts = dict[str, Text]()
    for run in runs:
        if (key := repr(domains_of(run.data))) not in texts:
            texts[key] = prepare_with_progress(run.data)
            HeldOutText.of(run.data, texts[key])  # this and the next line raise UserError if the text is too short
        open_stream(run, texts[key])


def _fetch_tasks(prepared: Prepared, asked: list[RunDirectory]) -> None:
    from ..results.scoring import stage

    tasks = prepared.config.evaluate.tasks
    # An external program may leave nothing to score. The first scoring fetches tasks, if it has a network.
    late = prepared.config.trainer.kind == "command" and prepared.config.cluster.kind == "local"
    if tasks and not late and (asked or missing_scores(prepared.directories, prepared.config)):
        stage(tasks)


def submit(prepared: Prepared, only: set[str] | None = None) -> None:
    """Submit the missing SLURM jobs, and give unfinished runs (with `only`: of these ids) all their retries again.

    The caller holds the sweep's lock.
    """
    sweep, config = prepared.sweep, prepared.config
    backend = SlurmBackend(sweep, config.cluster)
    backend.memory.clear()  # a user asks again
    # First, so that what was lost until now counts against no new budget.
    controller.reconcile_lost(Board(sweep, config, EVERYTHING), backend.jobs(), backend)
    asked = open_runs(prepared, only)
    waiting = sum(run.state().state not in ("queued", "running") for run in asked)
    missing = missing_scores(prepared.directories, config)
    renew([*asked, *missing], Policy.of(config.cluster))
    _prepare_text(prepared, asked)
    _fetch_tasks(prepared, asked)
    if not asked and not missing:
        backend.remember(over=not backend.jobs())
        return
    try:
        controller.reconcile(sweep, backend)
    except UserError:
        if not any(job.kind == "worker" for job in backend.jobs()):
            backend.cancel_all()  # keepers alone would ask for the same again and again
        raise
    backend.remember(over=False)
    if not backend.jobs():
        raise UserError("SLURM accepts no more jobs for now, not even a keeper; try again later")
    if waiting or backend.started["worker"]:
        workers = counted(backend.started["worker"], "worker")
        print(f"submitted {workers} to SLURM, for {counted(waiting, 'run')} and {counted(len(missing), 'scoring')}")


def restore_keepers(sweep: SweepDirectory) -> None:
    """Submit keepers (jobs that restart workers) if an unfinished sweep on SLURM has none in the queue."""
    if (sweep.path / "jobs" / LAUNCH).exists() and is_unattended(sweep, jobs_of(sweep)):
        with sweep.lock(LOCK_SECONDS):
            SlurmBackend(sweep, prepare.configuration(sweep).cluster).start_keepers(controller.KEEPERS)
        print(f"this sweep had no keeper job in SLURM's queue; {controller.KEEPERS} were submitted")


def _conclude(prepared: Prepared) -> int:
    """Print the state of a sweep on SLURM, after its jobs have ended if `wait` is set. Returns the exit code."""
    from ..results.finish import print_result, write_results

    sweep = prepared.sweep
    jobs = jobs_of(sweep)
    working = [job for job in jobs if job.kind != "keeper"] or (jobs if open_runs(prepared, None) else [])
    if working and not prepared.config.wait:
        print(f"{counted(len(working), 'job is', 'jobs are')} in the queue; see `isoflop status {sweep.path}`")
        print(f"the report will be written to {sweep.path / 'fit' / 'report.html'}")
        return 0
    if working:
        wait_for_slurm(sweep)
    else:
        write_results(sweep)
    print_result(sweep)
    return outcome(prepare.from_disk(sweep))


def wait_for_slurm(sweep: SweepDirectory) -> None:
    """Wait until no job of the sweep is in the queue. Ctrl-C leaves the jobs alone."""
    shown, looked = "", -math.inf
    try:
        while True:
            with contextlib.suppress(UserError):
                if not jobs_of(sweep):
                    return
            if sys.stdout.isatty() and time.monotonic() - looked > SHOW_SECONDS:
                looked, before = time.monotonic(), shown
                counts = Counter(run.state().state for run in sweep.runs())
                shown = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
                if shown != before:
                    print(shown, flush=True)
            time.sleep(1.0)
    except KeyboardInterrupt:
        print(f"\nstopped waiting; the jobs continue, see `isoflop status {sweep.path}`")
        raise


def renew(runs: Iterable[RunDirectory], policy: Policy) -> None:
    """Forget earlier retries and scorings of runs that are done, failed, diverged or cancelled."""
    for run in runs:
        if run.state().state in ("failed", "diverged", "cancelled", "done"):
            with contextlib.suppress(Busy):
                lease.reset(run, policy)


def missing_scores(runs: Sequence[RunDirectory], config: SweepConfig) -> list[RunDirectory]:
    settings = asdict(config.evaluate)
    return [run for run in runs if config.evaluate.scores and run.is_done() and not is_scored(run, settings)]


def outcome(prepared: Prepared) -> int:
    """Print the runs that lack a result or scores. Returns 1 if any has no finished replacement, else 0."""
    sweep = prepared.sweep
    stands_in = {old: sweep.run(new) for new, old in membership.replacements(sweep).items()}
    missing = missing_scores(prepared.directories, prepared.config)
    code = 1 if missing else 0
    for run in [run for run in prepared.directories if not run.is_done() and run.given_up() is None]:
        print(f"run {run.run_id} is {run.state()}")
        other = stands_in.get(run.run_id)
        if other is not None and other.is_done():
            print(f"run {other.run_id} replaced it, at a lower learning rate")
        else:
            code = 1
    external = [run for run in prepared.directories if prepared.by_id[run.run_id].trainer.kind == "command"]
    done = [run for run in external if prepared.config.evaluate.scores and run.is_done()]
    if reasons := [reason for run in done if (reason := why_unscored(run)) is not None]:
        print(f"benchmarks of {counted(len(reasons), 'run')} are left out: {reasons[0]}")
    if missing:
        print(f"{counted(len(missing), 'run')} could not be scored; see {sweep.path / 'runs'}/<run>/log.txt")
    return code


def check(config: SweepConfig) -> None:
    """Raise UserError if a configuration contradicts itself or needs what this machine lacks."""
    _check_folder(config)
    cluster = config.cluster
    check_fields(config)
    if cluster.kind == "slurm" and not config.dry_run and shutil.which("sbatch") is None:
        raise UserError("cluster is 'slurm', but sbatch is not on the PATH; use cluster=local, or load SLURM first")
    if config.grid is not None and config.grid.stop_hopeless and not config.grid.tries_settings:
        raise UserError(
            f"grid.stop_hopeless is true and grid.kind is {config.grid.kind!r}; only tune allows it, because a law "
            "needs every run to finish"
        )
    if config.explain and not config.dry_run:
        raise UserError("explain is true but dry_run is false; give both: dry_run=true explain=true")
    speedup = {} if config.fit.speedup is None else config.fit.speedup
    if not isinstance(speedup, dict) or not all(isinstance(v, int | float) and v > 0 for v in speedup.values()):
        raise UserError(f"fit.speedup is {speedup!r}; it must map formats to numbers above 0, such as {{mxfp4: 2.0}}")
    extra = cluster.additional_parameters
    if extra is not None and not isinstance(extra, dict):
        raise UserError(f"cluster.additional_parameters is {extra!r}; it must map #SBATCH keys to values")


def _check_folder(config: SweepConfig) -> None:
    name, cluster = config.sweep or "", config.cluster
    good = Path(name).name == name and name not in ("", "..") and name.isprintable() and not SIGNS & {*name}
    if not good or len(name.encode()) > LONGEST_NAME:
        raise UserError(
            f"sweep is {config.sweep!r}; it must be the name of one folder under output_root, not . or .., without "
            f"slashes, control characters and {' '.join(sorted(SIGNS))}, and at most {LONGEST_NAME} bytes long"
        )
    # SLURM puts other words for % and \\ in the names of logs; a colon ends a path on PYTHONPATH, a comma a mount.
    signs = "%:\\," if cluster.container else "%:\\"
    for where, taken in ((Path(config.output_root, name).resolve(), signs), (Path.cwd(), "\\")):
        bad = [sign for sign in str(where) if sign in taken or not sign.isprintable()]
        if bad and cluster.kind == "slurm":
            raise UserError(f"SLURM jobs cannot run in {str(where)!r}, which contains {bad[0]!r}; choose another path")


def _show(prepared: Prepared, notes: str) -> None:
    from .display import print_plan

    plan, config = prepared.plan, prepared.config
    shapes = [run.shape for run in plan.runs] if config.cluster.kind == "slurm" else []
    print_plan(plan, config.cluster, slurm_cluster.expected_starts(config.cluster, shapes))
    print(notes, end="")
    if config.explain:
        from ..plan.explain import explain_runs

        room = rates.places(config.cluster, config.parallel.world_size, prepared.rate)
        explain_runs(prepared.runs, config.cluster, room.flops_per_second / config.parallel.world_size)
