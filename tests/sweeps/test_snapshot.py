"""The copy of the code that jobs run: whole, as it was at the launch, made once, and imported before the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.sweeps.slurm import snapshot
from isoflop.train.files import read_json

ROOT = Path(__file__).resolve().parents[2]


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small package of the same rooms, committed."""
    package = tmp_path / "checkout"
    files = {
        "__init__.py": "", "sweeps/__init__.py": "", "sweeps/answer.py": "ANSWER = 1\n", "sweeps/old.py": "",
        "train/__init__.py": "", "conf/config.yaml": "a: 1\n", "fit/table.csv": "1\n", "tests/test_it.py": "",
        "evaluate/tasks/tasks.py": "", ".gitignore": "junk*.py\n__pycache__\n",
    }  # fmt: skip
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    git(package, "init", "-q")
    git(package, "add", ".")
    git(package, "commit", "-q", "-m", "all")
    return package


def files_of(place: Path) -> set[str]:
    return {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}


def test_the_copy_is_the_working_tree_and_says_what_it_was_made_from(checkout: Path, tmp_path: Path) -> None:
    (checkout / "sweeps" / "answer.py").write_text("ANSWER = 2\n")
    (checkout / "sweeps" / "old.py").unlink()
    for name in ("sweeps/new.py", "sweeps/junk.py", "sweeps/notes.txt", "tests/new.py"):
        (checkout / name).write_text("")
    said: list[str] = []
    place = snapshot.take(SweepDirectory(tmp_path / "sweep"), said.append, checkout)
    assert place.parent == tmp_path / "sweep" / "code"
    assert files_of(place / "isoflop") == {
        "__init__.py", "sweeps/__init__.py", "sweeps/answer.py", "sweeps/new.py", "train/__init__.py",
        "conf/config.yaml", "fit/table.csv", "evaluate/tasks/tasks.py",
    }  # fmt: skip
    assert (place / "isoflop" / "sweeps" / "answer.py").read_text() == "ANSWER = 2\n"
    commit = git(checkout, "rev-parse", "HEAD").strip()
    assert read_json(place / snapshot.SOURCE) == {"commit": commit, "changed": True, "untracked": ["sweeps/new.py"]}
    assert ["sweeps/new.py" in line for line in said] == [True]
    # The commit and the changes give the tracked files back.
    git(checkout, "checkout", "-q", ".")
    git(checkout, "apply", str(place / "changes.diff"))
    assert (checkout / "sweeps" / "answer.py").read_text() == "ANSWER = 2\n"
    assert not (checkout / "sweeps" / "old.py").exists()


def test_the_same_code_is_copied_once_and_other_code_beside_it(checkout: Path, tmp_path: Path) -> None:
    sweep = SweepDirectory(tmp_path / "sweep")
    first = snapshot.take(sweep, package=checkout)
    assert not (first / "changes.diff").exists()
    made = (first / "isoflop" / "__init__.py").stat().st_mtime_ns
    (checkout / "tests" / "test_it.py").write_text("# no job imports this\n")
    assert snapshot.take(sweep, package=checkout) == first
    assert (first / "isoflop" / "__init__.py").stat().st_mtime_ns == made
    (checkout / "sweeps" / "answer.py").write_text("ANSWER = 3\n")
    second = snapshot.take(sweep, package=checkout)
    assert second != first
    assert sorted(path.name for path in first.parent.iterdir()) == sorted([first.name, second.name]), (
        "nothing half made"
    )
    assert snapshot.take(sweep, package=second / "isoflop") == second, "of a job that runs from a copy it is that one"


def test_a_launcher_after_a_killed_or_faster_one_finds_a_whole_copy(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = snapshot.take(SweepDirectory(tmp_path / "first"), package=checkout)
    sweep = SweepDirectory(tmp_path / "second")
    rename = os.rename

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    def too_late(source: Path, target: Path) -> None:
        rename(whole, target)  # another launcher's
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        snapshot.take(sweep, package=checkout)
    assert not list((sweep.path / "code").glob("[!.]*"))
    monkeypatch.setattr(os, "rename", too_late)
    place = snapshot.take(sweep, package=checkout)
    assert files_of(place) == {"source.json"} | {f"isoflop/{name}" for name in files_of(place / "isoflop")}
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_every_package_of_the_project_is_in_a_room_that_is_copied() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {name.split(".")[1] for name in packages if "." in name} - {"bench"} == set(snapshot.ROOMS)


def test_a_job_imports_the_copy_and_evaluate_is_still_hugging_faces(tmp_path: Path) -> None:
    """Started in the folder that holds the checkout by the package's own name, which could not be nearer at hand."""
    nearer = tmp_path / "isoflop"
    nearer.mkdir()
    (nearer / "__init__.py").write_text("raise RuntimeError('the checkout was imported')\n")
    place = snapshot.take(SweepDirectory(tmp_path / "sweep"), package=ROOT)
    script = (
        "import importlib.util, json, isoflop, isoflop.sweeps.config, isoflop.evaluate.tasks.tasks as ours\n"
        "theirs = importlib.util.find_spec('evaluate')\n"
        "print(json.dumps([isoflop.__file__, isoflop.sweeps.config.__file__, ours.__file__, theirs.origin]))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(place), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *mine, theirs = json.loads(done.stdout)
    assert all(Path(file).is_relative_to(place / "isoflop") for file in mine), mine
    assert "site-packages" in theirs
    assert not Path(theirs).is_relative_to(place)
