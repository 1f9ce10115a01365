"""What one rank holds of a model and sees of a batch, in numbers. Pure, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import RunConfig


@dataclass(frozen=True)
class Share:
    """One rank's share of a model and its micro-batch, after tensor and sequence parallelism.

    With fewer key/value heads than tensor-parallel ranks a rank holds them all and attends with one of them.
    """

    depth: int
    width: int
    head_dim: int
    heads: int
    kv_heads: int  # that are held
    kv_used: int  # that are attended with
    hidden: int
    vocabulary: int  # padded
    length: int  # tokens of a sequence
    sequences: int  # of a micro-batch
    rows: int  # tokens of a micro-batch that the rank's residual stream holds: all, or 1 / tp of them
    precision: str  # fp32 | bf16 | fp16
    qk_norm: bool
    tied: bool
    window: int | None  # tokens that a token sees, itself included; None: all before it
    documents: bool  # each token sees its own document alone

    @property
    def itemsize(self) -> int:
        """Bytes of a weight, a gradient or an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.sequences * self.length

    @property
    def block(self) -> dict[str, int]:
        """Elements of each parameter of a block, in the order of the model."""
        attention, projected = self.heads * self.head_dim, (self.heads + 2 * self.kv_heads) * self.head_dim
        norms = {f"attention.{name}_norm.weight": self.head_dim for name in ("query", "key")} if self.qk_norm else {}
        return {
            "attention_norm.weight": self.width,
            "attention.qkv.weight": projected * self.width,
            "attention.out.weight": self.width * attention,
            **norms,
            "mlp_norm.weight": self.width,
            "mlp.gate_up.weight": 2 * self.hidden * self.width,
            "mlp.down.weight": self.width * self.hidden,
        }

    @property
    def block_matrices(self) -> int:
        """Weights in the matrices of a block."""
        return sum(size for name, size in self.block.items() if "norm" not in name)

    @property
    def table(self) -> int:
        """Weights of the embedding, and of the head."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> dict[str, int]:
        """Elements of every parameter by name, in the order of the model."""
        sizes = {"embedding.weight": self.table}
        for number in range(self.depth):
            sizes |= {f"blocks.{number}.{name}": size for name, size in self.block.items()}
        sizes["norm.weight"] = self.width
        return sizes if self.tied else sizes | {"head.weight": self.table}


def share_of(config: RunConfig) -> Share:
    """The share of a rank; `config` has passed `shapes.check_shapes`."""
    model, parallel, tp = config.model, config.parallel, config.parallel.tp
    kv_heads = model.num_kv_heads
    sequences = micro_batch_of(config)
    tokens = sequences * config.data.sequence_length
    return Share(
        depth=model.depth, width=model.width, head_dim=model.head_dim, heads=model.heads // tp,
        kv_heads=kv_heads // tp if kv_heads >= tp else kv_heads, kv_used=max(kv_heads // tp, 1),
        hidden=model.mlp_hidden // tp, vocabulary=model.padded_vocab_size // tp,
        length=config.data.sequence_length, sequences=sequences,
        rows=tokens // tp if parallel.sequence_parallel else tokens,
        precision=config.precision, qk_norm=model.qk_norm, tied=model.tied_embeddings,
        window=model.window if model.window is not None and model.window < config.data.sequence_length else None,
        documents=config.data.separate_documents,
    )  # fmt: skip


def micro_batch_of(config: RunConfig) -> int:
    """Sequences in one forward pass of a rank."""
    return config.parallel.micro_batch_size or config.optimizer.batch_size // config.parallel.dp


def micro_batches(config: RunConfig) -> int:
    """Forward passes of a rank in one step."""
    return config.optimizer.batch_size // config.parallel.dp // micro_batch_of(config)
