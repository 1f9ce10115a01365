"""One rank's part of a model: its modules, its part of each parameter, and the strategy of its passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..model.experts import Stack
from ..model.gpt import GPT, Attention
from ..model.latent import LatentAttention
from ..model.shape import Parameter, model_shape
from ..model.strategy import Strategy
from .context import mean_over_parts, own_part, ring_over
from .expert import Exchange
from .layout import Piece, Placement, split_placement, whole_placement
from .mesh import Mesh
from .tensor import ColumnLinear, Enter, Leave, RowLinear, VocabularyEmbedding, VocabularyHead

# Fields of `Strategy` for context parallelism.
OVER_SEQUENCES: dict[str, Callable[..., Any]] = {
    "local_part": own_part,
    "attention": ring_over,
    "mean": mean_over_parts,
}


def strategy_of(mesh: Mesh, sequence_parallel: bool) -> Strategy:
    steps: dict[str, Any] = {"share": 1 / mesh.tp}
    if mesh.cp_group is not None:
        steps |= {name: partial(step, group=mesh.cp_group) for name, step in OVER_SEQUENCES.items()}
    if mesh.tp_group is not None:
        ranks = (mesh.tp_group, sequence_parallel)
        steps |= {"enter": lambda x: Enter.apply(x, *ranks), "leave": lambda y: Leave.apply(y, *ranks)}
    if mesh.ep_group is not None:
        steps["experts"] = Exchange(mesh.ep_group)
    return Strategy(**steps)


def parallelize(gpt: GPT, mesh: Mesh, sequence_parallel: bool) -> dict[str, Placement]:
    """Reduce a model on `meta` to this rank's share. Returns each parameter's placement, by name.

    Parameters keep their names, and get the placement's `local_shape`.
    """
    parameters = model_shape(gpt.config).parameters
    placements = {parameter.name: _place(parameter, mesh, sequence_parallel) for parameter in parameters}
    gpt.follow(strategy_of(mesh, sequence_parallel))
    for parameter in parameters:
        if parameter.experts > 1:
            with torch.device("meta"):
                stack = Stack(*placements[parameter.name].local_shape)
            gpt.set_submodule(parameter.name.removesuffix(".weight"), stack)
    if mesh.tp_group is None:
        return placements
    ranks = (mesh.tp_group, sequence_parallel)
    for parameter in parameters:
        shape = placements[parameter.name].local_shape
        if parameter.role in ("first", "last") and parameter.experts == 1:
            kind = ColumnLinear if parameter.role == "first" else RowLinear
            gpt.set_submodule(parameter.name.removesuffix(".weight"), kind(shape, *ranks))
        elif parameter.role == "bias":
            owner, _, name = parameter.name.rpartition(".")
            setattr(gpt.get_submodule(owner), name, nn.Parameter(torch.empty(shape, device="meta")))
    for module in gpt.modules():
        if isinstance(module, Attention | LatentAttention):
            module.take_heads(mesh.tp, mesh.tp_rank)
    table = placements["embedding.weight"].local_shape
    gpt.register_module("embedding", VocabularyEmbedding(table, *ranks))
    gpt.register_module("head", VocabularyHead(table, *ranks, vocab_size=gpt.head.vocab_size))
    if gpt.config.tied_embeddings:
        gpt.head.weight = gpt.embedding.weight
    return placements


def _place(parameter: Parameter, mesh: Mesh, sequence_parallel: bool) -> Placement:
    tp, rank, shape = mesh.tp, mesh.tp_rank, parameter.shape
    if parameter.experts > 1:
        return _place_experts(parameter, mesh)
    if mesh.tp_group is None:
        return whole_placement(shape)
    if parameter.role == "last":
        return split_placement(shape, 1, rank, tp)
    if parameter.role in ("router", "balance"):
        # A gate's gradient comes from this rank's hidden units; every rank knows the load.
        return whole_placement(shape, partial=parameter.role == "router")
    if parameter.role in ("norm", "head norm", "last norm", "latent"):
        # Norms of queries and keys see this rank's heads; those of the residual stream see its tokens, or all of them.
        return whole_placement(shape, partial=parameter.role == "head norm" or sequence_parallel)
    pieces, top, zeros = [], 0, (0,) * (len(shape) - 1)
    for part in parameter.parts:
        if part.units >= tp:
            share = part.rows // tp
            pieces.append(Piece((top + rank * share, *zeros), (share, *shape[1:])))
            top += part.rows
    if top < shape[0]:  # key and value rows; only the rank whose queries they serve gives them a gradient
        pieces.append(Piece((top, *zeros), (shape[0] - top, *shape[1:]), shared=True, partial=True))
    return Placement(shape, tuple(pieces))


def _place_experts(parameter: Parameter, mesh: Mesh) -> Placement:
    tp, rank, columns = mesh.tp, mesh.tp_rank, parameter.shape[1]
    count = len(parameter.parts) // mesh.ep
    first = mesh.ep_rank * count
    top, pieces = sum(part.rows for part in parameter.parts[:first]), []
    for part in parameter.parts[first : first + count]:
        if parameter.role == "last":
            pieces.append(Piece((top, rank * (columns // tp)), (part.rows, columns // tp)))
        else:
            pieces.append(Piece((top + rank * (part.rows // tp), 0), (part.rows // tp, columns)))
        top += part.rows
    return Placement(parameter.shape, tuple(pieces))
