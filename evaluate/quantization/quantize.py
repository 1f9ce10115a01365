"""Quantize a model block by block, and write it as a checkpoint.

The inputs of a block come through the blocks before it, already quantized. A quantized checkpoint is a folder like a
run's. Its model.safetensors holds the numbers that the codes stand for, so scoring, sampling and exports read it like
any other. In packed.safetensors each matrix has <name>.codes and .scale, with integers .zero, and with AWQ
.channels; each expert of a mixture has <name>.<expert>.codes and so on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...train.checkpoint import checkpoint as checkpoints
from ...train.checkpoint.checkpoint import LoadedCheckpoint
from ...train.checkpoint.heldout import score_windows
from ...train.checkpoint.saver import Saver
from ...train.data.mixture import open_stream
from ...train.data.text import text_at_hand
from ...train.errors import UserError
from ...train.files import put_in_place, temporary_directory_beside
from ...train.model.block import gated, rotary_turn
from ...train.model.experts import ExpertMLP, Routing
from ...train.model.shape import matrices_of
from .formats import Quantized
from .methods import METHODS, Moments
from .settings import Quantization

TOKENS = 65536  # of calibration text; AWQ takes about as many, GPTQ four times as many
BATCH_TOKENS = 16384  # of a forward pass, as in `sequence_losses`
Say = Callable[[str], None]


@torch.no_grad()
def quantize_model(
    loaded: LoadedCheckpoint, settings: Quantization, tokens: int = TOKENS, say: Say = lambda line: None
) -> dict[str, list[Quantized]]:
    """Quantize the matrices of a loaded model's blocks in place; return them by name, one for each expert.

    AWQ and GPTQ calibrate on the first `tokens` tokens of the run's training stream. Raises UserError if this text is
    missing, or if a group does not divide a matrix's width.
    """
    model, groups, method = loaded.model, settings.groups(loaded.config.model), METHODS[settings.method]
    batches = [] if settings.method == "rtn" else calibration_text(loaded, tokens)
    streams, result = [model.enter(batch) for batch in batches], dict[str, list[Quantized]]()
    for number, block in enumerate(model.blocks):
        say(f"block {number + 1} of {len(model.blocks)}")
        inside = [matrix for matrix in matrices_of(model.config) if matrix.name.startswith(f"blocks.{number}.")]
        moments = {
            matrix.name: [Moments(matrix.columns or 0, model.cos.device) for _ in range(matrix.experts)]
            for matrix in inside
        }
        hooks = _observe(model, moments)
        for x, batch in zip(streams, batches, strict=True):
            _through(loaded, block, x, batch)
        for hook in hooks:
            hook.remove()
        for name, sums in moments.items():
            weight = model.get_parameter(name)
            pairs = zip(weight.double().chunk(len(sums)), sums, strict=True)
            result[name] = [method(part, settings.format, groups[name], inputs) for part, inputs in pairs]
            weight.copy_(torch.cat([quantized.weight() for quantized in result[name]]))
        streams = [_through(loaded, block, x, batch) for x, batch in zip(streams, batches, strict=True)]
    return result


def _through(loaded: LoadedCheckpoint, block: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    model, time = loaded.model, tokens.shape[1]
    turn = rotary_turn(model.cos[:time], model.sin[:time], x.dtype)
    out = block(x, *turn, *model.seen(tokens, x.dtype))
    return out[0] if isinstance(out, tuple) else out  # without the penalty of a router


def calibration_text(loaded: LoadedCheckpoint, tokens: int) -> list[Tensor]:
    """Return batches (n, T) of the first tokens that the run trained on, at least one window of T."""
    length = loaded.config.data.sequence_length
    stream = open_stream(loaded.config, text_at_hand(loaded.config.data, loaded.tokenizer))
    windows = torch.from_numpy(stream.batch(0, max(1, tokens // length)))[:, :-1]
    return list(windows.to(loaded.model.cos.device).split(max(1, BATCH_TOKENS // length)))


def _observe(model: nn.Module, moments: dict[str, list[Moments]]) -> list[Any]:
    """Make forward passes add to the moments of each matrix's inputs; return the hooks that do it."""
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, ExpertMLP) and f"{name}.down.weight" in moments:
            first, last = (moments[f"{name}.{matrix}.weight"] for matrix in ("gate_up", "down"))
            hooks.append(module.register_forward_pre_hook(partial(_add_routed, first, last)))
        elif f"{name}.weight" in moments:  # or an expert's matrix, which is never called itself
            add = moments[f"{name}.weight"][0].add
            hooks.append(module.register_forward_pre_hook(lambda module, args, add=add: add(args[0].flatten(0, -2))))
    return hooks


def _add_routed(first: list[Moments], last: list[Moments], module: ExpertMLP, args: tuple[Tensor, Routing]) -> None:
    x, routing = args
    rows = (values.split(routing.counts.tolist()) for values in (routing.tokens, routing.gates))
    for i, (tokens, gates, gate_up) in enumerate(zip(*rows, module.gate_up.weight.chunk(len(first)), strict=True)):
        first[i].add(x[tokens])
        last[i].add(gated(x[tokens] @ gate_up.mT) * gates[:, None])


def held_out_loss(loaded: LoadedCheckpoint) -> float | None:
    """Return the loss on the run's held-out text; None if it is not finite, or the text is on another machine."""
    try:
        loss = score_windows(loaded)[2]["val_loss"]
    except UserError:
        return None
    return loss if loss is not None and math.isfinite(loss) else None


def quantized_loss(loaded: LoadedCheckpoint, settings: Quantization) -> float | None:
    """Return the held-out loss of a quantized copy of a loaded model."""
    quantized = replace(loaded, model=copy.deepcopy(loaded.model))
    quantize_model(quantized, settings)
    return held_out_loss(quantized)


def quantize_checkpoint(
    path: Path, output: Path, settings: Quantization, *, tokens: int = TOKENS, device: str = "cpu", say: Say = print
) -> dict[str, Any]:
    """Write a quantized copy of a checkpoint to a new folder; return its format, sizes and losses.

    Raises UserError as `quantize_model` does, or if `path` has no checkpoint or a quantized one, or `output` exists.
    """
    path = checkpoints.find(path)
    if output.exists() or checkpoints.STEP_NAME.search(output.name):
        raise UserError(f"{output} exists or is named like a checkpoint; choose a new folder")
    if tokens < 1:
        raise UserError(f"tokens is {tokens}; it must be 1 or more")
    if checkpoints.quantization(path) is not None:
        raise UserError(f"checkpoint {path} is quantized already; give the checkpoint that it was made from")
    loaded = checkpoints.load_for_evaluation(path, device)
    facts: dict[str, Any] = {"source": str(path), "source_sha256": loaded.checksum, "format": settings.format}
    facts |= {"method": settings.method, "groups": settings.groups(loaded.config.model)}
    facts["val_loss_before"] = held_out_loss(loaded)
    with temporary_directory_beside(output) as temporary:
        quantized = quantize_model(loaded, settings, tokens, say)
        tensors = {
            f"{name}.{number}.{part}" if len(experts) > 1 else f"{name}.{part}": tensor
            for name, experts in quantized.items()
            for number, matrix in enumerate(experts)
            for part, tensor in matrix.packed().items()
        }
        save_file(tensors, temporary / "packed.safetensors")
        weights = sum(matrix.codes.numel() for experts in quantized.values() for matrix in experts)
        before = 4 * sum(parameter.numel() for parameter in loaded.model.parameters())
        packed = sum(tensor.nbytes for tensor in tensors.values())
        facts |= {"val_loss": held_out_loss(loaded), "bits_per_weight": 8 * packed / weights}
        facts |= {"bytes": packed + before - 4 * weights, "bytes_before": before}  # all but the matrices stays fp32
        saver = Saver(temporary / "checkpoints", checkpoints.ALONE, loaded.config, loaded.tokenizer)
        saver.save(loaded.step, checkpoints.whole_weights(loaded.model), {"quantization": facts})
        saver.wait()
        put_in_place(temporary, output)
    return facts
