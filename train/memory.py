"""Estimated peak memory of one rank, within 15 % of what a training step allocates.

State follows from the ZeRO stage. With P parameters on a rank, N = dp cp data-parallel ranks, and e bytes per weight:

    stage   weights     gradients   fp32 master weights and AdamW's two moments
    0, 1    e P         e P         12 P, 12 P / N
    2       e P         e P / N     12 P / N
    3       e P / N     e P / N     12 P / N

fp32 weights are their own master: 8 instead of 12. Other optimizers store what they declare: Muon has one moment per
matrix, 4 less. Each average of the weights adds 4. Workspace is what the worst moment of a step allocates in addition:
the loss, the backward pass of a block or of the embedding, or the update.

Rajbhandari et al. 2020, arXiv 1910.02054, section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .config import RunConfig
from .flops import rank_blocks
from .model.shape import (
    LOGITS_AT_A_TIME,
    LONGEST_KEPT,
    Parameter,
    Share,
    heads_at_a_time,
    micro_batches,
    query_block,
    rows_at_a_time,
    share_of,
    visible_blocks,
)
from .optimizer.average import copies
from .optimizer.registry import OPTIMIZERS, kind_of
from .parallel.buckets import bucket_limit

FP32, INDEX = 4, 8  # bytes of an fp32 number and of a token id


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the worst moment of a step."""

    parameters: int  # weights in the compute dtype
    gradients: int
    optimizer: int  # fp32 master weights, moments, and averages of the weights
    activations: int  # kept for the backward pass
    workspace: int  # derivatives, recomputed activations, gathered weights, gradients in transit

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        return self.state + self.activations + self.workspace


def memory(config: RunConfig, device: str = "cuda") -> Memory:
    """Estimate the peak memory, in bytes, of the pipeline rank that needs the most. `device` is cpu or cuda."""
    estimates = (_of_rank(config, rank, share) for rank, share in enumerate(rank_shares(config, device)))
    return max(estimates, key=lambda estimate: estimate.peak)


def rank_shares(config: RunConfig, device: str = "cuda") -> list[Share]:
    whole, shares = share_of(config, device), []
    for chunks in rank_blocks(config):
        blocks, experts = [block for chunk in chunks for block in chunk], whole.experts
        if experts is not None:
            dense = sum(block < experts.above for block in blocks)
            experts = None if dense == len(blocks) else replace(experts, above=dense)
        embeds, scores = 0 in blocks, whole.depth - 1 in blocks
        shares.append(replace(whole, depth=len(blocks), experts=experts, embeds=embeds, scores=scores))
    return shares


def replicated_elements(
    share: Share, config: RunConfig, count: Callable[[Parameter], int] = lambda p: p.size
) -> list[tuple[int, int]]:
    """Return (elements that a rank holds, ranks that hold the same ones), for the experts and for the rest.

    `count` gives what to sum over parameters instead of their elements.
    """
    total = share.in_blocks(count) + sum(map(count, share.outside))
    data, ep = config.parallel.data, config.parallel.ep
    experts = share.in_blocks(lambda p: count(p) if ".experts." in p.name else 0) if ep > 1 else 0
    return [(experts, data // ep), (total - experts, data)]


def _of_rank(config: RunConfig, rank: int, share: Share) -> Memory:
    parallel, e = config.parallel, share.itemsize
    passes: float = micro_batches(config) if parallel.pp > 1 else 1  # passes with saved activations; all under gpipe
    if parallel.schedule != "gpipe":  # Narayanan et al. 2021, arXiv 2104.04473, section 2.2
        after, more = parallel.pp - 1 - rank, parallel.chunks - 1
        passes = min(passes, after + 1 if not more else (2 * after + more * parallel.pp + 1) / parallel.chunks)
    dense = 0 if share.experts is None else share.experts.above
    blocks = dense * _kept_by_block(replace(share, experts=None)) + (share.depth - dense) * _kept_by_block(share)
    blocks += share.depth * _rounded_copies(config, share)
    activations = int(passes * blocks) + 4 * share.rows * share.width * e * (parallel.pp > 1)  # messages, two each way
    if share.device == "cpu" and share.cp == 1 and (share.window is not None or share.documents):  # PyTorch's mask
        activations += (share.sequences if share.documents else 1) * share.length**2 * e
    head, at_loss = _loss(share) if share.scores else (0, 0)
    heads = int(passes) * head if parallel.schedule == "gpipe" else head
    table, block = share.table * e * (share.embeds or share.scores), share.block_size * e
    waiting = table if share.tied and share.embeds and share.scores else 0  # the head's part of a tied gradient
    transit = min(_in_transit(config, share), e * sum(size for size, _ in replicated_elements(share, config)))
    gathers = parallel.zero == 3 and parallel.data > 1  # weights, of two modules at a time
    moments = [
        (activations + heads, gathers * (table + block) + at_loss),
        (activations + heads - head, gathers * (waiting + 2 * block) + waiting + transit + _block_workspace(share)),
        (int((passes - 1) * blocks) + heads - head, gathers * table + waiting + table + transit),  # the embedding
        (0, _update(config, share)),
    ]
    return Memory(*_state(config, share), *max(moments, key=sum))


def _state(config: RunConfig, share: Share) -> tuple[int, int, int]:
    """Return a rank's bytes of weights, gradients and optimizer state, by the table at the top of this file."""
    zero, e = config.parallel.zero, share.itemsize
    copied = copies(config.average) + (e < FP32)

    def state_bytes(parameter: Parameter) -> int:
        states = OPTIMIZERS[kind_of(parameter.role, config.optimizer.kind)].states
        elements = sum(state.itemsize for state in states if state.size is None) + FP32 * copied
        matrices = [(part.rows, parameter.columns or 1) for part in parameter.parts]
        of_matrices = (sum(state.size(*shape) for shape in matrices) * state.itemsize for state in states if state.size)
        return parameter.size * elements + sum(of_matrices)

    def owned(count: Callable[[Parameter], int], first: int) -> int:
        """Sum `count` over the parameters that this rank stores: all, or from ZeRO stage `first` on its share."""
        return sum(
            size // ranks if zero >= first else size for size, ranks in replicated_elements(share, config, count)
        )

    weights = [owned(lambda p: p.size, first) * e for first in (3, 2)]
    return weights[0], weights[1], owned(state_bytes, 1)


def _whole_matrices(config: RunConfig, share: Share) -> int:
    optimizer = OPTIMIZERS[config.optimizer.kind]
    held = share.in_blocks(lambda p: p.size if optimizer.whole and p.role in optimizer.roles else 0)
    return held // config.parallel.data if config.parallel.zero else held


def _update(config: RunConfig, share: Share) -> int:
    """Return the bytes that an optimizer of whole matrices, such as Muon, allocates during its update; 0 for others."""
    whole = OPTIMIZERS[config.optimizer.kind].whole
    if whole is None:
        return 0
    owned, data = _whole_matrices(config, share), config.parallel.data
    batch = 2 * owned // 3
    exchanged = 0 if data == 1 and not share.split else owned if config.parallel.zero else owned // data
    work = max(batch + min(3 * batch, whole.scratch), owned + exchanged if exchanged else 0)
    persistent = owned * (share.itemsize < FP32) + owned * share.split  # updates; pieces that are not contiguous
    return whole.itemsize(config.optimizer) * (persistent + exchanged + work)


def _in_transit(config: RunConfig, share: Share) -> int:
    """Return the bytes of all gradient buckets that exist at the same time: being filled, received or summed."""
    stage = config.parallel.zero
    native = share.itemsize == FP32 and (share.device == "cuda" or stage == 0)  # NCCL adds in place, in fp32
    if config.parallel.data == 1 or (stage < 2 and native):
        return 0
    largest = max(parameter.size for parameter in share.block) * share.itemsize
    bucket = share.block_size * share.itemsize if stage == 3 else max(bucket_limit(1), largest)
    return bucket * (1 if stage == 1 else 2 if stage == 0 or native else 3)


def _kept_by_block(share: Share) -> int:
    e, stream = share.itemsize, share.rows * share.width * share.itemsize
    if share.recompute == "full":
        return stream
    inner = share.tokens * (share.hidden if share.experts is None else share.experts.shared) * e
    saved = 2 * stream + 2 * inner  # before and after attention; gate and up
    if (experts := share.experts) is not None:  # rows and their sources; the choice; the router's fp32 inputs
        saved += share.tokens * experts.chosen * ((2 * experts.hidden + 1) * e + 2 * FP32 + 3 * INDEX)
        copied = share.width if e < FP32 or share.rows < share.tokens else 0
        saved += share.tokens * (experts.count + copied) * FP32
    attention, inputs = _attention(share)
    # Without recomputation also both norms' outputs, and gate times up.
    return saved + (inputs if share.recompute == "selective" else 2 * stream + inner + attention)


def _rounded_copies(config: RunConfig, share: Share) -> int:
    """Return the bytes that a block saves in addition because its factors are rounded."""
    inputs, settings = share.tokens * share.heads * share.head_dim, config.quantization
    if share.recompute == "selective":  # else these are saved instead of the inputs themselves
        inputs += 2 * share.rows * share.width + share.tokens * share.hidden
    numbers = share.block_matrices * (settings.weights != "none") + inputs * (settings.activations != "none")
    return numbers * share.itemsize * (share.recompute != "full")


def _attention(share: Share) -> tuple[int, int]:
    """Return the bytes that a block's attention saves for the backward pass: without and with its recomputation."""
    heads = share.tokens * share.heads * share.itemsize
    queries, keys = heads * share.head_dim, share.tokens * share.kv_heads * share.head_dim * share.itemsize
    softmax = 0  # saved by `_BlockAttention` on CPUs
    if share.device == "cpu" and share.precision == "bf16" and share.length <= LONGEST_KEPT and share.cp == 1:
        blocks = visible_blocks(share.length, query_block(share.length), share.window)
        softmax = sum((end - start) * (end - low) for low, start, end in blocks) * heads // share.length
    if (latent := share.latent) is not None:
        rotary = heads * latent.rotary
        small = share.rows * (2 * latent.rank + latent.rotary + 2 * (latent.queries or 0)) * share.itemsize
        return small + 4 * queries + 3 * rotary + (softmax or queries + rotary), small + 3 * queries + rotary
    fused = queries + 2 * keys
    if softmax:
        return 4 * queries + softmax + (fused if share.head_norms or share.heads == 1 else 0), fused
    # The fused product stays, because values are a view of it; then rotated queries and keys, and the result.
    return fused + 2 * queries + keys + share.tokens * share.heads * FP32, fused


def _loss(share: Share) -> tuple[int, int]:
    """Return the bytes saved between the last block and the loss, and temporary bytes of the loss's backward pass."""
    e, stream = share.itemsize, share.rows * share.width * share.itemsize
    logits, table, narrow = share.tokens * share.vocabulary, share.table * e, e < FP32
    if share.split:  # saves the logits; the derivative overwrites them, in low precision through fp32
        derivative = min(logits, 2 * LOGITS_AT_A_TIME[share.device]) * FP32 * narrow
        return 2 * stream + logits * e, max(derivative, 2 * share.tokens * share.width * e + table)
    chunk = min(logits, rows_at_a_time(share.vocabulary, share.device) * share.vocabulary)
    softmax = 0 if share.device == "cuda" else (1 + narrow) * chunk * FP32
    # The derivative by the head's weights is summed in fp32, then converted to their type.
    return 2 * stream + share.table * FP32, max(stream + chunk * e + softmax, table * narrow)


def _block_workspace(share: Share) -> int:
    e, stream = share.itemsize, share.rows * share.width * share.itemsize
    recomputed = _kept_by_block(replace(share, recompute="none")) - stream if share.recompute == "full" else 0
    if (experts := share.experts) is not None:  # derivatives by rows and weights; CPUs work on one expert at a time
        rows = share.tokens * experts.chosen
        at_once = rows if share.device == "cuda" else rows // experts.count
        elements = rows * share.width + at_once * (2 * share.width + 4 * experts.hidden)
        elements += 3 * experts.held * experts.hidden * share.width
        return max(2 * stream + recomputed + elements * e, _block_workspace(replace(share, experts=None)))
    inner = share.tokens * share.hidden * e
    latent = share.latent
    size, keys = (share.head_dim + latent.rotary, share.heads) if latent else (share.head_dim, share.kv_heads)
    mixing = share.tokens * size * (5 * share.heads + 2 * keys) * e
    if share.cp > 1:  # fp32 derivatives, and keys and values three times, of the heads that travel together
        part = heads_at_a_time(keys, share.tokens * size, share.device) / keys
        ring = part * ((share.heads + 6 * keys) * FP32 + (share.heads / 2 + 5 * keys) * e)
        mixing = share.tokens * size * int(2 * (share.heads + keys) * e + ring)
    if share.recompute == "selective":
        return stream + max(4 * inner, _attention(share)[0] + mixing - 2 * inner - stream)
    return stream + recomputed + max(3 * inner, mixing - 3 * inner - 2 * stream)
