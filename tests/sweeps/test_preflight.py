"""A sweep looks at every kind of node once, before its first run, and takes what was decided for all its runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import settings, write
from isoflop.sweeps.entry import sweep_main
from isoflop.sweeps.grid.product import ProductGrid
from isoflop.sweeps.observe.doctor import examine_sweep
from isoflop.sweeps.runs import preflight
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.preflight import decided, read_record
from isoflop.train.config import DataConfig, RunConfig, TrackerConfig, run_id
from isoflop.train.preflight.preflight import FAILED, PASSED, REPLACED, Finding, hosts_of

DISK = Finding("disk", PASSED, "there is room")
FINE = Finding("loss", PASSED, "the loss is right")
REPLACES = Finding("attention", REPLACED, "attention ours is off by 0.01", {"attention": "sdpa"})
WRONG = Finding("step", FAILED, "a step is off by 0.1")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[Finding]]:
    """Findings of the next checks of a kind of node, one after the other; a check that no test expects fails."""
    given: list[list[Finding]] = []

    def check_device(runs: Any, ranks: int) -> Iterator[Finding]:
        return iter(given.pop(0))

    monkeypatch.setattr(preflight, "check_device", check_device)
    monkeypatch.setattr(preflight, "check_node", lambda *request: iter([DISK]))
    return given


def sweep_of(folder: Path, **changes: Any) -> tuple[SweepDirectory, RunDirectory]:
    config = settings(ProductGrid(axes={"seed": [0]}))
    config.tokens, config.data.cache_dir = 2**16, str(folder.parent / "cache")
    sweep = write(folder, dataclasses.replace(config, **changes))
    return sweep, sweep.runs()[0]


def look(sweep: SweepDirectory) -> list[str]:
    return list(preflight.check_first_job(sweep, [run.config() for run in sweep.runs()], ranks=1))


def test_a_node_that_passed_is_looked_at_once_in_all_sweeps(tmp_path: Path, seen: list[list[Finding]]) -> None:
    first, _ = sweep_of(tmp_path / "first")
    seen.append([FINE, FINE])
    (said,) = look(first)
    assert said.startswith("preflight: 3 checks of ")
    assert look(first) == []
    second, _ = sweep_of(tmp_path / "second")
    assert look(second) == []
    (node,) = read_record(second).nodes.values()
    assert (node.findings, node.of_kind) == ([DISK], [FINE, FINE])  # its disk is this sweep's own affair
    other, _ = sweep_of(tmp_path / "other", precision="bf16")  # whose kernels are others
    seen.append([FINE])
    assert len(look(other)) == 1


def test_a_node_that_failed_is_named_and_looked_at_again_by_the_next_sweep(
    tmp_path: Path, seen: list[list[Finding]]
) -> None:
    first, _ = sweep_of(tmp_path / "first")
    seen.append([FINE, WRONG])
    assert look(first)[0].endswith("\npreflight: failed: a step is off by 0.1")
    assert look(first) == []
    (found,) = [one for one in examine_sweep(first, mend=False) if one.kind == "node"]
    assert (found.is_left, found.how) == (True, "keep it out with cluster.exclude")
    assert "a step is off by 0.1" in found.what
    second, _ = sweep_of(tmp_path / "second")
    seen.append([FINE, FINE])
    assert len(look(second)) == 1


def test_a_second_node_of_a_kind_is_checked_for_its_own_disk_alone(
    tmp_path: Path, seen: list[list[Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, _ = sweep_of(tmp_path / "sweep")
    seen.append([WRONG])
    full = Finding("disk", FAILED, "the disk is full")
    for host, own in (("node1", DISK), ("node2", DISK), ("node3", full)):
        monkeypatch.setattr(preflight, "this_node", lambda host=host: host)
        monkeypatch.setattr(preflight, "check_node", lambda *request, own=own: iter([own]))
        lines = look(sweep)
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


def test_what_was_decided_holds_for_all_runs_and_changes_no_id(tmp_path: Path, seen: list[list[Finding]]) -> None:
    sweep, directory = sweep_of(tmp_path / "sweep")
    assert decided(directory) == directory.config()
    seen.append([REPLACES])
    look(sweep)
    assert decided(directory).parallel.attention == "sdpa"
    assert run_id(decided(directory)) == directory.run_id
    (found,) = [one for one in examine_sweep(sweep, mend=False) if one.kind == "node"]
    assert not found.is_left
    for torn in ('{"decides": {"attention"', '{"decides": ["sdpa"]}', "[1]"):
        (sweep.path / "preflight.json").write_text(torn)
        assert decided(directory) == directory.config()
    seen.append([REPLACES])
    (tmp_path / "cache" / "preflight").rename(tmp_path / "elsewhere")
    look(sweep)
    assert decided(directory).parallel.attention == "sdpa"


def test_hosts_are_asked_that_runs_need(monkeypatch: pytest.MonkeyPatch) -> None:
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
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOFLOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_sweep_looks_before_its_first_run(tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = [*SMALL, f"output_root={tmp_path}"]
    assert sweep_main([*asked, "sweep=off", "preflight=false"]) == 0
    assert not (tmp_path / "off" / "preflight.json").exists()
    assert "preflight" not in capfd.readouterr().out
    assert sweep_main([*asked, "sweep=on"]) == 0
    assert "checks of" in capfd.readouterr().out
    (node,) = json.loads((tmp_path / "on" / "preflight.json").read_text())["nodes"].values()
    assert {one["outcome"] for one in node["findings"] + node["of_kind"]} == {PASSED}
    assert "preflight: " in (tmp_path / "on" / "fit" / "report.html").read_text()
    assert sweep_main([*asked, "sweep=again"]) == 0
    assert "preflight" not in capfd.readouterr().out
    assert len(list((cache / "preflight").iterdir())) == 1
