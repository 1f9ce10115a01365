"""To Hugging Face and back: the same logits, the same ids, and a sentence for what cannot be the same."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from isoflop.evaluate.export.export import export_checkpoint, import_checkpoint
from isoflop.evaluate.export.hf_tokenizer import byte_characters
from isoflop.evaluate.export.model_card import Facts, model_card
from isoflop.evaluate.inference.generate import Generation
from isoflop.sweeps.cli.checkpoint import facts_about
from isoflop.train.checkpoint.checkpoint import ALONE, find, load_for_evaluation, restore_state, whole_weights
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.config import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from isoflop.train.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from isoflop.train.errors import UserError
from isoflop.train.flops import count_parameters, training_flops_per_token
from isoflop.train.model.parametrization import build_model
from safetensors.torch import load_file, save_file

LENGTH = 64
# Both sides compute in fp32, in other orders; logits reach about 6 here, where a rounding is 5e-7.
SAME = 1e-4
MIXED: dict[str, Any] = {"experts": 6, "experts_per_token": 2, "expert_hidden": 16}
CHOSEN: dict[str, Any] = {**MIXED, "gate": "softmax", "balance_rate": 0.0}
LONGER: dict[str, Any] = {"rope_theta": 100.0, "rope_factor": 4.0, "rope_length": 32}
SHAPES = {
    "LlamaForCausalLM": ModelConfig(width=48, depth=3, heads=4),
    "LlamaForCausalLM, grouped, untied": ModelConfig(
        width=48, depth=3, heads=4, kv_heads=2, tied_embeddings=False, rope_theta=5e3, norm_eps=1e-6
    ),
    "Qwen3ForCausalLM": ModelConfig(width=48, depth=3, heads=4, kv_heads=2, qk_norm=True),
    "MistralForCausalLM": ModelConfig(width=48, depth=3, heads=4, window=7),
    "Qwen3ForCausalLM, window": ModelConfig(width=48, depth=3, heads=4, window=7, qk_norm=True),
    "LlamaForCausalLM, heads of another size, llama3": ModelConfig(
        width=48, depth=2, heads=4, kv_heads=2, head_size=20, rope_scaling="llama3", rope_fast=3.0, **LONGER
    ),
    "MistralForCausalLM, yarn": ModelConfig(
        width=48, depth=2, heads=4, window=20, rope_scaling="yarn", rope_fast=3.0, rope_attention=1.5, **LONGER
    ),
    "Qwen2ForCausalLM": ModelConfig(width=48, depth=2, heads=4, kv_heads=2, qkv_bias=True),
    "Qwen2ForCausalLM, yarn, window": ModelConfig(
        width=48, depth=2, heads=4, head_size=16, window=7, qkv_bias=True, rope_scaling="yarn", **LONGER
    ),
    "Qwen3ForCausalLM, biases": ModelConfig(width=48, depth=2, heads=4, qk_norm=True, qkv_bias=True, head_size=32),
    "MixtralForCausalLM": ModelConfig(width=48, depth=2, heads=4, kv_heads=2, **CHOSEN),
    "MixtralForCausalLM, window, untied": ModelConfig(
        width=48, depth=2, heads=4, window=7, tied_embeddings=False, **CHOSEN
    ),
    "Qwen3MoeForCausalLM": ModelConfig(width=48, depth=3, heads=4, qk_norm=True, dense_layers=1, **CHOSEN),
    "Qwen3MoeForCausalLM, window, biases, free gates": ModelConfig(
        width=48, depth=2, heads=4, window=7, qk_norm=True, qkv_bias=True, gates_normalised=False, **CHOSEN
    ),
    "Glm4MoeForCausalLM": ModelConfig(width=48, depth=2, heads=4, kv_heads=2, **MIXED),
    "Glm4MoeForCausalLM, shared, dense, norms, biases": ModelConfig(
        width=48, depth=3, heads=4, shared_experts=2, dense_layers=1, qk_norm=True, qkv_bias=True, head_size=16, **MIXED
    ),
    "Glm4MoeForCausalLM, unbiased, free gates, yarn": ModelConfig(
        width=48, depth=2, heads=4, balance_rate=0.0, gates_normalised=False, rope_scaling="yarn", **MIXED, **LONGER
    ),
}


def checkpoint(
    root: Path, model: ModelConfig, tokenizer: Tokenizer | None = None, separate: bool = False, seed: int = 0
) -> Path:
    """A checkpoint of random weights in which no norm is 1 and no head is 0; muP's multiplier is no power of two."""
    tokenizer = tokenizer or ByteTokenizer()
    config = RunConfig(
        model=replace(model, vocab_size=tokenizer.vocab_size),
        data=DataConfig(sequence_length=LENGTH, separate_documents=separate),
        optimizer=OptimizerConfig(base_width=20),
        checkpoint=CheckpointConfig(asynchronous=False),
    )
    gpt = build_model(config.model, config.optimizer, LENGTH, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if name.endswith("balance"):
                parameter.uniform_(-0.2, 0.2, generator=generator)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("router.weight"):
                parameter.normal_(std=0.2, generator=generator)
            elif name.startswith("head"):
                parameter.normal_(std=0.1, generator=generator)
    return Saver(root, ALONE, config, tokenizer).save(7, whole_weights(gpt), {})


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bpe")
    text = " ".join(f"the scaling law {n} of größe 漢字 <|endoftext|> falls" for n in range(400))
    (folder / "text.txt").write_text(text)
    config = DataConfig(corpus="text", path=str(folder / "text.txt"), tokenizer="bpe", vocab_size=320)
    return load_tokenizer(config, None, folder / "cache")


def logits_of_both(path: Path, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and transformers' on the same random tokens, (batch, time, vocabulary)."""
    from transformers import AutoModelForCausalLM

    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info  # nothing is missing, and nothing is left over
    theirs, ours = theirs.eval(), load_for_evaluation(path)
    size = ours.config.model.vocab_size
    assert size is not None
    tokens = torch.randint(size, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return ours.model(tokens)[..., :size], theirs(tokens).logits


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", SHAPES[name])
    exported = export_checkpoint(path, tmp_path / "out")
    assert exported.architecture == name.split(",")[0]
    ours, theirs = logits_of_both(path, exported.folder)
    # No column of theirs is left over: the padding of the vocabulary is not there to be predicted.
    assert ours.shape == theirs.shape
    assert ours.std() > 0.5
    assert (ours - theirs).abs().max() < (CLOSE if SHAPES[name].experts else SAME)


def test_a_window_one_token_wider_would_be_seen(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", SHAPES["MistralForCausalLM"])
    folder = export_checkpoint(path, tmp_path / "out").folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 8}))
    ours, theirs = logits_of_both(path, folder)
    assert (ours - theirs).abs().max() > 100 * SAME


def test_a_window_as_long_as_the_context_hides_nothing_and_is_no_window(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", ModelConfig(width=32, depth=1, heads=2, window=LENGTH))
    assert export_checkpoint(path, tmp_path / "out").architecture == "LlamaForCausalLM"


def test_documents_kept_apart_are_the_same_one_at_a_time_and_the_card_says_so(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = checkpoint(tmp_path / "checkpoints", SHAPES["LlamaForCausalLM"], separate=True)
    folder = export_checkpoint(path, tmp_path / "out").folder
    ours, theirs = load_for_evaluation(path), AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(255, (2, LENGTH), generator=torch.Generator().manual_seed(3))  # none ends a document
    with torch.no_grad():
        assert (ours.model(tokens) - theirs(tokens).logits).abs().max() < SAME
        tokens[:, LENGTH // 2] = 255
        assert (ours.model(tokens) - theirs(tokens).logits).abs().max() > 100 * SAME
    card = (folder / "README.md").read_text()
    assert "give it one document at a time" in card
    assert f"The output multiplier of muP, {ours.model.output_scale:g}," in card


def test_the_commands_write_and_read_what_they_say(tmp_path: Path) -> None:
    from isoflop.sweeps.cli.checkpoint import app
    from typer.testing import CliRunner

    checkpoint(tmp_path / "run" / "checkpoints", ModelConfig(width=16, depth=1, heads=2))
    said = CliRunner().invoke(app, ["export", f"{tmp_path}/run", f"{tmp_path}/out", "--dtype", "bf16", "--json"])
    written = json.loads(said.output)
    assert written["architecture"] == "LlamaForCausalLM"
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md"} <= set(written["files"])
    said = CliRunner().invoke(app, ["import", f"{tmp_path}/out", f"{tmp_path}/back", "--sequence-length", "9"])
    assert said.exit_code == 0, said.output
    assert load_for_evaluation(tmp_path / "back").config.data.sequence_length == 9


def test_bf16_weights_are_ours_rounded(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", SHAPES["Qwen3ForCausalLM"])
    wide = load_file(export_checkpoint(path, tmp_path / "wide").folder / "model.safetensors")
    narrow = load_file(export_checkpoint(path, tmp_path / "narrow", dtype="bf16").folder / "model.safetensors")
    assert narrow.keys() == wide.keys()
    assert all(torch.equal(narrow[name], wide[name].bfloat16()) for name in wide)
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"


def test_text_that_spells_a_special_token_and_any_other_has_the_same_ids_on_both_sides(
    tmp_path: Path, bpe: Tokenizer
) -> None:
    from transformers import AutoTokenizer

    rng = random.Random(0)
    texts = ["", " ", "a  b\n\t c", "<|endoftext|> is text", " 😀 größe 漢字\u200b", "the scaling law 17 of"]
    texts += ["".join(chr(rng.choice([rng.randrange(0x20, 0xD800), rng.randrange(256)])) for _ in range(200))
              for _ in range(20)]  # fmt: skip
    for kind, tokenizer in {"bytes": ByteTokenizer(), "bpe": bpe}.items():
        path = checkpoint(tmp_path / kind, ModelConfig(width=16, depth=1, heads=2), tokenizer)
        theirs = AutoTokenizer.from_pretrained(export_checkpoint(path, tmp_path / f"hf-{kind}").folder)
        assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.end_of_document
        assert theirs.model_max_length == LENGTH
        for text in texts:
            ids = theirs(text, add_special_tokens=True)["input_ids"]
            assert ids == tokenizer.encode(text).tolist()
            assert theirs.decode(ids) == tokenizer.decode(ids) == text
        for _ in range(20):  # ids that are no text: half characters, ends of documents
            ids = [rng.randrange(tokenizer.vocab_size) for _ in range(50)]
            assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
        assert theirs.decode([tokenizer.end_of_document]) == "<|endoftext|>"


def test_the_visible_characters_of_bytes_are_those_of_the_library() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(byte_characters()) == set(ByteLevel.alphabet())
    split = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for text in ("".join(map(chr, range(1, 128))), "ÀéĀ漢😀"):
        said = "".join(piece for piece, _ in split(text))
        assert said == "".join(byte_characters()[byte] for byte in text.encode())


@pytest.mark.parametrize("name", SHAPES)
def test_export_import_export_gives_the_same_files(name: str, tmp_path: Path, bpe: Tokenizer) -> None:
    tokenizer = bpe if "Qwen3" in name else ByteTokenizer()
    path = checkpoint(tmp_path / "checkpoints", SHAPES[name], tokenizer)
    first = export_checkpoint(path, tmp_path / "first").folder
    back = load_for_evaluation(import_checkpoint(first, tmp_path / "back"))
    assert type(back.tokenizer) is type(tokenizer)
    assert back.tokenizer.fingerprint == tokenizer.fingerprint
    second = export_checkpoint(tmp_path / "back", tmp_path / "second").folder
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (first / file).read_text() == (second / file).read_text(), file


def random_hf(folder: Path, kind: str, gain: float = 8.0, fused: bool = False, **changes: Any) -> Any:
    """A random transformers model in a folder, with a byte tokenizer beside it; returns the model.

    `fused`: the matrices of all experts of a layer are written as one tensor, not as one for each.

    `gain` times the matrices that transformers draws, with which logits grow, and what rounding does to them.
    """
    import transformers

    shape = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 12,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**shape | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.mul_(gain)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # of either sign, but for the output's, which we do not have
                parameter.mul_(0) if "o_proj" in name else parameter.sub_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    model.save_pretrained(folder, save_original_format=not fused)
    source = checkpoint(folder.with_name("source"), ModelConfig(width=16, depth=1, heads=2))
    tokenizer = export_checkpoint(source, folder.with_name("tokenizer"), overwrite=True).folder
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
    return model


IMPORTS: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    "Llama tied": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Qwen3 window": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    "Mistral": {"sliding_window": None},
    "Mistral window": {"sliding_window": 9},
}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_model_of_transformers_computes_the_same_here(name: str, tmp_path: Path) -> None:
    theirs = random_hf(tmp_path / "hf", name.split()[0], **IMPORTS[name])
    ours = load_for_evaluation(import_checkpoint(tmp_path / "hf", tmp_path / "ours"))
    tokens = torch.randint(300, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = theirs(tokens).logits, ours.model(tokens)
    assert expected.std() > 0.5
    assert (logits[..., :300] - expected).abs().max() < SAME
    assert logits[..., 300:].isneginf().all()
    assert ours.config.data.sequence_length == LENGTH


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 3.0, "original_max_position_embeddings": 32,
}  # fmt: skip
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTRAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 16}
GLM_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0},
}  # fmt: skip
RELEASES: dict[str, dict[str, Any]] = {
    "Llama heads of another size": {"head_dim": 20},
    "Llama 3.1": {"head_dim": 32, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "Llama yarn": {"head_dim": 32, "rope_parameters": YARN},
    "Llama biases": {"attention_bias": True},
    "Qwen2": {"head_dim": 16},
    "Qwen2 yarn window": {
        "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0,
        "rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5},
    },
    "Qwen3 yarn": {"head_dim": 32, "rope_parameters": YARN | {"attention_factor": 1.5, "beta_slow": 0.5}},
    "Qwen3 biases": {"head_dim": 32, "attention_bias": True},
    "Mistral window heads": {"head_dim": 32, "sliding_window": 9},
    "Mistral yarn": {"head_dim": 32, "sliding_window": None, "rope_parameters": YARN | {"beta_fast": None}},
    "Mixtral": MIXTRAL_EXPERTS,
    "Mixtral fused": {"num_local_experts": 6, "sliding_window": 9, "num_experts_per_tok": 3, "fused": True},
    "Qwen3Moe": {**QWEN_EXPERTS, "norm_topk_prob": True},
    "Qwen3Moe fused": {**QWEN_EXPERTS, "fused": True},
    "Qwen3Moe dense below": {**QWEN_EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1, 0], "head_dim": 32},
    "Qwen3Moe biases window": {
        **QWEN_EXPERTS, "attention_bias": True, "use_sliding_window": True, "sliding_window": 9,
    },
    "Glm4Moe": GLM_EXPERTS,
    "Glm4Moe fused": {**GLM_EXPERTS, "fused": True, "first_k_dense_replace": 0, "n_shared_experts": 2},
    "Glm4Moe unnormalised": {**GLM_EXPERTS, "norm_topk_prob": False, "n_shared_experts": 0},
    "Glm4Moe norms biases yarn": {
        **GLM_EXPERTS, "use_qk_norm": True, "attention_bias": True, "head_dim": 32,
        "rope_parameters": YARN | {"partial_rotary_factor": 1.0},
    },
}  # fmt: skip
# Both sides compute in fp32, theirs with angles of fp32 too: up to 63 radians within 4e-6. Logits reach about 3 here.
CLOSE = 1e-5


@pytest.mark.parametrize("name", RELEASES)
def test_a_current_release_computes_and_writes_the_same_here_and_again_there(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = random_hf(tmp_path / "hf", name.split()[0], gain=4.0, **RELEASES[name])
    ours = load_for_evaluation(import_checkpoint(tmp_path / "hf", tmp_path / "ours"))
    folder = export_checkpoint(tmp_path / "ours", tmp_path / "out").folder
    card = (folder / "README.md").read_text()
    assert ("biases on queries, keys and values" in card) == ("Qwen2" in name or "biases" in name)
    assert ("rotary positions by yarn with factor 4" in card) == ("yarn" in name)
    back, again = (
        load_for_evaluation(import_checkpoint(folder, tmp_path / "back")).model,
        AutoModelForCausalLM.from_pretrained(folder).eval(),
    )
    tokens = torch.randint(300, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = theirs(tokens).logits, ours.model(tokens)
        assert expected.std() > 0.3
        assert (logits[..., :300] - expected).abs().max() < CLOSE
        assert (again(tokens).logits - expected).abs().max() < CLOSE
        assert torch.equal(back(tokens), logits)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.model.state_dict().values(), back.state_dict().values(), strict=True)
    )
    prompts = [tokens[row, : 5 + 9 * row].tolist() for row in range(4)]
    generation, written = Generation(ours.model.eval(), prompts, 20, LENGTH, page=4), {}
    while not generation.over:
        written |= {request.index: request.new for request in generation.step(lambda new: False)}
    for number, prompt in enumerate(prompts):
        text = list(prompt)
        for _ in range(20):
            with torch.no_grad():
                text.append(int(theirs(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        assert written[number] == text[len(prompt) :]


@pytest.mark.parametrize(
    ("kind", "changes", "mistake"),
    [
        ("Llama", {"head_dim": 32, "rope_parameters": LLAMA3}, {"rope_fast": 4.0}),
        ("Llama", {"head_dim": 32, "rope_parameters": YARN}, {"rope_attention": 1.0}),
        ("Qwen2", {}, "key biases for query biases"),
        ("Qwen2", {}, "biases head by head"),
        ("Qwen3Moe", {**QWEN_EXPERTS, "norm_topk_prob": True}, {"gates_normalised": False}),
        ("Mixtral", MIXTRAL_EXPERTS, {"experts_per_token": 3}),
        ("Mixtral", MIXTRAL_EXPERTS, "gate for up"),
        ("Mixtral", MIXTRAL_EXPERTS, "experts in another order"),
        ("Glm4Moe", GLM_EXPERTS, "other biases of the choice"),
        ("Glm4Moe", GLM_EXPERTS, {"gate": "softmax"}),
    ],
    ids=str,
)
def test_a_mistake_in_what_releases_need_would_be_seen(
    kind: str, changes: dict[str, Any], mistake: dict[str, Any] | str, tmp_path: Path
) -> None:
    theirs = random_hf(tmp_path / "hf", kind, gain=4.0, **changes)
    model = load_for_evaluation(import_checkpoint(tmp_path / "hf", tmp_path / "ours")).model
    if isinstance(mistake, dict):
        model.config = replace(model.config, **mistake)
        for moe in model.mixtures:
            moe.router.config = model.config
        model.place_angles()
    elif model.mixtures:
        for router, experts in [(moe.router, moe.experts) for moe in model.mixtures]:
            matrix = experts.gate_up.weight.data
            halves = matrix.view(6, 2, -1, 48)
            match mistake:
                case "gate for up":
                    matrix.copy_(halves.flip(1).reshape(matrix.shape))
                case "experts in another order":
                    matrix.copy_(halves.roll(1, 0).reshape(matrix.shape))
                case _:
                    assert router.balance is not None
                    router.balance.data.zero_()
    else:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # of 4 query heads, 2 key heads and 2 value heads of 12
                heads = parameter.detach().view(8, 12)
                order = [4, 5, 2, 3, 0, 1, 6, 7] if "key" in mistake else [0, 1, 4, 6, 2, 3, 5, 7]
                parameter.data = heads[order].flatten()
    tokens = torch.randint(300, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (model(tokens)[..., :300] - theirs(tokens).logits).abs().max() > 100 * CLOSE


def test_an_older_release_says_its_scaling_elsewhere(tmp_path: Path) -> None:
    theirs = random_hf(tmp_path / "hf", "Llama", head_dim=32, rope_parameters=LLAMA3)
    wanted = load_for_evaluation(import_checkpoint(tmp_path / "hf", tmp_path / "new")).config.model
    assert (wanted.rope_scaling, wanted.rope_factor, wanted.rope_length) == ("llama3", 4.0, 32)
    file = tmp_path / "hf" / "config.json"
    described = json.loads(file.read_text())
    rope = described.pop("rope_parameters")
    described |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": rope.pop("rope_type")}}
    file.write_text(json.dumps(described))
    assert load_for_evaluation(import_checkpoint(tmp_path / "hf", tmp_path / "old")).config.model == wanted
    # Without a context before, transformers takes the whole one; a factor of null is what they differ by.
    described["rope_scaling"] = {"type": "yarn", "factor": None, "original_max_position_embeddings": 16}
    file.write_text(json.dumps(described))
    yarn = load_for_evaluation(import_checkpoint(tmp_path / "hf", tmp_path / "yarn")).config.model
    assert (yarn.rope_scaling, yarn.rope_factor, yarn.rope_length, yarn.rope_fast) == ("yarn", LENGTH / 16, 16, 32.0)
    assert theirs.config.rope_parameters["rope_type"] == "llama3"


def test_weights_in_several_files_and_a_shorter_context_are_read(tmp_path: Path) -> None:
    random_hf(tmp_path / "hf", "Llama")
    whole = load_file(tmp_path / "hf" / "model.safetensors")
    names = sorted(whole)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: whole[key] for key in keys}, tmp_path / "hf" / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    one = load_for_evaluation(import_checkpoint(tmp_path / "hf", tmp_path / "one", sequence_length=10))
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    several = load_for_evaluation(import_checkpoint(tmp_path / "hf", tmp_path / "several"))
    assert one.model.max_length == 10
    for (name, left), (_, right) in zip(one.model.named_parameters(), several.model.named_parameters(), strict=True):
        assert torch.equal(left, right), name


def test_another_end_than_config_json_says_is_refused_where_no_tokenizer_config_decides(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoints", ModelConfig(width=16, depth=1, heads=2))
    folder = export_checkpoint(source, tmp_path / "hf").folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, 9]}))
    import_checkpoint(folder, tmp_path / "named")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"eos_token_id is \[7, 9\] in config.json, and id 255 ends a document"):
        import_checkpoint(folder, tmp_path / "guessed")
    assert not (tmp_path / "guessed").exists()
    for fitting in ([7, 255], 255, None):
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": fitting}))
        import_checkpoint(folder, tmp_path / "guessed", overwrite=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "head_dim": ({"head_dim": 16}, r"q_proj.weight has shape \(48, 48\); its config.json says \(64, 48\)"),
    "odd heads": ({"head_dim": 7}, "model.head_size is 7; it must be even"),
    "bias": ({"attention_bias": True}, "have no model.layers.0.self_attn.q_proj.bias"),
    "mlp": ({"mlp_bias": True}, "mlp_bias is True"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu' in config.json; only 'silu' can be imported"),
    "scaling": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is .* default, llama3 or yarn"),
    "layered": ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters is .* llama3 or yarn"),
    "factor": ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "model.rope_factor is 0.5; it must be 1 or more"),
    "missing": (
        {"rope_scaling": {"type": "llama3"}},
        "factor is not in rope_scaling of config.json; it",
    ),
    "huge": ({"rope_scaling": {"type": "yarn", "factor": 10**400}}, "factor is 10{400} in rope_scaling of config.json"),
    "context": (
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1.5}},
        "original_max_position_embeddings is 1.5 in config.json; it must be a whole number",
    ),
    "truncate": ({"rope_scaling": {"type": "yarn", "truncate": False}}, "truncate is False in rope_scaling of"),
    "share": ({"rope_scaling": {"type": "yarn", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5 in rope"),
    "odd": ({"rope_scaling": "default"}, "rope_scaling is 'default'"),
    "experts": ({"num_local_experts": 8}, "num_local_experts is 8"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    "kind": ({"model_type": "gpt2"}, "model_type is 'gpt2' in config.json; it must be one of llama, mistral, qwen2"),
    "size": ({"hidden_size": "48"}, "hidden_size is '48'"),
    "length": ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    "vocabulary": ({"vocab_size": 200}, "vocab_size is 200 in config.json; tokenizer.json has ids up to 255"),
    "depth": ({"num_hidden_layers": 3}, "have no model.layers.2"),
    "fewer": ({"num_hidden_layers": 1}, "have model.layers.1.*, which our model has no place for"),
    "width": ({"intermediate_size": 72}, r"shape \(80, 48\); its config.json says \(72, 48\)"),
    "layers": (
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "layer_types is .* every layer's or none's",
    ),
}


def test_a_model_of_hugging_face_is_no_checkpoint_and_the_answer_says_what_makes_one(tmp_path: Path) -> None:
    random_hf(tmp_path / "hf", "Llama")
    with pytest.raises(UserError, match=r"hf is a model of Hugging Face; `isoflop import .*hf FOLDER` makes a"):
        find(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "gpt2", "n_positions": 1024}')
    with pytest.raises(UserError, match=r"model_type is 'gpt2' in config\.json"):
        import_checkpoint(tmp_path / "hf", tmp_path / "out")


def test_what_our_model_cannot_compute_is_refused_by_its_field(tmp_path: Path) -> None:
    random_hf(tmp_path / "hf", "Llama")
    file = tmp_path / "hf" / "config.json"
    described = json.loads(file.read_text())
    described.pop("rope_parameters", None)
    for name, (change, sentence) in REFUSED.items():
        file.write_text(json.dumps(described | change))
        with pytest.raises(UserError, match=sentence):
            import_checkpoint(tmp_path / "hf", tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "source", "tokenizer"], name
    file.write_text(json.dumps(described))
    with pytest.raises(UserError, match="--sequence-length is 65; it must be 1 to max_position_embeddings 64"):
        import_checkpoint(tmp_path / "hf", tmp_path / "out", sequence_length=65)
    for missing, sentence in (("model.safetensors", "only safetensors"), ("tokenizer.json", "has no tokenizer.json"),
                              ("config.json", "has no config.json")):  # fmt: skip
        (tmp_path / "hf" / missing).unlink()
        with pytest.raises(UserError, match=sentence):
            import_checkpoint(tmp_path / "hf", tmp_path / "out")


ODD_EXPERTS: dict[str, dict[str, tuple[Any, str]]] = {
    "Mixtral": {
        "router_jitter_noise": (0.1, "router_jitter_noise is 0.1 in config.json; only 0.0 can be imported"),
        "num_local_experts": (1, "model.experts is 1; it must be 2 or more"),
        "num_experts_per_tok": (7, "model.experts_per_token is 7; it must be 1 to model.experts 6"),
        "model_type": ("llama", "num_local_experts is 6 in config.json; a llama that has it cannot be imported"),
    },
    "Qwen3Moe": {
        "decoder_sparse_step": (2, "decoder_sparse_step is 2 in config.json; only 1 can be imported"),
        "mlp_only_layers": ([1], r"mlp_only_layers is \[1\] in config.json; they must be the first ones"),
        "num_local_experts": (7, r"layers.0.mlp.gate.weight has shape \(6, 48\); its config.json says \(7, 48\)"),
        "moe_intermediate_size": (24, r"experts.0.gate_proj.weight has shape \(16, 48\); its config.json says \(24, "),
        "num_experts_per_tok": (None, "num_experts_per_tok is not in config.json; it must be a whole number from 1"),
    },
    "Glm4Moe": {
        "routed_scaling_factor": (2.5, "routed_scaling_factor is 2.5 in config.json; only 1.0 can be imported"),
        "n_group": (2, "n_group is 2 in config.json; only 1 can be imported"),
        "rope_parameters": ({"rope_theta": 1e3}, "partial_rotary_factor is 0.5 in config.json; only 1.0 can be"),
        "norm_topk_prob": ("no", r"Expected bool, got str at \$.norm_topk_prob"),
        "first_k_dense_replace": (2, "model.dense_layers is 2; it must be 0 to 1"),
        "n_routed_experts": (5, r"layers.1.mlp.gate.weight has shape \(6, 48\); its config.json says \(5, 48\)"),
        "n_shared_experts": (-1, "model.shared_experts is -1; it must be 0 or more"),
    },
}


EXPERTS = [("Mixtral", MIXTRAL_EXPERTS), ("Qwen3Moe", QWEN_EXPERTS), ("Glm4Moe", GLM_EXPERTS)]


@pytest.mark.parametrize(("kind", "shape"), EXPERTS)
def test_a_mixture_that_is_none_of_ours_is_refused_by_its_field(
    kind: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    random_hf(tmp_path / "hf", kind, **shape)
    file = tmp_path / "hf" / "config.json"
    described = json.loads(file.read_text())
    for field, (value, sentence) in ODD_EXPERTS[kind].items():
        file.write_text(json.dumps(described | {field: value}))
        with pytest.raises(UserError, match=sentence) as raised:
            import_checkpoint(tmp_path / "hf", tmp_path / "out")
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "out").exists()
    dense = {name: value for name, value in described.items() if name not in ("num_local_experts", "num_experts")}
    file.write_text(json.dumps(dense | {"model_type": "llama"}))
    with pytest.raises(UserError, match=r"have no model.layers.*, which its config.json calls for"):
        import_checkpoint(tmp_path / "hf", tmp_path / "out")
    random_hf(tmp_path / "hf", "Llama")
    file.write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"have no .*(moe.gate|mlp.gate|q_norm).weight, which its config.json calls"):
        import_checkpoint(tmp_path / "hf", tmp_path / "out")


LEFT_OUT: dict[str, set[str]] = {
    "Mixtral": {"rms_norm_eps", "rope_parameters", "sliding_window", "router_jitter_noise"},
    "Qwen3Moe": {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "num_local_experts", "use_sliding_window"},
    "Glm4Moe": {
        "norm_topk_prob",
        "n_shared_experts",
        "first_k_dense_replace",
        "rms_norm_eps",
        "use_qk_norm",
        "n_group",
    },
}


@pytest.mark.parametrize(("kind", "shape"), EXPERTS)
def test_what_a_config_leaves_out_is_what_transformers_takes_it_for(
    kind: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    random_hf(tmp_path / "hf", kind, gain=4.0, **shape)
    file = tmp_path / "hf" / "config.json"
    said = {name: value for name, value in json.loads(file.read_text()).items() if name not in LEFT_OUT[kind]}
    file.write_text(json.dumps(said | ({"num_experts": 6} if kind == "Qwen3Moe" else {})))  # as transformers 4 wrote
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ours = load_for_evaluation(import_checkpoint(tmp_path / "hf", tmp_path / "ours")).model
    tokens = torch.randint(300, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (ours(tokens)[..., :300] - theirs(tokens).logits).abs().max() < CLOSE


KEPT: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"balance_rate": 0.01}, "model.balance_rate is 0.01; to be .* as MixtralForCausalLM, it must be 0.0"),
    "shared": ({"shared_experts": 1}, "model.shared_experts is 1; to be exported with model.gate 'softmax' and "),
    "gates": ({"gates_normalised": False}, "model.gates_normalised is False; .* it must be True"),
    "dense": ({"dense_layers": 1}, "model.dense_layers is 1; .* it must be 0"),
    "queries": ({"qkv_bias": True}, "model.qkv_bias is True; .* it must be False"),
    "normed": ({"qk_norm": True, "shared_experts": 1}, "model.shared_experts is 1; .* as Qwen3MoeForCausalLM, it must"),
    "window": ({"gate": "sigmoid", "window": 7}, "model.window is 7; .* as Glm4MoeForCausalLM, it must be None"),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_mixture_that_no_architecture_computes_is_not_exported(name: str, tmp_path: Path) -> None:
    changes, sentence = KEPT[name]
    path = checkpoint(tmp_path / "checkpoints", ModelConfig(width=16, depth=2, heads=2, **CHOSEN | changes))
    with pytest.raises(UserError, match=sentence) as raised:
        export_checkpoint(path, tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{}, {"balance_rate": 0.0}, {"shared_experts": 1, "dense_layers": 1}], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_of_a_mixture_come_back_the_same_with_biases_or_without(
    changes: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "checkpoints", ModelConfig(width=20, depth=2, heads=2, **MIXED | changes))
    folder = export_checkpoint(path, tmp_path / "out", dtype=dtype).folder
    ours, back = (load_for_evaluation(one).model for one in (path, import_checkpoint(folder, tmp_path / "back")))
    assert (back.mixtures[0].router.balance is None) == ("balance_rate" in changes)
    for (name, before), (other, after) in zip(ours.named_parameters(), back.named_parameters(), strict=True):
        assert name == other
        wanted = before if dtype == "fp32" or name.endswith("balance") else before.bfloat16().float()
        assert torch.equal(wanted[:256], after[:256]), name  # what pads the vocabulary is not exported
    card = (folder / "README.md").read_text()
    assert "6 experts of width 16, of which a token chooses 2" in card
    assert "| C, 6 N_active D |" in card
    assert f"| N_active (what one token uses) | {count_parameters(ours.config).N_active:,} |" in card


def test_a_bias_on_the_output_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    random_hf(tmp_path / "hf", "Llama", attention_bias=True)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.o_proj.bias"][3] = 1e-3
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"^model.layers.1.self_attn.o_proj.bias is not 0; our model has no bias there"):
        import_checkpoint(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_training_does_not_go_on_from_an_imported_checkpoint(tmp_path: Path) -> None:
    from isoflop.train.parallel.layout import Held, whole_placement

    random_hf(tmp_path / "hf", "Llama")
    path = import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    loaded = load_for_evaluation(path)
    moments = [
        Held(name, "exp_avg", whole_placement(p.shape), 0, p.numel(), torch.zeros(p.numel()))
        for name, p in loaded.model.named_parameters()
    ]
    with pytest.raises(UserError, match=r"does not cover the model: it has no .*exp_avg"):
        restore_state(path, moments, loaded.config)


def test_a_folder_that_holds_something_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", ModelConfig(width=16, depth=1, heads=2))
    (tmp_path / "out").mkdir()
    export_checkpoint(path, tmp_path / "out")  # empty: no matter
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="out is not empty; choose another folder, or replace it with --overwrite"):
        export_checkpoint(path, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    with pytest.raises(UserError, match=r"out holds mine\.txt, which no export or import wrote, so it is not replaced"):
        export_checkpoint(path, tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "mine.txt").unlink()
    (tmp_path / "out" / "README.md").write_text("old")
    export_checkpoint(path, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "README.md").read_text() != "old"
    with pytest.raises(UserError, match="holds step_7, which is to be read"):
        export_checkpoint(path, path.parent, overwrite=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_text("")
    with pytest.raises(UserError, match=r"holds me\.jpg, which no export or import wrote"):
        export_checkpoint(path, tmp_path / "photos", overwrite=True)
    (tmp_path / "link").symlink_to("out")
    with pytest.raises(UserError, match="link is a link; it must be a folder, new or empty"):
        export_checkpoint(path, tmp_path / "link", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file; it must be a folder"):
        export_checkpoint(path, tmp_path / "file", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "file", "link", "out", "photos"]


def test_neither_a_run_nor_its_checkpoint_is_ever_replaced_and_an_import_is(tmp_path: Path) -> None:
    run, tiny = tmp_path / "run", ModelConfig(width=16, depth=1, heads=2)
    path = checkpoint(run / "checkpoints", tiny)
    other = checkpoint(tmp_path / "other", tiny, seed=1)
    exported = export_checkpoint(other, tmp_path / "hf").folder
    for output in (run, path):  # the run has nothing beside its checkpoints, as an import
        before = sorted(output.rglob("*"))
        with pytest.raises(UserError, match="which no export or import wrote, so it is not replaced"):
            import_checkpoint(exported, output, overwrite=True)
        with pytest.raises(UserError, match="which no export or import wrote, so it is not replaced"):
            export_checkpoint(other, output, overwrite=True)
        assert sorted(output.rglob("*")) == before
    first = import_checkpoint(exported, tmp_path / "imported")
    (first / "scores.json").write_text("{}")
    assert import_checkpoint(exported, tmp_path / "imported", overwrite=True) == first
    assert not (first / "scores.json").exists(), "of what was there"


def test_an_export_that_fails_leaves_the_old_folder_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "checkpoints", ModelConfig(width=16, depth=1, heads=2))
    before = export_checkpoint(path, tmp_path / "out").folder
    names = sorted(p.name for p in before.iterdir())

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("isoflop.evaluate.export.export.model_card", full)
    with pytest.raises(OSError, match="No space"):
        export_checkpoint(path, tmp_path / "out", overwrite=True)
    assert sorted(p.name for p in before.iterdir()) == names
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_a_format_or_a_dtype_that_there_is_not_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", ModelConfig(width=16, depth=1, heads=2))
    with pytest.raises(UserError, match="--format is 'onnx'; it must be hf"):
        export_checkpoint(path, tmp_path / "out", format="onnx")
    with pytest.raises(UserError, match=r"--format is 'gguf'; export with --format hf, and llama.cpp's convert_hf"):
        export_checkpoint(path, tmp_path / "out", format="gguf")
    with pytest.raises(UserError, match="--dtype is 'fp16'; it must be one of fp32, bf16"):
        export_checkpoint(path, tmp_path / "out", dtype="fp16")


def test_the_card_has_every_count_and_score_and_takes_no_markup_from_names(tmp_path: Path) -> None:
    loaded = load_for_evaluation(checkpoint(tmp_path / "checkpoints", SHAPES["LlamaForCausalLM"], separate=True))
    loaded.config.name = "<script>|*x* N1M_D2M_s0 &#95;"
    loaded.config.data.corpus, loaded.config.data.name = "hf", 'a/b: "c"'
    facts = Facts(
        scores={
            "held_out": {"val_loss": 1.25, "val_loss_se": 0.01, "val_bpb": 1.8},
            "tasks": {
                "piqa": {"acc": 0.5, "acc_se": 0.05, "gold_bpb": 1.5, "chance": 0.5, "items": 100, "shots": 0},
                "arc_easy": {
                    "acc": 0.5,
                    "items": 20,
                    "subset": {"of": 2376},
                    "truncated_items": 3,
                    "contaminated_items": 2,
                },
                "broken": {"acc": None, "withheld": "item 3: NaN", "items": 5},
            },
        },
        law={"form": "chinchilla", "predicted_loss": 1.3, "interval": (1.2, 1.4)},
        provenance={"isoflop_version": "0.0.9", "git_commit": "abc123", "git_dirty": True},
    )
    card = model_card(loaded, facts, ["Note."])
    count, tokens = count_parameters(loaded.config.model), 7 * loaded.config.batch_tokens
    numbers = [count.N_total, count.N_non_embedding, count.N_kaplan, tokens]
    flops = [6.0 * count.N_total * tokens, float(training_flops_per_token(loaded.config.model, LENGTH) * tokens)]
    assert all(f" {number:,} |" in card for number in numbers)
    assert all(f" {value:.4g} FLOPs |" in card for value in flops)
    for said in ("1.2500 ± 0.0100", "1.8000", "| piqa | 100 | 0 | 0.5000 ± 0.0500 | 1.5000 | 0.500 |  |",
                 "withheld: item 3: NaN", "| arc_easy | 20 of 2376 |",
                 "items whose prompt was cut to the context: 3; items that share text with the training data: 2",
                 "No licence is stated",
                 "1.3000 (95 %: 1.2000 to 1.4000)", "0.0.9, commit `abc123` with changes", "Note."):  # fmt: skip
        assert said in card, said
    title = card.split("\n# ")[1].splitlines()[0]
    assert title == "&#60;script&#62;&#124;&#42;x&#42; N1M_D2M_s0 &#38;&#35;95;, step 7"
    front = yaml.safe_load(card.split("---")[1])
    assert (front["library_name"], front["datasets"]) == ("transformers", ['a/b: "c"'])


def test_the_card_of_imported_weights_makes_up_no_training(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoints", ModelConfig(width=16, depth=1, heads=2))
    imported = import_checkpoint(export_checkpoint(source, tmp_path / "hf").folder, tmp_path / "imported")
    again = export_checkpoint(imported, tmp_path / "again", facts=Facts(version="1.2")).folder
    card = (again / "README.md").read_text()
    assert "how they were trained is not known here. Exported by isoflop 1.2." in card
    for invented in ("By isoflop", "learning_rate", "FLOPs |", "It was trained on"):
        assert invented not in card


def test_the_card_is_told_what_lies_around_the_checkpoint(tmp_path: Path) -> None:
    from isoflop import fit

    run = tmp_path / "runs" / "0123456789"
    path = checkpoint(run / "checkpoints", ModelConfig(width=16, depth=1, heads=2))
    assert facts_about(path).law is None  # there is nothing yet
    summary = {"step": 7, "N_total": 5e6, "D": 1e8, "val_loss": 1.5, "val_loss_se": 0.1, "val_bpb": 2.0}
    (run / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "sweep.yaml").write_text("isoflop_version: 0.0.9\ngit_commit: abc\n")
    N, D = (x.ravel() for x in np.meshgrid(np.geomspace(1e6, 1e8, 4), np.geomspace(1e7, 1e10, 4)))
    law = fit.ChinchillaLaw().fit(N, D, 1.7 + 400 / N**0.34 + 410 / D**0.28)
    (tmp_path / "fit").mkdir()
    law.to_json(tmp_path / "fit" / "law.json")
    facts = facts_about(path)
    assert facts.scores is not None
    assert facts.scores["held_out"] == {name: summary[name] for name in ("val_loss", "val_loss_se", "val_bpb")}
    assert facts.provenance["git_commit"] == "abc"
    assert facts.law == {"form": "chinchilla", "predicted_loss": law.predict(N=5e6, D=1e8), "interval": None}
    (run / "eval").mkdir()
    (run / "eval" / "step_7.json").write_text(json.dumps({"held_out": {"val_loss": 1.4}, "tasks": {"piqa": {}}}))
    facts = facts_about(path)
    assert facts.scores is not None
    assert facts.scores["held_out"]["val_loss"] == 1.4
    assert "piqa" in facts.scores["tasks"]
    (run / "summary.json").write_text(json.dumps(summary | {"step": 8}))  # of another checkpoint
    assert facts_about(path).law is None


def test_a_foreign_tokenizer_goes_out_as_it_came_in(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    random_hf(tmp_path / "hf", "Llama")
    folder = tmp_path / "hf"
    config = json.loads((folder / "config.json").read_text())
    config |= {"bos_token_id": 7, "eos_token_id": [255, 9], "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [255, 9], "temperature": 0.6}')
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"split_special_tokens": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    import_checkpoint(folder, tmp_path / "ours")
    out = export_checkpoint(tmp_path / "ours", tmp_path / "out").folder
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (out / file).read_bytes() == (folder / file).read_bytes(), file
    written = json.loads((out / "config.json").read_text())
    assert {name: written[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")} == {
        "bos_token_id": 7, "eos_token_id": [255, 9], "pad_token_id": None,
    }  # fmt: skip
    before, after = (AutoTokenizer.from_pretrained(path)("a<|endoftext|>b")["input_ids"] for path in (folder, out))
    assert before == after == [97, 255, 98]
    assert "the one that came with the weights" in (out / "README.md").read_text()
    export_checkpoint(tmp_path / "ours", tmp_path / "out", overwrite=True)


DEEP = "[" * 100_000
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"model_type": ["llama"]}, r"config.json is not .*: Expected str, got array at \$.model_type"),
    "type": ({"tie_word_embeddings": "no"}, r"Expected bool, got str at \$.tie_word_embeddings"),
    "window": ({"model_type": "mistral", "sliding_window": "wide"}, r"got str at \$.sliding_window"),
    "end": ({"eos_token_id": "x"}, r"at \$.eos_token_id"),
    "base": ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x' in rope_parameters of config.json; it must"),
    "context": ({"max_position_embeddings": 10**15}, "max_position_embeddings is 10{15} in .* to 16777216"),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 10{9} in .* from 1 to 10000"),
    "none": ({"vocab_size": None}, "vocab_size is not in config.json; it must be a whole number"),
    "keys": ({"num_key_value_heads": -2}, "kv_heads is -2"),
    "epsilon": ({"rms_norm_eps": -1}, "norm_eps is -1"),
}  # fmt: skip


def test_a_folder_of_wrong_types_and_sizes_is_one_sentence_and_nothing_is_written(tmp_path: Path) -> None:
    random_hf(tmp_path / "hf", "Llama")
    folder, file = tmp_path / "hf", tmp_path / "hf" / "config.json"
    described, tokens = json.loads(file.read_text()), (folder / "tokenizer.json").read_text()
    described.pop("rope_parameters", None)

    def refused(sentence: str) -> None:
        with pytest.raises(UserError, match=sentence) as raised:
            import_checkpoint(folder, tmp_path / "out")
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "out").exists()

    for change, sentence in ODD.values():
        file.write_text(json.dumps(described | change))
        refused(sentence)
    file.write_text(json.dumps({name: value for name, value in described.items() if name != "vocab_size"}))
    refused("vocab_size is not in config.json; it must be a whole number")
    for content, sentence in (
        ('{"a": ' + DEEP, "nested too deeply"),
        ("[]", "Expected object, got array"),
        ("{", "truncated"),
    ):
        file.write_text(content)
        refused(f"config.json is .*{sentence}")
    file.write_text(json.dumps(described))
    for ids in ('"id": 4294967290', '"id": -1'):
        (folder / "tokenizer.json").write_text(tokens.replace('"id": 255', ids, 1))
        refused("ids go from 0 to 16777215")
    (folder / "tokenizer.json").write_text(tokens.replace(": 5,", ": 4294967290,", 1))
    refused("it has the id 4294967290, and ids go from 0 to 16777215")
    (folder / "tokenizer.json").write_text('{"model": ' + DEEP)
    refused("tokenizer.json.*cannot be loaded")
    (folder / "tokenizer.json").write_text(tokens)
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")
    index = folder / "model.safetensors.index.json"
    for content, sentence in (
        ('{"weight_map": {"a": "../x.safetensors"}}', r"weight_map names '../x.safetensors' in .* of the same folder"),
        ('{"weight_map": {"a": 3}}', r"Expected str, got int at \$.weight_map"),
        ('{"x": ' + DEEP, "nested too deeply"),
        ("{}", "required field weight_map"),
    ):
        index.write_text(content)
        refused(sentence)


def test_weights_that_no_memory_holds_are_refused_by_their_header(tmp_path: Path) -> None:
    random_hf(tmp_path / "hf", "Llama")
    file, config = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "config.json"
    shapes = {name: [str(one.dtype), list(one.shape)] for name, one in load_file(file).items()}
    rows = 1 << 24
    offset, header = 0, {}
    for name, (_, shape) in shapes.items():
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            shape[0] = rows
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    written = json.dumps(header).encode()
    with file.open("wb") as sparse:
        sparse.write(len(written).to_bytes(8, "little") + written)
        sparse.truncate(8 + len(written) + offset)
    with pytest.raises(UserError, match=r"has shape \(16777216, 48\); its config.json says \(300, 48\)"):
        import_checkpoint(tmp_path / "hf", tmp_path / "out")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": rows}))
    memory = os.sysconf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sysconf", lambda name: 1000 if name == "SC_PHYS_PAGES" else memory(name))
        with pytest.raises(UserError, match=r"the weights take 6 GB in fp32; the memory here is 0 GB"):
            import_checkpoint(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
