"""Every launch compiles for sm_80, sm_90a and sm_100a without a GPU, spills nothing, fits, and uses tensor cores.

A child process without Triton's interpreter compiles them through `isoflop bench kernels --static`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from covering import covering
from isoflop.bench.kernels import GPUS, TENSOR_MEMORY, Case, Row, print_kernels
from isoflop.train.errors import UserError
from isoflop.train.kernels.flash import HEAD_DIMS

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")


def check(cases: list[str]) -> list[Row]:
    """Compile the cases in a child process, and compare each kernel with the limits of its device."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "isoflop", "bench", "kernels", "--static", "--json"]
    command += [argument for case in cases for argument in ("--case", case)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    rows: list[Row] = json.loads(process.stdout)
    assert len(rows) == sum(1 if case.endswith("loss") else 4 for case in cases)
    for row in rows:
        (gpu,) = (gpu for gpu in GPUS.values() if gpu.target == row["architecture"])
        assert row["spilled"] == 0, row
        assert row["shared"] <= gpu.most_shared, row
        assert row["tensor_memory"] <= TENSOR_MEMORY, row
        if row["kernel"] in ("delta_kernel", "cross_entropy") or row["dtype"] == "float32":
            assert row["tensor_cores"] == [], (
                row
            )  # no products, or exact ones in fp32, for which there are no tensor cores
        elif row["dtype"] == "tf32":
            assert row["tensor_cores"], row  # small blocks of a large head take mma.sync everywhere
        else:
            assert row["tensor_cores"] == [gpu.tensor_cores], row
    return rows


EVERY = list(itertools.product(GPUS, ("bfloat16", "float16", "tf32", "float32"), (*HEAD_DIMS, "loss"), ("", ":whole")))
LAUNCHES = [launch for launch in EVERY if launch[2:] != ("loss", ":whole")]
MOST_PAIRS = covering(LAUNCHES)[:20]  # launches with most new pairs come first


@needs_triton
@pytest.mark.parametrize(
    "launches",
    [
        pytest.param(MOST_PAIRS, id="most pairs of settings", marks=pytest.mark.slow),
        pytest.param(LAUNCHES, id="every one", marks=pytest.mark.exhaustive),
    ],
)
def test_launches_spill_nothing_and_use_tensor_cores(
    launches: Sequence[tuple[int, str, int | str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    print_kernels(check([f"{arch}:{dtype}:{size}{mask}" for arch, dtype, size, mask in launches]))
    assert "nothing was run" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["70:bfloat16:64", "80:int8:64", "80:bfloat16:loss:whole", ""])
def test_a_case_that_is_none_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UserError, match="it must be ARCHITECTURE:TYPE:HEAD_SIZE"):
        Case.parse(text)
