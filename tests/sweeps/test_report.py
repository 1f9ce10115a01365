"""The report is complete, self-contained, safe with hostile strings, written atomically, and a browser draws it."""

import base64
import gzip
import html
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit import formatting
from isoflop.fit.report import figures
from isoflop.fit.report.report import render_report, render_template

pytestmark = pytest.mark.usefixtures("quick_pictures")  # except those of `full_report`, which is made earlier
HOSTILE = '<script>alert("x")</script>&</code>'


def sweep(budgets=(2e11, 5e11, 1.2e12, 3e12), sizes=6, hostile=False, tasks=True):
    """Return the table and loss curves of a small sweep; with `hostile`, its strings contain unescaped HTML."""
    rng = np.random.default_rng(0)
    rows, curves = [], []
    for C in budgets:
        for N in 0.03 * C**0.5 * np.geomspace(0.2, 5, sizes):
            D = C / (6 * N)
            loss = (1 + 25 / N**0.42 + 170 / D**0.4) * np.exp(0.003 * rng.standard_normal())
            run = f"run{len(rows)}" + HOSTILE * hostile
            row = {"run_id": run, "final": True, "state": "done", "budget": C, "N": N, "D": D, "loss": loss, "flops": C}
            row |= {"loss_se": 0.01, "width": 16, "depth": 2, "val_bpb": loss / np.log(2), "epochs": 0.1}
            for task in ("arc_easy", "lambada") if tasks else ():
                name = task + HOSTILE * hostile
                row |= {f"{name}/acc": 0.25 + 0.01 * rng.standard_normal(), f"{name}/acc_se": 0.02}
                row |= {f"{name}/chance": 0.25}
                row |= {f"{name}/gold_bpb": loss, f"{name}/gold_bpb_se": 0.01}
            rows.append(row)
            share = np.linspace(0.05, 1, 20)
            lines = {"run_id": run, "step": (100 * share).astype(int), "tokens": D * share, "flops": C * share}
            curves.append(pd.DataFrame(lines | {"loss": 1 + 25 / N**0.42 + 170 / (D * share) ** 0.4}))
    return pd.DataFrame(rows), pd.concat(curves)


def write(folder, table, curves=None, intervals="noise", **options):
    analysis = fit.analyze(fit.read_table(table), targets=(1e14, 1e18), bootstrap=20, intervals=intervals)
    return analysis, fit.write_report(analysis, folder, curves, **options)


@pytest.fixture(scope="module")
def full_report(tmp_path_factory):
    table, curves = sweep()
    folder = tmp_path_factory.mktemp("report") / "deep" / "fit"
    analysis, path = write(
        folder, table, curves, "mixture", title="A & B", provenance={"git commit": "abc<123>", "runs": 24}, costs=COSTS
    )
    return analysis, path


COSTS = {
    "unit": "GPU-hours", "runs": 24, "done": 23, "attempts": 31, "retries": 6, "retry_budget": 100, "measured_runs": 38,
    "planned": {"hours": 20.0, "dollars": 50.0, "flops": 2.5e19},
    "used": {"hours": 25.0, "dollars": 62.5, "flops": 2.75e19},
    "useful": {"hours": 22.0, "dollars": 55.0, "flops": 2.4e19},
    "wasted": {"hours": 3.0, "dollars": 7.5, "flops": 3.5e18},
    "causes": {
        "node": {"attempts": 2, "hours": 1.75, "flops": 2e18, "words": "node failed"},
        "diverged": {"attempts": 1, "hours": 1.0, "flops": 1e18},
        "killed": {"attempts": 3, "hours": 0.25, "flops": 5e17}, "preempted": {"attempts": 2, "hours": 0.0, "flops": 0},
    },
    "error": {"runs": 23, "ratio": 1.17, "low": 1.02, "high": 1.31},
    "errors": {
        "256": {"runs": 12, "ratio": 1.25, "low": 1.11, "high": 1.4},
        "512": {"runs": 11, "ratio": 1.1, "low": 1.0, "high": 1.2},
    },
    "cluster_hours": 26.5, "overhead_hours": 1.5,
}  # fmt: skip


def unpacked(path, name):
    """Return the decompressed content of a script of the page."""
    content = re.search(rf'<script type="application/gzip" id="{name}">([A-Za-z0-9+/=]+)</script>', path.read_text())
    return gzip.decompress(base64.b64decode(content.group(1))).decode()


def visible(path):
    """Return the text of the page, without scripts and styles."""
    page = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", path.read_text(), flags=re.S)
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


def test_every_file_is_there_and_nothing_else(full_report):
    analysis, path = full_report
    names = {p.name for p in path.parent.iterdir()}
    pictures = {"isoflop", "contours", "optimal_N", "optimal_D", "optimal_loss", "loss_by_tokens", "loss_by_flops"}
    pictures |= {"residuals", "bootstrap", "backtest"}
    assert names == {"report.html", "law.json"} | {f"{p}.png" for p in pictures}
    for picture in path.parent.glob("*.png"):
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    document = json.loads((path.parent / "law.json").read_text())
    assert document["law"] == analysis.to_dict()["law"]
    assert document["provenance"]["git commit"] == "abc<123>"


def test_the_page_says_what_the_analysis_found(full_report):
    analysis, path = full_report
    text = " ".join(visible(path).split())
    assert "A & B" in text
    for warning in analysis.warnings:
        assert warning.code in text
        assert warning.message in text
    order = ("the best model has", "How far to trust it", "backtest_short", "Optimal model and data for a budget")
    assert sorted(order, key=text.index) == [*order], "the answer, then trust, then warnings, then tables"
    assert "another seed moves the ends of intervals by about 15.2 % of the width" in text, "of 20 resamples"
    for approach in analysis.approaches.values():
        for C in analysis.targets:
            estimate = approach.at(C)
            assert formatting.count(estimate.N) in text
            assert formatting.interval(estimate.N_ci, formatting.count) in text
            assert formatting.amount(estimate.tokens_per_parameter) in text
    assert formatting.fixed(analysis.law.E_) in text
    assert analysis.verdict.sentence in text
    assert formatting.percent(analysis.backtest["loss_error"]) in text
    for run in analysis.table.run_id:
        assert run in text
    assert "abc<123>" in text


def cost_section(books):
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", render_template("costs.html", costs=books))).split())


def test_the_page_says_what_the_runs_cost_and_how_the_estimate_held(full_report):
    section = cost_section(COSTS)
    assert section in " ".join(visible(full_report[1]).split())
    assert "25.0 GPU-hours were used, and 20.0 were planned for all runs. 12.0 % of that was wasted" in section
    assert "planned 20.0 $50.00 2.5e19 used 31 25.0 $62.50 2.75e19 of that useful 22.0 $55.00 2.4e19" in section
    assert "of that wasted 3.00 $7.50 3.5e18 node failed 2 1.75 $4.38 2e18 diverged 1 1.00 $2.50 1e18" in section
    assert "preempted 2 0 $0.00 0" in section
    assert "from 38 runs of past sweeps" in section
    assert "width 256 12 1.25 1.11 to 1.40 width 512 11 1.10 1.00 to 1.20 all, together 23 1.17 1.02 to 1.31" in section

    costs = COSTS | {name: COSTS[name] | {"dollars": None} for name in ("planned", "used", "useful", "wasted")}
    section = cost_section(costs | {"cluster_hours": None, "retries": 0})
    assert not [text for text in ("$", "scheduler", "retries") if text in section], "unknown costs are left out"
    assert cost_section(None) == "", "without accounting there is no section"


def test_the_page_needs_no_network(full_report):
    page = full_report[1].read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"']?(https?:)?//", page)
    assert "http" not in page
    assert "http" not in unpacked(full_report[1], "figures")
    assert page.count("Plotly.newPlot(id") == 1
    assert unpacked(full_report[1], "plotly").count("plotly.js v") == 1
    assert len(page) < 2.5e6, "24 runs"


@pytest.mark.slow
def test_a_thousand_runs_add_little_and_are_all_there(tmp_path):
    sizes = []
    for budgets in (4, 40):
        table, curves = sweep(budgets=tuple(np.geomspace(2e11, 3e12, budgets)), sizes=25 if budgets > 4 else 6)
        analysis = fit.analyze(fit.read_table(table), targets=(1e14,), bootstrap=5, intervals="noise")
        path = tmp_path / "report.html"
        path.write_text(render_report(analysis, curves, "many", {"date": "today"}))
        sizes.append(len(path.read_text()))
    assert sizes[1] - sizes[0] < 300e3
    text = visible(path) + unpacked(path, "rows")
    assert all(f"{run}<" in text or f"{run} " in text for run in table.run_id)
    assert "Figures show 300 of the 1000 runs and at most 100 loss curves" in text
    for name, figure in json.loads(unpacked(path, "figures")).items():
        assert max(len(trace["x"]) for trace in figure["data"]) <= 300, name


@pytest.fixture(scope="module")
def analysed():
    table, curves = sweep()
    return fit.analyze(fit.read_table(table), targets=(1e18,), bootstrap=20, intervals="noise"), curves


def test_every_figure_is_valid_plotly_and_holds_data(analysed):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    analysis, curves = analysed
    drawn = [figures.loss_curves(analysis, curves, by) for by in ("tokens", "flops")]
    drawn += [figures.isoflop(analysis), figures.contours(analysis), figures.backtest(analysis)]
    drawn += [figures.residuals(analysis), figures.published(analysis)]
    drawn += [figures.allocation(analysis, q) for q in ("N", "D", "loss")]
    drawn += [figures.scores(analysis, m) for m in ("acc", "gold_bpb")]
    for figure in drawn:
        graph_objects.Figure(figure)  # raises for any property that plotly does not know
        assert all(len(trace["x"]) for trace in figure["data"])


def test_strings_from_data_cannot_become_markup(tmp_path):
    table, curves = sweep(hostile=True)
    _, path = write(tmp_path, table, curves, title=HOSTILE, provenance={HOSTILE: HOSTILE})
    page = path.read_text()
    assert HOSTILE not in page
    assert "<script>alert" not in page
    assert HOSTILE not in unpacked(path, "figures")
    assert "<script" not in unpacked(path, "figures")
    assert "&lt;script&gt;alert" in page
    assert "&lt;script&gt;alert" in unpacked(path, "figures")


def test_four_runs_without_scores_or_curves_still_get_a_report(tmp_path):
    table, _ = sweep(budgets=(2e11, 5e11), sizes=2, tasks=False)
    analysis, path = write(tmp_path, table)
    text = visible(path)
    assert analysis.law is None
    assert "no_parametric" in text
    assert "no answer" in text
    assert "Scores" not in text
    assert not (tmp_path / "contours.png").exists()
    table, curves = sweep(budgets=(2e11,), sizes=1)
    text = visible(write(tmp_path / "one", table, curves)[1])
    assert "these runs do not" in text or "No approach has an answer" in text


def test_curves_of_other_runs_or_with_gaps_are_left_out(analysed):
    analysis, curves = analysed[0], analysed[1].copy()
    curves.loc[curves.step == 50, "loss"] = np.nan
    assert figures.loss_curves(analysis, curves.assign(run_id="other"), "tokens") is None
    drawn = figures.loss_curves(analysis, curves, "tokens")
    assert all(v is not None for trace in drawn["data"] for v in trace["y"])


def test_a_report_replaces_the_old_one_whole_and_leaves_no_temporary_file(tmp_path, analysed, monkeypatch):
    analysis, curves = analysed
    path = fit.write_report(analysis, tmp_path, curves)
    before = path.read_text()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(fit.InputError, match=r"cannot be written \(No space left on device\)"):
        fit.write_report(analysis, tmp_path, curves, title="other")
    assert path.read_text() == before
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, analysed):
    (tmp_path / "file").write_text("")
    analysis, curves = analysed
    with pytest.raises(fit.InputError, match="cannot be made"):
        fit.write_report(analysis, tmp_path / "file" / "fit")
    with pytest.raises(fit.InputError, match="curves have no column 'tokens'"):
        fit.write_report(analysis, tmp_path, curves.drop(columns="tokens"))


FORMATS = [
    (formatting.count, 999_950, "1.00M"),
    (formatting.count, 1.4e12, "1.40T"),
    (formatting.count, 3.2e16, "3.2e16"),
    (formatting.count, None, "–"),
    (formatting.scientific, 1e24, "1e24"),
    (formatting.amount, 17.92, "17.9"),
    (formatting.percent, 0.00371, "0.37 %"),
    (formatting.fixed, float("nan"), "–"),
    (formatting.times, 999.96, "1,000 times"),
    (formatting.times, 3.3e11, "3.3e11 times"),
]


@pytest.mark.parametrize(("format_value", "value", "expected"), FORMATS)
def test_numbers_read_as_people_write_them(format_value, value, expected):
    assert format_value(value) == expected


def test_intervals_say_when_an_end_is_open_or_the_range_says_nothing():
    assert formatting.interval((1e9, 2e9), formatting.count) == "1.00B to 2.00B"
    assert formatting.interval((1e3, 1e12), formatting.count) == "undetermined"
    assert formatting.interval(None, formatting.count) == "no interval"
    assert formatting.interval((float("nan"), 1.0), formatting.count) == "no interval"


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "disable-quic no-first-run disable-background-networking disable-component-update disable-sync disable-gpu"
PROBE = """
<script>
window.addEventListener('load', () => setTimeout(() => {  // by then the page has unpacked and drawn
  const count = plot => plot.querySelectorAll('.scatterlayer .trace path, .contourlayer path').length;
  const drawn = [...document.querySelectorAll('.plot')].map(plot => plot.id + '=' + count(plot));
  const wide = document.documentElement.scrollWidth > window.innerWidth;
  const plot = document.getElementById('figure-optimal-n');
  const near = plot && plot.layout.xaxis.range[1];
  if (plot) document.querySelector('.switch button[value=far]').click();
  const far = plot && plot.layout.xaxis.range[1];
  const head = document.querySelector('.sortable th:nth-child(3)'); if (head) head.click();
  const cells = [...document.querySelectorAll('.sortable tbody td:nth-child(3)')].map(cell => Number(cell.dataset.v));
  const sorted = cells.every((value, i) => i === 0 || cells[i - 1] <= value);
  const result = document.createElement('div'); result.id = 'probe';
  result.textContent = JSON.stringify({drawn, wide, sorted, near, far, faults: window.faults});
  document.body.append(result);
}, 4000));
</script>
"""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
@pytest.mark.parametrize(("kind", "width"), [("full", 1300), ("hostile", 500), ("smoke", 1300)])
def test_a_browser_draws_every_figure_without_an_error(tmp_path, kind, width):
    sizes = {"budgets": (2e11, 5e11), "sizes": 2} if kind == "smoke" else {}
    table, curves = sweep(hostile=kind == "hostile", **sizes)
    _, path = write(tmp_path, table, curves, costs=COSTS)
    catch_errors = "<script>window.faults=[];window.addEventListener('error',e=>window.faults.push(e.message))</script>"
    probed = tmp_path / "probed.html"
    probed.write_text(
        path.read_text().replace("<head>", "<head>" + catch_errors, 1).replace("</body>", PROBE + "</body>", 1)
    )
    flags = [f"--{flag}" for flag in QUIET.split()]
    result = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", *flags, f"--user-data-dir={tmp_path / 'profile'}"),
            *(f"--window-size={width},2000", "--virtual-time-budget=20000", "--enable-logging=stderr", "--v=0"),
            *("--dump-dom", f"file://{probed}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    match = re.search(r'<div id="probe">(.*?)</div>', result.stdout, re.S)
    assert match, result.stderr[-2000:]
    probe = json.loads(html.unescape(match.group(1)))
    assert probe["faults"] == []
    assert not re.search(r"CONSOLE.*(error|Uncaught)", result.stderr, re.I), result.stderr[-2000:]
    counts = {name: int(n) for name, n in (entry.rsplit("=", 1) for entry in probe["drawn"])}
    # Two sizes per budget have no minimum between them, so no approach has an answer to draw.
    assert len(counts) == {"smoke": 5}.get(kind, 13)
    assert min(counts.values()) > 0, counts
    assert probe["sorted"]
    if kind == "smoke":
        assert probe["near"] is None
    else:
        assert probe["near"] < 14.1 < 18 < probe["far"], "the switch goes out to the target of 1e18 FLOPs"
    assert not probe["wide"], "the page scrolls sideways"


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_a_sweep_of_24_runs_prints_on_at_most_six_pages(full_report, tmp_path):
    _, path = full_report
    flags = [f"--{flag}" for flag in QUIET.split()]
    command = [CHROMIUM, "--headless", "--no-sandbox", *flags, f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=20000", f"--print-to-pdf={tmp_path / 'report.pdf'}", f"file://{path}"]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    pages = len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "report.pdf").read_bytes()))
    assert 2 <= pages <= 6


def test_the_paper_figures_return_axes_and_draw(analysed):
    import matplotlib as mpl

    mpl.use("Agg")
    analysis, curves = analysed
    axes = analysis.law.plot()
    assert axes.get_xscale() == "log"
    assert axes.collections
    from isoflop.fit import plots

    assert len(plots.plot_profiles(analysis.profiles).lines) == 4
    assert plots.plot_allocation(analysis, "D").get_ylabel() == "optimal tokens D*"
    assert len(plots.plot_curves(analysis, curves).lines) == 24
    import matplotlib.pyplot as plt

    plt.close("all")
