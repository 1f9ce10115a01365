"""The fitted laws of the field, each callable, with its conventions and its source.

from isoflop.fit.published import compare_published, published_law
published_law("besiroglu2024")(N=70e9, D=1.4e12);  published_law("llama3").optimal(3.8e25)
compare_published(1e24, own=law)

A law is evaluated as its paper prints it, in the paper's own N, FLOPs and tokens, so two laws differ by their
conventions too. A split of C FLOPs spends all of it: D = C / 6N; Kaplan et al.'s C_min is C / 2, and for DeepSeek's M
FLOPs per token N stands for M / 6. The numbers, and where each was printed, are in constants/laws.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from .allocation.allocation import Optimum, optimum
from .errors import Array, Constants, InputError, by_name, floats, positive, unboxed
from .files import read_constants
from .laws.registry import law_class

if TYPE_CHECKING:
    import pandas as pd

SAID = ("loss_unit", "N_convention", "flops_convention", "tokenizer", "data", "source", "notes")
_TABLES = read_constants("laws")
# Forms of one input x that no fitted law has; every other form is that of a law here.
CURVES: dict[str, Callable[[Array, Constants], Any]] = {
    "reciprocal": lambda x, c: c.get("E", 0.0) + (c["scale"] / x) ** c["alpha"],
    "logarithm": lambda x, c: c["a"] + c["b"] * np.log(x),
    "exponential": lambda x, c: c["epsilon"] - c["k"] * np.exp(-c["gamma"] * x),
}


@dataclass(frozen=True)
class PublishedLaw:
    """One fitted law as its paper prints it. D and U are tokens, N is counted as `N_convention` says.

    kind        "loss", "optimal N" (or M, D, D/N), "learning rate", "batch size", "critical batch size", "error"
    form        how it is computed: one of `equations` in laws.yaml, or "power"
    intervals   the paper's own, constant -> (low, high), at `level`
    fitted      range of the runs behind it: C FLOPs, N parameters, D tokens, M = D / N -> (low, high)
    frontier    the law that gives the loss where this one splits a budget
    None stands for what the paper does not say, and for conventions that do not enter the law.
    """

    name: str
    kind: str
    form: str
    inputs: tuple[str, ...]
    unit: str
    constants: Constants
    authors: str
    year: int
    arxiv: str
    where: str
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    level: float | None = None
    N_convention: str | None = None
    flops_convention: str | None = None
    tokenizer: str | None = None
    data: str | None = None
    fitted: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    frontier: str | None = None
    notes: str = ""

    def __call__(self, *inputs: ArrayLike, **named: ArrayLike) -> Any:
        """The law at its inputs, by position or by name, broadcast together; a float for floats."""
        values = by_name(self.name, self.inputs, inputs, named)
        for name, given in values.items():
            value = floats(given)
            values[name] = positive(name, value.ravel()).reshape(value.shape)
        if self.form == "power":
            c, found = self.constants, floats(self.constants["k"])
            for name, x in values.items():
                found = found * (x / c.get(f"{name}_0", 1.0)) ** c.get(f"p_{name}", 0.0)
        elif self.form in CURVES:
            found = CURVES[self.form](values[self.inputs[0]], self.constants)
        else:
            found = law_class(self.form).evaluate(self.constants, *values.values())
        return unboxed(found)

    @property
    def allocates(self) -> bool:
        return self.kind.startswith("optimal") or self.form == "chinchilla"

    def optimal(self, flops: ArrayLike) -> Optimum:
        """N, D and loss (NaN where none is given) at `flops`, a scalar or (targets,), by the law's conventions."""
        C = positive("flops", np.atleast_1d(floats(flops)))
        if not self.allocates:
            able = ", ".join(law.name for law in published_laws() if law.allocates)
            raise InputError(f"{self.name} gives the {self.kind} and does not split a budget; these do: {able}.")
        if self.form == "chinchilla":
            return Optimum(C, *optimum(C, self.constants))
        budget = C / 2 if self.inputs == ("C_min",) else C
        value = self(budget)
        N = {
            "optimal N": value,
            "optimal M": value / 6,
            "optimal D": C / 6 / value,
            "optimal D/N": np.sqrt(C / 6 / value),
        }[self.kind]
        loss = published_law(self.frontier)(budget) if self.frontier else np.full(len(C), np.nan)
        return Optimum(C, N, C / 6 / N, loss)

    @property
    def source(self) -> str:
        return f"{self.authors} {self.year} (arXiv:{self.arxiv}), {self.where}"

    def equation(self) -> str:
        if self.form != "power":
            shown: str = _TABLES["equations"][self.form].format(*self.inputs)
            return shown if "E" in self.constants else shown.removeprefix("E + ")
        scaled = [f"({x} / {x}_0)" if f"{x}_0" in self.constants else x for x in self.inputs]
        factors = [f"{s}^p_{x}" for s, x in zip(scaled, self.inputs, strict=True) if f"p_{x}" in self.constants]
        return " ".join(["k", *factors])

    def __repr__(self) -> str:
        values = ", ".join(f"{name} = {value:.6g}" for name, value in self.constants.items())
        return f"{self.name}: {self.kind} = {self.equation()}   {values}   [{self.unit}; {self.source}]"


def _read() -> dict[str, PublishedLaw]:
    laws = {}
    for name, record in (_TABLES["laws"] | _TABLES["tuning"]).items():
        fields = {"unit": _TABLES["units"].get(record["kind"])} | record | {"inputs": tuple(record["inputs"])}
        for ranges in ("intervals", "fitted"):
            fields[ranges] = {key: tuple(pair) for key, pair in record.get(ranges, {}).items()}
        laws[name] = PublishedLaw(name=name, **fields)
    return laws


_LAWS = _read()


def published_law(name: str) -> PublishedLaw:
    """The published law of that name. Raises InputError naming the nearest names for one that is not known.

    >>> published_law("hoffmann2022_approach3").optimal(5.76e23)
    C (6ND) = 5.76e23, N = 32.2B, D = 2.98T, D/N = 92.6, loss = 1.9307
    """
    if name not in _LAWS:
        asked = str(name).lower()
        said = {known: f"{known} {law.authors} {law.form} {law.arxiv}".lower() for known, law in _LAWS.items()}
        near = [known for known, words in said.items() if asked and asked in words][:6]
        near = near or get_close_matches(asked, _LAWS, n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else "published_laws() lists them"
        raise InputError(f"there is no published law {name!r}; {hint}.")
    return _LAWS[name]


def published_laws(kind: str | None = None) -> list[PublishedLaw]:
    """Every published law, or those of one kind ("loss", "optimal N", "learning rate", ...)."""
    kinds = sorted({law.kind for law in _LAWS.values()})
    if kind is not None and kind not in kinds:
        raise InputError(f"kind is {kind!r}; choose one of {', '.join(kinds)}.")
    return [law for law in _LAWS.values() if kind in (None, law.kind)]


def compare_published(flops: ArrayLike, own: Any = None, **own_columns: Any) -> pd.DataFrame:
    """How each published law splits `flops`, a row per law and target, with its conventions; own laws come first.

    own: anything with `.optimal(flops)` that gives arrays flops, N, D and loss, or a mapping of names to such laws.
    own_columns: what to say of own laws, as in N_convention="N_total", loss_unit="nats/token".

    `beyond` is flops over the largest budget of the fit; NaN stands for what is not published. Losses of different
    tokenizers or data are not comparable.
    """
    import pandas as pd

    unknown = [name for name in own_columns if name not in SAID]
    if unknown:
        raise InputError(f"column {unknown[0]!r} is not known; choose among {', '.join(SAID)}.")
    mine = {} if own is None else dict(own) if isinstance(own, Mapping) else {"own": own}
    rows = [row for name, law in mine.items() for row in _rows(name, law.optimal(flops), np.nan, own_columns)]
    for law in published_laws():
        if law.allocates:
            gives_loss = law if law.kind == "loss" else published_law(law.frontier) if law.frontier else None
            said = {name: getattr(law, name) for name in SAID[1:]} | {"loss_unit": gives_loss and gives_loss.unit}
            rows += _rows(law.name, law.optimal(flops), law.fitted.get("C", (np.nan, np.nan))[1], said)
    return pd.DataFrame(rows)


def _rows(name: str, best: Any, largest: float, said: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = {column: said.get(column) for column in SAID}
    return [
        {"law": name, "flops": C, "N": N, "D": D, "ratio": D / N, "loss": loss, "beyond": C / largest} | columns
        for C, N, D, loss in zip(best.flops, best.N, best.D, best.loss, strict=True)
    ]
