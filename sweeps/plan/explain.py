"""How to spread a run over ranks, for a person: what was chosen, its bytes and seconds, and what was not."""

from __future__ import annotations

import dataclasses
import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...train.config import RunConfig, from_dict
from ...train.errors import UserError
from ...train.files import read_document
from ...train.flops import count_parameters
from ...train.planner.planner import Candidate, Choice, Hardware, choose, gigabytes
from ...train.planner.validation import validate
from ..config import ClusterConfig
from ..terminal import console, plain_table, say, short
from .gantt import predicted, print_gantt
from .rates import half_speed_width

SETTINGS = ("tp", "dp", "pp", "zero", "micro_batch_size", "recompute")  # of `parallel`, that a choice sets


def read_run(path: Path) -> RunConfig:
    """The config of a run directory, or of a config.yaml."""
    file = path / "config.yaml" if path.is_dir() else path
    remedy = "give a run directory, or the config.yaml of a run"
    config = from_dict(RunConfig, read_document(file, dict[str, Any], remedy=remedy))
    validate(config)
    if config.model.vocab_size is None:
        raise UserError(f"{file} has no model.vocab_size; give the config.yaml of a planned run, which has one")
    return config


def hardware_of(cluster: ClusterConfig, flops_per_second: float) -> Hardware:
    """What a rank of a job on this cluster has."""
    gpus = cluster.gpus_per_job > 0
    return Hardware(
        memory_bytes=(cluster.gpu_memory_gb if gpus else cluster.memory_gb) * 1e9,
        flops_per_second=flops_per_second,
        half_speed_width=half_speed_width(cluster),
        memory_bandwidth=cluster.memory_gb_per_s * 1e9,
        intra_bandwidth=cluster.node_gb_per_s * 1e9,
        inter_bandwidth=cluster.network_gb_per_s * 1e9,
        latency=cluster.latency_us * 1e-6,
        ranks_per_node=cluster.ranks_per_node or 2**30,
        device="cuda" if gpus else "cpu",
    )


def distinct_shapes(runs: list[RunConfig]) -> list[RunConfig]:
    """One run per model, sequence, batch and precision: seeds, D and learning rates change no plan."""
    found: dict[str, RunConfig] = {}
    for run in runs:
        shape = [vars(run.model), run.data.sequence_length, run.optimizer.batch_size, run.precision]
        found.setdefault(json.dumps(shape), run)
    return list(found.values())


def explain_choice(choice: Choice) -> dict[str, Any]:
    """As plain values: the settings to use, why, and every way that was considered, fastest first."""
    model = choice.config.model
    return {
        "model": {"width": model.width, "depth": model.depth, "N_total": count_parameters(model).N_total},
        "sequence_length": choice.config.data.sequence_length,
        "batch_size": choice.config.optimizer.batch_size,
        "precision": choice.config.precision,
        "ranks": choice.ranks,
        "margin": choice.margin,
        "hardware": dataclasses.asdict(choice.hardware),
        "why": choice.why(),
        "chosen": None if choice.best is None else _described(choice, choice.best),
        "considered": [_described(choice, candidate) for candidate in choice.candidates],
    }


def _described(choice: Choice, candidate: Candidate) -> dict[str, Any]:
    return {
        **{name: getattr(candidate.parallel, name) for name in (*SETTINGS, "sequence_parallel")},
        "fits": choice.fits(candidate),
        "verdict": choice.verdict(candidate),
        "seconds": dataclasses.asdict(candidate.time) | {"total": candidate.time.total},
        "bytes": dataclasses.asdict(candidate.memory) | {"peak": candidate.memory.peak},
    }


def print_choice(choice: Choice) -> None:
    """Why, what was considered, and where bytes and seconds go."""
    model, config = choice.config.model, choice.config
    say(
        f"N {short(count_parameters(model).N_total)} ({model.width}x{model.depth}), {config.optimizer.batch_size} "
        f"sequences of {config.data.sequence_length} tokens a step, {config.precision}, on {choice.ranks} ranks"
    )
    say(choice.why())
    columns = ("tp", "dp", "pp", "zero", "micro-batch", "recompute", "s a step", "GB", "verdict")
    title = "the fastest of each tp and ZeRO stage, with a pipeline and without, in time's order"
    table = plain_table(columns, ("recompute", "verdict"), title)
    for candidate in choice.notable():
        table.add_row(
            *(str(getattr(candidate.parallel, name)) for name in SETTINGS),
            f"{candidate.time.total:.3g}",
            f"{candidate.memory.peak / 1e9:.3g}",
            choice.verdict(candidate),
            style="bold" if candidate is choice.best else None if choice.fits(candidate) else "dim",
        )
    console().print(table)
    if (best := choice.best) is None:
        return
    sizes = {name: size for name, size in vars(best.memory).items() if name != "moments"}
    sizes[f"peak ({best.memory.worst})"] = best.memory.peak
    table = plain_table(("bytes a rank", "", "seconds a step", ""), ("bytes a rank", "seconds a step"))
    left = [(name.replace("_", " "), gigabytes(size)) for name, size in sizes.items()]
    right = [(name, f"{spent:.3g}") for name, spent in (vars(best.time) | {"step": best.time.total}).items()]
    for size, spent in zip_longest(left, right, fillvalue=("", "")):
        table.add_row(*size, *spent)
    console().print(table)
    changed = [name for name in ("ep", "chunks") if getattr(best.parallel, name) != getattr(config.parallel, name)]
    say("use it with: " + " ".join(f"parallel.{name}={getattr(best.parallel, name)}" for name in (*SETTINGS, *changed)))
    if (shown := best.parallel if best.parallel.pp > 1 else config.parallel).pp > 1:
        name = "chosen" if shown is best.parallel else "as configured"
        piped = dataclasses.replace(config, parallel=shown)
        print_gantt(predicted(piped, choice.hardware), f"{shown.schedule} of {shown.pp} stages, {name}")


def explain_runs(runs: list[RunConfig], cluster: ClusterConfig, flops_per_second: float) -> None:
    """Prints the choice for every distinct shape, each on the ranks that it asks for."""
    for run in distinct_shapes(runs):
        print_choice(choose(run, run.parallel.world_size, hardware_of(cluster, flops_per_second)))
