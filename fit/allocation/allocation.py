"""How to split a budget between parameters and tokens, under the questions that people really ask.

Special here: every answer is an `Optimum` with intervals, and a closed form or a root to rounding wherever the law is
E + A/N^alpha + B/D^beta (see `isoloss`). Other laws of (N, D), other FLOP conventions and repeated tokens are searched.

Hoffmann et al. 2022 (arXiv:2203.15556), section 3.3; Muennighoff et al. 2023 (arXiv:2305.16264); Sardana et al. 2023
(arXiv:2401.00448); de Vries 2023, "Go smol or go home", for the price of a smaller model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, InputError, positive
from .isoloss import EqualLoss, lowest, optimum, root, serving_optimum, tokens_for_loss
from .optimum import Constants, Optimum, aligned, answer, divide, exactly_one
from .serving import Device, Served, decode, prefill

__all__ = [
    "Optimum",
    "Prices",
    "compute_optimal",
    "fixed_size",
    "inference_aware",
    "optimum",
    "overtraining_cost",
    "token_limited",
]

REACH = 60.0  # a search in log N goes this far to both sides of sqrt(C), so that units do not matter
Curve = Callable[[Array], Array]


def compute_optimal(law: Any, flops: ArrayLike, flops_per_token: float | Curve = 6.0, level: float = 0.95) -> Optimum:
    """The N and D of lowest loss for `flops` (a scalar or (targets,)) of training.

    flops_per_token: k of k N FLOPs a token, or a function of N (any shape) such as `FlopsPerToken`. The Chinchilla form
    with a number has a closed form; anything else is searched in log N, to about 1e-6.
    """
    (C,) = aligned(flops=flops)

    def solve(constants: Constants) -> dict[str, Array]:
        N, D, loss = _unlimited(law, constants, C, flops_per_token)
        return {"flops": C, "N": N, "D": D, "loss": loss}

    return answer(law, solve, level)


def token_limited(
    law: Any, flops: ArrayLike, unique_tokens: ArrayLike, flops_per_token: float | Curve = 6.0, level: float = 0.95
) -> Optimum:
    """The best N and D for `flops` when there are only `unique_tokens` different ones (broadcast together).

    A law of (N, D, U) says what a repeated token is worth, and the number of epochs is part of the optimum; a law of
    (N, D) does not, so D stops at one epoch and the rest of the budget goes into N. `more`: epochs. Far beyond what the
    tokens are good for, the loss of repetition is flat to rounding, and N is one of many.
    """
    C, U = aligned(flops=flops, unique_tokens=unique_tokens)
    spend = _convention(flops_per_token)

    def solve(constants: Constants) -> dict[str, Array]:
        if tuple(law.inputs) == ("N", "D", "U"):
            N, D, loss = _search(law, constants, C, spend, U)
        else:
            N, D, loss = _unlimited(law, constants, C, flops_per_token)
            middle = 0.5 * np.log(C)
            all_of_it = np.exp(root(lambda x: np.log(spend(np.exp(x)) * U / C), middle - REACH, middle + REACH))
            N, D = np.where(D > U, all_of_it, N), np.minimum(D, U)
            loss = np.where(D < U, loss, law.evaluate(constants, all_of_it, U))
        return {"flops": C, "N": N, "D": D, "loss": loss, "epochs": np.maximum(D / U, 1.0)}

    return answer(law, solve, level)


def fixed_size(
    law: Any,
    N: ArrayLike,
    flops: ArrayLike | None = None,
    loss: ArrayLike | None = None,
    flops_per_token: float | Curve = 6.0,
    level: float = 0.95,
) -> Optimum:
    """At N parameters: the tokens and the loss that `flops` buy, or the tokens and FLOPs that `loss` needs.

    Infinite tokens mean that no training brings this size to that loss.
    """
    name, value = exactly_one(flops=flops, loss=loss)
    spend = _convention(flops_per_token)
    n, given = aligned(N=N, **{name: value})
    if name == "loss":
        _chinchilla(law)

    def solve(constants: Constants) -> dict[str, Array]:
        if name == "flops":
            D = given / spend(n)
            return {"flops": given, "N": n, "D": D, "loss": law.evaluate(constants, n, D)}
        D = tokens_for_loss(n, given, constants)
        return {"flops": spend(n) * D, "N": n, "D": D, "loss": given}

    return answer(law, solve, level)


def overtraining_cost(
    law: Any,
    flops: ArrayLike,
    ratio: ArrayLike | None = None,
    size: ArrayLike | None = None,
    overhead: ArrayLike | None = None,
    level: float = 0.95,
) -> Optimum:
    """A smaller model of the same loss as the optimum at `flops` (C = 6 N D), and what it costs to train.

    Exactly one of: ratio, its tokens per parameter over the optimum's; size, its parameters over the optimum's;
    overhead, the extra compute one will pay (0.2 for 20 %), for the smallest model that this buys. `more`: size and
    overhead. Below (beta / (alpha + beta))^(1/alpha) of the optimal size the overhead is infinite. de Vries 2023.
    """
    name, value = exactly_one(ratio=ratio, size=size, overhead=overhead)
    _chinchilla(law)
    C, wanted = aligned(flops=flops, **{name: value})

    def solve(constants: Constants) -> dict[str, Array]:
        N0, _, loss = optimum(C, constants)
        if name == "size":
            N = wanted * N0
            D = tokens_for_loss(N, loss, constants)
        else:
            curve = EqualLoss(constants, loss)
            n0, d0 = curve(curve.cheapest)
            if name == "ratio":
                z = root(lambda z: np.subtract(*curve(z)[::-1]) - (d0 - n0) - np.log(wanted), *curve.ends)
            else:
                z = root(lambda z: np.add(*curve(z)) - (n0 + d0) - np.log1p(wanted), curve.cheapest, curve.ends[1])
            N, D = curve.point(z)
        spent = 6.0 * N * D
        overhead = np.round(spent / C - 1.0, 12)  # rounding is no overhead
        return {"flops": spent, "N": N, "D": D, "loss": loss, "size": divide(N, N0), "overhead": overhead}

    return answer(law, solve, level)


@dataclass(frozen=True)
class Prices:
    """What a FLOP costs, as in Sardana et al. 2023: dollars an accelerator hour, its peak FLOP/s, and the share of
    that peak (MFU) which training, reading a prompt and writing an answer each reach.

    `output_share` is the share of served tokens that are written, one at a time and so at a lower MFU, by the model.
    """

    train_hour: float
    train_peak: float
    serve_hour: float
    serve_peak: float
    train_mfu: float = 0.5
    input_mfu: float = 0.5
    output_mfu: float = 0.01
    output_share: float = 0.5

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            least, most = (0.0, 1.0) if name.endswith(("mfu", "share")) else (0.0, np.inf)
            if not (least < value <= most and np.isfinite(value)) and not (name == "output_share" and value == 0.0):
                accepted = "a share above 0 and at most 1" if most == 1.0 else "a finite number above zero"
                raise InputError(f"{name} is {value}; it must be {accepted}.")

    @classmethod
    def from_roofline(
        cls, train: Device, serve: Device, model: Served, batch: float, prompt: float, answer: float,
        train_mfu: float = 0.5,
    ) -> Prices:  # fmt: skip
        """Prices in which the MFU of serving is computed and not guessed; see `serving`.

        Both MFUs count 2 N FLOPs a token, as `inference_aware` does, so what attention and the reading of the cache
        cost lowers them. They are those of a model about as large as the answer will be, for they change with N slowly.

        Args:
            train, serve: devices, with their hourly prices.
            model: that is served, a single one.
            batch: requests served together.
            prompt, answer: tokens of a request, read and written.
            train_mfu: of training.
        """
        read = prefill(model, serve, batch, prompt).seconds_per_token
        written = decode(model, serve, batch, prompt + answer / 2.0).seconds_per_token
        if read.ndim or written.ndim:
            raise InputError("the served model is an array of models; prices belong to one.")
        least = 2.0 * float(np.asarray(model.N)) / serve.peak  # seconds a token at the peak
        return cls(
            train.hour, train.peak, serve.hour, serve.peak, train_mfu, least / float(read), least / float(written),
            answer / (prompt + answer),
        )  # fmt: skip

    @property
    def train(self) -> float:
        """Dollars per training FLOP."""
        return self.train_hour / 3600.0 / self.train_peak / self.train_mfu

    @property
    def serve(self) -> float:
        """Dollars per FLOP of serving."""
        slowness = (1.0 - self.output_share) / self.input_mfu + self.output_share / self.output_mfu
        return self.serve_hour / 3600.0 / self.serve_peak * slowness


def inference_aware(
    law: Any,
    lifetime_tokens: ArrayLike,
    loss: ArrayLike | None = None,
    budget: ArrayLike | None = None,
    prices: Prices | None = None,
    level: float = 0.95,
) -> Optimum:
    """The model that is cheapest to train and then to serve for `lifetime_tokens`. Sardana et al. 2023.

    A token trained on costs 6 N FLOPs, one served 2 N. Exactly one of: loss, which it must reach; budget, for which its
    loss is lowest (total FLOPs, or dollars with `prices`). `flops` is training alone; `more`: inference_flops,
    total_flops, saving (of what the training-optimal model of the same loss would cost in all), and dollars with
    `prices`.
    """
    name, value = exactly_one(loss=loss, budget=budget)
    _chinchilla(law)
    served, wanted = aligned(lifetime_tokens=lifetime_tokens, **{name: value})
    # Serving a token costs what training on this many would.
    worth = served / 3.0 * (prices.serve / prices.train if prices else 1.0)

    def solve(constants: Constants) -> dict[str, Array]:
        if name == "loss":
            curve = EqualLoss(constants, wanted)
            z = root(lambda z: z - curve.cheapest - np.log1p(worth * np.exp(-curve(z)[1])), *curve.ends)
            N, D = curve.point(z)
            goal = wanted
        else:
            N, D, goal = serving_optimum(wanted / (prices.train if prices else 1.0), worth, constants)
            curve = EqualLoss(constants, goal)
        N0, D0 = curve.point(curve.cheapest)
        found = {"flops": 6.0 * N * D, "N": N, "D": D, "loss": goal, "inference_flops": 2.0 * N * served}
        found["total_flops"] = found["flops"] + found["inference_flops"]
        found["saving"] = 1.0 - divide(N * (D + worth), N0 * (D0 + worth))
        return found | ({"dollars": 6.0 * prices.train * N * (D + worth)} if prices else {})

    return answer(law, solve, level)


def _unlimited(law: Any, constants: Constants, C: Array, flops_per_token: Any) -> tuple[Array, Array, Array]:
    if law.form == "chinchilla" and not callable(flops_per_token):
        return optimum(C, constants, float(positive("flops_per_token", [flops_per_token])[0]))
    if tuple(law.inputs) != ("N", "D"):
        raise InputError(f"the law takes {', '.join(law.inputs)}; a law of N and D is expected.")
    return _search(law, constants, C, _convention(flops_per_token))


def _search(
    law: Any, constants: Constants, C: Array, spend: Curve, U: Array | None = None
) -> tuple[Array, Array, Array]:
    """The lowest loss over log N at D = C / spend(N), for any law: a grid, then golden sections around its best."""
    # Next to E the other terms lose digits, and the place of a flat minimum half of those left.
    sought = {**constants, "E": np.zeros_like(constants["E"])} if law.form == "chinchilla" else constants

    def loss(x: Array, constants: Constants = sought) -> Array:
        N = np.exp(x)
        D = C / spend(N)
        value = np.asarray(law.evaluate(constants, N, D, *(() if U is None else (np.minimum(U, D),))))
        return np.where(np.isnan(value), np.inf, value)

    with np.errstate(all="ignore"):
        middle = 0.5 * np.log(C)
        x, edge = lowest(loss, middle - REACH, middle + REACH)
        N = np.where(edge < 0, 0.0, np.where(edge > 0, np.inf, np.exp(x)))
        D = np.where(edge < 0, np.inf, np.where(edge > 0, 0.0, C / spend(np.exp(x))))
        return N, D, loss(x, constants)


def _convention(flops_per_token: float | Curve) -> Curve:
    if callable(flops_per_token):
        return flops_per_token
    coefficient = float(positive("flops_per_token", [flops_per_token])[0])
    return lambda N: coefficient * N


def _chinchilla(law: Any) -> None:
    if law.form != "chinchilla":
        raise InputError(f"the law is of form {law.form!r}; this question needs E + A/N^alpha + B/D^beta.")
