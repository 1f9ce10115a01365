"""Which shapes (tp, dp, micro-batch) a run can take, and which a job of so many ranks can be. Pure, without torch.

Special here:
- a refusal names shapes that would work, and what it names has passed the very same check;
- the padded vocabulary is what is split, so `model.vocab_multiple` decides which tp fit it;
- with fewer key-value heads than tp ranks several ranks use the same one, so one of the two numbers must divide the
  other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import UserError

if TYPE_CHECKING:
    from ..config import RunConfig  # config.validate calls this file


def check_shapes(config: RunConfig) -> None:
    """Refuses a config whose model or batch cannot be split as `config.parallel` says.

    A model whose vocab_size is still None (the planner fills it in) is not asked about its vocabulary.

    Raises:
        UserError: one sentence with the field, the value and the nearest that work.
    """
    refusal = _refusal(config)
    if refusal is not None:
        raise UserError(refusal)


def check_world(config: RunConfig, ranks: int, ranks_per_node: int) -> None:
    """Refuses a job whose ranks are not those that the config asks for, or a tp group that leaves its node.

    Args:
        config: has passed `check_shapes`.
        ranks: of the job.
        ranks_per_node: of them, on every node.

    Raises:
        UserError: one sentence with the nearest (tp, dp) that work.
    """
    parallel = config.parallel
    if parallel.world_size != ranks:
        raise UserError(
            f"parallel.tp {parallel.tp} * parallel.dp {parallel.dp} is {parallel.world_size} and the job has "
            f"{_count(ranks, 'rank')}; {_advice(config, ranks, ranks_per_node)}"
        )
    if ranks_per_node % parallel.tp:
        raise UserError(
            f"parallel.tp is {parallel.tp}; it must divide the {_count(ranks_per_node, 'rank')} of a node, because "
            f"a tensor-parallel group stays inside one; {_advice(config, ranks, ranks_per_node)}"
        )


def check_hosts(tp: int, hosts: Sequence[str]) -> None:
    """Refuses an order of ranks that spreads a tensor-parallel group over nodes.

    Args:
        tp: ranks of a group; neighbours form one.
        hosts: name of every rank's node, by rank.

    Raises:
        UserError: names the first group that is spread.
    """
    for first in range(0, len(hosts), tp):
        group = hosts[first : first + tp]
        if len(set(group)) > 1:
            raise UserError(
                f"parallel.tp is {tp} and ranks {first} to {first + tp - 1} of one tensor-parallel group are on "
                f"{', '.join(dict.fromkeys(group))}; place neighbouring ranks on one node "
                "(SLURM: --distribution=block)"
            )


def working_shapes(config: RunConfig, ranks: int, ranks_per_node: int | None = None) -> list[tuple[int, int]]:
    """Every (tp, dp) that spreads this run over exactly so many ranks, by tp; all else as the config has it.

    Args:
        config: model, batch, micro-batch and sequence parallelism to fit; its own tp and dp do not matter.
        ranks: of the job.
        ranks_per_node: of them, on every node; None: they are all on one.
    """
    shapes = [(tp, ranks // tp) for tp in _divisors(ranks) if (ranks_per_node or ranks) % tp == 0]
    return [shape for shape in shapes if _refusal(_with(config, *shape)) is None]


def _refusal(config: RunConfig) -> str | None:
    """Why the shape does not fit, in a sentence; None if it does."""
    parallel, batch = config.parallel, config.optimizer.batch_size
    for name, value in {"parallel.tp": parallel.tp, "parallel.dp": parallel.dp}.items():
        if value < 1:
            return f"{name} is {value}; it must be 1 or more"
    if parallel.zero not in range(4):
        return f"parallel.zero is {parallel.zero}; it must be one of 0, 1, 2, 3"
    if batch % parallel.dp:
        return (
            f"parallel.dp is {parallel.dp}; it must divide optimizer.batch_size {batch}: "
            f"{_nearest(parallel.dp, _divisors(batch))}"
        )
    share = batch // parallel.dp
    micro = parallel.micro_batch_size
    if micro is not None and (micro < 1 or share % micro):
        whole = f"optimizer.batch_size {batch}"
        if parallel.dp > 1:
            whole = f"a rank's share of the batch, {whole} / parallel.dp {parallel.dp} = {share}"
        return f"parallel.micro_batch_size is {micro}; it must divide {whole}: {_nearest(micro, _divisors(share))}"
    must = _must_of_tp(config, parallel.tp)
    if must is None:
        return None
    working = [tp for tp in _divisors(config.model.heads) if _must_of_tp(config, tp) is None]
    return f"parallel.tp is {parallel.tp}; it must {must}; it can be {_nearest(parallel.tp, working)}"


def _must_of_tp(config: RunConfig, tp: int) -> str | None:
    """The first condition that a tp does not meet, as what it must do; None if it meets all."""
    model, parallel = config.model, config.parallel
    if model.heads % tp:
        return f"divide model.heads {model.heads}"
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        return f"be a divisor or a multiple of model.kv_heads {model.num_kv_heads}"
    if model.mlp_hidden % tp:
        return f"divide model.hidden, which is {model.mlp_hidden}"
    if model.vocab_size is not None and model.padded_vocab_size % tp:
        return f"divide the vocabulary padded to model.vocab_multiple, which is {model.padded_vocab_size}"
    length = config.data.sequence_length
    if parallel.sequence_parallel and length % tp:
        return f"divide data.sequence_length {length}, or parallel.sequence_parallel be false"
    return None


def _advice(config: RunConfig, ranks: int, ranks_per_node: int) -> str:
    """What to ask for instead: shapes for these ranks, or else numbers of ranks that have any."""
    parallel = config.parallel
    shapes = working_shapes(config, ranks, ranks_per_node)
    if shapes:
        shapes.sort(key=lambda shape: (abs(shape[0] - parallel.tp), shape))
        named = [f"tp {tp} * dp {dp}" for tp, dp in shapes[:3]]
        return f"with {_count(ranks, 'rank')} it can be {' or '.join(named)}"
    fewer = [n for n in range(1, ranks) if working_shapes(config, n, min(n, ranks_per_node))]
    return f"no shape of {_count(ranks, 'rank')} fits this model and batch, the nearest that does has {fewer[-1]}"


def _with(config: RunConfig, tp: int, dp: int) -> RunConfig:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tp=tp, dp=dp))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nearest(value: int, working: Iterable[int]) -> str:
    """Up to six of the numbers that work, nearest to the value by ratio, in order."""
    near = sorted(working, key=lambda number: max(number, value) / max(1, min(number, value)))[:6]
    return ", ".join(map(str, sorted(near)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
