"""Mixtures of experts: the Hugging Face architectures that compute the very same, their settings and their names.

    softmax                          MixtralForCausalLM, whose gates sum to 1 in every layer
    softmax, norms of heads          Qwen3MoeForCausalLM, with MLPs at the bottom or without
    sigmoid, with biases or without  Glm4MoeForCausalLM: shared experts, MLPs at the bottom, norms of heads or not

Special here:
- without biases that balance the load those of GLM are 0, and such biases come back as none;
- folders hold a tensor per expert and matrix, or what all experts have of one in three dimensions; both are read;
- OLMoE is missing, whose norm of queries spans all heads, and Qwen2's and ERNIE's, whose shared experts have gates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...train.config import ModelConfig
from ...train.errors import UserError
from ...train.model.shape import model_shape

ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}
# Of a model that goes out as one of them, what these fields must be.
_UNBIASED: dict[str, Any] = {"shared_experts": 0, "balance_rate": 0.0}
_FIXED: dict[str, dict[str, Any]] = {
    "mixtral": _UNBIASED | {"gates_normalised": True, "dense_layers": 0, "qkv_bias": False},
    "qwen3_moe": _UNBIASED,
    "glm4_moe": {"window": None},
}
# What config.json must say in these fields; transformers reads a missing one as that, too.
ONLY: dict[str, dict[str, Any]] = {
    "mixtral": {"router_jitter_noise": 0.0},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "glm4_moe": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
}
# How transformers reads a field that is missing, where that is another way than with dense models.
_MISSING: dict[str, dict[str, Any]] = {
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": False},
    "glm4_moe": {"rms_norm_eps": 1e-5, "norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
_MIXTRAL = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def model_type(model: ModelConfig, window: int | None) -> str:
    """The architecture that computes what this mixture does; UserError where none does, by the field's name."""
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
    """The one architecture that may compute it, whether it does or not."""
    if not model.experts:
        return "dense"
    return "glm4_moe" if model.gate == "sigmoid" else "qwen3_moe" if model.qk_norm else "mixtral"


def settings(kind: str, model: ModelConfig, window: int | None) -> dict[str, Any]:
    """Fields of config.json that dense models lack, or have otherwise."""
    said: dict[str, Any] = {"num_experts_per_tok": model.experts_per_token, "output_router_logits": False}
    if kind == "mixtral":
        said |= {"num_local_experts": model.experts, "intermediate_size": model.moe_hidden}
        return said | {"sliding_window": window}
    said |= {"moe_intermediate_size": model.moe_hidden, "norm_topk_prob": model.gates_normalised}
    if kind == "qwen3_moe":
        said |= {"use_sliding_window": window is not None, "sliding_window": window, "decoder_sparse_step": 1}
        # transformers 4 reads the first, and 5 writes the second.
        said |= {"num_experts": model.experts, "num_local_experts": model.experts}
        return said | {"mlp_only_layers": list(range(model.dense_layers))}
    said |= {"n_routed_experts": model.experts, "n_shared_experts": model.shared_experts, "use_qk_norm": model.qk_norm}
    said |= {"first_k_dense_replace": model.dense_layers, "num_nextn_predict_layers": 0}
    return said | {"partial_rotary_factor": 1.0} | ONLY[kind]


def completed(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with what it leaves out, for this is not always what a dense model would take."""
    found = _MISSING.get(kind, {}) | dict(config)
    if kind == "qwen3_moe":
        found.setdefault("num_local_experts", config.get("num_experts"))
    if kind == "glm4_moe":
        rope, name = config.get("rope_parameters"), "partial_rotary_factor"
        found.setdefault(name, rope.get(name, 0.5) if isinstance(rope, dict) else 0.5)
    return found


def fields(kind: str, config: Mapping[str, Any], whole_number: Callable[[str], int]) -> dict[str, Any]:
    """Of our model, those that say which mixture a completed config.json describes; UserError where it is none."""
    sigmoid, layers = kind == "glm4_moe", config.get("mlp_only_layers") or []
    if sorted(layers) != list(range(len(layers))):
        raise UserError(f"mlp_only_layers is {layers!r} in config.json; they must be the first ones to be imported")
    return {
        "experts": whole_number("n_routed_experts" if sigmoid else "num_local_experts"),
        "experts_per_token": whole_number("num_experts_per_tok"),
        "expert_hidden": whole_number("intermediate_size" if kind == "mixtral" else "moe_intermediate_size"),
        "shared_experts": config["n_shared_experts"] if sigmoid else 0,
        "dense_layers": config["first_k_dense_replace"] if sigmoid else len(layers),
        "gate": "sigmoid" if sigmoid else "softmax",
        "gates_normalised": kind == "mixtral" or config["norm_topk_prob"],
        **({} if sigmoid else {"balance_rate": 0.0}),
    }


def hf_name(name: str, model: ModelConfig) -> str:
    """What this model's architecture calls a parameter that the table of them calls `name`."""
    if kind_of(model) != "mixtral":
        return name
    for ours, theirs in _MIXTRAL.items():
        name = name.replace(ours, theirs)
    return name


def left_out(model: ModelConfig) -> dict[str, Tensor]:
    """What GLM wants and this model does not have: biases of 0, shared experts of no width."""
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


def without_idle_biases(model: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Takes biases out that are all 0, and from the model what would train them."""
    names = [parameter.name for parameter in model_shape(model).parameters if parameter.role == "balance"]
    if names and not any(weights[name].any() for name in names):
        model.balance_rate = 0.0
        for name in names:
            del weights[name]


class Stored(NamedTuple):
    """A tensor in an open file, or rows of an expert in one that holds those of all."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def stored(files: Mapping[str, Any]) -> dict[str, Stored]:
    """What open files hold, by the names of Qwen and GLM, one per expert and matrix, however a folder has them."""
    found = {}
    for name, file in files.items():
        piece, (owner, _, last) = file.get_slice(name), name.rpartition(".")
        shape, parts = tuple(piece.get_shape()), _FUSED.get(last, ())
        if parts and len(shape) == 3 and shape[0] <= 10_000:  # experts, rows of all parts, columns
            rows = shape[1] // len(parts)
            for number, (part, matrix) in product(range(shape[0]), enumerate(parts)):
                place = number, slice(part * rows, (part + 1) * rows)
                read = partial(piece.__getitem__, place)
                found[f"{owner}.{number}.{matrix}.weight"] = Stored(name, (rows, shape[2]), read)
            continue
        known = name
        for ours, theirs in _MIXTRAL.items():
            known = known.replace(theirs, ours)
        found[known] = Stored(name, shape, partial(file.get_tensor, name))
    return found
