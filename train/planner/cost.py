"""Seconds of one optimizer step in closed form, for any (tp, dp, ZeRO stage, micro-batch, recompute).

    step = forward + backward + recompute          matrix-product FLOPs over the measured rate
         + tensor + data                           what of the collectives nothing hides
         + update                                  bytes of Adam over the memory's bandwidth
         + bubble                                  idle ranks of a pipeline; there is none yet

Special here:
- the rate is peak * w / (w + half_speed_width), as the plan of a sweep has it; w is the geometric mean of both sides of
  a matrix that tp splits, width / sqrt(tp), so that splitting a narrow model costs what it does;
- a collective of n bytes over N ranks is a ring: N - 1 hops, each of n / N bytes and one latency; an all-reduce is two;
- tensor-parallel collectives stand in the way of the forward pass, and in the backward run beside other products;
- gradients are reduced beside the backward pass, but for the last bucket; ZeRO-3 gathers a block ahead, but for the
  first block; ZeRO-1 and 2 gather the new weights when nothing else is left to do.

Papers: Korthikanti et al. 2022, arXiv 2205.05198, section 4 (tensor and sequence parallel); Rajbhandari et al. 2020,
arXiv 1910.02054, section 7 (ZeRO's volumes); Patarasuk and Yuan 2009 (rings).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..config import RunConfig
from ..memory import bucket_sizes, stage_of
from .share import Share, micro_batches, share_of


@dataclass(frozen=True)
class Hardware:
    """The machine that one rank sees. The defaults are the data sheet of an H100 in a DGX, not a measurement."""

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
    """Seconds of one optimizer step, by what they are spent on."""

    forward: float
    backward: float
    recompute: float  # activations computed again
    tensor: float  # tensor-parallel collectives that nothing hides
    data: float  # reductions and gathers over dp that nothing hides
    update: float
    bubble: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, item.name) for item in fields(self))


def step_time(config: RunConfig, hardware: Hardware) -> StepTime:
    """Seconds of one optimizer step of a rank of a run that has passed `shapes.check_shapes`."""
    share, passes = share_of(config), micro_batches(config)
    rate = matmul_rate(config, hardware)
    forward = forward_flops(share) / rate
    again = recomputed_flops(share, config.parallel.recompute, config.parallel.tp) / rate
    # The share of the products of which tp gathers the input: query, key, value, gate, up, and the head.
    column = 1 - (share.width * (share.heads * share.head_dim + share.hidden) * share.depth) / (forward_matrices(share))
    return StepTime(
        forward=passes * forward,
        backward=passes * 2 * forward,
        recompute=passes * again,
        tensor=passes * tensor_seconds(config, hardware, column * forward),
        data=data_seconds(config, hardware, forward, 2 * forward + again),
        update=update_bytes(config) / hardware.memory_bandwidth,
    )


def matmul_rate(config: RunConfig, hardware: Hardware) -> float:
    """FLOP/s of the products of a rank; see the head of this file."""
    width = config.model.width / config.parallel.tp**0.5
    return hardware.flops_per_second * width / (width + hardware.half_speed_width)


def forward_matrices(share: Share) -> int:
    """Weights that every token meets."""
    return share.depth * share.block_matrices + share.table


def forward_flops(share: Share) -> int:
    """Matrix-product FLOPs of one forward pass; at tp=1 those of `flops.forward_flops_per_token`."""
    return share.tokens * (2 * forward_matrices(share) + share.depth * attention_flops(share))


def attention_flops(share: Share) -> int:
    """FLOPs of scores and weighting in one block, a token."""
    return 4 * share.length * share.heads * share.head_dim


def recomputed_flops(share: Share, recompute: str, tp: int) -> int:
    """Matrix-product FLOPs of one backward pass that repeat the forward's."""
    # The last product of a block is repeated for its collective's sake alone.
    products = share.block_matrices - (share.width * share.hidden if tp == 1 else 0)
    again = {"none": 0, "selective": attention_flops(share), "full": 2 * products + attention_flops(share)}
    return share.tokens * share.depth * again[recompute]


def ring_seconds(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """An all-gather or a reduce-scatter of `size` bytes, counted whole, over a ring; an all-reduce is two of them."""
    return (ranks - 1) * (size / ranks / bandwidth + latency)


def tensor_seconds(config: RunConfig, hardware: Hardware, product: float) -> float:
    """What a micro-batch waits for its tensor-parallel collectives.

    A block gathers and scatters twice, or all-reduces twice, which is the same volume; embedding and head are one pair
    more. In the backward pass the sum over ranks runs beside the weight gradients, and under sequence parallelism the
    second gather of the input beside the input gradients; the gather of a row product's gradient is waited for.

    Args:
        product: seconds of those products of a forward pass of which the input is gathered.
    """
    share, parallel = share_of(config), config.parallel
    size = share.tokens * share.width * share.itemsize
    ring = ring_seconds(size, parallel.tp, hardware.intra_bandwidth, hardware.latency)
    pairs = 2 * share.depth + 1
    forward = 2 * pairs * ring
    if parallel.sequence_parallel:
        backward = pairs * ring + 2 * max(0.0, pairs * ring - product)
    else:
        backward = max(0.0, 2 * pairs * ring - product)
    again = 4 * share.depth * ring if parallel.recompute == "full" else 0.0
    return forward + backward + again


def data_seconds(config: RunConfig, hardware: Hardware, forward: float, backward: float) -> float:
    """What a step waits for reductions and gathers over dp, given the seconds of one forward and backward pass."""
    share, parallel, stage = share_of(config), config.parallel, stage_of(config)
    if parallel.dp == 1:
        return 0.0
    inside = parallel.dp * parallel.tp <= hardware.ranks_per_node
    bandwidth = hardware.intra_bandwidth if inside else hardware.inter_bandwidth

    # Gradients travel in the compute dtype, and are summed in fp32 where they arrive.
    sizes = [elements * share.itemsize for elements in bucket_sizes(share, config)]
    gather = [ring_seconds(size, parallel.dp, bandwidth, hardware.latency) for size in sizes]
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


def update_bytes(config: RunConfig) -> float:
    """Bytes that Adam moves: it reads gradient, weight and both moments, and writes the last three and the weight."""
    share = share_of(config)
    elements = sum(bucket_sizes(share, config)) / (config.parallel.dp if stage_of(config) > 0 else 1)
    return elements * (6 * 4 + 2 * share.itemsize)
