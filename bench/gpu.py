"""Test and time everything that needs a GPU in under nine minutes: the tests marked `gpu`, then every benchmark.

    python bench/gpu.py [--minutes 8.8] [--only train,attention] [--out outputs/gpu]
    python bench/gpu.py --device cpu --quick          the same with tiny shapes, to check that it runs

Each section is a process with a time limit, so that a crash of one costs no other. After every section it writes
<date>_<device>.json: device, versions, commit, command, the tests' last lines, all rows.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {"checks": 130.0, "attention": 90.0, "loss": 50.0, "train": 400.0}  # in this order; seconds at most
# The settings of the project are left out, because its plugins may be missing. Most of the tests' time is compiling.
PYTEST = ["-o", "addopts=", "--import-mode=importlib", "-m", "gpu", "--continue-on-collection-errors"]
PYTEST += ["-n", "8"] if importlib.util.find_spec("xdist") else []


def measure(section: str, device: str, quick: bool) -> Iterable[dict[str, Any]]:
    """Yield the rows of section train, loss or attention; with `quick` the shapes are too small to be informative."""
    if section == "train":
        from .train import bench_train

        return bench_train(device, 2, 1, ["tiny"], compiled=False) if quick else bench_train(device, 4, 3)
    from .layers import LossShape, Shape, bench_attention, bench_loss

    rounds, steps = (2, 1) if quick else (7, None)
    if section == "loss":
        return bench_loss(device, rounds, steps, [LossShape(128, 32, 256)] if quick else ())
    return bench_attention(device, rounds, steps, [Shape(2, 64, 4, 2, 16)] if quick else ())


def run(name: str, command: list[str], seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """Run a section's command, kill it after `seconds`, and return its rows and outcome."""
    with tempfile.TemporaryFile("w+") as output:
        streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
        try:
            code = process.wait(seconds)
            outcome = "whole" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            outcome = f"out of time after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    rows = [json.loads(line[4:]) for line in lines if line.startswith("row {")]
    text = "\n".join(line for line in lines if not line.startswith("row {"))[-3000:]
    quiet = outcome == "whole" and name != "checks"
    return {"name": name, "outcome": outcome, "rows": rows, "output": "" if quiet else text}


def marked_files() -> list[str]:
    """Return the files with tests for a GPU; importing all others would take time and packages."""
    return [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]


def environment_of(folder: str) -> dict[str, str]:
    """Return this environment, extended so that `isoflop` can be imported even if it is not installed."""
    environment = dict(os.environ)
    if importlib.util.find_spec("isoflop") is None:
        (Path(folder) / "isoflop").symlink_to(ROOT)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, environment.get("PYTHONPATH")]))
    return environment


def facts(commit: str | None) -> dict[str, Any]:
    """Return the facts that a record states: time, command, GPU, versions, commit and changes."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(["python", *sys.argv]),
        "gpu": _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "versions": {item.name: item.version for item in importlib.metadata.distributions()},
        "commit": commit or _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "changes": _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"),
    }


def _output(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and benchmarks for a GPU.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to check that everything runs")
    parser.add_argument("--minutes", type=float, default=8.8, help="of everything together")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu")
    parser.add_argument("--commit", help="of the code, if there is no .git")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # what a child measures
    options = parser.parse_args()
    if options.section:
        for row in measure(options.section, options.device, options.quick):
            print("row " + json.dumps(row), flush=True)
        return 0
    names = options.only.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"--only names {sorted(unknown)[0]!r}; there are {', '.join(SECTIONS)}")
    stop, machine, sections = time.monotonic() + 60 * options.minutes, facts(options.commit), list[dict[str, Any]]()
    place = re.sub(r"[^A-Za-z0-9]+", "-", (machine["gpu"] or "cpu").split(",")[0]).strip("-").lower()
    path = options.out / f"{machine['when'][:10]}_{place}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_of(folder)
        for name in (item for item in SECTIONS if item in names):
            module = ["-m", "isoflop.bench.gpu", "--section", name, "--device", options.device]
            command = [sys.executable, *module, *["--quick"] * options.quick]
            if name == "checks":
                command = [sys.executable, "-m", "pytest", "-q", "-ra", *PYTEST, *marked_files()]
            seconds = max(1.0, min(SECTIONS[name], stop - time.monotonic()))
            sections.append(section := run(name, command, seconds, environment))
            path.write_text(json.dumps(machine | {"sections": sections}, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {section['outcome']}, {len(section['rows'])} rows", flush=True)
    print(f"results: {path}")
    return int(any(section["outcome"] != "whole" for section in sections))


if __name__ == "__main__":
    sys.exit(main())
