"""Run the commands in the `console` blocks of docs/*.md, and compare or rewrite the output that the pages show.

    python docs/examples.py [--write] [PAGE ...]

The commands of a page run one after the other in a temporary folder with the CSV files of docs/, the LICENSE and
examples/. In the shown output, `...` stands for any text, a run id for any run id, and numbers may differ by 5 %.
Output with `...` is not rewritten.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_ID = re.compile(r"\b[0-9a-f]{10}\b")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
PRELUDE = 'isoflop() { "$PYTHON" -m isoflop "$@"; }\n'
SAME = 0.05  # relative difference of numbers: other processors round otherwise


def run_page(page: Path) -> list[tuple[str, str, str]]:
    """Run a page's commands. Returns each with the output that the page shows and the real one."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for file in [*DOCS.glob("*.csv"), DOCS.parent / "LICENSE"]:
            shutil.copy(file, folder)
        shutil.copytree(DOCS.parent / "examples", Path(folder) / "examples")
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
                results.append((command, shown, run(command, Path(folder))))
    return results


def run(command: str, folder: Path) -> str:
    """Return what a shell command prints, errors included, without spaces at the ends of lines."""
    settings = {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(DOCS.parent.parent),
        "ISOFLOP_CACHE": str(folder / ".cache"),
    }
    settings |= {"COLUMNS": "88", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        ["bash", "-c", PRELUDE + command],
        cwd=folder,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.rstrip().splitlines())


def difference(shown: str, real: str) -> str | None:
    """Return where the real output first differs from the shown one, or None."""
    pattern, numbers = "", []
    for part in re.split(rf"(\.\.\.|\s+|{RUN_ID.pattern}|{NUMBER.pattern})", shown.strip()):
        if part == "...":
            pattern += ".*?"
        elif RUN_ID.fullmatch(part):
            pattern += RUN_ID.pattern
        elif NUMBER.fullmatch(part):
            pattern += f"({NUMBER.pattern})"
            numbers.append(part)
        else:
            pattern += r"\s+" if part.isspace() else re.escape(part)
    match = re.fullmatch(pattern, real.strip(), re.DOTALL)
    if match is None:
        return f"expected:\n{shown}\ngot:\n{real}"
    pairs = [
        (float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in zip(numbers, match.groups(), strict=True)
    ]
    unequal = [f"{a:g} is shown and {b:g} came out" for a, b in pairs if abs(a - b) > SAME * max(abs(a), abs(b))]
    return "; ".join(unequal) or None


def main(arguments: list[str]) -> int:
    names = [name for name in arguments if name != "--write"]
    pages = [DOCS / name for name in names] or sorted(DOCS.glob("*.md"))
    differences = 0
    for page in (page for page in pages if BLOCK.search(page.read_text(encoding="utf-8"))):
        for command, shown, real in run_page(page):
            if (reason := difference(shown, real)) is None:
                continue
            print(f"{page.name}: $ {command}\n{reason}")
            differences += 1
            if "--write" in arguments and "..." not in shown:
                text = page.read_text(encoding="utf-8")
                page.write_text(text.replace(f"$ {command}\n{shown}", f"$ {command}\n{real}", 1), encoding="utf-8")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
