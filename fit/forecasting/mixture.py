"""A `Forecaster` of laws of N and D, which also gives the best N and D for a budget, and its file format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ..allocation.allocation import Curve, Optimum, own_convention, spending, unlimited
from ..errors import Array, Columns, InputError, floats, positive
from ..flops import FlopsPerToken, convention_name
from ..formatting import plain_json
from ..laws.law import LossLaw
from ..laws.registry import law_class, loss_law
from ..table import Runs
from .forecaster import DRAWS, MAX_DEVIATION, NORMAL, Forecaster, Member, Members, Prior, Weights, half_width

if TYPE_CHECKING:
    import pandas as pd

MAX_DISTANCE = 15.0  # largest distance of a form's log N* from sqrt(C / 6): a vanished term puts it at infinity


@dataclass
class SavedForm:
    """A form in a report's law.json; draws that are not finite are None."""

    form: str
    options: dict[str, Any]
    constants: dict[str, float]
    draws: dict[str, list[float | None]]


@dataclass
class SavedMixture:
    """A mixture in a report's law.json: what its predictions need, without the fitted table."""

    forms: dict[str, SavedForm]
    share: dict[str, list[float]]
    rate: dict[str, float]
    priors: dict[str, Prior]
    draws: int
    ends: list[float]
    flops_per_token: FlopsPerToken | None
    noise: float | None = None  # of one run in log loss; older files lack it

    def belongs_together(self) -> bool:
        """Return whether all fields describe the same forms, with equally many draws."""
        draws = [values for form in self.forms.values() for values in form.draws.values()]
        whole = all(len(share) == len(self.forms) for share in self.share.values()) and len(self.ends) == 2
        whole &= all({"loss", "size"} <= part.keys() for part in (self.share, self.rate, self.priors))
        whole &= all(not form.draws or form.draws.keys() == form.constants.keys() for form in self.forms.values())
        return whole and len({len(values) for values in draws}) <= 1


def family() -> dict[str, LossLaw]:
    """Return the laws that a forecast uses by default, name -> unfitted law."""
    return {
        "chinchilla": loss_law("chinchilla"),
        "chinchilla, tied": loss_law("chinchilla", tied=True),
        "gamma": loss_law("gamma"),
        "gamma, tied": loss_law("gamma", tied=True),
        "kaplan": loss_law("kaplan"),
    }


class FormMixture(Forecaster):
    """A `Forecaster` of laws of N and D by compute, which also gives the best N and D for a budget.

    forms: laws or names of registered laws; by default `family()`. draws: resamples per form, 0 for no intervals.
    priors: a `Prior` for "loss" and one for "size", by default those of constants/forecast.yaml.
    """

    def __init__(
        self,
        forms: Sequence[str | LossLaw] | None = None,
        draws: int = DRAWS,
        seed: int = 0,
        priors: Mapping[str, Prior] | None = None,
    ) -> None:
        super().__init__(family() if forms is None else _named(forms), draws=draws, seed=seed, priors=priors)
        self.forms = forms

    def weigh(self, priors: Mapping[str, Prior]) -> Self:
        moves = [*self._size_moves().T[:, :, None]]
        self._size_weights = Weights.learn(moves, len(self.laws_), priors["size"])
        return super().weigh(priors)

    def to_dict(self) -> Any:
        """Return the mixture as a `SavedMixture` in JSON types."""
        forms = {}
        for name, member in self._members.items():
            draws = {key: values.tolist() for key, values in member.draws.items()}
            forms[name] = SavedForm(member.law.form, member.law.options(), member.law.constants_, draws)
        weights = {"loss": self._weights, "size": self._size_weights}
        share, rate = {k: w.share.tolist() for k, w in weights.items()}, {k: w.rate for k, w in weights.items()}
        ends, spend = self.ends_.tolist(), self.flops_per_token_
        saved = SavedMixture(forms, share, rate, {**self.priors}, self.draws, ends, spend, self.noise_)
        return plain_json(asdict(saved))

    @classmethod
    def from_saved(cls, saved: SavedMixture, source: object) -> Self:
        """Restore a mixture that predicts without the fitted table. `source` names the file in errors.

        Raises InputError if fields of `saved` do not match.
        """
        if not saved.belongs_together():
            raise InputError(
                f"{source} holds a mixture whose forms, shares and draws do not match; run `isoflop fit` again."
            )
        mixture, members = cls(draws=saved.draws, priors=saved.priors), {}
        for name, form in saved.forms.items():
            constants = {key: np.array([value]) for key, value in form.constants.items()}
            draws = {key: np.array(values, dtype=np.float64) for key, values in form.draws.items()}
            law = law_class(form.form)(**form.options)
            law.constants_ = form.constants
            members[name] = Member(law, constants, draws, {}, np.empty((0, 0)))
        mixture._members, mixture.laws_ = members, {name: member.law for name, member in members.items()}
        mixture._weights, mixture._size_weights = (
            Weights(np.array(saved.share[name]), saved.rate[name], saved.priors[name]) for name in ("loss", "size")
        )
        mixture.weights_ = dict(zip(members, saved.share["loss"], strict=True))
        mixture.rate_, mixture.ends_ = saved.rate["loss"], np.array(saved.ends)
        mixture.noise_ = float("nan") if saved.noise is None else saved.noise
        mixture.flops_per_token_ = saved.flops_per_token
        return mixture

    # Answers.

    def optimal(self, flops: ArrayLike, level: float = 0.95, flops_per_token: float | Curve | None = None) -> Optimum:
        """Return the best N and D for `flops` (a scalar or (targets,)) and the loss there, with intervals.

        log N is a weighted mean over forms; a form weighs less, the more its log N moved as larger runs were added.
        """
        C, count = positive("flops", np.atleast_1d(floats(flops))), own_convention(self, flops_per_token)
        spend = spending(count)
        log_N, of_size = self.size(C, count)
        N, D = np.exp(log_N), C / spend(np.exp(log_N))
        sizes = N[:, None] * np.exp(np.sqrt(sum(of_size.values()))[:, None] * NORMAL)
        draws = {
            "flops": np.broadcast_to(C[:, None], sizes.shape),
            "N": sizes,
            "D": C[:, None] / spend(sizes),
            "ratio": C[:, None] / spend(sizes) / sizes,
            "loss": self.quantiles(N, D),
        }
        return Optimum(C, N, D, self.predict(N, D), {}, draws if self.draws else {}, level, convention_name(count))

    def sizes(self, flops: ArrayLike, flops_per_token: float | Curve | None = None) -> Columns:
        """Return each form's N of lowest loss for `flops`, name -> (targets,)."""
        C, count = np.atleast_1d(floats(flops)), own_convention(self, flops_per_token)
        return dict(zip(self.laws_, np.exp(self._log_sizes(self._constants, C, count)[..., 0]), strict=True))

    def without_optimum(self, flops_per_token: float | Curve | None = None) -> float:
        """Return the summed weight of forms without a finite best N at the compute of the cheapest or largest run.

        Forms with all exponents at bounds count too.
        """
        C = self.ends_
        distance = np.abs(np.log(np.array([*self.sizes(C, flops_per_token).values()]) / np.sqrt(C / 6.0)))
        at_bounds = np.zeros(len(distance), dtype=bool)
        for k, law in enumerate(self.laws_.values()):
            assert isinstance(law, LossLaw)
            stuck = {law.constants_.get(name) for name in law.degenerate_}
            # A tied exponent is recognised by its value.
            at_bounds[k] = all(law.constants_[name] in stuck for name in law.exponent_names)
        return float(self._size_weights.share @ ((distance > MAX_DISTANCE - 1e-9).any(axis=1) | at_bounds))

    def size(self, flops: Array, flops_per_token: float | Curve | None = None) -> tuple[Array, Columns]:
        """Return the log of the best N for `flops`, (targets,), and its variances, source of error -> (targets,)."""
        count = own_convention(self, flops_per_token)
        fitted, drawn = (self._log_sizes(members, flops, count) for members in (self._constants, self._drawn))
        middle = self._size_weights.share @ fitted[..., 0]
        N = np.exp(middle)
        further = self._further({"N": N, "D": flops / spending(count)(N)})
        return middle, self._size_weights.variances(fitted[..., 0], drawn, further)

    def size_exponent(
        self, level: float = 0.95, flops_per_token: float | Curve | None = None
    ) -> tuple[float, float, float]:
        """Return (a, low, high), the mean exponent of N* ~ C^a from cheapest to largest run and its interval."""
        count, C = own_convention(self, flops_per_token), self.ends_

        def slopes(members: Members) -> Array:
            return np.diff(self._log_sizes(members, C, count), axis=1) / np.log(C[1] / C[0])

        fitted, weights = slopes(self._constants)[..., 0], self._size_weights
        a = float(weights.share @ fitted[:, 0])
        wide = float(half_width(level, [*weights.variances(fitted, slopes(self._drawn), np.ones(1)).values()])[0])
        return a, a - wide, a + wide

    # Parts of the answers.

    def _log_sizes(self, members: Members, C: Array, count: float | Curve) -> Array:
        """Return the log best N of all forms for C FLOPs, (forms, targets, r), for r values of constants in `members`.

        `count` gives the FLOPs per token.
        """
        log_sizes, middle = [], 0.5 * np.log(C[:, None] / 6.0)
        for law, constants in zip(self.laws_.values(), members, strict=True):
            with np.errstate(all="ignore"):
                log_N = np.log(unlimited(law, constants, C[:, None], count)[0])
            log_sizes.append(
                np.clip(np.where(np.isnan(log_N), middle, log_N), middle - MAX_DISTANCE, middle + MAX_DISTANCE)
            )
        return np.stack(log_sizes)

    def _size_moves(self) -> Array:
        """Return errors of log N* at the largest C by fits up to a cut-off, per log(C / cut-off), (forms, cut-offs)."""
        if not self.cut_offs_:
            return np.zeros((len(self.laws_), 0))
        top, count = self.ends_[1:], own_convention(self)
        rolled = [member.rolled for member in self._members.values()]
        moves = self._log_sizes(rolled, top, count) - self._log_sizes(self._constants, top, count)
        log_ratio = np.log(top / np.array([cut.reach for cut in self.cut_offs_]))
        return np.clip(moves[:, 0], -MAX_DEVIATION, MAX_DEVIATION) / log_ratio


def forecast(
    runs: Runs,
    N: ArrayLike,
    D: ArrayLike,
    level: float = 0.95,
    kind: str = "run",
    forms: Sequence[str | LossLaw] | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Forecast losses at N parameters and D tokens by a `FormMixture`: a DataFrame with loss, low and high.

    Parameters
    ----------
    runs
        Columns as in `read_table`.
    kind : {"run", "mean"}
        Interval of a new run, or of the law's value.
    forms
        Laws or names of registered ones; by default `family()`.
    """
    return FormMixture(forms, seed=seed).fit(runs).forecast(N, D, level=level, kind=kind)


def _named(forms: Sequence[str | LossLaw]) -> dict[str, LossLaw]:
    """Return laws of N and D by name; `forms` contains laws or names. Raises InputError for others."""
    defaults, laws = family(), dict[str, LossLaw]()
    for form in forms:
        law = form if not isinstance(form, str) else defaults[form] if form in defaults else law_class(form)()
        if not isinstance(law, LossLaw) or tuple(law.inputs) != ("N", "D"):
            raise InputError(f"forms holds {form!r}; each must be a law of N and D.")
        name = form if isinstance(form, str) else repr(law)
        laws[name] = law
    if not laws:
        raise InputError("forms is empty; at least one law of N and D is needed.")
    return laws
