"""Bytes that one rank needs, in closed form: what lies there all the time, and what a micro-batch adds. No torch.

With Psi the parameters of a rank's tensor-parallel part, N = dp, and e the bytes of a weight (2 in bf16 and fp16):

    stage   weights     gradients   optimizer (fp32 master and two moments)
    0       e Psi       e Psi       12 Psi
    1       e Psi       e Psi       12 Psi / N
    2       e Psi       e Psi / N   12 Psi / N
    3       e Psi / N   e Psi / N   12 Psi / N

In fp32 the weights are their own master: 8 in place of 12. Psi counts the padding of the buckets, which are laid out by
the very functions that the trainer uses, so all of this is exact.

Special here:
- what a micro-batch keeps is counted in `activations.py`;
- the peak is the largest of four moments: the loss; the worst block of the backward pass; its end, where the
  embedding's gradient appears; the update.

Rajbhandari et al. 2020, arXiv 1910.02054, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from .config import RunConfig
from .model.activations import block_workspace, kept_by_block, kept_by_head, loss_workspace, mask_bytes
from .model.shape import Share, share_of
from .parallel.buckets import fill, gathered_units, pack_bucket

WIDE = 4  # bytes of an fp32 number


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what they are for, each at its largest."""

    parameters: int  # weights in the compute dtype
    gradients: int
    optimizer: int  # fp32 master weights, where the weights are not, and two moments
    gathered: int  # stage 3: whole weights of what is at work
    reduction: int  # whole or fp32 copies of the gradients that are on their way
    activations: int  # kept by all blocks for the backward pass, and the mask of attention that they share
    head: int  # kept by the final norm, the head and the loss
    loss_workspace: int  # derivatives by the logits
    block_workspace: int  # derivatives, and activations computed again, in the backward pass of one block
    table_gradients: int  # of the vocabulary's tables, before they reach their buckets
    moments: dict[str, int]  # bytes of everything at the moments that may be the worst

    @property
    def state(self) -> int:
        """What is there all the time."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """Bytes at the worst moment; not the sum of all terms, which never come together."""
        return max(self.moments.values())

    @property
    def worst(self) -> str:
        """Name of that moment."""
        return max(self.moments, key=lambda name: self.moments[name])


def memory(config: RunConfig, device: str = "cuda") -> Memory:
    """Bytes of one rank of a run that has passed `validation.check_shapes`.

    Args:
        config: complete, its vocabulary included.
        device: cpu | cuda; their kernels keep different things.
    """
    share, parallel, stage = share_of(config), config.parallel, stage_of(config)
    buckets = bucket_sizes(share, config)
    held = state_bytes(sum(buckets), share.itemsize, stage, parallel.dp)
    state, depth = sum(held.values()), share.depth
    kept = sum(kept_by_block(share, parallel.recompute, device).values())
    head = kept_by_head(share)
    at_loss = loss_workspace(share, device)
    in_block = block_workspace(share, parallel.recompute, device)
    mask = mask_bytes(share, parallel.recompute, device)
    table = share.table * share.itemsize
    waiting = table if share.tied else 0  # the head's part of a tied table's gradient, until the embedding's comes
    gathered = [gathered_bytes(buckets, share, stage, done) for done in range(depth + 1)]
    travelling = [reduction_bytes(buckets, share, parallel.dp, stage, device, done) for done in range(depth + 1)]
    backward = [mask + (depth - done) * kept + gathered[done] + travelling[done] for done in range(depth)]
    return Memory(
        **held, gathered=max(gathered), reduction=max(travelling), activations=mask + depth * kept, head=head,
        loss_workspace=at_loss, block_workspace=in_block, table_gradients=waiting + table,
        moments={
            "loss": state + gathered_bytes(buckets, share, stage, None) + mask + depth * kept + head + at_loss,
            "backward": state + waiting + in_block + max(backward),
            "embedding": state + waiting + table + gathered[-1] + travelling[-1],
            "update": state + travelling[-1],
        },
    )  # fmt: skip


def halved_micro_batch(micro_batch: int) -> int | None:
    """What to try when a micro-batch does not fit: its largest proper divisor, half of it where it is even.

    A divisor, because the batch must still be a whole number of micro-batches. None: one sequence cannot be divided.
    """
    return next((micro_batch // d for d in range(2, micro_batch + 1) if micro_batch % d == 0), None)


def stage_of(config: RunConfig) -> int:
    """The ZeRO stage at work: one dp rank owns everything anyway."""
    return config.parallel.zero if config.parallel.dp > 1 else 0


def state_bytes(elements: int, itemsize: int, stage: int, ranks: int) -> dict[str, int]:
    """The table above, in bytes, for buckets of so many elements together, padding included."""
    own = elements // ranks
    master_and_moments = WIDE * (2 if itemsize == WIDE else 3)
    return {
        "parameters": (own if stage == 3 else elements) * itemsize,
        "gradients": (own if stage >= 2 else elements) * itemsize,
        "optimizer": (own if stage >= 1 else elements) * master_and_moments,
    }


def bucket_sizes(share: Share, config: RunConfig) -> tuple[int, ...]:
    """Elements of the rank's buckets in backward order, padding included; at stage 3 a block is one."""
    limit = max(1, int(config.parallel.bucket_mb * 2**20 / share.itemsize))
    alike = replace(share, sequences=0, rows=0)  # the micro-batch changes no bucket
    return _bucket_sizes(alike, limit, config.parallel.dp, stage_of(config))


@lru_cache(maxsize=64)
def _bucket_sizes(share: Share, limit: int, ranks: int, stage: int) -> tuple[int, ...]:
    sizes = {parameter.name: parameter.size for parameter in share.parameters}
    backward = list(reversed(sizes))
    runs = gathered_units(backward, share.depth, share.tied) if stage == 3 else fill(backward, sizes, limit)
    group = dict.fromkeys(sizes, 0)  # which parameters are neighbours changes no size
    return tuple(pack_bucket(run, sizes, group, ranks).size for run in runs)


def gathered_bytes(buckets: Sequence[int], share: Share, stage: int, done: int | None) -> int:
    """Whole weights at stage 3 while block `done`, counted from the last, goes backward; None: while the loss does.

    They are the block's and the next one's, at the loss the last block's and the head's; a tied table stays throughout.
    """
    if stage < 3:
        return 0
    final, block = (buckets[-1], buckets[0]) if share.tied else (buckets[0], buckets[1])
    if done is None:
        return share.itemsize * (final + block)
    return share.itemsize * (min(2, share.depth - done) * block + (final if share.tied else 0))


def reduction_bytes(
    buckets: Sequence[int], share: Share, ranks: int, stage: int, device: str, done: int
) -> int:  # fmt: skip
    """Copies of gradients while block `done`, counted from the last, goes backward; done = depth is the embedding.

    A bucket that is being summed has a copy for what the other ranks send; where NCCL adds by itself, in fp32, it has
    none. From stage 2 on the whole bucket is such a copy too, and so is the one that is being filled, which holds at
    least the gradient of the block's last matrix.
    """
    native = share.itemsize == WIDE and (device == "cuda" or stage == 0)
    if ranks == 1 or (stage < 2 and native):
        return 0
    come = done * share.block_size + share.width + (0 if share.tied else share.table)
    come += share.block[-1].size if done < share.depth else share.table
    ends = list(accumulate(buckets))
    complete = [size for size, end in zip(buckets, ends, strict=True) if end <= come]
    summed = complete[-2:] if stage == 0 else complete[-1:]
    received = 0 if native else sum(summed)
    if stage < 2:
        return share.itemsize * received
    filled = [size for size, end in zip(buckets, ends, strict=True) if end - size < come < end]
    return share.itemsize * (received + sum(summed) + sum(filled))
