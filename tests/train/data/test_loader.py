"""The order of samples is a pure function of (seed, step), and every epoch reads every window once."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from isoflop.train.data.loader import TrainStream, bytes_of, permutation, validation_windows
from isoflop.train.data.shards import Shards
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError


def stream_of(tokens: npt.ArrayLike, path: Path | None = None) -> Shards:
    """Return shards with these tokens in both parts, in a memory map if there is a path."""
    array = np.asarray(tokens, np.uint16)
    if path is not None:
        array.tofile(path)
        array = np.memmap(path, np.uint16, "r")
    return cast(Shards, SimpleNamespace(train=array, validation=array, tokenizer=ByteTokenizer()))


# Token i is i, so that a window shows where it came from.
NUMBERS = np.arange(50_000, dtype=np.uint16)


def test_a_batch_is_what_the_definition_says(tmp_path: Path) -> None:
    # An independent implementation of the docstring, one sample at a time.
    length, batch_size, seed = 37, 11, 123
    stream = TrainStream(stream_of(NUMBERS[:1000], tmp_path / "t"), length, seed)
    windows = (1000 - 1) // length
    assert stream.unique_tokens == windows * length
    for step in (0, 1, 2, 3, 40):
        batch = stream.batch(step, batch_size)
        assert batch.dtype == np.int64
        assert batch.shape == (batch_size, length + 1)
        for row in range(batch_size):
            epoch, position = divmod(step * batch_size + row, windows)
            draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(windows).tolist()
            window = sorted(range(windows), key=draws.__getitem__)[position]
            assert batch[row].tolist() == list(range(window * length, (window + 1) * length + 1))


def test_ranks_and_micro_batches_read_slices_of_the_whole_batch() -> None:
    stream = TrainStream(stream_of(NUMBERS[:3000]), 16, 7)
    generator = random.Random(0)
    for _ in range(100):
        step, batch_size = generator.randrange(200), generator.randrange(1, 400)
        whole = stream.batch(step, batch_size)
        cuts = sorted({0, batch_size, *(generator.randrange(batch_size) for _ in range(4))})
        parts = [stream.batch(step, batch_size, a, b - a) for a, b in itertools.pairwise(cuts)]
        assert np.array_equal(np.concatenate(parts), whole)
        assert np.array_equal(stream.batch(step, batch_size, cuts[1]), whole[cuts[1] :])


@pytest.mark.parametrize("batch_size", [7, 1000])
def test_every_epoch_reads_every_window_once(batch_size: int) -> None:
    length = 8
    stream = TrainStream(stream_of(NUMBERS[:1601]), length, 11)
    n = 200
    assert stream.unique_tokens == n * length
    steps = -(-3 * n // batch_size)
    samples = np.concatenate([stream.batch(step, batch_size) for step in range(steps)])[: 3 * n]
    assert np.array_equal(np.diff(samples, axis=1), np.ones((3 * n, length)))
    epochs = samples[:, 0].reshape(3, n) // length
    assert all(np.array_equal(np.sort(epoch), np.arange(n)) for epoch in epochs)
    # Epochs and seeds differ, and none is the order of the file.
    orders = [*epochs, np.arange(n), TrainStream(stream_of(NUMBERS[:1601]), length, 12).batch(0, n)[:, 0] // length]
    assert len({order.tobytes() for order in (np.asarray(o, np.int64) for o in orders)}) == 5


def test_a_seed_may_be_any_integer() -> None:
    orders = {permutation(seed, 0, 50).tobytes() for seed in (0, 1, -1, 2**63, 2**64 - 2)}
    assert len(orders) == 5


def test_rows_outside_of_the_batch_are_refused() -> None:
    stream = TrainStream(stream_of(NUMBERS[:1000]), 8, 0)
    for arguments in ((0, 8, 7, 2), (-1, 8), (0, 8, -1), (0, 8, 9)):
        with pytest.raises(ValueError, match="outside of a batch of 8"):
            stream.batch(*arguments)


@pytest.mark.parametrize(("tokens", "length", "limit"), [(10_000, 32, 1000), (10_000, 32, 10**9), (33, 32, 32)])
def test_the_held_out_set_is_fixed_spread_and_without_overlap(tokens: int, length: int, limit: int) -> None:
    shards = stream_of(NUMBERS[:tokens])
    windows = validation_windows(shards, length, limit)
    assert windows.dtype == np.int64
    assert windows.shape == (min(limit // length, (tokens - 1) // length), length + 1)
    targets = windows[:, 1:].ravel()
    assert len(set(targets.tolist())) == len(targets) <= limit
    assert np.array_equal(np.diff(windows, axis=1), np.ones((len(windows), length)))
    assert np.array_equal(windows, validation_windows(shards, length, limit))
    # It reaches from the first window to the last stretch of the stream.
    gap = tokens / len(windows)
    assert windows[0, 0] == 0
    assert windows[-1, -1] >= tokens - 1 - gap - length


def test_bytes_of_counts_the_text_of_the_targets() -> None:
    tokenizer = ByteTokenizer()
    documents = ["Grüße", "😀", "plain!"]
    end = [tokenizer.end_of_document]
    tokens = np.concatenate([np.append(tokenizer.encode(document), end) for document in documents])
    assert bytes_of(tokens, tokenizer) == len("".join(documents).encode())
    assert bytes_of(tokens.reshape(2, -1)[:, 1:], tokenizer) == len("".join(documents).encode()) - 2


@pytest.mark.parametrize("tokens", [0, 1, 128])
def test_a_corpus_too_small_for_a_window_is_refused(tokens: int) -> None:
    shards = stream_of(NUMBERS[:tokens])
    for part, ask in {
        "training": lambda: TrainStream(shards, 128, 0),
        "validation": lambda: validation_windows(shards, 128, 10_000),
    }.items():
        sentence = f"data.sequence_length is 128; .*{part}.* {tokens} tokens"
        with pytest.raises(UserError, match=sentence):
            cast(Any, ask)()
