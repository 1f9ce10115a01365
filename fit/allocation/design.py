"""The choice of the next runs, to lower the expected squared error of predictions at large budgets.

- Each local optimum of each law is a basin, weighted by its likelihood. Within a basin the constants are Gaussian,
  Sigma = (J' W J + prior)^-1 with slopes J of log predictions; between basins, runs and targets covary as the basins'
  predictions do. The gain of a run follows from means and covariances alone (Goldstein and Wooff 2007, Bayes Linear
  Statistics). Li et al. 2026 (arXiv:2604.22753) average over basins by quadrature.
- No form is exact, so a target's error also grows with the log of compute between the largest run and the target, at
  a rate fitted to public tables (constants/forecast.yaml).
- Batches are grown by worth / FLOPs^p for several p and improved by exchanges (Fedorov 1972, Theory of Optimal
  Experiments).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from ..errors import Array, Columns, Constants, InputError, floats, positive, same_length
from ..files import read_constants
from ..uncertainty import by_group

BASINS = 6  # largest number of basins of a law
DISTINCT = 1  # two optima are one if their coordinates over the prior's width agree to this many decimals
UNBOUNDED = 6.0  # range assumed for an unbounded coordinate; the prior's standard deviation is a quarter of it
STEP = 3e-4  # step of a central difference, in prior widths; a searched optimum is exact to about 1e-6
LEAST_NOISE = 1e-5  # smallest noise in log loss, for runs exactly on the law
LEAST_SHARE = 1e-3  # basins with a smaller share are dropped
POWERS = (1.0, 0.7, 0.4, 0.0)  # exponents p of worth / FLOPs^p; 0 ignores the cost
PASSES = 6  # largest number of exchange passes over a batch; few change anything after the third
REFILL = 0.7  # exponent p for spending the FLOPs that an exchange frees


@dataclass(frozen=True)
class Basin:
    """A local optimum theta (k,) of a fitted law, with its share of the likelihood."""

    law: Any
    theta: Array
    share: float

    def slopes(self, quantity: Callable[[Any, Constants], Array]) -> tuple[Array, Array]:
        """Return `quantity` at theta, (points,), and its slopes by theta in units of prior widths, (points, k)."""
        p, k = self.law.problem_, len(self.theta)
        steps = STEP * np.diag(prior_widths(p))
        with np.errstate(all="ignore"):
            values = quantity(self.law, p.constants(self.theta + np.concatenate([0.0 * steps[:1], steps, -steps])))
            return values[:, 0], (values[:, 1 : k + 1] - values[:, k + 1 :]) / (2.0 * STEP)


def prior_widths(problem: Any) -> Array:
    """Return the prior standard deviation (k,) of each coordinate: a quarter of its allowed range."""
    span = problem.upper - problem.lower
    return np.where(np.isfinite(span), span, UNBOUNDED) / 4.0


def basins(laws: Sequence[Any], shares: Sequence[float] | None = None) -> list[Basin]:
    """Find the distinct local optima of laws fitted to the same rows, and weight each by its likelihood.

    `shares` (laws,) fixes the total weight of each law's optima.
    """
    optima, log = list[Basin](), list[float]()
    for place, law in enumerate(laws):
        p, weights = law.problem_, law.weight_ * law._precision
        starts = np.concatenate([law.theta_[None, None], p.starts(weights[None, :], None).swapaxes(0, 1)])
        repeated = np.broadcast_to(weights, (len(starts), p.form.points))  # each start is solved as a separate problem
        theta = law._solve(repeated, starts).theta
        square = np.average((p.form.value(theta)[0] - p.target) ** 2, axis=1, weights=law.weight_) + LEAST_NOISE**2
        square[~np.isfinite(square)] = np.inf
        order = np.argsort(square)
        cells = np.round(theta[order] / np.maximum(prior_widths(p), 1e-300), DISTINCT)
        first = order[np.sort(np.unique(cells, axis=0, return_index=True)[1])[:BASINS]]
        rows = int((law.weight_ > 0).sum())
        likelihood = -0.5 * (rows * np.log(square[first]) + p.free * np.log(rows))  # at the most likely noise
        if shares is not None:
            likelihood += np.log(shares[place]) - np.log(np.exp(likelihood - likelihood[0]).sum()) - likelihood[0]
        optima += [Basin(law, theta[i], 1.0) for i in first]
        log += likelihood.tolist()
    share = np.exp(np.array(log) - max(log))
    share[share < LEAST_SHARE] = 0.0
    return [replace(b, share=s) for b, s in zip(optima, share / share.sum(), strict=True) if s]


class Beliefs:
    """Gaussian beliefs about the k coordinates of M basins and the errors of T trunks.

    goals (M, q, k): slopes of the q targets; shares (M,); covariance (M, k + T, k + T).
    """

    def __init__(self, goals: Array, shares: Array, trunks: int, shared: float, unshared: float) -> None:
        M, q, k = goals.shape
        self.k, self.unshared, self.shared, self.shares = k, unshared, shared, shares
        self.goals = np.concatenate([goals, np.zeros((M, q, trunks))], axis=2)
        diagonal = np.concatenate([np.ones(k), np.full(trunks, shared)])
        self.covariance = np.broadcast_to(np.diag(diagonal), (M, k + trunks, k + trunks)).copy()

    def copy(self) -> Beliefs:
        new = object.__new__(Beliefs)
        vars(new).update(vars(self) | {"covariance": self.covariance.copy()})
        return new

    def observe(self, slopes: Array, trunk: int, weight: float = 1.0) -> None:
        """Add a run, with slopes (M, k) of its log loss by k coordinates in M basins.

        `trunk` is the index of the run's trunk, -1 for none. A `weight` of -1 removes the run.
        """
        noise = (self.unshared if trunk >= 0 else self.unshared + self.shared) / weight
        moved = np.einsum("mij,mj->mi", self.covariance[:, :, : self.k], slopes)
        if trunk >= 0:
            moved += self.covariance[:, :, self.k + trunk]
        variance = np.einsum("mi,mi->m", moved[:, : self.k], slopes) + noise
        if trunk >= 0:
            variance += moved[:, self.k + trunk]
        self.covariance -= moved[:, :, None] * (moved / variance[:, None])[:, None, :]

    def variances(self) -> Array:
        """Return the variance of each target, averaged over basins, (q,)."""
        per_basin = np.einsum("mqi,mij,mqj->mq", self.goals, self.covariance, self.goals, optimize=True)
        return np.maximum(self.shares @ per_basin, 1e-300)

    def falls(self, slopes: Array, trunks: np.ndarray) -> Array:
        """Return by how much each of K further runs would lower the sum of `variances`, (K,).

        `slopes` (M, K, k) and `trunks` (K,) are as in `observe`.
        """
        k, mates = self.k, trunks >= 0
        place = k + trunks[mates]
        towards = self.goals @ self.covariance
        pull = towards[:, :, :k] @ slopes.transpose(0, 2, 1)
        pull[:, :, mates] += towards[:, :, place]
        variance = (np.matmul(slopes, self.covariance[:, :k, :k]) * slopes).sum(axis=2) + self.unshared
        both = 2.0 * (slopes[:, mates] * self.covariance[:, :k, place].transpose(0, 2, 1)).sum(axis=2)
        variance[:, mates] += both + self.covariance[:, place, place]
        variance[:, ~mates] += self.shared
        return np.asarray(self.shares @ ((pull**2).sum(axis=1) / variance))


@dataclass(frozen=True)
class Question:
    """Predictions to improve by further runs, from laws fitted to the same rows."""

    basins: list[Basin]
    kinds: np.ndarray  # (q,) of the targets: "loss" or "N"
    values: Array  # (q,) log predictions
    goals: Array  # (M, q, k) slopes of the log predictions
    target_flops: Array  # (q,)
    drift_rate: Array  # (q,) per log of compute between the largest run and the target
    reach: float  # FLOPs of the largest run
    trunk: np.ndarray  # (n,) trunk labels of the laws' rows
    noise: float  # standard deviation of one run's log loss
    correlation: float  # of the errors of two runs of one trunk

    @classmethod
    def of(
        cls,
        laws: Any,
        target_flops: ArrayLike,
        trunk: Any = None,
        correlation: float | None = None,
        shares: Sequence[float] | None = None,
        points: Mapping[str, ArrayLike] | None = None,
        flops: ArrayLike | None = None,
    ) -> Question:
        """Ask about the optimal loss and N at `target_flops`, or about the losses at `points`.

        Raises InputError if a law is not fitted, or has no optimum at `target_flops`.

        Parameters
        ----------
        laws
            One or several, fitted to the same n rows.
        target_flops
            Budgets of the optima, or the FLOPs (q,) of `points`.
        trunk
            (n,) label of the run from which a row branches, by default the row itself.
        correlation
            Correlation of errors within a trunk, by default estimated from the residuals.
        shares
            Weight of each law, by default its likelihood.
        points
            The laws' inputs by name, (q,) each.
        flops
            (n,) FLOPs of the rows, by default 6ND.
        """
        laws = list(laws) if isinstance(laws, Sequence) else [laws]
        laws[0]._fitted()
        C = positive("target_flops", np.atleast_1d(floats(target_flops)))
        data, rows = laws[0].data_, len(laws[0].weight_)
        labels = np.arange(rows) if trunk is None else np.asarray(trunk)
        if len(labels) != rows:
            raise InputError(f"trunk has {len(labels)} labels and the law {rows} rows; one label per row is needed.")
        if points is None and (missing := [law.title for law in laws if not hasattr(law, "optimum")]):
            raise InputError(f"{missing[0]} has no optimum of N and D; give points, the inputs to predict for.")
        if flops is None and not {"N", "D"} <= set(data):
            raise InputError("flops is missing; for a law of other inputs than N and D, give the FLOPs of its rows.")
        spent = 6.0 * data["N"] * data["D"] if flops is None else positive("flops", flops)
        optima = basins(laws, shares)

        def asked(law: Any, constants: Constants) -> Array:
            if points is not None:
                return log_losses(points)(law, constants)
            N, _, loss = law.optimum(C[:, None], constants)
            return np.log(np.concatenate([loss, N]))

        values, goals = over(optima, asked)
        if not (np.isfinite(values).all() and np.isfinite(goals).all()):
            raise InputError(
                "a law has no optimum at target_flops, because its loss does not change with N or with D; "
                "add runs of other N and D."
            )
        share = np.array([basin.share for basin in optima])
        if correlation is None:
            residual = share @ np.stack([basin.law.residuals() for basin in optima])
            correlation = trunk_correlation(residual, labels)
        if not 0.0 <= correlation < 1.0:
            raise InputError(f"correlation is {correlation}; it must be at least 0 and below 1.")
        noise = float(np.sqrt(share @ np.array([basin.law.residual_scale_ for basin in optima]) ** 2))
        kinds = np.repeat(["loss", "N"], len(C)) if points is None else np.repeat("loss", values.shape[1])
        prior = read_constants("forecast")
        rate = {kind: prior[name]["rate"] * prior[name]["drift"] for kind, name in (("loss", "loss"), ("N", "size"))}
        return cls(
            optima, kinds, share @ values, goals, np.resize(C, len(kinds)), np.array([rate[kind] for kind in kinds]),
            float(spent.max()), labels, max(noise, LEAST_NOISE), correlation,
        )  # fmt: skip

    def drift(self, reach: ArrayLike) -> Array:
        """Return the variances (..., q) of targets due to inexact laws, if the largest run has `reach` (...) FLOPs."""
        further = np.log(np.maximum(self.target_flops / floats(reach)[..., None], 1.0))
        return np.asarray((self.drift_rate * further) ** 2)

    def labels(self, trunks: ArrayLike) -> dict[str, int]:
        """Number the trunks with several runs among fitted rows and candidates; `trunks` are the candidates' labels."""
        names, counts = np.unique(np.append(self.trunk.astype(str), trunks).astype(str), return_counts=True)
        return {str(name): i for i, name in enumerate(names[counts > 1])}

    def beliefs(self, labels: Mapping[str, int]) -> Beliefs:
        """Return the `Beliefs` after observing the fitted rows; `labels` is the result of `Question.labels`."""
        shared = self.correlation * self.noise**2
        share = np.array([basin.share for basin in self.basins])
        result = Beliefs(self.goals, share, len(labels), shared, self.noise**2 - shared)
        law = self.basins[0].law
        _, slopes = over(self.basins, log_losses({name: law.data_[name] for name in law.inputs}))
        slopes[:, :, -len(share) :] = 0.0  # the shares already reflect how the basins differ there
        for row in np.flatnonzero(law.weight_ > 0):
            result.observe(slopes[:, row], labels.get(str(self.trunk[row]), -1), float(law.weight_[row]))
        return result

    def forecast(self, level: float = 0.95) -> Columns:
        """Predict the targets: "value", "low" and "high", (q,) each; the range of a loss includes a new run's noise."""
        variance = self.beliefs(self.labels([])).variances() + self.drift(self.reach)
        wide = ndtri(0.5 + 0.5 * level) * np.sqrt(variance + self.noise**2 * (self.kinds == "loss"))
        return {"value": np.exp(self.values), "low": np.exp(self.values - wide), "high": np.exp(self.values + wide)}


def log_losses(inputs: Mapping[str, ArrayLike]) -> Callable[[Any, Constants], Array]:
    """Return a function of (law, constants) that predicts log losses at `inputs`, a column (points,) per name."""
    columns = {name: floats(column)[:, None] for name, column in inputs.items()}
    return lambda law, constants: np.log(law.evaluate(constants, *(columns[name] for name in law.inputs)))


def over(optima: list[Basin], quantity: Callable[[Any, Constants], Array]) -> tuple[Array, Array]:
    """Return `quantity` in each of M basins, (M, points), and its slopes, (M, points, k + M).

    The first k slopes are by the coordinates of a fit; the last M carry the differences between basins.
    """
    parts = [basin.slopes(quantity) for basin in optima]
    values, width = np.stack([value for value, _ in parts]), max(slope.shape[1] for _, slope in parts)
    slopes = np.stack([np.pad(slope, ((0, 0), (0, width - slope.shape[1]))) for _, slope in parts])
    share = np.array([basin.share for basin in optima])
    between = np.sqrt(share) * (values - share @ values).T
    return values, np.concatenate([slopes, np.broadcast_to(between, (len(optima), *between.shape))], axis=2)


def trunk_correlation(residuals: Array, trunk: np.ndarray, expected: float = 0.5, pairs: float = 10.0) -> float:
    """Estimate the correlation of two residuals in one trunk; the prior `expected` counts like `pairs` pairs."""
    _, member = by_group(trunk)
    sums, squares = np.bincount(member, residuals), np.bincount(member, residuals**2)
    counts = np.bincount(member)
    products = float((sums**2 - squares).sum() / 2.0)  # sum over all pairs
    scale = max(float((residuals**2).mean()), LEAST_NOISE**2)
    number = float((counts * (counts - 1) / 2).sum())
    return float(np.clip((products / scale + pairs * expected) / (number + pairs), 0.0, 0.9))


@dataclass(frozen=True)
class Candidates:
    """Candidate runs as arrays (k,).

    `size` is a run's whole FLOPs, `flops` its cost given existing checkpoints, and `branch_flops` its cost if it
    branches from a longer run of its trunk in the same batch.
    """

    inputs: Mapping[str, Array]
    flops: Array
    branch_flops: Array
    size: Array
    trunk: np.ndarray

    def __post_init__(self) -> None:
        columns = {name: positive(name, getattr(self, name)) for name in ("flops", "branch_flops", "size")}
        same_length(**self.inputs, **columns, trunk=self.trunk)

    def __len__(self) -> int:
        return len(self.flops)

    def extra(self, chosen: list[int]) -> Array:
        """Return the FLOPs that each candidate adds to the batch `chosen`, (k,)."""
        cost = self.flops.copy()
        for trunk, longest in self._longest(chosen).items():
            reach, mates = self.size[longest], (self.flops > self.branch_flops) & (self.trunk == trunk)
            shorter, longer = mates & (reach > self.size), mates & (reach < self.size)
            cost[shorter] = self.branch_flops[shorter]
            cost[longer] -= self.flops[longest] - self.branch_flops[longest]
        return cost

    def cost(self, chosen: list[int]) -> float:
        longest = set(self._longest(chosen).values())
        pays = [self.flops[i] if i in longest else min(self.flops[i], self.branch_flops[i]) for i in chosen]
        return float(sum(pays))

    def _longest(self, chosen: list[int]) -> dict[str, int]:
        """Map each trunk to its longest run in the batch `chosen`, from which its other runs branch."""
        longest: dict[str, int] = {}
        for i in chosen:
            trunk, makes = self.trunk[i], self.flops[i] > self.branch_flops[i]
            if makes and (trunk not in longest or self.size[i] > self.size[longest[trunk]]):
                longest[trunk] = i
        return longest


@dataclass(frozen=True)
class Design:
    """A batch of runs, best first: `chosen` are positions among the candidates.

    Per run: `gains`, the log factor by which it narrows the targets' intervals; `flops` that it adds; `check`, true if
    it is larger than any finished run. `before` and `after` are standard deviations of the targets, for "loss" and "N".
    """

    chosen: list[int]
    gains: list[float]
    flops: list[float]
    check: list[bool]
    before: dict[str, float]
    after: dict[str, float]

    def narrowed(self, quantity: str, estimate: float, interval: tuple[float, float]) -> tuple[float, float]:
        """Predict what an `interval` of "loss" or "N" around the `estimate` will be after the batch."""
        ratio = self.after[quantity] / self.before[quantity]
        low, high = (float(estimate * (end / estimate) ** ratio) for end in interval)
        return low, high


class Buyer:
    def __init__(self, question: Question, pool: Candidates) -> None:
        self.pool, self.question = pool, question
        labels = question.labels(pool.trunk)
        self.place = np.array([labels.get(str(name), -1) for name in pool.trunk])
        _, self.slopes = over(question.basins, log_losses(pool.inputs))
        beliefs, q = question.beliefs(labels), question
        # Loss and N count equally, each in units of its present uncertainty.
        variance = beliefs.variances() + q.drift(q.reach)
        self.scale = np.array([1.0 / np.sqrt(variance[q.kinds == kind].sum()) for kind in q.kinds])
        beliefs.goals *= self.scale[:, None]
        self.beliefs = beliefs

    def buy(self, budget: float, max_runs: int | None = None) -> Design:
        """Choose the best batch for `budget` FLOPs. Raises InputError if the budget pays for no candidate."""
        (budget,) = positive("budget", [budget])
        if self.pool.flops.min() > budget:
            cheapest = self.pool.flops.min()
            raise InputError(
                f"budget is {budget:.3g} FLOPs; it must be at least {cheapest:.3g}, the cost of the cheapest run."
            )
        max_size = len(self.pool) if max_runs is None else max_runs
        batches = [self._exchange(*self._grow([], budget, max_size, power), budget, max_size) for power in POWERS]
        return self._ordered(min(batches, key=lambda chosen: self.value(self.with_beliefs(chosen), chosen)))

    def with_beliefs(self, chosen: list[int]) -> Beliefs:
        beliefs = self.beliefs.copy()
        for i in chosen:
            beliefs.observe(self.slopes[:, i], self.place[i])
        return beliefs

    def value(self, beliefs: Beliefs, chosen: list[int]) -> float:
        """Return the targets' expected squared error after the batch `chosen`, relative to no batch.

        `beliefs` must already include the batch.
        """
        return float(beliefs.variances().sum() + self._drift(self._reach(chosen))) / len(set(self.question.kinds))

    def worth(self, beliefs: Beliefs, chosen: list[int]) -> Array:
        """Return by how much adding each candidate to the batch `chosen` lowers the targets' squared error, (k,)."""
        reach = self._reach(chosen)
        drift = self._drift(np.maximum(self.pool.size, reach))
        return np.asarray(beliefs.falls(self.slopes, self.place) + self._drift(reach) - drift)

    def _reach(self, chosen: list[int]) -> float:
        return max([self.question.reach, *self.pool.size[chosen]])

    def _drift(self, reach: Any) -> Any:
        return self.question.drift(reach) @ self.scale**2

    def _grow(self, chosen: list[int], budget: float, max_size: int, power: float) -> tuple[list[int], Beliefs]:
        beliefs = self.with_beliefs(chosen)
        spent = self.pool.cost(chosen)
        free = np.ones(len(self.pool), dtype=bool)
        free[chosen] = False
        while len(chosen) < max_size:
            cost = self.pool.extra(chosen)
            fits = free & (cost <= budget - spent)
            if not fits.any():
                break
            worth = self.worth(beliefs, chosen) / np.maximum(cost, 1e-9 * budget) ** power
            pick = int(np.where(fits, worth, -np.inf).argmax())
            chosen.append(pick)
            free[pick] = False
            spent += float(cost[pick])
            beliefs.observe(self.slopes[:, pick], self.place[pick])
        return chosen, beliefs

    def _exchange(self, chosen: list[int], beliefs: Beliefs, budget: float, max_size: int) -> list[int]:
        for _ in range(PASSES):
            improved = False
            for place in range(len(chosen) - 1, -1, -1):
                out = chosen[place]
                rest = chosen[:place] + chosen[place + 1 :]
                trial = beliefs.copy()
                trial.observe(self.slopes[:, out], self.place[out], -1.0)
                fits = self.pool.extra(rest) <= budget - self.pool.cost(rest)
                fits[rest] = False
                worth = np.where(fits, self.worth(trial, rest), -np.inf)
                pick = int(worth.argmax())
                if pick == out or not worth[pick] > worth[out] + 1e-6:
                    continue
                trial.observe(self.slopes[:, pick], self.place[pick])
                rest.append(pick)
                if len(rest) < max_size:
                    rest, trial = self._grow(rest, budget, max_size, REFILL)
                chosen, beliefs, improved = rest, trial, True
            if not improved:
                break
        return chosen

    def _ordered(self, chosen: list[int]) -> Design:
        beliefs, left = self.beliefs.copy(), list(chosen)
        order: list[int] = []
        gains, flops = [], []
        while left:
            cost = self.pool.extra(order)[left]
            worth = self.worth(beliefs, order)[left]
            best, before = int((worth / np.maximum(cost, 1e-9 * cost.max())).argmax()), self.value(beliefs, order)
            flops.append(float(cost[best]))
            order.append(left.pop(best))
            beliefs.observe(self.slopes[:, order[-1]], self.place[order[-1]])
            gains.append(float(0.5 * np.log(before / self.value(beliefs, order))))
        check = [bool(self.pool.size[i] > self.question.reach) for i in order]
        return Design(order, gains, flops, check, self.widths(self.beliefs, []), self.widths(beliefs, order))

    def widths(self, beliefs: Beliefs, chosen: list[int]) -> dict[str, float]:
        q = self.question
        variance = beliefs.variances() / self.scale**2 + q.drift(self._reach(chosen))
        return {str(kind): float(np.sqrt(variance[q.kinds == kind].mean())) for kind in np.unique(q.kinds)}
