"""The optimizers by `optimizer.kind`. No torch, so that planning can read what each stores and costs.

To add one, write its file with options and declaration, and register both here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..fields import later
from .adamw import ADAMW
from .muon import MUON, MuonOptions
from .optimizer import Optimizer, Options
from .sign import SIGN

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": ADAMW,
    "sign": SIGN,  # updates the biases of routers, for every kind
    "muon": MUON,
}
KINDS = tuple(kind for kind in OPTIMIZERS if kind != "sign")


def kind_of(role: str, kind: str) -> str:
    return next((name for name in ("sign", kind) if role in OPTIMIZERS[name].roles), "adamw")


@dataclass
class OptimizerConfig(MuonOptions, Options):
    """The group `optimizer` of a config: common options, and the options of each optimizer."""

    kind: Annotated[str, KINDS] = later("adamw")  # updates the parameters with its roles; AdamW updates all others
