"""Steps with number formats: against plain arithmetic in float64, on every mesh, resumed, and evaluated afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from isoflop.evaluate.checkpoint import worst_windows
from isoflop.evaluate.inference.generate import stream
from isoflop.train import precision
from isoflop.train.checkpoint.checkpoint import load_for_evaluation
from isoflop.train.config import DataConfig, QuantizationConfig, RunConfig
from isoflop.train.errors import UserError
from isoflop.train.job.fork import run_ranks
from isoflop.train.loop import Stopped, train
from isoflop.train.model.parametrization import build_model
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.planner.validation import validate
from isoflop.train.quantization.formats import block_of, fake_quantize
from isoflop.train.quantization.linear import quantize
from meshes import assert_same, mesh_of, take_steps
from small_runs import assert_same_run, forty_steps, stop_after
from torch import Tensor, nn

MIXED = QuantizationConfig("int8", "mxfp8", "mxfp4", block=8, rounding="stochastic", hadamard=True)
EVERY = [QuantizationConfig(*3 * [name]) for name in ("fp8_e5m2", "mxfp4", "nvfp4", "ternary")]
MLA = {"attention": "mla", "kv_heads": None, "kv_rank": 16, "rotary_size": 8, "query_rank": 16}


@pytest.fixture
def config(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    config = replace(forty_steps(small_corpus(256)), tokens=6 * 128, log_every=1, quantization=copy.deepcopy(MIXED))
    config.model = replace(config.model, width=32, depth=2, heads=4, kv_heads=2, hidden=64)
    config.optimizer = replace(config.optimizer, batch_size=8, learning_rate=1e-3, eps=1e-4)
    config.parallel.threads = 1
    return config


def plain(weight: Tensor, settings: QuantizationConfig, x: Tensor) -> Tensor:
    """Multiply with rounded factors, and let the gradient of the result be rounded."""

    def rounded(x: Tensor, format: str) -> Tensor:
        block = block_of(format, x.shape[-1], settings.block)
        return fake_quantize(x, format, block, hadamard=settings.hadamard)

    x = x + (rounded(x, settings.activations) - x).detach()
    y = x @ (weight + (rounded(weight, settings.weights) - weight).detach()).T
    y.register_hook(lambda grad: rounded(grad, settings.gradients))
    return y


@pytest.mark.parametrize("settings", [*EVERY, replace(MIXED, rounding="nearest")], ids=lambda value: value.weights)
def test_gradients_are_those_of_plain_arithmetic_in_float64(config: RunConfig, settings: QuantizationConfig) -> None:
    config.quantization, config.model = settings, replace(config.model, **(MLA if settings.block else {}))
    tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(0))
    gradients = []
    for ours in (False, True):
        gpt = build_model(config.model, config.optimizer, 16, seed=0).double()
        for module in gpt.blocks.modules():
            if isinstance(module, nn.Linear) and not ours:
                module.forward = partial(plain, module.weight, settings)
        if ours:
            quantize(gpt, config, {}, 0, torch.device("cpu"))
        gpt.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append({name: parameter.grad for name, parameter in gpt.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=0, atol=1e-9, msg=name)


MESHES: list[dict[str, Any]] = [
    {"tp": 2}, {"tp": 2, "sequence_parallel": False, "recompute": "selective"}, {"dp": 2, "zero": 3}, {"cp": 2},
    {"pp": 2, "micro_batch_size": 2, "recompute": "full"},
]  # fmt: skip


def test_steps_on_meshes_are_those_of_one_process(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where another order of a sum almost never turns a rounding."""
    monkeypatch.setitem(precision._DTYPES, "fp32", torch.float64)
    others = [
        replace(config, quantization=QuantizationConfig(gradients="nvfp4", activations="int4", block=8)),
        replace(config, model=replace(config.model, **MLA)),
    ]
    cases = [(config, mesh) for mesh in MESHES] + [(other, mesh) for other in others for mesh in MESHES[:1]]
    runs = [replace(case, parallel=replace(case.parallel, **mesh)) for case, mesh in cases]
    for run in runs:
        validate(run)
    by_rank = run_ranks(2, lambda: [take_steps(run, mesh_of(run.parallel), 2) for run in runs], timeout=300.0)
    alone = {id(case): take_steps(case, Mesh(), 2) for case in (config, *others)}
    for (case, mesh), *answers in zip(cases, *by_rank, strict=True):
        assert_same(answers, alone[id(case)], 1e-8, mesh)
    few = replace(config, parallel=replace(config.parallel, micro_batch_size=2, recompute="full"))
    assert_same([take_steps(few, Mesh(), 2)], alone[id(config)], 1e-8, "accumulation")
    other = take_steps(replace(config, quantization=replace(MIXED, rounding="nearest")), Mesh(), 2)
    assert other[0] != alone[id(config)][0]


def test_a_stopped_run_goes_on_with_the_same_bits(config: RunConfig, tmp_path: Path) -> None:
    summary = train(config, tmp_path / "one", report=lambda line: None)
    formats = [summary[f"{name}_format"].partition("+")[0] for name in ("weights", "activations", "gradients")]
    assert formats == ["int8", "mxfp8", "mxfp4"]
    with pytest.raises(Stopped):
        train(config, tmp_path / "two", stop_after(3), report=lambda line: None)
    train(config, tmp_path / "two", report=lambda line: None)
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("model", [{}, MLA], ids=["gqa", "mla"])
def test_evaluation_rounds_as_training_did(config: RunConfig, model: dict[str, Any], tmp_path: Path) -> None:
    config.model = replace(config.model, **model)
    summary = train(config, tmp_path, report=lambda line: None)
    loaded = load_for_evaluation(tmp_path)
    assert worst_windows(loaded)["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
    gpt, text = loaded.model.double(), [5, 77, 130, 9, 200]
    with torch.no_grad():
        greedy = list(text)
        for _ in range(6):
            greedy.append(int(gpt(torch.tensor([greedy]))[0, -1].argmax()))
    assert list(stream(gpt, text, 6, max_length=16)) == greedy[5:]


@pytest.mark.parametrize(
    ("quantization", "rest", "field"),
    [
        ({"block": 32}, {}, "quantization.block"),
        ({"weights": "int8", "hadamard": True}, {"hidden": 88}, "quantization.block"),
        ({"gradients": "int4", "block": 24, "hadamard": True}, {}, "quantization.block"),
        ({"weights": "int8", "rounding": "stochastic"}, {}, "quantization.rounding"),
        ({"hadamard": True}, {}, "quantization.hadamard"),
        ({"weights": "int8"}, {"experts": 4, "kv_heads": None}, "quantization.weights"),
        ({"weights": "int8"}, {"tp": 2}, "parallel.tp"),
        ({"gradients": "int8", "block": 16}, {"tp": 2}, "parallel.tp"),  # 16 rows of keys over two ranks
        ({"gradients": "int8", "block": 2}, {"tp": 4}, "parallel.tp"),  # a head of keys on two ranks each
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    config: RunConfig, quantization: dict[str, Any], rest: dict[str, Any], field: str
) -> None:
    config.quantization, rest = QuantizationConfig(**quantization), dict(rest)
    config.parallel.tp = rest.pop("tp", 1)
    config.model = replace(config.model, **rest)
    with pytest.raises(UserError, match=rf"^{field} is ") as raised:
        validate(config)
    assert "\n" not in str(raised.value)
    assert "; it must " in str(raised.value)
