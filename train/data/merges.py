"""Train a BPE tokenizer in a separate process, which its parent can watch and kill.

Reads one JSON string per line. Writes the library's progress lines, then the tokenizer on the last line. Imports
nothing of isoflop.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def learn(vocab_size: int, end_of_document: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend: Any = Tokenizer(models.BPE())
    # GPT-2's rule for what a merge may span. No space is added in front, so that decoding restores the text.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_document],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=hasattr(trainers.BpeTrainer, "progress_format"),  # since 0.23; older ones need a terminal
    )
    if trainer.show_progress:
        trainer.progress_format = "json"
    backend.train_from_iterator(map(json.loads, sys.stdin), trainer)
    print(backend.to_str())


if __name__ == "__main__":
    learn(int(sys.argv[1]), sys.argv[2])
