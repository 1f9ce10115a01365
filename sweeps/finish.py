"""The end of a sweep: table.csv, the laws, the report, and the table that the terminal shows."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ..train.errors import UserError
from ..train.files import read_json
from .runs import SweepDirectory
from .table import loss_curves, write_table
from .terminal import console, describe, short


def finish(sweep: SweepDirectory, targets: list[float] | None = None) -> dict[str, Any]:
    """Writes table.csv, fit/law.json and fit/report.html from whatever the runs have written.

    Args:
        sweep: the sweep's directory.
        targets: FLOP budgets to extrapolate to; those of the sweep's config where not given.

    Raises:
        UserError: no run is done.
    """
    from .. import fit

    settings = sweep.settings()
    table = write_table(sweep)
    if table.empty:
        raise UserError(
            f"no run of {sweep.path} is done, so there is nothing to fit; see `isoflop status {sweep.path}`"
        )
    options = settings["config"]["fit"]
    runs = fit.read_table(sweep.path)
    largest = float(table["flops"].max())
    wanted = targets or options["targets"] or [largest * factor for factor in (10.0, 100.0, 1000.0)]
    law = fit.ChinchillaLaw(**{name: options[name] for name in ("objective", "delta", "tied", "E") if name in options})
    analysis = fit.analyze(runs, tuple(wanted), options["bootstrap"], options["seed"], law)
    provenance = {key: settings.get(key) for key in ("isoflop_version", "git_commit", "git_dirty", "host", "written")}
    provenance["command"] = " ".join(settings.get("command", []))
    fit.write_report(
        analysis, sweep.path / "fit", curves=loss_curves(sweep), title=sweep.path.name, provenance=provenance
    )
    return analysis.to_dict()


def print_result(sweep: SweepDirectory) -> None:
    """What a sweep ends with: the laws in a table, the warnings, the cost, and where the report is."""
    law = read_json(sweep.path / "fit" / "law.json")
    if law is None:
        return
    print_law(law, sweep.path.name)
    print(_cost(sweep))
    print(f"report: {sweep.path / 'fit' / 'report.html'}")


def print_law(law: dict[str, Any], name: str) -> None:
    """N, D and loss at each target by each approach, then what to distrust."""
    out = console()
    rows = _estimates(law)
    if rows:
        table = Table(title=f"{name}: compute-optimal, with 95 % intervals", title_justify="left", box=box.SIMPLE)
        for column in ("FLOPs", "approach", "N", "D", "D/N", "loss"):
            table.add_column(column, justify="left" if column == "approach" else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        out.print(table)
    if law.get("verdict"):
        out.print(law["verdict"], highlight=False, soft_wrap=True)
    for suspect in law.get("suspects", []):
        out.print(f"  may be why: {escape(suspect)}", highlight=False, soft_wrap=True)
    for warning in law.get("warnings", []):
        out.print(f"[yellow]{warning['code']}[/]: {escape(warning['message'])}", highlight=False, soft_wrap=True)


def _estimates(law: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, estimates in _by_approach(law).items():
        for item in estimates:
            rows.append((item["flops"], name, item))
    rows.sort(key=lambda row: row[0])
    return [
        [
            f"{flops:.3g}",
            name,
            _with_interval(item["N"], item.get("N_ci"), short),
            _with_interval(item["D"], item.get("D_ci"), short),
            f"{item['D'] / item['N']:.3g}",
            _with_interval(item["loss"], item.get("loss_ci"), lambda value: f"{value:.3f}"),
        ]
        for flops, name, item in rows
    ]


def _by_approach(law: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {name: approach.get("optimal", []) for name, approach in (law.get("approaches") or {}).items()}


def _with_interval(value: float | None, interval: list[float] | None, say: Any) -> str:
    if value is None:
        return "–"
    return f"{say(value)} [{say(interval[0])}, {say(interval[1])}]" if interval else say(value)


@dataclasses.dataclass(frozen=True)
class Spent:
    """What the runs that are done have cost, and what the plan said they would."""

    runs: int
    flops: float
    seconds: float
    estimated_seconds: float


def spent(sweep: SweepDirectory) -> Spent:
    """Adds up the summaries of the runs that are done; of a branch what came after its trunk."""
    planned = {run["run_id"]: run for run in sweep.plan()["runs"]}
    done = [(run.summary() or {}, planned[run.run_id]) for run in sweep.runs() if run.is_done()]
    own = [1 - plan.get("first_step", 0) / plan["steps"] for _, plan in done]
    return Spent(
        len(done),
        sum(share * summary["flops_exact"] for share, (summary, _) in zip(own, done, strict=True)),
        sum(share * summary["seconds"] for share, (summary, _) in zip(own, done, strict=True)),
        sum(plan["estimated_seconds"] for _, plan in done),
    )


def _cost(sweep: SweepDirectory) -> str:
    cost = spent(sweep)
    return (
        f"{cost.runs} runs, {cost.flops:.3g} FLOPs (exact) in {describe(cost.seconds)} of training "
        f"(planned: {describe(cost.estimated_seconds)})"
    )
