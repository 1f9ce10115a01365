"""GPU-only code on `meta` with a stand-in for CUDA: every branch runs, on the device, in the right order."""

from __future__ import annotations

import copy
import dataclasses
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import isoflop.train.checkpoint.saver as saver_module
import isoflop.train.job.job as job_module
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gpu_stand_in import META, Gpu, kernels_on_meta, on_device, stand_in
from isoflop.train import hardware, loop
from isoflop.train.checkpoint.storage import Part, write_whole
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig
from isoflop.train.data.loader import TrainStream
from isoflop.train.data.prefetch import RING, Prefetch
from isoflop.train.data.shards import prepare
from isoflop.train.errors import Stopped
from isoflop.train.kernels.flash import HEAD_DIMS, flash_attention
from isoflop.train.model.gpt import GPT
from isoflop.train.parallel.mesh import Mesh, build_mesh
from isoflop.train.stepper import Stepper
from safetensors.torch import load_file
from torch.testing._internal.distributed.fake_pg import FakeStore

ROWS, LENGTH, STEPS = 4, 32, 2


@pytest.fixture(scope="module")
def base(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    return RunConfig(
        model=ModelConfig(width=32, depth=2, heads=2, vocab_size=256),
        data=dataclasses.replace(small_corpus(validation_tokens=1024), sequence_length=LENGTH),
        optimizer=OptimizerConfig(batch_size=ROWS, gradient_clip=0.5),
        schedule=ScheduleConfig(warmup_tokens=256, warmup_max_share=0.5),
        parallel=ParallelConfig(device="cpu"),
        tokens=STEPS * ROWS * LENGTH,
    )  # fmt: skip


@pytest.fixture
def config(base: RunConfig) -> RunConfig:
    return copy.deepcopy(base)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with kernels_on_meta():
        yield stand_in(monkeypatch)


def steps_of(config: RunConfig, gpu: Gpu, mesh: Mesh | None = None) -> Stepper:
    """Take a run's steps and assert that the host waits for nothing."""
    stream = TrainStream(prepare(config.data), config.data.sequence_length, config.seed)
    stepper = Stepper(config, mesh or Mesh(), META, stream, gpu.said.append)
    stepper.start()
    with on_device():
        for step in range(STEPS):
            result = stepper.step(step)
            for value in (result.loss, result.norm, result.skipped):
                assert value.is_meta
                assert value.dtype == torch.float32
    assert not gpu.reads
    return stepper


KERNELS_OF_A_STEP = ["forward_kernel"] * 2 + ["_rows"] + ["delta_kernel", "key_kernel", "query_kernel"] * 2


@pytest.mark.parametrize(("attention", "precision"), [("ours", "bf16"), ("sdpa", "fp32"), ("ours", "fp16")])
def test_a_step_waits_for_nothing(attention: str, precision: str, config: RunConfig, gpu: Gpu) -> None:
    config.precision, config.parallel.attention = precision, attention
    stepper = steps_of(config, gpu)
    assert gpu.said[0].startswith(f"attention: {attention} ")
    expected = KERNELS_OF_A_STEP if attention == "ours" else ["_rows"]
    assert [name for name, _, _ in gpu.launched] == expected * STEPS
    assert stepper.state()["updates"] == 0.0
    assert len(gpu.reads) == (3 if precision == "fp16" else 1)  # the first waits are those of a checkpoint
    gpu.reads.clear()
    with on_device(host_may_wait=True):
        losses = stepper.losses(torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64), lambda: None)
    assert losses.dtype == torch.float64
    assert gpu.reads == [(ROWS,)]


VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("ours", "fp32", {"parallel.micro_batch_size": 1, "optimizer.z_loss": 1e-4, "model.window": 8}),
    ("ours", "fp16", {"parallel.recompute": "selective", "parallel.micro_batch_size": 2}),
    ("ours", "bf16", {"parallel.recompute": "full", "data.separate_documents": True, "model.window": 8}),
    ("sdpa", "fp32", {"data.separate_documents": True, "model.kv_heads": 1, "model.qk_norm": True}),
    ("sdpa", "bf16", {"optimizer.kind": "muon", "optimizer.iteration_precision": "bf16", "model.window": 8}),
    ("ours", "fp16", {"optimizer.kind": "muon", "model.tied_embeddings": False}),
    ("sdpa", "fp32", {"model.attention": "mla", "model.query_rank": 8, "model.rotary_size": 16}),
    ("ours", "bf16", {"model.experts": 4, "model.expert_hidden": 16, "model.shared_experts": 1,
                      "model.balance_loss": 0.01, "optimizer.gradient_clip": 0.0}),
]  # fmt: skip


def changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    config = copy.deepcopy(config)
    for name, value in changes.items():
        section, _, field = name.rpartition(".")
        assert hasattr(getattr(config, section) if section else config, field)
        setattr(getattr(config, section) if section else config, field, value)
    return config


@pytest.mark.parametrize(("attention", "precision", "changes"), VARIANTS, ids=map(str, range(len(VARIANTS))))
def test_a_step_of_another_kind_waits_for_nothing(
    attention: str, precision: str, changes: dict[str, Any], config: RunConfig, gpu: Gpu
) -> None:
    steps_of(changed(config, changes | {"parallel.attention": attention, "precision": precision}), gpu)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_every_generation_has_its_blocks(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry of the table exists and launches every kernel."""
    with kernels_on_meta():
        gpu = stand_in(monkeypatch, capability)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for head_dim in HEAD_DIMS:
                fused = torch.empty(2, 70, 6, head_dim, dtype=dtype, device=META, requires_grad=True)
                first = torch.zeros(1, 70, dtype=torch.int32, device=META).expand(2, 70)
                out = flash_attention(*fused.split((4, 1, 1), dim=2), first=first)
                out.transpose(1, 2).contiguous().transpose(1, 2).backward(torch.empty_like(out))
                assert fused.grad.dtype == dtype
    programs = {name: count for name, count, _ in gpu.launched}
    assert {*programs} == {"forward_kernel", "delta_kernel", "key_kernel", "query_kernel"}
    assert len(gpu.launched) == 3 * len(HEAD_DIMS) * 4
    assert programs["delta_kernel"] == 2 * 2 * 4  # two blocks of rows, two sequences, four heads


ON_DEVICE, ON_HOST = torch.zeros(3, device=META), torch.zeros(3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ON_DEVICE + ON_HOST,
        lambda: ON_DEVICE[torch.arange(2)],
        lambda: torch.tensor([1.0, 2.0], device=META),
        lambda: ON_HOST.to(META),
        lambda: ON_DEVICE.clone().copy_(ON_HOST),
        lambda: ON_DEVICE.sum().item(),
        lambda: bool(ON_DEVICE.any()),
        lambda: ON_DEVICE.nonzero(),
        lambda: ON_DEVICE.cpu(),
    ],
)
def test_a_wrong_device_or_a_hidden_wait_is_seen(wrong: Callable[[], object]) -> None:
    with pytest.raises((AssertionError, RuntimeError)), on_device():
        wrong()


# --- ranks ------------------------------------------------------------------------------------------------------------


@contextmanager
def ranks(dp: int, tp: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mesh]:
    """Yield the last rank's mesh in a fake process group that replaces NCCL."""
    monkeypatch.setattr(Mesh, "gather", lambda mesh, value: [value] * mesh.size)
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout=None: dist.group.WORLD)
    dist.init_process_group("fake", store=FakeStore(), rank=dp * tp - 1, world_size=dp * tp)
    try:
        yield build_mesh(dp, tp, META)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("dp", "tp", "stage", "precision", "kind"),
    [(1, 2, 0, "bf16", "adamw"), (2, 1, 1, "fp32", "adamw"), (2, 2, 2, "fp16", "muon"), (2, 2, 3, "bf16", "adamw")],
)
def test_a_step_of_a_rank_waits_for_nothing(
    dp: int, tp: int, stage: int, precision: str, kind: str, config: RunConfig, gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with ranks(dp, tp, monkeypatch) as mesh:
        parallel = {"parallel.dp": dp, "parallel.tp": tp, "parallel.zero": stage, "parallel.attention": "ours"}
        rank_config = changed(config, parallel | {"precision": precision, "optimizer.kind": kind})
        rank_config.parallel.sequence_parallel = precision == "bf16"
        rank_config.parallel.micro_batch_size = 1 if precision == "fp32" else None
        stepper = steps_of(rank_config, gpu, mesh)
        stepper.losses(torch.zeros(3, LENGTH + 1, dtype=torch.int64), lambda: None)


# --- the order of what the host, the copies and the steps do ----------------------------------------------------------


def test_rows_and_pages_are_written_when_nobody_reads_them(gpu: Gpu) -> None:
    """Take steps in and out of order; the compute stream reads their rows."""

    def gather(step: int) -> np.ndarray:
        gpu.access(rows._ring[step % RING].pages, True, gpu.host)  # gathered rows are written there at once
        return np.zeros((ROWS, LENGTH + 1), np.int64)

    rows = Prefetch(gather, (ROWS, LENGTH + 1), META)
    for step in [0, 1, 2, 2, 3, 4, 4, 5, 40, 41, 7, 8, 0, 1, 100]:
        for _ in range(2):
            gpu.access(rows.take(step), False, gpu.compute)
        rows.ahead(step + 1)


def whole_run(config: RunConfig, folder: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    def write(directory: Path, staged: Sequence[Part]) -> None:
        for part in staged:
            gpu.access(part.values, False, gpu.host)
        write_whole(directory, staged)

    monkeypatch.setattr(saver_module, "write_whole", write)
    monkeypatch.setattr(job_module, "pick_device", lambda name: META)
    monkeypatch.setattr(loop, "kept_peak", lambda device, dtype: 1e12)
    config.tracker.kind, config.checkpoint.every_steps = "none", 1
    return loop.train(config, folder, report=gpu.said.append, **options)


def test_a_run_is_saved_stopped_resumed_and_summed_up(
    config: RunConfig, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config.precision = "fp16"
    with pytest.raises(Stopped):
        whole_run(config, tmp_path, gpu, monkeypatch, should_stop=lambda: True)
    summary = whole_run(config, tmp_path, gpu, monkeypatch)
    assert f"resumed from step_1 of {STEPS} steps" in gpu.said
    assert (summary["step"], summary["device"], summary["val_loss"]) == (STEPS, "stand-in", 0.0)
    saved = load_file(tmp_path / "checkpoints" / f"step_{STEPS}" / "model.safetensors")
    assert {x.dtype for x in saved.values()} == {torch.float32}


def test_memory_is_freed_when_nothing_holds_it_any_more(
    config: RunConfig, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = TrainStream(prepare(config.data), LENGTH, config.seed)
    stepper = Stepper(config, Mesh(), META, stream, gpu.said.append)
    stepper.start()
    loss, references, freed = GPT.loss, list[Any](), list[bool]()

    def failing(*args: Any, **options: Any) -> Any:
        result = loss(*args, **options)
        if not references:
            references.append(weakref.ref(result.grad_fn))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    monkeypatch.setattr(GPT, "loss", failing)
    monkeypatch.setattr(hardware.CUDA, "empty_cache", lambda: freed.append(references[0]() is None))
    with on_device():
        stepper.step(0)
    assert freed == [True]
    assert stepper.micro == ROWS // 2


# --- conventions -----------------------------------------------------------------------------------------------------


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [hardware.pick_device(name).type for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


ROOT = Path(__file__).resolve().parents[2]


def test_what_device_it_is_is_asked_in_one_way_and_cuda_in_one_place() -> None:
    asked = re.compile(r"is_cuda|is_cpu|device\.type [!=]=|torch\.cuda\.\w+\(")
    for path in [*(ROOT / "train").rglob("*.py"), *(ROOT / "evaluate").rglob("*.py")]:
        lines = [] if path == ROOT / "train/hardware.py" else path.read_text().splitlines()
        assert not [line for line in lines if asked.search(line) and '"meta"' not in line], path
