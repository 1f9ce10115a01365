"""Whether a device computes what it should: kernels and steps beside float64 and PyTorch's own, bits beside a
repetition, and the allocator's bytes beside the planner's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ParallelConfig, RunConfig
from ..data.loader import TrainStream
from ..flops import count_parameters
from ..hardware import on_gpu, out_of_memory, peak_bytes, read
from ..memory import memory
from ..model import loss as head
from ..model.attention import document_starts
from ..model.backends import SDPA, Backend, select_backend
from ..model.gpt import GPT
from ..model.parametrization import build_model
from ..model.shape import micro_batch_of
from ..parallel.mesh import Mesh
from ..precision import compute_dtype
from ..stepper import Stepper
from .finding import FAILED, INSTEAD, NOTE, PASSED, REPLACED, Finding

WORSE = 2.0  # times PyTorch's own error in the same precision that a kernel of ours may have
ROWS = 512  # of the head's input, at most
# Relative errors that one step's loss and gradient norm may have; TF32 rounds as fp16 does.
STEP_ERRORS = {"fp32": (1e-5, 1e-4), "tf32": (2e-3, 2e-2), "fp16": (5e-3, 3e-2), "bf16": (1e-2, 5e-2)}
BYTES_ERROR = 0.15  # of the planner
OVERHEAD = {"cpu": 2**17, "cuda": 2**26}  # bytes that no formula counts: what products work in, and rounded blocks
END = 0  # token that ends a document, where they are kept apart


class RandomTokens(TrainStream):
    """A stream of tokens that no corpus is needed for."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size, self.length, self.end_of_document = vocab_size, length, END

    def batch(self, step: int, batch_size: int, start: int = 0, count: int | None = None) -> npt.NDArray[np.int64]:
        rows = np.random.default_rng(step).integers(0, self.vocab_size, (batch_size, self.length + 1))
        return rows[start : batch_size if count is None else start + count]


def extremes(runs: Sequence[RunConfig]) -> list[RunConfig]:
    """The smallest and the largest model, or the only one."""
    ordered = sorted(runs, key=lambda run: count_parameters(run.model).N_total)
    return ordered[:1] if len(ordered) == 1 or ordered[0].model == ordered[-1].model else [ordered[0], ordered[-1]]


def check_attention(runs: Sequence[RunConfig], device: torch.device) -> Iterator[Finding]:
    """Forward and backward at every shape of the grid, two key/value heads of it."""
    for run in {_attention_case(run): run for run in runs}.values():
        yield _attention(run, device)


def check_loss(runs: Sequence[RunConfig], device: torch.device) -> Iterator[Finding]:
    """The head's product and cross-entropy, with the gradients by both factors."""
    for run in extremes(runs):
        yield _loss(run, device)


def check_step(runs: Sequence[RunConfig], device: torch.device) -> Iterator[Finding]:
    """A step of the smallest and the largest model beside float64, and once more for its bits."""
    for run in extremes(runs):
        N = count_parameters(run.model).N_total
        once, again = (_steps(_alone(run, rows=1), device) for _ in range(2))
        words = f"two steps of the model of {N:,} parameters"
        if once == again:
            yield Finding("determinism", PASSED, f"{words} give the same bits when repeated")
        else:
            words += f" give {once}, and {again} when repeated; the bits must be the same"
            yield Finding("determinism", FAILED, words)
        try:
            loss, norm = _reference_step(_alone(run, rows=1), device)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            yield Finding("step", NOTE, f"the model of {N:,} parameters does not fit in float64, and has no reference")
            continue
        kind = "tf32" if run.precision == "fp32" and on_gpu(device) and run.parallel.tf32 else run.precision
        allowed = STEP_ERRORS[kind]
        errors = (abs(once[0][0] / loss - 1), abs(once[0][1] / norm - 1))
        words = f"a step of the model of {N:,} parameters in {kind} differs from float64 by {errors[0]:.1e} in loss "
        words += f"and {errors[1]:.1e} in the norm of its gradient"
        fine = all(error <= most for error, most in zip(errors, allowed, strict=True))
        words += "" if fine else f", where {allowed[0]:g} and {allowed[1]:g} are allowed"
        numbers = {"loss": errors[0], "norm": errors[1]}
        yield Finding("step", PASSED if fine else FAILED, words, numbers=numbers)


def check_memory(runs: Sequence[RunConfig], device: torch.device) -> Iterator[Finding]:
    """The allocator's peak in a step of the largest model beside the planner's."""
    run = _alone(extremes(runs)[-1])
    kind = "cuda" if on_gpu(device) else "cpu"
    planned = memory(run, kind).peak
    measured = peak_bytes(lambda: _steps(run, device, count=1, drawn=False), device)
    words = f"a step of the largest model takes {measured / 2**20:,.1f} MiB, by the planner {planned / 2**20:,.1f}"
    fine = abs(measured - planned) <= BYTES_ERROR * planned + OVERHEAD[kind]
    words += "" if fine else f": more than {BYTES_ERROR:.0%} apart, so plans of memory cannot be trusted here"
    numbers = {"measured": float(measured), "planned": float(planned)}
    yield Finding("memory", PASSED if fine else FAILED, words, numbers=numbers)


def _attention(run: RunConfig, device: torch.device) -> Finding:
    group, head_dim, time, window, documents, precision = _attention_case(run)
    dtype, shape = compute_dtype(precision), (1, time, 2, head_dim)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, time, 2 * group, head_dim, generator=generator)
    inputs = [query, *(torch.randn(shape, generator=generator) for _ in "kv"), torch.randn_like(query)]
    given = [x.to(device, dtype) for x in inputs]
    tokens = torch.randint(0, 64 if documents else 2**30, (1, time), generator=generator).to(device)

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _plain_attention(query, key, value, _visible(tokens, run))

    exact = _with_gradients(theirs, [x.double() for x in given])

    def error(function: Callable[..., Tensor]) -> float:
        return _error(_with_gradients(function, given), exact)

    choice, backend = select_backend(
        run.parallel.attention, device, dtype, head_dim, window is not None and window < time, documents
    )
    words = f"attention by {choice.name} ({precision}, {group} x 2 heads of {head_dim} over {time} tokens"
    words += "" if window is None else f", window {window}"
    words += ", documents apart)" if documents else ")"
    return _judged(
        "attention",
        words,
        lambda: error(_called(backend, tokens, run)),
        error(theirs),
        _unit(dtype, device),
        None if choice.name == "sdpa" else lambda: error(_called(SDPA, tokens, run)),
    )


def _loss(run: RunConfig, device: torch.device) -> Finding:
    dtype, model, z_loss = compute_dtype(run.precision), run.model, run.optimizer.z_loss
    size = model.vocab_size
    assert size is not None
    generator, rows = torch.Generator().manual_seed(0), min(ROWS, run.data.sequence_length)
    x = torch.randn(rows, model.width, generator=generator).to(device, dtype)
    weight = (torch.randn(model.padded_vocab_size, model.width, generator=generator) / model.width**0.5).to(x)
    targets = torch.randint(0, size, (rows,), generator=generator).to(device)

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x, weight[:size])
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, targets) + z_loss * wide.logsumexp(1).square().mean()

    exact = _loss_and_gradients(theirs, x.double(), weight.double())

    def error(function: Callable[..., Tensor]) -> float:
        return _error(_loss_and_gradients(function, x, weight), exact)

    ours = partial(head.linear_cross_entropy, targets=targets, vocab_size=size, z_loss=z_loss)
    fused = run.parallel.cross_entropy == "auto"
    return _judged(
        "loss",
        f"the loss ({run.precision}, width {model.width}, vocabulary {size})",
        lambda: error(partial(ours, fused=fused)),
        error(theirs),
        _unit(dtype, device),
        (lambda: error(partial(ours, fused=False))) if fused and on_gpu(device) else None,
    )


def _judged(
    check: str, what: str, ours: Callable[[], float], peer: float, unit: float, instead: Callable[[], float] | None
) -> Finding:
    """From errors against float64: of ours, of PyTorch's own, and of what could take the place of ours."""
    (error, why), bound = _tried(ours), max(WORSE * peer, unit / 4)
    words = f"{what} differs from float64 by {why or f'{error:.2g}'}, PyTorch's own by {peer:.2g}"
    numbers = {"error": error, "peer": peer, "bound": bound}
    if error <= bound:
        return Finding(check, PASSED, words, numbers=numbers)
    if instead is not None and _tried(instead)[0] <= bound:
        words += "; it is not used, and PyTorch's takes its place"
        return Finding(check, REPLACED, words, INSTEAD[check], numbers)
    return Finding(check, FAILED, f"{words}, where {bound:.2g} is allowed", numbers=numbers)


def _attention_case(run: RunConfig) -> tuple[int, int, int, int | None, bool, str]:
    model, data = run.model, run.data
    group = model.heads // model.num_kv_heads
    return group, model.key_dim, data.sequence_length, model.window, data.separate_documents, run.precision


def _visible(tokens: Tensor, run: RunConfig) -> Tensor:
    """Whether query i sees key j, (time, time), by the definition."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    seen = position[:, None] >= position
    if run.model.window is not None:
        seen &= position[:, None] - position < run.model.window
    if run.data.separate_documents:
        before = (tokens[0] == END).cumsum(0) - (tokens[0] == END).long()
        seen &= before[:, None] == before
    return seen


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)


def _called(backend: Backend, tokens: Tensor, run: RunConfig) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    first = document_starts(tokens, END) if run.data.separate_documents else None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = backend.seen(tokens, first, run.model.window, query.dtype)
        return backend.attend(query, key, value, seen, run.model.window)

    return attend


def _with_gradients(function: Callable[..., Tensor], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The output, and the gradients by query, key and value."""
    *inputs, slope = (x.detach().clone().requires_grad_() for x in given)
    out = function(*inputs)
    return (out.detach(), *torch.autograd.grad(out, inputs, slope.detach()))


def _loss_and_gradients(function: Callable[..., Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    x, weight = (each.detach().clone().requires_grad_() for each in (x, weight))
    loss = function(x, weight)
    return (loss.detach(), *torch.autograd.grad(loss, (x, weight)))


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest of the tensors' errors in root mean square: rounding averages out, a wrong factor does not."""
    pairs = zip(found, exact, strict=True)
    return max(float(read((a.double() - b).norm() / b.norm().clamp_min(1e-300))) for a, b in pairs)


def _tried(work: Callable[[], float]) -> tuple[float, str]:
    """What the work returns, and infinity with the reason where it fails or is no number."""
    try:
        found = work()
    except Exception as error:
        return math.inf, f"{type(error).__name__}: {error}".split("\n")[0]
    return (math.inf, "a value that is no number") if math.isnan(found) else (found, "")


def _unit(dtype: torch.dtype, device: torch.device) -> float:
    coarse = dtype == torch.float32 and on_gpu(device) and torch.backends.cuda.matmul.allow_tf32
    return 2.0**-10 if coarse else torch.finfo(dtype).eps


def _alone(run: RunConfig, rows: int | None = None) -> RunConfig:
    """The run on one rank, with a batch of one micro-batch; of given rows, where numbers are compared, each token goes
    through every expert, for rounding decides near ties.
    """
    model = replace(run.model, experts_per_token=run.model.experts) if rows and run.model.experts else run.model
    rows = rows or micro_batch_of(run)
    kept = {name: getattr(run.parallel, name) for name in ("attention", "cross_entropy", "recompute", "tf32")}
    parallel = ParallelConfig(micro_batch_size=rows, **kept)
    return replace(run, model=model, parallel=parallel, optimizer=replace(run.optimizer, batch_size=rows))


def _steps(run: RunConfig, device: torch.device, count: int = 2, drawn: bool = True) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first steps; without `drawn` weights, of whatever the memory held."""
    assert run.model.vocab_size is not None
    stream = RandomTokens(run.model.vocab_size, run.data.sequence_length)
    stepper = Stepper(run, Mesh(), device, stream, report=lambda line: None)
    if drawn:
        stepper.zero.load((name, weights.detach()) for name, weights in _drawn_model(run).named_parameters())
    results = [stepper.step(step) for step in range(count)]
    return [(float(read(result.loss)), float(read(result.norm))) for result in results]


def _drawn_model(run: RunConfig) -> GPT:
    """With initial weights, but a head that is drawn as well: from one of zeros no gradient reaches the blocks."""
    gpt = build_model(run.model, run.optimizer, run.data.sequence_length, run.seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in gpt.parameters():
            if weights.ndim > 1 and not weights.any():
                weights.normal_(std=run.model.width**-0.5, generator=generator)
    return gpt


def _reference_step(run: RunConfig, device: torch.device) -> tuple[float, float]:
    """Loss and gradient norm of the first step in float64, by autograd alone."""
    assert run.model.vocab_size is not None
    gpt = _drawn_model(run).to(device).double()
    if run.data.separate_documents:
        gpt.end_of_document = END
    rows = RandomTokens(run.model.vocab_size, run.data.sequence_length).batch(0, run.optimizer.batch_size)
    tokens = torch.from_numpy(rows).to(device)
    loss = gpt.loss(tokens[:, :-1], tokens[:, 1:], z_loss=run.optimizer.z_loss)
    gradients = torch.autograd.grad(loss, list(gpt.parameters()))
    return read(loss).item(), math.sqrt(sum(float(read(gradient.square().sum())) for gradient in gradients))
