"""The files that a smoke sweep passes, from `sweep.py` to the report, in the order of their first call.

`python benchmarks/walk.py` prints the list that CONTRIBUTING.md quotes. A module that is only imported is not passed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Python runs a module of this name in every process that finds it on its path.
SITECUSTOMIZE = """
import os, sys, threading, time
ROOT, LOG, seen = os.environ["WALK_ROOT"] + "/", os.environ["WALK_LOG"], set()
def called(frame, event, _):
    code = frame.f_code
    if event != "call" or code.co_filename in seen or not code.co_flags & 1:  # bodies of modules and classes
        return
    seen.add(code.co_filename)
    if code.co_filename.startswith(ROOT):
        with open(LOG, "a") as log:
            log.write(f"{time.time()} {code.co_filename[len(ROOT):]}\\n")
threading.setprofile(called)
sys.setprofile(called)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        (Path(folder) / "sitecustomize.py").write_text(SITECUSTOMIZE)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "WALK_ROOT": str(ROOT), "WALK_LOG": str(log)}
        command = [sys.executable, str(ROOT / "sweep.py"), "+grid=smoke", f"output_root={folder}/outputs"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
        lines = sorted(log.read_text().splitlines(), key=lambda line: float(line.split()[0]))
    passed = dict.fromkeys(line.split()[1].rpartition(".")[0] for line in lines)
    for room, files in groupby((name for name in passed if "/" in name), key=lambda name: name.partition("/")[0]):
        said = f"{room}: " + " ".join(name.partition("/")[2] for name in files)
        print(textwrap.fill(said, 120, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False))


if __name__ == "__main__":
    main()
