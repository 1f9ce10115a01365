"""Mixtures of domains: the grid, its points on the simplex, bounds and growth; `isoflop mix` on tables and sweeps."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_sweep import finish, make_config, write_sweep
from isoflop.fit.mixtures.mixturelaw import MixtureLaw
from isoflop.sweeps import prepare
from isoflop.sweeps.entry import sweep_main
from isoflop.sweeps.grid import extend
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.grid.isoflop import IsoflopGrid
from isoflop.sweeps.grid.ladder import LadderGrid
from isoflop.sweeps.grid.mixture import MixtureGrid, Simplex
from isoflop.sweeps.grid.product import ProductGrid
from isoflop.sweeps.grid.suggest import print_suggestion, suggest_runs
from isoflop.sweeps.results.finish import print_result, write_results
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.sweeps.runs.forms import NEEDED
from isoflop.train.config import DataConfig, DomainConfig, ModelConfig, RunConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.files import read_json, write_json
from isoflop.train.flops import flops_exact
from small_runs import SMOKE, Capture, set_state


@pytest.fixture(autouse=True, scope="module")
def quick_law() -> Iterator[None]:
    """Fit one form with few draws by default, because all four take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixtureLaw.__init__, "__defaults__", (("effective",), 60, 0))
        yield


WEIGHTS = {"code": 6.0, "prose": 3.0, "web": 1.0}


def mixed(tokens: int = 0) -> RunConfig:
    domains = {name: DomainConfig(path=f"{name}/", weight=weight) for name, weight in WEIGHTS.items()}
    data = DataConfig(corpus="mixture", domains=domains)
    return RunConfig(model=ModelConfig(vocab_size=256), data=data, tokens=tokens)


def grid(**changes: Any) -> MixtureGrid:
    return MixtureGrid(**{"sizes": [1e4], "tokens": [20480], "mixtures": 8, **changes})


def mixture(run: RunConfig) -> tuple[float, ...]:
    return tuple(domain.weight for domain in run.data.domains.values())


def test_the_grid_is_the_base_thrice_each_domain_heavier_and_the_swarm_at_every_n_and_d() -> None:
    runs = expand_grid(grid(sizes=[1e4, 3e4], tokens=[20480, 40960]), mixed())
    assert len(runs) == 4 * (3 + 3 + 8)
    for i in range(0, len(runs), 14):
        assert len({(run.model.width, run.D) for run in runs[i : i + 14]}) == 1
        assert [(run.seed, mixture(run)) for run in runs[i : i + 3]] == [(seed, (0.6, 0.3, 0.1)) for seed in range(3)]
        heavier = [mixture(run) for run in runs[i + 3 : i + 6]]
        assert heavier == [(0.8, 0.15, 0.05), (0.3, 0.65, 0.05), (0.3, 0.15, 0.55)]
        assert {run.seed for run in runs[i + 3 : i + 14]} == {0}
        assert "_code0.6+prose0.3+web0.1" in str(runs[i].name)
    assert {mixture(run) for run in expand_grid(grid(base={"web": 1}), mixed())[:3]} == {(0.0, 0.0, 1.0)}


@pytest.mark.parametrize("seed", range(20))
def test_every_mixture_is_whole_parts_of_the_simplex_within_its_bounds(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"d{i}" for i in range(rng.choice([2, 3, 5, 17]))]
    weights = {name: rng.choice([0.0, 0.01, 1.0, rng.random()]) for name in names} | {names[0]: 1.0}
    total = sum(weights.values())
    bounds = {
        name: [rng.uniform(0, weights[name] / total), rng.uniform(weights[name] / total, 1)]
        for name in rng.sample(names, rng.randrange(len(names)))
    }
    simplex = Simplex.of({name: DomainConfig() for name in names}, weights, bounds)
    swarm = list(simplex.swarm(64, seed))
    heavier = [simplex.heavier(i) for i in range(len(names))]
    for parts in [simplex.base, *heavier, *swarm]:
        assert sum(parts) == 10_000
        for part, name in zip(parts, names, strict=True):
            low, high = bounds.get(name, [0, 1])
            assert round(1e4 * low) <= part <= round(1e4 * high)
    for i, parts in enumerate(heavier):
        room = min(simplex.high[i], 10_000 - sum(simplex.low) + simplex.low[i])
        assert abs(parts[i] - min((10_000 + simplex.base[i]) / 2, room)) <= 1
    for count in (0, 1, 7, 33):
        assert list(simplex.swarm(count, seed)) == swarm[:count]
    assert list(simplex.swarm(64, seed + 1)) != swarm


def test_the_swarm_of_a_uniform_base_is_uniform_and_of_another_is_drawn_halfway_to_it() -> None:
    domains = {name: DomainConfig() for name in WEIGHTS}
    uniform = np.array(list(Simplex.of(domains).swarm(512, 0))) / 1e4
    assert uniform.mean(axis=0) == pytest.approx([1 / 3] * 3, abs=0.003)
    assert np.cov(uniform.T) == pytest.approx((3 * np.eye(3) - 1) / 36, abs=0.002)  # of the flat Dirichlet distribution
    drawn = np.array(list(Simplex.of(domains, WEIGHTS).swarm(512, 0))) / 1e4
    assert drawn.mean(axis=0) == pytest.approx([(1 / 3 + share) / 2 for share in (0.6, 0.3, 0.1)], abs=0.003)


CODE = {"code": DomainConfig(path="code/")}
REFUSED = [
    (grid(mixtures=-1), mixed(), "grid.mixtures is -1; it must be 0 or more"),
    (grid(), RunConfig(), "data.domains has 0 domains; a mixture grid needs data=mixture"),
    (grid(), RunConfig(data=DataConfig(corpus="mixture", domains=CODE)), "data.domains has 1 domain; .* at least two"),
    (grid(base={"blog": 1}), mixed(), "grid.base names 'blog'; it must be one of the domains code, prose, web"),
    (grid(base={"code": 0}), mixed(), "grid.base are code 0; they must be 0 or more, and one of them above 0"),
    (grid(bounds={"blog": [0, 1]}), mixed(), r"it must map domains \(code, prose, web\) to \[low, high\] with"),
    (grid(bounds={"code": [0.8, 0.2]}), mixed(), "with 0 <= low <= high <= 1"),
    (grid(bounds={"code": [0.6, 1], "web": [0.5, 1]}), mixed(), "leaves no mixture; the lows must sum to at most 1"),
    (grid(bounds={name: [0, 0.3] for name in WEIGHTS}), mixed(), "leaves no mixture; .* to at least 1$"),
    (grid(bounds={"code": [0, 0.5]}), mixed(), r"grid.bounds.code is \[0, 0.5\]; .* in data.domains, 0.6; or give"),
]


@pytest.mark.parametrize(("points", "base", "sentence"), REFUSED)
def test_bad_mixture_grids_are_refused_in_one_sentence(points: MixtureGrid, base: RunConfig, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        expand_grid(points, replace(base, tokens=0))
    assert "\n" not in str(error.value)


def test_other_grids_vary_weights_caps_and_simulated_epochs() -> None:
    axes = {"domains.code.weight": [2.0, 6.0], "domains": {"web.unique_tokens": [9, None]}, "epochs_of": [None, 10**6]}
    runs = expand_grid(ProductGrid(axes={"data": axes}), mixed(20480))
    assert len({run_id(run) for run in runs}) == 8
    assert {mixture(run) for run in runs} == {(0.6, 0.3, 0.1), (0.333333333333, 0.5, 0.166666666667)}
    assert {run.data.domains["web"].unique_tokens for run in runs} == {9, None}
    for points in (LadderGrid(sizes=[1e4], tokens=[20480, 40960]), IsoflopGrid(budgets=[1e11])):
        assert {mixture(run) for run in expand_grid(points, mixed())} == {(0.6, 0.3, 0.1)}
    for name, problem in (
        ("blog.weight", "is not a field of a run"),
        ("code.max_epochs", "does not change what a run"),
    ):
        with pytest.raises(UserError, match=f"'data.domains.{name}', which {problem}"):
            expand_grid(ProductGrid(axes={f"data.domains.{name}": [1, 2]}), mixed(20480))
    (plain,) = expand_grid(LadderGrid(sizes=[1e4], tokens=[20480]), replace(mixed(), data=DataConfig()))
    assert (run_id(plain), plain.name) == ("4afe7f6fe4", "N10.8k_D20.5k_s0")  # as before there were mixtures


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDirectory:
    config = make_config(grid(tokens=[102400]))
    config.data = mixed().data
    return write_sweep(tmp_path / "mix", config)


def test_a_sweep_is_extended_and_suggestions_are_the_next_mixtures(sweep: SweepDirectory, capsys: Capture) -> None:
    assert extend.extend_sweep(sweep, ["grid.mixtures=8"]) == []
    assert len(extend.extend_sweep(sweep, ["grid.mixtures=9"])) == 1
    price = flops_exact(sweep.runs()[0].config())
    suggestion = suggest_runs(sweep, 3.5 * price)
    assert suggestion.flops == pytest.approx(3 * price)
    print_suggestion(suggestion)
    names = re.findall(r"^ +(\S+) .* N10.8k_D102k_s0_\S+\+\S+ *$", capsys.readouterr().out, re.MULTILINE)
    assert names == [run.run_id for run in suggestion.runs]
    extend.extend_sweep(sweep, ["grid.mixtures=12", "dry_run=true"])
    assert len(re.findall(r"^N 10.8k D 102k \S+\+\S+$", capsys.readouterr().out, re.MULTILINE)) == 3
    assert extend.extend_sweep(sweep, ["grid.mixtures=12"]) == names
    for options, sentence in (({}, "one more mixture needs"), ({"max_flops": 1.0}, "every run needs more than 1;")):
        with pytest.raises(UserError, match=sentence):
            suggest_runs(sweep, 0.5 * price, **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"target_flops is 1e\+20; leave it out"):
        suggest_runs(sweep, price, 1e20)


def test_the_plan_of_the_command_shows_mixtures(tmp_path: Path, capsys: Capture) -> None:
    for name in WEIGHTS:
        (tmp_path / f"{name}.txt").write_text(f"a line of {name}\n" * 4000)
    domains = ",".join(f"{name}:{{path:{tmp_path / name}.txt}}" for name in WEIGHTS)
    options = (
        f"+grid=mixture data=mixture data.domains={{{domains}}} grid.mixtures=1 output_root={tmp_path} dry_run=true "
    )
    command = [*options.split(), *SMOKE[1:]]
    assert sweep_main([*command, "grid.bounds={code:[0.3,0.5]}"]) == 0
    assert re.search(r"7 runs(.|\n)* code0.5\+prose0.25\+web0.25 *$", capsys.readouterr().out, re.MULTILINE)
    assert sweep_main([*command[:1], "data=text", f"data.path={tmp_path}/code.txt", *command[3:]]) == 2
    assert "data.domains has 0 domains; a mixture grid needs data=mixture" in capsys.readouterr().err


def test_finished_runs_give_the_mixtures_that_a_law_would_learn_most_from(
    sweep: SweepDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in sweep.runs():
        run = directory.config()
        shares = {name: domain.weight for name, domain in run.data.domains.items()}
        summary = dict.fromkeys(NEEDED, 1.0) | {"step": run.steps, "D": run.D, "N_total": 10_800}
        summary |= {f"val_loss_{name}": 2.0 + math.exp(-3.0 * share) for name, share in shares.items()}
        summary |= {f"unique_{name}": 25600 for name in shares}
        write_json(directory.path / "summary.json", summary | {f"weight_{name}": shares[name] for name in shares})
        set_state(directory, "done")
    config = prepare.configuration(sweep)
    config.data.domains["prose"].max_epochs = 1.5  # of 25,600 tokens by runs of 102,400
    monkeypatch.setattr(prepare, "configuration", lambda _: config)
    suggestion = suggest_runs(sweep, 8 * flops_exact(sweep.runs()[0].config()))
    assert all(point["data.domains.prose.weight"] <= 1.5 / 4 for point in suggestion.grid["points"])
    assert re.search("by the law of the finished runs, the lowest loss is at code0.3", suggestion.reason)
    points = extend.as_grid(suggestion.grid, "here")
    assert len(extend.add_grid(sweep, prepare.configuration(sweep), points, "a test")) == 8


# `isoflop mix`


TRANSFER = {"code": [1.0, 0.1, 0.3], "prose": [0.2, 1.0, 0.3], "docs": [0.3, 0.2, 1.0]}  # chosen by hand
DOMAINS = [*TRANSFER]


def losses(weights: Any, noise: float, seed: int = 0) -> dict[str, Any]:
    """Return each domain's loss at mixtures (n, 3) by an effective-data law with relative noise."""
    rng, shares = np.random.default_rng(seed), np.asarray(weights) ** 0.7
    return {
        f"loss_{name}": (1.5 + (shares @ row) ** -0.5) * np.exp(noise * rng.standard_normal(len(shares)))
        for name, row in TRANSFER.items()
    }


def write_table(path: Path, noise: float, rows: int = 24) -> Path:
    weights = np.random.default_rng(1).dirichlet([1.5] * 3, rows).round(4)
    weights[:3] = [0.6, 0.3, 0.1]
    weights[:, 2] = 1 - weights[:, 0] - weights[:, 1]
    columns = {f"weight_{name}": column for name, column in zip(DOMAINS, weights.T, strict=True)}
    sizes = {"N": 1e6, "D": 2e7, "unique_docs": 2e6}
    pd.DataFrame({"run_id": range(rows), **sizes, **columns, **losses(weights, noise)}).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("mix") / "runs.csv", 0.001)


def test_a_table_gives_the_best_weights_and_a_report(isoflop: Any, table: Path, tmp_path: Path) -> None:
    arguments = ("mix", table, "--target", "code=2,prose=2", "--output", tmp_path / "out")
    code, output, error = isoflop(*arguments, "--bounds", "docs=0.02:0.9", "--json")
    answer = json.loads(output)
    best = answer["mixture"]
    assert (code, error, answer["runs"], [w["code"] for w in answer["warnings"]]) == (0, "", 24, [])
    assert best["target"] == {"code": 0.5, "prose": 0.5, "docs": 0.0}
    assert best["base"] == pytest.approx({"code": 0.6, "prose": 0.3, "docs": 0.1})
    assert best["gain_interval"][0] > 0
    assert best["probability"] > 0.95
    rivals = np.random.default_rng(0).dirichlet([1.0] * 3, 4000)
    rivals = rivals[rivals[:, 2] >= 0.02]
    true = sum(0.5 * losses([[*best["weights"].values()], *rivals], 0.0)[f"loss_{name}"] for name in ("code", "prose"))
    assert true[0] < true[1:].min() * 1.003
    assert best["epochs"] == pytest.approx({"docs": 10 * best["weights"]["docs"]})
    assert json.loads((tmp_path / "out" / "law.json").read_text()) == answer
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"domains.png", "held_out.png", "ternary.png"}


def test_the_terminal_shows_the_doubt_first(isoflop: Any, tmp_path: Path) -> None:
    table = write_table(tmp_path / "runs.csv", 0.05, 14)
    output = isoflop("mix", table, "--max-epochs", "4", "--unique", "code=1e8,docs=1e6", "--level", "0.9")[1]
    assert output.startswith("These runs do not show a mixture that is better than the base: the gain of ")
    for part in ("N = 1.00M and D = 20.0M", "90% intervals", "epochs", "Mixtures worth training next", "hold-outs of"):
        assert part in output
    assert float(re.search(r"docs +(0\.\d+)", output)[1]) <= 0.2  # type: ignore[index]


BAD_OPTIONS = [
    ("--target", "code", "--target is 'code'; it must give a number for each name, as in code=0.5,prose=0.5"),
    ("--bounds", "code=0.5", "--bounds is 'code=0.5'; .* as in code=0.1:0.6"),
    ("--target", "web=1", "target has .*web; .* code, prose, docs"),
    ("--base", "code=-1", "zero or more"),
    ("--bounds", "code=0.9:1,prose=0.9:1", "bounds leave no mixture"),
    ("--unique", "docs=-1", "unique"),
    ("--level", "2", "level is 2.0; it must lie between 0 and 1"),
    ("--n", "5e6", "N is 1e\\+06 in every row"),
]


@pytest.mark.parametrize(("option", "value", "sentence"), BAD_OPTIONS)
def test_bad_input_is_one_sentence(option: str, value: str, sentence: str, isoflop: Any, table: Path) -> None:
    code, output, error = isoflop("mix", table, option, value)
    assert (code, output, error.count("\n")) == (2, "", 1)
    assert re.search(sentence, error), error


def test_a_table_without_mixtures_is_refused(isoflop: Any, tmp_path: Path) -> None:
    pd.DataFrame({"N": [1.0], "D": [2.0], "loss": [3.0]}).to_csv(tmp_path / "runs.csv")
    assert re.fullmatch("error: .*weight_<domain>.*\n", isoflop("mix", tmp_path / "runs.csv")[2])
    assert "does not exist" in isoflop("mix", tmp_path / "none.csv")[2]


@pytest.mark.usefixtures("quick_pictures")
def test_a_sweep_of_mixtures_ends_with_its_answer(isoflop: Any, tmp_path: Path, capsys: Any) -> None:
    config = make_config(MixtureGrid(sizes=[1e4], tokens=[102400], mixtures=12))
    domains = {name: DomainConfig(path=f"{name}/", weight=w) for name, w in zip(DOMAINS, (6, 3, 1), strict=True)}
    config.data = DataConfig(corpus="mixture", domains=domains, target={"code": 3, "docs": 1})
    sweep = write_sweep(tmp_path / "mix", config)
    assert isoflop("mix", sweep.path)[2].startswith("error: no run of ")
    finish(sweep)
    for seed, run in enumerate(sweep.runs()):
        weights = {name: domain.weight for name, domain in run.config().data.domains.items()}
        summary = read_json(run.path / "summary.json") | {f"weight_{name}": w for name, w in weights.items()}
        for name, (loss,) in losses([[*weights.values()]], 0.001, seed).items():
            summary |= {f"val_{name}": loss, name.replace("loss", "unique"): 51200}
        write_json(run.path / "summary.json", summary)
    content = write_results(sweep)
    assert content["mixture"]["target"] == {"code": 0.75, "prose": 0.0, "docs": 0.25}
    assert content["mixture"]["base"] == pytest.approx({"code": 0.6, "prose": 0.3, "docs": 0.1})
    assert content["mixture"]["epochs"] == pytest.approx({k: 2 * w for k, w in content["mixture"]["weights"].items()})
    assert write_results(sweep) == content == read_json(sweep.path / "fit" / "law.json")
    page = (sweep.path / "fit" / "report.html").read_text()
    assert all(part in page for part in (*content["verdict"].split("\n"), "training next", "What it cost"))
    assert page.count("<img ") == 3
    print_result(sweep)
    assert content["verdict"] in capsys.readouterr().out
