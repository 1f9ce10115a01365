"""Which (tp, dp, pp, ZeRO stage, micro-batch, recompute) a run should use on so many ranks: the fastest that fits, why.

Every combination is costed in closed form. It fits when its peak (`memory.py`) stays within the device's memory less a
margin for what no formula sees: the CUDA context, NCCL's buffers, fragmentation. The seconds of a step are

    forward + backward + recompute     matrix-product FLOPs over the measured rate
    + tensor + context + experts + data    what ranks send each other, as far as nothing hides it
    + update                           bytes of Adam over the memory's bandwidth
    + bubble + sends                   of a pipeline's schedule, played with these seconds of each stage

A collective is a ring of N - 1 hops, each of n / N bytes and one latency; an all-reduce is two. Tensor-parallel ones
hold up the forward pass, and run beside other products in the backward pass. Gradients are reduced beside the backward
pass, but for the last bucket; ZeRO-3 gathers one block ahead.

Korthikanti et al. 2022, arXiv 2205.05198, section 4; Rajbhandari et al. 2020, arXiv 1910.02054, section 7.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from ..config import ParallelConfig, RunConfig
from ..errors import UserError
from ..flops import flops_optimizer
from ..memory import Memory, buckets_of, memory, ranks_of, stage_of
from ..model.shape import Share, micro_batches, share_of
from ..parallel.schedules import schedule, simulate
from .validation import check_shapes, divisors_of, working_shapes

MARGIN = 0.10  # share of the device's memory that a plan leaves free
MOST_RANKS = 2**20
TIE = 0.01  # times that differ by less are equal, for the formulas are no better
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Hardware:
    """The machine that one rank sees; the defaults are the data sheet of an H100 in a DGX."""

    memory_bytes: float = 80e9
    flops_per_second: float = 4e14  # plain matrix products, in the run's precision
    half_speed_width: float = 512.0  # model width at which training reaches half of that
    memory_bandwidth: float = 3.35e12  # bytes a second of the rank's own memory
    intra_bandwidth: float = 450e9  # bytes a second to a rank of the same node
    inter_bandwidth: float = 50e9  # bytes a second and rank to another node
    latency: float = 1e-5  # seconds a hop of a collective
    ranks_per_node: int = 8
    device: str = "cuda"  # cpu | cuda: whose kernels run


@dataclass(frozen=True)
class StepTime:
    forward: float
    backward: float
    recompute: float  # activations computed again
    tensor: float  # tensor-parallel collectives that nothing hides
    context: float  # keys and values that travel between steps of attention, and their derivatives, likewise
    experts: float  # rows of tokens, to the ranks that have their experts and back
    data: float  # reductions and gathers over dp that nothing hides
    update: float
    bubble: float = 0.0  # waiting for other stages of a pipeline
    sends: float = 0.0  # and for what they send

    @property
    def total(self) -> float:
        return sum(vars(self).values())


class Pass(NamedTuple):
    """Seconds of a micro-batch in a virtual stage; its backward pass takes twice the forward one."""

    forward: float
    recompute: float
    tensor: float
    context: float
    experts: float

    @property
    def actions(self) -> tuple[float, float]:
        """The seconds of the forward pass and of the backward pass."""
        waits = (self.tensor + self.context + self.experts) / 2
        return self.forward + waits, 2 * self.forward + self.recompute + waits


def step_time(config: RunConfig, hardware: Hardware) -> StepTime:
    """Of the rank of a pipeline that works most."""
    passes, held = micro_batches(config), {share for share, _ in ranks_of(config)}
    each, pp = passes_of(config, hardware), config.parallel.pp
    ranks = (Pass(*map(sum, zip(*each[rank::pp], strict=True))) for rank in range(pp))
    work = max(ranks, key=lambda work: sum(work.actions))
    whole, unsent = (_pipeline_seconds(config, each, send) for send in (send_seconds(config, hardware), 0.0))
    # Adam reads gradient, weight and both moments, and writes the last three and the weight.
    updated = max(
        sum(bucket.size / (bucket.ranks if stage_of(config) > 0 else 1) for bucket in buckets_of(share, config))
        for share in held
    )
    backward = 2 * work.forward + work.recompute
    return StepTime(
        **{name: passes * seconds for name, seconds in work._asdict().items()},
        backward=passes * 2 * work.forward,
        data=max(data_seconds(config, hardware, work.forward, backward, share) for share in held),
        update=updated * (6 * 4 + 2 * share_of(config).itemsize) / hardware.memory_bandwidth
        + flops_optimizer(config) / config.steps / config.parallel.world_size / rate_of(config, hardware),
        bubble=unsent - passes * sum(work.actions) if pp > 1 else 0.0,
        sends=whole - unsent,
    )


def rate_of(config: RunConfig, hardware: Hardware) -> float:
    # The width is the geometric mean of both sides of a matrix, of which tp splits one.
    width = config.model.width / config.parallel.tp**0.5
    return hardware.flops_per_second * width / (width + hardware.half_speed_width)


def passes_of(config: RunConfig, hardware: Hardware) -> list[Pass]:
    """Return the seconds of a micro-batch in each virtual stage."""
    by_chunk = zip(*(chunks for _, chunks in ranks_of(config)), strict=True)
    return [_pass_of(config, hardware, share) for shares in by_chunk for share in shares]


def _pass_of(config: RunConfig, hardware: Hardware, share: Share) -> Pass:
    rate = rate_of(config, hardware)
    forward = forward_flops(share) / rate
    # The last product of a block is repeated for its collective's sake alone.
    repeated = share.block_matrices - (0 if share.split else share.width * share.inner)
    attention = attention_flops(share)
    recomputed = {"none": 0, "selective": attention, "full": 2 * repeated + attention}[config.parallel.recompute]
    # The share of the products of which tp gathers the input: query, key, value, gate, up, and the head.
    row_products = share.width * (share.heads * share.head_dim + share.inner) * share.depth
    column = 1 - row_products / (share.matrices + share.table * share.scores)
    return Pass(
        forward,
        share.tokens * share.depth * recomputed / rate,
        tensor_seconds(config, hardware, column * forward, share),
        ring_wait(config, hardware, share.tokens * attention / share.cp / rate, share),
        exchange_seconds(config, hardware, share),
    )


def send_seconds(config: RunConfig, hardware: Hardware) -> float:
    """Of a micro-batch's activations, or their gradients, to the next stage."""
    share, ranks = share_of(config), config.parallel.world_size
    return share.rows * share.width * share.itemsize / _bandwidth(ranks, hardware) + hardware.latency


def _pipeline_seconds(config: RunConfig, each: Sequence[Pass], send: float) -> float:
    """Of all micro-batches. The time of many follows from that of few, for it grows evenly."""
    parallel, passes = config.parallel, micro_batches(config)
    few, pp = min(passes, 4 * parallel.pp), parallel.pp
    seconds = *zip(*(one.actions for one in each), strict=True), send
    counts = few, few - pp if passes > few else few
    name = parallel.schedule if pp > 1 else "1f1b"
    first, before = (_last_end((name, pp, count, parallel.chunks), *seconds) for count in counts)
    return first + (first - before) / pp * (passes - few)


@lru_cache(maxsize=4096)
def _last_end(asked: tuple[str, int, int, int], *seconds: Any) -> float:
    return max(event.end for event in simulate(schedule(*asked), *seconds))


def forward_flops(share: Share) -> int:
    """Of matrix products and attention in one forward pass."""
    head = share.table if share.scores else 0
    return share.tokens * (2 * (share.matrices + head) + share.depth * attention_flops(share))


def attention_flops(share: Share) -> int:
    """Scores and weighting in one block, per token."""
    rotary = 0 if share.latent is None else share.latent.rotary
    return 2 * share.length * share.cp * share.heads * (2 * share.head_dim + rotary)


def ring_seconds(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """An all-gather or a reduce-scatter of `size` bytes, counted whole."""
    return (ranks - 1) * (size / ranks / bandwidth + latency)


def tensor_seconds(config: RunConfig, hardware: Hardware, product: float, share: Share) -> float:
    """What a micro-batch waits for its tensor-parallel collectives.

    A block gathers and scatters twice; embedding and head are one pair more. In the backward pass the sum over ranks
    runs beside the weight gradients, and the second gather of the input beside the input gradients.

    Args:
        product: seconds of those products of a forward pass whose input is gathered.
    """
    parallel = config.parallel
    size = share.tokens * share.width * share.itemsize
    ring = ring_seconds(size, parallel.tp, hardware.intra_bandwidth, hardware.latency)
    pairs = 2 * share.depth + (share.embeds + share.scores) / 2
    forward = 2 * pairs * ring
    if parallel.sequence_parallel:
        backward = pairs * ring + 2 * max(0.0, pairs * ring - product)
    else:
        backward = max(0.0, 2 * pairs * ring - product)
    again = 4 * share.depth * ring if parallel.recompute == "full" else 0.0
    return forward + backward + again


def ring_wait(config: RunConfig, hardware: Hardware, step: float, share: Share) -> float:
    """What a micro-batch waits for context-parallel ranks: each step of the ring takes as long as its attention, of
    `step` seconds in the forward pass, or as its transfer; the last derivatives come when nothing is left to do.
    """
    parallel = config.parallel
    if share.cp == 1:
        return 0.0
    sizes = 2 * share.kv_used * share.head_dim
    if share.latent is not None:
        sizes = 2 * share.heads * (share.head_dim + share.latent.rotary)
    bandwidth = _bandwidth(share.cp * parallel.tp, hardware)
    hop = share.tokens * sizes * share.itemsize / bandwidth + hardware.latency
    home = share.tokens * sizes * 4 / bandwidth + hardware.latency  # in fp32
    forward = (share.cp - 1) * max(0.0, hop - step)
    backward = (share.cp - 1) * max(0.0, hop + home - 2 * step) + home
    return share.depth * ((1 if parallel.recompute == "none" else 2) * forward + backward)


def exchange_seconds(config: RunConfig, hardware: Hardware, share: Share) -> float:
    """What a micro-batch waits for the rows that expert-parallel ranks exchange: in a block there and back, in the
    backward pass again, and where the block is computed anew.
    """
    parallel = config.parallel
    if parallel.ep == 1 or share.experts is None:
        return 0.0
    rows = share.tokens * share.experts.chosen * share.width * share.itemsize
    times = 6 if parallel.recompute == "full" else 4
    once = ring_seconds(rows, parallel.ep, _bandwidth(parallel.ep * parallel.tp, hardware), hardware.latency)
    return times * (share.depth - share.experts.above) * once


def _bandwidth(ranks: int, hardware: Hardware) -> float:
    """Between so many neighbours."""
    return hardware.intra_bandwidth if ranks <= hardware.ranks_per_node else hardware.inter_bandwidth


def data_seconds(config: RunConfig, hardware: Hardware, forward: float, backward: float, share: Share) -> float:
    """What a step waits for reductions and gathers over dp * cp, given the seconds of a forward and a backward pass."""
    parallel, stage = config.parallel, stage_of(config)
    if parallel.data == 1:
        return 0.0
    bandwidth = _bandwidth(parallel.data * parallel.tp, hardware)
    # Gradients travel in the compute dtype, and are summed in fp32 where they arrive.
    gather = [
        ring_seconds(bucket.size * share.itemsize, bucket.ranks, bandwidth, hardware.latency)
        for bucket in buckets_of(share, config)
    ]
    reduce = [seconds * (2 if stage == 0 else 1) for seconds in gather]
    if stage == 3:
        ahead = max(gather[-1], sum(gather) - forward)
        behind = max(reduce[-1], sum(reduce) + sum(gather) - backward)
        return micro_batches(config) * (ahead + behind)
    exposed = max(reduce[-1], sum(reduce) - backward)
    # Stage 2 keeps no whole gradients, so that it reduces those of every micro-batch.
    # New weights are gathered in the order in which the next forward pass wants them.
    ahead = max(gather[-1], sum(gather) - forward) if stage > 0 else 0.0
    return exposed * (micro_batches(config) if stage == 2 else 1) + ahead


@dataclass(frozen=True)
class Candidate:
    parallel: ParallelConfig
    memory: Memory
    time: StepTime

    @property
    def name(self) -> str:
        chosen = self.parallel
        others = "".join(f"{axis}={size} " for axis in ("cp", "pp", "ep") if (size := getattr(chosen, axis)) > 1)
        return (
            f"tp={chosen.tp} dp={chosen.dp} {others}zero={chosen.zero} micro_batch_size={chosen.micro_batch_size} "
            f"recompute={chosen.recompute}"
        )

    @property
    def complexity(self) -> tuple[int, ...]:
        """Orders what takes equally long: least split first, then the largest micro-batches."""
        chosen = self.parallel
        split = chosen.pp, chosen.tp, chosen.ep, chosen.zero
        return *split, RECOMPUTE.index(chosen.recompute), -(chosen.micro_batch_size or 0)


@dataclass(frozen=True)
class Choice:
    config: RunConfig  # as it was asked about
    ranks: int
    hardware: Hardware
    margin: float
    candidates: list[Candidate]  # fastest first

    @property
    def limit(self) -> float:
        return self.hardware.memory_bytes * (1 - self.margin)

    @cached_property
    def fitting(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if self.fits(candidate)]

    @cached_property
    def best(self) -> Candidate | None:
        """The simplest of the fastest that fit; None where nothing fits."""
        fast = (c for c in self.fitting if c.time.total <= self.fitting[0].time.total * (1 + TIE))
        return min(fast, key=lambda c: c.complexity, default=None)

    def fits(self, candidate: Candidate) -> bool:
        return candidate.memory.peak <= self.limit

    def verdict(self, candidate: Candidate) -> str:
        best = self.best
        if not self.fits(candidate):
            return f"needs {gigabytes(candidate.memory.peak - self.limit)} more than there is"
        assert best is not None
        if candidate is best:
            return "chosen"
        slower = candidate.time.total / best.time.total - 1
        return f"{slower:.0%} slower" if slower > TIE else "as fast, and less simple"

    def why(self) -> str:
        best = self.best
        room = f"{gigabytes(self.hardware.memory_bytes)} less {self.margin:.0%}"
        if best is None:
            least = min(self.candidates, key=lambda candidate: candidate.memory.peak)
            return (
                f"Nothing fits into {room}: of {len(self.candidates)} ways the smallest, {least.name}, needs "
                f"{gigabytes(least.memory.peak)}."
            )
        said = (
            f"{best.name} is the fastest of the {len(self.fitting)} of {len(self.candidates)} ways that fit into "
            f"{room}: {best.time.total:.3g} s a step and {gigabytes(best.memory.peak)} a rank."
        )
        slower = next((c for c in self.fitting if c.time.total > best.time.total * (1 + TIE)), None)
        if slower is not None:
            said += f" The next, {slower.name}, is {self.verdict(slower)}."
        faster = self.candidates[0]
        if faster.time.total < best.time.total * (1 - TIE):
            said += f" {faster.name} would take {faster.time.total:.3g} s, but {self.verdict(faster)}."
        return said

    def notable(self) -> list[Candidate]:
        """Worth a line, fastest first: per tp and ZeRO stage, with a pipeline and without, the fastest that fits, and
        one that does not if it beats the choice.
        """
        seen: set[tuple[int, bool, int, bool]] = set()
        lines = []
        for candidate in self.candidates:
            fits = self.fits(candidate)
            kind = (candidate.parallel.tp, candidate.parallel.pp > 1, candidate.parallel.zero, fits)
            beaten = not fits and self.best is not None and candidate.time.total > self.best.time.total
            if kind not in seen and (candidate is self.best or not beaten):
                seen.add(kind)
                lines.append(candidate)
        return lines


def choose(config: RunConfig, ranks: int, hardware: Hardware, margin: float = MARGIN) -> Choice:
    """Costs every way to spread a run over `ranks` ranks.

    Args:
        config: its tp, dp, ep, zero, micro_batch_size and recompute are not read, on GPUs nor is its pp.
        margin: share of the device's memory to leave free, at least 0 and below 1.

    Raises:
        UserError: a number is out of range, or no shape divides this model and batch.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise UserError(f"ranks is {ranks}; it must be 1 to {MOST_RANKS}")
    for name, value in dataclasses.asdict(hardware).items():
        if name not in ("latency", "device") and not value > 0:
            raise UserError(f"{name} is {value:g}; it must be greater than 0")
    if ranks % config.parallel.cp:
        raise UserError(f"ranks is {ranks}; it must be a multiple of parallel.cp {config.parallel.cp}")
    if not 0 <= margin < 1:
        raise UserError(f"margin is {margin}; it must be at least 0 and below 1")
    candidates = []
    stages = divisors_of(ranks) if hardware.device == "cuda" else sorted({1, config.parallel.pp})
    for parallel in ways(config, ranks, hardware.ranks_per_node, stages):
        spread = dataclasses.replace(config, parallel=parallel)
        candidates.append(Candidate(parallel, memory(spread, hardware.device), step_time(spread, hardware)))
    candidates.sort(key=lambda candidate: (candidate.time.total, candidate.complexity))
    return Choice(config, ranks, hardware, margin, candidates)


def ways(config: RunConfig, ranks: int, ranks_per_node: int, stages: Sequence[int]) -> Iterator[ParallelConfig]:
    """Every setting that divides model, experts and batch; tp inside a node. UserError where there is none."""
    found = False
    whole = dataclasses.replace(config.parallel, zero=0, ep=1, pp=1, chunks=1)
    for micro, pp in itertools.product(divisors_of(config.optimizer.batch_size), stages):
        asked = dataclasses.replace(whole, micro_batch_size=micro, pp=pp)
        asked.chunks = config.parallel.chunks if pp > 1 else 1
        for tp, dp in working_shapes(dataclasses.replace(config, parallel=asked), ranks, min(ranks, ranks_per_node)):
            found = True
            shared = config.model.experts if config.optimizer.kind == "adamw" else 0
            data = dp * asked.cp
            zeros = ((0, 1, 2, 3) if pp == 1 else (0, 1, 2)) if data > 1 else (0,)
            sharings = divisors_of(math.gcd(data, shared)) if shared else [1]
            for ep, zero, recompute in itertools.product(sharings, zeros, RECOMPUTE):
                yield dataclasses.replace(asked, tp=tp, dp=dp, ep=ep, zero=zero, recompute=recompute)
    if not found:
        plain = dataclasses.replace(whole, tp=1, dp=max(1, ranks // whole.cp), micro_batch_size=1)
        check_shapes(dataclasses.replace(config, parallel=plain))


def gigabytes(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
