"""What a run learns by as a function of its N and D: the rules of the `tuning` group. Pure.

Width and depth are `train/model/parametrization.py`'s: here a rate is one at the base width and depth. Every constant
is one of `PowerRule`, so that published rules can be written down: Power Lines (Bergsma et al. 2025, arXiv:2505.13738),
DeepSeek LLM (Bi et al. 2024, arXiv:2401.02954), Step Law (Li et al. 2025, arXiv:2503.04715).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from ...train.config import OptimizerConfig, RunConfig, canonical_json, flatten, identity, to_dict
from ...train.errors import UserError
from ...train.fields import Count, Exponent, Positive
from ...train.flops import count_parameters
from ...train.optimizer.registry import OPTIMIZERS
from . import architectures

WHOLE_BATCHES = sorted([*(2**i for i in range(40)), *(3 * 2**i for i in range(40))])  # sequences a step
TUNED = (*(f"optimizer.{name}" for name in ("base_depth", "learning_rate", "batch_size", "weight_decay")),)
# What a run has beside its family: sizes, and what rules choose.
VARIED = {*TUNED, *(f"model.{name}" for name in ("width", "depth", "heads", "kv_heads", "hidden"))}


@dataclass
class PowerRule:
    """k N^a D^b batch^c, of N_total, and of D and the run's own batch in tokens; without a k there is no rule."""

    k: Positive | None = None
    N: Exponent = 0.0
    D: Exponent = 0.0
    batch: Exponent = 0.0


@dataclass
class TuningConfig:
    """How what a run learns by follows its N and D; where there is no rule, the run's own value stands."""

    file: str | None = None  # constants that `isoflop tune` wrote, for the rules that have none here
    base_depth: Count | None = None  # optimizer.base_depth
    batch_tokens: PowerRule = field(default_factory=PowerRule)  # tokens a step
    learning_rate: PowerRule = field(default_factory=PowerRule)  # at base_width and base_depth
    timescale: PowerRule = field(default_factory=PowerRule)  # of weight decay: batch / (learning rate * decay * D)
    min_steps: Count = 100  # of a run, which a batch that grew may not take away
    horizon: Annotated[str, ("run", "size")] = "run"  # D in the rules: the run's, or that of the longest of its N
    # Fields of a run that rules leave alone; what the command line gives is added.
    keep: list[Annotated[str, TUNED]] = field(default_factory=list)
    dial: bool = False  # width and heads follow from model.depth, where the grid chooses no sizes
    tokens_per_parameter: Positive | None = None  # D, where nothing else says it


@dataclass(frozen=True)
class Tuner:
    """The rules, and with `horizon=size` the least and most D of every model that runs of a grid have."""

    rules: TuningConfig = field(default_factory=TuningConfig)
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def with_spans(self, runs: Iterable[RunConfig]) -> Self:
        if self.rules.horizon == "run":
            return self
        spans: dict[str, tuple[float, float]] = {}
        for run in runs:
            least, most = spans.get(key := _model_key(run), (math.inf, 0))
            spans[key] = min(least, run.tokens), max(most, run.tokens)
        return replace(self, spans=spans)

    def tuned(self, run: RunConfig, kept: Collection[str] = (), whole: bool = False) -> RunConfig:
        """The run with what the rules give at its N and `tokens`, but for the fields in `kept`, by dotted names.

        `whole`: D becomes the nearest whole number of steps of its own batch.
        """
        rules, kept = self.rules, {*kept, *self.rules.keep}
        N, length = count_parameters(run.model).N_active, run.data.sequence_length
        optimizer = replace(run.optimizer)

        def choose(name: str, value: float | None) -> None:
            if value is not None and f"optimizer.{name}" not in kept:
                setattr(optimizer, name, value)

        choose("base_depth", rules.base_depth)
        if rules.batch_tokens.k is not None:
            least, D = self._span(run)
            choose("batch_size", batch_size(rules, N, D, least, length, max(1, run.parallel.dp)))
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
        """Whether a run's batch is off its rule by more than half: see what bounds it at `batch_size`."""
        wanted = power(self.rules.batch_tokens, count_parameters(run.model).N_active, self._span(run)[1], 1.0)
        if wanted is None or "optimizer.batch_size" in self.rules.keep:
            return False
        return not 1 / 1.5 <= run.batch_tokens / wanted <= 1.5

    def _span(self, run: RunConfig) -> tuple[float, float]:
        """The least and the most D of its model's runs, the run's own included."""
        least, most = self.spans.get(_model_key(run), (math.inf, 0))
        return min(least, run.tokens), max(most, run.tokens)

    def dialled(self, run: RunConfig) -> RunConfig:
        """With tuning.dial width and heads that follow from the depth; with tuning.tokens_per_parameter a D."""
        model, tokens = run.model, run.tokens
        if self.rules.dial:
            model = architectures.of_depth(model)
        if tokens <= 0 and self.rules.tokens_per_parameter is not None:
            tokens = round(self.rules.tokens_per_parameter * count_parameters(model).N_active)
        return replace(run, model=model, tokens=tokens)


def power(rule: PowerRule, N: float, D: float, batch: float) -> float | None:
    """A rule's value, for D and the batch in tokens."""
    return None if rule.k is None else float(rule.k * N**rule.N * D**rule.D * batch**rule.batch)


def batch_size(rules: TuningConfig, N: float, D: float, least: float, length: int, ranks: int = 1) -> int:
    """Sequences a step: of 1, 2, 3, 4, 6, 8, 12, 16, ... those that the data-parallel ranks can share, the nearest.

    The best batch is a power of D alone (Power Lines, section 4; Step Law, equation 1). A run of `least` tokens makes
    rules.min_steps steps, unless it has fewer sequences. A rule that gives less than a sequence a rank gives one.
    """
    wanted = power(rules.batch_tokens, N, D, 1.0)
    assert wanted is not None
    if not wanted <= D:
        raise UserError(f"tuning.batch_tokens gives {wanted:.3g} tokens at N {N:,} and D {D:.3g}; it must be at most D")
    most = max(ranks, least / (length * rules.min_steps))
    shared = [size for size in WHOLE_BATCHES if size % ranks == 0] or [ranks * size for size in WHOLE_BATCHES]
    return min((size for size in shared if size <= most), key=lambda size: abs(math.log(size * length / wanted)))


def decaying_rate(optimizer: OptimizerConfig, width: int) -> float:
    """The rate with which the matrices of blocks shrink, by it times weight_decay a step (see `parameter_groups`)."""
    if (own_rate := OPTIMIZERS[optimizer.kind].rate) is not None:
        return own_rate(optimizer)
    narrow = (optimizer.base_width / width) ** optimizer.width_exponent
    return optimizer.learning_rate * (narrow if optimizer.base_depth is None else 1.0)


def weight_decay(tau: float, rate: float, D: float, batch: float) -> float:
    """The lambda with which weights average over the updates of about tau D tokens: tau = B / (eta lambda D).

    tau is a constant in Wang and Aitchison 2024 (arXiv:2405.13698), a falling power of D / N in Power Lines, section 3.
    """
    return batch / (rate * tau * D)


def whole_steps(tokens: float, base: RunConfig, rounded: Callable[[float], int] = round) -> int:
    """The nearest D that is a whole number of steps."""
    step = max(1, base.batch_tokens)  # a batch of nothing is refused with the run
    return max(1, rounded(tokens / step)) * step


def _model_key(run: RunConfig) -> str:
    return canonical_json(to_dict(run.model))


def family(base: RunConfig) -> dict[str, Any]:
    """What constants of rules hold for: all that runs of a grid share, by dotted names."""
    shared = identity(base)
    flat = flatten({group: shared[group] for group in ("model", "data", "optimizer", "schedule")})
    return {name: value for name, value in flat.items() if name not in VARIED}


def depends_on_D(rules: TuningConfig) -> bool:
    """Whether runs that differ in D alone differ in more by these rules, so that they share no trunk."""
    each = [rule for rule in vars(rules).values() if isinstance(rule, PowerRule) and rule.k is not None]
    return rules.timescale in each or any(rule.D != 0.0 for rule in each)
