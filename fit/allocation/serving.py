"""The cost of a served token: a roofline of the two passes of generation, prefill and decode.

      seconds = overhead + max(FLOPs / (peak e), bytes / (bandwidth f)), with efficiencies e and f of the software

N parameters have w bytes each; the cache keeps k numbers of c bytes per position; attention has width a (blocks x heads
x head size). A decode pass writes one token for each of b requests of context L; a prefill pass reads b prompts of L
tokens:

                 FLOPs                        bytes
      decode     b (2 N + 4 a L)              w N + b c k (L + 1)
      prefill    b L (2 N + 2 a (L + 1))      w N + b c k L

All numbers may be arrays, and broadcast.

Williams et al. 2009 (Roofline, CACM 52(4)); Pope et al. 2022, arXiv 2211.05102; Kaplan et al. 2020, arXiv 2001.08361,
table 1; Sardana et al. 2023, arXiv 2401.00448.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, InputError, floats

Spread = tuple[float, float, float]  # seconds per generated token over repeated runs: lowest, median, highest
WIDTH_PER_BLOCK = 128.0  # width over depth of a typical model (Kaplan et al. 2020, section 3.3)


class _Checked:
    may_be_zero: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _numbers(name, value, name in self.may_be_zero)


@dataclass(frozen=True)
class Served(_Checked):
    """A model's sizes that matter for serving.

    N: parameters with the head but without embedding tables. kv_numbers: 2 * depth * kv_heads * head_dim.
    attention_width: depth * heads * head_dim. weight_bytes per parameter, cache_bytes per cached number.
    """

    N: ArrayLike
    kv_numbers: ArrayLike
    attention_width: ArrayLike
    weight_bytes: float = 2.0
    cache_bytes: float = 2.0
    may_be_zero: ClassVar[tuple[str, ...]] = ("kv_numbers", "attention_width")

    @classmethod
    def typical(cls, N: ArrayLike, group: float = 1.0, weight_bytes: float = 2.0, cache_bytes: float = 2.0) -> Served:
        """Return a model of typical shape, N = 12 depth width^2 and width = 128 depth.

        `group`: query heads per key/value head.
        """
        depth = np.cbrt(floats(N) / (12.0 * WIDTH_PER_BLOCK**2))  # N = 12 depth (128 depth)^2
        numbers = WIDTH_PER_BLOCK * depth**2  # depth * width, of keys or of values, with one head per query head
        return cls(N, 2.0 * numbers / group, numbers, weight_bytes, cache_bytes)


@dataclass(frozen=True)
class Device(_Checked):
    """An accelerator: peak FLOP/s, bandwidth in bytes/s, dollars per hour, efficiencies, overhead in s per pass."""

    peak: float
    bandwidth: float
    hour: float = 1.0
    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    overhead: float = 0.0
    may_be_zero: ClassVar[tuple[str, ...]] = ("overhead",)

    @property
    def balance(self) -> float:
        """Return the FLOPs per byte above which a pass is limited by arithmetic."""
        return self.peak * self.compute_efficiency / (self.bandwidth * self.bandwidth_efficiency)


@dataclass(frozen=True)
class Pass:
    """One pass of a served model; `bound` is true where arithmetic is the limit."""

    tokens: Array
    flops: Array
    bytes: Array
    seconds: Array
    bound: Any

    @property
    def seconds_per_token(self) -> Array:
        return self.seconds / self.tokens


def decode(model: Served, device: Device, batch: ArrayLike, context: ArrayLike) -> Pass:
    N, k, a, b, L = _broadcast(model, batch=batch, context=context)
    read = model.weight_bytes * N + b * model.cache_bytes * k * (L + 1.0)
    return _pass(device, b, b * (2.0 * N + 4.0 * a * L), read)


def prefill(model: Served, device: Device, batch: ArrayLike, prompt: ArrayLike) -> Pass:
    N, k, a, b, L = _broadcast(model, batch=batch, prompt=prompt)
    moved = model.weight_bytes * N + b * model.cache_bytes * k * L
    return _pass(device, b * L, b * L * (2.0 * N + 2.0 * a * (L + 1.0)), moved)


@dataclass(frozen=True)
class Prices(_Checked):
    """Prices of a FLOP as in Sardana et al. 2023: dollars per accelerator hour, peak FLOP/s, and the MFU of training,
    reading prompts and writing answers.

    `output_share` is the share of served tokens that are written.
    """

    train_hour: float
    train_peak: float
    serve_hour: float
    serve_peak: float
    train_mfu: float = 0.5
    input_mfu: float = 0.5
    output_mfu: float = 0.01
    output_share: float = 0.5

    may_be_zero: ClassVar[tuple[str, ...]] = ("output_share",)

    @classmethod
    def from_roofline(
        cls,
        train: Device,
        serve: Device,
        model: Served,
        batch: float,
        prompt: float,
        answer: float,
        train_mfu: float = 0.5,
    ) -> Prices:
        """Return prices for serving `batch` requests at once, each of `prompt` tokens read and `answer` tokens written.

        The MFUs (shares of peak FLOP/s) count 2 N FLOPs per token. They hold for `model` and change slowly with N.
        """
        read = prefill(model, serve, batch, prompt).seconds_per_token
        written = decode(model, serve, batch, prompt + answer / 2.0).seconds_per_token  # an answer's mean context
        if read.ndim or written.ndim:
            raise InputError("the served model is an array of models; prices need a single model.")
        fastest = 2.0 * float(np.asarray(model.N)) / serve.peak  # seconds per token at the peak
        mfus = (train_mfu, fastest / float(read), fastest / float(written))
        return cls(train.hour, train.peak, serve.hour, serve.peak, *mfus, answer / (prompt + answer))

    @property
    def train(self) -> float:
        """Return dollars per training FLOP."""
        return self.train_hour / 3600.0 / self.train_peak / self.train_mfu

    @property
    def serve(self) -> float:
        """Return dollars per FLOP of serving, averaged over tokens read and written."""
        slowness = (1.0 - self.output_share) / self.input_mfu + self.output_share / self.output_mfu
        return self.serve_hour / 3600.0 / self.serve_peak * slowness


@dataclass(frozen=True)
class BreakEven:
    """The number of served tokens up to which the slower decoder costs less; 0: never, infinity: always."""

    tokens: float
    ci: tuple[float, float] | None
    saved: float  # seconds per token saved by the variant; 0 if the ranges overlap, so that training decides


def break_even(
    training: float, multiplier: float, base: Spread, variant: Spread, ci: tuple[float, float] | None = None
) -> BreakEven:
    """Return the number n of served tokens after which base and variant took equal time: T + n d = T / K + n d'.

    T is `training`, the seconds to train the base, K is `multiplier`, and the variant trains to equal loss in T / K; d
    and d' are the seconds per token of `base` and `variant`. With `ci`, the interval of K, n has a range.
    """
    low, saved, high = (base[i] - variant[2 - i] for i in range(3))
    # 0 if the ranges overlap: then speed cannot decide.
    gains = np.array([saved, low, high, high, low]) * float(low > 0 or high < 0)
    K = np.array([multiplier, *2 * (ci or ())])
    with np.errstate(divide="ignore", invalid="ignore"):  # 1 / 0: the variant never reaches the loss
        n, *ends = np.maximum(training * (1 / K - 1) / gains[: len(K)], 0.0).tolist()
    return BreakEven(n, (min(ends), max(ends)) if ends else None, float(gains[0]))


def _pass(device: Device, tokens: Array, flops: Array, moved: Array) -> Pass:
    arithmetic = flops / (device.peak * device.compute_efficiency)
    memory = moved / (device.bandwidth * device.bandwidth_efficiency)
    seconds = device.overhead + np.maximum(arithmetic, memory)
    return Pass(tokens, flops, moved, seconds, arithmetic > memory)


def _broadcast(model: Served, **sizes: ArrayLike) -> list[Array]:
    numbers = [_numbers(name, value) for name, value in sizes.items()]
    model_sizes = (floats(value) for value in (model.N, model.kv_numbers, model.attention_width))
    return [np.asarray(x) for x in np.broadcast_arrays(*model_sizes, *numbers)]


def _numbers(name: str, value: ArrayLike, zero: bool = False) -> Array:
    numbers = floats(value)
    share = name.endswith(("efficiency", "mfu", "share"))
    if not (np.isfinite(numbers) & (numbers >= 0 if zero else numbers > 0) & (not share or numbers <= 1)).all():
        accepted = "a finite number, zero or more" if zero else "a finite number above zero"
        raise InputError(f"{name} is {numbers}; it must be {'a share above 0 and at most 1' if share else accepted}.")
    return numbers
