"""Bytes that one rank needs, in closed form: what lies there all the time, and what a micro-batch adds. No torch.

With Psi the parameters of a rank's tensor-parallel part, N = dp cp, and e the bytes of a weight (2 in bf16 and fp16):

    stage   weights     gradients   optimizer (fp32 master and two moments)
    0       e Psi       e Psi       12 Psi
    1       e Psi       e Psi       12 Psi / N
    2       e Psi       e Psi / N   12 Psi / N
    3       e Psi / N   e Psi / N   12 Psi / N

In fp32 the weights are their own master: 8 in place of 12. What is updated as whole matrices has one moment: 4 less.
It is the end of every bucket, and the rank that counts here is the first, which has the least of it. An average of the
weights adds 4 per copy. Psi counts the padding of the trainer's buckets, so this is exact. What a micro-batch keeps is
counted as autograd keeps it, one storage at a time: a view keeps all of what it looks into.

A pipeline's ranks differ: what is said is the worst one's, whose schedule keeps several micro-batches' activations.

Rajbhandari et al. 2020, arXiv 1910.02054, section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from .config import RunConfig
from .flops import rank_blocks
from .model.shape import (
    LOGITS_AT_A_TIME,
    LONGEST_KEPT,
    Experts,
    Latent,
    Share,
    heads_at_a_time,
    micro_batches,
    model_shape,
    query_block,
    rows_at_a_time,
    share_of,
    visible_blocks,
)
from .optimizer.average import copies
from .optimizer.muon import AT_A_TIME
from .optimizer.registry import OPTIMIZERS
from .parallel.buckets import Bucket, bucket_layouts
from .parallel.schedules import in_flight, schedule

FP32, INDEX = 4, 8  # bytes of an fp32 number, and of a token's id


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what they are for, each at its largest."""

    parameters: int  # weights in the compute dtype
    gradients: int
    optimizer: int  # fp32 master weights, where the weights are not, two moments, and averages of the weights
    gathered: int  # stage 3: whole weights of what is at work
    reduction: int  # whole or fp32 copies of the gradients that are on their way
    activations: int  # kept by all blocks for the backward pass, the mask that they share, messages of a pipeline
    head: int  # kept by the final norm, the head and the loss
    loss_workspace: int  # derivatives by the logits
    block_workspace: int  # derivatives, and activations computed again, in the backward pass of one block
    table_gradients: int  # of the vocabulary's tables, before they reach their buckets
    moments: dict[str, int]  # bytes of everything at the moments that may be the worst

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """Bytes at the worst moment; terms that never come together are not summed."""
        return max(self.moments.values())

    @property
    def worst(self) -> str:
        return max(self.moments, key=lambda name: self.moments[name])


def memory(config: RunConfig, device: str = "cuda") -> Memory:
    """Bytes of one rank of a run that has passed `validation.check_shapes`; `device` is cpu or cuda."""
    parallel, passes = config.parallel, micro_batches(config)
    name = parallel.schedule if parallel.pp > 1 else "1f1b"
    # Of a long one but gpipe no more is kept than of a short one.
    lists = schedule(name, parallel.pp, passes if name == "gpipe" else min(passes, 2 * parallel.pp), parallel.chunks)
    worst: dict[tuple[Share, tuple[Share, ...]], list[int]] = {}  # what is kept beside each chunk
    for actions, (share, chunks) in zip(lists, ranks_of(config, device), strict=True):
        sizes = [kept_by_blocks(chunk, chunk.depth) + kept_by_head(chunk) * chunk.scores for chunk in chunks]
        beside = [0] * len(chunks)
        for (kind, _, chunk), kept in zip(actions, in_flight(actions, sizes), strict=True):
            beside[chunk] = max(beside[chunk], kept - sizes[chunk] * (kind == "forward"))
        worst[share, chunks] = [*map(max, beside, worst.get((share, chunks), beside))]
    return max((_of_rank(config, *held, beside) for held, beside in worst.items()), key=lambda memory: memory.peak)


def ranks_of(config: RunConfig, device: str = "cuda") -> list[tuple[Share, tuple[Share, ...]]]:
    """What each pipeline rank holds: in all, and of every chunk."""
    whole, blocks = share_of(config, device), rank_blocks(config)
    above = whole.depth if whole.experts is None else whole.experts.above

    def held(own: Sequence[range]) -> Share:
        depth, dense = sum(map(len, own)), sum(len(range(one.start, min(one.stop, above))) for one in own)
        experts = None if whole.experts is None or dense == depth else replace(whole.experts, above=dense)
        ends = own[0].start == 0, own[-1].stop == whole.depth
        return replace(whole, depth=depth, experts=experts, embeds=ends[0], scores=ends[1])

    return [(held(own), tuple(held([one]) for one in own)) for own in blocks]


def _of_rank(config: RunConfig, share: Share, chunks: Sequence[Share], beside: Sequence[int]) -> Memory:
    """Of a rank with these chunks; `beside` are bytes that other activations have while each is worked on."""
    parallel, stage = config.parallel, stage_of(config)
    buckets = bucket_sizes(share, config)
    experts = sum(bucket.size for bucket in buckets_of(share, config) if bucket.experts)
    rest = sum(buckets) - experts
    averages = copies(config.average)
    held = state_bytes(rest, share.itemsize, stage, parallel.data, one_moment(share, config), averages)
    if experts:  # which so many ranks have
        replicas = parallel.data // parallel.ep
        own = state_bytes(experts, share.itemsize, stage if replicas > 1 else 0, replicas, averages=averages)
        held = {name: size + own[name] for name, size in held.items()}
    state, depth = sum(held.values()), share.depth
    if experts:
        buckets = _with_experts(buckets_of(share, config), whole=parallel.data == parallel.ep)
    in_block = block_workspace(share)
    head, at_loss = (kept_by_head(share), loss_workspace(share)) if share.scores else (0, 0)
    mask = 0
    if has_mask(share) and not (share.recompute == "none" and keeps_softmax(share)):
        mask = (share.sequences if share.documents else 1) * share.length**2 * share.itemsize
    # On each way of a pipeline a message that is awaited, and one that may not have come.
    messages = 4 * share.rows * share.width * share.itemsize if parallel.pp > 1 else 0
    table = share.table * share.itemsize if share.embeds or share.scores else 0
    # The head's part of a tied table's gradient, until the embedding's comes.
    waiting = table if share.tied and share.embeds and share.scores else 0
    gathered = [gathered_bytes(buckets, share, stage, done) for done in range(depth + 1)]
    travelling = [reduction_bytes(buckets, share, parallel.data, stage, done) for done in range(depth + 1)]
    left = [(chunk, blocks) for chunk in reversed(range(len(chunks))) for blocks in range(chunks[chunk].depth, 0, -1)]
    kept = [beside[chunk] + kept_by_blocks(chunks[chunk], blocks) for chunk, blocks in left]
    backward = [mask + messages + kept[done] + gathered[done] + travelling[done] for done in range(depth)]
    return Memory(
        **held,
        gathered=max(gathered),
        reduction=max(travelling),
        activations=mask + messages + max(kept),
        head=head,
        loss_workspace=at_loss,
        block_workspace=in_block,
        table_gradients=waiting + table,
        moments={
            "loss": state + gathered_bytes(buckets, share, stage, None) + mask + messages + kept[0] + head + at_loss,
            "backward": state + waiting + in_block + max(backward),
            "embedding": state + beside[0] + waiting + table + gathered[-1] + travelling[-1],
            "update": state + travelling[-1] + whole_workspace(share, config),
        },
    )


def _with_experts(buckets: Sequence[Bucket], whole: bool) -> tuple[int, ...]:
    """Elements that are gathered and summed together, experts with the bucket after theirs; `whole`: they never are."""
    sizes, before = [], 0
    for bucket in buckets:
        if bucket.experts:
            before = 0 if whole else bucket.size
        else:
            sizes.append(before + bucket.size)
            before = 0
    return tuple(sizes)


def halved_micro_batch(micro_batch: int) -> int | None:
    """What to try when a micro-batch does not fit: its largest proper divisor, so that it still divides the batch."""
    return next((micro_batch // d for d in range(2, micro_batch + 1) if micro_batch % d == 0), None)


def stage_of(config: RunConfig) -> int:
    """The ZeRO stage at work: one rank with its part of the model owns everything anyway."""
    return config.parallel.zero if config.parallel.data > 1 else 0


def state_bytes(
    elements: int, itemsize: int, stage: int, ranks: int, less: int = 0, averages: int = 0
) -> dict[str, int]:
    """The table above for buckets of so many elements, padding included, `less` of them with one moment, and so many
    copies of averages.
    """
    own = elements // ranks
    master_and_moments = FP32 * (averages + (2 if itemsize == FP32 else 3))
    return {
        "parameters": (own if stage == 3 else elements) * itemsize,
        "gradients": (own if stage >= 2 else elements) * itemsize,
        "optimizer": (own if stage >= 1 else elements) * master_and_moments - FP32 * less,
    }


def bucket_sizes(share: Share, config: RunConfig) -> tuple[int, ...]:
    """Elements of the rank's buckets in backward order, padding included; at stage 3 one per block."""
    return tuple(bucket.size for bucket in buckets_of(share, config))


def one_moment(share: Share, config: RunConfig) -> int:
    """Elements without a second moment that the first data-parallel rank has."""
    ranks = config.parallel.data if stage_of(config) > 0 else 1
    return sum(max(bucket.size // ranks - bucket.start_of(1), 0) for bucket in buckets_of(share, config))


def whole_workspace(share: Share, config: RunConfig) -> int:
    """Bytes while matrices are whole: a rank's part of all, those that it owns, and a batch of them or an exchange."""
    ranks, optimizer = config.parallel.world_size // config.parallel.pp, config.optimizer
    roles = OPTIMIZERS[optimizer.kind].roles
    block = [parameter for parameter in model_shape(config.model).block if parameter.role in roles]
    batches = Counter[tuple[int, int]]()  # elements of matrices of one shape
    for matrix in block:
        for part in matrix.parts:
            batches[part.rows, matrix.columns or 1] += part.rows * (matrix.columns or 1)
    itemsize = 2 if optimizer.iteration_precision == "bf16" else FP32
    owned, batch = (share.depth * size // ranks for size in (batches.total(), max(batches.values(), default=0)))
    held = owned if stage_of(config) > 0 else owned * config.parallel.data
    kept = held if min(share.itemsize, itemsize) < FP32 else 0  # else in the gradients' place
    products = 3 * min(batch, max(AT_A_TIME, *(math.prod(side) for side in batches), 0))
    return itemsize * (kept + (0 if ranks == 1 else owned) + max(batch + products, 0 if ranks == 1 else held + owned))


def buckets_of(share: Share, config: RunConfig) -> tuple[Bucket, ...]:
    limit = max(1, int(config.parallel.bucket_mb * 2**20 / share.itemsize))
    alike = replace(share, sequences=0, rows=0, recompute="", device="")  # which change no bucket
    parallel, roles = config.parallel, OPTIMIZERS[config.optimizer.kind].roles
    return _buckets_of(alike, limit, parallel.data, parallel.ep, stage_of(config), roles)


@lru_cache(maxsize=1024)
def _buckets_of(
    share: Share, limit: int, ranks: int, ep: int, stage: int, whole: tuple[str, ...]
) -> tuple[Bucket, ...]:
    sizes = {parameter.name: parameter.size for parameter in share.parameters}
    groups = {parameter.name: int(parameter.role in whole) for parameter in share.parameters}  # of the rest all are 0
    return tuple(bucket_layouts(sizes, groups, limit, ranks, gathered=stage == 3, ep=ep))


def gathered_bytes(buckets: Sequence[int], share: Share, stage: int, done: int | None) -> int:
    """Whole weights at stage 3 while block `done`, counted from the last, goes backward; None: while the loss does.

    They are this block's and the next one's, at the loss the last block's and the head's; a tied table stays
    throughout.
    """
    if stage < 3:
        return 0
    final, block = (buckets[-1], buckets[0]) if share.tied else (buckets[0], buckets[1])
    if done is None:
        return share.itemsize * (final + block)
    return share.itemsize * (min(2, share.depth - done) * block + (final if share.tied else 0))


def reduction_bytes(buckets: Sequence[int], share: Share, ranks: int, stage: int, done: int) -> int:
    """Copies of gradients while block `done`, counted from the last, goes backward; done = depth is the embedding.

    A bucket that is being summed has a copy for what the other ranks send, unless NCCL adds by itself, in fp32. From
    stage 2 on the whole bucket is such a copy too, and so is the one that is being filled.
    """
    native = share.itemsize == FP32 and (share.device == "cuda" or stage == 0)
    if ranks == 1 or (stage < 2 and native):
        return 0
    come = done * share.block_size + (share.width + (0 if share.tied else share.table)) * share.scores
    come += share.block[-1].size if done < share.depth else share.table
    ends = list(accumulate(buckets))
    complete = [size for size, end in zip(buckets, ends, strict=True) if end <= come]
    summed = complete[-2:] if stage == 0 else complete[-1:]
    received = 0 if native else sum(summed)
    if stage < 2:
        return share.itemsize * received
    filled = [size for size, end in zip(buckets, ends, strict=True) if end - size < come < end]
    return share.itemsize * (received + sum(summed) + sum(filled))


def kept_by_blocks(share: Share, blocks: int) -> int:
    """Of the first ones."""
    dense = 0 if share.experts is None else min(blocks, share.experts.above)
    return dense * kept_by_block(replace(share, experts=None)) + (blocks - dense) * kept_by_block(share)


def kept_by_experts(share: Share, experts: Experts) -> int:
    """First product and gates of the chosen experts, with where rows come from and go to; scores and choice."""
    rows = share.tokens * experts.chosen
    routed = rows * ((2 * experts.hidden + 1) * share.itemsize + 2 * INDEX)
    choice = share.tokens * (experts.count * FP32 + experts.chosen * (2 * FP32 + INDEX) + FP32)
    # The router reads tokens in fp32, of all tensor-parallel ranks.
    wide = share.tokens * share.width * FP32 if share.itemsize < FP32 or share.rows < share.tokens else 0
    return routed + choice + wide + 2 * share.tokens * experts.shared * share.itemsize


def kept_by_block(share: Share) -> int:
    """Of the last one."""
    stream = share.rows * share.width * share.itemsize
    if share.recompute == "full":
        return stream
    inner = share.tokens * (share.hidden if share.experts is None else share.experts.shared) * share.itemsize
    kept = 2 * stream + 2 * inner  # before and after attention; gate and up
    if share.experts is not None:
        kept = 2 * stream + kept_by_experts(share, share.experts)
    norms = 2 * stream + 2 * share.rows * FP32  # what they give, and one number per token
    if share.latent is not None:
        kept += kept_by_latents(share, share.latent)
        return kept if share.recompute == "selective" else kept + norms + inner
    fused = heads_bytes(share, share.heads + 2 * share.kv_heads)  # query, key and value
    if share.recompute == "selective":
        return kept + fused
    # A value that is a view of the fused product keeps all of it, and so do norms of heads, which read it.
    copied = share.heads > 1 if keeps_softmax(share) else repeats_heads(share)
    product = fused if share.head_norms or not copied else 0
    return kept + norms + product + attention_bytes(share) + inner


def kept_by_latents(share: Share, latent: Latent) -> int:
    """The small vectors and their norms, and what attention works on and gives, or what that is made of."""
    small = share.rows * (2 * latent.rank + latent.rotary + 2 * (latent.queries or 0)) * share.itemsize
    heads, size = share.tokens * share.heads, share.head_dim + latent.rotary
    if share.recompute == "selective":
        return small + (heads * (size + 2 * share.head_dim) + share.tokens * latent.rotary) * share.itemsize
    # Query, key and value, all as wide as keys, and what of the result is read.
    kept = small + heads * (3 * size + share.head_dim) * share.itemsize
    if keeps_softmax(share):
        return kept + share.sequences * share.heads * sum(softmax_blocks(share)) * share.itemsize
    return kept + heads * size * share.itemsize + heads * FP32  # the result, and the normalisers


def heads_bytes(share: Share, heads: int) -> int:
    return share.tokens * heads * share.head_dim * share.itemsize


def keeps_softmax(share: Share) -> bool:
    """Whether attention runs in our blocks for CPUs, which keep their softmax, and copies of what they read."""
    short = share.length <= LONGEST_KEPT and share.cp == 1
    return share.device == "cpu" and share.precision == "bf16" and short


def repeats_heads(share: Share) -> bool:
    """Whether PyTorch's kernel needs key and value once for every query head: on GPUs those of fp32 do."""
    return share.heads > share.kv_used and share.device == "cuda" and share.precision == "fp32" and share.cp == 1


def attention_bytes(share: Share) -> int:
    """Kept from the fused product to the output's product, whose input is included."""
    queries = heads_bytes(share, share.heads)
    rotated = heads_bytes(share, share.heads + share.kv_heads)  # queries and keys, of which both are views
    if keeps_softmax(share):  # a single head needs no copy of its key and value
        softmax = share.sequences * share.heads * sum(softmax_blocks(share)) * share.itemsize
        kept = softmax + (4 * queries if share.heads > 1 else 2 * queries + rotated)
    elif repeats_heads(share):  # the value is no view any more
        kept = (queries if share.head_norms else rotated) + 3 * queries
    else:
        kept = rotated + queries
        if has_mask(share) and share.length > query_block(share.length):
            kept += queries  # what the blocks of queries give, before they are one
    if not keeps_softmax(share):
        kept += share.tokens * share.heads * FP32  # the logarithm of each query's normaliser
    if share.head_norms:
        kept += share.tokens * (share.heads + share.kv_heads) * FP32
    return kept


def softmax_blocks(share: Share) -> list[int]:
    """Weights of one head in each block."""
    blocks = visible_blocks(share.length, query_block(share.length), share.window)
    return [(end - start) * (end - low) for low, start, end in blocks]


def ring_workspace(share: Share) -> int:
    """Attention's backward pass over shared sequences: all derivatives; of heads that go round together those of
    queries in fp32, of keys and values three times, keys and values twice; what one step gives, and its mask.
    """
    size, heads, keys = share.head_dim, share.heads, share.kv_used
    if share.latent is not None:
        size, keys = size + share.latent.rotary, heads
    head = share.tokens * size
    whole = head * (2 * heads + 2 * keys) * share.itemsize
    part = heads_at_a_time(keys, head, share.device) / keys
    # Beside the first step all have half of the queries or of the keys; the last one sends no keys.
    narrow = heads / 2 + (6 if share.cp > 2 else 4) * keys
    travelling = head * ((heads + 6 * keys) * FP32 + narrow * share.itemsize)
    mask = 0
    if share.device == "cpu" and (share.window is not None or share.documents):
        mask = query_block(share.length // 2) * share.length * (share.itemsize + 2)
    return whole + int(part * travelling) + mask * (share.sequences if share.documents else 1)


def has_mask(share: Share) -> bool:
    """Whether a mask says what is seen, as PyTorch's kernels want it. Ours need none; a ring makes it by blocks."""
    return share.device == "cpu" and share.cp == 1 and (share.window is not None or share.documents)


def kept_by_head(share: Share) -> int:
    """Bytes kept from the last block to the loss: the final norm's, and the loss's derivatives by the head's weights.

    Split over ranks the loss keeps input and logits, with each token's column, whether it lies here, and its
    normaliser.
    """
    norm = share.rows * (2 * share.width * share.itemsize + FP32)
    if not share.split:
        return norm + share.table * FP32
    return norm + share.tokens * (share.vocabulary * share.itemsize + INDEX + 1 + FP32)


def norm_workspace(share: Share) -> int:
    """Derivatives in a norm's backward pass."""
    stream = share.rows * share.width
    wide = 0 if share.device == "cuda" else 2 if share.precision == "fp32" else 4
    return 2 * stream * share.itemsize + wide * stream * FP32


def loss_workspace(share: Share) -> int:
    """Bytes beside `kept_by_head`, from the loss back to the last block: the most at the loss, the head or the norm."""
    if share.split:
        return _split_loss_workspace(share)
    stream, table = share.rows * share.width * share.itemsize, share.table * share.itemsize
    chunk = min(rows_at_a_time(share.vocabulary, share.device), share.tokens) * share.vocabulary
    narrow = share.itemsize < FP32
    # On CPUs the softmax beside the logits, in low precision both in fp32 beside them.
    softmax = 0 if share.device == "cuda" else (2 if narrow else 1) * chunk * FP32
    product = table if narrow and share.device == "cpu" else 0  # a chunk's term of the weights' derivative
    forward = stream + chunk * share.itemsize + max(softmax, product)
    head = table if narrow else 0  # the weights' derivative in their own type; from here on, if tied, it waits
    norm = norm_workspace(share) - stream - share.table * FP32 + (table if share.tied else 0)
    return max(forward, head, norm)


def _split_loss_workspace(share: Share) -> int:
    logits, whole = share.tokens * share.vocabulary, share.tokens * share.width * share.itemsize
    # The derivative takes the logits' place, in low precision through fp32: some rows, and those before them.
    chunk = max(LOGITS_AT_A_TIME[share.device], share.vocabulary)
    derivative = min(logits, 2 * chunk) * FP32 if share.itemsize < FP32 else 0
    gathered = whole if share.rows < share.tokens else 0
    products = logits * share.itemsize + gathered + whole + share.table * share.itemsize
    return max(derivative, products - logits * share.itemsize, norm_workspace(share) - logits * share.itemsize)


def _experts_workspace(share: Share, experts: Experts) -> int:
    """Bytes beside what all blocks keep in the backward pass of the experts: derivatives by rows and weights, and what
    one expert works on at a time, on GPUs all.
    """
    rows = share.tokens * experts.chosen
    at_once = rows if share.device == "cuda" else rows // experts.count
    weights = 3 * experts.held * experts.hidden * share.width
    again = kept_by_block(replace(share, recompute="none")) if share.recompute == "full" else 0
    stream = share.rows * share.width * share.itemsize
    return max(again, stream) + share.itemsize * (
        rows * share.width + at_once * (2 * share.width + 4 * experts.hidden) + weights
    )


def block_workspace(share: Share) -> int:
    """Bytes beside what all blocks keep while one goes backward: the most at any of four moments.

    They are SwiGLU's derivative, that of the MLP's first product, of its norm, and of attention. Before each, some of
    what the block kept has been freed; the stream's derivative is there throughout.
    """
    stream, whole = share.rows * share.width * share.itemsize, share.tokens * share.width * share.itemsize
    inner = share.tokens * share.hidden * share.itemsize
    gathered = whole if share.rows < share.tokens else 0
    norm = norm_workspace(share)
    if share.experts is not None:
        return max(_experts_workspace(share, share.experts), block_workspace(replace(share, experts=None)))
    mixing = heads_bytes(share, 5 * share.heads + 2 * share.kv_heads)
    if keeps_softmax(share):  # derivatives of the weights and of the scores, a block of queries at a time
        mixing += 2 * share.sequences * share.heads * max(softmax_blocks(share)) * share.itemsize
    if share.cp > 1:
        mixing = max(mixing, ring_workspace(share))
    if share.recompute == "selective":
        again = attention_bytes(share)
        moments = (4 * inner, stream + gathered + whole, norm - 2 * inner, again + mixing - 2 * inner - stream)
        return stream + max(moments)
    again = kept_by_block(replace(share, recompute="none")) - stream if share.recompute == "full" else 0
    moments = (3 * inner, gathered + whole - inner, norm - 3 * inner - stream, mixing - 3 * inner - 2 * stream)
    return stream + again + max(moments)
