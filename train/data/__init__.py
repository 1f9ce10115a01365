"""Text to tokens: corpora, tokenizers, memory-mapped shards and a deterministic order of samples."""
