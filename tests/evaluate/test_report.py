"""The reports of evaluations: their content, and that no text in them becomes markup or a script."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from isoflop import fit
from isoflop.evaluate.pages import paired, sweep_report
from isoflop.evaluate.pages.page import Axis
from isoflop.evaluate.pages.paired import compare_runs
from isoflop.evaluate.pages.report import checkpoint_page, format_scores, is_right, paired_differences, payload
from isoflop.evaluate.pages.sweep_report import Sweep, choices, task_verdict, trend
from report_samples import HOSTILE, answers_to, domain, header, make_items, make_rows, make_written, numbers, signal_of


class Read(HTMLParser):
    """Tags, attributes, visible texts and scripts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._inside: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._inside != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self) -> Any:
        return json.loads(next(body for attributes, body in self.scripts if attributes.get("id") == "data"))


def full(text: str = "") -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """Return everything that a page can show; `text` is in every field that may come from outside."""
    tasks = {
        f"arc_easy{text}": numbers(clean=numbers(0.3, items=34), contaminated_items=6, truncated_items=8),
        f"broken{text}": numbers(**{key: None for key in ("acc", "gold_bpb")}, withheld=f"item 3: nan{text}"),
        f"gsm8k{text}": numbers(acc=None, acc_se=None, exact_match=0.125, exact_match_se=0.05, chance=None),
        f"text_web_news{text}": domain(1.5), f"text_web_code{text}": domain(0.9),
    }  # fmt: skip
    worst = [{"index": 7, "loss": 9.25, "text": f"a window{text}"}]
    held_out = {"val_loss": 1.5, "val_loss_se": 0.01, "val_bpb": 2.164, "worst": worst}
    more = {"tokenizer": f"feed{text}", "device": f"cpu{text}", "lm_eval_version": f"0.4.13{text}"}
    scores = header(tasks, held_out=held_out, checkpoint=f"runs{text}", name=f"N1M{text}", **more)
    items = make_items(f"arc_easy{text}", 40, text=text) + make_written(f"gsm8k{text}", 6, text)
    theirs = make_items(f"arc_easy{text}", 30, seed=1, text=text) + make_written(f"gsm8k{text}", 6, text)
    other = header(tasks, run_id=f"other{text}", checkpoint=f"elsewhere{text}", name=f"N2M{text}")
    return scores, items, (other, theirs)


def test_the_page_says_all_that_is_known_of_a_checkpoint() -> None:
    scores, *rest = full()
    text = Read(checkpoint_page(scores, *rest)).text
    for expected in (
        "1.23M 1,234,567", "1.00M 1,000,000", "20,480", "1.50×10¹¹", "exact; 6ND is 1.52×10¹¹", "1.5000 ± 0.0100",
        "2.1640", "40 of 10,042", "0.400 ± 0.010", "0.600 ± 0.030", "0.700 ± 0.040", "0.800 ± 0.050", "0.250",
        "clean part 34", "exact_match 0.125 ± 0.050", "withheld", "context 128 tokens", "0.9000 ± 0.0200",
        "9.250 nats per token", "a window",
    ):  # fmt: skip
        assert expected in text, expected
    assert text.index("broken has no score: item 3: nan.") < text.index("Parameters (N_total)"), "warnings come first"
    assert "Prompts were cut on the left to the model's context of 128 tokens: arc_easy 8 of 40." in text
    assert text.index("Accuracy is better than guessing on 1 of 1 task: arc_easy.") < text.index("Prompts were cut")
    assert "Items that share text with the training data: arc_easy 6 of 40." in text
    assert text.index("web_ code") < text.index("web_ news"), "the easier domain first"


def test_without_items_the_page_has_no_script_and_no_empty_sections() -> None:
    read = Read(checkpoint_page(header({"arc_easy": numbers()})))
    assert "script" not in read.tags
    assert any("script-src 'none'" in (value or "") for name, value in read.attributes if name == "content")
    for heading in ("Samples", "Worst", "Compared with", "domain"):
        assert heading not in read.text
    assert "No task was scored." in Read(checkpoint_page(header({}))).text


def test_suites_and_what_is_not_known_of_contamination_are_said() -> None:
    suites = {"small": {"centered": 0.125, "centered_se": 0.01, "tasks": 12, "withheld": None}}
    suites["core"] = {"centered": None, "centered_se": None, "tasks": 0, "withheld": "item 3"}
    scores = header({"arc_easy": numbers()}, suites=suites, contamination_withheld="the shards are gone")
    for text in (Read(checkpoint_page(scores)).text, format_scores(scores)):
        assert "Suite small: 0.125 ± 0.010 mean centered accuracy over 12 tasks" in text
        assert "Suite core" not in text
        assert "Contamination is unknown: the shards are gone." in text


def test_the_plain_table_has_a_column_for_every_number_that_some_task_has() -> None:
    lines = format_scores(full()[0]).splitlines()
    for name in ("p(right)", "margin", "bits/byte", "exact_match"):
        assert name in lines[0]
    assert lines[3].split()[:4] == ["gsm8k", "40", "–", "–"]
    assert "0.125 ± 0.050" in lines[3]
    assert any(line.startswith("broken has no score") for line in lines)


# Comparisons.


def test_the_paired_error_is_that_of_the_differences() -> None:
    rng = np.random.default_rng(3)
    hard = rng.normal(size=200)  # what both find hard
    a, b = hard + 0.1 * rng.normal(size=200), hard + 0.1 * rng.normal(size=200) + 0.05
    items, others = make_items("t", 200), make_items("t", 200)
    for place in range(200):
        items[place]["gold_bpb"], others[place]["gold_bpb"] = float(a[place]), float(b[place])
    difference = paired_differences(items, others)["t"]["gold_bpb"]
    expected = scipy.stats.ttest_rel(a, b)
    assert difference.items == 200
    assert difference.value == pytest.approx((a - b).mean(), rel=1e-12)
    assert difference.error is not None
    assert difference.value / difference.error == pytest.approx(expected.statistic, rel=1e-12)
    assert difference.error < 0.2 * math.hypot(a.std(), b.std()) / math.sqrt(200)
    assert difference.is_clear


def test_items_are_matched_by_question_not_by_place() -> None:
    items, others = make_items("t", 10), make_items("t", 10, seed=1)
    others[3]["prompt"] = "asked with other examples"
    others[4]["choices"] = [" other choices"] * 4
    assert paired_differences(items, others[:8])["t"]["acc"].items == 6
    assert paired_differences(items, make_items("u", 10)) == {}
    text = Read(checkpoint_page(header({"t": numbers()}), items, against=(header({}), make_items("u", 10)))).text
    assert "no item with the same prompt and choices" in text


# Samples.


def test_right_and_wrong_follow_the_tasks_own_metric() -> None:
    cases = [({"acc": 1.0, "acc_norm": 0.0}, True), ({"exact_match": 0.0}, False), ({"acc_norm": 1.0}, True)]
    cases += [({"exact_match,strict": 1.0}, True), *(({name: math.nan}, None) for name in ("acc", "word_perplexity"))]
    for values, expected in cases:
        assert is_right({"values": values}) is expected, values


def test_the_samples_hold_every_item_and_the_others_answer_to_it() -> None:
    scores, items, against = full()
    data = payload(scores, items, against)
    assert data["tasks"] == ["arc_easy", "gsm8k"]
    assert data["names"][1].startswith("N2M at step 10")
    assert len(data["items"]) == 46
    first, last = data["items"][0], data["items"][45]
    assert first["log_probabilities"] == items[0]["log_probabilities"]
    assert first["other"]["log_probabilities"] == against[1][0]["log_probabilities"]
    assert "other" not in data["items"][35], "the other was not asked this one"
    assert (first["truncated"], first["contaminated"]) == (1, 1)
    assert (last["answer"], last["target"], last["ok"]) == ("wrote 5", "expected 5", 0)


def test_what_is_no_number_stays_visible_and_never_breaks_the_json() -> None:
    items = make_items("t", 2)
    items[0]["log_probabilities"] = [math.nan, -math.inf, -1.0, np.float64(-2.123456789)]
    read = Read(checkpoint_page(header({"t": numbers()}), items))
    assert read.data["items"][0]["log_probabilities"] == ["nan", "-inf", -1.0, -2.12346]


# Hostile text.


@pytest.mark.parametrize("kind", ["checkpoint", "sweep"])
def test_hostile_text_makes_no_element_no_attribute_and_no_script(kind: str) -> None:
    def write(text: str) -> str:
        if kind == "checkpoint":
            return checkpoint_page(*full(text))
        rows = make_rows(text=text, recipes=(f"a{text}", f"b{text}"))
        return sweep_report.sweep_page(rows, answers_to(rows), f"title{text}", {rows[0]["run_id"]: f"runs/{text}"})

    harmless, hostile = write("x" * len(HOSTILE)), write(HOSTILE)
    hostile.encode("utf-8")  # a lone surrogate would raise
    plain, read = Read(harmless), Read(hostile)
    # Long names may break after an underscore, and a link that is no path is left out.
    assert [tag for tag in read.tags if tag not in ("wbr", "a")] == [
        tag for tag in plain.tags if tag not in ("wbr", "a")
    ]
    assert {name for name, _ in read.attributes} == {name for name, _ in plain.attributes}
    assert not {name for name, _ in read.attributes if name.startswith("on") or name in ("src", "style")}
    assert [attributes for attributes, _ in read.scripts] == [{"type": "application/json", "id": "data"}, {}]
    assert read.scripts[1][1] == plain.scripts[1][1]
    assert not re.search("[\x00\u202e\u2066\u2028]", hostile)
    assert "‹U+202E›" in hostile
    if kind == "checkpoint":
        assert read.data["items"][0]["prompt"] == f"question 0 of arc_easy{HOSTILE}{HOSTILE}"


def test_the_policy_names_our_script_and_style_and_nothing_else() -> None:
    html = checkpoint_page(*full(HOSTILE))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy
    script = re.findall(r"<script>(.*?)</script>", html, re.S)
    style = re.findall(r"<style>(.*?)</style>", html, re.S)
    assert len(script) == len(style) == 1
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in (script[0], style[0])]
    assert policy.group(1) == (
        f"default-src 'none';script-src 'sha256-{hashes[0]}';style-src 'sha256-{hashes[1]}';base-uri 'none';"
        "form-action 'none'"
    )


def test_links_are_relative_or_nothing() -> None:
    assert sweep_report.safe_link("../runs/a/report.html") == "../runs/a/report.html"
    for link in ("javascript:alert(1)", "https://x.org/", "//x.org", "\\\\x", "a\nb", "", None):
        assert sweep_report.safe_link(link) is None


# Numbers.


def test_axes_hold_their_values_and_have_round_ticks() -> None:
    rng = np.random.default_rng(0)
    for log in (False, True):
        for _ in range(50):
            values = list(np.exp(rng.normal(0, 8, size=5)))
            axis = Axis.around(values, log)
            assert all(0 < axis.at(value) < 1 for value in values)
            ticks = [value for value, _ in axis.ticks()]
            assert 2 <= len(ticks) <= 7, (values, ticks)
            assert all(-1e-9 <= axis.at(value) <= 1 + 1e-9 for value in ticks)
    assert Axis.around([1e15, 1.2e15], log=True).ticks()
    assert Axis.around([0.0, 0.0]).at(0.0) == pytest.approx(0.5)


# A sweep.


def test_runs_of_a_budget_stand_together_and_the_best_has_the_lowest_loss() -> None:
    rows = make_rows(budgets=4, sizes=5)
    rows.append(rows[0] | {"final": False, "loss": 0.0, "run_id": "still training"})
    rows.append(rows[0] | {"flops": None, "run_id": "unknown"})
    sweep = Sweep.of(rows)
    assert [len(group) for group in sweep.budgets] == [5, 5, 5, 5]
    for group, best in zip(sweep.budgets, sweep.best(), strict=True):
        assert rows[best]["loss"] == min(rows[place]["loss"] for place in group)
    named = [entry | {"budget": 1.0} for entry in make_rows()]
    assert len(Sweep.of(named).budgets) == 1, "where runs name their budget, that counts"


def test_the_trend_of_a_task_is_that_of_the_best_run_of_each_budget() -> None:
    rows = make_rows(budgets=4)
    sweep = Sweep.of(rows)
    values = trend(sweep, "arc_easy")
    assert values == [rows[best]["tasks"]["arc_easy"]["gold_bpb"] for best in sweep.best()]
    assert values == sorted(values, reverse=True)
    assert trend(sweep, "unknown") == []


def test_verdicts_are_words() -> None:
    clear, noise = signal_of(20), signal_of(3)
    assert task_verdict({"acc": clear, "gold_bpb": clear}) == "bits per byte and accuracy"
    assert task_verdict({"acc": noise, "gold_bpb": clear}) == "bits per byte"
    assert task_verdict({"acc": clear, "gold_bpb": noise}) == "accuracy"
    assert task_verdict({"acc": noise, "gold_bpb": noise}) == "nothing"
    assert task_verdict({"acc": None, "gold_bpb": None}) == task_verdict({}) == "unknown"


def by_run(scores: np.ndarray) -> dict[int, dict[int, float]]:
    return {run: dict(enumerate(map(float, scores_of_run))) for run, scores_of_run in enumerate(scores)}


def test_what_all_runs_find_hard_does_not_hide_their_differences() -> None:
    rng = np.random.default_rng(0)
    hard, better = rng.normal(size=50), np.linspace(0, 0.3, 10)[:, None]
    scores = 2 + hard - better + 0.05 * rng.normal(size=(10, 50))
    unpaired = (scores[0].mean() - scores[9].mean()) / np.hypot(*(scores[i].std(ddof=1) / 50**0.5 for i in (0, 9)))
    assert unpaired < 2, "as the error of a score alone has it, these are the same"
    comparison = compare_runs(by_run(scores), [(0, 1, 8, 9), (0, 5, 4, 9), (0, 5, 9, 4)])
    assert comparison is not None
    assert comparison.clear
    difference = scores[0] - scores[9]
    assert comparison.z == pytest.approx(scipy.stats.ttest_1samp(difference, 0).statistic, rel=0.2)
    assert comparison.held is not None
    assert comparison.held[0] == pytest.approx(2 / 3)


KINDS = {
    "normal": lambda rng, runs, items: rng.normal(size=items) + rng.normal(size=(runs, items)),
    "right or wrong": lambda rng, runs, items: rng.random((runs, items)) < 1 / (1 + np.exp(-rng.normal(0, 2, items))),
}


@pytest.mark.parametrize(("kind", "runs", "items"), [("normal", 2, 10), ("normal", 20, 10), ("right or wrong", 20, 10)])
def test_runs_that_are_alike_are_called_clear_once_in_twenty_times(kind: str, runs: int, items: int) -> None:
    rng, trials = np.random.default_rng([runs, items]), 200
    comparisons = [compare_runs(by_run(KINDS[kind](rng, runs, items)), []) for _ in range(trials)]
    wrong = sum(comparison is not None and comparison.clear for comparison in comparisons)
    # At a true level of 5 % the bound is exceeded once in a thousand times.
    assert wrong <= scipy.stats.binom.isf(1e-3, trials, 0.05)
    if kind == "normal":  # and not less often, if scores are neither discrete nor skewed
        assert wrong >= scipy.stats.binom.ppf(1e-3, trials, 0.05)


@pytest.mark.parametrize(("better", "clear"), [(0.0, False), (0.12, True)])
def test_the_page_and_the_fit_say_one_thing_of_a_task(better: float, clear: bool) -> None:
    rng, rows = np.random.default_rng(0), make_rows(("t",))
    ease, skill = rng.random(400), np.argsort(np.argsort([-row["loss"] for row in rows])) / len(rows)
    right = ease < 0.4 + better * skill[:, None] + 0.02 * rng.normal(size=(len(rows), 400))
    answers: dict[str, Any] = {
        row["run_id"]: {"t": {"acc": dict(enumerate(map(float, one)))}} for row, one in zip(rows, right, strict=True)
    }
    compared = paired.compare_tasks(answers, "acc")["t"]
    acc = right.mean(axis=1)
    table = pd.DataFrame({name: [row[name] for row in rows] for name in ("N", "D", "loss")})
    table = table.assign(**{
        "t/acc": acc, "t/acc_se": np.sqrt(acc * (1 - acc) / 400), "t/chance": 0.0,
        "t/acc_z": compared.z, "t/acc_z_by_luck": compared.threshold,
    })  # fmt: skip
    (fitted,) = fit.fit_tasks(fit.read_table(table))
    verdict = task_verdict({"acc": compared})
    assert (verdict == "accuracy") == clear == ("no two runs differ significantly" not in fitted.reason)
    assert "times their noise" not in fitted.reason


def test_the_page_draws_forecasts_and_gives_the_reason_where_there_is_none() -> None:
    rows = make_rows(("t", "u"))
    largest = max(row["flops"] for row in rows)
    about = {"metric": "acc", "law": "items", "error": 0.02, "reason": "", "low": 0.3, "value": 0.4, "high": 0.5}
    ahead = [about | {"task": "t", "flops": largest * factor} for factor in (0.1, 1, 10)]
    nothing = dict.fromkeys(("value", "low", "high"))
    ahead.append(about | nothing | {"task": "u", "flops": largest, "reason": "only 5 runs have a score."})
    page = sweep_report.sweep_page(rows, {}, "s", {}, ahead)
    assert (
        "FLOPs: 0.400 [0.300, 0.500]. The law of the items leads; the error on held-out larger runs was 0.020." in page
    )
    assert re.search("No forecast of the accuracy at .* FLOPs: only 5 runs have a score", page)
    assert page.count('class="band"') == page.count('class="ahead"') == 1
    assert 'class="band"' not in sweep_report.sweep_page(rows, {}, "s", {})


def test_margins_are_those_of_uncontaminated_items() -> None:
    item = {"task": "t", "index": 0, "choices": ["a", "b", "c"], "right": [1], "log_probabilities": [-3.0, -1.0, -2.5]}
    items = [item, item | {"index": 1, "contaminated": True}, item | {"index": 2, "right": [0]}]
    items += [item | {"index": 3, "log_probabilities": [-3.0, None, -2.5]}, item | {"index": 4, "right": [0, 1, 2]}]
    assert paired.answers_of(items) == {"t": {"margin": {0: 1.5, 2: -2.0}}}


def test_equal_answers_are_no_difference_and_too_few_are_not_compared() -> None:
    scores = np.tile(np.arange(20.0), (3, 1))
    assert compare_runs(by_run(scores[:1]), []) is None
    assert compare_runs(by_run(scores[:, :9]), []) is None, "too few items"
    assert compare_runs({0: {0: 1.0}, 1: {1: 1.0}}, []) is None, "none that both answered"
    equal = compare_runs(by_run(scores), [(0, 1, 1, 2)])
    assert equal is not None
    assert (equal.z, equal.clear, equal.held) == (0.0, False, (0.5, 0.0))
    different = compare_runs(by_run(scores + np.arange(3.0)[:, None]), [])
    assert different is not None
    assert different.clear, "equally far apart on every item"
    assert math.isfinite(different.z)


def test_choices_are_recipes_or_else_sizes_by_their_place() -> None:
    plain = Sweep.of(make_rows(budgets=3, sizes=3))
    made = choices(plain)
    assert len(made) == 2 * 3
    for one, other, large, another in made:
        rows = [plain.rows[place] for place in (one, other, large, another)]
        assert rows[0]["flops"] < rows[2]["flops"]
        assert (rows[0]["N"] < rows[1]["N"]) == (rows[2]["N"] < rows[3]["N"])
    recipes = Sweep.of(make_rows(budgets=3, sizes=3, recipes=("a", "b")))
    assert len(choices(recipes)) == 2
    for one, other, large, another in choices(recipes):
        assert [recipes.rows[place]["recipe"] for place in (one, other, large, another)] == ["a", "b", "a", "b"]
    assert choices(Sweep.of(make_rows(budgets=1))) == choices(Sweep.of([])) == []


def test_the_sweeps_page_says_which_tasks_tell_runs_apart() -> None:
    rows = make_rows()
    read = Read(sweep_report.sweep_page(rows, answers_to(rows), "spine", {"run0": "../run0/report.html"}))
    assert "spine" in read.text
    row = re.search(
        r"arc_easy bits per byte 0.300 ± 0.010 \d.\d+ → \d.\d+ .*"
        r"arc_easy ([\d.]+) over ([\d.]+) ([\d.]+) under ([\d.]+) (\d+) % ± \d+ noise",
        read.text,
    )
    assert row
    z, threshold, noise, other, _ = map(float, row.groups())
    assert z > threshold
    assert noise < other
    assert read.tags.count("figure") == 8, "two tasks, by compute and by loss, bits per byte and accuracy"
    assert ("href", "../run0/report.html") in read.attributes
    assert len(read.data) == 20
    assert "By recipe" not in read.text


def test_no_two_columns_of_a_task_contradict_each_other() -> None:
    rows = make_rows(("arc_easy",))
    read = Read(sweep_report.sweep_page(rows, answers_to(rows, spread=30.0), "spine", {}))
    assert re.search(r"arc_easy nothing .* arc_easy [\d.]+ under [\d.]+ [\d.]+ under [\d.]+ noise noise", read.text)
    assert (
        "Bits per byte of the right answer tell runs apart on 0 of 1 task. Nothing tells them apart on arc_easy"
        in read.text
    )
    few = Read(sweep_report.sweep_page(rows, dict(list(answers_to(rows).items())[1:]), "spine", {}))
    assert "because their items are missing: 1 of 20 runs." in few.text


def test_a_sweeps_page_begins_with_what_accuracy_and_bits_per_byte_tell() -> None:
    rows = make_rows(("arc_easy", "copa", "piqa"))
    for row in rows:
        row["tasks"]["copa"] |= {"acc": 0.5, "chance": 0.5}
        row["tasks"]["piqa"] |= {"shots": 5, "truncated_items": 3}
    text = Read(sweep_report.sweep_page(rows, answers_to(rows), "spine", {})).text
    lead = text[: text.index("Checkpoints")]
    assert (
        "The best run’s accuracy is better than guessing on 2 of 3 tasks: arc_easy, piqa. Elsewhere it says nothing"
        in lead
    )
    assert "tell runs apart on 3 of 3 tasks." in lead
    assert "piqa (≤5 examples)" in text


def test_every_checkpoint_is_a_dot_in_every_panel() -> None:
    html = sweep_report.sweep_page(make_rows(budgets=5, sizes=4), {}, "t", {})
    for panel in re.findall(r'<figure class="panel">.*?</figure>', html, re.S):
        rows = [int(row) for group in re.findall(r'data-rows="([^"]*)"', panel) for row in group.split(",")]
        assert sorted(rows) == list(range(20))
        assert len(re.findall(r"M[\d.]+ [\d.]+h0", panel)) == 20


def test_recipes_are_compared_at_the_largest_budget_that_all_have() -> None:
    rows = make_rows(recipes=(None, "filtered"), budgets=4)
    rows = [row for row in rows if row["recipe"] is None or row["flops"] < 3e14]  # the last budget lacks one of them
    sweep = Sweep.of(rows)
    assert sweep.recipes == ["filtered", "no recipe"]
    best = sweep.best_of_each()
    assert {recipe: round(math.log10(rows[place]["flops"])) for recipe, place in best.items()} == {
        "filtered": 14, "no recipe": 14,
    }  # fmt: skip
    assert rows[best["filtered"]]["recipe"] == "filtered"
    read = Read(sweep_report.sweep_page(rows, {}, "t", {}))
    assert "By recipe" in read.text
    assert f"{rows[best['filtered']]['loss']:.4f}" in read.text


def test_a_sweep_that_has_no_scores_says_so() -> None:
    rows = [row | {"tasks": {}} for row in make_rows()]
    assert (
        "No checkpoint of this sweep has been scored on a task yet."
        in Read(sweep_report.sweep_page(rows, {}, "t", {})).text
    )
    one = Read(sweep_report.sweep_page(make_rows(budgets=1, sizes=1), {}, "t", {}))
    assert "unknown" in one.text, "one run draws, and promises nothing"
