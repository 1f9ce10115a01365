"""Settings and weights of the Hugging Face architectures that compute exactly what our GPT does.

    plain attention                  LlamaForCausalLM
    RMSNorm on queries and keys      Qwen3ForCausalLM (a norm per head before the rotation, as in our model)
    biases on queries, keys, values  Qwen2ForCausalLM; with norms Qwen3, whose output bias is then 0
    sliding window w                 MistralForCausalLM, or Qwen with a window in every layer: token i sees i-w+1 to i

Each of them takes any head size and rotary frequencies scaled by llama3 or yarn. `hf_experts.py` has the mixtures of
experts.

- Our query-key-value and gate-up matrices are theirs stacked by rows; rotary positions have the same layout.
- The padding of our vocabulary is cut off, because its logits were not trained.
- muP's output multiplier s is folded into the weight w of the last norm: (x r w) s = x r (w s). This is exact if s is a
  power of two, and otherwise within one rounding of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...train.config import ModelConfig
from ...train.model.gpt import GPT
from ...train.model.shape import TABLES, model_shape
from . import hf_experts as mixtures

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
ARCHITECTURES |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", **mixtures.ARCHITECTURES}
_HAS_BIAS_FIELD = ("llama", "qwen3", "qwen3_moe", "glm4_moe")  # the others have no biases, Qwen2 always has them


def window_of(model: ModelConfig, sequence_length: int) -> int | None:
    """Return the sliding window, or None if it hides nothing."""
    return model.window if model.window is not None and model.window < sequence_length else None


def model_type(model: ModelConfig, sequence_length: int) -> str:
    """Return the Hugging Face architecture that computes what this model does; raise UserError if none does."""
    if model.experts:
        return mixtures.model_type(model, window_of(model, sequence_length))
    if model.qk_norm:
        return "qwen3"
    if model.qkv_bias:
        return "qwen2"
    return "llama" if window_of(model, sequence_length) is None else "mistral"


def hf_config(model: ModelConfig, sequence_length: int, end: int, dtype: str) -> dict[str, Any]:
    """Return config.json; `end` is the id that ends a document, `dtype` torch's name for the type of the weights."""
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
    if kind in _HAS_BIAS_FIELD:
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
    config = {"rope_type": rope.kind, "factor": rope.factor, "original_max_position_embeddings": rope.length}
    if rope.kind == "llama3":
        return config | {"low_freq_factor": rope.slow, "high_freq_factor": rope.fast}
    return config | {"beta_slow": rope.slow, "beta_fast": rope.fast, "attention_factor": rope.amplitude}


def to_hf(model: GPT) -> dict[str, Tensor]:
    """Return the weights by Hugging Face's names, fp32 on the CPU; no two tensors share memory."""
    result, weights = {}, dict(model.named_parameters())
    for parameter in model_shape(model.config).parameters:
        weight = weights[parameter.name].detach().float().cpu()
        if parameter.name == "norm.weight":
            weight = (weight.double() * model.output_scale).float()
        for part, rows in zip(parameter.parts, weight.split([part.rows for part in parameter.parts]), strict=True):
            rows_out = rows[: model.config.vocab_size] if parameter.role in TABLES else rows
            name = mixtures.hf_name(part.hf, model.config)
            result[name] = rows_out.clone(memory_format=torch.contiguous_format)
    result |= mixtures.empty_tensors(model.config)
    if model.config.qkv_bias and model.config.qk_norm and mixtures.kind_of(model.config) != "glm4_moe":
        for number in range(model.config.depth):  # Qwen3 has an output bias with the others, and our model has none
            result[f"model.layers.{number}.self_attn.o_proj.bias"] = torch.zeros(model.config.width)
    return result
