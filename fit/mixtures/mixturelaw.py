"""The loss of every domain by the mixture that a model is trained on, from several forms weighed by hold-outs.

Hold-outs are by compute where runs differ enough, else by mixture. Variances add up those of the forms' weighted mean
over resamples and over shares, of a drift beyond the largest compute, and of runs at a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import pandas as pd
from scipy.spatial.distance import cdist, pdist

from ..errors import SPREAD, Array, InputError, floats, one_of, positive
from ..files import read_constants
from ..forecasting.forecaster import CutOff, Prior, Weights, cut_offs, half_width
from ..laws.law import Estimator
from ..table import RunTable, load, numeric
from ..uncertainty import check_resampling, group_labels, numbered
from .answer import BestMixture, best_mixture
from .forms import PRIORS, Corrected, Data, Form, Points, Process, boosted_trees, fit_form

FORMS = ("effective", "product", "exponential", "overfitting", "trees")
FOLDS = 10  # hold-outs by mixture, and parts of the jackknife
SUM_ERROR = 0.01  # a row's weights may miss a sum of one by so much
LATER = 2.0  # power of D / the run's last D in a row's weight, because earlier checkpoints are not cooled down
OWN_ROWS = 4.0  # rows near a mixture whose scatter counts as much as that of all rows; chosen by hand

Named = Mapping[str, float] | None  # by domain or loss


class MixtureLaw(Estimator):
    """Losses by the weights of domains, and by N and D where these vary.

    forms: names among effective, product, exponential, overfitting (mixtures/forms.py) and trees; by default all that
    apply: product where N varies, overfitting where domains are repeated.
    After `fit`: domains_, losses_, weights_ and errors_ (DataFrames, form x loss: shares, and root mean square errors
    of log loss on hold-outs), hold_outs_ ("compute" or "mixture"), refused_ (form -> reason), noise_ (loss -> scatter
    of a run's log loss), held_ (losses, rows: errors of log loss by fits without the row's mixture), constants_ (form
    -> DataFrame by loss, for N and D over the table's geometric means).
    """

    inputs, output = (), "table"

    def __init__(self, forms: Sequence[str] | None = None, draws: int = 200, seed: int = 0) -> None:
        for form in forms or ():
            one_of("form", form, FORMS)
        check_resampling(draws, seed)
        self.forms, self.draws, self.seed = forms, draws, seed

    def __repr__(self) -> str:
        if not self.__sklearn_is_fitted__():
            return f"MixtureLaw({'' if self.forms is None else f'forms={self.forms!r}'})"
        shares = ", ".join(f"{form} {share:.0%}" for form, share in self.weights_.mean(axis=1).items())
        return f"MixtureLaw of {', '.join(self.losses_)}: {shares}; hold-outs by {self.hold_outs_}"

    def fit(self, table: Any) -> Self:
        """Fit to a DataFrame, RunTable, file or sweep directory.

        Columns: weight_<domain>, with a sum of one; loss_<name>, in nats per token (empty: unknown); optionally N, D,
        unique_<domain> (tokens; empty: no cap), and group or run_id, whose rows are resampled and held out together.
        """
        frame = table.frame.iloc[table.rows] if isinstance(table, RunTable) else load(table)[0]
        names = [str(name) for name in frame.columns if name != "loss_se"]
        self.domains_ = tuple(name[7:] for name in names if name.startswith("weight_"))
        self.losses_ = tuple(name[5:] for name in names if name.startswith("loss_"))
        if not (self.domains_ and self.losses_):
            raise InputError("the table needs columns weight_<domain> and loss_<name>, and lacks one or both.")
        self.data_ = data = self._weigh_rows(self._read(frame))
        fold = (np.random.default_rng(self.seed).permutation(data.mixture.max() + 1) % FOLDS)[data.mixture]
        folds = [CutOff(np.nan, fold != k, fold == k, np.ones((fold == k).sum())) for k in range(fold.max() + 1)]
        sizes = {"N": np.exp(data.points.size), "D": np.exp(data.points.tokens)}
        inputs = {name: column for name, column in sizes.items() if self.varies(name)}
        rolling = []  # hold-outs of the runs with more compute than those fitted
        if inputs:
            inputs |= dict(zip(self.domains_, data.points.weights.T, strict=True))
            rolling = cut_offs(inputs, np.exp(self._reach), data.group, len(self.domains_) + len(PRIORS), min_values=2)
        self.hold_outs_ = "compute" if rolling else "mixture"
        self._members, self.refused_ = dict[str, Corrected](), dict[str, str]()
        applies = {"product": self.varies("N"), "overfitting": data.points.repeats.any()}
        for name in self.forms or FORMS:
            form, correction = (name, Process) if name != "trees" else ("effective", boosted_trees)
            args = Form(form, data.points), correction, data, [*folds, *rolling], len(folds)
            try:
                if self.forms or applies.get(name, True):
                    self._members[name] = Corrected(*args)
            except ImportError:
                self.refused_[name] = "scikit-learn is missing; pip install 'isoflop[mixtures]' installs it."
        if not self._members:
            raise InputError(f"forms is {self.forms}: {self.refused_['trees']}")
        self._weigh(folds, rolling)
        return self

    def _read(self, frame: pd.DataFrame) -> Data:
        """Check the table and return its rows."""
        weights = _mixtures(frame, self.domains_)
        losses = np.stack([numeric(frame, f"loss_{name}") for name in self.losses_])
        finite = np.isfinite(losses)
        for name, row in zip(self.losses_, losses, strict=True):
            positive(f"loss_{name}", row[~np.isnan(row)])
        for name, column in zip(self.domains_, weights.T, strict=True):
            if np.ptp(column) < 1e-6:
                raise InputError(f"weight_{name} is {column[0]:.4g} in every row; vary it, or leave the column out.")
        mixture = np.unique(weights.round(6), axis=0, return_inverse=True)[1].ravel()
        count, required = mixture.max() + 1, len(self.domains_) + 2
        if count < required:
            raise InputError(f"the table has {count} mixtures of {required - 2} domains; it needs {required} or more.")
        sizes = {name: positive(name, numeric(frame, name)) for name in ("N", "D") if name in frame}
        self.sizes_ = {name: (float(values.min()), float(values.max())) for name, values in sizes.items()}
        self._middle = {name: float(np.exp(np.log(values).mean())) for name, values in sizes.items()}
        unique = np.stack([numeric(frame, f"unique_{name}") for name in self.domains_], axis=1)
        points = self.points(weights, sizes.get("N"), sizes.get("D"), unique)
        label = next((frame[name] for name in ("group", "run_id") if name in frame), None)
        group = numbered(group_labels(label, len(frame)), *weights.T, *sizes.values())
        last = np.full(group.max() + 1, -np.inf)
        np.maximum.at(last, group, points.tokens)
        later = np.exp(LATER * (points.tokens - last[group]))
        self._end, self._reach = later > 1.0 - 1e-9, points.size + last[group]
        mean = np.array([np.log(row[use]).mean() for row, use in zip(losses, finite, strict=True)])
        target = np.where(finite, np.log(np.where(finite, losses, 1.0)), mean[:, None])
        return Data(points, target, finite * later / later.mean(), mixture, group)

    def varies(self, name: str) -> bool:
        """Return whether "N" or "D" varies in the table."""
        low, high = self.sizes_.get(name, (1.0, 1.0))
        return high / low > SPREAD

    def points(self, weights: Array, N: Any, D: Any, unique: Array) -> Points:
        """Return points at mixtures (n, m), N and D (None: the table's) and unique tokens (n or 1, m; NaN: no cap)."""
        logs = {}
        for name, value in (("N", N), ("D", D)):
            low, high = self.sizes_.get(name, (np.nan, np.nan))
            if value is None and self.varies(name):
                raise InputError(f"{name} is missing; it is {low:.4g} to {high:.4g} in the table and must be given.")
            log = np.zeros(len(weights))
            if value is not None:
                log = log + np.log(positive(name, np.atleast_1d(floats(value))) / self._middle.get(name, np.nan))
            if not self.varies(name) and not (np.abs(log) < np.log(SPREAD)).all():
                state = f"is {low:.4g} in every row" if name in self.sizes_ else "is no column of the table"
                raise InputError(f"{name} {state}, so losses at other {name} are unknown; leave {name} out.")
            logs[name] = log * self.varies(name)
        if "D" not in self._middle and np.isfinite(unique).any():
            raise InputError("unique tokens are given, but D is no column of the table; add the tokens of each run.")
        epochs = weights * self._middle.get("D", np.nan) * np.exp(logs["D"])[:, None] / unique
        return Points(weights, logs["N"], logs["D"], np.log(np.fmax(epochs, 1.0)))

    def _weigh_rows(self, data: Data) -> Data:
        """Divide the rows' weights by the relative variance of runs near their mixture."""
        form, points = Form("effective", data.points), data.points
        theta, _, noise = fit_form(form, data)
        residual = (data.target - form.value(theta, points)[0]) / noise[:, None]
        place = np.column_stack([points.weights, points.size, points.tokens]).round(6)
        _, at, copies = np.unique(place, axis=0, return_inverse=True, return_counts=True)
        mean = np.stack([np.bincount(at.ravel(), row) / copies for row in residual])[:, at.ravel()]
        n = copies[at.ravel()]  # replicates show their noise without the form's error
        squares = (np.where(n > 1, (residual - mean) * np.sqrt(n / np.maximum(n - 1, 1)), residual) ** 2).mean(axis=0)
        roots, weight = np.sqrt(points.weights), data.weight.mean(axis=0)
        length = float(np.quantile(pdist(roots[:500]), 0.1)) or 1.0
        self._scatter = roots, weight, weight * squares * weight.sum() / (weight @ squares), length
        return Data(points, data.target, data.weight / self._factor(points.weights), data.mixture, data.group)

    def _factor(self, weights: Array) -> Array:
        """Return the variance of runs at mixtures (n, m) relative to the mean, shrunk towards one."""
        roots, weight, squares, length = self._scatter
        near = np.exp(-0.5 * (cdist(np.sqrt(weights), roots) / length) ** 2)
        return np.asarray((OWN_ROWS + near @ squares) / (OWN_ROWS + near @ weight))

    def _weigh(self, folds: list[CutOff], rolling: list[CutOff]) -> None:
        """Learn the forms' shares and the rate of their error from hold-outs, and the scatter of runs."""
        data, prior, members = self.data_, Prior(**read_constants("forecast")["mixture"]), self._members
        usable, cuts = (data.weight > 0) & self._end, [*folds, *rolling]
        held = [np.stack([member.held[j] for member in members.values()]) for j in range(len(cuts))]
        errors = [h - data.target[:, cut.tested] for h, cut in zip(held, cuts, strict=True)]
        tests = [*zip(errors, cuts, strict=True)][len(folds) if rolling else 0 :]
        self._weights, squares = [], []
        for k, use in enumerate(usable):
            moves = [(e[:, k] / cut.further)[:, use[cut.tested]] for e, cut in tests if use[cut.tested].any()]
            self._weights.append(Weights.learn(moves, len(members), prior))
            squares.append(np.mean([(move**2).mean(axis=1) for move in moves], axis=0))
        share = np.stack([weights.share for weights in self._weights])
        names: Any = {"index": [*members], "columns": [*self.losses_]}
        self.weights_, self.errors_ = pd.DataFrame(share.T, **names), pd.DataFrame(np.sqrt(squares).T, **names)
        # Shares are drawn from Dirichlet's distribution, so wide that the prior's part of the forms' variance remains.
        shape = np.maximum(share * (1.0 / prior.disagreement - 1.0), 1e-3)[:, None]
        generator, K = np.random.default_rng(self.seed), len(folds)
        gamma = generator.standard_gamma(shape, (len(share), self.draws, len(members)))
        self._shares = gamma / gamma.sum(axis=2, keepdims=True)
        # The jackknife's variance, with that of Student's t for so few parts.
        self._resampled = generator.standard_normal((K, self.draws)) * (K - 1) / np.sqrt(K * max(K - 3, 1))
        self.held_ = np.zeros(data.target.shape)
        for error, cut in zip(errors, folds, strict=False):
            self.held_[:, cut.tested] = np.einsum("kf,fkt->kt", share, error)
        self.held_ *= data.weight > 0
        even = usable * self.held_ / np.sqrt(self._factor(data.points.weights))
        self._covariance = even @ even.T / np.maximum(1.0 * usable @ usable.T, 1.0)
        self.noise_ = dict(zip(self.losses_, np.sqrt(np.diag(self._covariance)).tolist(), strict=True))
        self.constants_: Any = {}
        for name, member in members.items():
            columns = [*(f"g_{domain}" for domain in self.domains_), *member.form.priors]
            frame = pd.DataFrame(np.exp(member.theta), self.losses_, columns)
            self.constants_[name] = frame.drop(columns=[*member.form.lacks])

    def predict(
        self, weights: Any, N: Any = None, D: Any = None, unique: Named = None, level: float = 0.95,
        target: Named = None, kind: str = "run",
    ) -> pd.DataFrame:  # fmt: skip
        """Return loss_<name>, loss_<name>_low and loss_<name>_high, and the same of a target, one row per point.

        weights: {domain: weight}, a DataFrame with weight_<domain>, or an array (points, domains). N, D: numbers or
        (points,), where they vary in the table. unique: {domain: unique tokens}. target: {loss: weight}, scaled to a
        sum of one. kind: "run" for intervals of a new run, "mean" for the mean of such runs.
        """
        self._fitted()
        one_of("kind", kind, ("run", "mean"))
        caps = _named("unique", unique, self.domains_, np.nan)[None]
        points = self.points(_mixtures(weights, self.domains_), N, D, caps)
        rows, names = np.eye(len(self.losses_)), [f"loss_{name}" for name in self.losses_]
        if target is not None:
            rows, names = np.vstack([rows, self._target(target)]), [*names, "target"]
        value, variance = self.moments(points, rows, kind == "run")
        wide = np.exp(half_width(level, [variance]) / value)
        ends = {"": value, "_low": value / wide, "_high": value * wide}
        return pd.DataFrame({name + end: v[i] for i, name in enumerate(names) for end, v in ends.items()})

    def moments(self, points: Points, rows: Array, run: bool) -> tuple[Array, Array]:
        """Return sums of losses with weights `rows` (sums, losses) at points, and their variances: (sums, points)."""
        log, draws = self.surfaces(points)
        loss, rate = np.exp(log), np.array([weights.prior.drift * weights.rate for weights in self._weights])
        variance = np.stack([np.var(np.tensordot(row, np.exp(draws), axes=1), axis=1) for row in rows])
        further = np.maximum(points.size + points.tokens - self._reach.max(), 0.0)
        variance += (rows @ (loss * rate[:, None]) * further) ** 2
        parts = rows[:, :, None] * loss * np.sqrt(run * self._factor(points.weights))
        variance += np.einsum("skp,kl,slp->sp", parts, self._covariance, parts, optimize=True)
        return rows @ loss, variance

    def surfaces(self, points: Points, draws: bool = True) -> tuple[Array, Array]:
        """Return log losses (losses, points) and, with `draws`, their draws (losses, points, draws)."""
        logs, folds = zip(*(member.predict(points, draws) for member in self._members.values()), strict=True)
        log = np.einsum("fk,fkp->kp", self.weights_.to_numpy(), np.stack(logs))
        if not draws:
            return log, log
        away = np.stack(folds) - np.mean(folds, axis=3, keepdims=True)
        return log, np.einsum("kdf,fkpd->kpd", self._shares, np.stack(logs)[..., None] + away @ self._resampled)

    def best(
        self, target: Named = None, N: float | None = None, D: float | None = None, flops: float | None = None,
        base: Named = None, max_epochs: float | None = None, unique: Named = None,
        bounds: Mapping[str, tuple[float, float]] | None = None, level: float = 0.95,
    ) -> BestMixture:  # fmt: skip
        """Return the mixture of lowest target loss, and whether it beats `base` beyond doubt.

        target: {loss: weight}, scaled to a sum of one; by default all alike. N, D: of the planned run, by default the
        largest of the table; flops = 6 N D gives what is missing, or both in the ratio of the largest. base: {domain:
        weight}; by default the mixture with most runs, or the mean of all if no mixture has more. max_epochs: most
        passes over a domain's `unique` tokens. bounds: {domain: (low, high)}, by default the range of the table.
        """
        self._fitted()
        largest = {name: high for name, (_, high) in self.sizes_.items()}
        if flops is not None:
            positive("flops", [flops])
            if len(largest) < 2 or (N and D):
                raise InputError(f"flops is {flops:g}; it needs N and D in the table, and one of them at most here.")
            N = N or (flops / 6.0 / D if D else float(np.sqrt(flops / 6.0 * largest["N"] / largest["D"])))
            D = flops / 6.0 / N
        sizes = N or largest.get("N"), D or largest.get("D")
        start = None if base is None else _mixtures(base, self.domains_)[0]
        caps = _named("unique", unique, self.domains_, np.nan)[None]
        row = self._target(dict.fromkeys(self.losses_, 1.0) if target is None else target)
        return best_mixture(self, row, sizes, start, caps, max_epochs, bounds or {}, level)

    def _target(self, target: Named) -> Array:
        row = _named("target", target, self.losses_, 0.0)
        if not row.any():
            raise InputError(f"target is {target}; at least one weight must be above zero.")
        return row / row.sum()


def _named(what: str, values: Named, names: Sequence[str], default: float) -> Array:
    """Return values in the order of `names`. Raises InputError for other names and negative numbers."""
    accepted = "above zero" if what == "unique" else "of zero or more"
    for name, value in (values or {}).items():
        if name not in names or not 0.0 <= value < np.inf or (what == "unique" and not value):
            raise InputError(f"{what} has {value} for {name}; give numbers {accepted} for {', '.join(names)}.")
    return floats([(values or {}).get(name, default) for name in names])


def _mixtures(weights: Any, domains: Sequence[str]) -> Array:
    """Return weights as an array (n, m) whose rows sum to exactly one; see `MixtureLaw.predict`."""
    if isinstance(weights, Mapping):
        weights = _named("weights", weights, domains, 0.0)
    elif hasattr(weights, "columns"):
        weights = np.stack([numeric(weights, f"weight_{name}") for name in domains], axis=1)
    mixtures = np.atleast_2d(floats(weights))
    if mixtures.shape[1] != len(domains):
        raise InputError(f"weights has {mixtures.shape[1]} columns; it needs one for each of {', '.join(domains)}.")
    total = mixtures.sum(axis=1)
    bad = np.flatnonzero(~((mixtures >= 0).all(axis=1) & (np.abs(total - 1.0) <= SUM_ERROR)))
    if len(bad):
        state = f"row {bad[0]} are {mixtures[bad[0]].round(4).tolist()}, with a sum of {total[bad[0]]:.4g}"
        raise InputError(f"the weights of {state}; they must be zero or more and sum to one.")
    return np.asarray(mixtures / total[:, None])
