"""`isoflop bench`: measure this library and another in turn. bench/ is imported inside functions only."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from ...train.errors import UserError
from .options import AsJson, show

app = typer.Typer(no_args_is_help=True, help="Measure this library and another in turn, in one run.")
Device = Annotated[str, typer.Option(help="auto, cpu or cuda; each has its own cases.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each side; results are medians over them.")]
# `bench_<name>`, its file in bench/, its help, and whether it takes a device and rounds.
COMMANDS = (
    ("train", "train", "Tokens per second and MFU of our trainer and transformers' LlamaForCausalLM.", True),
    ("attention", "layers", "Our causal attention and the fastest of SDPA and flash-attn, with peak memory.", True),
    ("loss", "layers", "Our fused head and cross-entropy and F.cross_entropy of the logits, with peak memory.", True),
    ("parallel", "parallel", "Our data, ZeRO and tensor parallelism and PyTorch's, on two pinned ranks.", False),
    ("fit", "fit", "Fits per second of our solver and SciPy's L-BFGS-B, on the same runs and resamples.", False),
    ("curves", "curves", "Our laws of whole loss curves and the multi-power law in PyTorch.", False),
)


def _register(name: str, file: str, about: str, timed: bool) -> None:
    def measure(as_json: bool, *options: Any) -> None:
        module = importlib.import_module(f"...bench.{file}", __package__)
        _show_rows(getattr(module, f"bench_{name}")(*options), as_json, module.ABOUT)

    def on_device(device: Device = "auto", rounds: Rounds = 15, as_json: AsJson = False) -> None:
        measure(as_json, device, rounds)

    def plain(as_json: AsJson = False) -> None:
        measure(as_json)

    app.command(name, help=about)(on_device if timed else plain)


for command in COMMANDS:
    _register(*command)


@app.command("grid")
def bench_sweep(
    case: Annotated[list[str] | None, typer.Option(help="ladder or chinchilla; by default both.")] = None,
    minutes: Annotated[float, typer.Option(help="Planned training time of a sweep, like cluster.minutes.")] = 4.5,
    rounds: Rounds = 2,
    as_json: AsJson = False,
) -> None:
    """Compare whole sweeps with and without shared trunks: FLOPs, wall clock, losses."""
    from ...bench.grid import ABOUT, CASES, bench_grid

    _show_rows(bench_grid(minutes, rounds, case or tuple(CASES)), as_json, ABOUT)


@app.command("evaluate")
def bench_evaluation(
    device: Device = "auto",
    rounds: Rounds = 3,
    items: Annotated[int, typer.Option(min=1, help="Items of HellaSwag and LAMBADA; from 500 on, all of ARC-E.")] = 500,
    case: Annotated[list[str] | None, typer.Option(help="agreement or throughput; by default both.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare our evaluation with lm-eval's hf model on one checkpoint: answers and items per second."""
    from ...bench.evaluate import ABOUT, CASES, bench_evaluate

    _show_rows(bench_evaluate(device, rounds, items, case or CASES), as_json, ABOUT)


@app.command("queue")
def bench_workers(
    runs: Annotated[int, typer.Option(help="Number of trivial runs.")] = 1000,
    workers: Annotated[int, typer.Option(help="Processes that train them.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Measure the overhead per run of the workers on this machine."""
    from ...bench.thousand import ABOUT, bench_queue

    _show_rows(bench_queue(runs, workers), as_json, ABOUT)


@app.command("kernels")
def bench_compiled(
    static: Annotated[bool, typer.Option("--static", help="Compile only, without a GPU.")] = False,
    case: Annotated[list[str] | None, typer.Option(help="A case such as 90:bfloat16:128; by default all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the compiler's report on every kernel: registers, spills, shared memory, tensor cores."""
    from ...bench.kernels import bench_kernels, print_kernels

    if not static:
        raise UserError("bench kernels requires --static; use bench attention or bench loss to time the kernels")
    show(list(bench_kernels(case or ())), as_json, print_kernels)


def _show_rows(rows: Iterable[dict[str, Any]], as_json: bool, about: str) -> None:
    from ...bench.timing import print_benchmark

    show(list(rows), as_json, lambda rows: print_benchmark(rows, about))
