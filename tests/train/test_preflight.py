"""Preflight passes a sound setup, and names every planted fault without dying of it."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from isoflop.train.model import loss as head
from isoflop.train.model.backends import SDPA, Backend, Choice
from isoflop.train.preflight import kernels, preflight
from isoflop.train.preflight.preflight import FAILED, NOTE, PASSED, REPLACED, Finding, check_device, check_node
from isoflop.train.stepper import Stepper

CPU = torch.device("cpu")
SMALL = RunConfig(
    model=ModelConfig(width=32, depth=2, heads=4, kv_heads=2, vocab_size=250),
    data=DataConfig(sequence_length=64),
    optimizer=OptimizerConfig(batch_size=4, z_loss=1e-4),
    tokens=2**16,
)
LOW = dataclasses.replace(SMALL, precision="bf16", data=DataConfig(sequence_length=96, separate_documents=True))
WINDOWED = dataclasses.replace(SMALL, model=dataclasses.replace(SMALL.model, window=20))

MonkeyPatch = pytest.MonkeyPatch


def only_problem(findings: Iterable[Finding]) -> Finding:
    """Return the only finding that did not pass."""
    (finding,) = [finding for finding in findings if finding.outcome != PASSED]
    return finding


@pytest.mark.slow
def test_what_is_right_passes(tmp_path: Path) -> None:
    findings = [*check_node([SMALL], tmp_path, ranks=2), *check_device([SMALL], ranks=2)]
    assert [finding for finding in findings if finding.outcome != PASSED] == []
    assert [finding.check for finding in findings] == ["memory", "disk", "ranks", "attention", "loss", "step"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("run", [SMALL, LOW, WINDOWED], ids=["fp32", "bf16", "window"])
def test_attention_whose_gradient_is_one_per_cent_off_is_replaced(run: RunConfig, monkeypatch: MonkeyPatch) -> None:
    assert [finding.outcome for finding in kernels.check_attention([run], CPU)] == [PASSED]

    for name, outcome, factor in (("ours", REPLACED, 1.0), ("sdpa", FAILED, 1.0), ("sdpa", FAILED, torch.nan)):

        def kernel(query: Any, key: Any, value: Any, mask: Any, window: Any, factor: float = factor) -> Any:
            return factor * SDPA.kernel(query, 1.01 * key - 0.01 * key.detach(), value * 1.01, mask, window)

        backend = Choice(name, "planted"), Backend(name, kernel, reads="mask")
        monkeypatch.setattr(kernels, "select_backend", lambda *arguments, backend=backend: backend)
        assert only_problem(kernels.check_attention([run], CPU)).outcome == outcome


def test_a_loss_or_a_step_that_is_wrong_fails(monkeypatch: MonkeyPatch) -> None:
    def wrong_loss(logits: Any, *rest: Any, **settings: Any) -> Any:
        losses, slope = reference(logits, *rest, **settings)
        return losses, slope * 1.01

    reference = head.cross_entropy_reference
    with monkeypatch.context() as planted:
        planted.setattr(head, "cross_entropy_reference", wrong_loss)
        assert only_problem(kernels.check_loss([LOW], CPU)).check == "loss"
    assert [finding.outcome for finding in kernels.check_step([LOW], CPU)] == [PASSED]
    gradients = Stepper._gradients
    monkeypatch.setattr(Stepper, "_gradients", lambda self: gradients(self) * 1.001)
    assert "are allowed" in only_problem(kernels.check_step([SMALL], CPU)).said
    factor = itertools.cycle([1.0, 1.000001])
    monkeypatch.setattr(Stepper, "_gradients", lambda self: gradients(self) * next(factor))
    assert "different bits" in only_problem(kernels.check_step([SMALL], CPU)).said


def test_memory_that_is_not_free_and_a_disk_that_is_full_are_named(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def run(*arguments: Any, **options: Any) -> Any:
        return subprocess.CompletedProcess([], 0, stdout="81559\n3\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(preflight, "TRIAL_BYTES", 1 << 16)
    assert preflight.free_of_gpus() == [81559 * 2**20, 3 * 2**20]
    large = dataclasses.replace(SMALL, model=dataclasses.replace(SMALL.model, width=512, depth=8))
    on_cpu = dataclasses.replace(SMALL, parallel=ParallelConfig(device="cpu"))
    finding = only_problem(check_node([large], tmp_path, ranks=1))
    assert (finding.check, finding.outcome) == ("memory", FAILED)
    assert finding.said.startswith("a rank has 3 MB of memory free, and the largest run needs at least ")
    assert only_problem(check_node([on_cpu], Path("/proc"), ranks=1)).check == "disk"


def test_a_host_that_does_not_answer_is_a_note(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "hosts_of", lambda run: ["no-such-host.invalid"])
    finding = only_problem(check_node([SMALL], tmp_path, ranks=1))
    assert (finding.check, finding.outcome) == ("network", NOTE)


@pytest.mark.parametrize(
    ("script", "check", "text"),
    [("print('\"attention\"', flush=True); import os; os.kill(os.getpid(), 11)", "attention",
      "code -11 (); set parallel.attention=sdpa, or exclude the node with cluster.exclude"),
     ("print('\"step\"', flush=True); import time; time.sleep(60)", "step", "no answer within 5 s; exclude the node"),
     ("raise ValueError('no device')", "device", "(ValueError: no device); exclude the node")],
)  # fmt: skip
def test_a_check_that_kills_its_process_or_hangs_is_a_finding(
    script: str, check: str, text: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    (tmp_path / "kernels.py").write_text(script)
    (tmp_path / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path.parent)
    monkeypatch.setattr(preflight, "__package__", tmp_path.name)
    finding = only_problem(check_device([SMALL], 1, timeout=5.0 if check == "step" else 60.0))
    assert (finding.check, finding.outcome) == (check, FAILED)
    assert text in finding.said
