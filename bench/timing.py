"""Time contenders in turn, and make the rows and the table of `isoflop bench`.

Contenders alternate in one process, so that load on the machine affects all alike. A figure is the median over rounds,
and its spread half the interquartile range of the rounds' ratios. A ratio is ours over the peer's, in the direction in
which more is better.
"""

from __future__ import annotations

import importlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..train.errors import UserError

if TYPE_CHECKING:
    import torch

THREADS = 2  # of every measurement on a CPU, so that figures do not depend on the number of cores
TURN_SECONDS = 0.03  # of a turn whose number of steps is not given
Row = dict[str, Any]
Step = Callable[[], Any]


@dataclass
class Contender:
    """One way to do the work, with its seconds per step in each round."""

    name: str
    step: Step
    seconds: list[float] = field(default_factory=list)


def counted(step: Callable[[int], Any]) -> Step:
    """Return a function that passes the number of the call to `step`: 0, 1, 2, …"""
    count = itertools.count()
    return lambda: step(next(count))


def require(library: str, purpose: str) -> None:
    """Raise UserError if a library is missing, before anything is measured."""
    try:
        importlib.import_module(library)
    except ImportError:
        raise UserError(f"{library} is not installed, {purpose}; it comes with pip install 'isoflop[bench]'") from None


@contextmanager
def measuring_on(device: str, threads: int = THREADS) -> Iterator[torch.device]:
    """Yield the device that `--device` names; inside the block torch uses this number of threads."""
    import torch

    from ..train.hardware import pick_device

    place, before = pick_device(device, "--device"), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield place
    finally:
        torch.set_num_threads(before)


def take_turns(
    contenders: Sequence[Contender], rounds: int, steps: int, device: torch.device,
    between: Callable[[], None] = lambda: None, barrier: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Time `rounds` turns of `steps` steps per contender, after an untimed step; append the seconds per step to each.

    `between` runs after each round, and `barrier` before the clock starts and before it stops (for several ranks).
    """
    for turn in range(rounds + 1):
        for contender in contenders:
            seconds = seconds_per_step(contender.step, 1 if turn == 0 else steps, device, barrier)
            if turn > 0:
                contender.seconds.append(seconds)
        between()


def seconds_per_step(
    step: Step, count: int, device: torch.device, barrier: Callable[[], object] = lambda: None
) -> float:
    """Return the mean wall-clock seconds of `count` consecutive steps."""
    from ..train.hardware import synchronize

    synchronize(device)
    barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    barrier()
    return (time.perf_counter() - start) / count


def isoflop(*arguments: str) -> float:
    """Run an `isoflop` command and return its seconds. Raises UserError if it fails."""
    command, environment = [sys.executable, "-m", "isoflop", *arguments], os.environ | {"OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    done = subprocess.run(
        command, env=environment, text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise UserError(f"isoflop {arguments[0]} ended with {done.returncode}: {lines[-1] if lines else 'no output'}")
    return time.perf_counter() - started


def fastest(contenders: Sequence[Contender]) -> Contender:
    return min(contenders, key=lambda contender: statistics.median(contender.seconds))


def largest_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of paired tensors, as a share of the largest value of the second."""
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(ours, theirs, strict=True)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def timed_row(
    case: str, work: float, unit: str, ours: Sequence[float], theirs: Sequence[float], peer: str, device: Any
) -> Row:
    """Return a row of two contenders, from their seconds per step in the same rounds.

    `work` is what a step does, in the numerator of `unit` (tokens, fits). `device` is a torch.device, or text.
    """
    from ..train.hardware import device_name

    our_rate, peer_rate = (work / statistics.median(seconds) for seconds in (ours, theirs))
    row = plain_row(case, our_rate, peer_rate, peer, unit, device if isinstance(device, str) else device_name(device))
    return row | {"spread": spread([b / a for a, b in zip(ours, theirs, strict=True)])}


def plain_row(
    case: str, ours: float, peer: float, peer_name: str, unit: str, device: str, ratio: float | None = None
) -> Row:
    """Return a row of figures that were measured once; `ratio` is ours over the peer's by default."""
    ratio = ours / peer if ratio is None else ratio
    row = {"case": case, "ours": ours, "peer": peer, "peer_name": peer_name, "unit": unit}
    return row | {"ratio": ratio, "spread": 0.0, "device": device}


def race(
    case: str, unit: str, work: float, flops: float, ours: Step, peers: Mapping[str, Step], peak: Peak, rounds: int,
    steps: int | None,
) -> Row:  # fmt: skip
    """Time ours and all peers; return a row against the fastest, with MFU, peak memory and the difference of results.

    `work` is what a step does, in the numerator of `unit`, for `flops` FLOPs. Without `steps` a turn takes
    `TURN_SECONDS`.
    """
    from ..train.hardware import peak_bytes

    device, contender = peak.device, Contender("ours", ours)
    others = [Contender(name, step) for name, step in peers.items()]
    if steps is None:
        ours()  # the first call compiles
        steps = max(1, round(TURN_SECONDS / seconds_per_step(ours, 3, device)))
    take_turns([contender, *others], rounds, steps, device, peak.measure)
    peer = fastest(others)
    row = timed_row(case, work, unit, contender.seconds, peer.seconds, peer.name, device)
    return with_mfu(row, flops / work, peak) | {
        "peak_bytes": peak_bytes(ours, device),
        "peer_peak_bytes": peak_bytes(peer.step, device),
        "difference": largest_difference(ours(), peer.step()),
    }


@dataclass
class Peak:
    """The matmul rate of a device in FLOP/s: the best of its measurements."""

    device: torch.device
    dtype: torch.dtype
    best: float = 0.0

    def measure(self) -> None:
        from ..train.hardware import matmul_peak

        self.best = max(self.best, matmul_peak(self.device, self.dtype))


def with_mfu(row: Row, flops: float, peak: Peak) -> Row:
    """Return the row with each side's share of the matmul peak; one of the row's units takes `flops` FLOPs."""
    share = flops / peak.best
    return row | {"mfu": row["ours"] * share, "peer_mfu": row["peer"] * share, "matmul_peak": peak.best}


def spread(ratios: Sequence[float]) -> float:
    """Return half the interquartile range of the ratios."""
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [0.0] * 3
    return (quarters[2] - quarters[0]) / 2


# Columns that only some benchmarks have: heading, the row's key, the unit of a figure, and its format.
COLUMNS = (
    ("MFU / peer", "mfu", 1.0, ".0%"),
    ("GFLOP/s peak", "matmul_peak", 1e9, ",.0f"),
    ("MiB / peer", "peak_bytes", 2.0**20, ",.1f"),
    ("seconds / peer", "seconds", 1.0, ",.3g"),
    ("share of FLOPs", "flops_share", 1.0, ".3f"),
    ("largest difference", "difference", 1.0, ".1g"),
    ("worse / peer", "worse", 1.0, ".0f"),
    ("mean error % / peer", "mean_error", 1.0, ".2f"),
)


def print_benchmark(rows: list[Row], about: str = "") -> None:
    """Print the rows as a table, below `about`."""
    from rich.table import Table

    from ..sweeps.terminal import console

    columns = [column for column in COLUMNS if any(column[1] in row for row in rows)]
    table = Table("case")
    for heading in ("ours", "peer", "unit", "ratio", *(column[0] for column in columns)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("peer is")
    for row in rows:
        cells = []
        for _, key, unit, form in columns:
            pair = [row[name] for name in (key, f"peer_{key}") if name in row]
            cells.append(" / ".join(format(value / unit, form) for value in pair))
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} ± {row['spread'] or 0:.2f}"
        both = (_number(row["ours"]), _number(row["peer"]), row["unit"], ratio)
        table.add_row(row["case"], *both, *cells, row["peer_name"] or "")
    screen = console()
    screen.print("; ".join([*dict.fromkeys(row["device"] for row in rows if row["device"]), *filter(None, [about])]))
    screen.print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
