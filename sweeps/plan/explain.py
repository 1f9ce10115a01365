"""Print the meshes that a run could use, ranked by estimated time per step, with the memory of each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ...train.config import RunConfig, from_dict
from ...train.errors import UserError, counted
from ...train.files import read_document
from ...train.flops import count_parameters
from ...train.planner.planner import TIE, Hardware, Way, rank_ways
from ...train.planner.validation import validate
from ..config import ClusterConfig
from ..terminal import console, plain_table, say, short
from .rates import half_speed_width

SETTINGS = ("tp", "dp", "pp", "ep", "zero", "micro_batch_size", "recompute")  # fields of `parallel` that a way sets
ROWS = 12  # most rows of the table


def read_run(path: Path) -> RunConfig:
    """Read a run's config from its directory or its config.yaml."""
    file = path / "config.yaml" if path.is_dir() else path
    remedy = "give a run directory, or the config.yaml of a run"
    config = from_dict(RunConfig, read_document(file, dict[str, Any], remedy=remedy))
    validate(config)
    if config.model.vocab_size is None:
        raise UserError(f"{file} has no model.vocab_size; give the config.yaml of a planned run, which has one")
    return config


def ways_to_dict(ways: list[Way]) -> dict[str, Any]:
    """Convert ways to train a run to a dict: `considered` has all, best first; `chosen` the best, None if none fits."""
    ranked = [
        {name: getattr(way.parallel, name) for name in (*SETTINGS, "sequence_parallel")}
        | {"fits": way.fits, "verdict": _verdict(way, ways[0]), "seconds": way.seconds}
        | {"bytes": dataclasses.asdict(way.memory) | {"peak": way.memory.peak}}
        for way in ways
    ]
    return {"chosen": ranked[0] if ways[0].fits else None, "considered": ranked}


def _verdict(way: Way, best: Way) -> str:
    slower = way.seconds / best.seconds - 1
    verdict = "does not fit" if not way.fits else "chosen" if way is best else "as fast, and less simple"
    return f"{slower:.0%} slower" if way.fits and slower > TIE else verdict


def print_ways(config: RunConfig, ways: list[Way]) -> None:
    """Print the ways to train a run, best first, and the best one's overrides."""
    model, best, fitting = config.model, ways[0], sum(way.fits for way in ways)
    say(
        f"N {short(count_parameters(model).N_total)} ({model.width}x{model.depth}), {config.optimizer.batch_size} "
        f"sequences of {config.data.sequence_length} tokens a step, {config.precision}, on "
        f"{counted(best.parallel.world_size, 'rank')}: {fitting} of {counted(len(ways), 'way')} fit into memory"
    )
    meshes = {way.mesh: way for way in reversed(ways)}  # keeps the best way of each mesh
    ranked = [way for way in ways if way is meshes[way.mesh]]
    title = f"{min(ROWS, len(ranked))} of {counted(len(ranked), 'mesh', 'meshes')}, the fastest that fits first"
    table = plain_table((*SETTINGS, "s a step", "GB a rank", "verdict"), ("recompute", "verdict"), title)
    for way in ranked[:ROWS]:
        numbers = f"{way.seconds:.3g}", f"{way.memory.peak / 1e9:.3g}", _verdict(way, best)
        settings = (str(getattr(way.parallel, name)) for name in SETTINGS)
        table.add_row(*settings, *numbers, style=None if way.fits else "dim")
    console().print(table)
    if best.fits:
        names = (*SETTINGS, "chunks") if best.parallel.chunks != config.parallel.chunks else SETTINGS
        say("use it with: " + " ".join(f"parallel.{name}={getattr(best.parallel, name)}" for name in names))
    else:
        say(f"no way fits: the smallest needs {min(way.memory.peak for way in ways) / 1e9:.3g} GB a rank")


def explain_runs(runs: list[RunConfig], cluster: ClusterConfig, flops_per_second: float) -> None:
    """Print the ranked meshes for each model, sequence length, batch and precision in the runs."""
    gpus = cluster.gpus_per_job > 0
    hardware = Hardware(
        memory_bytes=(cluster.gpu_memory_gb if gpus else cluster.memory_gb) * 1e9,
        flops_per_second=flops_per_second,
        half_speed_width=half_speed_width(cluster),
        intra_bandwidth=cluster.node_gb_per_s * 1e9,
        inter_bandwidth=cluster.network_gb_per_s * 1e9,
        ranks_per_node=cluster.ranks_per_node or 2**30,
        device="cuda" if gpus else "cpu",
    )
    shapes = {  # the best mesh does not depend on seed, D and learning rate
        (repr(run.model), run.data.sequence_length, run.optimizer.batch_size, run.precision): run for run in runs
    }
    for run in shapes.values():
        print_ways(run, rank_ways(run, run.parallel.world_size, hardware))
