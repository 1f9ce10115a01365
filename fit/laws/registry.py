"""Every kind of law by the name of its form, which is what law.json says; a new law is a file and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import InputError

DEFAULT = "chinchilla"
# Where each form's class lives, below fit/.
LAWS = {
    "chinchilla": ("laws.chinchilla", "ChinchillaLaw"),
    "power": ("laws.powerlaw", "PowerLaw"),
    "kaplan": ("laws.kaplan", "KaplanLaw"),
    "broken": ("laws.broken", "BrokenPowerLaw"),
    "repetition": ("laws.repetition", "RepetitionLaw"),
    "overtraining": ("laws.overtraining", "OvertrainingLaw"),
    "function": ("laws.custom", "FunctionLaw"),
    "hyperparameter": ("hyperparameters.hyperparameters", "HyperparameterLaw"),
    "hyperparameter-surface": ("hyperparameters.settings_surface", "HyperparameterSurface"),
    "critical-batch": ("hyperparameters.hyperparameters", "CriticalBatchLaw"),
}


def law_class(form: str = DEFAULT) -> type[Any]:
    """The class of a form; it is imported only now."""
    if form not in LAWS:
        raise InputError(f"form is {form!r}; known are {', '.join(LAWS)}.")
    module, name = LAWS[form]
    found: type[Any] = getattr(import_module(f"...{module}", __name__), name)
    return found
