"""Learns a BPE in a process of its own, which can be watched and killed: texts come in, a JSON string per line.

What the library says of its progress goes out, and the tokenizer on the last line. Nothing of isoflop is imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def learn(vocab_size: int, end_of_document: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend: Any = Tokenizer(models.BPE())
    # GPT-2's rule for what a merge may span; no space is put in front, so that decoding gives the text back.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_document],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=hasattr(trainers.BpeTrainer, "progress_format"),  # since 0.23; the bar of before is for terminals
    )
    if trainer.show_progress:
        trainer.progress_format = "json"
    backend.train_from_iterator(map(json.loads, sys.stdin), trainer)
    print(backend.to_str())


if __name__ == "__main__":
    learn(int(sys.argv[1]), sys.argv[2])
