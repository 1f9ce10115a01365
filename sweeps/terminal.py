"""Words and widths for people: how N, D and durations are said, and the console that tables are printed on."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def console() -> Console:
    """Standard output. A pipe or a file has no width, and a table cut to 80 columns is of no use there."""
    return Console(width=None if sys.stdout.isatty() else 160)


def plain_table(columns: Iterable[str], left: Collection[str] = (), title: str | None = None) -> Table:
    """A table without rules, whose columns are as wide as what they hold; numbers to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def print_rows(columns: Sequence[str], left: Collection[str], title: str, rows: Sequence[Sequence[str]]) -> None:
    """A `plain_table`; where the terminal is too narrow for it, intervals stand below their numbers."""
    out, table = console(), plain_table(columns, left, title)
    narrow = sum(max(map(len, cells)) + 3 for cells in zip(columns, *rows, strict=True)) >= out.width
    table.padding = (0, 1, 0, 0) if narrow else table.padding
    for row in rows:
        table.add_row(*(cell.replace(" [", "\n[") if narrow else cell for cell in row))
    out.print(table)


def printable(text: str) -> str:
    """With the control characters that a terminal would obey, but for tabs and line breaks, as their codes."""
    return CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def say(text: str) -> None:
    """Print a sentence with rich's markup, and without colours or breaks of its own."""
    console().print(printable(text), highlight=False, soft_wrap=True)


def short(value: float) -> str:
    """1234567 -> 1.23M: three digits and a unit, as people say N and D."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def describe_seconds(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
