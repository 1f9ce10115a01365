"""A sweep checks every kind of node once, before its first run, and uses the decisions for all its runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import make_config, write_sweep
from isoflop.sweeps.entry import sweep_main
from isoflop.sweeps.grid.product import ProductGrid
from isoflop.sweeps.observe.doctor import examine_sweep
from isoflop.sweeps.runs import preflight
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.preflight import decided, read_record
from isoflop.train.config import DataConfig, RunConfig, TrackerConfig, run_id
from isoflop.train.preflight.preflight import FAILED, PASSED, REPLACED, Finding, hosts_of
from small_runs import Patch

DISK = Finding("disk", PASSED, "there is room")
FINE = Finding("loss", PASSED, "the loss is right")
REPLACES = Finding("attention", REPLACED, "attention ours is off by 0.01", {"attention": "sdpa"})
WRONG = Finding("step", FAILED, "a step is off by 0.1")


@pytest.fixture
def pending_findings(monkeypatch: Patch) -> list[list[Finding]]:
    """Return a list of the findings of the next checks of a kind of node; an unexpected check fails."""
    pending: list[list[Finding]] = []

    def check_device(runs: Any, ranks: int) -> Iterator[Finding]:
        return iter(pending.pop(0))

    monkeypatch.setattr(preflight, "check_device", check_device)
    monkeypatch.setattr(preflight, "check_node", lambda *request: iter([DISK]))
    return pending


def sweep_of(folder: Path, **changes: Any) -> tuple[SweepDirectory, RunDirectory]:
    config = make_config(ProductGrid(axes={"seed": [0]}))
    config.tokens, config.data.cache_dir = 2**16, str(folder.parent / "cache")
    sweep = write_sweep(folder, dataclasses.replace(config, **changes))
    return sweep, sweep.runs()[0]


def check_first_job(sweep: SweepDirectory) -> list[str]:
    return list(preflight.check_first_job(sweep, [run.config() for run in sweep.runs()], ranks=1))


def test_a_node_that_passed_is_checked_only_once(tmp_path: Path, pending_findings: list[list[Finding]]) -> None:
    first, _ = sweep_of(tmp_path / "first")
    pending_findings.append([FINE, FINE])
    (line,) = check_first_job(first)
    assert line.startswith("preflight: 3 checks of ")
    assert check_first_job(first) == []
    second, _ = sweep_of(tmp_path / "second")
    assert check_first_job(second) == []
    (node,) = read_record(second).nodes.values()
    assert (node.findings, node.of_kind) == ([DISK], [FINE, FINE])  # every sweep checks its own disk
    other, _ = sweep_of(tmp_path / "other", precision="bf16")  # which uses other kernels
    pending_findings.append([FINE])
    assert len(check_first_job(other)) == 1


def test_a_node_that_failed_is_checked_again(tmp_path: Path, pending_findings: list[list[Finding]]) -> None:
    first, _ = sweep_of(tmp_path / "first")
    pending_findings.append([FINE, WRONG])
    assert check_first_job(first)[0].endswith("\npreflight: failed: a step is off by 0.1")
    assert check_first_job(first) == []
    (finding,) = [fault for fault in examine_sweep(first, repair=False) if fault.kind == "node"]
    assert (finding.is_left, finding.how) == (True, "exclude it with cluster.exclude")
    assert "a step is off by 0.1" in finding.what
    second, _ = sweep_of(tmp_path / "second")
    pending_findings.append([FINE, FINE])
    assert len(check_first_job(second)) == 1


def test_a_second_node_has_its_disk(tmp_path: Path, pending_findings: list[list[Finding]], monkeypatch: Patch) -> None:
    sweep, _ = sweep_of(tmp_path / "sweep")
    pending_findings.append([WRONG])
    full_disk = Finding("disk", FAILED, "the disk is full")
    for host, disk in (("node1", DISK), ("node2", DISK), ("node3", full_disk)):
        monkeypatch.setattr(preflight, "this_node", lambda host=host: host)
        monkeypatch.setattr(preflight, "check_node", lambda *request, disk=disk: iter([disk]))
        lines = check_first_job(sweep)
        assert len(lines) == (0 if host == "node2" else 1)
    assert "preflight: failed: the disk is full" in lines[0]
    assert {host: node.of_kind for host, node in read_record(sweep).nodes.items()} == {
        host: [WRONG] for host in ("node1", "node2", "node3")
    }


def test_a_record_of_an_older_version_is_read(tmp_path: Path) -> None:
    sweep, directory = sweep_of(tmp_path / "sweep")
    finding = {"check": "speed", "outcome": "passed", "said": "fast", "decides": {}, "numbers": {"flops": 1e9}}
    node = {"kind": "abc", "findings": [finding], "of_kind": [], "seconds": 3.0}
    document = {"decides": {"attention": "sdpa"}, "nodes": {"node1": node}}
    (sweep.path / "preflight.json").write_text(json.dumps(document))
    assert read_record(sweep).nodes["node1"].findings == [Finding("speed", PASSED, "fast")]
    assert decided(directory).parallel.attention == "sdpa"


def test_what_was_decided_holds_for_all_runs(tmp_path: Path, pending_findings: list[list[Finding]]) -> None:
    sweep, directory = sweep_of(tmp_path / "sweep")
    assert decided(directory) == directory.config()
    pending_findings.append([REPLACES])
    check_first_job(sweep)
    assert decided(directory).parallel.attention == "sdpa"
    assert run_id(decided(directory)) == directory.run_id
    (finding,) = [fault for fault in examine_sweep(sweep, repair=False) if fault.kind == "node"]
    assert not finding.is_left
    for text in ('{"decides": {"attention"', '{"decides": ["sdpa"]}', "[1]"):
        (sweep.path / "preflight.json").write_text(text)
        assert decided(directory) == directory.config()
    pending_findings.append([REPLACES])
    (tmp_path / "cache" / "preflight").rename(tmp_path / "elsewhere")
    check_first_job(sweep)
    assert decided(directory).parallel.attention == "sdpa"


def test_hosts_are_asked_that_runs_need(monkeypatch: Patch) -> None:
    def hosts(mode: str = "auto", **data: str) -> list[str]:
        return hosts_of(RunConfig(data=DataConfig(**data), tracker=TrackerConfig(mode=mode)))  # type: ignore[arg-type]

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert hosts() == []
    assert hosts(corpus="hf") == ["huggingface.co"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hosts("online", corpus="hf") == ["api.wandb.ai"]


SMALL = [
    *("+grid=smoke", "grid.sizes=[2.5e3]", "grid.tokens=[4096]", "data.max_bytes=1000000", "data.sequence_length=32"),
    *("data.validation_tokens=4096", "cluster=local", "cluster.flops_per_second=1e11", "tracker=none", "evaluate=none"),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("ISOFLOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_sweep_looks_before_its_first_run(tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = [*SMALL, f"output_root={tmp_path}"]
    assert sweep_main([*overrides, "sweep=off", "preflight=false"]) == 0
    assert not (tmp_path / "off" / "preflight.json").exists()
    assert "preflight" not in capfd.readouterr().out
    assert sweep_main([*overrides, "sweep=on"]) == 0
    assert "checks of" in capfd.readouterr().out
    (node,) = json.loads((tmp_path / "on" / "preflight.json").read_text())["nodes"].values()
    assert {finding["outcome"] for finding in node["findings"] + node["of_kind"]} == {PASSED}
    assert "preflight: " in (tmp_path / "on" / "fit" / "report.html").read_text()
    assert sweep_main([*overrides, "sweep=again"]) == 0
    assert "preflight" not in capfd.readouterr().out
    assert len(list((cache / "preflight").iterdir())) == 1
