"""The report's page: style, script, and the few HTML parts it is put together from. Knows nothing of laws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..formatting import text

STYLE = """
:root{--ink:#1b1f24;--soft:#57606a;--line:#d8dee4;--wash:#f6f8fa;--accent:#0072b2;--warn:#9a6700;--warnwash:#fff8e5;
 --warnline:#eac54f}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:#fff;color:var(--ink);
 font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
main{max-width:1080px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:2rem;line-height:1.2;letter-spacing:-.015em;margin:0 0 6px}
h2{font-size:1.3rem;letter-spacing:-.01em;margin:52px 0 8px;padding-top:14px;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:22px 0 2px}
p{margin:8px 0;max-width:76ch}
.sub,.caption{color:var(--soft)} .caption{font-size:.9rem;margin:2px 0 10px}
.num,td.r,th.r{font-variant-numeric:tabular-nums}
.answer{font-size:1.12rem;max-width:74ch;margin:20px 0 6px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:12px;margin:20px 0}
.card{border:1px solid var(--line);border-radius:8px;padding:12px 14px;background:var(--wash)}
.card b{display:block;font-size:1.3rem;line-height:1.3;font-variant-numeric:tabular-nums}
.card span{color:var(--soft);font-size:.86rem;line-height:1.35;display:block}
.warnings{list-style:none;margin:20px 0;padding:4px 0;border:1px solid var(--warnline);border-radius:8px;
 background:var(--warnwash)}
.warnings li{padding:7px 16px;display:grid;grid-template-columns:11.5rem 1fr;gap:14px;font-size:.94rem}
.warnings code{color:var(--warn);font-size:.82rem;padding-top:2px;overflow-wrap:anywhere}
.none{border-color:var(--line);background:var(--wash)}
.equation{font:1.08rem/1.9 "STIX Two Text","Cambria Math",Cambria,Georgia,serif;padding:12px 18px;
 background:var(--wash);
 border-left:3px solid var(--accent);overflow-x:auto;margin:12px 0}
.frac{display:inline-flex;flex-direction:column;vertical-align:middle;text-align:center;line-height:1.3;
 margin:0 .25em}
.frac>span:first-child{border-bottom:1px solid var(--ink);padding:0 .3em}
.equation sup{font-size:.75em;line-height:0}
.scroll{overflow-x:auto;margin:12px 0;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{padding:7px 12px;text-align:left;vertical-align:top;border-bottom:1px solid var(--line);white-space:nowrap}
td.wrap{white-space:normal;min-width:22rem}
thead th{border-bottom:2px solid var(--ink);font-weight:600;vertical-align:bottom}
td.r,th.r{text-align:right} td small{display:block;color:var(--soft);font-size:.8rem}
tr.group th{background:var(--wash);font-weight:600;padding-top:10px}
tr.part td{color:var(--soft)} tr.part td:first-child{padding-left:28px}
tr.group small{font-weight:400;color:var(--soft);margin-left:8px}
.key{display:inline-block;width:22px;height:0;border-top:3px solid;vertical-align:middle;margin-right:8px}
.sortable th{cursor:pointer;user-select:none} .sortable th:hover{color:var(--accent)}
.sortable th[data-dir]::after{content:" \\2191";color:var(--accent)}
 .sortable th[data-dir="-1"]::after{content:" \\2193"}
.tall{max-height:520px;overflow:auto;border:1px solid var(--line);border-radius:8px}
.tall thead th{position:sticky;top:0;background:#fff}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:8px 20px}
.switch{display:inline-flex;border:1px solid var(--line);border-radius:7px;overflow:hidden;margin:6px 0}
.switch button{font:inherit;font-size:.85rem;color:var(--soft);border:0;background:#fff;padding:5px 14px;
 cursor:pointer}
.switch button+button{border-left:1px solid var(--line)} .switch button[aria-pressed=true]{background:var(--wash);
 color:var(--ink);font-weight:600}
figure{margin:10px 0;min-width:0} .plot{width:100%}
footer{margin-top:56px;padding-top:14px;border-top:1px solid var(--line);font-size:.85rem;color:var(--soft)}
footer dl{display:grid;grid-template-columns:max-content 1fr;gap:3px 18px;margin:8px 0} footer dd{margin:0;
 overflow-wrap:anywhere}
@media (max-width:640px){main{padding:24px 14px 40px} h1{font-size:1.55rem} .warnings li{grid-template-columns:1fr;
 gap:0}
 th,td{padding:6px 8px} footer dl{grid-template-columns:1fr} footer dt{font-weight:600}}
@media print{main{max-width:none} .tall{max-height:none} figure,.card{break-inside:avoid}}
"""

# Draws every figure, and sorts tables by the numbers behind their cells.
SCRIPT = """
const narrow=matchMedia('(max-width:640px)').matches,hovers=matchMedia('(hover:hover)').matches;
for(const [id,figure] of Object.entries(FIGURES)){
  if(narrow){figure.layout.margin={...figure.layout.margin,l:48,r:8};figure.layout.font.size=11}
  Plotly.newPlot(id,figure.data,figure.layout,{responsive:true,displaylogo:false,displayModeBar:hovers?'hover':false,
    modeBarButtonsToRemove:['select2d','lasso2d','autoScale2d'],toImageButtonOptions:{format:'svg',filename:id}})
}
for(const button of document.querySelectorAll('.switch button'))button.addEventListener('click',()=>{
  for(const other of button.parentElement.children)other.setAttribute('aria-pressed',other===button);
  for(const [id,figure] of Object.entries(FIGURES)){
    const view=figure.layout.meta&&figure.layout.meta[button.value];if(view)Plotly.relayout(id,view)}
});
for(const table of document.querySelectorAll('.sortable'))table.tHead.addEventListener('click',event=>{
  const head=event.target.closest('th');if(!head)return;
  const column=head.cellIndex,direction=head.dataset.dir==='1'?-1:1,body=table.tBodies[0];
  for(const other of table.tHead.rows[0].cells)delete other.dataset.dir;
  head.dataset.dir=direction;
  const key=row=>{const cell=row.cells[column];
    return cell.dataset.v===undefined?cell.textContent:Number(cell.dataset.v)};
  body.append(...[...body.rows].sort((a,b)=>{const x=key(a),y=key(b);
    return direction*(typeof x==='number'&&typeof y==='number'?x-y:String(x).localeCompare(String(y)))}))
});
"""


class Page:
    """Collects sections and figures, and renders one self-contained file."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = []
        self.figures: dict[str, dict[str, Any]] = {}

    def add(self, html: str) -> None:
        """Append HTML whose data has been escaped."""
        self.parts.append(html)

    def figure(self, name: str, figure: dict[str, Any] | None, caption: str = "") -> str:
        """The HTML of a figure (empty for None), to be drawn when the page loads."""
        if figure is None:
            return ""
        self.figures[f"figure-{name}"] = figure
        said = f'<figcaption class="caption">{text(caption)}</figcaption>' if caption else ""
        height = int(figure["layout"]["height"])
        return f'<figure><div class="plot" id="figure-{name}" style="height:{height}px"></div>{said}</figure>'

    def render(self) -> str:
        from plotly.offline import get_plotlyjs

        # "<" may not occur in inline JSON: "</script" would end it.
        figures = json.dumps(self.figures, allow_nan=False).replace("<", "\\u003c")
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
            f"<title>{text(self.title)}</title><style>{STYLE}</style></head><body><main>{''.join(self.parts)}</main>"
            f"<script>{get_plotlyjs()}</script><script>const FIGURES={figures};{SCRIPT}</script></body></html>\n"
        )


def table(head: Sequence[str], rows: Sequence[str], classes: str = "", numeric_from: int = 1) -> str:
    """A table; `head` is text, `rows` are finished <tr> elements, columns from `numeric_from` on are right-aligned."""
    cells = "".join(f"<th{' class=r' if i >= numeric_from else ''}>{text(h)}</th>" for i, h in enumerate(head))
    return f'<table class="{classes}"><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def cell(shown: str, small: str = "", value: float | None = None) -> str:
    """A right-aligned cell: text, a smaller line below it, and the number that it sorts by."""
    sort = "" if value is None else f' data-v="{value!r}"'
    below = f"<small>{text(small)}</small>" if small else ""
    return f'<td class="r"{sort}>{text(shown)}{below}</td>'
