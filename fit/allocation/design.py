"""Which runs to buy next: those that most lower the expected squared error of what laws say of dear targets.

Special here:
- *Any law, and several.* Each local optimum of each law is a basin, weighed by its likelihood. Within one, constants
  are Gaussian, Sigma = (J' W J + prior)^-1 with slopes J of log predictions; between them, runs and targets covary as
  the basins' predictions do. What a run lowers of both follows from means and covariances alone (Goldstein and Wooff
  2007, Bayes Linear Statistics). Li et al. 2026 (arXiv:2604.22753) average over basins by quadrature.
- *No form is right*, so a target's error also grows with the log of compute between it and the largest run, at the rate
  that public tables teach (constants/forecast.yaml): larger runs lower that.
- Each trunk has an error of its own. Batches are grown by worth / FLOPs^p for several p, improved by exchanges (Fedorov
  1972, Theory of Optimal Experiments), and the best is taken.
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
from ..solver.solver import solve
from ..uncertainty import by_group

BASINS, DISTINCT = 6, 1  # of a law, at most; decimals of a coordinate, over its prior's width, in which two differ
UNBOUNDED = (
    6.0  # stands for the range of a coordinate without bounds; the prior's standard deviation is a quarter of it
)
STEP = 3e-4  # of a central difference, over that standard deviation; a searched optimum is known to about 1e-6
LEAST_NOISE = 1e-5  # in log loss; runs that lie on the law to rounding
LEAST_SHARE = 1e-3  # of a basin
POWERS = (1.0, 0.7, 0.4, 0.0)  # of FLOPs in worth / FLOPs^p; 0 takes the most worth that can be paid
PASSES = 6  # of exchanges over a batch, at most; few change anything after the third
REFILL = 0.7  # the p by which what an exchange leaves over is spent


@dataclass(frozen=True)
class Basin:
    """A local optimum theta (k,) of a fitted law, and its share of the likelihood."""

    law: Any
    theta: Array
    share: float

    def slopes(self, quantity: Callable[[Any, Constants], Array]) -> tuple[Array, Array]:
        """A quantity, (law, constants (r,)) -> (points, r), here (points,), and its slopes (points, k) by each
        coordinate in standard deviations of its prior.
        """
        p, k = self.law.problem_, len(self.theta)
        steps = STEP * np.diag(prior_widths(p))
        with np.errstate(all="ignore"):
            values = quantity(self.law, p.constants(self.theta + np.concatenate([0.0 * steps[:1], steps, -steps])))
            return values[:, 0], (values[:, 1 : k + 1] - values[:, k + 1 :]) / (2.0 * STEP)


def prior_widths(problem: Any) -> Array:
    """The standard deviation of each coordinate's prior, (k,)."""
    span = problem.upper - problem.lower
    return np.where(np.isfinite(span), span, UNBOUNDED) / 4.0


def basins(laws: Sequence[Any], shares: Sequence[float] | None = None) -> list[Basin]:
    """The distinct local optima of fitted laws of the same rows; `shares`, where given, are those of whole laws."""
    found, log = list[Basin](), list[float]()
    for place, law in enumerate(laws):
        p, weights = law.problem_, law.weight_ * law._precision
        starts = np.concatenate([law.theta_[None, None], p.starts(weights[None, :], None).swapaxes(0, 1)])
        each = np.broadcast_to(weights, (len(starts), p.form.points))  # each start is a problem of its own
        theta = solve(p.form, p.target, each, starts, p.lower, p.upper, law._delta).theta
        square = np.average((p.form.value(theta)[0] - p.target) ** 2, axis=1, weights=law.weight_) + LEAST_NOISE**2
        square[~np.isfinite(square)] = np.inf
        order = np.argsort(square)
        cells = np.round(theta[order] / np.maximum(prior_widths(p), 1e-300), DISTINCT)
        first = order[np.sort(np.unique(cells, axis=0, return_index=True)[1])[:BASINS]]
        rows = int((law.weight_ > 0).sum())
        likelihood = -0.5 * (rows * np.log(square[first]) + p.free * np.log(rows))  # with the noise at its best
        if shares is not None:
            likelihood += np.log(shares[place]) - np.log(np.exp(likelihood - likelihood[0]).sum()) - likelihood[0]
        found += [Basin(law, theta[i], 1.0) for i in first]
        log += likelihood.tolist()
    share = np.exp(np.array(log) - max(log))
    share[share < LEAST_SHARE] = 0.0
    return [replace(b, share=s) for b, s in zip(found, share / share.sum(), strict=True) if s]


class Beliefs:
    """Gaussian beliefs about k coordinates of M basins and the errors of T trunks.

    goals (M, q, k): slopes of what is asked; shares (M,); covariance (M, k + T, k + T), whose prior of the coordinates
    is one. Runs come and go by rank-one updates.
    """

    def __init__(self, goals: Array, shares: Array, trunks: int, shared: float, own: float) -> None:
        M, q, k = goals.shape
        self.k, self.own, self.shared, self.shares = k, own, shared, shares
        self.goals = np.concatenate([goals, np.zeros((M, q, trunks))], axis=2)
        diagonal = np.concatenate([np.ones(k), np.full(trunks, shared)])
        self.covariance = np.broadcast_to(np.diag(diagonal), (M, k + trunks, k + trunks)).copy()

    def copy(self) -> Beliefs:
        new = object.__new__(Beliefs)
        vars(new).update(vars(self) | {"covariance": self.covariance.copy()})
        return new

    def observe(self, slopes: Array, trunk: int, weight: float = 1.0) -> None:
        """Count a run with slopes (M, k) on a trunk (-1: its own); a weight of -1 takes it back, exactly."""
        noise = (self.own if trunk >= 0 else self.own + self.shared) / weight
        moved = np.einsum("mij,mj->mi", self.covariance[:, :, : self.k], slopes)
        if trunk >= 0:
            moved += self.covariance[:, :, self.k + trunk]
        variance = np.einsum("mi,mi->m", moved[:, : self.k], slopes) + noise
        if trunk >= 0:
            variance += moved[:, self.k + trunk]
        self.covariance -= moved[:, :, None] * (moved / variance[:, None])[:, None, :]

    def variances(self) -> Array:
        """Of each goal, (q,)."""
        each = np.einsum("mqi,mij,mqj->mq", self.goals, self.covariance, self.goals, optimize=True)
        return np.maximum(self.shares @ each, 1e-300)

    def falls(self, slopes: Array, trunks: np.ndarray) -> Array:
        """By how much each of K runs, slopes (M, K, k) on trunks (K,), would lower the sum of the variances, (K,)."""
        k, mates = self.k, trunks >= 0
        place = k + trunks[mates]
        towards = self.goals @ self.covariance
        pull = towards[:, :, :k] @ slopes.transpose(0, 2, 1)
        pull[:, :, mates] += towards[:, :, place]
        variance = (np.matmul(slopes, self.covariance[:, :k, :k]) * slopes).sum(axis=2) + self.own
        both = 2.0 * (slopes[:, mates] * self.covariance[:, :k, place].transpose(0, 2, 1)).sum(axis=2)
        variance[:, mates] += both + self.covariance[:, place, place]
        variance[:, ~mates] += self.shared
        return np.asarray(self.shares @ ((pull**2).sum(axis=1) / variance))


@dataclass(frozen=True)
class Question:
    """What is asked of one or several fitted laws of the same rows; see `of`."""

    basins: list[Basin]
    kinds: np.ndarray  # (q,) of what is asked: "loss" or "N"
    values: Array  # (q,) their logarithms
    goals: Array  # (M, q, k) their slopes
    target_flops: Array  # (q,)
    drift_rate: Array  # (q,) per log of compute between the largest run and the target
    reach: float  # FLOPs of the largest run
    trunk: np.ndarray  # (n,) labels of the laws' rows
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
        """Of a law or several: the loss and N of the optimum at `target_flops`; or the losses at `points`, inputs by
        name (q,), of this compute.

        shares: how far each law is trusted, by default its likelihood. flops (n,): of the laws' rows, by default 6ND.
        Noise, and the correlation where it is not given, come from the residuals. Raises InputError where a law is not
        fitted, or has no optimum there.
        """
        laws = list(laws) if isinstance(laws, Sequence) else [laws]
        laws[0]._fitted()
        C = positive("target_flops", np.atleast_1d(floats(target_flops)))
        data, rows = laws[0].data_, len(laws[0].weight_)
        labels = np.arange(rows) if trunk is None else np.asarray(trunk)
        if len(labels) != rows:
            raise InputError(f"trunk has {len(labels)} labels and the law {rows} rows; each needs one.")
        if points is None and (missing := [law.title for law in laws if not hasattr(law, "optimum")]):
            raise InputError(f"{missing[0]} has no optimum of N and D; give points, the inputs that are asked about.")
        if flops is None and not {"N", "D"} <= set(data):
            raise InputError("flops is missing; a law of other inputs than N and D needs the compute of its rows.")
        spent = 6.0 * data["N"] * data["D"] if flops is None else positive("flops", flops)
        found = basins(laws, shares)

        def asked(law: Any, constants: Constants) -> Array:
            if points is not None:
                return log_losses(points)(law, constants)
            N, _, loss = law.optimum(C[:, None], constants)
            return np.log(np.concatenate([loss, N]))

        values, goals = over(found, asked)
        if not (np.isfinite(values).all() and np.isfinite(goals).all()):
            raise InputError("a law has no optimum at target_flops (a term is flat or gone); add other N and D.")
        share = np.array([basin.share for basin in found])
        if correlation is None:
            residual = share @ np.stack([basin.law.residuals() for basin in found])
            correlation = trunk_correlation(residual, labels)
        if not 0.0 <= correlation < 1.0:
            raise InputError(f"correlation is {correlation}; at least 0 and below 1 is expected.")
        noise = float(np.sqrt(share @ np.array([basin.law.residual_scale_ for basin in found]) ** 2))
        kinds = np.repeat(["loss", "N"], len(C)) if points is None else np.repeat("loss", values.shape[1])
        prior = read_constants("forecast")
        rate = {kind: prior[name]["rate"] * prior[name]["drift"] for kind, name in (("loss", "loss"), ("N", "size"))}
        return cls(
            found, kinds, share @ values, goals, np.resize(C, len(kinds)), np.array([rate[kind] for kind in kinds]),
            float(spent.max()), labels, max(noise, LEAST_NOISE), correlation,
        )  # fmt: skip

    def drift(self, reach: ArrayLike) -> Array:
        """Variances (..., q) that remain however well the laws are known, with largest runs of so many FLOPs (...)."""
        further = np.log(np.maximum(self.target_flops / floats(reach)[..., None], 1.0))
        return np.asarray((self.drift_rate * further) ** 2)

    def labels(self, trunks: ArrayLike) -> dict[str, int]:
        """Places of the trunks that have several runs, these (m,) included; an error of one run alone is noise."""
        names, counts = np.unique(np.append(self.trunk.astype(str), trunks).astype(str), return_counts=True)
        return {str(name): i for i, name in enumerate(names[counts > 1])}

    def beliefs(self, labels: Mapping[str, int]) -> Beliefs:
        """What the laws' rows say; `labels` are trunks, with their places, which other runs share."""
        shared = self.correlation * self.noise**2
        share = np.array([basin.share for basin in self.basins])
        found = Beliefs(self.goals, share, len(labels), shared, self.noise**2 - shared)
        law = self.basins[0].law
        _, slopes = over(self.basins, log_losses({name: law.data_[name] for name in law.inputs}))
        slopes[:, :, -len(share) :] = 0.0  # the shares say already how far the basins differ there
        for row in np.flatnonzero(law.weight_ > 0):
            found.observe(slopes[:, row], labels.get(str(self.trunk[row]), -1), float(law.weight_[row]))
        return found

    def forecast(self, level: float = 0.95) -> Columns:
        """What is asked, and where it lies: loss or N, low and high, (q,); of a loss, where a new run lands."""
        variance = self.beliefs(self.labels([])).variances() + self.drift(self.reach)
        wide = ndtri(0.5 + 0.5 * level) * np.sqrt(variance + self.noise**2 * (self.kinds == "loss"))
        return {"value": np.exp(self.values), "low": np.exp(self.values - wide), "high": np.exp(self.values + wide)}


def log_losses(inputs: Mapping[str, ArrayLike]) -> Callable[[Any, Constants], Array]:
    """Log predictions of a law at inputs (points,) by name, a quantity of `Basin.slopes`."""
    columns = {name: floats(column)[:, None] for name, column in inputs.items()}
    return lambda law, constants: np.log(law.evaluate(constants, *(columns[name] for name in law.inputs)))


def over(found: list[Basin], quantity: Callable[[Any, Constants], Array]) -> tuple[Array, Array]:
    """A quantity in every basin, (M, points), and its slopes (M, points, k): by the coordinates, and by how the basins
    differ, which is the same in all.
    """
    each = [basin.slopes(quantity) for basin in found]
    values, most = np.stack([value for value, _ in each]), max(slope.shape[1] for _, slope in each)
    own = np.stack([np.pad(slope, ((0, 0), (0, most - slope.shape[1]))) for _, slope in each])
    share = np.array([basin.share for basin in found])
    apart = np.sqrt(share) * (values - share @ values).T
    return values, np.concatenate([own, np.broadcast_to(apart, (len(found), *apart.shape))], axis=2)


def trunk_correlation(residuals: Array, trunk: np.ndarray, expected: float = 0.5, pairs: float = 10.0) -> float:
    """Correlation of the errors of two runs of one trunk, between 0 and 0.9.

    A mean over pairs, shrunk to `expected` as if so many `pairs` had shown that.
    """
    _, member = by_group(trunk)
    sums, squares = np.bincount(member, residuals), np.bincount(member, residuals**2)
    counts = np.bincount(member)
    found = float((sums**2 - squares).sum() / 2.0)  # of the products of all pairs
    scale = max(float((residuals**2).mean()), LEAST_NOISE**2)
    number = float((counts * (counts - 1) / 2).sum())
    return float(np.clip((found / scale + pairs * expected) / (number + pairs), 0.0, 0.9))


@dataclass(frozen=True)
class Candidates:
    """Runs that could be bought, arrays (k,): inputs of the laws by name, flops, branch_flops, size (the run's whole
    FLOPs), and trunk (a label).

    `flops` is what a run costs given what is there, and `branch_flops` what is left of it where a longer run of the
    same trunk is bought too and makes its first steps.
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
        """FLOPs (k,) that each candidate adds to a batch: the longest run of a trunk pays for it, the others branch."""
        cost = self.flops.copy()
        for trunk, longest in self._longest(chosen).items():
            reach, mates = self.size[longest], (self.flops > self.branch_flops) & (self.trunk == trunk)
            shorter, longer = mates & (reach > self.size), mates & (reach < self.size)
            cost[shorter] = self.branch_flops[shorter]
            cost[longer] -= self.flops[longest] - self.branch_flops[longest]
        return cost

    def cost(self, chosen: list[int]) -> float:
        """FLOPs of a batch."""
        longest = set(self._longest(chosen).values())
        pays = [self.flops[i] if i in longest else min(self.flops[i], self.branch_flops[i]) for i in chosen]
        return float(sum(pays))

    def _longest(self, chosen: list[int]) -> dict[str, int]:
        """The run of each trunk in a batch that makes its first steps for the others."""
        found: dict[str, int] = {}
        for i in chosen:
            trunk, makes = self.trunk[i], self.flops[i] > self.branch_flops[i]
            if makes and (trunk not in found or self.size[i] > self.size[found[trunk]]):
                found[trunk] = i
        return found


@dataclass(frozen=True)
class Design:
    """A batch, best buy first: `chosen` are positions among the candidates.

    Of each: the log by which it narrows what is asked given those before it, the FLOPs that it adds, and whether it
    checks the law's form, being larger than any run that is done. `before` and `after` are the standard deviations of
    what is asked, "loss" or "N", without and with the batch.
    """

    chosen: list[int]
    gains: list[float]
    flops: list[float]
    check: list[bool]
    before: dict[str, float]
    after: dict[str, float]

    def narrowed(self, quantity: str, estimate: float, interval: tuple[float, float]) -> tuple[float, float]:
        """The interval of "loss" or "N" expected after the batch: each end's log distance shrinks as the width does."""
        ratio = self.after[quantity] / self.before[quantity]
        low, high = (float(estimate * (end / estimate) ** ratio) for end in interval)
        return low, high


class Buyer:
    """Chooses batches for one question from one list of candidates."""

    def __init__(self, question: Question, pool: Candidates) -> None:
        self.pool, self.question = pool, question
        labels = question.labels(pool.trunk)
        self.place = np.array([labels.get(str(name), -1) for name in pool.trunk])
        _, self.slopes = over(question.basins, log_losses(pool.inputs))
        beliefs, q = question.beliefs(labels), question
        # Each kind of what is asked counts once, in units of what is not known of it yet.
        variance = beliefs.variances() + q.drift(q.reach)
        self.scale = np.array([1.0 / np.sqrt(variance[q.kinds == kind].sum()) for kind in q.kinds])
        beliefs.goals *= self.scale[:, None]
        self.beliefs = beliefs

    def buy(self, budget: float, max_runs: int | None = None) -> Design:
        """The batch for so many FLOPs.

        Raises InputError where the budget is no positive number, or pays for no candidate.
        """
        (budget,) = positive("budget", [budget])
        if self.pool.flops.min() > budget:
            least = self.pool.flops.min()
            raise InputError(
                f"budget is {budget:.3g} FLOPs; the cheapest run costs {least:.3g}, so give at least that."
            )
        most = len(self.pool) if max_runs is None else max_runs
        found = [self._exchange(*self._grow([], budget, most, power), budget, most) for power in POWERS]
        return self._told(min(found, key=lambda chosen: self.value(self.with_beliefs(chosen), chosen)))

    def with_beliefs(self, chosen: list[int]) -> Beliefs:
        """What will be believed once these runs are done."""
        beliefs = self.beliefs.copy()
        for i in chosen:
            beliefs.observe(self.slopes[:, i], self.place[i])
        return beliefs

    def value(self, beliefs: Beliefs, chosen: list[int]) -> float:
        """The expected squared error of what is asked, over what it is without any batch."""
        return float(beliefs.variances().sum() + self._drift(self._reach(chosen))) / len(set(self.question.kinds))

    def worth(self, beliefs: Beliefs, chosen: list[int]) -> Array:
        """By how much each candidate lowers the squared error (unscaled by kinds) beside a batch, (k,)."""
        reach = self._reach(chosen)
        drift = self._drift(np.maximum(self.pool.size, reach))
        return np.asarray(beliefs.falls(self.slopes, self.place) + self._drift(reach) - drift)

    def _reach(self, chosen: list[int]) -> float:
        return max([self.question.reach, *self.pool.size[chosen]])

    def _drift(self, reach: Any) -> Any:
        return self.question.drift(reach) @ self.scale**2

    def _grow(self, chosen: list[int], budget: float, most: int, power: float) -> tuple[list[int], Beliefs]:
        beliefs = self.with_beliefs(chosen)
        spent = self.pool.cost(chosen)
        free = np.ones(len(self.pool), dtype=bool)
        free[chosen] = False
        while len(chosen) < most:
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

    def _exchange(self, chosen: list[int], beliefs: Beliefs, budget: float, most: int) -> list[int]:
        """Fedorov's exchanges: take a run back, buy the best that can then be paid, and whatever else fits."""
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
                if len(rest) < most:
                    rest, trial = self._grow(rest, budget, most, REFILL)
                chosen, beliefs, improved = rest, trial, True
            if not improved:
                break
        return chosen

    def _told(self, chosen: list[int]) -> Design:
        """The batch in order of worth per FLOP, each run given those before it."""
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
        """Standard deviations of what is asked, by kind."""
        q = self.question
        variance = beliefs.variances() / self.scale**2 + q.drift(self._reach(chosen))
        return {str(kind): float(np.sqrt(variance[q.kinds == kind].mean())) for kind in np.unique(q.kinds)}
