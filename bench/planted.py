"""Plant known bugs one at a time in a copy of the package, and report which test notices each.

    python bench/planted.py bench/planted/experts.toml [--only WORDS]

A list of bugs is TOML: for each its name, the `file`, the `old` text, which must occur there once, the `new` text, and
the `tests` to run, by the names under `tests` of the same list. Without a bug all of them must pass. A bug is caught by
the first test that fails or hangs. Prints a table; ends with 1 if a bug was missed.
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SLACK = 60.0  # seconds that a machine with other work may add to any run of tests


class Bug(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: list[str]


class Outcome(NamedTuple):
    failed: str | None  # the first test that failed; None: all passed
    seconds: float


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

    def outcome(self, tests: list[str], limit: float) -> Outcome:
        began = time.monotonic()
        process = self._python("-m", "pytest", "-n0", "-xqrfE", "-pno:cacheprovider", "-m", "not exhaustive", *tests)
        try:
            output = process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            output = f"FAILED {tests[0]} (hangs)"
        finally:
            if process.poll() is None:  # with its ranks
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*?\])?( \(hangs\))?(?: - .*)?$", output, re.MULTILINE)
        if failed is None and process.returncode != 0:
            raise SystemExit(f"pytest ended with {process.returncode} and no failed test:\n{output[-2000:]}")
        return Outcome(failed and failed[1] + (failed[2] or ""), time.monotonic() - began)

    def with_bug(self, bug: Bug, limit: float) -> Outcome:
        path = self.root / bug.file
        text = path.read_text(encoding="utf-8")
        if text.count(bug.old) != 1:
            raise SystemExit(f"{bug.name}: its old text occurs {text.count(bug.old)} times in {bug.file}; it must once")
        path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
        try:
            return self.outcome(bug.tests, limit)
        finally:
            path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bugs", type=Path)
    parser.add_argument("--only", default="", help="only bugs whose names contain these words")
    arguments = parser.parse_args()
    lists = tomllib.loads(arguments.bugs.read_text(encoding="utf-8"))
    bugs = [Bug(**one | {"tests": [lists["tests"][test] for test in one["tests"]]}) for one in lists["bugs"]]
    bugs = [bug for bug in bugs if arguments.only in bug.name]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy is removed
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        copy = Copy(Path(folder))
        sound = {test: copy.outcome([test], 3600.0) for test in {test for bug in bugs for test in bug.tests}}
        if failed := next((one.failed for one in sound.values() if one.failed), None):
            raise SystemExit(f"{failed} fails without a bug; it must pass")
        print("| bug | in | caught by | s |\n| --- | --- | --- | --: |")
        missed = 0
        for bug in bugs:
            failed, seconds = copy.with_bug(bug, SLACK + 3 * sum(sound[test].seconds for test in bug.tests))
            missed += failed is None
            caught = "MISSED" if failed is None else f"`{failed.removeprefix('tests/')}`"
            print(f"| {bug.name} | `{bug.file}` | {caught} | {seconds:.0f} |", flush=True)
    print(f"\n{len(bugs) - missed} of {len(bugs)} bugs were caught.")
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
