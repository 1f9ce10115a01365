"""`isoflop bench`: ours beside the peer, in one run. The room bench/ is imported here alone, inside functions."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ...train.errors import UserError
from .options import command, show

app = typer.Typer(no_args_is_help=True, help="Measure ours beside the peer, in one run.")
# Of the benchmarks that take a device and rounds and no more: `bench_<name>` of bench/<name>.py.
TIMED = {
    "train": "Tokens per second of our trainer beside transformers' LlamaForCausalLM, same shape, and both sides' MFU.",
    "attention": "Our causal attention beside SDPA's fastest backend and flash-attn, with peak memory.",
    "loss": "Our head and cross-entropy in one beside logits and F.cross_entropy, with peak memory.",
    "ensemble": "Small models trained together beside the same one after the other.",
}


def _register(name: str, about: str) -> None:
    @command(app, name, help=about)
    def bench_timed(device: str = "auto", rounds: int = 15, as_json: bool = False) -> None:
        module = importlib.import_module(f"...bench.{name}", __package__)
        _show_rows(getattr(module, f"bench_{name}")(device, rounds), as_json, module.ABOUT)


for name, about in TIMED.items():
    _register(name, about)


@command(app, "grid")
def bench_grids(case: list[str] | None = None, minutes: float = 4.5, rounds: int = 2, as_json: bool = False) -> None:
    """Whole sweeps with trunks, ensembles and workers beside one process per run: FLOPs, wall clock, same losses."""
    from ...bench.grid import ABOUT, CASES, bench_grid

    _show_rows(bench_grid(minutes, rounds, case or CASES), as_json, ABOUT)


@command(app, "parallel")
def bench_ranks(as_json: bool = False) -> None:
    """Our data, ZeRO and tensor parallelism beside PyTorch's own, on two pinned ranks, in turn."""
    from ...bench.parallel import bench_parallel

    _show_rows(bench_parallel(), as_json)


@command(app, "fit")
def bench_fits(as_json: bool = False) -> None:
    """Fits per second of our solver beside SciPy's L-BFGS-B, on the same runs and resamples, in turn."""
    from ...bench.fit import bench_fit, print_fit_benchmark

    show(bench_fit(), as_json, print_fit_benchmark)


@command(app, "curves")
def bench_curve_laws(as_json: bool = False) -> None:
    """Our laws of whole loss curves beside the multi-power law in PyTorch: laws per second, errors on unseen runs."""
    from ...bench.curves import ABOUT, bench_curves

    _show_rows(bench_curves(), as_json, ABOUT)


@command(app, "evaluate")
def bench_evaluations(
    device: str = "auto",
    rounds: int = 3,
    items: int = 500,
    case: list[str] | None = None,
    sweep: Path | None = None,
    as_json: bool = False,
) -> None:
    """Our evaluation beside lm-eval's own hf model on the same checkpoint: same answers, items per second, overhead."""
    from ...bench.evaluate import ABOUT, CASES, bench_evaluate

    cases = case or (() if sweep else CASES)
    _show_rows(bench_evaluate(device, rounds, items, cases, sweep), as_json, ABOUT)


@command(app, "queue")
def bench_queues(runs: int = 1000, workers: int = 2, tasks: int = 50, as_json: bool = False) -> None:
    """What a run costs beside its training, in a worker queue and as an array task of submitit."""
    from ...bench.queue import bench_queue

    _show_rows(bench_queue(runs, workers, tasks), as_json)


@command(app, "kernels")
def bench_compiled(
    static: Annotated[bool, typer.Option("--static", help="Compile only, without a GPU.")] = False,
    case: Annotated[list[str] | None, typer.Option(help="Such as 90:bfloat16:128; all when not given.")] = None,
    as_json: bool = False,
) -> None:
    """What the compiler says of every kernel's launches: registers, spills, shared memory, programs at once."""
    from ...bench.kernels import bench_kernels, print_kernels

    if not static:
        raise UserError("bench kernels has --static alone; bench attention and bench loss measure the kernels.")
    show(list(bench_kernels(case or ())), as_json, print_kernels)


def _show_rows(rows: Iterable[dict[str, Any]], as_json: bool, about: str = "") -> None:
    from ...bench.contenders import print_benchmark

    show(list(rows), as_json, lambda rows: print_benchmark(rows, about))
