"""Parameters and training FLOPs, each under a named convention.

N_total           every weight that can change a prediction (without padding rows of the vocabulary)
N_non_embedding   N_total without the input table and the output head (a tied table is subtracted once)
N_active          the part of N_total that one token uses: in a mixture of experts only the chosen ones
N_kaplan          only the matrices inside the blocks, Kaplan et al. 2020, Table 1 (no embeddings, no norms)

flops_6nd         6 * N_active * D, the rule of thumb of Kaplan et al. 2020 with Hoffmann et al.'s N
flops_exact       what the matrix products execute: 2 FLOPs per multiply-add, backward twice the forward; attention over
                  the full T x T square like Hoffmann et al. 2022, appendix F, and `torch.utils.flop_counter` (with a
                  window, T x window); the padded output head; nothing for lookups, norms and activations
flops_optimizer   the matrix products of the updates, included in neither of the above: those of Muon's iterations;
                  AdamW has none
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .config import ModelConfig, RunConfig
from .model.shape import Parameter, Shape, model_shape
from .optimizer.registry import OPTIMIZERS
from .parallel.schedules import divide


@dataclass(frozen=True)
class ParameterCount:
    N_total: int
    N_non_embedding: int
    N_kaplan: int
    N_active: int


def count_parameters(model: ModelConfig) -> ParameterCount:
    if isinstance(model.size, dict):  # as the trainer that has it states
        N = round(model.size["N"])
        return ParameterCount(N, round(model.size.get("N_non_embedding", N)), N, N)
    assert model.vocab_size is not None
    return _counted(model_shape(model), model.vocab_size)


@lru_cache(maxsize=256)
def _counted(shape: Shape, vocab_size: int) -> ParameterCount:
    non_embedding = shape.in_blocks(lambda parameter: parameter.size) + shape.width
    N_total = non_embedding + (1 if shape.tied else 2) * vocab_size * shape.width
    return ParameterCount(
        N_total=N_total,
        N_non_embedding=non_embedding,
        N_kaplan=shape.in_blocks(lambda parameter: parameter.size if parameter.flops else 0),
        N_active=N_total - shape.in_blocks(lambda parameter: parameter.size - parameter.active),
    )


def block_flops(model: ModelConfig, sequence_length: int) -> list[int]:
    """Return the FLOPs per token of each block's forward pass."""
    # Scores and weighted values, for each query over the full sequence or its window.
    keys, shape = min(sequence_length, model.window or sequence_length), model_shape(model)
    attention = 2 * keys * model.heads * (model.key_dim + model.head_dim)
    return [attention + sum(parameter.flops for parameter in shape.block_of(number)) for number in range(model.depth)]


def stage_blocks(config: RunConfig) -> list[range]:
    """Divide the blocks into ranges of nearly equal FLOPs, one per virtual pipeline stage (`parallel/schedules.py`)."""
    costs = tuple(block_flops(config.model, config.data.sequence_length))
    return _divided(costs, config.parallel.pp * config.parallel.chunks, 2 * model_shape(config.model).table)


def rank_blocks(config: RunConfig) -> list[list[range]]:
    blocks, pp = stage_blocks(config), config.parallel.pp
    return [blocks[rank::pp] for rank in range(pp)]


_divided = lru_cache(maxsize=256)(lambda costs, stages, head: divide(costs, stages, last=head))  # planning asks often


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Return the FLOPs of matrix products per training token: three times the forward pass."""
    if isinstance(model.size, dict):
        return round(model.size.get("flops_per_token", 6 * model.size["N"]))
    return 3 * (sum(block_flops(model, sequence_length)) + 2 * model_shape(model).table)


def flops_exact(config: RunConfig) -> float:
    return float(training_flops_per_token(config.model, config.data.sequence_length)) * config.D


def flops_6nd(config: RunConfig) -> float:
    return 6.0 * count_parameters(config.model).N_active * config.D


def flops_optimizer(config: RunConfig) -> float:
    optimizer = OPTIMIZERS[config.optimizer.kind]
    if optimizer.whole is None:
        return 0.0
    count = optimizer.whole.flops

    def iterations(matrix: Parameter) -> int:
        if matrix.role not in optimizer.roles:
            return 0
        return sum(count(part.rows, matrix.columns or 1) for part in matrix.parts)

    return float(config.steps * model_shape(config.model).in_blocks(iterations))


def tokens_for_budget(model: ModelConfig, sequence_length: int, flops: float, convention: str = "exact") -> float:
    """Return how many training tokens cost `flops` on this model, by the convention `exact` or `6nd`."""
    if convention == "6nd":
        return flops / (6.0 * count_parameters(model).N_active)
    return flops / training_flops_per_token(model, sequence_length)
