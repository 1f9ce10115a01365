"""The commands that manage a sweep: look at it, stop it, try again, make it grow, mend it.

Every one works while the sweep runs, from any machine that sees the folder, and by two people at once. Nothing is
imported before a command needs it, so that `status` starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...train.errors import UserError

if TYPE_CHECKING:
    from ..runs.directory import SweepDirectory

app = typer.Typer()


def complete_run(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """For the shell: the ids of the sweep's runs that begin like this, each with its state and size."""
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


Sweep = Annotated[Path, typer.Argument(help="A sweep directory, such as outputs/chinchilla.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Changes = Annotated[bool, typer.Option("--json", help="Print as JSON which runs were changed.")]
Runs = Annotated[
    list[str] | None,
    typer.Argument(help="Run ids, or their first digits.", show_default=False, autocompletion=complete_run),
]


def show(
    value: Any, as_json: bool, pretty: Callable[[Any], None], plain: Callable[[Any], Any] = lambda value: value
) -> None:
    """Prints a result as JSON, or for people."""
    if as_json:
        print(json.dumps(plain(value), indent=1, allow_nan=False))
    else:
        pretty(value)


def _open(path: Path) -> SweepDirectory:
    from ..observe.status import open_sweep

    return open_sweep(path)


@app.command("status")
def status_command(
    sweep: Sweep,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every two seconds; Ctrl-C ends it.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every run, however many there are.")] = False,
    as_json: Json = False,
) -> None:
    """States by count, and every run's step, loss, speed, place, and why it waits or failed."""
    from ..observe.status import print_json, print_status, sweep_status, watch_sweep
    from ..runs.directory import SweepDirectory

    directory = SweepDirectory.open(sweep)
    if watch:
        watch_sweep(directory, as_json, everything)
    elif as_json:
        print_json(sweep_status(directory))
    else:
        print_status(sweep_status(directory), everything)


@app.command("logs")
def logs_command(
    sweep: Sweep,
    run: Annotated[
        str | None,
        typer.Argument(help="A run id, or its first digits.", show_default=False, autocompletion=complete_run),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
) -> None:
    """What a run has said, from its first attempt on; without RUN the newest lines of those that run or failed."""
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
    failed: Annotated[bool, typer.Option("--failed", help="All that failed; so it is when nothing is named.")] = False,
    diverged: Annotated[
        bool, typer.Option("--diverged", help="All that diverged, each as a new run with a lower learning rate.")
    ] = False,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="All that were cancelled.")] = False,
    as_json: Changes = False,
) -> None:
    """Starts runs again that failed, with a new budget of retries; each goes on from its newest checkpoint."""
    from ..execute.control import retry

    _act(sweep, as_json, lambda directory: retry(directory, runs or [], failed, diverged, cancelled))


@app.command("cancel")
def cancel_command(sweep: Sweep, runs: Runs = None, as_json: Changes = False) -> None:
    """Stops runs, or the whole sweep with all its jobs; what trains saves a checkpoint first."""
    from ..execute.control import cancel

    _act(sweep, as_json, lambda directory: cancel(directory, runs or []))


@app.command("extend")
def extend_command(
    sweep: Sweep,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="As for sweep.py: grid.budgets=[1e20]", show_default=False)
    ] = None,
    grid: Annotated[Path | None, typer.Option(help="A YAML file with a grid, as `suggest --write` makes.")] = None,
    as_json: Changes = False,
) -> None:
    """Adds budgets, sizes or points to a sweep; only the new runs start."""
    from ..execute.conduct import resume
    from ..growth.extend import extend_sweep

    def grow(directory: SweepDirectory) -> int:
        names = extend_sweep(directory, overrides or [], grid)
        return resume(directory, only=set(names)) if names else 0

    _act(sweep, as_json, grow)


@app.command("doctor")
def doctor_command(
    sweep: Sweep,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is wrong.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also read every checkpoint and check its sums.")] = False,
    as_json: Json = False,
) -> None:
    """Finds orphans, stale locks, half-written files and the like, mends them and says what it did."""
    from ..observe.doctor import examine_sweep, print_findings
    from ..runs.directory import SweepDirectory

    found = examine_sweep(SweepDirectory.open(sweep), not dry_run, deep)  # a plan that cannot be read is a finding
    show(found, as_json, print_findings, lambda found: [vars(finding) for finding in found])
    raise typer.Exit(1 if any(finding.is_left for finding in found) else 0)


@app.command("sync")
def sync_command(sweep: Sweep, as_json: Json = False) -> None:
    """Sends runs that were tracked offline to wandb."""
    from ..results.tracking import sync_sweep

    with _said_aside(as_json):
        count = sync_sweep(_open(sweep))
    show({"sent": count}, as_json, lambda answer: print(f"{answer['sent']} runs were sent"))


@app.command("suggest")
def suggest_command(
    sweep: Sweep,
    budget: Annotated[float, typer.Option(help="FLOPs that the new runs may cost together.", show_default=False)],
    target_flops: Annotated[
        float | None, typer.Option(help="Budget whose optimum is asked for; by default the sweep's largest target.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="New seeds that each size is offered with, beside the sweep's own.")] = 1,
    max_flops: Annotated[float | None, typer.Option(help="The most that one run may cost.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the grid here, for `extend --grid`.")] = None,
    as_json: Json = False,
) -> None:
    """The runs that shrink the interval at the target most for their FLOPs."""
    import yaml

    from ...train.files import write_atomic
    from ..growth.suggest import print_suggestion, suggest_runs

    if write is not None and not write.parent.is_dir():
        raise UserError(f"--write is {write}, and {write.parent} is no folder; name a file in a folder that exists")
    suggestion = suggest_runs(_open(sweep), budget, target_flops, seeds=seeds, max_flops=max_flops)
    if write is not None:
        try:
            write_atomic(write, yaml.safe_dump(suggestion.grid, sort_keys=False))
        except OSError as error:
            raise UserError(
                f"--write is {write}, which cannot be written ({error.strerror or error}); name a file that can"
            ) from error
    show(suggestion, as_json, print_suggestion, lambda suggestion: suggestion.to_dict())


@app.command("report")
def report_command(sweep: Sweep, as_json: Json = False) -> None:
    """Writes the table, the laws and the report anew from what the runs have written."""
    from ..results.finish import print_result, write_results

    directory = _open(sweep)
    with _said_aside(as_json):
        law = write_results(directory, anew=True)
    show(law, as_json, lambda law: print_result(directory))


def _act(path: Path, as_json: bool, action: Callable[[SweepDirectory], int]) -> None:
    """Does something to a sweep and leaves with its exit code; as JSON its answer is the runs that it changed."""
    from ..runs.membership import members

    sweep = _open(path)
    before = {run.run_id: run.state() for run in members(sweep)} if as_json else {}
    with _said_aside(as_json):
        code = action(sweep)
    if as_json:
        after = {run.run_id: run.state() for run in members(sweep)}
        said = [{"run_id": name, **vars(state)} for name, state in after.items() if before.get(name) != state]
        show({"exit_code": code, "changed": said}, as_json, print)
    raise typer.Exit(code)


@contextlib.contextmanager
def _said_aside(aside: bool) -> Iterator[None]:
    """What is printed meanwhile goes to standard error, so that standard output is JSON alone."""
    with contextlib.redirect_stdout(sys.stderr) if aside else contextlib.nullcontext():
        yield
