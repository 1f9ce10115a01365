"""A model split over tensor-parallel ranks equals the whole model, and sends as many bytes as the theory says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.job.fork import run_ranks
from isoflop.train.model.block import rotary_turn
from isoflop.train.model.gpt import GPT
from isoflop.train.model.parametrization import empty_model
from isoflop.train.parallel import tensor as tensor_module
from isoflop.train.parallel.layout import Placement
from isoflop.train.parallel.mesh import Mesh, build_mesh
from isoflop.train.parallel.parallelize import parallelize
from isoflop.train.parallel.tensor import ColumnLinear
from meshes import CPU
from random_models import random_model, relative_error
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

TIME = 12
END = 7  # the token that ends a document
OPTIMIZER = OptimizerConfig(base_width=16)  # another width than the models': tied logits get a scale


def architecture(**changes: Any) -> ModelConfig:
    fields = {"width": 32, "depth": 2, "heads": 4, "hidden": 24, "vocab_size": 60, "vocab_multiple": 16}
    return ModelConfig(**{**fields, **changes})


def whole_model(config: ModelConfig) -> GPT:
    gpt = random_model(config, TIME, optimizer=OPTIMIZER)
    if config.window is not None:
        gpt.end_of_document = END
    return gpt


def draw_tokens(config: ModelConfig, batch: int = 3) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocab_size, (batch, TIME + 1), generator=torch.Generator().manual_seed(1))
    if config.window is not None:
        tokens[:, TIME // 2] = END
    return tokens[:, :-1], tokens[:, 1:]


def split_copy(gpt: GPT, mesh: Mesh, sequence_parallel: bool) -> tuple[GPT, dict[str, Placement]]:
    """Return this rank's part of the model, with its weights, and the placements."""
    part = empty_model(gpt.config, OPTIMIZER, TIME)
    placements = parallelize(part, mesh, sequence_parallel)
    part.place_angles(CPU)
    part.end_of_document = gpt.end_of_document
    filled = {name: nn.Parameter(placements[name].take(p.detach())) for name, p in gpt.named_parameters()}
    for prefix, module in part.named_modules():
        for name in list(module._parameters):
            weight = filled.get(f"{prefix}.{name}")
            setattr(module, name, filled["embedding.weight"] if weight is None else weight)
    return part, placements


def summed_gradient(parameter: nn.Parameter, placement: Placement, mesh: Mesh) -> Tensor:
    """Return the gradient of a rank's part, summed over the tp ranks where it is partial."""
    gradient, row = parameter.grad.clone(), 0
    for piece in placement.pieces:
        if piece.partial:
            dist.all_reduce(gradient[row : row + piece.size[0]], group=mesh.tp_group)
        row += piece.size[0]
    return gradient


def check_against_whole(
    part: GPT, placements: dict[str, Placement], mesh: Mesh, gpt: GPT, tolerance: float, z_loss: float = 0.0
) -> None:
    """Compare the mean loss, the same on all ranks to the bit, and its gradients with those of `gpt`."""
    tokens, targets = draw_tokens(gpt.config)
    loss = part.loss(tokens, targets, z_loss=z_loss)
    close(loss, mean_loss(gpt, tokens, targets, z_loss), tolerance)
    losses = [torch.empty_like(loss.detach()) for _ in range(mesh.tp)]
    dist.all_gather(losses, loss.detach(), group=mesh.tp_group)
    assert all(torch.equal(losses[0], other) for other in losses)
    loss.backward()
    for name, parameter in gpt.named_parameters():
        expected, local = placements[name].take(parameter.grad), part.get_parameter(name)
        close(summed_gradient(local, placements[name], mesh), expected, tolerance)


def mean_loss(gpt: GPT, tokens: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    return token_losses(gpt, tokens, targets, z_loss).mean()


def token_losses(gpt: GPT, tokens: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    """Return the textbook's losses from the whole logits, (batch, time)."""
    logits = gpt(tokens)
    losses = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")
    return losses + z_loss * logits.logsumexp(-1).square()


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare within the tolerance, relative to the root mean square of the whole tensor."""
    assert actual.shape == expected.shape
    hidden = torch.isinf(expected)
    assert torch.equal(torch.isinf(actual), hidden)
    actual, expected = actual.masked_fill(hidden, 0.0).double(), expected.masked_fill(hidden, 0.0).double()
    scale = expected.square().mean().sqrt().clamp_min(1e-12)
    assert ((actual - expected).abs().max() / scale).item() < tolerance


def with_gradients(config: ModelConfig, dtype: torch.dtype, z_loss: float = 0.0) -> GPT:
    """Return a whole model with the gradients of its mean loss."""
    gpt = whole_model(config).to(dtype)
    tokens, targets = draw_tokens(config)
    mean_loss(gpt, tokens, targets, z_loss).backward()
    return gpt


ARCHITECTURES = {
    "plain": architecture(tied_embeddings=False),
    "one key/value head": architecture(kv_heads=1),
    "two key/value heads": architecture(kv_heads=2, qk_norm=True, tied_embeddings=False),
    "one of each head's norm": architecture(kv_heads=1, qk_norm=True),
    "a window, and separate documents": architecture(kv_heads=2, window=5),
    "biases, and heads of another size": architecture(kv_heads=2, qkv_bias=True, head_size=12),
    "a bias of each head": architecture(qkv_bias=True, qk_norm=True),
    "padding on the last of four ranks": architecture(vocab_size=49, vocab_multiple=64),
    "two of four ranks all padding": architecture(vocab_size=20, vocab_multiple=64, tied_embeddings=False),
}


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_logits_and_gradients_are_those_of_one_process(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every architecture, with sequence parallelism on two ranks or on four."""
    z_loss = 1e-2 if tp == 4 else 0.0
    monkeypatch.setitem(tensor_module.LOGITS_AT_A_TIME, "cpu", 256)  # several chunks, the last one shorter
    models = {name: with_gradients(config, torch.float64, z_loss) for name, config in ARCHITECTURES.items()}

    @torch.no_grad()
    def check_inference(part: GPT, gpt: GPT) -> None:
        tokens, targets = draw_tokens(gpt.config)
        close(part(tokens), gpt(tokens), 1e-12)
        losses = part.loss(tokens, targets, reduction="none", z_loss=z_loss)
        close(losses, token_losses(gpt, tokens, targets, z_loss), 1e-12)

    def check() -> None:
        mesh = build_mesh(1, tp, CPU)
        for number, (name, gpt) in enumerate(models.items()):
            try:
                part, placements = split_copy(gpt, mesh, sequence_parallel=(number + tp // 2) % 2 == 0)
                check_inference(part, gpt)
                check_against_whole(part, placements, mesh, gpt, 1e-12, z_loss)
            except Exception as error:
                error.add_note(name)
                raise

    run_ranks(tp, check)


def test_low_precision_differs_from_fp32_by_rounding_alone() -> None:
    exact = with_gradients(architecture(kv_heads=2, qk_norm=True), torch.float64)
    tokens, targets = draw_tokens(exact.config)
    # bf16 keeps 8 bits, 0.4 %, of every activation; one process gives the resulting error of gradients.
    low = with_gradients(exact.config, torch.bfloat16)
    pairs = zip(low.parameters(), exact.parameters(), strict=True)
    of_one_process = max(relative_error(a.grad, b.grad) for a, b in pairs)

    def check() -> None:
        mesh = build_mesh(1, 2, CPU)
        # fp32 keeps 24 bits, 6e-8.
        for dtype, tolerance, sequence in (
            (torch.float32, 2e-6, False), (torch.bfloat16, 1.5 * of_one_process, False),
            (torch.bfloat16, 1.5 * of_one_process, True),
        ):  # fmt: skip
            part, placements = split_copy(exact, mesh, sequence)
            loss = part.to(dtype).loss(tokens, targets)
            assert loss.dtype == torch.float32
            loss.backward()
            for name, parameter in exact.named_parameters():
                local, placement = part.get_parameter(name), placements[name]
                assert local.grad.dtype == dtype
                expected = placement.take(parameter.grad)
                assert relative_error(summed_gradient(local, placement, mesh), expected) < tolerance

    run_ranks(2, check)


class Recorder(TorchDispatchMode):
    """Recorder of the sizes of all results, and of the bytes that collectives exchange, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0  # elements
        self.wide = 0  # elements of the largest result in fp32
        self.exchanged: Counter[str] = Counter()  # calls
        self.bytes: Counter[str] = Counter()  # of the whole tensor that is gathered, scattered or reduced
        self.order: list[str] = []  # of collectives, waits and matrix products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor):
                self.largest = max(self.largest, result.numel())
                if result.dtype == torch.float32:
                    self.wide = max(self.wide, result.numel())
        namespace, name = func.name().split("::")
        name = name.removesuffix("_")
        if namespace == "_c10d_functional" or name == "mm":
            self.order.append(name)
        if namespace == "_c10d_functional" and name != "wait_tensor":
            self.exchanged[name] += 1
            self.bytes[name] += max(args[0].nbytes, results.nbytes)
        return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_exchanges_the_bytes_of_the_closed_form(sequence_parallel: bool) -> None:
    config = architecture(kv_heads=2)
    gpt = whole_model(config)

    def record() -> list[tuple[Counter[str], Counter[str]]]:
        mesh = build_mesh(1, 2, CPU)
        part, _ = split_copy(gpt, mesh, sequence_parallel)
        shape = (3 * TIME // mesh.tp, config.width) if sequence_parallel else (3, TIME, config.width)
        x = torch.randn(shape, requires_grad=True)
        with Recorder() as forward:
            y = part.blocks[0](x, *rotary_turn(part.cos, part.sin, x.dtype))
        with Recorder() as backward:
            y.backward(torch.ones_like(y))
        return [(recorder.exchanged, recorder.bytes) for recorder in (forward, backward)]

    stream = 3 * TIME * config.width * 4  # bytes of the residual stream
    # A ring sends (tp - 1) / tp of these bytes a rank for a gather or a scatter, and twice that for an all-reduce.
    if sequence_parallel:
        # Each branch gathers before and scatters after; backward the same in reverse, and gathers its input again.
        expected = [{"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2},
                    {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2}]  # fmt: skip
    else:
        expected = [{"all_reduce": 2}, {"all_reduce": 2}]
    for rank in run_ranks(2, record):
        for (calls, sent), counts in zip(rank, expected, strict=True):
            assert calls == counts
            assert sent == {name: count * stream for name, count in counts.items()}


def test_a_column_layer_computes_while_its_collectives_are_in_flight() -> None:
    def record() -> list[str]:
        mesh = build_mesh(1, 2, CPU)
        layer = ColumnLinear((3, 5), mesh.tp_group, sequence_parallel=True)
        layer.weight = nn.Parameter(torch.ones(3, 5))
        y = layer(torch.ones(4, 5, requires_grad=True))
        with Recorder() as recorder:
            y.backward(torch.ones_like(y))
        return recorder.order

    expected = ["all_gather_into_tensor", "mm", "reduce_scatter_tensor", "wait_tensor", "mm", "wait_tensor"]
    assert run_ranks(2, record) == [expected] * 2


def test_logits_never_exist_whole_and_in_fp32_only_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = architecture(width=8, hidden=8, vocab_size=4000, vocab_multiple=128, depth=1)
    gpt = whole_model(config).to(torch.bfloat16)
    tokens, targets = draw_tokens(config)
    monkeypatch.setitem(tensor_module.LOGITS_AT_A_TIME, "cpu", 4096)

    def record() -> tuple[int, int, int, int]:
        part, _ = split_copy(gpt, build_mesh(1, 2, CPU), True)
        with Recorder() as recorder:
            part.loss(tokens, targets).backward()
        gathered = recorder.exchanged["all_gather_into_tensor"]
        return recorder.largest, recorder.wide, gathered, recorder.exchanged["all_reduce"]

    for largest, wide, gathered, reduced in run_ranks(2, record):
        assert largest == tokens.numel() * 4096 // 2
        assert wide <= 4096 * config.width // 2  # the embedding's gradient
        # A block has 2 and 4, the embedding 1 backward, the head 1 and 1, the loss 1.
        assert (gathered, reduced) == (6 + 1 + 2 + 1, 0)


def test_the_parts_of_all_ranks_are_the_whole() -> None:
    wholes = [empty_model(config, OPTIMIZER, TIME) for config in ARCHITECTURES.values()]

    def place() -> list[tuple[dict[str, Placement], dict[str, tuple[int, ...]]]]:
        mesh, parts = build_mesh(1, 4, CPU), []
        for gpt in wholes:
            placements = parallelize(gpt, mesh, True)
            parts.append((placements, {name: tuple(p.shape) for name, p in gpt.named_parameters()}))
        return parts

    for gpt, *ranks in zip(wholes, *run_ranks(4, place), strict=True):
        shapes = {name: tuple(p.shape) for name, p in gpt.named_parameters()}
        for placements, local_shapes in ranks:
            assert list(local_shapes) == list(shapes) == list(placements)
            assert all(local_shapes[name] == placement.local_shape for name, placement in placements.items())
        for name, shape in shapes.items():
            exclusive, shared = torch.zeros(shape), torch.zeros(shape)
            for placements, _ in ranks:
                assert placements[name].shape == shape
                for piece in placements[name].pieces:
                    box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.size, strict=True))
                    (shared if piece.shared else exclusive)[box] += 1
            # Every element belongs to one rank alone, or to all of them.
            assert ((exclusive == 1) & (shared == 0) | (exclusive == 0) & (shared == 4)).all()
            assert (shared > 0).any() == ("norm" in name or ("qkv" in name and gpt.config.num_kv_heads < 4))
