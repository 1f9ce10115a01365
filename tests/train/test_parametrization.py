"""Groups and initial sizes for which learning rates transfer over widths; `test_coordinates.py` measures it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.model.parametrization import build_model, parameter_groups


@pytest.mark.parametrize("seed", range(6))
def test_groups_hold_every_tensor_once_with_the_rates_of_the_table(seed: int) -> None:
    generator = random.Random(seed)
    model = ModelConfig(
        width=generator.choice([8, 32, 128]), depth=2, heads=2, vocab_size=20,
        qk_norm=generator.random() < 0.5, tied_embeddings=seed % 2 == 0,
        qkv_bias=seed % 3 == 0, experts=4 * (seed % 2), balance_rate=0.004,
    )  # fmt: skip
    optimizer = OptimizerConfig(
        learning_rate=0.01, base_width=32, width_exponent=generator.choice([0.0, 0.5, 1.0]),
        embedding_multiplier=3.0, weight_decay=0.2,
    )  # fmt: skip
    gpt = build_model(model, optimizer, 8, 0)
    groups = {group.name: group for group in parameter_groups(gpt, optimizer)}
    assert {"routers", "balance"} <= set(groups) or not model.experts
    grouped = [id(p) for group in groups.values() for p in group.parameters]
    assert sorted(grouped) == sorted(id(p) for p in gpt.parameters())
    assert len(set(grouped)) == len(grouped)

    names = {id(p): name for name, p in gpt.named_parameters()}
    group_of = {names[id(p)]: group for group in groups.values() for p in group.parameters}
    for name, group in group_of.items():
        if name.endswith("balance"):
            assert (group.optimizer, group.learning_rate, group.weight_decay) == ("sign", 0.004, 0.0)
            continue
        is_matrix = not name.startswith("embedding") and "norm" not in name and "bias" not in name
        assert group.weight_decay == (0.2 if is_matrix else 0.0), name
        transfer = (32 / model.width) ** optimizer.width_exponent
        assert group.learning_rate == pytest.approx(0.01 * transfer if is_matrix else 0.03, rel=1e-15), name
    if not model.tied_embeddings:
        assert group_of["head.weight"].name == "matrices"


def test_initial_sizes_are_those_of_the_table() -> None:
    model = ModelConfig(width=256, depth=4, heads=4, vocab_size=512, tied_embeddings=False, qkv_bias=True)
    gpt = build_model(model, OptimizerConfig(base_width=64), 8, 0)
    branch = 1 / (2 * 4) ** 0.5
    expected = {
        "embedding.weight": 1.0,
        "blocks.3.attention.qkv.weight": 1 / 16,
        "blocks.3.attention.out.weight": branch / 16,
        "blocks.3.mlp.gate_up.weight": 1 / 16,
        "blocks.3.mlp.down.weight": branch / model.mlp_hidden**0.5,
    }
    weights = dict(gpt.named_parameters())
    for name, std in expected.items():
        # A sample of n normals estimates its deviation to 1 / sqrt(2 n), below 0.3 % here: five of those.
        assert weights[name].std().item() == pytest.approx(std, rel=0.014), name
    assert weights["head.weight"].abs().max() == 0
    assert weights["blocks.3.attention.qkv_bias"].abs().max() == 0
    mixed = build_model(replace(model, depth=1, experts=32), OptimizerConfig(base_width=64), 8, 0).mixtures[0]
    assert mixed.router.weight.std().item() == pytest.approx(8 / 256, rel=0.04)  # of 8,192
    assert mixed.experts.gate_up.weight.std().item() == pytest.approx(1 / 16, rel=0.014)
    assert mixed.router.balance.abs().max() == 0
    model.tied_embeddings = True
    tied = build_model(model, OptimizerConfig(base_width=64), 8, 0)
    assert tied.embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.014)
    assert tied.output_scale == 64 / 256
