"""A sweep on SLURM: submits what is wanted, and goes. From then on the jobs, and the keeper among them, do the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import prepare
from ..config import SweepConfig
from ..prepare import Prepared
from ..runs.directory import RunDirectory
from ..slurm import cluster as slurm_cluster
from ..slurm import commands as slurm
from ..slurm.launch import SlurmLauncher, to_start, wait_for_slurm
from .stages import is_scored, outcome, prepare_data, renew


def check(prepared: Prepared) -> None:
    """Asks SLURM whether it knows what the sweep wants, before anything is written.

    Raises:
        UserError: an unknown partition, a refused account, or a run that no node can host.
    """
    slurm_cluster.check(prepared.config.cluster, prepared.plan.runs)


def launch(prepared: Prepared, only: set[str] | None = None) -> SlurmLauncher:
    """Submits what no job of the sweep does yet; the caller holds the sweep.

    Raises:
        UserError: SLURM does not answer, or refuses.
    """
    launcher = SlurmLauncher(prepared.sweep, prepared.config.cluster, slurm.live_jobs())
    waiting = [run for run in to_start(prepared.directories, launcher) if only is None or run.run_id in only]
    unscored = launcher.to_score(missing_scores(prepared.directories, prepared.config))
    renew(waiting)
    if waiting or unscored:
        start(prepared, launcher, waiting, unscored)
    elif launcher.in_queue():
        launcher.keep()
    return launcher


def start(
    prepared: Prepared,
    launcher: SlurmLauncher,
    waiting: Sequence[RunDirectory],
    unscored: list[RunDirectory],
    avoid: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Submits runs to train and runs to score, the fit after them, and the keepers.

    Args:
        prepared: the sweep.
        launcher: of this process.
        waiting: runs to train.
        unscored: trained already.
        avoid: nodes on which a run must not be started, by run id.

    Raises:
        UserError: SLURM refuses, or there is no data to train or score on.
    """
    config, plan = prepared.config, prepared.plan
    # Here and now, for compute nodes may have no network, and GPUs should not wait for a tokenizer.
    prepare.refreeze(waiting, prepared)
    if waiting:
        prepare_data(waiting[0])
    if config.evaluate.tasks:
        from ..results.scoring import stage

        stage(config.evaluate.tasks)
    units = plan.units_of({run.run_id for run in waiting})
    held = launcher.submit(plan, units, unscored, bool(config.evaluate.tasks), avoid or {})
    print(f"submitted {len(waiting) - len(held)} runs and {len(unscored)} scorings to SLURM")
    if held:
        print(f"held back {len(held)} runs until the queue takes more jobs (cluster.max_submit)")


def missing_scores(runs: Sequence[RunDirectory], config: SweepConfig) -> list[RunDirectory]:
    """Runs that are done and have no scores for the sweep's evaluation."""
    return [run for run in runs if config.evaluate.tasks and run.is_done() and not is_scored(run, config)]


def conclude(prepared: Prepared, launcher: SlurmLauncher) -> int:
    """What the command does after its jobs are submitted: goes, or waits for them, and says how the sweep came out."""
    from ..results.finish import print_result, write_results

    sweep, config = prepared.sweep, prepared.config
    jobs = launcher.in_queue()
    if not jobs and to_start(prepared.directories, launcher):
        jobs = launcher.record.jobs() & launcher.live  # the keepers, who submit what was held back
    if jobs and not config.wait:
        print(f"{len(jobs)} jobs are in the queue; see `isoflop status {sweep.path}`")
        print(f"the report will be {sweep.path / 'fit' / 'report.html'}")
        return 0
    if jobs:
        wait_for_slurm(sweep)
    else:
        write_results(sweep)
    print_result(sweep)
    return outcome(prepare.from_disk(sweep))
