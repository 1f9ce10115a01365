"""`isoflop bench`: ours beside the peer, in one run. The room bench/ is imported here alone, inside functions."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from .sweep import Json, show

app = typer.Typer(no_args_is_help=True, help="Measure ours beside the peer, in one run.")
Device = Annotated[str, typer.Option(help="auto, cpu or cuda; each has cases of its own.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each side; figures are medians over them.")]
# Of the benchmarks that take a device and rounds and no more: `bench_<name>` of bench/<name>.py.
TIMED = {
    "train": "Tokens per second of our trainer beside transformers' LlamaForCausalLM, same shape, and both sides' MFU.",
    "attention": "Our causal attention beside SDPA's fastest backend and flash-attn, with peak memory.",
    "loss": "Our head and cross-entropy in one beside logits and F.cross_entropy, with peak memory.",
    "ensemble": "Small models trained together beside the same one after the other.",
}


def _register(name: str, about: str) -> None:
    @app.command(name=name, help=about)
    def timed(device: Device = "auto", rounds: Rounds = 15, as_json: Json = False) -> None:
        module = importlib.import_module(f"...bench.{name}", __package__)
        _show_rows(getattr(module, f"bench_{name}")(device, rounds), as_json, module.ABOUT)


for name, about in TIMED.items():
    _register(name, about)


@app.command(name="grid")
def bench_grids(
    case: Annotated[list[str] | None, typer.Option(help="ladder or chinchilla; both when not given.")] = None,
    minutes: Annotated[float, typer.Option(help="How long a sweep may be planned to train, as cluster.minutes.")] = 4.5,
    rounds: Rounds = 2,
    as_json: Json = False,
) -> None:
    """Whole sweeps with trunks, ensembles and workers beside one process per run: FLOPs, wall clock, same losses."""
    from ...bench.grid import ABOUT, CASES, bench_grid

    _show_rows(bench_grid(minutes, rounds, case or CASES), as_json, ABOUT)


@app.command(name="parallel")
def bench_ranks(as_json: Json = False) -> None:
    """Our data, ZeRO and tensor parallelism beside PyTorch's own, on two pinned ranks, in turn."""
    from ...bench.parallel import bench_parallel

    _show_rows(bench_parallel(), as_json)


@app.command(name="fit")
def bench_fits(as_json: Json = False) -> None:
    """Fits per second of our solver beside SciPy's L-BFGS-B, on the same runs and resamples, in turn."""
    from ...bench.fit import bench_fit, print_fit_benchmark

    show(bench_fit(), as_json, print_fit_benchmark)


@app.command(name="evaluate")
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
    """Our evaluation beside lm-eval's own hf model on the same checkpoint: same answers, items per second, overhead."""
    from ...bench.evaluate import ABOUT, CASES, bench_evaluate

    cases = case or (() if sweep else CASES)
    _show_rows(bench_evaluate(device, rounds, items, cases, sweep), as_json, ABOUT)


@app.command(name="queue")
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
