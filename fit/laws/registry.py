"""Every kind of law by the name of its form, which is what law.json says; a new law is a file and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import InputError

DEFAULT = "chinchilla"
# The class of each form; fit/__init__.py says where it lives.
LAWS = {
    "chinchilla": "ChinchillaLaw",
    "gamma": "GammaLaw",
    "power": "PowerLaw",
    "kaplan": "KaplanLaw",
    "broken": "BrokenPowerLaw",
    "repetition": "RepetitionLaw",
    "overtraining": "OvertrainingLaw",
    "function": "FunctionLaw",
    "hyperparameter": "HyperparameterLaw",
    "hyperparameter-surface": "HyperparameterSurface",
    "critical-batch": "CriticalBatchLaw",
}


def law_class(form: str = DEFAULT) -> type[Any]:
    """The class of a form; it is imported only now."""
    if form not in LAWS:
        raise InputError(f"form is {form!r}; known are {', '.join(LAWS)}.")
    found: type[Any] = getattr(import_module("..", __package__), LAWS[form])
    return found
