"""The documentation: commands print what the pages show, every setting and file is described, formulas are MathML."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import isoflop
import pytest
from isoflop.sweeps.cli import main as cli

ROOT = Path(isoflop.__file__).resolve().parent
DOCS, FIXTURES = ROOT / "docs", ROOT / "tests/fixtures"


def load(name: str) -> Any:
    spec = spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


examples, hooks = load("examples"), load("hooks")
PAGES = [page for page in sorted(DOCS.glob("*.md")) if examples.BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the `isoflop` commands of a page in this process, because imports take most of the time of most."""
    run_in_shell = examples.run

    def run(command: str, folder: Path) -> str:
        if not command.startswith("isoflop "):
            return str(run_in_shell(command, folder))
        output, settings = io.StringIO(), {"COLUMNS": "88", "NO_COLOR": "1", "TERM": "dumb"}
        with monkeypatch.context() as patch, redirect_stdout(output), redirect_stderr(output):
            patch.chdir(folder)
            for name, value in {**settings, "ISOFLOP_CACHE": str(folder / ".cache")}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", shlex.split(command))
            with pytest.raises(SystemExit):
                cli.main()
        return "".join(f"{line.rstrip()}\n" for line in output.getvalue().rstrip().splitlines())

    monkeypatch.setattr(examples, "run", run)


@pytest.mark.usefixtures("in_this_process", "quick_pictures")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_print_what_a_page_shows(page: Path) -> None:
    for command, shown, real in examples.run_page(page):
        assert examples.difference(shown, real) is None, command


@pytest.mark.parametrize(
    ("shown", "real", "equal"),
    [
        ("N = 1.02B\n", "N   =  1.01B", True),
        ("N = 1.02B\n", "N = 2.02B", False),
        ("N = 1.02B\n", "M = 1.02B", False),
        ("built in ... s; 3 files", "built in 0.1 s; 3 files", True),
        ("fc7506369c 2.9k", "0129e4835b  2.9k", True),
        ("3 files", "3 files and more", False),
    ],
)
def test_output_is_compared_by_words_and_numbers(shown: str, real: str, equal: bool) -> None:
    assert (examples.difference(shown, real) is None) is equal


@pytest.mark.parametrize("group", re.findall(r"<!-- settings: (\w+) -->", (DOCS / "config.md").read_text()))
def test_every_setting_has_a_meaning(group: str) -> None:
    rows = [line for line in hooks.settings(group).splitlines() if line.startswith("| `")]
    assert rows
    assert all(re.match(r"\| `\w+`(<br>`.+?`)? \| \S", row) for row in rows), rows


def test_the_page_of_settings_has_every_group() -> None:
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name[0].isalpha()}
    assert {*groups, "sweep", *hooks.GROUPS} == set(re.findall(r"settings: (\w+)", (DOCS / "config.md").read_text()))


def test_defaults_are_written_as_in_yaml() -> None:
    assert "| `learning_rate`<br>`0.006` | peak rate at base_width *(number above 0)* |" in hooks.settings("optimizer")
    assert "`zero`<br>`0`" in hooks.settings("parallel")
    assert "| `compile`<br>`false` |" in hooks.settings("parallel")
    assert "`budgets: [1e17, 3e17, 1e18, 3e18, 1e19]`" in hooks.settings("cluster")


def test_files_describes_every_key_and_column() -> None:
    described = set(re.findall(r"`([\w.]+)`", (DOCS / "files.md").read_text()))
    sweep = FIXTURES / "sweep_0.2/local"
    run = sweep / "runs/56390b0f10"
    plan = json.loads((sweep / "plan.json").read_text())
    keys = {"plan.json", *plan, *plan["runs"][0]}
    for name in ("summary.json", "state.json"):
        keys |= {name, *json.loads((run / name).read_text())}
    for name in ("events.jsonl", "metrics.jsonl"):
        keys |= {name, *(key for line in (run / name).read_text().splitlines() for key in json.loads(line))}
    keys |= set(json.loads((FIXTURES / "sweep_0.1/local/fit/law.json").read_text()))
    with (FIXTURES / "sweep_0.1/local/table.csv").open() as file:
        keys |= {column for column in next(csv.reader(file)) if "/" not in column}
    # What the examples of the journal show, and units of plan.json that need no sentence.
    shown = {"event", "at", "attempt", "host", "job_id", "machine", "steps", "gpus", "cause", "ended"}
    assert keys - described - shown == set()


def test_names_of_the_reference_become_their_docstrings() -> None:
    page = hooks.on_page_markdown("- `fit.read_table`: Read runs.\n- `other`: stays\n")
    assert "::: isoflop.fit.table.read_table\n" in page
    assert "- `other`: stays" in page


def test_formulas_are_mathml() -> None:
    pytest.importorskip("latex2mathml")
    page = hooks.on_page_content(r'<p>a <span class="arithmatex">\(x &lt; \frac{A}{N^{\alpha}}\)</span></p>')
    assert page.startswith("<p>a <math ")
    assert "<mfrac>" in page
    assert "arithmatex" not in page
    formulas = re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", (DOCS / "laws.md").read_text(), re.DOTALL)
    assert len(formulas) > 50
    assert all("\\" not in hooks.mathml(block or inline, "block") for block, inline in formulas)


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"- (?:.+: )?(\w[\w-]*\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert named == {page.name for page in DOCS.glob("*.md")}


def test_pictures_are_those_that_the_script_draws() -> None:
    pictures = {path.stem: path for path in DOCS.glob("*.png")}
    assert pictures.keys() == load("figures").PICTURES.keys()


def test_the_script_names_a_page_that_a_sweep_lacks(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"report\.html does not exist; the sweep must be finished"):
        load("figures").main([str(tmp_path)])


# Example commands that ask for other runs have other folders


SAME_RUNS = ("dry_run", "explain", "wait", "trunks", "parallel.", "cluster.", "tracker", "evaluate", "fit.")


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))])
def test_examples_that_ask_for_other_runs_have_other_folders(name: str) -> None:
    requests: dict[str, set[str]] = {}
    for command in re.findall(r"^ +python sweep\.py (.+?)(?: {2,}#.*)?$", (ROOT / name).read_text(), re.MULTILINE):
        arguments = shlex.split(command, comments=True)
        if "dry_run=true" in arguments:
            continue
        values = dict(argument.lstrip("+").split("=", 1) for argument in arguments)
        request = sorted(argument for argument in arguments if not argument.startswith((*SAME_RUNS, "sweep=")))
        requests.setdefault(values.get("sweep", values["grid"]), set()).add(" ".join(request))
    assert all(len(group) == 1 for group in requests.values()), requests


def test_one_version_is_named_everywhere() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}," in (ROOT / "CHANGELOG.md").read_text()
