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
# Runs after the page's own script, on a copy of the page without its policy, and leaves what it saw in the page.
PROBE = """<script>addEventListener('load', () => setTimeout(async () => {
  const get = id => document.getElementById(id), cards = () => [...document.querySelectorAll('#list > .card')];
  const all = selector => [...document.querySelectorAll(selector)], wait = ms => new Promise(go => setTimeout(go, ms));
  const press = (key, node = document.body) => node.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
  const said = {};
  try { %s } catch (error) { faults.push(String(error)); }
  said.wide = document.documentElement.scrollWidth - innerWidth; said.faults = faults;
  said.ran = document.documentElement.dataset.ran || null;
  const node = document.createElement('div'); node.id = 'probe'; node.textContent = JSON.stringify(said);
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
  said.start = get('said').textContent; said.first = cards().length; said.tasks = get('task').options.length;
  said.prompt = cards()[0].querySelector('.prompt').textContent;
  said.choice = cards()[0].querySelector('.say').textContent;
  said.chosen = cards()[0].querySelectorAll('.share.chosen').length;
  said.gold = cards()[0].querySelectorAll('tr.gold').length;
  said.bars = [...cards()[0].querySelectorAll('.share:not(.theirs) u')].map(bar => parseFloat(bar.style.width));
  for (const kind of ['right', 'wrong']) said[kind] = choose('ok', kind);
  choose('ok', '');
  for (const kind of ['truncated', 'contaminated', 'clean']) said[kind] = choose('flag', kind);
  choose('flag', '');
  for (const kind of ['differ', 'gained', 'lost']) said[kind] = choose('differ', kind);
  choose('differ', '');
  choose('order', 'p_right'); said.lowest = cards()[0].querySelector('.numbers').textContent; choose('order', '');
  said.written = choose('task', '1');
  said.answers = [...cards()[0].querySelectorAll('.said pre')].map(pre => pre.textContent);
  choose('task', '');
  press('j'); press('j'); said.second = cards().indexOf(document.activeElement);
  press('k'); press('k'); said.kept = cards().indexOf(document.activeElement);
  for (let n = 0; n < 25; n++) press('j');
  said.turned = get('said').textContent; press('k'); said.back = get('said').textContent;
  press('/'); said.focus = document.activeElement.id; press('j', get('search'));
  get('on').click(); said.next = get('said').textContent; said.typed = get('search').value;
  said.searched = await search('QUESTION 7 of');
  said.nothing = await search('no such text'); said.empty = cards().length; await search('');
  document.querySelector('#tasks ~ .scroll a').click(); await wait(200);
  said.linked = get('said').textContent;
  said.labels = all('select, input').every(node => node.labels.length === 1);
"""
SWEEP = """
  const panel = document.querySelector('.panel svg'), path = panel.querySelector('path[data-rows]');
  const [x, y] = path.getAttribute('d').slice(1).split('h')[0].split(' ').map(Number);
  const row = Number(path.dataset.rows.split(',')[0]);
  const box = panel.getBoundingClientRect(), scale = box.width / panel.viewBox.baseVal.width;
  const place = {clientX: box.left + x * scale, clientY: box.top + y * scale, bubbles: true};
  panel.dispatchEvent(new PointerEvent('pointermove', place));
  said.note = get('note').textContent; said.shown = !get('note').hidden; said.row = row;
  said.rings = all('.ring[visibility=visible]').length; said.panels = all('.panel').length;
  panel.dispatchEvent(new PointerEvent('pointerleave')); said.hidden = get('note').hidden;
  said.left = all('.ring[visibility=visible]').length;
  const table = all('.sortable table').pop(), heads = [...table.tHead.rows[0].cells];
  const column = heads.findIndex(head => head.textContent === 'held-out loss');
  const values = () => [...table.tBodies[0].rows].map(row => Number(row.cells[column].dataset.v));
  heads[column].querySelector('button').click(); said.up = values();
  heads[column].querySelector('button').click(); said.down = values();
  said.sort = heads[column].getAttribute('aria-sort');
"""


def browse(folder: Path, page: str, width: int, *, into: str = "--dump-dom") -> tuple[str, str]:
    """The page after its scripts have run, and what the browser logged."""
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
    """What `steps` found on the page. Its policy is taken off: only the escaping keeps hostile text from running."""
    bare, policies = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert policies == 1
    bare = bare.replace("<head>", "<head>" + CATCH, 1).replace("</body>", PROBE % steps + "</body>", 1)
    seen, log = browse(folder, bare, width)
    found = re.search(r'<div id="probe">(.*?)</div>', seen, re.S)
    assert found, log[-2000:]
    assert not re.search(r"CONSOLE.*(error|Uncaught)", log, re.I), log[-2000:]
    return dict(json.loads(html.unescape(found.group(1))))


def test_samples_are_filtered_sorted_and_searched_and_text_stays_text(tmp_path: Path) -> None:
    one, two = f"arc_easy{HOSTILE}", f"gsm8k{HOSTILE}"
    items = make_items(one, 40, text=HOSTILE) + make_written(two, 6, HOSTILE)
    theirs = make_items(one, 40, seed=1, text=HOSTILE)
    worst = {"val_loss": 1.0, "worst": [{"index": 1, "loss": 9.0, "text": HOSTILE}]}
    scores = header({one: numbers(), two: numbers(withheld=HOSTILE), f"text{HOSTILE}": domain(1.0)}, held_out=worst)
    scores |= {key: HOSTILE for key in ("name", "checkpoint", "device", "tokenizer")}
    other = header(scores["tasks"], run_id=HOSTILE, name=HOSTILE, checkpoint=HOSTILE)
    said = probe(tmp_path, checkpoint_page(scores, items, (other, theirs)), 900, SAMPLES)

    assert said["faults"] == []
    assert said["ran"] is None, "hostile text ran"
    assert said["wide"] <= 0, "the page scrolls sideways"
    spelled = HOSTILE
    for mark in "\u202e\u2066\x00\u2028\ud800":
        spelled = spelled.replace(mark, f"‹U+{ord(mark):04X}›")
    assert said["prompt"] == f"question 0 of arc_easy{spelled}{spelled}"
    assert said["choice"] == f" choice 0{spelled}"
    assert (said["chosen"], said["gold"]) == (2, 1), "each side chose one; one is right"
    assert sum(said["bars"]) == pytest.approx(100, abs=0.3)

    right, right_theirs = ([is_right(item) for item in side] for side in (items, theirs))

    def many(chosen: list[Any]) -> str:
        count = sum(map(bool, chosen))
        part = "" if count == 46 else " (46 in all)"
        return f"Items 1 to {min(25, count)} of {count}{part}" if count else "None of the 46 items is like this."

    assert said["start"] == many([True] * 46)
    assert said["first"] == 25
    assert said["tasks"] == 3
    assert said["right"] == many(right)
    assert said["wrong"] == many([not ok for ok in right])
    for flag in ("truncated", "contaminated"):
        assert said[flag] == many([item[flag] for item in items])
    assert said["clean"] == many([not item["contaminated"] for item in items])
    both = list(zip(right, right_theirs, strict=False))
    assert said["differ"] == many([a != b for a, b in both])
    assert said["gained"] == many([a and not b for a, b in both])
    assert said["lost"] == many([b and not a for a, b in both])
    assert said["lowest"].startswith(f"p(right) {min(item['p_right'] for item in items[:40]):.3f}")
    assert said["written"] == "Items 1 to 6 of 6 (46 in all)"
    assert said["answers"] == [f"expected 0{spelled}", f"wrote 0{spelled}"]
    assert (said["second"], said["kept"]) == (1, 0), "j goes on, k goes back and stays at the first"
    assert said["turned"] == "Items 26 to 46 of 46", "j goes over to the next page"
    assert said["back"] == "Items 1 to 25 of 46"
    assert said["focus"] == "search"
    assert said["next"] == "Items 26 to 46 of 46"
    assert said["typed"] == "", "a key in the search is not a command"
    assert said["searched"] == "Items 1 to 1 of 1 (46 in all)"
    assert (said["nothing"], said["empty"]) == ("None of the 46 items is like this.", 0)
    assert said["linked"] == "Items 1 to 25 of 40 (46 in all)", "a task's name leads to its samples"
    assert said["labels"], "every control has a label"


def test_every_column_of_the_tables_is_seen_at_once(tmp_path: Path) -> None:
    whole = {"items": 10042, "subset": {"items": 10042, "of": 10042}}
    names = ("hellaswag", "commonsense_qa_cloze", "mmlu_high_school_macroeconomics_cloze", "with-dashes-and-long")
    tasks = {name: numbers(margin=-0.5, **whole, clean=numbers(items=9034)) for name in names}
    tasks |= {"half": numbers(subset={"items": 500, "of": 10042}, items=500), "text_news": domain(1.5, **whole)}
    further = {"exact_match": 0.1, "exact_match_se": 0.01, "exact_match,flexible-extract": 0.2}
    tasks["gsm8k"] = numbers(acc=None, p_right=None, **further, **{"exact_match,flexible-extract_se": 0.02})
    page = checkpoint_page(header(tasks))
    widths = [1280, 1245, 1235, 1100, 900]
    # A frame is a window of its own to the style.
    steps = f"""
      said.cut = {{}};
      const source = document.documentElement.outerHTML.replace(/<script[^]*?<.script>/g, '');
      for (const width of {widths}) {{
        const frame = document.createElement('iframe');
        frame.style.width = width + 'px'; frame.srcdoc = source; document.body.append(frame);
        await new Promise(go => {{ frame.onload = go; }});
        const tables = [...frame.contentDocument.querySelectorAll('.scroll')];
        said.cut[width] = tables.map(box => box.scrollWidth - box.clientWidth);
        frame.remove();
      }}"""
    said = probe(tmp_path, page, 1400, steps)
    assert said["faults"] == []
    assert said["cut"] == {str(width): [0, 0] for width in widths}


def test_fifteen_tasks_with_samples_print_on_at_most_six_pages(tmp_path: Path) -> None:
    tasks = {f"task_{i}": numbers(items=50) for i in range(15)}
    page = checkpoint_page(header(tasks), make_items("task_0", 50))
    browse(tmp_path, page, 1280, into=f"--print-to-pdf={tmp_path / 'page.pdf'}")
    pages = len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes()))
    assert 2 <= pages <= 6


def test_a_missed_escape_cannot_run_and_a_page_has_25_items(tmp_path: Path) -> None:
    page = checkpoint_page(header({"t": numbers()}), make_items("t", 10_000))
    attack = f"<script>{RAN}</script><img src=x onerror={RAN}><svg onload={RAN}></svg><a href='javascript:{RAN}'>x</a>"
    seen, log = browse(tmp_path, page.replace("<main>", f"<main>{attack}", 1), 1280)
    assert "data-ran" not in seen
    assert len(re.findall("Refused to|violates the following", log)) >= 3, "the policy refused each of them"
    assert "Items 1 to 25 of 10,000" in seen
    assert seen.count('<li class="card"') == 25


def test_a_sweeps_panels_name_the_run_and_its_table_sorts(tmp_path: Path) -> None:
    rows = make_rows(text=HOSTILE, recipes=("a", f"b{HOSTILE}"))
    page = sweep_page(rows, answers_to(rows), f"spine{HOSTILE}", {row["run_id"]: HOSTILE for row in rows})
    said = probe(tmp_path, page, 900, SWEEP)
    assert said["faults"] == []
    assert said["ran"] is None
    assert said["wide"] <= 0
    assert said["panels"] == said["rings"] == 8, "one run, marked in every panel"
    assert said["shown"]
    assert said["note"].startswith(rows[said["row"]]["name"][:8])
    assert f"loss {rows[said['row']]['loss']:.4f}" in said["note"]
    assert said["hidden"]
    assert said["left"] == 0
    assert said["up"] == sorted(said["up"])
    assert said["down"] == sorted(said["down"], reverse=True)
    assert said["sort"] == "descending"
    assert len(said["up"]) == len(rows)
