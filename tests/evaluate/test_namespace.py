"""The room `evaluate/` must not shadow Hugging Face's package of that name, which lm-eval's tasks import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _python(code: str) -> str:
    """Runs code with the repository root first on sys.path, as a script in the root and a submitted job have it."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_evaluate_from_the_root_is_hugging_faces() -> None:
    find = "from importlib.util import find_spec; print(find_spec('evaluate').origin)"  # importing it takes seconds
    origin = Path(_python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); {find}").strip())
    assert origin.name == "__init__.py"
    assert origin.parent.name == "evaluate"
    assert not origin.is_relative_to(ROOT / "evaluate")


def test_listing_and_staging_need_neither_torch_nor_lm_eval() -> None:
    code = """
import sys, isoflop.evaluate.tasks.tasks as tasks
tasks.expand("small"); tasks.benchmarks_directory()
print([name for name in ("torch", "lm_eval", "datasets", "pyarrow") if name in sys.modules])
"""
    assert _python(code).strip() == "[]"
