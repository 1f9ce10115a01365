"""Our tokenizers as Hugging Face reads them, and theirs as ours: the same ids on both sides, for every text.

Special tokens are never read out of text (`split_special_tokens`). Bytes become a byte-level BPE without merges; 0xFF
occurs in no UTF-8, so its id ends a document. That token also stands in for `bos_token`, as in GPT-2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from ...train.data.tokenizers import END_TOKENS, ByteTokenizer, Tokenizer, load_tokenizer
from ...train.errors import UserError
from ...train.files import read_json, write_json

TOKENIZER, TOKENIZER_CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
# All that transformers may read of a tokenizer.
TOKENIZER_FILES = {TOKENIZER, TOKENIZER_CONFIG, SPECIAL}
TOKENIZER_FILES |= {"added_tokens.json", "chat_template.jinja", "merges.txt", "tokenizer.model", "vocab.json"}


def byte_characters() -> list[str]:
    """The visible character by which byte-level tokenizers write each byte (Radford et al. 2019, GPT-2)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = (chr(256 + place) for place in range(256))
    return [chr(byte) if byte in visible else next(shifted) for byte in range(256)]


def byte_level_content() -> dict[str, Any]:
    end = ByteTokenizer.end_of_document
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("byte_level.yaml").read_text(encoding="utf-8"))
    content["added_tokens"][0] |= {"id": end, "content": END_TOKENS[0]}
    tokens = [*byte_characters()[:end], END_TOKENS[0]]
    content["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    return content


def write_tokenizer(tokenizer: Tokenizer, saved: Path, longest: int, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    `saved` is the folder in which a checkpoint keeps the tokenizer, `longest` the tokens that the model takes.
    """
    if isinstance(tokenizer, ByteTokenizer):
        content = byte_level_content()
    else:
        content = json.loads((saved / TOKENIZER).read_text(encoding="utf-8"))
    token = next(token["content"] for token in content["added_tokens"] if token["id"] == tokenizer.end_of_document)
    (folder / TOKENIZER).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    special = {"bos_token": token, "eos_token": token}
    config = {
        # Not LlamaTokenizer and its like, which put their own rules in place of the file's.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    write_json(folder / TOKENIZER_CONFIG, config)
    write_json(folder / SPECIAL, special)


def read_tokenizer(folder: Path, cache: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; one that is our bytes comes back as them.

    Raises UserError: there is no tokenizer.json, or it is not one, or nothing in it ends a document.
    """
    from ...train.config import DataConfig

    path = folder / TOKENIZER
    if not path.is_file():
        raise UserError(f"{folder} has no {TOKENIZER}; only tokenizers of the `tokenizers` library can be read")
    if read_json(path) == byte_level_content():
        return ByteTokenizer()
    return load_tokenizer(DataConfig(tokenizer=str(path)), None, cache)
