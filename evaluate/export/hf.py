"""Our models and tokenizers as Hugging Face reads them.

    plain attention                  LlamaForCausalLM
    RMSNorm on queries and keys      Qwen3ForCausalLM (a norm per head before the rotation, as in our model)
    biases on queries, keys, values  Qwen2ForCausalLM; with norms Qwen3, whose output bias is then 0
    sliding window w                 MistralForCausalLM, or Qwen with a window in every layer: token i sees i-w+1 to i
    experts, softmax router          MixtralForCausalLM (gates sum to 1 in every layer)
    the same with norms per head     Qwen3MoeForCausalLM, with or without dense layers at the bottom
    experts, sigmoid router          Glm4MoeForCausalLM: shared experts, dense layers and norms per head optional

All take any head size, and rotary frequencies scaled by llama3 or yarn. Not used: OLMoE, whose norm of queries spans
all heads; Qwen2-MoE and ERNIE, whose shared experts have gates.

- Our query-key-value and gate-up matrices are theirs stacked by rows; rotary positions have the same layout.
- The untrained padding of our vocabulary is cut off.
- muP's output multiplier s is folded into the weight w of the last norm: (x r w) s = x r (w s). This is exact if s is a
  power of two, otherwise within one rounding of the weight.
- Special tokens are never read out of text (`split_special_tokens`). Bytes become a byte-level BPE without merges; the
  byte 0xFF does not occur in UTF-8, so its id ends a document. That token is also the `bos_token`, as in GPT-2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from ...train.config import ModelConfig
from ...train.data.tokenizers import END_TOKENS, ByteTokenizer, Tokenizer
from ...train.errors import UserError
from ...train.files import write_json
from ...train.model.gpt import GPT
from ...train.model.shape import TABLES, model_shape

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
# Required values of these model fields, by architecture of a mixture of experts.
_UNBIASED: dict[str, Any] = {"shared_experts": 0, "balance_rate": 0.0}
_FIXED: dict[str, dict[str, Any]] = {
    "mixtral": _UNBIASED | {"gates_normalised": True, "dense_layers": 0, "qkv_bias": False},
    "qwen3_moe": _UNBIASED,
    "glm4_moe": {"window": None},
}
_MIXTRAL = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
_HAS_BIAS_FIELD = ("llama", "qwen3", "qwen3_moe", "glm4_moe")  # the others have no biases, Qwen2 always has them
_TOKENIZER, _CONFIG, _SPECIAL = TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def window_of(model: ModelConfig, sequence_length: int) -> int | None:
    """Return the attention window in tokens; None if attention covers the whole sequence."""
    return model.window if model.window is not None and model.window < sequence_length else None


def model_type(model: ModelConfig, sequence_length: int) -> str:
    """Return the Hugging Face model type, such as "llama", that computes this model. Raises UserError if none does."""
    kind, window = _kind_of(model), window_of(model, sequence_length)
    if kind == "llama" and window is not None:
        return "mistral"
    for name, accepted in _FIXED.get(kind, {}).items():
        value = window if name == "window" else getattr(model, name)
        if value != accepted:
            raise UserError(
                f"model.{name} is {value!r}; it must be {accepted!r} to be exported as {ARCHITECTURES[kind]}, the only "
                f"architecture for model.gate {model.gate!r} and model.qk_norm {model.qk_norm!r}"
            )
    return kind


def _kind_of(model: ModelConfig) -> str:
    if model.experts:
        return "glm4_moe" if model.gate == "sigmoid" else "qwen3_moe" if model.qk_norm else "mixtral"
    return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"


def hf_config(model: ModelConfig, sequence_length: int, end: int, dtype: str) -> dict[str, Any]:
    """Return the content of config.json. `end`: id of the end-of-document token; `dtype`: such as "float32"."""
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
    if kind in _FIXED:
        config |= _expert_fields(kind, model, window)
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


def _expert_fields(kind: str, model: ModelConfig, window: int | None) -> dict[str, Any]:
    """Return the fields of config.json that a mixture of experts adds or changes."""
    config: dict[str, Any] = {"num_experts_per_tok": model.experts_per_token, "output_router_logits": False}
    if kind == "mixtral":
        config |= {"num_local_experts": model.experts, "intermediate_size": model.moe_hidden}
        return config | {"sliding_window": window}
    config |= {"moe_intermediate_size": model.moe_hidden, "norm_topk_prob": model.gates_normalised}
    if kind == "qwen3_moe":
        config |= {"use_sliding_window": window is not None, "sliding_window": window, "decoder_sparse_step": 1}
        # transformers 4 reads the first, and 5 writes the second.
        config |= {"num_experts": model.experts, "num_local_experts": model.experts}
        return config | {"mlp_only_layers": list(range(model.dense_layers))}
    config |= {"n_routed_experts": model.experts, "n_shared_experts": model.shared_experts}
    config |= {"use_qk_norm": model.qk_norm, "first_k_dense_replace": model.dense_layers, "num_nextn_predict_layers": 0}
    return config | {"partial_rotary_factor": 1.0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}


def to_hf(model: GPT) -> dict[str, Tensor]:
    """Return the weights by Hugging Face's names, fp32 on the CPU; no two tensors share memory."""
    config, kind = model.config, _kind_of(model.config)
    result, weights = {}, dict(model.named_parameters())
    for parameter in model_shape(config).parameters:
        weight = weights[parameter.name].detach().float().cpu()
        if parameter.name == "norm.weight":
            weight = (weight.double() * model.output_scale).float()
        for part, rows in zip(parameter.parts, weight.split([part.rows for part in parameter.parts]), strict=True):
            rows_out = rows[: config.vocab_size] if parameter.role in TABLES else rows
            name = part.hf
            for ours, theirs in _MIXTRAL.items() if kind == "mixtral" else ():
                name = name.replace(ours, theirs)
            result[name] = rows_out.clone(memory_format=torch.contiguous_format)
    if kind == "glm4_moe":
        result |= _empty_tensors(config)
    if kind in ("qwen3", "qwen3_moe") and config.qkv_bias:
        for number in range(config.depth):  # Qwen3 has an output bias with the others, and our model has none
            result[f"model.layers.{number}.self_attn.o_proj.bias"] = torch.zeros(config.width)
    return result


def _empty_tensors(model: ModelConfig) -> dict[str, Tensor]:
    """Return tensors that GLM requires and this model lacks: biases of 0, and shared experts of width 0."""
    shapes: dict[str, tuple[int, ...]] = {}
    if model.balance_rate == 0:
        shapes["gate.e_score_correction_bias"] = (model.experts,)
    if model.shared_experts == 0:
        shapes |= {f"shared_experts.{half}_proj.weight": (0, model.width) for half in ("gate", "up")}
        shapes["shared_experts.down_proj.weight"] = (model.width, 0)
    blocks = range(model.dense_layers, model.depth)
    return {
        f"model.layers.{block}.mlp.{name}": torch.zeros(shape) for block in blocks for name, shape in shapes.items()
    }


# --- tokenizers ------------------------------------------------------------------------------------------------------


def byte_characters() -> list[str]:
    """Return the character that byte-level tokenizers use for each byte (Radford et al. 2019, GPT-2)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = (chr(256 + place) for place in range(256))
    return [chr(byte) if byte in visible else next(shifted) for byte in range(256)]


def _byte_level_content() -> dict[str, Any]:
    end = ByteTokenizer.end_of_document
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("byte_level.yaml").read_text(encoding="utf-8"))
    content["added_tokens"][0] |= {"id": end, "content": END_TOKENS[0]}
    tokens = [*byte_characters()[:end], END_TOKENS[0]]
    content["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    return content


def write_tokenizer(tokenizer: Tokenizer, saved: Path, longest: int, folder: Path) -> None:
    """Write a tokenizer as Hugging Face's files, which give every text the same ids as ours.

    `saved`: folder of the tokenizer in the checkpoint; `longest`: context of the model in tokens.
    """
    if isinstance(tokenizer, ByteTokenizer):
        content = _byte_level_content()
    else:
        content = json.loads((saved / _TOKENIZER).read_text(encoding="utf-8"))
    token = next(token["content"] for token in content["added_tokens"] if token["id"] == tokenizer.end_of_document)
    (folder / _TOKENIZER).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    special = {"bos_token": token, "eos_token": token}
    config = {
        # LlamaTokenizer and similar classes would replace the rules of the file by their own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    write_json(folder / _CONFIG, config)
    write_json(folder / _SPECIAL, special)
