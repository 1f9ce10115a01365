"""GGUF: transformers reads the file back as the same model, and what the format cannot say is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from isoflop.evaluate.export.export import export_checkpoint
from isoflop.train.checkpoint.checkpoint import load_for_evaluation
from isoflop.train.config import DataConfig, ModelConfig
from isoflop.train.data.tokenizers import Tokenizer, load_tokenizer
from isoflop.train.errors import UserError
from test_export import LENGTH, SAME, checkpoint

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary of which the corpus leaves the last ids unused."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text(" ".join(f"the scaling law {n} of größe" for n in range(50)))
    config = DataConfig(corpus="text", path=str(folder / "text.txt"), tokenizer="bpe", vocab_size=400)
    with pytest.warns(UserWarning, match="gives only"):
        return load_tokenizer(config, None, folder / "cache")


def read_back(file: Path, head_dim: int) -> torch.nn.Module:
    """What transformers makes of a GGUF file, by its own mapping and its own order of rows.

    Not by `from_pretrained`, which would need accelerate. It takes a Qwen3's heads for 128 wide whatever the file says.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.head_dim = head_dim
    model = AutoModelForCausalLM.from_config(config).eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(width=48, depth=2, heads=4, kv_heads=2),
        ModelConfig(width=48, depth=2, heads=4, tied_embeddings=False, rope_theta=5e3, norm_eps=1e-6),
        ModelConfig(width=48, depth=2, heads=4, kv_heads=1, qk_norm=True),
    ],
)
def test_transformers_reads_back_the_same_model(model: ModelConfig, tmp_path: Path, bpe: Tokenizer) -> None:
    path = checkpoint(tmp_path / "checkpoints", model, bpe)
    ours = load_for_evaluation(path)
    tokens = torch.randint(400, (4, LENGTH), generator=torch.Generator().manual_seed(2))
    for dtype, most in (("fp32", SAME), ("fp16", 0.02)):  # 11 bits of mantissa in each weight
        exported = export_checkpoint(path, tmp_path / dtype, format="gguf", dtype=dtype)
        assert exported.architecture == ("qwen3" if model.qk_norm else "llama")
        assert exported.files == ["README.md", f"model-{dtype}.gguf"]
        theirs = read_back(exported.folder / f"model-{dtype}.gguf", model.head_dim)
        with torch.no_grad():
            difference = (ours.model(tokens)[..., :400] - theirs(tokens).logits).abs().max()
        assert difference < most


def test_the_tokenizer_reads_back_and_unused_ids_have_names(tmp_path: Path, bpe: Tokenizer) -> None:
    from transformers import AutoTokenizer

    path = checkpoint(tmp_path / "checkpoints", ModelConfig(width=32, depth=1, heads=2), bpe)
    folder = export_checkpoint(path, tmp_path / "out", format="gguf").folder
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file="model-fp32.gguf")
    for text in ("the scaling law 17 of größe", "  漢字\n\t😀 x = 'y'  ", ""):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == bpe.encode(text).tolist()
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == bpe.end_of_document
    fields = gguf.GGUFReader(folder / "model-fp32.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert len(tokens) == len(set(tokens)) == len(kinds) == 400
    assert tokens[-1] == "[PAD399]"
    assert kinds[-1] == gguf.TokenType.UNUSED
    assert kinds[bpe.end_of_document] == gguf.TokenType.CONTROL
    assert fields["llama.context_length"].contents() == LENGTH


def test_the_file_is_the_same_every_time(tmp_path: Path, bpe: Tokenizer) -> None:
    path = checkpoint(tmp_path / "checkpoints", ModelConfig(width=32, depth=1, heads=2), bpe)
    first, second = (
        (export_checkpoint(path, tmp_path / name, format="gguf").folder / "model-fp32.gguf").read_bytes()
        for name in ("first", "second")
    )
    assert first == second


def test_what_gguf_cannot_say_is_refused_and_leaves_nothing(
    tmp_path: Path, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ModelConfig(width=32, depth=1, heads=2)
    with pytest.raises(UserError, match=r"data\.tokenizer is 'bytes'; a GGUF file describes byte-level BPE"):
        export_checkpoint(checkpoint(tmp_path / "a", plain), tmp_path / "out", format="gguf")
    narrow = checkpoint(tmp_path / "b", ModelConfig(width=32, depth=1, heads=2, window=8), bpe)
    with pytest.raises(
        UserError, match=r"model\.window is 8; GGUF's architectures of this shape have no sliding window"
    ):
        export_checkpoint(narrow, tmp_path / "out", format="gguf")
    path = checkpoint(tmp_path / "c", plain, bpe)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="gguf is not installed"):
        export_checkpoint(path, tmp_path / "out", format="gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


def test_another_rule_of_splitting_text_is_refused(tmp_path: Path, bpe: Tokenizer) -> None:
    import json

    from isoflop.train.data.tokenizers import SubwordTokenizer
    from tokenizers import Tokenizer as Backend

    bpe.save(tmp_path / "saved")
    content = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    content["pre_tokenizer"]["use_regex"] = False
    other = SubwordTokenizer(Backend.from_str(json.dumps(content)), bpe.end_of_document, bpe.vocab_size)
    path = checkpoint(tmp_path / "checkpoints", ModelConfig(width=32, depth=1, heads=2), other)
    with pytest.raises(UserError, match="GPT-2's rule for splitting text"):
        export_checkpoint(path, tmp_path / "out", format="gguf")
