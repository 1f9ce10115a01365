"""Names, shapes and settings: our GPT and the Hugging Face architectures that compute the very same.

    plain attention                  LlamaForCausalLM
    RMSNorm on queries and keys      Qwen3ForCausalLM (a norm per head, before the rotation, as ours)
    biases on queries, keys, values  Qwen2ForCausalLM; with norms Qwen3, whose bias on the output is then 0
    sliding window w                 MistralForCausalLM, or Qwen with it in every layer: token i sees i - w + 1 to i

Heads of any size and rotary frequencies scaled as llama3 or yarn go with each of them; mixtures of experts are in
`hf_experts.py`.

Special here:
- our query-key-value and gate-up matrices are theirs, one below the other; rotary positions have the same layout;
- the padding of our vocabulary is cut off, so there is no logit that nothing was trained for;
- muP's output multiplier is folded into the last norm, whose weight is w s then: (x r w) s = x r (w s). Exact where s
  is a power of two, else within a rounding of the weight;
- what a folder has and our model cannot compute is refused by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from ...train.config import ModelConfig
from ...train.errors import UserError
from ...train.model.gpt import GPT
from ...train.model.shape import TABLES, model_shape
from . import hf_experts as mixtures

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
ARCHITECTURES |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", **mixtures.ARCHITECTURES}
_BIAS_IS_SAID = ("llama", "qwen3", "qwen3_moe", "glm4_moe")  # others have none, and Qwen2 always has some
_OUTPUT_BIAS = "self_attn.o_proj.bias"  # which comes with the others in Llama and Qwen3, and which we do not have


def window_of(model: ModelConfig, sequence_length: int) -> int | None:
    """The sliding window, None where it hides nothing."""
    return model.window if model.window is not None and model.window < sequence_length else None


def model_type(model: ModelConfig, sequence_length: int) -> str:
    """The Hugging Face architecture that computes what this model does; UserError where none does."""
    if model.experts:
        return mixtures.model_type(model, window_of(model, sequence_length))
    if model.qk_norm:
        return "qwen3"
    if model.qkv_bias:
        return "qwen2"
    return "llama" if window_of(model, sequence_length) is None else "mistral"


def hf_config(model: ModelConfig, sequence_length: int, end: int, dtype: str) -> dict[str, Any]:
    """config.json of a model with its vocab_size; `end` is the id that ends a document, `dtype` torch's name."""
    kind, window, rope = model_type(model, sequence_length), window_of(model, sequence_length), _hf_rope(model)
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
        # transformers 4 reads the first, and where frequencies are scaled `rope_scaling`; 5 the second.
        "rope_theta": model.rope_theta,
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tied_embeddings,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
    }
    if model.rope is not None:
        config["rope_scaling"] = rope
    config |= {"sliding_window": window} if kind == "mistral" else {"attention_dropout": 0.0}
    if kind in _BIAS_IS_SAID:
        config["attention_bias"] = model.qkv_bias
    if kind in mixtures.ARCHITECTURES:
        config |= mixtures.settings(kind, model, window)
    if kind in ("qwen2", "qwen3") and window is not None:
        kinds = ["sliding_attention"] * model.depth
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0, "layer_types": kinds}
    return config


def _hf_rope(model: ModelConfig) -> dict[str, Any]:
    if (rope := model.rope) is None:
        return {"rope_type": "default"}
    said = {"rope_type": rope.kind, "factor": rope.factor, "original_max_position_embeddings": rope.length}
    if rope.kind == "llama3":
        return said | {"low_freq_factor": rope.slow, "high_freq_factor": rope.fast}
    return said | {"beta_slow": rope.slow, "beta_fast": rope.fast, "attention_factor": rope.amplitude}


def to_hf(model: GPT) -> dict[str, Tensor]:
    """The weights by Hugging Face's names, fp32 on the CPU, none sharing memory with another."""
    result, weights = {}, dict(model.named_parameters())
    for parameter in model_shape(model.config).parameters:
        weight = weights[parameter.name].detach().float().cpu()
        if parameter.name == "norm.weight":
            weight = (weight.double() * model.output_scale).float()
        for part, rows in zip(parameter.parts, weight.split([part.rows for part in parameter.parts]), strict=True):
            kept = rows[: model.config.vocab_size] if parameter.role in TABLES else rows
            name = mixtures.hf_name(part.hf, model.config)
            result[name] = kept.clone(memory_format=torch.contiguous_format)
    result |= mixtures.left_out(model.config)
    if model.config.qkv_bias and model.config.qk_norm and mixtures.kind_of(model.config) != "glm4_moe":
        for number in range(model.config.depth):
            result[f"model.layers.{number}.{_OUTPUT_BIAS}"] = torch.zeros(model.config.width)
    return result


def from_hf(files: Mapping[str, Any], config: ModelConfig) -> dict[str, Tensor]:
    """The weights by our names, fp32; the vocabulary padded with zeros. `files`: the open file of each tensor.

    Raises UserError: a tensor is missing, of another shape than config.json says, or nothing that we know; they do not
    fit this machine. Before any of them is read.
    """
    found, parameters = mixtures.stored(files), model_shape(config).parameters
    left = {name: one for name, one in found.items() if 0 not in one.shape}
    for parameter in parameters:
        for part in parameter.parts:
            if part.hf not in found:
                name = mixtures.hf_name(part.hf, config)
                raise UserError(f"the folder's weights have no {name}, which its config.json calls for")
            rows = config.vocab_size if parameter.role in TABLES else part.rows
            if (has := found[part.hf].shape) != (shape := (rows, *parameter.shape[1:])):
                raise UserError(f"{found[part.hf].name} has shape {has}; its config.json says {shape}")
            left.pop(part.hf, None)
    if config.tied_embeddings:
        left.pop("lm_head.weight", None)  # some writers keep the table twice
    unknown = sorted(one.name for name, one in left.items() if not name.endswith("rotary_emb.inv_freq"))
    if config.qkv_bias:
        biases = [name for name in unknown if name.endswith(_OUTPUT_BIAS)]
        unknown = [name for name in unknown if name not in biases]
        if (used := next((name for name in biases if found[name].read().any()), None)) is not None:
            raise UserError(f"{used} is not 0; our model has no bias there, so it must be 0 to be imported")
    if unknown:
        raise UserError(f"the folder's weights have {unknown[0]}, which our model has no place for")
    size = 4 * sum(math.prod(parameter.shape) for parameter in parameters)
    if size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise UserError(
            f"the weights take {size / 1e9:.0f} GB in fp32; the memory here is {memory / 1e9:.0f} GB and must hold them"
        )
    result = {}
    for parameter in parameters:
        pieces = [found[part.hf].read().float() for part in parameter.parts]
        weight = torch.zeros(parameter.shape)
        torch.cat(pieces, out=weight[: sum(map(len, pieces))])
        result[parameter.name] = weight
    return result


class HfConfig(TypedDict, total=False):
    """Fields of a config.json that are no whole numbers, which `whole_number` checks."""

    model_type: str
    head_dim: int | None
    num_key_value_heads: int | None
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_theta: float | None
    attention_bias: bool | None
    sliding_window: int | None
    use_sliding_window: bool
    max_window_layers: int
    layer_types: list[str] | None
    norm_topk_prob: bool
    use_qk_norm: bool
    mlp_only_layers: list[int] | None
    n_shared_experts: int
    first_k_dense_replace: int
    eos_token_id: int | list[int] | None


def importable(config: Mapping[str, Any]) -> str:
    """The model_type of a config.json; UserError where it is none of ours."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        said = "is not in" if kind is None else f"is {kind!r} in"
        raise UserError(f"model_type {said} config.json; it must be one of {', '.join(ARCHITECTURES)}")
    return str(kind)


def model_config(config: Mapping[str, Any], sequence_length: int) -> ModelConfig:
    """Our architecture from a config.json.

    Raises UserError: what it describes is none that our model computes; the field is named.
    """
    kind = importable(config)
    config = mixtures.completed(kind, config)
    for name, accepted in (_ONLY | mixtures.ONLY.get(kind, {})).items():
        if config.get(name, accepted) not in (accepted, None):
            raise UserError(f"{name} is {config[name]!r} in config.json; only {accepted!r} can be imported")
    mixed = kind in mixtures.ARCHITECTURES
    for name in ("quantization_config", *(() if mixed else ("num_experts", "num_local_experts"))):
        if config.get(name):
            raise UserError(f"{name} is {config[name]!r} in config.json; a {kind} that has it cannot be imported")
    width, heads = whole_number(config, "hidden_size"), whole_number(config, "num_attention_heads")
    head_dim = config.get("head_dim") or (128 if kind == "qwen3" else None)  # as transformers has it
    return ModelConfig(
        width=width,
        depth=whole_number(config, "num_hidden_layers", 10_000),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        hidden=whole_number(config, "intermediate_size"),
        vocab_size=whole_number(config, "vocab_size"),
        qk_norm=kind in ("qwen3", "qwen3_moe") or (kind == "glm4_moe" and bool(config.get("use_qk_norm"))),
        qkv_bias=kind == "qwen2" or (kind in _BIAS_IS_SAID and bool(config.get("attention_bias"))),
        head_size=None if head_dim is None or head_dim * heads == width else head_dim,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        window=_window(config, str(kind), sequence_length),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        **_rope(config),
        **(mixtures.fields(kind, config, partial(whole_number, config)) if mixed else {}),
    )


# What these fields must say, where they are there; transformers reads a missing one as that, too.
_ONLY: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1.0}


def whole_number(config: Mapping[str, Any], name: str, most: int = 1 << 24) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        said = "is not in" if value is None else f"is {value!r} in"
        raise UserError(f"{name} {said} config.json; it must be a whole number from 1 to {most}")
    return value


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields of the rotary frequencies, wherever this version of transformers keeps them."""
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(place) or {}
    flat = isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())
    kind = rope.get("rope_type", rope.get("type", "default")) if flat else None  # else one for each kind of layer
    if kind not in ("default", "llama3", "yarn"):
        raise UserError(f"{place} is {rope!r} in config.json; it must be of rope_type default, llama3 or yarn")
    for name, accepted in {"partial_rotary_factor": 1.0, "truncate": True}.items():
        if rope.get(name, accepted) not in (accepted, None):
            raise UserError(f"{name} is {rope[name]!r} in {place} of config.json; only {accepted!r} can be imported")

    def number(name: str, default: float | None = None, of: Mapping[str, Any] = rope) -> float:
        value = default if of.get(name) is None else of[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e30:
            said = "is not in" if value is None else f"is {value!r} in"
            where = f"{place} of config.json" if of is rope else "config.json"
            raise UserError(f"{name} {said} {where}; it must be above 0 and at most 1e30")
        return float(value)

    fields: dict[str, Any] = {"rope_theta": number("rope_theta", number("rope_theta", 10000.0, config))}
    if kind == "default":
        return fields
    most, before = whole_number(config, "max_position_embeddings"), "original_max_position_embeddings"
    length = whole_number({before: config.get(before) or rope.get(before) or most}, before)
    fields |= {"rope_scaling": kind, "rope_length": length}
    if kind == "llama3":
        names = {"rope_factor": "factor", "rope_slow": "low_freq_factor", "rope_fast": "high_freq_factor"}
        return fields | {ours: number(theirs) for ours, theirs in names.items()}
    factor = number("factor", most / length)
    both = rope.get("mscale") and rope.get("mscale_all_dim")
    above, below = (number("mscale"), number("mscale_all_dim")) if both else (1.0, 0.0)
    grown = 0.1 * math.log(max(factor, 1.0))
    return fields | {
        "rope_factor": factor,
        "rope_slow": number("beta_slow", 1.0),
        "rope_fast": number("beta_fast", 32.0),
        "rope_attention": number("attention_factor", (above * grown + 1) / (below * grown + 1)),
    }


def _window(config: Mapping[str, Any], kind: str, sequence_length: int) -> int | None:
    """The sliding window that all layers have; None where they have none, or one that hides nothing."""
    window = config.get("sliding_window", 4096)  # Mistral's and Qwen's default
    always = kind in ("mistral", "mixtral")
    if kind in ("llama", "glm4_moe") or (not always and not config.get("use_sliding_window", False)):
        window = None
    if window is None or window >= sequence_length:
        return None
    depth = whole_number(config, "num_hidden_layers")
    if kind in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full" for i in range(depth)]
        if "sliding_attention" not in kinds:
            return None
        if any(each != "sliding_attention" for each in kinds):
            raise UserError(
                f"layer_types is {kinds!r} in config.json; a sliding window must be every layer's or none's"
            )
    return int(window)
