"""What scoring and generation do on a GPU only, on `meta` and a stand-in for CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gpu_stand_in import META, Gpu, kernels_on_meta, on_device, stand_in
from isoflop.evaluate import checkpoint
from isoflop.evaluate.inference import scoring
from isoflop.evaluate.inference.forward import unless_out_of_memory
from isoflop.evaluate.inference.generate import Generation, Sampling, generate_texts
from isoflop.evaluate.inference.scoring import Scorer
from isoflop.evaluate.inference.trees import Request
from isoflop.train import hardware
from isoflop.train.checkpoint import checkpoint as saved
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.model.gpt import GPT, sequence_losses
from isoflop.train.model.parametrization import build_model
from isoflop.train.parallel.mesh import Mesh

LENGTH = 48


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with kernels_on_meta():
        yield stand_in(monkeypatch)


def on_meta(dtype: torch.dtype, documents: bool = False, **model: Any) -> GPT:
    config = ModelConfig(**{"width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "vocab_size": 250} | model)
    gpt = build_model(config, OptimizerConfig(), LENGTH, seed=0)
    gpt.end_of_document = 255 if documents else None
    gpt.set_attention("auto", META, dtype)
    return gpt.to(device=META, dtype=dtype).eval()


def requests() -> list[Request]:
    """Return requests of which some share a prefix and one has no neighbour."""
    prefix = list(range(20))
    return [Request(prefix, [number, 7, 255, 9]) for number in range(4)] + [Request([3], [4]), Request([8] * 30, [1])]


VARIANTS = pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ({}, torch.float32),
        ({"qk_norm": True, "tied_embeddings": False}, torch.bfloat16),
        ({"kv_heads": 4, "documents": True, "window": 6}, torch.float32),
    ],
    ids=str,
)


@VARIANTS
def test_requests_are_scored_and_read_twice_a_batch(model: dict[str, Any], dtype: torch.dtype, gpu: Gpu) -> None:
    scorer = Scorer(on_meta(dtype, **model), META, 4096)
    with on_device(host_may_wait=True):
        scores = scorer.score(requests())
    assert scores == [(0.0, False)] * len(requests())
    read = [shape.numel() for shape in gpu.reads]
    assert read[::2] == read[1::2]  # nats, and whether greedy decoding would write it
    assert sum(read) == 2 * sum(len(request.continuation) for request in requests())


def test_whether_a_token_is_the_likeliest_needs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randint(4, (6, 5), generator=generator).float()  # the first of equal logits counts
        logits[0, 1] = float("nan")
        rows, targets = (torch.randint(n, (30,), generator=generator) for n in (6, 5))
        monkeypatch.setattr(scoring, "on_gpu", lambda _: False)
        hits = scoring._read(logits, rows, targets)[1]
        monkeypatch.setattr(scoring, "on_gpu", lambda _: True)
        assert torch.equal(scoring._read(logits, rows, targets)[1], hits)
        assert hits.any()
        assert not hits.all()


SAMPLINGS = [Sampling(), Sampling(0.7, top_k=5), Sampling(0.7, top_p=0.9)]


@VARIANTS
def test_texts_are_written_with_one_wait_a_token(model: dict[str, Any], dtype: torch.dtype, gpu: Gpu) -> None:
    """Prompts that fit, that outgrow the model and slide, and that wait for a row."""
    gpt = on_meta(dtype, **model)
    prompts = [[1, 2, 3], [5] * (LENGTH - 1), [255, 4] * 10]
    for sampling in SAMPLINGS:
        with on_device(host_may_wait=True):
            texts = generate_texts(
                gpt, prompts, 3, finished=lambda new: False, max_length=LENGTH, sampling=sampling, device=META
            )
        assert texts == [[0] * 3] * len(prompts)


def test_a_nucleus_is_looked_for_until_it_is_found(gpu: Gpu) -> None:
    gpt = on_meta(torch.float32, vocab_size=1000)
    gpu.answer = lambda x: torch.ones(x.shape, dtype=x.dtype) if not x.dim() else torch.zeros(x.shape, dtype=x.dtype)
    texts = generate_texts(
        gpt, [[1]], 2, finished=lambda new: False, max_length=LENGTH, sampling=Sampling(1.0, top_p=0.5), device=META
    )
    assert texts == [[0, 0]]
    assert [len(shape) for shape in gpu.reads] == [0, 0, 1, 1] * 2  # 64 tokens, 512, then all


def test_the_cache_takes_half_of_what_is_free(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt = on_meta(torch.bfloat16)
    monkeypatch.setattr(hardware.CUDA, "free_bytes", lambda device: 2 * 7 * 2 * 2 * 2 * 8 * 31 * 2)
    generation = Generation(gpt, [[1]] * 10, 30, LENGTH, device=META)
    assert generation.cache.rows == 7
    assert generation.cache.keys.is_meta
    with on_device(host_may_wait=True):  # three wait for a row
        while not generation.over:
            generation.step(lambda new: len(new) >= 8)


def test_memory_is_freed_when_nothing_holds_it_any_more(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    held, freed = list[Any](), list[bool]()
    monkeypatch.setattr(hardware.CUDA, "empty_cache", lambda: freed.append(held[0]() is None))

    def work() -> None:
        large = torch.empty(8, device=META)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert unless_out_of_memory(work, META) is None
    assert freed == [True]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_is_loaded_onto_the_device_and_scored(
    precision: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    model = ModelConfig(width=32, depth=2, heads=2, vocab_size=256)
    config = RunConfig(model=model, data=DataConfig(sequence_length=LENGTH, separate_documents=True))
    held = saved.whole_weights(build_model(config.model, config.optimizer, LENGTH, seed=0))
    saver = Saver(tmp_path, Mesh(), config, ByteTokenizer())
    saver.save(3, held, {})
    saver.close()
    loaded = checkpoint.load_scored(tmp_path / "step_3", "meta", checkpoint.PRECISIONS[precision])
    assert {x.device for x in (*loaded.model.parameters(), loaded.model.cos)} == {META}
    assert {x.dtype for x in loaded.model.parameters()} == {checkpoint.PRECISIONS[precision]}
    with on_device(host_may_wait=True):
        losses = sequence_losses(loaded.model, torch.from_numpy(np.zeros((3, LENGTH + 1), np.int64)))
    assert losses.shape == (3,)
    assert {name for name, _, _ in gpu.launched} == {"forward_kernel", "_rows"}  # documents apart: our own attention
