"""A pipeline's step as a picture in the terminal: a row for each stage, time to the right, blank where it waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.text import Text

from ...train.config import RunConfig
from ...train.errors import UserError
from ...train.files import read_document
from ...train.model.shape import micro_batches
from ...train.parallel.schedules import Event, bubbles, schedule, simulate
from ...train.planner.planner import Hardware, passes_of, send_seconds
from ..terminal import console, say

COLUMNS, LABEL = 4, 8  # of a forward action, and of a row's name
LOOKS = {  # letter, colours of even and of odd chunks, and what it is
    "forward": ("F", "white on #1f5fa8", "white on #6a3d9a", "forward"),
    "backward": ("B", "black on #59b36b", "black on #9ccc65", "backward"),
}


def predicted(config: RunConfig, hardware: Hardware) -> list[Event]:
    """A step of the run's pipeline, by the planner's seconds."""
    parallel = config.parallel
    lists = schedule(parallel.schedule, parallel.pp, micro_batches(config), parallel.chunks)
    forward, backward = zip(*(stage.actions for stage in passes_of(config, hardware)), strict=True)
    return simulate(lists, forward, backward, send_seconds(config, hardware))


def read_trace(path: Path) -> list[Event]:
    """What `to_json` wrote of a step, from a file or a run directory."""
    file = path / "trace.json" if path.is_dir() else path
    events = read_document(file, list[Event], remedy="give a trace.json of a run with parallel.pp 2 or more")
    if median([event.end - event.start for event in events if event.kind == "forward"] or [0.0]) <= 0:
        raise UserError(f"{file} has no forward actions that take time; it must be the trace of a step")
    return events


def print_gantt(events: Sequence[Event], title: str) -> None:
    """Cut to the terminal's width, with the number of the micro-batch where there is room."""
    out, begin = console(), min(event.start for event in events)
    unit = median(event.end - event.start for event in events if event.kind == "forward") / COLUMNS
    span, waits = max(event.end for event in events) - begin, bubbles(events)
    say(f"{title}: {span:.3g} s, in which ranks wait {min(waits) / span:.0%} to {max(waits) / span:.0%}")
    for rank in sorted({event.rank for event in events}):
        row = Text(f"rank {rank}".ljust(LABEL))
        for event in sorted((one for one in events if one.rank == rank), key=lambda one: one.start):
            letter, *colours, _ = LOOKS[event.kind]
            ends = (min((time - begin) / unit, out.width - LABEL) for time in (event.start, event.end))
            start, end = (LABEL + round(column) for column in ends)
            row.append(" " * (start - len(row)))
            room, name = max(0, end - len(row)), f"{letter}{event.micro}"
            fitting = next(text for text in (f"▏{name}", name, "▏", "") if len(text) <= room)
            row.append(fitting.ljust(room), colours[event.chunk % 2])
        out.print(row, no_wrap=True, crop=True)
    kinds = [kind for kind in LOOKS if any(event.kind == kind for event in events)]
    key = [part for kind in kinds for part in ((f" {LOOKS[kind][0]} {LOOKS[kind][3]} ", LOOKS[kind][1]), " ")]
    odd = ", odd chunks of a rank in other colours" if any(event.chunk for event in events) else ""
    out.print(Text.assemble(" " * LABEL, *key, f"with the micro-batch{odd}"))
