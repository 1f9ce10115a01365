"""Export to Hugging Face: the same logits and ids, and one sentence for each model that cannot be exported."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from isoflop.evaluate.export.export import export_checkpoint
from isoflop.evaluate.export.model_card import Facts, model_card
from isoflop.sweeps.cli.checkpoint import facts_about
from isoflop.sweeps.cli.main import main
from isoflop.train.checkpoint.checkpoint import ALONE, load_for_evaluation, whole_weights
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from isoflop.train.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from isoflop.train.errors import UserError
from isoflop.train.flops import count_parameters, training_flops_per_token
from isoflop.train.model.parametrization import build_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from small_disk import disk_of

LENGTH = 64
# Both sides compute in fp32, in different orders; logits reach about 6 here, where a rounding is 5e-7.
SAME = 1e-4
# Routers sum few terms, and another choice of experts changes a logit much more.
CLOSE = 1e-5
MIXED: dict[str, Any] = {"experts": 6, "experts_per_token": 2, "expert_hidden": 16}
CHOSEN: dict[str, Any] = {**MIXED, "gate": "softmax", "balance_rate": 0.0}
LONGER: dict[str, Any] = {"rope_theta": 100.0, "rope_factor": 4.0, "rope_length": 32}
TINY = ModelConfig(width=16, depth=1, heads=2)
SHAPES = {
    "LlamaForCausalLM": ModelConfig(width=48, depth=3, heads=4),
    "LlamaForCausalLM, grouped, untied": ModelConfig(
        width=48, depth=3, heads=4, kv_heads=2, tied_embeddings=False, rope_theta=5e3, norm_eps=1e-6
    ),
    "Qwen3ForCausalLM": ModelConfig(width=48, depth=3, heads=4, kv_heads=2, qk_norm=True),
    "LlamaForCausalLM, heads of another size, llama3": ModelConfig(
        width=48, depth=2, heads=4, kv_heads=2, head_size=20, rope_scaling="llama3", **LONGER
    ),
    "MistralForCausalLM, yarn": ModelConfig(width=48, depth=2, heads=4, window=20, rope_scaling="yarn", **LONGER),
    "Qwen2ForCausalLM": ModelConfig(width=48, depth=2, heads=4, kv_heads=2, qkv_bias=True),
    "Qwen2ForCausalLM, yarn, window": ModelConfig(
        width=48, depth=2, heads=4, head_size=16, window=7, qkv_bias=True, rope_scaling="yarn", **LONGER
    ),
    "Qwen3ForCausalLM, window, biases": ModelConfig(
        width=48, depth=2, heads=4, window=7, qk_norm=True, qkv_bias=True, head_size=32
    ),
    "MixtralForCausalLM, window, untied": ModelConfig(
        width=48, depth=2, heads=4, kv_heads=2, window=7, tied_embeddings=False, **CHOSEN
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
    """Save a checkpoint of random weights: no norm is 1, no head is 0, muP's multiplier is no power of two."""
    tokenizer = tokenizer or ByteTokenizer()
    config = RunConfig(
        model=replace(model, vocab_size=tokenizer.vocab_size),
        data=DataConfig(sequence_length=LENGTH, separate_documents=separate),
        optimizer=OptimizerConfig(base_width=20),
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
    saver = Saver(root, ALONE, config, tokenizer)
    path = saver.save(7, whole_weights(gpt), {})
    saver.wait()
    return path


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bpe")
    text = " ".join(f"the scaling law {n} of größe 漢字 <|endoftext|> falls" for n in range(400))
    (folder / "text.txt").write_text(text)
    config = DataConfig(corpus="text", path=str(folder / "text.txt"), tokenizer="bpe", vocab_size=320)
    return load_tokenizer(config, None, folder / "cache")


def logits_of_both(path: Path, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return our logits and transformers' on the same random tokens, (batch, time, vocabulary)."""
    from transformers import AutoModelForCausalLM

    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info  # no weight is missing or unused
    theirs, ours = theirs.eval(), load_for_evaluation(path)
    size = ours.config.model.vocab_size
    assert size is not None
    tokens = torch.randint(size, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return ours.model(tokens)[..., :size], theirs(tokens).logits


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    model = SHAPES[name]
    path = checkpoint(tmp_path / "checkpoints", model)
    exported = export_checkpoint(path, tmp_path / "out")
    assert exported.architecture == name.split(",")[0]
    ours, theirs = logits_of_both(path, exported.folder)
    # Their logits have no extra column: the padding of the vocabulary is not exported.
    assert ours.shape == theirs.shape
    assert ours.std() > 0.5
    assert (ours - theirs).abs().max() < (CLOSE if model.experts else SAME)
    card = (exported.folder / "README.md").read_text()
    assert ("biases on queries, keys and values" in card) == model.qkv_bias
    assert ("yarn with factor 4" in card) == (model.rope_scaling == "yarn")
    assert ("6 experts of width 16, of which a token chooses 2" in card) == bool(model.experts)


def test_a_window_as_long_as_the_context_is_no_window(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", replace(TINY, window=LENGTH))
    assert export_checkpoint(path, tmp_path / "out").architecture == "LlamaForCausalLM"


def test_documents_kept_apart_are_the_same_one_at_a_time(tmp_path: Path) -> None:
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
    assert "give the model one document at a time" in card
    assert f"The output multiplier of muP, {ours.model.output_scale:g}," in card


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Glm4MoeForCausalLM"])
def test_bf16_weights_are_ours_rounded_but_for_biases_of_the_choice(name: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", SHAPES[name])
    wide = load_file(export_checkpoint(path, tmp_path / "wide").folder / "model.safetensors")
    narrow = load_file(export_checkpoint(path, tmp_path / "narrow", dtype="bf16").folder / "model.safetensors")
    assert narrow.keys() == wide.keys()
    for key, weight in wide.items():
        expected = weight if key.endswith("e_score_correction_bias") else weight.bfloat16()
        assert narrow[key].dtype == expected.dtype, key
        assert torch.equal(narrow[key], expected), key
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"


def test_any_text_has_the_same_ids_on_both_sides(tmp_path: Path, bpe: Tokenizer) -> None:
    from transformers import AutoTokenizer

    rng = random.Random(0)
    texts = ["", " ", "a  b\n\t c", "<|endoftext|> is text", " 😀 größe 漢字\u200b", "the scaling law 17 of"]
    texts += ["".join(chr(rng.choice([rng.randrange(0x20, 0xD800), rng.randrange(256)])) for _ in range(200))
              for _ in range(20)]  # fmt: skip
    for kind, tokenizer in {"bytes": ByteTokenizer(), "bpe": bpe}.items():
        path = checkpoint(tmp_path / kind, TINY, tokenizer)
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


KEPT: list[tuple[dict[str, Any], str]] = [
    ({"balance_rate": 0.01}, "balance_rate is 0.01"),
    ({"shared_experts": 1}, "shared_experts is 1"),
    ({"gates_normalised": False}, "gates_normalised is False"),
    ({"dense_layers": 1}, "dense_layers is 1"),
    ({"qkv_bias": True}, "qkv_bias is True"),
    ({"qk_norm": True, "shared_experts": 1}, "shared_experts is 1"),
    ({"gate": "sigmoid", "window": 7}, "window is 7"),
]


def test_a_mixture_that_no_architecture_computes_is_not_exported(tmp_path: Path) -> None:
    for number, (changes, field) in enumerate(KEPT):
        path = checkpoint(tmp_path / str(number), ModelConfig(width=16, depth=2, heads=2, **CHOSEN | changes))
        with pytest.raises(UserError, match=f"model.{field}") as raised:
            export_checkpoint(path, tmp_path / "out")
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "out").exists()


def test_only_what_an_export_wrote_is_ever_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path, out = checkpoint(tmp_path / "run" / "checkpoints", TINY), tmp_path / "out"
    other = checkpoint(tmp_path / "other", TINY, seed=1)
    out.mkdir()
    export_checkpoint(path, out)  # an empty folder is accepted
    (out / "README.md").write_text("old")
    export_checkpoint(path, out, overwrite=True)
    assert (out / "README.md").read_text() != "old"
    (out / "mine.txt").write_text("mine")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_text("")
    (tmp_path / "link").symlink_to("out")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"out is not empty; .* --overwrite"):
        export_checkpoint(path, out)
    for folder, reason in (
        (out, r"holds mine\.txt"),
        (tmp_path / "photos", r"holds me\.jpg"),
        (tmp_path / "link", "is a link"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "run", "holds checkpoints"),  # no run
        (path, "holds"),  # no checkpoint of a run
    ):
        with pytest.raises(UserError, match=reason):
            export_checkpoint(other, folder, overwrite=True)
    with pytest.raises(UserError, match="holds step_7, the checkpoint to export"):
        export_checkpoint(path, path.parent, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_that_fails_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", TINY)
    folder = export_checkpoint(path, tmp_path / "out").folder
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with disk_of(4096), pytest.raises((OSError, SafetensorError)):
        export_checkpoint(path, folder, overwrite=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_a_format_or_a_dtype_that_there_is_not_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", TINY)
    for options, reason in (
        ({"format": "onnx"}, "--format is 'onnx'"),
        ({"format": "gguf"}, "--format is 'gguf'.*convert_hf"),
        ({"dtype": "fp16"}, "--dtype is 'fp16'"),
    ):
        with pytest.raises(UserError, match=reason):
            export_checkpoint(path, tmp_path / "out", **options)


def test_import_and_folders_of_hugging_face_point_to_lm_eval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_checkpoint(checkpoint(tmp_path / "checkpoints", TINY), tmp_path / "hf").folder
    for arguments in (["import", f"{folder}", "out", "--overwrite"], ["evaluate", f"{folder}"]):
        monkeypatch.setattr("sys.argv", ["isoflop", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert "lm_eval --model hf --model_args pretrained=" in capsys.readouterr().err


def test_the_card_has_every_count_and_score_and_no_markup_of_names(tmp_path: Path) -> None:
    loaded = load_for_evaluation(checkpoint(tmp_path / "checkpoints", SHAPES["LlamaForCausalLM"], separate=True))
    loaded.config.name = "<script>|*x* N1M_D2M_s0 &#95;"
    loaded.config.data.corpus, loaded.config.data.name = "hf", 'a/b: "c"'
    tasks: dict[str, Any] = {
        "piqa": {"acc": 0.5, "acc_se": 0.05, "gold_bpb": 1.5, "chance": 0.5, "items": 100, "shots": 0},
        "arc_easy": {"acc": 0.5, "items": 20, "subset": {"of": 2376}, "contaminated_items": 2},
        "broken": {"acc": None, "withheld": "item 3: NaN", "items": 5},
    }
    scores = {"held_out": {"val_loss": 1.25, "val_loss_se": 0.01, "val_bpb": 1.8}, "tasks": tasks}
    law = {"form": "chinchilla", "predicted_loss": 1.3, "interval": (1.2, 1.4)}
    provenance = {"isoflop_version": "0.0.9", "git_commit": "abc123", "git_dirty": True}
    card = model_card(loaded, Facts(scores=scores, law=law, provenance=provenance))
    count, tokens = count_parameters(loaded.config.model), 7 * loaded.config.batch_tokens
    numbers = [count.N_total, count.N_non_embedding, count.N_kaplan, tokens]
    flops = [6.0 * count.N_total * tokens, float(training_flops_per_token(loaded.config.model, LENGTH) * tokens)]
    assert all(f" {number:,} |" in card for number in numbers)
    assert all(f" {value:.4g} FLOPs |" in card for value in flops)
    for text in ("1.2500 ± 0.0100", "1.8000", "| piqa | 100 | 0 | 0.5000 ± 0.0500 | 1.5000 | 0.500 |  |",
                 "withheld: item 3: NaN", "| arc_easy | 20 of 2376 |",
                 "items that share text with the training data: 2", "No licence is stated",
                 "1.3000 (95 %: 1.2000 to 1.4000)", "0.0.9, commit `abc123` with changes"):  # fmt: skip
        assert text in card, text
    title = card.split("\n# ")[1].splitlines()[0]
    assert title == "&#60;script&#62;&#124;&#42;x&#42; N1M_D2M_s0 &#38;&#35;95;, step 7"
    front = yaml.safe_load(card.split("---")[1])
    assert (front["library_name"], front["datasets"]) == ("transformers", ['a/b: "c"'])


def test_the_card_is_told_what_lies_around_the_checkpoint(tmp_path: Path) -> None:
    from isoflop import fit

    run = tmp_path / "runs" / "0123456789"
    run.mkdir(parents=True)
    path = checkpoint(run / "checkpoints", TINY)
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
