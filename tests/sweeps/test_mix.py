"""`isoflop mix` on tables and sweeps: the answer, its doubt, the report of a sweep of mixtures, and bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_sweep import finish, make_config, write_sweep
from isoflop.fit.mixtures.mixturelaw import MixtureLaw
from isoflop.sweeps.grid.mixture import MixtureGrid
from isoflop.sweeps.results.finish import print_result, write_results
from isoflop.train.config import DataConfig, DomainConfig
from isoflop.train.files import read_json, write_json

TRANSFER = {"code": [1.0, 0.1, 0.3], "prose": [0.2, 1.0, 0.3], "docs": [0.3, 0.2, 1.0]}  # chosen by hand
DOMAINS = [*TRANSFER]


@pytest.fixture(autouse=True, scope="module")
def quick_law() -> Iterator[None]:
    """Fit one form with few draws by default, because all four take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixtureLaw.__init__, "__defaults__", (("effective",), 60, 0))
        yield


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


REFUSED = [
    ("--target", "code", "--target is 'code'; it must give a number for each name, as in code=0.5,prose=0.5"),
    ("--bounds", "code=0.5", "--bounds is 'code=0.5'; .* as in code=0.1:0.6"),
    ("--target", "web=1", "target has .*web; .* code, prose, docs"),
    ("--base", "code=-1", "zero or more"),
    ("--bounds", "code=0.9:1,prose=0.9:1", "bounds leave no mixture"),
    ("--unique", "docs=-1", "unique"),
    ("--level", "2", "level is 2.0; it must lie between 0 and 1"),
    ("--n", "5e6", "N is 1e\\+06 in every row"),
]


@pytest.mark.parametrize(("option", "value", "sentence"), REFUSED)
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
