"""Tables in, laws out. Imports NumPy, SciPy, pandas and plotting only, and each only when it is used.

from isoflop import fit
runs = fit.read_table("outputs/chinchilla")
law = fit.ChinchillaLaw().fit(runs.N, runs.D, runs.loss).bootstrap(4000, groups=runs.run_id)
law.optimal(5.76e23)
fit.write_report(fit.analyze(runs), "outputs/chinchilla/fit")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from .analysis import Analysis, analyze
    from .chinchilla import ChinchillaLaw, Optimum
    from .envelope import Envelope
    from .isoflop import IsoflopProfile, IsoflopProfiles
    from .persistence import read_law
    from .powerlaw import PowerLaw
    from .report import write_report
    from .saved import answer
    from .table import RunTable, read_table

_HOMES = {
    "Analysis": "analysis",
    "analyze": "analysis",
    "ChinchillaLaw": "chinchilla",
    "Optimum": "chinchilla",
    "Envelope": "envelope",
    "IsoflopProfile": "isoflop",
    "IsoflopProfiles": "isoflop",
    "PowerLaw": "powerlaw",
    "answer": "saved",
    "read_law": "persistence",
    "write_report": "report",
    "RunTable": "table",
    "read_table": "table",
}

__all__ = [
    "Analysis",
    "ChinchillaLaw",
    "Envelope",
    "InputError",
    "IsoflopProfile",
    "IsoflopProfiles",
    "Optimum",
    "PowerLaw",
    "RunTable",
    "analyze",
    "answer",
    "read_law",
    "read_table",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
