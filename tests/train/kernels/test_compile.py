"""The kernels compile for sm_80, sm_90a and sm_100a without a GPU, and what they need fits the device.

A child process without Triton's interpreter calls the very functions that training calls, on CPU tensors, with Triton
told that the target is there and that launches are to be compiled only. So block sizes, flags and the types and
alignment of all arguments are those of a real launch. By hand, for the table of what each kernel takes:

    python tests/train/kernels/test_compile.py 90:bfloat16:128:first 80:float16:64
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen05"}
# Shared memory that one program may have, bytes (CUDA C++ Programming Guide, table of technical specifications); the
# launches of sm_80 serve consumer GPUs too, sm_86, 89 and 120, which have 99 KiB where an A100 has 163.
MOST_SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")


def compile_attention(arch: int, dtype: str, head_dim: int, first: bool) -> list[Any]:
    """What Triton compiles for one forward and backward: forward, delta, dK and dV, dQ. `tf32` is a way of fp32."""
    import torch
    import triton
    from isoflop.train.kernels import flash_backward, flash_blocks, flash_forward
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Absent:
        """A driver for a GPU that is not there; its number keeps the kernels of several targets apart."""

        def get_current_device(self) -> int:
            return arch

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

    compiled: list[Any] = []
    launch = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        started = time.perf_counter()
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel, time.perf_counter() - started))

    driver.set_active(Absent())  # type: ignore[arg-type]
    patches = [(triton.JITFunction, "run", compile_only)]
    patches += [(torch.backends.cuda.matmul, "allow_tf32", dtype == "tf32")]
    patches += [(flash_blocks, "capability_of", lambda _: divmod(arch, 10))]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        qkv = torch.zeros((2, 256, 6, head_dim), dtype=getattr(torch, dtype.replace("tf32", "float32")))
        query, key, value = qkv.split((4, 1, 1), dim=2)
        rows = torch.zeros((2, 256), dtype=torch.int32) if first else None
        out, lse = flash_forward.forward(query, key, value, rows, 0.125)
        flash_backward.backward(torch.zeros_like(out), None, query, key, value, out, lse, rows, 0.125)
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
    return compiled


def registers(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes a thread spilled or kept on its stack), by the cuobjdump that comes with Triton."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.check_output(command, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def table(cases: list[str]) -> Iterator[dict[str, Any]]:
    """A row a kernel of each case `architecture:dtype:head_dim[:first]`."""
    for case in cases:
        arch, dtype, head_dim, *first = case.split(":")
        for name, kernel, seconds in compile_attention(int(arch), dtype, int(head_dim), bool(first)):
            ptx = kernel.asm["ptx"]
            used, spilled = registers(kernel.asm["cubin"])
            target = re.search(r"\.target (\w+)", ptx)
            products = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
            yield {
                "case": case,
                "kernel": name,
                "target": target[1] if target else "",
                "bytes": len(kernel.asm["cubin"]),
                "shared": kernel.metadata.shared,
                "tensor_memory": kernel.metadata.tmem_size or 0,
                "warps": kernel.metadata.num_warps,
                "registers": used,
                "spilled": spilled,
                "products": [unit for unit, opcode in products.items() if opcode in ptx],
                "seconds": round(seconds, 1),
            }


def check(cases: list[str]) -> None:
    """Compiles the cases in a child and holds each kernel against what the device has."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, "--json", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 4 * len(cases)
    for row in rows:
        arch, dtype, *_ = row["case"].split(":")
        assert row["target"] == ARCHITECTURES[int(arch)]
        assert row["bytes"] > 0
        assert row["shared"] <= MOST_SHARED[int(arch)], row
        assert row["tensor_memory"] <= 512, row  # columns of a Blackwell multiprocessor
        # The rest lies around the inner loops, not in them.
        assert row["spilled"] <= 768, row
        if dtype not in ("float32", "tf32") and row["kernel"] != "delta_kernel":
            assert row["products"] == [TENSOR_CORES[int(arch)]], row


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kind_of_kernel_compiles_and_fits(arch: int) -> None:
    kinds = (
        "bfloat16:64 bfloat16:128:first float16:96:first bfloat16:256:first tf32:128:first float32:64 float16:16:first"
    )
    check([f"{arch}:{kind}" for kind in kinds.split()])


if __name__ == "__main__":
    as_json = sys.argv[1] == "--json"
    for row in table(sys.argv[1 + as_json :]):
        print(json.dumps(row) if as_json else "  ".join(f"{v!s:>8}" for v in row.values()), flush=True)
