"""Every number format against references that are written from its specification, or PyTorch's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from isoflop.train.quantization.bits import FORMATS, bits
from isoflop.train.quantization.formats import fake_quantize
from isoflop.train.quantization.noise import Noise, column_keys
from scipy.linalg import hadamard
from torch import Tensor

CPU = torch.device("cpu")
FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def numbers_of(mantissa_bits: int, bias: int, codes: int) -> np.ndarray:
    """Return the non-negative numbers of the first codes of a format, by OCP MX v1.0, section 5.3."""
    exponent, mantissa = np.divmod(np.arange(codes), 1 << mantissa_bits)
    return ((exponent > 0) + mantissa * 2.0**-mantissa_bits) * 2.0 ** (np.maximum(exponent, 1) - bias)


E2M1 = numbers_of(1, 1, 8)
E4M3 = numbers_of(3, 7, 127)  # code 127 is nan


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the nearest number of the table, ties to the even code, too large ones to the last."""
    distance = np.abs(np.abs(x)[..., None] - table)
    closest = distance == distance.min(-1, keepdims=True)
    first = closest.argmax(-1)
    return np.copysign(table[first + (closest.sum(-1) == 2) * (first % 2)], x)


def samples(block: int, seed: int = 0) -> Tensor:
    """Return rows (512, block) over many magnitudes: with ties, zeros, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, block, generator=generator) * 2.0 ** torch.randint(-12, 13, (512, 1), generator=generator)
    x[::2] *= 2.0 ** torch.randint(-9, 1, (256, block), generator=generator)
    x[::4] = (x[::4].view(torch.int32) & -0x100000).view(torch.float32)  # three bits of mantissa: many ties
    x[:, 3] = 0.0
    x[7] = 0.0
    return x


def scaled(scale: Tensor, rounded: np.ndarray | Tensor) -> Tensor:
    return torch.where(scale > 0, torch.as_tensor(rounded).float() * scale, torch.zeros(()))


def assert_equal(ours: Tensor, reference: Tensor) -> None:
    assert ours.shape == reference.shape
    assert torch.equal(ours, reference), (ours[ours != reference][:5], reference[ours != reference][:5])


def reference(format: str, x: Tensor) -> Tensor:
    """Quantize rows of one block each."""
    largest = x.abs().amax(1, keepdim=True)
    match format:
        case "fp8_e4m3" | "fp8_e5m2":
            scale = largest * (1 / torch.finfo(FLOAT8[format]).max)
            return scaled(scale, (x * (1 / scale)).nan_to_num().to(FLOAT8[format]))
        case "mxfp8" | "mxfp4":
            table, exponent = (E4M3, 8) if format == "mxfp8" else (E2M1, 2)
            scale = torch.exp2(largest.log2().floor() - exponent).where(largest > 0, 1.0)
            return scaled(scale, nearest((x.double() / scale).numpy(), table))
        case "nvfp4":
            exact = (largest * (1 / 6)).where(largest > 0, 1.0)
            shift = torch.exp2(exact.log2().floor())  # the scale of the tensor, a power of two, which E4M3 lacks
            scale = (exact / shift).to(torch.float8_e4m3fn).float() * shift
            return scaled(scale, nearest((x * (1 / scale)).double().numpy(), E2M1)).where(largest > 0, 0.0)
        case "int8" | "int4":
            high = 127 if format == "int8" else 7
            scale = (largest[:, 0] * (1 / high)).where(largest[:, 0] > 0, 1.0)
            zeros = torch.zeros(len(x), dtype=torch.int32)
            return torch.fake_quantize_per_channel_affine(x, scale, zeros, 0, -high, high)
        case _:
            scale = (x.double().abs().sum(1, keepdim=True) / x.shape[1]).float()
            return scaled(scale, (x * (1 / scale)).nan_to_num().round().clamp(-1, 1))


@pytest.mark.parametrize("format", FORMATS)
def test_values_are_those_of_the_specification(format: str) -> None:
    block = FORMATS[format].block
    x = samples(block)
    if format == "ternary":  # a mean without rounding
        x = (x * 2.0**10).round().clamp(-2000, 2000) * 2.0**-10
    assert_equal(fake_quantize(x, format, block), reference(format, x))
    # Rows of several blocks, the last one shorter; and another floating type.
    rows = x.view(64, -1)[:, : 8 * block - 5]
    parts = [fake_quantize(part, format, part.shape[1]) for part in rows.split(block, 1)]
    assert_equal(fake_quantize(rows, format, block), torch.cat(parts, 1))
    half = x.to(torch.bfloat16)
    assert_equal(fake_quantize(half, format, block), fake_quantize(half.float(), format, block).to(torch.bfloat16))


def test_all_codes_and_the_ties_between_them_round_as_in_the_tables() -> None:
    tables = {
        "fp8_e4m3": torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float(),
        "fp8_e5m2": torch.arange(124).to(torch.uint8).view(torch.float8_e5m2).float(),
        **{name: torch.tensor(table).float() for name, table in (("mxfp8", E4M3), ("mxfp4", E2M1), ("nvfp4", E2M1))},
        "int8": torch.arange(128).float(),
        "int4": torch.arange(8).float(),
    }
    for format, table in tables.items():
        middle = (table[1:] + table[:-1]) / 2
        for sign in (1.0, -1.0):
            for x in (table, middle, torch.nextafter(middle, table[1:]), torch.nextafter(middle, table[:-1])):
                row = sign * torch.cat((x, table[-1:]))[None]  # with the largest number, every scale is 1
                rounded = torch.from_numpy(nearest(row.double().numpy(), table.double().numpy())).float()
                assert_equal(fake_quantize(row, format, row.shape[1]), rounded)
    assert_equal(torch.tensor(E4M3).float(), tables["fp8_e4m3"])


def keys(tokens: Tensor, columns: int, seed: int = 0, step: int = 0) -> tuple[Tensor, Tensor]:
    noise = Noise(seed)
    noise.step = step
    noise.see(tokens)
    return noise.rows, column_keys("blocks.0.mlp.down.weight", range(columns), tokens.device)


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_is_unbiased_and_keeps_the_numbers_of_the_format(format: str) -> None:
    columns = FORMATS[format].block
    rows = -(-(10**6) // columns)
    tokens = torch.randint(0, 256, (rows // 64 + 1, 64), generator=torch.Generator().manual_seed(1))
    row_keys, column = keys(tokens, columns)
    x = torch.randn(columns, generator=torch.Generator().manual_seed(2)).expand(rows, columns)
    y = fake_quantize(x, format, columns, (row_keys[:rows], column))
    errors = (y - x).double()
    assert abs(errors.mean()) < 3 * errors.std() / math.sqrt(errors.numel())
    by_column = errors.mean(0) / (errors.std(0) / math.sqrt(rows)).clamp_min(1e-30)
    assert by_column.square().mean() < 2  # 1 expected; the columns are independent
    assert_equal(fake_quantize(y[:1], format, columns, (row_keys[:1], column)), y[:1])


def test_noise_belongs_to_a_token_wherever_its_sequence_is_trained() -> None:
    tokens = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(0))
    rows, columns = keys(tokens, 48)
    x = torch.randn(8 * 32, 48, generator=torch.Generator().manual_seed(1))
    y = fake_quantize(x, "int4", 16, (rows, columns))
    for first in range(0, 8, 2):
        part = slice(first * 32, (first + 2) * 32)
        assert_equal(fake_quantize(x[part], "int4", 16, keys(tokens[first : first + 2], 48)), y[part])
    assert_equal(fake_quantize(x[:, 16:], "int4", 16, (rows, columns[16:])), y[:, 16:])
    for other in (keys(tokens, 48, seed=1), keys(tokens, 48, step=1), (rows, column_keys("other", range(48), CPU))):
        assert (fake_quantize(x, "int4", 16, other) != y).float().mean() > 0.2


def test_rotated_blocks_are_those_of_a_hadamard_matrix() -> None:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = torch.from_numpy(hadamard(16)).double() / 4
    expected = fake_quantize((x.view(-1, 16) @ matrix).float(), "int8", 16).double() @ matrix
    torch.testing.assert_close(fake_quantize(x, "int8", 16, hadamard=True), expected.view(64, 48), rtol=0, atol=1e-6)
    alone, kept = x[:1, :16].float(), x[:1, :16].float()  # one block
    torch.testing.assert_close(fake_quantize(alone, "int8", 16, hadamard=True), expected[:1].float())
    assert torch.equal(alone, kept)


def test_a_block_that_is_not_finite_stays_so_and_others_are_unchanged() -> None:
    x = samples(16)[:8]
    for bad in (math.inf, -math.inf, math.nan):
        for format in FORMATS:
            spoilt = x.clone()
            spoilt[0, 5] = bad
            y = fake_quantize(spoilt.view(2, 64), format, 16).view(8, 16)
            assert not y[0, 5].isfinite()
            assert_equal(y[1:], fake_quantize(x[1:], format, 16))


def test_bits_count_the_scales() -> None:
    assert [bits(format) for format in ("mxfp4", "nvfp4", "mxfp8", "fp32", "bf16")] == [4.25, 4.5, 8.25, 32.0, 16.0]
    assert (bits("int4", 32), bits("ternary", 1 << 30)) == (5.0, pytest.approx(math.log2(3), abs=1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_gpu_gives_the_same_bits(format: str, hadamard: bool) -> None:
    tokens = torch.randint(0, 256, (16, 32), generator=torch.Generator().manual_seed(0))
    for block in (16, 32, 128):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.cat([samples(128, seed) for seed in range(2)], 1).clamp(-1e4, 1e4).to(dtype)
            for noisy in (False, True):
                on_cpu, on_gpu = (
                    fake_quantize(x.to(place), format, block, keys(tokens.to(place), 256) if noisy else None, hadamard)
                    for place in ("cpu", "cuda")
                )
                assert_equal(on_gpu.cpu(), on_cpu)
