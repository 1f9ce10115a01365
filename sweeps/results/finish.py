"""Write and print the results of a sweep: table.csv, costs, laws and report.

fit/inputs.json records their inputs; if these have not changed, nothing is computed again.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from ...train.errors import UserError, counted
from ...train.files import read_json, write_json
from ..config import ClusterConfig, grid_class, recorded
from ..plan.rates import Measured, kind_of, place_of, record_rates
from ..runs.directory import FIT_FAILURE, SweepDirectory
from ..runs.preflight import FILE as PREFLIGHT
from ..runs.preflight import read_record, summary
from ..terminal import print_rows, say, short
from . import scoring, tracking
from .accounting import account, own_seconds, result_of
from .forecast import forecast_running
from .table import UNTUNED, build_table, write_curves, write_table

if TYPE_CHECKING:
    from ...fit.report.mixture import MixtureStudy

COSTS = "costs.json"
INPUTS = "inputs.json"
LEAST_SECONDS = 5.0  # shortest run used by `measured_rates`: start-up dominates shorter ones
SHOWN = 3  # causes of waste that the terminal names
SHOWN_TASKS = 20  # rows of decision accuracies
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


def print_law(law: dict[str, Any], name: str) -> None:
    """Print the optimum that each approach predicts at each target, then the law, its backtest and the warnings."""
    from ...fit.flops import in_words
    from ...fit.formatting import INTERVALS

    if "approaches" not in law and "mixture" in law:
        print_mixture(law)
        return
    convention = f" for FLOPs {in_words(law['convention'])}" if "convention" in law else ""  # missing in older files
    kind, approaches = law.get("intervals", "noise"), (law.get("approaches") or {}).items()
    optima = [(item, "mixture") for item in law.get("optimal", []) if kind == "mixture"]
    optima += [(item, name) for name, approach in approaches for item in approach.get("optimal", [])]
    rows = []
    for item, approach in sorted(optima, key=lambda row: row[0]["flops"]):
        N, D, loss = (_with_interval(item, key) for key in ("N", "D", "loss"))
        ratio = "–" if not item["N"] or item["D"] is None else short(item["D"] / item["N"])
        rows.append((f"{item['flops']:.3g}", approach, N, D, ratio, loss))
    if optima:
        columns = ("FLOPs", "approach", "N", "D", "D/N", "loss")
        print_rows(columns, ("approach",), f"{name}: compute-optimal{convention}, with 95 % intervals", rows)
        say(INTERVALS[kind])
    if forms := law.get("forms"):
        say("mixture: " + "; ".join(f"{weight:.0%} {form}" for form, weight in forms.items()))
    if constants := dict(law.get("law") or {}):
        form, ci = constants.pop("form", "law"), law.get("ci") or {}
        constants_text = (
            f"{k} = {_with_interval({k: v, f'{k}_ci': ci.get(k)}, k, '{:.4g}'.format)}" for k, v in constants.items()
        )
        say(escape(f"{form}: {', '.join(constants_text)}"))
    if tested := (law.get("backtest") or {}).get("tested"):
        held = "" if tested["inside"] is None else f", {tested['inside']:.0%} within 95 % intervals"
        best = f"; of the approaches {tested['best']} finds N* best" if tested["best"] else ""
        error = "no step" if tested["error"] is None else f"mean error {tested['error']:.2%}{held}"
        say(f"backtest of the {tested['by']}, up to {tested['reach']:.3g} times farther: {error}{best}")
    if law.get("verdict"):
        say(law["verdict"])
    for line in law.get("recipes_compared", []):
        say(escape(line))
    if precision := law.get("precision"):
        from ...fit.report.precision import precision_text  # other sweeps do without the report's modules

        sentences, tables = precision_text(precision)
        say(escape("\n".join(sentences)))
        for title, table in tables.items():
            print_rows([*table], ("format", "form", "quantized"), title, table.to_numpy().tolist())
    for suspect in law.get("suspects", []):
        say(f"  possible reason: {escape(suspect)}")
    for warning in law.get("warnings", []):
        say(f"[yellow]{warning['code']}[/]: {escape(warning['message'])}")


def print_mixture(law: dict[str, Any]) -> None:
    """Print a law.json on mixtures: the answer, its tables and warnings."""
    from ...fit.report.mixture import mixture_tables

    say(escape(law["verdict"]))
    for title, table in mixture_tables(law).items():
        print_rows([*table], ("domain", "form"), title, table.to_numpy().tolist())
    for warning in law["warnings"]:
        if warning["code"] != "no_mixture_answer":  # begins the verdict
            say(f"[yellow]{warning['code']}[/]: {escape(warning['message'])}")


def print_comparisons(comparisons: list[dict[str, Any]]) -> None:
    columns = ("variant", "FLOPs of the base", "multiplier", "of seconds")
    rows = []
    for comparison in comparisons:
        for k in comparison["multipliers"]:
            item = {"value": k["value"], "value_ci": k["ci"]} | k
            flops = f"{k['flops']:.3g}" + " (beyond the runs)" * k["extrapolated"]
            rows.append(
                (escape(comparison["variant"]), flops, *(_with_interval(item, name) for name in ("value", "seconds")))
            )
    print_rows(columns, ("variant",), "compute multipliers, with 95 % intervals", rows)
    for line in (line for comparison in comparisons for line in comparison["sentences"]):
        say(escape(line))
    decisions = comparisons[0]["decisions"]
    rows = [
        (escape(task["task"]), task["metric"], _with_interval(task, "accuracy", "{:.0%}".format), signal)
        for task in decisions["tasks"][:SHOWN_TASKS]
        if not task["reason"] and (signal := _with_interval(task, "signal_to_noise"))
    ]
    if rows:
        columns = ("task", "metric", "decision accuracy", "signal to noise")
        print_rows(columns, columns[:2], "orders of variants that hold at the largest scale", rows)
    for line in decisions["sentences"]:
        say(escape(line))


def _with_interval(item: dict[str, Any], key: str, form: Callable[[float], str] = short) -> str:
    """Format item[key] with its interval, if any; a bound of None means infinity."""
    form, interval = "{:.3f}".format if key == "loss" else form, item.get(f"{key}_ci")
    if item[key] is None:
        return "–"
    if not interval:
        return form(item[key])
    low, high = interval
    return f"{form(item[key])} [{'−∞' if low is None else form(low)}, {'∞' if high is None else form(high)}]"


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
