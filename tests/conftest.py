"""Skip tests that this machine cannot run, with the reason, and keep tests out of the user's cache."""

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
# Before anything imports torch: a second thread slows models this small, here and in every child process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With several test clusters, the processes of pytest-xdist are spread over them in turn.
if slurm_confs := os.environ.get("ISOFLOP_SLURM_CONFS", "").split():
    os.environ["SLURM_CONF"] = slurm_confs[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % len(slurm_confs)]


@functools.cache
def missing(marker: str) -> str | None:
    """Return why tests with this marker cannot run here, or None if they can."""
    if marker == "gpu":
        import torch

        return None if torch.cuda.is_available() else "needs a CUDA device"
    if marker == "slurm":
        return None if _slurm_answers() else "needs SLURM: `sinfo -h` does not answer, see tests/slurm_cluster.sh"
    if marker == "published":
        is_folder = Path(os.environ.get("ISOFLOP_DATA") or "/nonexistent").is_dir()
        return None if is_folder else "needs published results: ISOFLOP_DATA names no folder"
    if marker == "browser":
        return None if shutil.which("chromium") else "needs a browser: there is no chromium on the PATH"
    return None


def _slurm_answers() -> bool:
    try:
        return subprocess.run(["sinfo", "-h"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def pytest_collectstart() -> None:
    """Make triton interpret its kernels on CPU tensors if there is no GPU, before any test module imports it."""
    if missing("gpu"):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup() -> None:
    """Reset signal handlers that a worker left in this process, because children that inherit them survive SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGUSR2):
        if callable(signal.getsignal(number)) and threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Freeze all imported objects, so that garbage collection neither visits nor, in forked processes, copies them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no process starts a long file at the end, and add the skip marks."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)
    for item in items:
        for marker in {marker.name for marker in item.iter_markers()} & {"gpu", "slurm", "published", "browser"}:
            if reason := missing(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def exclusive_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let only one file at a time, over all processes, use SLURM, because tests of faults kill its daemons."""
    items_of_file = [item for item in request.session.items if item.path == request.path]
    if any(item.get_closest_marker("slurm") for item in items_of_file) and missing("slurm") is None:
        cluster = os.environ.get("SLURM_CONF", "").replace("/", "-")
        with FileLock(Path(tempfile.gettempdir()) / f"isoflop-tests-on-slurm{cluster}.lock"):
            yield
    else:
        yield


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Path]:
    """Return the folder of the cluster that tests/slurm_cluster.sh started; skip if SLURM is a different cluster.

    All its jobs are cancelled afterwards, because a failed test may leave some in the queue.
    """
    folder = Path(os.environ.get("SLURM_CONF", "/nonexistent")).parent
    if not (folder / "first_job_id").exists():
        pytest.skip("needs the cluster of tests/slurm_cluster.sh: SLURM_CONF names another")
    yield folder
    subprocess.run(["scancel", f"--user={os.getuid()}"], capture_output=True, timeout=60, check=False)


@pytest.fixture(scope="session", autouse=True)
def isoflop_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return $ISOFLOP_CACHE or, if unset, a temporary folder that links to the benchmarks staged by the user."""
    path = os.environ.get("ISOFLOP_CACHE")
    if path:
        yield Path(path)
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
    """Run the grid `smoke` once for all processes with `python sweep.py`.

    Returns its directory, which tests must not change, and its output.
    """
    from small_runs import SMOKE

    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    output_file = root / "smoke.txt"
    with FileLock(root / "smoke.lock"):
        if not output_file.exists():
            command = [sys.executable, str(ROOT / "sweep.py"), *SMOKE, f"output_root={root / 'outputs'}"]
            process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            assert process.returncode == 0, process.stdout
            output_file.write_text(process.stdout)
    return root / "outputs" / "smoke", output_file.read_text()


@pytest.fixture
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write placeholder bytes instead of the PNGs of a report, because rendering takes most of its time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **options: Path(path).write_bytes(b"PNG"))


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DataConfig]:
    """Return a function that makes a corpus of 200 random documents of 30 words, with a separate folder and cache."""

    def make(
        validation_tokens: int, vocabulary: Sequence[str] = ("tensor", "kernel", "loss", "of", "the")
    ) -> DataConfig:
        folder, generator = tmp_path_factory.mktemp("corpus"), random.Random(0)
        with (folder / "text.jsonl").open("w") as file:
            for _ in range(200):
                file.write(json.dumps({"text": " ".join(generator.choice(vocabulary) for _ in range(30))}) + "\n")
        return DataConfig(
            corpus="text", path=str(folder / "text.jsonl"), sequence_length=16, validation_fraction=0.2,
            validation_tokens=validation_tokens, cache_dir=str(folder / "cache"),
        )  # fmt: skip

    return make
