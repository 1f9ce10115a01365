"""Steps of one size against a gradient's sign, for the biases of routers (Wang et al. 2024, arXiv 2408.15664)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def sign(weight: Tensor, gradient: Tensor, *, rate: Any, skipped: Tensor, **_: Any) -> None:
    """One update of a vector, as `adamw`, whose other settings do not matter."""
    weight.sub_(gradient.sign() * (rate * (1 - skipped)))
