"""What the compiler makes of our kernels for GPUs that are not there: `isoflop bench kernels --static`.

The very functions that training calls run on CPU tensors, with Triton told that the GPU is there and that launches are
to be compiled only: so blocks, flags and the types and alignment of arguments are those of a real launch.
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
from .attention import Shape
from .contenders import Row

VOCABULARY = 32768
ABOUT = (
    "What the compiler says of every launch; nothing was run. The model, no measurement, is the larger of FLOPs over "
    f"peak and bytes (each tensor once) over bandwidth: B=4, T=4096, width 2048, a vocabulary of {VOCABULARY}."
)


class Gpu(NamedTuple):
    """A GPU of each generation: bytes of shared memory and, dense, FLOP/s by type, and bytes a second.

    NVIDIA's data sheets of the A100 80 GB SXM, H100 SXM and HGX B200, by the GPU; shared memory from the CUDA C++
    Programming Guide, "Technical Specifications per Compute Capability".
    """

    name: str
    generation: str  # as flash_blocks.toml calls it
    target: str
    tensor_cores: str  # what their products are called in PTX
    most_shared: int  # of a program; launches of sm_80 serve sm_86, 89 and 120 too, which have 99 KiB and not 163
    shared: int  # of a multiprocessor
    rates: dict[str, float]
    bandwidth: float


KIB = 1024
GPUS = {
    80: Gpu(
        "A100", "ampere", "sm_80", "mma.sync", 99 * KIB, 164 * KIB,
        {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12}, 2.04e12,
    ),
    90: Gpu(
        "H100", "hopper", "sm_90a", "wgmma.mma_async", 227 * KIB, 228 * KIB,
        {"bfloat16": 989e12, "float16": 989e12, "tf32": 495e12, "float32": 67e12}, 3.35e12,
    ),
    100: Gpu(
        "B200", "blackwell", "sm_100a", "tcgen05.mma", 227 * KIB, 228 * KIB,
        {"bfloat16": 2250e12, "float16": 2250e12, "tf32": 1125e12, "float32": 75e12}, 8e12,
    ),
}  # fmt: skip
# Of a multiprocessor of each of them, by the same table; a program takes 1 KiB of shared memory beside its own.
REGISTERS, WARPS, PROGRAMS, TENSOR_MEMORY = 65536, 64, 32, 512
# Of each kernel of attention: products of half the T x T square, tensors of query's size read or written, and rows of
# one fp32 number a query.
WORK = {"forward_kernel": (2, 4, 1), "delta_kernel": (0, 2, 1), "key_kernel": (4, 6, 2), "query_kernel": (3, 5, 2)}


class Case(NamedTuple):
    """What is compiled: attention, forward and backward, or with a head size of 0 the loss. `tf32` is a way of fp32."""

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
    """A row a kernel of each case, as `Case.parse` reads it; none: all of CASES."""
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("bench kernels needs the package triton, without TRITON_INTERPRET=1 in the environment.")
    for case in [Case.parse(text) for text in cases] or CASES:
        with compiling_for(case) as compiled:
            _launch(case)
        for kernel, options in compiled:
            yield _row(case, kernel, options)


@contextmanager
def compiling_for(case: Case) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """While it lasts, what is launched on CPU tensors is compiled and kept here, with its options, and not run."""
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

    driver.set_active(absent)  # for good: without a GPU there is none to go back to
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
    """As training calls the kernels: query, key and value are parts of one tensor, of grouped heads."""
    from ..train.kernels import cross_entropy, flash_backward, flash_forward

    dtype = getattr(torch, case.dtype.replace("tf32", "float32"))
    if not case.head_dim:
        logits, targets = torch.empty((16, VOCABULARY), dtype=dtype), torch.zeros(16, dtype=torch.long)
        cross_entropy.cross_entropy_(logits, targets, VOCABULARY, 1e-4, 1.0)
        return
    query, key, value = torch.empty((2, 256, 6, case.head_dim), dtype=dtype).split((4, 1, 1), dim=2)
    first = torch.zeros((2, 256), dtype=torch.int32) if case.documents else None
    out, lse = flash_forward.forward(query, key, value, first, 0.125)
    flash_backward.backward(torch.empty_like(out), None, query, key, value, out, lse, first, 0.125)


def _row(case: Case, kernel: Any, options: dict[str, Any]) -> Row:
    gpu, code, metadata = GPUS[case.arch], kernel.asm["ptx"], kernel.metadata
    name = metadata.name if case.head_dim else "cross_entropy"
    registers, spilled = resources(kernel.asm["cubin"])
    target = re.search(r"\.target (\w+)", code)
    tensor_memory = metadata.tmem_size or 0
    programs, limit = occupancy(gpu, registers, metadata.shared, metadata.num_warps, tensor_memory)
    seconds, bound = model(gpu, case, name)
    size = f"d={case.head_dim}{'' if case.documents else ' whole'}" if case.head_dim else f"V={VOCABULARY}"
    block = "x".join(str(options[key]) for key in ("QUERIES", "KEYS", "BLOCK") if key in options)
    return {
        "case": f"{gpu.target} {case.dtype} {size} {name}",
        "device": f"{gpu.name}: compiled, not run",
        "kernel": name,
        "architecture": target[1] if target else "",
        "head_dim": case.head_dim,
        "dtype": case.dtype,
        "block": block,
        "warps": metadata.num_warps,
        "stages": metadata.num_stages,
        "registers": registers,
        "spilled": spilled,
        "shared": metadata.shared,
        "tensor_memory": tensor_memory,
        "programs": programs,
        "limit": limit,
        "tensor_cores": [opcode for opcode in ("mma.sync", "wgmma.mma_async", "tcgen05.mma") if opcode in code],
        "model_seconds": seconds,
        "model_bound": bound,
    }


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) a thread. No kernel has an array of its own, so all of its stack is spills."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.check_output(command, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def occupancy(gpu: Gpu, registers: int, shared: int, warps: int, tensor_memory: int) -> tuple[int, str]:
    """Programs that a multiprocessor holds at once, and of what there is no more."""
    # A warp's registers come 256 at a time, from one of four equal parts of the file.
    warps_with_registers = 4 * (REGISTERS // 4 // (-(-32 * registers // 256) * 256))
    room = {
        "registers": warps_with_registers // warps,
        "shared memory": gpu.shared // (shared + KIB),
        "warps": min(WARPS // warps, PROGRAMS),
    }
    if tensor_memory:
        room["tensor memory"] = TENSOR_MEMORY // tensor_memory
    limit = min(room, key=lambda what: room[what])
    return room[limit], limit


def model(gpu: Gpu, case: Case, kernel: str) -> tuple[float, str]:
    """Seconds that a kernel needs at least on the shape of ABOUT, and whether for its FLOPs or its bytes."""
    size = 2 if case.dtype in ("bfloat16", "float16") else 4
    shape = Shape(4, 4096, 2048 // max(case.head_dim, 1), 2048 // max(case.head_dim, 1), case.head_dim)
    products, tensors, rows = WORK.get(kernel, (0, 0, 0))
    flops = products * shape.forward_flops / 2
    moved = shape.tokens * (tensors * 2048 * size + rows * shape.heads * 4)
    if not case.head_dim:
        moved = shape.tokens * 2 * VOCABULARY * size
    times = {"FLOPs": flops / gpu.rates[case.dtype], "bytes": moved / gpu.bandwidth}
    return max(times.values()), max(times, key=lambda what: times[what])


def print_kernels(rows: list[Row]) -> None:
    """The rows as a table."""
    from ..sweeps.terminal import console, plain_table

    plain = ("kernel", "block", "warps", "stages", "registers", "spilled", "shared", "programs", "limit")
    table = plain_table(["", *plain, "tensor cores", "model, ms"], left=("", "kernel", "limit", "tensor cores"))
    for row in rows:
        where, _, _ = row["case"].rpartition(" ")
        cores = ", ".join(row["tensor_cores"])
        time = f"{row['model_seconds'] * 1e3:.3g}, {row['model_bound']}"
        table.add_row(where, *(str(row[key]) for key in plain), cores, time)
    screen = console()
    screen.print(ABOUT)
    screen.print(table)
