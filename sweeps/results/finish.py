"""Write and print the results of a sweep: table.csv, costs, laws and report.

fit/inputs.json records their inputs; if these have not changed, nothing is computed again.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...train.errors import UserError, counted
from ...train.files import read_json, write_json
from ..config import ClusterConfig, grid_class, recorded
from ..plan.rates import Measured, kind_of, place_of, record_rates
from ..runs.directory import FIT_FAILURE, SweepDirectory
from ..runs.preflight import FILE as PREFLIGHT
from ..runs.preflight import read_record, summary
from . import scoring, tracking
from .accounting import account, own_seconds, result_of
from .forecast import forecast_running
from .printing import print_law
from .table import UNTUNED, build_table, write_curves, write_table

if TYPE_CHECKING:
    from ...fit.report.mixture import MixtureStudy

COSTS = "costs.json"
INPUTS = "inputs.json"
LEAST_SECONDS = 5.0  # shortest run used by `measured_rates`: start-up dominates shorter ones
SHOWN = 3  # causes of waste that the terminal names
ROOMS = ("fit", "sweeps", "evaluate", "train")  # folders whose code the results depend on
CODE = (".py", ".yaml", ".html", ".css", ".js")
# Inputs and outputs of the results, relative to the sweep's folder.
OF_A_RUN = ("config.yaml", "state.json", "summary.json", "metrics.jsonl", "events.jsonl", "attempts.jsonl")
SOURCES = (
    "sweep.yaml",
    "plan.json",
    PREFLIGHT,
    UNTUNED,
    *(f"runs/*/{name}" for name in (*OF_A_RUN, "eval/step_*.json")),
)
MADE = ("*.csv", "tuning.yaml", COSTS, "fit/law.json", "fit/*.html", "fit/*.png")


def write_results(
    sweep: SweepDirectory,
    targets: list[float] | None = None,
    force: bool = False,
    speedup: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Write table.csv, costs.json, fit/law.json and the pages if they are out of date. Returns the laws.

    Args:
        targets: FLOP budgets to extrapolate to; None: those of the sweep's config.
        force: Write even what is up to date.
        speedup: How many times as fast as unquantized runs formats train, by format.

    Raises:
        UserError: no run is done.
    """
    digest, law, inputs = _digest(sweep, targets, speedup), None, sweep.path / "fit" / INPUTS
    if not force and read_json(inputs) == {"digest": digest, "made": _stamps(sweep, MADE)}:
        law = read_json(sweep.path / "fit" / "law.json")
    if law is not None:
        hidden = ("provenance", "estimator", "mixture") if "approaches" in law else ()
        law = {name: value for name, value in law.items() if name not in hidden}
    else:
        try:
            law = _analyze(sweep, targets, speedup)
        except UserError:
            raise  # nothing to fit yet
        except Exception as error:
            if not speedup:  # it is the command's, and no fault of the sweep
                write_json(sweep.path / FIT_FAILURE, {"reason": f"{error}" or type(error).__name__})
            raise
        write_json(inputs, {"digest": digest, "made": _stamps(sweep, MADE)})
    (sweep.path / FIT_FAILURE).unlink(missing_ok=True)
    tracking.push_results(sweep, _note)
    return law


def _digest(sweep: SweepDirectory, *asked: Any) -> str:
    """Hash the inputs of the results: code by content, the runs' files by size and time."""
    root, digest = (
        Path(__file__).resolve().parents[2],
        hashlib.sha256(repr((asked, _stamps(sweep, SOURCES))).encode()),
    )
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*") if path.suffix in CODE):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _stamps(sweep: SweepDirectory, patterns: tuple[str, ...]) -> dict[str, list[int]]:
    """Return [size, modification time] of each file that matches one of the patterns."""
    stats = {path: path.stat() for pattern in patterns for path in sorted(sweep.path.glob(pattern))}
    return {str(path.relative_to(sweep.path)): [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}


def _analyze(sweep: SweepDirectory, targets: list[float] | None, speedup: dict[str, float] | None) -> dict[str, Any]:
    from ... import fit
    from ...fit.laws.registry import loss_law

    settings = sweep.settings()
    config = recorded(settings)
    options = config.fit
    answers = scoring.final_answers(sweep)
    table, curves = write_table(sweep, answers), write_curves(sweep)
    if table.empty:
        raise UserError(
            f"no run of {sweep.path} is done, so there is nothing to fit yet; see `isoflop status {sweep.path}`"
        )
    if (speedup := speedup or options.speedup) and "weights_format" not in table:
        problem = f"no run of {sweep.path} has a number format"
        raise UserError(f"--speedup or fit.speedup is given, but {problem}; leave it out")
    costs = None if sweep.is_ingested else account(sweep)
    if costs is not None:
        write_json(sweep.path / COSTS, costs)
    if (grid_results := grid_class(settings).results(sweep)) is not None:
        write_json(sweep.path / "fit" / "law.json", grid_results)
        return grid_results
    runs = fit.read_table(sweep.path)
    largest = float(table["flops"].max())
    budgets = targets or options.targets or [largest * factor for factor in (10.0, 100.0, 1000.0)]
    law = loss_law(options.form, objective=options.objective)
    asked = (tuple(budgets), options.bootstrap, 0, law)
    analysis, ended = fit.analyze(runs, *asked, intervals=options.intervals, speedup=speedup), fit.read_table(table)
    provenance = {key: settings.get(key) for key in ("isoflop_version", "git_commit", "git_dirty", "host", "written")}
    provenance["command"] = " ".join(settings.get("command") or ())
    provenance["preflight"] = "; ".join(summary(*node) for node in read_record(sweep).nodes.items()) or None
    fit.write_report(
        analysis,
        sweep.path / "fit",
        curves=curves,
        title=sweep.path.name,
        provenance=provenance,
        costs=costs,
        under_way=[asdict(forecast) for forecast in forecast_running(sweep)[0]],
        alone=fit.analyze(ended, *asked, intervals=options.intervals) if len(runs) > len(ended) else None,
    )
    scoring.write_pages(sweep, table, answers)
    if config.cluster.kind != "local" or settings.get("host") == platform.node():  # other machines have other speeds
        _calibrate(sweep, config.cluster)
    return analysis.to_dict()


def study_mixtures(source: Path, seed: int = 0, **options: Any) -> MixtureStudy:
    """Fit a table, or a sweep's finished runs, with the sweep's target and base unless others are given."""
    from ...fit.report.mixture import MixtureStudy

    if not (source / "plan.json").exists():
        return MixtureStudy.of(source, seed, **options)
    sweep = SweepDirectory.open(source)
    table, config = build_table(sweep), sweep.settings()["config"]
    if table.empty:
        raise UserError(f"no run of {source} is done, so there is nothing to fit yet; see `isoflop status {source}`")
    data, domains = config["data"], config["data"].get("domains") or {}
    base = config["grid"].get("base") or {name: domain["weight"] for name, domain in domains.items()}
    options = {"target": data.get("target"), "base": base or None} | options
    table = table[table["final"]].assign(group=table["trunk"].fillna(table["run_id"]))  # branches share their noise
    return MixtureStudy.of(table, seed, data.get("epochs_of") or 0.0, **options)


def write_mixture(sweep: SweepDirectory) -> dict[str, Any]:
    """Write the report of a sweep of mixtures. Returns the content of law.json."""
    study, command = study_mixtures(sweep.path), " ".join(sweep.settings().get("command") or ())
    study.write(sweep.path / "fit", sweep.path.name, {"command": command}, read_json(sweep.path / COSTS))
    return study.to_dict()


def _calibrate(sweep: SweepDirectory, cluster: ClusterConfig) -> None:
    place = place_of(cluster, sweep.plan()["runs"][0]["shape"]["cpus"])
    if (problem := record_rates(place, measured_rates(sweep))) is not None:
        _note(f"note: {problem}")


def measured_rates(sweep: SweepDirectory) -> list[Measured]:
    """Return the FLOP/s of finished runs, except short ones and groups that earlier versions trained together."""
    rates = []
    for planned in sweep.plan()["runs"]:
        run = sweep.run(planned["run_id"])
        result = result_of(run)
        if result is None or "device" not in result or result.get("ensemble", 1) > 1:
            continue
        seconds = own_seconds(run, planned, result)
        if seconds < LEAST_SECONDS:
            continue
        batch_tokens = planned["D"] // planned["steps"]
        numbers = planned["precision"], planned["mesh"]
        kind = kind_of(*numbers, batch_tokens, planned["sequence_length"], planned["formats"])
        rate = planned["flops_own"] / seconds
        rates.append(Measured(run.run_id, kind, planned["width"], rate, result["device"]))
    return rates


def _note(line: str) -> None:
    """Print to standard error, because standard output may be JSON."""
    print(line, file=sys.stderr)


def print_result(sweep: SweepDirectory) -> None:
    law = read_json(sweep.path / "fit" / "law.json")
    if law is None:
        return
    print_law(law, sweep.path.name)
    if (costs := read_json(sweep.path / COSTS)) is not None:
        print("\n".join(cost_lines(costs)))
    if (report := sweep.path / "fit" / "report.html").exists():
        print(f"report: {report}")
    if (benchmarks := sweep.path / "fit" / "evaluation.html").exists():
        print(f"benchmarks: {benchmarks}")


def cost_lines(costs: dict[str, Any]) -> list[str]:
    """Describe costs.json in two lines: used and planned cost, then waste."""
    used, unit = costs["used"], costs["unit"]
    price = "" if used["dollars"] is None else f", ${used['dollars']:,.2f}"
    head = (
        f"{costs['done']} of {costs['runs']} runs done, {used['flops']:.3g} FLOPs (exact) in {used['hours']:.3g} {unit}"
        f"{price} (planned: {costs['planned']['hours']:.3g})"
    )
    if (error := costs["error"]) is not None:
        source = counted(costs["measured_runs"], "measured run") if costs["measured_runs"] else "an assumed speed"
        head += f"; training took {error['ratio']:.2f} times its estimate from {source}"
    if (share := costs.get("cpu_share")) is not None:
        head += f"; {share:.0%} of the core-hours were CPU time, and the rest waited for cores or other ranks"
    wasted, waste = costs["wasted"], "nothing was wasted"
    if wasted["hours"] > 0:
        share = wasted["hours"] / used["hours"]
        waste = f"wasted: {wasted['hours']:.3g} {unit} ({share:.1%}) and {wasted['flops']:.3g} FLOPs"
    if ended := [f"{lost['attempts']} {cause}" for cause, lost in costs["causes"].items() if lost["attempts"]]:
        rest = len(ended) - SHOWN
        more = f" and {rest} more cause{'s' * (rest > 1)}" if rest > 0 else ""
        waste += f"; attempts that ended early: {', '.join(ended[:SHOWN])}{more}"
    if few := costs.get("unrecorded"):
        waste += f"; the attempts of {counted(few, 'run')} are not recorded, so hours are undercounted"
    return [head, f"{waste}; {costs['retries']} of {costs['retry_budget']} retries used"]
