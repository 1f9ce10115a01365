"""Comparison of a device's kernels and a training step with float64, and a test that ranks connect."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..config import ParallelConfig, RunConfig
from ..flops import count_parameters
from ..hardware import CUDA, on_gpu, pick_device, read, synchronize
from ..job.fork import run_ranks
from ..model import loss as head
from ..model.attention import document_starts
from ..model.backends import SDPA, select_backend
from ..model.gpt import GPT
from ..model.parametrization import build_model
from ..parallel.mesh import Mesh
from ..precision import compute_dtype
from ..stepper import Stepper
from .preflight import EXCLUDE, FAILED, INSTEAD, PASSED, REPLACED, Finding

WORSE = 2.0  # our kernel's error may be this many times PyTorch's in the same precision; chosen by hand
ROWS = 512  # of the head's input, at most; chosen by hand
# Allowed relative errors of one step's loss and gradient norm. TF32 rounds as fp16 does.
STEP_ERRORS = {"fp32": (1e-5, 1e-4), "tf32": (2e-3, 2e-2), "fp16": (5e-3, 3e-2), "bf16": (1e-2, 5e-2)}
END = 0  # token that ends a document, if attention stays inside documents
Kernel = Callable[..., Tensor]


def check_ranks(ranks: int, device: torch.device, timeout: float) -> Iterator[Finding]:
    if ranks > 1:
        try:
            run_ranks(ranks, _meet, device, timeout=timeout)
            yield Finding("ranks", PASSED, f"{ranks} ranks reach each other")
        except RuntimeError as error:
            last = str(error).strip().split("\n")[-1]
            yield Finding("ranks", FAILED, f"{ranks} ranks do not reach each other: {last}; {EXCLUDE}")


def _meet(device: torch.device) -> None:
    device = CUDA.take(dist.get_rank()) if on_gpu(device) else device
    group = dist.new_group(backend="nccl") if on_gpu(device) else None
    dist.all_reduce(torch.ones((), device=device), group=group)
    synchronize(device)


def check_attention(runs: Sequence[RunConfig], device: torch.device) -> Iterator[Finding]:
    """Compare attention with PyTorch's, forward and backward, for each shape in the runs, with two key/value heads."""
    cases = set()
    for run in runs:
        model, data = run.model, run.data
        heads = model.heads // model.num_kv_heads, model.key_dim, model.window
        cases.add((*heads, data.sequence_length, data.separate_documents, run.precision, run.parallel.attention))
    for group, head_dim, window, time, documents, precision, requested in cases:
        generator = torch.Generator().manual_seed(0)
        drawn = (torch.randn(1, time, heads, head_dim, generator=generator) for heads in (2 * group, 2, 2))
        inputs = [x.to(device, compute_dtype(precision)) for x in drawn]
        tokens = torch.randint(0, 64, (1, time), generator=generator).to(device)
        first = document_starts(tokens, END) if documents else None
        masks = window is not None and window < time, documents
        choice, backend = select_backend(requested, device, inputs[0].dtype, head_dim, *masks)
        ours = partial(backend.attend, seen=backend.seen(tokens, first, window, inputs[0].dtype), window=window)
        theirs = partial(_plain_attention, mask=SDPA.seen(tokens, first, window, torch.float32))
        name = f"attention by {choice.name} ({precision}, {group} x 2 heads of {head_dim} over {time} tokens)"
        yield _compare("attention", name, ours, theirs, inputs, replaceable=choice.name != "sdpa")


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    bias = None if mask is None else mask.to(query)
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None, enable_gqa=True).transpose(1, 2)


def check_loss(runs: Sequence[RunConfig], device: torch.device) -> Iterator[Finding]:
    """Compare our loss and its gradients with PyTorch's, at the width and vocabulary of the largest model."""
    run = max(runs, key=lambda run: count_parameters(run.model).N_total)
    model, z_loss, size = run.model, run.optimizer.z_loss, run.model.vocab_size or 1
    generator, fused = torch.Generator().manual_seed(0), run.parallel.cross_entropy == "auto"
    x = torch.randn(min(ROWS, run.data.sequence_length), model.width, generator=generator)
    weight = torch.randn(model.padded_vocab_size, model.width, generator=generator) / model.width**0.5
    targets = torch.randint(0, size, (len(x),), generator=generator).to(device)

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x, weight[:size])
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, targets) + z_loss * wide.logsumexp(1).square().mean()

    ours = partial(head.linear_cross_entropy, targets=targets, vocab_size=size, z_loss=z_loss, fused=fused)
    name = f"the loss ({run.precision}, width {model.width}, vocabulary {size})"
    inputs = [tensor.to(device, compute_dtype(run.precision)) for tensor in (x, weight)]
    yield _compare("loss", name, ours, theirs, inputs, replaceable=fused and on_gpu(device))


def _compare(
    check: str, name: str, ours: Kernel, theirs: Kernel, inputs: Sequence[Tensor], replaceable: bool
) -> Finding:
    """Compare our kernel's error against float64 with PyTorch's. If too large, report it as failed or replaced."""
    dtype = inputs[0].dtype

    def outputs(function: Kernel, dtype: torch.dtype = dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        out = function(*leaves)
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, slope))]

    def error_of(function: Kernel) -> float:
        pairs = zip(outputs(function), exact, strict=True)  # root mean square, in which rounding errors average out
        return float(read(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max()))

    exact = outputs(theirs, torch.float64)
    error, peer = error_of(ours), error_of(theirs)
    coarse = dtype == torch.float32 and on_gpu(inputs[0]) and torch.backends.cuda.matmul.allow_tf32
    bound = max(WORSE * peer, (2.0**-10 if coarse else torch.finfo(dtype).eps) / 4)
    text = f"{name} differs from float64 by {error:.2g}, PyTorch's kernel by {peer:.2g}"
    if error <= bound:
        return Finding(check, PASSED, text)
    if replaceable:
        return Finding(check, REPLACED, f"{text}; PyTorch's kernel replaces ours", INSTEAD[check])
    return Finding(check, FAILED, f"{text} ({bound:.2g} is allowed); {EXCLUDE}")


def check_step(runs: Sequence[RunConfig], device: torch.device) -> Iterator[Finding]:
    """Compare one training step of the smallest model with float64, and with its repetition bit for bit."""
    run = min(runs, key=lambda run: count_parameters(run.model).N_total)
    # One rank and one sequence. Each token uses every expert, because rounding decides near ties between experts.
    model = replace(run.model, experts_per_token=run.model.experts or run.model.experts_per_token)
    execution = {name: getattr(run.parallel, name) for name in ("attention", "cross_entropy", "recompute", "tf32")}
    optimizer, parallel = replace(run.optimizer, batch_size=1), ParallelConfig(micro_batch_size=1, **execution)
    run = replace(run, model=model, parallel=parallel, optimizer=optimizer)
    rows = np.random.default_rng(0).integers(0, model.vocab_size or 1, (1, run.data.sequence_length + 1))
    gpt = build_model(model, optimizer, run.data.sequence_length, run.seed)
    for weights in gpt.parameters():  # a head of zeros would pass no gradient to the blocks
        if weights.ndim > 1 and not weights.any():
            torch.nn.init.normal_(weights, std=model.width**-0.5, generator=torch.Generator().manual_seed(1))
    first, again = (_take_step(run, device, gpt, rows) for _ in range(2))
    gpt.to(device).double().end_of_document = END if run.data.separate_documents else None
    tokens = torch.from_numpy(rows).to(device)
    loss = gpt.loss(tokens[:, :-1], tokens[:, 1:], z_loss=optimizer.z_loss)
    squares = [gradient.square().sum() for gradient in torch.autograd.grad(loss, list(gpt.parameters()))]
    exact = float(read(loss.detach())), float(read(torch.stack(squares).sum().sqrt()))
    kind = "tf32" if run.precision == "fp32" and on_gpu(device) and run.parallel.tf32 else run.precision
    errors, bounds = [abs(a / b - 1) for a, b in zip(first, exact, strict=True)], STEP_ERRORS[kind]
    text = f"a step in {kind} differs from float64 by {errors[0]:.1e} in loss and {errors[1]:.1e} in gradient norm"
    if not (errors[0] <= bounds[0] and errors[1] <= bounds[1]):
        text += f" ({bounds[0]:g} and {bounds[1]:g} are allowed); {EXCLUDE}"
    elif first != again:
        text += f", and repeating it gives different bits; {EXCLUDE}"
    yield Finding("step", FAILED if EXCLUDE in text else PASSED, text)


def _take_step(run: RunConfig, device: torch.device, gpt: GPT, rows: np.ndarray) -> tuple[float, float]:
    stream: Any = SimpleNamespace(batch=lambda *_: rows, end_of_document=END)
    stepper = Stepper(run, Mesh(), device, stream, report=lambda line: None)
    stepper.zero.load((name, weights.detach()) for name, weights in gpt.named_parameters())
    result = stepper.step(0)
    return float(read(result.loss)), float(read(result.norm))


def main() -> None:
    """Run all checks on (runs, ranks, timeout), pickled on standard input; print names and findings as JSON lines."""
    runs, ranks, timeout = pickle.load(sys.stdin.buffer)
    out, device = os.fdopen(os.dup(1), "w", buffering=1), pick_device(runs[0].parallel.device)
    os.dup2(2, 1)  # output of libraries goes to standard error
    checks = {  # ranks first, because they fork, which must precede use of a GPU
        "ranks": check_ranks(ranks, device, timeout / 2),
        "attention": check_attention(runs, device),
        "loss": check_loss(runs, device),
        "step": check_step(runs, device),
    }
    for name, findings in checks.items():
        print(json.dumps(name), file=out)
        for finding in findings:
            print(json.dumps(asdict(finding)), file=out)


if __name__ == "__main__":
    main()
