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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from ..allocation.allocation import Optimum
from ..errors import Array, Columns, InputError, check_weights, floats, positive, same_length
from ..files import read_constants
from ..laws.chinchilla import ChinchillaLaw
from ..laws.gamma import GammaLaw
from ..laws.kaplan import KaplanLaw
from ..laws.law import LossLaw
from ..laws.registry import law_class
from ..uncertainty import group_labels

if TYPE_CHECKING:
    import pandas as pd

GAP = 2.0  # between the compute of two cut-offs; rows nearer than this count as this far
LEAST_RUNS, LEAST_SIZES = 6, 3  # of a rolling fit: different (N, D), and different N and D
ROLLING_STARTS = 8  # of a rolling fit, besides the optimum of all runs
WORST = 1.0  # errors of log loss end here
DRAWS = 100  # resamples per form
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


@dataclass(frozen=True)
class CutOff:
    """A rolling hold-out: its compute, the rows that are fitted and tested (n,), and the log of extrapolation of the
    tested ones.
    """

    flops: float
    fitted: np.ndarray
    tested: np.ndarray
    further: Array


def family() -> dict[str, LossLaw]:
    """The forms that a forecast weighs by default, not fitted."""
    return {
        "chinchilla": ChinchillaLaw(),
        "chinchilla, tied": ChinchillaLaw(tied=True),
        "gamma": GammaLaw(),
        "gamma, tied": GammaLaw(tied=True),
        "kaplan": KaplanLaw(),
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

    forms: names of registered laws, or laws; by default `family()`. draws: resamples per form. priors: "loss" and
    "size", by default those of constants/forecast.yaml.

    After `fit`: laws_ (name -> fitted law), weights_ (name -> share), refused_ (name -> why it was left out), noise_
    and rate_ (of runs, and per log of extrapolation, both in log loss), cut_offs_.
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
    ) -> Self:
        """Fit, roll and resample every form over n runs (n,); `flops` is 6 N D by default.

        Rows of one group (`groups` (n,): checkpoints of a run, branches of a trunk) are resampled and held out
        together. Raises InputError for bad numbers and where no form can be fitted and resampled.
        """
        columns = {"N": positive("N", N), "D": positive("D", D), "loss": positive("loss", loss)}
        columns["flops"] = 6.0 * columns["N"] * columns["D"] if flops is None else positive("flops", flops)
        weights = check_weights(weight, len(columns["loss"]))
        same_length(**columns, weight=weights)
        labels, used = group_labels(groups, len(weights)), weights > 0
        self.data_ = {name: column[used] for name, column in columns.items()}
        N, D, loss = (self.data_[name] for name in ("N", "D", "loss"))
        self.laws_: dict[str, LossLaw] = {}
        self.refused_: dict[str, str] = {}
        for name, law in self.forms.items():
            try:
                fitted = law.clone().fit(N, D, loss, weight=weights[used])
                fitted.bootstrap(self.draws, groups=labels[used], seed=self.seed)
                self.laws_[name] = fitted
            except InputError as error:
                self.refused_[name] = str(error)
        if not self.laws_:
            raise InputError(next(iter(self.refused_.values())))
        self.cut_offs_ = cut_offs(N, D, self.data_["flops"], labels[used])
        self._independent = len(np.unique(labels[used]))
        self._rolled = [_refits(law, self.cut_offs_) for law in self.laws_.values()]
        self._missed = [self._errors(k, cut) for k, cut in enumerate(self.cut_offs_)]
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
        residual = share @ np.stack([law.residuals() for law in self.laws_.values()])
        free = float(share @ np.array([law.problem_.free for law in self.laws_.values()]))
        inflation = self._independent / max(self._independent - free, 1.0)
        self.noise_ = float(np.sqrt(inflation * np.mean(residual**2)))
        return self

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
        parts = self._variances("loss", lambda members: self._log_losses(members, N, D), self._further(6.0 * N * D))
        return parts | {"noise": np.full(len(N), self.noise_**2)}

    def optimal(self, flops: ArrayLike, level: float = 0.95) -> Optimum:
        """The best N and D under C = 6 N D and the loss there, with intervals; `flops` is a scalar or (targets,).

        N is the mean of the forms' own in log N, weighed by how little each one's moved while dearer runs came.
        """
        C = positive("flops", np.atleast_1d(floats(flops)))
        log_N, of_size = self.size(C)
        N, D = np.exp(log_N), C / 6.0 / np.exp(log_N)
        of_loss = [v for name, v in self.variances(N, D).items() if name != "noise"]
        normal = ndtri((np.arange(QUANTILES) + 0.5) / QUANTILES)
        wide, loss_wide = (np.sqrt(sum(v))[:, None] * normal for v in (list(of_size.values()), of_loss))
        loss = self.predict(N, D)
        draws = {
            "flops": np.broadcast_to(C[:, None], wide.shape),
            "N": N[:, None] * np.exp(wide),
            "D": D[:, None] * np.exp(-wide),
            "ratio": (D / N)[:, None] * np.exp(-2.0 * wide),
            "loss": loss[:, None] * np.exp(loss_wide),
        }
        return Optimum(flops=C, N=N, D=D, loss=loss, draws=draws, level=level)

    def size(self, flops: Array) -> tuple[Array, Columns]:
        """Log of the best N under C = 6 N D, (targets,), and what makes its interval: variances as of the loss."""
        middle = self._share["size"] @ self._log_sizes(self._fitted, flops)[..., 0]
        return middle, self._variances("size", lambda members: self._log_sizes(members, flops), self._further(flops))

    def size_exponent(self, level: float = 0.95) -> tuple[float, float, float]:
        """The exponent a of N* ~ C^a, its mean over the runs, and its interval.

        A drift of log N* per log C is one of the exponent.
        """
        C = np.array([self.data_["flops"].min(), self.data_["flops"].max()])

        def slopes(members: Members) -> Array:
            return np.diff(self._log_sizes(members, C), axis=1) / np.log(C[1] / C[0])

        a = float(self._share["size"] @ slopes(self._fitted)[:, 0, 0])
        wide = float(_half_width(level, list(self._variances("size", slopes, np.ones(1)).values()))[0])
        return a, a - wide, a + wide

    # How they come about.

    @property
    def _fitted(self) -> Members:
        return [{name: np.array([v]) for name, v in law.constants_.items()} for law in self.laws_.values()]

    @property
    def _drawn(self) -> Members:
        drawn = [law._bootstrapped() for law in self.laws_.values()]
        # A draw that did not converge is missing, and an earlier one stands for it.
        return [{name: np.resize(v, self.draws) for name, v in constants.items()} for constants in drawn]

    def _log_losses(self, members: Members, N: Array, D: Array) -> Array:
        """Every form's log loss, (forms, points, r)."""
        with np.errstate(all="ignore"):
            found = [
                np.log(law.evaluate(constants, N[:, None], D[:, None]))
                for law, constants in zip(self.laws_.values(), members, strict=True)
            ]
        return np.stack(found)

    def _log_sizes(self, members: Members, C: Array) -> Array:
        """Every form's own log N of lowest loss under C = 6 N D, (forms, targets, r)."""
        found, middle = [], 0.5 * np.log(C[:, None] / 6.0)
        for law, constants in zip(self.laws_.values(), members, strict=True):
            with np.errstate(all="ignore"):
                log_N = np.log(law.optimum(C[:, None], constants)[0])
            found.append(np.clip(np.where(np.isnan(log_N), middle, log_N), middle - REACH, middle + REACH))
        return np.stack(found)

    def _variances(self, name: str, quantity: Callable[[Members], Array], further: Array) -> Columns:
        """Of the mean of a quantity, members -> (forms, targets, r)."""
        prior, share = self.priors[name], self._share[name]
        each = quantity(self._fitted)[..., 0]
        apart = np.clip(each - share @ each, -APART, APART)
        drawn = np.tensordot(share, quantity(self._drawn), axes=1)
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
        top = np.array([self.data_["flops"].max()])
        moved = self._log_sizes(self._rolled, top) - self._log_sizes(self._fitted, top)
        far = np.log(top / np.array([cut.flops for cut in self.cut_offs_]))
        return np.clip(moved[:, 0], -APART, APART) / far

    def _further(self, flops: Array) -> Array:
        """Log of how far beyond the dearest run a compute of 6 N D lies, zero below it."""
        # In the table's own convention, which may count more than 6 N D.
        own = np.median(self.data_["flops"] / (6.0 * self.data_["N"] * self.data_["D"]))
        return np.maximum(np.log(flops * own / self.data_["flops"].max()), 0.0)

    def _errors(self, k: int, cut: CutOff) -> Array:
        """Log errors of every form at the runs that cut-off k tests, (forms, tested)."""
        N, D, loss = (self.data_[name][cut.tested] for name in ("N", "D", "loss"))
        there = [{name: v[k : k + 1] for name, v in constants.items()} for constants in self._rolled]
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


def _refits(law: LossLaw, cuts: list[CutOff]) -> Columns:
    """Constants of the law fitted to what each cut-off leaves, each (cuts,); all in one call of the batched solver."""
    if not cuts:
        return {name: np.zeros(0) for name in law.names}
    law.resample_starts = ROLLING_STARTS
    found = law._refit(np.array([cut.fitted for cut in cuts], dtype=np.float64))
    del law.resample_starts
    return law.problem_.constants(found.theta)


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
    if not 0.0 < level < 1.0:
        raise InputError(f"level is {level}; it must lie between 0 and 1, as 0.95 does.")
    return ndtri(0.5 + 0.5 * level) * np.sqrt(sum(variances))
