"""A recipe has one spelling, is part of a run's identity, and keeps the same documents however it is run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isoflop.sweeps.grid import expand as grid
from isoflop.sweeps.grid.ladder import LadderGrid
from isoflop.sweeps.grid.product import ProductGrid
from isoflop.train.config import DataConfig, ModelConfig, RunConfig, run_id
from isoflop.train.data.corpora import open_corpus
from isoflop.train.data.mixing import content_hash
from isoflop.train.data.recipe import pool, recipe, refine
from isoflop.train.data.recipe.pool import Pool
from isoflop.train.data.recipe.refine import Refinery
from isoflop.train.data.shards import Shards, prepare
from isoflop.train.errors import UserError

FULL = ["length:5-", "symbols:0.5", "exact", "near:0.8", "bloom:0.5"]


def documents(count: int = 400, seed: int = 0) -> list[str]:
    """Return random texts, with short ones, symbols, copies and near copies among them."""
    generator = random.Random(seed)
    words = [f"w{i}" for i in range(2000)]
    texts: list[str] = []
    while len(texts) < count:
        kind = generator.random()
        if kind < 0.05:
            texts.append(" ".join(generator.choices(words, k=3)))
        elif kind < 0.1:
            texts.append("# " * 30 + str(len(texts)))
        elif kind < 0.5 and len(texts) > 10:
            copy = generator.choice(texts).split()
            if generator.random() < 0.7:
                copy[generator.randrange(len(copy))] = generator.choice(words)
            texts.append(" ".join(copy))
        else:
            texts.append(" ".join(generator.choices(words, k=generator.randrange(20, 120))))
    return texts


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    monkeypatch.setattr(refine, "PART_DOCUMENTS", 37)  # many parts of few documents
    write(tmp_path / "rows.jsonl", documents())
    return DataConfig(
        corpus="text", path=str(tmp_path / "rows.jsonl"), validation_fraction=0.1, cache_dir=str(tmp_path / "cache")
    )


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "usable_cores", lambda: 1)


def write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def prepared(config: DataConfig, steps: list[str], **changes: Any) -> Shards:
    return prepare(dataclasses.replace(config, recipe=steps, **changes))


def texts_of(shards: Shards, part: str = "train") -> list[str]:
    tokens, starts = getattr(shards, part), np.load(shards.directory / f"{part}.documents.npy")
    return [shards.tokenizer.decode(tokens[a : b - 1]) for a, b in itertools.pairwise(starts)]


def test_a_recipe_has_one_spelling() -> None:
    assert recipe.canonical(["gopher", " near ", "length:050-1e3", "language:EN"]) == [
        "gopher", "near:0.8", "length:50-1000", "language:en@0.65"]  # fmt: skip
    assert recipe.fingerprint(["near"]) == recipe.fingerprint(["near:0.80"]) != recipe.fingerprint(["near:0.8000001"])
    assert recipe.fingerprint([]) is None
    assert recipe.recipe_label([]) == "raw"
    assert recipe.recipe_label(["exact", "near"]) == "exact+near:0.8"
    others = (["exact"], ["near"], ["near:0.7"], ["exact", "near"], ["near", "exact"])
    assert len({recipe.fingerprint(steps) for steps in others}) == 5


def test_a_model_counts_by_its_content_wherever_it_lies(tmp_path: Path) -> None:
    for folder, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.bin").write_bytes(content)
    a, b, c = (recipe.fingerprint([f"quality:{tmp_path / name}/model.bin@0.5"]) for name in "abc")
    assert a == b != c
    assert a != recipe.fingerprint([f"quality:{tmp_path}/a/model.bin@0.6"])
    assert recipe.recipe_label([f"quality:{tmp_path}/a/model.bin@0.5"]) == "quality:model.bin@0.5"


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ("gohper", "nearest: gopher"),
        ("near:1.5", "at most 1"),
        ("near:0.02", "at least 0.05"),  # one band, which would miss 98 % of such pairs
        ("near:high", "'high'"),
        ("exact:1", "no argument"),
        ("length:9-3", "MAX"),
        ("language:english", "ISO 639"),
        ("quality:/nowhere/model.bin@0.5", "no such file"),
    ],
)
def test_a_bad_step_is_named_with_what_is_accepted(step: str, problem: str) -> None:
    with pytest.raises(UserError, match=rf"data.recipe contains '{step}.*{problem}"):
        recipe.fingerprint([step])


def test_a_package_that_a_step_needs_is_missed_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    base = RunConfig(model=ModelConfig(vocab_size=256), tokens=100_000)
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    for step, package in (("near", "rensa"), ("bloom", "rbloom"), ("language:en", "py3langid")):
        with pytest.raises(UserError, match=f"pip install {package}"):
            grid.expand_grid(ProductGrid(axes={"data.recipe": [[step]]}), base)
    assert len(grid.expand_grid(ProductGrid(axes={"data.recipe": [["gopher", "exact"]]}), base)) == 1


def test_a_grid_takes_recipes_as_it_takes_seeds() -> None:
    base = RunConfig(model=ModelConfig(vocab_size=256), tokens=0)
    ladder = LadderGrid(sizes=[1e4, 2e4], tokens=[100_000])
    without_recipes = {run_id(run) for run in grid.expand_grid(ladder, base)}
    ladder.recipes = [[], ["exact", "near"], ["near:0.80"], ["near"]]  # the last two are one
    runs = grid.expand_grid(ladder, base)
    assert len(runs) == 2 * 3
    assert without_recipes == {run_id(run) for run in runs if not run.data.recipe}
    assert {tuple(run.data.recipe) for run in runs} == {(), ("exact", "near:0.8"), ("near:0.8",)}
    assert all(run.data.recipe_fingerprint == recipe.fingerprint(run.data.recipe) for run in runs)
    assert all((run.name or "").endswith("exact+near:0.8") for run in runs if len(run.data.recipe) == 2)
    base.tokens = 100_000
    product = grid.expand_grid(ProductGrid(axes={"data.recipe": [[], ["gopher"]], "seed": [0, 1]}), base)
    assert [run.data.recipe for run in product] == [[], [], ["gopher"], ["gopher"]]
    with pytest.raises(UserError, match="is not a step"):
        grid.expand_grid(ProductGrid(axes={"data.recipe": [["gofer"]]}), base)


def test_every_step_counts_what_it_removes_and_nothing_is_lost(corpus: DataConfig) -> None:
    raw, shards = prepared(corpus, []), prepared(corpus, FULL)
    report = shards.manifest["recipe"]
    assert "recipe" not in raw.manifest
    for unit in ("documents", "bytes"):
        gone = sum(step[unit] for step in report["steps"])
        assert report["raw"][unit] == raw.manifest["train"][unit] == report["kept"][unit] + gone
        assert report["kept"][unit] == shards.manifest["train"][unit]
    assert all(sum(step["reasons"].values()) == step["documents"] > 0 for step in report["steps"])
    train, before = texts_of(shards), texts_of(raw)
    assert sum(len(text.split()) < 5 for text in before) == report["steps"][0]["documents"]
    assert sum(text.startswith("#") for text in before) == report["steps"][1]["documents"]
    assert all(len(text.split()) >= 5 and not text.startswith("#") for text in train)
    assert len(set(train)) == len(train) < len(set(before))
    assert set(train) < set(before)
    assert report["steps"][3]["leaked"]["documents"] > 0


def test_every_recipe_is_scored_on_the_same_text_with_the_same_tokenizer(corpus: DataConfig) -> None:
    for tokenizer in ("bytes", "bpe"):
        config = dataclasses.replace(corpus, tokenizer=tokenizer, vocab_size=300)
        raw, shards = prepared(config, []), prepared(config, ["length:50-", "near:0.5"])
        assert len(shards.train) < len(raw.train)
        assert (np.asarray(shards.validation) == np.asarray(raw.validation)).all()
        ends, expected = (np.load(variant.directory / "validation.documents.npy") for variant in (shards, raw))
        assert (ends == expected).all()
        assert shards.tokenizer.fingerprint == raw.tokenizer.fingerprint


def test_held_out_text_stays_when_its_extremes_are_removed_from_training(tmp_path: Path) -> None:
    """The lowest hash is held out and the highest never, in the raw text, before the recipe."""
    texts = [f"text number {i} " * (2 if i % 2 else 9) for i in range(30)]
    texts.sort(key=lambda text: content_hash(text.encode()))
    while len(texts[-1].split()) > 6:  # until the recipe removes the highest
        texts.pop()
    write(tmp_path / "rows.jsonl", texts)
    config = DataConfig(corpus="text", path=str(tmp_path / "rows.jsonl"), validation_fraction=1e-9,
                        cache_dir=str(tmp_path / "cache"))  # fmt: skip
    shards = prepared(config, ["length:10-"])
    assert texts_of(shards, "validation") == texts[:1]
    assert sorted(texts_of(shards)) == sorted(text for text in texts[1:] if len(text.split()) >= 10)


def test_the_result_owes_nothing_to_processes_parts_or_files(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process = prepared(corpus, FULL)
    with monkeypatch.context() as context:
        context.setattr(pool, "usable_cores", lambda: 3)
        in_pool = prepared(corpus, FULL, cache_dir=str(tmp_path / "three"))
    assert contents(in_process) == contents(in_pool)
    monkeypatch.setattr(refine, "PART_DOCUMENTS", 101)
    texts = documents()
    random.Random(1).shuffle(texts)
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "a.jsonl", texts[:150])
    write(tmp_path / "files" / "b.jsonl", texts[150:])
    other_files = prepared(corpus, FULL, path=str(tmp_path / "files"), cache_dir=str(tmp_path / "other"))
    assert texts_of(in_process) == texts_of(other_files)
    assert in_process.manifest["recipe"]["steps"] == other_files.manifest["recipe"]["steps"]


def contents(shards: Shards) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in shards.directory.iterdir()}


def test_examples_show_what_went_and_what_it_was_like(corpus: DataConfig) -> None:
    shards = prepared(corpus, FULL)
    rows = [json.loads(line) for line in (shards.directory / "recipe.examples.jsonl").read_text().splitlines()]
    train = set(texts_of(shards))
    for step in shards.manifest["recipe"]["steps"]:
        shown = [row for row in rows if row["step"] == step["step"]]
        assert len(shown) == min(20, step["documents"])
        assert all(row["text"] and row["reason"] in step["reasons"] for row in shown)
        if step["step"] != "exact":
            assert not {row["text"] for row in shown} & train
    near = [row for row in rows if row["step"] == "near:0.8"]
    assert all(set(row["like"].split()) & set(row["text"].split()) for row in near)
    assert all(row["like"] == row["text"] for row in rows if row["step"] == "exact")


def test_a_recipe_that_leaves_nothing_names_the_step_that_took_most(corpus: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"removes all .*'length:10000-'"):
        prepared(corpus, ["exact", "length:10000-"])
    for folder in ("shards", "recipes"):
        assert not list((tmp_path / "cache" / folder).glob("*"))


def test_a_recipe_that_changed_since_it_was_planned_is_refused(corpus: DataConfig) -> None:
    with pytest.raises(UserError, match="recipe_fingerprint is abc"):
        prepared(corpus, ["exact"], recipe_fingerprint="abc")
    assert len(prepared(corpus, ["exact"], recipe_fingerprint=recipe.fingerprint(["exact"])).train)


SLOW = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
from isoflop.train.config import DataConfig
from isoflop.train.data.recipe import pool, refine
from isoflop.train.data.shards import prepare
pool.usable_cores = lambda: 1
refine.PART_DOCUMENTS = 37
for name in ("filter_part", "sign_part", "write_part"):
    def slow(*job, work=getattr(refine, name)):
        print(work.__name__, flush=True)
        time.sleep(0.05)
        return work(*job)
    setattr(refine, name, slow)
prepare(DataConfig(corpus="text", path=sys.argv[1], validation_fraction=0.1, cache_dir=sys.argv[2],
                   recipe=sys.argv[3].split()))
print("done")
"""


@pytest.mark.parametrize(("kill_signal", "kills"), [(signal.SIGKILL, (5, 16)), (signal.SIGINT, (26,))])
@pytest.mark.slow
def test_a_killed_prepare_goes_on_from_what_it_had_finished(
    corpus: DataConfig, tmp_path: Path, kill_signal: int, kills: tuple[int, ...]
) -> None:
    """The last start does only the jobs that earlier ones had not done; the result is that of one start."""
    command = [sys.executable, "-c", SLOW, str(corpus.path), str(tmp_path / "killed"), " ".join(FULL)]
    total = 2 * 11 + 11  # jobs of the three kinds, of 11 parts each
    seen = 0
    for kill_at in kills:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        lines = [process.stdout.readline() for _ in range(kill_at - seen)]
        assert "done" not in lines[-1]
        process.send_signal(kill_signal)
        process.wait()
        seen = kill_at - 1  # the job that the kill hit is not done
        assert not [path for path in (tmp_path / "killed" / "shards").glob("*") if not path.name.startswith(".")]
    last = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert last[-1] == "done"
    # Each kill costs at most the job that it hit, and the line that was in the pipe.
    assert len(last) - 1 <= total - seen + len(kills)
    expected = prepared(corpus, FULL, cache_dir=str(tmp_path / "whole"))
    (directory,) = (path for path in (tmp_path / "killed" / "shards").iterdir() if path.is_dir())
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == contents(expected)
    assert not list((tmp_path / "killed" / "recipes").iterdir())


def test_parts_of_before_do_not_add_to_those_of_now(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text in other files may be cut into fewer parts than a killed prepare left."""

    def refined() -> tuple[Path, int]:
        refinery = Refinery(open_corpus(corpus), "same text", ["length:5-"], 0.1, tmp_path)
        return refinery.folder, len(refinery.run().held)

    folder, count = refined()
    (folder / "parts.npz").unlink()  # killed before it recorded the number of parts
    monkeypatch.setattr(refine, "PART_DOCUMENTS", 101)
    for part in folder.glob("*.0.npz"):
        part.unlink()
    assert refined() == (folder, count)


def test_a_pool_reads_ahead_by_little_and_gives_every_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pickle.py").write_text("raise SystemExit(3)")  # its folder is no place of modules for the workers
    monkeypatch.chdir(tmp_path)
    pulled = 0

    def jobs() -> Iterator[tuple[int]]:
        nonlocal pulled
        for i in range(50):
            pulled += 1
            yield (-i,)

    with Pool(2) as workers:
        results = workers.map(abs, jobs())
        first = next(results)
        assert pulled <= 5
        assert sorted([first, *results]) == list(range(50))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_in_a_worker_is_the_callers(processes: int) -> None:
    with Pool(processes) as workers, pytest.raises(UserError, match="is not a step"):
        list(workers.map(recipe.parse, [(["exact"],), (["nonsense"],)]))


def test_a_pool_whose_jobs_fail_while_its_workers_start_ends() -> None:
    def jobs() -> Iterator[tuple[int]]:
        yield (1,)
        raise ValueError("unreadable")

    with Pool(2) as workers, pytest.raises(ValueError, match="unreadable"):
        list(workers.map(abs, jobs()))


def test_a_worker_that_dies_is_one_sentence() -> None:
    with Pool(2) as workers, pytest.raises(UserError, match="exit code -9"):
        list(workers.map(signal.raise_signal, [(signal.SIGKILL,)]))
