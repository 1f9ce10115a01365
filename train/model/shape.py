"""The parameters of a GPT as a table of numbers, without torch, and the share of them that a rank holds.

`gpt.py` builds modules with the same names in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from ..config import ModelConfig, RunConfig
from ..optimizer.optimizer import MATRICES

# A parameter's role determines its initial weights, its learning rate, and how tensor parallelism splits it.
# A block's branches have a `first` matrix, split by rows, and a `last` one, split by columns; `latent` makes the small
# vector of latent attention. `head norm` is per head, `last norm` before the head. A `bias` is split like the `first`
# matrix whose products it is added to; `balance` is the bias of a router's choice.
Role = Literal[
    "embedding",
    "tied",
    "head",
    "first",
    "latent",
    "last",
    "router",
    "norm",
    "head norm",
    "last norm",
    "bias",
    "balance",
]
PRODUCTS: tuple[Role, ...] = ("first", "latent", "last", "head", "tied", "router")  # multiplied with tokens
TABLES: tuple[Role, ...] = ("embedding", "tied", "head")  # one row per token of the padded vocabulary
GROUPS: dict[str, tuple[str, ...]] = {  # roles that share a learning rate without base_depth
    "matrices": ("first", "latent", "last", "head"),
    "routers": ("router",),
    "embedding": ("embedding", "tied"),
    "norms": ("norm", "head norm", "bias", "last norm"),
    "balance": ("balance",),
}

# The kernels and the planner must agree on these numbers; planning reads them without torch.
# Longest context at which bf16 on CPUs saves the softmax of a training step, (batch, heads, T, T) numbers a layer.
# Above it saving is no faster (docs/benchmarks.md).
LONGEST_KEPT = 512
# Logits computed at a time in fp32: on CPUs so that they fit the cache, on GPUs so that calls are few.
LOGITS_AT_A_TIME = {"cpu": 2**18, "cuda": 2**25}
# Minimum rows of logits at a time. Each chunk adds once to the fp32 gradient of the whole table (docs/decisions.md),
# which must cost little compared with its products: on a GPU 8 bytes an element to 6 FLOPs a row and element.
FEWEST_ROWS = {"cpu": 256, "cuda": 4096}
# Elements of keys that travel together between context-parallel ranks: a compromise between little memory at long
# context and few messages at short. More on GPUs, because few heads leave processors idle; not timed yet.
TRAVELLING = {"cpu": 2**19, "cuda": 2**23}


def rows_at_a_time(vocabulary: int, device: str) -> int:
    """Return the number of tokens whose logits are computed at a time, on `device` cpu | cuda."""
    return max(LOGITS_AT_A_TIME[device] // vocabulary, FEWEST_ROWS[device])


def heads_at_a_time(heads: int, numbers: int, device: str) -> int:
    """Return how many of `heads` key heads, of `numbers` elements each, ranks send at a time round a ring."""
    return min(heads, -(-TRAVELLING[device] // numbers))


def query_block(length: int) -> int:
    """Return the number of queries per attention block on CPUs."""
    return max(128, -(-length // 4))


def visible_blocks(length: int, block: int, window: int | None = None) -> list[tuple[int, int, int]]:
    """Return (first visible key, first query, end of both) for each block of queries in causal attention."""
    starts = range(0, length, block)
    return [(max(0, start - (window or length) + 1), start, min(start + block, length)) for start in starts]


class Part(NamedTuple):
    """Consecutive rows of a parameter: one of the matrices that are fused in it."""

    hf: str  # Hugging Face's name
    rows: int
    units: int  # heads, hidden units or tokens that tensor parallelism splits, if there are at least as many as ranks


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model; names in `Shape.block` lack the block's prefix."""

    name: str
    role: Role
    parts: tuple[Part, ...]  # one below the other
    columns: int | None = None  # None: a vector
    experts: int = 1  # number of equal matrices stacked in it
    chosen: int = 1  # number of these that a token uses

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(part.rows for part in self.parts)
        return (rows,) if self.columns is None else (rows, self.columns)

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def active(self) -> int:
        return self.size // self.experts * self.chosen

    @property
    def flops(self) -> int:
        """Return forward FLOPs per token, 2 per multiply-add; 0 for a parameter that multiplies no tokens."""
        return 2 * self.active if self.role in PRODUCTS else 0

    def of_block(self, number: int) -> Parameter:
        parts = tuple(part._replace(hf=f"model.layers.{number}.{part.hf}") for part in self.parts)
        return replace(self, name=f"blocks.{number}.{self.name}", parts=parts)


class Latent(NamedTuple):
    rank: int
    queries: int | None  # rank of the vector that queries come from; None: they come from the residual stream
    rotary: int  # of a head


@dataclass(frozen=True)
class Experts:
    count: int
    held: int  # by a rank
    chosen: int  # by a token
    hidden: int  # of one expert
    shared: int  # hidden units of the feed-forward that every token uses
    above: int  # first block that has experts
    biased: bool  # whether the router has biases that balance the load


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model, or of one rank's share, with fewer heads, hidden units and tokens."""

    width: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int  # padded
    head_norms: bool  # RMSNorm on queries and keys
    qkv_bias: bool
    tied: bool
    latent: Latent | None
    experts: Experts | None

    @property
    def block(self) -> tuple[Parameter, ...]:
        """Return the last block's parameters, in order; only the first blocks may lack experts."""
        return self.block_of(self.depth - 1)

    def block_of(self, number: int) -> tuple[Parameter, ...]:
        experts = self.experts if self.experts is not None and number >= self.experts.above else None
        return _block(self, experts)

    def in_blocks(self, count: Callable[[Parameter], int]) -> int:
        above = self.experts.above if self.experts is not None else 0
        first, last = (sum(map(count, self.block_of(number))) for number in (0, self.depth - 1))
        return above * first + (self.depth - above) * last

    @property
    def parameters(self) -> list[Parameter]:
        blocks = [parameter.of_block(number) for number in range(self.depth) for parameter in self.block_of(number)]
        table = [parameter for parameter in self.outside if parameter.name == "embedding.weight"]
        return [*table, *blocks, *(parameter for parameter in self.outside if parameter not in table)]

    @property
    def outside(self) -> list[Parameter]:
        norm = Parameter("norm.weight", "last norm", (Part("model.norm.weight", self.width, 1),))
        table = self._table("embedding.weight", "tied" if self.tied else "embedding", "model.embed_tokens.weight")
        head = [] if self.tied else [self._table("head.weight", "head", "lm_head.weight")]
        return [table, norm, *head]

    def _table(self, name: str, role: Role, hf: str) -> Parameter:
        return Parameter(name, role, (Part(hf, self.vocabulary, self.vocabulary),), self.width)

    @property
    def inner(self) -> int:
        """Return how many of a block's feed-forward hidden units one token uses."""
        return self.hidden if self.experts is None else self.experts.chosen * self.experts.hidden + self.experts.shared

    @property
    def table(self) -> int:
        """Return the number of weights of the embedding, or of the head."""
        return self.vocabulary * self.width

    @property
    def block_size(self) -> int:
        return sum(parameter.size for parameter in self.block)

    @property
    def block_matrices(self) -> int:
        """Return how many weights of the last block's matrices one token uses."""
        return sum(parameter.flops for parameter in self.block) // 2

    @property
    def matrices(self) -> int:
        """Return how many weights of all blocks' matrices one token uses."""
        return self.in_blocks(lambda parameter: parameter.flops) // 2


@lru_cache(maxsize=1024)
def _block(shape: Shape, experts: Experts | None) -> tuple[Parameter, ...]:
    return (
        _vector("attention_norm", "norm", "input_layernorm", shape.width),
        *(_grouped_query(shape) if shape.latent is None else _latent(shape, shape.latent)),
        _vector("mlp_norm", "norm", "post_attention_layernorm", shape.width),
        *(_swiglu("mlp", shape.width, shape.hidden) if experts is None else _mixture(shape.width, experts)),
    )


def _vector(name: str, role: Role, hf: str, size: int) -> Parameter:
    return Parameter(f"{name}.weight", role, (Part(f"{hf}.weight", size, 1),))


def _matrix(name: str, role: Role, columns: int, *parts: tuple[str, int, int]) -> Parameter:
    return Parameter(f"{name}.weight", role, tuple(Part(f"{hf}.weight", *rest) for hf, *rest in parts), columns)


def _grouped_query(shape: Shape) -> list[Parameter]:
    head_dim, keys = shape.head_dim, shape.kv_heads * shape.head_dim
    products = (
        ("self_attn.q_proj", shape.heads * head_dim, shape.heads),
        ("self_attn.k_proj", keys, shape.kv_heads),
        ("self_attn.v_proj", keys, shape.kv_heads),
    )
    bias = Parameter("attention.qkv_bias", "bias", tuple(Part(f"{hf}.bias", *rest) for hf, *rest in products))
    norms = [
        _vector(f"attention.{name}_norm", "head norm", f"self_attn.{name[0]}_norm", head_dim)
        for name in ("query", "key")
    ]
    return [
        *([bias] if shape.qkv_bias else []),
        _matrix("attention.qkv", "first", shape.width, *products),
        _matrix("attention.out", "last", shape.heads * head_dim, ("self_attn.o_proj", shape.width, 1)),
        *(norms if shape.head_norms else []),
    ]


def _latent(shape: Shape, latent: Latent) -> list[Parameter]:
    width, heads, head_dim = shape.width, shape.heads, shape.head_dim
    rows, queries = heads * (head_dim + latent.rotary), latent.queries
    if queries is None:
        query = [_matrix("attention.query", "first", width, ("self_attn.q_proj", rows, heads))]
    else:
        query = [
            _matrix("attention.query_down", "latent", width, ("self_attn.q_a_proj", queries, 1)),
            _vector("attention.query_norm", "norm", "self_attn.q_a_layernorm", queries),
            _matrix("attention.query", "first", queries, ("self_attn.q_b_proj", rows, heads)),
        ]
    down = ("self_attn.kv_a_proj_with_mqa", latent.rank + latent.rotary, 1)
    return [
        *query,
        _matrix("attention.latent", "latent", width, down),
        _vector("attention.latent_norm", "norm", "self_attn.kv_a_layernorm", latent.rank),
        _matrix("attention.key_value", "first", latent.rank, ("self_attn.kv_b_proj", 2 * heads * head_dim, heads)),
        _matrix("attention.out", "last", heads * head_dim, ("self_attn.o_proj", width, 1)),
    ]


def _swiglu(name: str, width: int, hidden: int, *hf: str, chosen: int = 1) -> tuple[Parameter, Parameter]:
    names = hf or (name,)
    first = [Part(f"{prefix}.{half}_proj.weight", hidden, hidden) for prefix in names for half in ("gate", "up")]
    last = [Part(f"{prefix}.down_proj.weight", width, 1) for prefix in names]
    return (
        Parameter(f"{name}.gate_up.weight", "first", tuple(first), width, len(names), chosen),
        Parameter(f"{name}.down.weight", "last", tuple(last), hidden, len(names), chosen),
    )


def _mixture(width: int, experts: Experts) -> tuple[Parameter, ...]:
    names = [f"mlp.experts.{number}" for number in range(experts.held)]
    router = Parameter("mlp.router.weight", "router", (Part("mlp.gate.weight", experts.count, 1),), width)
    balance = Parameter("mlp.router.balance", "balance", (Part("mlp.gate.e_score_correction_bias", experts.count, 1),))
    return (
        router,
        *([balance] if experts.biased else []),
        *_swiglu("mlp.experts", width, experts.hidden, *names, chosen=experts.chosen),
        *(_swiglu("mlp.shared", width, experts.shared, "mlp.shared_experts") if experts.shared else ()),
    )


def model_shape(model: ModelConfig) -> Shape:
    return Shape(
        width=model.width,
        depth=model.depth,
        heads=model.heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        hidden=model.mlp_hidden,
        vocabulary=model.padded_vocab_size,
        head_norms=model.qk_norm,
        qkv_bias=model.qkv_bias,
        tied=model.tied_embeddings,
        latent=Latent(model.latent, model.query_rank, model.rotary) if model.attention == "mla" else None,
        experts=Experts(
            count=model.experts,
            held=model.experts,
            chosen=model.experts_per_token,
            hidden=model.moe_hidden,
            shared=model.shared_experts * model.moe_hidden,
            above=model.dense_layers,
            biased=model.balance_rate > 0,
        )
        if model.experts
        else None,
    )


def matrices_of(model: ModelConfig) -> list[Parameter]:
    """Return the matrices of a model's blocks, in order, without routers."""
    return [parameter for parameter in model_shape(model).parameters if parameter.role in MATRICES]


@dataclass(frozen=True)
class Share(Shape):
    """One rank's share of a model and micro-batch. With fewer key/value heads than ranks it holds all and uses one."""

    split: bool  # over more than one tensor-parallel rank
    kv_used: int  # key/value heads that are attended with
    length: int  # tokens of a sequence on this rank
    cp: int  # ranks that share a sequence
    sequences: int  # of a micro-batch
    rows: int  # tokens of a micro-batch in the rank's residual stream: all, or its share with sequence parallelism
    precision: str  # fp32 | bf16 | fp16
    window: int | None  # maximum number of tokens that a token sees, itself included; None: all before it
    documents: bool  # each token sees only its own document
    recompute: str  # none | selective | full
    device: str  # cpu | cuda
    embeds: bool = True  # the embedding is here, before the first block
    scores: bool = True  # the head is here, after the last block

    @property
    def itemsize(self) -> int:
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def outside(self) -> list[Parameter]:
        embeds, scores = self.embeds, self.scores
        is_here = {"embedding": embeds, "tied": embeds or scores, "last norm": scores, "head": scores}
        return [parameter for parameter in super().outside if is_here[parameter.role]]


def share_of(config: RunConfig, device: str = "cuda") -> Share:
    model, ranks, whole_length = config.model, config.parallel.tp, config.data.sequence_length
    length = whole_length // config.parallel.cp
    whole = model_shape(model)
    sequences = micro_batch_of(config)
    tokens = sequences * length
    experts = whole.experts
    if experts is not None:
        held = experts.count // config.parallel.ep
        experts = replace(experts, held=held, hidden=experts.hidden // ranks, shared=experts.shared // ranks)
    return Share(
        **vars(whole)
        | {name: getattr(whole, name) // ranks for name in ("heads", "hidden", "vocabulary")}
        | {"kv_heads": whole.kv_heads // ranks or whole.kv_heads, "experts": experts},
        split=ranks > 1,
        kv_used=max(whole.kv_heads // ranks, 1),
        length=length,
        cp=config.parallel.cp,
        sequences=sequences,
        rows=tokens // ranks if config.parallel.sequence_parallel else tokens,
        precision=config.precision,
        window=model.window if model.window is not None and model.window < whole_length else None,
        documents=config.data.separate_documents,
        recompute=config.parallel.recompute,
        device=device,
    )


def micro_batch_of(config: RunConfig) -> int:
    """Return how many sequences a micro-batch has: as configured, else all of a rank's, or few, to fill a pipeline."""
    parallel, share = config.parallel, config.optimizer.batch_size // config.parallel.dp
    if parallel.micro_batch_size or parallel.pp == 1:
        return parallel.micro_batch_size or share
    multiple, fewest = parallel.pp if parallel.schedule == "interleaved" else 1, min(4 * parallel.pp, share)
    passes = (count for count in range(fewest, share + 1) if share % count == 0 and count % multiple == 0)
    return share // next(passes, share)


def micro_batches(config: RunConfig) -> int:
    return config.optimizer.batch_size // config.parallel.dp // micro_batch_of(config)
