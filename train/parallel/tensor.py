"""Tensor parallelism: every matrix of the model shared out over the tp ranks, norms and residuals by tokens as well.

Special here:
- a block's first matrices (`qkv`, `gate_up`) are split by rows and its last ones (`out`, `down`) by columns, so that
  what lies between them, heads or hidden units, never leaves a rank;
- fused matrices are split within each of their parts: a rank has its query, its key and its value rows;
- where there are fewer key/value heads than ranks, every rank holds them all, and attends with the one that serves its
  queries; their gradients are then terms of a sum over the ranks;
- the modules are swapped in a model without memory (device `meta`), whose parameters keep their names.

The layers are in `linear.py`, the vocabulary's in `vocabulary.py`. Sequence parallelism shares out the residual stream
as (batch * time / tp, width), consecutive tokens a rank.
"""

from __future__ import annotations

from ..model.gpt import GPT, MLP, Attention
from ..model.shape import Parameter, shape_of
from .layout import Piece, Placement, split_placement, whole_placement
from .linear import ColumnLinear, RowLinear
from .mesh import Mesh
from .vocabulary import VocabularyEmbedding, VocabularyHead


def split_model(gpt: GPT, mesh: Mesh, sequence_parallel: bool) -> dict[str, Placement]:
    """Swaps the modules of a model on `meta` for this rank's parts; says for every parameter which part it is.

    Without tensor parallelism the model stays as it is and every placement is the whole.

    Args:
        gpt: the whole model on the device `meta`; its config has passed `check_shapes`.
        mesh: this rank's place; its `tp_group` does the communication.
        sequence_parallel: whether norms and residuals are shared out by tokens.

    Returns:
        Parameter name -> placement. The parameters have the `local_shape` of their placements afterwards.
    """
    parameters = shape_of(gpt.config).parameters
    if mesh.tp_group is None:
        return {parameter.name: whole_placement(parameter.shape) for parameter in parameters}
    placements = {parameter.name: _place(parameter, mesh, sequence_parallel) for parameter in parameters}
    ranks = (mesh.tp_group, sequence_parallel)
    for name, module in list(gpt.named_modules()):
        if isinstance(module, Attention):
            module.register_module("qkv", ColumnLinear(placements[f"{name}.qkv.weight"].local_shape, *ranks))
            module.register_module("out", RowLinear(placements[f"{name}.out.weight"].local_shape, *ranks))
            _share_heads(module, mesh)
        elif isinstance(module, MLP):
            module.register_module("gate_up", ColumnLinear(placements[f"{name}.gate_up.weight"].local_shape, *ranks))
            module.register_module("down", RowLinear(placements[f"{name}.down.weight"].local_shape, *ranks))
    table = placements["embedding.weight"].local_shape
    embedding = VocabularyEmbedding(table, *ranks)
    head = VocabularyHead(table, *ranks, vocab_size=gpt.head.vocab_size)
    if gpt.config.tied_embeddings:
        head.weight = embedding.weight
    gpt.register_module("embedding", embedding)
    gpt.register_module("head", head)
    return placements


def _share_heads(attention: Attention, mesh: Mesh) -> None:
    attention.heads //= mesh.tp
    if attention.kv_heads >= mesh.tp:
        attention.kv_heads //= mesh.tp
    else:  # all of them are here, and one serves tp / kv_heads ranks
        attention.served_by = mesh.tp_rank * attention.kv_heads // mesh.tp


def _place(parameter: Parameter, mesh: Mesh, sequence_parallel: bool) -> Placement:
    tp, rank, shape = mesh.tp, mesh.tp_rank, parameter.shape
    if parameter.role == "last":
        return split_placement(shape, 1, rank, tp)
    if parameter.role in ("norm", "head norm"):
        # Of queries or keys it sees this rank's heads, of the residual stream its tokens, or all of them.
        return whole_placement(shape, partial=parameter.role == "head norm" or sequence_parallel)
    pieces, top = [], 0
    for part in parameter.parts:
        if part.units >= tp:
            own = part.rows // tp
            pieces.append(Piece((top + rank * own, 0), (own, shape[1])))
            top += part.rows
    if top < shape[0]:  # key and value rows, to which only the rank whose queries they serve gives a gradient
        pieces.append(Piece((top, 0), (shape[0] - top, shape[1]), shared=True, partial=True))
    return Placement(shape, tuple(pieces))
