"""Preflight passes what is right, and finds and names every fault that is planted, without dying of it."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from isoflop.train.memory import memory
from isoflop.train.model import loss as head
from isoflop.train.model.backends import SDPA, Backend, Choice
from isoflop.train.preflight import machine, numerics, preflight, ranks
from isoflop.train.preflight.finding import FAILED, NOTE, PASSED, REPLACED, Finding
from isoflop.train.preflight.preflight import Request
from isoflop.train.stepper import Stepper

CPU = torch.device("cpu")
SMALL = RunConfig(
    model=ModelConfig(width=32, depth=2, heads=4, kv_heads=2, vocab_size=250),
    data=DataConfig(sequence_length=64),
    optimizer=OptimizerConfig(batch_size=4, z_loss=1e-4),
    tokens=2**16,
)
LARGE = dataclasses.replace(SMALL, model=ModelConfig(width=64, depth=3, heads=4, vocab_size=250, window=24))
LOW = dataclasses.replace(SMALL, precision="bf16", data=DataConfig(sequence_length=96, separate_documents=True))
RUNS = [SMALL, LARGE]

MonkeyPatch = pytest.MonkeyPatch


def outcomes(found: Iterable[Finding]) -> list[str]:
    return [finding.outcome for finding in found]


def worst(found: Iterable[Finding]) -> Finding:
    """The one that is not well."""
    (finding,) = [finding for finding in found if finding.outcome != PASSED]
    return finding


MIXED = dataclasses.replace(LOW, model=dataclasses.replace(LOW.model, experts=8, expert_hidden=16, shared_experts=1))


@pytest.mark.parametrize(
    "runs",
    [RUNS, pytest.param([LOW], marks=pytest.mark.slow), pytest.param([MIXED], marks=pytest.mark.slow)],
    ids=["fp32", "bf16", "experts in bf16"],
)
def test_what_is_right_passes(runs: list[RunConfig], tmp_path: Path) -> None:
    found = list(preflight.findings(Request(runs, tmp_path, ranks=2, timeout=300.0)))
    assert [finding for finding in found if finding.outcome != PASSED] == []
    assert {finding.check for finding in found} >= {"ranks", "disk", "attention", "loss", "determinism", "memory"}
    assert not list(tmp_path.iterdir())


def wrong_backend(monkeypatch: MonkeyPatch, kernel: Callable[..., Any], name: str = "ours") -> None:
    backend = Choice(name, "planted"), Backend(name, kernel, reads="mask")
    monkeypatch.setattr(numerics, "select_backend", lambda *arguments: backend)


@pytest.mark.parametrize("run", [SMALL, LOW], ids=["fp32", "bf16"])
def test_an_attention_kernel_that_is_one_per_cent_off_is_replaced(run: RunConfig, monkeypatch: MonkeyPatch) -> None:
    wrong_backend(monkeypatch, lambda *given: SDPA.kernel(*given) * 1.01)
    finding = worst(numerics.check_attention([run], CPU))
    assert (finding.outcome, finding.decides) == (REPLACED, {"attention": "sdpa"})
    assert "attention by ours" in finding.said
    assert finding.numbers["error"] > finding.numbers["bound"]


def test_an_attention_kernel_whose_gradient_alone_is_wrong_is_replaced(monkeypatch: MonkeyPatch) -> None:
    def kernel(query: Any, key: Any, value: Any, mask: Any, window: Any) -> Any:
        return SDPA.kernel(query, 1.01 * key - 0.01 * key.detach(), value, mask, window)

    wrong_backend(monkeypatch, kernel)
    assert worst(numerics.check_attention([SMALL], CPU)).outcome == REPLACED


def test_an_attention_kernel_that_raises_is_replaced_and_named(monkeypatch: MonkeyPatch) -> None:
    def kernel(*given: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    wrong_backend(monkeypatch, kernel)
    finding = worst(numerics.check_attention([SMALL], CPU))
    assert finding.outcome == REPLACED
    assert "illegal memory access" in finding.said


def test_attention_that_nothing_can_replace_fails(monkeypatch: MonkeyPatch) -> None:
    wrong_backend(monkeypatch, lambda *given: SDPA.kernel(*given) * 1.01, "sdpa")
    assert worst(numerics.check_attention([SMALL], CPU)).outcome == FAILED


def test_a_loss_that_is_one_per_cent_off_fails(monkeypatch: MonkeyPatch) -> None:
    right = head.cross_entropy_reference

    def wrong(logits: Any, *rest: Any) -> Any:
        losses, slope = right(logits, *rest)
        return losses, slope * 1.01

    with monkeypatch.context() as planted:
        planted.setattr(head, "cross_entropy_reference", wrong)
        for run in (SMALL, LOW):
            finding = worst(numerics.check_loss([run], CPU))
            assert (finding.outcome, finding.check) == (FAILED, "loss")
    # Where it is our kernel that is wrong, as it could be on a GPU, PyTorch's takes its place.
    monkeypatch.setattr(head, "_kernel", lambda: wrong)
    monkeypatch.setattr(head, "on_gpu", lambda of: True)
    monkeypatch.setattr(numerics, "on_gpu", lambda of: True)
    finding = worst(numerics.check_loss([SMALL], CPU))
    assert (finding.outcome, finding.decides) == (REPLACED, {"cross_entropy": "torch"})


def test_a_step_that_is_wrong_or_never_the_same_fails(monkeypatch: MonkeyPatch) -> None:
    right = Stepper._gradients
    monkeypatch.setattr(Stepper, "_gradients", lambda self, step: right(self, step) * 1.001)
    assert worst(numerics.check_step([SMALL], CPU)).check == "step"
    monkeypatch.setattr(Stepper, "_gradients", lambda self, step: right(self, step) * (1 + 1e-6 * torch.rand(())))
    finding = worst(numerics.check_step([SMALL], CPU))
    assert (finding.check, finding.outcome) == ("determinism", FAILED)


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_a_planner_that_is_30_per_cent_off_fails(factor: float, monkeypatch: MonkeyPatch) -> None:
    class Planned(NamedTuple):
        peak: float

    model = dataclasses.replace(LARGE.model, width=192)  # of megabytes, beside which small allocations are nothing
    run = dataclasses.replace(LARGE, model=model)
    (right,) = numerics.check_memory([run], CPU)
    assert right.outcome == PASSED, right
    assert right.numbers["measured"] == pytest.approx(right.numbers["planned"], rel=0.1)
    monkeypatch.setattr(numerics, "memory", lambda run, device: Planned(factor * memory(run, device).peak))
    finding = worst(numerics.check_memory([run], CPU))
    assert finding.outcome == FAILED
    assert "plans of memory cannot be trusted" in finding.said


def test_a_rank_that_never_joins_and_one_that_dies_are_named(monkeypatch: MonkeyPatch) -> None:
    def absent(kind: str) -> tuple[float, float, float]:
        if torch.distributed.get_rank() == 1:
            time.sleep(60)
        return 1.0, 1.0, 1.0

    monkeypatch.setattr(ranks, "_measure", absent)
    finding = worst(ranks.check_ranks(2, "cpu", timeout=3.0))
    assert finding.outcome == FAILED
    assert "rank 1: no answer within 3 s" in finding.said
    monkeypatch.setattr(
        ranks, "_measure", lambda kind: os._exit(3) if torch.distributed.get_rank() else (1.0, 1.0, 1.0)
    )
    assert "rank 1: died without a word (exit code 3)" in worst(ranks.check_ranks(2, "cpu", timeout=20.0)).said


def test_a_slow_rank_and_a_slow_network_are_named() -> None:
    even = [(9e9, 1e9, 1e9), (1e10, 1e9, 1e9), (1e10, 1.2e9, 1e9)]
    assert outcomes(ranks.judge_ranks(even, wanted=1.5e9)) == [PASSED]
    slow = worst(ranks.judge_ranks([*even, (3e9, 1e9, 1e9)]))
    assert "rank 3 computes 3.0 GFLOP/s where its siblings do 10.0" in slow.said
    network = worst(ranks.judge_ranks(even, wanted=450e9))
    assert network.outcome == NOTE
    assert "the cluster's group says 450.00" in network.said


def test_a_full_disk_too_little_room_and_slow_writing_are_named(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as planted:
        planted.setattr(os, "fsync", full)
        finding = worst(machine.check_disk(RUNS, tmp_path, grace=30.0))
        assert f"cannot be written to {tmp_path}: the disk, or a quota, is full" in finding.said
    assert not list(tmp_path.iterdir())
    huge = dataclasses.replace(SMALL, model=ModelConfig(width=2**16, depth=200, heads=2**10, vocab_size=250))
    found = list(machine.check_disk([huge], tmp_path, grace=30.0))
    assert "GB free, and checkpoints of these runs take about" in found[0].said
    assert FAILED in outcomes(found[:1])
    late = machine.judge_writing(1e9, seconds=45.0, grace=30.0)
    assert late.outcome == FAILED
    assert "a preempted job has 30 s" in late.said


def test_little_shared_memory_is_named(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    assert outcomes(machine.check_shared_memory(1, tmp_path)) == []

    class Disk(NamedTuple):
        free: int

    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: Disk(2**26))
    assert outcomes(machine.check_shared_memory(2, tmp_path)) == [PASSED]
    assert "--shm-size" in worst(machine.check_shared_memory(8, tmp_path)).said


@pytest.mark.parametrize("wanted", ["lo", "=lo", "ib0,lo", "^docker"])
def test_an_interface_that_is_there_passes(wanted: str) -> None:
    assert outcomes(machine.check_network(2, [], {"NCCL_SOCKET_IFNAME": wanted})) == []


@pytest.mark.parametrize("wanted", ["ib0", "=l", "bond0,eth77"])
def test_a_missing_interface_is_named(wanted: str) -> None:
    finding = worst(machine.check_network(2, [], {"GLOO_SOCKET_IFNAME": wanted}))
    assert f"GLOO_SOCKET_IFNAME is {wanted!r}, and this node has " in finding.said
    assert not list(machine.check_network(1, [], {"GLOO_SOCKET_IFNAME": wanted}))


def test_a_host_that_does_not_answer_is_a_note() -> None:
    finding = worst(machine.check_network(1, ["127.0.0.1:9"]))
    assert finding.outcome == NOTE
    assert "127.0.0.1 does not answer" in finding.said


IDLE = "{0}, GPU-{0}abc, NVIDIA H100 80GB HBM3, 81559, 512, 0, 0x0000000000000001"


def test_gpus_that_are_alike_and_free_pass() -> None:
    (finding,) = machine.judge_gpus("\n".join(IDLE.format(index) for index in range(8)))
    assert finding.said == "8 x NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "1, GPU-1def, NVIDIA H100 80GB HBM3, 81559, 40211, 97, 0x0",
            "GPU 1 is occupied by others: 40211 of 81559 MiB",
        ),
        ("1, GPU-1def, NVIDIA H100 80GB HBM3, 81559, 5, 0, 0x0000000000000048", "GPU 1 is throttled by heat or power"),
        ("1, GPU-1def, NVIDIA A100-SXM4-40GB, 40960, 5, 0, 0x0", "the GPUs of this node differ: NVIDIA A100"),
    ],
)
def test_a_gpu_that_is_occupied_throttled_or_another_is_named(line: str, said: str) -> None:
    found = list(machine.judge_gpus(f"{IDLE.format(0)}\n{line}\n"))
    assert said in worst(found).said
    # A rank that sees only the other GPU is not concerned.
    for visible in ("0", "GPU-0a"):
        assert outcomes(machine.judge_gpus(f"{IDLE.format(0)}\n{line}\n", [visible])) == [PASSED]


def test_software_that_does_not_fit_the_gpu_is_named() -> None:
    built = ["sm_80", "sm_90", "compute_90"]
    for capability in ((8, 0), (8, 6), (9, 0), (10, 0)):  # the last by PTX
        assert machine.judge_software("torch", "3.7", "a GPU", capability, built).outcome == PASSED
    old = machine.judge_software("torch", "3.7", "NVIDIA V100", (7, 0), built)
    assert old.outcome == FAILED
    assert "on NVIDIA V100 (sm_70): torch is built for sm_80, sm_90, compute_90" in old.said
    assert machine.judge_software("torch", "3.7", "a GPU", (10, 0), ["sm_80", "sm_90"]).outcome == FAILED
    assert machine.judge_software("torch", None, "a GPU", (9, 0), built).outcome == NOTE


def planted(monkeypatch: MonkeyPatch, scripts: dict[str, str]) -> None:
    """Lets the process of its own run a script, chosen by the first check and the attention that is asked for."""

    def start(request: Request, checks: Any, errors: Any) -> subprocess.Popen[bytes]:
        script = scripts[f"{checks[0]} {request.runs[0].parallel.attention}"]
        return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=errors)

    monkeypatch.setattr(preflight, "_start", start)


def says(check: str, outcome: str = "") -> str:
    lines = [f'print(\'{{"begin": "{check}"}}\', flush=True)']
    if outcome:
        lines.append(f'print(\'{{"check": "{check}", "outcome": "{outcome}", "said": "fine"}}\', flush=True)')
    return "\n".join(lines) + "\n"


def test_a_check_that_kills_its_process_is_a_finding_and_the_rest_go_on(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    scripts = {
        "disk auto": says("disk", "passed") + says("attention") + killed,
        "attention sdpa": says("attention", "passed") + says("step") + "import sys; sys.exit('CUDA error')",
        "loss sdpa": says("loss", "passed"),
    }
    planted(monkeypatch, scripts)
    found = list(preflight.findings(Request([SMALL], tmp_path), ["disk", "attention", "step", "loss"]))
    assert [(one.check, one.outcome) for one in found] == [
        ("disk", PASSED), ("attention", REPLACED), ("attention", PASSED), ("step", FAILED), ("loss", PASSED),
    ]  # fmt: skip
    assert found[1].decides == {"attention": "sdpa"}
    assert "ended with code -11" in found[1].said
    assert "ended with code 1 (CUDA error)" in found[3].said


def test_a_check_that_hangs_is_a_finding_and_the_rest_go_on(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    scripts = {"memory auto": says("memory") + "import time; time.sleep(60)", "step auto": says("step", "passed")}
    planted(monkeypatch, scripts)
    found = list(preflight.findings(Request([SMALL], tmp_path, timeout=2.0), ["memory", "step"]))
    assert [(one.check, one.outcome) for one in found] == [("memory", FAILED), ("step", PASSED)]
    assert "no answer within 2 s" in found[0].said
