"""The coefficient table of a fitted law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formatting import NOTHING, percent, text
from ..uncertainty import percentile_interval

if TYPE_CHECKING:
    import pandas as pd

STYLE: dict[str, Any] = {"float_format": "{:.5g}".format, "na_rep": NOTHING}


@dataclass(frozen=True)
class Summary:
    """A law's constants, printed as a table. table: estimate, standard_error, low and high by constant."""

    equation: str
    table: pd.DataFrame
    notes: str

    def __repr__(self) -> str:
        return f"{self.equation}\n{self.table.to_string(**STYLE)}\n{self.notes}"

    def _repr_html_(self) -> str:
        equation, notes = f"<p><code>{text(self.equation)}</code></p>", f"<p><small>{text(self.notes)}</small></p>"
        return equation + self.table.to_html(border=0, **STYLE) + notes


@np.errstate(invalid="ignore")  # a constant may be infinite in a draw
def summarize(law: Any, level: float) -> Summary:
    """Summarize a fitted law, with errors and intervals at `level` by bootstrap, NaN without one."""
    import pandas as pd

    law._fitted()
    draws = law.draws_ or dict.fromkeys(law.constants_, np.full(1, np.nan))
    rows = {
        name: (value, pd.Series(draws[name]).std(), *percentile_interval(draws[name], level))
        for name, value in law.constants_.items()
    }
    table = pd.DataFrame.from_dict(rows, "index", columns=["estimate", "standard_error", "low", "high"])
    errors = "bootstrap() gives errors and intervals"
    if law.draws_:
        errors = f"{percent(level)} intervals of {law.bootstrap_['resamples']} resamples"
    notes = f"{law._state()}, objective {law.objective} = {law.objective_:.5g}; {errors}"
    return Summary(law.equation(lambda name: f"{law.constants_[name]:.4g}"), table, notes)
