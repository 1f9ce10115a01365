"""Forecasts from several laws, weighted by how well they predicted larger runs; no law need be right.

Cut-offs halve the compute repeatedly; every law is fitted to the runs below one and predicts the others. Its weight is
a power of the inverse of its mean squared error per log of extrapolation, with a prior rate as one more cut-off (Bates
and Granger 1969). What is extrapolated is compute or one of the inputs.

Intervals add four variances in log loss: of the weighted mean over resamples; of the laws about it; of a drift that
grows with the log of extrapolation; and, for a new run, of noise. The second and third are shrunk because laws err to
both sides (Gneiting and Ranjan 2013).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, Column, Columns, InputError, check_level, check_weights, floats, positive, same_length
from ..files import read_constants
from ..flops import FlopsPerToken, flops_per_token
from ..laws.law import Estimator, Law
from ..table import by_name
from ..uncertainty import group_labels, numbered

if TYPE_CHECKING:
    import pandas as pd

GAP = 2.0  # least ratio between cut-offs; rows closer than this count as this far
MIN_RUNS, MIN_VALUES = 6, 3  # fewest of a rolling fit: different runs, and different values of each input
ROLLING_STARTS = 8  # starts of a rolling fit, in addition to the optimum of all runs
WORST = 1.0  # largest error of log loss that counts; chosen by hand
# Resamples per law, and draws of `before`. Of 400, seeds move an interval's ends by up to 3 % of its width.
DRAWS, PAST_DRAWS = 400, 50
MAX_DEVIATION = 5.0  # largest distance of a law's logarithm from the weighted mean's that counts; chosen by hand
QUANTILES = 1001
NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)])  # used as draws
COMPUTE = "flops"
SIZES = ("N", "N_active", "N_total")  # the first that a law has is N of 6 N D FLOPs

Members = list[Columns]  # constants of every law, (r,): of the fit (r = 1), of draws, or of rolling fits


@dataclass(frozen=True)
class Prior:
    """Rates and shares learnt from public tables; see constants/forecast.yaml."""

    rate: float
    drift: float
    disagreement: float
    power: float = 1.0  # of the inverse squared errors, in the laws' shares


def learnt_priors(loss: str) -> dict[str, Prior]:
    """Return the priors for "loss", of the entry named `loss` in constants/forecast.yaml, and for "size"."""
    constants = read_constants("forecast")
    return {"loss": Prior(**constants[loss]), "size": Prior(**constants["size"])}


@dataclass(frozen=True)
class CutOff:
    """A hold-out: laws are fitted to rows up to `reach` and tested on rows beyond it.

    fitted, tested: masks (n,). further: log(value / `reach`) of the tested rows.
    """

    reach: float
    fitted: np.ndarray
    tested: np.ndarray
    further: Array


@dataclass(frozen=True)
class Weights:
    """The laws' shares in a weighted mean, (laws,), and the rate of the mean's error per log of extrapolation."""

    share: Array
    rate: float
    prior: Prior

    @classmethod
    def learn(cls, moves: Sequence[Array], laws: int, prior: Prior) -> Weights:
        """Learn shares from errors per log of extrapolation, (laws, tests) for each cut-off."""
        squares = [np.mean(move**2, axis=1) for move in moves]
        share = np.broadcast_to(_with_prior(squares, prior.rate), laws) ** -prior.power
        share = share / share.sum()
        return cls(share, float(np.sqrt(_with_prior([np.mean((share @ m) ** 2) for m in moves], prior.rate))), prior)

    @np.errstate(all="ignore")  # losses over a hundred decades give NaN and no interval
    def variances(self, fitted: Array, drawn: Array, further: Array) -> Columns:
        """Return the variances of the weighted mean of a quantity's logarithm, source of error -> (points,).

        fitted (laws, points) and drawn (laws, points, r): the logarithm by the laws, and by their bootstrap draws.
        further (points,): log of extrapolation.
        """
        deviation = np.clip(fitted - self.share @ fitted, -MAX_DEVIATION, MAX_DEVIATION)
        mean = np.tensordot(self.share, drawn, axes=1)
        low, high = (np.nanpercentile if np.isnan(mean).any() else np.percentile)(mean, [15.87, 84.13], axis=1)
        return {
            "resampling": (0.5 * (high - low)) ** 2,
            "disagreement": self.prior.disagreement * (self.share @ deviation**2),
            "drift": (self.prior.drift * self.rate * further) ** 2,
        }


@dataclass(frozen=True)
class Member:
    """A law of a forecaster and its constants, name -> array.

    constants (1,): of the fit to all runs. draws (r,): bootstrap draws. rolled (cut-offs,): of the fits below each
    cut-off, with their coordinates theta (cut-offs, k).
    """

    law: Law
    constants: Columns
    draws: Columns
    rolled: Columns
    theta: Array

    @classmethod
    def of(cls, law: Law, cuts: list[CutOff]) -> Member:
        """Refit a fitted law to the runs up to each cut-off."""
        theta = law.theta_[None, :][:0]
        if cuts:
            theta = law._refit(np.array([cut.fitted for cut in cuts], dtype=np.float64), keep=ROLLING_STARTS).theta
        constants = {name: np.array([value]) for name, value in law.constants_.items()}
        return cls(law, constants, law.draws_ or {}, law.problem_.constants(theta), theta)

    @np.errstate(all="ignore")
    def log_values(self, constants: Columns, points: Columns) -> Array:
        """Return the law's log values at points (points,) for r values of its constants, (points, r)."""
        return np.asarray(np.log(self.law.evaluate(constants, *(points[name][:, None] for name in self.law.inputs))))


def cut_offs(
    inputs: Columns, reach: Array, groups: np.ndarray, min_runs: int = MIN_RUNS, min_values: int = MIN_VALUES
) -> list[CutOff]:
    """Return hold-outs by falling cut-off of `reach` (n,); no group is both fitted and tested.

    A hold-out fits at least `min_runs` rows of different inputs, and `min_values` values of an input that has so many.
    """
    columns = np.stack([*inputs.values()])
    values = [min(min_values, len(np.unique(column))) for column in columns]
    hold_outs, top = [], float(reach.max())
    while (fitted := reach <= top / GAP * (1.0 + 1e-4)).any():
        top = float(reach[fitted].max())
        points = np.unique(columns[:, fitted], axis=1)
        if points.shape[1] < min_runs or any(len(np.unique(p)) < v for p, v in zip(points, values, strict=True)):
            break
        tested = (reach > top * (1.0 + 1e-4)) & ~np.isin(groups, groups[fitted])
        if tested.any():
            hold_outs.append(CutOff(top, fitted, tested, np.maximum(np.log(reach[tested] / top), np.log(GAP))))
    return hold_outs


class Forecaster(Estimator):
    """Several laws of one output as one law, with intervals that allow for the error of every law.

    After `fit`: laws_ (name -> fitted law), weights_ (name -> share), refused_ (name -> reason), cut_offs_, ends_ (the
    least and the largest value of what is extrapolated); in the log of the output: noise_ of runs, rate_ of errors per
    log of extrapolation, and errors_ (name -> root mean square over hold-outs, if any).

    Parameters
    ----------
    laws
        Unfitted laws, by name or as a list; their inputs may differ.
    further : an input, or "flops"
        What is extrapolated; "flops" are counted as by the table, else 6 N D, or with experts 6 N_active D.
    draws
        Resamples per law, 0 for no intervals.
    priors
        By default those of constants/forecast.yaml, "loss" for laws of N and D, "other" for laws of other inputs.
    """

    flops_per_token_: FlopsPerToken | None = None  # as the fitted table counts them; None: 6N

    def __init__(
        self,
        laws: Mapping[str, Law] | Sequence[Law],
        further: str = COMPUTE,
        draws: int = DRAWS,
        seed: int = 0,
        priors: Mapping[str, Prior] | None = None,
    ) -> None:
        self.laws, self.further, self.draws, self.seed = laws, further, draws, seed
        self._named = dict(laws) if isinstance(laws, Mapping) else {repr(law): law for law in laws}
        wrong = [law for law in self._named.values() if not isinstance(law, Law)]
        outputs = dict.fromkeys(law.output for law in self._named.values() if not wrong)
        if wrong or len(outputs) != 1:
            has = f"{wrong[0]!r}" if wrong else f"laws of {' and of '.join(outputs)}" if outputs else "no law"
            raise InputError(f"laws holds {has}; give unfitted laws of one output, such as fit.ExpertLaw('abnar').")
        (self.output,) = outputs
        self.inputs = tuple(dict.fromkeys(name for law in self._named.values() for name in law.inputs))
        self.priors = priors or learnt_priors("loss" if {*self.inputs} == {"N", "D"} else "other")
        if further not in (*self.inputs, COMPUTE):
            raise InputError(f"further is {further!r}; choose one of {', '.join((*self.inputs, COMPUTE))}.")

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "laws_")

    def __repr__(self) -> str:
        shares = self.weights_ if hasattr(self, "weights_") else dict.fromkeys(self._named, None)
        laws = ", ".join(name if share is None else f"{name} {share:.0%}" for name, share in shares.items())
        tests = f"; {len(self.cut_offs_)} hold-outs by {self.further}" if hasattr(self, "weights_") else ""
        return f"{type(self).__name__} of {self.output}: {laws}{tests}"

    def fit(
        self, *columns: Any, weight: Column = None, loss_se: Column = None, flops: Column = None, groups: Any = None,
        **named: Any,
    ) -> Self:  # fmt: skip
        """Fit every law to n runs, to the runs up to each cut-off, and to resamples.

        Columns of all `inputs`, then of `output`, and options are as in `Law.fit`; `flops` count for laws of N and D.
        Rows of one group, such as checkpoints of a run or branches of a trunk, are resampled and held out together.
        Raises InputError if no law can be fitted.
        """
        options = {"weight": weight, "loss_se": loss_se, "flops": flops, "groups": groups}
        data, (weight, loss_se, flops, groups) = self._arguments(columns, named, options)
        weights = check_weights(weight, len(data[self.output]))
        errors = {} if loss_se is None else {f"{self.output}_se": positive(f"{self.output}_se", loss_se)}
        counted = {} if flops is None or {*self.inputs} != {"N", "D"} else {COMPUTE: positive(COMPUTE, flops)}
        same_length(**data, weight=weights, **errors, **counted)
        used = weights > 0
        data, labels = {name: column[used] for name, column in data.items()}, group_labels(groups, len(weights))[used]
        spent = counted[COMPUTE][used] if counted else None
        self.flops_per_token_ = None if spent is None else flops_per_token(data["N"], data["D"], spent)
        reach = self._reach(data) if spent is None or self.further != COMPUTE else spent
        laws, self.refused_ = dict[str, Law](), dict[str, str]()
        for name, law in self._named.items():
            try:
                law_columns = (data[key] for key in (*law.inputs, law.output))
                fitted = law.clone().fit(*law_columns, weights[used], *(v[used] for v in errors.values()))
                if self.draws:
                    fitted.bootstrap(self.draws, groups=labels, seed=self.seed)
                if not fitted.converged_ or (self.draws and not fitted.bootstrap_["resamples"]):
                    raise InputError(f"the fit of the law {name} did not converge.")
                laws[name] = fitted
            except InputError as error:
                self.refused_[name] = str(error)
        if not laws:
            raise InputError(next(iter(self.refused_.values())))
        min_runs = max(MIN_RUNS, *(law.problem_.free for law in laws.values()))
        cuts = self._cut_offs({name: data[name] for name in self.inputs}, reach, labels, min_runs)
        members = {name: Member.of(law, cuts) for name, law in laws.items()}
        return self._assemble(data, labels, reach, cuts, members)

    def _cut_offs(self, data: Columns, reach: Array, labels: np.ndarray, min_runs: int) -> list[CutOff]:
        return cut_offs(data, reach, labels, min_runs)

    def _assemble(
        self, data: Columns, labels: np.ndarray, reach: Array, cuts: list[CutOff], members: dict[str, Member]
    ) -> Self:
        self.data_, self._labels, self.reach_, self.cut_offs_ = data, labels, reach, cuts
        self.ends_ = np.array([reach.min(), reach.max()])
        self._members, self.laws_ = members, {name: member.law for name, member in members.items()}
        errors = [self._errors(k, cut) for k, cut in enumerate(cuts)]
        self._moves = [error / cut.further for error, cut in zip(errors, cuts, strict=True)]
        squares = [np.mean(error**2, axis=1) for error in errors]
        self.errors_ = dict(zip(members, np.sqrt(np.mean(squares, axis=0)).tolist(), strict=True)) if cuts else {}
        return self.weigh(self.priors)

    def weigh(self, priors: Mapping[str, Prior]) -> Self:
        """Replace the priors; compute the weights, the error rate and the noise of runs again."""
        self.priors = priors
        self._weights = Weights.learn(self._moves, len(self.laws_), priors["loss"])
        self.rate_, share = self._weights.rate, self._weights.share
        self.weights_ = dict(zip(self.laws_, share.tolist(), strict=True))
        residual = np.log(self.data_[self.output]) - share @ self._log_values(self._constants, self.data_)[..., 0]
        free = float(share @ np.array([law.problem_.free for law in self.laws_.values()]))
        independent = len(np.unique(self._labels))
        self.noise_ = float(np.sqrt(independent / max(independent - free, 1.0) * np.mean(residual**2)))
        return self

    def before(self, k: int) -> Self | None:
        """Return the forecaster fitted only to the runs up to cut-off k, or None if these determine no law."""
        rows = self.cut_offs_[k].fitted
        data = {name: values[rows] for name, values in self.data_.items()}
        group = numbered(self._labels[rows], *data.values())
        independent = int(group.max()) + 1
        usable = {
            name: member
            for name, member in self._members.items()
            if member.law.problem_.free < independent and determines(member.law, data)
        }
        if not usable:
            return None
        cuts = [
            CutOff(c.reach, c.fitted[rows], c.tested[rows], c.further[rows[c.tested]]) for c in self.cut_offs_[k + 1 :]
        ]
        with_tests = [j for j, cut in enumerate(cuts) if cut.tested.any()]
        noise = np.random.default_rng(self.seed).standard_normal((PAST_DRAWS, independent))[:, group]
        members = {}
        for name, member in usable.items():
            constants = {key: values[k : k + 1] for key, values in member.rolled.items()}
            residual = np.log(data[self.output]) - member.log_values(constants, data)[:, 0]
            precision = member.law.weight_[rows] * member.law._precision[rows]
            scale = np.sqrt(np.sum(precision * residual**2) / max(independent - member.law.problem_.free, 1))
            draws = member.law.nearby(member.theta[k], rows, scale * noise)
            rolled = {key: values[k + 1 :][with_tests] for key, values in member.rolled.items()}
            members[name] = Member(member.law, constants, draws, rolled, member.theta[k + 1 :][with_tests])
        earlier = copy.copy(self)
        earlier.draws = PAST_DRAWS if self.draws else 0
        return earlier._assemble(data, self._labels[rows], self.reach_[rows], [cuts[j] for j in with_tests], members)

    # Answers.

    def predict(self, *inputs: ArrayLike, **named: ArrayLike) -> Array:
        """Return the output (points,), the exponential of the weighted mean of the laws' log values."""
        return self._mean(self._points(inputs, named))

    def forecast(self, *inputs: ArrayLike, level: float = 0.95, kind: str = "run", **named: ArrayLike) -> pd.DataFrame:
        """Return the output with low and high: the interval of a new run (`kind` "run") or of the law ("mean")."""
        import pandas as pd

        if kind not in ("mean", "run"):
            raise InputError(f"kind is {kind!r}; choose mean (the law's value) or run (the value of one new run).")
        points = self._points(inputs, named)
        wide = half_width(level, [v for name, v in self._variances(points).items() if kind == "run" or name != "noise"])
        value = self._mean(points)
        return pd.DataFrame({self.output: value, "low": value * np.exp(-wide), "high": value * np.exp(wide)})

    def quantiles(self, *inputs: ArrayLike, **named: ArrayLike) -> Array:
        """Return QUANTILES equally likely values of the law at each point, (points, QUANTILES)."""
        points = self._points(inputs, named)
        wide = np.sqrt(sum(v for name, v in self._variances(points).items() if name != "noise"))
        return self._mean(points)[:, None] * np.exp(wide[:, None] * NORMAL)

    def variances(self, *inputs: ArrayLike, **named: ArrayLike) -> Columns:
        """Return the variances that add up to the variance of the log of the output, source of error -> (points,)."""
        return self._variances(self._points(inputs, named))

    score = Law.score

    # Parts of the answers.

    def _variances(self, points: Columns) -> Columns:
        fitted, drawn = (self._log_values(members, points) for members in (self._constants, self._drawn))
        parts = self._weights.variances(fitted[..., 0], drawn, self._further(points))
        return parts | {"noise": np.full(fitted.shape[1], self.noise_**2)}

    def _mean(self, points: Columns) -> Array:
        return np.exp(self._weights.share @ self._log_values(self._constants, points)[..., 0])

    def _points(self, inputs: tuple[ArrayLike, ...], named: Mapping[str, ArrayLike]) -> Columns:
        self._fitted()
        values = by_name("predict", self.inputs, inputs, named)
        columns = {name: positive(name, np.atleast_1d(floats(v))) for name, v in values.items()}
        same_length(**{name: column for name, column in columns.items() if len(column) > 1})
        return dict(zip(columns, np.broadcast_arrays(*columns.values()), strict=True))

    def _further(self, points: Columns) -> Array:
        """Return log(what is extrapolated / its largest value in the runs), (points,); zero where negative."""
        return np.maximum(np.log(self._reach(points) / self.ends_[1]), 0.0)

    def _reach(self, points: Columns) -> Array:
        """Return what is extrapolated, (points,): an input, or FLOPs."""
        if self.further != COMPUTE:
            return points[self.further]
        if self.flops_per_token_ is not None:
            return self.flops_per_token_(points["N"]) * points["D"]
        size = next((points[name] for name in SIZES if name in points), None)
        if size is None:
            raise InputError(f"further is {COMPUTE!r}, but no law has N; choose one of {', '.join(self.inputs)}.")
        return 6.0 * size * points.get("D", 1.0)

    @property
    def _constants(self) -> Members:
        return [member.constants for member in self._members.values()]

    @property
    def _drawn(self) -> Members:
        # Draws that did not converge are missing; earlier ones are repeated instead.
        draws = [{k: np.resize(v, self.draws) for k, v in member.draws.items()} for member in self._members.values()]
        return draws if self.draws else self._constants

    def _log_values(self, members: Members, points: Columns) -> Array:
        """Return the log values of all laws at points, (laws, points, r), for r values of constants in `members`."""
        pairs = zip(self._members.values(), members, strict=True)
        return np.stack([member.log_values(constants, points) for member, constants in pairs])

    def _errors(self, k: int, cut: CutOff) -> Array:
        """Return log(predicted / observed) of the runs that `cut` tests, by fits up to cut-off k, (laws, tested)."""
        tested = {name: values[cut.tested] for name, values in self.data_.items()}
        constants = [{name: v[k : k + 1] for name, v in member.rolled.items()} for member in self._members.values()]
        error = self._log_values(constants, tested)[..., 0] - np.log(tested[self.output])
        return np.clip(np.nan_to_num(error, nan=WORST), -WORST, WORST)


def _with_prior(squares: Sequence[Any], rate: float) -> Any:
    return (rate**2 + sum(squares)) / (1.0 + len(squares))


def half_width(level: float, variances: Sequence[Array]) -> Array:
    check_level(level)
    return NormalDist().inv_cdf(0.5 + 0.5 * level) * np.sqrt(sum(variances))


def determines(law: Law, data: Columns) -> bool:
    """Return whether rows `data` (n,) suffice to fit the law, which must be fitted to a table that has them."""
    try:
        law._check(tuple(data[name] for name in law.inputs), data[law.output])
    except InputError:
        return False
    return True
