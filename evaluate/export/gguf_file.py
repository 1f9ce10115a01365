"""A checkpoint as a GGUF file for llama.cpp, written by the library `gguf`.

Special here:
- llama.cpp's `llama` turns neighbouring coordinates of a head by one angle, where we (and Hugging Face) turn the first
  half with the second: rows of Q and K are put in its order. Its `qwen3` turns halves, so there they stay;
- matrices are fp32 or fp16 as asked, norms always fp32, which is all that llama.cpp takes;
- the tokenizer is one that GGUF can describe exactly, GPT-2's kind of byte-level BPE, or the export is refused: the
  format names a rule for splitting text, it does not hold one, and it has no byte-level vocabulary without merges.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...train.checkpoint.checkpoint import LoadedCheckpoint
from ...train.config import ModelConfig, run_id
from ...train.data.tokenizers import ByteTokenizer
from ...train.errors import UserError
from .hf_tokenizer import byte_characters, content_of
from .hf_weights import to_hf, window_of

if TYPE_CHECKING:
    import numpy.typing as npt

_LIKE_GPT2 = (
    "a GGUF file describes byte-level BPE with GPT-2's rule for splitting text (data.tokenizer=bpe, or GPT-2's "
    "tokenizer.json)"
)


def write_gguf(loaded: LoadedCheckpoint, folder: Path, dtype: str) -> str:
    """Writes `model-<dtype>.gguf` into a folder.

    Args:
        loaded: the checkpoint.
        folder: there already.
        dtype: fp32 | fp16, of the matrices.

    Returns:
        llama.cpp's name of the architecture.

    Raises:
        UserError: `gguf` is not installed, or the model or its tokenizer cannot be described.
    """
    gguf = _library()
    config, length = loaded.config.model, loaded.config.data.sequence_length
    if window_of(config, length) is not None:
        raise UserError(
            f"model.window is {config.window}; GGUF's architectures of this shape have no sliding window, "
            "use --format hf"
        )
    vocabulary = _vocabulary(loaded)
    name = "qwen3" if config.qk_norm else "llama"
    writer = gguf.GGUFWriter(folder / f"model-{dtype}.gguf", name)
    try:
        _describe(writer, gguf, loaded, dtype)
        _add_tokenizer(writer, gguf, vocabulary, loaded)
        _add_tensors(writer, gguf, loaded, name, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    os.chmod(folder / f"model-{dtype}.gguf", 0o644)
    return name


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError(
            "gguf is not installed, which --format gguf needs; it comes with pip install 'isoflop[gguf]'"
        ) from None
    return gguf


def _describe(writer: Any, gguf: Any, loaded: LoadedCheckpoint, dtype: str) -> None:
    config = loaded.config.model
    writer.add_name(f"isoflop {run_id(loaded.config)} step {loaded.step}")
    writer.add_context_length(loaded.config.data.sequence_length)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.depth)
    writer.add_feed_forward_length(config.mlp_hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    kinds = {"fp32": gguf.LlamaFileType.ALL_F32, "fp16": gguf.LlamaFileType.MOSTLY_F16}
    writer.add_file_type(kinds[dtype])


def _vocabulary(loaded: LoadedCheckpoint) -> dict[str, Any]:
    """The tokenizer.json of a tokenizer that GGUF can describe."""
    if isinstance(loaded.tokenizer, ByteTokenizer):
        raise UserError(f"data.tokenizer is 'bytes'; {_LIKE_GPT2} and nothing without merges, use --format hf")
    content = content_of(loaded.tokenizer, loaded.path / "tokenizer")
    model, split = content["model"], content.get("pre_tokenizer") or {}
    plain = (
        model.get("type") == "BPE"
        and model.get("merges")
        and not any(model.get(name) for name in _UNKNOWN_TO_GPT2)
        and split.get("type") == "ByteLevel"
        and not split.get("add_prefix_space")
        and split.get("use_regex", True)
        and content.get("normalizer") is None
        and set(byte_characters()) <= set(model["vocab"])
    )
    if not plain:
        raise UserError(f"data.tokenizer is {loaded.config.data.tokenizer!r}; {_LIKE_GPT2}, use --format hf")
    return content


_UNKNOWN_TO_GPT2 = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges",
)  # fmt: skip


def _add_tokenizer(writer: Any, gguf: Any, content: dict[str, Any], loaded: LoadedCheckpoint) -> None:
    size, end = loaded.config.model.vocab_size, loaded.tokenizer.end_of_document
    assert size is not None
    # Ids that no token has, for a vocabulary may be larger than what the corpus gave.
    tokens = [f"[PAD{index}]" for index in range(size)]
    kinds = [int(gguf.TokenType.UNUSED)] * size
    for token, index in content["model"]["vocab"].items():
        tokens[index], kinds[index] = token, int(gguf.TokenType.NORMAL)
    for added in content["added_tokens"]:
        special = added["special"] or added["id"] == end
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = int(gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def _add_tensors(writer: Any, gguf: Any, loaded: LoadedCheckpoint, name: str, dtype: str) -> None:
    config = loaded.config.model
    architecture = gguf.MODEL_ARCH.QWEN3 if name == "qwen3" else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(architecture, config.depth)
    for theirs, tensor in to_hf(loaded.model).items():
        weights = tensor.numpy()
        if name == "llama":
            weights = _interleaved(theirs, weights, config)
        if weights.ndim > 1 and dtype == "fp16":
            weights = _half(theirs, weights)
        writer.add_tensor(names.get_name(theirs, (".weight",)), weights)


def _interleaved(name: str, weights: npt.NDArray[Any], config: ModelConfig) -> npt.NDArray[Any]:
    """Rows of Q and K, a head at a time, from two halves to pairs: (heads d, width), and so it comes back."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weights
    halves = weights.reshape(-1, 2, config.head_dim // 2, weights.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)


def _half(name: str, weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not np.isfinite(weights).all() or np.abs(weights).max(initial=0) <= np.finfo(np.float16).max:
        return weights.astype(np.float16)
    raise UserError(f"--dtype is 'fp16'; {name} has values beyond its range, use fp32")
