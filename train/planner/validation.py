"""Checks of a config: the range of every field, model shapes, and their split over ranks.

With fewer key/value heads than tp ranks several ranks use the same one, so one number must divide the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from msgspec import Meta

from ..config import DOMAIN_NAME, GROUPED_QUERY, DataConfig, ModelConfig, ParallelConfig, RunConfig, ScheduleConfig
from ..errors import UserError, counted
from ..fields import UNIQUE
from ..model.shape import micro_batches, model_shape
from ..optimizer.optimizer import MATRICES
from ..optimizer.registry import OPTIMIZERS
from ..quantization.bits import block_of
from .command import check_command, read_sizes

LARGEST = 1e30  # limit of every number: more FLOPs than any machine has, and far from an overflow


def check_fields(config: Any, prefix: str = "") -> None:
    """Raise UserError if a field of a config, or of its groups, has a value that it does not accept."""
    for name, rules in _rules(config.__class__).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{prefix}{name}.")
        if name == "domains":
            for domain, settings in (value or {}).items():
                check_fields(settings, f"{prefix}{name}.{domain}.")
        if isinstance(value, list) and UNIQUE in rules:
            repeated = next((item for i, item in enumerate(value) if item in value[:i]), None)
            if repeated is not None:
                raise UserError(f"{prefix}{name} contains {repeated!r} more than once; its values must be different")
        verb = "contains" if isinstance(value, list) else "is"
        for item in value if isinstance(value, list) else [value]:
            if item is not None and (needed := _needed(item, rules)):
                raise UserError(f"{prefix}{name} {verb} {item!r}; it must be {needed}")


@functools.cache
def _rules(cls: type) -> dict[str, list[Any]]:
    def annotations(hint: Any) -> list[Any]:
        return [*(rule for inner in get_args(hint) for rule in annotations(inner)), *getattr(hint, "__metadata__", ())]

    return {name: annotations(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}


def _needed(value: Any, rules: Sequence[Any]) -> str:
    """Return in words what `rules` (allowed values or bounds) require of `value`, or "" if they accept it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    for rule in rules:
        if isinstance(rule, tuple) and value not in rule:
            return f"one of {', '.join(map(str, rule))}"
        if isinstance(rule, Meta) and isinstance(value, int | float) and (bound := _beyond(value, rule)):
            return bound
    return f"at most {LARGEST:g}" if isinstance(value, int | float) and value > LARGEST else ""


def _beyond(value: float, bounds: Meta) -> str | None:
    if bounds.ge is not None and value < bounds.ge:
        return f"{bounds.ge:g} or more"
    if bounds.gt is not None and value <= bounds.gt:
        return f"greater than {bounds.gt:g}"
    if bounds.le is not None and value > bounds.le:
        return f"at most {int(bounds.le):,}"
    if bounds.lt is not None and value >= bounds.lt:
        return f"below {bounds.lt:g}"
    return None


def validate(config: RunConfig) -> None:
    """Raise UserError if a config cannot be trained."""
    check_fields(config)
    check_mixture(config.data)
    if config.trainer.kind == "command":
        check_command(config)
        read_sizes([config.model.size or {"N": 1}])
        if config.average.kept or config.quantization.used:
            raise UserError("average.kind and quantization.* must be none with trainer=command, which has neither")
        return
    _check_model(config.model)
    for step in config.checkpoint.at_steps or ():
        if not 1 <= step < config.steps:
            raise UserError(
                f"checkpoint.at_steps contains {step}; it must hold steps from 1 to {config.steps - 1}, before the "
                "run's last one"
            )
    schedule, data, window = config.schedule, config.data, config.model.window
    if (held_out := data.validation_tokens) < (length := data.sequence_length):
        raise UserError(f"data.validation_tokens is {held_out}; it must be at least data.sequence_length {length}")
    if schedule.kind == "wsd" and schedule.warmup_max_share + schedule.decay_share > 1:
        raise UserError(
            f"schedule.decay_share is {schedule.decay_share}; with schedule.warmup_max_share "
            f"{schedule.warmup_max_share} it must be at most {1 - schedule.warmup_max_share:g}, to avoid an overlap"
        )
    _check_points(schedule)
    if (spans := config.average.spans) is not None and not 0 < len(spans) == len(set(spans)):
        raise UserError(f"average.spans is {spans}; it must be one or more different shares, such as [0.1]")
    if data.validation_fraction == 0:
        raise UserError("data.validation_fraction is 0; a run is scored on held-out documents, so it must be above 0")
    if data.recipe and data.recipe_fingerprint is None:
        raise UserError(
            f"data.recipe_fingerprint is None with data.recipe {data.recipe}; plan the run, which fills it in, or set "
            "it to isoflop.train.data.recipe.recipe.fingerprint(data.recipe)"
        )
    if window is not None and not 1 <= window <= data.sequence_length:
        raise UserError(
            f"model.window is {window}; it must be 1 to data.sequence_length {data.sequence_length}, or null for no "
            "window"
        )
    _check_quantization(config)
    check_shapes(config)


def check_mixture(data: DataConfig) -> None:
    """Raise UserError if the domains, their weights or the target cannot make a mixture."""
    domains, target = data.domains, data.target
    if data.corpus != "mixture":
        for name in ("domains", "target", "epochs_of"):
            if (value := getattr(data, name)) is not None:
                raise UserError(f"data.{name} is {value!r}; it must be null unless data.corpus is mixture")
        return
    if not isinstance(domains, dict) or not domains:
        example = "{code: {path: code/, weight: 0.7}, prose: {path: prose/, weight: 0.3}}"
        accepted = f"with data.corpus=mixture it must map names to texts, such as {example}"
        raise UserError(f"data.domains is {domains!r}; {accepted}")
    for name in domains:
        if not DOMAIN_NAME.fullmatch(name):
            accepted = "lower-case letters, digits and _, start with a letter, and not be se or tokens"
            raise UserError(f"data.domains contains {name!r}; a name must be {accepted}")
    check_shares("data.domains, the weights,", data.weights, domains)
    if target is not None:
        check_shares("data.target", target, domains)
    if data.fingerprint is None and data.path is not None:
        raise UserError(f"data.path is {data.path!r}; with data.corpus=mixture give each domain its path")
    if data.validation_tokens < (needed := len(domains) * data.sequence_length):
        accepted = f"it must be at least {needed}, one sequence of each domain"
        raise UserError(f"data.validation_tokens is {data.validation_tokens}; {accepted}")


def check_shares(field: str, shares: Any, domains: Mapping[str, Any]) -> None:
    """Raise UserError if `shares` does not map domains to weights, of which one is above 0."""
    if not isinstance(shares, dict) or not all(isinstance(share, int | float) for share in shares.values()):
        raise UserError(f"{field} is {shares!r}; it must map domains to numbers, such as {{{next(iter(domains))}: 1}}")
    if unknown := next((name for name in shares if name not in domains), None):
        raise UserError(f"{field} names {unknown!r}; it must be one of the domains {', '.join(domains)}")
    if not all(0 <= share <= LARGEST for share in shares.values()) or not sum(shares.values()):
        shown = ", ".join(f"{name} {share}" for name, share in shares.items())
        raise UserError(f"{field} are {shown}; they must be 0 or more, and one of them above 0")


def _check_points(schedule: ScheduleConfig) -> None:
    if schedule.kind != "points":
        for name, values in (("shares", schedule.shares), ("factors", schedule.factors)):
            if values is not None:
                raise UserError(f"schedule.{name} is {values}; it must be null unless schedule.kind is points")
        return
    shares, factors = schedule.shares or [], schedule.factors or []
    if len(shares) < 2 or shares[0] != 0 or shares[-1] != 1 or shares != sorted(shares):
        raise UserError(f"schedule.shares is {schedule.shares}; it must rise from 0 to 1, such as [0,0.8,1]")
    if len(factors) != len(shares) or not all(0 <= factor <= 1 for factor in factors) or not any(factors):
        raise UserError(
            f"schedule.factors is {schedule.factors}; it must be {len(shares)} numbers from 0 to 1, not all of them 0"
        )


def _check_model(model: ModelConfig) -> None:
    if model.size is not None:
        raise UserError(f"model.size is {model.size!r}; it must be null, because trainer.kind is isoflop")
    if model.head_size is not None and model.head_size % 2:  # rotary positions turn pairs of numbers
        raise UserError(f"model.head_size is {model.head_size}; it must be even for rotary positions")
    if model.head_size is None and model.width % model.heads:
        divisors = ", ".join(map(str, divisors_of(model.width)))
        raise UserError(f"model.heads is {model.heads}; it must divide model.width {model.width}: {divisors}")
    if model.attention == "mla":
        _check_latent(model)
    if model.head_dim % 2:
        raise UserError(
            f"model.heads is {model.heads}; model.width {model.width} / model.heads is {model.head_dim}, and it must "
            "be even for rotary positions"
        )
    check_kv_heads(model)
    _check_rope(model)
    if model.experts:
        _check_experts(model)


def _check_quantization(config: RunConfig) -> None:
    settings = config.quantization
    used = {name: value for name, value in settings.formats.items() if value != "none"}
    for name, formats in (("rounding", ["gradients"]), ("block", settings.formats), ("hadamard", settings.formats)):
        value = getattr(settings, name)
        if value not in ("nearest", None, False) and not used.keys() & set(formats):
            accepted = f"it must be unset without a format for {' or '.join(formats)}"
            raise UserError(f"quantization.{name} is {value}; {accepted}")
    for name, value in used.items() if config.model.experts else ():
        raise UserError(f"quantization.{name} is {value}; it must be none with model.experts, which stay unquantized")
    rows = list(_quantized_rows(config))
    for row, width, size, _ in rows:
        odd = settings.hadamard and any(number & (number - 1) for number in (size, width % size))
        if odd or width % (settings.block or 1):
            divisors = divisors_of(math.gcd(*(width for _, width, *_ in rows)))
            common = [number for number in divisors if not settings.hadamard or number & (number - 1) == 0]
            power = ", and with quantization.hadamard be a power of two" * settings.hadamard
            must = f"must divide the {row}{power}: {_nearest(size, common)}"
            raise UserError(f"quantization.block is {settings.block or 'null'}; it {must}")


def _quantized_rows(config: RunConfig) -> Iterator[tuple[str, int, int, list[Any]]]:
    """Yield the rows cut into blocks: name, size, block, and (size, units) of the parts that ranks divide."""
    settings, model = config.quantization, config.model
    for parameter in model_shape(dataclasses.replace(model, vocab_size=model.vocab_size or 1)).block:
        if parameter.role in MATRICES:
            name, (outputs, inputs) = parameter.name.removesuffix(".weight"), parameter.shape
            outer = [part[1:] for part in parameter.parts] * (parameter.role == "first")
            inner = [(inputs, inputs)] * (parameter.role == "last")
            for format in sorted({settings.weights, settings.activations} - {"none"}):
                yield f"{inputs} inputs of {name}", inputs, block_of(format, inputs, settings.block), inner
            for format in {settings.gradients} - {"none"}:
                yield f"{outputs} outputs of {name}", outputs, block_of(format, outputs, settings.block), outer


def _check_experts(model: ModelConfig) -> None:
    count, chosen, dense = model.experts, model.experts_per_token, model.dense_layers
    if count < 2:
        raise UserError(f"model.experts is {count}; it must be 2 or more, or 0 for a dense model")
    if chosen > count:
        raise UserError(f"model.experts_per_token is {chosen}; it must be 1 to model.experts {count}")
    if chosen == 1 and model.gates_normalised:
        raise UserError(
            "model.experts_per_token is 1 with model.gates_normalised true, so that every gate is 1 and the router "
            "learns nothing; model.gates_normalised must be false"
        )
    if dense >= model.depth:
        raise UserError(f"model.dense_layers is {dense}; it must be 0 to {model.depth - 1}, less than model.depth")


def _check_latent(model: ModelConfig) -> None:
    for name in GROUPED_QUERY:
        if value := getattr(model, name):
            off = "false" if value is True else "null"
            raise UserError(f"model.{name} is {value}; with model.attention mla it must be {off}")
    if model.rotary % 2:
        raise UserError(
            f"model.rotary_size is {model.rotary_size}; it must be even, because numbers are rotated in pairs"
        )


def _check_rope(model: ModelConfig) -> None:
    scaling, companions = model.rope_scaling, ("rope_factor", "rope_length")
    if scaling is None:
        key = next((name for name in companions if getattr(model, name) is not None), None)
        if key is not None:
            raise UserError(
                f"model.{key} is {getattr(model, key)}; without model.rope_scaling, which may be llama3 or yarn, it "
                "must be null"
            )
        return
    missing = next((name for name in companions if getattr(model, name) is None), None)
    if missing is not None:
        raise UserError(f"model.{missing} is null; with model.rope_scaling {scaling} it must be 1 or more")
    if scaling == "yarn" and model.rope_theta <= 1:
        raise UserError(f"model.rope_theta is {model.rope_theta:g}; with model.rope_scaling yarn it must be above 1")


def check_kv_heads(model: ModelConfig) -> None:
    if model.heads % model.num_kv_heads:
        raise UserError(f"model.kv_heads is {model.kv_heads}; it must divide model.heads {model.heads}")


def check_shapes(config: RunConfig) -> None:
    """Raise UserError if `config.parallel` is out of range, or does not divide the model or batch."""
    check_fields(config.parallel, "parallel.")
    if (refusal := _refusal(config)) is not None:
        raise UserError(refusal)


def check_world(config: RunConfig, ranks: int, ranks_per_node: int) -> None:
    """Raise UserError if the config does not need exactly `ranks` ranks, or a tensor-parallel group spans nodes."""
    parallel = config.parallel
    if parallel.world_size != ranks:
        raise UserError(
            f"{parallel.mesh} and the job has {counted(ranks, 'rank')}; {_advice(config, ranks, ranks_per_node)}"
        )
    if ranks_per_node % parallel.tp:
        raise UserError(
            f"parallel.tp is {parallel.tp}; it must divide the {counted(ranks_per_node, 'rank')} of a node, because "
            f"a tensor-parallel group stays inside one; {_advice(config, ranks, ranks_per_node)}"
        )


def check_hosts(parallel: ParallelConfig, hosts: Sequence[str]) -> None:
    """Raise UserError if a tensor-parallel group spans nodes. `hosts` lists each rank's node."""
    tp = parallel.tp
    for first in range(0, len(hosts), tp):
        group = hosts[first : first + tp]
        if len(set(group)) > 1:
            raise UserError(
                f"parallel.tp is {tp} and ranks {first} to {first + tp - 1} of one tensor-parallel group are on "
                f"{', '.join(dict.fromkeys(group))}; place neighbouring ranks on one node "
                "(SLURM: --distribution=block)"
            )


def working_shapes(config: RunConfig, ranks: int, ranks_per_node: int | None = None) -> list[tuple[int, int]]:
    """Return every (tp, dp) that spreads this run, with its pp and cp, over exactly `ranks` ranks, sorted by tp.

    `ranks_per_node`: None if all are on one.
    """
    fixed = config.parallel.pp * config.parallel.cp
    left = divisors_of(ranks // fixed) if ranks % fixed == 0 else []  # candidates for tp; dp is the rest
    shapes = [(tp, ranks // fixed // tp) for tp in left if (ranks_per_node or ranks) % tp == 0]
    return [
        (tp, dp)
        for tp, dp in shapes
        if _refusal(dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tp=tp, dp=dp))) is None
    ]


def divisors_of(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _refusal(config: RunConfig) -> str | None:
    """Return a sentence on why `config.parallel` does not fit the model and batch, or None if it does."""
    parallel, batch = config.parallel, config.optimizer.batch_size
    if batch % parallel.dp:
        return (
            f"parallel.dp is {parallel.dp}; it must divide optimizer.batch_size {batch}: "
            f"{_nearest(parallel.dp, divisors_of(batch))}"
        )
    length, cp = config.data.sequence_length, parallel.cp
    if cp > 1 and length % (2 * cp):
        working = [number for number in divisors_of(length) if number == 1 or length % (2 * number) == 0]
        return (
            f"parallel.cp is {cp}; 2 * parallel.cp must divide data.sequence_length {length}; it can be "
            f"{_nearest(cp, working)}"
        )
    if parallel.ep > 1 and (refusal := _experts_refusal(config)) is not None:
        return refusal
    share = batch // parallel.dp
    micro = parallel.micro_batch_size
    if micro is not None and (micro < 1 or share % micro):
        whole = f"optimizer.batch_size {batch}"
        if parallel.dp > 1:
            whole = f"a rank's share of the batch, {whole} / parallel.dp {parallel.dp} = {share}"
        return f"parallel.micro_batch_size is {micro}; it must divide {whole}: {_nearest(micro, divisors_of(share))}"
    if (refusal := _pipeline_refusal(config)) is not None:
        return refusal
    must = _requirement(config, parallel.tp)
    if must is None:
        return None
    working = [tp for tp in divisors_of(config.model.heads) if _requirement(config, tp) is None]
    return f"parallel.tp is {parallel.tp}; it must {must}; it can be {_nearest(parallel.tp, working)}"


def _pipeline_refusal(config: RunConfig) -> str | None:
    parallel, depth = config.parallel, config.model.depth
    pp, chunks, interleaved = parallel.pp, parallel.chunks, parallel.schedule == "interleaved"
    if chunks > 1 and (pp == 1 or not interleaved):
        cause = "parallel.pp 1" if pp == 1 else f"parallel.schedule {parallel.schedule}"
        return f"parallel.chunks is {chunks} with {cause}; it must be 1, or pp above 1 and the schedule interleaved"
    if pp == 1:
        return None
    if pp > (max_stages := depth // 2 if interleaved else depth):
        reason = f"{'two blocks' if interleaved else 'one block'} or more of model.depth {depth}"
        return f"parallel.pp is {pp}; each stage has {reason}, so it must be at most {max(1, max_stages)}"
    if interleaved and not 2 <= chunks <= depth // pp:
        reason = f"interleaved, it must be 2 to {depth // pp}; or set parallel.schedule to 1f1b"
        return f"parallel.chunks is {chunks} with parallel.pp {pp} and model.depth {depth}; {reason}"
    if parallel.zero == 3:
        reason = "it must be 0, 1 or 2, because weights would be gathered again for every micro-batch"
        return f"parallel.zero is 3 with parallel.pp {pp}; {reason}"
    count, share = micro_batches(config), config.optimizer.batch_size // parallel.dp
    if not interleaved or count % pp == 0:
        return None
    if sizes := [size for size in divisors_of(share) if share // size % pp == 0]:
        micro = parallel.micro_batch_size
        return (
            f"parallel.micro_batch_size is {micro}, which gives {counted(count, 'micro-batch', 'micro-batches')}; "
            f"interleaved, their number must be a multiple of parallel.pp {pp}, so parallel.micro_batch_size can be "
            f"{_nearest(micro or share, sizes)}"
        )
    stages = _nearest(pp, [stages for stages in divisors_of(share) if 1 < stages <= depth // chunks])
    reason = f"interleaved, it must divide them: {stages}" if stages else "parallel.schedule must be 1f1b"
    return f"parallel.pp is {pp} and a rank has {counted(share, 'sequence')} a step; {reason}"


def _experts_refusal(config: RunConfig) -> str | None:
    parallel, experts = config.parallel, config.model.experts
    ep, data = parallel.ep, parallel.data
    if experts == 0:
        return f"parallel.ep is {ep} and model.experts is 0; it must be 1, because there are no experts to divide"
    if OPTIMIZERS[config.optimizer.kind].whole is not None:
        return f"parallel.ep is {ep} with optimizer.kind {config.optimizer.kind}; it must be 1, or optimizer.kind adamw"
    working = divisors_of(math.gcd(data, experts))
    if ep in working:
        return None
    ranks = f"parallel.dp {parallel.dp}" + (f" * parallel.cp {parallel.cp}" if parallel.cp > 1 else "")
    reason = f"it must divide {ranks} and model.experts {experts}"
    return f"parallel.ep is {ep}; {reason}: {_nearest(ep, working)}"


def _requirement(config: RunConfig, tp: int) -> str | None:
    """Return the first condition that `tp` violates, such as "divide model.heads 6", or None if it fits."""
    model, length, cp = config.model, config.data.sequence_length, config.parallel.cp
    if model.heads % tp:
        return f"divide model.heads {model.heads}"
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        return f"be a divisor or a multiple of model.kv_heads {model.num_kv_heads}"
    if (not model.experts or model.dense_layers) and model.mlp_hidden % tp:
        return f"divide model.hidden, which is {model.mlp_hidden}"
    if model.experts and model.moe_hidden % tp:
        return f"divide model.expert_hidden, which is {model.moe_hidden}"
    if model.vocab_size is not None and model.padded_vocab_size % tp:
        return f"divide the vocabulary padded to model.vocab_multiple, which is {model.padded_vocab_size}"
    for row, _, size, parts in _quantized_rows(config) if tp > 1 else ():
        if any(units % tp or width % (tp * size) for width, units in parts):
            return f"cut the {row} between blocks of {size} (quantization.block), and no head"
    if config.parallel.sequence_parallel and length // cp % tp:
        part = f" / parallel.cp {cp}" if cp > 1 else ""
        return f"divide data.sequence_length {length}{part}, or set parallel.sequence_parallel to false"
    return None


def _advice(config: RunConfig, ranks: int, ranks_per_node: int) -> str:
    tp_asked, pp, cp = config.parallel.tp, config.parallel.pp, config.parallel.cp
    rest = "".join(f" * {axis} {size}" for axis, size in (("cp", cp), ("pp", pp)) if size > 1)
    shapes = working_shapes(config, ranks, ranks_per_node)
    plain = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cp=1))
    if cp > 1 and not shapes and working_shapes(plain, ranks, ranks_per_node):
        return _advice(plain, ranks, ranks_per_node)
    if shapes:
        shapes.sort(key=lambda shape: (abs(shape[0] - tp_asked), shape))
        named = [f"tp {tp} * dp {dp}{rest}" for tp, dp in shapes[:3]]
        return f"with {counted(ranks, 'rank')} it can be {' or '.join(named)}"
    max_ranks = min(ranks - 1, config.optimizer.batch_size * config.model.heads * pp * cp)
    tried = (*range(max_ranks, 0, -1), *range(ranks + 1, 2 * pp * cp))  # fewer ranks first
    near = next((n for n in tried if working_shapes(config, n, min(n, ranks_per_node))), pp * cp)
    return f"no split over {counted(ranks, 'rank')} fits this model and batch; use {counted(near, 'rank')}"


def _nearest(value: int, working: Iterable[int]) -> str:
    """List, ascending, up to six numbers of `working`: the nearest to `value` by ratio."""
    near = sorted(working, key=lambda number: max(number, value) / max(1, min(number, value)))[:6]
    return ", ".join(map(str, sorted(near)))
