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

from ..config import ModelConfig
from ..model.gpt import GPT, MLP, Attention
from .layout import Piece, Placement, Shape, split, whole
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
    shapes = {name: tuple(parameter.shape) for name, parameter in gpt.named_parameters()}
    if mesh.tp_group is None:
        return {name: whole(shape) for name, shape in shapes.items()}
    placements = {name: _place(name, shape, gpt.config, mesh, sequence_parallel) for name, shape in shapes.items()}
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


def _place(name: str, shape: Shape, config: ModelConfig, mesh: Mesh, sequence_parallel: bool) -> Placement:
    tp, rank = mesh.tp, mesh.tp_rank
    if name.endswith("attention.qkv.weight"):
        queries, keys = config.heads * config.head_dim, config.num_kv_heads * config.head_dim
        if config.num_kv_heads >= tp:
            return _split_parts(shape, (queries, keys, keys), rank, tp)
        own = _split_parts(shape, (queries,), rank, tp).pieces
        # Only the rank whose queries they serve gives key and value rows a gradient that is not zero.
        return Placement(shape, (*own, Piece((queries, 0), (2 * keys, shape[1]), shared=True, partial=True)))
    if name.endswith("mlp.gate_up.weight"):
        return _split_parts(shape, (config.mlp_hidden, config.mlp_hidden), rank, tp)
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        return split(shape, 1, rank, tp)
    if name in ("embedding.weight", "head.weight"):
        return split(shape, 0, rank, tp)
    # A norm: of queries or keys it sees this rank's heads, of the residual stream its tokens, or all of them.
    of_heads = name.endswith(("query_norm.weight", "key_norm.weight"))
    return whole(shape, partial=of_heads or sequence_parallel)


def _split_parts(shape: Shape, parts: tuple[int, ...], rank: int, ranks: int) -> Placement:
    """An equal share of the rows of each part of a fused matrix; the parts lie one below the other, from the top."""
    pieces, top = [], 0
    for rows in parts:
        share = rows // ranks
        pieces.append(Piece((top + rank * share, 0), (share, *shape[1:])))
        top += rows
    return Placement(shape, tuple(pieces))
