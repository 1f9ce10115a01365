"""The evaluation reports in a real browser: hostile text cannot run, and every control does what it says."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from isoflop.evaluate.pages.report import checkpoint_page, is_right
from isoflop.evaluate.pages.sweep_report import sweep_page
from report_samples import HOSTILE, RAN, answers_to, domain, header, make_items, make_rows, make_written, numbers

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "disable-quic no-first-run disable-background-networking disable-component-update disable-sync disable-gpu"
pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs chromium")]

CATCH = "<script>window.faults=[];addEventListener('error',e=>faults.push(e.message));window.alert=()=>{};</script>"
# Runs after the page's script, on a copy of the page without its policy, and writes its observations into the page.
PROBE = """<script>addEventListener('load', () => setTimeout(async () => {
  const get = id => document.getElementById(id), cards = () => [...document.querySelectorAll('#list > .card')];
  const all = selector => [...document.querySelectorAll(selector)], wait = ms => new Promise(go => setTimeout(go, ms));
  const press = (key, node = document.body) => node.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
  const observed = {};
  try { %s } catch (error) { faults.push(String(error)); }
  observed.wide = document.documentElement.scrollWidth - innerWidth; observed.faults = faults;
  observed.ran = document.documentElement.dataset.ran || null;
  const node = document.createElement('div'); node.id = 'probe'; node.textContent = JSON.stringify(observed);
  document.body.append(node);
}, 300));</script>"""
SAMPLES = """
  const choose = (id, value) => {
    get(id).value = value; get(id).dispatchEvent(new Event('change'));
    return get('said').textContent;
  };
  const search = async text => {
    get('search').value = text; get('search').dispatchEvent(new Event('input')); await wait(400);
    return get('said').textContent;
  };
  observed.start = get('said').textContent;
  observed.first = cards().length; observed.tasks = get('task').options.length;
  observed.prompt = cards()[0].querySelector('.prompt').textContent;
  observed.choice = cards()[0].querySelector('.say').textContent;
  observed.chosen = cards()[0].querySelectorAll('.share.chosen').length;
  observed.gold = cards()[0].querySelectorAll('tr.gold').length;
  observed.bars = [...cards()[0].querySelectorAll('.share:not(.theirs) u')].map(bar => parseFloat(bar.style.width));
  for (const kind of ['right', 'wrong']) observed[kind] = choose('ok', kind);
  choose('ok', '');
  for (const kind of ['truncated', 'contaminated', 'clean']) observed[kind] = choose('flag', kind);
  choose('flag', '');
  for (const kind of ['differ', 'gained', 'lost']) observed[kind] = choose('differ', kind);
  choose('differ', '');
  choose('order', 'p_right'); observed.lowest = cards()[0].querySelector('.numbers').textContent; choose('order', '');
  observed.written = choose('task', '1');
  observed.answers = [...cards()[0].querySelectorAll('.said pre')].map(pre => pre.textContent);
  choose('task', '');
  press('j'); press('j'); observed.second = cards().indexOf(document.activeElement);
  press('k'); press('k'); observed.kept = cards().indexOf(document.activeElement);
  for (let n = 0; n < 25; n++) press('j');
  observed.turned = get('said').textContent; press('k'); observed.back = get('said').textContent;
  press('/'); observed.focus = document.activeElement.id; press('j', get('search'));
  get('on').click(); observed.next = get('said').textContent; observed.typed = get('search').value;
  observed.searched = await search('QUESTION 7 of');
  observed.nothing = await search('no such text'); observed.empty = cards().length; await search('');
  document.querySelector('#tasks ~ .scroll a').click(); await wait(200);
  observed.linked = get('said').textContent;
  observed.labels = all('select, input').every(node => node.labels.length === 1);
"""
SWEEP = """
  const panel = document.querySelector('.panel svg'), path = panel.querySelector('path[data-rows]');
  const [x, y] = path.getAttribute('d').slice(1).split('h')[0].split(' ').map(Number);
  const row = Number(path.dataset.rows.split(',')[0]);
  const box = panel.getBoundingClientRect(), scale = box.width / panel.viewBox.baseVal.width;
  const place = {clientX: box.left + x * scale, clientY: box.top + y * scale, bubbles: true};
  panel.dispatchEvent(new PointerEvent('pointermove', place));
  observed.note = get('note').textContent; observed.shown = !get('note').hidden; observed.row = row;
  observed.rings = all('.ring[visibility=visible]').length; observed.panels = all('.panel').length;
  panel.dispatchEvent(new PointerEvent('pointerleave')); observed.hidden = get('note').hidden;
  observed.left = all('.ring[visibility=visible]').length;
  const table = all('.sortable table').pop(), heads = [...table.tHead.rows[0].cells];
  const column = heads.findIndex(head => head.textContent === 'held-out loss');
  const values = () => [...table.tBodies[0].rows].map(row => Number(row.cells[column].dataset.v));
  heads[column].querySelector('button').click(); observed.up = values();
  heads[column].querySelector('button').click(); observed.down = values();
  observed.sort = heads[column].getAttribute('aria-sort');
"""


def browse(folder: Path, page: str, width: int, *, into: str = "--dump-dom") -> tuple[str, str]:
    """Return the page after its scripts have run, and the browser's log."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    flags = [f"--{flag}" for flag in QUIET.split()]
    done = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", *flags, f"--user-data-dir={folder / 'profile'}"),
            *(f"--window-size={width},1400", "--virtual-time-budget=10000", "--enable-logging=stderr", "--v=0"),
            *(into, f"file://{path}"),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return done.stdout, done.stderr


def probe(folder: Path, page: str, width: int, steps: str) -> dict[str, Any]:
    """Return what `steps` observe on the page without its policy, so that only escaping stops hostile text."""
    unguarded, policies = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert policies == 1
    unguarded = unguarded.replace("<head>", "<head>" + CATCH, 1).replace("</body>", PROBE % steps + "</body>", 1)
    dump, log = browse(folder, unguarded, width)
    match = re.search(r'<div id="probe">(.*?)</div>', dump, re.S)
    assert match, log[-2000:]
    assert not re.search(r"CONSOLE.*(error|Uncaught)", log, re.I), log[-2000:]
    return dict(json.loads(html.unescape(match.group(1))))


def test_samples_are_filtered_sorted_and_searched_and_text_stays_text(tmp_path: Path) -> None:
    choice_task, written_task = f"arc_easy{HOSTILE}", f"gsm8k{HOSTILE}"
    items = make_items(choice_task, 40, text=HOSTILE) + make_written(written_task, 6, HOSTILE)
    theirs = make_items(choice_task, 40, seed=1, text=HOSTILE)
    worst = {"val_loss": 1.0, "worst": [{"index": 1, "loss": 9.0, "text": HOSTILE}]}
    scores = header(
        {choice_task: numbers(), written_task: numbers(withheld=HOSTILE), f"text{HOSTILE}": domain(1.0)}, held_out=worst
    )
    scores |= {key: HOSTILE for key in ("name", "checkpoint", "device", "tokenizer")}
    other = header(scores["tasks"], run_id=HOSTILE, name=HOSTILE, checkpoint=HOSTILE)
    observed = probe(tmp_path, checkpoint_page(scores, items, (other, theirs)), 900, SAMPLES)

    assert observed["faults"] == []
    assert observed["ran"] is None, "hostile text ran"
    assert observed["wide"] <= 0, "the page scrolls sideways"
    spelled = HOSTILE
    for mark in "\u202e\u2066\x00\u2028\ud800":
        spelled = spelled.replace(mark, f"‹U+{ord(mark):04X}›")
    assert observed["prompt"] == f"question 0 of arc_easy{spelled}{spelled}"
    assert observed["choice"] == f" choice 0{spelled}"
    assert (observed["chosen"], observed["gold"]) == (2, 1), "each side chose one; one is right"
    assert sum(observed["bars"]) == pytest.approx(100, abs=0.3)

    right, right_theirs = ([is_right(item) for item in side] for side in (items, theirs))

    def many(chosen: list[Any]) -> str:
        count = sum(map(bool, chosen))
        part = "" if count == 46 else " (46 in all)"
        return (
            f"Items 1 to {min(25, count)} of {count}{part}" if count else "None of the 46 items matches these filters."
        )

    both = list(zip(right, right_theirs, strict=False))
    expected = {
        "start": many([True] * 46), "first": 25, "tasks": 3,
        "right": many(right), "wrong": many([not a for a in right]),
        "truncated": many([item["truncated"] for item in items]),
        "contaminated": many([item["contaminated"] for item in items]),
        "clean": many([not item["contaminated"] for item in items]), "differ": many([a != b for a, b in both]),
        "gained": many([a and not b for a, b in both]), "lost": many([b and not a for a, b in both]),
        "written": "Items 1 to 6 of 6 (46 in all)", "answers": [f"expected 0{spelled}", f"wrote 0{spelled}"],
        "second": 1, "kept": 0,  # j goes on, k goes back and stays at the first
        "turned": "Items 26 to 46 of 46", "back": "Items 1 to 25 of 46",  # j goes over to the next page
        "focus": "search", "next": "Items 26 to 46 of 46", "typed": "",  # a key in the search is not a command
        "searched": "Items 1 to 1 of 1 (46 in all)", "empty": 0, "nothing": many([]),
        "linked": "Items 1 to 25 of 40 (46 in all)",  # a task's name leads to its samples
        "labels": True,  # every control has one
    }  # fmt: skip
    assert {name: observed[name] for name in expected} == expected
    assert observed["lowest"].startswith(f"p(right) {min(item['p_right'] for item in items[:40]):.3f}")


def test_every_column_of_the_tables_is_seen_at_once(tmp_path: Path) -> None:
    whole = {"items": 10042, "subset": {"items": 10042, "of": 10042}}
    names = ("hellaswag", "commonsense_qa_cloze", "mmlu_high_school_macroeconomics_cloze", "with-dashes-and-long")
    tasks = {name: numbers(margin=-0.5, **whole, clean=numbers(items=9034)) for name in names}
    tasks |= {"half": numbers(subset={"items": 500, "of": 10042}, items=500), "text_news": domain(1.5, **whole)}
    further = {"exact_match": 0.1, "exact_match_se": 0.01, "exact_match,flexible-extract": 0.2}
    tasks["gsm8k"] = numbers(acc=None, p_right=None, **further, **{"exact_match,flexible-extract_se": 0.02})
    rows = make_rows(names, recipes=("raw", "filtered"))
    pages = {
        "checkpoint": checkpoint_page(
            header(tasks), make_items(names[0], 12), (header(tasks), make_items(names[0], 12, 1))
        ),
        "sweep": sweep_page(rows, answers_to(rows), "spine", {}),
    }
    widths = [1280, 1235, 900, 390]
    # For the style sheet, a frame is a separate window.
    steps = f"""
      observed.cut = {{}};
      const source = document.documentElement.outerHTML.replace(/<script[^]*?<.script>/g, '')
        .replace(/<details>/g, '<details open>');
      for (const width of {widths}) {{
        const frame = document.createElement('iframe');
        frame.style.width = width + 'px'; frame.srcdoc = source; document.body.append(frame);
        await new Promise(go => {{ frame.onload = go; }});
        const tables = [...frame.contentDocument.querySelectorAll('.scroll')];
        observed.cut[width] = Math.max(...tables.map(box => box.scrollWidth - box.clientWidth));
        frame.remove();
      }}"""
    for name, page in pages.items():
        observed = probe(tmp_path, page, 1400, steps)
        assert observed["faults"] == []
        assert observed["cut"] == {str(width): 0 for width in widths}, name


def test_a_missed_escape_cannot_run_and_a_page_has_25_items(tmp_path: Path) -> None:
    page = checkpoint_page(header({"t": numbers()}), make_items("t", 1000))
    attack = f"<script>{RAN}</script><img src=x onerror={RAN}><svg onload={RAN}></svg><a href='javascript:{RAN}'>x</a>"
    seen, log = browse(tmp_path, page.replace("<main>", f"<main>{attack}", 1), 1280)
    assert "data-ran" not in seen
    assert len(re.findall("Refused to|violates the following", log)) >= 3, "the policy refused each of them"
    assert "Items 1 to 25 of 1,000" in seen
    assert seen.count('<li class="card"') == 25


def test_a_sweeps_panels_name_the_run_and_its_table_sorts(tmp_path: Path) -> None:
    rows = make_rows(text=HOSTILE, recipes=("a", f"b{HOSTILE}"))
    page = sweep_page(rows, answers_to(rows), f"spine{HOSTILE}", {row["run_id"]: HOSTILE for row in rows})
    observed = probe(tmp_path, page, 900, SWEEP)
    assert observed["faults"] == []
    assert observed["ran"] is None
    assert observed["wide"] <= 0
    assert observed["panels"] == observed["rings"] == 8, "one run, marked in every panel"
    assert observed["shown"]
    assert observed["note"].startswith(rows[observed["row"]]["name"][:8])
    assert f"loss {rows[observed['row']]['loss']:.4f}" in observed["note"]
    assert observed["hidden"]
    assert observed["left"] == 0
    assert observed["up"] == sorted(observed["up"])
    assert observed["down"] == sorted(observed["down"], reverse=True)
    assert observed["sort"] == "descending"
    assert len(observed["up"]) == len(rows)
