"""Plans of a sweep from its configuration and from its folder, and growth of a sweep."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from isoflop.sweeps import prepare
from isoflop.sweeps.config import SweepConfig
from isoflop.sweeps.entry import compose
from isoflop.sweeps.execute import conduct
from isoflop.sweeps.grid import extend
from isoflop.sweeps.grid.doubts import doubts
from isoflop.sweeps.prepare import Prepared
from isoflop.sweeps.runs import membership
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.train.config import DataConfig, run_id
from isoflop.train.data.split import split_corpus
from isoflop.train.data.tokenizers import planned_vocab_size
from isoflop.train.errors import UserError
from small_runs import Capture, contents, set_state


@pytest.fixture(scope="module")
def data(small_corpus: Callable[..., DataConfig]) -> DataConfig:
    return small_corpus(validation_tokens=256)


@pytest.fixture(scope="module")
def shared_sweep(data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Plan a small ladder and write it once, for tests that do not change it."""
    prepared = prepare.from_config(configuration(data, tmp_path_factory.mktemp("kept")))
    prepare.write_plan(prepared, ["test"])
    return prepared


@pytest.fixture
def sweep(shared_sweep: Prepared, data: DataConfig, tmp_path: Path) -> Callable[..., Prepared]:
    """Return a function that plans and writes a small ladder; without overrides it copies `shared_sweep`."""

    def make(*overrides: str) -> Prepared:
        if not overrides:
            return prepare.from_disk(SweepDirectory(Path(shutil.copytree(shared_sweep.sweep.path, tmp_path / "sweep"))))
        prepared = prepare.from_config(configuration(data, tmp_path, *overrides))
        prepare.write_plan(prepared, ["test"])
        return prepared

    return make


def configuration(data: DataConfig, folder: Path, *overrides: str) -> SweepConfig:
    config = compose(
        [
            "+grid=ladder", "cluster=local", "cluster.flops_per_second=1e11", "tracker=none", "evaluate=none",
            "data=text", f"data.path={data.path}", f"data.cache_dir={data.cache_dir}", "data.sequence_length=16",
            "data.tokenizer=bytes",
            "grid.sizes=[8e3,2e4]", "grid.tokens_per_parameter=[1,2]", "optimizer.batch_size=4", *overrides,
        ]
    )  # fmt: skip
    config.sweep, config.output_root = "sweep", str(folder)
    return config


def test_a_variant_is_any_set_of_overrides(data: DataConfig, tmp_path: Path) -> None:
    """Check fields and groups; groups are recorded as the fields that they change."""
    variants = "grid.variants={slow:[schedule=cosine,optimizer.learning_rate=1e-3],norm:[model.qk_norm=true]}"
    config = configuration(data, tmp_path, "grid.seeds=[0,1]", "optimizer.learning_rate=5e-3", variants)
    assert config.grid is not None
    assert config.grid.variants == {
        "slow": {"schedule.kind": "cosine", "schedule.final_share": 0.1, "optimizer.learning_rate": 1e-3},
        "norm": {"model.qk_norm": True},
    }
    prepared = prepare.from_config(config)
    prepare.write_plan(prepared, ["test"])
    rates = {(run.variant, run.optimizer.learning_rate, run.schedule.kind) for run in prepared.runs}
    assert rates == {("base", 5e-3, "wsd"), ("slow", 1e-3, "cosine"), ("norm", 5e-3, "wsd")}
    reread = prepare.from_disk(prepared.sweep)
    assert {(run.run_id, run.variant) for run in reread.plan.runs} == {
        (run.run_id, run.variant) for run in prepared.plan.runs
    }


DOUBTS = [
    (["optimizer.learning_rate=1e12"], "optimizer.learning_rate is 1e+12; above 1, runs nearly always diverge"),
    (["optimizer.weight_decay=1e30"], "optimizer.weight_decay times the learning rate is"),
    (["grid.tokens_per_parameter=null", "grid.tokens=[1]"], "the shortest run makes 1 step"),
    (["data.sequence_length=1"], "data.sequence_length is 1; a model without context"),
    (["model.attention=mla", "model.kv_rank=1000"], "model.kv_rank is 1000; above model.width 8"),
    (["model.width=65"], "model.width is 65, which no run has"),
    (["model.heads=6", "model.kv_heads=2"], None),  # every size keeps three heads per key
    (["data.validation_tokens=100000"], "fewer than data.validation_tokens 100,000"),
    (["precision=fp16", "parallel.device=cpu"], "precision is fp16, which is slower than fp32 on a CPU"),
    (["cluster.jobs=100000"], "cluster.jobs is 100000 and this machine has"),
    (["fit.bootstrap=1"], "fit.bootstrap is 1; an interval needs at least 40"),
]


@pytest.mark.parametrize(("overrides", "phrase"), DOUBTS, ids=[" ".join(overrides) for overrides, _ in DOUBTS])
def test_a_doubtful_setting_is_said(overrides: list[str], phrase: str | None, data: DataConfig, tmp_path: Path) -> None:
    config = configuration(data, tmp_path, "tuning=fixed", "data.validation_fraction=0.2", *overrides)
    if "data.validation_tokens=100000" not in overrides:
        config.data.validation_tokens = data.validation_tokens
    notes = list(doubts(config, prepare.from_config(config).runs))
    assert [phrase in note for note in notes] == [True] if phrase else notes == []


def ids(prepared: Prepared) -> set[str]:
    return {run_id(run) for run in prepared.runs}


def test_the_plan_of_the_folder_is_that_of_the_config(shared_sweep: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shared_sweep.sweep.path
    (folder / "fit").mkdir()
    for cwd, path in ((folder, "."), (folder / "fit", ".."), (folder.parent, folder)):
        monkeypatch.chdir(cwd)
        reread = prepare.from_disk(SweepDirectory.open(path))
        assert (reread.config.output_root, reread.config.sweep) == (str(folder.parent), folder.name)
        conduct.check(reread.config)
    assert reread.plan == shared_sweep.plan
    assert reread.config == shared_sweep.config
    assert {run_id(run): run for run in reread.runs} == {run_id(run): run for run in shared_sweep.runs}


def test_a_sweep_grows_without_its_corpus(tmp_path: Path, small_corpus: Callable[..., DataConfig]) -> None:
    """Delete the corpus, which a compute node may not have."""
    moved = small_corpus(validation_tokens=256)
    planned = prepare.from_config(configuration(moved, tmp_path))
    prepare.write_plan(planned, ["test"])
    Path(str(moved.path)).unlink()
    assert prepare.from_disk(planned.sweep).plan == planned.plan
    assert extend.add_grid(planned.sweep, planned.config, extend.as_grid(POINT, "here"), "a test")


POINT = {"kind": "points", "points": [{"model.width": 16, "model.depth": 1, "model.heads": 2, "tokens": 640}]}


def test_what_is_added_is_in_every_later_plan(sweep: Callable[..., Prepared], data: DataConfig, tmp_path: Path) -> None:
    planned = sweep()
    (name,) = extend.add_grid(planned.sweep, planned.config, extend.as_grid(POINT, "here"), "a test")
    assert extend.add_grid(planned.sweep, planned.config, extend.as_grid(POINT, "here"), "a test") == []
    assert [run.run_id for run in membership.members(planned.sweep)][-1] == name
    assert ids(prepare.from_disk(planned.sweep)) == ids(planned) | {name}
    # The command that started the sweep, given again.
    replanned = prepare.from_config(configuration(data, tmp_path))
    assert ids(replanned) == ids(planned) | {name}
    assert prepare.conflict(replanned) is None
    assert planned.sweep.run(name).state().state == "planned"


REQUESTS = [
    (["grid.sizes=[8e3,2e4,4e4]"], "(grid.sizes was [8000.0, 20000.0] and is [8000.0, 20000.0, 40000.0])"),
    (["data.recipe=[gopher]"], '(data.recipe was [] and is ["gopher"])'),
]


@pytest.mark.parametrize(("overrides", "difference"), REQUESTS, ids=[" ".join(overrides) for overrides, _ in REQUESTS])
def test_a_folder_of_another_request_is_refused_with_what_differs(
    shared_sweep: Prepared, data: DataConfig, overrides: list[str], difference: str, capsys: Capture
) -> None:
    folder = shared_sweep.sweep.path
    before = contents(folder)
    other = configuration(data, folder.parent, *overrides)
    with pytest.raises(UserError) as refusal:
        conduct.conduct(other, ["test"])
    for text in (difference, "isoflop extend", "sweep=NAME", "sweep_merge=true", str(folder)):
        assert text in str(refusal.value)
    assert contents(folder) == before
    other.dry_run = True
    assert conduct.conduct(other, ["test"]) == 0
    assert f"note: this sweep would not start: {refusal.value}" in capsys.readouterr().out


def test_settings_that_change_no_run_may_differ(shared_sweep: Prepared, data: DataConfig) -> None:
    """Check settings of jobs, tracker, logging and mesh; a note names the changed fit and evaluation."""
    changes = ["cluster.jobs=1", "cluster.memory_gb=1", "cluster.retries=1", "tracker=wandb", "log_every=3"]
    changes += ["validations=1", "checkpoint.every_steps=7", "parallel.dp=2", "parallel.threads=1", "trunks=false"]
    changes += ["precision=fp32", "fit.bootstrap=7", "evaluate.limit=7"]
    replanned = prepare.from_config(configuration(data, shared_sweep.sweep.path.parent, *changes))
    assert prepare.conflict(replanned) is None
    assert ids(replanned) == ids(shared_sweep)
    (note,) = [remark for remark in replanned.remarks if "bootstrap was" in remark]
    assert "evaluate.limit was 150 and is 7, fit.bootstrap was 1000 and is 7" in note


def test_a_torn_plan_is_written_again(sweep: Callable[..., Prepared], data: DataConfig, tmp_path: Path) -> None:
    planned = sweep()
    (planned.sweep.path / "plan.json").write_text('{"runs": [')
    assert prepare.conflict(prepare.from_config(configuration(data, tmp_path))) is None
    other = prepare.conflict(prepare.from_config(configuration(data, tmp_path, "seed=7")))
    assert other is not None
    assert "seed was 0 and is 7" in other


def test_merged_requests_are_one_sweep(sweep: Callable[..., Prepared], data: DataConfig, tmp_path: Path) -> None:
    first = ids(sweep())
    merged = prepare.from_config(configuration(data, tmp_path, "seed=1", "sweep_merge=true"))
    assert prepare.conflict(merged) is None
    prepare.write_plan(merged, ["test"])
    merged_ids = ids(merged)
    assert len(merged_ids) == 2 * len(first)
    assert first < merged_ids
    assert ids(prepare.from_disk(merged.sweep)) == merged_ids
    for seed in (0, 1):
        replanned = prepare.from_config(configuration(data, tmp_path, f"seed={seed}"))
        assert prepare.conflict(replanned) is None
        prepare.write_plan(replanned, ["test"])
        assert {run.run_id for run in merged.sweep.runs()} == ids(replanned) == merged_ids
    assert prepare.conflict(prepare.from_config(configuration(data, tmp_path, "seed=2"))) is not None
    assert prepare.conflict(prepare.from_config(configuration(data, tmp_path, "seed=2", "sweep_merge=true"))) is None


def test_a_merged_sweep_grows_by_the_newest(sweep: Callable[..., Prepared], data: DataConfig, tmp_path: Path) -> None:
    sweep("grid.sizes=[4e4]")  # a longer run, which is the first of the plan
    other_corpus = tmp_path / "more.txt"
    other_corpus.write_text(Path(str(data.path)).read_text() * 2)
    merged = prepare.from_config(configuration(data, tmp_path, f"data.path={other_corpus}", "sweep_merge=true"))
    prepare.write_plan(merged, ["test"])
    (name,) = extend.add_grid(merged.sweep, merged.config, extend.as_grid(POINT, "here"), "a test")
    assert merged.sweep.run(name).config().data.path == str(other_corpus)


def test_a_grid_is_extended_by_its_changes(sweep: Callable[..., Prepared], tmp_path: Path, capsys: Capture) -> None:
    planned = sweep()
    assert extend.extend_sweep(planned.sweep, ["grid.tokens_per_parameter=[1,2,4]", "dry_run=true"]) == []
    assert re.search(r"dry run: 2 runs would be added, for [1-9]\S+ FLOPs", capsys.readouterr().out)
    assert len(prepare.from_disk(planned.sweep).runs) == 4
    added = extend.extend_sweep(planned.sweep, ["grid.tokens_per_parameter=[1,2,4]"])
    assert len(added) == 2, "the new D of both sizes"
    assert not set(added) & ids(planned)
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump(POINT))
    assert len(extend.extend_sweep(planned.sweep, [], file)) == 1
    assert extend.extend_sweep(planned.sweep, [], file) == []
    assert "nothing was added" in capsys.readouterr().out
    assert len(prepare.from_disk(planned.sweep).runs) == 4 + 2 + 1


@pytest.mark.parametrize(
    ("overrides", "text", "message"),
    [
        ([], None, "extend needs either overrides"),
        (["model.width=3"], None, "it must be FIELD=VALUE of the grid"),
        (["grid.sizes=[x]"], None, "x"),
        (["grid.sizes=[1e5"], None, r"extend was given 'grid.sizes=\[1e5'"),
        (["grid.sizes=[${nope}]"], None, "nope"),
        (["grid.sizs=1"], None, "see conf/grid/ for an example of each kind"),
        (["grid.kind=points"], None, "grid.sizes"),
        ([], "kind: points\npoints: [", "has invalid content: while parsing .*; --grid must be a YAML"),
        ([], "- 1\n", "Expected object, got array; --grid must be a YAML mapping with kind"),
        ([], "kind: spiral\n", "grid.kind is 'spiral', not one of"),
        ([], "kind: points\nponts: []\n", "ponts"),
    ],
)
def test_what_cannot_extend_a_sweep_is_refused_and_adds_nothing(
    shared_sweep: Prepared, tmp_path: Path, overrides: list[str], text: str | None, message: str
) -> None:
    file = tmp_path / "grid.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        extend.extend_sweep(shared_sweep.sweep, overrides, file if text is not None else None)
    assert "version" not in str(error.value), "the file is not of another version"
    assert not (shared_sweep.sweep.path / "added.json").exists()


def test_a_diverged_run_is_repeated_once_at_a_lower_rate_if_the_grid_asks(sweep: Callable[..., Prepared]) -> None:
    planned = sweep()
    first = planned.directories[0]
    set_state(first, "diverged", reason="a test")
    assert extend.replace_diverged(planned.sweep, planned.config) == []
    assert planned.config.grid is not None
    planned.config.grid.diverged_rate_factor = 0.5
    (name,) = extend.replace_diverged(planned.sweep, planned.config)
    assert extend.replace_diverged(planned.sweep, planned.config) == []
    before, after = first.config(), planned.sweep.run(name).config()
    assert after.optimizer.learning_rate == before.optimizer.learning_rate / 2
    assert (after.model, after.tokens, after.seed) == (before.model, before.tokens, before.seed)
    assert membership.replacements(planned.sweep) == {name: first.run_id}
    set_state(planned.sweep.run(name), "diverged", reason="again")
    assert extend.replace_diverged(planned.sweep, planned.config) == [], "a replacement is not replaced"
    set_state(planned.directories[1], "diverged", reason="a test")
    membership.stop_growth(planned.sweep, "a test")
    assert extend.replace_diverged(planned.sweep, planned.config) == [], "a cancelled sweep does not grow"
    prepare.write_plan(planned)  # as a keeper does
    assert membership.is_stopped(planned.sweep)
    prepare.write_plan(planned, ["test"])  # as the command does
    assert len(extend.replace_diverged(planned.sweep, planned.config)) == 1


def test_a_folder_of_another_version_is_refused_in_a_sentence(sweep: Callable[..., Prepared]) -> None:
    planned = sweep()
    file = planned.sweep.path / "sweep.yaml"
    settings = yaml.safe_load(file.read_text())
    settings["config"]["cluster"]["number_of_hamsters"] = 3
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(UserError, match=r"number_of_hamsters.*use the version that wrote it") as caught:
        prepare.from_disk(planned.sweep)
    assert "\n" not in str(caught.value)


def test_processes_can_add_runs_at_once(sweep: Callable[..., Prepared]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    planned = sweep()

    def add(seed: int) -> list[str]:
        grid = POINT | {"points": [POINT["points"][0] | {"seed": seed % 4}]}  # type: ignore[index,operator]
        return extend.add_grid(planned.sweep, planned.config, extend.as_grid(grid, "here"), "a test")

    with ThreadPoolExecutor(8) as pool:
        added = [name for names in pool.map(add, range(8)) for name in names]
    assert len(added) == len(set(added)) == 4
    assert set(json.loads((planned.sweep.path / "added.json").read_text())) == set(added)


CONTENT = (  # axes over what runs read, the number of distinct values, and a value of the first run
    ("data.path: [A, B], data.max_bytes: [2000, 4000]", 4, {"max_bytes": 2000}),
    ("data.tokenizer: [bpe], data.vocab_size: [280, 300, 320], seed: [0, 1]", 6, {"vocab_size": 280}),
    ("data.tokenizer: [bytes, bpe], data.path: [A]", 2, {"tokenizer": "bytes"}),
    ("data.path: [A, A], data.validation_fraction: [0.1, 0.2]", 2, {"validation_fraction": 0.1}),
)


@pytest.mark.parametrize(("axes", "count", "first"), CONTENT, ids=[axes for axes, _, _ in CONTENT])
def test_a_grid_over_texts_has_distinct_runs(axes: str, count: int, first: dict[str, object], tmp_path: Path) -> None:
    for name in "ABC":
        path = tmp_path / name
        path.mkdir()
        for number in range(20):
            (path / f"{number}.txt").write_text(f"{name} {number} of a corpus of words " * 40)
        axes = axes.replace(f"[{name}", f"[{path}").replace(f", {name}", f", {path}")
    named = [] if "data.path" in axes else [f"data.path={tmp_path / 'A'}"]
    config = compose(
        [
            "+grid=product", "data=text", *named, f"data.cache_dir={tmp_path / 'cache'}", f"grid.axes={{{axes}}}",
            "tokens=4096", "tuning=fixed", "data.sequence_length=16", "cluster=local", "evaluate=none",
        ]
    )  # fmt: skip
    runs, _ = prepare.resolve_runs(config)
    assert len({run_id(run) for run in runs}) == len(runs) == count
    for run in runs:
        alone = replace(run.data, fingerprint=None)
        assert run.data.fingerprint == split_corpus(alone).fingerprint()
        assert run.model.vocab_size == planned_vocab_size(run.data)
    for name, value in first.items():
        expected = str(tmp_path / "A") if name == "path" else value
        assert getattr(runs[0].data, name) == expected
