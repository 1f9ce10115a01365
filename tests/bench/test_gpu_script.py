"""The script for a GPU that is lent for minutes: a section that fails loses no rows, and results state their origin."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu.py"
ROW = {"case": "a case", "ours": 2.5, "peer": 1.0, "peer_name": "p", "unit": "u/s", "ratio": 2.5, "spread": 0.1}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_script"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def program(lines: str) -> list[str]:
    row = json.dumps(ROW)
    return [sys.executable, "-c", f"import sys, time\nprint('row ' + {row!r}, flush=True)\n{lines}"]


@pytest.mark.exhaustive
def test_rows_are_kept_whatever_becomes_of_their_section(script: ModuleType) -> None:
    whole = script.run("loss", program("print('noise')"), 60.0, {})
    crashed = script.run("loss", program("sys.exit('the GPU is gone')"), 60.0, {})
    late = script.run("loss", program("time.sleep(60)"), 3.0, {})
    assert [section["rows"] for section in (whole, crashed, late)] == 3 * [[ROW]]
    assert (whole["outcome"], whole["output"]) == ("whole", "")
    assert crashed["outcome"] == "failed with 1"
    assert "the GPU is gone" in crashed["output"]
    assert late["outcome"] == "out of time after 3 s"


def test_results_say_where_they_are_from(script: ModuleType, tmp_path: Path) -> None:
    facts = script.facts("0123abc")
    assert facts["commit"] == "0123abc"
    assert facts["versions"]["torch"] != "not installed"


def test_only_files_with_tests_for_a_gpu_are_checked(script: ModuleType) -> None:
    names = {Path(path).name for path in script.marked_files()}
    assert "test_generate.py" in names
    assert "test_house.py" not in names


@pytest.mark.exhaustive
def test_the_whole_script_runs_without_a_gpu(tmp_path: Path) -> None:
    only = ["--device", "cpu", "--quick", "--only", "loss,train", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *only], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    sections = json.loads(path.read_text())["sections"]
    assert [section["name"] for section in sections] == ["loss", "train"]
    assert all(section["rows"] for section in sections)
