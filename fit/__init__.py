"""Tables in, laws out. Imports NumPy, SciPy, pandas and plotting only, and each only when it is used.

from isoflop import fit
runs = fit.read_table("outputs/chinchilla")
law = fit.ChinchillaLaw().fit(runs.N, runs.D, runs.loss).bootstrap(4000, groups=runs.group)
law.optimal(5.76e23)
fit.write_report(fit.analyze(runs), "outputs/chinchilla/fit")
"""

# ruff: noqa: F401  (what TYPE_CHECKING imports is __all__, which is computed)
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from .allocation import Prices, compute_optimal, fixed_size, inference_aware, overtraining_cost, token_limited
    from .analysis import Analysis, analyze
    from .approaches import Verdict, verdict
    from .broken import BrokenPowerLaw
    from .chinchilla import ChinchillaLaw
    from .conventions import by_convention
    from .critical_batch import CriticalBatchLaw, tokens_to_loss
    from .custom import FunctionLaw
    from .doctor import examine
    from .downstream import TaskVerdict, fit_tasks, signal_to_noise
    from .envelope import Envelope
    from .flops import FlopsPerToken
    from .hyperparameter_cells import CellOptimum, cell_optima, read_sweep
    from .hyperparameter_surface import HyperparameterSurface
    from .hyperparameters import HyperparameterLaw
    from .isoflop import IsoflopProfiles
    from .kaplan import KaplanLaw
    from .law import Law
    from .optimum import Optimum
    from .outliers import Outliers, find_outliers
    from .overtraining import OvertrainingLaw
    from .persistence import read_law
    from .plots import (
        plot_allocation,
        plot_backtest,
        plot_cloud,
        plot_contours,
        plot_curves,
        plot_isoflop,
        plot_residuals,
        save_figures,
    )
    from .powerlaw import PowerLaw
    from .published import PublishedLaw, compare_published, published_law, published_laws
    from .published_data import download_published, load_published, published_runs
    from .recipes import RecipeLaw, by_recipe
    from .repetition import RepetitionLaw
    from .report import write_report
    from .saved import answer
    from .serving import Device, Served
    from .table import RunTable, read_table
    from .tasklaw import TaskLaw

# Where each name lives. A module is loaded when one of its names is first asked for, and so `from isoflop import fit`
# takes a tenth of a second.
_MODULES = {
    "allocation": "Prices compute_optimal fixed_size inference_aware overtraining_cost token_limited",
    "analysis": "Analysis analyze",
    "approaches": "Verdict verdict",
    "broken": "BrokenPowerLaw",
    "chinchilla": "ChinchillaLaw",
    "conventions": "by_convention",
    "critical_batch": "CriticalBatchLaw tokens_to_loss",
    "custom": "FunctionLaw",
    "doctor": "examine",
    "downstream": "TaskVerdict fit_tasks signal_to_noise",
    "envelope": "Envelope",
    "flops": "FlopsPerToken",
    "hyperparameter_cells": "CellOptimum cell_optima read_sweep",
    "hyperparameter_surface": "HyperparameterSurface",
    "hyperparameters": "HyperparameterLaw",
    "isoflop": "IsoflopProfiles",
    "kaplan": "KaplanLaw",
    "law": "Law",
    "optimum": "Optimum",
    "outliers": "Outliers find_outliers",
    "overtraining": "OvertrainingLaw",
    "persistence": "read_law",
    "plots": (
        "plot_allocation plot_backtest plot_cloud plot_contours plot_curves plot_isoflop plot_residuals save_figures"
    ),
    "powerlaw": "PowerLaw",
    "published": "PublishedLaw compare_published published_law published_laws",
    "published_data": "download_published load_published published_runs",
    "recipes": "RecipeLaw by_recipe",
    "repetition": "RepetitionLaw",
    "report": "write_report",
    "saved": "answer",
    "serving": "Device Served",
    "table": "RunTable read_table",
    "tasklaw": "TaskLaw",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["InputError", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
