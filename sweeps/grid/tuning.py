"""Hyperparameters as functions of N and D: the rules of the `tuning` group. Pure.

Rates are those at the base width and depth; `train/model/parametrization.py` scales them. Published rules fit
`PowerRule`: Power Lines (Bergsma et al. 2025, arXiv:2505.13738), DeepSeek LLM (Bi et al. 2024, arXiv:2401.02954), Step
Law (Li et al. 2025, arXiv:2503.04715).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from ...train.config import OptimizerConfig, RunConfig, canonical_json, flatten, identity, to_dict
from ...train.errors import UserError
from ...train.fields import Count, Count6, Exponent, Positive
from ...train.flops import count_parameters
from ...train.optimizer.registry import OPTIMIZERS
from . import architectures

WHOLE_BATCHES = sorted([*(2**i for i in range(40)), *(3 * 2**i for i in range(40))])  # sequences a step
TUNED = (*(f"optimizer.{name}" for name in ("base_depth", "learning_rate", "batch_size", "weight_decay")),)
# Fields in which runs of one family differ: sizes, and the fields that rules set.
VARIED = {*TUNED, *(f"model.{name}" for name in ("width", "depth", "heads", "kv_heads", "hidden"))}


@dataclass
class PowerRule:
    """The rule k N^a D^b batch^c, D and batch in tokens; `N`, `D` and `batch` hold the exponents. k None: no rule."""

    k: Positive | None = None
    N: Exponent = 0.0
    D: Exponent = 0.0
    batch: Exponent = 0.0


@dataclass
class TuningConfig:
    """Rules that set hyperparameters by N and D; without a rule, the base run's value is used."""

    file: str | None = None  # file of `isoflop tune`, for the rules that are not set here
    base_depth: Count | None = None  # optimizer.base_depth
    batch_tokens: PowerRule = field(default_factory=PowerRule)  # tokens per step
    learning_rate: PowerRule = field(default_factory=PowerRule)  # at base_width and base_depth
    timescale: PowerRule = field(default_factory=PowerRule)  # of weight decay: batch / (learning rate * decay * D)
    min_steps: Count = 100  # the batch rule leaves a run at least this many steps
    min_batch: Count6 = 1  # sequences; the batch rule gives a multiple of it, which parallel.dp can then divide
    horizon: Annotated[str, ("run", "size")] = "run"  # D in the rules: the run's, or the longest of the same N
    # Fields that rules do not change; fields set on the command line are added.
    keep: list[Annotated[str, TUNED]] = field(default_factory=list)
    dial: bool = False  # width and heads follow from model.depth, if the grid chooses no sizes
    tokens_per_parameter: Positive | None = None  # sets D, if nothing else does

    @property
    def choose_batch(self) -> bool:
        return self.batch_tokens.k is not None and "optimizer.batch_size" not in self.keep


@dataclass(frozen=True)
class Tuner:
    """The rules and, with `horizon=size`, the smallest and largest D of each model of a grid."""

    rules: TuningConfig = field(default_factory=TuningConfig)
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def with_spans(self, runs: Iterable[RunConfig]) -> Self:
        if self.rules.horizon == "run":
            return self
        spans: dict[str, tuple[float, float]] = {}
        for run in runs:
            shortest, longest = spans.get(key := _model_key(run), (math.inf, 0))
            spans[key] = min(shortest, run.tokens), max(longest, run.tokens)
        return replace(self, spans=spans)

    def tuned(self, run: RunConfig, fixed: Collection[str] = (), whole: bool = False) -> RunConfig:
        """Return the run with the hyperparameters that the rules give at its N and D.

        Args:
            fixed: Dotted names of fields that the rules do not change.
            whole: Round D to a whole number of steps of the run's batch.
        """
        rules, fixed = self.rules, {*fixed, *self.rules.keep}
        N, length = count_parameters(run.model).N_active, run.data.sequence_length
        optimizer = replace(run.optimizer)

        def choose(name: str, value: float | None) -> None:
            if value is not None and f"optimizer.{name}" not in fixed:
                setattr(optimizer, name, value)

        choose("base_depth", rules.base_depth)
        if rules.batch_tokens.k is not None:
            shortest, D = self._span(run)
            choose("batch_size", batch_size(rules, N, D, shortest, length))
        run = replace(run, optimizer=optimizer)
        if whole:
            run.tokens = whole_steps(run.tokens, run)
        at = (N, self._span(run)[1], run.batch_tokens)
        choose("learning_rate", power(rules.learning_rate, *at))
        if (tau := power(rules.timescale, *at)) is not None:
            rate = decaying_rate(optimizer, run.model.width)
            choose("weight_decay", weight_decay(tau, rate, at[1], run.batch_tokens))
        return run

    def misses_batch(self, run: RunConfig) -> bool:
        """Return whether a run's batch is over 1.5 times larger or smaller than the batch rule's."""
        target = power(self.rules.batch_tokens, count_parameters(run.model).N_active, self._span(run)[1], 1.0)
        if target is None or not self.rules.choose_batch:
            return False
        return not 1 / 1.5 <= run.batch_tokens / target <= 1.5

    def _span(self, run: RunConfig) -> tuple[float, float]:
        if not self.spans:
            return run.tokens, run.tokens
        shortest, longest = self.spans.get(_model_key(run), (math.inf, 0))
        return min(shortest, run.tokens), max(longest, run.tokens)

    def dialled(self, run: RunConfig) -> RunConfig:
        """Return the run with tuning.dial's width and heads for its depth, and an unset D from tokens_per_parameter."""
        model, tokens = run.model, run.tokens
        if self.rules.dial:
            model = architectures.of_depth(model)
        if tokens <= 0 and self.rules.tokens_per_parameter is not None:
            tokens = round(self.rules.tokens_per_parameter * count_parameters(model).N_active)
        return replace(run, model=model, tokens=tokens)


def power(rule: PowerRule, N: float, D: float, batch: float) -> float | None:
    """Evaluate a power rule at N parameters, D tokens and `batch` tokens per step; return None if its k is not set."""
    return None if rule.k is None else float(rule.k * N**rule.N * D**rule.D * batch**rule.batch)


def batch_size(rules: TuningConfig, N: float, D: float, shortest: float, length: int) -> int:
    """Return the sequences per step: the nearest of 1, 2, 3, 4, 6, 8, ... to the batch rule at N and D.

    It is a multiple of rules.min_batch and, if that allows, leaves a run of `shortest` tokens rules.min_steps steps.
    `length`: tokens of a sequence. See Power Lines, section 4; Step Law, equation 1.
    """
    target = power(rules.batch_tokens, N, D, 1.0)
    assert target is not None
    if not target <= D:
        raise UserError(f"tuning.batch_tokens gives {target:.3g} tokens at N {N:,} and D {D:.3g}; it must be at most D")
    lower, upper = rules.min_batch, shortest / (length * rules.min_steps)
    sizes = [size for size in WHOLE_BATCHES if size % lower == 0] or [lower * size for size in WHOLE_BATCHES]
    sizes = [size for size in sizes if size <= max(lower, upper)]
    return min(sizes, key=lambda size: abs(math.log(size * length / target)))


def decaying_rate(optimizer: OptimizerConfig, width: int) -> float:
    """Return the learning rate of the blocks' matrices; weight decay shrinks them by rate * weight_decay each step."""
    if (own_rate := OPTIMIZERS[optimizer.kind].rate) is not None:
        return own_rate(optimizer)
    narrow = (optimizer.base_width / width) ** optimizer.width_exponent
    return optimizer.learning_rate * (narrow if optimizer.base_depth is None else 1.0)


def weight_decay(tau: float, rate: float, D: float, batch: float) -> float:
    """Return the weight decay lambda = B / (eta tau D), by which weights average the updates of about tau D tokens.

    eta is `rate`, B `batch` tokens. See Wang and Aitchison 2024 (arXiv:2405.13698); Power Lines, section 3.
    """
    return batch / (rate * tau * D)


def whole_steps(tokens: float, base: RunConfig, rounded: Callable[[float], int] = round) -> int:
    """Round a number of tokens to a multiple of the run's batch, at least one batch."""
    step = max(1, base.batch_tokens)  # a batch of 0 is refused later, with the run
    return max(1, rounded(tokens / step)) * step


def _model_key(run: RunConfig) -> str:
    return canonical_json(to_dict(run.model))


def family(base: RunConfig) -> dict[str, Any]:
    """Return, by dotted name, the settings shared by all runs of a grid; tuned rules hold only for these."""
    shared = identity(base)
    flat = flatten({group: shared[group] for group in ("model", "data", "optimizer", "schedule")})
    return {name: value for name, value in flat.items() if name not in VARIED}


def depends_on_D(rules: TuningConfig) -> bool:
    """Return whether runs that differ only in D get different settings, and so cannot share steps."""
    rules_set = [rule for rule in vars(rules).values() if isinstance(rule, PowerRule) and rule.k is not None]
    return rules.timescale in rules_set or any(rule.D != 0.0 for rule in rules_set)
