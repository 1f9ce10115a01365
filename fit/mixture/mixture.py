"""Forecasts whose intervals hold when no form is right: several laws, weighed by how well they predicted dearer runs.

Special here:
- *Rolling hold-outs*: cut-offs halve the compute again and again; every law is fitted to what is cheaper and predicts
  all that is dearer. Its mean squared error per log of extrapolated compute, with one more cut-off of a rate that other
  tables taught, is the inverse of its weight (Bates and Granger 1969). The forecast is the weighted mean in log loss.
- *Four variances* in log loss make the interval: of resampling that mean, of the forms about it, of a drift that grows
  with the log of extrapolation at the mean's own rolling rate, and, for a new run, of the noise. Forms err to both
  sides, so their mean keeps only a share of the second and third (Gneiting and Ranjan 2013: pools are too wide).
- The shares and the prior rate are learnt from public tables and stated in constants/forecast.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from ..allocation.allocation import Curve, Optimum, own_convention, spending, unlimited
from ..errors import Array, Columns, InputError, check_level, check_weights, floats, identifiable, positive, same_length
from ..files import read_constants
from ..flops import FlopsPerToken, convention_name, flops_per_token
from ..formatting import plain_json
from ..laws.law import LossLaw
from ..laws.registry import law_class, loss_law
from ..uncertainty import by_group, group_labels

if TYPE_CHECKING:
    import pandas as pd

GAP = 2.0  # between the compute of two cut-offs; rows nearer than this count as this far
LEAST_RUNS, LEAST_SIZES = 6, 3  # of a rolling fit: different (N, D), and different N and D
ROLLING_STARTS = 8  # of a rolling fit, besides the optimum of all runs
WORST = 1.0  # errors of log loss end here
DRAWS, PAST_DRAWS = 100, 50  # resamples per form, and draws of one before a cut-off
REACH = 15.0  # a form's log N* further from sqrt(C / 6), as of a term that vanished, is this far
APART = 5.0  # a form's log N* further from the mean's counts as this far
QUANTILES = 1001  # of a normal distribution, which stand for draws of it

Members = list[Columns]  # the constants of every form, each (r,): fitted (r = 1), of draws, or of rolling fits


@dataclass(frozen=True)
class Prior:
    """What public tables teach; see constants/forecast.yaml."""

    rate: float
    drift: float
    disagreement: float


@dataclass
class SavedForm:
    """A form in a report's law.json; a draw that is None is not a finite number."""

    form: str
    options: dict[str, Any]
    constants: dict[str, float]
    draws: dict[str, list[float | None]]


@dataclass
class SavedMixture:
    """A mixture in a report's law.json: what its answers take, and no table."""

    forms: dict[str, SavedForm]
    share: dict[str, list[float]]
    rate: dict[str, float]
    priors: dict[str, Prior]
    draws: int
    ends: list[float]
    flops_per_token: FlopsPerToken | None

    def belongs_together(self) -> bool:
        """Return whether shares, draws and constants are of the same forms."""
        draws = [values for form in self.forms.values() for values in form.draws.values()]
        whole = all(len(share) == len(self.forms) for share in self.share.values()) and len(self.ends) == 2
        whole &= all({"loss", "size"} <= part.keys() for part in (self.share, self.rate, self.priors))
        whole &= all(not form.draws or form.draws.keys() == form.constants.keys() for form in self.forms.values())
        return whole and len({len(values) for values in draws}) <= 1


@dataclass(frozen=True)
class CutOff:
    """A rolling hold-out: its compute, the rows that are fitted and tested (n,), and the log of extrapolation of the
    tested ones.
    """

    flops: float
    fitted: np.ndarray
    tested: np.ndarray
    further: Array


@dataclass(frozen=True)
class Member:
    """A form of a mixture: its law, fitted to all runs, with the constants that the mixture asks it under.

    constants (1,); draws (r,), empty without a bootstrap; rolled (cut-offs,), of the fit to what each cut-off leaves,
    and its coordinates theta (cut-offs, k).
    """

    law: LossLaw
    constants: Columns
    draws: Columns
    rolled: Columns
    theta: Array

    @classmethod
    def of(cls, law: LossLaw, theta: Array) -> Member:
        constants = {name: np.array([value]) for name, value in law.constants_.items()}
        return cls(law, constants, law.draws_ or {}, law.problem_.constants(theta), theta)

    @np.errstate(all="ignore")
    def log_losses(self, constants: Columns, N: Array, D: Array) -> Array:
        """Log loss under constants (r,), (points, r)."""
        return np.asarray(np.log(self.law.evaluate(constants, N[:, None], D[:, None])))


def family() -> dict[str, LossLaw]:
    """The forms that a forecast weighs by default, not fitted."""
    return {
        "chinchilla": loss_law("chinchilla"),
        "chinchilla, tied": loss_law("chinchilla", tied=True),
        "gamma": loss_law("gamma"),
        "gamma, tied": loss_law("gamma", tied=True),
        "kaplan": loss_law("kaplan"),
    }


def cut_offs(N: Array, D: Array, flops: Array, groups: np.ndarray) -> list[CutOff]:
    """Rolling hold-outs from the dearest to the cheapest that leaves enough to fit; no group is fitted and tested."""
    found, top = [], float(flops.max())
    while (fitted := flops <= top / GAP * (1.0 + 1e-4)).any():
        top = float(flops[fitted].max())
        points = np.unique(np.stack([N[fitted], D[fitted]]), axis=1)
        if points.shape[1] < LEAST_RUNS or min(len(np.unique(column)) for column in points) < LEAST_SIZES:
            break
        tested = (flops > top * (1.0 + 1e-4)) & ~np.isin(groups, groups[fitted])
        if tested.any():
            further = np.maximum(np.log(flops[tested] / top), np.log(GAP))
            found.append(CutOff(top, fitted, tested, further))
    return found


class FormMixture:
    """Several laws of N and D as one: forecasts with intervals that count what no form knows.

    forms: names of registered laws, or laws; by default `family()`. draws: resamples per form, 0 for no intervals.
    priors: "loss" and "size", by default those of constants/forecast.yaml.

    After `fit`: laws_ (name -> fitted law), weights_ (name -> share), refused_ (name -> why it was left out), noise_
    and rate_ (of runs, and per log of extrapolation, both in log loss), cut_offs_, ends_ (FLOPs of
    the cheapest and the dearest run), flops_per_token_ (as of a law).
    """

    inputs = ("N", "D")

    def __init__(
        self,
        forms: Sequence[str | LossLaw] | None = None,
        draws: int = DRAWS,
        seed: int = 0,
        priors: Mapping[str, Prior] | None = None,
    ) -> None:
        self.forms = family() if forms is None else _named(forms)
        self.draws, self.seed = draws, seed
        self.priors = priors or {name: Prior(**read_constants("forecast")[name]) for name in ("loss", "size")}

    def fit(
        self,
        N: ArrayLike,
        D: ArrayLike,
        loss: ArrayLike,
        flops: ArrayLike | None = None,
        groups: Any = None,
        weight: ArrayLike | None = None,
        loss_se: ArrayLike | None = None,
    ) -> Self:
        """Fit, roll and resample every form over n runs (n,); `flops` is 6 N D by default, `loss_se` as of a law.

        Rows of one group (`groups` (n,): checkpoints of a run, branches of a trunk) are resampled and held out
        together. Raises InputError for bad numbers and where no form can be fitted and resampled.
        """
        columns = {"N": positive("N", N), "D": positive("D", D), "loss": positive("loss", loss)}
        columns["flops"] = 6.0 * columns["N"] * columns["D"] if flops is None else positive("flops", flops)
        weights = check_weights(weight, len(columns["loss"]))
        errors = {} if loss_se is None else {"loss_se": positive("loss_se", loss_se)}
        same_length(**columns, weight=weights, **errors)
        labels, used = group_labels(groups, len(weights)), weights > 0
        data = {name: column[used] for name, column in columns.items()}
        N, D, loss = (data[name] for name in ("N", "D", "loss"))
        laws, self.refused_ = dict[str, LossLaw](), dict[str, str]()
        for name, law in self.forms.items():
            try:
                fitted = law.clone().fit(N, D, loss, weights[used], **{name: v[used] for name, v in errors.items()})
                if self.draws:
                    fitted.bootstrap(self.draws, groups=labels[used], seed=self.seed)
                if not fitted.converged_ or (self.draws and not fitted.bootstrap_["resamples"]):
                    raise InputError(f"the fit of the form {name} did not converge.")
                laws[name] = fitted
            except InputError as error:
                self.refused_[name] = str(error)
        if not laws:
            raise InputError(next(iter(self.refused_.values())))
        cuts = cut_offs(N, D, data["flops"], labels[used])
        members = {name: Member.of(law, _refits(law, cuts)) for name, law in laws.items()}
        return self._settle(data, labels[used], cuts, members, flops_per_token(N, D, data["flops"]))

    def _settle(
        self,
        data: Columns,
        labels: np.ndarray,
        cuts: list[CutOff],
        members: dict[str, Member],
        spend: FlopsPerToken | None,
    ) -> Self:
        self.data_, self._labels, self.cut_offs_, self.flops_per_token_ = data, labels, cuts, spend
        self.ends_ = np.array([data["flops"].min(), data["flops"].max()])
        self._members, self.laws_ = members, {name: member.law for name, member in members.items()}
        self._missed = [self._errors(k, cut) for k, cut in enumerate(cuts)]
        return self.weigh(self.priors)

    def weigh(self, priors: Mapping[str, Prior]) -> Self:
        """Weigh the fitted forms again, under other priors."""
        self.priors = priors
        errors = [error / cut.further for error, cut in zip(self._missed, self.cut_offs_, strict=True)]
        self._share, self._rate = dict[str, Array](), dict[str, float]()
        for name, moves in (("loss", errors), ("size", list(self._size_moves().T[:, :, None]))):
            rate = self.priors[name].rate
            squares = [np.mean(move**2, axis=1) for move in moves]
            share = 1.0 / np.broadcast_to(_with_prior(squares, rate), len(self.laws_))
            self._share[name] = share = share / share.sum()
            self._rate[name] = float(np.sqrt(_with_prior([np.mean((share @ move) ** 2) for move in moves], rate)))
        self.rate_, share = self._rate["loss"], self._share["loss"]
        self.weights_ = dict(zip(self.laws_, share.tolist(), strict=True))
        residual = np.log(self.data_["loss"])
        residual = residual - share @ self._log_losses(self._fitted, self.data_["N"], self.data_["D"])[..., 0]
        free = float(share @ np.array([law.problem_.free for law in self.laws_.values()]))
        independent = len(np.unique(self._labels))
        inflation = independent / max(independent - free, 1.0)
        self.noise_ = float(np.sqrt(inflation * np.mean(residual**2)))
        return self

    def before(self, k: int) -> FormMixture | None:
        """The mixture as the runs that cut-off k fits would have given it; None where they allow no form.

        A draw is one step of Gauss and Newton towards noisy losses of these runs, with the same noise for every form.
        """
        on = self.cut_offs_[k].fitted
        data, (names, group) = {name: values[on] for name, values in self.data_.items()}, by_group(self._labels[on])
        able = {name: one for name, one in self._members.items() if one.law.problem_.free < len(names)}
        try:
            identifiable(data["N"], data["D"])
        except InputError:
            able = {}
        if not able:
            return None
        cuts = [CutOff(c.flops, c.fitted[on], c.tested[on], c.further[on[c.tested]]) for c in self.cut_offs_[k + 1 :]]
        kept = [j for j, cut in enumerate(cuts) if cut.tested.any()]
        noise = np.random.default_rng(self.seed).standard_normal((PAST_DRAWS, len(names)))[:, group]
        past = {}
        for name, one in able.items():
            constants = {key: values[k : k + 1] for key, values in one.rolled.items()}
            residual = np.log(data["loss"]) - one.log_losses(constants, data["N"], data["D"])[:, 0]
            scale = np.sqrt(np.sum(residual**2) / max(len(names) - one.law.problem_.free, 1))
            draws = one.law.nearby(one.theta[k], on, scale * noise)
            rolled = {key: values[k + 1 :][kept] for key, values in one.rolled.items()}
            past[name] = Member(one.law, constants, draws, rolled, one.theta[k + 1 :][kept])
        found = FormMixture(draws=PAST_DRAWS if self.draws else 0, seed=self.seed, priors=self.priors)
        return found._settle(data, self._labels[on], [cuts[j] for j in kept], past, self.flops_per_token_)

    def to_dict(self) -> Any:
        """Return what a `SavedMixture` has, in JSON's own types."""
        forms = {}
        for name, one in self._members.items():
            draws = {key: values.tolist() for key, values in one.draws.items()}
            forms[name] = SavedForm(one.law.form, one.law.options(), one.law.constants_, draws)
        share = {name: share.tolist() for name, share in self._share.items()}
        ends = self.ends_.tolist()
        return plain_json(
            asdict(SavedMixture(forms, share, self._rate, {**self.priors}, self.draws, ends, self.flops_per_token_))
        )

    @classmethod
    def from_saved(cls, saved: SavedMixture, source: object) -> Self:
        """Return a mixture whose optimum is that of the saved one; it has no runs, and so no forecast of one.

        Raises InputError where its parts do not belong together.
        """
        if not saved.belongs_together():
            raise InputError(
                f"{source} holds a mixture whose forms, shares and draws do not belong together; fit again."
            )
        found, members = cls(draws=saved.draws, priors=saved.priors), {}
        for name, one in saved.forms.items():
            constants = {key: np.array([value]) for key, value in one.constants.items()}
            draws = {key: np.array(values, dtype=np.float64) for key, values in one.draws.items()}
            law = law_class(one.form)(**one.options)
            law.constants_ = one.constants
            members[name] = Member(law, constants, draws, {}, np.empty((0, 0)))
        found._members, found.laws_ = members, {name: member.law for name, member in members.items()}
        found._share = {name: np.array(share) for name, share in saved.share.items()}
        found.weights_ = dict(zip(members, saved.share["loss"], strict=True))
        found._rate, found.noise_, found.ends_ = saved.rate, 0.0, np.array(saved.ends)
        found.flops_per_token_ = saved.flops_per_token
        return found

    # Answers.

    def predict(self, N: ArrayLike, D: ArrayLike) -> Array:
        """The weighted mean of the forms in log loss, (points,)."""
        return np.exp(self._share["loss"] @ self._log_losses(self._fitted, *_points(N, D))[..., 0])

    def forecast(self, N: ArrayLike, D: ArrayLike, level: float = 0.95, kind: str = "run") -> pd.DataFrame:
        """DataFrame loss, low, high: where a new run lands (kind "run"), or the law's value (kind "mean")."""
        import pandas as pd

        if kind not in ("mean", "run"):
            raise InputError(f"kind is {kind!r}; choose mean (the law's value) or run (what one new run shows).")
        N, D = _points(N, D)
        wide = _half_width(level, [v for name, v in self.variances(N, D).items() if kind == "run" or name != "noise"])
        loss = self.predict(N, D)
        return pd.DataFrame({"loss": loss, "low": loss * np.exp(-wide), "high": loss * np.exp(wide)})

    def variances(self, N: ArrayLike, D: ArrayLike) -> Columns:
        """What makes an interval, in squared log loss: resampling, disagreement, drift and noise, each (points,)."""
        N, D = _points(N, D)
        parts = self._variances("loss", lambda members: self._log_losses(members, N, D), self._further(N, D))
        return parts | {"noise": np.full(len(N), self.noise_**2)}

    def optimal(self, flops: ArrayLike, level: float = 0.95, flops_per_token: float | Curve | None = None) -> Optimum:
        """The best N and D for `flops` (a scalar or (targets,)) and the loss there, with intervals.

        N is the mean of the forms' own in log N, weighed by how little each one's moved while dearer runs came.
        flops_per_token: as of `compute_optimal`.
        """
        C, count = positive("flops", np.atleast_1d(floats(flops))), own_convention(self, flops_per_token)
        spend = spending(count)
        log_N, of_size = self.size(C, count)
        N, D = np.exp(log_N), C / spend(np.exp(log_N))
        of_loss = [v for name, v in self.variances(N, D).items() if name != "noise"]
        normal = ndtri((np.arange(QUANTILES) + 0.5) / QUANTILES)
        wide, loss_wide = (np.sqrt(sum(v))[:, None] * normal for v in (list(of_size.values()), of_loss))
        loss, sizes = self.predict(N, D), N[:, None] * np.exp(wide)
        draws = {
            "flops": np.broadcast_to(C[:, None], wide.shape),
            "N": sizes,
            "D": C[:, None] / spend(sizes),
            "ratio": C[:, None] / spend(sizes) / sizes,
            "loss": loss[:, None] * np.exp(loss_wide),
        }
        known = draws if self.draws else {}
        return Optimum(flops=C, N=N, D=D, loss=loss, draws=known, level=level, convention=convention_name(count))

    def sizes(self, flops: ArrayLike, flops_per_token: float | Curve | None = None) -> Columns:
        """Every form's own best N by its name, (targets,)."""
        C, count = np.atleast_1d(floats(flops)), own_convention(self, flops_per_token)
        return dict(zip(self.laws_, np.exp(self._log_sizes(self._fitted, C, count)[..., 0]), strict=True))

    def without_optimum(self, flops_per_token: float | Curve | None = None) -> float:
        """The share of the forms that have no best size at the cheapest or the dearest run: a term vanished, or all
        exponents stopped at their bounds.
        """
        C = self.ends_
        off = np.abs(np.log(np.array([*self.sizes(C, flops_per_token).values()]) / np.sqrt(C / 6.0)))
        held = np.zeros(len(off), dtype=bool)
        for k, law in enumerate(self.laws_.values()):
            stuck = {law.constants_.get(name) for name in law.degenerate_}
            held[k] = all(law.constants_[name] in stuck for name in law.exponent_names)  # a tied one by its value
        return float(self._share["size"] @ ((off > REACH - 1e-9).any(axis=1) | held))

    def size(self, flops: Array, flops_per_token: float | Curve | None = None) -> tuple[Array, Columns]:
        """Log of the best N, (targets,), and what makes its interval: variances as of the loss."""
        count = own_convention(self, flops_per_token)
        middle = self._share["size"] @ self._log_sizes(self._fitted, flops, count)[..., 0]
        further = self._further(np.exp(middle), flops / spending(count)(np.exp(middle)))
        return middle, self._variances("size", lambda members: self._log_sizes(members, flops, count), further)

    def size_exponent(
        self, level: float = 0.95, flops_per_token: float | Curve | None = None
    ) -> tuple[float, float, float]:
        """The exponent a of N* ~ C^a, its mean over the runs, and its interval.

        A drift of log N* per log C is one of the exponent.
        """
        count, C = own_convention(self, flops_per_token), self.ends_

        def slopes(members: Members) -> Array:
            return np.diff(self._log_sizes(members, C, count), axis=1) / np.log(C[1] / C[0])

        a = float(self._share["size"] @ slopes(self._fitted)[:, 0, 0])
        wide = float(_half_width(level, list(self._variances("size", slopes, np.ones(1)).values()))[0])
        return a, a - wide, a + wide

    # How they come about.

    @property
    def _fitted(self) -> Members:
        return [member.constants for member in self._members.values()]

    @property
    def _drawn(self) -> Members:
        # A draw that did not converge is missing, and an earlier one stands for it.
        return [{k: np.resize(v, self.draws) for k, v in member.draws.items()} for member in self._members.values()]

    def _log_losses(self, members: Members, N: Array, D: Array) -> Array:
        """Every form's log loss, (forms, points, r)."""
        each = zip(self._members.values(), members, strict=True)
        return np.stack([member.log_losses(constants, N, D) for member, constants in each])

    def _log_sizes(self, members: Members, C: Array, count: float | Curve) -> Array:
        """Every form's own log N of lowest loss for C FLOPs, (forms, targets, r)."""
        found, middle = [], 0.5 * np.log(C[:, None] / 6.0)
        for law, constants in zip(self.laws_.values(), members, strict=True):
            with np.errstate(all="ignore"):
                log_N = np.log(unlimited(law, constants, C[:, None], count)[0])
            found.append(np.clip(np.where(np.isnan(log_N), middle, log_N), middle - REACH, middle + REACH))
        return np.stack(found)

    @np.errstate(all="ignore")  # losses over a hundred decades give NaN, and so no interval
    def _variances(self, name: str, quantity: Callable[[Members], Array], further: Array) -> Columns:
        """Of the mean of a quantity, members -> (forms, targets, r)."""
        prior, share = self.priors[name], self._share[name]
        each = quantity(self._fitted)[..., 0]
        apart = np.clip(each - share @ each, -APART, APART)
        drawn = np.tensordot(share, quantity(self._drawn if self.draws else self._fitted), axes=1)
        low, high = np.nanpercentile(drawn, [15.87, 84.13], axis=1)
        return {
            "resampling": (0.5 * (high - low)) ** 2,
            "disagreement": prior.disagreement * (share @ apart**2),
            "drift": (prior.drift * self._rate[name] * further) ** 2,
        }

    def _size_moves(self) -> Array:
        """How far every form's log N* at the dearest run's compute moved since each cut-off, per log of compute,
        (forms, cut-offs).
        """
        if not self.cut_offs_:
            return np.zeros((len(self.laws_), 0))
        top, count = self.ends_[1:], own_convention(self)
        rolled = [member.rolled for member in self._members.values()]
        moved = self._log_sizes(rolled, top, count) - self._log_sizes(self._fitted, top, count)
        far = np.log(top / np.array([cut.flops for cut in self.cut_offs_]))
        return np.clip(moved[:, 0], -APART, APART) / far

    def _further(self, N: Array, D: Array) -> Array:
        """Log of how far beyond the dearest run N and D lie, as the table counts; zero below it."""
        flops = spending(own_convention(self))(N) * D
        return np.maximum(np.log(flops / self.ends_[1]), 0.0)

    def _errors(self, k: int, cut: CutOff) -> Array:
        """Log errors of every form at the runs that cut-off k tests, (forms, tested)."""
        N, D, loss = (self.data_[name][cut.tested] for name in ("N", "D", "loss"))
        there = [{name: v[k : k + 1] for name, v in one.rolled.items()} for one in self._members.values()]
        error = self._log_losses(there, N, D)[..., 0] - np.log(loss)
        return np.clip(np.nan_to_num(error, nan=WORST), -WORST, WORST)


def forecast(
    runs: Any,
    N: ArrayLike,
    D: ArrayLike,
    level: float = 0.95,
    kind: str = "run",
    forms: Sequence[str | LossLaw] | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Losses at N parameters and D tokens, from the mixture of forms: a DataFrame with loss, low and high.

    `runs` is a table with N, D, loss and optionally flops, group or run_id, and weight: a DataFrame or what
    `read_table` gives. kind "run" is where a new run lands, "mean" the law. Raises InputError for bad input.
    """

    def column(name: str) -> Any:
        return runs[name] if hasattr(runs, "columns") and name in runs else getattr(runs, name, None)

    for name in ("N", "D", "loss"):
        if column(name) is None:
            raise InputError(f"runs has no column {name}; N, D and loss are needed.")
    groups = column("group") if column("group") is not None else column("run_id")
    optional = {"flops": column("flops"), "groups": groups, "weight": column("weight")}
    mixture = FormMixture(forms, seed=seed).fit(column("N"), column("D"), column("loss"), **optional)
    return mixture.forecast(N, D, level, kind)


def _named(forms: Sequence[str | LossLaw]) -> dict[str, LossLaw]:
    """Laws of N and D by name, from laws and names of registered ones."""
    known, found = family(), {}
    for form in forms:
        law = form if not isinstance(form, str) else known[form] if form in known else law_class(form)()
        if not isinstance(law, LossLaw) or tuple(law.inputs) != ("N", "D"):
            raise InputError(f"forms holds {form!r}; each must be a law of N and D.")
        name = form if isinstance(form, str) else repr(law)
        found[name] = law
    if not found:
        raise InputError("forms is empty; at least one law of N and D is needed.")
    return found


def _refits(law: LossLaw, cuts: list[CutOff]) -> Array:
    """The law's coordinates fitted to what each cut-off leaves, (cuts, k); all in one call of the batched solver."""
    if not cuts:
        return law.theta_[None, :][:0]
    return law._refit(np.array([cut.fitted for cut in cuts], dtype=np.float64), starts=ROLLING_STARTS).theta


def _with_prior(squares: Sequence[Any], rate: float) -> Any:
    """Mean of squared rates, one a cut-off, and of the prior's, which counts as one more."""
    return (rate**2 + sum(squares)) / (1.0 + len(squares))


def _points(N: ArrayLike, D: ArrayLike) -> tuple[Array, Array]:
    sizes, tokens = (positive(name, np.atleast_1d(floats(v))) for name, v in (("N", N), ("D", D)))
    if 1 not in (len(sizes), len(tokens)):
        same_length(N=sizes, D=tokens)
    points = max(len(sizes), len(tokens))
    return np.broadcast_to(sizes, points), np.broadcast_to(tokens, points)


def _half_width(level: float, variances: Sequence[Array]) -> Array:
    check_level(level)
    return ndtri(0.5 + 0.5 * level) * np.sqrt(sum(variances))
