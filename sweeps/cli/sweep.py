"""The commands that manage a sweep, also while it runs.

Modules are imported inside the commands, so that `status` starts fast.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...train.errors import UserError, counted
from ..entry import compose_and_conduct
from .options import AsJson, ChangesAsJson, Speedup, Sweep, by_name, show

if TYPE_CHECKING:
    from ..runs.directory import SweepDirectory

app = typer.Typer()


def complete_run(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the run ids that begin with `incomplete`, each with a description, for shell completion."""
    from ..runs.directory import SweepDirectory
    from ..terminal import short

    with contextlib.suppress(UserError, KeyError, TypeError):
        sweep = SweepDirectory.open(context.params["sweep"])
        return [
            (run["run_id"], f"{sweep.run(run['run_id']).state().state}, N {short(run['N_total'])} D {short(run['D'])}")
            for run in sweep.plan()["runs"]
            if run["run_id"].startswith(incomplete)
        ]
    return []


Runs = Annotated[
    list[str] | None,
    typer.Argument(help="Run ids, or their first characters.", show_default=False, autocompletion=complete_run),
]


def _open(path: Path) -> SweepDirectory:
    """Open a sweep. Raises UserError if this version cannot read its plan."""
    from ..runs.directory import SweepDirectory

    sweep = SweepDirectory.open(path)
    sweep.plan()
    return sweep


def _own(sweep: SweepDirectory) -> SweepDirectory:
    """Return a sweep of isoflop's own runs. Raises UserError for runs of another trainer."""
    if sweep.is_ingested:
        problem = "has runs of another trainer, which starts, stops and repairs them"
        remedy = "train further ones with it, at the N and D of `isoflop suggest`, and add them with `isoflop ingest`"
        raise UserError(f"{sweep.path} {problem}; {remedy}")
    return sweep


@app.command("tune")
def tune_command(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="As for sweep.py: data=text data.path=corpus/ cluster.minutes=10", show_default=False),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            help="A finished sweep: repeat its corner runs with half and twice the learning rate and batch size."
        ),
    ] = None,
) -> None:
    """Find the constants of the `tuning` rules for a corpus and a family of models, and write them to tuning.yaml.

    With --check, measure how much lower the losses of a finished sweep's corner runs are with other settings.
    """
    if check is None:
        raise typer.Exit(compose_and_conduct(["+grid=tune", *(overrides or [])]))
    if overrides:
        raise UserError(
            f"--check takes no overrides, but {' '.join(overrides)!r} was given; it uses the sweep's settings"
        )
    from ..execute.check import check_corners

    raise typer.Exit(check_corners(_open(check)))


@app.command("preflight")
def preflight_command(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="As for sweep.py: +grid=ladder parallel.dp=2 precision=bf16", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine's memory, disk, network, ranks and kernels on the shapes of a grid, by default chinchilla's.

    A sweep makes these checks itself before its first run on every kind of node, unless preflight=false.
    """
    from ...train.preflight.preflight import check_device, check_node
    from ..entry import compose
    from ..plan.rates import core_flops_per_second, fill_budgets
    from ..prepare import resolve_runs

    arguments = overrides or []
    grid = [] if any(argument.startswith("+grid=") for argument in arguments) else ["+grid=chinchilla"]
    config = compose([*grid, *arguments])
    fill_budgets(config.grid, config.cluster, config.cluster.flops_per_second or core_flops_per_second())
    folder = Path(config.output_root).resolve()
    while not folder.is_dir():
        folder = folder.parent
    runs, ranks, findings = resolve_runs(config)[0], config.parallel.world_size, []
    for finding in chain(check_node(runs, folder, ranks), check_device(runs, ranks)):
        findings.append(finding)
        if not as_json:
            print(f"{finding.outcome:<8}  {finding.said}")
    if as_json:
        show([asdict(finding) for finding in findings], as_json, print)
    raise typer.Exit(any(finding.outcome == "failed" for finding in findings))


@app.command("status")
def status_command(
    sweep: Sweep,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Update every two seconds; Ctrl-C ends it.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every run, even if they do not fit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the number of runs by state, and each run's step, loss, speed, node, and why it waits or failed."""
    from ..observe.status import show_status
    from ..runs.directory import SweepDirectory

    show_status(SweepDirectory.open(sweep), watch, as_json, everything)


@app.command("ingest")
def ingest_command(
    sources: Annotated[
        list[Path], typer.Argument(help="Logs of other trainers, or folders with logs.", show_default=False)
    ],
    to: Annotated[Path, typer.Option(help="Folder for the runs, new or of an earlier ingest.", show_default=False)],
    mapping: Annotated[
        list[str] | None, typer.Option("--map", help="Keys of the log, or numbers: N=params,val_loss=eval/loss")
    ] = None,
    tokens_per_step: Annotated[float | None, typer.Option(min=1, help="Tokens of a step, if the log has none.")] = None,
    patterns: Annotated[
        Path | None, typer.Option(help="A YAML file of regular expressions by name, for other text logs.")
    ] = None,
) -> None:
    """Read runs of other trainers into a folder that fit, report, forecast, compare, suggest and status take."""
    from ..results.ingest import ingest

    columns = dict[str, str]()
    for pair in (pair for text in mapping or [] for pair in text.split(",")):
        name, _, columns[name] = pair.partition("=")
        if not columns[name]:
            raise UserError(f"--map has {pair!r}; it must be NAME=KEY, such as N=params,val_loss=eval/loss")
    for remark in ingest(sources, to, columns, tokens_per_step, patterns):
        print(f"note: {remark}", file=sys.stderr)
    runs = _open(to).runs()
    print(f"{counted(len(runs), 'run')}, {sum(run.is_done() for run in runs)} done; next: isoflop report {to}")


@app.command("forecast")
def forecast_command(
    sweep: Sweep,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="An unfinished run's directory, N=7e8,D=1.4e10, or FLOPs (at the best N and D); repeat for more."
        ),
    ] = None,
    seal: Annotated[
        bool, typer.Option("--seal", help="Save the forecasts, dated and hashed, in the sweep's folder forecasts.")
    ] = False,
    check: Annotated[
        str | None,
        typer.Option(help="A finished run (a directory or run id): compare its loss with its sealed forecasts."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast the final losses of unfinished or larger runs; --seal saves the forecasts for a later --check."""
    from ..results import forecast

    directory = _open(sweep)
    if check is not None:
        if target or seal:
            raise UserError(f"--check was given with {'--target' if target else '--seal'}; give it without them")
        forecast.check_run(directory, check)
    forecasts, without = [], dict[str, str]()
    if target:
        forecasts = [forecast.forecast_target(directory, name) for name in target]
    elif check is None:
        forecasts, without = forecast.forecast_running(directory)
        if seal and not forecasts:
            raise UserError(f"no running run of {sweep} can be forecast; name a larger run with --target")
    if seal:
        forecasts = forecast.seal(directory, forecasts)
    result = {
        "forecasts": [asdict(item) for item in forecasts],
        "without": without,
        "ledger": forecast.ledger(directory),
    }
    show(result, as_json, forecast.print_forecasts)


@app.command("logs")
def logs_command(
    sweep: Sweep,
    run: Annotated[
        str | None,
        typer.Argument(help="A run id, or its first characters.", show_default=False, autocompletion=complete_run),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run has ended.")] = False,
) -> None:
    """Print a run's log from its first attempt; without RUN, the newest lines of running and failed runs."""
    from ..observe.logs import print_log, print_newest_lines

    directory = _open(sweep)
    if run is None:
        print_newest_lines(directory, follow)
    else:
        print_log(directory, run, follow)


@app.command("retry")
def retry_command(
    sweep: Sweep,
    runs: Runs = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="All failed runs; the default if no other choice is made.")
    ] = False,
    diverged: Annotated[
        bool, typer.Option("--diverged", help="All diverged runs, each as a new run with a lower learning rate.")
    ] = False,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="All cancelled runs.")] = False,
    as_json: ChangesAsJson = False,
) -> None:
    """Start failed runs again, with a new budget of retries; each continues from its newest checkpoint."""
    from ..execute.control import retry

    _act(sweep, as_json, lambda directory: retry(directory, runs or [], failed, diverged, cancelled))


@app.command("cancel")
def cancel_command(sweep: Sweep, runs: Runs = None, as_json: ChangesAsJson = False) -> None:
    """Cancel runs, or the whole sweep with all its jobs; running runs save a checkpoint first."""
    from ..execute.control import cancel

    _act(sweep, as_json, lambda directory: cancel(directory, runs or []))


@app.command("adopt")
def adopt_command(sweep: Sweep, as_json: ChangesAsJson = False) -> None:
    """Turn a copy of a running sweep into a separate sweep, whose runs continue from the copied checkpoints."""
    from ..execute.identity import adopt

    def separate(directory: SweepDirectory) -> int:
        if (original := directory.copied_from()) is None:
            raise UserError(f"{sweep} is no copy of another sweep; adopt takes the folder of a copy")
        with directory.lock():
            count = adopt(directory)
        print(f"{sweep} is separate from {original.path} now; {counted(count, 'run')} of it were under way")
        print(f"continue it with the command that started the original and sweep={directory.path.name}")
        return 0

    _act(sweep, as_json, separate, may_be_copy=True)


@app.command("extend")
def extend_command(
    sweep: Sweep,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="As for sweep.py: grid.budgets=[1e20] dry_run=true", show_default=False)
    ] = None,
    grid: Annotated[Path | None, typer.Option(help="A YAML file with a grid, as `suggest --write` writes.")] = None,
    as_json: ChangesAsJson = False,
) -> None:
    """Add budgets, sizes or points to a sweep; only the new runs start."""
    from ..execute.conduct import resume
    from ..grid.extend import extend_sweep

    def grow(directory: SweepDirectory) -> int:
        names = extend_sweep(directory, overrides or [], grid)
        return resume(directory, only=set(names)) if names else 0

    _act(sweep, as_json, grow)


@app.command("doctor")
def doctor_command(
    sweep: Sweep,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report faults without repairing them.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also verify the checksums of every checkpoint.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find and repair dead runs, half-written files and other faults, and print each one."""
    from ..observe.doctor import examine_sweep, print_faults
    from ..runs.directory import SweepDirectory

    directory = _own(SweepDirectory.open(sweep))
    faults = examine_sweep(directory, not dry_run, deep)  # a plan that cannot be read is a fault too
    lines = [fault.to_dict(directory) for fault in faults]
    show(lines, as_json, lambda _: print_faults(directory, faults))
    raise typer.Exit(1 if any(fault.is_left for fault in faults) else 0)


@app.command("sync")
def sync_command(sweep: Sweep, as_json: AsJson = False) -> None:
    """Send runs that were tracked offline to wandb."""
    from ..results.tracking import sync_sweep

    with _said_aside(as_json):
        count = sync_sweep(_open(sweep))
    show({"sent": count}, as_json, lambda answer: print(f"runs sent: {answer['sent']}"))


@app.command("suggest")
def suggest_command(
    sweep: Sweep,
    budget: Annotated[float, typer.Option(help="Total FLOPs that the new runs may cost.", show_default=False)],
    target_flops: Annotated[
        float | None, typer.Option(help="Budget whose optimum matters; by default the sweep's largest target.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="New seeds to consider for each size, in addition to the sweep's.")] = 1,
    max_flops: Annotated[float | None, typer.Option(help="Most FLOPs that one run may cost.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the grid here, for `extend --grid`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Suggest the new runs that narrow the interval at the target budget most per FLOP."""
    import yaml

    from ...train.files import write_atomic
    from ..grid.suggest import print_suggestion, suggest_runs

    if write is not None and not write.parent.is_dir():
        raise UserError(f"--write is {write}, but {write.parent} is not a folder; name a file in an existing folder")
    suggestion = suggest_runs(_open(sweep), budget, target_flops, seeds=seeds, max_flops=max_flops)
    if write is not None:
        try:
            write_atomic(write, yaml.safe_dump(suggestion.grid, sort_keys=False))
        except OSError as error:
            raise UserError(
                f"--write is {write}, which cannot be written ({error.strerror or error}); name another file"
            ) from error
    show(suggestion, as_json, print_suggestion, lambda suggestion: suggestion.to_dict())


@app.command("report")
def report_command(sweep: Sweep, speedup: Speedup = None, as_json: AsJson = False) -> None:
    """Write the table, the laws and the report again from the results of the runs."""
    from ..execute.identity import check_links
    from ..results.finish import print_result, write_results

    directory = _open(sweep)
    check_links(directory)
    with _said_aside(as_json):
        law = write_results(directory, force=True, speedup=None if speedup is None else by_name("speedup", speedup))
    show(law, as_json, lambda law: print_result(directory))


def _act(path: Path, as_json: bool, action: Callable[[SweepDirectory], int], may_be_copy: bool = False) -> None:
    """Run `action` on a sweep and exit with the code it returns; with `as_json`, print the runs it changed.

    Unless `may_be_copy`, a copied folder first becomes a separate sweep.
    """
    from ..execute.conduct import restore_keepers
    from ..execute.identity import claim
    from ..runs.membership import members

    sweep = _own(_open(path))
    if not may_be_copy:
        with sweep.lock() if sweep.copied_from() is not None else contextlib.nullcontext():
            claim(sweep)
    before = {run.run_id: run.state() for run in members(sweep)} if as_json else {}
    with _said_aside(as_json):
        code = action(sweep)
        with contextlib.suppress(UserError):  # SLURM does not answer; the action has reported it
            restore_keepers(sweep)
    if as_json:
        after = {run.run_id: run.state() for run in members(sweep)}
        changed = [{"run_id": name, **asdict(state)} for name, state in after.items() if before.get(name) != state]
        show({"exit_code": code, "changed": changed}, as_json, print)
    raise typer.Exit(code)


def _said_aside(aside: bool) -> contextlib.AbstractContextManager[object]:
    """Redirect prints to standard error if `aside`, so that standard output has only JSON."""
    return contextlib.redirect_stdout(sys.stderr if aside else sys.stdout)
