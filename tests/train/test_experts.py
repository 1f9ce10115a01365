"""A mixture of experts equals a loop over its experts in outputs, gradients and FLOPs, and balances its load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from isoflop.train import loop
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from isoflop.train.errors import UserError
from isoflop.train.files import read_json_lines
from isoflop.train.flops import count_parameters, training_flops_per_token
from isoflop.train.model.experts import MoE, balance_of, outer, product
from isoflop.train.model.gpt import GPT
from isoflop.train.model.parametrization import build_model
from isoflop.train.model.shape import model_shape
from isoflop.train.optimizer.optimizer import Step
from isoflop.train.optimizer.sign import sign
from isoflop.train.planner.validation import validate
from small_runs import forty_steps
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from zero_buffers import engine

MIXED = ModelConfig(
    width=24, depth=3, heads=2, vocab_size=61, experts=6, experts_per_token=2, expert_hidden=10, shared_experts=1,
    dense_layers=1, balance_loss=0.02, router_z_loss=0.003,
)  # fmt: skip


def mixture(seed: int, **changes: Any) -> GPT:
    """Build a float64 model whose biases decide choices of experts."""
    torch.manual_seed(seed)
    gpt = build_model(replace(MIXED, **changes), OptimizerConfig(base_width=16), 12, seed).double()
    for name, parameter in gpt.named_parameters():
        if "router" in name:
            torch.nn.init.normal_(parameter, std=0.3)
        elif "head" in name or "embedding" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    return gpt


def one_by_one(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's output for x (batch, time, width) and its penalty, running every expert on every token."""
    config, router, experts = moe.router.config, moe.router, moe.experts
    logits = x @ router.weight.T
    scores = logits.sigmoid() if config.gate == "sigmoid" else logits.softmax(-1)
    ranking = scores if router.balance is None else scores + router.balance
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(-1, ranking.sort(-1, descending=True).indices[..., : config.experts_per_token], True)
    gates = scores * chosen
    if config.gates_normalised:
        gates = gates / gates.sum(-1, keepdim=True)
    y = torch.zeros_like(x) if moe.shared is None else moe.shared(x)
    hidden = config.moe_hidden
    for number in range(config.experts):
        gate, up = experts.gate_up.weight[2 * hidden * number : 2 * hidden * (number + 1)].split(hidden)
        down = experts.down.weight[config.width * number : config.width * (number + 1)]
        y = y + gates[..., number, None] * ((F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    load = chosen.double().mean(1) * config.experts / config.experts_per_token
    probability = (scores / scores.sum(-1, keepdim=True)).mean(1)
    penalty = config.balance_loss * (load * probability).sum(-1).mean()
    return y, penalty + config.router_z_loss * logits.exp().sum(-1).log().square().mean()


class OneByOne(torch.nn.Module):
    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe, self.penalty = moe, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y, self.penalty = one_by_one(self.moe, x)
        return y


def reference(gpt: GPT) -> GPT:
    """Copy a model, with each mixture replaced by a loop over its experts."""
    other = copy.deepcopy(gpt)
    for block in other.blocks:
        if isinstance(block.mlp, MoE):
            block.mlp = OneByOne(block.mlp)  # type: ignore[assignment]
    return other


def penalties(gpt: GPT) -> Tensor:
    return torch.stack([block.mlp.penalty for block in gpt.blocks if isinstance(block.mlp, OneByOne)]).sum()


@pytest.mark.parametrize(
    ("gate", "normalised", "changes"),
    [
        ("sigmoid", True, {}),
        ("sigmoid", False, {"shared_experts": 0, "balance_rate": 0.0}),
        ("softmax", True, {"experts_per_token": 6}),
        ("softmax", False, {}),
    ],
)
def test_loss_and_every_gradient_are_those_of_a_loop_over_experts(
    gate: str, normalised: bool, changes: dict[str, Any]
) -> None:
    gpt = mixture(3, gate=gate, gates_normalised=normalised, **changes)
    other = reference(gpt)
    tokens = torch.randint(61, (5, 13))
    loss, expected = gpt.loss(tokens[:, :-1], tokens[:, 1:]), other.loss(tokens[:, :-1], tokens[:, 1:])
    (0.37 * loss).backward()
    (0.37 * (expected + penalties(other))).backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    gradients = {name.replace("mlp.moe.", "mlp."): p.grad for name, p in other.named_parameters()}
    for name, parameter in gpt.named_parameters():
        if not name.endswith("balance"):
            # Float64: sums over 60 tokens in other orders.
            torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-13, rtol=1e-9, msg=name)


def test_grouped_products_are_pytorchs_own() -> None:
    """Compare the path of GPUs with that of CPUs, including experts without rows."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([5, 0, 17, 2])
    x, weights = torch.randn(24, 16, generator=generator), torch.randn(4, 16, 32, generator=generator)
    y = torch.randn(24, 32, generator=generator)
    offsets, ends = counts.cumsum(0).to(torch.int32), [0, 5, 5, 22, 24]
    by_expert = torch.cat([x[a:b] @ weights[e] for e, (a, b) in enumerate(pairwise(ends))])
    torch.testing.assert_close(product(x, weights, offsets, torch.empty(24, 32)), by_expert)
    torch.testing.assert_close(product(x[5:22], weights, 2, torch.empty(17, 32)), by_expert[5:22])
    grouped, expected = torch.ones(4, 16, 32), torch.zeros(4, 16, 32)
    outer(x, y, offsets, grouped)
    for e, (a, b) in enumerate(pairwise(ends)):
        outer(x[a:b], y[a:b], e, expected)
    torch.testing.assert_close(grouped, expected)
    assert not grouped[1].any()


def test_the_gradient_of_a_bias_is_the_excess_of_its_expert() -> None:
    gpt, tokens = mixture(6), torch.randint(61, (5, 13))
    gpt.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    loads = gpt.loads()
    assert loads.shape == (2, 6)
    assert loads.sum(-1).tolist() == [120, 120]  # 60 tokens choose 2
    for load, router in zip(loads, [moe.router for moe in gpt.mixtures], strict=True):
        assert torch.equal(router.balance.grad, load.double() - 20)
    assert gpt.loads() is None


def test_a_bias_takes_steps_of_one_size_against_the_excess_of_its_expert() -> None:
    bias, excess = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([-3.0, 0.0, 0.25, 200.0])
    for skipped in (0.0, 1.0):
        rate, zero = torch.tensor(0.5), torch.zeros(())
        sign(bias, excess, [], Step(rate, 0.0, 0.0, zero, None, torch.tensor(skipped)), OptimizerConfig())
        assert bias.tolist() == [1.5, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(("gate", "normalised"), [("sigmoid", True), ("softmax", False)])
def test_experts_are_chosen_in_fp32_whatever_the_type_of_the_tokens(gate: str, normalised: bool) -> None:
    router = mixture(7, gate=gate, gates_normalised=normalised).bfloat16().mixtures[0].router
    tokens = torch.randn(1200, 24).bfloat16()
    routing, _ = router(tokens, 12)
    logits = tokens.float() @ router.weight.float().T
    scores = logits.sigmoid() if gate == "sigmoid" else logits.softmax(-1)
    chosen = (scores + router.balance.float()).topk(2).indices.sort(-1).values
    assert torch.equal(torch.arange(6).repeat_interleave(routing.counts)[routing.rows], chosen)
    gates = scores.gather(1, chosen)
    gates = gates / gates.sum(-1, keepdim=True) if normalised else gates
    assert torch.equal(routing.gates[routing.rows], gates.bfloat16())


def test_the_norm_of_the_gradient_is_that_of_the_loss_and_counts_no_bias() -> None:
    weights, tokens = mixture(8, balance_rate=0.5).float(), torch.randint(61, (5, 9))
    gpt, zero = engine(weights.config, OptimizerConfig(base_width=16), torch.float32)
    zero.load((name, p.detach()) for name, p in weights.named_parameters())
    weights.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    gradients = [
        p.grad for name, p in weights.named_parameters() if p.grad is not None and not name.endswith("balance")
    ]
    with zero.gradients.micro_batch(last=True):
        loss = gpt.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    norm = zero.step(loss.detach()).norm.item()
    assert norm == pytest.approx(torch.cat([grad.flatten() for grad in gradients]).norm().item(), rel=1e-5)


def test_the_balance_of_extreme_loads() -> None:
    balance = balance_of(torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0]]))
    assert balance["load_max"] == [1.0, 4.0, 2.0]
    assert balance["load_entropy"] == pytest.approx([1.0, 0.0, 0.5])
    assert balance["dead_experts"] == [0, 3, 2]


@pytest.mark.parametrize("seed", [0, 3])
def test_flops_are_those_of_the_loop_where_the_load_is_balanced(seed: int) -> None:
    """Send each token through any k experts; the counter sees every product of that loop."""
    config = replace(MIXED, dense_layers=seed % 2, shared_experts=seed // 2, experts=8, experts_per_token=1 + seed)
    gpt, batch, time = build_model(config, OptimizerConfig(), 16, 0), 3, 16
    rows = batch * time * config.experts_per_token // config.experts

    class Chosen(torch.nn.Module):
        def __init__(self, moe: MoE) -> None:
            super().__init__()
            self.moe = moe

        def forward(self, x: Tensor) -> Tensor:
            flat, moe = x.flatten(0, -2), self.moe
            y = flat * (flat @ moe.router.weight.T).sum()
            for number in range(config.experts):
                gate_up = moe.experts.gate_up.weight.view(config.experts, -1, config.width)[number]
                down = moe.experts.down.weight.view(config.experts, config.width, -1)[number]
                inner = flat[:rows] @ gate_up.T
                y = y + (inner[:, : config.moe_hidden] @ down.T).sum()
            return y.view(x.shape) + (0.0 if moe.shared is None else moe.shared(x))

    for block in gpt.blocks:
        if isinstance(block.mlp, MoE):
            block.mlp = Chosen(block.mlp)  # type: ignore[assignment]
    tokens = torch.randint(61, (batch, time))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the counter sees its products
        gpt(tokens).logsumexp(-1).sum().backward()
    assert counter.get_total_flops() == training_flops_per_token(config, time) * batch * time


def test_active_parameters_are_those_of_the_chosen_experts() -> None:
    few = replace(MIXED, experts=2)
    # A router of fewer experts is smaller, and so are the biases.
    smaller = (MIXED.experts - few.experts) * (MIXED.width + 1) * (MIXED.depth - MIXED.dense_layers)
    assert count_parameters(MIXED).N_active == count_parameters(few).N_total + smaller
    dense = replace(MIXED, experts=0)
    assert count_parameters(dense).N_active == count_parameters(dense).N_total
    for config in (MIXED, dense):  # the hidden units that one token uses
        block = model_shape(config).block
        last = [parameter for parameter in block if parameter.name.startswith("mlp") and parameter.role == "last"]
        assert model_shape(config).inner * config.width == sum(parameter.active for parameter in last)


@pytest.fixture
def config(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    config = forty_steps(small_corpus(64 + 16))
    config.model = replace(config.model, experts=8, experts_per_token=2, expert_hidden=16, balance_rate=0.05)
    return config


def test_a_run_balances_its_load_and_goes_on_as_if_it_had_never_stopped(config: RunConfig, tmp_path: Path) -> None:
    undisturbed = loop.train(config, tmp_path / "alone")
    records = read_json_lines(tmp_path / "alone" / "metrics.jsonl")
    assert all(len(record["load_max"]) == config.model.depth for record in records)
    unbiased = replace(config.model, balance_rate=0.0)
    loop.train(replace(config, model=unbiased), tmp_path / "unbiased")
    unbalanced = read_json_lines(tmp_path / "unbiased" / "metrics.jsonl")
    assert records[-1]["load_entropy"][0] > unbalanced[-1]["load_entropy"][0]
    assert undisturbed["N_active"] < undisturbed["N_total"]
    assert undisturbed["flops_6nd"] == 6.0 * undisturbed["N_active"] * undisturbed["D"]

    interrupted = replace(config, checkpoint=replace(config.checkpoint, every_steps=15, at_steps=[15]))
    loop.train(interrupted, tmp_path / "resumed")
    for step in (30, 40):
        for file in (tmp_path / "resumed" / "checkpoints").glob(f"step_{step}*"):
            file.rename(file.with_name(f"gone_{step}"))
    (tmp_path / "resumed" / "summary.json").unlink()
    again = loop.train(interrupted, tmp_path / "resumed")
    assert again["val_loss"] == undisturbed["val_loss"]  # biases and moments are identical


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"experts": 1}, "model.experts is 1"),
        ({"experts_per_token": 9}, "model.experts_per_token is 9"),
        ({"experts_per_token": 1}, "model.gates_normalised must be false"),
        ({"dense_layers": 1}, "model.dense_layers is 1"),
        ({"gate": "relu"}, "model.gate is 'relu'"),
        ({"balance_rate": -1.0}, "model.balance_rate is -1.0"),
        ({"expert_hidden": 17}, "parallel.tp is 2; it must divide model.expert_hidden"),
    ],
)
def test_a_mixture_that_cannot_be_trained_is_refused(config: RunConfig, changes: dict[str, Any], problem: str) -> None:
    config.parallel.tp = 2
    with pytest.raises(UserError) as caught:
        validate(replace(config, model=replace(config.model, **changes)))
    assert problem in str(caught.value)
