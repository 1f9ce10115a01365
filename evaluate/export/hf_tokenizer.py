"""Write our tokenizers as Hugging Face reads them, with the same ids for every text.

Special tokens are never read out of text (`split_special_tokens`). Bytes become a byte-level BPE without merges; the
byte 0xFF does not occur in UTF-8, so its id ends a document. That token is also the `bos_token`, as in GPT-2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from ...train.data.tokenizers import END_TOKENS, ByteTokenizer, Tokenizer
from ...train.files import write_json

_TOKENIZER, _CONFIG, _SPECIAL = TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def byte_characters() -> list[str]:
    """Return the visible character that byte-level tokenizers write for each byte (Radford et al. 2019, GPT-2)."""
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
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json to `folder`.

    Args:
        saved: Folder of the tokenizer in the checkpoint.
        longest: Context of the model in tokens.
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
