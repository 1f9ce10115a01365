"""Preflight passes what is right, and finds and names every fault that is planted, without dying of it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from isoflop.train.model import loss as head
from isoflop.train.model.backends import SDPA, Backend, Choice
from isoflop.train.preflight import machine, numerics, preflight
from isoflop.train.preflight.finding import FAILED, PASSED, REPLACED, Finding
from isoflop.train.preflight.preflight import Request
from isoflop.train.stepper import Stepper

CPU = torch.device("cpu")
SMALL = RunConfig(
    model=ModelConfig(width=32, depth=2, heads=4, kv_heads=2, vocab_size=250),
    data=DataConfig(sequence_length=64),
    optimizer=OptimizerConfig(batch_size=4, z_loss=1e-4),
    tokens=2**16,
)
LOW = dataclasses.replace(SMALL, precision="bf16", data=DataConfig(sequence_length=96, separate_documents=True))

MonkeyPatch = pytest.MonkeyPatch


def worst(found: Iterable[Finding]) -> Finding:
    """The one that is not well."""
    (finding,) = [finding for finding in found if finding.outcome != PASSED]
    return finding


@pytest.mark.slow
def test_what_is_right_passes(tmp_path: Path) -> None:
    found = list(preflight.findings(Request([SMALL], tmp_path, ranks=2, timeout=300.0)))
    assert [finding for finding in found if finding.outcome != PASSED] == []
    assert {finding.check for finding in found} >= {"ranks", "disk", "attention", "loss", "determinism", "memory"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("run", [SMALL, LOW], ids=["fp32", "bf16"])
def test_attention_whose_gradient_is_one_per_cent_off_is_replaced(run: RunConfig, monkeypatch: MonkeyPatch) -> None:
    def kernel(query: Any, key: Any, value: Any, mask: Any, window: Any) -> Any:
        return SDPA.kernel(query, 1.01 * key - 0.01 * key.detach(), value * 1.01, mask, window)

    for name, outcome in (("ours", REPLACED), ("sdpa", FAILED)):
        backend = Choice(name, "planted"), Backend(name, kernel, reads="mask")
        monkeypatch.setattr(numerics, "select_backend", lambda *arguments, backend=backend: backend)
        finding = worst(numerics.check_attention([run], CPU))
        assert finding.outcome == outcome
        assert finding.numbers["error"] > finding.numbers["bound"]


def test_a_loss_or_a_step_that_is_wrong_fails(monkeypatch: MonkeyPatch) -> None:
    def wrong_loss(logits: Any, *rest: Any) -> Any:
        losses, slope = reference(logits, *rest)
        return losses, slope * 1.01

    reference = head.cross_entropy_reference
    with monkeypatch.context() as planted:
        planted.setattr(head, "cross_entropy_reference", wrong_loss)
        assert worst(numerics.check_loss([LOW], CPU)).check == "loss"
    gradients = Stepper._gradients
    monkeypatch.setattr(Stepper, "_gradients", lambda self, step: gradients(self, step) * 1.001)
    assert worst(numerics.check_step([SMALL], CPU)).check == "step"
    monkeypatch.setattr(Stepper, "_gradients", lambda self, step: gradients(self, step) * (1 + 1e-6 * torch.rand(())))
    assert worst(numerics.check_step([SMALL], CPU)).check == "determinism"


def test_a_gpu_that_is_occupied_throttled_or_another_is_named() -> None:
    idle = "{0}, GPU-{0}abc, NVIDIA H100 80GB HBM3, 81559, 512, 0, 0x0000000000000001"
    (finding,) = machine.judge_gpus("\n".join(idle.format(index) for index in range(8)))
    assert finding.outcome == PASSED
    for line, word in (
        ("1, GPU-1def, NVIDIA H100 80GB HBM3, 81559, 40211, 97, 0x0", "GPU 1 is occupied"),
        ("1, GPU-1def, NVIDIA H100 80GB HBM3, 81559, 5, 0, 0x0000000000000048", "GPU 1 is throttled"),
        ("1, GPU-1def, NVIDIA A100-SXM4-40GB, 40960, 5, 0, 0x0", "differ"),
    ):
        assert word in worst(machine.judge_gpus(f"{idle.format(0)}\n{line}\n")).said
        # A rank that sees only the other GPU is not concerned.
        assert [one.outcome for one in machine.judge_gpus(f"{idle.format(0)}\n{line}\n", ["0"])] == [PASSED]


def test_a_check_that_kills_its_process_or_hangs_is_a_finding(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def begins(check: str, then: str = "") -> str:
        return f'import os, time; print(\'{{"begin": "{check}"}}\', flush=True); {then}\n'

    def passes(check: str) -> str:
        return begins(check) + f'print(\'{{"check": "{check}", "outcome": "passed", "said": "fine"}}\', flush=True)\n'

    scripts = {  # of the process that runs the checks, by the first of them and the attention that is asked for
        "disk auto": passes("disk") + begins("attention", "os.kill(os.getpid(), 11)"),
        "attention sdpa": passes("attention") + begins("step", "time.sleep(60)"),
        "loss sdpa": passes("loss"),
    }

    def start(request: Request, checks: Any, errors: Any) -> subprocess.Popen[bytes]:
        script = scripts[f"{checks[0]} {request.runs[0].parallel.attention}"]
        return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=errors)

    monkeypatch.setattr(preflight, "_start", start)
    found = list(preflight.findings(Request([SMALL], tmp_path, timeout=4.0), ["disk", "attention", "step", "loss"]))
    assert [(one.check, one.outcome) for one in found] == [
        ("disk", PASSED), ("attention", REPLACED), ("attention", PASSED), ("step", FAILED), ("loss", PASSED),
    ]  # fmt: skip
    assert found[1].decides == {"attention": "sdpa"}
    assert "code -11" in found[1].said
