"""Plant known bugs one at a time in a copy of the package, and report which test notices each.

    python bench/planted.py bench/planted/experts.toml [--only WORDS]

A list of bugs is TOML: for each its name, the `file`, the `old` text, which must occur there once, the `new` text, and
the `tests` to run, by the names under `tests` of the same list. A bug is caught by the first test that fails or hangs.
Prints a table; ends with 1 if a bug was missed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SLACK = 60.0  # seconds that a machine with other work may add to any run of tests


class Copy:
    """A copy of the package, into which bugs are planted one at a time."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "isoflop"
        ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "outputs", "wandb")
        shutil.copytree(ROOT, self.root, ignore=ignored)
        # No bytecode: Python finds it by size and second, which a bug may share with what it replaces.
        self.environment = os.environ | {
            "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)
        }  # fmt: skip
        place = self._python("-c", "import isoflop; print(isoflop.__path__[0])").communicate()[0].strip()
        if Path(place).resolve() != self.root.resolve():
            raise SystemExit(f"Python imports isoflop from {place}; it must be the copy in {self.root}")

    def _python(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments], cwd=self.root, env=self.environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def first_failure(self, tests: list[str], limit: float) -> str | None:
        """Run tests; return the first that fails, or that hangs for `limit` seconds, or None."""
        process = self._python("-m", "pytest", "-n0", "-xqrfE", "-pno:cacheprovider", "-m", "not exhaustive", *tests)
        try:
            output = process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            return f"{tests[0]} (hangs)"
        finally:
            if process.poll() is None:  # with its ranks
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*?\])?(?: - .*)?$", output, re.MULTILINE)
        if failed is None and process.returncode != 0:
            raise SystemExit(f"pytest ended with {process.returncode} and no failed test:\n{output[-2000:]}")
        return failed and failed[1]

    def with_bug(self, bug: dict[str, Any], limit: float) -> str | None:
        path = self.root / bug["file"]
        text = path.read_text(encoding="utf-8")
        if (count := text.count(bug["old"])) != 1:
            raise SystemExit(f"{bug['name']}: its old text occurs {count} times in {bug['file']}, not once")
        path.write_text(text.replace(bug["old"], bug["new"]), encoding="utf-8")
        try:
            return self.first_failure(bug["tests"], limit)
        finally:
            path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bugs", type=Path)
    parser.add_argument("--only", default="", help="only bugs whose names contain these words")
    arguments = parser.parse_args()
    lists = tomllib.loads(arguments.bugs.read_text(encoding="utf-8"))
    bugs = [bug | {"tests": [lists["tests"][test] for test in bug["tests"]]} for bug in lists["bugs"]]
    bugs = [bug for bug in bugs if arguments.only in bug["name"]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy is removed
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        copy, seconds = Copy(Path(folder)), dict[str, float]()
        for test in sorted({test for bug in bugs for test in bug["tests"]}):
            started = time.monotonic()
            if failed := copy.first_failure([test], 3600.0):
                raise SystemExit(f"{failed} fails without a bug; it must pass")
            seconds[test] = time.monotonic() - started
        print("| bug | in | caught by |\n| --- | --- | --- |")
        missed = 0
        for bug in bugs:
            failed = copy.with_bug(bug, SLACK + 3 * sum(seconds[test] for test in bug["tests"]))
            missed += failed is None
            caught = "MISSED" if failed is None else f"`{failed.removeprefix('tests/')}`"
            print(f"| {bug['name']} | `{bug['file']}` | {caught} |", flush=True)
    print(f"\n{len(bugs) - missed} of {len(bugs)} bugs were caught.")
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
