"""Compile our kernels for GPUs that are not present, and report resources: `isoflop bench kernels --static`.

The functions that training calls run on CPU tensors, and a driver that stands in for a GPU lets Triton only compile. So
blocks, flags, and the types and alignment of arguments are those of a real launch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from ..train.errors import UserError
from ..train.kernels.flash_blocks import TABLE
from .timing import Row

VOCABULARY = 32768
ABOUT = "What the compiler reports for every launch; nothing was run. Registers and spilled bytes are per thread."
TENSOR_CORES = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")  # PTX of the tensor cores of each generation


class Gpu(NamedTuple):
    """A GPU of one generation (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""

    name: str
    generation: str  # its name in flash_blocks.toml
    target: str
    tensor_cores: str
    most_shared: (
        int  # bytes of a program; launches for sm_80 also serve sm_86, 89 and 120, which have 99 KiB and not 163
    )


GPUS = {
    80: Gpu("A100", "ampere", "sm_80", TENSOR_CORES[0], 99 << 10),
    90: Gpu("H100", "hopper", "sm_90a", TENSOR_CORES[1], 227 << 10),
    100: Gpu("B200", "blackwell", "sm_100a", TENSOR_CORES[2], 227 << 10),
}
TENSOR_MEMORY = 512  # columns of a multiprocessor, by the same table


class Case(NamedTuple):
    """A set of launches: attention forward and backward, or the loss if head_dim is 0. `tf32` is a mode of fp32."""

    arch: int
    dtype: str
    head_dim: int
    documents: bool = True

    @classmethod
    def parse(cls, text: str) -> Case:
        if not re.fullmatch(r"(80|90|100):(bfloat16|float16|tf32|float32):(loss|(16|32|64|96|128|256)(:whole)?)", text):
            raise UserError(
                f"--case is {text!r}; it must be ARCHITECTURE:TYPE:HEAD_SIZE, with :whole for attention without "
                "documents, or ARCHITECTURE:TYPE:loss, such as 90:bfloat16:128 or 80:tf32:64:whole."
            )
        arch, dtype, head_dim, *whole = text.split(":")
        return cls(int(arch), dtype, 0 if head_dim == "loss" else int(head_dim), not whole)


# Every entry of flash_blocks.toml at its largest head size, and the loss.
CASES = [
    Case(arch, dtype, head_dim)
    for arch, gpu in GPUS.items()
    for dtype, entry in {"bfloat16": gpu.generation, "tf32": "tf32", "float32": "ieee"}.items()
    for head_dim in [*map(int, TABLE[entry]), *([0] if dtype != "tf32" else [])]
]


def bench_kernels(cases: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a row for each kernel of each case, a text for `Case.parse`; by default of all CASES."""
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("bench kernels needs the package triton, and TRITON_INTERPRET must not be set to 1.")
    for case in [Case.parse(text) for text in cases] or CASES:
        with compiling_for(case) as compiled:
            _launch(case)
        for kernel, options in compiled:
            yield _row(case, kernel, options)


@contextmanager
def compiling_for(case: Case) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Yield a list of (kernel, options), to which each launch inside the block adds; launches only compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from ..train.kernels import flash_blocks

    absent = mock.Mock()  # a driver; the number of its device keeps the kernels of several targets apart
    absent.get_current_device.return_value = case.arch
    absent.get_current_stream.return_value = 0
    absent.get_current_target.return_value = GPUTarget("cuda", case.arch, 32)
    compiled: list[tuple[Any, dict[str, Any]]] = []
    run, tf32 = triton.JITFunction.run, torch.backends.cuda.matmul.allow_tf32

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append((run(self, *args, grid=grid, warmup=True, **options), options))

    driver.set_active(absent)  # stays active: without a GPU there is no other driver
    torch.backends.cuda.matmul.allow_tf32 = case.dtype == "tf32"
    try:
        with (
            mock.patch.object(triton.JITFunction, "run", compile_only),
            mock.patch.object(flash_blocks, "capability_of", return_value=divmod(case.arch, 10)),
        ):
            yield compiled
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def _launch(case: Case) -> None:
    """Call the kernels as training does: query, key and value are parts of one tensor, with grouped heads."""
    from ..train.kernels import cross_entropy, flash_backward, flash_forward

    dtype = getattr(torch, case.dtype.replace("tf32", "float32"))
    if not case.head_dim:
        logits, targets = torch.empty((16, VOCABULARY), dtype=dtype), torch.zeros(16, dtype=torch.long)
        cross_entropy.cross_entropy_(logits, targets, VOCABULARY, 1e-4, 1.0)
        return
    query, key, value = torch.empty((2, 256, 6, case.head_dim), dtype=dtype).split((4, 1, 1), dim=2)
    first = torch.zeros((2, 256), dtype=torch.int32) if case.documents else None
    out, lse = flash_forward.forward(query, key, value, first, 0.125)
    flash_backward.backward(torch.empty_like(out), query, key, value, out, lse, first, 0.125)


def _row(case: Case, kernel: Any, options: dict[str, Any]) -> Row:
    gpu, code, metadata = GPUS[case.arch], kernel.asm["ptx"], kernel.metadata
    name = metadata.name if case.head_dim else "cross_entropy"
    registers, spilled = resources(kernel.asm["cubin"])
    size = f"d={case.head_dim}{'' if case.documents else ' whole'}" if case.head_dim else f"V={VOCABULARY}"
    return {
        "case": f"{gpu.target} {case.dtype} {size} {name}", "device": f"{gpu.name}: compiled, not run",
        "kernel": name, "architecture": re.findall(r"\.target (\w+)", code)[0], "dtype": case.dtype,
        "block": "x".join(str(options[key]) for key in ("QUERIES", "KEYS", "BLOCK") if key in options),
        "warps": metadata.num_warps, "stages": metadata.num_stages, "registers": registers, "spilled": spilled,
        "shared": metadata.shared, "tensor_memory": metadata.tmem_size or 0,
        "tensor_cores": [opcode for opcode in TENSOR_CORES if opcode in code],
    }  # fmt: skip


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and spilled bytes per thread: all of the stack, because no kernel has a local array."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.check_output(command, text=True)
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match, text
    return int(match[1]), int(match[2])


def print_kernels(rows: list[Row]) -> None:
    print(ABOUT)
    for row in rows:
        figures = ("block", "warps", "stages", "registers", "spilled", "shared")
        print(row["case"], *(f"{name} {row[name]}" for name in figures), *row["tensor_cores"], sep=", ")
