"""What a fit would lack is said of the plan, with the nearest budgets that would do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
from isoflop import fit
from isoflop.sweeps.config import GridConfig, IsoflopGrid, LadderGrid, ProductGrid
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.grid.tuning import Tuner
from isoflop.sweeps.plan import foresight
from isoflop.train.config import DataConfig, ModelConfig, RunConfig
from isoflop.train.errors import UserError
from isoflop.train.flops import count_parameters, flops_exact

FEW_SIZES = "sizes per budget are needed"


@pytest.fixture
def foresee(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def ask(grid: GridConfig, vocabulary: int = 256, text: int | None = None) -> list[str]:
        class Corpus:
            def size_bytes(self) -> int | None:
                return text

        monkeypatch.setattr(foresight, "open_corpus", lambda data: Corpus())
        tokenizer = "bytes" if vocabulary == 256 else "bpe"
        base = RunConfig(model=ModelConfig(vocab_size=vocabulary), data=DataConfig(tokenizer=tokenizer), tokens=0)
        return foresight.foresee(grid, expand_grid(grid, base), Tuner())

    return ask


def test_a_healthy_plan_is_met_with_silence(foresee: Callable[..., list[str]]) -> None:
    assert foresee(IsoflopGrid(budgets=[1e11, 2e11, 5e11, 1e12]), text=10**8) == []
    assert foresee(IsoflopGrid(budgets=[1e11, 2e11, 5e11, 1e12])) == []  # a stream has no known size
    assert foresee(LadderGrid(sizes=[8e3, 3e4, 6e4, 1e5], tokens_per_parameter=[20, 80, 320])) == []


def test_a_budget_without_a_profile_is_refused_with_the_nearest_one(
    foresee: Callable[..., list[str]],
) -> None:
    with pytest.raises(
        UserError, match=r"contains 2.5e\+10, at which [12] of 6 sizes make grid.min_steps 100"
    ) as refused:
        foresee(IsoflopGrid(budgets=[2.5e10, 1e12]), 4096)
    nearest = float(re.findall(r"nearest budget with 5 is (\S+)$", str(refused.value))[0])
    assert 2.5e10 < nearest < 1e12
    assert FEW_SIZES not in " ".join(foresee(IsoflopGrid(budgets=[nearest, 30 * nearest]), 4096))


def test_who_asks_for_two_sizes_gets_them(foresee: Callable[..., list[str]]) -> None:
    (said,) = [one for one in foresee(IsoflopGrid(budgets=[1e11, 1e12], sizes=2)) if FEW_SIZES in one]
    assert "2 at 1e11, 2 at 1e12" in said


def test_text_repeated_too_often_is_named_with_the_budget_that_would_do(
    foresee: Callable[..., list[str]],
) -> None:
    (said,) = foresee(IsoflopGrid(budgets=[1e11, 3e11, 1e12]), text=400_000)
    assert "runs see their data more than 4 times, up to 22.0" in said
    nearest = float(re.findall(r"no run does is (\S+) FLOPs", said)[0])
    assert nearest < 1e12
    assert not [one for one in foresee(IsoflopGrid(budgets=[nearest / 2, nearest]), text=400_000) if "times" in one]


def test_the_words_are_the_fits_own(foresee: Callable[..., list[str]]) -> None:
    grid = LadderGrid(sizes=[8e3, 3e4], tokens=[200_000, 400_000])
    runs = expand_grid(grid, RunConfig(model=ModelConfig(vocab_size=256), tokens=0))
    said = foresee(grid)
    assert "Approach 3 has no answer: the parametric law has 5 parameters and the table has 4" in said[0]
    for code in ("few_runs", "narrow_span"):
        (message,) = [one.message for one in fit.examine(as_table(runs)) if one.code == code]
        assert any(message in one for one in said), code
    assert foresee(ProductGrid(axes={"tokens": [4096]})) == []  # no grid for a law


def as_table(runs: Sequence[RunConfig]) -> fit.RunTable:
    import pandas as pd

    rows = [{"N": count_parameters(r.model).N_total, "D": r.D, "flops": flops_exact(r), "loss": 2.0} for r in runs]
    return fit.read_table(pd.DataFrame(rows))


def test_what_joins_a_sweep_is_looked_at_with_what_is_there(foresee: Callable[..., list[str]]) -> None:
    base = RunConfig(model=ModelConfig(vocab_size=256), tokens=0)
    grid, more = IsoflopGrid(budgets=[1e11, 3e11, 1e12]), IsoflopGrid(budgets=[3e12])
    assert foresee(more) != []  # alone it is one budget
    runs = expand_grid(more, base)
    assert foresight.foresee(more, runs, Tuner(), expand_grid(grid, base)) == []
