"""Rank the ways to spread a run over ranks by the estimated time of a step.

A way is a mesh (tp, dp, pp, ep), a ZeRO stage, a micro-batch and what is recomputed. It fits if its peak (`memory.py`)
leaves a margin for what the estimate omits, such as the CUDA context. Its time is that of matrix products at the
measured rate, ring collectives that no product hides, and waits between pipeline stages. The ring of context-parallel
ranks counts as hidden by attention.

Korthikanti et al. 2022, arXiv 2205.05198, section 4; Rajbhandari et al. 2020, arXiv 1910.02054, section 7.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..config import ParallelConfig, RunConfig
from ..errors import UserError
from ..flops import flops_optimizer
from ..memory import Memory, memory, rank_shares, replicated_elements
from ..model.shape import Share, micro_batches
from ..optimizer.registry import OPTIMIZERS
from .validation import check_shapes, divisors_of, working_shapes

MAX_RANKS = 2**20  # more is a mistake
TIE = 0.01  # relative; closer times count as equal, because the formulas are not more accurate (docs/decisions.md)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Hardware:
    """The machine as one rank sees it; the defaults are from the data sheet of an H100 in a DGX."""

    memory_bytes: float = 80e9
    flops_per_second: float = 4e14  # plain matrix products, in the run's precision
    half_speed_width: float = 512.0  # model width at which training reaches half of that speed
    intra_bandwidth: float = 450e9  # bytes a second to a rank of the same node
    inter_bandwidth: float = 50e9  # bytes a second and rank to another node
    ranks_per_node: int = 8
    device: str = "cuda"  # cpu | cuda: whose kernels run

    def ring(self, size: float, ranks: int, group: int) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `size` bytes over `ranks` ranks.

        The ranks lie among `group` neighbours; if a node has fewer ranks, the network between nodes sets the speed.
        """
        bandwidth = self.intra_bandwidth if group <= self.ranks_per_node else self.inter_bandwidth
        return (ranks - 1) / ranks * size / bandwidth


@dataclass(frozen=True)
class Way:
    parallel: ParallelConfig
    memory: Memory
    seconds: float  # of a step
    fits: bool

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.parallel.pp, self.parallel.tp, self.parallel.ep, self.parallel.zero


def rank_ways(config: RunConfig, ranks: int, hardware: Hardware, margin: float = 0.1) -> list[Way]:
    """Return every way to spread a run over `ranks` ranks, sorted by fit to memory, then time, then simplicity.

    Args:
        config: Its tp, dp, ep, zero, micro_batch_size and recompute are ignored, and on GPUs its pp, too.
        margin: Share of the device's memory to leave free.

    Raises:
        UserError: A number is out of range, or no mesh divides this model and batch.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise UserError(f"ranks is {ranks}; it must be 1 to {MAX_RANKS}")
    for name, value in dataclasses.asdict(hardware).items():
        if name != "device" and not value > 0:
            raise UserError(f"{name} is {value:g}; it must be greater than 0")
    if ranks % config.parallel.cp:
        raise UserError(f"ranks is {ranks}; it must be a multiple of parallel.cp {config.parallel.cp}")
    if not 0 <= margin < 1:
        raise UserError(f"margin is {margin}; it must be at least 0 and below 1")
    ways, room = [], hardware.memory_bytes * (1 - margin)
    for parallel in _settings(config, ranks, hardware):
        spread = dataclasses.replace(config, parallel=parallel)
        needed = memory(spread, hardware.device)
        seconds = max(_rank_seconds(spread, hardware, share) for share in rank_shares(spread, hardware.device))
        ways.append(Way(parallel, needed, seconds, needed.peak <= room))
    if not ways:
        plain = ParallelConfig(dp=ranks // config.parallel.cp, cp=config.parallel.cp, micro_batch_size=1)
        check_shapes(dataclasses.replace(config, parallel=plain))
    tie = (1 + TIE) * min((way.seconds for way in ways if way.fits), default=0.0)

    def order(way: Way) -> tuple[object, ...]:
        simple = *way.mesh, RECOMPUTE.index(way.parallel.recompute), -(way.parallel.micro_batch_size or 0)
        return not way.fits, max(way.seconds, tie), simple

    return sorted(ways, key=order)


def _settings(config: RunConfig, ranks: int, hardware: Hardware) -> Iterator[ParallelConfig]:
    stages = divisors_of(ranks) if hardware.device == "cuda" else sorted({1, config.parallel.pp})
    for micro, pp in itertools.product(divisors_of(config.optimizer.batch_size), stages):
        chunks = config.parallel.chunks if pp > 1 else 1
        asked = dataclasses.replace(config.parallel, zero=0, ep=1, pp=pp, chunks=chunks, micro_batch_size=micro)
        spread = dataclasses.replace(config, parallel=asked)
        for tp, dp in working_shapes(spread, ranks, min(ranks, hardware.ranks_per_node)):
            data, experts = dp * asked.cp, 0 if OPTIMIZERS[config.optimizer.kind].whole else config.model.experts
            zeros = (0,) if data == 1 else (0, 1, 2, 3) if pp == 1 else (0, 1, 2)
            sharings = divisors_of(math.gcd(data, experts)) if experts else [1]
            for ep, zero, recompute in itertools.product(sharings, zeros, RECOMPUTE):
                yield dataclasses.replace(asked, tp=tp, dp=dp, ep=ep, zero=zero, recompute=recompute)


def _rank_seconds(config: RunConfig, hardware: Hardware, share: Share) -> float:
    parallel, passes, full = config.parallel, micro_batches(config), config.parallel.recompute == "full"
    # The geometric mean of both sides of a matrix, of which tp splits one.
    width = config.model.width / parallel.tp**0.5
    rate = hardware.flops_per_second * width / (width + hardware.half_speed_width)
    rotary = 0 if share.latent is None else share.latent.rotary
    attention = 2 * share.length * share.cp * share.heads * (2 * share.head_dim + rotary)  # FLOPs per token and block
    products = 2 * (share.matrices + share.table * share.scores)
    forward = share.tokens * (products + share.depth * attention) / rate
    recomputed = {"none": 0, "selective": attention, "full": 2 * share.block_matrices + attention}[parallel.recompute]
    backward = 2 * forward + share.tokens * share.depth * recomputed / rate
    # A block gathers and scatters its input twice, embedding and head together once. Half of the backward pass's
    # collectives run at the same time as products.
    size = share.tokens * share.width * share.itemsize
    times = 3 * (2 * share.depth + (share.embeds + share.scores) / 2) + 4 * share.depth * full
    waits = times * hardware.ring(size, parallel.tp, parallel.tp)
    if (experts := share.experts) is not None:  # rows go to the ranks with their experts and back
        times = (6 if full else 4) * (share.depth - experts.above) * experts.chosen
        waits += times * hardware.ring(size, parallel.ep, parallel.ep * parallel.tp)
    micro_batch = forward + backward + waits
    bubble = micro_batch / parallel.chunks + 2 * hardware.ring(2 * size, 2, parallel.world_size)
    update = flops_optimizer(config) / config.steps / parallel.world_size / rate
    # Stages 2 and 3 reduce the gradients of every micro-batch; stage 3 gathers its weights for both passes.
    stage, group = parallel.zero, parallel.data * parallel.tp
    ring = sum(hardware.ring(n * share.itemsize, ranks, group) for n, ranks in replicated_elements(share, config))
    reduced, gathered = ring * (2 if stage in (0, 3) else 1) - backward, ring - forward
    data = (passes if stage > 1 else 1) * max(0.0, reduced) + (0, 1, 1, passes)[stage] * max(0.0, gathered)
    return passes * micro_batch + (parallel.pp - 1) * bubble + update + data
