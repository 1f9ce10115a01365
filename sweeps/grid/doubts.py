"""Notes for the user on settings that are accepted, but hardly ever meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...train.config import ModelConfig, RunConfig
from ...train.data.recipe.pool import usable_cores
from ...train.errors import counted
from ..config import SweepConfig
from .base import text_tokens
from .tuning import decaying_rate

FEW_STEPS = 10  # a run with fewer hardly trains; chosen by hand
LEAST_RESAMPLES = 40  # fewer have no draw outside of a 95 % interval
OFF = 2  # factor by which the held-out share may differ from data.validation_fraction, see train/data/split.py
SHAPE = ("width", "depth", "heads", "hidden", "expert_hidden")  # set by grids that choose the size of a model


def doubts(config: SweepConfig, runs: Sequence[RunConfig]) -> Iterator[str]:
    """Yield notes on a new plan. Raises UserError if this machine lacks the device that its runs need."""
    data, cluster, cores = runs[0].data, config.cluster, usable_cores()
    rate = max(run.optimizer.learning_rate for run in runs)
    decay = max(decaying_rate(run.optimizer, run.model.width) * run.optimizer.weight_decay for run in runs)
    if rate > 1:
        yield f"optimizer.learning_rate is {rate:g}; above 1, runs nearly always diverge"
    elif decay >= 1:
        yield f"optimizer.weight_decay times the learning rate is {decay:.3g}; from 1 on, a step removes all weights"
    if (steps := min(run.steps for run in runs)) < FEW_STEPS:
        yield f"the shortest run makes {counted(steps, 'step')}, too few to train; use more tokens or smaller batches"
    if data.sequence_length == 1:
        yield "data.sequence_length is 1; a model without context only learns which token follows which"
    model = min((run.model for run in runs), key=lambda model: model.width)
    if model.latent > max(model.width, 4 * model.head_dim):
        yield f"model.kv_rank is {model.latent}; above model.width {model.width} a latent holds nothing more"
    for name in SHAPE:
        value, default = getattr(config.model, name), getattr(ModelConfig(), name)
        ratio_kept = name == "heads" and config.model.kv_heads is not None
        if value != default and not ratio_kept and all(getattr(run.model, name) != value for run in runs):
            yield f"model.{name} is {value}, which no run has, because the grid chooses it; leave it out"
    if OFF * (held_out := sum(text_tokens(data).values()) * data.validation_fraction) < data.validation_tokens:
        text = f"the held-out text has about {held_out:,.0f} tokens, fewer than data.validation_tokens"
        yield f"{text} {data.validation_tokens:,}; use more text or a larger data.validation_fraction"
    if cluster.kind == "local" and (config.parallel.device == "cuda" or any(run.precision == "fp16" for run in runs)):
        from ...train.hardware import pick_device

        if pick_device(config.parallel.device).type == "cpu":
            yield "precision is fp16, which is slower than fp32 on a CPU; use fp32 or bf16"
    if cluster.kind == "local" and not cluster.gpus_per_job and (jobs := cluster.jobs or 1) > cores:
        yield f"cluster.jobs is {jobs} and this machine has {counted(cores, 'core')}; more jobs than cores are slower"
    if config.fit.bootstrap < LEAST_RESAMPLES:
        yield f"fit.bootstrap is {config.fit.bootstrap}; an interval needs at least {LEAST_RESAMPLES} resamples"
