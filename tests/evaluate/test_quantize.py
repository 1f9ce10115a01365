"""Quantized checkpoints: algorithms against plain ones, what the commands write and read, and what they refuse."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from isoflop.evaluate.quantization import methods
from isoflop.evaluate.quantization.formats import TABLES, decode, encode
from isoflop.evaluate.quantization.quantize import calibration_text, quantize_model
from isoflop.evaluate.quantization.settings import CODE_BITS, Quantization
from isoflop.sweeps.cli.main import main
from isoflop.train.checkpoint.checkpoint import ALONE, describe, load_for_evaluation, read_config, whole_weights
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.config import DataConfig, ModelConfig, RunConfig
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError
from isoflop.train.loop import train
from isoflop.train.model.parametrization import build_model
from isoflop.train.quantization.formats import fake_quantize
from safetensors.torch import load_file
from small_runs import forty_steps
from torch import Tensor

GROUP = 16
STEP = "checkpoints/step_40"


def inputs(columns: int) -> Tensor:
    """Return correlated inputs (n, columns), some channels much larger than others."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, columns, generator=generator, dtype=torch.float64)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return (x + 0.3 * x @ mix) * torch.logspace(-1, 1, columns, dtype=torch.float64)


def weights(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / columns**0.5


def rounded(format: str, values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the numbers of a format that are nearest to `values` (rows, n), with scales and zeros (rows,)."""
    units = values / scale[:, None]
    if format in TABLES:
        levels = torch.tensor(TABLES[format], dtype=torch.float64)
        return levels[(units[..., None] - levels).abs().argmin(-1)] * scale[:, None]
    top = 2 ** CODE_BITS[format] - 1
    return scale[:, None] * ((units.round() + zero[:, None]).clamp(0, top) - zero[:, None])


def ends(format: str, group: Tensor, low: float = 1.0, high: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return scale and zero, (rows,), of a group (rows, n), with the ends of its range shrunk."""
    least, most = group.amin(1).clamp(max=0) * low, group.amax(1).clamp(min=0) * high
    if format == "mxfp4":
        return 2.0 ** (torch.maximum(-least, most).log2().floor() - 2), torch.zeros_like(least)
    if format == "nf4":
        return torch.maximum(-least, most).half().double(), torch.zeros_like(least)
    top = 2 ** CODE_BITS[format] - 1
    scale = ((most - least) / top).half().double()
    return scale, (-least / scale).round().clamp(0, top)


def plain_gptq(weight: Tensor, x: Tensor, format: str, group: int) -> Tensor:
    """Quantize as in Frantar et al. 2022, eq. 2 and 3: the inverse Hessian of what remains is updated explicitly."""
    columns, hessian = weight.shape[1], 2 * x.T @ x
    scales = [ends(format, weight[:, start : start + group]) for start in range(0, columns, group)]
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    inverse, weight, result = torch.linalg.inv(damped), weight.clone(), torch.zeros_like(weight)
    for column in hessian.diagonal().argsort(descending=True).tolist():
        result[:, column] = rounded(format, weight[:, column : column + 1], *scales[column // group])[:, 0]
        row, pivot = inverse[column].clone(), inverse[column, column].clone()
        weight -= torch.outer((weight[:, column] - result[:, column]) / pivot, row)
        inverse -= torch.outer(row, row) / pivot
    return result


def plain_awq(weight: Tensor, x: Tensor, format: str, group: int) -> Tensor:
    """Quantize as in Lin et al. 2023, eq. 4 and 5, with errors summed over the inputs themselves, row by row."""

    def error(result: Tensor) -> float:
        return float(((result - weight) @ x.T).square().sum())

    def scaled(scale: Tensor, shrink: bool) -> Tensor:
        parts = weight.clone()
        for start in [*range(0, weight.shape[1], group)] * 3:
            span, best = slice(start, start + group), torch.full((len(weight),), torch.inf, dtype=torch.float64)
            values, before = weight[:, span] * scale[span], parts.clone()
            for low, high in itertools.product(range(8 if shrink else 1), repeat=2):
                candidate = before.clone()
                candidate[:, span] = rounded(format, values, *ends(format, values, 1 - low / 20, 1 - high / 20))
                candidate[:, span] /= scale[span]
                errors = ((candidate - weight) @ x.T).square().sum(1)
                parts = torch.where((errors < best * (1 - 1e-12))[:, None], candidate, parts)
                best = torch.minimum(errors, best)
        return parts

    mean = x.abs().mean(0) / x.abs().mean()
    scales = [mean ** (i / 20) for i in range(20)]
    scales = [(scale / (scale.max() * scale.min()).sqrt()).half().double() for scale in scales]
    best = min(scales, key=lambda scale: error(scaled(scale, shrink=False)))
    return min((scaled(scale, shrink=True) for scale in (scales[0], best)), key=error)


@pytest.mark.parametrize("format", ["int3", "nf4", "mxfp4"])
def test_gptq_and_awq_equal_plain_implementations(format: str) -> None:
    x, weight = inputs(64), weights(12, 64)
    moments, group = methods.Moments(64, x.device), 32 if format == "mxfp4" else GROUP
    nothing = methods.Moments(64, x.device)
    moments.add(x)

    def error(result: Tensor) -> float:
        return float(((result - weight) @ x.T).square().sum())

    gptq, awq = (method(weight, format, group, moments).weight() for method in (methods.gptq, methods.awq))
    assert (gptq - plain_gptq(weight, x, format, group)).abs().max() <= 1e-10
    assert (awq - plain_awq(weight, x, format, group)).abs().max() <= 1e-10
    nearest = methods.rtn(weight, format, group)
    assert max(error(gptq), error(awq)) < 0.9 * error(nearest.weight())
    # Without inputs, as of an expert that no token chooses, GPTQ rounds to nearest.
    assert torch.equal(methods.gptq(weight, format, group, nothing).codes, nearest.codes)
    assert methods.awq(weight, format, group, nothing).weight().isfinite().all()


@pytest.mark.parametrize("format", CODE_BITS)
def test_a_code_is_the_nearest_number_of_its_format_and_is_packed_without_gaps(format: str) -> None:
    values = torch.cat((weights(4, 32), torch.zeros(1, 32, dtype=torch.float64)))
    result = methods.rtn(values, format, 32)
    if format == "mxfp4":
        assert torch.equal(result.weight(), fake_quantize(values.float(), "mxfp4", 32).double())
    levels = decode(format, torch.arange(2 ** CODE_BITS[format])[None], result.scales)
    assert torch.equal(decode(format, encode(format, levels, result.scales), result.scales), levels)
    inside = (values >= levels.amin(1, keepdim=True)) & (values <= levels.amax(1, keepdim=True))
    nearest = (values[:, :, None] - levels[:, None]).abs().amin(-1)
    assert torch.equal((result.weight() - values).abs()[inside], nearest[inside])
    assert inside.float().mean() > 0.9
    assert torch.equal(unpacked(result.packed(), format, values.shape), result.weight())


def unpacked(stored: dict[str, Tensor], format: str, shape: Any) -> Tensor:
    """Read packed tensors as the documentation describes them; return the weights, float64."""
    bits = CODE_BITS[format]

    def codes(packed: Tensor, count: int) -> Tensor:
        number = int.from_bytes(bytes(packed.tolist()), "little")
        assert len(packed) == -(-count * bits // 8)
        return torch.tensor([number >> bits * place & 2**bits - 1 for place in range(count)])

    scale = 2.0 ** (stored["scale"].double() - 127) if format == "mxfp4" else stored["scale"].double()
    numbers = codes(stored["codes"], shape[0] * shape[1]).view(*scale.shape, -1)
    if format in TABLES:
        result = torch.tensor(TABLES[format], dtype=torch.float64)[numbers] * scale[..., None]
    else:
        result = (numbers - codes(stored["zero"], scale.numel()).view(*scale.shape, 1)) * scale[..., None]
    return result.view(*shape) / stored.get("channels", torch.ones(1)).double()


def call(*arguments: Any) -> int:
    """Run a command of isoflop in this process; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["isoflop", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, small_corpus: Callable[..., DataConfig]) -> Path:
    """Train a run of 40 steps."""
    folder, config = tmp_path_factory.mktemp("runs") / "run", forty_steps(small_corpus(512))
    model = replace(config.model, width=32, hidden=64, depth=2)
    train(replace(config, model=model), folder, report=lambda line: None)
    return folder


def test_a_quantized_checkpoint_is_scored_sampled_and_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    format, method = "int3", "awq"
    out, again = tmp_path / "small", tmp_path / "again"
    assert call("quantize", run, out, "--format", format, "--method", method, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    weights, before = load_file(out / STEP / "model.safetensors"), load_file(run / STEP / "model.safetensors")
    tensors, total = load_file(out / "packed.safetensors"), 0
    for name in facts["groups"]:
        stored = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        assert torch.equal(unpacked(stored, format, weights[name].shape).float(), weights.pop(name))
        total += before.pop(name).numel()
    assert all(torch.equal(weights[name], before[name]) for name in before)  # embeddings and norms
    packed = sum(tensor.nbytes for tensor in tensors.values())
    assert facts["bits_per_weight"] == 8 * packed / total
    assert facts["bytes"] == packed + 4 * sum(tensor.numel() for tensor in weights.values())
    assert call("quantize", run / STEP, again, "--format", format, "--method", method) == 0
    assert f"held-out loss {facts['val_loss']:.4f}" in capsys.readouterr().out
    assert (again / STEP / "model.safetensors").read_bytes() == (out / STEP / "model.safetensors").read_bytes()
    quiz = tmp_path / "quiz.jsonl"
    quiz.write_text(json.dumps({"question": "the loss of", "choices": [" tensor", " of"], "answer": 0}))
    assert call("evaluate", out, "--tasks", quiz, "--json") == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["held_out"]["val_loss"] == pytest.approx(facts["val_loss"], abs=1e-6)
    assert scores["quantization"] == f"{format}_{method}"
    assert call("generate", out, "the", "--max-tokens", 2) == 0
    assert call("export", out, tmp_path / "hf") == 0
    assert f"{format} by {method}" in (tmp_path / "hf" / "README.md").read_text()


def test_what_cannot_be_quantized_or_trained_is_one_sentence_and_nothing_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, away, out = tmp_path / "small", tmp_path / "away", tmp_path / "out"
    assert call("quantize", run, small) == 0
    shutil.copytree(run, away)
    config, manifest = (json.loads((away / STEP / f"{name}.json").read_text()) for name in ("config", "manifest"))
    config["data"] |= {"path": str(tmp_path / "gone"), "cache_dir": str(tmp_path / "empty")}
    (away / STEP / "config.json").write_text(json.dumps(config))
    manifest["config.json"] = describe(away / STEP / "config.json")
    (away / STEP / "manifest.json").write_text(json.dumps(manifest))
    for message, arguments in {
        "must be one of int8, int4, int3": (run, out, "--format", "int5"),
        "method is 'best'; it must be one of rtn": (run, out, "--method", "best"),
        "must divide 32, the width of blocks.0.attention.qkv": (run, out, "--group", "24"),
        "group is 16; it must be 32 with format mxfp4": (run, out, "--format", "mxfp4", "--group", "16"),
        "group is 0; it must be 1 or more": (run, out, "--group", "0"),
        "tokens is 0": (run, out, "--tokens", "0"),
        "quantized already": (small, out),
        "exists": (run, small),
        "named like a checkpoint": (run, tmp_path / "step_3"),
        "gone": (away, out, "--method", "gptq"),
        "holds no checkpoint": (tmp_path / "nothing", out),
    }.items():
        assert call("quantize", *arguments) == 2
        errors = capsys.readouterr().err
        assert message in errors.strip().splitlines()[-1], errors
        assert "Traceback" not in errors
        assert not [*tmp_path.glob("*out*"), *tmp_path.glob("*step_3*")]
    assert call("quantize", away, out) == 0  # rounding to nearest needs no text
    with pytest.raises(UserError, match="is quantized and holds only weights"):
        train(read_config(small / STEP), small, report=lambda line: None)
    with pytest.raises(UserError, match="average"):
        load_for_evaluation(small, average=0.1)


EXPERTS = {"experts": 3, "experts_per_token": 2, "expert_hidden": 16, "shared_experts": 1, "dense_layers": 1}
LATENT = {"attention": "mla", "kv_rank": 16, "query_rank": 16, "rotary_size": 8}


def test_every_matrix_is_fitted_to_its_own_inputs(tmp_path: Path, small_corpus: Callable[..., DataConfig]) -> None:
    model = ModelConfig(width=32, hidden=64, depth=2, heads=2, vocab_size=256, **EXPERTS, **LATENT)
    config = RunConfig(model=model, data=small_corpus(512))
    gpt = build_model(config.model, config.optimizer, config.data.sequence_length, seed=3)
    with torch.no_grad():
        gpt.embedding.weight *= torch.logspace(-1, 0.5, 32)
    saver = Saver(tmp_path, ALONE, config, ByteTokenizer())
    path = saver.save(1, whole_weights(gpt), {})
    saver.wait()
    errors, (tokens, *_) = {}, calibration_text(load_for_evaluation(path), 1024)
    with torch.no_grad():
        exact = load_for_evaluation(path).model.last_hidden(tokens)
        for method in ("rtn", "awq", "gptq"):
            loaded = load_for_evaluation(path)
            quantize_model(loaded, Quantization("int3", method, 16), 2048)
            after = loaded.model.last_hidden(tokens)
            errors[method] = float((after - exact).square().mean())
    assert errors["awq"] < 0.9 * errors["rtn"]
    assert errors["gptq"] < 0.9 * errors["rtn"]
