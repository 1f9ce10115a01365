"""The end of a sweep: table.csv, the books, the laws, the report, and what the terminal shows of them.

Special here: what only serves later (calibration, the tracker) is never an error, for the results are on disk by then.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ...train.config import from_dict
from ...train.errors import UserError
from ...train.files import read_json, write_json
from ..config import ClusterConfig
from ..observe import tracking
from ..plan import calibration
from ..plan.estimates import measured
from ..plan.sweep_plan import launch_bound_width
from ..runs.directory import SweepDirectory
from ..terminal import console, short
from . import pages
from .accounting import account
from .table import loss_curves, write_table

COSTS = "costs.json"
SHOWN = 3  # causes of waste that the terminal names


def finish(sweep: SweepDirectory, targets: list[float] | None = None) -> dict[str, Any]:
    """Writes table.csv, costs.json, fit/law.json and the pages in fit/ from whatever the runs have written.

    Args:
        sweep: the sweep's directory.
        targets: FLOP budgets to extrapolate to; those of the sweep's config where not given.

    Raises:
        UserError: no run is done.
    """
    from ... import fit

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
    costs = account(sweep).to_dict()
    write_json(sweep.path / COSTS, costs)
    fit.write_report(
        analysis, sweep.path / "fit", curves=loss_curves(sweep), title=sweep.path.name, provenance=provenance,
        costs=costs,
    )  # fmt: skip
    pages.write_pages(sweep, table, analysis.tasks)
    _teach(sweep, settings)
    tracking.push_results(sweep, _say)
    return analysis.to_dict()


def _teach(sweep: SweepDirectory, settings: dict[str, Any]) -> None:
    """Adds what this sweep's runs reached to what the estimates of later sweeps are made from."""
    cluster = from_dict(ClusterConfig, settings["config"]["cluster"])
    if cluster.kind == "local" and settings.get("host") != platform.node():
        return  # its runs were trained on another machine than this
    threads = sweep.plan()["runs"][0]["shape"]["cpus"]
    place = calibration.place_of(cluster, threads)
    if (said := calibration.record(place, measured(sweep, launch_bound_width(cluster)))) is not None:
        _say(f"note: {said}")


def _say(line: str) -> None:
    """To people alone: standard output may be somebody's JSON."""
    print(line, file=sys.stderr)


def print_result(sweep: SweepDirectory) -> None:
    """What a sweep ends with: the laws in a table, the warnings, the cost, and where the pages are."""
    law = read_json(sweep.path / "fit" / "law.json")
    if law is None:
        return
    print_law(law, sweep.path.name)
    if (costs := read_json(sweep.path / COSTS)) is not None:
        print("\n".join(cost_lines(costs)))
    print(f"report: {sweep.path / 'fit' / 'report.html'}")
    if (benchmarks := sweep.path / "fit" / "evaluation.html").exists():
        print(f"benchmarks: {benchmarks}")


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
    for line in law.get("recipes_compared", []):
        out.print(escape(line), highlight=False, soft_wrap=True)
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
            "–" if not item["N"] or item["D"] is None else f"{item['D'] / item['N']:.3g}",
            _with_interval(item["loss"], item.get("loss_ci"), lambda value: f"{value:.3f}"),
        ]
        for flops, name, item in rows
    ]


def _by_approach(law: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {name: approach.get("optimal", []) for name, approach in (law.get("approaches") or {}).items()}


def _with_interval(value: float | None, interval: list[float | None] | None, say: Callable[[float], str]) -> str:
    """JSON has no infinity: a bound of an interval without an end is None there."""
    if value is None:
        return "–"
    if not interval:
        return say(value)
    low, high = interval
    return f"{say(value)} [{'−∞' if low is None else say(low)}, {'∞' if high is None else say(high)}]"


def cost_lines(costs: dict[str, Any]) -> list[str]:
    """What a sweep cost, in two lines: planned against used, and what was wasted."""
    used, planned, unit = costs["used"], costs["planned"], costs["unit"]
    price = "" if used["dollars"] is None else f", ${used['dollars']:,.2f}"
    head = (
        f"{costs['done']} of {costs['runs']} runs done, {used['flops']:.3g} FLOPs (exact) in {used['hours']:.3g} {unit}"
    )
    head += f"{price} (planned: {planned['hours']:.3g})"
    if (error := costs["error"]) is not None:
        source = f"{costs['measured_runs']} measured runs" if costs["measured_runs"] else "an assumed speed"
        head += f"; training took {error['ratio']:.2f} times its estimate from {source}"
    return [head, _waste_line(costs)]


def _waste_line(costs: dict[str, Any]) -> str:
    wasted, causes = costs["wasted"], costs["causes"]
    said = "nothing was wasted"
    if wasted["hours"] > 0:
        share = wasted["hours"] / costs["used"]["hours"]
        said = f"wasted: {wasted['hours']:.3g} {costs['unit']} ({share:.1%}) and {wasted['flops']:.3g} FLOPs"
    ended = [f"{lost['attempts']} {cause}" for cause, lost in causes.items() if lost["attempts"]]
    if ended:
        rest = len(ended) - SHOWN
        more = f" and {rest} more cause{'s' * (rest > 1)}" if rest > 0 else ""
        said += f"; attempts that ended early: {', '.join(ended[:SHOWN])}{more}"
    return f"{said}; {costs['retries']} of {costs['retry_budget']} retries used"
