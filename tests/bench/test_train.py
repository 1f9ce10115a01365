"""The benchmark of the training step: the peer is the same model, and the rows state what was measured."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from bench_rows import checked_rows
from isoflop.bench import train as bench_train
from isoflop.bench.timing import measuring_on
from isoflop.bench.train import LlamaStep, bench_config
from isoflop.train.data.loader import TrainStream
from isoflop.train.data.shards import prepare
from isoflop.train.flops import count_parameters
from isoflop.train.model.gpt import GPT
from isoflop.train.model.parametrization import build_model
from torch import Tensor


def as_llama(gpt: GPT) -> dict[str, Tensor]:
    """Return our weights under transformers' names, with fused matrices split."""
    weights = gpt.state_dict()
    renamed = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["norm.weight"] * gpt.output_scale,
        "lm_head.weight": weights["head.weight"],
    }
    for name, weight in weights.items():
        if not name.startswith("blocks."):
            continue
        _, index, part = name.split(".", 2)
        theirs = {
            "attention_norm.weight": ["input_layernorm"],
            "mlp_norm.weight": ["post_attention_layernorm"],
            "attention.qkv.weight": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "attention.out.weight": ["self_attn.o_proj"],
            "mlp.gate_up.weight": ["mlp.gate_proj", "mlp.up_proj"],
            "mlp.down.weight": ["mlp.down_proj"],
        }[part]
        for piece, other in zip(weight.chunk(len(theirs)), theirs, strict=True):
            renamed[f"model.layers.{index}.{other}.weight"] = piece
    return renamed


def test_the_peer_is_the_same_model(tmp_path: Path) -> None:
    config = bench_config("fp32", tmp_path, compiled=False, size="tiny")
    gpt = build_model(config.model, config.optimizer, config.data.sequence_length, seed=0)
    rows = torch.from_numpy(TrainStream(prepare(config.data), 16, seed=0).batch(0, 4))
    peer = LlamaStep(config, rows, torch.float32)
    peer.llama.load_state_dict(as_llama(gpt), strict=True)
    ours = gpt.loss(rows[:, :-1], rows[:, 1:])
    # Two micro-batches, otherwise as ours: only the order of fp32 sums differs.
    assert peer().item() == pytest.approx(ours.item(), rel=1e-6)
    assert sum(p.numel() for p in peer.llama.parameters()) == count_parameters(config.model).N_total
    assert peer().item() < ours.item()  # it trains


@pytest.mark.parametrize("size", ["124M", "1.3B"])
def test_sizes_have_the_parameters_that_their_names_say(size: str, tmp_path: Path) -> None:
    N = count_parameters(bench_config("bf16", tmp_path, compiled=False, size=size).model).N_total
    assert pytest.approx(float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]], rel=0.06) == N


@pytest.mark.slow
def test_rows_of_the_sizes_for_gpus_have_the_format_of_every_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_train, "measuring_on", functools.partial(measuring_on, threads=1))
    rows = checked_rows(bench_train.bench_train("cpu", rounds=2, steps=1, sizes=["tiny"], compiled=False))
    row = rows[0]
    assert row["ratio"] == row["ours"] / row["peer"]
    assert row["mfu"] / row["peer_mfu"] == pytest.approx(row["ratio"])
    assert "LlamaForCausalLM" in row["peer_name"]
    assert len(rows) == 2
    assert "T=16, B=4" in row["case"]
