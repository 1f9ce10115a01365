"""Forecasts from several laws, weighted by how well they predicted larger runs; no law need be right.

Cut-offs halve the compute repeatedly; every law is fitted to the cheaper runs and predicts the others. Its weight is
the inverse of its mean squared error per log of extrapolated compute, with a prior rate as one more cut-off (Bates and
Granger 1969).

Intervals add four variances in log loss: of the weighted mean over resamples; of the forms about it; of a drift that
grows with the log of extrapolated compute; and, for a new run, of noise. The second and third are shrunk because forms
err to both sides (Gneiting and Ranjan 2013).
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
from ..table import Runs, as_table
from ..uncertainty import group_labels, numbered

if TYPE_CHECKING:
    import pandas as pd

GAP = 2.0  # least ratio of compute between cut-offs; rows closer than this count as this far
LEAST_RUNS, LEAST_SIZES = 6, 3  # least of a rolling fit: different (N, D), and different N and D
ROLLING_STARTS = 8  # starts of a rolling fit, in addition to the optimum of all runs
WORST = 1.0  # largest error of log loss that counts; chosen by hand
# Resamples per form, and draws of `before`. Of 400, seeds move an interval's ends by up to 3 % of its width.
DRAWS, PAST_DRAWS = 400, 50
MAX_DISTANCE = 15.0  # largest distance of a form's log N* from sqrt(C / 6): a vanished term puts it at infinity
MAX_DEVIATION = 5.0  # largest distance of a form's log N* from the mean's that counts; chosen by hand
QUANTILES = 1001  # of a normal distribution, used as its draws

Members = list[Columns]  # constants of every form, (r,): of the fit (r = 1), of draws, or of rolling fits


@dataclass(frozen=True)
class Prior:
    """Rates and shares learnt from public tables; see constants/forecast.yaml."""

    rate: float
    drift: float
    disagreement: float


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


@dataclass(frozen=True)
class CutOff:
    """A hold-out: forms are fitted to rows up to `flops` and tested on larger ones.

    fitted, tested: masks (n,). further: log(compute / `flops`) of the tested rows.
    """

    flops: float
    fitted: np.ndarray
    tested: np.ndarray
    further: Array


@dataclass(frozen=True)
class Member:
    """A form of a mixture: its law and its constants, name -> array.

    constants (1,): of the fit to all runs. draws (r,): bootstrap draws. rolled (cut-offs,): of the fits below each
    cut-off, with their coordinates theta (cut-offs, k).
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
        """Return the form's log losses at N and D (points,) for r values of its constants, (points, r)."""
        return np.asarray(np.log(self.law.evaluate(constants, N[:, None], D[:, None])))


def family() -> dict[str, LossLaw]:
    """Return the laws that a forecast uses by default, name -> unfitted law."""
    return {
        "chinchilla": loss_law("chinchilla"),
        "chinchilla, tied": loss_law("chinchilla", tied=True),
        "gamma": loss_law("gamma"),
        "gamma, tied": loss_law("gamma", tied=True),
        "kaplan": loss_law("kaplan"),
    }


def cut_offs(N: Array, D: Array, flops: Array, groups: np.ndarray) -> list[CutOff]:
    """Return hold-outs by falling cut-off: runs up to the cut-off are fitted, larger runs of other groups tested."""
    hold_outs, top = [], float(flops.max())
    while (fitted := flops <= top / GAP * (1.0 + 1e-4)).any():
        top = float(flops[fitted].max())
        points = np.unique(np.stack([N[fitted], D[fitted]]), axis=1)
        if points.shape[1] < LEAST_RUNS or min(len(np.unique(column)) for column in points) < LEAST_SIZES:
            break
        tested = (flops > top * (1.0 + 1e-4)) & ~np.isin(groups, groups[fitted])
        if tested.any():
            further = np.maximum(np.log(flops[tested] / top), np.log(GAP))
            hold_outs.append(CutOff(top, fitted, tested, further))
    return hold_outs


class FormMixture:
    """Several laws of N and D as one, with intervals that allow for the error of every form.

    forms: laws or names of registered laws; by default `family()`. draws: resamples per form, 0 for no intervals.
    priors: a `Prior` for "loss" and one for "size", by default those of constants/forecast.yaml.

    After `fit`: laws_ (name -> fitted law), weights_ (name -> share), refused_ (name -> reason), noise_ of runs and
    rate_ per log of extrapolation, both in log loss, cut_offs_, ends_ (FLOPs of the cheapest and the largest run).
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
        N: Any,
        D: Any = None,
        loss: Any = None,
        flops: Any = None,
        groups: Any = None,
        weight: Any = None,
        loss_se: Any = None,
    ) -> Self:
        """Fit every form to n runs (columns or a table), to the runs up to each cut-off, and to resamples.

        Raises InputError if no form can be fitted. Columns (n,) are as in `LossLaw.fit`. Rows of one group, such as
        checkpoints of a run or branches of a trunk, are resampled and held out together.
        """
        if D is None or loss is None:
            runs = as_table(N)
            return self.fit(runs.N, runs.D, runs.loss, **runs.options)
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
        return self._assemble(data, labels[used], cuts, members, flops_per_token(N, D, data["flops"]))

    def _assemble(
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
        self._hold_out_errors = [self._errors(k, cut) for k, cut in enumerate(cuts)]
        return self.weigh(self.priors)

    def weigh(self, priors: Mapping[str, Prior]) -> Self:
        """Replace the priors; compute the weights, the error rate and the noise of runs again."""
        self.priors = priors
        errors = [error / cut.further for error, cut in zip(self._hold_out_errors, self.cut_offs_, strict=True)]
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
        """Return the mixture fitted only to the runs up to cut-off k, or None if these determine no form."""
        rows = self.cut_offs_[k].fitted
        data = {name: values[rows] for name, values in self.data_.items()}
        group = numbered(self._labels[rows], *data.values())
        independent = int(group.max()) + 1
        usable = {name: member for name, member in self._members.items() if member.law.problem_.free < independent}
        try:
            identifiable(data["N"], data["D"])
        except InputError:
            usable = {}
        if not usable:
            return None
        cuts = [
            CutOff(c.flops, c.fitted[rows], c.tested[rows], c.further[rows[c.tested]]) for c in self.cut_offs_[k + 1 :]
        ]
        with_tests = [j for j, cut in enumerate(cuts) if cut.tested.any()]
        noise = np.random.default_rng(self.seed).standard_normal((PAST_DRAWS, independent))[:, group]
        members = {}
        for name, member in usable.items():
            constants = {key: values[k : k + 1] for key, values in member.rolled.items()}
            residual = np.log(data["loss"]) - member.log_losses(constants, data["N"], data["D"])[:, 0]
            precision = member.law.weight_[rows] * member.law._precision[rows]
            scale = np.sqrt(np.sum(precision * residual**2) / max(independent - member.law.problem_.free, 1))
            draws = member.law.nearby(member.theta[k], rows, scale * noise)
            rolled = {key: values[k + 1 :][with_tests] for key, values in member.rolled.items()}
            members[name] = Member(member.law, constants, draws, rolled, member.theta[k + 1 :][with_tests])
        mixture = FormMixture(draws=PAST_DRAWS if self.draws else 0, seed=self.seed, priors=self.priors)
        return mixture._assemble(
            data, self._labels[rows], [cuts[j] for j in with_tests], members, self.flops_per_token_
        )

    def to_dict(self) -> Any:
        """Return the mixture as a `SavedMixture` in JSON types."""
        forms = {}
        for name, member in self._members.items():
            draws = {key: values.tolist() for key, values in member.draws.items()}
            forms[name] = SavedForm(member.law.form, member.law.options(), member.law.constants_, draws)
        share = {name: share.tolist() for name, share in self._share.items()}
        ends, spend = self.ends_.tolist(), self.flops_per_token_
        saved = SavedMixture(forms, share, self._rate, {**self.priors}, self.draws, ends, spend, self.noise_)
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
        mixture._share = {name: np.array(share) for name, share in saved.share.items()}
        mixture.weights_ = dict(zip(members, saved.share["loss"], strict=True))
        mixture._rate, mixture.ends_ = saved.rate, np.array(saved.ends)
        mixture.noise_ = float("nan") if saved.noise is None else saved.noise
        mixture.flops_per_token_ = saved.flops_per_token
        return mixture

    # Answers.

    def predict(self, N: ArrayLike, D: ArrayLike) -> Array:
        """Return losses (points,), the exponential of the weighted mean of the forms' log losses."""
        return np.exp(self._share["loss"] @ self._log_losses(self._fitted, *_points(N, D))[..., 0])

    def forecast(self, N: ArrayLike, D: ArrayLike, level: float = 0.95, kind: str = "run") -> pd.DataFrame:
        """Return columns loss, low and high: the interval of a new run (kind "run") or of the law's value ("mean")."""
        import pandas as pd

        if kind not in ("mean", "run"):
            raise InputError(f"kind is {kind!r}; choose mean (the law's value) or run (the value of one new run).")
        N, D = _points(N, D)
        wide = _half_width(level, [v for name, v in self.variances(N, D).items() if kind == "run" or name != "noise"])
        loss = self.predict(N, D)
        return pd.DataFrame({"loss": loss, "low": loss * np.exp(-wide), "high": loss * np.exp(wide)})

    def variances(self, N: ArrayLike, D: ArrayLike) -> Columns:
        """Return the variances that add up to the variance of log loss, source of error -> (points,)."""
        N, D = _points(N, D)
        parts = self._variances("loss", lambda members: self._log_losses(members, N, D), self._further(N, D))
        return parts | {"noise": np.full(len(N), self.noise_**2)}

    def optimal(self, flops: ArrayLike, level: float = 0.95, flops_per_token: float | Curve | None = None) -> Optimum:
        """Return the best N and D for `flops` (a scalar or (targets,)) and the loss there, with intervals.

        log N is a weighted mean over forms; a form weighs less, the more its log N moved as larger runs were added.
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
        interval_draws = draws if self.draws else {}
        return Optimum(
            flops=C, N=N, D=D, loss=loss, draws=interval_draws, level=level, convention=convention_name(count)
        )

    def sizes(self, flops: ArrayLike, flops_per_token: float | Curve | None = None) -> Columns:
        """Return each form's N of lowest loss for `flops`, name -> (targets,)."""
        C, count = np.atleast_1d(floats(flops)), own_convention(self, flops_per_token)
        return dict(zip(self.laws_, np.exp(self._log_sizes(self._fitted, C, count)[..., 0]), strict=True))

    def without_optimum(self, flops_per_token: float | Curve | None = None) -> float:
        """Return the summed weight of forms without a finite best N at the compute of the cheapest or largest run.

        Forms with all exponents at bounds count too.
        """
        C = self.ends_
        distance = np.abs(np.log(np.array([*self.sizes(C, flops_per_token).values()]) / np.sqrt(C / 6.0)))
        at_bounds = np.zeros(len(distance), dtype=bool)
        for k, law in enumerate(self.laws_.values()):
            stuck = {law.constants_.get(name) for name in law.degenerate_}
            # A tied exponent is recognised by its value.
            at_bounds[k] = all(law.constants_[name] in stuck for name in law.exponent_names)
        return float(self._share["size"] @ ((distance > MAX_DISTANCE - 1e-9).any(axis=1) | at_bounds))

    def size(self, flops: Array, flops_per_token: float | Curve | None = None) -> tuple[Array, Columns]:
        """Return the log of the best N for `flops`, (targets,), and its variances, source of error -> (targets,)."""
        count = own_convention(self, flops_per_token)
        middle = self._share["size"] @ self._log_sizes(self._fitted, flops, count)[..., 0]
        further = self._further(np.exp(middle), flops / spending(count)(np.exp(middle)))
        return middle, self._variances("size", lambda members: self._log_sizes(members, flops, count), further)

    def size_exponent(
        self, level: float = 0.95, flops_per_token: float | Curve | None = None
    ) -> tuple[float, float, float]:
        """Return (a, low, high), the mean exponent of N* ~ C^a from cheapest to largest run and its interval."""
        count, C = own_convention(self, flops_per_token), self.ends_

        def slopes(members: Members) -> Array:
            return np.diff(self._log_sizes(members, C, count), axis=1) / np.log(C[1] / C[0])

        a = float(self._share["size"] @ slopes(self._fitted)[:, 0, 0])
        wide = float(_half_width(level, list(self._variances("size", slopes, np.ones(1)).values()))[0])
        return a, a - wide, a + wide

    # Parts of the answers.

    @property
    def _fitted(self) -> Members:
        return [member.constants for member in self._members.values()]

    @property
    def _drawn(self) -> Members:
        # Draws that did not converge are missing; earlier ones are repeated instead.
        return [{k: np.resize(v, self.draws) for k, v in member.draws.items()} for member in self._members.values()]

    def _log_losses(self, members: Members, N: Array, D: Array) -> Array:
        """Return the log losses of all forms at N and D, (forms, points, r), for r values of constants in `members`."""
        pairs = zip(self._members.values(), members, strict=True)
        return np.stack([member.log_losses(constants, N, D) for member, constants in pairs])

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

    @np.errstate(all="ignore")  # losses over a hundred decades give NaN and no interval
    def _variances(self, name: str, quantity: Callable[[Members], Array], further: Array) -> Columns:
        """Return the variances of the forms' weighted mean of a quantity, source of error -> (targets,).

        name: "loss" or "size", whose weights and priors are used. quantity: maps r values of all constants to (forms,
        targets, r). further (targets,): log(compute / compute of the largest run).
        """
        prior, share = self.priors[name], self._share[name]
        values = quantity(self._fitted)[..., 0]
        deviation = np.clip(values - share @ values, -MAX_DEVIATION, MAX_DEVIATION)
        drawn = np.tensordot(share, quantity(self._drawn if self.draws else self._fitted), axes=1)
        low, high = np.nanpercentile(drawn, [15.87, 84.13], axis=1)
        return {
            "resampling": (0.5 * (high - low)) ** 2,
            "disagreement": prior.disagreement * (share @ deviation**2),
            "drift": (prior.drift * self._rate[name] * further) ** 2,
        }

    def _size_moves(self) -> Array:
        """Return errors of log N* at the largest C by fits up to a cut-off, per log(C / cut-off), (forms, cut-offs)."""
        if not self.cut_offs_:
            return np.zeros((len(self.laws_), 0))
        top, count = self.ends_[1:], own_convention(self)
        rolled = [member.rolled for member in self._members.values()]
        moves = self._log_sizes(rolled, top, count) - self._log_sizes(self._fitted, top, count)
        log_ratio = np.log(top / np.array([cut.flops for cut in self.cut_offs_]))
        return np.clip(moves[:, 0], -MAX_DEVIATION, MAX_DEVIATION) / log_ratio

    def _further(self, N: Array, D: Array) -> Array:
        """Return log(compute of N and D / compute of the largest run), (points,); zero where negative."""
        flops = spending(own_convention(self))(N) * D
        return np.maximum(np.log(flops / self.ends_[1]), 0.0)

    def _errors(self, k: int, cut: CutOff) -> Array:
        """Return log(predicted / observed) of the runs that `cut` tests, by fits up to cut-off k, (forms, tested)."""
        N, D, loss = (self.data_[name][cut.tested] for name in ("N", "D", "loss"))
        constants = [{name: v[k : k + 1] for name, v in member.rolled.items()} for member in self._members.values()]
        error = self._log_losses(constants, N, D)[..., 0] - np.log(loss)
        return np.clip(np.nan_to_num(error, nan=WORST), -WORST, WORST)


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
    return FormMixture(forms, seed=seed).fit(runs).forecast(N, D, level, kind)


def _named(forms: Sequence[str | LossLaw]) -> dict[str, LossLaw]:
    """Return laws of N and D by name; `forms` contains laws or names. Raises InputError for others."""
    defaults, laws = family(), {}
    for form in forms:
        law = form if not isinstance(form, str) else defaults[form] if form in defaults else law_class(form)()
        if not isinstance(law, LossLaw) or tuple(law.inputs) != ("N", "D"):
            raise InputError(f"forms holds {form!r}; each must be a law of N and D.")
        name = form if isinstance(form, str) else repr(law)
        laws[name] = law
    if not laws:
        raise InputError("forms is empty; at least one law of N and D is needed.")
    return laws


def _refits(law: LossLaw, cuts: list[CutOff]) -> Array:
    """Refit a law to the runs up to each cut-off; return its k coordinates, (cut-offs, k)."""
    if not cuts:
        return law.theta_[None, :][:0]
    return law._refit(np.array([cut.fitted for cut in cuts], dtype=np.float64), starts=ROLLING_STARTS).theta


def _with_prior(squares: Sequence[Any], rate: float) -> Any:
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
