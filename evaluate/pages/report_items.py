"""The samples of a checkpoint's page: what each item asked, and what the model made of it.

Special here:
- Texts travel as JSON in an element that no browser runs, and the script puts them on the page with `textContent` only:
  a task's text is never HTML.
- 25 items are on the page at a time, so that ten thousand stay quick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .page import is_number, text
from .report_compare import called, key_of

# Metrics that say of one item whether it was answered rightly, the first that it has.
VERDICTS = ("acc", "exact_match", "acc_norm")
# What of an item's own numbers travels with it.
_NUMBERS = ("log_probabilities", "answer", "gold_bpb", "p_right", "margin", "bpb", "values")
_QUESTION = ("index", "prompt", "choices", "right", "target")
_CONTROLS = """
<div class="controls" role="search">
<label>Task <select id="task"><option value="">all tasks</option></select></label>
<label>Answer <select id="ok"><option value="">right and wrong</option><option value="right">right</option>
<option value="wrong">wrong</option></select></label>
{other}
<label>Only <select id="flag"><option value="">any item</option><option value="truncated">cut prompts</option>
<option value="contaminated">contaminated</option><option value="clean">not contaminated</option></select></label>
<label>Order <select id="order"><option value="">as in the task</option><option value="p_right">lowest p(right)</option>
<option value="margin">closest call</option><option value="gold_bpb">highest BPB</option></select></label>
<label class="wide">Search <input id="search" type="search" placeholder="text of prompt or answer"></label>
</div>
<div class="pager"><span id="said" role="status"></span><span><button id="back" type="button">← Previous</button>
<button id="on" type="button">Next →</button></span></div>
<ol id="list" class="samples"></ol>
<div class="pager"><span class="soft small">Keys: j and k go to the next and the previous item, / to the search.</span>
<span><button id="back2" type="button">← Previous</button> <button id="on2" type="button">Next →</button></span></div>
<noscript><p>The samples need JavaScript, which this browser does not run here.</p></noscript>
"""
_OTHER = """<label>Other checkpoint <select id="differ"><option value="">any answer</option>
<option value="differ">they differ</option><option value="gained">only this one is right</option>
<option value="lost">only the other is right</option></select></label>"""

STYLE = """
.controls{display:flex;flex-wrap:wrap;gap:10px 14px;align-items:end;padding:12px 14px;background:var(--wash);
border:1px solid var(--line);border-radius:8px;margin:12px 0}
.controls label{font-size:.8rem;color:var(--soft);display:block}.controls .wide{flex:1 1 190px}
.controls select,.controls input{display:block;width:100%;margin-top:3px;font:inherit;font-size:.92rem;
color:var(--ink);background:var(--paper);border:1px solid var(--line);border-radius:6px;padding:4px 8px;
max-width:20rem;height:2.15rem}
.controls .wide input{max-width:none}
.pager{display:flex;justify-content:space-between;align-items:center;gap:12px;margin:8px 0;flex-wrap:wrap}
button{font:inherit;font-size:.88rem;color:var(--ink);background:var(--paper);border:1px solid var(--line);
border-radius:6px;padding:4px 12px;cursor:pointer}button:disabled{opacity:.45;cursor:default}
button:hover:enabled{border-color:var(--accent)}
.samples{list-style:none;margin:10px 0;padding:0}.card{border:1px solid var(--line);border-radius:8px;
padding:12px 14px;margin:0 0 12px;overflow:hidden}.card:focus{outline:2px solid var(--accent);outline-offset:1px}
.card header{display:flex;flex-wrap:wrap;gap:4px 10px;align-items:baseline;margin:0 0 8px}
.card header b{overflow-wrap:anywhere}.numbers{margin-left:auto;color:var(--soft);font-size:.84rem;
font-variant-numeric:tabular-nums}
.tag{font-size:.78rem;border-radius:9px;padding:1px 9px;background:var(--faint);color:var(--soft)}
.tag.good{background:var(--goodwash);color:var(--good)}.tag.bad{background:var(--badwash);color:var(--bad)}
.tag.warn{background:var(--warnwash);color:var(--warn)}
.answers{margin-top:9px;table-layout:fixed}.answers td{padding:5px 8px;vertical-align:top}
.answers th{font-weight:500;font-size:.8rem;color:var(--soft);padding:3px 8px;min-width:0}
.answers .say{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate}
col.gold{width:3.6rem}col.nats{width:5.2rem}col.part{width:12.5rem}
.answers tr.gold td{background:var(--goodwash)}.mark{font-size:.78rem;color:var(--good);font-weight:600}
.share{display:flex;align-items:center;gap:7px;font-variant-numeric:tabular-nums}.share i{flex:1;height:9px;
border-radius:2px;background:var(--line);display:block;overflow:hidden}.share i u{display:block;height:100%;
background:var(--fill)}.share.theirs i u{background:var(--other)}.share.chosen span{font-weight:650}
.share span{width:3.3rem;text-align:right;font-size:.86rem;white-space:nowrap}
.share em{width:3.1rem;font-style:normal;font-size:.78rem;
color:var(--soft)}
.said{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,260px),1fr));gap:10px;margin-top:9px}
.said h4{margin:0 0 3px;font-size:.8rem;font-weight:500;color:var(--soft)}
@media (max-width:1000px){col.part{width:9.5rem}col.nats{width:4.6rem}.answers th{padding:3px 4px}.share{flex-wrap:wrap;
gap:0 7px}.share em{flex-basis:100%;text-align:right}.share em:empty{display:none}}
@media (max-width:640px){col.gold{width:3rem}col.part{width:6rem}.share i{flex-basis:100%}}
"""


def is_right(item: Mapping[str, Any]) -> bool | None:
    """Whether an item was answered rightly; None where the task does not say (text by domain)."""
    values = item.get("values") or {}
    names = [*VERDICTS, *sorted(name for name in values if name.startswith("exact_match"))]
    value = next((values[name] for name in names if is_number(values.get(name))), None)
    return None if value is None else value >= 0.5


def payload(
    scores: Mapping[str, Any],
    items: Sequence[Mapping[str, Any]],
    against: tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]] | None,
) -> dict[str, Any]:
    """What the script of the page reads: tasks, the two names, and the items, each with the other's answer in it."""
    others = {key_of(item): item for item in against[1]} if against else {}
    tasks = task_order(scores, items)
    numbers = {task: place for place, task in enumerate(tasks)}
    packed = []
    for item in items:
        one = {"task": numbers[str(item.get("task"))], **_known(item, _QUESTION), **_answer(item)}
        one |= {flag: 1 for flag in ("truncated", "contaminated") if item.get(flag)}
        other = others.get(key_of(item))
        if other is not None:
            one["other"] = _answer(other)
        packed.append(one)
    names = ["this checkpoint", called(against[0]) if against else None]
    return {"tasks": tasks, "names": names, "items": packed}


def task_order(scores: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tasks that have items, in the order of the scores."""
    places = {name: place for place, name in enumerate(scores["tasks"])}
    return sorted({str(item.get("task")) for item in items}, key=lambda name: (places.get(name, len(places)), name))


def _known(item: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: item[name] for name in names if item.get(name) is not None}


def _answer(item: Mapping[str, Any]) -> dict[str, Any]:
    right = is_right(item)
    return _known(item, _NUMBERS) | ({} if right is None else {"ok": int(right)})


def samples_section(items: Sequence[Mapping[str, Any]], against: Any) -> str:
    """The controls and the empty list, which the script fills."""
    if not items:
        return ""
    matched = "" if against is None else _OTHER
    return (
        f'<section><h2 id="samples">Samples</h2><p class="soft">What the model was asked, and what it answered. '
        f"{len(items):,} items; log-probabilities in nats; a bar is the share of a choice among the choices.</p>"
        f"{_CONTROLS.format(other=matched)}</section>"
    )


def worst_section(held_out: Mapping[str, Any]) -> str:
    """The windows of held-out text with the highest loss."""
    worst = held_out.get("worst") or []
    if not worst:
        return ""
    shown = "".join(
        f'<li class="card"><header><b>{window["loss"]:.3f} nats a token</b><span class="tag">'
        f"window {text(window['index'])}</span></header>"
        f'<pre class="text" dir="auto" tabindex="0">{text(window["text"])}</pre></li>'
        for window in worst
        if is_number(window.get("loss"))
    )
    return (
        '<section><h2 id="worst">Worst losses on held-out text</h2><p class="soft">The windows that the model finds '
        "hardest. What is there (tables, other languages, noise, broken text) says what the training text lacks, or "
        f'what should not be in it.</p><ol class="samples">{shown}</ol></section>'
    )
