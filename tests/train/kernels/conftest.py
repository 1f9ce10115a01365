"""Products of bf16 numbers as a GPU computes them."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def bf16_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter multiply bf16 numbers in fp32, and round fp32 to the nearest bf16.

    It multiplies their bits as integers, and truncates where a GPU rounds. The kernels run unchanged.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32)
        return dot(self, a, b, *rest)

    def rounded_cast(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", widened_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded_cast)
