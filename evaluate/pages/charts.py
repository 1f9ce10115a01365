"""The small pictures of the reports, as SVG that needs no script.

Special here:
- Colours come from the page's style, never from attributes, so that a picture is right in light and in dark.
- The dots of a panel are one path a colour: a dot is a line of no length with round ends. A thousand dots take 12 kB,
  where elements of their own would take ten times that, and a browser draws them at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .page import compute, number, text

BAR = 120  # width of a bar, in pixels
STRIP = 230
WIDTH, HEIGHT = 272, 190  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 42, 10, 10, 26  # margins of a panel


def bar(value: float | None, error: float | None, chance: float | None, largest: float = 1.0, what: str = "") -> str:
    """A value from 0 to `largest`, with a whisker of two standard errors and a tick at chance; nothing without one."""
    if value is None:
        return ""

    def x(at: float) -> str:
        return f"{min(max(at / largest, 0.0), 1.0) * BAR:.1f}"

    tick = f'<path class="chance" d="M{x(chance)} 0V16"/>' if chance is not None else ""
    whisker = f'<path class="whisker" d="M{x(value - 2 * error)} 8H{x(value + 2 * error)}"/>' if error else ""
    beside = "" if chance is None else f", chance {chance:.3f}"
    return (
        f'<svg class="bar" viewBox="0 0 {BAR} 16" role="img" aria-label="{text(what)} {value:.3f}{beside}">'
        f'<rect class="track" y="3" width="{BAR}" height="10" rx="2"/>'
        f'<rect class="fill" y="3" width="{x(value)}" height="10" rx="2"/>{whisker}{tick}</svg>'
    )


def strip(own: float, error: float | None, others: Sequence[tuple[float, str]], chance: float | None = None) -> str:
    """One line with a dot for each of `others` (value, what it is), and this one marked, with two standard errors."""
    reach = 2 * (error or 0.0)
    low, high = (max(own - reach, 0.0) if own >= 0 else own - reach), own + reach
    values = [low, high, *(value for value, _ in others)]
    if chance is not None and chance >= min(values) - 0.5 * (max(values) - min(values)):
        values.append(chance)
    axis = Axis.around(values)

    def x(at: float) -> str:
        return f"{6 + axis.at(at) * (STRIP - 12):.1f}"

    parts = [f'<path class="axis" d="M0 13H{STRIP}"/>']
    if chance is not None and axis.low <= chance <= axis.high:
        parts.append(f'<path class="chance" d="M{x(chance)} 4V22"/>')
    for value, said in others:
        parts.append(f'<circle class="dot" cx="{x(value)}" cy="13" r="4.5"><title>{text(said)}</title></circle>')
    parts.append(f'<path class="whisker" d="M{x(low)} 13H{x(high)}"/>')
    parts.append(f'<circle class="me" cx="{x(own)}" cy="13" r="5.5"><title>this checkpoint: {own:.4f}</title></circle>')
    for end, anchor in ((min(values), "start"), (max(values), "end")):
        parts.append(f'<text class="tick" x="{x(end)}" y="32" text-anchor="{anchor}">{number(end)}</text>')
    return (
        f'<svg class="strip" viewBox="0 0 {STRIP} 34" role="img" '
        f'aria-label="this checkpoint {own:.3f}; {len(others)} others, from {min(values):.3f} to {max(values):.3f}">'
        f"{''.join(parts)}</svg>"
    )


@dataclass
class Axis:
    """A range of numbers on so many pixels.

    Attributes:
        low, high: what the ends stand for.
        log: whether equal ratios take equal room.
    """

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
        return [(value, _short(value)) for value in inside[:: max(1, math.ceil(len(inside) / 3))]]


def _short(value: float) -> str:
    mantissa, _, power = compute(value).partition("×")
    return f"{float(mantissa):g}×{power}"


def _round_ticks(low: float, high: float) -> list[tuple[float, str]]:
    rough = (high - low) / 4
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * m for m in (1, 2, 2.5, 5, 10) if scale * m >= rough * 0.999)
    digits = max(0, -math.floor(math.log10(step) + 1e-9) + (1 if step / scale == 2.5 else 0))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(place * step, number(place * step, digits)) for place in range(first, last + 1)]


@dataclass
class Panel:
    """One small scatter plot.

    Attributes:
        name: what the dots are, for who cannot see them, and for the note beside the pointer.
        x, y: the axes.
        dots: colour class -> (row number, x, y) of each dot.
        faint: colour class -> the same, for what should stand back.
        lines: (colour class, points) drawn above the dots.
        errors: (x, y, standard error): whiskers of two standard errors.
        chance: height of the line at chance.
        x_label: below the axis.
    """

    name: str
    x: Axis
    y: Axis
    x_label: str
    dots: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    faint: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    lines: list[tuple[str, list[tuple[float, float]]]] = field(default_factory=list)
    errors: list[tuple[float, float, float]] = field(default_factory=list)
    chance: float | None = None

    def svg(self) -> str:
        count = sum(map(len, self.dots.values())) + sum(map(len, self.faint.values()))
        parts = [self._frame()]
        if self.chance is not None and self.y.low <= self.chance <= self.y.high:
            parts.append(f'<path class="chance" d="M{LEFT} {self._y(self.chance)}H{WIDTH - RIGHT}"/>')
        for kind, group in (("pts faint", self.faint), ("pts", self.dots)):
            for colour, dots in group.items():
                rows = ",".join(str(number) for number, _, _ in dots)
                where = "".join(f"M{self._x(x)} {self._y(y)}h0" for _, x, y in dots)
                parts.append(f'<path class="{kind} {colour}" data-rows="{rows}" d="{where}"/>')
        whiskers = "".join(
            f"M{self._x(x)} {self._y(y - 2 * error)}V{self._y(y + 2 * error)}" for x, y, error in self.errors
        )
        parts.append(f'<path class="err" d="{whiskers}"/>' if whiskers else "")
        for colour, points in self.lines:
            way = "L".join(f"{self._x(x)} {self._y(y)}" for x, y in points)
            parts.append(f'<path class="line {colour}" d="M{way}"/>')
        return (
            f'<figure class="panel"><figcaption>{text(self.name)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'role="img" aria-label="{text(self.name)} against {text(self.x_label)}, {count} checkpoints">'
            f"{''.join(parts)}</svg></figure>"
        )

    def _x(self, value: float) -> str:
        return f"{LEFT + min(max(self.x.at(value), 0.0), 1.0) * (WIDTH - LEFT - RIGHT):.1f}"

    def _y(self, value: float) -> str:
        return f"{HEIGHT - BOTTOM - min(max(self.y.at(value), 0.0), 1.0) * (HEIGHT - TOP - BOTTOM):.1f}"

    def _frame(self) -> str:
        floor, parts = HEIGHT - BOTTOM, []
        for value, said in self.y.ticks():
            y = self._y(value)
            parts.append(
                f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
                f'<text class="tick" x="{LEFT - 5}" y="{y}" dy="3.5" text-anchor="end">{said}</text>'
            )
        for value, said in self.x.ticks():
            x = self._x(value)
            parts.append(
                f'<path class="axis" d="M{x} {floor}v4"/>'
                f'<text class="tick" x="{x}" y="{floor + 15}" text-anchor="middle">{said}</text>'
            )
        parts.append(f'<path class="axis" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>')
        return "".join(parts)
