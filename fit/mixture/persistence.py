"""A mixture in a report's law.json: what its answers take (constants, draws, shares and rates), and no table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from ..flops import FlopsPerToken
from ..formatting import plain_json
from ..laws.registry import law_class
from .mixture import FormMixture, Prior


@dataclass
class SavedForm:
    form: str
    options: dict[str, Any]
    constants: dict[str, float]
    draws: dict[str, list[float | None]]  # None: not a finite number


@dataclass
class SavedMixture:
    forms: dict[str, SavedForm]
    share: dict[str, list[float]]
    rate: dict[str, float]
    priors: dict[str, Prior]
    draws: int
    ends: list[float]
    flops_per_token: FlopsPerToken | None


def mixture_to_dict(m: FormMixture) -> Any:
    """As `SavedMixture`, in JSON's own types."""
    drawn = {name: {key: v.tolist() for key, v in (law.draws_ or {}).items()} for name, law in m.laws_.items()}
    forms = {name: SavedForm(law.form, law.options(), law.constants_, drawn[name]) for name, law in m.laws_.items()}
    share = {name: share.tolist() for name, share in m._share.items()}
    saved = SavedMixture(forms, share, m._rate, {**m.priors}, m.draws, m.ends_.tolist(), m.flops_per_token_)
    return plain_json(asdict(saved))


def read_mixture(saved: SavedMixture, source: object) -> FormMixture:
    """A mixture whose optimum is that of the saved one; it has no runs, and so no forecast of one.

    InputError where its parts do not belong together.
    """
    columns = [one.draws.values() for one in saved.forms.values()]
    whole = all(len(share) == len(saved.forms) for share in saved.share.values()) and len(saved.ends) == 2
    whole &= all({"loss", "size"} <= part.keys() for part in (saved.share, saved.rate, saved.priors))
    whole &= len({len(draws) for of_form in columns for draws in of_form}) <= 1
    if not whole or any(one.draws and one.draws.keys() != one.constants.keys() for one in saved.forms.values()):
        raise InputError(f"{source} holds a mixture whose forms, shares and draws do not belong together; fit again.")
    found = FormMixture(draws=saved.draws, priors=saved.priors)
    found.laws_ = {name: law_class(one.form)(**one.options) for name, one in saved.forms.items()}
    for name, law in found.laws_.items():
        law.constants_ = saved.forms[name].constants
        law.draws_ = {key: np.array(v, dtype=np.float64) for key, v in saved.forms[name].draws.items()}
    found._share = {name: np.array(share) for name, share in saved.share.items()}
    found.weights_ = dict(zip(found.laws_, saved.share["loss"], strict=True))
    found._rate, found.noise_, found.ends_ = saved.rate, 0.0, np.array(saved.ends)
    found.flops_per_token_ = saved.flops_per_token
    return found
