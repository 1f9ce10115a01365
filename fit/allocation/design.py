"""Which runs to buy next: the batch that most narrows what a law says of a large budget, within a budget of FLOPs.

The mean log width of log L*(C) and log N*(C) at the target is minimised: a c-optimal design, Sigma = (J' W J +
prior)^-1 from slopes J of log loss by (log E, log a, alpha, log b, beta), a and b being the terms at the middle of the
runs. Every gain is an average over bootstrap draws (a Bayesian design). Each trunk has an error of its own. Batches are
grown by gain / FLOPs^p for several p, improved by exchanges, and the best is taken. A c-optimal design cannot see that
the law's *form* is wrong, so a share goes to the largest affordable runs near the optimum.

Fedorov 1972, Theory of Optimal Experiments (exchanges); Chaloner and Verdinelli 1995, Bayesian experimental design: a
review, section 4 (nonlinear models, c-optimality).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Array, InputError, positive, same_length
from ..uncertainty import by_group
from .allocation import optimum

# Standard deviations of the prior about each draw, in (log E, log a, alpha, log b, beta): far wider than any fit.
PRIOR = np.array([1.0, 1.5, 0.3, 1.5, 0.3])
LEAST_EXPONENT = 0.02  # a draw with a flatter term has no optimum worth designing for
LEAST_NOISE = 1e-5  # in log loss; runs that lie on the law to rounding
DRAWS = 32  # of the law's bootstrap, over which a gain is averaged
POWERS = (1.0, 0.7, 0.4, 0.0)  # of FLOPs in gain / FLOPs^p; 0 takes the largest gain that can be paid
PASSES = 6  # of exchanges over a batch, at most; few change anything after the third
CHECK_SHARE = 0.2  # of the budget, for runs that check the law's form
FIRST_CHECK = 0.5  # of the budget, that the first of them may cost where the share pays for none
CHECK_FLOPS = 0.5  # of the largest C, that each of them has at least
CHECK_SIZE = 2.0  # factor by which their N may be farther off N*(C) than that of the nearest such run
REFILL = 0.7  # the p by which what an exchange leaves over is spent


@dataclass(frozen=True)
class Widths:
    """Standard deviations of log L* and log N* at the target: geometric means over draws."""

    loss: float
    N: float


class Beliefs:
    """Gaussian beliefs about k coordinates of a law and the errors of T trunks, linearised at M draws.

    covariance (M, k + T, k + T); goals (M, 2, k), slopes of log L* and log N*. Runs come and go by rank-one updates.
    """

    def __init__(self, goals: Array, prior: Array, trunks: int, shared: float, own: float) -> None:
        M, _, k = goals.shape
        diagonal = np.concatenate([prior**2, np.full(trunks, shared)])
        self.k, self.own, self.shared = k, own, shared
        self.goals = np.concatenate([goals, np.zeros((M, 2, trunks))], axis=2)
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
        """Of log L* and log N*, (M, 2)."""
        return np.maximum(np.einsum("mqi,mij,mqj->mq", self.goals, self.covariance, self.goals), 1e-300)

    def criterion(self) -> float:
        """Mean log width of the two, over draws."""
        return float(0.5 * np.log(self.variances()).mean())

    def widths(self) -> Widths:
        loss, size = np.exp(0.5 * np.log(self.variances()).mean(axis=0))
        return Widths(float(loss), float(size))

    def gains(self, slopes: Array, trunks: np.ndarray) -> Array:
        """By how much each of K runs, slopes (M, K, k) on trunks (K,), would lower the criterion, (K,)."""
        k, place = self.k, self.k + trunks
        towards = np.einsum("mqi,mij->mqj", self.goals, self.covariance)
        pull = np.einsum("mqi,mKi->mqK", towards[:, :, :k], slopes) + towards[:, :, place]
        inner = self.covariance[:, :k, :k]
        variance = (np.matmul(slopes, inner) * slopes).sum(axis=2) + self.own
        variance += 2.0 * (slopes * self.covariance[:, :k, place].transpose(0, 2, 1)).sum(axis=2)
        variance += self.covariance[:, place, place]
        left = 1.0 - pull**2 / (variance[:, None, :] * self.variances()[:, :, None])
        return np.asarray(-0.5 * np.log(np.maximum(left, 1e-12)).mean(axis=(0, 1)))


@dataclass(frozen=True)
class Question:
    """What is asked: a fitted and bootstrapped law, and the target in FLOPs.

    trunk (n,): labels of the law's rows; noise: standard deviation of one run's log loss; correlation: of the errors of
    two runs of one trunk.
    """

    law: Any
    target_flops: float
    trunk: np.ndarray
    noise: float
    correlation: float

    @classmethod
    def of(cls, law: Any, target_flops: float, trunk: Any = None, correlation: float | None = None) -> Question:
        """Noise, and the correlation where it is not given, come from the residuals.

        Raises InputError where the law has no draws or another form, or the target is no positive number.
        """
        if getattr(law, "form", None) != "chinchilla":
            raise InputError("a design needs the law E + A/N^alpha + B/D^beta; other forms are not known to it.")
        law._bootstrapped()
        (target,) = positive("target_flops", [target_flops])
        labels = np.arange(len(law.weight_)) if trunk is None else np.asarray(trunk)
        if len(labels) != len(law.weight_):
            raise InputError(f"trunk has {len(labels)} labels and the law {len(law.weight_)} rows; each needs one.")
        if correlation is None:
            correlation = trunk_correlation(law.residuals(), labels)
        if not 0.0 <= correlation < 1.0:
            raise InputError(f"correlation is {correlation}; at least 0 and below 1 is expected.")
        return cls(law, float(target), labels, max(law.residual_scale_, LEAST_NOISE), correlation)


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


class Linear:
    """Slopes of log loss and of the answers at M draws of a law, in its free coordinates."""

    def __init__(self, question: Question, draws: int, seed: int) -> None:
        law = question.law
        c = law._bootstrapped()
        exists = (c["alpha"] > LEAST_EXPONENT) & (c["beta"] > LEAST_EXPONENT) & (c["A"] > 0) & (c["B"] > 0)
        if not exists.any():
            raise InputError(
                "no draw of the law has an optimum (a term is flat or gone in all); add runs of other N and D."
            )
        places = np.random.default_rng(seed).permutation(np.flatnonzero(exists))[:draws]
        self.constants = {name: c[name][places] for name in ("E", "A", "B", "alpha", "beta")}
        used = law.weight_ > 0
        self.n0, self.d0 = (float(np.log(law.data_[name][used]).mean()) for name in ("N", "D"))
        # How (log E, log a, alpha, log b, beta) follow from the free coordinates, (5, k).
        full = np.eye(5)
        full[:, 2] += full[:, 4] * law.tied
        self.basis = full[:, int(law.E is not None) : 4 if law.tied else 5]
        self.prior = np.sqrt((PRIOR**2) @ self.basis)  # each free coordinate moves one constant, or both exponents
        if law.tied:
            self.prior[self.basis[2].argmax()] = PRIOR[2]

    def slopes(self, N: Array, D: Array) -> Array:
        """Of log loss at points (n,) or (M, n) by each free coordinate, (M, n, k)."""
        c = {name: values[:, None] for name, values in self.constants.items()}
        x, y = np.log(N), np.log(D)
        with np.errstate(over="ignore"):
            terms = [c["E"] + 0.0 * x, c["A"] * np.exp(-c["alpha"] * x), c["B"] * np.exp(-c["beta"] * y)]
        total = terms[0] + terms[1] + terms[2]
        e, a, b = (term / total for term in terms)
        full = np.stack([e, a, -a * (x - self.n0), b, -b * (y - self.d0)], axis=2)
        return np.asarray(full @ self.basis)

    def goals(self, target: float) -> Array:
        """Slopes of log L* and log N* at the target, (M, 2, k)."""
        c = self.constants
        N, D, _ = optimum(target, c)
        loss = self.slopes(N[:, None], D[:, None])[:, 0]
        alpha, beta, both = c["alpha"], c["beta"], c["alpha"] + c["beta"]
        by_alpha = (1.0 / alpha - (np.log(N) - self.n0)) / both
        by_beta = (-1.0 / beta + (np.log(D) - self.d0)) / both
        size = np.stack([np.zeros_like(both), 1.0 / both, by_alpha, -1.0 / both, by_beta], axis=1) @ self.basis
        return np.stack([loss, size], axis=1)


@dataclass(frozen=True)
class Candidates:
    """Runs that could be bought, arrays (k,): N, D, flops, branch_flops, size (the run's whole FLOPs), and trunk (a
    label).

    `flops` is what a run costs given what is there, and `branch_flops` what is left of it where a longer run of the
    same trunk is bought too and makes its first steps.
    """

    N: Array
    D: Array
    flops: Array
    branch_flops: Array
    size: Array
    trunk: np.ndarray

    def __post_init__(self) -> None:
        columns = {name: positive(name, getattr(self, name)) for name in ("N", "D", "flops", "branch_flops", "size")}
        same_length(**columns, trunk=self.trunk)

    def __len__(self) -> int:
        return len(self.N)

    def extra(self, chosen: list[int]) -> Array:
        """FLOPs (k,) that each candidate adds to a batch: the longest run of a trunk pays for it, the others branch."""
        cost = self.flops.copy()
        for trunk, longest in self._longest(chosen).items():
            reach, mates = self.D[longest], (self.flops > self.branch_flops) & (self.trunk == trunk)
            shorter, longer = mates & (reach > self.D), mates & (reach < self.D)
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
            if makes and (trunk not in found or self.D[i] > self.D[found[trunk]]):
                found[trunk] = i
        return found


@dataclass(frozen=True)
class Design:
    """A batch, best buy first: `chosen` are positions among the candidates.

    Of each: by how much it lowers the mean log width given those before it, the FLOPs that it adds, and whether it
    checks the law's form. `before` and `after` are the widths without and with the batch.
    """

    chosen: list[int]
    gains: list[float]
    flops: list[float]
    check: list[bool]
    before: Widths
    after: Widths

    def narrowed(self, quantity: str, estimate: float, interval: tuple[float, float]) -> tuple[float, float]:
        """The interval of "loss" or "N" expected after the batch: each end's log distance shrinks as the width does."""
        ratio = getattr(self.after, quantity) / getattr(self.before, quantity)
        low, high = (float(estimate * (end / estimate) ** ratio) for end in interval)
        return low, high


class Buyer:
    """Chooses batches for one question from one list of candidates."""

    def __init__(self, question: Question, pool: Candidates, draws: int = DRAWS, seed: int = 0) -> None:
        self.pool, self.question = pool, question
        self.linear = linear = Linear(question, draws, seed)
        shared = question.correlation * question.noise**2
        names, self.place = by_group(pool.trunk)
        labels = {str(name): i for i, name in enumerate(names)}
        for label, count in zip(*np.unique(question.trunk.astype(str), return_counts=True), strict=True):
            if count > 1:
                labels.setdefault(str(label), len(labels))
        own = question.noise**2 - shared
        self.beliefs = Beliefs(linear.goals(question.target_flops), linear.prior, len(labels), shared, own)
        law = question.law
        slopes = linear.slopes(law.data_["N"], law.data_["D"])
        for row in np.flatnonzero(law.weight_ > 0):
            trunk = labels.get(str(question.trunk[row]), -1)
            self.beliefs.observe(slopes[:, row], trunk, float(law.weight_[row]))
        self.slopes = linear.slopes(pool.N, pool.D)
        self.before = self.beliefs.widths()

    def buy(self, budget: float, max_runs: int | None = None, check_share: float = CHECK_SHARE) -> Design:
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
        locked = self._checks(budget, check_share, most)
        found = []
        for power in POWERS:
            chosen, beliefs = self._grow(list(locked), budget, most, power)
            found.append(self._exchange(chosen, beliefs, budget, most, len(locked)))
        chosen, _ = min(found, key=lambda item: item[1])
        return self._told(chosen, set(locked))

    def with_beliefs(self, chosen: list[int]) -> Beliefs:
        """What will be believed once these runs are done."""
        beliefs = self.beliefs.copy()
        for i in chosen:
            beliefs.observe(self.slopes[:, i], self.place[i])
        return beliefs

    def _checks(self, budget: float, share: float, most: int) -> list[int]:
        """Runs of nearly the largest C near its optimum, for `share` of the budget; one, where half of it pays that."""
        pool, data = self.pool, self.question.law.data_
        payable = pool.flops <= max(share, FIRST_CHECK) * budget
        if share <= 0 or not payable.any():
            return []
        reach = max(float(pool.size[payable].max()), float((6.0 * data["N"] * data["D"]).max()))
        draws = {name: values[:, None] for name, values in self.linear.constants.items()}
        best = np.median(optimum(pool.size, draws)[0], axis=0)
        off, large = np.abs(np.log(pool.N / best)), payable & (pool.size >= CHECK_FLOPS * reach)
        allowed = large & (off <= off[large].min(initial=np.inf) + np.log(CHECK_SIZE))
        chosen: list[int] = []
        beliefs = self.beliefs.copy()
        while len(chosen) < most:
            part = share if chosen else max(share, FIRST_CHECK)
            fits = allowed & (pool.extra(chosen) <= part * budget - pool.cost(chosen))
            if not fits.any():
                break
            pick = int(np.where(fits, beliefs.gains(self.slopes, self.place), -np.inf).argmax())
            chosen.append(pick)
            allowed[pick] = False
            beliefs.observe(self.slopes[:, pick], self.place[pick])
        return chosen

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
            worth = beliefs.gains(self.slopes, self.place) / np.maximum(cost, 1e-9 * budget) ** power
            pick = int(np.where(fits, worth, -np.inf).argmax())
            chosen.append(pick)
            free[pick] = False
            spent += float(cost[pick])
            beliefs.observe(self.slopes[:, pick], self.place[pick])
        return chosen, beliefs

    def _exchange(
        self, chosen: list[int], beliefs: Beliefs, budget: float, most: int, locked: int
    ) -> tuple[list[int], float]:
        """Fedorov's exchanges: take a run back, buy the best that can then be paid, and whatever else fits."""
        value = beliefs.criterion()
        for _ in range(PASSES):
            improved = False
            for place in range(len(chosen) - 1, locked - 1, -1):
                out = chosen[place]
                rest = chosen[:place] + chosen[place + 1 :]
                trial = beliefs.copy()
                trial.observe(self.slopes[:, out], self.place[out], -1.0)
                cost = self.pool.extra(rest)
                fits = cost <= budget - self.pool.cost(rest)
                fits[rest] = False
                gains = np.where(fits, trial.gains(self.slopes, self.place), -np.inf)
                pick = int(gains.argmax())
                if pick == out or not np.isfinite(gains[pick]) or gains[pick] <= gains[out] + 1e-6:
                    continue
                trial.observe(self.slopes[:, pick], self.place[pick])
                rest.append(pick)
                if len(rest) < most:
                    rest, trial = self._grow(rest, budget, most, REFILL)
                chosen, beliefs, value, improved = rest, trial, trial.criterion(), True
            if not improved:
                break
        return chosen, value

    def _told(self, chosen: list[int], locked: set[int]) -> Design:
        """The batch in order of gain per FLOP, each run given those before it."""
        beliefs, left = self.beliefs.copy(), list(chosen)
        order: list[int] = []
        gains, flops = [], []
        while left:
            cost = self.pool.extra(order)[left]
            worth = beliefs.gains(self.slopes[:, left], self.place[left])
            best = int((worth / np.maximum(cost, 1e-9 * cost.max())).argmax())
            gains.append(float(worth[best]))
            flops.append(float(cost[best]))
            order.append(left.pop(best))
            beliefs.observe(self.slopes[:, order[-1]], self.place[order[-1]])
        return Design(order, gains, flops, [i in locked for i in order], self.before, beliefs.widths())
