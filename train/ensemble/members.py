"""Which runs can be trained together as one ensemble; the planner asks, so without torch.

Members share the model, the data, the batch, the kind of optimizer, the number format and the device; all else is a
member's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import RunConfig, flatten, identity, run_id
from ..errors import UserError

# What says how the step of the whole ensemble is computed, and so must be said the same by every member.
_SHARED_PARALLEL = ("device", "compile", "tf32", "threads", "attention", "bucket_mb")


def shared_fields(config: RunConfig) -> dict[str, Any]:
    """What members of one ensemble must agree on, by flat names of config fields.

    The corpus counts by its fingerprint; by its path too where the planner has not filled that in.
    """
    science = identity(config)
    shape = flatten({"model": science["model"], "data": science["data"]})
    if config.data.fingerprint is None:
        shape["data.path"] = config.data.path
    if config.data.tokenizer_fingerprint is None:
        shape["data.tokenizer"] = config.data.tokenizer
    # The kind and the base depth say which tensors share a rate.
    for name in ("batch_size", "base_depth", "kind", "iterations", "iteration_precision"):
        shape[f"optimizer.{name}"] = getattr(config.optimizer, name)
    shape["precision"] = config.precision
    return shape | {f"parallel.{name}": getattr(config.parallel, name) for name in _SHARED_PARALLEL}


def refusal(config: RunConfig) -> str | None:
    """Why a run cannot be a member of any ensemble; None where it can."""
    parallel, batch = config.parallel, config.optimizer.batch_size
    if parallel.world_size > 1:
        return f"{parallel.mesh} ranks; a member of an ensemble has 1"
    if config.precision == "fp16":
        return "precision is 'fp16', whose loss scale an ensemble does not have; it must be fp32 or bf16"
    if parallel.micro_batch_size not in (None, batch):
        return (
            f"parallel.micro_batch_size is {parallel.micro_batch_size}; in an ensemble it must be null or the whole "
            f"batch of {batch}"
        )
    if config.model.experts:
        return f"model.experts is {config.model.experts}, and members would choose apart; in an ensemble it must be 0"
    if config.model.attention != "gqa":
        return f"model.attention is {config.model.attention}; in an ensemble it must be gqa"
    if config.average.kept:
        return f"average.kind is {config.average.kind}; in an ensemble it must be none"
    if parallel.cuda_graphs:
        return "parallel.cuda_graphs is true, and an ensemble's kernels are not replayed; it must be false"
    if parallel.recompute != "none":
        return f"parallel.recompute is {parallel.recompute!r}; in an ensemble it must be none"
    return None


def check_together(configs: Sequence[RunConfig]) -> None:
    """Refuses what cannot be trained as one ensemble: UserError with the field and both values."""
    if not configs:
        raise UserError("an ensemble of no runs was asked for; it must have at least 1")
    names = [run_id(config) for config in configs]
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise UserError(f"run {twice} is twice in one ensemble; its members must be different runs")
    first = shared_fields(configs[0])
    for name, config in zip(names, configs, strict=True):
        if (reason := refusal(config)) is not None:
            raise UserError(f"run {name} cannot be a member of an ensemble: {reason}")
        own = shared_fields(config)
        for field in first | own:
            if first.get(field) != own.get(field):
                raise UserError(
                    f"{field} is {first.get(field)!r} in run {names[0]} and {own.get(field)!r} in run {name}; members "
                    "of one ensemble must agree on it"
                )
