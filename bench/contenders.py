"""What every benchmark shares: contenders that take turns, a row of the contract, peak memory, the table.

Contenders alternate in one process, so that what else the machine does falls on all of them alike. A figure is the
median over rounds, its spread half the interquartile range of the rounds' own ratios; a ratio is ours over the peer's
in the direction in which more is better, and the fastest of several peers counts.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..train.errors import UserError

if TYPE_CHECKING:
    import torch

EXACT = (
    "MFU: exact FLOPs (matrix products, attention over the full T x T square, backward twice the forward) "
    "over the matmul peak of the same run"
)
THREADS = 2  # of everything measured on CPUs, or a figure would be of the machine's size
Row = dict[str, Any]
Step = Callable[[], Any]


@dataclasses.dataclass
class Contender:
    """One way to do the work, with its seconds per step in each round."""

    name: str
    step: Step
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def counted(step: Callable[[int], Any]) -> Step:
    """A step that counts itself: 0, 1, 2, …"""
    count = itertools.count()
    return lambda: step(next(count))


def require(library: str, why: str) -> None:
    """Raises UserError where a library is missing, before anything is measured."""
    try:
        importlib.import_module(library)
    except ImportError:
        raise UserError(f"{library} is not installed, {why}; it comes with pip install 'isoflop[bench]'") from None


@contextmanager
def measuring_on(device: str, threads: int = THREADS) -> Iterator[torch.device]:
    """The device that `--device` names, with so many threads of torch; as many as before at the end."""
    import torch

    from ..train.hardware import pick_device

    place, before = pick_device(device, "--device"), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield place
    finally:
        torch.set_num_threads(before)


def take_turns(
    contenders: Sequence[Contender],
    rounds: int,
    steps: int,
    device: torch.device,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Fills the contenders' seconds: `rounds` turns of `steps` steps each, after a step that is not counted."""
    for turn in range(rounds + 1):
        for contender in contenders:
            seconds = seconds_a_step(contender.step, 1 if turn == 0 else steps, device)
            if turn > 0:
                contender.seconds.append(seconds)
        between()


def seconds_a_step(step: Step, count: int, device: torch.device) -> float:
    """Wall clock of one of `count` steps in a row."""
    from ..train.hardware import synchronize

    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / count


def fastest(contenders: Sequence[Contender]) -> Contender:
    return min(contenders, key=lambda contender: contender.median)


def largest_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Between two lists of tensors, as a share of the largest value of the second."""
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(ours, theirs, strict=True)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def contract_row(
    case: str, work: float, unit: str, ours: list[float], theirs: list[float], peer: str, device: torch.device
) -> Row:
    """A row of the contract.

    A step does `work` in the unit's numerator (tokens, models); `ours` and `theirs` are seconds per step of the same
    rounds.
    """
    from ..train.hardware import device_name

    mine, other = (work / statistics.median(seconds) for seconds in (ours, theirs))
    row = plain_row(case, mine, other, peer, unit, device_name(device))
    return row | {"spread": spread([b / a for a, b in zip(ours, theirs, strict=True)])}


def plain_row(
    case: str, ours: float, peer: float, peer_name: str, unit: str, device: str, ratio: float | None = None
) -> Row:
    """A row of the contract of what was measured once; the ratio is ours over the peer's unless it is given."""
    return {
        "case": case,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "unit": unit,
        "ratio": ours / peer if ratio is None else ratio,
        "spread": 0.0,
        "device": device,
    }


def race(
    case: str,
    unit: str,
    work: float,
    flops: float,
    ours: Step,
    peers: Mapping[str, Step],
    peak: Peak,
    rounds: int,
    steps: int | None,
) -> Row:
    """A row of ours beside the fastest peer, with MFU, memory and difference; `steps` None: about 30 ms per turn.

    A step does `work` in the unit's numerator, and `flops`.
    """
    from ..train.hardware import peak_bytes

    device, mine = peak.device, Contender("ours", ours)
    others = [Contender(name, step) for name, step in peers.items()]
    if steps is None:
        ours()  # the first one compiles
        steps = max(1, round(0.03 / seconds_a_step(ours, 3, device)))
    take_turns([mine, *others], rounds, steps, device, peak.measure)
    peer = fastest(others)
    row = contract_row(case, work, unit, mine.seconds, peer.seconds, peer.name, device)
    return with_mfu(row, flops / work, peak) | {
        "peak_bytes": peak_bytes(ours, device),
        "peer_peak_bytes": peak_bytes(peer.step, device),
        "difference": largest_difference(ours(), peer.step()),
    }


@dataclasses.dataclass
class Peak:
    """The plain matmul rate of a device, the best of the times it was measured."""

    device: torch.device
    dtype: torch.dtype
    best: float = 0.0

    def measure(self) -> None:
        from ..train.hardware import matmul_peak

        self.best = max(self.best, matmul_peak(self.device, self.dtype))


def with_mfu(row: Row, flops: float, peak: Peak) -> Row:
    """Adds the share of the matmul peak that each side reaches; `flops` are those of one of its units."""
    share = flops / peak.best
    return row | {"mfu": row["ours"] * share, "peer_mfu": row["peer"] * share, "matmul_peak": peak.best}


def spread(ratios: Sequence[float]) -> float:
    """Half the interquartile range."""
    if len(ratios) < 2:
        return 0.0
    quarters = statistics.quantiles(ratios, n=4)
    return (quarters[2] - quarters[0]) / 2


@dataclasses.dataclass(frozen=True)
class Column:
    """A column that some benchmarks have: its heading, a key that its rows have, and what it says of a row."""

    heading: str
    key: str
    form: Callable[[Row], str]


COLUMNS = (
    Column("MFU / peer", "mfu", lambda row: f"{row['mfu']:.0%} / {row['peer_mfu']:.0%}"),
    Column("GFLOP/s peak", "matmul_peak", lambda row: f"{row['matmul_peak'] / 1e9:,.0f}"),
    Column(
        "MiB / peer",
        "peak_bytes",
        lambda row: f"{row['peak_bytes'] / 2**20:,.1f} / {row['peer_peak_bytes'] / 2**20:,.1f}",
    ),
    Column("seconds / peer", "seconds", lambda row: f"{row['seconds']:,.1f} / {row['peer_seconds']:,.1f}"),
    Column("share of FLOPs", "flops_share", lambda row: f"{row['flops_share']:.3f}"),
    Column("apart by", "difference", lambda row: f"{row['difference']:.1g}"),
)


def print_benchmark(rows: list[Row], about: str = "") -> None:
    """The rows as a table; `about` says in the title what the columns cannot."""
    from rich.table import Table

    from ..sweeps.terminal import console

    if not rows:
        print("nothing was measured")
        return
    devices, peers, units = (
        dict.fromkeys(row[key] for row in rows if row[key]) for key in ("device", "peer_name", "unit")
    )
    title = [f"ours beside the peer, in turn, on {', '.join(devices)}"]
    title += [f"peer: {', '.join(peers)}"] * (len(peers) == 1) + [f"in {', '.join(units)}"] * (len(units) == 1)
    screen = console()
    screen.print("; ".join(filter(None, [*title, about])))
    extra = [column for column in COLUMNS if any(column.key in row for row in rows)]
    last = ["unit"] * (len(units) > 1) + ["peer_name"] * (len(peers) > 1)
    table = Table()
    table.add_column("case")
    for heading in ("ours", "peer", "ratio", *(column.heading for column in extra)):
        table.add_column(heading, justify="right", no_wrap=True)
    for key in last:
        table.add_column({"unit": "unit", "peer_name": "peer is"}[key])
    for row in rows:
        values = [column.form(row) if column.key in row else "" for column in extra]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} ± {row['spread'] or 0:.2f}"
        shown = [_number(row["ours"]), _number(row["peer"]), ratio, *values, *(row[key] or "" for key in last)]
        table.add_row(row["case"], *shown)
    screen.print(table)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
