"""Terminal output: tables, and short forms of N, D and durations."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def console() -> Console:
    """Return a console, 160 columns wide if the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 160)


def plain_table(columns: Iterable[str], left_aligned: Collection[str] = (), title: str | None = None) -> Table:
    """Return an empty table without ruled lines, whose columns are never cut."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="left" if column in left_aligned else "right", no_wrap=True)
    return table


def print_rows(
    columns: Sequence[str], left_aligned: Collection[str], title: str, rows: Sequence[Sequence[str]]
) -> None:
    """Print rows as a `plain_table`; in a narrow terminal, intervals [low, high] go below their numbers."""
    out, table = console(), plain_table(columns, left_aligned, title)
    narrow = sum(max(map(len, cells)) + 3 for cells in zip(columns, *rows, strict=True)) >= out.width
    table.padding = (0, 1, 0, 0) if narrow else table.padding
    for row in rows:
        table.add_row(*(cell.replace(" [", "\n[") if narrow else cell for cell in row))
    out.print(table)


def printable(text: str) -> str:
    """Return the text with terminal control characters escaped, except tabs and line breaks."""
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def say(text: str) -> None:
    """Print a sentence with rich's markup, without automatic highlighting or line breaks."""
    console().print(printable(text), highlight=False, soft_wrap=True)


def short(value: float) -> str:
    """Format a number with three digits and a unit: 1234567 is 1.23M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def describe_seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
