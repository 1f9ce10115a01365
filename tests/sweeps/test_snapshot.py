"""The copy of the code that jobs run is complete, as at the launch, made once, and imported before the checkout."""

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
    """Commit a small package with the same rooms and return its folder."""
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


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_copy_is_the_working_tree_and_says_what_it_was_made_from(checkout: Path, tmp_path: Path) -> None:
    (checkout / "sweeps" / "answer.py").write_text("ANSWER = 2\n")
    (checkout / "sweeps" / "old.py").unlink()
    for name in ("sweeps/new.py", "sweeps/junk.py", "sweeps/notes.txt", "tests/new.py"):
        (checkout / name).write_text("")
    messages: list[str] = []
    copy = snapshot.take(SweepDirectory(tmp_path / "sweep"), messages.append, checkout)
    assert copy.parent == tmp_path / "sweep" / "code"
    assert files_of(copy / "isoflop") == {
        "__init__.py", "sweeps/__init__.py", "sweeps/answer.py", "sweeps/new.py", "train/__init__.py",
        "conf/config.yaml", "fit/table.csv", "evaluate/tasks/tasks.py",
    }  # fmt: skip
    assert (copy / "isoflop" / "sweeps" / "answer.py").read_text() == "ANSWER = 2\n"
    commit = git(checkout, "rev-parse", "HEAD").strip()
    assert read_json(copy / snapshot.SOURCE) == {"commit": commit, "changed": True, "untracked": ["sweeps/new.py"]}
    assert ["sweeps/new.py" in line for line in messages] == [True]
    # The commit and changes.diff restore the tracked files.
    git(checkout, "checkout", "-q", ".")
    git(checkout, "apply", str(copy / "changes.diff"))
    assert (checkout / "sweeps" / "answer.py").read_text() == "ANSWER = 2\n"
    assert not (checkout / "sweeps" / "old.py").exists()


def test_the_same_code_is_copied_once_and_other_code_next_to_it(checkout: Path, tmp_path: Path) -> None:
    sweep = SweepDirectory(tmp_path / "sweep")
    first = snapshot.take(sweep, package=checkout)
    assert not (first / "changes.diff").exists()
    written_at = (first / "isoflop" / "__init__.py").stat().st_mtime_ns
    (checkout / "tests" / "test_it.py").write_text("# no job imports this\n")
    assert snapshot.take(sweep, package=checkout) == first
    assert (first / "isoflop" / "__init__.py").stat().st_mtime_ns == written_at
    (checkout / "sweeps" / "answer.py").write_text("ANSWER = 3\n")
    second = snapshot.take(sweep, package=checkout)
    assert second != first
    assert sorted(path.name for path in first.parent.iterdir()) == sorted([first.name, second.name]), (
        "no half-written copy"
    )
    assert snapshot.take(sweep, package=second / "isoflop") == second, "a job that runs from a copy uses this copy"


def test_a_later_launcher_finds_a_whole_copy(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_copy = snapshot.take(SweepDirectory(tmp_path / "first"), package=checkout)
    sweep = SweepDirectory(tmp_path / "second")
    rename = os.rename

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    def rename_too_late(source: Path, target: Path) -> None:
        rename(other_copy, target)  # the copy of another launcher
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        snapshot.take(sweep, package=checkout)
    assert not list((sweep.path / "code").glob("[!.]*"))
    monkeypatch.setattr(os, "rename", rename_too_late)
    copy = snapshot.take(sweep, package=checkout)
    assert files_of(copy) == {"source.json"} | {f"isoflop/{name}" for name in files_of(copy / "isoflop")}
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_every_package_of_the_project_is_in_a_room_that_is_copied() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {name.split(".")[1] for name in packages if "." in name} - {"bench"} == set(snapshot.ROOMS)


def test_a_job_imports_the_copy_and_evaluate_is_still_hugging_faces(tmp_path: Path) -> None:
    """Start Python in a folder that has a package `isoflop` which must not be imported."""
    checkout = tmp_path / "isoflop"
    checkout.mkdir()
    (checkout / "__init__.py").write_text("raise RuntimeError('the checkout was imported')\n")
    copy = snapshot.take(SweepDirectory(tmp_path / "sweep"), package=ROOT)
    script = (
        "import importlib.util, json, isoflop, isoflop.sweeps.config, isoflop.evaluate.tasks.tasks as ours\n"
        "theirs = importlib.util.find_spec('evaluate')\n"
        "print(json.dumps([isoflop.__file__, isoflop.sweeps.config.__file__, ours.__file__, theirs.origin]))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONSAFEPATH": "1"}
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    *copied_files, hugging_face_file = json.loads(process.stdout)
    assert all(Path(file).is_relative_to(copy / "isoflop") for file in copied_files), copied_files
    assert "site-packages" in hugging_face_file
    assert not Path(hugging_face_file).is_relative_to(copy)
