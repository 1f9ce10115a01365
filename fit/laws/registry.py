"""Every kind of law by the name of its form, which is what law.json says; a new law is a file and a line here."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from ..errors import InputError

DEFAULT = "chinchilla"
LOSS_LAWS = ("chinchilla", "gamma", "kaplan", "overtraining")  # those of N and D that a table can be fitted with
EXPERT_LAWS = ("clark", "krajewski", "ludziejewski", "abnar")  # forms of mixtures of experts
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
    **dict.fromkeys(EXPERT_LAWS, "ExpertLaw"),
}


def law_class(form: str = DEFAULT) -> type[Any]:
    """The class of a form; it is imported only now."""
    if form not in LAWS:
        raise InputError(f"form is {form!r}; known are {', '.join(LAWS)}.")
    found: type[Any] = getattr(import_module("..", __package__), LAWS[form])
    return found


def loss_law(form: str = DEFAULT, **options: Any) -> Any:
    """A law of N and D, not fitted; an option that it does not have must be at its default."""
    if form not in LOSS_LAWS:
        raise InputError(f"form is {form!r}; choose a law of N and D: {', '.join(LOSS_LAWS)}.")
    kind = law_class(form)
    known = inspect.signature(kind).parameters
    for name, value in options.items():
        if name not in known and value not in (None, False):
            raise InputError(f"{name} is {value}, which the form {form} does not have; it has {', '.join(known)}.")
    return kind(**{name: value for name, value in options.items() if name in known})
