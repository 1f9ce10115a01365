"""The end of a sweep: table.csv, the books, the laws and the report, and what the terminal shows of them.

fit/inputs.json says what all of it was made from. Where that still holds, nothing is computed, drawn or written anew.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.markup import escape

from ...train.config import from_dict
from ...train.errors import UserError
from ...train.files import read_json, write_json
from ..config import ClusterConfig
from ..plan.packing import ensemble_speedup
from ..plan.rates import Measured, kind_of, place_of, record_rates
from ..plan.sweep_plan import launch_bound_width
from ..runs import attempts
from ..runs.directory import SweepDirectory
from ..terminal import console, plain_table, short
from . import pages, tracking
from .accounting import account, own_seconds, result_of, shares_device
from .table import sweep_curves, write_table

COSTS = "costs.json"
INPUTS = "inputs.json"
LEAST_SECONDS = 5.0  # of a run that `measured_rates` learns from: a shorter one says more of its start than its speed
SHOWN = 3  # causes of waste that the terminal names
ROOMS = ("fit", "sweeps", "evaluate", "train")  # whose code the results depend on
CODE = (".py", ".yaml", ".html", ".css", ".js")
# What the results are made from, and what they are, below the sweep's folder.
SOURCES = (
    "sweep.yaml",
    "plan.json",
    *(
        f"runs/*/{name}"
        for name in (
            "config.yaml",
            "state.json",
            "summary.json",
            "metrics.jsonl",
            "attempts.jsonl",
            "eval/step_*.json",
        )
    ),
)
MADE = ("table.csv", COSTS, "fit/law.json", "fit/*.html", "fit/*.png", "runs/*/eval/*.html")


def write_results(sweep: SweepDirectory, targets: list[float] | None = None, anew: bool = False) -> dict[str, Any]:
    """The analysis; writes table.csv, costs.json, fit/law.json and the pages, where they are out of date or `anew`.

    `targets`: FLOP budgets to extrapolate to; None: those of the sweep's config.
    """
    digest = _digest(sweep, targets)
    law = None if anew else _up_to_date(sweep, digest)
    if law is None:
        law = _analyze(sweep, targets)
        write_json(sweep.path / "fit" / INPUTS, {"digest": digest, "made": _stamps(sweep, MADE)})
    tracking.push_results(sweep, _say)
    return law


def _digest(sweep: SweepDirectory, targets: list[float] | None) -> str:
    """Of all that the results are made from: code by content, what the runs wrote by size and time."""
    root, found = Path(__file__).resolve().parents[2], hashlib.sha256(repr((targets, _stamps(sweep, SOURCES))).encode())
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*") if path.suffix in CODE):
        found.update(path.read_bytes())
    return found.hexdigest()


def _stamps(sweep: SweepDirectory, patterns: tuple[str, ...]) -> dict[str, list[int]]:
    """Size and time of the last change of each file."""
    found = {path: path.stat() for pattern in patterns for path in sorted(sweep.path.glob(pattern))}
    return {str(path.relative_to(sweep.path)): [stat.st_size, stat.st_mtime_ns] for path, stat in found.items()}


def _up_to_date(sweep: SweepDirectory, digest: str) -> dict[str, Any] | None:
    """The analysis in law.json, where nothing has changed since; else None."""
    known = read_json(sweep.path / "fit" / INPUTS) or {}
    if known.get("digest") != digest or known.get("made") != _stamps(sweep, MADE):
        return None
    law = read_json(sweep.path / "fit" / "law.json")
    return law and {name: value for name, value in law.items() if name not in ("provenance", "estimator")}


def _analyze(sweep: SweepDirectory, targets: list[float] | None) -> dict[str, Any]:
    from ... import fit
    from ...fit.laws.registry import law_class

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
    law = law_class()(**{name: options[name] for name in ("objective", "delta", "tied", "E") if name in options})
    analysis = fit.analyze(runs, tuple(wanted), options["bootstrap"], options["seed"], law)
    provenance = {key: settings.get(key) for key in ("isoflop_version", "git_commit", "git_dirty", "host", "written")}
    provenance["command"] = " ".join(settings.get("command", []))
    costs = account(sweep).to_dict()
    write_json(sweep.path / COSTS, costs)
    fit.write_report(
        analysis,
        sweep.path / "fit",
        curves=sweep_curves(sweep),
        title=sweep.path.name,
        provenance=provenance,
        costs=costs,
    )
    pages.write_pages(sweep, table, analysis.tasks)
    _calibrate(sweep, settings)
    return analysis.to_dict()


def _calibrate(sweep: SweepDirectory, settings: dict[str, Any]) -> None:
    """Adds what this sweep's runs reached to what later estimates are made from. Never an error."""
    cluster = from_dict(ClusterConfig, settings["config"]["cluster"])
    if cluster.kind == "local" and settings.get("host") != platform.node():
        return  # its runs were trained on another machine than this
    place = place_of(cluster, sweep.plan()["runs"][0]["shape"]["cpus"])
    if (said := record_rates(place, measured_rates(sweep, launch_bound_width(cluster)))) is not None:
        _say(f"note: {said}")


def measured_rates(sweep: SweepDirectory, launch_bound_width: float) -> list[Measured]:
    """What the runs that are done reached, each as if trained alone."""
    found = []
    for planned in sweep.plan()["runs"]:
        run = sweep.run(planned["run_id"])
        result = result_of(run)
        if result is None or shares_device(attempts.read(run), result):
            continue
        seconds = own_seconds(run, planned, result)
        if seconds < LEAST_SECONDS:
            continue
        members = result.get("ensemble", 1)
        gain = ensemble_speedup(planned["width"], members, launch_bound_width)
        batch_tokens = planned["D"] // planned["steps"]
        kind = kind_of(planned["precision"], planned["mesh"], batch_tokens, planned["sequence_length"])
        rate = planned["flops_own"] / seconds / gain
        found.append(Measured(run.run_id, kind, planned["width"], rate, result["device"]))
    return found


def _say(line: str) -> None:
    """To people alone: standard output may be somebody's JSON."""
    print(line, file=sys.stderr)


def print_result(sweep: SweepDirectory) -> None:
    """The laws in a table, the warnings, the cost, and where the pages are."""
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
    if rows := _estimates(law):
        columns = ("FLOPs", "approach", "N", "D", "D/N", "loss")
        table = plain_table(columns, ("approach",), f"{name}: compute-optimal, with 95 % intervals")
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
    found = [
        (item["flops"], name, item)
        for name, approach in (law.get("approaches") or {}).items()
        for item in approach.get("optimal", [])
    ]
    return [
        [
            f"{flops:.3g}",
            name,
            _with_interval(item["N"], item.get("N_ci"), short),
            _with_interval(item["D"], item.get("D_ci"), short),
            "–" if not item["N"] or item["D"] is None else f"{item['D'] / item['N']:.3g}",
            _with_interval(item["loss"], item.get("loss_ci"), lambda value: f"{value:.3f}"),
        ]
        for flops, name, item in sorted(found, key=lambda row: row[0])
    ]


def _with_interval(value: float | None, interval: list[float | None] | None, say: Callable[[float], str]) -> str:
    """None is a bound of an interval without an end."""
    if value is None:
        return "–"
    if not interval:
        return say(value)
    low, high = interval
    return f"{say(value)} [{'−∞' if low is None else say(low)}, {'∞' if high is None else say(high)}]"


def cost_lines(costs: dict[str, Any]) -> list[str]:
    """Two lines: planned against used, and what was wasted."""
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
