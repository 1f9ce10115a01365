"""Names, shapes and settings: our GPT and the Hugging Face architectures that compute the very same.

    plain attention                  LlamaForCausalLM
    RMSNorm on queries and keys      Qwen3ForCausalLM (a norm a head, before the rotation, as ours)
    sliding window w                 MistralForCausalLM, or Qwen3 with it in every layer: token i sees i - w + 1 to i

Special here:
- our query-key-value and gate-up matrices are theirs, one below the other; rotary positions have the same layout;
- the padding of our vocabulary is cut off, so there is no logit that nothing was trained for;
- muP's output multiplier is folded into the last norm, whose weight is w s then: (x r w) s = x r (w s). Exact where s
  is a power of two, else within a rounding of the weight;
- what a folder has and our model cannot compute is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...train.config import ModelConfig
from ...train.errors import UserError
from ...train.model.gpt import GPT

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.down": "mlp.down_proj",
}
_HEAD_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
_FUSED = {"attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
          "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj")}  # fmt: skip


def window_of(model: ModelConfig, sequence_length: int) -> int | None:
    """The sliding window, None where it hides nothing."""
    return model.window if model.window is not None and model.window < sequence_length else None


def model_type(model: ModelConfig, sequence_length: int) -> str:
    """The Hugging Face architecture that computes what this model does."""
    if model.qk_norm:
        return "qwen3"
    return "llama" if window_of(model, sequence_length) is None else "mistral"


def hf_config(model: ModelConfig, sequence_length: int, end: int, dtype: str) -> dict[str, Any]:
    """config.json.

    Args:
        model: the architecture; `vocab_size` must be set.
        sequence_length: longest sequence that it was trained on.
        end: id of the token that ends a document.
        dtype: float32 | bfloat16, of the weights.
    """
    kind, window = model_type(model, sequence_length), window_of(model, sequence_length)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.mlp_hidden,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": sequence_length,
        "rms_norm_eps": model.norm_eps,
        # transformers 4 reads the first, 5 the second.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tied_embeddings,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
    }
    if kind != "mistral":
        config |= {"attention_bias": False, "attention_dropout": 0.0}
    if kind == "mistral":
        config |= {"sliding_window": window}
    if kind == "qwen3" and window is not None:
        kinds = ["sliding_attention"] * model.depth
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0, "layer_types": kinds}
    return config


def to_hf(model: GPT) -> dict[str, Tensor]:
    """The weights by Hugging Face's names, fp32 on the CPU, none sharing memory with another."""
    config, weights = model.config, {name: p.detach().float().cpu() for name, p in model.named_parameters()}
    kv = config.num_kv_heads * config.head_dim
    sizes = {"attention.qkv": [config.width, kv, kv], "mlp.gate_up": [config.mlp_hidden] * 2}
    result = {
        EMBEDDING: weights["embedding.weight"][: config.vocab_size],
        NORM: (weights["norm.weight"].double() * model.output_scale).float(),
    }
    if not config.tied_embeddings:
        result[HEAD] = weights["head.weight"][: config.vocab_size]
    for number in range(config.depth):
        ours, theirs = f"blocks.{number}", f"model.layers.{number}"
        for name, other in _names(config).items():
            result[f"{theirs}.{other}.weight"] = weights[f"{ours}.{name}.weight"]
        for name, others in _FUSED.items():
            for other, rows in zip(others, weights[f"{ours}.{name}.weight"].split(sizes[name]), strict=True):
                result[f"{theirs}.{other}.weight"] = rows
    return {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in result.items()}


def from_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The weights by our names, fp32; the vocabulary padded with zeros.

    Raises:
        UserError: a tensor is missing, of another shape than config.json says, or nothing that we know.
    """
    kv = config.num_kv_heads * config.head_dim
    width, hidden = config.width, config.mlp_hidden
    rows = {"self_attn.q_proj": width, "self_attn.k_proj": kv, "self_attn.v_proj": kv,
            "mlp.gate_proj": hidden, "mlp.up_proj": hidden}  # fmt: skip
    left = set(tensors)

    def take(name: str, *shape: int) -> Tensor:
        if name not in tensors:
            raise UserError(f"the folder's weights have no {name}, which its config.json calls for")
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise UserError(f"{name} has shape {tuple(tensor.shape)}; its config.json says {shape}")
        left.discard(name)
        return tensor.float()

    def table(name: str) -> Tensor:
        assert config.vocab_size is not None
        whole = torch.zeros(config.padded_vocab_size, width)
        whole[: config.vocab_size] = take(name, config.vocab_size, width)
        return whole

    result = {"embedding.weight": table(EMBEDDING), "norm.weight": take(NORM, width)}
    if config.tied_embeddings:
        left.discard(HEAD)  # some writers keep the table twice
    else:
        result["head.weight"] = table(HEAD)
    shapes = {
        "attention_norm": (width,),
        "mlp_norm": (width,),
        "attention.out": (width, width),
        "mlp.down": (width, hidden),
        "attention.query_norm": (config.head_dim,),
        "attention.key_norm": (config.head_dim,),
    }
    for number in range(config.depth):
        ours, theirs = f"blocks.{number}", f"model.layers.{number}"
        for name, other in _names(config).items():
            result[f"{ours}.{name}.weight"] = take(f"{theirs}.{other}.weight", *shapes[name])
        for name, others in _FUSED.items():
            pieces = [take(f"{theirs}.{other}.weight", rows[other], width) for other in others]
            result[f"{ours}.{name}.weight"] = torch.cat(pieces)
    unknown = sorted(name for name in left if not name.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise UserError(f"the folder's weights have {unknown[0]}, which our model has no place for")
    return result


def _names(config: ModelConfig) -> dict[str, str]:
    return _BLOCK | (_HEAD_NORMS if config.qk_norm else {})


def model_config(config: Mapping[str, Any], sequence_length: int) -> ModelConfig:
    """Our architecture from a config.json.

    Raises:
        UserError: what it describes is none that our model computes; the field is named.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise UserError(f"model_type is {kind!r} in config.json; it must be one of {', '.join(ARCHITECTURES)}")
    for name, accepted in _ONLY.items():
        if config.get(name, accepted) not in (accepted, None):
            raise UserError(f"{name} is {config[name]!r} in config.json; only {accepted!r} can be imported")
    for name in _REFUSED:
        if config.get(name):
            raise UserError(f"{name} is {config[name]!r} in config.json; models that have it cannot be imported")
    width, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    head_dim = config.get("head_dim") or (128 if kind == "qwen3" else width // heads)  # as transformers has it
    if head_dim * heads != width:
        raise UserError(
            f"head_dim is {head_dim} in config.json; it must be hidden_size / num_attention_heads = {width / heads:g}"
        )
    return ModelConfig(
        width=width,
        depth=_number(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        hidden=_number(config, "intermediate_size"),
        vocab_size=_number(config, "vocab_size"),
        qk_norm=kind == "qwen3",
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        window=_window(config, str(kind), sequence_length),
        rope_theta=_rope_theta(config),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
    )


# What these fields must say, where they are there; transformers reads a missing one as that, too.
_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
_REFUSED = ("quantization_config", "num_experts", "num_local_experts")


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} is {value!r} in config.json; it must be a whole number, 1 or more")
    return value


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Base of the rotary frequencies, wherever this version of transformers keeps it."""
    theta = config.get("rope_theta")
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if rope is None:
            continue
        plain = (
            isinstance(rope, dict)
            and rope.get("rope_type", rope.get("type", "default")) == "default"
            and rope.get("partial_rotary_factor", 1.0) == 1.0
        )
        if not plain:
            raise UserError(f"{name} is {rope!r} in config.json; only rotary positions without scaling can be imported")
        theta = rope.get("rope_theta", theta)
    return 10000.0 if theta is None else float(theta)


def _window(config: Mapping[str, Any], kind: str, sequence_length: int) -> int | None:
    """The sliding window that all layers have; None where they have none, or one that hides nothing."""
    window = config.get("sliding_window", 4096)  # Mistral's and Qwen3's default
    if kind == "llama" or (kind == "qwen3" and not config.get("use_sliding_window", False)):
        window = None
    if window is None or window >= sequence_length:
        return None
    depth = _number(config, "num_hidden_layers")
    if kind == "qwen3":
        first = config.get("max_window_layers", 28)
        kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full" for i in range(depth)]
        if any(each != "sliding_attention" for each in kinds):
            raise UserError(
                f"layer_types is {kinds!r} in config.json; a sliding window must be every layer's or none's"
            )
    return int(window)
