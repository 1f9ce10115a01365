"""Recomputed activations give the same gradients to the bit, keep the stated bytes, and repeat no product in vain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.job.fork import run_ranks
from isoflop.train.model.block import rotary_angles, rotary_turn, swiglu
from isoflop.train.model.gpt import GPT, Block
from isoflop.train.model.parametrization import empty_model
from isoflop.train.model.recompute import recomputed
from isoflop.train.parallel import buckets
from isoflop.train.parallel.mesh import build_mesh
from isoflop.train.parallel.parallelize import parallelize
from isoflop.train.parallel.zero import Zero
from random_models import random_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TIME, BATCH = 12, 4
CPU = torch.device("cpu")
MODES = ("none", "selective", "full")
VARIANTS: list[dict[str, Any]] = [
    {}, {"kv_heads": 2, "qk_norm": True, "tied_embeddings": False}, {"kv_heads": 2, "qkv_bias": True, "head_size": 12}
]  # fmt: skip
EXPERTS = {"experts": 6, "expert_hidden": 10, "shared_experts": 1, "dense_layers": 1, "balance_loss": 0.02}
LATENTS = {"attention": "mla", "kv_rank": 20, "rotary_size": 6}


def architecture(**changes: Any) -> ModelConfig:
    fields = {"width": 32, "depth": 2, "heads": 4, "hidden": 40, "vocab_size": 60, "vocab_multiple": 16}
    return ModelConfig(**{**fields, **changes})


def model_of(config: ModelConfig, mode: str, dtype: torch.dtype = torch.float32) -> GPT:
    gpt = random_model(config, TIME)
    gpt.set_recompute(mode)
    return gpt.to(dtype)


def windows(config: ModelConfig) -> tuple[Tensor, Tensor]:
    rows = torch.randint(config.vocab_size, (BATCH, TIME + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:]


def gradients(gpt: GPT) -> list[Tensor]:
    """Return the loss and all its gradients."""
    loss = gpt.loss(*windows(gpt.config))
    loss.backward()
    return [loss.detach(), *(p.grad for p in gpt.parameters() if p.grad is not None)]


def all_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [(VARIANTS[0], torch.bfloat16), (VARIANTS[1], torch.float32), (VARIANTS[2], torch.float16),
     (EXPERTS, torch.bfloat16), (LATENTS, torch.float32)],
    ids=str,
)  # fmt: skip
def test_gradients_are_the_same_to_the_bit(changes: dict[str, Any], dtype: torch.dtype) -> None:
    plain, *others = (gradients(model_of(architecture(**changes), mode, dtype)) for mode in MODES)
    assert plain[0].isfinite()
    assert all(slope.abs().sum() > 0 for slope in plain[1:])
    assert all(all_equal(plain, other) for other in others)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_kept_where_no_backward_pass_follows(mode: str) -> None:
    gpt = model_of(architecture(), mode)
    with torch.no_grad(), Storages() as storages:
        logits = gpt(windows(gpt.config)[0])
    assert storages.alive([*gpt.parameters(), *gpt.buffers(), logits]) == []
    assert torch.equal(logits, model_of(architecture(), "none")(windows(gpt.config)[0]))


class Storages(TorchDispatchMode):
    """Recorder of every storage that operations make, which keeps none of them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self, excluded: list[Tensor]) -> list[int]:
        """Return the bytes of each storage that is still alive, without those of the excluded tensors."""
        ignored = {x.untyped_storage()._cdata for x in excluded}
        return sorted(
            size
            for key, (reference, size) in self.seen.items()
            if size and not reference.expired() and key not in ignored
        )


def expected_bytes(config: ModelConfig, mode: str) -> list[int]:
    """Return the bytes of each storage that a block keeps of a micro-batch, in closed form, with fused attention."""
    w, h, d, heads, kv = config.width, config.mlp_hidden, config.head_dim, config.heads, config.num_kv_heads
    stream = [w]
    elements = stream if mode == "full" else [*stream, (heads + 2 * kv) * d, w, 2 * h]
    if mode == "none":
        elements = [*elements, w, w, heads * d, h]  # outputs of both norms, of attention, of SwiGLU
        elements += [1, 1, heads]  # statistics of both norms, and the softmax's
        rotated = [heads * d, kv * d] if config.qk_norm else [(heads + kv) * d]
        elements += [*rotated, heads, kv] if config.qk_norm else rotated
    tokens = BATCH * TIME
    return sorted(tokens * 4 * n for n in elements)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_block_keeps_what_the_closed_form_says(changes: dict[str, Any], mode: str) -> None:
    config = architecture(**changes)
    block, angles = Block(config), rotary_angles(TIME, config.head_dim, config.rope_theta)
    cos, sin = rotary_turn(*angles, torch.float32)
    block.recompute = mode
    leaf = torch.randn(BATCH, TIME, config.width, requires_grad=True)
    inputs = [*block.parameters(), cos, sin, leaf]
    with Storages() as storages:
        x = leaf * 1.0  # an activation that nothing but the block keeps
        out = block(x, cos, sin)
        del x
    assert storages.alive([*inputs, out]) == expected_bytes(config, mode)
    out.sum().backward(retain_graph=False)
    assert storages.alive([*inputs, out]) == []


class Calls(TorchDispatchMode):
    """Counter of operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_selective_runs_no_product_again_and_full_all_but_the_last() -> None:
    config, products, attention = architecture(), {}, {}
    for mode in MODES:
        gpt = model_of(config, mode)
        hidden = gpt.last_hidden(windows(config)[0])
        with Calls() as calls:
            hidden.sum().backward()
        products[mode] = calls.count["mm"]
        attention[mode] = calls.count["_scaled_dot_product_flash_attention_for_cpu"]
    assert products["none"] == 2 * 4 * config.depth  # input and weight gradients of four products a block
    assert products["selective"] == products["none"]
    assert products["full"] == products["none"] + 3 * config.depth
    assert attention == {"none": 0, "selective": config.depth, "full": config.depth}


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_graph_that_is_retained_gives_its_gradient_again(mode: str) -> None:
    gpt = model_of(architecture(), mode)
    hidden = gpt.last_hidden(windows(gpt.config)[0])
    first, again = (torch.autograd.grad(hidden.sum(), list(gpt.parameters()), retain_graph=True) for _ in range(2))
    assert all_equal(list(first), list(again))


def test_a_function_that_does_something_else_the_second_time_is_an_error() -> None:
    times = []

    def fickle(x: Tensor) -> Tensor:
        times.append(None)
        return x.sin() if len(times) == 1 else x.sin().sin()

    out = recomputed(fickle, nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match="the recomputation saved 2 tensors, and the forward pass 1"):
        out.sum().backward()


def test_a_product_that_saves_something_else_than_its_input_keeps_it() -> None:
    x, weight = torch.randn(5, 6, requires_grad=True), torch.randn(3, 7, requires_grad=True)

    def product(inner: Tensor) -> Tensor:
        return (inner.T.reshape(-1, 3)[:5].exp() @ weight).tanh()  # a copy, and its own outputs

    out = recomputed(swiglu, product, x)
    ours = torch.autograd.grad(out.sum(), (x, weight))
    theirs = torch.autograd.grad(product(swiglu(x)).sum(), (x, weight))
    assert all_equal(list(ours), list(theirs))


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split a small model into several buckets."""
    monkeypatch.setattr(buckets, "BUCKET_MB", 0.01)


COLLECTIVES = ("all_gather_into_tensor", "all_reduce_", "reduce_scatter_tensor")


def train(mode: str) -> tuple[list[Tensor], Counter[str]]:
    """Take two steps on a rank of dp 2 and tp 2. Return losses and weights, and the first step's tp collectives."""
    config = architecture(qk_norm=True, tied_embeddings=False)
    optimizer, mesh = OptimizerConfig(batch_size=BATCH), build_mesh(2, 2, CPU)
    gpt = empty_model(config, optimizer, TIME)
    placements = parallelize(gpt, mesh, True)
    gpt.place_angles(CPU)
    gpt.set_recompute(mode)
    zero = Zero(gpt, optimizer, placements, mesh, stage=3, dtype=torch.float32, device=CPU)
    zero.load((name, weight.detach()) for name, weight in random_model(config, TIME).named_parameters())
    tokens, targets = (x.chunk(2)[mesh.dp_rank] for x in windows(config))
    losses, sent = [], Counter[str]()
    for step in range(2):
        with zero.gradients.micro_batch(last=True), Calls() as calls:
            loss = gpt.loss(tokens, targets) / 2
            loss.backward()
        if step == 0:
            sent += Counter({name: calls.count[name] for name in COLLECTIVES})
        zero.set_rates(1.0)
        losses.append(zero.step(loss.detach()).loss)
    return losses + [held.values.clone() for held in zero.held()], sent


def test_on_a_mesh_training_is_the_same_to_the_bit() -> None:
    def on_this_rank() -> tuple[bool, list[Counter[str]]]:
        runs = [train(mode) for mode in MODES]
        return all(all_equal(runs[0][0], run[0]) for run in runs), [run[1] for run in runs]

    for same, (none, selective, full) in run_ranks(4, on_this_rank):
        assert same
        assert none == selective  # no collective again
        # Two of each in each of two blocks.
        assert full - none == Counter({"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4})
