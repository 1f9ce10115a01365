"""Skips what this machine cannot serve, each with its reason, and keeps the tests out of the user's cache."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from filelock import FileLock
from isoflop.train.config import DataConfig

ROOT = Path(__file__).resolve().parent.parent
gc.disable()  # until all test modules are imported
# Before anything imports torch: on models this small a second thread costs more than it gives, here and in every child.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Of several clusters, by their SLURM_CONF, the processes of pytest-xdist take one each by turns.
if several := os.environ.get("ISOFLOP_SLURM_CONFS", "").split():
    os.environ["SLURM_CONF"] = several[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % len(several)]


@functools.cache
def missing(marker: str) -> str | None:
    """Why tests with this marker cannot run here; None where they can."""
    if marker == "gpu":
        import torch

        return None if torch.cuda.is_available() else "needs a CUDA device"
    if marker == "slurm":
        return None if _slurm_answers() else "needs SLURM: `sinfo -h` does not answer, see tests/slurm_cluster.sh"
    if marker == "published":
        found = Path(os.environ.get("ISOFLOP_DATA") or "/nonexistent").is_dir()
        return None if found else "needs published results: ISOFLOP_DATA names no folder"
    if marker == "browser":
        return None if shutil.which("chromium") else "needs a browser: there is no chromium on the PATH"
    return None


def _slurm_answers() -> bool:
    try:
        return subprocess.run(["sinfo", "-h"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def pytest_collectstart() -> None:
    """Before a test module can import triton: where there is no GPU its kernels are interpreted, on CPU tensors."""
    if missing("gpu"):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup() -> None:
    """A worker that a test ran in this process left its handlers, with which children would outlive a SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGUSR2):
        if callable(signal.getsignal(number)) and threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """What all test modules imported stays: no collection walks it again, and no forked process copies it to do so."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: they take the longest, also without them, and no process ends with one."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)
    for item in items:
        for marker in {marker.name for marker in item.iter_markers()} & {"gpu", "slurm", "published", "browser"}:
            if reason := missing(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def alone_on_the_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Files whose tests use SLURM take turns, in whatever processes they run: tests of faults kill its daemons."""
    of_file = [item for item in request.session.items if item.path == request.path]
    if any(item.get_closest_marker("slurm") for item in of_file) and missing("slurm") is None:
        cluster = os.environ.get("SLURM_CONF", "").replace("/", "-")
        with FileLock(Path(tempfile.gettempdir()) / f"isoflop-tests-on-slurm{cluster}.lock"):
            yield
    else:
        yield


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Path]:
    """The folder of the cluster that tests/slurm_cluster.sh has brought up; skips where SLURM is another one.

    What a test that failed has left in its queue is nobody else's concern.
    """
    folder = Path(os.environ.get("SLURM_CONF", "/nonexistent")).parent
    if not (folder / "first_job_id").exists():
        pytest.skip("needs the cluster of tests/slurm_cluster.sh: SLURM_CONF names another")
    yield folder
    subprocess.run(["scancel", f"--user={os.getuid()}"], capture_output=True, timeout=60, check=False)


@pytest.fixture(scope="session", autouse=True)
def isoflop_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$ISOFLOP_CACHE where it is set; else a temporary folder, which borrows the benchmarks that are staged already."""
    given = os.environ.get("ISOFLOP_CACHE")
    if given:
        yield Path(given)
        return
    cache = tmp_path_factory.mktemp("cache")
    staged = Path.home() / ".cache" / "isoflop" / "benchmarks"
    if staged.is_dir():
        (cache / "benchmarks").symlink_to(staged)
    os.environ["ISOFLOP_CACHE"] = str(cache)
    yield cache
    del os.environ["ISOFLOP_CACHE"]


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory, isoflop_cache: Path) -> tuple[Path, str]:
    """The grid `smoke`, run once by `python sweep.py` for all processes: its directory, which tests must not change,
    and its output.
    """
    from small_runs import SMOKE

    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    said = root / "smoke.txt"
    with FileLock(root / "smoke.lock"):
        if not said.exists():
            command = [sys.executable, str(ROOT / "sweep.py"), *SMOKE, f"output_root={root / 'outputs'}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            assert done.returncode == 0, done.stdout
            said.write_text(done.stdout)
    return root / "outputs" / "smoke", said.read_text()


@pytest.fixture
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PNGs beside a report are drawn and not rendered, which would take most of its time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **options: Path(path).write_bytes(b"PNG"))


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DataConfig]:
    """Makes a corpus of 200 documents of 30 words, drawn with a fixed seed, in a folder and with a cache of its own."""

    def make(validation_tokens: int, words: Sequence[str] = ("tensor", "kernel", "loss", "of", "the")) -> DataConfig:
        folder, generator = tmp_path_factory.mktemp("corpus"), random.Random(0)
        with (folder / "text.jsonl").open("w") as file:
            for _ in range(200):
                file.write(json.dumps({"text": " ".join(generator.choice(words) for _ in range(30))}) + "\n")
        return DataConfig(
            corpus="text", path=str(folder / "text.jsonl"), sequence_length=16, validation_fraction=0.2,
            validation_tokens=validation_tokens, cache_dir=str(folder / "cache"),
        )  # fmt: skip

    return make
