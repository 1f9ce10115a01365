"""Every kind of law by the name of its form, which is what law.json holds.

A new law is one file here and one line below: in LOSS_LAWS where it is one of N and D that tables can be fitted with,
which is what `isoflop fit --form` and `fit.form` of a sweep accept. Nothing is imported before a law is asked for.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

DEFAULT = "chinchilla"
LOSS_LAWS = {  # form -> module within `fit`, and class
    "chinchilla": "laws.chinchilla:ChinchillaLaw",
    "gamma": "laws.gamma:GammaLaw",
    "kaplan": "laws.kaplan:KaplanLaw",
    "overtraining": "laws.overtraining:OvertrainingLaw",
}
EXPERT_LAWS = ("clark", "krajewski", "ludziejewski", "abnar")  # forms of mixtures of experts
LAWS = LOSS_LAWS | {
    "power": "laws.powerlaw:PowerLaw",
    "broken": "laws.broken:BrokenPowerLaw",
    "repetition": "laws.repetition:RepetitionLaw",
    "function": "laws.custom:FunctionLaw",
    "hyperparameter": "hyperparameters.hyperparameters:HyperparameterLaw",
    "hyperparameter-surface": "hyperparameters.settings_surface:HyperparameterSurface",
    "critical-batch": "hyperparameters.hyperparameters:CriticalBatchLaw",
    **dict.fromkeys(EXPERT_LAWS, "laws.experts:ExpertLaw"),
}


def law_class(form: str = DEFAULT) -> type[Any]:
    """Return the class of a form; its module is imported only now."""
    from ..errors import InputError

    if form not in LAWS:
        raise InputError(f"form is {form!r}; known are {', '.join(LAWS)}.")
    module, name = LAWS[form].split(":")
    kind: type[Any] = getattr(import_module(f"...{module}", __name__), name)
    return kind


def loss_law(form: str = DEFAULT, **options: Any) -> Any:
    """Return a law of N and D, not fitted. An option that the law does not have must be None or False."""
    from ..errors import InputError

    if form not in LOSS_LAWS:
        raise InputError(f"form is {form!r}; choose a law of N and D: {', '.join(LOSS_LAWS)}.")
    kind = law_class(form)
    accepted = inspect.signature(kind).parameters
    for name, value in options.items():
        if name not in accepted and value not in (None, False):
            raise InputError(f"{name} is {value}, which the form {form} does not have; it has {', '.join(accepted)}.")
    return kind(**{name: value for name, value in options.items() if name in accepted})
