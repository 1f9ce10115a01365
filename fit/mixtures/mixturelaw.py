"""The loss of every domain by the mixture that a model is trained on, from several forms weighed by hold-outs.

Hold-outs are by compute where runs differ enough, else by mixture. A loss's variance adds up that of the forms' weighted
mean over resamples and over their shares, a drift beyond the largest compute, and the scatter of runs at a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from scipy.spatial.distance import cdist, pdist

from ..errors import SPREAD, Array, InputError, floats, one_of, positive
from ..files import read_constants
from ..forecasting.forecaster import CutOff, Prior, Weights, cut_offs, half_width
from ..laws.law import Estimator
from ..table import RunTable, load, numeric
from ..uncertainty import check_resampling, group_labels, numbered
from .answer import BestMixture, best_mixture
from .forms import PRIORS, Corrected, Data, Form, Points, Process, boosted_trees, fit_form

if TYPE_CHECKING:
    import pandas as pd

FORMS = ("effective", "product", "exponential", "trees")
FOLDS = 5  # hold-outs by mixture
SUM_ERROR = 0.01  # a row's weights may miss a sum of one by so much
LATER = 2.0  # power of D / the run's last D in a row's weight, because earlier checkpoints are not cooled down
OWN_ROWS = 4.0  # rows near a mixture whose scatter counts as much as that of all rows; chosen by hand


class MixtureLaw(Estimator):
    """Losses by the weights of domains, and by N and D where these vary.

    After `fit`: domains_ (of weights), losses_ (of losses), weights_ and errors_ (DataFrames, form x loss: shares, and
    root mean square errors of log loss on hold-outs), refused_ (form -> reason), hold_outs_ ("compute" or "mixture"),
    noise_ (loss -> scatter of a run's log loss), held_ (losses, rows: errors of log loss without the row's mixture),
    constants_ (form -> DataFrame by loss, for N and D over the table's geometric means).

    Parameters
    ----------
    forms
        Names among effective, product, exponential (see mixtures/forms.py) and trees; by default all.
    draws
        Resamples for intervals.
    """

    inputs, output = (), "table"

    def __init__(self, forms: Sequence[str] | None = None, draws: int = 200, seed: int = 0) -> None:
        for form in forms or ():
            one_of("form", form, FORMS)
        check_resampling(draws, seed)
        self.forms, self.draws, self.seed = forms, draws, seed

    def __repr__(self) -> str:
        if not hasattr(self, "constants_"):
            return f"MixtureLaw({'' if self.forms is None else f'forms={self.forms!r}'})"
        shares = ", ".join(f"{form} {share:.0%}" for form, share in self.weights_.mean(axis=1).items())
        sizes = f"{len(self.losses_)} losses by the weights of {len(self.domains_)} domains"
        return f"MixtureLaw of {sizes}: {shares}; hold-outs by {self.hold_outs_}"

    def fit(self, table: Any) -> Self:
        """Fit to a DataFrame, RunTable, file or sweep directory.

        Columns: weight_<domain>, with a sum of one; loss_<name>, in nats per token (empty: unknown); optionally N, D,
        unique_<domain> (tokens; empty: no cap), and group or run_id, whose rows are resampled and held out together.
        """
        frame = table.frame.iloc[table.rows] if isinstance(table, RunTable) else load(table)[0]
        names = [str(name) for name in frame.columns if name != "loss_se"]
        prefixes = {"weight_": "domains_", "loss_": "losses_"}
        for prefix, field in prefixes.items():
            setattr(self, field, tuple(name[len(prefix) :] for name in names if name.startswith(prefix)))
            if not getattr(self, field):
                raise InputError(f"the table has no column {prefix}<domain>; one for each domain is needed.")
        data = self._read(frame)
        cuts = [*_folds(data, self.seed), *self._rolling(data)]
        folds = sum(np.isnan(cut.reach) for cut in cuts)
        self.hold_outs_ = "compute" if folds < len(cuts) else "mixture"
        self.data_ = data = self._weigh_rows(data)
        signs = np.random.default_rng(self.seed).choice([-1.0, 1.0], size=(self.draws, int(data.group.max()) + 1))
        self._members = self._fit_forms(data, cuts, signs[:, data.group], folds)
        self._weigh(cuts, folds)
        return self

    def _read(self, frame: pd.DataFrame) -> Data:
        """Check the table and return its rows."""
        weights = _mixtures(frame, self.domains_)
        losses = np.stack([numeric(frame, f"loss_{name}") for name in self.losses_])
        for name, row in zip(self.losses_, losses, strict=True):
            positive(f"loss_{name}", row[~np.isnan(row)])
        for name, column in zip(self.domains_, weights.T, strict=True):
            if np.ptp(column) < 1e-6:
                raise InputError(
                    f"weight_{name} is {column[0]:.4g} in every row; it must vary, or the column be left out."
                )
        mixture = np.unique(np.round(weights, 6), axis=0, return_inverse=True)[1].ravel()
        if mixture.max() + 1 < len(self.domains_) + 2:
            count = f"the table has {mixture.max() + 1} different mixtures of {len(self.domains_)} domains"
            raise InputError(f"{count}; at least {len(self.domains_) + 2} are needed.")
        sizes = {name: positive(name, numeric(frame, name)) for name in ("N", "D") if name in frame}
        self.sizes_ = {name: (float(values.min()), float(values.max())) for name, values in sizes.items()}
        self._middle = {name: float(np.exp(np.log(values).mean())) for name, values in sizes.items()}
        unique = np.stack([numeric(frame, f"unique_{name}") for name in self.domains_], axis=1)
        points = self.points(weights, sizes.get("N"), sizes.get("D"), unique)
        named = next((frame[name] for name in ("group", "run_id") if name in frame), None)
        group = numbered(group_labels(named, len(frame)), *weights.T, *sizes.values())
        tokens = np.exp(points.tokens)
        self._end = tokens >= _last(tokens, group) * (1.0 - 1e-9)
        self._reach = points.size + _last(points.tokens, group)
        known, later = np.isfinite(losses), (tokens / _last(tokens, group)) ** LATER
        mean = np.array([np.log(row[use]).mean() for row, use in zip(losses, known, strict=True)])
        target = np.where(known, np.log(np.where(known, losses, 1.0)), mean[:, None])
        return Data(points, target, known * later / later.mean(), mixture, group)

    def varies(self, name: str) -> bool:
        """Return whether "N" or "D" varies in the table."""
        low, high = self.sizes_.get(name, (1.0, 1.0))
        return high / low > SPREAD

    def points(self, weights: Array, N: Any, D: Any, unique: Array) -> Points:
        """Return points at mixtures (n, m), N, D (None: the table's) and unique tokens, (n or 1, m), NaN without a cap."""
        logs = {}
        for name, value in (("N", N), ("D", D)):
            low, high = self.sizes_.get(name, (np.nan, np.nan))
            if value is None and self.varies(name):
                raise InputError(f"{name} is missing; it is {low:.4g} to {high:.4g} in the table and must be given.")
            column = np.zeros(len(weights))
            if value is not None:
                column = column + np.log(positive(name, np.atleast_1d(floats(value))) / self._middle.get(name, np.nan))
            if not self.varies(name) and not (np.abs(column) < np.log(SPREAD)).all():
                state = f"is {low:.4g} in every row" if name in self.sizes_ else "is no column of the table"
                raise InputError(f"{name} {state}, so losses at other {name} are unknown; leave {name} out.")
            logs[name] = column if self.varies(name) else np.zeros(len(weights))
        if "D" not in self._middle and np.isfinite(unique).any():
            raise InputError("unique tokens are given, but D is no column of the table; add the tokens of each run.")
        epochs = weights * self._middle.get("D", np.nan) * np.exp(logs["D"])[:, None] / unique
        return Points(weights, logs["N"], logs["D"], np.log(np.fmax(epochs, 1.0)))

    def _rolling(self, data: Data) -> list[CutOff]:
        """Return hold-outs of the runs with more compute than those fitted."""
        sizes = {"N": np.exp(data.points.size), "D": np.exp(data.points.tokens)}
        columns = {name: column for name, column in sizes.items() if self.varies(name)}
        if not columns:
            return []
        columns |= dict(zip(self.domains_, data.points.weights.T, strict=True))
        return cut_offs(columns, np.exp(self._reach), data.group, len(self.domains_) + len(PRIORS), min_values=2)

    def _weigh_rows(self, data: Data) -> Data:
        """Divide the rows' weights by the relative variance of runs near their mixture."""
        first, form = data.points, Form("effective", data.points)
        theta, _, noise, *_ = fit_form(form, data)
        residual = (data.target - form.value(theta, first)[0]) / noise[:, None]
        place = np.column_stack([first.weights, first.size, first.tokens]).round(6)
        _, place, copies = np.unique(place, axis=0, return_inverse=True, return_counts=True)
        place = place.ravel()
        mean = np.stack([np.bincount(place, row) / copies for row in residual])[:, place]
        alone = (copies == 1)[place]  # replicates show their noise without the form's error
        scale = np.sqrt(copies / np.maximum(copies - 1, 1))[place]
        squares = (np.where(alone, residual, (residual - mean) * scale) ** 2).mean(axis=0)
        roots, weight = np.sqrt(first.weights), data.weight.mean(axis=0)
        length = float(np.quantile(pdist(roots[:500]), 0.1)) or 1.0
        self._scatter = roots, weight, weight * squares * weight.sum() / (weight @ squares), length
        return Data(first, data.target, data.weight / self._factor(first.weights), data.mixture, data.group)

    def _factor(self, weights: Array) -> Array:
        """Return the variance of runs at mixtures (n, m) relative to the mean, shrunk towards one."""
        roots, weight, squares, length = self._scatter
        near = np.exp(-0.5 * (cdist(np.sqrt(weights), roots) / length) ** 2)
        return np.asarray((OWN_ROWS + near @ squares) / (OWN_ROWS + near @ weight))

    def _fit_forms(self, data: Data, cuts: list[CutOff], signs: Array, folds: int) -> dict[str, Corrected]:
        forms, members = FORMS if self.forms is None else self.forms, dict[str, Corrected]()
        self.refused_ = dict[str, str]()
        for name in forms:
            form = Form("effective" if name == "trees" else name, data.points)
            correction = boosted_trees if name == "trees" else Process
            if name == "product" and not self.varies("N") and len(forms) > 1:
                self.refused_[name] = "N does not vary, and then product is the same as effective."
                continue
            try:
                members[name] = Corrected(form, correction, data, cuts, signs, folds)
            except ImportError:
                self.refused_[name] = "scikit-learn is missing; pip install 'isoflop[mixtures]' installs it."
        if not members:
            raise InputError(f"forms is {list(forms)}, and none can be fitted: {next(iter(self.refused_.values()))}")
        return members

    def _weigh(self, cuts: list[CutOff], folds: int) -> None:
        """Learn the forms' shares and the rate of their error from hold-outs, and the scatter of runs."""
        import pandas as pd

        data, prior = self.data_, Prior(**read_constants("forecast")["mixture"])
        known = (data.weight > 0) & self._end
        errors = [
            np.stack([member.held[j] for member in self._members.values()]) - data.target[:, cut.tested]
            for j, cut in enumerate(cuts)
        ]
        self._weights, squares = [], []
        for k in range(len(known)):
            tests = [*zip(errors, cuts, strict=True)][folds if folds < len(cuts) else 0 :]
            moves = [(e[:, k] / cut.further)[:, known[k, cut.tested]] for e, cut in tests]
            moves = [move for move in moves if move.size]
            self._weights.append(Weights.learn(moves, len(self._members), prior))
            squares.append(np.mean([(move**2).mean(axis=1) for move in moves], axis=0))
        share = np.stack([weights.share for weights in self._weights])
        names = {"index": [*self._members], "columns": [*self.losses_]}
        self.weights_, self.errors_ = pd.DataFrame(share.T, **names), pd.DataFrame(np.sqrt(squares).T, **names)
        # Dirichlet's distribution with this concentration keeps the prior's part of the variance between forms.
        concentration = np.maximum(share * (1.0 / prior.disagreement - 1.0), 1e-3)
        gamma = np.random.default_rng(self.seed).standard_gamma(
            concentration[:, None], (len(share), self.draws, share.shape[1])
        )
        self._shares = gamma / gamma.sum(axis=2, keepdims=True)
        self.held_ = np.zeros(data.target.shape)
        for error, cut in zip(errors[:folds], cuts, strict=False):
            self.held_[:, cut.tested] = np.einsum("kf,fkt->kt", share, error)
        self.held_ *= data.weight > 0
        even = known * self.held_ / np.sqrt(self._factor(data.points.weights))
        self._covariance = even @ even.T / np.maximum(1.0 * known @ known.T, 1.0)
        self.noise_ = dict(zip(self.losses_, np.sqrt(np.diag(self._covariance)).tolist(), strict=True))
        columns = [*(f"g_{name}" for name in self.domains_), *PRIORS]
        self.constants_: Any = {}
        for name, member in self._members.items():
            theta, logs = member.theta.copy(), slice(len(self.domains_) if name == "exponential" else 0, None)
            theta[:, logs] = np.exp(theta[:, logs])
            self.constants_[name] = pd.DataFrame(theta, [*self.losses_], columns).drop(columns=[*member.form.lacks])

    def predict(
        self, weights: Any, N: Any = None, D: Any = None, unique: Mapping[str, float] | None = None,
        level: float = 0.95, target: Mapping[str, float] | None = None, kind: str = "run",
    ) -> pd.DataFrame:  # fmt: skip
        """Return loss_<name>, loss_<name>_low and loss_<name>_high, and the same of the target, one row per point.

        Parameters
        ----------
        weights
            {domain: weight}, a list of these, a DataFrame with weight_<domain>, or an array (points, domains).
        N, D
            Numbers or (points,), where they vary in the table.
        unique
            {domain: unique tokens}; other domains are not repeated.
        target
            {loss: weight}, scaled to a sum of one.
        kind : {"run", "mean"}
            Interval of a new run's loss, or of the mean of such runs.
        """
        import pandas as pd

        self._fitted()
        one_of("kind", kind, ("run", "mean"))
        points = self.points(_mixtures(weights, self.domains_), N, D, self.caps(unique))
        rows, names = np.eye(len(self.losses_)), [f"loss_{name}" for name in self.losses_]
        if target is not None:
            rows, names = np.vstack([rows, self.target(target)]), [*names, "target"]
        value, variance = self.moments(points, rows, kind == "run")
        wide, columns = half_width(level, [variance]) / value, {}
        for name, v, w in zip(names, value, wide, strict=True):
            columns |= {name: v, f"{name}_low": v * np.exp(-w), f"{name}_high": v * np.exp(w)}
        return pd.DataFrame(columns)

    def moments(self, points: Points, rows: Array, run: bool) -> tuple[Array, Array]:
        """Return sums of losses with weights `rows` (sums, losses) at points, and their variances: (sums, points)."""
        log, draws = self.surfaces(points)
        loss, rate = np.exp(log), np.array([weights.prior.drift * weights.rate for weights in self._weights])
        variance = np.stack([np.var(np.tensordot(row, np.exp(draws), axes=1), axis=1) for row in rows])
        further = np.maximum(points.size + points.tokens - self._reach.max(), 0.0)
        variance += (rows @ (loss * rate[:, None]) * further) ** 2
        if run:
            parts = rows[:, :, None] * loss
            scatter = np.einsum("skp,kl,slp->sp", parts, self._covariance, parts, optimize=True)
            variance += scatter * self._factor(points.weights)
        return rows @ loss, variance

    def surfaces(self, points: Points, draws: bool = True) -> tuple[Array, Array]:
        """Return log losses (losses, points) and, with `draws`, their draws (losses, points, draws)."""
        log, drawn = np.zeros(()), np.zeros(())
        for f, member in enumerate(self._members.values()):
            value, moved = member.predict(points, draws)
            log = log + self.weights_.to_numpy()[f][:, None] * value
            drawn = drawn + self._shares[:, None, :, f] * moved if draws else drawn
        return log, drawn

    def best(
        self, target: Mapping[str, float] | None = None, N: float | None = None, D: float | None = None,
        flops: float | None = None, base: Mapping[str, float] | None = None, max_epochs: float | None = None,
        unique: Mapping[str, float] | None = None, bounds: Mapping[str, tuple[float, float]] | None = None,
        level: float = 0.95,
    ) -> BestMixture:  # fmt: skip
        """Return the mixture of lowest target loss, and whether it beats `base` beyond doubt.

        Parameters
        ----------
        target
            {loss: weight}, scaled to a sum of one; by default all alike.
        N, D, flops
            Of the planned run, by default the largest of the table; `flops` = 6 N D gives what is missing.
        base
            {domain: weight} to beat; by default the mixture with most runs, or the mean of all if none has more.
        max_epochs, unique
            Most passes over a domain's `unique` tokens.
        bounds
            {domain: (low, high)}; by default the range of the table.
        """
        self._fitted()
        start = None if base is None else _mixtures(base, self.domains_)[0]
        return best_mixture(self, self.target(target), N, D, flops, start, max_epochs, self.caps(unique), bounds, level)

    def target(self, target: Mapping[str, float] | None) -> Array:
        """Return the weights of losses (losses,), which sum to one."""
        row = named("target", dict.fromkeys(self.losses_, 1.0) if target is None else target, self.losses_, 0.0)
        if not ((row >= 0).all() and 0 < row.sum() < np.inf):
            raise InputError(f"target is {target}; its weights must be zero or more, and one of them above zero.")
        return row / row.sum()

    def caps(self, unique: Mapping[str, float] | None) -> Array:
        """Return unique tokens (1, domains), NaN without a cap."""
        if unique:
            positive("unique", [*unique.values()])
        return named("unique", unique or {}, self.domains_, np.nan)[None]


def named(what: str, values: Mapping[str, Any], names: Sequence[str], default: Any) -> Array:
    """Return values in the order of `names`. Raises InputError for others."""
    unknown = [name for name in values if name not in names]
    if unknown:
        raise InputError(f"{what} has {unknown[0]!r}; choose among {', '.join(names)}.")
    return floats([values.get(name, default) for name in names])


def _mixtures(weights: Any, domains: Sequence[str]) -> Array:
    """Return weights as an array (n, m) whose rows sum to exactly one; see `MixtureLaw.predict`."""
    if hasattr(weights, "columns"):
        weights = weights.reindex(columns=[f"weight_{name}" for name in domains])
        mixtures = np.stack([numeric(weights, name) for name in weights], axis=1)
    else:
        rows = [weights] if isinstance(weights, Mapping) else weights
        rows = [named("weights", row, domains, 0.0) if isinstance(row, Mapping) else row for row in rows]
        mixtures = np.atleast_2d(floats(rows))
    if mixtures.shape[1] != len(domains):
        raise InputError(f"weights has {mixtures.shape[1]} columns; it needs one for each of {', '.join(domains)}.")
    total = mixtures.sum(axis=1)
    bad = ~((mixtures >= 0).all(axis=1) & (np.abs(total - 1.0) <= SUM_ERROR))
    if bad.any():
        row = mixtures[np.argmax(bad)]
        state = f"sum to {row.sum():.4g}" if (row >= 0).all() else f"include {row[~(row >= 0)][0]:.4g}"
        raise InputError(f"the weights of row {np.argmax(bad)} {state}; they must be zero or more and sum to one.")
    return np.asarray(mixtures / total[:, None])


def _last(tokens: Array, group: np.ndarray) -> Array:
    """Return the largest value of each row's group."""
    last = np.full(group.max() + 1, -np.inf)
    np.maximum.at(last, group, tokens)
    return last[group]


def _folds(data: Data, seed: int) -> list[CutOff]:
    """Return FOLDS hold-outs of whole mixtures."""
    fold = (np.random.default_rng(seed).permutation(data.mixture.max() + 1) % FOLDS)[data.mixture]
    tests = [fold == k for k in range(fold.max() + 1)]
    return [CutOff(np.nan, ~tested, tested, np.ones(int(tested.sum()))) for tested in tests]
