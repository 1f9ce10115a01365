"""The pages of this room: Jinja2 templates that become one self-contained HTML file each.

- Everything that a template writes is escaped, and its control and direction characters are spelled out (‹U+202E›):
  shown as they are, they would reorder or hide what stands beside them.
- A Content-Security-Policy names our own script and style by their hashes: nothing else may run, load or send, even if
  an escape were missed. So there are no style attributes either.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...train.files import plain_value
from . import numbers
from .charts import bar_end

TEMPLATES = Path(__file__).parent / "templates"
# What would hide or reorder text: C0 and C1 controls but tab and line feed, marks of direction, lone surrogates,
# invisible joiners of lines, and what HTML or XML forbids.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


def render_page(
    template: str, title: str, context: dict[str, Any], style: str = "", script: str = "", data: Any = None
) -> str:
    """A whole page: a template, the files of a style (beside `page.css`) and a script, and the data that it reads."""
    styles = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", style) if name)
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


_NONE = "'none'"


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
    named = (numbers.number, numbers.with_error, numbers.scored, numbers.short_count, numbers.grouped, numbers.compute)
    environment.filters |= {function.__name__: function for function in (*named, soften, breakable, bar_end)}
    environment.tests["number"] = numbers.is_number
    return environment


def spell(value: Any) -> str:
    """Any text, with what would hide or reorder it spelled out."""
    return _HIDDEN.sub(lambda found: f"‹U+{ord(found.group()):04X}›", str(value).replace("\r\n", "\n"))


def soften(shown: str) -> Markup:
    """What comes after the number in "0.25 ± 0.01" or "3 of 10" in a softer tone."""
    number, blank, rest = spell(shown).partition(" ")
    return Markup("{}<small>{}</small>").format(number, rest) if blank else Markup("{}").format(number)


def breakable(name: str) -> Markup:
    """A name; a long one may break after its underscores."""
    shown = Markup("{}").format(spell(name))
    return shown.replace("_", Markup("_<wbr>")) if len(name) > 16 else shown


def _data_block(value: Any) -> Markup:
    """JSON that a script of the page reads, in an element that no browser runs.

    `<` is escaped, so neither `</script` nor `<!--` can occur; so are U+2028, U+2029, marks of direction and lone
    surrogates. A number that is not finite becomes a text ("nan", "-inf"), because JSON has none.
    """
    packed = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=plain_value)
    packed = packed.replace("<", "\\u003c").replace(">", "\\u003e")
    packed = _HIDDEN.sub(lambda found: f"\\u{ord(found.group()):04x}", packed)
    return Markup(f'<script type="application/json" id="data">{packed}</script>')


def _finite(value: Any) -> Any:
    """The same with floats of six digits, and texts for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): one if type(one) is str else _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
