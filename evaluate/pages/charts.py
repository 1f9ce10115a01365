"""Where the marks of the reports' small pictures stand; `templates/charts.html` draws them as SVG without a script.

The dots of a panel are one path for each colour: a dot is a line of no length with round ends. A thousand dots take
12 kB, elements of their own ten times that, and a browser draws them at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .numbers import compute, number

STRIP = 230  # width in pixels
WIDTH, HEIGHT = 272, 190  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 42, 10, 10, 26  # margins of a panel

Dots = dict[str, list[tuple[int, float, float]]]  # colour class -> (row number, x, y) of each dot


@dataclass
class Axis:
    """A range of numbers, `low` to `high`; with `log`, equal ratios take equal room."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], log: bool = False) -> Axis:
        """Holds all values, with some air."""
        low, high = min(values), max(values)
        if log:
            air = max((high / low) ** 0.05, 1.05)
            return cls(low / air, high * air, True)
        air = 0.06 * (high - low) or 0.05 * abs(high) or 0.1
        return cls(low - air, high + air)

    def at(self, value: float) -> float:
        """Where it lies, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Three to six round numbers inside, with how they are written."""
        if not self.log:
            return _round_ticks(self.low, self.high)
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        step = max(1, math.ceil((last - first + 1) / 4))
        decades = [10.0**power for power in range(first, last + 1, step)]
        if len(decades) >= 2:
            return [(value, compute(value).partition("×")[2]) for value in decades]
        fine = [m * 10.0**power for power in range(first - 1, last + 2) for m in (1, 2, 5)]
        inside = [value for value in fine if self.low <= value <= self.high]
        parts = [(value, compute(value).partition("×")) for value in inside[:: max(1, math.ceil(len(inside) / 3))]]
        return [(value, f"{float(mantissa):g}×{power}") for value, (mantissa, _, power) in parts]


def _round_ticks(low: float, high: float) -> list[tuple[float, str]]:
    rough = (high - low) / 4
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * m for m in (1, 2, 2.5, 5, 10) if scale * m >= rough * 0.999)
    digits = max(0, -math.floor(math.log10(step) + 1e-9) + (1 if step / scale == 2.5 else 0))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(place * step, number(place * step, digits)) for place in range(first, last + 1)]


def bar_end(value: float, largest: float = 1.0) -> str:
    """Where a bar of 120 pixels ends."""
    return f"{min(max(value / largest, 0.0), 1.0) * 120:.1f}"


class Strip:
    """One line with a dot for each of `others` (value, what it is), and this one marked, with two standard errors."""

    def __init__(
        self, own: float, error: float | None, others: Sequence[tuple[float, str]], chance: float | None = None
    ) -> None:
        reach = 2 * (error or 0.0)
        self.own, self.others = own, others
        self.low, self.high = (max(own - reach, 0.0) if own >= 0 else own - reach), own + reach
        values = [self.low, self.high, *(value for value, _ in others)]
        if chance is not None and chance >= min(values) - 0.5 * (max(values) - min(values)):
            values.append(chance)
        self.least, self.most, self._axis = min(values), max(values), Axis.around(values)
        self.chance = chance if chance is not None and self._axis.low <= chance <= self._axis.high else None

    def x(self, value: float) -> str:
        return f"{6 + self._axis.at(value) * (STRIP - 12):.1f}"


@dataclass
class Panel:
    """One small scatter plot; `faint` dots stand back, `errors` are (x, y, standard error), drawn twice as long."""

    name: str
    x_axis: Axis
    y_axis: Axis
    x_label: str
    dots: Dots = field(default_factory=dict)
    faint: Dots = field(default_factory=dict)
    lines: list[tuple[str, list[tuple[float, float]]]] = field(default_factory=list)
    errors: list[tuple[float, float, float]] = field(default_factory=list)
    chance: float | None = None

    @property
    def size(self) -> int:
        return sum(map(len, [*self.dots.values(), *self.faint.values()]))

    @property
    def paths(self) -> list[tuple[str, str, str]]:
        """(classes, row numbers, path) of all dots of one colour."""
        return [
            (
                f"{kind} {colour}",
                ",".join(str(row) for row, _, _ in dots),
                "".join(f"M{self.x(x)} {self.y(y)}h0" for _, x, y in dots),
            )
            for kind, group in (("pts faint", self.faint), ("pts", self.dots))
            for colour, dots in group.items()
        ]

    @property
    def whiskers(self) -> str:
        return "".join(f"M{self.x(x)} {self.y(y - 2 * error)}V{self.y(y + 2 * error)}" for x, y, error in self.errors)

    @property
    def ways(self) -> list[tuple[str, str]]:
        """(colour class, path) of each line."""
        ways = ((colour, [f"{self.x(x)} {self.y(y)}" for x, y in points]) for colour, points in self.lines)
        return [(colour, "M" + "L".join(points)) for colour, points in ways]

    def x(self, value: float) -> str:
        """In pixels from the left."""
        return f"{LEFT + min(max(self.x_axis.at(value), 0.0), 1.0) * (WIDTH - LEFT - RIGHT):.1f}"

    def y(self, value: float) -> str:
        """In pixels from the top."""
        return f"{HEIGHT - BOTTOM - min(max(self.y_axis.at(value), 0.0), 1.0) * (HEIGHT - TOP - BOTTOM):.1f}"
