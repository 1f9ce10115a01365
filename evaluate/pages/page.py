"""Pages: Jinja2 templates that become one self-contained HTML file each.

- Everything is escaped, and control and direction characters are spelled out (‹U+202E›).
- A Content-Security-Policy names our script and style by their hashes, so nothing else may run, load or send.
- `templates/charts.html` draws SVG without a script. The dots of a colour are one path, a tenth of the size of separate
  elements.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...train.errors import counted
from ...train.files import plain_value
from ..metrics import above_chance, task_label

TEMPLATES = Path(__file__).parent / "templates"
_NONE = "'none'"
# What would hide or reorder text: C0 and C1 controls but tab and line feed, marks of direction, lone surrogates,
# invisible joiners of lines, and what HTML or XML forbids.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


def render_page(
    template: str, title: str, context: dict[str, Any], style: str, script: str = "", data: Any = None
) -> str:
    """Render an HTML page from files in `templates`: a template, a style (added to `page.css`) and a script.

    `context` is for the template, `data` for the script.
    """
    styles = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", style))
    code = (TEMPLATES / script).read_text(encoding="utf-8") if script else ""
    policy = (
        f"default-src 'none';script-src {_source(code) if code else _NONE};style-src {_source(styles)};"
        f"base-uri {_NONE};form-action {_NONE}"
    )
    return (
        _environment()
        .get_template(template)
        .render(
            context,
            title=title,
            policy=Markup(policy),
            style=Markup(styles),
            script=Markup(code),
            data=Markup("") if data is None else _data_block(data),
        )
    )


def _source(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else spell(value),
    )
    named = (number, with_error, scored, short_count, grouped, counted, compute, soften, breakable, bar_end, task_label)
    environment.filters |= {function.__name__: function for function in named}
    environment.tests["number"] = is_number
    return environment


def spell(value: Any) -> str:
    return _HIDDEN.sub(lambda match: f"‹U+{ord(match.group()):04X}›", str(value).replace("\r\n", "\n"))


def soften(shown: str) -> Markup:
    value, blank, rest = spell(shown).partition(" ")
    return Markup("{}<small>{}</small>").format(value, rest) if blank else Markup("{}").format(value)


def breakable(name: str) -> Markup:
    shown = Markup("{}").format(spell(name))
    return shown.replace("_", Markup("_<wbr>")) if len(name) > 11 else shown


def _data_block(value: Any) -> Markup:
    """Return a value as JSON for the page's script, in an element that no browser runs.

    `<`, `>` and characters that hide or reorder text are escaped. Numbers that are not finite become texts ("nan").
    """
    packed = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=plain_value)
    packed = packed.replace("<", "\\u003c").replace(">", "\\u003e")
    packed = _HIDDEN.sub(lambda match: f"\\u{ord(match.group()):04x}", packed)
    return Markup(f'<script type="application/json" id="data">{packed}</script>')


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): item if type(item) is str else _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# --- numbers ---------------------------------------------------------------------------------------------------------

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number; True and False are not."""
    # The usual ones first: asking an abstract class is slow, and a page asks a million times.
    is_one = isinstance(value, int | float) or (value is not None and isinstance(value, Real))
    return is_one and not isinstance(value, bool) and math.isfinite(value)


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """Format with `digits` decimals, or as – if not finite; with `sign` "+" positive numbers have a sign too."""
    return f"{value:{sign}.{digits}f}".replace("-", "−") if is_number(value) else "–"


def with_error(value: float | None, error: float | None, digits: int = 3) -> str:
    """Format as 0.123 ± 0.004, or the value alone if the error is unknown."""
    return number(value, digits) + (f" ± {error:.{digits}f}" if is_number(value) and is_number(error) else "")


def scored(scores: Mapping[str, Any], metric: str, digits: int = 3) -> str:
    return with_error(scores.get(metric), scores.get(f"{metric}_se"), digits)


def short_count(value: float | None) -> str:
    """Format with three significant digits: 1234567 -> 1.23M."""
    if not is_number(value):
        return "–"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:.3g}"


def grouped(value: Any) -> str:
    return f"{value:,}" if is_number(value) else str(value)


def guessing(tasks: Mapping[str, Any], whose: str) -> list[str]:
    """Return a sentence on which tasks' accuracy is better than guessing; [] if no task has an accuracy.

    `whose`: its subject, such as "Accuracy".
    """
    above = above_chance(tasks)
    better, count = [name for name, is_better in above.items() if is_better], counted(len(above), "task")
    if not better:
        return [f"{whose} says nothing yet: it is better than guessing on none of {count}."] if above else []
    rest = " Elsewhere it says nothing yet." if len(better) < len(above) else ""
    return [f"{whose} is better than guessing on {len(better)} of {count}: {', '.join(better)}.{rest}"]


def compute(value: float | None) -> str:
    if not is_number(value) or value <= 0:
        return "–"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"


# --- pictures --------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 272, 190  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 42, 10, 10, 26  # margins of a panel

Dots = dict[str, list[tuple[int, float, float]]]  # colour class -> (row number, x, y) of each dot


@dataclass
class Axis:
    """An axis of a plot from `low` to `high`, logarithmic with `log`."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], log: bool = False) -> Axis:
        low, high = min(values), max(values)
        if log:
            air = max((high / low) ** 0.05, 1.05)
            return cls(low / air, high * air, True)
        air = 0.06 * (high - low) or 0.05 * abs(high) or 0.1
        return cls(low - air, high + air)

    def at(self, value: float) -> float:
        """Return the position of a value on the axis: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (value, label) of a few round numbers on the axis."""
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
    return f"{min(max(value / largest, 0.0), 1.0) * 120:.1f}"


@dataclass
class Panel:
    """One small scatter plot; `errors` are (x, y, standard error), drawn as ± 2 standard errors."""

    name: str
    x_axis: Axis
    y_axis: Axis
    x_label: str
    dots: Dots = field(default_factory=dict)
    faint: Dots = field(default_factory=dict)
    lines: list[tuple[str, list[tuple[float, float]]]] = field(default_factory=list)
    errors: list[tuple[float, float, float]] = field(default_factory=list)
    chance: float | None = None
    band: list[tuple[float, float, float, float]] = field(default_factory=list)  # x, forecast, low, high by rising x

    @property
    def size(self) -> int:
        return sum(map(len, [*self.dots.values(), *self.faint.values()]))

    @property
    def paths(self) -> list[tuple[str, str, str]]:
        """Return (CSS classes, row numbers joined by commas, SVG path) for the dots of each colour."""
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
        """Return (CSS class of the colour, SVG path) for each line."""
        ways = ((colour, [f"{self.x(x)} {self.y(y)}" for x, y in points]) for colour, points in self.lines)
        return [(colour, "M" + "L".join(points)) for colour, points in ways]

    @property
    def forecast(self) -> tuple[str, str]:
        """Return the SVG paths of the forecast's interval and of its line."""
        upper, lower = (
            [f"{self.x(point[0])} {self.y(point[side])}" for point in points]
            for side, points in ((3, self.band), (2, self.band[::-1]))
        )
        line = [f"{self.x(x)} {self.y(y)}" for x, y, _, _ in self.band]
        return f"M{'L'.join(upper + lower)}Z", f"M{'L'.join(line)}"

    def x(self, value: float) -> str:
        return f"{LEFT + min(max(self.x_axis.at(value), 0.0), 1.0) * (WIDTH - LEFT - RIGHT):.1f}"

    def y(self, value: float) -> str:
        return f"{HEIGHT - BOTTOM - min(max(self.y_axis.at(value), 0.0), 1.0) * (HEIGHT - TOP - BOTTOM):.1f}"
