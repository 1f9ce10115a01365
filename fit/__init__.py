"""Scaling laws from tables of runs. Needs NumPy, SciPy, pandas and plotting only, each imported at first use.

from isoflop import fit
runs = fit.read_table("outputs/chinchilla")
law = fit.ChinchillaLaw().fit(runs).bootstrap(4000)
law.optimal(5.76e23)
fit.write_report(fit.analyze(runs), "outputs/chinchilla/fit")
"""

# ruff: noqa: F401  (what TYPE_CHECKING imports is __all__, which is computed)
from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allocation.allocation import (
        Optimum,
        compute_optimal,
        inference_aware,
        token_limited,
    )
    from .allocation.serving import Device, Prices, Served
    from .analysis import analyze
    from .approaches.compare import Comparison, compare
    from .approaches.conventions import by_convention
    from .approaches.envelope import Envelope
    from .approaches.isoflop import IsoflopProfiles, plot_isoflop
    from .approaches.recipes import RecipeLaw, by_recipe
    from .checks.doctor import examine
    from .checks.outliers import Outliers, find_outliers
    from .checks.verdict import Verdict, verdict
    from .curves.curvelaw import CurveLaw
    from .curves.curves import collapse, read_curves, schedule_points
    from .curves.forecast import forecast_final
    from .downstream.decisions import Decisions, decision_accuracy
    from .downstream.downstream import TaskVerdict, fit_tasks, signal_to_noise
    from .downstream.itemlaw import ItemLaw
    from .downstream.taskforecast import forecast_tasks
    from .downstream.tasklaw import TaskLaw
    from .errors import InputError
    from .flops import FlopsPerToken
    from .forecasting.forecaster import Forecaster
    from .forecasting.mixture import FormMixture, forecast
    from .hyperparameters.cells import cell_optima, read_sweep
    from .hyperparameters.hyperparameters import CellOptimum, CriticalBatchLaw, HyperparameterLaw, tokens_to_loss
    from .hyperparameters.settings_surface import HyperparameterSurface
    from .laws.broken import BrokenPowerLaw
    from .laws.chinchilla import ChinchillaLaw
    from .laws.custom import FunctionLaw
    from .laws.experts import ExpertLaw
    from .laws.gamma import GammaLaw
    from .laws.kaplan import KaplanLaw
    from .laws.law import Law
    from .laws.overtraining import OvertrainingLaw
    from .laws.persistence import read_law
    from .laws.powerlaw import PowerLaw
    from .laws.repetition import RepetitionLaw
    from .mixtures.answer import BestMixture
    from .mixtures.mixturelaw import MixtureLaw
    from .plots import (
        plot_allocation,
        plot_backtest,
        plot_cloud,
        plot_contours,
        plot_curves,
        plot_residuals,
        save_figures,
    )
    from .precision.precisionlaw import PrecisionLaw
    from .published import (
        PublishedLaw,
        compare_published,
        download_published,
        load_published,
        published_law,
        published_laws,
        published_runs,
    )
    from .report.report import write_report
    from .results import Analysis, answer
    from .table import RunTable, read_table

# Modules are imported when one of their names is first used, so that `from isoflop import fit` takes a tenth of a
# second. The home of each name is read from the imports above, which type checkers see.
_HOMES = {
    alias.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_text()))
    if isinstance(node, ast.ImportFrom) and node.level
    for alias in node.names
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
