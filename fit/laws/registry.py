"""Classes of all laws by the name of their form, as stored in law.json.

To add a law, write one file here and add one line below: to LOSS_LAWS if it is a law of N and D.
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
    """Return the law class named `form`, importing its module."""
    from ..errors import one_of

    one_of("form", form, LAWS)
    module, name = LAWS[form].split(":")
    cls: type[Any] = getattr(import_module(f"...{module}", __name__), name)
    return cls


def loss_law(form: str = DEFAULT, **options: Any) -> Any:
    """Return an unfitted law of N and D. Raises InputError for `options` its class lacks, unless None or False."""
    from ..errors import InputError

    if form not in LOSS_LAWS:
        raise InputError(f"form is {form!r}; choose a law of N and D: {', '.join(LOSS_LAWS)}.")
    cls = law_class(form)
    accepted = inspect.signature(cls).parameters
    for name, value in options.items():
        if name not in accepted and value not in (None, False):
            raise InputError(f"{name} is {value}, which the form {form} does not have; it has {', '.join(accepted)}.")
    return cls(**{name: value for name, value in options.items() if name in accepted})
