"""The loss of every domain as a function of the mixture that a model is trained on, and the best mixture.

Several forms are fitted to each loss and weighed by hold-outs, as forecasts are (forecasting/forecaster.py): by compute
where sizes or tokens vary enough, else by mixture. Intervals add up the variance of the weighted mean over resamples of
whole runs and over the forms' shares, a drift beyond the largest compute, and the scatter of a run, which depends on
the mixture.
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
from .forms import Boosted, Corrected, Data, Member, Points

if TYPE_CHECKING:
    import pandas as pd

FORMS = ("effective", "product", "exponential", "process", "trees")
FOLDS = 5  # hold-outs by mixture
SUM_ERROR = 0.01  # weights may miss a sum of one by so much, such as by rounding
LATER = 2.0  # power of D / the run's last D in a row's weight: before the end, a run is not cooled down
FEW_ROWS = 4.0  # rows at which a mixture's own scatter counts as much as that of all
MOST_MIXTURES = 2000  # of the process, whose time grows with the cube


class MixtureLaw(Estimator):
    """Losses by the weights of domains, and by N and D where these vary.

    After `fit`: domains_ (of weights), losses_ (domains of losses), members_ (form -> fit), weights_ and errors_
    (DataFrames, form x loss: the form's share, and its root mean square error of log loss over hold-outs), refused_
    (form -> reason), hold_outs_ ("compute" or "mixture"), noise_ (loss -> scatter of a run's log loss).

    Parameters
    ----------
    forms
        Names among effective, product, exponential, process and trees; default: all. See mixtures/forms.py.
    draws
        Resamples for intervals.
    """

    inputs, output = ("table",), "losses"

    def __init__(self, forms: Sequence[str] | None = None, draws: int = 200, seed: int = 0) -> None:
        for form in FORMS if forms is None else forms:
            one_of("form", form, FORMS)
        if forms is not None and len(forms) == 0:
            raise InputError(f"forms is empty; name at least one of {', '.join(FORMS)}.")
        check_resampling(draws, seed)
        self.forms, self.draws, self.seed = forms, draws, seed

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "members_")

    def _fitted(self) -> None:
        if not hasattr(self, "members_"):
            raise InputError("this MixtureLaw is not fitted; call fit(table) first.")

    def __repr__(self) -> str:
        if not hasattr(self, "members_"):
            return f"MixtureLaw({'' if self.forms is None else f'forms={self.forms!r}'})"
        shares = ", ".join(f"{form} {share:.0%}" for form, share in self.weights_.mean(axis=1).items())
        return (
            f"MixtureLaw of {len(self.losses_)} losses by {len(self.domains_)} domains: {shares}; hold-outs by "
            f"{self.hold_outs_}"
        )

    # Fitting.

    def fit(self, table: Any) -> Self:
        """Fit to a DataFrame, RunTable, file or sweep directory.

        Columns weight_<domain>, which sum to one, and loss_<domain> (nats per token; empty: unknown); optionally N, D,
        unique_<domain> (tokens of the domain; empty: no cap) and group or run_id, whose rows are resampled and held out
        together. Raises InputError if one is missing or wrong.
        """
        frame = _frame(table)
        self.domains_, self.losses_ = _names(frame, "weight_"), _names(frame, "loss_")
        data, labels = self._read(frame)
        self.refused_: dict[str, str] = {}
        folds = _folds(data, self.seed)
        rolling = self._rolling(data, labels)
        cuts = [*folds, *rolling]
        self.hold_outs_ = "compute" if rolling else "mixture"
        generator = np.random.default_rng(self.seed)
        groups = generator.choice([-1.0, 1.0], size=(self.draws, int(data.group.max()) + 1))
        data = self._with_noise(data, Member("effective", data, [], groups[:1, data.group], self.seed))
        self.data_ = data
        self.members_ = self._members(data, cuts, groups[:, data.group], len(folds))
        self._weigh(cuts, len(folds))
        one = Points(
            np.ones((len(group_of := data.group), 1)),
            data.points.size,
            data.points.tokens,
            np.zeros((len(group_of), 1)),
        )
        blind = Member(
            "effective", Data(one, data.target, data.weight, data.mixture, data.group), folds, groups[:1, data.group], 0
        )
        self._ignorant = np.zeros(data.target.shape)
        for held, cut in zip(blind.held, folds, strict=True):
            self._ignorant[:, cut.tested] = np.where(
                data.weight[:, cut.tested] > 0, held - data.target[:, cut.tested], 0.0
            )
        return self

    def _read(self, frame: pd.DataFrame) -> tuple[Data, np.ndarray]:
        """Check the table and return its rows as the solver needs them, and each row's group label."""
        weights = _weights(frame, self.domains_)
        losses = np.stack([numeric(frame, f"loss_{name}") for name in self.losses_])
        for name, row in zip(self.losses_, losses, strict=True):
            positive(f"loss_{name}", row[~np.isnan(row)])
        for name, column in zip(self.domains_, weights.T, strict=True):
            if np.ptp(column) < 1e-6:
                raise InputError(
                    f"weight_{name} is {column[0]:g} in every row, so its effect is unknown; vary it, or leave the "
                    "column out and scale the others to a sum of one."
                )
        _, mixture = np.unique(np.round(weights, 6), axis=0, return_inverse=True)
        count, least = int(mixture.max()) + 1, len(self.domains_) + 2
        if count < least:
            raise InputError(
                f"the table has {count} different mixtures of {len(self.domains_)} domains; at least {least} are needed."
            )
        sizes = {name: positive(name, numeric(frame, name)) for name in ("N", "D") if name in frame}
        self.sizes_ = {name: (float(values.min()), float(values.max())) for name, values in sizes.items()}
        self.middle_ = {name: float(np.exp(np.log(values).mean())) for name, values in sizes.items()}
        unique = np.stack([numeric(frame, f"unique_{name}") for name in self.domains_], axis=1)
        if "D" not in frame and not np.isnan(unique).all():
            raise InputError("the table has unique_<domain>, but no column D; add the tokens of every run.")
        columns = {name: sizes.get(name) for name in ("N", "D")}
        points = self.points(weights, columns["N"], columns["D"], np.where(np.isnan(unique), np.inf, unique))
        named = next((frame[name] for name in ("group", "run_id") if name in frame), None)
        labels = group_labels(named, len(frame))
        group = numbered(labels, *weights.T, *sizes.values())
        later = np.ones(len(frame))
        if "D" in sizes:
            last = np.zeros(group.max() + 1)
            np.maximum.at(last, group, sizes["D"])
            later = (sizes["D"] / last[group]) ** LATER
        known = np.isfinite(losses)
        target = np.where(known, np.log(np.where(known, losses, 1.0)), 0.0)
        target += np.where(known, 0.0, (target.sum(axis=1) / known.sum(axis=1))[:, None])
        self.reach_ = 6.0 * sizes.get("N", np.ones(1)) * sizes.get("D", np.ones(1)) * np.ones(len(frame))
        return Data(points, target, known * later / later.mean(), mixture.ravel(), group), labels

    def points(self, weights: Array, N: Any, D: Any, unique: Any) -> Points:
        """Return points at weights (n, m), N and D (None: those of the table) and unique tokens (n or 1, m)."""
        logs = []
        for name, value in (("N", N), ("D", D)):
            low, high = self.sizes_.get(name, (np.nan, np.nan))
            fixed = not self.varies(name)
            if value is None:
                if not fixed:
                    raise InputError(
                        f"{name} is missing; the table has {name} from {low:.4g} to {high:.4g}, so give it."
                    )
                logs.append(np.zeros(len(weights)))
                continue
            value = np.broadcast_to(positive(name, np.atleast_1d(floats(value))), len(weights))
            if fixed and not (np.abs(np.log(value / low)) < np.log(SPREAD)).all():
                state = f"is {low:.4g} in every run" if name in self.sizes_ else "is not in the table"
                raise InputError(f"{name} {state}, so losses at another {name} are unknown; leave it out.")
            logs.append(np.zeros(len(weights)) if fixed else np.log(value / self.middle_[name]))
        tokens = self.middle_.get("D", np.nan) * np.exp(logs[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            epochs = weights * tokens[:, None] / unique
        return Points(weights, *logs, np.log(np.fmax(epochs, 1.0)))

    def _rolling(self, data: Data, labels: np.ndarray) -> list[CutOff]:
        """Return hold-outs by compute, where whole runs are larger than those that a fit has seen."""
        inputs = {
            name: column for name, column in (("N", data.points.size), ("D", data.points.tokens)) if np.ptp(column)
        }
        if not inputs:
            return []
        last = np.zeros(data.group.max() + 1)
        np.maximum.at(last, data.group, self.reach_)
        columns = {name: np.exp(column) for name, column in inputs.items()}
        columns |= {name: column for name, column in zip(self.domains_, data.points.weights.T, strict=True)}
        return cut_offs(columns, last[data.group], labels, len(self.domains_) + 5, min_values=2)

    def _with_noise(self, data: Data, first: Member) -> Data:
        """Return the data with rows weighed by the inverse variance of their mixtures' scatter."""
        points = np.column_stack([data.points.weights, data.points.size, data.points.tokens])
        _, place, copies = np.unique(np.round(points, 6), axis=0, return_inverse=True, return_counts=True)
        place, several = place.ravel(), copies > 1
        squares = np.zeros(len(points))
        for k, residual in enumerate(first.residual):
            mean = np.bincount(place, residual) / copies
            exact = (residual - mean[place]) * np.sqrt(copies / np.maximum(copies - 1, 1))[place]
            squares += (np.where(several[place], exact, residual) / first.noise[k]) ** 2 / len(first.residual)
        roots = np.sqrt(data.points.weights)
        distance = pdist(roots[:500])
        self._scatter = (roots, squares, float(np.quantile(distance, 0.1)) or 1.0)
        return Data(data.points, data.target, data.weight / self._factor(data.points.weights), data.mixture, data.group)

    def _factor(self, weights: Array) -> Array:
        """Return the variance of a run at each mixture (n,) over the mean one, shrunk towards one."""
        roots, squares, length = self._scatter
        near = np.exp(-0.5 * (cdist(np.sqrt(weights), roots) / length) ** 2)
        return np.asarray((FEW_ROWS + near @ squares) / (FEW_ROWS + near.sum(axis=1)))

    def _members(self, data: Data, cuts: list[CutOff], signs: Array, folds: int) -> dict[str, Any]:
        forms = FORMS if self.forms is None else tuple(self.forms)
        if not np.ptp(data.points.size):
            forms = tuple(form for form in forms if form != "product" or self.forms == [form])  # the same as effective
        fits: dict[str, Any] = {}
        base = (
            Member("effective", data, cuts, signs, self.seed) if {"effective", "process", "trees"} & {*forms} else None
        )
        for form in forms:
            if form == "effective":
                fits[form] = base
            elif form in ("product", "exponential"):
                fits[form] = Member(form, data, cuts, signs, self.seed)
            elif form == "process" and data.mixture.max() >= MOST_MIXTURES:
                self.refused_[form] = f"the table has more than {MOST_MIXTURES} mixtures, too many for a process."
            elif form == "process":
                fits[form] = Corrected(base, data, cuts, self.draws, self.seed)
            else:
                try:
                    fits[form] = Boosted(base, data, cuts, self.draws, self.seed, folds)
                except ImportError:
                    self.refused_[form] = "scikit-learn is not installed; pip install 'isoflop[mixtures]' adds trees."
        if not fits:
            raise InputError(next(iter(self.refused_.values())))
        return fits

    def _weigh(self, cuts: list[CutOff], folds: int) -> None:
        """Learn the forms' shares, the rate of their mean's error, and the scatter of runs, for each loss."""
        import pandas as pd

        data, prior = self.data_, Prior(**read_constants("forecast")["mixture"])
        held = [np.stack([member.held[j] for member in self.members_.values()]) for j in range(len(cuts))]
        moves = [h - data.target[:, cut.tested] for h, cut in zip(held, cuts, strict=True)]  # (forms, losses, tested)
        used = range(folds, len(cuts)) if len(cuts) > folds else range(folds)
        self._weights, errors = [], []
        for k in range(len(self.losses_)):
            known = [data.weight[k, cut.tested] > 0 for cut in cuts]
            rolled = [moves[j][:, k, known[j]] / cuts[j].further[known[j]] for j in used if known[j].any()]
            self._weights.append(Weights.learn(rolled, len(self.members_), prior))
            errors.append(np.sqrt(np.mean([(m**2).mean(axis=1) for m in rolled], axis=0)))
        share = np.stack([weights.share for weights in self._weights])
        names = {"index": [*self.members_], "columns": [*self.losses_]}
        self.weights_, self.errors_ = pd.DataFrame(share.T, **names), pd.DataFrame(np.transpose(errors), **names)
        generator = np.random.default_rng(self.seed)
        concentration = 1.0 / prior.disagreement - 1.0  # then the shares' draws keep this share of the forms' variance
        drawn = generator.standard_gamma(
            np.maximum(concentration * share, 1e-3)[:, None], (len(share), self.draws, share.shape[1])
        )
        self._shares = drawn / drawn.sum(axis=2, keepdims=True)
        self.held_ = np.full(data.target.shape, np.nan)  # errors of log loss, each row by fits without its mixture
        for move, cut in zip(moves[:folds], cuts[:folds], strict=True):
            self.held_[:, cut.tested] = np.einsum("kf,fkt->kt", share, move)
        self.held_ = np.where(data.weight > 0, self.held_, 0.0)
        root = np.sqrt(data.weight) * self.held_
        total = np.sqrt(data.weight) @ np.sqrt(data.weight).T
        self._covariance = root @ root.T / np.maximum(total, 1e-300)
        self.noise_ = dict(zip(self.losses_, np.sqrt(np.diag(self._covariance)).tolist(), strict=True))

    # Answers.

    def predict(
        self,
        weights: Any,
        N: Any = None,
        D: Any = None,
        unique: Mapping[str, float] | None = None,
        level: float = 0.95,
        target: Mapping[str, float] | None = None,
        kind: str = "run",
    ) -> pd.DataFrame:
        """Return loss_<name> with _low and _high for every loss, and the same for `target`, one row per point.

        Parameters
        ----------
        weights
            A mixture {domain: weight}, a list of these, a DataFrame with weight_<domain>, or an array (points, domains).
        N, D
            Numbers or (points,); needed if they vary in the table.
        unique
            Tokens that a domain has; without it the domain is not repeated.
        target
            {loss: weight}; the weights are scaled to a sum of one.
        kind : {"run", "mean"}
            Interval of a new run's loss, or of the mean loss of such runs.
        """
        import pandas as pd

        self._fitted()
        one_of("kind", kind, ("run", "mean"))
        points = self.points(self.mixtures(weights), N, D, self.caps(unique))
        rows = np.eye(len(self.losses_))
        names = [f"loss_{name}" for name in self.losses_]
        if target is not None:
            rows, names = np.vstack([rows, self.target(target)]), [*names, "target"]
        value, variance = self.moments(points, rows, kind == "run")
        wide = half_width(level, [variance]) / value
        columns = {}
        for name, v, w in zip(names, value, wide, strict=True):
            columns |= {name: v, f"{name}_low": v * np.exp(-w), f"{name}_high": v * np.exp(w)}
        return pd.DataFrame(columns)

    def moments(self, points: Points, rows: Array, run: bool) -> tuple[Array, Array]:
        """Return values and variances (targets, points) of combinations `rows` (targets, losses) of losses."""
        log, draws = self.surfaces(points)
        loss = np.exp(log)
        value = rows @ loss
        variance = np.stack([np.var(np.tensordot(row, np.exp(draws), axes=1), axis=1) for row in rows])
        rate = np.array([weights.prior.drift * weights.rate for weights in self._weights])
        variance += (rows @ (loss * rate[:, None]) * self.further(points)) ** 2
        if run:
            parts = rows[:, :, None] * loss  # (targets, losses, points)
            noise = np.einsum("tkp,kl,tlp->tp", parts, self._covariance, parts)
            variance += noise * self._factor(points.weights)
        return value, variance

    def surfaces(self, points: Points, draws: bool = True) -> tuple[Array, Array]:
        """Return log losses (losses, points) and, with `draws`, their draws (losses, points, draws)."""
        log, drawn = 0.0, 0.0
        for f, member in enumerate(self.members_.values()):
            value, moved = member.predict(points, draws)
            log = log + self.weights_.to_numpy()[f][:, None] * value
            drawn = drawn + self._shares[:, None, :, f] * moved if draws else drawn
        return log, drawn

    def further(self, points: Points) -> Array:
        """Return log(compute / the largest compute of the table), (points,); zero where negative."""
        size = sum(
            log + np.log(self.middle_.get(name, 1.0)) for name, log in (("N", points.size), ("D", points.tokens))
        )
        return np.maximum(np.log(6.0) + size - np.log(self.reach_.max()), 0.0)

    def best(
        self,
        target: Mapping[str, float] | None = None,
        N: float | None = None,
        D: float | None = None,
        flops: float | None = None,
        base: Mapping[str, float] | None = None,
        max_epochs: float | None = None,
        unique: Mapping[str, float] | None = None,
        bounds: Mapping[str, tuple[float, float]] | None = None,
        level: float = 0.95,
    ) -> BestMixture:
        """Return the mixture of lowest target loss, and whether it is better than `base` beyond doubt.

        Parameters
        ----------
        target
            {loss: weight}, scaled to a sum of one; default: all losses alike.
        N, D, flops
            Of the run to plan, where they vary in the table; `flops` = 6 N D gives the missing one, or both, by the
            lowest target loss of the base.
        base
            The mixture to beat; default: the mixture with most runs, or if each has one, the mean of all.
        max_epochs, unique
            Largest number of passes over a domain's `unique` tokens.
        bounds
            {domain: (low, high)}; default: the range of each domain's weights in the table.
        """
        self._fitted()
        return best_mixture(self, target, N, D, flops, base, max_epochs, unique, bounds, level)

    # Arguments.

    def mixtures(self, weights: Any) -> Array:
        """Return mixtures as an array (points, domains) with sums of one. Raises InputError for other sums or names."""
        import pandas as pd

        if isinstance(weights, Mapping):
            weights = [weights]
        if isinstance(weights, Sequence) and weights and isinstance(weights[0], Mapping):
            for row in weights:
                _known("weights", row, self.domains_)
            weights = [[row.get(name, 0.0) for name in self.domains_] for row in weights]
        if not isinstance(weights, pd.DataFrame):
            rows = np.atleast_2d(floats(weights))
            if rows.shape[1] != len(self.domains_):
                raise InputError(
                    f"weights has {rows.shape[1]} columns; it needs one for each of {', '.join(self.domains_)}."
                )
            weights = pd.DataFrame(rows, columns=[f"weight_{name}" for name in self.domains_])
        missing = [name for name in self.domains_ if f"weight_{name}" not in weights]
        if missing:
            raise InputError(f"weights has no column weight_{missing[0]}; each domain of the fit needs one.")
        return _weights(weights, self.domains_)

    def target(self, target: Mapping[str, float] | None) -> Array:
        """Return the target's weights (losses,), which sum to one; None: all alike."""
        if target is None:
            return np.full(len(self.losses_), 1.0 / len(self.losses_))
        _known("target", target, self.losses_)
        row = floats([target.get(name, 0.0) for name in self.losses_])
        if not ((row >= 0).all() and 0 < row.sum() < np.inf):
            raise InputError(
                f"target is {dict(target)}; its weights must be zero or more, and at least one above zero."
            )
        return row / row.sum()

    def varies(self, name: str) -> bool:
        low, high = self.sizes_.get(name, (1.0, 1.0))
        return high / low > SPREAD

    def check_domains(self, name: str, values: Mapping[str, Any]) -> None:
        _known(name, values, self.domains_)

    def skill(self, row: Array) -> float:
        """Return by how many standard errors held-out losses of target `row` (losses,) show that the mixture matters.

        The difference of squared errors, without and with the mixture as an input, is averaged by mixture.
        """
        loss = np.exp(self.data_.target)
        errors = [row @ (loss * held) for held in (self._ignorant, self.held_)]
        known = (self.data_.weight[row > 0] > 0).all(axis=0)
        weight = self.data_.weight[row > 0].mean(axis=0) * known
        total = np.bincount(self.data_.mixture, weight)
        saved = np.bincount(self.data_.mixture, weight * (errors[0] ** 2 - errors[1] ** 2))[total > 0]
        return float(saved.sum() / max(np.sqrt(len(saved)) * saved.std(ddof=1), 1e-300))

    def caps(self, unique: Mapping[str, float] | None) -> Array:
        """Return the unique tokens (1, domains), infinite without a cap."""
        _known("unique", unique or {}, self.domains_)
        if unique and "D" not in self.sizes_:
            raise InputError("unique is given, but the table has no column D, so epochs are unknown; leave it out.")
        positive("unique", [*unique.values()]) if unique else None
        return floats([[(unique or {}).get(name) or np.inf for name in self.domains_]])


def _frame(table: Any) -> pd.DataFrame:
    if isinstance(table, RunTable):
        return table.frame.iloc[table.rows].reset_index(drop=True)
    frame = load(table)[0]
    if len(frame) == 0:
        raise InputError("the table has no rows; at least one run is needed.")
    return frame


def _names(frame: pd.DataFrame, prefix: str) -> tuple[str, ...]:
    names = [str(name) for name in frame.columns]
    result = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix) and name != "loss_se")
    least = 2 if prefix == "weight_" else 1
    if len(result) < least:
        raise InputError(f"the table has {len(result)} columns {prefix}<domain>; at least {least} must be there.")
    return result


def _weights(frame: pd.DataFrame, domains: Sequence[str]) -> Array:
    """Return the weights of domains (n, m), scaled to sums of exactly one."""
    weights = np.stack([numeric(frame, f"weight_{name}") for name in domains], axis=1)
    total = weights.sum(axis=1)
    bad = ~((weights >= 0).all(axis=1) & (np.abs(total - 1.0) <= SUM_ERROR))
    if bad.any():
        row = int(np.argmax(bad))
        wrong = np.flatnonzero(~(weights[row] >= 0))
        if len(wrong):
            raise InputError(
                f"weight_{domains[wrong[0]]} is {weights[row, wrong[0]]:g} in row {row}; it must be 0 or more."
            )
        raise InputError(f"the weights of row {row} sum to {total[row]:g}; they must sum to one.")
    return np.asarray(weights / total[:, None])


def _known(name: str, values: Mapping[str, Any], accepted: Sequence[str]) -> None:
    unknown = [key for key in values if key not in accepted]
    if unknown:
        raise InputError(f"{name} has {unknown[0]!r}; the table has {', '.join(accepted)}.")


def _folds(data: Data, seed: int) -> list[CutOff]:
    """Return hold-outs of a fifth of the mixtures each."""
    count = int(data.mixture.max()) + 1
    fold = (np.random.default_rng(seed).permutation(count) % min(FOLDS, count))[data.mixture]
    masks = [fold == k for k in range(fold.max() + 1)]
    return [CutOff(np.nan, ~tested, tested, np.ones(int(tested.sum()))) for tested in masks]
