"""The complete description of one run: the dataclasses behind `conf/`, and a run's identity.

A *cosmetic* field does not change the result (paths, number of ranks, how often to save). All others identify the run.
"""

# ruff: noqa: RUF009  cosmetic() and later() make fields
from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

from msgspec import Meta, ValidationError, convert

from .errors import UserError
from .fields import (
    Count,
    Count4,
    Count6,
    Count9,
    Fraction,
    Natural,
    Natural4,
    NotNegative,
    Positive,
    Precision,
    Share,
    cosmetic,
    later,
)
from .optimizer.registry import OptimizerConfig as OptimizerConfig  # users write `train.config.OptimizerConfig`
from .parallel.schedules import SCHEDULES
from .quantization import bits

# Bump when the trainer's arithmetic changes, so that an old result is never used as a new one.
RECIPE = 3


T = TypeVar("T")


class RopeScaling(NamedTuple):
    """Rotary frequencies for a context longer than `length`: slow ones are divided by `factor`."""

    kind: str  # llama3 | yarn
    factor: float
    length: int  # tokens of the original context
    slow: float  # frequencies with at most this many turns in `length` tokens are divided by the factor
    fast: float  # frequencies with at least this many turns are unchanged
    amplitude: float  # of cosine and sine; attention's scores are multiplied by its square


@dataclass
class ModelConfig:
    """A Llama-shaped decoder: RMSNorm, rotary positions, SwiGLU or experts, grouped-query or latent attention."""

    width: Count6 = 64  # residual stream, d_model
    depth: Count4 = 4  # number of blocks
    heads: Count6 = 4  # query heads; without head_size, width must be a multiple of it
    kv_heads: Count | None = None  # key/value heads, a divisor of heads; None means heads (no grouping)
    hidden: Count9 | None = None  # SwiGLU inner width; None means 8/3 of the width, rounded up to a multiple of 8
    vocab_size: Count9 | None = None  # tokens that can be predicted; None is filled in from the tokenizer
    vocab_multiple: Count6 = 128  # embedding tables are padded to this multiple for speed; padding is never predicted
    qk_norm: bool = False  # RMSNorm on queries and keys, per head
    tied_embeddings: bool = True  # the output head reuses the input embedding
    window: int | None = None  # sliding window: tokens that a token attends to, itself included; None: all before it
    rope_theta: Positive = 10000.0
    norm_eps: Positive = 1e-5
    head_size: Count6 | None = later(None)  # of a query, a key and a value; None: width / heads
    qkv_bias: bool = later(False)  # bias of queries, keys and values, added before their norms
    # Extends the trained context: llama3 (Llama 3.1) or yarn (Peng et al. 2023); None: no extension.
    rope_scaling: Annotated[str, ("llama3", "yarn")] | None = later(None)
    rope_factor: Annotated[float, Meta(ge=1)] | None = later(None)  # divisor of slow frequencies
    rope_length: Count9 | None = later(None)  # tokens of the original context
    attention: Annotated[str, ("gqa", "mla")] = later("gqa")  # mla: see `model/latent.py`
    kv_rank: Count6 | None = later(None)  # mla: size of the latent of keys and values; None: 4 * head_dim
    query_rank: Count6 | None = later(None)  # mla: size of the latent of queries; None: no latent
    rotary_size: Count6 | None = later(None)  # mla: size of a head's rotary part, in addition to head_dim; None: half
    # A mixture of experts instead of each block's MLP; see `model/experts.py`.
    experts: Natural4 = later(0)  # 0: dense
    experts_per_token: Count4 = later(2)
    expert_hidden: Count9 | None = later(None)  # inner width of one expert; None: see `moe_hidden`
    shared_experts: Natural4 = later(0)  # used by every token, in addition to the routed ones
    dense_layers: Natural4 = later(0)  # the first blocks, which keep their MLP
    gate: Annotated[str, ("sigmoid", "softmax")] = later("sigmoid")  # turns a router's logits into scores
    gates_normalised: bool = later(True)  # a token's gates sum to 1
    balance_rate: NotNegative = later(1e-3)  # step size of load-balancing biases, follows the schedule; 0: none
    balance_loss: NotNegative = later(0.0)  # weight of the load-balancing loss
    router_z_loss: NotNegative = later(0.0)  # weight of the squared log-normaliser of the router's softmax
    size: Any = later(None)  # of an external trainer: a row of trainer.sizes; of a grid's base run: all rows

    @property
    def head_dim(self) -> int:
        return self.width // self.heads if self.head_size is None else self.head_size

    @property
    def rope(self) -> RopeScaling | None:
        """Rotary scaling of the `rope_*` fields: Llama 3.1, or Peng et al. 2023, section 3.4; None if unset."""
        if self.rope_scaling is None or self.rope_factor is None or self.rope_length is None:
            return None
        fast, amplitude = (32.0, 0.1 * math.log(self.rope_factor) + 1) if self.rope_scaling == "yarn" else (4.0, 1.0)
        return RopeScaling(self.rope_scaling, self.rope_factor, self.rope_length, 1.0, fast, amplitude)

    @property
    def latent(self) -> int:
        """Size of the latent vector that keys and values are computed from; 0 without latent attention."""
        return 0 if self.attention != "mla" else 4 * self.head_dim if self.kv_rank is None else self.kv_rank

    @property
    def rotary(self) -> int:
        """Number of dimensions per head that rotary positions rotate."""
        if self.attention != "mla":
            return self.head_dim
        return max(2, self.head_dim // 4 * 2) if self.rotary_size is None else self.rotary_size

    @property
    def key_dim(self) -> int:
        """Size of one head's query and key."""
        return self.head_dim + (self.rotary if self.attention == "mla" else 0)

    @property
    def cached(self) -> int:
        """Numbers per token and block in the decoding cache: keys and values, or with MLA latent and rotary key."""
        return self.latent + self.rotary if self.attention == "mla" else 2 * self.num_kv_heads * self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp_hidden(self) -> int:
        """Inner width of the MLP; by default 8/3 of `width`, as costly as 4x without a gate (Shazeer 2020)."""
        return self.hidden if self.hidden is not None else -(-8 * self.width // 3 // 8) * 8

    @property
    def moe_hidden(self) -> int:
        """Inner width of one expert. By default the experts that a token uses are together as wide as the MLP."""
        used = self.experts_per_token + self.shared_experts
        return self.expert_hidden if self.expert_hidden is not None else max(1, round(self.mlp_hidden / used / 8)) * 8

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding tables, a multiple of `vocab_multiple`."""
        if self.vocab_size is None:
            raise UserError(
                "model.vocab_size is None; it must be filled in from the tokenizer before the model is built"
            )
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


GROUPED_QUERY = ("kv_heads", "qk_norm", "qkv_bias")  # fields of `ModelConfig` that latent attention does not take


LABELLED = 4  # domains that a mixture's name contains; chosen by hand
# val_loss_se is the standard error of val_loss, and unique_tokens those of all domains.
DOMAIN_NAME = re.compile(r"(?!(?:se|tokens)$)[a-z][a-z0-9_]*")


@dataclass
class DomainConfig:
    """A domain of a mixture: its text as in `DataConfig`, its weight, and how much of it a run may see."""

    corpus: Annotated[str, ("stdlib", "text", "hf")] = "text"
    path: str | None = cosmetic(None)
    field: str = "text"
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    max_bytes: Count | None = None
    fingerprint: str | None = None  # filled in by the planner
    weight: NotNegative = 1.0  # share of the training tokens; the planner divides weights by their sum
    unique_tokens: Count | None = None  # the training text is cut to this much, the same text for every run
    max_epochs: Positive | None = cosmetic(None)  # a run that would repeat the domain more often is refused


@dataclass
class DataConfig:
    """The text of a run, and how it is split."""

    corpus: Annotated[str, ("stdlib", "text", "hf", "mixture", "external")] = "stdlib"
    path: str | None = cosmetic(None)  # text: a file, a folder or a glob
    field: str = "text"  # the field of a jsonl or parquet row that holds the text
    name: str | None = None  # hf: dataset name on the Hub
    subset: str | None = None  # hf: configuration of the dataset
    split: str = "train"  # hf: split to stream
    revision: str | None = None  # hf: commit or tag; pin it for a reproducible identity
    max_bytes: Count | None = None  # stop reading after this much UTF-8 text (required for hf)
    tokenizer: str = cosmetic("bytes")  # bytes | bpe (trained on the corpus) | path of a tokenizer.json
    vocab_size: Count9 = cosmetic(4096)  # bpe: size of the vocabulary to train; runs are identified by model.vocab_size
    sequence_length: Count9 = 128  # tokens of context, T
    separate_documents: bool = False  # attention stays inside a document; False: it spans the whole window
    validation_fraction: Share = 0.02  # share of documents held out, chosen by a hash of their content
    validation_tokens: Count = 131072  # tokens of the fixed held-out set (fewer if the corpus has fewer)
    cache_dir: str | None = cosmetic(None)  # where shards are kept; None: $ISOFLOP_CACHE, else ~/.cache/isoflop
    fingerprint: str | None = None  # hash of the corpus's content, filled in by the planner
    tokenizer_fingerprint: str | None = None  # bytes, bpe, or a hash of the tokenizer.json, filled in by the planner
    # Filter steps of the training documents, in order, such as [gopher, exact, "near:0.8"]; see train/data/recipe.
    recipe: list[str] = dataclasses.field(default_factory=list, metadata={"cosmetic": True})
    recipe_fingerprint: str | None = later(None)  # hash of the recipe's steps, rules and model files; by the planner
    # mixture: `DomainConfig` by name; Any, because Hydra refuses new keys of a typed mapping.
    domains: Any = later(None)
    target: Any = later(None)  # mixture: domains' shares in val_loss; None: equal shares
    # Mixture: repeat each domain as often as a run of so many tokens would; the unique text shrinks in proportion.
    epochs_of: Count | None = later(None)

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the domains; empty for a text that is no mixture."""
        return {name: domain.weight for name, domain in (self.domains or {}).items()}

    def __post_init__(self) -> None:
        if isinstance(self.domains, dict):
            # In the order of names, which decides what is read when and is not part of the run id.
            self.domains = {name: _domain(name, self.domains[name]) for name in sorted(map(str, self.domains))}


def domain_losses(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the held-out losses of a mixture's domains, by domain, from metrics such as a run's summary."""
    losses = {name.removeprefix("val_loss_"): value for name, value in metrics.items() if name.startswith("val_loss_")}
    return {name: value for name, value in losses.items() if DOMAIN_NAME.fullmatch(name)}


def with_shares(config: DataConfig) -> DataConfig:
    """Return a config whose weights and target sum to 1, to 12 digits, so that equal mixtures have one run id."""
    if not isinstance(config.domains, dict):
        return config
    weights = _normalised(config.weights)
    domains = {name: dataclasses.replace(domain, weight=weights[name]) for name, domain in config.domains.items()}
    return dataclasses.replace(config, domains=domains, target=config.target and _normalised(config.target))


def mixture_label(weights: Mapping[str, float]) -> str:
    """Return a mixture's short name, such as code0.7+prose0.3, with at most LABELLED domains, the largest."""
    largest = sorted((name for name in weights if weights[name] > 0), key=lambda name: -weights[name])[:LABELLED]
    label = "+".join(f"{name}{weights[name]:.3g}" for name in weights if name in largest)
    return label + "+…" * (sum(weight > 0 for weight in weights.values()) > LABELLED)


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(weights.values())
    return {name: round(weight / total, 12) for name, weight in weights.items()}


def _domain(name: str, value: Any) -> DomainConfig:
    if isinstance(value, DomainConfig):
        return value
    if not isinstance(value, dict):
        raise UserError(f"data.domains.{name} is {value!r}; it must be a mapping such as {{path: {name}/, weight: 1}}")
    return from_dict(DomainConfig, value, f"data.domains.{name}.")


@dataclass
class ScheduleConfig:
    kind: Annotated[str, ("wsd", "cosine", "constant", "points")] = "wsd"  # warm-up, stable, decay
    warmup_per_parameter: NotNegative = 1.0  # tokens of warm-up per parameter of N_active (Porian et al. 2024)
    warmup_tokens: Natural | None = None  # tokens of warm-up, instead of a multiple of N
    warmup_max_share: Share = 0.1  # a warm-up is never longer than this share of the run
    decay_share: Share = 0.2  # wsd: share of the run in the cooldown, 1 - sqrt(progress) (Haegele et al. 2024)
    final_share: Share = 0.0  # learning rate at the end, as a share of the peak
    # points: shares of the steps after warm-up, from 0 to 1, and the share of the peak at each; linear in between.
    shares: list[float] | None = later(None)
    factors: list[float] | None = later(None)


@dataclass
class AverageConfig:
    """Averages of the weights, which do not affect training."""

    kind: Annotated[str, ("none", "ema", "window")] = later("none")
    # What an average covers, as a share of the steps so far: for `ema` the mean age; a `window` covers 1 to 2 spans.
    spans: list[Fraction] | None = later(None)  # None: [0.1]

    @property
    def kept(self) -> list[float]:
        """Spans of the weight averages, as shares of the steps so far; empty for kind "none"."""
        return [] if self.kind == "none" else [0.1] if self.spans is None else self.spans


PASSES = ("weights", "activations", "gradients")  # whose numbers have a format
FORMATS = ("none", *bits.FORMATS)  # that a step can simulate


@dataclass
class QuantizationConfig:
    """Number formats in the products of the blocks' matrices, simulated; see `quantization/`."""

    weights: Annotated[str, FORMATS] = later("none")
    activations: Annotated[str, FORMATS] = later("none")
    gradients: Annotated[str, FORMATS] = later("none")  # of the matrices' outputs, in the backward pass
    block: Count6 | None = later(None)  # neighbouring numbers with one scale; None: the format's
    rounding: Annotated[str, ("nearest", "stochastic")] = later("nearest")  # of gradients
    hadamard: bool = later(False)  # rotate every block of both factors of a product before they are rounded

    @property
    def formats(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in PASSES}

    @property
    def used(self) -> bool:
        return any(name != "none" for name in self.formats.values())

    @property
    def label(self) -> str:
        """Return the formats' short name, such as int8, or int4/int8/none; empty if all are none."""
        names = [*self._named().values()]
        return "" if not self.used else names[0] if len({*names}) == 1 else "/".join(names)

    def columns(self, precision: str) -> dict[str, str | float]:
        """Return weights_format, weights_bits and so on, for tables. Bits are per number, with its share of scales."""
        sizes = {name: bits.bits(precision if f == "none" else f, self.block) for name, f in self.formats.items()}
        columns = {f"{name}_format": f for name, f in self._named().items()}
        return columns | {f"{name}_bits": size for name, size in sizes.items()}

    def _named(self) -> dict[str, str]:
        """Return the formats with what is not the default of each, such as int4+block32+hadamard."""
        more = ("" if self.block is None else f"+block{self.block}") + "+hadamard" * self.hadamard
        drawn = {"gradients": "+stochastic" * (self.rounding == "stochastic")}
        return {name: f if f == "none" else f + more + drawn.get(name, "") for name, f in self.formats.items()}


@dataclass
class ParallelConfig:
    """How a run is distributed over devices, and how a step is executed. Changes results only by rounding."""

    tp: Count6 = cosmetic(1)  # tensor-parallel ranks: every matrix of a block is split over them; inside one node
    dp: Count6 = cosmetic(1)  # data-parallel ranks: each takes its share of every batch
    cp: Count6 = cosmetic(1)  # context-parallel ranks: each takes its share of every sequence
    pp: Count6 = cosmetic(1)  # pipeline stages: each takes its share of the blocks
    schedule: Annotated[str, SCHEDULES] = cosmetic("1f1b")  # order of the pipeline's passes
    chunks: Count6 = cosmetic(1)  # chunks of blocks per pipeline rank; 2 or more if interleaved
    ep: Count6 = cosmetic(1)  # expert-parallel ranks, out of dp * cp: they divide the experts and exchange tokens
    zero: Annotated[int, (0, 1, 2, 3)] = cosmetic(0)  # dp ranks divide: 1 optimizer, 2 + gradients, 3 + parameters
    sequence_parallel: bool = cosmetic(True)  # tp > 1: norms and residuals split over tokens as well
    recompute: Annotated[str, ("none", "selective", "full")] = cosmetic("none")  # activations in backward
    micro_batch_size: int | None = cosmetic(None)  # sequences in one forward pass; None: see `micro_batch_of`
    attention: Annotated[str, ("auto", "ours", "sdpa")] = cosmetic("auto")  # kernel
    cross_entropy: Annotated[str, ("auto", "torch")] = cosmetic("auto")  # auto: our kernel where a GPU trains
    compile: bool = cosmetic(False)  # torch.compile, block by block
    tf32: bool = cosmetic(True)  # fp32 matrix products on GPUs in TF32 (10 bits of mantissa)
    timeout_seconds: Annotated[float, Meta(gt=0, le=1e6)] = cosmetic(600.0)  # a rank without progress ends its job
    device: Annotated[str, ("auto", "cpu", "cuda")] = cosmetic("auto")
    threads: Count4 | None = cosmetic(None)  # CPU threads of a rank; None: the launcher's setting

    @property
    def axes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in ("dp", "tp", "ep", "cp", "pp")}

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def data(self) -> int:
        """Number of ranks that hold the same part of the model and train on different tokens."""
        return self.dp * self.cp

    @property
    def mesh(self) -> str:
        axes = ["tp", "dp", *(axis for axis in ("cp", "pp") if getattr(self, axis) > 1)]
        return f"{' * '.join(f'parallel.{axis} {getattr(self, axis)}' for axis in axes)} is {self.world_size}"

    @property
    def label(self) -> str:
        """Short name of the layout, such as "tp2 dp4 zero1"; empty for one rank."""
        if self.world_size == 1:
            return ""
        parts = [f"tp{self.tp}", f"dp{self.dp}"]
        parts += [f"{axis}{getattr(self, axis)}" for axis in ("cp", "pp", "ep") if getattr(self, axis) > 1]
        return " ".join([*parts, f"zero{self.zero}"] if self.zero else parts)


@dataclass
class CheckpointConfig:
    """When to save."""

    every_seconds: Positive = cosmetic(60.0)  # by the clock, so that a kill loses at most this much
    every_steps: Count | None = cosmetic(None)
    # Steps after which a checkpoint is saved and not deleted, because branches start there.
    at_steps: list[int] | None = field(default=None, metadata={"cosmetic": True})
    keep: Count = cosmetic(2)  # newest checkpoints kept during the run; the final one always stays


@dataclass
class TrackerConfig:
    """Where metrics go in addition to metrics.jsonl."""

    kind: Annotated[str, ("wandb", "none")] = cosmetic("wandb")
    project: str = cosmetic("isoflop")
    entity: str | None = cosmetic(None)
    group: str | None = cosmetic(None)
    mode: Annotated[str, ("auto", "online", "offline")] = cosmetic("auto")  # auto: online when logged in, else offline
    directory: str | None = cosmetic(None)  # where wandb keeps its files; None: the run directory


@dataclass
class TrainerConfig:
    """What trains a run: isoflop itself, or a command; see `external/`."""

    kind: Annotated[str, ("isoflop", "command")] = later("isoflop")
    command: Any = later(None)  # a text, split as a shell would, or a list of arguments; with fields in braces
    version: str = later("")  # of the program: runs of another version are other runs
    shell: bool = later(False)  # whether /bin/sh runs the text
    sizes: Any = cosmetic(None)  # rows of the program's own sizes, each with N; or a YAML file of them
    folder: str | None = cosmetic(None)  # of files that the command names; None: where the sweep is planned
    metrics: str | None = cosmetic(None)  # glob of logs in {run}; stdout: what it prints; None: found in either
    columns: Any = cosmetic(None)  # the program's names of metrics, by ours, such as {val_loss: eval/loss}
    checkpoints: str = cosmetic("checkpoint*")  # glob in the program's folder; the newest is {resume}
    hf_folder: str | None = cosmetic("hf")  # path or glob in the program's folder of the model to score; None: never
    silence_seconds: Positive = cosmetic(1800.0)  # without output, after which the program counts as hung
    grace_seconds: Positive = cosmetic(20.0)  # from TERM to KILL


@dataclass
class Training:
    """The fields shared by a run and a sweep."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tokens: Count = 2**20  # D: tokens to train on, rounded up to whole steps
    precision: Precision = "fp32"  # of weights and activations in a step; master weights are fp32
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # weights and order of samples
    log_every: Count = cosmetic(10)  # steps between lines of metrics.jsonl
    validations: Count6 = cosmetic(4)  # times the held-out set is scored during the run, the end included
    max_loss_rise: Positive = 3.0  # nats above the best smoothed loss at which a run counts as diverged
    skip_bad_steps: Natural = 0  # batches that may be skipped and recorded because loss or gradient is not finite


@dataclass
class RunConfig(Training):
    recipe: int = RECIPE
    name: str | None = cosmetic(None)
    variant: str | None = cosmetic(None)  # name of the run in comparisons of variants
    budget: float | None = cosmetic(None)  # FLOP budget of the grid point, for tables; training is set by D
    parent: str | None = cosmetic(None)  # run_id of the trunk this run branches from

    @property
    def batch_tokens(self) -> int:
        return self.optimizer.batch_size * self.data.sequence_length

    @property
    def steps(self) -> int:
        return max(1, -(-self.tokens // self.batch_tokens))

    @property
    def D(self) -> int:
        """Number of tokens that the run trains on."""
        return self.steps * self.batch_tokens


def identity(node: Any) -> dict[str, Any]:
    """Return the fields that identify a run, from its config or a group of it, as a dict.

    Cosmetic fields are left out, and fields of later versions (`later`) at their default.
    """
    result: dict[str, Any] = {}
    types = _types(node.__class__)
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        if "cosmetic" in item.metadata or ("later" in item.metadata and value == item.default):
            continue
        if item.name in _GROUPS:
            value = identity(value)
        elif item.name == "domains" and isinstance(value, dict):
            value = {name: identity(domain) for name, domain in value.items()}
        elif types[item.name] is float and isinstance(value, int):
            value = float(value)  # 1 and 1.0 must give the same id
        # Groups with only cosmetic fields, such as tracker, are left out.
        if value != {}:
            result[item.name] = value
    return result


_types = functools.cache(get_type_hints)  # without the Annotated bounds


def flatten(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested dict: {"a": {"b": 1}} becomes {"a.b": 1}. `prefix` is put before every key."""
    flat: dict[str, Any] = {}
    for name, value in node.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys, no spaces and shortest round-trip floats: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def run_id(config: RunConfig) -> str:
    """Return the run's id: the first ten hex digits of the SHA-256 of its `identity`."""
    return hashlib.sha256(canonical_json(identity(config)).encode()).hexdigest()[:10]


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


ANY = object()
# Removed fields: the one value that is still accepted, and what to use instead. Another value means a different run, so
# it is refused. ANY: the field never changed a result, so every value is accepted.
REMOVED: dict[str, tuple[Any, str]] = {
    "model.rope_slow": (None, "model.rope_scaling always uses the constants of its paper"),
    "model.rope_fast": (None, "model.rope_scaling always uses the constants of its paper"),
    "model.rope_attention": (None, "model.rope_scaling always uses the constants of its paper"),
    "optimizer.nesterov": (True, "Muon always uses Nesterov momentum"),
    "optimizer.iterations": (5, "Muon always makes five iterations"),
    "parallel.bucket_mb": (ANY, "gradients are always sent in buckets of 25 MiB"),
    "parallel.cuda_graphs": (ANY, "use parallel.compile"),
    "parallel.trace": (ANY, "profile a run with torch.profiler"),
    "checkpoint.asynchronous": (ANY, "checkpoints are always written while training continues"),
}


def drop_removed(values: Mapping[str, Any], removed: Mapping[str, tuple[Any, str]], prefix: str = "") -> dict[str, Any]:
    """Return a nested config without the fields in `removed`, which maps dotted names to (accepted value, advice).

    Raises UserError if such a field has another value. `prefix` is put before the names in `values`.
    """
    remaining = {}
    for name, value in values.items():
        needed, instead = removed.get(f"{prefix}{name}", (ANY, ""))
        if not instead:
            remaining[name] = drop_removed(value, removed, f"{prefix}{name}.") if isinstance(value, dict) else value
        elif needed is not ANY and value != needed:
            raise UserError(f"{prefix}{name} is {value!r}, and is no longer a field: {instead}")
    return remaining


def from_dict(cls: type[T], values: dict[str, Any], prefix: str = "") -> T:
    """Build a config dataclass from a nested dict. Raises UserError, naming `prefix` + key, for a bad key or type."""
    values = drop_removed(values, REMOVED, prefix)
    fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = [name for name in values if name not in fields]
    if unknown:
        raise UserError(f"{prefix}{unknown[0]} is not a field; it must be one of {', '.join(fields)}")
    kwargs = {}
    for name, value in values.items():
        group = _GROUPS.get(name) if cls is RunConfig else None
        if group is not None and not isinstance(value, dict):
            raise UserError(f"{prefix}{name} is {value!r}; it must be a mapping of fields to values")
        kwargs[name] = from_dict(group, value, f"{prefix}{name}.") if group is not None else value
    try:
        convert(values, cls)
    except ValidationError as error:
        reason, _, where = str(error).replace("`", "").partition(" - at $.")
        name = where.partition("[")[0]
        raise UserError(
            f"{prefix}{name} is {reprlib.repr(values.get(name))}, which is not accepted: {reason}"
        ) from None
    return cls(**kwargs)


_GROUPS: dict[str, Any] = {
    item.name: item.default_factory
    for item in dataclasses.fields(RunConfig)
    if dataclasses.is_dataclass(item.default_factory)
}
