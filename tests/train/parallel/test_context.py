"""Sequences that ranks share out: attention is that of whole sequences, and a run is that of one process."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from isoflop.train import loop, precision
from isoflop.train.config import ModelConfig, RunConfig
from isoflop.train.data.loader import TrainStream, validation_windows
from isoflop.train.data.shards import prepare
from isoflop.train.errors import UserError
from isoflop.train.files import read_json_lines
from isoflop.train.job.fork import run_ranks
from isoflop.train.model.attention import document_starts, first_visible
from isoflop.train.model.backends import load_backend
from isoflop.train.parallel.context import Ring, own_part
from isoflop.train.parallel.mesh import Mesh, build_mesh
from isoflop.train.planner.planner import Hardware, step_time
from isoflop.train.planner.validation import check_shapes, check_world
from isoflop.train.stepper import Stepper
from test_train import (
    CPU,
    assert_same_steps,
    base,
    boxes_of,
    stop_at,
    train_on_ranks,
    whole,
    with_experts,
    with_latents,
)  # fmt: skip
from torch import Tensor

__all__ = ["base"]  # a fixture

END = 3  # the token that ends a document

# batch, time, heads, key/value heads, head size, window, documents. Pieces of 4 ranks are 8 to 40 tokens, windows end
# inside of one, at its edge, and beyond the next.
CASES = {
    "plain": (2, 64, 2, 2, 8, None, False),
    "grouped": (2, 64, 6, 2, 8, None, False),
    "one key head": (1, 64, 4, 1, 16, None, False),
    "documents": (3, 64, 4, 2, 8, None, True),
    "short window": (2, 64, 4, 2, 8, 5, False),
    "window of a piece": (2, 64, 2, 2, 8, 8, False),
    "window and documents": (2, 64, 4, 2, 8, 19, True),
    "long window": (1, 320, 2, 1, 8, 150, False),
    "several blocks of queries": (1, 1280, 1, 1, 4, 300, True),
    "our kernels, plain": (2, 64, 4, 2, 16, None, False),
    "our kernels, window": (2, 64, 2, 2, 16, 21, False),
    "our kernels, documents": (2, 64, 4, 2, 16, 19, True),
}


def inputs_of(case: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], Tensor, Tensor | None, int | None]:
    """Tokens, query, key and value, the result's gradient, what each query sees first, and the window."""
    batch, time, heads, kv_heads, size, window, documents = CASES[case]
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 20, (batch, time), generator=generator)
    fused = torch.randn(batch, time, 2 * heads + 2 * kv_heads, size, generator=generator, dtype=torch.float64)
    query, key, value, grad = fused.to(dtype).split((heads, kv_heads, kv_heads, heads), dim=2)  # views, as in a model
    return tokens, [query * 3, key, value], grad, document_starts(tokens, END) if documents else None, window


def whole_attention(case: str, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients by definition, in float64, of inputs rounded to a type."""
    tokens, inputs, grad, documents, window = inputs_of(case, dtype)
    query, key, value = (x.double().requires_grad_() for x in inputs)
    first, group = first_visible(tokens, documents, window), query.shape[2] // key.shape[2]
    position = torch.arange(tokens.shape[1])
    seen = position <= position[:, None]
    seen = seen if first is None else seen & (position >= first[:, None, :, None])
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key.repeat_interleave(group, 2)) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, value.repeat_interleave(group, 2))
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad.double())]


def ring_attention(cases: list[str], dtype: torch.dtype, kernel: str = "sdpa") -> list[list[Tensor]]:
    """The same of this rank's part of each, by the ring."""
    found, group = [], dist.group.WORLD
    assert group is not None
    for case in cases:
        tokens, inputs, grad, documents, window = inputs_of(case, dtype)
        ring = Ring(kernel, load_backend(kernel).kernel, "first", group)
        seen = ring.seen(tokens, documents, window, dtype)
        own = [own_part(x, 1, group).requires_grad_() for x in inputs]
        out = ring.attend(*own, seen, window)
        found.append([out.detach(), *torch.autograd.grad(out, own, own_part(grad, 1, group))])
    return found


def joined(parts: list[Tensor]) -> Tensor:
    """Whole sequences of every rank's part."""
    halves = [part.chunk(2, dim=1) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim=1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_of_shared_sequences_is_that_of_whole_ones(ranks: int, dtype: torch.dtype, tolerance: float) -> None:
    """Of numbers of order 1; bf16 rounds them by 0.004, in every step's result and in the sum."""
    assert_whole(run_ranks(ranks, ring_attention, list(CASES), dtype, timeout=120.0), list(CASES), dtype, tolerance)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 0.003)])
def test_our_kernels_attend_over_shared_sequences(dtype: torch.dtype, tolerance: float) -> None:
    """In Triton's interpreter; fp16 rounds numbers of order 1 by 0.0005, as above."""
    cases = [case for case in CASES if case.startswith("our kernels")]
    assert_whole(run_ranks(2, ring_attention, cases, dtype, "ours", timeout=300.0), cases, dtype, tolerance)


def assert_whole(answers: list[list[list[Tensor]]], cases: list[str], dtype: torch.dtype, tolerance: float) -> None:
    for number, case in enumerate(cases):
        for name, expected, *parts in zip(
            ("out", "query", "key", "value"), whole_attention(case, dtype), *(a[number] for a in answers), strict=True
        ):
            scale = max(1.0, expected.abs().max().item())
            found = joined(parts)
            assert found.dtype == dtype
            error = (found.double() - expected).abs().max().item() / scale
            assert error < tolerance, f"{case}: {name} is wrong by {error:.2g}"


STEPS = 5


def variant(base: RunConfig, name: str) -> RunConfig:
    config = {"latents": with_latents, "experts": with_experts}.get(name, copy.deepcopy)(base)
    if name == "masked":
        config.model.window, config.data.separate_documents = 6, True
    elif name in ("selective", "full"):
        config.parallel.recompute = name
    return config


Shape = tuple[int, int, int, int, str]  # cp, tp, dp, zero, variant


def every_shape(ranks: int) -> list[Shape]:
    """Every mesh of so many ranks; variants, micro-batches and sequence parallelism by turns."""
    names = itertools.cycle(["plain", "masked", "latents", "selective", "full"])
    meshes = [(cp, tp, dp) for cp in (2, 4) for tp in (1, 2) for dp in (1, 2) if cp * tp * dp == ranks]
    return [(*mesh, zero, next(names)) for mesh in meshes for zero in range(4)]


def steps_of(config: RunConfig, mesh: Mesh) -> tuple[list[float], list[float], list[tuple[str, Any, Any, Any]]]:
    """Losses of some steps and of held-out windows thereafter, norms, and this rank's boxes of the final weights."""
    shards = prepare(config.data)
    stepper = Stepper(config, mesh, CPU, TrainStream(shards, config.data.sequence_length, config.seed))
    stepper.start()
    results = [stepper.step(step) for step in range(STEPS)]
    windows = torch.from_numpy(validation_windows(shards, config.data.sequence_length, 80))
    scores = stepper.losses(windows, lambda: None).tolist()
    return [r.loss.item() for r in results] + scores, [r.norm.item() for r in results], boxes_of(stepper, ("weight",))


def assert_steps_of_one_process(ranks: int, base: RunConfig, shapes: list[Shape], tolerance: float) -> None:
    def every_mesh() -> list[Any]:
        answers = []
        for number, (cp, tp, dp, zero, name) in enumerate(shapes):
            config = variant(base, name)
            parallel = config.parallel
            parallel.cp, parallel.tp, parallel.dp, parallel.zero = cp, tp, dp, zero
            parallel.micro_batch_size = 1 if zero % 2 else None
            parallel.sequence_parallel = number % 3 > 0
            parallel.ep = 2 if name == "experts" and zero % 2 == 0 else 1
            check_shapes(config)
            answers.append(steps_of(config, build_mesh(dp, tp, CPU, parallel.ep, cp)))
        return answers

    by_rank = run_ranks(ranks, every_mesh, timeout=900.0)
    for name in {shape[-1] for shape in shapes}:
        chosen = [number for number, shape in enumerate(shapes) if shape[-1] == name]
        losses, norms, weights = steps_of(variant(base, name), Mesh())
        answers = [[rank[number] for number in chosen] for rank in by_rank]
        expected = losses, norms, whole([(losses, norms, weights)])
        assert_same_steps(answers, [shapes[number] for number in chosen], expected, tolerance)


FEW: dict[int, list[Shape]] = {
    2: [(2, 1, 1, 0, "plain"), (2, 1, 1, 1, "masked"), (2, 1, 1, 3, "full")],
    4: [(2, 2, 1, 2, "masked"), (2, 1, 2, 3, "selective"), (4, 1, 1, 1, "latents"), (2, 2, 1, 0, "plain")],
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_five_steps_on_a_mesh_are_those_of_one_process(ranks: int, base: RunConfig) -> None:
    assert_steps_of_one_process(ranks, base, FEW[ranks], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_five_steps_on_every_mesh_are_those_of_one_process(ranks: int, base: RunConfig) -> None:
    assert_steps_of_one_process(ranks, base, every_shape(ranks), 1e-5)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_five_steps_in_float64_are_those_of_one_process(
    ranks: int, base: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts as well, where rounding decides no near tie of two."""
    monkeypatch.setitem(precision._DTYPES, "fp32", torch.float64)
    meshes = {2: [(2, 1, 1)], 4: [(4, 1, 1), (2, 2, 1), (2, 1, 2)], 8: [(4, 2, 1), (2, 2, 2), (4, 1, 2)]}[ranks]
    kinds = [(0, "experts"), (3, "experts"), (1, "masked"), (2, "latents")]
    shapes = [(*mesh, *kind) for mesh, kind in zip(itertools.cycle(meshes), kinds, strict=False)]
    assert_steps_of_one_process(ranks, base, shapes, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [((2, 1, 1, 1), (1, 1, 2, 3)), ((1, 2, 2, 2), (4, 1, 1, 3)), ((2, 2, 1, 3), (1, 1, 1, 0))]
)
def test_a_run_moved_to_other_parts_of_sequences_goes_on_as_if_never_moved(
    before: tuple[int, ...], after: tuple[int, ...], base: RunConfig, tmp_path: Path
) -> None:
    config = variant(base, "masked")
    parallel = config.parallel
    reference = loop.train(config, tmp_path / "one", report=lambda line: None)
    parallel.cp, parallel.tp, parallel.dp, parallel.zero = before
    ended = train_on_ranks(config, tmp_path / "moved", should_stop=stop_at(8, rank=parallel.world_size - 1))
    assert {end.said[-1] for end in ended} == {"Stopped: stopped at step 9 of 20"}, ended
    parallel.cp, parallel.tp, parallel.dp, parallel.zero = after
    ended = train_on_ranks(config, tmp_path / "moved")
    assert [end.said[-1] for end in ended] == ["done"] * parallel.world_size, ended
    lines, expected = (read_json_lines(tmp_path / name / "metrics.jsonl") for name in ("moved", "one"))
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for ours, theirs in zip(lines, expected, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
    summary = json.loads((tmp_path / "moved" / "summary.json").read_text())
    for name in ("val_loss", "val_bpb"):
        assert summary[name] == pytest.approx(reference[name], rel=1e-5)


def test_a_run_in_bf16_stays_near_that_of_one_process(base: RunConfig) -> None:
    """Losses, some of 16 tokens, within 2^-8, to which bf16 rounds every activation; norms, sums of squares, twice."""
    config = variant(base, "masked")
    config.precision = "bf16"
    losses, norms, _ = steps_of(config, Mesh())

    def shared() -> tuple[list[float], list[float]]:
        config.parallel.cp = 4
        return steps_of(config, build_mesh(1, 1, CPU, 1, 4))[:2]

    for theirs in run_ranks(4, shared):
        assert theirs[0] == pytest.approx(losses, rel=2**-8)
        assert theirs[1] == pytest.approx(norms, rel=2**-7)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_take_the_same_steps(recompute: str, base: RunConfig) -> None:
    """The ring runs between two graphs."""
    config = variant(base, recompute)
    config.parallel.compile = True
    losses, norms, _ = steps_of(variant(base, "plain"), Mesh())

    def shared() -> tuple[list[float], list[float]]:
        config.parallel.cp = 2
        return steps_of(config, build_mesh(1, 1, CPU, 1, 2))[:2]

    for theirs in run_ranks(2, shared, timeout=300.0):
        assert theirs[0] == pytest.approx(losses, rel=1e-5)
        assert theirs[1] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize(
    ("length", "cp", "tp", "said"),
    [
        (
            64,
            3,
            1,
            r"parallel\.cp is 3; it must divide data\.sequence_length 64 into 2 parallel\.cp equal pieces: 1, 2",
        ),
        (63, 3, 1, r"data\.sequence_length 63 into 2 parallel\.cp equal pieces: 1$"),
        (36, 4, 1, r"into 2 parallel\.cp equal pieces: 1, 2, 3, 6, 9, 18$"),
        (36, 6, 4, r"parallel\.tp is 4; it must divide data\.sequence_length 36 / parallel\.cp 6, or parallel\.seq"),
        (64, 2, 1, ""),
    ],
)
def test_lengths_that_do_not_divide_are_refused(length: int, cp: int, tp: int, said: str) -> None:
    config = RunConfig(model=ModelConfig(width=64, heads=4, vocab_size=256))
    config.data.sequence_length, config.parallel.cp, config.parallel.tp = length, cp, tp
    if not said:
        return check_shapes(config)
    with pytest.raises(UserError, match=said):
        check_shapes(config)


def test_a_job_of_other_ranks_is_told_which_would_do() -> None:
    config = RunConfig(model=ModelConfig(width=64, heads=4, vocab_size=256))
    config.parallel.cp = 2
    for ranks, said in ((8, "it can be tp 1 * dp 4 * cp 2 or tp 2"), (1, r"with 1 rank it can be tp 1 \* dp 1$")):
        with pytest.raises(UserError, match=said.replace(" * ", r" \* ") if ranks > 1 else said):
            check_world(config, ranks, ranks)


def test_the_planner_counts_what_of_the_ring_nothing_hides() -> None:
    config = RunConfig(model=ModelConfig(width=64, depth=3, heads=4, kv_heads=2, vocab_size=256))
    config.data.sequence_length, config.parallel.cp, config.parallel.dp = 1024, 4, 2
    one = RunConfig(model=config.model, data=config.data)
    # A quarter of the tokens each; of the update nothing is shared.
    fast = Hardware(intra_bandwidth=1e30, latency=0.0)
    assert step_time(config, fast).context < 1e-20
    assert 8 * step_time(config, fast).forward == pytest.approx(step_time(one, fast).forward)
    slow = Hardware(intra_bandwidth=1e3, latency=0.0, flops_per_second=1e30)
    keys = one.optimizer.batch_size // 2 * 256 * 2 * 2 * 16 * 4  # bytes of a rank's keys and values in fp32
    assert step_time(config, slow).context == pytest.approx(3 * (3 + 3 + 4) * keys / 1e3)
