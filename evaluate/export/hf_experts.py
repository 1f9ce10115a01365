"""Settings and weight names of the Hugging Face architectures that compute our mixtures of experts exactly.

    softmax router                        MixtralForCausalLM (gates sum to 1 in every layer)
    softmax router, norms per head        Qwen3MoeForCausalLM, with or without dense layers at the bottom
    sigmoid router                        Glm4MoeForCausalLM: shared experts, dense layers and norms per head optional

OLMoE is not used because its norm of queries spans all heads, nor Qwen2-MoE and ERNIE because their shared experts have
gates. GLM's load-balancing biases are written as 0 where our model has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...train.config import ModelConfig
from ...train.errors import UserError

ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}
# Required values of these model fields, by architecture.
_UNBIASED: dict[str, Any] = {"shared_experts": 0, "balance_rate": 0.0}
_FIXED: dict[str, dict[str, Any]] = {
    "mixtral": _UNBIASED | {"gates_normalised": True, "dense_layers": 0, "qkv_bias": False},
    "qwen3_moe": _UNBIASED,
    "glm4_moe": {"window": None},
}
_MIXTRAL = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}


def model_type(model: ModelConfig, window: int | None) -> str:
    """Return the architecture that computes what this mixture does; raise UserError if none does."""
    kind = kind_of(model)
    for name, accepted in _FIXED[kind].items():
        value = window if name == "window" else getattr(model, name)
        if value != accepted:
            raise UserError(
                f"model.{name} is {value!r}; to be exported with model.gate {model.gate!r} and model.qk_norm "
                f"{model.qk_norm!r}, as {ARCHITECTURES[kind]}, it must be {accepted!r}"
            )
    return kind


def kind_of(model: ModelConfig) -> str:
    """Return the only candidate architecture, without checking the fields that it fixes."""
    if not model.experts:
        return "dense"
    return "glm4_moe" if model.gate == "sigmoid" else "qwen3_moe" if model.qk_norm else "mixtral"


def settings(kind: str, model: ModelConfig, window: int | None) -> dict[str, Any]:
    """Return the fields of config.json that differ from those of dense models."""
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


def hf_name(name: str, model: ModelConfig) -> str:
    """Translate a parameter's Hugging Face name in the shape table to this model's architecture."""
    if kind_of(model) != "mixtral":
        return name
    for ours, theirs in _MIXTRAL.items():
        name = name.replace(ours, theirs)
    return name


def empty_tensors(model: ModelConfig) -> dict[str, Tensor]:
    """Return tensors that GLM requires and this model lacks: biases of 0, and shared experts of width 0."""
    if kind_of(model) != "glm4_moe":
        return {}
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
