"""Print laws, mixtures and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.markup import escape

from ..terminal import print_rows, say, short

SHOWN_TASKS = 20  # rows of decision accuracies


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
