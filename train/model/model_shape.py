"""Which shapes a model may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UserError

if TYPE_CHECKING:
    from ..config import ModelConfig


def check_model(model: ModelConfig) -> None:
    """Refuses a shape that cannot be built.

    Raises:
        UserError: one sentence with the field, the value and what would be accepted.
    """
    for name in ("width", "depth", "heads", "vocab_multiple"):
        if getattr(model, name) < 1:
            raise UserError(f"model.{name} is {getattr(model, name)}; it must be 1 or more")
    if model.width % model.heads:
        divisors = ", ".join(str(d) for d in range(1, model.width + 1) if model.width % d == 0)
        raise UserError(f"model.heads is {model.heads}; it must divide model.width {model.width}: {divisors}")
    if model.head_dim % 2:
        raise UserError(
            f"model.heads is {model.heads}; width {model.width} / heads must be even for rotary positions, "
            f"it is {model.head_dim}"
        )
    if model.num_kv_heads < 1 or model.heads % model.num_kv_heads:
        raise UserError(f"model.kv_heads is {model.kv_heads}; it must divide model.heads {model.heads}")
    for name in ("hidden", "vocab_size"):
        value = getattr(model, name)
        if value is not None and value < 1:
            raise UserError(f"model.{name} is {value}; it must be 1 or more")
    for name in ("rope_theta", "norm_eps"):
        if not getattr(model, name) > 0:
            raise UserError(f"model.{name} is {getattr(model, name)}; it must be greater than 0")
