"""What the compiler made of a block, kept for the next run of the same shape, on this node or another.

The compiler gets a folder of its own for each shape of block, whatever the depth (TORCHINDUCTOR_CACHE_DIR), which is
packed into one file in the project's cache: `torch.compiler.save_cache_artifacts` leaves out what g++ made of the
kernels of a CPU, nine tenths of the wait. A damaged file is passed over with a word, and replaced after the next
compilation.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import platform
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig, canonical_json
from ..data.storage import cache_directory
from ..files import write_atomic
from ..hardware import CUDA, on_gpu

PREFIX = "isoflop-"  # of our folders inside the compiler's
OF_NO_BLOCK = ("depth", "vocab_size", "vocab_multiple", "tied_embeddings")  # fields of the model
OF_NO_MESH = ("dp", "pp", "schedule", "chunks", "zero")
OF_NO_STEP = (*OF_NO_MESH, "micro_batch_size", "compile", "timeout_seconds", "device", "threads")


class Compiled:
    """The compiler's files for one shape of block.

    Args:
        rows: sequences in a micro-batch.
        writes: whether this rank keeps what is new.
        report: gets a line where a file is of no use.
    """

    def __init__(
        self, config: RunConfig, rows: int, device: torch.device, writes: bool, report: Callable[[str], None]
    ) -> None:
        made_for = canonical_json([environment(device), shape(config, rows)])
        name = hashlib.sha256(made_for.encode()).hexdigest()[:24]
        self.archive = cache_directory(config.data) / "compiled" / f"{name}.tar.gz"
        self.folder = _base() / f"{PREFIX}{name}"
        self.writes, self.report = writes, report
        self.known: set[str] = set()  # files that the archive holds
        self.steps = 0

    def load(self) -> None:
        """Before the first compilation: puts the files where the compiler looks for them."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
        if self.archive.exists():
            try:
                self.known = _unpack(self.archive, self.folder)
            except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
                self.report(f"compiled blocks in {self.archive} are of no use, and are compiled anew: {error}")
        # One process may train many shapes. Each gets its own code, as it would in a process of its own: by default the
        # second would be compiled for shapes that vary, and the ninth not at all, without a word.
        limits = torch.compiler.config
        limits.automatic_dynamic_shapes = False
        limits.recompile_limit = max(limits.recompile_limit, 256)
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 4096)

    def keep(self) -> None:
        """After a step: saves what is new. A full disk is no error of the run."""
        self.steps += 1
        # Most is compiled in the first step, more where a held-out set is scored: steps 1, 2, 4, 8 … look.
        if not self.writes or self.steps & (self.steps - 1):
            return
        files = set[str]()
        try:
            files = _files(self.folder)
            if files <= self.known:
                return
            packed = io.BytesIO()  # in gzip because that ends in a checksum
            with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
                for name in sorted(files):
                    tar.add(self.folder / name, name, recursive=False)
            write_atomic(self.archive, [packed.getvalue()])
        except OSError as error:
            self.report(f"compiled blocks cannot be kept in {self.archive}: {error.strerror or error}")
        self.known |= files


def shape(config: RunConfig, rows: int) -> dict[str, Any]:
    """What the code of a block depends on."""
    model, parallel = asdict(config.model), config.parallel
    return {
        **{name: value for name, value in model.items() if name not in OF_NO_BLOCK},
        "rows": rows,
        "sequence_length": config.data.sequence_length,
        "separate_documents": config.data.separate_documents,
        "precision": config.precision,
        **{name: value for name, value in asdict(parallel).items() if name not in OF_NO_STEP},
        "dp": parallel.dp if parallel.zero == 3 else 1,  # its hooks are part of the graph's surroundings
        "threads": torch.get_num_threads(),  # written into the code for CPUs
    }


def environment(device: torch.device) -> dict[str, Any]:
    """What compiled code runs on: code made elsewhere may not run here."""
    found: dict[str, Any] = {
        "torch": [torch.__version__, str(Path(torch.__file__).parent)],  # which the kernels are linked against
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    if on_gpu(device):
        return found | {"device": CUDA.name(device), "capability": [*CUDA.capability(device)]}
    return found | {"device": torch.backends.cpu.get_cpu_capability(), "flags": _cpu_flags()}


def _cpu_flags() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    return platform.processor()


def _base() -> Path:
    """Where the compiler keeps its files on this machine."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not given:
        return Path(tempfile.gettempdir()) / f"isoflop_compiled_{os.getuid()}"
    return Path(given).parent if Path(given).name.startswith(PREFIX) else Path(given)


def _files(folder: Path) -> set[str]:
    """Relative names of what is worth keeping: no locks, nothing half written."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".tmp"))
    return {str(path.relative_to(folder)) for path in paths if "locks" not in path.relative_to(folder).parts}


def _unpack(archive: Path, folder: Path) -> set[str]:
    """Moves what is missing into the folder, file by file, once all of it has been read and checked."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        checked = gzip.decompress(archive.read_bytes())  # tarfile alone stops reading before the checksum
        with tarfile.open(fileobj=io.BytesIO(checked)) as tar:
            tar.extractall(temporary, filter="data")
        files = _files(Path(temporary))
        for name in files:
            if not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(temporary) / name, folder / name)
    return files
