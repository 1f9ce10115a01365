"""A branch starts from its trunk's checkpoint, despite faults, and has the bits of a run trained alone."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from isoflop.sweeps.execute.controller import can_begin
from isoflop.sweeps.plan.trunks import graft, merge_runs
from isoflop.sweeps.runs.directory import RunDirectory
from isoflop.train.checkpoint import checkpoint
from isoflop.train.checkpoint.checkpoint import load_for_evaluation
from isoflop.train.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrackerConfig,
    run_id,
)
from isoflop.train.data.shards import Shards, prepare
from isoflop.train.errors import UserError
from isoflop.train.loop import Stopped, train
from small_runs import Patch, assert_same_end, assert_same_run, logged_steps, set_state, stop_after

TRUNK_STEPS, BRANCH_STEPS, BEGIN = 40, 20, 16
Runs, Grafted = dict[int, RunDirectory], tuple[RunDirectory, RunConfig]


@pytest.fixture(scope="module")
def run(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    return RunConfig(
        model=ModelConfig(width=16, depth=2, heads=2, vocab_size=256),
        data=small_corpus(256),
        optimizer=OptimizerConfig(batch_size=4),
        schedule=ScheduleConfig(warmup_tokens=128),
        parallel=ParallelConfig(device="cpu", threads=1),
        checkpoint=CheckpointConfig(every_seconds=1e9, every_steps=3, keep=1),
        tracker=TrackerConfig(kind="none"),
        log_every=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def shards(run: RunConfig) -> Shards:
    return prepare(run.data)


def of_steps(run: RunConfig, *steps: int) -> list[RunConfig]:
    return [replace(run, tokens=number * run.batch_tokens) for number in steps]


def directory(root: Path, config: RunConfig) -> RunDirectory:
    run = RunDirectory(root / run_id(config))
    run.freeze(config)
    return run


def trained(root: Path, config: RunConfig, shards: Shards) -> RunDirectory:
    run = directory(root, config)
    train(config, run.path, report=lambda line: None, shards=shards)
    set_state(run, "done")
    return run


@pytest.fixture(scope="module")
def trained_alone(run: RunConfig, shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> dict[int, RunDirectory]:
    """Train both runs from their first step, without trunks; return them by number of steps."""
    root = tmp_path_factory.mktemp("alone")
    return {config.steps: trained(root, config, shards) for config in of_steps(run, TRUNK_STEPS, BRANCH_STEPS)}


@pytest.fixture(scope="module")
def sweep(run: RunConfig, shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, RunConfig]:
    """Train a trunk; return it with the config of its branch. Tests must not change them."""
    trunk, branch = merge_runs(of_steps(run, TRUNK_STEPS, BRANCH_STEPS)).runs
    assert (trunk.checkpoint.at_steps, branch.parent) == ([BEGIN], run_id(trunk))
    return trained(tmp_path_factory.mktemp("sweep"), trunk, shards), branch


def test_saving_for_branches_changes_no_bit(sweep: Grafted, trained_alone: Runs) -> None:
    assert_same_run(sweep[0].path, trained_alone[TRUNK_STEPS].path)
    # Checkpoints for branches are kept in addition to the number that `keep` allows.
    checkpoints = {path.name for path in (sweep[0].path / "checkpoints").iterdir()}
    assert checkpoints == {f"step_{BEGIN}", f"step_{TRUNK_STEPS}"}


def test_a_branch_is_the_run_trained_alone(sweep: Grafted, trained_alone: Runs, shards: Shards, tmp_path: Path) -> None:
    trunk, config = sweep
    branch = directory(tmp_path, config)
    assert graft(branch, trunk) == f"begins at step {BEGIN} of run {trunk.run_id}, whose checkpoint is linked here"
    messages: list[str] = []
    train(branch.config(), branch.path, report=messages.append, shards=shards)
    assert messages == [f"resumed from step_{BEGIN} of {BRANCH_STEPS} steps"]
    assert_same_end(branch.path, trained_alone[BRANCH_STEPS].path)
    curve, expected = logged_steps(branch.path), logged_steps(trained_alone[BRANCH_STEPS].path)
    assert sorted(curve) == sorted(expected) == list(range(1, BRANCH_STEPS + 1))
    for step, line in expected.items():  # the trunk decides at which earlier steps the held-out set is scored
        assert {key: curve[step][key] for key in line if not key.startswith("val")} == {
            key: value for key, value in line.items() if not key.startswith("val")
        }
    # Its clock includes the trunk's part, so that tokens_per_s and the fitted seconds are those of the whole run.
    state = json.loads((trunk.path / "checkpoints" / f"step_{BEGIN}" / "trainer.json").read_text())
    assert (branch.summary() or {})["seconds"] > state["seconds"] > 0
    # Its checkpoints belong to the branch, not to the trunk.
    assert run_id(load_for_evaluation(branch.path).config) == branch.run_id


def test_a_resumed_trunk_changes_no_branch(run: RunConfig, trained_alone: Runs, shards: Shards, tmp_path: Path) -> None:
    trunk, branch = (
        directory(tmp_path, config) for config in merge_runs(of_steps(run, TRUNK_STEPS, BRANCH_STEPS)).runs
    )
    for steps in (11, 8):  # up to step 11, and then to 19
        with pytest.raises(Stopped):
            train(trunk.config(), trunk.path, stop_after(steps), report=lambda line: None, shards=shards)
    graft(branch, trunk)  # the trunk need not be done
    with pytest.raises(Stopped):
        train(branch.config(), branch.path, stop_after(2), report=lambda line: None, shards=shards)
    assert graft(branch, trunk) is None  # the branch has a newer checkpoint
    messages: list[str] = []
    train(branch.config(), branch.path, report=messages.append, shards=shards)
    assert messages == [f"resumed from step_{BEGIN + 2} of {BRANCH_STEPS} steps"]
    assert_same_end(branch.path, trained_alone[BRANCH_STEPS].path)


def test_a_branch_without_decay_ends_with_its_own_step(run: RunConfig, shards: Shards, tmp_path: Path) -> None:
    long, short = merge_runs(of_steps(replace(run, schedule=ScheduleConfig("constant", warmup_tokens=0)), 12, 5)).runs
    branch = directory(tmp_path, short)
    graft(branch, trained(tmp_path, long, shards))
    messages: list[str] = []
    train(short, branch.path, report=messages.append, shards=shards)
    assert messages == ["resumed from step_4 of 5 steps"]
    reference = trained(tmp_path / "alone", short, shards)
    assert_same_end(branch.path, reference.path)
    assert logged_steps(branch.path)[5] == logged_steps(reference.path)[5]


def test_grafting_twice_or_at_once_does_no_harm(sweep: Grafted, tmp_path: Path) -> None:
    trunk, config = sweep
    branch = directory(tmp_path, config)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)

    def work() -> None:
        barrier.wait()
        graft(branch, trunk)

    workers = [context.Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert [path.name for path in (branch.path / "checkpoints").iterdir()] == [f"step_{BEGIN}"]
    assert checkpoint.damage(branch.path / "checkpoints" / f"step_{BEGIN}") is None
    assert graft(branch, trunk) is None
    assert sorted(logged_steps(branch.path)) == list(range(1, BEGIN + 1))


def test_a_checkpoint_is_linked_or_copied(sweep: Grafted, tmp_path: Path, monkeypatch: Patch) -> None:
    trunk, config = sweep
    linked, copied = directory(tmp_path / "here", config), directory(tmp_path / "there", config)
    graft(linked, trunk)

    def refused(*arguments: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert str(graft(copied, trunk)).endswith("is copied here")
    step = Path("checkpoints") / f"step_{BEGIN}"
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json"):
        assert (linked.path / step / name).samefile(trunk.path / step / name)
        assert not (copied.path / step / name).samefile(trunk.path / step / name)
    for branch in (linked, copied):
        assert checkpoint.damage(branch.path / step) is None
        assert not (branch.path / step / "manifest.json").samefile(trunk.path / step / "manifest.json")
    shutil.rmtree(linked.path)
    assert checkpoint.damage(trunk.path / step) is None


def dying(function: Callable[..., Any], fatal: int) -> Callable[..., Any]:
    """Return the function, but exit the process with code 9 at call number `fatal`."""
    calls = itertools.count()
    return lambda *arguments: os._exit(9) if next(calls) == fatal else function(*arguments)


def test_a_kill_or_a_full_disk_leaves_nothing(sweep: Grafted, tmp_path: Path, monkeypatch: Patch) -> None:
    trunk, config = sweep
    branch = directory(tmp_path, config)
    root = branch.path / "checkpoints"

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for module, name in ((shutil, "copyfile"), (checkpoint, "fsync_path")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", full)
            patch.setattr(module, name, full)
            with pytest.raises(OSError, match="No space left"):
                graft(branch, trunk)
        assert not root.exists() or not any(root.iterdir())
    for module, name, fatal in ((os, "link", 3), (checkpoint, "fsync_path", 1), (os, "replace", 0)):
        if (child := os.fork()) == 0:
            monkeypatch.setattr(module, name, dying(getattr(module, name), fatal))
            graft(branch, trunk)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert not can_begin(branch, directory(tmp_path / "nothing", config), BEGIN)
        assert checkpoint.newest_valid(root, report=lambda line: None) is None
    assert graft(branch, trunk) is not None
    assert checkpoint.newest_valid(root, report=lambda line: None) == root / f"step_{BEGIN}"


def test_a_trunk_without_a_whole_checkpoint_is_refused(sweep: Grafted, tmp_path: Path) -> None:
    trunk, config = sweep
    broken = RunDirectory(Path(shutil.copytree(trunk.path, tmp_path / trunk.run_id)))
    branch = directory(tmp_path, config)
    begins = f"run {branch.run_id} begins at step {BEGIN} of run {trunk.run_id}"
    source = broken.path / "checkpoints" / f"step_{BEGIN}"
    with (source / "model.safetensors").open("rb+") as file:
        file.truncate(1000)
    with pytest.raises(UserError) as raised:
        graft(branch, broken)
    size = (trunk.path / "checkpoints" / f"step_{BEGIN}" / "model.safetensors").stat().st_size
    assert str(raised.value) == (
        f"{begins}, whose checkpoint there is damaged: model.safetensors has 1000 bytes instead of {size}; remove "
        f"{source} and start the sweep again"
    )
    shutil.rmtree(source)
    set_state(broken, "diverged", reason="the smoothed loss rose")
    with pytest.raises(UserError) as raised:
        graft(branch, broken)
    assert str(raised.value) == (
        f"{begins}, which has no checkpoint there and is diverged (the smoothed loss rose); start the sweep again, or "
        "give trunks=false to train every run from its first step"
    )
    assert not (branch.path / "checkpoints").exists()
    assert not (branch.path / "metrics.jsonl").exists()
