"""What only a GPU does, on `meta` and a stand-in for CUDA: every branch runs, on the device, in the right order."""

from __future__ import annotations

import copy
import dataclasses
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import isoflop.train.checkpoint.saver as saver_module
import isoflop.train.job.job as job_module
import numpy as np
import pytest
import torch
import torch.distributed as dist
from covering import covered
from gpu_stand_in import META, Event, Gpu, kernels_on_meta, on_device, stand_in
from isoflop.train import hardware, loop
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.checkpoint.storage import Part, write_whole
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig
from isoflop.train.data.loader import TrainStream
from isoflop.train.data.prefetch import RING, Lane, Prefetch
from isoflop.train.data.shards import prepare
from isoflop.train.ensemble.stacked import StackedStepper
from isoflop.train.errors import Stopped
from isoflop.train.job.environment import Ranks
from isoflop.train.job.rendezvous import farewell, meet
from isoflop.train.kernels.flash import HEAD_DIMS, flash_attention
from isoflop.train.model.compiled import environment
from isoflop.train.model.gpt import GPT
from isoflop.train.parallel.mesh import Mesh, build_mesh
from isoflop.train.preflight import machine, numerics
from isoflop.train.preflight import ranks as ranks_module
from isoflop.train.stepper import Stepper
from safetensors.torch import load_file
from torch.testing._internal.distributed.fake_pg import FakeStore

ROWS, LENGTH, STEPS = 4, 32, 3


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
    """A run's steps, in which the host waits for nothing."""
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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("attention", ["ours", "sdpa"])
def test_a_step_waits_for_nothing(attention: str, precision: str, config: RunConfig, gpu: Gpu) -> None:
    config.precision, config.parallel.attention = precision, attention
    stepper = steps_of(config, gpu)
    assert gpu.said[0] == f"attention: {attention} (parallel.attention)"
    expected = KERNELS_OF_A_STEP if attention == "ours" else ["_rows"]
    assert [name for name, _, _ in gpu.launched] == expected * STEPS
    assert stepper.zero.rates.dtype == torch.float32
    assert stepper.state()["updates"] == 0.0
    assert len(gpu.reads) == (3 if precision == "fp16" else 1)  # the first waits are those of a checkpoint
    stepper.load_state({"updates": 3.0, "loss_scale": {"scale": 2.0, "good_steps": 5}})


VARIANTS = {
    "micro-batches": {"parallel.micro_batch_size": 1},
    "z-loss": {"optimizer.z_loss": 1e-4},
    "recompute": {"parallel.recompute": "selective", "parallel.micro_batch_size": 2},
    "recompute all": {"parallel.recompute": "full"},
    "window": {"model.window": 8},
    "documents": {"data.separate_documents": True},
    "documents in a window": {"data.separate_documents": True, "model.window": 8},
    "muon": {"optimizer.kind": "muon"},
    "muon in bf16": {"optimizer.kind": "muon", "optimizer.iteration_precision": "bf16"},
    "groups": {"model.kv_heads": 1, "model.qk_norm": True},
    "latents": {"model.attention": "mla", "model.query_rank": 8, "model.rotary_size": 16},
    "experts": {"model.experts": 4, "model.expert_hidden": 16, "model.shared_experts": 1, "model.balance_loss": 0.01},
    "untied": {"model.tied_embeddings": False},
    "no clipping": {"optimizer.gradient_clip": 0.0},
}


def changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    config = copy.deepcopy(config)
    for name, value in changes.items():
        section, _, field = name.rpartition(".")
        assert hasattr(getattr(config, section) if section else config, field)
        setattr(getattr(config, section) if section else config, field, value)
    return config


@pytest.mark.parametrize(
    ("variant", "attention", "precision"), covered(product(VARIANTS, ("ours", "sdpa"), ("fp32", "fp16")))
)
def test_a_step_of_another_kind_waits_for_nothing(
    variant: str, attention: str, precision: str, config: RunConfig, gpu: Gpu
) -> None:
    precision = "bf16" if variant == "experts" else precision
    steps_of(changed(config, VARIANTS[variant] | {"parallel.attention": attention, "precision": precision}), gpu)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_every_generation_has_its_blocks(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry of the table is found, and gives every kernel something to do."""
    with kernels_on_meta():
        gpu = stand_in(monkeypatch, capability)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for head_dim in HEAD_DIMS:
                fused = torch.empty(2, 70, 6, head_dim, dtype=dtype, device=META, requires_grad=True)
                first = torch.zeros(1, 70, dtype=torch.int32, device=META).expand(2, 70)
                out = flash_attention(*fused.split((4, 1, 1), dim=2), first=first)
                out.transpose(1, 2).contiguous().transpose(1, 2).backward(torch.empty_like(out))
                assert fused.grad is not None
                assert fused.grad.dtype == dtype
    programs = {name: count for name, count, _ in gpu.launched}
    assert {*programs} == {"forward_kernel", "delta_kernel", "key_kernel", "query_kernel"}
    assert len(gpu.launched) == 3 * len(HEAD_DIMS) * 4
    assert programs["delta_kernel"] == 2 * 2 * 4  # two blocks of rows, two sequences, four heads


def test_scoring_the_held_out_set_waits_once_a_pass(config: RunConfig, gpu: Gpu) -> None:
    stepper = steps_of(config, gpu)
    with on_device(host_may_wait=True):
        losses = stepper.losses(torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64), lambda: None)
    assert losses.dtype == torch.float64
    assert gpu.reads == [(ROWS,)]


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
    """The last rank of a world in which nobody else is, over what would be NCCL."""
    monkeypatch.setattr(Mesh, "gather", lambda mesh, value: [value] * mesh.size)
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout=None: dist.group.WORLD)
    dist.init_process_group("fake", store=FakeStore(), rank=dp * tp - 1, world_size=dp * tp)
    try:
        yield build_mesh(dp, tp, META)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("dp", "tp", "stage", "precision", "kind"),
    covered(
        (*mesh, *numbers)
        for mesh in [(1, 2, 0), *((2, tp, stage) for tp in (1, 2) for stage in range(4))]
        for numbers in (("fp32", "adamw"), ("bf16", "adamw"), ("fp16", "muon"))
    ),
)
def test_a_step_of_a_rank_waits_for_nothing(
    dp: int, tp: int, stage: int, precision: str, kind: str, config: RunConfig, gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    with ranks(dp, tp, monkeypatch) as mesh:
        parallel = {"parallel.dp": dp, "parallel.tp": tp, "parallel.zero": stage, "parallel.attention": "ours"}
        one = changed(config, parallel | {"precision": precision, "optimizer.kind": kind})
        one.parallel.sequence_parallel = precision == "bf16"
        one.parallel.micro_batch_size = 1 if precision == "fp32" else None
        stepper = steps_of(one, gpu, mesh)
        assert stepper.zero.gradients.native == (dp > 1)  # has a reduce-scatter
        stepper.losses(torch.zeros(3, LENGTH + 1, dtype=torch.int64), lambda: None)
        gpu.reads.clear()
        saver = Saver(tmp_path, mesh, one, prepare(one.data).tokenizer, gpu.said.append)
        staged, copied = saver._stage(stepper.held())
        assert copied is not None
        assert {part.values.device.type for part in staged} == {"cpu"}


def test_ranks_meet_over_nccl(tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    start = dist.init_process_group

    def init(backend: str, *, rank: int, world_size: int, device_id: object, **_: object) -> None:
        asked.extend((backend, device_id))
        start("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def new_group(backend: str) -> object:
        asked.append(backend)
        return dist.group.WORLD

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(Mesh, "gather", lambda mesh, value: [value] * mesh.size)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda limit, group: None)
    who = Ranks(rank=0, size=2, local_rank=1, local_size=2, host="here")
    with meet(who, tmp_path, ParallelConfig(dp=2, timeout_seconds=5.0), META) as (mesh, store):
        assert store is not None
        store.set(farewell(1), "")
        assert (mesh.size, mesh.hosts) == (2, ("here", "here"))
    assert asked == ["nccl", META, "gloo"]
    assert gpu.said == ["take 1"]
    assert not dist.is_initialized()

    def fail() -> None:
        with meet(who, tmp_path, ParallelConfig(dp=2), META) as (_, store):
            assert store is not None
            store.set(farewell(1), "")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert dist.is_initialized()  # NCCL would wait for collectives that never end
    dist.destroy_process_group()


# --- the order of what the host, the copies and the steps do ----------------------------------------------------------


def prefetch(gpu: Gpu, spoil: Callable[[dict[str, Event]], None] = lambda events: None) -> None:
    """Steps in and out of order, whose rows are read by the stream that computes."""

    def gather(step: int) -> np.ndarray:
        gpu.access(rows._ring[step % RING].pages, True, gpu.host)  # what is gathered is written there at once
        return np.zeros((ROWS, LENGTH + 1), np.int64)

    rows = Prefetch(gather, (ROWS, LENGTH + 1), META)
    for slot in rows._ring:
        spoil(slot.events)
    for step in [0, 1, 2, 2, 3, 4, 4, 5, 40, 41, 7, 8, 0, 1, 100]:
        for _ in range(2):
            gpu.access(rows.take(step), False, gpu.compute)
        rows.ahead(step + 1)


def test_rows_and_pages_are_written_when_nobody_reads_them(gpu: Gpu) -> None:
    prefetch(gpu)
    assert gpu.said == ["keep_for"] * RING


WAITS = [("read", "record"), ("read", "wait"), ("copied", "record"), ("copied", "wait"), ("copied", "synchronize")]


@pytest.mark.parametrize(("name", "method"), WAITS)
def test_each_wait_of_prefetching_is_needed(name: str, method: str, gpu: Gpu) -> None:
    with pytest.raises(AssertionError, match="while it is still in use"):
        prefetch(gpu, lambda events: setattr(events[name], method, lambda *_: None))


def whole_run(config: RunConfig, folder: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    def write(directory: Path, staged: Sequence[Part]) -> None:
        for part in staged:
            gpu.access(part.values, False, gpu.host)
        write_whole(directory, staged)

    monkeypatch.setattr(saver_module, "write_whole", write)
    monkeypatch.setattr(job_module, "pick_device", lambda wanted: META)
    monkeypatch.setattr(loop, "kept_peak", lambda device, dtype: 1e12)
    config.tracker.kind, config.checkpoint.every_steps = "none", 1
    return loop.train(config, folder, report=gpu.said.append, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_is_saved_stopped_resumed_and_summed_up(
    asynchronous: bool, config: RunConfig, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config.precision, config.checkpoint.asynchronous = "fp16", asynchronous
    with pytest.raises(Stopped):
        whole_run(config, tmp_path, gpu, monkeypatch, should_stop=lambda: True)
    summary = whole_run(config, tmp_path, gpu, monkeypatch)
    assert "resumed from step_1 of 3 steps" in gpu.said
    assert (summary["step"], summary["device"], summary["val_loss"]) == (STEPS, "stand-in", 0.0)
    saved = load_file(tmp_path / "checkpoints" / f"step_{STEPS}" / "model.safetensors")
    assert {x.dtype for x in saved.values()} == {torch.float32}


@pytest.mark.parametrize("method", ["record", "synchronize"])
def test_a_save_waits_for_its_copies(
    method: str, config: RunConfig, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Event, method, lambda *_: None)
    monkeypatch.setattr(Lane, "pages_free", lambda *_: None)
    monkeypatch.setattr(Gpu, "copy", of_saves_alone(Gpu.copy))
    with pytest.raises(AssertionError, match="while it is still in use"):
        whole_run(config, tmp_path, gpu, monkeypatch)


def of_saves_alone(copied: Callable[..., None]) -> Callable[..., None]:
    return lambda gpu, target, source: copied(gpu, target, source) if source.is_meta else None


def test_memory_is_freed_when_nothing_holds_it_any_more(
    config: RunConfig, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = TrainStream(prepare(config.data), LENGTH, config.seed)
    stepper = Stepper(config, Mesh(), META, stream, gpu.said.append)
    stepper.start()
    loss, held, freed = GPT.loss, list[Any](), list[bool]()

    def failing(*args: Any, **options: Any) -> Any:
        result = loss(*args, **options)
        if not held:
            held.append(weakref.ref(result.grad_fn))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    monkeypatch.setattr(GPT, "loss", failing)
    monkeypatch.setattr(hardware.CUDA, "empty_cache", lambda: freed.append(held[0]() is None))
    with on_device():
        stepper.step(0)
    assert freed == [True]
    assert stepper.micro == ROWS // 2


# --- ensembles, and what is left --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_of_an_ensemble_waits_for_nothing(precision: str, kind: str, config: RunConfig, gpu: Gpu) -> None:
    config = changed(config, {"precision": precision, "optimizer.kind": kind, "parallel.attention": "ours"})
    configs = [changed(config, {"seed": seed}) for seed in range(3)]
    together = StackedStepper(configs, META, prepare(config.data), gpu.said.append)
    for member in together.members:
        member.start()
    with on_device():
        results = [together.step([step] * 3) for step in range(2)]
    assert not gpu.reads
    assert all(x.is_meta for each in results for one in each for x in (one.loss, one.norm, one.skipped))
    assert together.pool is None
    together.drop(together.members[1:2])
    with on_device():
        together.step([2, 2])
    first = together.members[0]
    assert first.state() == {"updates": 0.0, "loss_scale": {}}
    first.load_state({"updates": 2.0})
    assert first.losses(torch.zeros(3, LENGTH + 1, dtype=torch.int64), lambda: None).shape == (3,)
    assert {held.values.device for held in first.held()} == {META}


def test_blocks_are_recorded_as_cuda_graphs(
    config: RunConfig, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All but what the compiler does."""
    config.parallel.cuda_graphs, config.data.cache_dir = True, str(tmp_path)
    marks: list[bool] = []
    monkeypatch.setattr(GPT, "compile_blocks", lambda _, graphs: marks.append(graphs))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(True))
    config.data = copy.deepcopy(config.data)
    stepper = steps_of(config, gpu)
    assert marks == [True] * (1 + STEPS)
    assert stepper.compiled is not None
    assert environment(META)["capability"] == [8, 0]


def test_the_rate_of_matrix_products_is_measured_on_the_device(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoGenerator:
        def __init__(self, device: torch.device) -> None:
            assert device == META

        def manual_seed(self, seed: int) -> None:
            return None

    monkeypatch.setattr(torch, "Generator", NoGenerator)
    assert hardware.matmul_peak(META, torch.bfloat16, seconds=0.01) > 0
    assert len(gpu.said) >= 2
    assert {*gpu.said} == {"synchronize"}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_preflight_compares_on_the_device(
    precision: str, config: RunConfig, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers that the host reads are 1."""
    gpu.answer = lambda x: torch.ones(x.shape, dtype=x.dtype)
    for variant in ({}, {"data.separate_documents": True, "model.window": 8}):
        runs = [changed(config, {"precision": precision, "parallel.attention": "ours"} | variant)]
        found = [*numerics.check_attention(runs, META), *numerics.check_loss(runs, META)]
        found += [*numerics.check_step(runs, META), *numerics.check_memory(runs, META)]
        names = ["attention", "loss", "determinism", "step", "memory"]
        assert [each.check for each in found if each.outcome == "passed" or each.check == "step"] == names
        assert found[-1].numbers["measured"] == 7.0
    assert {name for name, _, _ in gpu.launched} == {*KERNELS_OF_A_STEP}
    (software,) = machine.check_software(META)
    assert "on stand-in (sm_80)" in software.said
    monkeypatch.setenv("PATH", "")
    (gpus,) = machine.check_gpus("cuda")
    assert "nvidia-smi does not answer" in gpus.said
    assert not list(machine.check_gpus("auto"))


def test_preflight_measures_ranks_over_nccl(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "matmul_peak", lambda *_: 1.0)
    with ranks(2, 1, monkeypatch):
        rate, reduce, gather = ranks_module._measure("meta")
    assert rate == 1.0
    assert min(reduce, gather) > 0
    assert gpu.said == ["take 1", *["synchronize"] * 10]


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [hardware.pick_device(wanted).type for wanted in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


ROOT = Path(__file__).resolve().parents[2]
OF_A_GPU = re.compile(
    r"torch\.cuda|is_cuda|is_cpu|device\.type|\bon_gpu\(|\bCUDA\.|(?<![\w.])(?:read|release_memory)\("
)


def lines_of_a_gpu() -> dict[str, list[str]]:
    found = {}
    for path in sorted([*(ROOT / "train").rglob("*.py"), *(ROOT / "evaluate").rglob("*.py")]):
        lines = [line.strip() for line in path.read_text().splitlines() if OF_A_GPU.search(line)]
        if lines:
            found[path.relative_to(ROOT).as_posix()] = lines
    return found


def test_every_branch_of_a_gpu_is_in_the_table() -> None:
    """A new one is entered there, with how it is executed in tests."""
    page = (ROOT / "docs" / "gpu-paths.md").read_text()
    table = {name: int(count) for name, count in re.findall(r"^\| (\S+\.py) \| (\d+) \|", page, re.MULTILINE)}
    assert table == {name: len(lines) for name, lines in lines_of_a_gpu().items()}


def test_what_device_it_is_is_asked_in_one_way_and_cuda_in_one_place() -> None:
    for name, lines in lines_of_a_gpu().items():
        if name != "train/hardware.py":
            asked = [line for line in lines if re.search(r"is_cuda|is_cpu|device\.type [!=]=|torch\.cuda\.\w+\(", line)]
            assert not [line for line in asked if '"meta"' not in line], name
