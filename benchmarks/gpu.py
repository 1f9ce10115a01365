"""Everything that needs a GPU, in one run of under nine minutes: the tests marked `gpu`, then every benchmark.

    python benchmarks/gpu.py [--minutes 8.8] [--only train,attention] [--out benchmarks/results]
    python benchmarks/gpu.py --device cpu --quick          the same with tiny shapes, to see that it runs

Special here:
- each section is a process of its own with a budget of seconds, so that a crash of one, or a GPU that it leaves
  unusable to its process, costs no other; training comes last and gets all that is left;
- a row is kept as soon as it is measured, and the results are written anew after every section;
- the checkout need not be installed, and neither Hydra nor submitit need be there.

Writes <date>_<device>.json and .md: device, driver, versions, commit, command, the tests' last lines, all rows.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# In order; seconds that a section may take of the time that is left.
SECTIONS = {"checks": 130.0, "attention": 90.0, "loss": 50.0, "ensemble": 100.0, "train": 400.0}
PACKAGES = ("torch", "triton", "transformers", "numpy", "flash-attn", "liger-kernel")
Row = dict[str, Any]


@dataclass
class Section:
    """What came of one section."""

    name: str
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    said: str = ""  # the end of its output, where it failed or is a test run
    outcome: str = "whole"  # whole | out of time | failed


def rows_of(section: str, device: str, quick: bool) -> Iterable[Row]:
    """A section's rows as they are measured; with `quick` of shapes that say nothing."""
    if section == "attention":
        from isoflop.bench import attention as bench_attention

        shapes = [bench_attention.Shape(2, 64, 4, 2, 16)] if quick else ()
        return bench_attention.bench_attention(device, 2 if quick else 7, 1 if quick else None, shapes)
    if section == "loss":
        from isoflop.bench import loss as bench_loss

        some = [bench_loss.Shape(128, 32, 256)] if quick else ()
        return bench_loss.bench_loss(device, 2 if quick else 7, 1 if quick else None, some)
    if section == "ensemble":
        from isoflop.bench import ensemble as bench_ensemble

        cases = [bench_ensemble.Case(5e3, 2, 16, rows=2)] if quick else ()
        return bench_ensemble.bench_ensemble(device, 2 if quick else 5, 1 if quick else 4, cases)
    return _train_rows(device, quick)


def _train_rows(device: str, quick: bool) -> Iterator[Row]:
    from isoflop.bench.train import SIZES, Setting, Size, bench_sizes
    from isoflop.train.hardware import pick_device

    sizes = (Size("tiny", 32, 2, 2, 64, vocabulary=256, length=16, rows=4),) if quick else SIZES
    setting = Setting(
        pick_device(device, "--device"), rounds=2 if quick else 4, steps=1 if quick else 3, compiled=not quick
    )
    return bench_sizes(setting, sizes, every_way=False)


def child(section: str, device: str, quick: bool) -> None:
    """Prints a section's rows, one JSON a line."""
    for row in rows_of(section, device, quick):
        print("row " + json.dumps(row), flush=True)


def run(name: str, command: list[str], seconds: float, environment: dict[str, str]) -> Section:
    """A section in a process of its own, of which nothing is left after so many seconds."""
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
            _end(process)
        output.seek(0)
        lines = output.read().splitlines()
    section.seconds = time.monotonic() - started
    section.rows = [json.loads(line[4:]) for line in lines if line.startswith("row {")]
    if section.outcome != "whole" or name == "checks":
        section.said = "\n".join(line for line in lines if not line.startswith("row {"))[-3000:]
    return section


def marked_files() -> list[str]:
    """Files with tests for a GPU: to import all the others takes time, and packages that need not be there."""
    return [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment_of(folder: str) -> dict[str, str]:
    """This environment, in which `isoflop` can be imported though it may not be installed."""
    found = dict(os.environ)
    if importlib.util.find_spec("isoflop") is None:
        (Path(folder) / "isoflop").symlink_to(ROOT)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, found.get("PYTHONPATH")]))
    return found


def facts(commit: str | None) -> dict[str, Any]:
    """Where and of what this was measured."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    smi = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    changes = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(["python", *sys.argv]),
        "gpu": smi,
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit or _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def write(folder: Path, name: str, known: dict[str, Any], sections: list[Section]) -> None:
    """The results so far, as JSON and as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {**known, "sections": [asdict(section) for section in sections]}
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown(known, sections), encoding="utf-8")


def markdown(known: dict[str, Any], sections: list[Section]) -> str:
    """The results for people."""
    lines = [f"# {known['gpu'] or known['cpu']}", ""]
    lines += [f"- {name}: {value}" for name, value in known.items()] + [""]
    for section in sections:
        lines += [f"## {section.name}: {section.outcome}, {section.seconds:.0f} s", ""]
        if section.rows:
            extra = [
                key
                for key in ("mfu", "peer_mfu", "peak_bytes", "peer_peak_bytes", "difference")
                if key in section.rows[0]
            ]
            heads = ["case", "ours", "peer", "unit", "ratio", "spread", *extra, "peer is"]
            lines += [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
            for row in section.rows:
                keys = ["case", "ours", "peer", "unit", "ratio", "spread", *extra, "peer_name"]
                lines.append(f"| {' | '.join(_cell(row.get(key)) for key in keys)} |")
            lines.append("")
        if section.said:
            lines += ["```", section.said, "```", ""]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and benchmarks for a GPU.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--minutes", type=float, default=8.8, help="of everything together")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit", help="of the code, where there is no .git")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # what a child measures
    given = parser.parse_args()
    if given.section:
        child(given.section, given.device, given.quick)
        return 0
    wanted = given.only.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"--only names {sorted(unknown)[0]!r}; there are {', '.join(SECTIONS)}")
    stop = time.monotonic() + 60 * given.minutes
    known = facts(given.commit)
    place = re.sub(r"[^A-Za-z0-9]+", "-", (known["gpu"] or "cpu").split(",")[0]).strip("-").lower()
    name = f"{known['when'][:10]}_{place}"
    sections: list[Section] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_of(folder)
        for section in (item for item in SECTIONS if item in wanted):
            command = [sys.executable, str(Path(__file__).resolve()), "--section", section, "--device", given.device]
            command += ["--quick"] * given.quick
            if section == "checks":
                # Without the settings of the project: its plugins need not be there, nor all that its tests import.
                flags = ["-o", "addopts=", "--import-mode=importlib", "-m", "gpu", "--continue-on-collection-errors"]
                command = [sys.executable, "-m", "pytest", "-q", "-ra", *flags, *marked_files()]
            seconds = max(1.0, min(SECTIONS[section], stop - time.monotonic()))
            sections.append(run(section, command, seconds, environment))
            write(given.out, name, known, sections)
            print(
                f"{section}: {sections[-1].outcome}, {len(sections[-1].rows)} rows, {sections[-1].seconds:.0f} s",
                flush=True,
            )
    print(f"results: {given.out / name}.md and .json")
    return int(any(section.outcome != "whole" for section in sections))


if __name__ == "__main__":
    sys.exit(main())
