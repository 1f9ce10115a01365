"""What the reports of this room are made of: one self-contained HTML file, its style, and how numbers are written.

Special here:
- A Content-Security-Policy names our own script and style by their hashes. Whatever else a text could smuggle in has no
  right to run, to load or to send, even if an escape were missed.
- Text from outside is escaped, and its control and direction characters are spelled out (‹U+202E›): shown as they are,
  they would reorder or hide what stands beside them.
- No style attributes: the policy refuses them. Colours are variables, so that light and dark are one page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from html import escape
from numbers import Real
from typing import Any, TypeGuard

from ...train.files import plain

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b2129;--soft:#5a6570;--line:#d9dfe5;--faint:#ebeef2;--wash:#f6f8fa;
--accent:#1f66b0;--fill:#5b8fd6;--chance:#b3400c;--good:#1a7440;--goodwash:#e8f5ec;--bad:#b42318;--badwash:#fdeeec;
--other:#7a4fb5;--warn:#8a5a00;--warnwash:#fff8e6;--warnline:#e5bf57;
--n0:#b58900;--n1:#5f9e1f;--n2:#17936e;--n3:#197ba6;--n4:#3a55a8;--n5:#4b1a7a;
--r0:#0072b2;--r1:#c2570c;--r2:#00805f;--r3:#a83a7d;--r4:#8a6d00;--r5:#3f8ec7}
@media (prefers-color-scheme:dark){:root{--paper:#14181d;--ink:#e3e8ee;--soft:#98a5b3;--line:#333c46;--faint:#262d35;
--wash:#1b2128;--accent:#7fb4ec;--fill:#4f86cc;--chance:#ff9d66;--good:#6fd296;--goodwash:#16301f;--bad:#ff9488;
--badwash:#3a1c1a;--other:#bf9cf0;--warn:#f0c35c;--warnwash:#2c2413;--warnline:#7a5e1c;
--n0:#fde725;--n1:#9fd84a;--n2:#3fc98a;--n3:#3fa7c4;--n4:#7c8ff0;--n5:#c58af5;
--r0:#56b4e9;--r1:#f0964a;--r2:#3fc9a4;--r3:#e08fc0;--r4:#e6cf4d;--r5:#a8c8ff}}
*{box-sizing:border-box}html{-webkit-text-size-adjust:100%;scroll-padding-top:12px}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:32px 24px 72px}
h1{font-size:1.75rem;line-height:1.2;letter-spacing:-.015em;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.25rem;letter-spacing:-.01em;margin:44px 0 6px;padding-top:14px;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:22px 0 4px;overflow-wrap:anywhere}p{margin:6px 0;max-width:84ch}
h2,p,li,dd,figcaption,.key{overflow-wrap:anywhere}
a{color:var(--accent)}a:focus-visible,button:focus-visible,select:focus-visible,input:focus-visible,
[tabindex]:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.soft{color:var(--soft)}.small{font-size:.87rem}.path{overflow-wrap:anywhere}.mono{font-family:ui-monospace,
SFMono-Regular,Menlo,Consolas,monospace;font-size:.92em}
nav{margin:12px 0 0;display:flex;flex-wrap:wrap;gap:4px 18px;font-size:.92rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:10px;margin:18px 0 0}
.cards div{border:1px solid var(--line);border-radius:8px;padding:8px 11px;background:var(--wash);min-width:0}
.cards dt{color:var(--soft);font-size:.8rem}.cards dd{margin:0;overflow-wrap:anywhere;
font-variant-numeric:tabular-nums}.cards dd b{font-size:1.2rem;font-weight:600;display:block;line-height:1.35}
.cards dd small{color:var(--soft);font-size:.8rem;display:block}
.warnings{list-style:none;margin:18px 0 0;padding:8px 16px;border:1px solid var(--warnline);border-radius:8px;
background:var(--warnwash)}.warnings li{padding:3px 0;overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:10px 0}.tall{max-height:560px;overflow:auto;border:1px solid var(--line);
border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.89rem}caption{text-align:left;color:var(--soft);padding:0 0 4px}
tr.first>*{border-top:1px solid var(--line)}
th,td{padding:5px 8px;text-align:left;border-bottom:1px solid var(--faint);vertical-align:baseline}
thead th{border-bottom:1px solid var(--soft);font-weight:600;font-size:.84rem;vertical-align:bottom}
tbody th{font-weight:500;overflow-wrap:anywhere;min-width:11.5rem}td.r,th.r{text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums}td.r small,th small{color:var(--soft);font-weight:400;font-size:.9em}
td.r small{margin-left:.35em}
tr.part th,tr.part td{color:var(--soft);font-size:.94em;border-bottom-color:var(--line)}
tr.part th{padding-left:24px;font-weight:400}
.tall thead th{position:sticky;top:0;background:var(--paper);z-index:1}
svg{display:block}svg.bar{width:120px;height:16px}svg.strip{width:230px;height:34px}
td.pic{width:1%;vertical-align:middle}
td.nowrap{white-space:nowrap}.tick{fill:var(--soft);font-size:10px;font-variant-numeric:tabular-nums}
h3 .small{font-weight:400;margin-left:4px}
.track{fill:var(--faint)}.fill{fill:var(--fill)}.whisker{stroke:var(--ink);stroke-width:1.3}
.chance{stroke:var(--chance);stroke-width:2}.dot{fill:var(--soft);fill-opacity:.45}
.me{fill:var(--accent);stroke:var(--paper);stroke-width:1.2}.axis{stroke:var(--line)}
.better{color:var(--good)}.worse{color:var(--bad)}
.text{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;margin:0;font:.9rem/1.5 ui-monospace,
SFMono-Regular,Menlo,Consolas,monospace;background:var(--wash);border:1px solid var(--faint);border-radius:6px;
padding:8px 11px;max-height:13.5rem;overflow-y:auto}
footer{margin-top:52px;padding-top:12px;border-top:1px solid var(--line);color:var(--soft);font-size:.85rem;
overflow-wrap:anywhere}
td.r i{color:var(--soft);font-style:normal;font-size:.9em;display:block;white-space:normal;overflow-wrap:anywhere}
@media (max-width:1240px){td.r small{display:block;margin:0}td.r small.in{display:inline;margin-left:.35em}
td.nowrap{white-space:normal}tbody th{min-width:9rem}
th,td{padding:5px 6px}tr.part th{padding-left:14px}
svg.bar{width:90px}svg.strip{width:190px}}
@media (max-width:640px){main{padding:20px 12px 48px}th,td{padding:5px 7px}}
@media print{main{max-width:none;padding:0}nav,.controls,.pager{display:none!important}.text,.tall{max-height:none;
overflow:visible}tr,.card,.panel{break-inside:avoid}h2,h3{break-after:avoid}body{font-size:11px}}
"""

# What would hide or reorder text: C0 and C1 controls but tab and line feed, marks of direction, lone surrogates,
# invisible joiners of lines, and what HTML or XML forbids.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def text(value: Any) -> str:
    """Any text, safe between tags and inside quoted attributes."""
    return escape(spell(value))


def spell(value: Any) -> str:
    """Any text, with what would hide or reorder it spelled out."""
    return _HIDDEN.sub(lambda found: f"‹U+{ord(found.group()):04X}›", str(value).replace("\r\n", "\n"))


def data_block(value: Any, name: str = "data") -> str:
    """JSON that a script of the page reads, in an element that no browser runs.

    `<` is escaped, so neither `</script` nor `<!--` can occur; so are U+2028, U+2029, marks of direction and lone
    surrogates. A number that is not finite becomes a text ("nan", "-inf"), because JSON has none.
    """
    packed = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=plain)
    packed = packed.replace("<", "\\u003c").replace(">", "\\u003e")
    packed = _HIDDEN.sub(lambda found: f"\\u{ord(found.group()):04x}", packed)
    return f'<script type="application/json" id="{name}">{packed}</script>'


def _finite(value: Any) -> Any:
    """The same with floats of six digits, and texts for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): one if type(one) is str else _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def document(title: str, body: str, *, data: Any = None, script: str = "", style: str = "") -> str:
    """A whole page. `body` is HTML whose texts have been escaped; `data` is read by `script`, if there is one."""
    style = STYLE + style
    allowed = f"'sha256-{_digest(script)}'" if script else "'none'"
    policy = (
        f"default-src 'none';script-src {allowed};style-src 'sha256-{_digest(style)}';"
        "base-uri 'none';form-action 'none'"
    )
    tail = (data_block(data) if data is not None else "") + (f"<script>{script}</script>" if script else "")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{style}</style></head>"
        f"<body><main>{body}</main>{tail}</body></html>\n"
    )


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def table(head: Sequence[str], rows: Sequence[str], caption: str = "", left: Sequence[int] = (0,)) -> str:
    """A table that scrolls by itself when it is too wide. `rows` are finished <tr> elements; columns other than `left`
    hold numbers.
    """
    cells = "".join(
        f'<th scope="col"{"" if place in left else " class=r"}>{text(name)}</th>' for place, name in enumerate(head)
    )
    said = f"<caption>{text(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table>{said}<thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def row(first: str, cells: Sequence[str], classes: str = "") -> str:
    """A row: a heading (HTML) and finished cells."""
    return f'<tr{f" class={classes}" if classes else ""}><th scope="row">{first}</th>{"".join(cells)}</tr>'


def cell(shown: str) -> str:
    """A cell with a number, given as text."""
    return f'<td class="r">{soften(shown)}</td>'


def soften(shown: str) -> str:
    """HTML of "0.25 ± 0.01" or "3 of 10", what comes after the number in a softer tone."""
    return re.sub(r"^(\S+) ((?:±|of) \S+)$", r"\1<small>\2</small>", text(shown))


def name_of(task: str) -> str:
    """HTML of a task's name; a long one may break after its underscores."""
    shown = text(task)
    return shown.replace("_", "_<wbr>") if len(task) > 16 else shown


def cards(facts: dict[str, tuple[str, str]]) -> str:
    """The facts at the head of a page: name -> (the value, what explains it)."""
    shown = (
        f"<div><dt>{text(name)}</dt><dd><b>{text(value)}</b>{f'<small>{text(more)}</small>' if more else ''}</dd></div>"
        for name, (value, more) in facts.items()
    )
    return f'<dl class="cards">{"".join(shown)}</dl>'


def warnings_list(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f'<ul class="warnings" aria-label="warnings">{"".join(f"<li>{text(line)}</li>" for line in lines)}</ul>'


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number; True and False are none."""
    # The usual ones first: asking an abstract class is slow, and a page asks a million times.
    is_one = isinstance(value, int | float) or (value is not None and isinstance(value, Real))
    return is_one and not isinstance(value, bool) and math.isfinite(value)


def number(value: float | None, digits: int = 3) -> str:
    """A dash where there is none, never a zero."""
    return f"{value:.{digits}f}".replace("-", "−") if value is not None and is_number(value) else "–"


def with_error(value: float | None, error: float | None, digits: int = 3) -> str:
    shown = number(value, digits)
    return shown if shown == "–" or error is None or not is_number(error) else f"{shown} ± {error:.{digits}f}"


def signed(value: float | None, digits: int = 3) -> str:
    return number(value, digits) if value is None or not is_number(value) else f"{value:+.{digits}f}".replace("-", "−")


def count(value: float | None) -> str:
    """1234567 -> 1.23M; three digits."""
    if value is None or not is_number(value):
        return "–"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:.3g}"


def compute(value: float | None) -> str:
    """FLOPs as 1.23×10¹⁹."""
    if value is None or not is_number(value) or value <= 0:
        return "–"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"
