"""Activations move as far at every width and depth: the coordinate check of `benchmarks/coordinates.py`."""

from __future__ import annotations

import pytest
from isoflop.benchmarks.coordinates import measure, slopes
from isoflop.train.config import OptimizerConfig


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "tied"), [("width", False), ("depth", True)])
def test_activations_and_their_changes_are_flat_over_width_and_depth(axis: str, tied: bool) -> None:
    optimizer = OptimizerConfig(learning_rate=3e-3, base_width=64, base_depth=4)
    found = slopes(measure(axis, optimizer, tied, steps=5, seeds=8))
    for (name, what), slope in found.items():
        limit = 0.05
        if axis == "depth" and "middle" in name:
            limit = 0.12  # half of a few blocks is no half of many: the slope falls as 1 / depth
        if axis == "depth" and tied and name.endswith("of the stream"):
            # A tied table starts the stream at 1/8, which early branches drown; what norms make of it is flat.
            limit = 0.3
        assert abs(slope) <= limit, (name, what)


@pytest.mark.slow
def test_without_depth_transfer_deep_models_move_further() -> None:
    width_alone = OptimizerConfig(learning_rate=3e-3, base_width=64)
    found = slopes(measure("depth", width_alone, False, steps=5, seeds=2))
    assert found["end of the stream", "change"] > 0.3
