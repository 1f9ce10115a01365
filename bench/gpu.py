"""Test and time everything that needs a GPU in under nine minutes: the tests marked `gpu`, then every benchmark.

    python bench/gpu.py [--minutes 8.8] [--only train,attention] [--out outputs/gpu]
    python bench/gpu.py --device cpu --quick          the same with tiny shapes, to check that it runs

Each section is a process with a time limit, so that a crash of one costs no other; training is last and gets the rest.
The checkout need not be installed, and Hydra and submitit are not needed. After every section it writes
<date>_<device>.json: device, driver, versions, commit, command, the end of the tests' output, all rows.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {"checks": 130.0, "attention": 90.0, "loss": 50.0, "train": 400.0}  # in this order; seconds at most
PACKAGES = ("torch", "triton", "transformers", "numpy", "flash-attn", "liger-kernel")
# The settings of the project are left out, because its plugins may be missing.
PYTEST = ["-o", "addopts=", "--import-mode=importlib", "-m", "gpu", "--continue-on-collection-errors"]


@dataclass
class Section:
    """The result of one section: whole, out of time, or failed."""

    name: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""  # its end, of a section that failed and of the tests
    outcome: str = "whole"


def measure(section: str, device: str, quick: bool) -> Iterable[dict[str, Any]]:
    """Yield a section's rows as they are measured; with `quick` the shapes are too small to be informative."""
    if section == "train":
        from .train import SIZES, Size, bench_train

        if quick:
            return bench_train(device, 2, 1, [Size("tiny", 32, 2, 2, 64, 2, vocabulary=256, length=16, rows=4)], False)
        return bench_train(device, 4, 3, SIZES)
    from . import attention, loss

    rounds, steps = (2, 1) if quick else (7, None)
    if section == "loss":
        return loss.bench_loss(device, rounds, steps, [loss.Shape(128, 32, 256)] if quick else ())
    return attention.bench_attention(device, rounds, steps, [attention.Shape(2, 64, 4, 2, 16)] if quick else ())


def run(name: str, command: list[str], seconds: float, environment: dict[str, str]) -> Section:
    """Run a section in a process group, all of which is killed after this many seconds."""
    section, started = Section(name), time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            section.outcome = "whole" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            section.outcome = f"out of time after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    section.seconds = time.monotonic() - started
    section.rows = [json.loads(line[4:]) for line in lines if line.startswith("row {")]
    if section.outcome != "whole" or name == "checks":
        section.output = "\n".join(line for line in lines if not line.startswith("row {"))[-3000:]
    return section


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
    """Return the machine, the versions and the commit."""
    versions = {item.name: item.version for item in importlib.metadata.distributions() if item.name in PACKAGES}
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(["python", *sys.argv]),
        "gpu": _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "versions": versions,
        "commit": commit or _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "changes": _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"),
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def main() -> int:
    """Run the sections, or as a child print one section's rows."""
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
    stop, known, sections = time.monotonic() + 60 * options.minutes, facts(options.commit), list[Section]()
    place = re.sub(r"[^A-Za-z0-9]+", "-", (known["gpu"] or "cpu").split(",")[0]).strip("-").lower()
    path = options.out / f"{known['when'][:10]}_{place}.json"
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
            results = known | {"sections": [asdict(item) for item in sections]}
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {section.outcome}, {len(section.rows)} rows, {section.seconds:.0f} s", flush=True)
    print(f"results: {path}")
    return int(any(section.outcome != "whole" for section in sections))


if __name__ == "__main__":
    sys.exit(main())
