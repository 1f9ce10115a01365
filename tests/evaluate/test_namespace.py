"""The room `evaluate/` must not shadow Hugging Face's package of that name, which lm-eval's tasks import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _python(code: str) -> str:
    """Runs code with the repository root first on sys.path, as a script in the root and a submitted job have it."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_room_is_no_regular_package() -> None:
    assert not (ROOT / "evaluate" / "__init__.py").exists()


def test_evaluate_from_the_root_is_hugging_faces() -> None:
    find = "from importlib.util import find_spec; print(find_spec('evaluate').origin)"  # importing it takes seconds
    origin = Path(_python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); {find}").strip())
    assert origin.name == "__init__.py"
    assert origin.parent.name == "evaluate"
    assert not origin.is_relative_to(ROOT / "evaluate")


@pytest.mark.slow
def test_both_can_be_imported_in_one_process() -> None:
    code = """
import evaluate
from isoflop.evaluate import harness, tasks
assert evaluate.__name__ == "evaluate" and hasattr(evaluate, "load"), evaluate
assert harness.__name__ == "isoflop.evaluate.harness"
print(harness.__file__)
"""
    assert Path(_python(code).strip()) == ROOT / "evaluate" / "harness.py"


def test_listing_and_staging_need_neither_torch_nor_lm_eval() -> None:
    code = """
import sys, isoflop.evaluate.tasks.tasks as tasks
tasks.expand("small"); tasks.benchmarks_directory()
print([name for name in ("torch", "lm_eval", "datasets", "pyarrow") if name in sys.modules])
"""
    assert _python(code).strip() == "[]"
