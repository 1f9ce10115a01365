"""Example commands in README and docs/ run one after another, and no two write to the same sweep folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import isoflop
import pytest

ROOT = Path(isoflop.__file__).resolve().parent
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
